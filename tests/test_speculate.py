"""The decode loop: greedy output identical to plain decoding for every method, tree and batch; what a drafter is handed;
stops, budgets, widths, streams. CASES B41, B47, B56."""

from collections.abc import Callable, Iterator
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from draftsmith.inference.load import free_drafter
from draftsmith.inference.speculate import DecodeConfig, Result, chain_width, generate, stream
from draftsmith.inference.trees import TREES, fits
from draftsmith.losses.probs import SamplingParams
from draftsmith.models import METHODS, TRAINING_FREE
from draftsmith.models.drafter import Budget, Commit, Level, Prefill
from draftsmith.models.tree import Extra, Prompts, Tree

V = 8
T_VVV = torch.randn(V, V, V, generator=torch.Generator().manual_seed(0), dtype=torch.float64) * 2


def by_table(before: Tensor, last: Tensor, at: Any) -> Tensor:
    return T_VVV[before.clamp(min=0), last]


@pytest.fixture(scope="module")
def target(scripted: Any) -> Any:
    return scripted.Target(by_table, V)


def prompts_of(n: int, vocab: int, seed: int = 0) -> list[list[int]]:
    random = torch.Generator().manual_seed(seed)
    lengths = torch.randint(1, 12, (n,), generator=random).tolist()
    return [torch.randint(vocab, (length,), generator=random).tolist() for length in lengths]


def ids_of(results: list[Result]) -> list[list[int]]:
    return [r.ids for r in results]


class Self:
    """The target as its own drafter, with a cache of its own: everything it drafts is right."""

    method = "self"
    draft_needs = loss_needs = frozenset({"ids"})
    taps: tuple[int, ...] = ()
    d2t_W = None
    parallel = 1
    max_depth = None

    def __init__(self, target: Any, wrong: bool = False) -> None:
        self.target, self.wrong = target, wrong

    def init(self, prefill: Prefill) -> Any:
        return self.target.new_cache(prefill.rows, prefill.slots)

    def start(self, cache: Any, commit: Commit) -> tuple[Any, Level]:
        self.target.forward(commit.ids_BT, commit.positions_BT, cache=cache)
        cache.commit(commit.counts_B)
        self.see_BXX = torch.ones(len(commit.counts_B), 1, 1, dtype=torch.bool)
        return cache, self.level(cache, commit.anchor_B[:, None], self.see_BXX, cache.lengths_B[:, None])

    def extend(self, cache: Any, tokens_BN: Tensor, parents_BN: Tensor) -> tuple[Any, Level]:
        b, n = tokens_BN.shape
        old = self.see_BXX.shape[1]
        above_BNX = self.see_BXX[torch.arange(b)[:, None], parents_BN]
        see_BNA = torch.cat([above_BNX, torch.eye(n, dtype=torch.bool).expand(b, n, n)], 2)
        grown_BXX = torch.cat([self.see_BXX, torch.zeros(b, old, n, dtype=torch.bool)], 2)
        self.see_BXX = torch.cat([grown_BXX, see_BNA], 1)
        at_BN = cache.lengths_B[:, None] + above_BNX.sum(-1)
        return cache, self.level(cache, tokens_BN, see_BNA, at_BN)

    def level(self, cache: Any, tokens_BN: Tensor, see_BNA: Tensor, at_BN: Tensor) -> Level:
        states = self.target.forward(tokens_BN, at_BN, cache=cache, see_BTA=see_BNA)
        logits_BNW = self.target.head(states.last_hidden_BTD)
        if self.wrong:
            logits_BNW = logits_BNW.scatter(2, logits_BNW.argmax(-1, keepdim=True), -1e9)
        return Level(logits_BNW, torch.ones(tokens_BN.shape, dtype=torch.bool))


class Lookup:
    """Proposes what a table of known answers says next, as an n-gram drafter would; some of it is made wrong."""

    taps: tuple[int, ...] = ()
    d2t_W, parallel, max_depth = None, 1, None

    def __init__(self, prompts: list[list[int]], answers: list[list[int]], vocab: int, keep: list[int]) -> None:
        self.rows = [(len(p), a) for p, a in zip(prompts, answers, strict=True)]
        self.vocab, self.keep, self.calls = vocab, keep, 0

    def init(self, prefill: Prefill) -> None:
        return None

    def propose(self, state: None, commit: Commit, budget: Budget, params: Any, draft: Any) -> tuple[None, Tree]:
        right = self.keep[self.calls % len(self.keep)]
        self.calls += 1
        size = budget.nodes if right >= 0 else 0  # -1: nothing to propose
        tokens_BN = torch.zeros(len(self.rows), size, dtype=torch.int64)
        for b, (start, answer) in enumerate(self.rows):
            last = int(commit.counts_B[b]) - 1
            at = int(commit.positions_BT[b, last]) + 1 - start if last >= 0 else len(answer)
            ahead = (answer[at + 1 :] + [0] * size)[:size]
            tokens_BN[b] = torch.tensor([x if j < right else (x + 1) % self.vocab for j, x in enumerate(ahead)])
        steps_BN = torch.arange(size).expand_as(tokens_BN)
        valid_BN = torch.ones_like(tokens_BN, dtype=torch.bool)
        return state, Tree(tokens_BN, steps_BN, steps_BN + 1, torch.zeros(tokens_BN.shape), valid_BN)


# Greedy identity


