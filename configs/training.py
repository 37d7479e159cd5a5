"""Settings that only training has: one frozen dataclass per concern, gathered in `TrainConfig`.

Settings of a method, of the data or of an export stand beside their owners (`models/<method>.py`, `data/sources.py`).
A default is written once, here, with its source. Everything that can be refused without loading weights is refused in
`__post_init__` or in `check`, by name. Tests: `pytest tests/test_config.py`.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any, Literal

from ..data.formats import STORED, TEACHER, TOP_K, Stored
from ..data.places import CACHE_GB
from ..data.sources import HELDOUT, DataConfig
from ..models.placement import Placement
from ..models.quantize import Quantize, check_quantize
from .parse import flatten


@dataclass(frozen=True)
class TargetConfig:
    """The frozen model to be sped up."""

    name: str = "smollm2"
    """Hub id, local folder, GGUF file, or a built-in name: `smollm2` (SmolLM2-135M-Instruct), `tiny` (random weights)."""
    revision: str | None = None
    """Commit or tag of a Hub id; the resolved commit is written into the export."""
    dtype: Literal["float32", "bfloat16", "float16", "float64"] = "bfloat16"
    """Weights and states of the target. The drafter always keeps fp32 masters."""
    trust_remote_code: bool = False
    """Run Python code that comes with the model. Off for every name; when on, pin a 40-digit `revision`."""
    placement: Placement = "replicated"
    """Where its layers are (embedding and head are whole in every process): `replicated` in every process; `sharded` over
    the processes of a machine; on other `devices` than the drafter; or `absent`, their states captured before."""
    devices: tuple[str, ...] = ()
    """With placement `devices`: where each process puts its layers (`cuda:1` or `1`), shared out over the processes of a
    machine, in order; several take as many layers each."""
    quantize: Quantize = "none"
    """How the weights of its layers are held: as they are; `nf4` or `int8` (package bitsandbytes), `int8_weight` (torchao)."""

    def __post_init__(self) -> None:
        if (self.placement == "devices") != bool(self.devices):
            raise ValueError(
                f"target.placement={self.placement} with target.devices={list(self.devices)}: placement=devices needs them, "
                "no other takes them"
            )
        if self.quantize != "none" and self.placement != "replicated":
            raise ValueError(
                f"target.quantize={self.quantize} with target.placement={self.placement}: rounded weights are loaded whole, "
                "use placement=replicated"
            )
        if self.trust_remote_code and not (self.revision and len(self.revision) == 40):
            raise ValueError(
                f"target.trust_remote_code=true needs target.revision pinned to a 40-digit commit, got {self.revision!r}"
            )


@dataclass(frozen=True)
class StatesConfig:
    """Where the target's states come from."""

    source: Literal["captured", "live"] = "captured"
    """`captured`: one forward over the data, kept as shards, so that every epoch and method reads them; `live`: the
    target runs beside the drafter in every step."""
    folder: str | None = None
    """Shared folder of captured states (`train` and `heldout` in it, as `draftsmith capture --out` leaves them), or the
    address of a store (s3://bucket/path, gs://..., hf://datasets/...); null = `states/` of the run. Shards of another
    target or data are refused."""
    cache: str | None = None
    """Local folder for what is fetched from a store; null = `states/` of $DRAFTSMITH_CACHE or ~/.cache/draftsmith."""
    cache_gb: float = CACHE_GB
    """Gigabytes that it may take. What was not read for the longest is deleted first."""
    rolling: bool = False
    """Read states while `draftsmith capture --rolling N` writes them into `folder`/train, once, and delete what a
    checkpoint no longer needs: disk stays bounded. One pass over the data."""
    batch_tokens: int = 2048
    """Tokens per target forward while capturing."""
    stored: Stored = STORED
    """How captured taps are kept: in full, or in about a half (int8) or a quarter (int4) of the bytes of bfloat16."""
    teacher: Literal["auto", "last_hidden", "top_k"] = "auto"
    """What captured states keep of the target's predictions: its last hidden states, or its likeliest tokens with their
    probabilities, which is less; methods that read last hidden states themselves refuse that. auto = what they allow."""
    last_stored: Stored = "bfloat16"
    """How captured last hidden states are kept."""
    top_k: int = TOP_K
    """How many tokens a top_k teacher names; the others are known by their mass alone."""
    verify: int = 2
    """Samples of captured states that are held against a fresh pass of the target before they are trained on."""

    def __post_init__(self) -> None:
        if self.top_k < 1 or self.verify < 0:
            raise ValueError(
                f"states.top_k must be at least 1 and states.verify at least 0, got {self.top_k}, {self.verify}"
            )
        if self.cache_gb <= 0:
            raise ValueError(f"states.cache_gb must be positive, got {self.cache_gb}")
        if self.rolling and (self.source != "captured" or self.folder is None):
            raise ValueError(
                "states.rolling=true reads what another command captures: set states.folder, and source=captured"
            )

    def keeps(self, needs: frozenset[str], objective: str) -> tuple[bool, int]:
        """Whether captured states for `loss_needs` hold last_hidden, and how many likeliest tokens (0 = none)."""
        if not {"last_hidden", "teacher"} & needs:
            return False, 0
        able = "last_hidden" not in needs and "topk_ce" not in objective
        top_k = able and (TEACHER if self.teacher == "auto" else self.teacher) == "top_k"
        return not top_k, self.top_k if top_k else 0


