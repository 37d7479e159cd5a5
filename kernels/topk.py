"""The k largest logits of a row with their log-sum-exp, k <= 32, without a sort or a softmax of all of them.

What a drafter needs: softmax keeps the order, so the likeliest tokens are those of the largest logits, and the
log-probability of one is its logit less the log-sum-exp. Equal values rank by index, the lower first, as in a stable
sort; `torch.topk` leaves that open. NaN is above all, and a row with one has NaN for its log-sum-exp.

The kernel has two stages, for which each logit is read once: the best of every tile of a row by bitonic top-k of 64-bit
keys (value, then index reversed: no two are equal), then the best of those. Tiles depend on V and k alone, so a row's
result does not depend on how many rows there are.

Tests: pytest tests/test_kernels.py -k topk; tests/test_small_kernels.py
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from .jit import Build, jit, runs_on, tl, triton

MOST = 32  # largest k
TILE = 1024  # logits of a tile, at least
KEYS = 4096  # keys that the second stage takes in, at most


class TopK(NamedTuple):
    """Of R rows, best first; fp32, fp64 for fp64 logits."""

    values_Rk: Tensor
    ids_Rk: Tensor  # int64
    lse_R: Tensor  # log-sum-exp of the whole row


def topk_reference(logits_RV: Tensor, k: int) -> TopK:
    """The plain form."""
    x_RV = logits_RV.to(torch.promote_types(logits_RV.dtype, torch.float32))
    best = x_RV.topk(min(k + 1, x_RV.shape[1]), dim=-1)  # one more than asked for: is there an equal beyond the edge?
    ids_Rk, order_Rk = best.indices[:, :k].sort(dim=-1)
    values_Rk, order_Rk = best.values.gather(1, order_Rk).sort(dim=-1, descending=True, stable=True)
    ids_Rk = ids_Rk.gather(1, order_Rk)
    crowded_R = (best.values[:, k:] == best.values[:, k - 1 : k]).any(-1)
    if bool(crowded_R.any()):  # which of the equals `topk` took is open
        ids_Rk[crowded_R] = x_RV[crowded_R].sort(dim=-1, descending=True, stable=True).indices[:, :k]
    return TopK(values_Rk, ids_Rk, x_RV.logsumexp(-1))


@jit
def topk_tile_kernel(
    x_ptr, keys_ptr, max_ptr, sum_ptr, V, stride_row, stride_col, TILES, K: tl.constexpr, TILE: tl.constexpr
):
    """Stage 1, grid (rows, tiles): a tile's K best keys, its maximum and its sum of exponentials."""
    row, tile = tl.program_id(0).to(tl.int64), tl.program_id(1)
    column = tile * TILE + tl.arange(0, TILE)
    inside = column < V
    x = tl.load(x_ptr + row * stride_row + column.to(tl.int64) * stride_col, mask=inside, other=-float("inf"))
    x = x.to(tl.float32)
    x = tl.where(x == x, x, float("nan"))  # of either sign: the largest, as in torch.topk
    best = tl.max(x, 0)
    shift = tl.where(tl.abs(best) == float("inf"), 0.0, best)
    at = row * TILES + tile
    tl.store(max_ptr + at, best)
    tl.store(sum_ptr + at, tl.sum(tl.exp(x - shift), 0))
    bits = tl.where(x == 0, 0.0, x).to(tl.int32, bitcast=True)  # -0 is no less than 0
    ordered = bits ^ ((bits >> 31) & 0x7FFFFFFF)  # integers in the order of the floats
    key = (ordered.to(tl.int64) << 32) | (0x7FFFFFFF - column).to(tl.int64)
    key = tl.where(inside, key, -0x8000000000000000)
    tl.store(keys_ptr + at * K + tl.arange(0, K), tl.topk(key, K))


