"""Does everything that runs on a CPU run on a GPU, with the same result, and how fast are the kernels? Needs one; under
six minutes: parts 3 to 5, of a tiny target, are left out as soon as `--minutes` are over, and listed.

1. Kernels: each of `KERNELS` by its cases in fp32, fp16 and bf16, then timed against its reference.
2. Decoding: plain and an EAGLE-3 chain, by the host's steps, the device's, and CUDA graphs.
3. Training: the loss and the gradients of each method in fp32, against the CPU; then three optimiser steps in bf16.
4. Decoding: float64, each method x tree x batch {1, 4} against plain decoding on the GPU: no token may differ.
5. Slots: flex attention's block masks against the dense ones, forward and backward.

    python tests/bench/gpu.py
    python tests/bench/gpu.py --only kernels decode     # parts 1 and 2 alone
    python tests/bench/gpu.py --quick      # chains only
"""

from __future__ import annotations

import argparse
import copy
import json
import sys
import time
import traceback
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import gpu_kernels
import torch
from lossless import SHAPES, fresh, random_prompts
from torch import Tensor

from draftsmith.data.batch import Batch
from draftsmith.data.encode import Sample
from draftsmith.data.packing import collate
from draftsmith.inference.speculate import generate
from draftsmith.inference.trees import fits
from draftsmith.kernels import KERNELS
from draftsmith.losses.probs import SamplingParams
from draftsmith.models import METHODS, TRAINING_FREE
from draftsmith.models import slots as rules
from draftsmith.models.loading import load_target
from draftsmith.models.target import Target, live_states

PARTS = ("kernels", "decode", "train", "methods", "slots")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="chains only")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--only", nargs="+", choices=PARTS, default=PARTS, metavar="PART", help=", ".join(PARTS))
    parser.add_argument("--minutes", type=float, default=5.5, help="no part of 3 to 5 begins after these")
    args = parser.parse_args()
    if args.device == "cuda" and not torch.cuda.is_available():
        print("error: no GPU here; this benchmark compares one with the CPU", file=sys.stderr)
        return 2
    until, rows, left = time.perf_counter() + 60 * args.minutes, list[dict[str, Any]](), list[str]()

    def part(kind: str, name: str, run: Any, *given: Any) -> None:
        if kind not in args.only:
            return
        if kind in ("train", "methods", "slots") and time.perf_counter() > until:
            left.append(name)
        else:
            rows.append(attempt(name, run, *given))

    for name in KERNELS:
        part("kernels", f"kernel {name}", gpu_kernels.kernel, name, args.device)
    part("decode", "decode", gpu_kernels.decode, args.device)
    for method in METHODS:
        part("train", f"train {method}", training, method, args.device)
    trees = {"chain": SHAPES["chain"]} if args.quick else SHAPES
    plain: dict[int, Any] = {}
    for method in [*METHODS, *TRAINING_FREE]:
        part("methods", f"decode {method}", decoding, method, args.device, trees, plain)
    part("slots", "slots", flex, args.device)
    print(gpu_kernels.table(rows))
    failed = [row["name"] for row in rows if "error" in row]
    bars = [
        at_most("parts that failed", len(failed), 0),
        at_most(
            "tokens that differ, of float64 from plain decoding, of graphs from steps", worst(rows, "different"), 0
        ),
        at_most("fp32 loss, relative to the CPU's", worst(rows, "loss"), 1e-4),
        at_most("fp32 gradients, relative to the CPU's", worst(rows, "gradient"), 1e-3),
        at_most("flex against dense attention", worst(rows, "flex"), 1e-4),
    ]
    bars = [bar for bar in bars if bar["value"] is not None]  # of what was run; a failure is the first bar's
    if left:
        print("left out, time was over:", ", ".join(left))
    for bar in bars:
        print("holds" if bar["holds"] else "FAILS", bar["name"], bar["value"])
    device = torch.cuda.get_device_name() if args.device == "cuda" else args.device
    print(
        json.dumps(
            {
                "name": "gpu",
                "figures": {"device": device, "failed": failed, "left_out": left, "rows": rows},
                "bars": bars,
            }
        )
    )
    return 0 if rows and all(bar["holds"] for bar in bars) else 1


