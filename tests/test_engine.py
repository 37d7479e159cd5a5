"""The engine: requests that come and go between steps are answered as if they were alone, whatever drafts for them."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from scripted_denoiser import denoiser_of

from draftsmith.inference.commit import Request
from draftsmith.inference.engine import Engine
from draftsmith.inference.prefixes import Prefixes
from draftsmith.inference.rows import closed_up, take_rows
from draftsmith.inference.self_draft import SelfDraft
from draftsmith.inference.speculate import DecodeConfig, generate
from draftsmith.losses.probs import SamplingParams
from draftsmith.models import METHODS, TRAINING_FREE
from draftsmith.models.cache import Cache

SMALL: dict[str, dict[str, Any]] = {
    "lookahead": {"window": 3, "n": 4},
    "jacobi": {"block": 4},
    "quadratic": {"block": 3, "window": "quadratic"},
    "dflash": {"block": 5, "layers": 2},
    "dspark": {"block": 4, "layers": 1, "rank": 8},
}
DRAFTERS = ["plain", *METHODS, *TRAINING_FREE, "quadratic", "self_draft", "self_draft_dual"]

PROMPTS = [
    [5, 6, 7] * 3,
    [9],
    [30, 31, 32, 33, 30, 31],
    list(range(40, 64)),
    [5, 6],
    [7, 8, 9] * 4,
    [70, 71, 70, 71, 70],
]
PARAMS = [
    SamplingParams(max_new_tokens=14),
    SamplingParams(max_new_tokens=9, temperature=0.8, seed=3),
    SamplingParams(max_new_tokens=1),
    SamplingParams(max_new_tokens=17, temperature=1.0, seed=4, top_p=0.9, repetition_penalty=1.2),
    SamplingParams(max_new_tokens=12, frequency_penalty=0.5, min_new_tokens=3),
    SamplingParams(max_new_tokens=6, temperature=0.7, seed=5),
    SamplingParams(max_new_tokens=11),
]


@pytest.fixture(scope="module")
def real(tiny: Any) -> Any:
    return tiny(dtype=torch.float64)


def make(name: str, real: Any) -> Any:
    torch.manual_seed(0)
    if name == "plain":
        return None
    if name.startswith("self_draft"):
        dual = name.endswith("dual")
        return SelfDraft(denoiser_of(real, 4, 3, shift=True, token_causal=dual, dual=dual))
    kind = (METHODS | TRAINING_FREE)["jacobi" if name == "quadratic" else name]
    drafter = kind(kind.Config(**SMALL.get(name, {})), real.facts)
    if name in METHODS:
        drafter.init_from_target(real)
        return drafter.to(real.dtype).eval()
    drafter.bind(real)
    return drafter


def request(i: int, real: Any) -> Request:
    return Request(i, PROMPTS[i], PARAMS[i], real.facts.eos_ids, real.tokenizer, live=True)


def come_and_go(engine: Engine, real: Any, gone: int | None = None) -> dict[int, list[int]]:
    """Seven requests for three rows, some of which come while others run; the ids of each, by its events."""
    ids: dict[int, list[int]] = {}
    requests = [request(i, real) for i in range(len(PROMPTS))]
    arrivals = {0: [0, 1], 2: [2, 3], 3: [4], 6: [5, 6]}
    step = 0
    while engine.busy or step <= max(arrivals):
        for i in arrivals.get(step, ()):
            engine.add(requests[i])
        if step == 5 and gone is not None:
            engine.cancel(requests[gone])
        for event in engine.step():
            ids.setdefault(event.row, []).extend(event.ids)
        step += 1
    assert all(r.stop_reason is not None for r in requests)
    return ids


@pytest.mark.parametrize("name", DRAFTERS)
def test_answers_do_not_depend_on_who_comes_and_goes(name: str, real: Any) -> None:
    decode = DecodeConfig(max_rows=3)
    alone = [
        generate(real, [prompt], params, make(name, real), decode)[0].ids
        for prompt, params in zip(PROMPTS, PARAMS, strict=True)
    ]
    engine = Engine(real, make(name, real), decode, longest=48, prompt=24)
    with torch.no_grad():
        ids = come_and_go(engine, real)
        assert [ids[i] for i in range(len(PROMPTS))] == alone
        again = come_and_go(engine, real, gone=3)  # rows that were used before, and one that is given up
    assert [again[i] for i in range(len(PROMPTS)) if i != 3] == alone[:3] + alone[4:]
    assert again[3] == alone[3][: len(again[3])] != alone[3]


@pytest.mark.parametrize("name", ["eagle3", "recycling", "jacobi", "prompt_tokens"])
def test_trees_too(name: str, real: Any) -> None:
    shape = DecodeConfig(max_rows=3, tree="static", nodes=6, width=2)
    alone = [
        generate(real, [prompt], params, make(name, real), shape)[0].ids
        for prompt, params in zip(PROMPTS, PARAMS, strict=True)
    ]
    with torch.no_grad():
        ids = come_and_go(Engine(real, make(name, real), shape, longest=48, prompt=24), real)
    assert [ids[i] for i in range(len(PROMPTS))] == alone


@pytest.mark.parametrize("name", DRAFTERS)
def test_prompts_that_begin_as_earlier_ones_get_the_same_answers(name: str, real: Any) -> None:
    decode = DecodeConfig(max_rows=2)

    def alone(prompt: list[int], params: SamplingParams) -> list[int]:
        return generate(real, [prompt], params, make(name, real), decode)[0].ids

    first = list(range(30, 40))
    answer = alone(first, PARAMS[0])
    prompts = [first, [*first, *answer, 8, 9], [*first[:7], 5, 6], [90, 91, 92], [*first, *answer[:3]], first]
    params = [PARAMS[0], PARAMS[3], PARAMS[1], PARAMS[6], PARAMS[4], PARAMS[6]]
    wanted = [answer, *map(alone, prompts[1:], params[1:])]
    engine = Engine(real, make(name, real), decode, longest=48, prompt=32, prefixes=Prefixes(1_000_000, least=2))
    requests = [
        Request(i, p, q, real.facts.eos_ids, None, live=False)
        for i, (p, q) in enumerate(zip(prompts, params, strict=True))
    ]
    with torch.no_grad():
        for wave in (requests[:1], requests[3:4], requests[1:3], requests[4:]):
            for request in wave:
                engine.add(request)
            while engine.busy and not (
                wave == requests[3:4] and len(wave[0].ids) > 4
            ):  # it still runs when others come
                engine.step()
    assert [r.ids for r in requests] == wanted
    reused = [r.stats.reused for r in requests]
    assert reused[0] == reused[3] == 0 and reused[2] == 7 and reused[5] == 9
    assert reused[1] > len(first) and reused[4] > len(first)  # a part of the answer as well


def test_a_prefix_is_not_read_again(real: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    prefixes = Prefixes(1_000_000, least=4)
    engine = Engine(real, None, DecodeConfig(max_rows=4), longest=48, prompt=32, prefixes=prefixes)
    forward, shapes = real.forward, []

    def counting(ids: Any, *rest: Any, **options: Any) -> Any:
        shapes.append(tuple(ids.shape))
        return forward(ids, *rest, **options)

    monkeypatch.setattr(real, "forward", counting)
    prompts = [list(range(40, 60)), [*range(40, 60), 9], [*range(40, 58), 7], [40, 41, 42, 9], [*range(20, 30)]]
    requests = [Request(i, p, SamplingParams(max_new_tokens=1), (), None, live=False) for i, p in enumerate(prompts)]
    for wave in (requests[:1], requests[1:]):
        for request in wave:
            engine.add(request)
        while engine.busy:
            engine.step()
    assert shapes == [(1, 20), (2, 1), (2, 10)]  # what is known, what is not; three tokens are not worth it
    assert prefixes.hits == 2 and [r.stats.reused for r in requests] == [0, 20, 18, 0, 0]
    engine.clear()
    assert prefixes.rows == [] and prefixes.bytes == 0


def test_a_pass_has_as_many_rows_as_there_are_requests(real: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = Engine(real, None, DecodeConfig(max_rows=8), longest=48, prompt=24)
    forward, verified = real.forward, []

    def counting(ids: Any, *rest: Any, **options: Any) -> Any:
        if ids.shape[1] == 1:
            verified.append(len(ids) - engine.running)
        return forward(ids, *rest, **options)

    monkeypatch.setattr(real, "forward", counting)
    with torch.no_grad():
        come_and_go(engine, real)
    assert len(verified) > 10 and set(verified) == {0}


def test_what_the_drafter_knows_moves_with_its_row() -> None:
    assert closed_up([True, False, True, True]) == [0, 3, 2]
    assert closed_up([False, False, True]) == [2]
    assert closed_up([True, True]) == [0, 1] and closed_up([False]) == []
    cache = Cache(4, 8, 2, 1, 4, torch.float32, "cpu")
    keys = torch.randn(4, 1, 3, 4)
    cache.begin(torch.arange(3).expand(4, 3))
    cache.update(keys, keys, 0)
    cache.commit(torch.tensor([3, 1, 2, 3]))
    taken = take_rows([cache, torch.tensor([[1], [2], [3], [4]]), None], [0, 1, 2], 0)[0]
    cache = take_rows(cache, [0, 2], 1)
    assert taken is cache and cache.rows == 3 and cache.lengths_B.tolist() == [3, 2, 0]
    assert torch.equal(cache.kv[0, 0, 1, :, :2], keys[2, :, :2])
    assert take_rows(torch.tensor([[1], [2], [3]]), [2, 1], 1).tolist() == [[3], [2], [0]]
    with pytest.raises(ValueError, match="5 rows, the cache was made for 4"):
        cache.arrange([0], 4)
    with pytest.raises(ValueError, match="holds a set"):
        take_rows({1}, [0], 0)


def test_who_ended_in_a_step_that_failed_is_given_up_too(real: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody was told of the end: a client would wait for it."""
    engine = Engine(real, None, DecodeConfig(max_rows=3), longest=48, prompt=24)
    told, ends, stays = (
        Request(i, PROMPTS[0], SamplingParams(max_new_tokens=n), (), None, live=False) for i, n in enumerate((1, 2, 9))
    )
    for one in (told, ends, stays):
        engine.add(one)
    assert [event.stop_reason for event in engine.step()] == ["length", None, None]

    def broken(*_: Any) -> None:
        raise RuntimeError("a fault of the model")

    with monkeypatch.context() as patch:
        patch.setattr(engine, "_keep", broken)
        with pytest.raises(RuntimeError):
            engine.step()
    assert ends.stop_reason == "length" and stays.stop_reason is None
    assert engine.clear() == [ends, stays] and not engine.busy and engine.clear() == []


