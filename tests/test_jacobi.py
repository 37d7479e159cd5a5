"""Jacobi decoding: answers equal to plain decoding, states equal to a loop without a cache, branches, convergence maps.
CASES B26 (a), B41. Sampling: tests/test_jacobi_sampling.py."""

import math
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from draftsmith.inference.speculate import DecodeConfig, Result, chain_width, generate
from draftsmith.losses.probs import SamplingParams
from draftsmith.models.convergence import ABSENT, Trace, block_states
from draftsmith.models.jacobi import Jacobi, JacobiConfig, Row, prompt_seed, start_uniforms
from draftsmith.models.pretrained import tiny_target

CHAIN, TREE = DecodeConfig(), DecodeConfig(tree="static", nodes=10, width=3)
SHAPES = {"chain": CHAIN, "pools": TREE}
SETTINGS = {
    "two blocks": {"block": 4, "blocks": 2, "spawn": 0.5},
    "three blocks": {"block": 3, "blocks": 3, "spawn": 0.0},
    "slide": {"block": 6, "window": "slide"},
    "quadratic": {"block": 3, "window": "quadratic"},
    "quadratic mask": {"block": 4, "window": "quadratic", "start": "mask", "mask_id": 3},
    "quadratic last": {"block": 3, "window": "quadratic", "start": "last", "retrieve": True, "ngram": 3},
    "last": {"block": 6, "start": "last"},
    "random": {"block": 6, "start": "random"},
    "mask": {"block": 6, "start": "mask", "mask_id": 3},
    "retrieve": {"block": 6, "recycle": 0, "pool": 0, "retrieve": True},
    "all branches": {"block": 6, "blocks": 2, "retrieve": True, "ngram": 3},
}


def make(target: Any, **settings: Any) -> Jacobi:
    drafter = Jacobi(JacobiConfig(**settings), target.facts)
    drafter.bind(target)
    return drafter


def ids_of(results: list[Result]) -> list[list[int]]:
    return [r.ids for r in results]


def prompts_of(n: int, tokens: int) -> list[list[int]]:
    dice = torch.Generator().manual_seed(3)
    lengths = torch.randint(1, 12, (n,), generator=dice).tolist()
    return [torch.randint(tokens, (length,), generator=dice).tolist() for length in lengths]


@pytest.fixture(scope="module")
def plain40() -> tuple[Any, list[list[int]], list[list[int]]]:
    """A float64 target whose text hangs on the last token above all, 40 prompts, and its own 32 tokens for each."""
    real = tiny_target(dtype=torch.float64, width=32, layers=1)
    embed, head = real.model.get_input_embeddings().weight, real.model.get_output_embeddings().weight
    with torch.no_grad():
        for weight in real.model.parameters():
            if weight is not embed and weight is not head and weight.dim() == 2:
                weight.mul_(0.3)
        head += 0.2 * embed * head.std() / embed.std()
    prompts = prompts_of(40, real.facts.tokens)
    params = SamplingParams(max_new_tokens=32, ignore_eos=True)
    return real, prompts, ids_of(generate(real, prompts, params, None, DecodeConfig(max_rows=40)))


# Greedy


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("rows", [1, 4])
@pytest.mark.parametrize("block", [4, 8, 16, 32])
def test_greedy_identity_40_prompts(plain40: Any, block: int, rows: int, shape: str) -> None:
    real, prompts, answers = plain40
    decode = replace(SHAPES[shape], max_rows=rows)
    params = SamplingParams(max_new_tokens=32, ignore_eos=True)
    results = generate(real, prompts, params, make(real, block=block), decode)
    assert ids_of(results) == answers
    total = sum((r.stats for r in results[1:]), results[0].stats)
    assert total.from_draft > (2 if shape == "chain" else 60) and total.drafted > total.from_draft, total


