"""Parallel drafters beside sequential ones and those without training, on equal terms.

Every head reads the same conversations of the same target for the same training minutes, by its own recipe; those that
read states share one captured set (taps of EAGLE-3's default, and the last hidden state). Then all of them, and the
training-free drafters, answer the same held-out prompts in one interleaved run per temperature: tau with intervals, what
a draft costs, tokens per second. The fastest parallel drafter and EAGLE-3 meet once more on more prompts, with trees
too (`best`). Three small tables follow on the same heads: trees against chains, block against token-by-token
verification, chains cut by confidence against whole ones. `curve` trains DSpark, DFlash, the fastest parallel drafter
and EAGLE-3 on a quarter and on half of the data, for as much of the time.

    OMP_NUM_THREADS=1 python tests/bench/drafters.py                    # about 3 hours on two cores
    python tests/bench/drafters.py --only dflash eagle3                 # some heads: train and measure these
    python tests/bench/drafters.py --only pard --measure                # train, measure nothing
    python tests/bench/drafters.py --measure greedy best                # two of the tables
    python tests/bench/drafters.py --quick                              # the same path on a tiny target, under a minute

Resumes where it stopped: finished trainings, finished measurements and answered prompts are kept under `--out`. PARD's
small language model, and the draft model, are the target's own first layers (configs/pard_smollm2.yaml): there is no
smaller model of its family. JetSpec is DFlash with causal blocks that start with the anchor and hold masks, and the KL to the target.
"""

from __future__ import annotations

import argparse
import json
import shlex
import subprocess
import sys
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import yaml
from main_job import GRACE, bar
from rich.console import Console
from rich.table import Table

from draftsmith.data.encode import encode_all
from draftsmith.data.sources import split_conversations
from draftsmith.inference.capture import capture
from draftsmith.inference.evaluate import evaluate, write_report
from draftsmith.inference.evaluate_config import EvaluateConfig
from draftsmith.inference.figures import Bootstrap
from draftsmith.models import TRAINING_FREE
from draftsmith.models.eagle3 import default_taps
from draftsmith.models.loading import load_target
from draftsmith.train import distill_draft

ROOT = Path(__file__).resolve().parents[2]
Row = dict[str, Any]

TINY_TAPS = "drafter.taps=[1,2,3]"  # the tiny target's default of EAGLE-3, where a recipe names others


@dataclass(frozen=True)
class Part:
    """One head: its recipe, whether it is one of the parallel drafters or stands beside them, and what the tiny target
    needs changed."""

    recipe: str
    parallel: bool = True
    tiny: tuple[str, ...] = ()


