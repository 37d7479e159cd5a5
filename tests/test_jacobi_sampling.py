"""Sampled Jacobi decoding is exact: by enumeration of rounds whose draws share uniforms, by chi-square, and against plain
sampling token for token.

pytest tests/test_jacobi_sampling.py
"""

import math
from dataclasses import dataclass, field, replace
from itertools import pairwise, product
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from draftsmith.inference.speculate import DecodeConfig, Result, generate
from draftsmith.inference.verify import VERIFIERS, Odds
from draftsmith.losses.probs import History, ParamRows, SamplingParams, probs
from draftsmith.models.drafter import Budget, Commit, Prefill, Verified
from draftsmith.models.jacobi import Jacobi, JacobiConfig, Row
from draftsmith.models.tree import Tree

CHAIN, TREE = DecodeConfig(), DecodeConfig(tree="static", nodes=10, width=3)
V = 4
P_VVV = torch.randn(V, V, V, generator=torch.Generator().manual_seed(1), dtype=torch.float64) * 1.2
PROMPT = [1, 2]


def make(target: Any, **settings: Any) -> Jacobi:
    drafter = Jacobi(JacobiConfig(**settings), target.facts)
    drafter.bind(target)
    return drafter


def ids_of(results: list[Result]) -> list[list[int]]:
    return [r.ids for r in results]


def by_table(before: Tensor, last: Tensor, at: Any) -> Tensor:
    return P_VVV[before.clamp(min=0), last]


def law(params: SamplingParams, length: int) -> dict[tuple[int, ...], float]:
    exact: dict[tuple[int, ...], float] = {}
    for tokens in product(range(V), repeat=length):
        chance = 1.0
        for i, x in enumerate(tokens):
            before, last = [*PROMPT, *tokens[:i]][-2:]
            chance *= float(probs(P_VVV[before, last][None], params)[0, x])
        exact[tokens] = chance
    return exact


def p_value(results: list[Result], exact: dict[tuple[int, ...], float]) -> float:
    """Chi-square of the answers; cells with fewer than 10 expected are pooled."""
    seen: dict[tuple[int, ...], int] = {}
    for result in results:
        seen[tuple(result.ids)] = seen.get(tuple(result.ids), 0) + 1
    n = len(results)
    common = {x: chance * n for x, chance in exact.items() if chance * n >= 10}
    statistic = sum((seen.get(x, 0) - want) ** 2 / want for x, want in common.items())
    rare = n - sum(common.values())
    statistic += (n - sum(seen.get(x, 0) for x in common) - rare) ** 2 / max(rare, 1e-9)
    half = torch.tensor([len(common) / 2, statistic / 2], dtype=torch.float64)
    return float(torch.special.gammaincc(half[0], half[1]))


MODES = {
    "ratio": (CHAIN, {}),
    "slide": (CHAIN, {"window": "slide"}),
    "quadratic": (CHAIN, {"window": "quadratic"}),
    "quadratic block": (replace(CHAIN, verifier="block"), {"window": "quadratic"}),
    "two blocks": (replace(CHAIN, verifier="ratio_tree"), {"blocks": 2, "spawn": 0.3}),
    "block": (replace(CHAIN, verifier="block"), {}),
    "top tokens": (replace(CHAIN, verifier="target_only"), {}),
    "branches": (DecodeConfig(tree="dynamic", nodes=6, width=2), {"ngram": 3}),
}


@pytest.mark.parametrize("mode", MODES)
def test_the_joint_law_of_sampled_answers(scripted: Any, mode: str) -> None:
    """Tokens 1 to 4 jointly, 256 cells; the draws of the later ones outlive a rejection."""
    decode, settings = MODES[mode]
    real, n = scripted.Target(by_table, V), 3_000
    params = SamplingParams(temperature=0.9, max_new_tokens=4)
    each = [replace(params, seed=i) for i in range(n)]
    results = generate(real, [PROMPT] * n, each, make(real, block=3, **settings), replace(decode, max_rows=n))
    wanted = {"branches": "target_only"}.get(mode, decode.verifier.replace("auto", "ratio"))
    assert max(results, key=lambda r: r.stats.verifies).stats.rule == wanted
    assert sum(r.stats.from_draft for r in results) > n / 3
    assert p_value(results, law(params, 4)) > 1e-3


