"""Per-token distillation losses between a drafter's row and the target's, and their fused evaluation.

A *row* is one prediction. The drafter's logits cover the draft vocabulary (W ids); the target's distribution p covers
all V ids, so that p restricted to W may hold less than the whole mass. `oov` says what becomes of the rest:

    renormalise   p is restricted to W and scaled to sum to 1 (EAGLE-3's teacher; arXiv:2503.01840)
    mask          as above, and rows whose target argmax lies outside W weigh nothing (the EAGLE-3 training script)
    tail          p keeps its true values; the mass outside is one class that the drafter gives probability 0.
                  Terms that this makes infinite, constants all, are left out.

Losses: KL, reverse KL, JSD, TV as usual; -log sum min(p, q) and the hybrid lambda KL + (1 - lambda) TV from LK losses
(arXiv:2602.23881); top-k cross-entropy from HASS (arXiv:2408.15766); smooth-L1 on features from EAGLE
(arXiv:2401.15077). Sum min(p, q) is the chance that speculative sampling accepts the drafter's token.

Test: pytest tests/test_losses.py
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from ..kernels.linear_loss_rules import LK_ETA, SMALLEST_ACCEPT

Oov = Literal["renormalise", "mask", "tail"]
OOV: tuple[Oov, ...] = ("renormalise", "mask", "tail")
HASS_TOP_K = 10  # HASS, section 3.1


@dataclass
class Teacher:
    """What the target says of R predictions: rows `index_R` of a bank of U rows, and the data's own tokens.

    `logits_UW` are the target's logits of the draft vocabulary (finite), `log_kept_U` their log-sum-exp, `log_z_U` that
    over all V; `top_U` is the target's argmax and `label_R` the token that the data holds, both in draft ids, -1 =
    outside the draft vocabulary.
    """

    logits_UW: Tensor
    log_kept_U: Tensor
    log_z_U: Tensor
    top_U: Tensor
    index_R: Tensor
    label_R: Tensor

    def rows(self, index_R: Tensor, label_R: Tensor) -> Teacher:
        """The same bank, read at other rows."""
        return Teacher(self.logits_UW, self.log_kept_U, self.log_z_U, self.top_U, index_R, label_R)

    @property
    def top_R(self) -> Tensor:
        return self.top_U[self.index_R]


@dataclass
class Rows:
    """Both distributions of R rows as the losses read them: log q, log p (scaled as `oov` says), p's mass."""

    log_q_RW: Tensor
    log_p_RW: Tensor
    mass_R: Tensor  # sum of p: 1, or with oov = tail what the draft vocabulary holds of it
    label_R: Tensor  # draft id of the data's token, -1 = outside

    @cached_property
    def p_RW(self) -> Tensor:
        return self.log_p_RW.exp()

    @cached_property
    def q_RW(self) -> Tensor:
        return self.log_q_RW.exp()


def ce(rows: Rows) -> Tensor:
    """[R] cross-entropy with the data's token; 0 where the draft vocabulary lacks it."""
    picked_R = rows.log_q_RW.gather(-1, rows.label_R.clamp(min=0)[:, None])[:, 0]
    return torch.where(rows.label_R >= 0, -picked_R, picked_R.new_zeros(()))


def ce_gradient(rows: Rows) -> Tensor:
    """[R, W] derivative of `ce` by the drafter's logits."""
    inside_R1 = (rows.label_R >= 0)[:, None].to(rows.q_RW.dtype)
    return (rows.q_RW * inside_R1).scatter_add(-1, rows.label_R.clamp(min=0)[:, None], -inside_R1)


def kl(rows: Rows) -> Tensor:
    """[R] KL(p || q). With missing mass: mass * KL(p / mass || q), whose gradient is that of the true divergence."""
    value_R = (rows.p_RW * (rows.log_p_RW - rows.log_q_RW)).sum(-1)
    return value_R - torch.special.xlogy(rows.mass_R, rows.mass_R)


