"""Dropout whose coins belong to a token, not to the order in which a process draws: keyed by (seed, epoch, sample id, place
in the document, copy, layer), so that neither batch, packing, accumulation nor the number of processes changes them.

A layer inside the target does not know whose rows it sees: the pass says it (`rows_of`). A pass that does not is refused.
Test: pytest tests/test_adapters.py
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

import torch
from torch import Tensor, nn

from ..data.batch import Batch
from .layers import keyed_uniform

STREAMS = 4096  # the first layer's stream of `keyed_uniform`; all others lie below
COPIES = 24  # bits of a place in the document; those above them are the copy's
_rows: ContextVar[Batch | None] = ContextVar("rows", default=None)


@contextmanager
def rows_of(samples_BT: Tensor, positions_BT: Tensor, copy_BT: Tensor | int, seed: int, epoch: int) -> Iterator[None]:
    """While open, passes are of these rows: int64 [B, T] sample ids and places in their documents, and which copy of the
    text each is of."""
    place_BT = positions_BT + (torch.as_tensor(copy_BT, device=positions_BT.device) << COPIES)
    token = _rows.set(Batch(place_BT, samples_BT >= 0, place_BT, samples_BT, epoch, seed))
    try:
        yield
    finally:
        _rows.reset(token)


class KeyedDropout(nn.Module):
    """Dropout of [B, T, D] in training; `layer` numbers the layers of a model."""

    def __init__(self, p: float, layer: int) -> None:
        super().__init__()
        self.p, self.layer = p, layer

    def forward(self, x_BTD: Tensor) -> Tensor:
        """Raises ValueError for rows that are not those of the pass."""
        if not self.training:
            return x_BTD
        rows = _rows.get()
        if rows is None or x_BTD.shape[:-1] != rows.ids_BT.shape:
            raise ValueError(
                f"adapters.dropout = {self.p:g}: this layer sees rows {tuple(x_BTD.shape[:-1])} whose samples are not known, so "
                "its coins would depend on how the batch is split; set adapters.dropout=0"
            )
        keep_BTD = keyed_uniform(rows, x_BTD.shape[-1], STREAMS + self.layer) >= self.p
        return x_BTD * keep_BTD / (1 - self.p)
