"""Consistency models in folders: an ordinary checkpoint that any engine loads as it is, and how Jacobi decodes it.

    config.json, model.safetensors, generation_config.json   the base's architecture with the trained weights
    tokenizer files      the base's, as they are
    merge.json           which tensors changed and by how much (adapters), and what merging does to the logits
    replay/, run.yaml, README.md                             for `check`, of the training, the card

What is ours stands under `draftsmith` in config.json: method, base, objective, settings of Jacobi decoding. Adapters are
added in float32 at least and stored in the dtype that they were trained beside; what is written was built anew and
compared with the adapters at work. A trained mask row goes into the embedding alone: a head that was tied to it gets
weights of its own, so that no logit changes. Loading is strict where our commands do it; `load_target(folder)` and
engines load the folder as what it is, a model.

    stored = stored_consistency("runs/x/export")      # None: the folder holds something else
    target = load_consistency(stored)
    pytest tests/test_consistency_folder.py
"""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ..models.adapters import Adapters
from ..models.jacobi import BRANCHES, JacobiConfig
from ..models.loading import load_target
from ..models.target import Target
from .adapter_folder import settings_of
from .card import render_card, scrub_values
from .check import TOP, CheckConfig, CheckResult, float32_target, judged, stored_positions
from .checkpoint import (
    CHANGES,
    GENERATION,
    base_state,
    changes,
    logit_gap,
    rebuilt,
    refuse_foreign_code,
    refuse_other_logits,
    write_checkpoint,
)
from .denoisers import Stored, verify_weights
from .export import run_yaml
from .exporters.folder import (
    CARD,
    CONFIG,
    REPLAY,
    RUN,
    compare_slots,
    read_header,
    read_json,
    read_tensors,
    refuse_non_finite,
    save_tensors,
    write_folder,
)
from .exporters.layout import FORMAT, RunFacts, Slot
from .load import CONSISTENCY, chosen, facts_of, refuse_path, resolve
from .merge import refuse_place
from .speculate import DecodeConfig
from .trees import TREES

FLAGS = "drafter.jacobi"
NEEDED = ("method", "target", "objective", "decode", "train_length", "mask_id", "sha256")


def save_consistency(
    folder: Path, method: str, objective: Mapping[str, Any], adapters: Adapters, run: RunFacts, decode: JacobiConfig
) -> Path:
    """Write `folder`, whole or not at all.

    `objective`: the method's settings, as facts for readers. `decode`: how to decode, by default. Raises ValueError for
    values that are not finite, a foreign folder or one of adapters, weights that do not compute what the adapters do,
    and blocks that start from a mask which was not trained here.
    """
    target, mask_id = adapters.target, adapters.mask_id
    refuse_place(folder)
    refuse_foreign_code(target)
    refuse_other_mask(decode, mask_id, method)
    state, untie = weights_of(adapters)
    refuse_non_finite(state, f"weights of {method}")
    report: dict[str, Any] = {} if adapters.config.kind == "full" else changes(base_state(target), state)
    model = rebuilt(target, state, target.dtype, untie=untie)
    fresh = Target(model, target.tokenizer, target.facts.name, target.facts.revision)
    ids_ST, positions_R2 = replayed(target, mask_id)
    report["logits"] = logit_gap(
        logits_at(target, ids_ST, positions_R2, adapters), logits_at(fresh, ids_ST, positions_R2)
    )
    refuse_other_logits(report["logits"], target.dtype)
    top = logits_at(float32_target(fresh), ids_ST, positions_R2).topk(TOP)
    replay = {"ids": ids_ST, "positions": positions_R2, "top_ids": top.indices.cpu(), "top_logits": top.values.cpu()}
    report |= {"base": target.facts.name, "base_fingerprint": target.facts.fingerprint}
    report["dtype"] = str(target.dtype).removeprefix("torch.")
    added = mask_id is not None and mask_id >= target.facts.vocab
    ours = {
        "format": FORMAT,
        "kind": CONSISTENCY,
        "method": method,
        "target": scrub_values(facts_of(target.facts)),
        "objective": scrub_values(objective),
        "decode": asdict(decode),
        "train_length": run.train_length,
        "mask_id": mask_id,
        "limits": [f"id {mask_id} is the mask's and no token: it must not be emitted"] if added else [],
    }

    def fill(place: Path) -> None:
        write_checkpoint(place, fresh, target, {}, ours)
        if added and (place / GENERATION).is_file():
            generation = read_json(place / GENERATION) | {"suppress_tokens": [mask_id]}
            (place / GENERATION).write_text(json.dumps(generation, indent=2) + "\n", encoding="utf-8")
        (place / CHANGES).write_text(json.dumps(scrub_values(report), indent=1) + "\n", encoding="utf-8")
        save_tensors(place / REPLAY, replay)
        (place / RUN).write_text(run_yaml(run), encoding="utf-8")
        (place / CARD).write_text(render_card(place), encoding="utf-8")

    write_folder(folder, fill)
    return folder