def kl_gradient(rows: Rows) -> Tensor:
    """[R, W] derivative of `kl` by the drafter's logits."""
    return torch.addcmul(-rows.p_RW, rows.mass_R[:, None], rows.q_RW)


def reverse_kl(rows: Rows) -> Tensor:
    """[R] KL(q || p)."""
    return (rows.q_RW * (rows.log_q_RW - rows.log_p_RW)).sum(-1)


def jsd(rows: Rows) -> Tensor:
    """[R] Jensen-Shannon divergence, in nats: 0 to log 2."""
    log_m_RW = torch.logaddexp(rows.log_q_RW, rows.log_p_RW) - math.log(2)
    p_part_R = (rows.p_RW * (rows.log_p_RW - log_m_RW)).sum(-1)
    q_part_R = (rows.q_RW * (rows.log_q_RW - log_m_RW)).sum(-1)
    return 0.5 * (p_part_R + q_part_R + (1 - rows.mass_R) * math.log(2))


def accept(rows: Rows) -> Tensor:
    """[R] sum min(p, q), the chance that a token drawn from q is accepted."""
    return torch.minimum(rows.p_RW, rows.q_RW).sum(-1)


def tv(rows: Rows) -> Tensor:
    """[R] total variation: 1 - sum min(p, q)."""
    return 1 - accept(rows)


def l1(rows: Rows) -> Tensor:
    """[R] sum |p - q| over all ids: 2 TV (what DeepSpec's recipes weigh)."""
    return 2 * tv(rows)


def neg_log_accept(rows: Rows) -> Tensor:
    """[R] -log sum min(p, q) (LK losses, the likelihood form)."""
    return -accept(rows).clamp(min=SMALLEST_ACCEPT).log()


def lk(rows: Rows, mix_R: Tensor | None = None) -> Tensor:
    """[R] mix * KL + (1 - mix) * TV, mix = exp(-3 sum min(p, q)) held constant (LK losses, the hybrid form)."""
    if mix_R is None:
        mix_R = torch.exp(-LK_ETA * accept(rows).detach())
    return mix_R * kl(rows) + (1 - mix_R) * tv(rows)


def topk_ce(rows: Rows) -> Tensor:
    """[R] cross-entropy over the target's ten likeliest ids of the draft vocabulary (HASS)."""
    log_p_Rk, ids_Rk = rows.log_p_RW.topk(min(HASS_TOP_K, rows.log_p_RW.shape[-1]), dim=-1)
    return -(log_p_Rk.exp() * rows.log_q_RW.gather(-1, ids_Rk)).sum(-1)


def feature_smooth_l1(feature_RD: Tensor, target_RD: Tensor) -> Tensor:
    """[R] smooth-L1 (beta 1) between a predicted and the target's own feature, averaged over the width (EAGLE)."""
    return F.smooth_l1_loss(feature_RD.float(), target_RD.float(), reduction="none").mean(-1)


ON_DISTRIBUTIONS: dict[str, Callable[[Rows], Tensor]] = {
    "ce": ce,
    "kl": kl,
    "reverse_kl": reverse_kl,
    "jsd": jsd,
    "tv": tv,
    "l1": l1,
    "neg_log_accept": neg_log_accept,
    "lk": lk,
    "topk_ce": topk_ce,
}
# The gradients by the logits of those that have a short one: half the work of autograd's on the way of every step.
GRADIENTS: dict[str, Callable[[Rows], Tensor]] = {"ce": ce_gradient, "kl": kl_gradient}
ON_FEATURES: dict[str, Callable[[Tensor, Tensor], Tensor]] = {"feature_smooth_l1": feature_smooth_l1}


@dataclass
class Scored:
    """Detached per-row results. `value_R` is the loss; the others are metrics with the target's true p: a target
    argmax outside the draft vocabulary is never correct, and mass outside is never accepted."""

    value_R: Tensor
    correct_R: Tensor  # bool, the drafter's argmax is the target's
    accept_R: Tensor  # sum min(p, q)
    lost_R: Tensor  # target mass outside the draft vocabulary


