"""`draftsmith plan`: sums, parameter counts of what is really built, ZeRO's shares, refusals, and that what it sees without
numbers is what numbers take. Against measured peaks of whole runs: tests/bench/plan.py."""

from __future__ import annotations

import dataclasses
import importlib.util
import json
import re
import weakref
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from accelerate.utils import DistributedType
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from draftsmith.cli import main
from draftsmith.configs.training import BatchConfig, BudgetConfig, OptimConfig, TargetConfig, TrainConfig
from draftsmith.data.encode import Sample
from draftsmith.data.sources import DataConfig
from draftsmith.kernels import linear_loss
from draftsmith.models import METHODS, outline
from draftsmith.models.outline import Outline, load_config, outline_target
from draftsmith.models.pretrained import tiny_target
from draftsmith.models.target import live_states
from draftsmith.train import plan, plan_memory, plan_run, script
from draftsmith.train.loop import LossModule
from draftsmith.train.plan_devices import DEVICES, device_of
from draftsmith.train.plan_memory import (
    ENGINES,
    Numbers,
    device_memory,
    most_rows,
    packed_head,
    packed_memory,
    target_bytes,
    total,
)
from draftsmith.train.plan_run import Text, Work, make_plan

RECIPES = Path(__file__).resolve().parents[1] / "configs"
SETTINGS: dict[str, dict[str, Any]] = {"dflash": {"anchors": 4}, "dspark": {"anchors": 4}, "eagle3": {"steps": 3}}
linear_loss_spans = linear_loss.spans
NUMBERS = Numbers(
    trained=1_000, fixed_bytes=16, target=8_000, target_bytes=16_000, target_matrices=6_000, ends=4_000, layer=1_500, moments=2_000, head=2_000,
)  # fmt: skip
PARTS = {"states": 10, "teacher": 20, "activations": 3_000, "gradients": 4_000, "workspace": 50}


def recipe(method: str, **batch: Any) -> TrainConfig:
    drafter = METHODS[method].Config(**SETTINGS.get(method, {}))
    return TrainConfig(
        method=method,
        drafter=drafter,
        target=TargetConfig(name="tiny", dtype="float32"),
        data=DataConfig(max_length=48),
        batch=BatchConfig(**({"row_length": 48, "rows": 2} | batch)),
        budget=BudgetConfig(steps=10),
        precision="fp32",
        states=TrainConfig.__dataclass_fields__["states"].default_factory(source="live"),  # type: ignore[misc]
    )


def work_of(run: TrainConfig, world: int = 1) -> Work:
    generator = torch.Generator().manual_seed(0)
    samples = [
        Sample(i, torch.randint(3, 200, (40 + i,), generator=generator), torch.arange(40 + i) > 7) for i in range(8)
    ]
    tokens = sum(map(len, samples))
    return Work(run, "tiny", load_config("tiny")[1], Text(samples, 0, tokens, 0.8, "made"), world)


class Measured(TorchDispatchMode):
    """The same count as an `Outline`'s, of real tensors."""

    def __init__(self) -> None:
        super().__init__()
        self.held: dict[int, Any] = {}
        self.live = self.peak = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for x in tree_leaves(out):
            if isinstance(x, torch.Tensor):
                self.hold(x)
        return out

    def hold(self, x: torch.Tensor) -> None:
        storage = x.untyped_storage()
        key, size = storage._cdata, storage.nbytes()
        if key not in self.held:
            self.held[key] = weakref.ref(storage, lambda _: self.free(key, size))
            self.live += size
            self.peak = max(self.peak, self.live)

    def free(self, key: int, size: int) -> None:
        self.held.pop(key, None)
        self.live -= size


@pytest.mark.parametrize("method", METHODS)
def test_parameters_and_bytes_are_those_of_the_real_drafter(method: str) -> None:
    """Every method of the table: its numbers, and what a real step holds at its peak, operator by operator, to 5 %."""
    work = work_of(recipe(method))
    planned = make_plan(work, 2, "ddp", "replicated")
    target = tiny_target()
    drafter = METHODS[method](work.run.drafter, target.facts, None)
    drafter.init_from_target(target)
    drafter.float().train()
    assert planned.numbers.trained == sum(p.numel() for p in drafter.parameters() if p.requires_grad)
    assert planned.numbers.target == sum(p.numel() for p in target.model.parameters())

    batch = work.text.batch(work.run, 2, 1)
    module = LossModule(drafter, "fp32", torch.device("cpu"))
    before = {t.untyped_storage()._cdata for t in (*target.parameters(), *target.buffers(), *drafter.parameters())}
    measured = Measured()
    with measured:
        measured.held = dict.fromkeys(before)
        with torch.no_grad():
            out = live_states(target, drafter, batch) if drafter.loss_needs - {"ids"} else plan_run_states(target)
        loss, _ = module(batch, out, 0.0, drafter.denominators(batch, 0.0))
        loss.backward()
    parts = sum(planned.step.parts.values())
    assert abs(parts / measured.peak - 1) < 0.05, (parts, measured.peak)


