"""A tiny consistency model of its own: the tasks of data/tasks.py, learnt from scratch, then said in fewer passes.

A model of a few hundred thousand parameters learns the tasks autoregressively (fresh examples in every step). A copy of it
then learns, as a consistency model, to say the greedy answers that the first one gave to other training prompts, behind
states that it comes to itself (`labels=data`, `states=online`; models/consistency.py). Both answer prompts held out from
training; Jacobi decoding of the base, which was not trained for it, stands beside. Tokens per forward count the passes that
verify, not the prompt's.

    python tests/bench/jacobi_tasks.py               # at most 30 CPU minutes
    python tests/bench/jacobi_tasks.py --quick       # a few steps: no figure means anything

Resumes where it stopped (`--out`; delete it to start over). The last line is JSON; `jacobi.py` runs this as its second part.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from diffusion_tasks import HEADS, LAYERS, LONGEST, SHARES, WIDTH, Kept, again, fresh, tiny_target, train
from main_job import bar
from rich.console import Console
from rich.table import Table
from torch import nn

from draftsmith.data.batch import Batch, TargetOut
from draftsmith.data.encode import Sample
from draftsmith.data.tasks import (
    TASKS,
    Example,
    examples,
    prompt_ids,
    sample_of,
    valid,
    words_of,
)
from draftsmith.inference.speculate import DecodeConfig, generate
from draftsmith.losses.fused_head import head_rows
from draftsmith.losses.probs import SamplingParams
from draftsmith.models.adapters import AdapterConfig, Adapters
from draftsmith.models.block_diffusion import ar_rows
from draftsmith.models.consistency import Consistency, ConsistencyConfig
from draftsmith.models.drafter import Terms
from draftsmith.models.jacobi import Jacobi, JacobiConfig
from draftsmith.models.target import Target, document_mask
from draftsmith.models.trajectories import answer_blocks

ROOT = Path(__file__).resolve().parents[2]
Row = dict[str, Any]

BLOCK = 16  # the longest answer with its end
OBJECTIVE = ConsistencyConfig(
    block=BLOCK, states="online", start="prompt", passes=3, labels="data", normalise="tokens", ar_weight=3.0,
    label_smoothing=0.0,
)  # fmt: skip
DECODE = JacobiConfig(block=BLOCK, start="prompt", recycle=0, pool=0)
LEAST, POINTS = 2.5, 1.0  # tokens per forward, and points of accuracy that it may differ by


@dataclass(frozen=True)
class Size:
    """Optimiser steps of both trainings, own answers per task, held-out prompts per task."""

    steps: int = 6000
    taught_steps: int = 1000
    answers: int = 12_000
    prompts: int = 300


QUICK = Size(steps=2, taught_steps=2, answers=4, prompts=2)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="a few steps, no bound on figures is meant")
    parser.add_argument("--out", type=Path, default=None, help="runs/jacobi_tasks, or runs/jacobi_tasks_quick")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    console = Console(width=150, highlight=False)
    out = args.out or ROOT / "runs" / ("jacobi_tasks_quick" if args.quick else "jacobi_tasks")
    figures = Tasks(QUICK if args.quick else Size(), args.seed, out.resolve(), console).run()
    bars = bars_of(figures)
    for one in bars:
        bound = f"at least {one['at_least']:g}" if "at_least" in one else f"at most {one['at_most']:g}"
        console.print(f"{'holds' if one['holds'] else 'FAILS'}  {one['name']}: {one['value']} ({bound})")
    print(json.dumps({"name": "jacobi_tasks", "quick": args.quick, "figures": figures, "bars": bars}))
    return 0 if args.quick or all(one["holds"] for one in bars) else 1


class Autoregression(nn.Module):
    """Cross-entropy of answers, token by token: how the base learns."""

    def __init__(self, target: Target, adapters: Adapters) -> None:
        super().__init__()
        self.target, self.trained = target, adapters.trained

    def denominators(self, batch: Batch, progress: float) -> dict[str, float]:
        return {"ar": float(len(ar_rows(answer_blocks(batch, BLOCK).text)[0]))}

    def loss(self, batch: Batch, target_out: TargetOut, progress: float) -> Terms:
        flat_R, label_R = ar_rows(answer_blocks(batch, BLOCK).text)
        see_BTT = document_mask(batch.samples_BT)
        hidden_BTD = self.target.forward(batch.ids_BT, batch.positions_BT, see_BTA=see_BTT).last_hidden_BTD
        rows = head_rows(self.target.head, hidden_BTD.flatten(0, 1)[flat_R], label_R, head_learns=True)
        total, count = rows.ce_R.sum(), torch.tensor(float(len(flat_R)))
        return Terms({"ar": total}, {"ar_loss": (total.detach(), count)})


class Model:
    """The tiny model, all of whose weights learn."""

    def __init__(self, seed: int) -> None:
        self.target = tiny_target(seed)
        self.adapters = Adapters(AdapterConfig(kind="full", mask="none"), self.target)


class Tasks:
    """One folder of trainings and measurements."""

    def __init__(self, size: Size, seed: int, out: Path, console: Console) -> None:
        self.size, self.seed, self.out, self.console = size, seed, out, console
        self.kept = Kept(out, [asdict(size), seed, asdict(OBJECTIVE), asdict(DECODE), SHARES, WIDTH, LAYERS, HEADS])
        self.training_cpu = 0.0

    def run(self) -> Row:
        base = Model(self.seed)
        parameters = sum(p.numel() for p in base.adapters.trained.parameters())
        self.console.print(f"model: {parameters:,} parameters, {LAYERS} layers of width {WIDTH}, blocks of {BLOCK}")
        learn = Autoregression(base.target, base.adapters)
        first = self.train("base", learn, lambda step: fresh(self.seed, step), self.size.steps, 3e-3)
        answers = self.own_answers(base)
        taught = Model(self.seed)
        taught.adapters.load({name: p.detach() for name, p in base.adapters.trained.named_parameters()})
        module = Consistency(OBJECTIVE, taught.target, taught.adapters)
        second = self.train("taught", module, lambda step: again(answers, step), self.size.taught_steps, 5e-4)
        rows = {
            "base, plain": self.measure("base, plain", base, None),
            "base, Jacobi": self.measure("base, Jacobi", base, DECODE),
            "taught, plain": self.measure("taught, plain", taught, None),
            "taught, Jacobi": self.measure("taught, Jacobi", taught, DECODE),
        }
        self.show(rows)
        return {
            "parameters": parameters,
            "training": {"base": first, "taught": second},
            "own_answers": {task: len(found) for task, found in answers.items()},
            "rows": rows,
            "cpu_minutes": (self.kept.cpu + self.training_cpu) / 60,
        }

    def train(self, name: str, module: Any, samples_of: Callable[[int], list[Sample]], steps: int, rate: float) -> Row:
        row = train(name, self.out, module, samples_of, steps, rate, self.seed)
        self.training_cpu += 60 * row["cpu_minutes"]
        return row

    def own_answers(self, base: Model) -> dict[str, list[Sample]]:
        """What the base answers, greedily, to other training prompts: right or not, they are what it says."""
        found: dict[str, list[Sample]] = {}
        first = 10_000_000  # beyond the numbers of the training
        for k, task in enumerate(TASKS):
            asked = examples(task, self.seed, range(first, first + self.size.answers))

            def answer(asked: list[Example] = asked) -> list[list[str]]:
                return [list(words_of(ids)) for ids, _ in self.decode(base, None, asked)]

            words = self.kept.get(f"own answers {task}", answer)
            pairs = [(e, w[: LONGEST - 1]) for e, w in zip(asked, words, strict=True) if w]
            found[task] = [sample_of(e, i * len(TASKS) + k, w) for i, (e, w) in enumerate(pairs)]
        return found

    def decode(self, model: Model, how: JacobiConfig | None, asked: Any) -> list[tuple[list[int], Any]]:
        """(ids, statistics) of greedy answers."""
        drafter = None
        if how is not None:
            drafter = Jacobi(how, model.target.facts)
            drafter.bind(model.target)
        params = SamplingParams(max_new_tokens=LONGEST)
        with torch.no_grad():
            results = generate(model.target, [prompt_ids(e) for e in asked], params, drafter, DecodeConfig(max_rows=50))
        return [(result.ids, result.stats) for result in results]

    def measure(self, name: str, model: Model, how: JacobiConfig | None) -> Row:
        """Tokens per forward and right answers on held-out prompts, by task and together."""

        def run() -> Row:
            by_task: dict[str, Row] = {}
            for task in TASKS:
                asked = list(examples(task, self.seed, range(self.size.prompts), held_out=True))
                found = self.decode(model, how, asked)
                right = sum(valid(task, e.asked, words_of(ids)) for e, (ids, _) in zip(asked, found, strict=True))
                stats = [stats for _, stats in found]
                total = stats[0]
                for other in stats[1:]:
                    total = total + other
                by_task[task] = {
                    "right": right, "prompts": len(asked), "passes": total.verifies,
                    "tokens": total.committed - total.requests, "tokens_per_forward": total.tau,
                }  # fmt: skip
            passes, tokens = (sum(row[key] for row in by_task.values()) for key in ("passes", "tokens"))
            right, prompts = (sum(row[key] for row in by_task.values()) for key in ("right", "prompts"))
            return {"tokens_per_forward": tokens / passes, "accuracy": right / prompts, "tasks": by_task}

        return self.kept.get(name, run)

    def show(self, rows: dict[str, Row]) -> None:
        table = Table("decoding", "tokens/forward", "right", *TASKS, title="held-out prompts", title_justify="left")
        for name, row in rows.items():
            cells = [
                f"{of['tokens_per_forward']:.2f}, {of['right'] / of['prompts']:.0%}" for of in row["tasks"].values()
            ]
            table.add_row(name, f"{row['tokens_per_forward']:.2f}", f"{row['accuracy']:.1%}", *cells)
        self.console.print(table)


def bars_of(figures: Row) -> list[Row]:
    """Every bound."""
    rows = figures["rows"]
    points = 100 * (rows["taught, Jacobi"]["accuracy"] - rows["base, plain"]["accuracy"])
    return [
        bar("tasks: tokens per forward", rows["taught, Jacobi"]["tokens_per_forward"], at_least=LEAST),
        bar("tasks: points of accuracy below the base's", round(-points, 2), at_most=POINTS),
        bar("tasks: CPU minutes", round(figures["cpu_minutes"], 1), at_most=30),
    ]


if __name__ == "__main__":
    sys.exit(main())
