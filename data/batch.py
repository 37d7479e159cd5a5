"""What training reads: packed rows of tokens, and the target's states of those rows.

Both are plain tensors and know no model; `models/drafter.py` states how they line up with a drafter's rows.
Tested by `pytest tests/test_data.py`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ..losses.distill import ByHead, Logits


@dataclass
class Batch:
    """Packed training rows. All tensors have shape [B, T]; padding has sample id -1."""

    ids_BT: Tensor  # int64
    supervised_BT: Tensor  # bool, True where this token is one to be predicted (written by the assistant, or its end)
    positions_BT: Tensor  # int64, from 0 in every document
    samples_BT: Tensor  # int64 sample id: document separator and key of seeded noise; -1 = padding
    epoch: int = 0
    seed: int = 0
    order_BT: Tensor | None = None  # int64, the decoding pass that decided the token; -1 = not known; None = of none
    guess_BT: Tensor | None = None  # int64 [B, T'], own guesses (models/on_policy.py, models/consistency.py)
    states_BIT: Tensor | None = None  # int64 [B, I, T], Jacobi states of answers, each block's last ones being its text

    def to(self, device: torch.device | str) -> Batch:
        return Batch(
            self.ids_BT.to(device),
            self.supervised_BT.to(device),
            self.positions_BT.to(device),
            self.samples_BT.to(device),
            self.epoch,
            self.seed,
            None if self.order_BT is None else self.order_BT.to(device),
            None if self.guess_BT is None else self.guess_BT.to(device),
            None if self.states_BIT is None else self.states_BIT.to(device),
        )


def supervised(batch: Batch, depth: int) -> Tensor:
    """Bool [B, T]: True where state row t has a training pair of this depth (depth 0: the anchor alone is supervised).

    Pair (t, d) counts when tokens t+1 .. t+1+d are all supervised and belong to the document of t.
    """
    ok_BT = torch.zeros_like(batch.supervised_BT)
    n = batch.ids_BT.shape[1] - 1 - depth
    if n <= 0:
        return ok_BT
    run_Bn = batch.samples_BT[:, :n] >= 0
    for j in range(1, depth + 2):
        same_Bn = batch.samples_BT[:, j : j + n] == batch.samples_BT[:, :n]
        run_Bn = run_Bn & batch.supervised_BT[:, j : j + n] & same_Bn
    ok_BT[:, :n] = run_Bn
    return ok_BT


def document_starts(batch: Batch) -> Tensor:
    """int64 [B, T] the index of the first token of each token's document."""
    t = torch.arange(batch.ids_BT.shape[1], device=batch.ids_BT.device).expand_as(batch.ids_BT)
    first_BT = F.pad(batch.samples_BT[:, 1:] != batch.samples_BT[:, :-1], (1, 0), value=True)
    return torch.where(first_BT, t, 0).cummax(1).values


@dataclass
class Likeliest:
    """What the target says of the token after each row, without a state of it: its K likeliest ids, best first, the logs
    of their probabilities, and the mass of all others. Rows without a supervised next token hold zeros."""

    ids_BTK: Tensor  # int32, target ids
    log_p_BTK: Tensor  # fp32
    tail_BT: Tensor  # fp32

    def to(self, device: torch.device | str) -> Likeliest:
        return Likeliest(self.ids_BTK.to(device), self.log_p_BTK.to(device), self.tail_BT.to(device))


@dataclass
class TargetOut:
    """States of one batch. Only what `loss_needs` asks for is filled; `likeliest` takes the place of `last_hidden_BTD` as
    a teacher where that was captured.

    `taps_BTPD[:, :, i]` is h[taps[i]], the residual stream entering that layer; `last_hidden_BTD` is after the final
    norm. Row t of both is the state of token t: the teacher for the token at t + 1 is `head(last_hidden[t])`.
    """

    taps_BTPD: Tensor | None = None
    last_hidden_BTD: Tensor | None = None
    log_z_BT: Tensor | None = None  # log-sum-exp over all V logits of row t, fp32; None = not captured
    top_BT: Tensor | None = None  # argmax over all V logits of row t, int64; None = not captured
    head: Callable[[Tensor, Tensor | None], Tensor] | None = None  # Target.head: (hidden, ids or None) -> logits
    by_head: Callable[[Tensor, Tensor | None], ByHead | None] | None = None  # Target.by_head: the same, not yet formed
    embed: Callable[[Tensor], Tensor] | None = None  # Target.embed: ids -> embeddings
    forward: Callable[..., Any] | None = None  # Target.forward, for methods that need `module`
    kv: Any = None  # a Cache that holds the keys and values of all T rows, for methods that need `kv`
    likeliest: Likeliest | None = None  # comes with `top_BT`

    def logits(self, hidden_RD: Tensor, ids: Tensor | None) -> Logits:
        """What the target's head makes of states: not yet formed, where it is linear and `by_head` is given."""
        assert self.head is not None
        rows = None if self.by_head is None else self.by_head(hidden_RD, ids)
        return self.head(hidden_RD, ids) if rows is None else rows
