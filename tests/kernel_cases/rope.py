"""Cases of kernels/rope.py for kernel_proof.py."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from kernel_proof import Case
from torch import Tensor

from draftsmith.kernels.rope import rope_write, rope_write_reference


def cases(dtype: torch.dtype) -> Iterator[Case]:
    torch.manual_seed(0)
    h, g, s = 4, 2, 10
    for b, t, d in ((2, 3, 24), (1, 1, 64), (0, 3, 16)):
        rows = torch.randn(b, t, (h + 2 * g) * d).to(dtype)  # one product's output
        heads = [x.unflatten(-1, (-1, d)).transpose(1, 2) for x in rows.split([h * d, g * d, g * d], -1)]
        tables = [torch.randn(b or 1, t, d).to(dtype) for _ in "cs"]
        slots_BT = (torch.tensor([[5], [0]])[:b] + torch.arange(t)) if b else torch.zeros(0, t, dtype=torch.int64)
        memory = torch.randn(2, b, g, s, d).to(dtype)

        def by(
            form: Callable[..., Tensor],
            heads: Any = heads,
            tables: Any = tables,
            slots: Any = slots_BT,
            kv: Any = memory,
        ) -> tuple[Tensor, ...]:
            kv = kv.clone()
            return form(*heads, *(x.expand(len(heads[0]), -1, -1) for x in tables), kv[0], kv[1], slots), kv

        yield Case(
            f"{b} rows of {t} tokens, {d} channels",
            lambda by=by: by(rope_write),
            lambda by=by: by(rope_write_reference),
            atol=2e-6 if dtype == torch.float32 else 8e-3,  # an ulp of values up to 16
        )
