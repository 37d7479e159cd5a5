"""Noise of masked diffusion: which tokens of a text are hidden, at which level, in which copy.

A *text* is a packed batch whose documents are cut into blocks (and filled up to whole ones, where a recipe wants that).
Every token that may be hidden has a *level*, the chance that it is: one per token, block, document or packed row
(`scope`), drawn uniformly from a range, spread evenly, rising, or half of one block (`schedule`). Every draw is keyed by
(seed, epoch, sample id, place in the document), so that neither batch, packing, accumulation nor the number of processes
changes it. The one exception is the scope `sequence` (SDAR's), whose level is shared by a packed row: it is keyed by
the row's first document, and which documents share a row is itself a function of (seed, epoch).

Test: pytest tests/test_diffusion.py
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import Tensor

from ..kernels.rng import NOISE, fold, uniform
from .drafter import Batch

if TYPE_CHECKING:
    from .diffusion import ObjectiveConfig

# Streams of `draw`; those of models/slots.py lie below.
LEVEL, COIN, OFFSET, CHOICE = 32, 33, 34, 35
GOLDEN = 0.6180339887498949  # multiples of it, modulo 1, are spread as evenly as any sequence can be


@dataclass
class Text:
    """Packed documents in blocks, all [B, T]; padding has sample id -1. T may exceed the batch's (fill)."""

    ids_BT: Tensor  # int64
    supervised_BT: Tensor  # bool, this token is one to be predicted
    hideable_BT: Tensor  # bool, noise may hide it
    filler_BT: Tensor  # bool, behind the document's end; where it is not supervised it always shows the mask
    positions_BT: Tensor  # int64, in the document
    samples_BT: Tensor  # int64
    block_BT: Tensor  # int64, of its document, from 0, ascending
    first_BT: Tensor  # bool, this token is the first of a whole block
    opened_BT: Tensor  # bool, the first token of this token's block is in the document
    seed: int
    epoch: int
    order_BT: Tensor | None = None  # int64, the decoding pass that decided the token, -1 = not known; fill: as the last


@dataclass
class Copy:
    """One noisy copy of a text. `counted_BT`: tokens whose prediction is a loss; `level_BT`: fp64, the chance that each
    was hidden; `guess_BT`: what hidden tokens show in the mask's place."""

    hidden_BT: Tensor
    counted_BT: Tensor
    level_BT: Tensor
    guess_BT: Tensor | None = None


def runs(*fields_BT: Tensor) -> Tensor:
    """int64 [B, T]: the index of the first token of each run in which no field changes."""
    t_T = torch.arange(fields_BT[0].shape[1], device=fields_BT[0].device)
    change_BT = torch.zeros_like(fields_BT[0], dtype=torch.bool)
    for field_BT in fields_BT:
        change_BT = change_BT | F.pad(field_BT[:, 1:] != field_BT[:, :-1], (1, 0), value=True)
    return torch.where(change_BT, t_T, 0).cummax(1).values


def total(values_BT: Tensor, runs_BT: Tensor) -> Tensor:
    """[B, T] the sum of the values over each token's run."""
    return torch.zeros_like(values_BT).scatter_add(1, runs_BT, values_BT).gather(1, runs_BT)


def draw(text: Text | Batch, place_BT: Tensor, stream: int, samples_BT: Tensor | None = None) -> Tensor:
    """float64 [B, T] uniform in [0, 1), keyed (seed, epoch, sample id, place) and the stream."""
    samples_BT = text.samples_BT if samples_BT is None else samples_BT
    return uniform(fold(text.seed, text.epoch + 1), NOISE, place_BT, samples_BT, stream << 16)


