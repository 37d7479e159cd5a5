"""Cases of kernels/tree_attention.py for kernel_proof.py."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager
from unittest.mock import patch

import numpy as np
import torch
from kernel_proof import Case
from torch import Tensor

from draftsmith.kernels.tree_attention import Sight, pack, reference, tree_attention


def grown(b: int, n: int) -> Tensor:
    """Random trees: what the rows see, bool [B, M, M]. About one node in five is unused."""
    m = n + 1
    see_BMM = torch.eye(m, dtype=torch.bool).repeat(b, 1, 1)
    for row in range(b):
        used = [0]
        for node in range(1, m):
            parent = used[int(torch.randint(len(used), ()))]
            if torch.rand(()) < 0.8:
                see_BMM[row, node] |= see_BMM[row, parent]
                used.append(node)
    return see_BMM


def inputs(b: int, m: int, h: int, g: int, d: int, slots: int, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    """q, and k and v as one layer of a cache has them; q with heads before rows in memory, as projections are turned."""
    kv = torch.randn(2, b, g, slots, d + 3).to(dtype)[..., :d]
    return torch.randn(b, h, m, d).to(dtype).transpose(1, 2), kv[0], kv[1]


def cases(dtype: torch.dtype) -> Iterator[Case]:
    torch.manual_seed(0)
    # fp32: sums of 300 terms in another order. fp16: weights are rounded to 2**-11 before they meet the values.
    atol = 5e-6 if dtype == torch.float32 else 2e-3

    def compared(name: str, lengths: list[int], n: int, h: int, g: int, d: int) -> Case:
        b, m = len(lengths), n + 1
        see_BMM = grown(b, n)
        slots = max(lengths) + m + 3
        q, k, v = inputs(b, m, h, g, d, slots, dtype)
        sight = Sight(torch.tensor(lengths), pack(see_BMM), m)
        for row, length in enumerate(lengths):  # what nobody can see is not read
            k[row, :, length + m :] = v[row, :, length + m :] = torch.nan
        still = [x.double().nan_to_num() for x in (q, k, v)]
        return Case(
            name, lambda: (tree_attention(q, k, v, sight, 0.3),), lambda: (reference(*still, sight, 0.3),), atol
        )

    yield compared("trees of 4 nodes, 3 heads per key", [0, 130, 300], 4, 6, 2, 40)
    yield compared("an anchor alone", [0, 1, 64, 257], 0, 2, 2, 33)
    yield compared("64 nodes", [70], 64, 1, 1, 32)
    yield compared("8 heads per key", [45], 2, 8, 1, 32)
    yield compared("one head per key, wide", [40], 3, 2, 2, 256)
    yield part_of_the_tail(dtype, atol)
    yield nothing_to_see(dtype)
    yield chain_rows(dtype)


def part_of_the_tail(dtype: torch.dtype, atol: float) -> Case:
    """3 rows of a tail of 7 slots, which see whatever they are told to, near the end of the cache."""
    q, k, v = inputs(2, 3, 4, 2, 16, 57, dtype)
    sight = Sight(torch.tensor([50, 9]), pack(torch.rand(2, 3, 7) < 0.5), 7)
    return Case(
        "rows in the middle of the tail",
        lambda: (tree_attention(q, k, v, sight),),
        lambda: (reference(q.double(), k.double(), v.double(), sight),),
        atol,
    )


def nothing_to_see(dtype: torch.dtype) -> Case:
    q, k, v = inputs(1, 2, 2, 1, 16, 20, dtype)
    sight = Sight(torch.tensor([0]), torch.tensor([[[0], [0]]]), 2)
    return Case(
        "rows that see nothing", lambda: (tree_attention(q, k, v, sight),), lambda: (torch.zeros(1, 2, 2, 16),), 0
    )


def rows_apart() -> AbstractContextManager[object]:
    """The interpreter's matrix products row by row, so that a row is the same at every place of a tile, as it is on a GPU.
    (Here the library that forms them rounds rows at the edges of its own tiles otherwise.)"""
    whole = np.matmul
    return patch.object(np, "matmul", lambda a, b, dtype: np.stack([whole(x[None], b, dtype=dtype)[0] for x in a]))


def chain_rows(dtype: torch.dtype) -> Case:
    """Bit for bit: a row of a chain of 12 is the same token decoded alone, also across parts of the keys."""
    q, k, v = inputs(1, 13, 6, 2, 32, 270, dtype)
    steps, length = torch.arange(13), 250

    def alone(row: int) -> Tensor:
        sight = Sight(torch.tensor([length + row]), torch.ones(1, 1, 1, dtype=torch.int64), 1)
        with rows_apart():
            return tree_attention(q[:, row : row + 1], k, v, sight)

    def together() -> Tensor:
        with rows_apart():
            return tree_attention(q, k, v, sight)[:, some]

    some = [0, 4, 5, 6, 12]  # of several tiles, before and behind slot 256
    sight = Sight(torch.tensor([length]), pack((steps <= steps[:, None])[None]), 13)
    return Case(
        "rows of a chain, bit for bit",
        lambda: (together(),),
        lambda: (torch.cat([alone(row) for row in some], 1),),
        0,
    )
