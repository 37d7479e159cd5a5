"""Probabilities: each rule against a slow reference, ties, extremes, and rows that do not touch each other."""

import math

import pytest
import torch
from torch import Tensor

from draftsmith.losses.probs import History, ParamRows, SamplingParams, _truncate, adjust, draw, probs, top


def slow(logits: list[float], params: SamplingParams, prompt: set[int], counts: dict[int, int]) -> list[float]:
    """One row by the book, in Python floats."""
    x = list(logits)
    for i in range(len(x)):
        if i in prompt or counts.get(i):
            x[i] = x[i] / params.repetition_penalty if x[i] > 0 else x[i] * params.repetition_penalty
        x[i] -= params.presence_penalty * bool(counts.get(i)) + params.frequency_penalty * counts.get(i, 0)
    order = sorted(range(len(x)), key=lambda i: (-x[i], i))
    if params.temperature == 0:
        return [float(i == order[0]) for i in range(len(x))]
    weight = {i: math.exp((x[i] - x[order[0]]) / params.temperature) for i in order}
    kept = order[: params.top_k or len(order)]
    if params.top_p < 1:
        total, mass, short = sum(weight[i] for i in kept), 0.0, []
        for i in kept:
            if short and mass / total >= params.top_p:
                break
            short.append(i)
            mass += weight[i]
        kept = short
    kept = [i for i in kept if weight[i] >= params.min_p]
    total = sum(weight[i] for i in kept)
    return [weight[i] / total if i in kept else 0.0 for i in range(len(x))]


CASES = [
    SamplingParams(temperature=0.7),
    SamplingParams(temperature=1.0, top_k=3),
    SamplingParams(temperature=1.3, top_p=0.6),
    SamplingParams(temperature=1.0, top_k=5, top_p=0.8),
    SamplingParams(temperature=0.9, min_p=0.2),
    SamplingParams(temperature=2.0, top_k=6, top_p=0.9, min_p=0.1),
    SamplingParams(temperature=1.0, repetition_penalty=1.4, presence_penalty=0.5, frequency_penalty=0.25),
    SamplingParams(temperature=0.0, repetition_penalty=1.4, frequency_penalty=0.3),
    SamplingParams(temperature=1.0, top_k=1),
    SamplingParams(temperature=1.0, top_p=1e-9),
]


def test_all_rules_together_equal_a_slow_reference() -> None:
    random = torch.Generator().manual_seed(0)
    logits_RV = torch.randn(len(CASES), 11, generator=random, dtype=torch.float64) * 2
    prompt_RV = torch.rand(len(CASES), 11, generator=random) < 0.3
    counts_RV = torch.randint(0, 3, (len(CASES), 11), generator=random)
    rows = ParamRows.pack(CASES)
    p_RV = probs(logits_RV, rows, History(11, prompt_RV, counts_RV))
    for r, params in enumerate(CASES):
        prompt = {i for i in range(11) if prompt_RV[r, i]}
        want = slow(logits_RV[r].tolist(), params, prompt, dict(enumerate(counts_RV[r].tolist())))
        assert torch.allclose(p_RV[r], torch.tensor(want, dtype=torch.float64), atol=1e-12), params
        alone = probs(logits_RV[r : r + 1], params, History(11, prompt_RV[r : r + 1], counts_RV[r : r + 1]))
        assert torch.equal(alone[0], p_RV[r])


@pytest.mark.parametrize("params", [p for p in CASES if p.top_k or p.top_p < 1])
def test_the_window_of_large_logits_changes_nothing(params: SamplingParams) -> None:
    x_RV = torch.randn(4, 50, generator=torch.Generator().manual_seed(1)).round(decimals=1)  # with ties
    x_RV = x_RV - x_RV.amax(-1, keepdim=True)
    rows = ParamRows.pack([params]).repeat(4)
    full = _truncate(x_RV, rows, window=50)
    for window in (1, 2, 7, 49):
        assert torch.equal(_truncate(x_RV, rows, window), full)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_the_first_of_equals_is_taken_in_blocks_too(dtype: torch.dtype) -> None:
    """Few values, so that ties lie within blocks and across; a NaN counts as the largest, as in argmax."""
    x_RV = torch.randint(0, 6, (40, 1024), generator=torch.Generator().manual_seed(0)).to(dtype)
    x_RV[3, 700], x_RV[4] = math.nan, -math.inf
    params = ParamRows.pack([SamplingParams()] * 40)
    for tokens in (1024, 512, 1000):
        want_R = x_RV[:, :tokens].float().argmax(-1)
        assert torch.equal(top(x_RV, params, History(tokens)), want_R)


def test_ties_rank_by_index() -> None:
    flat = torch.zeros(1, 6)
    assert probs(flat, SamplingParams()).tolist() == [[1, 0, 0, 0, 0, 0]]
    assert probs(flat, SamplingParams(temperature=1.0, top_k=2)).tolist() == [[0.5, 0.5, 0, 0, 0, 0]]
    assert (probs(flat, SamplingParams(temperature=1.0, top_p=0.5)) > 0).tolist() == [[True] * 3 + [False] * 3]
    assert top(torch.tensor([[1.0, 3.0, 3.0]]), ParamRows.pack([SamplingParams()])).tolist() == [1]


