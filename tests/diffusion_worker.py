"""What one process of `tests/test_convert_diffusion.py` runs: the first optimiser step of each diffusion training.

python tests/diffusion_worker.py OUT                started by accelerate for several processes
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from draftsmith.configs.diffusion import DiffusionConfig
from draftsmith.configs.training import BatchConfig, BudgetConfig, EvalConfig, LogConfig, OptimConfig
from draftsmith.data.batch import TargetOut
from draftsmith.data.encode import Sample
from draftsmith.models.adapters import AdapterConfig, Adapters
from draftsmith.models.block_diffusion import BlockDiffusion, CertaintyConfig, CertaintyForcing
from draftsmith.models.diffusion import PRESETS, ObjectiveConfig
from draftsmith.models.on_policy import OnPolicy, OnPolicyConfig
from draftsmith.models.pretrained import tiny_target
from draftsmith.models.target import Target
from draftsmith.train import engine
from draftsmith.train.loop import train
from draftsmith.train.stream import Stream

BLOCK = 4


def certainty(**settings: Any) -> Callable[..., CertaintyForcing]:
    return lambda *parts: CertaintyForcing(*parts, CertaintyConfig(**settings))


def on_policy(**settings: Any) -> Callable[..., OnPolicy]:
    return lambda *parts: OnPolicy(*parts, OnPolicyConfig(**settings))


# Name -> preset, and what makes a module of objective, target and adapters.
CASES: dict[str, tuple[str, Callable[[ObjectiveConfig, Target, Adapters], Any]]] = {
    **{name: (name, BlockDiffusion) for name in PRESETS},
    "certainty": ("fast_dllm_v2", certainty()),
    "certainty one": ("d2f", certainty(blocks="one")),
    "guesses": ("fast_dllm_v2", on_policy()),
    "trajectory": ("d2f", on_policy(second="trajectory", rounds=2, redundant=1.0)),
}


def samples() -> list[Sample]:
    """Five documents in three rows: the second micro-batch of two rows has one, so that the second process has none."""
    dice = torch.Generator().manual_seed(2)
    sizes = ((3, 12, 4), (8, 9, 1), (20, 14, 6), (21, 5, 2), (30, 11, 3))
    return [Sample(i, torch.randint(3, 250, (n,), generator=dice), torch.arange(n) >= first) for i, n, first in sizes]


def settings(folder: Path) -> dict[str, Any]:
    """Of a run of one step."""
    return {
        "batch": BatchConfig(row_length=24, rows=2, accumulate=2),
        "budget": BudgetConfig(steps=1),
        "optim": OptimConfig(clip=0),
        "evaluate": EvalConfig(every=9, probe_every=0),
        "log": LogConfig(every=1, progress=False),
        "precision": "fp32",
        "run": str(folder),
    }


def first_step(name: str, folder: Path) -> None:
    """One step of a diffusion training."""
    preset, make = CASES[name]
    objective = replace(PRESETS[preset], block=BLOCK)

    def module(target: Target) -> Any:
        adapters = Adapters(AdapterConfig(rank=2, alpha=4, dropout=0.25), target, dual=objective.dual)
        return make(objective, target, stirred(adapters))

    record(DiffusionConfig(**settings(folder)), module, folder)


@torch.no_grad()
def stirred(adapters: Adapters) -> Adapters:
    """Adapters that do something."""
    for parameter in adapters.trained.parameters():
        parameter.add_(torch.randn_like(parameter) * 0.2)
    return adapters


def record(config: Any, make: Callable[[Target], Any], folder: Path) -> None:
    """One step of the loop, in fp32. The gradients that the update was made from are in `rankN.safetensors`."""
    accelerator = engine.start(config)
    target = tiny_target(width=32, layers=2, heads=2, kv_heads=2, vocab=300, tokens=280)
    torch.manual_seed(1)
    module, rank, batch = make(target), accelerator.process_index, config.batch
    stream = Stream(
        samples(), row_length=batch.row_length, rows=batch.rows, accumulate=batch.accumulate, seed=7, rank=rank,
        world=accelerator.num_processes,
    )  # fmt: skip
    assert stream.windows(0) == 1 and len(stream.rows_of_epoch(0)) == 3
    folder.mkdir(parents=True, exist_ok=True)
    grads: dict[str, torch.Tensor] = {}
    update = engine.step

    def step(accelerator: Any, model: Any, optimisers: Any, clip: float) -> float:
        grads.update({n: p.grad.clone() for n, p in module.named_parameters() if p.grad is not None})
        return update(accelerator, model, optimisers, clip)

    engine.step = step
    try:
        train(config, accelerator, module, stream, lambda batch: TargetOut(), folder)
    finally:
        engine.step = update
    save_file(grads, folder / f"rank{rank}.safetensors")
    (folder / f"rank{rank}.json").write_text(json.dumps({"world": accelerator.num_processes}))


def every_case(out: Path) -> None:
    for name in CASES:
        first_step(name, out / name)


if __name__ == "__main__":
    every_case(Path(sys.argv[1]))
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()
