"""`draftsmith plan RECIPE key=value ...`: what a run will take, before anything runs and with no weights at hand.

Parameters, memory of a device by component, disk, operations, hours and cost, and the largest micro-batch that fits; for
every script's recipes. A target's config.json is all that is read of it. Activations are found by running the method's own
loss on shapes (models/outline.py), everything else is arithmetic (train/plan_memory.py, train/plan_devices.py).

    draftsmith plan configs/eagle3_smollm2.yaml
    draftsmith plan configs/eagle3_smollm2.yaml target.name=meta-llama/Llama-3.1-8B --gpu h100 --devices 8 --price 2.5
    draftsmith plan RECIPE target.name=folder/with/config.json --samples 68000 --tokens 60000000 --gpu rtx4090

Exit code 0 when the run fits the device that was named, or none was; 1 when it does not (and what would); 2 for a wrong
request. Tests: `pytest tests/test_plan.py`; predictions against measured peaks: `python tests/bench/plan.py`.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from ..configs import consistency, diffusion
from ..configs.consistency import ConsistencyRun
from ..configs.diffusion import DiffusionConfig
from ..configs.heads import HeadsConfig
from ..configs.parse import UsageError, keys_of, parse, read_recipe, split_tokens
from ..configs.runs import RunConfig
from ..configs.training import TargetConfig, TrainConfig
from ..models import METHODS
from ..models.outline import load_config
from .distill_draft import read_config as read_draft
from .plan_devices import DEVICES, USUAL_SHARE, Device, device_of, step_seconds
from .plan_memory import ENGINES, Placement, Term, largest, most_rows, total
from .plan_run import Plan, Work, count, make_plan, size, text_of

GB = 1e9
MOST_TOKENS = 2**15  # of a micro-batch on one device: larger ones are not looked for


@dataclass(frozen=True)
class PlanConfig:
    """Say what a run will take, before anything runs. All other settings are the recipe's."""

    recipe: str
    """YAML recipe of any training script; settings of it follow as key=value."""
    gpu: str | None = None
    """Device that it runs on: a key of the table in `train/plan_devices.py`, such as h100, a100, rtx4090. null = no time, and
    no verdict."""
    devices: int = 1
    """Devices of a node."""
    nodes: int = 1
    """Nodes."""
    placement: Placement | None = None
    """Where the frozen target is: whole on every device; its layers sharded over those of a machine; on devices of its own; in
    4 (nf4) or 8 bits (int8); or absent, its states captured elsewhere before. null = as the recipe says
    (`target.placement`, `target.quantize`)."""
    memory_gb: float | None = None
    """Memory of a device in GB (1e9 bytes), in the place of the table's."""
    reserve_gb: float = 1.5
    """Of that, what is not ours: context, libraries, communication buffers, fragments (an allowance; measure yours)."""
    price: float | None = None
    """Price of a device for an hour. null = no cost."""
    share: float = USUAL_SHARE
    """Share of the device's peak that products reach. An assumption; a run's log says what yours was."""
    samples: int | None = None
    """Samples of the data, for data or tokenizers that are not at hand; goes with `tokens`."""
    tokens: int | None = None
    """Tokens of all samples."""
    supervised: float = 1.0
    """Share of the tokens that are supervised, where samples and tokens are given. 1 = the most that it can take."""
    json: bool = False
    """Print one JSON object."""

    def __post_init__(self) -> None:
        if min(self.devices, self.nodes) < 1:
            raise ValueError(f"devices and nodes must be at least 1, got {self.devices} and {self.nodes}")
        if (self.samples is None) != (self.tokens is None):
            raise ValueError(f"samples={self.samples} and tokens={self.tokens} go together: give both, or neither")
        if not 0 < self.supervised <= 1 or not 0 < self.share <= 1:
            raise ValueError(f"supervised and share lie in (0, 1], got {self.supervised} and {self.share}")
        if self.price is not None and self.gpu is None:
            raise ValueError(f"price={self.price}: hours are of a device, name it with gpu=...")
        if self.gpu is not None:
            device_of(self.gpu)

    @property
    def world(self) -> int:
        return self.devices * self.nodes

    @property
    def place(self) -> Placement:
        """Where the target is, once the recipe has been read."""
        assert self.placement is not None
        return self.placement

    @property
    def room(self) -> float | None:
        """Bytes of a device that a run may use."""
        size = self.memory_gb if self.memory_gb is not None else DEVICES[self.gpu].memory_gb if self.gpu else None
        return None if size is None else (size - self.reserve_gb) * GB


