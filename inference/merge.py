"""`draftsmith merge`: adapters of a converted model into its weights, in a form that engines load.

    draftsmith merge runs/convert_smollm2/export runs/convert_smollm2/merged
    draftsmith merge ADAPTERS OUT --schema sdar

    config.json, model.safetensors, generation_config.json   the base's architecture, in the form of the schema
    tokenizer files      the base's, with its mask token set
    merge.json           which tensors changed and by how much, and what that does to the logits
    replay/, run.yaml, README.md                             for `check`, of the training, the card

Sums are made in float32 at least and stored in the dtype that the adapters were trained beside. What is written was
built anew and compared with the adapters at work: in float32 a difference is refused, in half types, which round, it is
told. Refused too are `dual` adapters (they act on some rows alone), and folders that are merged already.

Test: pytest tests/test_merge.py
"""

from __future__ import annotations

import copy
import json
import shutil
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

from ..models.loading import load_target
from ..models.target import DTYPES, Target
from .adapter_folder import KIND, MERGED, Converted, adapter_facts, denoiser_of, load_adapters
from .card import DECODE, render_card, scrub_values
from .check import stored_positions
from .checkpoint import (
    CHANGES,
    base_state,
    changes,
    logit_gap,
    rebuilt,
    refuse_foreign_code,
    refuse_other_logits,
    write_checkpoint,
)
from .decision_folder import lacking
from .denoisers import facts_of_objective, in_float32, make_masked_replay, masked_logits
from .export import run_yaml
from .exporters import SCHEMAS
from .exporters.folder import (
    CARD,
    CONFIG,
    REPLAY,
    RUN,
    read_json,
    refuse_foreign_folder,
    refuse_non_finite,
    save_tensors,
    write_folder,
)
from .exporters.layout import FORMAT, RunFacts
from .exporters.schema import Schema
from .load import facts_of, resolve
from .strategies import strategy_of

Row = dict[str, Any]


@dataclass(frozen=True)
class MergeConfig:
    """Which adapters, and what to write."""

    adapters: str
    """Export folder or Hub id of the adapters."""
    out: str
    """Folder to write; an older export there is replaced, unless it holds adapters."""
    schema: str = "plain"
    """Form of the result: plain (any base), sdar (Qwen3 without shift) or fast_dllm_v2 (Qwen2 with shift)."""
    target: str | None = None
    """The model that the adapters were trained on; by default the one that they name."""
    revision: str | None = None
    """Revision of the adapters on the Hub."""
    target_revision: str | None = None
    """Revision of the target on the Hub; by default the one that the adapters name."""
    dtype: Literal["bfloat16", "float16", "float32"] | None = None
    """Of the stored weights; null = what the adapters were trained beside."""
    strategy: str = DECODE["strategy"]
    """How to decode the result, recorded for `generate` and engines (inference/README.md)."""
    threshold: float | None = None
    """The strategy's threshold, recorded with it; null = the strategy's own, or it has none."""
    trust_remote_code: bool = False
    """Run code that comes with the target."""


def run_merge(cfg: MergeConfig) -> None:
    """The command. Raises ValueError for what cannot be merged, before weights are loaded where that can be told."""
    if cfg.schema not in SCHEMAS:
        raise ValueError(f"schema = {cfg.schema!r}: choose one of {', '.join(SCHEMAS)}")
    settings = dict(DECODE["settings"]) if cfg.strategy == DECODE["strategy"] else {}
    settings |= {} if cfg.threshold is None else {"threshold": cfg.threshold}
    if head := lacking(strategy_of(cfg.strategy, settings)):
        raise ValueError(
            f"strategy {cfg.strategy} decides by a trained head ({head}), which stays beside the adapters; record another one"
        )
    refuse_place(Path(cfg.out))
    folder = resolve(cfg.adapters, cfg.revision)
    ours = adapter_facts(cfg.adapters, folder)
    if ours.get("dual"):
        raise ValueError(
            f"{cfg.adapters}: dual adapters act on noisy rows alone, merged weights would change the clean ones too; use "
            "the adapters as they are"
        )
    dtype, base = cfg.dtype or ours.get("dtype"), ours["target"]
    if dtype is None:
        raise ValueError(f"{cfg.adapters} does not say beside which dtype it was trained: add --dtype")
    full = (ours.get("adapters") or {}).get("kind") == "full"
    target = load_target(
        cfg.target or base["name"],
        dtype="float32" if full else dtype,
        revision=cfg.target_revision or (None if cfg.target else base.get("revision")),
        trust_remote_code=cfg.trust_remote_code,
    )
    before = {name: t.detach().clone() for name, t in target.model.state_dict().items()} if full else None
    converted = load_adapters(str(folder), target)
    decode = {"strategy": cfg.strategy, "settings": settings}
    report = merge(
        converted, cfg.out, SCHEMAS[cfg.schema], source=folder, dtype=DTYPES[dtype], decode=decode, before=before
    )
    logits = report["logits"]
    print(
        f"{cfg.out}: {cfg.schema}, {dtype}; {len(report['tensors'])} tensors changed, {report['unchanged']} did not; logits of "
        f"masks differ from the adapters' by {logits['difference']:.1e} of the largest, {logits['same_top']:.1%} of the top "
        f"tokens are the same ({CHANGES})"
    )


