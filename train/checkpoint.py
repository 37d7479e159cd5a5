"""Checkpoints: complete or absent, bit-exact, safetensors and JSON only, the same for every engine.

    checkpoints/step-00000500/  model.safetensors       trained tensors (fp32) and buffers
                                optimiser.safetensors   moments by parameter name, "<name>|<key>"
                                rng.safetensors         torch's generators, one per process
                                state.json              where the run stands (`State`), and the settings
                                files.json              size and SHA-256 of the others; written last

A checkpoint is written to a hidden folder, synced, and renamed; `newest` takes only what its list confirms, so a kill
at any moment costs at most what came after the last save. ZeRO's shards are gathered and stored under the parameters'
names, so a run may go on with another number of processes or another engine. Tests: `pytest tests/test_resume.py`.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from accelerate import Accelerator
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from ..configs.parse import Failure, one_line
from . import signs
from .engine import cut, flats_of, is_deepspeed, whole, zero_of
from .fsdp import full, like

FORMAT = 1


@dataclass
class State:
    """Where a run stands: everything the loop needs beside tensors. Stored as JSON (floats round-trip exactly)."""

    step: int = 0  # optimiser steps that were taken
    epoch: int = 0
    window: int = 0  # next window of this epoch; windows that were skipped count
    tokens: int = 0
    seconds: float = 0.0  # spent in optimiser steps
    skipped: int = 0
    skipped_in_a_row: int = 0
    skipped_samples: list[int] = field(default_factory=list)  # of the current row of skips
    losses: list[float] = field(default_factory=list)  # of the last steps, for the running median
    first_median: float | None = None
    first: dict[str, float] = field(default_factory=dict)  # figures of step 0, where they were asked for
    looked: dict[str, int] = field(default_factory=dict)  # last step that was measured, by kind of figures
    sound: int = 0  # last step that was measured with nothing to say against it
    against: str | None = None  # what there was to say against the last one that was measured
    best: float | None = None
    best_step: int | None = None
    done: bool = False  # the whole budget is used


def trained_tensors(drafter: nn.Module) -> dict[str, Tensor]:
    """Trainable parameters and persistent buffers, by name; frozen tensors belong to the target."""
    frozen = {n for n, p in drafter.named_parameters() if not p.requires_grad}
    return {n: t.detach() for n, t in drafter.state_dict().items() if n not in frozen}


def save(
    folder: Path,
    state: State,
    settings: dict[str, Any],
    drafter: nn.Module,
    optimisers: list[torch.optim.Optimizer],
    accelerator: Accelerator,
    keep: int,
) -> Path:
    """Write `folder/step-N`; every process must call it. Keeps the `keep` newest and the best one.

    Raises Failure (disk full, read-only folder); earlier checkpoints are untouched then.
    """
    with whole(drafter.parameters()):
        everything = trained_tensors(drafter) if accelerator.is_main_process else {}
        model = {n: t.cpu().clone().contiguous() for n, t in everything.items()}
    optimiser_tensors = _optimiser_tensors(drafter, optimisers, accelerator)
    rng = _rng_tensors(accelerator)
    final = folder / f"step-{state.step:08d}"
    if accelerator.is_main_process and not complete(final, state):
        temporary = folder / f".{final.name}.{os.getpid()}"
        try:
            temporary.mkdir(parents=True)
            for name, tensors in (("model", model), ("optimiser", optimiser_tensors), ("rng", rng)):
                save_file(tensors, temporary / f"{name}.safetensors")
                signs.moved()
            _write_json(temporary / "state.json", {"format": FORMAT, "state": asdict(state), "settings": settings})
            listing = {p.name: {"bytes": p.stat().st_size, "sha256": digest(p)} for p in sorted(temporary.iterdir())}
            _write_json(temporary / "files.json", listing)
            for path in (*temporary.iterdir(), temporary):
                sync(path)
            if final.exists():  # incomplete, or of another state of the same step: replaced whole
                final.rename(folder / f".{final.name}.old")
            temporary.rename(final)
            sync(folder)
        except BaseException as error:
            shutil.rmtree(temporary, ignore_errors=True)
            if isinstance(error, (OSError, SafetensorError)):
                raise Failure(_unwritten(folder, state.step, error)) from error
            raise
        _prune(folder, keep, state.best_step)
    accelerator.wait_for_everyone()
    return final


def _unwritten(folder: Path, step: int, error: Exception) -> str:
    free = shutil.disk_usage(next(p for p in (folder, *folder.resolve().parents) if p.exists())).free
    return (
        f"the checkpoint of step {step} could not be written to {folder}: {one_line(error)} ({free / 1e9:.1f} GB are free); "
        "earlier ones are untouched, and the same command goes on from the newest"
    )


def complete(path: Path, state: State | None = None) -> bool:
    """Whether every listed file is there, whole and unchanged (and, if given, holds this very state)."""
    try:
        listing = json.loads((path / "files.json").read_text())
        for name, facts in listing.items():
            file = path / name
            if file.stat().st_size != facts["bytes"] or digest(file) != facts["sha256"]:
                return False
        return state is None or json.loads((path / "state.json").read_text())["state"] == asdict(state)
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return False


def newest(folder: Path) -> tuple[Path | None, list[str]]:
    """The newest complete checkpoint of a run, and the names of incomplete or damaged ones that were passed over."""
    damaged: list[str] = []
    for path in sorted(folder.glob("step-*"), reverse=True):
        if complete(path):
            return path, damaged
        damaged.append(path.name)
    return None, damaged


def set_aside(folder: Path, damaged: list[str]) -> None:
    """Rename what `newest` passed over, so that it is not counted among those that are kept."""
    for name in damaged:
        aside = folder / f"damaged-{name}"
        shutil.rmtree(aside, ignore_errors=True)
        (folder / name).rename(aside)


def read_state(path: Path) -> tuple[State, dict[str, Any]]:
    """The state and the settings of a checkpoint. Raises ValueError for another format."""
    content = json.loads((path / "state.json").read_text())
    if content.get("format") != FORMAT:
        raise ValueError(f"{path}: checkpoint format {content.get('format')!r}, this version reads {FORMAT}")
    return State(**content["state"]), content["settings"]


def load_tensors(path: Path, drafter: nn.Module) -> None:
    """Put the trained tensors of a checkpoint back, in place. Raises ValueError when names or shapes differ."""
    tensors = load_file(path / "model.safetensors")
    own = trained_tensors(drafter)
    if tensors.keys() != own.keys():
        raise ValueError(f"{path}: tensors {sorted(tensors.keys() ^ own.keys())} are on one side only")
    for name, value in tensors.items():
        if value.shape != own[name].shape or value.dtype != own[name].dtype:
            raise ValueError(
                f"{path}: {name} is {value.dtype} {tuple(value.shape)}, needed {own[name].dtype} {tuple(own[name].shape)}"
            )
        own[name].copy_(value)


def load(path: Path, drafter: nn.Module, optimisers: list[torch.optim.Optimizer], accelerator: Accelerator) -> None:
    """Put tensors, moments and generators back, in place. Call it after the engine has wrapped model and optimisers.

    Raises ValueError when names or shapes differ from this drafter's.
    """
    with whole(drafter.parameters(), write=True):
        load_tensors(path, drafter)
    moments: dict[str, dict[str, Tensor]] = {}
    for key, value in load_file(path / "optimiser.safetensors").items():
        name, _, kind = key.rpartition("|")
        moments.setdefault(name, {})[kind] = value
    parameters = dict(drafter.named_parameters())
    if is_deepspeed(accelerator):
        _load_deepspeed(parameters, moments, optimisers[0])
    else:
        groups = {id(p): (o, group) for o in optimisers for group in o.param_groups for p in group["params"]}
        for name, kinds in moments.items():
            parameter = parameters[name]
            optimiser, group = groups[id(parameter)]
            step_device = parameter.device if group.get("fused") or group.get("capturable") else torch.device("cpu")
            optimiser.state[parameter] = {
                kind: value.to(step_device) if kind == "step" else like(value, parameter)
                for kind, value in kinds.items()
            }
    rng = load_file(path / "rng.safetensors")
    mine = {
        kind: rng[f"{kind}.{accelerator.process_index}"]
        for kind in rng_state()
        if f"{kind}.{accelerator.process_index}" in rng
    }
    set_rng_state(mine)


def rng_state() -> dict[str, Tensor]:
    """Torch's generators of this process, for what a target of others may draw (our own noise is keyed)."""
    cuda = {"cuda": torch.cuda.get_rng_state()} if torch.cuda.is_available() else {}
    return {"cpu": torch.get_rng_state()} | cuda


