"""Jacobi states of known answers, all blocks at once, against one block at a time without a cache.

Run: pytest tests/test_trajectories.py
"""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from draftsmith.data.encode import Sample
from draftsmith.data.packing import make_batch
from draftsmith.inference.speculate import generate
from draftsmith.losses.probs import SamplingParams
from draftsmith.models.adapters import AdapterConfig, Adapters
from draftsmith.models.pretrained import tiny_target
from draftsmith.models.target import Target
from draftsmith.models.trajectories import Walk, answer_blocks, first_states

PROMPTS = ([5, 9, 2, 11, 40, 7], [17, 3, 8], [201, 44, 90, 12, 6, 31, 8, 9])


@pytest.fixture(scope="module")
def model() -> Target:
    return tiny_target(width=32, layers=2, heads=2, kv_heads=2, vocab=300, tokens=280, dtype=torch.float64)


def answered(model: Target, lengths: tuple[int, ...] = (21, 13, 30)) -> list[Sample]:
    samples = []
    for i, (prompt, length) in enumerate(zip(PROMPTS, lengths, strict=True)):
        (result,) = generate(model, [prompt], SamplingParams(max_new_tokens=length, ignore_eos=True))
        ids = torch.tensor([*prompt, *result.ids])
        samples.append(Sample(i, ids, torch.arange(len(ids)) >= len(prompt)))
    return samples


def naive(model: Target, before: Tensor, guesses: Tensor) -> list[Tensor]:
    """States of one block until nothing changes, each from a pass over everything."""
    states = [guesses]
    while True:
        ids = torch.cat([before, states[-1]])[None]
        hidden = model.forward(ids, torch.arange(ids.shape[1])[None]).last_hidden_BTD[0]
        said = model.head(hidden)[:, : model.facts.tokens].argmax(-1)
        states.append(said[len(before) - 1 : -1])
        if torch.equal(states[-1], states[-2]):
            return states[:-1]


@pytest.mark.parametrize("block", [1, 4, 8, 64])
@pytest.mark.parametrize("start", ["prompt", "text", "last", "random"])
def test_states_are_those_of_decoding(model: Target, block: int, start: str) -> None:
    samples = answered(model)
    batch = make_batch([samples[:2], samples[2:]], None, 7, 1)
    blocks = answer_blocks(batch, block)
    first_BT = first_states(blocks, start, tokens=model.facts.tokens)  # type: ignore[arg-type]
    walk = Walk(model, blocks)
    states_BIT, passes_BT = walk.to_the_end(first_BT)
    assert torch.equal(walk.same_BT, batch.supervised_BT) and torch.equal(states_BIT[:, -1], batch.ids_BT)
    checked, changed = 0, 0
    for b, row in enumerate((samples[:2], samples[2:])):
        at = 0
        for sample in row:
            prompt = int((~sample.supervised).sum())
            for lo in range(prompt, len(sample), block):
                span = slice(at + lo, at + min(lo + block, len(sample)))
                wanted = naive(model, sample.ids[:lo], first_BT[b, span])
                for i in range(len(states_BIT[b])):
                    assert torch.equal(states_BIT[b, i, span], wanted[min(i, len(wanted) - 1)])
                assert int(passes_BT[b, span.start]) == len(wanted) - 1
                checked += 1
                changed += len(wanted) > 2
            at += len(sample)
    assert checked >= 3 and (changed or block == 1)


def test_an_answer_that_is_not_greedy_stays_out(model: Target) -> None:
    samples = answered(model)
    ids = samples[0].ids.clone()
    ids[6 + 9] = (ids[6 + 9] + 1) % 280  # in the second of its blocks
    batch = make_batch([[Sample(0, ids, samples[0].supervised)]], None, 0, 0)
    blocks = answer_blocks(batch, 8)
    walk = Walk(model, blocks)
    assert walk.same_BT[0, 6:14].all() and not walk.same_BT[0, 14:22].any()
    states_BIT, passes_BT = walk.to_the_end(first_states(blocks, "random", tokens=280))
    assert (
        torch.equal(states_BIT[0, :, 14:22], ids[14:22].expand(states_BIT.shape[1], -1)) and not passes_BT[0, 14].any()
    )


