"""Injected faults, one run of each family: stops with one line, keeps what was complete, ends as if nothing had been.

Every family goes through all of them in one run folder, and is then compared with an untouched run, bit for bit. Killed and
stuck processes are real ones (tests/forked.py); many more kills: tests/bench/kills.py.
Run: pytest tests/test_faults.py (about two minutes)
"""

from __future__ import annotations

import errno
import json
import os
import shutil
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from bench import kills
from forked import Ranks, last_lines
from safetensors import SafetensorError
from safetensors.torch import load_file

from draftsmith.configs.training import SaveConfig
from draftsmith.models import loading
from draftsmith.train import (
    checkpoint,
    convert_block_diffusion,
    distill_certainty,
    distill_consistency,
    distill_draft,
    engine,
    loop,
    script,
)

ROOT = Path(__file__).resolve().parent.parent
STEPS = 10
SHORT = ["data.limit=12", "data.max_length=256", "batch.row_length=256", "batch.rows=2", f"budget.steps={STEPS}"]
SHORT += ["save.steps=2", "log.every=1", "log.progress=false", "evaluate.conversations=2", "evaluate.every=4"]
DRAFT = ["target.name=tiny", "target.dtype=float32", "precision=fp32", "optim.lr=3e-3", "evaluate.probe_every=0"]
DRAFT += ["evaluate.probe_prompts=0", "data.source=shipped"]

# Family -> its script's main and words; {converted} stands for a converted model.
FAMILIES: dict[str, tuple[Callable[..., int], list[str]]] = {
    "draft head": (distill_draft.main, [*DRAFT, "method=hydra", "drafter.heads=2", "drafter.dropout=0.1"]),
    "parallel drafter": (distill_draft.main, [*DRAFT, "method=dflash", "drafter.block=4", "drafter.layers=1"]),
    "consistency": (
        distill_consistency.main,
        [
            "--config",
            str(ROOT / "configs/consistency_quick.yaml"),
            "adapters.dropout=0.1",
            "guard.max_rise=99",
            "evaluate.probe_every=4",
        ],
    ),
    "diffusion": (
        convert_block_diffusion.main,
        ["--config", str(ROOT / "configs/convert_quick.yaml"), "adapters.dropout=0.1"],
    ),
    "certainty": (
        distill_certainty.main,
        ["--config", str(ROOT / "configs/certainty_quick.yaml"), "init_from={converted}"],
    ),
}


@pytest.fixture(scope="module")
def converted(tmp_path_factory: pytest.TempPathFactory) -> Path:
    run = tmp_path_factory.mktemp("converted") / "run"
    words = ["--config", str(ROOT / "configs/convert_quick.yaml"), *SHORT, "budget.steps=1", f"run={run}"]
    assert convert_block_diffusion.main(words) == 0
    return run / "export"


UNWRITTEN = ("could not be written", "earlier ones are untouched", "goes on from the newest")
# Whose function fails, how, and what is said: a full disk by either of the two that tell it, memory by both devices.
FAILURES: list[tuple[Any, str, Exception, tuple[str, ...]]] = [
    (checkpoint, "save_file", SafetensorError("I/O error: No space left on device (os error 28)"), UNWRITTEN),
    (checkpoint, "sync", OSError(errno.ENOSPC, "No space left on device"), UNWRITTEN),
    (
        engine,
        "backward",
        torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB"),
        ("out of memory: lower",),
    ),
    (checkpoint, "save_file", OSError(errno.EROFS, "Read-only file system", "rng.safetensors"), UNWRITTEN),
    (engine, "backward", RuntimeError("[gloo/pair.cc:553] Connection closed by peer"), ("another process of this",)),
    (engine, "backward", RuntimeError("DefaultCPUAllocator: can't allocate memory"), ("out of memory: lower",)),
]


