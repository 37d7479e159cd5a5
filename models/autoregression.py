"""Feature autoregression, the engine of EAGLE-1 and EAGLE-3: one decoder layer that feeds on its own output.

Row t takes the target's feature of token t and the embedding of token t + 1, at position t; its output predicts the
token at t + 2 and stands in for the feature of the next row. Step s of a draft from row t runs at position t + s on
the output of step s - 1 and the embedding of the token at t + 1 + s; it sees the true features of rows up to t and the
draft's own steps 0 < j <= s. That is how serving engines run it; training (`unroll`) does the same for all rows at
once: keys and values of step 0 for every row, queries for supervised rows only, one more key per row and step.

Training and drafting share `Cell`. Test: pytest tests/test_parity.py
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from .attention import Own, Ranges, attend_ranges
from .cache import Cache
from .drafter import Batch, Commit, Prefill
from .layers import Attention, Rotary, TargetEmbed, attend, newest
from .supervision import Rows


class Cell(Protocol):
    """The layer, in the parts between which rows are gathered or cached."""

    rotary: Rotary

    @property
    def self_attn(self) -> Attention: ...

    def mix(self, embed_XD: Tensor, feature_XD: Tensor) -> tuple[Tensor, Tensor]:
        """The attention's input, and the residual beside it."""
        ...

    def finish(self, residual_XD: Tensor, attended_XD: Tensor) -> Tensor:
        """The layer's output, from the residual and the attention's (before its output projection)."""
        ...

    def feed(self, hidden_XD: Tensor) -> Tensor:
        """What the next step takes as feature."""
        ...


def unroll(
    cell: Cell,
    embed: TargetEmbed,
    feature_BTD: Tensor,
    batch: Batch,
    rows: Rows,
    steps: int,
    detach: bool = False,
    checkpointing: bool = False,
) -> Iterator[Tensor]:
    """Training: yield, for depth 1 .. steps, the layer's output [R, D] of the rows that are trained at that depth
    (`rows.pairs`), with the data's tokens as drafts.

    `detach`: a step's output enters the next one as a constant (HASS: each pass is back-propagated on its own).
    `checkpointing`: of a step, only output, keys and values are kept; backward computes the rest anew.
    """
    run = partial(checkpoint, use_reentrant=False, preserve_rng_state=False) if checkpointing else plain_call
    hidden_RD, k_NGd, v_NGd = run(first_step, cell, embed, feature_BTD, batch, rows)
    yield hidden_RD[rows.pairs[0]]
    if steps > 1:  # from here on, only rows that go deeper
        hidden_RD, rows = hidden_RD[rows.pairs[1]], rows.deeper()
    ranges, own = rows.ranges(batch), list[tuple[Tensor, Tensor]]()
    for step in range(1, steps):
        feature_RD = cell.feed(hidden_RD.detach() if detach else hidden_RD)
        angles = cell.rotary(rows.take(batch.positions_BT) + step)
        embed_RD = embed(rows.take(batch.ids_BT, 1 + step))
        hidden_RD, k_RGd, v_RGd = run(next_step, cell, embed_RD, feature_RD, angles, k_NGd, v_NGd, ranges, own)
        own = [*own, (k_RGd, v_RGd)]
        yield hidden_RD[rows.pairs[step - 1]]


def plain_call(function: Callable[..., Any], *args: Any) -> Any:
    return function(*args)


def first_step(
    cell: Cell, embed: TargetEmbed, feature_BTD: Tensor, batch: Batch, rows: Rows
) -> tuple[Tensor, Tensor, Tensor]:
    """The output [R, D] of the supervised rows; keys and values of all N = B * T, which every step reads."""
    x_BTX, residual_BTD = cell.mix(embed(batch.ids_BT.roll(-1, dims=1)), feature_BTD)
    k_BTGd, v_BTGd = cell.self_attn.keys_values(x_BTX, cell.rotary(batch.positions_BT))
    k_NGd, v_NGd = k_BTGd.flatten(0, 1), v_BTGd.flatten(0, 1)
    q_RHd = cell.self_attn.queries(rows.take(x_BTX), cell.rotary(rows.take(batch.positions_BT)))
    attended_RD = attend_ranges(q_RHd, k_NGd, v_NGd, rows.ranges(batch)).flatten(1)
    return cell.finish(rows.take(residual_BTD), attended_RD), k_NGd, v_NGd


def next_step(
    cell: Cell,
    embed_RD: Tensor,
    feature_RD: Tensor,
    angles: tuple[Tensor, Tensor],
    k_NGd: Tensor,
    v_NGd: Tensor,
    ranges: Ranges,
    own: Own,
) -> tuple[Tensor, Tensor, Tensor]:
    """The output [R, D] of a later step, and its own keys and values [R, G, d]."""
    x_RX, residual_RD = cell.mix(embed_RD, feature_RD)
    k_RGd, v_RGd = cell.self_attn.keys_values(x_RX, angles)
    q_RHd = cell.self_attn.queries(x_RX, angles)
    attended_RD = attend_ranges(q_RHd, k_NGd, v_NGd, ranges, [*own, (k_RGd, v_RGd)]).flatten(1)
    return cell.finish(residual_RD, attended_RD), k_RGd, v_RGd