@pytest.mark.parametrize("method", METHODS)
def test_weights_of_usual_size_are_shapes(method: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The tiny target's matrices are small enough to be real; as shapes they give the same plan, copied and moved too."""
    target = TargetConfig(name="tiny", dtype="bfloat16")  # weights that are copied are made anew, in fp32
    work = work_of(dataclasses.replace(recipe(method), target=target, precision="bf16"))
    wanted = make_plan(work, 2, "ddp", "replicated")
    monkeypatch.setattr(outline, "SMALL", 2**11)
    FakeTensorMode.cache_clear()  # what an operator gives for the first time is made in another way
    found = make_plan(work, 2, "ddp", "replicated")
    assert found.numbers == wanted.numbers
    # falcon's second part is of drafts that were right, which is by real numbers' chance or as shapes say
    assert found.peak == pytest.approx(wanted.peak, rel=5e-3)
    assert found.step.flops == pytest.approx(wanted.step.flops, rel=5e-3)


@pytest.mark.parametrize("method", ["eagle3", "medusa"])
def test_what_runs_once_counts_for_all_alike(method: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Chunks of rows and tiles of attention, each taken in turn in the same room: the first of a kind stands for all."""
    work = work_of(recipe(method, row_length=96))
    monkeypatch.setattr(linear_loss, "job_rows", lambda *_: 8)
    cut = make_plan(work, 2, "ddp", "replicated")
    monkeypatch.setattr(Outline, "_one_chunk", lambda _, rows, chunk: linear_loss_spans(rows, chunk))
    monkeypatch.setattr(Outline, "_one_of_each", lambda _, ranges: iter(ranges.tiles))
    whole = make_plan(work, 2, "ddp", "replicated")
    assert cut.step.flops == pytest.approx(whole.step.flops, rel=1e-3)
    assert cut.peak == pytest.approx(whole.peak, rel=5e-3)


def plan_run_states(target: Any) -> Any:
    from draftsmith.data.batch import TargetOut

    return TargetOut(head=target.head, by_head=target.by_head, embed=target.embed)


def test_totals_are_sums_of_their_parts() -> None:
    planned = make_plan(work_of(recipe("eagle3")), 2, "ddp", "replicated")
    assert planned.peak == max(total(terms) for terms in planned.moments.values())
    assert total(planned.terms) == sum(term.bytes for term in planned.terms)
    assert plan_memory.largest(planned.terms).bytes == max(term.bytes for term in planned.terms)
    assert all(term.formula for term in planned.terms)
    disk = planned.disk
    assert disk is not None
    assert disk.total == disk.states + disk.rows + disk.checkpoint * disk.checkpoints + disk.export


def test_more_rows_take_more() -> None:
    work = work_of(recipe("eagle3"))
    one, two = (make_plan(work, rows, "ddp", "replicated").peak for rows in (1, 2))
    assert one < two < 2.2 * one


@pytest.mark.parametrize("engine", ENGINES)
def test_each_stage_divides_what_it_says(engine: str) -> None:
    """arXiv:1910.02054, section 5: stage 1 the optimiser, 2 gradients too, 3 weights too."""

    def of(devices: int) -> dict[str, int]:
        return {t.name: t.bytes for t in device_memory(NUMBERS, PARTS, engine, "replicated", devices, "")}

    one, eight = of(1), of(8)
    stage = int(engine.removeprefix("zero")) if engine != "ddp" else 0
    assert eight["moments"] == (one["moments"] // 8 if stage >= 1 else one["moments"])
    assert eight["gradients"] == (one["gradients"] // 8 if stage >= 2 else one["gradients"])
    weights = 4 * NUMBERS.trained
    assert eight["drafter"] - NUMBERS.fixed_bytes == weights  # whole in the loss, with stage 3 too
    assert eight.get("engine masters", 0) == (weights // 8 if stage >= 3 else 0)
    assert ("engine masters" in eight) == (stage >= 3)
    assert eight["activations"] == one["activations"] == PARTS["activations"]


def test_placements_of_the_target() -> None:
    def of(placement: Any, devices: int = 8) -> int:
        return target_bytes(NUMBERS, placement, devices).bytes

    assert of("replicated") == 16_000
    assert of("sharded") == 4_000 + (16_000 - 4_000) // 8 + 1_500
    said = device_memory(NUMBERS, PARTS, "ddp", "sharded", 16, "", machine=8)
    assert said[0].bytes == of("sharded")  # over the devices of a machine alone
    assert of("own") == of("absent") == 4_000
    assert of("int8") == 16_000 - 12_000 + 6_000
    assert of("nf4") == 16_000 - 12_000 + int(4.127 / 8 * 6_000)


def test_a_packed_head_is_counted_once() -> None:
    """Where a CPU packs bf16 weights: from the first logits on, and not again by decoding."""
    packed = dataclasses.replace(NUMBERS, packed_head=2_000)
    assert packed_memory(NUMBERS).bytes == 2 * (6_000 + 2_000)
    assert packed_memory(packed).bytes + total(packed_head(packed)) == 2 * (6_000 + 2_000)
    assert packed_head(NUMBERS) == []


def test_the_head_that_is_packed_is_the_targets(monkeypatch: pytest.MonkeyPatch) -> None:
    """Numbers of all rows and of the draft vocabulary's, as `Target._rows` packs them, on CPUs alone."""
    monkeypatch.setattr(plan_run, "packs", lambda weight: True)
    head = load_config("tiny")[1].vocab_size * load_config("tiny")[1].hidden_size
    width = load_config("tiny")[1].hidden_size
    drafts = dataclasses.replace(recipe("medusa"), draft_vocab=16)
    for run, numbers in ((recipe("medusa"), head), (drafts, head + 16 * width)):
        planned = make_plan(work_of(run), 2, "ddp", "replicated")
        assert planned.numbers.packed_head == numbers
        assert "packed head" in {term.name for term in planned.moments["training"]}
        assert "packed head" not in {
            term.name for term in make_plan(work_of(run), 2, "ddp", "replicated", False).moments["training"]
        }


@pytest.mark.parametrize(
    ("said", "place"),
    [
        ({}, "replicated"),
        ({"quantize": "nf4"}, "nf4"),
        ({"quantize": "int8_weight"}, "int8"),
        ({"placement": "sharded"}, "sharded"),
        ({"placement": "devices", "devices": ("1",)}, "own"),
    ],
)
def test_placement_is_the_recipes(said: dict[str, Any], place: str) -> None:
    assert plan.placement_of(TargetConfig(**said)) == place


@pytest.mark.parametrize("limit", [0, 1, 2, 3, 7, 8, 100])
def test_largest_micro_batch_fits_and_the_next_does_not(limit: int) -> None:
    asked: list[int] = []

    def peak(rows: int) -> int:
        asked.append(rows)
        return 1_000 * rows + 37 * (rows % 3)  # about even

    assert most_rows(peak, 1_000 * limit + 99, 100) == limit
    assert len(set(asked)) <= 6


def test_largest_micro_batch_of_a_recipe(capsys: pytest.CaptureFixture[str]) -> None:
    """By the plan's own bytes: so many rows fit the device, one more does not."""
    work = work_of(recipe("medusa"))
    sizes = [make_plan(work, rows, "ddp", "replicated").peak for rows in (3, 4)]
    config = plan.PlanConfig("x", placement="replicated", memory_gb=sum(sizes) / 2 / 1e9, reserve_gb=0.0)
    assert plan.largest_micro_batch(work, make_plan(work, 2, "ddp", "replicated"), config) == 3


def test_the_heaviest_micro_batch_of_the_budget() -> None:
    """Of the epochs that ten steps reach, not of the first alone."""
    work = work_of(dataclasses.replace(recipe("medusa"), seed=1))
    stream = work.text.stream(work.run)
    told = [
        [int(batch.supervised_BT.sum()) for at in range(stream.windows(epoch)) for batch in stream.window(epoch, at)]
        for epoch in range(3)
    ]
    assert max(told[0]) < max(max(told[1]), max(told[2]))
    assert int(work.text.batch(work.run, 2, 1).supervised_BT.sum()) == max(map(max, told))


def planned(capsys: pytest.CaptureFixture[str], *argv: str) -> tuple[int, dict[str, Any]]:
    code = main(["plan", *argv, "--json", "true"])
    out, error = capsys.readouterr()
    return code, json.loads(out) if code != 2 else {"error": error}


QUICK = [str(RECIPES / "quick.yaml"), "data.limit=24"]


def test_disk_is_what_a_dry_capture_says(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """CASES B31: both name the same bytes before anything runs (here: equal, 5 % are allowed)."""
    code, found = planned(capsys, *QUICK)
    assert code == 0
    line = ["--target", "tiny", "--dtype", "float32", "--out", str(tmp_path), "--dry_run", "true"]
    assert main(["capture", *line, "data.limit=24", "data.max_length=512", "heldout=8"]) == 0
    said = capsys.readouterr().out.replace(",", "")
    train, _, both = ([int(n) for n in pair] for pair in re.findall(r"states (\d+) bytes; .* (\d+) bytes", said))
    assert abs(found["disk"]["states"] / train[0] - 1) <= 0.05
    assert abs((found["disk"]["states"] + found["disk"]["rows"]) / sum(both) - 1) <= 0.05


def test_no_term_is_full_logits_in_fp32(capsys: pytest.CaptureFixture[str]) -> None:
    """CASES B30: nothing as large as B x T x V in fp32, the draft vocabulary being smaller."""
    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4}
    config = dataclasses.replace(
        recipe("eagle3", row_length=512, rows=1), draft_vocab=1_000, data=DataConfig(max_length=512)
    )
    settings = (
        load_config("tiny")[1].to_dict() | sizes | {"vocab_size": 32_000, "head_dim": 16, "num_key_value_heads": 4}
    )
    shaped = type(load_config("tiny")[1])(**settings)
    found = make_plan(Work(config, "wide", shaped, Text([], 0, None, 1.0, "full rows"), 1), 1, "ddp", "replicated")
    assert found.step.largest < 512 * 32_000 * 4
    assert found.step.parts["teacher"] < 512 * 32_000 * 4


def test_verdict_and_exit_code(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plan, "MOST_TOKENS", 1024)  # two rows: a plan is made of each count that is looked at
    code, found = planned(capsys, *QUICK, "--memory_gb", "0.02", "--reserve_gb", "0")
    assert (code, found["fits"]) == (1, False)
    assert found["largest_micro_batch"] == 0
    code, found = planned(capsys, *QUICK, "--gpu", "h100", "--price", "2")
    assert (code, found["fits"]) == (0, True)
    assert found["cost"] == pytest.approx(2 * sum(found["hours"][k] for k in ("capture", "training")))
    assert found["largest_micro_batch"] == 2


def test_what_would_fit_is_named() -> None:
    """Four rows do not fit, one does."""
    work = work_of(recipe("medusa"))
    four, one = (make_plan(work, rows, "ddp", "replicated") for rows in (4, 1))
    config = plan.PlanConfig("x", placement="replicated", memory_gb=(four.peak + one.peak) / 2e9, reserve_gb=0.0)
    found = plan.what_would(work, four, config)
    assert any(way.startswith("batch.rows=1 batch.accumulate=4: ") for way in found)  # the same rows a step
    assert any(way.startswith("target.quantize=nf4") or way.startswith("target.placement=") for way in found)


def test_what_would_fit_is_said_in_a_recipes_keys() -> None:
    """What `placement_of` reads back as the placement that was meant."""
    asked = TargetConfig(quantize="nf4")
    assert plan.keys_of_placement("sharded", asked) == {"target.placement": "sharded", "target.quantize": "none"}
    assert plan.keys_of_placement("nf4", TargetConfig(placement="sharded")) == {
        "target.placement": "replicated",
        "target.quantize": "nf4",
    }
    assert plan.keys_of_placement("own", TargetConfig())["target.devices"]
    for place in ("replicated", "sharded", "nf4", "int8", "absent"):
        said = {
            key.removeprefix("target."): value for key, value in plan.keys_of_placement(place, TargetConfig()).items()
        }
        assert plan.placement_of(TargetConfig(**said)) == place


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        ((*QUICK, "--gpu", "h10"), ("'h10'", "'h100'", "known:")),
        ((*QUICK, "--price", "2"), ("price=2.0", "gpu=")),
        ((*QUICK, "--samples", "5"), ("samples=5", "tokens=None")),
        ((*QUICK, "--devices", "0"), ("devices", "at least 1")),
        ((*QUICK, "drafter.step=3"), ("drafter.step", "drafter.steps")),
        ((*QUICK, "states.source=live", "--placement", "absent"), ("placement=absent", "captured")),
        ((str(RECIPES / "bita_smollm2.yaml"), "--placement", "absent"), ("prompt_tokens", "placement=absent")),
        ((str(RECIPES / "heads_smollm2.yaml"),), ("fit_decision_heads", "no plan")),
        ((*QUICK, "target.name=/no/such/folder"), ("config.json", "smollm2 or tiny")),
        ((), ("no recipe",)),
    ],
)
def test_refusals(capsys: pytest.CaptureFixture[str], argv: tuple[str, ...], words: tuple[str, ...]) -> None:
    code = main(["plan", *argv])
    error = capsys.readouterr().err
    assert code == 2
    assert len(error.strip().splitlines()) == 1
    assert all(word in error for word in words), error