SHAPES = {
    "chain": DecodeConfig(k=4),
    "static": DecodeConfig(k=3, tree="static", width=3, nodes=10),
    "dynamic": DecodeConfig(k=3, tree="dynamic", width=3, nodes=9),
    "cut": DecodeConfig(k=4, tree="cut", threshold=0.02),
    "cape": DecodeConfig(k=3, tree="cape", width=4, nodes=9),
    "opt": DecodeConfig(k=3, tree="opt", nodes=8, threshold=0.05),
    "best_first": DecodeConfig(k=4, tree="best_first", nodes=10),
    "capped": DecodeConfig(k=4, tree="capped", width=3, nodes=10),
    "ppd": DecodeConfig(k=4, tree="ppd", width=3, nodes=10),
}


SELF_SHAPES = [shape for shape, decode in SHAPES.items() if fits(decode.tree, Self)]


SMALL: dict[str, dict[str, Any]] = {
    "dflash": {"block": 5, "layers": 2},
    "dspark": {"block": 4, "layers": 1, "rank": 8},
}


def shapes_of(drafter: Any) -> list[DecodeConfig]:
    """The trees that it can grow."""
    return [shape for shape in SHAPES.values() if fits(shape.tree, drafter)]


def make(method: str, target: Any, draft_ids: Tensor | None = None, **options: Any) -> Any:
    torch.manual_seed(0)
    config = METHODS[method].Config(**(SMALL.get(method, {}) | options))
    drafter = METHODS[method](config, target.facts, draft_ids=draft_ids)
    drafter.init_from_target(target)
    return drafter.to(target.dtype)


@pytest.fixture(scope="module")
def plain40(tiny: Callable[..., Any]) -> tuple[Any, list[list[int]], list[list[int]]]:
    """A float64 target, 40 prompts, and its own 32 tokens for each, by full passes without a cache."""
    real = tiny(dtype=torch.float64)
    prompts = prompts_of(40, real.facts.tokens)
    answers = ids_of(generate(real, prompts, SamplingParams(max_new_tokens=32), None, DecodeConfig(max_rows=8)))
    with torch.no_grad():
        for prompt, answer in list(zip(prompts, answers, strict=True))[:6]:
            line = torch.tensor([prompt + answer])
            states = real.forward(line, torch.arange(line.shape[1])[None])
            tops = real.head(states.last_hidden_BTD)[0].argmax(-1).tolist()
            assert tops[len(prompt) - 1 : -1] == answer
    return real, prompts, answers


def test_the_shapes_cover_the_table() -> None:
    assert set(SHAPES) == set(TREES)


# Every tree that a method's drafters can grow; batch 1, which takes four times as long, for chains (all of them at batch
# 1: tests/bench/lossless.py).
PAIRS = [
    (method, shape)
    for method, kind in METHODS.items()
    for shape, decode in SHAPES.items()
    if fits(decode.tree, kind) and not (TREES[decode.tree].at_once and getattr(kind, "parallel", None) == 1)
]
RUNS = [(*pair, rows) for pair in PAIRS for rows in ((1, 4) if pair[1] == "chain" else (4,))]


@pytest.mark.parametrize(("method", "shape", "rows"), RUNS)
def test_greedy_identity_40_prompts_of_every_method(plain40: Any, method: str, shape: str, rows: int) -> None:
    real, prompts, answers = plain40
    drafter = make(method, real)
    some = slice(40 if shape in ("chain", "static", "dynamic") else 12)
    params = SamplingParams(max_new_tokens=32)
    got = generate(real, prompts[some], params, drafter, replace(SHAPES[shape], max_rows=rows))
    assert ids_of(got) == answers[some]


@pytest.mark.parametrize(("method", "shape"), PAIRS)
def test_greedy_identity_with_a_draft_vocabulary(plain40: Any, method: str, shape: str) -> None:
    real, prompts, answers = plain40
    drafter = make(method, real, torch.arange(0, real.facts.tokens, 3))
    params = SamplingParams(max_new_tokens=32)
    assert ids_of(generate(real, prompts[:8], params, drafter, SHAPES[shape])) == answers[:8]


@pytest.mark.parametrize("shape", SELF_SHAPES)
def test_a_drafter_that_is_the_target_is_always_right(plain40: Any, shape: str) -> None:
    real, prompts, answers = plain40
    results = generate(real, prompts[:8], SamplingParams(max_new_tokens=32), Self(real), SHAPES[shape])
    assert ids_of(results) == answers[:8]
    total = sum((r.stats for r in results[1:]), results[0].stats)
    # At T=0 the greedy path is a node of every tree but where one spends its nodes elsewhere.
    assert all(a == 1.0 for a in total.alpha) or shape in ("dynamic", "opt")
    assert total.tau > 2.5 and sum(sum(r.from_draft) for r in results) == total.from_draft


@pytest.mark.parametrize("shape", SELF_SHAPES)
def test_a_drafter_that_is_always_wrong_costs_nothing_but_time(plain40: Any, shape: str) -> None:
    real, prompts, answers = plain40
    decode = replace(SHAPES[shape], tree="chain") if shape == "chain" else replace(SHAPES[shape], width=1, nodes=3)
    results = generate(real, prompts[:8], SamplingParams(max_new_tokens=32), Self(real, wrong=True), decode)
    assert ids_of(results) == answers[:8]
    assert all(r.stats.tau == 1.0 and not any(r.from_draft) for r in results if r.stats.verifies)


