"""The few facts in which model families differ, and how to find a model's parts.

`FAMILIES` is keyed by Hugging Face's `model_type`. A model whose type is not listed is accepted if its parts are found
by structure and a probe agrees with its own forward pass (`models/target.py`); otherwise it is refused by name.
To add a family: one record here, one line in the table of tests/test_target.py.

Test: pytest tests/test_target.py
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import nn


@dataclass(frozen=True)
class Family:
    """Names of a family's settings in its config, where they differ from Llama's."""

    activation: str = "hidden_act"
    norm_eps: str = "rms_norm_eps"
    norm_offset: float = 0.0  # the norms multiply by weight + offset
    softcap: str | None = None  # logits -> c * tanh(logits / c)
    scale: str | None = None  # logits -> logits * c
    divide: str | None = None  # logits -> logits / c


FAMILIES: dict[str, Family] = {
    "llama": Family(),
    "mistral": Family(),
    "qwen2": Family(),
    "qwen3": Family(),
    "gemma3_text": Family(activation="hidden_activation", norm_offset=1.0, softcap="final_logit_softcapping"),
    "phi3": Family(),
    "olmo2": Family(),
}

ROPE_TYPES = ("default", "linear", "yarn", "llama3", "longrope")


@dataclass(frozen=True)
class Parts:
    """A causal language model taken apart: `decoder` runs `embed`, `layers`, `norm`; `head` gives logits."""

    decoder: nn.Module
    embed: Any
    layers: nn.ModuleList
    norm: nn.Module
    head: Any


def family_of(config: Any) -> Family:
    """The record for a config; for types that are not in the table, one made from the settings found in it."""
    if config.model_type in FAMILIES:
        return FAMILIES[config.model_type]

    def first(*keys: str) -> str | None:
        return next((key for key in keys if getattr(config, key, None) is not None), None)

    return Family(
        activation=first("hidden_act", "hidden_activation", "activation_function") or "hidden_act",
        norm_eps=first("rms_norm_eps", "layer_norm_eps", "norm_eps", "layer_norm_epsilon") or "rms_norm_eps",
        softcap=first("final_logit_softcapping"),
        scale=first("logit_scale"),
        divide=first("logits_scaling"),
    )


def find_parts(model: Any, config: Any) -> Parts:
    """Find the parts by structure. Raises ValueError naming the model type and the missing part."""
    embed, head = model.get_input_embeddings(), model.get_output_embeddings()
    stacks = [
        (owner, child)
        for owner in model.modules()
        for child in owner.children()
        if isinstance(child, nn.ModuleList) and len(child) == config.num_hidden_layers
    ]
    stacks = [(owner, stack) for owner, stack in stacks if any(child is embed for child in owner.children())]
    missing = [
        name for name, part in (("embedding", embed), ("layers", stacks), ("output head", head)) if part in (None, [])
    ]
    if missing:
        raise ValueError(f"target of type {config.model_type!r}: no {' and no '.join(missing)} found. {_SUPPORTED}")
    decoder, layers = stacks[0]
    norms = [child for child in decoder.children() if child is not embed and _is_norm(child, config.hidden_size)]
    if len(norms) != 1:
        raise ValueError(
            f"target of type {config.model_type!r}: {len(norms)} candidates for a final norm. {_SUPPORTED}"
        )
    return Parts(decoder, embed, layers, norms[0], head)


def _is_norm(module: nn.Module, width: int) -> bool:
    """A module of nothing but vectors of the model's width."""
    shapes = [tuple(p.shape) for p in module.parameters()]
    return bool(shapes) and all(shape == (width,) for shape in shapes)


def check_supported(config: Any) -> None:
    """Refuse by name what the target cannot run: encoder-decoders, several inputs, attention without plain keys and
    values, windows or rotary positions of an unknown kind. Raises ValueError."""
    name = f"target of type {config.model_type!r}"
    if getattr(config, "is_encoder_decoder", False):
        raise ValueError(f"{name} is an encoder-decoder. {_SUPPORTED}")
    for key in ("vision_config", "audio_config"):
        if getattr(config, key, None) is not None:
            raise ValueError(f"{name} has {key}: models with image or audio input are not supported. {_SUPPORTED}")
    for key in ("kv_lora_rank", "num_kv_shared_layers", "use_bidirectional_attention"):
        if getattr(config, key, None):
            raise ValueError(f"{name} has {key} = {getattr(config, key)}, which is not supported. {_SUPPORTED}")
    for kind in sorted(set(getattr(config, "layer_types", None) or ())):
        if kind not in ("full_attention", "sliding_attention"):
            raise ValueError(f"{name} has layers of type {kind!r}. {_SUPPORTED}")
    rope_of(config)


def windows_of(config: Any) -> dict[str, int | None] | int | None:
    """Sliding windows: one value for all layers (None = full attention), or one per layer type if layers differ."""
    kinds = set(getattr(config, "layer_types", None) or ())
    window = getattr(config, "sliding_window", None)
    if getattr(config, "use_sliding_window", True) is False and "sliding_attention" not in kinds:
        return None
    if len(kinds) > 1:
        return {"full_attention": None, "sliding_attention": window}
    return None if kinds == {"full_attention"} else window


def rope_of(config: Any) -> dict[str, Any]:
    """The rotary settings of the full-attention layers: `rope_type`, `rope_theta` and whatever the type needs.

    Raises ValueError when they are absent, of an unknown type, or without a base (never 10000 by silence).
    """
    rope = getattr(config, "rope_parameters", None) or {}
    if "full_attention" in rope or "sliding_attention" in rope:
        rope = rope.get("full_attention") or rope["sliding_attention"]
    if not rope:
        raise ValueError(
            f"target of type {config.model_type!r} has no rotary positions (rope_parameters). {_SUPPORTED}"
        )
    kind = rope.get("rope_type")
    if kind not in ROPE_TYPES:
        raise ValueError(f"rope_type {kind!r} is not supported; known: {', '.join(ROPE_TYPES)}")
    if rope.get("rope_theta") is None:
        raise ValueError("rope_parameters have no rope_theta: add the model's rotary base to its config.json")
    return dict(rope)


_SUPPORTED = f"Known families: {', '.join(FAMILIES)}; others work if they are decoders built like these."
