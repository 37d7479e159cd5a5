"""CPU threads: how many, and how they wait for each other.

GNU's OpenMP, which PyTorch brings, lets threads that wait spin. Where another program wants the same core, two threads are
then many times slower than one (seen: 8 ms for a product that takes 0.13 ms); OMP_WAIT_POLICY=PASSIVE lets them sleep
instead, and is as fast otherwise. It is read when torch is imported: importing draftsmith before torch sets it, unless it
is set, and so does launch.sh. One thread is best for small models, whose products are too short to share; `draftsmith
tune` measures whether more are better, and stores it (inference/tuned.py).

Test: pytest tests/test_threads.py
"""

from __future__ import annotations

import os
import warnings
from typing import Any

import torch

SMALL = 200_000_000  # parameters; 135 M: 16.8 tokens/s on one thread, 14.4 on two that sleep, 6.8 on two that spin


def why_slow() -> str | None:
    """Why this process's threads may wait for each other actively; None if they do not."""
    policy = os.environ.get("OMP_WAIT_POLICY", "")
    if torch.get_num_threads() == 1 or policy.upper() == "PASSIVE" or os.environ.get("GOMP_SPINCOUNT") == "0":
        return None
    how = f"OMP_WAIT_POLICY={policy}" if policy else "OMP_WAIT_POLICY was not set when torch was imported"
    return (
        f"{torch.get_num_threads()} threads wait for each other actively ({how}), which is many times slower where they do not "
        "have the cores to themselves: start Python with OMP_WAIT_POLICY=PASSIVE, import draftsmith before torch, or "
        "call torch.set_num_threads(1)"
    )


def warn_if_slow(device: str | torch.device) -> None:
    """A warning where threads are set so that decoding on this CPU may crawl."""
    if torch.device(device).type == "cpu" and (why := why_slow()) is not None:
        warnings.warn(why, stacklevel=3)


def settle_threads(target: Any) -> None:
    """One thread for a small target on a CPU, unless OMP_NUM_THREADS says how many. For commands: the number is the whole
    process's, and a library leaves it to whoever calls it."""
    if target.device.type != "cpu" or "OMP_NUM_THREADS" in os.environ:
        return
    if sum(weight.numel() for weight in target.parameters()) <= SMALL:
        torch.set_num_threads(1)
