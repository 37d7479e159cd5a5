"""Distillation for fewer passes: teach a converted model to be sure of many tokens at once, or to mend its guesses.

    ./launch.sh train/distill_certainty.py --config configs/certainty_smollm2.yaml init_from=runs/convert_smollm2/export
    accelerate launch train/distill_certainty.py --config configs/certainty_smollm2.yaml init_from=runs/.../export

Methods: `certainty` (the default; dParallel, arXiv:2509.26488) and `on_policy` (DMax, arXiv:2604.08302, or with
`on_policy.second=trajectory` redundancy-aware tuning, R2-dLLM, arXiv:2604.18995).

`data` should be answers of the model's own (`draftsmith rollout --adapters FOLDER`); those that were written with
`--order true` may be hidden in the order in which they were decided (`certainty.order=stored`). Adapters, block, shift
and layout are those of `init_from`; a model that denoises by itself (layouts single and whole) may be named as the target
instead, with a `preset` or `objective.*`.
Leaves a run folder as `convert_block_diffusion.py` does. Tests: `pytest tests/test_convert_diffusion.py`.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from draftsmith.configs.diffusion import DiffusionConfig, read_config
from draftsmith.inference.adapter_folder import load_adapters
from draftsmith.models.adapters import Adapters
from draftsmith.models.block_diffusion import CertaintyForcing
from draftsmith.models.on_policy import OnPolicy
from draftsmith.models.target import Target
from draftsmith.train.diffusion_run import denoiser_tuning
from draftsmith.train.script import run
from draftsmith.train.tuning import Tuning, launch

SCRIPT = Path(__file__).name


def build(config: DiffusionConfig, target: Target) -> Tuning:
    """The adapters of `init_from` go on learning; what they bring is written into the settings."""
    if config.init_from is None:
        if config.objective.layout == "pair":
            raise ValueError(
                "init_from is not set: this training starts from a model that denoises; convert one with "
                "train/convert_block_diffusion.py, or name a target that does (objective.layout=whole)"
            )
        adapters = Adapters(config.adapters, target, dual=config.objective.dual)
    else:
        converted = load_adapters(config.init_from, target)
        adapters = converted.adapters
        config = replace(config, objective=converted.objective, adapters=adapters.config)
    if config.method == "on_policy":
        return denoiser_tuning(config, OnPolicy(config.objective, target, adapters, config.on_policy), adapters)
    return denoiser_tuning(config, CertaintyForcing(config.objective, target, adapters, config.certainty), adapters)


def main(argv: Sequence[str] | None = None) -> int:
    """One run, from the command line to the export. Returns the exit code."""
    argv = sys.argv[1:] if argv is None else argv
    return launch(read_config(argv, SCRIPT, "certainty", "on_policy"), SCRIPT, argv, build)


if __name__ == "__main__":
    run(main)