@dataclass(frozen=True)
class BatchConfig:
    """What one optimiser step sees: `accumulate` micro-batches of `rows` rows of `row_length` tokens, over all
    processes together. The result does not depend on how many processes share the rows."""

    row_length: int = 1024
    """Tokens per packed row; documents are kept apart by the mask."""
    rows: int = 4
    """Rows per micro-batch, over all processes."""
    accumulate: int = 1
    """Micro-batches per optimiser step. The last window of an epoch may be shorter and is normalised by its own counts."""

    def __post_init__(self) -> None:
        for name in ("row_length", "rows", "accumulate"):
            if getattr(self, name) < 1:
                raise ValueError(f"batch.{name} must be at least 1, got {getattr(self, name)}")


@dataclass(frozen=True)
class BudgetConfig:
    """How long to train: set exactly one of steps, tokens, minutes, epochs. The schedule spans the whole budget."""

    steps: int | None = None
    """Optimiser steps."""
    tokens: int | None = None
    """Tokens read, padding left out."""
    minutes: float | None = None
    """Minutes spent in optimiser steps (capture, evaluation and saving are not counted), over all resumes together."""
    epochs: float | None = None
    """Passes over the training data."""
    stop_at: int | None = None
    """End this launch once so many optimiser steps are done, saving as usual; a later launch goes on from there."""

    def __post_init__(self) -> None:
        given = {k: getattr(self, k) for k in ("steps", "tokens", "minutes", "epochs") if getattr(self, k) is not None}
        if len(given) > 1:
            raise ValueError(f"set one of budget.steps, .tokens, .minutes, .epochs; got {given}")
        for name, value in given.items():
            if value <= 0:
                raise ValueError(f"budget.{name} must be positive, got {value}")
        if self.stop_at is not None and self.stop_at < 1:
            raise ValueError(f"budget.stop_at must be at least 1, got {self.stop_at}")


