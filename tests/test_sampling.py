"""Sampling through the public interface: joint chi-square of what `generate` returns, seeds, temperatures.

Every seed is fixed, so no test here can fail by chance.
"""

import gc
import math
from collections.abc import Callable
from dataclasses import replace
from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor

from draftsmith.inference import trees, verify
from draftsmith.inference.speculate import DecodeConfig, generate
from draftsmith.kernels import rng
from draftsmith.losses.probs import SamplingParams, probs

V = 4
PROMPT = [1, 2]


def tables(seed: int = 0, v: int = V) -> Tensor:
    """[V, V, V] logits by (token before, token)."""
    return torch.randn(v, v, v, generator=torch.Generator().manual_seed(seed), dtype=torch.float64) * 1.2


P_VVV = tables(1)
Q_VVV = P_VVV * 0.5 + tables(2)


def by_table(x_VVV: Tensor) -> Callable[[Tensor, Tensor, Tensor], Tensor]:
    return lambda before_BT, last_BT, _: x_VVV[before_BT.clamp(min=0), last_BT]


@pytest.fixture
def target(scripted: Any) -> Any:
    return scripted.Target(by_table(P_VVV), V)


@pytest.fixture
def drafter(scripted: Any) -> Any:
    return scripted.Drafter(by_table(Q_VVV))


def law(params: SamplingParams, length: int, prompt: list[int]) -> dict[tuple[int, ...], float]:
    """The joint law of the first tokens, exactly."""
    exact: dict[tuple[int, ...], float] = {}
    for tokens in product(range(V), repeat=length):
        row, chance = list(prompt), 1.0
        for x in tokens:
            chance *= float(probs(P_VVV[row[-2], row[-1]][None], params)[0, x])
            row.append(x)
        exact[tokens] = chance
    return exact


def p_value(counts: dict[tuple[int, ...], int], exact: dict[tuple[int, ...], float], n: int) -> float:
    """Chi-square, cells with fewer than 10 expected pooled; a token that cannot come gives 0."""
    assert sum(counts.values()) == n
    if any(exact.get(x, 0.0) == 0 for x in counts):
        return 0.0
    cells, rare = [], [0.0, 0.0]
    for x, chance in exact.items():
        if chance * n >= 10:
            cells.append((counts.get(x, 0), chance * n))
        else:
            rare = [rare[0] + counts.get(x, 0), rare[1] + chance * n]
    if rare[1] > 0:
        cells.append((rare[0], max(rare[1], 1e-9)))  # type: ignore[arg-type]
    statistic = sum((seen - want) ** 2 / want for seen, want in cells)
    half = torch.tensor([(len(cells) - 1) / 2, statistic / 2], dtype=torch.float64)
    return float(torch.special.gammaincc(half[0], half[1]))


def sample(
    target: Any, drafter: Any, decode: DecodeConfig, params: SamplingParams, n: int, first_seed: int = 0
) -> dict[tuple[int, ...], int]:
    """Counts of the answers to n requests that differ in their seed alone."""
    each = [replace(params, seed=first_seed + i) for i in range(n)]
    counts: dict[tuple[int, ...], int] = {}
    gc.disable()  # a hundred thousand live requests: looking for cycles among them takes longer than answering
    try:
        for result in generate(target, [PROMPT] * n, each, drafter, replace(decode, max_rows=10_000)):
            counts[tuple(result.ids)] = counts.get(tuple(result.ids), 0) + 1
    finally:
        gc.enable()
    return counts


MODES = {
    "plain": (False, DecodeConfig()),
    "ratio": (True, DecodeConfig(k=2, verifier="ratio")),
    "cut": (True, DecodeConfig(k=2, tree="cut", threshold=0.45, verifier="ratio")),
    "ratio_tree": (
        True,
        DecodeConfig(k=2, tree="static", choices=((0,), (1,), (0, 0), (0, 1), (1, 0)), verifier="ratio_tree"),
    ),
    "block": (True, DecodeConfig(k=2, verifier="block")),
    "traversal": (
        True,
        DecodeConfig(k=2, tree="static", choices=((0,), (1,), (0, 0), (0, 1), (1, 0)), verifier="traversal"),
    ),
    "target_only": (True, DecodeConfig(k=2, tree="dynamic", width=2, nodes=5, verifier="target_only")),
    "sample_match": (True, DecodeConfig(k=2, tree="dynamic", width=2, nodes=4, verifier="sample_match")),
}