def test_a_tiny_temperature_is_finite_and_greedy() -> None:
    logits_RV = torch.randn(3, 40) * 30
    for temperature in (1e-6, 1e-40, 1e-60):  # the last one is 0 in float32
        p_RV = probs(logits_RV, SamplingParams(temperature=temperature))
        assert bool(p_RV.isfinite().all())
        assert torch.equal(p_RV.argmax(-1), logits_RV.argmax(-1)) and bool((p_RV.amax(-1) > 1 - 1e-6).all())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64])
def test_probabilities_are_fp32_or_fp64(dtype: torch.dtype) -> None:
    logits_RV = torch.randn(2, 9).to(dtype)
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    for params in (SamplingParams(), SamplingParams(temperature=0.8, top_p=0.9)):
        p_RV = probs(logits_RV, params)
        assert p_RV.dtype == wide and torch.equal(p_RV, probs(logits_RV.to(wide), params))


def test_ids_beyond_the_tokenizer_are_never_drawn() -> None:
    logits_RV = torch.tensor([[0.0, 1.0, 2.0, 9.0]])
    history = History(tokens=3)
    assert top(logits_RV, ParamRows.pack([SamplingParams()]), history).tolist() == [2]
    for params in (SamplingParams(), SamplingParams(temperature=1.0)):
        p_RV = probs(logits_RV, params, history)
        assert float(p_RV[0, 3]) == 0 and float(p_RV.sum()) == pytest.approx(1)
    assert logits_RV[0, 3] == 9  # untouched
    ids_V = torch.tensor([1, 3])
    assert probs(logits_RV[:, [1, 3]], SamplingParams(temperature=1.0), history, ids_V).tolist() == [[1, 0]]


def test_bans_and_penalties_reach_a_draft_vocabulary() -> None:
    ids_V = torch.tensor([0, 2, 5])
    banned_RV = torch.tensor([[False, False, True, False, False, False]])
    history = History(6, torch.zeros(1, 6, dtype=torch.bool), torch.tensor([[1, 0, 0, 0, 0, 0]]), banned_RV)
    rows = ParamRows.pack([SamplingParams(temperature=1.0, presence_penalty=2.0)])
    assert adjust(torch.tensor([[1.0, 1.0, 1.0]]), rows, history, ids_V).tolist() == [[-1.0, -math.inf, 1.0]]
    everything = History(6, banned_RV=torch.ones(1, 6, dtype=torch.bool))
    assert probs(torch.zeros(1, 3), rows, everything, ids_V).sum() == 0


def test_draw_breaks_where_the_cumulated_mass_does() -> None:
    p_RV = torch.tensor([[0.0, 0.25, 0.0, 0.5, 0.25, 0.0]], dtype=torch.float64)
    for u, want in [(0.0, 1), (0.25 - 2**-52, 1), (0.25, 3), (0.75 - 2**-52, 3), (0.75, 4), (1 - 2**-52, 4)]:
        assert draw(p_RV, torch.tensor([u], dtype=torch.float64)).tolist() == [want], u
        assert draw(p_RV * 3, torch.tensor([u], dtype=torch.float64)).tolist() == [want], u  # needs no unit mass


def test_draw_never_takes_a_token_of_probability_zero() -> None:
    random = torch.Generator().manual_seed(0)
    for _ in range(200):
        p_RV = torch.rand(64, 7, generator=random) * (torch.rand(64, 7, generator=random) < 0.4)
        p_RV[:, 0] += 1e-30  # never empty
        u_R = torch.tensor([0.0, 1 - 2**-52] * 32, dtype=torch.float64)
        assert bool((p_RV.gather(1, draw(p_RV, u_R)[:, None]) > 0).all())


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("temperature", -0.1),
        ("temperature", math.nan),
        ("temperature", math.inf),
        ("top_k", -1),
        ("top_k", 2**31 + 1),
        ("top_p", 0.0),
        ("top_p", 1.5),
        ("min_p", -0.1),
        ("repetition_penalty", 0.0),
        ("repetition_penalty", 1e-300),
        ("frequency_penalty", -1e39),
        ("presence_penalty", math.inf),
        ("max_new_tokens", 0),
        ("min_new_tokens", 500),
        ("stop_strings", ("",)),
    ],
)
def test_impossible_parameters_are_refused_by_name(name: str, value: float) -> None:
    with pytest.raises(ValueError, match=name):
        SamplingParams(**{name: value})


def test_logits_must_be_rows() -> None:
    def shaped(x: Tensor) -> None:
        probs(x, SamplingParams())

    with pytest.raises(ValueError, match="must be"):
        shaped(torch.zeros(3))
