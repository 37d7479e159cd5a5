"""Are rows bit-identical at equal width? What fixed-width decoding builds on, measured per data type.

Fixed-width decoding pads plain decoding to the width of a verification pass, so that greedy chains give the same ids
*and logits* with and without speculation. For that, one row of a pass must not depend, in any bit, on its place among
the rows, on what the other rows hold, or on how many keys behind it are masked. This script measures each of these on
the installed versions, first operator by operator at the target's own shapes, then for the whole target: a chain
decoded plainly (padded to width 5), and again with drafts of which random numbers are accepted, logits compared.

    python tests/bench/rows.py                     # smollm2, about 4 minutes; finished types are kept in runs/bench
    python tests/bench/rows.py --quick             # tiny target, a few seconds, nothing kept
    python tests/bench/rows.py --target FOLDER     # any target

A figure is the share of output numbers with at least one differing bit. The last line is JSON.

What was found (torch 2.13, AVX-512): in bf16 and fp32 no bit differs when width, number of rows and number of slots
read are all the same (`Target.new_cache(..., read_all=True)`); width alone is not enough, because attention over more
masked keys sums in another order. In float64 the width must also be a multiple of 4.
"""

from __future__ import annotations

import argparse
import json
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import linear, scaled_dot_product_attention

from draftsmith.models.lean import packed_product
from draftsmith.models.loading import load_target
from draftsmith.models.target import DTYPES, Target

WIDTH = 5


def differ(pairs: list[tuple[Tensor, Tensor]]) -> float:
    """Share of elements that are not bit-equal."""
    return sum(int((a != b).sum()) for a, b in pairs) / sum(a.numel() for a, _ in pairs)


class Draw:
    """Random tensors of one data type."""

    def __init__(self, dtype: torch.dtype) -> None:
        self.dtype, self.random = dtype, torch.Generator().manual_seed(0)

    def __call__(self, *shape: int) -> Tensor:
        return torch.randn(shape, generator=self.random).to(self.dtype)


def gemm(target: Target, draw: Draw) -> dict[str, float]:
    """One row through every weight shape of the target, among other rows, at other places, at other widths."""
    weights = {tuple(w.shape): w for w in target.model.parameters() if w.dim() == 2}
    weights[(1024, target.facts.width)] = target.head_weight[:1024].contiguous()  # a reduced vocabulary
    fixed: dict[int, list[tuple[Tensor, Tensor]]] = {4: [], WIDTH: [], 8: [], 16: []}
    one_to_five: list[tuple[Tensor, Tensor]] = []
    five_to_ten: list[tuple[Tensor, Tensor]] = []
    for weight in weights.values():
        row = draw(1, weight.shape[1])
        product = packed_product(weight) or partial(linear, weight=weight)  # as the lean runner multiplies
        for width, pairs in fixed.items():
            outs = []
            for place in range(width):
                rows = draw(width, weight.shape[1])
                rows[place] = row[0]
                outs.append(product(rows)[place])
            pairs += [(out, outs[0]) for out in outs[1:]]
        rows = torch.cat([row, draw(2 * WIDTH - 1, weight.shape[1])])
        at_five = product(rows[:WIDTH])[:1]
        one_to_five.append((product(row), at_five))
        five_to_ten.append((product(rows)[:1], at_five))
    figures = {f"gemm_fixed_width_{width}": differ(pairs) for width, pairs in fixed.items()}
    return figures | {"gemm_width_1_against_5": differ(one_to_five), "gemm_width_5_against_10": differ(five_to_ten)}


def attention(target: Target, draw: Draw) -> dict[str, float]:
    """One query among other queries, at other places, beside other batch rows, with more masked keys behind."""
    facts = target.facts
    place_pairs: dict[int, list[tuple[Tensor, Tensor]]] = {4: [], WIDTH: [], 8: [], 16: []}
    batch_pairs, longer_pairs = [], []
    for keys in (64, 200, 512, 700):
        visible = torch.arange(keys) < keys - 20
        k, v = draw(1, facts.heads, keys + 64, facts.head_dim), draw(1, facts.heads, keys + 64, facts.head_dim)
        for width, pairs in place_pairs.items():
            query, outs = draw(1, facts.heads, facts.head_dim), []
            for place in range(width):
                q, see = draw(1, facts.heads, width, facts.head_dim), torch.rand(width, keys) < 0.5
                q[:, :, place], see[:, 0], see[place] = query, True, visible
                outs.append(scaled_dot_product_attention(q, k[:, :, :keys], v[:, :, :keys], see)[:, :, place])
            pairs += [(out, outs[0]) for out in outs[1:]]
        q, see = draw(1, facts.heads, WIDTH, facts.head_dim), visible.expand(WIDTH, keys)
        alone = scaled_dot_product_attention(q, k[:, :, :keys], v[:, :, :keys], see)
        both = [torch.cat([draw(*x.shape), x]) for x in (q, k[:, :, :keys], v[:, :, :keys])]
        batch_pairs.append((scaled_dot_product_attention(*both, see)[1:], alone))
        for more in (1, 8, 64):
            wider = torch.cat([see, torch.zeros(WIDTH, more, dtype=torch.bool)], dim=1)
            out = scaled_dot_product_attention(q, k[:, :, : keys + more], v[:, :, : keys + more], wider)
            longer_pairs.append((out, alone))
    figures = {f"attention_fixed_width_{width}": differ(pairs) for width, pairs in place_pairs.items()}
    return figures | {
        "attention_beside_another_row": differ(batch_pairs),
        "attention_more_masked_keys": differ(longer_pairs),
    }


