"""Tree builders: from a drafter's levels to a draft tree.

- `chain`: K tokens in a row. `cut`: it ends before the first token that the drafter is not sure of (DSpark 2607.05147).
- `cape`: a chain whose positions get the more siblings the less sure the drafter is (CaPE 2402.02082).
- `static`: a fixed template of choices, as of Medusa 2401.10774 (§2.1.2): `(0, 2)` is the third most likely child of the
  most likely first token. Cut to the depths that the drafter has.
- `dynamic`: EAGLE-2 2406.16858 (§4): in every layer the `width` best nodes by cumulative log-probability get `width`
  children each; of all candidates the `nodes` best stay. Cumulative log-probability cannot rise along a path, so these
  form a connected tree.
- `opt`: OPT-Tree 2406.17276: the same with `nodes` best nodes per layer and as many children each, so that
  no better tree of this size exists; a drafter that is asked layer by layer is asked no more once a layer adds little.
- `best_first`, `capped`, `ppd`: from all depths' distributions at once; see inference/marginals.py.

Where requests sample and the siblings are to be drawn (chain, cut, static), each sibling is drawn without replacement
from the drafter's probabilities, which go through the same `probs` as the target's, and these rows travel with the tree
as `q`. The shape of such a tree depends on no drawn token's siblings, which the rejection rule needs: a cut looks at
what the drafter says *before* a token is drawn. The other trees pick among siblings, so their candidates are the
drafter's top tokens and `q` is None.

Every tree has the plan's number of nodes; unused ones are invalid. Prompt rows (`with_prompts`) hang on nodes of any
tree whose drafter has prompt tokens. Tests: tests/test_trees.py.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, replace
from functools import cached_property, lru_cache
from typing import Any, Literal

import torch
from torch import Tensor
from torch.nn.functional import pad

from ..kernels import rng
from ..kernels.jit import runs_on
from ..kernels.topk import MOST, topk
from ..losses.probs import History, ParamRows, adjust, draw, probs
from ..models.drafter import Level
from ..models.tree import Prompts, Proposal, Tree, hang
from .marginals import (
    TYPICAL,
    Choices,
    Grown,
    Table,
    best_first,
    capped,
    fan_out_caps,
    likeliest_paths,
    split_rows,
    state_trees,
)

BROKEN = "the drafter's logits hold NaN: its weights or its inputs are broken; check the export"

# CaPE: the draft's top probability -> siblings beside it (its table, and the bins of its code).
_WIDEN = ((0.3, 7), (0.6, 5), (0.8, 3), (float("inf"), 1))


def default_choices(depth: int, width: int, nodes: int) -> Choices:
    """The template of at most `nodes` nodes that is best for a typical drafter."""
    return tuple(path for _, path in likeliest_paths((TYPICAL,), depth, width, nodes))


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
    """What a builder builds: `nodes` nodes at no more than `depth` levels, of the `width` best candidates each.

    `choices`: template of a static tree; `threshold`: where a chain is cut, or a layer adds too little; `tokens` prompt
    tokens per row (at most `per_node` of a node's), of the kind `prompts`; `vocab`: V of the target, where the ids of
    prompt rows begin; `chances`: of ranks by depth (ppd).
    """

    tree: str
    depth: int
    width: int
    nodes: int
    choices: Choices = ()
    threshold: float = 0.0
    prompts: Prompts | None = None
    tokens: int = 0
    vocab: int = 0
    chances: tuple[tuple[float, ...], ...] = (TYPICAL,)

    @staticmethod
    def make(
        tree: str,
        k: int,
        width: int,
        nodes: int,
        choices: Sequence[Sequence[int]] | None,
        limit: int | None,
        vocab: int,
        threshold: float | None = None,
    ) -> Plan:
        """Fit the wish to the drafter: `limit` = its depths (None = any), `vocab` = its vocabulary."""
        if tree not in TREES:
            raise ValueError(f"tree={tree!r}: use one of {', '.join(TREES)}")
        builder = TREES[tree]
        depth = k if limit is None else min(k, limit)
        width = min(width, vocab)
        if builder.threshold is not None:
            threshold = builder.threshold if threshold is None else threshold
        if builder.chain:
            return Plan(tree, depth, 1, depth, threshold=threshold or 0.0)
        if tree == "static":
            if choices is None:
                wanted = default_choices(depth, width, nodes)
            else:
                deepest = limit if limit is not None else max((len(path) for path in choices), default=0)
                wanted = tuple(p for p in check_choices(choices) if len(p) <= deepest and max(p) < vocab)
            return Plan(tree, max(map(len, wanted)), 1 + max(map(max, wanted)), len(wanted), wanted)
        if tree == "cape":
            depth = min(depth, nodes)
            return Plan(tree, depth, width, min(nodes, depth * width))
        if tree == "dynamic":
            return Plan(tree, depth, width, min(nodes, width + (depth - 1) * width * width))
        if tree in ("opt", "best_first"):
            width = min(nodes, vocab)
        most, layer = 0, 1
        for _ in range(depth):
            layer = min(nodes, layer * width)
            most = min(nodes, most + layer)
        return Plan(tree, depth, width, most, threshold=threshold or 0.0)

    def with_prompts(
        self, prompts: Prompts | None, rows: int | None, vocab: int, chances: Sequence[Sequence[float]] | None
    ) -> Plan:
        """The plan for a drafter with prompt tokens of this kind, of which at most `rows` rows ride along (None = all
        that the nodes can have; ppd: as many as pay, nodes and prompt rows together being no more than `nodes`).

        Raises ValueError if not even one prompt token fits.
        """
        table = self.chances if chances is None else tuple(tuple(map(float, row)) for row in chances)
        plan = replace(self, chances=table, prompts=prompts, vocab=vocab)
        if prompts is None:
            return plan
        if rows is not None and rows < prompts.members:
            raise ValueError(
                f"prompt_rows={rows}: this drafter's prompt tokens take {prompts.members} rows each, so without at least "
                f"{prompts.members} it can never draft"
            )
        if rows is None and self.tree == "ppd":
            if self.nodes < 1 + prompts.members:
                raise ValueError(
                    f"nodes={self.nodes}: a node and a prompt token of this drafter take {1 + prompts.members} rows; give "
                    "at least as many, or set prompt_rows"
                )
            nodes, tokens = split_rows(table, self.depth, self.width, self.nodes, plan.per_node, prompts.members)
            return replace(plan, nodes=nodes, tokens=tokens)
        most = (self.nodes + 1) * plan.per_node
        return replace(plan, tokens=most if rows is None else min(most, rows // prompts.members))

    @property
    def per_node(self) -> int:
        """Prompt tokens on one node, at most: no more than levels will be asked of them."""
        return 0 if self.prompts is None else min(self.prompts.depths, self.depth)

    @property
    def extra(self) -> int:
        """E, prompt rows per request."""
        return 0 if self.prompts is None else self.tokens * self.prompts.members

    @property
    def asked(self) -> int:
        """Nodes that a drafter is asked to extend, at most."""
        return (self.depth - 1) * (self.nodes if self.tree == "opt" else self.width)

    @cached_property
    def states(self) -> list[Tensor]:
        """The trees of ppd by state (levels that are there), as padded tensors: parents, depths and ranks [S, N], whether
        a node is there, and prompt tokens per node [S, M], the anchor first."""
        trees, _ = state_trees(self.chances, self.depth, self.width, self.nodes, self.per_node, self.tokens)
        s, n = len(trees), self.nodes
        parents, ranks = torch.zeros(s, n, dtype=torch.int64), torch.zeros(s, n, dtype=torch.int64)
        depths, valid = torch.ones(s, n, dtype=torch.int64), torch.zeros(s, n, dtype=torch.bool)
        counts = torch.zeros(s, n + 1, dtype=torch.int64)
        for i, tree in enumerate(trees):
            index = {(): 0} | {path: j + 1 for j, path in enumerate(tree.paths)}
            counts[i, : len(tree.tokens)] = torch.tensor(tree.tokens)
            for j, path in enumerate(tree.paths):
                parents[i, j], depths[i, j], ranks[i, j], valid[i, j] = index[path[:-1]], len(path), path[-1], True
        return [parents, depths, ranks, valid, counts]

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


@lru_cache(maxsize=64)
def _layers_on(plan: Plan, device: torch.device) -> list[Layer]:
    """The plan's layers, copied to a device once."""
    with torch.inference_mode(False):
        names = [f.name for f in fields(Layer) if f.name != "width"]
        return [replace(layer, **{name: getattr(layer, name).to(device) for name in names}) for layer in plan.layers]


@dataclass
class Draft:
    """What a builder knows of the requests: parameters for drafting, penalties and bans along a path, random numbers.

    `history(depths_BR, tokens_BJ, see_BRJ)` gives the `History` of B * R rows, each a node at a depth whose path holds
    those of the drafted tokens J that it sees; None where no row's parameters ask for paths.
    """

    params: ParamRows
    history: Callable[[Tensor, Tensor | None, Tensor | None], History]
    sampled: bool  # siblings are drawn in rows with temperature > 0
    seeds_B: Tensor
    rounds_B: Tensor
    places: Literal["fixed", "target", "kept", "new"] = "fixed"  # what `at_places` gives
    broken: list[Tensor] | None = (
        None  # takes bool [B], the drafter said NaN, so that nothing is asked; None = ValueError
    )

    def uniforms(self, nodes_N: Tensor) -> Tensor:
        """[B, N] the drafting coins of nodes (j + 1 = node j)."""
        return rng.uniform(self.seeds_B[:, None], rng.DRAFT, 0, self.rounds_B[:, None], nodes_N)

    @property
    def drawn(self) -> bool:
        """Whether proposers that draw bring the rows q that they drew from."""
        return self.places in ("kept", "new")

    def at_places(self, positions_BN: Tensor) -> Tensor | None:
        """[B, N] the uniforms of candidates for these positions (> 0), for proposers that draw. None: candidates are
        fixed. By the rule: the target's own draw there (sample_match); a draft's, the same in every round (rules that go
        token by token: what lies behind a rejection was not looked at); a new one in every round (rules by paths)."""
        if self.places == "fixed":
            return None
        round_B1 = self.rounds_B[:, None] if self.places == "new" else 0
        purpose = rng.TARGET if self.places == "target" else rng.DRAFT
        return rng.uniform(self.seeds_B[:, None], purpose, positions_BN, round_B1)


@dataclass
class _Picked:
    """The n candidates of each of R parents. One that does not exist has log-probability -inf. `sure_BR`: the drafter's
    probability of its best token, drawn or not."""

    ids_BRn: Tensor  # draft ids
    log_BRn: Tensor
    q_BRW: Tensor | None  # the rows that they were drawn from
    sure_BR: Tensor


def _pick(
    draft: Draft, logits_BRW: Tensor, d2t_W: Tensor | None, history: History, n: int, coins_BRn: Tensor | None
) -> _Picked:
    b, r, w = logits_BRW.shape
    rows = draft.params.repeat(r)
    flat_XW = logits_BRW.reshape(b * r, w)
    x_XW = adjust(flat_XW, rows, history, d2t_W)
    if n <= MOST and x_XW.dtype != torch.float64 and runs_on(x_XW):
        best_Xn, ids_Xn, lse_X = topk(x_XW, n)
    else:
        x_XW = x_XW if x_XW.dtype == torch.float64 else x_XW.float()
        if n == 1:
            best_Xn, ids_Xn = x_XW.max(-1, keepdim=True)
        else:
            best_Xn, ids_Xn = x_XW.topk(n, dim=-1)
        lse_X = x_XW.logsumexp(-1)
    log_probs_Xn = best_Xn - lse_X[:, None]
    if draft.broken is not None:
        draft.broken.append(best_Xn.isnan().view(b, -1).any(1))
    elif bool(log_probs_Xn.isnan().any()) and bool(flat_XW.isnan().any()):
        raise ValueError(BROKEN)
    log_probs_Xn = log_probs_Xn.masked_fill(best_Xn == float("-inf"), float("-inf"))
    sure_X = log_probs_Xn[:, 0].exp()
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
    shape, q_BRW = (b, r, n), None if q_XW is None else q_XW.view(b, r, w)
    return _Picked(ids_Xn.view(shape), log_probs_Xn.view(shape), q_BRW, sure_X.view(b, r))


def _tree(
    tokens_BN: Tensor, parents_BN: Tensor, depths_BN: Tensor, log_probs_BN: Tensor, valid_BN: Tensor, q: Proposal | None
) -> Tree:
    return Tree(tokens_BN, parents_BN, depths_BN, log_probs_BN, valid_BN & (log_probs_BN > float("-inf")), q)


def _partial(tokens: list[Tensor], parents: list[Tensor], depths: list[Tensor], valid: list[Tensor]) -> Tree:
    tokens_BN = torch.cat(tokens, 1)
    return Tree(tokens_BN, torch.cat(parents, 1), torch.cat(depths, 1), tokens_BN.float(), torch.cat(valid, 1))


def _ids(d2t_W: Tensor | None, draft_ids: Tensor) -> Tensor:
    return draft_ids if d2t_W is None else d2t_W[draft_ids]


def asks_by_level(drafter: Any) -> bool:
    """Whether deeper levels come from `extend`: one at a time, or because a slot head corrects them for the tokens that
    were taken (`sequential`). Otherwise `start` gave them all."""
    return drafter.parallel == 1 or getattr(drafter, "sequential", False)


@dataclass
class _Line:
    """A chain with the other candidates of each of its K positions. `alive_BK`: the position is there."""

    tokens_BKn: Tensor
    log_BKn: Tensor
    alive_BK: Tensor
    sure_BK: Tensor
    q: Proposal | None


def _line(
    drafter: Any, state: Any, level: Level, draft: Draft, plan: Plan, width: int, cut: float | None, drawn: bool
) -> tuple[Any, _Line]:
    """K positions, each below the first candidate of the one before; `cut`: the chain ends where the drafter's
    confidence (its own estimate, or the probability of its best token) is lower. Both are known before a token is
    drawn, so that the tokens of a chain of any length have the distribution q."""
    b, device, d2t_W, asks = level.logits_BNW.shape[0], level.logits_BNW.device, drafter.d2t_W, asks_by_level(drafter)
    k = plan.depth
    steps_K = torch.arange(k, device=device)
    coins_BK = draft.uniforms(steps_K + 1) if drawn else None
    tokens: list[Tensor] = []
    log_probs, alive, sure, rows = [], [], [], []
    alive_B1 = torch.ones(b, 1, dtype=torch.bool, device=device)
    for d in range(k):
        if d and asks:
            if cut is not None and not bool(alive_B1.any()):
                break
            state, level = drafter.extend(state, tokens[-1][:, :1], steps_K[d - 1 : d].expand(b, 1))
        at = 0 if asks else d
        path_BJ = torch.cat([t[:, :1] for t in tokens], 1) if tokens and draft.params.paths else None
        see_BRJ = None if path_BJ is None else torch.ones(b, 1, d, dtype=torch.bool, device=device)
        history = draft.history(steps_K[d : d + 1].expand(b, 1), path_BJ, see_BRJ)
        coins_B11 = None if coins_BK is None else coins_BK[:, d, None, None]
        picked = _pick(draft, level.logits_BNW[:, at : at + 1], d2t_W, history, width, coins_B11)
        alive_B1 = alive_B1 & level.valid_BN[:, at : at + 1] & (picked.log_BRn[:, :, 0] > float("-inf"))
        if cut is not None:
            known = level.confidence_BN
            alive_B1 = alive_B1 & ((picked.sure_BR if known is None else known[:, at : at + 1]) >= cut)
        tokens.append(_ids(d2t_W, picked.ids_BRn[:, 0]))
        log_probs.append(picked.log_BRn[:, 0])
        alive.append(alive_B1)
        sure.append(picked.sure_BR)
        if picked.q_BRW is not None:
            rows.append(picked.q_BRW)
    short = k - len(tokens)
    q = None
    if rows:
        q = Proposal(pad(torch.cat(rows, 1), (0, 0, 0, short + 1)), d2t_W, replacement=False)
    return state, _Line(
        pad(torch.stack(tokens, 1), (0, 0, 0, short)),
        pad(torch.stack(log_probs, 1), (0, 0, 0, short), value=float("-inf")),
        pad(torch.cat(alive, 1), (0, short)),
        pad(torch.cat(sure, 1), (0, short)),
        q,
    )


def _chain(line: _Line) -> Tree:
    """The first candidates."""
    b, k = line.alive_BK.shape
    steps_BK = torch.arange(k, device=line.alive_BK.device).expand(b, k)
    return _tree(line.tokens_BKn[:, :, 0], steps_BK, steps_BK + 1, line.log_BKn[:, :, 0], line.alive_BK, line.q)


def build_chain(drafter: Any, state: Any, level: Level, draft: Draft, plan: Plan) -> tuple[Any, Tree]:
    """K tokens in a row, each the drafter's best (or drawn) after the ones before."""
    state, line = _line(drafter, state, level, draft, plan, 1, None, draft.sampled)
    return state, _chain(line)


def build_cut(drafter: Any, state: Any, level: Level, draft: Draft, plan: Plan) -> tuple[Any, Tree]:
    """The same as far as the drafter's confidence reaches `threshold`."""
    state, line = _line(drafter, state, level, draft, plan, 1, plan.threshold, draft.sampled)
    return state, _chain(line)


def build_cape(drafter: Any, state: Any, level: Level, draft: Draft, plan: Plan) -> tuple[Any, Tree]:
    """CaPE: the chain of best tokens, and beside each as many runners-up as the drafter's doubt warrants; where nodes
    are short, the runners-up of the likeliest paths."""
    state, line = _line(drafter, state, level, draft, plan, plan.width, None, False)
    k, w = line.tokens_BKn.shape[1:]
    device = line.alive_BK.device
    chain = _chain(line)
    spare = min(plan.nodes - k, k * (w - 1))
    if spare == 0:
        return state, chain
    edges, siblings = zip(*_WIDEN, strict=True)
    bins_BK = torch.bucketize(line.sure_BK, torch.tensor(edges, device=device, dtype=line.sure_BK.dtype))
    allowed_BK = torch.tensor(siblings, device=device)[bins_BK]
    ranks_w = torch.arange(1, w, device=device)
    wanted_BKw = line.alive_BK[:, :, None] & (ranks_w <= allowed_BK[:, :, None])
    above_BK = pad(line.log_BKn[:, :-1, 0].cumsum(1), (1, 0))
    own_BX = line.log_BKn[:, :, 1:].masked_fill(~wanted_BKw, float("-inf")).flatten(1)
    score_BX = own_BX + above_BK.repeat_interleave(w - 1, 1)
    kept_BX = score_BX.sort(dim=1, descending=True, stable=True).indices[:, :spare].sort(dim=1).values
    at_BX = kept_BX // (w - 1)
    return state, _tree(
        torch.cat([chain.tokens_BN, line.tokens_BKn[:, :, 1:].flatten(1).gather(1, kept_BX)], 1),
        torch.cat([chain.parents_BN, at_BX], 1),
        torch.cat([chain.depths_BN, at_BX + 1], 1),
        torch.cat([chain.log_probs_BN, own_BX.gather(1, kept_BX)], 1),
        torch.cat([chain.valid_BN, torch.ones_like(kept_BX, dtype=torch.bool)], 1),
        None,
    )


def build_static(drafter: Any, state: Any, level: Level, draft: Draft, plan: Plan) -> tuple[Any, Tree]:
    """The template's nodes, layer by layer."""
    b, device, d2t_W, asks = level.logits_BNW.shape[0], level.logits_BNW.device, drafter.d2t_W, asks_by_level(drafter)
    w = level.logits_BNW.shape[2]
    coins_BN = draft.uniforms(torch.arange(1, plan.nodes + 1, device=device)) if draft.sampled else None
    tokens: list[Tensor] = []
    parents: list[Tensor] = []
    depths: list[Tensor] = []
    log_probs: list[Tensor] = []
    valid: list[Tensor] = []
    q_BMW = None
    made = 0
    for depth, layer in enumerate(_layers_on(plan, device), 1):
        expand, slot, rank = layer.expand, layer.slot, layer.rank
        r, n = expand.shape[0], layer.width
        if depth == 1:
            alive_BR = level.valid_BN[:, :1]
        else:
            nodes_BJ = torch.cat(tokens, 1)
            alive_BR = torch.cat(valid, 1)[:, expand - 1]
        if not asks:
            logits_BRW = level.logits_BNW[:, depth - 1 : depth].expand(b, r, w)
            alive_BR = alive_BR & level.valid_BN[:, depth - 1 : depth]
        elif depth == 1:
            logits_BRW = level.logits_BNW[:, :1]
        else:
            state, level = drafter.extend(state, nodes_BJ[:, expand - 1], layer.above.expand(b, r))
            logits_BRW, alive_BR = level.logits_BNW, alive_BR & level.valid_BN
        path_BJ = see_BRJ = None
        if draft.params.paths and depth > 1:
            path_BJ = nodes_BJ
            see_BRJ = _partial(tokens, parents, depths, valid).visible(depth - 1)[:, expand, 1:]
        depths_BR = torch.full((b, r), depth - 1, device=device)
        coins_BRn = None
        if coins_BN is not None:
            coins_BRn = torch.zeros(b, r, n, dtype=torch.float64, device=device)
            coins_BRn[:, slot, rank] = coins_BN[:, made : made + slot.shape[0]]
        picked = _pick(draft, logits_BRW, d2t_W, draft.history(depths_BR, path_BJ, see_BRJ), n, coins_BRn)
        if picked.q_BRW is not None:
            if q_BMW is None:
                q_BMW = torch.zeros(b, plan.nodes + 1, w, dtype=picked.q_BRW.dtype, device=device)
            q_BMW[:, expand] = picked.q_BRW
        tokens.append(_ids(d2t_W, picked.ids_BRn[:, slot, rank]))
        parents.append(layer.parent.expand(b, -1))
        depths.append(torch.full_like(parents[-1], depth))
        log_probs.append(picked.log_BRn[:, slot, rank])
        valid.append(alive_BR[:, slot] & (log_probs[-1] > float("-inf")))
        made += slot.shape[0]
    q = None
    if q_BMW is not None:
        q = Proposal(q_BMW, d2t_W, replacement=False, sampled_B=draft.params.temperature_R > 0)
    cat = [torch.cat(x, 1) for x in (tokens, parents, depths, log_probs, valid)]
    return state, _tree(cat[0], cat[1], cat[2], cat[3], cat[4], q)


def _layered(
    drafter: Any, state: Any, level: Level, draft: Draft, plan: Plan, beam: int, stop: float | None
) -> tuple[Any, Tree]:
    """Grow the `beam` best nodes of each layer by `width` children each, then keep the best of all. `stop`: a row grows
    no deeper once a layer raised the mass of its best `nodes` nodes by no more than this."""
    b, device, d2t_W, asks = level.logits_BNW.shape[0], level.logits_BNW.device, drafter.d2t_W, asks_by_level(drafter)
    rows_B1 = torch.arange(b, device=device)[:, None]
    w = plan.width
    mass_B = torch.zeros(b, device=device)
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
        if draft.params.paths and depth > 1:
            path_BJ = torch.cat(tokens, 1)
            see_BRJ = _partial(tokens, parents, depths, valid).visible()[rows_B1, pool_BX, 1:]
        depths_BR = torch.full((b, r), depth - 1, device=device)
        picked = _pick(draft, logits_BRW, d2t_W, draft.history(depths_BR, path_BJ, see_BRJ), w, None)
        log_BRn = picked.log_BRn.masked_fill(~alive_BR[:, :, None], float("-inf")).clamp(max=0).float()
        sums_BX = (score_BR[:, :, None] + log_BRn).flatten(1)
        tokens.append(_ids(d2t_W, picked.ids_BRn).flatten(1))
        parents.append(pool_BX.repeat_interleave(w, 1))
        depths.append(torch.full_like(parents[-1], depth))
        own.append(log_BRn.flatten(1))
        total.append(sums_BX)
        valid.append(sums_BX > float("-inf"))
        if depth == plan.depth:
            break
        best_BR = sums_BX.sort(dim=1, descending=True, stable=True).indices[:, :beam].sort(dim=1).values
        r = best_BR.shape[1]
        score_BR = sums_BX.gather(1, best_BR)
        alive_BR = valid[-1].gather(1, best_BR)
        if stop is not None:
            total_BX = torch.cat(total, 1)
            before_B, mass_B = mass_B, total_BX.topk(min(plan.nodes, total_BX.shape[1]), dim=1).values.exp().sum(1)
            alive_BR = alive_BR & (mass_B - before_B > stop)[:, None]
            if not bool(alive_BR.any()):
                break
        above_BR = extended_BR.gather(1, best_BR // w)
        pool_BX = best_BR + count + 1
        extended_BR = torch.arange(asked + 1, asked + r + 1, device=device).expand(b, r)
        if not asks:
            logits_BRW = level.logits_BNW[:, depth : depth + 1].expand(b, r, -1)
            alive_BR = alive_BR & level.valid_BN[:, depth : depth + 1]
        else:
            state, next_level = drafter.extend(state, tokens[-1].gather(1, best_BR), above_BR)
            logits_BRW, alive_BR = next_level.logits_BNW, alive_BR & next_level.valid_BN
        count, asked = count + sums_BX.shape[1], asked + r
    pool = _partial(tokens, parents, depths, valid)
    # A stable sort keeps a parent before a child of the same score; in order of creation it comes first again.
    order_BX = torch.cat(total, 1).sort(dim=1, descending=True, stable=True).indices
    kept_BN = order_BX[:, : plan.nodes].sort(dim=1).values
    new_BX = torch.zeros(b, pool.tokens_BN.shape[1] + 1, dtype=torch.int64, device=device)
    new_BX.scatter_(1, kept_BN + 1, torch.arange(1, kept_BN.shape[1] + 1, device=device).expand_as(kept_BN))
    parents_BN = new_BX.gather(1, pool.parents_BN.gather(1, kept_BN))
    take = [x.gather(1, kept_BN) for x in (pool.tokens_BN, pool.depths_BN, torch.cat(own, 1), pool.valid_BN)]
    short = (0, plan.nodes - kept_BN.shape[1])  # layers that were not grown
    return state, _tree(
        pad(take[0], short),
        pad(parents_BN, short),
        pad(take[1], short, value=1),
        pad(take[2], short),
        pad(take[3], short),
        None,
    )


def build_dynamic(drafter: Any, state: Any, level: Level, draft: Draft, plan: Plan) -> tuple[Any, Tree]:
    """EAGLE-2: grow the best nodes of each layer, then keep the best of all."""
    return _layered(drafter, state, level, draft, plan, plan.width, None)


def build_opt(drafter: Any, state: Any, level: Level, draft: Draft, plan: Plan) -> tuple[Any, Tree]:
    """OPT-Tree: the best `nodes` nodes. Levels that are there already cost nothing: no early end for these."""
    return _layered(drafter, state, level, draft, plan, plan.nodes, plan.threshold if asks_by_level(drafter) else None)


def _candidates(drafter: Any, level: Level, draft: Draft, plan: Plan) -> tuple[Tensor, Tensor, Tensor]:
    """The `width` best of each depth, whatever came before: draft ids [B, K, C], log-probabilities, and whether the
    depth is there [B, K] (a depth below a missing one is not)."""
    b, k, device = level.logits_BNW.shape[0], plan.depth, level.logits_BNW.device
    history = draft.history(torch.arange(k, device=device).expand(b, k), None, None)
    picked = _pick(draft, level.logits_BNW[:, :k], drafter.d2t_W, history, plan.width, None)
    valid_BK = level.valid_BN[:, :k].int().cumprod(1).bool()
    log_BKC = picked.log_BRn.masked_fill(~valid_BK[:, :, None], float("-inf")).clamp(max=0)
    return picked.ids_BRn, log_BKC, valid_BK


def _tables(drafter: Any, state: Any, ids_BKC: Tensor, log_BKC: Tensor) -> list[Table]:
    """Per row the candidates of each depth; after each candidate of the depth before, if the drafter scores pairs:
    `pair_scores(state, ids_BKC, log_BKC) -> [B, K - 1, C, C]`, where entry (d, a, b) is the log-probability of candidate
    b at depth d + 2 after candidate a at depth d + 1."""
    tables: list[Table] = []
    alone = [[[[(x, i) for i, x in enumerate(row)]] for row in rows] for rows in log_BKC.tolist()]
    if not hasattr(drafter, "pair_scores") or log_BKC.shape[1] == 1:
        return alone
    pair_BKCC = drafter.pair_scores(state, ids_BKC, log_BKC).clamp(max=0)
    if bool(pair_BKCC.isnan().any()):
        raise ValueError("the drafter's pair scores hold NaN: its weights or its inputs are broken; check the export")
    pair_BKCC = pair_BKCC.masked_fill(log_BKC[:, 1:, None] == float("-inf"), float("-inf"))
    best = pair_BKCC.sort(dim=-1, descending=True, stable=True)
    for row, scores, ranks in zip(alone, best.values.tolist(), best.indices.tolist(), strict=True):
        pairs = [
            [list(zip(x, i, strict=True)) for x, i in zip(xs, js, strict=True)]
            for xs, js in zip(scores, ranks, strict=True)
        ]
        tables.append([row[0], *pairs])
    return tables


def _planted(grown: list[list[Grown]], nodes: int, ids_BKC: Tensor, d2t_W: Tensor | None) -> Tree:
    """The tree of these nodes, unused ones invalid."""
    none = Grown(0, 1, 0, float("-inf"))
    rows = [row + [none] * (nodes - len(row)) for row in grown]
    whole_3BN = torch.tensor([[[x.parent, x.depth, x.rank] for x in row] for row in rows], device=ids_BKC.device)
    parents_BN, depths_BN, ranks_BN = whole_3BN.unbind(-1)
    log_BN = torch.tensor([[x.log_prob for x in row] for row in rows], device=ids_BKC.device)
    rows_B1 = torch.arange(len(rows), device=ids_BKC.device)[:, None]
    tokens_BN = _ids(d2t_W, ids_BKC[rows_B1, depths_BN - 1, ranks_BN])
    return _tree(tokens_BN, parents_BN, depths_BN, log_BN, torch.ones_like(log_BN, dtype=torch.bool), None)


def build_best_first(drafter: Any, state: Any, level: Level, draft: Draft, plan: Plan) -> tuple[Any, Tree]:
    """DDTree: the best `nodes` paths through the candidates of all depths."""
    ids_BKC, log_BKC, _ = _candidates(drafter, level, draft, plan)
    grown = [best_first(table, plan.nodes) for table in _tables(drafter, state, ids_BKC, log_BKC)]
    return state, _planted(grown, plan.nodes, ids_BKC, drafter.d2t_W)


def build_capped(drafter: Any, state: Any, level: Level, draft: Draft, plan: Plan) -> tuple[Any, Tree]:
    """JetSpec: best nodes first, all children of each at once, as many as the drafter's doubt at their depth warrants."""
    ids_BKC, log_BKC, _ = _candidates(drafter, level, draft, plan)
    caps = fan_out_caps(log_BKC).tolist()
    tables = _tables(drafter, state, ids_BKC, log_BKC)
    grown = [capped(table, cap, plan.nodes) for table, cap in zip(tables, caps, strict=True)]
    return state, _planted(grown, plan.nodes, ids_BKC, drafter.d2t_W)


def build_ppd(drafter: Any, state: Any, level: Level, draft: Draft, plan: Plan) -> tuple[Any, Tree]:
    """PPD: the template of as many levels as there are, with its prompt tokens."""
    ids_BKC, log_BKC, valid_BK = _candidates(drafter, level, draft, plan)
    at_B = valid_BK.sum(1)
    parents_BN, depths_BN, ranks_BN, valid_BN, counts_BM = (x.to(at_B.device)[at_B] for x in plan.states)
    rows_B1 = torch.arange(at_B.shape[0], device=at_B.device)[:, None]
    log_BN = log_BKC[rows_B1, depths_BN - 1, ranks_BN]
    tokens_BN = _ids(drafter.d2t_W, ids_BKC[rows_B1, depths_BN - 1, ranks_BN])
    # A candidate may be missing (a small vocabulary, banned ids); then so is what hangs on it.
    lost_BM = pad(valid_BN & (log_BN == float("-inf")), (1, 0))
    tree = _tree(tokens_BN, parents_BN, depths_BN, log_BN, valid_BN, None)
    see_BMM = replace(tree, valid_BN=valid_BN).visible()
    gone_BM = (see_BMM & lost_BM[:, None, :]).any(-1)
    tree = replace(tree, valid_BN=tree.valid_BN & ~gone_BM[:, 1:])
    if plan.prompts is not None:
        tree.extra = hang(tree, counts_BM * ~gone_BM, plan.prompts, plan.tokens, plan.vocab)
    return state, tree


def with_prompts(tree: Tree, plan: Plan) -> Tree:
    """The tree with prompt rows, on the likeliest nodes first (the anchor before all), unless its builder hung them."""
    if plan.prompts is None or tree.extra is not None:
        return tree
    each = plan.per_node
    log_BN = tree.log_probs_BN.masked_fill(~tree.valid_BN, 0.0)
    total_BM = (tree.visible()[:, :, 1:] * log_BN[:, None, :]).sum(-1)
    total_BM = total_BM.masked_fill(~pad(tree.valid_BN, (1, 0), value=True), float("-inf"))
    order_BM = total_BM.sort(dim=1, descending=True, stable=True).indices
    share_M = (plan.tokens - each * torch.arange(order_BM.shape[1], device=order_BM.device)).clamp(0, each)
    counts_BM = torch.zeros_like(order_BM).scatter(1, order_BM, share_M.expand_as(order_BM))
    counts_BM = counts_BM * pad(tree.valid_BN, (1, 0), value=True)
    return replace(tree, extra=hang(tree, counts_BM, plan.prompts, plan.tokens, plan.vocab))


@dataclass(frozen=True)
class Builder:
    """One way to grow a tree: `build(drafter, state, level, draft, plan) -> (state, tree)`. `on_device`: it works by
    tensor operations where the drafter is (False: on the host, through lists). `chain`: its trees are chains. `draws`:
    siblings are drawn where requests sample. `at_once`: it needs the levels of all depths from `start`. `threshold`: the
    default of that setting, where it has one."""

    build: Callable[[Any, Any, Level, Draft, Plan], tuple[Any, Tree]]
    on_device: bool
    chain: bool = False
    draws: bool = False
    at_once: bool = False
    threshold: float | None = None


TREES = {
    "chain": Builder(build_chain, on_device=True, chain=True, draws=True),
    "cut": Builder(build_cut, on_device=True, chain=True, draws=True, threshold=0.3),
    "cape": Builder(build_cape, on_device=True),
    "static": Builder(build_static, on_device=True, draws=True),
    "dynamic": Builder(build_dynamic, on_device=True),
    "opt": Builder(build_opt, on_device=True, threshold=0.5),  # of OPT-Tree's published command
    "best_first": Builder(build_best_first, on_device=False, at_once=True),
    "capped": Builder(build_capped, on_device=False, at_once=True),
    "ppd": Builder(build_ppd, on_device=True, at_once=True),
}


def fits(tree: str, drafter: Any) -> bool:
    """Whether the drafter gives what this builder needs. Of a drafter's class, before there is one: False if no drafter
    of this class does."""
    if hasattr(drafter, "propose"):  # which makes a chain or a tree, no matter what would have built it
        return tree in ("chain", "static", "dynamic")
    return not TREES[tree].at_once or getattr(drafter, "parallel", 2) > 1 or getattr(drafter, "max_depth", 1) == 1
