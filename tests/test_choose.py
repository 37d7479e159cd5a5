"""Which draft is the fastest: the dynamic programme against all trees, the chooser on made-up costs."""

import itertools
import random
from dataclasses import replace

import pytest

from draftsmith.inference.choose import (
    PRIOR,
    Costs,
    Line,
    acceptance,
    best_of_kinds,
    candidates,
    chain_tokens,
    cut_chain,
    interpolate,
    layer_widths,
)
from draftsmith.inference.marginals import chances_at, likeliest_paths
from draftsmith.inference.sequoia import best_trees
from draftsmith.inference.speculate import plan_of
from draftsmith.inference.trees import check_choices
from draftsmith.inference.tune import Arm, winner

# The dynamic programme


def expected_tokens(chances, choices):
    """Expected kept tokens of a template per verification, the target's own token not counted, path by path."""
    total = 0.0
    for path in choices:
        product = 1.0
        for depth, rank in enumerate(path, 1):
            row = chances_at(chances, depth, rank + 1)
            product *= row[rank] if rank < len(row) else 0.0
        total += product
    return total


def forests(nodes, above=()):
    """All ordered forests of so many nodes, as templates."""

    def grow(left, rank):
        if left == 0:
            yield ()
        for size in range(1, left + 1):
            path = (*above, rank)
            for inside in forests(size - 1, path):
                for rest in grow(left - size, rank + 1):
                    yield (path, *inside, *rest)

    yield from grow(nodes, 0)


def some_chances(seed, depths, ranks, falling=False):
    draws = random.Random(seed)
    rows = []
    for _ in range(depths):
        weights = [draws.random() ** 2 for _ in range(ranks)]
        share = draws.uniform(0.5, 1.0) / sum(weights)
        row = [share * w for w in weights]
        rows.append(tuple(sorted(row, reverse=True) if falling else row))
    return tuple(rows)


@pytest.fixture(scope="module")
def all_trees():
    return {n: list(forests(n)) for n in range(8)}


def test_every_ordered_tree_is_enumerated(all_trees):
    """As many as Catalan numbers say, no two the same."""
    assert [len(set(map(frozenset, all_trees[n]))) for n in range(8)] == [1, 1, 2, 5, 14, 42, 132, 429]


@pytest.mark.parametrize("seed", range(6))
def test_no_tree_beats_the_programme(all_trees, seed):
    """Every size to 7 and every depth, chances that need not fall with the rank, fewer rows than levels."""
    chances = some_chances(seed, depths=1 + seed % 3, ranks=2 + seed % 3)
    for depth in range(1, 8):
        found = best_trees(chances, 7, depth)
        best = 0.0
        for n in range(8):
            fitting = [t for t in all_trees[n] if max(map(len, t), default=0) <= depth]
            best = max([best, *(expected_tokens(chances, t) for t in fitting)])
            value, choices = found[n]
            assert value == pytest.approx(best, abs=1e-12)
            assert value == pytest.approx(expected_tokens(chances, choices), abs=1e-12)
            assert len(choices) <= n and max(map(len, choices), default=0) <= depth
            assert not choices or check_choices(choices) == choices


def test_where_chances_fall_with_the_rank_the_likeliest_paths_are_best():
    for seed in range(5):
        chances = some_chances(seed, 4, 5, falling=True)
        for n in (1, 5, 20, 31):
            paths = likeliest_paths(chances, 4, 5, n)
            assert best_trees(chances, n, 4)[n][0] == pytest.approx(sum(chance for chance, _ in paths), abs=1e-12)


