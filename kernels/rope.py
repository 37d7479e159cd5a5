"""Rotary positions for queries and keys, and the keys' and values' way into a cache with a length per row, in one go.

Su et al., "RoFormer" (arXiv:2104.09864), in the half-split form of transformers: channel i turns with channel i + d/2,
x cos + rotate_half(x) sin with cos and sin [B, T, d] as its rotary modules give them (scaling included, in the model's
dtype); each product and the sum are rounded to that dtype. Forward only. Every row of the batch writes to slots of its
own (`models.cache.Cache`), so nothing moves when rows accept different numbers of tokens.
Test: pytest tests/test_kernels.py -k rope
"""

from __future__ import annotations

import torch
from torch import Tensor

from .jit import Build, jit, runs_on, tl, triton


def turned(x_BHTd: Tensor, cos_BTd: Tensor, sin_BTd: Tensor) -> Tensor:
    """x cos + rotate_half(x) sin."""
    first, second = x_BHTd.chunk(2, -1)
    return x_BHTd * cos_BTd[:, None] + torch.cat([-second, first], -1) * sin_BTd[:, None]


def rope_write_reference(
    q_BHTd: Tensor,
    k_BGTd: Tensor,
    v_BGTd: Tensor,
    cos_BTd: Tensor,
    sin_BTd: Tensor,
    keys_BGSd: Tensor,
    values_BGSd: Tensor,
    slots_BT: Tensor,
) -> Tensor:
    """The plain form."""
    index_BGTd = slots_BT[:, None, :, None].expand_as(k_BGTd)
    keys_BGSd.scatter_(2, index_BGTd, turned(k_BGTd, cos_BTd, sin_BTd))
    values_BGSd.scatter_(2, index_BGTd, v_BGTd)
    return turned(q_BHTd, cos_BTd, sin_BTd)


@jit
def rope_write_kernel(
    q_ptr,
    k_ptr,
    v_ptr,
    cos_ptr,
    sin_ptr,
    keys_ptr,
    values_ptr,
    slots_ptr,
    out_ptr,
    H,
    T,
    S,
    d,
    stride_qb,
    stride_qh,
    stride_qt,
    stride_kb,
    stride_kh,
    stride_kt,
    stride_vb,
    stride_vh,
    stride_vt,
    stride_keys_b,
    stride_keys_h,
    stride_keys_s,
    stride_values_b,
    stride_values_h,
    stride_values_s,
    HALF_UP: tl.constexpr,
):
    """Grid (B * T, H + G): a program turns one head of one token; those of keys also move the value. Slots outside the
    cache are not written."""
    token, head = tl.program_id(0).to(tl.int64), tl.program_id(1).to(tl.int64)
    b, t = token // T, token % T
    half = d // 2
    column = tl.arange(0, HALF_UP)
    inside = column < half
    cos_ptr += token * d
    sin_ptr += token * d
    cos_a = tl.load(cos_ptr + column, mask=inside, other=0.0).to(tl.float32)
    cos_b = tl.load(cos_ptr + half + column, mask=inside, other=0.0).to(tl.float32)
    sin_a = tl.load(sin_ptr + column, mask=inside, other=0.0).to(tl.float32)
    sin_b = tl.load(sin_ptr + half + column, mask=inside, other=0.0).to(tl.float32)
    is_q = head < H
    if is_q:
        x_ptr = q_ptr + b * stride_qb + head * stride_qh + t * stride_qt
    else:
        x_ptr = k_ptr + b * stride_kb + (head - H) * stride_kh + t * stride_kt
    x = tl.load(x_ptr + column, mask=inside, other=0.0)
    dtype = x.dtype
    x = x.to(tl.float32)
    y = tl.load(x_ptr + half + column, mask=inside, other=0.0).to(tl.float32)
    turned_x = (x * cos_a).to(dtype).to(tl.float32) - (y * sin_a).to(dtype).to(tl.float32)
    turned_y = (y * cos_b).to(dtype).to(tl.float32) + (x * sin_b).to(dtype).to(tl.float32)
    if is_q:
        out_ptr += ((b * H + head) * T + t) * d
        tl.store(out_ptr + column, turned_x, mask=inside)
        tl.store(out_ptr + half + column, turned_y, mask=inside)
    else:
        slot = tl.load(slots_ptr + token)
        if (slot >= 0) & (slot < S):
            head -= H
            keys_ptr += b * stride_keys_b + head * stride_keys_h + slot * stride_keys_s
            tl.store(keys_ptr + column, turned_x, mask=inside)
            tl.store(keys_ptr + half + column, turned_y, mask=inside)
            v_ptr += b * stride_vb + head * stride_vh + t * stride_vt
            values_ptr += b * stride_values_b + head * stride_values_h + slot * stride_values_s
            tl.store(values_ptr + column, tl.load(v_ptr + column, mask=inside), mask=inside)
            tl.store(values_ptr + half + column, tl.load(v_ptr + half + column, mask=inside), mask=inside)


