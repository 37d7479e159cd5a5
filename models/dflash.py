"""DFlash: a block of mask tokens, drafted in one pass; the target's features are keys and values of every layer.

"DFlash: Block Diffusion for Flash Speculative Decoding" (arXiv:2602.06036). A few Qwen3-style layers run over a *block*
of B slots, the anchor's token and B - 1 masks, read through the target's own embedding and head, both frozen. What
conditions it is the context feature c = hidden_norm(fc(residual streams of the target)), one per context token: the
key and value projections of every layer read it unchanged, beside the block's own states. Context tokens pass through
no layer, so that the draft's context cache is a function of the target's features alone. Inside a block all slots see
each other.

Alignment. With the paper's anchor at position a, its context are the tokens before a, and slot k (of 0 .. B - 1) stands
at position a + k and predicts the token *there*; slot 0 shows the anchor and predicts nothing. Our state row t is the
newest one whose target states are known, the anchor stands at t + 1, so a = t + 1: the context is rows 0 .. t, slot k
predicts depth d = k, and a block drafts K = B - 1 tokens. With `sample_from_anchor` (DSpark) slot k predicts the token
behind it, depth d = k + 1, and K = B. The teacher of depth d is the target's state at t + d. The anchor's own state does
not exist when a draft is made: it is never seen, in training either ("exclusive" context in models/slots.py).

JetSpec mode (arXiv:2606.18394): `causal: true, objective: kl, weight: uniform`. JetSpec's training code is not public
and is read in two ways. This is the one of NeMo Automodel and of the released engine: the block's input is the anchor
and masks, each slot sees the slots before it, and the loss is the forward divergence KL(target || draft) at temperature
1. The other reading (true tokens as input, teacher forcing) is not implemented: it would not draft in one pass.

Where public trainers differ each reading has a name: `legal`, `cut`, `weight`, `denominator`, `objective` (hard labels:
ce; soft: kl, l1, tv ...), `sample_from_anchor`. Parameters bear the names of serving engines' checkpoints.
Test: pytest tests/test_dflash.py tests/test_methods.py tests/test_parity.py
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal, Protocol, cast

import torch
from torch import Tensor, nn

from ..losses.distill import Oov
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
    make_level,
    newest,
    norm_scale,
    refuse_unbound,
    register_vocabulary,
)
from .mask_id import choose_mask_id, register_mask_id
from .slots import (
    Cut,
    Denominator,
    Legal,
    MaskRule,
    Slots,
    anchored,
    attend_slots,
    denominator,
    fill,
    legal_anchors,
    make_mask,
    random_anchors,
    real,
    score,
    variable_prefix,
    weigh,
)

BlockWeight = Literal["exp", "dpace", "uniform"]
HELD_OUT_ANCHORS = 512  # blocks per document in evaluation, at least
BlockConfig = Any  # DFlashConfig or DSparkConfig: what both have


@dataclass(frozen=True)
class DFlashConfig:
    """Settings of a DFlash drafter."""

    block: int = 16
    """Slots of a block, the anchor's with them (DFlash: 16); drafts are one token shorter."""
    layers: int = 5
    """Layers of the backbone (DFlash: 5)."""
    sample_from_anchor: bool = False
    """The anchor's slot predicts too, so that a block drafts as many tokens as it has slots (DSpark)."""
    causal: bool = False
    """Slots see earlier slots alone (JetSpec); false: the whole block (DFlash)."""
    taps: tuple[int, ...] | None = None
    """Residual streams h[k] of the target, ascending; null = as many as layers, spread from h[2] to h[L - 2] (DFlash)."""
    anchors: int | None = 512
    """Blocks per document and step, at random places (DFlash: 512); null = one for every place. Held-out figures take 512 or more."""
    legal: Legal = "pair"
    """Where blocks may start: pair (SpecForge, DeepSpec), supervised (speculators) or full_block (Automodel)."""
    cut: Cut = "run"
    """Labels behind a gap in the supervision: run = not trained (DeepSpec), mask = trained (SpecForge, speculators)."""
    variable_prefix: bool = False
    """Show each block its first l true tokens, l of 1 .. B - 1 drawn with chance 0.9 ** l (D2SD, which draws from 2 on). A way
    of training: our runtime drafts from the anchor alone, it does not draft anew behind a part of a block."""
    objective: str = "ce"
    """Loss per slot: ce (the data's token, DFlash), kl (the target's distribution, JetSpec), or any expression."""
    weight: BlockWeight = "exp"
    """Weights of depths: exp (DFlash), dpace (from the draft's own probabilities, arXiv:2605.18810) or uniform (JetSpec)."""
    gamma: float = 7.0
    """Depth d weighs exp(-(d - 1) / gamma) under exp (SpecForge: 7 for blocks of 16; speculators, DeepSpec: 4 for 7 or 8)."""
    denominator: Denominator = "weights"
    """The loss is divided by the sum of weights (SpecForge), the number of slots (speculators) or of blocks."""
    oov: Oov = "renormalise"
    """Teacher mass outside the draft vocabulary: renormalise, mask (rows whose argmax is outside) or tail."""
    mask_id: int | None = None
    """Token id of masks; null = an unused one of the target, by the rule of models/mask_id.py."""
    heads: int | None = None
    """Query heads; null = the target's."""
    kv_heads: int | None = None
    """Key/value heads; null = the target's."""
    intermediate: int | None = None
    """MLP width; null = the target's."""

    def __post_init__(self) -> None:
        check_block_settings(self, "dflash")


