"""Slots: the one rule by which parallel drafters are trained and masked.

A *slot* is one query of a parallel drafter. It hangs on an entry of its row, the *anchor*, at a *depth*: it stands at
position(anchor) + depth, sees the *context* (the row's own entries) up to its anchor, and of the other slots only
those of its *group*, by an intra-group rule. Keys are [prefix | context | slots]; queries are the slots, after the
context where that passes the drafter's layers too (`context_rows`). `see` is the only place that says who sees whom:
evaluated over all pairs it is the dense mask (CPUs, tests), as a `mask_mod` the block mask of flex attention.

Three numbers say how a method counts. An entry t of the context holds the token at t + `ahead` as its newest (`ahead`
0: entries are tokens; 1: states beside the next token's embedding, as in EAGLE). A slot at depth j of anchor t stands
for the token t + ahead + j and predicts the token t + j + `shift`, its *label*. With known = t + ahead, the newest
token that a draft from t knows, `drafted` = label - known: 1 is the first token after it (0 or less: no loss).

    method            samplers                                      ahead shift  mask (context, intra)
    PARD              cod, depths 1.. (depth 0 = the context)           0     1  inclusive, causal; context_rows
    P-EAGLE           cod, depths 1.. (depth 0 = the context)           1     2  inclusive, causal; context_rows
    DFlash            random anchors, depths 0..B-1                     0     0  exclusive, full
    DFlash, DSpark    ditto, `sample_from_anchor`: slot 0 predicts too  0     1  exclusive, full
    JetSpec           random anchors, depths 0..B-1                     0     0  exclusive, causal
    dual view         random anchors, depths 0..B-1                     0     1  exclusive, full
    BiTA              consecutive, depths 1..M, from the last entry seen 1     1  inclusive, causal; prefix keys
    PPD               cuts, depths 1..m, n members                      1     1  inclusive, member
    PaSS              cuts, depths 1..m                                 1     1  inclusive, causal
    Falcon            random anchors, depths 0..k-1 (the last known k)  k   k+1  exclusive, block of k
    Falcon, in place  all_shifts(k)                                     1     2  exclusive, block of k

Use, in a method's loss (and the same slots in `denominators`, for they read data and seeded noise alone):

    legal_BT = legal_anchors(batch, "pair", width=B)
    slots = anchored(batch, random_anchors(batch, legal_BT, 512), depths=range(B))
    slots = weigh(slots, "exp", gamma=7)
    ids_BQ = fill(slots, batch, real(slots), mask_id)
    mask = make_mask(slots, batch, MaskRule("exclusive", "full"))
    ... attend_slots(q_BHQd, (k, v) of the context, (k, v) of the slots, mask) ...
    terms = score(logits, slots, batch, out, ...)             # logits of hidden_BQD.flatten(0, 1)[slots.flat_R]

Every draw is keyed by (seed, epoch, sample, position): packing, padding and the number of processes change nothing.
Where public trainers of one method differ, each reading has a name here: `LEGAL`, `CUTS`, `WEIGHTS`, `DENOMINATORS`,
`shift` (whether slot 0 predicts), and the losses `l1` and `tv`.

Test: pytest tests/test_slots.py
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Literal, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from ..data.batch import document_starts
from ..losses.distill import Logits, Oov, Weigh, fused_score, weighed_loss
from ..losses.objective import Objective
from .attention import flex
from .drafter import Batch, TargetOut, Terms
from .layers import keyed_uniform
from .supervision import teacher_of

Legal = Literal["pair", "supervised", "full_block"]
LEGAL: dict[Legal, str] = {
    "pair": "the anchor's token and the one after it are supervised (SpecForge, DeepSpec)",
    "supervised": "its token is supervised and not among the last `width` of its document (speculators)",
    "full_block": "its token is supervised and its whole block of `width` tokens lies in the document (Automodel)",
}
Cut = Literal["run", "mask"]
CUTS: dict[Cut, str] = {
    "run": "a group's supervision stops at its first token that is not supervised (DeepSpec, and this toolkit's pairs)",
    "mask": "each label counts by itself (SpecForge, speculators, Automodel)",
}
Weight = Literal["uniform", "exp", "geometric", "dpace"]
WEIGHTS: dict[Weight, str] = {
    "uniform": "1",
    "exp": "exp(-(drafted - 1) / gamma) (DFlash, DSpark)",
    "geometric": "ratio ** (drafted - 1) (PPD)",
    "dpace": "from the draft's own probabilities, without gradient: see `dpace`",
}
Denominator = Literal["weights", "slots", "blocks"]
DENOMINATORS: dict[Denominator, str] = {
    "weights": "the sum of the weights (DeepSpec, SpecForge): gamma leaves the size of a step alone",
    "slots": "the number of supervised slots (speculators): a small gamma makes steps smaller",
    "blocks": "the number of groups with a supervised slot (D-PACE in SpecForge, up to a constant)",
}
ContextLimit = Literal["inclusive", "exclusive"]
Intra = Literal["causal", "full", "block", "member"]

# Streams of `layers.keyed_uniform`, so that no two draws at one position meet.
ANCHORS, PREFIX, NOISE, GLANCE, SHIFT, ROUND = 16, 17, 18, 19, 20, 21


@dataclass(frozen=True)
class MaskRule:
    """Who sees whom; see `see`."""

    context: ContextLimit = "inclusive"
    """A slot sees context entries up to its anchor, with it (inclusive) or without it (exclusive)."""
    intra: Intra = "causal"
    """Of its group a slot sees: depths up to its own (causal), all (full), depths up to the end of its block of
    `block` depths (block), or depths up to its own of the same member (member)."""
    block: int = 1
    """Depths per block of the `block` rule."""
    window: int | None = None
    """Keys this many positions back or more are hidden; null = none are."""

    def __post_init__(self) -> None:
        for name, value, allowed in (
            ("context", self.context, ("inclusive", "exclusive")),
            ("intra", self.intra, ("causal", "full", "block", "member")),
        ):
            if value not in allowed:
                raise ValueError(f"mask rule: {name} must be one of {', '.join(allowed)}, got {value!r}")
        if self.block < 1 or (self.window is not None and self.window < 1):
            raise ValueError(f"mask rule: block and window must be positive, got {self.block} and {self.window}")


@dataclass
class Slots:
    """Padded slots [B, Q], in the order of (anchor, depth, member), groups side by side. Indices are into the row (0..T-1) unless said.

    Padding has document -1, group -1 and weight 0; `label` and `token` may run past the row where weight is 0.
    """

    anchor_BQ: Tensor  # int64, entry of the context
    depth_BQ: Tensor  # int64
    group_BQ: Tensor  # int64, distinct within a row
    member_BQ: Tensor  # int64, 0 .. n - 1
    position_BQ: Tensor  # int64, absolute
    token_BQ: Tensor  # int64, the token that the slot stands for: what a real input shows
    label_BQ: Tensor  # int64, the token it predicts
    drafted_BQ: Tensor  # int64, how far the label lies beyond the newest token known
    weight_BQ: Tensor  # fp32, 0 = no loss
    document_BQ: Tensor  # int64 sample id

    @property
    def flat_R(self) -> Tensor:
        """[R] b * Q + q of the slots with a loss, ascending: the rows whose logits `score` takes."""
        return self.weight_BQ.flatten().nonzero()[:, 0]

    def label_ids(self, batch: Batch) -> Tensor:
        """int64 [R] the tokens that `flat_R` predict."""
        return at(batch.ids_BT, self.label_BQ).flatten()[self.flat_R]

    def merge_members(self) -> Slots:
        """[B, Q / n] one slot per (anchor, depth), for scoring where n members are averaged: logits of all slots,
        [B, Q, W], as view(B, Q / n, n, W).mean(2)."""
        n = int(self.member_BQ.max()) + 1 if self.member_BQ.numel() else 1
        return self._map(lambda x_BQ: x_BQ[:, ::n])

    def with_context(self, batch: Batch, ahead: int = 0, shift: int = 1, cut: Cut = "run") -> Slots:
        """[B, T + Q] the context's entries (depth 0, group = index) before these slots, for scoring hidden states of
        [context | slots] where the context predicts too (PARD, P-EAGLE)."""
        b, t = batch.ids_BT.shape
        row_X, at_X = torch.ones_like(batch.ids_BT).nonzero().unbind(1)
        known_X = at_X + ahead
        zero_X = torch.zeros_like(at_X)
        roots = _build(batch, row_X, at_X, zero_X, at_X, zero_X, at_X + ahead, at_X + shift, known_X, cut)
        assert roots.anchor_BQ.shape == (b, t)
        weight_BT = roots.weight_BQ * legal_anchors(batch, "pair", ahead=ahead)
        roots = replace(roots, weight_BQ=weight_BT, document_BQ=batch.samples_BT)
        joined = {name: torch.cat([getattr(roots, name), value], dim=1) for name, value in vars(self).items()}
        return Slots(**joined)

    def _map(self, change: Callable[[Tensor], Tensor]) -> Slots:
        return Slots(**{name: change(value) for name, value in vars(self).items()})


def at(x_BT: Tensor, index_BQ: Tensor) -> Tensor:
    """[B, Q] x at the indices, kept inside the row."""
    return x_BT.gather(1, index_BQ.clamp(0, x_BT.shape[1] - 1))


# Where drafts may start


def _ends(batch: Batch) -> Tensor:
    """int64 [B, T] the index of the last token of each token's document."""
    t = batch.ids_BT.shape[1]
    flipped = replace(batch, samples_BT=batch.samples_BT.flip(1))
    return t - 1 - document_starts(flipped).flip(1)


