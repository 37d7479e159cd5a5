"""Verifiers, exactly: the law of the committed tokens by enumeration in float64, over two consecutive rounds, and
`choose` at its break-points. The last section plants faults and shows that these checks catch each of them."""

import math
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from itertools import product
from pathlib import Path

import pytest
import torch
from torch import Tensor

from draftsmith.inference import verify
from draftsmith.inference.verify import (
    VERIFIERS,
    Coins,
    Odds,
    choose_by_coins,
    choose_by_paths,
    entropy_odds,
    fixed_odds,
    fuzzy_odds,
    rejection_odds,
    traversal_odds,
)
from draftsmith.losses.probs import SamplingParams, probs
from draftsmith.models.tree import Proposal, Tree

Rule = Callable[[Tree, Tensor], Odds]
Law = dict[tuple[int, ...], float]

Template = tuple[tuple[int, ...], ...]

CHAIN = ((0,), (0, 0))
LONG = ((0,), (0, 0), (0, 0, 0))
BUSHY = ((0,), (1,), (0, 0), (0, 1), (1, 0))
DEEP = ((0,), (1,), (0, 0), (0, 1), (1, 0), (0, 0, 0))
FORK = ((0,), (1,), (2,))
LOPSIDED = ((0,), (0, 0), (0, 1), (0, 1, 0))  # the later sibling has the larger subtree


