"""Load a drafter from an export folder or a Hub id, strictly.

Three questions are asked before a weight is used, each answered with the differing values: does the file hold exactly
the tensors that its config declares (none missing, none extra, none of another shape, none infinite); is it the form
of the method it names; does it belong to this target (width, vocabulary, tokenizer, layers and taps, RoPE, length).
A head that fails one of them would run, and accept nothing.

Tests: tests/test_export.py (CASES B33-B36, B49), tests/test_security.py (hostile files).
"""

from __future__ import annotations

import dataclasses
import os
import re
import typing
import warnings
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import torch

from ..models import METHODS, TRAINING_FREE, FreeSettings
from ..models.draft_model import load_draft_model
from ..models.drafter import Drafter, TargetFacts
from .card import HUB_ID
from .exporters import EXPORTERS
from .exporters.folder import (
    CONFIG,
    WEIGHTS,
    compare_slots,
    read_header,
    read_json,
    read_tensors,
    refuse_non_finite,
    sha256_of,
)
from .exporters.layout import FORMAT, Unpacked

if TYPE_CHECKING:
    from ..models.target import Target

PLAIN_MODEL = "lm:"
CONSISTENCY: Final = "consistency"  # of `draftsmith.kind`
PLAIN_NAME = re.compile(r"\w[\w.+ -]*")
NEEDED = ("format", "method", "target", "config", "taps", "taps_convention", "train_length")
FORMS: dict[str, tuple[str, Any]] = {"method": ("a text", str), "config": ("an object", dict), "taps": ("a list", list)}
SHARED_FACTS = ("width", "vocab", "tokens", "layers", "max_positions")  # must be the target's own, exactly
SHARED_IDS = ("vocab", "tokens")  # of drafters that read text alone: any target with the same tokenizer will do


def resolve(name: str, revision: str | None = None) -> Path:
    """The folder of an export: a local one, or a Hub repository downloaded at a fixed commit (JSON, safetensors and
    text only). ValueError when it is neither, or the Hub can't be asked."""
    folder = Path(name).expanduser()
    if folder.is_dir():
        return folder
    if not HUB_ID.fullmatch(name) or name.startswith((".", "/")):
        raise ValueError(f"{name!r} is no folder and no Hub id (user/name); train a head with ./launch.sh first")
    import huggingface_hub
    from huggingface_hub.errors import HfHubHTTPError, HTTPError, LocalEntryNotFoundError, OfflineModeIsEnabled

    try:
        place = huggingface_hub.snapshot_download(
            name, revision=revision, allow_patterns=["*.json", "*.safetensors", "*.yaml", "*.md", "*.jinja", "*.txt"]
        )
    except (LocalEntryNotFoundError, OfflineModeIsEnabled):
        reason = "HF_HUB_OFFLINE is set" if os.environ.get("HF_HUB_OFFLINE") else "the Hub is not reachable"
        raise ValueError(f"{name!r} is no folder here and not in the local Hub cache, and {reason}") from None
    except HfHubHTTPError as error:
        status = error.response.status_code if error.response is not None else "no"
        raise ValueError(f"{name!r} is no folder here and the Hub answers with status {status}") from None
    except HTTPError as error:
        raise ValueError(f"{name!r} is no folder here and the Hub is not reachable ({type(error).__name__})") from None
    return Path(place)


