"""Convert an autoregressive model into a block-diffusion model: adapters (or all weights) under an objective's preset.

    ./launch.sh train/convert_block_diffusion.py --config configs/convert_smollm2.yaml objective.block=8
    accelerate launch train/convert_block_diffusion.py --config configs/convert_smollm2.yaml preset=sdar

Leaves a run folder: `checkpoints/`, `metrics.jsonl`, `run.yaml` and `export/` (the trained tensors and what they mean).
Starting it again goes on where it stopped. Exit codes as of `distill_draft.py`.
Tests: `pytest tests/test_convert_diffusion.py`.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from draftsmith.configs.diffusion import DiffusionConfig, read_config
from draftsmith.inference.adapter_folder import load_adapters
from draftsmith.models.adapters import Adapters
from draftsmith.models.block_diffusion import BlockDiffusion
from draftsmith.models.target import Target
from draftsmith.train.diffusion_run import denoiser_tuning
from draftsmith.train.script import run
from draftsmith.train.tuning import Tuning, launch

SCRIPT = Path(__file__).name


def build(config: DiffusionConfig, target: Target) -> Tuning:
    """Adapters at zero, or those of `init_from`, whose settings replace the recipe's, under the recipe's objective."""
    if config.init_from is None:
        adapters = Adapters(config.adapters, target, dual=config.objective.dual)
    else:
        adapters = load_adapters(config.init_from, target).adapters
        config = replace(config, adapters=adapters.config)
    module = BlockDiffusion(config.objective, target, adapters, config.conversion)
    return denoiser_tuning(config, module, adapters)


def main(argv: Sequence[str] | None = None) -> int:
    """One run, from the command line to the export. Returns the exit code."""
    argv = sys.argv[1:] if argv is None else argv
    return launch(read_config(argv, SCRIPT, "block_diffusion"), SCRIPT, argv, build)


if __name__ == "__main__":
    run(main)
