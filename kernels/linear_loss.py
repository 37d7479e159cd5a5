"""Losses straight from hidden states and a head's weight: the logits [T, W] are never a tensor.

    z = (hidden @ weight.T + bias) / temperature,   q = softmax(z),   value of a row = sum of its weighed terms

W is the draft vocabulary (`d2t_W` picks its rows of the whole head). Every term's slope by z has the shape

    dz = q (a0 + a1 r + a2 m + a3 [q < p] + a4 log q) + a5 p + a6 [label],   r = log q - log p,  m = log q - log (p+q)/2

with seven numbers a row, made of a few sums a row: so a first pass finds the log-sum-exps, a second one the sums, and a
third one the slopes, times weight and hidden. The kernels keep fp32 logits in registers; the PyTorch form makes those
of `chunk` rows (products of matrices like them tall), and writes their slopes in their place, a few rows at a time,
which stay in the processor's cache. `logits_loss` is the same of logits that no matrix gave (a softcap, a sum of
heads). A teacher of K likeliest ids and a rest is a distribution over K + 1 classes; the drafter's rest is the sum of
all its other ids, and an id of a class shares its slope by q.

Terms as in losses/distill.py (same values: tests/test_linear_loss.py), and "entropy" of q. Online softmax: Milakov and
Gimelshein, arXiv:1805.02867; LK losses: arXiv:2602.23881. Top-k cross-entropy: HASS, arXiv:2408.15766. The tail of a
teacher: missing mass is a class that the drafter gives nothing. A probability of 0 counts as e**-10000.

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
    BEYOND_KERNELS,
    FLOOR,
    LK_ETA,
    NEEDS_LABEL,
    NEEDS_TEACHER,
    SMALLEST_ACCEPT,
    TERMS,
    TOP_K,
    Dense,
    FromHidden,
    Grads,
    Job,
    Teacher,
    TopK,
    Walked,
    accepted,
    fold,
    scale_rows,
    spans,
    sums_of,
)
from .linear_loss_triton import BUILDS, walk_kernels

__all__ = ["BUILDS", "TERMS", "Dense", "FromHidden", "LinearLoss", "TopK", "linear_loss", "logits_loss", "reference"]

CACHED = 2**17  # logits of a few rows that stay in a processor's cache while their slopes are made


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
    """Sum min(p, q), p the teacher's own, not scaled: the chance that it accepts a token of q; 0 without a teacher."""
    top_T: Tensor
    """int64, the likeliest id."""
    match_T: Tensor
    """bool, it is the teacher's likeliest of the draft vocabulary too; false without a teacher."""
    log_mass_T: Tensor
    """Log of the teacher's mass inside the draft vocabulary; 0 where the teacher has no `log_z_T`."""


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
        y_TW = None if isinstance(teacher, TopK) else told_logits(teacher, slice(None))
        log_q, log_p, _ = classes(teacher, slice(None), log_q_TW.clamp(min=FLOOR), y_TW, temperature)
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
        elif name == "topk_ce":
            log_p_Tk, ids_Tk = log_p.topk(min(TOP_K, log_p.shape[-1]), dim=-1)
            own_T = -(log_p_Tk.exp() * log_q.gather(-1, ids_Tk)).sum(-1)
        else:
            mix_T = (-LK_ETA * accept_T.detach()).exp()
            own_T = mix_T * kl_T + (1 - mix_T) * (1 - accept_T)
        value_T = value_T + factor * own_T
    return value_T


@torch.no_grad()
def told_logits(teacher: Dense | FromHidden, span: slice) -> Tensor:
    """[T, W] logits of some of the teacher's rows, as they are."""
    if isinstance(teacher, Dense):
        return teacher.logits(span)
    return F.linear(teacher.states(span), teacher.weight_WD, teacher.bias_W)


