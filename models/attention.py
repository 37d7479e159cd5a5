"""Attention of queries that each see one range of keys, without the scores of all pairs.

Training asks for it: a row sees its document up to itself. Query r sees the keys first_R[r] .. stop_R[r] - 1 (none
where stop_R <= first_R) and, beside them, keys of its own. Queries and keys are flat lists over the rows of a batch, so
that documents, not rows, are what is computed.

On CPUs the queries are cut into tiles of one document: keys that all of a tile see, and its tail, where each query sees
one more than the one before. Both go through PyTorch's flash attention; parts are joined by their log-sum-exps, and a
part's backward pass takes the joined output and log-sum-exp, which makes it exact (Liu et al., "Ring Attention",
arXiv:2310.01889, join blocks so). Tails with gaps, and devices and types without that kernel, take scores of at most TILE
queries at a time. On CUDA: flex attention with a mask of blocks made from the ranges. Memory is linear in queries and keys.

Test: pytest tests/test_attention.py
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import lru_cache
from itertools import pairwise
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

TILE = 128  # most queries whose scores are made at once; a block of flex attention
RUN = 32  # queries in a row, one key further each, that are worth a causal call
WIDEST = 4 * TILE  # keys of a tail with gaps

Own = Sequence[tuple[Tensor, Tensor]]


class Tile(NamedTuple):
    """Queries of one document, the keys that all of them see, and those that only later ones do; `causal`: as many as
    queries, query i sees i + 1 of them."""

    queries: slice
    keys: slice
    tail: slice
    causal: bool


class Ranges:
    """Who sees what: first_R, stop_R int64 [R] over N keys, queries of one document side by side, stops ascending in it.
    Made once for all layers and steps. `flex`: as a mask of flex attention; None = on CUDA."""

    def __init__(self, first_R: Tensor, stop_R: Tensor, keys: int, flex: bool | None = None) -> None:
        self.first_R, self.stop_R = first_R, stop_R.maximum(first_R)
        self.tiles: list[Tile] = []
        self.block: Any = None
        if not len(first_R):
            return
        if first_R.device.type == "cuda" if flex is None else flex:
            self.block = block_mask(self.first_R, self.stop_R, keys)
        else:
            self.tiles = tiles(self.first_R, self.stop_R, first_R.device.type == "cpu")


def tiles(first_R: Tensor, stop_R: Tensor, whole: bool) -> list[Tile]:
    """`whole`: runs are one tile each, however long."""
    step_R = (first_R.diff() == 0) & (stop_R.diff() == 1) & (stop_R > first_R)[:-1]
    cuts = [0, *(torch.nonzero(~step_R)[:, 0] + 1).tolist(), len(first_R)]
    first, stop = first_R.tolist(), stop_R.tolist()
    found: list[Tile] = []
    open_at: int | None = None  # of a tile with gaps

    def close(end: int) -> None:
        nonlocal open_at
        if open_at is not None:
            keys = slice(first[open_at], stop[open_at])
            found.append(Tile(slice(open_at, end), keys, slice(stop[open_at], stop[end - 1]), False))
        open_at = None

    for lo, hi in pairwise(cuts):
        if hi - lo >= RUN:
            close(lo)
            for at in range(lo, hi, hi - lo if whole else TILE):
                end = min(hi, at + (hi - lo if whole else TILE))
                found.append(
                    Tile(slice(at, end), slice(first[at], stop[at] - 1), slice(stop[at] - 1, stop[end - 1]), True)
                )
            continue
        for r in range(lo, hi):
            if open_at is not None and (
                first[r] != first[open_at] or r - open_at >= TILE or stop[r] - stop[open_at] > WIDEST
            ):
                close(r)
            open_at = r if open_at is None else open_at
    close(len(first))
    return found


def block_mask(first_R: Tensor, stop_R: Tensor, keys: int) -> Any:
    """Of flex attention, from the ranges of each block of queries: no pair is looked at."""
    from torch.nn.attention.flex_attention import BlockMask

    queries = len(first_R)
    short = -queries % TILE
    last_first_M, last_stop_M = (F.pad(x, (0, short)).view(-1, TILE).amax(1) for x in (first_R, stop_R))
    least_first_M, least_stop_M = (
        F.pad(x, (0, short), value=keys).view(-1, TILE).amin(1) for x in (first_R, stop_R)
    )  # fmt: skip
    at_K = torch.arange(-(-keys // TILE), device=first_R.device) * TILE
    some_MK = (at_K + TILE > least_first_M[:, None]) & (at_K < last_stop_M[:, None])
    full_MK = (at_K >= last_first_M[:, None]) & (at_K + TILE <= least_stop_M[:, None])
    if short:
        full_MK[-1] = False

    def listed(has_MK: Tensor) -> tuple[Tensor, Tensor]:
        order_MK = (~has_MK).int().sort(dim=1, stable=True).indices
        return has_MK.sum(1).int()[None, None], order_MK.int()[None, None]

    def visible(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        inner = q.clamp(max=queries - 1)
        return (k >= first_R[inner]) & (k < stop_R[inner])

    return BlockMask.from_kv_blocks(
        *listed(some_MK & ~full_MK), *listed(full_MK), BLOCK_SIZE=TILE, mask_mod=visible, seq_lengths=(queries, keys)
    )


@lru_cache(maxsize=1)
def _flex_attention(compiled: bool) -> Callable[..., Any]:
    """Compiled where that pays; imported only by those who use it."""
    from torch.nn.attention.flex_attention import flex_attention

    if compiled:
        return torch.compile(flex_attention, dynamic=True)
    return flex_attention


def flex(q_BHQd: Tensor, k_BGSd: Tensor, v_BGSd: Tensor, block: Any, lse: bool = False) -> Any:
    """Flex attention [B, H, Q, d]; with `lse`, its log-sum-exps [B, H, Q], too."""
    d = q_BHQd.shape[-1]
    # Triton's kernel takes heads of 16 and more, of at most 32 bits: zeros change no product.
    padded = (F.pad(x, (0, max(0, 16 - d))) for x in (q_BHQd, k_BGSd, v_BGSd))
    run = _flex_attention(q_BHQd.device.type == "cuda" and q_BHQd.dtype != torch.float64)
    shared = q_BHQd.shape[1] != k_BGSd.shape[1]
    out = run(*padded, block_mask=block, enable_gqa=shared, scale=d**-0.5, return_lse=lse)
    return (out[0][..., :d], out[1]) if lse else out[..., :d]


def attend_ranges(q_RHd: Tensor, k_NGd: Tensor, v_NGd: Tensor, ranges: Ranges, own: Own = ()) -> Tensor:
    """[R, H, d]: attention of H heads over G key/value heads. `own`: further keys and values [R, G, d] of each query."""
    if ranges.block is None:  # also of no queries: every input takes part all the same, with gradient zero
        return _Tiled.apply(q_RHd, k_NGd, v_NGd, ranges, *(x for pair in own for x in pair))
    q_1HRd, k_1GNd, v_1GNd = (x.transpose(0, 1)[None] for x in (q_RHd, k_NGd, v_NGd))
    out_1HRd, lse_1HR = flex(q_1HRd, k_1GNd, v_1GNd, ranges.block, lse=True)
    out_RHd, _ = join(q_RHd, out_1HRd[0].transpose(0, 1), lse_1HR[0].T, own)
    return out_RHd.to(q_RHd.dtype)


def join(q_RHd: Tensor, out_RHd: Tensor, lse_RH: Tensor, own: Own) -> tuple[Tensor, Tensor]:
    """Output and log-sum-exp with the own keys."""
    if not own:
        return out_RHd, lse_RH
    scores = [score_own(q_RHd, k_RGd, lse_RH.dtype) for k_RGd, _ in own]
    total_RH = torch.stack([lse_RH, *scores]).logsumexp(0)
    out_RHd = out_RHd * (lse_RH - total_RH).exp()[..., None]
    for score_RH, (_, v_RGd) in zip(scores, own, strict=True):
        share_RGr1 = grouped((score_RH - total_RH).exp()[..., None], v_RGd)
        out_RHd = out_RHd + (share_RGr1 * v_RGd[:, :, None]).flatten(1, 2)
    return out_RHd, total_RH


def score_own(q_RHd: Tensor, k_RGd: Tensor, dtype: torch.dtype) -> Tensor:
    """[R, H] scores of each query's own key."""
    scale = q_RHd.shape[-1] ** -0.5
    return (grouped(q_RHd, k_RGd) * k_RGd[:, :, None]).sum(-1, dtype=dtype).flatten(1) * scale


