"""Two processes, by DDP and by DeepSpeed ZeRO-2, against one. One launch per engine runs every method.

Run: pytest tests/test_distributed.py (about a minute)
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
from safetensors.torch import load_file

from draftsmith.configs.training import BatchConfig, LogConfig, OptimConfig, TrainConfig
from draftsmith.models import METHODS
from draftsmith.train import engine

ROOT = Path(__file__).resolve().parent.parent
WORKER = str(ROOT / "tests/distributed_worker.py")
FAILED = Path("failed")
ENGINES = {"ddp": "MULTI_CPU", "zero2": "DEEPSPEED"}


def environment(**more: str) -> dict[str, str]:
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"  # ninja is looked up there
    kept = {k: v for k, v in os.environ.items() if not k.startswith(("ACCELERATE_", "DRAFTSMITH_"))}
    return kept | {"OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "PASSIVE", "PATH": path} | more


def accelerate(*args: str, **env: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "accelerate.commands.launch", *args]
    return subprocess.run(command, env=environment(**env), cwd=ROOT, capture_output=True, text=True, timeout=600)


@pytest.fixture(scope="session")
def one(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The end of every method's run with one process."""
    out = tmp_path_factory.mktemp("one")
    result = subprocess.run(
        [sys.executable, WORKER, str(out), "all"], env=environment(), cwd=ROOT, capture_output=True, text=True
    )
    assert result.returncode == 0, result.stderr[-4000:]
    return out


@pytest.fixture(scope="session")
def two(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Engine name -> folder of one launch with two processes; launched when first asked for."""
    done: dict[str, Path] = {}

    def launched(name: str) -> Path:
        assert done.get(name) != FAILED, f"the launch of {name} has failed before"
        if name not in done:
            done[name] = FAILED
            out = tmp_path_factory.mktemp(name)
            if name == "ddp":
                args = ["--multi_gpu", "--num_processes", "2", "--num_machines", "1", "--mixed_precision", "no"]
                result = accelerate(
                    *args, "--dynamo_backend", "no", WORKER, str(out), "everything", ACCELERATE_USE_CPU="true"
                )
            else:
                args = ["--config_file", "configs/accelerate/zero2.yaml", "--num_processes", "2"]
                result = accelerate(*args, WORKER, str(out), "everything", DS_ACCELERATOR="cpu")
            assert result.returncode == 0, result.stderr[-4000:]
            done[name] = out
        return done[name]

    return launched


def facts(folder: Path, rank: int) -> dict[str, Any]:
    return json.loads((folder / f"rank{rank}.json").read_text())


def losses(folder: Path) -> list[float]:
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [x["loss"] for x in rows if x["kind"] == "train"]


def same_bits(left: Path, right: Path) -> bool:
    a, b = load_file(left), load_file(right)
    return a.keys() == b.keys() and all(torch.equal(a[k], b[k]) for k in a)


@pytest.mark.parametrize("name", ENGINES)
@pytest.mark.parametrize("method", METHODS)
def test_two_processes_equal_one(name: str, method: str, one: Path, two: Any) -> None:
    """Losses within 1e-6 relative, gradient norms and all but a few weights within 1e-5, held-out figures alike, ranks
    bit-equal."""
    alone, both = one / method, two(name) / "all" / method
    assert [facts(both, r)["world"] for r in range(2)] == [2, 2] and facts(both, 0)["engine"] == ENGINES[name]
    assert losses(both) == pytest.approx(losses(alone), rel=1e-6, abs=1e-6)
    a, b = load_file(alone / "rank0.safetensors"), load_file(both / "rank0.safetensors")
    assert a.keys() == b.keys()
    for key in a:
        off = (b[key].float() - a[key].float()).abs()
        # Adam divides a gradient by its own size: where that is rounding noise, it decides on a share of a step (1e-3).
        assert off.max() < 1e-4 and (off > 1e-5).sum() <= max(1, off.numel() // 1000), (key, float(off.max()))
    assert same_bits(both / "rank0.safetensors", both / "rank1.safetensors")
    assert facts(both, 0)["heldout"] == pytest.approx(facts(alone, 0)["heldout"], abs=1e-5)


@pytest.mark.parametrize("name", ENGINES)
@pytest.mark.parametrize("method", METHODS)
def test_resume_is_exact_to_the_bit(name: str, method: str, two: Any) -> None:
    straight, halves = two(name) / "all" / method, two(name) / "halves" / method
    assert losses(straight) == losses(halves) and len(losses(halves)) == 6
    for file in ("model", "optimiser", "rng"):
        assert same_bits(*(x / f"checkpoints/step-00000006/{file}.safetensors" for x in (straight, halves))), file


def test_checkpoints_do_not_depend_on_the_engine(one: Path, two: Any) -> None:
    """ZeRO's shards are gathered under the parameters' names: any engine and number of processes can go on from them."""
    for method in METHODS:
        a = load_file(one / method / "checkpoints/step-00000006/optimiser.safetensors")
        b = load_file(two("zero2") / "all" / method / "checkpoints/step-00000006/optimiser.safetensors")
        assert a.keys() == b.keys()
        for key in a:
            torch.testing.assert_close(b[key], a[key], atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("name", ENGINES)
def test_a_process_without_a_supervised_token_does_not_hang_the_other(name: str, two: Any) -> None:
    folder = two(name) / "faults" / "empty"
    assert facts(folder, 0)["steps"] == facts(folder, 1)["steps"] > 0
    assert same_bits(folder / "rank0.safetensors", folder / "rank1.safetensors")


@pytest.mark.parametrize("name", ENGINES)
def test_a_nan_on_one_process_skips_the_step_on_both(name: str, two: Any) -> None:
    """It comes in the second window's first micro-batch; the skipped step leaves the ranks bit-equal and finite."""
    folder = two(name) / "faults" / "poison"
    assert [(facts(folder, r)["steps"], facts(folder, r)["skipped"]) for r in range(2)] == [(3, 1)] * 2
    assert same_bits(folder / "rank0.safetensors", folder / "rank1.safetensors")
    assert all(torch.isfinite(t).all() for t in load_file(folder / "rank0.safetensors").values())


# Launchers that start something else than what was asked for, without an error


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
