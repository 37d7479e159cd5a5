"""Cases of kernels/medusa_heads.py for kernel_proof.py."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from kernel_proof import Case

from draftsmith.kernels.medusa_heads import medusa_heads, medusa_heads_reference, medusa_heads_triton


def cases(dtype: torch.dtype) -> Iterator[Case]:
    torch.manual_seed(0)
    for rows, heads, width in ((1, 4, 33), (19, 3, 64), (0, 2, 16)):
        x_MD = torch.randn(rows, width).to(dtype)
        weight_KDD = (torch.randn(heads, width, width) / width**0.5).to(dtype)
        bias_KD = torch.randn(heads, width).to(dtype)
        inputs = (x_MD, weight_KDD, bias_KD)
        # fp32: sums of `width` terms in another order; fp16: an ulp of values up to 8, rounded three times
        atol = 5e-6 if dtype == torch.float32 else 1.2e-2
        yield Case(
            f"{rows} states of {width}, {heads} heads",
            lambda inputs=inputs: (medusa_heads(*inputs),),
            lambda inputs=inputs: (medusa_heads_reference(*inputs),),
            atol,
        )
        yield Case(
            f"{rows} states of {width}, {heads} heads, small tiles",
            lambda inputs=inputs: (medusa_heads_triton(*inputs, 16, 32, 32),),
            lambda inputs=inputs: (medusa_heads_reference(*inputs),),
            atol,
        )
