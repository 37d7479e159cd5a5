"""Losses straight from hidden states and a head's weight: the logits [T, W] are never a tensor.

    z = (hidden @ weight.T + bias) / temperature,   q = softmax(z),   value of a row = sum of its weighed terms

W is the draft vocabulary (`d2t_W` picks its rows of the whole head). Every term's slope by z has the shape

    dz = q (a0 + a1 r + a2 m + a3 [q < p] + a4 log q) + a5 p + a6 [label],   r = log q - log p,  m = log q - log (p+q)/2

with seven numbers a row, made of a few sums a row: so a first pass finds the log-sum-exps, a second one the sums, and a
third one the slopes, `chunk` rows at a time, times weight and hidden. One rule for the chunked PyTorch form and for the
kernels, which keep fp32 logits in registers. A teacher of K likeliest ids and a rest is a distribution over K + 1
classes; the drafter's rest is the sum of all its other ids, and an id of a class shares its slope by q.

Terms as in losses/distill.py (same values: tests/test_linear_loss.py), and "entropy" of q. Online softmax: Milakov and
Gimelshein, arXiv:1805.02867; LK losses: arXiv:2602.23881. The tail of a teacher: missing mass is a class that the
drafter gives nothing. A probability of 0 counts as e**-10000.

Test: pytest tests/test_linear_loss.py; tests/test_kernels.py -k linear_loss. Measured: tests/bench/linear_loss.py
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from .jit import runs_on
from .linear_loss_rules import (
    FLOOR,
    LK_ETA,
    NEEDS_LABEL,
    NEEDS_TEACHER,
    SMALLEST_ACCEPT,
    TERMS,
    Dense,
    FromHidden,
    Job,
    Teacher,
    TopK,
    Walked,
    fold,
    sums_of,
)
from .linear_loss_triton import BUILDS, walk_kernels

__all__ = ["BUILDS", "TERMS", "Dense", "FromHidden", "LinearLoss", "TopK", "linear_loss", "reference"]


@dataclass
class LinearLoss:
    """Of T rows, fp32 at least."""

    total: Tensor
    """[] sum over rows of weight times value. Carries gradients."""
    value_T: Tensor
    """[T]; carries gradients where no weights were given."""
    ce_T: Tensor
    """Cross-entropy with the label at `temperature`; 0 without one."""
    entropy_T: Tensor
    """Of q, nats."""
    accept_T: Tensor
    """Sum min(p, q): the chance that the teacher accepts a token of q; 0 without a teacher."""
    top_T: Tensor
    """int64, the likeliest id."""
    match_T: Tensor
    """bool, it is the teacher's likeliest of the draft vocabulary too; false without a teacher."""


def reference(
    hidden_TD: Tensor,
    weight_WD: Tensor,
    terms: Sequence[tuple[float, str]],
    *,
    bias_W: Tensor | None = None,
    teacher: Teacher | None = None,
    label_T: Tensor | None = None,
    temperature: float = 1.0,
) -> Tensor:
    """[T] values by way of all logits, from the definitions, gradients by autograd."""
    z_TW = F.linear(hidden_TD, weight_WD, bias_W)
    log_q_TW = (z_TW.to(torch.promote_types(z_TW.dtype, torch.float32)) / temperature).log_softmax(-1)
    value_T = log_q_TW.new_zeros(len(log_q_TW))
    p = q = log_p = log_q = m = value_T[:, None]
    if teacher is not None:
        log_q, log_p = classes(teacher, slice(None), log_q_TW.clamp(min=FLOOR), temperature)
        p, q = log_p.exp(), log_q.exp()
        m = torch.logaddexp(log_p, log_q) - math.log(2)
    accept_T, mass_T = torch.minimum(p, q).sum(-1), p.sum(-1)
    kl_T = (p * (log_p - log_q)).sum(-1) - torch.special.xlogy(mass_T, mass_T)
    for factor, name in terms:
        if name == "ce":
            assert label_T is not None
            picked_T = log_q_TW.gather(-1, label_T.clamp(min=0)[:, None])[:, 0]
            own_T = torch.where(label_T >= 0, -picked_T, 0)
        elif name == "entropy":
            own_T = -(log_q_TW.exp() * log_q_TW.clamp(min=FLOOR)).sum(-1)
        elif name == "kl":
            own_T = kl_T
        elif name == "reverse_kl":
            own_T = (q * (log_q - log_p)).sum(-1)
        elif name == "jsd":
            own_T = ((p * (log_p - m) + q * (log_q - m)).sum(-1) + (1 - mass_T) * math.log(2)) / 2
        elif name in ("tv", "l1"):
            own_T = (1 - accept_T) * (2 if name == "l1" else 1)
        elif name == "neg_log_accept":
            own_T = -accept_T.clamp(min=SMALLEST_ACCEPT).log()
        else:
            mix_T = (-LK_ETA * accept_T.detach()).exp()
            own_T = mix_T * kl_T + (1 - mix_T) * (1 - accept_T)
        value_T = value_T + factor * own_T
    return value_T


