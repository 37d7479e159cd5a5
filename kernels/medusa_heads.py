"""The first residual block of K Medusa heads by one product: y_k = h + SiLU(W_k h + b_k), k = 1 .. K.

Cai et al., "Medusa" (arXiv:2401.10774), section 2.1.1; models/medusa.py is the definition. Heads read the same state,
so their weights, stacked [K, D, D], are one matrix of K * D rows; bias, SiLU and the residual go into the product's
epilogue. Rounds where the modules do: the linear map with its bias, SiLU, the sum. Forward only, for few rows.
Test: pytest tests/test_kernels.py -k medusa_heads
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from .jit import Build, jit, runs_on, tl, triton

ROWS, COLUMNS, DEPTH = 16, 64, 64  # of a tile: states, outputs, summands (half as many in fp32)


def medusa_heads_reference(state_MD: Tensor, weight_KDD: Tensor, bias_KD: Tensor) -> Tensor:
    """The plain form."""
    k, d, _ = weight_KDD.shape
    linear_MKD = F.linear(state_MD, weight_KDD.flatten(0, 1), bias_KD.flatten()).view(-1, k, d)
    return state_MD[:, None] + F.silu(linear_MKD)


@jit
def medusa_heads_kernel(
    x_ptr,
    weight_ptr,
    bias_ptr,
    out_ptr,
    M,
    N,
    D,
    stride_x,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    DEPTH: tl.constexpr,
):
    """Grid (M / ROWS, N / COLUMNS), N = K * D outputs per state."""
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    x_row = x_ptr + row[:, None].to(tl.int64) * stride_x
    w_row = weight_ptr + column[None, :].to(tl.int64) * D
    total = tl.zeros([ROWS, COLUMNS], tl.float32)
    for start in range(0, D, DEPTH):
        depth = start + tl.arange(0, DEPTH)
        x = tl.load(x_row + depth[None, :], mask=(row[:, None] < M) & (depth[None, :] < D), other=0.0)
        w = tl.load(w_row + depth[:, None], mask=(column[None, :] < N) & (depth[:, None] < D), other=0.0)
        total = tl.dot(x, w, total, input_precision="ieee")
    inside = (row[:, None] < M) & (column[None, :] < N)
    bias = tl.load(bias_ptr + column, mask=column < N, other=0.0)
    dtype = bias.dtype
    z = (total + bias.to(tl.float32)[None, :]).to(dtype).to(tl.float32)
    silu = (z / (1.0 + tl.exp(-z))).to(dtype).to(tl.float32)
    own = tl.load(x_row + (column % D)[None, :], mask=inside, other=0.0).to(tl.float32)
    tl.store(out_ptr + row[:, None].to(tl.int64) * N + column[None, :], own + silu, mask=inside)


BUILDS = tuple(
    Build(
        medusa_heads_kernel,
        {"x_ptr": kind, "weight_ptr": kind, "bias_ptr": kind, "out_ptr": kind}
        | {"M": "i32", "N": "i32", "D": "i32", "stride_x": "i32"},
        {"ROWS": ROWS, "COLUMNS": COLUMNS, "DEPTH": DEPTH // 2 if kind == "*fp32" else DEPTH},
        aligned=("N", "D", "stride_x"),
        dots=kind != "*fp32",  # exact fp32 products are no tensor-core work
    )
    for kind in ("*bf16", "*fp16", "*fp32")
)


def medusa_heads_triton(
    state_MD: Tensor,
    weight_KDD: Tensor,
    bias_KD: Tensor,
    rows: int = ROWS,
    columns: int = COLUMNS,
    depth: int | None = None,
) -> Tensor:
    """The kernel; states may have any stride but within themselves."""
    (m, d), k = state_MD.shape, len(weight_KDD)
    x_MD = state_MD if state_MD.stride(1) == 1 else state_MD.contiguous()
    out_MKD = torch.empty(m, k, d, dtype=state_MD.dtype, device=state_MD.device)
    if m:
        medusa_heads_kernel[triton.cdiv(m, rows), triton.cdiv(k * d, columns)](
            x_MD,
            weight_KDD.contiguous(),
            bias_KD.contiguous(),
            out_MKD,
            m,
            k * d,
            d,
            x_MD.stride(0),
            ROWS=rows,
            COLUMNS=columns,
            DEPTH=depth or (DEPTH // 2 if state_MD.dtype == torch.float32 else DEPTH),
        )
    return out_MKD


def medusa_heads(state_MD: Tensor, weight_KDD: Tensor, bias_KD: Tensor) -> Tensor:
    """[M, K, D] the states of K heads behind their first block. On GPUs without gradients, which the plain form keeps.

    Raises ValueError for other shapes or dtypes.
    """
    (m, d), k = state_MD.shape, len(weight_KDD)
    if weight_KDD.shape != (k, d, d) or bias_KD.shape != (k, d):
        raise ValueError(
            f"medusa_heads: states {(m, d)}, weights {tuple(weight_KDD.shape)}, biases {tuple(bias_KD.shape)}: "
            "needed [M, D], [K, D, D], [K, D]"
        )
    if not state_MD.dtype == weight_KDD.dtype == bias_KD.dtype:
        raise ValueError(
            f"medusa_heads: states of {state_MD.dtype}, weights of {weight_KDD.dtype}, biases of {bias_KD.dtype}"
        )
    graded = torch.is_grad_enabled() and any(x.requires_grad for x in (state_MD, weight_KDD, bias_KD))
    if state_MD.dtype != torch.float64 and not graded and runs_on(state_MD, weight_KDD, bias_KD):
        return medusa_heads_triton(state_MD, weight_KDD, bias_KD)
    return medusa_heads_reference(state_MD, weight_KDD, bias_KD)
