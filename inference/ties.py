"""Where greedy answers part from plain decoding, and whether rounding excuses it.

Below float64 a row of a pass has other low bits when the pass has another width, so that a near-tie of the target may
fall either way. `parting` finds the first difference of two answers and excuses it only where the top-2 logit gap of
plain decoding is below `FACTOR` x what the two widths' logits differ by. That difference is measured on chains of the
reference text alone, by passes of one row and of as many as a verification has: what a tree, a mask or a drafter did
has no part in it, so a wrong one cannot excuse itself. What follows the first difference is another text, and is not
compared.

    found = parting(target, prompt, plain_ids, tree_ids, pass_rows(target, drafter, decode))

Tests: tests/test_ties.py; benchmark: tests/bench/lossless.py.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor

from .decode import DecodeConfig, depth_of, plan_of
from .trees import TREES

FACTOR = 4.0
LEAST = 32  # tokens of the reference that widths are compared on, if it has as many


@dataclass(frozen=True)
class Parting:
    """The first difference of an answer from plain decoding."""

    position: int
    """Token of the answer, from 0."""
    reference: int | None
    """Id that plain decoding has there; None = it ended."""
    other: int | None
    """Id of the other answer; None = it ended."""
    gap: float
    """Top-2 logit gap of plain decoding there."""
    width_difference: float
    """Largest difference of a logit between passes of one row and wide ones, on the reference text."""

    @property
    def excused(self) -> bool:
        """Whether the gap is small enough for rounding to decide."""
        return self.gap < FACTOR * self.width_difference

    def row(self) -> dict[str, Any]:
        """For reports: the fields, and `excused`."""
        return asdict(self) | {"excused": self.excused}


@torch.no_grad()
def parting(
    target: Any, prompt: Sequence[int], reference: Sequence[int], other: Sequence[int], rows: int, batch: int = 1
) -> Parting | None:
    """The first difference of `other` from `reference`, the greedy answer of plain decoding to `prompt` (ids); None if
    there is none. `rows`: of the passes that `other` was decoded in (`pass_rows`), per request; `batch`: requests that
    shared the passes of either."""
    n = min(len(reference), len(other))
    at = next((i for i in range(n) if reference[i] != other[i]), n)
    if at == len(reference) == len(other):
        return None
    line = [*reference[: max(at, LEAST)]]
    narrow_TV = _logits(target, [*prompt], line, 1)
    first, second = narrow_TV[at].topk(2).values.tolist()
    wide = [_logits(target, [*prompt], line, width) for width in sorted({rows, batch, rows * batch} - {1})]
    difference = max((float((narrow_TV - wide_TV).abs().max()) for wide_TV in wide), default=0.0)
    there = [ids[at] if at < len(ids) else None for ids in (reference, other)]
    return Parting(at, there[0], there[1], first - second, difference)


def _logits(target: Any, prompt: list[int], line: list[int], rows: int) -> Tensor:
    """float64 [len(line) + 1, ids]: after the prompt, read in one pass, and after each of the line's ids, in passes of
    `rows`; the last pass repeats an id up to its width."""
    cache = target.new_cache(1, len(prompt) + len(line) + rows)
    found = []
    for some in (prompt, *(line[i : i + rows] for i in range(0, len(line), rows))):
        ids_1T = torch.tensor([some + some[-1:] * (0 if some is prompt else rows - len(some))], device=target.device)
        at_1T = cache.lengths_B[:, None] + torch.arange(ids_1T.shape[1], device=target.device)
        last_1TD = target.forward(ids_1T, at_1T.clamp(max=target.facts.max_positions - 1), cache=cache).last_hidden_BTD
        found.append(target.head(last_1TD[:, -1:] if some is prompt else last_1TD)[0].double()[: len(some)])
        cache.commit(torch.tensor([len(some)], device=target.device))
    return torch.cat(found)[:, : target.facts.tokens]


def pass_rows(target: Any, drafter: Any, decode: DecodeConfig) -> int:
    """Rows of a verification, at most: the anchor, nodes, prompt rows, padding. `drafter` None = plain decoding."""
    nodes = 0
    if drafter is not None:
        plan = plan_of(drafter, decode, target.facts.vocab, target.facts.tokens)
        depth, extra = depth_of(drafter, decode), getattr(drafter, "extra_rows", 0)
        beside = 0 if getattr(drafter, "own_depth", None) is None else depth
        nodes = (depth if TREES[decode.tree].chain else decode.nodes + beside) + extra
        nodes = nodes if plan is None else plan.nodes + plan.extra
    return max(1 + nodes, decode.fixed_width or 1)
