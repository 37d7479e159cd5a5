"""Conditional drop-token against the full layout: P-EAGLE from captured states, K = 8 slots deep.

The full layout places all K - 1 slots behind every supervised row; drop-token keeps 0.7 ** j of the rows at depth j, at
least 0.2 (PARD, arXiv:2504.18583, section 3.2). That also shifts weight to the first depths, so the full layout's slots
weigh 0.7 ** j here: what is left to compare is the dropping. Both are trained on the same tokens, in the same order, from
the same initial weights, for each of several seeds, and take turns. Compared are tokens per second of the training loop,
and the acceptance that is left in the end: on held-out conversations, with every slot, the mean over the K depths of the
expected acceptance (sum of min(p, q)). Its difference is relative to the full layout's; the interval is Student's t over
seeds.

    OMP_NUM_THREADS=1 python tests/bench/drop_token.py                  # about 25 minutes on two cores, 7 of them capturing
    python tests/bench/drop_token.py --out OUT drafter.depth_weight=1   # slots weigh alike in both; any setting of the recipe
    python tests/bench/drop_token.py --quick                            # tiny target, under a minute

Resumes where it stopped: finished trainings are kept under `--out`.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from statistics import mean, stdev
from typing import Any

from drafters import QUICK, ROOT, Row, train, training_of
from main_job import bar
from rich.console import Console
from rich.table import Table

RECIPE, K = "peagle_smollm2", 8
LAYOUTS = {
    "full": ("drafter.ratio=1.0", "drafter.depth_weight=0.7"),
    "drop": ("drafter.ratio=0.7", "drafter.least=0.2"),
}
T975 = {2: 12.706, 3: 4.303, 4: 3.182, 5: 2.776, 6: 2.571, 7: 2.447, 8: 2.365, 9: 2.306, 10: 2.262}  # by sample size


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("settings", nargs="*", metavar="key=value", help="settings of the recipe, for both layouts")
    parser.add_argument("--quick", action="store_true", help="tiny target, no bound on figures is meant")
    parser.add_argument("--out", type=Path, default=None, help="runs/drop_token, or runs/drop_token_quick")
    parser.add_argument("--seeds", type=int, choices=T975, default=3, help="trainings of each layout (default: 3)")
    parser.add_argument("--tokens", type=int, default=200_000, help="training tokens of each (default: 200,000)")
    parser.add_argument("--conversations", type=int, default=48, help="held-out conversations (default: 48)")
    args = parser.parse_intermixed_args()
    out = (args.out or ROOT / "runs" / ("drop_token_quick" if args.quick else "drop_token")).resolve()
    settings = [f"drafter.depths={K}", "evaluate.probe_prompts=0", "evaluate.every=1000000"]
    if args.quick:
        settings += QUICK
    else:
        settings += [f"budget.tokens={args.tokens}", "budget.minutes=null"]
        settings.append(f"evaluate.conversations={args.conversations}")

    runs: dict[str, list[Row]] = {name: [] for name in LAYOUTS}
    for seed in range(args.seeds):
        for name in list(LAYOUTS)[:: 1 if seed % 2 else -1]:  # which comes first alternates
            of_run = [*settings, *LAYOUTS[name], *args.settings, f"seed={seed}"]
            export = train(RECIPE, out / f"{name}_{seed}", of_run, out / "states", quick=args.quick)
            runs[name].append(figures_of(export))

    console = Console(width=120, highlight=False)
    table = Table(
        "layout", "seed", "tokens/s", "acceptance", "tau", "by depth", title=f"P-EAGLE, K={K}, teacher-forced"
    )
    for name, rows in runs.items():
        for seed, row in enumerate(rows):
            depths = " ".join(f"{a:.3f}" for a in row["by_depth"])
            speed = f"{row['tokens_per_second']:.0f}"
            table.add_row(name, str(seed), speed, f"{row['acceptance']:.4f}", f"{row['tau']:.3f}", depths)
    console.print(table)
    speeds = {name: rate(rows) for name, rows in runs.items()}
    change = differences(runs, "acceptance")
    low, high = t_interval(change)
    tau = differences(runs, "tau")
    figures = {
        "runs": runs,
        "tokens_per_second": {name: round(speed, 1) for name, speed in speeds.items()},
        "acceptance_change": {"by_seed": change, "mean": mean(change), "interval": [low, high]},
        "tau_change": {"by_seed": tau, "mean": mean(tau), "interval": t_interval(tau)},
    }
    bars = [
        bar(f"training tokens/s at K={K}, drop-token over full layout", speeds["drop"] / speeds["full"], at_least=2.0),
        bar("seeds", args.seeds, at_least=3),
        bar("relative change of acceptance, lower end of the 95 % interval", low, at_least=-0.03),
        bar("relative change of acceptance, upper end of the 95 % interval", high, at_most=0.03),
    ]
    for one in bars:
        bound = f"at least {one['at_least']}" if "at_least" in one else f"at most {one['at_most']}"
        console.print(f"{'holds' if one['holds'] else 'FAILS'}  {one['name']}: {one['value']} ({bound})")
    print(json.dumps({"name": "drop_token", "quick": args.quick, "figures": figures, "bars": bars}))
    return 0 if args.quick or all(one["holds"] for one in bars) else 1


def figures_of(export: Path) -> Row:
    """Speed and held-out acceptance of one training."""
    facts: dict[str, Any] = training_of(export)
    heldout = facts["heldout"]
    by_depth = [heldout[f"accept_{depth}"] for depth in range(1, K + 1)]
    return facts | {"acceptance": mean(by_depth), "tau": heldout["tau"], "by_depth": by_depth}


def rate(rows: list[Row]) -> float:
    """Tokens per second over all seeds."""
    return sum(row["tokens"] for row in rows) / sum(row["tokens"] / row["tokens_per_second"] for row in rows)


def differences(runs: dict[str, list[Row]], name: str) -> list[float]:
    """By seed: what drop-token changes, as a share of the full layout's figure."""
    return [drop[name] / full[name] - 1 for drop, full in zip(runs["drop"], runs["full"], strict=True)]


def t_interval(values: list[float]) -> tuple[float, float]:
    """95 % interval of the mean, by Student's t."""
    half = T975[len(values)] * stdev(values) / len(values) ** 0.5
    return mean(values) - half, mean(values) + half


if __name__ == "__main__":
    sys.exit(main())
