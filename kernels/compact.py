"""Keep a path through the tail of a key/value cache: its slots move to the front of the tail, in place.

A path ascends strictly, so its j-th slot is j or later: reading and writing in that order overwrites nothing that is
still to be read, and needs no second copy. One launch for all layers; a slot that stays is not touched.

Letters: C = 2 (keys, values), S slots, L length of a path. Test: pytest tests/test_kernels.py -k compact
"""

from __future__ import annotations

import torch
from torch import Tensor

from .jit import Build, jit, runs_on, tl


def reference(
    kv: Tensor, lengths_B: Tensor, path_BL: Tensor, counts_B: Tensor, positions_BS: Tensor | None = None
) -> None:
    """As `compact`, by one gather and one scatter."""
    slots = kv.shape[4]
    steps_L = torch.arange(path_BL.shape[1], device=kv.device)
    to_BL = (lengths_B[:, None] + steps_L).clamp(max=slots - 1)
    from_BL = torch.where(steps_L < counts_B[:, None], lengths_B[:, None] + path_BL, to_BL)
    shape = (*kv.shape[:4], path_BL.shape[1], kv.shape[5])
    moved = kv.gather(4, from_BL[:, None, :, None].expand(shape))
    kv.scatter_(4, to_BL[:, None, :, None].expand(shape), moved)
    if positions_BS is not None:
        positions_BS.scatter_(1, to_BL, positions_BS.gather(1, from_BL))
    lengths_B += counts_B


def by_row(
    kv: Tensor, lengths_B: Tensor, path_BL: Tensor, counts_B: Tensor, positions_BS: Tensor | None = None
) -> None:
    """As `compact`, by what the host reads of the paths: on a CPU quicker, since most slots stay where they are."""
    for row, (n, count, path) in enumerate(zip(lengths_B.tolist(), counts_B.tolist(), path_BL.tolist(), strict=True)):
        first = next((j for j in range(count) if path[j] != j), count)
        if first == count:
            continue
        source = torch.tensor(path[first:count], device=kv.device) + n
        kv[:, :, row, :, n + first : n + count] = kv[:, :, row].index_select(3, source)
        if positions_BS is not None:
            positions_BS[row, n + first : n + count] = positions_BS[row, source]
    lengths_B += counts_B


def compact(
    kv: Tensor, lengths_B: Tensor, path_BL: Tensor, counts_B: Tensor, positions_BS: Tensor | None = None
) -> None:
    """In place: slot `lengths_B + path_BL[b, j]` of every layer and head becomes slot `lengths_B + j`, for
    j < counts_B[b]; entries beyond are not read, and the path must ascend strictly up to there. `kv` [layers, 2, B, H,
    S, D]; `positions_BS` moves along; `lengths_B` (int64) grows by the counts."""
    if kv.stride(5) != 1 or not runs_on(kv, lengths_B):
        reference(kv, lengths_B, path_BL, counts_B, positions_BS)
        return
    layers, two, b, heads, _, width = kv.shape
    bd = 1 << (width - 1).bit_length()
    _move[(layers * two, b * heads)](
        kv,
        lengths_B.contiguous(),
        path_BL.contiguous(),
        counts_B.contiguous(),
        positions_BS,
        path_BL.shape[1],
        *kv.stride()[:5],
        0 if positions_BS is None else positions_BS.stride(0),
        H=heads,
        D=width,
        BD=bd,
        num_warps=1,
    )
    lengths_B += counts_B


@jit
def _move(
    kv,
    lengths,
    path,
    counts,
    positions,
    L,
    layer_s,
    c_s,
    b_s,
    h_s,
    s_s,
    positions_s,
    H: tl.constexpr,
    D: tl.constexpr,
    BD: tl.constexpr,
):
    """The slots of one layer, one of keys and values, one row and one head, in ascending order."""
    plane = tl.program_id(0).to(tl.int64)
    b = tl.program_id(1).to(tl.int64) // H
    h = tl.program_id(1).to(tl.int64) % H
    n = tl.load(lengths + b)
    d_D = tl.arange(0, BD)
    base = kv + (plane // 2) * layer_s + (plane % 2) * c_s + b * b_s + h * h_s + n * s_s
    for j in range(0, tl.load(counts + b).to(tl.int32)):
        source = tl.load(path + b * L + j)
        if source != j:
            x_D = tl.load(base + source * s_s + d_D, d_D < D, 0.0)
            tl.store(base + j * s_s + d_D, x_D, d_D < D)
            if positions is not None:  # noqa: SIM102 (decided when compiled)
                if plane + h == 0:
                    row = positions + b * positions_s + n
                    tl.store(row + j, tl.load(row + source))


_STRIDES = ("layer_s", "c_s", "b_s", "h_s", "s_s")
BUILDS = tuple(
    Build(
        _move,
        {"kv": "*bf16", "lengths": "*i64", "path": "*i64", "counts": "*i64", "positions": "*i64"}
        | dict.fromkeys(("L", "positions_s"), "i32")
        | dict.fromkeys(_STRIDES, "i64"),
        {"H": 8, "D": width, "BD": 1 << (width - 1).bit_length()},
        warps=1,
        aligned=_STRIDES,
    )
    for width in (80, 128)
)