COINS = ("ratio", "ratio_tree", "block", "traversal", "target_only")  # exact modes whose rule has coins of its own


@pytest.mark.parametrize("mode", MODES)
def test_joint_law_of_100k_answers(target: Any, drafter: Any, mode: str) -> None:
    """Tokens 1-3 jointly (the first from the prefill, the others across rounds), 64 cells; 100,000 answers for the
    rules with coins, 20,000 for the two that draw the target's tokens themselves."""
    speculates, decode = MODES[mode]
    params = SamplingParams(temperature=0.8, max_new_tokens=3)
    n = 20_000 if mode in ("plain", "sample_match") else 100_000
    counts = sample(target, drafter if speculates else None, decode, params, n)
    assert p_value(counts, law(params, 3, PROMPT), n) > 1e-3


@pytest.mark.parametrize(
    "params",
    [
        SamplingParams(temperature=1.0, top_k=3, max_new_tokens=3),
        SamplingParams(temperature=1.3, top_p=0.8, max_new_tokens=3),
        SamplingParams(temperature=1.0, min_p=0.3, max_new_tokens=3),
    ],
    ids=["top_k", "top_p", "min_p"],
)
@pytest.mark.parametrize("mode", COINS)
def test_truncated_laws(target: Any, drafter: Any, mode: str, params: SamplingParams) -> None:
    n = 8_000
    counts = sample(target, drafter, MODES[mode][1], params, n, first_seed=10**6)
    assert p_value(counts, law(params, 3, PROMPT), n) > 1e-3


def test_a_draft_vocabulary_and_another_draft_temperature_keep_the_law(target: Any, scripted: Any) -> None:
    d2t_W = torch.tensor([0, 1, 3])
    narrow = scripted.Drafter(lambda before, last, depth: Q_VVV[before, last][..., d2t_W], d2t_W)
    params = SamplingParams(temperature=0.9, max_new_tokens=3)
    for decode in (MODES[mode][1] for mode in COINS if mode != "target_only"):
        counts = sample(target, narrow, replace(decode, draft_temperature=0.4), params, 8_000, first_seed=5 * 10**6)
        assert p_value(counts, law(params, 3, PROMPT), 8_000) > 1e-3


def test_independent_heads_keep_the_law(target: Any, scripted: Any) -> None:
    heads = scripted.Drafter(lambda before, last, depth: Q_VVV[before, last] * (0.5 + depth / 2), parallel=2)
    params = SamplingParams(temperature=0.9, max_new_tokens=3)
    fixed = [DecodeConfig(k=2, tree=tree, width=2, nodes=4) for tree in ("cape", "opt", "best_first", "capped", "ppd")]
    for decode in (*(MODES[mode][1] for mode in COINS), MODES["cut"][1], *fixed):
        counts = sample(target, heads, decode, params, 8_000, first_seed=6 * 10**6)
        assert p_value(counts, law(params, 3, PROMPT), 8_000) > 1e-3, (decode.tree, decode.verifier)
        rule = generate(target, [PROMPT], params, heads, decode)[0].stats.rule
        assert (rule == "target_only") == (decode in fixed or decode.verifier == "target_only")


