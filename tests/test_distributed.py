"""Two processes, by DDP and by DeepSpeed ZeRO-1, 2 and 3, against one. One launch runs all engines, and every method.

Run: pytest tests/test_distributed.py (a minute and a half)
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate.commands.launch import _validate_launch_command, launch_command_parser
from accelerate.utils.launch import prepare_deepspeed_cmd_env
from distributed_worker import FEW, STRAIGHT, ZERO, launched_by
from safetensors.torch import load_file

from draftsmith.configs.training import BatchConfig, LogConfig, OptimConfig, TrainConfig
from draftsmith.inference.exporters.folder import refuse_non_finite
from draftsmith.train import engine

ROOT = Path(__file__).resolve().parent.parent
WORKER = str(ROOT / "tests/distributed_worker.py")
FAILED = Path("failed")
ENGINES = ("ddp", *ZERO)


def environment(**more: str) -> dict[str, str]:
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"  # ninja is looked up there
    kept = {k: v for k, v in os.environ.items() if not k.startswith(("ACCELERATE_", "DRAFTSMITH_"))}
    return kept | {"OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "PASSIVE", "PATH": path} | more


def accelerate(*args: str, **env: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "accelerate.commands.launch", *args]
    return subprocess.run(command, env=environment(**env), cwd=ROOT, capture_output=True, text=True, timeout=600)


def launched(out: Path, job: str, *prefix: str) -> Path:
    command = [sys.executable, *prefix, WORKER, str(out), job]
    result = subprocess.run(
        command, env=environment(DS_ACCELERATOR="cpu"), cwd=ROOT, capture_output=True, text=True, timeout=900
    )
    assert result.returncode == 0, result.stderr[-4000:]
    return out


@pytest.fixture(scope="session")
def one(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The end of every method's run with one process."""
    return launched(tmp_path_factory.mktemp("one"), "one")


