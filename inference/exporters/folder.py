"""Export folders on disk: written whole or not at all, read only after their headers were checked.

Safetensors and JSON only. A header is measured against the file before anything is allocated, so a hundred bytes
that announce a terabyte are refused at once; a path inside a folder can't leave it.

Tests: tests/test_export.py (atomic write), tests/test_security.py (hostile files).
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import shutil
import struct
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from .layout import Slot

CONFIG = "config.json"
WEIGHTS = "model.safetensors"
CARD = "README.md"
RUN = "run.yaml"
REPLAY = "replay/replay.safetensors"  # in a folder of its own: engines load every *.safetensors beside config.json
REPORT = "report.json"
MAX_JSON = 16 << 20
MAX_HEADER = 64 << 20
SIZES = {
    "F64": 8, "F32": 4, "F16": 2, "BF16": 2, "F8_E4M3": 1, "F8_E5M2": 1,
    "I64": 8, "I32": 4, "I16": 2, "I8": 1, "U64": 8, "U32": 4, "U16": 2, "U8": 1, "BOOL": 1,
}  # fmt: skip
KINDS = {"F64": "float", "F32": "float", "F16": "float", "BF16": "float", "I64": "int64", "BOOL": "bool"}


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object from a file of at most 16 MiB. ValueError names the file."""
    try:
        if path.stat().st_size > MAX_JSON:
            raise ValueError(f"{path} is larger than {MAX_JSON >> 20} MiB; not a configuration")
        value = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ValueError(f"{path} does not exist") from None
    except (json.JSONDecodeError, UnicodeDecodeError, RecursionError) as error:
        raise ValueError(f"{path} is not JSON: {error}") from None
    if not isinstance(value, dict):
        raise ValueError(f"{path} holds a {type(value).__name__}, needed: a JSON object")
    return value


def read_header(path: Path) -> dict[str, tuple[str, tuple[int, ...]]]:
    """Names, dtypes and shapes of a safetensors file, checked against its length before anything is allocated.

    Returns:
        name -> (dtype code, shape).

    Raises:
        ValueError: the file is missing, too short for what it announces, or its tensors do not tile its data.
    """
    try:
        total = path.stat().st_size
        with path.open("rb") as file:
            start = file.read(8)
            if len(start) < 8:
                raise ValueError(f"{path} has {total} bytes; not a safetensors file")
            (length,) = struct.unpack("<Q", start)
            if length > min(MAX_HEADER, total - 8):
                raise ValueError(f"{path} announces a header of {length} bytes but has {total} bytes in all")
            header = json.loads(file.read(length))
    except FileNotFoundError:
        raise ValueError(f"{path} does not exist") from None
    except (json.JSONDecodeError, UnicodeDecodeError, RecursionError) as error:
        raise ValueError(f"{path}: unreadable safetensors header: {error}") from None
    if not isinstance(header, dict):
        raise ValueError(f"{path}: the safetensors header is no object")
    header.pop("__metadata__", None)
    out: dict[str, tuple[str, tuple[int, ...]]] = {}
    spans = []
    for name, entry in header.items():
        try:
            dtype, shape = entry["dtype"], tuple(int(n) for n in entry["shape"])
            begin, end = (int(n) for n in entry["data_offsets"])
            bytes_needed = SIZES[dtype] * math.prod(shape)
        except (KeyError, TypeError, ValueError):
            raise ValueError(f"{path}: tensor {name} has an unreadable entry {str(entry)[:120]}") from None
        if min(shape, default=0) < 0 or begin < 0 or end - begin != bytes_needed or end > total - 8 - length:
            raise ValueError(f"{path}: tensor {name} of shape {list(shape)} does not fit the file of {total} bytes")
        out[name] = (dtype, shape)
        spans.append((begin, end))
    at = 0
    for begin, end in sorted(spans):
        if begin != at:
            raise ValueError(f"{path}: tensors overlap or leave a gap at byte {begin}; the file was damaged or made up")
        at = end
    if at != total - 8 - length:
        raise ValueError(
            f"{path}: {total - 8 - length} bytes of data, tensors cover {at}; the file is truncated or padded"
        )
    return out


def read_tensors(path: Path) -> dict[str, Tensor]:
    """All tensors of a safetensors file on the CPU, after `read_header` has passed."""
    read_header(path)
    try:
        return load_file(path)
    except (SafetensorError, OSError) as error:
        raise ValueError(f"{path}: {error}") from None