def decode(
    target: Target, rows: list[list[int]], tokens: int, width: int, read_all: bool, accept: Tensor | None, answers: Any
) -> list[list[Tensor]]:
    """Logits per row and new token. `accept` None: plain, padded to `width`. Else: chains of known-right drafts, cut
    after accept[row, step] of them (the rest of the draft is wrong)."""
    longest = max(map(len, rows))
    cache = target.new_cache(len(rows), longest + tokens + 16, read_all=read_all)
    ids_BT = torch.tensor([row + [0] * (longest - len(row)) for row in rows])
    counts_B = torch.tensor([len(row) for row in rows])
    hidden_BTD = target.forward(ids_BT, torch.arange(longest).expand(len(rows), -1), cache=cache).last_hidden_BTD
    cache.commit(counts_B)
    found = [[target.head(hidden_BTD[b : b + 1, n - 1 : n])[0, 0]] for b, n in enumerate(counts_B.tolist())]
    step = 0
    while min(map(len, found)) < tokens:
        kept = [0] * len(rows) if accept is None else accept[:, step].tolist()
        block_BT = torch.full((len(rows), width), 5)
        for b, logits in enumerate(found):
            at = len(logits) - 1
            drafts = answers[b][at + 1 : at + 1 + kept[b]] if kept[b] else []
            known = [int(logits[-1].argmax()), *drafts]
            block_BT[b, : len(known)] = torch.tensor(known)
            kept[b] = len(known) - 1
        positions_BT = cache.lengths_B[:, None] + torch.arange(width)
        logits_BTV = target.head(target.forward(block_BT, positions_BT, cache=cache).last_hidden_BTD)
        # A row that has all its tokens keeps decoding in place: its slots are not needed any more.
        done = torch.tensor([len(logits) >= tokens for logits in found])
        cache.commit(torch.where(done, 0, torch.tensor(kept) + 1))
        for b, logits in enumerate(found):
            if not done[b]:
                logits += list(logits_BTV[b, : kept[b] + 1].clone())
        step += 1
    return [logits[:tokens] for logits in found]


def whole(target: Target, tokens: int) -> dict[str, float]:
    """Plain against speculative decoding of the whole target, one row and three ragged rows."""
    random = torch.Generator().manual_seed(1)
    rows = [torch.randint(3, target.facts.tokens, (n,), generator=random).tolist() for n in (40, 23, 61)]
    accept = torch.randint(0, WIDTH, (3, tokens), generator=random)

    def compare(rows: list[list[int]], read_all: bool, plain_width: int, width: int = WIDTH) -> float:
        plain = decode(target, rows, tokens, plain_width, read_all, None, None)
        answers = [[int(logits.argmax()) for logits in row] for row in plain]
        drafted = decode(target, rows, tokens, width, read_all, accept[: len(rows)], answers)
        return differ([(torch.stack(a), torch.stack(b)) for a, b in zip(plain, drafted, strict=True)])

    return {
        "target_fixed_width_and_slots": compare(rows[:1], True, WIDTH),
        "target_fixed_width_and_slots_batch_3": compare(rows, True, WIDTH),
        "target_fixed_width_8_and_slots": compare(rows[:1], True, 8, 8),
        "target_fixed_width_only": compare(rows[:1], False, WIDTH),
        "target_fixed_slots_only": compare(rows[:1], True, 1),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="tiny target, a few seconds")
    parser.add_argument("--target", default=None, help="target to measure (default: smollm2)")
    parser.add_argument("--tokens", type=int, default=32, help="new tokens of the whole-target part")
    args = parser.parse_args()
    torch.set_num_threads(1)
    name = args.target or ("tiny" if args.quick else "smollm2")
    kept = Path("runs/bench") / f"rows-{Path(name).name}-{args.tokens}-torch{torch.__version__}.json"
    figures: dict[str, dict[str, float]] = json.loads(kept.read_text()) if kept.is_file() and not args.quick else {}
    for dtype in ("bfloat16", "float32", "float64"):
        if dtype in figures:
            continue
        with torch.inference_mode():
            target, draw = load_target(name, dtype=dtype), Draw(DTYPES[dtype])
            figures[dtype] = gemm(target, draw) | attention(target, draw) | whole(target, args.tokens)
        del target
        if not args.quick:
            kept.parent.mkdir(parents=True, exist_ok=True)
            kept.write_text(json.dumps(figures))
    print(f"torch {torch.__version__}, {torch.backends.cpu.get_cpu_capability()}, target {name}")
    print(f"share of differing numbers{'':<18}" + "".join(f"{dtype:>12}" for dtype in figures))
    for key in figures["float32"]:
        print(f"{key:<44}" + "".join(f"{row[key]:>12.2g}" for row in figures.values()))
    promised = ["gemm_fixed_width_5", "attention_fixed_width_5", "attention_beside_another_row"]
    promised += ["target_fixed_width_and_slots", "target_fixed_width_and_slots_batch_3"]
    bars = [
        {"name": f"{dtype} {key}", "value": value, "at_most": 0.0, "holds": value == 0.0}
        for dtype in ("bfloat16", "float32")
        for key, value in figures[dtype].items()
        if key in promised
    ]
    print(
        json.dumps({"name": "rows", "figures": {"torch": torch.__version__, "target": name, **figures}, "bars": bars})
    )


if __name__ == "__main__":
    main()
