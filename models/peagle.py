"""P-EAGLE: an EAGLE-3 stack that drafts K tokens in one pass.

"P-EAGLE: Parallel-Drafting EAGLE with Scalable Training" (arXiv:2602.01469). The first layer is EAGLE-3's (embedding
of the next token beside the fused taps), the others are plain decoder layers. Behind the newest row stand K - 1 slots
that know neither token nor feature: the embedding of a mask token and one learned vector `mask_hidden` in place of the
taps, before `fc`, shared by all depths (section 3). Training places such slots behind every supervised row and drops
some of them, whole chains at a time (conditional drop-token: `slots.cod`, seeds from supervised rows alone). The mask
rule is that of models/slots.py: rows up to the anchor with it, and the anchor's own slots up to the depth.

The paper trains the embedding table for the sake of the mask's row. Here that row, `mask_embed`, is trained by itself,
and the table stays the target's. Parameters bear the names of serving engines' checkpoints (`layers.{i}.*`, `fc`,
`norm`, `lm_head`, `mask_hidden`).
Test: pytest tests/test_slots.py tests/test_methods.py tests/test_parity.py
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from ..losses.distill import ByHead, Oov
from ..losses.objective import parse_objective
from .cache import Cache
from .drafter import Batch, Commit, Level, Prefill, TargetFacts, TargetOut, Terms
from .eagle3 import default_taps
from .layers import (
    MLP,
    Attention,
    Linear,
    RMSNorm,
    Rotary,
    TargetEmbed,
    attend,
    check_loss_settings,
    head_rows,
    make_level,
    newest,
    norm_scale,
    refuse_unbound,
    register_vocabulary,
)
from .mask_id import choose_mask_id, register_mask_id
from .slots import MaskRule, Slots, attend_slots, cod, denominator, make_mask, score, weigh

RULE = MaskRule("inclusive", "causal")


@dataclass(frozen=True)
class PEagleConfig:
    """Settings of a P-EAGLE head."""

    depths: int = 8
    """Tokens drafted in one pass, K (num_depths of the speculators library)."""
    layers: int = 4
    """Decoder layers (P-EAGLE, section 4)."""
    taps: tuple[int, ...] | None = None
    """Residual streams h[k] read from the target, ascending; null = 2, L // 2, L - 3 (EAGLE-3's training code)."""
    ratio: float = 0.7
    """Of the slots of one depth, this share is kept at the next (PARD, section 3.2); 1 keeps all."""
    least: float = 0.2
    """Share of the supervised rows that is kept at every depth, at least (PARD, section 3.2)."""
    max_anchors: int | None = None
    """Rows per document that go beyond depth 1, at most; null = all that drop-token keeps."""
    mask_id: int | None = None
    """Token id that stands for the mask; null = one that no text holds (models/mask_id.py)."""
    objective: str = "kl"
    """Loss per slot, an expression over the table of losses (the speculators library: full soft targets)."""
    depth_weight: float = 1.0
    """Depth d weighs depth_weight ** (d - 1) (P-EAGLE: all alike)."""
    oov: Oov = "renormalise"
    """Teacher mass outside the draft vocabulary: renormalise, mask (rows whose argmax is outside) or tail."""
    heads: int | None = None
    """Query heads; null = the target's."""
    kv_heads: int | None = None
    """Key/value heads; null = the target's."""
    intermediate: int | None = None
    """MLP width; null = the target's."""
    train_head: bool = True
    """False: the head keeps the target's rows, which saves time per step."""
    fc_norm: bool = False
    """One norm per tap before `fc` (EAGLE-3.1)."""
    norm_before_fc: bool = False
    """One norm over the joined taps before `fc` (gpt-oss heads)."""
    norm_before_residual: bool = False
    """The residual of the first layer is the normed feature (heads of the speculators library)."""

    def __post_init__(self) -> None:
        check_loss_settings(self.objective, self.oov, self.depth_weight, self.depths, "peagle")
        if self.depths < 2 or self.layers < 1:
            raise ValueError(f"peagle: needs depths >= 2 and layers >= 1, got {self.depths} and {self.layers}")
        if self.taps is not None and (list(self.taps) != sorted(set(self.taps)) or not self.taps):
            raise ValueError(f"peagle: taps must be distinct and ascending, got {self.taps}")
        if not 0 < self.ratio <= 1 or not 0 <= self.least <= 1:
            raise ValueError(f"peagle: needs 0 < ratio <= 1 and 0 <= least <= 1, got {self.ratio} and {self.least}")
        if self.max_anchors is not None and self.max_anchors < 1:
            raise ValueError(f"peagle: max_anchors must be positive or null, got {self.max_anchors}")
        if self.fc_norm and self.norm_before_fc:
            raise ValueError("peagle: fc_norm and norm_before_fc exclude each other, set one")


