"""The report of an evaluation: a table for the terminal, and one HTML page that needs no server and no network.

Everything on the page is inline (styles, SVG drawn by matplotlib). Text of models and prompts reaches it only through
the template's automatic escaping; a content policy in the page forbids scripts.

    draftsmith evaluate --model EXPORT --html report.html
    pytest tests/test_report.py
"""

from __future__ import annotations

import io
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup
from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from .commit import Detokenizer
from .figures import DEFINITIONS

if TYPE_CHECKING:
    from matplotlib.figure import Figure

Row = dict[str, Any]
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000", "#F0E442")  # Okabe and Ito 2008
PARTS = ("draft", "verify", "commit", "other")


def print_report(report: Row, console: Console) -> None:
    """The terminal's report: rows, acceptance by depth, categories, definitions, alarms, what limits you."""
    console.print(rows_table(report))
    console.print(time_table(report))
    console.print(acceptance_table(report))
    for row in report["rows"]:
        if row["draft_length"] and row["categories"]:
            console.print(categories_table(row))
            break
    for line in identity_lines(report):
        console.print(visible(line))
    console.print(visible("definitions:"), style="dim")
    for word, meaning in DEFINITIONS.items():
        console.print(visible(f"  {word}: {meaning}"), style="dim")
    for flag in report["flags"]:
        console.print(visible(f"flag: {flag}"), style="yellow")
    for alarm in report["alarms"]:
        console.print(visible(f"ALARM: {alarm}"), style="bold red")
    if report["alarms"]:
        console.print(visible("the usual causes:"))
        for number, cause in enumerate(report["causes"], start=1):
            console.print(visible(f"  {number}. {cause}"))
    if report["best"]:
        console.print(visible(f"fastest: {report['best']}"), style="bold")
    console.print(visible(f"what limits you: {report['limits']}"), style="bold")


def rows_table(report: Row) -> Table:
    """One line per way of decoding. Speeds are absent where the losslessness check is red."""
    run = report["run"]
    steps = ", ".join(sorted({row["step"] for row in report["rows"] if row["step"]}))
    title = (
        f"{run['suite']}: {run['prompts']} prompts, at most {run['max_new_tokens']} new tokens, {run['dtype']}, "
        f"batch 1, target {run['target']}, run {run['runner']}, steps: {steps}"
    )
    table = _table(title, "decoding", "tau [95 %]", "tok/s", "x plain", "x HF", "lossless", "identical")
    for row in report["rows"]:
        red = row["red"] is not None
        slow = row["draft_length"] and row["ratio_to_plain"] is not None and row["ratio_to_plain"] < 1
        table.add_row(
            visible(row["name"]),
            with_interval(row["tau"], row["tau_interval"]),
            "red" if red else number(row["tokens_per_second"], 1),
            "red" if red else with_interval(row["ratio_to_plain"], row["ratio_to_plain_interval"]),
            "red" if red else number(row["ratio_to_hf"]),
            row["lossless"],
            identity(row),
            style="red" if red or slow else None,
        )
    return table


def time_table(report: Row) -> Table:
    """Tokens per target pass, mean over prompts, and where the time of a pass goes."""
    table = _table("where the time goes", "decoding", "macro tau", "tok/fwd", "ms/pass", *PARTS)
    for row in report["rows"]:
        if share := shares(row):
            total = sum(row["seconds_per_pass"][part] for part in PARTS)
            table.add_row(
                visible(row["name"]),
                number(row["tau_macro"]),
                number(row["tokens_per_forward"]),
                "red" if row["red"] else number(1000 * total, 1),
                *(f"{share[part]:.0%}" for part in PARTS),
            )
    return table


def acceptance_table(report: Row) -> Table:
    """Conditional and unconditional acceptance by depth, with counts; by rank where siblings were drafted."""
    table = _table(
        "acceptance by depth, with 95 % intervals", "decoding", "depth", "conditional", "counts", "uncond.", "by rank"
    )
    for row in report["rows"]:
        for d, alpha in enumerate(row["alpha"]):
            ranks = row["alpha_by_rank"][d]
            table.add_row(
                visible(row["name"]) if d == 0 else "",
                str(d + 1),
                with_interval(alpha, row["alpha_interval"][d]),
                "/".join(map(str, row["alpha_counts"][d])),
                number(row["alpha_unconditional"][d]),
                " ".join(number(share) for share in ranks) if len(ranks) > 1 else "-",
            )
    return table


