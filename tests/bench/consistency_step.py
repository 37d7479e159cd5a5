"""A training step of consistency distillation: all blocks packed into two passes against three plain ones per block.

The plain form is the definition's (tests/plain_consistency.py): for every block of a sample one pass over the text, one over
the fixed point behind what is before it, one over the state. Both take a forward and a backward of the same sample from the
real target with LoRA, in turns. No time is printed when their losses or gradients differ: by more than 1e-5, relative.

    OMP_NUM_THREADS=1 python tests/bench/consistency_step.py           # smollm2, 512 tokens, a few minutes
    python tests/bench/consistency_step.py --quick                     # tiny target, seconds, no figure means anything

The last line is JSON.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from statistics import median

import torch
from main_job import bar
from torch import Tensor

from draftsmith.data.batch import TargetOut
from draftsmith.data.encode import Sample
from draftsmith.data.jacobi_states import PlacedStates, pack_states
from draftsmith.data.packing import make_batch
from draftsmith.models.adapters import AdapterConfig, Adapters
from draftsmith.models.consistency import PRESETS, Consistency
from draftsmith.models.target import load_target

sys.path.append(str(Path(__file__).parents[1]))
from plain_consistency import plain_parts

TOLERANCE = 1e-5


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="tiny target, no figure means anything")
    parser.add_argument("--tokens", type=int, default=512, help="of the sample (default: 512)")
    parser.add_argument("--prompt", type=int, default=128, help="of them in the prompt (default: 128)")
    parser.add_argument("--rounds", type=int, default=3, help="turns of each form (default: 3)")
    parser.add_argument("--preset", choices=PRESETS, default="cllm")
    args = parser.parse_args()
    if args.quick:
        args.tokens, args.prompt = 160, 24

    target = load_target("tiny" if args.quick else "smollm2", dtype="float32")
    torch.manual_seed(0)
    adapters = Adapters(AdapterConfig(mask="none"), target)
    with torch.no_grad():
        for parameter in adapters.trained.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.01)
    module = Consistency(PRESETS[args.preset], target, adapters)
    ids_T = torch.randint(3, target.facts.tokens, (args.tokens,))
    answer_T = torch.arange(args.tokens) >= args.prompt
    noise_T = torch.randint(3, target.facts.tokens, (args.tokens,))
    states_IT = torch.stack([torch.where(answer_T, noise_T, ids_T), ids_T])
    states = PlacedStates(pack_states(states_IT, module.config.block, "random"), 0)
    batch = make_batch([[Sample(0, ids_T, answer_T, states=states)]], None, 0, 0)
    states_T = module.shown(batch).state_BT[0]

    def packed() -> Iterator[Tensor]:
        counts, terms = module.denominators(batch, 0.0), module(batch, TargetOut(), 0.0)
        yield sum((x / counts[n] for n, x in terms.losses.items()), torch.zeros(()))

    forms: dict[str, Callable[[], Iterator[Tensor]]] = {
        "packed": packed,
        "three passes per block": lambda: plain_parts(module, ids_T, states_T, args.prompt),
    }
    seconds: dict[str, list[float]] = {name: [] for name in forms}
    losses, grads, blocks = {}, {}, -(-(args.tokens - args.prompt) // module.config.block)
    for _ in range(1 + args.rounds):  # the first turn warms up
        for name, form in forms.items():
            module.zero_grad()
            began = time.perf_counter()
            losses[name] = 0.0
            for part in form():  # each is let go before the next is made
                part.backward()
                losses[name] += float(part.detach())
            seconds[name].append(time.perf_counter() - began)
            grads[name] = torch.cat([p.grad.flatten() for p in module.parameters() if p.grad is not None])
    a, b = forms
    loss_gap = abs(losses[a] - losses[b]) / abs(losses[b])
    grad_gap = float((grads[a] - grads[b]).norm() / grads[b].norm())
    print(f"{target.facts.name}, {args.preset}: {args.tokens} tokens, {blocks} blocks of {module.config.block}")
    print(f"relative difference: loss {loss_gap:.1e}, gradients {grad_gap:.1e} (allowed {TOLERANCE:g})")
    bars = [
        bar("relative difference of the losses", loss_gap, at_most=TOLERANCE),
        bar("relative difference of the gradients", grad_gap, at_most=TOLERANCE),
        bar("blocks of the sample", blocks, at_least=8),
    ]
    figures: dict[str, object] = {"losses": losses, "blocks": blocks}
    if bars[0]["holds"] and bars[1]["holds"]:
        times = {name: median(values[1:]) for name, values in seconds.items()}
        for name, value in times.items():
            print(f"{name:<24} {value * 1000:9.1f} ms")
        figures["seconds"] = times
        bars.append(bar("time of the packed step over the plain one", times[a] / times[b], at_most=0.5))
    else:
        print("RED: no time is printed for a loss that is not the right one")
    for one in bars:
        bound = f"at least {one['at_least']}" if "at_least" in one else f"at most {one['at_most']}"
        print(f"{'holds' if one['holds'] else 'FAILS'}  {one['name']}: {one['value']:.4g} ({bound})")
    print(json.dumps({"name": "consistency_step", "quick": args.quick, "figures": figures, "bars": bars}))
    return 0 if len(bars) == 4 and (args.quick or all(one["holds"] for one in bars)) else 1


if __name__ == "__main__":
    sys.exit(main())
