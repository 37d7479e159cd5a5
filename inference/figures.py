"""Figures of an evaluation: rates, intervals, table rows, alarms. Pure functions over samples; no model, no clock.

Definitions are in `DEFINITIONS` and are printed with every report, because the same words mean other things elsewhere
(mean over prompts or pooled, own token counted or not, conditional or not). Bootstrap over prompts: Efron 1979,
percentile interval; a prompt's turns stay together.

    pytest tests/test_evaluate.py
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

Row = dict[str, Any]

DEFINITIONS = {
    "tau": "tokens committed by verification (the target's own token counted, nothing after a stop) / verify passes, "
    "pooled over all passes of all prompts; plain decoding is 1.00. The prefill's token is in neither",
    "tau_macro": "mean over prompts of each prompt's tau",
    "K": "draft_length: tokens drafted per pass, root excluded (depth of a tree)",
    "alpha": "conditional acceptance by depth: passes that accept depth d / passes that accepted depth d - 1 and had a "
    "candidate at depth d",
    "alpha_unconditional": "passes that accept depth d / all verify passes",
    "alpha_by_rank": "of the passes counted in alpha, the share whose accepted token was the drafter's choice number r",
    "tokens_per_second": "tokens of the answers (counted from ids) / wall seconds of the whole call, prefill included",
    "ratio": "ratio of pooled tokens per second over the prompts both ran, in one interleaved run",
    "tokens_per_forward": "tokens of the answers / target-sized forward passes, prefill included",
    "interval": "95 %, percentile bootstrap over prompts",
    "lossless": "exact = the verifier keeps the target's distribution; model = the model itself was changed; "
    "no = it does not",
    "identical_to_plain": "greedy: every checked answer has the ids of plain decoding, at the same verification width "
    "(chains) or unpadded (trees and training-free drafters, which may differ at near-ties: top-2 logit gap below 4 x "
    "what the widths differ by)",
}

CAUSES = (
    "features: other taps, or another norm, in serving than in training (`draftsmith check EXPORT` replays them)",
    "target: another revision, dtype or quantisation than the one the head was distilled from",
    "text: another chat template, system prompt or tokenizer than in training",
    "vocabulary: the draft vocabulary's mapping is wrong, or it covers too few of the tokens of these prompts",
    "positions: prompts longer than the training length, or other RoPE settings",
    "data: too few training tokens, or answers that the target itself did not write",
)


@dataclass
class Sample:
    """One answer of one arm. Lists by depth start at depth 1."""

    prompt: str
    turn: int
    category: str
    arm: str
    ids: list[int]
    seconds: float  # wall, the whole call
    prompt_tokens: int = 0
    prefill_tokens: int = 0  # tokens of `ids` that no verify pass committed
    verifies: int = 0
    forwards: int = 0  # target-sized passes, prefill included
    reached: list[int] = field(default_factory=list)  # depth d - 1 accepted and a candidate at d
    accepted: list[int] = field(default_factory=list)
    ranks: list[list[int]] = field(default_factory=list)  # [depth][rank] accepted
    split: dict[str, float] = field(default_factory=dict)  # seconds: prefill, draft, verify, commit
    drafted_ids: list[bool] = field(default_factory=list)  # per id: did it come from the draft
    rule: str = "plain"  # the verifier that was used
    step: str = "host"  # where steps ran
    right: bool | None = None  # for scored suites

    @property
    def verified_tokens(self) -> int:
        return len(self.ids) - self.prefill_tokens


class Bootstrap:
    """Resampling weights over prompts, shared by all figures of a report so that they move together."""

    def __init__(self, prompts: Sequence[str], draws: int, seed: int):
        self.index = {prompt: i for i, prompt in enumerate(prompts)}
        n = len(prompts)
        self.weights = np.random.default_rng(seed).multinomial(n, np.full(n, 1 / n), size=draws)

    def sums(self, samples: Sequence[Sample], value: Callable[[Sample], float]) -> np.ndarray:
        """Sum of `value` per prompt, in the order of the prompts."""
        total = np.zeros(len(self.index))
        for sample in samples:
            total[self.index[sample.prompt]] += value(sample)
        return total

    def interval(self, figure: Callable[[np.ndarray], np.ndarray]) -> list[float] | None:
        """95 % interval of `figure(weights [draws, prompts]) -> [draws]`; None with fewer than two prompts."""
        if len(self.index) < 2:
            return None
        with np.errstate(divide="ignore", invalid="ignore"):
            values = figure(self.weights)
        values = values[np.isfinite(values)]
        return [float(q) for q in np.quantile(values, [0.025, 0.975])] if len(values) else None


def rate(top: np.ndarray, bottom: np.ndarray, bootstrap: Bootstrap) -> tuple[float | None, list[float] | None]:
    """Pooled `sum(top) / sum(bottom)` over prompts and its interval; (None, None) where nothing was counted."""
    if not bottom.sum():
        return None, None
    return float(top.sum() / bottom.sum()), bootstrap.interval(lambda w: (w @ top) / (w @ bottom))


def acceptance(samples: Sequence[Sample], bootstrap: Bootstrap) -> Row:
    """Pooled and macro tau, acceptance by depth and rank with counts."""
    passes = bootstrap.sums(samples, lambda s: s.verifies)
    tokens = bootstrap.sums(samples, lambda s: s.verified_tokens)
    tau, tau_interval = rate(tokens, passes, bootstrap)
    seen = passes > 0
    macro = np.divide(tokens, passes, out=np.zeros_like(tokens), where=seen)
    figures: Row = {
        "tau": tau,
        "tau_interval": tau_interval,
        "tau_macro": float(macro[seen].mean()) if seen.any() else None,
        "tau_macro_interval": bootstrap.interval(lambda w: (w @ macro) / (w @ seen.astype(float))),
        "verifications": int(passes.sum()),
        "alpha": [],
        "alpha_interval": [],
        "alpha_counts": [],
        "alpha_unconditional": [],
        "alpha_by_rank": [],
    }
    for depth in range(max((len(s.reached) for s in samples), default=0)):
        for name, value in _at_depth(samples, depth, passes, bootstrap).items():
            figures[name].append(value)
    return figures


def _at_depth(samples: Sequence[Sample], depth: int, passes: np.ndarray, bootstrap: Bootstrap) -> Row:
    """Acceptance at one depth (0 = depth 1)."""
    deep = [s for s in samples if depth < len(s.reached)]
    reached = bootstrap.sums(deep, lambda s: s.reached[depth])
    accepted = bootstrap.sums(deep, lambda s: s.accepted[depth])
    alpha, interval = rate(accepted, reached, bootstrap)
    ranks = [s.ranks[depth] for s in deep if depth < len(s.ranks)]
    by_rank = [sum(r[i] for r in ranks if i < len(r)) for i in range(max(map(len, ranks), default=0))]
    offered = int(reached.sum())
    return {
        "alpha": alpha,
        "alpha_interval": interval,
        "alpha_counts": [int(accepted.sum()), offered],
        "alpha_unconditional": rate(accepted, passes, bootstrap)[0],
        "alpha_by_rank": [count / offered for count in by_rank] if offered else [],
    }


def speed(samples: Sequence[Sample], bootstrap: Bootstrap) -> tuple[float | None, list[float] | None]:
    """Pooled tokens per second and its interval."""
    tokens = bootstrap.sums(samples, lambda s: len(s.ids))
    return rate(tokens, bootstrap.sums(samples, lambda s: s.seconds), bootstrap)


def ratio(
    samples: Sequence[Sample], reference: Sequence[Sample], bootstrap: Bootstrap
) -> tuple[float | None, list[float] | None]:
    """Tokens per second over the reference's, each pooled over the (prompt, turn) pairs that both answered."""
    common = {(s.prompt, s.turn) for s in samples} & {(s.prompt, s.turn) for s in reference}
    if not common:
        return None, None
    ours = [s for s in samples if (s.prompt, s.turn) in common]
    theirs = [s for s in reference if (s.prompt, s.turn) in common]
    a, s = bootstrap.sums(ours, lambda x: len(x.ids)), bootstrap.sums(ours, lambda x: x.seconds)
    b, t = bootstrap.sums(theirs, lambda x: len(x.ids)), bootstrap.sums(theirs, lambda x: x.seconds)
    if not (s.sum() and b.sum()):
        return None, None
    value = (a.sum() / s.sum()) / (b.sum() / t.sum())
    return float(value), bootstrap.interval(lambda w: ((w @ a) / (w @ s)) / ((w @ b) / (w @ t)))


