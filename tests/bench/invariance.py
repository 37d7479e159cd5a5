"""Is an update the same, however its batch is split? Processes x accumulation x engines, on a tiny target, in fp32.

Eight rows make a step: 8 at once, 4 + 4, or 2 + 2 + 2 + 2; by one process or two; under DDP, ZeRO-1, ZeRO-2 and ZeRO-3.
Samples have 1, 3, 9 and 27 supervised tokens, so that shares are very unequal. All are compared with one process that takes
all eight rows at once:

    gradients   of the first step, all parameters as one vector: norm of the difference over the norm, at most 1e-6
    loss        of the first step, relative, at most 1e-6; and the largest of ten steps, for the record
    weights     after ten steps: norm of the difference over the norm, at most 1e-6 with SGD, 1e-4 with AdamW (eps 1e-4);
                beside it how far the weights moved in the same measure

The grid is of one method; then every method, conversion and consistency training with dropout, and conversion of all
weights, in three other splits.
Last, exact resume: of every training under every engine, two processes, five steps and five more leave weights, moments and
generators of ten steps, bit for bit. With --out FOLDER a bench that was interrupted goes on.

    python tests/bench/invariance.py                    # about 8 minutes on two cores
    python tests/bench/invariance.py --quick            # part of the grid; tests/test_invariance.py runs this

The last line is JSON; exit code 1 where a bound is exceeded.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from safetensors.torch import load_file, save_file
from torch import Tensor

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "tests"))
from distributed_worker import SETTINGS, become  # noqa: E402

from draftsmith.configs.training import (  # noqa: E402
    BatchConfig,
    BudgetConfig,
    EvalConfig,
    LogConfig,
    OptimConfig,
    TrainConfig,
)
from draftsmith.data.batch import Batch, TargetOut  # noqa: E402
from draftsmith.data.draft_vocab import choose_draft_ids  # noqa: E402
from draftsmith.data.encode import Sample  # noqa: E402
from draftsmith.models import METHODS  # noqa: E402
from draftsmith.models.adapters import AdapterConfig, Adapters  # noqa: E402
from draftsmith.models.block_diffusion import BlockDiffusion  # noqa: E402
from draftsmith.models.consistency import PRESETS as CONSISTENCY  # noqa: E402
from draftsmith.models.consistency import Consistency  # noqa: E402
from draftsmith.models.diffusion import PRESETS as DIFFUSION  # noqa: E402
from draftsmith.models.pretrained import tiny_target  # noqa: E402
from draftsmith.models.target import live_states  # noqa: E402
from draftsmith.train import engine  # noqa: E402
from draftsmith.train.loop import train  # noqa: E402
from draftsmith.train.script import make_stream  # noqa: E402

ROWS, STEPS = 8, 10
ENGINES = ("ddp", "zero1", "zero2", "zero3")
TUNINGS = ("conversion", "consistency", "full")
OPTIM = {"sgd": OptimConfig(name="sgd", lr=1e-2, warmup=0.1), "adamw": OptimConfig(lr=1e-3, eps=1e-4, warmup=0.1)}
MOST = {"gradients": 1e-6, "loss": 1e-6, "sgd": 1e-6, "adamw": 1e-4}


@dataclass(frozen=True)
class Case:
    """One run. All runs of a method and an optimiser should end alike."""

    method: str
    optim: str
    world: int = 1
    engine: str = "ddp"
    accumulate: int = 1
    halves: bool = False  # it stops in the middle and goes on

    def __str__(self) -> str:
        end = "-halves" if self.halves else ""
        return f"{self.method}-{self.optim}-{self.world}-{self.engine}-{self.accumulate}{end}"


def cases(quick: bool) -> list[Case]:
    """The grid, then all methods; those that are compared with come first."""
    grid = [(w, e, a) for w in (1, 2) for e in ENGINES for a in (1, 2, 4)]
    splits = {"sgd": grid, "adamw": grid}
    if quick:
        two = [(2, "ddp", 2), (2, "zero1", 4), (2, "zero2", 4), (2, "zero3", 2)]
        splits = {"sgd": [(1, "ddp", 1), (1, "ddp", 4), *two], "adamw": [(1, "ddp", 1), two[-1]]}
    made = [Case("eagle3", optim, *split) for optim in OPTIM for split in splits[optim]]
    few = [(1, "ddp", 1), (2, "ddp", 4), (2, "zero2", 2), (2, "zero3", 4)]
    others = TUNINGS[:2] if quick else (*(m for m in METHODS if m != "eagle3"), *TUNINGS)
    return made + [Case(m, "sgd", *split) for m in others for split in (few[::3] if quick else few)]


def resumes() -> list[Case]:
    """Pairs: straight through, and in halves."""
    every = [(method, name) for method in (*METHODS, *TUNINGS) for name in ENGINES]
    return [Case(m, "adamw", 2, name, 2, halves) for m, name in every for halves in (False, True)]


def samples() -> list[Sample]:
    """16 documents, one per row of 32, of 1, 3, 9 or 27 supervised tokens."""
    dice, made = torch.Generator().manual_seed(5), []
    for i in range(2 * ROWS):
        supervised, prompt = ((1, 17), (3, 16), (9, 12), (27, 4))[i % 4]
        n = supervised + prompt
        made.append(Sample(i, torch.randint(3, 250, (n,), generator=dice), torch.arange(n) >= prompt))
    return made


def make(method: str, config: TrainConfig) -> tuple[Any, Callable[[Batch], TargetOut]]:
    """The module in training, and a function that gives the states it reads."""
    if method in METHODS:
        target = tiny_target(dtype=torch.float32)
        torch.manual_seed(0)
        ids_W = choose_draft_ids(torch.arange(256), 200, target.facts.eos_ids)
        drafter = METHODS[method](config.drafter, target.facts, ids_W)
        drafter.init_from_target(target)
        return drafter, lambda batch: live_states(target, drafter, batch)
    target = tiny_target(width=32, layers=2, heads=2, kv_heads=2, vocab=300, tokens=280)
    torch.manual_seed(0)
    mask: Any = "none" if method == "consistency" else "trained"
    lora = AdapterConfig(rank=2, alpha=4, dropout=0.25, mask=mask)
    adapters = Adapters(AdapterConfig(kind="full", mask=mask) if method == "full" else lora, target)
    with torch.no_grad():
        for parameter in adapters.trained.parameters():
            parameter.add_(torch.randn_like(parameter) * (0.01 if method == "full" else 0.2))
    objective = replace(DIFFUSION["fast_dllm_v2"], block=4)
    consistency = replace(CONSISTENCY["cllm"], block=4, states="online")
    module = (
        Consistency(consistency, target, adapters)
        if method == "consistency"
        else BlockDiffusion(objective, target, adapters)
    )
    return module, lambda batch: TargetOut()


def full_gradient(parameter: Any) -> Tensor:
    """Of a parameter, before the step, under any engine."""
    if hasattr(parameter, "ds_id"):
        return parameter._z3_optimizer.get_fp32_grad_for_param(parameter).clone()
    return parameter.get_full_hp_grad().clone() if hasattr(parameter, "_hp_mapping") else parameter.grad.clone()


def run(case: Case, out: Path) -> None:
    """One case; the main process writes gradients, weights and losses."""
    become(case.engine)
    drafter = METHODS[case.method].Config(**SETTINGS.get(case.method, {})) if case.method in METHODS else None
    config = TrainConfig(
        method=case.method,
        drafter=drafter,
        batch=BatchConfig(row_length=32, rows=ROWS // case.accumulate, accumulate=case.accumulate),
        budget=BudgetConfig(steps=STEPS),
        optim=OPTIM[case.optim],
        evaluate=EvalConfig(every=1000, probe_every=0),
        log=LogConfig(every=1, progress=False),
        precision="fp32",
        run=str(out / str(case)),
    )
    if os.environ.get("RANK", "0") == "0":  # what was interrupted begins anew: its first step is looked at
        shutil.rmtree(config.run, ignore_errors=True)
    if case.halves:
        launch(replace(config, budget=BudgetConfig(steps=STEPS, stop_at=STEPS // 2)))
    launch(config)


def launch(config: TrainConfig) -> None:
    """One launch of a run."""
    accelerator = engine.start(config)
    module, states_of = make(config.method, config)
    found = {f"start|{n}": p.detach().clone() for n, p in module.named_parameters() if p.requires_grad}
    update = engine.step

    def step(*parts: Any) -> float:
        if not any(name.startswith("gradients|") for name in found):
            named = [(n, p) for n, p in module.named_parameters() if p.requires_grad]
            found.update({f"gradients|{n}": full_gradient(p) for n, p in named})
        return update(*parts)

    engine.step = step
    folder = Path(config.run)
    folder.mkdir(parents=True, exist_ok=True)
    try:
        summary = train(config, accelerator, module, make_stream(config, samples(), accelerator), states_of, folder)
    finally:
        engine.step = update
    if accelerator.is_main_process and summary.state.done:
        found |= {f"weights|{n}": p.detach().clone() for n, p in module.named_parameters() if p.requires_grad}
        rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
        found["losses"] = torch.tensor([x["loss"] for x in rows if x["kind"] == "train"], dtype=torch.float64)
        save_file(found, folder / "found.part")
        (folder / "found.part").rename(folder / "found.safetensors")


def work(out: Path, quick: bool, world: int) -> None:
    """All cases of this number of processes that are not done yet."""
    every = cases(quick) + ([] if quick else resumes())
    for case in [c for c in every if c.world == world and not (out / str(c) / "found.safetensors").exists()]:
        run(case, out)
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()


def flat(found: dict[str, Tensor], kind: str) -> Tensor:
    """All tensors of a kind as one vector, in float64."""
    return torch.cat([found[n].double().flatten() for n in sorted(found) if n.startswith(f"{kind}|")])


def apart(one: Tensor, other: Tensor) -> float:
    return float((one - other).norm() / other.norm())


def same_end(straight: Path, halves: Path) -> bool:
    """Whether two runs' last checkpoints hold the same bits."""
    files = [f"checkpoints/step-{STEPS:08d}/{name}.safetensors" for name in ("model", "optimiser", "rng")]
    pairs = [(load_file(straight / file), load_file(halves / file)) for file in files]
    return all(a.keys() == b.keys() and all(torch.equal(a[n], b[n]) for n in a) for a, b in pairs)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="part of the grid")
    parser.add_argument("--out", type=Path, help="folder of the runs; what is done there is not done again")
    parser.add_argument("--work", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.work:
        work(args.out, args.quick, int(os.environ["WORLD_SIZE"]))
        return 0
    out = (args.out or Path(tempfile.mkdtemp())).absolute()
    os.chdir(ROOT)
    os.environ |= {"OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "PASSIVE", "DS_ACCELERATOR": "cpu", "LOCAL_RANK": "0"}
    os.environ["PATH"] = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"  # ninja is looked up there
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as meeting:  # one process: this one
        store = torch.distributed.FileStore(f"{meeting}/store", 1)
        torch.distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
        work(out, args.quick, 1)
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc_per_node", "2", "--rdzv_backend", "c10d"]
    command += ["--rdzv_endpoint", "localhost:0", str(Path(__file__).absolute()), "--work", "--out", str(out)]
    command += ["--quick"] if args.quick else []
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        print(done.stderr[-4000:], file=sys.stderr)
        return 1

    columns = (
        "method",
        "optimiser",
        "processes",
        "engine",
        "accumulation",
        "gradients",
        "loss",
        "losses",
        "weights",
        "moved",
    )
    table = Table(*columns)
    figures, worst = [], {"gradients": 0.0, "loss": 0.0, **dict.fromkeys(OPTIM, 0.0)}
    for case in cases(args.quick):
        found, wanted = (load_file(out / str(c) / "found.safetensors") for c in (case, Case(case.method, case.optim)))
        losses = ((found["losses"] - wanted["losses"]) / wanted["losses"]).abs()
        one = {"gradients": apart(flat(found, "gradients"), flat(wanted, "gradients")), "loss": float(losses[0])}
        one[case.optim] = apart(flat(found, "weights"), flat(wanted, "weights"))
        worst = {name: max(value, one.get(name, 0.0)) for name, value in worst.items()}
        moved = apart(flat(found, "weights"), flat(found, "start"))
        figures.append(asdict(case) | one | {"losses": float(losses.max()), "moved": moved})
        shown = (one["gradients"], one["loss"], float(losses.max()), one[case.optim], moved)
        split = (case.method, case.optim, str(case.world), case.engine, str(case.accumulate))
        table.add_row(*split, *(f"{x:.1e}" for x in shown))
    Console(width=130).print(table)
    holds = {name: value <= MOST[name] for name, value in worst.items()}
    for name, value in worst.items():
        print(f"{'holds' if holds[name] else 'FAILS'}  {name}: {value:.2e}, at most {MOST[name]:.0e}")
    pairs = [] if args.quick else list(zip(resumes()[::2], resumes()[1::2], strict=True))
    unequal = [str(halves) for straight, halves in pairs if not same_end(out / str(straight), out / str(halves))]
    if pairs:
        holds["resume"] = not unequal
        print(
            f"{'FAILS' if unequal else 'holds'}  resume: {len(pairs) - len(unequal)} of {len(pairs)} bit-equal; {unequal}"
        )
    print(json.dumps({"name": "invariance", "quick": args.quick, "worst": worst, "holds": holds, "resumes": len(pairs),
                      "cases": figures}))  # fmt: skip
    return 0 if all(holds.values()) else 1


if __name__ == "__main__":
    sys.exit(main())
