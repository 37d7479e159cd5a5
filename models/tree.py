"""Draft trees: N nodes per row below the anchor, with the distribution they were drawn from.

Node j of N has index j + 1 wherever the anchor counts too (index 0): `parents_BN` holds such indices, in order of
creation, so a parent always comes before its children. A chain is a tree whose node j has parent j.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass
class Proposal:
    """The distribution siblings were drawn from: `rows_BMW[b, m]` for the children of node m (0 = anchor), in draft
    ids, float; `d2t_W` maps to target ids (None = identity). `replacement`: siblings drawn with replacement."""

    rows_BMW: Tensor
    d2t_W: Tensor | None
    replacement: bool


@dataclass
class Tree:
    """Fixed N per batch; `valid_BN` False marks unused nodes (never visible, never accepted)."""

    tokens_BN: Tensor  # int64 target ids
    parents_BN: Tensor  # int64, 0 = anchor, j + 1 = node j
    depths_BN: Tensor  # int64, 1 = child of the anchor
    log_probs_BN: Tensor  # fp32, the drafter's own log-probability of the token given its path
    valid_BN: Tensor  # bool
    q: Proposal | None = None  # None = deterministic (one-hot) candidates
    extra: object | None = None  # rows that ride along in the verify pass (prompt tokens, lookahead)

    def visible(self) -> Tensor:
        """Bool [B, M, M]: [i, j] True iff j is i or an ancestor of i. The anchor (0) is everyone's ancestor."""
        b, n = self.tokens_BN.shape
        see_BMM = torch.eye(n + 1, dtype=torch.bool, device=self.tokens_BN.device).repeat(b, 1, 1)
        rows_B = torch.arange(b, device=self.tokens_BN.device)
        for j in range(n):
            see_BMM[:, j + 1] |= see_BMM[rows_B, self.parents_BN[:, j]]
        see_BMM[:, :, 0] = True
        see_BMM[:, 1:, 1:] &= self.valid_BN[:, None, :]
        return see_BMM | torch.eye(n + 1, dtype=torch.bool, device=see_BMM.device)

    def ancestors(self) -> Tensor:
        """int64 [B, M, ceil(M / 64)]: `visible` packed, bit j % 64 of word j // 64."""
        see_BMM = self.visible()
        b, m, _ = see_BMM.shape
        words = -(-m // 64)
        bits = torch.zeros(b, m, words * 64, dtype=torch.int64, device=see_BMM.device)
        bits[..., :m] = see_BMM.long()
        shifts = torch.arange(64, device=see_BMM.device)
        return (bits.view(b, m, words, 64) << shifts).sum(-1)