def compare_slots(header: Mapping[str, tuple[str, tuple[int, ...]]], slots: Mapping[str, Slot], where: str) -> None:
    """Refuse a file whose tensors are not exactly `slots`, naming every missing, extra and misshapen one."""
    faults = []
    if missing := sorted(set(slots) - set(header)):
        faults.append(f"missing: {', '.join(missing)}")
    if extra := sorted(set(header) - set(slots)):
        faults.append(f"not expected: {', '.join(extra)}")
    for name in sorted(set(slots) & set(header)):
        dtype, shape = header[name]
        if shape != slots[name].shape:
            faults.append(f"{name} has shape {list(shape)}, config.json says {list(slots[name].shape)}")
        elif KINDS.get(dtype) != slots[name].kind:
            faults.append(f"{name} is {dtype}, needed: {slots[name].kind}")
    if faults:
        raise ValueError(f"{where} does not hold what its config.json declares; " + "; ".join(faults))


def refuse_non_finite(tensors: Mapping[str, Tensor], where: str) -> None:
    """ValueError naming each tensor with a NaN or an infinity, and how many values; or that has no value at all."""
    if empty := sorted(name for name, tensor in tensors.items() if not tensor.numel()):
        raise ValueError(
            f"{where}: {', '.join(empty)} without a value: under ZeRO-3 tensors must be put together before they are written"
        )
    bad = {n: int((~torch.isfinite(t)).sum()) for n, t in tensors.items() if t.is_floating_point()}
    named = [f"{name} ({count} values)" for name, count in sorted(bad.items()) if count]
    if named:
        raise ValueError(
            f"{where}: NaN or infinite values in {', '.join(named)}; train again from an earlier checkpoint"
        )


def sha256_of(path: Path) -> str:
    """Hex sha256 of a file, read in pieces."""
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while piece := file.read(1 << 20):
            digest.update(piece)
    return digest.hexdigest()


def is_export(folder: Path) -> bool:
    """True when the folder is one of our exports (its config.json bears the key `draftsmith`)."""
    try:
        return "draftsmith" in read_json(folder / CONFIG)
    except (ValueError, OSError):
        return False


def refuse_foreign_folder(folder: Path) -> None:
    """An export may replace an export or an empty folder, nothing else."""
    if folder.is_symlink() or (folder.exists() and not folder.is_dir()):
        raise ValueError(f"{folder} is no plain folder; choose another place for the export")
    if folder.is_dir() and any(folder.iterdir()) and not is_export(folder):
        raise ValueError(
            f"{folder} holds files that are no draftsmith export; choose an empty folder or move them away"
        )


def write_folder(folder: Path, fill: Callable[[Path], None]) -> None:
    """Let `fill` write into a hidden sibling, flush everything to disk, then rename it into place.

    The destination is absent, empty, or an older export, which is replaced. On any error it stays as it was.
    """
    refuse_foreign_folder(folder)
    folder.parent.mkdir(parents=True, exist_ok=True)
    fresh = folder.parent / f".{folder.name}.new-{os.getpid()}"
    old = folder.parent / f".{folder.name}.old-{os.getpid()}"
    for leftover in (fresh, old):
        shutil.rmtree(leftover, ignore_errors=True)
    try:
        fresh.mkdir()
        fill(fresh)
        for path in [*fresh.rglob("*"), fresh]:
            sync(path)
        if folder.exists():
            folder.rename(old)
        try:
            fresh.rename(folder)
        except OSError:
            if old.exists():
                old.rename(folder)
            raise
        sync(folder.parent)
    finally:
        shutil.rmtree(fresh, ignore_errors=True)
        shutil.rmtree(old, ignore_errors=True)


def write_file(path: Path, text: str) -> None:
    """Replace one text file atomically (sibling, fsync, rename)."""
    fresh = path.with_name(f".{path.name}.new-{os.getpid()}")
    try:
        fresh.write_text(text, encoding="utf-8")
        sync(fresh)
        fresh.replace(path)
        sync(path.parent)
    finally:
        fresh.unlink(missing_ok=True)


def sync(path: Path) -> None:
    """fsync a file or a folder."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def save_tensors(path: Path, tensors: Mapping[str, Tensor]) -> None:
    """Write tensors as safetensors, each contiguous and with storage of its own."""
    path.parent.mkdir(parents=True, exist_ok=True)
    save_file(
        {n: t.detach().to("cpu").contiguous().clone() for n, t in tensors.items()}, path, metadata={"format": "pt"}
    )
    path.chmod(0o644)  # save_file leaves it readable to its owner alone
