"""Draft trees: N nodes per row below the anchor, with the distribution they were drawn from.

Node j of N has index j + 1 wherever the anchor counts too (index 0): `parents_BN` holds such indices, in order of
creation, so a parent always comes before its children. A chain is a tree whose node j has parent j.

A tree may bring *extra rows* along (`Extra`): rows of the verification pass that are no candidates, but whose hidden
states the drafter reads when it drafts the next time. Prompt-token methods hang theirs on the nodes (`hang`), so that
the next draft is ready whichever node the target accepts; lookahead hangs its window on the anchor.

Test: pytest tests/test_trees.py
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ..kernels.tree_attention import pack


@dataclass
class Proposal:
    """The distribution siblings were drawn from: `rows_BMW[b, m]` for the children of node m (0 = anchor), in draft
    ids, float; `d2t_W` maps to target ids (None = identity). `replacement`: siblings drawn with replacement.
    `sampled_B` False: this row's candidates are deterministic all the same (one-hot); None = every row is drawn."""

    rows_BMW: Tensor
    d2t_W: Tensor | None
    replacement: bool
    sampled_B: Tensor | None = None


@dataclass(frozen=True)
class Prompts:
    """What a prompt-token drafter wants below a node: `depths` special tokens in a row, one per future depth, each of
    `members` virtual tokens side by side (PPD 2405.18628, ensemble prompt tokens; BiTA and PaSS have one). Member v of
    a token has member v of the token before it as parent. Its embedding is row `token * members + v` of the drafter's
    `extra_table_XD`."""

    depths: int
    members: int = 1

    def __post_init__(self) -> None:
        if self.depths < 1 or self.members < 1:
            raise ValueError(f"prompt tokens: {self.depths} depths x {self.members} members, both must be at least 1")


@dataclass
class Extra:
    """E rows that ride along in the verification pass.

    A row sees its parent's ancestors, its parent, itself, the committed tokens, and the drafter's `prefix_kv`; no node
    sees it, and its keys and values are never kept. `parents_BE`: 0 = anchor, j + 1 = node j, N + 1 + e = extra row e,
    which must come earlier. `ids_BE`: a token of the target (below V), or V + i = row i of the drafter's
    `extra_table_XD`. An unused row (`valid_BE` False) is seen by nobody but itself.
    """

    ids_BE: Tensor
    parents_BE: Tensor
    depths_BE: Tensor  # position, counted from the anchor's
    valid_BE: Tensor

    def place(self, nodes_BMM: Tensor) -> tuple[Tensor, Tensor]:
        """Bool [B, E, M + E] what each row sees of nodes (`nodes_BMM`: what those see) and extra rows; and int64 [B, E]
        the node that each row hangs on, 0 = anchor."""
        (b, e), m = self.ids_BE.shape, nodes_BMM.shape[1]
        self_EE = torch.eye(e, dtype=torch.bool, device=self.ids_BE.device)
        rows_BEE = self_EE.repeat(b, 1, 1)
        at_BE = self.parents_BE
        while bool((at_BE >= m).any()):
            above_BE = (at_BE - m).clamp(min=0)
            rows_BEE |= torch.nn.functional.one_hot(above_BE, e).bool() & (at_BE >= m)[:, :, None]
            at_BE = torch.where(at_BE >= m, self.parents_BE.gather(1, above_BE), at_BE)
        on_BEM = nodes_BMM.gather(1, at_BE[:, :, None].expand(b, e, m)) & self.valid_BE[:, :, None]
        rows_BEE = (rows_BEE & self.valid_BE[:, None, :] & self.valid_BE[:, :, None]) | self_EE
        return torch.cat([on_BEM, rows_BEE], 2), at_BE


