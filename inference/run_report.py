"""`draftsmith report RUN ...`: an HTML page of training runs, finished, running or dead, side by side where several are named.

    draftsmith report runs/eagle3                                     # writes runs/eagle3/report.html
    draftsmith report runs/eagle3 runs/hass --out compare.html

It reads `metrics.jsonl` and `run.yaml` alone, of whichever training script. The page needs no server and no network; texts
reach it through the template's escaping, without secrets and local folders. Test: pytest tests/test_run_report.py
"""

from __future__ import annotations

import itertools
import re
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup

from ..data.places import write_atomically
from .report import COLOURS, new_axes, safe_label, svg
from .run_folder import Run, finite, read_run

PARTS = ("data", "target", "drafter", "update", "other")
POINTS = 800  # of a line; more are averaged
SHOWN = 60  # skips and notes of a run
OTHERS = 12  # further plots
DRAWN = re.compile(r"(accuracy|accept)_\d+|run_length(_low|_high|_sq)?|tau|k|verifies")


@dataclass(frozen=True)
class RunReportConfig:
    """Make an HTML page of training runs."""

    runs: tuple[str, ...]
    """Run folders of any training script; several are drawn side by side."""
    out: str | None = None
    """File of the page; null = `report.html` of the run folder, or of the current one where several runs are named."""

    def __post_init__(self) -> None:
        if not self.runs:
            raise ValueError("no run: name a run folder (draftsmith report runs/train)")
        if self.out is not None and Path(self.out).suffix not in (".html", ".htm"):
            raise ValueError(f"out = {self.out!r}: the page is written as .html")


def run_report(cfg: RunReportConfig) -> None:
    """The command."""
    runs = [read_run(Path(folder).expanduser()) for folder in cfg.runs]
    beside = Path(cfg.runs[0]).expanduser() if len(runs) == 1 else Path()
    out = Path(cfg.out).expanduser() if cfg.out else beside / "report.html"
    page = html(runs)
    write_atomically(out, lambda path: path.write_text(page, encoding="utf-8"))
    print(out)


def html(runs: Sequence[Run]) -> str:
    """The page; the same for the same runs."""
    runs = told_apart(runs)
    environment = Environment(
        loader=FileSystemLoader(Path(__file__).parent), autoescape=True, undefined=StrictUndefined, trim_blocks=True
    )
    return environment.get_template("run_report.html.j2").render(
        title=", ".join(run.name for run in runs),
        runs=[(run, COLOURS[i % len(COLOURS)]) for i, run in enumerate(runs)],
        summary=summary(runs),
        plots=[(title, drawn) for title, draw in PLOTS.items() if (drawn := draw(runs)) is not None],
        others=other_plots(runs),
        settings=table([run.settings for run in runs]),
        machine=table([about(run) for run in runs]),
        shown=SHOWN,
    )


def told_apart(runs: Sequence[Run]) -> list[Run]:
    """Names without control characters, no two the same."""
    names: list[str] = []
    for run in runs:
        name = "".join(c if c.isprintable() else "?" for c in run.name) or "run"
        names.append(name if name not in names else f"{name} #{len(names) + 1}")
    return [replace(run, name=name) for run, name in zip(runs, names, strict=True)]


# Tables


