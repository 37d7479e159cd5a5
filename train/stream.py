"""The order of the data: a pure function of (seed, epoch, window), so that a resume needs two integers.

An epoch is a list of packed rows (`data.packing.pack`); `rows` of them are a micro-batch, `accumulate` micro-batches
the window of one optimiser step. The last micro-batch and the last window of an epoch may be shorter: the loop
normalises by the counts that are really there. Every process takes its share of each micro-batch, so that all of them
see the same number of windows and micro-batches. Tests: `pytest tests/test_train.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache

import torch

from ..data.batch import Batch
from ..data.encode import Sample
from ..data.packing import make_batch, pack, rows_of_rank
from ..data.rolling import Rolling

AHEAD = 8  # windows whose states are fetched while earlier ones are trained on


class Stream:
    """Windows of training batches for one process.

    `samples` must be the same list, in the same order, in every process. `blocks` of indices into them are read one after
    another, each shuffled and packed for itself; None = all are one block. `rolling`: states that are captured meanwhile.
    """

    def __init__(
        self,
        samples: Sequence[Sample],
        *,
        row_length: int,
        rows: int,
        accumulate: int,
        seed: int,
        rank: int = 0,
        world: int = 1,
        blocks: Sequence[Sequence[int]] | None = None,
        rolling: Rolling | None = None,
    ) -> None:
        if not samples:
            raise ValueError("no training samples: the data source gave none with a supervised token")
        self.samples = samples
        self.lengths = [len(s.ids) for s in samples]
        self.row_length, self.rows, self.accumulate = row_length, rows, accumulate
        self.seed, self.rank, self.world = seed, rank, world
        self.blocks, self.rolling = blocks, rolling
        self.announce: Callable[[list[int]], None] | None = None  # told which samples this process reads next
        self.rows_of_epoch = lru_cache(2)(self._rows_of_epoch)

    def _rows_of_epoch(self, epoch: int) -> list[list[int]]:
        if self.blocks is None:
            return pack(self.lengths, self.row_length, self.seed, epoch)
        rows = []
        for block in self.blocks:
            packed = pack([self.lengths[i] for i in block], self.row_length, self.seed, epoch)
            rows += [[block[i] for i in row] for row in packed]
        return rows

    def windows(self, epoch: int) -> int:
        """Optimiser steps in this epoch, a last partial one included."""
        micro_batches = -(-len(self.rows_of_epoch(epoch)) // self.rows)
        return -(-micro_batches // self.accumulate)

    def window(self, epoch: int, index: int) -> list[Batch]:
        """This process's share of window `index` of `epoch`: one batch per micro-batch, each at least one row high
        (a row of padding where this process has none, so that it still takes part in every collective)."""
        if self.announce is not None:
            self.announce(self.ahead(epoch, index))
        rows = self._rows_of_window(epoch, index)
        return [self._batch(rows[at : at + self.rows], epoch) for at in range(0, len(rows), self.rows)]

    def ahead(self, epoch: int, index: int) -> list[int]:
        """Ids of this process's samples in window `index` and the `AHEAD` windows that follow it, in order."""
        found = []
        for _ in range(1 + AHEAD):
            if index >= self.windows(epoch):
                epoch, index = epoch + 1, 0
            rows = self._rows_of_window(epoch, index)
            micro_batches = [rows[at : at + self.rows] for at in range(0, len(rows), self.rows)]
            mine = [row for one in micro_batches for row in rows_of_rank(one, self.rank, self.world)]
            found += [self.samples[i].sample_id for row in mine for i in row]
            index += 1
        return found

    def _rows_of_window(self, epoch: int, index: int) -> list[list[int]]:
        size = self.rows * self.accumulate
        return self.rows_of_epoch(epoch)[index * size : (index + 1) * size]

    def _batch(self, rows: list[list[int]], epoch: int) -> Batch:
        mine = rows_of_rank(rows, self.rank, self.world) or [[]]
        return make_batch([[self.samples[i] for i in row] for row in mine], self.row_length, self.seed, epoch)

    def steps(self, epochs: float) -> int:
        """Optimiser steps of so many epochs (at least one)."""
        whole = int(epochs)
        part = round((epochs - whole) * self.windows(whole)) if epochs > whole else 0
        return max(sum(self.windows(e) for e in range(whole)) + part, 1)


def sample_ids(batches: Sequence[Batch]) -> list[int]:
    """The distinct sample ids of some batches, padding left out, in order."""
    ids = torch.cat([b.samples_BT.flatten() for b in batches]).unique()
    return [int(i) for i in ids if i >= 0]