@pytest.mark.parametrize("k", [1, 2, 8])
@pytest.mark.parametrize("rows", [1, 4])
def test_proposals_from_look_up(plain40: Any, k: int, rows: int) -> None:
    real, prompts, answers = plain40
    params = SamplingParams(max_new_tokens=32)
    for first in range(0, 8, rows):
        some = slice(first, first + rows)
        drafter = Lookup(prompts[some], answers[some], real.facts.tokens, keep=[k, 0, 1, -1, k // 2])
        results = generate(real, prompts[some], params, drafter, DecodeConfig(k=k, max_rows=rows))
        assert ids_of(results) == answers[some]
        assert any(r.stats.from_draft for r in results)


def test_exact_ties_go_to_the_lowest_id_everywhere(scripted: Any) -> None:
    def tied(before: Tensor, last: Tensor, at: Any) -> Tensor:
        logits = torch.full((*last.shape, V), -1.0)
        return logits.scatter(-1, torch.stack([(last * 3 + 1) % V, (last + 5) % V], -1), 2.0)

    real = scripted.Target(tied, V)
    drafter = scripted.Drafter(lambda before, last, depth: tied(before, last, 0).flip(-1))
    plain = generate(real, [[1], [2], [7, 3]], SamplingParams(max_new_tokens=30))
    at_once = scripted.Drafter(lambda before, last, depth: tied(before, last, 0).flip(-1), parallel=4)
    for some in (drafter, at_once, Self(real)):
        for shape in shapes_of(some):
            got = generate(real, [[1], [2], [7, 3]], SamplingParams(max_new_tokens=30), some, shape)
            assert ids_of(got) == ids_of(plain)


def test_a_prompt_alone_equals_the_prompt_in_a_batch(plain40: Any) -> None:
    real, prompts, answers = plain40
    for rows in (1, 3, 8):
        results = generate(real, prompts[:8], SamplingParams(max_new_tokens=32), None, DecodeConfig(max_rows=rows))
        assert ids_of(results) == answers[:8]


# What a drafter is handed


@pytest.mark.parametrize("shape", SELF_SHAPES)
def test_commits_hold_exactly_the_accepted_rows(plain40: Any, shape: str) -> None:
    """Ids, positions, taps and last hidden states of what was accepted, as a pass over the whole text has them."""
    real, prompts, answers = plain40

    class Watch(Self):
        taps = (1, 3)

        def init(self, prefill: Prefill) -> Any:
            self.rows: list[list[Any]] = [[] for _ in range(prefill.rows)]
            self.anchors: list[list[int]] = [[] for _ in range(prefill.rows)]
            return super().init(prefill)

        def start(self, cache: Any, commit: Commit) -> tuple[Any, Level]:
            for b, count in enumerate(commit.counts_B.tolist()):
                assert commit.taps_BTPD is not None and commit.last_hidden_BTD is not None
                for t in range(count):
                    at, token = int(commit.positions_BT[b, t]), int(commit.ids_BT[b, t])
                    self.rows[b].append((at, token, commit.taps_BTPD[b, t], commit.last_hidden_BTD[b, t]))
                if count:
                    self.anchors[b].append(int(commit.anchor_B[b]))
                    assert int(commit.following()[b, count - 1]) == int(commit.anchor_B[b])
            return super().start(cache, commit)

    drafter = Watch(real)
    drafter.target = real
    results = generate(real, prompts[:4], SamplingParams(max_new_tokens=24), drafter, SHAPES[shape])
    assert any(r.stats.from_draft for r in results)
    for b, result in enumerate(results):
        assert result.ids == answers[b][:24]
        line = prompts[b] + result.ids
        with torch.no_grad():
            states = real.forward(torch.tensor([line]), torch.arange(len(line))[None], taps=(1, 3))
        assert [at for at, *_ in drafter.rows[b]] == list(range(len(drafter.rows[b])))
        for at, token, taps_PD, hidden_D in drafter.rows[b]:
            assert token == line[at]
            assert torch.allclose(taps_PD, states.taps_BTPD[0, at], atol=1e-12)
            assert torch.allclose(hidden_D, states.last_hidden_BTD[0, at], atol=1e-12)
        assert drafter.anchors[b] == [line[p] for p in sorted(set(_anchors(drafter, b, line)))]


def _anchors(drafter: Any, b: int, line: list[int]) -> Iterator[int]:
    """Positions right after each commit's last row: where the anchors stand."""
    known = [at for at, *_ in drafter.rows[b]]
    at = 0
    for anchor in drafter.anchors[b]:
        at = next(i for i in range(at + 1, len(line)) if line[i] == anchor and (i - 1) in known)
        yield at


def test_dropout_is_off_while_drafting_and_on_again_after(plain40: Any) -> None:
    real, prompts, _ = plain40
    drafter = make("medusa", real).train()
    modes = []
    drafter.register_forward_pre_hook(lambda *_: None)
    start = drafter.start
    drafter.start = lambda *a: (modes.append(drafter.training), start(*a))[1]
    generate(real, prompts[:1], SamplingParams(max_new_tokens=4), drafter)
    assert modes and not any(modes) and drafter.training


# Stops and budgets (CASES B47)


@pytest.mark.parametrize("k", [1, 4, 8])
def test_b47_minimal_length_with_two_end_tokens(scripted: Any, k: int) -> None:
    def prefers_five(before: Tensor, last: Tensor, at: Tensor) -> Tensor:
        logits = by_table(before, last, at).clone()
        late = (at >= 2 + 2).to(logits.dtype)  # from the third token of the answer on
        logits[..., 5] = logits[..., 5] + 50 * late
        logits[..., 2] = logits[..., 2] + 40 * late
        return logits

    real = scripted.Target(prefers_five, V, eos_ids=(2, 5))
    params = SamplingParams(min_new_tokens=6, max_new_tokens=20)
    plain = generate(real, [[1, 3], [0, 4]], params)
    assert all(len(r.ids) == 7 and r.ids[-1] == 5 and not {2, 5} & set(r.ids[:-1]) for r in plain)
    drafters = [
        scripted.Drafter(lambda before, last, depth: by_table(before, last, 0)),
        scripted.Drafter(lambda before, last, depth: torch.eye(V)[torch.full_like(last, 5)] * 9),  # always end tokens
        scripted.Drafter(lambda before, last, depth: by_table(before, last, 0), parallel=max(2, k)),
        Self(real),
    ]
    for drafter in drafters:
        for shape in shapes_of(drafter):
            assert ids_of(generate(real, [[1, 3], [0, 4]], params, drafter, replace(shape, k=k))) == ids_of(plain)
            hot = replace(params, temperature=0.7, seed=3)
            matched = replace(shape, k=k, verifier="sample_match")
            want = ids_of(generate(real, [[1, 3], [0, 4]], hot))
            assert ids_of(generate(real, [[1, 3], [0, 4]], hot, drafter, matched)) == want
            for r in generate(real, [[1, 3]] * 2, hot, drafter, replace(shape, k=k)):
                assert not {2, 5} & set(r.ids[:6])


def test_b47_without_an_end_token_the_budget_ends_it(target: Any) -> None:
    prompts, params = [[1, 2]], SamplingParams(max_new_tokens=30)
    plain = generate(target, prompts, params)
    drafter = Lookup(prompts, ids_of(plain), V, keep=[3, 0, 2])
    got = generate(target, prompts, params, drafter, DecodeConfig(k=3))
    assert ids_of(got) == ids_of(plain) and len(got[0].ids) == 30 and got[0].stop_reason == "length"


def test_b47_the_budget_is_exact_with_longer_drafts(target: Any) -> None:
    for budget in (1, 2, 7):
        results = generate(
            target, [[1, 2], [3]], SamplingParams(max_new_tokens=budget), Self(target), DecodeConfig(k=16)
        )
        assert [len(r.ids) for r in results] == [budget] * 2
        assert all(r.stats.committed == budget and r.stats.from_draft <= budget - 1 for r in results)


def test_b47_a_minimal_length_without_any_end_token_changes_nothing(target: Any) -> None:
    plain, short = (generate(target, [[1]], SamplingParams(max_new_tokens=9, min_new_tokens=n)) for n in (0, 9))
    assert ids_of(plain) == ids_of(short)


def test_a_stop_inside_an_accepted_block_ends_the_row_there(target: Any) -> None:
    plain = generate(target, [[1, 2], [3]], SamplingParams(max_new_tokens=24))
    for at in range(24):
        stop = plain[0].ids[at]
        params = [SamplingParams(max_new_tokens=24, stop_ids=(stop,)), SamplingParams(max_new_tokens=24)]
        want = plain[0].ids[: plain[0].ids.index(stop) + 1]
        for decode in (DecodeConfig(k=8), DecodeConfig(k=4, tree="dynamic")):
            first, second = generate(target, [[1, 2], [3]], params, Self(target), decode)
            assert first.ids == want and first.stop_reason == "stop_id" and second.ids == plain[1].ids
            assert first.stats.committed == len(want) and first.stats.from_draft == sum(first.from_draft)


def test_rows_done_early_fill_no_slots(tiny: Callable[..., Any]) -> None:
    """One row ends at once, the other runs long: the first must not grow, in the target's cache and the drafter's."""
    real = tiny(dtype=torch.float64)
    for method in METHODS:
        deep = DecodeConfig(k=1, tree="static", choices=((0,), (0, 0), (0, 0, 0)))
        wide = DecodeConfig(k=5, tree="dynamic", width=6, nodes=2)
        drafter = make(method, real)
        for shape in (*shapes_of(drafter), deep, wide):
            params = [SamplingParams(max_new_tokens=1), SamplingParams(max_new_tokens=12, ignore_eos=True)]
            results = generate(real, [[5] * 16, [7]], params, drafter, shape)
            assert [len(r.ids) for r in results] == [1, 12]


@pytest.mark.parametrize("shape", SELF_SHAPES)
def test_what_a_cache_held_before_is_never_seen(plain40: Any, shape: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every slot of the target's and the drafter's cache starts with large garbage."""
    real, prompts, answers = plain40
    make_cache = real.new_cache

    def poisoned(*sizes: int, read_all: bool = False) -> Any:
        cache = make_cache(*sizes, read_all=read_all)
        cache.kv.fill_(1e3)
        return cache

    monkeypatch.setattr(real, "new_cache", poisoned)
    for some in (None, Self(real)):
        results = generate(real, prompts[:4], SamplingParams(max_new_tokens=16), some, SHAPES[shape])
        assert ids_of(results) == [a[:16] for a in answers[:4]]


# Fixed width


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("rows", [1, 4])
def test_fixed_width_chains_have_the_same_bits(tiny: Callable[..., Any], dtype: torch.dtype, rows: int) -> None:
    """Ids and logits, at both widths (float64 agrees in its ids, not in every last bit: its matrix products depend on
    a row's place)."""
    real = tiny(dtype=dtype)
    prompts = prompts_of(4, real.facts.tokens, seed=3)
    params = SamplingParams(max_new_tokens=24, ignore_eos=True)
    for k in (2, 4):
        decode = DecodeConfig(k=k, fixed_width=k + 1, max_rows=rows, keep_logits=True)
        plain = generate(real, prompts, params, None, decode)
        for first in range(0, 4, rows):
            some = slice(first, first + rows)
            drafter = Lookup(prompts[some], ids_of(plain[some]), real.facts.tokens, keep=[k, 1, 0, k - 1])
            for want, got in zip(plain[some], generate(real, prompts[some], params, drafter, decode), strict=True):
                assert got.ids == want.ids and torch.equal(got.logits, want.logits)
                assert got.stats.tau > 1.3


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_fixed_width_of_every_method(tiny: Callable[..., Any], dtype: torch.dtype) -> None:
    real = tiny(dtype=dtype)
    prompts = prompts_of(4, real.facts.tokens, seed=4)
    decode = DecodeConfig(k=4, fixed_width=20, keep_logits=True)  # room for prompt rows on every node
    params = SamplingParams(max_new_tokens=16)
    plain = generate(real, prompts, params, None, decode)
    for method in METHODS:
        options = {"variant": "pass"} if method == "prompt_tokens" else {}  # BiTA's prefix adds keys: refused
        got = generate(real, prompts, params, make(method, real, **options), decode)
        assert ids_of(got) == ids_of(plain), method
        assert all(torch.equal(a.logits, b.logits) for a, b in zip(got, plain, strict=True)), method
    for method in TRAINING_FREE:
        free = free_drafter(method, real)
        width = max(20, chain_width(free, decode) or 0)
        ways = (generate(real, prompts, params, x, replace(decode, fixed_width=width)) for x in (None, free))
        for want, ours in zip(*ways, strict=True):
            assert ours.ids == want.ids and torch.equal(ours.logits, want.logits), method
    for method, words in (("dual_view", "less than the 8 rows of the drafter's own"), ("prompt_tokens", "prefix adds")):
        with pytest.raises(ValueError, match=words):
            generate(
                real, prompts, SamplingParams(max_new_tokens=4), make(method, real), DecodeConfig(k=1, fixed_width=5)
            )


def test_the_least_width_has_room_for_the_drafters_own_passes(tiny: Callable[..., Any]) -> None:
    """A dual view writes its whole block of 8 into the target's cache, however short the chain is."""
    real = tiny(dtype=torch.float32)
    drafter, params = make("dual_view", real), SamplingParams(max_new_tokens=6)
    for k in (1, 7, 8):
        decode = DecodeConfig(k=k)
        width = chain_width(drafter, decode)
        assert width == max(8, k + 1)
        plain, got = (generate(real, [[5]], params, x, replace(decode, fixed_width=width)) for x in (None, drafter))
        assert ids_of(got) == ids_of(plain)


def test_fixed_width_narrower_than_the_draft_is_refused(target: Any) -> None:
    with pytest.raises(ValueError, match="fixed_width=3 is less than the 5 rows"):
        generate(target, [[1]], SamplingParams(max_new_tokens=4), Self(target), DecodeConfig(k=4, fixed_width=3))
    with pytest.raises(ValueError, match="tree='chain'"):
        DecodeConfig(tree="dynamic", fixed_width=9)


# Extra rows


class Prompted:
    """Random prompt tokens: embeddings of `members` virtual tokens for each of 3 depths, and a prefix of random keys and
    values if wanted. It keeps what it was handed."""

    method = "prompted"
    draft_needs = loss_needs = frozenset({"ids"})
    taps: tuple[int, ...] = (1,)
    d2t_W = None
    parallel = max_depth = 3

    def __init__(self, target: Any, members: int = 1, prefix: int = 0) -> None:
        random = torch.Generator().manual_seed(members + prefix)
        facts, self.target = target.facts, target
        self.prompts = Prompts(3, members)
        shape = (facts.layers, 2, facts.kv_heads, prefix, facts.head_dim)
        self.extra_table_XD = torch.randn(3 * members, facts.width, generator=random).to(target.dtype)
        self.prefix_kv = torch.randn(shape, generator=random).to(target.dtype) if prefix else None

    def init(self, prefill: Prefill) -> list[Commit]:
        return []

    def start(self, state: list[Commit], commit: Commit) -> tuple[Any, Level]:
        state.append(commit)
        b, n = len(commit.counts_B), self.prompts.members
        if commit.extra_out is None:
            blank_BKW = torch.zeros(b, 3, self.target.facts.vocab, dtype=self.target.dtype)
            return state, Level(blank_BKW, torch.zeros(b, 3, dtype=torch.bool))
        hidden_BXD, valid_BX = commit.extra_out.below_accepted(3 * n)
        logits_BKW = self.target.head(hidden_BXD).unflatten(1, (3, n)).mean(2)
        self.seen = state
        return state, Level(logits_BKW, valid_BX.unflatten(1, (3, n)).all(2))


@pytest.mark.parametrize(("members", "prefix"), [(1, 0), (2, 0), (1, 4)])
@pytest.mark.parametrize("shape", SHAPES)
def test_prompt_rows_change_nothing_in_the_answer(plain40: Any, shape: str, members: int, prefix: int) -> None:
    real, prompts, answers = plain40
    params = SamplingParams(max_new_tokens=32)
    for rows in (None, 4 * members) if shape != "ppd" else (None,):
        decode = replace(SHAPES[shape], max_rows=3, prompt_rows=rows, nodes=14 if shape == "ppd" else 6)
        got = generate(real, prompts[:6], params, Prompted(real, members, prefix), decode)
        assert ids_of(got) == answers[:6] and got[0].stats.drafted > 0


@pytest.mark.parametrize("window", [None, 5])
@pytest.mark.parametrize("prefix", [0, 3])
def test_extra_rows_compute_what_a_pass_without_a_cache_does(
    tiny: Callable[..., Any], window: int | None, prefix: int
) -> None:
    """Every prompt row's states, recomputed from the text, its node's path and its own predecessors alone."""
    real = tiny(family="qwen3" if window is None else "mistral", window=window, dtype=torch.float64)
    prompts = prompts_of(3, real.facts.tokens, seed=8)
    drafter = Prompted(real, 2, prefix)
    decode = DecodeConfig(k=3, tree="best_first", nodes=5, prompt_rows=16)
    params = SamplingParams(max_new_tokens=10, ignore_eos=True)
    trees: list[Tree] = []
    builder = TREES["best_first"]

    def keep(*arguments: Any) -> Any:
        state, tree = builder.build(*arguments)
        trees.append(tree)
        return state, tree

    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(TREES, "best_first", replace(builder, build=keep))
        results = generate(real, prompts, params, drafter, decode)
    assert ids_of(results) == ids_of(generate(real, prompts, params))
    n, v, checked = 5, real.facts.vocab, 0
    for commit, tree in zip(drafter.seen[1:], trees, strict=False):
        out = commit.extra_out
        assert out is not None and out.taps_BEPD is not None
        for b in range(3):
            if int(commit.counts_B[b]) == 0:
                continue
            anchor_at = int(commit.positions_BT[b, 0])
            text = [*prompts[b], *results[b].ids][: anchor_at + 1]
            for e in range(0, out.rows.ids_BE.shape[1], 3):
                if not out.rows.valid_BE[b, e]:
                    continue
                above, at = [], n + 1 + e  # ids from the row up to below the anchor
                while at:
                    row_at = at - n - 1
                    above.append(int(out.rows.ids_BE[b, row_at] if row_at >= 0 else tree.tokens_BN[b, at - 1]))
                    at = int(out.rows.parents_BE[b, row_at] if row_at >= 0 else tree.parents_BN[b, at - 1])
                ids = torch.tensor([text + above[::-1]])
                rows = ids >= v
                embeds = torch.where(
                    rows[..., None],
                    drafter.extra_table_XD[(ids - v).clamp(min=0)],
                    real.embed(ids.masked_fill(rows, 0)),
                )
                t = ids.shape[1]
                see = torch.ones(1, t, t, dtype=torch.bool).tril()
                see = torch.cat([see, rows[:, :, None].expand(1, t, prefix)], 2)
                with torch.no_grad():
                    states = real.forward(
                        embeds, torch.arange(t)[None], see_BTA=see, taps=(1,), prefix_kv=drafter.prefix_kv
                    )
                assert int(out.rows.depths_BE[b, e]) == t - len(text)
                assert torch.allclose(out.last_hidden_BED[b, e], states.last_hidden_BTD[0, -1], atol=1e-10)
                assert torch.allclose(out.taps_BEPD[b, e], states.taps_BTPD[0, -1], atol=1e-10)
                checked += 1
    assert checked > 30


def test_fixed_width_with_prompt_rows_has_the_same_bits(tiny: Callable[..., Any]) -> None:
    real = tiny(dtype=torch.float32)
    prompts = prompts_of(4, real.facts.tokens, seed=3)
    params = SamplingParams(max_new_tokens=16, ignore_eos=True)
    drafter = Prompted(real, 2)
    decode = DecodeConfig(k=2, keep_logits=True)
    width = chain_width(drafter, decode)
    assert width == 3 + 3 * 2 * 2  # depth 2: two tokens of two members on each of three nodes
    decode = replace(decode, fixed_width=width)
    plain = generate(real, prompts, params, None, decode)
    for want, got in zip(plain, generate(real, prompts, params, drafter, decode), strict=True):
        assert got.ids == want.ids and torch.equal(got.logits, want.logits)
    with pytest.raises(
        ValueError, match=r"less than the 15 rows .*: use fixed_width=15 \(here and in plain decoding\)$"
    ):
        generate(real, prompts, params, drafter, replace(decode, fixed_width=14))
    reads_kv = SimpleNamespace(parallel=6, draft_needs=frozenset({"kv"}))
    assert chain_width(reads_kv, DecodeConfig(k=2)) == 6 and chain_width(reads_kv, DecodeConfig(k=8)) == 9
    assert chain_width(Prompted(real, 1, 4), decode) is None
    with pytest.raises(ValueError, match="prefix adds keys"):
        generate(real, prompts, params, Prompted(real, 1, 4), decode)


def test_a_drafter_that_proposes_may_bring_rows_of_tokens(scripted: Any) -> None:
    """Rows behind the anchor and behind each other, as lookahead has them: their states are those of their own lines."""
    real = scripted.Target(by_table, V)
    seen = []

    class Ahead:
        taps: tuple[int, ...] = ()
        d2t_W, parallel, max_depth, extra_rows = None, 1, None, 3

        def init(self, prefill: Prefill) -> None:
            return None

        def propose(self, state: None, commit: Commit, budget: Budget, params: Any, draft: Any) -> tuple[None, Tree]:
            out, b = commit.extra_out, len(commit.counts_B)
            if out is not None:
                last_B = commit.ids_BT[:, 0]
                for row, tokens in enumerate(out.rows.ids_BE.tolist()):
                    if commit.counts_B[row]:
                        lines = [(last_B[row], tokens[0]), (tokens[0], tokens[1]), (last_B[row], tokens[2])]
                        for e, (before, token) in enumerate(lines):
                            assert torch.equal(out.last_hidden_BED[row, e], T_VVV[before, token])
                            seen.append((row, e))
                assert out.nodes_BE.eq(0).all() and out.taps_BEPD is None
            empty_BN = torch.zeros(b, 0, dtype=torch.int64)
            tree = Tree(empty_BN, empty_BN, empty_BN, empty_BN.float(), empty_BN.bool())
            tokens_BE = torch.arange(3).expand(b, 3) + int(commit.counts_B.sum()) % 3
            places = torch.tensor([[0, 1, 0], [1, 2, 1]]).expand(b, 2, 3)
            tree.extra = Extra(tokens_BE, places[:, 0], places[:, 1], torch.ones(b, 3, dtype=torch.bool))
            return state, tree

    prompts, params = [[1, 2], [3], [0, 4, 4]], SamplingParams(max_new_tokens=8)
    got = generate(real, prompts, params, Ahead(), DecodeConfig(k=2))
    assert ids_of(got) == ids_of(generate(real, prompts, params)) and len(seen) > 40


# Results


def test_streams_say_what_generate_returns(tiny: Callable[..., Any]) -> None:
    real = tiny(dtype=torch.float64)
    prompts = prompts_of(3, real.facts.tokens, seed=5)
    params = [
        SamplingParams(max_new_tokens=30),
        SamplingParams(max_new_tokens=12, temperature=0.9, seed=1),
        SamplingParams(max_new_tokens=30, stop_strings=("e", "t")),
    ]
    results = generate(real, prompts, params, Self(real), DecodeConfig(k=3, max_rows=2))
    ids: list[list[int]] = [[], [], []]
    text, last = ["", "", ""], [""] * 3
    for event in stream(real, prompts, params, Self(real), DecodeConfig(k=3, max_rows=2)):
        ids[event.row] += event.ids
        text[event.row] += event.text
        last[event.row] = event.stop_reason or last[event.row]
        assert len(event.ids) == len(event.from_draft)
    assert ids == ids_of(results) and text == [r.text for r in results]
    assert last == [r.stop_reason for r in results]


def test_log_probabilities_and_logits_are_those_of_the_model(plain40: Any) -> None:
    real, prompts, _ = plain40
    for shape in shapes_of(Self):
        decode = replace(shape, keep_logits=True)
        for params in (SamplingParams(logprobs=True, max_new_tokens=12), SamplingParams(0.8, logprobs=True, seed=2)):
            result = generate(real, prompts[:1], replace(params, max_new_tokens=12), Self(real), decode)[0]
            line = torch.tensor([prompts[0] + result.ids])
            with torch.no_grad():
                hidden = real.forward(line, torch.arange(line.shape[1])[None]).last_hidden_BTD
                logits_TV = real.head(hidden)[0, len(prompts[0]) - 1 : -1]
            assert result.logits is not None and result.logprobs is not None
            assert torch.allclose(result.logits, logits_TV, atol=1e-10)
            want = torch.log_softmax(logits_TV, -1).gather(1, torch.tensor(result.ids)[:, None])[:, 0]
            assert torch.allclose(torch.tensor(result.logprobs).double(), want, atol=1e-10)


def test_b56_conditional_acceptance_is_counted_by_depth(scripted: Any) -> None:
    """Right at depth 1 always and at depth 2 half the time."""

    def step(before: Tensor, last: Tensor, at: Tensor) -> Tensor:
        return torch.nn.functional.one_hot((last + 1) % V, V).double() * 9

    real = scripted.Target(step, V)
    turn = [0]

    def half(before: Tensor, last: Tensor, depth: int) -> Tensor:
        turn[0] += depth == 1
        wrong = depth == 2 and turn[0] % 2 == 0
        return torch.nn.functional.one_hot((last + 1 + wrong) % V, V).double() * 9

    result = generate(real, [[0]], SamplingParams(max_new_tokens=501), scripted.Drafter(half), DecodeConfig(k=2))[0]
    assert result.stats.alpha[0] == 1.0 and result.stats.alpha[1] == pytest.approx(0.5, abs=0.02)
    assert result.stats.accepted[1] / result.stats.verifies == pytest.approx(0.5, abs=0.02)
    assert result.stats.tau == pytest.approx(2.5, abs=0.02)
    assert result.stats.rule == "greedy" and result.stats.seconds_total > 0
    assert set(result.stats.seconds) == {"prefill", "draft", "verify", "commit"}


def test_the_target_runs_once_per_step(scripted: Any) -> None:
    real = scripted.Target(by_table, V)
    result = generate(real, [[1, 2, 3]], SamplingParams(max_new_tokens=20), Self(scripted.Target(by_table, V)))[0]
    assert real.passes == [(1, 3)] + [(1, 5)] * result.stats.verifies


def test_lossy_rules_need_the_flag_and_say_so(target: Any) -> None:
    params = SamplingParams(temperature=1.0, max_new_tokens=20, seed=0)
    for name in ("typical", "fuzzy", "entropy"):
        with pytest.raises(ValueError, match="allow_lossy"):
            DecodeConfig(verifier=name)
        lossy = DecodeConfig(verifier=name, allow_lossy=True)
        assert generate(target, [[1]], params, Self(target), lossy)[0].stats.rule == name
        cold = generate(target, [[1]], SamplingParams(max_new_tokens=20), Self(target), lossy)[0]
        assert cold.ids == generate(target, [[1]], SamplingParams(max_new_tokens=20))[0].ids
    with pytest.raises(ValueError, match="temperature 0 only"):
        generate(target, [[1]], params, Self(target), DecodeConfig(verifier="greedy"))


def test_rules_that_cannot_fit_are_refused_before_anything_runs(target: Any, scripted: Any) -> None:
    """By the settings alone, or by the temperatures of requests that are decoded together, the last ones included."""
    for settings, message in (
        ({"verifier": "ratio", "tree": "static"}, "is for chains"),
        ({"verifier": "block", "tree": "dynamic"}, "is for chains"),
        ({"verifier": "ratio_tree", "tree": "cape"}, "needs the rows q"),
        ({"verifier": "ratio", "draft_temperature": 0.0}, "needs the rows q"),
    ):
        with pytest.raises(ValueError, match=message):
            DecodeConfig(**settings)
    DecodeConfig(verifier="block", tree="static", choices=((0,), (0, 0)))  # a chain
    real = scripted.Target(by_table, V)
    hot, cold = SamplingParams(temperature=1.0, max_new_tokens=6), SamplingParams(max_new_tokens=6)
    with pytest.raises(ValueError, match="needs the rows q"):
        generate(real, [[1]] * 3, [hot, cold, cold], Self(real), DecodeConfig(verifier="ratio", max_rows=2))
    with pytest.raises(ValueError, match="temperature 0 only"):
        generate(real, [[1]] * 3, [cold, cold, hot], Self(real), DecodeConfig(verifier="greedy", max_rows=2))
    assert not real.passes


@pytest.mark.parametrize("method", ["lookahead", "dual_view"])  # a window of 7 columns, a block of 8
def test_drafts_may_reach_past_the_last_position(tiny: Any, method: str) -> None:
    """Of a target that refuses to read there: a request that fits without a draft fits with one."""
    factors = {"short_factor": [1.0] * 6, "long_factor": [4.0] * 6, "factor": 4.0}
    length = {"rope_theta": 1e4, "original_max_position_embeddings": 64}
    real = tiny(rope={"rope_type": "longrope"} | factors | length, dtype=torch.float64)
    assert real.facts.max_positions == 64
    prompt = [5 + i % 7 for i in range(58)]
    params = SamplingParams(max_new_tokens=6, ignore_eos=True)
    if method == "lookahead":
        drafter = TRAINING_FREE[method](TRAINING_FREE[method].Config(), real.facts)
        drafter.bind(real)
    else:
        drafter = METHODS[method](METHODS[method].Config(), real.facts)
        drafter.init_from_target(real)
    plain, got = (generate(real, [prompt], params, *some)[0] for some in ((), (drafter, DecodeConfig(k=8))))
    assert got.ids == plain.ids


def test_the_settings_of_lossy_rules_reach_them(scripted: Any) -> None:
    """A drafter that always errs, by a distance of 0.3 in total variation, against a target that can say two things."""
    p_V = torch.tensor([0.5, 0.5, 0, 0, 0, 0, 0, 0]).double()
    real = scripted.Target(lambda before, last, at: p_V.log().expand(*last.shape, V), V)
    q_V = torch.tensor([0.8, 0.2, 0, 0, 0, 0, 0, 0]).double()
    drafter = scripted.Drafter(lambda before, last, depth: q_V.log().expand(*last.shape, V))
    params = SamplingParams(temperature=1.0, max_new_tokens=2000, seed=0)

    def alpha(**settings: Any) -> float:
        decode = DecodeConfig(k=4, allow_lossy=True, **settings)
        return generate(real, [[1]], params, drafter, decode)[0].stats.alpha[0]

    assert alpha(verifier="fuzzy", fuzzy_threshold=0.31) == 1.0
    assert alpha(verifier="fuzzy", fuzzy_threshold=0.29) == pytest.approx(0.7, abs=0.05)
    assert alpha(verifier="entropy", entropy_tolerance=1.0) == 1.0  # 5/8 + 1 - exp(-log 2) > 1
    assert alpha(verifier="entropy", entropy_tolerance=0.2) == pytest.approx(0.78, abs=0.05)
    assert alpha(verifier="typical", typical_epsilon=0.4, typical_delta=1.0) == 1.0
    for name in ("typical_epsilon", "typical_delta", "fuzzy_threshold", "entropy_tolerance"):
        for value in (-0.1, 1.1, float("nan")):
            with pytest.raises(ValueError, match=rf"{name}=.*must be in \[0, 1\]"):
                DecodeConfig(**{name: value})


@pytest.mark.parametrize(
    ("prompts", "params", "message"),
    [
        ([[]], SamplingParams(), "prompt 0 is empty"),
        ([[1], [V]], SamplingParams(), "prompt 1 has id 8"),
        ([[1]], [SamplingParams()] * 2, "2 sampling parameters for 1 prompts"),
        ([[1]], SamplingParams(max_new_tokens=1 << 21), "positions"),
        ([[1]], SamplingParams(stop_ids=(V,)), "stop_ids"),
    ],
)
def test_what_does_not_fit_is_refused(target: Any, prompts: Any, params: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        generate(target, prompts, params)


def test_ids_that_the_tokenizer_lacks_are_never_emitted(scripted: Any) -> None:
    def padded(before: Tensor, last: Tensor, at: Any) -> Tensor:
        logits = torch.randn(*last.shape, V + 3, generator=torch.Generator().manual_seed(0)).double()
        logits[..., V:] += 50
        return logits

    real = scripted.Target(padded, V + 3, tokens=V)
    drafters = [scripted.Drafter(lambda before, last, depth: padded(before, last, 0), parallel=n) for n in (1, 4)]
    for temperature in (0.0, 1.0):
        params = SamplingParams(temperature=temperature, max_new_tokens=20, seed=0)
        assert max(generate(real, [[1]], params)[0].ids) < V
        for some in drafters:
            for shape in shapes_of(some):
                assert max(generate(real, [[1]], params, some, shape)[0].ids) < V
