"""Tree builders: from a drafter's levels to a draft tree.

- `chain`: K tokens in a row.
- `static`: a fixed template of choices, as of Medusa 2401.10774 (§2.1.2): `(0, 2)` is the third most likely child of the
  most likely first token. Cut to the depths that the drafter has.
- `dynamic`: EAGLE-2 2406.16858 (§4): in every layer the `width` best nodes by cumulative log-probability get `width`
  children each; of all candidates the `nodes` best stay. Cumulative log-probability cannot rise along a path, so these
  form a connected tree.

Where requests sample and the siblings are to be drawn (chains, static), each sibling is drawn without replacement from
the drafter's probabilities, which go through the same `probs` as the target's, and these rows travel with the tree as
`q`. The shape of such a tree depends on no drawn token's siblings, which the rejection rule needs; dynamic trees pick
among siblings, so their candidates are the drafter's top tokens and `q` is None. Tests: tests/test_trees.py.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from ..kernels import rng
from ..losses.probs import History, ParamRows, adjust, draw, probs
from ..models.drafter import Level
from ..models.tree import Proposal, Tree

Choices = tuple[tuple[int, ...], ...]

# Chance that the r-th best candidate is the right one, given that its parent is: the shape of a typical drafter's
# ranks. The default template takes the nodes with the largest product along the path.
_RANKS = (0.55, 0.14, 0.07, 0.045, 0.03, 0.022, 0.017, 0.013, 0.01, 0.008)


def default_choices(depth: int, width: int, nodes: int) -> Choices:
    """The template of at most `nodes` nodes that is best for a typical drafter."""
    ranks = _RANKS[:width]
    best: list[tuple[float, tuple[int, ...]]] = []
    frontier: list[tuple[float, tuple[int, ...]]] = [(1.0, ())]
    for _ in range(depth):
        frontier = [(chance * p, (*path, r)) for chance, path in frontier for r, p in enumerate(ranks)]
        frontier = sorted(frontier, key=lambda x: (-x[0], x[1]))[:nodes]
        best += frontier
    best.sort(key=lambda x: (-x[0], len(x[1]), x[1]))
    return tuple(sorted((path for _, path in best[:nodes]), key=lambda path: (len(path), path)))


def check_choices(choices: Sequence[Sequence[int]]) -> Choices:
    """The template sorted by depth. Raises ValueError naming an entry that is empty, negative, repeated, or whose
    parent or preceding sibling is missing."""
    paths = [tuple(int(r) for r in path) for path in choices]
    known = set(paths)
    if not paths:
        raise ValueError("choices=[]: a static tree needs at least one path, for example [[0], [1], [0, 0]]")
    for path in paths:
        if not path or min(path) < 0:
            raise ValueError(f"choices: entry {list(path)} must be a non-empty path of ranks >= 0")
        if paths.count(path) > 1:
            raise ValueError(f"choices: entry {list(path)} stands {paths.count(path)} times")
        if len(path) > 1 and path[:-1] not in known:
            raise ValueError(f"choices: entry {list(path)} has no parent {list(path[:-1])} in the template; add it")
        if path[-1] > 0 and (*path[:-1], path[-1] - 1) not in known:
            before = [*path[:-1], path[-1] - 1]
            raise ValueError(f"choices: entry {list(path)} has no preceding sibling {before} in the template; add it")
    return tuple(sorted(known, key=lambda path: (len(path), path)))


@dataclass(frozen=True)
class Plan:
    """What a builder builds: at most `depth` levels; `choices` for static trees, `width` and `nodes` for dynamic."""

    tree: str
    depth: int
    width: int
    nodes: int
    choices: Choices = ()

    @staticmethod
    def make(
        tree: str,
        k: int,
        width: int,
        nodes: int,
        choices: Sequence[Sequence[int]] | None,
        limit: int | None,
        vocab: int,
    ) -> Plan:
        """Fit the wish to the drafter: `limit` = its depths (None = any), `vocab` = its vocabulary."""
        if tree not in TREES:
            raise ValueError(f"tree={tree!r}: use one of {', '.join(TREES)}")
        depth = k if limit is None else min(k, limit)
        width = min(width, vocab)
        if tree == "chain":
            return Plan(tree, depth, 1, depth)
        if tree == "dynamic":
            return Plan(tree, depth, width, min(nodes, width + (depth - 1) * width * width))
        if choices is None:
            wanted = default_choices(depth, width, nodes)
        else:
            deepest = limit if limit is not None else max((len(path) for path in choices), default=0)
            wanted = tuple(p for p in check_choices(choices) if len(p) <= deepest and max(p) < vocab)
        return Plan(tree, max(map(len, wanted)), 1 + max(map(max, wanted)), len(wanted), wanted)

    @cached_property
    def layers(self) -> list[Layer]:
        """The template by depth."""
        index: dict[tuple[int, ...], int] = {(): 0} | {path: i + 1 for i, path in enumerate(self.choices)}
        layers: list[Layer] = []
        expanded: dict[tuple[int, ...], int] = {(): 0}
        for depth in range(1, self.depth + 1):
            paths = [p for p in self.choices if len(p) == depth]
            parents = sorted({p[:-1] for p in paths})
            layers.append(
                Layer(
                    expand=torch.tensor([index[p] for p in parents]),
                    above=torch.tensor([expanded[p[:-1]] for p in parents]),
                    slot=torch.tensor([parents.index(p[:-1]) for p in paths]),
                    rank=torch.tensor([p[-1] for p in paths]),
                    parent=torch.tensor([index[p[:-1]] for p in paths]),
                    width=1 + max(p[-1] for p in paths),
                )
            )
            if depth > 1:
                expanded |= {p: len(expanded) + i for i, p in enumerate(parents)}
        return layers


@dataclass(frozen=True)
class Layer:
    """One depth of a template. `expand`: the nodes that get children here (0 = anchor); `above`: the drafter's index of
    each one's parent among the nodes it has been asked to extend; per child its parent's slot in `expand`, its rank,
    its parent's node; `width`: children per parent, at most."""

    expand: Tensor
    above: Tensor
    slot: Tensor
    rank: Tensor
    parent: Tensor
    width: int


