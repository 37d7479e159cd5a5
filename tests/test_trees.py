"""Tree builders: CASES B38, templates, selections against slow references and against all trees there are, what a drafter
is asked, prompt rows and what they see."""

import re
from collections.abc import Callable, Iterator
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from draftsmith.inference.marginals import TYPICAL, StateTree, fan_out_caps, split_rows, state_trees
from draftsmith.inference.speculate import DecodeConfig, generate
from draftsmith.inference.trees import TREES, Draft, Plan, check_choices, default_choices, with_prompts
from draftsmith.losses.probs import History, ParamRows, SamplingParams
from draftsmith.models.drafter import Commit, ExtraOut, Level
from draftsmith.models.tree import Extra, Prompts, Tree, hang

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
        (DecodeConfig(tree="cut", k=5, threshold=0.4), 5, 5),
        (DecodeConfig(tree="cape", k=5, width=9, nodes=12), 12, 5),
        (DecodeConfig(tree="cape", k=5, width=1, nodes=2), 2, 2),
        (DecodeConfig(tree="opt", k=4, nodes=30, threshold=0.0), 30, 4),
        (DecodeConfig(tree="opt", k=4, nodes=3), 3, 4),
        (DecodeConfig(tree="best_first", k=1, nodes=50), V, 1),
        (DecodeConfig(tree="best_first", k=9, nodes=31), 31, 9),
        (DecodeConfig(tree="capped", k=3, width=2, nodes=50), 14, 3),
        (DecodeConfig(tree="capped", k=3, width=50, nodes=5), 5, 3),
        (DecodeConfig(tree="ppd", k=3, width=3, nodes=20), 20, 3),
    ],
)
def test_b38_every_wish_gives_a_valid_tree_and_greedy_output(
    scripted: Any, decode: DecodeConfig, nodes: int, depth: int
) -> None:
    target = scripted.Target(lambda before, last, at: T_VVV[before.clamp(min=0), last], V)
    prompts = [[1, 2], [3], [0, 0, 5]]
    params = SamplingParams(max_new_tokens=20)
    plain = [r.ids for r in generate(target, prompts, params)]
    for parallel in (3,) if TREES[decode.tree].at_once else (1, 3):
        drafter = scripted.Drafter(q_rule, parallel=parallel)
        limit = parallel if parallel > 1 else None
        plan = Plan.make(decode.tree, decode.k, decode.width, decode.nodes, decode.choices, limit, V)
        assert plan.nodes <= nodes and plan.depth <= depth and plan.width <= V
        check(build(drafter, plan), nodes, depth)
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
    for name in TREES:
        drafter = scripted.Drafter(q_rule, silent=(0,), parallel=3 if TREES[name].at_once else 1)
        tree = build(drafter, Plan.make(name, 3, 2, 6, None, None, V, 0.0))
        assert not tree.valid_BN[0].any() and tree.valid_BN[1].any(), name


def test_broken_logits_are_refused(scripted: Any) -> None:
    for name in TREES:
        parallel = 2 if TREES[name].at_once else 1
        broken = scripted.Drafter(lambda b, t, d: torch.full((*t.shape, V), float("nan")), parallel=parallel)
        with pytest.raises(ValueError, match="NaN"):
            build(broken, Plan.make(name, 2, 2, 4, None, None, V))


def test_unknown_shapes_are_refused() -> None:
    with pytest.raises(ValueError, match="chain, cut, cape, static, dynamic, opt, best_first, capped, ppd"):
        DecodeConfig(tree="bush")
    assert {name for name, builder in TREES.items() if not builder.on_device} == {"best_first", "capped"}
    assert {name for name, builder in TREES.items() if builder.draws} == {"chain", "cut", "static"}


