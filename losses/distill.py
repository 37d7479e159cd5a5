"""Per-token distillation losses between a drafter's row and the target's: definitions, teachers, and `fused_score`.

A *row* is one prediction. The drafter's logits cover the draft vocabulary (W ids); the target's distribution p covers
all V ids, so that p restricted to W may hold less than the whole mass. `oov` says what becomes of the rest:

    renormalise   p is restricted to W and scaled to sum to 1 (EAGLE-3's teacher; arXiv:2503.01840)
    mask          as above, and rows whose target argmax lies outside W weigh nothing (the EAGLE-3 training script)
    tail          p keeps its true values; the mass outside is one class that the drafter gives probability 0.
                  Terms that this makes infinite, constants all, are left out.

A teacher may know its K likeliest ids alone, and the mass of all others (`make_top_teacher`). The loss is then that of
K + 1 classes: each named id of the draft vocabulary, and its other ids together, of which the drafter's share is the sum
of all it gives them. Merging classes never raises a divergence, so KL, JSD and TV are at most the true ones, and equal
where the drafter spreads the rest as the target does; acceptance is at most that much too high. With a reduced draft
vocabulary the part of the tail that lies inside is not known: it is taken to be as in the less likely half of the K.
All of it is exact with K = V.

Losses: KL, reverse KL, JSD, TV as usual; -log sum min(p, q) and the hybrid lambda KL + (1 - lambda) TV from LK losses
(arXiv:2602.23881); top-k cross-entropy from HASS (arXiv:2408.15766); smooth-L1 on features from EAGLE
(arXiv:2401.15077). Sum min(p, q) is the chance that speculative sampling accepts the drafter's token.

The definitions (`score_rows`) hold every logit; training calls `fused_score`, which is kernels/linear_loss.py. Logits
come as `ByHead`, states and a head that they go through, and are never a tensor then; a head that is not linear (a
softcap, the corrections of a slot head) gives a tensor, whose gradient is one too.

Test: pytest tests/test_losses.py
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from ..kernels.linear_loss import Dense, FromHidden, LinearLoss, TopK, linear_loss, logits_loss
from ..kernels.linear_loss_rules import LK_ETA, SMALLEST_ACCEPT, TOP_K

Oov = Literal["renormalise", "mask", "tail"]
OOV: tuple[Oov, ...] = ("renormalise", "mask", "tail")
BANK_BYTES = 2**28  # the most that a bank of the target's logits may take, see `make_teacher`
SMALLEST_SHARE = 1e-3  # of a tail, inside the draft vocabulary: what is possible has no probability of 0


@dataclass(frozen=True)
class ByHead:
    """Logits [R, W] that no tensor holds: what a head makes of states [R, D]."""

    hidden_RD: Tensor
    weight_WD: Tensor
    bias_W: Tensor | None = None

    @classmethod
    def of(cls, hidden_RD: Tensor, weight_WD: Tensor, bias_W: Tensor | None = None) -> ByHead:
        """In the precision that `F.linear` would have: autocast's, or the weight's."""
        device, dtype = hidden_RD.device.type, weight_WD.dtype
        if torch.is_autocast_enabled(device) and dtype != torch.float64:
            dtype = torch.get_autocast_dtype(device)
        bias_W = None if bias_W is None else bias_W.to(dtype)
        return cls(hidden_RD.to(dtype), weight_WD.to(dtype), bias_W)


Logits = Tensor | ByHead


def formed(logits: Logits) -> Tensor:
    """[R, W] all of them: for tests, and for what reads them one by one."""
    return F.linear(logits.hidden_RD, logits.weight_WD, logits.bias_W) if isinstance(logits, ByHead) else logits


@dataclass
class Teacher:
    """What the target says of R predictions: rows `index_R` of a bank of U rows, and the data's own tokens.

    `bank` are the target's logits of the draft vocabulary (finite), [U, W] or still to be made from its states, or its
    likeliest ids; `log_kept_U` their log-sum-exp (None with states and ids), `log_z_U` that over all V (None = the draft vocabulary
    is all, or ids, which have true probabilities); `top_U` is the target's argmax (None = that of the bank) and `label_R` the token that the data holds, both in draft
    ids, -1 = outside the draft vocabulary.
    """

    bank: Logits | TopK
    log_kept_U: Tensor | None
    log_z_U: Tensor | None
    top_U: Tensor | None
    index_R: Tensor
    label_R: Tensor

    def rows(self, index_R: Tensor, label_R: Tensor) -> Teacher:
        """The same bank, read at other rows."""
        return Teacher(self.bank, self.log_kept_U, self.log_z_U, self.top_U, index_R, label_R)

    def logits(self) -> Tensor:
        """[R, W] of the rows that are read."""
        bank = self.bank
        assert not isinstance(bank, TopK), "likeliest ids are no logits"
        if isinstance(bank, ByHead):
            return formed(ByHead(bank.hidden_RD[self.index_R], bank.weight_WD, bank.bias_W))
        return bank[self.index_R]

    @property
    def top_R(self) -> Tensor:
        return self.logits().argmax(-1) if self.top_U is None else self.top_U[self.index_R]

    def told(self, oov: Oov, by_head: bool) -> Dense | FromHidden | TopK:
        """As the kernel reads it; a drafter whose logits are a tensor gets a tensor (`by_head` False)."""
        log_z_R, bank = None if self.log_z_U is None else self.log_z_U[self.index_R], self.bank
        if isinstance(bank, TopK):
            tail_R, log_mass_R = (None if x is None else x[self.index_R] for x in (bank.tail_T, bank.log_mass_T))
            return TopK(bank.ids_TK[self.index_R], bank.log_p_TK[self.index_R], tail_R, log_mass_R, oov == "tail")
        if isinstance(bank, ByHead) and not by_head:
            return Dense(self.logits(), log_z_R, oov == "tail")
        if isinstance(bank, ByHead):
            return FromHidden(bank.hidden_RD, bank.weight_WD, bank.bias_W, log_z_R, oov == "tail", self.index_R)
        log_y_R = None if self.log_kept_U is None else self.log_kept_U[self.index_R]
        return Dense(bank, log_z_R, oov == "tail", self.index_R, log_y_R)


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


def kl(rows: Rows) -> Tensor:
    """[R] KL(p || q). With missing mass: mass * KL(p / mass || q), whose gradient is that of the true divergence."""
    value_R = (rows.p_RW * (rows.log_p_RW - rows.log_q_RW)).sum(-1)
    return value_R - torch.special.xlogy(rows.mass_R, rows.mass_R)


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
    log_p_Rk, ids_Rk = rows.log_p_RW.topk(min(TOP_K, rows.log_p_RW.shape[-1]), dim=-1)
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
    told_RW = teacher.logits().to(wide)
    log_mass_R = torch.zeros_like(told_RW[:, 0])
    if teacher.log_z_U is not None:  # a captured log_z may be a little off
        log_mass_R = (told_RW.logsumexp(-1) - teacher.log_z_U[teacher.index_R]).clamp(max=0)
    log_p_RW, mass_R = told_RW.log_softmax(-1), torch.ones_like(log_mass_R)
    if oov == "tail":
        log_p_RW, mass_R = log_p_RW + log_mass_R[:, None], log_mass_R.exp()
    return Rows(logits_RW.to(wide).log_softmax(-1), log_p_RW, mass_R, teacher.label_R), log_mass_R


def score_rows(logits_RW: Tensor, teacher: Teacher, terms: tuple[tuple[float, str], ...], oov: Oov) -> Scored:
    """The definition of what `fused_score` sums: `value_R` carries gradients."""
    rows, log_mass_R = read_rows(logits_RW, teacher, oov)
    values_R = [coefficient * ON_DISTRIBUTIONS[name](rows) for coefficient, name in terms]
    value_R = sum(values_R, torch.zeros_like(rows.mass_R))
    if oov == "mask":
        value_R = value_R.masked_fill(teacher.top_R < 0, 0)
    with torch.no_grad():
        p_RW = rows.p_RW if oov == "tail" else rows.p_RW * log_mass_R.exp()[:, None]
        accept_R = torch.minimum(p_RW, rows.q_RW).sum(-1)
        return Scored(value_R, rows.log_q_RW.argmax(-1) == teacher.top_R, accept_R, -torch.expm1(log_mass_R))


Weigh = Callable[[Tensor], Tensor]  # weights [R] from the chances [R] that the drafter gives the data's tokens


def weighed_loss(
    logits: Logits,
    terms: tuple[tuple[float, str], ...],
    label_R: Tensor,
    weight: Tensor | Weigh | None,
    told: Dense | FromHidden | TopK | None = None,
    masked_R: Tensor | None = None,
    match: bool = True,
) -> tuple[Tensor, LinearLoss]:
    """The sum over rows of weight times loss, with gradients once, and what is known of each row. `label_R`: draft ids,
    -1 = none. `masked_R`: bool, rows that weigh nothing."""
    dtype = logits.hidden_RD.dtype if isinstance(logits, ByHead) else logits.dtype
    wide = torch.promote_types(dtype, torch.float32)
    known_R: Tensor | None = None
    if not callable(weight):
        known_R = torch.ones_like(label_R, dtype=wide) if weight is None else weight.detach()
        known_R = known_R if masked_R is None else known_R.masked_fill(masked_R, 0)
    if isinstance(logits, ByHead):
        out = linear_loss(
            logits.hidden_RD, logits.weight_WD, terms, bias_W=logits.bias_W, teacher=told, label_T=label_R,
            weight_T=known_R, match=match,
        )  # fmt: skip
    else:
        out = logits_loss(logits, terms, teacher=told, label_T=label_R, weight_T=known_R, match=match)
    if not callable(weight):
        return out.total, out
    weight_R = weight(torch.where(label_R >= 0, (-out.ce_T).exp(), 0))
    weight_R = weight_R if masked_R is None else weight_R.masked_fill(masked_R, 0)
    return (out.value_T * weight_R).sum(), out


def fused_score(
    logits: Logits,
    teacher: Teacher,
    terms: tuple[tuple[float, str], ...],
    oov: Oov,
    weight: Tensor | Weigh | None = None,
) -> tuple[Tensor, Scored]:
    """The sum of the losses over R rows, each times its weight (carries gradients, once), and the rows' metrics,
    `value_R` left empty. Weights that depend on the row cost a second pass where the head of a `ByHead` learns.

    Equal to `score_rows` (tests: 1e-6 in fp32).
    """
    told = teacher.told(oov, isinstance(logits, ByHead))
    top_R = None if teacher.top_U is None else teacher.top_U[teacher.index_R]
    masked_R = top_R < 0 if oov == "mask" and top_R is not None else None
    total, out = weighed_loss(logits, terms, teacher.label_R, weight, told, masked_R, top_R is None)
    correct_R = out.match_T if top_R is None else out.top_T == top_R
    return total, Scored(out.accept_T.new_empty(0), correct_R, out.accept_T, -torch.expm1(out.log_mass_T))


def make_teacher(
    head: Callable[[Tensor, Tensor | None], Tensor],
    hidden_UD: Tensor,
    log_z_U: Tensor | None,
    top_U: Tensor | None,
    d2t_W: Tensor | None,
    t2d_V: Tensor | None,
    block: int = 256,
    *,
    states: ByHead | None = None,
    reads: int = 0,
) -> Teacher:
    """A teacher's bank from the target's normed states; `index_R` and `label_R` are left empty.

    `head(hidden, ids or None)` gives the target's logits; `log_z_U` and `top_U` (target ids) come from a capture, or
    are computed here, `block` rows at a time. `t2d_V` [V] maps target ids to draft ids, -1 = none (None = identity).
    `states`: what `head` makes of these states, not yet formed, where it is linear. The bank is then made of them at
    every read where rows are read no more than once (`reads` of the U in all), on accelerators, whose kernels keep
    logits in registers, and where it would take more than BANK_BYTES. Else it is made once and kept: a read costs 4
    bytes a logit, making it anew D multiplications.
    """
    with torch.no_grad():
        bank: Logits
        log_kept_U: Tensor | None = None
        if states is not None and not keep_bank(states, reads):
            bank = states
        else:
            bank = head(hidden_UD, d2t_W)
            log_kept_U = log_sum(bank, block)
        if log_z_U is None or top_U is None:
            if d2t_W is None:
                log_z_U, top_U = None, None if isinstance(bank, ByHead) else bank.argmax(-1)
            else:
                log_zs, tops = [log_sum(hidden_UD[:0], block)], [d2t_W[:0]]
                for lo in range(0, hidden_UD.shape[0], block):
                    full_UV = head(hidden_UD[lo : lo + block], None)
                    log_zs.append(log_sum(full_UV, block))
                    tops.append(full_UV.argmax(-1))
                log_z_U, top_U = torch.cat(log_zs), torch.cat(tops)
        if top_U is not None:
            top_U = top_U.long() if t2d_V is None else t2d_V[top_U.long()]
    nothing = torch.zeros(0, dtype=torch.int64, device=hidden_UD.device)
    return Teacher(bank, log_kept_U, log_z_U, top_U, nothing, nothing)


def make_top_teacher(ids_UK: Tensor, log_p_UK: Tensor, tail_U: Tensor, top_U: Tensor, t2d_V: Tensor | None) -> Teacher:
    """A teacher from the target's K likeliest ids (target ids, best first), the logs of their probabilities and the mass
    of all others; the rest as in `make_teacher`, of which no head is read."""
    nothing = torch.zeros(0, dtype=torch.int64, device=ids_UK.device)
    ids_UK, top_U = ids_UK.long(), top_U.long()
    if t2d_V is None:
        return Teacher(TopK(ids_UK, log_p_UK, tail_U), None, None, top_U, nothing, nothing)
    ids_UK = t2d_V[ids_UK]
    p_UK, inside_UK = log_p_UK.exp(), ids_UK >= 0
    lower = slice(ids_UK.shape[1] // 2, None)
    share_U = (p_UK * inside_UK)[:, lower].sum(-1) / p_UK[:, lower].sum(-1).clamp(min=torch.finfo(p_UK.dtype).tiny)
    inside_U = tail_U * share_U.clamp(min=SMALLEST_SHARE)
    mass_U = (p_UK * inside_UK).sum(-1) + inside_U
    log_mass_U = mass_U.clamp(min=torch.finfo(p_UK.dtype).tiny, max=1).log()
    return Teacher(TopK(ids_UK, log_p_UK, inside_U, log_mass_U), None, None, t2d_V[top_U], nothing, nothing)


def log_sum(logits_UX: Tensor, block: int) -> Tensor:
    """[U] log-sum-exp in fp32 at least, `block` rows at a time."""
    wide = torch.promote_types(logits_UX.dtype, torch.float32)
    parts = [part.to(wide).logsumexp(-1) for part in logits_UX.split(block)]
    return torch.cat(parts) if len(logits_UX) else logits_UX.new_zeros(0, dtype=wide)


def keep_bank(states: ByHead, reads: int) -> bool:
    """Whether the target's logits are made once and kept; see `make_teacher`."""
    rows, size = len(states.hidden_RD), len(states.weight_WD) * states.weight_WD.element_size()
    return states.hidden_RD.device.type == "cpu" and reads > rows and rows * size <= BANK_BYTES
