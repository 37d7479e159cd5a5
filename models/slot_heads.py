"""Heads that correct a parallel draft: what the tokens drafted so far add to the logits of the next slot.

A parallel drafter gives the logits of all depths from the anchor alone, so depth d knows nothing of the token that was
chosen at depth d - 1. A slot head adds a correction that does. With h the slot's own hidden state, x the token before
it (depth 1: the anchor) and e(x) that token's embedding in the target:

    name     state                      code c                             correction   source
    markov   none                       W1[x]                              W2 c         DSpark (arXiv:2607.05147)
    gated    none                       sigmoid(G [h; W1[x]]) * W1[x]      W2 c         DSpark
    rnn      z = g z + (1 - g) k        tanh(o)                            W2 c         DSpark; g, k, o from J [z; W1[x]; h]
    gru      z = GRU(e(x), z)           SiLU(D [h; z])                     U c          Domino; none for its first depths
    pairs    none                       A[x] * (P h)                       B c          DFlash 2; `candidates` likeliest only

So every head is a map to a short code, and one matrix to the draft vocabulary (`correct`), which only rows that are
scored or drafted pay for. Drafting calls `step` depth by depth; training calls `teacher_forced`, which is `step` over
whole blocks with the data's tokens as those drafted before: the two can not differ.

Parameters bear the names of serving engines' checkpoints. Test: pytest tests/test_slot_heads.py
"""

from __future__ import annotations

from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .layers import Linear, TargetEmbed

INITIAL_STD = 0.02  # of the matrices of a head: a correction that is nearly none at first, with a gradient everywhere


class SlotHead(Protocol):
    """What a drafter asks of a head. X are any rows, C the width of a code."""

    state_size: int
    """Width of what is carried from depth to depth; 0 = nothing."""
    candidates: int | None
    """The slot's own likeliest tokens that a correction is for; all others are dropped (None = none are)."""

    def step(
        self, state_XS: Tensor, hidden_XD: Tensor, previous_X: Tensor, depth_X: Tensor, embed: TargetEmbed
    ) -> tuple[Tensor, Tensor]:
        """The state after `previous_X` (target ids, which `embed` reads), and the code [X, C] of the slot that comes
        next, at `depth_X` (1 = the token after the anchor)."""
        ...

    def correct(self, logits_XW: Tensor, code_XC: Tensor) -> Tensor:
        """The slot's own logits, corrected."""
        ...


def teacher_forced(head: SlotHead, hidden_RKD: Tensor, previous_RK: Tensor, embed: TargetEmbed) -> Tensor:
    """The codes [R, K, C] of R blocks of K depths, with the data's tokens as those drafted before each slot."""
    state_RS, codes = hidden_RKD.new_zeros(len(hidden_RKD), head.state_size), []
    for k in range(hidden_RKD.shape[1]):
        depth_R = torch.full_like(previous_RK[:, k], k + 1)
        state_RS, code_RC = head.step(state_RS, hidden_RKD[:, k], previous_RK[:, k], depth_R, embed)
        codes.append(code_RC)
    return torch.stack(codes, dim=1)


def keep_likeliest(logits_XW: Tensor, base_XW: Tensor, count: int | None) -> Tensor:
    """`logits_XW` with -inf outside the `count` likeliest entries of `base_XW` (None: as they are)."""
    if count is None or count >= base_XW.shape[-1]:
        return logits_XW
    outside_XW = torch.ones_like(base_XW, dtype=torch.bool).scatter(-1, base_XW.topk(count, dim=-1).indices, False)
    return logits_XW.masked_fill(outside_XW, -torch.inf)


class Markov(nn.Module):
    """The three heads of DSpark. `markov_w1` [V, r] reads target ids, `markov_w2` [W, r] writes draft ids."""

    candidates: int | None = None

    def __init__(self, kind: str, width: int, vocab: int, draft_vocab: int, rank: int) -> None:
        super().__init__()
        self.kind, self.rank = kind, rank
        self.state_size = rank if kind == "rnn" else 0
        self.markov_w1 = nn.Embedding(vocab, rank)
        self.markov_w2 = Linear(rank, draft_vocab, bias=False)
        if kind == "gated":
            self.gate_proj = Linear(width + rank, rank)
        if kind == "rnn":
            self.joint_proj = Linear(2 * rank + width, 3 * rank)
        for weight in (self.markov_w1.weight, self.markov_w2.weight):
            nn.init.normal_(weight, std=INITIAL_STD)

    @torch.no_grad()
    def start_from(self, table_VD: Tensor) -> None:
        """Start `markov_w1` from the principal directions of the target's embeddings, each of variance 1: what one token
        teaches holds for those like it from the first step on, and W2 learns from codes of a fair size."""
        table_VD = table_VD.double()
        table_VD = table_VD - table_VD.mean(0)
        variance_D, basis_DD = torch.linalg.eigh(table_VD.T @ table_VD / len(table_VD))  # ascending
        r = min(self.rank, int((variance_D > 1e-6 * variance_D[-1]).sum()))
        first = len(variance_D) - r
        codes_Vr = table_VD @ basis_DD[:, first:] * variance_D[first:].rsqrt()
        self.markov_w1.weight[:, :r] = codes_Vr.to(self.markov_w1.weight)

    def embed(self, ids: Tensor) -> Tensor:
        """[..., r] of target ids, which the confidence head reads too."""
        return self.markov_w1(ids)

    def step(
        self, state_XS: Tensor, hidden_XD: Tensor, previous_X: Tensor, depth_X: Tensor, embed: TargetEmbed
    ) -> tuple[Tensor, Tensor]:
        before_Xr = self.embed(previous_X).to(hidden_XD.dtype)
        if self.kind == "gated":
            return state_XS, torch.sigmoid(self.gate_proj(torch.cat([hidden_XD, before_Xr], dim=-1))) * before_Xr
        if self.kind == "rnn":
            joined_Xr3 = self.joint_proj(torch.cat([state_XS.to(hidden_XD.dtype), before_Xr, hidden_XD], dim=-1))
            gate_Xr, new_Xr, out_Xr = joined_Xr3.chunk(3, dim=-1)
            gate_Xr = torch.sigmoid(gate_Xr)
            return gate_Xr * state_XS + (1 - gate_Xr) * torch.tanh(new_Xr), torch.tanh(out_Xr)
        return state_XS, before_Xr

    def correct(self, logits_XW: Tensor, code_XC: Tensor) -> Tensor:
        return logits_XW + self.markov_w2(code_XC).to(logits_XW.dtype)


