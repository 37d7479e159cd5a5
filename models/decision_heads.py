"""Two small heads that say which tokens a pass may decide, learnt from a denoiser that stays as it is.

    UnmaskFilter    from the confidences of a block: which candidates are final already (Learn2PD, arXiv:2509.25188)
    PairDependency  from last hidden states: how much the token of one place depends on another's (after DEMASK: a
                    learned predictor of pairs and a bound on their sum; the head and its labels are ours)

Both learn from noisy blocks of texts that the model wrote itself (`observe`). The filter's labels are whether a
candidate is the text's own token. The label of a pair is the total variation distance between the distributions of one
place before and after the other's candidate is shown, which takes a second pass. Decoded by the strategies `learned`
and `independent` (inference/strategies.py):

    strategy_of("learned", {"filter": filter}); strategy_of("independent", {"pairs": pairs})

Trained by train/fit_decision_heads.py, kept beside the adapters (inference/decision_folder.py).

Test: pytest tests/test_decision_heads.py
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, replace

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .block_diffusion import Passes
from .diffusion import Rows
from .drafter import Batch


@dataclass(frozen=True)
class FilterConfig:
    """The filter and its training, on all blocks at once."""

    width: int = 32
    """Width of its inner layer (about 2,000 weights for blocks of 32, as Learn2PD's)."""
    steps: int = 300
    """Steps of Adam (ours)."""
    rate: float = 1e-2
    """Learning rate (ours)."""

    def __post_init__(self) -> None:
        if self.width < 1 or self.steps < 1 or self.rate <= 0:
            raise ValueError(
                f"filter: width, steps and rate must be positive, got {self.width}, {self.steps}, {self.rate}"
            )


@dataclass(frozen=True)
class PairsConfig:
    """The predictor of pairs and its training, on all blocks at once."""

    rank: int = 32
    """Rank of the bilinear form (ours)."""
    steps: int = 300
    """Steps of Adam (ours)."""
    rate: float = 3e-3
    """Learning rate (ours)."""

    def __post_init__(self) -> None:
        if self.rank < 1 or self.steps < 1 or self.rate <= 0:
            raise ValueError(
                f"pairs: rank, steps and rate must be positive, got {self.rank}, {self.steps}, {self.rate}"
            )


class UnmaskFilter(nn.Module):
    """Two layers over a block's confidences and what is open; about 2,000 weights for blocks of 32."""

    def __init__(self, block: int, width: int = 32) -> None:
        super().__init__()
        if block < 1 or width < 1:
            raise ValueError(f"unmask filter: block = {block}, width = {width}: both are at least 1")
        self.block = block
        self.inner, self.outer = nn.Linear(2 * block, width), nn.Linear(width, block)

    def logits(self, confidence_BC: Tensor, open_BC: Tensor) -> Tensor:
        """[B, C] of any C: block by block, the last one filled up with decided places."""
        b, c = open_BC.shape
        fill = (0, -c % self.block)
        open_BC = F.pad(open_BC, fill, value=False)
        sure_BC = torch.where(open_BC, F.pad(confidence_BC, fill).to(self.inner.weight.dtype), 1.0)
        both_XF = torch.cat([x.reshape(-1, self.block) for x in (sure_BC, open_BC.to(sure_BC.dtype))], 1)
        return self.outer(F.relu(self.inner(both_XF))).view(b, -1)[:, :c]

    def forward(self, confidence_BC: Tensor, open_BC: Tensor) -> Tensor:
        """The probability [B, C] that a candidate is final; 0 where nothing is open."""
        return self.logits(confidence_BC, open_BC).sigmoid() * open_BC


class PairDependency(nn.Module):
    """A bilinear form of rank `rank` on last hidden states of width D."""

    def __init__(self, width: int, rank: int = 32) -> None:
        super().__init__()
        self.of, self.on = nn.Linear(width, rank), nn.Linear(width, rank)

    def logits(self, hidden_BCD: Tensor) -> Tensor:
        """[B, C, C]."""
        hidden_BCD = hidden_BCD.to(self.of.weight.dtype)
        return self.of(hidden_BCD) @ self.on(hidden_BCD).transpose(1, 2) / self.of.out_features**0.5

    def forward(self, hidden_BCD: Tensor) -> Tensor:
        """[B, i, j] in [0, 1]: how much place i's token depends on place j's. Of a place on itself it says nothing."""
        return self.logits(hidden_BCD).sigmoid()


@dataclass
class Blocks:
    """U noisy blocks of C places, as a decoder would find them."""

    open_UC: Tensor  # bool, hidden places
    confidence_UC: Tensor  # probability of the candidate
    right_UC: Tensor  # bool, the candidate is the text's own token
    hidden_UCD: Tensor  # last hidden states that predict the places
    shown_U: Tensor  # int64, the open place whose candidate was shown next
    change_UC: Tensor  # total variation that showing it made of each open place's distribution; 0 of its own

    @staticmethod
    def join(parts: Sequence[Blocks]) -> Blocks:
        return Blocks(*(torch.cat([getattr(part, f.name) for part in parts]) for f in fields(Blocks)))


@torch.no_grad()
def observe(passes: Passes, batch: Batch) -> Blocks:
    """What the model says of the noisy blocks of a batch of its own texts, and again with one more place shown.

    Raises ValueError for objectives whose blocks are not counted from the document's first token.
    """
    objective, head = passes.objective, passes.target.head
    if objective.layout != "pair" or objective.origin != "document" or objective.dual:
        raise ValueError(
            f"decision heads: layout {objective.layout}, origin {objective.origin}, dual {objective.dual}: they learn from "
            "blocks that are counted from the document's start (layout pair, origin document, dual false)"
        )
    text, rows = passes.rows(batch)
    flat_R = rows.flat_R
    at_R = rows.position_BQ.flatten()[flat_R] + int(objective.shift)  # the place that is predicted
    if objective.shift:  # a block's first token is known when it is opened
        flat_R, at_R = (x[at_R % objective.block > 0] for x in (flat_R, at_R))

    def chances(rows: Rows) -> tuple[Tensor, Tensor]:
        """Hidden states [R, D] and probabilities [R, V] of the rows with a loss."""
        hidden_RD = passes.run(text, rows)[1].flatten(0, 1)[flat_R]
        logits_RV = head(hidden_RD).float()
        logits_RV[:, passes.target.facts.tokens :] = float("-inf")
        if passes.mask_id < logits_RV.shape[1]:
            logits_RV[:, passes.mask_id] = float("-inf")
        return hidden_RD, logits_RV.softmax(-1)

    hidden_RD, p_RV = chances(rows)
    chance_R, top_R = p_RV.max(-1)
    row_R = flat_R // rows.label_BQ.shape[1]
    document_R, copy_R = (x.flatten()[flat_R] for x in (rows.document_BQ, rows.copy_BQ))
    block_R, place_R = at_R // objective.block, at_R % objective.block
    units_U4, unit_R = torch.stack([row_R, document_R, copy_R, block_R], 1).unique(dim=0, return_inverse=True)
    shape = (len(units_U4), objective.block)

    def spread(values_R: Tensor) -> Tensor:
        out = values_R.new_zeros(shape + values_R.shape[1:])
        out[unit_R, place_R] = values_R
        return out

    open_UC = spread(torch.ones_like(unit_R, dtype=torch.bool))
    # One open place of each block, by a draw that depends on the batch alone.
    dice = torch.Generator().manual_seed(batch.seed * 1_000_003 + batch.epoch)
    shown_U = torch.rand(shape, generator=dice).to(open_UC.device).masked_fill(~open_UC, -1).argmax(1)
    at_U = units_U4[:, 3] * objective.block + shown_U
    mine_UQ = rows.document_BQ[units_U4[:, 0]] == units_U4[:, 1:2]
    mine_UQ &= (rows.copy_BQ[units_U4[:, 0]] == units_U4[:, 2:3]) & (rows.position_BQ[units_U4[:, 0]] == at_U[:, None])
    told_U = spread(top_R)[torch.arange(shape[0], device=shown_U.device), shown_U]
    ids_BQ, hidden_BQ = rows.ids_BQ.clone(), rows.hidden_BQ.clone()
    where_U = mine_UQ.int().argmax(1)
    ids_BQ[units_U4[:, 0], where_U], hidden_BQ[units_U4[:, 0], where_U] = told_U, False
    _, after_RV = chances(replace(rows, ids_BQ=ids_BQ, hidden_BQ=hidden_BQ))
    change_UC = spread((p_RV - after_RV).abs().sum(-1) / 2)
    change_UC.scatter_(1, shown_U[:, None], 0.0)
    right_R = top_R == rows.label_BQ.flatten()[flat_R]
    return Blocks(open_UC, spread(chance_R), spread(right_R), spread(hidden_RD).float(), shown_U, change_UC)


def fit_filter(
    head: UnmaskFilter, blocks: Blocks, *, steps: int = FilterConfig.steps, rate: float = FilterConfig.rate
) -> float:
    """Train the filter on all blocks at once; its last loss, nats per open place. The same for the same start."""

    def loss() -> Tensor:
        logits_UC = head.logits(blocks.confidence_UC, blocks.open_UC)
        return F.binary_cross_entropy_with_logits(logits_UC[blocks.open_UC], blocks.right_UC[blocks.open_UC].float())

    return _fit(head, loss, steps, rate)


def fit_pairs(
    head: PairDependency, blocks: Blocks, *, steps: int = PairsConfig.steps, rate: float = PairsConfig.rate
) -> float:
    """Train the predictor on all blocks at once, by cross-entropy with the distances; its last loss."""
    units_U = torch.arange(len(blocks.shown_U), device=blocks.shown_U.device)
    others_UC = blocks.open_UC.clone()
    others_UC[units_U, blocks.shown_U] = False
    if not bool(others_UC.any()):
        raise ValueError("decision heads: no block has two open places; give more texts")

    def loss() -> Tensor:
        logits_UC = head.logits(blocks.hidden_UCD)[units_U, :, blocks.shown_U]
        return F.binary_cross_entropy_with_logits(logits_UC[others_UC], blocks.change_UC[others_UC].clamp(0, 1))

    return _fit(head, loss, steps, rate)


@torch.no_grad()
def held_out(filter: UnmaskFilter, pairs: PairDependency, blocks: Blocks, sure: float = 0.9) -> dict[str, float]:
    """How the heads do on other blocks. `filter_*` and `threshold_*` (of `sure`): of the open places, the share that is
    decided, and the share of those that is right; `pairs_error`: mean distance between said and true change, `pairs_plain`:
    the same of the mean change, said of every pair. NaN where there is nothing to count."""

    def both(said_UC: Tensor) -> tuple[float, float]:
        taken_UC = said_UC & blocks.open_UC
        return float(taken_UC.sum() / blocks.open_UC.sum()), float((taken_UC & blocks.right_UC).sum() / taken_UC.sum())

    filter_share, filter_right = both(filter(blocks.confidence_UC, blocks.open_UC) >= 0.5)
    share, right = both(blocks.confidence_UC >= sure)
    units_U = torch.arange(len(blocks.shown_U), device=blocks.shown_U.device)
    others_UC = blocks.open_UC.clone()
    others_UC[units_U, blocks.shown_U] = False
    said_X = pairs(blocks.hidden_UCD)[units_U, :, blocks.shown_U][others_UC]
    true_X = blocks.change_UC[others_UC]
    return {
        "filter_decided": filter_share,
        "filter_right": filter_right,
        "threshold_decided": share,
        "threshold_right": right,
        "pairs_error": float((said_X - true_X).abs().mean()),
        "pairs_plain": float((true_X - true_X.mean()).abs().mean()),
    }


def _fit(head: nn.Module, loss: Callable[[], Tensor], steps: int, rate: float) -> float:
    optimiser = torch.optim.Adam(head.parameters(), lr=rate)
    value = float("nan")
    with torch.enable_grad():
        for _ in range(steps):
            optimiser.zero_grad()
            now = loss()
            now.backward()
            optimiser.step()
            value = float(now.detach())
    head.requires_grad_(False)
    return value
