"""Verifiers: which drafted tokens stay, and which token follows them.

A verifier is two pure parts. `probabilities(tree, p)` gives `Odds`: the chance of each node when its turn comes, and the
distribution of the next token for a walk that stops at a node. `choose(tree, odds, coins)` turns them into a path and a
token with given uniforms. There are two orders. Token by token, from the anchor down: a node's turn comes once its parent
was accepted and its earlier siblings were not. By whole paths, from the leaves up (block, traversal): a node's turn comes
once nothing below it and nothing in its earlier siblings' subtrees was kept. Both parts are tested on their own: the
first by enumeration in float64, the second at its break-points (tests/test_verify.py).

Sources: ratio: Leviathan et al. 2211.17192 (Algorithm 1), Chen et al. 2302.01318; sampled siblings: recursive rejection
without replacement, Jeon et al. 2402.14160 (§3) and Sequoia 2402.12374 (Algorithm 2); deterministic siblings: the same
recursion with one-hot proposals (EAGLE's rule); block: Sun et al. 2403.10444 (Algorithm 2); traversal: Weng et al.
2505.12398, derived here anew; typical: Medusa 2401.10774 (§2.3.1); fuzzy: Holsman et al. 2502.20704; entropy: the
uncertainty-dependent tolerance of EARS 2512.13194, with entropy as the measure.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from ..kernels import rng
from ..kernels.verify import Choice as Choice
from ..kernels.verify import Coins as Coins
from ..losses.probs import draw
from ..models.tree import Proposal, Tree


@dataclass
class Odds:
    """`accept_BN`: chance of each node when its turn comes, in the rule's own order. `stop_BMV`: distribution (not
    necessarily normalised) of the token that follows a stop at node m; of the greedy rule only its `top_BM`.
    `target_BMV`: the target's own probabilities, where `choose` draws from them."""

    accept_BN: Tensor
    stop_BMV: Tensor | None = None
    top_BM: Tensor | None = None
    target_BMV: Tensor | None = None


@dataclass(frozen=True)
class Verifier:
    """One acceptance rule. `exact`: the committed tokens have the target's own distribution, under `condition`.
    `q`: what it takes as the drafter's proposal: "rows" (drawn from them; their absence is refused), "none" (fixed
    candidates; rows are refused), "both" (each by its own formula) or "any" (not looked at)."""

    probabilities: Callable[..., Odds]  # of (tree, p_BMV), then its `settings`
    choose: Callable[[Tree, Odds, Coins | None], Choice]
    exact: bool
    condition: str
    q: str
    trees: bool = True
    greedy_only: bool = False  # takes the target's top ids [B, M] in the place of its probabilities [B, M, V]
    settings: tuple[str, ...] = ()  # fields of DecodeConfig that `probabilities` takes beside tree and p

    @property
    def wants_rows(self) -> bool:
        """Whether drafts are to be drawn from the drafter's rows, where a tree allows it."""
        return self.q in ("rows", "both")


def coins_of(seeds_B: Tensor, rounds_B: Tensor, lengths_B: Tensor, depths_BM: Tensor) -> Coins:
    """All the uniforms of a verification, by one call. `lengths_B`: committed slots, that is the anchors' positions."""
    b, m = depths_BM.shape
    # The token after a node at depth d stands at this position; the anchor is the newest committed token.
    at_BM = lengths_B[:, None] + depths_BM + 1
    zero_BM = torch.zeros_like(at_BM)
    round_BM, node_BM = rounds_B[:, None].expand(b, m), torch.arange(m, device=at_BM.device).expand(b, m)
    kinds_3BM = torch.stack([torch.full_like(at_BM, kind) for kind in (rng.ACCEPT, rng.RESIDUAL, rng.TARGET)])
    u_3BM = rng.uniform(
        seeds_B[:, None],
        kinds_3BM,
        torch.stack([zero_BM, zero_BM, at_BM]),
        torch.stack([round_BM, round_BM, zero_BM]),
        torch.stack([node_BM, node_BM, zero_BM]),
    )
    return Coins(u_3BM[0][:, 1:], u_3BM[1], u_3BM[2])


