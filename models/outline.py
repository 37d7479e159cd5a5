"""Models without numbers: what a computation would hold and multiply, found by running it on shapes.

While an `Outline` is open, floating tensors have a shape, a dtype and no memory; integers and booleans (ids, masks,
positions, which rows are supervised) are real and computed, because they decide how large everything else is. So any
method's own loss runs as it stands, for a target of any size, on any machine, and what is said of it cannot drift from
the code. Every storage is counted from the operator that makes it until it is freed; products of matrices are counted
as multiplications and additions. What is decided by a floating number (which of the drafts were right) comes out as
zero, and equality as true: it moves no sizes that training has.

What it does not see: memory that an operator takes and gives back inside itself, and a GPU's own kernels, whose
place plain PyTorch's take.

    with Outline() as outline:
        target = outline_target(load_config("owner/name"), "owner/name", "bfloat16")

Test: pytest tests/test_plan.py
"""

from __future__ import annotations

import sys
import warnings
import weakref
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only
from torch.utils.flop_counter import flop_registry, sdpa_backward_flop, sdpa_flop
from transformers import AutoConfig, AutoModelForCausalLM, PretrainedConfig

from ..kernels import linear_loss
from . import attention
from .families import check_supported
from .pretrained import cache_folder, tiny_target
from .target import DTYPES, Target

aten: Any = torch.ops.aten
SMALL = 2**16  # floating tensors made of nothing, no larger than this, are real: tables, scalars
LAZY = 2**20  # results of comparisons larger than this are pages that nobody touched
PACKAGE = __name__.partition(".")[0]
INDEXED = (aten.index.Tensor, aten.index_put.default, aten.index_put_.default, aten._index_put_impl_.default)
FLOPS: dict[Any, Any] = flop_registry | {
    aten._scaled_dot_product_flash_attention_for_cpu: sdpa_flop,
    aten._scaled_dot_product_flash_attention_for_cpu_backward: sdpa_backward_flop,
}


@dataclass
class Held:
    """One storage that is alive."""

    alive: Any  # weak reference to it
    kind: str
    bytes: int
    shape: tuple[int, ...]
    dtype: torch.dtype
    place: tuple[str, str] = ("", "")  # the function and module of ours that made it, of those that are not small


