"""Is speculation lossless? Greedy output with and without it, token by token, and bit by bit at a fixed width.

1. float64, a tiny random-weight target, 300 prompts x 64 tokens: every method x tree x batch {1, 4} against plain
   decoding in the same runtime. Random heads are mostly wrong, so a look-up of the known answers, partly made wrong,
   rides along as one more drafter, and so do the training-free ones (Jacobi decoding with blocks of 4, 8, 16 and 32, and
   with a quadratic window; its pools are branches, so chains are without and static trees with them). Bar: not one
   differing token.
2. The real target in bf16, chains at a fixed width, K in {2, 4}, batch {1, 4}: the same ids and the same logits, bit by
   bit, as plain decoding padded to that width. `--model EXPORT` (several) tests trained heads; methods without
   one are tested with fresh heads. Bars: no differing id, no differing row of logits.

    python tests/bench/lossless.py                          # hours on two cores; resumes where it stopped
    python tests/bench/lossless.py --only medusa hydra eagle eagle3 --trees chain static dynamic
    python tests/bench/lossless.py --model runs/demo/export
    python tests/bench/lossless.py --quick                  # a sanity run, under a minute

Finished parts are kept in `runs/bench/lossless.jsonl` (`--out`); delete it to start over. The last line is JSON.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from draftsmith.data.sources import DataConfig, load_conversations
from draftsmith.inference.load import free_drafter, load_drafter, read_export_config
from draftsmith.inference.speculate import DecodeConfig, Result, chain_width, generate
from draftsmith.inference.trees import TREES, fits
from draftsmith.losses.probs import SamplingParams
from draftsmith.models import METHODS, TRAINING_FREE, FreeSettings
from draftsmith.models.drafter import Budget, Commit, Prefill
from draftsmith.models.jacobi import JacobiConfig
from draftsmith.models.target import Target, load_target
from draftsmith.models.tree import Tree

SHAPES = {
    "chain": DecodeConfig(k=4),
    "static": DecodeConfig(k=4, tree="static", width=4, nodes=16),
    "dynamic": DecodeConfig(k=4, tree="dynamic", width=3, nodes=12),
    "cut": DecodeConfig(k=4, tree="cut", threshold=0.02),
    "cape": DecodeConfig(k=4, tree="cape", width=4, nodes=12),
    "opt": DecodeConfig(k=4, tree="opt", nodes=12, threshold=0.05),
    "best_first": DecodeConfig(k=4, tree="best_first", nodes=12),
    "capped": DecodeConfig(k=4, tree="capped", width=4, nodes=12),
    "ppd": DecodeConfig(k=4, tree="ppd", width=4, nodes=12),
}
DRAFTERS = [*METHODS, *TRAINING_FREE, "look-up"]
JACOBI = ("jacobi 4", "jacobi 8", "jacobi 16", "jacobi 32", "jacobi 4 quadratic")  # its block, and its window
Answer = tuple[list[int], Tensor | None]  # ids, and the logits they were chosen from


class LookUp:
    """A drafter that knows the answers, of which the first 0 to K tokens of a chain are left right, in turn."""

    taps: tuple[int, ...] = ()
    d2t_W, parallel, max_depth = None, 1, None

    def __init__(self, prompts: list[list[int]], answers: list[list[int]], tokens: int) -> None:
        self.rows = [(len(p), a) for p, a in zip(prompts, answers, strict=True)]
        self.tokens, self.turn = tokens, 0

    def init(self, prefill: Prefill) -> None:
        return None

    def propose(self, state: None, commit: Commit, budget: Budget, params: Any, draft: Any) -> tuple[None, Tree]:
        self.turn += 1
        n = budget.nodes
        right = (self.turn * 7) % (n + 1)
        drafts = []
        for b, (start, answer) in enumerate(self.rows):
            last = max(int(commit.counts_B[b]) - 1, 0)
            at = int(commit.positions_BT[b, last]) + 1 - start
            ahead = (answer[at + 1 :] + [0] * n)[:n]
            drafts.append([x if j < right else (x + 1) % self.tokens for j, x in enumerate(ahead)])
        tokens_BN = torch.tensor(drafts)
        steps_BN = torch.arange(n).expand_as(tokens_BN)
        valid_BN = torch.ones_like(tokens_BN, dtype=torch.bool)
        return state, Tree(tokens_BN, steps_BN, steps_BN + 1, torch.zeros(tokens_BN.shape), valid_BN)


class Kept:
    """Finished parts, one JSON line each; a part that is there is not run again."""

    def __init__(self, path: Path | None) -> None:
        self.path = path
        self.rows: dict[str, dict[str, Any]] = {}
        if path is not None and path.is_file():
            self.rows = {row["key"]: row for row in map(json.loads, path.read_text().splitlines())}

    def get(self, key: str, run: Callable[[], dict[str, Any]]) -> dict[str, Any]:
        """The part of this key, run now if need be."""
        if key not in self.rows:
            since = time.perf_counter()
            self.rows[key] = {"key": key, **run(), "seconds": round(time.perf_counter() - since, 1)}
            if self.path is not None:
                self.path.parent.mkdir(parents=True, exist_ok=True)
                with self.path.open("a") as file:
                    file.write(json.dumps(self.rows[key]) + "\n")
            print(
                f"  {key}: {json.dumps({k: v for k, v in self.rows[key].items() if k not in ('key', 'ids')})}",
                flush=True,
            )
        return self.rows[key]


def fresh(method: str, target: Target) -> Any:
    """An untrained head, by fixed seed; or a drafter that has nothing to train."""
    if method.startswith("jacobi "):
        block, window = (*method.split()[1:], "block")[:2]
        return free_drafter("jacobi", target, FreeSettings(jacobi=JacobiConfig(block=int(block), window=window)))  # type: ignore[arg-type]
    if method in TRAINING_FREE:
        return free_drafter(method, target)
    torch.manual_seed(0)
    drafter = METHODS[method](METHODS[method].Config(), target.facts)
    drafter.init_from_target(target)
    return drafter.to(target.dtype).eval()


def compare(want: list[Answer], got: list[Result]) -> dict[str, Any]:
    """Differing tokens and rows of logits, counted to the longer end; and what was accepted."""
    total = got[0].stats
    for result in got[1:]:
        total = total + result.stats
    ids, rows = 0, 0
    for (answer, logits_TV), result in zip(want, got, strict=True):
        both = min(len(answer), len(result.ids))
        ids += abs(len(answer) - len(result.ids)) + sum(a != b for a, b in zip(answer, result.ids, strict=False))
        if logits_TV is not None and result.logits is not None:
            rows += int((logits_TV[:both] != result.logits[:both]).any(-1).sum())
    return {
        "prompts": len(got),
        "tokens": total.committed,
        "different_ids": ids,
        "different_logits": rows,
        "accepted": total.from_draft,
        "verifies": total.verifies,
    }


def drafter_for(name: str, target: Target, prompts: list[list[int]], want: list[Answer]) -> Any:
    """By method, folder, or the look-up of these answers."""
    if name == "look-up":
        return LookUp(prompts, [ids for ids, _ in want], target.facts.tokens)
    ours = name in METHODS or name in TRAINING_FREE or name.startswith("jacobi ")
    return fresh(name, target) if ours else load_drafter(name, target)


def run_batches(
    target: Target,
    prompts: list[list[int]],
    params: SamplingParams,
    name: str,
    decode: DecodeConfig,
    want: list[Answer],
) -> list[Result]:
    """The look-up knows its batch, so every batch is one call."""
    drafter = None if name == "look-up" else drafter_for(name, target, prompts, want)
    results = []
    for first in range(0, len(prompts), decode.max_rows):
        some = slice(first, first + decode.max_rows)
        mine = drafter or drafter_for(name, target, prompts[some], want[some])
        results += generate(target, prompts[some], params, mine, decode)
    return results


def random_prompts(n: int, tokens: int) -> list[list[int]]:
    """Ids of 2 to 40 tokens, by fixed seed."""
    dice = torch.Generator().manual_seed(7)
    lengths = torch.randint(2, 41, (n,), generator=dice).tolist()
    return [torch.randint(tokens, (length,), generator=dice).tolist() for length in lengths]


def tokens_float64(
    kept: Kept, prompts_n: int, new: int, part: int, drafters: list[str], trees: list[str]
) -> list[dict[str, Any]]:
    """Part 1; `part` prompts at a time, so that it can resume."""
    target = load_target("tiny", dtype="float64")
    prompts = random_prompts(prompts_n, target.facts.tokens)
    params = SamplingParams(max_new_tokens=new, ignore_eos=True)
    table = []
    for method in (m for d in drafters for m in (JACOBI if d == "jacobi" else [d])):
        for tree in trees:
            shape = SHAPES[tree]
            if method.startswith("jacobi") and tree == "dynamic":
                continue  # chain: without pools; static: with pools; dynamic is the same to it
            if method == "look-up" and tree != "chain":
                continue  # it proposes chains
            if method != "look-up" and not fits(tree, fresh(method, target)):
                continue  # it is asked level by level
            for batch in (1, 4):
                row: dict[str, Any] = {"target": "tiny float64", "drafter": method, "tree": tree, "batch": batch}
                for first in range(0, prompts_n, part):
                    some = prompts[first : first + part]

                    def plain(some: list[list[int]] = some) -> dict[str, Any]:
                        return {"ids": [r.ids for r in generate(target, some, params)]}

                    ids = kept.get(f"f64 plain {new} {first}+{len(some)}", plain)["ids"]

                    def run(
                        some: list[list[int]] = some,
                        ids: Any = ids,
                        method: str = method,
                        decode: Any = shape,
                        n: int = batch,
                    ) -> dict[str, Any]:
                        want: list[Answer] = [(x, None) for x in ids]
                        return compare(
                            want, run_batches(target, some, params, method, replace(decode, max_rows=n), want)
                        )

                    done = kept.get(f"f64 {method} {tree} batch {batch} {new} {first}+{len(some)}", run)
                    for key in ("prompts", "tokens", "different_ids", "accepted", "verifies", "seconds"):
                        row[key] = row.get(key, 0) + done[key]
                table.append(row)
    return table


def bits_fixed_width(
    kept: Kept, name: str, models: list[str], prompts_n: int, new: int, drafters: list[str]
) -> list[dict[str, Any]]:
    """Part 2: the trained heads `models`, and `drafters` of other methods."""
    trained = {model: read_export_config(model)["draftsmith"]["method"] for model in models}
    everyone = [*models, *(name for name in drafters if name not in trained.values())]
    cells = [
        (k, batch, f"jacobi {k}" if drafter == "jacobi" else drafter)
        for k in (2, 4)
        for batch in (1, 4)
        for drafter in everyone
    ]
    made: list[Any] = []  # target and prompts, when something is left to do
    plain: dict[tuple[int, int], list[Answer]] = {}
    params = SamplingParams(max_new_tokens=new)

    def ready() -> tuple[Target, list[list[int]]]:
        if not made:
            target = load_target(name, dtype="bfloat16")
            if name == "tiny":
                prompts = random_prompts(prompts_n, target.facts.tokens)
            else:
                held = load_conversations(DataConfig(source="shipped", split="heldout"))
                chats = [c.messages for c in held[:: max(1, len(held) // prompts_n)]][:prompts_n]
                prompts = [
                    target.tokenizer.apply_chat_template(
                        [m for m in chat if m["role"] != "assistant"][:1], add_generation_prompt=True, return_dict=False
                    )
                    for chat in chats
                ]
            made.extend((target, prompts))
        return made[0], made[1]

    def run(k: int, batch: int, drafter: str) -> dict[str, Any]:
        target, prompts = ready()
        head = None if drafter == "look-up" else drafter_for(drafter, target, [], [])
        width = k + 1 if head is None else chain_width(head, DecodeConfig(k=k))
        if width is None:
            return {"skipped": "its prefix adds keys that plain decoding has not"}
        decode = DecodeConfig(k=k, fixed_width=width, max_rows=batch, keep_logits=True)
        if (width, batch) not in plain:
            plain.clear()  # logits of one width at a time
            plain[width, batch] = [(r.ids, r.logits) for r in generate(target, prompts, params, None, decode)]
        want = plain[width, batch]
        return compare(want, run_batches(target, prompts, params, drafter, decode, want))

    table = []
    for k, batch, drafter in cells:
        shown = f"{trained[drafter]} (trained)" if drafter in trained else drafter
        key = f"bf16 {name} {drafter} k {k} batch {batch} {prompts_n}x{new}"
        done = kept.get(key, lambda k=k, batch=batch, drafter=drafter: run(k, batch, drafter))
        if "skipped" in done:
            continue
        row = {"target": f"{name} bfloat16", "drafter": shown, "tree": f"chain k={k}", "batch": batch}
        table.append(row | {key: value for key, value in done.items() if key != "key"})
    return table


def main() -> None:
    parser = argparse.ArgumentParser(description="Greedy output with and without speculation, compared exactly.")
    parser.add_argument("--model", action="append", default=[], help="folder or hub id of an export; may be repeated")
    parser.add_argument("--target", default="smollm2", help="the real target of part 2")
    parser.add_argument("--prompts", type=int, default=300, help="prompts of part 1 (default: 300)")
    parser.add_argument("--tokens", type=int, default=64, help="tokens per prompt of part 1 (default: 64)")
    parser.add_argument("--real-prompts", type=int, default=12, help="prompts of part 2 (default: 12)")
    parser.add_argument("--real-tokens", type=int, default=48, help="tokens per prompt of part 2 (default: 48)")
    parser.add_argument(
        "--only", nargs="+", choices=DRAFTERS, default=DRAFTERS, metavar="DRAFTER", help=", ".join(DRAFTERS)
    )
    parser.add_argument("--trees", nargs="+", choices=SHAPES, default=list(SHAPES), metavar="TREE", help="of part 1")
    parser.add_argument(
        "--out", type=Path, default=Path("runs/bench/lossless.jsonl"), help="where finished parts are kept"
    )
    parser.add_argument("--quick", action="store_true", help="tiny targets, few prompts; keeps nothing")
    args = parser.parse_args()
    torch.set_num_threads(1)
    assert set(SHAPES) == set(TREES), "every tree is measured"
    if args.quick:
        kept, sizes, real = Kept(None), (8, 12, 8), ("tiny", 4, 12)
    else:
        kept, sizes, real = (
            Kept(args.out),
            (args.prompts, args.tokens, 60),
            (args.target, args.real_prompts, args.real_tokens),
        )
    first = tokens_float64(kept, *sizes, args.only, args.trees)
    second = bits_fixed_width(kept, real[0], [] if args.quick else args.model, *real[1:], args.only)

    columns = ["target", "drafter", "tree", "batch", "prompts", "tokens", "accepted", "verifies", "different_ids"]
    print("  ".join(f"{c:>16}" for c in [*columns, "different_logits"]))
    for row in first + second:
        print("  ".join(f"{row.get(c, '-')!s:>16}" for c in [*columns, "different_logits"]))
    bars: list[dict[str, Any]] = [
        {"name": "float64 prompts", "value": min(r["prompts"] for r in first), "at_least": 300},
        {"name": "float64 tokens per prompt", "value": min(r["tokens"] // r["prompts"] for r in first), "at_least": 64},
        {"name": "float64 differing tokens", "value": sum(r["different_ids"] for r in first), "at_most": 0},
        {"name": "fixed width differing ids", "value": sum(r["different_ids"] for r in second), "at_most": 0},
        {
            "name": "fixed width differing rows of logits",
            "value": sum(r["different_logits"] for r in second),
            "at_most": 0,
        },
    ]
    for bar in bars:
        bar["holds"] = bar["value"] >= bar["at_least"] if "at_least" in bar else bar["value"] <= bar["at_most"]
    figures = {
        "torch": torch.__version__,
        "quick": args.quick,
        "rows": first + second,
        "float64_tokens": sum(r["tokens"] for r in first),
        "fixed_width_tokens": sum(r["tokens"] for r in second),
    }
    print(json.dumps({"name": "lossless", "figures": figures, "bars": bars}))


if __name__ == "__main__":
    main()