@pytest.fixture(scope="session")
def two(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What two processes leave, by engine."""
    torchrun = ("-m", "torch.distributed.run", "--nproc_per_node", "2", "--master_port", "0", "--rdzv_backend", "c10d")
    return launched(tmp_path_factory.mktemp("two"), "two", *torchrun, "--rdzv_endpoint", "localhost:0")


def facts(folder: Path, rank: int) -> dict[str, Any]:
    return json.loads((folder / f"rank{rank}.json").read_text())


def losses(folder: Path) -> list[float]:
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [x["loss"] for x in rows if x["kind"] == "train"]


def same_bits(left: Path, right: Path) -> bool:
    a, b = load_file(left), load_file(right)
    return a.keys() == b.keys() and all(torch.equal(a[k], b[k]) for k in a)


def assert_near(one: Path, two: Path) -> None:
    """All but a few weights within 1e-5."""
    a, b = load_file(one), load_file(two)
    assert a.keys() == b.keys()
    for key in a:
        off = (b[key].float() - a[key].float()).abs()
        # Adam divides a gradient by its own size: where that is rounding noise, it decides on a share of a step (1e-3).
        assert off.max() < 1e-4 and (off > 1e-5).sum() <= max(1, off.numel() // 1000), (key, float(off.max()))


@pytest.mark.parametrize(("name", "method"), [(name, method) for name in STRAIGHT for method in STRAIGHT[name]])
def test_two_processes_equal_one(name: str, method: str, one: Path, two: Path) -> None:
    """Losses within 1e-6 relative, gradient norms and all but a few weights within 1e-5, held-out figures alike, ranks
    bit-equal."""
    alone, both = one / method, two / name / "straight" / method
    assert [(facts(both, r)["world"], facts(both, r)["engine"]) for r in range(2)] == [(2, name.split("_")[0])] * 2
    assert losses(both) == pytest.approx(losses(alone), rel=1e-6, abs=1e-6)
    assert_near(alone / "rank0.safetensors", both / "rank0.safetensors")
    assert same_bits(both / "rank0.safetensors", both / "rank1.safetensors")
    assert facts(both, 0)["heldout"] == pytest.approx(facts(alone, 0)["heldout"], abs=1e-5)


def assert_same_end(one: Path, two: Path) -> None:
    assert losses(one) == losses(two) and len(losses(two)) == 6
    for file in ("model", "optimiser", "rng"):
        assert same_bits(*(x / f"checkpoints/step-00000006/{file}.safetensors" for x in (one, two))), file


@pytest.mark.parametrize(("name", "method"), [(n, m) for n in STRAIGHT for m in FEW if m in STRAIGHT[n]])
def test_resume_is_exact_to_the_bit(name: str, method: str, two: Path) -> None:
    """In the middle of an epoch; moments are fp32 (B22)."""
    straight, halves = (two / name / kind / method for kind in ("straight", "halves"))
    assert_same_end(straight, halves)
    moments = load_file(halves / "checkpoints/step-00000003/optimiser.safetensors")
    assert moments and all(t.dtype == torch.float32 for t in moments.values())


@pytest.mark.parametrize("name", ENGINES)
def test_a_signal_inside_accumulation_costs_nothing(name: str, two: Path) -> None:
    """It comes to one process of two; both stop, and the window is done again."""
    assert_same_end(two / name / "straight/eagle3", two / name / "stopped/eagle3")
    assert facts(two / name / "stopped/first", 0)["signal"] == facts(two / name / "stopped/first", 1)["signal"] == 15


@pytest.mark.parametrize("name", ZERO)
@pytest.mark.parametrize("method", FEW)
def test_checkpoints_do_not_depend_on_the_engine(name: str, method: str, one: Path, two: Path) -> None:
    """ZeRO's shards are gathered under the parameters' names."""
    a = load_file(one / method / "checkpoints/step-00000006/optimiser.safetensors")
    b = load_file(two / name / "straight" / method / "checkpoints/step-00000006/optimiser.safetensors")
    assert a.keys() == b.keys()
    for key in a:
        torch.testing.assert_close(b[key], a[key], atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("change", ["ddp-zero3", "zero3-zero1", "zero2-ddp"])
def test_a_run_goes_on_under_another_engine(change: str, one: Path, two: Path) -> None:
    folder = two / "handed" / change
    assert facts(folder, 0)["engine"] == change.split("-")[1]
    assert losses(folder) == pytest.approx(losses(one / "eagle3"), rel=1e-6, abs=1e-6)
    assert_near(one / "eagle3/rank0.safetensors", folder / "rank0.safetensors")


@pytest.mark.parametrize("name", ENGINES)
def test_a_process_without_a_supervised_token_does_not_hang_the_other(name: str, two: Path) -> None:
    """B28; micro-batches of an odd number of rows leave the second process padding, too."""
    folder = two / name / "faults" / "empty"
    assert facts(folder, 0)["steps"] == facts(folder, 1)["steps"] == 5
    assert same_bits(folder / "rank0.safetensors", folder / "rank1.safetensors")


@pytest.mark.parametrize("name", ENGINES)
def test_a_nan_on_one_process_skips_the_step_on_both(name: str, two: Path) -> None:
    """It comes in the second window's first micro-batch; the skipped step leaves the ranks bit-equal and finite."""
    folder = two / name / "faults" / "poison"
    assert [(facts(folder, r)["steps"], facts(folder, r)["skipped"]) for r in range(2)] == [(3, 1)] * 2
    assert same_bits(folder / "rank0.safetensors", folder / "rank1.safetensors")
    assert all(torch.isfinite(t).all() for t in load_file(folder / "rank0.safetensors").values())


@pytest.mark.parametrize("name", ZERO)
@pytest.mark.parametrize("method", FEW)
def test_the_frozen_target_is_left_alone_and_there_is_one_set_of_masters(
    name: str, method: str, one: Path, two: Path
) -> None:
    """B27: the teacher's logits are those of one process; optimisers hold the drafter's parameters only, filled up to equal
    parts, and update them in place."""
    alone, both = facts(one / method, 0), [facts(two / name / "straight" / method, rank) for rank in range(2)]
    for rank in both:
        torch.testing.assert_close(torch.tensor(rank["teacher"]), torch.tensor(alone["teacher"]), atol=1e-5, rtol=0)
        assert rank["copied"] == 0
    filling = sum(rank["updated"] for rank in both) - alone["trained"]
    assert 0 <= filling <= 64


def test_zero3_exports_whole_tensors(one: Path, two: Path) -> None:
    """B27: by the script itself, with a probe during training: names and shapes of one process's export, near values."""
    a, b = (load_file(folder / "script/export/model.safetensors") for folder in (one, two))
    assert {n: t.shape for n, t in a.items()} == {n: t.shape for n, t in b.items()} and all(
        t.numel() for t in b.values()
    )
    for name in a:
        torch.testing.assert_close(b[name], a[name], atol=1e-4, rtol=1e-2)  # bf16
    saved = load_file(two / "script/checkpoints/step-00000003/model.safetensors")
    both = saved.keys() & b.keys()
    assert len(both) > 9 and all(torch.equal(saved[name].to(b[name].dtype), b[name]) for name in both)
    probes = [[json.loads(x) for x in (d / "script/metrics.jsonl").read_text().splitlines()] for d in (one, two)]
    assert [[x["tau"] for x in lines if x["kind"] == "probe"] for lines in probes] == [[pytest.approx(1, abs=1)]] * 2


def test_an_export_with_an_empty_tensor_is_refused() -> None:
    with pytest.raises(ValueError, match=r"fc\.weight without a value"):
        refuse_non_finite({"fc.weight": torch.zeros(0), "norm.weight": torch.ones(2)}, "export of eagle3")


# Launchers that start something else than what was asked for, without an error


@pytest.mark.parametrize("name", [*ZERO, "zero2_offload"])
def test_shipped_files_start_what_tests_run(name: str) -> None:
    """The environment that `accelerate launch --config_file` makes of a file is the one of the runs above."""
    args = launch_command_parser().parse_args(["--config_file", str(ROOT / f"configs/accelerate/{name}.yaml"), "x.py"])
    args, defaults, _ = _validate_launch_command(args)
    args.deepspeed_fields_from_accelerate_config = ",".join(defaults.deepspeed_config)
    _, made = prepare_deepspeed_cmd_env(args)
    assert launched_by(name).items() <= made.items() and args.num_processes == 2
    settings = json.loads((ROOT / f"configs/deepspeed/{name}.json").read_text())
    assert settings["zero_optimization"]["stage"] == int(name[4])
    engine.fill_deepspeed(settings, config_of())
    assert settings["gradient_accumulation_steps"] == 1 and not settings["bf16"]["enabled"]


def test_another_engine_than_the_recipe_names_is_refused() -> None:
    with pytest.raises(
        ValueError, match=r"engine=zero3, the launcher started ddp: use .*configs/accelerate/zero3\.yaml"
    ):
        engine.start(config_of(engine="zero3"))
    assert engine.engine_of(engine.start(config_of(engine="ddp"))) == "ddp"


def test_one_process_where_two_were_asked_for_is_refused(tmp_path: Path) -> None:
    args = [
        "--cpu",
        "--num_processes",
        "2",
        "train/distill_draft.py",
        "--config",
        "configs/quick.yaml",
        f"run={tmp_path / 'r'}",
    ]
    result = accelerate(*args, DRAFTSMITH_PROCESSES="2")
    assert result.returncode != 0 and "asks for 2 processes, 1 take part" in result.stderr
    assert not (tmp_path / "r").exists()


def config_of(**changes: Any) -> TrainConfig:
    return replace(TrainConfig(method="medusa", log=LogConfig(progress=False)), **changes)


def test_recipe_and_environment_name_the_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ValueError, match="processes asks for 2 processes, 1 take part"):
        engine.start(config_of(processes=2))
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(ValueError, match="WORLD_SIZE asks for 2 processes, 1 take part"):
        engine.start(config_of())
    monkeypatch.setenv("WORLD_SIZE", "1")
    assert engine.start(config_of(processes=1)).num_processes == 1