PARTS = {
    "eagle3": Part("eagle3_smollm2", parallel=False),
    "eagle": Part("eagle_smollm2", parallel=False),
    "hydra": Part("hydra_smollm2", parallel=False),
    "medusa": Part("medusa_smollm2", parallel=False),
    "draft_model": Part("draft_model_smollm2", parallel=False, tiny=("drafter.lm.layers=2",)),
    "dflash": Part("dflash_smollm2", tiny=(TINY_TAPS,)),
    "dspark": Part("dspark_smollm2", tiny=(TINY_TAPS, "drafter.rank=8")),
    "jetspec": Part("jetspec_smollm2", tiny=(TINY_TAPS,)),
    "peagle": Part("peagle_smollm2"),
    "pard": Part("pard_smollm2", tiny=("drafter.lm.layers=2", "drafter.mask_id=null")),
    "dual_view": Part("dual_view_smollm2", tiny=("drafter.rank=4",)),
    "bita": Part("bita_smollm2"),
    "ppd": Part("ppd_smollm2"),
    "falcon": Part("falcon_smollm2"),
}
MEASURES = ("greedy", "best", "sampled", "trees", "block", "cut", "curve")
SHALLOW = ("bita", "ppd")  # their recipes draft 3 tokens
TREE_HEADS = ("dflash", "dspark", "peagle", "pard")
TREE_SHAPES = ("chain", "best_first", "opt", "cape", "capped", "ppd")
BEST_TREES = ("chain", "dynamic", "best_first")
BLOCK_HEADS = ("eagle3", "dflash", "dspark", "peagle")
CUT_HEADS = ("eagle3", "dflash", "dspark")
CURVE = {"x1": 0.25, "x2": 0.5}  # label -> share of data and minutes; all of them are x4
CURVE_HEADS = ("eagle3", "dflash", "dspark")  # and the fastest parallel drafter
TAU_K = 4  # the draft length at which DSpark and DFlash are compared
QUICK = (
    *("target.name=tiny", "target.dtype=float32", "precision=fp32", "draft_vocab=null", "data.limit=16"),
    *("budget.minutes=null", "budget.steps=2", "evaluate.conversations=2", "evaluate.probe_prompts=0"),
    *("log.progress=false", "log.every=1"),
)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", choices=PARTS, default=list(PARTS), metavar="HEAD", help=", ".join(PARTS))
    parser.add_argument(
        "--measure", nargs="*", choices=MEASURES, default=list(MEASURES), metavar="WHAT", help=", ".join(MEASURES)
    )
    parser.add_argument("--quick", action="store_true", help="tiny target, no bound on figures is meant")
    parser.add_argument("--out", type=Path, default=None, help="runs/drafters, or runs/drafters_quick")
    parser.add_argument("--minutes", type=float, default=5, help="training minutes per head (default: %(default)s)")
    parser.add_argument("--limit", type=int, default=5000, help="conversations (default: %(default)s)")
    parser.add_argument("--prompts", type=int, default=20, help="held-out prompts (default: %(default)s)")
    parser.add_argument(
        "--best-prompts", type=int, default=60, help="held-out prompts of `best` (default: %(default)s)"
    )
    parser.add_argument(
        "--table-prompts", type=int, default=15, help="held-out prompts of trees and cut (default: %(default)s)"
    )
    parser.add_argument("--max-new-tokens", type=int, default=64)
    parser.add_argument("--k", type=int, nargs="+", default=[2, TAU_K], help="draft lengths, greedy")
    parser.add_argument("--best-k", type=int, nargs="+", default=[2, 3], help="draft lengths of `best`")
    parser.add_argument("--best-nodes", type=int, default=6, help="nodes of trees in `best`")
    parser.add_argument("--sampled-k", type=int, nargs="+", default=[2, TAU_K], help="draft lengths at temperature 1")
    parser.add_argument("--prompt-rows", type=int, default=12, help="most rows of prompt tokens beside a chain")
    parser.add_argument("--nodes", type=int, default=12, help="nodes of trees")
    parser.add_argument("--threshold", type=float, default=0.3, help="confidence below which a chain is cut")
    args = parser.parse_args()
    if {"best", "curve"} & {*args.measure} and "greedy" not in args.measure:
        parser.error("best and curve take the fastest of the greedy run: add greedy (it is not repeated)")
    if args.quick:
        args.prompts = args.table_prompts = args.best_prompts = 3
        args.max_new_tokens, args.k, args.best_k, args.sampled_k, args.nodes = 6, [3, TAU_K], [3], [3, TAU_K], 6
    args.out = (args.out or ROOT / "runs" / ("drafters_quick" if args.quick else "drafters")).resolve()
    bench = Bench(args, Console(width=160, highlight=False))
    names = [name for name in PARTS if name in args.only]  # the table's order
    exports = {name: bench.head(name) for name in names}

    reports: dict[str, Row] = {}
    figures: Row = {"training": {name: training_of(export) for name, export in exports.items()}}
    for what in MEASURES:
        tables = {"trees": bench.trees, "block": bench.block, "cut": bench.cut}
        if what not in args.measure:
            continue
        if what in tables:
            figures[what] = tables[what](exports)
        elif what == "best":
            reports[what] = bench.best(exports, reports["greedy"])
        elif what == "curve":
            figures[what] = bench.curve(exports, reports["greedy"])
        else:
            reports[what] = bench.everything(what, exports)
    if reports:
        figures["drafters"] = bench.summary({what: reports[what] for what in ("greedy", "sampled") if what in reports})
    bars = bars_of(figures, reports, names, args)
    if speed := figures.get("best_against_eagle3"):
        bench.console.print(why(speed, speed["eagle3"]))
    for one in bars:
        bound = f"at least {one['at_least']}" if "at_least" in one else f"at most {one['at_most']}"
        bench.console.print(f"{'holds' if one['holds'] else 'FAILS'}  {one['name']}: {one['value']} ({bound})")
    print(json.dumps({"name": "drafters", "quick": args.quick, "figures": figures, "bars": bars}))
    return 0 if args.quick or all(one["holds"] for one in bars) else 1