def test_closed_forms():
    a = 0.7
    assert best_trees(((a,),), 9, 6)[9][0] == pytest.approx(a * (1 - a**6) / (1 - a))  # a chain, cut by the depth
    assert best_trees(((0.1,) * 8,), 5, 1)[5] == (pytest.approx(0.5), ((0,), (1,), (2,), (3,), (4,)))
    full = best_trees(((0.4, 0.4),), 14, 3)[14]  # two children each, three levels
    assert full[0] == pytest.approx(0.8 + 0.8**2 + 0.8**3) and len(full[1]) == 14
    assert best_trees(((0.0, 0.9),), 2, 1)[1:] == [(0.0, ()), (pytest.approx(0.9), ((0,), (1,)))]  # a dear sibling
    assert best_trees(((0.0,),), 4, 4)[4] == (0.0, ())  # what brings nothing is left out
    assert best_trees(((0.5,),), 0, 3) == [(0.0, ())]
    for bad in ((), ((),), ((1.5,),), ((-0.1, 0.5),)):
        with pytest.raises(ValueError, match="chances"):
            best_trees(bad, 3, 2)


# Costs and choice


class Levels:
    """As much of a drafter as planning asks for."""

    parallel, max_depth, d2t_W = 1, None, None

    def __init__(self, parallel=1):
        self.parallel = parallel


def costs(row=0.0, one=1.0, start=0.1, extend=0.1, masked=0.0, **change):
    """A pass costs `one` + `row` per further row, `masked` more as a tree; levels cost the same for any nodes."""
    rows = range(1, 33)
    chain = {m: one + row * (m - 1) for m in rows}
    made = Costs(
        {"chain": chain, "tree": {m: spent + masked for m, spent in chain.items()}},
        start,
        {1: extend, 8: extend},
        {"chain": 0.0, "tree": 0.0},
        {"plain": 0.0, "chain": 0.0, "tree": 0.0},
    )
    return replace(made, **change)


def found(chances, spent, parallel=1, rounds=()):
    drafter = Levels(parallel)
    return candidates(drafter, parallel == 1, lambda d: plan_of(drafter, d, 100, 100), chances, spent, rounds)


def test_costs_are_interpolated_and_summed():
    table = {1: 1.0, 4: 4.0, 8: 6.0}
    assert [interpolate(table, m) for m in (0, 1, 2, 4, 6, 8, 99)] == [1.0, 1.0, 2.0, 4.0, 5.0, 6.0, 6.0]
    with pytest.raises(ValueError, match="no cost was measured"):
        interpolate({}, 3)
    made = costs(
        row=0.01,
        extend=0.0,
        build={"chain": 0.5, "tree": 0.25},
        commit={"plain": 0.2, "chain": 0.3, "tree": 0.4},
    )
    made = replace(made, extend={1: 1.0, 3: 2.0})
    assert made.plain == pytest.approx(1.2)
    assert made.draft("chain", 3, [1, 2]) == pytest.approx(0.1 + 1.0 + 1.5 + 3 * 0.5)
    assert made.passed("tree", 5) == pytest.approx(1.04 + 0.4)
    assert layer_widths(((0,), (1,), (2,), (0, 0), (0, 1), (2, 0), (0, 1, 0))) == [2, 1]
    assert layer_widths(((0,), (1,))) == [] and layer_widths(()) == []


def test_acceptance_leans_on_the_depth_above():
    table = acceptance([100, 50], [[60, 20], [25]], 3, 3)
    assert table[0] == (0.6, 0.2, 0.0)
    assert table[1] == pytest.approx([(25 + PRIOR * 0.6) / (50 + PRIOR), PRIOR * 0.2 / (50 + PRIOR), 0.0])
    assert table[2] == pytest.approx(table[1])
    assert chain_tokens(table, 2) == pytest.approx(1 + 0.6 + 0.6 * table[1][0])
    for tried in ([], [0, 0]):
        with pytest.raises(ValueError, match="no draft was tested"):
            acceptance(tried, [[0], [0]], 2, 2)


STEEP = ((0.95, 0.01, 0.01),) * 8
FLAT = ((0.24, 0.22, 0.2, 0.18),) * 8


