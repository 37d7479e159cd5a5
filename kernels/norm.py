"""Residual addition and RMS norm in one go, forward only.

Zhang and Sennrich, "Root Mean Square Layer Normalization" (arXiv:1910.07467). Rounding is where the modules of
transformers' Llama, Mistral and Qwen round: the sum to the model's dtype, the norm in fp32 with eps inside the root,
back to the model's dtype, then times the weight. (Families that keep the weight less one, or multiply in fp32, round
elsewhere and are not this function.)

Heads may have weights of their own ([E, D], norms of queries and keys in one go). One program per row; the row is read
once. Test: pytest tests/test_kernels.py -k norm
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from .jit import Build, jit, runs_on, tl, triton


class Normed(NamedTuple):
    """Of rows [..., D], in their dtype."""

    normed: Tensor
    total: Tensor  # rows + residual; the rows themselves where there is none


def add_norm_reference(rows: Tensor, weight: Tensor, eps: float, residual: Tensor | None = None) -> Normed:
    """The plain form."""
    total = rows if residual is None else residual + rows
    wide = total.to(torch.promote_types(total.dtype, torch.float32))
    normed = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)
    return Normed(weight * normed.to(total.dtype), total)


@jit
def add_norm_kernel(
    x_ptr,
    residual_ptr,
    weight_ptr,
    normed_ptr,
    total_ptr,
    D,
    E,
    stride_x,
    stride_residual,
    eps,
    ADD: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Grid (rows,): E of them, side by side, per stride."""
    row = tl.program_id(0).to(tl.int64)
    own = row % E * D
    column = tl.arange(0, BLOCK)
    inside = column < D
    x = tl.load(x_ptr + row // E * stride_x + own + column, mask=inside, other=0.0)
    dtype = x.dtype
    x = x.to(tl.float32)
    if ADD:
        x += tl.load(residual_ptr + row // E * stride_residual + own + column, mask=inside, other=0.0).to(tl.float32)
        x = x.to(dtype)
        tl.store(total_ptr + row * D + column, x, mask=inside)
        x = x.to(tl.float32)
    scale = tl.rsqrt(tl.sum(x * x, 0) / D + eps)
    weight = tl.load(weight_ptr + own + column, mask=inside, other=0.0).to(tl.float32)
    tl.store(normed_ptr + row * D + column, (x * scale).to(dtype).to(tl.float32) * weight, mask=inside)


def _warps(block: int) -> int:
    return min(max(block // 512, 1), 8)


BUILDS = tuple(
    Build(
        add_norm_kernel,
        dict.fromkeys(("x_ptr", "residual_ptr", "weight_ptr", "normed_ptr", "total_ptr"), kind)
        | {"D": "i32", "E": "i32", "stride_x": "i32", "stride_residual": "i32", "eps": "fp32"},
        {"ADD": add, "BLOCK": block},
        warps=_warps(block),
    )
    for kind, add, block in (("*bf16", False, 128), ("*bf16", True, 1024), ("*fp32", True, 8192))
)


def add_norm_triton(rows: Tensor, weight: Tensor, eps: float, residual: Tensor | None = None) -> Normed:
    """The kernel; rows (with [E, D] weights: E of them) may have any stride but within themselves."""
    d = rows.shape[-1]
    e = weight.numel() // d
    x_MED, other_MED = _apart(rows, e), None if residual is None else _apart(residual, e)
    normed = torch.empty(rows.shape, dtype=rows.dtype, device=rows.device)
    total = rows if residual is None else torch.empty_like(normed)
    if count := len(x_MED) * e:
        block = triton.next_power_of_2(d)
        add_norm_kernel[(count,)](
            x_MED,
            x_MED if other_MED is None else other_MED,
            weight.contiguous(),
            normed,
            normed if residual is None else total,
            d,
            e,
            x_MED.stride(0),
            0 if other_MED is None else other_MED.stride(0),
            eps,
            ADD=residual is not None,
            BLOCK=block,
            num_warps=_warps(block),
        )
    return Normed(normed, total)


def _apart(rows: Tensor, e: int) -> Tensor:
    """[M, E, D], of which the last two lie side by side."""
    x_MED = rows.reshape(-1, e, rows.shape[-1])
    side_by_side = x_MED.stride(2) == 1 and (e == 1 or x_MED.stride(1) == x_MED.shape[2])
    return x_MED if side_by_side else x_MED.contiguous()


def add_norm(rows: Tensor, weight: Tensor, eps: float, residual: Tensor | None = None) -> Normed:
    """RMS norm of `rows` + `residual` [..., D] (or of `rows`), times `weight` [D]; the sum comes back too. Rows
    [..., E, D] may have weights [E, D].

    On GPUs without gradients, which the plain form keeps. Raises ValueError where shapes or dtypes differ.
    """
    if weight.shape not in (rows.shape[-1:], rows.shape[-2:]) or weight.dtype != rows.dtype:
        raise ValueError(
            f"add_norm: weight {tuple(weight.shape)} of {weight.dtype} for rows {tuple(rows.shape)} of {rows.dtype}"
        )
    if residual is not None and (residual.shape != rows.shape or residual.dtype != rows.dtype):
        raise ValueError(
            f"add_norm: residual {tuple(residual.shape)} of {residual.dtype} for rows {tuple(rows.shape)} of {rows.dtype}"
        )
    graded = torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in (rows, weight, residual))
    if rows.dtype != torch.float64 and not graded and runs_on(rows, weight, residual):
        return add_norm_triton(rows, weight, eps, residual)
    return add_norm_reference(rows, weight, eps, residual)
