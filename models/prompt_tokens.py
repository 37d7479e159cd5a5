"""Prompt tokens: a few trained input embeddings make the frozen target draft for itself.

Behind the text stand M special tokens; the target's own layers and head turn token i into the draft of depth i. They
never enter the text: they ride along as extra rows of every verification, below each node of the tree, so that the next
draft is ready whichever node is accepted, and no pass of a drafter is needed. Ordinary tokens see none of them and
compute exactly what the target computes. Three methods of one form, named variants of one config:

    bita   BiTA (arXiv:2401.12522): M mask embeddings, each seeing those before it; per layer a prefix of trained keys
           and values that only masks see; hard labels, at 64 consecutive places of a text (its code).
    ppd    Parallel prompt decoding (arXiv:2405.18628): every special token is an ensemble of virtual tokens, virtual
           token v of one seeing virtual token v of those before it; KL to the target, depth d weighing 0.8 ** (d - 1).
    pass   PaSS (arXiv:2311.13581): look-ahead embeddings alone; hard labels at random places.

BiTA and PPD train on the target's own greedy answers; here the labels are the data's. PPD averages logits, here hidden
states are averaged, the same for a linear head and cheaper. PPD cuts a text in one place, PaSS too; groups see nothing
of each other, so that several places per text cost one pass. PPD starts its embeddings from a short text, here they
start near the mean embedding.

No serving engine loads them; exports hold the embeddings and the prefix alone, in our own documented form.
Test: pytest tests/test_slot_methods.py
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
from torch import Tensor, nn

from ..losses.distill import Oov
from ..losses.objective import parse_objective
from .drafter import Batch, Commit, Level, Prefill, TargetFacts, TargetOut, Terms
from .inside import run_slots
from .layers import TargetHead, check_loss_settings, make_level, refuse_unbound, register_vocabulary
from .slots import (
    MaskRule,
    Slots,
    anchored,
    append_at_cut,
    consecutive_anchors,
    denominator,
    legal_anchors,
    score,
    weigh,
)
from .tree import Prompts


@dataclass(frozen=True)
class Variant:
    """What a method's name stands for."""

    members: int
    prefix: int
    consecutive: bool
    points: int
    objective: str
    depth_weight: float


VARIANTS: dict[str, Variant] = {
    "bita": Variant(1, 16, True, 64, "ce", 1.0),
    "ppd": Variant(2, 0, False, 32, "kl", 0.8),
    "pass": Variant(1, 0, False, 32, "ce", 1.0),
}
# As `hang` (models/tree.py) hangs them in drafting: each sees its own member of the tokens before it, of one member all.
RULE = MaskRule("inclusive", "member")


@dataclass(frozen=True)
class PromptTokensConfig:
    """Settings of prompt tokens. Where null is allowed it stands for the variant's own value."""

    variant: Literal["bita", "ppd", "pass"] = "bita"
    """Whose method; see above."""
    tokens: int = 3
    """M, special tokens, that is draft depths (BiTA's and PPD's code: 3)."""
    members: int | None = None
    """Virtual tokens per special token, side by side; null = PPD: 2 (its extra rows cost verification), others: 1."""
    prefix: int | None = None
    """Trained keys and values per layer and head, seen by special tokens alone; null = BiTA: 16 (its code), others: 0."""
    points: int | None = None
    """Places per document where the tokens are trained; null = BiTA: 64 in a row, others: 32 at random."""
    objective: str | None = None
    """Loss per depth; null = PPD: kl, others: ce."""
    depth_weight: float | None = None
    """Depth d weighs depth_weight ** (d - 1); null = PPD: 0.8, others: 1."""
    oov: Oov = "renormalise"
    """Teacher mass outside the draft vocabulary: renormalise, mask (rows whose argmax is outside) or tail."""

    def __post_init__(self) -> None:
        if self.variant not in VARIANTS:
            raise ValueError(f"prompt_tokens: variant must be one of {', '.join(VARIANTS)}, got {self.variant!r}")
        own = self.resolved()
        check_loss_settings(own.objective, self.oov, own.depth_weight, self.tokens, "prompt_tokens")
        if own.members < 1 or own.points < 1 or own.prefix < 0:
            raise ValueError(
                "prompt_tokens: members and points must be at least 1 and prefix at least 0, got "
                f"{own.members}, {own.points} and {own.prefix}"
            )

    def resolved(self) -> Variant:
        """The variant, with what is set here."""
        names = ("members", "prefix", "points", "objective", "depth_weight")
        given: dict[str, Any] = {name: getattr(self, name) for name in names if getattr(self, name) is not None}
        return replace(VARIANTS[self.variant], **given)


