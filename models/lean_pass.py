"""What a lean pass does between its products with weights: norms, rotary angles, the cache, attention, the gate.

Two forms with the same methods. `Plain`: PyTorch's operators, for CPUs, and on a GPU for prompts (more than `FEW` tokens
per row), passes without a cache, and prefixes. `Fused`: kernels of ours, for decoding and verification on a GPU: the
residual sum and the norm after it in one, rotation and the write into the cache in one, SiLU and the product in one, and
attention over the static cache by its rows' own lengths and the bitmask of ancestors, whose parts of the keys are cut at
constant slots, so that a row's bits depend neither on how many rows there are nor on how many slots are read.

Both round where the modules of transformers round. Test: pytest tests/test_lean.py tests/test_lean_kernels.py
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.nn.functional import pad, rms_norm, scaled_dot_product_attention, silu

from ..kernels.jit import runs_on
from ..kernels.norm import add_norm
from ..kernels.rope import rope_write
from ..kernels.swiglu import swiglu
from ..kernels.tree_attention import WIDEST, Sight, pack, tree_attention
from .cache import Cache

if TYPE_CHECKING:
    from .lean import LeanFacts

BLOCK_ROWS = 32  # query rows that PyTorch's attention on CPUs takes at once; more would differ in low bits by place
FEW = 64  # tokens per row that are decoded or verified at once, at most; prompts are longer as a rule


def norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """RMS norm over the last dimension, rounded where the reference rounds: in fp32 inside, before the weight."""
    if x.dtype == torch.float64:
        return rms_norm(x.float(), x.shape[-1:], None, eps).double().mul_(weight)
    return rms_norm(x, x.shape[-1:], None, eps).mul_(weight)


def between_products(
    facts: LeanFacts,
    activation: Callable[[Tensor], Tensor],
    hidden_BTD: Tensor,
    positions_BT: Tensor,
    cos_sin: tuple[Tensor, Tensor],
    cache: Cache | None,
    see_BTA: Tensor | None,
    prefix_kv: Tensor | None,
) -> Plain | Fused:
    """Opens the cache's pass; see `Target.forward` for the arguments. `cos_sin`: [B, T, head_dim] each."""
    t, p = positions_BT.shape[1], 0 if prefix_kv is None else prefix_kv.shape[3]
    if cache is not None:
        cache.begin(positions_BT, 0 if see_BTA is None else see_BTA.shape[2] - t - p, prefix_kv)
        if p == 0 and t <= FEW and facts.head_dim % 2 == 0 and facts.head_dim <= WIDEST and fuses(hidden_BTD):
            return Fused(facts, activation, hidden_BTD.dtype, positions_BT, cos_sin, cache, see_BTA)
    return Plain(facts, activation, hidden_BTD.dtype, positions_BT, cos_sin, cache, see_BTA, prefix_kv)


def fuses(x: Tensor) -> bool:
    """Whether the kernels take such tensors."""
    return x.dtype != torch.float64 and runs_on(x)


