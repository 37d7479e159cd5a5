"""What parallel decoding breaks, and what certainty forcing mends: a tiny model learns the tasks of data/tasks.py.

A model of a few hundred thousand parameters learns them from scratch by block diffusion (blocks of 8, fresh examples in
every step). Certainty forcing (dParallel, arXiv:2509.26488) then teaches a copy of it the answers that it gave itself to
other training prompts, those that are right, where it was undecided the first by the alphabet. Both decode prompts held out from training, over a range of thresholds;
every strategy of the table `STRATEGIES` decodes them with its defaults. Counted as `COUNTING` says, which is printed.

    python tests/bench/diffusion_tasks.py            # at most 30 minutes of CPU time
    python tests/bench/diffusion_tasks.py --quick    # a few steps: no figure means anything

Resumes where it stopped: trainings from their last save, finished measurements not at all (`--out`; delete it to start
over). Plots are left there too. The last line is JSON.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from main_job import bar
from rich.console import Console
from rich.table import Table
from safetensors import safe_open
from safetensors.torch import save_file
from transformers import LlamaConfig, LlamaForCausalLM

from draftsmith.data.batch import Batch, TargetOut
from draftsmith.data.encode import Sample
from draftsmith.data.packing import make_batch, pack
from draftsmith.data.tasks import (
    IDS,
    ROW,
    TASKS,
    VOCABULARY,
    Example,
    examples,
    prompt_ids,
    sample_of,
    tokenizer,
    valid,
    words_of,
)  # fmt: skip
from draftsmith.inference.adapter_folder import Converted
from draftsmith.inference.diffuse import DiffuseConfig, diffuse
from draftsmith.inference.diffusion_figures import COUNTING, Decoded, area, cut, fastest, plot_curves, row_of
from draftsmith.inference.strategies import STRATEGIES, strategy_of
from draftsmith.losses.probs import SamplingParams
from draftsmith.models.adapters import AdapterConfig, Adapters
from draftsmith.models.block_diffusion import BlockDiffusion, CertaintyConfig, CertaintyForcing
from draftsmith.models.decision_heads import Blocks, PairDependency, UnmaskFilter, fit_filter, fit_pairs, observe
from draftsmith.models.diffusion import ObjectiveConfig
from draftsmith.models.target import Target

ROOT = Path(__file__).resolve().parents[2]
Row = dict[str, Any]

BLOCK = 8
LONGEST = 16  # tokens of an answer with its end, at most
WIDTH, LAYERS, HEADS = 96, 4, 4
ROTARY_BASE = 100.0  # texts have 32 tokens: at the usual 10,000 half of the frequencies hardly turn in them
OBJECTIVE = ObjectiveConfig(block=BLOCK, shift=False, padding="train")
# Of 8 tokens half are hidden in dParallel's setting, all 8 hardly ever; to decide a block at once is to see none of it.
CERTAINTY = CertaintyConfig(beta=1.0, level=0.9)
SHARES = {"copy": 2, "reverse": 6, "replace": 4, "sort": 8, "insert": 28, "shuffle": 8, "latin": 16}  # of a batch
THRESHOLDS = (0.0, 0.3, 0.5, 0.7, 0.8, 0.9, 0.95, 0.99)
FORCED = ("sort", "insert", "latin")  # tasks on which certainty forcing has a bound
CLOSE = 0.5  # of the largest probability: what `Canonical` takes for undecided
VALID, LEAST = 0.98, 2.0  # validity, and tokens per forward at that validity
# What a strategy cannot do without here; all else are its defaults.
SETTINGS: dict[str, Row] = {"adablock": {"delimiters": (IDS[ROW],)}}


@dataclass(frozen=True)
class Size:
    """How much is done: optimiser steps of both trainings, own answers per task of FORCED and per other task, held-out
    prompts per task."""

    steps: int = 7500
    forced_steps: int = 1600
    answers: int = 3000
    other_answers: int = 1000
    prompts: int = 300
    strategy_prompts: int = 100
    head_batches: int = 40


QUICK = Size(steps=2, forced_steps=2, answers=4, other_answers=4, prompts=2, strategy_prompts=1, head_batches=1)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="a few steps, no bound on figures is meant")
    parser.add_argument("--out", type=Path, default=None, help="runs/diffusion_tasks, or runs/diffusion_tasks_quick")
    parser.add_argument("--steps", type=int, default=Size.steps, help="of the training from scratch")
    parser.add_argument("--forced-steps", type=int, default=Size.forced_steps, help="of certainty forcing")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    size = QUICK if args.quick else Size(args.steps, args.forced_steps)
    out = (args.out or ROOT / "runs" / ("diffusion_tasks_quick" if args.quick else "diffusion_tasks")).resolve()
    bench = Bench(size, args.seed, out, Console(width=150, highlight=False))
    figures = bench.run()
    bars = bars_of(figures)
    for one in bars:
        bound = f"at least {one['at_least']:g}" if "at_least" in one else f"at most {one['at_most']:g}"
        bench.console.print(f"{'holds' if one['holds'] else 'FAILS'}  {one['name']}: {one['value']} ({bound})")
    print(json.dumps({"name": "diffusion_tasks", "quick": args.quick, "figures": figures, "bars": bars}))
    return 0 if args.quick or all(one["holds"] for one in bars) else 1


class Kept:
    """Finished parts in a folder, one JSON line each, with the CPU seconds that they took; a part that is there is not
    run again. A folder with parts of other settings is refused."""

    def __init__(self, folder: Path, settings: Any) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        kept, text = folder / "settings.json", json.dumps(settings, sort_keys=True)
        if kept.is_file() and kept.read_text(encoding="utf-8") != text:
            raise SystemExit(f"{folder} holds a run with other settings: give another --out, or delete it")
        kept.write_text(text, encoding="utf-8")
        self.path, self.rows = folder / "parts.jsonl", {}
        if self.path.is_file():
            lines = self.path.read_text(encoding="utf-8").splitlines()
            self.rows = {row["key"]: row for row in map(json.loads, lines)}

    def get(self, key: str, run: Callable[[], Any]) -> Any:
        if key not in self.rows:
            since = time.process_time()
            value = run()
            self.rows[key] = {"key": key, "cpu": time.process_time() - since, "value": value}
            with self.path.open("a", encoding="utf-8") as file:
                file.write(json.dumps(self.rows[key]) + "\n")
            print(f"  {key}: {self.rows[key]['cpu']:.1f} s", flush=True)
        return self.rows[key]["value"]

    @property
    def cpu(self) -> float:
        return sum(row["cpu"] for row in self.rows.values())


class Model:
    """The tiny model, all of whose weights learn, and how it denoises."""

    def __init__(self, seed: int) -> None:
        self.target = tiny_target(seed)
        self.adapters = Adapters(AdapterConfig(kind="full", mask="reserved"), self.target)
        self.denoiser = Converted(OBJECTIVE, self.adapters).denoiser()


class Canonical:
    """A denoiser that decides between ids about as likely as the likeliest by their number, the smallest first. Which of
    many right answers a model finds likeliest is chance, and another chance for every prompt; this is a rule."""

    def __init__(self, denoiser: Any) -> None:
        self.denoiser = denoiser

    def __getattr__(self, name: str) -> Any:
        return getattr(self.denoiser, name)

    def head(self, hidden: torch.Tensor, ids: torch.Tensor | None = None) -> torch.Tensor:
        logits = self.denoiser.head(hidden, ids)
        close = logits > logits.amax(-1, keepdim=True) + math.log(CLOSE)
        first = close & (close.cumsum(-1) == 1)
        return logits.masked_fill(~first, float("-inf"))


class Bench:
    """One folder of trainings and measurements."""

    def __init__(self, size: Size, seed: int, out: Path, console: Console) -> None:
        self.size, self.seed, self.out, self.console = size, seed, out, console
        trainings = [asdict(OBJECTIVE), asdict(CERTAINTY), SHARES, CLOSE, WIDTH, LAYERS, HEADS, ROTARY_BASE]
        self.kept = Kept(out, [asdict(size), seed, trainings])
        self.training_cpu = 0.0

    def run(self) -> Row:
        base = Model(self.seed)
        parameters = sum(p.numel() for p in base.adapters.trained.parameters())
        self.console.print(f"model: {parameters:,} parameters, {LAYERS} layers of width {WIDTH}, blocks of {BLOCK}")
        module = BlockDiffusion(OBJECTIVE, base.target, base.adapters)
        trained = self.train("base", module, lambda step: fresh(self.seed, step), self.size.steps, 3e-3)
        answers = self.own_answers(base)
        forced = Model(self.seed)
        forced.adapters.load({name: p.detach() for name, p in base.adapters.trained.named_parameters()})
        certain = CertaintyForcing(OBJECTIVE, forced.target, forced.adapters, CERTAINTY)
        retrained = self.train("forced", certain, lambda step: again(answers, step), self.size.forced_steps, 1e-3)
        models = {"base": base, "forced": forced}
        rows: dict[str, list[Row]] = {
            name: [self.measure(name, model, "threshold", {"threshold": t}, self.size.prompts) for t in THRESHOLDS]
            for name, model in models.items()
        }
        heads = self.heads(module, base, answers)
        everything = [
            self.measure("base", base, name, (SETTINGS | heads).get(name, {}), self.size.strategy_prompts)
            for name in STRATEGIES
        ]
        self.show(rows, everything)
        return {
            "parameters": parameters,
            "training": {"base": trained, "forced": retrained},
            "own_answers": {task: len(found) for task, found in answers.items()},
            "threshold": rows,
            "strategies": everything,
            "best": {
                name: {task: summary(fastest(of, VALID, task), task) for task in TASKS} for name, of in rows.items()
            },
            "aup": self.plots(rows),
            "cpu_minutes": (self.kept.cpu + self.training_cpu) / 60,
        }

    # Training

    def train(self, name: str, module: Any, samples_of: Callable[[int], list[Sample]], steps: int, rate: float) -> Row:
        row = train(name, self.out, module, samples_of, steps, rate, self.seed)
        self.training_cpu += 60 * row["cpu_minutes"]
        return row

    def own_answers(self, base: Model) -> dict[str, list[Sample]]:
        """What the model answers to other training prompts, where that is right. Decided from left to right: where many
        answers are right, each choice then rests on what stands before it; by `Canonical`, the choices of one prompt are
        those of another. Both make an answer easy to foresee."""
        found: dict[str, list[Sample]] = {}
        first = 10_000_000  # beyond the numbers of the training
        for k, task in enumerate(TASKS):
            number = self.size.answers if task in FORCED else self.size.other_answers
            asked = examples(task, self.seed, range(first, first + number))

            def answer(asked: list[Example] = asked) -> list[list[str]]:
                found = self.decode(base, "threshold", {}, asked, sub_block=1, denoiser=Canonical(base.denoiser))
                return [list(words_of(ids)) for ids, _ in found]

            pairs = list(zip(asked, self.kept.get(f"own answers {task}", answer), strict=True))
            right = [(e, words) for e, words in pairs if valid(task, e.asked, words)]
            kept = right or [(e, words[: LONGEST - 1]) for e, words in pairs if words]  # after two steps none is right
            found[task] = [sample_of(e, i * len(TASKS) + k, words) for i, (e, words) in enumerate(kept)]
        return found

    def heads(self, module: BlockDiffusion, base: Model, answers: dict[str, list[Sample]]) -> dict[str, Row]:
        """The trained heads of the strategies that have one: learnt from noisy blocks of the own answers."""
        since = time.process_time()
        torch.manual_seed(self.seed)
        steps = range(self.size.head_batches)
        blocks = Blocks.join([observe(module.passes, batch_of(again(answers, s), self.seed, s)) for s in steps])
        unmask, pairs = UnmaskFilter(BLOCK), PairDependency(WIDTH)
        losses = fit_filter(unmask, blocks), fit_pairs(pairs, blocks)
        self.training_cpu += time.process_time() - since
        print(f"  heads: {len(blocks.shown_U)} blocks, losses {losses[0]:.3f} and {losses[1]:.3f}", flush=True)
        return {"learned": {"filter": unmask}, "independent": {"pairs": pairs}}

    # Measurement

    def decode(
        self,
        model: Model,
        name: str,
        settings: Row,
        asked: Sequence[Example],
        *,
        sub_block: int | None = None,
        denoiser: Any = None,
    ) -> list[tuple[list[int], Any]]:
        """(ids, passes) of the answers to these prompts; `denoiser`: another view of the model."""
        decode = DiffuseConfig(strategy=strategy_of(name, settings), sub_block=sub_block, max_rows=50)
        params = SamplingParams(max_new_tokens=LONGEST)
        with torch.no_grad():
            results = diffuse(denoiser or model.denoiser, [prompt_ids(e) for e in asked], params, decode)
        return [(result.ids, result.passes) for result in results]

    def measure(self, which: str, model: Model, name: str, settings: Row, prompts: int) -> Row:
        """One row: a strategy's answers to held-out prompts of every task."""
        shown = f"{name} {settings['threshold']:g}" if "threshold" in settings else name

        def run() -> Row:
            answers = []
            for task in TASKS:
                asked = examples(task, self.seed, range(prompts), held_out=True)
                for e, (ids, passes) in zip(asked, self.decode(model, name, settings, asked), strict=True):
                    ids = cut(ids, model.target.facts.eos_ids)
                    right = valid(task, e.asked, words_of(ids))
                    answers.append(Decoded(f"{task} {e.number}", task, ids, passes.forwards, passes.kv_only, right))
            return row_of(shown, answers)

        return self.kept.get(f"{which}, {shown}, {prompts} prompts", run)

    def show(self, rows: dict[str, list[Row]], everything: list[Row]) -> None:
        """The tables."""
        table = Table(
            "task", "right answers", "at once", "threshold 0.9", "fastest base", "fastest forced",
            title=f"by task: tokens per forward and validity; fastest = of the thresholds with validity {VALID:.0%}",
            title_justify="left",
        )  # fmt: skip
        at = {t: dict(zip(rows, of, strict=True)) for t, *of in zip(THRESHOLDS, *rows.values(), strict=True)}
        for task in TASKS:
            best = [fastest(of, VALID, task) for of in rows.values()]
            cells = [cell(row, task) for row in (at[0.0]["base"], at[0.9]["base"])]
            table.add_row(task, TASKS[task].answers, *cells, *(f"{cell(b, task)}{at_threshold(b)}" for b in best))
        self.console.print(table)
        for name, of in (
            ("threshold, base", rows["base"]),
            ("threshold, forced", rows["forced"]),
            ("strategies", everything),
        ):
            table = Table(
                "decoding", "tokens/forward [95 %]", "with KV-only", "valid", *TASKS, title=name, title_justify="left"
            )
            for row in of:
                low, high = row["tokens_per_forward_interval"] or [math.nan] * 2
                speed = f"{row['tokens_per_forward']:.2f} [{low:.2f}, {high:.2f}]"
                parts = [f"{row['categories'][task]['accuracy']:.0%}" for task in TASKS]
                table.add_row(row["name"], speed, f"{row['tokens_per_pass']:.2f}", f"{row['accuracy']:.1%}", *parts)
            self.console.print(table)
        for task in TASKS:
            self.console.print(f"{task}: tokens depend {TASKS[task].depends}", style="dim")
        for word, meaning in COUNTING.items():
            self.console.print(f"{word}: {meaning}", style="dim")

    def plots(self, rows: dict[str, list[Row]]) -> dict[str, dict[str, float]]:
        """Curves as files, and the area under each."""
        areas: dict[str, dict[str, float]] = {}
        for task in ("all", *TASKS):
            curves = {name: [point(row, task) for row in of] for name, of in rows.items()}
            best = max(y for curve in curves.values() for _, y in curve)
            areas[task] = {name: round(area(curve, best or None), 1) for name, curve in curves.items()}
            plot_curves(curves, self.out / f"curve_{task}.svg", VALID)
        return areas


