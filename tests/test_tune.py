"""`draftsmith tune`: the dynamic programme against all trees, the chooser on made-up costs, the recorder on scripted
drafters, the command on the tiny target; who uses what it stored, and that seeded requests do not."""

import itertools
import json
import random
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from draftsmith.inference import generate as generating
from draftsmith.inference import probes
from draftsmith.inference import tune as tuning
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
from draftsmith.inference.consistency_folder import save_consistency
from draftsmith.inference.evaluate import EvaluateConfig, plan, run_evaluate
from draftsmith.inference.export import export
from draftsmith.inference.exporters import folder as folders
from draftsmith.inference.exporters.layout import RunFacts
from draftsmith.inference.generate import GenerateConfig, run_generate
from draftsmith.inference.load import read_export_config
from draftsmith.inference.marginals import likeliest_paths
from draftsmith.inference.probes import Probe, Recorder
from draftsmith.inference.push import stage
from draftsmith.inference.sequoia import best_trees, expected_tokens
from draftsmith.inference.speculate import DecodeConfig, generate, plan_of
from draftsmith.inference.trees import check_choices
from draftsmith.inference.tune import Arm, TuneConfig, run_tune, tune, winner
from draftsmith.inference.tuned import FILE, Tuned, flags, key_of, read_entries, store, stored_shape
from draftsmith.losses.probs import SamplingParams
from draftsmith.models import METHODS
from draftsmith.models.adapters import AdapterConfig, Adapters
from draftsmith.models.jacobi import JacobiConfig
from draftsmith.models.pretrained import tiny_target

# The dynamic programme


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


# Recording


def test_the_recorder_tells_ranks_by_depth(scripted):
    """A target that counts; a drafter that has the right token first at depth 1 and third below, in every row."""
    v = 12

    def counts(previous_BT, token_BT, position_BT):
        return torch.nn.functional.one_hot((token_BT + 1) % v, v) * 9.0

    def drafts(previous_BN, token_BN, depth):
        right = (token_BN + 1) % v
        order = [right] if depth == 1 else [(right + 1) % v, (right + 2) % v, right]
        return sum(torch.nn.functional.one_hot(ids, v) * (9.0 - i) for i, ids in enumerate(order))

    params, decode = SamplingParams(max_new_tokens=9), DecodeConfig(k=3)
    for d2t in (None, torch.arange(v)):
        drafter = scripted.Drafter(drafts, d2t_W=d2t)
        target = scripted.Target(counts, v)
        drafter.facts = target.facts
        recorder = Recorder(drafter)
        plain = generate(target, [[1, 2], [5]], params, drafter, decode)
        seen = generate(target, [[1, 2], [5]], params, recorder, decode)
        assert [r.ids for r in seen] == [r.ids for r in plain]
        # 9 ids: one of the prefill, four steps of two; the last one has no successor that would tell.
        assert recorder.tried == [6, 6] and recorder.ranks[0] == [6, 0, 0, 0, 0, 0, 0, 0]
        assert recorder.ranks[1] == [0, 0, 6, 0, 0, 0, 0, 0]
        assert [len(lines) for lines in recorder.rounds] == [2, 2, 2]
        assert all(line.kept == 1 and len(line.sure) == 3 for lines in recorder.rounds for line in lines)
        assert len(recorder.times[0]) == 3 and len(recorder.times[1]) == 8 and recorder.steps == 4
        lanes = Recorder(drafter, counting=False)
        tree = DecodeConfig(k=2, tree="static", choices=((0,), (1,), (0, 0), (1, 0)))
        generate(target, [[1, 2]], params, lanes, tree)
        assert lanes.tried == [] and set(lanes.times) == {0, 2}


def test_levels_that_come_at_once_are_recorded_alike(scripted):
    v = 12

    def drafts(previous_BN, token_BN, depth):  # right, right, then second
        ids = [(token_BN + depth) % v, (token_BN + depth + 1) % v]
        first, second = ids if depth < 3 else reversed(ids)
        return torch.nn.functional.one_hot(first, v) * 9.0 + torch.nn.functional.one_hot(second, v) * 8.0

    target = scripted.Target(lambda p, t, at: torch.nn.functional.one_hot((t + 1) % v, v) * 9.0, v)
    drafter = scripted.Drafter(drafts, parallel=4, max_depth=4)
    drafter.facts = target.facts
    recorder = Recorder(drafter)
    generate(target, [[1]], SamplingParams(max_new_tokens=10), recorder, DecodeConfig(k=4))
    assert recorder.tried == [2, 2, 2] and [row[:2] for row in recorder.ranks] == [[2, 0], [2, 0], [0, 2]]
    assert not recorder.asks and recorder.rounds[0][0].kept == 2