def by_category(samples: Sequence[Sample], reference: Sequence[Sample], bootstrap: Bootstrap) -> dict[str, Row]:
    """tau, first-depth acceptance and ratio to the reference for each category."""
    table = {}
    for category in dict.fromkeys(s.category for s in samples):
        chosen = [s for s in samples if s.category == category]
        names = dict.fromkeys(s.prompt for s in chosen)
        own = Bootstrap(list(names), len(bootstrap.weights), seed=0)
        figures = acceptance(chosen, own)
        others = [s for s in reference if s.category == category]
        table[category] = {
            "prompts": len(names),
            "tau": figures["tau"],
            "tau_interval": figures["tau_interval"],
            "alpha": figures["alpha"],
            "ratio_to_plain": ratio(chosen, others, own)[0],
        }
    return table


def by_prompt(samples: Sequence[Sample]) -> dict[str, Row]:
    """What pooled figures are made of, prompt by prompt: rows of one report can be compared pair by pair."""
    table: dict[str, Row] = {}
    for s in samples:
        row = table.setdefault(s.prompt, {"tokens": 0, "seconds": 0.0, "verified_tokens": 0, "verifications": 0})
        row["tokens"] += len(s.ids)
        row["seconds"] += s.seconds
        row["verified_tokens"] += s.verified_tokens
        row["verifications"] += s.verifies
    return table