@dataclass(frozen=True)
class OptimConfig:
    """Optimiser and schedule. Matrices decay, vectors (norms, biases) do not."""

    name: Literal["adamw", "muon", "sgd"] = "adamw"
    """`muon`: torch.optim.Muon (Jordan et al. 2024) for matrices inside the network, AdamW for heads, embeddings, vectors.
    `sgd`: no moments, no memory; updates are proportional to gradients, which is what tests of exactness need."""
    lr: float = 3e-4
    """Peak learning rate."""
    muon_lr: float = 0.01
    """Peak learning rate of the Muon group, in AdamW's scale: 0.2 times it is the size of an update's entries
    (Liu et al. 2025, arXiv:2502.16982, section 2.2)."""
    betas: tuple[float, float] = (0.9, 0.95)
    """AdamW's moments (EAGLE's training code, §"Training" of arXiv:2401.15077)."""
    eps: float = 1e-8
    """Added to the root of AdamW's second moment (Kingma and Ba, arXiv:1412.6980, algorithm 1)."""
    weight_decay: float = 0.0
    """Decoupled decay (AdamW)."""
    clip: float = 0.5
    """Largest gradient norm (EAGLE, arXiv:2401.15077 §4); 0 turns clipping off."""
    schedule: Literal["cosine", "wsd", "constant"] = "cosine"
    """After warm-up: cosine to the floor; warm-up-stable-decay (linear decay at the end); or constant."""
    warmup: float = 0.05
    """Share of the budget in which the rate rises linearly."""
    decay: float = 0.2
    """Share of the budget in which `wsd` decays."""
    floor: float = 0.1
    """Final rate as a share of the peak."""

    def __post_init__(self) -> None:
        for name, low, high in (("lr", 0, 10), ("muon_lr", 0, 10), ("eps", 0, 1), ("clip", 0, 1e9), ("floor", 0, 1)):
            if not low <= getattr(self, name) <= high:
                raise ValueError(f"optim.{name} must lie in [{low}, {high:g}], got {getattr(self, name)}")
        for name in ("warmup", "decay"):
            if not 0 <= getattr(self, name) < 1:
                raise ValueError(f"optim.{name} is a share of the budget in [0, 1), got {getattr(self, name)}")
        if self.schedule == "wsd" and self.warmup + self.decay > 1:
            raise ValueError(f"optim.warmup + optim.decay must not exceed 1, got {self.warmup} + {self.decay}")


@dataclass(frozen=True)
class SaveConfig:
    """Periodic checkpoints. They cannot be switched off: a run that is killed loses one interval at most."""

    steps: int = 500
    """Save every so many optimiser steps ..."""
    minutes: float = 15.0
    """... and every so many minutes of wall time, whichever comes first."""
    keep: int = 2
    """Newest checkpoints that are kept, beside the best by held-out run length."""

    def __post_init__(self) -> None:
        if self.steps < 1 or self.minutes <= 0 or self.keep < 1:
            raise ValueError(
                f"save.steps, save.minutes and save.keep must be positive, got {self.steps}, {self.minutes}, {self.keep}: "
                "periodic saves cannot be turned off"
            )


@dataclass(frozen=True)
class EvalConfig:
    """Measurements during training, on held-out conversations."""

    every: int = 100
    """Optimiser steps between held-out evaluations (teacher-forced); one more comes at the end."""
    conversations: int = HELDOUT
    """Held-out conversations that are used. States captured before must have held out as many (`draftsmith capture --heldout`)."""
    probe_every: int = 200
    """Optimiser steps between real speculative runs; 0 = only at the end."""
    probe_prompts: int = 4
    """Held-out prompts of the speculative probe."""
    probe_tokens: int = 24
    """New tokens per prompt of the probe."""
    probe_k: int = 4
    """Draft length of the probe, at most what the drafter allows."""

    def __post_init__(self) -> None:
        if self.every < 1 or self.probe_every < 0:
            raise ValueError(
                f"evaluate.every must be at least 1 and evaluate.probe_every at least 0, got {self.every}, {self.probe_every}"
            )


@dataclass(frozen=True)
class LogConfig:
    """Metrics always go to `metrics.jsonl` of the run."""

    every: int = 10
    """Optimiser steps between training lines."""
    trackers: tuple[Literal["wandb", "tensorboard"], ...] = ()
    """Further places: wandb (set WANDB_MODE=offline to keep it local), tensorboard."""
    project: str = "draftsmith"
    """Project name for wandb."""
    progress: bool = True
    """Progress bar with rates and time left."""