def weights_of(adapters: Adapters) -> tuple[dict[str, Tensor], bool]:
    """The model's tensors with what was trained in them, and whether its head is no longer its embedding: with a trained
    mask row, a head that shared the embedding's weights keeps those that it has."""
    state, target = adapters.merged(), adapters.target
    if adapters.mask_row is None or not target.facts.tied:
        return state, False
    head = target.model.get_output_embeddings()
    (name,) = (n for n, module in target.model.named_modules(remove_duplicate=False) if module is head)
    own_VD = base_state(target)[f"{name}.weight"].detach()
    added = len(state[f"{name}.weight"]) - len(own_VD)
    state[f"{name}.weight"] = torch.cat([own_VD, own_VD.new_zeros(added, own_VD.shape[1])])
    return state, True


def refuse_other_mask(decode: JacobiConfig, mask_id: int | None, method: str) -> None:
    """ValueError for blocks that start from another token than the mask of the training, or where it had none."""
    if decode.mask_id not in (None, mask_id):
        raise ValueError(
            f"decode.mask_id = {decode.mask_id}: {method} was trained with "
            f"{'no mask' if mask_id is None else f'mask {mask_id}'}; name another start"
        )


def stored_consistency(name: str, revision: str | None = None) -> Stored | None:
    """What a folder or Hub repository holds, if it is a consistency model. ValueError for another export format."""
    folder = resolve(name, revision)
    ours = read_json(folder / CONFIG).get("draftsmith")
    if not isinstance(ours, dict) or ours.get("kind") != CONSISTENCY:
        return None
    if ours.get("format") != FORMAT:
        raise ValueError(f"{name} has export format {ours.get('format')!r}, this version reads {FORMAT}")
    return Stored(name, folder, CONSISTENCY, ours)


def jacobi_of(stored: Stored, flags: JacobiConfig | None = None, named: Collection[str] = frozenset()) -> JacobiConfig:
    """How the folder says to decode. What was chosen of `flags` takes precedence: what is not as usual, and what was
    `named` (keys `drafter.jacobi.*`); of the folder's settings, those give way that do not go with it.

    Raises ValueError, naming the key, where config.json lacks a setting or contradicts itself.
    """
    ours, name = stored.ours, stored.name
    if missing := [key for key in NEEDED if key not in ours]:
        raise ValueError(f"{name}: config.json lacks draftsmith.{', draftsmith.'.join(missing)}; export it again")
    refuse_path(ours["target"], name)
    if not isinstance(ours["objective"], dict):
        raise ValueError(f"{name}: draftsmith.objective = {ours['objective']!r}: no settings; export it again")
    decode = settings_of(JacobiConfig, ours["decode"], f"{name}: draftsmith.decode")
    positions = ours["target"].get("max_positions")
    if not isinstance(positions, int) or decode.block * decode.blocks > positions:
        raise ValueError(
            f"{name}: draftsmith.decode.block x draftsmith.decode.blocks = {decode.block * decode.blocks}, "
            f"draftsmith.target.max_positions is {positions!r}; export it again"
        )
    mask_id, vocab = ours["mask_id"], read_json(stored.folder / CONFIG).get("vocab_size", 0)
    if mask_id is not None and not (isinstance(mask_id, int) and 0 <= mask_id < vocab):
        raise ValueError(f"{name}: draftsmith.mask_id = {mask_id!r}: no id of {vocab}; export it again")
    if decode.mask_id not in (None, mask_id):
        raise ValueError(
            f"{name}: draftsmith.decode.mask_id = {decode.mask_id!r}, draftsmith.mask_id is {mask_id!r}; export it again"
        )
    said = chosen(flags or JacobiConfig(), named, FLAGS)
    if said.get("start", "mask") != "mask":
        said["mask_id"] = None
    if said.get("blocks", 1) > 1:
        said["window"] = "block"
    if said.get("window", "block") != "block":
        said["blocks"] = 1
    settings = replace(decode, **said)
    refuse_other_mask(settings, mask_id, name)
    return settings


def branches(decode: DecodeConfig) -> bool:
    """Whether drafts may have branches beside Jacobi's chain."""
    return not TREES[decode.tree].chain and decode.width > 1


def settings_line(settings: JacobiConfig, branching: bool) -> str:
    """The settings that take part, in a line."""
    idle = () if branching else BRANCHES
    return ", ".join(f"{name} {x}" for name, x in asdict(settings).items() if x is not None and name not in idle)


