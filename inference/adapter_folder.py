"""Adapters of a denoiser on disk: the tensors that were trained, and what they mean, under one key of config.json.

    config.json         {"draftsmith": {format, method, target, objective, adapters, mask_id, block, shift, dual, ...}}
    model.safetensors   trained tensors under their names in the target, and `mask_row`
    run.yaml            the run that made them
    README.md           the model card

Loading refuses what would run and be wrong: another base model (its fingerprint), a missing or unknown setting (a model
that forgets its shift decodes nonsense), missing, foreign, damaged or infinite tensors.

Test: pytest tests/test_convert_diffusion.py
"""

from __future__ import annotations

import dataclasses
import json
import types
import typing
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal, TypeVar

from ..models.adapters import AdapterConfig, Adapters
from ..models.denoiser import TargetDenoiser
from ..models.diffusion import ObjectiveConfig
from ..models.jacobi import JacobiConfig
from ..models.target import Target
from .card import render_card, scrub_values
from .export import run_yaml
from .exporters.folder import (
    CARD,
    CONFIG,
    RUN,
    WEIGHTS,
    read_json,
    read_tensors,
    refuse_foreign_folder,
    refuse_non_finite,
    save_tensors,
    sha256_of,
    write_folder,
)
from .exporters.layout import FORMAT, RunFacts
from .load import facts_of, refuse_path

KIND, MERGED = "adapters", "merged"  # of `draftsmith.kind`
Settings = TypeVar("Settings", ObjectiveConfig, AdapterConfig, JacobiConfig)


@dataclass
class Converted:
    """A target with the adapters of a folder, and the objective that they were trained for."""

    objective: ObjectiveConfig
    adapters: Adapters

    def denoiser(self) -> TargetDenoiser:
        """What the runtime decodes."""
        return denoiser_of(self.objective, self.adapters.target, self.adapters.needed_mask_id(), self.adapters)


def denoiser_of(
    objective: ObjectiveConfig, target: Target, mask_id: int, adapters: Adapters | None = None
) -> TargetDenoiser:
    """The denoiser that was trained for `objective`: a target with adapters, or with weights that denoise by themselves."""
    return TargetDenoiser(
        target,
        objective.block,
        mask_id,
        shift=objective.shift,
        causal=objective.layout != "whole",
        adapters=adapters,
        origin=objective.decoded_from,
        token_causal=objective.clean == "token",
        inside=objective.inside,
    )


def save_adapters(folder: Path, method: str, objective: ObjectiveConfig, adapters: Adapters, run: RunFacts) -> Path:
    """Write `folder`, whole or not at all. Raises ValueError for values that are not finite, or a foreign folder."""
    refuse_foreign_folder(folder)
    tensors = {name: p.detach() for name, p in adapters.trained.named_parameters()}
    refuse_non_finite(tensors, f"adapters of {method}")
    ours = {
        "format": FORMAT,
        "kind": KIND,
        "method": method,
        "target": scrub_values(facts_of(adapters.target.facts)),
        "objective": asdict(objective),
        "adapters": asdict(adapters.config),
        "dtype": str(adapters.target.dtype).removeprefix("torch."),
        "mask_id": adapters.mask_id,
        "block": objective.block,
        "shift": objective.shift,
        "dual": objective.dual,
        "train_length": run.train_length,
    }

    def fill(place: Path) -> None:
        save_tensors(place / WEIGHTS, tensors)
        ours["sha256"] = sha256_of(place / WEIGHTS)
        (place / CONFIG).write_text(json.dumps({"draftsmith": ours}, indent=2) + "\n", encoding="utf-8")
        (place / RUN).write_text(run_yaml(run), encoding="utf-8")
        (place / CARD).write_text(render_card(place), encoding="utf-8")

    write_folder(folder, fill)
    return folder