@pytest.mark.parametrize("start", ["prompt", "last", "mask"])
def test_quadratic_guesses_are_said_behind_right_tokens_alone(plain40: Any, start: Any) -> None:
    """Against whole texts without a cache: [prompt, answer, first guesses], whatever was guessed wrong before."""
    real, prompts, answers = plain40
    drafter = make(real, block=3, window="quadratic", start=start, mask_id=5 if start == "mask" else None)
    drafter.record = True
    params = SamplingParams(max_new_tokens=32, ignore_eos=True)
    results = generate(real, prompts[:6], params, drafter, DecodeConfig(max_rows=4))
    assert ids_of(results) == answers[:6]
    kept = 0
    for prompt, answer, result, trace in zip(prompts, answers, results, drafter.traces, strict=False):
        assert trace.passes[0] == (0, []) and result.stats.verifies == len(trace.passes)
        for anchor, guesses in trace.passes[1:]:
            first = [math.floor(u * len(prompt)) for u in start_uniforms(prompt_seed(prompt), anchor, 3)]
            rode = {"prompt": [prompt[i] for i in first], "last": [answer[anchor - 1]] * 3, "mask": [5] * 3}[start]
            line = torch.tensor([[*prompt, *answer[:anchor], *rode]])
            states = real.forward(line, torch.arange(line.shape[1])[None])
            said = real.head(states.last_hidden_BTD)[0, -3:, : real.facts.tokens].argmax(-1).tolist()
            assert guesses == said
            kept += said[0] == answer[anchor + 1] if anchor < 31 else 0
    assert kept > 3 or start == "mask"  # which nobody taught it


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("setting", SETTINGS)
def test_greedy_identity_of_every_setting(plain40: Any, setting: str, shape: str) -> None:
    """Answers of different lengths, so that rows end at different times."""
    real, prompts, answers = plain40
    each = [SamplingParams(max_new_tokens=8 + 3 * i, ignore_eos=True) for i in range(8)]
    results = generate(real, prompts[:8], each, make(real, **SETTINGS[setting]), replace(SHAPES[shape], max_rows=4))
    assert ids_of(results) == [a[: p.max_new_tokens] for a, p in zip(answers, each, strict=False)]


def naive(
    real: Any, prompt: list[int], length: int, config: JacobiConfig
) -> tuple[list[int], list[tuple[int, list[int]]]]:
    """Jacobi decoding of one prompt without a cache: the answer, and per pass the anchor's place and the guesses."""

    def said(ids: list[int]) -> list[int]:
        line = torch.tensor([ids])
        states = real.forward(line, torch.arange(len(ids))[None])
        return real.head(states.last_hidden_BTD)[0, :, : real.facts.tokens].argmax(-1).tolist()

    answer, passes = [said(prompt)[-1]], []
    guess: dict[int, int] = {}  # by place, where it is in flight
    n = config.block
    while len(answer) < length:
        block, known = divmod(len(answer), n)
        end = (block + (config.blocks if known / n >= config.spawn else 1)) * n
        for place in range(len(answer), end):
            (u,) = start_uniforms(prompt_seed(prompt), place, 1)
            guess.setdefault(place, prompt[math.floor(u * len(prompt))])
        places = [place for place in sorted(guess) if place >= len(answer)]
        chain = [guess[place] for place in places]
        passes.append((len(answer) - 1, chain))
        words = said([*prompt, *answer, *chain])[len(prompt) + len(answer) - 1 :]
        right = next((i for i, (a, b) in enumerate(zip(chain, words, strict=False)) if a != b), len(chain))
        answer += words[: right + 1]
        guess |= dict(zip(places, words, strict=False))
    return answer[:length], passes


