"""Loading a frozen target by name, folder, hub id or GGUF file, and its tokenizer; a model that is not what it says is
refused before anything runs on it.

    target = load_target("smollm2")            # or "tiny", a hub id, a folder, a GGUF file

Test: pytest tests/test_target.py
"""

from __future__ import annotations

import hashlib
import json
import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import torch
from huggingface_hub import snapshot_download
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, GgufConfig, PretrainedConfig
from transformers.utils import cached_file, logging

from .facts import fingerprint, refuse_non_finite
from .families import FAMILIES, check_supported
from .int8 import Weights, check_weights
from .lean import Runner
from .quantize import Quantize, Quantized, check_quantize, quantization_config
from .target import DTYPES, Target
from .threads import warn_if_slow


def load_target(
    name: str,
    *,
    dtype: str | torch.dtype = "bfloat16",
    device: str | torch.device = "cpu",
    revision: str | None = None,
    trust_remote_code: bool = False,
    quantize: Quantize = "none",
    denoises: bool = False,
    runner: Runner = "auto",
    weights: Weights = "full",
) -> Target:
    """Load a target by hub id, local folder, GGUF file, or built-in name (`smollm2`, `tiny`).

    `revision` pins a hub id (what was loaded is recorded in `facts.revision`). `trust_remote_code` needs a revision of
    40 hexadecimal digits, and prints the files that may run. Raises ValueError for everything that would not run exactly
    as saved: unknown names and dtypes, unsupported models, missing, unexpected, mis-shaped or non-finite weights, a
    tokenizer larger than the embedding, a config without a rotary base.

    `quantize`: round the layers' weights (models/quantize.py). They are read twice, first in full for the fingerprint.
    `denoises`: it will be run as a denoiser; otherwise merged weights of a converted model, which would answer
    nonsense, are refused. `runner`: see `Target`. `weights`: int8 rounds them for decoding (`Target.round_weights`).
    """
    from . import pretrained  # imports this module

    if isinstance(dtype, str) and dtype not in DTYPES:
        raise ValueError(f"dtype {dtype!r}: use one of {', '.join(DTYPES)}")
    dtype = DTYPES[dtype] if isinstance(dtype, str) else dtype
    check_quantize(quantize, device)
    check_weights(weights, dtype)
    if quantize != "none" and (name == "tiny" or name.endswith(".gguf")):
        raise ValueError(
            f"quantize = {quantize}: target {name!r} is made in memory; name a folder or hub id, or quantize=none"
        )
    try:
        torch.empty(1, device=device).sum().item()
    except (RuntimeError, AssertionError) as error:  # NotImplementedError (`meta`) is a RuntimeError
        raise ValueError(f"device {str(device)!r} cannot be used here: {str(error).splitlines()[0]}") from None
    warn_if_slow(device)
    if name == "tiny":
        target = pretrained.tiny_target(dtype=dtype).to(device)
        target.choose_runner(runner)
        target.round_weights(weights)
        return target
    source = source_of(name, revision, trust_remote_code)
    quantized = None
    try:
        if quantize != "none":
            full = _load_model(source, dtype)
            refuse_non_finite(full, source.name)
            quantized = Quantized(quantize, fingerprint(full))
            del full
        model, tokenizer = _load_model(source, dtype, quantize, device), tokenizer_of(source)
    except OSError as error:
        raise ValueError(f"target {name!r} cannot be loaded: {str(error).splitlines()[0]}") from error
    if not denoises:
        refuse_denoiser(name, model.config)
    target = Target(model, tokenizer, source.name, source.commit, quantized=quantized, runner=runner).to(device)
    if model.config.model_type not in FAMILIES:
        refuse_other_logits(target)
    target.round_weights(weights)
    return target


def refuse_denoiser(name: str, config: Any) -> None:
    """Raises ValueError for a converted model, whose adapters were merged into it."""
    if (getattr(config, "draftsmith", None) or {}).get("kind") == "merged":
        raise ValueError(
            f"target {name!r} is a converted model, its adapters merged into it: it denoises, and is no autoregressive "
            "model any more; name the one that was converted, or give the folder as --model"
        )