@pytest.mark.parametrize("name", ["consistency_quick", "convert_quick", "certainty_quick"])
def test_trainings_inside_the_target(capsys: pytest.CaptureFixture[str], name: str) -> None:
    """Recipes of the other scripts: LoRA of the rank they say, on the tiny target's projections."""
    code, found = planned(capsys, str(RECIPES / f"{name}.yaml"), "target.name=tiny", "data.limit=24")
    assert code == 0
    assert 0 < found["trained"] < found["frozen"]
    assert found["memory"]["activations"] > 0


def test_moments_are_the_optimisers() -> None:
    module = torch.nn.Module()
    module.register_parameter("fc", torch.nn.Parameter(torch.zeros(4, 6)))
    module.register_parameter("lm_head", torch.nn.Parameter(torch.zeros(3, 5)))
    module.register_parameter("norm", torch.nn.Parameter(torch.zeros(7)))
    assert plan_run.moment_numbers(module, OptimConfig()) == 2 * (24 + 15 + 7)
    assert plan_run.moment_numbers(module, OptimConfig(name="sgd")) == 0
    assert plan_run.moment_numbers(module, OptimConfig(name="muon")) == 24 + 2 * (15 + 7)


@pytest.mark.parametrize("name", DEVICES)
def test_devices_have_their_sources(name: str) -> None:
    device = device_of(name)
    assert device.source and device.memory_gb > 0 and device.tflops > 0 and device.bandwidth > 0


