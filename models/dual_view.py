"""Dual view: the frozen target drafts a block by itself, through second attention projections.

After Orthrus (arXiv:2605.12825): every layer gets a second view of its attention projections; embeddings, MLPs, norms
and head are the target's, shared and frozen. In the second view a block [anchor, mask, ..., mask] runs through the
target in one pass. It reads the target's *own* keys and values of the text before the anchor, and, in both directions,
its own block's; slot j predicts the token j + 1 after the anchor. The first view is the target unchanged, so that what
the block drafts is verified exactly, and the text is cached once for both.

The second projection is the frozen one plus a difference, x -> W x + difference(x): of low rank (`rank`, LoRA:
arXiv:2106.09685), or a full matrix (`rank: null`, Orthrus's own projections). It starts at zero, so that the block
starts as the target would read it, masks aside. Orthrus also has a second set of query and key norms, and its training
is not published: here these norms are shared, and the loss is KL to the target, on blocks at random anchors. The mask's
embedding is a vector of its own, so that no token of the vocabulary is needed for it.

No serving engine loads it; exports hold the differences alone, in our own documented form.
Test: pytest tests/test_slot_methods.py
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor, nn

from ..losses.distill import Oov
from ..losses.objective import parse_objective
from .drafter import Batch, Commit, Level, Prefill, TargetFacts, TargetOut, Terms
from .inside import run_slots
from .layers import check_loss_settings, make_level, refuse_unbound, register_vocabulary
from .slots import (
    MaskRule,
    Slots,
    anchored,
    at,
    denominator,
    legal_anchors,
    random_anchors,
    score,
    weigh,
)


@dataclass(frozen=True)
class DualViewConfig:
    """Settings of a dual view."""

    block: int = 8
    """Slots per block, the anchor's with them: tokens per draft."""
    rank: int | None = 32
    """Rank of the differences; null = full matrices (Orthrus). Low rank is our choice: it trains on little data."""
    alpha: float = 32.0
    """Low-rank differences are scaled by alpha / rank (LoRA, section 4.1)."""
    anchors: int | None = 16
    """Blocks per document, at random anchors that are drawn anew in every epoch; null = at every one."""
    objective: str = "kl"
    """Loss per slot (Orthrus's is not published)."""
    depth_weight: float = 0.9
    """Depth d weighs depth_weight ** (d - 1): a draft counts as far as it is right."""
    oov: Oov = "renormalise"
    """Teacher mass outside the draft vocabulary: renormalise, mask (rows whose argmax is outside) or tail."""

    def __post_init__(self) -> None:
        check_loss_settings(self.objective, self.oov, self.depth_weight, self.block, "dual_view")
        if (self.rank is not None and self.rank < 1) or (self.anchors is not None and self.anchors < 1):
            raise ValueError(f"dual_view: rank and anchors must be positive or null, got {self.rank}, {self.anchors}")
        if self.alpha <= 0:
            raise ValueError(f"dual_view: alpha must be positive, got {self.alpha}")


RULE = MaskRule("exclusive", "full")
PROJECTIONS = ("q_proj", "k_proj", "v_proj", "o_proj")


def projection_sizes(facts: TargetFacts) -> dict[str, tuple[int, int]]:
    """(out, in) of the four attention projections."""
    queries, keys = facts.heads * facts.head_dim, facts.kv_heads * facts.head_dim
    return dict(
        zip(PROJECTIONS, ((queries, facts.width), *[(keys, facts.width)] * 2, (facts.width, queries)), strict=True)
    )


class Difference(nn.Module):
    """What a projection of the second view adds to the frozen one: up(down(x)) * alpha / rank, or one full matrix."""

    def __init__(self, size_out: int, size_in: int, config: DualViewConfig) -> None:
        super().__init__()
        self.scale = 1.0 if config.rank is None else config.alpha / config.rank
        self.down = None if config.rank is None else nn.Linear(size_in, config.rank, bias=False)
        self.up = nn.Linear(config.rank or size_in, size_out, bias=False)
        nn.init.zeros_(self.up.weight)

    def forward(self, x: Tensor) -> Tensor:
        x = x.to(self.up.weight.dtype)
        return self.up(x if self.down is None else self.down(x)) * self.scale


def _add(difference: nn.Module, module: nn.Module, args: tuple[Tensor, ...], out: Tensor) -> Tensor:
    return out + difference(args[0]).to(out.dtype)