class Runner:
    """Launches of one family's script in one run folder, as a user sees them."""

    def __init__(self, family: str, run: Path, converted: Path, capsys: pytest.CaptureFixture[str]) -> None:
        self.main, words = FAMILIES[family]
        self.run, self.capsys = run, capsys
        self.argv = [w.replace("{converted}", str(converted)) for w in words] + [*SHORT, f"run={run}"]

    def __call__(self, *more: str) -> tuple[int, str]:
        """(exit code, what was said on stderr beside training lines)."""
        with pytest.raises(SystemExit) as ended:
            script.run(lambda: self.main([*self.argv, *more]))
        said = [line for line in self.capsys.readouterr().err.splitlines() if "Warning" not in line]
        return int(ended.value.code or 0), "\n".join(line for line in said if not line.startswith(("step ", "  ")))

    @property
    def steps(self) -> list[int]:
        """Steps of the complete checkpoints."""
        folder = self.run / "checkpoints"
        return sorted(int(p.name[5:]) for p in folder.glob("step-*") if checkpoint.complete(p))

    def end(self) -> dict[str, Any]:
        """What must be equal."""
        last = self.run / f"checkpoints/step-{STEPS:08d}"
        files = [last / f"{name}.safetensors" for name in ("model", "optimiser", "rng")]
        files.append(self.run / "export/model.safetensors")
        lines = [json.loads(line) for line in (self.run / "metrics.jsonl").read_text().splitlines()]
        figures = [kills.steady(x) for x in lines if x["kind"] != "note"]
        return {str(f.relative_to(self.run)): f.read_bytes() for f in files} | {"metrics": figures}


def at_step(step: int, do: Callable[[], Any]) -> Callable[..., None]:
    """A replacement of `RunLog.advance`, which the loop calls after each step."""
    return lambda self, progress, facts: do() if facts.startswith(f"step {step} ") else None


def fail(error: BaseException) -> Callable[..., Any]:
    def failing(*_: Any, **__: Any) -> Any:
        raise error

    return failing


def one_line(text: str, *words: str) -> None:
    errors = [line for line in text.splitlines() if line.startswith("error: ")]
    assert len(errors) == 1 and "Traceback" not in text, text
    assert all(word in errors[0] for word in words), errors[0]


