"""EAGLE-3: one decoder layer over fused taps of the target, trained on its own outputs.

Li et al., "EAGLE-3: Scaling up Inference Acceleration of Large Language Models via Training-Time Test"
(arXiv:2503.01840). Three residual streams of the target are fused to one feature per token (section 3.1); a decoder
layer reads it beside the embedding of the next token; training runs several draft steps on the layer's own outputs, so
that training sees what drafting will (section 3.2, "training-time test"). No feature is regressed: the loss is on
tokens alone. `fc_norm` and `norm_output` are the 3.1 form, against drift over depth.

Parameters bear the names of serving engines' checkpoints (`midlayer.*`, `fc`, `norm`, `lm_head`).
Test: pytest tests/test_methods.py tests/test_parity.py
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from ..losses.distill import ByHead, Oov
from ..losses.objective import parse_objective
from . import autoregression
from .drafter import Batch, Commit, Level, Prefill, TargetFacts, TargetOut, Terms
from .layers import (
    MLP,
    Attention,
    Linear,
    RMSNorm,
    Rotary,
    TargetEmbed,
    check_loss_settings,
    copy_last_mlp,
    head_rows,
    make_level,
    norm_scale,
    refuse_unbound,
    register_vocabulary,
)
from .supervision import Rows, Scorer, pair_counts


@dataclass(frozen=True)
class Eagle3Config:
    """Settings of an EAGLE-3 head."""

    steps: int = 7
    """Training-time-test steps, that is depths trained (EAGLE-3's training code)."""
    taps: tuple[int, ...] | None = None
    """Residual streams h[k] read from the target, ascending; null = 2, L // 2, L - 3 (EAGLE-3's training code)."""
    objective: str = "kl"
    """Loss per depth, an expression over the table of losses (EAGLE-3: full soft targets)."""
    depth_weight: float = 0.8
    """Depth d weighs depth_weight ** (d - 1) (EAGLE-3's training code)."""
    deep_share: float = 1.0
    """Share of the rows that are unrolled beyond depth 1 (anchors), drawn anew in every epoch. EAGLE-3 takes all (1); less is
    faster and takes less memory."""
    oov: Oov = "renormalise"
    """Teacher mass outside the draft vocabulary: renormalise, mask (rows whose argmax is outside) or tail."""
    heads: int | None = None
    """Query heads; null = the target's."""
    kv_heads: int | None = None
    """Key/value heads; null = the target's."""
    intermediate: int | None = None
    """MLP width; null = the target's."""
    mlp_from_target: bool = False
    """Start the MLP and its norm from the target's last layer; EAGLE-3 starts them at random. Faster under AdamW, not Muon."""
    train_head: bool = True
    """False: the head keeps the target's rows (as the speculators library trains it), which saves time per step."""
    checkpointing: bool = False
    """Keep of every step only its output and keys and compute the rest anew in backward: half the memory, a quarter slower."""
    fc_norm: bool = False
    """One norm per tap before `fc` (EAGLE-3.1)."""
    norm_output: bool = False
    """The next step reads the output after the final norm, not before it (EAGLE-3.1)."""
    norm_before_fc: bool = False
    """One norm over the joined taps before `fc` (gpt-oss heads)."""
    norm_before_residual: bool = False
    """The residual is the normed feature (heads of the speculators library; SGLang cannot serve them)."""

    def __post_init__(self) -> None:
        check_loss_settings(self.objective, self.oov, self.depth_weight, self.steps, "eagle3")
        if self.taps is not None and (list(self.taps) != sorted(set(self.taps)) or not self.taps):
            raise ValueError(f"eagle3: taps must be distinct and ascending, got {self.taps}")
        if not 0 < self.deep_share <= 1:
            raise ValueError(f"eagle3: deep_share must lie in (0, 1], got {self.deep_share}")
        if self.fc_norm and self.norm_before_fc:
            raise ValueError("eagle3: fc_norm and norm_before_fc exclude each other, set one")


def default_taps(layers: int) -> tuple[int, ...]:
    """h[2], h[L // 2], h[L - 3]; with fewer than 7 layers, where these meet, three (or all) streams spread over 1..L."""
    if layers >= 7:
        return 2, layers // 2, layers - 3
    return {1: (0, 1), 2: (0, 1, 2), 3: (1, 2, 3)}.get(layers, (1, layers // 2, layers - 1))


class Midlayer(nn.Module):
    """The decoder layer: attention over (embedding, feature), both normed; the residual is the feature alone."""

    def __init__(self, facts: TargetFacts, config: Eagle3Config) -> None:
        super().__init__()
        width, eps = facts.width, facts.norm_eps
        self.hidden_norm = RMSNorm(width, eps)
        self.input_layernorm = RMSNorm(width, eps)
        heads, kv_heads = config.heads or facts.heads, config.kv_heads or facts.kv_heads
        self.self_attn = Attention(2 * width, width, heads, kv_heads, facts.head_dim)
        self.post_attention_layernorm = RMSNorm(width, eps)
        self.mlp = MLP(width, config.intermediate or facts.intermediate, facts.activation)


class Eagle3(nn.Module):
    """An EAGLE-3 head; see `models/drafter.py` for the contract."""

    method = "eagle3"
    Config = Eagle3Config
    draft_needs = frozenset({"ids", "taps"})
    loss_needs = frozenset({"ids", "taps", "teacher"})
    on_device = True
    parallel = 1
    max_depth: int | None = None
    d2t_W: Tensor | None
    t2d_V: Tensor | None

    def __init__(self, config: Eagle3Config, facts: TargetFacts, draft_ids: Tensor | None = None) -> None:
        super().__init__()
        self.config, self.facts = config, facts
        self.taps = config.taps or default_taps(facts.layers)
        if self.taps[0] < 0 or self.taps[-1] > facts.layers:
            raise ValueError(f"eagle3: taps {self.taps} of {facts.name} must lie in 0..{facts.layers}")
        self.objective = parse_objective(config.objective)
        width, taps = facts.width, len(self.taps)
        self.vocab = register_vocabulary(self, facts, draft_ids)
        if config.fc_norm:
            self.fc_norm = nn.ModuleList([RMSNorm(width, facts.norm_eps) for _ in self.taps])
        if config.norm_before_fc:
            self.input_norm = RMSNorm(taps * width, facts.norm_eps)
        self.fc = Linear(taps * width, width, bias=False)
        self.midlayer = Midlayer(facts, config)
        self.norm = RMSNorm(width, facts.norm_eps)
        self.lm_head = Linear(width, self.vocab, bias=False).requires_grad_(config.train_head)
        self.rotary = Rotary(facts)
        self.target_embed: TargetEmbed = refuse_unbound

    def bind(self, target: Any) -> None:
        """Take the target's embedding, which drafting reads."""
        self.target_embed = target.embed

    @torch.no_grad()
    def init_from_target(self, target: Any) -> None:
        """Start the head from the target's rows and the norm from its final norm, the MLP as the config says; then
        `bind`."""
        self.lm_head.weight.copy_(head_rows(target, self.d2t_W))
        self.norm.weight.copy_(norm_scale(target))
        if self.config.mlp_from_target:
            copy_last_mlp(target, self.midlayer.mlp, self.midlayer.post_attention_layernorm)
        self.bind(target)

    # The cell of models/autoregression.py

    @property
    def self_attn(self) -> Attention:
        return self.midlayer.self_attn

    def fuse(self, taps_BTPD: Tensor) -> Tensor:
        """[B, T, P, D] -> features [B, T, D]."""
        if self.config.fc_norm:
            joined = torch.cat([norm(x) for norm, x in zip(self.fc_norm, taps_BTPD.unbind(2), strict=True)], dim=-1)
        else:
            joined = taps_BTPD.flatten(2)
        return self.fc(self.input_norm(joined) if self.config.norm_before_fc else joined)

    def mix(self, embed_XD: Tensor, feature_XD: Tensor) -> tuple[Tensor, Tensor]:
        normed_XD = self.midlayer.hidden_norm(feature_XD)
        joined_XC = torch.cat([self.midlayer.input_layernorm(embed_XD.to(normed_XD.dtype)), normed_XD], dim=-1)
        return joined_XC, normed_XD if self.config.norm_before_residual else feature_XD

    def finish(self, residual_XD: Tensor, attended_XD: Tensor) -> Tensor:
        hidden_XD = residual_XD + self.self_attn.o_proj(attended_XD)
        return hidden_XD + self.midlayer.mlp(self.midlayer.post_attention_layernorm(hidden_XD))

    def feed(self, hidden_XD: Tensor) -> Tensor:
        return self.norm(hidden_XD) if self.config.norm_output else hidden_XD

    # Training

    def denominators(self, batch: Batch, progress: float) -> dict[str, float]:
        """Training pairs per depth."""
        return pair_counts(batch, self.config.steps, self.config.deep_share)

    def loss(self, batch: Batch, target_out: TargetOut, progress: float) -> Terms:
        """Terms `depth_d`: KL (or the objective) to the target's distribution, summed over the pairs of depth d."""
        assert target_out.taps_BTPD is not None and target_out.embed is not None
        config = self.config
        rows = Rows.of(batch, config.steps, config.deep_share)
        scorer = Scorer(
            rows, batch, target_out, self.d2t_W, self.t2d_V, self.objective, config.oov, config.depth_weight
        )
        feature_BTD = self.fuse(target_out.taps_BTPD.to(self.fc.weight.dtype))
        outputs = autoregression.unroll(
            self, target_out.embed, feature_BTD, batch, rows, config.steps, checkpointing=config.checkpointing
        )
        for depth, hidden_RD in enumerate(outputs, 1):
            scorer.add(depth, ByHead.of(self.norm(hidden_RD), self.lm_head.weight))
        return scorer.terms()

    forward = loss

    # Drafting

    def init(self, prefill: Prefill) -> autoregression.State:
        return autoregression.init(self, prefill, self.facts.width, self.fc.weight.dtype)

    def start(self, state: autoregression.State, commit: Commit) -> tuple[autoregression.State, Level]:
        """Take in the committed rows; the level of depth 1."""
        assert commit.taps_BTPD is not None
        feature_BTD = self.fuse(commit.taps_BTPD.to(self.fc.weight.dtype))
        hidden_BD = autoregression.start(self, state, self.target_embed, commit, feature_BTD)
        return state, self.level(hidden_BD[:, None], (commit.counts_B > 0)[:, None])

    def extend(
        self, state: autoregression.State, tokens_BN: Tensor, parents_BN: Tensor
    ) -> tuple[autoregression.State, Level]:
        """Add nodes (target ids) below their parents; the levels below them."""
        hidden_BND = autoregression.extend(self, state, self.target_embed, tokens_BN, parents_BN)
        return state, self.level(hidden_BND, torch.ones_like(tokens_BN, dtype=torch.bool))

    def reset(self, state: autoregression.State, rows: Tensor) -> autoregression.State:
        state.cache.reset(rows)
        return state

    def level(self, hidden_BND: Tensor, valid_BN: Tensor) -> Level:
        return make_level(self.lm_head(self.norm(hidden_BND)), valid_BN, self.d2t_W, self.facts.tokens)