def test_the_readme_lists_every_tree() -> None:
    text = (Path(__file__).parents[1] / "inference/README.md").read_text(encoding="utf-8")
    listed = re.findall(r"^\| `(\w+)` \|.*\| (any|all)[^|]* \| (drawn|fixed) \|$", text, re.MULTILINE)
    assert listed == [
        (name, "all" if builder.at_once else "any", "drawn" if builder.draws else "fixed")
        for name, builder in TREES.items()
    ]


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"tree": "chain", "threshold": 0.5}, "threshold is for the trees cut, opt"),
        ({"tree": "cut", "threshold": 1.5}, r"threshold=1.5, must lie in \[0, 1\]"),
        ({"tree": "opt", "chances": ((0.5,),)}, "chances are for tree='ppd'"),
        ({"tree": "ppd", "chances": ((0.5, 0.6),)}, "sum to 1 at most"),
        ({"tree": "ppd", "chances": ()}, "sum to 1 at most"),
        ({"prompt_rows": 0}, "prompt_rows=0"),
        ({"tree": "best_first", "fixed_width": 9}, "fixed_width is for chains"),
    ],
)
def test_settings_that_cannot_be_meant_are_refused(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        DecodeConfig(**settings)


def test_a_drafter_that_is_asked_level_by_level_has_no_marginals(scripted: Any) -> None:
    target = scripted.Target(lambda before, last, at: T_VVV[before.clamp(min=0), last], V)
    for name in ("best_first", "capped", "ppd"):
        with pytest.raises(ValueError, match=r"use one of chain, cut, cape, static, dynamic, opt$"):
            generate(target, [[1]], SamplingParams(), scripted.Drafter(q_rule), DecodeConfig(tree=name))
        params = SamplingParams(max_new_tokens=5)
        generate(target, [[1]], params, scripted.Drafter(q_rule, max_depth=1), DecodeConfig(tree=name))


# Chains that end early or widen


def test_a_cut_chain_ends_before_the_first_doubt(scripted: Any) -> None:
    """Its confidence at each depth is known; rows end at different depths, and nobody is asked for what no row wants."""

    def rule(before: Tensor, last: Tensor, depth: int) -> Tensor:
        sure = torch.where(last % 2 == 0, 6.0, 0.5).double()  # even tokens: 0.98 of the next one, odd ones: 0.25
        return torch.nn.functional.one_hot((last + 3) % V, V) * sure[..., None]

    for drafter in (scripted.Drafter(rule), scripted.Drafter(rule, parallel=4)):
        tree = build(drafter, Plan.make("cut", 4, 9, 9, None, None, V, 0.5), rows=4)  # anchors 1, 2, 3, 4
        check(tree, 4, 4)
        want = [0, 1, 0, 1] if drafter.parallel == 1 else [0, 4, 0, 4]
        assert tree.valid_BN.sum(1).tolist() == want and tree.is_chain()
    alone = scripted.Drafter(rule)
    build(alone, Plan.make("cut", 4, 9, 9, None, None, V, 0.5), rows=1)
    assert alone.extended == []
    tree = build(scripted.Drafter(rule), Plan.make("cut", 4, 9, 9, None, None, V, 0.0), rows=4)
    assert tree.valid_BN.all()


def test_a_drafters_own_confidence_cuts(scripted: Any) -> None:
    class Sure(scripted.Drafter):  # type: ignore[misc]
        def _level(self, logits_BNW: Tensor) -> Level:
            level = super()._level(logits_BNW)
            level.confidence_BN = torch.linspace(0.9, 0.3, level.valid_BN.shape[1]).expand(level.valid_BN.shape)
            return level

    drafter = Sure(q_rule, parallel=4)  # 0.9, 0.7, 0.5, 0.3
    for threshold, length in ((0.95, 0), (0.6, 2), (0.45, 3), (0.1, 4)):
        tree = build(drafter, Plan.make("cut", 4, 1, 4, None, 4, V, threshold), temperature=1.0)
        assert tree.valid_BN.sum(1).tolist() == [length] * 2 and tree.q is not None


def test_where_a_chain_is_cut_no_coin_of_its_own_decides(scripted: Any) -> None:
    """Given the tokens before, a position is there or not, whatever is drawn for it."""
    drafter = scripted.Drafter(q_rule)
    plan = Plan.make("cut", 3, 1, 3, None, None, V, 0.4)
    there: dict[tuple[int, ...], set[bool]] = {}
    for seed in range(0, 400, 2):
        tree = build(drafter, plan, temperature=1.5, seed=seed)
        for row, valid in enumerate(tree.valid_BN.tolist()):
            line = [row, (row + 1) % V, *tree.tokens_BN[row].tolist()]
            for d in range(3):
                if all(valid[:d]):
                    there.setdefault(tuple(line[: d + 2]), set()).add(valid[d])
                    assert valid[d] == (float(torch.softmax(Q_VVV[line[d], line[d + 1]], -1).max()) >= 0.4)
    assert all(len(seen) == 1 for seen in there.values())
    assert {True, False} == set().union(*there.values()) and len(there) > 10


@pytest.mark.parametrize("parallel", [1, 3])
def test_cape_widens_where_the_drafter_doubts(scripted: Any, parallel: int) -> None:
    """Top probabilities 0.95, 0.75, 0.35: 1, 3 and 5 siblings beside the chain."""

    def rule(before: Tensor, last: Tensor, depth: int) -> Tensor:
        top = {0: 0.95, 2: 0.75, 4: 0.35}
        p = torch.tensor([top[int(x) % 6] for x in last.flatten()], dtype=torch.float64).view(last.shape)
        rest = torch.arange(V, 0, -1).double()
        row = rest.expand(*last.shape, V).clone()
        row.scatter_(-1, ((last + 2) % V)[..., None], 0.0)
        row = row / row.sum(-1, keepdim=True) * (1 - p[..., None])
        return row.scatter(-1, ((last + 2) % V)[..., None], p[..., None]).log()

    def depths(before: Tensor, last: Tensor, depth: int) -> Tensor:
        return rule(before, (last + 2 * (depth - 1)) % V, depth)

    class Even(scripted.Drafter):  # type: ignore[misc]
        def start(self, state: Any, commit: Commit) -> tuple[Any, Level]:
            commit.anchor_B.zero_()
            return super().start(state, commit)

    drafter = Even(rule if parallel == 1 else depths, parallel=parallel)
    for width, nodes, siblings in ((6, 99, [1, 3, 5]), (3, 99, [1, 2, 2]), (6, 7, None), (6, 3, [0, 0, 0])):
        tree = build(drafter, Plan.make("cape", 3, width, nodes, None, None, V))
        check(tree, nodes, 3)
        valid_N, depths_N, parents_N = tree.valid_BN[0], tree.depths_BN[0], tree.parents_BN[0]
        assert parents_N[:3].tolist() == [0, 1, 2] and valid_N[:3].all()
        assert all(int(parents_N[j]) == int(depths_N[j]) - 1 for j in range(len(valid_N)))
        if siblings is not None:
            assert [int((valid_N & (depths_N == d)).sum()) - 1 for d in (1, 2, 3)] == siblings
        else:  # 4 spare nodes, for the likeliest of the 9 wanted
            assert int(valid_N.sum()) == 7
            paths = paths_of(tree, 0)
            assert len(paths) == 7
    assert tree.q is None


# Best trees, against all trees


def paths_of(tree: Tree, row: int) -> dict[tuple[int, ...], float]:
    """Token path -> the drafter's log-probability of its last token, of every valid node."""
    found = {}
    for j in range(tree.tokens_BN.shape[1]):
        if tree.valid_BN[row, j]:
            path, at = [], j + 1
            while at:
                path.append(int(tree.tokens_BN[row, at - 1]))
                at = int(tree.parents_BN[row, at - 1])
            found[tuple(reversed(path))] = float(tree.log_probs_BN[row, j])
    return found


Row = Callable[[tuple[int, ...]], list[float]]


def mass(tree: Tree, row: int, chance: Row) -> float:
    """Expected accepted tokens, if `chance(path)` are the probabilities after a path."""
    paths = paths_of(tree, row)
    return sum(prod_of(path, chance) for path in paths)


def prod_of(path: tuple[int, ...], chance: Row) -> float:
    out = 1.0
    for d, x in enumerate(path):
        out *= chance(path[:d])[x]
    return out


def all_trees(v: int, depth: int, nodes: int) -> set[frozenset[tuple[int, ...]]]:
    """Every set of `nodes` paths that holds, with a path, the path to its parent."""
    found: set[frozenset[tuple[int, ...]]] = {frozenset()}
    for _ in range(nodes):
        grown = set()
        for tree in found:
            inner = [(), *(path for path in tree if len(path) < depth)]
            grown |= {tree | {(*path, x)} for path in inner for x in range(v) if (*path, x) not in tree}
        found = grown
    return found


def small_drafter(scripted: Any, seed: int, parallel: int, pairs: bool = False) -> tuple[Any, Row]:
    """Three tokens, random rows; and the chances that it gives after each path, from anchor 1."""
    random = torch.Generator().manual_seed(seed)
    rows = torch.randn(3, 3, generator=random, dtype=torch.float64) * 1.5  # by depth if at once, by last token if not
    table = torch.randn(2, 3, 3, generator=random, dtype=torch.float64) * 1.5

    class Pairs(scripted.Drafter):  # type: ignore[misc]
        def pair_scores(self, state: Any, ids_BKC: Tensor, log_BKC: Tensor) -> Tensor:
            assert log_BKC.shape == ids_BKC.shape
            scores = torch.log_softmax(table, -1)
            return torch.stack([
                torch.stack([scores[d][ids[d]][:, ids[d + 1]] for d in range(2)]) for ids in ids_BKC
            ])  # fmt: skip

    def rule(before: Tensor, last: Tensor, depth: int) -> Tensor:
        return rows[last] if parallel == 1 else rows[depth - 1].expand(*last.shape, 3)

    def chance(path: tuple[int, ...]) -> list[float]:
        if parallel == 1:
            return torch.softmax(rows[path[-1] if path else 1], -1).tolist()
        if pairs and path:
            return torch.softmax(table[len(path) - 1, path[-1]], -1).tolist()
        return torch.softmax(rows[len(path)], -1).tolist()

    return (Pairs if pairs else scripted.Drafter)(rule, parallel=parallel), chance


@pytest.mark.parametrize("kind", ["best_first", "pairs", "opt at once", "opt by layers"])
def test_no_tree_of_this_size_is_better(scripted: Any, kind: str) -> None:
    every = {n: all_trees(3, 3, n) for n in range(1, 6)}
    assert [len(every[n]) for n in range(1, 4)] == [3, 12, 55]
    # Pairs are scored among the candidates: three, all there are, only from three nodes on.
    for seed, nodes in product(range(6), range(3 if kind == "pairs" else 1, 6)):
        drafter, chance = small_drafter(scripted, seed, 1 if kind == "opt by layers" else 3, kind == "pairs")
        name = "opt" if kind.startswith("opt") else "best_first"
        tree = build(drafter, Plan.make(name, 3, 1, nodes, None, 3, 3, 0.0 if name == "opt" else None), rows=1)
        check(tree, nodes, 3)
        assert tree.valid_BN.all() and tree.q is None
        best = max(sum(prod_of(path, chance) for path in paths) for paths in every[nodes])
        assert mass(tree, 0, chance) == pytest.approx(best, rel=1e-6)
        for path, log_prob in paths_of(tree, 0).items():
            assert log_prob == pytest.approx(float(torch.tensor(chance(path[:-1])[path[-1]]).log()), abs=1e-5)


def test_opt_asks_no_deeper_than_pays(scripted: Any) -> None:
    """0.92 of one token at each depth: layers add 1.0 (all six tokens), 0.85, 0.75, 0.69, 0.6; a flat drafter ends at
    once; rows end alone."""
    sure = scripted.Drafter(lambda b, t, d: torch.nn.functional.one_hot((t + 1) % V, V) * 4.0)
    asked = []
    for threshold in (0.0, 0.7, 0.8, 0.99):
        sure.extended.clear()
        check(build(sure, Plan.make("opt", 6, 1, 8, None, None, V, threshold), rows=1), 8, 6)
        asked.append(len(sure.extended))
    assert asked == [5, 3, 2, 1]
    flat = scripted.Drafter(lambda b, t, d: torch.zeros(*t.shape, V).double())
    tree = build(flat, Plan.make("opt", 6, 1, 3, None, None, V, 0.6), rows=2)  # 3 of 6 equals: a mass of 0.5
    assert flat.extended == [] and tree.valid_BN.all() and tree.depths_BN.max() == 1
    mixed = scripted.Drafter(lambda b, t, d: torch.nn.functional.one_hot((t + 2) % V, V) * (t % 2 * 5.0)[..., None])
    tree = build(mixed, Plan.make("opt", 4, 1, 3, None, None, V, 0.6), rows=2)  # anchors 1 (sure on) and 2 (flat)
    assert tree.depths_BN[tree.valid_BN].view(2, 3).max(1).values.tolist() == [3, 1]


def test_capped_trees_expand_the_best_node_up_to_the_cap(scripted: Any) -> None:
    caps = fan_out_caps(
        torch.tensor([[[-1.0, -1.0] + [-9.0] * 5, [-0.5, -3.5] + [-9.0] * 5, [0.0] + [-torch.inf] * 6]])
    )
    assert caps.tolist() == [[5, 1, 1]]  # round(7 sigmoid(1)) = round(5.1), round(7 sigmoid(-2)) = round(0.8) -> 1
    for seed, width, nodes in product(range(5), (2, 3), (1, 4, 9, 20)):
        random = torch.Generator().manual_seed(seed)
        rows = torch.randn(4, V, generator=random, dtype=torch.float64)
        drafter = scripted.Drafter(lambda b, t, d, r=rows: r[d - 1].expand(*t.shape, V), parallel=4)
        tree = build(drafter, Plan.make("capped", 4, width, nodes, None, 4, V), rows=1)
        check(tree, nodes, 4)
        log_KC = torch.log_softmax(rows, -1).sort(descending=True)
        gap_K = log_KC.values[:, 0] - log_KC.values[:, 1]
        cap = [max(1, round(width * float(torch.sigmoid(1 - gap)))) for gap in gap_K]
        score: dict[tuple[int, ...], float] = {}
        waiting: dict[tuple[int, ...], float] = {(): 0.0}
        while waiting and len(score) < nodes:
            path = max(waiting, key=lambda p: waiting[p])
            above, d = waiting.pop(path), len(path)
            for i in range(cap[d] if d < 4 else 0):
                child = (*path, int(log_KC.indices[d, i]))
                if len(score) < nodes:
                    score[child] = waiting[child] = above + float(log_KC.values[d, i])
        assert set(paths_of(tree, 0)) == set(score)


def test_broken_pair_scores_are_refused(scripted: Any) -> None:
    drafter = scripted.Drafter(q_rule, parallel=3)
    drafter.pair_scores = lambda state, ids, log: torch.full((2, 2, 4, 4), float("nan"))
    with pytest.raises(ValueError, match="pair scores hold NaN"):
        build(drafter, Plan.make("best_first", 3, 9, 4, None, 3, V))


def test_a_slot_head_is_asked_where_levels_depend_on_tokens(scripted: Any) -> None:
    """parallel = 3 and sequential: chains and layers take depth 2 and 3 from `extend`, marginal trees from `start`."""
    drafter = scripted.Drafter(q_rule, parallel=3)
    drafter.sequential = True
    alone = scripted.Drafter(q_rule)
    for name, builder in TREES.items():
        drafter.extended.clear()
        plan = Plan.make(name, 3, 2, 7, None, 3, V, 0.0 if builder.threshold is not None else None)
        tree = build(drafter, plan)
        assert bool(drafter.extended) != builder.at_once, name
        if not builder.at_once:
            want = build(alone, plan)
            assert torch.equal(tree.tokens_BN, want.tokens_BN) and torch.equal(tree.valid_BN, want.valid_BN), name


# Trees by state, and prompt rows


def long_run(trees: tuple[StateTree, ...], allotted: Any, chances: Any) -> float:
    """Tokens per verification from state 0 on, by the stationary distribution of the (lazy) chain of states."""
    n = len(trees)
    move, reward = torch.eye(n, dtype=torch.float64), torch.zeros(n, dtype=torch.float64)
    for s, (tree, counts) in enumerate(zip(trees, allotted, strict=True)):
        reach: dict[tuple[int, ...], float] = {(): 1.0}
        for path in tree.paths:
            reach[path] = reach[path[:-1]] * chances[len(path) - 1][path[-1]]
        reward[s] = sum(reach.values())
        for path, count in zip(((), *tree.paths), counts, strict=True):
            move[s, count] += reach[path] - sum(reach[p] for p in tree.paths if p[:-1] == path)
    move = move / 2
    for _ in range(16):
        move = move @ move
    return float(move[0] @ reward)


def test_state_trees_allot_prompt_tokens_as_well_as_can_be() -> None:
    for seed in range(8):
        random = torch.Generator().manual_seed(seed)
        base = torch.rand(2, 2, generator=random, dtype=torch.float64).sort(1, descending=True).values * 0.5
        base[1] *= 0.7  # deeper depths are harder
        chances = tuple(tuple(row) for row in base.tolist())
        for nodes, tokens in ((1, 1), (2, 2), (3, 3)):
            trees, gain = state_trees(chances, 2, 2, nodes, 2, tokens)
            assert [len(tree.paths) for tree in trees] == [0, min(nodes, 2), nodes]
            assert all(sum(tree.tokens) <= tokens and max(tree.tokens) <= 2 for tree in trees)
            assert gain == pytest.approx(long_run(trees, [tree.tokens for tree in trees], chances), abs=1e-4)
            every = [[c for c in product(range(3), repeat=len(t.tokens)) if sum(c) <= tokens] for t in trees]
            assert gain > max(long_run(trees, allotted, chances) for allotted in product(*every)) - 1e-4, (seed, nodes)


def test_rows_are_split_between_nodes_and_prompt_tokens() -> None:
    for rows, members in ((9, 1), (24, 1), (24, 2)):
        nodes, tokens = split_rows((TYPICAL,), 3, 4, rows, 3, members)
        assert nodes >= 1 and tokens >= 1 and nodes + tokens * members <= rows
        gain = state_trees((TYPICAL,), 3, 4, nodes, 3, tokens)[1]
        for other in range(rows + 1):
            assert gain >= state_trees((TYPICAL,), 3, 4, other, 3, (rows - other) // members)[1]


def test_ppd_takes_the_tree_of_the_levels_that_are_there(scripted: Any) -> None:
    class States(scripted.Drafter):  # type: ignore[misc]
        def _level(self, logits_BNW: Tensor) -> Level:
            level = super()._level(logits_BNW)
            level.valid_BN = torch.arange(3) < torch.arange(4)[:, None]  # row b has b levels
            return level

    plan = Plan.make("ppd", 3, 3, 30, None, 3, V).with_prompts(Prompts(3, 2), None, 100, None)
    assert plan.nodes + plan.extra <= 30
    trees, _ = state_trees((TYPICAL,), 3, 3, plan.nodes, 3, plan.tokens)
    tree = build(States(q_rule, parallel=3), plan, rows=4)
    check(tree, plan.nodes, 3)
    assert tree.extra is not None and tree.extra.ids_BE.shape == (4, plan.extra)
    for row in range(4):
        ranked = [Q_VVV[row, (row + 1) % V].sort(descending=True).indices.tolist()] * 3
        want = {tuple(ranked[d][r] for d, r in enumerate(path)) for path in trees[row].paths}
        assert set(paths_of(tree, row)) == want
        hung = tree.extra.place(tree.visible())[1][row][tree.extra.valid_BE[row]].tolist()
        assert [hung.count(m) for m in range(len(trees[row].tokens))] == [2 * count for count in trees[row].tokens]


def hung_tree() -> Tree:
    """Anchor -> 1, 2; 1 -> 3, 4 (unused); 3 -> 5."""
    parents = torch.tensor([[0, 0, 1, 1, 3]])
    valid = torch.tensor([[True, True, True, False, True]])
    logs = torch.tensor([[0.6, 0.3, 0.9, 0.05, 0.2]]).log()
    return Tree(parents, parents, torch.tensor([[1, 1, 2, 2, 3]]), logs, valid)


def parent_chain(tree: Tree, extra: Extra, e: int) -> Iterator[int]:
    """Of an extra row: itself and what lies above, one by one."""
    m = tree.tokens_BN.shape[1] + 1
    at = m + e
    while True:
        yield at
        if at == 0:
            return
        at = int(extra.parents_BE[0, at - m]) if at >= m else int(tree.parents_BN[0, at - 1])


@pytest.mark.parametrize("members", [1, 2])
def test_prompt_rows_see_their_own_line_and_nothing_else(members: int) -> None:
    tree, prompts = hung_tree(), Prompts(3, members)
    counts_BM = torch.tensor([[3, 1, 0, 2, 0, 3]])
    extra = hang(tree, counts_BM, prompts, 12, 100)
    m, e = 6, 12 * members
    assert extra.ids_BE.shape == (1, e) and int(extra.valid_BE.sum()) == 9 * members
    see_BEX, hung_BE = extra.place(tree.visible())
    want, where = [], []
    for node, count in enumerate(counts_BM[0].tolist()):
        for token, member in product(range(count), range(members)):
            want.append((100 + token * members + member, [0, 1, 1, 2, 2, 3][node] + 1 + token))
            where.append(node)
    assert list(zip(extra.ids_BE[0].tolist(), extra.depths_BE[0].tolist(), strict=True))[: len(want)] == want
    assert hung_BE[0, : len(where)].tolist() == where
    for row in range(e):
        line = set(parent_chain(tree, extra, row)) if extra.valid_BE[0, row] else {m + row}
        assert {j for j in range(m + e) if see_BEX[0, row, j]} == line
        if extra.valid_BE[0, row]:
            ids = [int(extra.ids_BE[0, j - m]) - 100 for j in sorted(line) if j >= m]
            assert len({x % members for x in ids}) == 1 and [x // members for x in ids] == list(range(len(ids)))


def test_prompt_rows_go_to_the_likeliest_nodes_first() -> None:
    tree = hung_tree()  # by cumulative chance: anchor 1, node 1 0.6, node 3 0.54, node 2 0.3, node 5 0.108
    for tokens, counts in (
        (2, [2, 0, 0, 0, 0, 0]),
        (3, [2, 1, 0, 0, 0, 0]),
        (7, [2, 2, 1, 2, 0, 0]),
        (99, [2, 2, 2, 2, 0, 2]),
    ):
        plan = Plan("static", 2, 2, 5).with_prompts(Prompts(4, 2), 2 * tokens, 100, None)
        assert plan.per_node == 2 and plan.extra == 2 * min(tokens, 12)  # depth 2: two of the four are of use
        extra = with_prompts(tree, plan).extra
        assert extra is not None
        hung = extra.place(tree.visible())[1][0][extra.valid_BE[0]].tolist()
        assert [hung.count(m) // 2 for m in range(6)] == counts
    assert with_prompts(tree, Plan("static", 2, 2, 5)).extra is None
    with pytest.raises(ValueError, match="prompt_rows=1: this drafter's prompt tokens take 2 rows each"):
        Plan("static", 2, 2, 5).with_prompts(Prompts(4, 2), 1, 100, None)
    with pytest.raises(ValueError, match="nodes=2: a node and a prompt token of this drafter take 3 rows"):
        Plan("ppd", 2, 2, 2).with_prompts(Prompts(4, 2), None, 100, None)


def test_what_hung_on_the_accepted_node_comes_back_in_order() -> None:
    tree = hung_tree()
    extra = hang(tree, torch.tensor([[2, 1, 0, 2, 0, 0]]), Prompts(2), 6, 100)
    nodes_BE = extra.place(tree.visible())[1]
    hidden_BED = torch.arange(6.0)[None, :, None]
    for node, rows in ((0, [0, 1]), (1, [2]), (3, [3, 4]), (2, [])):
        out = ExtraOut(extra, nodes_BE, torch.tensor([node]), hidden_BED)
        for count in (1, 2, 9):
            states, valid = out.below_accepted(count)
            assert states.shape == (1, count, 1)
            assert states[0, :, 0][valid[0]].tolist() == rows[:count]


def test_wide_trees_use_several_mask_words() -> None:
    n = 130
    steps = torch.arange(n)[None]
    chain = Tree(steps, steps, steps + 1, torch.zeros(1, n), torch.ones(1, n, dtype=torch.bool))
    check(chain, n, n)
    assert chain.ancestors().shape == (1, n + 1, 3) and chain.is_chain()
