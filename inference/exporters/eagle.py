"""EAGLE-1 (and HASS) as vLLM loads it; SGLang reads the same tensors under another architecture name.

`fc` is trained without a bias. The file carries `fc.bias` as zeros, because SGLang's module has one and would leave it
random, and vLLM drops it (converted heads may have a trained one; the card then says so). The target's head, its embeddings, a final norm and the first layer's input norm must not be
in the file (vLLM raises on them). The form has no draft vocabulary: engines draft over all of V with the target's head,
so a reduced one is our own fact (`draftsmith.draft_ids`) and speeds up our runtime only.
Reference: EAGLE (Li et al. 2024), vLLM 0.32 `models/llama_eagle.py`, run.

Tests: tests/test_export.py; served by a real engine in tests/bench/engine_vllm.py.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ...models.drafter import Drafter
from .layout import (
    Exporter,
    Packed,
    Slot,
    Unpacked,
    attention_slots,
    engine_limits,
    mlp_slots,
    rope_keys,
    sglang,
    shape_of,
    vllm,
)

if TYPE_CHECKING:
    from ...models.target import Target

LAYER = "layers.0"


def pack(drafter: Drafter, target: Target | None) -> Packed:
    """Config and tensors of vLLM's form."""
    facts, state = drafter.facts, drafter.state_dict()
    config: dict[str, Any] = {
        "architectures": ["EagleLlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": facts.width,
        "intermediate_size": state[f"{LAYER}.mlp.gate_proj.weight"].shape[0],
        "num_attention_heads": drafter.config.heads or facts.heads,
        "num_key_value_heads": drafter.config.kv_heads or facts.kv_heads,
        "head_dim": facts.head_dim,
        "num_hidden_layers": 1,
        "rms_norm_eps": facts.norm_eps,
        "hidden_act": facts.activation,
        "vocab_size": facts.vocab,
        "tie_word_embeddings": False,
        "max_position_embeddings": facts.max_positions,
        **rope_keys(facts),
        "attention_bias": False,
    }
    tensors = {name: t for name, t in state.items() if name != "d2t_W"}
    tensors.setdefault("fc.bias", torch.zeros(facts.width))
    absent = {
        "embed_tokens.weight": "shared: the target's embeddings, frozen in training",
        "lm_head.weight": "shared: the target's head, frozen in training",
        f"{LAYER}.input_layernorm.weight": "not part of the method",
        "norm.weight": "not part of the method",
    }
    limits = engine_limits(facts)
    if drafter.config.bias:
        limits += ("vLLM drops the trained fc.bias and drafts worse for it; SGLang keeps it",)
    if drafter.d2t_W is not None:
        limits += (f"engines draft over all {facts.vocab} ids, not the {len(drafter.d2t_W)} it was trained on",)
    untrained = {} if drafter.config.bias else {"fc.bias": "zeros, for SGLang, whose module has one"}
    return Packed(config, tensors, absent, untrained, limits)


def slots(config: Mapping[str, Any]) -> dict[str, Slot]:
    """Every tensor of the file, from config.json alone."""
    width, inner = shape_of(config, "hidden_size", "intermediate_size")
    heads, kv_heads, head_dim = shape_of(config, "num_attention_heads", "num_key_value_heads", "head_dim")
    return {
        "fc.weight": Slot((width, 2 * width)),
        "fc.bias": Slot((width,)),
        **attention_slots(f"{LAYER}.self_attn", width, width, heads, kv_heads, head_dim),
        **mlp_slots(f"{LAYER}.mlp", width, inner),
        f"{LAYER}.post_attention_layernorm.weight": Slot((width,)),
    }


def unpack(config: Mapping[str, Any], tensors: dict[str, Tensor]) -> Unpacked:
    """The drafter's own state; the bias is only there where the head was trained with one."""
    biased = bool(config["draftsmith"]["config"].get("bias"))
    if not biased and bool(tensors["fc.bias"].any()):
        raise ValueError("fc.bias is not zero, but the head was trained without one; export it again")
    ids = config["draftsmith"].get("draft_ids")
    state = {name: t for name, t in tensors.items() if biased or name != "fc.bias"}
    return Unpacked(state, None if ids is None else torch.tensor(ids, dtype=torch.int64))


def serve(config: Mapping[str, Any], target: str, draft: str, k: int) -> dict[str, str]:
    """Command lines. SGLang wants `architectures: ["LlamaForCausalLMEagle"]` in a copy of config.json."""
    return {
        "vLLM": vllm(target, {"method": "eagle", "model": draft, "num_speculative_tokens": k}),
        'SGLang, in a copy whose config.json says `"architectures": ["LlamaForCausalLMEagle"]`': sglang(
            target, draft, "EAGLE", k + 1, steps=k
        ),
    }


EXPORTER = Exporter(
    method="eagle",
    form="vLLM's EAGLE-1 form (`EagleLlamaForCausalLM`)",
    loads="draftsmith, vLLM (run with 0.32), SGLang after one edit (by its documentation)",
    pack=pack,
    slots=slots,
    unpack=unpack,
    serve=serve,
)