def classes(
    teacher: Teacher, span: slice, log_q_TW: Tensor, y_TW: Tensor | None, temperature: float
) -> tuple[Tensor, Tensor, Tensor | None]:
    """log q and log p, FLOOR at least, of some rows over what the teacher tells apart: the ids [T, W] (log q is then the
    one given), or its K and a rest [T, K + 1]; and the log [T] of its mass inside the draft vocabulary, where that is
    known. `y_TW`: its logits of these rows (None: it has its K likeliest)."""
    log_mass_T: Tensor | None = None
    if isinstance(teacher, TopK):
        ids_TK = teacher.ids_TK[span]
        inside_TK = ids_TK >= 0
        rest_T1 = log_q_TW.masked_fill(teacher.mask(span, log_q_TW.shape[-1]), float("-inf")).logsumexp(-1, True)
        log_q_TK = log_q_TW.gather(-1, ids_TK.clamp(min=0)).masked_fill(~inside_TK, FLOOR)
        log_q = torch.cat([log_q_TK, rest_T1.clamp(min=FLOOR)], -1)
        log_p = teacher.log_classes(span).detach().to(log_q.dtype)
        log_mass_T = None if teacher.log_mass_T is None else teacher.log_mass_T[span].to(log_q.dtype)
    else:
        assert y_TW is not None
        y_TW = y_TW.detach().to(log_q_TW.dtype)
        y_TW, log_q = y_TW if temperature == 1 else y_TW / temperature, log_q_TW
        if isinstance(teacher, Dense) and teacher.log_y_T is not None:
            log_y_T = teacher.log_y_T[span].to(y_TW.dtype)
            log_p = y_TW - log_y_T[:, None]
        else:
            log_p = y_TW.log_softmax(-1)
            log_y_T = y_TW.amax(-1) - log_p.amax(-1)
        if teacher.log_z_T is not None:
            log_mass_T = (log_y_T - teacher.log_z_T[span].to(log_y_T.dtype)).clamp(max=0)  # a captured one may be off
            if teacher.tail:
                log_p = log_p.add_(log_mass_T[:, None])
    return log_q, log_p.clamp_(min=FLOOR), log_mass_T


def new_walked(job: Job, like_TX: Tensor, grads: Grads) -> Walked:
    """Nothing found yet. All that stays is made first: small tensors between the large ones of a chunk would keep their
    room from the next."""
    wide, rows = torch.promote_types(like_TX.dtype, torch.float32), len(like_TX)

    def new(dtype: torch.dtype) -> Tensor:
        return torch.zeros(rows, dtype=dtype, device=like_TX.device)

    return Walked(
        new(wide), new(wide), new(wide), new(wide), new(torch.int64), new(torch.bool), new(wide), grads,
    )  # fmt: skip


@torch.no_grad()
def walk_chunks(
    job: Job, hidden_TD: Tensor, weight_WD: Tensor, bias_W: Tensor | None, weight_T: Tensor | None
) -> Walked:
    """Values, and the sums over rows of weight times slope by hidden, head and bias, as far as `job` wants them: PyTorch,
    `job.chunk` rows at a time. Without `weight_T` each row weighs 1."""
    done = new_walked(job, hidden_TD, job.new_grads(hidden_TD, weight_WD, bias_W))
    room_TW = hidden_TD.new_empty(min(job.chunk, len(hidden_TD)), len(weight_WD))
    told_TW: Tensor | None = None
    if isinstance(job.teacher, FromHidden):
        told_TW = job.teacher.hidden_UD.new_empty(room_TW.shape)
    for span in spans(len(hidden_TD), job.chunk):
        z_TW, y_TW = room_TW[: span.stop - span.start], told_TW
        product(hidden_TD[span], weight_WD, bias_W, z_TW)
        if isinstance(job.teacher, FromHidden) and told_TW is not None:
            y_TW = told_TW[: len(z_TW)]
            product(job.teacher.states(span), job.teacher.weight_WD, job.teacher.bias_W, y_TW)
        walk_rows(span, z_TW, y_TW, z_TW if any(done.grads.wanted) else None, done, job, weight_T)
        if any(done.grads.wanted):
            done.grads.add(span, z_TW, hidden_TD, weight_WD)
    return done


