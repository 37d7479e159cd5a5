"""Jacobi trajectories of answers that are known: all blocks of all texts at once.

Jacobi decoding (Santilli et al., arXiv:2305.10427; CLLM, arXiv:2403.00835, section 3.1) fills a block of n places with
guesses and in every pass replaces each of them by the model's token behind the guess before it, until nothing changes:
the block's greedy tokens. Block after block, that takes as many passes as the answer takes. Once the answer is known
no block has to wait for another: what stands before a block is clean text, whose keys and values are computed once, and
the open blocks of a whole packed batch advance in one pass. The states are those of decoding, token for token (tests).

A pass reads as little as it can: a block's tokens that are settled are clean text too; its first open token is what the
clean text already says; its last guess is read by nobody.

    blocks = answer_blocks(batch, block=16)
    walk = Walk(target, blocks)
    states_BIT, passes_BT = walk.to_the_end(first_states(blocks, "prompt"))

Test: pytest tests/test_trajectories.py
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from .diffusion import CLEAN, Entries, ObjectiveConfig, PairCache, clean_entries, clean_pass, dense_mask, joined
from .drafter import Batch
from .noise import Text, draw, runs, total

Start = Literal["prompt", "text", "last", "random", "mask"]
START, CORRECT = 48, 1024  # streams of `draw` (CORRECT: one per state); those of models/noise.py and slots.py lie below
# Two logits are near where they differ by so many roundings of the higher one. Of 1,251 greedy tokens of SmolLM2 in
# bfloat16, read again in one pass, 15 were not the likeliest there: all of them by less than 1.8.
NEAR = 2
CHUNK = 2**22  # logits that are held at a time
# Clean text as an autoregressive model reads it; a guess sees the clean text before its block, and guesses before it.
SIGHT = ObjectiveConfig(
    clean="token", inside="causal", block=1, shift=True, origin="answer", complementary=False, padding="none"
)  # fmt: skip


@dataclass
class Blocks:
    """A packed batch whose answers are cut into blocks, counted from each answer's first token. All [B, T].

    `text.block_BT`: what guesses read together, ascending along a document: a window of blocks, or what lies between
    answers. `unit_BT`: index of the first token of this token's block; `place_BT`: place in the block, -1 outside answers.
    `answer_BT`: index of the first token of this token's answer; `document_BT`: of its document.
    """

    text: Text
    unit_BT: Tensor
    place_BT: Tensor
    answer_BT: Tensor
    document_BT: Tensor

    @property
    def inside_BT(self) -> Tensor:
        """bool, tokens of answers."""
        return self.place_BT >= 0


def answer_blocks(batch: Batch, block: int, window: int = 1) -> Blocks:
    """Blocks of `block` tokens, and windows of `window` blocks, of every answer of a packed batch.

    A document's first token is in no block: nothing stands before it to predict it.
    """
    if block < 1 or window < 1:
        raise ValueError(f"block = {block}, window = {window}: both are at least 1")
    inside_BT = batch.supervised_BT & (batch.samples_BT >= 0) & (batch.positions_BT > 0)
    document_BT = runs(batch.samples_BT)
    answer_BT = runs(batch.samples_BT, inside_BT.long())
    t_T = torch.arange(batch.ids_BT.shape[1], device=batch.ids_BT.device)
    since_BT = torch.where(inside_BT, t_T - answer_BT, 0)
    unit_BT = runs(answer_BT, since_BT // block)
    text = Text(
        ids_BT=batch.ids_BT,
        supervised_BT=inside_BT,
        hideable_BT=inside_BT,
        filler_BT=torch.zeros_like(inside_BT),
        positions_BT=batch.positions_BT,
        samples_BT=batch.samples_BT,
        block_BT=runs(answer_BT, since_BT // (block * window)),
        first_BT=torch.zeros_like(inside_BT),
        opened_BT=torch.ones_like(inside_BT),
        seed=batch.seed,
        epoch=batch.epoch,
    )
    return Blocks(text, unit_BT, torch.where(inside_BT, since_BT % block, -1), answer_BT, document_BT)


def from_first(flag_BT: Tensor, runs_BT: Tensor) -> Tensor:
    """bool [B, T]: tokens of each run (`runs`) from its first flagged one on."""
    count_BT = flag_BT.long().cumsum(1)
    return count_BT > (count_BT - flag_BT.long()).gather(1, runs_BT)


def first_states(
    blocks: Blocks, start: Start, *, tokens: int = 0, mask_id: int | None = None, stream: int = START
) -> Tensor:
    """int64 [B, T] first guesses at the places of answers, the text elsewhere. Draws are keyed (seed, epoch, sample,
    position).

    `prompt`: tokens drawn from what stands before the answer in its document (CLLM); `text`: from what stands before the
    block (Make Some Noise, arXiv:2406.17404); `last`: the token before the block, over and over; `random`: a prior, the same
    for all: each of the `tokens` ids is equally likely; `mask`: `mask_id`.
    """
    text, inside_BT = blocks.text, blocks.inside_BT
    if start == "mask":
        if mask_id is None:
            raise ValueError("start = mask needs a mask_id")
        return text.ids_BT.masked_fill(inside_BT, mask_id)
    if start == "last":
        return torch.where(inside_BT, text.ids_BT.gather(1, (blocks.unit_BT - 1).clamp(min=0)), text.ids_BT)
    u_BT = draw(text, text.positions_BT, stream)
    if start == "random":
        if tokens < 1:
            raise ValueError(f"start = random draws from `tokens` ids, got {tokens}")
        return torch.where(inside_BT, (u_BT * tokens).long(), text.ids_BT)
    end_BT = blocks.answer_BT if start == "prompt" else blocks.unit_BT
    from_BT = blocks.document_BT + (u_BT * (end_BT - blocks.document_BT)).long()
    return torch.where(inside_BT, text.ids_BT.gather(1, from_BT), text.ids_BT)


def corrected(blocks: Blocks, states_BIT: Tensor, share: float) -> Tensor:
    """States in which wrong tokens are replaced by the text's with chance `share` (CLLM's augmentation), each state on its
    own. A block's first wrong token stays: a state is not taken for settled that is not."""
    ids_BT, out = blocks.text.ids_BT, []
    if share == 0:
        return states_BIT
    for i, states_BT in enumerate(states_BIT.unbind(1)):
        wrong_BT = states_BT != ids_BT
        count_BT = wrong_BT.long().cumsum(1)
        later_BT = count_BT - (count_BT - wrong_BT.long()).gather(1, blocks.unit_BT) > 1
        chosen_BT = draw(blocks.text, blocks.text.positions_BT, CORRECT + i) < share
        out.append(torch.where(wrong_BT & later_BT & chosen_BT, ids_BT, states_BT))
    return torch.stack(out, dim=1)