@dataclass(frozen=True)
class TrainConfig:
    """One training run."""

    method: str
    """A key of METHODS (`draftsmith/models`); its own settings go under `drafter`."""
    target: TargetConfig = field(default_factory=TargetConfig)
    """The frozen model to be sped up."""
    data: DataConfig = field(default_factory=DataConfig)
    """Training conversations; held-out ones come from the same source's `heldout` split."""
    drafter: Any = None
    """The method's own settings."""
    draft_vocab: int | None = None
    """Rows of a reduced draft vocabulary, the most frequent supervised tokens; null = all of the target's."""
    init_from: str | None = None
    """Exported head to start from (folder or Hub id); it keeps its token mapping."""
    states: StatesConfig = field(default_factory=StatesConfig)
    """Where the target's states come from."""
    batch: BatchConfig = field(default_factory=BatchConfig)
    """What one optimiser step sees."""
    budget: BudgetConfig = field(default_factory=BudgetConfig)
    """How long to train."""
    optim: OptimConfig = field(default_factory=OptimConfig)
    """Optimiser and schedule."""
    precision: Literal["bf16", "fp32"] = "bf16"
    """Arithmetic of the drafter: bf16 autocast over fp32 masters, or fp32 throughout."""
    save: SaveConfig = field(default_factory=SaveConfig)
    """Periodic checkpoints."""
    evaluate: EvalConfig = field(default_factory=EvalConfig)
    """Measurements during training."""
    log: LogConfig = field(default_factory=LogConfig)
    """Metrics and progress."""
    seed: int = 0
    """Seed of initial weights, data order and training noise."""
    deterministic: bool = False
    """Refuse operations that have no deterministic implementation (slower on GPUs; CPU runs are deterministic anyway)."""
    engine: Literal["auto", "ddp", "zero1", "zero2", "zero3", "fsdp2"] = "auto"
    """What processes share: the work alone (`ddp`); moments, too (`zero1`); and gradients (`zero2`); and parameters at rest
    (`zero3`; `fsdp2`, by torch itself). Files for `accelerate launch --config_file` are in configs/accelerate; a launch by another engine is refused.
    auto = whatever the launcher started."""
    processes: int | None = None
    """Processes that must take part; a launch with another number is refused. null = whatever the launcher started."""
    stall_minutes: float = 10.0
    """Several processes: end the launch, naming the process, when one gives no sign of life or holds the others up for so
    long; 0 = never."""
    run: str = "runs/train"
    """Run folder: checkpoints/, metrics.jsonl, run.yaml, export/."""
    resume: Literal["auto", "never"] = "auto"
    """`auto`: go on from the newest complete checkpoint of the run folder, if there is one; `never`: refuse such a folder."""


# What may change between the launches of one run; everything else must be equal for a resume to mean anything. A run's
# settings may take exceptions (`FIXED`) and add to it (`free`).
FREE_ON_RESUME = (
    "budget",
    "save",
    "evaluate",
    "log",
    "guard",
    "run",
    "resume",
    "engine",
    "processes",
    "target.placement",
    "target.devices",
    "stall_minutes",
    "states.folder",
    "states.cache",
    "states.cache_gb",
    "states.batch_tokens",
    "states.verify",
)


def check(config: TrainConfig) -> None:
    """Refuse what can be refused without weights.

    Raises: ValueError naming the key, its value and what is allowed.
    """
    from ..models import METHODS

    method = METHODS[config.method]
    for name, value, least in (
        ("states.batch_tokens", config.states.batch_tokens, 1),
        ("evaluate.probe_k", config.evaluate.probe_k, 1),
    ):
        if value < least:
            raise ValueError(f"{name} must be at least {least}, got {value}")
    check_run(config)
    if config.states.rolling and config.budget.steps is None and (config.budget.epochs or 2) > 1:
        raise ValueError(
            "states.rolling=true deletes what was read, so that there is one pass: set budget.epochs to at most 1, or budget.steps"
        )
    if config.draft_vocab is not None and config.draft_vocab < 1:
        raise ValueError(f"draft_vocab must be at least 1 or null, got {config.draft_vocab}")
    check_quantize(config.target.quantize)
    check_placement(config, method.loss_needs)
    if config.states.source == "captured" and (unstored := {"module", "kv"} & method.loss_needs):
        why = "gradients through the target" if "module" in unstored else "the target's keys and values"
        raise ValueError(f"method {config.method} needs {why}: set states.source=live")
    if config.states.source == "captured" and config.states.teacher == "top_k":
        check_top_k(config)
    if config.states.source == "captured" and getattr(config.drafter, "live", False):
        raise ValueError(
            f"method {config.method} with these settings trains on text of its own: set states.source=live "
            "(or drafter.on_policy=0)"
        )


