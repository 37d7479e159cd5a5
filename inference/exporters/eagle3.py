"""EAGLE-3 as both serving engines load it: the flat form with `LlamaForCausalLMEagle3`.

Taps are ascending, as the engine orders features by depth. The default triple h[2], h[L//2], h[L-3] of targets with at
least 7 layers needs no key; any other set is written twice, because the engines count from different ends of a layer:
top-level `eagle_aux_hidden_state_layer_ids` k means h[k] (vLLM), the nested one k - 1 means h[k] (SGLang). The number
of taps is written when it is not three: vLLM takes the width of `fc` from it. `bias` is never written (vLLM would build
uninitialised attention biases), `attention_bias` always is. Reference: vLLM 0.32 `models/llama_eagle3.py`, run.

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

OPTIONS = ("fc_norm", "norm_output", "norm_before_fc", "norm_before_residual")


def engine_taps(layers: int) -> tuple[int, int, int] | None:
    """What both engines take when no key names taps; None for targets so small that the triple degenerates."""
    return (2, layers // 2, layers - 3) if layers >= 7 else None


def pack(drafter: Drafter, target: Target | None) -> Packed:
    """Config and tensors in the flat form. ValueError for what the form can't express."""
    facts, taps, options = drafter.facts, tuple(drafter.taps), drafter.config
    state = {name: t for name, t in drafter.state_dict().items() if name != "d2t_W"}
    if list(taps) != sorted(set(taps)) or not taps:
        raise ValueError(
            f"taps {list(taps)}: engines order features by depth, so taps must ascend; train with them sorted"
        )
    config: dict[str, Any] = {
        "architectures": ["LlamaForCausalLMEagle3"],
        "model_type": "llama",
        "hidden_size": facts.width,
        "intermediate_size": state["midlayer.mlp.gate_proj.weight"].shape[0],
        "num_attention_heads": options.heads or facts.heads,
        "num_key_value_heads": options.kv_heads or facts.kv_heads,
        "head_dim": facts.head_dim,
        "num_hidden_layers": 1,
        "rms_norm_eps": facts.norm_eps,
        "hidden_act": facts.activation,
        "vocab_size": facts.vocab,
        "draft_vocab_size": state["lm_head.weight"].shape[0],
        "tie_word_embeddings": False,
        "max_position_embeddings": facts.max_positions,
        **rope_keys(facts),
        "attention_bias": False,
    }
    config |= {name: True for name in OPTIONS if getattr(options, name)}
    if taps != engine_taps(facts.layers):
        config["eagle_aux_hidden_state_layer_ids"] = list(taps)
        config["eagle_config"] = {"eagle_aux_hidden_state_layer_ids": [k - 1 for k in taps]}
    if len(taps) != 3:
        config["num_aux_hidden_states"] = len(taps)
    limits = engine_limits(facts)
    if options.norm_before_residual:
        limits += ("SGLang ignores norm_before_residual and would run this head wrongly",)
    maps = {} if drafter.d2t_W is None else draft_maps(drafter.d2t_W, facts.vocab)
    absent = {"embed_tokens.weight": "shared: the target's embeddings, frozen in training"}
    return Packed(config, state | maps, absent, dict.fromkeys(maps, "the draft vocabulary"), limits)


def draft_maps(draft_ids_W: Tensor, vocab: int) -> dict[str, Tensor]:
    """`d2t`: int64 offsets, target id = i + d2t[i]; `t2d`: bool over the target's vocabulary."""
    ids = draft_ids_W.detach().cpu().long()
    if ids.ndim != 1 or not len(ids) or int(ids.min()) < 0 or int(ids.max()) >= vocab or bool((ids.diff() <= 0).any()):
        raise ValueError(f"draft ids must ascend within 0..{vocab - 1} without repeats; rebuild the draft vocabulary")
    t2d = torch.zeros(vocab, dtype=torch.bool)
    t2d[ids] = True
    return {"d2t": ids - torch.arange(len(ids)), "t2d": t2d}


def draft_ids_of(tensors: Mapping[str, Tensor], vocab: int) -> Tensor | None:
    """Absolute draft ids of a file, checked against `t2d`; None when the file maps nothing (W = V)."""
    if "d2t" not in tensors:
        return None
    ids = tensors["d2t"].long() + torch.arange(len(tensors["d2t"]))
    maps = draft_maps(ids, vocab)
    if "t2d" in tensors and not torch.equal(maps["t2d"], tensors["t2d"].bool()):
        raise ValueError("d2t and t2d name different draft ids; export the head again")
    return ids


def slots(config: Mapping[str, Any]) -> dict[str, Slot]:
    """Every tensor of the file, from config.json alone."""
    width, inner, vocab, rows = shape_of(config, "hidden_size", "intermediate_size", "vocab_size", "draft_vocab_size")
    heads, kv_heads, head_dim = shape_of(config, "num_attention_heads", "num_key_value_heads", "head_dim")
    (taps,) = shape_of({"num_aux_hidden_states": 3, **config}, "num_aux_hidden_states")
    out = {
        "fc.weight": Slot((width, taps * width)),
        **attention_slots("midlayer.self_attn", 2 * width, width, heads, kv_heads, head_dim),
        **mlp_slots("midlayer.mlp", width, inner),
        **{
            f"midlayer.{n}.weight": Slot((width,))
            for n in ("hidden_norm", "input_layernorm", "post_attention_layernorm")
        },
        "norm.weight": Slot((width,)),
        "lm_head.weight": Slot((rows, width)),
    }
    if config.get("norm_before_fc"):
        out["input_norm.weight"] = Slot((taps * width,))
    if config.get("fc_norm"):
        out |= {f"fc_norm.{i}.weight": Slot((width,)) for i in range(taps)}
    if rows < vocab:
        out |= {"d2t": Slot((rows,), "int64"), "t2d": Slot((vocab,), "bool")}
    return out


def unpack(config: Mapping[str, Any], tensors: dict[str, Tensor]) -> Unpacked:
    """The drafter's own state: the same names, without the two maps."""
    state = {name: t for name, t in tensors.items() if name not in ("d2t", "t2d")}
    return Unpacked(state, draft_ids_of(tensors, config["vocab_size"]))


def serve(config: Mapping[str, Any], target: str, draft: str, k: int) -> dict[str, str]:
    """Command lines; the full speculative configuration, since engines infer neither method nor K from the folder."""
    return {
        "vLLM": vllm(target, {"method": "eagle3", "model": draft, "num_speculative_tokens": k}),
        "SGLang": sglang(target, draft, "EAGLE3", k + 1, steps=k),
    }


EXPORTER = Exporter(
    method="eagle3",
    form="the flat EAGLE-3 form (`LlamaForCausalLMEagle3`)",
    loads="draftsmith, vLLM (run with 0.32), SGLang (by its documentation)",
    pack=pack,
    slots=slots,
    unpack=unpack,
    serve=serve,
)