def grouped(x_RHX: Tensor, like_RGd: Tensor) -> Tensor:
    """[R, H, X] -> [R, G, H / G, X]."""
    return x_RHX.unflatten(1, (like_RGd.shape[1], -1))


class _Tiled(torch.autograd.Function):
    """Tile by tile. Kept for backward: inputs, output, log-sum-exp."""

    @staticmethod
    def forward(
        ctx: Any, q_RHd: Tensor, k_NGd: Tensor, v_NGd: Tensor, ranges: Ranges, *own: Tensor
    ) -> Tensor:  # fmt: skip
        wide = torch.promote_types(q_RHd.dtype, torch.float32)
        out_RHd, lse_RH = torch.empty_like(q_RHd, dtype=wide), q_RHd.new_empty(q_RHd.shape[:2], dtype=wide)
        for tile in tiles_of(ranges):
            q_GrQd = heads_first(q_RHd[tile.queries], k_NGd)
            parts = []
            for keys, see_QS in parts_of(tile, ranges):
                k_Grsd, v_Grsd = shared(k_NGd[keys], q_GrQd), shared(v_NGd[keys], q_GrQd)
                parts.append(part_forward(q_GrQd, k_Grsd, v_Grsd, see_QS))
            out_GrQd, lse_GrQ = joined(parts, q_GrQd)
            out_RHd[tile.queries] = out_GrQd.permute(2, 0, 1, 3).flatten(1, 2)
            lse_RH[tile.queries] = lse_GrQ.permute(2, 0, 1).flatten(1)
        out_RHd, lse_RH = join(q_RHd, out_RHd, lse_RH, list(zip(own[::2], own[1::2], strict=True)))
        out_RHd = out_RHd.to(q_RHd.dtype)
        ctx.ranges = ranges
        ctx.save_for_backward(q_RHd, k_NGd, v_NGd, out_RHd, lse_RH, *own)
        return out_RHd

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad_RHd: Tensor) -> tuple[Tensor | None, ...]:
        q_RHd, k_NGd, v_NGd, out_RHd, lse_RH, *own = ctx.saved_tensors
        wide, scale, grad_RHd = lse_RH.dtype, q_RHd.shape[-1] ** -0.5, grad_RHd.contiguous()
        dq_RHd = torch.empty_like(q_RHd, dtype=wide)
        dk_NGd, dv_NGd = (torch.zeros_like(x, dtype=wide) for x in (k_NGd, v_NGd))
        for tile in tiles_of(ctx.ranges):
            q_GrQd, grad_GrQd, out_GrQd = (heads_first(x[tile.queries], k_NGd) for x in (q_RHd, grad_RHd, out_RHd))
            lse_GrQ = heads_first(lse_RH[tile.queries, :, None], k_NGd)[..., 0]
            dq_GrQd = torch.zeros_like(q_GrQd, dtype=wide)
            for keys, see_QS in parts_of(tile, ctx.ranges):
                k_Grsd, v_Grsd = shared(k_NGd[keys], q_GrQd), shared(v_NGd[keys], q_GrQd)
                slopes = part_backward(grad_GrQd, q_GrQd, k_Grsd, v_Grsd, out_GrQd, lse_GrQ, see_QS)
                dq_GrQd += slopes[0]
                for total_NGd, slope_Grsd in zip((dk_NGd, dv_NGd), slopes[1:], strict=True):
                    total_NGd[keys] += slope_Grsd.sum(1, dtype=wide).transpose(0, 1)
            dq_RHd[tile.queries] = dq_GrQd.permute(2, 0, 1, 3).flatten(1, 2)
        grads = []
        if own:
            delta_RH = (grad_RHd * out_RHd).sum(-1, dtype=wide)
        for k_RGd, v_RGd in zip(own[::2], own[1::2], strict=True):
            q_RGrd, grad_RGrd = grouped(q_RHd, k_RGd), grouped(grad_RHd, k_RGd)
            share_RH = (score_own(q_RHd, k_RGd, wide) - lse_RH).exp()
            gain_RH = (grad_RGrd * v_RGd[:, :, None]).sum(-1, dtype=wide).flatten(1)
            slope_RGr1 = grouped((share_RH * (gain_RH - delta_RH))[..., None] * scale, k_RGd)
            dq_RHd += (slope_RGr1 * k_RGd[:, :, None]).flatten(1, 2)
            dk_RGd, dv_RGd = (slope_RGr1 * q_RGrd).sum(2), (grouped(share_RH[..., None], k_RGd) * grad_RGrd).sum(2)
            grads += [dk_RGd.to(k_RGd.dtype), dv_RGd.to(v_RGd.dtype)]
        return dq_RHd.to(q_RHd.dtype), dk_NGd.to(k_NGd.dtype), dv_NGd.to(v_NGd.dtype), None, *grads