def tiny_target(seed: int) -> Target:
    """The tiny model, all of whose weights may learn."""
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=len(VOCABULARY), hidden_size=WIDTH, intermediate_size=2 * WIDTH, num_hidden_layers=LAYERS,
        num_attention_heads=HEADS, num_key_value_heads=HEADS, head_dim=WIDTH // HEADS, max_position_embeddings=128,
        initializer_range=WIDTH**-0.5, tie_word_embeddings=False, bos_token_id=None, eos_token_id=IDS["<end>"],
        pad_token_id=IDS["<pad>"], rope_parameters={"rope_type": "default", "rope_theta": ROTARY_BASE},
    )  # fmt: skip
    return Target(LlamaForCausalLM(config), tokenizer(), "tasks", frozen=False)


def fresh(seed: int, step: int) -> list[Sample]:
    """New examples for every step; sample ids are unique, because draws are keyed by them."""
    samples = []
    for k, (task, share) in enumerate(SHARES.items()):
        for example in examples(task, seed, range(step * share, (step + 1) * share)):
            samples.append(sample_of(example, example.number * len(SHARES) + k))
    return samples


def train(
    name: str, out: Path, module: Any, samples_of: Callable[[int], list[Sample]], steps: int, rate: float, seed: int
) -> Row:
    """AdamW, a short warm-up, then a cosine; saved now and then, gone on with from there. Steps, CPU minutes, figures."""
    path = out / f"{name}.safetensors"
    weights = dict(module.trained.named_parameters())
    optimiser = torch.optim.AdamW(weights.values(), lr=rate, betas=(0.9, 0.98), weight_decay=0.01)
    step, cpu, figures = restore(path, weights, optimiser)
    while step < steps:
        since = time.process_time()
        for group in optimiser.param_groups:
            warm = min(1.0, (step + 1) / (0.03 * steps))
            group["lr"] = rate * warm * (0.525 + 0.475 * math.cos(math.pi * step / steps))
        batch = batch_of(samples_of(step), seed, step)
        counts = module.denominators(batch, step / steps)
        terms = module.loss(batch, TargetOut(), step / steps)
        loss = torch.stack([terms.losses[term] / count for term, count in counts.items()]).sum()
        optimiser.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(weights.values(), 1.0)
        optimiser.step()
        step, cpu = step + 1, cpu + time.process_time() - since
        if step % 25 == 0 or step == steps:
            figures = {key: round(float(top / of), 4) for key, (top, of) in terms.metrics.items() if of > 0}
            save(path, weights, optimiser, step, cpu, figures)
        if step % 100 == 0 or step == steps:
            shown = ", ".join(f"{key} {value:.3f}" for key, value in figures.items())
            print(f"  {name}: step {step} of {steps}, {cpu:.0f} s, {shown}", flush=True)
    return {"steps": steps, "cpu_minutes": cpu / 60, **figures}