def split(argv: Sequence[str]) -> tuple[PlanConfig, list[str]]:
    """The plan's own settings, and the command line of the recipe's script. Raises UsageError."""
    own = keys_of(PlanConfig, {})
    keys: dict[str, Any] = dict(own)
    for kind in (TrainConfig, ConsistencyRun, DiffusionConfig, HeadsConfig):
        keys |= {key: value for key, value in keys_of(kind, {}).items() if key not in own}
    for method in METHODS.values():
        keys |= keys_of(TrainConfig, {"drafter": method.Config})
    asks = [a for a in argv if a in ("--help", "-h", "--print_config", "--print-config")]
    recipes, pairs = split_tokens([a for a in argv if a not in asks], ("recipe",), keys)
    mine = [f"{key}={value}" for key, value in pairs if key in own]
    if recipes and not any(key == "recipe" for key, _ in pairs):
        mine.append(f"recipe={recipes[0]}")
    text = "Say what a run will take, before anything runs."
    config = parse(PlanConfig, [*mine, *asks], prog="draftsmith plan", positional=("recipe",), description=text)
    recipes = recipes or [config.recipe]
    rest = [f"{key}={value}" for key, value in pairs if key not in own]
    return config, [*(f"--config={path}" for path in recipes), *rest]


def read_run(argv: Sequence[str]) -> RunConfig:
    """The settings of a recipe, read as its own script reads them. Raises UsageError or ValueError."""
    recipes, pairs = split_tokens(argv, (), {})
    said = [read_recipe(path) for path in recipes]
    method = next((m for m in (dict(pairs).get("method"), *(one.get("method") for one in said[::-1])) if m), None)
    if method == "decision_heads":
        raise ValueError(
            "train/fit_decision_heads.py has no plan: it trains two small heads in one process, on states of a model that fits "
            "already"
        )
    if method == "consistency":
        return consistency.read_config(argv, "draftsmith plan")
    if method == "block_diffusion":
        return diffusion.read_config(argv, "draftsmith plan", "block_diffusion")
    if method in ("certainty", "on_policy"):
        return diffusion.read_config(argv, "draftsmith plan", "certainty", "on_policy")
    return read_draft(argv, "draftsmith plan")


def run_plan(config: PlanConfig, argv: Sequence[str]) -> int:
    """Plan, print, and return the exit code."""
    run = read_run(argv)
    config = replace(config, placement=config.placement or placement_of(run.target))
    refuse_placement(run, config.place)
    name, target = load_config(run.target.name, run.target.revision)
    text = text_of(run, target.vocab_size, config.samples, config.tokens, config.supervised)
    rows = math.ceil(run.batch.rows / config.world)
    work = Work(run, name, target, text, config.world, config.devices)
    plan = make_plan(work, rows, work.engine, config.place, config.gpu is None)
    fits = None if config.room is None else plan.peak <= config.room
    most = largest_micro_batch(work, plan, config) if config.room is not None else None
    ways = what_would(work, plan, config) if fits is False else []
    if config.json:
        print(json.dumps(as_json(plan, config, fits, most, ways)))
    else:
        print("\n".join(lines(plan, config, fits, most, ways)))
    return 1 if fits is False else 0


def placement_of(target: TargetConfig) -> Placement:
    """What a recipe says, in the words of a plan."""
    if target.quantize != "none":
        return "nf4" if target.quantize == "nf4" else "int8"
    return "own" if target.placement == "devices" else target.placement


def refuse_placement(run: RunConfig, placement: Placement) -> None:
    """Raises ValueError for a placement that the method cannot do with."""
    needs = METHODS[run.method].loss_needs if isinstance(run, TrainConfig) else frozenset({"module"})
    inside = {"module", "kv"} & needs or (isinstance(run, TrainConfig) and getattr(run.drafter, "live", False))
    if inside and placement == "absent":
        raise ValueError(f"method {run.method} runs the target in every step: placement=absent is for captured states")
    if "module" in needs and placement == "own":
        raise ValueError(
            f"method {run.method} has its weights inside the target: placement=own is for drafters beside it"
        )
    if placement == "absent" and isinstance(run, TrainConfig) and run.states.source != "captured":
        raise ValueError("placement=absent needs states.source=captured")


