"""What one process of `tests/test_distill_consistency.py` runs: the first optimiser step of each preset.

python tests/consistency_worker.py OUT  started by accelerate for several processes
"""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from diffusion_worker import BLOCK, record, settings, stirred

from draftsmith.configs.consistency import ConsistencyRun
from draftsmith.configs.training import BatchConfig
from draftsmith.models.adapters import AdapterConfig, Adapters
from draftsmith.models.consistency import PRESETS, Consistency
from draftsmith.models.target import Target

CASES = tuple(PRESETS)


def first_step(name: str, folder: Path, batch: BatchConfig | None = None) -> None:
    """One step; where the preset reads stored states, on the student's own."""
    preset = PRESETS[name]
    states: Any = "online" if preset.states == "stored" else preset.states
    objective = replace(preset, block=BLOCK, window=min(preset.window, 2), states=states)

    def module(target: Target) -> Consistency:
        mask: Any = "trained" if objective.start == "mask" else "none"
        return Consistency(
            objective, target, stirred(Adapters(AdapterConfig(rank=2, alpha=4, dropout=0.25, mask=mask), target))
        )

    config = ConsistencyRun(**settings(folder))
    record(config if batch is None else replace(config, batch=batch), module, folder)


def every_case(out: Path) -> None:
    for name in CASES:
        first_step(name, out / name)


if __name__ == "__main__":
    every_case(Path(sys.argv[1]))
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()
