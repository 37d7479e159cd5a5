"""Jacobi decoding: guess a block of tokens, let the target correct all of them at once, until they stay as they are.

Santilli et al., "Accelerating Transformer Inference for Translation via Parallel Decoding" (arXiv:2305.10427); as the
decoder of consistency models: CLLM (Kou et al., arXiv:2403.00835, section 3), Jacobi Forcing (arXiv:2512.14681).
A pass reads the newest token (the anchor) and the guesses behind it as a chain. What the target says after each row is
the next guess at the place behind it, whether that row's own token was right or not; guesses that equal what the target
said behind right ones are committed, as any draft is, by the runtime's exact rules. A target that was not trained for it
is decoded the same way, and is the baseline.

Blocks are counted in the answer: block k holds the tokens [k n, (k + 1) n). The chain holds the rest of the open one,
and of the next ones once the share `spawn` of it is committed (Jacobi Forcing: two blocks in flight); `window` slide
keeps n guesses at all times instead. A block opens with guesses from `start`.

What stands behind a guess that was wrong was said with the wrong token in sight. With `window` quadratic n first guesses
ride along behind the anchor and behind each guess (`Tree.extra`), so that whichever is the last right one, the next n
guesses are made behind true tokens alone, for (n + 1) n more rows (quadratic decoding: Samragh et al.,
arXiv:2507.11851, with masks as first guesses).

Where the runtime's tree may branch, candidates beside the chain hang on the anchor: n-grams of rejected guesses
(rejection recycling of Jacobi Forcing), n-grams across successive states and of the prompt (the pool of lookahead
decoding, arXiv:2402.02057), and what followed the newest tokens earlier in the text (Make Some Noise,
arXiv:2406.17404). They take no part in the iteration.

Where requests sample, the verifier says what a guess is (`Draft.places`): a draw from the target's last row with the
uniform of its place. With the rule sample_match it is the uniform of the target's own draw, and the answer is plain
sampling's. With the other rules it is one of its own and the row is the guess's q (speculative Jacobi decoding, Teng et
al., arXiv:2410.01699); it stays the same from pass to pass, so that guesses settle. That keeps the law because a rule
that goes token by token looks at nothing behind a rejection, and rows depend on earlier places alone: when a place is
tested, its uniform has decided about nothing before. Rules by whole paths do look further, so they get new uniforms in
every pass; and n-grams would carry uniforms to other places, so drawn chains have no branches.
Tests: pytest tests/test_jacobi.py tests/test_jacobi_sampling.py
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from itertools import islice
from typing import Any, Literal

import torch
from torch import Tensor

from ..kernels import rng as numbers
from ..losses.probs import draw, probs, top
from .convergence import Trace
from .drafter import Budget, Commit, Prefill, TargetFacts
from .layers import TargetHead, refuse_unbound
from .lookup import Pool, Sketch, collect, news, to_tree
from .ngram import NgramConfig, Text
from .tree import Extra, Prompts, Proposal, Tree, hang

BRANCHES = ("recycle", "pool", "ngram", "retrieve")  # settings that a chain has no use for
CHUNK = 64  # places that start guesses are drawn for at a time
RETRIEVE = NgramConfig()


@dataclass(frozen=True)
class JacobiConfig:
    """Settings of Jacobi decoding. The block says how deep drafts are, not the runtime's `k`; its `tree` says whether
    there are branches, and its `nodes` and `width` how many of them."""

    block: int = 16
    """Tokens of a block (CLLM: n = 16; Jacobi Forcing: 64)."""
    blocks: int = 1
    """Blocks in flight, at most (Jacobi Forcing: K = 2)."""
    spawn: float = 0.85
    """Share of the open block that is committed when the next ones join (Jacobi Forcing: r = 0.85)."""
    window: Literal["block", "slide", "quadratic"] = "block"
    """block: up to the end of the block, counted in the answer; slide: always `block` guesses behind the newest token;
    quadratic: as many, each said behind right tokens and first guesses alone, which ride along behind every guess."""
    start: Literal["prompt", "last", "random", "mask"] = "prompt"
    """First guesses: tokens of the prompt at random (CLLM), the newest token again, random ids, or `mask_id`."""
    mask_id: int | None = None
    """The id that models trained to fill masks know as one; for start = mask."""
    recycle: int = 4
    """Branches: n-grams of rejected guesses kept per first token (Jacobi Forcing: a pool of 4); 0 = none."""
    pool: int = 4
    """Branches: n-grams across successive states and of the prompt, kept per first token; 0 = none (ours: as recycle)."""
    ngram: int = 8
    """Tokens of an n-gram, of which the first is the anchor: branches are `ngram` - 1 deep (ours)."""
    retrieve: bool = False
    """Branches: what followed the newest tokens earlier in the text (Make Some Noise, section 3.3)."""

    def __post_init__(self) -> None:
        if self.block < 1 or self.blocks < 1:
            raise ValueError(f"jacobi: block={self.block}, blocks={self.blocks}: both must be at least 1")
        if not 0 <= self.spawn <= 1:
            raise ValueError(f"jacobi: spawn={self.spawn}: must lie in [0, 1]")
        if self.window not in ("block", "slide", "quadratic"):
            raise ValueError(f"jacobi: window={self.window!r}: use block, slide or quadratic")
        if self.window != "block" and self.blocks > 1:
            raise ValueError(f"jacobi: blocks={self.blocks}: window={self.window} has no blocks; leave blocks at 1")
        if self.start not in ("prompt", "last", "random", "mask"):
            raise ValueError(f"jacobi: start={self.start!r}: use prompt, last, random or mask")
        if (self.start == "mask") != (self.mask_id is not None):
            raise ValueError(f"jacobi: start={self.start!r}, mask_id={self.mask_id}: mask_id belongs to start='mask'")
        if self.recycle < 0 or self.pool < 0 or self.ngram < 2:
            raise ValueError(
                f"jacobi: recycle={self.recycle}, pool={self.pool}, ngram={self.ngram}: needed at least 0, 0 and 2"
            )

    def rest(self, anchor: int) -> int:
        """Guesses behind an anchor that is token `anchor` of the answer, where no block was in flight before."""
        if self.window != "block":
            return self.block
        known = (anchor + 1) % self.block
        behind = (self.blocks - 1) * self.block if known >= self.spawn * self.block else 0
        return self.block - known + behind


def prompt_seed(prompt: Sequence[int]) -> int:
    """What the start guesses of a request are keyed by: its prompt alone, so that it repeats itself in any batch."""
    return zlib.crc32(b"".join(int(x).to_bytes(4, "little") for x in prompt))


@lru_cache(maxsize=256)
def start_uniforms(seed: int, first: int, count: int) -> tuple[float, ...]:
    """Uniforms of the start guesses at places `first`... of an answer."""
    return tuple(numbers.uniform(seed, numbers.START, torch.arange(first, first + count)).tolist())


@dataclass
class Row:
    """One request. `made`: tokens of the answer, the anchor is the last; `guesses`: of the places behind it, in order;
    `end`: the first place behind all blocks in flight; `drawn`: start guesses by place; `past`: the last states (place
    of the anchor, the anchor and what the target said behind it); `text`: all tokens, where they are looked up."""

    made: int = 0
    prompt: list[int] = field(default_factory=list)
    anchor: int = 0
    guesses: list[int] = field(default_factory=list)
    end: int = 0
    drawn: list[int] = field(default_factory=list)
    past: list[tuple[int, list[int]]] = field(default_factory=list)
    recycled: Pool = field(default_factory=dict)
    grams: Pool = field(default_factory=dict)
    text: Text = field(default_factory=Text)
    trace: Trace = field(default_factory=Trace)

    def across(self, n: int) -> list[tuple[int, ...]]:
        """The n-grams whose token i stands in the i-th of the last n states, each a place behind the one before."""
        if len(self.past) < n:
            return []
        first = max(place - t for t, (place, _) in enumerate(self.past))
        last = min(place + len(tokens) - t for t, (place, tokens) in enumerate(self.past))
        return [
            tuple(tokens[at + t - place] for t, (place, tokens) in enumerate(self.past)) for at in range(first, last)
        ]


class Jacobi:
    """Jacobi decoding; see `Proposer` in `models/drafter.py`. The state is a `Row` per request. With `record` set, the
    requests' traces (models/convergence.py) are added to `traces` in the order of the prompts."""

    method = "jacobi"
    Config = JacobiConfig
    draft_needs = frozenset({"ids", "teacher"})
    draws = True
    taps: tuple[int, ...] = ()
    d2t_W: Tensor | None = None
    parallel = 1
    max_depth: int | None = None

    def __init__(self, config: JacobiConfig, facts: TargetFacts) -> None:
        if config.mask_id is not None and not 0 <= config.mask_id < facts.vocab:
            raise ValueError(f"jacobi: mask_id={config.mask_id}: the target has ids 0..{facts.vocab - 1}")
        if config.block * config.blocks > facts.max_positions:
            raise ValueError(
                f"jacobi: block={config.block}, blocks={config.blocks}: together they must fit into the target's "
                f"{facts.max_positions} positions"
            )
        self.config, self.facts = config, facts
        # Most where a block begins, or where the next ones join it: from either on, `rest` falls.
        self.own_depth = max(config.rest(known - 1) for known in (0, math.ceil(config.spawn * config.block)))
        self.quadratic = config.window == "quadratic"
        self.extra_rows = (config.block + 1) * config.block if self.quadratic else 0
        self.target_head: TargetHead = refuse_unbound
        self.record = False
        self.traces: list[Trace] = []

    def bind(self, target: Any) -> None:
        """Take the target's head, for what rides along; all else is in what the verification says."""
        self.target_head = target.head

    def init(self, prefill: Prefill) -> list[Row]:
        """No guesses yet."""
        state = [Row() for _ in range(prefill.rows)]
        if self.record:
            self.traces += [row.trace for row in state]
        return state

    def propose(
        self, state: list[Row], commit: Commit, budget: Budget, params: Any, rng: Any
    ) -> tuple[list[Row], Tree]:
        """The next state of each row's blocks as a chain, and beside it what else begins with the anchor."""
        drawn = rng is not None and rng.drawn
        said, q_BJV = self.says_ahead(commit, rng) if self.quadratic else self.says(state, commit, rng)
        branches = budget.width > 1 and not drawn
        kept, drafts = [], []
        for row, tokens, places in zip(state, news(commit, [row.made > 0 for row in state]), said, strict=True):
            draft = Sketch(budget, self.facts.vocab)
            drafts.append(draft)
            kept.append(0)
            if not tokens:
                row.guesses = []
                continue
            rejected = self.move(row, tokens, places)
            kept[-1] = min(len(places), len(row.guesses))
            del row.guesses[min(budget.depth, budget.nodes) :]
            draft.add_path(row.guesses)
            if self.record:
                row.trace.passes.append((row.made - 1, list(row.guesses)))
            if branches:
                self.learn(row, tokens, rejected, kept[-1])
                self.branch(row, draft)
        tree = to_tree(drafts, commit.ids_BT.device)
        if drawn:
            tree.q = self.proposal(tree, kept, q_BJV)
        if self.quadratic:
            tree.extra = self.ahead(state, tree, (commit.counts_B > 0).tolist())
        return state, tree

    def says(self, state: list[Row], commit: Commit, rng: Any) -> tuple[list[list[int]], Tensor | None]:
        """What the target said of the places behind each new anchor, in the last pass: per row a token for each, and
        the distributions [B, J, V] where they were drawn."""
        counts = commit.counts_B.tolist()
        left = [max(0, len(row.guesses) + 1 - count) if count else 0 for row, count in zip(state, counts, strict=True)]
        seen = commit.verified
        if seen is None or not max(left):
            return [[] for _ in state], None
        b, m, v = seen.logits_BMV.shape
        step_J = torch.arange(max(left), device=seen.tokens_BM.device)
        j = len(step_J)
        # The chain comes first in the tree, and counts_B is the place of the new anchor in it.
        at_BJ = (commit.counts_B[:, None] + step_J).clamp(max=m - 1)
        logits_XV = seen.logits_BMV[torch.arange(b, device=step_J.device)[:, None], at_BJ].flatten(0, 1)
        old_BJ = seen.tokens_BM.gather(1, (at_BJ + 1).clamp(max=m - 1))
        see_JJ = torch.ones(j, j, dtype=torch.bool, device=step_J.device).tril(-1)
        history = rng.history(step_J.expand(b, j), old_BJ, see_JJ.expand(b, j, j))
        token_BJ, p_BJV = self.guess(logits_XV.view(b, j, v), history, commit, rng)
        tokens = [line[:n] for line, n in zip(token_BJ.tolist(), left, strict=True)]
        return tokens, p_BJV

    def says_ahead(self, commit: Commit, rng: Any) -> tuple[list[list[int]], Tensor | None]:
        """`says` of what rode along behind the last right guess. Nothing rides behind a branch."""
        b, j = len(commit.anchor_B), self.config.block
        if commit.extra_out is None:
            return [[] for _ in range(b)], None
        hidden_BJD, valid_BJ = commit.extra_out.below_accepted(j)
        step_BJ = torch.arange(j, device=hidden_BJD.device).expand(b, j)
        history = rng.history(step_BJ, None, None)
        token_BJ, p_BJV = self.guess(self.target_head(hidden_BJD, None), history, commit, rng)
        left = (valid_BJ & (commit.counts_B > 0)[:, None]).sum(1).tolist()
        return [line[:n] for line, n in zip(token_BJ.tolist(), left, strict=True)], p_BJV

    def guess(self, logits_BJV: Tensor, history: Any, commit: Commit, rng: Any) -> tuple[Tensor, Tensor | None]:
        """Guesses int64 [B, J] of the places behind the new anchors, by the verifier's rule, from the target's logits; and the
        distributions, where they were drawn."""
        b, j, _ = logits_BJV.shape
        step_J = torch.arange(j, device=logits_BJV.device)
        last_B1 = commit.positions_BT.gather(1, (commit.counts_B - 1).clamp(min=0)[:, None])
        coins_BJ, params = rng.at_places(last_B1 + 2 + step_J), rng.params.repeat(j)
        if coins_BJ is None:
            return top(logits_BJV.flatten(0, 1), params, history).view(b, j), None
        p_XV = probs(logits_BJV.flatten(0, 1), params, history)
        return draw(p_XV, coins_BJ.flatten()).view(b, j), p_XV.view(b, j, -1)

    def move(self, row: Row, tokens: list[int], said: list[int]) -> list[int]:
        """Take in the newest tokens of a row, and make the guesses behind them out of what the target said there.
        Returns the old guesses from the first one on that was wrong."""
        config, old = self.config, row.guesses
        right = next((i for i, (x, y) in enumerate(zip(old, tokens, strict=False)) if x != y), len(tokens))
        if row.made == 0:
            row.prompt, row.made = tokens[:-1], 1
        else:
            row.made += len(tokens)
        row.anchor = tokens[-1]
        place = row.made - 1
        if config.window == "block":
            del said[max(0, row.end - 1 - place) :]  # a block opens with guesses from `start` alone
        row.end = max(row.end if config.window == "block" else 0, row.made + config.rest(place))
        # In a quadratic window first guesses ride along and are none of the chain's.
        row.guesses = said if self.quadratic else said + self.starts(row, range(row.made + len(said), row.end))
        return old[right:]

    def ahead(self, state: list[Row], tree: Tree, live: list[bool]) -> Extra:
        """First guesses behind the anchor and behind every guess of the chain, `block` each."""
        n, m, device = self.config.block, tree.tokens_BN.shape[1] + 1, tree.tokens_BN.device
        chains = [[row.anchor, *row.guesses] if running else [] for row, running in zip(state, live, strict=True)]
        ids = [
            [x for i, last in enumerate(chain) for x in self.starts(row, range(row.made + i, row.made + i + n), last)]
            for row, chain in zip(state, chains, strict=True)
        ]
        nodes = max(map(len, chains))
        counts_BM = torch.tensor([[n] * len(chain) + [0] * (m - len(chain)) for chain in chains], device=device)
        extra = hang(tree, counts_BM, Prompts(n), nodes * n, 0)
        filled = [line + [0] * (nodes * n - len(line)) for line in ids]
        return replace(extra, ids_BE=torch.tensor(filled, dtype=torch.int64, device=device).view(extra.ids_BE.shape))

    def starts(self, row: Row, places: range, last: int | None = None) -> list[int]:
        """First guesses at these places of the answer, behind the token `last` (None = the anchor)."""
        config = self.config
        if config.start in ("last", "mask") or not places:
            token = row.anchor if last is None else last
            return [token if config.mask_id is None else config.mask_id] * len(places)
        while len(row.drawn) < places.stop:
            uniforms = start_uniforms(prompt_seed(row.prompt), len(row.drawn), CHUNK)
            ids: Sequence[int] = range(self.facts.tokens)
            if config.start == "prompt":
                ids = [x for x in row.prompt if x < self.facts.tokens] or [row.anchor]
            row.drawn += [ids[math.floor(x * len(ids))] for x in uniforms]
        return row.drawn[places.start : places.stop]

    def learn(self, row: Row, tokens: list[int], rejected: list[int], kept: int) -> None:
        """Put into the pools what the last pass taught; `kept`: guesses that are the target's own word."""
        config, n = self.config, self.config.ngram
        if config.recycle:
            for i in range(len(rejected) - 1):
                collect(row.recycled, tuple(rejected[i : i + n]), config.recycle)
        if config.pool:
            if len(tokens) > row.made:  # the prompt, and the first token
                for gram in zip(*(tokens[i:] for i in range(n)), strict=False):
                    collect(row.grams, gram, config.pool)
            row.past = [*row.past, (row.made - 1, [row.anchor, *row.guesses[:kept]])][-n:]
            for gram in row.across(n):
                collect(row.grams, gram, config.pool)
        if config.retrieve:
            for token in tokens:
                row.text.append(token, RETRIEVE)

    def branch(self, row: Row, draft: Sketch) -> None:
        """Hang what begins with the anchor beside the chain, the newest first."""
        for pool in (row.recycled, row.grams):
            for path in reversed(pool.get(row.anchor, [])):
                draft.add_path(path)
        if self.config.retrieve:
            for copy in islice(row.text.continuations(RETRIEVE), draft.budget.width):
                draft.add_path(islice(copy, self.config.ngram - 1))

    def proposal(self, tree: Tree, kept: list[int], q_BJV: Tensor | None) -> Proposal:
        """The rows that the chain was drawn from; first guesses are fixed, so theirs are one-hot."""
        b, n = tree.tokens_BN.shape
        dtype = torch.float32 if q_BJV is None else q_BJV.dtype
        rows_BMV = torch.zeros(b, n + 1, self.facts.vocab, dtype=dtype, device=tree.tokens_BN.device)
        rows_BMV[:, :n].scatter_(2, tree.tokens_BN[:, :, None], 1)
        if q_BJV is not None:
            j = min(n, q_BJV.shape[1])
            drawn_BJ = torch.arange(j, device=rows_BMV.device) < torch.tensor(kept, device=rows_BMV.device)[:, None]
            rows_BMV[:, :j] = torch.where(drawn_BJ[:, :, None], q_BJV[:, :j], rows_BMV[:, :j])
        return Proposal(rows_BMV, None, replacement=True)

    def reset(self, state: list[Row], rows: Tensor) -> list[Row]:
        """Forget the guesses and pools of `rows`."""
        for row in rows.tolist():
            state[row] = Row()
        return state