class Outline(TorchDispatchMode):
    """See this file's head. `kind` names what is made from now on (`renamed`: another name for what a module of this package
    makes); `live` are bytes by kind, `at_peak` those of the moment when all of them together were most, `largest` the largest
    single storage, `flops` the operations so far."""

    def __init__(self, renamed: dict[tuple[str, str], str] | None = None) -> None:
        super().__init__()
        self.renamed = renamed or {}
        self.shapes = FakeTensorMode(allow_non_fake_inputs=True)
        self.memo = self.shapes.fake_tensor_converter.meta_converter.tensor_memo
        self.held: dict[int, Held] = {}
        self.kind = "other"
        self.flops = 0
        self.times = 1.0  # how often what runs now would run; see `_one_chunk`
        self.live: Counter[str] = Counter()
        self.measure()

    def measure(self) -> None:
        """Begin a measurement: peak, largest storage and operations of what was before are forgotten."""
        self.peak, self.flops = sum(self.live.values()), 0
        self.at_peak = Counter(self.live)
        self.largest: Held | None = None

    @contextmanager
    def counted_as(self, kind: str) -> Iterator[None]:
        """What is made inside counts as `kind`."""
        before, self.kind = self.kind, kind
        try:
            yield
        finally:
            self.kind = before

    def hold(self, tensor: Tensor, kind: str) -> None:
        """Count a tensor that was made before."""
        with self.counted_as(kind):
            self._hold(tensor)

    def move(self, tensor: Tensor, kind: str) -> None:
        """Count the storage of a tensor as `kind` from now on."""
        held = self.held.get(tensor.untyped_storage()._cdata)
        if held is not None:
            self.live[held.kind] -= held.bytes
            self.live[kind] += held.bytes
            held.kind = kind

    def kept(self, kind: str) -> list[Held]:
        """What is alive of a kind."""
        return [held for held in self.held.values() if held.kind == kind]

    def __enter__(self) -> Outline:
        self.quiet = warnings.catch_warnings()
        self.quiet.__enter__()
        warnings.filterwarnings("ignore", message="Accessing the data pointer of FakeTensor")
        self.whole = linear_loss.walk_rows, linear_loss.spans, attention.tiles_of
        linear_loss.walk_rows, linear_loss.spans = _one_block(linear_loss.walk_rows), self._one_chunk
        attention.tiles_of = self._one_of_each
        super().__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        linear_loss.walk_rows, linear_loss.spans, attention.tiles_of = self.whole
        self.quiet.__exit__(*error)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        given = [x for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor)]
        if not any(isinstance(x, FakeTensor) for x in given):
            out = self._made(func, args, kwargs) if not given else func(*args, **kwargs)
        elif func is aten._local_scalar_dense.default:
            return 1.0
        elif func is aten.equal.default:
            return True
        else:
            if func in INDEXED:
                args = (args[0], _as_places(args[1]), *args[2:])
            with self.shapes:
                out = func(*args, **kwargs)
            self.memo.clear()  # a tensor that it refers to, weakly, could not be swapped by `nn.Module.to`
            written = kwargs.get("out", args[0] if args else None)
            if func._schema.is_mutable and _real(written):
                return written  # a real tensor that a shape would be written into
            out = tree_map_only(FakeTensor, _whole_number, out)
        if (count := FLOPS.get(func._overloadpacket)) is not None:
            self.flops += round(self.times * count(*args, **kwargs, out_val=out))
        for x in tree_leaves(out):
            if isinstance(x, Tensor):
                self._hold(x)
        return out

    def _made(self, func: Any, args: Any, kwargs: Any) -> Any:
        """A tensor of no other: large floating ones are shapes."""
        with self.shapes:
            out = func(*args, **kwargs)
        large = isinstance(out, Tensor) and out.is_floating_point() and out.numel() > SMALL
        return out if large else func(*args, **kwargs)

    def _hold(self, tensor: Tensor) -> None:
        storage = tensor.untyped_storage()
        key = storage._cdata
        if key in self.held:
            return
        size = storage.nbytes()
        alive = weakref.ref(storage, lambda _: self._free(key))
        held = self.held[key] = Held(alive, self.kind, size, tuple(tensor.shape), tensor.dtype)
        if size >= SMALL:
            held.place = _place()
            held.kind = self.renamed.get((held.kind, held.place[1]), held.kind)
            if self.largest is None or size > self.largest.bytes:
                self.largest = held
        self.live[held.kind] += size
        total = sum(self.live.values())
        if total > self.peak:
            self.peak, self.at_peak = total, Counter(self.live)

    def _one_chunk(self, rows: int, chunk: int) -> Iterator[slice]:
        """Of the chunks of rows that `walk_chunks` takes in turn, in one room, the first alone, whose operations count for
        all."""
        if rows:
            self.times *= rows / min(chunk, rows)
            yield slice(0, min(chunk, rows))
            self.times /= rows / min(chunk, rows)

    def _one_of_each(self, ranges: attention.Ranges) -> Iterator[attention.Tile]:
        """Of the tiles of an attention, which are taken in turn, one of each shape, whose operations count for all of it."""
        alike: dict[tuple[Any, ...], list[attention.Tile]] = {}
        for tile in ranges.tiles:
            sizes = (part.stop - part.start for part in (tile.queries, tile.keys, tile.tail))
            alike.setdefault((*sizes, tile.causal), []).append(tile)
        for tiles in alike.values():
            self.times *= len(tiles)
            yield tiles[0]
            self.times /= len(tiles)

    def _free(self, key: int) -> None:
        held = self.held.pop(key, None)
        if held is not None:
            self.live[held.kind] -= held.bytes


def _real(x: Any) -> bool:
    return isinstance(x, Tensor) and not isinstance(x, FakeTensor)


def _as_places(indices: Any) -> list[Any]:
    """Masks among indices as the places where they are true, which shapes alone could not know."""
    places: list[Any] = []
    for index in indices:
        places += index.nonzero().unbind(1) if _real(index) and index.dtype == torch.bool else [index]
    return places


def _whole_number(x: FakeTensor) -> Tensor:
    """Integers and booleans that follow from floating numbers: real zeros."""
    if x.is_floating_point() or x.is_complex():
        return x
    if x.numel() <= LAZY:
        return torch.zeros(x.shape, dtype=x.dtype)
    return torch.from_numpy(np.zeros(x.shape, dtype=torch.empty(0, dtype=x.dtype).numpy().dtype))


