"""Jacobi trajectories of one model's greedy answers, collected in four ways in one run, in turns.

    naive    a prompt at a time, each pass over prompt and text, logits of every row, no cache: the public way
    cached   a prompt at a time, finished text in a cache, each pass over a block's open guesses alone
    ours     `draftsmith rollout --trajectories`, from the prompts to the file: batched answers, then all blocks at once
    states   the second half of it: states for answers that are there

All begin with the same guesses. `naive` is run on a part of the prompts, its rate being per token. Compared are tokens of
answers per second, and the states of `ours` with those of `cached`, token by token (in bfloat16, rows of a wide pass
differ in their last bits from those of a narrow one, and near ties fall either way; in float64 nothing may differ).

    OMP_NUM_THREADS=1 python tests/bench/trajectories.py      # smollm2, about 6 minutes on one core
    python tests/bench/trajectories.py --quick                # tiny target in float64, no bound on speed is meant
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from main_job import bar

from draftsmith.data.encode import Sample, prompt_ids
from draftsmith.data.jacobi_states import unpack_states
from draftsmith.data.packing import collate
from draftsmith.data.sources import Conversation, DataConfig, load_conversations
from draftsmith.inference.rollout import rollout
from draftsmith.inference.trajectories import TrajectoryConfig, sample_number, with_states
from draftsmith.losses.probs import SamplingParams
from draftsmith.models.loading import load_target
from draftsmith.models.trajectories import answer_blocks, first_states

States = list[list[int]]  # of one block, the first guesses first and the fixed point last


def guesses(talk: Conversation, prompt: list[int], tokens: int, block: int, seed: int) -> list[list[int]]:
    """The first guesses of every block, as `rollout` draws them."""
    size = -(-tokens // block) * block
    ids_n = torch.tensor([*prompt, *[0] * size])
    sample = Sample(sample_number(talk.id), ids_n, torch.arange(len(ids_n)) >= len(prompt))
    first_BT = first_states(answer_blocks(collate([sample], seed), block), "prompt")
    return [part.tolist() for part in first_BT[0, len(prompt) :].split(block)]


@torch.no_grad()
def naive(target: Any, prompt: list[int], firsts: list[list[int]]) -> list[States]:
    """Block by block, each pass over everything."""
    done: list[States] = []
    before = list(prompt)
    for first in firsts:
        states = [first]
        while True:
            ids = torch.tensor([[*before, *states[-1]]])
            hidden_BTD = target.forward(ids, torch.arange(ids.shape[1])[None]).last_hidden_BTD
            said = target.head(hidden_BTD)[0, :, : target.facts.tokens].argmax(-1)
            state = said[len(before) - 1 : -1].tolist()
            if state == states[-1]:
                break
            states.append(state)
        done.append(states)
        before += states[-1]
        if set(states[-1]) & set(target.facts.eos_ids):
            break
    return done


@torch.no_grad()
def cached(target: Any, prompt: list[int], firsts: list[list[int]]) -> list[States]:
    """Block by block, each pass over the last certain token and the guesses behind it, of which those that stay are kept
    in the cache. A block that ends the answer ends with it."""
    done: list[States] = []
    cache = target.new_cache(1, len(prompt) + sum(map(len, firsts)) + len(firsts[0]))
    at = len(prompt) - 1  # tokens in the cache
    target.forward(torch.tensor([prompt[:-1]]), torch.arange(at)[None], cache=cache)
    cache.commit(torch.tensor([at]))
    certain = prompt[-1]
    for first in firsts:
        states, settled = [first], 0
        while settled < len(first):
            ids = torch.tensor([[certain, *states[-1][settled:-1]]])
            out = target.forward(ids, at + torch.arange(ids.shape[1])[None], cache=cache)
            said = target.head(out.last_hidden_BTD)[0, :, : target.facts.tokens].argmax(-1).tolist()
            kept = 1
            while kept < len(said) and said[kept - 1] == states[-1][settled + kept - 1]:
                kept += 1
            cache.commit(torch.tensor([kept]))
            at += kept
            state = [*states[-1][:settled], *said]
            if state != states[-1]:
                states.append(state)
            settled += kept
            certain = state[settled - 1]
            if set(state[:settled]) & set(target.facts.eos_ids):
                break
        done.append(states)
        if set(states[-1][:settled]) & set(target.facts.eos_ids):
            break
    return done


def tokens_of(target: Any, blocks: Sequence[States], most: int) -> int:
    """Tokens of the answer: up to and with its end."""
    ids = [token for states in blocks for token in states[-1]][:most]
    ends = [i + 1 for i, token in enumerate(ids) if token in target.facts.eos_ids]
    return min([len(ids), *ends])


@dataclass
class Way:
    """One way of collecting: tokens, seconds, and what it found."""

    tokens: int = 0
    seconds: float = 0.0
    found: dict[str, Any] = field(default_factory=dict)

    def run(self, collect: Callable[[], tuple[int, dict[str, Any]]]) -> None:
        """Time it."""
        since = time.perf_counter()
        tokens, found = collect()
        self.seconds += time.perf_counter() - since
        self.tokens += tokens
        self.found |= found

    @property
    def rate(self) -> float:
        """Tokens per second."""
        return self.tokens / self.seconds


def measure(
    target: Any,
    talks: list[Conversation],
    tokens: int,
    block: int,
    rows: int,
    naive_of: int,
    folder: Path,
    seed: int = 0,
) -> dict[str, Any]:
    """All ways on groups of `rows` prompts in turns, `naive` on the first `naive_of` of each."""
    config, params = TrajectoryConfig(block), SamplingParams(max_new_tokens=tokens)
    ways = {name: Way() for name in ("naive", "cached", "ours", "states")}
    failed, bytes_ = 0, 0

    def alone(loop: Any, some: list[Conversation]) -> Callable[[], tuple[int, dict[str, Any]]]:
        def collect() -> tuple[int, dict[str, Any]]:
            found, count = {}, 0
            for talk in some:
                prompt = prompt_ids(talk.messages, target.tokenizer)
                found[talk.id] = loop(target, prompt, guesses(talk, prompt, tokens, block, seed))
                count += tokens_of(target, found[talk.id], tokens)
            return count, found

        return collect

    for first in range(0, len(talks), rows):
        group = talks[first : first + rows]
        out = folder / f"{first}.jsonl"

        def whole(group: list[Conversation] = group, out: Path = out) -> tuple[int, dict[str, Any]]:
            nonlocal failed
            report = rollout(target, group, out, params, rows, seed, False, states=config)
            failed += sum(report.failed.values())
            kept = load_conversations(DataConfig(source=str(out)))
            return sum(len(t.answer_ids or []) for t in kept), {t.id: t for t in kept}

        ways["ours"].run(whole)
        bare = [replace(t, jacobi=None) for t in ways["ours"].found.values() if t.id in {g.id for g in group}]

        def half(bare: list[Conversation] = bare) -> tuple[int, dict[str, Any]]:
            got = with_states(target, bare, config, seed)
            return sum(len(t.answer_ids or []) for t in bare), {t.id: t for t in got if isinstance(t, Conversation)}

        ways["states"].run(half)
        ways["cached"].run(alone(cached, group))
        ways["naive"].run(alone(naive, group[:naive_of]))
        print(f"{min(first + rows, len(talks))} of {len(talks)} prompts", file=sys.stderr)
    for talk in ways["ours"].found.values():
        bytes_ += len(json.dumps(talk.jacobi.record(), separators=(",", ":")))
    found = ways["ours"].found
    kept = sum(t.jacobi.blocks for t in found.values())
    other = sum(t.jacobi.other for t in found.values())
    equal = {name: compared(found, ways[name].found, block) for name in ("cached", "naive")}
    return {
        "tokens_per_second": {name: round(way.rate, 2) for name, way in ways.items()},
        "tokens": {name: way.tokens for name, way in ways.items()},
        "over_naive": round(ways["ours"].rate / ways["naive"].rate, 2),
        "over_cached": round(ways["ours"].rate / ways["cached"].rate, 2),
        "blocks": kept,
        "blocks_left_out": other,
        "blocks_equal_to_cached": equal["cached"],
        "blocks_equal_to_naive": equal["naive"],
        "conversations_dropped": failed,
        "bytes_per_token": round(bytes_ / max(ways["ours"].tokens, 1), 1),
    }


def compared(ours: dict[str, Conversation], theirs: dict[str, list[States]], block: int) -> dict[str, float]:
    """Share of the blocks of both whose states are the same in number and token for token. What follows the answer's end in
    its last block is in no state of ours."""
    same = count = 0
    for name, blocks in theirs.items():
        if name not in ours or (stored := ours[name].jacobi) is None:
            continue
        states_In = unpack_states(stored)
        for k, part_Ib in enumerate(states_In.split(block, dim=1)):
            mine = distinct(part_Ib.tolist())
            other = distinct([s[: part_Ib.shape[1]] for s in blocks[k]]) if k < len(blocks) else []
            same += mine == other
            count += 1
    return {"share": round(same / max(count, 1), 4), "of": count}


def distinct(states: States) -> States:
    """Without the states that repeat the one before."""
    return [s for i, s in enumerate(states) if i == 0 or s != states[i - 1]]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="tiny target in float64, no bound on speed is meant")
    parser.add_argument("--target", default=None, help="model to collect from (default: smollm2)")
    parser.add_argument("--dtype", default=None, help="default: bfloat16")
    parser.add_argument("--prompts", type=int, default=None, help="held-out prompts (default: 24)")
    parser.add_argument("--naive", type=int, default=1, help="of each group, prompts for the naive loop (default: 1)")
    parser.add_argument("--tokens", type=int, default=None, help="tokens of an answer at most (default: 64)")
    parser.add_argument("--block", type=int, default=16)
    parser.add_argument("--rows", type=int, default=8, help="prompts of a group, answered together (default: 8)")
    args = parser.parse_args()
    name = args.target or ("tiny" if args.quick else "smollm2")
    target = load_target(name, dtype=args.dtype or ("float64" if args.quick else "bfloat16"))
    tokens = args.tokens or (20 if args.quick else 64)
    held = [
        t
        for t in load_conversations(DataConfig(split="heldout"))
        if [m["role"] for m in t.messages][1:] == ["assistant"]
    ]
    talks = [replace(t, messages=t.messages[:1], split="") for t in held[: args.prompts or (4 if args.quick else 24)]]
    with tempfile.TemporaryDirectory() as folder:
        for warm in ("warm", "run"):
            (at := Path(folder) / warm).mkdir()
            some, most = (talks[:1], args.block) if warm == "warm" else (talks, tokens)
            figures = measure(target, some, most, args.block, args.rows, args.naive, at)
    for key, value in figures.items():
        print(f"{key:<24} {value}")
    exact = target.dtype == torch.float64
    share = figures["blocks_equal_to_cached"]["share"]
    bars = [
        bar("ours over the naive loop, tokens/s", figures["over_naive"], at_least=5.0),
        bar("ours over the cached loop, tokens/s", figures["over_cached"], at_least=1.5),
        bar(
            "share of blocks left out",
            figures["blocks_left_out"] / max(figures["blocks"], 1),
            at_most=0.0 if exact else 0.2,
        ),
        *([bar("share of blocks with the cached loop's states", share, at_least=1.0)] if exact else []),
    ]
    for one in bars:
        bound = f"at least {one['at_least']}" if "at_least" in one else f"at most {one['at_most']}"
        print(f"{'holds' if one['holds'] else 'FAILS'}  {one['name']}: {one['value']} ({bound})")
    facts = {"target": name, "dtype": str(target.dtype).removeprefix("torch."), "prompts": len(talks), "answer": tokens}
    facts |= {"block": args.block, "rows": args.rows, "threads": torch.get_num_threads(), "torch": torch.__version__}
    print(json.dumps({"name": "trajectories", "quick": args.quick, "figures": facts | figures, "bars": bars}))
    return 0 if args.quick or all(one["holds"] for one in bars) else 1


if __name__ == "__main__":
    sys.exit(main())
