"""What the training scripts share: before the loop, and after it.

Tests: `pytest tests/test_train.py tests/test_config.py tests/test_convert_diffusion.py`.
"""

from __future__ import annotations

import dataclasses
import errno
import fcntl
import json
import os
import platform
import socket
import subprocess
import sys
from collections.abc import Callable, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any, NoReturn, TextIO

import torch
import yaml
from accelerate import Accelerator

from ..configs.parse import Failure, guarded, one_line
from ..configs.runs import RunConfig
from ..configs.training import TrainConfig, differing
from ..data.encode import Sample
from ..data.places import write_atomically
from ..data.rolling import reading_blocks, shards_of_windows
from ..data.states import StateStore, data_fingerprint
from ..inference.card import scrub_values
from ..inference.exporters.layout import RunFacts
from ..models.loading import load_target, load_tokenizer
from ..models.piecewise import load_placed
from ..models.placement import bytes_here, share_of_devices
from ..models.target import Target
from . import checkpoint, signs
from .engine import engine_of
from .loop import Summary
from .stream import Stream

GONE = "another process of this training is gone"
NEEDS_NO_PLAN = 10_000_000  # numbers of a target
PACKAGES = ("draftsmith", "torch", "transformers", "accelerate", "deepspeed", "safetensors")


_held: dict[Path, TextIO] = {}  # run folders of this process, and their locks


def refuse_other_run(folder: Path, config: RunConfig) -> None:
    """Refuse a run folder that cannot be continued, before anything is loaded or written."""
    newest, _ = checkpoint.newest(folder / "checkpoints")
    if newest is None:
        return
    if config.resume == "never":
        raise ValueError(f"{folder} holds {newest.name} and resume=never: choose another `run` folder, or resume=auto")
    _, before = checkpoint.read_state(newest)
    if changed := differing(before, config):
        raise ValueError(
            f"{folder} holds a run with other settings ({'; '.join(changed)}): choose another `run` folder"
        )


def make_stream(
    config: RunConfig, samples: Sequence[Sample], accelerator: Accelerator, store: StateStore | None = None
) -> Stream:
    """This process's share of the training data, in the order that the recipe says, or in that of a rolling capture.

    Raises:
        ValueError: a rolling capture keeps too little for this recipe, or the budget asks for more than one pass.
    """
    rolling = None if store is None else store.rolling
    blocks, shard_of = reading_blocks(samples) if rolling is not None else (None, [])
    stream = Stream(
        samples,
        row_length=config.batch.row_length,
        rows=config.batch.rows,
        accumulate=config.batch.accumulate,
        seed=config.seed,
        rank=accelerator.process_index,
        world=accelerator.num_processes,
        blocks=blocks,
        rolling=rolling,
    )
    if rolling is not None:
        if (config.budget.steps or 0) > stream.windows(0):
            raise ValueError(
                f"budget.steps={config.budget.steps} is more than one pass ({stream.windows(0)} steps), and states.rolling "
                "deletes what was read: set budget.epochs=1, or capture the whole before"
            )
        rolling.follow(shards_of_windows(stream.rows_of_epoch(0), stream.rows * stream.accumulate, shard_of))
    elif store is not None and store.folder.remote:
        stream.announce = store.coming
    return stream


def target_of(config: RunConfig, accelerator: Accelerator, known_by: str | None = None) -> Target:
    """The target of a recipe, placed as it says. One process of a machine downloads, or converts smollm2.

    `known_by`: the fingerprint that captured states have, for a target that is absent.
    """
    asked, device = config.target, accelerator.device
    pinned: Any = {"revision": asked.revision, "trust_remote_code": asked.trust_remote_code}
    with accelerator.local_main_process_first():
        if asked.placement == "replicated":
            quantize = asked.quantize if isinstance(config, TrainConfig) else config.quantize
            return load_target(asked.name, dtype=asked.dtype, device=device, quantize=quantize, **pinned)
        load_tokenizer(asked.name, **pinned)
    devices: list[torch.device] = []
    if asked.placement == "devices":
        here = int(os.environ.get("LOCAL_WORLD_SIZE", accelerator.num_processes))
        devices = share_of_devices(asked.devices, accelerator.local_process_index, here)
    return load_placed(
        asked.name, asked.placement, dtype=asked.dtype, device=device, devices=devices, known_by=known_by, **pinned
    )


