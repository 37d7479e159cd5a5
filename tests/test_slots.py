"""Slots: the mask rule against masks written out method by method, samplers, inputs, weights, denominators, the loss.

pytest tests/test_slots.py
"""

import dataclasses
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from draftsmith.losses.distill import make_teacher, score_rows
from draftsmith.losses.objective import parse_objective
from draftsmith.models import slots as rules
from draftsmith.models.drafter import Batch, TargetOut, supervised
from draftsmith.models.slots import (
    CUTS,
    DENOMINATORS,
    LEGAL,
    WEIGHTS,
    MaskRule,
    Slots,
    all_shifts,
    anchored,
    append_at_cut,
    attend_slots,
    cod,
    consecutive_anchors,
    denominator,
    dense_mask,
    document_starts,
    dpace,
    fill,
    glance,
    legal_anchors,
    make_mask,
    mask_mod,
    noise_tokens,
    random_anchors,
    real,
    score,
    variable_prefix,
    weigh,
)

Document = tuple[int, int, list[int]]  # sample id, length, supervised positions
SPREAD = [3, 4, 5, 6, 7, 11, 12, 13, 14]
ROWS: dict[str, list[list[Document]]] = {
    "one document": [[(3, 6, list(range(1, 6)))]],
    "packed": [[(3, 7, list(range(2, 7))), (8, 5, [2, 3, 4])], [(4, 12, list(range(5, 12)))]],
    "larger": [
        [(3, 20, list(range(3, 20))), (8, 16, SPREAD), (1, 9, list(range(1, 9)))],
        [(4, 31, list(range(4, 12)) + list(range(18, 31))), (5, 2, [1])],
    ],
}
SIZE = {"one document": 3, "packed": 4, "larger": 8}


def make_batch(rows: list[list[Document]], padding: int = 2, seed: int = 0) -> Batch:
    """Packed rows with `padding` behind the longest; ids are distinct from row to row and place to place."""
    width = max(sum(n for _, n, _ in row) for row in rows) + padding
    shape = len(rows), width
    ids = torch.arange(len(rows) * width).view(shape) * 7 % 251 + 2
    batch = Batch(ids, torch.zeros(shape).bool(), torch.zeros(shape).long(), torch.full(shape, -1), seed=seed)
    for b, row in enumerate(rows):
        at = 0
        for sample, n, supervised_at in row:
            batch.samples_BT[b, at : at + n] = sample
            batch.positions_BT[b, at : at + n] = torch.arange(n)
            batch.supervised_BT[b, [at + i for i in supervised_at]] = True
            at += n
    return batch


def of_row(slots: Slots, b: int) -> list[dict[str, int]]:
    """The slots of one row as records, padding left out."""
    columns = {name.removesuffix("_BQ"): value[b].tolist() for name, value in vars(slots).items()}
    records = [dict(zip(columns, values, strict=True)) for values in zip(*columns.values(), strict=True)]
    return [r for r in records if r["document"] >= 0]


# 1. The mask rule


def assert_mask(
    slots: Slots,
    batch: Batch,
    rule: MaskRule,
    written: Callable[[list[int], list[dict[str, int]]], Tensor],
    context_rows: bool = False,
    prefix: int = 0,
) -> None:
    """`written(documents of the row, its slots)` gives [context + slots, prefix + context + slots]; what is padding
    sees itself alone and is seen by nobody. Compared entry by entry with the dense mask and with `mask_mod`."""
    b, t = batch.ids_BT.shape
    q = slots.anchor_BQ.shape[1]
    got_BQS = dense_mask(slots, batch, rule, context_rows=context_rows, prefix=prefix)
    want_BQS = torch.zeros(b, t + q, prefix + t + q, dtype=torch.bool)
    for row in range(b):
        documents, mine = batch.samples_BT[row].tolist(), of_row(slots, row)
        real_t = sum(d >= 0 for d in documents)
        table = written(documents[:real_t], mine)
        queries = [*range(real_t), *range(t, t + len(mine))]
        keys = [*range(prefix), *(prefix + i for i in queries)]
        for i, query in enumerate(queries):
            want_BQS[row, query, torch.tensor(keys)] = table[i]
        for query in set(range(t + q)) - set(queries):
            want_BQS[row, query, prefix + query] = True
    if not context_rows:
        want_BQS = want_BQS[:, t:]
    assert got_BQS.shape == want_BQS.shape and int((got_BQS != want_BQS).sum()) == 0
    visible = mask_mod(slots, batch, rule, context_rows=context_rows, prefix=prefix)
    index = [torch.arange(n) for n in got_BQS.shape]
    as_flex = visible(index[0][:, None, None], torch.tensor(0), index[1][:, None], index[2])
    assert int((as_flex != want_BQS).sum()) == 0


def causal(documents: list[int]) -> Tensor:
    """[T, T] what ordinary tokens of a packed row see, by counting."""
    return torch.tensor([[d == e and j <= i for j, e in enumerate(documents)] for i, d in enumerate(documents)])


@pytest.mark.parametrize("size", ROWS)
def test_mask_of_pard(size: str) -> None:
    """As its authors lay it out: K copies of the row side by side, copy j at place t has its anchor at t - j and sees
    the tokens of copy 0 up to there, and of copies 1..j the place that has the same anchor."""
    batch, k = make_batch(ROWS[size]), SIZE[size]

    def written(documents: list[int], slots: list[dict[str, int]]) -> Tensor:
        n = len(documents)
        copies = torch.zeros(k * n, k * n, dtype=torch.bool)
        for j in range(k):
            for t in range(j, n):
                if documents[t] != documents[t - j]:
                    continue
                for s in range(t - j + 1):
                    copies[j * n + t, s] = documents[s] == documents[t]
                for i in range(1, j + 1):
                    copies[j * n + t, i * n + t - j + i] = True
        place = [*range(n), *(s["depth"] * n + s["anchor"] + s["depth"] for s in slots)]
        return copies[place][:, place]

    for ratio in (1.0, 0.6):
        slots = cod(batch, k, ratio, 0.3)
        assert_mask(slots, batch, MaskRule("inclusive", "causal"), written, context_rows=True)


