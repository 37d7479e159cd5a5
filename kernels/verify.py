"""Verification on the device: from the target's logits to the accepted path and the next token, in one launch.

The rules of inference/verify.py that need no more than the rows which the walk comes to. One program per request goes
from the anchor down; at each node it takes maximum, total and, where the rule asks, a draw of that node's row, and looks
at the children. Rows off the path are never read, and nothing of size M x V is written. Uniforms are inputs.

    target_only    fixed candidates, trees: sibling x has chance p(x) / (1 - mass of its earlier siblings)
    ratio          chains drawn from rows q: min(1, p(x) / q(x)), then (p - q)+   (Leviathan et al. 2211.17192)
    sample_match   any candidates: draw the target's token with the uniform of its position, follow the node that equals it

Temperature 0 is p = one-hot of the first maximum, under which each rule is the greedy one; rows of both kinds mix in a
batch. Not here, since they look at siblings' residual rows or at rows off the path: `ratio_tree`, `block`, `traversal`;
and the lossy ones. Truncated sampling (top-k, top-p) is -inf in the logits.

p, chances and draws are computed in the logits' dtype, at least fp32. A token of probability 0 is neither accepted nor
drawn: coins must be strictly below the chance, and uniforms are below 1.

Test: pytest tests/test_kernels.py -k verify; pytest tests/test_tree_kernels.py
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from .jit import Build, jit, runs_on, tl
from .rng import draw

RULES = ("target_only", "ratio", "sample_match")

_BLOCK, _WARPS = 1024, 8  # ids that are looked at together, and the warps that do it


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
class Candidates:
    """What is to be verified: the fields of `Tree` (models/tree.py) that verification reads, ids below V."""

    tokens_BN: Tensor
    parents_BN: Tensor
    valid_BN: Tensor
    depth: int
    """Longest path that may be accepted, known on the host; the tree's depth, or less."""
    q_BMW: Tensor | None = None
    """Of `ratio`: the row that the child of node m was drawn from, in draft ids."""
    columns_V: Tensor | None = None
    """The draft id of each target id, -1 = none (`columns`). None = the same ids."""
    sampled_B: Tensor | None = None
    """False: this row's candidates are fixed, whatever q says. None = all are drawn."""


def columns(d2t_W: Tensor, vocab: int) -> Tensor:
    """int64 [V] the draft id of each target id, -1 = none; from the target id of each draft id."""
    none_V = torch.full((vocab,), -1, dtype=torch.int64, device=d2t_W.device)
    return none_V.scatter(0, d2t_W, torch.arange(len(d2t_W), device=d2t_W.device))


