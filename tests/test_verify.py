"""Verifiers, exactly: the law of the committed tokens by enumeration in float64, over two consecutive rounds, and
`choose` at its break-points. The last section plants faults and shows that these checks catch each of them."""

from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import product
from pathlib import Path

import pytest
import torch
from torch import Tensor

from draftsmith.inference import verify
from draftsmith.inference.verify import VERIFIERS, Coins, Odds, choose_by_coins, fixed_odds, rejection_odds
from draftsmith.losses.probs import SamplingParams, probs
from draftsmith.models.tree import Proposal, Tree

Rule = Callable[[Tree, Tensor], Odds]
Law = dict[tuple[int, ...], float]

CHAIN = ((0,), (0, 0))
BUSHY = ((0,), (1,), (0, 0), (0, 1), (1, 0))
FORK = ((0,), (1,), (2,))


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
    anchor: int, q_VW: Tensor, template: tuple[tuple[int, ...], ...], d2t_W: Tensor | None, replacement: bool, v: int
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


def tree_of(
    tokens: list[list[int]], valid: list[list[bool]], template: tuple[tuple[int, ...], ...], q: Proposal | None
) -> Tree:
    b = len(tokens)
    parents = torch.tensor([template.index(p[:-1]) + 1 if len(p) > 1 else 0 for p in template])
    tokens_BN = torch.tensor(tokens)
    depths_BN = torch.tensor([len(p) for p in template]).repeat(b, 1)
    return Tree(tokens_BN, parents.repeat(b, 1), depths_BN, torch.zeros(tokens_BN.shape), torch.tensor(valid), q)


def law_of(tree: Tree, odds: Odds, row: int) -> Law:
    """The law of the tokens that one verification commits, from its odds."""
    law: Law = {}
    assert odds.stop_BMV is not None
    accept = odds.accept_BN[row].tolist()

    def descend(node: int, so_far: tuple[int, ...], mass: float) -> None:
        for j in range(tree.tokens_BN.shape[1]):
            if int(tree.parents_BN[row, j]) == node and bool(tree.valid_BN[row, j]):
                if accept[j] > 0:
                    descend(j + 1, (*so_far, int(tree.tokens_BN[row, j])), mass * accept[j])
                mass *= 1 - accept[j]
        if mass > 0:
            stop_V = odds.stop_BMV[row, node]
            for x, chance in enumerate((stop_V / stop_V.sum()).tolist()):
                if chance > 0:
                    law[(*so_far, x)] = law.get((*so_far, x), 0.0) + mass * chance

    descend(0, (), 1.0)
    return law


def rows_of(tree: Tree, anchor: int, p_VV: Tensor) -> Tensor:
    """[B, M, V] the target's rows at the anchor and every node."""
    at_BM = torch.cat([torch.full((tree.tokens_BN.shape[0], 1), anchor), tree.tokens_BN], 1)
    return p_VV[at_BM]


def round_law(
    rule: Rule,
    anchor: int,
    p_VV: Tensor,
    q_VW: Tensor,
    template: tuple[tuple[int, ...], ...],
    *,
    d2t_W: Tensor | None = None,
    replacement: bool = False,
    rows_VW: Tensor | None = None,
) -> Law:
    """One round with drawn siblings. `rows_VW`: the rows that are handed over, where they are not those drawn from."""
    drawn = list(drawn_trees(anchor, q_VW, template, d2t_W, replacement, p_VV.shape[0]))
    tree = tree_of([t for _, t, _ in drawn], [ok for _, _, ok in drawn], template, None)
    tree.q = Proposal(rows_of(tree, anchor, q_VW if rows_VW is None else rows_VW), d2t_W, replacement)
    odds = rule(tree, rows_of(tree, anchor, p_VV))
    law: Law = {}
    for row, (weight, _, _) in enumerate(drawn):
        for tokens, chance in law_of(tree, odds, row).items():
            law[tokens] = law.get(tokens, 0.0) + weight * chance
    return law


def fixed_law(
    rule: Rule, anchor: int, p_VV: Tensor, q_VV: Tensor, template: tuple[tuple[int, ...], ...], repeat: bool = False
) -> Law:
    """One round with the drafter's top tokens as candidates (`repeat`: every sibling is the first one again)."""
    tokens: list[int] = []
    for path in template:
        last = anchor if len(path) == 1 else tokens[template.index(path[:-1])]
        tokens.append(int(q_VV[last].sort(descending=True, stable=True).indices[0 if repeat else path[-1]]))
    tree = tree_of([tokens], [[True] * len(template)], template, None)
    return law_of(tree, rule(tree, rows_of(tree, anchor, p_VV)), 0)


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


