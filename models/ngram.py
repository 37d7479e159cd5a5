"""N-gram drafting: find the newest tokens earlier in the text, and copy what followed there.

Known as prompt lookup decoding (Saxena 2023, github.com/apoorvumang/prompt-lookup-decoding); LLMA (Yang et al.,
"Inference with Reference", arXiv:2304.04487) does it with retrieved texts. Prompt and answer are searched, longer
endings first. Where nothing like the ending stands earlier there is no draft, and the step is a plain one.

Beyond the source: a copy that reaches the end of the text goes on with what it has copied (as in LZ77), so that a text
that repeats itself is drafted to any depth; and where trees are asked for, several places give one path each.
Test: pytest tests/test_free.py
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import islice
from typing import Any, Literal

from torch import Tensor

from .drafter import Budget, Commit, Prefill, TargetFacts
from .lookup import Sketch, news, to_tree
from .tree import Tree


@dataclass(frozen=True)
class NgramConfig:
    """Settings of n-gram drafting. Tokens per draft are the runtime's `k`."""

    max_n: int = 3
    """Longest ending that is looked for, in tokens (prompt lookup decoding: max_ngram_size = 3)."""
    min_n: int = 1
    """Shortest ending that is looked for (prompt lookup decoding goes down to 1)."""
    match: Literal["last", "first"] = "last"
    """Which of several places is copied: the newest (LZ77's choice), or the oldest (prompt lookup decoding's)."""

    def __post_init__(self) -> None:
        if not 1 <= self.min_n <= self.max_n:
            raise ValueError(f"ngram: min_n={self.min_n}, max_n={self.max_n}: needed 1 <= min_n <= max_n")


@dataclass
class Text:
    """One row's tokens, the anchor last, and where each n-gram went on: `places[gram]` = indices right behind it."""

    tokens: list[int] = field(default_factory=list)
    places: dict[tuple[int, ...], list[int]] = field(default_factory=dict)

    def append(self, token: int, config: NgramConfig) -> None:
        """One more token; what ends before it now has a continuation."""
        end = len(self.tokens)
        for n in range(config.min_n, min(config.max_n, end) + 1):
            self.places.setdefault(tuple(self.tokens[end - n :]), []).append(end)
        self.tokens.append(token)

    def continuations(self, config: NgramConfig) -> Iterator[Iterator[int]]:
        """What followed the longest ending that was there before, place by place; each an endless copy."""
        end = len(self.tokens)
        for n in range(min(config.max_n, end), config.min_n - 1, -1):
            if places := self.places.get(tuple(self.tokens[end - n :])):
                yield from map(self.copy, places if config.match == "first" else reversed(places))
                return

    def copy(self, start: int) -> Iterator[int]:
        """The tokens from `start` on; behind the end of the text, those that were just copied."""
        period, at = len(self.tokens) - start, 0
        while True:
            yield self.tokens[start + at % period]
            at += 1


class Ngram:
    """N-gram drafting; see `Proposer` in `models/drafter.py`. The state is a `Text` per row."""

    method = "ngram"
    Config = NgramConfig
    draft_needs = frozenset({"ids"})
    taps: tuple[int, ...] = ()
    d2t_W: Tensor | None = None
    parallel = 1
    max_depth: int | None = None

    def __init__(self, config: NgramConfig, facts: TargetFacts) -> None:
        self.config, self.facts = config, facts

    def bind(self, target: Any) -> None:
        """Nothing of the target is read."""

    def init(self, prefill: Prefill) -> list[Text]:
        """Empty texts."""
        return [Text() for _ in range(prefill.rows)]

    def propose(
        self, state: list[Text], commit: Commit, budget: Budget, params: Any, rng: Any
    ) -> tuple[list[Text], Tree]:
        """Continuations of the longest known ending, as many as make a difference to the tree."""
        drafts = []
        for text, tokens in zip(state, news(commit, [bool(text.tokens) for text in state]), strict=True):
            draft = Sketch(budget, self.facts.tokens)
            for token in tokens:
                text.append(token, self.config)
            if tokens:
                for path in islice(text.continuations(self.config), 1 if budget.width == 1 else budget.nodes):
                    draft.add_path(path)
            drafts.append(draft)
        return state, to_tree(drafts, commit.ids_BT.device)

    def reset(self, state: list[Text], rows: Tensor) -> list[Text]:
        """Forget the texts of `rows`."""
        for row in rows.tolist():
            state[row] = Text()
        return state