def batch_of(samples: Sequence[Sample], seed: int, step: int) -> Batch:
    """The samples of a step, packed into rows as long as the longest there are."""
    length = 2 * LONGEST
    rows = pack([len(s) for s in samples], length, seed, step)
    return make_batch([[samples[i] for i in row] for row in rows], length, seed, step)


def again(answers: dict[str, list[Sample]], step: int) -> list[Sample]:
    """The samples of a step of certainty forcing: own answers, task by task, over and over."""
    samples = []
    for task, found in answers.items():
        share = SHARES[task] if found else 0
        samples += [found[i % len(found)] for i in range(step * share, (step + 1) * share)]
    return samples


def save(
    path: Path, weights: dict[str, Any], optimiser: torch.optim.Optimizer, step: int, cpu: float, figures: Row
) -> None:
    """Weights and moments, complete or not at all."""
    tensors = {}
    for name, p in weights.items():
        state = optimiser.state[p]
        tensors |= {
            f"weight.{name}": p.detach(),
            f"first.{name}": state["exp_avg"],
            f"second.{name}": state["exp_avg_sq"],
        }
    facts = {"step": str(step), "cpu": str(cpu), "figures": json.dumps(figures)}
    save_file({name: t.contiguous() for name, t in tensors.items()}, path.with_suffix(".new"), facts)
    path.with_suffix(".new").replace(path)