def reference(rule: str, logits_BMV: Tensor, temperature_B: Tensor, candidates: Candidates, coins: Coins) -> Choice:
    """As `verify`, by way of all rows, without asking the device for anything."""
    c, (b, n) = candidates, candidates.tokens_BN.shape
    device, parents_BN = logits_BMV.device, candidates.parents_BN
    rows_B, index_N = torch.arange(b, device=device), torch.arange(n, device=device)
    x_BMV = logits_BMV if logits_BMV.dtype == torch.float64 else logits_BMV.float()
    hot_B11 = (temperature_B > 0)[:, None, None]
    p_BMV = (x_BMV / torch.where(hot_B11, temperature_B[:, None, None], 1).to(x_BMV.dtype)).softmax(-1)
    top_BMV = torch.zeros_like(p_BMV).scatter(2, x_BMV.argmax(-1, keepdim=True), 1)
    p_BMV = torch.where(hot_B11, p_BMV, top_BMV)
    valid_BN = c.valid_BN & (parents_BN == index_N) if rule == "ratio" else c.valid_BN
    drawn_BM = draw(p_BMV.flatten(0, 1), coins.target_BM.flatten()).view(b, n + 1)
    fixed_BN = p_BMV[rows_B[:, None], parents_BN, c.tokens_BN]
    q_BMV = torch.zeros_like(p_BMV)
    fixed_B = torch.ones(b, dtype=torch.bool, device=device)
    if rule == "sample_match":
        good_BN = c.tokens_BN == drawn_BM.gather(1, parents_BN)
    else:
        before_NN = torch.ones(n, n, dtype=torch.bool, device=device).tril(-1)
        same_BNN = (parents_BN[:, :, None] == parents_BN[:, None, :]) & valid_BN[:, None, :] & before_NN
        repeated_BN = (same_BNN & (c.tokens_BN[:, :, None] == c.tokens_BN[:, None, :])).any(-1)
        fixed_BN = fixed_BN.masked_fill(~valid_BN | repeated_BN, 0)
        left_BN = 1 - (same_BNN * fixed_BN[:, None, :]).sum(-1)
        chance_BN = fixed_BN / left_BN.clamp(min=torch.finfo(x_BMV.dtype).tiny)
        if rule == "ratio":
            assert c.q_BMW is not None
            fixed_B = ~fixed_B if c.sampled_B is None else ~c.sampled_B
            q_BMV = c.q_BMW.to(x_BMV.dtype)
            if c.columns_V is not None:
                q_BMV = torch.where(c.columns_V >= 0, q_BMV[..., c.columns_V.clamp(min=0)], 0)
            share_BN = q_BMV[rows_B[:, None], parents_BN, c.tokens_BN]
            ratio_BN = torch.where(share_BN > 0, fixed_BN / share_BN, 0)
            chance_BN = torch.where(fixed_B[:, None], chance_BN, ratio_BN)
        good_BN = coins.accept_BN < chance_BN.clamp(max=1)
    good_BN = good_BN & valid_BN
    at_B, moved_B = torch.zeros_like(rows_B), torch.ones_like(fixed_B)
    path_BL = torch.zeros(b, c.depth, dtype=torch.int64, device=device)
    for step in range(c.depth if n else 0):
        children_BN = (parents_BN == at_B[:, None]) & good_BN & moved_B[:, None]
        moved_B = children_BN.any(1)
        at_B = torch.where(moved_B, children_BN.int().argmax(1) + 1, at_B)
        path_BL[:, step] = at_B * moved_B
    counts_B = (path_BL > 0).sum(1)
    below_BN = (parents_BN == at_B[:, None]) & valid_BN & (counts_B < c.depth)[:, None]
    tested_B = below_BN.any(1)
    if rule == "sample_match":
        return Choice(path_BL, counts_B, at_B, drawn_BM[rows_B, at_B], tested_B)
    p_BV = p_BMV[rows_B, at_B]
    none_BV = torch.ones_like(p_BV).scatter_reduce(1, c.tokens_BN, (~below_BN).to(p_BV.dtype), "amin")
    rest_BV = torch.where(fixed_B[:, None], p_BV * none_BV, (p_BV - q_BMV[rows_B, at_B]).clamp(min=0))
    # Nothing left: the coin was certain to accept, but for rounding. Then p itself, which is never wrong by more.
    some_B = tested_B & (rest_BV.sum(1) > 0)
    u_B = torch.where(tested_B, coins.residual_BM[rows_B, at_B], coins.target_BM[rows_B, at_B])
    token_B = draw(torch.where(some_B[:, None], rest_BV, p_BV), u_B)
    return Choice(path_BL, counts_B, at_B, token_B, tested_B)


