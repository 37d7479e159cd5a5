"""Self-drafting: greedy output of a denoiser's autoregressive path is the same with and without its own drafts, for every
form of denoiser; sampled output too; what its passes see is what training would show them; the forwards are counted.

pytest tests/test_self_draft.py
"""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from scripted_denoiser import denoiser_of
from torch import Tensor

from draftsmith.inference.self_draft import SelfDraft, SelfDraftConfig
from draftsmith.inference.speculate import DecodeConfig, generate
from draftsmith.losses.probs import SamplingParams

FORMS: dict[str, dict[str, Any]] = {
    "blocks, shift": {"shift": True},
    "blocks, document": {"shift": False, "origin": "document"},
    "tokens": {"shift": True, "token_causal": True},
    "tokens, no shift": {"shift": False, "token_causal": True},
    "idlm": {"shift": True, "token_causal": True, "inside": "causal"},
    "wedlm": {"shift": False, "token_causal": True, "inside": "observed_first"},
    "dual": {"shift": True, "token_causal": True, "dual": True},
}
PROMPTS = [[5, 9, 77, 30, 2, 8, 100], [44], [7, 7, 12, 90]]
MASK = 256


@pytest.fixture(scope="module")
def double(tiny: Callable[..., Any]) -> Any:
    return tiny(dtype=torch.float64, layers=2, width=32, vocab=260, tokens=256)


@pytest.mark.parametrize("form", FORMS)
def test_greedy_output_is_plain_output(double: Any, form: str) -> None:
    params = SamplingParams(max_new_tokens=14)
    plain = generate(double, PROMPTS, params)
    for block, confidence in ((4, 0.0), (1, 0.0), (3, 0.02)):
        drafter = SelfDraft(denoiser_of(double, block, MASK, **FORMS[form]), SelfDraftConfig(confidence))
        drafter.bind(double)
        drafted = generate(double, PROMPTS, params, drafter, DecodeConfig(k=3))
        assert [r.ids for r in drafted] == [r.ids for r in plain]
        passes = 2 if form == "dual" and block > 1 else 1
        assert drafter.forwards == passes * max(r.stats.verifies for r in drafted)
        if form in ("tokens", "dual"):  # their first draft is the path's own next token
            assert sum(r.stats.accepted[0] for r in drafted if r.stats.accepted) > 0


def test_sampled_output_is_plain_output(double: Any) -> None:
    params = [SamplingParams(max_new_tokens=10, temperature=1.0, seed=i) for i in range(3)]
    drafter = SelfDraft(denoiser_of(double, 4, MASK, shift=True, token_causal=True, dual=True))
    plain = generate(double, PROMPTS, params)
    drafted = generate(double, PROMPTS, params, drafter, DecodeConfig(k=3, verifier="sample_match"))
    assert [r.ids for r in drafted] == [r.ids for r in plain]


@pytest.mark.parametrize("form", FORMS)
def test_drafts_are_those_of_the_text_run_whole(double: Any, form: str) -> None:
    """Every draft equals the candidates of one pass over all of the text so far, without a cache."""
    denoiser = denoiser_of(double, 4, MASK, **FORMS[form])
    drafter = SelfDraft(denoiser)
    seen: list[tuple[list[list[int]], Tensor, Tensor]] = []
    propose = drafter.propose

    def watched(state: Any, commit: Any, *rest: Any) -> Any:
        state, tree = propose(state, commit, *rest)
        texts = [state.ids_BS[row, :end].tolist() for row, end in enumerate(state.ends_B.tolist())]
        seen.append((texts, tree.tokens_BN, tree.valid_BN))
        return state, tree

    drafter.propose = watched  # type: ignore[method-assign]
    results = generate(double, PROMPTS, SamplingParams(max_new_tokens=9), drafter, DecodeConfig(k=4))
    assert len(seen) > 2
    for texts, tokens_BN, valid_BN in seen:
        for row, text in enumerate(texts):
            if not bool(valid_BN[row].any()):
                continue
            assert text == (PROMPTS[row] + results[row].ids)[: len(text)]
            want = brute_force(denoiser, text, len(PROMPTS[row]))
            got = tokens_BN[row, valid_BN[row]].tolist()
            assert got == want[: len(got)]
            assert len(got) == min(4, len(want))


def brute_force(denoiser: Any, text: list[int], prompt: int) -> list[int]:
    """Candidates of the places of the block behind `text`, by a pass over everything, its mask written out."""
    block, shift, n = denoiser.block, denoiser.shift, len(text)
    origin = 0 if denoiser.origin == "document" else prompt
    start = n if denoiser.token_causal else origin + (n - origin) // block * block
    end = start + block
    rows = end - 1 if denoiser.dual else end

    def number(place: int) -> int:
        return -1 if place < origin else (place - origin) // block

    see = torch.zeros(rows, rows, dtype=torch.bool)
    for i in range(rows):
        for j in range(rows):
            if i < start:  # finished
                see[i, j] = j <= i if denoiser.token_causal else number(j) <= number(i)
            elif denoiser.inside != "full":
                see[i, j] = j <= i  # all of the block is masks
            else:
                see[i, j] = True
            see[i, j] &= j < start or i >= start
    ids = torch.tensor([text + [denoiser.mask_id] * (rows - n)])
    with torch.no_grad():
        hidden = denoiser.denoise(ids, torch.arange(rows)[None], see_BTA=see[None])
        logits = denoiser.head(hidden)[0, :, :256]
    return [int(logits[place - shift].argmax()) for place in range(n, end)]


def test_what_cannot_be_is_refused(double: Any, tiny: Callable[..., Any]) -> None:
    with pytest.raises(ValueError, match="no autoregressive path"):
        SelfDraft(denoiser_of(double, 4, MASK, shift=False, causal=False))
    with pytest.raises(ValueError, match="not one model"):
        SelfDraft(denoiser_of(double, 4, MASK, shift=False)).bind(tiny(vocab=300))
    with pytest.raises(ValueError, match="confidence"):
        SelfDraftConfig(confidence=2)