def load_tokenizer(name: str, *, revision: str | None = None, trust_remote_code: bool = False) -> Any:
    """The tokenizer that `load_target` would load, without the weights. Raises ValueError likewise."""
    from . import pretrained

    if name == "tiny":
        return pretrained.tiny_tokenizer()
    source = source_of(name, revision, trust_remote_code)
    try:
        return tokenizer_of(source)
    except OSError as error:
        raise ValueError(f"tokenizer of {name!r} cannot be loaded: {str(error).splitlines()[0]}") from error


@dataclass(frozen=True)
class Source:
    """Where a target lies: a folder or hub id, the GGUF file in it, the hub commit; and the name to record."""

    name: str
    where: str
    gguf: str | None
    commit: str | None
    trust_remote_code: bool

    def options(self) -> dict[str, Any]:
        """Arguments that every `from_pretrained` gets."""
        chosen: dict[str, Any] = {"revision": self.commit, "trust_remote_code": self.trust_remote_code}
        return chosen if self.gguf is None else chosen | {"gguf_file": self.gguf}


def source_of(name: str, revision: str | None, trust_remote_code: bool) -> Source:
    from . import pretrained

    if trust_remote_code and not re.fullmatch(r"[0-9a-f]{40}", revision or ""):
        raise ValueError(
            f"trust_remote_code runs code from {name!r}: pin it with revision = the 40 hexadecimal digits of a commit "
            f"you have read (now: {revision!r})"
        )
    path, gguf = (pretrained.smollm2_folder() if name == "smollm2" else Path(name)).expanduser(), None
    if path.suffix == ".gguf" and path.is_file():
        path, gguf = path.parent, path.name
    if path.is_dir():
        shown = name if name == "smollm2" else (gguf or path.resolve().name)
        if trust_remote_code:
            _show_code(path, shown)
        return Source(shown, str(path), gguf, None, trust_remote_code)
    if not re.fullmatch(r"[\w.-]+/[\w.-]+", name):
        raise ValueError(f"target {name!r}: no such folder or GGUF file, no hub id (owner/name), not smollm2 or tiny")
    try:
        commit = _commit_of(name, revision)
        if trust_remote_code:
            _show_code(Path(snapshot_download(name, revision=commit, allow_patterns=["*.py", "*.json"])), name)
        return Source(name, name, None, commit, trust_remote_code)
    except OSError as error:
        raise ValueError(f"target {name!r} cannot be loaded: {str(error).splitlines()[0]}") from error


def _show_code(folder: Path, name: str) -> None:
    """Print which Python files `trust_remote_code` lets run, with their SHA-256. Raises ValueError when a config takes
    code from another repository, which no revision pins."""
    for settings in sorted(folder.glob("*.json")):
        raw = json.loads(settings.read_text(encoding="utf-8"))
        named = str(raw.get("auto_map", "")) if isinstance(raw, dict) else ""
        if "--" in named:
            raise ValueError(
                f"target {name!r}: {settings.name} takes code from another repository ({named}), which `revision` does "
                "not pin; copy that code into a folder of your own and read it"
            )
    print(f"trust_remote_code: {name!r} may run", file=sys.stderr)
    for file in sorted(folder.rglob("*.py")):
        print(f"  {hashlib.sha256(file.read_bytes()).hexdigest()}  {file.relative_to(folder)}", file=sys.stderr)


def _commit_of(hub_id: str, revision: str | None) -> str:
    """The commit (40 hexadecimal digits) that a branch, tag or short name means now. Raises OSError if unknown."""
    file = cached_file(hub_id, "config.json", revision=revision)
    found = re.search(r"snapshots[/\\]([0-9a-f]{40})[/\\]", file or "")
    if found is None:
        raise OSError(f"no commit found for revision {revision!r} of {hub_id!r}")
    return found[1]


