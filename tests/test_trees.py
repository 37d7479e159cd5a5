"""Tree builders: CASES B38, templates, EAGLE-2's selection against a slow reference, and what a drafter is asked."""

from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor

from draftsmith.inference.speculate import DecodeConfig, generate
from draftsmith.inference.trees import TREES, Draft, Plan, check_choices, default_choices
from draftsmith.losses.probs import History, ParamRows, SamplingParams
from draftsmith.models.drafter import Commit
from draftsmith.models.tree import Tree

V = 6
T_VVV = torch.randn(V, V, V, generator=torch.Generator().manual_seed(0), dtype=torch.float64) * 2
Q_VVV = T_VVV * 0.6 + torch.randn(V, V, V, generator=torch.Generator().manual_seed(1), dtype=torch.float64)


def q_rule(before: Tensor, last: Tensor, depth: int) -> Tensor:
    return Q_VVV[before.clamp(min=0), last]


def build(drafter: Any, plan: Plan, temperature: float = 0.0, rows: int = 2, seed: int = 0) -> Tree:
    """The builder alone, from an anchor."""
    ids_BT = torch.arange(rows)[:, None] % V
    commit = Commit(ids_BT, torch.ones(rows, dtype=torch.int64), ids_BT * 0, (ids_BT[:, 0] + 1) % V)
    state, level = drafter.start(None, commit)
    draft = Draft(
        ParamRows.pack([SamplingParams(temperature=temperature)] * rows),
        lambda depths, tokens, see: History(V),
        temperature > 0,
        torch.arange(rows) + seed,
        torch.zeros(rows, dtype=torch.int64),
    )
    return TREES[plan.tree].build(drafter, state, level, draft, plan)[1]


def check(tree: Tree, nodes: int, depth: int) -> None:
    """What every valid tree satisfies."""
    b, n = tree.tokens_BN.shape
    assert n <= nodes and int(tree.depths_BN.max()) <= depth
    see_BMM = tree.visible()
    for row in range(b):
        up = [0, *tree.parents_BN[row].tolist()]
        for i in range(n + 1):
            line = {i, 0}
            at = i
            while at:
                assert up[at] < at, "a parent comes before its children"
                at = up[at]
                line.add(at)
            if i and bool(tree.valid_BN[row, i - 1]):
                assert int(tree.depths_BN[row, i - 1]) == len(line) - 1
                assert {j for j in range(n + 1) if see_BMM[row, i, j]} == line
                assert up[i] == 0 or bool(tree.valid_BN[row, up[i] - 1]), "every ancestor is there"
        pairs = [(up[j + 1], int(tree.tokens_BN[row, j])) for j in range(n) if tree.valid_BN[row, j]]
        assert len(set(pairs)) == len(pairs), "siblings are distinct"
    words_BMX = tree.ancestors()
    bits = [[[int(w) >> k & 1 for w in words for k in range(64)][: n + 1] for words in row] for row in words_BMX]
    assert torch.equal(torch.tensor(bits, dtype=torch.bool), see_BMM)


# CASES B38


@pytest.mark.parametrize(
    ("decode", "nodes", "depth"),
    [
        (DecodeConfig(tree="static", choices=((0,), (1,), (2,))), 3, 1),
        (DecodeConfig(tree="chain", k=5), 5, 5),
        (DecodeConfig(tree="dynamic", k=1, width=2, nodes=60), 2, 1),
        (DecodeConfig(tree="static", k=1, width=2, nodes=60), 2, 1),
        (DecodeConfig(tree="dynamic", k=3, width=50, nodes=70), 70, 3),
        (DecodeConfig(tree="dynamic", k=2, width=2, nodes=100), 6, 2),
        (DecodeConfig(tree="dynamic", k=4, width=3, nodes=2), 2, 4),
        (DecodeConfig(tree="static", k=3, width=9, nodes=40), 40, 3),
    ],
)
@pytest.mark.parametrize("parallel", [1, 3])
def test_b38_every_wish_gives_a_valid_tree_and_greedy_output(
    scripted: Any, decode: DecodeConfig, nodes: int, depth: int, parallel: int
) -> None:
    drafter = scripted.Drafter(q_rule, parallel=parallel)
    limit = parallel if parallel > 1 else None
    plan = Plan.make(decode.tree, decode.k, decode.width, decode.nodes, decode.choices, limit, V)
    assert plan.nodes <= nodes and plan.depth <= depth and plan.width <= V
    check(build(drafter, plan), nodes, depth)
    target = scripted.Target(lambda before, last, at: T_VVV[before.clamp(min=0), last], V)
    prompts = [[1, 2], [3], [0, 0, 5]]
    params = SamplingParams(max_new_tokens=20)
    plain = [r.ids for r in generate(target, prompts, params)]
    assert [r.ids for r in generate(target, prompts, params, drafter, decode)] == plain


