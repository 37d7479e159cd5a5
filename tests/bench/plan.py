"""What `draftsmith plan` predicts against what training takes, on the CPU, and plans of three large targets.

Each configuration trains for real in a process of its own, the script's whole path: capture, steps, held-out figures,
checkpoints, export. What it holds besides is subtracted: the same recipe goes before on a tiny target, and its own plan is
made, so that libraries are loaded, kernels compiled and the interpreter's heap is grown; what is resident then is the base.
The peak is the kernel's own (VmHWM of /proc/self/status, reset as the loop begins), without the pages of files that the loop
maps. glibc's malloc is told to give large blocks back at once (one arena, blocks from 64 kB mapped by themselves), so that
what is resident is what is held, and MKL likewise; oneDNN keeps few of the products that it compiles for each shape it meets
(else about 8 MB a step in bf16, up to its 1,024). The prediction is made before, in another process that has no weights, and
nothing in it knows of these configurations.

    python tests/bench/plan.py                 # five configurations, then the printed plans: about 16 minutes
    python tests/bench/plan.py --quick         # the two smallest
    python tests/bench/plan.py --plans         # the printed plans alone, about 4 minutes

The last line is JSON; the exit code is 1 where a prediction is more than 15 % off, where the configurations differ by less
than 3 x, or where a plan's largest term is full logits in fp32.
"""

from __future__ import annotations

import argparse
import ctypes
import gc
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve()
ROOT = HERE.parents[2]
BAR, SPREAD = 0.15, 3.0
ALLOCATION = {
    "MALLOC_ARENA_MAX": "1", "MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_TRIM_THRESHOLD_": "65536",
    "ONEDNN_PRIMITIVE_CACHE_CAPACITY": "8", "LRU_CACHE_CAPACITY": "8", "MKL_DISABLE_FAST_MM": "1",
}  # fmt: skip

