"""EAGLE-1: one decoder layer that regresses the target's next feature; HASS: the same, trained on its own features.

Li et al., "EAGLE: Speculative Sampling Requires Rethinking Feature Uncertainty" (arXiv:2401.15077), section 3. The
feature is the target's last hidden state (after the final norm); a layer without input norm reads
fc(embedding of token t + 1, feature of token t), its output is the feature of token t + 1 and goes through the target's
own head. Loss: smooth-L1 on features plus 0.1 times the soft cross-entropy (section 4, "Training").

HASS (Zhang et al., "Learning Harmonized Representations for Speculative Sampling", arXiv:2408.15766): `steps: 3`, each
pass on the detached outputs of the one before (section 3.2), and a loss over the target's ten likeliest tokens (3.1):
`objective: feature_smooth_l1 + 0.1*kl + topk_ce`.

Parameters bear the names of serving engines' checkpoints (`fc`, `layers.0.*`). `fc` has no bias by default: engines drop it.
Test: pytest tests/test_methods.py tests/test_parity.py
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from ..losses.distill import Oov
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
    TargetHead,
    check_loss_settings,
    feature_noise,
    make_level,
    refuse_unbound,
    register_vocabulary,
)
from .supervision import Rows, Scorer, pair_counts


@dataclass(frozen=True)
class EagleConfig:
    """Settings of an EAGLE-1 head."""

    steps: int = 1
    """Passes over the layer's own features, that is depths trained (EAGLE: 1; HASS: 3)."""
    objective: str = "feature_smooth_l1 + 0.1*kl"
    """Loss per depth (EAGLE, section 4; HASS adds topk_ce)."""
    depth_weight: float = 1.0
    """Depth d weighs depth_weight ** (d - 1) (HASS: all alike)."""
    deep_share: float = 1.0
    """Share of the rows that are unrolled beyond depth 1 (anchors), drawn anew in every epoch. HASS takes all (1)."""
    oov: Oov = "renormalise"
    """Teacher mass outside the draft vocabulary: renormalise, mask (rows whose argmax is outside) or tail."""
    noise: float = 0.2
    """Uniform noise of this width on the features of a document of 512 tokens; longer ones get less (EAGLE's code)."""
    heads: int | None = None
    """Query heads; null = the target's."""
    kv_heads: int | None = None
    """Key/value heads; null = the target's."""
    intermediate: int | None = None
    """MLP width; null = the target's."""
    bias: bool = False
    """A bias on `fc`, as the paper's checkpoints have; engines drop it, so train without."""
    checkpointing: bool = False
    """Keep of every step only its output and keys and compute the rest anew in backward: half the memory, a quarter slower."""

    def __post_init__(self) -> None:
        check_loss_settings(self.objective, self.oov, self.depth_weight, self.steps, "eagle", features=True)
        if not 0 < self.deep_share <= 1:
            raise ValueError(f"eagle: deep_share must lie in (0, 1], got {self.deep_share}")
        if self.noise < 0:
            raise ValueError(f"eagle: noise must not be negative, got {self.noise}")


class Layer(nn.Module):
    """A Llama decoder layer without input norm."""

    def __init__(self, facts: TargetFacts, config: EagleConfig) -> None:
        super().__init__()
        heads, kv_heads = config.heads or facts.heads, config.kv_heads or facts.kv_heads
        self.self_attn = Attention(facts.width, facts.width, heads, kv_heads, facts.head_dim)
        self.post_attention_layernorm = RMSNorm(facts.width, facts.norm_eps)
        self.mlp = MLP(facts.width, config.intermediate or facts.intermediate, facts.activation)


