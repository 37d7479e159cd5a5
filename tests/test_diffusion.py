"""Objectives of masked diffusion: masks against loops over the rule's words, noise by its keys, leaks.

Run: pytest tests/test_diffusion.py
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from functools import cache
from typing import Any, NamedTuple

import pytest
import torch
from batches import one_row, packed_row
from torch import Tensor

from draftsmith.data.batch import Batch
from draftsmith.data.encode import Sample
from draftsmith.data.packing import make_batch
from draftsmith.kernels.rng import NOISE, fold, uniform
from draftsmith.models.diffusion import (
    PRESETS,
    ObjectiveConfig,
    Rows,
    clean_entries,
    denominator,
    dense_mask,
    hidden_states,
    joined,
    make_rows,
    noisy_entries,
)
from draftsmith.models.noise import OFFSET, Text, corrupt, cut
from draftsmith.models.target import Target

MASK, FILL, ENDS = 255, 2, (2,)
# (sample id, length, first supervised token) of each document, and the size of blocks
SIZES = {
    2: [(4, 5, 2), (9, 6, 0)],
    3: [(1, 9, 4), (6, 2, 1), (3, 7, 3)],
    4: [(8, 13, 5), (2, 4, 1), (5, 11, 7), (7, 3, 3)],
}


@pytest.fixture(scope="module")
def target(tiny: Callable[..., Target]) -> Target:
    return tiny(width=32, layers=2, heads=2, kv_heads=2)


def batch_of(block: int, epoch: int = 3) -> Batch:
    return packed_row(SIZES[block], epoch=epoch, seed=11)


def built(config: ObjectiveConfig, batch: Batch) -> tuple[Text, Rows]:
    text = cut(batch, config, FILL, ENDS)
    return text, make_rows(text, corrupt(text, config), config, MASK)


def preset(name: str, block: int) -> ObjectiveConfig:
    return replace(PRESETS[name], block=block)


# Masks


class Place(NamedTuple):
    """One token in one copy (0 = clean, 1.. = noisy), as a person would note it down."""

    document: int
    copy: int
    position: int
    hidden: bool


def block_number(config: ObjectiveConfig, batch: Batch, document: int, position: int) -> int:
    """Which block of its document a position is in, counted by hand."""
    if config.origin == "document":
        return position // config.block
    if config.origin == "answer":
        first = next(n for _, n in [(0, f) for s, _, f in SIZES[config.block] if s == document])
        return 0 if position < first else 1 + (position - first) // config.block
    return (position + offset(config, batch, document)) // config.block


def offset(config: ObjectiveConfig, batch: Batch, document: int) -> int:
    """How far into a block a document begins, where that is drawn."""
    return int(place_of(batch.seed, batch.epoch, document) * config.block)


@cache
def place_of(seed: int, epoch: int, document: int) -> float:
    return float(uniform(fold(seed, epoch + 1), NOISE, torch.tensor(0), round=document, node=OFFSET << 16))


def seen_by_words(config: ObjectiveConfig, batch: Batch, q: Place, k: Place) -> bool:
    """The rule of each layout, said in words."""
    if q.document != k.document:
        return False
    block_q, block_k = (block_number(config, batch, x.document, x.position) for x in (q, k))
    if config.layout == "whole":  # every token of the copy
        return q.copy == k.copy
    if config.layout == "single":  # the copy up to the end of the own block
        return q.copy == k.copy and block_k <= block_q
    if q.copy == 0:  # clean: never a noisy row; its block and those before it, or the tokens up to itself
        if k.copy != 0:
            return False
        return block_k <= block_q if config.clean == "block" else k.position <= q.position
    if k.copy == 0:  # noisy -> clean: finished blocks; dual: with the own block's first token, the anchor
        if config.dual and block_k == block_q:
            earlier = [p for p in range(k.position) if block_number(config, batch, k.document, p) == block_k]
            return not earlier
        return block_k < block_q
    if q.copy != k.copy or block_q != block_k:  # noisy -> noisy: the own block of the own copy
        return False
    if config.inside == "causal":
        return k.position <= q.position
    if config.inside == "observed_first":
        shown = (k.hidden, k.position)
        return shown <= (q.hidden, q.position)
    return True


def places(text: Text, rows: Rows, with_clean: bool) -> list[Place | None]:
    """None = padding."""
    out: list[Place | None] = []
    if with_clean:
        for document, position in zip(text.samples_BT[0].tolist(), text.positions_BT[0].tolist(), strict=True):
            out.append(Place(document, 0, position, False) if document >= 0 else None)
    fields = (rows.document_BQ, rows.copy_BQ, rows.position_BQ, rows.hidden_BQ)
    for document, copy, position, hidden in zip(*(f[0].tolist() for f in fields), strict=True):
        out.append(Place(document, copy + 1, position, hidden) if document >= 0 else None)
    return out


@pytest.mark.parametrize("block", SIZES)
@pytest.mark.parametrize("name", [*PRESETS, "whole"])
def test_masks_equal_loops_over_the_words(name: str, block: int) -> None:
    config = preset("fast_dllm_v2" if name == "whole" else name, block)
    if name == "whole":
        config = replace(config, layout="whole")
    batch = batch_of(block)
    text, rows = built(config, batch)
    noisy = noisy_entries(rows, config, text.ids_BT.shape[1] if config.layout == "pair" else 0)
    everything = joined(clean_entries(text), noisy) if config.layout == "pair" else noisy
    mask_SS = dense_mask(config, everything, everything)[0]
    noted = places(text, rows, config.layout == "pair")
    assert len(noted) == len(mask_SS) and len(rows.flat_R) > 0
    for i, q in enumerate(noted):
        for j, k in enumerate(noted):
            wanted = i == j or (q is not None and k is not None and seen_by_words(config, batch, q, k))
            assert bool(mask_SS[i, j]) == wanted, f"{name}, block {block}: {q} -> {k}"


@pytest.mark.parametrize("name", PRESETS)
def test_a_written_out_table(name: str) -> None:
    """Length 6, block 2, all hidden: what the last row of the middle block (position 3) sees, by hand."""
    config = replace(
        preset(name, 2), origin="document", schedule="uniform", levels=(1.0, 1.0), complementary=False, padding="none"
    )
    text, rows = built(config, one_row([5, 6, 7, 8, 9, 10], [0, 1, 2, 3, 4, 5]))
    after = 6 if config.layout == "pair" else 0
    noisy = noisy_entries(rows, config, after)
    keys = joined(clean_entries(text), noisy) if after else noisy
    seen = dense_mask(config, noisy, keys)[0]
    at = rows.position_BQ[0].tolist()
    row = seen[at.index(3)]
    clean = {"dual": [1, 1, 1, 0, 0, 0]}.get(name, [1, 1, 0, 0, 0, 0]) if after else []
    own = {p: p in (2, 3) if after else p < 4 for p in at}  # all are hidden, so that every `inside` sees both
    assert row.long().tolist() == clean + [int(own[p]) for p in at]
    if name == "idlm":
        assert not seen[at.index(2), 6 + at.index(3)]  # causal inside
    if name == "dual":
        assert at == [1, 3]  # anchors are clean rows, and the last block has nothing left to predict


# Noise and labels


def noted_rows(rows: Rows, b: int, document: int) -> set[tuple[Any, ...]]:
    fields = (
        rows.document_BQ, rows.copy_BQ, rows.position_BQ, rows.ids_BQ, rows.hidden_BQ, rows.label_BQ, rows.weight_BQ
    )  # fmt: skip
    return {x for x in zip(*(f[b].tolist() for f in fields), strict=True) if x[0] == document}


def samples() -> list[Sample]:
    dice = torch.Generator().manual_seed(2)
    return [
        Sample(i, torch.randint(3, 250, (n,), generator=dice), torch.arange(n) >= first)
        for i, n, first in ((3, 12, 4), (8, 9, 1), (20, 14, 6), (21, 5, 2))
    ]


@pytest.mark.parametrize("name", PRESETS)
@pytest.mark.parametrize("change", [{}, {"schedule": "semi_ar"}, {"draw": "exact"}, {"scope": "token"}])
def test_noise_depends_on_nothing_but_its_keys(name: str, change: dict[str, str]) -> None:
    """A document has the same rows alone, packed in any order, padded or beside others; another epoch, other ones."""
    try:
        config = replace(preset(name, 4), **change)  # type: ignore[arg-type]
    except ValueError as refusal:
        assert change and next(iter(change)) in str(refusal)  # the two do not go together, and it says so
        return
    a, b, c, d = samples()
    alone = {s.sample_id: make_batch([[s]], None, 7, 2) for s in (a, b, c, d)}
    packings = [[[a, b, c, d]], [[d, c], [b, a]], [[b], [c, a, d]], [[a], [b], [c], [d]]]
    if config.scope == "sequence":  # a packed row shares its level: rows are what packing makes of (seed, epoch)
        one = built(config, make_batch([[a, b], [c, d]], 40, 7, 2))[1]
        for row, (x, y) in enumerate(((a, b), (c, d))):
            other = built(config, make_batch([[x, y]], None, 7, 2))[1]
            for s in (x, y):
                assert noted_rows(one, row, s.sample_id) == noted_rows(other, 0, s.sample_id)
        return
    found: set[tuple[Any, ...]] = set()
    for packing in packings:
        _, rows = built(config, make_batch(packing, 50, 7, 2))
        for row, members in enumerate(packing):
            for s in members:
                wanted = noted_rows(built(config, alone[s.sample_id])[1], 0, s.sample_id)
                assert noted_rows(rows, row, s.sample_id) == wanted
                found |= wanted
    assert found
    if config.levels[0] < 1:
        other = noted_rows(built(config, make_batch([[c]], None, 7, 3))[1], 0, 20)
        assert other != noted_rows(built(config, alone[20])[1], 0, 20)


@pytest.mark.parametrize("block", SIZES)
@pytest.mark.parametrize("name", PRESETS)
def test_labels_are_the_hidden_tokens(name: str, block: int) -> None:
    """Every row with a loss predicts the token that it stands for (shift: the next), which is hidden in its copy or out
    of its sight; in two complementary copies every supervised token counts once."""
    config, batch = preset(name, block), batch_of(block)
    _, rows = built(config, batch)
    token = {
        (s, p): (i, bool(f))
        for s, p, i, f in zip(
            *(x[0].tolist() for x in (batch.samples_BT, batch.positions_BT, batch.ids_BT, batch.supervised_BT)),
            strict=True,
        )
        if s >= 0
    }
    hidden = {
        (d, c, p): h
        for d, c, p, h in zip(
            *(x[0].tolist() for x in (rows.document_BQ, rows.copy_BQ, rows.position_BQ, rows.hidden_BQ)), strict=True
        )
        if d >= 0
    }
    counted: list[tuple[int, int]] = []
    flat = rows.flat_R.tolist()
    for at in flat:
        d, c, p = (int(x[0, at]) for x in (rows.document_BQ, rows.copy_BQ, rows.position_BQ))
        label_at = p + config.shift
        if (d, label_at) in token:
            assert token[d, label_at] == (int(rows.label_BQ[0, at]), True)
            counted.append((d, label_at))
        else:
            assert config.padding == "train" and int(rows.label_BQ[0, at]) == FILL
        other_block = block_number(config, batch, d, label_at) != block_number(config, batch, d, p)
        assert hidden.get((d, c, label_at), other_block)  # the next block's rows may not be run at all
    least = 1 if config.shift else 0
    supervised = {key for key, (_, on) in token.items() if on and key[1] >= least}
    assert set(counted) <= supervised
    if config.complementary and not config.dual:
        assert sorted(counted) == sorted(supervised)
    if config.dual:
        # A block's first token, the anchor, says the next one without adapters: no loss. It is itself predicted from the
        # block before, which never sees it: in both copies. What precedes the first anchor has no block to be in.
        wanted = []
        for d, p in supervised:
            start = (p - 1 + offset(config, batch, d)) // block * block - offset(config, batch, d)
            if start >= 0 and start != p - 1:
                wanted += [(d, p)] * (2 if p == start + block else 1)
        assert sorted(counted) == sorted(wanted)
    assert denominator(rows, replace(config, normalise="hidden")) == len(flat)
    assert bool((rows.weight_BQ.flatten()[rows.flat_R] >= 0.999).all())


def test_levels_are_what_their_names_say() -> None:
    """Shares over many documents and epochs: the mean level, exact counts, rising levels, one block."""
    n, config = 64, ObjectiveConfig(block=8, complementary=False, shift=False, padding="none")
    batch = one_row([5] * n, list(range(n)), sample=3)

    def copy_of(epoch: int, **changes: Any) -> tuple[Text, Any]:
        own = replace(config, **changes)
        text = cut(replace_epoch(batch, epoch), own, FILL, ENDS)
        return text, corrupt(text, own)[0]

    def replace_epoch(batch: Batch, epoch: int) -> Batch:
        return Batch(batch.ids_BT, batch.supervised_BT, batch.positions_BT, batch.samples_BT, epoch, 1)

    share = torch.stack([copy_of(e)[1].hidden_BT.double().mean() for e in range(30)]).mean()
    assert abs(float(share) - 0.5) < 0.07
    picked = set()
    for epoch in range(8):
        _, exact = copy_of(epoch, draw="exact")
        per_block = exact.hidden_BT.view(8, 8).sum(1)
        assert torch.equal(per_block, (exact.level_BT.view(8, 8)[:, 0] * 8).ceil().long())
        _, rising = copy_of(epoch, schedule="monotone", levels=(0.2, 0.7))
        level_T = rising.level_BT[0]
        assert bool((level_T[1:] >= level_T[:-1]).all()) and 0.2 <= float(level_T.min()) <= float(level_T.max()) <= 0.7
        _, even = copy_of(epoch, schedule="even", levels=(0.0, 1.0))
        gaps = even.level_BT.view(8, 8)[:, 0].sort().values
        assert (
            float((gaps[1:] - gaps[:-1]).max()) < 0.3
        )  # eight independent draws leave larger holes more often than not
        text, one = copy_of(epoch, schedule="semi_ar", levels=(0.5, 0.5), layout="single")
        (chosen,) = text.block_BT[one.counted_BT].unique().tolist()
        picked.add(chosen)
        assert bool(one.hidden_BT[text.block_BT > chosen].all())
        assert not bool(one.hidden_BT[text.block_BT < chosen].any())
    assert len(picked) > 3


def test_padding_policies() -> None:
    """A document of 5 in blocks of 4 gets three fillers: masks without a loss, or trained ends if it ends with one."""
    base = ObjectiveConfig(block=4, shift=False, levels=(1.0, 1.0), complementary=False, clean="token", ar_weight=1.0)
    for last, trained in ((FILL, True), (77, False)):
        batch = one_row([5, 6, 7, 8, last], [3, 4])
        for padding, extra in (("none", 0), ("mask", 3), ("train", 3)):
            text, rows = built(replace(base, padding=padding), batch)
            assert text.ids_BT.shape[1] == 5 + extra
            labels = rows.label_BQ[0].tolist()
            wanted = [-1, -1, -1, 8, last] + ([FILL] * 3 if padding == "train" and trained else [-1] * extra)
            assert labels == wanted
            assert rows.ids_BQ[0].tolist() == [5, 6, 7] + [MASK] * (2 + extra)


def test_nothing_supervised_and_nothing_at_all() -> None:
    for name in PRESETS:
        config = preset(name, 3)
        text, rows = built(config, one_row([5, 6, 7, 8], []))
        assert len(rows.flat_R) == 0 and denominator(rows, config) == 0
        padding = Batch(*(torch.zeros(1, 4, dtype=k) for k in (torch.int64, torch.bool, torch.int64)), torch.full((1, 4), -1))  # fmt: skip
        text, rows = built(config, padding)
        assert len(rows.flat_R) == 0 and text.ids_BT.shape == (1, 1)
        text, rows = built(replace(config, shift=True), one_row([5], [0]))
        assert len(rows.flat_R) == 0  # nothing stands before the first token


# The passes


def states(target: Target, text: Text, rows: Rows, config: ObjectiveConfig) -> tuple[Tensor | None, Tensor]:
    with torch.no_grad():
        return hidden_states(target.forward, lambda _: nullcontext(), text, rows, config)


@pytest.mark.parametrize("name", [n for n, c in PRESETS.items() if c.layout == "pair"])
def test_two_passes_equal_one_over_both_halves(name: str, tiny: Callable[..., Target]) -> None:
    """[clean | noisy] in one pass under the whole mask, float64, windows included. (Gradients: test_block_diffusion.py)"""
    target = tiny(width=32, layers=2, heads=2, kv_heads=1, dtype=torch.float64, window=6, family="qwen3")
    config, batch = preset(name, 4), batch_of(4)
    text, rows = built(config, batch)
    everything = joined(clean_entries(text), noisy_entries(rows, config, text.ids_BT.shape[1]))
    clean_BTD, noisy_BQD = states(target, text, rows, config)
    with torch.no_grad():
        out = target.forward(
            torch.cat([text.ids_BT, rows.ids_BQ], 1),
            torch.cat([text.positions_BT, rows.position_BQ], 1),
            see_BTA=dense_mask(config, everything, everything),
        )
    assert clean_BTD is not None
    torch.testing.assert_close(torch.cat([clean_BTD, noisy_BQD], 1), out.last_hidden_BTD, rtol=0, atol=1e-12)


@pytest.mark.parametrize("name", [*PRESETS, "whole"])
def test_no_leak(name: str, target: Target) -> None:
    """Each noisy block reads nothing but itself and finished text: all else is replaced, and its states do not move."""
    config = preset("fast_dllm_v2" if name == "whole" else name, 4)
    if name == "whole":
        config = replace(config, layout="whole")
    text, rows = built(config, batch_of(4))
    before = states(target, text, rows, config)[1]
    dice = torch.Generator().manual_seed(9)

    def noise(ids: Tensor) -> Tensor:
        return torch.randint(3, 250, ids.shape, generator=dice)

    keys = {(d, c, k) for d, c, k in zip(*(x[0].tolist() for x in (rows.document_BQ, rows.copy_BQ, rows.block_BQ)), strict=True) if d >= 0}  # fmt: skip
    for document, copy, block in sorted(keys):
        own_BQ = (rows.document_BQ == document) & (rows.copy_BQ == copy) & (rows.block_BQ == block)
        finished_BT = (text.samples_BT == document) & (text.block_BT < block)
        if config.dual:
            finished_BT = finished_BT | (text.samples_BT == document) & (text.block_BT == block) & text.first_BT
        shown_BQ = own_BQ
        if config.layout == "single":
            shown_BQ = (rows.document_BQ == document) & (rows.copy_BQ == copy) & (rows.block_BQ <= block)
        elif config.layout == "whole":
            shown_BQ = (rows.document_BQ == document) & (rows.copy_BQ == copy)
        other_text = replace(text, ids_BT=torch.where(finished_BT, text.ids_BT, noise(text.ids_BT)))
        other_rows = replace(rows, ids_BQ=torch.where(shown_BQ, rows.ids_BQ, noise(rows.ids_BQ)))
        after = states(target, other_text, other_rows, config)[1]
        assert torch.equal(before[own_BQ], after[own_BQ])
        # No row with a loss reads its own label: it shows the mask there, or the label lies in the block behind.
        for at in (own_BQ[0] & (rows.label_BQ[0] >= 0)).nonzero()[:, 0].tolist():
            label_at = int(rows.position_BQ[0, at]) + config.shift
            there = shown_BQ[0] & (rows.position_BQ[0] == label_at)
            assert bool(rows.hidden_BQ[0][there].all())
            assert not bool((finished_BT & (text.positions_BT == label_at)).any())


def test_a_causal_clean_copy_does_not_see_ahead(target: Target) -> None:
    """What the autoregressive loss reads; and the block-causal copy would leak, which is why it is refused."""
    moved = {}
    for clean in ("token", "block"):
        config = replace(PRESETS["fast_dllm_v2"], block=4, clean=clean)
        text, rows = built(config, one_row([5, 6, 7, 8, 9, 10], [2, 3, 4, 5]))
        other = replace(text, ids_BT=text.ids_BT.clone())
        other.ids_BT[0, 2] = 99
        a, b = (states(target, t, rows, config)[0] for t in (text, other))
        assert a is not None and b is not None
        moved[clean] = not torch.equal(a[0, 1], b[0, 1])
    assert moved == {"token": False, "block": True}
    with pytest.raises(ValueError, match="the answer leaks"):
        replace(PRESETS["fast_dllm_v2"], ar_weight=0.5)


def test_what_cannot_be_meant_is_refused() -> None:
    for changes, words in (
        ({"block": 0}, "at least 1"),
        ({"layout": "pairs"}, "must be one of pair, single, whole, got 'pairs'"),
        ({"levels": (0.5, 0.2)}, "range within"),
        ({"levels": (0.0, 1.0), "weight": "inverse"}, "divides by the level"),
        ({"layout": "single", "ar_weight": 1.0}, "leaks"),
        ({"dual": True}, "needs layout=pair, clean=token"),
        ({"dual": True, "clean": "token", "ar_weight": 1.0}, "train nothing"),
        ({"dual": True, "clean": "token", "schedule": "semi_ar"}, "use uniform"),
        ({"layout": "single", "inside": "causal"}, "need layout=pair"),
        ({"layout": "single", "clean": "token"}, "need layout=pair"),
        ({"schedule": "even", "scope": "token"}, "set scope=block"),
        ({"draw": "exact", "scope": "token"}, "takes a share of a block"),
        ({"weight_clip": 0.5}, "weight_clip"),
        ({"ar_weight": -1.0}, "negative"),
    ):
        with pytest.raises(ValueError, match=words):
            ObjectiveConfig(**changes)  # type: ignore[arg-type]
