"""Exact resume, atomic checkpoints, signals and injected faults. Run: pytest tests/test_resume.py"""

from __future__ import annotations

import errno
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import pytest
import torch
from accelerate import Accelerator
from safetensors.torch import load_file

from draftsmith.configs.parse import Failure
from draftsmith.configs.training import (
    BatchConfig,
    BudgetConfig,
    EvalConfig,
    LogConfig,
    OptimConfig,
    SaveConfig,
    TrainConfig,
)
from draftsmith.data.batch import Batch, TargetOut
from draftsmith.data.draft_vocab import choose_draft_ids
from draftsmith.data.encode import Sample
from draftsmith.models import METHODS
from draftsmith.models.target import Target, live_states
from draftsmith.train import checkpoint
from draftsmith.train.loop import Summary, train
from draftsmith.train.stream import Stream

SETTINGS: dict[str, dict[str, Any]] = {
    "eagle3": {"steps": 2},
    "hydra": {"heads": 2, "dropout": 0.2},
    "medusa": {"heads": 2},
    "eagle": {"steps": 2},
    "dual_view": {"block": 2, "rank": 4},
    "prompt_tokens": {"tokens": 2, "prefix": 2},
    "peagle": {"depths": 3, "layers": 2},
    "draft_model": {"on_policy": 0.5},
    "pard": {"depths": 3},
    "dflash": {"block": 4, "layers": 1, "anchors": 3, "variable_prefix": True},
    "dspark": {"block": 3, "layers": 1, "anchors": 3, "rank": 8},
}


def make_samples(count: int = 7) -> list[Sample]:
    generator = torch.Generator().manual_seed(0)
    lengths = torch.randint(12, 17, (count,), generator=generator)
    return [
        Sample(i, torch.randint(250, (int(n),), generator=generator), torch.arange(int(n)) >= 3)
        for i, n in enumerate(lengths)
    ]


def config_of(method: str, run: Path, **changes: Any) -> TrainConfig:
    config = TrainConfig(
        method=method,
        drafter=METHODS[method].Config(**SETTINGS.get(method, {})),
        batch=BatchConfig(row_length=16, rows=1, accumulate=2),  # 7 rows, 4 windows: step 10 is mid-epoch
        budget=BudgetConfig(steps=20),
        optim=OptimConfig(lr=1e-3, warmup=0.1),
        evaluate=EvalConfig(every=1000, probe_every=0),
        log=LogConfig(every=1, progress=False),
        precision="fp32",
        run=str(run),
    )
    return replace(config, **changes)


def launch(
    config: TrainConfig, target: Target, on_micro_batch: Callable[[int], None] | None = None
) -> tuple[Any, Summary]:
    """One launch of a run, as `distill_draft.py` does it, on live states. `on_micro_batch(n)` is called before the nth."""
    torch.manual_seed(config.seed)
    drafter: Any = METHODS[config.method](
        config.drafter, target.facts, choose_draft_ids(torch.arange(256), 200, target.facts.eos_ids)
    )
    drafter.init_from_target(target)
    count = 0

    def states_of(batch: Batch) -> TargetOut:
        nonlocal count
        if on_micro_batch:
            on_micro_batch(count)
        count += 1
        return live_states(target, drafter, batch)

    batch = config.batch
    stream = Stream(
        make_samples(), row_length=batch.row_length, rows=batch.rows, accumulate=batch.accumulate, seed=config.seed
    )
    folder = Path(config.run)
    folder.mkdir(parents=True, exist_ok=True)
    return drafter, train(config, Accelerator(cpu=True), drafter, stream, states_of, folder)


def losses(run: Path) -> list[float]:
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return [x["loss"] for x in rows if x["kind"] == "train"]


def assert_same_end(one: Path, two: Path) -> None:
    """Losses of every step, weights, moments, generators and counters, bit for bit."""
    assert losses(one) == losses(two) and len(losses(one)) == 20
    (a, _), (b, _) = (checkpoint.newest(run / "checkpoints") for run in (one, two))
    assert a is not None and b is not None and a.name == b.name == "step-00000020"
    for name in ("model", "optimiser", "rng"):
        left, right = load_file(a / f"{name}.safetensors"), load_file(b / f"{name}.safetensors")
        assert left.keys() == right.keys()
        assert all(torch.equal(left[k], right[k]) for k in left), name
    states = [checkpoint.read_state(x)[0] for x in (a, b)]
    for state in states:
        state.seconds = 0.0  # the only thing that is measured
    assert states[0] == states[1]


