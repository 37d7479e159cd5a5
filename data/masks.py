"""Look at what is trained on: samples with their supervised tokens coloured, and counts.

Used by `draftsmith masks` (inference/masks.py). Tested by `pytest tests/test_data_masks.py`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from rich.console import Console, Group
from rich.table import Table
from rich.text import Text

from .encode import EncodeReport, Sample

PROMPT, ANSWER, ANSWER_ALT = "dim", "black on green", "black on bright_green"


def coloured(sample: Sample, tokenizer: Any) -> Text:
    """The sample's text; supervised tokens on green, alternating shades so that borders show, line ends as ⏎."""
    text = Text()
    runs: list[tuple[bool, list[int]]] = []
    for token, on in zip(sample.ids.tolist(), sample.supervised.tolist(), strict=True):
        if on or not runs or runs[-1][0]:
            runs.append((on, [token]))
        else:
            runs[-1][1].append(token)
    for number, (on, ids) in enumerate(runs):
        piece = tokenizer.decode(ids)
        text.append(piece.replace("\n", "⏎\n") if on else piece, (ANSWER, ANSWER_ALT)[number % 2] if on else PROMPT)
    return text


def show(samples: Sequence[Sample], report: EncodeReport, tokenizer: Any, count: int, console: Console) -> None:
    """Print `count` samples spread over the data, then counts by category."""
    step = max(len(samples) // count, 1)
    for sample in samples[::step][:count]:
        on = int(sample.supervised.sum())
        note = ", truncated answer" if sample.truncated else ""
        title = f"sample {sample.sample_id} {sample.category}: {on} of {len(sample)} tokens supervised{note}"
        console.print(Group(Text(title, "bold"), coloured(sample, tokenizer), Text()))
    table = Table("category", "samples", "tokens", "supervised", "share")
    for category in sorted({s.category for s in samples}):
        group = [s for s in samples if s.category == category]
        tokens, on = sum(map(len, group)), sum(int(s.supervised.sum()) for s in group)
        table.add_row(category or "-", f"{len(group):,}", f"{tokens:,}", f"{on:,}", f"{on / tokens:.1%}")
    console.print(table)
    console.print(Text(str(report)))
