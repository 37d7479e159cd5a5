"""P-EAGLE as engines load it: the flat EAGLE-3 form with several layers, `mask_hidden` and a mask token.

    target_id = i + d2t[i]                          as in eagle3.py, and so are the taps' two keys
    mask_hidden [1, 1, P * D]                       what a slot has in place of the taps, before `fc`
    embed_tokens.weight [V, D], row mask_token_id   what a slot has in place of a token

The architecture stays `LlamaForCausalLMEagle3`: vLLM knows P-EAGLE by method eagle3 with `parallel_drafting`, which no
key of the file sets, so that the command line must. Its first layer reads (embedding, feature), the later ones are plain
layers in whose `hidden_norm` nothing flows. The table is the target's but for the mask's row; engines need it whole.
Reference: vLLM 0.32 `models/llama_eagle3.py`, `v1/spec_decode/llm_base_proposer.py`.

Tests: tests/test_export.py, tests/test_check.py.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ...models.drafter import Drafter
from .eagle3 import draft_ids_of, draft_maps, engine_taps
from .layout import (
    Exporter,
    Packed,
    Slot,
    Unpacked,
    attention_slots,
    engine_limits,
    mlp_slots,
    rope_keys,
    shape_of,
    vllm,
)

if TYPE_CHECKING:
    from ...models.target import Target

OPTIONS = ("fc_norm", "norm_before_fc", "norm_before_residual")


def pack(drafter: Drafter, target: Target | None) -> Packed:
    """Config and tensors in the flat form. ValueError for a drafter that is bound to no target."""
    facts, taps, options = drafter.facts, tuple(drafter.taps), drafter.config
    state = {name: t for name, t in drafter.state_dict().items() if name != "d2t_W"}
    mask_id, mask_embed = int(state.pop("mask_id")), state.pop("mask_embed")
    with torch.no_grad():
        ids_V = torch.arange(facts.vocab, device=mask_embed.device)
        table_VD = drafter.target_embed(ids_V).detach().to(mask_embed.dtype).clone()  # type: ignore[attr-defined]
    table_VD[mask_id] = mask_embed
    config: dict[str, Any] = {
        "architectures": ["LlamaForCausalLMEagle3"],
        "model_type": "llama",
        "hidden_size": facts.width,
        "intermediate_size": state["layers.0.mlp.gate_proj.weight"].shape[0],
        "num_attention_heads": options.heads or facts.heads,
        "num_key_value_heads": options.kv_heads or facts.kv_heads,
        "head_dim": facts.head_dim,
        "num_hidden_layers": options.layers,
        "rms_norm_eps": facts.norm_eps,
        "hidden_act": facts.activation,
        "vocab_size": facts.vocab,
        "draft_vocab_size": state["lm_head.weight"].shape[0],
        "tie_word_embeddings": False,
        "max_position_embeddings": facts.max_positions,
        **rope_keys(facts),
        "attention_bias": False,
        "mask_token_id": mask_id,
    }
    config |= {name: True for name in OPTIONS if getattr(options, name)}
    if taps != engine_taps(facts.layers):
        config["eagle_aux_hidden_state_layer_ids"] = list(taps)
        config["eagle_config"] = {"eagle_aux_hidden_state_layer_ids": [k - 1 for k in taps]}
    if len(taps) != 3:
        config["num_aux_hidden_states"] = len(taps)
    maps = {} if drafter.d2t_W is None else draft_maps(drafter.d2t_W, facts.vocab)
    table = {"embed_tokens.weight": table_VD}
    untrained = dict.fromkeys(maps, "the draft vocabulary") | {
        "embed_tokens.weight": f"the target's embeddings, but row {mask_id}, which is trained"
    }
    absent = {"mask_id": "mask_token_id of config.json", "mask_embed": f"row {mask_id} of embed_tokens.weight"}
    absent |= {f"layers.{i}.hidden_norm.weight": "idle: only layer 0 reads it" for i in range(1, options.layers)}
    return Packed(config, state | table | maps, absent, untrained, engine_limits(facts))


def slots(config: Mapping[str, Any]) -> dict[str, Slot]:
    """Every tensor of the file, from config.json alone."""
    width, inner, vocab, rows = shape_of(config, "hidden_size", "intermediate_size", "vocab_size", "draft_vocab_size")
    heads, kv_heads, head_dim = shape_of(config, "num_attention_heads", "num_key_value_heads", "head_dim")
    taps, layers = shape_of({"num_aux_hidden_states": 3, **config}, "num_aux_hidden_states", "num_hidden_layers")
    mask_id = config.get("mask_token_id")
    if not isinstance(mask_id, int) or isinstance(mask_id, bool) or not 0 <= mask_id < vocab:
        raise ValueError(f"config.json: mask_token_id is {mask_id!r}, needed: a token id below {vocab}")
    out = {
        "fc.weight": Slot((width, taps * width)),
        "mask_hidden": Slot((1, 1, taps * width)),
        "embed_tokens.weight": Slot((vocab, width)),
        "layers.0.hidden_norm.weight": Slot((width,)),
        "norm.weight": Slot((width,)),
        "lm_head.weight": Slot((rows, width)),
    }
    for i in range(layers):
        out |= attention_slots(f"layers.{i}.self_attn", width if i else 2 * width, width, heads, kv_heads, head_dim)
        out |= mlp_slots(f"layers.{i}.mlp", width, inner)
        out |= {f"layers.{i}.{n}.weight": Slot((width,)) for n in ("input_layernorm", "post_attention_layernorm")}
    if config.get("norm_before_fc"):
        out["input_norm.weight"] = Slot((taps * width,))
    if config.get("fc_norm"):
        out |= {f"fc_norm.{i}.weight": Slot((width,)) for i in range(taps)}
    if rows < vocab:
        out |= {"d2t": Slot((rows,), "int64"), "t2d": Slot((vocab,), "bool")}
    return out


def unpack(config: Mapping[str, Any], tensors: dict[str, Tensor]) -> Unpacked:
    """The drafter's own state: the same names without the two maps, the mask's row of the table by itself."""
    state = {name: t for name, t in tensors.items() if name not in ("d2t", "t2d", "embed_tokens.weight")}
    table_VD, mask_id = tensors["embed_tokens.weight"], config["mask_token_id"]
    state |= {"mask_id": torch.tensor(mask_id), "mask_embed": table_VD[mask_id]}
    return Unpacked(state, draft_ids_of(tensors, config["vocab_size"]), target_embed=table_VD, own_rows=(mask_id,))


def serve(config: Mapping[str, Any], target: str, draft: str, k: int) -> dict[str, str]:
    """Command line; without `parallel_drafting` vLLM would run the head as a chain, and accept next to nothing."""
    speculative = {"method": "eagle3", "model": draft, "num_speculative_tokens": k, "parallel_drafting": True}
    return {"vLLM": vllm(target, speculative)}


EXPORTER = Exporter(
    method="peagle",
    form="the flat EAGLE-3 form (`LlamaForCausalLMEagle3`) with `mask_hidden`",
    loads="draftsmith, vLLM (the form was run with 0.32)",
    pack=pack,
    slots=slots,
    unpack=unpack,
    serve=serve,
)
