"""A real model converted by LoRA, measured: what it learns, what it drafts for itself, what it keeps.

Trains `configs/convert_smollm2.yaml` (train/convert_block_diffusion.py), keeps checkpoints on the way, then measures
each: masked loss on held-out conversations (the same noise for all), tokens per forward and right answers at threshold
0.9, tau of self-drafting. Beside it: the base with adapters off, which must be the model that was converted, bit for bit;
its autoregressive answers, greedy, as the reference of accuracy and of losslessness; and some answers to read.

    python tests/bench/convert.py                   # at most 60 minutes of CPU time
    python tests/bench/convert.py --minutes 10      # a shorter training
    python tests/bench/convert.py --quick           # tiny target, two steps: no figure means anything

Resumes where it stopped: the training by itself, finished measurements are kept under `--out`. The last line is JSON.
"""

from __future__ import annotations

import argparse
import json
import math
import resource
import shlex
import subprocess
import sys
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import yaml
from diffusion_tasks import Kept
from main_job import bar
from rich.console import Console
from rich.table import Table

from draftsmith.data.batch import TargetOut
from draftsmith.data.encode import Sample, encode_all, prompt_ids
from draftsmith.data.packing import collate
from draftsmith.data.sources import DataConfig, load_conversations
from draftsmith.inference.adapter_folder import Converted, settings_of
from draftsmith.inference.diffuse import DiffuseConfig, diffuse
from draftsmith.inference.diffusion_figures import (
    COUNTING,
    Decoded,
    area,
    cut,
    plot_curves,
    plot_training,
    retention,
    row_of,
)  # fmt: skip
from draftsmith.inference.evaluate_denoiser import self_drafting
from draftsmith.inference.speculate import generate
from draftsmith.inference.strategies import strategy_of
from draftsmith.inference.suites import SUITES, Prompt, load_suite
from draftsmith.losses.probs import SamplingParams
from draftsmith.models.adapters import AdapterConfig, Adapters
from draftsmith.models.block_diffusion import BlockDiffusion
from draftsmith.models.diffusion import ObjectiveConfig
from draftsmith.models.loading import load_target
from draftsmith.models.target import Target
from draftsmith.train import convert_block_diffusion

ROOT = Path(__file__).resolve().parents[2]
Row = dict[str, Any]

K = 3  # draft length of self-drafting
THRESHOLDS = (0.5, 0.7, 0.9, 0.95)
SHOWN = 4  # answers to read


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("settings", nargs="*", metavar="key=value", help="settings of the recipe")
    parser.add_argument("--quick", action="store_true", help="tiny target, no bound on figures is meant")
    parser.add_argument("--out", type=Path, default=None, help="runs/convert, or runs/convert_quick")
    parser.add_argument("--minutes", type=float, default=20, help="training minutes, on two cores (default: 20)")
    parser.add_argument("--heldout", type=int, default=48, help="held-out conversations of the loss (default: 48)")
    parser.add_argument("--prompts", type=int, default=24, help="held-out prompts of self-drafting (default: 24)")
    parser.add_argument("--scored", type=int, default=70, help="prompts with a checker (default: 70)")
    parser.add_argument("--max-new-tokens", type=int, default=48)
    parser.add_argument("--points", type=int, default=4, help="checkpoints on the curve (default: 4)")
    args = parser.parse_intermixed_args()
    if args.quick:
        args.heldout, args.prompts, args.scored, args.max_new_tokens, args.points = 2, 2, 7, 8, 1
    args.out = (args.out or ROOT / "runs" / ("convert_quick" if args.quick else "convert")).resolve()
    bench = Bench(args, Console(width=150, highlight=False))
    figures = bench.run()
    bars = bars_of(figures)
    for one in bars:
        bound = f"at least {one['at_least']:g}" if "at_least" in one else f"at most {one['at_most']:g}"
        bench.console.print(f"{'holds' if one['holds'] else 'FAILS'}  {one['name']}: {one['value']} ({bound})")
    print(json.dumps({"name": "convert", "quick": args.quick, "figures": figures, "bars": bars}))
    return 0 if args.quick or all(one["holds"] for one in bars) else 1