class Bench:
    """One folder of trainings and measurements."""

    def __init__(self, args: argparse.Namespace, console: Console) -> None:
        self.args, self.console, self.out = args, console, args.out
        self.some = "" if set(args.only) == set(PARTS) else "-" + "-".join(sorted(args.only))

    # Training

    def head(self, name: str, label: str = "") -> Path:
        """Train one head, unless its export is there; a label of `CURVE` means its share of data and minutes."""
        args, part, share = self.args, PARTS[name], CURVE.get(label, 1.0)
        settings = [f"data.limit={round(args.limit * share)}", f"budget.minutes={args.minutes * share:g}"]
        settings = list(QUICK) if args.quick else settings
        whole = list(QUICK) if args.quick else [f"data.limit={args.limit}"]
        capture_states(whole, self.out / "states")
        settings += [*(part.tiny if args.quick else ()), "states.teacher=last_hidden"]
        run = self.out / (f"{name}_{label}" if label else name)
        return train(part.recipe, run, settings, self.out / "states", quick=args.quick)

    # Measuring

    def run(self, what: str, exports: dict[str, Path], free: Sequence[str] = (), **settings: Any) -> Row:
        """One interleaved run over these heads; kept, and not repeated while heads and settings are the same.

        Its rows get `head`: the name of the part, or of the training-free drafter."""
        args = self.args
        models, folder = [*map(str, exports.values()), *free], self.out / (what + self.some)
        cfg = EvaluateConfig(
            **{
                "model": models[0],
                "also": tuple(models[1:]),
                "prompts": args.prompts,
                "max_new_tokens": args.max_new_tokens,
                "hf_prompts": 0,
                "identity_prompts": 20,
                "dtype": "float32" if args.quick else "bfloat16",
                "bootstrap": 100 if args.quick else 2000,
                "out": str(folder),
                **settings,
            }
        )
        weights = [(export / "config.json").stat().st_mtime_ns for export in exports.values()]
        key = json.dumps([asdict(cfg), weights], default=str)
        done, stored = folder / "done", folder / "report.json"
        if done.is_file() and done.read_text() == key:
            report = json.loads(stored.read_text(encoding="utf-8"))
        else:
            self.console.print(f"+ measuring {what}: {', '.join([*exports, *free])}")
            report = evaluate(cfg.model, cfg, self.console)
            write_report(report, cfg)
            done.write_text(key)
        for row in report["rows"]:
            row["head"] = report["run"]["exports"].get(row["drafter"], row["drafter"])
        return report

    def everything(self, what: str, exports: dict[str, Path]) -> Row:
        """All heads and all training-free drafters, greedy or at temperature 1."""
        heat, k = (0.0, self.args.k) if what == "greedy" else (1.0, self.args.sampled_k)
        settings = {"temperatures": (heat,), "k": tuple(k), "prompt_rows": self.args.prompt_rows}
        return self.run(what, exports, tuple(TRAINING_FREE), **settings)

    def summary(self, reports: dict[str, Row]) -> dict[str, Row]:
        """The main table: per drafter and draft length, greedy beside temperature 1."""
        table: dict[str, Row] = {}
        for what, report in reports.items():
            for row in drafts_of(report):
                at = table.setdefault(row["head"], {}).setdefault(str(row["draft_length"]), {})
                at[what] = facts_of(row) | {"alpha": row["alpha"], "identical": row["identical_to_plain"]}
        lines = []
        for head, by_k in table.items():
            for k, at in sorted(by_k.items()):
                cells = [head, k]
                for what in ("greedy", "sampled"):
                    f = at.get(what)
                    cells += ["", "", "", "", ""] if f is None else show(f)
                lines.append(cells)
        half = ("tau [95 %]", "draft ms", "share", "tok/s", "x plain")
        self.table("drafters: greedy, then at temperature 1", ("drafter", "K", *half, *half), lines)
        return table

    def trees(self, exports: dict[str, Path]) -> list[Row]:
        """Trees against chains, greedy, at equal depth: paired by prompt."""
        rows: list[Row] = []
        for what, heads, k in (("trees", TREE_HEADS, TAU_K), ("trees_prompt_tokens", SHALLOW, 3)):
            chosen = {name: export for name, export in exports.items() if name in heads}
            if not chosen:
                continue
            settings = {"trees": TREE_SHAPES, "k": (k,), "nodes": self.args.nodes, "prompts": self.args.table_prompts}
            report = self.run(what, chosen, **settings)
            rows += [against(row, find(report, row["head"], "chain", k)) for row in drafts_of(report)]
        return self.compared(f"trees of at most {self.args.nodes} nodes against chains of the same depth, greedy", rows)

    def block(self, exports: dict[str, Path]) -> list[Row]:
        """Block against token-by-token verification of drawn chains at temperature 1, on the same prompts. Two runs: their
        tau are compared; their speeds each with plain decoding of their own run."""
        chosen = {name: export for name, export in exports.items() if name in BLOCK_HEADS}
        if not chosen:
            return []
        reports = {
            rule: self.run(f"verify_{rule}", chosen, temperatures=(1.0,), k=(TAU_K,), verifier=rule)
            for rule in ("ratio", "block")
        }
        rows = []
        for row in drafts_of(reports["ratio"]) + drafts_of(reports["block"]):
            line = against(row, find(reports["ratio"], row["head"], "chain", TAU_K))
            rows.append(line | {"tree": row["verifier"], "speed_against": None, "speed_interval": None})
        return self.compared(
            f"block against token-by-token (ratio) verification, chains of {TAU_K}, temperature 1", rows
        )

    def cut(self, exports: dict[str, Path]) -> list[Row]:
        """Chains cut by confidence against whole ones of the same and of other lengths, greedy."""
        chosen = {name: export for name, export in exports.items() if name in CUT_HEADS}
        if not chosen:
            return []
        settings = {"trees": ("chain", "cut"), "threshold": self.args.threshold, "prompts": self.args.table_prompts}
        report = self.run("cut", chosen, k=(2, TAU_K), **settings)
        rows = [against(row, find(report, row["head"], "chain", TAU_K)) for row in drafts_of(report)]
        return self.compared(
            f"cut below confidence {self.args.threshold} against whole chains of {TAU_K}, greedy", rows
        )

    def best(self, exports: dict[str, Path], greedy: Row) -> Row:
        """EAGLE-3 and the parallel drafter that was fastest in the greedy run, on more prompts, by chains and by the trees
        that suit each: those of EAGLE-2 grown pass by pass, and those of one pass's marginals."""
        args, names = self.args, {"eagle3", *parallel_best(greedy, exports)} & {*exports}
        settings = {"k": tuple(args.best_k), "prompts": args.best_prompts, "nodes": args.best_nodes}
        settings |= {"trees": BEST_TREES}
        report = self.run("best", {name: exports[name] for name in PARTS if name in names}, **settings)
        if base := fastest(report, ["eagle3"]):
            title = f"the two on {args.best_prompts} prompts, trees of at most {args.best_nodes} nodes, against EAGLE-3's fastest"
            self.compared(title, [against(row, base) for row in drafts_of(report)])
        return report

    def curve(self, exports: dict[str, Path], greedy: Row) -> list[Row]:
        """Heads at 1, 2 and 4 times the data and minutes, in one run: each beside EAGLE-3 on as much."""
        names = {*CURVE_HEADS, *parallel_best(greedy, exports)} & {*exports}
        heads = {}
        for name in [name for name in PARTS if name in names]:
            heads |= {f"{name}_{label}": self.head(name, label) for label in CURVE} | {name: exports[name]}
        report = self.run("curve", heads, k=(TAU_K,), prompt_rows=self.args.prompt_rows)
        rows = []
        for row in drafts_of(report):
            name, _, times = row["head"].partition("_x")
            same = f"eagle3_x{times}" if times else "eagle3"
            base = next((r for r in drafts_of(report) if r["head"] == same), row)
            line = against(row, base) | {"head": name, "tree": f"{times or 4} x data"}
            rows.append(line | {"training": training_of(heads[row["head"]])})
        return self.compared(f"learning curve, chains of {TAU_K}, greedy, against EAGLE-3 on as much", rows)

    def compared(self, title: str, rows: list[Row]) -> list[Row]:
        """Print a small table of `against` rows; they are its figures too."""
        lines = []
        for row in rows:
            tau = percent(row["tau_against"], row["tau_against_interval"])
            speed = percent(row["speed_against"], row["speed_against_interval"])
            lines.append([row["head"], row["tree"], str(row["K"]), *show(row), tau, speed])
        columns = (
            "drafter",
            "",
            "K",
            "tau [95 %]",
            "draft ms",
            "share",
            "tok/s",
            "x plain",
            "tau against",
            "speed against",
        )
        self.table(title, columns, lines)
        return rows

    def table(self, title: str, columns: Sequence[str], lines: Sequence[Sequence[str]]) -> None:
        table = Table(*columns, title=title, title_justify="left")
        for line in lines:
            table.add_row(*line)
        self.console.print(table)


