"""Guards of consistency training: is the student still its base, and how far does it get in a pass?

A student that learns from itself may agree with itself on repetition (hao-ai-lab/Consistency_LLM issues 4 and 11). Two
figures tell, each held against its value at step 0, where adapters are zero and the student is the base: the
cross-entropy of held-out answers (the base's own greedy ones), from the held-out evaluation; and the share of repeated
4-grams in greedy answers, from a probe that decodes as the export will be. The probe's tokens per forward choose the best
step, among those that are within bounds. Tests: `pytest tests/test_distill_consistency.py`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any, Literal

import torch

from ..configs.consistency import GuardConfig
from ..inference.consistency_figures import repeated_grams
from ..inference.speculate import DecodeConfig, generate
from ..losses.probs import SamplingParams
from ..models.adapters import Adapters
from ..models.consistency import ConsistencyConfig
from ..models.jacobi import Jacobi, JacobiConfig
from .checkpoint import State
from .loop import Judge, Probe, Verdict

LOSS, REPEATED, SPEED = "ar_loss", "repeated_share", "tokens_per_forward"
MOST = 4  # guesses of quadratic decoding


def decoding_of(objective: ConsistencyConfig, mask_id: int | None) -> JacobiConfig:
    """How a model of this objective is decoded: with as many guesses as its block has places, at all times (a trained
    SmolLM2 came to 1.30 tokens per forward so, and to 1.25 up to the end of a block). One that has seen first guesses alone
    reads no others (quadratic), `MOST` at a time, since rows grow with the square. Two blocks are in flight where a block
    learnt to read noisy ones before it. First guesses are of the kind that it has seen (for tokens of the text before a
    block, which decoding does not offer, those of the prompt)."""
    start: Literal["prompt", "last", "random", "mask"] = "prompt"
    if objective.start in ("last", "random"):
        start = objective.start
    elif objective.start == "mask" and mask_id is not None:
        start = "mask"
    mask = mask_id if start == "mask" else None
    if objective.window > 1:
        return JacobiConfig(block=objective.block, blocks=2, window="block", start=start, mask_id=mask)
    if objective.states == "noise":
        return JacobiConfig(block=min(objective.block, MOST), window="quadratic", start=start, mask_id=mask)
    return JacobiConfig(block=objective.block, window="slide", start=start, mask_id=mask)


def jacobi_probe(adapters: Adapters, decode: JacobiConfig, tokens: int, prompts: list[list[int]]) -> Probe:
    """A probe for the loop: greedy answers of `tokens` tokens at most, by Jacobi decoding.

    Its figures: `tokens_per_forward` (committed per pass, the prompt's own apart), `repeated_share` of all 4-grams, and
    `forwards`, the passes that they are of. Empty when it was stopped.
    """
    params, facts = SamplingParams(max_new_tokens=tokens), adapters.target.facts
    if decode.mask_id is not None:  # one that is new has its row in the export; here the adapters embed it
        facts = replace(facts, vocab=max(facts.vocab, decode.mask_id + 1))

    @torch.no_grad()
    def probe(student: Any, stopped: Callable[[], bool]) -> dict[str, float]:
        student.eval()
        committed, forwards, repeated, grams = 0, 0, 0, 0
        for ids in prompts:
            if stopped():
                return {}
            with adapters.view("noisy"):
                drafter = Jacobi(decode, facts)
                drafter.bind(adapters.target)
                (answer,) = generate(adapters.target, [ids], params, drafter=drafter, decode=DecodeConfig())
            committed += answer.stats.committed - 1  # the first token comes from the prompt's own pass
            forwards += answer.stats.verifies
            again, every = repeated_grams(answer.ids)
            repeated, grams = repeated + again, grams + every
        share = repeated / grams if grams else 0.0
        return {SPEED: committed / max(forwards, 1), REPEATED: share, "forwards": float(forwards)}

    return probe


def judge_of(guard: GuardConfig) -> Judge:
    """The loop's judge: a step is out of bounds when either figure rose too far above step 0's, or is no number; the run has
    collapsed when it rose `guard.collapse` times as far."""
    return partial(_judge, guard)


def _judge(guard: GuardConfig, state: State, figures: dict[str, float]) -> Verdict:
    against, collapsed = [], False
    for name, what, most in (
        (LOSS, "the cross-entropy of held-out answers", guard.max_rise),
        (REPEATED, "the share of repeated 4-grams", guard.max_repeated),
    ):
        if name not in figures or name not in state.first:
            continue
        value, base = figures[name], state.first[name]
        collapsed = collapsed or not value - base <= most * guard.collapse
        if not value - base <= most:
            setting = "max_rise" if name == LOSS else "max_repeated"
            against.append(f"{what} is {value:.3f}, the base's {base:.3f} (guard.{setting}={most:g})")
    if against:
        return Verdict(None, "; ".join(against), collapsed and guard.action == "stop")
    both = LOSS in figures and SPEED in figures
    return Verdict(figures[SPEED] if both else None)
