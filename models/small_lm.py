"""Whole language models as drafters: where their weights come from, and how a drafter takes one in.

`draft_model` and `pard` own a Hugging Face causal language model, run by the protocol of `models/target.py` with masks,
positions and a cache of ours. Its parts become the drafter's parts under their own names, so that the drafter's state is
that of an ordinary checkpoint. Three starts:

    layers   the target's embedding, its first n layers, its final norm and head. Nothing has to be found or downloaded,
             the tokenizer fits by construction, and the stream of an early layer is close enough to what the head reads
             that training starts well below random weights: cheap, and the default
    model    a checkpoint of a small model
    random   weights drawn for an architecture, for those who want another shape

Test: pytest tests/test_draft_model.py
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
from huggingface_hub.errors import StrictDataclassError
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM

from .families import check_supported
from .loading import load_target
from .target import Target

Start = Literal["layers", "model", "random"]
STARTS: tuple[Start, ...] = ("layers", "model", "random")
SHARE_OF_LAYERS = 8  # by default one layer in so many is kept
MOST_LAYERS = 1000  # more in a config.json is no small model but a mistake, or an attack

# Settings of a config.json that say nothing about the computation, or would run other code than transformers' own.
_DROPPED = ("transformers_version", "dtype", "torch_dtype", "use_cache")
_REFUSED = ("auto_map", "quantization_config", "attn_implementation")


@dataclass(frozen=True)
class LMConfig:
    """The language model of a drafter."""

    start: Start = "layers"
    """Weights at first. `layers`: the target's embedding, first layers, final norm and head; `model`: a checkpoint;
    `random`: drawn for `architecture`."""
    layers: int | None = None
    """With start=layers: how many of the target's layers; null = one in eight, at least one."""
    model: str | None = None
    """With start=model: folder or Hub id of a causal language model."""
    revision: str | None = None
    """With start=model: commit or tag of the Hub id."""
    architecture: dict[str, Any] | None = None
    """With start=random: settings as in a config.json, `model_type` among them. Otherwise it follows from the start; an
    export holds it."""
    train_embeddings: bool = True
    """False: embedding and head keep what they start from, which saves time per step."""

    def __post_init__(self) -> None:
        if self.start not in STARTS:
            raise ValueError(f"lm.start must be one of {', '.join(STARTS)}, got {self.start!r}")
        if (self.model is not None) != (self.start == "model"):
            raise ValueError(f"lm.start={self.start!r} with lm.model={self.model!r}: lm.model goes with lm.start=model")
        if self.layers is not None and (self.start != "layers" or self.layers < 1):
            raise ValueError(f"lm.layers must be at least 1 and goes with lm.start=layers, got {self.layers}")
        if self.revision is not None and self.start != "model":
            raise ValueError(f"lm.revision={self.revision!r} goes with lm.start=model")
        if self.start == "random" and not (self.architecture and "model_type" in self.architecture):
            raise ValueError(
                "lm.start=random needs lm.architecture with a model_type, such as {model_type: llama, ...}"
            )


class Body:
    """A drafter's language model: `model`, Hugging Face's own object, and once it is bound `run`, its protocol."""

    def __init__(self, model: Any) -> None:
        self.model = model
        self.run: Target | None = None

    def bind(self, tokenizer: Any) -> Target:
        """Make it run with the tokenizer whose ids it reads. Raises ValueError when these do not fit its embedding."""
        training = next(self.model.children()).training  # a drafter's mode is that of the parts
        self.run = Target(self.model, tokenizer, "the draft model", frozen=False)
        self.model.train(training)
        return self.run


def bound(body: Body | None) -> Target:
    """The model behind the target's protocol. Raises ValueError before `bind`."""
    if body is None or body.run is None:
        raise ValueError("this drafter is bound to no target: call drafter.bind(target) before drafting")
    return body.run


def adopt(module: nn.Module, model: Any, config: LMConfig) -> Body:
    """Make the parts of a language model parts of `module`, under their own names, and trainable as `config` says."""
    if next(iter(model.parameters(recurse=False)), None) is not None:
        raise ValueError(f"draft model of type {model.config.model_type!r} has weights outside its parts")
    model.requires_grad_(True)
    if not config.train_embeddings:
        for part in (model.get_input_embeddings(), model.get_output_embeddings()):
            part.requires_grad_(False)
    for name, child in model.named_children():
        module.add_module(name, child)
    return Body(model)