def test_large_targets_have_the_numbers_they_are_known_by() -> None:
    """A 70B target takes seconds and no memory to speak of; its numbers are those of its model card."""
    from transformers import AutoConfig

    known = {
        "Llama-3.1-8B-Instruct": 8_030_261_248,
        "Qwen3-32B": 32_762_123_264,
        "Llama-3.3-70B-Instruct": 70_553_706_496,
    }
    spec = importlib.util.spec_from_file_location("plans", RECIPES.parent / "tests/bench/plan.py")
    assert spec is not None and spec.loader is not None
    bench = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(bench)
    for name, settings in bench.LARGE.items():
        with Outline() as shapes, shapes.counted_as("target"):
            target = outline_target(AutoConfig.for_model(**settings), name, "bfloat16")
        assert sum(p.numel() for p in target.model.parameters()) == known[name.split("/")[1]]
        assert shapes.live["target"] == pytest.approx(2 * known[name.split("/")[1]], rel=1e-3)


def test_a_plan_leaves_the_random_numbers_alone() -> None:
    work = work_of(recipe("eagle3"))
    torch.manual_seed(5)
    wanted = torch.rand(3)
    torch.manual_seed(5)
    make_plan(work, 1, "ddp", "replicated")
    assert torch.equal(torch.rand(3), wanted)


