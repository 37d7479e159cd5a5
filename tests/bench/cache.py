"""Captured states in less: bytes per token, what they cost in tau, and how fast they are read.

For each format the target's states are captured anew, an EAGLE-3 head is trained on them by the main recipe (same seed,
data and number of steps), and all heads answer the same held-out prompts in one interleaved run, greedy. The loss of
tau is against the head of raw bf16 states (three taps and last_hidden), prompt by prompt, with a 95 % interval by a
bootstrap over prompts (and seeds, which are prompts of their own). Bytes are those of the files.

    OMP_NUM_THREADS=1 python tests/bench/cache.py                       # about 55 minutes on two cores
    python tests/bench/cache.py --seeds 3                               # three heads per format: about 2 hours
    python tests/bench/cache.py --quick                                 # the same path on the tiny target, under a minute

Resumes where it stopped: captures, trainings and answered prompts are kept under `--out`.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

from drafters import QUICK, drafts_of, paired, percent, train, training_of
from main_job import bar
from rich.console import Console
from rich.table import Table

from draftsmith.data.encode import encode_all
from draftsmith.data.sources import split_conversations
from draftsmith.data.states import StateStore
from draftsmith.inference.evaluate import evaluate, write_report
from draftsmith.inference.evaluate_config import EvaluateConfig
from draftsmith.models.loading import load_target
from draftsmith.train import distill_draft
from draftsmith.train.stream import Stream

ROOT = Path(__file__).resolve().parents[2]
RECIPE = "eagle3_smollm2"
TAU_K = 4
Row = dict[str, Any]

FORMATS = {
    "raw": ("states.stored=bfloat16", "states.teacher=last_hidden", "states.last_stored=bfloat16"),
    "int8": ("states.stored=int8", "states.teacher=top_k", "states.top_k=64"),
    "int4": ("states.stored=int4", "states.teacher=top_k", "states.top_k=64"),
}
MOST_BYTES = {"int8": 0.47, "int4": 0.30}  # of raw bf16
LEAST_READ = 5.0  # times what training consumes
MOST_LOST = 0.01  # of tau, by the default


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="tiny target, no bound on figures is meant")
    parser.add_argument("--out", type=Path, default=None, help="runs/cache, or runs/cache_quick")
    parser.add_argument("--minutes", type=float, default=4, help="training of the raw head; the others' steps are its")
    parser.add_argument("--limit", type=int, default=2500, help="conversations (default: %(default)s)")
    parser.add_argument("--seeds", type=int, default=1, help="heads per format (default: %(default)s)")
    parser.add_argument("--prompts", type=int, default=60, help="held-out prompts (default: %(default)s)")
    parser.add_argument("--max-new-tokens", type=int, default=96)
    args = parser.parse_args()
    args.out = (args.out or ROOT / "runs" / ("cache_quick" if args.quick else "cache")).resolve()
    console = Console(width=160, highlight=False)

    heads = {(name, seed): head(name, seed, args) for seed in range(args.seeds) for name in FORMATS}
    rows = measure(heads, args, console)
    figures: Row = {}
    for name in FORMATS:
        figures[name] = bytes_of(name, args) | read_speed(name, args)
        trained = [training_of(heads[name, seed]) for seed in range(args.seeds)]
        figures[name] |= {"steps": trained[0]["steps"], "training_tokens_per_second": trained[0]["tokens_per_second"]}
        figures[name]["heldout_tau"] = [facts["heldout"].get("tau") for facts in trained]
        row = pooled([rows[name, seed] for seed in range(args.seeds)])
        change, interval = paired(row, pooled([rows["raw", s] for s in range(args.seeds)]), "tokens", "verifications")
        figures[name] |= {"tau": row["tau"], "verifications": row["verifications"]}
        figures[name] |= {"tau_against_raw": change, "tau_against_raw_interval": interval}
    show(figures, console)
    bars = bars_of(figures, args)
    for one in bars:
        bound = f"at least {one['at_least']}" if "at_least" in one else f"at most {one['at_most']}"
        console.print(f"{'holds' if one['holds'] else 'FAILS'}  {one['name']}: {one['value']} ({bound})")
    print(json.dumps({"name": "cache", "quick": args.quick, "figures": figures, "bars": bars}))
    return 0 if args.quick or all(one["holds"] for one in bars) else 1


def settings_of(name: str, seed: int, args: argparse.Namespace) -> list[str]:
    """What all heads have in common, and a format's own."""
    shared = list(QUICK) if args.quick else [f"data.limit={args.limit}"]
    return [*shared, *FORMATS[name], f"seed={seed}"]


def head(name: str, seed: int, args: argparse.Namespace) -> Path:
    """Capture and train, unless the export is there. The first raw head has minutes; all others its steps."""
    settings = settings_of(name, seed, args)
    if not args.quick:
        first = args.out / "raw-0"
        budget = f"budget.minutes={args.minutes:g}"
        if (name, seed) != ("raw", 0):
            budget = f"budget.steps={training_of(first / 'export')['steps']}"
            settings.append("budget.minutes=null")
        settings.append(budget)
    return train(RECIPE, args.out / f"{name}-{seed}", settings, args.out / f"states-{name}", quick=args.quick)


