"""Reuse of what earlier prompts and answers have in common with a new prompt: turns of one talk, system prompts.

A row of the engine that is done leaves its keys and values here, for the tokens that stand in the cache. A newcomer
whose prompt begins as a kept row does starts from a copy of them, and only the rest of its prompt runs. Keys and values
of a token depend on the tokens before it alone, so answers are the same: token for token in float64; in other dtypes low
bits of a pass depend on its width, as they depend on its rows.

Of what else the target says of those tokens the drafter's `draft_needs` decides (DESIGN, Drafter): `taps` and
`last_hidden` are kept beside the keys and values, so that every drafter is handed the whole prompt with all it needs and
fills its own caches as if nothing had been skipped; `kv` and `module` read the target's cache, and `ids` are ids.

Test: pytest tests/test_prefixes.py
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

LEAST = 16  # shared tokens from which reuse pays: rows that start at different places need masks
PREFILL_TOKENS = 2048  # of newcomers that are read together, padding included; one prompt may be longer


@dataclass(frozen=True)
class Kept:
    """What is known of the first tokens of a row: ids [n], keys and values [layers, 2, kv_heads, n, head_dim], and taps
    [n, P, D] and last hidden states [n, D] where the drafter needs them."""

    ids: Any
    kv: Tensor
    states: tuple[Tensor | None, Tensor | None]

    @property
    def bytes(self) -> int:
        """Memory that it takes."""
        return self.ids.nbytes + sum(x.numel() * x.element_size() for x in (self.kv, *self.states) if x is not None)


@dataclass(frozen=True)
class Start:
    """Where a newcomer begins: behind the first `count` tokens of a kept row, or at the beginning of its prompt."""

    count: int = 0
    kept: Kept | None = None


class Prefixes:
    """Kept rows, the one that was used last at the end; the first are forgotten where `limit` bytes are exceeded.

    `hits`: newcomers that began behind a prefix, since the start.
    """

    def __init__(self, limit: int, least: int = LEAST) -> None:
        self.limit, self.least = limit, least
        self.rows: list[Kept] = []
        self.bytes = self.hits = 0

    def find(self, prompt: Sequence[int]) -> Start:
        """The longest beginning of a prompt that is known, short of its last token, whose logits are asked for."""
        ids, best = np.asarray(prompt), Start()
        for kept in self.rows:
            count = _shared(kept.ids, ids[:-1])
            if count > best.count:
                best = Start(count, kept)
        if best.count < self.least:
            return Start()
        return best

    def use(self, start: Start) -> None:
        """Count a newcomer's start; its row is the last to be forgotten."""
        if start.kept is None:
            return
        self.hits += 1
        at = next((i for i, kept in enumerate(self.rows) if kept is start.kept), None)
        if at is not None:
            self.rows.append(self.rows.pop(at))

    def keep(self, ids: Sequence[int], kv_L2HTd: Tensor, states: tuple[Tensor | None, Tensor | None]) -> None:
        """Copy what is known of a row that is done; a kept row that it goes on from makes room for it. NaN is not kept."""
        if len(ids) < self.least:
            return
        new = Kept(np.asarray(ids), kv_L2HTd, states)
        for at in range(len(self.rows) - 1, -1, -1):
            shared = _shared(self.rows[at].ids, new.ids)
            if shared == len(new.ids):  # nothing new
                self.rows.append(self.rows.pop(at))
                return
            if shared == len(self.rows[at].ids):
                self.bytes -= self.rows.pop(at).bytes
        if new.bytes > self.limit or not all(x is None or bool(x.isfinite().all()) for x in (kv_L2HTd, *states)):
            return
        taps, hidden = (None if x is None else x.clone() for x in states)
        self.rows.append(Kept(new.ids, kv_L2HTd.clone(), (taps, hidden)))
        self.bytes += new.bytes
        while self.bytes > self.limit:
            self.bytes -= self.rows.pop(0).bytes

    def clear(self) -> None:
        """Forget all rows."""
        self.rows, self.bytes = [], 0


def _shared(a: Any, b: Any) -> int:
    """How many tokens two rows of ids have in common at their beginning."""
    n = min(len(a), len(b))
    other = np.flatnonzero(a[:n] != b[:n])
    return int(other[0]) if len(other) else n


def read_together(lengths: Sequence[int], starts: Sequence[Start], longest: int) -> int:
    """How many newcomers, with prompts of these lengths, the next pass reads: the first at least, then those that fit it.

    Those that begin behind a prefix are not read with those that do not, whose pass is then what it would be without
    reuse. Rows are as long as the longest start and the longest rest together, which must not exceed `longest`.
    """
    rows = start = rest = 0
    for length, begin in zip(lengths, starts, strict=True):
        start, rest = max(start, begin.count), max(rest, length - begin.count)
        alike = (begin.kept is None) == (starts[0].kept is None)
        if rows and not (alike and (rows + 1) * rest <= PREFILL_TOKENS and start + rest <= longest):
            break
        rows += 1
    return rows


class States:
    """What drafters need to know of every committed token of the rows that run, beside keys and values: taps and last
    hidden states, as far as `needs` (a drafter's `draft_needs`) has them. `rows` x `slots` tokens, from the first pass on.
    """

    def __init__(self, needs: frozenset[str], rows: int, slots: int) -> None:
        self.wanted = ("taps" in needs, "last_hidden" in needs)
        self.rows, self.slots = rows, slots
        self.memory: list[Tensor | None] = [None, None]

    def put(self, first: int, positions_BT: Tensor, taps_BTPD: Tensor | None, hidden_BTD: Tensor | None) -> None:
        """What the rows from `first` on say of the tokens at some positions. What lies behind a row's last token is of no
        account, the next call overwrites it."""
        b = len(positions_BT)
        rows_B1 = torch.arange(first, first + b, device=positions_BT.device)[:, None]
        for i, new_BTX in enumerate((taps_BTPD, hidden_BTD)):
            if self.wanted[i]:
                assert new_BTX is not None, "the drafter says that it needs this"
                self._of(i, new_BTX.shape[2:], new_BTX)[rows_B1, positions_BT] = new_BTX

    def fill(self, row: int, start: Start) -> None:
        """Take the first tokens of a kept row."""
        if start.kept is None:
            return
        for i, known_TX in enumerate(start.kept.states):
            if self.wanted[i]:
                assert known_TX is not None
                self._of(i, known_TX.shape[1:], known_TX)[row, : start.count] = known_TX[: start.count]

    def _of(self, i: int, shape: torch.Size, like: Tensor) -> Tensor:
        memory = self.memory[i]
        if memory is None:
            memory = self.memory[i] = like.new_zeros(self.rows, self.slots, *shape)
        return memory

    def read(self, first: int, rows: int, length: int) -> tuple[Tensor | None, Tensor | None]:
        """Taps [rows, length, P, D] and last hidden states [rows, length, D] of some rows; a copy."""
        taps, hidden = (None if x is None else x[first : first + rows, :length].clone() for x in self.memory)
        return taps, hidden

    def row(self, row: int, length: int) -> tuple[Tensor | None, Tensor | None]:
        """The same of the first tokens of one row, as views."""
        taps, hidden = (None if x is None else x[row, :length] for x in self.memory)
        return taps, hidden

    def arrange(self, rows: Sequence[int], lengths: Sequence[int]) -> None:
        """Row i becomes what row `rows[i]` >= i was, which has `lengths[rows[i]]` tokens (`Cache.arrange`)."""
        for memory in self.memory:
            for to, row in enumerate(rows):
                if memory is not None and row > to:
                    memory[to, : lengths[row]] = memory[row, : lengths[row]]
