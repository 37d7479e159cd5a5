"""What became of the blocks of Jacobi decoding: the states that each went through, which convergence maps are drawn of.

    drafter.record = True
    results = generate(target, prompts, params, drafter, decode)
    states = [block_states(trace, r.ids, 16) for trace, r in zip(drafter.traces, results)]

CLLM (arXiv:2403.00835, section 4.3) reads two things from such maps: tokens that are right before those in front of
them, and runs of tokens that become right at once. inference/consistency_figures.py counts and draws them.
Test: pytest tests/test_jacobi.py
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

ABSENT = -1


@dataclass
class Trace:
    """How one request was decoded: per pass the place of its anchor in the answer, and the guesses behind it."""

    passes: list[tuple[int, list[int]]] = field(default_factory=list)


def block_states(trace: Trace, ids: Sequence[int], block: int) -> list[list[list[int]]]:
    """Per block of an answer its states: its tokens, known ones and guesses (ABSENT = no guess yet), from the pass in
    which it first stood on, and at last as in the answer. The last block ends where the answer does."""
    blocks = []
    for first in range(0, len(ids), block):
        final = list(ids[first : first + block])
        last, states = first + len(final) - 1, []
        for anchor, guesses in trace.passes:
            if anchor + len(guesses) < first:
                continue
            if anchor >= last:
                break
            known = [*ids[: anchor + 1], *guesses][first : last + 1]
            states.append(known + [ABSENT] * (len(final) - len(known)))
        blocks.append([*states, final])
    return blocks
