"""The shape of drafts that `draftsmith tune` found for this machine: `tuned.json` in an export, read by those that decode.

It holds one entry per machine, precision and batch, each behind a key of everything that speed depends on; an entry
counts only where its whole key is the same, so a file that came along from elsewhere, or that lies beside newer weights,
changes nothing. `generate` and `evaluate` take the entry's shape and threads where the user names no shape.

A request that samples with a seed of its own keeps the default shape, and the threads that are set, whatever the file
says: acceptance and residual coins are keyed by the round and the node (kernels/rng.py), and rounds are as long as drafts
are, so another K gives the same seed another answer (with `sample_match`, whose draws are keyed by position alone, low bits
still may). The answer to a seed must not depend on whether somebody has tuned.

Tests: tests/test_tune.py.
"""

from __future__ import annotations

import json
import os
import platform
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

from ..losses.probs import SamplingParams
from .exporters.folder import read_json, write_file
from .load import resolve
from .speculate import DecodeConfig

FILE = "tuned.json"
FORMAT = 1
SHAPE = ("k", "tree", "nodes", "width", "threshold", "choices", "chances")  # of DecodeConfig: what an entry sets
NAMED = (*SHAPE, "trees", "prompt_rows", "verifier", "fixed_width")  # settings that make the shape the user's own
MOST_NODES = 512  # of a stored shape; larger ones were not found here

Key = dict[str, Any]


@dataclass(frozen=True)
class Tuned:
    """One entry. `key`: `key_of`; `threads`: of torch on the CPU; `figures`: what was measured, for readers."""

    key: Key
    threads: int
    decode: DecodeConfig
    figures: Mapping[str, Any] = field(default_factory=dict)

    def applied(self, decode: DecodeConfig) -> DecodeConfig:
        """`decode` with this shape."""
        return replace(decode, **{name: getattr(self.decode, name) for name in SHAPE})

    def row(self) -> dict[str, Any]:
        """The entry as JSON has it."""
        shape = {name: value for name in SHAPE if (value := getattr(self.decode, name)) is not None}
        return {"key": self.key, "threads": self.threads, "shape": shape, "figures": dict(self.figures)}


def describe(decode: DecodeConfig) -> str:
    """A shape in a few words."""
    if decode.tree in ("chain", "cut"):
        more = "" if decode.threshold is None else f", cut below {decode.threshold:g}"
        return f"{decode.tree} K={decode.k}{more}"
    return f"{decode.tree} of {decode.nodes} nodes, depth {decode.k}"


def flags(decode: DecodeConfig) -> str:
    """The options of `generate` that give this shape; "" for shapes that a command line cannot say (templates)."""
    if decode.choices is not None or decode.chances is not None:
        return ""
    cut = "" if decode.threshold is None else f" --threshold {decode.threshold:g}"
    return f"--tree {decode.tree} --k {decode.k}{cut}"


def cpu_name() -> str:
    """Model name of the CPU."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        return next(line.split(":", 1)[1].strip() for line in lines if line.startswith("model name"))
    except (OSError, StopIteration):
        return platform.processor() or platform.machine()


def usable_cores() -> int:
    """CPUs that this process may run on."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def key_of(target: Any, export: Mapping[str, Any], batch: int = 1) -> Key:
    """What speed and acceptance depend on: hardware, torch, precision, batch, the path that runs the target, its weights,
    and the drafter's (`export`: config.json's `draftsmith`). No host name, no path."""
    return {
        "cpu": cpu_name(),
        "cores": usable_cores(),
        "gpu": torch.cuda.get_device_name(target.device) if target.device.type == "cuda" else None,
        "torch": torch.__version__,
        "dtype": target.precision,
        "batch": batch,
        "runner": target.runner,
        "target": target.facts.fingerprint,
        "export": export.get("sha256"),
    }


def read_entries(folder: Path) -> list[Tuned]:
    """The entries of a folder's file; none without a file. ValueError where it is damaged or made up."""
    path = folder / FILE
    if not path.is_file():
        return []
    stored = read_json(path)
    if stored.get("format") != FORMAT:
        raise ValueError(f"format {stored.get('format')!r}, this version reads {FORMAT}")
    try:
        return [_entry(row) for row in stored["entries"]]
    except (KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"an entry is incomplete ({error})") from None


