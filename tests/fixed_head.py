"""A tiny head that never changes, and what it must reach: a Medusa head for the tiny target, trained on that target's own
answers and stored beside this file (fixed_head/), with the committed tokens per verification that it reaches.

    python tests/fixed_head.py --write            # only after a change that is meant to move it: train and store it anew

Test: pytest tests/test_golden.py
"""

from __future__ import annotations

import json
import sys
import tempfile
from pathlib import Path

import torch
from accelerate import Accelerator

from draftsmith.configs.training import BatchConfig, BudgetConfig, EvalConfig, LogConfig, OptimConfig, TrainConfig
from draftsmith.data.encode import Sample
from draftsmith.inference.export import export
from draftsmith.inference.exporters.layout import RunFacts
from draftsmith.inference.load import load_drafter
from draftsmith.inference.speculate import DecodeConfig, generate
from draftsmith.losses.probs import SamplingParams
from draftsmith.models import METHODS
from draftsmith.models.pretrained import tiny_target
from draftsmith.models.target import Target, live_states
from draftsmith.train.loop import train
from draftsmith.train.stream import Stream

FOLDER = Path(__file__).with_suffix("")
PARAMS = SamplingParams(max_new_tokens=48)


def prompts() -> list[list[int]]:
    dice = torch.Generator().manual_seed(5)
    return [torch.randint(3, 250, (6,), generator=dice).tolist() for _ in range(8)]


def reached(target: Target, folder: Path) -> dict[str, float]:
    """Committed tokens per verification, and how many of each."""
    drafter = load_drafter(str(folder), target)
    stats = [generate(target, [ids], PARAMS, drafter=drafter, decode=DecodeConfig(k=2))[0].stats for ids in prompts()]
    committed, verifies = sum(s.committed - 1 for s in stats), sum(s.verifies for s in stats)
    return {"tau": round(committed / verifies, 3), "committed": committed, "verifies": verifies}


def make() -> None:
    """Train the head on what the target says to these prompts, and store it with what it reaches."""
    target = tiny_target(dtype=torch.float32)
    samples = []
    for i, ids in enumerate(prompts()):
        (answer,) = generate(target, [ids], PARAMS)
        every = torch.tensor([*ids, *answer.ids])
        samples.append(Sample(i, every, torch.arange(len(every)) >= len(ids)))
    torch.manual_seed(0)
    chosen = METHODS["medusa"].Config(heads=2)
    drafter = METHODS["medusa"](chosen, target.facts)
    drafter.init_from_target(target)
    with tempfile.TemporaryDirectory() as run:
        config = TrainConfig(
            method="medusa",
            drafter=chosen,
            batch=BatchConfig(row_length=64, rows=4),
            budget=BudgetConfig(steps=60),
            optim=OptimConfig(lr=1e-2),
            evaluate=EvalConfig(every=1000, probe_every=0),
            log=LogConfig(progress=False),
            precision="fp32",
            run=run,
        )
        stream = Stream(samples, row_length=64, rows=4, accumulate=1, seed=0)
        train(
            config, Accelerator(cpu=True), drafter, stream, lambda batch: live_states(target, drafter, batch), Path(run)
        )
    export(drafter.to(torch.bfloat16), FOLDER, run=RunFacts(), target=target)
    (FOLDER / "reached.json").write_text(json.dumps(reached(target, FOLDER)) + "\n")


if __name__ == "__main__":
    if sys.argv[1:] != ["--write"]:
        sys.exit(__doc__)
    make()
    print((FOLDER / "reached.json").read_text())
