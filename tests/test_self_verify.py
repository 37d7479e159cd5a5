"""Self-verification: the answers of the mode of block size 1, greedy and sampled, in fewer passes; with routing, not.

pytest tests/test_self_verify.py
"""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from scripted_denoiser import denoiser_of

from draftsmith.inference.diffuse import DiffuseConfig, diffuse
from draftsmith.inference.selections import Everything
from draftsmith.inference.strategies import STRATEGIES, Strategy, strategy_of
from draftsmith.losses.probs import SamplingParams

PROMPTS = [[5, 9, 77, 30, 2, 8, 100], [44], [7, 2, 12, 90]]


@pytest.fixture(scope="module")
def double(tiny: Callable[..., Any]) -> Any:
    return tiny(dtype=torch.float64, layers=2, width=32, vocab=260, tokens=256)


@pytest.mark.parametrize("shift", [False, True])
@pytest.mark.parametrize("origin", ["document", "answer"])
def test_answers_are_those_of_blocks_of_one(double: Any, shift: bool, origin: Any) -> None:
    denoiser = denoiser_of(double, 4, 256, shift=shift, origin=origin)
    single = denoiser_of(double, 1, 256, shift=shift, token_causal=True)
    params = [
        SamplingParams(max_new_tokens=11),
        SamplingParams(max_new_tokens=6, temperature=1.0, seed=4, min_new_tokens=6),
        SamplingParams(max_new_tokens=9, temperature=0.5, seed=5),
    ]
    assert STRATEGIES["s2d2"].verify.lossless  # type: ignore[union-attr]
    results = diffuse(denoiser, PROMPTS, params, DiffuseConfig(STRATEGIES["s2d2"]))
    plain = diffuse(single, PROMPTS, params)
    assert [r.ids for r in results] == [r.ids for r in plain]
    for r in results:
        assert r.passes is not None and r.passes.denoise == r.passes.verify <= len(r.ids) and r.stats.rule == "s2d2"
        if shift:  # the first drafted token is the mode's own
            assert 2 * r.passes.verify <= len(r.ids) + 1
    alone = [
        diffuse(denoiser, [p], q, DiffuseConfig(STRATEGIES["s2d2"]))[0] for p, q in zip(PROMPTS, params, strict=True)
    ]
    assert [(r.ids, r.passes) for r in alone] == [(r.ids, r.passes) for r in results]


def test_routing_is_labelled(double: Any) -> None:
    strategy = strategy_of("s2d2", {"route": 0.0})
    assert not strategy.verify.lossless  # type: ignore[union-attr]
    denoiser = denoiser_of(double, 4, 256, shift=False)
    [result] = diffuse(
        denoiser, PROMPTS[:1], SamplingParams(max_new_tokens=8, ignore_eos=True), DiffuseConfig(strategy)
    )
    assert result.passes is not None and (result.passes.denoise, result.passes.verify) == (2, 0)
    assert "lossy" in result.stats.rule
    # Unverified drafts of blocks, read token by token once they are finished:
    blocks = denoiser_of(double, 4, 256, shift=False, token_causal=True)
    everything = Strategy(Everything())
    [plain] = diffuse(blocks, PROMPTS[:1], SamplingParams(max_new_tokens=8, ignore_eos=True), DiffuseConfig(everything))
    assert result.ids == plain.ids


def test_what_does_not_fit_is_refused(double: Any) -> None:
    params = SamplingParams(max_new_tokens=4)
    decode = DiffuseConfig(STRATEGIES["s2d2"])
    with pytest.raises(ValueError, match="whole canvas"):
        diffuse(denoiser_of(double, 4, 256, shift=False, causal=False), [[1]], params, decode)
    with pytest.raises(ValueError, match="self-drafting"):
        diffuse(denoiser_of(double, 4, 256, shift=True, token_causal=True, dual=True), [[1]], params, decode)
    with pytest.raises(ValueError, match="penalties"):
        hot = SamplingParams(max_new_tokens=4, repetition_penalty=1.5)
        diffuse(denoiser_of(double, 4, 256, shift=False), [[1]], hot, decode)
