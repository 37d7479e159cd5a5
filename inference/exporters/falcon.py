"""Falcon in a form of our own: no serving engine loads it, `draftsmith generate` and `evaluate` do.

`config.json` (`architectures: ["DraftsmithFalcon"]`): the sizes of a Llama layer, RoPE, and `falcon_block`, tokens per
pass. Tensors, for width D:

| name | shape | |
|---|---|---|
| `lstm.{0,1}.input.weight`, `.bias` | [4 D, 2 D or D], [4 D] | gates in, forget, cell, out; layer 0 reads (feature, embedding) |
| `lstm.{0,1}.recurrent.weight` | [4 D, D] | |
| `self_attn.{q,k,v,o}_proj.weight` | as in Llama | over the LSTMs' outputs, without a norm |
| `post_attention_layernorm.weight`, `mlp.*` | as in Llama | |
| `d2t`, `t2d` | int64 [W], bool [V] | W < V only: offsets as in EAGLE-3, and membership |

Tests: tests/test_export.py.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from torch import Tensor

from ...models.drafter import Drafter
from .eagle3 import draft_ids_of, draft_maps
from .layout import Exporter, Packed, Slot, Unpacked, attention_slots, measure, mlp_slots, rope_keys, shape_of

if TYPE_CHECKING:
    from ...models.target import Target


def pack(drafter: Drafter, target: Target | None) -> Packed:
    """Config and tensors of our form."""
    facts, options = drafter.facts, drafter.config
    tensors = {name: t for name, t in drafter.state_dict().items() if name != "d2t_W"}
    config: dict[str, Any] = {
        "architectures": ["DraftsmithFalcon"],
        "model_type": "falcon_drafter",
        "hidden_size": facts.width,
        "intermediate_size": tensors["mlp.gate_proj.weight"].shape[0],
        "num_attention_heads": options.heads or facts.heads,
        "num_key_value_heads": options.kv_heads or facts.kv_heads,
        "head_dim": facts.head_dim,
        "rms_norm_eps": facts.norm_eps,
        "hidden_act": facts.activation,
        "vocab_size": facts.vocab,
        "draft_vocab_size": facts.vocab if drafter.d2t_W is None else len(drafter.d2t_W),
        "tie_word_embeddings": False,
        "max_position_embeddings": facts.max_positions,
        **rope_keys(facts),
        "falcon_block": options.block,
    }
    maps = {} if drafter.d2t_W is None else draft_maps(drafter.d2t_W, facts.vocab)
    absent = {
        "embed_tokens.weight": "shared: the target's embeddings, frozen in training",
        "lm_head.weight": "shared: the target's head, frozen in training",
    }
    return Packed(config, tensors | maps, absent, dict.fromkeys(maps, "the draft vocabulary"))


def slots(config: Mapping[str, Any]) -> dict[str, Slot]:
    """Every tensor of the file, from config.json alone."""
    width, inner, vocab, rows = shape_of(config, "hidden_size", "intermediate_size", "vocab_size", "draft_vocab_size")
    heads, kv_heads, head_dim = shape_of(config, "num_attention_heads", "num_key_value_heads", "head_dim")
    out = {
        **attention_slots("self_attn", width, width, heads, kv_heads, head_dim),
        **mlp_slots("mlp", width, inner),
        "post_attention_layernorm.weight": Slot((width,)),
    }
    for i, width_in in enumerate((2 * width, width)):
        out[f"lstm.{i}.input.weight"] = Slot((4 * width, width_in))
        out[f"lstm.{i}.input.bias"] = Slot((4 * width,))
        out[f"lstm.{i}.recurrent.weight"] = Slot((4 * width, width))
    if rows < vocab:
        out |= {"d2t": Slot((rows,), "int64"), "t2d": Slot((vocab,), "bool")}
    return out


def unpack(config: Mapping[str, Any], tensors: dict[str, Tensor]) -> Unpacked:
    """The drafter's own state: the same names, without the two maps."""
    state = {name: t for name, t in tensors.items() if name not in ("d2t", "t2d")}
    return Unpacked(state, draft_ids_of(tensors, config["vocab_size"]))


def serve(config: Mapping[str, Any], target: str, draft: str, k: int) -> dict[str, str]:
    """No engine serves Falcon; the runtime's own measurement instead."""
    return {"No serving engine loads Falcon; measure it with": measure(draft)}


EXPORTER = Exporter(
    method="falcon",
    form="draftsmith's own Falcon form (`DraftsmithFalcon`)",
    loads="draftsmith alone",
    pack=pack,
    slots=slots,
    unpack=unpack,
    serve=serve,
)
