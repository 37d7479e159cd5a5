"""Figures of diffusion decoding: tokens per forward with its counting rule, accuracy against parallelism, retention.

Pure functions over finished answers; no model, no clock. The rule of counting is in `COUNTING`, and is printed with every
table, because papers differ on each of its parts. Area under the curve: AUP of d3LLM (arXiv:2601.07568), in our words.

    pytest tests/test_diffusion_figures.py
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np

from .figures import Bootstrap
from .report import COLOURS, new_axes, safe_label

Row = dict[str, Any]

COUNTING = {
    "tokens": "of the answers, each up to its end, which counts; what is decoded behind it does not",
    "forwards": "denoising passes; one that tries n branches at once counts n times, verification counts as well; the pass "
    "over the prompt does not count",
    "kv_passes": "passes that only write the keys and values of a finished block: listed apart, and added in "
    "tokens_per_pass",
    "tokens_per_forward": "tokens / forwards, each summed over all answers; autoregression has 1 by definition (the pass "
    "over its prompt gives the first token)",
    "accuracy": "share of the answers that are right, by a checker where many are",
    "aup": "area under accuracy (in %) over tokens per forward: the rectangle up to the slowest setting, then trapezoids, "
    "every accuracy y weighted by exp(3 (y / best - 1)); settings over 5 points below the slowest one are left out",
    "retained": "of the answers that the base gets right, the share that is still right",
    "interval": "95 %, percentile bootstrap over prompts",
}

PENALTY, LOWEST = 3.0, 5.0  # of AUP: alpha, and the points of accuracy that may be lost (2601.07568)


@dataclass(frozen=True)
class Decoded:
    """One answer, cut behind its end: what it cost, and whether it is right (None = not scored)."""

    prompt: str
    category: str
    ids: tuple[int, ...]
    forwards: int
    kv_passes: int = 0
    right: bool | None = None


def cut(ids: Sequence[int], ends: Sequence[int]) -> tuple[int, ...]:
    """`ids` up to the first of `ends`, which stays."""
    at = next((i for i, token in enumerate(ids) if token in ends), len(ids))
    return tuple(ids[: at + 1])


def row_of(name: str, answers: Sequence[Decoded], *, draws: int = 1000, seed: int = 0) -> Row:
    """One table row: tokens, forwards, tokens per forward and accuracy with intervals, and the same by category.

    Raises ValueError without answers.
    """
    if not answers:
        raise ValueError(f"{name}: no answers to count")
    bootstrap = Bootstrap(list(dict.fromkeys(a.prompt for a in answers)), draws, seed)
    row: Row = {"name": name, "answers": len(answers), **_counts(answers)}
    tokens, forwards = _sums(bootstrap, answers, lambda a: len(a.ids)), _sums(bootstrap, answers, lambda a: a.forwards)
    row["tokens_per_forward_interval"] = bootstrap.interval(lambda w: (w @ tokens) / (w @ forwards))
    scored = [a for a in answers if a.right is not None]
    right, all_of = _sums(bootstrap, scored, lambda a: bool(a.right)), _sums(bootstrap, scored, lambda a: 1)
    row["accuracy_interval"] = bootstrap.interval(lambda w: (w @ right) / (w @ all_of)) if scored else None
    categories = dict.fromkeys(a.category for a in answers)
    row["categories"] = {c: _counts([a for a in answers if a.category == c]) for c in categories}
    return row


def _counts(answers: Sequence[Decoded]) -> Row:
    tokens, forwards = sum(len(a.ids) for a in answers), sum(a.forwards for a in answers)
    kv_passes = sum(a.kv_passes for a in answers)
    scored = [a.right for a in answers if a.right is not None]
    return {
        "tokens": tokens,
        "forwards": forwards,
        "kv_passes": kv_passes,
        "tokens_per_forward": tokens / forwards if forwards else None,
        "tokens_per_pass": tokens / (forwards + kv_passes) if forwards + kv_passes else None,
        "accuracy": sum(scored) / len(scored) if scored else None,
    }


def _sums(bootstrap: Bootstrap, answers: Sequence[Decoded], value: Callable[[Decoded], float]) -> np.ndarray:
    total = np.zeros(len(bootstrap.index))
    for answer in answers:
        total[bootstrap.index[answer.prompt]] += value(answer)
    return total


def fastest(rows: Sequence[Row], at_least: float, category: str | None = None) -> Row | None:
    """The row with the most tokens per forward among those of this accuracy or better (of one category, if named)."""

    def of(row: Row) -> Row:
        return row if category is None else row["categories"].get(category, {})

    good = [
        row
        for row in rows
        if (of(row).get("accuracy") or 0) >= at_least and of(row).get("tokens_per_forward") is not None
    ]
    return max(good, key=lambda row: of(row)["tokens_per_forward"], default=None)


def area(points: Sequence[tuple[float, float]], best: float | None = None) -> float:
    """AUP of (tokens per forward, accuracy in [0, 1]) pairs, one per setting of one way of decoding.

    `best`: the accuracy that is not penalised, the best of all that are compared (default: of these points). Of settings
    with equal tokens per forward the most accurate one counts. Raises ValueError without points, or for one outside.
    """
    if not points or any(not (x > 0 and 0 <= y <= 1) for x, y in points):
        raise ValueError(f"area: points {list(points)}: give (tokens per forward > 0, accuracy in [0, 1]) pairs")
    at: dict[float, float] = {}
    for x, y in points:
        at[x] = max(100 * y, at.get(x, 0.0))
    curve = sorted(at.items())
    curve = [(x, y) for x, y in curve if y >= curve[0][1] - LOWEST]
    highest = max(y for _, y in curve) if best is None else 100 * best
    if highest == 0:
        return 0.0
    weighted = [(x, y * min(1.0, math.exp(PENALTY * (y / highest - 1)))) for x, y in curve]
    steps = pairwise(weighted)
    first = curve[0][0] * curve[0][1]
    return first + sum((x1 - x0) * (y0 + y1) / 2 for (x0, y0), (x1, y1) in steps)


def retention(base: Sequence[Decoded], other: Sequence[Decoded], *, draws: int = 1000, seed: int = 0) -> Row:
    """What is left of the base's skills, on the prompts that both answered: accuracies, their difference with its
    interval (the same prompts drawn for both), and the share of the base's right answers that are still right.

    Raises ValueError where nothing was scored by both.
    """
    of_base = {a.prompt: a.right for a in base if a.right is not None}
    of_other = {a.prompt: a.right for a in other if a.right is not None}
    prompts = [prompt for prompt in of_base if prompt in of_other]
    if not prompts:
        raise ValueError("retention: the two have no scored prompt in common")
    before = np.array([float(bool(of_base[p])) for p in prompts])
    after = np.array([float(bool(of_other[p])) for p in prompts])
    n = len(prompts)
    interval = Bootstrap(prompts, draws, seed).interval(lambda w: (w @ (after - before)) / n)
    return {
        "prompts": n,
        "base_accuracy": float(before.mean()),
        "accuracy": float(after.mean()),
        "difference": float((after - before).mean()),
        "difference_interval": interval,
        "retained": float((before * after).sum() / before.sum()) if before.sum() else None,
    }


def plot_curves(curves: Mapping[str, Sequence[tuple[float, float]]], path: Path, bound: float | None = None) -> None:
    """Accuracy (in %) over tokens per forward, a line per way of decoding, as an SVG file; `bound` is drawn as a line."""
    figure, axes = new_axes("tokens per forward", "right answers, %")
    for i, (name, points) in enumerate(curves.items()):
        xs, ys = zip(*sorted(points), strict=True)
        axes.plot(xs, [100 * y for y in ys], marker="o", color=COLOURS[i % len(COLOURS)], label=safe_label(name))
    if bound is not None:
        axes.axhline(100 * bound, color="#888888", linewidth=0.8, linestyle="--")
    if curves:
        axes.legend(frameon=False)
    save_figure(figure, path)


def plot_training(series: Mapping[str, Sequence[tuple[float, float]]], path: Path, x: str, y: str) -> None:
    """Figures over the course of a training, a line each, as an SVG file."""
    figure, axes = new_axes(x, y)
    for i, (name, points) in enumerate(series.items()):
        xs, ys = zip(*points, strict=True)
        axes.plot(xs, ys, marker="o", color=COLOURS[i % len(COLOURS)], label=safe_label(name))
    axes.legend(frameon=False)
    save_figure(figure, path)


def save_figure(figure: Any, path: Path) -> None:
    """The figure as a file of the kind that its name says (SVG without one); equal figures give equal SVG files."""
    import matplotlib

    path.parent.mkdir(parents=True, exist_ok=True)
    with matplotlib.rc_context({"svg.hashsalt": path.stem}):
        figure.savefig(
            path, format=path.suffix[1:] or "svg", metadata={"Date": None} if path.suffix == ".svg" else None
        )
