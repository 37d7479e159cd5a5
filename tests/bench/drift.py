"""Does training take more and more memory, or open more and more files?

2,000 steps of EAGLE-3 on the tiny target by the real script, from live and from captured states, in fp32 and in bf16. The
documents differ in length, so that every step multiplies other numbers of rows; evaluations, probes and checkpoints come
every 200 steps. The script runs in a process of its own and is looked at from outside, 10 times a second: resident memory
(VmRSS, mapped pages included), open files, and mapped shards, each sample at the step that the log has reached. The median
of the last 200 steps is held against that of steps 200 to 400: at most 1 % more memory, no more files or shards.

    OMP_NUM_THREADS=1 python tests/bench/drift.py              # about 6 minutes on one core
    python tests/bench/drift.py --quick                        # 300 steps each, windows of 50; no figure means anything
    ONEDNN_PRIMITIVE_CACHE_CAPACITY=1024 LRU_CACHE_CAPACITY=1024 python tests/bench/drift.py --only live-bf16   # as torch has it

The last line is JSON; the exit code is 1 where a bar fails. Linux alone.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

from main_job import bar
from rich.console import Console
from rich.table import Table

ROOT = Path(__file__).resolve().parents[2]
RECIPE = (
    *("target.name=tiny", "data.limit=60", "data.max_length=128", "batch.row_length=128", "batch.rows=1"),
    *("drafter.steps=2", "evaluate.every=200", "evaluate.conversations=4", "evaluate.probe_every=200"),
    *("evaluate.probe_prompts=1", "evaluate.probe_tokens=8", "save.steps=200", "log.every=1", "log.progress=false"),
)
PRECISIONS = {
    "fp32": ("precision=fp32", "target.dtype=float32"),
    "bf16": ("precision=bf16", "target.dtype=bfloat16"),
}
CASES = {f"{source}-{precision}": (source, precision) for source in ("live", "captured") for precision in PRECISIONS}
DRIFT = 0.01  # of resident memory


@dataclass(frozen=True)
class Sample:
    """What a process holds, when its log has come to `step`."""

    step: int
    resident: int  # bytes
    files: int
    shards: int


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", choices=CASES, default=list(CASES), metavar="CASE", help=", ".join(CASES))
    parser.add_argument("--quick", action="store_true", help="few steps, no bound on figures is meant")
    args = parser.parse_args()
    steps, window = (300, 50) if args.quick else (2000, 200)

    table = Table("training", "MB, early", "MB, late", "drift", "most MB", "files", "shards", "ms a step")
    figures: dict[str, Any] = {}
    bars: list[dict[str, Any]] = []
    for name in args.only:
        began = time.monotonic()
        samples = watched(*CASES[name], steps)
        early, late = (within(samples, first, first + window) for first in (window, steps - window))
        change = late["resident"] / early["resident"] - 1
        most = max(sample.resident for sample in samples)
        pace = (time.monotonic() - began) / steps
        figures[name] = {"early": early, "late": late, "drift": change, "most": most, "seconds_a_step": pace}
        counts = [f"{early[kind]:g} -> {late[kind]:g}" for kind in ("files", "shards")]
        shown = [f"{early['resident'] / 1e6:.1f}", f"{late['resident'] / 1e6:.1f}", f"{change:+.2%}"]
        table.add_row(name, *shown, f"{most / 1e6:.1f}", *counts, f"{1000 * pace:.0f}")
        bars += [
            bar(f"{name}: memory drift over {steps} steps", round(change, 5), at_most=DRIFT),
            bar(f"{name}: files opened and kept", late["files"] - early["files"], at_most=0),
            bar(f"{name}: shards mapped and kept", late["shards"] - early["shards"], at_most=0),
        ]
    console = Console(width=120, highlight=False)
    console.print(table)
    for one in bars:
        console.print(
            f"{'holds' if one['holds'] else 'FAILS'}  {one['name']}: {one['value']} (at most {one['at_most']})"
        )
    print(json.dumps({"name": "drift", "quick": args.quick, "steps": steps, "figures": figures, "bars": bars}))
    return 0 if args.quick or all(one["holds"] for one in bars) else 1


def watched(source: str, precision: str, steps: int) -> list[Sample]:
    """One training, and what was seen of it."""
    with tempfile.TemporaryDirectory() as folder:
        run = Path(folder) / "run"
        settings = [*RECIPE, *PRECISIONS[precision], f"states.source={source}", f"budget.steps={steps}", f"run={run}"]
        command = [sys.executable, ROOT / "train/distill_draft.py", "--config", ROOT / "configs/quick.yaml", *settings]
        samples: list[Sample] = []
        with (Path(folder) / "words").open("w+") as words:
            process = subprocess.Popen(command, stdout=words, stderr=subprocess.STDOUT)
            try:
                while process.poll() is None:
                    time.sleep(0.1)
                    step = last_step(run / "metrics.jsonl")
                    if 0 < step < steps:  # not the export, which comes after the last
                        samples += look(process.pid, step)
            finally:
                process.kill()
                process.wait()
            if process.returncode:
                words.seek(0)
                raise SystemExit(f"{source}, {precision}: the training ended with {process.returncode}\n{words.read()}")
    return samples


def last_step(log: Path) -> int:
    """The step of the last whole line; 0 = none yet."""
    if not log.exists():
        return 0
    with log.open("rb") as file:
        file.seek(max(os.fstat(file.fileno()).st_size - 8192, 0))
        lines = file.read().split(b"\n")[:-1]
    return int(json.loads(lines[-1])["step"]) if lines else 0


def look(pid: int, step: int) -> list[Sample]:
    """A sample; none where the process has just ended."""
    place = Path(f"/proc/{pid}")
    try:
        status = (place / "status").read_text()
        resident = next(int(line.split()[1]) for line in status.splitlines() if line.startswith("VmRSS:")) * 1024
        files = len(os.listdir(place / "fd"))
        lines = (place / "maps").read_text().splitlines()
    except (OSError, StopIteration):
        return []
    shards = {line.split()[-1] for line in lines if line.endswith(".safetensors") and "/states/" in line}
    return [Sample(step, resident, files, len(shards))]


def within(samples: list[Sample], first: int, last: int) -> dict[str, float]:
    """Medians over the samples of some steps."""
    found = [sample for sample in samples if first <= sample.step <= last]
    return {kind: median(getattr(sample, kind) for sample in found) for kind in ("resident", "files", "shards")}


if __name__ == "__main__":
    sys.exit(main())
