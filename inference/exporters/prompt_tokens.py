"""Prompt tokens in a form of our own: a few embeddings and, for BiTA, a prefix, which need their target beside them.

`config.json` (`architectures: ["DraftsmithPromptTokens"]`): the target's sizes, `prompt_variant`, `prompt_tokens` (M,
depths), `prompt_members` (n, virtual tokens of each) and `prompt_prefix` (P, absent = none). Tensors, for a target of L
layers with G key/value heads of size d:

| name | shape | |
|---|---|---|
| `prompt_embed` | [M n, D] | input embeddings, row token * n + member, any scale of the family included |
| `prefix_kv` | [L, 2, G, P, d] | keys and values that only special tokens see; keys are read as they are, not rotated |
| `d2t`, `t2d` | int64 [W], bool [V] | W < V only: offsets as in EAGLE-3, and membership |

Tests: tests/test_export.py.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from torch import Tensor

from ...models.drafter import Drafter
from .eagle3 import draft_ids_of, draft_maps
from .layout import Exporter, Packed, Slot, Unpacked, measure, shape_of

if TYPE_CHECKING:
    from ...models.target import Target


def pack(drafter: Drafter, target: Target | None) -> Packed:
    """Config and tensors of our form."""
    facts, options = drafter.facts, drafter.config
    own = options.resolved()
    tensors = {name: t for name, t in drafter.state_dict().items() if name != "d2t_W"}
    config: dict[str, Any] = {
        "architectures": ["DraftsmithPromptTokens"],
        "model_type": "prompt_tokens",
        "hidden_size": facts.width,
        "num_hidden_layers": facts.layers,
        "num_attention_heads": facts.heads,
        "num_key_value_heads": facts.kv_heads,
        "head_dim": facts.head_dim,
        "vocab_size": facts.vocab,
        "draft_vocab_size": facts.vocab if drafter.d2t_W is None else len(drafter.d2t_W),
        "prompt_variant": options.variant,
        "prompt_tokens": options.tokens,
        "prompt_members": own.members,
    }
    if own.prefix:
        config["prompt_prefix"] = own.prefix
    maps = {} if drafter.d2t_W is None else draft_maps(drafter.d2t_W, facts.vocab)
    absent = {"model": "the target itself, frozen in training: every layer, embeddings and head are read from it"}
    return Packed(config, tensors | maps, absent, dict.fromkeys(maps, "the draft vocabulary"))


def slots(config: Mapping[str, Any]) -> dict[str, Slot]:
    """Every tensor of the file, from config.json alone."""
    width, vocab, rows = shape_of(config, "hidden_size", "vocab_size", "draft_vocab_size")
    tokens, members = shape_of(config, "prompt_tokens", "prompt_members")
    out = {"prompt_embed": Slot((tokens * members, width))}
    if "prompt_prefix" in config:
        layers, kv_heads, prefix, head_dim = shape_of(
            config, "num_hidden_layers", "num_key_value_heads", "prompt_prefix", "head_dim"
        )
        out["prefix_kv"] = Slot((layers, 2, kv_heads, prefix, head_dim))
    if rows < vocab:
        out |= {"d2t": Slot((rows,), "int64"), "t2d": Slot((vocab,), "bool")}
    return out


def unpack(config: Mapping[str, Any], tensors: dict[str, Tensor]) -> Unpacked:
    """The drafter's own state: the same names, without the two maps."""
    state = {name: t for name, t in tensors.items() if name not in ("d2t", "t2d")}
    return Unpacked(state, draft_ids_of(tensors, config["vocab_size"]))


def serve(config: Mapping[str, Any], target: str, draft: str, k: int) -> dict[str, str]:
    """No engine serves them; the runtime's own measurement instead."""
    return {"No serving engine loads prompt tokens; measure them with": measure(draft)}


EXPORTER = Exporter(
    method="prompt_tokens",
    form="draftsmith's own prompt-token form (`DraftsmithPromptTokens`), an adapter",
    loads="draftsmith alone",
    pack=pack,
    slots=slots,
    unpack=unpack,
    serve=serve,
)
