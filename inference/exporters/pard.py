"""PARD: an ordinary causal-LM checkpoint (see `draft_model.py`) whose config.json names the mask token.

`pard_token` is the key of the authors' checkpoints; vLLM takes it, for method `draft_model` with `parallel_drafting`
(0.32, run on CPU with the target as its own draft: the first token was always accepted). The number of tokens per pass is
said to the engine, up to the depths that were trained.

Tests: tests/test_export.py.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from torch import Tensor

from ...models.drafter import Drafter
from . import draft_model
from .layout import Exporter, Packed, Unpacked, vllm

if TYPE_CHECKING:
    from ...models.target import Target


def pack(drafter: Drafter, target: Target | None) -> Packed:
    """Config and tensors of an ordinary checkpoint, with `pard_token`."""
    packed = draft_model.pack(drafter, target)
    return replace(packed, config=packed.config | {"pard_token": drafter.config.mask_id})


def unpack(config: Mapping[str, Any], tensors: dict[str, Tensor]) -> Unpacked:
    """The drafter's own state. ValueError when config.json names two mask tokens."""
    token, ours = config.get("pard_token"), config["draftsmith"]["config"].get("mask_id")
    if not isinstance(token, int) or token != ours:
        raise ValueError(f"config.json: pard_token is {token!r}, draftsmith's mask_id {ours!r}; export the head again")
    return draft_model.unpack(config, tensors)


def serve(config: Mapping[str, Any], target: str, draft: str, k: int) -> dict[str, str]:
    """Command line; without `parallel_drafting` an engine would run it as a chain."""
    speculative = {"method": "draft_model", "model": draft, "num_speculative_tokens": k, "parallel_drafting": True}
    return {"vLLM": vllm(target, speculative)}


EXPORTER = Exporter(
    method="pard",
    form="a causal-LM checkpoint with `pard_token`",
    loads="draftsmith, vLLM (form run with 0.32)",
    pack=pack,
    slots=draft_model.slots,
    unpack=unpack,
    serve=serve,
    holds="parallel draft model",
)