def legal_anchors(batch: Batch, rule: Legal = "pair", *, width: int = 2, ahead: int = 0) -> Tensor:
    """Bool [B, T] the entries that a draft may start from, by a rule of `LEGAL`; `width` tokens per block, the anchor's
    with them. The anchor's token is never the first of its document: a draft follows on states of the target.

    Raises ValueError for an unknown rule.
    """
    if rule not in LEGAL:
        raise ValueError(f"anchors: must be one of {', '.join(LEGAL)}, got {rule!r}")
    t_BT = torch.arange(batch.ids_BT.shape[1], device=batch.ids_BT.device).expand_as(batch.ids_BT)
    end_BT, token_BT = _ends(batch), t_BT + ahead
    ok_BT = (batch.samples_BT >= 0) & (token_BT > document_starts(batch)) & (token_BT <= end_BT)
    ok_BT = ok_BT & at(batch.supervised_BT, token_BT)
    if rule == "pair":
        return ok_BT & (token_BT + 1 <= end_BT) & at(batch.supervised_BT, token_BT + 1)
    return ok_BT & (token_BT + (width - 1 if rule == "full_block" else width) <= end_BT)


def _ranks(unit_X: Tensor, key_X: Tensor) -> tuple[Tensor, Tensor]:
    """Of each element: its rank by (key, order) within its unit, and how many elements the unit has."""
    order_X = key_X.argsort(stable=True)
    order_X = order_X[unit_X[order_X].argsort(stable=True)]
    sorted_X = unit_X[order_X]
    first_X, last_X = torch.searchsorted(sorted_X, sorted_X), torch.searchsorted(sorted_X, sorted_X, right=True)
    ranks_X, counts_X = torch.empty_like(order_X), torch.empty_like(order_X)
    ranks_X[order_X] = torch.arange(len(order_X), device=order_X.device) - first_X
    counts_X[order_X] = last_X - first_X
    return ranks_X, counts_X


