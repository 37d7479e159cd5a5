"""Suffix decoding: continue the text as often as it was continued that way before.

Oliaro et al., "SuffixDecoding: Extreme Speculative Decoding for Emerging AI Applications" (arXiv:2411.04975), section 3.
Every ending of the text, of length p, has places where it stood before; a candidate's chance is how often, of these
places, the text went on like that: D(child) = D(parent) * count(child) / count(parent). From each p a tree is grown,
best candidate first, of at most `factor` * p nodes: a longer match has earned a longer draft. Of all p the tree with
the largest sum of D stays, which estimates the tokens that will be accepted. Where the runtime wants a chain, a node's
best child is its only one.

`shared` adds the second structure of the paper, the answers to earlier requests. An answer then depends on what was
asked before: greedy output does not change, sampled output keeps its distribution, but a seed no longer fixes it, and
requests must not share one (their coins would be known to the structure; refused).

No tree is built ahead of time: the places of every token are kept, and the length of the match at each of them is
brought up to date token by token, so counts come from the places themselves (a suffix tree's, exactly) and memory
grows by two numbers per token. Places whose continuation is not known yet count in no total.
Test: pytest tests/test_free.py
"""

from __future__ import annotations

import heapq
import math
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from .drafter import Budget, Commit, Prefill, TargetFacts
from .lookup import Sketch, news, to_tree
from .tree import Tree

BORDER = -1  # between two texts; no token, so no match and no continuation crosses it


@dataclass(frozen=True)
class SuffixConfig:
    """Settings of suffix decoding; `k`, `nodes` and `width` of the runtime bound what it drafts."""

    max_match: int = 24
    """Longest ending that is matched, in tokens (vLLM's suffix_decoding_max_tree_depth, which bounds match and draft)."""
    factor: float = 1.0
    """Candidates per token of the match, at most (alpha of section 3; vLLM's suffix_decoding_max_spec_factor)."""
    min_chance: float = 0.1
    """Candidates whose chance D is lower are not drafted (vLLM's suffix_decoding_min_token_prob)."""
    shared: bool = False
    """Look into the answers to earlier requests too (section 3: the global tree). Sampled requests then need seeds of their own."""
    shared_tokens: int = 100_000
    """Most tokens of earlier answers that are kept; when there are more, the older half goes."""

    def __post_init__(self) -> None:
        if self.max_match < 1 or self.shared_tokens < 1:
            raise ValueError(
                f"suffix: max_match={self.max_match}, shared_tokens={self.shared_tokens}: both must be at least 1"
            )
        if not (0 < self.factor < math.inf and 0 <= self.min_chance <= 1):
            raise ValueError(
                f"suffix: factor={self.factor}, min_chance={self.min_chance}: needed factor > 0, min_chance in [0, 1]"
            )


@dataclass
class Corpus:
    """Tokens, and for every token the indices right behind its occurrences, where a continuation is known."""

    tokens: list[int] = field(default_factory=list)
    places: dict[int, list[int]] = field(default_factory=dict)

    def append(self, token: int) -> None:
        """One more token at the end."""
        if self.tokens and token != BORDER:
            self.places.setdefault(self.tokens[-1], []).append(len(self.tokens))
        self.tokens.append(token)


@dataclass
class Matches:
    """Where in a corpus a text's ending stands, and how long it is there: `lengths[place]` tokens before the place."""

    corpus: Corpus
    longest: int
    lengths: dict[int, int] = field(default_factory=dict)

    def advance(self, tokens: Sequence[int]) -> None:
        """The text has these tokens more. As many as the longest match say all of it; earlier ones need no walk."""
        if len(tokens) > self.longest:
            self.lengths = {}
        for token in tokens[-self.longest :]:
            before, places = self.lengths, self.corpus.places.get(token, ())
            self.lengths = {place: min(self.longest, 1 + before.get(place - 1, 0)) for place in places}

    def best(self, config: SuffixConfig, budget: Budget, tokens: int) -> tuple[float, Sketch]:
        """The best tree of all lengths of the ending, and its sum of chances; longer endings win where these are equal."""
        score, draft = 0.0, Sketch(budget, tokens)
        by_length: dict[int, list[int]] = {}
        for place, length in self.lengths.items():
            by_length.setdefault(length, []).append(place)
        places: list[int] = []
        for length in sorted(by_length, reverse=True):
            size = min(budget.nodes, int(config.factor * length))
            if size <= score:  # no chance exceeds 1
                break
            places += by_length[length]
            other = grow(self.corpus, places, Budget(size, budget.depth, budget.width), tokens, config.min_chance)
            if other[0] > score:
                score, draft = other
        return score, draft