def test_what_an_open_engine_refuses(real: Any) -> None:
    suffix = TRAINING_FREE["suffix"]
    shared = suffix(suffix.Config(shared=True), real.facts)
    for drafter, decode, words in (
        (shared, DecodeConfig(), "shared=true"),
        (None, DecodeConfig(fixed_width=4), "fixed_width=4 is for closed batches"),
    ):
        with pytest.raises(ValueError, match=words):
            Engine(real, drafter, decode, longest=48, prompt=24)
    engine = Engine(real, None, DecodeConfig(), longest=16, prompt=8)
    with pytest.raises(ValueError, match="there is room for 16"):
        engine.add(request(0, real))
    with pytest.raises(ValueError, match="a prompt of 9 tokens, there is room for 8"):
        engine.add(Request(0, [5] * 9, SamplingParams(max_new_tokens=2), (), None, live=False))


def test_drafters_that_keep_nothing_are_made_ready_once(real: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Medusa stacks its weights then: not whenever somebody comes or goes."""
    drafter, made = make("medusa", real), list[Any]()
    init = drafter.init

    def counted(prefill: Any) -> Any:
        made.append(prefill)
        return init(prefill)

    monkeypatch.setattr(drafter, "init", counted)
    engine = Engine(real, drafter, DecodeConfig(max_rows=3), longest=48, prompt=24)
    come_and_go(engine, real)
    assert len(made) == 1
    engine.clear()
    come_and_go(engine, real)
    assert len(made) == 2


def test_top_log_probabilities_are_those_of_the_model(real: Any) -> None:
    params = replace(PARAMS[0], logprobs=True, top_logprobs=3)
    asked = Request(0, PROMPTS[0], params, real.facts.eos_ids, None, live=False)
    engine = Engine(real, None, DecodeConfig(), longest=48, prompt=24)
    engine.add(asked)
    while engine.busy:
        engine.step()
    assert len(asked.top_logprobs) == len(asked.ids) == len(asked.logprobs)
    for token, chosen, best in zip(asked.ids, asked.logprobs, asked.top_logprobs, strict=True):
        assert len(best) == 3 and best[0] == (token, pytest.approx(chosen))  # greedy
        assert best[0][1] >= best[1][1] >= best[2][1]