@pytest.mark.parametrize("size", ROWS)
@pytest.mark.parametrize("window", [None, 4])
def test_mask_of_p_eagle(size: str, window: int | None) -> None:
    """As a walk: from a slot to the one a depth earlier, from depth 1 to its anchor's row, from row to row to the start
    of the document, `window` steps at most."""
    batch, k = make_batch(ROWS[size]), SIZE[size]

    def written(documents: list[int], slots: list[dict[str, int]]) -> Tensor:
        n = len(documents)
        place = {(s["anchor"], s["depth"]): n + i for i, s in enumerate(slots)} | {(t, 0): t for t in range(n)}
        table = torch.zeros(len(place), len(place), dtype=torch.bool)
        for (anchor, depth), i in place.items():
            a, d, steps = anchor, depth, 0
            while a >= 0 and documents[a] == documents[anchor] and (window is None or steps < window):
                table[i, place[a, d]] = True
                a, d, steps = (a, d - 1, steps + 1) if d else (a - 1, 0, steps + 1)
        return table

    slots = cod(batch, k, 0.7, 0.2, ahead=1)
    assert_mask(slots, batch, MaskRule("inclusive", "causal", window=window), written, context_rows=True)


@pytest.mark.parametrize("size", ROWS)
@pytest.mark.parametrize("method", ["dflash", "jetspec"])
def test_mask_of_dflash_and_jetspec(size: str, method: str) -> None:
    """[context | blocks]: context of the document strictly before the anchor; DFlash blocks see themselves whole,
    JetSpec's up to the slot. All legal anchors, so that blocks overlap."""
    batch, width = make_batch(ROWS[size]), SIZE[size]

    def written(documents: list[int], slots: list[dict[str, int]]) -> Tensor:
        anchors = [s["anchor"] for s in slots][::width]
        block = torch.ones(width, width) if method == "dflash" else torch.ones(width, width).tril()
        own = torch.block_diag(*[block] * len(anchors)).bool() if anchors else torch.zeros(0, 0).bool()
        before = [[t < a and documents[t] == documents[a] for t in range(len(documents))] for a in anchors]
        seen = torch.tensor(before).reshape(len(anchors), len(documents)).repeat_interleave(width, 0)
        rows = torch.cat([causal(documents), torch.zeros(len(documents), len(slots)).bool()], 1)
        return torch.cat([rows, torch.cat([seen, own], 1)])

    slots = anchored(batch, legal_anchors(batch, "pair"), range(width))
    assert slots.anchor_BQ.shape[1] >= 2 * width
    assert_mask(slots, batch, MaskRule("exclusive", "full" if method == "dflash" else "causal"), written)


def test_mask_of_dflash_as_a_table() -> None:
    """12 tokens, blocks of 4, overlapping anchors 3 and 5: written out."""
    batch = make_batch([[(3, 12, list(range(2, 12)))]], padding=0)
    chosen_BT = torch.zeros(1, 12, dtype=torch.bool)
    chosen_BT[0, [3, 5]] = True
    slots = anchored(batch, chosen_BT, range(4))
    table = ["111000000000 11110000"] * 4 + ["111110000000 00001111"] * 4
    causal_table = [
        f"{'1' * a + '0' * (12 - a)} {'0' * (4 * i)}{'1' * (k + 1)}{'0' * (3 - k)}{'0' * (4 - 4 * i)}"
        for i, a in enumerate((3, 5))
        for k in range(4)
    ]
    for intra, lines in (("full", table), ("causal", causal_table)):
        want = torch.tensor([[c == "1" for c in line.replace(" ", "")] for line in lines])
        assert torch.equal(dense_mask(slots, batch, MaskRule("exclusive", intra))[0], want)


@pytest.mark.parametrize("size", ROWS)
def test_mask_of_bita(size: str) -> None:
    """Groups of masks inserted before place s see the tokens before s, their own masks causally, and the prefix, which
    nobody else sees. A mask's position is the number of keys it sees, prefix left out, less one."""
    batch, m, prefix = make_batch(ROWS[size]), SIZE[size], 2
    chosen_BT = consecutive_anchors(batch, legal_anchors(batch, "pair"), 3)
    slots = anchored(batch, chosen_BT, range(1, m + 1), shift=1)

    def written(documents: list[int], slots: list[dict[str, int]]) -> Tensor:
        lines = [[False] * prefix + line + [False] * len(slots) for line in causal(documents).tolist()]
        for i, s in enumerate(slots):
            insertion = s["anchor"] + 1
            tokens = [t < insertion and d == documents[insertion - 1] for t, d in enumerate(documents)]
            masks = [i - i % m <= j <= i for j in range(len(slots))]
            lines.append([True] * prefix + tokens + masks)
            assert s["position"] == sum(tokens) + sum(masks) - 1
        return torch.tensor(lines)

    assert_mask(slots, batch, MaskRule("inclusive", "causal"), written, context_rows=True, prefix=prefix)