def drafted_tokens(config: BlockConfig) -> int:
    """K, the tokens that a block drafts."""
    return config.block - (not config.sample_from_anchor)


def check_block_settings(config: BlockConfig, method: str) -> None:
    """Refuse, by name and value, settings that no block drafter can have. Raises ValueError."""
    check_loss_settings(config.objective, config.oov, 1.0, drafted_tokens(config), method)
    for name, allowed in (
        ("legal", ("pair", "supervised", "full_block")),
        ("cut", ("run", "mask")),
        ("weight", ("exp", "dpace", "uniform")),
        ("denominator", ("weights", "slots", "blocks")),
    ):
        if getattr(config, name) not in allowed:
            raise ValueError(f"{method}: {name} must be one of {', '.join(allowed)}, got {getattr(config, name)!r}")
    if config.layers < 1:
        raise ValueError(f"{method}: layers must be at least 1, got {config.layers}")
    if config.anchors is not None and config.anchors < 1:
        raise ValueError(f"{method}: anchors must be at least 1 or null, got {config.anchors}")
    if not 0 < config.gamma < float("inf"):
        raise ValueError(f"{method}: gamma must be a positive number, got {config.gamma}")
    if config.weight == "dpace" and config.denominator == "weights":
        raise ValueError(f"{method}: weight dpace depends on the draft; set denominator to slots or blocks")
    if config.variable_prefix and config.block < 3:
        raise ValueError(f"{method}: variable_prefix needs a block of at least 3 slots, got {config.block}")
    if config.taps is not None and (list(config.taps) != sorted(set(config.taps)) or not config.taps):
        raise ValueError(f"{method}: taps must be distinct and ascending, got {config.taps}")