@dataclass
class Draft:
    """What a builder knows of the requests: parameters for drafting, penalties and bans along a path, random numbers.

    `history(depths_BR, tokens_BJ, see_BRJ)` gives the `History` of B * R rows, each a node at a depth whose path holds
    those of the drafted tokens J that it sees; None where no row penalises.
    """

    params: ParamRows
    history: Callable[[Tensor, Tensor | None, Tensor | None], History]
    sampled: bool  # siblings are drawn in rows with temperature > 0
    seeds_B: Tensor
    rounds_B: Tensor

    def uniforms(self, nodes_N: Tensor) -> Tensor:
        """[B, N] the drafting coins of nodes (j + 1 = node j)."""
        return rng.uniform(self.seeds_B[:, None], rng.DRAFT, 0, self.rounds_B[:, None], nodes_N)


def _pick(
    draft: Draft, logits_BRW: Tensor, d2t_W: Tensor | None, history: History, n: int, coins_BRn: Tensor | None
) -> tuple[Tensor, Tensor, Tensor | None]:
    """The `n` candidates of each of R parents: draft ids and log-probabilities [B, R, n], and the rows q [B, R, W] if
    they were drawn. A candidate that does not exist has log-probability -inf."""
    b, r, w = logits_BRW.shape
    rows = draft.params.repeat(r)
    flat_XW = logits_BRW.reshape(b * r, w)
    x_XW = adjust(flat_XW, rows, history, d2t_W)
    x_XW = x_XW if x_XW.dtype == torch.float64 else x_XW.float()
    if n == 1:
        best_Xn, ids_Xn = x_XW.max(-1, keepdim=True)
    else:
        best_Xn, ids_Xn = x_XW.topk(n, dim=-1)
    log_probs_Xn = best_Xn - x_XW.logsumexp(-1, keepdim=True)
    if bool(log_probs_Xn.isnan().any()) and bool(flat_XW.isnan().any()):
        raise ValueError("the drafter's logits hold NaN: its weights or its inputs are broken; check the export")
    log_probs_Xn = log_probs_Xn.masked_fill(best_Xn == float("-inf"), float("-inf"))
    q_XW = None
    if coins_BRn is not None:
        q_XW = probs(flat_XW, rows, history, d2t_W)
        left_XW = q_XW
        drawn, chance = [], []
        for i in range(n):
            id_X1 = draw(left_XW, coins_BRn[:, :, i].reshape(-1))[:, None]
            drawn.append(id_X1)
            chance.append(torch.where(left_XW.gather(1, id_X1) > 0, q_XW.gather(1, id_X1).log(), float("-inf")))
            left_XW = left_XW.scatter(1, id_X1, 0.0)
        hot_X1 = rows.temperature_R[:, None] > 0
        ids_Xn = torch.where(hot_X1, torch.cat(drawn, 1), ids_Xn)
        log_probs_Xn = torch.where(hot_X1, torch.cat(chance, 1).to(log_probs_Xn.dtype), log_probs_Xn)
    shape = (b, r, n)
    return ids_Xn.view(shape), log_probs_Xn.view(shape), None if q_XW is None else q_XW.view(b, r, w)