def test_penalties_follow_each_nodes_own_path(target: Any, drafter: Any, scripted: Any) -> None:
    """Sample-match repeats plain sampling only if every node saw the penalties of its own path."""
    params = SamplingParams(
        temperature=1.0, repetition_penalty=1.3, presence_penalty=0.4, frequency_penalty=0.3, max_new_tokens=24, seed=5
    )
    plain = generate(target, [PROMPT], params)[0]
    heads = scripted.Drafter(by_table(Q_VVV), parallel=4)
    for tree, builder in trees.TREES.items():
        decode = DecodeConfig(k=4, tree=tree, width=3, nodes=12, verifier="sample_match")
        some = heads if builder.at_once else drafter
        got = generate(target, [PROMPT], params, some, decode)[0]
        assert got.ids == plain.ids and got.stats.from_draft > 0
        greedy = replace(params, temperature=0.0)
        pair = [generate(target, [PROMPT], greedy, d, DecodeConfig(k=4, tree=tree)) for d in (None, some)]
        assert pair[0][0].ids == pair[1][0].ids
    heavy = SamplingParams(temperature=1.0, frequency_penalty=0.7, max_new_tokens=2)
    exact: dict[tuple[int, ...], float] = {}
    for a, b in product(range(V), repeat=2):
        first = float(probs(P_VVV[1, 2][None], replace(heavy, frequency_penalty=0.0))[0, a])
        after = P_VVV[2, a].clone()
        after[a] -= 0.7
        exact[(a, b)] = first * float(torch.softmax(after, -1)[b])
    for mode in ("plain", *COINS):
        counts = sample(target, drafter if MODES[mode][0] else None, MODES[mode][1], heavy, 8_000, first_seed=10**7)
        assert p_value(counts, exact, 8_000) > 1e-3, mode


@pytest.mark.parametrize("name", ["block", "traversal"])
def test_whole_paths_take_fixed_candidates(target: Any, drafter: Any, scripted: Any, name: str) -> None:
    tree = "chain" if name == "block" else "dynamic"
    decode = DecodeConfig(k=2, tree=tree, width=2, nodes=5, verifier=name, draft_temperature=0.0)
    params = SamplingParams(temperature=0.9, max_new_tokens=3)
    counts = sample(target, drafter, decode, params, 8_000, first_seed=8 * 10**6)
    assert p_value(counts, law(params, 3, PROMPT), 8_000) > 1e-3
    cold = replace(params, temperature=0.0, max_new_tokens=24)
    right = scripted.Drafter(by_table(P_VVV))
    plain, got = (generate(target, [PROMPT], cold, *some)[0] for some in ((), (right, decode)))
    assert got.ids == plain.ids and got.stats.from_draft > 0 and got.stats.rule == name


def test_whole_paths_keep_more_end_to_end(target: Any, drafter: Any) -> None:
    """Tokens per verification of 400 answers of 40 tokens."""
    for by_token, by_path in (("ratio", "block"), ("ratio_tree", "traversal")):
        taus = []
        for mode in (by_token, by_path):
            each = [SamplingParams(temperature=0.8, max_new_tokens=40, seed=i, ignore_eos=True) for i in range(400)]
            decode = replace(MODES[mode][1], k=4, max_rows=400)
            if by_token == "ratio_tree":
                choices = ((0,), (1,), (0, 0), (0, 1), (1, 0), (0, 0, 0), (0, 0, 0, 0))
                decode = replace(decode, choices=choices)
            results = generate(target, [PROMPT] * 400, each, drafter, decode)
            stats = [r.stats for r in results]
            taus.append(sum(s.committed - s.requests for s in stats) / sum(s.verifies for s in stats))
        assert taus[1] > taus[0] * 1.01, (by_path, taus)