def test_the_choice_follows_chances_and_costs():
    best = best_of_kinds(found(STEEP, costs(row=0.01, masked=0.3)), 0.0)
    assert best[0].kind == "chain" and best[0].decode.k == 8  # sure drafts, cheap rows
    assert best_of_kinds(found(STEEP, costs(extend=0.9)), 0.0)[0].decode.k < 4  # dear levels
    assert best_of_kinds(found(STEEP, costs(extend=0.9, start=0.1), parallel=8), 0.0)[0].decode.k == 8  # all at once
    assert best_of_kinds(found(STEEP, costs(row=1.5)), 0.0)[0].decode.k == 1  # dear rows: as few as there may be
    wide = best_of_kinds(found(FLAT, costs(row=0.002)), 0.0)[0]
    assert wide.kind == "static" and (3,) in wide.decode.choices
    flat = best_of_kinds(found(FLAT, costs(masked=2.0)), 0.0)
    assert flat[0].kind == "chain"  # masked passes are too dear
    assert len(best_of_kinds(found(FLAT, costs(masked=2.0)), 0.9)) == 1  # and its tree is no finalist
    few = costs(verify={"chain": {1: 1.0, 4: 1.0}, "tree": {}})
    assert {c.decode.k for c in found(STEEP, few)} == {1, 2, 3}  # nothing beyond what was measured


def test_the_best_tree_per_second_is_the_best_of_all_trees(all_trees):
    """Where a level costs the same for any nodes, sizes and depths are all that matters; brute force agrees."""
    for seed, row in itertools.product(range(4), (0.02, 0.3)):
        chances = some_chances(seed, 3, 3)
        rows = {m: 1 + row * (m - 1) for m in range(1, 9)}
        spent = costs(extend=0.15, verify={"chain": {1: 1.0}, "tree": rows})
        rates = []
        for n in range(1, 8):
            for tree in all_trees[n]:
                if (depth := max(map(len, tree))) <= 3 and any(map(any, tree)):
                    rates.append((1 + expected_tokens(chances, tree)) / (0.1 + 0.15 * (depth - 1) + rows[n + 1]))
        static = next(c for c in best_of_kinds(found(chances, spent), 0.0) if c.kind == "static")
        assert static.rate == pytest.approx(max(rates))


def test_cuts_are_replayed():
    rounds = [[Line((0.9, 0.8, 0.2, 0.9), 3)], [Line((0.1, 0.9, 0.9, 0.9), 0)], [Line((0.9, 0.9, 0.9, 0.9), 4)]]
    lost, asked = cut_chain(rounds, 4, 0.5)
    assert lost == pytest.approx((1 + 0 + 0) / 3) and asked == [2, 0, 3]
    assert cut_chain(rounds, 4, 0.05) == (0.0, [3, 3, 3])
    assert cut_chain(rounds, 2, 0.5)[1] == [1, 0, 1]
    both = [[rounds[0][0], rounds[1][0]]]  # rows of one batch: as long as one of them goes on
    assert cut_chain(both, 4, 0.5) == (0.5, [2])
    # A drafter that knows when it is wrong, dear levels: stopping early pays; where all levels come at once it can't.
    unsure = [[Line((0.95,) * 6, 6)], [Line((0.05,) * 6, 0)]] * 10
    chances = ((0.5, 0.0),) + ((1.0, 0.0),) * 5
    best = best_of_kinds(found(chances, costs(extend=0.3), rounds=unsure), 0.0)[0]
    assert best.kind == "cut" and best.decode.threshold is not None and best.tokens == pytest.approx(4.0)
    assert best.seconds == pytest.approx(1.1 + 0.5 * 5 * 0.3)
    assert "cut" not in {c.kind for c in found(chances, costs(), parallel=6, rounds=unsure)}


def test_measurement_overrules_a_prediction_only_by_a_margin():
    predicted = best_of_kinds(found(STEEP, costs()), 0.0)[0]
    arms = [Arm("predicted", None, None, predicted, tokens=100, seconds=1.0), Arm("other", None, None, predicted)]
    arms[1].tokens, arms[1].seconds = 102, 1.0
    assert winner(arms).name == "predicted"
    arms[1].tokens = 104
    assert winner(arms).name == "other"
