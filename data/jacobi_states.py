"""Jacobi states of an answer, as a conversation's line holds them: the first state whole, of every later one what changed.

    {"id": ..., "messages": [...], "ids": [5, 6, 7, 8], "jacobi":
        {"block": 2, "start": "prompt", "augment": 0.0, "other": 0, "first": [9, 9, 3, 8], "passes": [[0, 5, 1, 4, 2, 7], [1, 6]]}}

`ids`: the conversation's last answer, the end of its turn included; blocks are counted from its first token. `first`: one
id per token of it. `passes[i]`: what the i-th pass changed, place and id in turn, ascending. All blocks advance in every
pass until they are the text, so that after i passes the first i places of each are, and after the last the state is `ids`. `other`: blocks whose text is not what
the model says, and which are the text in all states (inference/trajectories.py, which writes them). `augment`: chance
with which wrong tokens were replaced by the text's. Earlier answers of a conversation have no states.

Test: pytest tests/test_jacobi_states.py
"""

from __future__ import annotations

import itertools
from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor


@dataclass(frozen=True)
class JacobiStates:
    """States of one answer of n tokens; the fields are those of the line (module docstring), numbers in 32 bits."""

    block: int
    start: str
    first: array[int]
    passes: list[array[int]]
    augment: float = 0.0
    other: int = 0

    @property
    def blocks(self) -> int:
        """Blocks of the answer."""
        return -(-len(self.first) // self.block)

    @property
    def highest(self) -> int:
        """The highest token id in any state."""
        return max([*self.first, *(i for changes in self.passes for i in changes[1::2])])

    def record(self) -> dict[str, Any]:
        """What the line holds under `jacobi`."""
        return vars(self) | {"first": self.first.tolist(), "passes": [changes.tolist() for changes in self.passes]}


@dataclass(frozen=True)
class PlacedStates:
    """States of an answer whose first token stands at `at` in its sample. Held as stored, in a few bytes per token, and
    unpacked when a batch is made."""

    stored: JacobiStates
    at: int

    def dense(self, ids_n: Tensor) -> Tensor:
        """int64 [I, n], the first state first: the sample's ids wherever there is none, and cut where they are."""
        states_Im = unpack_states(self.stored, max(len(ids_n) - self.at, 0))
        dense_In = ids_n.repeat(len(states_Im), 1)
        dense_In[:, self.at : self.at + states_Im.shape[1]] = states_Im
        return dense_In


def pack_states(states_In: Tensor, block: int, start: str, augment: float = 0.0, other: int = 0) -> JacobiStates:
    """int64 [I, n], the last one the text -> what is stored; passes at the end that change nothing are left out."""
    passes: list[array[int]] = []
    for i in range(1, len(states_In)):
        places_X = (states_In[i] != states_In[i - 1]).nonzero()[:, 0]
        passes.append(array("i", torch.stack([places_X, states_In[i, places_X]], dim=1).flatten().tolist()))
    while passes and not passes[-1]:
        passes.pop()
    return JacobiStates(block, start, array("i", states_In[0].tolist()), passes, augment, other)


def unpack_states(stored: JacobiStates, length: int | None = None) -> Tensor:
    """int64 [I, n], the first state first and the text last; of the answer's first `length` tokens, None = of all."""
    first_n = torch.tensor(stored.first[:length].tolist(), dtype=torch.int64)
    passes = stored.passes[: len(first_n)]  # n tokens are the text after n passes at the latest
    states_In = first_n.repeat(1 + len(passes), 1)
    for i, changes in enumerate(passes, 1):
        if changes:
            at_X, ids_X = torch.frombuffer(changes, dtype=torch.int32).long().view(-1, 2).T
            kept_X = at_X < len(first_n)
            states_In[i:, at_X[kept_X]] = ids_X[kept_X]
    return states_In


def parse_states(raw: Any, ids: Sequence[int] | None, where: str) -> JacobiStates:
    """The object under `jacobi` of one line, checked against the answer's ids.

    Raises:
        ValueError: names `where` and what is wrong.
    """
    wrong = f"{where}: `jacobi` "
    if not isinstance(raw, dict) or raw.keys() != JacobiStates.__dataclass_fields__.keys():
        raise ValueError(f"{wrong}must be an object with {', '.join(JacobiStates.__dataclass_fields__)}")
    if not ids:
        raise ValueError(f"{wrong}needs the answer's `ids`")
    block, first, passes, other = raw["block"], raw["first"], raw["passes"], raw["other"]
    if not _is_count(block) or block < 1 or not isinstance(raw["start"], str):
        raise ValueError(
            f"{wrong}has block {block!r} and start {raw['start']!r}: a positive count and a name are needed"
        )
    if not _are_counts(first) or len(first) != len(ids):
        raise ValueError(f"{wrong}must have one token id per token of `ids` under `first`")
    if not _is_count(other) or not isinstance(raw["augment"], int | float) or not 0 <= raw["augment"] <= 1:
        raise ValueError(f"{wrong}has other {other!r} and augment {raw['augment']!r}: a count and a share are needed")
    if other > -(-len(ids) // block):
        raise ValueError(f"{wrong}has other {other}, more than there are blocks of {block} in {len(ids)} tokens")
    if not isinstance(passes, list):
        raise ValueError(f"{wrong}must have a list of passes")
    if len(passes) > (most := min(block, len(ids))):
        raise ValueError(
            f"{wrong}has {len(passes)} passes: blocks of {block} in {len(ids)} tokens are settled after {most}"
        )
    state = list(first)
    for number, changes in enumerate(passes, 1):
        places = changes[::2] if _are_counts(changes) and len(changes) % 2 == 0 else [len(state)]
        if any(b <= a for a, b in itertools.pairwise(places)) or any(p >= len(state) for p in places):
            raise ValueError(f"{wrong}pass {number} must hold ascending places below {len(state)}, each with its id")
        if any(p % block < number - 1 for p in places):
            raise ValueError(
                f"{wrong}pass {number} changes what is settled: after i passes the first i places of a block are the text"
            )
        for place, token in zip(places, changes[1::2], strict=True):
            state[place] = token
    if state != list(ids):
        raise ValueError(f"{wrong}does not end in `ids`: its last state is another text")
    kept = [array("i", changes) for changes in passes]
    return JacobiStates(block, raw["start"], array("i", first), kept, float(raw["augment"]), other)


def _is_count(value: Any) -> bool:
    return type(value) is int and 0 <= value < 2**31


def _are_counts(values: Any) -> bool:
    return isinstance(values, list) and all(map(_is_count, values))