def walk(tree: Tree, good_BN: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Descend from the anchor to the first good child, again and again: (path_BL, counts_B, stop_B, tested_B)."""
    b, n = good_BN.shape
    device = good_BN.device
    at_B = torch.zeros(b, dtype=torch.int64, device=device)
    counts_B = torch.zeros_like(at_B)
    steps = []
    good_BN = good_BN & tree.valid_BN
    if n and tree.is_chain():
        good_BN = good_BN.long().cumprod(1)
        at_B = counts_B = good_BN.sum(1)
        steps = list((good_BN * torch.arange(1, n + 1, device=device)).unbind(1))
    elif n:
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
        q_XW = None if q_BMW is None else q_BMW[row_X, parent_X]
        r_XV = r_BMV[row_X, parent_X]
        accept_BN[row_X, node_X] = _chance(q, q_XW, r_XV, token_X, row_X).clamp(max=1)
        less_XV = _rest(q, q_XW, r_XV, token_X, row_X)
        mass_X1 = less_XV.sum(-1, keepdim=True)
        # Nothing left: the coin was certain to accept, but for rounding. Then p itself, which is never wrong by more.
        r_BMV[row_X, parent_X] = torch.where(mass_X1 > 0, less_XV / mass_X1, p_BMV[row_X, parent_X])
        if q is not None and q_BMW is not None and q_XW is not None and not q.replacement:
            q_BMW[row_X, parent_X] = _without(q, q_XW, token_X)
    return Odds(accept_BN, r_BMV)


def _columns(q: Proposal, token_X: Tensor) -> Tensor:
    return token_X if q.d2t_W is None else torch.searchsorted(q.d2t_W, token_X)


def _chance(q: Proposal | None, q_XW: Tensor | None, m_XV: Tensor, token_X: Tensor, row_X: Tensor) -> Tensor:
    """What a candidate x can take of a measure m over the next token: m(x) / q(x) if it was drawn from q, m(x) if it
    is fixed (q one-hot). Not capped at 1. X rows, `row_X` of the batch."""
    mass_X = m_XV.gather(1, token_X[:, None])[:, 0]
    if q is None or q_XW is None:
        return mass_X
    share_X = q_XW.gather(1, _columns(q, token_X)[:, None])[:, 0]
    ratio_X = torch.where(share_X > 0, mass_X / share_X, 0.0)
    return ratio_X if q.sampled_B is None else torch.where(q.sampled_B[row_X], ratio_X, mass_X)


def _rest(q: Proposal | None, q_XW: Tensor | None, m_XV: Tensor, token_X: Tensor, row_X: Tensor) -> Tensor:
    """What such candidates leave of m [X, V]: (m - q)+, of which fixed ones have the special case m without x."""
    if q is None or q_XW is None:
        return m_XV.scatter(1, token_X[:, None], 0.0)
    drawn_XV = m_XV - q_XW if q.d2t_W is None else m_XV.index_add(1, q.d2t_W, q_XW, alpha=-1)
    drawn_XV = drawn_XV.clamp(min=0)
    if q.sampled_B is None:
        return drawn_XV
    return torch.where(q.sampled_B[row_X][:, None], drawn_XV, m_XV.scatter(1, token_X[:, None], 0.0))


def _without(q: Proposal, q_XW: Tensor, token_X: Tensor) -> Tensor:
    """q after x was drawn and is not put back."""
    q_XW = q_XW.scatter(1, _columns(q, token_X)[:, None], 0.0)
    return q_XW / q_XW.sum(-1, keepdim=True).clamp(min=1e-300 if _wide(q_XW) else 1e-38)


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
    assert coins is not None
    return _choose(tree, odds, coins, coins.accept_BN < odds.accept_BN)


def _choose(tree: Tree, odds: Odds, coins: Coins, good_BN: Tensor) -> Choice:
    assert odds.stop_BMV is not None
    path_BL, counts_B, stop_B, tested_B = walk(tree, good_BN)
    at_B1 = stop_B[:, None]
    u_B = torch.where(tested_B, coins.residual_BM.gather(1, at_B1)[:, 0], coins.target_BM.gather(1, at_B1)[:, 0])
    return Choice(path_BL, counts_B, stop_B, draw(_at(odds.stop_BMV, stop_B), u_B), tested_B)


def _owed(w_X: Tensor, rest_XV: Tensor, p_XV: Tensor) -> tuple[Tensor, Tensor]:
    """(w, p) of a node that owed w p, after a child left `rest_XV` of it and its subtree failed."""
    mass_X = rest_XV.sum(-1)
    left_X = 1 - w_X + mass_X
    w_X = torch.where(left_X > 0, mass_X / left_X, 1.0)
    return w_X, torch.where(mass_X[:, None] > 0, rest_XV / mass_X[:, None], p_XV)


def traversal_odds(tree: Tree, p_BMV: Tensor) -> Odds:
    """By whole paths: `accept_BN` is the chance of a node when its whole subtree failed.

    Let a node be due in a share w of all cases, that is, owe the measure m = w p to its next token. Its first child x,
    drawn from q, becomes due in w_x = min(1, m(x) / q(x)) of them, whatever lies below x. On average over x that pays
    min(m, q). What is left, (m - q)+ of mass r, is owed in the cases where the child's subtree fails, 1 - w + r of all;
    there the node stands before its next child as it stood before the first, with w <- r / (1 - w + r) and
    p <- (m - q)+ / r, whichever token x was. After the last child the node itself is kept with chance w, and its next
    token is a draw of p. By induction from the leaves each subtree pays w times the target's law; the anchor has w = 1.
    Fixed candidates are the case q = one-hot; q of siblings drawn without replacement is q without the earlier ones.
    On a chain this is block verification: w_i = min(1, w_{i-1} p(x_i) / q(x_i)), one update by the only child's rest.

    How many are kept: earlier children are paid first, so let none have a smaller subtree than a later sibling (true of
    chains and of the templates here). Then, for chains and siblings drawn with replacement, never fewer in expectation
    than by `rejection_odds`: the first i siblings keep min(A_i q, w p) of each token, A_i the sum of the cases that
    reach them, and A_i >= w times its value at w = 1. Drawn without replacement a node may lose some thousandths of a
    token against it, and gains tens of them as a rule; both in tests/test_verify.py.
    """
    b, n = tree.tokens_BN.shape
    weight_BM = torch.zeros(b, n + 1, dtype=p_BMV.dtype, device=p_BMV.device)
    weight_BM[:, 0] = 1
    r_BMV = p_BMV.clone()
    if n == 0:
        return Odds(weight_BM[:, 1:], r_BMV)
    q = tree.q
    q_BMW = None if q is None else q.rows_BMW.to(p_BMV.dtype).clone()
    ranks_BN = torch.where(tree.valid_BN, tree.sibling_ranks(), -1)
    for depth in range(1, int(tree.depths_BN.max()) + 1):
        layer_BN = torch.where(tree.depths_BN == depth, ranks_BN, -1)
        for rank in range(int(layer_BN.max()) + 1):
            row_X, node_X = (layer_BN == rank).nonzero(as_tuple=True)
            parent_X, token_X = tree.parents_BN[row_X, node_X], tree.tokens_BN[row_X, node_X]
            q_XW = None if q_BMW is None else q_BMW[row_X, parent_X]
            w_X = weight_BM[row_X, parent_X]
            m_XV = w_X[:, None] * r_BMV[row_X, parent_X]
            weight_BM[row_X, node_X + 1] = _chance(q, q_XW, m_XV, token_X, row_X).clamp(max=1)
            rest_XV = _rest(q, q_XW, m_XV, token_X, row_X)
            weight_BM[row_X, parent_X], r_BMV[row_X, parent_X] = _owed(w_X, rest_XV, p_BMV[row_X, parent_X])
            if q is not None and q_BMW is not None and q_XW is not None and not q.replacement:
                q_BMW[row_X, parent_X] = _without(q, q_XW, token_X)
    return Odds(weight_BM[:, 1:], r_BMV)


def choose_by_paths(tree: Tree, odds: Odds, coins: Coins | None) -> Choice:
    """Children before parents, siblings in order: the first node whose coin is strictly below its chance is the last
    one accepted, or the anchor if there is none. Coins of the next token as in `choose_by_coins`."""
    assert coins is not None
    good_BN = (coins.accept_BN < odds.accept_BN) & tree.valid_BN
    b, n = good_BN.shape
    for _ in range(int(tree.depths_BN.max()) - 1 if n else 0):  # a node is on the way if one below it is good
        below_BM = torch.zeros(b, n + 1, dtype=torch.int64, device=good_BN.device)
        good_BN = good_BN | (below_BM.scatter_add_(1, tree.parents_BN, good_BN.long())[:, 1:] > 0)
    return _choose(tree, odds, coins, good_BN)


def choose_by_match(tree: Tree, odds: Odds, coins: Coins | None) -> Choice:
    """Draw the target's token after every node with the uniform of its position, and follow the nodes that equal it:
    token for token what plain sampling with the same seed gives."""
    assert coins is not None and odds.target_BMV is not None
    b, m, v = odds.target_BMV.shape
    drawn_BM = draw(odds.target_BMV.reshape(b * m, v), coins.target_BM.reshape(-1)).view(b, m)
    return choose_top(tree, greedy_odds(tree, drawn_BM), None)


def _entropy(p_BMV: Tensor) -> Tensor:
    """[B, M] in nats."""
    return -(p_BMV * p_BMV.clamp(min=1e-30).log()).sum(-1)


def _of_token(p_BMV: Tensor, tree: Tree) -> Tensor:
    """[B, N] the target's probability of each node's token."""
    return _of_parent(p_BMV, tree).gather(2, tree.tokens_BN[:, :, None])[..., 0]


def typical_odds(tree: Tree, p_BMV: Tensor, epsilon: float, delta: float) -> Odds:
    """Lossy: accept a token iff p(x) > min(epsilon, delta * exp(-entropy of p))."""
    floor_BM = (delta * torch.exp(-_entropy(p_BMV))).clamp(max=epsilon)
    return Odds((_of_token(p_BMV, tree) > _of_parent(floor_BM, tree)).to(p_BMV.dtype), p_BMV)


def fuzzy_odds(tree: Tree, p_BMV: Tensor, threshold: float) -> Odds:
    """Lossy: where the total variation of p and q is at most `threshold`, the first sibling is accepted if p allows it
    at all; elsewhere, and for its siblings, recursive rejection. So each token's law is within `threshold` of the
    target's in total variation, and threshold 0 is exact. A fixed candidate x has q = one-hot, at distance 1 - p(x).
    (The paper measures KL or Jensen-Shannon; total variation is the distance that the promise is about.)"""
    odds = _by_token(tree, p_BMV)
    far_BN = 1 - _of_token(p_BMV, tree)
    q = tree.q
    if q is not None:
        p_BMW = p_BMV if q.d2t_W is None else p_BMV[..., q.d2t_W]
        drawn_BN = _of_parent(1 - torch.minimum(p_BMW, q.rows_BMW.to(p_BMV.dtype)).sum(-1), tree)
        far_BN = drawn_BN if q.sampled_B is None else torch.where(q.sampled_B[:, None], drawn_BN, far_BN)
    sure_BN = (tree.sibling_ranks() == 0) & (far_BN <= threshold) & (odds.accept_BN > 0)
    return Odds(odds.accept_BN.masked_fill(sure_BN, 1), odds.stop_BMV)


def entropy_odds(tree: Tree, p_BMV: Tensor, tolerance: float) -> Odds:
    """Lossy: recursive rejection, but a token that could be accepted is so with a chance raised by
    tolerance * (1 - exp(-entropy of p)): nothing where the target is sure, `tolerance` at most where it is undecided.
    One candidate moves its token's law by that much in total variation at most; tolerance 0 is exact."""
    odds = _by_token(tree, p_BMV)
    slack_BN = _of_parent(tolerance * -torch.expm1(-_entropy(p_BMV)), tree)
    accept_BN = torch.where(odds.accept_BN > 0, (odds.accept_BN + slack_BN).clamp(max=1), 0.0)
    return Odds(accept_BN, odds.stop_BMV)


def _by_token(tree: Tree, p_BMV: Tensor) -> Odds:
    return (fixed_odds if tree.q is None else rejection_odds)(tree, p_BMV)


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
    "block": Verifier(
        traversal_odds,
        choose_by_paths,
        exact=True,
        condition="chains, drawn from the rows q that come with them or fixed; keeps at least as many as `ratio`",
        q="both",
        trees=False,
    ),
    "traversal": Verifier(
        traversal_odds,
        choose_by_paths,
        exact=True,
        condition="siblings as for `ratio_tree`, or fixed candidates; keeps more where earlier siblings reach further",
        q="both",
    ),
    "typical": Verifier(
        typical_odds,
        choose_by_coins,
        exact=False,
        condition="never at temperature > 0: tokens above an entropy-dependent floor are kept",
        q="any",
        settings=("typical_epsilon", "typical_delta"),
    ),
    "fuzzy": Verifier(
        fuzzy_odds,
        choose_by_coins,
        exact=False,
        condition="each token's law is within fuzzy_threshold of the target's in total variation (0 = exact)",
        q="both",
        settings=("fuzzy_threshold",),
    ),
    "entropy": Verifier(
        entropy_odds,
        choose_by_coins,
        exact=False,
        condition="chances are raised by entropy_tolerance at most, where the target is undecided (0 = exact)",
        q="both",
        settings=("entropy_tolerance",),
    ),
}


