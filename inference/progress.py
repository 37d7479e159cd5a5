"""Progress of long commands: what is done, the rate, the time left. Tested by `pytest tests/test_capture.py`."""

from __future__ import annotations

import threading
import time

from rich.console import Console
from rich.progress import BarColumn, Progress, ProgressColumn, Task, TextColumn, TimeRemainingColumn
from rich.table import Column
from rich.text import Text

LINE_SECONDS = 30.0  # where there is no terminal


def progress_bar(what: str, total: float, shown: bool = True, unit: str = "tokens") -> Bar:
    """Rate and time left, on stderr: a bar on a terminal, a line every half minute elsewhere. Enter it and call it with
    what has been done since; several threads may."""
    return Bar(what, total, shown, unit)


class Bar:
    """A progress bar of one task; see `progress_bar`."""

    def __init__(self, what: str, total: float, shown: bool, unit: str) -> None:
        self._rate = _Rate(unit)
        columns = (TextColumn("{task.description}"), BarColumn(bar_width=20), self._rate, TimeRemainingColumn())
        console = Console(stderr=True)
        self._progress = Progress(*columns, console=console, disable=not shown)
        self._task = self._progress.add_task(what, total=total)
        self._lines = shown and not console.is_terminal
        self._said, self._lock = time.monotonic(), threading.Lock()

    def __enter__(self) -> Bar:
        self._progress.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._progress.stop()

    def __call__(self, done: float) -> None:
        self._progress.advance(self._task, done)
        with self._lock:
            if self._lines and time.monotonic() - self._said >= LINE_SECONDS:
                self._said = time.monotonic()
                task = self._progress.tasks[0]
                left = "" if task.time_remaining is None else f", about {task.time_remaining / 60:.0f} min left"
                amount = self._rate.render(task).plain
                self.say(f"{task.description}: {amount}{left}")

    def say(self, text: str) -> None:
        """A line of its own, above the bar."""
        if not self._progress.disable:
            self._progress.console.print(text, markup=False, highlight=False, soft_wrap=True)


class _Rate(ProgressColumn):
    def __init__(self, unit: str) -> None:
        super().__init__(table_column=Column(no_wrap=True))
        self._unit = unit

    def render(self, task: Task) -> Text:
        rate = f", {task.speed:,.1f}/s" if task.speed else ""
        return Text(f"{task.completed:,.0f} of {task.total or 0:,.0f} {self._unit}{rate}")