def _tree(
    tokens_BN: Tensor, parents_BN: Tensor, depths_BN: Tensor, log_probs_BN: Tensor, valid_BN: Tensor, q: Proposal | None
) -> Tree:
    return Tree(tokens_BN, parents_BN, depths_BN, log_probs_BN, valid_BN & (log_probs_BN > float("-inf")), q)


def _partial(tokens: list[Tensor], parents: list[Tensor], depths: list[Tensor], valid: list[Tensor]) -> Tree:
    tokens_BN = torch.cat(tokens, 1)
    return Tree(tokens_BN, torch.cat(parents, 1), torch.cat(depths, 1), tokens_BN.float(), torch.cat(valid, 1))


def _ids(d2t_W: Tensor | None, draft_ids: Tensor) -> Tensor:
    return draft_ids if d2t_W is None else d2t_W[draft_ids]


def build_chain(drafter: Any, state: Any, level: Level, draft: Draft, plan: Plan) -> tuple[Any, Tree]:
    """K tokens in a row, each the drafter's best (or drawn) after the ones before."""
    b, device, d2t_W = level.logits_BNW.shape[0], level.logits_BNW.device, drafter.d2t_W
    steps_K = torch.arange(plan.depth, device=device)
    coins_BK = draft.uniforms(steps_K + 1) if draft.sampled else None
    tokens: list[Tensor] = []
    log_probs, valid, rows = [], [], []
    alive_B1 = torch.ones(b, 1, dtype=torch.bool, device=device)
    for d in range(plan.depth):
        at = d if drafter.parallel > 1 else 0
        if d and drafter.parallel == 1:
            state, level = drafter.extend(state, tokens[-1], steps_K[d - 1 : d].expand(b, 1))
        path_BJ = torch.cat(tokens, 1) if tokens and draft.params.penalises else None
        see_BRJ = None if path_BJ is None else torch.ones(b, 1, d, dtype=torch.bool, device=device)
        history = draft.history(steps_K[d : d + 1].expand(b, 1), path_BJ, see_BRJ)
        coins_B11 = None if coins_BK is None else coins_BK[:, d, None, None]
        ids_B11, log_B11, q_B1W = _pick(draft, level.logits_BNW[:, at : at + 1], d2t_W, history, 1, coins_B11)
        alive_B1 = alive_B1 & level.valid_BN[:, at : at + 1] & (log_B11[:, :, 0] > float("-inf"))
        tokens.append(_ids(d2t_W, ids_B11[:, :, 0]))
        log_probs.append(log_B11[:, :, 0])
        valid.append(alive_B1)
        if q_B1W is not None:
            rows.append(q_B1W)
    q = None
    if rows:
        q = Proposal(torch.cat([*rows, torch.zeros_like(rows[0])], 1), d2t_W, replacement=False)
    parents_BK = steps_K.expand(b, -1)
    return state, _tree(
        torch.cat(tokens, 1), parents_BK, parents_BK + 1, torch.cat(log_probs, 1), torch.cat(valid, 1), q
    )


