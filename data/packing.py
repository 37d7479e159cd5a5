"""Packing: several documents in one row, isolated from each other, in an order that no world size changes.

A row is a list of samples. Attention stays inside a document because every reader of a `Batch` masks by `samples_BT`;
positions restart in each. Padding is known by sample id -1 alone, never by a token id (pad and eos may be one id).
The global list of rows depends on (seed, epoch) only; rank r of n takes rows r, r + n, ... (`rows_of_rank`).
Tested by `pytest tests/test_data.py`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeVar

import torch

from ..kernels import rng
from .batch import Batch
from .encode import Sample

OPEN_ROWS = 64  # rows kept open while packing: fills rows to about 98 % and keeps the order close to the shuffle
_Row = TypeVar("_Row")


def pack(lengths: Sequence[int], row_length: int, seed: int, epoch: int) -> list[list[int]]:
    """Shuffle samples by (seed, epoch) and put them into rows of at most `row_length` tokens, best fit first.

    Returns rows of indices into `lengths`; every index appears exactly once.

    Raises:
        ValueError: a sample is longer than a row.
    """
    longest = max(lengths, default=0)
    if longest > row_length:
        raise ValueError(f"a sample of {longest} tokens does not fit a row of {row_length}; raise the row length")
    rows: list[list[int]] = []
    room: dict[int, int] = {}  # open row -> tokens left, oldest first
    for i in shuffled(len(lengths), seed, epoch):
        need = lengths[i]
        row = min((r for r in room if room[r] >= need), key=room.__getitem__, default=None)
        if row is None:
            row = len(rows)
            rows.append([])
            room[row] = row_length
            if len(room) > OPEN_ROWS:
                del room[min(room, key=room.__getitem__)]
        rows[row].append(i)
        if row in room:
            room[row] -= need
    return rows


def shuffled(n: int, seed: int, epoch: int) -> list[int]:
    """A permutation of range(n) from counter-based random numbers: the same on every machine, whatever the library."""
    draws_n = rng.uniform(seed, rng.ORDER, torch.arange(n), round=epoch)
    return torch.argsort(draws_n, stable=True).tolist()


def rows_of_rank(rows: Sequence[_Row], rank: int, world: int) -> list[_Row]:
    """The rows of a global batch that rank `rank` of `world` computes. The one place that decides it."""
    return list(rows[rank::world])


def make_batch(rows: Sequence[Sequence[Sample]], row_length: int | None, seed: int, epoch: int) -> Batch:
    """Rows of samples -> `Batch` [B, T], right-padded to `row_length` (None = the longest row).

    Raises:
        ValueError: no rows, or a row that is longer than `row_length`.
    """
    if not rows:
        raise ValueError("a batch needs at least one row")
    used = [sum(len(s.ids) for s in row) for row in rows]
    width = max(used) if row_length is None else row_length
    if max(used) > width:
        raise ValueError(f"a row of {max(used)} tokens does not fit {width}")
    shape = (len(rows), width)
    ids_BT = torch.zeros(shape, dtype=torch.int64)
    supervised_BT = torch.zeros(shape, dtype=torch.bool)
    positions_BT = torch.zeros(shape, dtype=torch.int64)
    samples_BT = torch.full(shape, -1, dtype=torch.int64)
    ordered = any(s.order is not None for row in rows for s in row)
    order_BT = torch.full(shape, -1, dtype=torch.int64) if ordered else None
    states = [[None if s.states is None else s.states.dense(s.ids) for s in row] for row in rows]
    deepest = max((len(dense_In) for row in states for dense_In in row if dense_In is not None), default=0)
    states_BIT = torch.zeros(len(rows), deepest, width, dtype=torch.int64) if deepest else None
    for b, row in enumerate(rows):
        at = 0
        for sample, dense_In in zip(row, states[b], strict=True):
            span = slice(at, at + len(sample.ids))
            ids_BT[b, span] = sample.ids
            supervised_BT[b, span] = sample.supervised
            positions_BT[b, span] = torch.arange(len(sample.ids))
            samples_BT[b, span] = sample.sample_id
            if order_BT is not None and sample.order is not None:
                order_BT[b, span] = sample.order
            if states_BIT is not None:
                states_BIT[b, :, span] = sample.ids
                if dense_In is not None:
                    states_BIT[b, : len(dense_In), span] = dense_In
            at = span.stop
    return Batch(ids_BT, supervised_BT, positions_BT, samples_BT, epoch, seed, order_BT, states_BIT=states_BIT)


def collate(samples: Sequence[Sample], seed: int = 0, epoch: int = 0) -> Batch:
    """One sample per row, right-padded to the longest."""
    return make_batch([[s] for s in samples], None, seed, epoch)
