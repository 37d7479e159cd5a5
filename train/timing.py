"""Where the time of optimiser steps goes, tokens per second, use of the device's arithmetic, memory: the figures beside the
loss in a training line. Names are those of the table in train/README.md.

On a CPU the clock is read at each change of part. On a GPU an event is put into its queue there, which waits for nothing;
they are read together when a line is written, once the device is through with them.
Tests: `pytest tests/test_train.py`; `tests/bench/observe.py` measures what this costs.
"""

from __future__ import annotations

import resource
import sys
import time

import torch
from accelerate import Accelerator

from . import engine
from .plan_devices import DEVICES

PARTS = ("data", "target", "drafter", "update")
FORMS = {"PCIE"}  # a slower form, whose driver says so
MOST_EVENTS = 4096  # between two lines; more are read early
GIB = 2**30


class StepClock:
    """The figures of the steps since the last line. `flops_per_token`: of forward and backward, all passes together
    (train/utilisation.py); None: use of the arithmetic is not stated."""

    def __init__(self, accelerator: Accelerator, flops_per_token: float | None = None) -> None:
        self.accelerator, self.flops_per_token = accelerator, flops_per_token
        self.gpu = accelerator.device.type == "cuda"
        self.part: str | None = None
        self.at = time.perf_counter()
        self.events: list[tuple[str | None, torch.cuda.Event]] = []
        self._forget()

    def _forget(self) -> None:
        self.spent = dict.fromkeys(PARTS, 0.0)
        self.steps, self.tokens, self.seconds = 0, 0.0, 0.0

    def mark(self, part: str | None) -> None:
        """What comes next belongs to `part` of PARTS, or to none."""
        if self.gpu:
            event = torch.cuda.Event(enable_timing=True)
            event.record()
            self.events.append((part, event))
            if len(self.events) > MOST_EVENTS:
                self._read_events()
            return
        now = time.perf_counter()
        if self.part is not None:
            self.spent[self.part] += now - self.at
        self.part, self.at = part, now

    def _read_events(self) -> None:
        self.events[-1][1].synchronize()
        for (part, began), (_, ended) in zip(self.events, self.events[1:], strict=False):
            if part is not None:
                self.spent[part] += began.elapsed_time(ended) / 1000
        self.events = self.events[-1:]

    def step_taken(self, tokens: float, seconds: float) -> None:
        """Count a step: its tokens over all processes, and its seconds."""
        self.steps, self.tokens, self.seconds = self.steps + 1, self.tokens + tokens, self.seconds + seconds

    def figures(self) -> dict[str, float]:
        """Figures since the last time; every process calls this. Times are seconds per step, mean over processes."""
        if self.gpu and self.events:
            self._read_events()
        world = self.accelerator.num_processes
        spent = [s / world for s in engine.total(self.accelerator, list(self.spent.values()))]
        (peak,) = engine.largest(self.accelerator, [memory_peak(self.accelerator.device)])
        rate = self.tokens / self.seconds if self.seconds else 0.0
        found = {"tokens_per_second": rate, "speed/tokens_per_second_per_device": rate / world}
        if self.flops_per_token is not None and (most := peak_flops(self.accelerator.device)):
            found["speed/mfu"] = self.flops_per_token * rate / world / most
        steps = max(self.steps, 1)
        found |= {f"time/{part}": s / steps for part, s in zip(PARTS, spent, strict=True)}
        found["time/other"] = max(self.seconds - sum(spent), 0.0) / steps
        found["memory/peak_gib"] = peak / GIB
        self._forget()
        return found


def memory_peak(device: torch.device) -> float:
    """Most bytes held since the start: by tensors on a GPU, by the process on a CPU."""
    if device.type == "cuda":
        return float(torch.cuda.max_memory_allocated(device))
    most = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return float(most if sys.platform == "darwin" else 1024 * most)


def peak_flops(device: torch.device) -> float | None:
    """Dense bf16 products a second, from the table of train/plan_devices.py; None for a device that is not in it, CPUs above
    all: a peak that nobody stated would make the share of it a guess."""
    if device.type != "cuda":
        return None
    return flops_of_name(torch.cuda.get_device_name(device), torch.cuda.get_device_properties(device).total_memory)


def flops_of_name(name: str, memory: float) -> float | None:
    """By the driver's name of a device; where several entries fit it, by the words that they share with it, then by memory."""
    words = set(name.replace("-", " ").replace("_", " ").upper().split())
    found = []
    for device in DEVICES.values():
        own = {w for w in device.name.upper().split() if not w.endswith("GB")}
        model = next((w for w in own if any(c.isdigit() for c in w)), None)
        # "3090" of "GeForce RTX 3090 Ti" is another chip, as "L40" and "L4" are others than "L40S".
        if model in words and not words & {"TI", "SUPER", "LAPTOP", "D", "NVL"} and own & FORMS <= words & FORMS:
            found.append((-len(own & words), abs(device.memory_gb * 1e9 - memory), device.tflops * 1e12))
    return min(found)[2] if found else None