def attempt(name: str, run: Any, *args: Any) -> dict[str, Any]:
    """One part; what goes wrong in it is a row, so that the others are run all the same."""
    since = time.perf_counter()
    try:
        row = {"name": name, **run(*args)}
    except Exception as error:
        traceback.print_exc()
        row = {"name": name, "error": f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"}
    row["seconds"] = round(time.perf_counter() - since, 2)
    print(json.dumps(row), flush=True)
    return row


def worst(rows: list[dict[str, Any]], key: str) -> float | None:
    """The largest, NaN if there is one; None where no part has it."""
    return largest([row[key] for row in rows if key in row])


def largest(values: Sequence[float]) -> float | None:
    """As above: Python's `max` passes NaN by."""
    return float(torch.tensor(values, dtype=torch.float64).max()) if values else None


def at_most(name: str, value: float | None, bound: float) -> dict[str, Any]:
    return {"name": name, "value": value, "at_most": bound, "holds": value is not None and value <= bound}


def some_batch(documents: int = 6) -> Batch:
    dice = torch.Generator().manual_seed(1)
    samples = []
    for i in range(documents):
        n = int(torch.randint(20, 60, (1,), generator=dice))
        samples.append(Sample(i, torch.randint(250, (n,), generator=dice), torch.arange(n) >= 5))
    return collate(samples)


def loss_of(drafter: Any, target: Target, batch: Batch) -> Tensor:
    out = live_states(target, drafter, batch)
    counts = drafter.denominators(batch, 0.0)
    losses = drafter(batch, out, 0.0).losses
    total: Tensor = sum(loss / counts[name] for name, loss in losses.items() if counts[name])
    return total


def training(method: str, device: str) -> dict[str, Any]:
    """Loss and gradients on both devices, and whether bf16 steps lower the loss."""
    batch, found = some_batch(), []
    drafter = fresh(method, load_target("tiny", dtype="float32")).train()
    for place in ("cpu", device):
        target = load_target("tiny", dtype="float32", device=place)
        mine = copy.deepcopy(drafter).to(place)
        mine.bind(target)
        loss = loss_of(mine, target, batch.to(place))
        loss.backward()
        found.append(
            (float(loss.detach()), {n: p.grad.cpu() for n, p in mine.named_parameters() if p.grad is not None})
        )
    (want, want_grad), (got, got_grad) = found
    assert want_grad.keys() == got_grad.keys()
    scale_n = torch.stack([g.norm() for g in want_grad.values()])
    off_n = torch.stack([(g - got_grad[name]).norm() for name, g in want_grad.items()])
    target = load_target("tiny", dtype="bfloat16", device=device)
    mine.bind(target)
    optimiser = torch.optim.AdamW([p for p in mine.parameters() if p.requires_grad], lr=1e-3)
    steps = []
    for _ in range(3):
        optimiser.zero_grad()
        with torch.autocast(device, torch.bfloat16):
            loss = loss_of(mine, target, batch.to(device))
        loss.backward()
        optimiser.step()
        steps.append(float(loss.detach()))
    if not all(map(torch.isfinite, map(torch.tensor, steps))):
        raise AssertionError(f"bf16 losses {steps}")
    return {"loss": abs(got - want) / abs(want), "gradient": float(off_n.max() / scale_n.max()), "bf16_losses": steps}


def decoding(method: str, device: str, trees: dict[str, Any], plain: dict[int, Any]) -> dict[str, Any]:
    """Tokens of all trees and batches that differ from plain decoding, all of float64; a sampled run must not fail."""
    target = load_target("tiny", dtype="float64", device=device)
    params = SamplingParams(max_new_tokens=16, ignore_eos=True)
    prompts = random_prompts(4, target.facts.tokens)
    if not plain:
        plain[0] = [r.ids for r in generate(target, prompts, params)]
    drafter = fresh(method, target)
    if method in METHODS:
        drafter.to(device)
    different, ran = 0, []
    for tree, shape in trees.items():
        if not fits(tree, drafter):
            continue
        for rows in (1, 4):
            got = generate(target, prompts, params, drafter, replace(shape, max_rows=rows))
            for want, result in zip(plain[0], got, strict=True):
                different += sum(a != b for a, b in zip(want, result.ids, strict=True))
        ran.append(tree)
    sampled = SamplingParams(max_new_tokens=8, ignore_eos=True, temperature=1.0, seed=1)
    generate(target, prompts, sampled, drafter, replace(SHAPES["chain"], max_rows=4))
    return {"different": different, "trees": ran}


def flex(device: str) -> dict[str, Any]:
    """Flex attention against dense attention: outputs and gradients, for each rule."""
    batch = some_batch().to(device)
    slots = rules.anchored(batch, rules.legal_anchors(batch), range(1, 5))
    dice = torch.Generator(device=device).manual_seed(0)
    b, t, q = *batch.ids_BT.shape, slots.anchor_BQ.shape[1]
    off: list[float] = []
    for rule in (
        rules.MaskRule(),
        rules.MaskRule("exclusive", "full", window=9),
        rules.MaskRule(intra="block", block=2),
    ):
        shapes = ((b, 4, q, 16), (b, 2, t, 16), (b, 2, t, 16), (b, 2, q, 16), (b, 2, q, 16))
        inputs = [torch.randn(s, generator=dice, device=device, requires_grad=True) for s in shapes]
        results = []
        for way in (False, True):
            mask = rules.make_mask(slots, batch, rule, flex=way)
            query, ck, cv, ok, ov = inputs
            out = rules.attend_slots(query, (ck, cv), (ok, ov), mask)
            real = out * (slots.document_BQ >= 0)[:, None, :, None]
            results.append([real, *torch.autograd.grad(real.square().sum(), inputs)])
        for want, got in zip(*results, strict=True):
            off.append(float((want - got).abs().max() / want.abs().max()))
    return {"flex": largest(off)}


if __name__ == "__main__":
    sys.exit(main())
