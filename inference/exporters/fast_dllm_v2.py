"""Fast-dLLM v2's schema (arXiv:2509.26328): Qwen2 that denoises in blocks, with token shift.

`model_type` Fast_dLLM_Qwen and `bd_size` beside Qwen2's own settings; tensors are Qwen2's. It has no word for the mask:
its sampler's default is 151665, the first id that Qwen2.5's tokenizer leaves free, and a model with another mask is
refused. `mask_token_id` is written all the same, for readers that look. transformers loads such a folder only with the
code of the public repository, which is not copied here: `load_layout` (models/layouts.py) reads it without.

Tests: tests/test_merge.py.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ...models.diffusion import ObjectiveConfig
from ...models.drafter import TargetFacts
from ...models.layouts import LAYOUTS
from .layout import measure
from .schema import Schema, block_faults

MASK = LAYOUTS["Fast_dLLM_Qwen"].mask_id  # of its sampler


def keys(objective: ObjectiveConfig, mask_id: int) -> dict[str, Any]:
    return {
        "model_type": "Fast_dLLM_Qwen",
        "architectures": ["Fast_dLLM_QwenForCausalLM"],
        "bd_size": objective.block,
        "mask_token_id": mask_id,
        "rope_scaling": None,
    }


def faults(facts: TargetFacts, config: Mapping[str, Any], objective: ObjectiveConfig, mask_id: int) -> list[str]:
    found = block_faults(facts, config, objective, family="qwen2", shift=True)
    if mask_id != MASK:
        found.append(f"its mask is {MASK}, this model's {mask_id}")
    return found


def limits(mask_id: int, block: int) -> tuple[str, ...]:
    return ("its public sampler ends answers at id 151645 unless told otherwise",)


def serve(folder: str) -> dict[str, str]:
    return {"to measure it": measure(folder, "tasks")}


SCHEMA = Schema(
    name="fast_dllm_v2",
    form="a Fast-dLLM v2 checkpoint",
    loads="draftsmith, and the public Fast-dLLM v2 code (by its source)",
    mask_token="|<MASK>|",
    keys=keys,
    faults=faults,
    limits=limits,
    serve=serve,
)