def summary(runs: Sequence[Run]) -> list[tuple[str, list[str]]]:
    """(what, one text per run); rows that no run has are left out."""
    rows: dict[str, Callable[[Run], str | None]] = {
        "state": lambda run: run.state,
        "method": lambda run: _text(run.settings.get("method")),
        "target": lambda run: _text(run.settings.get("target.name")),
        "steps": lambda run: str(run.lines["train"][-1]["step"]) if run.lines["train"] else None,
        "tokens": lambda run: _number(run.last("train", "tokens"), ",.0f"),
        "time in steps": lambda run: _duration(run.last("train", "seconds")),
        "loss, last tenth": lambda run: _number(_end(run.series("train", "loss")[1]), ".4f"),
        "best held-out tau": best_tau,
        "last held-out tau": lambda run: _tau(run, -1),
        "last probe tau": lambda run: _number(run.last("probe", "tau"), ".2f"),
        "tokens/s, all devices": lambda run: _number(_middle(run, "tokens_per_second"), ",.0f"),
        "tokens/s per device": lambda run: _number(_middle(run, "speed/tokens_per_second_per_device"), ",.0f"),
        "MFU": lambda run: _number(_middle(run, "speed/mfu"), ".1%"),
        "peak memory": lambda run: _number(_most(run, "memory/peak_gib"), ".2f", " GiB"),
        "skipped steps": lambda run: str(len(run.lines["skip"])),
        "notes": lambda run: str(len(run.lines["note"])),
    }
    found = [(name, [cell(run) for run in runs]) for name, cell in rows.items()]
    return [(name, [c or "-" for c in cells]) for name, cells in found if any(cells)]


def best_tau(run: Run) -> str | None:
    """The best held-out tau, its interval, and its step."""
    _, values = run.series("heldout", "tau")
    return _tau(run, max(range(len(values)), key=values.__getitem__)) if values else None


def _tau(run: Run, at: int) -> str | None:
    steps, values = run.series("heldout", "tau")
    if not values:
        return None
    line = next(line for line in run.lines["heldout"] if line["step"] == steps[at])
    low, high = (finite(line.get(f"run_length_{end}")) for end in ("low", "high"))
    interval = "" if low is None or high is None else f" [{1 + low:.2f}–{1 + high:.2f}]"
    return f"{values[at]:.2f}{interval}, step {steps[at]}"


def about(run: Run) -> dict[str, Any]:
    """What decides a run beside its settings."""
    facts = {k: v for k, v in run.facts.items() if k not in ("config", "command")}
    found: dict[str, Any] = {}
    for key, value in facts.items():
        found |= {f"{key}.{k}": v for k, v in value.items()} if isinstance(value, dict) else {key: value}
    return found


def table(columns: Sequence[dict[str, Any]]) -> list[tuple[str, list[str], bool]]:
    """(key, one text per run, whether they differ), what differs first."""
    keys = list(dict.fromkeys(key for column in columns for key in column))
    rows = []
    for key in keys:
        cells = [_text(column[key]) or "null" if key in column else "-" for column in columns]
        rows.append((key, cells, len(set(cells)) > 1))
    return sorted(rows, key=lambda row: not row[2])


def _text(value: Any) -> str | None:
    if value is None:
        return None
    return ", ".join(map(str, value)) or "none" if isinstance(value, list) else str(value)


def _number(value: float | None, form: str, unit: str = "") -> str | None:
    return None if value is None else format(value, form) + unit


def _duration(seconds: float | None) -> str | None:
    if seconds is None:
        return None
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes // 60} h {minutes % 60:02d} min" if minutes >= 60 else f"{minutes} min {rest:02d} s"