@pytest.mark.parametrize("settings", [{"block": 4}, {"block": 16}, {"block": 4, "blocks": 2, "spawn": 0.5}], ids=str)
def test_b26_states_are_those_of_a_loop_without_a_cache(plain40: Any, settings: dict[str, Any]) -> None:
    real, prompts, answers = plain40
    drafter = make(real, **settings)
    drafter.record = True
    params = SamplingParams(max_new_tokens=32, ignore_eos=True)
    results = generate(real, prompts[:4], params, drafter, DecodeConfig(max_rows=3))
    for prompt, answer, result, trace in zip(prompts, answers, results, drafter.traces, strict=False):
        want, passes = naive(real, prompt, 32, drafter.config)
        assert want == answer == result.ids
        assert trace.passes == passes and result.stats.verifies == len(passes)


def test_b41_exact_ties_and_drafts_that_are_all_right_or_all_wrong(scripted: Any) -> None:
    def ties(before: Tensor, last: Tensor, at: Tensor) -> Tensor:
        logits = torch.zeros(*last.shape, 6)
        logits[..., [2, 4]] = 1.0
        logits[..., 5] = 2.0 * (at % 3 == 0)
        return logits

    params = SamplingParams(max_new_tokens=30)
    for shape in SHAPES.values():
        real = scripted.Target(ties, 6)
        got = generate(real, [[1, 2]], params, make(real, block=5), shape)[0]
        assert got.ids == generate(real, [[1, 2]], params)[0].ids and {2, 5} == set(got.ids)

        same = scripted.Target(lambda before, last, at: torch.nn.functional.one_hot(last, 6).double(), 6)
        right = generate(same, [[3]], replace(params, max_new_tokens=33), make(same, block=8, start="last"), shape)[0]
        # The first token is the prefill's; the first block has 7 places left, and one token follows each pass.
        assert right.ids == [3] * 33 and right.stats.verifies == 4 and right.stats.from_draft == 28

    count = scripted.Target(lambda before, last, at: torch.nn.functional.one_hot((last + 1) % 64, 64).double(), 64)
    wrong = generate(count, [[0]], params, make(count, block=8, start="last"))[0]
    assert wrong.ids == list(range(1, 31)) and wrong.stats.from_draft == 0 and wrong.stats.verifies == 29


def test_stops_budgets_and_penalties(plain40: Any) -> None:
    """An end inside a block and inside an accepted run; the seen tokens that penalties count."""
    real, prompts, answers = plain40
    for params in (
        SamplingParams(max_new_tokens=30, ignore_eos=True, stop_ids=(answers[0][13], answers[1][6], answers[2][21])),
        SamplingParams(max_new_tokens=30, min_new_tokens=20, stop_ids=(answers[0][5],)),
        SamplingParams(max_new_tokens=30, repetition_penalty=1.3, frequency_penalty=0.2, ignore_eos=True),
        SamplingParams(max_new_tokens=1),
    ):
        want = generate(real, prompts[:4], params)
        for shape in SHAPES.values():
            got = generate(real, prompts[:4], params, make(real, block=8), shape)
            assert ids_of(got) == ids_of(want) and [r.stop_reason for r in got] == [r.stop_reason for r in want]


@pytest.mark.parametrize(
    ("settings", "rows"),
    [({"block": 6, "blocks": 2, "spawn": 0.8}, 1 + 7), ({"block": 3, "window": "quadratic"}, 4 + 12)],
)
def test_fixed_width_gives_the_bits_of_plain_decoding(settings: dict[str, Any], rows: int) -> None:
    real = tiny_target(width=32, layers=2)
    drafter = make(real, **settings)
    width = chain_width(drafter, CHAIN)
    assert width == rows
    decode = DecodeConfig(fixed_width=width, keep_logits=True)
    prompts, params = prompts_of(3, real.facts.tokens), SamplingParams(max_new_tokens=20, ignore_eos=True)
    plain, got = (generate(real, prompts, params, some, decode) for some in (None, drafter))
    assert ids_of(got) == ids_of(plain)
    assert all(torch.equal(a.logits, b.logits) for a, b in zip(got, plain, strict=True))  # type: ignore[arg-type]