def set_rng_state(state: dict[str, Tensor]) -> None:
    """The inverse of `rng_state`; generators that are not named stay as they are."""
    if "cpu" in state:
        torch.set_rng_state(state["cpu"])
    if "cuda" in state:
        torch.cuda.set_rng_state(state["cuda"])


def _optimiser_tensors(
    drafter: nn.Module, optimisers: list[torch.optim.Optimizer], accelerator: Accelerator
) -> dict[str, Tensor]:
    names = {id(p): n for n, p in drafter.named_parameters()}
    tensors: dict[str, Tensor] = {}
    if is_deepspeed(accelerator):
        return _deepspeed_tensors(drafter, zero_of(optimisers[0]), accelerator.is_main_process)
    for optimiser in optimisers:
        for group in optimiser.param_groups:
            for parameter in group["params"]:
                for kind, value in optimiser.state.get(parameter, {}).items():
                    tensors[f"{names[id(parameter)]}|{kind}"] = full(value.detach()).cpu().clone().contiguous()
    return tensors


def _deepspeed_tensors(drafter: nn.Module, zero: Any, keep: bool) -> dict[str, Tensor]:
    """ZeRO's moments, gathered parameter by parameter by all processes; `keep`: those of this process are wanted."""
    from deepspeed.utils import safe_get_full_optimizer_state

    tensors: dict[str, Tensor] = {}
    flat, _ = flats_of(zero)[0]
    state = zero.optimizer.state.get(flat, {})
    moments = [kind for kind, value in state.items() if value.shape == flat.shape]
    _link(zero)
    for name, parameter in drafter.named_parameters():
        if not parameter.requires_grad:
            continue
        for kind in moments:
            value = safe_get_full_optimizer_state(parameter, kind)
            if keep:
                tensors[f"{name}|{kind}"] = value.cpu().clone()
        if keep:
            tensors |= {f"{name}|{kind}": v.cpu().clone() for kind, v in state.items() if kind not in moments}
    return tensors