# The command


def probe(target, **change):
    prompts = [target.tokenizer(text).input_ids for text in ("Hello there", "Write a loop", "Why is it so", "Add 3")]
    return Probe(target, prompts, **({"tokens": 8, "depth": 3, "threads": (1,), "seconds": 0.0} | change))


@pytest.mark.parametrize(("method", "rows"), [("eagle", 1), ("eagle", 2), ("prompt_tokens", 1)])
def test_all_probes_of_a_drafter(tiny, method, rows):
    target = tiny()
    drafter = METHODS[method](METHODS[method].Config(), target.facts)
    drafter.init_from_target(target)
    told = []
    out = tune(probe(target, rows=rows, tell=told.append), drafter.eval())
    assert out.threads == 1 and sum(told) > 0
    assert out.arms[0].decode is None and out.best in out.arms[1:]
    usual = [arm for arm in out.arms[1:] if arm.decode == DecodeConfig() or arm.decode == DecodeConfig(k=3)]
    assert len(usual) == 1  # the default takes part, and is predicted as deep as was tried
    assert out.costs.batch == rows and min(out.costs.verify["tree"].values()) > 0 and out.costs.start > 0
    assert (set(out.costs.extend) == {1, 2, 4, 8}) == (method == "eagle")
    assert len(out.chances) == 3 and all(0 <= sum(row) <= 1 for row in out.chances)
    stated = json.loads(json.dumps(out.figures(), allow_nan=False))
    for arm in stated["arms"]:
        assert arm["measured"]["tokens_per_second"] > 0
        assert 1 <= arm["measured"]["tokens_per_pass"] <= 1 + 3
    assert stated["arms"][0]["predicted"]["ratio_to_plain"] == 1


@pytest.fixture(scope="module")
def folder(tiny, tmp_path_factory):
    """An export of an untrained head."""
    target = tiny()
    drafter = METHODS["medusa"](METHODS["medusa"].Config(), target.facts)
    drafter.init_from_target(target)
    return export(drafter, tmp_path_factory.mktemp("tune") / "export", run=RunFacts(train_length=512), target=target)


@pytest.fixture
def quick(folder):
    (folder / FILE).unlink(missing_ok=True)
    return TuneConfig(
        export=str(folder), target="tiny", seconds=0.0, max_new_tokens=8, depth=3, threads=(1,), dtype="float32"
    )


@pytest.fixture
def asked(monkeypatch):
    """Shapes that `generate` and its answers were asked with."""
    seen, real = [], generate

    def spy(*args, decode, **rest):
        results = real(*args, decode=decode, **rest)
        seen.append((decode, results[0].ids))
        return results

    monkeypatch.setattr(generating, "generate", spy)
    return seen


def ask(folder, named=frozenset(), **change):
    options = {"model": str(folder), "target": "tiny", "dtype": "float32", "max_new_tokens": 24, "ignore_eos": True}
    run_generate(GenerateConfig("Hello there", **(options | change)), named)


def test_the_command_stores_what_generate_and_evaluate_use(folder, quick, asked, tiny, tmp_path, capsys):
    run_tune(replace(quick, json=str(tmp_path / "result.json")))
    text = capsys.readouterr().out
    assert "predicted / measured" in text and "chosen: " in text and "stored in" in text
    (entry,) = read_entries(folder)
    assert json.loads((tmp_path / "result.json").read_text()) == json.loads((folder / FILE).read_text())["entries"][0]
    assert str(tmp_path) not in (folder / FILE).read_text() and entry.threads == 1
    assert entry.figures["chosen"] and {arm["name"] for arm in entry.figures["arms"]} >= {"plain"}
    assert FILE not in {path.name for path in stage(folder, "jane/head", tmp_path)}  # of this machine, so it stays here
    ask(folder)
    assert asked[-1][0] == entry.applied(DecodeConfig()) and "tuned for this machine: " in capsys.readouterr().out
    for named, change in (({"k"}, {}), ((), {"k": 2}), ((), {"tree": "static"}), ((), {"verifier": "sample_match"})):
        ask(folder, frozenset(named), **change)
        assert asked[-1][0] == DecodeConfig(**change) and "tuned" not in capsys.readouterr().out
    cfg = EvaluateConfig(
        model=str(folder), target="tiny", prompts=1, max_new_tokens=4, hf_prompts=0, dtype="float32", card=False,
        bootstrap=10, out=str(tmp_path / "out"),
    )  # fmt: skip
    assert run_evaluate(cfg) == 0
    assert "tuned for this machine: " in capsys.readouterr().out
    run = json.loads((tmp_path / "out" / "report.json").read_text())["run"]
    assert run["tuned"] and run["k"] == [entry.decode.k] and run["trees"] == [entry.decode.tree]
    arms = plan(cfg, {"s": Levels()}, DecodeConfig(k=3))
    assert [arm.decode.k for arm in arms if arm.kind == "draft"] == [3]