def test_blocks_are_counted_in_the_answer(scripted: Any) -> None:
    """How far the chain reaches; and a mask that no tokenizer has is read, never committed."""
    count = scripted.Target(
        lambda before, last, at: torch.nn.functional.one_hot((last + 1) % 9, 12).double(), 12, tokens=9
    )
    params = SamplingParams(max_new_tokens=12)
    for settings, ends in (
        ({"block": 4}, [4, 4, 4, 8, 8, 8, 8, 12, 12, 12, 12]),
        ({"block": 4, "blocks": 2, "spawn": 0.5}, [4, 8, 8, 8, 8, 12, 12, 12, 12, 16, 16]),
        ({"block": 2, "blocks": 3, "spawn": 0.0}, [6, 8, 8, 10, 10, 12, 12, 14, 14, 16, 16]),
        ({"block": 4, "window": "slide"}, list(range(5, 16))),
        ({"block": 1}, list(range(2, 13))),
    ):
        drafter = make(count, start="mask", mask_id=10, **settings)
        drafter.record = True
        result = generate(count, [[0]], params, drafter)[0]
        assert result.ids == [(1 + i) % 9 for i in range(12)]
        assert [1 + anchor + len(guesses) for anchor, guesses in drafter.traces[0].passes] == ends, settings
        assert all(len(guesses) <= drafter.own_depth for _, guesses in drafter.traces[0].passes)


# Branches


def test_branches_hold_what_was_rejected_said_and_read(scripted: Any) -> None:
    """Pools by hand: places of a row's states, rejected runs, the prompt; a branch is accepted where the chain is wrong."""
    row = Row(past=[(3, [1, 2, 3]), (4, [5, 6, 7]), (6, [8, 9])])
    assert row.across(3) == [(2, 6, 8), (3, 7, 9)]
    row.past[1] = (4, [5, 6])
    assert row.across(3) == [(2, 6, 8)] and row.across(4) == []
    real = scripted.Target(lambda before, last, at: torch.nn.functional.one_hot((last + 1) % 9, 12).double(), 12)
    drafter = make(real, block=6, ngram=4, recycle=2, pool=2)
    row = Row(made=5, guesses=[3, 4, 7, 8, 1], end=12)
    rejected = drafter.move(row, [3, 4, 5], [9, 2, 6])
    assert rejected == [7, 8, 1] and row.guesses[:2] == [9, 2] and row.made == 8
    drafter.learn(row, [3, 4, 5], rejected, 2)
    assert row.recycled == {7: [(8, 1)], 8: [(1,)]} and row.past == [(7, [5, 9, 2])]
    long = SamplingParams(max_new_tokens=60)
    for settings, most in (
        ({"recycle": 0, "pool": 0}, 59), ({"recycle": 0}, 35), ({"pool": 0}, 59), ({"retrieve": True, "pool": 0}, 35)
    ):  # fmt: skip
        result = generate(real, [[0, 1, 2]], long, make(real, block=6, start="last", **settings), TREE)[0]
        assert result.ids == [(3 + i) % 9 for i in range(60)] and result.stats.verifies <= most, settings
        chain = generate(real, [[0, 1, 2]], long, make(real, block=6, start="last", **settings))[0]
        assert chain.ids == result.ids and chain.stats.verifies == 59  # a chain has no branches


# The convergence map


def test_convergence_maps_by_hand() -> None:
    trace = Trace([(0, [5, 6, 9]), (1, [5, 3]), (2, [3])])
    #  pass 0: 1 [5 6 9]; pass 1: 1 2 [5 3]; pass 2: 1 2 4 [3]; then 1 2 4 3, and 8 behind it
    first = [[1, 5, 6, 9], [1, 2, 5, 3], [1, 2, 4, 3], [1, 2, 4, 3]]
    assert block_states(trace, [1, 2, 4, 3, 8], 4) == [first, [[8]]]
    again = Trace([(0, [7, 7, 7, 7, 7]), (2, [7, 4, 7])])  # place 4 is right, then wrong, and right at last
    first, second = block_states(again, [1, 7, 5, 7, 7, 9], 3)
    assert first == [[1, 7, 7], [1, 7, 5]] and second == [[7, 7, 7], [7, 4, 7], [7, 7, 9]]
    slide = block_states(Trace([(0, [4]), (1, [5])]), [1, 2, 3], 3)
    assert slide == [[[1, 4, ABSENT], [1, 2, 5], [1, 2, 3]]]
    assert block_states(Trace(), [4], 4) == [[[4]]]


