"""Cases of kernels/linear_loss.py for kernel_proof.py."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from kernel_proof import Case
from torch import Tensor

from draftsmith.kernels.linear_loss import linear_loss, reference


def cases(dtype: torch.dtype) -> Iterator[Case]:
    torch.manual_seed(0)
    hidden_TD, weight_WD = torch.randn(19, 21).to(dtype), torch.randn(101, 21).to(dtype)

    def want() -> tuple[Tensor, ...]:
        return reference(hidden_TD.double(), weight_WD.double())

    yield Case("log-sum-exp", lambda: linear_loss(hidden_TD, weight_WD), want, atol=1e-5)  # fp32 sums of 101 terms