def read_rows(logits_RW: Tensor, teacher: Teacher, oov: Oov) -> tuple[Rows, Tensor]:
    """Both distributions, in the precision of the logits (half precision: fp32), and the log [R] of the target's mass
    inside the draft vocabulary."""
    wide = torch.promote_types(logits_RW.dtype, torch.float32)
    log_q_RW = logits_RW.to(wide).log_softmax(-1)
    kept_R = teacher.log_kept_U[teacher.index_R]
    log_mass_R = (kept_R - teacher.log_z_U[teacher.index_R]).clamp(max=0)  # a captured log_z may be a little off
    shift_R = kept_R if oov != "tail" else kept_R - log_mass_R
    mass_R = torch.ones_like(kept_R) if oov != "tail" else log_mass_R.exp()
    log_p_RW = teacher.logits_UW[teacher.index_R].to(wide) - shift_R[:, None]
    return Rows(log_q_RW, log_p_RW, mass_R, teacher.label_R), log_mass_R


def weigh(per_row: Tensor, teacher: Teacher, oov: Oov) -> Tensor:
    """[R] or [R, W] `per_row`, 0 for rows that `oov` masks."""
    if oov != "mask":
        return per_row
    outside_R = teacher.top_R < 0
    return per_row.masked_fill(outside_R if per_row.ndim == 1 else outside_R[:, None], 0)


def score_rows(logits_RW: Tensor, teacher: Teacher, terms: tuple[tuple[float, str], ...], oov: Oov) -> Scored:
    """Plain evaluation: `value_R` carries gradients."""
    return _score(*read_rows(logits_RW, teacher, oov), teacher, terms, oov)


def _score(rows: Rows, log_mass_R: Tensor, teacher: Teacher, terms: tuple[tuple[float, str], ...], oov: Oov) -> Scored:
    values_R = [coefficient * ON_DISTRIBUTIONS[name](rows) for coefficient, name in terms]
    value_R = weigh(sum(values_R, torch.zeros_like(rows.mass_R)), teacher, oov)
    with torch.no_grad():
        p_RW = rows.p_RW if oov == "tail" else rows.p_RW * log_mass_R.exp()[:, None]
        accept_R = torch.minimum(p_RW, rows.q_RW).sum(-1)
        return Scored(value_R, rows.log_q_RW.argmax(-1) == teacher.top_R, accept_R, -torch.expm1(log_mass_R))


class _Fused(torch.autograd.Function):
    """`score_rows(...).value_R.sum()` over blocks of rows that stay in cache; the gradient is formed in forward."""

    @staticmethod
    def forward(
        ctx: Any,
        logits_RW: Tensor,
        teacher: Teacher,
        terms: tuple[tuple[float, str], ...],
        oov: Oov,
        block: int,
        weight_R: Tensor | None,
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        need = logits_RW.requires_grad
        grad_RW = torch.empty_like(logits_RW) if need else None
        parts: list[Scored] = []
        for lo in range(0, logits_RW.shape[0], block):
            span = slice(lo, lo + block)
            part = teacher.rows(teacher.index_R[span], teacher.label_R[span])
            scale_R = torch.ones_like(part.log_z_U[part.index_R]) if weight_R is None else weight_R[span]
            if all(name in GRADIENTS for _, name in terms):
                rows, log_mass_R = read_rows(logits_RW[span], part, oov)
                scored = _score(rows, log_mass_R, part, terms, oov)
                if grad_RW is not None:
                    slopes_RW = [coefficient * GRADIENTS[name](rows) for coefficient, name in terms]
                    slope_RW = weigh(sum(slopes_RW[1:], slopes_RW[0]), part, oov)
                    grad_RW[span] = slope_RW if weight_R is None else slope_RW * scale_R[:, None]
            else:
                with torch.enable_grad():
                    block_RW = logits_RW[span].detach().requires_grad_(need)
                    scored = score_rows(block_RW, part, terms, oov)
                    if grad_RW is not None:
                        (grad_RW[span],) = torch.autograd.grad((scored.value_R * scale_R).sum(), block_RW)
            parts.append(Scored(scored.value_R.detach() * scale_R, scored.correct_R, scored.accept_R, scored.lost_R))
        ctx.grad_RW = grad_RW
        if not parts:
            zero = logits_RW.new_zeros((), dtype=torch.promote_types(logits_RW.dtype, torch.float32))
            none_R = zero.new_zeros(0)
            outputs = (zero, none_R.bool(), none_R, none_R.clone())
        else:
            outputs = (
                torch.cat([part.value_R for part in parts]).sum(),
                torch.cat([part.correct_R for part in parts]),
                torch.cat([part.accept_R for part in parts]),
                torch.cat([part.lost_R for part in parts]),
            )
        ctx.mark_non_differentiable(*outputs[1:])
        return outputs

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: Tensor, *_: Tensor) -> tuple[Tensor | None, None, None, None, None, None]:
        grad_RW, ctx.grad_RW = ctx.grad_RW, None
        return (None if grad_RW is None else grad_RW.mul_(grad)), None, None, None, None, None