@dataclass
class State:
    """A draft in progress. Index 0 of M is the anchor's row, j + 1 the j-th node given to `extend`."""

    cache: Cache
    position_B: Tensor  # of the newest committed row
    feature_BMD: Tensor  # what children of each node take as feature
    depth_BM: Tensor
    see_BNN: Tensor  # node i sees node j (itself and its ancestors; the anchor's row is committed)


def init(cell: Cell, prefill: Prefill, width: int, dtype: torch.dtype) -> State:
    """An empty state; keys and values are kept in the drafter's own precision."""
    attention = cell.self_attn
    cache = Cache(prefill.rows, prefill.slots, 1, attention.kv_heads, attention.head_dim, dtype, prefill.device)
    zeros = torch.zeros(prefill.rows, 1, dtype=torch.int64, device=prefill.device)
    return State(
        cache, zeros[:, 0], zeros[..., None].to(dtype).expand(-1, -1, width), zeros, zeros.bool()[..., None][:, :0, :0]
    )


def start(cell: Cell, state: State, embed: TargetEmbed, commit: Commit, feature_BTD: Tensor) -> Tensor:
    """Append the committed rows with the target's true features, dropping what was drafted; return the output [B, D]
    of the newest row of each."""
    x_BTX, residual_BTD = cell.mix(embed(commit.following()).to(feature_BTD.dtype), feature_BTD)
    state.cache.begin(commit.positions_BT)
    q_BTHd, k_BTGd, v_BTGd = cell.self_attn.project(x_BTX, cell.rotary(commit.positions_BT))
    k_BGSd, v_BGSd = state.cache.update(k_BTGd.transpose(1, 2), v_BTGd.transpose(1, 2), 0)
    position_B1 = newest(commit, commit.positions_BT[..., None])
    q_BHd = newest(commit, q_BTHd)
    last_B1 = (commit.counts_B - 1).clamp(min=0)[:, None]
    see_B1T = torch.arange(x_BTX.shape[1], device=last_B1.device) <= last_B1
    see_B1S = state.cache.mask(see_B1T[:, None])[:, 0]
    attended_BD = attend(q_BHd[:, :, None], k_BGSd, v_BGSd, see_B1S).flatten(1)
    hidden_BD = cell.finish(newest(commit, residual_BTD), attended_BD)
    state.cache.commit(commit.counts_B)
    b = len(hidden_BD)
    state.position_B = torch.where(commit.counts_B > 0, position_B1[:, 0], state.position_B)
    state.feature_BMD = cell.feed(hidden_BD)[:, None]
    state.depth_BM = torch.zeros_like(position_B1)
    state.see_BNN = torch.zeros(b, 0, 0, dtype=torch.bool, device=hidden_BD.device)
    return hidden_BD


def extend(cell: Cell, state: State, embed: TargetEmbed, tokens_BN: Tensor, parents_BN: Tensor) -> Tensor:
    """Append drafted nodes below their parents; return their outputs [B, N, D]."""
    b, n = tokens_BN.shape
    before = state.see_BNN.shape[1]
    rows_B1 = torch.arange(b, device=tokens_BN.device)[:, None]
    feature_BND = state.feature_BMD[rows_B1, parents_BN]
    depth_BN = state.depth_BM[rows_B1, parents_BN] + 1
    lineage_BMN = torch.nn.functional.pad(state.see_BNN, (0, n, 1, 0))  # the anchor (row 0) sees no node
    see_BNA = lineage_BMN[rows_B1, parents_BN]
    see_BNA[:, :, before:] = torch.eye(n, dtype=torch.bool, device=tokens_BN.device)
    x_BNX, residual_BND = cell.mix(embed(tokens_BN).to(feature_BND.dtype), feature_BND)
    position_BN = state.position_B[:, None] + depth_BN
    angles = cell.rotary(position_BN)
    state.cache.begin(position_BN, offset=before)
    q_BNHd, k_BNGd, v_BNGd = cell.self_attn.project(x_BNX, angles)
    k_BGSd, v_BGSd = state.cache.update(k_BNGd.transpose(1, 2), v_BNGd.transpose(1, 2), 0)
    see_BNS = state.cache.mask(see_BNA)[:, 0]
    attended_BND = attend(q_BNHd.transpose(1, 2), k_BGSd, v_BGSd, see_BNS).transpose(1, 2).flatten(2)
    hidden_BND = cell.finish(residual_BND, attended_BND)
    state.feature_BMD = torch.cat([state.feature_BMD, cell.feed(hidden_BND)], dim=1)
    state.depth_BM = torch.cat([state.depth_BM, depth_BN], dim=1)
    state.see_BNN = torch.cat([torch.nn.functional.pad(state.see_BNN, (0, n)), see_BNA], dim=1)
    return hidden_BND