def test_fault_shared_noise_is_caught(target: Any, drafter: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Draft, acceptance and redraw read one stream: the keys lose their purpose."""
    keyed = rng.uniform

    def shared(seed: Any, purpose: Any, position: Any, round: Any = 0, node: Any = 0) -> Tensor:
        return keyed(seed, 0, 0 * position, round, node)

    params = SamplingParams(temperature=0.8, max_new_tokens=3)
    n = 6_000
    counts = sample(target, drafter, MODES["ratio"][1], params, n)
    assert p_value(counts, law(params, 3, PROMPT), n) > 1e-3
    monkeypatch.setattr(rng, "uniform", shared)
    counts = sample(target, drafter, MODES["ratio"][1], params, n)
    assert p_value(counts, law(params, 3, PROMPT), n) < 1e-6


def test_fault_q_without_temperature_is_caught_end_to_end(
    target: Any, drafter: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The rows that travel with the draft are not those it was drawn from."""
    builder = trees.TREES["chain"]

    def broken(*arguments: Any) -> Any:
        state, tree = builder.build(*arguments)
        tree.q = replace(tree.q, rows_BMW=torch.softmax(tree.q.rows_BMW.clamp(min=1e-9).log() * 0.4, -1))
        return state, tree

    params = SamplingParams(temperature=0.8, max_new_tokens=3)
    monkeypatch.setitem(trees.TREES, "chain", replace(builder, build=broken))
    counts = sample(target, drafter, MODES["ratio"][1], params, 10_000)
    assert p_value(counts, law(params, 3, PROMPT), 10_000) < 1e-6


def test_fault_a_cut_by_the_drawn_tokens_own_chance_is_caught(
    target: Any, drafter: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A position dropped because an unlikely token was drawn for it: what stays is no longer drawn from q."""
    builder = trees.TREES["cut"]

    def broken(*arguments: Any) -> Any:
        state, tree = trees.TREES["chain"].build(*arguments)
        return state, replace(tree, valid_BN=(tree.log_probs_BN > math.log(0.3)).int().cumprod(1).bool())

    params = SamplingParams(temperature=0.8, max_new_tokens=3)
    monkeypatch.setitem(trees.TREES, "cut", replace(builder, build=broken))
    counts = sample(target, drafter, MODES["cut"][1], params, 10_000)
    assert p_value(counts, law(params, 3, PROMPT), 10_000) < 1e-6


# CASES B40


def test_b40_deterministic_and_sampled_siblings(scripted: Any) -> None:
    p_V, q_V = torch.tensor([0.5, 0.3, 0.15, 0.05]).double(), torch.tensor([0.4, 0.35, 0.15, 0.1]).double()
    target = scripted.Target(lambda before, last, at: p_V.log().expand(*last.shape, V), V)
    drafter = scripted.Drafter(lambda before, last, depth: q_V.log().expand(*last.shape, V))
    params = SamplingParams(temperature=1.0, max_new_tokens=3)
    exact = {x: float(torch.prod(p_V[list(x)])) for x in product(range(V), repeat=3)}
    pairs = ((0,), (1,), (0, 0), (0, 1), (1, 0), (1, 1))
    for decode in (
        DecodeConfig(k=2, tree="static", choices=pairs, verifier="target_only"),
        DecodeConfig(k=2, tree="static", choices=pairs, verifier="ratio_tree"),
        DecodeConfig(k=1, tree="static", choices=((0,), (1,)), verifier="target_only"),
    ):
        counts = sample(target, drafter, decode, params, 20_000)
        assert p_value(counts, exact, 20_000) > 1e-3


# CASES B43


def test_b43_seeds_belong_to_requests(target: Any, drafter: Any, scripted: Any) -> None:
    prompts = [[1, 2], [0, 3, 1], [2, 2], [3, 0]]
    seeds = [7, 1, None, 9]
    for mode, (speculates, decode) in MODES.items():
        some = drafter if speculates else None
        each = [SamplingParams(temperature=1.0, max_new_tokens=20 + i, seed=s) for i, s in enumerate(seeds)]
        alone = generate(target, prompts[:1], each[0], some, decode)[0].ids
        assert alone == generate(target, prompts[:1], each[0], some, decode)[0].ids, mode
        batch = [r.ids for r in generate(target, prompts, each, some, decode)]
        order = [2, 3, 0, 1]
        permuted = [
            r.ids for r in generate(target, [prompts[i] for i in order], [each[i] for i in order], some, decode)
        ]
        assert batch[0] == alone and permuted[2] == alone, mode
        assert permuted[1] == batch[3] and permuted[3] == batch[1], mode
        short = [each[0], replace(each[1], max_new_tokens=2), replace(each[2], max_new_tokens=1), each[3]]
        early = [r.ids for r in generate(target, prompts, short, some, decode)]
        assert early[0] == batch[0] and early[3] == batch[3], mode  # a row that ends early changes nothing in others
    flat = scripted.Target(lambda before, last, at: torch.zeros(*last.shape, V), V)
    unseeded = SamplingParams(temperature=1.0, max_new_tokens=16)
    pairs = [generate(flat, [[1], [1]], unseeded) for _ in range(20)]
    assert sum(a.ids != b.ids for a, b in pairs) >= 19


def test_sample_match_repeats_plain_sampling(target: Any, drafter: Any, scripted: Any) -> None:
    prompts = [[1, 2], [0, 3, 1], [2, 2]]
    each = [SamplingParams(temperature=t, top_p=0.95, max_new_tokens=40, seed=i) for i, t in enumerate((0.5, 1.0, 0.0))]
    plain = [r.ids for r in generate(target, prompts, each)]
    heads = scripted.Drafter(by_table(Q_VVV), parallel=3)
    for tree, builder in trees.TREES.items():
        decode = DecodeConfig(k=3, tree=tree, verifier="sample_match")
        results = generate(target, prompts, each, heads if builder.at_once else drafter, decode)
        assert [r.ids for r in results] == plain
        assert all(r.stats.rule == "sample_match" for r in results) and sum(r.stats.from_draft for r in results) > 10


# CASES B44


@pytest.mark.parametrize("mode", MODES)
def test_b44_temperature_has_its_effect(scripted: Any, drafter: Any, mode: str) -> None:
    speculates, decode = MODES[mode]
    flat = scripted.Target(lambda before, last, at: torch.zeros(*last.shape, V), V)
    params = [SamplingParams(temperature=1.0, max_new_tokens=100, seed=i) for i in range(40)]
    results = generate(flat, [[1]] * 40, params, drafter if speculates else None, replace(decode, max_rows=40))
    ids = [x for r in results for x in r.ids]
    share_V = torch.bincount(torch.tensor(ids), minlength=V) / len(ids)
    assert float(-(share_V * share_V.log()).sum()) > 1.38


@pytest.mark.parametrize("mode", MODES)
def test_b44_temperatures_mix_in_one_batch(target: Any, drafter: Any, mode: str) -> None:
    speculates, decode = MODES[mode]
    some = drafter if speculates else None
    n = 4_000
    params = [SamplingParams(temperature=t, max_new_tokens=3, seed=i) for i in range(n) for t in (0.0, 1e-6, 0.7, 1.5)]
    results = generate(target, [PROMPT] * len(params), params, some, replace(decode, max_rows=8_000))
    greedy = generate(target, [PROMPT], SamplingParams(max_new_tokens=3))[0].ids
    assert all(r.ids == greedy for r in results[0::4]) and all(r.ids == greedy for r in results[1::4])
    for at in (2, 3):
        counts: dict[tuple[int, ...], int] = {}
        for r in results[at::4]:
            counts[tuple(r.ids)] = counts.get(tuple(r.ids), 0) + 1
        assert p_value(counts, law(params[at], 3, PROMPT), n) > 1e-3


def test_b44_bf16_logits_give_one_set_of_probabilities(scripted: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """What a draft was drawn from and what it is verified with are the same fp32 numbers, bit for bit."""
    target = scripted.Target(by_table(P_VVV), V, dtype=torch.bfloat16)
    drafter = scripted.Drafter(lambda before, last, depth: Q_VVV[before, last].bfloat16())
    rows: list[Tensor] = []
    rule = verify.VERIFIERS["ratio"]

    def seen(tree: Any, p_BMV: Tensor) -> Any:
        for node in range(tree.tokens_BN.shape[1]):
            last = PROMPT[-1:] if node == 0 else [int(tree.tokens_BN[0, node - 1])]
            rows.append(tree.q.rows_BMW[0, node])
            assert p_BMV.dtype == tree.q.rows_BMW.dtype == torch.float32 and last
        return rule.probabilities(tree, p_BMV)

    monkeypatch.setitem(verify.VERIFIERS, "ratio", replace(rule, probabilities=seen))
    params = SamplingParams(temperature=0.7, top_p=0.9, max_new_tokens=12, seed=1)
    generate(target, [PROMPT], params, drafter, DecodeConfig(k=2, verifier="ratio"))
    known = probs(Q_VVV.bfloat16().view(-1, V), params)
    assert rows and all(bool((known == row).all(-1).any()) for row in rows)