def fused_score(
    logits_RW: Tensor,
    teacher: Teacher,
    terms: tuple[tuple[float, str], ...],
    oov: Oov,
    weight_R: Tensor | None = None,
) -> tuple[Tensor, Scored]:
    """The sum of the losses over R rows, each times its weight (carries gradients by the logits, once), and the rows'
    metrics, `value_R` left empty.

    Equal to `score_rows` (tests: 1e-6 in fp32); never holds more than a block of rows in fp32.
    """
    per_block = 2**17 if logits_RW.device.type == "cpu" else 2**26
    with torch.autocast(logits_RW.device.type, enabled=False):
        total, correct_R, accept_R, lost_R = _Fused.apply(
            logits_RW, teacher, terms, oov, max(1, per_block // logits_RW.shape[-1]), weight_R
        )
    return total, Scored(accept_R.new_empty(0), correct_R, accept_R, lost_R)


def make_teacher(
    head: Callable[[Tensor, Tensor | None], Tensor],
    hidden_UD: Tensor,
    log_z_U: Tensor | None,
    top_U: Tensor | None,
    d2t_W: Tensor | None,
    t2d_V: Tensor | None,
    block: int = 256,
) -> Teacher:
    """A teacher's bank from the target's normed states; `index_R` and `label_R` are left empty.

    `head(hidden, ids or None)` gives the target's logits; `log_z_U` and `top_U` (target ids) come from a capture, or
    are computed here, `block` rows at a time. `t2d_V` [V] maps target ids to draft ids, -1 = none (None = identity).
    """
    with torch.no_grad():
        logits_UW = head(hidden_UD, d2t_W)
        log_kept_U = _log_sum(logits_UW, block)
        if log_z_U is None or top_U is None:
            if d2t_W is None:
                log_z_U, top_U = log_kept_U, logits_UW.argmax(-1)
            else:
                log_zs, tops = [log_kept_U[:0]], [torch.zeros(0, dtype=torch.int64, device=hidden_UD.device)]
                for lo in range(0, hidden_UD.shape[0], block):
                    full_UV = head(hidden_UD[lo : lo + block], None)
                    log_zs.append(_log_sum(full_UV, block))
                    tops.append(full_UV.argmax(-1))
                log_z_U, top_U = torch.cat(log_zs), torch.cat(tops)
        top_U = top_U.long() if t2d_V is None else t2d_V[top_U.long()]
    nothing = top_U.new_zeros(0)
    return Teacher(logits_UW, log_kept_U, log_z_U.to(log_kept_U.dtype), top_U, nothing, nothing)


def _log_sum(logits_UX: Tensor, block: int) -> Tensor:
    """[U] log-sum-exp in fp32 at least, `block` rows at a time."""
    wide = torch.promote_types(logits_UX.dtype, torch.float32)
    parts = [part.to(wide).logsumexp(-1) for part in logits_UX.split(block)]
    return torch.cat(parts) if parts else logits_UX.new_zeros(0, dtype=wide)
