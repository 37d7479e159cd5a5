"""Signs of life: a training of several processes ends when one of them is stuck, with a line that names it.

A process that is stopped, or waits for a file or an exchange that never comes, lets all others wait in the next collective
operation for as long as its backend allows (half an hour by gloo, and then the line names nobody). So a thread of each
process tells the launch's own store every few seconds how far its main thread is: how many exchanges it has entered, and
whether it moved since. The main process reads them all, the others read the main one's. Who has been silent for
`stall_minutes`, or holds all others up for as long, is named, and the launch ends with exit code 1.

Before and after the loop only silence counts. Tests: `pytest tests/test_signs.py tests/test_faults.py`.
"""

from __future__ import annotations

import json
import os
import socket
import sys
import threading
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from datetime import timedelta
from typing import Any

from torch.distributed import PrefixStore, TCPStore

from ..configs.parse import say_error

LONGEST_PAUSE = 10.0  # seconds between two signs, at most


@dataclass
class Sign:
    """What a process tells of its main thread."""

    beat: int = 0  # signs so far
    entered: int = 0  # exchanges with the others: the same number everywhere
    moved: int = 0  # anything else that it did
    at: str = "the start"
    host: str = ""
    watched: bool = False  # whether standing still means anything
    done: bool = False


class Watch:
    """What one process remembers of all signs: when each changed last. `told` holds one entry per process, None = no sign
    yet. Times are the caller's, in seconds."""

    def __init__(self, world: int, limit: float, now: float) -> None:
        self.limit = limit
        self.told: list[Sign | None] = [None] * world
        self.heard = [now] * world  # last new sign
        self.moved = [now] * world  # last sign of a main thread that had moved

    def hear(self, rank: int, sign: Sign | None, now: float) -> None:
        before = self.told[rank]
        if sign is None or (before is not None and sign.beat == before.beat):
            return
        if before is None or not sign.watched or (sign.entered, sign.moved) != (before.entered, before.moved):
            self.moved[rank] = now
        self.told[rank], self.heard[rank] = sign, now

    def verdict(self, ranks: Sequence[int], now: float) -> str | None:
        """One line that names who is stuck, or None. Standing still is judged by whoever hears all."""
        silence = {r: now - self.heard[r] for r in ranks if not self._done(r)}
        if silent := [r for r, seconds in silence.items() if seconds > self.limit]:
            return f"{self._name(silent)}: no sign of life for {duration(self.limit)} (stall_minutes)"
        signs = [sign for sign in self.told if sign is not None]
        if (
            len(ranks) < len(self.told)
            or len(signs) < len(self.told)
            or max(silence.values(), default=0.0) > self.limit / 2
        ):
            return None
        if min(now - moved for moved in self.moved) <= self.limit:
            return None
        least = min(sign.entered for sign in signs)
        behind = [r for r, sign in enumerate(signs) if sign.entered == least]
        if len(behind) == len(signs):
            return f"no process has moved on for {duration(self.limit)} (stall_minutes): all wait at {signs[0].at}"
        return f"{self._name(behind)}: all others have waited for {duration(self.limit)} (stall_minutes)"

    def _done(self, rank: int) -> bool:
        sign = self.told[rank]
        return sign is not None and sign.done

    def _name(self, ranks: Sequence[int]) -> str:
        def one(rank: int) -> str:
            sign = self.told[rank]
            return f"{rank}" if sign is None else f"{rank} on {sign.host}, at {sign.at}"

        return f"process{'es' * (len(ranks) > 1)} {'; '.join(map(one, ranks))}"


class Thread(threading.Thread):
    """Tells and reads signs until the process ends; leaves it with exit code 1 at a verdict."""

    def __init__(self, store: Any, rank: int, world: int, limit: float) -> None:
        super().__init__(name="signs", daemon=True)
        self.store, self.rank, self.limit = store, rank, limit
        self.pause = min(limit / 10, LONGEST_PAUSE)
        self.ranks = range(world) if rank == 0 else (0,)
        self.watch = Watch(world, limit, time.monotonic())
        self.round = time.monotonic()  # when the last look at the store was over

    def run(self) -> None:
        threading.Thread(target=self._outlive, name="signs of the store", daemon=True).start()
        while not _mine.done:
            try:
                self.tell()
                line = self.read()
                if line:
                    self.store.set("verdict", line)
                    self.leave(line)
            except RuntimeError:  # the store has ended: so does the launch, as the main thread will see
                return
            self.round = time.monotonic()
            time.sleep(self.pause)

    def tell(self) -> None:
        _mine.beat += 1
        self.store.set(str(self.rank), json.dumps(asdict(_mine)))

    def read(self) -> str | None:
        if self.store.check(["verdict"]):
            return str(self.store.get("verdict").decode())
        for rank in self.ranks:
            if self.store.check([str(rank)]):
                told = Sign(**json.loads(self.store.get(str(rank))))
                self.watch.hear(rank, told, time.monotonic())
        return self.watch.verdict(self.ranks, time.monotonic())

    def _outlive(self) -> None:
        """The store may belong to the process that is stuck: then no look at it ends."""
        while not _mine.done:
            asleep = time.monotonic()
            time.sleep(self.pause)
            if time.monotonic() - asleep > 2 * self.pause + 1:
                continue  # this process was stopped itself
            if time.monotonic() - self.round > self.limit + 2 * self.pause:
                self.leave(
                    f"process 0, or who keeps the launch's store, has given no sign of life for {duration(self.limit)}"
                )

    def leave(self, line: str) -> None:
        say_error(f"{line}; the same command goes on from the newest checkpoint", 1)
        sys.stdout.flush()
        os._exit(1)  # the main thread waits in an exchange that nothing else ends


_mine = Sign()


def start(rank: int, world: int, minutes: float) -> None:
    """Tell and read signs from now on; nothing with one process, or with `minutes` = 0."""
    if world == 1 or not minutes:
        return
    limit = 60.0 * minutes
    _mine.host = socket.gethostname()
    address, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    store = TCPStore(address, port, is_master=False, wait_for_workers=False, timeout=timedelta(seconds=limit))
    attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    Thread(PrefixStore(f"draftsmith/signs/{attempt}", store), rank, world, limit).start()


def watched(value: bool) -> None:
    """Whether standing still counts from here on."""
    _mine.moved += 1
    _mine.watched = value


def at(where: str) -> None:
    """The main thread is here now."""
    _mine.at = where
    moved()


def moved() -> None:
    """The main thread did something."""
    _mine.moved += 1


def entering() -> None:
    """The main thread enters an exchange that all processes take part in."""
    _mine.entered += 1


def ended() -> None:
    """This process is about to end as it should."""
    _mine.done = True


def duration(seconds: float) -> str:
    return f"{seconds / 60:g} minutes" if seconds >= 60 else f"{seconds:g} seconds"