def cut(batch: Batch, config: ObjectiveConfig, fill_id: int, end_ids: Sequence[int]) -> Text:
    """The batch's documents in blocks of `config.block`, filled up to whole ones as `config.padding` says.

    `fill_id` stands behind the end of documents where padding is trained; a document that does not end with one of
    `end_ids` was cut, and nothing is known of what follows: its fill is never trained.
    """
    zero_BT = torch.zeros_like(batch.ids_BT)
    document_BT = runs(batch.samples_BT)
    real_BT = batch.samples_BT >= 0
    since_BT = batch.positions_BT  # the place counted from where blocks begin
    if config.origin == "random":
        since_BT = since_BT + (draw(batch, zero_BT, OFFSET) * config.block).long()
    elif config.origin == "answer":
        supervised_BT = batch.supervised_BT.long()
        # Tokens up to and with this one that are supervised, in its document.
        seen_BT = supervised_BT.cumsum(1) - (supervised_BT.cumsum(1) - supervised_BT).gather(1, document_BT)
        opening_BT = batch.supervised_BT & (seen_BT == 1)
        start_BT = total(torch.where(opening_BT, batch.positions_BT, 0), document_BT)
        has_BT = total(supervised_BT, document_BT) > 0
        since_BT = torch.where(has_BT, batch.positions_BT - start_BT, -1 - batch.positions_BT)
    last_BT = F.pad(batch.samples_BT[:, 1:] != batch.samples_BT[:, :-1], (0, 1), value=True) & real_BT
    fill_BT = zero_BT
    if config.padding != "none":
        fill_BT = torch.where(last_BT & (since_BT >= 0), (-since_BT - 1) % config.block, 0)
    ends_BT = batch.supervised_BT & torch.isin(batch.ids_BT, zero_BT.new_tensor(list(end_ids)))

    # Each token, and behind the last one of a document its fill: indices into the row, and steps behind the token.
    width = max(int(((real_BT.cumsum(1) + fill_BT.cumsum(1)) * last_BT).max()), 1)
    index_BT, step_BT = zero_BT.new_zeros(len(zero_BT), width), zero_BT.new_zeros(len(zero_BT), width)
    there_BT = torch.zeros_like(index_BT, dtype=torch.bool)
    for b in range(len(zero_BT)):
        tokens_X = real_BT[b].nonzero()[:, 0]
        counts_X = 1 + fill_BT[b, tokens_X]
        n = int(counts_X.sum())
        index_BT[b, :n] = torch.repeat_interleave(tokens_X, counts_X)
        start_X = torch.repeat_interleave(counts_X.cumsum(0) - counts_X, counts_X)
        step_BT[b, :n] = torch.arange(n, device=tokens_X.device) - start_X
        there_BT[b, :n] = True

    def spread(x_BT: Tensor) -> Tensor:
        return x_BT.gather(1, index_BT)

    extra_BT = step_BT > 0
    trained_BT = extra_BT & spread(ends_BT) if config.padding == "train" else torch.zeros_like(extra_BT)
    since_BT = spread(since_BT) + step_BT
    positions_BT = spread(batch.positions_BT) + step_BT
    block_BT = since_BT.div(config.block, rounding_mode="floor")
    if config.origin == "answer":  # what comes before the answer is one block
        block_BT = torch.where(since_BT < 0, 0, block_BT + 1)
    first_BT = (since_BT >= 0) & (since_BT % config.block == 0)
    opened_BT = (since_BT >= 0) & (positions_BT >= since_BT % config.block)
    supervised_BT = torch.where(extra_BT, trained_BT, spread(batch.supervised_BT)) & there_BT
    if config.shift:  # nothing stands before the first token to predict it
        supervised_BT = supervised_BT & (positions_BT > 0)
    return Text(
        ids_BT=torch.where(extra_BT, fill_id, spread(batch.ids_BT)),
        supervised_BT=supervised_BT,
        hideable_BT=supervised_BT & opened_BT & ~first_BT if config.dual else supervised_BT,
        filler_BT=extra_BT,
        positions_BT=positions_BT,
        samples_BT=torch.where(there_BT, spread(batch.samples_BT), -1),
        block_BT=block_BT,
        first_BT=first_BT & there_BT,
        opened_BT=opened_BT & there_BT,
        seed=batch.seed,
        epoch=batch.epoch,
        order_BT=None if batch.order_BT is None else torch.where(there_BT, spread(batch.order_BT), -1),
    )


def corrupt(text: Text, config: ObjectiveConfig) -> list[Copy]:
    """The noisy copies of a text: one, or with `complementary` two, the second hiding what the first shows."""
    order_BT = torch.zeros_like(text.ids_BT)
    if config.draw == "latest":
        text, order_BT = ordered(text)
    block_BT, document_BT = runs(text.samples_BT, text.block_BT), runs(text.samples_BT)
    level_BT = levels(text, config, document_BT)
    counted_BT, always_BT = text.hideable_BT, torch.zeros_like(text.hideable_BT)
    if config.schedule == "semi_ar":
        chosen_BT, always_BT = one_block(text, block_BT, document_BT)
        counted_BT = text.hideable_BT & chosen_BT
    coin_BT = draw(text, text.positions_BT, COIN)
    if config.draw == "exact":
        size_BT = total(counted_BT.long(), block_BT)
        rank_BT = ranks(block_BT, torch.where(counted_BT, coin_BT, 2.0))
        drawn_BT = counted_BT & (rank_BT < (level_BT * size_BT).ceil())
    elif config.draw == "latest":
        drawn_BT = latest(order_BT, counted_BT, block_BT, level_BT)
    else:
        drawn_BT = counted_BT & (coin_BT < level_BT)
    copies = [Copy(drawn_BT | always_BT, drawn_BT, level_BT)]
    if config.complementary:
        rest_BT = counted_BT & ~drawn_BT
        copies.append(Copy(rest_BT | always_BT, rest_BT, 1 - level_BT))
    if config.dual:  # the next block's first token is never shown to this one, so that it counts in every copy
        border_BT = text.supervised_BT & text.first_BT
        for copy in copies:
            copy.counted_BT = copy.counted_BT | border_BT
            copy.level_BT = torch.where(border_BT, 1.0, copy.level_BT)
    return copies