def _entry(row: Mapping[str, Any]) -> Tuned:
    for name in ("key", "shape", "figures"):
        if not isinstance(row[name], dict):
            raise TypeError(f"{name} is no JSON object")
    shape = dict(row["shape"])
    if strange := sorted(set(shape) - set(SHAPE)):
        raise ValueError(f"an entry's shape has {', '.join(strange)}")
    for name in ("choices", "chances"):
        if name in shape:
            shape[name] = tuple(tuple(path) for path in shape[name])
    decode = DecodeConfig(**shape)
    counts = [row["threads"], decode.k, decode.nodes, decode.width]
    if any(type(n) is not int or not 1 <= n <= MOST_NODES for n in counts) or len(decode.choices or ()) > MOST_NODES:
        raise ValueError(f"an entry's threads, k, nodes or width ({counts}) lie outside 1..{MOST_NODES}")
    return Tuned(dict(row["key"]), row["threads"], decode, dict(row["figures"]))


def store(folder: Path, tuned: Tuned) -> Path:
    """Put an entry into a folder's file, in the place of one with the same key; the file is replaced whole."""
    try:
        others = [entry for entry in read_entries(folder) if entry.key != tuned.key]
    except ValueError:
        others = []  # what cannot be read helps nobody
    rows = [entry.row() for entry in (*others, tuned)]
    write_file(folder / FILE, json.dumps({"format": FORMAT, "entries": rows}, indent=1, allow_nan=False) + "\n")
    return folder / FILE


def stored_shape(
    model: str,
    revision: str | None,
    export: Mapping[str, Any],
    target: Any,
    params: SamplingParams,
    batch: int = 1,
) -> tuple[Tuned | None, str | None]:
    """The entry of an export (folder or Hub id) for this machine, target, batch and request, and one line to say about it.
    (None, None): there is no file. There is no entry for a request that samples with a seed of its own."""
    folder = resolve(model, revision)
    again = f"run draftsmith tune {model}"
    try:
        entries = read_entries(folder)
    except (ValueError, OSError) as error:
        return None, f"{FILE} is not used: {error}; {again}"
    if not entries:
        return None, None
    key = key_of(target, export, batch)
    entry = next((entry for entry in entries if entry.key == key), None)
    if entry is None:
        nearest = min(entries, key=lambda entry: len(differing(entry.key, key)))
        names = differing(nearest.key, key)
        shown = ", ".join(f"{n} {_short(nearest.key.get(n))}, here {_short(key[n])}" for n in names if n in key)
        return None, f"{FILE} is not used: made for other conditions ({shown or ', '.join(names)}); {again}"
    if entry.threads > usable_cores():
        return None, f"{FILE} is not used: {entry.threads} threads on {usable_cores()} cores; {again}"
    if keeps_default(params):
        return (
            None,
            f"{FILE} is not used: this request samples with a seed, and the answer to a seed must not depend on it",
        )
    threads = "" if target.device.type == "cuda" else f", {entry.threads} thread{'s' if entry.threads > 1 else ''}"
    return entry, f"tuned for this machine: {describe(entry.decode)}{threads} ({FILE}; --k or --tree override it)"


def keeps_default(params: SamplingParams) -> bool:
    """Whether a request's answer depends on the shape of its drafts: it samples, with a seed of its own."""
    return params.seed is not None and params.temperature > 0


def refuses_tuned(cfg: Any, named: Collection[str]) -> bool:
    """Whether a command's settings make the shape the user's own: one of `NAMED` was named, or is not the usual one."""
    usual = type(cfg)
    return any(name in named or getattr(cfg, name) != getattr(usual, name) for name in NAMED if hasattr(usual, name))


def use_threads(tuned: Tuned, target: Any) -> None:
    """Set the entry's number of threads, where the target runs on the CPU."""
    if target.device.type == "cpu" and tuned.threads != torch.get_num_threads():
        torch.set_num_threads(tuned.threads)


def differing(a: Key, b: Key) -> list[str]:
    """Names of the fields in which two keys differ."""
    return [name for name in sorted({*a, *b}) if a.get(name) != b.get(name)]


def _short(value: Any) -> str:
    text = str(value)
    return text if len(text) <= 40 else f"{text[:12]}…"