class Layer(nn.Module):
    """A decoder layer. The first one's attention reads (embedding, feature), both normed, beside the feature as
    residual; the others read their input alone."""

    def __init__(self, facts: TargetFacts, config: PEagleConfig, first: bool) -> None:
        super().__init__()
        width, eps = facts.width, facts.norm_eps
        self.first, self.normed_residual = first, config.norm_before_residual
        self.input_layernorm = RMSNorm(width, eps)
        if first:
            self.hidden_norm = RMSNorm(width, eps)
        heads, kv_heads = config.heads or facts.heads, config.kv_heads or facts.kv_heads
        self.self_attn = Attention((1 + first) * width, width, heads, kv_heads, facts.head_dim)
        self.post_attention_layernorm = RMSNorm(width, eps)
        self.mlp = MLP(width, config.intermediate or facts.intermediate, facts.activation)

    def mix(self, embed_XD: Tensor, hidden_XD: Tensor) -> tuple[Tensor, Tensor]:
        """The attention's input, and the residual beside it."""
        if not self.first:
            return self.input_layernorm(hidden_XD), hidden_XD
        normed_XD = self.hidden_norm(hidden_XD)
        joined_XC = torch.cat([self.input_layernorm(embed_XD), normed_XD], dim=-1)
        return joined_XC, normed_XD if self.normed_residual else hidden_XD

    def finish(self, residual_XD: Tensor, attended_XD: Tensor) -> Tensor:
        hidden_XD = residual_XD + self.self_attn.o_proj(attended_XD)
        return hidden_XD + self.mlp(self.post_attention_layernorm(hidden_XD))


@dataclass
class State:
    """What a draft keeps between rounds: keys and values of the committed rows, and the newest one's position."""

    cache: Cache
    position_B: Tensor