class GRU(nn.Module):
    """One step of a gated recurrent unit without biases: torch.nn.GRU's own gates and parameter names, as matrix
    products alone, so that it runs in every precision."""

    def __init__(self, width: int, size: int) -> None:
        super().__init__()
        self.size = size
        self.weight_ih_l0 = nn.Parameter(torch.empty(3 * size, width))
        self.weight_hh_l0 = nn.Parameter(torch.empty(3 * size, size))
        for weight in (self.weight_ih_l0, self.weight_hh_l0):
            nn.init.uniform_(weight, -(size**-0.5), size**-0.5)

    def forward(self, x_XD: Tensor, state_XS: Tensor) -> Tensor:
        in_r, in_z, in_n = F.linear(x_XD, self.weight_ih_l0).chunk(3, dim=-1)
        old_r, old_z, old_n = F.linear(state_XS, self.weight_hh_l0).chunk(3, dim=-1)
        reset_XS, keep_XS = torch.sigmoid(in_r + old_r), torch.sigmoid(in_z + old_z)
        return (1 - keep_XS) * torch.tanh(in_n + reset_XS * old_n) + keep_XS * state_XS


class Domino(nn.Module):
    """Domino: a GRU over the tokens from the anchor on, and a narrow MLP on (hidden, state). The first `clean` depths
    stay as the backbone drafts them; their code is 0."""

    candidates: int | None = None

    def __init__(self, width: int, draft_vocab: int, rank: int, size: int, clean: int) -> None:
        super().__init__()
        self.state_size, self.clean = size, clean
        self.prefix_gru = GRU(width, size)
        out = Linear(rank, draft_vocab, bias=False)
        nn.init.normal_(out.weight, std=INITIAL_STD)
        self.embed_proj = nn.Sequential(Linear(width + size, rank, bias=False), nn.SiLU(), out)

    def step(
        self, state_XS: Tensor, hidden_XD: Tensor, previous_X: Tensor, depth_X: Tensor, embed: TargetEmbed
    ) -> tuple[Tensor, Tensor]:
        state_XS = self.prefix_gru(embed(previous_X).to(hidden_XD.dtype), state_XS.to(hidden_XD.dtype))
        code_XC = self.embed_proj[:2](torch.cat([hidden_XD, state_XS], dim=-1))
        return state_XS, torch.where((depth_X > self.clean)[..., None], code_XC, 0)

    def correct(self, logits_XW: Tensor, code_XC: Tensor) -> Tensor:
        return logits_XW + self.embed_proj[2](code_XC).to(logits_XW.dtype)


class Pairs(nn.Module):
    """DFlash 2's selector: how well each of a slot's likeliest tokens follows the token before. `first` [V, r] reads
    target ids, `second` [W, r] draft ids; a draft has no mass outside the candidates."""

    state_size = 0

    def __init__(self, width: int, vocab: int, draft_vocab: int, rank: int, candidates: int) -> None:
        super().__init__()
        self.candidates: int | None = candidates
        self.first = nn.Embedding(vocab, rank)
        self.state = Linear(width, rank, bias=False)
        self.second = Linear(rank, draft_vocab, bias=False)
        nn.init.ones_(self.first.weight)
        nn.init.normal_(self.second.weight, std=INITIAL_STD)

    def step(
        self, state_XS: Tensor, hidden_XD: Tensor, previous_X: Tensor, depth_X: Tensor, embed: TargetEmbed
    ) -> tuple[Tensor, Tensor]:
        return state_XS, self.first(previous_X).to(hidden_XD.dtype) * self.state(hidden_XD)

    def correct(self, logits_XW: Tensor, code_XC: Tensor) -> Tensor:
        return keep_likeliest(logits_XW + self.second(code_XC).to(logits_XW.dtype), logits_XW, self.candidates)
