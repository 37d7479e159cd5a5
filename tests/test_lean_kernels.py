"""The lean runner and the steps on the device through our kernels, as on a GPU: interpreted, in a process of their own.

As a program (TRITON_INTERPRET=1 python tests/test_lean_kernels.py) it prints one JSON line per comparison with the plain
operators, which the same process runs as well. Run: pytest tests/test_lean_kernels.py
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from kernel_proof import launches
from no_sync import no_sync, paused
from torch import Tensor

from draftsmith.kernels import jit

LAYERS = {"add_norm_kernel", "rope_write_kernel", "swiglu_kernel"}
ATTENTION = {"_attend", "_merge"}
STEP = {"topk_tile_kernel", "topk_merge_kernel", "_walk", "_move"}
CASES: dict[str, tuple[dict[str, Any], set[str]]] = {
    "llama": ({"family": "llama", "kv_heads": 2}, LAYERS | ATTENTION),
    "qwen3": ({"family": "qwen3", "heads": 3, "kv_heads": 1, "head_dim": 24}, LAYERS | ATTENTION),
    "mistral-window": ({"family": "mistral", "kv_heads": 2, "window": 3}, LAYERS),
}


@contextmanager
def plain() -> Iterator[None]:
    """By PyTorch's operators, though kernels could be interpreted."""
    jit.INTERPRETED = False
    try:
        yield
    finally:
        jit.INTERPRETED = True


def passes(target: Any, guard: Any) -> list[Tensor]:
    """Ragged rows; a tree, of which paths are kept; a token; a chain behind a tail that nothing has committed. `guard`:
    around passes that read as many slots as the host says."""
    see_BMM = torch.eye(4, dtype=torch.bool).repeat(2, 1, 1)
    for node, parent in enumerate((0, 0, 1), 1):
        see_BMM[:, node] |= see_BMM[:, parent]
    cache, found = target.new_cache(2, 40), list[Tensor]()

    def run(depths: list[int], **options: Any) -> None:
        ids_BT = (torch.arange(2 * len(depths)) * 37 % 250).view(2, -1) + len(found)
        states = target.forward(
            ids_BT, cache.lengths_B[:, None] + torch.tensor(depths), cache=cache, taps=(2, 1), **options
        )
        found.extend((target.head(states.last_hidden_BTD), states.taps_BTPD))

    run([0, 1, 2, 3])
    cache.commit(torch.tensor([4, 1]))
    run([0, 1, 1, 2], see_BTA=see_BMM)
    cache.compact(torch.tensor([[0, 1, 3], [0, 2, 0]]), torch.tensor([3, 2]))
    run([0])
    cache.reach = 20
    positions_BT = cache.lengths_B[:, None] + torch.arange(1, 3)
    ids_BT, see_BTA = torch.tensor([[7, 8], [9, 10]]), torch.ones(2, 3, dtype=torch.bool).tril(1).expand(2, 2, 3)
    with guard():
        states = target.forward(ids_BT, positions_BT, cache=cache, see_BTA=see_BTA)
    kept = [cache.kv[:, :, row, :, : n + 3].flatten() for row, n in enumerate(cache.lengths_B.tolist())]
    return [*found, states.last_hidden_BTD, *kept]


def layers() -> Iterator[dict[str, Any]]:
    from draftsmith.models.pretrained import tiny_target

    for name, (options, wanted) in CASES.items():
        target = tiny_target(width=32, layers=2, **options)
        with torch.no_grad(), launches(paused) as names:
            ours = passes(target, no_sync)
        with torch.no_grad(), plain():
            theirs = passes(target, no_sync)
        ran = set(names)
        error = max(float((a - b).abs().max() / b.abs().max().clamp(min=1)) for a, b in zip(ours, theirs, strict=True))
        yield {"name": name, "error": error, "missing": sorted(wanted - ran), "beside": sorted(ran - wanted - STEP)}
    with torch.no_grad(), launches() as names:
        target.forward(torch.ones(1, 65).long(), torch.arange(65)[None], cache=target.new_cache(1, 70))
        target.forward(torch.ones(1, 5).long(), torch.arange(5)[None])
    yield {"name": "a prompt, and no cache", "error": 0.0, "missing": [], "beside": names}


def steps() -> Iterator[dict[str, Any]]:
    from draftsmith.inference.device_step import DeviceStep
    from draftsmith.inference.speculate import DecodeConfig, generate
    from draftsmith.losses.probs import SamplingParams
    from draftsmith.models import METHODS
    from draftsmith.models.pretrained import tiny_target

    target, step = tiny_target(width=32, layers=1, kv_heads=2), DeviceStep.__call__
    drafter = METHODS["medusa"](METHODS["medusa"].Config(), target.facts, None)
    drafter.init_from_target(target)

    def watched(self: DeviceStep, held: Any) -> None:
        with no_sync():
            step(self, held)

    DeviceStep.__call__ = watched  # type: ignore[method-assign]
    decode = DecodeConfig(max_rows=2, k=2, tree="static", nodes=3, width=2, step="device")
    given = target, [[5, 6, 7], [9]], SamplingParams(max_new_tokens=5, ignore_eos=True), drafter.eval(), decode
    with plain():
        theirs = generate(*given[:-1], replace(decode, step="host"))
    with launches(paused) as names:
        ours = generate(*given)
    different = sum(a.ids != b.ids or a.stats.ranks != b.stats.ranks for a, b in zip(ours, theirs, strict=True))
    wanted = LAYERS | ATTENTION | STEP
    yield {"name": "steps", "error": float(different), "missing": sorted(wanted - set(names)), "beside": []}


@pytest.fixture(scope="module")
def lines() -> dict[str, dict[str, Any]]:
    command = [sys.executable, str(Path(__file__).resolve())]
    done = subprocess.run(command, env=os.environ | {"TRITON_INTERPRET": "1"}, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return {line["name"]: line for line in map(json.loads, done.stdout.splitlines())}


@pytest.mark.skipif(jit.triton is None, reason="Triton is not made for this system")
@pytest.mark.parametrize("name", [*CASES, "a prompt, and no cache", "steps"])
def test_the_path_by_kernels_is_the_plain_one(name: str, lines: dict[str, dict[str, Any]]) -> None:
    """Logits, states, and what the cache holds, in fp32; the kernels that ran; nothing waits for the device."""
    line = lines[name]
    assert line["error"] <= 1e-5 and line["missing"] == [] and line["beside"] == []


if __name__ == "__main__":
    torch.set_num_threads(1)
    for part in (layers, steps):
        for line in part():
            print(json.dumps(line), flush=True)