def restore(path: Path, weights: dict[str, Any], optimiser: torch.optim.Optimizer) -> tuple[int, float, Row]:
    """(step, CPU seconds so far, last figures) of a training that was begun; the start of a new one."""
    if not path.is_file():
        return 0, 0.0, {}
    with safe_open(path, "pt") as file, torch.no_grad():
        facts = file.metadata()
        for name, p in weights.items():
            p.copy_(file.get_tensor(f"weight.{name}"))
            first, second = (file.get_tensor(f"{moment}.{name}") for moment in ("first", "second"))
            optimiser.state[p] = {"step": torch.tensor(float(facts["step"])), "exp_avg": first, "exp_avg_sq": second}
    return int(facts["step"]), float(facts["cpu"]), json.loads(facts["figures"])


def point(row: Row, task: str) -> tuple[float, float]:
    of = row if task == "all" else row["categories"][task]
    return of["tokens_per_forward"], of["accuracy"]


def cell(row: Row | None, task: str) -> str:
    if row is None:
        return "-"
    speed, right = point(row, task)
    return f"{speed:.2f}, {right:.1%}"


def at_threshold(row: Row | None) -> str:
    return "" if row is None else f" at {row['name'].split()[-1]}"


def summary(row: Row | None, task: str) -> Row | None:
    """What the bars need of the fastest row of a task."""
    return None if row is None else {"name": row["name"], **row["categories"][task]}


def bars_of(figures: Row) -> list[Row]:
    """Every bound."""
    best = figures["best"]

    def speed(which: str, task: str) -> float | None:
        return best[which][task] and best[which][task]["tokens_per_forward"]

    bars = [
        bar(
            f"{task}: tokens per forward, base at its fastest threshold with validity 98 %",
            speed("base", task),
            at_least=LEAST,
        )
        for task in TASKS
    ]
    for task in FORCED:
        base = speed("base", task)
        bound = min(1.8 * base, 0.8 * BLOCK) if base else 0.8 * BLOCK
        bars.append(
            bar(f"{task}: tokens per forward, forced, likewise", speed("forced", task), at_least=round(bound, 3))
        )
    missing = len(set(STRATEGIES) - {row["name"].split()[0] for row in figures["strategies"]})
    bars.append(bar("strategies without a row", missing, at_most=0))
    bars.append(bar("CPU minutes", round(figures["cpu_minutes"], 1), at_most=30))
    return bars


if __name__ == "__main__":
    sys.exit(main())
