"""What one process of `tests/test_distributed.py` runs: some optimiser steps of each method, written down by rank.

python tests/distributed_worker.py OUT JOB          JOB: a key of JOBS; started by torchrun or accelerate for several
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from draftsmith.configs.training import BatchConfig, BudgetConfig, EvalConfig, LogConfig, OptimConfig, TrainConfig
from draftsmith.data.batch import Batch, TargetOut
from draftsmith.data.draft_vocab import choose_draft_ids
from draftsmith.data.encode import Sample
from draftsmith.data.packing import collate
from draftsmith.models import METHODS
from draftsmith.models.pretrained import tiny_target
from draftsmith.models.target import live_states
from draftsmith.train import checkpoint, engine
from draftsmith.train.loop import train
from draftsmith.train.stream import Stream

SETTINGS: dict[str, dict[str, Any]] = {
    "eagle3": {"steps": 2},
    "hydra": {"heads": 2},
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


def samples(empty: bool = False) -> list[Sample]:
    """Seven documents, one per row; with `empty`, most of them have nothing supervised."""
    generator = torch.Generator().manual_seed(0)
    made = []
    for i in range(7):
        n = int(torch.randint(12, 17, (1,), generator=generator))
        supervised = torch.arange(n) >= (n if empty and i % 3 else 3)
        made.append(Sample(i, torch.randint(250, (n,), generator=generator), supervised))
    return made


def config_of(method: str, run: Path, steps: int, stop_at: int | None = None, accumulate: int = 2) -> TrainConfig:
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


def launch(config: TrainConfig, empty: bool = False, poison: bool = False) -> None:
    """One launch on live states; the end of the run is in its folder. `poison`: rank 1's third micro-batch is NaN."""
    accelerator = engine.start(config)
    target = tiny_target(dtype=torch.float32)
    torch.manual_seed(config.seed)
    drafter: Any = METHODS[config.method](
        config.drafter, target.facts, choose_draft_ids(torch.arange(256), 200, target.facts.eos_ids)
    )
    drafter.init_from_target(target)
    calls = 0

    def states_of(batch: Batch) -> TargetOut:
        nonlocal calls
        calls += 1
        out = live_states(target, drafter, batch)
        if poison and calls == 3 and accelerator.process_index == 1:
            assert out.last_hidden_BTD is not None
            out.last_hidden_BTD.mul_(float("nan"))
        return out

    batch = config.batch
    stream = Stream(
        samples(empty),
        row_length=batch.row_length,
        rows=batch.rows,
        accumulate=batch.accumulate,
        seed=config.seed,
        rank=accelerator.process_index,
        world=accelerator.num_processes,
    )
    folder = Path(config.run)
    folder.mkdir(parents=True, exist_ok=True)
    heldout = [collate([sample]) for sample in samples()[:3]]
    summary = train(config, accelerator, drafter, stream, states_of, folder, heldout=heldout)
    rank = accelerator.process_index
    save_file(
        {n: t.clone() for n, t in checkpoint.trained_tensors(drafter).items()}, folder / f"rank{rank}.safetensors"
    )
    facts = {"steps": summary.state.step, "skipped": summary.state.skipped, "world": accelerator.num_processes}
    facts |= {"engine": accelerator.distributed_type.value, "heldout": summary.heldout}
    (folder / f"rank{rank}.json").write_text(json.dumps(facts))


def all_methods(out: Path) -> None:
    for method in METHODS:
        launch(config_of(method, out / method, steps=6))


def halves(out: Path) -> None:
    """Each method stops mid-epoch and goes on, in one launch."""
    for method in METHODS:
        launch(config_of(method, out / method, steps=6, stop_at=3))
        launch(config_of(method, out / method, steps=6))


def faults(out: Path) -> None:
    """Batches without a supervised token on one process, and a NaN on the other."""
    launch(config_of("medusa", out / "empty", steps=5), empty=True)
    launch(config_of("medusa", out / "poison", steps=4), poison=True)


def everything(out: Path) -> None:
    all_methods(out / "all")
    halves(out / "halves")
    faults(out / "faults")


JOBS = {"all": all_methods, "everything": everything}

if __name__ == "__main__":
    JOBS[sys.argv[2]](Path(sys.argv[1]))
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()
