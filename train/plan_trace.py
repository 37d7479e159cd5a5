"""One micro-batch of one device, run on shapes (models/outline.py): what is held when most is held, by component, and how
much is multiplied. The same code as in training: the method's own loss, in the module that the loop wraps.

Test: pytest tests/test_plan.py
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from ..data.batch import Batch, Likeliest, TargetOut
from ..data.formats import handed_out
from ..data.states import StateFields
from ..models.outline import Held, Outline
from ..models.target import Target, live_states
from .loop import LossModule

RENAMED = {("activations", "losses.distill"): "teacher"}
NAMES = {torch.float32: "fp32", torch.bfloat16: "bf16", torch.float16: "fp16", torch.int64: "int64", torch.bool: "bool"}


@dataclass(frozen=True)
class Built:
    """What a recipe trains, made of shapes: `module` as the loop wants it, what its loss `needs`, and the `fields` of states
    that were captured before (None: the target runs in the step, or the text is all)."""

    target: Target
    module: Any
    needs: frozenset[str]
    fields: StateFields | None

    @property
    def trained(self) -> list[nn.Parameter]:
        return [p for p in self.module.parameters() if p.requires_grad]


@dataclass(frozen=True)
class Step:
    """What one micro-batch takes on one device. `parts`: bytes by component at the moment when most is held, weights and
    optimiser left out; `largest`: the largest tensor that is made at any moment; `kept`: what most of the activations are."""

    parts: dict[str, int]
    gradients: int
    largest: int
    largest_is: str
    kept: str
    flops: int
    target_flops: int
    token_bytes: int


def states_of(built: Built, batch: Batch) -> TargetOut:
    """The states of a batch: from a pass of the target, or as they come from shards (data/states.py, `fill`)."""
    target, needs, (b, t) = built.target, built.needs, batch.ids_BT.shape
    heads: dict[str, Any] = {"head": target.head, "by_head": target.by_head, "embed": target.embed}
    if needs <= {"ids"}:
        return TargetOut(**heads)
    fields = built.fields
    if fields is None:
        return live_states(target, built.module, batch)
    likeliest = None
    if fields.top_k:
        ids_BTK = torch.zeros(b, t, fields.top_k, dtype=torch.int32)
        likeliest = Likeliest(ids_BTK, torch.zeros(ids_BTK.shape), torch.zeros(b, t))
    taps, last = handed_out(fields.stored), handed_out(fields.last_stored)
    return TargetOut(
        torch.zeros(b, t, len(fields.taps), fields.width, dtype=taps) if fields.taps else None,
        torch.zeros(b, t, fields.width, dtype=last) if fields.last_hidden else None,
        torch.zeros(b, t),
        torch.full((b, t), -1, dtype=torch.int64),
        likeliest=likeliest,
        **heads,
    )


def trace(
    build: Callable[[Outline], Built], batch: Batch, precision: str, *, kept_gradients: bool, backward: bool = True
) -> tuple[Built, Step, dict[str, int]]:
    """Run forward and backward of one micro-batch on shapes: what was built, the step, and bytes of weights by kind
    (`target`, `trained`, `fixed`: weights of the drafter's own that do not learn, and tables).

    `kept_gradients`: gradients are there before (several micro-batches a step, or an engine that keeps room for them).
    """
    outline = Outline(RENAMED)
    with torch.random.fork_rng([]), outline:  # small tensors are drawn for real
        built = build(outline)
        for parameter in built.trained:
            outline.move(parameter, "trained")
        weights = {kind: outline.live[kind] for kind in ("target", "trained", "fixed")}
        module = LossModule(built.module, precision, torch.device("cpu"))
        batch = batch.to("cpu")
        for x in (batch.ids_BT, batch.supervised_BT, batch.positions_BT, batch.samples_BT):
            outline.hold(x, "states")
        for parameter in built.trained:
            parameter.register_post_accumulate_grad_hook(lambda p: outline.move(p.grad, "gradients"))
        if kept_gradients and backward:
            with outline.counted_as("gradients"):
                for parameter in built.trained:
                    parameter.grad = torch.zeros_like(parameter)
        outline.measure()
        with outline.counted_as("workspace"), torch.no_grad():
            out = states_of(built, batch)
        told = () if out.likeliest is None else vars(out.likeliest).values()
        given = (*told, out.taps_BTPD, out.last_hidden_BTD, out.log_z_BT, out.top_BT, *_tensors(out.kv))
        for state in given:
            if state is not None:
                outline.move(state, "states")
        target_flops = outline.flops
        counts = built.module.denominators(batch, 0.0)
        with outline.counted_as("activations"), nullcontext() if backward else torch.no_grad():
            loss, _ = module(batch, out, 0.0, counts)
        kept = outline.kept("activations") + outline.kept("teacher")
        if backward:
            with outline.counted_as("workspace"):
                loss.backward()
        del loss, out
    parts = {k: outline.at_peak[k] for k in ("states", "activations", "teacher", "gradients", "workspace", "other")}
    parts["workspace"] += parts.pop("other")
    letters = letters_of(built, batch)
    largest = outline.largest
    step = Step(
        parts,
        sum(p.numel() * p.element_size() for p in built.trained),
        largest.bytes if largest else 0,
        said(largest, letters) if largest else "",
        most_of(kept, letters),
        outline.flops,
        target_flops,
        0 if built.fields is None else built.fields.token_bytes,
    )
    return built, step, weights


def _tensors(kv: Any) -> list[Tensor]:
    return [] if kv is None else [x for x in vars(kv).values() if isinstance(x, Tensor)]


def letters_of(built: Built, batch: Batch) -> dict[int, str]:
    """Sizes that shapes are read by; of two letters of one size, neither."""
    facts = built.target.facts
    drafts = getattr(built.module, "d2t_W", None)
    named = [("B", batch.ids_BT.shape[0]), ("T", batch.ids_BT.shape[1]), ("D", facts.width), ("V", facts.vocab)]
    named += [] if drafts is None else [("W", len(drafts))]
    named += [("intermediate", facts.intermediate)]
    sizes = [size for _, size in named]
    return {size: letter for letter, size in named if sizes.count(size) == 1 and size > 8}


def said(held: Held, letters: dict[int, str]) -> str:
    """`fp32 [T 512, W 8192] of make_teacher (losses/distill.py)`."""
    shape = ", ".join(f"{letters[n]} {n}" if n in letters else str(n) for n in held.shape)
    function, module = held.place
    where = f" of {function} ({module.replace('.', '/')}.py)" if function else ""
    return f"{NAMES.get(held.dtype, str(held.dtype).removeprefix('torch.'))} [{shape}]{where}"


def most_of(kept: Sequence[Held], letters: dict[int, str]) -> str:
    """What one function keeps that keeps most: `28 tensors of 480 MB, such as fp32 [...] of attend (...)`."""
    groups: dict[tuple[Any, ...], list[Held]] = {}
    for held in kept:
        groups.setdefault((held.dtype, held.place), []).append(held)
    if not groups:
        return ""
    group = max(groups.values(), key=lambda one: sum(held.bytes for held in one))
    count, bytes_ = len(group), sum(held.bytes for held in group)
    top = max(group, key=lambda held: held.bytes)
    return f"{count} {'tensor' if count == 1 else 'tensors'} of {bytes_ / 1e6:,.1f} MB, such as {said(top, letters)}"
