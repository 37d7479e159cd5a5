"""Log-sum-exp and likeliest id straight from hidden states: the logits stay in registers.

Test: pytest tests/test_kernels.py -k linear_loss
"""

from __future__ import annotations

import torch
from torch import Tensor

from .jit import Build, jit, runs_on, tl


@jit
def _logits(hidden, weight, row_T, col_W, has_T, has_W, D, BT: tl.constexpr, BW: tl.constexpr, BD: tl.constexpr):
    """fp32 [BT, BW] of some rows and ids."""
    z_TW = tl.zeros((BT, BW), tl.float32)
    for d in range(0, D, BD):
        at_D = d + tl.arange(0, BD)
        h_TD = tl.load(hidden + row_T[:, None] * D + at_D[None, :], has_T[:, None] & (at_D < D)[None, :], 0.0)
        w_DW = tl.load(weight + col_W[None, :] * D + at_D[:, None], has_W[None, :] & (at_D < D)[:, None], 0.0)
        z_TW = tl.dot(h_TD, w_DW, z_TW, input_precision="ieee")
    return z_TW


@jit
def _statistics(hidden, weight, most, total, best, T, W, D, span, BT: tl.constexpr, BW: tl.constexpr, BD: tl.constexpr):
    """Running maximum, sum of exponentials and likeliest id of BT rows over one span of ids."""
    row_T = tl.program_id(0).to(tl.int64) * BT + tl.arange(0, BT)
    has_T = row_T < T
    most_T = tl.full((BT,), float("-inf"), tl.float32)
    total_T = tl.zeros((BT,), tl.float32)
    best_T = tl.zeros((BT,), tl.int32)
    first = tl.program_id(1) * span
    for lo in range(first, min(first + span, W), BW):
        col_W = lo + tl.arange(0, BW).to(tl.int64)
        has_W = col_W < W
        z_TW = _logits(hidden, weight, row_T, col_W, has_T, has_W, D, BT, BW, BD)
        z_TW = tl.where(has_W[None, :], z_TW, float("-inf"))
        top_T = tl.max(z_TW, 1)
        best_T = tl.where(top_T > most_T, lo + tl.argmax(z_TW, 1), best_T)
        new_T = tl.maximum(most_T, top_T)
        total_T = total_T * tl.exp(most_T - new_T) + tl.sum(tl.exp(z_TW - new_T[:, None]), 1)
        most_T = new_T
    at_T = tl.program_id(1) * T + row_T
    tl.store(most + at_T, most_T, has_T)
    tl.store(total + at_T, total_T, has_T)
    tl.store(best + at_T, best_T, has_T)


def reference(hidden_TD: Tensor, weight_WD: Tensor) -> tuple[Tensor, Tensor]:
    """(log-sum-exp [T], likeliest id [T]) of hidden @ weight.T."""
    z_TW = hidden_TD @ weight_WD.T
    return z_TW.logsumexp(-1), z_TW.argmax(-1)


def linear_loss(hidden_TD: Tensor, weight_WD: Tensor) -> tuple[Tensor, Tensor]:
    """`reference` without its logits."""
    if not runs_on(hidden_TD, weight_WD):
        return reference(hidden_TD, weight_WD)
    (T, D), W = hidden_TD.shape, len(weight_WD)
    splits = 2
    span = -(-W // (32 * splits)) * 32
    most_ST, total_ST = (torch.empty(splits, T, device=hidden_TD.device) for _ in range(2))
    best_ST = torch.empty(splits, T, dtype=torch.int32, device=hidden_TD.device)
    grid = (-(-T // 16), splits)
    _statistics[grid](hidden_TD, weight_WD, most_ST, total_ST, best_ST, T, W, D, span, BT=16, BW=32, BD=16)
    top = most_ST.max(0)
    return (most_ST + total_ST.log()).logsumexp(0), best_ST.gather(0, top.indices[None])[0].long()


_SIZES = {"T": "i32", "W": "i32", "D": "i32", "span": "i32"}
BUILDS = (
    Build(
        _statistics,
        types={"hidden": "*bf16", "weight": "*bf16", "most": "*fp32", "total": "*fp32", "best": "*i32"} | _SIZES,
        constants={"BT": 64, "BW": 128, "BD": 64},
        warps=8,
        dots=True,
        aligned=("D", "span"),
    ),
)
