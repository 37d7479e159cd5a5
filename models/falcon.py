"""Falcon: semi-autoregressive drafting, k tokens per pass of an EAGLE-like drafter.

Gao et al., "Falcon: Faster and Parallel Inference of Large Language Models through Enhanced Semi-Autoregressive
Drafting and Custom-Designed Decoding Tree" (arXiv:2412.12639). Row i joins the target's feature of token i with the
embedding of token i + 1, as in EAGLE; two LSTM layers read the rows in order; one attention and an MLP follow, under a
*relaxed causal* mask: the rows of a block of k see each other and everything before. Row i then predicts the feature k
rows on, so that the last k rows, t-k+1 .. t, give the features of t+1 .. t+k at once, that is depths 1 .. k.

Deeper drafts go on semi-autoregressively: the k predicted features, beside the tokens drafted from them, are the next
block. Drafting asks for one node's level at a time, but only every k-th depth costs a pass of attention and MLP; the
levels between are read off. A draft needs k rows of text.

Training. For a state row t its block is a group of k slots (`models/slots.py`: anchor t-k+1, context before it, all of
the block visible), at all t: no fixed cut into blocks, which drafting would not keep either. *Coupled sequential
glancing*: a first pass without gradients drafts; of each block floor(share * misses + u) slots, u uniform,
in one run at a random place, then show the answer (feature and token), and lose their loss in the
second pass. `share` falls linearly, glance * (1 - progress). The paper glances over whole sequences, by epochs, with
0.4; its code has 0.35 * (1 - progress) + 0.1; how the paper treats the loss of shown slots is not said. The dropout of
0.1 between the LSTMs is left out. No serving engine loads Falcon; exports have our own documented form.

Test: pytest tests/test_slot_methods.py tests/test_parity.py
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from ..losses.distill import ON_FEATURES, Oov
from ..losses.objective import parse_objective
from .cache import Cache
from .drafter import Batch, Commit, Level, Prefill, TargetFacts, TargetOut, Terms
from .layers import (
    MLP,
    Attention,
    Linear,
    RMSNorm,
    Rotary,
    TargetEmbed,
    TargetHead,
    attend,
    check_loss_settings,
    feature_noise,
    make_level,
    newest,
    refuse_unbound,
    register_vocabulary,
)
from .slots import (
    MaskRule,
    Slots,
    anchored,
    at,
    denominator,
    dense_mask,
    document_starts,
    glance,
    legal_anchors,
    random_anchors,
    score,
    weigh,
)


@dataclass(frozen=True)
class FalconConfig:
    """Settings of a Falcon drafter."""

    block: int = 2
    """k, tokens per pass (Falcon, experiments: 2 is fastest)."""
    rounds: int = 1
    """Passes trained on the drafter's own features, each detached from the one before (Falcon: 1; HASS's idea)."""
    anchors: int | None = None
    """State rows per document that are trained, drawn anew in every epoch; null = all."""
    glance: float = 0.4
    """Share of the missed slots that show the answer in the second pass, at the start; 0 = one pass (Falcon: 0.4)."""
    objective: str = "feature_smooth_l1 + 0.09*kl + 0.01*ce"
    """Loss per slot (Falcon: features plus 0.1 times 0.9 soft and 0.1 hard)."""
    depth_weight: float = 1.0
    """Depth d weighs depth_weight ** (d - 1) (Falcon: all alike)."""
    oov: Oov = "renormalise"
    """Teacher mass outside the draft vocabulary: renormalise, mask (rows whose argmax is outside) or tail."""
    noise: float = 0.2
    """Uniform noise of this width on the features of a document of 512 tokens; longer ones get less (Falcon's code)."""
    heads: int | None = None
    """Query heads; null = the target's."""
    kv_heads: int | None = None
    """Key/value heads; null = the target's."""
    intermediate: int | None = None
    """MLP width; null = the target's."""

    def __post_init__(self) -> None:
        check_loss_settings(self.objective, self.oov, self.depth_weight, self.block, "falcon", features=True)
        if self.rounds < 1 or (self.anchors is not None and self.anchors < 1):
            raise ValueError(f"falcon: rounds and anchors must be positive, got {self.rounds} and {self.anchors}")
        if self.noise < 0 or not 0 <= self.glance <= 1:
            raise ValueError(
                f"falcon: noise must not be negative and glance lie in [0, 1], got {self.noise}, {self.glance}"
            )
        if self.glance and (self.block == 1 or self.rounds > 1):
            raise ValueError(
                f"falcon: glancing needs a block of two or more and one round, got block={self.block}, "
                f"rounds={self.rounds}; set glance to 0"
            )


class LSTM(nn.Module):
    """One LSTM layer whose cell state is read at every step (nn.LSTM gives only the last one's), and kept in fp32."""

    def __init__(self, width_in: int, width: int) -> None:
        super().__init__()
        self.input = Linear(width_in, 4 * width)
        self.recurrent = Linear(width, 4 * width, bias=False)
        with torch.no_grad():
            self.input.bias[width : 2 * width] = 1.0  # it remembers at first

    def forward(self, x_XTC: Tensor, memory_X2D: Tensor, real_XT: Tensor | None) -> Tensor:
        """[X, T, 2, D] the memory (output, cell) after each step; steps that are not real leave it as it was."""
        h_XD, c_XD = memory_X2D.unbind(1)
        steps = []
        for t, gates_XE in enumerate(self.input(x_XTC).unbind(1)):
            i_XD, f_XD, g_XD, o_XD = (gates_XE + self.recurrent(h_XD.to(gates_XE.dtype))).chunk(4, -1)
            new_c_XD = f_XD.sigmoid() * c_XD + i_XD.sigmoid() * g_XD.tanh()
            new_h_XD = o_XD.sigmoid() * new_c_XD.tanh()
            if real_XT is not None:
                real_X1 = real_XT[:, t, None]
                new_h_XD, new_c_XD = torch.where(real_X1, new_h_XD, h_XD), torch.where(real_X1, new_c_XD, c_XD)
            h_XD, c_XD = new_h_XD, new_c_XD
            steps.append(torch.stack([h_XD, c_XD], 1))
        return torch.stack(steps, 1)


@dataclass
class Text:
    """The committed rows of a batch, read once: inputs, the LSTMs' memory after each row, their output."""

    x_BTC: Tensor
    memory_BT22D: Tensor
    z_BTD: Tensor


@dataclass
class FalconState:
    """A draft in progress. Index 0 of M is the anchor, j + 1 the j-th node given to `extend`."""

    cache: Cache
    position_B: Tensor  # of the newest committed row
    recent_BkD: Tensor  # LSTM outputs of the last k committed rows
    memory_BM22D: Tensor  # LSTM memory after each node's row; of the anchor: after the newest committed row
    z_BMD: Tensor  # LSTM output of each node's row
    depth_BM: Tensor
    path_BMk: Tensor  # the last k nodes on the way to each
    features_BMkD: Tensor  # what the last pass on the way to each node predicted
    see_BNN: Tensor  # node i sees node j (itself and its ancestors)


class Falcon(nn.Module):
    """A Falcon drafter; see `models/drafter.py` for the contract."""

    method = "falcon"
    Config = FalconConfig
    draft_needs = frozenset({"ids", "last_hidden"})
    loss_needs = frozenset({"ids", "last_hidden", "teacher"})
    taps: tuple[int, ...] = ()
    parallel = 1
    max_depth: int | None = None
    d2t_W: Tensor | None
    t2d_V: Tensor | None

    def __init__(self, config: FalconConfig, facts: TargetFacts, draft_ids: Tensor | None = None) -> None:
        super().__init__()
        self.config, self.facts = config, facts
        self.objective = parse_objective(config.objective, features=True)
        self.vocab = register_vocabulary(self, facts, draft_ids)
        width = facts.width
        self.lstm = nn.ModuleList([LSTM(2 * width, width), LSTM(width, width)])
        heads, kv_heads = config.heads or facts.heads, config.kv_heads or facts.kv_heads
        self.self_attn = Attention(width, width, heads, kv_heads, facts.head_dim)
        self.post_attention_layernorm = RMSNorm(width, facts.norm_eps)
        self.mlp = MLP(width, config.intermediate or facts.intermediate, facts.activation)
        self.rotary = Rotary(facts)
        self.target_embed: TargetEmbed = refuse_unbound
        self.target_head: TargetHead = refuse_unbound

    def bind(self, target: Any) -> None:
        """Take the target's embedding and head, which drafting reads."""
        self.target_embed, self.target_head = target.embed, target.head

    def init_from_target(self, target: Any) -> None:
        """Nothing is copied; `bind`."""
        self.bind(target)

    @property
    def dtype(self) -> torch.dtype:
        return self.self_attn.q_proj.weight.dtype

    # The parts that training and drafting share

    def inputs(self, embed: TargetEmbed, feature_XD: Tensor, next_X: Tensor) -> Tensor:
        """[..., 2 D] rows: a feature beside the embedding of the token after it."""
        return torch.cat([feature_XD.to(self.dtype), embed(next_X).to(self.dtype)], dim=-1)

    def empty(self, rows: int, device: torch.device) -> Tensor:
        """[X, 2, 2, D] the memory of both LSTMs before the first row."""
        wide = torch.promote_types(self.dtype, torch.float32)
        return torch.zeros(rows, 2, 2, self.facts.width, dtype=wide, device=device)

    def read(self, x_XTC: Tensor, memory_X22D: Tensor, real_XT: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Both LSTMs over T rows in order: memories [X, T, 2, 2, D] (layer; output, cell) and the outputs [X, T, D]."""
        memories = []
        for layer, memory_X2D in zip(self.lstm, memory_X22D.unbind(1), strict=True):
            memories.append(layer(x_XTC, memory_X2D, real_XT))
            x_XTC = memories[-1][:, :, 0].to(self.dtype)
        return torch.stack(memories, dim=2), x_XTC

    def finish(self, z_XD: Tensor, attended_XD: Tensor) -> Tensor:
        """Features, from the rows' LSTM outputs and what they attended to."""
        hidden_XD = z_XD + self.self_attn.o_proj(attended_XD)
        return hidden_XD + self.mlp(self.post_attention_layernorm(hidden_XD))

    # Training

    def slots(self, batch: Batch) -> Slots:
        """The blocks that follow each trained state row t: anchor entry t-k+1, which knows the token t+1."""
        k = self.config.block
        anchors_BT = random_anchors(batch, legal_anchors(batch, "pair", ahead=k), self.config.anchors)
        slots = anchored(batch, anchors_BT, range(k * self.config.rounds), ahead=k, shift=k + 1)
        return weigh(slots, "geometric", ratio=self.config.depth_weight)

    def denominators(self, batch: Batch, progress: float) -> dict[str, float]:
        """The weights of all slots, of those too that glancing will leave out: that depends on the model."""
        return {"slots": denominator(self.slots(batch), "weights")}

    def loss(self, batch: Batch, target_out: TargetOut, progress: float) -> Terms:
        """Term `slots`: the objective on predicted features and their logits. With glancing the metrics are the first
        pass's."""
        assert target_out.last_hidden_BTD is not None and target_out.embed is not None
        slots = self.slots(batch)
        feature_BTD = target_out.last_hidden_BTD.to(self.dtype)
        if self.training and self.config.noise:
            noise_BTD = feature_noise(batch, self.facts.width, self.config.noise)
            feature_BTD = feature_BTD + noise_BTD.to(feature_BTD.dtype)
        text = self.read_text(self.inputs(target_out.embed, feature_BTD, batch.ids_BT.roll(-1, dims=1)), batch)
        share = self.config.glance * (1 - progress)
        if not self.training or share == 0:
            return self.score(slots, batch, target_out, self.unroll(slots, batch, target_out.embed, text))
        with torch.no_grad():
            first_BQD = self.unroll(slots, batch, target_out.embed, text)
            terms = self.score(slots, batch, target_out, first_BQD)
            shown_BQ = glance(
                slots, batch, self.guess(slots, target_out, first_BQD), share, hidden_BQ=slots.weight_BQ > 0
            )
        torch.clear_autocast_cache()  # it would hand out the casts of weights that were made without gradients
        second_BQD = self.unroll(slots, batch, target_out.embed, text, shown_BQ)
        left = replace(slots, weight_BQ=slots.weight_BQ.masked_fill(shown_BQ, 0))
        return Terms(self.score(left, batch, target_out, second_BQD).losses, terms.metrics)

    forward = loss

    def score(self, slots: Slots, batch: Batch, out: TargetOut, feature_BQD: Tensor) -> Terms:
        """The terms of predicted features."""
        assert out.head is not None and out.last_hidden_BTD is not None
        on_rows = tuple(term for term in self.objective if term[1] not in ON_FEATURES)
        feature_RD = feature_BQD.flatten(0, 1)[slots.flat_R]
        logits = out.logits(feature_RD, self.d2t_W)
        depths = self.config.block * self.config.rounds
        terms = score(logits, slots, batch, out, self.d2t_W, self.t2d_V, on_rows, self.config.oov, depths=depths)
        true_RD = take(out.last_hidden_BTD, slots.label_BQ - 1).flatten(0, 1)[slots.flat_R]
        weight_R = slots.weight_BQ.flatten()[slots.flat_R]
        for factor, name in self.objective:
            if name in ON_FEATURES:
                loss_R = weight_R * ON_FEATURES[name](feature_RD, true_RD)
                terms.losses["slots"] = terms.losses["slots"] + factor * loss_R.sum()
        return terms

    def guess(self, slots: Slots, out: TargetOut, feature_BQD: Tensor) -> Tensor:
        """int64 [B, Q] the token that each slot with a loss would draft (target ids; others: -1)."""
        assert out.head is not None
        guess_BQ = torch.full_like(slots.label_BQ, -1)
        best_R = out.head(feature_BQD.flatten(0, 1)[slots.flat_R], self.d2t_W).argmax(-1)
        guess_BQ.view(-1)[slots.flat_R] = best_R if self.d2t_W is None else self.d2t_W[best_R]
        return guess_BQ

    def read_text(self, x_BTC: Tensor, batch: Batch) -> Text:
        """Both LSTMs over every document of the batch, documents side by side."""
        row_X, at_X = (batch.samples_BT >= 0).nonzero().unbind(1)
        first_X = document_starts(batch)[row_X, at_X]
        units_U, unit_X = (row_X * x_BTC.shape[1] + first_X).unique(return_inverse=True)
        place_X = at_X - first_X
        length = int(place_X.max()) + 1 if len(place_X) else 1
        x_ULC = x_BTC.new_zeros(len(units_U), length, x_BTC.shape[2])
        x_ULC[unit_X, place_X] = x_BTC[row_X, at_X]
        memory_UL22D, z_ULD = self.read(x_ULC, self.empty(len(units_U), x_BTC.device))
        memory_BT22D = memory_UL22D.new_zeros(*x_BTC.shape[:2], *memory_UL22D.shape[2:])
        memory_BT22D[row_X, at_X] = memory_UL22D[unit_X, place_X]
        z_BTD = z_ULD.new_zeros(*x_BTC.shape[:2], z_ULD.shape[2])
        z_BTD[row_X, at_X] = z_ULD[unit_X, place_X]
        return Text(x_BTC, memory_BT22D, z_BTD)

    def unroll(
        self, slots: Slots, batch: Batch, embed: TargetEmbed, text: Text, shown_BQ: Tensor | None = None
    ) -> Tensor:
        """Predicted features [B, Q, D] of all slots, block after block, with the data's tokens as drafts; `shown_BQ`:
        slots of the first block that show their answer, which is the row k further on."""
        k, rounds = self.config.block, self.config.rounds
        b, q = slots.anchor_BQ.shape
        groups, (_, t) = q // (k * rounds), batch.ids_BT.shape
        angles = self.rotary(batch.positions_BT)
        keys, values = ([x.transpose(1, 2)] for x in self.self_attn.keys_values(text.z_BTD, angles))
        see_BQS = dense_mask(slots, batch, MaskRule("exclusive", "block", block=k))
        see_BAKS = see_BQS.view(b, groups, k * rounds, t + q)
        context_BAKT, own_BAKAK = see_BAKS[..., :t], see_BAKS[..., t:].unflatten(-1, (groups, k * rounds))
        position_BAK = slots.position_BQ.view(b, groups, k * rounds)
        entry_BAK = (slots.anchor_BQ + slots.depth_BQ).view(b, groups, k * rounds)
        outputs: list[Tensor] = []
        memory_X22D: Tensor | None = None
        for r in range(rounds):
            span = slice(r * k, (r + 1) * k)
            entry_BP = entry_BAK[:, :, span].flatten(1)
            if r == 0 and shown_BQ is None:
                z_BPD = take(text.z_BTD, entry_BP)
            else:
                if r == 0:
                    assert shown_BQ is not None
                    x_BPC = take(text.x_BTC, torch.where(shown_BQ, entry_BP + k, entry_BP))
                    before_BA = entry_BAK[:, :, 0] - 1
                else:
                    label_BP = slots.label_BQ.view(b, groups, k * rounds)[:, :, span.start - k : span.start].flatten(1)
                    x_BPC = self.inputs(embed, outputs[-1].detach().flatten(1, 2), at(batch.ids_BT, label_BP))
                    before_BA = entry_BAK[:, :, k - 1]
                if memory_X22D is None:
                    memory_X22D = self.memory_at(text, batch, slots, before_BA).flatten(0, 1)
                memory_Xk22D, z_XkD = self.read(x_BPC.reshape(b * groups, k, x_BPC.shape[2]), memory_X22D)
                memory_X22D, z_BPD = memory_Xk22D[:, -1], z_XkD.reshape(b, groups * k, z_XkD.shape[2])
            angles = self.rotary(position_BAK[:, :, span].flatten(1))
            for parts, own_BPGd in zip((keys, values), self.self_attn.keys_values(z_BPD, angles), strict=True):
                parts.append(own_BPGd.transpose(1, 2))
            # Keys are [context | first blocks | second blocks | ...].
            blocks = [own_BAKAK[:, :, span, :, i * k : (i + 1) * k].flatten(3) for i in range(r + 1)]
            see_BPS = torch.cat([context_BAKT[:, :, span], *blocks], dim=-1).flatten(1, 2)
            q_BHPd = self.self_attn.queries(z_BPD, angles).transpose(1, 2)
            attended_BHPd = attend(q_BHPd, torch.cat(keys, 2), torch.cat(values, 2), see_BPS)
            feature_BPD = self.finish(z_BPD, attended_BHPd.transpose(1, 2).flatten(2))
            outputs.append(feature_BPD.unflatten(1, (groups, k)))
        return torch.cat(outputs, dim=2).flatten(1, 2)

    def memory_at(self, text: Text, batch: Batch, slots: Slots, entry_BA: Tensor) -> Tensor:
        """[B, A, 2, 2, D] the LSTMs' memory after an entry of each group's document; nothing before its first."""
        each = self.config.block * self.config.rounds
        inside_BA = entry_BA >= at(document_starts(batch), slots.anchor_BQ[:, ::each])
        memory_BAE = take(text.memory_BT22D.flatten(2), entry_BA)
        memory_BAE = torch.where(inside_BA[..., None], memory_BAE, 0)
        return memory_BAE.unflatten(2, text.memory_BT22D.shape[2:])

    # Drafting

    def init(self, prefill: Prefill) -> FalconState:
        k, b, attention = self.config.block, prefill.rows, self.self_attn
        cache = Cache(b, prefill.slots, 1, attention.kv_heads, attention.head_dim, self.dtype, prefill.device)
        zeros_B1 = torch.zeros(b, 1, dtype=torch.int64, device=prefill.device)
        recent_BkD = torch.zeros(b, k, self.facts.width, dtype=self.dtype, device=prefill.device)
        return FalconState(
            cache,
            zeros_B1[:, 0],
            recent_BkD,
            self.empty(b, prefill.device)[:, None],
            recent_BkD[:, :1],
            zeros_B1,
            zeros_B1[..., None].expand(-1, -1, k),
            recent_BkD[:, None],
            zeros_B1.bool()[..., None][:, :0, :0],
        )

    def start(self, state: FalconState, commit: Commit) -> tuple[FalconState, Level]:
        """Take in the committed rows, dropping what was drafted; the level of depth 1."""
        assert commit.last_hidden_BTD is not None
        k, counts_B = self.config.block, commit.counts_B
        b, t = commit.ids_BT.shape
        rows_B1 = torch.arange(b, device=counts_B.device)[:, None]
        steps_k = torch.arange(k, device=counts_B.device)
        x_BTC = self.inputs(self.target_embed, commit.last_hidden_BTD, commit.following())
        real_BT = torch.arange(t, device=counts_B.device) < counts_B[:, None]
        memory_BT22D, z_BTD = self.read(x_BTC, state.memory_BM22D[:, 0], real_BT)
        state.cache.begin(commit.positions_BT)
        k_BTGd, v_BTGd = self.self_attn.keys_values(z_BTD, self.rotary(commit.positions_BT))
        k_BGSd, v_BGSd = state.cache.update(k_BTGd.transpose(1, 2), v_BTGd.transpose(1, 2), 0)
        newest_B = newest(commit, commit.positions_BT[..., None])[:, 0]
        state.position_B = torch.where(counts_B > 0, newest_B, state.position_B)
        state.recent_BkD = torch.cat([state.recent_BkD, z_BTD], dim=1)[rows_B1, counts_B[:, None] + steps_k]
        last_B1 = (counts_B - 1).clamp(min=0)[:, None]
        see_BkT = (torch.arange(t, device=counts_B.device) <= last_B1)[:, None].expand(-1, k, -1)
        angles = self.rotary(state.position_B[:, None] + steps_k - (k - 1))
        q_BHkd = self.self_attn.queries(state.recent_BkD, angles).transpose(1, 2)
        attended_BHkd = attend(q_BHkd, k_BGSd, v_BGSd, state.cache.mask(see_BkT)[:, 0])
        state.features_BMkD = self.finish(state.recent_BkD, attended_BHkd.transpose(1, 2).flatten(2))[:, None]
        state.cache.commit(counts_B)
        state.memory_BM22D, state.z_BMD = memory_BT22D[:, -1:], torch.zeros_like(z_BTD[:, :1])
        state.depth_BM = torch.zeros_like(rows_B1)
        state.path_BMk = torch.zeros_like(rows_B1)[..., None].expand(-1, -1, k)
        state.see_BNN = torch.zeros(b, 0, 0, dtype=torch.bool, device=counts_B.device)
        valid_B1 = ((counts_B > 0) & (state.position_B >= k - 1))[:, None]
        return state, self.level(state.features_BMkD[:, :, 0], valid_B1)

    def extend(self, state: FalconState, tokens_BN: Tensor, parents_BN: Tensor) -> tuple[FalconState, Level]:
        """Add nodes (target ids) below their parents; the levels below them. A pass where some node ends a block."""
        (b, n), before, k = tokens_BN.shape, state.see_BNN.shape[1], self.config.block
        rows_B1 = torch.arange(b, device=tokens_BN.device)[:, None]
        steps_k = torch.arange(k, device=tokens_BN.device)
        depth_BN = state.depth_BM[rows_B1, parents_BN] + 1
        features_BNkD = state.features_BMkD[rows_B1, parents_BN]
        x_BNC = self.inputs(self.target_embed, pick(features_BNkD, (depth_BN - 1) % k), tokens_BN)
        memory_X22D = state.memory_BM22D[rows_B1, parents_BN].flatten(0, 1)
        memory_X122D, z_X1D = self.read(x_BNC.flatten(0, 1)[:, None], memory_X22D)
        z_BND = z_X1D[:, 0].unflatten(0, (b, n))
        lineage_BMN = torch.nn.functional.pad(state.see_BNN, (0, n, 1, 0))  # the anchor (row 0) sees no node
        see_BNA = lineage_BMN[rows_B1, parents_BN]
        see_BNA[:, :, before:] = torch.eye(n, dtype=torch.bool, device=tokens_BN.device)
        position_BN = state.position_B[:, None] + depth_BN
        state.cache.begin(position_BN, offset=before)
        k_BNGd, v_BNGd = self.self_attn.keys_values(z_BND, self.rotary(position_BN))
        k_BGSd, v_BGSd = state.cache.update(k_BNGd.transpose(1, 2), v_BNGd.transpose(1, 2), 0)
        own_BN1 = (before + 1 + torch.arange(n, device=tokens_BN.device)).expand(b, n)[..., None]
        path_BNk = torch.cat([state.path_BMk[rows_B1, parents_BN][..., 1:], own_BN1], dim=-1)
        state.z_BMD = torch.cat([state.z_BMD, z_BND], dim=1)
        ends_BN = depth_BN % k == 0
        if bool(ends_BN.any()):
            z_BPD = state.z_BMD[rows_B1, path_BNk.flatten(1)]
            angles = self.rotary((position_BN[..., None] + steps_k - (k - 1)).flatten(1))
            q_BHPd = self.self_attn.queries(z_BPD, angles).transpose(1, 2)
            see_BPS = state.cache.mask(see_BNA)[:, 0].repeat_interleave(k, dim=1)
            attended_BPD = attend(q_BHPd, k_BGSd, v_BGSd, see_BPS).transpose(1, 2).flatten(2)
            made_BNkD = self.finish(z_BPD, attended_BPD).unflatten(1, (n, k))
            features_BNkD = torch.where(ends_BN[..., None, None], made_BNkD, features_BNkD)
        state.memory_BM22D = torch.cat([state.memory_BM22D, memory_X122D[:, 0].unflatten(0, (b, n))], dim=1)
        state.depth_BM = torch.cat([state.depth_BM, depth_BN], dim=1)
        state.path_BMk = torch.cat([state.path_BMk, path_BNk], dim=1)
        state.features_BMkD = torch.cat([state.features_BMkD, features_BNkD], dim=1)
        state.see_BNN = torch.cat([torch.nn.functional.pad(state.see_BNN, (0, n)), see_BNA], dim=1)
        return state, self.level(pick(features_BNkD, depth_BN % k), torch.ones_like(ends_BN))

    def reset(self, state: FalconState, rows: Tensor) -> FalconState:
        state.cache.reset(rows)
        state.memory_BM22D[rows] = 0
        state.recent_BkD[rows] = 0
        return state

    def level(self, feature_BND: Tensor, valid_BN: Tensor) -> Level:
        return make_level(self.target_head(feature_BND, self.d2t_W), valid_BN, self.d2t_W, self.facts.tokens)


def take(x_BTX: Tensor, index_BQ: Tensor) -> Tensor:
    """[B, Q, X] x at the indices, kept inside the row."""
    rows_B1 = torch.arange(len(x_BTX), device=x_BTX.device)[:, None]
    return x_BTX[rows_B1, index_BQ.clamp(0, x_BTX.shape[1] - 1)]


def pick(x_BNkD: Tensor, index_BN: Tensor) -> Tensor:
    """[B, N, D] one of the k entries of each node."""
    return x_BNkD.gather(2, index_BN[..., None, None].expand(-1, -1, 1, x_BNkD.shape[3]))[:, :, 0]