def categories_table(row: Row) -> Table:
    """tau and acceptance of one draft row, category by category."""
    table = _table(
        f"by category, {row['name']}", "category", "prompts", "tau [95 %]", "conditional acceptance", "x plain"
    )
    for name, figures in row["categories"].items():
        table.add_row(
            visible(name),
            str(figures["prompts"]),
            with_interval(figures["tau"], figures["tau_interval"]),
            " ".join(number(alpha) for alpha in figures["alpha"]),
            "red" if row["red"] else number(figures["ratio_to_plain"]),
        )
    return table


def identity_lines(report: Row) -> list[str]:
    """What the losslessness checks saw: red rows; how many answers differ from unpadded plain decoding, and the first
    difference with the logit gap there. The JSON report has all that were measured."""
    lines = []
    for row in report["rows"]:
        if row["red"]:
            lines.append(f"RED {row['name']}: {row['red']}; its speed is not shown")
        if measured := row["divergences"]:
            worst = max(measured, key=lambda other: (not other["excused"], other["gap"]))
            ties = sum(other["excused"] for other in measured)
            lines.append(
                f"{row['name']}: {row['differ_from_unpadded']} of {row['answers']} answers differ from plain decoding of "
                f"width 1; of {len(measured)} measured, {ties} at a near-tie; largest top-2 logit gap {worst['gap']:.3g} "
                f"where the widths differ by {worst['width_difference']:.3g} ({worst['prompt']}, token {worst['position']})"
            )
    return lines


def _table(title: str, first: str, *others: str) -> Table:
    table = Table(title=visible(title), title_justify="left", box=box.SIMPLE, pad_edge=False, padding=(0, 1, 0, 0))
    table.add_column(first, no_wrap=True)
    for name in others:
        table.add_column(name, justify="right")
    return table


def html(report: Row) -> str:
    """The page. Self-contained; every text that came from outside is escaped by the template."""
    environment = Environment(
        loader=FileSystemLoader(Path(__file__).parent), autoescape=True, undefined=StrictUndefined, trim_blocks=True
    )
    drafts = [row for row in report["rows"] if row["draft_length"]]
    return environment.get_template("report.html.j2").render(
        report=report,
        drafts=drafts,
        definitions=DEFINITIONS,
        identity_lines=identity_lines(report),
        parts=PARTS,
        plots=[
            ("Acceptance by depth", plot_acceptance(drafts)),
            ("Tokens per second", plot_speed(report["rows"])),
            ("Where the time goes", plot_time(report["rows"])),
        ],
        number=number,
        with_interval=with_interval,
        identity=identity,
        shares=shares,
    )


def plot_acceptance(drafts: Sequence[Row]) -> Markup:
    """Conditional acceptance by depth with intervals, one line per draft row."""
    figure, axes = new_axes("depth", "accepted, given all before were")
    for i, row in enumerate(drafts):
        points = [(d + 1, a, row["alpha_interval"][d] or [a, a]) for d, a in enumerate(row["alpha"]) if a is not None]
        if points:
            depths, alphas, bounds = zip(*points, strict=True)
            below = [max(0.0, a - low) for a, (low, _) in zip(alphas, bounds, strict=True)]
            above = [max(0.0, high - a) for a, (_, high) in zip(alphas, bounds, strict=True)]
            colour = COLOURS[i % len(COLOURS)]
            axes.errorbar(
                depths, alphas, [below, above], marker="o", capsize=3, color=colour, label=safe_label(row["name"])
            )
    axes.set_ylim(0, 1)
    axes.xaxis.get_major_locator().set_params(integer=True)
    if drafts:
        axes.legend(frameon=False)
    return svg(figure, "acceptance")


def plot_speed(rows: Sequence[Row]) -> Markup:
    """Tokens per second of every row whose losslessness check is not red."""
    shown = [row for row in rows if row["tokens_per_second"] is not None]
    figure, axes = new_axes("tokens per second", "", height=1.0 + 0.4 * len(shown))
    for i, row in enumerate(shown):
        low, high = row["tokens_per_second_interval"] or [row["tokens_per_second"]] * 2
        value = row["tokens_per_second"]
        error = [[max(0.0, value - low)], [max(0.0, high - value)]]
        axes.barh(i, value, xerr=error, capsize=3, color=COLOURS[0 if row["draft_length"] else 5])
    axes.set_yticks(range(len(shown)), [safe_label(row["name"]) for row in shown])
    axes.invert_yaxis()
    return svg(figure, "speed")