def product(x_TD: Tensor, weight_WD: Tensor, bias_W: Tensor | None, out_TW: Tensor) -> None:
    """x @ weight.T + bias, into `out_TW`."""
    if bias_W is None:
        torch.mm(x_TD, weight_WD.T, out=out_TW)
    else:
        torch.addmm(bias_W, x_TD, weight_WD.T, out=out_TW)


def walk_rows(
    span: slice,
    z_TW: Tensor,
    y_TW: Tensor | None,
    slope_TW: Tensor | None,
    done: Walked,
    job: Job,
    weight_T: Tensor | None,
) -> None:
    """The rows `span`, whose logits are `z_TW` and the teacher's `y_TW` (None: it has them itself), into `done`, and
    their slopes into `slope_TW`, which may be `z_TW`."""
    block = max(1, (CACHED if z_TW.device.type == "cpu" else 2**26) // z_TW.shape[-1])
    for lo in range(0, len(z_TW), block):
        part, own = slice(lo, lo + block), slice(span.start + lo, min(span.start + lo + block, span.stop))
        told_TW = y_TW[part] if y_TW is not None else None
        if told_TW is None and isinstance(job.teacher, Dense):
            told_TW = job.teacher.logits(own)
        walk_block(own, z_TW[part], told_TW, None if slope_TW is None else slope_TW[part], done, job, weight_T)


def walk_block(
    span: slice,
    z_TW: Tensor,
    y_TW: Tensor | None,
    slope_TW: Tensor | None,
    done: Walked,
    job: Job,
    weight_T: Tensor | None,
) -> None:
    """The rows of one block."""
    z_TW = z_TW.to(done.value_T.dtype)
    log_q_TW = (z_TW if job.temperature == 1 else z_TW / job.temperature).log_softmax(-1)
    done.top_T[span] = log_q_TW.argmax(-1)
    label_T = None if job.label_T is None else job.label_T[span]
    if label_T is not None:
        picked_T = log_q_TW.gather(-1, label_T.clamp(min=0)[:, None])[:, 0]
        done.ce_T[span] = torch.where(label_T >= 0, -picked_T, 0)
    log_q_TW.clamp_(min=FLOOR)
    q_TW = log_q_TW.exp()
    sums, told = None, None
    if job.teacher is not None:
        log_q, log_p, log_mass_T = classes(job.teacher, span, log_q_TW, y_TW, job.temperature)
        told = log_q, log_p, log_p.exp()
        true_p: Tensor | None = None
        if log_mass_T is not None:
            done.log_mass_T[span] = log_mass_T
            if not job.teacher.tail:
                true_p = told[2] * log_mass_T.exp()[:, None]
        sums = sums_of(log_q, log_p, q_TW if log_q is log_q_TW else log_q.exp(), told[2], job.used, true_p)
        done.accept_T[span] = accepted(sums)
        if job.match:
            top_T = job.teacher.top_of(span) if isinstance(job.teacher, TopK) else log_p.argmax(-1)
            done.match_T[span] = done.top_T[span] == top_T
    done.entropy_T[span] = -torch.linalg.vecdot(q_TW, log_q_TW)
    scale_T = None if weight_T is None else weight_T[span]
    done.value_T[span], a = fold(job, sums, done.ce_T[span], done.entropy_T[span], label_T, scale_T)
    if slope_TW is not None:
        slope_TW.copy_(slopes(a, q_TW, log_q_TW, told, job, span))


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
    if a[7] is not None and told is not None:
        log_p_Tk, ids_Tk = told[1].topk(min(TOP_K, told[1].shape[-1]), dim=-1)
        slope_TW.scatter_add_(-1, ids_Tk, a[7][:, None] * log_p_Tk.exp())
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
        # No rows take this way too: engines that reduce gradients as they come need one order of them on all processes.
        fits = fits and len(hidden_TD) > 0
        walk = walk_kernels if fits and not job.used & BEYOND_KERNELS else walk_chunks
        first = replace(job, wanted=(False, False, False)) if ctx.again else job
        done = walk(first, hidden_TD, weight_WD, bias_W, weight_T)
        ctx.job, ctx.walk, ctx.by_row = job, walk, weight_T is None
        ctx.save_for_backward(hidden_TD, weight_WD, bias_W)
        ctx.each = done.grads.each
        total = (done.value_T if weight_T is None else done.value_T * weight_T.to(done.value_T.dtype)).sum()
        rest = done.rest
        ctx.mark_non_differentiable(*rest, *((done.value_T,) if weight_T is not None else ()))
        return total, done.value_T, *rest

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, by_total: Tensor, by_value_T: Tensor, *_: Tensor) -> tuple[Tensor | None, ...]:
        hidden_TD, weight_WD, bias_W = ctx.saved_tensors
        by_T = by_total + by_value_T if ctx.by_row else by_total
        if ctx.again:
            each = ctx.walk(ctx.job, hidden_TD, weight_WD, bias_W, by_T).grads.each
        else:
            each, ctx.each = ctx.each, None
            if each is None:
                raise RuntimeError("linear_loss: gradients were formed once; make it anew for a second backward")
            for g in each:
                if g is not None:
                    scale_rows(g, by_T)
        given = zip(each, (hidden_TD, weight_WD, bias_W), strict=True)
        return *(None if g is None or x is None else g.to(x.dtype) for g, x in given), None, None