def ordered(text: Text) -> tuple[Text, Tensor]:
    """The text with nothing to hide but tokens whose place in the order of decoding is known, and that order.

    Raises ValueError for a text of samples that have none. One whose known tokens were all cut off has nothing to hide.
    """
    order_BT = torch.full_like(text.ids_BT, -1) if text.order_BT is None else text.order_BT
    known_BT = order_BT >= 0
    if text.order_BT is None and bool(text.hideable_BT.any()):
        raise ValueError(
            "objective.draw = latest: these samples do not say in which order they were decided; let the model answer "
            "with `draftsmith rollout --adapters FOLDER --order true`"
        )
    told_BT, hideable_BT = text.supervised_BT & known_BT, text.hideable_BT & known_BT
    return replace(text, supervised_BT=told_BT, hideable_BT=hideable_BT), order_BT


def latest(order_BT: Tensor, counted_BT: Tensor, block_BT: Tensor, level_BT: Tensor) -> Tensor:
    """Bool [B, T]: what the last passes over each block decided, as few whole passes as hold the level's share of its
    tokens, rounded up: a state that decoding went through (pseudo-trajectories of d3LLM, arXiv:2601.07568)."""
    far = torch.iinfo(torch.int64).max
    size_BT = total(counted_BT.long(), block_BT)
    rank_BT = ranks(block_BT, torch.where(counted_BT, -order_BT, far))
    inside_BT = counted_BT & (rank_BT < (level_BT * size_BT).ceil())
    least_BT = torch.full_like(order_BT, far)
    least_BT = least_BT.scatter_reduce(1, block_BT, torch.where(inside_BT, order_BT, far), "amin").gather(1, block_BT)
    return counted_BT & (order_BT >= least_BT)


def levels(text: Text, config: ObjectiveConfig, document_BT: Tensor) -> Tensor:
    """float64 [B, T] the chance that each token is hidden."""
    low, high = config.levels
    zero_BT = torch.zeros_like(text.ids_BT)
    samples_BT = text.samples_BT
    if config.scope == "sequence":
        samples_BT = samples_BT[:, :1].expand_as(samples_BT)
    place_BT = {"token": text.positions_BT, "block": text.block_BT}.get(config.scope, zero_BT)
    if config.schedule == "even":
        u_BT = (draw(text, zero_BT, LEVEL) + text.block_BT * GOLDEN) % 1
    else:
        u_BT = draw(text, place_BT, LEVEL, samples_BT)
    level_BT = low + (high - low) * u_BT
    if config.schedule == "monotone":
        # The highest so far in the document, taken by index, so that its value is the drawn one to the bit.
        known_BT = torch.where(text.hideable_BT, level_BT, 0.0)
        top_BT = (known_BT + 2 * document_BT).cummax(1).indices
        level_BT = known_BT.gather(1, top_BT)
    return level_BT


def one_block(text: Text, block_BT: Tensor, document_BT: Tensor) -> tuple[Tensor, Tensor]:
    """Bool [B, T] twice: tokens of one random block of each document among those with something to hide, and what may
    be hidden behind it (semi-autoregressive forward masking, dParallel)."""
    t_T = torch.arange(block_BT.shape[1], device=block_BT.device)
    some_BT = total(text.hideable_BT.long(), block_BT) > 0
    opening_BT = (some_BT & (block_BT == t_T)).long()
    rank_BT = opening_BT.cumsum(1) - (opening_BT.cumsum(1) - opening_BT).gather(1, document_BT) - 1
    count_BT = total(opening_BT, document_BT)
    chosen_BT = (draw(text, torch.zeros_like(block_BT), CHOICE) * count_BT).long()
    return some_BT & (rank_BT == chosen_BT), text.hideable_BT & (rank_BT > chosen_BT)


def ranks(unit_BT: Tensor, key_BT: Tensor) -> Tensor:
    """int64 [B, T] the rank of each token by its key within its run (`runs`), equal keys in order."""
    order_BT = key_BT.argsort(dim=1, stable=True)
    order_BT = order_BT.gather(1, unit_BT.gather(1, order_BT).argsort(dim=1, stable=True))
    t_BT = torch.arange(unit_BT.shape[1], device=unit_BT.device).expand_as(unit_BT)
    return torch.empty_like(order_BT).scatter(1, order_BT, t_BT) - unit_BT  # a run begins where the earlier ones end