def where_it_is(target: Target) -> str:
    """How a target is held, for the first line of a run."""
    rounded = "" if target.quantized == "none" else f", {target.quantized}"
    placed = (
        "" if target.placed is None else f", {target.placement}: {bytes_here(target) / 2**20:,.1f} MiB in this process"
    )
    return f"{str(target.dtype).removeprefix('torch.')}{rounded}{placed}"


def say_plan(
    config: RunConfig, target: Target, samples: Sequence[Sample], accelerator: Accelerator, say: Callable[..., None]
) -> None:
    """The short form of `draftsmith plan` for this launch, by the main process. A plan that cannot be made stops nothing,
    and targets of a few numbers need none."""
    numbers = sum(p.numel() for p in target.model.parameters())
    if not accelerator.is_main_process or numbers < NEEDS_NO_PLAN or not samples:
        return
    from . import plan_run  # which most launches of tests do without

    tokens = sum(map(len, samples))
    supervised = sum(int(s.supervised.sum()) for s in samples) / tokens
    text = plan_run.Text(list(samples), 0, tokens, supervised, "the data's fullest")
    work = plan_run.Work(config, target.facts.name, target.model.config, text, accelerator.num_processes)
    try:
        say("\n".join(plan_run.short_form(work, engine_of(accelerator), accelerator.device.type == "cpu")))
    except Exception as error:
        say(f"plan: none ({one_line(error)})")


def how_it_ended(config: RunConfig, summary: Summary, say: Callable[..., None]) -> int | None:
    """The exit code of a launch that leaves its budget unused, after saying why; None for one that used it."""
    if summary.stopped:
        step, sound = summary.state.step, summary.state.sound
        say(f"stopped at step {step}: {summary.stopped}; the last step within bounds was {sound}", file=sys.stderr)
        return 1
    if summary.signal:
        say(
            f"stopped by signal {summary.signal}, saved at step {summary.state.step}; the same command goes on from there"
        )
        return 128 + summary.signal
    if not summary.state.done:
        say(f"stopped at step {summary.state.step} (budget.stop_at); the same command goes on from there")
        return 0
    return None


def run_facts(
    config: RunConfig,
    script: str,
    argv: Sequence[str],
    samples: Sequence[Sample],
    summary: Summary,
    heldout: dict[str, float],
    probe: dict[str, float] | None = None,
    step: int | None = None,
) -> RunFacts:
    """What an export records of its run; `step`, where it holds the weights of another than the last one."""
    state = summary.state
    return RunFacts(
        config=dataclasses.asdict(config),
        command=command(script, argv),
        versions=versions(),
        data={"source": config.data.source, "samples": len(samples), "tokens": sum(map(len, samples))}
        | {"fingerprint": data_fingerprint(samples)},
        training={"steps": state.step, "tokens": state.tokens, "minutes": round(state.seconds / 60, 2)}
        | {"skipped_steps": state.skipped, "heldout": heldout, "probe": probe or summary.probe}
        | ({} if step is None else {"exported_step": step}),
        train_length=config.data.max_length,
    )


def last_heldout(folder: Path) -> dict[str, float]:
    """The last held-out figures of a run's log (a launch that finds nothing left to do has none of its own)."""
    return logged(folder, "heldout")


