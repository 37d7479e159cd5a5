"""Do several GPUs (or one) train by each engine that cuts what is trained, how fast, and in how much memory? Twenty steps
each of an EAGLE-3 head beside its target, started as anyone starts them; under five minutes. Needs a GPU.

    python tests/bench/gpu_scale.py                       # ZeRO-2, ZeRO-3, FSDP2; with several GPUs a sharded target, too
    python tests/bench/gpu_scale.py --target FOLDER       # of another model
    python tests/bench/gpu_scale.py --cpu                 # what can be shown without one: ZeRO-2 and ZeRO-3, a tiny target
"""

from __future__ import annotations

import argparse
import json
import os
import re
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch

ROOT = Path(__file__).resolve().parent.parent.parent
STEPS, LIMIT_S = 20, 300
ENGINES: dict[str, list[str]] = {"zero2": [], "zero3": [], "fsdp2": [], "zero2 sharded": ["target.placement=sharded"]}
GPU = ["--config=configs/eagle3_smollm2.yaml", "batch.row_length=2048", "data.max_length=2048"]
CPU = ["--config=configs/quick.yaml", "batch.row_length=512"]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cpu", action="store_true", help="two processes of CPUs, ZeRO alone")
    parser.add_argument("--target", default="smollm2")
    parser.add_argument(
        "--run", nargs=argparse.REMAINDER, help=argparse.SUPPRESS
    )  # one process of a launch: OUT, settings
    args = parser.parse_args()
    if args.run:
        return worker(Path(args.run[0]), args.run[1:])
    gpus = torch.cuda.device_count()
    if not gpus and not args.cpu:
        print("error: no GPU here, and this benchmark is of GPUs; --cpu shows what a CPU can", file=sys.stderr)
        return 2
    processes = 2 if args.cpu else gpus
    settings = CPU if args.cpu else [*GPU, f"target.name={args.target}", f"batch.rows={2 * gpus}"]
    names = [n for n in ENGINES if not (args.cpu and n == "fsdp2") and (processes > 1 or "sharded" not in n)]
    began, rows = time.perf_counter(), []
    with tempfile.TemporaryDirectory() as place:
        for name in names:
            rows.append(trained(name, settings, processes, Path(place) / name.replace(" ", "_"), args.cpu))
            print(json.dumps(rows[-1]), flush=True)
    seconds = time.perf_counter() - began
    print(f"\n{'engine':<16}{'tokens/s':>10}{'MiB/process':>13}{'last loss':>11}")
    for row in rows:
        if "error" in row:
            print(f"{row['name']:<16}  {row['error']}")
        else:
            print(f"{row['name']:<16}{row['tokens_per_second']:>10,}{row['mib']:>13,}{row['loss']:>11.4f}")
    losses = [row["loss"] for row in rows if "error" not in row] or [0.0]
    apart = (max(losses) - min(losses)) / abs(statistics.mean(losses) or 1.0)
    bars = [
        {"name": "launches that failed", "value": sum("error" in row for row in rows), "at_most": 0},
        {"name": "last losses, apart as a share", "value": apart, "at_most": 1e-3 if args.cpu else 1e-2},
        {"name": "seconds", "value": round(seconds, 1), "at_most": LIMIT_S},
    ]
    for bar in bars:
        bar["holds"] = bar["value"] <= bar["at_most"]
        print("holds" if bar["holds"] else "FAILS", bar["name"], bar["value"])
    device = "cpu" if args.cpu else torch.cuda.get_device_name()
    figures = {"device": device, "processes": processes, "target": "tiny" if args.cpu else args.target, "rows": rows}
    print(json.dumps({"name": "gpu_scale", "figures": figures, "bars": bars}))
    return 0 if all(bar["holds"] for bar in bars) else 1


def trained(name: str, settings: list[str], processes: int, out: Path, cpu: bool) -> dict[str, Any]:
    """One launch; its figures, or why it failed."""
    out.mkdir(parents=True)
    command = [
        sys.executable, "-m", "accelerate.commands.launch", "--config_file", f"configs/accelerate/{name.split()[0]}.yaml",
        "--num_processes", str(processes), "--main_process_port", "0", __file__, "--run", str(out), *settings, *ENGINES[name],
        f"budget.steps={STEPS}", f"run={out / 'run'}", "states.source=live", "log.every=1", "log.progress=false",
        "evaluate.conversations=0", f"processes={processes}",
    ]  # fmt: skip
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"  # DeepSpeed looks for ninja there
    env = os.environ | {"PATH": path, "OMP_NUM_THREADS": "1"} | ({"DS_ACCELERATOR": "cpu"} if cpu else {})
    result = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True)
    if result.returncode != 0:
        lines = [line.strip() for line in result.stderr.splitlines() if re.match(r"(error|\w*Error): ", line)]
        return {"name": name, "error": lines[0] if lines else f"exit code {result.returncode}"}
    log = [json.loads(line) for line in (out / "run/metrics.jsonl").read_text().splitlines()]
    steps = [line for line in log if line["kind"] == "train"]
    memory = [json.loads(file.read_text())["mib"] for file in out.glob("rank*.json")]
    if len(steps) != STEPS or len(memory) != processes:
        return {"name": name, "error": f"{len(steps)} steps by {len(memory)} processes"}
    speed = statistics.median(step["tokens_per_second"] for step in steps[STEPS // 4 :])
    return {"name": name, "tokens_per_second": round(speed), "mib": max(memory), "loss": round(steps[-1]["loss"], 5)}


def worker(out: Path, settings: list[str]) -> int:
    """One process: train, and write down the most memory that it held."""
    from draftsmith.train.distill_draft import main as train
    from draftsmith.train.script import end

    code = train(settings)
    held = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    if torch.cuda.is_available():
        held = torch.cuda.max_memory_allocated()
    (out / f"rank{os.environ.get('RANK', '0')}.json").write_text(json.dumps({"mib": round(held / 2**20)}))
    end(code)


if __name__ == "__main__":
    sys.exit(main())