@contextmanager
def tables_kept(module: nn.Module) -> Iterator[None]:
    """A cast inside leaves tables that are no weights (rotary frequencies, embedding scales) in their own precision, as
    loading a checkpoint in half precision does."""
    kept = [
        (owner, name, table)
        for owner in module.modules()
        for name, table in owner.named_buffers(recurse=False)
        if table.is_floating_point() and name in owner._non_persistent_buffers_set
    ]
    yield
    for owner, name, table in kept:
        setattr(owner, name, table.to(getattr(owner, name).device))


def settings_of(model: Any) -> dict[str, Any]:
    """A model's architecture as it stands in a config.json: JSON types, no empty entries that are empty by default."""
    usual = type(model.config)().to_dict()
    given = {
        key: value
        for key, value in model.config.to_diff_dict().items()
        if key not in _DROPPED and key[0] != "_" and not (value is None and usual.get(key) is None)
    }
    tied = model.get_output_embeddings().weight is model.get_input_embeddings().weight
    return json.loads(json.dumps(given | {"architectures": [type(model).__name__], "tie_word_embeddings": tied}))


def random_model(settings: dict[str, Any]) -> Any:
    """A causal language model of these settings, fp32, with weights drawn from torch's generator.

    Raises ValueError for an unknown `model_type`, settings that it does not take, what the target's protocol cannot run,
    and settings that would run code of others.
    """
    if refused := sorted(key for key in settings if key in _REFUSED or key.startswith("_")):
        raise ValueError(f"lm.architecture: {', '.join(refused)} not allowed; give the architecture alone")
    layers = settings.get("num_hidden_layers", 1)
    if not isinstance(layers, int) or not 1 <= layers <= MOST_LAYERS:
        raise ValueError(f"lm.architecture: num_hidden_layers must be 1..{MOST_LAYERS}, got {layers!r}")
    kind = str(settings.get("model_type"))
    try:
        config = AutoConfig.for_model(kind, **{key: value for key, value in settings.items() if key != "model_type"})
        check_supported(config)
        return AutoModelForCausalLM.from_config(config, dtype=torch.float32, attn_implementation="sdpa")
    except (StrictDataclassError, TypeError, ValueError, KeyError) as error:
        reason = " ".join(str(error).split())[:300]
        raise ValueError(f"lm.architecture: no causal language model of type {kind!r} can be built: {reason}") from None


def first_layers(target: Target, layers: int | None) -> Any:
    """The target without its later layers, fp32, on weights of its own. Raises ValueError if it has fewer."""
    total = target.facts.layers
    count = layers or max(1, total // SHARE_OF_LAYERS)
    if count > total:
        raise ValueError(f"lm.layers={count}, but {target.facts.name} has {total} layers")
    settings = settings_of(target.model)
    per_layer = {k: v[:count] for k, v in settings.items() if "layer" in k and isinstance(v, list) and len(v) == total}
    model = random_model(settings | per_layer | {"num_hidden_layers": count})
    theirs, own = target.model.state_dict(), model.state_dict()
    if lacking := sorted(set(own) - set(theirs)):
        raise ValueError(
            f"lm.start=layers: {target.facts.name} has no {', '.join(lacking[:4])}; use lm.start=model or random"
        )
    model.load_state_dict({name: theirs[name].float() for name in own})
    return model


def small_model(config: LMConfig, target: Target) -> tuple[LMConfig, Any, Any]:
    """The model as `config.start` says, the config with its architecture, and the model's own tokenizer (None = the
    target's).

    Raises ValueError when the start does not give the architecture that `config` holds, or cannot be had.
    """
    tokenizer = None
    if config.start == "layers":
        model = first_layers(target, config.layers)
    elif config.start == "random":
        assert config.architecture is not None
        model = random_model(config.architecture)
    else:
        assert config.model is not None
        loaded = load_target(config.model, dtype="float32", revision=config.revision)
        model, tokenizer = loaded.model, loaded.tokenizer
    found = settings_of(model)
    if config.start != "random" and config.architecture not in (None, found):
        raise ValueError(
            f"lm.architecture is not that of lm.start={config.start}: leave it out, it follows from the start"
        )
    return replace(config, architecture=found), model.to(target.device), tokenizer


def behind(ids_BT: Tensor, counts_B: Tensor, more_BX: Tensor) -> Tensor:
    """int64 [B, T + X]: the first `counts_B` ids of each row, then `more_BX`; what follows is to be ignored."""
    b, x = more_BX.shape
    index_BX = counts_B[:, None] + torch.arange(x, device=ids_BT.device)
    return torch.cat([ids_BT, ids_BT.new_zeros(b, x)], dim=1).scatter(1, index_BX, more_BX)
