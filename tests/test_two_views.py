"""The runtime with real adapters: two views of one set of weights, with a trained, a reserved and a new mask token.

pytest tests/test_two_views.py
"""

from typing import Any

import pytest
import torch

from draftsmith.inference.diffuse import DiffuseConfig, diffuse
from draftsmith.inference.self_draft import SelfDraft
from draftsmith.inference.speculate import DecodeConfig, generate
from draftsmith.inference.strategies import STRATEGIES, strategy_of
from draftsmith.losses.probs import SamplingParams
from draftsmith.models.adapters import AdapterConfig, Adapters
from draftsmith.models.denoiser import TargetDenoiser
from draftsmith.models.pretrained import tiny_target

PROMPTS = [[5, 9, 77, 30, 2, 8, 100], [44], [7, 2, 12, 90]]
FORMS: dict[str, dict[str, Any]] = {
    "dual": {"shift": True, "token_causal": True},
    "set_block": {"shift": False, "token_causal": True},
    "fast_dllm_v2": {"shift": True, "origin": "document"},
}


def make(form: str, mask: Any) -> TargetDenoiser:
    target = tiny_target(dtype=torch.float64, layers=2, width=32, vocab=260, tokens=256)
    adapters = Adapters(AdapterConfig(rank=2, mask=mask), target, dual=form == "dual")
    torch.manual_seed(5)
    with torch.no_grad():
        for parameter in adapters.trained.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.3)
    return TargetDenoiser(target, 4, adapters.mask_id, adapters=adapters, **FORMS[form])


@pytest.mark.parametrize("mask", ["reserved", "trained", "new"])
@pytest.mark.parametrize("form", FORMS)
def test_the_autoregressive_path_is_the_original_and_drafts_change_nothing(form: str, mask: Any) -> None:
    denoiser = make(form, mask)
    params = SamplingParams(max_new_tokens=12)
    original = generate(tiny_target(dtype=torch.float64, layers=2, width=32, vocab=260, tokens=256), PROMPTS, params)
    plain = generate(denoiser.target, PROMPTS, params)
    drafter = SelfDraft(denoiser)
    drafter.bind(denoiser.target)
    drafted = generate(denoiser.target, PROMPTS, params, drafter, DecodeConfig(k=3))
    assert [r.ids for r in original] == [r.ids for r in plain] == [r.ids for r in drafted]
    if form == "dual":
        assert all(r.stats.accepted[0] == r.stats.tried[0] for r in drafted)


@pytest.mark.parametrize("mask", ["reserved", "trained", "new"])
@pytest.mark.parametrize("form", FORMS)
def test_batch_equals_single(form: str, mask: Any) -> None:
    denoiser = make(form, mask)
    params = SamplingParams(max_new_tokens=10, ignore_eos=True, repetition_penalty=1.1)
    for strategy in (strategy_of("threshold", {"threshold": 0.05}), STRATEGIES["remask"], STRATEGIES["soft"]):
        decode = DiffuseConfig(strategy)
        together = diffuse(denoiser, PROMPTS, params, decode)
        alone = [diffuse(denoiser, [prompt], params, decode)[0] for prompt in PROMPTS]
        assert [(r.ids, r.passes) for r in together] == [(r.ids, r.passes) for r in alone]
        assert all(max(r.ids) < 256 and len(r.ids) == 10 for r in together)
