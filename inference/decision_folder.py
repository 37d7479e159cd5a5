"""The two decision heads (models/decision_heads.py) on disk, in a folder `heads` beside the adapters that they learnt from.

    heads/config.json         {"draftsmith": {format, kind, target, adapters, block, width, filter, pairs, sha256, ...}}
    heads/model.safetensors   their weights, `filter.*` and `pairs.*`
    heads/run.yaml            the run that made them

They know one model: the sha256 of its adapters. Trained on, adapters are others, whose export has no heads yet.
`with_head` and `strategy_beside` are how a strategy of the command line gets them.

Test: pytest tests/test_decision_folder.py
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import yaml
from torch import Tensor, nn

from ..models.decision_heads import PairDependency, UnmaskFilter
from ..models.denoiser import Denoiser
from .export import run_yaml
from .exporters.folder import (
    CONFIG,
    RUN,
    WEIGHTS,
    read_json,
    read_tensors,
    refuse_non_finite,
    save_tensors,
    sha256_of,
    write_folder,
)
from .exporters.layout import FORMAT, RunFacts
from .selections import Independent, Learned
from .strategies import Strategy, strategy_of

FOLDER = "heads"
KIND = "decision_heads"
NEEDS: dict[type, str] = {Learned: "filter", Independent: "pairs"}  # selection -> its setting that is a head


def save_heads(adapters: Path, denoiser: Denoiser, filter: UnmaskFilter, pairs: PairDependency, run: RunFacts) -> Path:
    """Write `heads` into the folder of the adapters, whole or not at all. Raises ValueError for values that are not
    finite, and a folder without adapters."""
    heads = nn.ModuleDict({"filter": filter, "pairs": pairs})
    refuse_non_finite(heads.state_dict(), "decision heads")
    ours: dict[str, Any] = {
        "format": FORMAT,
        "kind": KIND,
        "target": denoiser.facts.fingerprint,
        "adapters": adapters_hash(adapters),
        "block": denoiser.block,
        "width": denoiser.facts.width,
        "filter": {"block": filter.block, "width": filter.inner.out_features},
        "pairs": {"width": pairs.of.in_features, "rank": pairs.of.out_features},
        "training": run.training,
    }
    for head, part, needed in (("filter", "block", denoiser.block), ("pairs", "width", denoiser.facts.width)):
        if ours[head][part] != needed:
            raise ValueError(f"decision heads: {head}.{part} = {ours[head][part]}, this model's is {needed}")

    def fill(place: Path) -> None:
        save_tensors(place / WEIGHTS, heads.state_dict())
        ours["sha256"] = sha256_of(place / WEIGHTS)
        (place / CONFIG).write_text(json.dumps({"draftsmith": ours}, indent=2) + "\n", encoding="utf-8")
        (place / RUN).write_text(run_yaml(run), encoding="utf-8")

    write_folder(adapters / FOLDER, fill)
    return adapters / FOLDER


def read_heads(name: str | Path) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Facts and tensors of the heads beside the adapters in folder `name`, after every check that needs no model.

    Raises ValueError for none, heads of other adapters, and damaged ones.
    """
    adapters = Path(name).expanduser()
    folder = adapters / FOLDER
    if not (folder / CONFIG).is_file():
        raise ValueError(
            f"{name} has no decision heads; train them: python train/fit_decision_heads.py init_from={name}"
        )
    ours = read_json(folder / CONFIG).get("draftsmith")
    if not isinstance(ours, dict) or ours.get("kind") != KIND or ours.get("format") != FORMAT:
        raise ValueError(f"{folder} holds no decision heads of ours (draftsmith.kind = {KIND!r}, format {FORMAT})")
    refuse_others(folder, ours, {"adapters": adapters_hash(adapters)})
    if not (folder / WEIGHTS).is_file() or sha256_of(folder / WEIGHTS) != ours.get("sha256"):
        raise ValueError(f"{folder / WEIGHTS} is not the file that config.json describes: damaged or changed")
    tensors = read_tensors(folder / WEIGHTS)
    refuse_non_finite(tensors, str(folder))
    return ours, tensors


