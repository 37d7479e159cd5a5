"""Parts that the training-free drafters share: a row's new tokens, pools of n-grams, and the candidate tree of a row
while it grows.

Look-ups walk through lists on the host; what a step costs is a few microseconds per candidate, not a forward pass.
Test: pytest tests/test_free.py
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from .drafter import Budget, Commit
from .tree import Tree

Pool = dict[int, list[tuple[int, ...]]]  # first token -> what follows it, the newest last


def news(commit: Commit, begun: Sequence[bool]) -> list[list[int]]:
    """The tokens of each row that a drafter has not seen, the anchor last; [] for a row that is done.

    `begun[b]`: an earlier commit of this row was seen, so the first of its new ids is the anchor of that time.
    """
    counts, anchors = commit.counts_B.tolist(), commit.anchor_B.tolist()
    return [
        [*ids[int(seen) : count], anchor] if count else []
        for ids, count, anchor, seen in zip(commit.ids_BT.tolist(), counts, anchors, begun, strict=True)
    ]


def collect(pool: Pool, gram: tuple[int, ...], most: int) -> None:
    """Put an n-gram into a pool as its newest; of those with its first token the oldest goes when there are too many."""
    known = pool.setdefault(gram[0], [])
    if gram[1:] in known:
        known.remove(gram[1:])
    known.append(gram[1:])
    del known[:-most]


class Sketch:
    """The candidate tree of one row while it grows. Node j has index j + 1, the anchor is 0; no two children of a node
    have the same token. What exceeds the budget, and ids that the tokenizer lacks (`tokens` and beyond), find no place.
    """

    def __init__(self, budget: Budget, tokens: int) -> None:
        self.budget, self.limit = budget, tokens
        self.tokens: list[int] = []
        self.parents: list[int] = []
        self.log_probs: list[float] = []
        self.depths = [0]  # the anchor first, as in `children`
        self.children: list[dict[int, int]] = [{}]

    def add(self, parent: int, token: int, log_prob: float = 0.0) -> int | None:
        """The index of the child of `parent` with this token, made if it is new; None where there is no place."""
        brothers, depth = self.children[parent], self.depths[parent] + 1
        if token in brothers:
            return brothers[token]
        full = len(self.tokens) >= self.budget.nodes or len(brothers) >= self.budget.width
        if full or depth > self.budget.depth or not 0 <= token < self.limit:
            return None
        self.tokens.append(token)
        self.parents.append(parent)
        self.log_probs.append(log_prob)
        self.depths.append(depth)
        self.children.append({})
        brothers[token] = len(self.tokens)
        return len(self.tokens)

    def add_path(self, path: Iterable[int]) -> None:
        """A line of tokens from the anchor, as far as there is place."""
        node = 0
        for token in path:
            child = self.add(node, token)
            if child is None:
                return
            node = child


def to_tree(rows: Sequence[Sketch], device: torch.device) -> Tree:
    """The rows' candidates side by side, N = those of the largest (possibly 0). A tree of chains is a chain."""
    n = max(len(row.tokens) for row in rows)
    chain = all(parent == j for row in rows for j, parent in enumerate(row.parents))

    def column(values: Sequence[Sequence[float]], filler: Sequence[float], dtype: torch.dtype) -> Tensor:
        return torch.tensor([[*x, *filler[len(x) :]] for x in values], dtype=dtype, device=device).view(len(rows), n)

    steps = range(n)  # an unused node goes on with the chain, or hangs on the anchor
    return Tree(
        column([row.tokens for row in rows], [0] * n, torch.int64),
        column([row.parents for row in rows], steps if chain else [0] * n, torch.int64),
        column([row.depths[1:] for row in rows], range(1, n + 1) if chain else [1] * n, torch.int64),
        column([row.log_probs for row in rows], [0.0] * n, torch.float32),
        column([[True] * len(row.tokens) for row in rows], [False] * n, torch.bool),
    )