class Plain:
    """By PyTorch's operators."""

    def __init__(
        self,
        facts: LeanFacts,
        activation: Callable[[Tensor], Tensor],
        dtype: torch.dtype,
        positions_BT: Tensor,
        cos_sin: tuple[Tensor, Tensor],
        cache: Cache | None,
        see_BTA: Tensor | None,
        prefix_kv: Tensor | None,
    ) -> None:
        self.facts, self.activation, self.cos_sin, self.cache, self.prefix_kv = (
            facts, activation, cos_sin, cache, prefix_kv
        )  # fmt: skip
        self.b, t = positions_BT.shape
        p = 0 if prefix_kv is None else prefix_kv.shape[3]
        first = 0 if cache is None else cache.first_to_end()
        self.causal = t > 1 and see_BTA is None and first == 0
        groups = facts.heads // facts.kv_heads
        self.fold = groups * t <= BLOCK_ROWS and not self.causal
        self.masks: dict[int | None, Tensor | None] = {}
        if see_BTA is None and first is not None and (self.causal or t == 1):  # nothing to hide but what windows do
            self.masks[None] = None
        for window in set(facts.windows) - self.masks.keys():
            mask_B1TS = mask_of(window, see_BTA, positions_BT, cache, p, dtype)
            self.masks[window] = mask_B1TS.repeat_interleave(groups, 2) if self.fold else mask_B1TS

    def begin(self) -> None:
        """In inference mode."""
        cos_BTd, sin_BTd = self.cos_sin
        half = sin_BTd.shape[-1] // 2
        sin_BTd = torch.cat([-sin_BTd[..., :half], sin_BTd[..., half:]], -1)
        self.angles = cos_BTd[:, :, None], sin_BTd[:, :, None]
        self.store = _Store(self.cache, self.prefix_kv, self.b)

    def norm(self, x: Tensor, weight_D: Tensor, eps: float) -> Tensor:
        """RMS norm."""
        return norm(x, weight_D, eps)

    def add_norm(self, x: Tensor, residual: Tensor, weight_D: Tensor, eps: float) -> tuple[Tensor, Tensor]:
        """The norm of the sum, and the sum, which takes the place of `x`."""
        x.add_(residual)
        return norm(x, weight_D, eps), x

    def gated(self, gate: Tensor, up: Tensor) -> Tensor:
        """The activation of the gate, times `up`."""
        return self.activation(gate).mul_(up)

    def attend(self, i: int, heads_BTEd: Tensor, scale_Ed: Tensor | None, window: int | None) -> Tensor:
        """[B * T, H * d] of layer i: its query, key and value heads are normed (`scale_Ed`) and rotated in place."""
        facts = self.facts
        turn_BTEd = heads_BTEd[:, :, : facts.heads + facts.kv_heads]
        if scale_Ed is not None:
            turn_BTEd.copy_(norm(turn_BTEd, scale_Ed, facts.eps))
        cos_BT1d, sin_BT1d = self.angles  # the sine has its first half negated, and the halves change places
        turned_BTEd = torch.roll(turn_BTEd, facts.head_dim // 2, -1).mul_(sin_BT1d)
        turn_BTEd.mul_(cos_BT1d).add_(turned_BTEd)
        q_BTHd, kv_BTKd = heads_BTEd.split([facts.heads, 2 * facts.kv_heads], 2)
        k_BKSd, v_BKSd = self.store.put(i, kv_BTKd.unflatten(2, (2, -1)).permute(2, 0, 3, 1, 4))
        mask = self.masks[window]
        return attend(q_BTHd, k_BKSd, v_BKSd, mask, self.fold, self.causal and mask is None)


class Fused:
    """By kernels of ours. Layers with a window read the cache by PyTorch's attention, which is told of positions."""

    def __init__(
        self,
        facts: LeanFacts,
        activation: Callable[[Tensor], Tensor],
        dtype: torch.dtype,
        positions_BT: Tensor,
        cos_sin: tuple[Tensor, Tensor],
        cache: Cache,
        see_BTA: Tensor | None,
    ) -> None:
        self.facts, self.activation, self.cache = facts, activation, cache
        self.cos_BTd, self.sin_BTd = cos_sin
        b, t = positions_BT.shape
        groups = facts.heads // facts.kv_heads
        self.fold = groups * t <= BLOCK_ROWS
        self.masks: dict[int, Tensor] = {}
        for window in set(facts.windows):
            if window is not None:
                mask_B1TS = mask_of(window, see_BTA, positions_BT, cache, 0, dtype)
                self.masks[window] = mask_B1TS.repeat_interleave(groups, 2) if self.fold else mask_B1TS
        self.sight: Sight | None = None
        if None in facts.windows:
            see_BTA = causal(b, t, positions_BT.device) if see_BTA is None else see_BTA
            self.sight = Sight(cache.lengths_B, pack(see_BTA), see_BTA.shape[2])

    def begin(self) -> None:
        """In inference mode."""
        self.slots_BT = self.cache.new_slots()
        _, self.keys, self.values = self.cache.open()

    def norm(self, x: Tensor, weight_D: Tensor, eps: float) -> Tensor:
        """RMS norm."""
        return add_norm(x, weight_D, eps).normed

    def add_norm(self, x: Tensor, residual: Tensor, weight_D: Tensor, eps: float) -> tuple[Tensor, Tensor]:
        """The norm of the sum, and the sum."""
        return add_norm(x, weight_D, eps, residual)

    def gated(self, gate: Tensor, up: Tensor) -> Tensor:
        """The activation of the gate, times `up`."""
        return swiglu(gate, up) if self.activation is silu else self.activation(gate).mul_(up)

    def attend(self, i: int, heads_BTEd: Tensor, scale_Ed: Tensor | None, window: int | None) -> Tensor:
        """[B * T, H * d] of layer i, from its query, key and value heads."""
        facts, keys_BKSd, values_BKSd = self.facts, self.keys[i], self.values[i]
        turn_BTEd, v_BTKd = heads_BTEd.split([facts.heads + facts.kv_heads, facts.kv_heads], 2)
        if scale_Ed is not None:
            turn_BTEd = add_norm(turn_BTEd, scale_Ed, facts.eps).normed
        q_BHTd, k_BKTd = turn_BTEd.transpose(1, 2).split([facts.heads, facts.kv_heads], 1)
        turned_BHTd = rope_write(
            q_BHTd, k_BKTd, v_BTKd.transpose(1, 2), self.cos_BTd, self.sin_BTd, keys_BKSd, values_BKSd, self.slots_BT
        )
        q_BTHd = turned_BHTd.transpose(1, 2)
        if window is not None:
            return attend(q_BTHd, keys_BKSd, values_BKSd, self.masks[window], self.fold, False)
        assert self.sight is not None
        return tree_attention(q_BTHd, keys_BKSd, values_BKSd, self.sight).flatten(0, 1).flatten(1)


def causal(b: int, t: int, device: torch.device) -> Tensor:
    """Bool [B, T, T]: each token sees those before it, and itself."""
    return torch.ones(t, t, dtype=torch.bool, device=device).tril().expand(b, t, t)


def mask_of(
    window: int | None,
    see_BTA: Tensor | None,
    positions_BT: Tensor,
    cache: Cache | None,
    p: int,
    dtype: torch.dtype,
) -> Tensor:
    """[B, 1, T, S] what attention adds to its scores: 0 where a key is seen, -inf where not."""
    b, t = positions_BT.shape
    if see_BTA is None:
        see_BTA = causal(b, t, positions_BT.device)
    if cache is not None:
        see_B1TS = cache.mask(see_BTA, window)
    else:
        if window is not None:
            near_BTT = positions_BT[:, :, None] - positions_BT[:, None, :] < window
            see_BTA = see_BTA & pad(near_BTT, (0, p), value=True)
        see_B1TS = see_BTA[:, None]
    zeros_B1TS = torch.zeros(see_B1TS.shape, dtype=dtype, device=positions_BT.device)
    return zeros_B1TS.masked_fill_(~see_B1TS, float("-inf"))


class _Store:
    """Where one pass writes its keys and values, and what it reads: a cache, or nothing kept."""

    def __init__(self, cache: Cache | None, prefix_kv: Tensor | None, b: int) -> None:
        self.prefix_kv, self.b = None if cache is not None else prefix_kv, b
        self.write: Callable[[int, Tensor], object] | None = None
        if cache is not None:
            self.write, self.keys, self.values = cache.open()

    def put(self, layer: int, new_2BKTd: Tensor) -> tuple[Tensor, Tensor]:
        """Take a layer's new keys and values; give all that it reads, both [B, kv_heads, S, head_dim]."""
        if self.write is not None:
            self.write(layer, new_2BKTd)
            return self.keys[layer], self.values[layer]
        if self.prefix_kv is not None:
            prefix_2BKPd = self.prefix_kv[layer][:, None].expand(-1, self.b, -1, -1, -1)
            new_2BKTd = torch.cat([new_2BKTd, prefix_2BKPd], 3)
        return new_2BKTd[0], new_2BKTd[1]


def attend(q_BTHd: Tensor, k_BKSd: Tensor, v_BKSd: Tensor, mask: Tensor | None, fold: bool, causal: bool) -> Tensor:
    """[B * T, H * d] attention of H query heads over K key heads.

    `fold`: the queries that share a key head stand below each other, T * H / K rows of it, so that nothing is repeated;
    `mask` has such rows then. Otherwise keys are repeated. Folded rows all fit one block of the kernel, so that a row's
    bits do not depend on its place.
    """
    b, t, h, d = q_BTHd.shape
    groups = h // k_BKSd.shape[1]
    if fold:
        q_BKXd = q_BTHd.unflatten(2, (-1, groups)).transpose(1, 2).reshape(b, -1, t * groups, d)
        out_BKXd = scaled_dot_product_attention(q_BKXd, k_BKSd, v_BKSd, attn_mask=mask)
        return out_BKXd.unflatten(2, (t, groups)).transpose(1, 2).reshape(b * t, h * d)
    if groups > 1:
        k_BKSd, v_BKSd = (x.repeat_interleave(groups, 1) for x in (k_BKSd, v_BKSd))
    out_BHTd = scaled_dot_product_attention(q_BTHd.transpose(1, 2), k_BKSd, v_BKSd, attn_mask=mask, is_causal=causal)
    return out_BHTd.transpose(1, 2).reshape(b * t, h * d)