def largest_micro_batch(work: Work, plan: Plan, config: PlanConfig) -> int:
    """Rows of a device; 0 where not even one fits."""
    assert config.room is not None
    known = {plan.rows: plan.peak}

    def peak(rows: int) -> int:
        if rows not in known:
            known[rows] = make_plan(work, rows, work.engine, config.place, config.gpu is None, plan).peak
        return known[rows]

    return most_rows(peak, config.room, max(MOST_TOKENS // work.run.batch.row_length, 1))


def what_would(work: Work, plan: Plan, config: PlanConfig) -> list[str]:
    """Changes of the recipe that would make the run fit, each alone, then with one row a device and the same rows a step."""
    assert config.room is not None
    batch = work.run.batch
    few = {"batch.rows": config.world, "batch.accumulate": batch.accumulate * plan.rows}
    one = plan if plan.rows == 1 else one_row(work, plan, config, few)
    engines = [work.engine, *(e for e in ENGINES if config.world > 1 and e != work.engine)]
    found: list[str] = []
    for place in ("replicated", "sharded", "own", "nf4", "absent"):
        try:
            refuse_placement(work.run, place)
        except ValueError:
            continue
        if place == "sharded" and config.world == 1:
            continue
        for engine in engines:
            for of in (plan, one):
                same = (place, engine, of) == (config.placement, work.engine, plan)
                peak = of.again(engine, place).peak
                if not same and peak <= config.room:
                    keys: dict[str, object] = keys_of_placement(place, work.run.target)
                    keys |= {"engine": engine} if engine != work.engine else {}
                    keys |= few if of is not plan else {}
                    found.append(f"{' '.join(f'{k}={v}' for k, v in keys.items())}: {peak / GB:.2f} GB")
                    break
    return found[:4]


def one_row(work: Work, plan: Plan, config: PlanConfig, few: dict[str, int]) -> Plan:
    """The same step in micro-batches of one row a device."""
    batch = replace(work.run.batch, rows=few["batch.rows"], accumulate=few["batch.accumulate"])
    fewer = replace(work, run=replace(work.run, batch=batch))
    return make_plan(fewer, 1, work.engine, config.place, config.gpu is None, plan)


def keys_of_placement(placement: Placement, said: TargetConfig) -> dict[str, object]:
    """What a recipe must say to have its target there, where it does not say so."""
    words = {"own": "devices", "nf4": "replicated", "int8": "replicated"}
    keys: dict[str, object] = {"target.placement": words.get(placement, placement)}
    keys["target.quantize"] = placement if placement in ("nf4", "int8") else "none"
    if placement == "own" and not said.devices:
        keys["target.devices"] = "[...]"
    now = {"target.placement": said.placement, "target.quantize": said.quantize}
    return {key: value for key, value in keys.items() if now.get(key) != value}


def hours_of(plan: Plan, config: PlanConfig) -> dict[str, float]:
    """Hours of capture and training on the named device. Empty without one, or where the steps are not known."""
    if config.gpu is None:
        return {}
    device: Device = DEVICES[config.gpu]
    update = step_seconds(plan.step_flops, plan.numbers.trained, device, config.share)
    capture = (plan.capture_flops or 0) / (config.share * device.tflops * 1e12) / config.world / 3600
    minutes = plan.work.run.budget.minutes
    training = minutes / 60 if minutes is not None else None if plan.steps is None else plan.steps * update / 3600
    return {} if training is None else {"capture": capture, "training": training, "step_seconds": update}


def table(terms: Sequence[Term]) -> list[str]:
    width = max(len(term.name) for term in terms)
    return [f"  {term.name:<{width}}  {size(term.bytes):>9}  {term.formula}" for term in terms]


def lines(plan: Plan, config: PlanConfig, fits: bool | None, most: int | None, ways: Sequence[str]) -> list[str]:
    """The plan, for people."""
    run, numbers, work = plan.work.run, plan.numbers, plan.work
    biggest = largest(plan.terms)
    out = [
        f"{run.method} for {work.name}: {numbers.trained:,} trained numbers, {numbers.target:,} frozen",
        f"batch: {run.batch.rows} rows of {run.batch.row_length:,} tokens x {run.batch.accumulate} a step, {plan.rows} "
        f"{'row' if plan.rows == 1 else 'rows'} a device, {plan.supervised:,} tokens of them supervised ({work.text.said})",
        f"memory of a device, {plan.moment} ({work.engine}, target {config.placement}, {config.world} "
        f"{'device' if config.world == 1 else 'devices'}):",
        *table(plan.terms),
        f"  total {size(plan.peak)}"
        + "".join(
            f"; when {name}: {size(total(terms))}" for name, terms in plan.moments.items() if name != plan.moment
        ),
        f"largest term: {biggest.name}, {size(biggest.bytes)} = {biggest.formula}",
        f"largest tensor: {plan.step.largest_is}, {size(plan.step.largest)}",
        *disk_lines(plan),
        f"FLOPs: {count(plan.step_flops)} a step and device"
        + ("" if plan.capture_flops is None else f", {count(plan.capture_flops)} to capture")
        + (
            ""
            if plan.steps is None
            else f", {count(plan.step_flops * plan.steps * config.world)} to train {plan.steps:,} steps"
        ),
    ]
    out += time_lines(plan, config)
    if fits is not None and config.room is not None:
        room = f"{config.room / GB:.1f} GB of a device ({config.reserve_gb:g} GB kept for what is not ours)"
        out.append(f"{'fits' if fits else 'does not fit'} {room}")
        cap = MOST_TOKENS // run.batch.row_length
        more = " or more" if most is not None and most >= cap else ""
        out.append(f"largest micro-batch: {most}{more} rows of {run.batch.row_length:,} tokens a device")
        out += [f"would fit: {way}" for way in ways]
        if fits is False and not ways:
            out.append(
                "would fit: nothing of engine, placement and one row a device; shorten batch.row_length, or take a larger device"
            )
    out += [f"note: {note}" for note in plan.notes]
    return out


def disk_lines(plan: Plan) -> list[str]:
    disk = plan.disk
    if disk is None:
        return ["disk and steps: not known, the data is not at hand; give samples=... and tokens=..."]
    captured = f"captured states {disk.states:,} bytes and {disk.rows:,} beside them, " if disk.states else ""
    return [
        f"disk: {size(disk.total)}: {captured}{disk.checkpoints} checkpoints of {size(disk.checkpoint)}, export {size(disk.export)}"
    ]


def time_lines(plan: Plan, config: PlanConfig) -> list[str]:
    hours = hours_of(plan, config)
    if config.gpu is None or not hours:
        return []
    device, both = DEVICES[config.gpu], hours["capture"] + hours["training"]
    line = (
        f"time on {config.world} x {device.name}: capture {hours['capture']:.2f} h, training {hours['training']:.2f} h "
        f"({hours['step_seconds']:.3g} s a step), at {config.share:.0%} of {device.tflops:g} TFLOP/s (assumed, share=...)"
    )
    cost = (
        []
        if config.price is None
        else [f"cost: {both * config.world * config.price:,.2f} at {config.price:g} a device and hour"]
    )
    return [line, *cost]


def as_json(plan: Plan, config: PlanConfig, fits: bool | None, most: int | None, ways: Sequence[str]) -> dict[str, Any]:
    """The plan, for machines."""
    hours = hours_of(plan, config)
    both = hours["capture"] + hours["training"] if hours else None
    return {
        "method": plan.work.run.method,
        "target": plan.work.name,
        "trained": plan.numbers.trained,
        "frozen": plan.numbers.target,
        "rows": plan.rows,
        "memory": {term.name: term.bytes for term in plan.terms},
        "formulas": {term.name: term.formula for term in plan.terms},
        "moment": plan.moment,
        "moments": {name: total(terms) for name, terms in plan.moments.items()},
        "peak": plan.peak,
        "largest_term": largest(plan.terms).name,
        "largest_tensor": [plan.step.largest_is, plan.step.largest],
        "disk": None if plan.disk is None else asdict(plan.disk) | {"total": plan.disk.total},
        "flops": {"step": plan.step_flops, "capture": plan.capture_flops},
        "steps": plan.steps,
        "hours": hours,
        "cost": None if both is None or config.price is None else both * config.world * config.price,
        "fits": fits,
        "largest_micro_batch": most,
        "would_fit": list(ways),
    }


def main(argv: Sequence[str]) -> int:
    """The command."""
    if not argv:
        raise UsageError("no recipe: draftsmith plan RECIPE [key=value ...], for example configs/eagle3_smollm2.yaml")
    config, rest = split(argv)
    return run_plan(config, rest)
