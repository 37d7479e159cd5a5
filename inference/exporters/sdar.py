"""SDAR's schema (arXiv:2510.06303): Qwen3 that denoises in blocks, without token shift.

`model_type` sdar, `block_size` and `mask_token_id` beside Qwen3's own settings; tensors are Qwen3's, norms of queries
and keys among them. Blocks are counted from the text's first token, finished blocks see themselves whole. SGLang,
LMDeploy and JetEngine have this model; SGLang takes the mask's id and the block not from the file (0.5.23, by reading),
which `limits` says. transformers itself loads such a folder only with the code of a public SDAR repository, which is not
copied here: `load_layout` (models/layouts.py) reads it without.

Tests: tests/test_merge.py.
"""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from typing import Any

from ...models.diffusion import ObjectiveConfig
from ...models.drafter import TargetFacts
from .schema import Schema, block_faults

ENGINE_MASK, ENGINE_BLOCK = 151669, 4  # SGLang's own, by architecture


def keys(objective: ObjectiveConfig, mask_id: int) -> dict[str, Any]:
    """`fuse_cross_entropy` concerns training alone, but public model code reads it."""
    return {
        "model_type": "sdar",
        "architectures": ["SDARForCausalLM"],
        "block_size": objective.block,
        "mask_token_id": mask_id,
        "fuse_cross_entropy": True,
        "rope_scaling": None,
    }


def faults(facts: TargetFacts, config: Mapping[str, Any], objective: ObjectiveConfig, mask_id: int) -> list[str]:
    found = block_faults(facts, config, objective, family="qwen3", shift=False)
    if config.get("attention_bias"):
        found.append("its projections have no bias")
    return found


def limits(mask_id: int, block: int) -> tuple[str, ...]:
    said: tuple[str, ...] = ()
    if mask_id != ENGINE_MASK:
        said += (
            f"SGLang takes {ENGINE_MASK} for the mask whatever the file says, here it is {mask_id}: it cannot serve it",
        )
    if block != ENGINE_BLOCK:
        said += (f"SGLang's block is {ENGINE_BLOCK} unless its algorithm file says block_size: {block}",)
    return said


def serve(folder: str) -> dict[str, str]:
    """Command lines (by the engines' documentation, not run)."""
    name = shlex.quote(folder)
    return {
        "SGLang": f"python -m sglang.launch_server --model-path {name} --dllm-algorithm LowConfidence",
        "LMDeploy": f"lmdeploy serve api_server {name} --dllm-unmasking-strategy low_confidence_dynamic",
    }


SCHEMA = Schema(
    name="sdar",
    form="an SDAR checkpoint",
    loads="draftsmith, SGLang, LMDeploy, JetEngine (by their sources)",
    mask_token="<|MASK|>",
    keys=keys,
    faults=faults,
    limits=limits,
    serve=serve,
)
