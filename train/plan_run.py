"""A recipe, traced and added up: what `draftsmith plan` prints, and the short form that training scripts say first.

Test: pytest tests/test_plan.py
"""

from __future__ import annotations

import math
import os
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from ..configs.consistency import ConsistencyRun
from ..configs.diffusion import DiffusionConfig
from ..configs.runs import RunConfig
from ..configs.training import OptimConfig, TrainConfig
from ..data.batch import Batch
from ..data.encode import Sample, encode_all
from ..data.formats import top_bytes
from ..data.packing import make_batch
from ..data.sources import split_conversations
from ..data.states import FORMAT, ROW_BYTES, SHARD_TOKENS, StateFields, estimate
from ..models import METHODS
from ..models.adapters import Adapters
from ..models.block_diffusion import BlockDiffusion, CertaintyForcing
from ..models.consistency import Consistency
from ..models.lean import PACK_BYTES, packs
from ..models.loading import load_tokenizer
from ..models.on_policy import OnPolicy
from ..models.outline import Outline, outline_target
from ..models.target import DTYPES, Target
from .plan_memory import (
    Disk,
    Numbers,
    Placement,
    Term,
    checkpoint_bytes,
    device_memory,
    largest,
    packed_head,
    packed_memory,
    saving_memory,
    target_bytes,
    total,
)
from .plan_trace import Built, Step, trace
from .stream import Stream

LOOKED = 4  # epochs whose micro-batches are compared
HEAD_ROWS = 256  # rows of full logits that capture holds at once


