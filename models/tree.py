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
    ids, float; `d2t_W` maps to target ids (None = identity). `replacement`: siblings drawn with replacement.
    `sampled_B` False: this row's candidates are deterministic all the same (one-hot); None = every row is drawn."""

    rows_BMW: Tensor
    d2t_W: Tensor | None
    replacement: bool
    sampled_B: Tensor | None = None


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

    def is_chain(self) -> bool:
        """True when every node's parent is the node before it, in every row."""
        steps_N = torch.arange(self.parents_BN.shape[1], device=self.parents_BN.device)
        return bool((self.parents_BN == steps_N).all())

    def visible(self) -> Tensor:
        """Bool [B, M, M]: [i, j] True iff j is i or an ancestor of i. The anchor (0) is everyone's ancestor, and an
        unused node is seen by nobody but itself."""
        b, n = self.tokens_BN.shape
        up_BM = torch.nn.functional.pad(self.parents_BN, (1, 0))
        self_MM = torch.eye(n + 1, dtype=torch.bool, device=up_BM.device)
        see_BMM = self_MM.repeat(b, 1, 1)
        at_BM = up_BM
        for _ in range(int(self.depths_BN.max()) if n else 0):
            see_BMM.scatter_(2, at_BM[:, :, None], True)
            at_BM = up_BM.gather(1, at_BM)
        see_BMM[:, :, 0] = True
        see_BMM[:, :, 1:] &= self.valid_BN[:, None, :]
        return see_BMM | self_MM

    def ancestors(self) -> Tensor:
        """int64 [B, M, ceil(M / 64)]: `visible` packed, bit j % 64 of word j // 64."""
        see_BMM = self.visible()
        b, m, _ = see_BMM.shape
        words = -(-m // 64)
        bits = torch.zeros(b, m, words * 64, dtype=torch.int64, device=see_BMM.device)
        bits[..., :m] = see_BMM.long()
        shifts = torch.arange(64, device=see_BMM.device)
        return (bits.view(b, m, words, 64) << shifts).sum(-1)

    def sibling_ranks(self) -> Tensor:
        """int64 [B, N]: how many valid nodes before this one have the same parent."""
        n = self.parents_BN.shape[1]
        same_BNN = (self.parents_BN[:, :, None] == self.parents_BN[:, None, :]) & self.valid_BN[:, None, :]
        before_NN = torch.ones(n, n, dtype=torch.bool, device=same_BNN.device).tril(-1)
        return (same_BNN & before_NN).sum(-1)
