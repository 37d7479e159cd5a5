"""Loading a target piece by piece, to where each piece belongs: never more than its ends and one layer are in memory
whole. Tensors are read by name from safetensors files.

    target = load_placed("owner/name", "sharded", device="cuda:0")                 # every process calls this
    target = load_placed("owner/name", "devices", devices=[torch.device("cuda:1")])
    target = load_placed("owner/name", "absent", known_by=store.fields.target)     # head, embedding, norm

What is wrong with a model is refused as by `load_target`. Without layers nothing computes the fingerprint: `known_by` says
it, and whoever says it must hold what it belongs to against the head (`refuse_other_states`).

Test: pytest tests/test_placement.py
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from accelerate import init_empty_weights
from safetensors import safe_open
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, GenerationConfig
from transformers.utils import cached_file

from ..data.encode import Sample
from ..data.packing import collate
from ..data.states import StateStore
from .facts import fingerprint_of, refuse_non_finite_tensor, trace
from .families import FAMILIES, Parts, find_parts
from .loading import (
    IGNORABLE,
    NESTED,
    Source,
    config_of,
    quiet,
    refuse_denoiser,
    refuse_other_logits,
    source_of,
    tokenizer_of,
)
from .placement import Placed, join_layers, run_on, shard_layer, sharing_mesh, spread
from .target import DTYPES, Target

Readers = dict[str, Callable[[], Tensor]]  # of a model's parameters, by name


def load_placed(
    name: str,
    placement: str,
    *,
    dtype: str = "bfloat16",
    device: str | torch.device = "cpu",
    devices: Sequence[torch.device] = (),
    known_by: str | None = None,
    revision: str | None = None,
    trust_remote_code: bool = False,
) -> Target:
    """A target whose layers are `placement`: sharded (every process calls this), on `devices`, or absent (`known_by`: the
    fingerprint of the model whose states are read). Its ends are on `device`.

    Raises ValueError as `load_target` does, and for GGUF files and weights that change their names as they are loaded.
    """
    home, kind = torch.device(device), DTYPES[dtype]
    mesh = sharing_mesh(home) if placement == "sharded" else None
    try:
        model, readers, tokenizer, source = _empty(name, revision, trust_remote_code)
    except OSError as error:
        raise ValueError(f"target {name!r} cannot be loaded: {str(error).splitlines()[0]}") from error
    shown, commit = ("tiny", None) if source is None else (source.name, source.commit)
    parts = find_parts(model, model.config)
    fill = _Filler(model, readers, shown, kind)
    fill(model, home, outside=parts.layers)
    _refuse_other_head(parts, readers, shown, kind)
    places = spread(len(parts.layers), devices) if devices else [home] * len(parts.layers)
    for layer, place in zip(parts.layers, places, strict=True) if placement != "absent" else ():
        fill(layer, place)
        if mesh is not None:
            shard_layer(layer, mesh)
        elif placement == "devices":
            layer.to(place)  # buffers
            run_on(layer, place)
    if mesh is not None:
        join_layers(parts.decoder, mesh)
    elif placement == "devices":
        run_on(parts.norm, home)
    known = known_by or fingerprint_of(model.config, fill.traces)
    target = Target(model, tokenizer, shown, commit, placed=Placed(placement, known, mesh, home))
    target.banned_ids = target.banned_ids.to(home)
    if source is not None and placement != "absent" and model.config.model_type not in FAMILIES:
        refuse_other_logits(target)
    return target


def refuse_other_states(target: Target, store: StateStore, samples: Sequence[Sample], look_at: int = 4) -> None:
    """Raises ValueError when captured states are not of the model that this head is of: the head's choices after some of
    them are not those that were captured beside."""
    right = rows = 0
    for sample in samples[:look_at]:
        out = store.fill(collate([sample]))
        if out.last_hidden_BTD is None or out.top_BT is None:
            return
        known_BT = out.top_BT >= 0
        said_R = target.head(out.last_hidden_BTD[known_BT].to(target.device)).argmax(-1).cpu()
        right, rows = right + int((said_R == out.top_BT[known_BT]).sum()), rows + len(said_R)
    if right < 0.9 * rows:
        raise ValueError(
            f"{store.folder.name} holds states of another target: the head of {target.facts.name} chooses as they say in "
            f"{right} of {rows} places; name the target that they were captured from"
        )


class _Filler:
    """Puts parameters of an empty model in their places, as they are asked for; keeps what the fingerprint needs."""

    def __init__(self, model: Any, readers: Readers, name: str, dtype: torch.dtype) -> None:
        self.readers, self.name, self.dtype = readers, name, dtype
        self.names = {id(p): key for key, p in model.named_parameters()}
        self.users: dict[int, list[tuple[nn.Module, str]]] = {}  # a tied parameter has two
        for module in model.modules():
            for key, p in module._parameters.items():
                if p is not None:
                    self.users.setdefault(id(p), []).append((module, key))
        self.traces: dict[str, bytes] = {}

    def __call__(self, module: nn.Module, device: torch.device, outside: nn.Module | None = None) -> None:
        """Fill `module`, but what is `outside`. Raises ValueError for a tensor that is of another shape or not finite."""
        left = {id(p) for p in outside.parameters()} if outside is not None else set()
        for empty in [p for p in module.parameters() if id(p) not in left]:
            key = self.names[id(empty)]
            value = self.readers[key]()
            if value.shape != empty.shape:
                raise ValueError(
                    f"weights of {self.name!r}: {key} is {tuple(value.shape)}, its config.json says {tuple(empty.shape)}"
                )
            refuse_non_finite_tensor(key, value, self.name)
            full = nn.Parameter(value.to(device, self.dtype, copy=True), requires_grad=False)
            self.traces[key] = trace(key, full)
            for owner, attribute in self.users[id(empty)]:
                owner._parameters[attribute] = full
        for owner in module.modules() if outside is not None else ():
            for attribute, buffer in owner._buffers.items():
                owner._buffers[attribute] = None if buffer is None else buffer.to(device)


def _empty(name: str, revision: str | None, trust_remote_code: bool) -> tuple[Any, Readers, Any, Source | None]:
    """A model without weights, what reads them, its tokenizer, and where it is from (None: made in memory)."""
    from . import pretrained

    if name == "tiny":
        made = pretrained.tiny_target(dtype=torch.float32)
        model = _built(made.model.config, False)
        weights: Readers = {key: (lambda p=p: p.detach()) for key, p in made.model.named_parameters()}  # type: ignore[misc]
        return model, weights, made.tokenizer, None
    source = source_of(name, revision, trust_remote_code)
    if source.gguf is not None:
        raise ValueError(f"target {name!r}: a GGUF file is loaded whole; use placement replicated, or its safetensors")
    config, nested = config_of(source)
    refuse_denoiser(name, config)
    model = _built(config, trust_remote_code)
    with suppress(OSError):  # it has none
        model.generation_config = GenerationConfig.from_pretrained(source.where, **source.options())
    return model, _readers(model, source, nested), tokenizer_of(source), source


def _built(config: Any, trust_remote_code: bool) -> Any:
    with quiet(), init_empty_weights(include_buffers=False):
        model = AutoModelForCausalLM.from_config(config, trust_remote_code=trust_remote_code)
    model.tie_weights()  # under the context above, it would make two of one
    return model


def _readers(model: Any, source: Source, nested: bool) -> Readers:
    """What reads each parameter. Raises ValueError when files and model do not have the same ones."""
    wanted = {key for key, _ in model.named_parameters(remove_duplicate=False)}
    found: Readers = {}
    strange: list[str] = []
    for file in _files(source):
        with safe_open(file, framework="pt") as tensors:
            keys = list(tensors.keys())
        for key in keys:
            names = [key, f"{model.base_model_prefix}.{key}"]
            names += [re.sub(pattern, to, key) for pattern, to in NESTED.items()] if nested else []
            own = next((one for one in names if one in wanted), None)
            if own is not None:
                found[own] = _Reader(file, key)
            elif not re.search(IGNORABLE, key):
                strange.append(key)
    missing = sorted(key for key, _ in model.named_parameters() if key not in found)
    for what, these in (("missing", missing), ("unexpected", strange)):
        if these:
            raise ValueError(
                f"weights of {source.name!r}: {len(these)} {what} keys: {', '.join(these[:8])}"
                f"{' ...' if len(these) > 8 else ''}; the files do not belong to this config.json, or their tensors are "
                "changed as they are loaded, which placement replicated alone does"
            )
    return found


class _Reader:
    """Reads one tensor of a file."""

    def __init__(self, file: str, key: str) -> None:
        self.file, self.key = file, key

    def __call__(self) -> Tensor:
        with safe_open(self.file, framework="pt") as tensors:
            return tensors.get_tensor(self.key)


def _files(source: Source) -> list[str]:
    """The safetensors files of a source, fetched where they are not here. Raises ValueError when it has none."""

    def get(file: str) -> str | None:
        return cached_file(source.where, file, revision=source.commit, _raise_exceptions_for_missing_entries=False)

    if single := get("model.safetensors"):
        return [single]
    index = get("model.safetensors.index.json")
    if index is None:
        raise ValueError(f"target {source.name!r} has no safetensors files, which alone are read piece by piece")
    names = sorted(set(json.loads(Path(index).read_text(encoding="utf-8"))["weight_map"].values()))
    return [file for name in names if (file := get(name))]


def _refuse_other_head(parts: Parts, readers: Readers, name: str, dtype: torch.dtype) -> None:
    """A head in the files of a model that ties it must be the embedding."""
    if parts.head.weight is not parts.embed.weight:
        return
    for key, read in readers.items():
        if key.startswith("lm_head.") and not torch.equal(read().to(dtype), parts.embed.weight.cpu()):
            raise ValueError(
                f"target {name!r}: its config.json says tie_word_embeddings, but its files hold an output head that "
                "differs from the embedding; set the flag to false if the head is right, or remove the head"
            )
