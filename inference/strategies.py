"""Decode strategies of denoisers: which undecided places a pass decides, and what else it changes.

A strategy is put together from small objects, each a rule with its settings:

- `score(step)`: how sure every place is, [B, C];
- `select(step, score_BC)`: the places that are decided now, a subset of `step.open_BC`. Where a row gets none, the loop
  (inference/diffuse.py) decides its best-scored place, so that every strategy ends;
- `apply(step)`: changes decided places: edits (token -> token) or masks them again; `soft` mixes the embeddings of
  places that are still open;
- `schedule`: where a block ends, and how many blocks are open at once; `stop`: decide all that is left;
- `verify`: drafts of later states or rival fills that run beside the canvas (inference/branches.py).

`STRATEGIES` is the table; `strategy_of("threshold", {"threshold": 0.8})` changes settings by name. Rows of a batch do
not influence each other. Among equal scores the lowest place comes first. Test: pytest tests/test_strategies.py
"""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from dataclasses import dataclass, fields, is_dataclass, replace
from typing import Any, Literal

import torch
from torch import Tensor

from ..kernels.unmask import Rule
from .branches import FreeDave, Lopa, SelfVerify
from .selections import (
    Ascending,
    Entropy,
    EntropyBound,
    Everything,
    Factor,
    FixedSteps,
    Hierarchy,
    Independent,
    Klass,
    Learned,
    LeftPrefix,
    LocalLeap,
    Redundancy,
    Threshold,
    WhenSettled,
)
from .step import Step, best, ranks

# Scores


@dataclass(frozen=True)
class Confidence:
    """Probability of the candidate (LLaDA 2502.09992, low-confidence remasking)."""

    def __call__(self, step: Step) -> Tensor:
        return step.confidence_BC


@dataclass(frozen=True)
class Margin:
    """Difference of the two largest probabilities (Kim et al. 2502.06768, top-k probability margin; Dream)."""

    def __call__(self, step: Step) -> Tensor:
        return step.said.margin


@dataclass(frozen=True)
class LowEntropy:
    """The less entropy the better (Dream, `alg entropy`)."""

    def __call__(self, step: Step) -> Tensor:
        return -step.entropy_BC


@dataclass(frozen=True)
class EosRejection:
    """Confidence of candidates that end the answer is damped, less and less (EOSER, 2509.23924). The damping follows the
    decided share of the whole answer, so that it has faded at its end whatever the number of blocks and passes."""

    gamma: float = 0.4
    """Factor at the start; 1 at the end (EOSER's released code: 0.4, with ascending steps 0.01)."""

    def __call__(self, step: Step) -> Tensor:
        done_B1 = (1 - step.left_B / step.total_B.clamp(min=1))[:, None].to(step.confidence_BC.dtype)
        factor_B1 = self.gamma + (1 - self.gamma) * done_B1
        return torch.where(step.ends_BC, step.confidence_BC * factor_B1, step.confidence_BC)


@dataclass(frozen=True)
class Credit:
    """A candidate that stays gains credit, which raises its logit (credit decoding of dInfer). Credit is kept for the
    newest candidate of a place; another candidate starts anew."""

    alpha: float = 0.7
    """Weight of log(1 + credit) in the logit (dInfer)."""
    gamma: float = 0.2
    """Power of the confidence that is added per pass (dInfer)."""
    beta: float = 0.8
    """Share of the credit that is left after a pass (dInfer)."""

    def __call__(self, step: Step) -> Tensor:
        p_BC = step.confidence_BC
        kept_BC = step.recall("credit", p_BC) * (step.recall("credit_id", step.best_BC) == step.best_BC)
        credit_BC = self.beta * kept_BC + p_BC**self.gamma
        step.memory |= {"credit": credit_BC, "credit_id": step.best_BC}
        raised_BC = p_BC * (1 + kept_BC) ** self.alpha
        return raised_BC / (raised_BC + 1 - p_BC).clamp(min=torch.finfo(p_BC.dtype).tiny)


# What else a pass may do


@dataclass(frozen=True)
class Edit:
    """Decided tokens of the block are replaced where the model is sure of another (LLaDA2.1 2602.08676: token editing).
    A full block stays open while edits go on."""

    edit: float = 0.7
    """Least probability of the other token (LLaDA2.1: 0.7, its fast mode 0.5)."""
    post_edits: int = 16
    """Passes of a full block at most (SGLang's JointThreshold: 16)."""

    def __call__(self, step: Step, chosen_BC: Tensor) -> Tensor:
        """bool [B, C]: places that take their candidate."""
        decided_BC = step.first_BC & ~step.open_BC & ~step.fixed_BC
        return decided_BC & (step.best_BC != step.ids_BC) & (step.confidence_BC >= self.edit)