class Eagle(nn.Module):
    """An EAGLE-1 head; see `models/drafter.py` for the contract."""

    method = "eagle"
    Config = EagleConfig
    draft_needs = frozenset({"ids", "last_hidden"})
    loss_needs = frozenset({"ids", "last_hidden", "teacher"})
    on_device = True
    taps: tuple[int, ...] = ()
    parallel = 1
    max_depth: int | None = None
    d2t_W: Tensor | None
    t2d_V: Tensor | None

    def __init__(self, config: EagleConfig, facts: TargetFacts, draft_ids: Tensor | None = None) -> None:
        super().__init__()
        self.config, self.facts = config, facts
        self.objective = parse_objective(config.objective, features=True)
        self.vocab = register_vocabulary(self, facts, draft_ids)
        self.fc = Linear(2 * facts.width, facts.width, bias=config.bias)
        self.layers = nn.ModuleList([Layer(facts, config)])
        self.rotary = Rotary(facts)
        self.target_embed: TargetEmbed = refuse_unbound
        self.target_head: TargetHead = refuse_unbound

    def bind(self, target: Any) -> None:
        """Take the target's embedding and head, which drafting reads."""
        self.target_embed, self.target_head = target.embed, target.head

    def init_from_target(self, target: Any) -> None:
        """Nothing is copied; `bind`."""
        self.bind(target)

    # The cell of models/autoregression.py

    @property
    def layer(self) -> Layer:
        (layer,) = self.layers
        assert isinstance(layer, Layer)
        return layer

    @property
    def self_attn(self) -> Attention:
        return self.layer.self_attn

    def mix(self, embed_XD: Tensor, feature_XD: Tensor) -> tuple[Tensor, Tensor]:
        fused_XD = self.fc(torch.cat([embed_XD.to(feature_XD.dtype), feature_XD], dim=-1))
        return fused_XD, fused_XD

    def finish(self, residual_XD: Tensor, attended_XD: Tensor) -> Tensor:
        hidden_XD = residual_XD + self.self_attn.o_proj(attended_XD)
        return hidden_XD + self.layer.mlp(self.layer.post_attention_layernorm(hidden_XD))

    def feed(self, hidden_XD: Tensor) -> Tensor:
        return hidden_XD

    # Training

    def denominators(self, batch: Batch, progress: float) -> dict[str, float]:
        """Training pairs per depth."""
        return pair_counts(batch, self.config.steps, self.config.deep_share)

    def loss(self, batch: Batch, target_out: TargetOut, progress: float) -> Terms:
        """Terms `depth_d`: the objective on predicted features and their logits, summed over the pairs of depth d."""
        assert target_out.last_hidden_BTD is not None and target_out.head is not None and target_out.embed is not None
        config = self.config
        rows = Rows.of(batch, config.steps, config.deep_share)
        scorer = Scorer(
            rows, batch, target_out, self.d2t_W, self.t2d_V, self.objective, config.oov, config.depth_weight
        )
        feature_BTD = target_out.last_hidden_BTD.to(self.fc.weight.dtype)
        if self.training and config.noise:
            feature_BTD = feature_BTD + self.draw_noise(batch).to(feature_BTD.dtype)
        outputs = autoregression.unroll(
            self, target_out.embed, feature_BTD, batch, rows, config.steps, True, config.checkpointing
        )
        for depth, feature_RD in enumerate(outputs, 1):
            scorer.add(depth, target_out.logits(feature_RD, self.d2t_W), feature_RD)
        return scorer.terms()

    forward = loss

    def draw_noise(self, batch: Batch) -> Tensor:
        """[B, T, D] keyed noise, uniform in +-noise / 2 * 512 / length of the document."""
        return feature_noise(batch, self.facts.width, self.config.noise)

    # Drafting

    def init(self, prefill: Prefill) -> autoregression.State:
        return autoregression.init(self, prefill, self.facts.width, self.fc.weight.dtype)

    def start(self, state: autoregression.State, commit: Commit) -> tuple[autoregression.State, Level]:
        """Take in the committed rows; the level of depth 1."""
        assert commit.last_hidden_BTD is not None
        feature_BTD = commit.last_hidden_BTD.to(self.fc.weight.dtype)
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
        return make_level(self.target_head(hidden_BND, self.d2t_W), valid_BN, self.d2t_W, self.facts.tokens)