def capture_states(settings: Sequence[str], folder: Path) -> None:
    """The states that any of the heads reads, for training and held-out conversations, unless they are there."""
    if all((folder / split / "index.json").is_file() for split in ("train", "heldout")):
        return
    argv = ["--config", str(ROOT / f"configs/{PARTS['eagle3'].recipe}.yaml"), *settings]
    config = distill_draft.read_config(argv, "drafters.py")
    target = load_target(config.target.name, dtype=config.target.dtype)
    for split, talks in zip(
        ("train", "heldout"), split_conversations(config.data, config.evaluate.conversations), strict=True
    ):
        samples, report = encode_all(talks, target.tokenizer, config.data.max_length)
        print(f"+ capturing {split}: {report}", flush=True)
        capture(target, samples, folder / split, default_taps(target.facts.layers), progress=sys.stderr.isatty())


def train(recipe: str, run: Path, settings: Sequence[str], states: Path, *, quick: bool) -> Path:
    """Train by a recipe (resumed by the training script itself; skipped when its export is complete); its export. The
    quick form stays in this process, the other goes through `./launch.sh`."""
    done, key = run / "done", json.dumps([recipe, *settings])
    if done.is_file():
        if done.read_text() != key:
            raise SystemExit(f"{run} holds a training with other settings: give another --out, or delete it")
        return run / "export"
    argv = ["--config", f"configs/{recipe}.yaml", *settings, f"run={run}", f"states.folder={states}"]
    launch = ["./launch.sh", "train/distill_draft.py", *argv]
    print("+", shlex.join(launch[quick:]), flush=True)
    if quick:
        argv[1] = str(ROOT / argv[1])
        code = distill_draft.main(argv)
    else:
        code = subprocess.run(launch, cwd=ROOT).returncode
    if code:
        raise SystemExit(f"training {run.name} ended with exit code {code}; its messages are above, this resumes it")
    done.write_text(key)
    return run / "export"