def verify(rule: str, logits_BMV: Tensor, temperature_B: Tensor, candidates: Candidates, coins: Coins) -> Choice:
    """Walk each request's candidates by one of `RULES`. `logits_BMV[b, m]`: the target's after node m (0 = anchor),
    -inf where sampling is truncated; `temperature_B` float, 0 = greedy. `ratio` looks at node j below node j - 1 only.

    Raises ValueError for another rule, for `ratio` without q, and for shapes that do not fit.
    """
    c, (b, n) = candidates, candidates.tokens_BN.shape
    if rule not in RULES:
        raise ValueError(f"rule={rule!r} does not run on the device: use {', '.join(RULES)}, or inference/verify.py")
    if rule == "ratio" and c.q_BMW is None:
        raise ValueError("rule='ratio' needs the rows q that drafts were drawn from, these are fixed: use target_only")
    if logits_BMV.shape[:2] != (b, n + 1):
        raise ValueError(
            f"logits of shape {tuple(logits_BMV.shape)} for {b} x {n} nodes: one row per node and the anchor"
        )
    if not runs_on(logits_BMV, c.tokens_BN):
        return reference(rule, logits_BMV, temperature_B, candidates, coins)
    logits_BMV = logits_BMV if logits_BMV.stride(2) == 1 else logits_BMV.contiguous()
    q_BMW = c.q_BMW.contiguous() if rule == "ratio" and c.q_BMW is not None else None
    path_BL = torch.zeros(b, c.depth, dtype=torch.int64, device=logits_BMV.device)
    counts_B, stop_B, token_B, tested_B = torch.zeros(4, b, dtype=torch.int64, device=logits_BMV.device)
    v = logits_BMV.shape[2]
    _walk[(b,)](
        logits_BMV,
        temperature_B.double().contiguous(),
        c.tokens_BN.contiguous(),
        torch.where(c.valid_BN, c.parents_BN, -1).contiguous(),
        coins.accept_BN.double().contiguous(),
        coins.residual_BM.double().contiguous(),
        coins.target_BM.double().contiguous(),
        q_BMW,
        None if q_BMW is None or c.columns_V is None else c.columns_V.contiguous(),
        None if q_BMW is None or c.sampled_B is None else c.sampled_B.long().contiguous(),
        path_BL,
        counts_B,
        stop_B,
        token_B,
        tested_B,
        v,
        n,
        c.depth,
        v if q_BMW is None else q_BMW.shape[2],
        *logits_BMV.stride()[:2],
        RULE=RULES.index(rule),
        WIDE=logits_BMV.dtype == torch.float64,
        BV=_BLOCK,
        BN=max(16, 1 << max(n - 1, 0).bit_length()),
        num_warps=_WARPS,
    )
    return Choice(path_BL, counts_B, stop_B, token_B, tested_B.bool())


@jit
def _scores(row, at_V, V, heat, WIDE: tl.constexpr):
    """Logits over temperature; -inf beyond the vocabulary."""
    x_V = tl.load(row + at_V, at_V < V, float("-inf"))
    x_V = x_V.to(tl.float64) if WIDE else x_V.to(tl.float32)
    return x_V / heat


@jit
def _statistics(row, V, heat, WIDE: tl.constexpr, BV: tl.constexpr):
    """(maximum, sum of exp(x - maximum), the first id of the maximum) of one row."""
    top = tl.full((), float("-inf"), tl.float64 if WIDE else tl.float32)
    total = tl.full((), 0.0, tl.float64 if WIDE else tl.float32)
    best = tl.full((), 0, tl.int32)
    for lo in range(0, V, BV):
        at_V = lo + tl.arange(0, BV)
        x_V = _scores(row, at_V, V, heat, WIDE)
        high = tl.max(x_V, 0)
        best = tl.where(high > top, tl.min(tl.where(x_V == high, at_V, V), 0), best)
        new = tl.maximum(top, high)
        base = tl.where(new == float("-inf"), 0.0, new)
        total = total * tl.exp(top - base) + tl.sum(tl.exp(x_V - base), 0)
        top = new
    return top, total, best


@jit
def _share(x, at, top, total, best, cold):
    """Probability of ids with scores x; at temperature 0 all of it is the best one's."""
    p = tl.exp(x - top) / total
    return tl.where(cold != 0, tl.where(at == best, 1.0, 0.0).to(p.dtype), p)


@jit
def _following(below_N, index_N, after, N):
    """The first child behind node `after`, N if there is none."""
    return tl.min(tl.where(below_N & (index_N > after), index_N, N), 0)


