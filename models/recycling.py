"""Token recycling: what the target thought of before, accepted or not, is what it may think of next.

Luo et al., "Turning Trash into Treasure: Accelerating Inference of Large Language Models with Token Recycling"
(arXiv:2408.08696). A matrix [V, 8] holds for every token the target's top 8 successors at the last place where it was
seen. A draft fills a static tree from the newest token on, breadth first, from the matrix; after the verification every
row of it, the rejected ones too, rewrites the line of its token.

The paper's template has 80 nodes in 6 levels (8, 21, 25, 15, 8, 3); the sizes are its own, which nodes they are follows
from a rule: path (r1, r2, ...) is the likelier the smaller (r1 + 1)(r2 + 1)... is. The runtime's `nodes`, `k` and
`width` cut it (levels in proportion); all of it takes nodes 80, k 6, width 8. A chain follows the top successors.

The paper keeps the matrix from request to request; here every request begins with an empty one, so that its answer
depends on nothing but itself, and learns the successors of its prompt's tokens first (`prompt`).
Where a token stands in several rows, the last row counts, by rule and not by the order in which a device writes.
Test: pytest tests/test_free.py
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from math import prod
from typing import Any

import torch
from torch import Tensor

from .drafter import Budget, Commit, Prefill, TargetFacts
from .layers import TargetHead, refuse_unbound
from .tree import Tree

ROWS = 64  # of a prompt, that go through the target's head at once


@dataclass(frozen=True)
class RecyclingConfig:
    """Settings of token recycling."""

    successors: int = 8
    """Successors kept per token (the paper's 8)."""
    levels: tuple[int, ...] = (8, 21, 25, 15, 8, 3)
    """Nodes of the template by depth (the paper's tree of 80)."""
    prompt: bool = True
    """Learn from the prompt before the first draft; costs the target's head on each of its tokens."""

    def __post_init__(self) -> None:
        if self.successors < 1:
            raise ValueError(f"recycling: successors={self.successors}: must be at least 1")
        if not self.levels or min(self.levels) < 1:
            raise ValueError(f"recycling: levels={list(self.levels)}: give one or more sizes of at least 1")


@dataclass(frozen=True)
class Layer:
    """One depth of a template: per node its parent's index (0 = anchor) and its rank among the parent's successors."""

    parents: tuple[int, ...]
    ranks: tuple[int, ...]


@lru_cache(maxsize=64)
def template(levels: tuple[int, ...], successors: int, budget: Budget) -> tuple[Layer, ...]:
    """The layers of the tree that fits the budget."""
    width = min(successors, budget.width)
    if width == 1:
        return tuple(Layer((d,), (0,)) for d in range(min(budget.depth, budget.nodes)))
    sizes = levels[: min(budget.depth, budget.nodes)]
    if sum(sizes) > budget.nodes:
        sizes = share(sizes, budget.nodes)
    layers: list[Layer] = []
    above: list[tuple[int, ...]] = [()]
    first = 0
    for size in sizes:
        paths = sorted(
            ((*path, rank) for path in above for rank in range(width)),
            key=lambda path: (prod(rank + 1 for rank in path), path),
        )[:size]
        paths.sort()
        where = {path: first + i for i, path in enumerate(above)}
        layers.append(Layer(tuple(where[path[:-1]] for path in paths), tuple(path[-1] for path in paths)))
        first, above = first + len(above), paths
    return tuple(layers)


def share(sizes: tuple[int, ...], total: int) -> tuple[int, ...]:
    """`total` >= len(sizes) nodes over levels in proportion to `sizes`, at least 1 each; what rounding leaves goes to
    the largest remainders."""
    exact = [1 + (size - 1) * (total - len(sizes)) / (sum(sizes) - len(sizes)) for size in sizes]
    left = total - sum(map(int, exact))
    more = sorted(range(len(sizes)), key=lambda d: (int(exact[d]) - exact[d], d))[:left]
    return tuple(int(x) + (d in more) for d, x in enumerate(exact))


class Recycling:
    """Token recycling; see `Proposer` in `models/drafter.py`. The state is int32 [B, V + 1, successors]: -1 = not known
    yet; the line behind the last token stays unknown and takes what is not to be written."""

    method = "recycling"
    Config = RecyclingConfig
    draft_needs = frozenset({"ids", "last_hidden", "teacher"})
    taps: tuple[int, ...] = ()
    d2t_W: Tensor | None = None
    parallel = 1
    max_depth: int | None = None

    def __init__(self, config: RecyclingConfig, facts: TargetFacts) -> None:
        self.config, self.facts = config, facts
        self.successors = min(config.successors, facts.tokens)
        self.target_head: TargetHead = refuse_unbound

    def bind(self, target: Any) -> None:
        """Take the target's head, for the prompt."""
        self.target_head = target.head

    def init(self, prefill: Prefill) -> Tensor:
        """Nothing is known."""
        shape = (prefill.rows, self.facts.vocab + 1, self.successors)
        return torch.full(shape, -1, dtype=torch.int32, device=prefill.device)

    def propose(self, state: Tensor, commit: Commit, budget: Budget, params: Any, rng: Any) -> tuple[Tensor, Tree]:
        """Learn from the last pass, then fill the template from the anchor on."""
        device = commit.ids_BT.device
        live_B = commit.counts_B > 0
        new_B = live_B  # was in no verification: the commit is the prompt
        if commit.verified is not None:
            seen = commit.verified
            self.learn(state, seen.tokens_BM, seen.valid_BM, seen.logits_BMV)
            new_B = live_B & ~seen.valid_BM.any(1)
        if self.config.prompt and bool(new_B.any()):
            assert commit.last_hidden_BTD is not None
            lines = state[new_B]
            known_BT = torch.arange(commit.ids_BT.shape[1], device=device) < commit.counts_B[:, None]
            parts = (x[new_B].split(ROWS, 1) for x in (commit.ids_BT, known_BT, commit.last_hidden_BTD))
            for ids_BM, valid_BM, hidden_BMD in zip(*parts, strict=True):
                self.learn(lines, ids_BM, valid_BM, self.target_head(hidden_BMD, None))
            state[new_B] = lines
        tokens_BX, valid_BX = commit.anchor_B[:, None], live_B[:, None]
        parents: list[int] = []
        depths: list[int] = []
        rows_B1 = torch.arange(len(live_B), device=device)[:, None]
        for depth, layer in enumerate(template(self.config.levels, self.successors, budget), 1):
            parent_Y, rank_Y = torch.tensor(layer.parents, device=device), torch.tensor(layer.ranks, device=device)
            next_BY = state[rows_B1, tokens_BX[:, parent_Y], rank_Y].long()
            valid_BX = torch.cat([valid_BX, valid_BX[:, parent_Y] & (next_BY >= 0)], 1)
            tokens_BX = torch.cat([tokens_BX, next_BY.clamp(min=0)], 1)
            parents += layer.parents
            depths += [depth] * len(layer.parents)
        if not bool(valid_BX[:, 1:].any()):  # a step without candidates is a plain one
            tokens_BX, valid_BX, parents, depths = tokens_BX[:, :1], valid_BX[:, :1], [], []
        tokens_BN, valid_BN = tokens_BX[:, 1:], valid_BX[:, 1:]
        parents_BN = torch.tensor(parents, dtype=torch.int64, device=device).expand_as(tokens_BN)
        depths_BN = torch.tensor(depths, dtype=torch.int64, device=device).expand_as(tokens_BN)
        if budget.width > 1:  # in a chain, unused nodes stay where they are; in a tree they hang on the anchor
            parents_BN, depths_BN = parents_BN * valid_BN, torch.where(valid_BN, depths_BN, 1)
        return state, Tree(tokens_BN, parents_BN, depths_BN, torch.zeros(tokens_BN.shape, device=device), valid_BN)

    def learn(self, state: Tensor, tokens_BM: Tensor, valid_BM: Tensor, logits_BMV: Tensor) -> None:
        """Rewrite the lines of the valid tokens with the top ids of their logits, in place."""
        best_BMk = logits_BMV[..., : self.facts.tokens].topk(self.successors, dim=-1).indices
        later_MM = torch.ones(tokens_BM.shape[1], tokens_BM.shape[1], dtype=torch.bool, device=state.device).triu(1)
        same_BMM = (tokens_BM[:, :, None] == tokens_BM[:, None, :]) & valid_BM[:, None, :] & later_MM
        line_BM = torch.where(valid_BM & ~same_BMM.any(-1), tokens_BM, self.facts.vocab)
        state.scatter_(1, line_BM[:, :, None].expand_as(best_BMk), best_BMk.to(state.dtype))
        state[:, self.facts.vocab] = -1

    def reset(self, state: Tensor, rows: Tensor) -> Tensor:
        """Forget what `rows` have seen."""
        state[rows] = -1
        return state