def training_of(export: Path) -> Row:
    """Minutes, tokens and data of a training, from its export and its run."""
    facts = yaml.safe_load((export / "run.yaml").read_text(encoding="utf-8"))
    training, data = facts["training"], facts["data"]
    lines = [json.loads(line) for line in (export.parent / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]
    last = [line for line in lines if line["kind"] == "train"][-1]
    return {
        "minutes": training["minutes"],
        "steps": training["steps"],
        "tokens": training["tokens"],
        "tokens_per_second": last["tokens"] / last["seconds"],
        "data": data["fingerprint"],
        "heldout": training["heldout"],
    }


def drafts_of(report: Row) -> list[Row]:
    return [row for row in report["rows"] if row["draft_length"]]


def find(report: Row, head: str, tree: str, k: int) -> Row:
    return next(r for r in drafts_of(report) if (r["head"], r["tree"], r["draft_length"]) == (head, tree, k))


def fastest(report: Row, heads: Sequence[str]) -> Row | None:
    """The row with the most tokens per second among these heads; rows whose losslessness check is red have none."""
    rows = [row for row in drafts_of(report) if row["head"] in heads and row["tokens_per_second"]]
    return max(rows, key=lambda row: row["tokens_per_second"], default=None)


def parallel_best(greedy: Row, names: Iterable[str]) -> list[str]:
    """The fastest parallel drafter of a run, if any."""
    row = fastest(greedy, [name for name in names if PARTS[name].parallel])
    return [] if row is None else [row["head"]]


def facts_of(row: Row) -> Row:
    """What is shown of a row. `draft_share`: of the time of a pass, what drafting takes."""
    parts = row["seconds_per_pass"]
    total = sum(parts[name] for name in ("draft", "verify", "commit", "other"))
    return {
        "head": row["head"],
        "tree": row["tree"],
        "K": row["draft_length"],
        "tau": row["tau"],
        "tau_interval": row["tau_interval"],
        "verifications": row["verifications"],
        "draft_ms": 1000 * parts["draft"],
        "verify_ms": 1000 * parts["verify"],
        "draft_share": parts["draft"] / total if total else None,
        "tokens_per_second": row["tokens_per_second"],
        "tokens_per_second_interval": row["tokens_per_second_interval"],
        "ratio_to_plain": row["ratio_to_plain"],
        "red": row["red"],
    }


def against(row: Row, base: Row) -> Row:
    """The facts of a row, and its tau and speed relative to another's on the same prompts."""
    tau, tau_interval = paired(row, base, "verified_tokens", "verifications")
    speed, speed_interval = paired(row, base, "tokens", "seconds")
    return facts_of(row) | {
        "against": f"{base['head']} {base['tree']} K={base['draft_length']}",
        "tau_against": tau,
        "tau_against_interval": tau_interval,
        "speed_against": speed,
        "speed_against_interval": speed_interval,
    }


def paired(row: Row, base: Row, top: str, bottom: str) -> tuple[float | None, list[float] | None]:
    """Relative difference of two pooled rates (top over bottom) over the prompts that both answered, and its 95 %
    interval by a bootstrap over prompts that draws the same prompts for both."""
    ours, theirs = row["by_prompt"], base["by_prompt"]
    prompts = [prompt for prompt in ours if prompt in theirs]

    def sums(table: Row, name: str) -> np.ndarray:
        return np.array([table[prompt][name] or 0.0 for prompt in prompts], dtype=float)

    a, s, b, t = sums(ours, top), sums(ours, bottom), sums(theirs, top), sums(theirs, bottom)
    if not (s.sum() and b.sum() and t.sum()):
        return None, None
    interval = Bootstrap(prompts, 2000, seed=0).interval(lambda w: ((w @ a) / (w @ s)) / ((w @ b) / (w @ t)) - 1)
    return float((a.sum() / s.sum()) / (b.sum() / t.sum()) - 1), interval


def bars_of(figures: Row, reports: dict[str, Row], names: Sequence[str], args: argparse.Namespace) -> list[Row]:
    """Every bound; what was not run fails its own. Of `best`, which the greedy run chose, each row is taken at its fastest
    draft length; then their difference is taken prompt by prompt."""
    report = reports.get("best", {"rows": []})
    best = fastest(report, [name for name in names if PARTS[name].parallel])
    eagle = fastest(report, ["eagle3"])
    speed: Row = {}
    if best is not None and eagle is not None:
        speed = figures["best_against_eagle3"] = against(best, eagle) | {"eagle3": facts_of(eagle)}
    low = (speed.get("speed_against_interval") or [None])[0]
    gains: Row = {}
    for what, report in reports.items():
        pair = {r["head"]: r for r in drafts_of(report) if r["draft_length"] == TAU_K}
        if {"dspark", "dflash"} <= pair.keys():
            gain, interval = paired(pair["dspark"], pair["dflash"], "verified_tokens", "verifications")
            if gain is not None:
                gains[what] = {"ratio": 1 + gain, "interval": interval and [1 + x for x in interval]}
    figures["dspark_over_dflash"] = gains
    trainings = figures["training"]
    data = {facts["data"] for facts in trainings.values()}
    minutes = max((facts["minutes"] for facts in trainings.values()), default=None)
    red = [row["name"] for report in reports.values() for row in drafts_of(report) if row["red"]]
    figures["red"] = red
    return [
        bar("best parallel drafter against EAGLE-3, tokens/s: lower end of the paired difference", low, at_least=-0.02),
        bar(f"DSpark over DFlash, greedy tau at K={TAU_K}", gains.get("greedy", {}).get("ratio"), at_least=1.10),
        bar("held-out prompts of the two", reports["best"]["run"]["prompts"] if best else None, at_least=60),
        bar("longest training, minutes", minutes, at_most=args.minutes + GRACE),
        bar("different training sets", len(data), at_most=1),
        bar("heads and training-free drafters that were not measured", missing(reports, names), at_most=0),
        bar("rows whose losslessness check is red", len(red) if reports else None, at_most=0),
    ]


def why(best: Row, eagle: Row) -> str:
    """The two fastest rows taken apart: tau over the cost of a pass."""
    parts = [
        f"{row['head']} {row['tree']} K={row['K']}: tau {row['tau']:.3f}, draft {row['draft_ms']:.2f} + verify {row['verify_ms']:.2f} ms"
        for row in (best, eagle)
    ]
    cost = [row["draft_ms"] + row["verify_ms"] for row in (best, eagle)]
    needed = eagle["tau"] * cost[0] / cost[1]
    return f"{parts[0]}; {parts[1]}; at these costs equal speed needs tau {needed:.3f} of {best['head']}"


def missing(reports: dict[str, Row], names: Sequence[str]) -> int:
    """Of all there are, those without a row in the greedy or in the sampled run."""
    count = 0
    for what in ("greedy", "sampled"):
        seen = {row["head"] for row in drafts_of(reports.get(what, {"rows": []}))}
        count += len({*PARTS, *TRAINING_FREE} - seen)
    return count


def show(facts: Row) -> list[str]:
    """tau, draft milliseconds, draft share, tokens per second and ratio to plain as cells."""
    interval = facts["tau_interval"]
    tau = "-" if facts["tau"] is None else f"{facts['tau']:.2f}"
    tau += "" if interval is None else f" [{interval[0]:.2f}, {interval[1]:.2f}]"
    share, speed, ratio = (facts[name] for name in ("draft_share", "tokens_per_second", "ratio_to_plain"))
    return [
        tau,
        f"{facts['draft_ms']:.2f}",
        "-" if share is None else f"{share:.0%}",
        "red" if facts["red"] else "-" if speed is None else f"{speed:.1f}",
        "red" if facts["red"] else "-" if ratio is None else f"{ratio:.2f}",
    ]


def percent(value: float | None, interval: Sequence[float] | None) -> str:
    if value is None:
        return "-"
    return f"{value:+.1%}" + ("" if interval is None else f" [{interval[0]:+.1%}, {interval[1]:+.1%}]")


if __name__ == "__main__":
    sys.exit(main())