def tiles_of(ranges: Ranges) -> Iterator[Tile]:
    """All tiles, in turn."""
    yield from ranges.tiles


def heads_first(x_QHd: Tensor, like_NGd: Tensor) -> Tensor:
    """[Q, H, d] -> [G, H / G, Q, d]: groups are the batch of a call, so that their keys are never repeated."""
    return grouped(x_QHd, like_NGd).permute(1, 2, 0, 3)


def shared(x_sGd: Tensor, like_GrQd: Tensor) -> Tensor:
    """[s, G, d] -> [G, H / G, s, d], a view."""
    return x_sGd.transpose(0, 1)[:, None].expand(-1, like_GrQd.shape[1], -1, -1)


def parts_of(tile: Tile, ranges: Ranges) -> list[tuple[slice, Tensor | bool]]:
    """Keys of each call that a tile takes, and who sees them: True = causal, False = all see all."""
    parts: list[tuple[slice, Tensor | bool]] = [(tile.keys, False)] if tile.keys.stop > tile.keys.start else []
    if tile.tail.stop > tile.tail.start:
        at_S = torch.arange(tile.tail.start, tile.tail.stop, device=ranges.stop_R.device)
        parts.append((tile.tail, tile.causal or at_S < ranges.stop_R[tile.queries, None]))
    return parts


