"""Hydra: sequential heads, each of which also reads the tokens drafted before it; Hydra++ adds a prefix layer.

Ankner et al., "Hydra: Sequentially-Dependent Draft Heads for Medusa Decoding" (arXiv:2402.05109). Head i (0-based)
reads the target's normed state of token t beside the embeddings of tokens t + 1 .. t + 1 + i (section 3): a first block
R z + SiLU(W z + b) over the joined vector z with a learned linear residual R, further blocks x + SiLU(W x + b), and a
vocabulary projection with bias, started from the target's head. Hydra++ (section 4): `layers: 4`, `prefix: true` (a
decoder layer over the whole prefix makes the state), `dropout: 0.2`, trained on the target's distribution alone.

R starts as the identity on the state, W as zero, and the prefix layer adds nothing at first: training starts from the
target's own next-token head, as Medusa's does. No serving engine loads Hydra; exports have our own documented form.
Test: pytest tests/test_methods.py tests/test_parity.py
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
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
    head_rows,
    keyed_uniform,
    make_level,
    newest,
    refuse_unbound,
    register_vocabulary,
)
from .supervision import Rows, Scorer, pair_counts


@dataclass(frozen=True)
class HydraConfig:
    """Settings of Hydra heads."""

    heads: int = 4
    """Heads, that is draft depths (Hydra, section 5)."""
    layers: int = 1
    """Blocks per head (Hydra++: 4)."""
    prefix: bool = False
    """Make the state with a decoder layer over the whole prefix (Hydra++)."""
    dropout: float = 0.0
    """Dropout in the blocks (Hydra++: 0.2)."""
    objective: str = "kl"
    """Loss per head (Hydra++: the target's distribution alone)."""
    depth_weight: float = 0.8
    """Head d weighs depth_weight ** (d - 1) (as Medusa)."""
    oov: Oov = "renormalise"
    """Teacher mass outside the draft vocabulary: renormalise, mask (rows whose argmax is outside) or tail."""

    def __post_init__(self) -> None:
        check_loss_settings(self.objective, self.oov, self.depth_weight, self.heads, "hydra")
        if self.layers < 1:
            raise ValueError(f"hydra: layers must be at least 1, got {self.layers}")
        if not 0 <= self.dropout < 1:
            raise ValueError(f"hydra: dropout must lie in [0, 1), got {self.dropout}")


class Prefix(nn.Module):
    """A Llama decoder layer over the target's states: a cell of models/autoregression.py that reads no embeddings and
    takes a single step."""

    def __init__(self, facts: TargetFacts) -> None:
        super().__init__()
        self.input_layernorm = RMSNorm(facts.width, facts.norm_eps)
        self.self_attn = Attention(facts.width, facts.width, facts.heads, facts.kv_heads, facts.head_dim)
        self.post_attention_layernorm = RMSNorm(facts.width, facts.norm_eps)
        self.mlp = MLP(facts.width, facts.intermediate, facts.activation)
        nn.init.zeros_(self.self_attn.o_proj.weight)
        nn.init.zeros_(self.mlp.down_proj.weight)
        self.rotary = Rotary(facts)

    def mix(self, embed_XD: Tensor, feature_XD: Tensor) -> tuple[Tensor, Tensor]:
        return self.input_layernorm(feature_XD), feature_XD

    def finish(self, residual_XD: Tensor, attended_XD: Tensor) -> Tensor:
        hidden_XD = residual_XD + self.self_attn.o_proj(attended_XD)
        return hidden_XD + self.mlp(self.post_attention_layernorm(hidden_XD))

    def feed(self, hidden_XD: Tensor) -> Tensor:
        return hidden_XD


class Head(nn.Module):
    """Blocks of head i over the state and i + 1 embeddings: `mixer` (W), `residual` (R), `layers` (further blocks)."""

    def __init__(self, width: int, tokens: int, layers: int) -> None:
        super().__init__()
        self.mixer = Linear((tokens + 1) * width, width)
        self.residual = Linear((tokens + 1) * width, width)
        self.layers = nn.ModuleList([Linear(width, width) for _ in range(layers - 1)])
        for layer in (self.mixer, *self.layers):
            nn.init.zeros_(layer.weight)
        with torch.no_grad():
            self.residual.weight.copy_(torch.eye(width, (tokens + 1) * width))
            self.residual.bias.zero_()

    def forward(self, joined_XC: Tensor, keep_LXD: Tensor | None = None) -> Tensor:
        """`keep_LXD`: dropout factors per block, None = no dropout."""
        x_XD, branch_XD = self.residual(joined_XC), F.silu(self.mixer(joined_XC))
        x_XD = x_XD + (branch_XD if keep_LXD is None else branch_XD * keep_LXD[0])
        for i, layer in enumerate(self.layers, 1):
            branch_XD = F.silu(layer(x_XD))
            x_XD = x_XD + (branch_XD if keep_LXD is None else branch_XD * keep_LXD[i])
        return x_XD


@dataclass
class HydraState:
    """A draft in progress. Index 0 of M is the anchor, j + 1 the j-th node; `path_BMK` its tokens from the anchor on."""

    prefix: autoregression.State | None
    state_BD: Tensor
    path_BMK: Tensor
    depth: int  # of the newest nodes: each call of `extend` is one level below the last


class Hydra(nn.Module):
    """Hydra heads; see `models/drafter.py` for the contract."""

    method = "hydra"
    Config = HydraConfig
    draft_needs = frozenset({"ids", "last_hidden"})
    loss_needs = frozenset({"ids", "last_hidden", "teacher"})
    on_device = True
    taps: tuple[int, ...] = ()
    parallel = 1
    d2t_W: Tensor | None
    t2d_V: Tensor | None

    def __init__(self, config: HydraConfig, facts: TargetFacts, draft_ids: Tensor | None = None) -> None:
        super().__init__()
        self.config, self.facts = config, facts
        self.max_depth: int | None = config.heads
        self.objective = parse_objective(config.objective)
        self.vocab = register_vocabulary(self, facts, draft_ids)
        self.prefix = Prefix(facts) if config.prefix else None
        self.heads = nn.ModuleList([Head(facts.width, i + 1, config.layers) for i in range(config.heads)])
        lm_heads = [Linear(facts.width, self.vocab) for _ in range(config.heads)]
        for head in lm_heads:
            nn.init.zeros_(head.bias)
        self.lm_heads = nn.ModuleList(lm_heads)
        self.target_embed: TargetEmbed = refuse_unbound

    def bind(self, target: Any) -> None:
        """Take the target's embedding, which drafting reads."""
        self.target_embed = target.embed

    @torch.no_grad()
    def init_from_target(self, target: Any) -> None:
        """Start the projections from the target's rows; then `bind`."""
        for name, parameter in self.lm_heads.named_parameters():
            if name.endswith("weight"):
                parameter.copy_(head_rows(target, self.d2t_W))
        self.bind(target)

    @property
    def dtype(self) -> torch.dtype:
        return next(self.parameters()).dtype

    def read(self, head: int, state_XD: Tensor, embed_XKD: Tensor, keep_LXD: Tensor | None = None) -> Tensor:
        """What one projection (0-based) reads [X, D], of the state and the first head + 1 embeddings."""
        joined_XC = torch.cat([state_XD, embed_XKD[:, : head + 1].to(state_XD.dtype).flatten(1)], dim=-1)
        return self.heads[head](joined_XC, keep_LXD)

    # Training

    def denominators(self, batch: Batch, progress: float) -> dict[str, float]:
        """Training pairs per head."""
        return pair_counts(batch, self.config.heads)

    def loss(self, batch: Batch, target_out: TargetOut, progress: float) -> Terms:
        """Terms `depth_d`: the objective of head d - 1 after the data's tokens, summed over the pairs of depth d."""
        assert target_out.last_hidden_BTD is not None and target_out.embed is not None
        config = self.config
        rows = Rows.of(batch, config.heads)
        scorer = Scorer(
            rows, batch, target_out, self.d2t_W, self.t2d_V, self.objective, config.oov, config.depth_weight
        )
        hidden_BTD = target_out.last_hidden_BTD.to(self.dtype)
        if self.prefix is None:
            state_RD = rows.take(hidden_BTD)
        else:
            (state_RD,) = autoregression.unroll(self.prefix, target_out.embed, hidden_BTD, batch, rows, steps=1)
        tokens_RK = torch.stack([rows.take(batch.ids_BT, 1 + j) for j in range(config.heads)], dim=1)
        embed_RKD = target_out.embed(tokens_RK)
        for depth, pairs_R in enumerate(rows.pairs, 1):
            keep_LRD = self.draw_dropout(batch, rows, depth, pairs_R) if self.training and config.dropout else None
            hidden_RD = self.read(depth - 1, state_RD[pairs_R], embed_RKD[pairs_R], keep_LRD)
            own = self.lm_heads[depth - 1]
            assert isinstance(own, nn.Linear)
            scorer.add(depth, ByHead.of(hidden_RD, own.weight, own.bias))
        return scorer.terms()

    forward = loss

    def draw_dropout(self, batch: Batch, rows: Rows, depth: int, pairs_R: Tensor) -> Tensor:
        """[L, R, D] keyed dropout factors of one head: 0 or 1 / (1 - dropout)."""
        p, streams = self.config.dropout, range(1 + (depth - 1) * self.config.layers, 1 + depth * self.config.layers)
        drawn = [rows.take(keyed_uniform(batch, self.facts.width, stream))[pairs_R] for stream in streams]
        return (torch.stack(drawn) >= p).to(self.dtype) / (1 - p)

    # Drafting

    def init(self, prefill: Prefill) -> HydraState:
        prefix = None
        if self.prefix is not None:
            prefix = autoregression.init(self.prefix, prefill, self.facts.width, self.dtype)
        zeros_B1 = torch.zeros(prefill.rows, 1, dtype=torch.int64, device=prefill.device)
        path_B1K = zeros_B1[..., None].repeat(1, 1, self.config.heads)
        return HydraState(prefix, zeros_B1.to(self.dtype).expand(-1, self.facts.width), path_B1K, 0)

    def start(self, state: HydraState, commit: Commit) -> tuple[HydraState, Level]:
        """Take in the committed rows; the level of depth 1."""
        assert commit.last_hidden_BTD is not None
        hidden_BTD = commit.last_hidden_BTD.to(self.dtype)
        if self.prefix is None:
            state_BD = newest(commit, hidden_BTD)
        else:
            assert state.prefix is not None
            state_BD = autoregression.start(self.prefix, state.prefix, self.target_embed, commit, hidden_BTD)
        path_B1K = F.pad(commit.anchor_B[:, None, None], (0, self.config.heads - 1))
        logits_BW = self.lm_heads[0](self.read(0, state_BD, self.target_embed(path_B1K[:, 0])))
        level = make_level(logits_BW[:, None], (commit.counts_B > 0)[:, None], self.d2t_W, self.facts.tokens)
        return HydraState(state.prefix, state_BD, path_B1K, 0), level

    def extend(self, state: HydraState, tokens_BN: Tensor, parents_BN: Tensor) -> tuple[HydraState, Level]:
        """Add nodes (target ids) below their parents; the levels below them (none after the last head)."""
        b, n = tokens_BN.shape
        rows_B1 = torch.arange(b, device=tokens_BN.device)[:, None]
        depth = state.depth + 1
        at_K = torch.arange(self.config.heads, device=tokens_BN.device) == depth
        path_BNK = torch.where(at_K, tokens_BN[..., None], state.path_BMK[rows_B1, parents_BN])
        more = depth < self.config.heads
        if more:
            state_XD = state.state_BD[:, None].expand(-1, n, -1).flatten(0, 1)
            hidden_XD = self.read(depth, state_XD, self.target_embed(path_BNK).flatten(0, 1))
            logits_BNW = self.lm_heads[depth](hidden_XD).view(b, n, -1)
        else:
            logits_BNW = torch.zeros(b, n, self.vocab, dtype=self.dtype, device=tokens_BN.device)
        valid_BN = torch.full_like(tokens_BN, more, dtype=torch.bool)
        level = make_level(logits_BNW, valid_BN, self.d2t_W, self.facts.tokens)
        return HydraState(state.prefix, state.state_BD, torch.cat([state.path_BMK, path_BNK], dim=1), depth), level

    def reset(self, state: HydraState, rows: Tensor) -> HydraState:
        if state.prefix is not None:
            state.prefix.cache.reset(rows)
        return state