@dataclass(frozen=True)
class Remask:
    """Decided tokens that the model no longer believes in are masked again (WINO and RCR), the least believed first; in
    every pass fewer than were decided in it, so that it ends."""

    remask: float = 0.4
    """A token of less probability is masked again (Diffulex: 0.4)."""

    def __call__(self, step: Step, chosen_BC: Tensor) -> Tensor:
        """bool [B, C]: places that are masked again."""
        ids_BC = step.ids_BC.clamp(max=step.probs_BCV.shape[2] - 1)  # a mask may lie behind the vocabulary
        p_BC = step.probs_BCV.gather(2, ids_BC[..., None])[..., 0]
        doubtful_BC = step.first_BC & ~step.open_BC & ~step.fixed_BC & (p_BC < self.remask)
        return doubtful_BC & (ranks(-p_BC, doubtful_BC) < chosen_BC.sum(1, keepdim=True) - 1)


@dataclass(frozen=True)
class Soft:
    """Open places of some confidence are read as a mix of their candidate's embedding and the mask's (DMax 2604.08302):
    p e(candidate) + (1 - p) e(mask), scaled to the same mix of their norms."""

    soft: float = 0.5
    """Least confidence (DMax's evaluation: 0.5)."""


@dataclass(frozen=True)
class AdaBlock:
    """A block ends behind its surest delimiter, as seen in its first pass (AdaBlock 2509.26432)."""

    delimiter: float = 0.3
    """Least confidence of the delimiter (AdaBlock: 0.3 for LLaDA, 0.5 for Dream)."""
    delimiters: tuple[int, ...] = ()
    """Their ids; none = the tokenizer's newline."""

    def cut(self, step: Step) -> Tensor:
        """int64 [B]: the first block's new length, 0 = as it is."""
        ids = torch.tensor(self.delimiters, device=step.best_BC.device)
        ends_BC = step.open_BC & torch.isin(step.best_BC, ids) & (step.confidence_BC >= self.delimiter)
        found_BC = best(step.confidence_BC, ends_BC) & (step.passes_B == 0)[:, None]
        steps_C = torch.arange(1, ends_BC.shape[1] + 1, device=ends_BC.device)
        return (found_BC * steps_C).sum(1)


@dataclass(frozen=True)
class Pipeline:
    """Several blocks at once (D2F 2508.09192): the next one opens when the last has been decided in part; a block whose
    predecessor is nearly done decides at least one place per pass too."""

    blocks: int = 3
    """Open blocks at most (ours)."""
    add: float = 0.1
    """Decided share of the last block that opens the next (D2F: 0.1)."""
    ready: float = 0.95
    """Decided share of the predecessor that makes a block fully active (D2F: 0.95)."""

    def share(self, step: Step, undecided_BC: Tensor, number: int) -> Tensor:
        """float [B]: decided share of a block; -1 where there is no such block."""
        in_BC = step.block_BC == number
        size_B = in_BC.sum(1)
        return torch.where(size_B > 0, 1 - (undecided_BC & in_BC).sum(1) / size_B.clamp(min=1), -1.0)

    def more(self, step: Step, score_BC: Tensor, chosen_BC: Tensor) -> Tensor:
        """bool [B, C]: the best place of each fully active block that got none."""
        more_BC = torch.zeros_like(chosen_BC)
        for k in range(1, self.blocks):
            in_BC = (step.block_BC == k) & step.open_BC
            ready_B = self.share(step, step.open_BC, k - 1) >= self.ready
            lacks_B = ready_B & ~(chosen_BC & in_BC).any(1)
            more_BC |= best(score_BC, in_BC) & lacks_B[:, None]
        return more_BC

    def opens(self, step: Step, chosen_BC: Tensor) -> Tensor:
        """bool [B]: whether another block is opened after this pass."""
        last_B = step.block_BC.amax(1)
        share_B = torch.full_like(last_B, -1.0, dtype=torch.float64)
        for k in range(self.blocks):
            own_B = self.share(step, step.open_BC & ~chosen_BC, k).double()
            share_B = torch.where(last_B == k, own_B, share_B)
        return (share_B >= self.add) & (last_B + 1 < self.blocks)


@dataclass(frozen=True)
class Prophet:
    """Decide all that is open once the mean gap of the two largest logits reaches the stage's bound (Prophet
    2508.19982); stages are thirds of the answer's decided share."""

    early: float = 7.5
    """Bound in the first third (Prophet)."""
    middle: float = 5.0
    """In the second (Prophet)."""
    late: float = 2.5
    """In the last (Prophet)."""

    def __call__(self, step: Step) -> Tensor:
        gap_BC = step.said.gap.masked_fill(~step.open_BC, 0)
        mean_B = gap_BC.sum(1) / step.open_BC.sum(1).clamp(min=1)
        done_B = 1 - step.left_B / step.total_B.clamp(min=1)
        bound_B = torch.where(done_B < 1 / 3, self.early, torch.where(done_B < 2 / 3, self.middle, self.late))
        return mean_B >= bound_B