def classes(teacher: Teacher, span: slice, log_q_TW: Tensor, temperature: float) -> tuple[Tensor, Tensor]:
    """log q and log p, FLOOR at least, of some rows over what the teacher tells apart: the ids [T, W] (log q is then the
    one given), or its K and a rest [T, K + 1]."""
    if isinstance(teacher, TopK):
        ids_TK, log_p_TK = teacher.ids_TK[span], teacher.log_p_TK[span].detach().to(log_q_TW.dtype)
        inside_TK = ids_TK >= 0
        rest_T1 = log_q_TW.masked_fill(teacher.mask(span, log_q_TW.shape[-1]), float("-inf")).logsumexp(-1, True)
        log_q_TK = log_q_TW.gather(-1, ids_TK.clamp(min=0)).masked_fill(~inside_TK, FLOOR)
        log_q = torch.cat([log_q_TK, rest_T1.clamp(min=FLOOR)], -1)
        log_p = torch.cat([log_p_TK.masked_fill(~inside_TK, FLOOR), teacher.log_rest_T(span)[:, None].to(log_q)], -1)
    else:
        if isinstance(teacher, FromHidden):
            with torch.no_grad():
                z_TW = F.linear(teacher.hidden_TD[span], teacher.weight_WD, teacher.bias_W).to(log_q_TW.dtype)
        else:
            z_TW = teacher.logits_TW[span].detach().to(log_q_TW.dtype)
        log_q, log_p = log_q_TW, (z_TW if temperature == 1 else z_TW / temperature).log_softmax(-1)
        if teacher.log_mass_T is not None:
            log_p = log_p + teacher.log_mass_T[span].to(log_p.dtype)[:, None]
    return log_q, log_p.clamp_(min=FLOOR)


@torch.no_grad()
def walk_chunks(
    job: Job, hidden_TD: Tensor, weight_WD: Tensor, bias_W: Tensor | None, weight_T: Tensor | None
) -> Walked:
    """Values, and the sums over rows of weight times slope by hidden, head and bias, as far as `job` wants them: PyTorch,
    `job.chunk` rows at a time. Without `weight_T` each row weighs 1."""
    wide, rows = torch.promote_types(hidden_TD.dtype, torch.float32), len(hidden_TD)

    def new(dtype: torch.dtype) -> Tensor:
        return torch.zeros(rows, dtype=dtype, device=hidden_TD.device)

    # All that stays is made first: small tensors between the large ones of a chunk would keep their room from the next.
    done = Walked(
        *(new(wide), new(wide), new(wide), new(wide), new(torch.int64), new(torch.bool)),
        job.new_grads(hidden_TD, weight_WD, bias_W),
    )
    for lo in range(0, rows, job.chunk):
        walk_chunk(slice(lo, lo + job.chunk), done, job, hidden_TD, weight_WD, bias_W, weight_T)
    return done


def walk_chunk(
    span: slice,
    done: Walked,
    job: Job,
    hidden_TD: Tensor,
    weight_WD: Tensor,
    bias_W: Tensor | None,
    weight_T: Tensor | None,
) -> None:
    """The rows of one chunk, into `done`."""
    z_TW = F.linear(hidden_TD[span], weight_WD, bias_W).to(done.value_T.dtype)
    log_q_TW = (z_TW if job.temperature == 1 else z_TW.div_(job.temperature)).log_softmax(-1)
    del z_TW
    done.top_T[span] = log_q_TW.argmax(-1)
    label_T = None if job.label_T is None else job.label_T[span]
    if label_T is not None:
        picked_T = log_q_TW.gather(-1, label_T.clamp(min=0)[:, None])[:, 0]
        done.ce_T[span] = torch.where(label_T >= 0, -picked_T, 0)
    log_q_TW.clamp_(min=FLOOR)
    q_TW = log_q_TW.exp()
    sums, told = None, None
    if job.teacher is not None:
        log_q, log_p = classes(job.teacher, span, log_q_TW, job.temperature)
        told = log_q, log_p, log_p.exp()
        sums = sums_of(log_q, log_p, q_TW if log_q is log_q_TW else log_q.exp(), told[2], job.used)
        done.match_T[span] = done.top_T[span] == job.teacher.top_of(span, log_p)
        done.accept_T[span] = sums.accept_T
    done.entropy_T[span] = -torch.linalg.vecdot(q_TW, log_q_TW)
    scale_T = None if weight_T is None else weight_T[span]
    done.value_T[span], a = fold(job, sums, done.ce_T[span], done.entropy_T[span], label_T, scale_T)
    if any(done.grads.wanted):
        slope_TW = slopes(a, q_TW, log_q_TW, told, job, span)
        done.grads.add(span, slope_TW.to(hidden_TD.dtype), hidden_TD, weight_WD)


