"""The decode loop of drafters: draft, verify, choose, commit. Plain decoding is the same loop without a draft.

    results = generate(target, prompts, SamplingParams(max_new_tokens=64), drafter, DecodeConfig(k=4))

Every row of a batch has its own length: accepting different numbers of tokens is a length update in the cache. A row
that is done stays where it is until the batch ends, and nothing of it reaches the others. Which rules of acceptance
keep the target's distribution is listed in inference/README.md. Tests: tests/test_speculate.py, tests/test_sampling.py;
benchmark: tests/bench/lossless.py.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from ..kernels import rng
from ..losses.probs import History, ParamRows, SamplingParams, draw, probs, top
from ..models.drafter import Budget, Commit, ExtraOut, Prefill, Verified
from ..models.tree import Tree
from . import verify
from .commit import Event, Request, Result
from .trees import TREES, Draft, Plan, check_choices, fits, with_prompts


@dataclass(frozen=True)
class DecodeConfig:
    """How drafts are made and verified.

    Args:
        k: depth of the draft, cut to what the drafter has; with `choices` their own depth counts, and with a drafter
            that says its own (jacobi: the block) that.
        tree: a key of TREES (inference/README.md says what each is).
        nodes: nodes of a tree that is no chain, at most; of jacobi, those beside its chain.
        width: candidates per node, at most (opt and best_first take as many as there are nodes).
        choices: template of a static tree, for example [[0], [1], [0, 0]]; none = the default one.
        threshold: cut: a chain ends before the first token that the drafter is less sure of; opt: no deeper layer once
            one adds no more expected tokens than this. None = the tree's own default.
        chances: of ppd, by depth the chance of each rank to be right (`Stats.ranks` over `tried`); none = the drafter's
            `chances` if it has them, or those of a typical drafter.
        prompt_rows: prompt rows of a drafter with prompt tokens in every verification, at most. None = all that the nodes
            can have; ppd then shares `nodes` rows between nodes and prompt tokens.
        verifier: auto, or a key of VERIFIERS (inference/README.md lists what each promises).
        fixed_width: rows that every verification has (k + 1 and the prompt rows, or more; chains only); plain decoding
            padded to the same width gives the same bits. None = as many as needed.
        draft_temperature: temperature of drafting for requests that sample; none = the request's own.
        allow_lossy: permit verifiers that change the target's distribution.
        max_rows: requests decoded together.
        typical_epsilon: ceiling of the floor of typical acceptance (Medusa's llm_judge README).
        typical_delta: share of exp(-entropy) in the floor of typical acceptance (Medusa's llm_judge README).
        fuzzy_threshold: total variation of p and q up to which fuzzy acceptance keeps drafts (ours).
        entropy_tolerance: most that entropy-aware acceptance adds to a chance (ours).
        keep_logits: return the target's logits that every id was chosen from (memory: V numbers per id).
    """

    k: int = 4
    tree: str = "chain"
    nodes: int = 24
    width: int = 4
    choices: tuple[tuple[int, ...], ...] | None = None
    threshold: float | None = None
    chances: tuple[tuple[float, ...], ...] | None = None
    prompt_rows: int | None = None
    verifier: str = "auto"
    fixed_width: int | None = None
    draft_temperature: float | None = None
    allow_lossy: bool = False
    max_rows: int = 8
    typical_epsilon: float = 0.09
    typical_delta: float = 0.3
    fuzzy_threshold: float = 0.1
    entropy_tolerance: float = 0.1
    keep_logits: bool = False

    def __post_init__(self) -> None:
        for name in ("k", "nodes", "width", "max_rows"):
            if getattr(self, name) < 1:
                raise ValueError(f"decode: {name}={getattr(self, name)}, must be an integer >= 1")
        if self.tree not in TREES:
            raise ValueError(f"decode: tree={self.tree!r}: use one of {', '.join(TREES)}")
        if self.verifier != "auto" and self.verifier not in verify.VERIFIERS:
            raise ValueError(f"decode: verifier={self.verifier!r}: use auto, {', '.join(verify.VERIFIERS)}")
        if self.verifier != "auto" and not verify.VERIFIERS[self.verifier].exact and not self.allow_lossy:
            raise ValueError(
                f"decode: verifier={self.verifier!r} changes the target's distribution: "
                "add allow_lossy=true (--allow-lossy)"
            )
        for name in ("typical_epsilon", "typical_delta", "fuzzy_threshold", "entropy_tolerance"):
            if not 0 <= getattr(self, name) <= 1:
                raise ValueError(f"decode: {name}={getattr(self, name)}, must be in [0, 1]")
        builder = TREES[self.tree]
        single = self.width == 1 or self.nodes == 1 or (self.choices is not None and not any(map(any, self.choices)))
        chain = True if builder.chain else None if single else False
        drawn = None if builder.draws and self.draft_temperature != 0 else False
        verify.refuse_misfit(self.verifier, self.allow_lossy, None, drawn, chain)
        if self.choices is not None:
            if self.tree != "static":
                raise ValueError(f"decode: choices are for tree='static', this is tree={self.tree!r}")
            check_choices(self.choices)
        if self.threshold is not None:
            if TREES[self.tree].threshold is None:
                having = ", ".join(name for name, builder in TREES.items() if builder.threshold is not None)
                raise ValueError(f"decode: threshold is for the trees {having}, this is tree={self.tree!r}")
            if not 0 <= self.threshold <= 1:
                raise ValueError(f"decode: threshold={self.threshold}, must lie in [0, 1]")
        if self.chances is not None:
            if self.tree != "ppd":
                raise ValueError(f"decode: chances are for tree='ppd', this is tree={self.tree!r}")
            if not self.chances or not all(row and min(row) >= 0 and sum(row) <= 1 + 1e-6 for row in self.chances):
                raise ValueError(
                    f"decode: chances={self.chances}: give per depth the chances of the ranks, which sum to 1 at most"
                )
        if self.prompt_rows is not None and self.prompt_rows < 1:
            raise ValueError(f"decode: prompt_rows={self.prompt_rows}, must be an integer >= 1")
        if self.draft_temperature is not None and not 0 <= self.draft_temperature < float("inf"):
            raise ValueError(f"decode: draft_temperature={self.draft_temperature}, must be a finite number >= 0")
        if self.fixed_width is not None and self.fixed_width < 1:
            raise ValueError(f"decode: fixed_width={self.fixed_width}, must be an integer >= 1")
        if self.fixed_width is not None and not TREES[self.tree].chain:
            raise ValueError(f"decode: fixed_width is for chains (tree='chain' or 'cut'), this is tree={self.tree!r}")


def plan_of(drafter: Any, decode: DecodeConfig, vocab: int, tokens: int) -> Plan | None:
    """How this drafter's trees are built for a target with `vocab` embeddings and `tokens` ids; None where it makes its
    own (`propose`). Raises ValueError for a tree that it cannot grow."""
    refuse_tree(drafter, decode)
    if hasattr(drafter, "propose"):
        return None
    limits = [x for x in (drafter.max_depth, drafter.parallel if drafter.parallel > 1 else None) if x is not None]
    known = tokens if drafter.d2t_W is None else drafter.d2t_W.shape[0]
    limit = min(limits) if limits else None
    plan = Plan.make(decode.tree, decode.k, decode.width, decode.nodes, decode.choices, limit, known, decode.threshold)
    chances = decode.chances if decode.chances is not None else getattr(drafter, "chances", None)
    return plan.with_prompts(getattr(drafter, "prompts", None), decode.prompt_rows, vocab, chances)


def refuse_tree(drafter: Any, decode: DecodeConfig) -> None:
    """ValueError for a tree that the drafter (or, before there is one, any of its class) cannot grow."""
    if hasattr(drafter, "propose"):
        if not fits(decode.tree, drafter) or decode.choices is not None:
            raise ValueError(
                f"tree={decode.tree!r}, choices={decode.choices}: this drafter proposes drafts of its own, as a chain or "
                "a tree: use tree='chain', or 'static' without choices"
            )
    elif not fits(decode.tree, drafter):
        raise ValueError(
            f"tree={decode.tree!r} needs a drafter that gives the levels of all depths at once, and this one is asked "
            f"level by level: use one of {', '.join(name for name in TREES if fits(name, drafter))}"
        )


def refuse_rule(drafter: Any, decode: DecodeConfig, params: Sequence[SamplingParams]) -> None:
    """ValueError for a rule that does not fit requests decoded together, or what the drafter (or its class; None = no
    drafter) makes of them."""
    hot = any(p.temperature > 0 for p in params)
    draws = hot and decode.draft_temperature != 0 and drafter is not None
    draws = draws and (not hasattr(drafter, "propose") or getattr(drafter, "draws", False))
    verify.refuse_misfit(decode.verifier, decode.allow_lossy, hot, None if draws else False)


def depth_of(drafter: Any, decode: DecodeConfig) -> int:
    """Depth of its drafts: k, or what the settings of a proposer say (`own_depth`), which a k beside them must not
    contradict: ValueError."""
    own = getattr(drafter, "own_depth", None)
    if own is not None and decode.k not in (DecodeConfig.k, own):
        raise ValueError(
            f"k={decode.k}: the drafts of {drafter.method} are as deep as its own settings say, here {own}: leave k out "
            f"and set those (--drafter.{drafter.method}.block N)"
        )
    return decode.k if own is None else own


def chain_width(drafter: Any, decode: DecodeConfig) -> int | None:
    """The least `fixed_width` of a drafter's chains of depth k; None where no width gives the bits of plain decoding,
    because the drafter's prefix adds keys."""
    if getattr(drafter, "prefix_kv", None) is not None:
        return None
    extra = getattr(drafter, "extra_rows", 0)
    if not hasattr(drafter, "propose"):
        chain = Plan.make("chain", decode.k, 1, decode.k, None, None, 1)
        extra = chain.with_prompts(getattr(drafter, "prompts", None), decode.prompt_rows, 0, None).extra
    return max(1 + depth_of(drafter, decode) + extra, rows_written(drafter))


def rows_written(drafter: Any) -> int:
    """Rows of the passes of its own that a drafter which reads the target's cache writes behind the text, to be
    overwritten; 0 for all others."""
    return drafter.parallel if "kv" in getattr(drafter, "draft_needs", ()) else 0


def generate(
    target: Any,
    prompts: Sequence[Sequence[int]],
    params: SamplingParams | Sequence[SamplingParams],
    drafter: Any = None,
    decode: DecodeConfig | None = None,
    *,
    on_event: Callable[[Event], None] | None = None,
) -> list[Result]:
    """Answer every prompt (token ids), in order. `drafter=None` = plain decoding.

    `params`: one for all, or one per prompt. `on_event` is called for every step of every row, with text. Raises
    ValueError for prompts and settings that do not fit the target or the drafter.
    """
    results: list[Result | None] = [None] * len(prompts)
    for event in _run(target, prompts, params, drafter, decode or DecodeConfig(), results, on_event is not None):
        if on_event is not None:
            on_event(event)
    return [r for r in results if r is not None]


def stream(
    target: Any,
    prompts: Sequence[Sequence[int]],
    params: SamplingParams | Sequence[SamplingParams],
    drafter: Any = None,
    decode: DecodeConfig | None = None,
) -> Iterator[Event]:
    """The same as `generate`, as events while they happen."""
    return _run(target, prompts, params, drafter, decode or DecodeConfig(), [None] * len(prompts), True)


def _run(
    target: Any,
    prompts: Sequence[Sequence[int]],
    params: SamplingParams | Sequence[SamplingParams],
    drafter: Any,
    decode: DecodeConfig,
    results: list[Result | None],
    live: bool,
) -> Iterator[Event]:
    each = [params] * len(prompts) if isinstance(params, SamplingParams) else list(params)
    if len(each) != len(prompts):
        raise ValueError(f"{len(each)} sampling parameters for {len(prompts)} prompts: give one, or one per prompt")
    for i, prompt in enumerate(prompts):
        check_prompt(target, i, prompt, each[i])
    for first in range(0, len(prompts), decode.max_rows):
        refuse_rule(drafter, decode, each[first : first + decode.max_rows])
    was_training = drafter is not None and getattr(drafter, "training", False)
    if was_training:
        drafter.eval()
    try:
        for first in range(0, len(prompts), decode.max_rows):
            rows = range(first, min(first + decode.max_rows, len(prompts)))
            requests = [
                Request(i, prompts[i], each[i], target.facts.eos_ids, getattr(target, "tokenizer", None), live)
                for i in rows
            ]
            batch = _Batch(target, requests, drafter, decode)
            yield from batch.prefill()
            while batch.running:
                yield from batch.step()
            for i, request in zip(rows, requests, strict=True):
                results[i] = request.result(torch.stack(request.logits) if decode.keep_logits else None)
    finally:
        if was_training:
            drafter.train()


def check_prompt(target: Any, i: int, prompt: Sequence[int], params: SamplingParams) -> None:
    facts = target.facts
    if not len(prompt):
        raise ValueError(f"prompt {i} is empty: give at least one token id (for example the beginning-of-text id)")
    if min(prompt) < 0 or max(prompt) >= facts.vocab:
        raise ValueError(f"prompt {i} has id {max(prompt)} or {min(prompt)}, the target has ids 0..{facts.vocab - 1}")
    strange = [x for x in params.stop_ids if not 0 <= x < facts.vocab]
    if strange:
        raise ValueError(f"stop_ids: {strange} are no ids of the target, which has 0..{facts.vocab - 1}")
    if len(prompt) + params.max_new_tokens > facts.max_positions:
        raise ValueError(
            f"prompt {i}: {len(prompt)} tokens and max_new_tokens={params.max_new_tokens} exceed the target's "
            f"{facts.max_positions} positions: shorten the prompt or lower max_new_tokens"
        )


class _Ledger:
    """What penalties and the minimal length need to know of a batch; empty where no request uses them."""

    def __init__(
        self, requests: list[Request], params: ParamRows, vocab: int, tokens: int, device: torch.device
    ) -> None:
        self.tokens = tokens
        self.requests = requests
        self.prompt_BV = self.counts_BV = self.stops_BV = None
        b = len(requests)
        if params.penalises:
            self.prompt_BV = torch.zeros(b, vocab, dtype=torch.bool, device=device)
            self.counts_BV = torch.zeros(b, vocab, dtype=torch.int64, device=device)
            for row, request in enumerate(requests):
                self.prompt_BV[row, torch.tensor(request.prompt, device=device)] = True
        self.shortest_B1 = torch.tensor([[r.params.min_new_tokens] for r in requests], device=device)
        if any(r.params.min_new_tokens for r in requests):
            self.stops_BV = torch.zeros(b, vocab, dtype=torch.bool, device=device)
            for row, request in enumerate(requests):
                self.stops_BV[row, sorted(request.eos_ids | request.stop_ids)] = True

    def add(self, row: int, ids: list[int]) -> None:
        """Count committed tokens."""
        if self.counts_BV is not None:
            index = torch.tensor(ids, dtype=torch.int64, device=self.counts_BV.device)
            self.counts_BV[row].index_add_(0, index, torch.ones_like(index))

    def at(self, depths_BR: Tensor, tokens_BJ: Tensor | None = None, see_BRJ: Tensor | None = None) -> History:
        """History of B * R nodes: `depths_BR` drafted tokens lie before each, those of `tokens_BJ` that it sees."""
        b, r = depths_BR.shape
        prompt_XV = counts_XV = banned_XV = None
        if self.counts_BV is not None and self.prompt_BV is not None:
            counts_BRV = self.counts_BV[:, None].repeat(1, r, 1)
            if tokens_BJ is not None and see_BRJ is not None:
                counts_BRV.scatter_add_(2, tokens_BJ[:, None].expand(b, r, -1), see_BRJ.long())
            counts_XV = counts_BRV.flatten(0, 1)
            prompt_XV = self.prompt_BV.repeat_interleave(r, 0)
        if self.stops_BV is not None:
            made_B1 = torch.tensor([[len(q.ids)] for q in self.requests], device=depths_BR.device)
            early_BR = made_B1 + depths_BR < self.shortest_B1
            if bool(early_BR.any()):
                banned_XV = (self.stops_BV[:, None] & early_BR[:, :, None]).flatten(0, 1)
        return History(self.tokens, prompt_XV, counts_XV, banned_XV)


@dataclass
class _Pass:
    """One verification pass of the target: the anchor and N nodes, M = N + 1 rows per request."""

    ids_BM: Tensor
    depths_BM: Tensor  # 0 = anchor
    start_B1: Tensor  # the anchor's position
    see_BMM: Tensor | None  # None = a chain
    hung_BE: Tensor | None  # the node that each extra row hangs on
    last_hidden_BTD: Tensor  # T >= M: extra rows follow, and a fixed width pads
    taps_BTPD: Tensor | None
    logits_BMV: Tensor
    chain: bool


class _Batch:
    """Requests that are decoded together, and everything that lives as long as they do."""

    def __init__(self, target: Any, requests: list[Request], drafter: Any, decode: DecodeConfig) -> None:
        self.target, self.requests, self.drafter, self.decode = target, requests, drafter, decode
        self.device = target.device
        facts = target.facts
        params = [r.params for r in requests]
        self.params = ParamRows.pack(params, self.device)
        self.ledger = _Ledger(requests, self.params, facts.vocab, facts.tokens, self.device)
        self.seeds_B = torch.tensor([r.seed for r in requests], device=self.device)
        self.rounds_B = torch.zeros_like(self.seeds_B)
        self.plan = None if drafter is None else plan_of(drafter, decode, facts.vocab, facts.tokens)
        chain = TREES[decode.tree].chain
        # Of drafters that propose:
        depth = depth_of(drafter, decode)
        beside = 0 if getattr(drafter, "own_depth", None) is None else depth
        self.budget = Budget(depth if chain else decode.nodes + beside, depth, 1 if chain else decode.width)
        nodes, extra = self.budget.nodes, getattr(drafter, "extra_rows", 0)
        if self.plan is not None:
            nodes, extra = self.plan.nodes, self.plan.extra
        elif drafter is None:
            nodes = 0
        self.prefix_kv: Tensor | None = getattr(drafter, "prefix_kv", None)
        self.table_XD: Tensor | None = getattr(drafter, "extra_table_XD", None)
        written = rows_written(drafter)
        self._check_width(nodes, extra, written)
        longest = max(len(r.prompt) + r.params.max_new_tokens for r in requests)
        behind = 0 if self.prefix_kv is None else self.prefix_kv.shape[3]
        self.slots = longest + max(decode.fixed_width or 1 + nodes + extra + behind, written)
        # A drafter keeps what it was asked to extend, which may be more than what stayed in the tree.
        asked, depth = nodes, nodes
        if self.plan is not None:
            asked, depth = max(nodes, self.plan.asked), self.plan.depth
        self.draft_slots = longest + depth + 1 + asked
        # Rows are bit-identical only over equally many keys as well: read all slots, not as far as the longest row.
        self.cache = target.new_cache(len(requests), self.slots, read_all=decode.fixed_width is not None)
        self.taps = tuple(drafter.taps) if drafter is not None else ()
        self.draft_params = self.params
        if decode.draft_temperature is not None:
            self.draft_params = ParamRows.pack(
                [replace(p, temperature=decode.draft_temperature if p.temperature > 0 else 0.0) for p in params],
                self.device,
            )
        self.state: Any = None
        self.commit: Commit | None = None
        self.anchors_B = torch.zeros_like(self.seeds_B)

    def _check_width(self, nodes: int, extra: int, written: int) -> None:
        """Refuse a fixed width that the passes do not fit."""
        width, rows = self.decode.fixed_width, nodes + extra + 1
        if width is None or self.drafter is None:
            return
        if self.prefix_kv is not None:
            raise ValueError(
                f"fixed_width={width}: this drafter's prefix adds keys that plain decoding has not, so equal width does "
                "not make equal bits: leave fixed_width unset"
            )
        if written > width:
            raise ValueError(
                f"fixed_width={width} is less than the {written} rows of the drafter's own passes, which would need more "
                f"slots than plain decoding has: use fixed_width={written} (here and in plain decoding)"
            )
        if rows > width:
            less = f", or k={width - 1}" if not extra else ""
            raise ValueError(
                f"fixed_width={width} is less than the {rows} rows of a verification with k={nodes}: "
                f"use fixed_width={rows} (here and in plain decoding){less}"
            )

    @property
    def running(self) -> bool:
        """Whether some request is not done."""
        return any(r.stop_reason is None for r in self.requests)

    def _spend(self, stage: str, since: float) -> float:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)  # or the time of a stage shows up in the next one
        now = time.perf_counter()
        for r in self.requests:
            r.stats.seconds[stage] += (now - since) / len(self.requests)
        return now

    @torch.no_grad()
    def prefill(self) -> list[Event]:
        """Run the prompts; the token after each is the first of its answer."""
        clock = time.perf_counter()
        counts = [len(r.prompt) for r in self.requests]
        longest = max(counts)
        ids_BT = torch.tensor([r.prompt + [0] * (longest - len(r.prompt)) for r in self.requests], device=self.device)
        counts_B = torch.tensor(counts, device=self.device)
        positions_BT = torch.arange(longest, device=self.device).expand_as(ids_BT)
        out = self.target.forward(ids_BT, positions_BT, cache=self.cache, taps=self.taps)
        self.cache.commit(counts_B)
        last_B1D = out.last_hidden_BTD[torch.arange(len(counts), device=self.device), counts_B - 1][:, None]
        logits_BV = self.target.head(last_B1D)[:, 0]
        history = self.ledger.at(torch.zeros(len(counts), 1, dtype=torch.int64, device=self.device))
        if self.params.hot:
            u_B = rng.uniform(self.seeds_B, rng.TARGET, counts_B)
            token_B = draw(probs(logits_BV, self.params, history), u_B)
        else:
            token_B = top(logits_BV, self.params, history)
        self.anchors_B = token_B
        if self.drafter is not None:
            prefill = Prefill(len(counts), self.draft_slots, self.device, self.target.dtype)
            self.state = self.drafter.init(prefill)
            self.commit = Commit(
                ids_BT, counts_B, positions_BT, token_B, out.taps_BTPD, out.last_hidden_BTD, kv=self.cache
            )
        clock = self._spend("prefill", clock)
        events = []
        for row, token in enumerate(token_B.tolist()):
            events.append(self._commit(row, [token], 0, logits_BV[row : row + 1]))
        self._spend("commit", clock)
        return events

    @torch.no_grad()
    def step(self) -> list[Event]:
        """One verification for every request that is not done."""
        clock = time.perf_counter()
        tree = self._draft() if self.drafter is not None else self._no_draft()
        clock = self._spend("draft", clock)
        passed = self._verify(tree)
        clock = self._spend("verify", clock)
        choice, rule = self._choose(tree, passed)
        events = self._commit_tokens(tree, passed, choice, rule)
        self._keep(tree, passed, choice)
        if "teacher" in getattr(self.drafter, "draft_needs", ()):
            self._show(tree, passed)
        self._spend("commit", clock)
        return events

    def _no_draft(self) -> Tree:
        empty_BN = self.anchors_B[:, None][:, :0]
        return Tree(empty_BN, empty_BN, empty_BN, empty_BN.float(), empty_BN.bool())

    def _draft(self) -> Tree:
        sampled = self.draft_params.hot and self._wants_rows()
        places = verify.places(self.decode.verifier, sampled) if self.draft_params.hot else "fixed"
        draft = Draft(self.draft_params, self.ledger.at, sampled, self.seeds_B, self.rounds_B, places)
        if self.plan is None:
            self.state, tree = self.drafter.propose(self.state, self.commit, self.budget, self.params, draft)
            return tree
        self.state, level = self.drafter.start(self.state, self.commit)
        self.state, tree = TREES[self.plan.tree].build(self.drafter, self.state, level, draft, self.plan)
        return with_prompts(tree, self.plan)

    def _wants_rows(self) -> bool:
        """Whether siblings are to be drawn: where the rule can use their q."""
        name = self.decode.verifier
        return TREES[self.decode.tree].draws and (name == "auto" or verify.VERIFIERS[name].wants_rows)

    def _verify(self, tree: Tree) -> _Pass:
        """Run the anchor, the nodes and the extra rows through the target."""
        b, n = tree.tokens_BN.shape
        chain = n == 0 or (tree.is_chain() if self.plan is None else TREES[self.plan.tree].chain)
        ids_BM = torch.cat([self.anchors_B[:, None], tree.tokens_BN], 1)
        depths_BM = torch.nn.functional.pad(tree.depths_BN, (1, 0))
        start_B1 = self.cache.lengths_B[:, None].clone()
        ids_BT, depths_BT, extra = ids_BM, depths_BM, tree.extra
        if extra is not None:
            ids_BT, depths_BT = torch.cat([ids_BT, extra.ids_BE], 1), torch.cat([depths_BT, extra.depths_BE], 1)
        missing = 0
        if self.decode.fixed_width is not None:
            missing = self.decode.fixed_width - ids_BT.shape[1]
            if not chain or missing < 0:
                raise ValueError(
                    f"fixed_width={self.decode.fixed_width}: the drafter proposed {n} nodes that are not a chain of at "
                    "most fixed_width - 1; lower k or leave fixed_width unset"
                )
            ids_BT = torch.cat([ids_BT, self.anchors_B[:, None].expand(b, missing)], 1)
            rest_T = torch.arange(ids_BT.shape[1] - missing, ids_BT.shape[1], device=self.device)
            depths_BT = torch.cat([depths_BT, rest_T.expand(b, missing)], 1)
        see_BMM = None if chain else tree.visible()
        see_BTA, hung_BE = see_BMM, None
        if extra is not None:
            see_BTA, hung_BE = self._sight(tree, tree.visible() if see_BMM is None else see_BMM, missing)
        options = {} if self.prefix_kv is None or extra is None else {"prefix_kv": self.prefix_kv}
        # Drafts beyond the target's last position are beyond every budget, and some targets refuse to read them.
        positions_BT = (start_B1 + depths_BT).clamp(max=self.target.facts.max_positions - 1)
        out = self.target.forward(
            self._inputs(ids_BT), positions_BT, cache=self.cache, see_BTA=see_BTA, taps=self.taps, **options
        )
        hidden_BTD = out.last_hidden_BTD
        if self.decode.fixed_width is None:
            hidden_BTD = hidden_BTD[:, : n + 1]  # of extra rows the drafter wants the hidden states alone
        logits_BMV = self.target.head(hidden_BTD)[:, : n + 1]
        return _Pass(
            ids_BM, depths_BM, start_B1, see_BMM, hung_BE, out.last_hidden_BTD, out.taps_BTPD, logits_BMV, chain
        )

    def _sight(self, tree: Tree, see_BMM: Tensor, padding: int) -> tuple[Tensor, Tensor]:
        """What the rows of a pass with extra rows see of each other and of the prefix, bool [B, T, T + P]; and the node
        that each extra row hangs on."""
        assert tree.extra is not None
        b, m, _ = see_BMM.shape
        t = m + tree.extra.ids_BE.shape[1]
        see_BEX, hung_BE = tree.extra.place(see_BMM)
        prefix = 0 if self.prefix_kv is None else self.prefix_kv.shape[3]
        see_BTA = torch.eye(t + padding, dtype=torch.bool, device=self.device).repeat(b, 1, 1)
        see_BTA[:, :m, :m], see_BTA[:, m:t, :t] = see_BMM, see_BEX
        see_BTA = torch.nn.functional.pad(see_BTA, (0, prefix))
        see_BTA[:, m:t, t + padding :] = True
        return see_BTA, hung_BE

    def _inputs(self, ids_BT: Tensor) -> Tensor:
        """Ids as they are; embeddings [B, T, D] where ids from V on name rows of the drafter's table."""
        if self.table_XD is None:
            return ids_BT
        vocab = self.target.facts.vocab
        ours_BT = ids_BT >= vocab
        embed_BTD = self.target.embed(ids_BT.masked_fill(ours_BT, 0))
        table_BTD = self.table_XD.to(embed_BTD.dtype)[(ids_BT - vocab).clamp(min=0)]
        return torch.where(ours_BT[:, :, None], table_BTD, embed_BTD)

    def _choose(self, tree: Tree, passed: _Pass) -> tuple[verify.Choice, str]:
        """Apply the verifier to the logits of the anchor and the nodes."""
        b, m, v = passed.logits_BMV.shape
        decode = self.decode
        name = verify.resolve(decode.verifier, tree, self.params.hot, decode.allow_lossy)
        rule = verify.VERIFIERS[name]
        see_BMJ = None
        if self.params.penalises:
            see_BMJ = (tree.visible() if passed.see_BMM is None else passed.see_BMM)[:, :, 1:]
        history = self.ledger.at(passed.depths_BM, tree.tokens_BN, see_BMJ)
        flat_XV = passed.logits_BMV.reshape(b * m, v)
        params = self.params.repeat(m)
        if rule.greedy_only:
            return rule.choose(tree, rule.probabilities(tree, top(flat_XV, params, history).view(b, m)), None), name
        p_BMV = probs(flat_XV, params, history).view(b, m, v)
        odds = rule.probabilities(tree, p_BMV, *(getattr(decode, setting) for setting in rule.settings))
        return rule.choose(tree, odds, self._coins(m, passed.depths_BM)), name

    def _coins(self, m: int, depths_BM: Tensor) -> verify.Coins:
        """One call for all the uniforms of a verification."""
        nodes_M = torch.arange(m, device=self.device)
        b = depths_BM.shape[0]
        # The token after a node at depth d stands at this position; the anchor is the newest committed token.
        at_BM = self.cache.lengths_B[:, None] + depths_BM + 1
        zero_BM = torch.zeros_like(at_BM)
        round_BM, node_BM = self.rounds_B[:, None].expand(b, m), nodes_M.expand(b, m)
        kinds = torch.tensor([rng.ACCEPT, rng.RESIDUAL, rng.TARGET], device=self.device)[:, None, None]
        u_3BM = rng.uniform(
            self.seeds_B[:, None],
            kinds,
            torch.stack([zero_BM, zero_BM, at_BM]),
            torch.stack([round_BM, round_BM, zero_BM]),
            torch.stack([node_BM, node_BM, zero_BM]),
        )
        return verify.Coins(u_3BM[0][:, 1:], u_3BM[1], u_3BM[2])

    def _commit_tokens(self, tree: Tree, passed: _Pass, choice: verify.Choice, rule: str) -> list[Event]:
        """Hand the accepted tokens and the one that follows to the requests."""
        nodes_BL = (choice.path_BL - 1).clamp(min=0)
        counts, tested, last = choice.counts_B.tolist(), choice.tested_B.tolist(), choice.token_B.tolist()
        drafted = (tree.tokens_BN.gather(1, nodes_BL) if nodes_BL.shape[1] else nodes_BL).tolist()
        ranks = nodes_BL.tolist() if passed.chain else tree.sibling_ranks().gather(1, nodes_BL).tolist()
        used = tree.valid_BN.sum(1).tolist()
        events = []
        for row, request in enumerate(self.requests):
            if request.stop_reason is not None:
                continue
            c, before = counts[row], len(request.ids)
            logits_XV = None
            if self._wants_logits(request):
                logits_XV = passed.logits_BMV[row, [0, *choice.path_BL[row, :c].tolist()]]
            events.append(self._commit(row, [*drafted[row][:c], last[row]], c, logits_XV))
            path_ranks = [0] * c if passed.chain else ranks[row][:c]
            request.stats.record(len(request.ids) - before, path_ranks, tested[row], used[row])
            if self.drafter is not None:
                request.stats.rule = rule
        return events

    def _extra_out(self, tree: Tree, passed: _Pass, choice: verify.Choice) -> ExtraOut | None:
        """What the extra rows computed, for the drafter."""
        if tree.extra is None or passed.hung_BE is None:
            return None
        m = passed.ids_BM.shape[1]
        rows = slice(m, m + passed.hung_BE.shape[1])
        taps = None if passed.taps_BTPD is None else passed.taps_BTPD[:, rows]
        return ExtraOut(tree.extra, passed.hung_BE, choice.stop_B, passed.last_hidden_BTD[:, rows], taps)

    def _keep(self, tree: Tree, passed: _Pass, choice: verify.Choice) -> None:
        """Keep the accepted rows in the cache and for the drafter; a request that is done keeps nothing more."""
        live_B = torch.tensor([r.stop_reason is None for r in self.requests], device=self.device)
        keep_B = torch.where(live_B, choice.counts_B + 1, 0)
        a = int(keep_B.max())
        if a == 0:
            return
        path_BA = torch.nn.functional.pad(choice.path_BL, (1, 0))[:, :a]  # the anchor first
        hidden, taps = passed.last_hidden_BTD, passed.taps_BTPD
        if passed.chain:
            self.cache.commit(keep_B)
            ids_BA, hidden, taps = passed.ids_BM[:, :a], hidden[:, :a], None if taps is None else taps[:, :a]
        else:
            self.cache.compact(path_BA, keep_B)
            rows_B1 = torch.arange(len(self.requests), device=self.device)[:, None]
            ids_BA, hidden = passed.ids_BM.gather(1, path_BA), hidden[rows_B1, path_BA]
            taps = None if taps is None else taps[rows_B1, path_BA]
        positions_BA = passed.start_B1 + torch.arange(a, device=self.device)
        extra_out = self._extra_out(tree, passed, choice)
        self.commit = Commit(ids_BA, keep_B, positions_BA, choice.token_B, taps, hidden, self.cache, extra_out)
        self.anchors_B = choice.token_B
        self.rounds_B += live_B

    def _show(self, tree: Tree, passed: _Pass) -> None:
        """Hand a drafter that learns from rejected candidates too what the target said after every row."""
        assert self.commit is not None
        valid_BM = torch.nn.functional.pad(tree.valid_BN, (1, 0), value=True) & (self.commit.counts_B > 0)[:, None]
        self.commit.verified = Verified(passed.ids_BM, valid_BM, passed.logits_BMV)

    def _wants_logits(self, request: Request) -> bool:
        return self.decode.keep_logits or request.params.logprobs

    def _commit(self, row: int, tokens: list[int], accepted: int, logits_XV: Tensor | None) -> Event:
        """Commit tokens to one request; `logits_XV`: the target's rows that they were chosen from."""
        request = self.requests[row]
        event = request.commit(tokens, accepted)
        self.ledger.add(row, event.ids)
        if logits_XV is not None and self._wants_logits(request):
            logits_XV = logits_XV[: len(event.ids)]
            if request.params.logprobs:
                x_XV = logits_XV if logits_XV.dtype == torch.float64 else logits_XV.float()
                ids_X1 = torch.tensor(event.ids, device=x_XV.device)[:, None]
                request.logprobs += (x_XV.gather(1, ids_X1)[:, 0] - x_XV.logsumexp(-1)).tolist()
            if self.decode.keep_logits:
                request.logits += list(logits_XV.clone())
        return event
