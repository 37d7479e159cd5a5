"""Where a run's numbers go: `metrics.jsonl` always, a progress bar, and wandb or TensorBoard by choice.

A line of `metrics.jsonl` is one JSON object with `kind` (train, heldout, probe, skip, note), `step`, and its figures.
After a resume, lines beyond the checkpoint's step are dropped, so that every step and every skip appears once. Trackers get
the numbers under the names of the table in train/README.md, the same for every script; a run that goes on is the same wandb
run. `draftsmith report RUN` makes a page of it (inference/run_report.py). Tests: `pytest tests/test_train.py`.
"""

from __future__ import annotations

import json
import math
import secrets
import sys
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from types import TracebackType
from typing import Any

from accelerate import Accelerator
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

from ..configs.parse import flatten
from ..configs.runs import RunConfig
from ..data.places import write_atomically
from ..inference.card import scrub_values


class RunLog:
    """The log of one launch; a context manager. Only the main process writes."""

    def __init__(self, folder: Path, config: RunConfig, accelerator: Accelerator, step: int, skipped: int = 0) -> None:
        self.main = accelerator.is_main_process
        self.accelerator = accelerator
        self.path = folder / "metrics.jsonl"
        self.console = Console(file=sys.stderr, soft_wrap=True)
        self.bar: Progress | None = None
        if self.main:
            _drop_beyond(self.path, step, skipped)
            if config.log.trackers:
                start_trackers(folder, config, accelerator)
            if config.log.progress and self.console.is_terminal:
                columns = (TextColumn("{task.description}"), BarColumn(), TextColumn("{task.fields[facts]}"))
                self.bar = Progress(*columns, TimeElapsedColumn(), console=self.console)
                self.task = self.bar.add_task(config.method, total=1.0, facts="")
        self.trackers = bool(config.log.trackers)

    def __enter__(self) -> RunLog:
        if self.bar:
            self.bar.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self.bar:
            self.bar.stop()
        if self.main and self.trackers:
            self.accelerator.end_training()

    def write(self, kind: str, step: int, figures: Mapping[str, Any], say: str | None = None) -> None:
        """Append one line; `say` also goes to the terminal."""
        if not self.main:
            return
        line = {"kind": kind, "step": step} | {k: _finite(v) for k, v in figures.items()}
        with self.path.open("a") as file:
            file.write(json.dumps(line) + "\n")
        if self.trackers:
            numbers = {tracked(kind, k): v for k, v in figures.items() if isinstance(v, (int, float))}
            self.accelerator.log(numbers, step=step)
        if say:
            self.say(say)

    def say(self, text: str) -> None:
        if self.main:
            self.console.print(text, markup=False, highlight=False)

    def advance(self, progress: float, facts: str) -> None:
        """Move the bar to `progress` in [0, 1]."""
        if self.bar:
            self.bar.update(self.task, completed=progress, facts=facts)


def tracked(kind: str, name: str) -> str:
    """A figure's name for trackers: its own where that has a group (`time/data`), else the line's kind before it."""
    return name if "/" in name else f"{kind}/{name}"


def start_trackers(folder: Path, config: RunConfig, accelerator: Accelerator) -> None:
    """wandb and TensorBoard, both below the run folder, with all settings as flat keys, without local paths or secrets."""
    settings = {
        name: value if isinstance(value, (bool, int, float, str)) else str(value)
        for name, value in flatten(scrub_values(asdict(config))).items()
    }
    beside = folder / "wandb_id"
    if "wandb" in config.log.trackers and not beside.exists():
        write_atomically(beside, lambda path: path.write_text(secrets.token_hex(8)))
    wandb = {"id": beside.read_text().strip(), "resume": "allow"} if beside.exists() else {}
    wandb |= {"name": folder.name, "dir": str(folder)}
    accelerator.init_trackers(config.log.project, settings, init_kwargs={"wandb": wandb})


def duration(seconds: float) -> str:
    """`1:02:03` or `2:03`."""
    if not math.isfinite(seconds):
        return "?"
    minutes, rest = divmod(round(max(seconds, 0)), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest:02d}" if hours else f"{minutes}:{rest:02d}"


def _finite(value: Any) -> Any:
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value


def _drop_beyond(path: Path, step: int, skipped: int) -> None:
    """Keep what the checkpoint knows of: its steps, and its skips."""
    if not path.exists():
        return
    kept = []
    for line in path.read_text().splitlines():
        try:
            facts = json.loads(line)
            if facts["step"] <= step and (facts["kind"] != "skip" or facts["skipped"] <= skipped):
                kept.append(line + "\n")
        except (ValueError, KeyError):
            continue  # cut off by a kill
    write_atomically(path, lambda temporary: temporary.write_text("".join(kept)))
