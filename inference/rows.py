"""Rows of a batch that come and go: the same move made on everything that has one entry per row.

Tests: tests/test_engine.py.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields, is_dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from ..models.cache import Cache
from ..models.drafter import Commit, ExtraOut, Verified


def closed_up(stays: Sequence[bool]) -> list[int]:
    """Which old row each new row is, when those that go are replaced by the last that stay: as few moves as possible, and
    every row moves to a place before its own."""
    rows = [i for i, here in enumerate(stays) if here]
    behind = [i for i in rows if i >= len(rows)]
    return [i if stays[i] else behind.pop() for i in range(len(rows))]


def take_rows(state: Any, rows: list[int], grown: int) -> Any:
    """A drafter's state, or part of it, with `rows` of the old ones and `grown` empty ones behind, which `reset` is to
    make new. Tensors and lists have one entry per row, a number is said of all rows; caches are changed in place."""
    if state is None or isinstance(state, int):
        return state
    if isinstance(state, Cache):
        state.arrange(rows, grown)
        return state
    if isinstance(state, Tensor):
        return torch.cat([state[rows], state.new_zeros(grown, *state.shape[1:])])
    if isinstance(state, list):
        return [*(state[i] for i in rows), *[None] * grown]
    if is_dataclass(state) and not isinstance(state, type):
        return replace(state, **{f.name: take_rows(getattr(state, f.name), rows, grown) for f in fields(state)})
    raise ValueError(f"a drafter's state holds a {type(state).__name__}, whose rows cannot come and go one by one")


def join(old: Commit, new: Commit) -> Commit:
    """The rows of two commits, one behind the other: a newcomer's are its prompt. `kv` is the new one's.

    Newcomers were in no verification: their part of `extra_out` and `verified` is not valid.
    """
    b = len(new.counts_B)
    return Commit(
        _stack(old.ids_BT, new.ids_BT),
        torch.cat([old.counts_B, new.counts_B]),
        _positions(old.positions_BT, new.positions_BT),
        torch.cat([old.anchor_B, new.anchor_B]),
        _optional(old.taps_BTPD, new.taps_BTPD),
        _optional(old.last_hidden_BTD, new.last_hidden_BTD),
        new.kv,
        _absent(old.extra_out, b),
        _absent(old.verified, b),
    )


def _absent(old: Any, grown: int) -> Any:
    """`ExtraOut` or `Verified` with rows of zeros behind, which are not valid."""
    assert old is None or isinstance(old, ExtraOut | Verified)
    if old is None:
        return None
    return replace(old, **{f.name: _grow(getattr(old, f.name), grown) for f in fields(old)})


def _grow(x: Any, grown: int) -> Any:
    if isinstance(x, Tensor):
        return torch.cat([x, x.new_zeros(grown, *x.shape[1:])])
    return x if x is None else replace(x, **{f.name: _grow(getattr(x, f.name), grown) for f in fields(x)})


def _optional(old: Tensor | None, new: Tensor | None) -> Tensor | None:
    return None if old is None or new is None else _stack(old, new)


def _stack(old_BT: Tensor, new_BT: Tensor) -> Tensor:
    """Rows [B, T, ...] of two lengths, the shorter padded with zeros."""
    t = max(old_BT.shape[1], new_BT.shape[1])
    tail = (0, 0) * (old_BT.dim() - 2)
    return torch.cat([pad(x, (*tail, 0, t - x.shape[1])) for x in (old_BT, new_BT)])


def _positions(old_BT: Tensor, new_BT: Tensor) -> Tensor:
    """The same of positions, which go on in the padding."""
    t = max(old_BT.shape[1], new_BT.shape[1])
    steps_T = torch.arange(t, device=old_BT.device)
    return torch.cat([x[:, :1] + steps_T for x in (old_BT, new_BT)])
