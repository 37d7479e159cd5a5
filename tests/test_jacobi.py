"""Jacobi decoding: answers equal to plain decoding, states equal to a loop without a cache, exact sampling with draws that
stay coupled, convergence maps. CASES B26 (a), B41."""

from dataclasses import replace
from typing import Any

import pytest
import torch

from draftsmith.inference.speculate import DecodeConfig, Result, generate
from draftsmith.losses.probs import SamplingParams
from draftsmith.models.jacobi import Jacobi, JacobiConfig
from draftsmith.models.pretrained import tiny_target

CHAIN, TREE = DecodeConfig(), DecodeConfig(tree="static", nodes=10, width=3)
SHAPES = {"chain": CHAIN, "pools": TREE}
SETTINGS = {
    "two blocks": {"block": 4, "blocks": 2, "spawn": 0.5},
    "three blocks": {"block": 3, "blocks": 3, "spawn": 0.0},
    "slide": {"block": 6, "window": "slide"},
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
                weight.mul_(0.5)
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
    assert total.from_draft > (5 if shape == "chain" else 60) and total.drafted > total.from_draft, total


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("setting", SETTINGS)
def test_greedy_identity_of_every_setting(plain40: Any, setting: str, shape: str) -> None:
    """Answers of different lengths, so that rows end at different times."""
    real, prompts, answers = plain40
    each = [SamplingParams(max_new_tokens=8 + 3 * i, ignore_eos=True) for i in range(8)]
    results = generate(real, prompts[:8], each, make(real, **SETTINGS[setting]), replace(SHAPES[shape], max_rows=4))
    assert ids_of(results) == [a[: p.max_new_tokens] for a, p in zip(answers, each, strict=False)]
