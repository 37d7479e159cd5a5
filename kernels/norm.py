"""Residual addition and RMS norm in one go, forward only.

Zhang and Sennrich, "Root Mean Square Layer Normalization" (arXiv:1910.07467). Rounding is where the modules of
transformers' Llama, Mistral and Qwen round: the sum to the model's dtype, the norm in fp32 with eps inside the root,
back to the model's dtype, then times the weight. (Families that keep the weight less one, or multiply in fp32, round
elsewhere and are not this function.)

One program per row; the row is read once. Test: pytest tests/test_kernels.py -k norm
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


def add_norm_reference(rows: Tensor, weight_D: Tensor, eps: float, residual: Tensor | None = None) -> Normed:
    """The plain form."""
    total = rows if residual is None else residual + rows
    wide = total.to(torch.promote_types(total.dtype, torch.float32))
    normed = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)
    return Normed(weight_D * normed.to(total.dtype), total)


@jit
def add_norm_kernel(
    x_ptr,
    residual_ptr,
    weight_ptr,
    normed_ptr,
    total_ptr,
    D,
    stride_x,
    stride_residual,
    eps,
    ADD: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Grid (rows,)."""
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    inside = column < D
    x = tl.load(x_ptr + row * stride_x + column, mask=inside, other=0.0)
    dtype = x.dtype
    x = x.to(tl.float32)
    if ADD:
        x += tl.load(residual_ptr + row * stride_residual + column, mask=inside, other=0.0).to(tl.float32)
        x = x.to(dtype)
        tl.store(total_ptr + row * D + column, x, mask=inside)
        x = x.to(tl.float32)
    scale = tl.rsqrt(tl.sum(x * x, 0) / D + eps)
    weight = tl.load(weight_ptr + column, mask=inside, other=0.0).to(tl.float32)
    tl.store(normed_ptr + row * D + column, (x * scale).to(dtype).to(tl.float32) * weight, mask=inside)


def _warps(block: int) -> int:
    return min(max(block // 512, 1), 8)


BUILDS = tuple(
    Build(
        add_norm_kernel,
        dict.fromkeys(("x_ptr", "residual_ptr", "weight_ptr", "normed_ptr", "total_ptr"), kind)
        | {"D": "i32", "stride_x": "i32", "stride_residual": "i32", "eps": "fp32"},
        {"ADD": add, "BLOCK": block},
        warps=_warps(block),
    )
    for kind, add, block in (("*bf16", False, 128), ("*bf16", True, 1024), ("*fp32", True, 8192))
)


def add_norm_triton(rows: Tensor, weight_D: Tensor, eps: float, residual: Tensor | None = None) -> Normed:
    """The kernel; rows may have any stride but within themselves."""
    d = rows.shape[-1]
    x_MD = rows.reshape(-1, d)
    x_MD = x_MD if x_MD.stride(1) == 1 else x_MD.contiguous()
    other_MD = x_MD if residual is None else residual.reshape(-1, d)
    other_MD = other_MD if other_MD.stride(1) == 1 else other_MD.contiguous()
    normed = torch.empty(rows.shape, dtype=rows.dtype, device=rows.device)
    total = rows if residual is None else torch.empty_like(normed)
    if len(x_MD):
        block = triton.next_power_of_2(d)
        add_norm_kernel[(len(x_MD),)](
            x_MD,
            other_MD,
            weight_D.contiguous(),
            normed,
            normed if residual is None else total,
            d,
            x_MD.stride(0),
            other_MD.stride(0),
            eps,
            ADD=residual is not None,
            BLOCK=block,
            num_warps=_warps(block),
        )
    return Normed(normed, total)


def add_norm(rows: Tensor, weight_D: Tensor, eps: float, residual: Tensor | None = None) -> Normed:
    """RMS norm of `rows` + `residual` [..., D] (or of `rows`), times `weight_D`; the sum comes back too.

    On GPUs without gradients, which the plain form keeps. Raises ValueError where shapes or dtypes differ.
    """
    if weight_D.shape != rows.shape[-1:] or weight_D.dtype != rows.dtype:
        raise ValueError(
            f"add_norm: weight {tuple(weight_D.shape)} of {weight_D.dtype} for rows {tuple(rows.shape)} of {rows.dtype}"
        )
    if residual is not None and (residual.shape != rows.shape or residual.dtype != rows.dtype):
        raise ValueError(
            f"add_norm: residual {tuple(residual.shape)} of {residual.dtype} for rows {tuple(rows.shape)} of {rows.dtype}"
        )
    graded = torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in (rows, weight_D, residual))
    if rows.dtype != torch.float64 and not graded and runs_on(rows, weight_D, residual):
        return add_norm_triton(rows, weight_D, eps, residual)
    return add_norm_reference(rows, weight_D, eps, residual)
