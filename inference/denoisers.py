"""Denoisers in folders, for the commands: adapters beside their base, merged weights, and layouts of other projects.

    stored = stored_denoiser("runs/convert/export")     # None: the folder holds something else
    denoiser = load_denoiser(stored, dtype="float32")

Reading refuses what would run and be wrong, as `adapter_folder.py` does for adapters: of merged weights a changed file, a
schema's key or an id that is not what `draftsmith` says, a setting that is missing. A merged folder also holds a replay:
the largest logits of some masks as the exporter saw them, which `draftsmith check` computes anew.

Test: pytest tests/test_merge.py tests/test_denoiser_commands.py
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

from ..models.denoiser import Denoiser, TargetDenoiser
from ..models.diffusion import ObjectiveConfig
from ..models.layouts import LAYOUTS, load_layout
from ..models.loading import load_target
from ..models.target import Target
from .adapter_folder import KIND, MERGED, denoiser_of, load_adapters, settings_of
from .canvas import sight
from .card import DECODE
from .check import TOP, CheckConfig, CheckResult, float32_target, judged, stored_positions
from .decision_folder import lacking, read_heads, with_head
from .diffuse import DiffuseConfig
from .exporters import SCHEMAS
from .exporters.folder import (
    CONFIG,
    REPLAY,
    WEIGHTS,
    compare_slots,
    read_header,
    read_json,
    read_tensors,
    refuse_non_finite,
    sha256_of,
)
from .exporters.layout import FORMAT, Slot
from .load import refuse_path, resolve
from .strategies import strategy_of

MASKS = 16  # places of a replayed text that are shown at least, where its last block is longer


@dataclass(frozen=True)
class Stored:
    """A folder that holds a denoiser, or a consistency model (consistency_folder.py). `ours`: its facts; empty for layouts
    of other projects."""

    name: str
    folder: Path
    kind: Literal["adapters", "merged", "layout", "consistency"]
    ours: dict[str, Any]

    @property
    def keeps_base(self) -> bool:
        """Whether the model that was converted is still there when the denoiser is loaded: adapters off."""
        return self.kind == "adapters" and (self.ours.get("adapters") or {}).get("kind") != "full"


def stored_denoiser(name: str, revision: str | None = None) -> Stored | None:
    """What a folder or Hub repository holds, if it is a denoiser. Raises ValueError when it is neither, or of another
    export format."""
    folder = resolve(name, revision)
    config = read_json(folder / CONFIG)
    ours = config.get("draftsmith")
    if isinstance(ours, dict) and ours.get("kind") in (KIND, MERGED):
        if ours.get("format") != FORMAT:
            raise ValueError(f"{name} has export format {ours.get('format')!r}, this version reads {FORMAT}")
        return Stored(name, folder, ours["kind"], ours)
    if ours is None and config.get("model_type") in LAYOUTS:
        return Stored(name, folder, "layout", {})
    return None


def load_base(
    stored: Stored,
    name: str | None = None,
    revision: str | None = None,
    *,
    dtype: str = "bfloat16",
    device: str = "cpu",
    trust_remote_code: bool = False,
) -> Target:
    """The autoregressive model that was converted, or trained on: the one that the folder names, or `name`.

    Raises ValueError when it is not the model that the folder was made from.
    """
    base = stored.ours.get("target")
    if not isinstance(base, dict) or not isinstance(base.get("name"), str):
        raise ValueError(f"{stored.name} names no model that it was made from: there is none to compare with")
    refuse_path(base, stored.name)
    revision = revision or (None if name else base.get("revision"))
    target = load_target(
        name or base["name"], dtype=dtype, device=device, revision=revision, trust_remote_code=trust_remote_code
    )
    if target.facts.fingerprint != base.get("fingerprint"):
        raise ValueError(
            f"{stored.name} was made from {base['name']!r} ({str(base.get('fingerprint'))[:12]}...), "
            f"{target.facts.name!r} is {target.facts.fingerprint[:12]}...: name the right one with --target"
        )
    return target


def load_denoiser(
    stored: Stored, base: Target | None = None, *, dtype: str = "bfloat16", device: str = "cpu"
) -> TargetDenoiser:
    """The denoiser, ready to decode. `base`: what adapters go into, where they stay; by default what they name is loaded.

    Raises ValueError for whatever is missing, damaged, or not what the folder says.
    """
    if stored.kind == "adapters":
        base = base or load_base(stored, dtype=dtype, device=device)
        return load_adapters(str(stored.folder), base).denoiser()
    if stored.kind == "layout":
        return load_layout(stored.folder, dtype=dtype, device=device)
    return _load_merged(stored, dtype, device)


def verify_denoiser(stored: Stored) -> None:
    """Everything that can be checked of a folder of ours without the model: keys, hash, header, finite numbers.

    Raises ValueError naming what is wrong; layouts of other projects are refused, they are not ours to publish.
    """
    if stored.kind == "layout":
        raise ValueError(f"{stored.name} is no draftsmith export: it is a model of its own project")
    if stored.kind == "merged":
        merged_facts(stored)
    else:
        settings_of(ObjectiveConfig, stored.ours.get("objective"), f"{stored.name}: draftsmith.objective")
    verify_weights(stored)


def verify_weights(stored: Stored) -> None:
    """One file of weights, the one that config.json describes, and finite. ValueError."""
    file = stored.folder / WEIGHTS
    if more := sorted(p.name for p in stored.folder.glob("*.safetensors") if p.name != WEIGHTS):
        raise ValueError(f"{stored.name} holds {', '.join(more)} beside {WEIGHTS}: no file of an export; remove it")
    read_header(file)
    if sha256_of(file) != stored.ours.get("sha256"):
        raise ValueError(f"{file} does not have the sha256 of config.json: damaged or changed")
    refuse_non_finite(read_tensors(file), stored.name)


def _load_merged(stored: Stored, dtype: str, device: str) -> TargetDenoiser:
    ours, name, folder = stored.ours, stored.name, stored.folder
    verify_denoiser(stored)
    objective, mask_id = merged_facts(stored)
    if ours["schema"] == "plain":
        denoiser = denoiser_of(objective, load_target(str(folder), dtype=dtype, device=device, denoises=True), mask_id)
    else:
        denoiser = load_layout(folder, dtype=dtype, device=device)
    found = (denoiser.tokenizer.mask_token_id, denoiser.facts.eos_ids)
    wanted = (mask_id, tuple((ours.get("target") or {}).get("eos_ids") or ()))
    if found != wanted:
        raise ValueError(
            f"{name}: mask and ending ids are {found[0]} and {list(found[1])} in its tokenizer and configs, config.json "
            f"says {wanted[0]} and {list(wanted[1])} under draftsmith; export it again"
        )
    return denoiser


def merged_facts(stored: Stored) -> tuple[ObjectiveConfig, int]:
    """Objective and mask of a merged folder, all that config.json says compared with itself. ValueError names the keys."""
    ours, name = stored.ours, stored.name
    objective = settings_of(ObjectiveConfig, ours.get("objective"), f"{name}: draftsmith.objective")
    config = read_json(stored.folder / CONFIG)
    mask_id, schema = ours.get("mask_id"), SCHEMAS.get(str(ours.get("schema")))
    if schema is None:
        raise ValueError(f"{name}: draftsmith.schema = {ours.get('schema')!r}; known: {', '.join(SCHEMAS)}")
    if not isinstance(mask_id, int) or not 0 <= mask_id < config.get("vocab_size", 0):
        raise ValueError(f"{name}: draftsmith.mask_id = {mask_id!r}: no id of {config.get('vocab_size')}")
    wanted: dict[str, Any] = {f"draftsmith.{key}": value for key, value in facts_of_objective(objective).items()}
    found = {key: ours.get(key.removeprefix("draftsmith.")) for key in wanted}
    wanted |= (keys := schema.keys(objective, mask_id))
    found |= {key: config.get(key, "nothing") for key in keys}
    if faults := [f"{key} = {found[key]!r}, needed {wanted[key]!r}" for key in wanted if found[key] != wanted[key]]:
        raise ValueError(f"{name}: config.json contradicts itself ({'; '.join(faults)}); export it again")
    return objective, mask_id


def facts_of_objective(objective: ObjectiveConfig) -> dict[str, Any]:
    """What stands beside the objective under `draftsmith`, for readers that look no deeper; `engines`: names that engines
    have for the block."""
    names = ("block_size", "bd_size", "block_length", "dllm_block_length")  # SDAR, Fast-dLLM v2, JetEngine, LMDeploy
    return {
        "block": objective.block,
        "shift": objective.shift,
        "dual": objective.dual,
        "engines": dict.fromkeys(names, objective.block),
    }


def decode_of_denoiser(
    stored: Stored,
    strategy: str | None = None,
    threshold: float | None = None,
    steps: int | None = None,
    sub_block: int | None = None,
) -> DiffuseConfig:
    """How to decode: what is asked for, else what the folder recommends, else `DECODE`. `steps` alone means `fixed`.

    Raises ValueError for an unknown strategy, a setting that it does not have, and a head that the folder does not have.
    """
    settings: dict[str, Any] = {}
    if strategy is None and steps is not None and threshold is None:
        strategy = "fixed"
    if strategy is None:
        decode = stored.ours.get("decode") or DECODE
        if not isinstance(decode, dict) or not isinstance(decode.get("settings"), dict):
            raise ValueError(
                f"{stored.name}: draftsmith.decode = {decode!r}: no strategy with settings; export it again"
            )
        strategy, settings = str(decode.get("strategy")), dict(decode["settings"])
    settings |= {k: v for k, v in (("threshold", threshold), ("steps", steps)) if v is not None}
    how = DiffuseConfig(strategy_of(strategy, settings), sub_block=sub_block)
    refuse_without_head(stored, how, strategy)
    return how


def refuse_without_head(stored: Stored, how: DiffuseConfig, name: str) -> None:
    """ValueError for a strategy with a trained head where there is none; no weights are needed to tell."""
    if lacking(how.strategy) is None:
        return
    if stored.kind != "adapters":
        raise ValueError(f"strategy {name} needs a trained head, which lies beside adapters; {stored.name} has none")
    read_heads(stored.folder)


def complete(stored: Stored, how: DiffuseConfig, denoiser: Denoiser) -> DiffuseConfig:
    """The settings with the head of their strategy, where it has one, from beside the adapters."""
    return replace(how, strategy=with_head(how.strategy, stored.folder, denoiser))


# The replay


@torch.no_grad()
def masked_logits(denoiser: Denoiser, ids_ST: Tensor) -> Tensor:
    """fp32 [R, V] logits of the masks in place of the end of each text, behind finished blocks as the model sees them."""
    s, t = ids_ST.shape
    start = (t - 1) // denoiser.block * denoiser.block
    ids_ST = ids_ST.to(denoiser.device)
    places_ST = torch.arange(t, device=denoiser.device).expand(s, t)
    masked_ST = places_ST >= max(start, min(MASKS, t - 1))
    see_STT = sight(
        denoiser, places_ST, torch.ones_like(masked_ST), places_ST // denoiser.block, places_ST < start, masked_ST
    )
    canvas_ST = torch.where(masked_ST, denoiser.mask_id, ids_ST)
    hidden_STD = denoiser.denoise(canvas_ST, places_ST, see_BTA=see_STT)
    return denoiser.head(hidden_STD[masked_ST]).float()


def make_masked_replay(denoiser: TargetDenoiser) -> dict[str, Tensor]:
    """The tensors of a merged folder's replay file, of a denoiser in float32."""
    ids_ST, _ = stored_positions(denoiser.target, 0)
    top = masked_logits(denoiser, ids_ST).topk(TOP)
    return {"ids": ids_ST, "top_ids": top.indices.cpu(), "top_logits": top.values.cpu()}