@dataclass
class Tree:
    """Fixed N per batch; `valid_BN` False marks unused nodes (never visible, never accepted)."""

    tokens_BN: Tensor  # int64 target ids
    parents_BN: Tensor  # int64, 0 = anchor, j + 1 = node j
    depths_BN: Tensor  # int64, 1 = child of the anchor
    log_probs_BN: Tensor  # fp32, the drafter's own log-probability of the token given its path
    valid_BN: Tensor  # bool
    q: Proposal | None = None  # None = deterministic (one-hot) candidates
    extra: Extra | None = None  # rows that ride along in the verification pass (prompt tokens, lookahead)

    def is_chain(self) -> bool:
        """True when every node's parent is the node before it, in every row."""
        steps_N = torch.arange(self.parents_BN.shape[1], device=self.parents_BN.device)
        return bool((self.parents_BN == steps_N).all())

    def visible(self, depth: int | None = None) -> Tensor:
        """Bool [B, M, M]: [i, j] True iff j is i or an ancestor of i. The anchor (0) is everyone's ancestor, and an
        unused node is seen by nobody but itself. `depth`: no node is deeper; None = the device is asked."""
        b, n = self.tokens_BN.shape
        up_BM = torch.nn.functional.pad(self.parents_BN, (1, 0))
        self_MM = torch.eye(n + 1, dtype=torch.bool, device=up_BM.device)
        see_BMM = self_MM.repeat(b, 1, 1)
        at_BM = up_BM
        for _ in range((int(self.depths_BN.max()) if depth is None else depth) if n else 0):
            see_BMM.scatter_(2, at_BM[:, :, None], True)
            at_BM = up_BM.gather(1, at_BM)
        see_BMM[:, :, 0] = True
        see_BMM[:, :, 1:] &= self.valid_BN[:, None, :]
        return see_BMM | self_MM

    def ancestors(self) -> Tensor:
        """int64 [B, M, ceil(M / 64)]: `visible` packed, bit j % 64 of word j // 64."""
        return pack(self.visible())

    def sibling_ranks(self) -> Tensor:
        """int64 [B, N]: how many valid nodes before this one have the same parent."""
        n = self.parents_BN.shape[1]
        same_BNN = (self.parents_BN[:, :, None] == self.parents_BN[:, None, :]) & self.valid_BN[:, None, :]
        before_NN = torch.ones(n, n, dtype=torch.bool, device=same_BNN.device).tril(-1)
        return (same_BNN & before_NN).sum(-1)


def hang(tree: Tree, counts_BM: Tensor, prompts: Prompts, tokens: int, vocab: int) -> Extra:
    """Prompt rows below the nodes: node m of row b (0 = anchor) gets the first `counts_BM[b, m]` special tokens, all
    members of each, in order of the nodes; `tokens` special tokens per row in all, unused ones invalid. An unused node
    must have count 0. `vocab`: V, where the ids of the drafter's table begin."""
    m, d, n = counts_BM.shape[1], prompts.depths, prompts.members
    device = counts_BM.device
    used_BX = (torch.arange(d, device=device) < counts_BM[:, :, None]).flatten(1)
    order_BG = (~used_BX).int().sort(dim=1, stable=True).indices[:, :tokens]
    valid_BG, node_BG, token_BG = used_BX.gather(1, order_BG), order_BG // d, order_BG % d
    # A token's predecessor, if it has one, stands right before it.
    before_G = m + (torch.arange(order_BG.shape[1], device=device) - 1) * n
    member_n = torch.arange(n, device=device)
    first_BG1 = ((token_BG == 0) | ~valid_BG)[:, :, None]
    parents_BGn = torch.where(first_BG1, torch.where(valid_BG, node_BG, 0)[:, :, None], before_G[:, None] + member_n)
    depths_BM = torch.nn.functional.pad(tree.depths_BN, (1, 0))
    depths_BG = torch.where(valid_BG, depths_BM.gather(1, node_BG) + 1 + token_BG, 1)
    ids_BGn = vocab + token_BG[:, :, None] * n + member_n
    return Extra(
        ids_BGn.flatten(1),
        parents_BGn.flatten(1),
        depths_BG.repeat_interleave(n, 1),
        valid_BG.repeat_interleave(n, 1),
    )
