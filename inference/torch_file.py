"""Tensors out of a foreign `.pt`/`.bin` file, without running anything that is in it.

Such a file is a zip of one pickle and raw storages. A pickle is a program; this reader lets it build dictionaries of
tensors and nothing else. Every name it asks for is looked up in a table of inert stand-ins, never imported; the
tensors are cut from the raw bytes here, after their sizes were compared with what the archive holds. Only
`draftsmith convert` uses it; the rest of the project reads safetensors and JSON.

Tests: tests/test_security.py (ten hostile files, none of which may run), tests/test_convert.py (real ones).
"""

from __future__ import annotations

import io
import pickle
import pickletools
import zipfile
from collections import OrderedDict
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

MAX_PROGRAM = 32 << 20  # bytes of pickle; a head's state dict needs a few kilobytes
MAX_MEMBERS = 100_000

STORAGES = {
    "DoubleStorage": torch.float64,
    "FloatStorage": torch.float32,
    "HalfStorage": torch.float16,
    "BFloat16Storage": torch.bfloat16,
    "LongStorage": torch.int64,
    "IntStorage": torch.int32,
    "ShortStorage": torch.int16,
    "CharStorage": torch.int8,
    "ByteStorage": torch.uint8,
    "BoolStorage": torch.bool,
}
OPCODES = frozenset(
    [
        "PROTO",
        "FRAME",
        "STOP",
        "MARK",
        "POP",
        "POP_MARK",
        "DUP",
        "NONE",
        "NEWTRUE",
        "NEWFALSE",
        "INT",
        "BININT",
        "BININT1",
        "BININT2",
        "LONG",
        "LONG1",
        "LONG4",
        "FLOAT",
        "BINFLOAT",
        "STRING",
        "BINSTRING",
        "SHORT_BINSTRING",
        "UNICODE",
        "SHORT_BINUNICODE",
        "BINUNICODE",
        "BINUNICODE8",
        "EMPTY_LIST",
        "APPEND",
        "APPENDS",
        "LIST",
        "EMPTY_TUPLE",
        "TUPLE",
        "TUPLE1",
        "TUPLE2",
        "TUPLE3",
        "EMPTY_DICT",
        "DICT",
        "SETITEM",
        "SETITEMS",
        "GET",
        "BINGET",
        "LONG_BINGET",
        "PUT",
        "BINPUT",
        "LONG_BINPUT",
        "MEMOIZE",
        "GLOBAL",
        "STACK_GLOBAL",
        "REDUCE",
        "BUILD",
        "BINPERSID",
    ]
)


class UnsafeFileError(ValueError):
    """The file asks for more than tensors, or lies about their sizes."""


@dataclass(frozen=True)
class _Kind:
    """Stand-in of a storage class."""

    dtype: torch.dtype


@dataclass(frozen=True)
class _Storage:
    kind: _Kind
    key: str
    count: int


class _Reader(pickle.Unpickler):
    """Builds dictionaries of tensors from one archive; refuses every name outside its table."""

    def __init__(self, program: bytes, archive: zipfile.ZipFile, root: str):
        super().__init__(io.BytesIO(program), encoding="utf-8")
        self.archive = archive
        self.root = root
        self.bytes: dict[str, bytearray] = {}

    def find_class(self, module: str, name: str) -> Any:
        if module in ("torch", "torch.storage") and name in STORAGES:
            return _Kind(STORAGES[name])
        if (module, name) == ("collections", "OrderedDict"):
            return _ordered
        if (module, name) in (("torch._utils", "_rebuild_tensor_v2"), ("torch._utils", "_rebuild_tensor")):
            return self.tensor
        if (module, name) == ("torch._utils", "_rebuild_parameter"):
            return _parameter
        raise UnsafeFileError(f"the file asks for {module}.{name}; only dictionaries of tensors are read")

    def persistent_load(self, pid: Any) -> _Storage:
        if not (isinstance(pid, tuple) and len(pid) == 5 and pid[0] == "storage" and isinstance(pid[1], _Kind)):
            raise UnsafeFileError("the file refers to a storage in a way that is not known")
        _, kind, key, _, count = pid
        if not (isinstance(key, str) and key.isdigit() and isinstance(count, int) and count >= 0):
            raise UnsafeFileError("the file refers to a storage that can't exist")
        return _Storage(kind, key, count)

    def tensor(self, storage: Any, offset: Any, size: Any, stride: Any, *_: Any) -> Tensor:
        """The stand-in for torch's rebuild function: bounds first, then a copy of the raw bytes."""
        if not (isinstance(storage, _Storage) and isinstance(size, tuple) and isinstance(stride, tuple)):
            raise UnsafeFileError("a tensor without storage, size or stride")
        numbers = (offset, *size, *stride)
        if len(size) != len(stride) or not all(type(n) is int and 0 <= n < 1 << 48 for n in numbers):
            raise UnsafeFileError("a tensor whose sizes or strides are no plain numbers")
        item = torch.empty((), dtype=storage.kind.dtype).element_size()
        name = f"{self.root}/data/{storage.key}"
        try:
            info = self.archive.getinfo(name)
        except KeyError:
            raise UnsafeFileError(f"storage {name} is not in the file") from None
        last = offset + sum((n - 1) * s for n, s in zip(size, stride, strict=True)) if 0 not in size else offset - 1
        elements = 1
        for n in size:
            elements *= n
        if storage.count * item != info.file_size or last >= storage.count or elements > storage.count:
            raise UnsafeFileError(
                f"a tensor of size {list(size)[:8]} needs more than the {info.file_size} bytes of storage {storage.key}"
            )
        if not info.file_size or not elements:
            return torch.empty(size, dtype=storage.kind.dtype)
        if storage.key not in self.bytes:
            self.bytes[storage.key] = bytearray(self.archive.read(info))
        flat = torch.frombuffer(self.bytes[storage.key], dtype=storage.kind.dtype)
        return torch.as_strided(flat, size, stride, offset).clone(memory_format=torch.contiguous_format)


