"""An evaluation under way: the samples that an interrupted run goes on from, and progress. Part of inference/evaluate.py.

Test: pytest tests/test_evaluate.py
"""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from dataclasses import asdict, replace
from hashlib import sha256
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from .. import __version__
from ..models.target import Target
from .evaluate_config import Arm, EvaluateConfig
from .figures import Sample
from .report import visible
from .suites import Prompt


def fingerprint(
    target: Target, drafters: dict[str, Any], prompts: Sequence[Prompt], cfg: EvaluateConfig, arms: Sequence[Arm]
) -> str:
    """Changes with anything that a sample depends on: settings, target, weights of the drafters, prompts, code."""
    settings = asdict(replace(cfg, out="", json=None, html=None, bootstrap=1))
    digest = sha256(
        json.dumps(
            [settings, [asdict(arm) for arm in arms], target.facts.fingerprint, __version__, torch.__version__]
        ).encode()
    )
    digest.update(json.dumps([asdict(prompt) for prompt in prompts]).encode())
    for name, drafter in drafters.items():
        weights = {} if hasattr(drafter, "propose") else drafter.state_dict()
        for key, tensor in weights.items():
            digest.update(f"{name}/{key}".encode())
            digest.update(tensor.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()


class Partial:
    """Samples of a run, one JSON line each behind a fingerprint; read back when the same run starts again."""

    def __init__(self, path: Path, fingerprint: str):
        self.done: dict[tuple[str, int, str], Sample] = {}
        lines = path.read_text(encoding="utf-8").splitlines() if path.exists() else []
        same = bool(lines) and lines[0] == json.dumps({"fingerprint": fingerprint})
        for line in lines[1:] if same else []:
            try:
                sample = Sample(**json.loads(line))
            except (json.JSONDecodeError, TypeError):
                break  # the line that was being written when the run stopped
            self.done[sample.prompt, sample.turn, sample.arm] = sample
        path.parent.mkdir(parents=True, exist_ok=True)
        self._file = path.open("w", encoding="utf-8")
        for line in (json.dumps({"fingerprint": fingerprint}), *map(_line, self.done.values())):
            self._file.write(line + "\n")
        self._file.flush()

    def add(self, sample: Sample) -> None:
        self.done[sample.prompt, sample.turn, sample.arm] = sample
        self._file.write(_line(sample) + "\n")
        self._file.flush()


class Bar:
    """Progress with rate and time left: a bar on a terminal, a line every half minute elsewhere."""

    def __init__(self, total: int, console: Console):
        columns = (
            TextColumn("evaluate"),
            BarColumn(),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            TimeRemainingColumn(),
        )
        self.progress = Progress(*columns, TextColumn("{task.fields[rate]}"), console=console)
        self.task = self.progress.add_task("", total=total, rate="")
        self.console, self.said = console, time.monotonic()

    def __enter__(self) -> Bar:
        if self.console.is_terminal:
            self.progress.start()
        return self

    def __exit__(self, *failure: object) -> None:
        self.progress.stop()

    def advance(self, sample: Sample) -> None:
        rate = f"{len(sample.ids) / sample.seconds:.1f} tok/s, {sample.arm}" if sample.seconds else sample.arm
        self.progress.update(self.task, advance=1, rate=rate)
        if not self.console.is_terminal and time.monotonic() - self.said > 30:
            task, self.said = self.progress.tasks[0], time.monotonic()
            left = "" if task.time_remaining is None else f", about {task.time_remaining / 60:.0f} min left"
            self.console.print(visible(f"evaluate {task.completed:.0f}/{task.total:.0f}{left} ({rate})"))


def _line(sample: Sample) -> str:
    return json.dumps(asdict(sample))
