"""What does speculation gain where eight requests are decoded together, and are their answers those of each alone?

Held-out prompts in groups of 8, greedy, the real target in bfloat16 and an EAGLE-3 head (that of `main_job.py --only
long`, or `--head`), one interleaved run: every group is answered by all ways in rotating order, plainly and by chains of
K tokens, one prompt after the other and all 8 at once (a closed batch of `generate`). Tokens per second: tokens of the
answers over wall seconds of whole calls, prompts included. Intervals are over groups, so few groups say little.

Beside the speed, identity:

1. float64, a tiny target, prompts of different lengths and budgets, so that rows end at different times: batches of 8
   give the ids of one-by-one runs, plainly and with drafters. Not one id may differ.
2. bfloat16, the same at a fixed width with rows padded to one bucket: a prompt beside seven others gives what it gives
   beside seven copies of the longest. Not one id may differ.
3. The real target, unpadded: where an answer of the batch leaves that of plain decoding alone, the top-2 logit gap there is
   below 4 x what passes of one row and of the batch's many differ by on the plain text, measured without batch and drafter
   (`inference/ties.py`; bits of a pass depend on its rows). None may leave it otherwise.

    python tests/bench/batch.py                                  # 24 prompts x 96 tokens, about 5 minutes
    python tests/bench/batch.py --prompts 8 --tokens 32 --k 1 2
    python tests/bench/batch.py --quick                          # tiny models, no figure means anything

The last line is JSON.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
ROWS = 8
OVER_PLAIN, OVER_ONE = (
    1.15,
    2.0,
)  # least of speculation at batch 8 over plain at batch 8, and over speculation at batch 1


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--head", type=Path, default=ROOT / "runs/main_job/long/export", help="an EAGLE-3 export")
    parser.add_argument("--k", type=int, nargs="+", default=[1, 2, 3, 4], help="draft lengths (default: 1 2 3 4)")
    parser.add_argument("--prompts", type=int, default=24, help="a multiple of 8 (default: 24)")
    parser.add_argument("--tokens", type=int, default=96)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--quick", action="store_true", help="tiny models, no bound on figures is meant")
    args = parser.parse_args()
    if args.prompts < ROWS or args.prompts % ROWS:
        parser.error(f"--prompts {args.prompts}: groups have {ROWS} prompts, give a multiple of {ROWS}")
    os.environ |= {
        "OMP_NUM_THREADS": str(args.threads),
        "OMP_WAIT_POLICY": "PASSIVE",
        "TOKENIZERS_PARALLELISM": "false",
    }
    if args.quick:
        args.prompts, args.tokens, args.k = 16, 8, [1, 3]
    figures = run(args)
    print(json.dumps(figures))
    exact = [one for one in figures["bars"] if "at_most" in one]
    return 0 if all(one["holds"] for one in (exact if args.quick else figures["bars"])) else 1


def run(args: argparse.Namespace) -> dict[str, Any]:
    """Everything; what is printed before the last line comes from here."""
    import torch
    from main_job import bar
    from rich.console import Console
    from rich.progress import track
    from rich.table import Table

    from draftsmith.data.encode import prompt_ids
    from draftsmith.inference.evaluate import machine
    from draftsmith.inference.figures import Bootstrap, Sample, ratio, speed
    from draftsmith.inference.load import load_drafter
    from draftsmith.inference.speculate import DecodeConfig, generate
    from draftsmith.inference.suites import load_suite
    from draftsmith.losses.probs import SamplingParams
    from draftsmith.models.loading import load_target

    torch.set_num_threads(args.threads)
    console = Console(width=130, highlight=False)
    wrong_float64, compared_float64 = ragged("float64")
    wrong_bfloat16, compared_bfloat16 = ragged("bfloat16")
    target = load_target("tiny" if args.quick else "smollm2", dtype="bfloat16")
    head = fresh_head(target) if args.quick else load_drafter(str(args.head), target)
    if args.quick:
        asked = prompts_of(target, args.prompts)
    else:
        asked = [prompt_ids(p.messages, target.tokenizer) for p in load_suite("mini", limit=args.prompts)]
        if len(asked) < args.prompts:
            raise SystemExit(f"the suite has {len(asked)} prompts, {args.prompts} were asked for")
    groups = [asked[i : i + ROWS] for i in range(0, len(asked), ROWS)]
    params = SamplingParams(max_new_tokens=args.tokens)
    ways: dict[str, tuple[Any, DecodeConfig]] = {}
    for rows in (1, ROWS):
        ways[f"plain, batch {rows}"] = None, DecodeConfig(max_rows=rows)
        ways |= {f"EAGLE-3 K={k}, batch {rows}": (head, DecodeConfig(k=k, max_rows=rows)) for k in args.k}

    samples: dict[str, list[Sample]] = {name: [] for name in ways}
    tau: dict[str, list[float]] = {name: [] for name in ways}
    for drafter, decode in ways.values():
        generate(target, groups[0], SamplingParams(max_new_tokens=4), drafter, decode)
    for i, group in enumerate(track(groups, "groups", disable=not sys.stdout.isatty())):
        for name in [*ways][i % len(ways) :] + [*ways][: i % len(ways)]:
            start = time.perf_counter()
            results = generate(target, group, params, *ways[name])
            seconds = time.perf_counter() - start
            ids = [x for r in results for x in r.ids]
            samples[name].append(Sample(str(i), 0, "", name, ids, seconds, sum(map(len, group))))
            tau[name] += [(len(r.ids) - 1) / max(r.stats.verifies, 1) for r in results]

    bootstrap = Bootstrap([str(i) for i in range(len(groups))], 1000, 0)
    rates = {name: speed(found, bootstrap)[0] or 0.0 for name, found in samples.items()}
    best = {
        rows: max((n for n in ways if n.startswith("EAGLE") and n.endswith(f"batch {rows}")), key=lambda n: rates[n])
        for rows in (1, ROWS)
    }
    plain = f"plain, batch {ROWS}"
    table = Table("way", "tokens/s", "tokens per pass", f"x plain, batch {ROWS} [95 %]", "x itself at batch 1")
    figures: dict[str, Any] = {}
    for name, found in samples.items():
        over, interval = ratio(found, samples[plain], bootstrap)
        alone = rates[name] / rates[name.rsplit(" ", 1)[0] + " 1"]
        passes = sum(tau[name]) / len(tau[name])
        figures[name] = {
            "tokens_per_second": rates[name], "tau": passes, "over_plain": over, "over_plain_interval": interval,
            "over_batch_1": alone,
        }  # fmt: skip
        shown = "" if interval is None else f" [{interval[0]:.2f}, {interval[1]:.2f}]"
        table.add_row(name, f"{rates[name]:.1f}", f"{passes:.2f}", f"{over:.2f}{shown}", f"{alone:.2f}")
    console.print(table)
    left = {name: departures(target, groups, params, *ways[name]) for name in (plain, best[ROWS])}
    for name, (same, excused, wrong) in left.items():
        console.print(f"{name}: {same} of {len(asked)} answers are those of the prompt alone, {excused} more but for a "
                      f"near-tie, {wrong} are not")  # fmt: skip
    bars = [
        bar(f"{best[ROWS]} over {plain}", rates[best[ROWS]] / rates[plain], at_least=OVER_PLAIN),
        bar(f"{best[ROWS]} over {best[1]}", rates[best[ROWS]] / rates[best[1]], at_least=OVER_ONE),
        bar(f"float64, ragged rows: differing answers of {compared_float64}", wrong_float64, at_most=0),
        bar(f"bfloat16, one bucket: differing answers of {compared_bfloat16}", wrong_bfloat16, at_most=0),
        bar("answers that leave those of the prompt alone without a near-tie", sum(x[2] for x in left.values()), at_most=0),
    ]  # fmt: skip
    for one in bars:
        bound = f"at least {one['at_least']:g}" if "at_least" in one else f"at most {one['at_most']:g}"
        console.print(f"{'holds' if one['holds'] else 'FAILS'}  {one['name']}: {one['value']:.3f} ({bound})")
    return {"name": "batch", "quick": args.quick, "machine": machine(target), "threads": args.threads,
            "prompts": len(asked), "tokens": args.tokens, "ways": figures, "best": best,
            "departures": {name: dict(zip(("same", "near_tie", "wrong"), x, strict=True)) for name, x in left.items()},
            "bars": bars}  # fmt: skip


def departures(
    target: Any, groups: list[list[list[int]]], params: Any, drafter: Any, decode: Any
) -> tuple[int, int, int]:
    """Answers of batches that are those of plain decoding alone; that leave it at a near-tie; that leave it otherwise."""
    from draftsmith.inference.speculate import generate
    from draftsmith.inference.ties import parting, pass_rows

    same = excused = wrong = 0
    rows = ROWS * pass_rows(target, drafter, decode)
    for group in groups:
        together = generate(target, group, params, drafter, decode)
        for prompt, other in zip(group, together, strict=True):
            (alone,) = generate(target, [prompt], params)
            found = parting(target, prompt, alone.ids, other.ids, rows)
            same += found is None
            excused += found is not None and found.excused
            wrong += found is not None and not found.excused
    return same, excused, wrong


def ragged(dtype: str) -> tuple[int, int]:
    """Of a tiny target, answers of batches of 8 that are not those of each prompt alone; and how many were compared.

    In float64 alone is a batch of 1; else it is the prompt beside copies of the longest, at a fixed width, so that every
    pass has equally many rows over equally many slots.
    """
    from dataclasses import replace

    from draftsmith.inference.load import free_drafter
    from draftsmith.inference.speculate import DecodeConfig, chain_width, generate
    from draftsmith.losses.probs import SamplingParams
    from draftsmith.models.loading import load_target

    target, exact = load_target("tiny", dtype=dtype), dtype == "float64"
    prompts = prompts_of(target, 2 * ROWS)
    each = [SamplingParams(max_new_tokens=6 + 7 * (i % 5), ignore_eos=i % 3 > 0) for i in range(len(prompts))]
    drafters = {"plain": None, "eagle3": fresh_head(target), "recycling": free_drafter("recycling", target)}
    wrong = compared = 0
    for name, drafter in drafters.items():
        for k in (2, 4) if name != "plain" else (1,):
            width = None if exact else 5 if drafter is None else chain_width(drafter, DecodeConfig(k=k))
            decode = DecodeConfig(k=k, max_rows=ROWS, fixed_width=width)
            for first in range(0, len(prompts), ROWS):
                some, params = prompts[first : first + ROWS], each[first : first + ROWS]
                together = generate(target, some, params, drafter, decode)
                size = max(range(ROWS), key=lambda i: len(some[i]) + params[i].max_new_tokens)
                longest = max(range(ROWS), key=lambda i: len(some[i]))
                for i, result in enumerate(together):
                    if exact:
                        alone = generate(target, [some[i]], params[i], drafter, replace(decode, max_rows=1))[0]
                    else:
                        beside = [size, longest] * (ROWS // 2)
                        rows = [i, *beside[: ROWS - 1]]
                        alone = generate(target, [some[j] for j in rows], [params[j] for j in rows], drafter, decode)[0]
                    compared += 1
                    wrong += alone.ids != result.ids
    return wrong, compared


def fresh_head(target: Any) -> Any:
    """An untrained EAGLE-3 head, by fixed seed."""
    import torch

    from draftsmith.models import METHODS

    torch.manual_seed(0)
    head = METHODS["eagle3"](METHODS["eagle3"].Config(), target.facts)
    head.init_from_target(target)
    return head.to(target.dtype).eval()


def prompts_of(target: Any, count: int) -> list[list[int]]:
    """Ids of 2 to 30 tokens that repeat themselves, by fixed seed."""
    import torch

    dice = torch.Generator().manual_seed(5)
    prompts = []
    for i in range(count):
        piece = torch.randint(3, target.facts.tokens, (2 + (7 * i) % 11,), generator=dice).tolist()
        prompts.append(piece * (1 + i % 3))
    return prompts


if __name__ == "__main__":
    sys.exit(main())