def read_export_config(name: str, revision: str | None = None) -> dict[str, Any]:
    """config.json of an export, its `draftsmith` key checked for form and method.

    Raises:
        ValueError: no export of ours (a foreign head wants `draftsmith convert`), a newer format, an unknown method.
    """
    folder = resolve(name, revision)
    config = read_json(folder / CONFIG)
    ours = config.get("draftsmith")
    if isinstance(ours, dict) and ours.get("kind") in ("adapters", "merged"):
        raise ValueError(f"{name} holds a denoiser, a drafter is needed here; see `draftsmith generate --model {name}`")
    if isinstance(ours, dict) and ours.get("kind") == CONSISTENCY:
        raise ValueError(
            f"{name} holds a consistency model, a target of its own, and a drafter is needed here; name it alone, as --model, or "
            "as --target"
        )
    if not isinstance(ours, dict):
        raise ValueError(
            f"{name} has no `draftsmith` key in config.json: not our export; "
            f"run `draftsmith convert {name} FOLDER --target TARGET` first"
        )
    if missing := [key for key in NEEDED if key not in ours]:
        raise ValueError(f"{name}: config.json lacks draftsmith.{', draftsmith.'.join(missing)}; export it again")
    if ours["format"] != FORMAT:
        raise ValueError(f"{name} has export format {ours['format']!r}, this version reads {FORMAT}; export it again")
    refuse_forms(ours, name)
    if ours["method"] not in EXPORTERS:
        raise ValueError(f"{name} declares method {ours['method']!r}; known: {', '.join(EXPORTERS)}")
    refuse_path(ours["target"], name)
    for key, kind in (("rope", dict), ("tokenizer_hash", str)):
        value = ours["target"].get(key)
        if value is not None and not isinstance(value, kind):
            raise ValueError(f"{name}: config.json: draftsmith.target.{key} is {_short(value)}; export it again")
    return config


def refuse_forms(ours: Mapping[str, Any], where: str) -> None:
    """ValueError where an entry of an export's `draftsmith` key has another JSON type than ours have."""
    for key, (needed, kind) in FORMS.items():
        if not isinstance(ours[key], kind):
            raise ValueError(
                f"{where}: config.json: draftsmith.{key} is {_short(ours[key])}, needed: {needed}; export it again"
            )
    if any(type(k) is not int for k in ours["taps"]):
        raise ValueError(
            f"{where}: config.json: draftsmith.taps is {_short(ours['taps'])}, needed: integers; export it again"
        )
    length = ours["train_length"]
    if length is not None and type(length) is not int:
        raise ValueError(
            f"{where}: config.json: draftsmith.train_length is {_short(length)}, needed: an integer; export it again"
        )


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."


def refuse_path(target: Any, where: str) -> None:
    """ValueError unless the facts of an export's target name it by a Hub id or a plain name: no file may send a reader
    elsewhere on this machine."""
    name = target.get("name") if isinstance(target, Mapping) else None
    if not isinstance(name, str) or not (HUB_ID.fullmatch(name) or PLAIN_NAME.fullmatch(name)):
        raise ValueError(f"{where}: config.json names the target {name!r}; needed: a Hub id or a plain name, no path")


def verify_folder(folder: Path, config: Mapping[str, Any] | None = None) -> dict[str, torch.Tensor]:
    """Read an export's tensors after every check that needs no target. Returns them as they stand in the file."""
    config = config or read_export_config(str(folder))
    ours = config["draftsmith"]
    exporter = EXPORTERS[ours["method"]]
    where = f"{folder} ({ours['method']})"
    try:
        slots = exporter.slots(config)
    except (KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"{where}: config.json lacks a setting or has one of a wrong type: {error}") from None
    compare_slots(read_header(folder / WEIGHTS), slots, where)
    if (stated := ours.get("sha256")) and stated != (found := sha256_of(folder / WEIGHTS)):
        raise ValueError(
            f"{folder / WEIGHTS} has sha256 {found[:16]}…, config.json says {str(stated)[:16]}…: damaged or changed"
        )
    tensors = read_tensors(folder / WEIGHTS)
    refuse_non_finite(tensors, where)
    return tensors


def is_free(name: str | None) -> bool:
    """Whether a drafter of this name needs no export: a key of TRAINING_FREE, or `lm:` before an ordinary checkpoint."""
    return name is not None and (name in TRAINING_FREE or name.startswith(PLAIN_MODEL))


def class_of(name: str, export: Mapping[str, Any] | None) -> Any:
    """The class of a drafter that is not loaded yet: by its name if it is free, else by its export's `draftsmith` key."""
    if export is not None:
        return METHODS[export["method"]]
    return TRAINING_FREE.get(name, METHODS["draft_model"])


def free_drafter(name: str, target: Target, settings: FreeSettings | None = None) -> Any:
    """The training-free drafter of this name, for any target: one of TRAINING_FREE, or the language model (folder or Hub
    id) behind `lm:`, as it stands."""
    if name == PLAIN_MODEL:
        raise ValueError(f"{name!r} names no model: write {PLAIN_MODEL}NAME, a folder or Hub id of a language model")
    if name.startswith(PLAIN_MODEL):
        return load_draft_model(name.removeprefix(PLAIN_MODEL), target)
    drafter = TRAINING_FREE[name](getattr(settings or FreeSettings(), name), target.facts)
    drafter.bind(target)
    return drafter