class Walk:
    """Jacobi iteration over all blocks of a packed batch, without gradients.

    Args:
        target: the model (`forward`, `head`, `facts`), and `view`: a context to run it in (adapters on, say).
        blocks: of the batch; windows are not looked at, every block has clean text before it.
        cache: keys and values of the clean text, where it has been read already (`clean_pass`). The walk then does not ask
            what the model says there, and takes the text for it.

    Attributes:
        said_BT: at places of answers the model's own greedy token behind the clean text before it; the text's where that
            is as likely but for rounding (`NEAR`): passes of another width decide such ties otherwise.
        same_BT: bool, True at answers' places whose whole block is what the model says. The others stay out of the walk:
            their text is no fixed point of this model.
    """

    @torch.no_grad()
    def __init__(
        self, target: Any, blocks: Blocks, view: Callable[[], Any] = nullcontext, cache: PairCache | None = None
    ) -> None:
        self.target, self.blocks, self.view = target, blocks, view
        text, inside_BT = blocks.text, blocks.inside_BT
        self.said_BT = text.ids_BT.clone()
        if cache is None:
            with view():
                cache, hidden_BTD = clean_pass(target.forward, text, SIGHT)
                before_BT = F.pad(inside_BT[:, 1:], (0, 1))  # rows whose next token is an answer's
                self.said_BT[inside_BT] = self._likeliest(hidden_BTD[before_BT], text.ids_BT[inside_BT])
        self.cache = cache
        wrong_BT = (self.said_BT != text.ids_BT) & inside_BT
        self.same_BT = inside_BT & (total(wrong_BT.long(), blocks.unit_BT) == 0)

    def open_BT(self, states_BT: Tensor) -> Tensor:
        """bool [B, T]: places of blocks from the first guess that is not the text's on."""
        differs_BT = (states_BT != self.blocks.text.ids_BT) & self.same_BT
        return self.same_BT & from_first(differs_BT, self.blocks.unit_BT)

    @torch.no_grad()
    def step(self, states_BT: Tensor) -> Tensor:
        """The next state [B, T] of every block."""
        text, t = self.blocks.text, states_BT.shape[1]
        open_BT = self.open_BT(states_BT)
        next_BT = torch.where(open_BT | ~self.same_BT, states_BT, text.ids_BT)
        first_BT = open_BT & ~F.pad(
            open_BT[:, :-1] & (self.blocks.unit_BT[:, 1:] == self.blocks.unit_BT[:, :-1]), (1, 0)
        )
        next_BT = torch.where(first_BT, text.ids_BT, next_BT)  # what the clean text says there
        ahead_BT = open_BT & F.pad(open_BT[:, 1:] & (self.blocks.unit_BT[:, 1:] == self.blocks.unit_BT[:, :-1]), (0, 1))
        count = int(ahead_BT.sum(1).max())
        if not count:
            return next_BT
        at_BQ = (~ahead_BT).int().argsort(dim=1, stable=True)[:, :count]
        run_BQ = ahead_BT.gather(1, at_BQ)
        # An open block's guesses are a segment of their own; its settled part is of the text before it.
        segment_BT = runs(self.blocks.unit_BT, open_BT.long())
        clean = clean_entries(replace(text, block_BT=segment_BT))
        positions_BQ = text.positions_BT.gather(1, at_BQ)
        noisy = Entries(
            t + torch.arange(count, device=at_BQ.device).expand_as(at_BQ),
            torch.where(run_BQ, text.samples_BT.gather(1, at_BQ), -1),
            torch.full_like(at_BQ, CLEAN + 1),
            segment_BT.gather(1, at_BQ),
            positions_BQ,
            positions_BQ,
            torch.zeros_like(run_BQ),
        )
        with self.view():
            out = self.target.forward(
                states_BT.gather(1, at_BQ),
                positions_BQ,
                cache=self.cache,
                see_BTA=dense_mask(SIGHT, noisy, joined(clean, noisy)),
            )
            guess_R = self._likeliest(out.last_hidden_BTD[run_BQ])
        rows_R = run_BQ.nonzero()[:, 0]
        next_BT[rows_R, at_BQ[run_BQ] + 1] = guess_R
        return next_BT

    def to_the_end(self, states_BT: Tensor) -> tuple[Tensor, Tensor]:
        """All states int64 [B, I, T] from these on, each block's last one being its text; and int64 [B, T] the number of
        passes until this token's block is settled (0 outside the walk)."""
        states_BT = torch.where(self.same_BT, states_BT, self.blocks.text.ids_BT)
        states, passes_BT = [states_BT], torch.zeros_like(states_BT)
        while bool((open_BT := self.open_BT(states[-1])).any()):
            passes_BT += total(open_BT.long(), self.blocks.unit_BT) > 0
            states.append(self.step(states[-1]))
        return torch.stack(states, dim=1), passes_BT

    def _likeliest(self, hidden_RD: Tensor, wanted_R: Tensor | None = None) -> Tensor:
        """int64 [R], the likeliest of the tokens that the tokenizer knows; of several near it, the wanted one."""
        size, found = max(8, CHUNK // self.target.facts.vocab), []
        for i, part_rD in enumerate(hidden_RD.split(size)):
            logits_rV = self.target.head(part_rD)[..., : self.target.facts.tokens]
            top_r, best_r = logits_rV.max(-1)
            if wanted_R is not None:
                wanted_r = wanted_R[i * size : (i + 1) * size]
                lead_r = top_r - logits_rV.gather(-1, wanted_r[:, None])[:, 0]
                best_r = torch.where(lead_r <= NEAR * torch.finfo(logits_rV.dtype).eps * top_r.abs(), wanted_r, best_r)
            found.append(best_r)
        return torch.cat(found)
