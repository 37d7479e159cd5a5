"""The main job, measured: distil heads for the real target, decode held-out prompts, compare.

Trains EAGLE-3 by the recipe that `./launch.sh` runs, Medusa, Hydra and EAGLE-1 (10 training minutes each) and EAGLE-3 by
the long recipe (at most 60), then measures all of them in one interleaved run: greedy, bf16, at least 60 held-out prompts
and 2,000 verifications. Prints a table and, last, one JSON line with every bound. Resumes where it stopped: finished
trainings and answered prompts are kept under `--out`.

    OMP_NUM_THREADS=1 python tests/bench/main_job.py              # about 2.5 hours on two cores
    python tests/bench/main_job.py --only eagle3 long             # some parts
    python tests/bench/main_job.py --quick                        # the same path on the tiny target, under a minute
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml
from rich.console import Console

from draftsmith.inference.evaluate import evaluate, write_report
from draftsmith.inference.evaluate_config import EvaluateConfig
from draftsmith.inference.report import print_report

ROOT = Path(__file__).resolve().parents[2]


@dataclass(frozen=True)
class Part:
    """One head: its recipe, training minutes (None = the recipe's own), and the bounds on it (None = only reported)."""

    recipe: str
    minutes: float | None
    most_minutes: float
    tau: float | None = None
    ratio: float | None = None


PARTS = {
    "eagle3": Part("eagle3_smollm2", 10, 10, tau=1.75, ratio=1.2),
    "medusa": Part("medusa_smollm2", 10, 10),
    "hydra": Part("hydra_smollm2", 10, 10),
    "eagle": Part("eagle_smollm2", 10, 10),
    "long": Part("eagle3_smollm2_long", None, 60, tau=2.2, ratio=1.4),
}
TAU_K = 4  # the draft length at which tau is bounded
GRACE = 0.5  # minutes that the last optimiser step may overrun the budget by


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", choices=PARTS, help="train and measure these parts")
    parser.add_argument("--quick", action="store_true", help="tiny target, no bound on figures is meant")
    parser.add_argument("--out", type=Path, default=None, help="runs/main_job, or runs/main_job_quick")
    parser.add_argument("--prompts", type=int, default=90)
    parser.add_argument("--max-new-tokens", type=int, default=96)
    parser.add_argument("--k", type=int, nargs="+", default=[2, TAU_K])
    args = parser.parse_args()
    out = (args.out or ROOT / "runs" / ("main_job_quick" if args.quick else "main_job")).resolve()
    names = [name for name in PARTS if name in (args.only or PARTS)]
    exports = {name: train(name, out, quick=args.quick) for name in names}
    cfg = EvaluateConfig(
        model=str(exports[names[0]]),
        also=tuple(str(exports[name]) for name in names[1:]),
        prompts=10 if args.quick else args.prompts,
        max_new_tokens=8 if args.quick else args.max_new_tokens,
        hf_prompts=20,
        identity_prompts=20,
        k=(TAU_K,) if args.quick else tuple(args.k),
        dtype="float32" if args.quick else "bfloat16",
        bootstrap=100 if args.quick else 2000,
        out=str(out / ("-".join(names) if args.only else "all")),
    )
    console = Console(width=200)
    report = evaluate(cfg.model, cfg, console)
    write_report(report, cfg)
    print_report(report, console)
    figures = {name: figures_of(report, name, exports[name]) for name in names}
    bars = bars_of(report, figures)
    for bar in bars:
        bound = f"at least {bar['at_least']}" if "at_least" in bar else f"at most {bar['at_most']}"
        console.print(
            f"{'holds' if bar['holds'] else 'FAILS'}  {bar['name']}: {bar['value']} ({bound})", highlight=False
        )
    print(json.dumps({"name": "main_job", "quick": args.quick, "figures": figures, "bars": bars}))
    return 0 if args.quick or all(bar["holds"] for bar in bars) else 1


def train(name: str, out: Path, *, quick: bool) -> Path:
    """Train one part (resumed by the training script itself; skipped when its export is complete); its export."""
    part, run = PARTS[name], out / name
    done = run / "done"
    if done.exists():
        return run / "export"
    settings = [f"run={run}", f"states.folder={states_folder(name, out)}", "states.teacher=last_hidden"]
    if quick:
        settings += ["target.name=tiny", "target.dtype=float32", "precision=fp32", "data.limit=40", "draft_vocab=null"]
        settings += ["budget.minutes=null", "budget.steps=4", "evaluate.conversations=4", "evaluate.probe_prompts=1"]
    elif part.minutes is not None:
        settings.append(f"budget.minutes={part.minutes:g}")
    recipe = ["train/distill_draft.py", "--config", f"configs/{part.recipe}.yaml"]
    command = ["./launch.sh", *recipe, *settings]
    print("+", shlex.join(command), flush=True)
    code = subprocess.run(command, cwd=ROOT, env=os.environ | ({"PROCESSES": "1"} if quick else {})).returncode
    if code:
        raise SystemExit(
            f"training {name} ended with exit code {code}; its messages are above, this command resumes it"
        )
    done.touch()
    return run / "export"


def states_folder(name: str, out: Path) -> Path:
    """Captured states hold what their method reads; what EAGLE-3 reads serves the other heads too."""
    if name == "long":
        return out / "states_long"
    return out / ("states" if name == "eagle3" or (out / "eagle3" / "done").exists() else "states_heads")


def figures_of(report: dict[str, Any], name: str, export: Path) -> dict[str, Any]:
    """tau at each K, the K that is fastest, and what it gains, with intervals; training minutes from the export."""
    label = next(label for label, export_name in report["run"]["exports"].items() if export_name == name)
    rows = [row for row in report["rows"] if row["drafter"] == label]
    best = max((row for row in rows if not row["red"]), key=lambda row: row["tokens_per_second"], default=None)
    facts = yaml.safe_load((export / "run.yaml").read_text(encoding="utf-8"))
    at_k = {row["draft_length"]: row for row in rows}
    return {
        "training_minutes": facts["training"]["minutes"],
        "tau": {k: round(row["tau"], 4) for k, row in at_k.items()},
        "tau_interval": {k: row["tau_interval"] for k, row in at_k.items()},
        "alpha": {k: [None if a is None else round(a, 4) for a in row["alpha"]] for k, row in at_k.items()},
        "verifications": {k: row["verifications"] for k, row in at_k.items()},
        "picked_k": best and best["draft_length"],
        "tokens_per_second": best and round(best["tokens_per_second"], 2),
        "ratio_to_plain": best and round(best["ratio_to_plain"], 4),
        "ratio_to_plain_interval": best and best["ratio_to_plain_interval"],
        "ratio_to_hf": best and best["ratio_to_hf"],
        "identical": f"{sum(r['identical_prompts'] for r in rows)}/{sum(r['checked_prompts'] for r in rows)}",
    }


def bars_of(report: dict[str, Any], figures: dict[str, dict[str, Any]]) -> list[dict[str, Any]]:
    """Every bound; a part that was not run fails its own."""
    bars = [
        bar("held-out prompts", report["run"]["prompts"], at_least=60),
        bar("rows whose losslessness check is red", sum(row["red"] is not None for row in report["rows"]), at_most=0),
    ]
    for name, part in PARTS.items():
        of = figures.get(name, {})
        bars.append(bar(f"{name}: training minutes", of.get("training_minutes"), at_most=part.most_minutes + GRACE))
        if part.tau is not None:
            verifications = of.get("verifications", {}).get(TAU_K)
            bars.append(bar(f"{name}: verifications at K={TAU_K}", verifications, at_least=2000))
            bars.append(bar(f"{name}: tau at K={TAU_K}", of.get("tau", {}).get(TAU_K), at_least=part.tau))
        if part.ratio is not None:
            ratio = of.get("ratio_to_plain")
            bars.append(bar(f"{name}: tokens/s over plain at the picked K", ratio, at_least=part.ratio))
    return bars


def bar(
    name: str, value: float | None, *, at_least: float | None = None, at_most: float | None = None
) -> dict[str, Any]:
    if at_least is not None:
        return {"name": name, "value": value, "at_least": at_least, "holds": value is not None and value >= at_least}
    assert at_most is not None
    return {"name": name, "value": value, "at_most": at_most, "holds": value is not None and value <= at_most}


if __name__ == "__main__":
    sys.exit(main())
