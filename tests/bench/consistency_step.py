"""A training step of consistency distillation: all blocks packed into two passes against three plain ones per block.

The plain form is the definition's (tests/plain_consistency.py): for every block of a sample one pass over the text, one over
the fixed point behind what is before it, one over the state. Both take a forward and a backward of the same sample from the
real target with LoRA, in turns, in float32. No time is printed when their losses or gradients differ, by more than 1e-5,
relative, in float64 on a shorter sample; float32 rounds the gradients of this target by more (the plain form's by 2.8e-4, the
packed one's by 7.2e-5, against float64), so there the tests compare tiny ones.

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
from draftsmith.models.loading import load_target

sys.path.append(str(Path(__file__).parents[1]))
from plain_consistency import plain_parts

TOLERANCE = 1e-5
CHECKED = 128  # tokens of answers that are compared in float64: 8 blocks
FORMS = ("packed", "three passes per block")


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

    name = "tiny" if args.quick else "smollm2"
    exact = Forms(name, "float64", args.preset, CHECKED + args.prompt, args.prompt)
    (loss_a, grad_a), (loss_b, grad_b) = (exact.run(form) for form in FORMS)
    loss_gap, grad_gap = abs(loss_a - loss_b) / abs(loss_b), float((grad_a - grad_b).norm() / grad_b.norm())
    print(
        f"{name}, {args.preset}, float64, {CHECKED} tokens: relative difference of loss {loss_gap:.1e}, gradients {grad_gap:.1e}"
    )
    blocks = -(-(args.tokens - args.prompt) // exact.module.config.block)
    bars = [
        bar("relative difference of the losses", loss_gap, at_most=TOLERANCE),
        bar("relative difference of the gradients", grad_gap, at_most=TOLERANCE),
        bar("blocks of the sample", blocks, at_least=8),
    ]
    figures: dict[str, object] = {"losses": {"packed": loss_a, "plain": loss_b}, "blocks": blocks}
    del exact
    if bars[0]["holds"] and bars[1]["holds"]:
        forms = Forms(name, "float32", args.preset, args.tokens, args.prompt)
        seconds: dict[str, list[float]] = {form: [] for form in FORMS}
        for _ in range(1 + args.rounds):  # the first turn warms up
            for form in FORMS:
                began = time.perf_counter()
                forms.run(form)
                seconds[form].append(time.perf_counter() - began)
        times = {form: median(values[1:]) for form, values in seconds.items()}
        print(f"float32, {args.tokens} tokens, {blocks} blocks of {forms.module.config.block}:")
        for form, value in times.items():
            print(f"{form:<24} {value * 1000:9.1f} ms")
        figures["seconds"] = times
        bars.append(bar("time of the packed step over the plain one", times[FORMS[0]] / times[FORMS[1]], at_most=0.5))
    else:
        print("RED: no time is printed for a loss that is not the right one")
    for one in bars:
        bound = f"at least {one['at_least']}" if "at_least" in one else f"at most {one['at_most']}"
        print(f"{'holds' if one['holds'] else 'FAILS'}  {one['name']}: {one['value']:.4g} ({bound})")
    print(json.dumps({"name": "consistency_step", "quick": args.quick, "figures": figures, "bars": bars}))
    return 0 if len(bars) == 4 and (args.quick or all(one["holds"] for one in bars)) else 1


class Forms:
    """One sample of a target with stirred adapters, and both forms of a training step over it."""

    def __init__(self, name: str, dtype: str, preset: str, tokens: int, prompt: int) -> None:
        target = load_target(name, dtype=dtype)
        torch.manual_seed(0)
        adapters = Adapters(AdapterConfig(mask="none"), target)
        with torch.no_grad():
            for parameter in adapters.trained.parameters():
                parameter.add_(torch.randn_like(parameter) * 0.01)
        self.module = module = Consistency(PRESETS[preset], target, adapters)
        ids_T = torch.randint(3, target.facts.tokens, (tokens,))
        answer_T = torch.arange(tokens) >= prompt
        noise_T = torch.randint(3, target.facts.tokens, (tokens,))
        states_IT = torch.stack([torch.where(answer_T, noise_T, ids_T), ids_T])
        states = PlacedStates(pack_states(states_IT, module.config.block, "random"), 0)
        batch = make_batch([[Sample(0, ids_T, answer_T, states=states)]], None, 0, 0)
        states_T = module.shown(batch).state_BT[0]

        def packed() -> Iterator[Tensor]:
            counts, terms = module.denominators(batch, 0.0), module(batch, TargetOut(), 0.0)
            yield sum((x / counts[n] for n, x in terms.losses.items()), torch.zeros(()))

        self.parts: dict[str, Callable[[], Iterator[Tensor]]] = {
            FORMS[0]: packed,
            FORMS[1]: lambda: plain_parts(module, ids_T, states_T, prompt),
        }

    def run(self, form: str) -> tuple[float, Tensor]:
        """The loss and all gradients in a row."""
        self.module.zero_grad()
        loss = 0.0
        for part in self.parts[form]():  # each is let go before the next is made
            part.backward()
            loss += float(part.detach())
        return loss, torch.cat([p.grad.flatten() for p in self.module.parameters() if p.grad is not None])


if __name__ == "__main__":
    sys.exit(main())
