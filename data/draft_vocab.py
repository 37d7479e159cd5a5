"""The draft vocabulary: which target ids a drafter can say. Counts -> sorted ids, offsets, coverage.

EAGLE-3 (Li et al. 2025, §4) keeps the most frequent answer tokens. Ties go to the smaller id, ids that never occur
fill up what is missing, and every stop id is always in, so that the set depends on the data alone.
Tested by `pytest tests/test_draft_vocab.py`.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

from .encode import Sample


def count_supervised(samples: Iterable[Sample], vocab: int) -> Tensor:
    """How often each target id is supervised, int64 [V].

    Raises:
        ValueError: a token id is not below `vocab`.
    """
    counts_V = torch.zeros(vocab, dtype=torch.int64)
    for sample in samples:
        ids = sample.ids[sample.supervised]
        if len(ids) and int(ids.max()) >= vocab:
            raise ValueError(f"token id {int(ids.max())} in sample {sample.sample_id}; the target has {vocab} rows")
        counts_V += torch.bincount(ids, minlength=vocab)
    return counts_V


def choose_draft_ids(counts_V: Tensor, size: int, always: Iterable[int] = (), allowed: int | None = None) -> Tensor:
    """The `size` most frequent ids, sorted ascending, int64 [W].

    Args:
        counts_V: occurrences per target id.
        size: W.
        always: ids that must be in (stop ids), even at count 0.
        allowed: ids from here on are never drafted (rows of the embedding that no token has).

    Raises:
        ValueError: `size` above the number of allowed ids or below the number of `always` ids, or one of them banned.
    """
    allowed = len(counts_V) if allowed is None else min(allowed, len(counts_V))
    must = sorted(set(always))
    if size > allowed:
        raise ValueError(
            f"draft vocabulary of {size} ids; the target has {allowed}. Give at most that, or null for all"
        )
    if must and (must[0] < 0 or must[-1] >= allowed):
        raise ValueError(f"stop id {must[0] if must[0] < 0 else must[-1]} is outside the {allowed} allowed ids")
    if size < max(len(must), 1):
        raise ValueError(f"draft vocabulary of {size} ids cannot hold the {len(must)} stop ids; raise it")
    rank_A = counts_V[:allowed].clone()
    rank_A[must] = rank_A.max() + 1
    order_A = torch.argsort(rank_A, descending=True, stable=True)
    return order_A[:size].sort().values


def coverage(counts_V: Tensor, draft_ids_W: Tensor | None) -> float:
    """Share of supervised tokens that the draft vocabulary (None = all ids) can say."""
    total = int(counts_V.sum())
    if draft_ids_W is None or total == 0:
        return 1.0
    return int(counts_V[draft_ids_W].sum()) / total


def offsets(draft_ids_W: Tensor) -> Tensor:
    """`d2t` as serving engines store it, int64 [W]: target id minus draft id."""
    return draft_ids_W - torch.arange(len(draft_ids_W))
