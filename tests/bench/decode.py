"""How fast is decoding on this CPU? Ours, transformers and the CPU build of vLLM, plain and with the same EAGLE-3 head.

The same held-out prompts, greedy, batch 1, bfloat16, one interleaved run: every prompt is answered by all ways in rotating
order. Ours: plain, chains of K tokens and static trees from an EAGLE-3 head (that of `main_job.py --only long`, or `--head`). transformers:
`generate`, its prompt lookup, and assisted generation where `--assistant` names a small model. vLLM: plain and with the
same exported head, each in a process of its own that waits while others work (tests/bench/engine_vllm.py makes its
environment). Tokens per second: tokens of the answers over wall seconds of whole calls, prompts included.

The roofline of plain decoding is the measured read bandwidth over the bytes that a token needs: all weights but the
embedding where it is not the head too, and the keys and values so far.

    export GLIBC_TUNABLES=glibc.malloc.hugetlb=1                 # as launch.sh does: weights in huge pages, for all ways
    python tests/bench/decode.py                                 # 16 prompts x 96 tokens, about 10 minutes
    python tests/bench/decode.py --threads 2 --no-engine
    python tests/bench/decode.py --quick                         # tiny models, no figure means anything

The last line is JSON.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
Answer = Callable[[list[int]], list[int]]
PLAIN, LOOKUP = 1.4, 10  # least over transformers' generate; tokens of prompt lookup (transformers' documentation)
SPECULATIVE = 1.4  # least over our own plain decoding
ROOFLINE = 0.6


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--head", type=Path, default=ROOT / "runs/main_job/long/export", help="an EAGLE-3 export")
    parser.add_argument(
        "--k", type=int, nargs="+", default=[2, 3, 4], help="draft lengths of our chains (default: 2 3 4)"
    )
    parser.add_argument("--nodes", type=int, nargs="*", default=[4], help="sizes of our static trees (default: 4)")
    parser.add_argument("--engine-k", type=int, default=3, help="draft length of the engine (default: 3)")
    parser.add_argument("--assistant", default=None, help="folder of a small model with the same tokenizer")
    parser.add_argument("--prompts", type=int, default=16)
    parser.add_argument("--tokens", type=int, default=96)
    parser.add_argument("--threads", type=int, default=1, help="of ours and transformers (default: 1)")
    parser.add_argument("--engine-threads", type=int, default=2, help="of vLLM (default: 2)")
    parser.add_argument("--no-engine", action="store_true", help="leave vLLM out")
    parser.add_argument("--venv", type=Path, default=ROOT / ".venv-vllm", help="vLLM's virtual environment")
    parser.add_argument("--quick", action="store_true", help="tiny models, no bound on figures is meant")
    args = parser.parse_args()
    os.environ |= {
        "OMP_NUM_THREADS": str(args.threads),
        "OMP_WAIT_POLICY": "PASSIVE",
        "TOKENIZERS_PARALLELISM": "false",
    }
    if args.quick:
        args.prompts, args.tokens, args.no_engine = 2, 8, True
    figures = run(args)
    print(json.dumps(figures))
    return 0 if args.quick or all(one["holds"] for one in figures["bars"]) else 1


def run(args: argparse.Namespace) -> dict[str, Any]:
    """Everything; what is printed before the last line comes from here."""
    import torch
    from main_job import bar
    from rich.console import Console
    from rich.progress import track
    from rich.table import Table

    from draftsmith.data.encode import prompt_ids
    from draftsmith.inference.evaluate import machine
    from draftsmith.inference.figures import Bootstrap, Sample, ratio, speed
    from draftsmith.inference.suites import load_suite
    from draftsmith.models.loading import load_target

    torch.set_num_threads(args.threads)
    target = load_target("tiny" if args.quick else "smollm2", dtype="bfloat16")
    suite = load_suite("mini", limit=args.prompts)
    asked = [[3, 5, 8], [9, 4]] if args.quick else [prompt_ids(p.messages, target.tokenizer) for p in suite]
    names = [str(i) for i in range(len(asked))]
    ways = ours(target, args) | transformers_ways(target, args)
    engines = {} if args.no_engine else engine_ways(args, max(map(len, asked)))
    ways |= {name: engine.answer for name, engine in engines.items()}
    samples: dict[str, list[Sample]] = {name: [] for name in ways}
    try:
        for answer in ways.values():
            answer(asked[0])
        for i, ids in enumerate(track(asked, "prompts", disable=not sys.stdout.isatty())):
            for name in [*ways][i % len(ways) :] + [*ways][: i % len(ways)]:
                start = time.perf_counter()
                out = ways[name](ids)
                samples[name].append(Sample(names[i], 0, "", name, out, time.perf_counter() - start, len(ids)))
    finally:
        for engine in engines.values():
            engine.close()

    bootstrap = Bootstrap(names, 1000, 0)
    gigabytes = read_bandwidth()
    roofline = gigabytes * 1e9 / bytes_per_token(target, asked, args.tokens)
    rates = {name: speed(found, bootstrap)[0] or 0.0 for name, found in samples.items()}
    same = {
        name: sum(a.ids == b.ids for a, b in zip(found, samples["ours, plain"], strict=True))
        for name, found in samples.items()
    }
    table = Table("way", "tokens/s", "x transformers [95 %]", "x ours, plain [95 %]", "of roofline", "same answers")
    figures: dict[str, Any] = {}
    for name, found in samples.items():
        (by_hf, hf), (by_plain, plain) = (
            ratio(found, samples[other], bootstrap) for other in ("transformers, generate", "ours, plain")
        )
        figures[name] = {
            "tokens_per_second": rates[name], "over_transformers": by_hf, "over_transformers_interval": hf,
            "over_plain": by_plain, "over_plain_interval": plain, "same_answers": same[name],
        }  # fmt: skip
        cells = [f"{value:.2f} [{low:.2f}, {high:.2f}]" for value, (low, high) in ((by_hf, hf), (by_plain, plain))]  # type: ignore[misc]
        table.add_row(
            name, f"{rates[name]:.1f}", *cells, f"{rates[name] / roofline:.0%}", f"{same[name]} of {len(asked)}"
        )
    console = Console(width=130, highlight=False)
    console.print(table)
    console.print(f"read bandwidth {gigabytes:.1f} GB/s on {args.threads} threads: {roofline:.1f} tokens/s at most")
    best = max(rate for name, rate in rates.items() if name.startswith("ours, EAGLE-3")) if not args.quick else 0.0
    bars = [
        bar(
            "plain over transformers' generate", rates["ours, plain"] / rates["transformers, generate"], at_least=PLAIN
        ),
        bar("EAGLE-3 over our own plain", best / rates["ours, plain"], at_least=SPECULATIVE),
        bar("plain, share of the roofline", rates["ours, plain"] / roofline, at_least=ROOFLINE),
    ]
    for name, rate in rates.items():
        if name.startswith(("transformers, ", "vLLM, EAGLE-3")) and name != "transformers, generate":
            bars.append(bar(f"EAGLE-3 over {name}", best / rate, at_least=1.0))
        if name == "vLLM, plain":
            bars.append(bar(f"plain over {name}", rates["ours, plain"] / rate, at_least=1.0))
    for one in bars:
        console.print(
            f"{'holds' if one['holds'] else 'FAILS'}  {one['name']}: {one['value']:.3f} (at least {one['at_least']:g})"
        )
    return {"name": "decode", "quick": args.quick, "machine": machine(target), "threads": args.threads,
            "bandwidth_gb": gigabytes, "roofline": roofline, "ways": figures, "bars": bars}  # fmt: skip


def ours(target: Any, args: argparse.Namespace) -> dict[str, Answer]:
    """Plain decoding, and chains from the head."""
    from draftsmith.inference.load import load_drafter
    from draftsmith.inference.speculate import DecodeConfig, generate
    from draftsmith.losses.probs import SamplingParams

    params = SamplingParams(max_new_tokens=args.tokens)

    def way(drafter: Any, decode: DecodeConfig) -> Answer:
        return lambda ids: generate(target, [ids], params, drafter, decode)[0].ids

    ways = {"ours, plain": way(None, DecodeConfig())}
    if not args.quick:
        head = load_drafter(str(args.head), target)
        ways |= {f"ours, EAGLE-3 K={k}": way(head, DecodeConfig(k=k)) for k in args.k}
        trees = {n: DecodeConfig(tree="static", nodes=n, k=2) for n in args.nodes}
        ways |= {f"ours, EAGLE-3 static tree of {n}": way(head, tree) for n, tree in trees.items()}
    return ways


def transformers_ways(target: Any, args: argparse.Namespace) -> dict[str, Answer]:
    """`generate` of the same weights: plainly, by prompt lookup, with an assistant."""
    import torch
    from transformers import AutoModelForCausalLM, GenerationConfig

    def way(**options: Any) -> Answer:
        config = GenerationConfig(
            max_new_tokens=args.tokens, do_sample=False, eos_token_id=list(target.facts.eos_ids),
            pad_token_id=target.facts.eos_ids[0],
            **{key: value for key, value in options.items() if key != "assistant_model"},
        )  # fmt: skip
        beside = {"assistant_model": options["assistant_model"]} if "assistant_model" in options else {}

        def answer(ids: list[int]) -> list[int]:
            inputs = torch.tensor([ids])
            with torch.inference_mode():
                out = target.model.generate(
                    inputs, attention_mask=torch.ones_like(inputs), generation_config=config, **beside
                )
            return out[0, len(ids) :].tolist()

        return answer

    ways = {"transformers, generate": way(), "transformers, prompt lookup": way(prompt_lookup_num_tokens=LOOKUP)}
    if args.assistant:
        small = AutoModelForCausalLM.from_pretrained(args.assistant, dtype=torch.bfloat16).eval()
        ways["transformers, assisted"] = way(assistant_model=small)
    return ways


# The engine


class Engine:
    """vLLM in a process of its own: a line of JSON in, a line of JSON out."""

    def __init__(self, python: Path, job: dict[str, Any], threads: int, log: Path) -> None:
        from engine_vllm import SETTINGS

        env = os.environ | SETTINGS | {"OMP_NUM_THREADS": str(threads)}
        log.parent.mkdir(parents=True, exist_ok=True)
        self.log = log.open("w")
        self.process = subprocess.Popen(
            [python, __file__, "--worker", json.dumps(job)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self.log,
            text=True, env=env,
        )  # fmt: skip
        self.read()

    def read(self) -> Any:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            if line.startswith("ids "):
                return json.loads(line[4:])
            self.log.write(line)
        raise SystemExit(f"the engine ended (code {self.process.wait()}); its words are in {self.log.name}")

    def answer(self, ids: list[int]) -> list[int]:
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps(ids) + "\n")
        self.process.stdin.flush()
        return self.read()

    def close(self) -> None:
        assert self.process.stdin is not None
        self.process.stdin.close()
        self.process.wait()
        self.log.close()


def engine_ways(args: argparse.Namespace, longest: int) -> dict[str, Engine]:
    """The engine without and with the head, by the configuration that the export's card prints."""
    from engine_vllm import engine_python, engine_settings

    from draftsmith.inference.load import read_export_config
    from draftsmith.models.pretrained import smollm2_folder

    python, folder = engine_python(args.venv), smollm2_folder()
    speculative, loader = engine_settings(
        read_export_config(str(args.head)), folder, args.head.absolute(), args.engine_k
    )
    job = {"model": str(folder), "positions": longest + args.tokens + 2 * args.engine_k + 2, "tokens": args.tokens}
    out = ROOT / "runs" / "decode"
    return {
        "vLLM, plain": Engine(
            python, job | {"speculative": None, "loader": {}}, args.engine_threads, out / "plain.log"
        ),
        f"vLLM, EAGLE-3 K={args.engine_k}": Engine(
            python, job | {"speculative": speculative, "loader": loader}, args.engine_threads, out / "eagle3.log"
        ),
    }


