"""Verifiers: which drafted tokens stay, and which token follows them.

A verifier is two pure parts. `probabilities(tree, p)` gives `Odds`: the chance that a node is accepted once its parent
was accepted and its earlier siblings were not, and the distribution of the next token for a walk that stops at a node.
`choose(tree, odds, coins)` turns them into a path and a token with given uniforms. Both are tested on their own: the
first by enumeration in float64, the second at its break-points (tests/test_verify.py).

Sources: ratio: Leviathan et al. 2211.17192 (Algorithm 1), Chen et al. 2302.01318; sampled siblings: recursive rejection
without replacement, Jeon et al. 2402.14160 (§3) and Sequoia 2402.12374 (Algorithm 2); deterministic siblings: the same
recursion with one-hot proposals (EAGLE's rule); typical: Medusa 2401.10774 (§2.3.1).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from ..losses.probs import draw
from ..models.tree import Tree


@dataclass
class Odds:
    """`accept_BN`: chance of each node, given parent accepted and earlier siblings rejected. `stop_BMV`: distribution
    (not necessarily normalised) of the token that follows a stop at node m; of the greedy rule only its `top_BM`.
    `target_BMV`: the target's own probabilities, where `choose` draws from them."""

    accept_BN: Tensor
    stop_BMV: Tensor | None = None
    top_BM: Tensor | None = None
    target_BMV: Tensor | None = None


@dataclass
class Coins:
    """Uniforms in [0, 1). `target_BM` belongs to the position of the token after node m, whatever the round;
    `accept_BN` and `residual_BM` are fresh in every round."""

    accept_BN: Tensor
    residual_BM: Tensor
    target_BM: Tensor


@dataclass
class Choice:
    """`path_BL`: accepted nodes (j + 1 = node j, ascending), the first `counts_B` of each row; the rest is 0.
    `stop_B`: the last accepted node (0 = anchor). `token_B`: the token that follows. `tested_B`: the walk stopped at a
    node that had children, all of which were rejected."""

    path_BL: Tensor
    counts_B: Tensor
    stop_B: Tensor
    token_B: Tensor
    tested_B: Tensor


@dataclass(frozen=True)
class Verifier:
    """One acceptance rule. `exact`: the committed tokens have the target's own distribution, under `condition`.
    `q`: what it takes as the drafter's proposal: "rows" (drawn from them; their absence is refused), "none" (fixed
    candidates; rows are refused) or "any"."""

    probabilities: Callable[[Tree, Tensor], Odds]
    choose: Callable[[Tree, Odds, Coins | None], Choice]
    exact: bool
    condition: str
    q: str
    trees: bool = True
    greedy_only: bool = False  # takes the target's top ids [B, M] in the place of its probabilities [B, M, V]