def adapter_facts(name: str, folder: Path) -> dict[str, Any]:
    """The key `draftsmith` of a folder that holds adapters. ValueError says what it holds instead."""
    ours = read_json(folder / CONFIG).get("draftsmith")
    if isinstance(ours, dict) and ours.get("kind") == MERGED:
        raise ValueError(
            f"{name} is merged already: its weights hold the adapters; name the folder of the adapters alone"
        )
    if not isinstance(ours, dict) or ours.get("kind") != KIND:
        raise ValueError(f"{name} holds no adapters of ours (config.json: draftsmith.kind = {KIND!r})")
    if ours.get("format") != FORMAT:
        raise ValueError(
            f"{name} has export format {ours.get('format')!r}, this version reads {FORMAT}; train it again"
        )
    refuse_path(ours.get("target"), name)
    return ours


def load_adapters(name: str, target: Target) -> Converted:
    """Put the adapters of a folder into `target`, where they stay.

    Raises ValueError, naming both values, for whatever does not belong to this target or is not complete.
    """
    folder = Path(name).expanduser()
    ours = adapter_facts(name, folder)
    base = ours["target"]
    if base.get("fingerprint") != target.facts.fingerprint:
        raise ValueError(
            f"{name} was trained on {base.get('name')!r} ({str(base.get('fingerprint'))[:12]}...), this target is "
            f"{target.facts.name!r} ({target.facts.fingerprint[:12]}...): adapters fit their own base alone"
        )
    objective = settings_of(ObjectiveConfig, ours.get("objective"), f"{name}: draftsmith.objective")
    config = settings_of(AdapterConfig, ours.get("adapters"), f"{name}: draftsmith.adapters")
    for key, value in (("block", objective.block), ("shift", objective.shift), ("dual", objective.dual)):
        if ours.get(key) != value:
            raise ValueError(
                f"{name}: draftsmith.{key} = {ours.get(key)!r}, its objective says {value!r}; export it again"
            )
    if not (folder / WEIGHTS).is_file():
        raise ValueError(f"{name} has no {WEIGHTS}: adapters without their weights are no adapters")
    if sha256_of(folder / WEIGHTS) != ours.get("sha256"):
        raise ValueError(f"{folder / WEIGHTS} is not the file that config.json describes: damaged or changed")
    tensors = read_tensors(folder / WEIGHTS)
    refuse_non_finite(tensors, name)
    adapters = Adapters(config, target, dual=objective.dual)
    adapters.load(tensors)
    if adapters.mask_id != ours.get("mask_id"):
        raise ValueError(f"{name}: draftsmith.mask_id = {ours.get('mask_id')!r}, this target's is {adapters.mask_id}")
    return Converted(objective, adapters)


def settings_of(kind: type[Settings], raw: Any, where: str) -> Settings:
    """A settings class from JSON: every field of its type, and no other."""
    if not isinstance(raw, Mapping):
        raise ValueError(f"{where} is missing; export it again")
    names = {f.name for f in dataclasses.fields(kind)}
    if raw.keys() != names:
        raise ValueError(f"{where}: {', '.join(sorted(raw.keys() ^ names))} on one side only; export it again")
    for name, wanted in typing.get_type_hints(kind).items():
        if not is_of(raw[name], wanted):
            needed = getattr(wanted, "__name__", "") if isinstance(wanted, type) else str(wanted).replace("typing.", "")
            raise ValueError(f"{where}.{name} = {raw[name]!r}: needed {needed}; export it again")
    values: dict[str, Any] = {name: tuple(value) if isinstance(value, list) else value for name, value in raw.items()}
    return kind(**values)


def is_of(value: Any, kind: Any) -> bool:
    """Whether a value from JSON is of a settings field's type. Whole numbers are numbers, truth values are none."""
    form, inner = typing.get_origin(kind), typing.get_args(kind)
    if form is Literal:
        return any(type(value) is type(one) and value == one for one in inner)
    if form in (typing.Union, types.UnionType):
        return any(is_of(value, one) for one in inner)
    if form is tuple:
        if not isinstance(value, list | tuple):
            return False
        kinds = inner[:1] * len(value) if inner[-1] is Ellipsis else inner
        return len(kinds) == len(value) and all(map(is_of, value, kinds))
    return type(value) is kind or (kind is float and type(value) is int)