def joined(parts: list[tuple[Tensor, Tensor]], q_GrQd: Tensor) -> tuple[Tensor, Tensor]:
    """Output and log-sum-exp over the keys of all parts; of none: zeros and -inf."""
    if len(parts) == 1:
        return parts[0]
    wide = torch.promote_types(q_GrQd.dtype, torch.float32)
    lse_GrQ = torch.full(q_GrQd.shape[:-1], -torch.inf, dtype=wide, device=q_GrQd.device)
    for _, own_GrQ in parts:
        lse_GrQ = torch.logaddexp(lse_GrQ, own_GrQ)
    out_GrQd = torch.zeros_like(q_GrQd, dtype=wide)
    for own_GrQd, own_GrQ in parts:
        out_GrQd.addcmul_(own_GrQd.to(wide), (own_GrQ - finite(lse_GrQ)).exp()[..., None])
    return out_GrQd, lse_GrQ


def finite(lse_XQ: Tensor) -> Tensor:
    """Of queries that see nothing, not -inf, of which differences are no numbers."""
    return lse_XQ.clamp(min=torch.finfo(lse_XQ.dtype).min)


def fused(x: Tensor, see_QS: Tensor | bool) -> bool:
    """Whether PyTorch's flash attention for CPUs takes this part."""
    return x.device.type == "cpu" and isinstance(see_QS, bool)


def part_forward(q_XQd: Tensor, k_XSd: Tensor, v_XSd: Tensor, see_QS: Tensor | bool) -> tuple[Tensor, Tensor]:
    """Output and log-sum-exp of one part; queries that see none of it: 0 and -inf. X: any two leading dimensions."""
    if fused(q_XQd, see_QS):
        return torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(q_XQd, k_XSd, v_XSd, 0.0, see_QS)
    scores_XQS = scores_of(q_XQd, k_XSd, see_QS)
    lse_XQ = scores_XQS.logsumexp(-1)
    weights_XQS = (scores_XQS - finite(lse_XQ)[..., None]).exp()
    return (weights_XQS.to(v_XSd.dtype) @ v_XSd).to(lse_XQ.dtype), lse_XQ


def part_backward(
    grad_XQd: Tensor,
    q_XQd: Tensor,
    k_XSd: Tensor,
    v_XSd: Tensor,
    out_XQd: Tensor,
    lse_XQ: Tensor,
    see_QS: Tensor | bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients by q, k and v of one part, from the output and log-sum-exp over all of them."""
    if fused(q_XQd, see_QS):
        return torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(
            grad_XQd, q_XQd, k_XSd, v_XSd, out_XQd, lse_XQ, 0.0, see_QS
        )
    scale, wide = q_XQd.shape[-1] ** -0.5, lse_XQ.dtype
    weights_XQS = (scores_of(q_XQd, k_XSd, see_QS) - finite(lse_XQ)[..., None]).exp()
    gains_XQS = (grad_XQd @ v_XSd.transpose(-1, -2)).to(wide)
    delta_XQ1 = (grad_XQd * out_XQd).sum(-1, keepdim=True, dtype=wide)
    slopes_XQS = (weights_XQS * (gains_XQS - delta_XQ1) * scale).to(q_XQd.dtype)
    return (
        slopes_XQS @ k_XSd,
        slopes_XQS.transpose(-1, -2) @ q_XQd,
        weights_XQS.to(grad_XQd.dtype).transpose(-1, -2) @ grad_XQd,
    )


def scores_of(q_XQd: Tensor, k_XSd: Tensor, see_QS: Tensor | bool) -> Tensor:
    """[..., Q, S], fp32 at least, -inf where a query does not see a key."""
    scores_XQS = (q_XQd @ k_XSd.transpose(-1, -2)).to(torch.promote_types(q_XQd.dtype, torch.float32))
    scores_XQS = scores_XQS * q_XQd.shape[-1] ** -0.5
    if see_QS is True:
        see_QS = torch.ones(scores_XQS.shape[-2:], dtype=torch.bool, device=q_XQd.device).tril()
    return scores_XQS if see_QS is False else scores_XQS.masked_fill(~see_QS, -torch.inf)
