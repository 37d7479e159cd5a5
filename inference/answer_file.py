"""The file that answers are written to, a line per conversation, and what is counted. Part of inference/rollout.py.

Test: pytest tests/test_rollout.py
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TextIO

from ..data.places import write_atomically
from ..data.sources import Conversation


@dataclass
class RolloutReport:
    """Conversations by fate; `there` of the `answered` were in the file already, `truncated` are among them too. Of the
    `blocks` that Jacobi states were asked for, `other` have none, their text not being what the model says. `repeated`: prompts
    that were left out, the same being asked before. `endpoints`: what each server did, a line each."""

    answered: int = 0
    there: int = 0
    truncated: int = 0
    failed: Counter[str] = field(default_factory=Counter)
    blocks: int = 0
    other: int = 0
    repeated: int = 0
    endpoints: list[str] = field(default_factory=list)

    def __str__(self) -> str:
        failed = ", ".join(f"{n} ({reason})" for reason, n in self.failed.most_common()) or "0"
        text = f"{self.answered} answered ({self.there} were there), {self.truncated} truncated, failed: {failed}"
        if self.repeated:
            text += f"; {self.repeated} repeated prompts left out"
        if self.blocks:
            text += f"; {self.other} of {self.blocks} blocks without Jacobi states (not what the model says)"
        text += "; failed ones are tried again by the next run" if self.failed else ""
        return "\n  ".join([text, *self.endpoints])


def write_line(conv: Conversation | str, file: TextIO, report: RolloutReport) -> None:
    """One conversation, or why there is none, which is counted."""
    if isinstance(conv, str):
        report.failed[conv] += 1
        return
    record: dict[str, Any] = {"id": conv.id, "category": conv.category, "split": conv.split}
    record |= {"messages": conv.messages, "truncated": conv.truncated}
    if conv.answer_ids is not None:
        record["ids"] = conv.answer_ids
    if conv.answer_order is not None:
        record["order"] = conv.answer_order
    if conv.jacobi is not None:
        record["jacobi"] = conv.jacobi.record()
        report.blocks += conv.jacobi.blocks
        report.other += conv.jacobi.other
    file.write(json.dumps(record, ensure_ascii=False, separators=(",", ":")) + "\n")
    file.flush()
    report.answered += 1
    report.truncated += conv.truncated


def check_settings(out: Path, settings: dict[str, Any]) -> None:
    """Answers of two settings never mix in one file: they stand beside it, and the first that differs is named."""
    beside = out.with_name(out.name + ".settings.json")
    if out.exists() and out.stat().st_size:
        try:
            found = json.loads(beside.read_text(encoding="utf-8"))
        except (FileNotFoundError, json.JSONDecodeError):
            raise ValueError(
                f"{out.name} exists, but {beside.name} does not say how it was made; choose another file"
            ) from None
        for name in sorted(found.keys() | settings.keys()):
            if found.get(name) != settings.get(name):
                raise ValueError(
                    f"{out.name} was made with {name} = {found.get(name)!r}, this run has {settings.get(name)!r}; "
                    "choose another file"
                )
    write_atomically(beside, lambda path: path.write_text(json.dumps(settings), encoding="utf-8"))


def put_in_order(out: Path, ids: Sequence[str]) -> None:
    """Lines in the order of `ids`, other ones behind: the file of a whole run does not depend on what was answered first.
    It is read a line at a time and replaced at once."""
    place = {name: i for i, name in enumerate(ids)}
    lines, start = [], 0
    with out.open("rb") as file:
        for number, line in enumerate(file):
            lines.append((place.get(json.loads(line)["id"], len(ids) + number), start, len(line)))
            start += len(line)
    if lines == sorted(lines):
        return

    def write(path: Path) -> None:
        with out.open("rb") as source, path.open("wb") as target:
            for _, at, length in sorted(lines):
                source.seek(at)
                target.write(source.read(length))

    write_atomically(out, write)


def resume(out: Path, report: RolloutReport) -> set[str]:
    """Ids of the whole lines; what a killed run left behind them is cut off."""
    out.parent.mkdir(parents=True, exist_ok=True)
    if not out.exists():
        return set()
    ids, whole = set(), 0
    with out.open("rb+") as file:
        for number, line in enumerate(file, 1):
            if not line.endswith(b"\n"):
                break
            whole += len(line)
            if line.strip():
                ids.add(_count(line, f"{out.name}:{number}", report))
        file.truncate(whole)
    report.there = report.answered
    return ids


def _count(line: bytes, where: str, report: RolloutReport) -> str:
    """The id of a line that is there already, which is counted."""
    try:
        record = json.loads(line)
        report.answered += 1
        report.truncated += bool(record["truncated"])
        if (states := record.get("jacobi")) is not None:
            report.blocks += -(-len(states["first"]) // states["block"])
            report.other += states["other"]
        return str(record["id"])
    except (ValueError, KeyError, TypeError):
        raise ValueError(f"{where}: no answer of a roll-out; choose another file, or take the line out") from None