@jit
def _rest(
    row, q_row, columns, tokens, at_V, below_N, index_N, top, total, best, heat, cold, V, N, rest, drawn,
    RATIO: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    """Mass of each id: p, or what the rejected children left of it where `rest`."""
    w_V = _share(_scores(row, at_V, V, heat, WIDE), at_V, top, total, best, cold)
    w_V = tl.where(at_V < V, w_V, 0.0)
    if rest != 0:
        if drawn != 0:
            if RATIO:
                column_V = at_V
                if columns is not None:
                    column_V = tl.load(columns + at_V, at_V < V, -1).to(tl.int32)
                q_V = tl.load(q_row + column_V, (at_V < V) & (column_V >= 0), 0.0).to(w_V.dtype)
                w_V = tl.maximum(w_V - q_V, 0.0)
        else:
            child = _following(below_N, index_N, -1, N)
            while child < N:
                w_V = tl.where(at_V == tl.load(tokens + child), 0.0, w_V)
                child = _following(below_N, index_N, child, N)
    return w_V


@jit
def _draw(
    row, q_row, columns, tokens, below_N, index_N, u, top, total, best, heat, cold, V, N, rest, drawn,
    RATIO: tl.constexpr, WIDE: tl.constexpr, BV: tl.constexpr,
):  # fmt: skip
    """The first id whose cumulated mass exceeds u times all of it; rounding apart, the last one of positive mass."""
    mass = tl.full((), 1.0, tl.float64)
    if rest != 0:
        mass = tl.full((), 0.0, tl.float64)
        for lo in range(0, V, BV):
            w_V = _rest(
                row, q_row, columns, tokens, lo + tl.arange(0, BV), below_N, index_N, top, total, best, heat, cold, V, N,
                rest, drawn, RATIO, WIDE,
            )  # fmt: skip
            mass += tl.sum(w_V, 0).to(tl.float64)
        # Nothing left: the coin was certain to accept, but for rounding. Then p itself, which is never wrong by more.
        rest = tl.where(mass > 0, rest, 0)
        mass = tl.where(mass > 0, mass, 1.0)
    found = tl.full((), -1, tl.int32)
    last = best
    before = tl.full((), 0.0, tl.float64)
    lo = tl.full((), 0, tl.int32)
    while (lo < V) & (found < 0):
        at_V = lo + tl.arange(0, BV)
        w_V = _rest(
            row, q_row, columns, tokens, at_V, below_N, index_N, top, total, best, heat, cold, V, N, rest, drawn,
            RATIO, WIDE,
        )  # fmt: skip
        # What is still to be exceeded, in the masses' own type: half the registers of sums in float64.
        goal = (u * mass - before).to(w_V.dtype)
        sums_V = tl.cumsum(w_V, 0)
        first = tl.min(tl.where((sums_V > goal) & (w_V > 0), at_V, V), 0)
        found = tl.where(first < V, first, found)
        end = tl.max(tl.where(w_V > 0, at_V, -1), 0)
        last = tl.where(end >= 0, end, last)
        before += tl.max(sums_V, 0).to(tl.float64)
        lo += BV
    return tl.where(found >= 0, found, last)


@jit
def _walk(
    logits,
    temperature,
    tokens,
    parents,
    accept,
    residual,
    target,
    q,
    columns,
    sampled,
    path,
    counts,
    stop,
    token,
    tested,
    V,
    N,
    L,
    W,
    logits_b,
    logits_m,
    RULE: tl.constexpr,
    WIDE: tl.constexpr,
    BV: tl.constexpr,
    BN: tl.constexpr,
):
    """One request: down to the first good child, again and again, and the token that follows."""
    RATIO: tl.constexpr = RULE == 1
    b = tl.program_id(0).to(tl.int64)
    heat = tl.load(temperature + b)
    cold = (heat <= 0).to(tl.int32)
    heat = tl.where(cold != 0, 1.0, heat)
    if not WIDE:
        heat = heat.to(tl.float32)
    index_N = tl.arange(0, BN)
    parent_N = tl.load(parents + b * N + index_N, index_N < N, -1).to(tl.int32)
    token_N = tl.load(tokens + b * N + index_N, index_N < N, -1).to(tl.int32)
    drawn = tl.full((), 0, tl.int32)
    if RATIO:
        drawn = tl.full((), 1, tl.int32)
        if sampled is not None:
            drawn = tl.load(sampled + b).to(tl.int32)
    at = tl.full((), 0, tl.int32)
    step = tl.full((), 0, tl.int32)
    last = tl.full((), 0, tl.int32)
    going = tl.full((), 1, tl.int32)
    top = tl.full((), 0.0, tl.float64 if WIDE else tl.float32)
    total = tl.full((), 0.0, tl.float64 if WIDE else tl.float32)
    best = tl.full((), 0, tl.int32)
    # A child comes after its parent, so this ends after N + 1 rounds whatever the inputs hold.
    while going != 0:
        row = logits + b * logits_b + at * logits_m
        top, total, best = _statistics(row, V, heat, WIDE, BV)
        below_N = (parent_N == tl.where(step < L, at, -2)) & (index_N >= at)
        if RATIO:
            below_N = below_N & (index_N == at)
        chosen = N + tl.full((), 0, tl.int32)
        if RULE == 2:
            last = best
            if cold == 0:
                u = tl.load(target + b * (N + 1) + at)
                last = _draw(
                    row, q, columns, tokens, below_N, index_N, u, top, total, best, heat, cold, V, N, 0, 0,
                    False, WIDE, BV,
                )  # fmt: skip
            chosen = _following(below_N & (token_N == last), index_N, -1, N)
        else:
            taken = tl.full((), 0.0, tl.float64 if WIDE else tl.float32)
            child = _following(below_N, index_N, -1, N)
            while child < N:
                own = tl.load(tokens + b * N + child).to(tl.int32)
                twice = tl.max(tl.where(below_N & (index_N < child) & (token_N == own), 1, 0), 0)
                p = _share(_scores(row, own, V, heat, WIDE), own, top, total, best, cold)
                p = tl.where(twice != 0, 0.0, p)
                chance = tl.where(p > 0, p / tl.maximum(1 - taken, 1.2e-38), 0.0)
                if RATIO:  # noqa: SIM102 (decided when compiled)
                    if drawn != 0:
                        column = own
                        if columns is not None:
                            column = tl.load(columns + own).to(tl.int32)
                        row_q = q + (b * (N + 1) + at) * W
                        share = tl.load(row_q + column, column >= 0, 0.0).to(p.dtype)
                        chance = tl.where(share > 0, p / tl.where(share > 0, share, 1.0), 0.0)
                hit = tl.load(accept + b * N + child) < tl.minimum(chance, 1.0)
                chosen = tl.where(hit, child, chosen)
                taken += p
                child = tl.where(hit, N, _following(below_N, index_N, child, N))
        going = (chosen < N).to(tl.int32)
        if going != 0:
            tl.store(path + b * L + step, (chosen + 1).to(tl.int64))
            step += 1
            at = chosen + 1
    below_N = (parent_N == tl.where(step < L, at, -2)) & (index_N >= at)
    if RATIO:
        below_N = below_N & (index_N == at)
    rejected = tl.max(tl.where(below_N, 1, 0), 0)
    if RULE != 2:
        last = best
        if cold == 0:
            u_at = b * (N + 1) + at
            u = tl.where(rejected != 0, tl.load(residual + u_at), tl.load(target + u_at))
            row = logits + b * logits_b + at * logits_m
            q_row = q
            if RATIO:
                q_row = q + u_at * W
            last = _draw(
                row, q_row, columns, tokens + b * N, below_N, index_N, u, top, total, best, heat, cold, V, N, rejected,
                drawn, RATIO, WIDE, BV,
            )  # fmt: skip
    tl.store(counts + b, step.to(tl.int64))
    tl.store(stop + b, at.to(tl.int64))
    tl.store(token + b, last.to(tl.int64))
    tl.store(tested + b, rejected.to(tl.int64))


def _build(rule: str, logits: str, nodes: int, mapped: bool = False, **ones: int) -> Build:
    """`ones`: sizes that are 1 are compiled in."""
    given = {"q": "*fp32"} if rule == "ratio" else {}
    given |= {"columns": "*i64", "sampled": "*i64"} if mapped else {}
    types = {"logits": logits} | dict.fromkeys(("temperature", "accept", "residual", "target"), "*fp64") | given
    types |= dict.fromkeys(("tokens", "parents", "path", "counts", "stop", "token", "tested"), "*i64")
    types |= dict.fromkeys({"V", "N", "L", "W", "logits_b", "logits_m"} - set(ones), "i32")
    constants = dict.fromkeys({"q", "columns", "sampled"} - set(given)) | {"RULE": RULES.index(rule)} | ones
    return Build(_walk, types, constants | {"WIDE": logits == "*fp64", "BV": _BLOCK, "BN": nodes}, warps=_WARPS)


BUILDS = (
    _build("target_only", "*bf16", 64),
    _build("target_only", "*fp64", 16),
    _build("ratio", "*fp32", 16, mapped=True, N=1, L=1),
    _build("sample_match", "*fp32", 64),
)
