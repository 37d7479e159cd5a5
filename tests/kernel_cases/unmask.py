"""Cases of kernels/unmask.py for kernel_proof.py."""

from __future__ import annotations

import math
from collections.abc import Iterator

import torch
from kernel_proof import Case
from torch import Tensor

from draftsmith.kernels.unmask import (
    Rule,
    Statistics,
    choose,
    statistics,
    statistics_triton,
    unmask,
    unmask_reference,
    unmask_triton,
)

RULES = (
    Rule("threshold", "confidence", 0.3),
    Rule("threshold", "margin", 0.1),
    Rule("threshold", "entropy", 3.0),
    Rule("factor", "confidence", 1.5),
    Rule("factor", "margin", 2.5),
    Rule("count", "confidence"),
    Rule("count", "entropy"),
    Rule("bound", "entropy", 6.0),
)


def finite(found: Statistics) -> tuple[Tensor, ...]:
    """All parts; infinity counts as 1e9."""
    parts = (found.best, found.confidence, found.margin, found.entropy, found.gap, found.lse)
    return tuple(x.nan_to_num(posinf=1e9, neginf=-1e9) for x in parts)


def cases(dtype: torch.dtype) -> Iterator[Case]:
    torch.manual_seed(0)
    x_BCV, open_BC = (torch.randn(3, 9, 300) * 4).to(dtype), torch.rand(3, 9) > 0.3
    x_BCV[0, 3], open_BC[0, 3], open_BC[0, 5] = x_BCV[0, 5], True, True  # equal scores
    open_BC[2] = False
    count_B = torch.tensor([2, 0, 3])
    for rule in RULES:
        n_B = count_B if rule.name == "count" else None
        yield Case(
            f"{rule.name} by {rule.score}",
            lambda rule=rule, n_B=n_B: tuple(unmask(x_BCV, open_BC, rule, n_B, 7)),
            lambda rule=rule, n_B=n_B: tuple(unmask_reference(x_BCV.double(), open_BC, rule, n_B, 7)),
            atol=1e-5,  # fp32 sums of 300 terms; places and tokens are whole numbers
        )
    yield Case(
        "a rule on statistics that are there",
        lambda: (choose(statistics(x_BCV, 7), open_BC, RULES[3]),),
        lambda: (unmask_reference(x_BCV.double(), open_BC, RULES[3], None, 7).chosen_BC,),
        atol=0,
    )
    yield Case(
        "a row's logits in parts, places side by side in memory",
        lambda: tuple(unmask_triton(x_BCV[:2].transpose(0, 1), open_BC[:2].T, RULES[0], None, None, tile=64, tiles=2)),
        lambda: tuple(unmask_reference(x_BCV[:2].double().transpose(0, 1), open_BC[:2].T, RULES[0])),
        atol=1e-5,
    )
    for rows, vocab, mask_id in ((1, 257, None), (5, 1000, 5), (0, 300, None), (4, 300, 4000)):
        y_RV = (torch.randn(rows, vocab) * 3).to(dtype)
        y_RV[:1, 5], y_RV[:1, 200] = 12, 12
        y_RV[1:2, ::2] = -math.inf
        yield Case(
            f"statistics of {rows} rows of {vocab}, without {mask_id}",
            lambda y_RV=y_RV, mask_id=mask_id: finite(statistics(y_RV, mask_id)),
            lambda y_RV=y_RV, mask_id=mask_id: finite(Statistics(y_RV.double(), mask_id)),
            atol=1e-5,
        )
    learns_RV = torch.randn(2, 40).to(dtype).requires_grad_()
    yield Case(
        "gradients take the plain form",
        lambda: torch.autograd.grad(statistics(learns_RV).lse.sum(), learns_RV),
        lambda: torch.autograd.grad(learns_RV.float().logsumexp(-1).sum(), learns_RV),
        atol=0,
    )
    z_VR = (torch.randn(300, 5) * 100 + (1e6 if dtype == torch.float32 else 3e4)).to(dtype)
    z_VR[:, 1:3] = -math.inf
    z_VR[7, 2] = 3
    z_VR[3, 3] = z_VR[290, 3] = torch.finfo(torch.float16).max
    z_VR[64:, 4] = -math.inf
    huge_RV = torch.zeros(1, 300, dtype=dtype)
    huge_RV[0, [3, 290]] = torch.finfo(dtype).max
    yield Case(
        "the largest number twice, but its log-sum-exp",
        lambda: finite(statistics(huge_RV))[:5],
        lambda: tuple(torch.tensor([x]) for x in (3, 0.5, 0.0, math.log(2), 0.0)),
        atol=1e-6,
    )
    yield Case(
        "large, -inf, in parts, columns apart",
        lambda: finite(statistics_triton(z_VR.T, None, tile=32, tiles=2, block=2)),
        lambda: finite(Statistics(z_VR.T.double())),
        atol=0.1 if dtype == torch.float32 else 1e-2,  # an ulp of the log-sum-exp, 1e6 and 3e4 large
    )