def _draw(batch: Batch, stream: int) -> Tensor:
    """float64 [B, T] uniform in [0, 1) with 32 bits, keyed by document and position."""
    halves_BT2 = keyed_uniform(batch, 2, stream).double()
    return halves_BT2[..., 0] + halves_BT2[..., 1] * 2.0**-16


def _shuffled(batch: Batch, legal_BT: Tensor, stream: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Row and index of the legal entries, their rank in a random order of their document, and how many it has."""
    row_X, at_X = legal_BT.nonzero().unbind(1)
    unit_X = row_X * legal_BT.shape[1] + document_starts(batch)[row_X, at_X]
    return row_X, at_X, *_ranks(unit_X, _draw(batch, stream)[row_X, at_X])


def random_anchors(batch: Batch, legal_BT: Tensor, count: int | None) -> Tensor:
    """Bool [B, T]: of each document, `count` of the legal entries without replacement (all, where it has fewer; None =
    all). A document's draw depends on nothing but itself, so the count is per document, not per packed row."""
    if count is None:
        return legal_BT
    if count < 1:
        raise ValueError(f"anchors: needs at least one per document, got {count}")
    row_X, at_X, rank_X, _ = _shuffled(batch, legal_BT, ANCHORS)
    chosen_BT = torch.zeros_like(legal_BT)
    chosen_BT[row_X, at_X] = rank_X < count
    return chosen_BT


def consecutive_anchors(batch: Batch, legal_BT: Tensor, count: int) -> Tensor:
    """Bool [B, T]: of each document, `count` legal entries in a row from a random one on (BiTA: 64)."""
    if count < 1:
        raise ValueError(f"anchors: needs at least one per document, got {count}")
    row_X, at_X = legal_BT.nonzero().unbind(1)
    start_X = document_starts(batch)[row_X, at_X]
    unit_X = row_X * legal_BT.shape[1] + start_X
    rank_X, size_X = _ranks(unit_X, at_X)
    from_X = (_draw(batch, ANCHORS)[row_X, start_X] * (size_X - count + 1).clamp(min=1)).long()
    chosen_BT = torch.zeros_like(legal_BT)
    chosen_BT[row_X, at_X] = (rank_X >= from_X) & (rank_X < from_X + count)
    return chosen_BT


# Slots


def _build(
    batch: Batch,
    row_X: Tensor,
    anchor_X: Tensor,
    depth_X: Tensor,
    group_X: Tensor,
    member_X: Tensor,
    token_X: Tensor,
    label_X: Tensor,
    known_X: Tensor,
    cut: Cut,
) -> Slots:
    """Slots from flat lists in the order of (row, anchor, depth, member). Weight 1 where the label counts (`cut`)."""
    if cut not in CUTS:
        raise ValueError(f"cut: must be one of {', '.join(CUTS)}, got {cut!r}")
    b, t = batch.ids_BT.shape
    gap_BT = (~batch.supervised_BT).cumsum(1)
    end_X = _ends(batch)[row_X, anchor_X]
    inside_X = (label_X <= end_X) & (label_X > known_X)
    inner_X, from_X = label_X.clamp(0, t - 1), known_X.clamp(0, t - 1)
    counts_X = inside_X & batch.supervised_BT[row_X, inner_X] & (batch.samples_BT[row_X, anchor_X] >= 0)
    if cut == "run":
        counts_X = counts_X & batch.supervised_BT[row_X, from_X] & (gap_BT[row_X, inner_X] == gap_BT[row_X, from_X])
    sizes_B = torch.bincount(row_X, minlength=b)
    column_X = torch.arange(len(row_X), device=row_X.device) - (sizes_B.cumsum(0) - sizes_B)[row_X]
    q = int(sizes_B.max())

    def spread(x_X: Tensor, padding: int = 0) -> Tensor:
        out_BQ = torch.full((b, q), padding, dtype=x_X.dtype, device=x_X.device)
        out_BQ[row_X, column_X] = x_X
        return out_BQ

    return Slots(
        anchor_BQ=spread(anchor_X),
        depth_BQ=spread(depth_X),
        group_BQ=spread(group_X, -1),
        member_BQ=spread(member_X),
        position_BQ=spread(batch.positions_BT[row_X, anchor_X] + depth_X),
        token_BQ=spread(token_X),
        label_BQ=spread(label_X),
        drafted_BQ=spread(label_X - known_X),
        weight_BQ=spread(counts_X.float()),
        document_BQ=spread(batch.samples_BT[row_X, anchor_X], -1),
    )


def anchored(
    batch: Batch,
    anchors_BT: Tensor,
    depths: Iterable[int],
    *,
    ahead: int = 0,
    shift: int = 0,
    members: int = 1,
    cut: Cut = "run",
) -> Slots:
    """One group per anchor, with all `depths` (ascending), each `members` times; label = anchor + depth + shift.

    Slots past the end of a document stay, without a loss: a draft always has all its slots.
    """
    depth_K = torch.tensor(list(depths), device=anchors_BT.device)
    row_A, at_A = anchors_BT.nonzero().unbind(1)
    each = len(depth_K) * members
    row_X, at_X = row_A.repeat_interleave(each), at_A.repeat_interleave(each)
    depth_X = depth_K.repeat_interleave(members).repeat(len(row_A))
    member_X = torch.arange(members, device=row_A.device).repeat(len(row_A) * len(depth_K))
    known_X = at_X + ahead
    return _build(batch, row_X, at_X, depth_X, at_X, member_X, known_X + depth_X, at_X + depth_X + shift, known_X, cut)


def append_at_cut(batch: Batch, depths: int, members: int = 1, cuts: int = 1) -> Slots:
    """`depths` x `members` prompt tokens behind `cuts` random places of each document (PPD, section 3.1: one cut). The
    target itself gives the token after the cut, which drafting knows (`ahead` 1); depth 1 predicts the one after that.
    """
    chosen_BT = random_anchors(batch, legal_anchors(batch, "pair", ahead=1), cuts)
    return anchored(batch, chosen_BT, range(1, depths + 1), ahead=1, shift=1, members=members)


def cod(
    batch: Batch,
    depths: int,
    ratio: float = 0.7,
    least: float = 0.2,
    *,
    ahead: int = 0,
    max_anchors: int | None = None,
) -> Slots:
    """Conditional drop-token (PARD, arXiv:2504.18583, section 3.2): slots of depths 1 .. `depths` - 1; depth 0 is the
    context itself. Of a document's L seeds (entries with a supervised pair, P-EAGLE), floor(L * max(ratio ** j, least))
    are kept at depth j, drawn among those kept at depth j - 1 whose label is supervised there, so that every slot's
    whole chain exists. `ratio` 1 keeps all. `max_anchors`: seeds per document beyond depth 0, at most.
    """
    if depths < 1 or not 0 < ratio <= 1 or not 0 <= least <= 1 or (max_anchors is not None and max_anchors < 1):
        raise ValueError(
            "drop-token: needs depths >= 1, 0 < ratio <= 1, 0 <= least <= 1 and max_anchors >= 1 or none, got "
            f"{depths}, {ratio}, {least}, {max_anchors}"
        )
    row_X, at_X, rank_X, seeds_X = _shuffled(batch, legal_anchors(batch, "pair", ahead=ahead), ANCHORS)
    unit_X = row_X * batch.ids_BT.shape[1] + document_starts(batch)[row_X, at_X]
    end_X = _ends(batch)[row_X, at_X]
    gap_BT = (~batch.supervised_BT).cumsum(1)
    gap_X = gap_BT[row_X, at_X + ahead]
    kept_X = torch.ones_like(rank_X, dtype=torch.bool) if max_anchors is None else rank_X < max_anchors
    chosen: list[tuple[Tensor, Tensor, Tensor]] = []
    for j in range(1, depths):
        label_X = at_X + ahead + 1 + j
        inner_X = label_X.clamp(max=batch.ids_BT.shape[1] - 1)
        alive_X = (kept_X & (label_X <= end_X) & (gap_BT[row_X, inner_X] == gap_X)).nonzero()[:, 0]
        turn_A, _ = _ranks(unit_X[alive_X], rank_X[alive_X])
        quota_A = (
            seeds_X[alive_X].double() * max(ratio**j, least) + 1e-9
        ).long()  # 10 * 0.7 is 7, whatever its last bit
        kept_X = torch.zeros_like(kept_X)
        kept_X[alive_X[turn_A < quota_A]] = True
        chosen.append((row_X[kept_X], at_X[kept_X], torch.full_like(row_X[kept_X], j)))
    none_X = row_X[:0]
    row_S, at_S, depth_S = (
        torch.cat([none_X, *parts]) for parts in (zip(*chosen, strict=True) if chosen else [()] * 3)
    )
    order_S = ((row_S * batch.ids_BT.shape[1] + at_S) * depths + depth_S).argsort()
    row_S, at_S, depth_S = row_S[order_S], at_S[order_S], depth_S[order_S]
    known_S = at_S + ahead
    return _build(
        batch,
        row_S,
        at_S,
        depth_S,
        at_S,
        torch.zeros_like(at_S),
        known_S + depth_S,
        known_S + depth_S + 1,
        known_S,
        "run",
    )


def all_shifts(
    batch: Batch, k: int, shifts: Literal["all", "one"] = "all", *, ahead: int = 1, shift: int = 2, cut: Cut = "run"
) -> Slots:
    """Every entry of every document as a slot, cut into blocks of `k` that start at `s` (Falcon; rule `block`): for all
    s of 0..k-1 ("all", k times the slots, group = (document, s)) or for one drawn per document and epoch ("one").

    Depth = position - s (below 0: the part before the first whole block). The last entries of a block know the token
    `ahead` of them; entry i predicts the token i + k - 1 + shift, the drafted = i's place in its block + 1.
    """
    if k < 1 or shifts not in ("all", "one"):
        raise ValueError(f"all_shifts: needs k >= 1 and shifts all or one, got {k}, {shifts!r}")
    t = batch.ids_BT.shape[1]
    row_X, at_X = (batch.samples_BT >= 0).nonzero().unbind(1)
    start_X = document_starts(batch)[row_X, at_X]
    turns = range(k) if shifts == "all" else range(1)
    drawn_X = (_draw(batch, SHIFT)[row_X, start_X] * k).long()
    s_X = torch.cat([drawn_X if shifts == "one" else torch.full_like(row_X, s) for s in turns])
    row_X, at_X, start_X = row_X.repeat(len(turns)), at_X.repeat(len(turns)), start_X.repeat(len(turns))
    order_X = ((row_X * t + start_X) * k + s_X).argsort(stable=True)
    row_X, at_X, start_X, s_X = row_X[order_X], at_X[order_X], start_X[order_X], s_X[order_X]
    depth_X = at_X - start_X - s_X
    known_X = at_X - depth_X % k + k - 1 + ahead
    slots = _build(
        batch, row_X, start_X, depth_X, s_X * t + start_X, torch.zeros_like(at_X), at_X + ahead, at_X + k - 1 + shift,
        known_X, cut,
    )  # fmt: skip
    position_BQ = at(batch.positions_BT, slots.token_BQ - ahead)
    return replace(slots, position_BQ=torch.where(slots.document_BQ >= 0, position_BQ, 0))


# What slots show


def real(slots: Slots) -> Tensor:
    """Bool [B, Q]: slots that stand for a token a draft knows (the anchor's); the others are masks. Input policy
    `mask`."""
    return (slots.token_BQ <= slots.label_BQ - slots.drafted_BQ) & (slots.document_BQ >= 0)


def fill(slots: Slots, batch: Batch, real_BQ: Tensor, otherwise: int | Tensor) -> Tensor:
    """int64 [B, Q] input ids: the true token where `real_BQ`, elsewhere a mask id or the tokens given."""
    inside_BQ = (slots.token_BQ < batch.ids_BT.shape[1]) & (at(batch.samples_BT, slots.token_BQ) == slots.document_BQ)
    other_BQ = torch.as_tensor(otherwise, device=batch.ids_BT.device)
    return torch.where(real_BQ & inside_BQ, at(batch.ids_BT, slots.token_BQ), other_BQ)


def variable_prefix(slots: Slots, batch: Batch, width: int, decay: float = 0.9, least: int = 2) -> tuple[Slots, Tensor]:
    """Input policy `prefix` (D2SD, arXiv:2606.04446): each group shows its first l true tokens, the anchor's with them,
    l in least .. width - 1 with chance proportional to decay ** l. Slots that predict one of these lose their loss, the
    others count `drafted` from the last token shown. Returns the slots and which are real [B, Q]. `weigh` comes after.
    """
    if not 1 <= least < width or decay <= 0:
        raise ValueError(f"variable prefix: needs 1 <= least < width and decay > 0, got {least}, {width}, {decay}")
    lengths_L = torch.arange(least, width, device=batch.ids_BT.device)
    chance_L = (decay ** lengths_L.double()).cumsum(0)
    drawn_BQ = at(_draw(batch, PREFIX), slots.anchor_BQ) * chance_L[-1]
    shown_BQ = lengths_L[torch.searchsorted(chance_L, drawn_BQ, right=True).clamp(max=len(lengths_L) - 1)]
    known_BQ = slots.label_BQ - slots.drafted_BQ
    drafted_BQ = slots.drafted_BQ - (shown_BQ - 1)
    weight_BQ = torch.where(drafted_BQ > 0, slots.weight_BQ, 0)
    real_BQ = (slots.token_BQ < known_BQ + shown_BQ) & (slots.document_BQ >= 0)
    return replace(slots, drafted_BQ=drafted_BQ, weight_BQ=weight_BQ), real_BQ


def noise_tokens(slots: Slots, batch: Batch) -> Tensor:
    """int64 [B, Q] input policy `noise` (Make Some Noise, arXiv:2406.17404): tokens drawn from the text of the slot's
    document up to the newest one known; give them to `fill`."""
    depth_BQ = slots.depth_BQ - slots.depth_BQ.min() if slots.depth_BQ.numel() else slots.depth_BQ
    width = int(depth_BQ.max()) + 1 if depth_BQ.numel() else 1
    draws_BTK = keyed_uniform(batch, width, NOISE).double()
    rows_B1 = torch.arange(len(depth_BQ), device=depth_BQ.device)[:, None]
    start_BQ = at(document_starts(batch), slots.anchor_BQ)
    known_BQ = slots.label_BQ - slots.drafted_BQ
    index_BQ = start_BQ + (draws_BTK[rows_B1, slots.anchor_BQ, depth_BQ] * (known_BQ - start_BQ + 1)).long()
    return at(batch.ids_BT, index_BQ)


def glance(slots: Slots, batch: Batch, guess_BQ: Tensor, share: float, hidden_BQ: Tensor | None = None) -> Tensor:
    """Bool [B, Q] input policy `glanced` (Falcon, section 3.2): which slots show the truth in a second pass. Of each
    group, share * (Hamming distance of `guess_BQ` [target ids] from the labels, over slots with a loss) of the slots
    `hidden_BQ` (default: those that are not `real`), in one run that starts at a random one. The number is rounded up or
    down at random, so that its mean is right: in a group of two, 0.4 of a miss would otherwise be nothing.

    The paper lets `share` fall with the epochs, 0.4 * (E - e) / E; give it that.
    """
    if not 0 <= share <= 1:
        raise ValueError(f"glance: share must lie in 0..1, got {share}")
    hidden_BQ = ~real(slots) if hidden_BQ is None else hidden_BQ
    hidden_BQ = hidden_BQ & (slots.document_BQ >= 0)
    row_X, column_X = hidden_BQ.nonzero().unbind(1)
    t = batch.ids_BT.shape[1]
    groups = int(slots.group_BQ.max()) + 1 if slots.group_BQ.numel() else 1
    wrong_BQ = (guess_BQ != at(batch.ids_BT, slots.label_BQ)) & (slots.weight_BQ > 0)
    misses_U = torch.zeros(len(guess_BQ) * groups, dtype=torch.int64, device=guess_BQ.device)
    row_W, column_W = wrong_BQ.nonzero().unbind(1)
    misses_U.index_add_(0, row_W * groups + slots.group_BQ[row_W, column_W], torch.ones_like(row_W))
    unit_X = row_X * groups + slots.group_BQ[row_X, column_X]
    rank_X, size_X = _ranks(unit_X, column_X)
    place_X = row_X, slots.anchor_BQ[row_X, column_X], slots.group_BQ[row_X, column_X] // t % 8
    draw_X, round_X = (keyed_uniform(batch, 8, stream)[place_X] for stream in (GLANCE, ROUND))
    shown_X = torch.minimum((misses_U[unit_X].double() * share + round_X + 1e-9).long(), size_X)
    from_X = (draw_X.double() * (size_X - shown_X + 1)).long()
    shown_BQ = torch.zeros_like(hidden_BQ)
    shown_BQ[row_X, column_X] = (rank_X >= from_X) & (rank_X < from_X + shown_X)
    return shown_BQ


# Weights and denominators


def weigh(slots: Slots, weight: Weight, gamma: float | None = None, ratio: float | None = None) -> Slots:
    """The slots under a rule of `WEIGHTS`. With `dpace` they keep weight 1: `score` multiplies the draft's weights in.

    Raises ValueError for an unknown rule, or one without its parameter.
    """
    if weight not in WEIGHTS:
        raise ValueError(f"weight: must be one of {', '.join(WEIGHTS)}, got {weight!r}")
    steps_BQ = (slots.drafted_BQ - 1).clamp(min=0)
    if weight == "exp":
        if gamma is None or gamma <= 0:
            raise ValueError(f"weight exp: gamma must be positive, got {gamma}")
        return replace(slots, weight_BQ=slots.weight_BQ * torch.exp(-steps_BQ / gamma))
    if weight == "geometric":
        if ratio is None or not 0 < ratio <= 1:
            raise ValueError(f"weight geometric: ratio must lie in (0, 1], got {ratio}")
        return replace(slots, weight_BQ=slots.weight_BQ * ratio**steps_BQ)
    return slots


def denominator(slots: Slots, kind: Denominator, weight: Weight = "uniform") -> float:
    """What a sum over slots is divided by: a number of the data alone, by a rule of `DENOMINATORS`.

    Raises ValueError for an unknown rule, and for the sum of weights that only a forward pass knows.
    """
    if kind not in DENOMINATORS:
        raise ValueError(f"denominator: must be one of {', '.join(DENOMINATORS)}, got {kind!r}")
    if kind == "weights":
        if weight == "dpace":
            raise ValueError("denominator weights: D-PACE weights come from the draft; set it to slots or blocks")
        return float(slots.weight_BQ.double().sum())
    if kind == "slots":
        return float(len(slots.flat_R))
    return float(_chains(slots)[1])


def _chains(slots: Slots) -> tuple[Tensor, int, int]:
    """Of the R slots with a loss: the index of their group among the G groups that have one; G; the largest drafted."""
    flat_R = slots.flat_R
    if not len(flat_R):
        return flat_R, 0, 0
    unit_R = (flat_R // slots.group_BQ.shape[1]) * (int(slots.group_BQ.max()) + 1) + slots.group_BQ.flatten()[flat_R]
    groups_G, group_R = unit_R.unique(return_inverse=True)
    return group_R, len(groups_G), int(slots.drafted_BQ.flatten()[flat_R].max())


def dpace(chance_R: Tensor, slots: Slots, mix: float = 0.5) -> Tensor:
    """[R] D-PACE weights (arXiv:2605.18810) of `slots.flat_R`, without gradient. `chance_R` is the draft's probability
    of each label; s = (1 - mix) * chance + mix, P_k = product of s up to slot k of the group, weight_k = sum of P_j, j >= k.
    """
    group_R, groups, depths = _chains(slots)
    step_R = slots.drafted_BQ.flatten()[slots.flat_R] - 1
    keep_GK = chance_R.new_ones(groups, depths)
    keep_GK[group_R, step_R] = (1 - mix) * chance_R.detach() + mix
    has_GK = torch.zeros_like(keep_GK)
    has_GK[group_R, step_R] = 1
    reach_GK = keep_GK.cumprod(1) * has_GK
    return reach_GK.flip(1).cumsum(1).flip(1)[group_R, step_R]


# Loss


def score(
    logits: Logits,
    slots: Slots,
    batch: Batch,
    out: TargetOut,
    d2t_W: Tensor | None,
    t2d_V: Tensor | None,
    objective: Objective,
    oov: Oov,
    weight: Weight = "uniform",
    depths: int | None = None,
) -> Terms:
    """The term `slots`: the weighted sum of the objective over `slots.flat_R` (divide it by `denominator`), and metrics.

    The teacher of a label is the target's state one token before it, or what was kept of that. Without either (the
    objective must be ce) the data's tokens stand in for it. Metrics per `drafted` d: `accuracy_d`, `accept_d`; besides
    `lost_mass`, `run_length`, `run_length_sq` (leading correct slots of groups that have every d up to `depths`; None =
    the largest there is), as `supervision.Scorer` has them, all unweighted.
    """
    flat_R = slots.flat_R
    labels_R = slots.label_ids(batch)
    draft_R = labels_R if t2d_V is None else t2d_V[labels_R]
    own_R = slots.weight_BQ.flatten()[flat_R]
    weight_R: Tensor | Weigh = (lambda chance_R: own_R * dpace(chance_R, slots)) if weight == "dpace" else own_R
    lost_R: Tensor | None = None
    if out.last_hidden_BTD is None and out.likeliest is None:
        if [name for _, name in objective] != ["ce"]:
            raise ValueError("objective: this method reads no target states, so that only ce is possible")
        loss, scored = weighed_loss(logits, objective, draft_R, weight_R)
        correct_R = scored.top_T == draft_R
        accept_R = torch.where(draft_R >= 0, (-scored.ce_T).exp(), 0)
    else:
        t = batch.ids_BT.shape[1]
        row_R = flat_R // slots.anchor_BQ.shape[1]
        states_U, index_R = (row_R * t + slots.label_BQ.flatten()[flat_R] - 1).unique(return_inverse=True)
        bank = teacher_of(out, lambda x: x.flatten(0, 1)[states_U], d2t_W, t2d_V, reads=len(index_R))
        loss, told = fused_score(logits, bank.rows(index_R, draft_R), objective, oov, weight_R)
        correct_R, accept_R, lost_R = told.correct_R, told.accept_R, told.lost_R
    terms = Terms({"slots": loss}, accept_R=accept_R)
    group_R, groups, largest = _chains(slots)
    depths = max(depths or 0, largest)
    step_R = slots.drafted_BQ.flatten()[flat_R] - 1
    for d in range(1, depths + 1):
        here_R = step_R == d - 1
        count = here_R.sum().float()
        terms.metrics[f"accuracy_{d}"] = (correct_R & here_R).sum().float(), count
        terms.metrics[f"accept_{d}"] = accept_R[here_R].sum(), count
        if d == 1 and lost_R is not None:
            terms.metrics["lost_mass"] = lost_R[here_R].sum(), count
    has_GK = torch.zeros(groups, depths, dtype=torch.bool, device=flat_R.device)
    right_GK = torch.zeros_like(has_GK)
    has_GK[group_R, step_R] = True
    right_GK[group_R, step_R] = correct_R
    run_G = right_GK[has_GK.all(1)].long().cumprod(1).sum(1).float()
    terms.metrics["run_length"] = run_G.sum(), torch.tensor(float(len(run_G)))
    terms.metrics["run_length_sq"] = run_G.square().sum(), torch.tensor(float(len(run_G)))
    return terms


# Who sees whom


class Entries(NamedTuple):
    """Queries or keys, each field [B, X]. `place`: index among the keys; kind 0 = prefix, 1 = context, 2 = slot."""

    place: Tensor
    kind: Tensor
    document: Tensor
    anchor: Tensor
    depth: Tensor
    group: Tensor
    member: Tensor
    position: Tensor


PREFIX_KEY, CONTEXT_KEY, SLOT_KEY = 0, 1, 2
PART = 128  # queries per part of a dense mask
KEPT = 16  # of more parts, backward makes keys and mask anew: kept, they grow as the square of the length


def see(rule: MaskRule, query: Entries, key: Entries) -> Tensor:
    """The one predicate: True where `query` sees `key` (fields broadcast).

    Prefix keys are seen by slots alone. Context and slots see the context of their document up to their anchor (an
    entry of the context: itself); slots see slots of their group. Everything sees itself, padding included.
    """
    slot = query.kind == SLOT_KEY
    same = (query.document == key.document) & (query.document >= 0)
    before = key.anchor < query.anchor
    if rule.context == "exclusive":
        upto = before | ((key.anchor == query.anchor) & ~slot)
    else:
        upto = before | (key.anchor == query.anchor)
    context = (key.kind == CONTEXT_KEY) & upto
    group = slot & (key.kind == SLOT_KEY) & (query.group == key.group)
    if rule.intra == "causal":
        group = group & (key.depth <= query.depth)
    elif rule.intra == "block":
        group = group & (key.depth // rule.block <= query.depth // rule.block)
    elif rule.intra == "member":
        group = group & (key.depth <= query.depth) & (key.member == query.member)
    seen = same & (context | group)
    if rule.window is not None:
        seen = seen & (query.position - key.position < rule.window)
    prefix = slot & (key.kind == PREFIX_KEY) & (query.document >= 0)
    return seen | prefix | (query.place == key.place)


def entries(slots: Slots, batch: Batch, *, context_rows: bool = False, prefix: int = 0) -> tuple[Entries, Entries]:
    """Queries ([context |] slots) and keys ([prefix | context | slots]) that a mask is made of."""
    b, t = batch.ids_BT.shape
    q = slots.anchor_BQ.shape[1]
    device = batch.ids_BT.device

    def row(values: Tensor) -> Tensor:
        return values.to(device)[None].expand(b, -1)

    time_BT = row(torch.arange(t))
    zero_BP, zero_BT = row(torch.zeros(prefix, dtype=torch.int64)), torch.zeros_like(time_BT)
    parts = {
        "place": (row(torch.arange(prefix)), time_BT + prefix, row(torch.arange(q)) + prefix + t),
        "kind": tuple(row(torch.full((n,), kind)) for kind, n in enumerate((prefix, t, q))),
        "document": (zero_BP - 1, batch.samples_BT, slots.document_BQ),
        "anchor": (zero_BP, time_BT, slots.anchor_BQ),
        "depth": (zero_BP, zero_BT, slots.depth_BQ),
        "group": (zero_BP - 1, zero_BT - 1, slots.group_BQ),
        "member": (zero_BP, zero_BT, slots.member_BQ),
        "position": (zero_BP, batch.positions_BT, slots.position_BQ),
    }
    keys = Entries(**{name: torch.cat(fields, dim=1) for name, fields in parts.items()})
    first = prefix if context_rows else prefix + t
    return Entries(*(field[:, first:] for field in keys)), keys


def dense_mask(slots: Slots, batch: Batch, rule: MaskRule, *, context_rows: bool = False, prefix: int = 0) -> Tensor:
    """Bool [B, Q, P + T + Q] (with `context_rows`: [B, T + Q, P + T + Q]): `see` over all pairs."""
    queries, keys = entries(slots, batch, context_rows=context_rows, prefix=prefix)
    return see(rule, Entries(*(f[:, :, None] for f in queries)), Entries(*(f[:, None, :] for f in keys)))


def mask_mod(
    slots: Slots, batch: Batch, rule: MaskRule, *, context_rows: bool = False, prefix: int = 0
) -> Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]:
    """`see` as flex attention asks: (batch row, head, query, key) -> bool."""
    queries, keys = entries(slots, batch, context_rows=context_rows, prefix=prefix)

    def visible(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        return see(rule, Entries(*(f[b, q] for f in queries)), Entries(*(f[b, k] for f in keys)))

    return visible


class Part(NamedTuple):
    """The queries first..last - 1 and what keys they need: all of the prefix, and spans of context and slots."""

    queries: slice
    context: slice
    own: slice
    see_BQS: Tensor  # over [prefix | span of the context | span of the slots]


@dataclass
class SlotMask:
    """A mask in the form that `attend_slots` uses on its device; opaque to methods."""

    parts: list[Part]
    block: Any = None


def make_mask(
    slots: Slots, batch: Batch, rule: MaskRule, *, context_rows: bool = False, prefix: int = 0, flex: bool | None = None
) -> SlotMask:
    """The mask of one forward pass; make it once per rule, not per layer. `flex`: as a block mask of flex attention
    (None = on CUDA), which works, slowly, on CPUs too. Otherwise dense, in parts of PART queries, each over the keys
    that its queries see: groups lie side by side, so that a slot never meets the other groups' slots."""
    b, t = batch.ids_BT.shape
    q = slots.anchor_BQ.shape[1]
    before = t if context_rows else 0
    if not before + q:
        return SlotMask([])
    if batch.ids_BT.device.type == "cuda" if flex is None else flex:
        from torch.nn.attention.flex_attention import create_block_mask

        visible = mask_mod(slots, batch, rule, context_rows=context_rows, prefix=prefix)
        device = str(batch.ids_BT.device)
        return SlotMask([], create_block_mask(visible, b, None, before + q, prefix + t + q, device=device))
    queries, keys = entries(slots, batch, context_rows=context_rows, prefix=prefix)
    column_Q = torch.arange(q, device=batch.ids_BT.device)
    change_BQ = F.pad(slots.group_BQ[:, 1:] != slots.group_BQ[:, :-1], (1, 0), value=True) | (slots.document_BQ < 0)
    start_BQ = torch.where(change_BQ, column_Q, 0).cummax(1).values
    end_BQ = q - torch.where(F.pad(change_BQ[:, 1:], (0, 1), value=True).flip(1), column_Q, 0).cummax(1).values.flip(1)
    parts = []
    for lo, hi in [*_spans(0, before), *_spans(before, before + q)]:
        query = Entries(*(f[:, lo:hi, None] for f in queries))
        shown_BQS = see(rule, query, Entries(*(f[:, None, : prefix + t] for f in keys)))
        used = shown_BQS[..., prefix:].any(1).any(0).nonzero()[:, 0]
        context = slice(int(used[0]), int(used[-1]) + 1) if len(used) else slice(0, 0)
        own = slice(0, 0)
        if lo >= before:
            own = slice(int(start_BQ[:, lo - before].min()), int(end_BQ[:, hi - 1 - before].max()))
        own_keys = Entries(*(f[:, None, prefix + t :][..., own] for f in keys))
        seen = [shown_BQS[..., :prefix], shown_BQS[..., prefix:][..., context], see(rule, query, own_keys)]
        parts.append(Part(slice(lo, hi), context, own, torch.cat(seen, dim=-1)))
    return SlotMask(parts)


def _spans(first: int, last: int) -> list[tuple[int, int]]:
    return [(lo, min(lo + PART, last)) for lo in range(first, last, PART)]


def attend_slots(
    q_BHQd: Tensor,
    context: tuple[Tensor, Tensor],
    own: tuple[Tensor, Tensor],
    mask: SlotMask,
    prefix: tuple[Tensor, Tensor] | None = None,
) -> Tensor:
    """Attention [B, H, Q, d] of H heads over [prefix | context | slots], each a pair of keys and values [B, G, x, d],
    keys rotated. Queries are those of the mask: the slots, with `context_rows` the context's before them."""
    shared = q_BHQd.shape[1] != context[0].shape[1]
    before: list[list[Tensor]] = [[], []] if prefix is None else [[x] for x in prefix]
    if mask.block is not None:
        k_BGSd, v_BGSd = (torch.cat([*before[i], context[i], own[i]], dim=2) for i in range(2))
        return flex(q_BHQd, k_BGSd, v_BGSd, mask.block)
    if not mask.parts:  # no slot in the whole batch: every input takes part all the same, with gradient zero
        return q_BHQd + 0 * sum(x.sum() for x in (*context, *own))

    def attend_part(part: Part) -> Tensor:
        k_BGSd, v_BGSd = (
            torch.cat([*before[i], context[i][:, :, part.context], own[i][:, :, part.own]], dim=2) for i in range(2)
        )
        q_BHqd, see_B1qS = q_BHQd[:, :, part.queries], part.see_BQS[:, None]
        return F.scaled_dot_product_attention(q_BHqd, k_BGSd, v_BGSd, see_B1qS, enable_gqa=shared)

    if len(mask.parts) <= KEPT or not torch.is_grad_enabled():
        return torch.cat([attend_part(part) for part in mask.parts], dim=2)
    anew = partial(checkpoint, attend_part, use_reentrant=False, preserve_rng_state=False)
    return torch.cat([anew(part) for part in mask.parts], dim=2)
