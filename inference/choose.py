"""Which draft is the fastest: measured costs and chances of acceptance -> tokens per second of every shape.

A step of the decode loop costs `start` and one `extend` per further level that the drafter is asked for, what building a
level costs beside these, the target's pass over all rows (anchor, nodes, prompt rows), and choosing and committing. It
brings the target's own token and what is kept of the draft. Three kinds of shapes compete, and a fourth where the drafter
has prompt tokens:

- `chain` of K tokens: 1 + sum over depths of the product of the chances of rank 0.
- `cut`: a chain that stops drafting where the drafter is unsure; replayed over the drafts of the calibration.
- `static`: of every size and depth the best tree (inference/sequoia.py), under positional acceptance.
- `ppd`: nodes and prompt tokens by state (marginals.state_trees), with the measured chances.

Pure functions. Tests: tests/test_choose.py.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from operator import mul
from statistics import fmean
from typing import Any

from .marginals import Choices, state_trees
from .sequoia import best_trees
from .speculate import DecodeConfig
from .trees import TREES, Plan, fits

Chances = tuple[tuple[float, ...], ...]

PRIOR = 8  # drafts' worth of the depth above that an acceptance rate leans on (ours): deep levels are rarely reached
THRESHOLDS = tuple(i / 10 for i in range(1, 10))  # of `cut`, tried


@dataclass(frozen=True)
class Line:
    """One drafted chain of the calibration: by depth how sure the drafter was before the token was taken, and how many
    tokens the target kept."""

    sure: tuple[float, ...]
    kept: int


@dataclass(frozen=True)
class Costs:
    """Seconds of the parts of a step, for a batch of `batch` rows.

    verify: of "chain" (causal) and "tree" (masked) passes, rows per request -> seconds of the target's pass and head.
    start: the drafter's first level (all levels of drafters that give them at once).
    extend: nodes per request -> seconds of one further level.
    build: of "chain" and "tree", per level what is done beside the drafter's own passes.
    commit: of "plain", "chain" and "tree", choosing and committing.
    """

    verify: Mapping[str, Mapping[int, float]]
    start: float
    extend: Mapping[int, float]
    build: Mapping[str, float]
    commit: Mapping[str, float]
    batch: int = 1

    @property
    def plain(self) -> float:
        """A step of plain decoding."""
        return interpolate(self.verify["chain"], 1) + self.commit["plain"]

    def draft(self, kind: str, depth: int, widths: Sequence[int]) -> float:
        """Drafting `depth` levels, of which `widths` are asked for, with so many nodes each."""
        return self.start + sum(interpolate(self.extend, w) for w in widths) + depth * self.build[kind]

    def passed(self, kind: str, rows: int) -> float:
        """Verifying and committing."""
        return interpolate(self.verify[kind], rows) + self.commit[kind]


@dataclass(frozen=True)
class Candidate:
    """A shape with what is expected of it: `tokens` per verification and request (the target's own counted), `seconds` per
    step of the batch."""

    kind: str
    decode: DecodeConfig
    tokens: float
    seconds: float
    batch: int = 1

    @property
    def rate(self) -> float:
        """Tokens per second, prompts not counted."""
        return self.batch * self.tokens / self.seconds


def interpolate(table: Mapping[int, float], at: int) -> float:
    """Piecewise linear between measured points, constant outside them."""
    points = sorted(table)
    if not points:
        raise ValueError(f"no cost was measured, {at} is asked for")
    if at <= points[0]:
        return table[points[0]]
    for low, high in pairwise(points):
        if at <= high:
            return table[low] + (table[high] - table[low]) * (at - low) / (high - low)
    return table[points[-1]]


def acceptance(tried: Sequence[int], ranks: Sequence[Sequence[int]], depth: int, width: int) -> Chances:
    """Chances of `depth` depths and `width` ranks from counts: `tried[d]` drafts reached depth d + 1, `ranks[d][r]` of them
    had the right token at rank r. A depth leans on the one above as if that had been seen `PRIOR` times more.

    Raises:
        ValueError: nothing was tried.
    """
    if not tried or not tried[0]:
        raise ValueError(
            "no draft was tested: the drafter had nothing to say, or the answers end at once; give longer ones "
            "(--max_new_tokens) or other prompts (--file)"
        )
    rows: list[tuple[float, ...]] = []
    for d in range(depth):
        n, counts = (tried[d], ranks[d][:width]) if d < len(tried) else (0, [])
        hits = [*counts, *[0] * (width - len(counts))]
        above, weight = (rows[-1], PRIOR) if rows else ((0.0,) * width, 0)
        rows.append(tuple((h + weight * a) / (n + weight) for h, a in zip(hits, above, strict=True)))
    return tuple(rows)


def chain_tokens(chances: Chances, k: int) -> float:
    """Expected tokens per verification of chains of k."""
    return 1 + sum(accumulate((row[0] for row in chances[:k]), mul))


def cut_chain(rounds: Sequence[Sequence[Line]], k: int, threshold: float) -> tuple[float, list[int]]:
    """(kept tokens that a cut costs per draft, levels asked for in every round), replayed. A round is the drafts of the
    rows of a batch: the drafter is asked as long as one of them goes on."""
    lost, asked = [], []
    for rows in rounds:
        ends = [next((d for d, sure in enumerate(row.sure[:k]) if sure < threshold), k) for row in rows]
        lost += [min(row.kept, k) - min(row.kept, end) for row, end in zip(rows, ends, strict=True)]
        asked.append(min(k - 1, max(ends, default=0)))
    return fmean(lost), asked


def layer_widths(choices: Choices) -> list[int]:
    """Nodes of a template that get children, level by level from depth 1 on: what a drafter is asked to extend."""
    parents = {path[:-1] for path in choices if len(path) > 1}
    return [sum(len(p) == depth for p in parents) for depth in range(1, max(map(len, choices), default=0))]


def candidates(
    drafter: Any,
    asks: bool,
    plan: Callable[[DecodeConfig], Plan],
    chances: Chances,
    costs: Costs,
    rounds: Sequence[Sequence[Line]] = (),
) -> list[Candidate]:
    """Every shape that the drafter can draft and the costs are known of, as deep as chances were measured.

    `asks`: deeper levels are had one by one; `plan`: what the runtime makes of a shape (speculate.plan_of).
    """
    depth, width = len(chances), len(chances[0])
    found = []

    def add(decode: DecodeConfig, tokens: float, drafting: Callable[[str], float]) -> None:
        made = plan(decode)
        kind = "chain" if TREES[decode.tree].chain and not made.extra else "tree"
        rows = 1 + made.nodes + made.extra
        if rows <= max(costs.verify[kind], default=0):
            seconds = drafting(kind) + costs.passed(kind, rows)
            found.append(Candidate(decode.tree, decode, tokens, seconds, costs.batch))

    def drafted(levels: int, widths: Sequence[int]) -> Callable[[str], float]:
        return lambda kind: costs.draft(kind, levels, widths if asks else ())

    def replayed(asked: Sequence[int]) -> Callable[[str], float]:
        return lambda kind: fmean(costs.draft(kind, n + 1, [1] * n) for n in asked)

    for k in range(1, depth + 1):
        add(DecodeConfig(k=k), chain_tokens(chances, k), drafted(k, [1] * (k - 1)))
        for threshold in THRESHOLDS if asks and rounds and k > 1 else ():
            lost, levels = cut_chain(rounds, k, threshold)
            add(
                DecodeConfig(k=k, tree="cut", threshold=threshold),
                chain_tokens(chances, k) - lost,
                replayed(levels),
            )
    most = max(costs.verify["tree"], default=1) - 1
    seen: set[Choices] = set()
    for d in range(1, depth + 1):
        for tokens, choices in best_trees(chances, most, d):
            if choices in seen or not any(map(any, choices)):
                continue
            seen.add(choices)
            decode = DecodeConfig(k=d, tree="static", nodes=len(choices), width=width, choices=choices)
            add(decode, 1 + tokens, drafted(max(map(len, choices)), layer_widths(choices)))
    if getattr(drafter, "prompts", None) is not None and fits("ppd", drafter):
        for rows in sorted(costs.verify["tree"]):
            if rows <= 1 + drafter.prompts.members:
                continue
            decode = DecodeConfig(k=depth, tree="ppd", nodes=rows - 1, width=width, chances=chances)
            p = plan(decode)
            promised = state_trees(p.chances, p.depth, p.width, p.nodes, p.per_node, p.tokens)[1]
            add(decode, promised, drafted(p.depth, ()))
    return found


def best_of_kinds(found: Sequence[Candidate], share: float) -> list[Candidate]:
    """The fastest shape of each kind, the fastest first, as far as its rate is at least `share` of the fastest one's."""
    best: dict[str, Candidate] = {}
    for candidate in sorted(found, key=lambda c: (-c.rate, c.decode.k, c.decode.nodes)):
        best.setdefault(candidate.kind, candidate)
    kept = list(best.values())
    return [c for c in kept if c.rate >= share * kept[0].rate]