def walk(tree: Tree, good_BN: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Descend from the anchor to the first good child, again and again: (path_BL, counts_B, stop_B, tested_B)."""
    b, n = good_BN.shape
    device = good_BN.device
    at_B = torch.zeros(b, dtype=torch.int64, device=device)
    counts_B = torch.zeros_like(at_B)
    steps = []
    if n:
        good_BN = good_BN & tree.valid_BN
        for _ in range(int(tree.depths_BN.max())):
            children_BN = (tree.parents_BN == at_B[:, None]) & good_BN
            moved_B = children_BN.any(1)
            at_B = torch.where(moved_B, children_BN.int().argmax(1) + 1, at_B)
            good_BN = good_BN & moved_B[:, None]  # a row that stopped stays where it is
            steps.append(at_B * moved_B)
            counts_B = counts_B + moved_B
    path_BL = torch.stack(steps, 1) if steps else torch.zeros(b, 0, dtype=torch.int64, device=device)
    tested_B = ((tree.parents_BN == at_B[:, None]) & tree.valid_BN).any(1)
    return path_BL, counts_B, at_B, tested_B


def _of_parent(x_BM: Tensor, tree: Tree) -> Tensor:
    """[B, N, ...] the value of each node's parent."""
    index = tree.parents_BN
    return (
        x_BM.gather(1, index)
        if x_BM.dim() == 2
        else x_BM[torch.arange(index.shape[0], device=index.device)[:, None], index]
    )


def _at(x_BMV: Tensor, node_B: Tensor) -> Tensor:
    return x_BMV[torch.arange(node_B.shape[0], device=node_B.device), node_B]


def greedy_odds(tree: Tree, top_BM: Tensor) -> Odds:
    """A node is accepted iff it is the target's top token after its parent."""
    return Odds((tree.tokens_BN == _of_parent(top_BM, tree)).double(), top_BM=top_BM)


def choose_top(tree: Tree, odds: Odds, coins: Coins | None) -> Choice:
    """No coins: the path of top tokens, then the top token."""
    assert odds.top_BM is not None
    path_BL, counts_B, stop_B, tested_B = walk(tree, odds.accept_BN > 0)
    return Choice(path_BL, counts_B, stop_B, odds.top_BM.gather(1, stop_B[:, None])[:, 0], tested_B)


def rejection_odds(tree: Tree, p_BMV: Tensor) -> Odds:
    """Recursive rejection over siblings, in order of creation: with r = p at first, sibling x is accepted with chance
    min(1, r(x) / q(x)); if not, r <- normalised (r - q)+, and q <- q without x, normalised (drawn without
    replacement), or q as it was (with). Fixed candidates have q = one-hot, for which this is r(x), and r without x.
    """
    r_BMV = p_BMV.clone()
    accept_BN = torch.zeros(tree.tokens_BN.shape, dtype=p_BMV.dtype, device=p_BMV.device)
    if tree.tokens_BN.shape[1] == 0:
        return Odds(accept_BN, r_BMV)
    q = tree.q
    q_BMW = None if q is None else q.rows_BMW.to(p_BMV.dtype).clone()
    ranks_BN = torch.where(tree.valid_BN, tree.sibling_ranks(), -1)
    for rank in range(int(ranks_BN.max()) + 1):
        row_X, node_X = (ranks_BN == rank).nonzero(as_tuple=True)
        parent_X, token_X = tree.parents_BN[row_X, node_X], tree.tokens_BN[row_X, node_X]
        r_XV = r_BMV[row_X, parent_X]
        chance_X = r_XV.gather(1, token_X[:, None])[:, 0]
        less_XV = r_XV.scatter(1, token_X[:, None], 0.0)
        if q is not None and q_BMW is not None:
            column_X = token_X if q.d2t_W is None else torch.searchsorted(q.d2t_W, token_X)
            q_XW = q_BMW[row_X, parent_X]
            share_X = q_XW.gather(1, column_X[:, None])[:, 0]
            ratio_X = torch.where(share_X > 0, chance_X / share_X, 0.0)
            if q.d2t_W is None:
                drawn_XV = r_XV - q_XW
            else:
                drawn_XV = r_XV.index_add(1, q.d2t_W, q_XW, alpha=-1)
            drawn_XV = drawn_XV.clamp(min=0)
            if q.sampled_B is None:
                chance_X, less_XV = ratio_X, drawn_XV
            else:
                sampled_X = q.sampled_B[row_X]
                chance_X = torch.where(sampled_X, ratio_X, chance_X)
                less_XV = torch.where(sampled_X[:, None], drawn_XV, less_XV)
            if not q.replacement:
                q_XW = q_XW.scatter(1, column_X[:, None], 0.0)
                q_BMW[row_X, parent_X] = q_XW / q_XW.sum(-1, keepdim=True).clamp(min=1e-300 if _wide(q_XW) else 1e-38)
        accept_BN[row_X, node_X] = chance_X.clamp(max=1)
        mass_X1 = less_XV.sum(-1, keepdim=True)
        # Nothing left: the coin was certain to accept, but for rounding. Then p itself, which is never wrong by more.
        r_BMV[row_X, parent_X] = torch.where(mass_X1 > 0, less_XV / mass_X1, p_BMV[row_X, parent_X])
    return Odds(accept_BN, r_BMV)


def _wide(x: Tensor) -> bool:
    return x.dtype == torch.float64


def fixed_odds(tree: Tree, p_BMV: Tensor) -> Odds:
    """Rejection over fixed candidates, without touching rows of V per sibling: sibling x is accepted with chance
    p(x) / (1 - mass of its earlier siblings), and the stop is p without the children. A repeated sibling has chance 0.
    """
    b, n = tree.tokens_BN.shape
    stop_BMV = p_BMV.clone()
    if n == 0:
        return Odds(torch.zeros(b, 0, dtype=p_BMV.dtype, device=p_BMV.device), stop_BMV, target_BMV=p_BMV)
    rows_B1 = torch.arange(b, device=p_BMV.device)[:, None]
    before_NN = torch.ones(n, n, dtype=torch.bool, device=p_BMV.device).tril(-1)
    same_BNN = (tree.parents_BN[:, :, None] == tree.parents_BN[:, None, :]) & tree.valid_BN[:, None, :] & before_NN
    repeated_BN = (same_BNN & (tree.tokens_BN[:, :, None] == tree.tokens_BN[:, None, :])).any(-1)
    chance_BN = p_BMV[rows_B1, tree.parents_BN, tree.tokens_BN].masked_fill(~tree.valid_BN | repeated_BN, 0)
    left_BN = 1 - (same_BNN * chance_BN[:, None, :]).sum(-1)
    accept_BN = torch.where(chance_BN > 0, chance_BN / left_BN.clamp(min=torch.finfo(p_BMV.dtype).tiny), 0.0)
    row_X, node_X = tree.valid_BN.nonzero(as_tuple=True)
    stop_BMV[row_X, tree.parents_BN[row_X, node_X], tree.tokens_BN[row_X, node_X]] = 0
    stop_BMV = torch.where(stop_BMV.sum(-1, keepdim=True) > 0, stop_BMV, p_BMV)
    return Odds(accept_BN.clamp(max=1), stop_BMV, target_BMV=p_BMV)


def choose_by_coins(tree: Tree, odds: Odds, coins: Coins | None) -> Choice:
    """A node is accepted iff its coin is strictly below its chance (so chance 0 never is, chance 1 always). The token
    after a full path is a draw of the target's own (`target_BM`), after a rejection one of the residual."""
    assert coins is not None and odds.stop_BMV is not None
    path_BL, counts_B, stop_B, tested_B = walk(tree, coins.accept_BN < odds.accept_BN)
    at_B1 = stop_B[:, None]
    u_B = torch.where(tested_B, coins.residual_BM.gather(1, at_B1)[:, 0], coins.target_BM.gather(1, at_B1)[:, 0])
    return Choice(path_BL, counts_B, stop_B, draw(_at(odds.stop_BMV, stop_B), u_B), tested_B)


def choose_by_match(tree: Tree, odds: Odds, coins: Coins | None) -> Choice:
    """Draw the target's token after every node with the uniform of its position, and follow the nodes that equal it:
    token for token what plain sampling with the same seed gives."""
    assert coins is not None and odds.target_BMV is not None
    b, m, v = odds.target_BMV.shape
    drawn_BM = draw(odds.target_BMV.reshape(b * m, v), coins.target_BM.reshape(-1)).view(b, m)
    return choose_top(tree, greedy_odds(tree, drawn_BM), None)


def typical_odds(tree: Tree, p_BMV: Tensor, epsilon: float = 0.09, delta: float = 0.3) -> Odds:
    """Lossy: accept a token iff p(x) > min(epsilon, delta * exp(-entropy of p)). Defaults: Medusa's llm_judge README."""
    entropy_BM = -(p_BMV * p_BMV.clamp(min=1e-30).log()).sum(-1)
    floor_BM = (delta * torch.exp(-entropy_BM)).clamp(max=epsilon)
    p_BN = _of_parent(p_BMV, tree).gather(2, tree.tokens_BN[:, :, None])[..., 0]
    return Odds((p_BN > _of_parent(floor_BM, tree)).to(p_BMV.dtype), p_BMV)


VERIFIERS = {
    "greedy": Verifier(greedy_odds, choose_top, exact=True, condition="temperature 0", q="any", greedy_only=True),
    "sample_match": Verifier(
        fixed_odds,
        choose_by_match,
        exact=True,
        condition="any drafts; token for token equal to plain sampling with the same seed",
        q="any",
    ),
    "ratio": Verifier(
        rejection_odds,
        choose_by_coins,
        exact=True,
        condition="chains whose tokens were drawn from the rows q that come with them",
        q="rows",
        trees=False,
    ),
    "ratio_tree": Verifier(
        rejection_odds,
        choose_by_coins,
        exact=True,
        condition="siblings drawn from the rows q that come with them, in order of drawing",
        q="rows",
    ),
    "target_only": Verifier(
        fixed_odds,
        choose_by_coins,
        exact=True,
        condition="candidates that depend on no coin (a drafter's top tokens, look-ups); repeats are void",
        q="none",
    ),
    "typical": Verifier(
        typical_odds,
        choose_by_coins,
        exact=False,
        condition="never at temperature > 0: tokens above an entropy-dependent floor are kept",
        q="any",
    ),
}


def resolve(name: str, tree: Tree, hot: bool, allow_lossy: bool) -> str:
    """The verifier to use for a tree (`hot`: some row samples); `auto` picks the exact one with the best acceptance.

    Raises ValueError for an unknown name, and for a rule that does not fit the rows or the proposal.
    """
    if name == "auto":
        if not hot:
            return "greedy"
        return "target_only" if tree.q is None else "ratio" if tree.is_chain() else "ratio_tree"
    if name not in VERIFIERS:
        raise ValueError(f"verifier={name!r}: use auto, {', '.join(VERIFIERS)}")
    verifier = VERIFIERS[name]
    if not verifier.exact and not allow_lossy:
        raise ValueError(f"verifier={name!r} changes the target's distribution: add allow_lossy=true (--allow-lossy)")
    if verifier.greedy_only and hot:
        raise ValueError(f"verifier={name!r} is for temperature 0 only; use auto, sample_match or a ratio rule")
    if verifier.q == "rows" and tree.q is None:
        raise ValueError(f"verifier={name!r} needs the rows q that drafts were drawn from, these are fixed: use auto")
    if verifier.q == "none" and tree.q is not None:
        raise ValueError(f"verifier={name!r} is for fixed candidates, these were drawn: use auto or ratio_tree")
    if not verifier.trees and not tree.is_chain():
        raise ValueError(f"verifier={name!r} is for chains: use auto or ratio_tree")
    return name