def test_seeded_requests_keep_their_shape_and_their_answer(folder, quick, asked, tiny, capsys):
    """Another K would give a seed another answer, so what `tune` stored is not for requests that bring one."""
    target, before = tiny(), [None] * 4
    sampled = {"temperature": 1.0}
    for seed in range(4):
        ask(folder, seed=seed, **sampled)
        before[seed] = asked[-1][1]
    ours = read_export_config(str(folder))["draftsmith"]
    store(folder, Tuned(key_of(target, ours), 1, DecodeConfig(k=1)))
    capsys.readouterr()
    for seed in range(4):
        ask(folder, seed=seed, **sampled)
        assert asked[-1] == (DecodeConfig(), before[seed])
        assert "the answer to a seed must not depend on it" in capsys.readouterr().out
    ask(folder, **sampled)  # any seed will do: any shape will do
    assert asked[-1][0] == DecodeConfig(k=1)
    ask(folder, seed=1)  # greedy: no coin is thrown
    assert asked[-1][0] == DecodeConfig(k=1)
    other = []
    for seed in range(4):
        ask(folder, seed=seed, k=1, **sampled)
        other.append(asked[-1][1])
    assert other != before  # the reason for the rule
    cfg = EvaluateConfig(
        model=str(folder), target="tiny", prompts=1, max_new_tokens=4, hf_prompts=0, dtype="float32", card=False,
        bootstrap=10, temperatures=(0.0, 1.0), k=(2, 4), out=str(folder.parent / "out"),
    )  # fmt: skip
    capsys.readouterr()
    run_evaluate(cfg)
    assert "the answer to a seed must not depend on it" in capsys.readouterr().out


def test_stale_foreign_and_damaged_files_are_ignored_in_one_line(folder, quick, tiny):
    target = tiny()
    ours = read_export_config(str(folder))["draftsmith"]
    key, greedy = key_of(target, ours), SamplingParams()

    def line(batch=1):
        entry, said = stored_shape(str(folder), None, ours, target, greedy, batch)
        assert entry is None and "\n" not in said and "draftsmith tune" in said
        return said

    assert stored_shape(str(folder), None, ours, target, greedy) == (None, None)
    for name, value in (("cpu", "Another CPU"), ("export", "0" * 64), ("torch", "1.0"), ("dtype", "int8")):
        (folder / FILE).unlink(missing_ok=True)
        store(folder, Tuned(key | {name: value}, 1, DecodeConfig(k=2)))
        assert f"{name} {value[:10]}" in line()
    store(folder, Tuned(key, 1, DecodeConfig(k=2)))
    store(folder, Tuned(key | {"batch": 8}, 1, DecodeConfig(k=3)))
    store(folder, Tuned(key, 1, DecodeConfig(k=1)))  # in the place of the first
    assert len(read_entries(folder)) == 3
    for batch, k in ((1, 1), (8, 3)):
        entry, said = stored_shape(str(folder), None, ours, target, greedy, batch)
        assert entry.decode.k == k and said.startswith("tuned for this machine: chain K=")
    assert "batch 1, here 2" in line(2) or "batch 8, here 2" in line(2)
    (folder / FILE).unlink()
    store(folder, Tuned(key, 1 + 10**2, DecodeConfig(k=2)))
    assert "101 threads on" in line()
    good = Tuned(key, 1, DecodeConfig(k=2)).row()
    for text, part in (
        ("{", "not JSON"),
        ("{}", "format None"),
        ('{"format": 1}', "incomplete"),
        ('{"format": 1, "entries": [{}]}', "incomplete"),
        ('{"format": 1, "entries": [3]}', "incomplete"),
        (stored(good, tree="bush"), "bush"),
        (stored(good, k=10**6), "outside 1..512"),
        (stored(good, k=2.5), "outside 1..512"),
        (stored(good, k="2"), "incomplete"),
        (stored(good, verifier="typical"), "verifier"),
        (stored(good, tree="static", choices=[[1]]), "preceding sibling"),
    ):
        (folder / FILE).write_text(text)
        assert part in line(), text