def refuse_idle_settings(settings: FreeSettings, names: Sequence[str | None]) -> None:
    """Settings of a training-free drafter that takes no part (`names` do) are a mistake: ValueError."""
    for name in TRAINING_FREE:
        if name not in names and getattr(settings, name) != getattr(FreeSettings(), name):
            raise ValueError(
                f"drafter.{name} is set, but {name} drafts nothing here: add --model {name}, or leave it out"
            )


def chosen(settings: Any, named: Collection[str], prefix: str) -> dict[str, Any]:
    """Of a settings class, what somebody chose: values that are not the usual ones, and those whose key (`prefix` and the
    field) was `named`, which may be the usual ones."""
    usual = type(settings)()
    return {
        f.name: value
        for f in dataclasses.fields(settings)
        if (value := getattr(settings, f.name)) != getattr(usual, f.name) or f"{prefix}.{f.name}" in named
    }


def load_drafter(name: str, target: Target, *, revision: str | None = None) -> Drafter:
    """A drafter ready to run beside `target`: on its device, in its dtype, frozen.

    Raises:
        ValueError: the folder is incomplete or of another method, or the head does not belong to this target; the
            message names each differing field with both values.
    """
    folder = resolve(name, revision)
    config = read_export_config(str(folder))
    refuse_other_target(config, target.facts)
    return build_drafter(folder, config, target)


def build_drafter(folder: Path, config: Mapping[str, Any], target: Target) -> Drafter:
    """Build the method named in `config` and fill it with the folder's tensors, every one of them and no other."""
    ours = config["draftsmith"]
    tensors = verify_folder(folder, config)
    unpacked = EXPORTERS[ours["method"]].unpack(config, tensors)
    drafter = METHODS[ours["method"]](read_method_config(ours), target.facts, unpacked.draft_ids)
    if list(drafter.taps) != list(ours["taps"]):
        raise ValueError(f"{folder}: taps {ours['taps']} are declared, the method's settings give {list(drafter.taps)}")
    if unpacked.target_head is not None:
        refuse_other_head(unpacked, target, str(folder))
    if unpacked.target_embed is not None:
        refuse_other_embeddings(unpacked, target, str(folder))
    load_state(drafter, unpacked.state, str(folder))
    drafter.bind(target)
    return drafter.to(device=target.device, dtype=target.dtype).requires_grad_(False).eval()


def refuse_other_head(unpacked: Unpacked, target: Target, where: str) -> None:
    """A head that the file shares with the target must be the target's, as far as the file's dtype can say."""
    stored, ids = unpacked.target_head, unpacked.draft_ids
    assert stored is not None
    ids = None if ids is None else ids.to(target.device)
    rows = target.head_weight if ids is None else target.head_weight[ids]
    away = (rows.float().cpu() - stored.float()).abs() - target.head_rounding(ids).float().cpu()
    if not bool((away <= 1e-6 + 2**-7 * stored.float().abs()).all()):
        raise ValueError(
            f"{where}: the shared lm_head.weight is not the head of {target.facts.name}; it was made for another"
        )


def refuse_other_embeddings(unpacked: Unpacked, target: Target, where: str) -> None:
    """The same of an embedding table, whose rows `own_rows` are the drafter's."""
    stored = unpacked.target_embed
    assert stored is not None
    table = target.embed(torch.arange(len(stored), device=target.device)).float().cpu()
    others = torch.ones(len(stored), dtype=torch.bool)
    others[list(unpacked.own_rows)] = False
    if not torch.allclose(table[others], stored[others].float(), rtol=2**-7, atol=1e-6):
        raise ValueError(
            f"{where}: embed_tokens.weight is not the table of {target.facts.name}; it was made for another"
        )


