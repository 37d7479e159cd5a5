"""Attention of a verification pass: M rows per request over its committed slots and the ones that they see behind them.

A row sees the committed slots of its request and, of the A slots of the *tail* (what passes have appended and nothing has
committed yet: the anchor, the nodes, extra rows, a prefix), those whose bit is set. No mask of M x S exists on a GPU.

Two orders of reading the keys. By slot: all rows of a tile read the same keys, in blocks that stand at fixed slots. By
path (`Sight.paths_BMK`): the committed slots likewise, then each row the keys that it sees in the tail in order of depth,
as if they stood right behind the committed ones. Blocks are cut at multiples of `SPLIT` slots, whatever the lengths, and
a block of which a row sees nothing leaves its numbers as they are, bit for bit. So a row's result depends on its own
query and on the keys that it sees at their places, not on how many rows there are, nor on what else they see:

    by slot    a chain's row = the same token decoded alone, or in a chain of another length
    by path    the same for every node of every tree

Split and merged by log-sum-exp as in Flash-Decoding (Dao et al. 2023), online softmax of Milakov and Gimelshein
1805.02867, all in fp32. No backward.

Letters: H query heads, G key/value heads, D their width, A tail slots, X words of 64 bits, K length of a path.
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
    """What the rows of one pass see; made once for all layers. All int64."""

    lengths_B: Tensor
    """Committed slots; every row sees them, but for the window."""
    bits_BMX: Tensor
    """Bit j % 64 of word j // 64: the row sees slot lengths_B + j (`pack`, `Tree.ancestors`)."""
    depths_BA: Tensor
    """Position of each tail slot, counted from `lengths_B`. Committed tokens stand at their slots' positions."""
    offset: int = 0
    """Row m stands in tail slot offset + m."""
    paths_BMK: Tensor | None = None
    """The tail slots that the row sees, in the order to read them in; -1 = no further (`paths`). None: by slot."""