def table(kind: str, v: int, seed: int) -> Tensor:
    """[V, V] next-token probabilities by last token."""
    random = torch.Generator().manual_seed(seed)
    x_VV = torch.rand(v, v, generator=random, dtype=torch.float64) + 0.05
    if kind == "peaked":
        x_VV = x_VV**12
    if kind == "holes":
        x_VV = x_VV * (torch.rand(v, v, generator=random) < 0.6)
        x_VV[:, 0] += (x_VV.sum(-1) == 0) * 1.0
    if kind == "disjoint":
        x_VV[:, : v // 2] = 0
    return x_VV / x_VV.sum(-1, keepdim=True)


def drawn_trees(
    anchor: int, q_VW: Tensor, template: Template, d2t_W: Tensor | None, replacement: bool
) -> Iterator[tuple[float, list[int], list[bool]]]:
    """Every way to draw the template's tokens (draft ids, or -1 = nothing left to draw) with its probability."""

    def grow(done: list[int]) -> Iterator[tuple[float, list[int]]]:
        if len(done) == len(template):
            yield 1.0, done
            return
        path = template[len(done)]
        parent = template.index(path[:-1]) if len(path) > 1 else None
        if parent is not None and done[parent] < 0:
            yield from grow([*done, -1])
            return
        last = anchor if parent is None else done[parent] if d2t_W is None else int(d2t_W[done[parent]])
        earlier = [done[i] for i in range(len(done)) if template[i][:-1] == path[:-1]]
        row = q_VW[last].clone()
        if not replacement:
            row[[x for x in earlier if x >= 0]] = 0
        if row.sum() <= 0:
            yield from grow([*done, -1])
            return
        for x, chance in enumerate((row / row.sum()).tolist()):
            if chance > 0:
                for weight, rest in grow([*done, x]):
                    yield chance * weight, rest

    for weight, ids in grow([]):
        target_ids = [0 if x < 0 else x if d2t_W is None else int(d2t_W[x]) for x in ids]
        yield weight, target_ids, [x >= 0 for x in ids]


def tree_of(tokens: list[list[int]], valid: list[list[bool]], template: Template, q: Proposal | None) -> Tree:
    b = len(tokens)
    parents = torch.tensor([template.index(p[:-1]) + 1 if len(p) > 1 else 0 for p in template])
    tokens_BN = torch.tensor(tokens)
    depths_BN = torch.tensor([len(p) for p in template]).repeat(b, 1)
    return Tree(tokens_BN, parents.repeat(b, 1), depths_BN, torch.zeros(tokens_BN.shape), torch.tensor(valid), q)


def law_of(tree: Tree, odds: Odds, row: int, by_paths: bool = False) -> Law:
    """The law of the tokens that one verification commits, from its odds: node by node from the anchor down, or
    (`by_paths`) each node after its subtree."""
    law: Law = {}
    assert odds.stop_BMV is not None
    accept, tokens = odds.accept_BN[row].tolist(), tree.tokens_BN[row].tolist()
    stop_MV = odds.stop_BMV[row]
    stops = (stop_MV / stop_MV.sum(-1, keepdim=True)).tolist()
    below: list[list[int]] = [[] for _ in stops]
    for j, (parent, valid) in enumerate(zip(tree.parents_BN[row].tolist(), tree.valid_BN[row].tolist(), strict=True)):
        if valid:
            below[parent].append(j)

    def stop(node: int, so_far: tuple[int, ...], mass: float) -> None:
        for x, chance in enumerate(stops[node]):
            if mass * chance > 0:
                law[(*so_far, x)] = law.get((*so_far, x), 0.0) + mass * chance

    def descend(node: int, so_far: tuple[int, ...], mass: float) -> None:
        for j in below[node]:
            if accept[j] > 0:
                descend(j + 1, (*so_far, tokens[j]), mass * accept[j])
            mass *= 1 - accept[j]
        stop(node, so_far, mass)

    def climb(node: int, so_far: tuple[int, ...], mass: float) -> float:
        """What is left of the mass where everything here failed."""
        for j in below[node]:
            mass = climb(j + 1, (*so_far, tokens[j]), mass)
        chance = accept[node - 1] if node else 1.0
        stop(node, so_far, mass * chance)
        return mass * (1 - chance)

    (climb if by_paths else descend)(0, (), 1.0)
    return law


def kept(law: Law) -> float:
    """Drafted tokens that a verification keeps on average: all it commits but the last."""
    return sum(chance * (len(tokens) - 1) for tokens, chance in law.items())


def rule_of(name: str) -> tuple[Rule, bool]:
    """A rule's probabilities, and whether it goes by whole paths."""
    return VERIFIERS[name].probabilities, VERIFIERS[name].choose is choose_by_paths


def rows_of(tree: Tree, anchor: int, p_VV: Tensor) -> Tensor:
    """[B, M, V] the target's rows at the anchor and every node."""
    at_BM = torch.cat([torch.full((tree.tokens_BN.shape[0], 1), anchor), tree.tokens_BN], 1)
    return p_VV[at_BM]


def round_law(
    rule: Rule,
    anchor: int,
    p_VV: Tensor,
    q_VW: Tensor,
    template: Template,
    by_paths: bool = False,
    *,
    d2t_W: Tensor | None = None,
    replacement: bool = False,
    rows_VW: Tensor | None = None,
) -> Law:
    """One round with drawn siblings. `rows_VW`: the rows that are handed over, where they are not those drawn from."""
    drawn = list(drawn_trees(anchor, q_VW, template, d2t_W, replacement))
    tree = tree_of([t for _, t, _ in drawn], [ok for _, _, ok in drawn], template, None)
    tree.q = Proposal(rows_of(tree, anchor, q_VW if rows_VW is None else rows_VW), d2t_W, replacement)
    odds = rule(tree, rows_of(tree, anchor, p_VV))
    law: Law = {}
    for row, (weight, _, _) in enumerate(drawn):
        for tokens, chance in law_of(tree, odds, row, by_paths).items():
            law[tokens] = law.get(tokens, 0.0) + weight * chance
    return law


def fixed_law(
    rule: Rule,
    anchor: int,
    p_VV: Tensor,
    q_VV: Tensor,
    template: Template,
    by_paths: bool = False,
    repeat: bool = False,
) -> Law:
    """One round with the drafter's top tokens as candidates (`repeat`: every sibling is the first one again)."""
    tokens: list[int] = []
    for path in template:
        last = anchor if len(path) == 1 else tokens[template.index(path[:-1])]
        tokens.append(int(q_VV[last].sort(descending=True, stable=True).indices[0 if repeat else path[-1]]))
    tree = tree_of([tokens], [[True] * len(template)], template, None)
    return law_of(tree, rule(tree, rows_of(tree, anchor, p_VV)), 0, by_paths)


def two_rounds(once: Callable[[int], Law], p_VV: Tensor, length: int = 4) -> float:
    """Largest error of the joint law of `length` tokens after two rounds (tokens still missing are the target's)."""
    v = p_VV.shape[0]
    laws = {a: once(a) for a in range(v)}
    worst = 0.0
    for start in range(v):
        joint: Law = {}
        for first, mass in laws[start].items():
            for second, more in laws[first[-1]].items():
                tokens = (*first, *second)[:length]
                joint[tokens] = joint.get(tokens, 0.0) + mass * more
        whole: Law = {}
        for tokens, mass in joint.items():
            for rest in product(range(v), repeat=length - len(tokens)):
                chance, last = mass, tokens[-1]
                for x in rest:
                    chance *= float(p_VV[last, x])
                    last = x
                whole[(*tokens, *rest)] = whole.get((*tokens, *rest), 0.0) + chance
        for tokens in product(range(v), repeat=length):
            want, last = 1.0, start
            for x in tokens:
                want *= float(p_VV[last, x])
                last = x
            worst = max(worst, abs(whole.get(tokens, 0.0) - want))
    return worst


PAIRS = [
    ("flat", "flat"),
    ("peaked", "flat"),
    ("flat", "peaked"),
    ("holes", "holes"),
    ("flat", "disjoint"),
    ("same", "same"),
]


def pair(p_kind: str, q_kind: str, v: int) -> tuple[Tensor, Tensor]:
    p_VV = table("flat" if p_kind == "same" else p_kind, v, 1)
    return p_VV, p_VV.clone() if q_kind == "same" else table(q_kind, v, 2)


DRAWN = [(n, t) for n in ("ratio_tree", "traversal") for t in (CHAIN, LONG, BUSHY, DEEP, FORK, LOPSIDED)] + [
    ("block", CHAIN),
    ("block", LONG),
]


@pytest.mark.parametrize(("p_kind", "q_kind"), PAIRS)
@pytest.mark.parametrize(("name", "template"), DRAWN)
@pytest.mark.parametrize("replacement", [False, True])
def test_drawn_siblings_give_the_targets_law(
    p_kind: str, q_kind: str, name: str, template: Template, replacement: bool
) -> None:
    v = 4 if template is CHAIN else 3
    p_VV, q_VV = pair(p_kind, q_kind, v)
    rule, by_paths = rule_of(name)
    once = lambda a: round_law(rule, a, p_VV, q_VV, template, by_paths, replacement=replacement)  # noqa: E731
    assert two_rounds(once, p_VV) < 1e-12


@pytest.mark.parametrize(("p_kind", "q_kind"), PAIRS)
@pytest.mark.parametrize(("name", "template"), [x for x in DRAWN if x[1] in (CHAIN, BUSHY, FORK)])
def test_a_draft_vocabulary_keeps_the_targets_law(p_kind: str, q_kind: str, name: str, template: Template) -> None:
    p_VV, q_VV = pair(p_kind, q_kind, 4)
    d2t_W = torch.tensor([0, 2, 3])
    q_VW = q_VV[:, d2t_W] + 1e-3
    q_VW = q_VW / q_VW.sum(-1, keepdim=True)
    rule, by_paths = rule_of(name)
    assert two_rounds(lambda a: round_law(rule, a, p_VV, q_VW, template, by_paths, d2t_W=d2t_W), p_VV, 3) < 1e-12


@pytest.mark.parametrize(("p_kind", "q_kind"), PAIRS)
@pytest.mark.parametrize(("name", "template"), [*DRAWN, *(("target_only", t) for t in (CHAIN, BUSHY, FORK))])
@pytest.mark.parametrize("repeat", [False, True])
def test_fixed_candidates_give_the_targets_law(
    p_kind: str, q_kind: str, name: str, template: Template, repeat: bool
) -> None:
    p_VV, q_VV = pair(p_kind, q_kind, 3)
    rule, by_paths = rule_of(name)
    assert two_rounds(lambda a: fixed_law(rule, a, p_VV, q_VV, template, by_paths, repeat), p_VV) < 1e-12


@pytest.mark.parametrize(("name", "template"), [("ratio_tree", BUSHY), ("traversal", BUSHY), ("block", LONG)])
def test_rows_that_are_not_drawn_follow_the_rule_for_fixed_candidates(name: str, template: Template) -> None:
    p_VV, q_VV = pair("flat", "peaked", 3)
    n = len(template)
    tree = tree_of([[0, 1, 2, 0, 1][:n]] * 2, [[True] * n] * 2, template, None)
    p_BMV = rows_of(tree, 1, p_VV)
    rule = VERIFIERS[name].probabilities
    want = fixed_odds(tree, p_BMV) if name == "ratio_tree" else rule(tree, p_BMV)
    tree.q = Proposal(rows_of(tree, 1, q_VV), None, False, torch.tensor([False, True]))
    got = rule(tree, p_BMV)
    assert torch.allclose(got.accept_BN[0], want.accept_BN[0], atol=1e-15)
    assert not torch.allclose(got.accept_BN[1], want.accept_BN[1], atol=1e-3)


def test_the_greedy_rule_follows_the_top_tokens() -> None:
    tree = tree_of([[2, 0, 1, 0, 2]], [[True] * 5], BUSHY, None)
    rule = VERIFIERS["greedy"]
    for tops, path, token in [
        ([2, 0, 1, 0, 0, 0], [1, 4], 0),
        ([0, 1, 2, 0, 0, 1], [2, 5], 1),
        ([1, 0, 0, 0, 0, 0], [], 1),
        ([2, 2, 0, 0, 0, 0], [1], 2),
    ]:
        choice = rule.choose(tree, rule.probabilities(tree, torch.tensor([tops])), None)
        assert choice.path_BL[0, : int(choice.counts_B)].tolist() == path
        assert choice.token_B.tolist() == [token]


def test_typical_acceptance_follows_its_floor_and_is_not_exact() -> None:
    p_VV = torch.tensor([[0.85, 0.1, 0.05], [0.4, 0.3, 0.3], [0.34, 0.33, 0.33]], dtype=torch.float64)
    tree = tree_of([[1, 2, 0, 1, 0]], [[True] * 5], BUSHY, None)
    rule = partial(verify.typical_odds, epsilon=0.09, delta=0.3)
    odds = rule(tree, rows_of(tree, 0, p_VV))
    entropy_0 = -(p_VV[0] * p_VV[0].log()).sum()
    assert float(0.3 * torch.exp(-entropy_0)) > 0.09  # so epsilon is the floor at the anchor
    assert odds.accept_BN.tolist() == [[1, 0, 1, 1, 1]]
    assert not VERIFIERS["typical"].exact
    assert two_rounds(lambda a: fixed_law(rule, a, p_VV, p_VV, CHAIN), p_VV) > 0.1


@pytest.mark.parametrize(("p_kind", "q_kind"), PAIRS)
@pytest.mark.parametrize(("name", "template"), [("ratio_tree", BUSHY), ("traversal", BUSHY), ("block", LONG)])
def test_single_precision_costs_rounding_only(p_kind: str, q_kind: str, name: str, template: Template) -> None:
    """Some tens of fp32 operations per chance, on numbers up to 1: 1e-5 is a hundred roundings."""
    p_VV, q_VV = (x.float() for x in pair(p_kind, q_kind, 3))
    rule, by_paths = rule_of(name)
    assert two_rounds(lambda a: round_law(rule, a, p_VV, q_VV, template, by_paths), p_VV) < 1e-5


# Whole paths


def random_tree(
    n: int, v: int, seed: int, d2t_W: Tensor | None = None, replacement: bool = False
) -> tuple[Tree, Tensor]:
    """Three rows of any shape with any tokens, some unused, drawn from any rows (the middle row's are not drawn), and
    the target's probabilities."""
    random = torch.Generator().manual_seed(seed)
    b, w = 3, v if d2t_W is None else len(d2t_W)
    parents_BN = torch.stack([torch.randint(j + 1, (b,), generator=random) for j in range(n)], 1)
    depths_BM, alive_BM = torch.zeros(b, n + 1, dtype=torch.int64), torch.ones(b, n + 1, dtype=torch.bool)
    for j in range(n):
        above_B1 = parents_BN[:, j : j + 1]
        depths_BM[:, j + 1] = depths_BM.gather(1, above_B1)[:, 0] + 1
        alive_BM[:, j + 1] = alive_BM.gather(1, above_B1)[:, 0] & (torch.rand(b, generator=random) < 0.9)
    drawn_BN = torch.randint(w, (b, n), generator=random)
    q_BMW = torch.rand(b, n + 1, w, generator=random, dtype=torch.float64) ** 4
    p_BMV = torch.rand(b, n + 1, v, generator=random, dtype=torch.float64) ** 4
    sampled_B = torch.tensor([True, False, True])
    q = Proposal(q_BMW / q_BMW.sum(-1, keepdim=True), d2t_W, replacement, sampled_B)
    tokens_BN = drawn_BN if d2t_W is None else d2t_W[drawn_BN]
    tree = Tree(tokens_BN, parents_BN, depths_BM[:, 1:], torch.zeros(b, n), alive_BM[:, 1:], q)
    return tree, p_BMV / p_BMV.sum(-1, keepdim=True)


def by_hand(tree: Tree, p_BMV: Tensor, slip: str = "") -> Odds:
    """Traversal verification one node at a time, in lists; the share of failures is counted as what the draft offers
    beyond what is owed, sum of (q - m)+. `slip`: one of SLIPS."""
    accept_BN, stop_BMV = torch.zeros(tree.tokens_BN.shape, dtype=p_BMV.dtype), p_BMV.clone()
    q, v = tree.q, p_BMV.shape[2]
    for row, tokens in enumerate(tree.tokens_BN.tolist()):
        sampled = q is not None and (q.sampled_B is None or bool(q.sampled_B[row]))

        def settle(node: int, due: float, row: int = row, tokens: list[int] = tokens, sampled: bool = sampled) -> None:
            law, first = p_BMV[row, node].tolist(), due
            mine = (tree.parents_BN[row] == node) & tree.valid_BN[row]
            children = mine.nonzero()[:, 0].tolist()
            offer = [0.0] * v
            if q is not None and sampled:
                ids = range(v) if q.d2t_W is None else q.d2t_W.tolist()
                for x, chance in zip(ids, q.rows_BMW[row, node].tolist(), strict=True):
                    offer[x] = chance
                if slip == "q of the siblings alone":
                    offer = [y * (x in [tokens[j] for j in children]) for x, y in enumerate(offer)]
                    offer = [y / sum(offer) for y in offer] if children else offer
            for j in children:
                x = tokens[j]
                if not sampled:
                    offer = [float(y == x) for y in range(v)]
                owed = [(first if slip == "siblings by the first weight" else due) * y for y in law]
                share = owed[x] / offer[x] if offer[x] > 0 else 0.0
                settle(j + 1, share if slip == "weight not capped" else min(1.0, share))
                rest = [max(o - y, 0.0) for o, y in zip(owed, offer, strict=True)]
                if slip == "residual without the weight":
                    rest = [max(o - y, 0.0) for o, y in zip(law, offer, strict=True)]
                failed = sum(max(y - o, 0.0) for o, y in zip(owed, offer, strict=True))
                if sum(rest) > 0:
                    law = [y / sum(rest) for y in rest]
                else:
                    law = p_BMV[row, node].tolist()
                if slip == "rest not conditioned":
                    due = sum(rest)
                elif slip != "inner nodes by their weight":
                    due = sum(rest) / failed if failed > 0 else 1.0
                if q is not None and sampled and not q.replacement and slip != "tried tokens stay in q":
                    offer[x] = 0.0
                    offer = [y / sum(offer) for y in offer] if sum(offer) > 0 else offer
            if node:
                accept_BN[row, node - 1] = due
            stop_BMV[row, node] = torch.tensor(law, dtype=p_BMV.dtype)

        settle(0, 1.0)
    return Odds(accept_BN.clamp(max=1), stop_BMV)


@pytest.mark.parametrize("replacement", [False, True])
@pytest.mark.parametrize("d2t_W", [None, torch.tensor([0, 2, 3])], ids=["all", "draft_vocab"])
def test_traversal_is_what_its_definition_says(replacement: bool, d2t_W: Tensor | None) -> None:
    for seed in range(30):
        tree, p_BMV = random_tree(1 + seed % 8, 4, seed, d2t_W, replacement)
        if seed % 5 == 0:
            tree.q = None
        got, want = traversal_odds(tree, p_BMV), by_hand(tree, p_BMV)
        assert got.stop_BMV is not None and want.stop_BMV is not None
        assert torch.allclose(got.accept_BN, want.accept_BN, rtol=0, atol=1e-10)
        assert torch.allclose(got.stop_BMV, want.stop_BMV, rtol=0, atol=1e-10)


def test_block_is_its_papers_formula() -> None:
    """b_0 = 1, b_i = min(1, b_{i-1} p / q); r_i = sum of (b_i p - q)+; node i of g is kept with chance
    r_i / (r_i + 1 - b_i), the last one with b_g; the next token is of (b_i p - q)+, or of p."""
    for seed in range(20):
        g = 1 + seed % 5
        chain = tuple((0,) * d for d in range(1, g + 1))
        tree = tree_of([[(seed + 2 * d) % 3 for d in range(g)]], [[True] * g], chain, None)
        p_VV, q_VV = table("peaked", 3, 2 * seed), table("flat", 3, 2 * seed + 1)
        p_BMV, q_BMV = rows_of(tree, 0, p_VV), rows_of(tree, 0, q_VV)
        tree.q = Proposal(q_BMV, None, False)
        odds = VERIFIERS["block"].probabilities(tree, p_BMV)
        assert odds.stop_BMV is not None
        b = 1.0
        for i in range(g + 1):
            if i:
                x = int(tree.tokens_BN[0, i - 1])
                b = min(1.0, b * float(p_BMV[0, i - 1, x] / q_BMV[0, i - 1, x]))
            rest_V = (b * p_BMV[0, i] - q_BMV[0, i]).clamp(min=0) if i < g else b * p_BMV[0, i]
            r = float(rest_V.sum())
            h = b if i == g else r / (r + 1 - b)
            if i:
                assert float(odds.accept_BN[0, i - 1]) == pytest.approx(h, abs=1e-13)
            if r > 0:  # else no verification stops here
                assert torch.allclose(odds.stop_BMV[0, i], rest_V / r, rtol=0, atol=1e-13)


def test_block_keeps_11_ninths_where_single_tokens_keep_10_ninths() -> None:
    """By hand, for p = (1/3, 2/3) and q = (2/3, 1/3) at both depths: a first token is kept in 2/3 of the cases by
    either rule; the second by `ratio` in 2/3 of those, by `block` with the mean of min(1, w p / q), 5/9."""
    p_VV = torch.tensor([1 / 3, 2 / 3], dtype=torch.float64).repeat(2, 1)
    q_VV = p_VV.flip(1)
    assert kept(round_law(rejection_odds, 0, p_VV, q_VV, CHAIN)) == pytest.approx(10 / 9, abs=1e-15)
    assert kept(round_law(traversal_odds, 0, p_VV, q_VV, CHAIN, True)) == pytest.approx(11 / 9, abs=1e-15)


@pytest.mark.parametrize(("name", "template"), [x for x in DRAWN if x[0] != "ratio_tree" and x[1] is not LOPSIDED])
@pytest.mark.parametrize("replacement", [False, True])
def test_whole_paths_keep_no_fewer_tokens(name: str, template: Template, replacement: bool) -> None:
    rule, by_paths = rule_of(name)
    gains = []
    for seed in range(8 if template is DEEP else 40):
        kinds = ("flat", "peaked", "holes")
        p_VV, q_VV = table(kinds[seed % 3], 3, 2 * seed), table(kinds[seed // 3 % 3], 3, 2 * seed + 1)
        laws = [
            round_law(r, seed % 3, p_VV, q_VV, template, paths, replacement=replacement)
            for r, paths in ((rule, by_paths), (rejection_odds, False))
        ]
        gains.append(kept(laws[0]) - kept(laws[1]))
        fixed = [fixed_law(r, 0, p_VV, q_VV, template, paths) for r, paths in ((rule, by_paths), (fixed_odds, False))]
        assert kept(fixed[0]) == pytest.approx(kept(fixed[1]), abs=1e-12)  # fixed candidates leave nothing to gain
    assert min(gains) > -1e-12
    assert max(gains) < 1e-12 if template is FORK else max(gains) > 0.02


def test_siblings_without_replacement_may_lose_a_little() -> None:
    """Of two children of a node due in 0.83 of the cases: the second is drawn from q without the first, and where a
    share is owed to nobody, other first tokens fail. (With three tokens, as above, no such case was found.)"""
    p_VV, q_VV = torch.eye(6, dtype=torch.float64), torch.eye(6, dtype=torch.float64)
    p_VV[5] = torch.tensor([0.17, 0, 0, 0, 0.83, 0])
    q_VV[5] = torch.tensor([0.0, 0, 0, 0, 1, 0])
    p_VV[4] = torch.tensor([0.34, 0.3, 0.12, 0.24, 0, 0])
    q_VV[4] = torch.tensor([0.12, 0.76, 0.12, 0, 0, 0])
    for replacement, low, high in ((False, -0.01, -0.001), (True, 0.0, 1.0)):
        token_by_token, whole_paths = (
            kept(round_law(rule, 5, p_VV, q_VV, ((0,), (0, 0), (0, 1)), paths, replacement=replacement))
            for rule, paths in ((rejection_odds, False), (traversal_odds, True))
        )
        assert low < whole_paths - token_by_token < high


def test_a_later_sibling_with_the_larger_subtree_may_cost_tokens() -> None:
    """Earlier siblings are paid first. Exact all the same (above)."""
    p_VV = torch.tensor([[0.5, 0.5], [1.0, 0.0]], dtype=torch.float64)
    q_VV = torch.tensor([[0.0, 1.0], [0.5, 0.5]], dtype=torch.float64)
    token_by_token, whole_paths = (
        kept(round_law(rejection_odds, 0, p_VV, q_VV, LOPSIDED)),
        kept(round_law(traversal_odds, 0, p_VV, q_VV, LOPSIDED, True)),
    )
    assert whole_paths < token_by_token - 0.05


# Lossy rules


@pytest.mark.parametrize(("p_kind", "q_kind"), PAIRS)
@pytest.mark.parametrize("rule", [fuzzy_odds, entropy_odds])
def test_lossy_rules_are_exact_at_zero(p_kind: str, q_kind: str, rule: Callable[[Tree, Tensor, float], Odds]) -> None:
    p_VV, q_VV = pair(p_kind, q_kind, 3)
    zero: Rule = lambda tree, p_BMV: rule(tree, p_BMV, 0.0)  # noqa: E731
    assert two_rounds(lambda a: round_law(zero, a, p_VV, q_VV, BUSHY), p_VV) < 1e-12
    assert two_rounds(lambda a: fixed_law(zero, a, p_VV, q_VV, BUSHY), p_VV) < 1e-12


def first_token(law: Law, v: int) -> Tensor:
    """[V] the law of the first token of a verification."""
    first_V = torch.zeros(v, dtype=torch.float64)
    for tokens, chance in law.items():
        first_V[tokens[0]] += chance
    return first_V


@pytest.mark.parametrize("drawn", [True, False])
def test_fuzzy_keeps_its_distance(drawn: bool) -> None:
    """Drafts within the threshold are always kept and tokens that p rules out never; the law stays within it."""
    moved = []
    for seed in range(30):
        p_VV, q_VV = table("holes" if seed % 2 else "peaked", 4, seed), table("flat", 4, 100 + seed)
        q_VV = 0.7 * p_VV + 0.3 * q_VV
        for threshold in (0.05, 0.1, 0.2, 0.5):
            rule = partial(fuzzy_odds, threshold=threshold)
            law = round_law(rule, 0, p_VV, q_VV, CHAIN) if drawn else fixed_law(rule, 0, p_VV, q_VV, CHAIN)
            got_V, p_V, q_V = first_token(law, 4), p_VV[0], q_VV[0]
            if not drawn:
                q_V = torch.nn.functional.one_hot(q_V.argmax(), 4).double()
            far = float((p_V - q_V).clamp(min=0).sum())
            distance = float((got_V - p_V).clamp(min=0).sum())
            assert not bool((got_V[p_V == 0] > 0).any())
            assert distance < threshold + 1e-12 if far <= threshold else distance < 1e-12
            moved.append(distance)
    assert max(moved) > 0.05
    assert not VERIFIERS["fuzzy"].exact


@pytest.mark.parametrize("drawn", [True, False])
def test_entropy_moves_a_token_by_its_tolerance_at_most(drawn: bool) -> None:
    """Nothing where the target is sure, at most tolerance * (1 - exp(-entropy)) elsewhere, and no ruled-out token."""
    moved = []
    for seed in range(30):
        p_VV, q_VV = table("holes" if seed % 2 else "peaked", 4, seed), table("flat", 4, 100 + seed)
        p_V = p_VV[0]
        entropy = float(-(p_V[p_V > 0] * p_V[p_V > 0].log()).sum())
        for tolerance in (0.1, 0.5, 1.0):
            rule = partial(entropy_odds, tolerance=tolerance)
            law = round_law(rule, 0, p_VV, q_VV, CHAIN) if drawn else fixed_law(rule, 0, p_VV, q_VV, CHAIN)
            got_V = first_token(law, 4)
            distance = float((got_V - p_V).clamp(min=0).sum())
            assert not bool((got_V[p_V == 0] > 0).any())
            assert distance <= tolerance * (1 - math.exp(-entropy)) + 1e-12
            exact = (
                round_law(rejection_odds, 0, p_VV, q_VV, CHAIN)
                if drawn
                else fixed_law(fixed_odds, 0, p_VV, q_VV, CHAIN)
            )
            assert kept(law) >= kept(exact) - 1e-12
            moved.append(distance)
    assert max(moved) > 0.05
    sure_VV = torch.eye(3, dtype=torch.float64)
    assert (
        two_rounds(
            lambda a: round_law(partial(entropy_odds, tolerance=1.0), a, sure_VV, sure_VV.flip(0), CHAIN), sure_VV
        )
        < 1e-12
    )
    assert not VERIFIERS["entropy"].exact


# choose


def coins(tree: Tree, accept: float = 0.5, residual: float = 0.5, target: float = 0.5) -> Coins:
    b, n = tree.tokens_BN.shape
    wide = torch.ones(b, n + 1, dtype=torch.float64)
    return Coins(wide[:, 1:] * accept, wide * residual, wide * target)


@pytest.mark.parametrize("name", [n for n, v in VERIFIERS.items() if v.choose is choose_by_coins])
def test_choose_breaks_where_the_chances_do(name: str) -> None:
    tree = tree_of([[1, 2, 0, 1, 2]], [[True] * 5], BUSHY, None)
    stop_BMV = torch.tensor([0.25, 0.0, 0.75], dtype=torch.float64).repeat(1, 6, 1)
    accept_BN = torch.tensor([[0.5, 0.25, 0.0, 1.0, 0.125]], dtype=torch.float64)
    odds = Odds(accept_BN, stop_BMV)
    below = 2**-52

    def path(u: float) -> list[int]:
        choice = VERIFIERS[name].choose(tree, odds, coins(tree, accept=u))
        return choice.path_BL[0, : int(choice.counts_B)].tolist()

    assert path(0.0) == [1, 4]  # node 3 has chance 0 and is passed over even by the coin 0
    assert path(0.5 - below) == [1, 4]
    assert path(0.5) == []
    assert path(1 - below) == []
    only_second = replace(odds, accept_BN=torch.tensor([[0.0, 0.25, 1.0, 1.0, 0.125]], dtype=torch.float64))
    for u, want in [(0.0, [2, 5]), (0.125 - below, [2, 5]), (0.125, [2]), (0.25 - below, [2]), (0.25, [])]:
        choice = VERIFIERS[name].choose(tree, only_second, coins(tree, accept=u))
        assert choice.path_BL[0, : int(choice.counts_B)].tolist() == want, u
    for u, want_token in [(0.0, 0), (0.25 - below, 0), (0.25, 2), (1 - below, 2)]:
        rejected = VERIFIERS[name].choose(tree, odds, coins(tree, accept=0.9, residual=u, target=0.0))
        assert rejected.token_B.tolist() == [want_token] and rejected.tested_B.tolist() == [True]
        full = VERIFIERS[name].choose(tree, odds, coins(tree, accept=0.0, residual=0.0, target=u))
        assert full.token_B.tolist() == [want_token] and full.tested_B.tolist() == [False]


def test_whole_paths_break_where_the_chances_do() -> None:
    tree = tree_of([[1, 2, 0, 1, 2]], [[True] * 5], BUSHY, None)  # in order: nodes 3, 4, 1, 5, 2, the anchor
    stop_BMV = torch.tensor([0.25, 0.0, 0.75], dtype=torch.float64).repeat(1, 6, 1)
    below = 2**-52

    def path(chances: list[float], u: float, some: Tree = tree) -> list[int]:
        choice = choose_by_paths(some, Odds(torch.tensor([chances]).double(), stop_BMV), coins(tree, accept=u))
        return choice.path_BL[0, : int(choice.counts_B)].tolist()

    for u, want in [(0.0, [1, 4]), (0.0625 - below, [1, 4]), (0.0625, [1]), (0.5 - below, [1]), (0.5, [])]:
        assert path([0.5, 0.25, 0.0, 0.0625, 0.125], u) == want, u  # chance 0 is passed over even by the coin 0
    for u, want in [(0.0, [2, 5]), (0.125 - below, [2, 5]), (0.125, [2]), (0.25 - below, [2]), (0.25, [])]:
        assert path([0.0, 0.25, 0.0, 0.0, 0.125], u) == want, u
    assert path([0.0, 0.0, 1.0, 1.0, 1.0], 1 - below) == [1, 3]
    unused = replace(tree, valid_BN=torch.tensor([[True, True, False, True, True]]))
    assert path([0.0, 0.0, 1.0, 1.0, 1.0], 1 - below, unused) == [1, 4]
    for u, want_token in [(0.0, 0), (0.25 - below, 0), (0.25, 2), (1 - below, 2)]:
        inner = Odds(torch.tensor([[1.0, 0, 0, 0, 0]]).double(), stop_BMV)
        choice = choose_by_paths(tree, inner, coins(tree, residual=u, target=0.0))
        assert choice.token_B.tolist() == [want_token] and choice.tested_B.tolist() == [True]
        leaf = Odds(torch.tensor([[0.0, 0, 0, 1.0, 0]]).double(), stop_BMV)
        choice = choose_by_paths(tree, leaf, coins(tree, residual=0.0, target=u))
        assert choice.token_B.tolist() == [want_token] and choice.tested_B.tolist() == [False]


@pytest.mark.parametrize("choose", [choose_by_coins, choose_by_paths])
def test_choose_has_the_law_of_its_odds(choose: Callable[[Tree, Odds, Coins], verify.Choice]) -> None:
    """Independent uniforms on a grid that every break-point of these chances lies on."""
    grid = torch.tensor(list(product([0.125, 0.375, 0.625, 0.875], repeat=6)), dtype=torch.float64)
    b = len(grid)
    tree = tree_of([[1, 2, 0, 1, 2]] * b, [[True] * 5] * b, BUSHY, None)
    p_VV = torch.tensor([[0.25, 0.5, 0.25], [0.5, 0.25, 0.25], [0.25, 0.0, 0.75]], dtype=torch.float64)
    accept_BN = torch.tensor([0.5, 0.25, 0.75, 0.25, 0.5], dtype=torch.float64).repeat(b, 1)
    odds = Odds(accept_BN, rows_of(tree, 0, p_VV))
    last_BM = grid[:, 5:].expand(b, 6)
    choice = choose(tree, odds, Coins(grid[:, :5], last_BM, last_BM))
    law: Law = {}
    for row, path in enumerate(choice.path_BL.tolist()):
        tokens = [int(tree.tokens_BN[row, j - 1]) for j in path[: int(choice.counts_B[row])]]
        whole = (*tokens, int(choice.token_B[row]))
        law[whole] = law.get(whole, 0.0) + 1 / b
    assert law == pytest.approx(law_of(tree, odds, 0, choose is choose_by_paths))


def test_sample_match_breaks_where_the_targets_mass_does() -> None:
    p_VV = torch.tensor([[0.25, 0.5, 0.25], [0.5, 0.0, 0.5], [0.0, 0.0, 1.0]], dtype=torch.float64)
    tree = tree_of([[1, 0, 2, 0, 1]], [[True] * 5], BUSHY, None)
    rule = VERIFIERS["sample_match"]
    odds = rule.probabilities(tree, rows_of(tree, 0, p_VV))
    below = 2**-52
    for u, path, token in [
        (0.0, [2], 0),  # the anchor's draw is 0 = node 2; after it 0 again, but its child is 1
        (0.25 - below, [2], 0),
        (0.25, [1, 4], 1),  # 1 = node 1; after it 0 = node 4; after that 1
        (0.5 - below, [1, 4], 1),
        (0.5, [1, 3], 2),
        (0.75, [], 2),
    ]:
        choice = rule.choose(tree, odds, coins(tree, target=u))
        assert choice.path_BL[0, : int(choice.counts_B)].tolist() == path, u
        assert choice.token_B.tolist() == [token], u


def test_sample_match_has_the_law_of_its_odds() -> None:
    """Independent uniforms on a grid that every break-point of these masses lies on."""
    p_VV = torch.tensor([[0.25, 0.5, 0.25], [0.5, 0.25, 0.25], [0.25, 0.0, 0.75]], dtype=torch.float64)
    tree = tree_of([[1, 0]], [[True, True]], CHAIN, None)
    rule = VERIFIERS["sample_match"]
    odds = rule.probabilities(tree, rows_of(tree, 0, p_VV))
    grid = [0.125, 0.375, 0.625, 0.875]
    law: Law = {}
    for u in product(grid, repeat=3):
        choice = rule.choose(tree, odds, Coins(torch.zeros(1, 2), torch.zeros(1, 3), torch.tensor([u])))
        path = choice.path_BL[0, : int(choice.counts_B)].tolist()
        tokens = (*(int(tree.tokens_BN[0, j - 1]) for j in path), int(choice.token_B))
        law[tokens] = law.get(tokens, 0.0) + 4**-3
    assert law == pytest.approx(law_of(tree, odds, 0))


def test_the_share_of_accepted_drafts_is_one_minus_the_distance() -> None:
    p_VV, q_VV = pair("flat", "peaked", 4)
    drawn = list(drawn_trees(0, q_VV, ((0,),), None, False))
    tree = tree_of([t for _, t, _ in drawn], [ok for _, _, ok in drawn], ((0,),), None)
    tree.q = Proposal(rows_of(tree, 0, q_VV), None, False)
    weights = torch.tensor([w for w, _, _ in drawn], dtype=torch.float64)
    accepted = float((weights * rejection_odds(tree, rows_of(tree, 0, p_VV)).accept_BN[:, 0]).sum())
    assert accepted == pytest.approx(float(torch.minimum(p_VV[0], q_VV[0]).sum()), abs=1e-15)


# what the table says


def test_auto_picks_an_exact_rule() -> None:
    tree = tree_of([[0, 0]], [[True] * 2], CHAIN, None)
    drawn = replace(tree, q=Proposal(torch.ones(1, 3, 3) / 3, None, False))
    bushy = replace(tree_of([[0] * 5], [[True] * 5], BUSHY, None), q=drawn.q)
    for some, hot, want in [
        (tree, False, "greedy"),
        (drawn, False, "greedy"),
        (tree, True, "target_only"),
        (drawn, True, "ratio"),
        (bushy, True, "ratio_tree"),
    ]:
        name = verify.resolve("auto", some, hot, False)
        assert name == want and VERIFIERS[name].exact
    for some in (tree, drawn):
        assert all(
            verify.resolve(name, some, hot, False) == name for name in ("block", "traversal") for hot in (True, False)
        )


@pytest.mark.parametrize(
    ("name", "drawn", "hot", "lossy", "message"),
    [
        ("no_such", False, True, False, "use auto, greedy"),
        ("greedy", False, True, False, "temperature 0 only"),
        ("ratio", False, True, False, "needs the rows q"),
        ("ratio_tree", False, True, False, "needs the rows q"),
        ("target_only", True, True, False, "fixed candidates"),
        ("typical", False, True, False, "allow_lossy"),
        ("fuzzy", True, True, False, "allow_lossy"),
        ("entropy", True, True, False, "allow_lossy"),
    ],
)
def test_a_rule_that_does_not_fit_is_refused(name: str, drawn: bool, hot: bool, lossy: bool, message: str) -> None:
    tree = tree_of([[0, 0]], [[True] * 2], CHAIN, Proposal(torch.ones(1, 3, 3) / 3, None, False) if drawn else None)
    with pytest.raises(ValueError, match=message):
        verify.resolve(name, tree, hot, lossy)


def test_chain_rules_refuse_trees() -> None:
    tree = tree_of([[0] * 5], [[True] * 5], BUSHY, Proposal(torch.ones(1, 6, 3) / 3, None, False))
    for name in ("ratio", "block"):
        with pytest.raises(ValueError, match="is for chains: use auto, ratio_tree or traversal"):
            verify.resolve(name, tree, True, False)


def test_the_readme_lists_every_rule_and_its_promise() -> None:
    """inference/README.md, section "Acceptance rules", is the table VERIFIERS in words."""
    text = Path(verify.__file__).with_name("README.md").read_text()
    section = text.split("## Acceptance rules")[1].split("\n## ")[0]
    lines = [x for x in section.splitlines() if x.startswith("| `")]
    rows = {cells[1].strip(" `"): cells[2:4] for cells in (x.split("|") for x in lines) if len(cells) >= 5}
    listed = {name: [c.strip() for c in cells] for name, cells in rows.items() if name in VERIFIERS}
    want = {n: ["exact" if v.exact else "not exact", v.condition] for n, v in VERIFIERS.items()}
    assert listed == want


# Planted faults: each is a plausible slip, and the check named after it must see it.


def broken_rejection(tree: Tree, p_BMV: Tensor) -> Odds:
    """Accepts by the ratio, but redraws from p instead of from (p - q)+."""
    return replace(rejection_odds(tree, p_BMV), stop_BMV=p_BMV)


def test_fault_wrong_residual_is_caught() -> None:
    p_VV, q_VV = pair("flat", "peaked", 3)
    assert two_rounds(lambda a: round_law(broken_rejection, a, p_VV, q_VV, CHAIN), p_VV) > 1e-3


def test_fault_q_unmasked_is_caught() -> None:
    """Drawn from the top 2 of q, verified with all of q."""
    p_VV, q_VV = pair("flat", "flat", 3)
    masked_VV = probs(q_VV.log(), SamplingParams(temperature=1.0, top_k=2))
    right = lambda a: round_law(rejection_odds, a, p_VV, masked_VV, CHAIN)  # noqa: E731
    wrong = lambda a: round_law(rejection_odds, a, p_VV, masked_VV, CHAIN, rows_VW=q_VV)  # noqa: E731
    assert two_rounds(right, p_VV) < 1e-12 and two_rounds(wrong, p_VV) > 1e-3


def test_fault_temperature_on_p_only_is_caught() -> None:
    """Drafts drawn at the request's temperature, q handed over without it."""
    p_VV, q_VV = pair("flat", "flat", 3)
    params = SamplingParams(temperature=0.5)
    cool_p, cool_q = probs(p_VV.log(), params), probs(q_VV.log(), params)
    right = lambda a: round_law(rejection_odds, a, cool_p, cool_q, CHAIN)  # noqa: E731
    wrong = lambda a: round_law(rejection_odds, a, cool_p, cool_q, CHAIN, rows_VW=q_VV)  # noqa: E731
    assert two_rounds(right, cool_p) < 1e-12 and two_rounds(wrong, cool_p) > 1e-3


def test_fault_off_by_one_row_is_caught() -> None:
    """Each node judged by the target's row after it instead of the row after its parent."""

    def broken(tree: Tree, p_BMV: Tensor) -> Odds:
        return replace(rejection_odds(tree, torch.roll(p_BMV, -1, 1)), stop_BMV=rejection_odds(tree, p_BMV).stop_BMV)

    p_VV, q_VV = pair("peaked", "flat", 3)
    assert two_rounds(lambda a: round_law(broken, a, p_VV, q_VV, CHAIN), p_VV) > 1e-3


def test_fault_bonus_from_draft_is_caught() -> None:
    """After a fully accepted chain, the extra token drawn from the drafter."""
    p_VV, q_VV = pair("flat", "peaked", 3)

    def broken(tree: Tree, p_BMV: Tensor) -> Odds:
        odds = rejection_odds(tree, p_BMV)
        assert tree.q is not None and odds.stop_BMV is not None
        stop_BMV = odds.stop_BMV.clone()
        stop_BMV[:, -1] = tree.q.rows_BMW[:, -1]
        return replace(odds, stop_BMV=stop_BMV)

    assert two_rounds(lambda a: round_law(broken, a, p_VV, q_VV, CHAIN), p_VV) > 1e-3


def test_fault_duplicate_siblings_is_caught() -> None:
    """A repeated candidate whose probability counts once per copy."""

    def broken(tree: Tree, p_BMV: Tensor) -> Odds:
        first = tree.tokens_BN[:, :1]
        chance = p_BMV[:, 0].gather(1, first)
        odds = fixed_odds(tree, p_BMV)
        return replace(
            odds, accept_BN=torch.cat([chance, chance / (1 - chance), chance / (1 - 2 * chance)], 1).clamp(0, 1)
        )

    p_VV, q_VV = pair("flat", "flat", 3)
    assert two_rounds(lambda a: fixed_law(fixed_odds, a, p_VV, q_VV, FORK, repeat=True), p_VV) < 1e-12
    assert two_rounds(lambda a: fixed_law(broken, a, p_VV, q_VV, FORK, repeat=True), p_VV) > 1e-3


def test_fault_accepting_probability_zero_is_caught() -> None:
    """u <= p / q instead of u < p / q: the coin 0 lets a token through that the target never gives."""

    def broken(tree: Tree, odds: Odds, u: Coins) -> verify.Choice:
        path_BL, counts_B, stop_B, tested_B = verify.walk(tree, u.accept_BN <= odds.accept_BN)
        return verify.Choice(path_BL, counts_B, stop_B, stop_B, tested_B)

    tree = tree_of([[1, 2]], [[True, True]], CHAIN, None)
    p_BMV = torch.tensor([1.0, 0.0, 0.0], dtype=torch.float64).repeat(1, 3, 1)
    odds = fixed_odds(tree, p_BMV)
    assert int(choose_by_coins(tree, odds, coins(tree, accept=0.0)).counts_B) == 0
    assert int(broken(tree, odds, coins(tree, accept=0.0)).counts_B) > 0


SLIPS = [
    "weight not capped",
    "residual without the weight",
    "rest not conditioned",
    "inner nodes by their weight",
    "siblings by the first weight",
    "q of the siblings alone",
    "tried tokens stay in q",
]


@pytest.mark.parametrize("slip", SLIPS)
def test_fault_in_whole_paths_is_caught(slip: str) -> None:
    errors = []
    for p_kind, q_kind in (("flat", "flat"), ("flat", "peaked")):
        p_VV, q_VV = pair(p_kind, q_kind, 3)
        right, broken = (
            two_rounds(lambda a, r=rule, p=p_VV, q=q_VV: round_law(r, a, p, q, BUSHY, True), p_VV)
            for rule in (by_hand, partial(by_hand, slip=slip))
        )
        assert right < 1e-12
        errors.append(broken)
    assert max(errors) > 1e-3


def test_fault_whole_paths_walked_from_the_anchor_is_caught() -> None:
    """The chances of one order, the walk of the other."""
    p_VV, q_VV = pair("flat", "peaked", 3)
    for template in (LONG, BUSHY):
        assert (
            two_rounds(lambda a, t=template: round_law(traversal_odds, a, p_VV, q_VV, t, by_paths=False), p_VV) > 1e-3
        )


def test_fault_one_coin_for_a_whole_path_is_caught() -> None:
    """Block verification needs a coin per node: with one for all, the longest path that it allows is too likely."""
    p_VV, q_VV = pair("flat", "peaked", 3)
    drawn = list(drawn_trees(0, q_VV, LONG, None, False))
    tree = tree_of([t for _, t, _ in drawn], [ok for _, _, ok in drawn], LONG, None)
    tree.q = Proposal(rows_of(tree, 0, q_VV), None, False)
    accept_BN = traversal_odds(tree, rows_of(tree, 0, p_VV)).accept_BN
    weight_B = torch.tensor([w for w, _, _ in drawn], dtype=torch.float64)
    by_one = float((weight_B * accept_BN.amax(1)).sum())  # the share of verifications that keep something
    by_each = float((weight_B * (1 - (1 - accept_BN).prod(1))).sum())
    want = float(torch.minimum(p_VV[0], q_VV[0]).sum())  # depth 1 as in single-token verification
    assert by_each == pytest.approx(want, abs=1e-12) and abs(by_one - want) > 1e-3