def grow(corpus: Corpus, places: Iterable[int], budget: Budget, tokens: int, min_chance: float) -> tuple[float, Sketch]:
    """The tree of likeliest continuations of `places`: (sum of chances, tree). Best first; of equal chances the one that
    was reached first, then the more recent one."""
    draft, score, order = Sketch(budget, tokens), 0.0, 0
    heap: list[tuple[float, int, int, int, list[int]]] = []  # -chance, order, parent, token, places behind the token
    node: int | None = 0
    chance, here = 1.0, list(places)
    while True:
        if node is not None:
            by_token: dict[int, list[int]] = {}
            for place in here:
                if place < len(corpus.tokens) and corpus.tokens[place] != BORDER:
                    by_token.setdefault(corpus.tokens[place], []).append(place + 1)
            total = sum(map(len, by_token.values()))
            ranked = sorted(by_token.items(), key=lambda item: (-len(item[1]), -max(item[1])))
            for token, behind in ranked[: budget.width]:
                share = chance * len(behind) / total
                if share >= min_chance:
                    heapq.heappush(heap, (-share, order, node, token, behind))
                    order += 1
        if not heap or len(draft.tokens) >= budget.nodes:
            return score, draft
        least, _, parent, token, here = heapq.heappop(heap)
        chance = -least
        node = draft.add(parent, token, math.log(chance))
        score += chance if node is not None else 0.0


@dataclass
class Text:
    """One row: its own tokens (the anchor last), what its ending matches in them and in the shared corpus, how many
    tokens its prompt has, and its seed if it samples."""

    own: Matches
    shared: Matches
    prompt: int = 0
    seed: int | None = None


class Suffix:
    """Suffix decoding; see `Proposer` in `models/drafter.py`. The state is a `Text` per row."""

    method = "suffix"
    Config = SuffixConfig
    draft_needs = frozenset({"ids"})
    taps: tuple[int, ...] = ()
    d2t_W: Tensor | None = None
    parallel = 1
    max_depth: int | None = None

    def __init__(self, config: SuffixConfig, facts: TargetFacts) -> None:
        self.config, self.facts = config, facts
        self.corpus = Corpus()
        self.answers: deque[list[int]] = deque()
        self.open: list[Text] = []  # texts that will be shared with the requests of the next batch
        self.seeds: set[int] = set()

    def bind(self, target: Any) -> None:
        """Nothing of the target is read."""

    def init(self, prefill: Prefill) -> list[Text]:
        """Empty texts. What the batch before answered is shared from here on, if it is to be."""
        if self.config.shared:
            self._share()
        return [self._text() for _ in range(prefill.rows)]

    def propose(
        self, state: list[Text], commit: Commit, budget: Budget, params: Any, rng: Any
    ) -> tuple[list[Text], Tree]:
        """The likeliest continuations by the row's own text, or by earlier answers where these promise more."""
        begun = [bool(text.own.corpus.tokens) for text in state]
        drafts = []
        for row, (text, tokens) in enumerate(zip(state, news(commit, begun), strict=True)):
            if self.config.shared and tokens and not begun[row]:
                self._open(text, len(tokens) - 1, row, params, rng)
            for token in tokens:
                text.own.corpus.append(token)
            text.own.advance(tokens)
            text.shared.advance(tokens)
            score, draft = 0.0, Sketch(budget, self.facts.tokens)
            for matches in (text.own, text.shared) if tokens else ():
                other = matches.best(self.config, budget, self.facts.tokens)
                if other[0] > score:
                    score, draft = other
            drafts.append(draft)
        return state, to_tree(drafts, commit.ids_BT.device)

    def reset(self, state: list[Text], rows: Tensor) -> list[Text]:
        """Forget the texts of `rows` (their answers are shared with the next batch, if they are to be)."""
        for row in rows.tolist():
            state[row] = self._text()
        return state

    def _text(self) -> Text:
        longest = self.config.max_match
        return Text(Matches(Corpus(), longest), Matches(self.corpus, longest))

    def _open(self, text: Text, prompt: int, row: int, params: Any, rng: Any) -> None:
        """Note a new request. Raises ValueError if it samples with the coins of a request whose answer is shared."""
        text.prompt = prompt
        if float(params.temperature_R[row]) > 0:
            text.seed = int(rng.seeds_B[row])
            if text.seed in self.seeds:
                raise ValueError(
                    f"suffix: shared=true and two sampled requests with the seed {text.seed}: the later answer would not "
                    "have the target's distribution; give every request a seed of its own, or set shared=false"
                )
        self.open.append(text)

    def _share(self) -> None:
        """Take the answers of the batch before into the shared corpus."""
        new = [[BORDER, *text.own.corpus.tokens[text.prompt :]] for text in self.open]
        self.seeds |= {text.seed for text in self.open if text.seed is not None}
        self.open = []
        self.answers += new
        if sum(map(len, self.answers)) > self.config.shared_tokens:
            while len(self.answers) > 1 and sum(map(len, self.answers)) > self.config.shared_tokens // 2:
                self.answers.popleft()
            self.corpus, new = Corpus(), list(self.answers)
        for answer in new:
            for token in answer:
                self.corpus.append(token)