def slopes(
    a: list[Tensor | None],
    q_TW: Tensor,
    log_q_TW: Tensor,
    told: tuple[Tensor, Tensor, Tensor] | None,
    job: Job,
    span: slice,
) -> Tensor:
    """[T, W] slopes by the logits: the formula of this file's head; a number that is None is 0.
    `told`: log q, log p and p of the classes. Writes over `q_TW`."""

    def factor(log_q: Tensor, log_p: Tensor) -> Tensor:
        """a1 r + a2 m + a3 [q < p]."""
        r = log_q - log_p
        out = torch.zeros_like(r) if a[1] is None else a[1][:, None] * r
        if a[2] is not None:
            out.addcmul_(a[2][:, None], F.logsigmoid(r).add_(math.log(2)))
        return out if a[3] is None else out.addcmul_(a[3][:, None], (r < 0).to(r.dtype))

    assert a[0] is not None
    bent = any(x is not None for x in a[1:4])
    if told is not None and isinstance(job.teacher, TopK):
        log_q, log_p, p = told
        shift_TC = factor(log_q, log_p) if bent else torch.zeros_like(log_q)
        slope_TW = q_TW * (a[0] + shift_TC[:, -1])[:, None]
        slope_TK = log_q[:, :-1].exp() * (a[0][:, None] + shift_TC[:, :-1])
        if a[5] is not None:
            slope_TW.addcmul_(a[5][:, None], (log_q_TW + (log_p - log_q)[:, -1:]).exp_())
            slope_TK.addcmul_(a[5][:, None], p[:, :-1])
        row, place = (job.teacher.ids_TK[span] >= 0).nonzero(as_tuple=True)
        slope_TW[row, job.teacher.ids_TK[span][row, place]] = slope_TK[row, place]
        if a[4] is not None:
            slope_TW.addcmul_(a[4][:, None] * q_TW, log_q_TW)
    else:
        if a[4] is None and not (bent and told):
            slope_TW = q_TW.mul_(a[0][:, None])
        else:
            inner_TW = factor(*told[:2]).add_(a[0][:, None]) if bent and told else a[0][:, None].expand_as(q_TW).clone()
            if a[4] is not None:
                inner_TW.addcmul_(a[4][:, None], log_q_TW)
            slope_TW = q_TW.mul_(inner_TW)
        if a[5] is not None and told is not None:
            slope_TW.addcmul_(a[5][:, None], told[2])
    if a[6] is not None and job.label_T is not None:
        slope_TW.scatter_add_(-1, job.label_T[span].clamp(min=0)[:, None], a[6][:, None])
    return slope_TW


class _Linear(torch.autograd.Function):
    """Weights known: gradients are formed in forward, no pass is made twice. Weights to come: so they are for a head
    that does not learn (a vector per row); where it learns, backward walks again."""

    @staticmethod
    def forward(
        ctx: Any, hidden_TD: Tensor, weight_WD: Tensor, bias_W: Tensor | None, weight_T: Tensor | None, job: Job
    ) -> tuple[Tensor, ...]:
        learns = job.wanted[1] or job.wanted[2]
        ctx.again = weight_T is None and learns
        fits = runs_on(*job.floats(), hidden_TD, weight_WD, bias_W) and hidden_TD.dtype != torch.float64
        walk = walk_kernels if fits else walk_chunks
        first = replace(job, wanted=(False, False, False)) if ctx.again else job
        done = walk(first, hidden_TD, weight_WD, bias_W, weight_T)
        ctx.job, ctx.walk, ctx.by_row = job, walk, weight_T is None
        ctx.save_for_backward(hidden_TD, weight_WD, bias_W)
        ctx.each = done.grads.each
        total = (done.value_T if weight_T is None else done.value_T * weight_T.to(done.value_T.dtype)).sum()
        rest = (done.ce_T, done.entropy_T, done.accept_T, done.top_T, done.match_T)
        ctx.mark_non_differentiable(*rest, *((done.value_T,) if weight_T is not None else ()))
        return total, done.value_T, *rest

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, by_total: Tensor, by_value_T: Tensor, *_: Tensor) -> tuple[Tensor | None, ...]:
        hidden_TD, weight_WD, bias_W = ctx.saved_tensors
        by_T = by_total + by_value_T if ctx.by_row else by_total
        if ctx.again:
            each, by_T = ctx.walk(ctx.job, hidden_TD, weight_WD, bias_W, by_T).grads.each, torch.ones(())
        else:
            each, ctx.each = ctx.each, None  # scaled in place: the head's gradient may be the largest tensor of all
            if each is None:
                raise RuntimeError(
                    "linear_loss: its gradients were formed once; make the loss anew for a second backward"
                )
        by = by_T[:, None] if by_T.ndim else by_T
        given = zip(each, (hidden_TD, weight_WD, bias_W), strict=True)
        return *(None if g is None or x is None else g.mul_(by.to(g)).to(x.dtype) for g, x in given), None, None


