"""DSpark as vLLM loads it, Domino as SGLang does; other heads have a documented form of our own.

The backbone is written as DFlash's (dflash.py). What the slot head adds:

| head | architectures | tensors | keys |
|---|---|---|---|
| markov, gated, rnn | `Qwen3DSparkModel` | `markov_head.markov_w1.weight` [V, r], `markov_w2.weight` [W, r]; gated `gate_proj`, rnn `joint_proj` with biases | `markov_rank`, `markov_head_type` vanilla, gated, rnn |
| gru | `DFlashDraftModel` | `prefix_gru.weight_ih_l0`, `weight_hh_l0`, `embed_proj.0.weight`, `embed_proj.2.weight` | `projector_type` domino, `gru_hidden_dim`, `emb_dim`, `pure_draft_prefix_len`, `shift_label` |
| pairs | `DraftsmithDSpark` | `pair_head.first.weight` [V, r], `state.weight` [r, D], `second.weight` [W, r] | `projector_type` pairs, `selector_rank`, `selector_top_k` |
| none | `DraftsmithDSpark` | | |

`confidence_head.proj.weight` [1, D (+ r with a Markov head)] and `.bias` [1] are there with `enable_confidence_head`. Engines
read the keys at the top level (DeepSpec) or in `dflash_config` (SpecForge), so they stand in both, layer ids as in
dflash.py. Temperatures of the confidence are our own fact (`draftsmith.config.temperatures`): engines use it as it is.
vLLM's dspark needs its second runner, which has no CPU form: read in its source, not run here. It takes
`sample_from_anchor` from the top level (missing = true), and drafts one slot wider where it is false.

Tests: tests/test_export.py.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from torch import Tensor

from ...models.drafter import Drafter
from . import dflash
from .dflash import block_config, block_facts, block_limits, block_tensors
from .layout import Exporter, Packed, Slot, Unpacked, measure, sglang, shape_of, vllm

if TYPE_CHECKING:
    from ...models.target import Target

KINDS = {"markov": "vanilla", "gated": "gated", "rnn": "rnn"}  # our names of Markov heads -> the engines'


def pack(drafter: Drafter, target: Target | None) -> Packed:
    """Config and tensors. ValueError for what the form can't express."""
    options, facts, limits = drafter.config, block_facts(drafter), block_limits(drafter)
    facts["sample_from_anchor"] = options.sample_from_anchor
    facts["enable_confidence_head"] = options.confidence
    facts["confidence_head_with_markov"] = options.confidence and options.head in KINDS
    if options.anchors is not None:
        facts["num_anchors"] = options.anchors
    config = block_config(drafter)
    if options.head in KINDS:
        facts |= {"markov_rank": options.rank, "markov_head_type": KINDS[options.head]}
        config |= {"architectures": ["Qwen3DSparkModel"]} | facts
        if options.head != "markov":
            limits += ("vLLM before `markov_head_type` (0.32 for one) knows the first-order head alone",)
    elif options.head == "gru":
        facts |= {
            "projector_type": "domino",
            "gru_hidden_dim": options.gru_size,
            "emb_dim": options.rank,
            "pure_draft_prefix_len": options.clean_depths,
            "shift_label": options.sample_from_anchor,
        }
        config["architectures"] = ["DFlashDraftModel"]
        if options.confidence:
            limits += ("no engine has a confidence head beside Domino's head",)
    else:
        config["architectures"] = ["DraftsmithDSpark"]
        if options.head == "pairs":
            facts |= {"projector_type": "pairs", "selector_rank": options.rank, "selector_top_k": options.candidates}
    return Packed(config | {"dflash_config": facts}, *block_tensors(drafter, target), limits)


def slots(config: Mapping[str, Any]) -> dict[str, Slot]:
    """Every tensor of the file, from config.json alone."""
    out = dflash.slots(config)
    facts = config["dflash_config"]
    width, vocab = shape_of(config, "hidden_size", "vocab_size")
    (rows,) = shape_of({"draft_vocab_size": vocab, **config}, "draft_vocab_size")
    rank = 0
    if "markov_rank" in facts:
        (rank,) = shape_of(facts, "markov_rank")
        out |= {
            "markov_head.markov_w1.weight": Slot((vocab, rank)),
            "markov_head.markov_w2.weight": Slot((rows, rank)),
        }
        if facts.get("markov_head_type") == "gated":
            out |= linear_slots("markov_head.gate_proj", rank, width + rank)
        if facts.get("markov_head_type") == "rnn":
            out |= linear_slots("markov_head.joint_proj", 3 * rank, 2 * rank + width)
    elif facts.get("projector_type") == "domino":
        size, narrow = shape_of(facts, "gru_hidden_dim", "emb_dim")
        out |= {
            "prefix_gru.weight_ih_l0": Slot((3 * size, width)),
            "prefix_gru.weight_hh_l0": Slot((3 * size, size)),
            "embed_proj.0.weight": Slot((narrow, width + size)),
            "embed_proj.2.weight": Slot((rows, narrow)),
        }
    elif facts.get("projector_type") == "pairs":
        (narrow,) = shape_of(facts, "selector_rank")
        out |= {
            "pair_head.first.weight": Slot((vocab, narrow)),
            "pair_head.state.weight": Slot((narrow, width)),
            "pair_head.second.weight": Slot((rows, narrow)),
        }
    if facts.get("enable_confidence_head"):
        out |= linear_slots(
            "confidence_head.proj", 1, width + (rank if facts.get("confidence_head_with_markov") else 0)
        )
    return out


def linear_slots(name: str, rows: int, columns: int) -> dict[str, Slot]:
    """A linear map with a bias."""
    return {f"{name}.weight": Slot((rows, columns)), f"{name}.bias": Slot((rows,))}


def unpack(config: Mapping[str, Any], tensors: dict[str, Tensor]) -> Unpacked:
    """The drafter's own state."""
    return dflash.unpack(config, tensors)


def serve(config: Mapping[str, Any], target: str, draft: str, k: int) -> dict[str, str]:
    """Command lines of the engine that has this head."""
    options = config["draftsmith"]["config"]
    if options["head"] in KINDS:
        # Some targets demand as many tokens as a block has.
        drafted = options["block"] - (not options["sample_from_anchor"])
        return {"vLLM": vllm(target, {"method": "dspark", "model": draft, "num_speculative_tokens": drafted})}
    if options["head"] == "gru" and "draft_vocab_size" not in config:
        return {"SGLang": sglang(target, draft, "DFLASH", options["block"])}
    return {"No serving engine loads this head; measure it with": measure(draft)}


EXPORTER = Exporter(
    method="dspark",
    form="DeepSpec's DSpark form (`Qwen3DSparkModel`); Domino and others as inference/exporters/dspark.py says",
    loads="draftsmith; vLLM on GPUs with Markov heads (by its source); SGLang with Domino's head (by its source)",
    pack=pack,
    slots=slots,
    unpack=unpack,
    serve=serve,
)