def refuse_others(folder: Path, ours: Mapping[str, Any], own: Mapping[str, Any]) -> None:
    """ValueError, naming both values, where the heads' facts are not `own`."""
    for key, value in own.items():
        if ours.get(key) != value:
            raise ValueError(
                f"{folder} belongs to another model: {key} = {ours.get(key)!r}, here it is {value!r}; train heads for "
                "these adapters (train/fit_decision_heads.py)"
            )


def load_heads(name: str | Path, denoiser: Denoiser) -> tuple[UnmaskFilter, PairDependency, str]:
    """The heads beside the adapters in folder `name`, frozen, on the denoiser's device; and the sha256 of their weights.

    Raises ValueError, naming both values, for heads of another model, and incomplete or damaged ones.
    """
    ours, tensors = read_heads(name)
    folder = Path(name).expanduser() / FOLDER
    own = {"target": denoiser.facts.fingerprint, "block": denoiser.block, "width": denoiser.facts.width}
    refuse_others(folder, ours, own)
    try:
        filter, pairs = UnmaskFilter(**ours["filter"]), PairDependency(**ours["pairs"])
        nn.ModuleDict({"filter": filter, "pairs": pairs}).load_state_dict(tensors)
    except (KeyError, TypeError, RuntimeError) as error:
        raise ValueError(f"{folder}: weights and config.json do not fit: {' '.join(str(error).split())}") from None
    for head in (filter, pairs):
        head.to(denoiser.device).requires_grad_(False)
    return filter, pairs, ours["sha256"]


def adapters_hash(folder: Path) -> str:
    """The sha256 that a folder of adapters states for their weights."""
    ours = read_json(folder / CONFIG).get("draftsmith")
    found = ours.get("sha256") if isinstance(ours, dict) else None
    if not isinstance(found, str):
        raise ValueError(f"{folder} is no folder of adapters: its config.json has no draftsmith.sha256")
    return found


def strategy_beside(
    adapters: str | Path, denoiser: Denoiser, name: str, settings: Mapping[str, Any] | None = None
) -> tuple[Strategy, dict[str, Any]]:
    """The strategy of that name, with its head from beside the adapters where it has one; and what made it so, as JSON:
    the adapters, the name, the settings, the head."""
    settings = dict(settings or {})
    made_by: dict[str, Any] = {"adapters": adapters_hash(Path(adapters).expanduser()), "strategy": name}
    made_by["settings"] = settings
    if head := lacking(strategy_of(name)):
        if head in settings:
            raise ValueError(f"strategy {name}: {head} is a trained head, taken from beside the adapters; leave it out")
        made_by["heads"] = read_heads(adapters)[0]["sha256"]
    return with_head(strategy_of(name, settings), adapters, denoiser), made_by


def lacking(strategy: Strategy) -> str | None:
    """The setting of a strategy that is a head which it has not got yet; None = it needs none."""
    setting = NEEDS.get(type(strategy.select))
    return setting if setting is not None and getattr(strategy.select, setting) is None else None


def with_head(strategy: Strategy, adapters: str | Path, denoiser: Denoiser) -> Strategy:
    """The strategy with its head from beside the adapters, if it needs one. Raises ValueError as `load_heads` does."""
    if (setting := lacking(strategy)) is None:
        return strategy
    filter, pairs, _ = load_heads(adapters, denoiser)
    return replace(strategy, select=replace(strategy.select, **{setting: {"filter": filter, "pairs": pairs}[setting]}))


def settings_of(pairs: Sequence[str]) -> dict[str, Any]:
    """`["threshold=0.8", "steps=4"]` as values. Raises ValueError for what is no pair, and a name that stands twice."""
    found: dict[str, Any] = {}
    for pair in pairs:
        name, equals, value = pair.partition("=")
        if not equals or not name.isidentifier() or name in found:
            raise ValueError(f"settings: {pair!r} is not name=value, or stands twice; for example threshold=0.8")
        try:
            found[name] = yaml.safe_load(value)
        except yaml.YAMLError:
            raise ValueError(f"settings: {pair!r} has no value that can be read") from None
        if isinstance(found[name], list):
            found[name] = tuple(found[name])
        if isinstance(found[name], str):
            with suppress(ValueError):  # 1e-3, which YAML takes for a text
                found[name] = float(value)
    return found