def plot_time(rows: Sequence[Row]) -> Markup:
    """Milliseconds per verify pass (plain: per step), split into draft, verify, commit and the rest."""
    shown = [row for row in rows if row["seconds_per_pass"]]
    figure, axes = new_axes("milliseconds per pass", "", height=1.2 + 0.4 * len(shown))
    for i, row in enumerate(shown):
        left = 0.0
        for j, part in enumerate(PARTS):
            width = 1000 * row["seconds_per_pass"][part]
            axes.barh(i, width, left=left, color=COLOURS[j], label=part if i == 0 else None)
            left += width
    axes.set_yticks(range(len(shown)), [safe_label(row["name"]) for row in shown])
    axes.invert_yaxis()
    if shown:
        axes.legend(frameon=False, ncols=len(PARTS), loc="upper center", bbox_to_anchor=(0.4, 1.25))
    return svg(figure, "time")


def pieces(tokenizer: Any, ids: Sequence[int], from_draft: Sequence[bool]) -> list[Row]:
    """Text of `ids` in runs of equal origin, [{"text", "draft"}]; a character's bytes count with its last token."""
    detokenizer = Detokenizer(tokenizer)
    runs: list[Row] = []
    for token, draft in zip(ids, from_draft, strict=False):
        text = detokenizer.push(token)
        if runs and runs[-1]["draft"] == draft:
            runs[-1]["text"] += text
        elif text:
            runs.append({"text": text, "draft": bool(draft)})
    rest = detokenizer.flush()
    return [*runs, {"text": rest, "draft": False}] if rest else runs


def visible(text: str) -> Text:
    """Text for the terminal as it stands: no markup, and control characters (a model may emit them) made visible."""
    return Text("".join(c if c.isprintable() or c in "\n\t" else f"\\x{ord(c):02x}" for c in text))


def number(value: float | None, digits: int = 2) -> str:
    return "-" if value is None else f"{value:.{digits}f}"


def with_interval(value: float | None, interval: Sequence[float] | None) -> str:
    """`1.80 [1.70–1.90]`; an interval of no width is left out."""
    if not interval or f"{interval[0]:.2f}" == f"{interval[1]:.2f}":
        return number(value)
    return f"{number(value)} [{interval[0]:.2f}–{interval[1]:.2f}]"


def identity(row: Row) -> str:
    """How many answers were the same ids as plain decoding's at the same width."""
    if row["identical_to_plain"] is None:
        return "-"
    return f"{row['identical_prompts']}/{row['checked_prompts']}"


def shares(row: Row) -> dict[str, float]:
    """Share of a pass per part; empty where the runtime's clock was not used (transformers)."""
    per_pass = row["seconds_per_pass"]
    total = sum(per_pass[part] for part in PARTS) if per_pass else 0
    return {part: per_pass[part] / total for part in PARTS} if total else {}


def safe_label(text: str) -> str:
    """A text for a plot: matplotlib reads dollar signs as mathematics."""
    return text.replace("$", r"\$")


def new_axes(x: str, y: str, height: float = 3.2) -> tuple[Figure, Any]:
    """An empty plot with the names of its axes; `height` in inches."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7.2, height), layout="constrained")
    axes = figure.subplots()
    axes.set_xlabel(x)
    axes.set_ylabel(y)
    axes.spines[["top", "right"]].set_visible(False)
    return figure, axes


def svg(figure: Figure, name: str) -> Markup:
    """The figure as an inline element; `name` keeps the ids of several figures on one page apart."""
    import matplotlib

    buffer = io.StringIO()
    with matplotlib.rc_context({"svg.hashsalt": name, "svg.fonttype": "none"}):
        figure.savefig(buffer, format="svg", metadata={"Date": None, "Creator": None})
    text = buffer.getvalue()
    return Markup(text[text.index("<svg") :])  # drawn by us; matplotlib escapes the labels