class PromptTokens(nn.Module):
    """Prompt tokens; see `models/drafter.py` for the contract. `prompts`, `extra_table_XD` and `prefix_kv` tell the
    runtime which rows to hang on the nodes; `start` reads what became of those on the accepted one."""

    method = "prompt_tokens"
    Config = PromptTokensConfig
    draft_needs = frozenset({"module"})
    loss_needs = frozenset({"ids", "kv", "module", "teacher"})
    taps: tuple[int, ...] = ()
    d2t_W: Tensor | None
    t2d_V: Tensor | None

    def __init__(self, config: PromptTokensConfig, facts: TargetFacts, draft_ids: Tensor | None = None) -> None:
        super().__init__()
        self.config, self.facts, self.variant = config, facts, config.resolved()
        self.parallel = self.max_depth = config.tokens
        self.prompts = Prompts(config.tokens, self.variant.members)
        self.objective = parse_objective(self.variant.objective)
        self.vocab = register_vocabulary(self, facts, draft_ids)
        self.prompt_embed = nn.Parameter(torch.zeros(config.tokens * self.variant.members, facts.width))
        shape = (facts.layers, 2, facts.kv_heads, self.variant.prefix, facts.head_dim)
        self.prefix_kv = nn.Parameter(0.02 * torch.randn(shape)) if self.variant.prefix else None
        self.target_head: TargetHead = refuse_unbound

    @property
    def extra_table_XD(self) -> Tensor:
        """Input embeddings, row token * members + member."""
        return self.prompt_embed

    def bind(self, target: Any) -> None:
        """Take the target's head."""
        self.target_head = target.head

    @torch.no_grad()
    def init_from_target(self, target: Any) -> None:
        """Start the embeddings around the mean one, half a standard deviation apart; then `bind`."""
        embed_VD = target.embed(torch.arange(self.facts.tokens, device=target.device)).float()
        apart_XD = torch.randn_like(self.prompt_embed) * 0.5
        self.prompt_embed.copy_(embed_VD.mean(0).cpu() + apart_XD * embed_VD.std(0).cpu())
        self.bind(target)

    def gather_members(self, hidden_BXD: Tensor) -> Tensor:
        """[B, X / n, D] the mean of each special token's virtual tokens."""
        b, x, width = hidden_BXD.shape
        n = self.prompts.members
        return hidden_BXD.reshape(b, x // n, n, width).mean(2)

    # Training

    def slots(self, batch: Batch) -> Slots:
        """Special tokens behind entry t, at t+1 .. t+M: the target gives the token t+1 by itself, slot i predicts the
        token t+1+i."""
        own, tokens = self.variant, self.config.tokens
        if own.consecutive:
            anchors_BT = consecutive_anchors(batch, legal_anchors(batch, "pair", ahead=1), own.points)
            slots = anchored(batch, anchors_BT, range(1, tokens + 1), ahead=1, shift=1, members=own.members)
        else:
            slots = append_at_cut(batch, tokens, own.members, own.points)
        return weigh(slots, "geometric", ratio=own.depth_weight)

    def denominators(self, batch: Batch, progress: float) -> dict[str, float]:
        """The weights of all special tokens."""
        return {"slots": denominator(self.slots(batch).merge_members(), "weights")}

    def loss(self, batch: Batch, target_out: TargetOut, progress: float) -> Terms:
        """Term `slots`: the objective on what the special tokens predict."""
        assert target_out.head is not None
        slots = self.slots(batch)
        index_BQ = (slots.depth_BQ - 1).clamp(min=0) * self.prompts.members + slots.member_BQ
        hidden_BQD = run_slots(target_out, batch, slots, RULE, self.prompt_embed[index_BQ], self.prefix_kv)
        merged = slots.merge_members()
        hidden_RD = self.gather_members(hidden_BQD).flatten(0, 1)[merged.flat_R]
        logits = target_out.logits(hidden_RD, self.d2t_W)
        return score(
            logits,
            merged,
            batch,
            target_out,
            self.d2t_W,
            self.t2d_V,
            self.objective,
            self.config.oov,
            depths=self.config.tokens,
        )

    forward = loss

    # Drafting

    def init(self, prefill: Prefill) -> None:
        """Nothing is kept between drafts."""

    def start(self, state: None, commit: Commit) -> tuple[None, Level]:
        """The levels of all depths, from the rows that hung on the accepted node; before the first verification there
        are none."""
        b, k = len(commit.anchor_B), self.config.tokens
        if commit.extra_out is None:
            zeros_BKW = torch.zeros(b, k, self.vocab, device=commit.anchor_B.device)
            return state, Level(zeros_BKW, torch.zeros_like(zeros_BKW[..., 0], dtype=torch.bool))
        hidden_BXD, valid_BX = commit.extra_out.below_accepted(k * self.prompts.members)
        valid_BK = valid_BX.unflatten(1, (k, self.prompts.members)).all(2) & (commit.counts_B > 0)[:, None]
        logits_BKW = self.target_head(self.gather_members(hidden_BXD), self.d2t_W)
        return state, make_level(logits_BKW, valid_BK, self.d2t_W, self.facts.tokens)

    def extend(self, state: None, tokens_BN: Tensor, parents_BN: Tensor) -> tuple[None, Level]:
        """Never asked for: every depth comes from `start`."""
        raise ValueError(
            f"prompt_tokens has {self.config.tokens} tokens and gives all their levels at once: draft no deeper"
        )

    def reset(self, state: None, rows: Tensor) -> None:
        """Nothing to forget."""
