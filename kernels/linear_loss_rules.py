"""What both forms of linear_loss.py share: teachers, sums of a row, and the numbers that its slopes are made of.

Test: pytest tests/test_linear_loss.py
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

LK_ETA = 3.0  # LK losses, section 5: the best setting
SMALLEST_ACCEPT = 1e-8  # floor inside the logarithm; keeps a row without any overlap finite
FLOOR = -1e4  # log of a probability of 0: its exponential is 0 in fp64, too, and 0 times it is 0
NEEDS_LABEL = {"ce"}
NEEDS_TEACHER = {"kl", "reverse_kl", "jsd", "tv", "l1", "neg_log_accept", "lk", "topk_ce"}
TERMS = ("ce", "entropy", "kl", "reverse_kl", "jsd", "tv", "l1", "neg_log_accept", "lk", "topk_ce")
BEYOND_KERNELS = {"topk_ce"}  # terms that the PyTorch form alone has
TOP_K = 10  # HASS, section 3.1


def spans(rows: int, chunk: int) -> Iterator[slice]:
    """All rows, `chunk` at a time."""
    for lo in range(0, rows, chunk):
        yield slice(lo, min(lo + chunk, rows))


@dataclass(frozen=True)
class FromHidden:
    """The teacher's states [U, D'] and head [W, D'] (draft ids), without gradients."""

    hidden_UD: Tensor
    weight_WD: Tensor
    bias_W: Tensor | None = None
    log_z_T: Tensor | None = None
    """Log-sum-exp of each row's logits over the teacher's whole vocabulary (None = the draft vocabulary is all of it)."""
    tail: bool = False
    """Its mass inside the draft vocabulary is kept as it is; False = scaled to 1."""
    index_T: Tensor | None = None
    """Which state each of the T rows has (None = the same number)."""

    def first(self) -> Tensor:
        return self.hidden_UD if self.index_T is None else self.index_T

    def width(self) -> int:
        return len(self.weight_WD)

    def states(self, span: slice) -> Tensor:
        """[T, D'] of some rows."""
        return self.hidden_UD[span if self.index_T is None else self.index_T[span]]


@dataclass(frozen=True)
class Dense:
    """The teacher's logits or log-probabilities [U, W] of the draft vocabulary."""

    logits_UW: Tensor
    log_z_T: Tensor | None = None
    """This and the two next ones as in `FromHidden`."""
    tail: bool = False
    index_T: Tensor | None = None
    log_y_T: Tensor | None = None
    """Log-sum-exp of each row's logits given here, where it is known (it saves a pass)."""

    def first(self) -> Tensor:
        return self.logits_UW if self.index_T is None else self.index_T

    def width(self) -> int:
        return self.logits_UW.shape[1]

    def logits(self, span: slice) -> Tensor:
        """[T, W] of some rows."""
        return self.logits_UW[span if self.index_T is None else self.index_T[span]]


@dataclass(frozen=True)
class TopK:
    """The teacher's K likeliest ids, in draft ids (-1 = outside: what it has there the drafter cannot match), the logs of
    their true probabilities, and the mass [T] of the rest of the draft vocabulary (None = all that is left of 1)."""

    ids_TK: Tensor
    log_p_TK: Tensor
    tail_T: Tensor | None = None
    log_mass_T: Tensor | None = None
    """Log of its mass inside the draft vocabulary (None = nothing is scaled)."""
    tail: bool = False
    """That mass is kept as it is; False = scaled to 1."""

    def first(self) -> Tensor:
        return self.ids_TK

    def mask(self, span: slice, width: int) -> Tensor:
        """bool [T, W], the id is one of the K."""
        ids_TK = self.ids_TK[span]
        mask_TV = torch.zeros(len(ids_TK), width + 1, dtype=torch.bool, device=ids_TK.device)
        return mask_TV.scatter_(-1, ids_TK.masked_fill(ids_TK < 0, width), True)[:, :width]

    def log_classes(self, span: slice) -> Tensor:
        """[T, K + 1] logs of the probabilities of the K and of the rest, FLOOR at least, scaled as `tail` says."""
        log_p_TK, tail_T = self.log_p_TK[span], self.tail_T
        log_p_TK = log_p_TK.to(torch.promote_types(log_p_TK.dtype, torch.float32))
        rest_T = 1 - log_p_TK.exp().sum(-1) if tail_T is None else tail_T[span].to(log_p_TK.dtype)
        none_TC = torch.nn.functional.pad(self.ids_TK[span] < 0, (0, 1))
        log_p_TC = torch.cat([log_p_TK, rest_T.clamp(min=0).log()[:, None]], -1)
        if self.log_mass_T is not None and not self.tail:
            log_p_TC = log_p_TC - self.log_mass_T[span].to(log_p_TC.dtype)[:, None]
        return log_p_TC.masked_fill(none_TC, FLOOR).clamp(min=FLOOR)

    def top_of(self, span: slice) -> Tensor:
        """[T] its likeliest id of the draft vocabulary; -1 = none of the K is in it."""
        ids_TK = self.ids_TK[span]
        inside_TK = self.log_p_TK[span].masked_fill(ids_TK < 0, float("-inf"))
        return ids_TK.gather(-1, inside_TK.argmax(-1, keepdim=True))[:, 0]


Teacher = FromHidden | Dense | TopK


@dataclass
class Grads:
    """Sums of slopes by hidden [T, D], head [W, D] and bias [W], where wanted; those over rows in fp32 at least."""

    each: list[Tensor | None]

    @property
    def wanted(self) -> list[bool]:
        return [x is not None for x in self.each]

    def add(self, span: slice, slope_TW: Tensor, hidden_TD: Tensor, weight_WD: Tensor) -> None:
        by_hidden, by_weight, by_bias = self.each
        if by_hidden is not None:
            torch.mm(slope_TW, weight_WD, out=by_hidden[span])
        if by_weight is not None:
            if by_weight.dtype == slope_TW.dtype:  # the first rows' are written, not added
                torch.addmm(by_weight, slope_TW.T, hidden_TD[span], beta=int(span.start > 0), out=by_weight)
            else:
                by_weight += slope_TW.T @ hidden_TD[span]
        if by_bias is not None:
            by_bias += slope_TW.sum(0, dtype=by_bias.dtype)


def scale_rows(g: Tensor, by: Tensor) -> None:
    """Times a number, or one per row: in place, since the head's gradient may be the largest tensor of all, and in the
    number's own precision (one without dimensions would be rounded to the gradient's, which puts all of it off alike)."""
    g.mul_(by.reshape(-1, *[1] * (g.ndim - 1)))


@dataclass(frozen=True)
class Job:
    """What is asked of T rows."""

    terms: tuple[tuple[float, str], ...]
    teacher: Teacher | None
    label_T: Tensor | None
    temperature: float
    chunk: int
    wanted: tuple[bool, ...]  # gradients by hidden, head and bias
    match: bool = True  # whether `match_T` is asked for

    @property
    def used(self) -> set[str]:
        return {name for _, name in self.terms}

    def floats(self) -> list[Tensor | None]:
        """The teacher's tensors that a kernel reads."""
        t = self.teacher
        if isinstance(t, FromHidden):
            return [t.hidden_UD, t.weight_WD, t.bias_W]
        return [t.logits_UW] if isinstance(t, Dense) else [t.log_p_TK] if isinstance(t, TopK) else []

    def new_grads(self, hidden_TD: Tensor, weight_WD: Tensor, bias_W: Tensor | None) -> Grads:
        wide = torch.promote_types(hidden_TD.dtype, torch.float32)
        by_hidden, by_weight, by_bias = self.wanted
        return Grads(
            [
                torch.empty_like(hidden_TD) if by_hidden else None,
                torch.zeros_like(weight_WD, dtype=wide) if by_weight else None,
                torch.zeros_like(bias_W, dtype=wide) if by_bias and bias_W is not None else None,
            ]
        )


@dataclass
class Walked:
    """What a walk over all rows found; fields of `LinearLoss`, [T]."""

    value_T: Tensor
    ce_T: Tensor
    entropy_T: Tensor
    accept_T: Tensor
    top_T: Tensor
    match_T: Tensor
    log_mass_T: Tensor
    grads: Grads

    @property
    def rest(self) -> tuple[Tensor, ...]:
        """All but values and gradients."""
        return self.ce_T, self.entropy_T, self.accept_T, self.top_T, self.match_T, self.log_mass_T


@dataclass
class Sums:
    """Of each row, over what the teacher tells apart. A sum that no term needs is None."""

    mass_T: Tensor  # p
    accept_T: Tensor | None = None  # min(p, q)
    below_T: Tensor | None = None  # q where q < p
    kl_T: Tensor | None = None  # p (log p - log q)
    reverse_T: Tensor | None = None  # q (log q - log p)
    p_part_T: Tensor | None = None  # p (log p - log (p + q) / 2)
    q_part_T: Tensor | None = None  # q (log q - log (p + q) / 2)
    true_T: Tensor | None = None  # min(p, q) with the teacher's own p; None = as `accept_T`
    top_T: Tensor | None = None  # p of its likeliest ids (topk_ce)
    top_ce_T: Tensor | None = None  # - p log q of these


def sums_of(log_q: Tensor, log_p: Tensor, q: Tensor, p: Tensor, used: set[str], true_p: Tensor | None = None) -> Sums:
    """From log q, log p (both at least FLOOR), q and p [T, C]; `true_p`: the teacher's own, where p is scaled."""
    sums = Sums(p.sum(-1))
    if true_p is not None:
        sums.true_T = torch.minimum(true_p, q).sum(-1)
    if true_p is None or used & {"tv", "l1", "neg_log_accept", "lk"}:
        sums.accept_T = torch.minimum(p, q).sum(-1)
    if used & {"tv", "l1", "neg_log_accept", "lk"}:
        sums.below_T = torch.where(q < p, q, 0).sum(-1)
    if used & {"kl", "lk", "reverse_kl", "jsd"}:
        r = log_q - log_p
        if used & {"kl", "lk"}:
            sums.kl_T = -torch.linalg.vecdot(p, r)
        if "reverse_kl" in used:
            sums.reverse_T = torch.linalg.vecdot(q, r)
        if "jsd" in used:
            # Both from the sigmoid: less r, which a log of 0 makes 1e4, the last digits would be lost.
            sums.q_part_T = torch.linalg.vecdot(q, F.logsigmoid(r).add_(math.log(2)))
            sums.p_part_T = torch.linalg.vecdot(p, F.logsigmoid(r.neg_()).add_(math.log(2)))
    if "topk_ce" in used:
        log_p_k, ids_k = log_p.topk(min(TOP_K, log_p.shape[-1]), dim=-1)
        p_k = log_p_k.exp()
        sums.top_T, sums.top_ce_T = p_k.sum(-1), -torch.linalg.vecdot(p_k, log_q.gather(-1, ids_k))
    return sums


def accepted(sums: Sums) -> Tensor:
    """[T] sum min(p, q), p the teacher's own."""
    accept_T = sums.accept_T if sums.true_T is None else sums.true_T
    assert accept_T is not None
    return accept_T


def fold(
    job: Job, sums: Sums | None, ce_T: Tensor, entropy_T: Tensor, label_T: Tensor | None, weight_T: Tensor | None
) -> tuple[Tensor, list[Tensor | None]]:
    """Values [T], and the seven numbers of each row's slopes, with an eighth that goes with the teacher's likeliest ids'
    p (None = 0), weighed and by logits before the temperature."""
    value_T, a = torch.zeros_like(ce_T), [torch.zeros_like(ce_T), *[None] * 7]

    def put(i: int, x_T: Tensor | float) -> None:
        old = a[i]
        a[i] = (torch.zeros_like(ce_T) if old is None else old) + x_T

    def put_kl(c: Tensor | float) -> None:
        assert sums is not None
        put(0, c * sums.mass_T)
        put(5, -c)

    def put_accept(c: Tensor | float) -> None:
        assert sums is not None and sums.below_T is not None
        put(0, -c * sums.below_T)
        put(3, c)

    for factor, name in job.terms:
        if name == "ce":
            assert label_T is not None
            inside_T = (label_T >= 0).to(ce_T.dtype)
            value_T = value_T + factor * ce_T
            put(0, factor * inside_T)
            put(6, -factor * inside_T)
            continue
        if name == "entropy":
            value_T = value_T + factor * entropy_T
            put(0, -factor * entropy_T)
            put(4, -factor)
            continue
        assert sums is not None
        mass_T = sums.mass_T
        accept_T = mass_T if sums.accept_T is None else sums.accept_T  # no term without it reads it
        if name == "kl":
            assert sums.kl_T is not None
            value_T = value_T + factor * (sums.kl_T - torch.special.xlogy(mass_T, mass_T))
            put_kl(factor)
        elif name == "reverse_kl":
            assert sums.reverse_T is not None
            value_T = value_T + factor * sums.reverse_T
            put(0, -factor * sums.reverse_T)
            put(1, factor)
        elif name == "jsd":
            assert sums.q_part_T is not None and sums.p_part_T is not None
            missing_T = (1 - mass_T) * math.log(2)
            value_T = value_T + factor / 2 * (sums.p_part_T + sums.q_part_T + missing_T)
            put(0, -factor / 2 * sums.q_part_T)
            put(2, factor / 2)
        elif name in ("tv", "l1"):
            factor = 2 * factor if name == "l1" else factor
            value_T = value_T + factor * (1 - accept_T)
            put_accept(-factor)
        elif name == "topk_ce":
            assert sums.top_T is not None and sums.top_ce_T is not None
            value_T = value_T + factor * sums.top_ce_T
            put(0, factor * sums.top_T)
            put(7, -factor)
        elif name == "neg_log_accept":
            value_T = value_T - factor * accept_T.clamp(min=SMALLEST_ACCEPT).log()
            put_accept(torch.where(accept_T >= SMALLEST_ACCEPT, -factor / accept_T.clamp(min=SMALLEST_ACCEPT), 0))
        else:
            assert name == "lk" and sums.kl_T is not None
            mix_T = torch.exp(-LK_ETA * accept_T)
            kl_T = sums.kl_T - torch.special.xlogy(mass_T, mass_T)
            value_T = value_T + factor * (mix_T * kl_T + (1 - mix_T) * (1 - accept_T))
            put_kl(factor * mix_T)
            put_accept(-factor * (1 - mix_T))
    scale_T = torch.full_like(ce_T, 1 / job.temperature)
    if weight_T is not None:
        scale_T = scale_T * weight_T.to(scale_T.dtype)
    return value_T, [None if x is None else x * scale_T for x in a]
