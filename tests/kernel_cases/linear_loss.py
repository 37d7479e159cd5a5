"""Cases of kernels/linear_loss.py for kernel_proof.py: each kind of teacher, gradients by hidden, head and bias."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch
from kernel_proof import Case
from torch import Tensor

from draftsmith.kernels.linear_loss import Dense, FromHidden, TopK, linear_loss, reference

ALL = ("kl", "reverse_kl", "jsd", "tv", "neg_log_accept", "lk", "ce", "entropy")
OBJECTIVE = tuple((0.3 + 0.1 * i, name) for i, name in enumerate(ALL))
LABELS = ((1.0, "ce"), (0.5, "entropy"))


def teachers(t: int, w: int, dtype: torch.dtype) -> dict[str, Any]:
    """One of each kind, over a vocabulary of w ids of which the last ones are outside for "topk"."""
    full_TV = (2 * torch.randn(t, w + 9)).log_softmax(-1)
    log_p_TK, ids_TK = full_TV.topk(5, dim=-1)
    tail_T = 1 - full_TV[:, w:].exp().sum(-1) - log_p_TK.exp().masked_fill(ids_TK >= w, 0).sum(-1)
    return {
        "hidden": FromHidden(
            torch.randn(t + 3, 17).to(dtype),
            torch.randn(w, 17).div(4).to(dtype),
            torch.randn(w).to(dtype),
            log_z_T=torch.full((t,), 6.0),
            index_T=torch.randint(t + 3, (t,)),
        ),
        "dense": Dense(full_TV[:, :w].to(dtype), full_TV.div(0.8).logsumexp(-1), tail=True),
        "topk": TopK(ids_TK.masked_fill(ids_TK >= w, -1), log_p_TK, tail_T.clamp(min=0)),
        "none": None,
    }


def widened(teacher: Any) -> Any:
    if teacher is None:
        return None
    fields = {k: x.double() if isinstance(x, Tensor) and x.is_floating_point() else x for k, x in vars(teacher).items()}
    return type(teacher)(**fields)


def cases(dtype: torch.dtype) -> Iterator[Case]:
    torch.manual_seed(0)
    t, w, d = 19, 75, 21
    hidden_TD, weight_WD = torch.randn(t, d).to(dtype), torch.randn(w, d).div(4).to(dtype)
    bias_W, label_T, weight_T = torch.randn(w).to(dtype), torch.randint(-1, w, (t,)), torch.rand(t)

    def case(kind: str, teacher: Any, terms: Any, bias_W: Tensor, label_T: Tensor) -> Case:
        asked: dict[str, Any] = {"label_T": label_T, "temperature": 0.8}

        def run() -> tuple[Tensor, ...]:
            given = [x.detach().clone().requires_grad_() for x in (hidden_TD, weight_WD, bias_W)]
            full = asked | {"teacher": teacher, "weight_T": weight_T, "chunk": 11}
            out = linear_loss(given[0], given[1], terms, bias_W=given[2], **full)
            return out.total, out.value_T, out.accept_T, out.log_mass_T, *torch.autograd.grad(out.total, given)

        def want() -> tuple[Tensor, ...]:
            given = [x.detach().double().requires_grad_() for x in (hidden_TD, weight_WD, bias_W)]
            value_T = reference(given[0], given[1], terms, bias_W=given[2], teacher=widened(teacher), **asked)
            total = (value_T * weight_T).sum()
            # In float64 by chunks, which tests/test_linear_loss.py holds against the definitions.
            out = linear_loss(given[0], given[1], terms, bias_W=given[2], teacher=widened(teacher), **asked)
            return total, value_T, out.accept_T, out.log_mass_T, *torch.autograd.grad(total, given)

        # Sums of 75 terms in fp32; fp16: slopes and gradients of size 4 are stored with 11 bits, sums of 19 rows.
        return Case(kind, run, want, atol=2e-5 if dtype == torch.float32 else 2e-2)

    for kind, teacher in teachers(t, w, dtype).items():
        yield case(kind, teacher, LABELS if teacher is None else OBJECTIVE, bias_W, label_T)
    top = teachers(t, w, dtype)["topk"]
    mass_T = top.tail_T + top.log_p_TK.exp().masked_fill(top.ids_TK < 0, 0).sum(-1)
    yield case("topk, scaled to its mass", replace(top, log_mass_T=mass_T.log()), OBJECTIVE, bias_W, label_T)
    banned_W = bias_W.clone().index_fill_(0, torch.tensor([7]), float("-inf"))
    yield case("a banned id", None, LABELS, banned_W, label_T.masked_fill(label_T == 7, 8))
    # Of five ids the teacher has two alone, one of which is banned: losses that stay of size 1.
    topk = teachers(t, w, dtype)["topk"]
    log_p_TK = torch.tensor([0.5, 0.5, 0, 0, 0]).log().expand(t, 5)
    sure = replace(topk, ids_TK=torch.tensor([7, 3, 0, 9, -1]).expand(t, 5), log_p_TK=log_p_TK, tail_T=None)
    terms = tuple((factor, name) for factor, name in OBJECTIVE if name in ("tv", "jsd", "entropy"))
    yield case("a certain teacher of a banned id", sure, terms, banned_W, label_T)