class DualView(nn.Module):
    """A dual view; see `models/drafter.py` for the contract. `start` returns all levels at once."""

    method = "dual_view"
    Config = DualViewConfig
    draft_needs = frozenset({"ids", "kv", "module"})
    loss_needs = frozenset({"ids", "kv", "module", "teacher"})
    taps: tuple[int, ...] = ()
    d2t_W: Tensor | None
    t2d_V: Tensor | None

    def __init__(self, config: DualViewConfig, facts: TargetFacts, draft_ids: Tensor | None = None) -> None:
        super().__init__()
        self.config, self.facts = config, facts
        self.parallel = self.max_depth = config.block
        self.objective = parse_objective(config.objective)
        self.vocab = register_vocabulary(self, facts, draft_ids)
        sizes = projection_sizes(facts)
        self.layers = nn.ModuleList(
            [nn.ModuleDict({n: Difference(*size, config) for n, size in sizes.items()}) for _ in range(facts.layers)]
        )
        self.mask_embed = nn.Parameter(torch.zeros(facts.width))
        self.bound: list[Any] = []  # the target; in a list, so that it is no part of this module

    def bind(self, target: Any) -> None:
        """Take the target, whose layers the block passes through.

        Raises ValueError where a layer has no such projections (some families fuse them).
        """
        for i, layer in enumerate(target.layers):
            attention = getattr(layer, "self_attn", None)
            for name, (size_out, size_in) in projection_sizes(self.facts).items():
                linear = getattr(attention, name, None)
                found = getattr(linear, "out_features", None), getattr(linear, "in_features", None)
                if found != (size_out, size_in):
                    raise ValueError(
                        f"dual_view: layer {i} of {target.facts.name} ({target.facts.family}) has no projection "
                        f"self_attn.{name} of {size_in} to {size_out} values (found: {found[1]} to {found[0]}); "
                        "targets that fuse their projections are not supported, train another method"
                    )
        self.bound = [target]

    @torch.no_grad()
    def init_from_target(self, target: Any) -> None:
        """Start the mask from the mean embedding; then `bind`."""
        ids = torch.arange(self.facts.tokens, device=target.device)
        self.mask_embed.copy_(target.embed(ids).float().mean(0))
        self.bind(target)

    @contextmanager
    def second_view(self) -> Iterator[None]:
        """While open, every pass of the target is one of the second view."""
        if not self.bound:
            refuse_unbound()
        handles = [
            getattr(layer.self_attn, name).register_forward_hook(partial(_add, difference))
            for layer, differences in zip(self.bound[0].layers, self.layers, strict=True)
            for name, difference in cast(nn.ModuleDict, differences).items()
        ]
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    # Training

    def slots(self, batch: Batch) -> Slots:
        """Blocks at random anchors; slot j stands for the token anchor + j and predicts the next."""
        anchors_BT = random_anchors(batch, legal_anchors(batch, "pair"), self.config.anchors)
        slots = anchored(batch, anchors_BT, range(self.config.block), shift=1)
        return weigh(slots, "geometric", ratio=self.config.depth_weight)

    def denominators(self, batch: Batch, progress: float) -> dict[str, float]:
        """The weights of all slots."""
        return {"slots": denominator(self.slots(batch), "weights")}

    def loss(self, batch: Batch, target_out: TargetOut, progress: float) -> Terms:
        """Term `slots`: the objective between the second view's rows and the first's."""
        assert target_out.embed is not None and target_out.head is not None
        if target_out.forward is not None and [target_out.forward] != [target.forward for target in self.bound]:
            raise ValueError("dual_view: these states are of another target than it is bound to; call bind(target)")
        slots = self.slots(batch)
        anchor_BQ1 = (slots.depth_BQ == 0)[..., None]
        tokens_BQD = target_out.embed(at(batch.ids_BT, slots.token_BQ))
        embeds_BQD = torch.where(anchor_BQ1, tokens_BQD, self.mask_embed)
        with self.second_view():
            hidden_BQD = run_slots(target_out, batch, slots, RULE, embeds_BQD)
        logits = target_out.logits(hidden_BQD.flatten(0, 1)[slots.flat_R], self.d2t_W)
        config = self.config
        return score(
            logits, slots, batch, target_out, self.d2t_W, self.t2d_V, self.objective, config.oov,
            depths=config.block,
        )  # fmt: skip

    forward = loss

    # Drafting

    def init(self, prefill: Prefill) -> None:
        """The target's cache is all there is to know."""

    @torch.no_grad()
    def start(self, state: None, commit: Commit) -> tuple[None, Level]:
        """The levels of all depths. The block takes slots of the target's cache behind the text, which the next pass
        overwrites."""
        if not self.bound:
            refuse_unbound()
        target, cache, k = self.bound[0], commit.kv, self.config.block
        b = len(commit.anchor_B)
        masks_BKD = self.mask_embed.to(target.dtype).expand(b, k - 1, -1)
        embeds_BKD = torch.cat([target.embed(commit.anchor_B)[:, None], masks_BKD], dim=1)
        positions_BK = cache.lengths_B[:, None] + torch.arange(k, device=embeds_BKD.device)
        positions_BK = positions_BK.clamp(max=self.facts.max_positions - 1)  # what is beyond is beyond every budget
        see_BKK = torch.ones(b, k, k, dtype=torch.bool, device=embeds_BKD.device)
        with self.second_view():
            states = target.forward(embeds_BKD, positions_BK, cache=cache, see_BTA=see_BKK)
        logits_BKW = target.head(states.last_hidden_BTD, self.d2t_W)
        valid_BK = (commit.counts_B > 0)[:, None].expand(-1, k)
        return state, make_level(logits_BKW, valid_BK, self.d2t_W, self.facts.tokens)

    def extend(self, state: None, tokens_BN: Tensor, parents_BN: Tensor) -> tuple[None, Level]:
        """Never asked for: every depth comes from `start`."""
        raise ValueError(f"dual_view drafts its block of {self.config.block} at once: draft no deeper")

    def reset(self, state: None, rows: Tensor) -> None:
        """Nothing to forget."""
