"""Is speculation lossless? Greedy output with and without it, token by token, and bit by bit at a fixed width.

1. float64, a tiny random-weight target, 300 prompts x 64 tokens: every method x tree x batch {1, 4} against plain
   decoding in the same runtime. Random heads are mostly wrong, so a look-up of the known answers, partly made wrong,
   rides along as one more drafter, and so do the training-free ones (Jacobi decoding with blocks of 4, 8, 16 and 32, and
   with a quadratic window; its pools are branches, so chains are without and static trees with them). Bar: not one
   differing token.
2. Fixed width: tiny targets in bf16 and fp32, 300 x 64, by both runners, and the real target in bf16, 10 x 48, batch
   {1, 5}; chains of K in {2, 4}: the same ids and the same logits, bit by bit, as plain decoding padded to that width.
   `--model EXPORT` (several) tests trained heads on the real target; methods without one are tested with fresh heads.
   Bars: no differing id, no differing row of logits.
3. Trees have no fixed width: greedy answers may part from plain decoding where rounding decides a near-tie, and nowhere
   else (`inference/ties.py`: a first difference counts as wrong unless the top-2 logit gap of plain decoding is below 4 x
   what passes of one row and wide ones differ by, on the same text; what follows it is not compared). Tiny fp32 with every
   tree, tiny bf16 and the real target in bf16 with static and dynamic ones. Bar: no unexcused difference; the excused are counted.

    python tests/bench/lossless.py                          # hours on two cores; resumes where it stopped
    python tests/bench/lossless.py --parts 2                # fixed width alone
    python tests/bench/lossless.py --only medusa hydra eagle eagle3 --trees chain static dynamic
    python tests/bench/lossless.py --model runs/demo/export
    python tests/bench/lossless.py --share 10               # a tenth of the prompts of each part
    python tests/bench/lossless.py --quick                  # a sanity run

Finished cells are kept in `runs/bench/lossless.jsonl` (`--out`); delete it to start over. The last line is JSON; the exit
code is 1 where a bar fails (`--quick`: where something differs).
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from draftsmith.data.sources import DataConfig, load_conversations
from draftsmith.inference.load import free_drafter, load_drafter, read_export_config
from draftsmith.inference.speculate import DecodeConfig, Result, chain_width, generate
from draftsmith.inference.ties import parting, pass_rows
from draftsmith.inference.trees import TREES, fits
from draftsmith.losses.probs import SamplingParams
from draftsmith.models import METHODS, TRAINING_FREE, FreeSettings
from draftsmith.models.drafter import Budget, Commit, Prefill
from draftsmith.models.jacobi import JacobiConfig
from draftsmith.models.loading import load_target
from draftsmith.models.target import Target
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
TINY = (("bfloat16", "lean"), ("float32", "lean"), ("bfloat16", "hf"), ("float32", "hf"))
BEDS = [*(f"{dtype} {runner}" for dtype, runner in TINY), "real"]
BATCH = 30  # prompts of a tiny target decoded together
Answer = tuple[list[int], Tensor | None]  # ids, and the logits they were chosen from


class LookUp:
    """A drafter that knows the answers, of which the first 0 to K tokens of a chain are left right, in turn. In a tree each
    of them has a wrong sibling, which stands before it."""

    taps: tuple[int, ...] = ()
    d2t_W, parallel, max_depth = None, 1, None

    def __init__(self, prompts: list[list[int]], answers: list[list[int]], tokens: int) -> None:
        self.rows = [(len(p), a) for p, a in zip(prompts, answers, strict=True)]
        self.tokens, self.turn = tokens, 0

    def init(self, prefill: Prefill) -> None:
        return None

    def propose(self, state: None, commit: Commit, budget: Budget, params: Any, draft: Any) -> tuple[None, Tree]:
        self.turn += 1
        n = budget.depth
        right = (self.turn * 7) % (n + 1)
        drafts = []
        for b, (start, answer) in enumerate(self.rows):
            last = max(int(commit.counts_B[b]) - 1, 0)
            at = int(commit.positions_BT[b, last]) + 1 - start
            ahead = (answer[at + 1 :] + [0] * n)[:n]
            drafts.append([x if j < right else (x + 1) % self.tokens for j, x in enumerate(ahead)])
        tokens_BN = torch.tensor(drafts)
        steps_N = torch.arange(n)
        parents_N, depths_N = steps_N, steps_N + 1
        if budget.width > 1 and budget.nodes >= 2 * n:
            tokens_BN = torch.stack([(tokens_BN + 2) % self.tokens, tokens_BN], 2).flatten(1)
            parents_N, depths_N = (2 * steps_N).repeat_interleave(2), depths_N.repeat_interleave(2)
        valid_BN = torch.ones_like(tokens_BN, dtype=torch.bool)
        places = [x_N.expand_as(tokens_BN) for x_N in (parents_N, depths_N)]
        return state, Tree(tokens_BN, *places, torch.zeros(tokens_BN.shape), valid_BN)


class Kept:
    """Finished parts, one JSON line each; a part that is there is not run again."""

    def __init__(self, path: Path | None) -> None:
        self.path = path
        self.rows: dict[str, dict[str, Any]] = {}
        if path is not None and path.is_file():
            self.rows = {row["key"]: row for row in map(json.loads, path.read_text().splitlines())}

    def get(self, key: str, run: Callable[[], dict[str, Any]], place: str = "") -> dict[str, Any]:
        """The part of this key, run now if need be. `place`: how far that is, for people."""
        if key not in self.rows:
            since = time.perf_counter()
            self.rows[key] = {"key": key, **run(), "seconds": round(time.perf_counter() - since, 1)}
            if self.path is not None:
                self.path.parent.mkdir(parents=True, exist_ok=True)
                with self.path.open("a") as file:
                    file.write(json.dumps(self.rows[key]) + "\n")
            print(
                f"  {place}{key}: {json.dumps({k: v for k, v in self.rows[key].items() if k not in ('key', 'ids')})}",
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
    method, *variant = method.split()
    torch.manual_seed(0)
    options = {"variant": variant[0]} if variant else {}
    drafter = METHODS[method](METHODS[method].Config(**options), target.facts)
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
    ours = name.split()[0] in METHODS or name.split()[0] in TRAINING_FREE
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
            if not grows(method, tree, target):
                continue
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


def grows(name: str, tree: str, target: Target) -> bool:
    """Whether this drafter makes such trees, and ones of its own: to proposers static and dynamic are the same."""
    if name == "look-up":
        return tree in ("chain", "static")
    drafter = fresh(name, target)  # asked level by level, it does not fit all
    return fits(tree, drafter) and not (hasattr(drafter, "propose") and tree == "dynamic")


class Bed:
    """A target with its prompts, loaded when a cell needs it; `name` and `runner` as `load_target` takes them."""

    def __init__(self, name: str, dtype: str, runner: Any, prompts: int, new: int, batches: tuple[int, ...]) -> None:
        self.name, self.dtype, self.runner, self.prompts, self.new = name, dtype, runner, prompts, new
        self.batches = tuple(dict.fromkeys(min(batch, prompts) for batch in batches))
        self.params = SamplingParams(max_new_tokens=new, ignore_eos=True)
        self.plain: dict[DecodeConfig, list[Result]] = {}

    @property
    def label(self) -> str:
        return f"{self.name} {self.dtype}{'' if self.runner == 'auto' else ' ' + self.runner}"

    @cached_property
    def target(self) -> Target:
        return load_target(self.name, dtype=self.dtype, runner=self.runner)

    @cached_property
    def texts(self) -> list[list[int]]:
        """The prompts as ids: random ones, or questions of the shipped conversations that no training reads."""
        if self.name == "tiny":
            return random_prompts(self.prompts, self.target.facts.tokens)
        held = load_conversations(DataConfig(source="shipped", split="heldout"))
        chats = [c.messages for c in held[:: max(1, len(held) // self.prompts)]][: self.prompts]
        return [
            self.target.tokenizer.apply_chat_template(
                [m for m in chat if m["role"] != "assistant"][:1], add_generation_prompt=True, return_dict=False
            )
            for chat in chats
        ]

    def reference(self, decode: DecodeConfig) -> list[Answer]:
        """Plain decoding, once for all drafters."""
        if decode not in self.plain:
            self.plain[decode] = generate(self.target, self.texts, self.params, None, decode)
        return [(r.ids, r.logits) for r in self.plain[decode]]


def bits_fixed_width(kept: Kept, bed: Bed, models: list[str], drafters: list[str]) -> list[dict[str, Any]]:
    """Part 2 of one target: the trained heads `models`, and `drafters` of other methods."""
    trained = {model: read_export_config(model)["draftsmith"]["method"] for model in models}
    everyone = [*models, *(name for name in drafters if name not in trained.values())]
    cells = [
        (k, batch, {"jacobi": f"jacobi {k}", "prompt_tokens": "prompt_tokens pass"}.get(drafter, drafter))
        for batch in bed.batches
        for k in (2, 4)
        for drafter in everyone
    ]

    def run(k: int, batch: int, drafter: str) -> dict[str, Any]:
        head = None if drafter == "look-up" else drafter_for(drafter, bed.target, [], [])
        width = k + 1 if head is None else chain_width(head, DecodeConfig(k=k))
        if width is None:
            return {"skipped": "its prefix adds keys that plain decoding has not"}
        plain = DecodeConfig(fixed_width=width, max_rows=batch, keep_logits=True)
        want = bed.reference(plain)
        return compare(want, run_batches(bed.target, bed.texts, bed.params, drafter, replace(plain, k=k), want))

    table = []
    for i, (k, batch, drafter) in enumerate(cells, 1):
        shown = f"{trained[drafter]} (trained)" if drafter in trained else drafter
        key = f"width {bed.label} {drafter} k {k} batch {batch} {bed.prompts}x{bed.new}"
        place = f"{i} of {len(cells)}, "
        done = kept.get(key, lambda k=k, batch=batch, drafter=drafter: run(k, batch, drafter), place)
        if "skipped" in done:
            continue
        row = {"target": bed.label, "drafter": shown, "tree": f"chain k={k}", "batch": batch}
        table.append(row | {key: value for key, value in done.items() if key != "key"})
    return table


def trees_near_ties(kept: Kept, bed: Bed, drafters: list[str], trees: list[str]) -> list[dict[str, Any]]:
    """Part 3 of one target: `compared` tokens are those up to the first difference of each answer, it included."""
    grown = [tree for tree in trees if not TREES[tree].chain]
    cells = [(bed.batches[-1], drafter, tree) for drafter in drafters for tree in grown]

    def run(batch: int, drafter: str, tree: str) -> dict[str, Any]:
        name = "jacobi 4" if drafter == "jacobi" else drafter
        if not grows(name, tree, bed.target):
            return {"skipped": "it makes no such trees"}
        decode = replace(SHAPES[tree], max_rows=batch)
        want = bed.reference(DecodeConfig(max_rows=batch))
        got = run_batches(bed.target, bed.texts, bed.params, name, decode, want)
        rows = pass_rows(bed.target, drafter_for(name, bed.target, bed.texts, want), decode)
        pairs = zip(bed.texts, want, got, strict=True)
        found = [parting(bed.target, text, ids, result.ids, rows, batch) for text, (ids, _), result in pairs]
        parted = [each for each in found if each is not None]
        figures = compare(want, got)
        return {name: figures[name] for name in ("prompts", "tokens", "accepted", "verifies")} | {
            "compared": sum(bed.new if each is None else each.position + 1 for each in found),
            "near_ties": sum(each.excused for each in parted),
            "unexcused": sum(not each.excused for each in parted),
            "gap_to_difference": max((each.gap / max(each.width_difference, 1e-30) for each in parted), default=0.0),
        }

    table = []
    for i, (batch, drafter, tree) in enumerate(cells, 1):
        key = f"tree {bed.label} {drafter} {tree} batch {batch} {bed.prompts}x{bed.new}"
        place = f"{i} of {len(cells)}, "
        done = kept.get(key, lambda batch=batch, drafter=drafter, tree=tree: run(batch, drafter, tree), place)
        if "skipped" not in done:
            row = {"target": bed.label, "drafter": drafter, "tree": tree, "batch": batch}
            table.append(row | {name: value for name, value in done.items() if name != "key"})
    return table


def main() -> int:
    parser = argparse.ArgumentParser(description="Greedy output with and without speculation, compared exactly.")
    parser.add_argument("--model", action="append", default=[], help="folder or hub id of an export; may be repeated")
    parser.add_argument("--parts", type=int, nargs="+", choices=(1, 2, 3), default=(1, 2, 3), help="default: all")
    parser.add_argument("--target", default="smollm2", help="the real target of parts 2 and 3")
    parser.add_argument("--prompts", type=int, default=300, help="prompts of tiny targets (default: 300)")
    parser.add_argument("--tokens", type=int, default=64, help="tokens per prompt of tiny targets (default: 64)")
    parser.add_argument("--real-prompts", type=int, default=10, help="prompts of the real target (default: 10)")
    parser.add_argument(
        "--real-tokens", type=int, default=48, help="tokens per prompt of the real target (default: 48)"
    )
    parser.add_argument("--share", type=int, default=1, metavar="N", help="a part in N of all prompts (default: 1)")
    parser.add_argument(
        "--beds", nargs="+", choices=BEDS, default=BEDS, metavar="BED", help=f"of parts 2 and 3: {', '.join(BEDS)}"
    )
    parser.add_argument(
        "--only", nargs="+", choices=DRAFTERS, default=DRAFTERS, metavar="DRAFTER", help=", ".join(DRAFTERS)
    )
    parser.add_argument(
        "--trees", nargs="+", choices=SHAPES, default=list(SHAPES), metavar="TREE", help="of parts 1 and 3"
    )
    parser.add_argument(
        "--out", type=Path, default=Path("runs/bench/lossless.jsonl"), help="where finished parts are kept"
    )
    parser.add_argument("--quick", action="store_true", help="tiny targets, few prompts; keeps nothing")
    args = parser.parse_args()
    torch.set_num_threads(1)
    assert set(SHAPES) == set(TREES), "every tree is measured"
    kept = Kept(None if args.quick else args.out)
    n, new = (8, 12) if args.quick else (max(1, args.prompts // args.share), args.tokens)
    real_n, real_new = (4, 12) if args.quick else (max(1, args.real_prompts // args.share), args.real_tokens)
    real = Bed("tiny" if args.quick else args.target, "bfloat16", "auto", real_n, real_new, (1, 5))
    beds = {f"{dtype} {runner}": Bed("tiny", dtype, runner, n, new, (BATCH,)) for dtype, runner in TINY}
    beds = {name: bed for name, bed in (beds | {"real": real}).items() if name in args.beds}
    models = [] if args.quick else args.model
    first: list[dict[str, Any]] = []
    second: list[dict[str, Any]] = []
    third: list[dict[str, Any]] = []
    if 1 in args.parts:
        first = tokens_float64(kept, n, new, 60, args.only, args.trees)
    for name, bed in beds.items() if 2 in args.parts else ():
        second += bits_fixed_width(kept, bed, models if name == "real" else [], args.only)
        bed.plain.clear()
    for name, bed in beds.items() if 3 in args.parts else ():
        if not name.endswith("hf"):
            trees = [tree for tree in args.trees if name == "float32 lean" or tree in ("static", "dynamic")]
            third += trees_near_ties(kept, bed, args.only, trees)

    columns = ["target", "drafter", "tree", "batch", "prompts", "tokens", "accepted", "verifies"]
    found = ["different_ids", "different_logits", "near_ties", "unexcused"]
    print("  ".join(f"{c:>16}" for c in [*columns, *found]))
    for row in first + second + third:
        print("  ".join(f"{row.get(c, '-')!s:>16}" for c in [*columns, *found]))
    bars: list[dict[str, Any]] = []
    if first:
        least = min(r["tokens"] // r["prompts"] for r in first)
        bars += [
            {"name": "float64 prompts", "value": min(r["prompts"] for r in first), "at_least": 300},
            {"name": "float64 tokens per prompt", "value": least, "at_least": 64},
            {"name": "float64 differing tokens", "value": sum(r["different_ids"] for r in first), "at_most": 0},
        ]
    bars += [
        {"name": f"{part} {name.replace('_', ' ')}", "value": sum(r[name] for r in rows), "at_most": 0}
        for part, rows, names in (
            ("fixed width", second, ("different_ids", "different_logits")),
            ("trees", third, ("unexcused",)),
        )
        for name in names
        if rows
    ]
    for bar in bars:
        bar["holds"] = bar["value"] >= bar["at_least"] if "at_least" in bar else bar["value"] <= bar["at_most"]
    figures = {
        "torch": torch.__version__,
        "quick": args.quick,
        "rows": first + second + third,
        "float64_tokens": sum(r["tokens"] for r in first),
        "fixed_width_tokens": sum(r["tokens"] for r in second),
        "tree_tokens": sum(r["compared"] for r in third),
        "near_ties": sum(r["near_ties"] for r in third),
    }
    print(json.dumps({"name": "lossless", "figures": figures, "bars": bars}))
    asked = [bar for bar in bars if not args.quick or "at_most" in bar]
    return 0 if asked and all(bar["holds"] for bar in asked) else 1


if __name__ == "__main__":
    sys.exit(main())
