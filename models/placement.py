"""Where the layers of a frozen target are, which are nearly all of its weights. Its ends, embedding, final norm and output
head, are always whole and beside the drafter, which reads their rows.

    replicated  here, in every process
    sharded     cut over the processes: each keeps its part of every layer and all of a layer while it is run (frozen
                FSDP2; ZeRO-3 calls this stage 3)
    devices     on other devices than the drafter, one stretch of layers each; states come back
    absent      nowhere: states were captured before

A pass of a sharded target is one that all processes make together. Training is even, one pass per micro-batch; what is
not (capture, held-out figures, the probe) stands under `together`, in which a process that has no pass left to make
takes part in those of the others.

    target = load_placed("owner/name", "sharded", device="cuda:0")       # models/piecewise.py
    with together(target):
        ...

Test: pytest tests/test_placement.py
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor, nn

Placement = Literal["replicated", "sharded", "devices", "absent"]
WHY = {
    "sharded": "its layers are cut over processes",
    "devices": "its layers are on other devices",
    "absent": "its layers were not loaded",
}


@dataclass
class Placed:
    """How layers are placed, and the fingerprint of the model that they belong to. `mesh`: of the processes that share
    them, and `device`, where those meet."""

    kind: str
    fingerprint: str
    mesh: Any = None
    device: torch.device | None = None
    uneven: bool = False  # processes may make different numbers of passes (`together`)

    @property
    def why(self) -> str:
        """Why it is not run lean."""
        return WHY[self.kind]

    def before_pass(self, name: str) -> None:
        """What must happen before a pass. Raises ValueError where none can be made."""
        if self.kind == "absent":
            raise ValueError(
                f"target {name!r} was loaded without its layers (placement absent): nothing can be computed by it; read "
                "captured states, or place it otherwise"
            )
        if self.uneven:
            self.passes_now(1)

    def passes_now(self, mine: int) -> int:
        """How many processes make a pass now."""
        count = torch.tensor([mine], device=self.device)
        dist.all_reduce(count, group=self.mesh.get_group())
        return int(count)


@contextmanager
def together(target: Any) -> Iterator[None]:
    """Passes of which processes may make different numbers; every process must enter. No other communication may happen
    inside. Where passes concern the process alone, this is nothing."""
    placed: Placed | None = target.placed
    if placed is None or placed.kind != "sharded":
        yield
        return
    placed.uneven = True
    try:
        yield
        placed.uneven = False
        ids_11 = torch.zeros(1, 1, dtype=torch.int64, device=target.device)
        with torch.no_grad():
            while placed.passes_now(0):
                target.forward(ids_11, ids_11)
    finally:
        placed.uneven = False


def sharing_mesh(device: torch.device) -> Any:
    """The processes that share one target: those of a machine, where it has several, else all. Every process calls this.
    Raises ValueError where there is one process alone."""
    from torch.distributed.device_mesh import init_device_mesh

    world = dist.get_world_size() if dist.is_initialized() else 1
    if world == 1:
        raise ValueError("target.placement=sharded cuts the target over processes, and one takes part: start several")
    here = int(os.environ.get("LOCAL_WORLD_SIZE", world))
    if here in (1, world) or world % here:
        return init_device_mesh(device.type, (world,))
    return init_device_mesh(device.type, (world // here, here), mesh_dim_names=("machine", "process"))["process"]


def shard_layer(layer: nn.Module, mesh: Any) -> None:
    """Cut a layer that is here whole. It comes together for each pass through it."""
    from torch.distributed.fsdp import fully_shard

    fully_shard(layer, mesh=mesh, reshard_after_forward=True)


def join_layers(decoder: nn.Module, mesh: Any) -> None:
    """Let sharded layers know of each other, so that one is fetched while another is run."""
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor import DTensor

    own = {p for p in decoder.parameters() if not isinstance(p, DTensor)}
    fully_shard(decoder, mesh=mesh, reshard_after_forward=True, ignored_params=own)


def spread(layers: int, devices: Sequence[torch.device]) -> list[torch.device]:
    """The device of each layer: as many on each, in order."""
    return [devices[i * len(devices) // layers] for i in range(layers)]


def share_of_devices(devices: Sequence[str], process: int, processes: int) -> list[torch.device]:
    """The devices of this process, of those that a recipe lists for a machine. Raises ValueError for a name that is no
    device, and for lists that cannot be shared out evenly."""
    if not devices or len(devices) % processes:
        raise ValueError(
            f"target.devices names {len(devices)} devices for {processes} processes on this machine: give each process as many"
        )
    each = len(devices) // processes
    mine = devices[process * each : (process + 1) * each]
    try:
        return [torch.device(f"cuda:{name}" if name.isdigit() else name) for name in mine]
    except RuntimeError as error:
        raise ValueError(f"target.devices={list(devices)}: {str(error).splitlines()[0]}") from None


def run_on(module: nn.Module, device: torch.device) -> None:
    """Let what a module is called with come to `device`."""

    def hook(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        send = partial(moved, device=device)
        return tuple(map(send, args)), {name: send(value) for name, value in kwargs.items()}

    module.register_forward_pre_hook(hook, with_kwargs=True)


def moved(value: Any, device: torch.device) -> Any:
    """A tensor, or a tuple of them, on `device`; anything else as it is."""
    if isinstance(value, Tensor):
        return value.to(device)
    return tuple(moved(one, device) for one in value) if isinstance(value, tuple) else value


def bytes_here(module: nn.Module) -> int:
    """Bytes of the parameters that this process holds at rest."""
    from torch.distributed.tensor import DTensor

    held = [p.to_local() if isinstance(p, DTensor) else p for p in module.parameters()]
    return sum(p.numel() * p.element_size() for p in held if not p.is_meta)
