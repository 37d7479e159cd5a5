"""DFlash as serving engines load it: z-lab's flat form, `DFlashDraftModel` over a Qwen3 configuration.

Layer ids: `dflash_config.target_layer_ids` count the layer whose *output* is read, so h[k] is written as k - 1 (vLLM and
SGLang add the one); h[0], the embeddings, has no such id and is refused. Embeddings and head are the target's and not
in the file; with a draft vocabulary vLLM needs the head's rows (`lm_head`) and `d2t`, while SGLang drafts over all ids
and cannot take one. Full attention layers are bidirectional inside a block unless `dflash_config.causal` says otherwise
(JetSpec mode). `mask_hidden` must not be there. Reference: vLLM 0.32 `models/qwen3_dflash.py`, run on CPU: the same
accepted counts as our runtime once it repeats a fault of that build, which norms the context's keys of all layers by the
first layer's weights (`tests/bench/engine_vllm.py`).

Tests: tests/test_export.py.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ...models.drafter import Drafter
from .eagle3 import draft_ids_of, draft_maps
from .layout import (
    Exporter,
    Packed,
    Slot,
    Unpacked,
    attention_slots,
    engine_limits,
    measure,
    mlp_slots,
    rope_keys,
    sglang,
    shape_of,
    vllm,
)

if TYPE_CHECKING:
    from ...models.target import Target

ABSENT = {
    "embed_tokens.weight": "shared: the target's embeddings, frozen in training",
    "mask_id": "mask_token_id of config.json",
}


def pack(drafter: Drafter, target: Target | None) -> Packed:
    """Config and tensors of z-lab's form. ValueError for what the form can't express."""
    config = block_config(drafter) | {"architectures": ["DFlashDraftModel"]}
    config["dflash_config"] = block_facts(drafter)
    limits = block_limits(drafter)
    if drafter.config.layers > 1:
        limits += ("vLLM 0.32's CPU build norms the context's keys of all layers as those of the first",)
    if drafter.config.sample_from_anchor:
        limits += (
            "vLLM's dflash method lets the anchor's slot predict nothing: its second runner refuses this one, its first "
            "would draft wrongly (by its source)",
        )
    return Packed(config, *block_tensors(drafter, target), limits)


def block_config(drafter: Drafter) -> dict[str, Any]:
    """The Qwen3 configuration of a block drafter's backbone."""
    facts, options = drafter.facts, drafter.config
    config = {
        "model_type": "qwen3",
        "hidden_size": facts.width,
        "intermediate_size": options.intermediate or facts.intermediate,
        "num_attention_heads": options.heads or facts.heads,
        "num_key_value_heads": options.kv_heads or facts.kv_heads,
        "head_dim": facts.head_dim,
        "num_hidden_layers": options.layers,
        "layer_types": ["full_attention"] * options.layers,
        "use_sliding_window": False,
        "rms_norm_eps": facts.norm_eps,
        "hidden_act": facts.activation,
        "vocab_size": facts.vocab,
        "tie_word_embeddings": False,
        "max_position_embeddings": facts.max_positions,
        **rope_keys(facts),
        "attention_bias": False,
        "num_target_layers": facts.layers,
        "block_size": options.block,
    }
    return config if drafter.d2t_W is None else config | {"draft_vocab_size": len(drafter.d2t_W)}


def block_facts(drafter: Drafter) -> dict[str, Any]:
    """The keys of `dflash_config`. ValueError for the embeddings as a tap."""
    options, mask_id = drafter.config, int(drafter.mask_id)  # type: ignore[attr-defined]
    if drafter.taps[0] == 0:
        raise ValueError(
            f"taps {list(drafter.taps)}: engines count the layer whose output is read, and h[0], the embeddings, is no "
            "layer's; train with taps from 1 on"
        )
    if mask_id < 0:
        raise ValueError(f"{drafter.method}: no mask id was chosen; call init_from_target first")
    facts: dict[str, Any] = {
        "mask_token_id": mask_id,
        "target_layer_ids": [k - 1 for k in drafter.taps],
        "block_size": options.block,
    }
    if options.causal:
        facts["causal"] = True
    if options.sample_from_anchor:
        facts["sample_from_anchor"] = True
    return facts


def block_limits(drafter: Drafter) -> tuple[str, ...]:
    """What engines do otherwise than we do."""
    facts, limits = drafter.facts, engine_limits(drafter.facts)
    if drafter.taps[-1] == facts.layers:
        limits += (f"vLLM reads states that enter a layer, and h[{facts.layers}] enters none",)
    if drafter.d2t_W is not None:
        limits += ("SGLang drafts over all ids with the target's head and has no draft vocabulary",)
    if drafter.config.causal:
        limits += ("an engine that ignores `causal` accepts next to nothing beyond the first token",)
    return limits