def _load_deepspeed(
    parameters: dict[str, nn.Parameter], moments: dict[str, dict[str, Tensor]], optimiser: torch.optim.Optimizer
) -> None:
    zero = zero_of(optimiser)
    if moments:  # the optimiser makes its state in the first step; here it must be there before it
        kinds = next(iter(moments.values()))
        for flat, _ in flats_of(zero):
            fused = zero.optimizer.param_groups[0].get("fused")
            zero.optimizer.state[flat] = {
                kind: value.to(flat.device if fused else "cpu", copy=True)
                if kind == "step"
                else torch.zeros_like(flat.data)
                for kind, value in kinds.items()
            }
        _link(zero)
    for name, parameter in parameters.items():
        for kind, value in moments.get(name, {}).items():
            if kind != "step":
                _put(parameter, value.to(parameter.device), kind)
    for parameter in parameters.values():
        if parameter.requires_grad:
            with whole([parameter]):
                _put(parameter, parameter.detach().float())


def _put(parameter: nn.Parameter, value: Tensor, kind: str | None = None) -> None:
    """Set ZeRO's master of a parameter, or a moment; each process takes its part."""
    from deepspeed import utils

    if not cut([parameter]):
        utils.safe_set_full_optimizer_state(parameter, value, kind) if kind else utils.safe_set_full_fp32_param(
            parameter, value
        )
        return
    size: int = parameter.partition_numel()  # type: ignore[attr-defined]
    first = size * torch.distributed.get_rank(parameter.ds_process_group)  # type: ignore[attr-defined]
    part = value.flatten()[first : first + size]
    part = F.pad(
        part, (0, size - len(part))
    )  # the last parts may be filled up, which `safe_set_full_*` do not allow for
    utils.safe_set_local_optimizer_state(parameter, part, kind) if kind else utils.safe_set_local_fp32_param(
        parameter, part
    )


def _link(zero: Any) -> None:
    """Let parameters find their moments (stages 1 and 2). DeepSpeed does this once, after the first group's step, when the
    other groups have none yet."""
    if hasattr(zero, "_lazy_init_hp_params_optimizer_state"):
        zero._hp_optimizer_states_linked = False
        zero._lazy_init_hp_params_optimizer_state()


def _rng_tensors(accelerator: Accelerator) -> dict[str, Tensor]:
    mine = rng_state()
    everyone: list[Any] = [mine]
    if accelerator.num_processes > 1:
        everyone = [None] * accelerator.num_processes
        torch.distributed.all_gather_object(everyone, mine)
    return {f"{kind}.{rank}": value for rank, one in enumerate(everyone) for kind, value in one.items()}


def _prune(folder: Path, keep: int, best_step: int | None) -> None:
    paths = sorted(folder.glob("step-*"))
    for path in paths[:-keep]:
        if path.name != f"step-{best_step if best_step is not None else -1:08d}":
            shutil.rmtree(path, ignore_errors=True)
    for left_over in folder.glob(".step-*"):  # of a process that was killed while it wrote
        shutil.rmtree(left_over, ignore_errors=True)


def _write_json(path: Path, value: Any) -> None:
    path.write_text(json.dumps(value, indent=1))


def digest(path: Path) -> str:
    """SHA-256 of a file, hexadecimal."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def sync(path: Path) -> None:
    """Force a file, or a folder's entries, to the disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
