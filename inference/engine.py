"""The engine of the decode loops: requests come and go between its steps, the others do not notice.

    engine = Engine(target, drafter, DecodeConfig(k=4), longest=3072, prompt=2048)
    engine.add(Request(0, ids, params, target.facts.eos_ids, target.tokenizer, live=True))
    while engine.busy:
        for event in engine.step(): ...

A step either lets waiting requests in (their prompts run; the token after each is the first of its answer) or makes one
verification for all that run: draft, verify, choose, commit. Every row has its own length: accepting different numbers
of tokens is a length update in the cache.

Who is in the batch changes between steps alone. Rows that are done are closed up (their place is taken by the last
row), so that a pass has as many rows as there are requests; a newcomer's prompt runs on its own and is then copied into
a row of the cache, and the drafter is handed it as part of the next ragged `Commit`: its contract allows rows of any
length, so every drafter can take newcomers. The one exception is `refuse_open`. `Engine.closed` is the same without
newcomers, for loops whose requests all start together (inference/speculate.py); where bits hang on the number of rows,
rows that are done stay in it (`Engine.closes_up`).

Tests: tests/test_engine.py, tests/test_speculate.py.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from ..kernels import rng
from ..losses.probs import ParamRows, SamplingParams, draw, probs, top
from ..models.drafter import Budget, Commit, ExtraOut, Prefill, Verified
from ..models.tree import Tree
from . import verify
from .ahead import Ahead, why_not_ahead
from .commit import Event, Request
from .decode import DecodeConfig, check_width, depth_of, plan_of, refuse_rule, rows_written, wants_rows
from .device_step import DeviceStep
from .ledger import Ledger
from .prefixes import Prefixes, Start, States, read_together
from .rows import closed_up, join, take_rows
from .trees import TREES, Draft, with_prompts


def shares(drafter: Any) -> bool:
    """Whether what a drafter knows depends on when a batch ends."""
    return bool(getattr(getattr(drafter, "config", None), "shared", False))


def refuse_open(drafter: Any) -> None:
    """ValueError for a drafter that cannot take newcomers."""
    if shares(drafter):
        raise ValueError(
            f"{drafter.method}: shared=true shares answers from one closed batch to the next, and here requests come and "
            "go: set shared=false"
        )


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


class Engine:
    """Requests that are decoded together, and everything that lives as long as they do.

    `longest`: most tokens of a prompt and its answer; `prompt`: of a prompt. At most `decode.max_rows` requests run at a
    time, the others wait in the order in which they came. With `prefixes`, rows that are done are kept there, and prompts
    start from what they share with them. Raises ValueError for settings that do not fit.
    """

    def __init__(
        self,
        target: Any,
        drafter: Any,
        decode: DecodeConfig,
        longest: int,
        prompt: int,
        prefixes: Prefixes | None = None,
    ) -> None:
        refuse_open(drafter)
        if decode.fixed_width is not None:
            raise ValueError(
                f"fixed_width={decode.fixed_width} is for closed batches, here their rows change: leave it out"
            )
        self._build(target, drafter, decode, decode.max_rows, longest, prompt)
        self.prefixes = prefixes
        if self.ahead is not None and prefixes is not None:
            self.ahead.step.states = self.states

    @staticmethod
    def closed(target: Any, requests: Sequence[Request], drafter: Any, decode: DecodeConfig) -> Engine:
        """An engine for these requests, which all start together."""
        engine = Engine.__new__(Engine)
        longest = max(len(r.prompt) + r.params.max_new_tokens for r in requests)
        engine._build(target, drafter, decode, len(requests), longest, 0)
        engine.waiting = list(requests)
        return engine

    def _build(self, target: Any, drafter: Any, decode: DecodeConfig, rows: int, longest: int, prompt: int) -> None:
        self.target, self.drafter, self.decode = target, drafter, decode
        self.device, self.rows, self.longest, self.prompt = target.device, rows, longest, prompt
        self.open = prompt > 0
        facts = target.facts
        self.waiting: list[Request] = []
        self.requests: list[Request] = []
        self.entering: list[Request] = []  # of the step at hand
        self.untold: list[Request] = []  # of the step at hand, those that were not done when it began
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
        check_width(drafter, decode, nodes, extra)
        behind = 0 if self.prefix_kv is None else self.prefix_kv.shape[3]
        self.not_ahead = why_not_ahead(target, drafter, decode, self.plan)
        spare = 0 if self.not_ahead is not None else Ahead.spare(nodes)
        self.slots = longest + spare + max(decode.fixed_width or 1 + nodes + extra + behind, written)
        # A drafter keeps what it was asked to extend, which may be more than what stayed in the tree.
        asked, depth = nodes, nodes
        if self.plan is not None:
            asked, depth = max(nodes, self.plan.asked), self.plan.depth
        # A commit that holds a newcomer's prompt is as long for the others, behind what they have.
        self.draft_slots = longest + spare + depth + 1 + asked + prompt
        # Rows are bit-identical only over equally many keys as well: read all slots, not as far as the longest row.
        self.cache = target.new_cache(rows, self.slots, read_all=decode.fixed_width is not None)
        self.ahead: Ahead | None = None
        if self.not_ahead is None:
            self.ahead = Ahead(DeviceStep(target, drafter, decode, self.plan, self.cache))
        self.runs_ahead = False
        self.closes_up = self.open or (self.ahead is None and decode.fixed_width is None and self._rows_move())
        self.taps = tuple(drafter.taps) if drafter is not None else ()
        self.prefixes = None
        self.states = States(getattr(drafter, "draft_needs", frozenset()), rows, self.slots)
        self.state: Any = None
        self.begun = False  # the drafter's state was made; drafters that keep nothing have None
        self.commit: Commit | None = None
        self.seeds_B = self.rounds_B = self.anchors_B = torch.zeros(0, dtype=torch.int64, device=self.device)

    def _rows_move(self) -> bool:
        """Whether rows of a closed batch can be closed up: drafter and cache know how, and do not go by the batch."""
        known = self.drafter is None or hasattr(self.drafter, "reset")
        return known and hasattr(self.cache, "arrange") and not shares(self.drafter)

    def refuse(self, params: SamplingParams) -> None:
        """ValueError, which names the field, for a request that the acceptance rule does not fit."""
        try:
            refuse_rule(self.drafter, self.decode, [params])
        except ValueError as error:
            raise ValueError(f"temperature: {error}") from None

    def add(self, request: Request) -> None:
        """Let a request wait for a row. Raises ValueError for one that no row can hold."""
        if (tokens := len(request.prompt) + request.params.max_new_tokens) > self.longest:
            raise ValueError(f"{tokens} tokens of prompt and answer, there is room for {self.longest}")
        if len(request.prompt) > self.prompt:
            raise ValueError(f"a prompt of {len(request.prompt)} tokens, there is room for {self.prompt}")
        self.waiting.append(request)

    def cancel(self, request: Request) -> None:
        """Forget a request; its row is free for the next step."""
        if request in self.waiting:
            self.waiting.remove(request)
        if request.stop_reason is None:
            request.stop_reason = "cancelled"

    def clear(self) -> list[Request]:
        """After a step that failed: forget the requests that took part in it, and give those whose end nobody was told of,
        those among them that ended in it. Those that wait stay."""
        failed = [*self.untold, *self.entering]
        failed += [r for r in self.requests if r.stop_reason is None and r not in failed]
        self.waiting = [r for r in self.waiting if r not in failed]
        self.requests, self.entering, self.untold = [], [], []
        self.commit = self.state = None
        self.begun = False
        if self.ahead is not None:
            self.ahead.clear(self)
        self.cache.arrange([], self.rows)
        self.cache.reset()
        if self.prefixes is not None:
            self.prefixes.clear()
        return failed

    @property
    def running(self) -> int:
        """Requests that have a row and are not done."""
        return sum(r.stop_reason is None for r in self.requests)

    @property
    def busy(self) -> bool:
        """Whether some request is not done."""
        return bool(self.waiting) or self.running > 0

    def step(self) -> list[Event]:
        """Let waiting requests in, where rows are free; otherwise one verification for every request that is not done."""
        self.untold = [r for r in self.requests if r.stop_reason is None]
        events = self._step()
        self.entering, self.untold = [], []
        return events

    def _step(self) -> list[Event]:
        free = self.rows - self.running if self.open or not self.requests else 0
        events: list[Event] = []
        if self.waiting and free > 0:
            events = self._settle()
            self.entering = newcomers = self.waiting[:free]
            starts = [Start() if self.prefixes is None else self.prefixes.find(r.prompt) for r in newcomers]
            count = len(newcomers)
            if self.open:
                count = read_together([len(r.prompt) for r in newcomers], starts, self.longest)
            self.entering = newcomers[:count]
            del self.waiting[:count]
            return events + self._enter(self.entering, starts[:count])
        if self.closes_up and 0 < self.running < len(self.requests):
            events = self._settle()
            if self.running:
                self._arrange([])
        return events + self._decode() if self.running else events

    def _settle(self) -> list[Event]:
        """Before rows move: read what the device did ahead of the host, and keep what the cache holds of requests that are
        done, whose rows will be taken."""
        events = [] if self.ahead is None else self.ahead.drain(self.requests)
        for row, r in enumerate(self.requests):
            if self.prefixes is not None and r.stop_reason is not None:
                ids = r.prompt + r.ids
                n = min(len(ids), int(self.cache.lengths_B[row]))  # a device step may have gone on beyond the end
                self.prefixes.keep(ids[:n], self.cache.kv[:, :, row, :, :n], self.states.row(row, n))
        return events

    def _spend(self, stage: str, since: float, requests: Sequence[Request]) -> float:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)  # or the time of a stage shows up in the next one
        now = time.perf_counter()
        for r in requests:
            r.stats.seconds[stage] += (now - since) / len(requests)
        return now

    def _arrange(self, newcomers: list[Request]) -> None:
        """Close up the rows of requests that are done, and open empty ones for newcomers behind those that stay."""
        if self.ahead is not None:
            self.ahead.leave(self)
        rows = closed_up([r.stop_reason is None for r in self.requests])
        grown = len(newcomers)
        self.requests = [self.requests[i] for i in rows] + newcomers
        if self.prefixes is not None:
            self.states.arrange(rows, self.cache.lengths_B.tolist())
        moves = self.closes_up and bool(self.open or rows)  # a closed batch finds its rows empty
        if moves:
            self.cache.arrange(rows, grown)
        if self.drafter is not None:
            if not self.begun:
                self.begun = True
                self.state = self.drafter.init(Prefill(self.rows, self.draft_slots, self.device, self.target.dtype))
            if moves:
                self.state = take_rows(self.state, rows, grown)
                if grown:
                    new_B = torch.arange(len(rows), len(rows) + grown, device=self.device)
                    self.state = self.drafter.reset(self.state, new_B)
            if self.commit is not None:
                kept = take_rows(replace(self.commit, kv=None), rows, 0) if rows else None
                self.commit = None if kept is None else replace(kept, kv=self.cache)
        self.seeds_B = torch.tensor([r.seed for r in self.requests], device=self.device)
        self.rounds_B, self.anchors_B = (take_rows(x, rows, grown) for x in (self.rounds_B, self.anchors_B))
        params = [r.params for r in self.requests]
        self.params = self.draft_params = ParamRows.pack(params, self.device)
        if (heat := self.decode.draft_temperature) is not None:
            heated = [replace(p, temperature=heat if p.temperature > 0 else 0.0) for p in params]
            self.draft_params = ParamRows.pack(heated, self.device)
        self.ledger = Ledger(self.requests, self.params, self.target.facts.vocab, self.target.facts.tokens, self.device)
        why = self.not_ahead if self.ahead is None else self.ahead.why_not(self)
        self.runs_ahead = self.ahead is not None and why is None
        for r in self.requests:
            r.stats.step = f"host ({why})" if why else "host" if self.ahead is None else self.ahead.name

    @torch.no_grad()
    def _enter(self, newcomers: list[Request], starts: list[Start]) -> list[Event]:
        """Run the prompts, from where they start; the token after each is the first of its answer."""
        clock = time.perf_counter()
        self._arrange(newcomers)
        first = len(self.requests) - len(newcomers)
        counts, begun = [len(r.prompt) for r in newcomers], [start.count for start in starts]
        longest, rest = max(counts), max(n - s for n, s in zip(counts, begun, strict=True))
        cache = self.cache if first == 0 else self.target.new_cache(len(counts), max(begun) + rest)
        for i, start in enumerate(starts):
            if self.prefixes is not None and start.kept is not None:
                self.prefixes.use(start)
                cache.fill(i, start.kept.kv[..., : start.count, :])
                self.states.fill(first + i, start)
                newcomers[i].stats.reused = start.count
        padded = [r.prompt + [0] * (max(begun) + rest - n) for r, n in zip(newcomers, counts, strict=True)]
        ids_BT = torch.tensor(padded, device=self.device)
        counts_B, begun_B = torch.tensor([counts, begun], device=self.device)
        positions_BT = begun_B[:, None] + torch.arange(rest, device=self.device)
        out = self.target.forward(ids_BT.gather(1, positions_BT), positions_BT, cache=cache, taps=self.taps)
        cache.commit(counts_B - begun_B)
        if cache is not self.cache:
            self.cache.adopt(first, cache)
        last_B1D = out.last_hidden_BTD[torch.arange(len(counts), device=self.device), counts_B - begun_B - 1][:, None]
        logits_BV = self.target.head(last_B1D)[:, 0]
        facts, params = self.target.facts, ParamRows.pack([r.params for r in newcomers], self.device)
        ledger = Ledger(newcomers, params, facts.vocab, facts.tokens, self.device)
        history = ledger.at(torch.zeros(len(counts), 1, dtype=torch.int64, device=self.device))
        if params.hot:
            u_B = rng.uniform(self.seeds_B[first:], rng.TARGET, counts_B)
            token_B = draw(probs(logits_BV, params, history), u_B)
        else:
            token_B = top(logits_BV, params, history)
        self.anchors_B = torch.cat([self.anchors_B[:first], token_B])
        if self.drafter is not None:
            taps, hidden = out.taps_BTPD, out.last_hidden_BTD
            if self.prefixes is not None:
                self.states.put(first, positions_BT, taps, hidden)
            if any(begun):  # the drafter is told of the whole prompt, of which a part did not run
                taps, hidden = self.states.read(first, len(counts), longest)
                positions_BT = torch.arange(longest, device=self.device).expand(len(counts), -1)
            prompt = Commit(ids_BT[:, :longest], counts_B, positions_BT, token_B, taps, hidden, kv=self.cache)
            self.commit = prompt if self.commit is None else join(self.commit, prompt)
        clock = self._spend("prefill", clock, newcomers)
        events = []
        for i, token in enumerate(token_B.tolist()):
            events.append(self._commit(first + i, [token], 0, logits_BV[i : i + 1]))
        self._spend("commit", clock, newcomers)
        return events

    @torch.no_grad()
    def _decode(self) -> list[Event]:
        """One verification for every request that is not done."""
        clock = time.perf_counter()
        if self.ahead is not None and self.runs_ahead:
            events = self.ahead.advance(self)
            for r in self.requests:  # stages overlap, and none is waited for
                r.stats.seconds["verify"] += (time.perf_counter() - clock) / len(self.requests)
            return events
        tree = self._draft() if self.drafter is not None else self._no_draft()
        clock = self._spend("draft", clock, self.requests)
        passed = self._verify(tree)
        clock = self._spend("verify", clock, self.requests)
        choice, rule = self._choose(tree, passed)
        events = self._commit_tokens(tree, passed, choice, rule)
        self._keep(tree, passed, choice)
        if "teacher" in getattr(self.drafter, "draft_needs", ()):
            self._show(tree, passed)
        self._spend("commit", clock, self.requests)
        return events

    def _no_draft(self) -> Tree:
        empty_BN = self.anchors_B[:, None][:, :0]
        return Tree(empty_BN, empty_BN, empty_BN, empty_BN.float(), empty_BN.bool())

    def _draft(self) -> Tree:
        sampled = self.draft_params.hot and wants_rows(self.decode)
        places = verify.places(self.decode.verifier, sampled) if self.draft_params.hot else "fixed"
        draft = Draft(self.draft_params, self.ledger.at, sampled, self.seeds_B, self.rounds_B, places)
        if self.plan is None:
            self.state, tree = self.drafter.propose(self.state, self.commit, self.budget, self.params, draft)
            return tree
        self.state, level = self.drafter.start(self.state, self.commit)
        self.state, tree = TREES[self.plan.tree].build(self.drafter, self.state, level, draft, self.plan)
        return with_prompts(tree, self.plan)

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
        if self.params.paths:
            see_BMJ = (tree.visible() if passed.see_BMM is None else passed.see_BMM)[:, :, 1:]
        history = self.ledger.at(passed.depths_BM, tree.tokens_BN, see_BMJ)
        flat_XV = passed.logits_BMV.reshape(b * m, v)
        params = self.params.repeat(m)
        if rule.greedy_only:
            return rule.choose(tree, rule.probabilities(tree, top(flat_XV, params, history).view(b, m)), None), name
        p_BMV = probs(flat_XV, params, history).view(b, m, v)
        odds = rule.probabilities(tree, p_BMV, *(getattr(decode, setting) for setting in rule.settings))
        coins = verify.coins_of(self.seeds_B, self.rounds_B, self.cache.lengths_B, passed.depths_BM)
        return rule.choose(tree, odds, coins), name

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
            self.cache.compact(path_BA, keep_B, read=True)
            rows_B1 = torch.arange(len(self.requests), device=self.device)[:, None]
            ids_BA, hidden = passed.ids_BM.gather(1, path_BA), hidden[rows_B1, path_BA]
            taps = None if taps is None else taps[rows_B1, path_BA]
        positions_BA = passed.start_B1 + torch.arange(a, device=self.device)
        extra_out = self._extra_out(tree, passed, choice)
        self.commit = Commit(ids_BA, keep_B, positions_BA, choice.token_B, taps, hidden, self.cache, extra_out)
        self.anchors_B = choice.token_B
        self.rounds_B += live_B
        if self.prefixes is not None:
            self.states.put(0, positions_BA, taps, hidden)

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
            request.take_logits(
                logits_XV[: len(event.ids)], event.ids, self.target.facts.tokens, self.decode.keep_logits
            )
        return event