def check_placement(config: TrainConfig, needs: frozenset[str]) -> None:
    """Raises ValueError where the method needs more of the target than is left of it where it is placed."""
    target = config.target
    asked = f"target.placement={target.placement}"
    if target.placement == "absent":
        if {"module", "kv"} & needs:
            why = "gradients through the target's layers" if "module" in needs else "the target's keys and values"
            raise ValueError(f"{asked}: method {config.method} needs {why}, and they are not there; place it otherwise")
        if config.states.source != "captured":
            raise ValueError(
                f"{asked}: nothing can be computed by the target, and method {config.method} has states.source="
                f"{config.states.source}; capture its states first, or place it otherwise"
            )
        if needs <= {"ids"}:
            raise ValueError(
                f"{asked}: method {config.method} reads no states, which would say whose head this is; place it otherwise"
            )
    whole = target.placement in ("replicated", "devices") and target.quantize == "none"
    lm = getattr(config.drafter, "lm", None)
    for key, given in (
        ("drafter.mlp_from_target=true", getattr(config.drafter, "mlp_from_target", False)),
        ("drafter.lm.start=layers", lm is not None and lm.start == "layers" and lm.architecture is None),
    ):
        if given and not whole:
            asked = asked if target.quantize == "none" else f"target.quantize={target.quantize}"
            raise ValueError(f"{key} copies layers of the target, and {asked} has none of them whole; start otherwise")


def check_top_k(config: TrainConfig) -> None:
    """Raises ValueError where a teacher of its likeliest tokens is not enough."""
    from ..models import METHODS

    if "last_hidden" in METHODS[config.method].loss_needs:
        raise ValueError(
            f"method {config.method} reads the target's last hidden states, states.teacher=top_k keeps none: "
            "set states.teacher=last_hidden, and states.last_stored=int8 if bytes matter"
        )
    if "topk_ce" in getattr(config.drafter, "objective", ""):
        raise ValueError(
            f"objective {config.drafter.objective!r}: topk_ce needs all of the target's logits: "
            "set states.teacher=last_hidden, or write kl"
        )


def check_run(config: Any) -> None:
    """The same for the settings that every training has (`TrainConfig`, `configs.diffusion.DiffusionConfig`)."""
    budget = config.budget
    if config.stall_minutes < 0:
        raise ValueError(f"stall_minutes must be at least 0 (0 = never), got {config.stall_minutes}")
    if config.evaluate.conversations < 0:
        raise ValueError(f"evaluate.conversations must be at least 0, got {config.evaluate.conversations}")
    if not config.run:
        raise ValueError("run must name a folder, got ''")
    if all(v is None for v in (budget.steps, budget.tokens, budget.minutes, budget.epochs)):
        raise ValueError("no budget: set one of budget.steps, budget.tokens, budget.minutes, budget.epochs")
    if config.data.max_length > config.batch.row_length:
        raise ValueError(
            f"data.max_length={config.data.max_length} does not fit batch.row_length={config.batch.row_length}: "
            "a packed row must hold the longest sample"
        )
    if not isinstance(config, TrainConfig):
        refuse_placed(config.target)


def refuse_placed(target: TargetConfig) -> None:
    """Raises ValueError for targets that are not whole in every process, where training happens inside them."""
    if target.placement != "replicated":
        raise ValueError(
            f"target.placement={target.placement}: this training changes the target's layers and passes through them a "
            "different number of times in each process; use placement=replicated (quantize=nf4 or int8_weight makes them small)"
        )
    if target.quantize != "none":
        raise ValueError(f"target.quantize={target.quantize}: here the key is quantize")


def differing(old: dict[str, Any], config: Any) -> list[str]:
    """One line "key: was A, is B" for each setting that must not change between two launches of a run."""

    def plain(value: Any) -> Any:
        return list(map(plain, value)) if isinstance(value, (list, tuple)) else value

    before, after, fixed = flatten(old), flatten(asdict(config)), getattr(config, "FIXED", ())
    every = (*FREE_ON_RESUME, *getattr(config, "free", ()))
    lines = []
    for key in sorted(before.keys() | after.keys()):
        if key not in fixed and any(key == free or key.startswith(free + ".") for free in every):
            continue
        if plain(before.get(key)) != plain(after.get(key)):
            lines.append(f"{key}: was {before.get(key)!r}, is {after.get(key)!r}")
    return lines
