"""Golden loss curves, one of each family (all of them: python tests/golden.py), and a head that never changes.

Run: pytest tests/test_golden.py
"""

from __future__ import annotations

import json
import math

import fixed_head
import golden
import pytest
import torch

from draftsmith.models.pretrained import tiny_target


@pytest.mark.parametrize(
    "name", ["medusa", "eagle3", "dflash", "diffusion.fast_dllm_v2", "diffusion.certainty", "consistency.cllm"]
)
def test_a_hundred_steps_lose_as_they_did(name: str) -> None:
    assert golden.deviation(golden.curve(name), golden.read()[name]) <= golden.RTOL


def test_every_method_has_a_curve() -> None:
    stored = golden.read()
    assert list(stored) == golden.NAMES
    assert all(len(values) == golden.STEPS for values in stored.values())


def test_a_small_change_is_seen() -> None:
    """A learning rate that is off by one per cent moves a curve by more than what is allowed to rounding."""
    assert golden.deviation(golden.curve("medusa", lr=1.01e-3), golden.read()["medusa"]) > 2 * golden.RTOL
    assert golden.deviation([math.nan, 1.0], [1.0, 1.0]) == math.inf


def test_a_head_that_never_changes_reaches_what_it_did() -> None:
    """Committed tokens per verification, to three decimals; and the tokens behind them are the target's own."""
    target = tiny_target(dtype=torch.float32)
    stored = json.loads((fixed_head.FOLDER / "reached.json").read_text())
    assert stored["tau"] > 1.5 and fixed_head.reached(target, fixed_head.FOLDER) == stored
