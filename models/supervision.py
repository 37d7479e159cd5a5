"""Which rows of a batch are trained at which depth, and the score of a drafter's logits there.

Only *supervised rows* cost queries, MLPs and heads: state rows with a pair of depth 1 (`drafter.supervised`). Every
deeper pair belongs to such a row, and its teacher row is the depth-1 teacher of a later one, so that one bank of
target logits serves all depths.

Test: pytest tests/test_methods.py
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from ..data.batch import document_starts
from ..losses.distill import ON_FEATURES, Logits, Oov, Scored, Teacher, fused_score, make_teacher, make_top_teacher
from ..losses.objective import Objective
from .attention import Ranges
from .drafter import Batch, TargetOut, Terms, supervised
from .layers import keyed_uniform


def pair_counts(batch: Batch, depths: int, deep_share: float = 1.0) -> dict[str, float]:
    """`denominators` of every method: training pairs of each depth."""
    return {f"depth_{d}": float(len(pairs)) for d, pairs in enumerate(Rows.of(batch, depths, deep_share).pairs, 1)}


@dataclass
class Rows:
    """The R supervised rows of a batch. `flat_R` = b * T + t, ascending; `pairs[d - 1]`: indices of those that are
    trained at depth d, a subset of those of depth d - 1."""

    flat_R: Tensor
    pairs: list[Tensor]
    time: int

    @classmethod
    def of(cls, batch: Batch, depths: int, deep_share: float = 1.0) -> Rows:
        """`deep_share`: of the rows, this share is trained beyond depth 1, drawn by (seed, epoch, sample, position)."""
        has = [supervised(batch, d).flatten() for d in range(1, depths + 1)]
        flat_R = has[0].nonzero()[:, 0]
        if deep_share < 1:
            deep = keyed_uniform(batch, 1).flatten() < deep_share
            has[1:] = [rows & deep for rows in has[1:]]
        return cls(flat_R, [rows[flat_R].nonzero()[:, 0] for rows in has], batch.ids_BT.shape[1])

    def deeper(self) -> Rows:
        """The rows that have depth 2 by themselves."""
        keep_R = self.pairs[1]
        return Rows(self.flat_R[keep_R], [torch.searchsorted(keep_R, pairs) for pairs in self.pairs[1:]], self.time)

    def take(self, x_BTX: Tensor, ahead: int = 0) -> Tensor:
        """[R, X]: `x` at t + ahead of each row (kept inside its row of the batch; pairs never need that)."""
        t_R = self.flat_R % self.time
        return x_BTX.flatten(0, 1)[self.flat_R - t_R + (t_R + ahead).clamp(max=self.time - 1)]

    def ranges(self, batch: Batch) -> Ranges:
        """What the rows see of all B * T entries: their document, up to themselves."""
        t_R = self.flat_R % self.time
        first_R = self.flat_R - t_R + document_starts(batch).flatten()[self.flat_R]
        return Ranges(first_R, self.flat_R + 1, batch.ids_BT.numel())


def teacher_of(
    out: TargetOut, take: Callable[[Tensor], Tensor], d2t_W: Tensor | None, t2d_V: Tensor | None, *, reads: int
) -> Teacher:
    """The teacher of some rows of a batch, by its likeliest ids where these are there, else by the target's states.
    `take`: those rows [U, ..] of a tensor [B, T, ..]; `reads` as in `make_teacher`."""
    top_U = None if out.top_BT is None else take(out.top_BT)
    if out.likeliest is not None:
        assert top_U is not None
        told = out.likeliest
        return make_top_teacher(take(told.ids_BTK), take(told.log_p_BTK), take(told.tail_BT), top_U, t2d_V)
    assert out.last_hidden_BTD is not None and out.head is not None
    hidden_UD = take(out.last_hidden_BTD)
    log_z_U = None if out.log_z_BT is None else take(out.log_z_BT)
    states = None if out.by_head is None else out.by_head(hidden_UD, d2t_W)
    return make_teacher(out.head, hidden_UD, log_z_U, top_U, d2t_W, t2d_V, states=states, reads=reads)


class Scorer:
    """Collects the terms of a loss, depth by depth.

    `losses["depth_d"]` is depth_weight**(d - 1) times the sum over the pairs of depth d. Metrics, all against the
    target's own argmax and true probabilities: `accuracy_d`, `accept_d` (sum min(p, q)), `lost_mass` (outside the
    draft vocabulary), `run_length` (leading correct steps of rows that have every depth), `run_length_sq` (their squares,
    for an interval) and `tau`: tokens per verification of a chain that is drafted along the data, see `walk`.
    """

    def __init__(
        self,
        rows: Rows,
        batch: Batch,
        out: TargetOut,
        d2t_W: Tensor | None,
        t2d_V: Tensor | None,
        objective: Objective,
        oov: Oov,
        depth_weight: float,
    ) -> None:
        self.rows, self.objective, self.oov, self.depth_weight = rows, objective, oov, depth_weight
        # Row i: the state after the anchor of rows.flat_R[i].
        self.hidden_RD = None if out.last_hidden_BTD is None else rows.take(out.last_hidden_BTD, 1)
        self.teacher = teacher_of(out, lambda x: rows.take(x, 1), d2t_W, t2d_V, reads=sum(map(len, rows.pairs)))
        tokens_R = rows.take(batch.ids_BT, 2)
        self.labels_R = tokens_R if t2d_V is None else t2d_V[tokens_R]
        self.terms_ = Terms({})
        self.first: Scored
        self.alive_R = torch.ones_like(rows.flat_R, dtype=torch.bool)
        self.run_R = torch.zeros_like(rows.flat_R)

    def teacher_of(self, depth: int) -> Teacher:
        """The teacher of the pairs of one depth: row t + depth is the depth-1 teacher, depth - 1 rows further on."""
        index_R = self.rows.pairs[depth - 1] + depth - 1
        return self.teacher.rows(index_R, self.labels_R[index_R])

    def add(self, depth: int, logits: Logits, feature_RD: Tensor | None = None) -> None:
        """Score the logits [R, W] (and predicted features) of the rows `rows.pairs[depth - 1]`."""
        pairs_R = self.rows.pairs[depth - 1]
        on_rows = tuple(term for term in self.objective if term[1] not in ON_FEATURES)
        loss, scored = fused_score(logits, self.teacher_of(depth), on_rows, self.oov)
        for factor, name in self.objective:
            if name in ON_FEATURES:
                assert feature_RD is not None and self.hidden_RD is not None
                loss = loss + factor * ON_FEATURES[name](feature_RD, self.hidden_RD[pairs_R + depth - 1]).sum()
        self.terms_.losses[f"depth_{depth}"] = loss * self.depth_weight ** (depth - 1)
        if depth == 1:
            self.first = scored
            self.terms_.metrics["lost_mass"] = scored.lost_R.sum(), torch.tensor(float(len(pairs_R)))
        self._measure(depth, scored.correct_R, scored.accept_R)

    def repeat(self, depth: int) -> None:
        """Metrics alone, of a drafter whose logits depend on the text and not on where the draft began (a language
        model): those of depth 1, depth - 1 rows further on."""
        index_R = self.rows.pairs[depth - 1] + depth - 1
        self._measure(depth, self.first.correct_R[index_R], self.first.accept_R[index_R])

    def _measure(self, depth: int, correct_R: Tensor, accept_R: Tensor) -> None:
        pairs_R = self.rows.pairs[depth - 1]
        count = torch.tensor(float(len(pairs_R)))
        self.terms_.metrics[f"accuracy_{depth}"] = correct_R.sum().float(), count
        self.terms_.metrics[f"accept_{depth}"] = accept_R.sum(), count
        self.alive_R[pairs_R] &= correct_R
        self.run_R[pairs_R] += self.alive_R[pairs_R]

    def terms(self) -> Terms:
        run_R = self.run_R[self.rows.pairs[-1]].float()
        count = torch.tensor(float(len(run_R)))
        self.terms_.metrics["run_length"] = run_R.sum(), count
        self.terms_.metrics["run_length_sq"] = run_R.square().sum(), count
        self.terms_.metrics["tau"] = walk(self.rows, self.run_R)
        return self.terms_


def walk(rows: Rows, run_R: Tensor) -> tuple[Tensor, Tensor]:
    """(tokens, verifications) of greedy chains along the data: from the first row of each stretch of supervised rows
    on, a verification takes a row's leading hits `run_R` and one token of the target's own, and the next one starts at
    the row behind them. What a mean over all rows is not: hard places start more chains than easy ones.
    """
    flat, run = rows.flat_R.tolist(), run_R.tolist()
    verifications, due = 0, -1
    for i, (at, hits) in enumerate(zip(flat, run, strict=True)):
        if i == 0 or at != flat[i - 1] + 1:
            due = at
        if at == due:
            verifications += 1
            due = at + 1 + hits
    return torch.tensor(float(len(flat))), torch.tensor(float(verifications))