def _load_model(
    source: Source, dtype: torch.dtype, quantize: Quantize = "none", device: str | torch.device = "cpu"
) -> Any:
    """The model by transformers, refusing what it would fill in silently."""
    options = source.options()
    if source.gguf is not None:
        options["quantization_config"] = GgufConfig(dequantize=True)
    else:
        options["config"], nested = config_of(source)
        options |= {"key_mapping": NESTED} if nested else {}
    tied = "config" in options and bool(getattr(options["config"], "tie_word_embeddings", False))
    options |= {"dtype": dtype, "output_loading_info": True, "ignore_mismatched_sizes": True}  # refused below, by name
    if quantize != "none":
        options |= {"quantization_config": quantization_config(quantize, dtype), "device_map": {"": device}}
    with quiet():
        found = AutoModelForCausalLM.from_pretrained(source.where, **options)
    model, info = cast(tuple[Any, dict[str, Any]], found)
    for what in ("missing_keys", "mismatched_keys", "unexpected_keys"):
        names = sorted(str(key) for key in info.get(what, ()) if not re.search(IGNORABLE, str(key)))
        if names:
            raise ValueError(
                f"weights of {source.name!r}: {len(names)} {what.replace('_', ' ')}: {', '.join(names[:8])}"
                f"{' ...' if len(names) > 8 else ''}; the files do not belong to this config.json"
            )
    if tied and model.get_output_embeddings().weight is not model.get_input_embeddings().weight:
        raise ValueError(
            f"target {source.name!r}: its config.json says tie_word_embeddings, but its files hold an output head that "
            "differs from the embedding; set the flag to false if the head is right, or remove the head"
        )
    return model


def config_of(source: Source) -> tuple[Any, bool]:
    """transformers' config, and whether the language model is part of a larger one. Raises ValueError for a kind of model
    that is not supported."""
    raw, _ = PretrainedConfig.get_config_dict(source.where, revision=source.commit)
    for key in ("vision_config", "audio_config"):
        if raw.get(key) is not None:
            raise ValueError(
                f"target {source.name!r} (type {raw.get('model_type')!r}) has {key}: models with image or audio "
                "input are not supported; extract its language model first"
            )
    nested = "text_config" in raw
    if nested:
        outer = {key: raw[key] for key in ("tie_word_embeddings",) if key in raw}
        raw = outer | raw["text_config"]
        settings = {key: value for key, value in raw.items() if key != "model_type"}
        config = AutoConfig.for_model(raw["model_type"], **settings)
    else:
        config = AutoConfig.from_pretrained(source.where, **source.options())
    check_supported(config)
    if not _has_theta(raw):
        raise ValueError(
            f"the config.json of {source.name!r} has no rotary base (rope_theta): add the one that the model was "
            "trained with"
        )
    return config, nested


def tokenizer_of(source: Source) -> Any:
    tokenizer = AutoTokenizer.from_pretrained(source.where, **source.options())
    if tokenizer.pad_token_id is None and tokenizer.eos_token is not None:
        tokenizer.pad_token = tokenizer.eos_token  # never a new token: it would have no embedding row
    return tokenizer


@contextmanager
def quiet() -> Iterator[None]:
    """No progress bars and no load report of transformers: what is wrong becomes an error of ours."""
    bars, level = logging.is_progress_bar_enabled(), logging.get_verbosity()
    logging.disable_progress_bar()
    logging.set_verbosity_error()
    try:
        yield
    finally:
        logging.set_verbosity(level)
        if bars:
            logging.enable_progress_bar()


# A language model saved inside a larger one: its tensors bear one more prefix.
NESTED = {
    r"^(?:model\.)?(?:language_model|text_model)\.(?:model\.)?(?=layers\.|embed_tokens\.|norm\.)": "model.",
    r"^(?:model\.)?(?:language_model|text_model)\.lm_head\.": "lm_head.",
}
IGNORABLE = r"rotary_emb\.inv_freq|(^|\.)mtp\."


def _has_theta(raw: dict[str, Any]) -> bool:
    keys = ("rope_theta", "rotary_emb_base", "rope_base")
    nested = [value for value in raw.values() if isinstance(value, dict)]
    return any(raw.get(key) is not None for key in keys) or any(_has_theta(value) for value in nested)


def refuse_other_logits(target: Target) -> None:
    """A family without a record must give the logits of its own forward pass. Raises ValueError if it does not."""
    ids_BT = torch.arange(3, 19, device=target.device)[None] % target.facts.vocab
    with torch.no_grad():
        ours = target.head(target.forward(ids_BT, torch.arange(16, device=target.device)[None]).last_hidden_BTD)
        theirs = target.model(ids_BT).logits
    gap = float((ours.float() - theirs.float()).abs().max() / theirs.float().abs().max())
    tolerance = 1e-4 if target.dtype in (torch.float32, torch.float64) else 5e-2
    if not gap < tolerance:
        raise ValueError(
            f"target of type {target.model.config.model_type!r} is not supported: run by its parts, its logits differ "
            f"from its own forward pass by {gap:.2g} of their range; add a record for it to models/families.py"
        )