def test_sample_match_repeats_plain_sampling(scripted: Any) -> None:
    """Token for token, temperatures and penalties mixed; guesses are the target's own draws, so they settle."""
    each = [
        SamplingParams(temperature=0.8, max_new_tokens=40, seed=3),
        SamplingParams(temperature=0.0, max_new_tokens=25, repetition_penalty=1.2),
        SamplingParams(temperature=1.0, top_p=0.9, max_new_tokens=30, seed=9, presence_penalty=0.5),
    ]
    prompts = [[1, 2], [0, 3, 1], [2, 2]]
    real = scripted.Target(by_table, V)
    plain = ids_of(generate(real, prompts, each))
    for shape in (CHAIN, TREE):
        got = generate(real, prompts, each, make(real, block=6), replace(shape, verifier="sample_match"))
        assert ids_of(got) == plain and sum(r.stats.from_draft for r in got) > 20
        alone = generate(real, prompts[:1], each[0], make(real, block=6), shape)[0].ids
        assert (
            generate(real, prompts, each, make(real, block=6), shape)[0].ids == alone
        )  # the seed's, whatever the batch


def test_draws_of_their_own_keep_more_than_the_targets_draws_and_top_tokens(scripted: Any) -> None:
    """Why `auto` takes ratio: maximal agreement of two laws, where a shared uniform agrees less."""
    real = scripted.Target(lambda before, last, at: P_VVV[last, at % V] + 0.5 * P_VVV[before.clamp(min=0), last], V)
    each = [SamplingParams(temperature=1.0, max_new_tokens=60, seed=i, ignore_eos=True) for i in range(60)]
    tau = {}
    for rule in ("auto", "sample_match", "target_only", "block"):
        decode = DecodeConfig(verifier=rule, max_rows=60)
        results = generate(real, [PROMPT] * 60, each, make(real, block=8), decode)
        tau[rule] = sum(r.stats.committed - 1 for r in results) / sum(r.stats.verifies for r in results)
    assert tau["auto"] > max(tau["sample_match"], tau["target_only"]), tau


@dataclass
class World:
    """One branch of the enumeration: its chance, the uniforms by position that it has fixed, the answer so far, the
    drafter's row, and what the last round verified."""

    mass: float
    uniforms: dict[int, float]
    answer: list[int]
    row: Row
    new: list[int]  # the anchor of the last round and what it accepted
    tokens: list[int] = field(default_factory=list)


def enumerate_law(
    p_VV: Tensor, rule: str, fresh: bool, block: int, length: int, rounds: int, window: Any = "block"
) -> float:
    """Largest error of the joint law of `length` tokens behind the first one, after so many rounds of the drafter with
    this rule, every uniform split where any row's tokens change; what is missing then is the target's. `fresh`: draws
    of places are new in every round."""
    v = len(p_VV)
    facts = SimpleNamespace(vocab=v, tokens=v, max_positions=2048)
    drafter = Jacobi(JacobiConfig(block=block, window=window), facts)  # type: ignore[arg-type]
    drafter.bind(SimpleNamespace(head=lambda logits_BJV, _: logits_BJV))
    edges = sorted({0.0, 1.0, *(x for row in p_VV.cumsum(1).tolist() for x in row if x < 1 - 1e-12)})
    cells = [((a + b) / 2, b - a) for a, b in pairwise(edges) if b - a > 0]
    prompt = [1, 0]
    place = Prefill(1, 0, torch.device("cpu"), torch.float64)
    worlds = [World(1.0, {}, [0], drafter.init(place)[0], prompt)]
    done: dict[tuple[int, ...], float] = {}
    for number in range(rounds):
        split: list[World] = []
        for world in worlds:
            made, left = len(world.answer), len(world.row.guesses) + 1 - len(world.new)
            last = made + block if window == "quadratic" else min(made + left, world.row.end)
            needed = range(made, last) if number else range(0)
            places = [len(prompt) + p for p in needed if fresh or len(prompt) + p not in world.uniforms]
            for combination in product(cells, repeat=len(places)):
                chosen = world.uniforms | {p: u for p, (u, _) in zip(places, combination, strict=True)}
                mass = world.mass * math.prod(weight for _, weight in combination)
                split.append(replace(world, mass=mass, uniforms=chosen, row=replace(world.row)))
        b = len(split)
        wide = max(len(world.new) for world in split)
        ends = torch.tensor([[len(prompt) + len(w.answer) - 1 - len(w.new)] for w in split])
        commit = Commit(
            torch.tensor([w.new + [0] * (wide - len(w.new)) for w in split]),
            torch.tensor([len(w.new) for w in split]),
            ends + torch.arange(wide),
            torch.tensor([w.answer[-1] for w in split]),
        )
        if number:
            m = max(len(w.tokens) for w in split)
            tokens_BM = torch.tensor([w.tokens + [0] * (m - len(w.tokens)) for w in split])
            commit.verified = Verified(tokens_BM, torch.ones_like(tokens_BM, dtype=torch.bool), p_VV[tokens_BM].log())
            rode_BJ = torch.tensor(
                [drafter.starts(w.row, range(len(w.answer) - 1, len(w.answer) - 1 + block)) for w in split]
            )
            behind = (p_VV[rode_BJ].log(), torch.ones_like(rode_BJ, dtype=torch.bool))
            commit.extra_out = SimpleNamespace(below_accepted=lambda _, behind=behind: behind)  # type: ignore[assignment]
        asked = [world.uniforms for world in split]
        coins = SimpleNamespace(
            drawn=True,
            params=ParamRows.pack([SamplingParams(temperature=1.0)] * b),
            history=lambda *_: History(),
            at_places=lambda at_BN, asked=asked: torch.tensor(
                [[u.get(p, 0.0) for p in line] for u, line in zip(asked, at_BN.tolist(), strict=True)]
            ).double(),
        )
        rows, tree = drafter.propose([w.row for w in split], commit, Budget(block, block, 1), None, coins)
        assert tree.q is not None
        tokens_BM = torch.cat([commit.anchor_B[:, None], tree.tokens_BN], 1)
        odds = VERIFIERS[rule].probabilities(tree, p_VV[tokens_BM])
        worlds = []
        for i, world in enumerate(split):
            for new, chance in outcomes(tree, odds, i, rule).items():
                answer, mass = [*world.answer, *new], world.mass * chance
                if len(answer) > length:
                    key = tuple(answer[1 : length + 1])
                    done[key] = done.get(key, 0.0) + mass
                    continue
                row = replace(rows[i], guesses=list(rows[i].guesses))
                accepted = [world.answer[-1], *new[:-1]]
                worlds.append(World(mass, world.uniforms, answer, row, accepted, tokens_BM[i].tolist()))
    for world in worlds:
        for rest in product(range(v), repeat=length + 1 - len(world.answer)):
            key = (*world.answer[1:], *rest)
            chance = math.prod(float(p_VV[a, b]) for a, b in pairwise((world.answer[-1], *rest)))
            done[key] = done.get(key, 0.0) + world.mass * chance
    return max(
        abs(done.get(x, 0.0) - math.prod(float(p_VV[a, b]) for a, b in pairwise((0, *x))))
        for x in product(range(v), repeat=length)
    )


