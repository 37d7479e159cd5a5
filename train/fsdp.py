"""FSDP2, by torch's own `fully_shard`: parameters, gradients and moments are cut over all processes.

What is trained is put together once for a forward and its backward, because losses read weights outside of their
modules' forward. `fully_shard` puts other parameters in the place of those that it cuts, so nobody else may hold these:
adapters, which are in the target too, are refused. accelerate starts the processes and nothing more; on CPUs it ignores
these settings without a word, so they are refused there. What is done here runs on CPUs, and is tested there:
pytest tests/test_placement.py
"""

from __future__ import annotations

import os
from collections import OrderedDict
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor

from ..configs.runs import RunConfig
from ..configs.training import TrainConfig

HOOKS = ("_forward_pre_hooks", "_forward_pre_hooks_with_kwargs", "_forward_hooks", "_forward_hooks_with_kwargs",
         "_forward_hooks_always_called", "_state_dict_pre_hooks", "_load_state_dict_pre_hooks")  # fmt: skip


@dataclass
class Cut:
    """What a cut model has in the place of its parameters, and the hooks and classes of its modules with and without."""

    root: FSDPModule
    owners: list[tuple[nn.Module, str, nn.Parameter]]
    hooks: list[tuple[Any, Any, Any]] = field(default_factory=list)  # a module's dictionary, before and after
    classes: list[tuple[nn.Module, type, type]] = field(default_factory=list)


def asked() -> bool:
    """Whether the launcher was told to use FSDP."""
    return os.environ.get("ACCELERATE_USE_FSDP", "false").lower() == "true"


def refuse_unless_possible(config: RunConfig) -> None:
    """Raises ValueError for what FSDP2 does not do here."""
    if not isinstance(config, TrainConfig):
        raise ValueError(
            f"FSDP2 trains drafters alone: method {config.method} trains weights inside the target, which FSDP2 would put "
            "others in the place of; use engine=zero2 or zero3, which cut them where they are"
        )
    if not torch.cuda.is_available():
        raise ValueError("FSDP2 needs GPUs: on CPUs accelerate ignores it and starts DDP; use engine=zero3 or ddp")
    if os.environ.get("FSDP_VERSION", "1") != "2":
        raise ValueError("FSDP of version 1 cannot train this: use configs/accelerate/fsdp2.yaml (fsdp_version: 2)")
    if config.optim.name == "muon":
        raise ValueError("optim.name=muon runs under DDP only: its update needs whole matrices, FSDP2 cuts them")


def load_models_whole() -> None:
    """accelerate's launcher asks transformers to load weights in one process of a machine alone: FSDP would hand them on, of
    what it wraps, and frozen targets are not wrapped."""
    os.environ["FSDP_CPU_RAM_EFFICIENT_LOADING"] = "false"


def wrap(model: nn.Module, optimisers: Iterable[torch.optim.Optimizer], device: torch.device) -> nn.Module:
    """Cut `model`, in place, over all processes; the optimisers go on with its parts."""
    names = {id(p): name for name, p in model.named_parameters()}
    mesh = init_device_mesh(device.type, (torch.distributed.get_world_size(),))
    modules = list(model.modules())
    before = [([OrderedDict(getattr(m, name)) for name in HOOKS], type(m)) for m in modules]
    root = fully_shard(model, mesh=mesh, reshard_after_forward=False)
    owners = [(m, key, p) for m in modules for key, p in m._parameters.items() if p is not None]
    cut = Cut(root, owners)
    for module, (hooks, kind) in zip(modules, before, strict=True):
        for name, old in zip(HOOKS, hooks, strict=True):
            now = getattr(module, name)
            if list(now) != list(old):
                cut.hooks.append((now, old, OrderedDict(now)))
        if type(module) is not kind:
            cut.classes.append((module, kind, type(module)))
    for _, _, p in owners:
        p.cut = cut  # type: ignore[attr-defined]
    new = dict(model.named_parameters())
    for optimiser in optimisers:
        for group in optimiser.param_groups:
            group["params"] = [new[names[id(p)]] for p in group["params"]]
    return model


@contextmanager
def whole(parameters: Iterable[nn.Parameter], write: bool = False) -> Iterator[None]:
    """While open, the models that these are of are as before `wrap`, whole in every process; every process opens it. With
    `write`, what the main process changes in them stays."""
    cuts = {id(cut): cut for p in parameters if (cut := getattr(p, "cut", None)) is not None}
    for cut in cuts.values():
        _put_together(cut)
    try:
        yield
    finally:
        for cut in cuts.values():
            _cut_again(cut, write)


def put_together(module: nn.Module) -> None:
    """As `whole`, for good; every process calls it."""
    for cut in {id(cut): cut for p in module.parameters() if (cut := getattr(p, "cut", None)) is not None}.values():
        _put_together(cut)


def full(value: Tensor) -> Tensor:
    """A tensor that may be cut, whole; every process calls it."""
    return value.full_tensor() if isinstance(value, DTensor) else value


def like(value: Tensor, parameter: Tensor) -> Tensor:
    """A whole tensor cut as `parameter` is; every process calls it."""
    if not isinstance(parameter, DTensor) or value.shape != parameter.shape:
        return value.to(parameter.device)
    return distribute_tensor(value.to(parameter.device), parameter.device_mesh, parameter.placements)


def _put_together(cut: Cut) -> None:
    cut.root.reshard()  # after a forward without a backward
    made: dict[int, nn.Parameter] = {}  # a tied parameter has two owners
    for module, key, p in cut.owners:
        if id(p) not in made:
            made[id(p)] = nn.Parameter(full(p.detach()).clone(), requires_grad=p.requires_grad)
        module._parameters[key] = made[id(p)]
    _switch(cut, whole=True)


@torch.no_grad()
def _cut_again(cut: Cut, write: bool) -> None:
    for module, key, p in cut.owners:
        now = module._parameters[key]
        if write and now is not None and now is not p:
            p.copy_(like(now, p))
        module._parameters[key] = p
    _switch(cut, whole=False)


def _switch(cut: Cut, whole: bool) -> None:
    for now, old, new in cut.hooks:
        now.clear()
        now.update(old if whole else new)
    for module, old, new in cut.classes:
        module.__class__ = old if whole else new