@jit
def topk_merge_kernel(
    keys_ptr,
    max_ptr,
    sum_ptr,
    values_ptr,
    ids_ptr,
    lse_ptr,
    TILES,
    k,
    K: tl.constexpr,
    TILES_UP: tl.constexpr,
):
    """Stage 2, grid (rows,): the best of the tiles' keys, and the log of the sum of their sums."""
    row = tl.program_id(0).to(tl.int64)
    place = tl.arange(0, TILES_UP * K)
    key = tl.load(keys_ptr + row * TILES * K + place, mask=place < TILES * K, other=-0x8000000000000000)
    key = tl.topk(key, K)
    ordered = (key >> 32).to(tl.int32)
    value = (ordered ^ ((ordered >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)
    rank = tl.arange(0, K)
    tl.store(values_ptr + row * k + rank, value, mask=rank < k)
    tl.store(ids_ptr + row * k + rank, 0x7FFFFFFF - (key & 0x7FFFFFFF), mask=rank < k)
    tile = tl.arange(0, TILES_UP)
    peak = tl.load(max_ptr + row * TILES + tile, mask=tile < TILES, other=-float("inf"))
    part = tl.load(sum_ptr + row * TILES + tile, mask=tile < TILES, other=0.0)
    best = tl.max(peak, 0)
    shift = tl.where(tl.abs(best) == float("inf"), 0.0, best)
    own = tl.where(tl.abs(peak) == float("inf"), 0.0, peak)
    tl.store(lse_ptr + row, shift + tl.log(tl.sum(tl.where(part != 0, part * tl.exp(own - shift), 0.0), 0)))


BUILDS = (
    Build(
        topk_tile_kernel,
        {"x_ptr": "*bf16", "keys_ptr": "*i64", "max_ptr": "*fp32", "sum_ptr": "*fp32", "V": "i32", "TILES": "i32"}
        | {"stride_row": "i32", "stride_col": "i32"},
        {"K": MOST, "TILE": TILE},
    ),
    Build(
        topk_merge_kernel,
        {"keys_ptr": "*i64", "max_ptr": "*fp32", "sum_ptr": "*fp32", "values_ptr": "*fp32", "ids_ptr": "*i64"}
        | {"lse_ptr": "*fp32", "TILES": "i32", "k": "i32"},
        {"K": MOST, "TILES_UP": KEYS // MOST},
        warps=8,
    ),
)


def tiles_of(vocab: int, k: int, least: int = TILE) -> tuple[int, int, int]:
    """(keys per tile, logits per tile, tiles) for k of `vocab` logits, at least `least` of them per tile."""
    keys = max(2, 1 << (k - 1).bit_length())
    tile = max(least, keys, 1 << (math.ceil(vocab * keys / KEYS) - 1).bit_length())
    return keys, tile, math.ceil(vocab / tile)


def topk_triton(logits_RV: Tensor, k: int, tile: int = TILE) -> TopK:
    """The kernel; strides of any kind, at least `tile` logits per tile."""
    rows, vocab = logits_RV.shape
    keys, tile, tiles = tiles_of(vocab, k, tile)

    def new(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
        return torch.empty(shape, dtype=dtype, device=logits_RV.device)

    out = TopK(new(rows, k), new(rows, k, dtype=torch.int64), new(rows))
    key_RTK, max_RT, sum_RT = new(rows, tiles, keys, dtype=torch.int64), new(rows, tiles), new(rows, tiles)
    if rows:
        topk_tile_kernel[rows, tiles](
            logits_RV, key_RTK, max_RT, sum_RT, vocab, *logits_RV.stride(), tiles, K=keys, TILE=tile
        )
        up = triton.next_power_of_2(tiles)
        topk_merge_kernel[(rows,)](key_RTK, max_RT, sum_RT, *out, tiles, k, K=keys, TILES_UP=up, num_warps=8)
    return out


def topk(logits_RV: Tensor, k: int) -> TopK:
    """The k largest logits of each row, their ids, and the row's log-sum-exp. On GPUs without gradients, which the plain
    form keeps.

    Raises ValueError for k outside 1 .. min(32, V).
    """
    if not 1 <= k <= min(MOST, logits_RV.shape[-1]):
        raise ValueError(f"topk: k={k} of {logits_RV.shape[-1]} logits, must lie in [1, {MOST}] and within the row")
    graded = torch.is_grad_enabled() and logits_RV.requires_grad
    if logits_RV.dtype != torch.float64 and not graded and runs_on(logits_RV):
        return topk_triton(logits_RV, k)
    return topk_reference(logits_RV, k)
