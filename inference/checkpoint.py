"""Ordinary checkpoints of trained weights: what `merge` and the exports of consistency models write alike.

A model is built anew from a target's architecture and a state, saved as transformers saves it (one file of weights, whose
hash is recorded), without paths of this machine and without code, our facts under the one key `draftsmith`.

Test: pytest tests/test_merge.py tests/test_consistency_folder.py
"""

from __future__ import annotations

import copy
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from ..models.loading import quiet
from ..models.target import Target
from .exporters.draft_model import spelled
from .exporters.folder import CONFIG, WEIGHTS, read_json, sha256_of

Row = dict[str, Any]
CHANGES = "merge.json"
GENERATION = "generation_config.json"
TOLERANCE = 1e-4  # of the largest logit, in float32: another order of sums
# Of the base's JSON files: where it lay, and code that is not here.
LEFT_OUT = ("name_or_path", "_name_or_path", "auto_map")


def write_checkpoint(place: Path, target: Target, base: Target, said: Row, ours: Row) -> None:
    """Weights, tokenizer, config.json and generation_config.json of `target` into `place`.

    `base`: whose generation settings and ending ids are kept. `said`: further keys of config.json; `ours`: what stands
    under `draftsmith`, beside the weights' hash.
    """
    with quiet():
        target.model.save_pretrained(place, max_shard_size="1000GB")  # one file, which is what its hash speaks of
        target.tokenizer.save_pretrained(place)
    eos = list(base.facts.eos_ids)
    said = said | {"eos_token_id": eos[0] if len(eos) == 1 else eos or None}
    said |= {"torch_dtype": str(target.dtype).removeprefix("torch.")}
    config, tokens = place / CONFIG, place / "tokenizer_config.json"
    raw = read_json(config)
    write_json(config, raw | spelled(raw) | said | {"draftsmith": ours | {"sha256": sha256_of(place / WEIGHTS)}})
    write_json(tokens, read_json(tokens))
    if (generation := getattr(base.model, "generation_config", None)) is not None:
        (place / GENERATION).write_text(generation.to_json_string(), encoding="utf-8")


def write_json(file: Path, facts: Row) -> None:
    """A JSON file of the base's, without where it lay and without code that is not here."""
    kept = {key: value for key, value in facts.items() if key not in LEFT_OUT}
    file.write_text(json.dumps(kept, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def refuse_foreign_code(target: Target) -> None:
    """ValueError for a base that runs by code of its own: exports hold none, so that what is written could not be read."""
    for part in (target.model, target.tokenizer):
        if type(part).__module__.startswith("transformers_modules"):
            raise ValueError(
                f"{target.facts.name} runs by code of its own ({type(part).__name__}), which is not written into exports; use "
                "the adapters as they are"
            )


def base_state(target: Target) -> dict[str, Tensor]:
    """The tensors of a target without its adapters, under the names of the model alone."""
    return {n.replace(".base_layer.", "."): t for n, t in target.model.state_dict().items() if ".lora_" not in n}


def changes(before: Mapping[str, Tensor], after: Mapping[str, Tensor]) -> Row:
    """Per changed tensor: the norm of the change over the tensor's own, the largest change of a number, rows added."""
    tensors: dict[str, Row] = {}
    for name, new in after.items():
        old = before[name]
        change = new[: len(old)].double() - old.double()
        added = len(new) - len(old)
        if added or bool(change.any()):
            norm = float(old.double().norm())
            row = {"relative": float(change.norm()) / norm if norm else None, "largest": float(change.abs().max())}
            tensors[name] = row | ({"rows_added": added} if added else {})
    return {"tensors": tensors, "unchanged": len(after) - len(tensors)}


def logit_gap(before_RV: Tensor, after_RV: Tensor) -> Row:
    """Two ways to the same logits: the largest difference as a share of the largest logit, and how many top tokens are
    the same."""
    gap, largest = float((before_RV - after_RV).abs().max()), float(before_RV.abs().max())
    same = (before_RV.argmax(-1) == after_RV.argmax(-1)).float().mean()
    return {"difference": gap / largest if largest else gap, "largest_logit": largest, "same_top": float(same)}


def refuse_other_logits(found: Row, dtype: torch.dtype) -> None:
    """ValueError for weights in float32 that do not compute what the adapters at work do (`logit_gap`); half types round."""
    if dtype in (torch.float32, torch.float64) and not found["difference"] <= TOLERANCE:
        raise ValueError(
            f"merged weights do not compute what the adapters do: logits differ by {found['difference']:.1e} of the "
            f"largest (allowed {TOLERANCE:g}); use the adapters as they are, and report this"
        )


def rebuilt(target: Target, state: Mapping[str, Tensor], dtype: torch.dtype, *, untie: bool = False) -> Any:
    """The base's model with other weights, and as many rows of embedding and head as these have. `untie`: with a head of
    its own, where the base's is its embedding."""
    config = copy.deepcopy(target.model.config)
    (embed,) = (n for n, m in target.model.named_modules() if m is target.model.get_input_embeddings())
    config.vocab_size = len(state[f"{embed}.weight"])
    if untie:
        config.tie_word_embeddings = False
    with quiet():
        model = AutoModelForCausalLM.from_config(config, dtype=dtype)
    stored = {name: t.to(dtype) if t.is_floating_point() else t for name, t in state.items()}
    if lost := [name for name, t in stored.items() if not bool(t.isfinite().all())]:
        raise ValueError(f"merged weights overflow in {dtype} ({', '.join(lost[:4])}): add --dtype bfloat16 or float32")
    model.load_state_dict(stored)
    return model.to(target.device).eval()