def pack(see_BMA: Tensor) -> Tensor:
    """int64 [B, M, ceil(A / 64)] of bool: bit j % 64 of word j // 64."""
    words = -(-see_BMA.shape[2] // 64)
    bits_BMA = torch.nn.functional.pad(see_BMA, (0, words * 64 - see_BMA.shape[2])).long()
    return (bits_BMA.unflatten(2, (words, 64)) << torch.arange(64, device=see_BMA.device)).sum(-1)


def paths(see_BMA: Tensor, depths_BA: Tensor, longest: int) -> Tensor:
    """int64 [B, M, longest]: the tail slots that each row sees, by depth; -1 = no further. No row may see more."""
    never = torch.iinfo(torch.int64).max
    order_BMA = torch.where(see_BMA, depths_BA[:, None], never).sort(dim=2, stable=True).indices[..., :longest]
    return torch.where(see_BMA.gather(2, order_BMA), order_BMA, -1)


def visible(sight: Sight, slots: int, window: int | None = None) -> Tensor:
    """Bool [B, M, slots]. With `window`, only tokens less than `window` positions back are seen."""
    m, a = sight.bits_BMX.shape[1], sight.depths_BA.shape[1]
    behind_BS = torch.arange(slots, device=sight.lengths_B.device) - sight.lengths_B[:, None]
    at_BS = behind_BS.clamp(0, a - 1)
    word_BMS = sight.bits_BMX.gather(2, (at_BS // 64)[:, None].expand(-1, m, -1))
    see_BMS = ((word_BMS >> (at_BS % 64)[:, None]) & 1).bool() & (behind_BS < a)[:, None] | (behind_BS < 0)[:, None]
    if window is not None:
        own_BM = sight.depths_BA[:, sight.offset : sight.offset + m]
        depth_BS = torch.where(behind_BS < 0, behind_BS, sight.depths_BA.gather(1, at_BS))
        see_BMS = see_BMS & (own_BM[:, :, None] - depth_BS[:, None] < window)
    return see_BMS


def reference(
    q_BMHD: Tensor, k_BGSD: Tensor, v_BGSD: Tensor, sight: Sight, scale: float | None = None, window: int | None = None
) -> Tensor:
    """[B, M, H, D] softmax(scale q k) v over the visible slots, in the inputs' dtype; 0 for a row that sees nothing."""
    see_BMS = visible(sight, k_BGSD.shape[2], window)
    q_BMGgD = q_BMHD.unflatten(2, (k_BGSD.shape[1], -1))
    x_BMGgS = torch.einsum("bmghd,bgsd->bmghs", q_BMGgD, k_BGSD) * _scale(q_BMHD, scale)
    p_BMGgS = x_BMGgS.masked_fill(~see_BMS[:, :, None, None], -torch.inf).softmax(-1)
    p_BMGgS = p_BMGgS.masked_fill(~see_BMS[:, :, None, None], 0)
    return torch.einsum("bmghs,bgsd->bmghd", p_BMGgS, v_BGSD).flatten(2, 3)


def bias(sight: Sight, slots: int, groups: int, dtype: torch.dtype, window: int | None = None) -> Tensor:
    """[B, 1, groups * M, slots] 0 or -inf: `visible` as `folded` adds it. One per pass and window, for all layers."""
    see_BMS = visible(sight, slots, window)
    zero = torch.zeros((), dtype=dtype, device=see_BMS.device)
    return torch.where(see_BMS, zero, -torch.inf).to(dtype)[:, None].repeat(1, 1, groups, 1)


def folded(q_BMHD: Tensor, k_BGSD: Tensor, v_BGSD: Tensor, bias_B1RS: Tensor, scale: float | None = None) -> Tensor:
    """By PyTorch's attention, the heads that share keys as further rows: keys are read once and never repeated."""
    b, m, h, d = q_BMHD.shape
    q_BGRD = q_BMHD.transpose(1, 2).reshape(b, k_BGSD.shape[1], -1, d)
    out_BGRD = torch.nn.functional.scaled_dot_product_attention(q_BGRD, k_BGSD, v_BGSD, bias_B1RS, scale=scale)
    return out_BGRD.reshape(b, h, m, d).transpose(1, 2)


def tree_attention(
    q_BMHD: Tensor,
    k_BGSD: Tensor,
    v_BGSD: Tensor,
    sight: Sight,
    scale: float | None = None,
    window: int | None = None,
    bias_B1RS: Tensor | None = None,
) -> Tensor:
    """[B, M, H, D], of q's dtype. `scale`: 1 / sqrt(D) by default. Slots that no row can see are not read on a GPU; the
    form for CPU gives them weight 0, so there they must be finite. `bias_B1RS`: what `bias` gave for this pass.

    Raises ValueError for heads that do not divide, widths above 256, and a sight of another shape.
    """
    b, m, h, d = q_BMHD.shape
    g, slots = k_BGSD.shape[1:3]
    tail = sight.depths_BA.shape[1]
    if h % g or d > WIDEST:
        raise ValueError(f"{h} query heads on {g} key heads of width {d}: they must divide, width at most {WIDEST}")
    if sight.bits_BMX.shape != (b, m, -(-tail // 64)) or sight.offset + m > tail:
        raise ValueError(
            f"sight of shape {tuple(sight.bits_BMX.shape)} with {tail} tail slots and offset {sight.offset} for {b} x {m} "
            f"rows: needs ceil(tail / 64) words per row, and a tail slot for each"
        )
    if q_BMHD.dtype == torch.float64 or not runs_on(q_BMHD, k_BGSD, v_BGSD):
        given = bias(sight, slots, h // g, q_BMHD.dtype, window) if bias_B1RS is None else bias_B1RS
        return folded(q_BMHD, k_BGSD, v_BGSD, given, scale)
    q_BMHD, k_BGSD, v_BGSD = (x if x.stride(-1) == 1 else x.contiguous() for x in (q_BMHD, k_BGSD, v_BGSD))
    paths_BMK = sight.paths_BMK
    by_path = paths_BMK is not None
    tiles, options = _tiles(q_BMHD.dtype, d, h // g, by_path)
    splits = -(-slots // SPLIT)
    parts_of = partial(torch.empty, dtype=torch.float32, device=q_BMHD.device)
    acc, (top, total) = parts_of(b, m, h, splits, d), parts_of(2, b, m, h, splits)
    reach = paths_BMK.shape[2] if paths_BMK is not None else tail
    parts = (acc, top, total, sight.lengths_B.contiguous(), m, reach, slots)
    _attend[(splits, -(-m // (tiles["BT"] // (h // g))), b * g)](
        q_BMHD,
        k_BGSD,
        v_BGSD,
        *parts,
        sight.bits_BMX.contiguous(),
        sight.depths_BA.contiguous(),
        None if paths_BMK is None else paths_BMK.contiguous(),
        _scale(q_BMHD, scale) * math.log2(math.e),
        tail,
        sight.offset,
        window or 0,
        *q_BMHD.stride()[:3],
        *k_BGSD.stride()[:3],
        *v_BGSD.stride()[:3],
        G=g,
        GROUPS=h // g,
        D=d,
        WINDOW=window is not None,
        PATHS=by_path,
        SPLIT=SPLIT,
        **tiles,
        **options,
    )
    out_BMHD = torch.empty(b, m, h, d, dtype=q_BMHD.dtype, device=q_BMHD.device)
    _merge[(b * m * h,)](out_BMHD, *parts, H=h, D=d, SPLIT=SPLIT, BD=tiles["BD"], num_warps=1)
    return out_BMHD


def _scale(q_BMHD: Tensor, scale: float | None) -> float:
    return q_BMHD.shape[-1] ** -0.5 if scale is None else scale


def _tiles(dtype: torch.dtype, width: int, groups: int, by_path: bool) -> tuple[dict[str, int], dict[str, int]]:
    """Sizes of a tile (BT rows times heads, BN keys, BD width) and compiler options. Never by the number of rows: a row
    would then depend on it. By path a tile reads the tail once per row, so it holds few."""
    bd = max(16, 1 << (width - 1).bit_length())
    narrow = by_path or dtype == torch.float32
    bt = max(16 if narrow else 64, 1 << (groups - 1).bit_length())
    bn, warps = 32, 8 if bt * bd >= 4096 or (by_path and bd >= 128) else 4  # with fewer, registers spill
    return {"BT": bt, "BN": bn, "BD": bd}, {"num_warps": warps, "num_stages": 2}


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
    reach,
    slots,
    bits,
    depths,
    paths,
    scale,
    A,
    offset,
    window,
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
    WINDOW: tl.constexpr,
    PATHS: tl.constexpr,
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
    last = tl.minimum(tl.minimum(first + SPLIT, n + reach), slots)
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
    depth_T = tl.load(depths + b * A + offset + m_T, has_T, 0).to(tl.int32)
    top_T = tl.full((BT,), float("-inf"), tl.float32)
    total_T = tl.zeros((BT,), tl.float32)
    acc_TD = tl.zeros((BT, BD), tl.float32)
    middle = last
    if PATHS:
        middle = tl.maximum(first, tl.minimum(last, n // BN * BN))
    for lo in range(first, middle, BN):
        slot_N = lo + tl.arange(0, BN)
        in_N = slot_N < last
        behind_N = slot_N - n
        see_TN = in_N[None, :] & (behind_N < 0)[None, :] & has_T[:, None]
        depth_N = behind_N
        if not PATHS:  # noqa: SIM102 (decided when compiled)
            if lo + BN > n:
                tail_N = in_N & (behind_N >= 0)
                to_N = tl.where(tail_N, behind_N, 0).to(tl.int64)
                word_TN = bits + (b * M + m_T)[:, None] * ((A + 63) // 64) + (to_N // 64)[None, :]
                word_TN = tl.load(word_TN, has_T[:, None] & tail_N[None, :], 0)
                see_TN = see_TN | (((word_TN >> (to_N % 64)[None, :]) & 1) != 0)
                depth_N = tl.where(tail_N, tl.load(depths + b * A + to_N, tail_N, 0).to(tl.int32), behind_N)
        if WINDOW:
            see_TN = see_TN & (depth_T[:, None] - depth_N[None, :] < window)
        at_N = slot_N.to(tl.int64)
        load_ND = in_N[:, None] & in_D[None, :]
        k_ND = tl.load(k + b * k_b + g * k_g + at_N[:, None] * k_s + d_D[None, :], load_ND, 0.0)
        v_ND = tl.load(v + b * v_b + g * v_g + at_N[:, None] * v_s + d_D[None, :], load_ND, 0.0)
        top_T, total_T, acc_TD = _update(q_TD, k_ND, v_ND, see_TN, scale, top_T, total_T, acc_TD)
    if PATHS:  # each row has its own keys from here on
        for lo in range(middle, last, BN):
            slot_N = lo + tl.arange(0, BN)
            behind_N = slot_N - n
            for r in range(0, tl.minimum(ROWS, M - row)):
                path = paths + (b * M + row + r) * reach
                to_N = tl.load(path + behind_N, (slot_N < last) & (behind_N >= 0), -1).to(tl.int32)
                seen_N = (slot_N < last) & ((behind_N < 0) | (to_N >= 0))
                see_TN = seen_N[None, :] & (r_T == r)[:, None]
                if WINDOW:
                    depth_N = tl.load(depths + b * A + to_N, seen_N & (behind_N >= 0), 0).to(tl.int32)
                    depth_N = tl.where(behind_N < 0, behind_N, depth_N)
                    see_TN = see_TN & (depth_T[:, None] - depth_N[None, :] < window)
                at_N = tl.where(behind_N < 0, slot_N, n + to_N).to(tl.int64)
                load_ND = seen_N[:, None] & in_D[None, :]
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
    reach,
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
    for split in range(0, (tl.minimum(n + reach, slots) + SPLIT - 1) // SPLIT):
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


def _build(dtype: torch.dtype, width: int, groups: int, window: bool, by_path: bool, **ones: int) -> Build:
    """`ones`: sizes that are 1 are compiled in."""
    tiles, options = _tiles(dtype, width, groups, by_path)
    kind = {torch.bfloat16: "*bf16", torch.float16: "*fp16", torch.float32: "*fp32"}[dtype]
    strides = tuple(f"{x}_{axis}" for x, axes in (("q", "bmh"), ("k", "bgs"), ("v", "bgs")) for axis in axes)
    types = dict.fromkeys(("q", "k", "v"), kind) | dict.fromkeys(("acc", "top", "total"), "*fp32") | {"scale": "fp32"}
    types |= dict.fromkeys(("lengths", "bits", "depths", *(["paths"] if by_path else [])), "*i64")
    types |= dict.fromkeys({"M", "reach", "slots", "A", "offset", "window", *strides} - set(ones), "i32")
    constants = {"G": 8, "GROUPS": groups, "D": width, "WINDOW": window, "PATHS": by_path, "SPLIT": SPLIT} | ones
    return Build(
        _attend,
        types,
        constants | ({} if by_path else {"paths": None}) | tiles,
        warps=options["num_warps"],
        stages=options["num_stages"],
        dots=dtype != torch.float32,
        aligned=strides,
    )


_PLAIN = {"M": 1, "reach": 1, "A": 1}  # one token per request
BUILDS = (
    _build(torch.bfloat16, 64, 3, False, False),
    _build(torch.bfloat16, 128, 3, True, False),
    _build(torch.bfloat16, 256, 3, False, False),
    _build(torch.float16, 80, 8, True, True),
    _build(torch.bfloat16, 256, 3, False, True, **_PLAIN),
    _build(torch.float32, 64, 3, False, False, **_PLAIN),
    Build(
        _merge,
        {"out": "*bf16", "lengths": "*i64"}
        | dict.fromkeys(("acc", "top", "total"), "*fp32")
        | dict.fromkeys(("M", "reach", "slots"), "i32"),
        {"H": 24, "D": 128, "SPLIT": SPLIT, "BD": 128},
        warps=1,
    ),
)