def default_taps(layers: int, count: int) -> tuple[int, ...]:
    """`count` streams of a target of `layers` layers, spread evenly from h[2] to h[layers - 2] (one: the middle); of a
    target with too few layers, as many as it has before its last, from h[1] on."""
    low, high = (2, layers - 2) if layers - 3 >= count else (1, max(1, layers - 1))
    count = min(count, high - low + 1)
    if count == 1:
        return ((low + high) // 2,)
    return tuple(low + (2 * j * (high - low) + count - 1) // (2 * (count - 1)) for j in range(count))


# The backbone, which dspark.py shares

Attend = Callable[
    [int, Tensor, Tensor, Tensor], Tensor
]  # layer, queries [B, H, Q, d], own keys and values [B, G, Q, d]


class Layer(nn.Module):
    """A Qwen3 decoder layer whose keys and values come from two places: the context's features and the block."""

    def __init__(self, facts: TargetFacts, config: BlockConfig) -> None:
        super().__init__()
        width, eps = facts.width, facts.norm_eps
        heads, kv_heads = config.heads or facts.heads, config.kv_heads or facts.kv_heads
        self.input_layernorm = RMSNorm(width, eps)
        self.self_attn = Attention(width, width, heads, kv_heads, facts.head_dim, eps)
        self.post_attention_layernorm = RMSNorm(width, eps)
        self.mlp = MLP(width, config.intermediate or facts.intermediate, facts.activation)

    def inject(self, feature_BTD: Tensor, angles: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        """Keys and values [B, G, T, d] of the context."""
        k_BTGd, v_BTGd = self.self_attn.keys_values(feature_BTD, angles)
        return k_BTGd.transpose(1, 2), v_BTGd.transpose(1, 2)

    def forward(
        self, x_BQD: Tensor, angles: tuple[Tensor, Tensor], look: Callable[[Tensor, Tensor, Tensor], Tensor]
    ) -> Tensor:
        """`look(queries, keys, values)` of the block is the attention over context and block."""
        normed_BQD = self.input_layernorm(x_BQD)
        q_BHQd = self.self_attn.queries(normed_BQD, angles).transpose(1, 2)
        out_BHQd = look(q_BHQd, *self.inject(normed_BQD, angles))
        x_BQD = x_BQD + self.self_attn.o_proj(out_BHQd.transpose(1, 2).flatten(2))
        return x_BQD + self.mlp(self.post_attention_layernorm(x_BQD))


class Backbone(Protocol):
    """What the functions below read of a drafter; `build_backbone` makes it."""

    config: Any
    facts: TargetFacts
    taps: tuple[int, ...]
    fc: nn.Linear
    hidden_norm: RMSNorm
    layers: nn.ModuleList
    norm: RMSNorm
    rotary: Rotary
    mask_id: Tensor
    target_embed: TargetEmbed
    target_head: TargetHead
    training: bool


def build_backbone(drafter: Any, config: BlockConfig, facts: TargetFacts, method: str) -> None:
    """Give a drafter its taps, mask id, projections, layers and norms. Raises ValueError for taps that the target has
    not."""
    drafter.taps = config.taps or default_taps(facts.layers, config.layers)
    if drafter.taps[0] < 0 or drafter.taps[-1] > facts.layers:
        raise ValueError(f"{method}: taps {drafter.taps} of {facts.name} must lie in 0..{facts.layers}")
    register_mask_id(drafter, config.mask_id, facts.vocab, method)
    drafter.fc = Linear(len(drafter.taps) * facts.width, facts.width, bias=False)
    drafter.hidden_norm = RMSNorm(facts.width, facts.norm_eps)
    drafter.layers = nn.ModuleList([Layer(facts, config) for _ in range(config.layers)])
    drafter.norm = RMSNorm(facts.width, facts.norm_eps)
    drafter.rotary = Rotary(facts)
    drafter.target_embed = drafter.target_head = refuse_unbound


@torch.no_grad()
def start_backbone(drafter: Backbone, target: Any, method: str) -> None:
    """Start the final norm from the target's, whose head it is read through, and choose the mask id."""
    drafter.norm.weight.copy_(norm_scale(target))
    drafter.mask_id.fill_(choose_mask_id(target, drafter.config.mask_id, method))


def fuse(drafter: Backbone, taps_BTPD: Tensor) -> Tensor:
    """[B, T, P, D] residual streams -> [B, T, D] context features."""
    return drafter.hidden_norm(drafter.fc(taps_BTPD.to(drafter.fc.weight.dtype).flatten(2)))


def inject(drafter: Backbone, feature_BTD: Tensor, positions_BT: Tensor) -> list[tuple[Tensor, Tensor]]:
    """Every layer's keys and values [B, G, T, d] of the context."""
    angles = drafter.rotary(positions_BT)
    return [cast(Layer, layer).inject(feature_BTD, angles) for layer in drafter.layers]


def run_layers(drafter: Backbone, embed_BQD: Tensor, positions_BQ: Tensor, attend: Attend) -> Tensor:
    """The block's states [B, Q, D], after the final norm: what the head reads."""
    x_BQD, angles = embed_BQD.to(drafter.fc.weight.dtype), drafter.rotary(positions_BQ)
    for i, layer in enumerate(drafter.layers):
        x_BQD = layer(x_BQD, angles, partial(attend, i))
    return drafter.norm(x_BQD)


def block_slots(drafter: Backbone, batch: Batch) -> tuple[Slots, Tensor]:
    """The slots of a batch, weighed, and which of them show true tokens. Evaluation takes more blocks, and no prefixes:
    what is drafted from is an anchor and masks."""
    config = drafter.config
    legal_BT = legal_anchors(batch, config.legal, width=config.block)
    count = config.anchors
    if count is not None and not drafter.training:
        count = max(count, HELD_OUT_ANCHORS)
    anchors_BT = random_anchors(batch, legal_BT, count)
    slots = anchored(batch, anchors_BT, range(config.block), shift=int(config.sample_from_anchor), cut=config.cut)
    shown_BQ = real(slots)
    if config.variable_prefix and drafter.training:
        slots, shown_BQ = variable_prefix(slots, batch, config.block, least=1)
    return weigh(slots, config.weight, gamma=config.gamma), shown_BQ


def block_states(drafter: Backbone, slots: Slots, shown_BQ: Tensor, batch: Batch, out: TargetOut) -> Tensor:
    """The states [B, Q, D] of a batch's slots."""
    assert out.taps_BTPD is not None and out.embed is not None
    context = inject(drafter, fuse(drafter, out.taps_BTPD), batch.positions_BT)
    mask = make_mask(slots, batch, MaskRule("exclusive", "causal" if drafter.config.causal else "full"))

    def look(i: int, q_BHQd: Tensor, k_BGQd: Tensor, v_BGQd: Tensor) -> Tensor:
        return attend_slots(q_BHQd, context[i], (k_BGQd, v_BGQd), mask)

    ids_BQ = fill(slots, batch, shown_BQ, drafter.mask_id)
    return run_layers(drafter, out.embed(ids_BQ), slots.position_BQ, look)


@dataclass
class BlockState:
    """The context's keys and values of every layer, and the position of the newest committed row."""

    cache: Cache
    position_B: Tensor


def init_block(drafter: Backbone, prefill: Prefill) -> BlockState:
    """An empty state, with room for a block behind the context; it is kept in the drafter's own precision."""
    attention = cast(Layer, drafter.layers[0]).self_attn
    cache = Cache(
        prefill.rows, prefill.slots + drafter.config.block, len(drafter.layers), attention.kv_heads,
        attention.head_dim, drafter.fc.weight.dtype, prefill.device,
    )  # fmt: skip
    return BlockState(cache, torch.zeros(prefill.rows, dtype=torch.int64, device=prefill.device))


def draft_block(drafter: Backbone, state: BlockState, commit: Commit) -> Tensor:
    """Take in the committed rows; the states [B, K, D] of the slots that predict, after the anchor and masks."""
    assert commit.taps_BTPD is not None
    cache, block = state.cache, drafter.config.block
    context = inject(drafter, fuse(drafter, commit.taps_BTPD), commit.positions_BT)
    cache.begin(commit.positions_BT)
    for i, (k_BGTd, v_BGTd) in enumerate(context):
        cache.update(k_BGTd, v_BGTd, i)
    cache.commit(commit.counts_B)
    position_B = newest(commit, commit.positions_BT[..., None])[:, 0]
    state.position_B = torch.where(commit.counts_B > 0, position_B, state.position_B)

    steps_Q = torch.arange(block, device=position_B.device)
    positions_BQ = state.position_B[:, None] + 1 + steps_Q
    ids_BQ = torch.where(steps_Q == 0, commit.anchor_B[:, None], drafter.mask_id)
    cache.begin(positions_BQ)
    see_QQ = steps_Q <= steps_Q[:, None] if drafter.config.causal else torch.ones_like(steps_Q).bool().expand(block, -1)
    see_BQS = cache.mask(see_QQ.expand(len(position_B), -1, -1))[:, 0]

    def look(i: int, q_BHQd: Tensor, k_BGQd: Tensor, v_BGQd: Tensor) -> Tensor:
        return attend(q_BHQd, *cache.update(k_BGQd, v_BGQd, i), see_BQS)

    hidden_BQD = run_layers(drafter, drafter.target_embed(ids_BQ), positions_BQ, look)
    return hidden_BQD[:, block - drafted_tokens(drafter.config) :]


class DFlash(nn.Module):
    """A DFlash drafter; see `models/drafter.py` for the contract. `start` returns all levels at once."""

    method = "dflash"
    Config = DFlashConfig
    draft_needs = frozenset({"ids", "taps"})
    loss_needs = frozenset({"ids", "taps", "teacher"})
    taps: tuple[int, ...]
    d2t_W: Tensor | None
    t2d_V: Tensor | None
    fc: nn.Linear
    hidden_norm: RMSNorm
    layers: nn.ModuleList
    norm: RMSNorm
    rotary: Rotary
    mask_id: Tensor
    target_embed: TargetEmbed
    target_head: TargetHead

    def __init__(self, config: DFlashConfig, facts: TargetFacts, draft_ids: Tensor | None = None) -> None:
        super().__init__()
        self.config, self.facts = config, facts
        self.parallel = self.max_depth = drafted_tokens(config)
        self.objective = parse_objective(config.objective)
        self.vocab = register_vocabulary(self, facts, draft_ids)
        build_backbone(self, config, facts, self.method)

    def bind(self, target: Any) -> None:
        """Take the target's embedding and head, which drafting reads and writes through."""
        self.target_embed, self.target_head = target.embed, target.head

    def init_from_target(self, target: Any) -> None:
        """Start the final norm from the target's and choose the mask id; then `bind`."""
        start_backbone(self, target, self.method)
        self.bind(target)

    # Training

    def denominators(self, batch: Batch, progress: float) -> dict[str, float]:
        """The sum of weights, or the count of slots or blocks."""
        slots, _ = block_slots(self, batch)
        return {"slots": denominator(slots, self.config.denominator, self.config.weight)}

    def loss(self, batch: Batch, target_out: TargetOut, progress: float) -> Terms:
        """The term `slots`: the objective, weighed, summed over all slots that predict."""
        assert target_out.head is not None
        config = self.config
        slots, shown_BQ = block_slots(self, batch)
        hidden_BQD = block_states(self, slots, shown_BQ, batch, target_out)
        logits = target_out.logits(hidden_BQD.flatten(0, 1)[slots.flat_R], self.d2t_W)
        return score(
            logits, slots, batch, target_out, self.d2t_W, self.t2d_V, self.objective, config.oov, config.weight,
            depths=self.max_depth,
        )  # fmt: skip

    forward = loss

    # Drafting

    def init(self, prefill: Prefill) -> BlockState:
        return init_block(self, prefill)

    def start(self, state: BlockState, commit: Commit) -> tuple[BlockState, Level]:
        """Take in the committed rows; the levels of all depths."""
        logits_BKW = self.target_head(draft_block(self, state, commit), self.d2t_W)
        valid_BK = (commit.counts_B > 0)[:, None].expand(-1, self.parallel)
        return state, make_level(logits_BKW, valid_BK, self.d2t_W, self.facts.tokens)

    def extend(self, state: BlockState, tokens_BN: Tensor, parents_BN: Tensor) -> tuple[BlockState, Level]:
        """Never asked for: every depth comes from `start`."""
        raise ValueError(f"dflash drafts {self.parallel} tokens and gives all their levels at once: draft no deeper")

    def reset(self, state: BlockState, rows: Tensor) -> BlockState:
        state.cache.reset(rows)
        return state