def _one_block(walk_rows: Any) -> Any:
    """Of the blocks of rows whose slopes fit a processor's cache, the first alone: each writes into what is there, and
    makes nothing that stays."""

    def first(span: slice, z_TW: Tensor, y_TW: Any, slope_TW: Any, done: Any, job: Any, weight_T: Any) -> None:
        rows = min(len(z_TW), max(1, linear_loss.CACHED // z_TW.shape[-1]))
        told_TW, own_TW = (None if x is None else x[:rows] for x in (y_TW, slope_TW))
        walk_rows(slice(span.start, span.start + rows), z_TW[:rows], told_TW, own_TW, done, job, weight_T)

    return first


def _place() -> tuple[str, str]:
    """(function, module) of this package's innermost function that is running, without this file; empty in a backward
    pass of torch's own."""
    frame: Any = sys._getframe(3)
    while frame is not None:
        module = str(frame.f_globals.get("__name__"))
        if module.startswith(f"{PACKAGE}.") and module != __name__:
            return frame.f_code.co_name, module.removeprefix(f"{PACKAGE}.")
        frame = frame.f_back
    return "", ""


class Ids:
    """Stands for a tokenizer where there is none: token i is spelled i."""

    chat_template = None
    mask_token_id = 0
    unk_token_id = None
    unk_token = None

    def __init__(self, vocab: int) -> None:
        self.vocab = {str(i): i for i in range(vocab)}

    def get_vocab(self) -> dict[str, int]:
        return self.vocab


def outline_target(config: Any, name: str, dtype: str, tokenizer: Any = None) -> Target:
    """The target of a transformers config, in an open `Outline`: all that training asks of one but numbers. Raises
    ValueError for a model that cannot be run."""
    check_supported(config)
    model = AutoModelForCausalLM.from_config(config, dtype=DTYPES[dtype], attn_implementation="sdpa")
    return Target(model, tokenizer or Ids(config.vocab_size), name, runner="hf")


# HuggingFaceTB/SmolLM2-135M-Instruct, config.json: for machines that have not converted it yet
SMOLLM2: dict[str, Any] = {
    "model_type": "llama", "vocab_size": 49152, "hidden_size": 576, "intermediate_size": 1536, "num_hidden_layers": 30,
    "num_attention_heads": 9, "num_key_value_heads": 3, "max_position_embeddings": 8192, "tie_word_embeddings": True,
    "rms_norm_eps": 1e-5, "rope_parameters": {"rope_type": "default", "rope_theta": 100000.0},
    "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 2,
}  # fmt: skip


def load_config(name: str, revision: str | None = None) -> tuple[str, Any]:
    """(name to record, transformers config) of a target: a folder with a config.json, a hub id (whose config.json alone is
    fetched), or a built-in name. Raises ValueError where there is none."""
    if name == "tiny":
        return name, tiny_target().model.config
    folder = cache_folder() / "smollm2-135m-instruct" if name == "smollm2" else Path(name).expanduser()
    if name == "smollm2" and not (folder / "config.json").is_file():
        return name, AutoConfig.for_model(**SMOLLM2)
    if folder.suffix == ".gguf":
        raise ValueError(
            f"target {name!r}: a plan reads a config.json, name a folder that has one (weights are not needed)"
        )
    where = str(folder) if folder.is_dir() else name
    try:
        raw, _ = PretrainedConfig.get_config_dict(where, revision=revision)
        if "text_config" in raw:  # a language model saved inside a larger one
            raw = {key: raw[key] for key in ("tie_word_embeddings",) if key in raw} | raw["text_config"]
            config = AutoConfig.for_model(**raw)
        else:
            config = AutoConfig.from_pretrained(where, revision=revision, trust_remote_code=False)
    except (OSError, KeyError, ValueError) as error:
        reason = str(error).splitlines()[0]
        raise ValueError(
            f"target {name!r} has no config.json that can be read ({reason}): name a folder with one, a hub id (online), "
            "smollm2 or tiny"
        ) from None
    return (folder.resolve().name if folder.is_dir() and name != "smollm2" else name), config
