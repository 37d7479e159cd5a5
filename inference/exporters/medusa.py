"""Medusa heads as vLLM up to 0.32 loads them (0.33 removed the method; no other engine has it).

`medusa_fc_bias: true`, or the residual blocks' biases are dropped without a word. Heads with a matrix each are stored as
`lm_heads.{i}.weight` over all of V; a head shared by all is `lm_head.weight`, and only that one may be cut to a draft
vocabulary: `token_map` then holds *absolute* ids (unlike EAGLE-3's offsets), and vLLM needs a loader switch for it.
Reference: Medusa (Cai et al. 2024), vLLM 0.32 `models/medusa.py`, run.

Tests: tests/test_export.py; served by a real engine in tests/bench/engine_vllm.py.
"""

from __future__ import annotations

import json
import shlex
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from torch import Tensor

from ...models.drafter import Drafter
from .layout import Exporter, Packed, Slot, Unpacked, shape_of, vllm

if TYPE_CHECKING:
    from ...models.target import Target

PATH_WORDS = "vLLM takes eagle-, eagle3, dflash or dspark anywhere in the draft's path for its method: keep them out"
LOADER_SWITCH = {"enable_weights_track": False}


def pack(drafter: Drafter, target: Target | None) -> Packed:
    """Config and tensors of vLLM's form. ValueError for a reduced vocabulary with a matrix per head."""
    facts, shared, ids = drafter.facts, drafter.config.head == "shared", drafter.d2t_W
    if ids is not None and not shared:
        raise ValueError(
            f"Medusa with a matrix per head and a draft vocabulary of {len(ids)} of {facts.vocab} ids has no engine form; "
            "train with head: shared, or over the full vocabulary"
        )
    tensors = {name: t for name, t in drafter.state_dict().items() if name != "d2t_W"}
    if shared:
        if target is None:
            raise ValueError("Medusa heads that share the target's head carry its rows: give export the target")
        tensors["lm_head.weight"] = target.head_weight if ids is None else target.head_weight[ids.to(target.device)]
    if ids is not None:
        tensors["token_map"] = ids.detach().cpu().long()
    config: dict[str, Any] = {
        "architectures": ["MedusaModel"],
        "model_type": "medusa",
        "hidden_size": facts.width,
        "vocab_size": facts.vocab,
        "num_heads": drafter.config.heads,
        "num_hidden_layers": drafter.config.layers,
        "truncated_vocab_size": facts.vocab if ids is None else len(ids),
        "original_lm_head": shared,
        "medusa_fc_bias": True,
    }
    untrained = {"lm_head.weight": "shared: the target's own head, for these ids"} if shared else {}
    untrained |= {"token_map": "the draft vocabulary, absolute ids"} if ids is not None else {}
    return Packed(config, tensors, untrained=untrained, limits=(PATH_WORDS,))


def slots(config: Mapping[str, Any]) -> dict[str, Slot]:
    """Every tensor of the file, from config.json alone."""
    width, vocab, rows = shape_of(config, "hidden_size", "vocab_size", "truncated_vocab_size")
    heads, layers = shape_of(config, "num_heads", "num_hidden_layers")
    out: dict[str, Slot] = {}
    for i in range(heads):
        for j in range(layers):
            out[f"blocks.{i}.layers.{j}.weight"] = Slot((width, width))
            out[f"blocks.{i}.layers.{j}.bias"] = Slot((width,))
        if not config.get("original_lm_head"):
            out[f"lm_heads.{i}.weight"] = Slot((vocab, width))
    if config.get("original_lm_head"):
        out["lm_head.weight"] = Slot((rows, width))
    if rows < vocab:
        out["token_map"] = Slot((rows,), "int64")
    return out


def unpack(config: Mapping[str, Any], tensors: dict[str, Tensor]) -> Unpacked:
    """The drafter's own state: the same names, without the map."""
    ids = tensors.get("token_map")
    if ids is not None and (bool((ids.diff() <= 0).any()) or int(ids[0]) < 0 or int(ids[-1]) >= config["vocab_size"]):
        raise ValueError(f"token_map must ascend within 0..{config['vocab_size'] - 1}; export the head again")
    state = {name: t for name, t in tensors.items() if name.startswith(("blocks.", "lm_heads."))}
    return Unpacked(state, ids, tensors.get("lm_head.weight"))


def serve(config: Mapping[str, Any], target: str, draft: str, k: int) -> dict[str, str]:
    """Command line of vLLM up to 0.32; a `token_map` needs the loader's completeness check switched off."""
    tokens = min(k, config["num_heads"])
    line = vllm(target, {"method": "medusa", "model": draft, "num_speculative_tokens": tokens})
    if config["truncated_vocab_size"] < config["vocab_size"]:
        line += f" --model-loader-extra-config {shlex.quote(json.dumps(LOADER_SWITCH))}"
    return {"vLLM 0.32 or older": line}


EXPORTER = Exporter(
    method="medusa",
    form="vLLM's Medusa form (`MedusaModel`)",
    loads="draftsmith, vLLM 0.32 and older (run with 0.32; 0.33 removed Medusa)",
    pack=pack,
    slots=slots,
    unpack=unpack,
    serve=serve,
)