def build_static(drafter: Any, state: Any, level: Level, draft: Draft, plan: Plan) -> tuple[Any, Tree]:
    """The template's nodes, layer by layer."""
    b, device, d2t_W = level.logits_BNW.shape[0], level.logits_BNW.device, drafter.d2t_W
    w = level.logits_BNW.shape[2]
    coins_BN = draft.uniforms(torch.arange(1, plan.nodes + 1, device=device)) if draft.sampled else None
    tokens: list[Tensor] = []
    parents: list[Tensor] = []
    depths: list[Tensor] = []
    log_probs: list[Tensor] = []
    valid: list[Tensor] = []
    q_BMW = None
    made = 0
    for depth, layer in enumerate(plan.layers, 1):
        expand, slot, rank = layer.expand.to(device), layer.slot.to(device), layer.rank.to(device)
        r, n = expand.shape[0], layer.width
        if depth == 1:
            alive_BR = level.valid_BN[:, :1]
        else:
            nodes_BJ = torch.cat(tokens, 1)
            alive_BR = torch.cat(valid, 1)[:, expand - 1]
        if drafter.parallel > 1:
            logits_BRW = level.logits_BNW[:, depth - 1 : depth].expand(b, r, w)
            alive_BR = alive_BR & level.valid_BN[:, depth - 1 : depth]
        else:
            if depth > 1:
                state, level = drafter.extend(state, nodes_BJ[:, expand - 1], layer.above.to(device).expand(b, r))
                alive_BR = alive_BR & level.valid_BN
            logits_BRW = level.logits_BNW
        path_BJ = see_BRJ = None
        if draft.params.penalises and depth > 1:
            path_BJ = nodes_BJ
            see_BRJ = _partial(tokens, parents, depths, valid).visible()[:, expand, 1:]
        depths_BR = torch.full((b, r), depth - 1, device=device)
        coins_BRn = None
        if coins_BN is not None:
            coins_BRn = torch.zeros(b, r, n, dtype=torch.float64, device=device)
            coins_BRn[:, slot, rank] = coins_BN[:, made : made + slot.shape[0]]
        ids_BRn, log_BRn, q_BRW = _pick(
            draft, logits_BRW, d2t_W, draft.history(depths_BR, path_BJ, see_BRJ), n, coins_BRn
        )
        if q_BRW is not None:
            if q_BMW is None:
                q_BMW = torch.zeros(b, plan.nodes + 1, w, dtype=q_BRW.dtype, device=device)
            q_BMW[:, expand] = q_BRW
        tokens.append(_ids(d2t_W, ids_BRn[:, slot, rank]))
        parents.append(layer.parent.to(device).expand(b, -1))
        depths.append(torch.full_like(parents[-1], depth))
        log_probs.append(log_BRn[:, slot, rank])
        valid.append(alive_BR[:, slot] & (log_probs[-1] > float("-inf")))
        made += slot.shape[0]
    q = None
    if q_BMW is not None:
        q = Proposal(q_BMW, d2t_W, replacement=False, sampled_B=draft.params.temperature_R > 0)
    cat = [torch.cat(x, 1) for x in (tokens, parents, depths, log_probs, valid)]
    return state, _tree(cat[0], cat[1], cat[2], cat[3], cat[4], q)


