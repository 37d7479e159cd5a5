"""Slots that run inside the frozen target: what prompt tokens and dual views share.

Their slots pass through the target's own layers, behind the text's keys and values of a pass that ran before, without
gradients. So the text costs one forward pass, which the teacher needs anyway, and gradients flow through the slots
alone. Frozen weights get none: they are no parameters of the drafter, and `requires_grad` is off.

Such methods need `module` and `kv`: `TargetOut.forward` is the target's `forward`, called inside the drafter's `loss`,
which is what DDP and DeepSpeed wrap. Captured states have neither.

Test: pytest tests/test_slot_methods.py
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from transformers import Cache as HFCache

from .drafter import Batch, TargetOut
from .slots import MaskRule, Slots, dense_mask


class TextCache(HFCache):
    """The keys and values `kv` [layers, 2, B, H, T, head_dim] of an earlier pass over the text, read-only, before those
    of the pass in hand and a prefix behind them (`Target.forward`). Nothing is kept; gradients flow into what is new."""

    def __init__(self, kv: Tensor, positions_BT: Tensor) -> None:
        super().__init__(layers=[])
        self.kv, self.positions_BT = kv, positions_BT
        self.new_BQ = positions_BT[:, :0]
        self.prefix_kv: Tensor | None = None

    def begin(self, positions_BQ: Tensor, offset: int = 0, prefix_kv: Tensor | None = None) -> None:
        """Open a pass of Q new tokens at these positions. `offset`: T, the text that the mask speaks of."""
        assert offset == self.positions_BT.shape[1]
        self.new_BQ, self.prefix_kv = positions_BQ, prefix_kv

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """One layer's keys and values [B, H, T + Q + P, head_dim]. The further arguments are those of
        `transformers.Cache.update` and have no effect."""
        joined = []
        for i, new_BHQd in enumerate((key_states, value_states)):
            parts = [self.kv[layer_idx, i].to(new_BHQd.dtype), new_BHQd]
            if self.prefix_kv is not None:
                prefix_HPd = self.prefix_kv[layer_idx, i].to(new_BHQd.dtype)
                parts.append(prefix_HPd.expand(len(new_BHQd), -1, -1, -1))
            joined.append(torch.cat(parts, dim=2))
        return joined[0], joined[1]

    def mask(self, see_BQS: Tensor, window: int | None = None) -> Tensor:
        """Bool [B, 1, Q, S]: `see_BQS` over [text | new | prefix], cut to `window` positions back but for the prefix."""
        if window is not None:
            near_BQS = self.new_BQ[:, :, None] - torch.cat([self.positions_BT, self.new_BQ], 1)[:, None] < window
            prefix = see_BQS.shape[2] - near_BQS.shape[2]
            see_BQS = see_BQS & torch.nn.functional.pad(near_BQS, (0, prefix), value=True)
        return see_BQS[:, None]

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Tokens of the text."""
        return self.positions_BT.shape[1]

    def get_mask_sizes(self, query_length: int, layer_idx: int) -> tuple[int, int]:
        """Keys that the pass in hand reads, and the first one's place."""
        prefix = 0 if self.prefix_kv is None else self.prefix_kv.shape[3]
        return self.positions_BT.shape[1] + query_length + prefix, 0


def run_slots(
    out: TargetOut, batch: Batch, slots: Slots, rule: MaskRule, embeds_BQD: Tensor, prefix_kv: Tensor | None = None
) -> Tensor:
    """[B, Q, D] the target's last hidden states (after its final norm) of the slots, whose inputs are `embeds_BQD`;
    every slot sees `prefix_kv` [layers, 2, kv_heads, P, head_dim].

    Raises ValueError for states that were captured, or come from elsewhere: nothing can flow through them.
    """
    if out.forward is None or out.kv is None:
        raise ValueError("these states hold no module and no keys and values to train through: set states.source=live")
    see_BQS = dense_mask(slots, batch, rule)
    embeds_BQD = embeds_BQD.to(out.kv.kv.dtype)
    if not embeds_BQD.shape[1]:
        return embeds_BQD  # nothing to run
    if prefix_kv is not None:
        see_BQS = torch.nn.functional.pad(see_BQS, (0, prefix_kv.shape[3]), value=True)
    states = out.forward(
        embeds_BQD,
        slots.position_BQ,
        cache=TextCache(out.kv.kv, batch.positions_BT),
        see_BTA=see_BQS,
        prefix_kv=prefix_kv,
    )
    return states.last_hidden_BTD
