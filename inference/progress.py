"""Progress of long commands: what is done, the rate, the time left. Tested by `pytest tests/test_capture.py`."""

from __future__ import annotations

from rich.console import Console
from rich.progress import BarColumn, Progress, ProgressColumn, Task, TextColumn, TimeRemainingColumn
from rich.table import Column
from rich.text import Text


def progress_bar(what: str, total: float, shown: bool = True, unit: str = "tokens") -> Bar:
    """A bar with rate and time left, on stderr; enter it and call it with what has been done since."""
    return Bar(what, total, shown, unit)


class Bar:
    """A progress bar of one task; see `progress_bar`."""

    def __init__(self, what: str, total: float, shown: bool, unit: str) -> None:
        columns = (TextColumn("{task.description}"), BarColumn(bar_width=20), _Rate(unit), TimeRemainingColumn())
        self._progress = Progress(*columns, console=Console(stderr=True), disable=not shown)
        self._task = self._progress.add_task(what, total=total)

    def __enter__(self) -> Bar:
        self._progress.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._progress.stop()

    def __call__(self, done: float) -> None:
        self._progress.advance(self._task, done)


class _Rate(ProgressColumn):
    def __init__(self, unit: str) -> None:
        super().__init__(table_column=Column(no_wrap=True))
        self._unit = unit

    def render(self, task: Task) -> Text:
        rate = f", {task.speed:,.1f}/s" if task.speed else ""
        return Text(f"{task.completed:,.0f} of {task.total or 0:,.0f} {self._unit}{rate}")
