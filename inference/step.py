"""What a decode strategy sees of a pass, and how it ranks places. Part of inference/strategies.py.

Test: pytest tests/test_strategies.py
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property

import torch
from torch import Tensor
from torch.nn.functional import pad

from ..kernels import rng
from ..kernels.unmask import Statistics, statistics
from ..losses.probs import History, ParamRows, adjust, draw, probs
from ..models.denoiser import Denoiser


@dataclass
class Step:
    """What a strategy sees of a pass: B rows, C places in order (column 0 is the first place of the first unfinished
    block). Columns beyond the open blocks are never open."""

    open_BC: Tensor  # bool, undecided places that this pass may decide
    first_BC: Tensor  # bool, places of the first unfinished block
    block_BC: Tensor  # int64, number of the place's block, 0 = the first unfinished one
    fixed_BC: (
        Tensor  # bool, decided places that nothing may change (prompt), and those that the pass says nothing about
    )
    ids_BC: Tensor  # int64, what stands there; mask id where undecided
    best_BC: Tensor  # int64 candidates
    confidence_BC: Tensor  # probability of the candidate
    logits_BCV: Tensor  # fp32 (fp64 for fp64 models), never-emitted ids at -inf
    ends_BC: Tensor  # bool, the candidate would end the answer
    passes_B: Tensor  # int64, passes of the first unfinished block before this one
    left_B: Tensor  # int64, undecided places of the whole answer
    total_B: Tensor  # int64, places of the answer
    memory: dict[str, Tensor] = field(default_factory=dict)  # [B, C, ...], kept from pass to pass, zeros at first
    hidden_BCD: Tensor | None = None  # last hidden states that the logits were computed from
    found: Statistics | None = None  # of the logits, as far as they are known

    @cached_property
    def probs_BCV(self) -> Tensor:
        """The model's own probabilities: no temperature."""
        return self.logits_BCV.softmax(-1)

    @cached_property
    def said(self) -> Statistics:
        """Of the logits: entropy, distance of the second token; of the likeliest, which sampled candidates need not be."""
        return self.found or statistics(self.logits_BCV)

    @property
    def entropy_BC(self) -> Tensor:
        """Entropy in nats."""
        return self.said.entropy

    def recall(self, name: str, like: Tensor) -> Tensor:
        """What was kept under a name; zeros the first time."""
        return self.memory.get(name, torch.zeros_like(like))


def ranks(score_BC: Tensor, among_BC: Tensor) -> Tensor:
    """int64 [B, C]: 0 for the best of `among_BC`, 1 for the next ...; all others come behind. Equals rank by place."""
    least = torch.finfo(score_BC.dtype).min
    score_BC = score_BC.clamp(min=least).masked_fill(~among_BC, float("-inf"))
    return score_BC.sort(dim=1, descending=True, stable=True).indices.argsort(1)


def best(score_BC: Tensor, among_BC: Tensor) -> Tensor:
    """bool [B, C]: the best of each row's `among_BC`, nothing where there is none."""
    return (ranks(score_BC, among_BC) == 0) & among_BC


def leading(score_BC: Tensor, among_BC: Tensor, take: Callable[[Tensor, Tensor], Tensor]) -> Tensor:
    """bool [B, C]: of `among_BC`, best first, as many as `take(sorted scores [B, C], n = 1 .. C)` says is allowed up to
    its first False; scores beyond the row's own are -inf."""
    order_BC = ranks(score_BC, among_BC)
    inside_BC = among_BC.gather(1, order_BC.argsort(1))
    sorted_BC = score_BC.gather(1, order_BC.argsort(1)).masked_fill(~inside_BC, float("-inf"))
    n_C = torch.arange(1, score_BC.shape[1] + 1, device=score_BC.device)
    good_BC = (take(sorted_BC, n_C) & inside_BC).long().cumprod(1)
    return (order_BC < good_BC.sum(1, keepdim=True)) & among_BC


def shifted(x_BC: Tensor, by: int, filler: float) -> Tensor:
    """Column c holds what stood `by` columns before it."""
    c = x_BC.shape[1]
    return pad(x_BC, (by, 0), value=filler)[:, :c] if by >= 0 else pad(x_BC, (0, -by), value=filler)[:, -c:]


def runs(open_BC: Tensor) -> Tensor:
    """int64: a number per contiguous run of open places; -1 elsewhere."""
    begins_BC = open_BC & ~shifted(open_BC, 1, False)
    return torch.where(open_BC, begins_BC.cumsum(1), -1)


def leads(score_BC: Tensor, run_BC: Tensor) -> tuple[Tensor, Tensor]:
    """bool [B, C]: the best place of every run (equal numbers that are not negative), the lowest among equals; int64
    [B, C]: the size of the place's run."""
    leads_BC, size_BC = run_BC >= 0, torch.ones_like(run_BC)
    for distance in range(1, run_BC.shape[1]):
        for by in (distance, -distance):
            same_BC = (shifted(run_BC, by, -1) == run_BC) & (run_BC >= 0)
            other_BC = shifted(score_BC, by, float("-inf"))
            leads_BC &= ~(same_BC & ((other_BC > score_BC) | ((other_BC == score_BC) & (by > 0))))
            size_BC += same_BC
    return leads_BC, size_BC


def candidates(
    denoiser: Denoiser, hidden_BCD: Tensor, place_BC: Tensor, params: ParamRows, seeds_B: Tensor, history: History
) -> tuple[Tensor, Tensor, Tensor, Statistics]:
    """Adjusted logits [B, C, V], the candidate of every place, its probability, and what else the logits say. A place
    keeps its uniform number from pass to pass (that of plain sampling), so that candidates change only as the
    distribution does."""
    b, c = place_BC.shape
    x_BCV = denoiser.head(hidden_BCD)
    x_BCV = x_BCV if x_BCV.dtype == torch.float64 else x_BCV.float()
    rows = params.repeat(c)
    x_BCV = adjust(x_BCV.flatten(0, 1), rows, history).view(b, c, -1)
    found = statistics(x_BCV)
    if not params.hot:
        return x_BCV, found.best, found.confidence, found
    u_BC = rng.uniform(seeds_B[:, None], rng.TARGET, place_BC)
    token_BC = draw(probs(x_BCV.flatten(0, 1), rows), u_BC.flatten()).view(b, c)
    return x_BCV, token_BC, (x_BCV.gather(2, token_BC[..., None])[..., 0] - found.lse).exp(), found


def too_early(place_BC: Tensor, prompt_B: Tensor, least_B1: Tensor, stops_BV: Tensor) -> Tensor:
    """bool [B * C, V]: ids that may not end the answer at these places yet, as it has a minimal length."""
    early_BC = place_BC - prompt_B[:, None] < least_B1
    return (stops_BV[:, None] & early_BC[..., None]).flatten(0, 1)
