"""EAGLE's training step against the paper's plain formula, with checkpoints, and what it allocates (CASES B30).

pytest tests/test_step.py
"""

from typing import Any

import pytest
import torch
from eagle_step import allocated, make_step

from draftsmith.models import slots


@pytest.mark.parametrize("attention", ["columns", "joined"])
def test_equal_to_the_plain_formula(attention: str) -> None:
    """float64, losses and gradients of five depths, over the vocabulary of the draft and of the target."""
    for draft in (100, None):
        step = make_step(90, draft=draft, dtype=torch.float64, steps=5)
        losses, grads = step.run(step.terms)
        plain, slopes = step.run(lambda step=step: step.plain(attention))
        torch.testing.assert_close(losses, plain, rtol=1e-10, atol=0)
        torch.testing.assert_close(grads, slopes, rtol=1e-8, atol=1e-12)


@pytest.mark.parametrize(
    ("method", "options"),
    [
        ("eagle3", {}),
        ("eagle3", {"norm_output": True, "deep_share": 0.5}),
        ("eagle", {"noise": 0.2, "steps": 3, "deep_share": 0.7}),
    ],
)
def test_checkpoints_change_memory_alone(method: str, options: dict[str, Any]) -> None:
    found = []
    for checkpointing in (False, True):
        step = make_step(
            200, method, dtype=torch.float64, first=40, **({"steps": 5} | options), checkpointing=checkpointing
        )
        step.drafter.train()
        found.append((*step.run(step.terms), allocated(lambda step=step: step.run(step.terms))[0]))
    (losses, grads, kept), (others, slopes, less) = found
    assert torch.equal(losses, others)
    torch.testing.assert_close(grads, slopes, rtol=1e-12, atol=1e-14)
    assert less < 0.9 * kept


def test_a_step_allocates_in_proportion_to_its_length() -> None:
    """B30: 32,000 ids, 1,000 in the draft. Nothing as large as all logits in fp32; twice the length, at most 2.2 times."""
    peaks = []
    for length in (512, 1024):
        step = make_step(length, vocab=32_000, draft=1_000, width=64, steps=7)
        assert step.out.log_z_BT is not None
        step.out.log_z_BT = step.out.top_BT = None  # live states: the target's normaliser is found on the way
        peak, largest = allocated(lambda step=step: step.run(step.terms))
        assert largest < length * 32_000 * 4
        peaks.append(peak)
    print(f"peak of 512 tokens {peaks[0] / 1e6:.0f} MB, of 1,024 {peaks[1] / 1e6:.0f} MB")
    assert peaks[1] < 2.2 * peaks[0]


@pytest.mark.parametrize("method", ["eagle3", "eagle"])
def test_rows_of_8192_tokens(method: str) -> None:
    """Bounded: linear in the length, and the largest tensor is far from one number per pair of tokens."""
    peaks = []
    for length in (4096, 8192):
        step = make_step(length, method, width=16, heads=(2, 1), steps=2, first=length // 2)
        step.drafter.train()
        peak, largest = allocated(lambda step=step: step.run(step.terms))
        assert largest < length * length / 8
        peaks.append(peak)
    assert peaks[1] < 2.2 * peaks[0]


def test_slots_of_long_rows_keep_no_keys_of_every_part(monkeypatch: pytest.MonkeyPatch) -> None:
    """P-EAGLE: the same loss and gradients with the parts made anew in backward, in memory that is linear in the length."""
    found, peaks = [], []
    for length, kept in ((512, 10**6), (512, 1), (1024, 1)):
        monkeypatch.setattr(slots, "KEPT", kept)
        step = make_step(length, "peagle", dtype=torch.float64, depths=3, layers=2)
        found.append(step.run(step.terms))
        peaks.append(allocated(lambda step=step: step.run(step.terms))[0])
    for a, b in zip(*found[:2], strict=True):
        torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-14)
    assert peaks[1] < 0.8 * peaks[0] and peaks[2] < 2.3 * peaks[1]