@pytest.mark.parametrize(("method", "optimiser"), [*((method, "adamw") for method in METHODS), ("eagle3", "muon")])
def test_twenty_steps_equal_ten_and_ten(
    method: str, optimiser: Literal["adamw", "muon"], tiny: Callable[..., Target], tmp_path: Path
) -> None:
    config = config_of(method, tmp_path / "straight", optim=OptimConfig(name=optimiser, lr=1e-3, warmup=0.1))
    _, summary = launch(config, tiny())
    assert summary.state.done and summary.state.epoch == 5
    halves = replace(config, run=str(tmp_path / "halves"))
    _, first = launch(replace(halves, budget=BudgetConfig(steps=20, stop_at=10)), tiny())
    assert not first.state.done and (first.state.step, first.state.window) == (10, 2)
    launch(halves, tiny())
    assert_same_end(tmp_path / "straight", tmp_path / "halves")


@pytest.mark.parametrize("method", ["eagle3", "hydra"])
@pytest.mark.parametrize("micro_batch", [11, 12], ids=["first-of-window", "inside-window"])
def test_a_signal_mid_epoch_or_inside_accumulation_costs_nothing(
    method: str, micro_batch: int, tiny: Callable[..., Target], tmp_path: Path
) -> None:
    config = config_of(method, tmp_path / "straight")
    launch(config, tiny())
    stopped = replace(config, run=str(tmp_path / "stopped"))

    def kill(n: int) -> None:
        if n == micro_batch:
            os.kill(os.getpid(), signal.SIGTERM)

    _, summary = launch(stopped, tiny(), kill)
    assert summary.signal == signal.SIGTERM and (summary.state.step, summary.state.window) == (6, 2)
    launch(stopped, tiny())
    assert_same_end(tmp_path / "straight", tmp_path / "stopped")


def test_moments_are_fp32_and_steps_survive(tiny: Callable[..., Target], tmp_path: Path) -> None:
    """B22: the optimiser's state keeps its precision through a save."""
    launch(config_of("eagle3", tmp_path, budget=BudgetConfig(steps=3)), tiny())
    path, _ = checkpoint.newest(tmp_path / "checkpoints")
    assert path is not None
    tensors = load_file(path / "optimiser.safetensors")
    assert {k.rpartition("|")[2] for k in tensors} == {"exp_avg", "exp_avg_sq", "step"}
    assert all(t.dtype == torch.float32 for t in tensors.values())
    assert all(float(t) == 3 for k, t in tensors.items() if k.endswith("|step"))
    assert sorted(p.suffix for p in path.iterdir()) == [".json"] * 2 + [".safetensors"] * 3


def test_another_setting_is_refused_by_name(tiny: Callable[..., Target], tmp_path: Path) -> None:
    config = config_of("eagle3", tmp_path, budget=BudgetConfig(steps=2))
    launch(config, tiny())
    changed = replace(config, optim=replace(config.optim, lr=5e-4), budget=BudgetConfig(steps=4))
    with pytest.raises(ValueError, match=r"optim\.lr: was 0\.001, is 0\.0005"):
        launch(changed, tiny())
    longer = replace(
        config, budget=BudgetConfig(steps=4), save=SaveConfig(keep=1), log=LogConfig(every=2, progress=False)
    )
    assert launch(longer, tiny())[1].state.step == 4


# Damage


@pytest.fixture
def run_with_two(tiny: Callable[..., Target], tmp_path: Path) -> Path:
    """A run folder with complete checkpoints at steps 2 and 4."""
    launch(config_of("medusa", tmp_path, budget=BudgetConfig(steps=4), save=SaveConfig(steps=2)), tiny())
    return tmp_path