def places(name: str, rows: bool) -> Literal["fixed", "target", "kept", "new"]:
    """How proposers that draw are to make candidates for this rule (`auto`: token by token); `rows`: theirs are wanted."""
    rule = None if name == "auto" else VERIFIERS[name]
    if rule is not None and rule.choose is choose_by_match:
        return "target"
    if not rows:
        return "fixed"
    return "new" if rule is not None and rule.choose is choose_by_paths else "kept"


def resolve(name: str, tree: Tree, hot: bool, allow_lossy: bool) -> str:
    """The verifier to use for a tree (`hot`: some row samples); `auto` picks the exact token-by-token rule that fits.

    Raises ValueError for an unknown name, and for a rule that does not fit the rows or the proposal.
    """
    if name == "auto":
        if not hot:
            return "greedy"
        return "target_only" if tree.q is None else "ratio" if tree.is_chain() else "ratio_tree"
    refuse_misfit(name, allow_lossy, hot, tree.q is not None, tree.is_chain())
    return name


def refuse_misfit(
    name: str, allow_lossy: bool, hot: bool | None = None, drawn: bool | None = None, chain: bool | None = None
) -> None:
    """ValueError where a rule does not fit what is known so far (None = not yet): whether some row samples, whether the
    candidates are drawn from rows q, whether they are a chain. `auto` always fits."""
    if name == "auto":
        return
    if name not in VERIFIERS:
        raise ValueError(f"verifier={name!r}: use auto, {', '.join(VERIFIERS)}")
    verifier = VERIFIERS[name]
    if not verifier.exact and not allow_lossy:
        raise ValueError(f"verifier={name!r} changes the target's distribution: add allow_lossy=true (--allow-lossy)")
    if verifier.greedy_only and hot:
        raise ValueError(f"verifier={name!r} is for temperature 0 only; use auto, sample_match or a ratio rule")
    if verifier.q == "rows" and drawn is False:
        raise ValueError(f"verifier={name!r} needs the rows q that drafts were drawn from, these are fixed: use auto")
    if verifier.q == "none" and drawn:
        raise ValueError(f"verifier={name!r} is for fixed candidates, these were drawn: use auto or ratio_tree")
    if not verifier.trees and chain is False:
        raise ValueError(f"verifier={name!r} is for chains: use auto, ratio_tree or traversal")