@dataclass(frozen=True)
class Strategy:
    """One way to decode; see the file's head."""

    select: Any
    score: Any = Confidence()
    apply: Edit | Remask | None = None
    soft: Soft | None = None
    schedule: AdaBlock | Pipeline | None = None
    stop: Prophet | None = None
    verify: FreeDave | Lopa | SelfVerify | None = None

    @property
    def blocks(self) -> int:
        """Blocks that are open at once, at most."""
        return self.schedule.blocks if isinstance(self.schedule, Pipeline) else 1


STRATEGIES: dict[str, Strategy] = {
    "fixed": Strategy(FixedSteps()),
    "threshold": Strategy(Threshold()),
    "factor": Strategy(Factor()),
    "entropy_bound": Strategy(EntropyBound(), score=LowEntropy()),
    "entropy": Strategy(Entropy(), score=LowEntropy()),
    "margin": Strategy(FixedSteps(), score=Margin()),
    "hierarchy": Strategy(Hierarchy()),
    "r2": Strategy(Redundancy()),
    "klass": Strategy(Klass()),
    "prophet": Strategy(FixedSteps(), stop=Prophet()),
    "adablock": Strategy(Threshold(), schedule=AdaBlock()),
    "eos_rejection": Strategy(FixedSteps(), score=EosRejection()),
    "ascending": Strategy(Ascending(), score=EosRejection(gamma=0.01)),
    "local_leap": Strategy(LocalLeap()),
    "credit": Strategy(Threshold(), score=Credit()),
    "left_prefix": Strategy(LeftPrefix(), score=LowEntropy()),
    "pipeline": Strategy(Threshold(), schedule=Pipeline()),
    "edit": Strategy(Threshold(threshold=0.95), apply=Edit()),
    "soft": Strategy(WhenSettled(), soft=Soft()),
    "remask": Strategy(Threshold(threshold=0.6), apply=Remask()),
    "learned": Strategy(Learned()),
    "independent": Strategy(Independent()),
    "freedave": Strategy(FixedSteps(), verify=FreeDave()),
    "lopa": Strategy(Threshold(), verify=Lopa()),
    "s2d2": Strategy(Everything(), verify=SelfVerify()),
}


def strategy_of(name: str, settings: Mapping[str, Any] | None = None) -> Strategy:
    """The strategy of that name with some settings changed. Raises ValueError for unknown names and settings."""
    if name not in STRATEGIES:
        raise ValueError(f"strategy {name!r}: use one of {', '.join(STRATEGIES)}")
    strategy, left = STRATEGIES[name], dict(settings or {})
    slots = settings_by_slot(strategy)
    for slot, names in slots.items():
        if mine := {key: left.pop(key) for key in names if key in left}:
            strategy = replace(strategy, **{slot: replace(getattr(strategy, slot), **mine)})
    known = [key for names in slots.values() for key in names]
    if left:
        near = difflib.get_close_matches(next(iter(left)), known, 1)
        hint = f"did you mean {near[0]!r}?" if near else f"it has {', '.join(known) or 'none'}"
        raise ValueError(f"strategy {name!r} has no setting {next(iter(left))!r}: {hint}")
    return strategy


_RULED: dict[type, Literal["confidence", "margin", "entropy"]] = {
    Confidence: "confidence",
    Margin: "margin",
    LowEntropy: "entropy",
}


def rule_of(strategy: Strategy, step: Step) -> tuple[Rule, Tensor | None] | None:
    """The rule of kernels/unmask.py, with its counts, that decides what score, selection and the loop's best place would,
    in one go. None where there is none, or where a kernel did not make the pass's statistics."""
    found, score, select = step.found, _RULED.get(type(strategy.score)), strategy.select
    if found is None or found.parts is None or score is None or strategy.schedule or strategy.stop:
        return None
    if score == "confidence" and step.confidence_BC is not found.confidence:
        return None  # of candidates that were drawn
    if isinstance(select, FixedSteps):
        return Rule("count", score), select.count(step)
    if isinstance(select, EntropyBound) and score == "entropy":
        return Rule("bound", score, select.bound), None
    if isinstance(select, Entropy) and score == "entropy":
        return Rule("threshold", score, select.entropy), None
    if isinstance(select, Threshold) and score != "entropy":
        return Rule("threshold", score, select.threshold), None
    if isinstance(select, Factor) and score != "entropy":
        return Rule("factor", score, select.factor), None
    return None


def settings_by_slot(strategy: Strategy) -> dict[str, list[str]]:
    """The names of a strategy's settings, by the part of it that has them."""
    parts = {slot.name: getattr(strategy, slot.name) for slot in fields(strategy)}
    return {
        slot: [f.name for f in fields(part)]
        for slot, part in parts.items()
        if is_dataclass(part) and not isinstance(part, type)
    }