@pytest.mark.parametrize(
    ("choices", "message"),
    [
        ([], "at least one path"),
        ([[0], [0]], r"entry \[0\] stands 2 times"),
        ([[0], [1, 0]], r"entry \[1, 0\] has no parent \[1\]"),
        ([[0], [2]], r"entry \[2\] has no preceding sibling \[1\]"),
        ([[0], [-1]], r"entry \[-1\] must be"),
        ([[0], []], "must be a non-empty path"),
    ],
)
def test_b38_a_template_that_is_no_tree_is_refused_by_entry(choices: list[list[int]], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        check_choices(choices)
    with pytest.raises(ValueError, match=message):
        DecodeConfig(tree="static", choices=tuple(map(tuple, choices)))


@pytest.mark.parametrize("name", ["k", "nodes", "width", "max_rows", "fixed_width"])
def test_b38_sizes_below_one_are_refused_by_name(name: str) -> None:
    with pytest.raises(ValueError, match=f"{name}=0"):
        DecodeConfig(**{name: 0})


def test_templates_are_cut_to_the_heads_and_tokens_that_exist() -> None:
    wide = ((0,), (1,), (2,), (0, 0), (0, 1), (0, 0, 0))
    assert Plan.make("static", 4, 4, 24, wide, 2, V).choices == ((0,), (1,), (2,), (0, 0), (0, 1))
    assert Plan.make("static", 4, 4, 24, wide, None, 2).choices == ((0,), (1,), (0, 0), (0, 1), (0, 0, 0))
    assert Plan.make("chain", 9, 4, 24, None, 3, V).depth == 3


def test_the_default_template_is_a_tree_that_grows_best_first() -> None:
    for depth, width, nodes in product((1, 2, 4), (1, 3, 10), (1, 5, 24)):
        choices = default_choices(depth, width, nodes)
        assert check_choices(choices) == choices
        assert len(choices) == min(nodes, sum(width**d for d in range(1, depth + 1)))
        assert max(map(len, choices)) <= depth and max(map(max, choices)) < width
    for fewer, more in zip(range(1, 23), range(2, 24), strict=True):
        assert set(default_choices(4, 4, fewer)) < set(default_choices(4, 4, more))


def slow_eagle2(row_after: Any, depth: int, width: int, nodes: int) -> set[tuple[int, ...]]:
    """EAGLE-2 by its description, on paths: `row_after(path)` -> log-probabilities."""
    scores: dict[tuple[int, ...], float] = {}
    beam: list[tuple[int, ...]] = [()]
    for _ in range(depth):
        layer: dict[tuple[int, ...], float] = {}
        for path in beam:
            row = row_after(path)
            for x in sorted(range(len(row)), key=lambda i: -row[i])[:width]:
                layer[(*path, x)] = scores.get(path, 0.0) + row[x]
        scores |= layer
        beam = sorted(layer, key=lambda p: -layer[p])[:width]
    return set(sorted(scores, key=lambda p: -scores[p])[:nodes])


@pytest.mark.parametrize(("depth", "width", "nodes"), [(1, 3, 9), (2, 2, 5), (4, 3, 10), (5, 4, 30)])
@pytest.mark.parametrize("parallel", [1, 5])
def test_dynamic_trees_are_those_of_eagle2(scripted: Any, depth: int, width: int, nodes: int, parallel: int) -> None:
    drafter = scripted.Drafter(lambda b, t, d: q_rule(b, t, d) * (1 + d * (parallel > 1)), parallel=parallel)
    plan = Plan.make("dynamic", depth, width, nodes, None, None if parallel == 1 else parallel, V)
    tree = build(drafter, plan, rows=3)
    check(tree, nodes, depth)
    for row in range(3):
        start = (row, (row + 1) % V)

        def row_after(path: tuple[int, ...], start: tuple[int, int] = start) -> list[float]:
            line = (*start, *path)
            logits = Q_VVV[line[-2], line[-1]] if parallel == 1 else Q_VVV[start] * (len(path) + 2)
            return torch.log_softmax(logits, -1).tolist()

        got, log_probs = set(), {}
        for j in range(tree.tokens_BN.shape[1]):
            path, at = [], j + 1
            while at:
                path.append(int(tree.tokens_BN[row, at - 1]))
                at = int(tree.parents_BN[row, at - 1])
            got.add(tuple(reversed(path)))
            log_probs[tuple(reversed(path))] = float(tree.log_probs_BN[row, j])
        assert got == slow_eagle2(row_after, depth, width, nodes)
        for path in got:
            assert log_probs[path] == pytest.approx(row_after(path[:-1])[path[-1]], abs=1e-5)


def test_a_certain_drafter_ties_and_stays_connected(scripted: Any) -> None:
    """Log-probability 0 along a path ties a parent with its child: the parent must win."""
    sure = scripted.Drafter(lambda b, t, d: torch.nn.functional.one_hot((t + 1) % V, V) * 1e4)
    for nodes in (1, 2, 3, 4):
        tree = build(sure, Plan.make("dynamic", 4, 2, nodes, None, None, V))
        check(tree, nodes, 4)
        assert tree.valid_BN[:, : min(nodes, 4)].any(1).all()


def test_static_trees_hold_each_parents_best_tokens(scripted: Any) -> None:
    choices = ((0,), (1,), (0, 0), (0, 1), (1, 0), (0, 1, 0))
    drafter = scripted.Drafter(q_rule)
    tree = build(drafter, Plan.make("static", 3, 9, 9, choices, None, V))
    check(tree, 6, 3)
    assert drafter.extended == [(2, 2), (2, 1)]  # only nodes that get children, layer by layer
    for row in range(2):
        tokens = tree.tokens_BN[row].tolist()
        line = [row, (row + 1) % V]
        ranked = lambda a, b: Q_VVV[a, b].sort(descending=True).indices.tolist()  # noqa: E731
        assert tokens[:2] == ranked(*line)[:2]
        assert tokens[2:4] == ranked(line[1], tokens[0])[:2] and tokens[4] == ranked(line[1], tokens[1])[0]
        assert tokens[5] == ranked(tokens[0], tokens[3])[0]


@pytest.mark.parametrize("name", ["chain", "static"])
def test_drawn_siblings_are_distinct_and_carry_their_rows(scripted: Any, name: str) -> None:
    drafter = scripted.Drafter(q_rule)
    plan = Plan.make(name, 3, 3, 12, None, None, V)
    seen = set()
    for seed in range(0, 40, 2):
        tree = build(drafter, plan, temperature=1.0, seed=seed)
        check(tree, 12, 3)
        assert tree.q is not None and not tree.q.replacement
        for row in range(2):
            line = {0: (row, (row + 1) % V)}
            for j in range(tree.tokens_BN.shape[1]):
                parent = int(tree.parents_BN[row, j])
                want_V = torch.softmax(Q_VVV[line[parent]], -1)
                assert torch.allclose(tree.q.rows_BMW[row, parent], want_V, atol=1e-12)
                line[j + 1] = (line[parent][1], int(tree.tokens_BN[row, j]))
        seen.add(tuple(tree.tokens_BN[0].tolist()))
    assert len(seen) > 5


def test_nothing_is_left_to_draw_makes_no_node(scripted: Any) -> None:
    """Two tokens have all the mass, the template wants three."""
    narrow = scripted.Drafter(lambda b, t, d: torch.tensor([0.0, 1.0] + [-1e30] * 4).double().expand(*t.shape, V))
    tree = build(narrow, Plan.make("static", 1, 3, 3, None, None, V), temperature=1.0)
    assert tree.valid_BN.tolist() == [[True, True, False]] * 2
    check(tree, 3, 1)


def test_a_row_with_nothing_to_say_gets_no_nodes(scripted: Any) -> None:
    drafter = scripted.Drafter(q_rule, silent=(0,))
    for name in TREES:
        tree = build(drafter, Plan.make(name, 3, 2, 6, None, None, V))
        assert not tree.valid_BN[0].any() and tree.valid_BN[1].any(), name


def test_broken_logits_are_refused(scripted: Any) -> None:
    broken = scripted.Drafter(lambda b, t, d: torch.full((*t.shape, V), float("nan")))
    for name in TREES:
        with pytest.raises(ValueError, match="NaN"):
            build(broken, Plan.make(name, 2, 2, 4, None, None, V))


def test_unknown_shapes_are_refused() -> None:
    with pytest.raises(ValueError, match="chain, static, dynamic"):
        DecodeConfig(tree="bush")
    assert set(TREES) == {"chain", "static", "dynamic"} and all(b.on_device for b in TREES.values())


def test_wide_trees_use_several_mask_words() -> None:
    n = 130
    steps = torch.arange(n)[None]
    chain = Tree(steps, steps, steps + 1, torch.zeros(1, n), torch.ones(1, n, dtype=torch.bool))
    check(chain, n, n)
    assert chain.ancestors().shape == (1, n + 1, 3) and chain.is_chain()
