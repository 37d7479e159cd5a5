"""Cases of kernels/compact.py for kernel_proof.py: copies, so nothing may differ."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
from kernel_proof import Case
from torch import Tensor

from draftsmith.kernels.compact import compact, reference


def cases(dtype: torch.dtype) -> Iterator[Case]:
    torch.manual_seed(0)
    for name, step in (("paths through a tail", 1), ("strides", 2)):
        kv = torch.randn(2, 2, 5, 3 * step, 30, 20).to(dtype)[:, :, :, ::step, :, : 20 - 7 * step]
        positions_BS = torch.randint(99, (5, 30))
        lengths_B = torch.tensor([0, 4, 20, 11, 7])
        path_BL = torch.rand(5, 10).argsort(1)[:, :6].sort(1).values
        path_BL[3] = torch.arange(6)  # a chain: all stay
        counts_B = torch.tensor([6, 3, 6, 5, 0])

        def by(
            move: Callable[..., None],
            given: tuple[Tensor, ...] = (kv, lengths_B, path_BL, counts_B, positions_BS),
        ) -> tuple[Tensor, ...]:
            kv, lengths_B, path_BL, counts_B, positions_BS = given
            own = torch.empty_strided(kv.shape, kv.stride(), dtype=kv.dtype).copy_(kv)
            own_B, own_BS = lengths_B.clone(), positions_BS.clone()
            move(own, own_B, path_BL, counts_B, own_BS)
            without = own.clone()
            move(without, lengths_B.clone(), path_BL, counts_B)
            return own, own_B, own_BS, without

        yield Case(name, lambda by=by: by(compact), lambda by=by: by(reference), 0)