_STRIDES = [f"stride_{x}{y}" for x in "qkv" for y in "bht"] + [
    f"stride_{x}_{y}" for x in ("keys", "values") for y in "bhs"
]
BUILDS = tuple(
    Build(
        rope_write_kernel,
        dict.fromkeys(("q_ptr", "k_ptr", "v_ptr", "cos_ptr", "sin_ptr", "keys_ptr", "values_ptr", "out_ptr"), kind)
        | {"slots_ptr": "*i64"}
        | dict.fromkeys(("H", "T", "S", "d", *_STRIDES), "i32"),
        {"HALF_UP": half},
        warps=1,
    )
    for kind, half in (("*bf16", 32), ("*fp32", 128))
)


def rope_write_triton(
    q_BHTd: Tensor,
    k_BGTd: Tensor,
    v_BGTd: Tensor,
    cos_BTd: Tensor,
    sin_BTd: Tensor,
    keys_BGSd: Tensor,
    values_BGSd: Tensor,
    slots_BT: Tensor,
) -> Tensor:
    """The kernel; any strides but within a head."""
    (b, h, t, d), g = q_BHTd.shape, k_BGTd.shape[1]
    out_BHTd = torch.empty(b, h, t, d, dtype=q_BHTd.dtype, device=q_BHTd.device)
    if b * t:
        rope_write_kernel[b * t, h + g](
            q_BHTd,
            k_BGTd,
            v_BGTd,
            cos_BTd.expand(b, t, d).contiguous(),
            sin_BTd.expand(b, t, d).contiguous(),
            keys_BGSd,
            values_BGSd,
            slots_BT.contiguous(),
            out_BHTd,
            h,
            t,
            keys_BGSd.shape[2],
            d,
            *q_BHTd.stride()[:3],
            *k_BGTd.stride()[:3],
            *v_BGTd.stride()[:3],
            *keys_BGSd.stride()[:3],
            *values_BGSd.stride()[:3],
            HALF_UP=triton.next_power_of_2(d // 2),
            num_warps=1,
        )
    return out_BHTd


def rope_write(
    q_BHTd: Tensor,
    k_BGTd: Tensor,
    v_BGTd: Tensor,
    cos_BTd: Tensor,
    sin_BTd: Tensor,
    keys_BGSd: Tensor,
    values_BGSd: Tensor,
    slots_BT: Tensor,
) -> Tensor:
    """The turned queries [B, H, T, d]; writes turned keys and the values of G heads into one layer's cache, token t of
    row b into slot `slots_BT[b, t]` (int64, distinct within a row, 0 <= slot < S; the plain form raises outside, the
    kernel writes nothing). cos and sin may be [1, T, d].

    Raises ValueError for other shapes, and where a head's channels do not lie next to each other.
    """
    (b, _, t, d), g, s = q_BHTd.shape, k_BGTd.shape[1], keys_BGSd.shape[2]
    fits = k_BGTd.shape == v_BGTd.shape == (b, g, t, d) and keys_BGSd.shape == values_BGSd.shape == (b, g, s, d)
    tables = cos_BTd.shape == sin_BTd.shape and cos_BTd.shape in ((b, t, d), (1, t, d))
    heads = (q_BHTd, k_BGTd, v_BGTd, keys_BGSd, values_BGSd)
    if not fits or not tables or slots_BT.shape != (b, t) or d % 2 or any(x.stride(-1) != 1 for x in heads):
        shapes = ", ".join(str(tuple(x.shape)) for x in (*heads, cos_BTd, sin_BTd, slots_BT))
        raise ValueError(
            f"rope_write: shapes {shapes}: needed q [B, H, T, d], k and v [B, G, T, d], keys and values of the cache "
            "[B, G, S, d], all with channels side by side, cos and sin [B, T, d], slots [B, T], d even"
        )
    arguments = (q_BHTd, k_BGTd, v_BGTd, cos_BTd, sin_BTd, keys_BGSd, values_BGSd, slots_BT)
    graded = torch.is_grad_enabled() and any(x.requires_grad for x in arguments[:3])
    if q_BHTd.dtype != torch.float64 and not graded and runs_on(*arguments):
        return rope_write_triton(*arguments)
    return rope_write_reference(*arguments)
