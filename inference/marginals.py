"""Which nodes a tree has, given one distribution per depth: pure functions over candidates sorted by rank.

- `best_first`: DDTree (2604.12989). Where depths are independent, a path's chance is the product of its candidates'
  chances, and the expected number of accepted tokens is the sum of these products over the nodes: the best tree of n
  nodes is the n best paths, which a heap finds in O(n log n) steps. With scores of (parent candidate, child candidate)
  pairs it is the same heap, and the tree is the best under that chain.
- `capped`: JetSpec's accum_logp (2606.18394): the best node gets all its children at once, at most as many as the cap
  of their depth. `caps`: less fan-out where the drafter's first candidate leads its second by more.
- `state_trees`: PPD (2405.18628, dynamic sparse tree): the node that the target accepts decides, by the prompt tokens that hang on it,
  how deep the next draft can be. One tree per such *state*, and prompt tokens where they bring most in the long run.

Tests: tests/test_trees.py (against all trees, by brute force).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from heapq import heappop, heappush

import torch
from torch import Tensor

Choices = tuple[tuple[int, ...], ...]
Children = list[tuple[float, int]]  # (log-probability, rank) of candidates, best first
Table = list[list[Children]]  # per depth: the children of every candidate of the depth before, or one list for them all

CAP_SLOPE = CAP_GAP = 1.0  # beta and g0 of JetSpec's caps
_END = 1e-6  # chance that an answer ends: the next one begins in state 0, so that no state is for ever

# Chance that the r-th best candidate is the right one, given that its parent is: the shape of a typical drafter's ranks.
TYPICAL = (0.55, 0.14, 0.07, 0.045, 0.03, 0.022, 0.017, 0.013, 0.01, 0.008)


@dataclass(frozen=True)
class Grown:
    """A node: `parent` (0 = anchor, j + 1 = node j), its depth, its candidate's rank there, its log-probability."""

    parent: int
    depth: int
    rank: int
    log_prob: float


def _children(table: Table, depth: int, rank: int) -> Children:
    """Candidates below a node of this depth and rank (the anchor: 0, 0)."""
    if depth >= len(table):
        return []
    lists = table[depth]
    return lists[rank if len(lists) > 1 else 0]


def best_first(table: Table, nodes: int) -> list[Grown]:
    """The `nodes` paths of the highest product, a parent before its children. Log-probabilities must not exceed 0."""
    grown: list[Grown] = []
    heap: list[tuple[float, int, int, int, int, int, float]] = []  # -score, order of entry, then what is in it

    def push(parent: int, depth: int, rank: int, place: int, above: float) -> None:
        """The candidate at `place` among the children of a node of (depth, rank) with path score `above`."""
        children = _children(table, depth, rank)
        if place < len(children) and children[place][0] > float("-inf"):
            heappush(heap, (-above - children[place][0], len(grown) + len(heap), parent, depth, rank, place, above))

    push(0, 0, 0, 0, 0.0)
    while heap and len(grown) < nodes:
        _, _, parent, depth, rank, place, above = heappop(heap)
        own, child = _children(table, depth, rank)[place]
        grown.append(Grown(parent, depth + 1, child, own))
        push(parent, depth, rank, place + 1, above)
        push(len(grown), depth + 1, child, 0, above + own)
    return grown


def capped(table: Table, caps: Sequence[int], nodes: int) -> list[Grown]:
    """`caps[d]`: children of a node at depth d, at most."""
    grown: list[Grown] = []
    heap = [(0.0, 0, 0, 0)]  # -score, node, depth, rank
    while heap and len(grown) < nodes:
        score, parent, depth, rank = heappop(heap)
        for own, child in _children(table, depth, rank)[: caps[depth] if depth < len(caps) else 0]:
            if len(grown) < nodes and own > float("-inf"):
                grown.append(Grown(parent, depth + 1, child, own))
                heappush(heap, (score - own, len(grown), depth + 1, child))
    return grown


def fan_out_caps(log_probs_BKC: Tensor) -> Tensor:
    """int64 [B, K]: max(1, round(C * sigmoid(-beta * (gap - g0)))), gap = lead of the first candidate over the second."""
    c = log_probs_BKC.shape[2]
    if c == 1:
        return torch.ones(log_probs_BKC.shape[:2], dtype=torch.int64, device=log_probs_BKC.device)
    gap_BK = (log_probs_BKC[:, :, 0] - log_probs_BKC[:, :, 1]).nan_to_num(nan=0.0)  # neither exists
    return (c * torch.sigmoid(-CAP_SLOPE * (gap_BK - CAP_GAP))).round().clamp(min=1).long()


# Trees by state