@dataclass(frozen=True)
class Text:
    """The data: samples where they can be read here, else counts, else nothing but the recipe's lengths (`tokens` None)."""

    samples: list[Sample]
    heldout: int  # tokens that are held out
    tokens: int | None
    supervised: float
    said: str

    def stream(self, run: RunConfig) -> Stream:
        batch = run.batch
        return Stream(
            self.samples, row_length=batch.row_length, rows=batch.rows, accumulate=batch.accumulate, seed=run.seed
        )

    def batch(self, run: RunConfig, rows: int, world: int) -> Batch:
        """The micro-batch of one device that holds the most supervised tokens in the budget's first epochs; of data that is
        not here, full rows."""
        length = run.batch.row_length
        if not self.samples:
            own = min(run.data.max_length, length)
            free = own - max(round(own * self.supervised), 1)
            made = Sample(0, torch.zeros(own, dtype=torch.int64), torch.arange(own) >= free)
            row = [replace(made, sample_id=i) for i in range(length // own)]
            return make_batch([row] * rows, length, run.seed, 0)
        stream, steps = self.stream(run), self.steps(run)
        epochs = 1 if steps is None else min(math.ceil(steps / stream.windows(0)), LOOKED)
        told = [int(sample.supervised.sum()) for sample in self.samples]
        heaviest, chosen = -1, list[list[int]]()
        for every in map(stream.rows_of_epoch, range(epochs)):
            for at in range(0, len(every), rows * world):
                count = sum(told[i] for row in every[at : at + rows * world : world] for i in row)
                if count > heaviest:
                    heaviest = count
                    chosen = [every[i % len(every)] for i in range(at, at + rows * world, world)]
        return make_batch([[self.samples[i] for i in row] for row in chosen], length, run.seed, 0)

    def steps(self, run: RunConfig) -> int | None:
        """Optimiser steps of the budget; None where they depend on what is not known (minutes, the data)."""
        budget, batch = run.budget, run.batch
        if budget.steps is not None:
            return budget.steps
        if self.tokens is None or (budget.epochs is None and budget.tokens is None):
            return None
        per_step = batch.rows * batch.accumulate * batch.row_length
        if budget.tokens is not None:
            return max(math.ceil(budget.tokens / per_step), 1)
        assert budget.epochs is not None
        return (
            self.stream(run).steps(budget.epochs)
            if self.samples
            else max(math.ceil(self.tokens * budget.epochs / per_step), 1)
        )


def text_of(run: RunConfig, vocab: int, samples: int | None, tokens: int | None, supervised: float) -> Text:
    """The data of a recipe, by its own tokenizer where that is here. Raises ValueError for data that cannot be read."""
    if samples is not None and tokens is not None:
        return Text([], 0, tokens, supervised, f"{samples:,} samples of {tokens:,} tokens, as given")
    try:
        tokenizer = load_tokenizer(run.target.name, revision=run.target.revision)
    except ValueError:
        return Text([], 0, None, supervised, "full rows: no tokenizer here to read the data with")
    if len(tokenizer) > vocab:
        raise ValueError(
            f"target {run.target.name!r}: its tokenizer has {len(tokenizer)} tokens, its config.json {vocab} rows"
        )
    talks, held = split_conversations(run.data, run.evaluate.conversations)
    own, report = encode_all(talks, tokenizer, run.data.max_length)
    other = sum(len(s) for s in encode_all(held, tokenizer, run.data.max_length)[0]) if held else 0
    return Text(
        own, other, report.tokens, report.supervised / report.tokens, f"the data's fullest; {report.kept:,} samples"
    )


@dataclass(frozen=True)
class Work:
    """What is planned: the recipe, its target's config, its data, how many devices share a step, and how many of them are
    in one machine (None = all)."""

    run: RunConfig
    name: str
    config: Any
    text: Text
    world: int
    machine: int | None = None

    @property
    def engine(self) -> str:
        """That of the recipe; `auto` is ddp until a launcher says otherwise."""
        return "ddp" if self.run.engine == "auto" else self.run.engine


@dataclass(frozen=True)
class Plan:
    """`moments`: a device's components at each moment when much is held; the one that holds most is `moment`."""

    work: Work
    rows: int
    supervised: int
    numbers: Numbers
    step: Step
    moments: dict[str, list[Term]]
    disk: Disk | None
    steps: int | None
    capture_flops: int | None
    capture_pass: int
    one_memory: bool
    notes: tuple[str, ...]

    @property
    def moment(self) -> str:
        return max(self.moments, key=lambda name: total(self.moments[name]))

    @property
    def terms(self) -> list[Term]:
        return self.moments[self.moment]

    @property
    def peak(self) -> int:
        return total(self.terms)

    @property
    def step_flops(self) -> int:
        """Of one optimiser step of one device."""
        return self.step.flops * self.work.run.batch.accumulate

    def again(self, engine: str, placement: Placement) -> Plan:
        """The same micro-batch, spread otherwise."""
        moments = moments_of(self.work, self.numbers, self.step, engine, placement, self.capture_pass, self.one_memory)
        return replace(self, moments=moments)


def make_plan(
    work: Work, rows: int, engine: str, placement: Placement, one_memory: bool = True, before: Plan | None = None
) -> Plan:
    """Trace one micro-batch of `rows` rows on shapes, and add up. `one_memory`: weights and checkpoints' copies share one
    memory, as on CPUs. `before`: a plan of the same work with other rows, whose capture need not be traced again. Raises
    ValueError for what the recipe's own script would refuse."""
    run = work.run
    batch = work.text.batch(run, rows, work.world)
    several = run.batch.accumulate > 1 or work.world > 1
    built, step, weights = trace(lambda outline: build(work, outline), batch, run.precision, kept_gradients=several)
    numbers = numbers_of(built, weights, run.optim)
    if before is not None:
        capture_pass, capture_flops = before.capture_pass, before.capture_flops
    else:
        capture_pass, capture_flops = capture_of(work, built) if built.fields is not None else (0, None)
    return Plan(
        work,
        rows,
        int(batch.supervised_BT.sum()),
        numbers,
        step,
        moments_of(work, numbers, step, engine, placement, capture_pass, one_memory),
        disk_of(work, built, numbers),
        work.text.steps(run),
        capture_flops,
        capture_pass,
        one_memory,
        notes_of(run),
    )


def build(work: Work, outline: Outline) -> Built:
    """What the recipe's script builds, of shapes."""
    run = work.run
    with outline.counted_as("target"):
        target = outline_target(work.config, work.name, run.target.dtype)
    with outline.counted_as("fixed"):
        if isinstance(run, TrainConfig):
            drafter = build_drafter(run, target)
            stored = run.states.source == "captured" and not drafter.loss_needs <= {"ids"}
            return Built(target, drafter.train(), drafter.loss_needs, fields_of(run, drafter) if stored else None)
        return Built(target, build_inside(run, target).train(), frozenset({"ids"}), None)


def fields_of(run: TrainConfig, drafter: Any) -> StateFields:
    """What captured states of this recipe hold; what they are compared by is left empty."""
    last_hidden, top_k = run.states.keeps(drafter.loss_needs, getattr(drafter.config, "objective", ""))
    return StateFields(
        format=FORMAT,
        target="",
        tokenizer="",
        template="",
        dtype=run.target.dtype,
        length=run.data.max_length,
        data="",
        width=drafter.facts.width,
        vocab=drafter.facts.vocab,
        taps=drafter.taps,
        stored=run.states.stored if drafter.taps else "none",
        last_hidden=last_hidden,
        last_stored=run.states.last_stored,
        top_k=top_k,
    )


def build_drafter(run: TrainConfig, target: Target) -> Any:
    vocab = target.facts.vocab
    if run.draft_vocab is not None and run.draft_vocab > vocab:
        raise ValueError(f"draft_vocab={run.draft_vocab}: {run.target.name} has {vocab} tokens")
    ids = None if run.draft_vocab is None else torch.arange(run.draft_vocab)
    drafter = METHODS[run.method](run.drafter, target.facts, ids)
    drafter.init_from_target(target)
    return drafter


def build_inside(run: DiffusionConfig | ConsistencyRun, target: Target) -> nn.Module:
    """The module of a training that changes the target itself; adapters are those of the recipe."""
    if isinstance(run, ConsistencyRun):
        return Consistency(run.objective, target, Adapters(run.adapters, target))
    adapters = Adapters(run.adapters, target, dual=run.objective.dual)
    if run.method == "block_diffusion":
        return BlockDiffusion(run.objective, target, adapters, run.conversion)
    if run.method == "on_policy":
        return OnPolicy(run.objective, target, adapters, run.on_policy)
    return CertaintyForcing(run.objective, target, adapters, run.certainty)


def numbers_of(built: Built, weights: dict[str, int], optim: OptimConfig) -> Numbers:
    target = built.target
    frozen = [p for p in target.model.parameters() if not p.requires_grad]
    matrices = [m for layer in target.layers for m in layer.modules() if isinstance(m, nn.Linear)]
    ends = {id(x): x for x in (target.embed_weight, target.head_weight)}
    return Numbers(
        trained=sum(p.numel() for p in built.trained),
        fixed_bytes=weights["fixed"],
        target=sum(p.numel() for p in frozen),
        target_bytes=weights["target"],
        target_matrices=sum(m.weight.numel() for m in matrices if not m.weight.requires_grad),
        ends=sum(x.numel() * x.element_size() for x in ends.values()),
        layer=max(sum(p.numel() * p.element_size() for p in layer.parameters()) for layer in target.layers),
        moments=moment_numbers(built.module, optim),
        head=target.head_weight.numel(),
        packed_head=packed_numbers(built),
    )


def packed_numbers(built: Built) -> int:
    """Of the target's head as a CPU packs it for logits: all rows, and those of the draft vocabulary."""
    head, drafts = built.target.head_weight, getattr(built.module, "d2t_W", None)
    if built.needs <= {"ids"} or built.target.not_lean is not None or not packs(torch.zeros(0, dtype=head.dtype)):
        return 0
    rows = [len(head)] + ([] if drafts is None else [len(drafts)])
    return sum(n * head.shape[1] for n in rows if n * head.shape[1] * head.element_size() <= PACK_BYTES)


def moment_numbers(module: nn.Module, optim: OptimConfig) -> int:
    """AdamW keeps two for each trained number, Muon one, SGD none (train/optimiser.py says which is whose)."""
    kept = 0
    if optim.name == "sgd":
        return kept
    for name, p in module.named_parameters():
        if p.requires_grad:
            muon = optim.name == "muon" and p.ndim == 2 and "head" not in name and "embed" not in name
            kept += p.numel() * (1 if muon else 2)
    return kept


def capture_of(work: Work, built: Built) -> tuple[int, int]:
    """Of the pass that captures states: bytes that it holds beside the weights, and operations of all of them."""
    run = work.run
    assert isinstance(run, TrainConfig)
    length = min(run.data.max_length, run.batch.row_length)
    rows = max(run.states.batch_tokens // length, 1)
    outline = Outline()
    with torch.random.fork_rng([]), outline, torch.no_grad():
        with outline.counted_as("target"):
            target = outline_target(work.config, work.name, run.target.dtype)
        outline.measure()
        held = outline.peak
        ids_BT, positions_BT = torch.zeros(rows, length, dtype=torch.int64), torch.arange(length).expand(rows, length)
        out = target.forward(ids_BT, positions_BT, taps=() if built.fields is None else built.fields.taps)
        states = [x for x in (out.taps_BTPD, out.last_hidden_BTD) if x is not None]
        by_pass = outline.flops
        if work.config.vocab_size:
            target.head(out.last_hidden_BTD.flatten(0, 1)[:HEAD_ROWS]).float().logsumexp(-1)
        by_row = (outline.flops - by_pass) / min(HEAD_ROWS, rows * length)
        peak = outline.peak - held
        del out, states
    tokens = (work.text.tokens or 0) + work.text.heldout
    return peak, round(tokens * (by_pass / (rows * length) + by_row * work.text.supervised))


def moments_of(
    work: Work,
    numbers: Numbers,
    step: Step,
    engine: str,
    placement: Placement,
    capture_pass: int,
    one_memory: bool,
) -> dict[str, list[Term]]:
    training = device_memory(numbers, step.parts, engine, placement, work.world, step.kept, work.machine)
    moments = {"training": training}
    if one_memory:
        training += packed_head(numbers)
        moments["saving"] = [*saving_memory(training, numbers), *packed_head(numbers)]
        if probes_packed(work.run, numbers):
            moments["saving"].append(packed_memory(numbers))
            if work.run.evaluate.probe_every:
                training.append(packed_memory(numbers))
    if capture_pass and placement != "absent":
        run = work.run
        assert isinstance(run, TrainConfig)
        threads = len(os.sched_getaffinity(0)) if one_memory and hasattr(os, "sched_getaffinity") else 1
        formula = f"a pass of {run.states.batch_tokens:,} tokens (states.batch_tokens)"
        formula += f" x {threads} threads, each with a shard" if one_memory else ""
        shard = 2 * SHARD_TOKENS * step.token_bytes if one_memory else 0
        own = target_bytes(numbers, "replicated" if placement == "own" else placement, work.machine or work.world)
        drafter = [t for t in training if t.name == "drafter"] if one_memory else []
        moments["capturing"] = [
            own,
            *drafter,
            *(packed_head(numbers) if one_memory else []),
            Term("capture", threads * (capture_pass + shard), formula),
        ]
    return moments


def probes_packed(run: RunConfig, numbers: Numbers) -> bool:
    """Whether the probe of a drafter decodes by packed copies of the target's weights, on this CPU."""
    small = 2 * numbers.target_matrices <= PACK_BYTES
    drafter = isinstance(run, TrainConfig) and run.evaluate.probe_prompts > 0 and run.evaluate.conversations > 0
    return drafter and small and packs(torch.zeros(0, dtype=DTYPES[run.target.dtype]))


def disk_of(work: Work, built: Built, numbers: Numbers) -> Disk | None:
    run, text = work.run, work.text
    if text.tokens is None:
        return None
    states, rows = stored_bytes(text, built)
    dtype = DTYPES[run.target.dtype].itemsize
    model = sum(p.numel() for p in built.target.model.parameters())
    export = dtype * model if isinstance(run, ConsistencyRun) else 4 * numbers.trained
    if isinstance(run, TrainConfig):
        export = dtype * numbers.trained + numbers.fixed_bytes
    return Disk(states, rows, checkpoint_bytes(numbers), run.save.keep + 1, export)


def stored_bytes(text: Text, built: Built) -> tuple[int, int]:
    """Of captured states: shards' states, and what stands beside them; of the held-out data, both."""
    if built.fields is None or text.tokens is None:
        return 0, 0
    fields, told = built.fields, top_bytes(built.fields.top_k, built.fields.vocab) if built.fields.top_k else 0
    if text.samples:
        states, rest = estimate(text.samples, fields)
    else:
        states = text.tokens * fields.token_bytes + math.ceil(text.tokens / SHARD_TOKENS) * fields.shard_bytes
        rest = round(text.tokens * (ROW_BYTES + text.supervised * told))
    return states, rest + round(text.heldout * (fields.token_bytes + ROW_BYTES + text.supervised * told))


def notes_of(run: RunConfig) -> tuple[str, ...]:
    notes = []
    if getattr(run, "init_from", None) and not isinstance(run, TrainConfig):
        notes.append("init_from is not read: adapters are taken to be those of the recipe")
    drafter = getattr(run, "drafter", None)
    if getattr(drafter, "live", False) or getattr(run, "method", None) == "on_policy":
        notes.append("texts that the model writes itself cost passes that are not counted")
    if run.budget.minutes is not None:
        notes.append("budget.minutes: steps depend on the machine")
    return tuple(notes)


def size(number: float) -> str:
    """Bytes, for people."""
    for unit, factor in (("TB", 1e12), ("GB", 1e9), ("MB", 1e6)):
        if number >= factor:
            return f"{number / factor:.2f} {unit}"
    return f"{number / 1e3:.1f} kB"


def count(number: float) -> str:
    """A large number, for people."""
    for unit, factor in (("E", 1e18), ("P", 1e15), ("T", 1e12), ("G", 1e9)):
        if number >= factor:
            return f"{number / factor:.2f} {unit}"
    return f"{number / 1e6:.2f} M"


def short_form(work: Work, engine: str, one_memory: bool) -> list[str]:
    """What training scripts say before they start."""
    rows = math.ceil(work.run.batch.rows / work.world)
    plan = make_plan(work, rows, engine, "replicated", one_memory)
    biggest = largest(plan.terms)
    parts = sorted(plan.terms, key=lambda term: -term.bytes)[:3]
    disk = f"disk {size(plan.disk.total)}, " if plan.disk else ""
    steps = f"{plan.steps:,} steps of " if plan.steps else "a step "
    return [
        f"plan: {size(plan.peak)} a device when {plan.moment}: {', '.join(f'{t.name} {size(t.bytes)}' for t in parts)}, ...",
        f"plan: largest term {biggest.name} = {biggest.formula}",
        f"plan: {disk}{steps}{count(plan.step_flops * work.world)}FLOP (all of it: draftsmith plan RECIPE)",
    ]
