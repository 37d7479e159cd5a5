"""Hydra in a form of our own: no serving engine loads it, `draftsmith generate` and `evaluate` do.

`config.json` (`architectures: ["DraftsmithHydra"]`): sizes, `hydra_num_heads`, `hydra_num_layers`, `hydra_prefix`, and
the attention's sizes and RoPE where there is a prefix layer. Tensors, for head i (0-based) of width D over a vocabulary
of W ids, with L blocks per head:

| name | shape | |
|---|---|---|
| `heads.{i}.mixer.weight`, `.bias` | [D, (i + 2) D], [D] | first block, over state and i + 1 embeddings |
| `heads.{i}.residual.weight`, `.bias` | the same | its linear residual |
| `heads.{i}.layers.{j}.weight`, `.bias` | [D, D], [D] | L - 1 further blocks x + SiLU(W x + b) |
| `lm_heads.{i}.weight`, `.bias` | [W, D], [W] | |
| `prefix.*` | a Llama decoder layer | Hydra++ only, over the target's normed states |
| `d2t`, `t2d` | int64 [W], bool [V] | W < V only: offsets as in EAGLE-3, and membership |

Reference: Hydra (Ankner et al. 2024). Tests: tests/test_export.py.
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
        "architectures": ["DraftsmithHydra"],
        "model_type": "hydra",
        "hidden_size": facts.width,
        "vocab_size": facts.vocab,
        "draft_vocab_size": facts.vocab if drafter.d2t_W is None else len(drafter.d2t_W),
        "hydra_num_heads": options.heads,
        "hydra_num_layers": options.layers,
        "hydra_prefix": options.prefix,
        "tie_word_embeddings": False,
    }
    if options.prefix:
        config |= {
            "intermediate_size": facts.intermediate,
            "num_attention_heads": facts.heads,
            "num_key_value_heads": facts.kv_heads,
            "head_dim": facts.head_dim,
            "rms_norm_eps": facts.norm_eps,
            "hidden_act": facts.activation,
            "max_position_embeddings": facts.max_positions,
            **rope_keys(facts),
        }
    maps = {} if drafter.d2t_W is None else draft_maps(drafter.d2t_W, facts.vocab)
    absent = {"embed_tokens.weight": "shared: the target's embeddings, frozen in training"}
    return Packed(config, tensors | maps, absent, dict.fromkeys(maps, "the draft vocabulary"))


def slots(config: Mapping[str, Any]) -> dict[str, Slot]:
    """Every tensor of the file, from config.json alone."""
    width, vocab, rows = shape_of(config, "hidden_size", "vocab_size", "draft_vocab_size")
    heads, layers = shape_of(config, "hydra_num_heads", "hydra_num_layers")
    out: dict[str, Slot] = {}
    for i in range(heads):
        for part in ("mixer", "residual"):
            out[f"heads.{i}.{part}.weight"] = Slot((width, (i + 2) * width))
            out[f"heads.{i}.{part}.bias"] = Slot((width,))
        for j in range(layers - 1):
            out[f"heads.{i}.layers.{j}.weight"] = Slot((width, width))
            out[f"heads.{i}.layers.{j}.bias"] = Slot((width,))
        out[f"lm_heads.{i}.weight"] = Slot((rows, width))
        out[f"lm_heads.{i}.bias"] = Slot((rows,))
    if config.get("hydra_prefix"):
        (inner,) = shape_of(config, "intermediate_size")
        query, kv, head_dim = shape_of(config, "num_attention_heads", "num_key_value_heads", "head_dim")
        out |= attention_slots("prefix.self_attn", width, width, query, kv, head_dim)
        out |= mlp_slots("prefix.mlp", width, inner)
        out |= {f"prefix.{norm}.weight": Slot((width,)) for norm in ("input_layernorm", "post_attention_layernorm")}
    if rows < vocab:
        out |= {"d2t": Slot((rows,), "int64"), "t2d": Slot((vocab,), "bool")}
    return out


def unpack(config: Mapping[str, Any], tensors: dict[str, Tensor]) -> Unpacked:
    """The drafter's own state: the same names, without the two maps."""
    state = {name: t for name, t in tensors.items() if name not in ("d2t", "t2d")}
    return Unpacked(state, draft_ids_of(tensors, config["vocab_size"]))


def serve(config: Mapping[str, Any], target: str, draft: str, k: int) -> dict[str, str]:
    """No engine serves Hydra; the runtime's own measurement instead."""
    return {"No serving engine loads Hydra; measure it with": measure(draft)}


EXPORTER = Exporter(
    method="hydra",
    form="draftsmith's own Hydra form (`DraftsmithHydra`)",
    loads="draftsmith alone",
    pack=pack,
    slots=slots,
    unpack=unpack,
    serve=serve,
)