def linear_loss(
    hidden_TD: Tensor,
    weight_WD: Tensor,
    terms: Sequence[tuple[float, str]],
    *,
    bias_W: Tensor | None = None,
    teacher: Teacher | None = None,
    label_T: Tensor | None = None,
    weight_T: Tensor | None = None,
    temperature: float = 1.0,
    d2t_W: Tensor | None = None,
    chunk: int | None = None,
) -> LinearLoss:
    """The weighed terms of each row, from states [T, D] and a head [W, D], with gradients for both and the bias.

    `terms` as `parse_objective` gives them. `label_T`: draft ids, -1 = none. `weight_T` [T], without gradient: known
    weights save the second pass where the head learns; without them `value_T` can be weighed later. `d2t_W`: target ids
    of the draft vocabulary, `weight_WD` then holds all rows [V, D] (and `bias_W` [V]). `temperature` divides the logits
    of both sides, of a `TopK` teacher's not. `chunk`: rows at a time. Raises ValueError for what does not fit together.
    """
    if d2t_W is not None:
        weight_WD, bias_W = weight_WD[d2t_W], None if bias_W is None else bias_W[d2t_W]
    rows, width = len(hidden_TD), len(weight_WD)
    names = {name for _, name in terms}
    if unknown := sorted(names - set(TERMS)):
        raise ValueError(f"linear_loss: no term {unknown[0]!r}; there are {', '.join(TERMS)}")
    if teacher is None and (names & NEEDS_TEACHER):
        raise ValueError(f"linear_loss: {', '.join(sorted(names & NEEDS_TEACHER))} need a teacher; give one")
    if label_T is None and (names & NEEDS_LABEL):
        raise ValueError("linear_loss: ce needs label_T; give it")
    if weight_T is not None and weight_T.requires_grad:
        raise ValueError("linear_loss: weight_T gets no gradient here; weigh value_T yourself, or detach the weights")
    if not (math.isfinite(temperature) and temperature > 0):
        raise ValueError(f"linear_loss: temperature={temperature}, must be positive and finite")
    if hidden_TD.ndim != 2 or weight_WD.ndim != 2 or hidden_TD.shape[1] != weight_WD.shape[1]:
        raise ValueError(
            f"linear_loss: hidden {tuple(hidden_TD.shape)} and weight {tuple(weight_WD.shape)}; must be [T, D] and [W, D]"
        )
    given = {"label_T": label_T, "weight_T": weight_T, "teacher": None if teacher is None else teacher.first()}
    for name, x in given.items():
        if x is not None and len(x) != rows:
            raise ValueError(f"linear_loss: {name} has {len(x)} rows, hidden has {rows}")
    if isinstance(teacher, Dense | FromHidden) and teacher.width() != width:
        raise ValueError(f"linear_loss: the teacher speaks of {teacher.width()} ids, the head of {width}")
    wanted = tuple(
        torch.is_grad_enabled() and x is not None and x.requires_grad for x in (hidden_TD, weight_WD, bias_W)
    )
    if not rows:
        none = hidden_TD.to(torch.promote_types(hidden_TD.dtype, torch.float32)).sum(-1)
        ids = torch.zeros(0, dtype=torch.int64, device=none.device)
        return LinearLoss(none.sum(), none, none.detach(), none.detach(), none.detach(), ids, ids.bool())
    if chunk is None:
        chunk = job_rows(rows, width, hidden_TD.device.type)
    job = Job(tuple(terms), teacher, label_T, temperature, max(1, chunk), wanted)
    with torch.autocast(hidden_TD.device.type, enabled=False):
        return LinearLoss(*_Linear.apply(hidden_TD, weight_WD, bias_W, weight_T, job))


def job_rows(rows: int, width: int, device: str) -> int:
    """Rows at a time: a sixteenth of all (the memory bound), at least 64 (products of matrices stay fast), and no more
    logits than 2**22 (CPU) or 2**26."""
    most = 2**22 if device == "cpu" else 2**26
    return max(8, min(max(rows // 16, 64), most // width))
