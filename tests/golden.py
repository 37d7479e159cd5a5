"""Golden loss curves: a hundred steps of every method, in fp32 on a CPU, as text beside this file (golden.txt).

    python tests/golden.py                        # compare; prints the largest deviation of each curve
    python tests/golden.py --write                # only after a change that is meant to move them: write them anew

A column is one training, a row one step. Another CPU adds in another order, which moves no curve by more than 4e-6 of its
mean (AVX-512 against plain SSE kernels, ATEN_CPU_CAPABILITY=default ONEDNN_MAX_CPU_ISA=SSE41); a learning rate that is off by
one per cent moves them by more than twice `RTOL`. Test: pytest tests/test_golden.py
"""

from __future__ import annotations

import argparse
import json
import math
import sys
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import consistency_worker
import diffusion_worker
import distributed_worker
import torch
from accelerate import Accelerator

from draftsmith.configs.consistency import ConsistencyRun
from draftsmith.configs.diffusion import DiffusionConfig
from draftsmith.configs.training import BatchConfig, BudgetConfig, EvalConfig, LogConfig, OptimConfig, TrainConfig
from draftsmith.data.batch import TargetOut
from draftsmith.data.draft_vocab import choose_draft_ids
from draftsmith.models import METHODS
from draftsmith.models.adapters import AdapterConfig, Adapters
from draftsmith.models.consistency import PRESETS as CONSISTENCY
from draftsmith.models.consistency import Consistency
from draftsmith.models.diffusion import PRESETS as DIFFUSION
from draftsmith.models.pretrained import tiny_target
from draftsmith.models.target import live_states
from draftsmith.train.loop import train
from draftsmith.train.stream import Stream

FILE = Path(__file__).with_suffix(".txt")
STEPS = 100
RTOL = 1e-4
COMMON: dict[str, Any] = {
    "batch": BatchConfig(row_length=24, rows=2, accumulate=1),
    "budget": BudgetConfig(steps=STEPS),
    "evaluate": EvalConfig(every=1000, probe_every=0),
    "log": LogConfig(every=1, progress=False),
    "precision": "fp32",
}
NAMES = [
    *METHODS,
    *(f"diffusion.{name}" for name in ("fast_dllm_v2", "sdar", "certainty", "guesses")),
    *(f"consistency.{name}" for name in consistency_worker.CASES),
]


def curve(name: str, lr: float = 1e-3) -> list[float]:
    """The loss of each step, nan where it was skipped."""
    torch.manual_seed(0)
    family, _, case = name.rpartition(".")
    optim = OptimConfig(lr=lr, warmup=0.1)
    with tempfile.TemporaryDirectory() as folder:
        settings = COMMON | {"optim": optim, "run": folder}
        if not family:
            module, config, states_of = head(name, settings)
        else:
            module, config = tuned(family, case, settings)
            states_of = lambda batch: TargetOut()  # noqa: E731
        samples = diffusion_worker.samples() if family else distributed_worker.samples()
        stream = Stream(samples, row_length=24, rows=2, accumulate=1, seed=0)
        train(config, Accelerator(cpu=True), module, stream, states_of, Path(folder))
        lines = [json.loads(line) for line in (Path(folder) / "metrics.jsonl").read_text().splitlines()]
    return [line.get("loss", math.nan) for line in lines if line["kind"] in ("train", "skip")]


def head(method: str, settings: dict[str, Any]) -> Any:
    """A draft head or drafter on live states."""
    target = tiny_target(dtype=torch.float32)
    chosen = METHODS[method].Config(**distributed_worker.SETTINGS.get(method, {}))
    drafter = METHODS[method](chosen, target.facts, choose_draft_ids(torch.arange(256), 200, target.facts.eos_ids))
    drafter.init_from_target(target)
    config = TrainConfig(method=method, drafter=chosen, **settings)
    return drafter, config, lambda batch: live_states(target, drafter, batch)


def tuned(family: str, case: str, settings: dict[str, Any]) -> Any:
    """A target with adapters, as the workers of the tests build it."""
    target = tiny_target(width=32, layers=2, heads=2, kv_heads=2, vocab=300, tokens=280)
    torch.manual_seed(1)
    if family == "diffusion":
        preset, make = diffusion_worker.CASES[case]
        objective = replace(DIFFUSION[preset], block=diffusion_worker.BLOCK)
        adapters = Adapters(AdapterConfig(rank=2, alpha=4), target, dual=objective.dual)
        return make(objective, target, diffusion_worker.stirred(adapters)), DiffusionConfig(**settings)
    preset = CONSISTENCY[case]
    states: Any = "online" if preset.states == "stored" else preset.states
    goal = replace(preset, block=diffusion_worker.BLOCK, window=min(preset.window, 2), states=states)
    mask: Any = "trained" if goal.start == "mask" else "none"
    adapters = Adapters(AdapterConfig(rank=2, alpha=4, mask=mask), target)
    return Consistency(goal, target, diffusion_worker.stirred(adapters)), ConsistencyRun(**settings)


def read() -> dict[str, list[float]]:
    """The stored curves."""
    names, *rows = [line.split() for line in FILE.read_text().splitlines() if not line.startswith("#")]
    return {name: [float(row[i]) for row in rows] for i, name in enumerate(names)}


def deviation(found: list[float], stored: list[float]) -> float:
    """The largest distance of two curves, as a share of the stored one's mean; infinite where other steps were skipped."""
    if [math.isnan(x) for x in found] != [math.isnan(x) for x in stored]:
        return math.inf
    pairs = [(a, b) for a, b in zip(found, stored, strict=True) if not math.isnan(b)]
    usual = sum(abs(b) for _, b in pairs) / len(pairs)
    return max(abs(a - b) for a, b in pairs) / usual


def write(curves: dict[str, list[float]]) -> None:
    width = max(map(len, curves)) + 2
    lines = ["# Losses of each step; see golden.py.", "".join(name.rjust(width) for name in curves)]
    for step in range(STEPS):
        lines.append("".join(f"{values[step]:.7g}".rjust(width) for values in curves.values()))
    FILE.write_text("\n".join(lines) + "\n")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--write", action="store_true", help="write the curves anew")
    args = parser.parse_args()
    torch.set_num_threads(1)
    curves = {name: curve(name) for name in NAMES}
    if args.write:
        write(curves)
        print(f"wrote {FILE.name}: {len(curves)} curves")
        return 0
    stored, far = read(), []
    for name, values in curves.items():
        off = deviation(values, stored[name])
        far += [name] if off > RTOL else []
        print(f"{name:<32}{off:>12.2g}{'   FAR' if off > RTOL else ''}")
    return 1 if far else 0


if __name__ == "__main__":
    sys.exit(main())