def check_denoiser(cfg: CheckConfig, stored: Stored) -> CheckResult:
    """`draftsmith check` of a denoiser: everything that loading refuses, and finite logits of masks; of merged weights
    the replay too. Prints one line. Raises ValueError when it is not what was exported."""
    if stored.kind != "adapters" and cfg.target is not None:
        raise ValueError(f"target = {cfg.target!r}: the weights of {cfg.export} stand alone; leave it out")
    dtype = cfg.dtype if stored.kind != "adapters" else stored.ours.get("dtype", cfg.dtype)
    base = load_base(stored, cfg.target, dtype=dtype, device=cfg.device) if stored.kind == "adapters" else None
    denoiser = load_denoiser(stored, base, dtype=dtype, device=cfg.device)
    ids_ST, _ = stored_positions(denoiser.target, 0)
    logits_RV = masked_logits(denoiser, ids_ST)
    usable_V = ~denoiser.never_V
    refuse_non_finite({"logits": logits_RV[:, usable_V]}, cfg.export)
    what = f"{cfg.export}: block {denoiser.block}, shift {denoiser.shift}, mask {denoiser.mask_id}"
    if stored.kind != "merged":
        print(f"{what}; tensors complete and finite, logits of masks finite")
        return CheckResult(0, 0, 0.0)
    replay = _read_masked_replay(stored.folder)
    logits_RV = masked_logits(denoiser, replay["ids"]).cpu()
    if logits_RV.shape[0] != len(replay["top_ids"]) or int(replay["top_ids"].max()) >= logits_RV.shape[1]:
        raise ValueError(f"{stored.folder / REPLAY} was made of another model or block; export it again")
    agreeing = int((logits_RV.argmax(-1) == replay["top_ids"][:, 0]).sum())
    gap_RE = (logits_RV.gather(1, replay["top_ids"]) - replay["top_logits"]).abs()
    result = CheckResult(len(logits_RV), agreeing, float(gap_RE.max() / replay["top_logits"].abs().max()))
    return judged(result, cfg, what, "was exported", "merge")


def _read_masked_replay(folder: Path) -> Mapping[str, Tensor]:
    if not (folder / REPLAY).is_file():
        raise ValueError(f"{folder} has no {REPLAY}: merge the adapters again to get one")
    header = read_header(folder / REPLAY)
    try:
        (s, t), (r, top) = header["ids"][1], header["top_ids"][1]
    except (KeyError, ValueError):
        raise ValueError(f"{folder / REPLAY} is no replay of this version; merge the adapters again") from None
    slots = {"ids": Slot((s, t), "int64"), "top_ids": Slot((r, top), "int64"), "top_logits": Slot((r, top))}
    compare_slots(header, slots, str(folder / REPLAY))
    return read_tensors(folder / REPLAY)


def in_float32(denoiser: TargetDenoiser, objective: ObjectiveConfig) -> TargetDenoiser:
    """The same denoiser of merged weights in float32 (exact)."""
    return denoiser_of(objective, float32_target(denoiser.target), denoiser.mask_id)