class Bench:
    """One training and its measurements."""

    def __init__(self, args: argparse.Namespace, console: Console) -> None:
        self.args, self.console, self.out = args, console, args.out
        self.kept = Kept(self.out, {k: v for k, v in vars(args).items() if k != "out"})

    def run(self) -> Row:
        facts = self.kept.get("training", self.train)
        target = load_target(
            "tiny" if self.args.quick else "smollm2", dtype="float32" if self.args.quick else "bfloat16"
        )
        prompts = load_suite("mini", limit=self.args.prompts)
        probe = [prompt_ids(p.messages, target.tokenizer) for p in prompts]
        before = [logits_of(target, ids) for ids in probe]
        where = str(self.out / "run" / "export")
        objective = settings_of(ObjectiveConfig, facts["objective"], where)
        adapters = Adapters(settings_of(AdapterConfig, facts["adapters"], where), target, dual=objective.dual)
        self.converted, self.target = Converted(objective, adapters), target
        self.denoiser = self.converted.denoiser()
        heldout = self.heldout()
        start = {name: p.detach().clone() for name, p in adapters.trained.named_parameters()}
        curve = [self.point(0, start, heldout, decode=False)]
        for step, tensors in self.checkpoints():
            curve.append(self.point(step, tensors, heldout, decode=True))
        # The last checkpoint's tensors stay.
        same = sum(torch.equal(a, logits_of(target, ids)) for a, ids in zip(before, probe, strict=True))
        base = self.autoregressive()
        rows = [self.diffusion(t) for t in THRESHOLDS]
        figures = {
            "training": {k: facts[k] for k in ("steps", "tokens", "minutes", "cpu_minutes")},
            "entropy_of_unigrams": unigram_entropy(heldout),
            "curve": curve,
            "self_draft": self.self_draft(prompts, probe),
            "adapters_off": {"prompts": len(probe), "same_bits": same},
            "base": row_of("autoregression", decoded(base)),
            "rows": [row_of(f"threshold {t:g}", decoded(row)) for t, row in zip(THRESHOLDS, rows, strict=True)],
            "retention": [retention(decoded(base), decoded(row)) for row in rows],
            "samples": [
                {"prompt": b["prompt"], "base": b["text"], "converted": r["text"]}
                for b, r in zip(base[:SHOWN], rows[THRESHOLDS.index(0.9)][:SHOWN], strict=True)
            ],
            "cpu_minutes": self.kept.cpu / 60 + facts["cpu_minutes"],
        }
        points = [(r["tokens_per_forward"], r["accuracy"]) for r in figures["rows"]]
        figures["aup"] = round(area(points), 1)
        self.show(figures, points)
        return figures

    def train(self) -> Row:
        """Run the recipe (a launch of its own, so that it can stop and go on); what its export says of itself."""
        run = self.out / "run"
        recipe = "convert_quick" if self.args.quick else "convert_smollm2"
        settings = [f"run={run}", "save.keep=1000"]
        if self.args.quick:
            settings += ["budget.steps=2", "save.steps=1", "log.progress=false"]
        else:
            settings += [
                f"budget.minutes={self.args.minutes:g}",
                f"save.minutes={self.args.minutes / self.args.points:g}",
            ]
        argv = ["--config", f"configs/{recipe}.yaml", *settings, *self.args.settings]
        command = ["./launch.sh", "train/convert_block_diffusion.py", *argv]
        print("+", shlex.join(command), flush=True)
        if self.args.quick:  # stays in this process
            argv[1] = str(ROOT / argv[1])
            code = convert_block_diffusion.main(argv)
        else:
            code = subprocess.run(command, cwd=ROOT).returncode
        if code:
            raise SystemExit(f"the conversion ended with exit code {code}; its messages are above, this resumes it")
        used = resource.getrusage(resource.RUSAGE_CHILDREN)
        facts = json.loads((run / "export" / "config.json").read_text(encoding="utf-8"))["draftsmith"]
        last = [json.loads(line) for line in (run / "metrics.jsonl").read_text(encoding="utf-8").splitlines()][-1]
        launched = yaml.safe_load((run / "run.yaml").read_text(encoding="utf-8"))["machine"]
        state = json.loads((sorted((run / "checkpoints").glob("step-*"))[-1] / "state.json").read_text())["state"]
        return {
            "objective": facts["objective"],
            "adapters": facts["adapters"],
            "steps": state["step"],
            "tokens": state["tokens"],
            "minutes": round(state["seconds"] / 60, 2),
            # Of a training that was interrupted, this launch's own is too little; its processes have one thread each.
            "cpu_minutes": round(max(used.ru_utime + used.ru_stime, state["seconds"] * launched["processes"]) / 60, 2),
            "last": last,
        }

    def checkpoints(self) -> list[tuple[int, dict[str, torch.Tensor]]]:
        """(step, trained tensors) of some checkpoints, evenly spread, the last one included."""
        from safetensors.torch import load_file

        folders = sorted((self.out / "run" / "checkpoints").glob("step-*"))
        wanted = {len(folders) - 1 - i * len(folders) // self.args.points for i in range(self.args.points)}
        chosen = [folders[i] for i in sorted(wanted) if i >= 0]
        loaded = [(int(f.name.removeprefix("step-")), load_file(f / "model.safetensors")) for f in chosen]
        return [(step, {name.removeprefix("trained."): t for name, t in state.items()}) for step, state in loaded]

    def heldout(self) -> list[Sample]:
        """Held-out conversations that ship with the project, spread over its categories."""
        talks = load_conversations(DataConfig(split="heldout"))
        talks = talks[:: max(1, len(talks) // self.args.heldout)][: self.args.heldout]
        return encode_all(talks, self.target.tokenizer, 256 if self.args.quick else 512)[0]

    # Measurement

    def point(self, step: int, tensors: dict[str, torch.Tensor], heldout: Sequence[Sample], *, decode: bool) -> Row:
        """The figures of one checkpoint, which stays loaded."""
        self.converted.adapters.load(tensors)
        row = {"step": step, **self.kept.get(f"loss at {step}", lambda: self.masked_loss(heldout))}
        if decode:
            answers = self.kept.get(
                f"answers at {step}", lambda: self.answer(0.9, self.scored()[: self.args.scored // 2])
            )
            figures = row_of(f"step {step}", decoded(answers))
            row |= {"tokens_per_forward": figures["tokens_per_forward"], "right_answers": figures["accuracy"]}
        return row

    @torch.no_grad()
    def masked_loss(self, heldout: Sequence[Sample]) -> Row:
        """Nats per hidden token, and how many are right, with noise that depends on the conversation alone."""
        module = BlockDiffusion(self.converted.objective, self.target, self.converted.adapters).eval()
        sums: Counter[str] = Counter()
        for sample in heldout:
            metrics = module.loss(collate([sample]), TargetOut(), 0.0).metrics
            for name in ("hidden_loss", "accuracy", "sure"):
                sums[name] += float(metrics[name][0])
            sums["count"] += float(metrics["hidden_loss"][1])
        return {name: sums[name] / sums["count"] for name in ("hidden_loss", "accuracy", "sure")}

    def self_draft(self, prompts: Sequence[Prompt], probe: Sequence[list[int]]) -> Row:
        """tau at K, greedy, and how many answers are plain decoding's."""
        params = SamplingParams(max_new_tokens=self.args.max_new_tokens)

        def run() -> Row:
            return self_drafting(self.target, self.denoiser, prompts, probe, params, K, 2000, 0)

        return self.kept.get("self-drafting", run)

    def scored(self) -> list[Prompt]:
        """Prompts with a checker: the tasks of data/tasks.py, in words."""
        return load_suite("tasks", limit=self.args.scored)

    def autoregressive(self) -> list[Row]:
        """The base's answers: adapters off."""

        def run() -> list[Row]:
            prompts = self.scored()
            ids = [prompt_ids(p.messages, self.target.tokenizer) for p in prompts]
            results = generate(self.target, ids, SamplingParams(max_new_tokens=self.args.max_new_tokens))
            return [answer_row(p, r.ids, r.text, len(r.ids), 0) for p, r in zip(prompts, results, strict=True)]

        return self.kept.get("autoregression", run)

    def diffusion(self, threshold: float) -> list[Row]:
        return self.kept.get(f"threshold {threshold}", lambda: self.answer(threshold, self.scored()))

    def answer(self, threshold: float, prompts: Sequence[Prompt]) -> list[Row]:
        """The converted model's answers, and what they cost."""
        decode = DiffuseConfig(strategy=strategy_of("threshold", {"threshold": threshold}))
        ids = [prompt_ids(p.messages, self.target.tokenizer) for p in prompts]
        results = diffuse(self.denoiser, ids, SamplingParams(max_new_tokens=self.args.max_new_tokens), decode)
        rows = []
        for prompt, result in zip(prompts, results, strict=True):
            passes = result.passes
            assert passes is not None
            shown = cut(result.ids, self.target.facts.eos_ids)
            rows.append(answer_row(prompt, shown, result.text, passes.forwards, passes.kv_only))
        return rows

    def show(self, figures: Row, points: list[tuple[float, float]]) -> None:
        """Tables, plots, answers."""
        table = Table("step", "masked loss", "right", "sure", "tokens/forward", "right answers", title_justify="left",
                      title="over the training: held-out masked loss, decoding at threshold 0.9")  # fmt: skip
        for row in figures["curve"]:
            decoded_too = "tokens_per_forward" in row
            more = [f"{row['tokens_per_forward']:.2f}", f"{row['right_answers']:.1%}"] if decoded_too else ["-", "-"]
            table.add_row(
                str(row["step"]), f"{row['hidden_loss']:.3f}", f"{row['accuracy']:.1%}", f"{row['sure']:.1%}", *more
            )
        self.console.print(table)
        table = Table("decoding", "tokens/forward [95 %]", "with KV-only", "right answers", "of the base's", title_justify="left",
                      title="answers to prompts with a checker")  # fmt: skip
        for row, kept in zip([figures["base"], *figures["rows"]], [None, *figures["retention"]], strict=True):
            low, high = row["tokens_per_forward_interval"] or [math.nan] * 2
            share = "-" if kept is None or kept["retained"] is None else f"{kept['retained']:.0%}"
            speed = f"{row['tokens_per_forward']:.2f} [{low:.2f}, {high:.2f}]"
            table.add_row(row["name"], speed, f"{row['tokens_per_pass']:.2f}", f"{row['accuracy']:.1%}", share)
        self.console.print(table)
        draft = figures["self_draft"]
        interval = draft["interval"] or [math.nan] * 2
        self.console.print(
            f"self-drafting at K={K}: tau {draft['tau']:.3f} [{interval[0]:.3f}, {interval[1]:.3f}], {draft['same']} of "
            f"{draft['answers']} answers as without, {draft['forwards']} passes that drafted"
        )
        for sample in figures["samples"]:
            for who in ("prompt", "base", "converted"):
                self.console.print(f"{who}: {sample[who]}", markup=False)
        for word, meaning in COUNTING.items():
            self.console.print(f"{word}: {meaning}", style="dim", markup=False)
        plot_curves(
            {"threshold": points, "autoregression": [(1.0, figures["base"]["accuracy"])]}, self.out / "curve.svg"
        )
        steps = [row["step"] for row in figures["curve"]]
        losses = [row["hidden_loss"] for row in figures["curve"]]
        bound = [(step, figures["entropy_of_unigrams"]) for step in steps]
        series = {"held-out masked loss": list(zip(steps, losses, strict=True)), "entropy of unigrams": bound}
        plot_training(series, self.out / "training.svg", "step", "nats per token")


def logits_of(target: Target, ids: Sequence[int]) -> torch.Tensor:
    """The model's own logits on a prompt."""
    ids_1T = torch.tensor([list(ids)])
    with torch.no_grad():
        return target.head(target.forward(ids_1T, torch.arange(ids_1T.shape[1])[None]).last_hidden_BTD)


def unigram_entropy(heldout: Sequence[Sample]) -> float:
    """Nats per supervised token of the held-out text itself: what no model that ignores the context gets below."""
    counts = Counter(int(i) for s in heldout for i in s.ids[s.supervised])
    total = sum(counts.values())
    return -sum(c / total * math.log(c / total) for c in counts.values())


def answer_row(prompt: Prompt, ids: Sequence[int], text: str, forwards: int, kv_passes: int) -> Row:
    """One answer, as JSON keeps it."""
    score = SUITES["tasks"].score
    assert score is not None and prompt.reference is not None
    row = {"id": prompt.id, "category": prompt.category, "prompt": prompt.messages[-1]["content"], "text": text}
    return row | {"ids": list(ids), "forwards": forwards, "kv": kv_passes, "right": score(text, prompt.reference)}


def decoded(rows: Sequence[Row]) -> list[Decoded]:
    return [Decoded(r["id"], r["category"], tuple(r["ids"]), r["forwards"], r["kv"], r["right"]) for r in rows]


def bars_of(figures: Row) -> list[Row]:
    """Every bound."""
    first, last = figures["curve"][0]["hidden_loss"], figures["curve"][-1]["hidden_loss"]
    draft, off = figures["self_draft"], figures["adapters_off"]
    return [
        bar("held-out masked loss, as a share of its value at step 0", last / first, at_most=0.7),
        bar("held-out masked loss over the entropy of unigrams", last / figures["entropy_of_unigrams"], at_most=1.0),
        bar(f"tau of self-drafting at K={K}", draft["tau"], at_least=1.15),
        bar("self-drafting: answers that differ from plain decoding", draft["answers"] - draft["same"], at_most=0),
        bar("adapters off: prompts whose logits differ in any bit", off["prompts"] - off["same_bits"], at_most=0),
        bar("CPU minutes", round(figures["cpu_minutes"], 1), at_most=60),
    ]


if __name__ == "__main__":
    sys.exit(main())