@pytest.mark.parametrize("size", ROWS)
def test_mask_of_ppd(size: str) -> None:
    """m special tokens of n virtual ones behind one cut per document: virtual token v of special token i sees the text
    up to the cut and the virtual tokens v of special tokens up to i. The n share a position."""
    batch, m, n = make_batch(ROWS[size]), SIZE[size], 2
    slots = append_at_cut(batch, m, members=n)

    def written(documents: list[int], slots: list[dict[str, int]]) -> Tensor:
        cuts = [s["anchor"] for s in slots][:: m * n]
        assert len({documents[c] for c in cuts}) == len(cuts)
        own = torch.kron(torch.ones(m, m).tril(), torch.eye(n))
        own = torch.block_diag(*[own] * len(cuts)).bool() if cuts else torch.zeros(0, 0).bool()
        text = [[t <= c and documents[t] == documents[c] for t in range(len(documents))] for c in cuts]
        seen = torch.tensor(text).reshape(len(cuts), len(documents)).repeat_interleave(m * n, 0)
        rows = torch.cat([causal(documents), torch.zeros(len(documents), len(slots)).bool()], 1)
        return torch.cat([rows, torch.cat([seen, own], 1)])

    assert_mask(slots, batch, MaskRule("inclusive", "member"), written, context_rows=True)
    for row in range(len(batch.ids_BT)):
        mine = of_row(slots, row)
        assert [s["member"] for s in mine] == [0, 1] * (len(mine) // 2)
        assert all(s["position"] == int(batch.positions_BT[row, s["anchor"]]) + s["depth"] for s in mine)


@pytest.mark.parametrize("size", ROWS)
@pytest.mark.parametrize("shifts", ["all", "one"])
def test_mask_of_falcon(size: str, shifts: Any) -> None:
    """The relaxed causal mask: a triangle of k x k blocks, cut off at the start of the document by the shift."""
    batch, k = make_batch(ROWS[size]), SIZE[size]
    slots = all_shifts(batch, k, shifts)

    def written(documents: list[int], slots: list[dict[str, int]]) -> Tensor:
        blocks: list[Tensor] = []
        at = 0
        while at < len(slots):
            n = documents.count(slots[at]["document"])
            whole = torch.kron(torch.ones(n, n).tril(), torch.ones(k, k)).bool()
            skip = -slots[at]["depth"] % k
            assert skip == -slots[at]["depth"] and [s["position"] for s in slots[at : at + n]] == list(range(n))
            first = (k - skip) % k
            blocks.append(whole[first : first + n, first : first + n])
            at += n
        own = torch.block_diag(*[b.float() for b in blocks]).bool()
        rows = torch.cat([causal(documents), torch.zeros(len(documents), len(slots)).bool()], 1)
        return torch.cat([rows, torch.cat([torch.zeros(len(slots), len(documents)).bool(), own], 1)])

    assert_mask(slots, batch, MaskRule("exclusive", "block", block=k), written)
    sets = {s["group"]: -s["depth"] for b in range(len(batch.ids_BT)) for s in of_row(slots, b) if s["position"] == 0}
    assert (set(sets.values()) == set(range(k))) if shifts == "all" else all(0 <= s < k for s in sets.values())


@pytest.mark.parametrize("context_rows", [False, True])
@pytest.mark.parametrize("layout", ["blocks", "drop-token", "shifts"])
@pytest.mark.filterwarnings("ignore:flex_attention called without")
def test_flex_attention_and_dense_attention_equal_each_query_by_itself(
    layout: str, context_rows: bool, monkeypatch: Any
) -> None:
    """Values of `attend_slots`, with prefix keys and shared heads, by the block mask and by the dense one in parts of
    several sizes, against a loop over queries; gradients of the parts against those of one whole."""
    torch.manual_seed(0)
    batch = make_batch(ROWS["packed"])
    slots, rule = {
        "blocks": (anchored(batch, legal_anchors(batch, "pair"), range(3)), MaskRule("exclusive", "full", window=5)),
        "drop-token": (cod(batch, 4, 0.6), MaskRule("inclusive", "causal")),
        "shifts": (all_shifts(batch, 2), MaskRule("exclusive", "block", block=2)),
    }[layout]
    b, t = batch.ids_BT.shape
    q, heads, kv, d, prefix = slots.anchor_BQ.shape[1], 4, 2, 12, 3
    parts = [(torch.randn(b, kv, n, d), torch.randn(b, kv, n, d)) for n in (prefix, t, q)]
    queries = torch.randn(b, heads, q + t * context_rows, d)
    leaves = [queries, *(x for pair in parts for x in pair)]
    options: dict[str, Any] = {"context_rows": context_rows, "prefix": prefix}
    outs, grads = [], []
    for size in (128, 5, 1):
        monkeypatch.setattr(rules, "PART", size)
        mask = make_mask(slots, batch, rule, **options)
        assert len(mask.parts) == -(-q // size) + (-(-t // size) if context_rows else 0)
        for leaf in leaves:
            leaf.requires_grad_()
        outs.append(attend_slots(queries, parts[1], parts[2], mask, parts[0]))
        grads.append(torch.autograd.grad(outs[-1].square().sum(), leaves))
    for other in grads[1:]:
        torch.testing.assert_close(other, grads[0], atol=1e-4, rtol=1e-4)
    for leaf in leaves:
        leaf.requires_grad_(False)
    outs.append(
        attend_slots(queries, parts[1], parts[2], make_mask(slots, batch, rule, flex=True, **options), parts[0])
    )
    see = dense_mask(slots, batch, rule, **options)
    keys, values = (torch.cat(tensors, 2) for tensors in zip(*parts, strict=True))
    for row in range(b):
        for h in range(heads):
            for i in range(queries.shape[2]):
                seen = see[row, i].nonzero()[:, 0]
                g = h // (heads // kv)
                chance = (keys[row, g, seen] @ queries[row, h, i] / math.sqrt(d)).softmax(0)
                for out in outs:
                    torch.testing.assert_close(out[row, h, i], chance @ values[row, g, seen], atol=1e-5, rtol=1e-5)


def test_mask_rule_refused() -> None:
    for options, words in (
        ({"context": "both"}, "inclusive, exclusive, got 'both'"),
        ({"intra": "tree"}, "causal, full, block, member, got 'tree'"),
        ({"block": 0}, "positive"),
        ({"window": 0}, "positive"),
    ):
        with pytest.raises(ValueError, match=words):
            MaskRule(**options)


# 2. Where trainers differ


def test_three_rules_of_legal_anchors() -> None:
    """A document of 12 tokens, supervised 4, 5, 6 and 9, 10, 11, blocks of 4: each rule has anchors of its own."""
    batch = make_batch([[(3, 12, [4, 5, 6, 9, 10, 11])]], padding=5)
    want = {
        "pair": [4, 5, 9, 10],  # 6 and 11 have no supervised token behind them
        "supervised": [4, 5, 6],  # 9, 10 and 11 are among the last four of twelve, as is 8
        "full_block": [4, 5, 6],
    }
    assert set(want) == set(LEGAL)
    for rule, anchors in want.items():
        assert legal_anchors(batch, rule, width=4)[0].nonzero()[:, 0].tolist() == anchors
    edge = make_batch([[(3, 12, [7, 8, 9])]])
    assert legal_anchors(edge, "supervised", width=4)[0].nonzero()[:, 0].tolist() == [7]
    assert legal_anchors(edge, "full_block", width=4)[0].nonzero()[:, 0].tolist() == [7, 8]  # 8..11 just fits
    assert legal_anchors(edge, "pair", width=4)[0].nonzero()[:, 0].tolist() == [7, 8]
    short = make_batch([[(3, 6, [3, 4, 5])]])  # a short answer: nothing, where a whole block must fit
    assert (
        not legal_anchors(short, "full_block", width=4).any() and not legal_anchors(short, "supervised", width=4).any()
    )
    assert legal_anchors(short, "pair", width=4)[0].nonzero()[:, 0].tolist() == [3, 4]
    with pytest.raises(ValueError, match="pair, supervised, full_block, got 'any'"):
        legal_anchors(batch, "any")  # type: ignore[arg-type]


@pytest.mark.parametrize("size", ROWS)
def test_pairs_are_the_toolkits_own(size: str) -> None:
    """Rule `pair` by states (ahead 1) is `supervised(batch, 1)`, by tokens the same one further on."""
    batch = make_batch(ROWS[size])
    assert torch.equal(legal_anchors(batch, "pair", ahead=1), supervised(batch, 1))
    assert torch.equal(legal_anchors(batch, "pair")[:, 1:], supervised(batch, 1)[:, :-1])
    assert not legal_anchors(batch, "pair")[:, 0].any()


def test_block_cut_and_slot_0() -> None:
    """Supervised 3, 4, 6, 7 of 9; a block of 5 from 3 on. `run` stops at 5, `mask` leaves 5 out; slot 0 predicts 4, or
    stands for the anchor and predicts nothing."""
    batch = make_batch([[(3, 9, [3, 4, 6, 7])]])
    chosen_BT = torch.zeros_like(batch.supervised_BT)
    chosen_BT[0, 3] = True
    want = {
        ("run", 0): [(1, 4, 1)],
        ("mask", 0): [(1, 4, 1), (3, 6, 3), (4, 7, 4)],
        ("run", 1): [(0, 4, 1)],
        ("mask", 1): [(0, 4, 1), (2, 6, 3), (3, 7, 4)],
    }
    for (cut, shift), scored in want.items():
        slots = anchored(batch, chosen_BT, range(5), shift=shift, cut=cut)  # type: ignore[arg-type]
        mine = of_row(slots, 0)
        assert [(s["depth"], s["label"], s["drafted"]) for s in mine if s["weight"]] == scored
        assert [s["position"] for s in mine] == [s["token"] for s in mine] == [3, 4, 5, 6, 7]
        assert slots.label_ids(batch).tolist() == [int(batch.ids_BT[0, label]) for _, label, _ in scored]
    assert {cut for cut, _ in want} == set(CUTS)
    with pytest.raises(ValueError, match="run, mask, got 'stop'"):
        anchored(batch, chosen_BT, range(5), cut="stop")  # type: ignore[arg-type]


def test_denominators_and_what_gamma_does_to_them() -> None:
    """Two full blocks of 4 predictions and one of 2: the sum of weights, 10 slots, 3 groups. A smaller gamma leaves the
    size of the weighted mean alone, and shrinks what is divided by slots or blocks."""
    batch = make_batch([[(3, 12, [3, 4, 5, 6, 7, 8, 9]), (5, 5, [2, 3, 4])]])
    chosen_BT = torch.zeros_like(batch.supervised_BT)
    chosen_BT[0, [3, 5, 14]] = True
    slots = anchored(batch, chosen_BT, range(5))
    assert denominator(slots, "slots") == 10 and denominator(slots, "blocks") == 3
    assert denominator(slots, "weights") == 10
    means: dict[str, list[float]] = {kind: [] for kind in DENOMINATORS}
    for gamma in (7.0, 1.0):
        heavy = weigh(slots, "exp", gamma=gamma)
        series = [math.exp(-k / gamma) for k in range(4)]
        total = 2 * sum(series) + sum(series[:2])
        assert denominator(heavy, "weights") == pytest.approx(total, rel=1e-6)
        for kind, values in means.items():
            values.append(float(heavy.weight_BQ.sum()) / denominator(heavy, kind))  # of a loss of 1 everywhere
    assert means["weights"] == pytest.approx([1.0, 1.0])
    assert means["slots"][1] < 0.7 * means["slots"][0] and means["blocks"][1] < 0.7 * means["blocks"][0]
    with pytest.raises(ValueError, match="weights, slots, blocks, got 'mean'"):
        denominator(slots, "mean")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="set it to slots or blocks"):
        denominator(slots, "weights", "dpace")
    assert denominator(slots, "slots", "dpace") == 10


def test_weights() -> None:
    batch = make_batch([[(3, 9, list(range(3, 9)))]])
    chosen_BT = torch.zeros_like(batch.supervised_BT)
    chosen_BT[0, 4] = True
    slots = anchored(batch, chosen_BT, range(4))
    ones = [0.0, 1.0, 1.0, 1.0]
    want = {
        "uniform": ones,
        "exp": [0.0, *(math.exp(-k / 2) for k in range(3))],
        "geometric": [0.0, 1.0, 0.8, 0.64],
        "dpace": ones,
    }
    assert set(want) == set(WEIGHTS)
    for kind, weights in want.items():
        got = weigh(slots, kind, gamma=2.0, ratio=0.8)  # type: ignore[arg-type]
        assert got.weight_BQ[0, :4].tolist() == pytest.approx(weights)
        assert torch.equal(got.flat_R, slots.flat_R)
    for options, words in (
        ({"weight": "linear"}, "uniform, exp, geometric, dpace, got 'linear'"),
        ({"weight": "exp"}, "gamma must be positive, got None"),
        ({"weight": "geometric", "ratio": 1.5}, "ratio must lie"),
    ):
        with pytest.raises(ValueError, match=words):
            weigh(slots, **options)  # type: ignore[arg-type]


def test_dpace_weights_by_loops_and_without_gradient() -> None:
    batch = make_batch(ROWS["larger"])
    slots = anchored(batch, legal_anchors(batch, "pair"), range(5), cut="mask")
    chance_R = torch.rand(len(slots.flat_R), dtype=torch.float64, requires_grad=True)
    got_R = dpace(chance_R, slots, mix=0.5)
    assert not got_R.requires_grad
    groups: dict[tuple[int, int], dict[int, float]] = {}
    keys = []
    for i, flat in enumerate(slots.flat_R.tolist()):
        b, q = divmod(flat, slots.anchor_BQ.shape[1])
        key, d = (b, int(slots.group_BQ[b, q])), int(slots.drafted_BQ[b, q])
        groups.setdefault(key, {})[d] = 0.5 * float(chance_R[i].detach()) + 0.5
        keys.append((key, d))
    want = []
    for key, k in keys:
        total = 0.0
        for j in groups[key]:
            if j >= k:
                total += math.prod(s for i, s in groups[key].items() if i <= j)
        want.append(total)
    assert got_R.tolist() == pytest.approx(want) and len({key for key, _ in keys}) == denominator(slots, "blocks")


# 3. Samplers


def placed(slots: Slots, batch: Batch) -> dict[int, list[tuple[int, ...]]]:
    """By document: what its slots are, with indices counted from its start."""
    found: dict[int, list[tuple[int, ...]]] = {}
    starts_BT = document_starts(batch)
    for b in range(len(batch.ids_BT)):
        for s in of_row(slots, b):
            start = int(starts_BT[b, s["anchor"]])
            relative = [s["anchor"] - start, s["label"] - start, s["token"] - start]
            found.setdefault(s["document"], []).append(
                (*relative, s["depth"], s["member"], s["position"], s["drafted"], int(s["weight"] > 0))
            )
    return found


SAMPLERS: dict[str, Callable[[Batch], Slots]] = {
    "random": lambda b: anchored(b, random_anchors(b, legal_anchors(b, "pair"), 3), range(4)),
    "random, ahead": lambda b: anchored(
        b, random_anchors(b, legal_anchors(b, "pair", ahead=1), 3), range(4), ahead=1, shift=2
    ),
    "consecutive": lambda b: anchored(b, consecutive_anchors(b, legal_anchors(b), 3), range(1, 4), shift=1),
    "cut": lambda b: append_at_cut(b, 3, members=2),
    "cod": lambda b: cod(b, 5, 0.6, 0.1),
    "cod, ahead": lambda b: cod(b, 5, 0.6, 0.1, ahead=1, max_anchors=6),
    "all shifts": lambda b: all_shifts(b, 3),
    "one shift": lambda b: all_shifts(b, 3, "one"),
}


@pytest.mark.parametrize("name", SAMPLERS)
def test_packing_changes_no_draw_and_epochs_do(name: str) -> None:
    """Documents packed into rows, each in a row of its own (as another number of processes would have them), in another
    order: the same slots. Another epoch or seed: others."""
    sample = SAMPLERS[name]
    documents = [d for row in ROWS["larger"] for d in row] + [(40 + i, 25, list(range(3, 25))) for i in range(3)]
    packed = make_batch([documents[:4], documents[4:]])
    want = placed(sample(packed), packed)
    for rows in ([[d] for d in documents], [documents[::-1]]):
        other = make_batch(rows, padding=5)
        assert placed(sample(other), other) == want
    if name != "all shifts":
        for change in ({"epoch": 1}, {"seed": 1}):
            later = dataclasses.replace(packed, **change)
            assert placed(sample(later), later) != want


def test_random_anchors_are_uniform_and_without_replacement() -> None:
    batch = make_batch([[(3, 12, list(range(2, 12)))]])
    legal_BT = legal_anchors(batch, "pair")
    counts = torch.zeros(batch.ids_BT.shape[1])
    for epoch in range(300):
        chosen_BT = random_anchors(dataclasses.replace(batch, epoch=epoch), legal_BT, 3)
        assert int(chosen_BT.sum()) == 3 and not (chosen_BT & ~legal_BT).any()
        counts += chosen_BT[0]
    assert int(legal_BT.sum()) == 9 and bool(
        ((counts[legal_BT[0]] - 100).abs() < 40).all()
    )  # 5 sigma of binomial(300, 1/3)
    assert torch.equal(random_anchors(batch, legal_BT, None), legal_BT)
    assert torch.equal(random_anchors(batch, legal_BT, 50), legal_BT)
    with pytest.raises(ValueError, match="at least one per document, got 0"):
        random_anchors(batch, legal_BT, 0)
    with pytest.raises(ValueError, match="at least one per document, got 0"):
        consecutive_anchors(batch, legal_BT, 0)


def test_consecutive_anchors_lie_side_by_side() -> None:
    batch = make_batch([[(3, 30, list(range(4, 30))), (5, 5, [3, 4])]])
    starts = set()
    for epoch in range(40):
        chosen = consecutive_anchors(dataclasses.replace(batch, epoch=epoch), legal_anchors(batch), 6)[0].nonzero()[
            :, 0
        ]
        assert chosen[:-1].tolist() == list(range(int(chosen[0]), int(chosen[0]) + 6)) and chosen[-1] == 33
        starts.add(int(chosen[0]))
    assert min(starts) >= 4 and max(starts) <= 23 and len(starts) > 10


@pytest.mark.parametrize("ahead", [0, 1])
def test_drop_token_keeps_whole_chains_of_supervised_seeds(ahead: int) -> None:
    """Depth j keeps floor(L * max(r ** j, least)) of the L supervised seeds, or as many as still have a label; a kept
    slot's whole chain is kept; every kept slot has a loss."""
    batch = make_batch(ROWS["larger"] + [[(9, 60, list(range(10, 60)))]])
    depths, ratio, least = 8, 0.7, 0.2
    seeds_BT = legal_anchors(batch, "pair", ahead=ahead)
    slots = cod(batch, depths, ratio, least, ahead=ahead)
    for b in range(len(batch.ids_BT)):
        mine = of_row(slots, b)
        kept = {(s["anchor"], s["depth"]) for s in mine}
        assert len(kept) == len(mine) and all(s["weight"] == 1 for s in mine)
        assert [(s["anchor"], s["depth"]) for s in mine] == sorted(kept)
        for anchor, depth in kept:
            assert bool(seeds_BT[b, anchor]) and (depth == 1 or (anchor, depth - 1) in kept)
        for document in {s["document"] for s in mine}:
            seeds = int((seeds_BT[b] & (batch.samples_BT[b] == document)).sum())
            rows = [a for a in range(batch.ids_BT.shape[1]) if batch.samples_BT[b, a] == document and seeds_BT[b, a]]
            for j in range(1, depths):
                count = sum(s["document"] == document and s["depth"] == j for s in mine)
                before = [a for a in rows if j == 1 or (a, j - 1) in kept]
                able = sum(a - 1 + ahead >= 0 and bool(supervised(batch, j + 1)[b, a - 1 + ahead]) for a in before)
                assert count == min(math.floor(seeds * max(ratio**j, least) + 1e-9), able)
    full = cod(batch, depths, 1.0, ahead=ahead)
    for j in range(1, depths):
        at_BT = torch.zeros_like(batch.supervised_BT)
        for b in range(len(batch.ids_BT)):
            at_BT[b, [s["anchor"] for s in of_row(full, b) if s["depth"] == j]] = True
        want_BT = supervised(batch, j + 1)
        assert torch.equal(at_BT[:, 1:], want_BT[:, :-1]) if ahead == 0 else torch.equal(at_BT, want_BT)
    few = cod(batch, depths, 1.0, ahead=ahead, max_anchors=2)
    assert {len({s["anchor"] for s in of_row(few, b) if s["document"] == 9}) for b in (2,)} == {2}
    for options in ((0, 0.7, 0.2, None), (3, 0.0, 0.2, None), (3, 0.7, 1.5, None), (3, 0.7, 0.2, 0)):
        with pytest.raises(ValueError, match="drop-token"):
            cod(batch, *options[:3], max_anchors=options[3])


def test_drop_token_sizes() -> None:
    """The totals of r = 0.7, r_min = 0.2: 2.53 L, 3.37 L and 4.17 L slots for 4, 8 and 12 depths, depth 0 counted."""
    n = 2000
    batch = make_batch([[(3, n + 2, list(range(1, n + 2)))]])
    for depths, total in ((4, 2.53), (8, 3.37), (12, 4.17)):
        slots = cod(batch, depths, 0.7, 0.2)
        assert len(slots.flat_R) / n + 1 == pytest.approx(total, abs=0.01)


def test_the_contexts_own_predictions_join_the_slots() -> None:
    """`with_context`: depth 0 at every supervised pair, group = entry, so that chains run through both."""
    for ahead, shift in ((0, 1), (1, 2)):
        batch = make_batch(ROWS["larger"])
        joined = cod(batch, 5, ahead=ahead).with_context(batch, ahead=ahead, shift=shift)
        t = batch.ids_BT.shape[1]
        assert joined.anchor_BQ.shape[1] > t
        assert torch.equal(joined.weight_BQ[:, :t] > 0, legal_anchors(batch, "pair", ahead=ahead))
        assert torch.equal(joined.position_BQ[:, :t], batch.positions_BT)
        for b in range(len(batch.ids_BT)):
            for s in (s for s in of_row(joined, b) if s["weight"]):
                assert s["label"] == s["anchor"] + ahead + s["drafted"] and s["drafted"] == s["depth"] + 1
                assert s["token"] == s["label"] - 1 and s["group"] == s["anchor"]


def test_falcons_labels_lie_k_further_on() -> None:
    """k = 3, ahead 1, shift 2: row i predicts token i + 4; in its block the drafted are 1, 2, 3 after the newest token
    that the block's last row holds."""
    batch = make_batch([[(3, 14, list(range(14)))]])
    for s in of_row(all_shifts(batch, 3), 0):
        i, shift = s["position"], s["position"] - s["depth"]
        last = i + (2 - (i - shift) % 3)
        assert s["label"] == i + 4 and s["label"] - s["drafted"] == last + 1 and 1 <= s["drafted"] <= 3
        assert (s["weight"] > 0) == (s["label"] <= 13)
    with pytest.raises(ValueError, match="k >= 1"):
        all_shifts(batch, 0)


def test_batches_without_supervision_have_no_slots_but_shapes() -> None:
    batch = make_batch([[(3, 9, [])], [(4, 5, [])]])
    for name, sample in SAMPLERS.items():
        slots = sample(batch)
        assert not len(slots.flat_R) and denominator(slots, "blocks") == denominator(slots, "slots") == 0, name
        assert name.endswith(("shifts", "shift")) or slots.anchor_BQ.shape == (2, 0)
        assert dense_mask(slots, batch, MaskRule()).shape == (
            2,
            slots.anchor_BQ.shape[1],
            11 + slots.anchor_BQ.shape[1],
        )
        assert fill(slots, batch, real(slots), 0).shape == noise_tokens(slots, batch).shape == slots.anchor_BQ.shape
        assert dpace(torch.zeros(0), slots).shape == (0,)


@pytest.mark.parametrize("flex", [False, True])
def test_attention_of_no_slot_has_a_gradient_of_zero(flex: bool) -> None:
    """A batch row without a place to draft from, on CUDA as on CPUs: every input takes part, as the other processes need."""
    batch = make_batch([[(3, 9, [])]])
    slots = anchored(batch, legal_anchors(batch), range(4))
    t = batch.ids_BT.shape[1]
    query, *rest = (torch.randn(1, 2, n, 12, requires_grad=True) for n in (0, t, t, 0, 0))
    out = attend_slots(query, (rest[0], rest[1]), (rest[2], rest[3]), make_mask(slots, batch, MaskRule(), flex=flex))
    assert out.shape == (1, 2, 0, 12)
    for grad in torch.autograd.grad(out.sum(), [query, *rest]):
        assert not bool(grad.any())


# 4. Inputs


def test_mask_inputs_show_the_anchor_and_nothing_else() -> None:
    batch = make_batch(ROWS["packed"])
    slots = anchored(batch, legal_anchors(batch), range(4))
    ids_BQ = fill(slots, batch, real(slots), 999)
    for b in range(2):
        mine = of_row(slots, b)
        want = [int(batch.ids_BT[b, s["anchor"]]) if s["depth"] == 0 else 999 for s in mine]
        assert ids_BQ[b, : len(mine)].tolist() == want and bool((ids_BQ[b, len(mine) :] == 999).all())
    assert not real(cod(batch, 4)).any()


def test_variable_prefix_shows_tokens_and_restarts_the_decay() -> None:
    """Block of 6: l of 2..5 tokens shown, drawn with 0.9 ** l; slots from l on have the loss, the first of them weight 1."""
    documents = [(i, 40, list(range(2, 40))) for i in range(30)]
    batch = make_batch([documents[:15], documents[15:]], padding=8)
    plain = anchored(batch, legal_anchors(batch), range(6))
    slots, real_BQ = variable_prefix(plain, batch, 6)
    slots = weigh(slots, "exp", gamma=4.0)
    ids_BQ = fill(slots, batch, real_BQ, 999)
    seen = []
    for b in range(2):
        for at in range(0, plain.anchor_BQ.shape[1], 6):
            if plain.document_BQ[b, at] < 0:
                continue
            shown = int(real_BQ[b, at : at + 6].sum())
            seen.append(shown)
            assert real_BQ[b, at : at + 6].tolist() == [k < shown for k in range(6)]
            anchor = int(plain.anchor_BQ[b, at])
            for k in range(6):
                inside = k < shown and batch.samples_BT[b, anchor + k] == plain.document_BQ[b, at]
                assert int(ids_BQ[b, at + k]) == (int(batch.ids_BT[b, anchor + k]) if inside else 999)
                weight = math.exp(-(k - shown) / 4) if k >= shown and plain.weight_BQ[b, at + k] else 0.0
                assert float(slots.weight_BQ[b, at + k]) == pytest.approx(weight)
    chance = torch.tensor([0.9**n for n in range(2, 6)])
    share = torch.tensor([seen.count(n) / len(seen) for n in range(2, 6)])
    assert sorted(set(seen)) == [2, 3, 4, 5] and bool(((share - chance / chance.sum()).abs() < 0.05).all())
    later, _ = variable_prefix(plain, dataclasses.replace(batch, epoch=1), 6)
    assert not torch.equal(later.weight_BQ > 0, slots.weight_BQ > 0)
    with pytest.raises(ValueError, match="least < width"):
        variable_prefix(plain, batch, 2)


def test_noise_is_drawn_from_the_text_before() -> None:
    batch = make_batch(ROWS["larger"])
    slots = cod(batch, 6, 1.0)
    noise_BQ = noise_tokens(slots, batch)
    starts_BT = document_starts(batch)
    several = set()
    for b in range(len(batch.ids_BT)):
        for i, s in enumerate(of_row(slots, b)):
            text = batch.ids_BT[b, int(starts_BT[b, s["anchor"]]) : s["anchor"] + 1].tolist()
            assert int(noise_BQ[b, i]) in text
            several.add(text.index(int(noise_BQ[b, i])) / len(text) > 0.5)
    assert several == {True, False}
    assert torch.equal(fill(slots, batch, real(slots), noise_BQ)[0, :9], noise_BQ[0, :9])
    assert not torch.equal(noise_tokens(slots, dataclasses.replace(batch, epoch=1)), noise_BQ)


def test_glancing_shows_a_run_as_long_as_the_share_of_misses() -> None:
    torch.manual_seed(0)
    batch = make_batch(ROWS["larger"])
    for slots in (anchored(batch, legal_anchors(batch), range(6)), all_shifts(batch, 2)):
        truth_BQ = rules.at(batch.ids_BT, slots.label_BQ)
        guess_BQ = torch.where(torch.rand(truth_BQ.shape) < 0.5, truth_BQ, 0)
        hidden_BQ = (slots.depth_BQ > 0) & (slots.document_BQ >= 0)
        shown_BQ = glance(slots, batch, guess_BQ, 0.6, hidden_BQ)
        assert not (shown_BQ & ~hidden_BQ).any()
        lengths = set()
        for b in range(len(batch.ids_BT)):
            for group in set(slots.group_BQ[b, hidden_BQ[b]].tolist()):
                mine_Q = slots.group_BQ[b] == group
                wrong = int(((guess_BQ != truth_BQ) & (slots.weight_BQ > 0))[b, mine_Q].sum())
                shown = shown_BQ[b, mine_Q & hidden_BQ[b]].tolist()
                lengths.add(sum(shown))
                fewest = math.floor(0.6 * wrong + 1e-9)
                assert min(fewest, len(shown)) <= sum(shown) <= min(fewest + (wrong > 0), len(shown))
                assert "".join("01"[x] for x in shown).strip("0") == "1" * sum(shown)  # one run
        assert len(lengths) > 2 and not glance(slots, batch, truth_BQ, 1.0, hidden_BQ).any()
        assert not glance(slots, batch, guess_BQ, 0.0, hidden_BQ).any()
    with pytest.raises(ValueError, match=r"0\.\.1, got 2"):
        glance(slots, batch, guess_BQ, 2.0)
    blocks = anchored(batch, legal_anchors(batch), range(6))
    assert not (glance(blocks, batch, torch.zeros_like(blocks.group_BQ), 1.0) & real(blocks)).any()


# 5. The loss


def scored(
    batch: Batch, slots: Slots, objective: str, weight: Any = "uniform", reduced: bool = True, **options: Any
) -> tuple[Any, Tensor, TargetOut, Tensor | None]:
    torch.manual_seed(1)
    table_VD = torch.randn(256, 24)
    draft_ids = torch.arange(0, 256, 2) if reduced else None
    t2d_V = None
    if draft_ids is not None:
        t2d_V = torch.full((256,), -1)
        t2d_V[draft_ids] = torch.arange(len(draft_ids))
    hidden_BTD = torch.randn(*batch.ids_BT.shape, 24)

    def head(hidden: Tensor, ids: Tensor | None) -> Tensor:
        return hidden @ (table_VD if ids is None else table_VD[ids]).T

    out = TargetOut(last_hidden_BTD=hidden_BTD, head=head)
    logits_RW = torch.randn(len(slots.flat_R), 256 if draft_ids is None else len(draft_ids)).requires_grad_()
    terms = score(
        logits_RW, slots, batch, out, draft_ids, t2d_V, parse_objective(objective), "renormalise", weight, **options
    )
    return terms, logits_RW, out, t2d_V


@pytest.mark.parametrize("objective", ["ce", "kl", "0.1*ce + 0.9*l1"])
@pytest.mark.parametrize("weight", ["uniform", "exp", "dpace"])
def test_score_is_the_weighted_sum_against_the_state_before_each_label(objective: str, weight: Any) -> None:
    """Value and gradient against `score_rows` slot by slot; teacher = the target's state one token before the label."""
    batch = make_batch(ROWS["packed"])
    batch.ids_BT = batch.ids_BT // 2 * 2  # all inside the draft vocabulary
    slots = weigh(anchored(batch, legal_anchors(batch), range(4)), weight, gamma=2.0)
    terms, logits_RW, out, t2d_V = scored(batch, slots, objective, weight)
    assert t2d_V is not None
    pieces, chances, weights = [], [], []
    for i, flat in enumerate(slots.flat_R.tolist()):
        b, q = divmod(flat, slots.anchor_BQ.shape[1])
        label = int(slots.label_BQ[b, q])
        bank = make_teacher(
            out.head, out.last_hidden_BTD[b, label - 1][None], None, None, torch.arange(0, 256, 2), t2d_V
        )
        token_1 = t2d_V[batch.ids_BT[b, label]][None]
        row = score_rows(
            logits_RW[i : i + 1], bank.rows(torch.zeros(1).long(), token_1), parse_objective(objective), "renormalise"
        )
        pieces.append(row.value_R)
        chances.append(logits_RW[i].softmax(-1)[token_1[0]])
        weights.append(float(slots.weight_BQ[b, q]))
    weight_R = torch.tensor(weights)
    if weight == "dpace":
        weight_R = dpace(torch.stack(chances), slots)
    want = (torch.cat(pieces) * weight_R).sum()
    torch.testing.assert_close(terms.losses["slots"], want, rtol=1e-5, atol=1e-5)
    got, right = (
        torch.autograd.grad(value, logits_RW, retain_graph=True)[0] for value in (terms.losses["slots"], want)
    )
    torch.testing.assert_close(got, right, rtol=1e-5, atol=1e-5)


def test_l1_is_twice_tv() -> None:
    """So that 0.9 * l1 is DeepSpec's and 0.9 * tv half of it."""
    batch = make_batch(ROWS["packed"])
    slots = anchored(batch, legal_anchors(batch), range(4))
    one, two = (scored(batch, slots, name)[0].losses["slots"].detach() for name in ("tv", "l1"))
    torch.testing.assert_close(two, 2 * one)


def test_scores_without_a_target_are_cross_entropy_with_the_data() -> None:
    batch = make_batch(ROWS["packed"])
    slots = weigh(cod(batch, 4, 1.0).with_context(batch), "geometric", ratio=0.5)
    logits_RW = torch.randn(len(slots.flat_R), 256, requires_grad=True)
    terms = score(logits_RW, slots, batch, TargetOut(), None, None, ((2.0, "ce"),), "renormalise")
    each_R = torch.nn.functional.cross_entropy(logits_RW, slots.label_ids(batch), reduction="none")
    weight_R = slots.weight_BQ.flatten()[slots.flat_R]
    torch.testing.assert_close(terms.losses["slots"], 2 * (each_R * weight_R).sum())
    first_R = weight_R == 1
    torch.testing.assert_close(terms.metrics["accept_1"][0], (-each_R[first_R]).exp().sum().detach())
    assert float(terms.metrics["accuracy_1"][1]) == int(first_R.sum()) and "lost_mass" not in terms.metrics
    with pytest.raises(ValueError, match="only ce"):
        score(logits_RW, slots, batch, TargetOut(), None, None, ((1.0, "kl"),), "renormalise")


def test_run_length_counts_leading_hits_of_complete_groups() -> None:
    """Groups by plan: right for 3, 2, 1 (a later hit does not count) and 0 leading slots; a group cut short counts not."""
    batch = make_batch([[(3, 12, list(range(1, 12)))]])
    chosen_BT = torch.zeros_like(batch.supervised_BT)
    chosen_BT[0, [1, 3, 5, 7, 9]] = True  # the last has two labels left
    slots = anchored(batch, chosen_BT, range(4))
    hits = [1, 1, 1, 1, 1, 0, 1, 0, 1, 0, 1, 1, 1, 1]
    assert len(slots.flat_R) == len(hits)
    labels_R = slots.label_ids(batch)
    logits_RW = 5.0 * torch.nn.functional.one_hot(torch.where(torch.tensor(hits) > 0, labels_R, labels_R - 1), 256)
    terms = score(logits_RW, slots, batch, TargetOut(), None, None, ((1.0, "ce"),), "renormalise", depths=3)
    assert [float(x) for x in terms.metrics["run_length"]] == [6, 4]
    assert [float(x) for x in terms.metrics["run_length_sq"]] == [14, 4]
    assert [float(x) for x in terms.metrics["accuracy_2"]] == [4, 5]
    assert [float(x) for x in terms.metrics["accuracy_3"]] == [3, 4]
    more = score(logits_RW, slots, batch, TargetOut(), None, None, ((1.0, "ce"),), "renormalise", depths=4)
    assert [float(x) for x in more.metrics["run_length"]] == [0, 0] and [
        float(x) for x in more.metrics["accuracy_4"]
    ] == [0, 0]


def test_members_merge_for_scoring() -> None:
    """PPD: the logits of a special token's virtual tokens are averaged, and scored once."""
    batch = make_batch(ROWS["packed"])
    slots = append_at_cut(batch, 3, members=2)
    merged = weigh(slots.merge_members(), "geometric", ratio=0.8)
    assert merged.anchor_BQ.shape[1] * 2 == slots.anchor_BQ.shape[1]
    assert 2 * len(merged.flat_R) == len(slots.flat_R) and denominator(merged, "blocks") == denominator(slots, "blocks")
    for b in range(2):
        assert [(s["anchor"], s["depth"]) for s in of_row(merged, b)] == [
            (s["anchor"], s["depth"]) for s in of_row(slots, b) if s["member"] == 0
        ]


def test_a_batch_without_slots_scores_zero_with_a_gradient() -> None:
    batch = make_batch([[(3, 9, [])]])
    slots = anchored(batch, legal_anchors(batch), range(4))
    terms, logits_RW, _, _ = scored(batch, slots, "kl")
    terms.losses["slots"].backward()
    assert float(terms.losses["slots"].detach()) == 0 and logits_RW.grad is not None
    assert all(float(total) == 0 and float(count) == 0 for total, count in terms.metrics.values())