def _ordered(*items: Any) -> OrderedDict[Any, Any]:
    return OrderedDict(*items)


def _parameter(data: Any, *_: Any) -> Any:
    if not isinstance(data, Tensor):
        raise UnsafeFileError("a parameter that is no tensor")
    return data


def read_torch_file(path: Path) -> dict[str, Tensor]:
    """The tensors of a state dict saved by `torch.save` (1.6 or newer), names to CPU tensors.

    Raises:
        UnsafeFileError: anything but a (possibly nested under `state_dict` or `model`) dictionary of tensors.
    """
    try:
        with zipfile.ZipFile(path) as archive:
            return _read_archive(path, archive)
    except zipfile.BadZipFile:
        raise UnsafeFileError(
            f"{path} is no archive of torch 1.6 or newer; load it where you trust it and save it as safetensors"
        ) from None
    except UnsafeFileError as error:
        raise UnsafeFileError(f"{path} refused: {error}") from None
    except (pickle.UnpicklingError, EOFError, ValueError, TypeError, AttributeError, KeyError, IndexError,
            OverflowError, MemoryError, RecursionError, RuntimeError, NotImplementedError) as error:  # fmt: skip
        raise UnsafeFileError(f"{path} refused: unreadable ({type(error).__name__}: {str(error)[:120]})") from None


def _read_archive(path: Path, archive: zipfile.ZipFile) -> dict[str, Tensor]:
    members = archive.infolist()
    programs = [m for m in members if m.filename.endswith("data.pkl") and m.filename.count("/") == 1]
    if len(members) > MAX_MEMBERS or len(programs) != 1:
        raise UnsafeFileError(f"{len(members)} members and {len(programs)} programs, needed: one program")
    for member in members:
        parts = member.filename.split("/")
        if ".." in parts or member.filename.startswith("/") or "\\" in member.filename:
            raise UnsafeFileError(f"member {member.filename[:80]!r} leaves the archive")
        if member.compress_type != zipfile.ZIP_STORED or member.flag_bits & 1:
            raise UnsafeFileError(f"member {member.filename[:80]!r} is compressed or encrypted; torch never does so")
        if member.file_size > path.stat().st_size:
            raise UnsafeFileError(f"member {member.filename[:80]!r} announces {member.file_size} bytes")
    if len({m.filename for m in members}) != len(members):
        raise UnsafeFileError("two members of one name")
    if programs[0].file_size > MAX_PROGRAM:
        raise UnsafeFileError(f"a program of {programs[0].file_size} bytes, at most {MAX_PROGRAM} are read")
    root = programs[0].filename.split("/")[0]
    if f"{root}/byteorder" in archive.namelist() and archive.read(f"{root}/byteorder").strip() != b"little":
        raise UnsafeFileError("big-endian storages")
    program = archive.read(programs[0])
    for opcode, _, at in pickletools.genops(program):
        if opcode.name not in OPCODES:
            raise UnsafeFileError(f"operation {opcode.name} at byte {at}; tensors need none of its kind")
    value = _Reader(program, archive, root).load()
    for key in ("state_dict", "model", "module"):
        if isinstance(value, dict) and isinstance(value.get(key), dict):
            value = value[key]
    if not isinstance(value, dict) or not value:
        raise UnsafeFileError(f"it holds a {type(value).__name__}, needed: a dictionary of tensors")
    if wrong := [f"{_short(k)} ({type(v).__name__})" for k, v in value.items() if not _is_entry(k, v)]:
        raise UnsafeFileError(f"not tensors: {', '.join(wrong[:5])}")
    return dict(value)


def _short(key: object) -> str:
    return key[:40] if isinstance(key, str) else type(key).__name__  # never repr: nested tuples can grow without bound


def _is_entry(key: object, value: object) -> bool:
    return type(key) is str and type(value) is Tensor