def outcomes(tree: Tree, odds: Odds, row: int, rule: str) -> dict[tuple[int, ...], float]:
    """The law of what one verification of a chain commits, from its odds."""
    assert odds.stop_BMV is not None
    n = int(tree.valid_BN[row].sum())
    accept, tokens = odds.accept_BN[row, :n].tolist(), tree.tokens_BN[row, :n].tolist()
    if rule == "block":  # the last one that is good, from the end
        ends = [math.prod(1 - x for x in accept[i:]) * (accept[i - 1] if i else 1.0) for i in range(n + 1)]
    else:
        ends = [math.prod(accept[:i]) * (1 - accept[i] if i < n else 1.0) for i in range(n + 1)]
    found = {}
    for i, mass in enumerate(ends):
        stop_V = odds.stop_BMV[row, i]
        for x, chance in enumerate((stop_V / stop_V.sum()).tolist()):
            if mass * chance > 0:
                found[(*tokens[:i], x)] = mass * chance
    return found


def some_law(v: int, seed: int, heat: float) -> Tensor:
    return torch.softmax(torch.randn(v, v, generator=torch.Generator().manual_seed(seed)).double() * heat, -1)


@pytest.mark.parametrize("heat", [0.5, 2.0])
@pytest.mark.parametrize(("rule", "fresh", "block"), [("ratio", False, 4), ("ratio", True, 4), ("block", True, 4)])
def test_two_rounds_of_draws_give_the_targets_law(rule: str, fresh: bool, block: int, heat: float) -> None:
    """A first round with fixed guesses, two with draws: exact, with uniforms that outlive a rejection too."""
    assert enumerate_law(some_law(3, 5, heat), rule, fresh, block, 4, 3) < 1e-12


@pytest.mark.parametrize(("rule", "fresh"), [("ratio", False), ("block", True)])
def test_two_rounds_of_quadratic_draws_give_the_targets_law(rule: str, fresh: bool) -> None:
    assert enumerate_law(some_law(3, 5, 2.0), rule, fresh, 2, 4, 3, "quadratic") < 1e-12


def test_fault_kept_draws_under_a_rule_by_paths_are_caught() -> None:
    """Block verification looks at tokens behind the place where it stops: their uniforms are spent."""
    assert enumerate_law(some_law(3, 5, 2.0), "block", False, 4, 4, 3) > 1e-4
    assert enumerate_law(some_law(3, 5, 2.0), "block", False, 2, 4, 3, "quadratic") > 1e-4