@pytest.mark.parametrize("family", FAMILIES)
def test_a_run_through_all_faults_ends_as_an_untouched_one(
    family: str, converted: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    untouched = Runner(family, tmp_path / "untouched", converted, capsys)
    code, said = untouched()
    assert code == 0, said
    run = Runner(family, tmp_path / "run", converted, capsys)

    # SIGTERM and Ctrl-C: saved, at once, and with their codes.
    for number, code, step in ((signal.SIGTERM, 143, 1), (signal.SIGINT, 130, 3)):
        with monkeypatch.context() as patch:
            patch.setattr(loop.RunLog, "advance", at_step(step, lambda n=number: os.kill(os.getpid(), n)))
            began = time.monotonic()
            assert run()[0] == code and time.monotonic() - began < 30
        assert run.steps[-1] == step

    # A full or read-only disk; no memory; a process that has gone; twenty bad steps.
    for owner, name, error, words in FAILURES if family == "draft head" else FAILURES[::2]:
        with monkeypatch.context() as patch:
            patch.setattr(owner, name, fail(error))
            code, said = run()
        one_line(said, *words)
        assert code == 1 and run.steps == [2, 3]
    with monkeypatch.context() as patch:
        patch.setattr(loop, "wrong", lambda loss, state: "loss nan")
        code, said = run("budget.steps=30")
    one_line(said, "20 steps in a row were skipped (last: loss nan)", "their samples: [")
    assert code == 1

    # A flipped byte, a truncated file, a missing list, a folder that a kill has left half written: passed over.
    newest = run.run / f"checkpoints/step-{run.steps[-1]:08d}"
    shutil.copytree(newest, half := newest.with_name(".step-00000009.123"))
    (half / "files.json").unlink()
    for number, name in enumerate(("flipped", "truncated", "missing")):
        shutil.copytree(newest, damaged := newest.with_name(f"step-{50 + number:08d}"))
        file = damaged / ("files.json" if name == "missing" else "model.safetensors")
        content = bytearray(file.read_bytes())
        content[len(content) // 2] ^= 1
        file.write_bytes(content if name == "flipped" else content[: len(content) // 2])
        if name == "missing":
            file.unlink()
    code, said = run("budget.stop_at=5")
    assert code == 0 and said.count("is incomplete or damaged, passed over") == 3, said
    assert not half.exists() and run.steps == [4, 5]  # those that were passed over take nobody's place
    assert len(list(newest.parent.glob("damaged-step-0000005*"))) == 3

    code, said = run()
    assert code == 0, said
    one, two = untouched.end(), run.end()
    assert one.keys() == two.keys() and [name for name in one if one[name] != two[name]] == []


def test_saves_come_by_default_and_cannot_be_forgotten() -> None:
    """Every recipe saves every 500 steps or 15 minutes, unless it says more often, and keeps two."""
    assert SaveConfig() == SaveConfig(steps=500, minutes=15.0, keep=2)
    for recipe in (ROOT / "configs").glob("*.yaml"):
        text = recipe.read_text()
        assert "save:" not in text, f"{recipe.name} has saves of its own"


@pytest.fixture
def head(tmp_path: Path, converted: Path, capsys: pytest.CaptureFixture[str]) -> Runner:
    return Runner("draft head", tmp_path / "run", converted, capsys)


def test_a_folder_that_takes_no_files_is_named(head: Runner) -> None:
    code, said = head("run=/sys/draftsmith")  # for root, too
    one_line(said, "/sys/draftsmith")
    assert code in (1, 2)


def test_a_full_disk_leaves_the_files_of_the_run_as_they_were(head: Runner, monkeypatch: pytest.MonkeyPatch) -> None:
    assert head("budget.stop_at=3")[0] == 0
    before = {p: p.read_bytes() for p in head.run.rglob("*") if p.is_file() and p.name != ".lock"}
    real = os.fsync
    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", fail(OSError(errno.ENOSPC, "No space left on device")))
        code, said = head()
    assert os.fsync is real
    one_line(said, "No space left on device", "what was complete is untouched")
    after = {p: p.read_bytes() for p in head.run.rglob("*") if p.is_file() and p.name != ".lock"}
    assert code == 1 and after == before


def test_captured_states_that_are_damaged_are_refused_by_name(head: Runner) -> None:
    """A flipped byte and a truncated shard, after the capture was complete."""
    assert head("budget.stop_at=2")[0] == 0
    shard = sorted((head.run / "states/train").glob("shard-*.safetensors"))[0]
    whole = shard.read_bytes()
    flipped = bytearray(whole)
    flipped[-9] ^= 4
    for content in (bytes(flipped), whole[: len(whole) // 2]):
        shard.write_bytes(content)
        code, said = head()
        one_line(said, shard.name)
        assert code in (1, 2) and head.steps == [2]
    shard.write_bytes(whole)
    assert head()[0] == 0


def test_a_hub_that_cannot_be_reached_is_one_line(head: Runner, monkeypatch: pytest.MonkeyPatch) -> None:
    import huggingface_hub
    import transformers

    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr("socket.getaddrinfo", fail(OSError(-3, "Temporary failure in name resolution")))
    monkeypatch.setattr(time, "sleep", lambda seconds: None)
    assert transformers is not None and loading is not None
    code, said = head("target.name=nobody/nothing")
    one_line(said, "target 'nobody/nothing' cannot be loaded")
    assert code == 2 and not head.run.exists()


def test_a_run_folder_belongs_to_one_launch(head: Runner, tmp_path: Path, started: Callable[..., Ranks]) -> None:
    ranks = started("once", "budget.steps=100000", f"run={head.run}", world=1)
    wait_for_step(head.run, 2, ranks)
    code, said = head("budget.steps=100000")
    one_line(said, "is in use by another launch (process ")
    assert code == 2
    ranks.signal(signal.SIGTERM)
    assert ranks.wait(30) == [143]


# Processes


@pytest.fixture
def started(tmp_path: Path, converted: Path) -> Iterator[Callable[..., Ranks]]:
    """`started(name, *words)`: two processes of the head's training; none of them is left behind."""
    every: list[Ranks] = []

    def start(name: str, *more: str, engine: str = "ddp", world: int = 2) -> Ranks:
        words = [*FAMILIES["draft head"][1], *SHORT, *more]
        every.append(Ranks("train/distill_draft.py", words, tmp_path / name, engine, world))
        return every[-1]

    yield start
    for ranks in every:
        ranks.close()


def wait_for_step(run: Path, step: int, ranks: Ranks, seconds: float = 120) -> None:
    assert kills.wait_for(lambda: kills.logged(run) >= step, ranks, 0.02, seconds), ranks.stderr.read_text()[-2000:]


@pytest.mark.parametrize("stuck", [1, 0])
def test_a_stuck_process_is_named_and_ends_the_launch(
    stuck: int, tmp_path: Path, started: Callable[..., Ranks]
) -> None:
    """SIGSTOP: three seconds of silence are asked for; the store of the launch is process 0's here, too."""
    run = tmp_path / "run"
    ranks = started("stuck", f"run={run}", "budget.steps=100000", "stall_minutes=0.05")
    wait_for_step(run, 3, ranks)
    ranks.signal(signal.SIGSTOP, stuck)
    began = time.monotonic()
    codes = ranks.wait(30, grace=0.5)
    assert codes[stuck] == -9 and codes[1 - stuck] == 1 and 2.5 < time.monotonic() - began < 15
    (line,) = last_lines(ranks)
    assert f"error: process {stuck}" in line and "no sign of life for 3 seconds" in line
    assert checkpoint.newest(run / "checkpoints")[0] is not None
    assert "Traceback" not in ranks.stderr.read_text()


@pytest.mark.parametrize(("engine", "seed"), [("ddp", 1), ("zero2", 2)])
def test_a_killed_training_ends_as_an_untouched_one(engine: str, seed: int, tmp_path: Path) -> None:
    """One kill of a seed each, inside a save and at a step; the one that is left says so in one line."""
    sizes = kills.Sizes(20, 5, 1, 1)
    untouched = kills.untouched(Ranks, engine, tmp_path / "untouched", sizes)
    (kill,) = kills.plan(seed, engine, 0, 1)
    kill.kind, kill.whom = {"ddp": "save", "zero2": "step"}[engine], {"ddp": "rank 0", "zero2": "rank 1"}[engine]
    came, end = kills.killed(Ranks, engine, tmp_path / "run", sizes, untouched["times"], [kill])
    assert end == untouched["end"] and len(came) == 1 and kill.ended < 30 and kill.lost <= sizes.save
    text = (tmp_path / "run.stderr").read_text()
    assert "Traceback" not in text and text.count("error: another process of this training is gone") <= 1


def test_the_comparison_sees_what_it_must(tmp_path: Path) -> None:
    """A moment that is not restored would be found: one bit in the checkpoint changes its digest."""
    sizes = kills.Sizes(STEPS, 2, 1, 1)
    words = kills.argv_of(tmp_path / "run", sizes)
    assert distill_draft.main([*words, "batch.rows=1"]) == 0
    before = kills.end_of(tmp_path / "run", STEPS)
    path = tmp_path / f"run/checkpoints/step-{STEPS:08d}/optimiser.safetensors"
    tensors = load_file(path)
    name = next(key for key in tensors if key.endswith("exp_avg"))
    tensors[name].view(-1)[0] += 1e-9
    from safetensors.torch import save_file

    save_file(tensors, path)
    after = kills.end_of(tmp_path / "run", STEPS)
    assert [key for key in before if before[key] != after[key]] == [f"step-{STEPS:08d}/optimiser.safetensors"]