def test_a_target_that_looks_at_places_alone_converges_in_one_pass(scripted: Any) -> None:
    real = scripted.Target(lambda before, last, at: torch.nn.functional.one_hot(at % 7, 9).double(), 9)
    drafter = make(real, block=8, start="mask", mask_id=8)
    drafter.record = True
    params = [SamplingParams(max_new_tokens=n) for n in (32, 11)]
    results = generate(real, [[1], [2, 3]], params, drafter, replace(CHAIN, max_rows=1))
    for trace, result in zip(drafter.traces, results, strict=True):
        blocks = block_states(trace, result.ids, 8)
        assert [len(states[-1]) for states in blocks[:-1]] == [8] * ((len(result.ids) - 1) // 8)
        assert [x for states in blocks for x in states[-1]] == result.ids
        assert all(state == states[-1] for states in blocks for state in states[1:]) and len(blocks[0]) == 3
        assert result.stats.verifies == len(trace.passes)


# Settings


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"block": 0}, "block=0"),
        ({"blocks": 0}, "blocks=0"),
        ({"spawn": 1.5}, "spawn=1.5"),
        ({"window": "wide"}, "window='wide'"),
        ({"window": "slide", "blocks": 2}, "window=slide has no blocks"),
        ({"window": "quadratic", "blocks": 2}, "window=quadratic has no blocks"),
        ({"start": "zeros"}, "start='zeros'"),
        ({"start": "mask"}, "mask_id belongs to"),
        ({"mask_id": 3}, "mask_id belongs to"),
        ({"start": "mask", "mask_id": 9}, "0..5"),
        ({"ngram": 1}, "ngram=1"),
        ({"recycle": -1}, "recycle=-1"),
        ({"block": 10**9}, "must fit into the target's 99 positions"),
        ({"block": 10, "blocks": 10}, "block=10, blocks=10: together"),
    ],
)
def test_settings_that_cannot_be_meant_are_refused(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Jacobi(JacobiConfig(**settings), SimpleNamespace(vocab=6, tokens=6, max_positions=99))  # type: ignore[arg-type]


def test_drafts_are_as_deep_as_any_place_of_a_block_needs() -> None:
    facts: Any = SimpleNamespace(vocab=6, tokens=6, max_positions=99)
    for block in range(1, 8):
        for blocks, spawn, window in (
            (1, 0.85, "block"),
            (1, 0.85, "slide"),
            (1, 0.85, "quadratic"),
            *((3, x / 7, "block") for x in range(8)),
        ):
            config = JacobiConfig(block=block, blocks=blocks, spawn=spawn, window=window)  # type: ignore[arg-type]
            assert Jacobi(config, facts).own_depth == max(map(config.rest, range(block)))


def test_a_depth_beside_the_block_is_refused(scripted: Any) -> None:
    real = scripted.Target(lambda before, last, at: torch.nn.functional.one_hot(last, 6).double(), 6)
    params = SamplingParams(max_new_tokens=4)
    for k in (4, 6):  # the default, and what the block says
        generate(real, [[1]], params, make(real, block=6), DecodeConfig(k=k))
    with pytest.raises(ValueError, match="k=3: the drafts of jacobi are as deep as its own settings say, here 6"):
        generate(real, [[1]], params, make(real, block=6), DecodeConfig(k=3))
