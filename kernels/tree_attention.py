"""Attention of a verification pass: M rows per request over its committed slots and the ones that they see behind them.

A row sees the committed slots of its request and, of the A slots of the *tail* (what passes have appended and nothing has
committed yet: the anchor, the nodes, extra rows, a prefix), those whose bit is set. No mask of M x S exists on a GPU.

All rows of a tile read the same keys, in blocks that are cut at multiples of `SPLIT` slots, whatever the lengths; a block
of which a row sees nothing leaves its numbers as they are, bit for bit. So a row's result depends on its own query and on the
keys that it sees at their places, not on how many rows there are: a chain's row is the same token decoded alone, or in a chain
of another length.

Split and merged by log-sum-exp as in Flash-Decoding (Dao et al. 2023), online softmax of Milakov and Gimelshein
1805.02867, all in fp32. No backward.

Letters: H query heads, G key/value heads, D their width, A tail slots, X words of 64 bits.
Test: pytest tests/test_kernels.py -k tree_attention; pytest tests/test_tree_kernels.py
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from .jit import Build, jit, runs_on, tl

SPLIT = 256  # slots per part of the keys; a constant, for the sake of the bits
WIDEST = 256  # head width


@dataclass(frozen=True)
class Sight:
    """What the rows of one pass see; made once for all layers. Tensors are int64."""

    lengths_B: Tensor
    """Committed slots; every row sees them."""
    bits_BMX: Tensor
    """Bit j % 64 of word j // 64: the row sees slot lengths_B + j (`pack`, `Tree.ancestors`)."""
    tail: int
    """Slots behind the committed ones that bits are for."""