def block_tensors(drafter: Drafter, target: Target | None) -> tuple[dict[str, Tensor], dict[str, str], dict[str, str]]:
    """Tensors, those absent, and those not trained. With a draft vocabulary the target's head rows go with them."""
    tensors = {name: t for name, t in drafter.state_dict().items() if name not in ("d2t_W", "mask_id")}
    if drafter.d2t_W is None:
        return tensors, ABSENT | {"lm_head.weight": "shared: the target's head, frozen in training"}, {}
    if target is None:
        raise ValueError(
            f"{drafter.method} with a draft vocabulary carries the target's head rows: give export the target"
        )
    maps = draft_maps(drafter.d2t_W, drafter.facts.vocab)
    tensors["lm_head.weight"] = target.head_weight[drafter.d2t_W.to(target.device)]
    untrained = dict.fromkeys(maps, "the draft vocabulary")
    return tensors | maps, ABSENT, untrained | {"lm_head.weight": "the target's own head, for these ids"}


def slots(config: Mapping[str, Any]) -> dict[str, Slot]:
    """Every tensor of the file, from config.json alone."""
    width, inner, vocab, layers = shape_of(
        config, "hidden_size", "intermediate_size", "vocab_size", "num_hidden_layers"
    )
    heads, kv_heads, head_dim = shape_of(config, "num_attention_heads", "num_key_value_heads", "head_dim")
    ids = (config.get("dflash_config") or {}).get("target_layer_ids")
    if not isinstance(ids, list) or not ids:
        raise ValueError(f"config.json: dflash_config.target_layer_ids is {ids!r}, needed: a list of layer ids")
    out = {"fc.weight": Slot((width, len(ids) * width))}
    out |= {f"{name}.weight": Slot((width,)) for name in ("hidden_norm", "norm")}
    for i in range(layers):
        out |= attention_slots(f"layers.{i}.self_attn", width, width, heads, kv_heads, head_dim)
        out |= {f"layers.{i}.self_attn.{name}.weight": Slot((head_dim,)) for name in ("q_norm", "k_norm")}
        out |= mlp_slots(f"layers.{i}.mlp", width, inner)
        out |= {f"layers.{i}.{n}.weight": Slot((width,)) for n in ("input_layernorm", "post_attention_layernorm")}
    if "draft_vocab_size" in config:
        (rows,) = shape_of(config, "draft_vocab_size")
        out |= {"lm_head.weight": Slot((rows, width)), "d2t": Slot((rows,), "int64"), "t2d": Slot((vocab,), "bool")}
    return out


def unpack(config: Mapping[str, Any], tensors: dict[str, Tensor]) -> Unpacked:
    """The drafter's own state: the same names, the mask id from config.json."""
    state = {name: t for name, t in tensors.items() if name not in ("d2t", "t2d", "lm_head.weight")}
    mask_id = config["dflash_config"].get("mask_token_id")
    if not isinstance(mask_id, int) or not 0 <= mask_id < config["vocab_size"]:
        raise ValueError(f"config.json: dflash_config.mask_token_id is {mask_id!r}, needed: an id of the target")
    state["mask_id"] = torch.tensor(mask_id)
    return Unpacked(state, draft_ids_of(tensors, config["vocab_size"]), tensors.get("lm_head.weight"))


def serve(config: Mapping[str, Any], target: str, draft: str, k: int) -> dict[str, str]:
    """Command lines; engines draft one token less than a block has slots, and have no form for an anchor that predicts."""
    options = config["draftsmith"]["config"]
    if options["sample_from_anchor"]:
        return {
            "No serving engine is known to draft from the anchor's slot of this form; measure it with": measure(draft)
        }
    tokens = min(k, options["block"] - 1)
    lines = {"vLLM": vllm(target, {"method": "dflash", "model": draft, "num_speculative_tokens": tokens})}
    if "draft_vocab_size" not in config:
        lines["SGLang"] = sglang(target, draft, "DFLASH", options["block"])
    return lines


EXPORTER = Exporter(
    method="dflash",
    form="z-lab's DFlash form (`DFlashDraftModel`)",
    loads="draftsmith, vLLM (the form was run with 0.32), SGLang over the full vocabulary (by its documentation)",
    pack=pack,
    slots=slots,
    unpack=unpack,
    serve=serve,
)
