"""Figures of consistency models, against values computed by hand.

Run: pytest tests/test_consistency_figures.py
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from draftsmith.inference.consistency_figures import answer_losses, convergence_of, plot_convergence, repeated_grams
from draftsmith.models.target import Target


def test_repeated_grams_are_those_that_occurred_before() -> None:
    assert repeated_grams([1, 2, 3, 4, 1, 2, 3, 4]) == (1, 5)
    assert repeated_grams([7] * 8) == (4, 5)
    assert repeated_grams([1, 2, 1, 2, 1], n=2) == (2, 4)  # 12 21 12 21
    assert repeated_grams([1, 2, 3]) == repeated_grams([]) == (0, 0) and repeated_grams(range(50)) == (0, 47)
    with pytest.raises(ValueError, match="n = 0"):
        repeated_grams([1], n=0)


def test_cross_entropy_is_that_of_the_models_own_logits(tiny: Callable[..., Target]) -> None:
    target = tiny(width=32, layers=2, vocab=300, tokens=280, dtype=torch.float64)
    prompts = [[5, 9, 40], [7], [3, 3, 8, 9, 11, 200]]
    answers = [[31, 2], [17, 18, 19, 20, 250], []]
    wanted = []
    for prompt, answer in zip(prompts, answers, strict=True):
        ids = torch.tensor([[*prompt, *answer]])
        log_p_TV = target.model(ids).logits[0, :, :280].log_softmax(-1)
        wanted.append(-sum(float(log_p_TV[len(prompt) - 1 + i, token]) for i, token in enumerate(answer)))
    for rows in (1, 2, 8):
        assert answer_losses(target, prompts, answers, rows=rows) == pytest.approx(wanted, abs=1e-9)
    with pytest.raises(ValueError, match="no empty prompt"):
        answer_losses(target, [[]], [[1]])
    with pytest.raises(ValueError, match="3 prompts, 1 answers"):
        answer_losses(target, prompts, [[1]])


def test_the_convergence_map_counts_places_and_passes(tmp_path: Path) -> None:
    blocks = [
        [[9, 9, 9], [1, 9, 9], [1, 2, 3]],  # two passes, the last place wrong until the end
        [[4, 9, 6], [4, 5, 6]],  # one pass, two places right by luck
        [[7]],  # a short one that was right at once
    ]
    found = convergence_of(blocks)
    assert found is not None
    assert found.blocks_N == (3, 2, 2)
    assert found.right_IN == ((2, 0, 1), (3, 1, 1), (3, 2, 2))
    assert found.share_IN[1] == [1, 0.5, 0.5] and found.passes == {2: 1, 1: 1, 0: 1} and found.mean_passes == 1
    assert found.to_json()["passes"] == {"0": 1, "1": 1, "2": 1}
    assert convergence_of([]) is None
    for wrong in ([[[1], [1, 2]]], [[]], [[[]]]):
        with pytest.raises(ValueError, match="every block needs"):
            convergence_of(wrong)
    plot_convergence({"base": found, "cost $ and more": found}, tmp_path / "map.svg")
    text = (tmp_path / "map.svg").read_text()
    assert "<svg" in text and "<image" not in text  # the page's policy would block it
