"""What a pass of a denoiser says about every open place, and which places it decides: statistics in one pass over the
vocabulary, then a rule per row.

`statistics` gives the likeliest token of a place, its probability, the distance of the runner-up (as probabilities and
as logits) and the entropy. `unmask` adds the rule, one of `RULES`, over a score, one of `SCORES`; where it takes no
place, the best-scored open one is taken, so that every pass decides something. Of the entries of
`inference.strategies.STRATEGIES` these need nothing else (rule, score):

- fixed (count, confidence); margin (count, margin); threshold (threshold, confidence); factor (factor, confidence);
  entropy_bound (bound, entropy); entropy (threshold, entropy).

Where `statistics` ran as a kernel, `choose` applies these rules to what its first stage left (inference/strategies.py).
The others use more than a pass's own statistics, and choose in `inference/selections.py`: earlier passes (r2, klass,
credit, soft), neighbours or the place itself (hierarchy, local_leap, left_prefix), what the candidates are (ascending,
eos_rejection, adablock), how much of the answer is left (prophet), several blocks (pipeline), decided places (edit,
remask), trained parts (learned, independent), branches (freedave, lopa, s2d2).

Among equal logits the lowest index is the token, among equal scores the lowest place comes first. A place where no
token is allowed (all -inf) has token 0 and zeros for all else.

The kernel splits a row's logits into parts of fixed size, so that a row's result does not depend on how many there are;
sums are kept relative to the running maximum (online softmax: Milakov and Gimelshein, arXiv:1805.02867), the entropy's
too: H = log s - t / s with s = sum e^(x - m), t = sum (x - m) e^(x - m), in which nothing large cancels.

Tests: pytest tests/test_kernels.py -k unmask; tests/test_small_kernels.py
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from .jit import Build, jit, runs_on, tl, triton

TILE = 1024  # logits read at once
TILES = 16  # tiles of a part
PLACES = 128  # of a row, at most, for the kernel's rule
CACHED = 2**18  # logits that the plain form takes at once where it needs copies of them
SCORES = ("confidence", "margin", "entropy")
RULES = ("threshold", "factor", "count", "bound")


@dataclass(frozen=True)
class Rule:
    """Which places a pass decides."""

    name: Literal["threshold", "factor", "count", "bound"] = "threshold"
    """threshold: score >= value (entropy: at most value); factor: the largest n whose n-th best score c has
    (n + 1)(1 - c) < value (Fast-dLLM v1, arXiv:2505.22618); count: the best `count_B`; bound: least entropy first, while
    the sum of all but the last is at most value (EB-Sampler, arXiv:2505.24857)."""
    score: Literal["confidence", "margin", "entropy"] = "confidence"
    """confidence: largest probability; margin: less the second one; entropy: in nats, the less the better."""
    value: float = 0.9
    """The rule's number (threshold of Fast-dLLM v1: 0.9); unused by count."""

    def __post_init__(self) -> None:
        if self.name not in RULES or self.score not in SCORES:
            raise ValueError(f"rule {self.name!r} on {self.score!r}: use one of {RULES} on one of {SCORES}")
        if (self.name == "bound" and self.score != "entropy") or (self.name == "factor" and self.score == "entropy"):
            raise ValueError(f"rule {self.name!r} on {self.score!r}: bound adds entropies, factor takes probabilities")