class _Given(torch.autograd.Function):
    """Of logits: their gradient is formed in forward, row by row, and scaled in backward."""

    @staticmethod
    def forward(ctx: Any, logits_TW: Tensor, weight_T: Tensor | None, job: Job) -> tuple[Tensor, ...]:
        done = new_walked(job, logits_TW, Grads([]))
        ctx.slope_TW = torch.empty_like(logits_TW) if job.wanted[0] else None
        ctx.by_row = weight_T is None
        walk_rows(slice(0, len(logits_TW)), logits_TW.detach(), None, ctx.slope_TW, done, job, weight_T)
        total = (done.value_T if weight_T is None else done.value_T * weight_T.to(done.value_T.dtype)).sum()
        ctx.mark_non_differentiable(*done.rest, *((done.value_T,) if weight_T is not None else ()))
        return total, done.value_T, *done.rest

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, by_total: Tensor, by_value_T: Tensor, *_: Tensor) -> tuple[Tensor | None, None, None]:
        slope_TW, ctx.slope_TW = ctx.slope_TW, None
        if slope_TW is None:
            raise RuntimeError("logits_loss: its gradient was formed once; make the loss anew for a second backward")
        scale_rows(slope_TW, by_total + by_value_T if ctx.by_row else by_total)
        return slope_TW, None, None


def make_job(
    name: str,
    rows: int,
    width: int,
    terms: Sequence[tuple[float, str]],
    teacher: Teacher | None,
    label_T: Tensor | None,
    weight_T: Tensor | None,
    temperature: float,
    match: bool,
) -> Job:
    """Raises ValueError, in the name of a function, for what does not fit together."""
    names = {term for _, term in terms}
    if unknown := sorted(names - set(TERMS)):
        raise ValueError(f"{name}: no term {unknown[0]!r}; there are {', '.join(TERMS)}")
    if teacher is None and (names & NEEDS_TEACHER):
        raise ValueError(f"{name}: {', '.join(sorted(names & NEEDS_TEACHER))} need a teacher; give one")
    if isinstance(teacher, TopK) and "topk_ce" in names:
        raise ValueError(
            f"{name}: topk_ce needs a teacher's logits, got its {teacher.ids_TK.shape[1]} likeliest; use kl"
        )
    if label_T is None and (names & NEEDS_LABEL):
        raise ValueError(f"{name}: ce needs label_T; give it")
    if weight_T is not None and weight_T.requires_grad:
        raise ValueError(f"{name}: weight_T gets no gradient here; weigh value_T yourself, or detach the weights")
    if not (math.isfinite(temperature) and temperature > 0):
        raise ValueError(f"{name}: temperature={temperature}, must be positive and finite")
    given = {"label_T": label_T, "weight_T": weight_T, "teacher": None if teacher is None else teacher.first()}
    for key, x in given.items():
        if x is not None and len(x) != rows:
            raise ValueError(f"{name}: {key} has {len(x)} rows, hidden has {rows}")
    if isinstance(teacher, Dense | FromHidden) and teacher.width() != width:
        raise ValueError(f"{name}: the teacher speaks of {teacher.width()} ids, the head of {width}")
    if isinstance(teacher, Dense) and teacher.log_y_T is not None and temperature != 1:
        raise ValueError(
            f"{name}: temperature={temperature} with a teacher's log_y_T, which is of temperature 1; leave it out"
        )
    return Job(tuple(terms), teacher, label_T, temperature, rows, (False, False, False), match)


