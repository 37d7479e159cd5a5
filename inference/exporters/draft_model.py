"""A draft model: an ordinary causal-LM checkpoint, as every engine loads it.

`config.json` is the model's own, with both spellings of RoPE; tensors bear the names of its checkpoint, and a head that
is tied to the embedding is left out. There is no tokenizer: engines take the target's, and refuse a draft model of
another `vocab_size`. What an engine would not say is in `limits`: it does not raise a draft model's
`max_position_embeddings`, and longer texts are then drafted wrongly without a word (vLLM 0.32, run).

Tests: tests/test_export.py.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ...models.drafter import Drafter
from ...models.small_lm import random_model
from .layout import Exporter, Packed, Slot, Unpacked, sglang, vllm
from .medusa import PATH_WORDS

if TYPE_CHECKING:
    from ...models.target import Target

BESIDE = ("draftsmith", "torch_dtype", "rope_theta", "rope_scaling", "pard_token")  # keys beside the architecture


def pack(drafter: Drafter, target: Target | None) -> Packed:
    """Config and tensors of an ordinary checkpoint. ValueError for a model of another vocabulary than the target's."""
    lm = drafter.config.lm
    if lm.architecture is None or getattr(drafter, "tokenizer", None) is not None:
        raise ValueError(
            f"{drafter.method}: this model has a vocabulary of its own, and the export of a trained one must have that of "
            f"{drafter.facts.name}; use the checkpoint as it stands (load_draft_model), or start from another"
        )
    facts = drafter.facts
    twice = tied(lm.architecture)
    tensors = {n: t for n, t in drafter.state_dict().items() if n != "d2t_W" and n not in twice}
    absent = {name: f"tied: {original}" for name, original in twice.items()}
    untrained = {} if lm.train_embeddings else dict.fromkeys(ends(lm.architecture) & set(tensors), "kept as it started")
    limits: tuple[str, ...] = (PATH_WORDS,)
    longest = lm.architecture.get("max_position_embeddings", facts.max_positions)
    if longest < facts.max_positions:
        limits += (f"texts beyond {longest} positions, of the target's {facts.max_positions}, are drafted wrongly",)
    if drafter.d2t_W is not None:
        limits += (f"engines draft over all {facts.vocab} ids, not the {len(drafter.d2t_W)} it was trained on",)
    return Packed(lm.architecture | spelled(lm.architecture), tensors, absent, untrained, limits)


def spelled(architecture: Mapping[str, Any]) -> dict[str, Any]:
    """RoPE as transformers 4 reads it, where one setting serves all layers."""
    rope = architecture.get("rope_parameters") or {}
    if "rope_theta" not in rope:
        return {}
    keys = {"rope_theta": rope["rope_theta"]}
    return keys if rope.get("rope_type") == "default" else keys | {"rope_scaling": rope}


def skeleton(architecture: Mapping[str, Any]) -> Any:
    """The model without memory for its weights."""
    with torch.device("meta"):
        return random_model(dict(architecture))


def tied(architecture: Mapping[str, Any]) -> dict[str, str]:
    """Name of each tensor that is another one under a second name -> that one."""
    model = skeleton(architecture)
    first = {id(p): name for name, p in model.named_parameters()}
    every = dict(model.named_parameters(remove_duplicate=False))
    return {name: first[id(p)] for name, p in every.items() if name != first[id(p)]}


def ends(architecture: Mapping[str, Any]) -> set[str]:
    """Names of the embedding's and the head's tensors."""
    model = skeleton(architecture)
    parts = [model.get_input_embeddings(), model.get_output_embeddings()]
    own = {id(p) for part in parts for p in part.parameters()}
    return {name for name, p in model.named_parameters() if id(p) in own}


def architecture_of(config: Mapping[str, Any]) -> dict[str, Any]:
    """The model's own settings in config.json."""
    return {key: value for key, value in config.items() if key not in BESIDE}


def slots(config: Mapping[str, Any]) -> dict[str, Slot]:
    """Every tensor of the file, from config.json alone."""
    architecture = architecture_of(config)
    twice = tied(architecture)
    return {n: Slot(tuple(t.shape)) for n, t in skeleton(architecture).state_dict().items() if n not in twice}


def unpack(config: Mapping[str, Any], tensors: dict[str, Tensor]) -> Unpacked:
    """The drafter's own state: the same names, tied ones under both. ValueError when config.json says two architectures."""
    ours = config["draftsmith"]
    stated, own = architecture_of(config), (ours["config"].get("lm") or {}).get("architecture") or {}
    faults = [
        f"{key}: file {stated.get(key, 'nothing')!r}, head {own.get(key, 'nothing')!r}"
        for key in sorted(stated.keys() | own.keys())
        if stated.get(key) != own.get(key)
    ]
    if faults:
        raise ValueError("config.json says another head to engines (export it again); " + "; ".join(faults))
    state = tensors | {name: tensors[original] for name, original in tied(architecture_of(config)).items()}
    ids = ours.get("draft_ids")
    return Unpacked(state, None if ids is None else torch.tensor(ids, dtype=torch.int64))


def serve(config: Mapping[str, Any], target: str, draft: str, k: int) -> dict[str, str]:
    """Command lines; the method is named, or words in the path would choose it."""
    return {
        "vLLM": vllm(target, {"method": "draft_model", "model": draft, "num_speculative_tokens": k}),
        "SGLang": sglang(target, draft, "STANDALONE", k + 1, steps=k),
    }


EXPORTER = Exporter(
    method="draft_model",
    form="an ordinary causal-LM checkpoint",
    loads="draftsmith, transformers, vLLM (the form was run with 0.32), SGLang (by its documentation)",
    pack=pack,
    slots=slots,
    unpack=unpack,
    serve=serve,
    holds="draft model",
)
