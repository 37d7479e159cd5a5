"""Diffusion models in their own layouts, run as what they are: Llama, Qwen2 and Qwen3 under another mask.

Their repositories bring model code of their own; none of it is run. A checkpoint's tensors are renamed and loaded into
the transformers model of the same computation, and what rows see is said by the denoiser.

- LLaDA (arXiv:2502.09992; `model_type` llada): Llama under OLMo's names; `ff_proj` is the gate, `ff_out` inside a block
  the down projection, outside the head. A row predicts its own token.
- Dream (arXiv:2508.15487; `model_type` Dream): Qwen2 under its own names. The row of token t predicts token t + 1.
- SDAR (arXiv:2510.06303; `sdar`) and Fast-dLLM v2 (arXiv:2509.26328; `Fast_dLLM_Qwen`): Qwen3 and Qwen2 in blocks of
  `block_size` and `bd_size`, counted from the text's first token; SDAR's rows predict their own token.

    denoiser = load_layout("path/to/LLaDA-8B-Instruct")     # a local folder

To add a layout: one record in `LAYOUTS`. Test: pytest tests/test_layouts.py
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors.torch import load_file
from torch import Tensor

from .denoiser import Origin, TargetDenoiser
from .target import DTYPES, Target


@dataclass(frozen=True)
class Layout:
    """How a checkpoint says what a transformers model says. `settings`: our setting -> theirs, several in order of
    preference; `names`: (pattern of their tensor name, ours), the first that matches whole; `fixed`: settings of theirs
    that must have these values, if they are there, for the computation to be this one. `block`: their name of the block,
    of models with blocks; `mask_id`: the mask where no setting says it."""

    family: str
    shift: bool
    settings: Mapping[str, tuple[str, ...]]
    names: tuple[tuple[str, str], ...]
    fixed: Mapping[str, Any]
    tokenizer: str
    block: str | None = None
    mask_id: int | None = None


_LLADA = r"model\.transformer\."
_BLOCK, _LAYER = _LLADA + r"blocks\.(\d+)\.", r"model.layers.\1."
_OWN = ((r"(model\..+|lm_head\.weight)", r"\1"),)
_QWEN2 = {
    name: (name,)
    for name in (
        "vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads",
        "num_key_value_heads", "max_position_embeddings", "rms_norm_eps", "rope_theta", "tie_word_embeddings",
    )
}  # fmt: skip

LAYOUTS: dict[str, Layout] = {
    "llada": Layout(
        family="llama",
        shift=False,
        settings={
            "vocab_size": ("embedding_size", "vocab_size"),
            "hidden_size": ("d_model",),
            "intermediate_size": ("mlp_hidden_size",),
            "num_hidden_layers": ("n_layers",),
            "num_attention_heads": ("n_heads",),
            "num_key_value_heads": ("n_kv_heads", "n_heads"),
            "max_position_embeddings": ("max_sequence_length",),
            "rms_norm_eps": ("rms_norm_eps",),
            "rope_theta": ("rope_theta",),
            "tie_word_embeddings": ("weight_tying",),
        },
        names=(
            (_LLADA + r"wte\.weight", "model.embed_tokens.weight"),
            (_LLADA + r"ln_f\.weight", "model.norm.weight"),
            (_LLADA + r"ff_out\.weight", "lm_head.weight"),
            (_BLOCK + r"([qkv]_proj)\.weight", _LAYER + r"self_attn.\2.weight"),
            (_BLOCK + r"attn_out\.weight", _LAYER + "self_attn.o_proj.weight"),
            (_BLOCK + r"ff_proj\.weight", _LAYER + "mlp.gate_proj.weight"),
            (_BLOCK + r"up_proj\.weight", _LAYER + "mlp.up_proj.weight"),
            (_BLOCK + r"ff_out\.weight", _LAYER + "mlp.down_proj.weight"),
            (_BLOCK + r"attn_norm\.weight", _LAYER + "input_layernorm.weight"),
            (_BLOCK + r"ff_norm\.weight", _LAYER + "post_attention_layernorm.weight"),
        ),
        fixed={
            "block_type": "llama", "activation_type": "silu", "layer_norm_type": "rms", "rope": True, "alibi": False,
            "include_bias": False, "include_qkv_bias": False, "attention_layer_norm": False, "input_emb_norm": False,
            "scale_logits": False, "clip_qkv": None, "multi_query_attention": None, "block_group_size": 1,
        },
        tokenizer="PreTrainedTokenizerFast",
    ),
    "Dream": Layout(
        family="qwen2",
        shift=True,
        settings=_QWEN2,
        names=_OWN,
        fixed={"hidden_act": "silu", "use_sliding_window": False, "rope_scaling": None},
        tokenizer="Qwen2Tokenizer",
    ),
    "sdar": Layout(
        family="qwen3",
        shift=False,
        settings=_QWEN2 | {"head_dim": ("head_dim",)},
        names=_OWN,
        fixed={"hidden_act": "silu", "use_sliding_window": False, "rope_scaling": None, "attention_bias": False},
        tokenizer="Qwen2Tokenizer",
        block="block_size",
    ),
    "Fast_dLLM_Qwen": Layout(
        family="qwen2",
        shift=True,
        settings=_QWEN2,
        names=_OWN,
        fixed={"hidden_act": "silu", "use_sliding_window": False, "rope_scaling": None},
        tokenizer="Qwen2Tokenizer",
        block="bd_size",
        mask_id=151665,
    ),
}  # fmt: skip


def load_layout(
    folder: str | Path,
    *,
    dtype: str | torch.dtype = "bfloat16",
    device: str | torch.device = "cpu",
    block: int | None = None,
) -> TargetDenoiser:
    """The denoiser in a local folder (config.json, safetensors, tokenizer). `block`, of models that see the whole canvas:
    how many tokens are decided together unless decoding says otherwise (LLaDA's and Fast-dLLM's evaluations: 32, the
    default).

    Raises ValueError for other model types, settings that would change the computation, tensors that are missing, unknown
    or of another shape, and a config without a mask id or rotary base.
    """
    path = Path(folder).expanduser()
    if not (path / "config.json").is_file():
        raise ValueError(
            f"{folder}: no folder with a config.json; download it first: hf download OWNER/NAME --local-dir"
        )
    if isinstance(dtype, str) and dtype not in DTYPES:
        raise ValueError(f"dtype {dtype!r}: use one of {', '.join(DTYPES)}")
    raw = json.loads((path / "config.json").read_text(encoding="utf-8"))
    kind = raw.get("model_type")
    if kind not in LAYOUTS:
        raise ValueError(
            f"{path.name}: model_type {kind!r} is none of {', '.join(LAYOUTS)}; for others use load_target"
        )
    layout = LAYOUTS[kind]
    for name, value in layout.fixed.items():
        if (raw.get(name, value) or None) != (value or None):  # null and false are one
            raise ValueError(f"{path.name}: {name} = {raw[name]!r} is not supported, only {value!r}")
    mask_id = layout.mask_id if raw.get("mask_token_id") is None else raw["mask_token_id"]
    if mask_id is None:
        raise ValueError(f"{path.name}: config.json names no mask_token_id: add the model's own")
    if layout.block is not None:
        if block is not None:
            raise ValueError(f"{path.name}: block = {block}: this model has the block it was trained with")
        block = raw.get(layout.block)
        if not isinstance(block, int) or block < 1:
            raise ValueError(
                f"{path.name}: {layout.block} = {block!r} in config.json, needed: a whole number of at least 1"
            )
    config = _config(path.name, raw, layout)
    model = transformers.AutoModelForCausalLM.from_config(
        config, dtype=DTYPES[dtype] if isinstance(dtype, str) else dtype
    )
    _load(path, layout, model, config.tie_word_embeddings)
    tokenizer = _tokenizer(path, layout)
    target = Target(model, tokenizer, path.name).to(device)
    causal = layout.block is not None
    origin: Origin = "document" if causal else "answer"
    return TargetDenoiser(target, block or 32, mask_id, shift=layout.shift, causal=causal, origin=origin)


def _config(name: str, raw: dict[str, Any], layout: Layout) -> Any:
    settings: dict[str, Any] = {}
    for ours, theirs in layout.settings.items():
        found = [raw[key] for key in theirs if raw.get(key) is not None]
        if not found:
            raise ValueError(f"{name}: config.json has no {theirs[0]}")
        settings[ours] = found[0]
    settings["rope_parameters"] = {"rope_type": "default", "rope_theta": settings.pop("rope_theta")}
    settings |= {key: raw.get(key) for key in ("eos_token_id", "bos_token_id", "pad_token_id")}
    return transformers.AutoConfig.for_model(layout.family, **settings)


def renamed(name: str, layout: Layout) -> str | None:
    """Our name of a tensor of theirs; None where the layout knows none."""
    for pattern, ours in layout.names:
        if match := re.fullmatch(pattern, name):
            return match.expand(ours)
    return None


def _load(path: Path, layout: Layout, model: Any, tied: bool) -> None:
    """Fill the model from the folder's files, one at a time, in place."""
    own: dict[str, Tensor] = model.state_dict()
    left = set(own) - ({"lm_head.weight"} if tied else set())
    files = sorted(path.glob("*.safetensors"))
    if not files:
        raise ValueError(f"{path.name}: no .safetensors files")
    for file in files:
        for theirs, tensor in load_file(file).items():
            name = renamed(theirs, layout)
            if name is None or name not in own:
                raise ValueError(f"{path.name}: tensor {theirs} is unknown in this layout")
            if own[name].shape != tensor.shape:
                raise ValueError(f"{path.name}: {theirs} is {tuple(tensor.shape)}, needed {tuple(own[name].shape)}")
            with torch.no_grad():
                own[name].copy_(tensor)
            left.discard(name)
    if left:
        raise ValueError(f"{path.name}: {len(left)} tensors are missing: {', '.join(sorted(left)[:8])}")


def _tokenizer(path: Path, layout: Layout) -> Any:
    """The folder's tokenizer by a class of transformers: its own class may be code, which is not run."""
    kind = "PreTrainedTokenizerFast" if (path / "tokenizer.json").is_file() else layout.tokenizer
    try:
        tokenizer = getattr(transformers, kind).from_pretrained(path)
    except (OSError, ValueError) as error:
        raise ValueError(f"{path.name}: its tokenizer cannot be loaded: {str(error).splitlines()[0]}") from error
    if tokenizer.pad_token_id is None and tokenizer.eos_token is not None:
        tokenizer.pad_token = tokenizer.eos_token
    return tokenizer