class Statistics:
    """What logits [..., V] say, each part [...]: in the plain form computed when it is first asked for, as each costs a
    pass or two over the logits; the kernel fills in all. fp32, fp64 for fp64 logits."""

    def __init__(self, logits: Tensor, mask_id: int | None = None) -> None:
        self.logits, self.mask_id = logits, mask_id
        self.parts: tuple[Tensor, Tensor] | None = None
        """What the kernel's first stage found, for `choose`."""

    @cached_property
    def _x(self) -> Tensor:
        x = self.logits.to(torch.promote_types(self.logits.dtype, torch.float32))
        if self.mask_id is None or self.mask_id >= x.shape[-1]:
            return x
        return x.index_fill(-1, torch.tensor([self.mask_id], device=x.device), -math.inf)

    @cached_property
    def lse(self) -> Tensor:
        """Log-sum-exp."""
        return self._x.logsumexp(-1)

    @cached_property
    def best(self) -> Tensor:
        """int64, the likeliest token."""
        return self._x.argmax(-1)

    @cached_property
    def _top(self) -> Tensor:
        return self._x.gather(-1, self.best[..., None])[..., 0]

    def _zero_if_empty(self, x: Tensor) -> Tensor:
        return torch.where(self._top == -math.inf, 0.0, x)

    @cached_property
    def confidence(self) -> Tensor:
        """Its probability."""
        return self._zero_if_empty((self._top - self.lse).exp())

    @cached_property
    def gap(self) -> Tensor:
        """Its logit less the second largest; inf where there is no second."""
        second = self._x.scatter(-1, self.best[..., None], -math.inf).amax(-1)
        return self._zero_if_empty(self._top - second)

    @cached_property
    def margin(self) -> Tensor:
        """Its probability less the second largest."""
        return self.confidence * -torch.expm1(-self.gap)

    @cached_property
    def entropy(self) -> Tensor:
        """In nats."""
        least = torch.finfo(self._x.dtype).min  # for -inf: its probability is 0, and 0 * -inf is not
        rows, vocab = self.lse.numel(), self._x.shape[-1]
        parts = []
        for x_rV, lse_r in zip(
            *(y.split(max(1, CACHED // vocab)) for y in (self._x.reshape(rows, vocab), self.lse.reshape(rows))),
            strict=True,
        ):
            log_p_rV = x_rV - lse_r[:, None]
            parts.append(-torch.linalg.vecdot(log_p_rV.exp(), log_p_rV.clamp_(min=least)))
        return self._zero_if_empty(torch.cat(parts).view(self.lse.shape))


class Unmasked(NamedTuple):
    """Of B rows of C places."""

    chosen_BC: Tensor  # bool, open places that are decided now
    best_BC: Tensor  # int64, the likeliest token of every place
    score_BC: Tensor  # by which the rule chose; the higher the better
    left_B: Tensor  # int64, open places that stay open


def ranks(score_BC: Tensor, open_BC: Tensor) -> Tensor:
    """int64 [B, C]: how many open places come before each: of higher score, or of equal score and before it."""
    place_C = torch.arange(score_BC.shape[1], device=score_BC.device)
    more_BCC = score_BC[:, None, :] > score_BC[:, :, None]
    same_BCC = (score_BC[:, None, :] == score_BC[:, :, None]) & (place_C < place_C[:, None])
    return ((more_BCC | same_BCC) & open_BC[:, None]).sum(-1)


def choose_reference(score_BC: Tensor, open_BC: Tensor, rule: Rule, count_B: Tensor | None = None) -> Tensor:
    """bool [B, C]: the places that the rule takes, the best open one where it takes none."""
    rank_BC = ranks(score_BC, open_BC)
    value = -rule.value if rule.score == "entropy" else rule.value
    if rule.name == "threshold":
        taken_BC = score_BC >= value
    elif rule.name == "count":
        assert count_B is not None
        taken_BC = rank_BC < count_B[:, None]
    else:  # all that is better must be taken too
        if rule.name == "factor":
            good_BC = (rank_BC + 2) * (1 - score_BC) < rule.value
        else:
            before_BCC = (rank_BC[:, None, :] < rank_BC[:, :, None]) & open_BC[:, None]
            good_BC = (before_BCC * -score_BC[:, None, :]).sum(-1) <= rule.value
        taken_BC = rank_BC < torch.where(open_BC & ~good_BC, rank_BC, rank_BC.shape[1]).amin(1, keepdim=True)
    chosen_BC = taken_BC & open_BC
    return chosen_BC | (open_BC & (rank_BC == 0) & ~chosen_BC.any(1, keepdim=True))


def _score(found: Statistics, rule: Rule) -> Tensor:
    """The higher the better."""
    return -found.entropy if rule.score == "entropy" else getattr(found, rule.score)


def unmask_reference(
    logits_BCV: Tensor, open_BC: Tensor, rule: Rule, count_B: Tensor | None = None, mask_id: int | None = None
) -> Unmasked:
    """The plain form."""
    found = Statistics(logits_BCV, mask_id)
    score_BC = _score(found, rule)
    chosen_BC = choose_reference(score_BC, open_BC, rule, count_B)
    return Unmasked(chosen_BC, found.best, score_BC, (open_BC & ~chosen_BC).sum(1))


@jit
def unmask_part_kernel(
    x_ptr,
    sums_ptr,
    best_ptr,
    C,
    V,
    mask_id,
    stride_row,
    stride_place,
    stride_col,
    PARTS,
    TILE: tl.constexpr,
    TILES: tl.constexpr,
):
    """Stage 1, grid (places, parts): of one part of a place's logits the maximum, s, t and the second, and the
    maximum's index."""
    place, part = tl.program_id(0).to(tl.int64), tl.program_id(1)
    x_ptr += (place // C) * stride_row + (place % C) * stride_place
    first = tl.full([], -float("inf"), tl.float32)
    second = tl.full([], -float("inf"), tl.float32)
    best = tl.zeros([], tl.int32)
    s = tl.zeros([], tl.float32)
    t = tl.zeros([], tl.float32)
    for tile in range(tl.minimum(TILES, tl.cdiv(V, TILE) - part * TILES)):
        column = (part * TILES + tile) * TILE + tl.arange(0, TILE)
        inside = (column < V) & (column != mask_id)
        x = tl.load(x_ptr + column.to(tl.int64) * stride_col, mask=inside, other=-float("inf")).to(tl.float32)
        top = tl.max(x, 0)
        at = tl.min(tl.where(x == top, column, 0x7FFFFFFF), 0)
        next_top = tl.max(tl.where(column == at, -float("inf"), x), 0)
        best = tl.where(top > first, at, best)
        second = tl.maximum(tl.minimum(top, first), tl.maximum(second, next_top))
        new = tl.maximum(first, top)
        shift = tl.where(new == -float("inf"), 0.0, new)
        z = x - shift
        e = tl.exp(z)
        step = tl.where(first == -float("inf"), 0.0, first - shift)
        t = (t + step * s) * tl.exp(step) + tl.sum(tl.where(e > 0, z * e, 0.0), 0)
        s = s * tl.exp(step) + tl.sum(e, 0)
        first = new
    at = place * PARTS + part
    tl.store(sums_ptr + at * 4, first)
    tl.store(sums_ptr + at * 4 + 1, s)
    tl.store(sums_ptr + at * 4 + 2, t)
    tl.store(sums_ptr + at * 4 + 3, second)
    tl.store(best_ptr + at, best)


@jit
def merged(sums_ptr, best_ptr, place, inside, PARTS, PARTS_UP: tl.constexpr):
    """Stage 2 of the places in a block: (best, confidence, margin, gap, entropy,
    log-sum-exp) from their parts' sums."""
    part = tl.arange(0, PARTS_UP)[None, :]
    at = place[:, None] * PARTS + part
    here = inside[:, None] & (part < PARTS)
    first = tl.load(sums_ptr + at * 4, mask=here, other=-float("inf"))
    s = tl.load(sums_ptr + at * 4 + 1, mask=here, other=0.0)
    t = tl.load(sums_ptr + at * 4 + 2, mask=here, other=0.0)
    second = tl.load(sums_ptr + at * 4 + 3, mask=here, other=-float("inf"))
    index = tl.load(best_ptr + at, mask=here, other=0)
    top = tl.max(first, 1)
    winner = tl.min(tl.where(first == top[:, None], part, PARTS_UP), 1)
    best = tl.sum(tl.where(part == winner[:, None], index, 0), 1)
    runner = tl.max(tl.where(part == winner[:, None], second, first), 1)
    shift = tl.where(top == -float("inf"), 0.0, top)
    step = tl.where(first == -float("inf"), 0.0, first - shift[:, None])
    total = tl.sum(s * tl.exp(step), 1)
    mean = tl.sum((t + step * s) * tl.exp(step), 1)
    full = total > 0
    total = tl.where(full, total, 1.0)
    gap = tl.where(full, top - runner, 0.0)
    entropy = tl.log(total) - mean / total
    confidence = tl.where(full, 1.0 / total, 0.0)
    lse = tl.where(full, shift + tl.log(total), -float("inf"))
    margin = (1.0 - tl.exp(-gap)) / total
    return tl.where(full, best, 0), confidence, margin, gap, tl.where(full, entropy, 0.0), lse


@jit
def statistics_kernel(
    sums_ptr,
    best_ptr,
    out_best_ptr,
    out_ptr,
    R,
    PARTS,
    PARTS_UP: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Grid (places / BLOCK,): the statistics alone, [5, R] and the tokens."""
    place = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = place < R
    best, confidence, margin, gap, entropy, lse = merged(sums_ptr, best_ptr, place, inside, PARTS, PARTS_UP)
    tl.store(out_best_ptr + place, best.to(tl.int64), mask=inside)
    tl.store(out_ptr + place, confidence, mask=inside)
    tl.store(out_ptr + R + place, margin, mask=inside)
    tl.store(out_ptr + 2 * R + place, gap, mask=inside)
    tl.store(out_ptr + 3 * R + place, entropy, mask=inside)
    tl.store(out_ptr + 4 * R + place, lse, mask=inside)


@jit
def unmask_rule_kernel(
    sums_ptr,
    best_ptr,
    open_ptr,
    count_ptr,
    out_best_ptr,
    score_ptr,
    chosen_ptr,
    left_ptr,
    value,
    C,
    PARTS,
    RULE: tl.constexpr,
    SCORE: tl.constexpr,
    PARTS_UP: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Grid (rows,): merges the parts of a row's C <= BLOCK places and applies the rule; numbers of RULE and SCORE are
    places in RULES and SCORES."""
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    inside = column < C
    place = row * C + column
    best, confidence, margin, _, entropy, _ = merged(sums_ptr, best_ptr, place, inside, PARTS, PARTS_UP)
    score = confidence
    if SCORE == 1:
        score = margin
    if SCORE == 2:
        score = -entropy
    tl.store(score_ptr + place, score, mask=inside)
    is_open = tl.load(open_ptr + place, mask=inside, other=0) != 0
    higher = score[None, :] > score[:, None]
    equal = (score[None, :] == score[:, None]) & (column[None, :] < column[:, None])
    before = (higher | equal) & is_open[None, :]
    rank = tl.sum(before.to(tl.int32), 1)
    if RULE == 0:
        taken = score >= value
    elif RULE == 2:
        taken = rank < tl.load(count_ptr + row).to(tl.int32)
    else:
        if RULE == 1:
            good = (rank + 2).to(tl.float32) * (1.0 - score) < value
        else:
            good = tl.sum(tl.where(before, -score[None, :], 0.0), 1) <= value
        taken = rank < tl.min(tl.where(is_open & (good == 0), rank, BLOCK), 0)
    chosen = taken & is_open
    none = tl.max(chosen.to(tl.int32), 0) == 0
    chosen = chosen | (is_open & (rank == 0) & none)
    tl.store(out_best_ptr + place, best.to(tl.int64), mask=inside)
    tl.store(chosen_ptr + place, chosen.to(tl.int8), mask=inside)
    tl.store(left_ptr + row, tl.sum((is_open & (chosen == 0)).to(tl.int64), 0))


def _warps(block: int) -> int:
    return 4 if block <= 64 else 8


_SUMS = {"sums_ptr": "*fp32", "best_ptr": "*i32"}
BUILDS = (
    *(
        Build(
            unmask_part_kernel,
            _SUMS
            | {"x_ptr": kind, "C": "i32", "V": "i32", "mask_id": "i32", "PARTS": "i32"}
            | {"stride_row": "i32", "stride_place": "i32", "stride_col": "i32"},
            {"TILE": TILE, "TILES": TILES},
        )
        for kind in ("*bf16", "*fp32")
    ),
    Build(
        statistics_kernel,
        _SUMS | {"out_best_ptr": "*i64", "out_ptr": "*fp32", "R": "i32", "PARTS": "i32"},
        {"PARTS_UP": 16, "BLOCK": 16},
    ),
    *(
        Build(
            unmask_rule_kernel,
            _SUMS
            | {"open_ptr": "*u8", "count_ptr": "*i64", "out_best_ptr": "*i64", "score_ptr": "*fp32"}
            | {"chosen_ptr": "*u8", "left_ptr": "*i64", "value": "fp32", "C": "i32", "PARTS": "i32"},
            {"RULE": rule, "SCORE": score, "PARTS_UP": 16, "BLOCK": block},
            warps=_warps(block),
        )
        for rule, score, block in ((0, 0, 32), (1, 1, 64), (2, 0, 32), (3, 2, PLACES))
    ),
)


def _parts(logits_BCV: Tensor, mask_id: int | None, tile: int, tiles: int) -> tuple[Tensor, Tensor]:
    """Stage 1: ([B * C, parts, 4], [B * C, parts] int32) of logits with strides of any kind."""
    b, c, v = logits_BCV.shape
    parts = math.ceil(v / (tile * tiles))
    sums_RP4 = torch.empty(b * c, parts, 4, dtype=torch.float32, device=logits_BCV.device)
    best_RP = torch.empty(b * c, parts, dtype=torch.int32, device=logits_BCV.device)
    unmask_part_kernel[b * c, parts](
        logits_BCV,
        sums_RP4,
        best_RP,
        c,
        v,
        -1 if mask_id is None else mask_id,
        *logits_BCV.stride(),
        parts,
        TILE=tile,
        TILES=tiles,
    )
    return sums_RP4, best_RP


def statistics_triton(
    logits: Tensor, mask_id: int | None = None, tile: int = TILE, tiles: int = TILES, block: int = 16
) -> Statistics:
    """The kernel; strides of any kind."""
    found, shape = Statistics(logits, mask_id), logits.shape[:-1]
    rows = math.prod(shape)
    best_R = torch.empty(rows, dtype=torch.int64, device=logits.device)
    out_5R = torch.empty(5, rows, dtype=torch.float32, device=logits.device)
    if rows:
        x_BCV = logits if logits.dim() == 3 else logits.reshape(-1, 1, logits.shape[-1])
        sums_RP4, best_RP = found.parts = _parts(x_BCV, mask_id, tile, tiles)
        parts = best_RP.shape[1]
        up = triton.next_power_of_2(parts)
        statistics_kernel[(triton.cdiv(rows, block),)](
            sums_RP4, best_RP, best_R, out_5R, rows, parts, PARTS_UP=up, BLOCK=block
        )
    named = zip(("confidence", "margin", "gap", "entropy", "lse"), out_5R.view(5, *shape), strict=True)
    vars(found).update(best=best_R.view(shape), **dict(named))
    return found


def unmask_triton(
    logits_BCV: Tensor,
    open_BC: Tensor,
    rule: Rule,
    count_B: Tensor | None = None,
    mask_id: int | None = None,
    tile: int = TILE,
    tiles: int = TILES,
) -> Unmasked:
    """The kernel; strides of any kind."""
    if not open_BC.numel():
        return _ruled(None, open_BC, rule, count_B)
    return _ruled(_parts(logits_BCV, mask_id, tile, tiles), open_BC, rule, count_B)


def _ruled(parts: tuple[Tensor, Tensor] | None, open_BC: Tensor, rule: Rule, count_B: Tensor | None) -> Unmasked:
    """Stage 2, with the rule; None = there are no places."""
    (b, c), device = open_BC.shape, open_BC.device
    chosen_BC = torch.zeros(b, c, dtype=torch.bool, device=device)
    best_BC = torch.zeros(b, c, dtype=torch.int64, device=device)
    score_BC = torch.zeros(b, c, dtype=torch.float32, device=device)
    left_B = torch.zeros(b, dtype=torch.int64, device=device)
    if parts is not None:
        sums_RP4, best_RP = parts
        count, block = best_RP.shape[1], max(16, triton.next_power_of_2(c))
        unmask_rule_kernel[(b,)](
            sums_RP4,
            best_RP,
            open_BC.contiguous().view(torch.uint8),
            left_B if count_B is None else count_B.contiguous(),
            best_BC,
            score_BC,
            chosen_BC.view(torch.uint8),
            left_B,
            -rule.value if rule.name == "threshold" and rule.score == "entropy" else rule.value,
            c,
            count,
            RULE=RULES.index(rule.name),
            SCORE=SCORES.index(rule.score),
            PARTS_UP=triton.next_power_of_2(count),
            BLOCK=block,
            num_warps=_warps(block),
        )
    return Unmasked(chosen_BC, best_BC, score_BC, left_B)


def statistics(logits: Tensor, mask_id: int | None = None) -> Statistics:
    """What logits [..., V] say; with gradients in the plain form alone. `mask_id` is never a candidate (it may lie beyond
    the vocabulary)."""
    graded = torch.is_grad_enabled() and logits.requires_grad
    if logits.dtype != torch.float64 and not graded and runs_on(logits):
        return statistics_triton(logits, mask_id)
    return Statistics(logits, mask_id)


def choose(found: Statistics, open_BC: Tensor, rule: Rule, count_B: Tensor | None = None) -> Tensor:
    """bool [B, C]: what `unmask` decides, of statistics that are there ([B, C]). The kernel goes on from its first stage,
    where it made them."""
    if found.parts is not None and open_BC.shape[1] <= PLACES:
        return _ruled(found.parts, open_BC, rule, count_B).chosen_BC
    return choose_reference(_score(found, rule), open_BC, rule, count_B)


def unmask(
    logits_BCV: Tensor, open_BC: Tensor, rule: Rule, count_B: Tensor | None = None, mask_id: int | None = None
) -> Unmasked:
    """Candidates of C places in B rows, and which of the open ones (bool) are decided now.

    `count_B` (int64): places to decide per row, for the rule count, which needs it. `mask_id` is never a candidate.
    Raises ValueError for shapes that do not fit, and for count without `count_B`.
    """
    if logits_BCV.shape[:2] != open_BC.shape or open_BC.dtype != torch.bool:
        raise ValueError(
            f"unmask: logits {tuple(logits_BCV.shape)} with open places {tuple(open_BC.shape)} of {open_BC.dtype}: "
            "needed [B, C, V] and [B, C] of torch.bool"
        )
    if (rule.name == "count") != (count_B is not None):
        raise ValueError(f"unmask: rule {rule.name!r} {'needs' if rule.name == 'count' else 'takes no'} count_B")
    if logits_BCV.dtype != torch.float64 and open_BC.shape[1] <= PLACES and runs_on(logits_BCV, open_BC, count_B):
        return unmask_triton(logits_BCV, open_BC, rule, count_B, mask_id)
    return unmask_reference(logits_BCV, open_BC, rule, count_B, mask_id)
