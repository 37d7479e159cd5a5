"""A training step of EAGLE-3, drafter part, against the paper's plain formula: time and memory.

Drafter part: forward and backward of the drafter's loss from given states, of one document that is supervised as a whole, in
fp32. The plain formula (tests/plain_eagle3.py) has two forms, L x L scores with a column per step, and SDPA over joined
keys with a mask; a bar is held against the better of the two. Losses and gradients of all forms must agree within 1e-5,
relative, or nothing else is printed. Time is the process's CPU time, forms in turns (one thread: OMP_NUM_THREADS=1); memory
the peak of PyTorch's allocation profiler, above what there is before the step.

    OMP_NUM_THREADS=1 python tests/bench/train_step.py           # SmolLM2's sizes, 7 steps; half an hour, 11 GB
    python tests/bench/train_step.py --quick                     # small sizes, a minute, no figure means anything

Reported beside it, without a bar: checkpoints, a quarter of the rows deep (`deep_share`), answers of half the length, and
the whole step with the target's forward pass. The last line is JSON; the exit code is 1 where a bar fails.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

import torch
from main_job import bar

sys.path.append(str(Path(__file__).parents[1]))
from eagle_step import Step, allocated, make_step

FORMS = ("ours", "columns", "joined")
PLAIN = FORMS[1:]
SIZES: dict[str, Any] = {"width": 576, "heads": (9, 3), "vocab": 49152, "draft": 8192, "steps": 7}
SMALL: dict[str, Any] = {"width": 64, "heads": (4, 2), "vocab": 1000, "draft": 500, "steps": 3}
TOLERANCE = 1e-5


def losses_of(step: Step, form: str) -> Callable[[], list[torch.Tensor]]:
    return step.terms if form == "ours" else lambda: step.plain(form)


def seconds(step: Step, form: str) -> float:
    began = time.process_time()
    step.run(losses_of(step, form))
    return time.process_time() - began


def peak_mb(step: Step, form: str = "ours") -> float:
    """With gradients of the parameters, which the step makes."""
    step.drafter.zero_grad(set_to_none=True)
    return allocated(lambda: step.run(losses_of(step, form)))[0] / 1e6


def disagreement(step: Step) -> float:
    """The largest relative difference of losses and gradients between a plain form and ours."""
    losses, grads = step.run(step.terms)
    gaps = []
    for form in PLAIN:
        plain, slopes = step.run(losses_of(step, form))
        gaps += [((losses - plain).abs() / plain.abs()).max(), (grads - slopes).norm() / slopes.norm()]
    return float(torch.stack(gaps).max())


def timed(sizes: dict[str, Any], length: int, rounds: int) -> dict[str, Any]:
    """Each form's seconds, and how many times ours the better plain form takes, turn by turn."""
    step = make_step(length, **sizes)
    times: dict[str, list[float]] = {form: [] for form in FORMS}
    for _ in range(rounds):
        for form in FORMS:
            times[form].append(seconds(step, form))
    ratios = [min(times[form][i] for form in PLAIN) / times["ours"][i] for i in range(rounds)]
    shown = "  ".join(f"{form} {median(values):.2f} s" for form, values in times.items())
    print(f"length {length}: {shown}  ratio {median(ratios):.2f} ({min(ratios):.2f} .. {max(ratios):.2f})", flush=True)
    return {"seconds": times, "ratios": ratios}