def build_dynamic(drafter: Any, state: Any, level: Level, draft: Draft, plan: Plan) -> tuple[Any, Tree]:
    """EAGLE-2: grow the best nodes of each layer, then keep the best of all."""
    b, device, d2t_W = level.logits_BNW.shape[0], level.logits_BNW.device, drafter.d2t_W
    rows_B1 = torch.arange(b, device=device)[:, None]
    w = plan.width
    beam_B1 = torch.zeros(b, 1, dtype=torch.int64, device=device)
    pool_BX, score_BR = beam_B1, torch.zeros(b, 1, device=device)  # the beam's nodes in the pool (0 = anchor)
    extended_BR = beam_B1  # the beam's nodes among those the drafter was asked to extend (0 = anchor)
    alive_BR = level.valid_BN[:, :1]
    logits_BRW = level.logits_BNW[:, :1]
    tokens: list[Tensor] = []
    parents: list[Tensor] = []
    depths: list[Tensor] = []
    own: list[Tensor] = []
    total: list[Tensor] = []
    valid: list[Tensor] = []
    count = asked = 0
    for depth in range(1, plan.depth + 1):
        r = pool_BX.shape[1]
        path_BJ = see_BRJ = None
        if draft.params.penalises and depth > 1:
            path_BJ = torch.cat(tokens, 1)
            see_BRJ = _partial(tokens, parents, depths, valid).visible()[rows_B1, pool_BX, 1:]
        depths_BR = torch.full((b, r), depth - 1, device=device)
        ids_BRn, log_BRn, _ = _pick(draft, logits_BRW, d2t_W, draft.history(depths_BR, path_BJ, see_BRJ), w, None)
        log_BRn = log_BRn.masked_fill(~alive_BR[:, :, None], float("-inf")).clamp(max=0).float()
        sums_BX = (score_BR[:, :, None] + log_BRn).flatten(1)
        tokens.append(_ids(d2t_W, ids_BRn).flatten(1))
        parents.append(pool_BX.repeat_interleave(w, 1))
        depths.append(torch.full_like(parents[-1], depth))
        own.append(log_BRn.flatten(1))
        total.append(sums_BX)
        valid.append(sums_BX > float("-inf"))
        if depth == plan.depth:
            break
        best_BR = sums_BX.sort(dim=1, descending=True, stable=True).indices[:, :w].sort(dim=1).values
        score_BR = sums_BX.gather(1, best_BR)
        alive_BR = valid[-1].gather(1, best_BR)
        above_BR = extended_BR.gather(1, best_BR // w)
        pool_BX = best_BR + count + 1
        extended_BR = torch.arange(asked + 1, asked + w + 1, device=device).expand(b, w)
        if drafter.parallel > 1:
            logits_BRW = level.logits_BNW[:, depth : depth + 1].expand(b, w, -1)
            alive_BR = alive_BR & level.valid_BN[:, depth : depth + 1]
        else:
            state, next_level = drafter.extend(state, tokens[-1].gather(1, best_BR), above_BR)
            logits_BRW, alive_BR = next_level.logits_BNW, alive_BR & next_level.valid_BN
        count, asked = count + sums_BX.shape[1], asked + w
    pool = _partial(tokens, parents, depths, valid)
    # A stable sort keeps a parent before a child of the same score; in order of creation it comes first again.
    order_BX = torch.cat(total, 1).sort(dim=1, descending=True, stable=True).indices
    kept_BN = order_BX[:, : plan.nodes].sort(dim=1).values
    new_BX = torch.zeros(b, pool.tokens_BN.shape[1] + 1, dtype=torch.int64, device=device)
    new_BX.scatter_(1, kept_BN + 1, torch.arange(1, kept_BN.shape[1] + 1, device=device).expand_as(kept_BN))
    parents_BN = new_BX.gather(1, pool.parents_BN.gather(1, kept_BN))
    take = [x.gather(1, kept_BN) for x in (pool.tokens_BN, pool.depths_BN, torch.cat(own, 1), pool.valid_BN)]
    return state, _tree(take[0], parents_BN, take[1], take[2], take[3], None)


@dataclass(frozen=True)
class Builder:
    """One way to grow a tree: `build(drafter, state, level, draft, plan) -> (state, tree)`. `on_device`: it works by
    tensor operations where the drafter is (False: on the host, level by level through memory)."""

    build: Callable[[Any, Any, Level, Draft, Plan], tuple[Any, Tree]]
    on_device: bool


TREES = {
    "chain": Builder(build_chain, on_device=True),
    "static": Builder(build_static, on_device=True),
    "dynamic": Builder(build_dynamic, on_device=True),
}
