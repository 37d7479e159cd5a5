"""Settings of the two diffusion trainings: what `train/convert_block_diffusion.py` and `train/distill_certainty.py` read.

Settings that every training has are those of `configs/training.py`; a preset gives the objective's defaults.
Tests: `pytest tests/test_convert_diffusion.py`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from ..data.sources import DataConfig
from ..models.adapters import AdapterConfig
from ..models.block_diffusion import CertaintyConfig, ConversionConfig
from ..models.diffusion import PRESETS, ObjectiveConfig
from ..models.on_policy import OnPolicyConfig
from ..models.quantize import Quantize, check_quantize
from .parse import UsageError, given_keys, keys_of, parse, preset_defaults
from .training import (
    BatchConfig,
    BudgetConfig,
    EvalConfig,
    LogConfig,
    OptimConfig,
    SaveConfig,
    TargetConfig,
    check_run,
)


@dataclass(frozen=True)
class DiffusionConfig:
    """One run of either training."""

    method: Literal["block_diffusion", "certainty", "on_policy"] = "block_diffusion"
    """Set by the script; `on_policy` is the other training of `train/distill_certainty.py`."""
    target: TargetConfig = field(default_factory=TargetConfig)
    """The autoregressive model that is converted (certainty forcing: that was)."""
    quantize: Quantize = "none"
    """How the frozen weights are held: as they are; `nf4` or `int8` (package bitsandbytes), `int8_weight` (torchao)."""
    data: DataConfig = field(default_factory=DataConfig)
    """Training conversations; for certainty forcing and on-policy training, answers of the model's own."""
    init_from: str | None = None
    """Exported adapters to start from (folder): they bring their settings; but for conversion their objective too."""
    preset: str = "fast_dllm_v2"
    """A key of PRESETS (models/diffusion.py): the defaults of `objective`."""
    objective: ObjectiveConfig = field(default_factory=ObjectiveConfig)
    """How text is hidden and what rows see."""
    adapters: AdapterConfig = field(default_factory=AdapterConfig)
    """What is trained."""
    conversion: ConversionConfig = field(default_factory=ConversionConfig)
    """Method `block_diffusion` alone."""
    certainty: CertaintyConfig = field(default_factory=CertaintyConfig)
    """Method `certainty` alone."""
    on_policy: OnPolicyConfig = field(default_factory=OnPolicyConfig)
    """Method `on_policy` alone."""
    batch: BatchConfig = field(default_factory=BatchConfig)
    """What one optimiser step sees."""
    budget: BudgetConfig = field(default_factory=BudgetConfig)
    """How long to train."""
    optim: OptimConfig = field(default_factory=OptimConfig)
    """Optimiser and schedule."""
    precision: Literal["bf16", "fp32"] = "bf16"
    """Arithmetic of adapters and loss: bf16 autocast over fp32 masters, or as the weights are."""
    save: SaveConfig = field(default_factory=SaveConfig)
    """Periodic checkpoints."""
    evaluate: EvalConfig = field(default_factory=EvalConfig)
    """Held-out figures during training (the speculative probe is for drafters)."""
    log: LogConfig = field(default_factory=LogConfig)
    """Metrics and progress."""
    seed: int = 0
    """Seed of initial weights, data order and noise."""
    deterministic: bool = False
    """Refuse operations that have no deterministic implementation."""
    engine: Literal["auto", "ddp", "zero1", "zero2", "zero3"] = "auto"
    """What processes share (`TrainConfig.engine`); a launch by another engine is refused."""
    processes: int | None = None
    """Processes that must take part; null = whatever the launcher started."""
    stall_minutes: float = 10.0
    """Several processes: end the launch, naming the process, when one gives no sign of life or holds the others up for so
    long; 0 = never."""
    run: str = "runs/diffusion"
    """Run folder: checkpoints/, metrics.jsonl, run.yaml, export/."""
    resume: Literal["auto", "never"] = "auto"
    """`auto`: go on from the newest complete checkpoint of the run folder, if there is one; `never`: refuse such a folder."""


SECTION = {"block_diffusion": "conversion", "certainty": "certainty", "on_policy": "on_policy"}  # of one method alone


def read_config(argv: Sequence[str], prog: str, *methods: str) -> DiffusionConfig:
    """The settings of a command line for one of a script's `methods`, the first by default; the objective's defaults are
    taken from its preset.

    Raises UsageError or ValueError, one line, before any weights are loaded and with nothing written.
    """
    said = given_keys(DiffusionConfig, argv)
    defaults = preset_defaults(said, PRESETS, "fast_dllm_v2", "objective")
    defaults |= {"method": methods[0]}
    config = parse(
        DiffusionConfig,
        argv,
        prog=prog,
        sections={"objective": ObjectiveConfig},
        description="Train a denoiser.",
        defaults=defaults,
    )
    if config.method not in methods:
        raise UsageError(f"method={config.method}: this script is for {' and '.join(methods)}")
    refuse_idle_sections(config)
    check_quantize(config.quantize)
    if config.init_from is not None:
        refuse_what_adapters_bring(config, said)
    if config.method == "block_diffusion":
        config.conversion.check(config.objective, config.adapters)
    check_run(config)
    return config


def refuse_idle_sections(config: DiffusionConfig) -> None:
    """Raises UsageError for settings of another method than the one that is trained."""
    plain = DiffusionConfig()
    for method, section in SECTION.items():
        if method != config.method and getattr(config, section) != getattr(plain, section):
            raise UsageError(f"{section}.* is for method={method}, this is method={config.method}: leave it out")


def refuse_what_adapters_bring(config: DiffusionConfig, said: Mapping[str, Any]) -> None:
    """Raises UsageError for settings that `init_from` decides. Printed settings, which name all of them with their
    defaults, say nothing and are let through."""
    plain = DiffusionConfig()
    sections = ("adapters",) if config.method == "block_diffusion" else ("adapters", "objective", "preset")
    names = [key for key in keys_of(DiffusionConfig, {}) if key.partition(".")[0] in sections]
    clash = [key for key in names if key in said]
    printed = len(clash) == len(names) and all(getattr(config, s) == getattr(plain, s) for s in sections)
    if clash and not printed:
        raise UsageError(f"{', '.join(clash)}: the adapters in init_from bring this with them; leave it out")
