"""Lookahead decoding: guess ahead by Jacobi iteration, keep the n-grams that come of it, verify those that fit.

Fu et al., "Break the Sequential Dependency of LLM Inference Using Lookahead Decoding" (arXiv:2402.02057), section 3.
In the same pass as the candidates runs a window of `window` columns and up to n - 1 levels. Level 0 is a guess of the
tokens right after the anchor, level i + 1 is what the target makes of level i; the token in level i, column j stands
1 + i + j behind the anchor, and sees level 0 up to its column, then its own column up to its level. With the
prediction of the top level a column is an n-gram of successive Jacobi iterations; these go into a pool, by their first
token, and those that begin with the anchor are the candidates of the next pass.

The window rides along as `Tree.extra`. When c tokens were committed it moves c to the right: one step by dropping
level 0 (while there are fewer than n - 1 levels: by dropping a column), the others by dropping columns; columns that
are dropped come back at the right end, as guesses for what stands there. Guesses and candidates are the target's top
tokens, so no coin is spent on them; greedy and sampled requests verify them by the runtime's rules. The paper begins
with random tokens of the prompt, here level 0 begins with the newest ones, so that a request repeats itself.
Test: pytest tests/test_free.py
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from .drafter import Budget, Commit, ExtraOut, Prefill, TargetFacts
from .layers import TargetHead, refuse_unbound
from .lookup import Pool, Sketch, collect, news, to_tree
from .tree import Extra, Tree


@dataclass(frozen=True)
class LookaheadConfig:
    """Settings of lookahead decoding; `k`, `nodes` and `width` of the runtime bound the candidates of a pass."""

    window: int = 7
    """Columns of the window (W; the authors' repository: WINDOW_SIZE = 7)."""
    n: int = 5
    """Length of an n-gram, the anchor's included (N; the authors' repository: LEVEL = 5): drafts are n - 1 deep."""
    guesses: int = 7
    """N-grams kept per first token, and verified at a time (G; the authors' repository: GUESS_SET_SIZE = 7)."""
    prompt: bool = True
    """Begin with the n-grams of the prompt in the pool (the paper's "prompt as reference")."""

    def __post_init__(self) -> None:
        if self.window < 1 or self.n < 2 or self.guesses < 1:
            raise ValueError(
                f"lookahead: window={self.window}, n={self.n}, guesses={self.guesses}: needed at least 1, 2 and 1"
            )


@dataclass
class Row:
    """One request: the newest tokens (the anchor last), the window's levels, and the pool of n-grams."""

    tail: list[int] = field(default_factory=list)
    levels: list[list[int]] = field(default_factory=list)
    pool: Pool = field(default_factory=dict)

    def move(self, predicted: list[int], config: LookaheadConfig, count: int) -> None:
        """One iteration: `predicted` follows on the top level, and the text has `count` more tokens."""
        levels = [*self.levels, predicted]
        if len(levels) == config.n:
            for gram in zip(*levels, strict=True):
                collect(self.pool, gram, config.guesses)
            levels, count = levels[1:], count - 1
        turn = count % config.window
        self.levels = [level[turn:] + level[:turn] for level in levels]


class Lookahead:
    """Lookahead decoding; see `Proposer` in `models/drafter.py`. The state is a `Row` per request."""

    method = "lookahead"
    Config = LookaheadConfig
    draft_needs = frozenset({"ids"})
    taps: tuple[int, ...] = ()
    d2t_W: Tensor | None = None
    parallel = 1
    max_depth: int | None = None

    def __init__(self, config: LookaheadConfig, facts: TargetFacts) -> None:
        self.config, self.facts = config, facts
        self.extra_rows = (config.n - 1) * config.window
        self.target_head: TargetHead = refuse_unbound

    def bind(self, target: Any) -> None:
        """Take the target's head, which says what follows on the window's top level."""
        self.target_head = target.head

    def init(self, prefill: Prefill) -> list[Row]:
        """Empty pools."""
        return [Row() for _ in range(prefill.rows)]

    def propose(
        self, state: list[Row], commit: Commit, budget: Budget, params: Any, rng: Any
    ) -> tuple[list[Row], Tree]:
        """Move the windows on, then verify the n-grams that begin with the anchors, the newest first."""
        config = self.config
        predicted = None if commit.extra_out is None else self.predict(state, commit.extra_out)
        drafts = []
        for b, (row, tokens) in enumerate(zip(state, news(commit, [bool(row.tail) for row in state]), strict=True)):
            draft = Sketch(budget, self.facts.tokens)
            drafts.append(draft)
            if not tokens:
                row.levels = []  # done: no row of its window needs to run
                continue
            if not row.tail:
                row.levels = [(tokens[-config.window :] * config.window)[-config.window :]]
                if config.prompt:
                    for gram in zip(*(tokens[i:] for i in range(config.n)), strict=False):
                        collect(row.pool, gram, config.guesses)
            elif predicted is not None:
                row.move(predicted[b], config, len(tokens))
            row.tail = tokens[-1:]
            for path in reversed(row.pool.get(tokens[-1], [])):
                draft.add_path(path)
        tree = to_tree(drafts, commit.ids_BT.device)
        tree.extra = self.window(state, tree)
        return state, tree

    def predict(self, state: list[Row], out: ExtraOut) -> list[list[int]]:
        """The target's top token after each column of each row's top level."""
        w = self.config.window
        first_B1 = torch.tensor([[max(0, len(row.levels) - 1) * w] for row in state], device=out.accepted_B.device)
        index_BX = first_B1 + torch.arange(w, device=first_B1.device)
        hidden_BXD = out.last_hidden_BED[torch.arange(len(state), device=first_B1.device)[:, None], index_BX]
        return self.target_head(hidden_BXD, None)[..., : self.facts.tokens].argmax(-1).tolist()

    def window(self, state: list[Row], tree: Tree) -> Extra:
        """The windows as rows of the pass, level by level; levels that a request does not have yet are not valid."""
        w, device = self.config.window, tree.tokens_BN.device
        m = tree.tokens_BN.shape[1] + 1
        deepest = max(len(row.levels) for row in state)
        place_E = torch.arange(deepest * w, device=device)
        level_E, column_E = place_E // w, place_E % w
        # A row hangs on the level below it; in level 0 on the column before it, the first one on the anchor.
        parents_E = m + torch.where(level_E == 0, place_E - 1, place_E - w)
        parents_E = torch.where(place_E == 0, 0, parents_E)
        ids = [[token for level in row.levels for token in level] for row in state]
        short = [deepest * w - len(x) for x in ids]
        ids_BE = torch.tensor(
            [[*x, *[0] * n] for x, n in zip(ids, short, strict=True)], dtype=torch.int64, device=device
        )
        lengths_B1 = torch.tensor([[len(x)] for x in ids], device=device)
        return Extra(
            ids_BE.view(len(state), deepest * w),
            parents_E.expand(len(state), -1),
            (1 + level_E + column_E).expand(len(state), -1),
            place_E < lengths_B1,
        )

    def reset(self, state: list[Row], rows: Tensor) -> list[Row]:
        """Forget the windows and pools of `rows`."""
        for row in rows.tolist():
            state[row] = Row()
        return state