def worker(job: dict[str, Any]) -> None:
    """Inside the engine's environment."""
    from vllm import LLM, SamplingParams  # type: ignore[import-not-found]

    engine = LLM(
        model=job["model"], dtype="bfloat16", max_model_len=job["positions"], max_num_seqs=1, enable_prefix_caching=False,
        skip_tokenizer_init=True, speculative_config=job["speculative"], model_loader_extra_config=job["loader"],
    )  # fmt: skip
    config = json.loads((Path(job["model"]) / "generation_config.json").read_text())
    stop = config["eos_token_id"] if isinstance(config["eos_token_id"], list) else [config["eos_token_id"]]
    sampling = SamplingParams(temperature=0.0, max_tokens=job["tokens"], stop_token_ids=stop, detokenize=False)
    print("ids []", flush=True)
    for line in sys.stdin:
        (answer,) = engine.generate([{"prompt_token_ids": json.loads(line)}], sampling, use_tqdm=False)
        print("ids", json.dumps(list(answer.outputs[0].token_ids)), flush=True)


# The roofline


def read_bandwidth(megabytes: int = 512, repeats: int = 7) -> float:
    """GB/s at which weights far larger than any cache are read by a matrix product with one row; the best of several."""
    import torch

    weight_OI = torch.ones(megabytes * 2**20 // 2 // 4096, 4096, dtype=torch.bfloat16)
    # Ones: pages of zeros that nobody wrote are all one page.
    row_1I, best = torch.ones(1, 4096, dtype=torch.bfloat16), 0.0
    bits = weight_OI.view(torch.int64)
    for _ in range(repeats):
        for read in (lambda: torch.nn.functional.linear(row_1I, weight_OI), lambda: bits.sum()):
            start = time.perf_counter()
            read()
            best = max(best, weight_OI.nbytes / (time.perf_counter() - start))
    return best / 1e9


def bytes_per_token(target: Any, prompts: list[list[int]], tokens: int) -> float:
    """Weights that a token reads, and keys and values of the text before it, on average."""
    facts, size = target.facts, target.dtype.itemsize
    weights = sum(p.numel() for p in target.model.parameters())
    if not facts.tied:
        weights -= facts.vocab * facts.width
    before = sum(map(len, prompts)) / len(prompts) + tokens / 2
    return size * (weights + 2 * facts.layers * facts.kv_heads * facts.head_dim * before)


if __name__ == "__main__":
    if sys.argv[1:2] == ["--worker"]:
        worker(json.loads(sys.argv[2]))
    else:
        sys.exit(main())
