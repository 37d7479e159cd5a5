"""What the figures beside the loss cost a training step: the clock's marks, and the reading of a line's figures.

    python tests/bench/observe.py [--quick]

The cost of the marks of a step and of a line by themselves (median of many), and their share of a step of 10 ms, which is
far below any real one, with 8 micro-batches and a line every 10 steps. Bar: 1 %. On a GPU the marks are events in its queue.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time

import torch
from accelerate import Accelerator

from draftsmith.train.timing import StepClock

BAR = 0.01
STEP = 0.010  # seconds
MICRO_BATCHES, EVERY = 8, 10  # of a step; steps per line
ORDER = ("data", "update", None, *("target", "drafter", "update", "drafter") * MICRO_BATCHES, "update", None)


def cost(clock: StepClock, steps: int) -> tuple[float, float]:
    """Seconds of the marks of a step, and of a line's figures."""
    began = time.perf_counter()
    for _ in range(steps):
        for part in ORDER:
            clock.mark(part)
        clock.step_taken(1000, STEP)
    marks = (time.perf_counter() - began) / steps
    began = time.perf_counter()
    clock.figures()
    return marks, time.perf_counter() - began


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--quick", action="store_true")
    rounds = 20 if parser.parse_args().quick else 500
    accelerator = Accelerator(cpu=not torch.cuda.is_available())
    clock = StepClock(accelerator)
    cost(clock, EVERY)
    found = [cost(clock, EVERY) for _ in range(rounds)]
    marks, line = (statistics.median(x) for x in zip(*found, strict=True))
    share = (marks + line / EVERY) / STEP
    print(f"{accelerator.device.type}: marks of a step {1e6 * marks:.1f} us ({len(ORDER)}), a line {1e6 * line:.1f} us")
    print(f"share of a step of {1000 * STEP:.0f} ms, a line every {EVERY} steps: {share:.3%} (bar {BAR:.0%})")
    facts = {
        "device": accelerator.device.type,
        "marks_us": 1e6 * marks,
        "line_us": 1e6 * line,
        "share": share,
        "bar": BAR,
    }
    print(json.dumps(facts))
    return int(share > BAR)


if __name__ == "__main__":
    sys.exit(main())