@pytest.mark.parametrize(("p_kind", "q_kind"), PAIRS)
@pytest.mark.parametrize("template", [CHAIN, BUSHY, FORK])
@pytest.mark.parametrize("replacement", [False, True])
def test_drawn_siblings_give_the_targets_law(
    p_kind: str, q_kind: str, template: tuple[tuple[int, ...], ...], replacement: bool
) -> None:
    v = 4 if template is CHAIN else 3
    p_VV, q_VV = pair(p_kind, q_kind, v)
    once = lambda a: round_law(rejection_odds, a, p_VV, q_VV, template, replacement=replacement)  # noqa: E731
    assert two_rounds(once, p_VV) < 1e-12


@pytest.mark.parametrize(("p_kind", "q_kind"), PAIRS)
@pytest.mark.parametrize("template", [CHAIN, BUSHY, FORK])
def test_a_draft_vocabulary_keeps_the_targets_law(
    p_kind: str, q_kind: str, template: tuple[tuple[int, ...], ...]
) -> None:
    p_VV, q_VV = pair(p_kind, q_kind, 4)
    d2t_W = torch.tensor([0, 2, 3])
    q_VW = q_VV[:, d2t_W] + 1e-3
    q_VW = q_VW / q_VW.sum(-1, keepdim=True)
    assert two_rounds(lambda a: round_law(rejection_odds, a, p_VV, q_VW, template, d2t_W=d2t_W), p_VV, 3) < 1e-12


@pytest.mark.parametrize(("p_kind", "q_kind"), PAIRS)
@pytest.mark.parametrize("template", [CHAIN, BUSHY, FORK])
@pytest.mark.parametrize("rule", [fixed_odds, rejection_odds])
@pytest.mark.parametrize("repeat", [False, True])
def test_fixed_candidates_give_the_targets_law(
    p_kind: str, q_kind: str, template: tuple[tuple[int, ...], ...], rule: Rule, repeat: bool
) -> None:
    p_VV, q_VV = pair(p_kind, q_kind, 3)
    assert two_rounds(lambda a: fixed_law(rule, a, p_VV, q_VV, template, repeat), p_VV) < 1e-12


def test_rows_that_are_not_drawn_follow_the_rule_for_fixed_candidates() -> None:
    p_VV, q_VV = pair("flat", "peaked", 3)
    tree = tree_of([[0, 1, 2, 0, 1]] * 2, [[True] * 5] * 2, BUSHY, None)
    p_BMV = rows_of(tree, 1, p_VV)
    want = fixed_odds(tree, p_BMV)
    tree.q = Proposal(rows_of(tree, 1, q_VV), None, False, torch.tensor([False, True]))
    got = rejection_odds(tree, p_BMV)
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
    odds = verify.typical_odds(tree, rows_of(tree, 0, p_VV), epsilon=0.09, delta=0.3)
    entropy_0 = -(p_VV[0] * p_VV[0].log()).sum()
    assert float(0.3 * torch.exp(-entropy_0)) > 0.09  # so epsilon is the floor at the anchor
    assert odds.accept_BN.tolist() == [[1, 0, 1, 1, 1]]
    assert not VERIFIERS["typical"].exact
    assert two_rounds(lambda a: fixed_law(VERIFIERS["typical"].probabilities, a, p_VV, p_VV, CHAIN), p_VV) > 0.1


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
    drawn = list(drawn_trees(0, q_VV, ((0,),), None, False, 4))
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


@pytest.mark.parametrize(
    ("name", "drawn", "hot", "lossy", "message"),
    [
        ("no_such", False, True, False, "use auto, greedy"),
        ("greedy", False, True, False, "temperature 0 only"),
        ("ratio", False, True, False, "needs the rows q"),
        ("ratio_tree", False, True, False, "needs the rows q"),
        ("target_only", True, True, False, "fixed candidates"),
        ("typical", False, True, False, "allow_lossy"),
    ],
)
def test_a_rule_that_does_not_fit_is_refused(name: str, drawn: bool, hot: bool, lossy: bool, message: str) -> None:
    tree = tree_of([[0, 0]], [[True] * 2], CHAIN, Proposal(torch.ones(1, 3, 3) / 3, None, False) if drawn else None)
    with pytest.raises(ValueError, match=message):
        verify.resolve(name, tree, hot, lossy)


def test_the_readme_lists_every_rule_and_its_promise() -> None:
    """inference/README.md, section "Acceptance rules", is the table VERIFIERS in words."""
    text = Path(verify.__file__).with_name("README.md").read_text()
    lines = [x for x in text.splitlines() if x.startswith("| `")]
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