def whole_step(name: str, length: int, steps: int) -> dict[str, float]:
    """With the target's own forward pass, from which the states come."""
    from draftsmith.models.eagle3 import Eagle3, Eagle3Config
    from draftsmith.models.loading import load_target
    from draftsmith.models.target import live_states

    target = load_target(name, dtype="float32")
    ids_W = torch.arange(0, target.facts.tokens, 6)
    drafter = Eagle3(Eagle3Config(steps=steps), target.facts, ids_W)
    drafter.init_from_target(target)
    batch = make_step(length, vocab=target.facts.tokens).batch
    found = {}
    for _ in range(2):  # the first one warms up
        began = time.process_time()
        out = live_states(target, drafter, batch)
        found["target"] = time.process_time() - began
        torch.stack(list(drafter(batch, out, 0.0).losses.values())).sum().backward()
        found["whole"] = time.process_time() - began
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="small sizes, no figure means anything")
    parser.add_argument("--rounds", type=int, default=3, help="turns of each form at the long length (default: 3)")
    args = parser.parse_args()
    torch.set_num_threads(1)
    sizes, (short, long), lengths = SIZES, (512, 4096), (1024, 2048, 4096)
    if args.quick:
        sizes, (short, long), lengths = SMALL, (128, 512), (256, 512, 1024)

    gap = disagreement(make_step(short, **sizes))
    print(f"largest relative difference of losses and gradients: {gap:.1e}")
    bars = [bar("relative difference of losses and gradients", gap, at_most=TOLERANCE)]
    figures: dict[str, Any] = {"torch": torch.__version__, "sizes": sizes}
    if bars[0]["holds"]:
        for length, rounds, least in ((short, 2 * args.rounds + 1, 1.0), (long, args.rounds, 2.0)):
            figures[f"time at {length}"] = row = timed(sizes, length, rounds)
            bars.append(bar(f"speed at {length} over the plain form", median(row["ratios"]), at_least=least))

        peaks = {length: peak_mb(make_step(length, **sizes)) for length in lengths}
        plain = {form: peak_mb(make_step(lengths[1], **sizes), form) for form in PLAIN}
        a, b, c = peaks.values()
        per_token = (c - a) / (lengths[2] - lengths[0])
        fixed = a - per_token * lengths[0]
        bend = (b - fixed - per_token * lengths[1]) / b
        print("peak, ours: " + "  ".join(f"{length}: {mb:.0f} MB" for length, mb in peaks.items()))
        print(
            f"  a line through the ends: {fixed:.0f} MB + {1000 * per_token:.0f} kB a token, {bend:+.1%} off it between"
        )
        print(f"peak at {lengths[1]}, plain: " + "  ".join(f"{form} {mb:.0f} MB" for form, mb in plain.items()))
        share = b / min(plain.values())
        bars.append(bar(f"peak memory at {lengths[1]} over the plain form's", share, at_most=0.5))
        bars.append(bar("growth from the first doubling to the second (linear: 2)", (c - b) / (b - a), at_most=2.2))
        figures["peak MB"] = {"ours": peaks, "plain": plain}

        middle = lengths[1]
        figures["options"] = options = {}
        for name, given in {
            "all rows": {}, "checkpoints": {"checkpointing": True}, "deep_share 0.25": {"deep_share": 0.25},
            "second half supervised": {"first": middle // 2},
        }.items():  # fmt: skip
            step = make_step(middle, **sizes, **given)
            options[name] = {"peak_mb": peak_mb(step), "s": seconds(step, "ours")}
            print(f"{middle}, {name:<24} {options[name]['s']:7.2f} s {options[name]['peak_mb']:7.0f} MB", flush=True)
        for length in (short, lengths[1]):
            row = whole_step("tiny" if args.quick else "smollm2", length, sizes["steps"])
            figures[f"whole step at {length}"] = row
            print(
                f"whole step at {length}: {row['whole']:.2f} s, of which the target {row['target']:.2f} s", flush=True
            )
    else:
        print("RED: no time is printed for a step that is not the right one")
    for one in bars:
        bound = f"at least {one['at_least']}" if "at_least" in one else f"at most {one['at_most']}"
        print(f"{'holds' if one['holds'] else 'FAILS'}  {one['name']}: {one['value']:.4g} ({bound})")
    print(json.dumps({"name": "train_step", "quick": args.quick, "figures": figures, "bars": bars}))
    return 0 if len(bars) == 5 and (args.quick or all(one["holds"] for one in bars)) else 1


if __name__ == "__main__":
    sys.exit(main())
