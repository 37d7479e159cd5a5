"""What is known of a model before anything runs: its facts, its end-of-sequence ids, the ids that its tokenizer cannot
produce, its fingerprint. Test: pytest tests/test_target.py
"""

from __future__ import annotations

import hashlib
import json
from typing import Any

import torch
from torch import Tensor

from .drafter import TargetFacts
from .families import family_of, rope_of

OUTLINE = "outline"  # fingerprint of a model that has shapes and no values


def has_values(weight: Tensor) -> bool:
    """False for tensors that are shapes alone (models/outline.py)."""
    return not (weight.is_meta or hasattr(weight, "fake_mode"))


def refuse_non_finite(model: Any, name: str) -> None:
    """ValueError that names a tensor with NaN or infinity."""
    for key, weight in model.named_parameters():
        if has_values(weight):
            refuse_non_finite_tensor(key, weight, name)


def refuse_non_finite_tensor(key: str, weight: Tensor, name: str) -> None:
    """The same of one tensor."""
    if not bool(torch.isfinite(weight.sum(dtype=torch.float32))) and not bool(torch.isfinite(weight).all()):
        raise ValueError(f"target {name!r}: tensor {key} holds NaN or infinity")


def facts_of(model: Any, tokenizer: Any, name: str, revision: str | None, known_by: str) -> TargetFacts:
    """The facts of a model; `known_by`: its fingerprint. ValueError for a tokenizer of another model."""
    config = model.config
    family = family_of(config)
    vocab = model.get_input_embeddings().weight.shape[0]
    token_ids = tokenizer.get_vocab()
    tokens = max(token_ids.values()) + 1
    if tokens > vocab:
        raise ValueError(
            f"target {name!r}: its tokenizer has {tokens} tokens, its embedding {vocab} rows; this tokenizer belongs "
            "to another model (or tokens were added to it)"
        )
    heads = config.num_attention_heads
    rope = rope_of(config)
    longest = config.max_position_embeddings
    if rope["rope_type"] == "longrope":
        # Beyond this, its frequencies depend on the longest row of the batch; up to it they are fixed.
        longest = rope.get("original_max_position_embeddings") or config.original_max_position_embeddings
    return TargetFacts(
        name=name,
        revision=revision,
        fingerprint=known_by,
        family=config.model_type,
        vocab=vocab,
        tokens=tokens,
        width=config.hidden_size,
        layers=config.num_hidden_layers,
        heads=heads,
        kv_heads=getattr(config, "num_key_value_heads", None) or heads,
        head_dim=getattr(config, "head_dim", None) or config.hidden_size // heads,
        intermediate=config.intermediate_size,
        norm_eps=getattr(config, family.norm_eps),
        activation=getattr(config, family.activation),
        rope=rope,
        max_positions=longest,
        tied=model.get_output_embeddings().weight is model.get_input_embeddings().weight,
        eos_ids=_eos_ids(model, tokenizer),
        tokenizer_hash=hashlib.sha256(json.dumps(sorted(token_ids.items())).encode()).hexdigest(),
    )


def _eos_ids(model: Any, tokenizer: Any) -> tuple[int, ...]:
    """Every id that ends an answer: the tokenizer's, the config's and the generation config's."""
    found: set[int] = set()
    for owner in (tokenizer, model.config, getattr(model, "generation_config", None)):
        ids = getattr(owner, "eos_token_id", None)
        found |= set(ids) if isinstance(ids, list) else set() if ids is None else {ids}
    return tuple(sorted(found))


def banned_ids(tokenizer: Any, vocab: int) -> Tensor:
    """int64 [X]: embedding rows that no token of the tokenizer has (never drafted, never emitted)."""
    known_V = torch.zeros(vocab, dtype=torch.bool)
    known_V[torch.tensor(sorted(tokenizer.get_vocab().values()))] = True
    return (~known_V).nonzero()[:, 0]


_VOLATILE = {
    "_name_or_path", "architectures", "bos_token_id", "chunk_size_feed_forward", "dtype", "eos_token_id", "id2label",
    "is_encoder_decoder", "label2id", "output_attentions", "output_hidden_states", "pad_token_id", "problem_type",
    "quantization_config", "return_dict", "torch_dtype", "transformers_version", "use_cache", "tie_word_embeddings",
}  # fmt: skip


def fingerprint(model: Any) -> str:
    """sha256 (hex) over the settings that shape the computation, and every tensor's name, shape and 4096 values at
    even steps, rounded to bf16 so that one checkpoint has one fingerprint in every dtype it is loaded in."""
    if not all(has_values(weight) for weight in model.parameters()):
        return OUTLINE
    return fingerprint_of(model.config, {key: trace(key, weight) for key, weight in model.named_parameters()})


def trace(key: str, weight: Tensor) -> bytes:
    """What a fingerprint keeps of one tensor."""
    flat = weight.detach().reshape(-1)
    picked = flat[:: max(1, flat.numel() // 4096)][:4096].to(torch.bfloat16).view(torch.int16).cpu()
    return f"{key} {tuple(weight.shape)}".encode() + picked.numpy().tobytes()


def fingerprint_of(config: Any, traces: dict[str, bytes]) -> str:
    """`fingerprint`, of tensors that need not be there together."""
    settings = {key: value for key, value in config.to_dict().items() if key not in _VOLATILE and value is not None}
    digest = hashlib.sha256(json.dumps(settings, sort_keys=True, default=str).encode())
    for _, kept in sorted(traces.items()):
        digest.update(kept)
    return digest.hexdigest()