def measure(heads: dict[tuple[str, int], Path], args: argparse.Namespace, console: Console) -> dict[Any, Row]:
    """One interleaved run of all heads, greedy chains; kept while heads and settings are the same."""
    exports, folder = list(heads.values()), args.out / "tau"
    cfg = EvaluateConfig(
        model=str(exports[0]),
        also=tuple(map(str, exports[1:])),
        prompts=3 if args.quick else args.prompts,
        max_new_tokens=6 if args.quick else args.max_new_tokens,
        hf_prompts=0,
        identity_prompts=3 if args.quick else 10,
        k=(TAU_K,),
        dtype="float32" if args.quick else "bfloat16",
        bootstrap=100 if args.quick else 2000,
        out=str(folder),
    )
    key = json.dumps([asdict(cfg), [(e / "config.json").stat().st_mtime_ns for e in exports]], default=str)
    done, stored = folder / "done", folder / "report.json"
    if done.is_file() and done.read_text() == key:
        report = json.loads(stored.read_text(encoding="utf-8"))
    else:
        report = evaluate(cfg.model, cfg, console)
        write_report(report, cfg)
        done.write_text(key)
    by_name = {f"{name}-{seed}": (name, seed) for name, seed in heads}
    return {by_name[report["run"]["exports"][row["drafter"]]]: row for row in drafts_of(report)}


def pooled(rows: list[Row]) -> Row:
    """Several seeds as one row: every prompt of each is one of its own."""
    by_prompt = {}
    for seed, row in enumerate(rows):
        for prompt, sums in row["by_prompt"].items():
            by_prompt[f"{seed} {prompt}"] = {"tokens": sums["verified_tokens"], "verifications": sums["verifications"]}
    tokens, passes = (sum(sums[name] or 0 for sums in by_prompt.values()) for name in ("tokens", "verifications"))
    return {"by_prompt": by_prompt, "tau": tokens / passes if passes else None, "verifications": passes}


def bytes_of(name: str, args: argparse.Namespace) -> Row:
    """Of all shards of the training data: bytes per token, and relative to four states of width H in bf16."""
    store = StateStore(args.out / f"states-{name}" / "train")
    per_token = store.bytes / store.tokens
    return {"bytes_per_token": per_token, "share_of_raw": per_token / (4 * store.fields.width * 2)}


def read_speed(name: str, args: argparse.Namespace) -> Row:
    """Tokens per second of `fill` over an epoch's batches in training's order; files read and checked once before."""
    argv = ["--config", str(ROOT / f"configs/{RECIPE}.yaml"), *settings_of(name, 0, args)]
    config = distill_draft.read_config(argv, "cache.py")
    target = load_target(config.target.name, dtype=config.target.dtype)
    samples, _ = encode_all(
        split_conversations(config.data, config.evaluate.conversations)[0], target.tokenizer, config.data.max_length
    )
    store = StateStore(args.out / f"states-{name}" / "train")
    batch = config.batch
    stream = Stream(
        store.usable(samples), row_length=batch.row_length, rows=batch.rows, accumulate=1, seed=0, rank=0, world=1
    )
    windows = [one for window in range(min(stream.windows(0), 100)) for one in stream.window(0, window)]
    for one in windows:
        store.fill(one)
    began = time.perf_counter()
    for one in windows:
        store.fill(one)
    seconds = time.perf_counter() - began
    return {"read_tokens_per_second": sum(int((one.samples_BT >= 0).sum()) for one in windows) / seconds}


def show(figures: Row, console: Console) -> None:
    columns = (
        "states",
        "bytes/token",
        "of raw",
        "tau",
        "against raw [95 %]",
        "held out",
        "read tok/s",
        "training tok/s",
    )
    table = Table(*columns, title=f"captured states, EAGLE-3, greedy chains of {TAU_K}", title_justify="left")
    for name, of in figures.items():
        heldout = ", ".join("-" if tau is None else f"{tau:.3f}" for tau in of["heldout_tau"])
        table.add_row(
            name,
            f"{of['bytes_per_token']:.0f}",
            f"{of['share_of_raw']:.3f}",
            "-" if of["tau"] is None else f"{of['tau']:.3f}",
            percent(of["tau_against_raw"], of["tau_against_raw_interval"]),
            heldout,
            f"{of['read_tokens_per_second']:,.0f}",
            f"{of['training_tokens_per_second']:,.0f}",
        )
    console.print(table)


def bars_of(figures: Row, args: argparse.Namespace) -> list[Row]:
    """Bytes and reading of each format, and that some format loses little enough to be the default."""
    bars = []
    for name, most in MOST_BYTES.items():
        of = figures[name]
        bars.append(bar(f"{name} taps and top-k teacher, bytes of raw", of["share_of_raw"], at_most=most))
        ratio = of["read_tokens_per_second"] / of["training_tokens_per_second"]
        bars.append(bar(f"{name}: reading over training, tokens/s", ratio, at_least=LEAST_READ))
    lost = {name: -(figures[name]["tau_against_raw"] or 0.0) for name in MOST_BYTES}
    small = [name for name in ("int4", "int8") if lost[name] < MOST_LOST]
    figures["default"] = small[0] if small else "raw"
    bars.append(bar("formats below raw that lose less than 1 % of tau", len(small), at_least=1))
    steps = {figures[name]["steps"] for name in FORMATS}
    bars.append(bar("different numbers of training steps", len(steps), at_most=1))
    return bars


if __name__ == "__main__":
    sys.exit(main())