def pack(see_BMA: Tensor) -> Tensor:
    """int64 [B, M, ceil(A / 64)] of bool: bit j % 64 of word j // 64."""
    words = -(-see_BMA.shape[2] // 64)
    bits_BMA = torch.nn.functional.pad(see_BMA, (0, words * 64 - see_BMA.shape[2])).long()
    return (bits_BMA.unflatten(2, (words, 64)) << torch.arange(64, device=see_BMA.device)).sum(-1)


def visible(sight: Sight, slots: int) -> Tensor:
    """Bool [B, M, slots]: what rows see of a cache so wide."""
    m = sight.bits_BMX.shape[1]
    behind_BS = torch.arange(slots, device=sight.lengths_B.device) - sight.lengths_B[:, None]
    at_BS = behind_BS.clamp(0, sight.tail - 1)
    word_BMS = sight.bits_BMX.gather(2, (at_BS // 64)[:, None].expand(-1, m, -1))
    see_BMS = ((word_BMS >> (at_BS % 64)[:, None]) & 1).bool() & (behind_BS < sight.tail)[:, None]
    return see_BMS | (behind_BS < 0)[:, None]


def reference(q_BMHD: Tensor, k_BGSD: Tensor, v_BGSD: Tensor, sight: Sight, scale: float | None = None) -> Tensor:
    """[B, M, H, D] softmax(scale q k) v over the visible slots, in the inputs' dtype; 0 for a row that sees nothing."""
    see_BMS = visible(sight, k_BGSD.shape[2])
    q_BMGgD = q_BMHD.unflatten(2, (k_BGSD.shape[1], -1))
    x_BMGgS = torch.einsum("bmghd,bgsd->bmghs", q_BMGgD, k_BGSD) * _scale(q_BMHD, scale)
    p_BMGgS = x_BMGgS.masked_fill(~see_BMS[:, :, None, None], -torch.inf).softmax(-1)
    p_BMGgS = p_BMGgS.masked_fill(~see_BMS[:, :, None, None], 0)
    return torch.einsum("bmghs,bgsd->bmghd", p_BMGgS, v_BGSD).flatten(2, 3)


def folded(q_BMHD: Tensor, k_BGSD: Tensor, v_BGSD: Tensor, sight: Sight, scale: float | None = None) -> Tensor:
    """By PyTorch's attention, the heads that share keys as further rows: keys are read once and never repeated."""
    b, m, h, d = q_BMHD.shape
    see_BMS = visible(sight, k_BGSD.shape[2])
    zero = torch.zeros((), dtype=q_BMHD.dtype, device=see_BMS.device)
    bias_B1RS = torch.where(see_BMS, zero, -torch.inf)[:, None].repeat(1, 1, h // k_BGSD.shape[1], 1)
    q_BGRD = q_BMHD.transpose(1, 2).reshape(b, k_BGSD.shape[1], -1, d)
    out_BGRD = torch.nn.functional.scaled_dot_product_attention(q_BGRD, k_BGSD, v_BGSD, bias_B1RS, scale=scale)
    return out_BGRD.reshape(b, h, m, d).transpose(1, 2)


def tree_attention(q_BMHD: Tensor, k_BGSD: Tensor, v_BGSD: Tensor, sight: Sight, scale: float | None = None) -> Tensor:
    """[B, M, H, D], of q's dtype. `scale`: 1 / sqrt(D) by default. Slots that no row can see are not read on a GPU; the
    form for CPU gives them weight 0, so there they must be finite.

    Raises ValueError for heads that do not divide, widths above 256, and a sight of another shape.
    """
    b, m, h, d = q_BMHD.shape
    g, slots = k_BGSD.shape[1:3]
    if h % g or d > WIDEST:
        raise ValueError(f"{h} query heads on {g} key heads of width {d}: they must divide, width at most {WIDEST}")
    if sight.tail < 1 or sight.bits_BMX.shape != (b, m, -(-sight.tail // 64)):
        raise ValueError(
            f"sight of shape {tuple(sight.bits_BMX.shape)} with {sight.tail} tail slots for {b} x {m} rows: needs "
            "ceil(tail / 64) words per row, and a tail of at least one slot"
        )
    if q_BMHD.dtype == torch.float64 or not runs_on(q_BMHD, k_BGSD, v_BGSD):
        return folded(q_BMHD, k_BGSD, v_BGSD, sight, scale)
    q_BMHD, k_BGSD, v_BGSD = (x if x.stride(-1) == 1 else x.contiguous() for x in (q_BMHD, k_BGSD, v_BGSD))
    tiles, options = _tiles(q_BMHD.dtype, d, h // g)
    splits = -(-slots // SPLIT)
    parts_of = partial(torch.empty, dtype=torch.float32, device=q_BMHD.device)
    acc, (top, total) = parts_of(b, m, h, splits, d), parts_of(2, b, m, h, splits)
    parts = (acc, top, total, sight.lengths_B.contiguous(), m, sight.tail, slots)
    _attend[(splits, -(-m // (tiles["BT"] // (h // g))), b * g)](
        q_BMHD,
        k_BGSD,
        v_BGSD,
        *parts,
        sight.bits_BMX.contiguous(),
        _scale(q_BMHD, scale) * math.log2(math.e),
        *q_BMHD.stride()[:3],
        *k_BGSD.stride()[:3],
        *v_BGSD.stride()[:3],
        G=g,
        GROUPS=h // g,
        D=d,
        SPLIT=SPLIT,
        **tiles,
        **options,
    )
    out_BMHD = torch.empty(b, m, h, d, dtype=q_BMHD.dtype, device=q_BMHD.device)
    _merge[(b * m * h,)](out_BMHD, *parts, H=h, D=d, SPLIT=SPLIT, BD=tiles["BD"], num_warps=1)
    return out_BMHD


def _scale(q_BMHD: Tensor, scale: float | None) -> float:
    return q_BMHD.shape[-1] ** -0.5 if scale is None else scale


def _tiles(dtype: torch.dtype, width: int, groups: int) -> tuple[dict[str, int], dict[str, int]]:
    """Sizes of a tile (BT rows times heads, BN keys, BD width) and compiler options. Never by the number of rows: a row
    would then depend on it."""
    bd = max(16, 1 << (width - 1).bit_length())
    bt = max(16 if dtype == torch.float32 else 64, 1 << (groups - 1).bit_length())
    warps = 8 if bt * bd >= 4096 else 4  # with fewer, registers spill
    return {"BT": bt, "BN": 32, "BD": bd}, {"num_warps": warps, "num_stages": 2}


@jit
def _update(q_TD, k_ND, v_ND, see_TN, scale, top_T, total_T, acc_TD):
    """The online softmax over one more block. Where a row sees nothing of it, exactly nothing changes."""
    x_TN = tl.dot(q_TD, tl.trans(k_ND), input_precision="ieee") * scale
    x_TN = tl.where(see_TN, x_TN, float("-inf"))
    new_T = tl.maximum(top_T, tl.max(x_TN, 1))
    base_T = tl.where(new_T == float("-inf"), 0.0, new_T)
    p_TN = tl.exp2(x_TN - base_T[:, None])
    keep_T = tl.exp2(top_T - base_T)
    acc_TD = tl.dot(p_TN.to(v_ND.dtype), v_ND, acc_TD * keep_T[:, None], input_precision="ieee")
    return new_T, total_T * keep_T + tl.sum(p_TN, 1), acc_TD


@jit
def _attend(
    q,
    k,
    v,
    acc,
    top,
    total,
    lengths,
    M,
    A,
    slots,
    bits,
    scale,
    q_b,
    q_m,
    q_h,
    k_b,
    k_g,
    k_s,
    v_b,
    v_g,
    v_s,
    G: tl.constexpr,
    GROUPS: tl.constexpr,
    D: tl.constexpr,
    SPLIT: tl.constexpr,
    BT: tl.constexpr,
    BN: tl.constexpr,
    BD: tl.constexpr,
):
    """One part of the keys for a tile of rows (lane = row * GROUPS + head): acc, and its maximum and total (base 2)."""
    ROWS: tl.constexpr = BT // GROUPS
    b = tl.program_id(2).to(tl.int64) // G
    g = tl.program_id(2).to(tl.int64) % G
    n = tl.load(lengths + b).to(tl.int32)
    first = tl.program_id(0) * SPLIT
    last = tl.minimum(tl.minimum(first + SPLIT, n + A), slots)
    if first >= last:
        return
    row = tl.program_id(1) * ROWS
    r_T = tl.arange(0, BT) // GROUPS
    m_T = row + r_T
    h_T = g * GROUPS + tl.arange(0, BT) % GROUPS
    has_T = (r_T < ROWS) & (m_T < M)
    d_D = tl.arange(0, BD)
    in_D = d_D < D
    q_T = b * q_b + m_T.to(tl.int64) * q_m + h_T * q_h
    q_TD = tl.load(q + q_T[:, None] + d_D[None, :], has_T[:, None] & in_D[None, :], 0.0)
    top_T = tl.full((BT,), float("-inf"), tl.float32)
    total_T = tl.zeros((BT,), tl.float32)
    acc_TD = tl.zeros((BT, BD), tl.float32)
    for lo in range(first, last, BN):
        slot_N = lo + tl.arange(0, BN)
        in_N = slot_N < last
        behind_N = slot_N - n
        see_TN = in_N[None, :] & (behind_N < 0)[None, :] & has_T[:, None]
        if lo + BN > n:
            tail_N = in_N & (behind_N >= 0)
            to_N = tl.where(tail_N, behind_N, 0).to(tl.int64)
            word_TN = bits + (b * M + m_T)[:, None] * ((A + 63) // 64) + (to_N // 64)[None, :]
            word_TN = tl.load(word_TN, has_T[:, None] & tail_N[None, :], 0)
            see_TN = see_TN | (((word_TN >> (to_N % 64)[None, :]) & 1) != 0)
        at_N = slot_N.to(tl.int64)
        load_ND = in_N[:, None] & in_D[None, :]
        k_ND = tl.load(k + b * k_b + g * k_g + at_N[:, None] * k_s + d_D[None, :], load_ND, 0.0)
        v_ND = tl.load(v + b * v_b + g * v_g + at_N[:, None] * v_s + d_D[None, :], load_ND, 0.0)
        top_T, total_T, acc_TD = _update(q_TD, k_ND, v_ND, see_TN, scale, top_T, total_T, acc_TD)
    splits = (slots + SPLIT - 1) // SPLIT
    at_T = ((b * M + m_T) * (G * GROUPS) + h_T) * splits + tl.program_id(0)
    tl.store(top + at_T, top_T, has_T)
    tl.store(total + at_T, total_T, has_T)
    tl.store(acc + at_T[:, None] * D + d_D[None, :], acc_TD, has_T[:, None] & in_D[None, :])


@jit
def _merge(
    out,
    acc,
    top,
    total,
    lengths,
    M,
    A,
    slots,
    H: tl.constexpr,
    D: tl.constexpr,
    SPLIT: tl.constexpr,
    BD: tl.constexpr,
):
    """One row and head: its parts in order, the last one by the request's own length."""
    at = tl.program_id(0).to(tl.int64)
    n = tl.load(lengths + at // (M * H)).to(tl.int32)
    splits = (slots + SPLIT - 1) // SPLIT
    d_D = tl.arange(0, BD)
    most = tl.full((), float("-inf"), tl.float32)
    sum_ = tl.full((), 0.0, tl.float32)
    out_D = tl.zeros((BD,), tl.float32)
    for split in range(0, (tl.minimum(n + A, slots) + SPLIT - 1) // SPLIT):
        part = at * splits + split
        own = tl.load(top + part)
        new = tl.maximum(most, own)
        base = tl.where(new == float("-inf"), 0.0, new)
        keep = tl.exp2(most - base)
        add = tl.exp2(own - base)
        sum_ = sum_ * keep + tl.load(total + part) * add
        out_D = out_D * keep + tl.load(acc + part * D + d_D, d_D < D, 0.0) * add
        most = new
    out_D = out_D / tl.where(sum_ > 0, sum_, 1.0)
    tl.store(out + at * D + d_D, out_D.to(out.dtype.element_ty), d_D < D)


def _build(dtype: torch.dtype, width: int, groups: int, **ones: int) -> Build:
    """`ones`: sizes that are 1 are compiled in."""
    tiles, options = _tiles(dtype, width, groups)
    kind = {torch.bfloat16: "*bf16", torch.float16: "*fp16", torch.float32: "*fp32"}[dtype]
    strides = tuple(f"{x}_{axis}" for x, axes in (("q", "bmh"), ("k", "bgs"), ("v", "bgs")) for axis in axes)
    types = dict.fromkeys(("q", "k", "v"), kind) | dict.fromkeys(("acc", "top", "total"), "*fp32") | {"scale": "fp32"}
    types |= dict.fromkeys(("lengths", "bits"), "*i64")
    types |= dict.fromkeys({"M", "A", "slots", *strides} - set(ones), "i32")
    return Build(
        _attend,
        types,
        {"G": 8, "GROUPS": groups, "D": width, "SPLIT": SPLIT} | ones | tiles,
        warps=options["num_warps"],
        stages=options["num_stages"],
        dots=dtype != torch.float32,
        aligned=strides,
    )


_PLAIN = {"M": 1, "A": 1}  # one token per request
BUILDS = (
    _build(torch.bfloat16, 64, 3),
    _build(torch.bfloat16, 128, 3),
    _build(torch.bfloat16, 256, 3),
    _build(torch.float16, 80, 8),
    _build(torch.bfloat16, 256, 3, **_PLAIN),
    _build(torch.float32, 64, 3, **_PLAIN),
    Build(
        _merge,
        {"out": "*bf16", "lengths": "*i64"}
        | dict.fromkeys(("acc", "top", "total"), "*fp32")
        | dict.fromkeys(("M", "A", "slots"), "i32"),
        {"H": 24, "D": 128, "SPLIT": SPLIT, "BD": 128},
        warps=1,
    ),
)
