"""Rows of the report of `draftsmith evaluate`: figures, identity with plain decoding, what a reader must not overlook.
Part of inference/evaluate.py.

Test: pytest tests/test_evaluate.py
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ..models import TRAINING_FREE
from ..models.target import Target
from .evaluate_config import Arm, EvaluateConfig
from .figures import Bootstrap, Row, Sample, acceptance, by_category, by_prompt, rate, ratio, speed, split_per_pass
from .report import pieces
from .suites import Prompt
from .ties import parting, pass_rows
from .verify import VERIFIERS

SHOWN_DIVERGENCES = 5  # of padded chains, which are compared at equal width; of others all are measured


def trained(row: Row) -> bool:
    return row["method"] not in TRAINING_FREE


def same_width(width: Arm, arm: Arm) -> bool:
    return (
        arm.kind == "draft"
        and arm.temperature == 0
        and arm.decode.fixed_width is not None
        and width.decode.fixed_width == arm.decode.fixed_width
    )


def row_of(
    target: Target,
    drafters: dict[str, Any],
    cfg: EvaluateConfig,
    arm: Arm,
    samples: Sequence[Sample],
    plain: Sequence[Sample],
    hf: Sequence[Sample],
    width: Sequence[Sample],
    questions: dict[tuple[str, int], list[int]],
    bootstrap: Bootstrap,
) -> Row:
    """One row of the report. `plain`, `hf` and `width` are the samples to compare with."""
    draft = arm.kind == "draft"
    rules = sorted({s.rule for s in samples if s.verifies and s.rule in VERIFIERS}) if draft else []
    lossless = all(VERIFIERS[rule].exact for rule in rules)
    tokens_per_second, speed_interval = speed(samples, bootstrap)
    tokens_per_forward, _ = rate(
        bootstrap.sums(samples, lambda s: len(s.ids)), bootstrap.sums(samples, lambda s: s.forwards), bootstrap
    )
    ratio_to_plain, ratio_interval = ratio(samples, plain, bootstrap)
    ratio_to_hf, hf_interval = ratio(samples, hf, bootstrap)
    scored = [s.right for s in samples if s.right is not None]
    row: Row = {
        "name": arm.name,
        "method": drafters[arm.drafter].method if arm.drafter else "plain",
        "decode": {"plain": "plain", "width": "plain", "hf": "transformers generate", "draft": "speculate"}[arm.kind],
        "drafter": arm.drafter,
        "verifier": ", ".join(rules) or None,
        "verifier_settings": {name: getattr(arm.decode, name) for rule in rules for name in VERIFIERS[rule].settings},
        "draft_length": arm.decode.k if draft else 0,
        "tree": arm.decode.tree if draft else None,
        "width": arm.decode.fixed_width if arm.kind == "width" else None,
        "temperature": arm.temperature,
        "dtype": target.precision,
        "step": None if arm.kind == "hf" else ", ".join(sorted({s.step for s in samples})),
        "prompts": len({s.prompt for s in samples}),
        "answers": len(samples),
        "tokens": sum(len(s.ids) for s in samples),
        **acceptance(samples, bootstrap),
        "tokens_per_second": tokens_per_second,
        "tokens_per_second_interval": speed_interval,
        "ratio_to_plain": ratio_to_plain,
        "ratio_to_plain_interval": ratio_interval,
        "ratio_to_hf": ratio_to_hf,
        "ratio_to_hf_interval": hf_interval,
        "tokens_per_forward": tokens_per_forward,
        "seconds_per_pass": {} if arm.kind == "hf" else split_per_pass(samples),
        "quality": sum(scored) / len(scored) if scored else None,
        "lossless": "exact" if lossless else "no",
        "categories": by_category(samples, plain, bootstrap) if draft else {},
        "by_prompt": by_prompt(samples),
        **_identity(target, drafters, cfg, arm, samples, plain, width, questions, lossless),
    }
    if row["red"]:
        for name in ("tokens_per_second", "ratio_to_plain", "ratio_to_hf"):
            row[name] = row[f"{name}_interval"] = None
        for figures in row["by_prompt"].values():
            figures["seconds"] = None
    return row


def _identity(
    target: Target,
    drafters: dict[str, Any],
    cfg: EvaluateConfig,
    arm: Arm,
    samples: Sequence[Sample],
    plain: Sequence[Sample],
    width: Sequence[Sample],
    questions: dict[tuple[str, int], list[int]],
    lossless: bool,
) -> Row:
    """Greedy answers against plain decoding: by id at the same width (padded chains), tie-aware otherwise.

    Returns `identical_to_plain` (None = not compared), counts, first divergences from unpadded plain decoding with the
    logit gap there, and `red`: why a row that should be lossless is not (None = it is, or it need not be).
    """
    found: Row = {
        "identical_to_plain": None,
        "identical_prompts": 0,
        "checked_prompts": 0,
        "differ_from_unpadded": None,
        "divergences": [],
        "red": None,
    }
    if arm.temperature > 0 or arm.kind == "plain":
        return found
    padded = arm.kind == "draft" and arm.decode.fixed_width is not None
    references = {(s.prompt, s.turn): s.ids for s in (width if padded else plain)}
    pairs = [(s, references[s.prompt, s.turn]) for s in samples if (s.prompt, s.turn) in references]
    differing = [s for s, ids in pairs if s.ids != ids]
    found["checked_prompts"], found["identical_prompts"] = len(pairs), len(pairs) - len(differing)
    found["identical_to_plain"] = not differing if pairs else None
    if arm.kind == "draft":
        unpadded = {(s.prompt, s.turn): s.ids for s in plain}
        compared = [s for s in samples if s.ids != unpadded[s.prompt, s.turn]]
        rows = pass_rows(target, drafters.get(arm.drafter or ""), arm.decode)
        found["differ_from_unpadded"] = len(compared)
        for sample in compared if lossless and not padded else compared[:SHOWN_DIVERGENCES]:
            key = sample.prompt, sample.turn
            other = parting(target, questions[key], unpadded[key], sample.ids, rows)
            assert other is not None
            found["divergences"].append({"prompt": sample.prompt, **other.row()})
        if lossless and padded and differing:
            found["red"] = f"{len(differing)} of {len(pairs)} answers differ from plain decoding at the same width"
        elif lossless and not all(other["excused"] for other in found["divergences"]):
            wrong = sum(not other["excused"] for other in found["divergences"])
            found["red"] = f"{wrong} of {len(samples)} answers differ from plain decoding without a near-tie"
    return found


def flags_of(drafts: Sequence[Row]) -> list[str]:
    """What a reader must not overlook: slower than plain, lossy, unchecked."""
    flags = []
    for row in drafts:
        if row["ratio_to_plain"] is not None and row["ratio_to_plain"] < 1:
            flags.append(
                f"{row['name']} is slower than plain decoding ({row['ratio_to_plain']:.2f} x) although tau is "
                f"{row['tau']:.2f}: a pass costs more than it commits"
            )
        if row["lossless"] == "no":
            settings = ", ".join(f"{name}={value:g}" for name, value in row["verifier_settings"].items())
            flags.append(
                f"{row['name']} uses the rule {row['verifier']!r} ({settings}), which changes the target's distribution"
            )
    return flags


def examples_of(target: Target, prompts: Sequence[Prompt], samples: Sequence[Sample], count: int = 6) -> list[Row]:
    """Some answers, cut into pieces by where the tokens came from."""
    first = {s.prompt: s for s in samples if s.turn == 0}
    chosen = [prompt for prompt in prompts if prompt.id in first][:count]
    return [
        {
            "prompt": prompt.id,
            "category": prompt.category,
            "question": prompt.messages[-1]["content"],
            "pieces": pieces(target.tokenizer, first[prompt.id].ids, first[prompt.id].drafted_ids),
        }
        for prompt in chosen
    ]
