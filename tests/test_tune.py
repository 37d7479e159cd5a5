"""`draftsmith tune`: the recorder on scripted drafters, the command on the tiny target; who uses what it stored, and that
seeded requests do not. The choice itself: tests/test_choose.py."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from test_choose import Levels

from draftsmith.inference import generate as generating
from draftsmith.inference import probes
from draftsmith.inference import tune as tuning
from draftsmith.inference import tuned as storing
from draftsmith.inference.consistency_folder import save_consistency
from draftsmith.inference.evaluate import plan, run_evaluate
from draftsmith.inference.evaluate_config import EvaluateConfig
from draftsmith.inference.export import export
from draftsmith.inference.exporters import folder as folders
from draftsmith.inference.exporters.layout import RunFacts
from draftsmith.inference.generate import GenerateConfig, assemble, run_generate
from draftsmith.inference.load import read_export_config
from draftsmith.inference.probes import Probe, Recorder
from draftsmith.inference.push import stage
from draftsmith.inference.speculate import DecodeConfig, generate
from draftsmith.inference.tune import TuneConfig, run_tune, tune
from draftsmith.inference.tuned import FILE, Tuned, flags, key_of, read_entries, store, stored_shape
from draftsmith.losses.probs import SamplingParams
from draftsmith.models import METHODS
from draftsmith.models.adapters import AdapterConfig, Adapters
from draftsmith.models.jacobi import JacobiConfig
from draftsmith.models.pretrained import tiny_target

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
    served = GenerateConfig("", model=str(folder), target="tiny", dtype="float32")
    assert (
        assemble(served, None, (), []).decode == DecodeConfig()
    )  # a server's requests share one shape, whatever they ask
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
        (json.dumps({"format": 1, "entries": [good | {"key": [[1, 2]]}]}), "key is no JSON object"),
        (json.dumps({"format": 1, "entries": [good | {"shape": "ab"}]}), "shape is no JSON object"),
        (json.dumps({"format": 1, "entries": [good | {"figures": [1]}]}), "figures is no JSON object"),
        (stored(good, tree="bush"), "bush"),
        (stored(good, k=10**6), "at most 4096"),
        (stored(good, k=2.5), "outside 1..512"),
        (stored(good, k="2"), "incomplete"),
        (stored(good, verifier="typical"), "verifier"),
        (stored(good, tree="static", choices=[[1]]), "preceding sibling"),
    ):
        (folder / FILE).write_text(text)
        assert part in line(), text


def stored(good, **shape):
    return json.dumps({"format": 1, "entries": [good | {"shape": good["shape"] | shape}]})


def test_a_file_that_cannot_be_read_stops_nobody(folder, quick, tiny, monkeypatch):
    def refused(path):
        raise PermissionError(13, "Permission denied", str(path))

    target, ours = tiny(), read_export_config(str(folder))["draftsmith"]
    store(folder, Tuned(key_of(target, ours), 1, DecodeConfig(k=2)))
    monkeypatch.setattr(storing, "read_json", refused)
    entry, line = stored_shape(str(folder), None, ours, target, SamplingParams())
    assert entry is None and f"{FILE} is not used: " in line and "Permission denied" in line


def test_a_folder_that_takes_no_result_is_refused_before_measuring(folder, quick, monkeypatch):
    monkeypatch.setattr(tuning, "load_target", lambda *a, **k: pytest.fail("loaded"))
    with monkeypatch.context() as patch:
        patch.setattr(tuning.os, "access", lambda *_: False)
        with pytest.raises(ValueError, match=f"{FILE} cannot be written"):
            run_tune(quick)
    (folder / FILE).mkdir()
    monkeypatch.setenv("HOME", str(folder.parent))
    for name in (str(folder), f"~/{folder.name}"):  # `--export=~/x` comes as it stands
        with pytest.raises(ValueError, match=f"{FILE} cannot be written"):
            run_tune(replace(quick, export=name))
    (folder / FILE).rmdir()


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
        ({"threads": (1, 10**6)}, "may run on"),
        ({"json": "."}, "is a folder"),
        ({"json": "no/such/folder/out.json"}, "its folder does not exist"),
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
