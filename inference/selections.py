"""Selections: which open places a pass decides, given a score per place. Part of inference/strategies.py.

A selection is a frozen dataclass of settings, called with (step, score_BC); it returns bool [B, C], a subset of
`step.open_BC`, and may keep what it needs to know of earlier passes in `step.memory`.

Test: pytest tests/test_strategies.py
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from .step import Step, leading, leads, ranks, runs, shifted


@dataclass(frozen=True)
class FixedSteps:
    """The best-scored places, equally many per pass (LLaDA 2502.09992)."""

    steps: int | None = None
    """Passes per block; none = one per place (LLaDA's baseline)."""

    def __call__(self, step: Step, score_BC: Tensor) -> Tensor:
        return step.open_BC & (ranks(score_BC, step.open_BC) < self.count(step)[:, None])

    def count(self, step: Step) -> Tensor:
        """int64 [B], how many."""
        left_B = step.open_BC.sum(1)
        passes_B = left_B if self.steps is None else (self.steps - step.passes_B).clamp(min=1)
        return -(-left_B // passes_B.clamp(min=1))


@dataclass(frozen=True)
class Ascending:
    """Pass i of a block decides 2 ** i places (ascending step size, 2509.23924)."""

    def __call__(self, step: Step, score_BC: Tensor) -> Tensor:
        count_B = 2 ** step.passes_B.clamp(max=30)
        return step.open_BC & (ranks(score_BC, step.open_BC) < count_B[:, None])


@dataclass(frozen=True)
class Everything:
    """Every open place: a block per pass."""

    def __call__(self, step: Step, score_BC: Tensor) -> Tensor:
        return step.open_BC


@dataclass(frozen=True)
class Threshold:
    """Every place whose score reaches the threshold (Fast-dLLM v1 2505.22618)."""

    threshold: float = 0.9
    """Least score (Fast-dLLM v1: 0.9); above 1: one place per pass."""

    def __call__(self, step: Step, score_BC: Tensor) -> Tensor:
        return step.open_BC & (score_BC >= self.threshold)


@dataclass(frozen=True)
class Factor:
    """The largest n whose n-th best score c has (n + 1)(1 - c) < factor (Fast-dLLM v1 2505.22618, section 3)."""

    factor: float = 1.0
    """Bound (Fast-dLLM v1: 1)."""

    def __call__(self, step: Step, score_BC: Tensor) -> Tensor:
        return leading(score_BC, step.open_BC, lambda c_BC, n_C: (n_C + 1) * (1 - c_BC) < self.factor)


@dataclass(frozen=True)
class EntropyBound:
    """Least entropy first, while the sum of all but the largest stays within the bound (EB-Sampler 2505.24857)."""

    bound: float = 0.35
    """In nats (SDAR's entropy_bounded: 0.35)."""

    def __call__(self, step: Step, score_BC: Tensor) -> Tensor:
        def within(negative_BC: Tensor, n_C: Tensor) -> Tensor:
            entropy_BC = -negative_BC.masked_fill(negative_BC.isinf(), 0)
            return entropy_BC.cumsum(1) - entropy_BC <= self.bound

        return leading(-step.entropy_BC, step.open_BC, within)


@dataclass(frozen=True)
class Entropy:
    """Every place whose entropy is within the bound (dParallel 2509.26488, decoding)."""

    entropy: float = 0.45
    """In nats (dParallel: 0.45 to 0.5)."""

    def __call__(self, step: Step, score_BC: Tensor) -> Tensor:
        return step.open_BC & (step.entropy_BC <= self.entropy)


@dataclass(frozen=True)
class Hierarchy:
    """Every place of high score; in a row without one, the best of each run of undecided places if it is not low
    (hierarchical decoding of dInfer)."""

    high: float = 0.92
    """Score that is enough anywhere (dInfer)."""
    low: float = 0.62
    """Least score of a run's best place (dInfer)."""

    def __call__(self, step: Step, score_BC: Tensor) -> Tensor:
        sure_BC = step.open_BC & (score_BC >= self.high)
        best_BC, _ = leads(score_BC, runs(step.open_BC))
        return torch.where(sure_BC.any(1, keepdim=True), sure_BC, best_BC & (score_BC >= self.low))


@dataclass(frozen=True)
class Redundancy:
    """The rules of R2-dLLM (2604.18995) on top of a threshold: a candidate that stays is taken at a lower score; a sure
    neighbourhood is closed at once; of neighbours with one candidate only the best is taken."""

    threshold: float = 0.9
    """Score that is enough by itself (its base, Fast-dLLM's)."""
    steady: int = 3
    """Passes with the same candidate (temporal rule)."""
    steady_score: float = 0.8
    """Least score of such a candidate."""
    width: int = 3
    """Places of a window with at most one undecided (confidence cluster)."""
    cluster: float = 0.8
    """Least mean score of such a window, decided places counting 1."""
    token: float = 0.8
    """Score above which the best of neighbours with one candidate is taken (token cluster)."""

    def __call__(self, step: Step, score_BC: Tensor) -> Tensor:
        open_BC = step.open_BC
        same_BC = step.recall("r2_id", step.best_BC) == step.best_BC
        count_BC = step.recall("r2_count", step.best_BC) * same_BC + 1
        step.memory |= {"r2_id": step.best_BC, "r2_count": count_BC}
        chosen_BC = open_BC & (
            (score_BC >= self.threshold) | ((count_BC >= self.steady) & (score_BC >= self.steady_score))
        )
        known_BC = ~open_BC & step.first_BC
        sure_BC = torch.where(known_BC, torch.ones_like(score_BC), score_BC)
        usable_BC = open_BC | known_BC
        for first in range(self.width):  # the window that begins `first` places before
            offsets = [k - first for k in range(self.width)]
            mean_BC = sum(shifted(sure_BC, -k, 0.0) for k in offsets) / self.width
            others_BC = sum(shifted(open_BC, -k, False).long() for k in offsets)
            whole_BC = sum(shifted(usable_BC, -k, False).long() for k in offsets)
            chosen_BC |= open_BC & (whole_BC == self.width) & (others_BC <= 1) & (mean_BC >= self.cluster)
        return self._thin(step, score_BC, chosen_BC)

    def _thin(self, step: Step, score_BC: Tensor, chosen_BC: Tensor) -> Tensor:
        """Of each run of neighbours with one candidate, the best alone: taken if it is sure enough."""
        open_BC = step.open_BC
        joined_BC = open_BC & shifted(open_BC, 1, False) & (shifted(step.best_BC, 1, -1) == step.best_BC)
        best_BC, size_BC = leads(score_BC, torch.where(open_BC, (open_BC & ~joined_BC).cumsum(1), -1))
        return torch.where(size_BC > 1, best_BC & (chosen_BC | (score_BC > self.token)), chosen_BC)


@dataclass(frozen=True)
class Klass:
    """Sure places whose distribution has hardly moved for some passes (KLASS)."""

    threshold: float = 0.9
    """Least score (Fast-dLLM's)."""
    kl: float = 0.01
    """Largest KL of a pass's distribution from the pass before it, in nats (KLASS)."""
    history: int = 2
    """Passes in a row that it must hold for (KLASS)."""

    def __call__(self, step: Step, score_BC: Tensor) -> Tensor:
        p_BCV = step.probs_BCV
        before_BCV = step.recall("klass_p", p_BCV)
        known_BC = before_BCV.sum(-1) > 0
        ratio_BCV = (p_BCV / before_BCV).log().masked_fill(p_BCV == 0, 0)
        calm_BC = known_BC & ((p_BCV * ratio_BCV).sum(-1) <= self.kl)
        count_BC = (step.recall("klass_count", step.best_BC) + 1) * calm_BC
        step.memory |= {"klass_p": p_BCV, "klass_count": count_BC}
        return step.open_BC & (score_BC >= self.threshold) & (count_BC >= self.history)


@dataclass(frozen=True)
class LocalLeap:
    """Sure places are anchors, next to which less is asked (LocalLeap; the numbers are ours)."""

    threshold: float = 0.9
    """Score of an anchor."""
    near: float = 0.75
    """Score that is enough beside an anchor."""
    radius: int = 4
    """Places on either side of an anchor."""

    def __call__(self, step: Step, score_BC: Tensor) -> Tensor:
        anchor_BC = step.open_BC & (score_BC >= self.threshold)
        beside_BC = torch.zeros_like(anchor_BC)
        for shift in range(-self.radius, self.radius + 1):
            beside_BC |= shifted(anchor_BC, shift, False)
        return step.open_BC & (anchor_BC | (beside_BC & (score_BC >= self.near)))


@dataclass(frozen=True)
class LeftPrefix:
    """The first undecided place and the contiguous ones behind it whose entropy, raised with distance, is within the
    bound (WeDLM 2512.22737: what it commits to its cache; its window is the block here)."""

    entropy: float = 0.6
    """In nats (WeDLM)."""
    penalty: float = 0.02
    """Added per place of distance from the first undecided one (WeDLM)."""

    def __call__(self, step: Step, score_BC: Tensor) -> Tensor:
        place_BC = step.open_BC.long().cumsum(1) - 1
        good_BC = (step.entropy_BC + self.penalty * place_BC <= self.entropy) | (place_BC == 0)
        return step.open_BC & (good_BC | ~step.open_BC).long().cumprod(1).bool()


@dataclass(frozen=True)
class WhenSettled:
    """Nothing until all places are sure or none has changed its candidate, then all (DMax 2604.08302, soft parallel
    decoding). Meanwhile the loop still decides one place per pass, so that it ends."""

    sure: float = 0.9
    """Score of every place that ends the block (DMax)."""

    def __call__(self, step: Step, score_BC: Tensor) -> Tensor:
        same_BC = step.recall("settled_id", step.best_BC) == step.best_BC
        seen_BC = step.recall("settled_seen", step.open_BC)
        step.memory |= {"settled_id": step.best_BC, "settled_seen": torch.ones_like(step.open_BC)}
        calm_B1 = ((same_BC & seen_BC) | ~step.open_BC).all(1, keepdim=True)
        return step.open_BC & (calm_B1 | ((score_BC >= self.sure) | ~step.open_BC).all(1, keepdim=True))


Filter = Callable[[Tensor, Tensor], Tensor]
"""(confidence_BC, open_BC) -> probability [B, C] that the candidate is the final token (Learn2PD)."""
Pairs = Callable[[Tensor], Tensor]
"""hidden_BCD -> dependency [B, C, C] in [0, 1] of the tokens of two places (DEMASK)."""


@dataclass(frozen=True)
class Learned:
    """Places that a trained filter takes for final (Learn2PD 2509.25188)."""

    filter: Filter | None = None
    """The trained filter."""
    final: float = 0.5
    """Least probability (ours: the filter's own boundary)."""

    def __call__(self, step: Step, score_BC: Tensor) -> Tensor:
        if self.filter is None:
            raise ValueError("strategy learned: give it a trained filter, strategy_of('learned', {'filter': ...})")
        return step.open_BC & (self.filter(step.confidence_BC, step.open_BC) >= self.final)


@dataclass(frozen=True)
class Independent:
    """Best-scored first, every sure place that depends little on those taken before it (DEMASK: bounded dependency)."""

    pairs: Pairs | None = None
    """The trained predictor of dependency."""
    bound: float = 0.5
    """Largest sum of dependencies on the places taken in this pass (ours)."""
    least: float = 0.5
    """Least score (ours)."""

    def __call__(self, step: Step, score_BC: Tensor) -> Tensor:
        if self.pairs is None:
            raise ValueError("strategy independent: give it a predictor, strategy_of('independent', {'pairs': ...})")
        assert step.hidden_BCD is not None
        dependency_BCC = self.pairs(step.hidden_BCD)
        among_BC = step.open_BC & (score_BC >= self.least)
        rank_BC = ranks(score_BC, among_BC)
        chosen_BC = torch.zeros_like(among_BC)
        for k in range(int(among_BC.sum(1).max())):
            next_BC = (rank_BC == k) & among_BC
            load_BC = torch.einsum("bij,bj->bi", dependency_BCC, chosen_BC.to(dependency_BCC.dtype))
            chosen_BC |= next_BC & (load_BC <= self.bound)
        return chosen_BC