def _end(values: Sequence[float]) -> float | None:
    return statistics.fmean(values[-max(1, len(values) // 10) :]) if values else None


def _middle(run: Run, figure: str) -> float | None:
    values = run.series("train", figure)[1]
    return statistics.median(values) if values else None


def _most(run: Run, figure: str) -> float | None:
    return max(run.series("train", figure)[1], default=None)


# Plots: each takes the runs and gives a drawing, or None where no run has what it shows.


def thinned(steps: Sequence[int], values: Sequence[float], most: int = POINTS) -> tuple[list[float], list[float]]:
    """At most so many points: means of neighbours, so that no value is left out."""
    width = max(1, -(-len(steps) // most))
    groups = range(0, len(steps), width)
    means = [[statistics.fmean(x[i : i + width]) for i in groups] for x in (steps, values)]
    return means[0], means[1]


def smoothed(values: Sequence[float], span: int) -> list[float]:
    """Mean over `span` values to either side, fewer at both ends: no lag."""
    sums = [0.0, *itertools.accumulate(values)]
    found = []
    for i in range(len(values)):
        near = min(span, i, len(values) - 1 - i)
        found.append((sums[i + near + 1] - sums[i - near]) / (2 * near + 1))
    return found


def new_plot(name: str) -> tuple[Any, Any]:
    """An empty plot over steps."""
    figure, axes = new_axes("step", name, height=2.9)
    axes.xaxis.get_major_locator().set_params(integer=True)
    return figure, axes


def lines(runs: Sequence[Run], kind: str, column: str, name: str, smooth: bool = False) -> Markup | None:
    """A figure over steps, a line per run."""
    if not any(run.series(kind, column)[0] for run in runs):
        return None
    figure, axes = new_plot(name)
    for i, run in enumerate(runs):
        steps, values = thinned(*run.series(kind, column))
        if not steps:
            continue
        colour, usual = COLOURS[i % len(COLOURS)], {"marker": "o", "markersize": 3} if len(steps) < 40 else {}
        if smooth and len(steps) > 20:
            axes.plot(steps, values, color=colour, alpha=0.25, linewidth=0.8)
            axes.plot(steps, smoothed(values, len(steps) // 40 + 1), color=colour, label=safe_label(run.name))
        else:
            axes.plot(steps, values, color=colour, label=safe_label(run.name), **usual)
    _finish(axes, runs)
    return svg(figure, f"{kind} {column}")


def plot_loss(runs: Sequence[Run]) -> Markup | None:
    return lines(runs, "train", "loss", "loss", smooth=True)


def plot_tau(runs: Sequence[Run]) -> Markup | None:
    """Held-out tau with its 90 % interval, and what real runs of the decoder committed, as crosses."""
    if not any(run.series(kind, "tau")[0] for run in runs for kind in ("heldout", "probe")):
        return None
    figure, axes = new_plot("tau")
    for i, run in enumerate(runs):
        colour = COLOURS[i % len(COLOURS)]
        steps, values = run.series("heldout", "tau")
        if steps:
            axes.plot(steps, values, marker="o", markersize=3, color=colour, label=safe_label(f"{run.name}, held out"))
        low, high = (run.series("heldout", f"run_length_{end}") for end in ("low", "high"))
        if low[0] and low[0] == high[0]:
            axes.fill_between(
                low[0], [1 + v for v in low[1]], [1 + v for v in high[1]], color=colour, alpha=0.15, linewidth=0
            )
        steps, values = run.series("probe", "tau")
        if steps:
            axes.plot(steps, values, "x", color=colour, label=safe_label(f"{run.name}, probe"))
    axes.legend(frameon=False, fontsize=8)
    return svg(figure, "tau")


def depths(runs: Sequence[Run], figure: str, name: str) -> Markup | None:
    """A held-out figure by depth: at the last measurement per run; of a single run, at the first and the middle one, too."""
    shown: list[tuple[str, str, float, dict[int, float]]] = []
    for i, run in enumerate(runs):
        measured = [(line["step"], found) for line in run.lines["heldout"] if (found := _by_depth(line, figure))]
        chosen = {0, len(measured) // 2, len(measured) - 1} if len(runs) == 1 else {len(measured) - 1}
        for place in sorted(chosen) if measured else []:
            step, found = measured[place]
            faint = 1.0 if place == len(measured) - 1 else 0.3 + 0.3 * (place > 0)
            shown.append((f"{run.name}, step {step}", COLOURS[i % len(COLOURS)], faint, found))
    if not shown:
        return None
    drawn, axes = new_plot(name)
    axes.set_xlabel("depth")
    for label, colour, faint, found in shown:
        axes.plot(list(found), list(found.values()), marker="o", color=colour, alpha=faint, label=safe_label(label))
    axes.set_ylim(0, 1)
    axes.legend(frameon=False, fontsize=8)
    return svg(drawn, figure)


def _by_depth(line: dict[str, Any], figure: str) -> dict[int, float]:
    found = {
        int(name.rsplit("_", 1)[1]): number
        for name, value in line.items()
        if re.fullmatch(rf"{figure}_\d+", name) and (number := finite(value)) is not None
    }
    return dict(sorted(found.items()))


def plot_time(runs: Sequence[Run]) -> Markup | None:
    """Milliseconds of a step by part: over steps for one run, the mean per run for several."""
    shown = [(run, split) for run in runs if (split := _split(run))]
    if not shown:
        return None
    if len(shown) == 1:
        _, split = shown[0]
        figure, axes = new_plot("ms per step")
        steps = thinned(split["step"], split[PARTS[0]])[0]
        heights = [[1000 * v for v in thinned(split["step"], split[part])[1]] for part in PARTS]
        if len(steps) == 1:
            steps, heights = [steps[0] - 0.5, steps[0] + 0.5], [[h[0], h[0]] for h in heights]
        axes.stackplot(steps, *heights, labels=PARTS, colors=COLOURS[: len(PARTS)], linewidth=0)
        axes.set_ylim(bottom=0)
        axes.margins(x=0)
    else:
        figure, axes = new_axes("ms per step, mean", "", height=1.4 + 0.4 * len(shown))
        for i, (_, split) in enumerate(shown):
            left = 0.0
            for j, part in enumerate(PARTS):
                width = 1000 * statistics.fmean(split[part])
                axes.barh(i, width, left=left, color=COLOURS[j], label=part if i == 0 else None)
                left += width
        axes.set_yticks(range(len(shown)), [safe_label(run.name) for run, _ in shown])
        axes.invert_yaxis()
    handles, labels = axes.get_legend_handles_labels()
    figure.legend(handles, labels, frameon=False, fontsize=8, ncols=len(PARTS), loc="outside upper center")
    return svg(figure, "time")


def _split(run: Run) -> dict[str, list[Any]]:
    """Times by part of the lines that have them all."""
    found: dict[str, list[Any]] = {"step": [], **{part: [] for part in PARTS}}
    for line in run.lines["train"]:
        values = [finite(line.get(f"time/{part}")) for part in PARTS]
        if None not in values:
            for key, value in zip(found, [line["step"], *values], strict=True):
                found[key].append(value)
    return found if found["step"] else {}


def _finish(axes: Any, runs: Sequence[Run]) -> None:
    if len(runs) > 1:
        axes.legend(frameon=False, fontsize=8)


PLOTS: dict[str, Callable[[Sequence[Run]], Markup | None]] = {
    "Loss": plot_loss,
    "Held-out tau": plot_tau,
    "Accuracy by depth": lambda runs: depths(runs, "accuracy", "agrees with the target"),
    "Acceptance by depth, as sampling would": lambda runs: depths(runs, "accept", "expected acceptance"),
    "Learning rate": lambda runs: lines(runs, "train", "lr", "learning rate"),
    "Gradient norm, before clipping": lambda runs: lines(runs, "train", "grad_norm", "norm", smooth=True),
    "Tokens per second and device": lambda runs: lines(runs, "train", "speed/tokens_per_second_per_device", "tokens/s"),
    "Where the time goes": plot_time,
    "Peak memory": lambda runs: lines(runs, "train", "memory/peak_gib", "GiB"),
    "Model FLOPs utilisation": lambda runs: lines(runs, "train", "speed/mfu", "share of the peak"),
}


def other_plots(runs: Sequence[Run]) -> list[tuple[str, Markup]]:
    """Held-out and probe figures of a method's own, as many as fit."""
    found: list[tuple[str, Markup]] = []
    for kind, said in (("heldout", "held out"), ("probe", "probe")):
        names = dict.fromkeys(name for run in runs for line in run.lines[kind] for name in line)
        for name in names:
            if name in ("kind", "step") or DRAWN.fullmatch(name):
                continue
            drawn = lines(runs, kind, name, safe_label(name))
            if drawn is not None and len(found) < OTHERS:
                found.append((f"{name}, {said}", drawn))
    return found