def split_per_pass(samples: Sequence[Sample]) -> dict[str, float]:
    """Seconds per verify pass spent in draft, verify and commit; prefill per answer; `other` = the rest per pass."""
    passes = max(1, sum(s.verifies for s in samples))
    totals = {part: sum(s.split.get(part, 0.0) for s in samples) for part in ("prefill", "draft", "verify", "commit")}
    other = sum(s.seconds for s in samples) - sum(totals.values())
    per_pass = {part: totals[part] / passes for part in ("draft", "verify", "commit")}
    return {**per_pass, "other": max(0.0, other) / passes, "prefill": totals["prefill"] / max(1, len(samples))}


def expected_tau(alpha: Sequence[float | None], depth: int) -> float:
    """1 + sum over j <= depth of the product of alpha up to j; beyond the measured depths the last one goes on."""
    known = [a for a in alpha if a is not None]
    run, total = 1.0, 1.0
    for j in range(depth if known else 0):
        run *= known[min(j, len(known) - 1)]
        total += run
    return total


def alarms(row: Row, estimated: Row | None, trained: bool = True) -> list[str]:
    """Why a draft row is suspicious: tau under 1.1, or under 70 % of what training estimated for the same depth. What a
    training-free drafter finds depends on the text: nothing is suspicious there."""
    if row["tau"] is None or not row["draft_length"] or not trained:
        return []
    found = []
    if row["tau"] < 1.1:
        found.append(f"{row['name']}: tau {row['tau']:.2f} is under 1.1, almost nothing is accepted")
    expected = _estimated_tau(estimated, row["draft_length"])
    if expected and row["temperature"] == 0 and row["tau"] < 0.7 * expected:
        found.append(f"{row['name']}: tau {row['tau']:.2f} is under 70 % of the {expected:.2f} that training estimated")
    return found


def _estimated_tau(estimated: Row | None, depth: int) -> float | None:
    if not estimated:
        return None
    if estimated.get("k") == depth and estimated.get("tau"):
        return float(estimated["tau"])
    return expected_tau(estimated["alpha"], depth) if estimated.get("alpha") else None