def test_without_weights_nothing_is_loaded(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """A folder with nothing but a config.json, and counts in the place of data; its path is not printed."""
    (tmp_path / "config.json").write_text(json.dumps(load_config("tiny")[1].to_dict()))
    line = [str(RECIPES / "quick.yaml"), f"target.name={tmp_path}", "--samples", "100", "--tokens", "40000"]
    assert main(["plan", *line]) == 0
    out = capsys.readouterr().out
    assert "49,344 trained numbers" in out
    assert str(tmp_path) not in out


def test_scripts_say_the_short_form(monkeypatch: pytest.MonkeyPatch) -> None:
    """Three lines before a training starts; none for tiny targets, and a plan that fails stops nothing."""
    run, samples = recipe("medusa"), work_of(recipe("medusa")).text.samples
    process: Any = SimpleNamespace(
        is_main_process=True, num_processes=1, distributed_type=DistributedType.NO, device=torch.device("cpu")
    )
    said: list[str] = []
    script.say_plan(run, tiny_target(), samples, process, said.append)
    assert said == []
    monkeypatch.setattr(script, "NEEDS_NO_PLAN", 0)
    script.say_plan(run, tiny_target(), samples, process, said.append)
    lines = said[0].splitlines()
    assert [line.split(":")[0] for line in lines] == ["plan"] * 3
    assert "largest term" in lines[1] and "10 steps" in lines[2]

    def fails(*_: Any) -> None:
        raise RuntimeError("no shapes")

    monkeypatch.setattr(plan_run, "make_plan", fails)
    script.say_plan(run, tiny_target(), samples, process, said.append)
    assert said[1:] == ["plan: none (no shapes)"]