class PEagle(nn.Module):
    """A P-EAGLE head; see `models/drafter.py` for the contract."""

    method = "peagle"
    Config = PEagleConfig
    draft_needs = frozenset({"ids", "taps"})
    on_device = True
    loss_needs = frozenset({"ids", "taps", "teacher"})
    d2t_W: Tensor | None
    t2d_V: Tensor | None
    mask_id: Tensor

    def __init__(self, config: PEagleConfig, facts: TargetFacts, draft_ids: Tensor | None = None) -> None:
        super().__init__()
        self.config, self.facts = config, facts
        self.taps = config.taps or default_taps(facts.layers)
        if self.taps[0] < 0 or self.taps[-1] > facts.layers:
            raise ValueError(f"peagle: taps {self.taps} of {facts.name} must lie in 0..{facts.layers}")
        self.objective = parse_objective(config.objective)
        self.parallel = self.max_depth = config.depths
        width, taps = facts.width, len(self.taps)
        self.vocab = register_vocabulary(self, facts, draft_ids)
        register_mask_id(self, config.mask_id, facts.vocab, "peagle")
        if config.fc_norm:
            self.fc_norm = nn.ModuleList([RMSNorm(width, facts.norm_eps) for _ in self.taps])
        if config.norm_before_fc:
            self.input_norm = RMSNorm(taps * width, facts.norm_eps)
        self.fc = Linear(taps * width, width, bias=False)
        self.mask_hidden = nn.Parameter(0.02 * torch.randn(1, 1, taps * width))
        self.mask_embed = nn.Parameter(0.02 * torch.randn(width))
        self.layers = nn.ModuleList([Layer(facts, config, i == 0) for i in range(config.layers)])
        self.norm = RMSNorm(width, facts.norm_eps)
        self.lm_head = Linear(width, self.vocab, bias=False).requires_grad_(config.train_head)
        self.rotary = Rotary(facts)
        self.target_embed: TargetEmbed = refuse_unbound

    def bind(self, target: Any) -> None:
        """Take the target's embedding, which drafting reads."""
        self.target_embed = target.embed

    @torch.no_grad()
    def init_from_target(self, target: Any) -> None:
        """Start the head from the target's rows, the norm from its final norm and the mask's embedding from the mean
        of its table; choose the mask's id; then `bind`."""
        self.mask_id.fill_(choose_mask_id(target, self.config.mask_id, self.method))
        self.lm_head.weight.copy_(head_rows(target, self.d2t_W))
        self.norm.weight.copy_(norm_scale(target))
        self.mask_embed.copy_(target.embed(torch.arange(self.facts.tokens, device=target.device)).float().mean(0))
        self.bind(target)

    # Inputs: rows of the context, then slots

    def fuse(self, joined_BTC: Tensor) -> Tensor:
        """[B, T, P * D] -> features [B, T, D]."""
        if self.config.fc_norm:
            parts = joined_BTC.unflatten(-1, (len(self.taps), -1)).unbind(2)
            joined_BTC = torch.cat([norm(x) for norm, x in zip(self.fc_norm, parts, strict=True)], dim=-1)
        return self.fc(self.input_norm(joined_BTC) if self.config.norm_before_fc else joined_BTC)

    def inputs(self, taps_BTPD: Tensor, next_BT: Tensor, embed: TargetEmbed, slots: int) -> tuple[Tensor, Tensor]:
        """Embeddings and features, both [B, T + Q, D]: of the rows (with the token after each), then of Q slots."""
        b, dtype = len(next_BT), self.fc.weight.dtype
        known_BTD = embed(next_BT).to(dtype)
        known_BTD = torch.where((next_BT == self.mask_id)[..., None], self.mask_embed.to(dtype), known_BTD)
        features = [self.fuse(taps_BTPD.flatten(2).to(dtype)), self.fuse(self.mask_hidden).expand(b, slots, -1)]
        return torch.cat([known_BTD, self.mask_embed.to(dtype).expand(b, slots, -1)], dim=1), torch.cat(features, dim=1)

    # Training

    def layout(self, batch: Batch) -> tuple[Slots, Slots]:
        """The slots, and [context | slots] as they are scored. Evaluation keeps every slot."""
        config = self.config
        ratio, most = (config.ratio, config.max_anchors) if self.training else (1.0, None)
        slots = cod(batch, config.depths, ratio, config.least, ahead=1, max_anchors=most)
        joined = slots.with_context(batch, ahead=1, shift=2)
        return slots, weigh(joined, "geometric", ratio=config.depth_weight)

    def denominators(self, batch: Batch, progress: float) -> dict[str, float]:
        """The sum of the slots' weights, the rows' own predictions among them."""
        return {"slots": denominator(self.layout(batch)[1], "weights")}

    def loss(self, batch: Batch, target_out: TargetOut, progress: float) -> Terms:
        """The term `slots`: the objective, summed over supervised rows and the slots kept behind them."""
        assert target_out.taps_BTPD is not None and target_out.embed is not None
        config, t = self.config, batch.ids_BT.shape[1]
        slots, joined = self.layout(batch)
        mask = make_mask(slots, batch, RULE, context_rows=True)
        angles = self.rotary(joined.position_BQ)
        next_BT = batch.ids_BT.roll(-1, dims=1)
        embed_BXD, hidden_BXD = self.inputs(target_out.taps_BTPD, next_BT, target_out.embed, slots.anchor_BQ.shape[1])
        for layer in self.layers:
            assert isinstance(layer, Layer)
            x_BXC, residual_BXD = layer.mix(embed_BXD, hidden_BXD)
            q_BHXd = layer.self_attn.queries(x_BXC, angles).transpose(1, 2)
            k_BGXd, v_BGXd = (x.transpose(1, 2) for x in layer.self_attn.keys_values(x_BXC, angles))
            context, own = (k_BGXd[:, :, :t], v_BGXd[:, :, :t]), (k_BGXd[:, :, t:], v_BGXd[:, :, t:])
            attended_BHXd = attend_slots(q_BHXd, context, own, mask)
            hidden_BXD = layer.finish(residual_BXD, attended_BHXd.transpose(1, 2).flatten(2))
        logits = ByHead.of(self.norm(hidden_BXD.flatten(0, 1)[joined.flat_R]), self.lm_head.weight)
        return score(
            logits, joined, batch, target_out, self.d2t_W, self.t2d_V, self.objective, config.oov,
            depths=config.depths,
        )  # fmt: skip

    forward = loss

    # Drafting

    def init(self, prefill: Prefill) -> State:
        """An empty state, with room for the slots of one draft; keys and values in the drafter's own precision."""
        layer = self.layers[0]
        assert isinstance(layer, Layer)
        attention, slots = layer.self_attn, prefill.slots + self.parallel - 1
        cache = Cache(
            prefill.rows, slots, len(self.layers), attention.kv_heads, attention.head_dim, self.fc.weight.dtype,
            prefill.device,
        )  # fmt: skip
        return State(cache, torch.zeros(prefill.rows, dtype=torch.int64, device=prefill.device))

    def start(self, state: State, commit: Commit) -> tuple[State, Level]:
        """Take in the committed rows and run K - 1 slots behind the newest; the levels of all K depths."""
        assert commit.taps_BTPD is not None
        b, t = commit.ids_BT.shape
        extra, device = self.parallel - 1, commit.ids_BT.device
        rows_B = torch.arange(b, device=device)
        last_B = (commit.counts_B - 1).clamp(min=0)
        newest_B = newest(commit, commit.positions_BT[..., None])[:, 0]
        state.position_B = torch.where(commit.counts_B > 0, newest_B, state.position_B)
        steps_Q = torch.arange(extra, device=device)
        positions_BX = torch.cat([commit.positions_BT, state.position_B[:, None] + 1 + steps_Q], dim=1)
        index_X = torch.arange(t + extra, device=device)
        see_BXX = (index_X <= index_X[:, None]).expand(b, -1, -1).clone()
        see_BXX[:, t:, :t] = (index_X[:t] < commit.counts_B[:, None])[:, None]
        picked_BK = torch.cat([last_B[:, None], (t + steps_Q).expand(b, -1)], dim=1)

        state.cache.begin(positions_BX)
        see_BXS, angles = state.cache.mask(see_BXX)[:, 0], self.rotary(positions_BX)
        embed_BXD, hidden_BXD = self.inputs(commit.taps_BTPD, commit.following(), self.target_embed, extra)
        for i, layer in enumerate(self.layers):
            assert isinstance(layer, Layer)
            x_BXC, residual_BXD = layer.mix(embed_BXD, hidden_BXD)
            k_BXGd, v_BXGd = layer.self_attn.keys_values(x_BXC, angles)
            k_BGSd, v_BGSd = state.cache.update(k_BXGd.transpose(1, 2), v_BXGd.transpose(1, 2), i)
            if i == len(self.layers) - 1:  # from here on, nobody reads the other rows
                x_BXC, residual_BXD, see_BXS = (x[rows_B[:, None], picked_BK] for x in (x_BXC, residual_BXD, see_BXS))
                angles = angles[0][rows_B[:, None], picked_BK], angles[1][rows_B[:, None], picked_BK]
            q_BHXd = layer.self_attn.queries(x_BXC, angles).transpose(1, 2)
            attended_BXD = attend(q_BHXd, k_BGSd, v_BGSd, see_BXS).transpose(1, 2).flatten(2)
            hidden_BXD = layer.finish(residual_BXD, attended_BXD)
        state.cache.commit(commit.counts_B)
        valid_BK = (commit.counts_B > 0)[:, None].expand(-1, self.parallel)
        return state, make_level(self.lm_head(self.norm(hidden_BXD)), valid_BK, self.d2t_W, self.facts.tokens)

    def extend(self, state: State, tokens_BN: Tensor, parents_BN: Tensor) -> tuple[State, Level]:
        """Never asked for: every depth comes from `start`."""
        raise ValueError(f"peagle gives the levels of all {self.parallel} depths at once: draft no deeper")

    def reset(self, state: State, rows: Tensor) -> State:
        state.cache.reset(rows)
        state.position_B[rows] = 0
        return state