def test_near_ties_are_the_texts() -> None:
    """Two ids with the same row of the output head: whichever of them an answer has, its block is walked; states end in
    it, and the model's own choice stands in the states before where nothing is settled yet."""
    model = tiny_target(width=32, layers=2, heads=2, kv_heads=2, vocab=300, tokens=280, dtype=torch.float64)
    with torch.no_grad():
        model.head_weight[150:280] = model.head_weight[20:150]
    sample = answered(model)[0]
    assert bool((sample.ids[6:] < 150).all())  # the lower one of two is said
    ids = sample.ids.clone()
    at = 6 + int((sample.ids[6:] >= 20).nonzero()[-1])  # the last that has a twin
    ids[at:] = torch.tensor([int(i) + 130 if p == at else int(i) for p, i in enumerate(sample.ids)][at:])
    cut = replace(sample, ids=ids[: at + 1], supervised=sample.supervised[: at + 1])
    blocks = answer_blocks(make_batch([[cut]], None, 7, 1), 8)
    walk = Walk(model, blocks)
    assert walk.same_BT[0, 6:].all() and walk.said_BT[0, at] == ids[at]
    states_BIT, _ = walk.to_the_end(first_states(blocks, "prompt"))
    assert torch.equal(states_BIT[0, -1], cut.ids) and states_BIT.shape[1] > 2


def test_a_view_is_what_walks() -> None:
    """Adapters on: the states are those of decoding with them on; switched off again behind each pass."""
    model = tiny_target(width=32, layers=2, heads=2, kv_heads=2, vocab=300, tokens=280, dtype=torch.float64)
    adapters = Adapters(AdapterConfig(rank=2, mask="reserved", mask_id=299), model)
    dice = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for p in adapters.trained.parameters():
            p.add_(0.3 * torch.randn(p.shape, generator=dice))
    plain = answered(model)[0]
    with adapters.view("noisy"):
        sample = answered(model)[0]
    assert not torch.equal(plain.ids, sample.ids)
    blocks = answer_blocks(make_batch([[sample]], None, 7, 1), 8)
    first_BT = first_states(blocks, "prompt")
    walk = Walk(model, blocks, lambda: adapters.view("noisy"))
    states_BIT, _ = walk.to_the_end(first_BT)
    assert walk.same_BT[0, 6:].all() and not adapters.on
    assert not Walk(model, blocks).same_BT[0, 6:].all()
    with adapters.view("noisy"):
        for lo in range(6, len(sample), 8):
            wanted = naive(model, sample.ids[:lo], first_BT[0, lo : lo + 8])
            for i in range(states_BIT.shape[1]):
                assert torch.equal(states_BIT[0, i, lo : lo + 8], wanted[min(i, len(wanted) - 1)])


def test_blocks_begin_with_answers() -> None:
    """Two answers in a document, a document that begins with an answer, padding."""
    sup = torch.tensor([False, False, True, True, True, True, True, False, False, True, True, True])
    one = Sample(0, torch.arange(12), sup)
    two = Sample(1, torch.arange(4), torch.ones(4, dtype=torch.bool))
    batch = make_batch([[one, two]], 18, 0, 0)
    blocks = answer_blocks(batch, 2, 2)
    none = -1
    assert blocks.place_BT[0].tolist() == [none, none, 0, 1, 0, 1, 0, none, none, 0, 1, 0, none, 0, 1, 0, none, none]
    assert blocks.unit_BT[0].tolist() == [0, 0, 2, 2, 4, 4, 6, 7, 7, 9, 9, 11, 12, 13, 13, 15, 16, 16]
    assert blocks.text.block_BT[0].tolist() == [0, 0, 2, 2, 2, 2, 6, 7, 7, 9, 9, 9, 12, 13, 13, 13, 16, 16]


@pytest.mark.parametrize("start", ["prompt", "text"])
def test_first_guesses_come_from_before_and_do_not_depend_on_the_batch(start: str) -> None:
    gen = torch.Generator().manual_seed(0)
    samples = []
    for i in range(6):
        ids = torch.randint(1000 * i, 1000 * i + 900, (40,), generator=gen)
        samples.append(Sample(i, ids, torch.arange(40) >= 10))
    batch = make_batch([samples[:3], samples[3:]], 130, 3, 2)
    blocks = answer_blocks(batch, 8)
    first_BT = first_states(blocks, start)  # type: ignore[arg-type]
    alone = make_batch([[samples[4]]], None, 3, 2)
    assert torch.equal(first_states(answer_blocks(alone, 8), start)[0], first_BT[1, 40:80])  # type: ignore[arg-type]
    for place in range(10, 40):
        reach = 10 if start == "prompt" else 10 + (place - 10) // 8 * 8
        assert int(first_BT[1, 40 + place]) in samples[4].ids[:reach].tolist()
    other = first_states(answer_blocks(make_batch([[samples[4]]], None, 3, 3), 8), start)  # type: ignore[arg-type]
    assert not torch.equal(other[0], first_BT[1, 40:80])