def stored(good, **shape):
    return json.dumps({"format": 1, "entries": [good | {"shape": good["shape"] | shape}]})


def test_an_interrupted_run_leaves_what_was_there(folder, quick, monkeypatch):
    def stop(*_):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(tuning, "compare", stop)
        with pytest.raises(KeyboardInterrupt):
            run_tune(quick)
    assert not (folder / FILE).exists()
    entry = Tuned({"cpu": "a"}, 1, DecodeConfig(k=2))
    before = store(folder, entry).read_bytes()
    names = sorted(p.name for p in folder.iterdir())
    with monkeypatch.context() as patch:
        patch.setattr(folders, "sync", stop)  # before the file takes the other's place
        with pytest.raises(KeyboardInterrupt):
            store(folder, Tuned({"cpu": "b"}, 1, DecodeConfig(k=3)))
    assert (folder / FILE).read_bytes() == before and sorted(p.name for p in folder.iterdir()) == names
    assert torch.get_num_threads() == 1


@pytest.mark.parametrize(("name", "option"), [("ngram", "--tree chain --k "), ("jacobi", "--drafter.jacobi.block ")])
def test_proposers_choose_among_their_depths(quick, name, option, capsys):
    run_tune(replace(quick, export=name, max_new_tokens=6))
    text = capsys.readouterr().out
    assert f"not stored: give {option}" in text


def test_consistency_models_choose_their_block(tiny, tmp_path, capsys):
    adapters = Adapters(AdapterConfig(rank=4, alpha=8, kind="lora"), tiny_target(dtype=torch.float32))
    place = save_consistency(
        tmp_path / "export", "consistency", {}, adapters, RunFacts(train_length=64), JacobiConfig(block=6)
    )
    out = str(tmp_path / "result.json")
    run_tune(TuneConfig(str(place), seconds=0.0, max_new_tokens=6, threads=(1,), dtype="float32", json=out))
    assert "not stored: give --drafter.jacobi.block " in capsys.readouterr().out and not (place / FILE).exists()
    names = {arm["name"] for arm in json.loads(Path(out).read_text())["figures"]["arms"]}
    assert {"plain", "--drafter.jacobi.block 6", "--drafter.jacobi.block 16"} <= names
    with pytest.raises(ValueError, match="stand alone"):
        run_tune(TuneConfig(str(place), target="tiny"))


def test_more_threads_must_save_something(tiny, monkeypatch):
    for two, best in ((0.97, 1), (0.8, 2)):
        spent = {1: 1.0, 2: two}
        monkeypatch.setattr(probes, "seconds_of", lambda target, work, spent=spent: spent[torch.get_num_threads()])
        try:
            assert probes.probe_threads(probe(tiny(), threads=(2, 1)), ()) == best
        finally:
            torch.set_num_threads(1)
    assert probes.probe_threads(probe(tiny(), threads=(1,)), ()) == 1


def test_bad_settings_are_refused(quick):
    for change, message in (
        ({"suite": "mmlu"}, "suite = 'mmlu'"),
        ({"batch": 0}, "batch = 0"),
        ({"depth": 0}, "depth = 0"),
        ({"max_new_tokens": 2}, "max_new_tokens = 2"),
        ({"seconds": -1.0}, "seconds = -1.0"),
        ({"threads": ()}, "threads = "),
        ({"threads": (0,)}, "threads = "),
        ({"json": "."}, "is a folder"),
    ):
        with pytest.raises(ValueError, match=message):
            replace(quick, **change)
    for change, message in (
        ({"export": "ngram", "target": None}, "--target NAME"),
        ({"export": str(Path(quick.export).parent)}, "config.json"),
    ):
        with pytest.raises(ValueError, match=message):
            run_tune(replace(quick, **change))
    assert flags(DecodeConfig(k=3)) == "--tree chain --k 3"
    assert flags(DecodeConfig(tree="cut", k=3, threshold=0.4)) == "--tree cut --k 3 --threshold 0.4"
    assert flags(DecodeConfig(tree="static", choices=((0,),))) == ""