def refuse_idle_branches(
    flags: JacobiConfig, named: Collection[str], decodes: Sequence[DecodeConfig], flag: str = "--tree"
) -> None:
    """Settings of branches that were chosen where no draft can have any are a mistake: ValueError."""
    idle = [name for name in chosen(flags, named, FLAGS) if name in BRANCHES]
    if idle and not any(map(branches, decodes)):
        raise ValueError(
            f"{', '.join(f'{FLAGS}.{name}' for name in idle)}: about branches, and a chain (or width 1) has none: add "
            f"{flag} static --nodes 16 --width 4, or leave it out"
        )


def verify_consistency(stored: Stored) -> None:
    """Everything that can be checked of a folder without the model: keys, hash, header, finite numbers. ValueError."""
    jacobi_of(stored)
    verify_weights(stored)


def load_consistency(stored: Stored, *, dtype: str = "bfloat16", device: str = "cpu") -> Target:
    """The model, once the folder is whole. Raises ValueError for whatever is missing, damaged, or not what it says."""
    verify_consistency(stored)
    target = load_target(str(stored.folder), dtype=dtype, device=device)
    base = stored.ours["target"]
    found = (target.facts.eos_ids, target.facts.tokenizer_hash)
    wanted = (tuple(base.get("eos_ids") or ()), base.get("tokenizer_hash"))
    if found != wanted:
        raise ValueError(
            f"{stored.name}: its ending ids are {list(found[0])}, its tokenizer {str(found[1])[:12]}; config.json says "
            f"{list(wanted[0])} and {str(wanted[1])[:12]} under draftsmith.target; export it again"
        )
    return target


# The replay


def replayed(target: Target, mask_id: int | None) -> tuple[Tensor, Tensor]:
    """ids [S, T] and (text, t) pairs [R, 2]; where there is a mask, every second text ends in masks."""
    ids_ST, positions_R2 = stored_positions(target, 0)
    if mask_id is not None:
        ids_ST[1::2, ids_ST.shape[1] // 2 :] = mask_id
    return ids_ST, positions_R2


@torch.no_grad()
def logits_at(target: Target, ids_ST: Tensor, positions_R2: Tensor, adapters: Adapters | None = None) -> Tensor:
    """fp32 [R, ids of the tokenizer] logits behind the tokens at `positions_R2`; of a target with adapters, with them on."""
    ids_ST = ids_ST.to(target.device)
    at_ST = torch.arange(ids_ST.shape[1], device=target.device).expand_as(ids_ST)
    with adapters.view("noisy") if adapters is not None else nullcontext():
        hidden_STD = target.forward(ids_ST, at_ST).last_hidden_BTD
        text_R, t_R = positions_R2.to(target.device).unbind(1)
        return target.head(hidden_STD[text_R, t_R])[:, : target.facts.tokens].float()


def check_consistency(cfg: CheckConfig, stored: Stored) -> CheckResult:
    """`draftsmith check` of a consistency model: everything that loading refuses, and the replay. Prints one line."""
    if cfg.target is not None:
        raise ValueError(f"target = {cfg.target!r}: the weights of {cfg.export} stand alone; leave it out")
    target = load_consistency(stored, dtype=cfg.dtype, device=cfg.device)
    decode, replay = jacobi_of(stored), read_replay(stored.folder)
    if int(replay["ids"].max()) >= target.facts.vocab or int(replay["top_ids"].max()) >= target.facts.tokens:
        raise ValueError(f"{stored.folder / REPLAY} was made of another model; export it again")
    logits_RV = logits_at(target, replay["ids"], replay["positions"]).cpu()
    agreeing = int((logits_RV.argmax(-1) == replay["top_ids"][:, 0]).sum())
    gap_RE = (logits_RV.gather(1, replay["top_ids"]) - replay["top_logits"]).abs()
    result = CheckResult(len(logits_RV), agreeing, float(gap_RE.max() / replay["top_logits"].abs().max()))
    what = f"{cfg.export}: {stored.ours['method']}, decoded by jacobi in blocks of {decode.block}"
    return judged(result, cfg, what, "was exported", "export")


def read_replay(folder: Path) -> dict[str, Tensor]:
    """The replay file, its shapes checked against each other. ValueError when it is absent or of another form."""
    if not (folder / REPLAY).is_file():
        raise ValueError(f"{folder} has no {REPLAY}: export the model again to get one")
    header = read_header(folder / REPLAY)
    try:
        (s, t), (r, top) = header["ids"][1], header["top_ids"][1]
    except (KeyError, ValueError):
        raise ValueError(f"{folder / REPLAY} is no replay of this version; export the model again") from None
    slots = {"ids": Slot((s, t), "int64"), "positions": Slot((r, 2), "int64"), "top_ids": Slot((r, top), "int64")}
    compare_slots(header, slots | {"top_logits": Slot((r, top))}, str(folder / REPLAY))
    return read_tensors(folder / REPLAY)