@dataclass(frozen=True)
class StateTree:
    """The tree of one state: paths of ranks, parents first; `tokens[m]` prompt tokens on node m (0 = anchor)."""

    paths: Choices
    tokens: tuple[int, ...]


def chances_at(chances: Sequence[Sequence[float]], depth: int, width: int) -> Sequence[float]:
    """The ranks' chances at a depth (1 = below the anchor); depths that were not measured are like the last one."""
    return chances[min(depth, len(chances)) - 1][:width]


def likeliest_paths(
    chances: Sequence[Sequence[float]], depth: int, width: int, nodes: int
) -> list[tuple[float, tuple[int, ...]]]:
    """The `nodes` paths of the highest product of chances, with it, in order of depth and rank."""
    best: list[tuple[float, tuple[int, ...]]] = []
    frontier: list[tuple[float, tuple[int, ...]]] = [(1.0, ())]
    for d in range(1, depth + 1):
        ranks = chances_at(chances, d, width)
        frontier = [(chance * p, (*path, r)) for chance, path in frontier for r, p in enumerate(ranks)]
        frontier = sorted(frontier, key=lambda x: (-x[0], x[1]))[:nodes]
        best += frontier
    best.sort(key=lambda x: (-x[0], len(x[1]), x[1]))
    return sorted(best[:nodes], key=lambda x: (len(x[1]), x[1]))


@lru_cache(maxsize=1024)
def state_trees(
    chances: tuple[tuple[float, ...], ...], depth: int, width: int, nodes: int, per_node: int, tokens: int
) -> tuple[tuple[StateTree, ...], float]:
    """The trees of the states 0 .. depth, and the tokens per verification that they promise in the long run.

    State s: s levels are there. Each tree has at most `nodes` nodes and `tokens` prompt tokens, at most `per_node` on
    each. Policy iteration for the average reward: with h[s] = what it is worth to be in state s, a prompt token goes
    where (chance that the walk stops at the node) * (gain of h) is highest; h follows from where the trees then lead.
    """
    reach = [dict[tuple[int, ...], float]() for _ in range(depth + 1)]
    for s in range(1, depth + 1):
        reach[s] = {path: chance for chance, path in likeliest_paths(chances, s, width, nodes)}
    reward = torch.tensor([1 + sum(paths.values()) for paths in reach], dtype=torch.float64)
    stops = []
    for paths in reach:
        left: dict[tuple[int, ...], float] = {(): 1.0} | paths
        for path, chance in paths.items():
            left[path[:-1]] -= chance
        stops.append([max(0.0, chance) for chance in left.values()])
    worth = reward.tolist()
    allotted: list[tuple[int, ...]] = []
    gain = 1.0
    for _ in range(4 * (depth + 1)):
        before, allotted = allotted, [_allot(stop, worth[: per_node + 1], tokens) for stop in stops]
        if allotted == before:
            break
        # gain + h[s] = reward[s] + sum over s' of P[s, s'] h[s'], with h[0] = 0; in its place the gain is unknown.
        system = torch.eye(depth + 1, dtype=torch.float64)
        for s, (stop, counts) in enumerate(zip(stops, allotted, strict=True)):
            for chance, count in zip(stop, counts, strict=True):
                system[s, count] -= chance * (1 - _END)
        system[:, 0] = 1.0
        solved = torch.linalg.solve(system, reward).tolist()
        gain, worth = solved[0], [0.0, *solved[1:]]
    return tuple(StateTree(tuple(p), a) for p, a in zip(reach, allotted, strict=True)), gain


def _allot(stop: Sequence[float], worth: Sequence[float], tokens: int) -> tuple[int, ...]:
    """Prompt tokens per node, one after the other to where the next one brings most."""
    counts = [0] * len(stop)
    heap: list[tuple[float, int]] = []

    def push(node: int) -> None:
        if counts[node] + 1 < len(worth):
            heappush(heap, (-stop[node] * (worth[counts[node] + 1] - worth[counts[node]]), node))

    for node in range(len(stop)):
        push(node)
    for _ in range(tokens):
        if not heap or heap[0][0] > 0:
            break
        node = heappop(heap)[1]
        counts[node] += 1
        push(node)
    return tuple(counts)


@lru_cache(maxsize=64)
def split_rows(
    chances: tuple[tuple[float, ...], ...], depth: int, width: int, rows: int, per_node: int, members: int
) -> tuple[int, int]:
    """(nodes, prompt tokens) that share `rows` best; a prompt token takes `members` rows."""
    splits = [(n, (rows - n) // members) for n in range(rows + 1)]
    return max(splits, key=lambda split: state_trees(chances, depth, width, split[0], per_node, split[1])[1])