def test_shapes_that_never_return_cost_no_memory() -> None:
    """200 products in bf16, each of another shape: what is compiled for them does not stay. (It is 130 MB where nobody says
    how many to keep.) Who did is heard."""
    program = """
import os, torch
from pathlib import Path
from draftsmith.train.engine import bound_cached_products
def resident():
    return next(int(x.split()[1]) for x in Path("/proc/self/status").read_text().splitlines() if x.startswith("VmRSS"))
bound_cached_products()
weight = torch.randn(64, 64, dtype=torch.bfloat16)
for rows in range(2, 402):
    torch.nn.functional.linear(torch.randn(rows, 64, dtype=torch.bfloat16), weight)
    if rows == 201:
        before = resident()
print(os.environ["LRU_CACHE_CAPACITY"], (resident() - before) // 1024)
"""
    kept = {name: value for name, value in os.environ.items() if not name.endswith("CACHE_CAPACITY")}
    command = [sys.executable, "-c", program]
    done = subprocess.run(command, env=kept, capture_output=True, text=True, check=True)
    capacity, grown = map(int, done.stdout.split())
    assert capacity == engine.CACHED and grown < 20
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("LRU_CACHE_CAPACITY", "7")
        engine.bound_cached_products()
        assert os.environ["LRU_CACHE_CAPACITY"] == "7"


