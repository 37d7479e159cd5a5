"""The plain merged form: an ordinary checkpoint of the base's own architecture, for every family and objective.

Tools that know the base load its weights; `mask_token_id` and `block_size` stand beside the base's settings, all else of
how they denoise under `draftsmith` (the block's names in engines, shift, objective, decoding). Run as an autoregressive
model such weights give nonsense.

Tests: tests/test_merge.py.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ...models.diffusion import ObjectiveConfig
from ...models.drafter import TargetFacts
from .layout import measure
from .schema import Schema


def keys(objective: ObjectiveConfig, mask_id: int) -> dict[str, Any]:
    return {"mask_token_id": mask_id, "block_size": objective.block}


def faults(facts: TargetFacts, config: Mapping[str, Any], objective: ObjectiveConfig, mask_id: int) -> list[str]:
    return []


def limits(mask_id: int, block: int) -> tuple[str, ...]:
    return ("engines that take it for the autoregressive model it was made from decode nonsense",)


def serve(folder: str) -> dict[str, str]:
    return {"to measure it": measure(folder, "tasks")}


SCHEMA = Schema(
    name="plain",
    form="an ordinary checkpoint of the base's architecture",
    loads="draftsmith",
    mask_token="<|MASK|>",
    keys=keys,
    faults=faults,
    limits=limits,
    serve=serve,
)