def limits(
    row: Row, rows: Sequence[Row], plain_step: float, estimated: Row | None, trained: bool = True
) -> tuple[str, dict[str, float]]:
    """What limits the best draft row, as the lever whose plausible gain in speed is the largest.

    Speed over plain decoding is S = tau / (c_v + c_d + c_o): cost of verify, draft and the rest per pass, in plain
    steps. Levers: *data* (ten points more acceptance at each depth), *alignment* (tau as training estimated),
    *K* (the best depth up to 8, by the measured acceptance and the costs' growth between measured K), *draft cost*
    (half of c_d). A row that raised an alarm is limited by alignment, whatever its costs. The first two are levers of
    trained drafters alone.

    Returns:
        A sentence, and the gain of each lever (0.1 = 10 % faster).
    """
    per_pass, k = row["seconds_per_pass"], row["draft_length"]
    verify, draft = per_pass["verify"] / plain_step, per_pass["draft"] / plain_step
    rest = (per_pass["commit"] + per_pass["other"]) / plain_step
    cost = verify + draft + rest
    alpha = [a for a in row["alpha"] if a is not None]
    raised = [min(0.98, a + 0.1) for a in alpha]
    gains = {
        "data": expected_tau(raised, k) / expected_tau(alpha, k) - 1,
        "alignment": max(0.0, (_estimated_tau(estimated, k) or row["tau"]) / row["tau"] - 1),
        "K": 0.0,
        "draft cost": cost / (cost - draft / 2) - 1,
    }
    chains = [
        r for r in rows if r["tree"] == row["tree"] and r["temperature"] == row["temperature"] and r["draft_length"]
    ]
    slope = draft / k + _verify_slope(chains, plain_step)
    here = expected_tau(alpha, k) / cost
    best_k = max(range(1, 9), key=lambda j: expected_tau(alpha, j) / (cost + slope * (j - k)))
    gains["K"] = max(0.0, expected_tau(alpha, best_k) / (cost + slope * (best_k - k)) / here - 1)
    if not trained:
        gains = {lever: gains[lever] for lever in ("K", "draft cost")}
    first = f"{alpha[0]:.2f}" if alpha else "nothing"
    advice = {
        "data": f"acceptance itself: {first} at depth 1; more or closer training data, or longer training. "
        f"Weakest category: {_weakest(row)}",
        "alignment": f"serving accepts less than a trained head should (tau {row['tau']:.2f}); see the usual causes",
        "K": f"K = {best_k} should be faster than K = {k}; evaluate it",
        "draft cost": f"drafting takes {draft:.2f} of a plain step ({draft / cost:.0%} of a pass); "
        "a smaller draft vocabulary or fewer sequential steps",
    }
    worst = "alignment" if alarms(row, estimated, trained) else max(gains, key=lambda lever: gains[lever])
    listed = ", ".join(f"{lever} +{gain:.0%}" for lever, gain in gains.items())
    costs = f"tau {row['tau']:.2f} / (verify {verify:.2f} + draft {draft:.2f} + rest {rest:.2f} plain steps)"
    return f"{worst} - {advice[worst]} [{costs}; speed to gain: {listed}]", gains


def _verify_slope(rows: Sequence[Row], plain_step: float) -> float:
    """Growth of the verify cost per drafted token, in plain steps: least squares over the measured K, never negative."""
    points = {r["draft_length"]: r["seconds_per_pass"]["verify"] / plain_step for r in rows}
    if len(points) < 2:
        return max(0.0, (next(iter(points.values())) - 1) / next(iter(points))) if points else 0.0
    return max(0.0, float(np.polyfit(list(points), list(points.values()), 1)[0]))


def _weakest(row: Row) -> str:
    known = {name: figures["tau"] for name, figures in row["categories"].items() if figures["tau"]}
    if not known:
        return "unknown"
    name = min(known, key=lambda n: known[n])
    return f"{name} (tau {known[name]:.2f})"
