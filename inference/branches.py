"""Canvases that run beside the canvas: rival fills (LoPA), drafts of later states (FreeDave), self-verification (S2D2).

Branch 0 of a row is its canvas as it is; the others differ from it in some places of the unfinished block. All run in one
pass, as rows of the batch; `Passes.branches` counts them.

LoPA keeps the branch whose undecided places are surest. That changes what is decided. FreeDave only drafts what the
strategy would do next; a branch counts as far as the strategy, from the branch before it, arrives at exactly that
canvas, so that the answer is the one without branches (up to rounding: a pass has more rows).

Test: pytest tests/test_diffuse.py
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Lopa:
    """Look ahead in parallel (LoPA 2512.16229): rival branches that decide one more place each, the surest first."""

    rivals: int = 3
    """Branches beside the canvas (ours)."""

    def __post_init__(self) -> None:
        if self.rivals < 1:
            raise ValueError(f"lopa: rivals={self.rivals}, must be an integer >= 1")


@dataclass(frozen=True)
class FreeDave:
    """Drafts of the next states, verified in one batch (FreeDave 2510.00294): lossless."""

    drafts: int = 3
    """States drafted ahead (ours)."""

    def __post_init__(self) -> None:
        if self.drafts < 1:
            raise ValueError(f"freedave: drafts={self.drafts}, must be an integer >= 1")


@dataclass(frozen=True)
class SelfVerify:
    """The model's mode of block size 1 verifies drafts of its blocks (S2D2; inference/self_verify.py)."""

    route: float | None = None
    """Drafts whose least sure token reaches this are not verified: lossy; none = all are, lossless against that mode."""

    @property
    def lossless(self) -> bool:
        """Whether the answer is that of the mode itself."""
        return self.route is None


def rival_fills(rank_BC: Tensor, left_BC: Tensor, rivals: int) -> Tensor:
    """bool [B, G, C], G = 1 + rivals: branch g > 0 also decides the place of rank g - 1 among `left_BC`. A branch that
    would leave nothing to judge it by decides nothing more."""
    wanted_G = torch.arange(-1, rivals, device=rank_BC.device)
    several_B11 = (left_BC.sum(1) > 1)[:, None, None]
    return (rank_BC[:, None] == wanted_G[:, None]) & left_BC[:, None] & several_B11


def surest(confidence_BGC: Tensor, masked_BGC: Tensor) -> Tensor:
    """int64 [B]: the branch with the largest mean confidence of undecided places, the first among equals."""
    total_BG = (confidence_BGC * masked_BGC).sum(2)
    mean_BG = total_BG / masked_BGC.sum(2).clamp(min=1)
    return mean_BG.sort(dim=1, descending=True, stable=True).indices[:, 0]