@torch.no_grad()
def merge(
    converted: Converted,
    folder: str | Path,
    schema: Schema,
    *,
    source: Path | None = None,
    dtype: torch.dtype | None = None,
    decode: Row | None = None,
    before: Mapping[str, Tensor] | None = None,
) -> Row:
    """Write a merged model into `folder`, whole or not at all; returns the report of what changed (`merge.json`).

    `source`: the adapters' folder, whose run is recorded. `dtype`: of the stored weights, default the target's. `before`:
    the base's tensors, of fully trained weights, which are gone. Raises ValueError for what the schema cannot say, for
    `dual` adapters, infinite values, and weights that do not compute what the adapters do.
    """
    folder, adapters, objective = Path(folder), converted.adapters, converted.objective
    target, mask_id, dtype = adapters.target, adapters.needed_mask_id(), dtype or adapters.target.dtype
    refuse_place(folder)
    refuse_foreign_code(target)
    schema.refuse(target.facts, target.model.config.to_dict(), objective, mask_id)
    state = adapters.merged()
    refuse_non_finite(state, "merged weights")
    report = changes(before or base_state(target), state)
    tokenizer = with_mask_token(target.tokenizer, mask_id, schema.mask_token)
    fresh = Target(rebuilt(target, state, dtype), tokenizer, target.facts.name, target.facts.revision)
    denoiser = denoiser_of(objective, fresh, mask_id)
    report["logits"] = compare(converted, denoiser)
    refuse_other_logits(report["logits"], dtype)
    replay = make_masked_replay(in_float32(denoiser, objective))
    ours = merged_facts_of(converted, schema, decode or DECODE, source)
    report["adapters_sha256"] = ours.get("adapters_sha256")
    report |= {"base": target.facts.name, "base_fingerprint": target.facts.fingerprint}
    report |= {"schema": schema.name, "dtype": str(dtype).removeprefix("torch.")}

    def fill(place: Path) -> None:
        write_checkpoint(place, fresh, target, schema.keys(objective, mask_id), ours)
        (place / CHANGES).write_text(json.dumps(scrub_values(report), indent=1) + "\n", encoding="utf-8")
        save_tensors(place / REPLAY, replay)
        if source is not None and (source / RUN).is_file():
            shutil.copyfile(source / RUN, place / RUN)
        else:
            (place / RUN).write_text(run_yaml(RunFacts()), encoding="utf-8")
        (place / CARD).write_text(render_card(place), encoding="utf-8")

    write_folder(folder, fill)
    return report


def merged_facts_of(converted: Converted, schema: Schema, decode: Row, source: Path | None) -> Row:
    """What stands under `draftsmith` in a merged folder's config.json, but for the weights' hash."""
    objective, mask_id = converted.objective, converted.adapters.needed_mask_id()
    ours: Row = {
        "format": FORMAT,
        "kind": MERGED,
        "schema": schema.name,
        "method": "block_diffusion",
        "target": scrub_values(facts_of(converted.adapters.target.facts)),
        "objective": asdict(objective),
        "mask_id": mask_id,
        **facts_of_objective(objective),
        "decode": decode,
        "limits": list(schema.limits(mask_id, objective.block)),
    }
    if source is not None:
        trained = read_json(source / CONFIG)["draftsmith"]
        ours |= {key: trained.get(key) for key in ("method", "train_length")}
        ours["adapters_sha256"] = trained.get("sha256")
    return ours


def refuse_place(folder: Path) -> None:
    """ValueError where a merged model must not be written: over adapters (its own, say), or files that are no export."""
    refuse_foreign_folder(folder)
    ours = read_json(folder / CONFIG).get("draftsmith") if (folder / CONFIG).is_file() else None
    if isinstance(ours, dict) and ours.get("kind") == KIND:
        raise ValueError(f"{folder} holds adapters, which would be lost: name another folder for the merged model")


def compare(converted: Converted, denoiser: Any) -> Row:
    """Logits of masks, merged against the adapters at work: the largest difference as a share of the largest logit, and
    how many top tokens are the same."""
    own = converted.denoiser()
    ids_ST, _ = stored_positions(own.target, 0)
    before_RV, after_RV = masked_logits(own, ids_ST), masked_logits(denoiser, ids_ST)
    usable_V = ~own.never_V & before_RV.isfinite().all(0)
    before_RV, after_RV = before_RV[:, usable_V], after_RV[:, : len(usable_V)][:, usable_V]
    return logit_gap(before_RV, after_RV)


def with_mask_token(tokenizer: Any, mask_id: int, text: str) -> Any:
    """A copy of the tokenizer whose mask token is `mask_id`: the token that has it, or a new one called `text`.

    Raises ValueError where ids before it are free: tokenizers number their tokens without gaps.
    """
    tokenizer = copy.deepcopy(tokenizer)
    known = {i: token for token, i in tokenizer.get_vocab().items()}
    tokenizer.add_special_tokens({"mask_token": known.get(mask_id, text)})
    if tokenizer.mask_token_id != mask_id:
        raise ValueError(
            f"the mask's id is {mask_id}, the tokenizer's next free one {max(known) + 1}, and it leaves no gap: train with "
            f"adapters.mask_id={max(known) + 1}, or use the adapters as they are"
        )
    return tokenizer
