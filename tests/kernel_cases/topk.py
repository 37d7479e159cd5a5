"""Cases of kernels/topk.py for kernel_proof.py: against a stable sort."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator

import torch
from kernel_proof import Case
from torch import Tensor

from draftsmith.kernels.topk import TopK, topk, topk_reference, topk_triton

INFINITE = {"posinf": 1e9, "neginf": -1e9}  # what infinity counts as


def compared(name: str, x_RV: Tensor, k: int, run: Callable[[], TopK]) -> Case:
    def want() -> tuple[Tensor, ...]:
        x = x_RV.double()
        best = x.sort(dim=-1, descending=True, stable=True)
        return tuple(y.nan_to_num(**INFINITE) for y in (best.values[:, :k], best.indices[:, :k], x.logsumexp(-1)))

    size = float(x_RV.double().logsumexp(-1).nan_to_num(0, 0, 0).abs().max()) if len(x_RV) else 0
    # The log-sum-exp: sums of V fp32 terms, and one ulp of the result. Ids are whole numbers, values copies.
    return Case(name, lambda: tuple(y.nan_to_num(**INFINITE) for y in run()), want, atol=1e-5 + 2e-7 * size)


def cases(dtype: torch.dtype) -> Iterator[Case]:
    torch.manual_seed(0)
    for rows, vocab, k, tile in (
        (1, 257, 1, None),
        (1, 700, 32, 256),
        (2, 300, 5, 64),
        (0, 300, 4, None),
        (2, 40, 32, 64),
    ):
        x_RV = (torch.randn(rows, vocab) * 3).to(dtype)

        def run(x_RV: Tensor = x_RV, k: int = k, tile: int | None = tile) -> TopK:
            return topk(x_RV, k) if tile is None else topk_triton(x_RV, k, tile)

        yield compared(f"{k} of {rows} rows of {vocab}", x_RV, k, run)
    learns_RV = torch.randn(2, 40).to(dtype).requires_grad_()
    yield Case(
        "gradients take the plain form",
        lambda: torch.autograd.grad(topk(learns_RV, 3).lse_R.sum(), learns_RV),
        lambda: torch.autograd.grad(learns_RV.float().logsumexp(-1).sum(), learns_RV),
        atol=0,
    )
    x_RV = torch.randn(4, 300).round().to(dtype)  # many equals, of both zeros too
    x_RV[0, 17], x_RV[0, 203] = 9, 9
    x_RV[1] = -math.inf
    x_RV[2, 3:] = -math.inf
    x_RV[3] = 0
    x_RV[3, ::3] = -0.0
    yield compared("equals and -inf", x_RV, 4, lambda: topk_triton(x_RV, 4, 128))
    large_RV = (torch.randn(300, 3) * (3e38 if dtype == torch.float32 else 6e4) / 8).to(dtype).T
    yield compared("large, columns apart", large_RV, 4, lambda: topk_triton(large_RV, 4, 128))
    broken_RV = torch.randn(2, 200).to(dtype)
    broken_RV[0, 150], broken_RV[1, 3] = math.nan, -math.nan
    yield Case(
        "NaN",
        lambda: tuple(x.nan_to_num(77) for x in topk_triton(broken_RV, 3, 64)),
        lambda: tuple(x.nan_to_num(77) for x in topk_reference(broken_RV, 3)),
        atol=1e-5,
    )
