"""Settings of consistency training: what `train/distill_consistency.py` reads.

Settings that every training has are those of `configs/training.py`; a preset gives the objective's defaults.
Tests: `pytest tests/test_distill_consistency.py`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import ClassVar, Literal

from ..data.sources import DataConfig
from ..inference.evaluate_consistency import MOST_REPEATED, MOST_RISE
from ..models.adapters import AdapterConfig
from ..models.consistency import PRESETS, ConsistencyConfig
from ..models.quantize import Quantize
from .parse import UsageError, given_keys, parse, preset_defaults
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
class GuardConfig:
    """How far a student may drift from its base (models in training agree with themselves on repetition, sooner or later).

    Both figures are held against those of step 0, which are the base's: the cross-entropy of held-out answers in the
    held-out evaluation, the repeated 4-grams of greedy answers of the probe."""

    action: Literal["stop", "warn"] = "stop"
    """After a collapse: end the run with code 1, or say so and go on; where no step was within bounds: export nothing and end
    with code 1, or export the last one and say so. A step that is out of bounds is never the best one."""
    max_rise: float = MOST_RISE
    """Most that the cross-entropy of held-out answers may rise, in nats (ours; `evaluate` flags more than that)."""
    max_repeated: float = MOST_REPEATED
    """Most that the share of repeated 4-grams may rise (ours; likewise)."""
    collapse: float = 3.0
    """A figure that rose so many times as far is a collapse (ours; while the learning rate is high, cross-entropy may well
    rise by 0.2 and come back)."""

    def __post_init__(self) -> None:
        if self.max_rise < 0 or not 0 <= self.max_repeated <= 1 or self.collapse < 1:
            raise ValueError(
                "guard.max_rise must not be negative, guard.max_repeated lie in [0, 1], guard.collapse be at least 1; got "
                f"{self.max_rise}, {self.max_repeated}, {self.collapse}"
            )


@dataclass(frozen=True)
class ConsistencyRun:
    """One run of consistency training."""

    # The base's figures are of these: another launch that measures something else cannot be held against them.
    FIXED: ClassVar[tuple[str, ...]] = tuple(
        f"evaluate.{name}" for name in ("conversations", "probe_prompts", "probe_tokens")
    )

    @property
    def free(self) -> tuple[str, ...]:
        """What may change beside `FREE_ON_RESUME`: a finished run that is started again with another strength exports anew.
        With states=online the training itself depends on it."""
        return () if self.objective.states == "online" else ("adapters.strength",)

    method: Literal["consistency"] = "consistency"
    """The only one of this script."""
    target: TargetConfig = field(default_factory=TargetConfig)
    """The model that is taught, which is also the base that it is held against; a second round names the first one's export."""
    quantize: Quantize = "none"
    """Weights cannot be rounded here: the export is the whole model with the adapters added in."""
    data: DataConfig = field(default_factory=DataConfig)
    """Training conversations: answers of the target's own, with their trajectories for `objective.states=stored`
    (`draftsmith rollout --trajectories`)."""
    preset: str = "cllm"
    """A key of PRESETS (models/consistency.py): the defaults of `objective`."""
    objective: ConsistencyConfig = field(default_factory=ConsistencyConfig)
    """What a block shows and what its rows learn."""
    adapters: AdapterConfig = field(default_factory=lambda: AdapterConfig(mask="none"))
    """What is trained."""
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
    """Held-out figures during training; the probe answers `probe_prompts` held-out prompts by Jacobi decoding."""
    guard: GuardConfig = field(default_factory=GuardConfig)
    """When the student has drifted too far."""
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
    run: str = "runs/consistency"
    """Run folder: checkpoints/, metrics.jsonl, run.yaml, export/."""
    resume: Literal["auto", "never"] = "auto"
    """`auto`: go on from the newest complete checkpoint of the run folder, if there is one; `never`: refuse such a folder."""


def read_config(argv: Sequence[str], prog: str) -> ConsistencyRun:
    """The settings of a command line; the objective's defaults are taken from its preset.

    Raises UsageError or ValueError, one line, before any weights are loaded and with nothing written.
    """
    defaults = preset_defaults(given_keys(ConsistencyRun, argv), PRESETS, "cllm", "objective")
    config = parse(
        ConsistencyRun,
        argv,
        prog=prog,
        sections={"objective": ConsistencyConfig},
        description="Train a consistency model.",
        defaults=defaults | {"adapters.mask": "none"},
    )
    check(config)
    return config


def check(config: ConsistencyRun) -> None:
    """Refuse what can be refused without weights. Raises UsageError or ValueError, one line."""
    evaluate = config.evaluate
    if config.quantize != "none":
        raise UsageError(
            f"quantize={config.quantize}: the export is the whole model with the adapters added in, and would keep the "
            "rounding errors for good; leave it out (quantise the export in the engine that serves it)"
        )
    if config.adapters.kind == "full" and config.target.dtype in ("bfloat16", "float16"):
        raise UsageError(
            f"adapters.kind=full trains the weights themselves, and {config.target.dtype} would round small steps away: set "
            "target.dtype=float32, or adapters.kind=lora"
        )
    config.objective.check(config.adapters)
    if config.objective.states == "stored" and config.objective.start == "mask":
        raise UsageError(
            "objective.start=mask: no stored trajectory begins so; set objective.start to what the data begin with (prompt, text, "
            "last or random), or objective.states to online or noise"
        )
    passes, usual = config.objective.passes, ConsistencyConfig.passes
    if config.objective.states != "online" and passes != usual:
        raise UsageError(
            f"objective.passes={passes} is of the walk of states=online, and objective.states={config.objective.states} has "
            f"none: leave it out, or put back what a recipe sets with objective.passes={usual}"
        )
    if config.objective.block >= config.data.max_length:
        raise UsageError(
            f"objective.block={config.objective.block} is no part of a text of data.max_length={config.data.max_length}: "
            "choose a smaller block"
        )
    for name in ("conversations", "probe_prompts", "probe_tokens"):
        if getattr(evaluate, name) < 1:
            raise UsageError(
                f"evaluate.{name}={getattr(evaluate, name)}: the guard has nothing to go by; at least 1 is needed"
            )
    if evaluate.probe_every % evaluate.every:
        raise UsageError(
            f"evaluate.probe_every={evaluate.probe_every} is no multiple of evaluate.every={evaluate.every}: the best "
            "step is chosen where both are measured"
        )
    if evaluate.probe_k != EvalConfig.probe_k:
        raise UsageError(
            f"evaluate.probe_k={evaluate.probe_k} is of drafters: blocks have objective.block; leave it out"
        )
    check_run(config)
