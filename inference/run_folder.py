"""A run folder as it stands, whoever wrote it and whether it is done: `metrics.jsonl` and `run.yaml`. Part of
inference/run_report.py. Test: pytest tests/test_run_report.py
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from .card import scrub, scrub_values

Line = dict[str, Any]
KINDS = ("train", "heldout", "probe", "skip", "note")


@dataclass(frozen=True)
class Run:
    """What a run has written. `lines`: per kind, by step; `facts`: run.yaml; `gaps`: what is missing or cannot be read."""

    name: str
    state: str
    lines: Mapping[str, list[Line]]
    facts: Mapping[str, Any]
    gaps: list[str] = field(default_factory=list)

    def series(self, kind: str, figure: str) -> tuple[list[int], list[float]]:
        """(steps, values) of a figure, where it is a finite number."""
        found = [(line["step"], value) for line in self.lines[kind] if (value := finite(line.get(figure))) is not None]
        return [step for step, _ in found], [value for _, value in found]

    def last(self, kind: str, figure: str) -> float | None:
        values = self.series(kind, figure)[1]
        return values[-1] if values else None

    @property
    def settings(self) -> dict[str, Any]:
        """Dotted key -> value of the recipe as it was resolved."""
        return flat(self.facts.get("config") or {})


def read_run(folder: Path) -> Run:
    """Raises ValueError for a folder that is no run's."""
    metrics, about = folder / "metrics.jsonl", folder / "run.yaml"
    if not metrics.is_file() and not about.is_file():
        raise ValueError(f"{folder} holds no metrics.jsonl and no run.yaml: name the `run` folder of a training")
    gaps: list[str] = []
    lines = _read_lines(metrics, gaps)
    facts: Any = {}
    try:
        facts = yaml.safe_load(about.read_text(encoding="utf-8"))
    except FileNotFoundError:
        gaps.append("no run.yaml: settings and versions are not known")
    except (yaml.YAMLError, UnicodeDecodeError):
        gaps.append("run.yaml cannot be read")
    if not isinstance(facts, dict):
        facts = {}
    return Run(scrub(folder.resolve().name), _state(folder), lines, scrub_values(facts), gaps)


def _read_lines(path: Path, gaps: list[str]) -> dict[str, list[Line]]:
    """Lines by kind. What a kill cut off is counted; of a step that stands twice the later line counts."""
    by_kind: dict[str, dict[Any, Line]] = {kind: {} for kind in KINDS}
    torn = 0
    if path.is_file():
        with path.open(encoding="utf-8", errors="replace") as file:
            for number, text in enumerate(file):
                try:
                    line = json.loads(text)
                    kind, step = line["kind"], line["step"]
                    known = kind in by_kind and isinstance(step, int)
                except (ValueError, KeyError, TypeError, RecursionError):
                    known = False
                if known:
                    single = kind not in ("skip", "note")
                    by_kind[kind][step if single else number] = scrub_values(line) if not single else line
                else:
                    torn += 1
    else:
        gaps.append("no metrics.jsonl yet: no step was logged")
    if torn:
        gaps.append(f"{torn} lines of metrics.jsonl cannot be read (cut off by a kill?)")
    return {kind: sorted(lines.values(), key=lambda line: line["step"]) for kind, lines in by_kind.items()}


def _state(folder: Path) -> str:
    """By the lock that a launch holds on its folder, and the export that the end leaves."""
    with contextlib.suppress(OSError), (folder / ".lock").open(encoding="utf-8") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            return "running"
    return "finished" if (folder / "export").is_dir() else "no export: stopped, died, or running elsewhere"


def finite(value: Any) -> float | None:
    """A number that can be drawn. Lines hold `nan` and `inf` as texts."""
    usable = isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)
    return float(value) if usable else None


def flat(value: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Dotted key -> plain value of nested mappings."""
    found: dict[str, Any] = {}
    for key, inner in value.items():
        if isinstance(inner, Mapping):
            found |= flat(inner, f"{prefix}{key}.")
        else:
            found[f"{prefix}{key}"] = inner
    return found
