"""The convergence map of Jacobi decoding: in which state of its block each token of an answer was right, and stayed so.

    drafter.record = True
    results = generate(target, prompts, params, drafter, decode)
    maps = [convergence(trace, r.ids, 16) for trace, r in zip(drafter.traces, results)]

CLLM (arXiv:2403.00835, section 4.3) reads two things from such maps: tokens that are right before those in front of
them, and runs of tokens that become right at once.
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


@dataclass
class BlockMap:
    """One block of an answer. `first`: its first place; `opened`: the pass (from 0) in which it first stood;
    `states[s]`: its tokens after s passes, known ones and guesses (ABSENT = no guess yet), the last being the answer's;
    `right[j]`: the first state from which on place j is as in the answer."""

    first: int
    opened: int
    states: list[list[int]]
    right: list[int]

    @property
    def passes(self) -> int:
        """Passes from the opening of the block until all of it was known."""
        return len(self.states) - 1


def convergence(trace: Trace, ids: Sequence[int], block: int) -> list[BlockMap]:
    """The maps of all blocks of an answer; the last one ends where the answer does."""
    maps = []
    for first in range(0, len(ids), block):
        final = list(ids[first : first + block])
        last = first + len(final) - 1
        opened, states = len(trace.passes), []
        for number, (anchor, guesses) in enumerate(trace.passes):
            if anchor + len(guesses) < first:
                continue
            opened = min(opened, number)
            if anchor >= last:
                break
            known = [*ids[: anchor + 1], *guesses][first : last + 1]
            states.append(known + [ABSENT] * (len(final) - len(known)))
        states.append(final)
        right = [
            next(s for s in range(len(states)) if all(state[j] == token for state in states[s:]))
            for j, token in enumerate(final)
        ]
        maps.append(BlockMap(first, opened, states, right))
    return maps