def logged(folder: Path, kind: str, step: int | None = None) -> dict[str, float]:
    """The figures of a run's log, of one kind: those of `step`, or the last ones. Empty where there are none."""
    path = folder / "metrics.jsonl"
    lines = [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
    found = [line for line in lines if line["kind"] == kind and step in (None, line["step"])]
    return {k: v for k, v in found[-1].items() if k not in ("kind", "step")} if found else {}


def write_run_file(
    folder: Path,
    config: RunConfig,
    script: str,
    argv: Sequence[str],
    accelerator: Accelerator,
    samples: Sequence[Sample],
    report: Any,
    target: Target,
) -> None:
    """`run.yaml`: everything that decides the run, without local paths or secrets."""
    facts = {
        "command": command(script, argv),
        "config": dataclasses.asdict(config),
        "versions": versions(),
        "git": git_state(),
        "target": {"fingerprint": target.facts.fingerprint, "revision": target.facts.revision},
        "data": {"fingerprint": data_fingerprint(samples), "report": str(report)},
        "machine": {
            "processes": accelerator.num_processes,
            "engine": accelerator.distributed_type.value,
            "threads": torch.get_num_threads(),
            "accelerator": torch.cuda.get_device_name() if torch.cuda.is_available() else platform.machine(),
        },
        "deterministic": config.deterministic,
    }
    text = yaml.safe_dump(scrub_values(json.loads(json.dumps(facts))), sort_keys=False)
    write_atomically(folder / "run.yaml", lambda path: path.write_text(text))


def command(script: str, argv: Sequence[str]) -> str:
    return " ".join([f"train/{script}", *argv])


def versions() -> dict[str, str]:
    return {"python": platform.python_version()} | {name: version(name) for name in PACKAGES}


def git_state() -> dict[str, Any]:
    """Commit of this checkout and whether it is changed; empty outside of one."""
    try:
        root = Path(__file__).resolve().parent
        run = [
            subprocess.run(["git", "-C", str(root), *a], capture_output=True, text=True, check=True, timeout=10)
            for a in (("rev-parse", "HEAD"), ("status", "--porcelain"))
        ]
        return {"commit": run[0].stdout.strip(), "changed": bool(run[1].stdout.strip())}
    except (OSError, subprocess.SubprocessError):
        return {}


def silent(*_: Any, **__: Any) -> None:
    """What processes other than the main one print."""


def run(main: Callable[[], int | None]) -> NoReturn:
    """A script's `main`, and the end of its process: 0, or one line and another exit code (configs/parse.py)."""

    def plain() -> int:
        try:
            return main() or 0
        except (RuntimeError, MemoryError, OSError) as error:
            if (text := in_plain_words(error)) is None:
                raise
            raise Failure(text) from error

    end(guarded(plain))


def in_plain_words(error: Exception) -> str | None:
    """What a library's error means for who started the training; None where its own words are the best."""
    text = one_line(error)
    if isinstance(error, (MemoryError, torch.OutOfMemoryError)) or "can't allocate memory" in text:
        return (
            f"out of memory: lower batch.row_length, or batch.rows (batch.accumulate makes up for them); {text[:200]}"
        )
    if (
        isinstance(error, OSError)
        and error.filename is None
        and error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
    ):
        return (
            f"{error.strerror}: what was complete is untouched, and the same command goes on from the newest checkpoint"
        )
    if isinstance(error, torch.distributed.DistError) or "gloo" in text:
        return f"{GONE} (killed, out of memory, or failed with a line of its own); the same command goes on from the newest checkpoint"
    return None


def claim(folder: Path, accelerator: Accelerator) -> None:
    """Take the run folder for this launch, until its process ends, however it does. Raises ValueError when another launch
    has it: two that write into one folder would spoil both."""
    place = folder.resolve()
    if not accelerator.is_main_process or place in _held:
        return
    folder.mkdir(parents=True, exist_ok=True)
    file = (folder / ".lock").open("a+", encoding="utf-8")
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        file.seek(0)
        raise ValueError(
            f"{folder} is in use by another launch ({file.read().strip() or 'unknown'}): wait for it, stop it, or choose "
            "another `run` folder"
        ) from None
    except OSError:  # a file system without locks
        pass
    file.truncate(0)
    file.write(f"process {os.getpid()} on {socket.gethostname()}\n")
    file.flush()
    _held[place] = file


def end(code: int) -> NoReturn:
    """Leave with this exit code. When a process fails, the others learn it from their broken connections, and the launcher:
    no farewell is waited for."""
    signs.ended()
    sys.stdout.flush()
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        if code in (1, 2):
            sys.stderr.flush()
            os._exit(code)
        torch.distributed.destroy_process_group()
    sys.exit(code)