def test_deepspeed_that_is_switched_off_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ACCELERATE_USE_DEEPSPEED", "true")
    monkeypatch.setenv("ACCELERATE_USE_CPU", "true")
    with pytest.raises(ValueError, match="switches DeepSpeed off"):
        engine.start(config_of())


def test_rows_that_are_to_be_split_over_processes_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """By the launcher's context or sequence parallelism, or by a DeepSpeed file; 1 splits nothing."""
    engine.fill_deepspeed({"sequence_parallel_size": 1}, config_of())
    with pytest.raises(ValueError, match=r"sequence_parallel_size of the DeepSpeed file=2 splits rows.*checkpointing"):
        engine.fill_deepspeed({"sequence_parallel_size": 2}, config_of())
    monkeypatch.setenv("PARALLELISM_CONFIG_CP_SIZE", "1")
    monkeypatch.setenv("PARALLELISM_CONFIG_SP_SIZE", "4")
    with pytest.raises(ValueError, match=r"parallelism_config\.sp_size=4 splits rows"):
        engine.start(config_of())


@pytest.mark.parametrize("said", [4, "auto", None])
def test_a_deepspeed_file_that_agrees_is_filled(said: Any) -> None:
    """B58: accumulation 4 in the recipe, with a file saying 4, "auto" or nothing."""
    settings = {} if said is None else {"gradient_accumulation_steps": said}
    engine.fill_deepspeed(settings, config_of(batch=BatchConfig(accumulate=4)))
    assert settings["gradient_accumulation_steps"] == 4 and settings["gradient_clipping"] == OptimConfig.clip


@pytest.mark.parametrize("said", [1, "8", 8])
def test_a_deepspeed_file_that_contradicts_is_refused_with_both_values(said: Any) -> None:
    with pytest.raises(ValueError, match=rf"gradient_accumulation_steps={said!r}, the recipe batch\.accumulate=4"):
        engine.fill_deepspeed({"gradient_accumulation_steps": said}, config_of(batch=BatchConfig(accumulate=4)))


@pytest.mark.parametrize(
    ("settings", "changes", "message"),
    [
        ({"gradient_clipping": 9.0}, {}, "gradient_clipping=9.0, the recipe optim.clip=0.5"),
        ({"optimizer": {"type": "Adam"}}, {}, "section 'optimizer'"),
        ({"bf16": {"enabled": True}}, {}, "keeps fp32 masters"),
        ({}, {"optim": OptimConfig(name="muon")}, "ZeRO cuts them"),
    ],
)
def test_other_contradictions_of_a_deepspeed_file(
    settings: dict[str, Any], changes: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        engine.fill_deepspeed(settings, config_of(**changes))
