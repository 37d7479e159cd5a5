"""What one process of `tests/test_distributed.py` runs: some optimiser steps of each method, written down by rank.

python tests/distributed_worker.py OUT JOB          JOB: a key of JOBS; started by torchrun for several
"""

from __future__ import annotations

import json
import os
import signal
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from accelerate.state import AcceleratorState
from safetensors.torch import save_file

from draftsmith.configs.training import BatchConfig, BudgetConfig, EvalConfig, LogConfig, OptimConfig, TrainConfig
from draftsmith.data.batch import Batch, TargetOut
from draftsmith.data.draft_vocab import choose_draft_ids
from draftsmith.data.encode import Sample
from draftsmith.data.packing import collate
from draftsmith.models import METHODS
from draftsmith.models.pretrained import tiny_target
from draftsmith.models.target import live_states
from draftsmith.train import checkpoint, distill_draft, engine
from draftsmith.train.loop import train
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
    "dflash": {"block": 4, "layers": 1, "anchors": 4},
    "dspark": {"block": 3, "layers": 1, "anchors": 4, "rank": 8},
}


ZERO = ("zero1", "zero2", "zero3")
FEW = ("eagle3", "hydra", "dual_view")  # a drafter, one with dropout, one inside the target
# By engine: the methods that run straight through; all of them by the one that does most to a module. The few stop in between,
# too; all of them do with one process in tests/test_resume.py, and by every engine in tests/bench/invariance.py.
STRAIGHT = dict.fromkeys(("ddp", "zero1", "zero2"), FEW) | {"zero2_offload": FEW[:1], "zero3": tuple(METHODS)}


def launched_by(name: str) -> dict[str, str]:
    """What a launcher of this engine leaves in the environment (`test_shipped_files_start_what_tests_run` compares)."""
    if name == "ddp":
        return {"ACCELERATE_USE_CPU": "true"}
    file = f"configs/deepspeed/{name}.json"
    return {
        "ACCELERATE_USE_DEEPSPEED": "true",
        "ACCELERATE_DEEPSPEED_CONFIG_FILE": file,
        "ACCELERATE_DEEPSPEED_ZERO3_INIT": "false",
    }


def become(name: str) -> None:
    """Further runs of this process are of this engine."""
    AcceleratorState._reset_state(reset_partial_state=True)
    for variable in [v for v in os.environ if v.startswith("ACCELERATE_")]:
        del os.environ[variable]
    os.environ |= launched_by(name)


def samples(empty: bool = False) -> list[Sample]:
    """Seven documents, one per row; with `empty`, most of them have nothing supervised."""
    generator = torch.Generator().manual_seed(0)
    made = []
    for i in range(7):
        n = int(torch.randint(12, 17, (1,), generator=generator))
        supervised = torch.arange(n) >= (n if empty and i % 3 else 3)
        made.append(Sample(i, torch.randint(250, (n,), generator=generator), supervised))
    return made


def config_of(method: str, run: Path, steps: int = 6, stop_at: int | None = None, accumulate: int = 2) -> TrainConfig:
    return TrainConfig(
        method=method,
        drafter=METHODS[method].Config(**SETTINGS.get(method, {})),
        batch=BatchConfig(row_length=16, rows=2, accumulate=accumulate),
        budget=BudgetConfig(steps=steps, stop_at=stop_at),
        optim=OptimConfig(lr=1e-3, warmup=0.1),
        evaluate=EvalConfig(every=3, probe_every=0),
        log=LogConfig(every=1, progress=False),
        precision="fp32",
        run=str(run),
    )