@pytest.mark.parametrize(
    "file", ["model.safetensors", "optimiser.safetensors", "rng.safetensors", "state.json", "files.json"]
)
@pytest.mark.parametrize("fault", ["truncated", "flipped", "missing"])
def test_a_damaged_checkpoint_is_passed_over(run_with_two: Path, file: str, fault: str) -> None:
    folder = run_with_two / "checkpoints"
    path = folder / "step-00000004" / file
    content = bytearray(path.read_bytes())
    if fault == "truncated":
        path.write_bytes(content[: len(content) // 2])
    elif fault == "flipped":
        # Of the list itself, a bit of a checksum (one of its white space would change nothing).
        at = re.search(rb"[0-9a-f]{64}", content).start() if file == "files.json" else len(content) // 2  # type: ignore[union-attr]
        content[at] ^= 1
        path.write_bytes(content)
    else:
        path.unlink()
    newest, damaged = checkpoint.newest(folder)
    assert newest == folder / "step-00000002" and damaged == ["step-00000004"]


def test_a_full_disk_leaves_earlier_checkpoints_and_no_half_one(
    run_with_two: Path, tiny: Callable[..., Target], monkeypatch: pytest.MonkeyPatch
) -> None:
    real, calls = checkpoint.save_file, []

    def full(tensors: Any, path: Path) -> None:
        calls.append(path)
        if len(calls) == 2:
            raise OSError(errno.ENOSPC, "No space left on device", str(path))
        real(tensors, path)

    monkeypatch.setattr(checkpoint, "save_file", full)
    with pytest.raises(Failure, match=r"step 6 could not be written.*No space left.*earlier ones are untouched"):
        launch(config_of("medusa", run_with_two, budget=BudgetConfig(steps=6), save=SaveConfig(steps=2)), tiny())
    names = sorted(p.name for p in (run_with_two / "checkpoints").iterdir())
    assert names == ["step-00000002", "step-00000004"]
    assert checkpoint.newest(run_with_two / "checkpoints")[0] is not None


def test_a_kill_while_saving_leaves_nothing_that_is_picked(run_with_two: Path, tiny: Callable[..., Target]) -> None:
    """What a SIGKILL between two writes leaves: a hidden folder. It is never picked, and swept by the next save."""
    folder = run_with_two / "checkpoints"
    half = folder / ".step-00000006.123"
    shutil.copytree(folder / "step-00000004", half)
    (half / "files.json").unlink()
    assert checkpoint.newest(folder)[0] == folder / "step-00000004"
    launch(config_of("medusa", run_with_two, budget=BudgetConfig(steps=6), save=SaveConfig(steps=2)), tiny())
    assert not half.exists()


def test_another_format_is_refused(run_with_two: Path) -> None:
    path = run_with_two / "checkpoints" / "step-00000004"
    content = json.loads((path / "state.json").read_text()) | {"format": 99}
    (path / "state.json").write_text(json.dumps(content))
    with pytest.raises(ValueError, match="format 99, this version reads 1"):
        checkpoint.read_state(path)


def test_metrics_beyond_the_checkpoint_are_dropped(run_with_two: Path, tiny: Callable[..., Target]) -> None:
    with (run_with_two / "metrics.jsonl").open("a") as file:
        file.write('{"kind": "train", "step": 5, "loss": 1.0}\n{"kind": "tr')
    launch(config_of("medusa", run_with_two, budget=BudgetConfig(steps=6), save=SaveConfig(steps=2)), tiny())
    steps = [json.loads(x)["step"] for x in (run_with_two / "metrics.jsonl").read_text().splitlines()]
    assert steps == [1, 2, 3, 4, 5, 6]


# Signals, on a real process


def start_run(run: Path, *extra: str) -> subprocess.Popen[str]:
    root = Path(__file__).resolve().parent.parent
    command = [sys.executable, str(root / "train/distill_draft.py"), "--config", str(root / "configs/quick.yaml")]
    command += [
        "budget.steps=100000",
        "states.source=live",
        "data.limit=8",
        f"run={run}",
        "log.every=1",
        "evaluate.every=100000",
        *extra,
    ]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


def wait_for_steps(run: Path, process: subprocess.Popen[str], seconds: float = 90) -> None:
    end = time.monotonic() + seconds
    while time.monotonic() < end and process.poll() is None:
        if (run / "metrics.jsonl").exists() and '"train"' in (run / "metrics.jsonl").read_text():
            return
        time.sleep(0.1)
    process.kill()
    raise AssertionError(process.communicate()[0])


@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 143), (signal.SIGINT, 130)])
def test_signals_save_and_exit_with_their_code(number: signal.Signals, code: int, tmp_path: Path) -> None:
    process = start_run(tmp_path)
    wait_for_steps(tmp_path, process)
    process.send_signal(number)
    began = time.monotonic()
    out, _ = process.communicate(timeout=30)
    assert process.returncode == code and time.monotonic() - began < 30, out
    assert "the same command goes on from there" in out and "Traceback" not in out
    assert checkpoint.newest(tmp_path / "checkpoints")[0] is not None


def test_a_second_signal_ends_at_once() -> None:
    """What a launcher passes on at once is no second signal; what comes later is, and ends what the first waits for."""
    program = """
import os, signal, sys, time
from draftsmith.train import loop
loop.ECHO = 0.2
with loop.Stop() as stop:
    os.kill(os.getpid(), signal.SIGTERM)
    os.kill(os.getpid(), signal.SIGTERM)
    print("asked", stop.signal, flush=True)
    time.sleep(0.3)
    os.kill(os.getpid(), signal.SIGINT)
    time.sleep(60)
    print("still here")
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=50)
    assert (done.returncode, done.stdout) == (130, "asked 15\n"), done.stderr


def test_sigkill_loses_no_more_than_one_interval(tmp_path: Path) -> None:
    process = start_run(tmp_path, "save.steps=3")
    end = time.monotonic() + 90
    while time.monotonic() < end and not list(tmp_path.glob("checkpoints/step-*")):
        time.sleep(0.05)
    time.sleep(0.4)
    process.kill()
    process.communicate()
    newest, _ = checkpoint.newest(tmp_path / "checkpoints")
    steps = [json.loads(x)["step"] for x in (tmp_path / "metrics.jsonl").read_text().splitlines()[:-1]]
    assert newest is not None and max(steps) - checkpoint.read_state(newest)[0].step <= 3 + 1
