"""Capture and training at the same time: a shard is written, read once, and deleted, so that disk stays bounded.

Both sides know the order beforehand: samples are shuffled by the training's seed, cut into shards by their lengths
alone, and read in that order, once. They meet in one place (a folder or a store) through two small files:

    rolling.json     by the capture: what the states belong to, the samples of each shard, how far it goes ahead
    consumed.json    by the training: the first shard that it still needs

The capture keeps the shards from there on, at most `ahead` of them (for a while more where a training went back). The training deletes what lies before a checkpoint
that was written, and nothing else; where it needs a shard that the capture may not write yet, it saves first. A training
that goes back to an older checkpoint says so in consumed.json, and the capture writes what was deleted once more, with
the same bytes. Tested by `pytest tests/test_rolling.py`.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import asdict
from typing import Any

from .encode import Sample
from .packing import shuffled
from .places import Place, Store
from .states import ShardRecord, StateFields, StateStore, finished, note_file, plan, read_record, shard_file

PLAN, CONSUMED = "rolling.json", "consumed.json"
MIX = 2  # shards whose samples are packed together
PATIENCE = 1800.0  # seconds without the shard that is needed after which the training stops


def reading_order(samples: Sequence[Sample], seed: int) -> list[Sample]:
    """The samples as they are captured and trained on."""
    return [samples[i] for i in shuffled(len(samples), seed, 0)]


def write_plan(place: Place, fields: StateFields, shards: Sequence[Sequence[Sample]], ahead: int) -> None:
    """Say what will be captured.

    Raises:
        ValueError: the place holds states of something else, or a finished capture.
    """
    if "index.json" in place.sizes():
        raise ValueError(f"{place.name} holds a finished capture, which needs no rolling: leave rolling out")
    planned = [[(s.sample_id, len(s)) for s in shard] for shard in shards]
    with suppress(FileNotFoundError):
        StateStore(place, fields, index=_as_index(json.loads(place.read(PLAN))), record=_none)
    content = json.dumps({"fields": asdict(fields), "ahead": ahead, "shards": planned})
    place.write(PLAN, lambda path: path.write_text(content, encoding="utf-8"))


def consumed(place: Place) -> int:
    """The first shard that the training still needs; 0 before it has begun."""
    try:
        return int(json.loads(place.read(CONSUMED))["first"])
    except FileNotFoundError:
        return 0


class Rolling:
    """The training's side: which shards there are, when to save, and what may go.

    `main`: this process writes and deletes for all of the training.
    """

    def __init__(self, place: Place, planned: Sequence[Sequence[tuple[int, int]]], ahead: int, main: bool) -> None:
        self.place, self.planned, self.ahead, self.main = place, planned, ahead, main
        self.fields: StateFields | None = None
        self.first = 0  # shard that the newest checkpoint needs
        self.spans: list[
            tuple[int, int]
        ] = []  # of each window: the first shard that it or a later one needs, its last one
        self.close: Callable[[], None] = _nothing  # lets shards go that may be deleted
        self._there: set[int] = set()
        self._records: dict[int, ShardRecord] = {}
        self._since, self._said = time.monotonic(), -1

    def follow(self, shards_of_window: Sequence[Sequence[int]]) -> None:
        """The shards that each window of the epoch reads, over all processes.

        Raises:
            ValueError: a window needs more shards at once than the capture keeps.
        """
        lowest, spans = len(self.planned), []
        for numbers in reversed(shards_of_window):
            lowest = min(lowest, *numbers)
            spans.append((lowest, max(numbers)))
        self.spans = spans[::-1]
        widest = max(last - first + 1 for first, last in self.spans)
        if widest > self.ahead:
            raise ValueError(
                f"{self.place.name}: a window of this recipe reads {widest} shards at once, the capture keeps {self.ahead}: "
                f"capture with --rolling {max(2 * widest, widest + MIX)} or more"
            )

    def needed(self, epoch: int, window: int) -> tuple[int, int]:
        """(first shard that is needed from this window on, last one that it reads)."""
        return self.spans[window] if epoch == 0 and window < len(self.spans) else (len(self.planned), -1)

    def ready(self, epoch: int, window: int) -> bool:
        """Whether the shards of this window are there."""
        first, last = self.needed(epoch, window)
        wanted = set(range(first, last + 1))
        if not wanted <= self._there:
            self._there = finished(self.place, len(self.planned))
            if isinstance(self.place, Store):
                coming = [self.record(k) for k in sorted(self._there) if k >= first]
                self.place.prefetch([(r.file, r.bytes, r.crc32) for r in coming])
        return wanted <= self._there

    def due(self, epoch: int, window: int) -> bool:
        """Whether the capture may write the shards of this window only after a save has let others go."""
        return self.needed(epoch, window)[1] >= self.first + self.ahead

    def saved(self, epoch: int, window: int) -> None:
        """A checkpoint that goes on with this window is on disk: what lies before it goes, and the capture is told."""
        before, self.first = self.first, self.needed(epoch, window)[0]
        self.close()
        if not self.main:
            return
        content = json.dumps({"first": self.first})
        self.place.write(CONSUMED, lambda path: path.write_text(content, encoding="utf-8"))
        gone = range(before, self.first)
        self.place.delete([shard_file(k) for k in gone])
        if self.place.remote:
            self.place.delete([note_file(k) for k in gone])
        self._there.difference_update(gone)
        for k in gone:
            self._records.pop(k, None)

    def wait(self, epoch: int, window: int) -> None:
        """Pause before the next look for this window's shards.

        Raises:
            ConnectionError: they do not come.
        """
        first, last = self.needed(epoch, window)
        number = next((k for k in range(first, last + 1) if k not in self._there), last)
        if number != self._said:
            self._said, self._since = number, time.monotonic()
            if self.main:
                print(f"waiting for {shard_file(number)} of {self.place}", file=sys.stderr)
        if time.monotonic() - self._since > PATIENCE:
            raise ConnectionError(
                f"{self.place}: no {shard_file(number)} for {PATIENCE / 60:.0f} minutes; is `draftsmith capture --rolling` running? "
                "The newest checkpoint stays, the same command goes on from it"
            )
        time.sleep(self.place.poll)

    def record(self, number: int) -> ShardRecord:
        """What was written of a shard.

        Raises:
            ValueError: it is not there (any more), or a sample of it was left out.
        """
        if number in self._records:
            return self._records[number]
        assert self.fields is not None
        record = read_record(self.place, number, self.fields)
        if record is None:
            raise ValueError(
                f"{self.place.name}: {shard_file(number)} is not there; start the capture again, it writes it"
            )
        if record.skipped:
            number, where = record.skipped[0]
            raise ValueError(
                f"{self.place.name}: states of sample {number} are not finite at {where}, and a rolling capture cannot leave "
                "samples out: compute in bfloat16, or capture the whole before"
            )
        self._records[number] = record
        return record


def open_rolling(place: Place, expected: StateFields, samples: Sequence[Sample], main: bool) -> StateStore:
    """Wait for the capture's plan, and open it for `samples`, which stand in their `reading_order`.

    Raises:
        ValueError: the capture is of something else.
        ConnectionError: there is none.
    """
    began, said = time.monotonic(), False
    while PLAN not in (sizes := place.sizes()):
        if "index.json" in sizes:
            raise ValueError(f"{place.name} holds a finished capture: set states.rolling=false")
        if time.monotonic() - began > PATIENCE:
            raise ConnectionError(
                f"{place}: no {PLAN} for {PATIENCE / 60:.0f} minutes; start `draftsmith capture --rolling`"
            )
        if main and not said:
            print(f"waiting for {PLAN} of {place}", file=sys.stderr)
        said = True
        time.sleep(place.poll)
    found = json.loads(place.read(PLAN))
    planned = [[(s.sample_id, len(s)) for s in shard] for shard in plan(samples)]
    rolling = Rolling(place, planned, int(found["ahead"]), main)
    store = StateStore(
        place, expected, expected.taps, expected.last_hidden, top_k=expected.top_k, index=_as_index(found),
        record=rolling.record,
    )  # fmt: skip
    if _as_index(found)["shards"] != _as_index({**found, "shards": planned})["shards"]:
        raise ValueError(f"{place.name} is cut into other shards than this version makes: capture again")
    rolling.fields, rolling.close, store.rolling = store.fields, store.close, rolling
    return store


def _as_index(found: dict[str, Any]) -> dict[str, Any]:
    """A plan in the form of an index: sizes and checksums are not known yet."""
    records = [
        {"file": shard_file(k), "bytes": 0, "crc32": 0, "samples": [list(s) for s in samples], "skipped": []}
        for k, samples in enumerate(found["shards"])
    ]
    return {"fields": found["fields"], "shards": records}


def _nothing() -> None:
    """Nothing is open."""


def _none(number: int) -> ShardRecord:
    raise AssertionError(number)


def reading_blocks(samples: Sequence[Sample]) -> tuple[list[list[int]], list[int]]:
    """(indices that are packed together, block by block; the shard of each index) of samples in their `reading_order`."""
    shard_of = [number for number, shard in enumerate(plan(samples)) for _ in shard]
    blocks: list[list[int]] = [[] for _ in range(shard_of[-1] // MIX + 1)]
    for i, number in enumerate(shard_of):
        blocks[number // MIX].append(i)
    return blocks, shard_of


def shards_of_windows(rows: Sequence[Sequence[int]], size: int, shard_of: Sequence[int]) -> list[list[int]]:
    """Of each window of `size` rows of sample indices: the shards it reads."""
    windows = [rows[at : at + size] for at in range(0, len(rows), size)]
    return [sorted({shard_of[i] for row in window for i in row}) for window in windows]