def launch(config: TrainConfig, empty: bool = False, poison: int = 0, stop: int = 0) -> None:
    """One launch on live states; the end of the run is in its folder. `poison`: this micro-batch of rank 1 is NaN; `stop`: a
    signal comes to rank 1 in this one."""
    accelerator = engine.start(config)
    target = tiny_target(dtype=torch.float32)
    torch.manual_seed(config.seed)
    drafter: Any = METHODS[config.method](
        config.drafter, target.facts, choose_draft_ids(torch.arange(256), 200, target.facts.eos_ids)
    )
    drafter.init_from_target(target)
    rank, calls, wrap = accelerator.process_index, 0, engine.wrap
    facts: dict[str, Any] = {}

    def watched(*parts: Any) -> Any:
        """`engine.wrap`, written down: numbers that this process's optimiser updates, and how many of them twice."""
        wrapped, optimisers = wrap(*parts)
        if engine.is_deepspeed(accelerator):
            flats = engine.flats_of(engine.zero_of(optimisers[0]))
            facts["updated"] = sum(flat.numel() for flat, _ in flats)
            facts["copied"] = sum(flat.numel() for flat, own in flats if flat.data_ptr() != own.data_ptr())
        return wrapped, optimisers

    def states_of(batch: Batch) -> TargetOut:
        nonlocal calls
        calls += 1
        out = live_states(target, drafter, batch)
        if rank == 1 and calls == poison:
            assert out.last_hidden_BTD is not None
            out.last_hidden_BTD.mul_(float("nan"))
        if rank == 1 and calls == stop:
            os.kill(os.getpid(), signal.SIGTERM)
        return out

    batch = config.batch
    stream = Stream(
        samples(empty),
        row_length=batch.row_length,
        rows=batch.rows,
        accumulate=batch.accumulate,
        seed=config.seed,
        rank=rank,
        world=accelerator.num_processes,
    )
    folder = Path(config.run)
    folder.mkdir(parents=True, exist_ok=True)
    heldout = [collate([sample]) for sample in samples()[:3]]
    engine.wrap = watched
    try:
        summary = train(config, accelerator, drafter, stream, states_of, folder, heldout=heldout)
    finally:
        engine.wrap = wrap
    save_file(
        {n: t.clone() for n, t in checkpoint.trained_tensors(drafter).items()}, folder / f"rank{rank}.safetensors"
    )
    facts |= {"steps": summary.state.step, "skipped": summary.state.skipped, "world": accelerator.num_processes}
    facts |= {"engine": engine.engine_of(accelerator), "heldout": summary.heldout, "signal": summary.signal}
    facts["trained"] = sum(p.numel() for p in drafter.parameters() if p.requires_grad)
    with torch.no_grad():
        facts["teacher"] = target.model(torch.arange(40, 45)[None]).logits[0].tolist()
    (folder / f"rank{rank}.json").write_text(json.dumps(facts))


def straight(out: Path, methods: Sequence[str]) -> None:
    for method in methods:
        launch(config_of(method, out / method))


def halves(out: Path, methods: Sequence[str]) -> None:
    """Each method stops mid-epoch and goes on."""
    for method in methods:
        launch(config_of(method, out / method, stop_at=3))
        launch(config_of(method, out / method))


def stopped(out: Path) -> None:
    """A signal inside the accumulation of the second window; then the run goes on."""
    launch(config_of("eagle3", out / "eagle3"), stop=4)
    mine = f"rank{os.environ['RANK']}.json"
    (out / "first").mkdir(exist_ok=True)
    (out / "eagle3" / mine).rename(out / "first" / mine)
    launch(config_of("eagle3", out / "eagle3"))


def faults(out: Path) -> None:
    """Batches without a supervised token on one process, and a NaN on the other, in a window's first micro-batch."""
    launch(config_of("medusa", out / "empty", steps=5), empty=True)
    launch(config_of("medusa", out / "poison", steps=4), poison=3)


def handed_over(out: Path, before: str, after: str) -> None:
    """The first half of a run by one engine, the second by another."""
    folder = out / f"{before}-{after}"
    become(before)
    launch(config_of("eagle3", folder, stop_at=3))
    become(after)
    launch(config_of("eagle3", folder))


def script(run: Path) -> None:
    """The whole script: target, capture, training with a probe, export."""
    settings = [
        "budget.steps=3",
        "data.limit=24",
        "evaluate.conversations=2",
        "evaluate.every=3",
        "evaluate.probe_every=3",
    ]
    distill_draft.main(["--config", "configs/quick.yaml", *settings, "log.progress=false", f"run={run}"])


def one(out: Path) -> None:
    straight(out, list(METHODS))
    script(out / "script")


def two(out: Path) -> None:
    for name in STRAIGHT:
        become(name)
        straight(out / name / "straight", STRAIGHT[name])
        halves(out / name / "halves", [method for method in FEW if method in STRAIGHT[name]])
        stopped(out / name / "stopped")
        faults(out / name / "faults")
    for before, after in (("ddp", "zero3"), ("zero3", "zero1"), ("zero2", "ddp")):
        handed_over(out / "handed", before, after)
    become("zero3")
    script(out / "script")


JOBS = {"one": one, "two": two}

if __name__ == "__main__":
    JOBS[sys.argv[2]](Path(sys.argv[1]))
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()