def logits_loss(
    logits_TW: Tensor,
    terms: Sequence[tuple[float, str]],
    *,
    teacher: Teacher | None = None,
    label_T: Tensor | None = None,
    weight_T: Tensor | None = None,
    temperature: float = 1.0,
    match: bool = True,
) -> LinearLoss:
    """`linear_loss` of logits [T, W], for those that are not linear in a hidden state. The gradient by them, as large as
    they are, is formed in forward. A teacher `FromHidden` is refused: it comes with a linear head."""
    if isinstance(teacher, FromHidden):
        raise ValueError("logits_loss: give the teacher's logits (Dense) or its likeliest ids (TopK)")
    rows, width = logits_TW.shape
    job = make_job("logits_loss", rows, width, terms, teacher, label_T, weight_T, temperature, match)
    job = replace(job, wanted=(torch.is_grad_enabled() and logits_TW.requires_grad, False, False))
    with torch.autocast(logits_TW.device.type, enabled=False):
        return LinearLoss(*_Given.apply(logits_TW, weight_T, job))


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
    match: bool = True,
) -> LinearLoss:
    """The weighed terms of each row, from states [T, D] and a head [W, D], with gradients for both and the bias.

    `terms` as `parse_objective` gives them. `label_T`: draft ids, -1 = none. `weight_T` [T], without gradient: known
    weights save the second pass where the head learns; without them `value_T` can be weighed later. `d2t_W`: target ids
    of the draft vocabulary, `weight_WD` then holds all rows [V, D] (and `bias_W` [V]). `temperature` divides the logits
    of both sides, of a `TopK` teacher's not. `chunk`: rows at a time. `match` False: `match_T` is not needed. Raises
    ValueError for what does not fit together.
    """
    if d2t_W is not None:
        weight_WD, bias_W = weight_WD[d2t_W], None if bias_W is None else bias_W[d2t_W]
    if hidden_TD.ndim != 2 or weight_WD.ndim != 2 or hidden_TD.shape[1] != weight_WD.shape[1]:
        raise ValueError(
            f"linear_loss: hidden {tuple(hidden_TD.shape)} and weight {tuple(weight_WD.shape)}; must be [T, D] and [W, D]"
        )
    rows, width = len(hidden_TD), len(weight_WD)
    job = make_job("linear_loss", rows, width, terms, teacher, label_T, weight_T, temperature, match)
    grad, sides = torch.is_grad_enabled(), 1 + isinstance(teacher, FromHidden)
    wanted = tuple(grad and x is not None and x.requires_grad for x in (hidden_TD, weight_WD, bias_W))
    job = replace(job, chunk=max(1, chunk or job_rows(rows, width, sides, hidden_TD.device.type)), wanted=wanted)
    with torch.autocast(hidden_TD.device.type, enabled=False):
        return LinearLoss(*_Linear.apply(hidden_TD, weight_WD, bias_W, weight_T, job))


def job_rows(rows: int, width: int, sides: int, device: str) -> int:
    """Rows at a time: an eighth of all, or what 2**23 logits hold if that is more (products of matrices stay fast, and
    sums of the head's gradient few); never more logits than 2**25 (CPU) or 2**27. `sides`: 2 where the teacher's logits
    are made beside the drafter's, else 1."""
    width, most = width * sides, 2**25 if device == "cpu" else 2**27
    return max(8, min(max(rows // 8, 2**23 // width), most // width))
