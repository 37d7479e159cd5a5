"""A dual view in a form of our own: the differences of the second projections, which need their target beside them.

`config.json` (`architectures: ["DraftsmithDualView"]`): the target's sizes, `dual_view_block` (slots per draft),
`dual_view_rank` (absent = full matrices) and `dual_view_alpha`. The second projection of layer i is
x -> W x + up(down(x)) * alpha / rank, or with full matrices x -> W x + up(x). Tensors, for rank r:

| name | shape | |
|---|---|---|
| `layers.{i}.{q,k,v,o}_proj.down.weight` | [r, in] | low rank only |
| `layers.{i}.{q,k,v,o}_proj.up.weight` | [out, r] or [out, in] | |
| `mask_embed` | [D] | input embedding of a masked slot, any scale of the family included |
| `d2t`, `t2d` | int64 [W], bool [V] | W < V only: offsets as in EAGLE-3, and membership |

Tests: tests/test_export.py.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from torch import Tensor

from ...models.drafter import Drafter
from .eagle3 import draft_ids_of, draft_maps
from .layout import Exporter, Packed, Slot, Unpacked, attention_slots, measure, shape_of

if TYPE_CHECKING:
    from ...models.target import Target


def pack(drafter: Drafter, target: Target | None) -> Packed:
    """Config and tensors of our form."""
    facts, options = drafter.facts, drafter.config
    tensors = {name: t for name, t in drafter.state_dict().items() if name != "d2t_W"}
    config: dict[str, Any] = {
        "architectures": ["DraftsmithDualView"],
        "model_type": "dual_view",
        "hidden_size": facts.width,
        "num_hidden_layers": facts.layers,
        "num_attention_heads": facts.heads,
        "num_key_value_heads": facts.kv_heads,
        "head_dim": facts.head_dim,
        "vocab_size": facts.vocab,
        "draft_vocab_size": facts.vocab if drafter.d2t_W is None else len(drafter.d2t_W),
        "dual_view_block": options.block,
    }
    if options.rank is not None:
        config |= {"dual_view_rank": options.rank, "dual_view_alpha": options.alpha}
    maps = {} if drafter.d2t_W is None else draft_maps(drafter.d2t_W, facts.vocab)
    absent = {"model": "the target itself, frozen in training: every layer, embeddings and head are read from it"}
    return Packed(config, tensors | maps, absent, dict.fromkeys(maps, "the draft vocabulary"))


def slots(config: Mapping[str, Any]) -> dict[str, Slot]:
    """Every tensor of the file, from config.json alone."""
    width, layers, vocab, rows = shape_of(config, "hidden_size", "num_hidden_layers", "vocab_size", "draft_vocab_size")
    heads, kv_heads, head_dim = shape_of(config, "num_attention_heads", "num_key_value_heads", "head_dim")
    out = {"mask_embed": Slot((width,))}
    rank = shape_of(config, "dual_view_rank")[0] if "dual_view_rank" in config else None
    for i in range(layers):
        for name, slot in attention_slots(f"layers.{i}", width, width, heads, kv_heads, head_dim).items():
            projection, (size_out, size_in) = name.removesuffix(".weight"), slot.shape
            out[f"{projection}.up.weight"] = Slot((size_out, rank or size_in))
            if rank is not None:
                out[f"{projection}.down.weight"] = Slot((rank, size_in))
    if rows < vocab:
        out |= {"d2t": Slot((rows,), "int64"), "t2d": Slot((vocab,), "bool")}
    return out


def unpack(config: Mapping[str, Any], tensors: dict[str, Tensor]) -> Unpacked:
    """The drafter's own state: the same names, without the two maps."""
    state = {name: t for name, t in tensors.items() if name not in ("d2t", "t2d")}
    return Unpacked(state, draft_ids_of(tensors, config["vocab_size"]))


def serve(config: Mapping[str, Any], target: str, draft: str, k: int) -> dict[str, str]:
    """No engine serves it; the runtime's own measurement instead."""
    return {"No serving engine loads a dual view; measure it with": measure(draft)}


EXPORTER = Exporter(
    method="dual_view",
    form="draftsmith's own dual-view form (`DraftsmithDualView`), an adapter",
    loads="draftsmith alone",
    pack=pack,
    slots=slots,
    unpack=unpack,
    serve=serve,
)