def load_state(drafter: Any, state: Mapping[str, torch.Tensor], where: str) -> None:
    """`load_state_dict`, strict, with missing, extra and misshapen keys in one ValueError; `d2t_W` is already there."""
    own = {name: t for name, t in drafter.state_dict().items() if name != "d2t_W"}
    given = {name: t for name, t in state.items() if name != "d2t_W"}
    faults = [
        f"{name} has shape {list(t.shape)}, needed {list(own[name].shape)}"
        for name, t in given.items()
        if name in own and t.shape != own[name].shape
    ]
    if missing := sorted(set(own) - set(given)):
        faults.append(f"missing: {', '.join(missing)}")
    if extra := sorted(set(given) - set(own)):
        faults.append(f"not expected: {', '.join(extra)}")
    if faults:
        raise ValueError(f"{where} does not fit method {drafter.method!r}: " + "; ".join(faults))
    drafter.load_state_dict(given, strict=False)


def read_method_config(ours: Mapping[str, Any]) -> Any:
    """The method's own frozen Config from the export, unknown and missing keys refused by name."""
    return _read_settings(METHODS[ours["method"]].Config, ours["config"], ours["method"], "draftsmith.config")


def _read_settings(kind: Any, given: Mapping[str, Any], method: str, where: str) -> Any:
    """An instance of a settings class, those inside it included."""
    if not isinstance(given, Mapping):
        raise ValueError(f"config.json: {where} is {_short(given)}, needed: an object")
    hints = typing.get_type_hints(kind)
    fields = {f.name: hints[f.name] for f in dataclasses.fields(kind)}
    if unknown := sorted(set(given) - set(fields)):
        raise ValueError(f"config.json: {where} has {', '.join(unknown)}, unknown to method {method!r}")
    values: dict[str, Any] = {name: tuple(v) if isinstance(v, list) else v for name, v in given.items()}
    for name, value in values.items():
        if dataclasses.is_dataclass(fields[name]):
            values[name] = _read_settings(fields[name], value, method, f"{where}.{name}")
    try:
        return kind(**values)
    except (TypeError, AttributeError) as error:  # a value of another type than its field's
        raise ValueError(f"config.json: {where} of method {method!r} has a value of a wrong type: {error}") from None


def facts_of(drafter_facts: TargetFacts) -> dict[str, Any]:
    """The target's facts as they stand in an export (JSON types)."""
    return {k: list(v) if isinstance(v, tuple) else v for k, v in dataclasses.asdict(drafter_facts).items()}


def refuse_other_target(config: Mapping[str, Any], facts: TargetFacts) -> None:
    """Refuse a head that was made for another target; every differing field is named with both values."""
    ours = config["draftsmith"]
    stated = ours["target"]
    now = facts_of(facts)
    reads_text_alone = METHODS[ours["method"]].draft_needs <= {"ids"}
    faults = [
        f"{name}: head {stated.get(name)!r}, target {now[name]!r}"
        for name in (SHARED_IDS if reads_text_alone else SHARED_FACTS)
        if stated.get(name) != now[name]
    ]
    if stated.get("tokenizer_hash") and facts.tokenizer_hash and stated["tokenizer_hash"] != facts.tokenizer_hash:
        faults.append(f"tokenizer: head {stated['tokenizer_hash'][:12]}, target {facts.tokenizer_hash[:12]}")
    if not reads_text_alone and plain_rope(stated.get("rope")) != plain_rope(facts.rope):
        faults.append(f"rope: head {plain_rope(stated.get('rope'))}, target {plain_rope(facts.rope)}")
    if outside := [k for k in ours["taps"] if not 0 <= k <= facts.layers]:
        faults.append(f"taps: head {outside}, target has h[0] to h[{facts.layers}]")
    if not reads_text_alone and (length := ours["train_length"]) and length > facts.max_positions:
        faults.append(f"training length: head {length}, target {facts.max_positions} positions")
    if faults:
        raise ValueError(f"this head was made for {stated.get('name')}, not for {facts.name}; " + "; ".join(faults))
    if stated.get("fingerprint") != facts.fingerprint:
        warnings.warn(
            f"the head was trained on other weights of this architecture ({stated.get('name')}); output stays right, "
            "acceptance may be low",
            stacklevel=2,
        )


def plain_rope(rope: Mapping[str, Any] | None) -> dict[str, Any]:
    """RoPE settings without empty entries, numbers as floats: two spellings of the same settings compare equal."""
    return {k: float(v) if isinstance(v, int | float) else v for k, v in sorted((rope or {}).items()) if v is not None}