# Targets of the measured runs: shapes alone, random weights.
SMALL: dict[str, Any] = {
    "model_type": "llama", "vocab_size": 8192, "hidden_size": 512, "intermediate_size": 1408, "num_hidden_layers": 8,
    "num_attention_heads": 8, "num_key_value_heads": 4, "max_position_embeddings": 4096, "tie_word_embeddings": False,
    "rms_norm_eps": 1e-5, "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
    "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
WIDE = SMALL | {"vocab_size": 32768, "hidden_size": 1024, "intermediate_size": 2816, "num_attention_heads": 16}
USUAL = [
    "data.limit=40", "evaluate.conversations=4", "evaluate.probe_prompts=0", "budget.steps=6",
    "log.progress=false", "evaluate.every=100", "evaluate.probe_every=0", "states.batch_tokens=1024",
]  # fmt: skip
RUNS: dict[str, tuple[dict[str, Any], list[str]]] = {
    "eagle, captured, all ids": (
        SMALL, ["method=eagle", "data.max_length=512", "batch.row_length=512", "batch.rows=8"],
    ),
    "medusa, captured, 200 ids": (
        SMALL, ["method=medusa", "draft_vocab=200", "drafter.head=shared", "drafter.heads=4", "data.max_length=512", "batch.row_length=512", "batch.rows=24", "data.limit=100"],
    ),
    "eagle3, live, 1,024 tokens": (
        SMALL, ["method=eagle3", "states.source=live", "drafter.steps=4", "data.max_length=1024", "batch.row_length=1024", "batch.rows=2"],
    ),
    "draft_model, captured, fp32, 2 x": (
        WIDE, ["method=draft_model", "precision=fp32", "batch.accumulate=2", "data.max_length=512", "batch.row_length=512", "batch.rows=4"],
    ),
    "dspark, live": (
        WIDE, ["method=dspark", "states.source=live", "drafter.anchors=64", "data.max_length=512", "batch.row_length=512", "batch.rows=4"],
    ),
}  # fmt: skip

# The same recipe on a target of no size goes before: libraries, kernels and the interpreter's heap, as the run needs them.
SMALLEST: dict[str, str] = {
    "target.name": "tiny", "budget.steps": "2", "data.limit": "16", "data.max_length": "128", "batch.row_length": "128",
    "batch.rows": "1", "states.batch_tokens": "128",
}  # fmt: skip

# Three large targets: the numbers of their published config.json that shape them.
LARGE: dict[str, dict[str, Any]] = {
    "meta-llama/Llama-3.1-8B-Instruct": {
        "model_type": "llama", "vocab_size": 128256, "hidden_size": 4096, "intermediate_size": 14336,
        "num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 8, "max_position_embeddings": 131072,
        "rms_norm_eps": 1e-5, "tie_word_embeddings": False, "rope_theta": 500000.0,
        "rope_scaling": {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
                         "original_max_position_embeddings": 8192, "rope_type": "llama3"},
    },
    "Qwen/Qwen3-32B": {
        "model_type": "qwen3", "vocab_size": 151936, "hidden_size": 5120, "intermediate_size": 25600,
        "num_hidden_layers": 64, "num_attention_heads": 64, "num_key_value_heads": 8, "head_dim": 128,
        "max_position_embeddings": 40960, "rms_norm_eps": 1e-6, "tie_word_embeddings": False, "rope_theta": 1000000.0,
    },
    "meta-llama/Llama-3.3-70B-Instruct": {
        "model_type": "llama", "vocab_size": 128256, "hidden_size": 8192, "intermediate_size": 28672,
        "num_hidden_layers": 80, "num_attention_heads": 64, "num_key_value_heads": 8, "max_position_embeddings": 131072,
        "rms_norm_eps": 1e-5, "tie_word_embeddings": False, "rope_theta": 500000.0,
        "rope_scaling": {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
                         "original_max_position_embeddings": 8192, "rope_type": "llama3"},
    },
}  # fmt: skip
MACHINES: dict[str, list[str]] = {
    "1 x 24 GB": ["--gpu", "rtx4090", "--placement", "{small}", "batch.rows=1"],
    "8 x 80 GB": ["--gpu", "h100", "--devices", "8", "--placement", "{large}", "batch.rows=8"],
    "4 x 8 x 80 GB": ["--gpu", "h100", "--devices", "8", "--nodes", "4", "engine=zero2", "--placement", "{large}", "batch.rows=32"],
}  # fmt: skip


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="the two smallest configurations")
    parser.add_argument("--plans", action="store_true", help="the printed plans alone")
    parser.add_argument("--only", help="one configuration, by the beginning of its name")
    parser.add_argument("--measure", nargs=argparse.REMAINDER, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.measure:
        print(json.dumps(measure(args.measure)))
        return 0
    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as folder:
        if not args.plans:
            names = [n for n in RUNS if n.startswith(args.only or "")][: 2 if args.quick else None]
            rows = [compare(name, Path(folder) / str(i)) for i, name in enumerate(names)]
        plans = [] if args.quick or args.only else printed(Path(folder))
    within = all(abs(row["error"]) <= BAR for row in rows)
    sizes = [row["predicted"] for row in rows]
    spread = max(sizes) / min(sizes) if sizes else 0.0
    wide = args.quick or args.plans or bool(args.only) or spread >= SPREAD
    no_logits = all(plan["below_full_logits"] for plan in plans)
    print(json.dumps({"runs": rows, "spread": round(spread, 2), "plans": plans}))
    return 0 if within and wide and no_logits else 1


def compare(name: str, folder: Path) -> dict[str, Any]:
    """Predict, train, print a line."""
    settings, keys = RUNS[name]
    write_target(folder / "target", settings)
    recipe = folder / "recipe.yaml"
    recipe.write_text(f"method: {keys[0].removeprefix('method=')}\n")
    line = [f"target.name={folder / 'target'}", *USUAL, *keys[1:]]
    began = time.monotonic()
    plan = json.loads(run([sys.executable, "-m", "draftsmith.cli", "plan", str(recipe), "--json", "true", *line]))
    planned = time.monotonic() - began
    took = json.loads(
        run([sys.executable, str(HERE), "--measure", f"--config={recipe}", f"run={folder / 'run'}", *line], ALLOCATION)
    )
    predicted = max(plan["moments"]["training"], plan["moments"]["saving"])
    error = predicted / took["peak"] - 1
    print(
        f"{name:<34} predicted {predicted / 1e6:8.1f} MB  measured {took['peak'] / 1e6:8.1f} MB  {error:+7.1%}  "
        f"largest: {plan['largest_term']}  (planned in {planned:.0f} s)",
        flush=True,
    )
    return {
        "name": name,
        "predicted": predicted,
        "measured": took["peak"],
        "error": round(error, 4),
        "memory": plan["memory"],
    }


def run(command: list[str], more: dict[str, str] | None = None) -> str:
    """The last line that a command printed."""
    done = subprocess.run(command, capture_output=True, text=True, env=os.environ | (more or {}), cwd=ROOT)
    if done.returncode:
        sys.exit(f"{' '.join(command)}\n{done.stdout}\n{done.stderr}")
    return done.stdout.strip().splitlines()[-1]


def write_target(folder: Path, settings: dict[str, Any]) -> None:
    """A model with random weights and the byte tokenizer."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    from draftsmith.models.pretrained import tiny_tokenizer

    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**settings), dtype=torch.bfloat16)
    model.save_pretrained(folder)
    tiny_tokenizer().save_pretrained(folder)


def measure(argv: list[str]) -> dict[str, int]:
    """Train; the peak of the loop above what is resident when every library is loaded."""
    import torch

    from draftsmith.train import distill_draft
    from draftsmith.train import plan as planner

    torch.set_num_threads(1)
    quiet = os.dup(1)
    os.dup2(2, 1)  # what training says is not the answer
    with tempfile.TemporaryDirectory() as folder:
        small = dict(one.split("=", 1) for one in argv) | SMALLEST | {"run": f"{folder}/run"}
        assert distill_draft.main([f"{key}={value}" for key, value in small.items()]) == 0
    recipe, *keys = (one for one in argv if not one.startswith("run="))
    planner.main([recipe.removeprefix("--config="), *keys])
    base = resident()
    found: dict[str, int] = {}
    train = distill_draft.train

    def watched(*args: Any, **options: Any) -> Any:
        gc.collect()
        ctypes.CDLL("libc.so.6").malloc_trim(0)
        Path("/proc/self/clear_refs").write_text("5")
        files = status("RssFile")
        summary = train(*args, **options)
        found["peak"] = status("VmHWM") - max(status("RssFile") - files, 0) - base
        return summary

    distill_draft.train = watched
    assert distill_draft.main(argv) == 0
    os.dup2(quiet, 1)
    return found


def resident() -> int:
    gc.collect()
    ctypes.CDLL("libc.so.6").malloc_trim(0)
    return status("VmRSS")


def status(field: str) -> int:
    """Bytes of a field of /proc/self/status."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(f"{field}:"))


def printed(folder: Path) -> list[dict[str, Any]]:
    """EAGLE-3 for three large targets on three machines."""
    out = []
    for name, settings in LARGE.items():
        place = folder / name.replace("/", "--")
        place.mkdir()
        (place / "config.json").write_text(json.dumps(settings))
        recipe = place / "recipe.yaml"
        recipe.write_text(
            "method: eagle3\ndraft_vocab: 32000\nbatch: {row_length: 2048}\ndata: {max_length: 2048}\nbudget: {epochs: 2}\n"
        )
        small = "absent" if settings["hidden_size"] > 4096 else "nf4"
        large = "replicated" if settings["hidden_size"] == 4096 else "sharded"
        for machine, options in MACHINES.items():
            line = [one.format(small=small, large=large) for one in options]
            line += [
                f"target.name={place}",
                "--samples",
                "68000",
                "--tokens",
                "60000000",
                "--supervised",
                "0.7",
                "--price",
                "2",
            ]
            command = [sys.executable, "-m", "draftsmith.cli", "plan", str(recipe), *line]
            began = time.monotonic()
            text = subprocess.run(command, capture_output=True, text=True, cwd=ROOT)
            print(
                f"\n### {name} on {machine} ({time.monotonic() - began:.0f} s)\n{text.stdout or text.stderr}",
                flush=True,
            )
            plan = json.loads(
                subprocess.run([*command, "--json", "true"], capture_output=True, text=True, cwd=ROOT).stdout
            )
            logits = plan["rows"] * 2048 * settings["vocab_size"] * 4
            below = max(plan["largest_tensor"][1], plan["memory"].get("teacher", 0)) < logits
            out.append(
                {
                    "target": name,
                    "machine": machine,
                    "peak": plan["peak"],
                    "fits": plan["fits"],
                    "below_full_logits": below,
                }
            )
    return out


if __name__ == "__main__":
    sys.exit(main())
