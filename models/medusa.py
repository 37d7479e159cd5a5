"""Medusa: independent heads on the target's last hidden state, head k for the token k + 1 ahead of the anchor.

Cai et al., "Medusa: Simple LLM Inference Acceleration Framework with Multiple Decoding Heads" (arXiv:2401.10774),
section 2.1.1 (heads) and 2.2.1 (Medusa-1: frozen target). A head is residual blocks x + SiLU(W x + b), each with
weights of its own, W zero at first, then a projection to the vocabulary: its own, started from the target's head, or
the target's head itself (`head: shared`). Heads read the state after the final norm.

Parameters bear the names of serving engines' checkpoints (`blocks.{i}.layers.{j}`, `lm_heads.{i}`).
Test: pytest tests/test_methods.py tests/test_parity.py
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..kernels.medusa_heads import medusa_heads
from ..losses.distill import ByHead, Logits, Oov
from ..losses.objective import parse_objective
from .drafter import Batch, Commit, Level, Prefill, TargetFacts, TargetOut, Terms
from .layers import (
    Linear,
    TargetHead,
    check_loss_settings,
    head_rows,
    make_level,
    newest,
    refuse_unbound,
    register_vocabulary,
)
from .lean import mark
from .supervision import Rows, Scorer, pair_counts


@dataclass(frozen=True)
class MedusaConfig:
    """Settings of Medusa heads."""

    heads: int = 4
    """Heads, that is draft depths (Medusa, section 2.1.1: up to 5; 4 fit the chains that engines serve)."""
    layers: int = 1
    """Residual blocks per head (Medusa, section 2.1.1)."""
    head: Literal["own", "shared"] = "own"
    """`own`: each head has a vocabulary projection, started from the target's; `shared`: all read through the target's."""
    objective: str = "kl"
    """Loss per head. The paper takes the data's tokens (`ce`); the target's full distribution learns faster on little data."""
    depth_weight: float = 0.8
    """Head d weighs depth_weight ** (d - 1) (Medusa, section 2.2.1)."""
    oov: Oov = "renormalise"
    """Teacher mass outside the draft vocabulary: renormalise, mask (rows whose argmax is outside) or tail."""

    def __post_init__(self) -> None:
        check_loss_settings(self.objective, self.oov, self.depth_weight, self.heads, "medusa")
        if self.layers < 1:
            raise ValueError(f"medusa: layers must be at least 1, got {self.layers}")


class Blocks(nn.Module):
    """Residual blocks of one head."""

    def __init__(self, width: int, layers: int) -> None:
        super().__init__()
        linears = [Linear(width, width) for _ in range(layers)]
        for linear in linears:
            nn.init.zeros_(linear.weight)
        self.layers = nn.ModuleList(linears)

    def forward(self, x_XD: Tensor) -> Tensor:
        return self.rest(x_XD, 0)

    def rest(self, x_XD: Tensor, first: int = 1) -> Tensor:
        """The blocks from number `first` on."""
        for layer in list(self.layers)[first:]:
            x_XD = x_XD + F.silu(layer(x_XD))
        return x_XD


class Medusa(nn.Module):
    """Medusa heads; see `models/drafter.py` for the contract. `start` returns all levels at once."""

    method = "medusa"
    Config = MedusaConfig
    draft_needs = frozenset({"last_hidden"})
    loss_needs = frozenset({"ids", "last_hidden", "teacher"})
    on_device = True
    taps: tuple[int, ...] = ()
    d2t_W: Tensor | None
    t2d_V: Tensor | None
    blocks: Any  # nn.ModuleList of Blocks

    def __init__(self, config: MedusaConfig, facts: TargetFacts, draft_ids: Tensor | None = None) -> None:
        super().__init__()
        self.config, self.facts = config, facts
        self.parallel = self.max_depth = config.heads
        self.objective = parse_objective(config.objective)
        self.vocab = register_vocabulary(self, facts, draft_ids)
        self.blocks = nn.ModuleList([Blocks(facts.width, config.layers) for _ in range(config.heads)])
        if config.head == "own":
            self.lm_heads = nn.ModuleList([Linear(facts.width, self.vocab, bias=False) for _ in range(config.heads)])
        self.target_head: TargetHead = refuse_unbound
        self.stacked: tuple[list[tuple[int, int]], list[Tensor], tuple[Tensor, Tensor]] | None = None

    def first(self, anew: bool = False) -> tuple[Tensor, Tensor]:
        """Weights [K, D, D] and biases [K, D] of all heads' first blocks, which read the same state: a copy, made where
        they were moved or written to (the tensors are kept, so that no others can come to lie in their place). `anew`:
        filled again all the same, since writes through `param.data` are counted by nobody; where it lies, since a
        captured step reads it there."""
        layers = [blocks.layers[0] for blocks in self.blocks]
        marks = [mark(x) for layer in layers for x in (layer.weight, layer.bias)]
        if self.stacked is None or self.stacked[0] != marks or anew:
            with torch.inference_mode(False), torch.no_grad():
                weights, biases = [x.weight.detach() for x in layers], [x.bias.detach() for x in layers]
                if self.stacked is None or self.stacked[0] != marks:
                    self.stacked = marks, [*weights, *biases], (torch.stack(weights), torch.stack(biases))
                else:
                    for out, parts in zip(self.stacked[2], (weights, biases), strict=True):
                        torch.stack(parts, out=out)
        return self.stacked[2]

    def bind(self, target: Any) -> None:
        """Take the target's head, which shared heads read through."""
        self.target_head = target.head

    @torch.no_grad()
    def init_from_target(self, target: Any) -> None:
        """Start own heads from the target's rows; then `bind`."""
        if self.config.head == "own":
            for weight in self.lm_heads.parameters():
                weight.copy_(head_rows(target, self.d2t_W))
        self.bind(target)

    def predict(self, head: int, state_XD: Tensor, out: TargetOut) -> Logits:
        """Logits [X, W] of one head (0-based) for normed target states."""
        hidden_XD = self.blocks[head](state_XD.to(next(self.parameters()).dtype))
        if self.config.head == "shared":
            return out.logits(hidden_XD, self.d2t_W)
        own = self.lm_heads[head]
        assert isinstance(own, nn.Linear)
        return ByHead.of(hidden_XD, own.weight)

    # Training

    def denominators(self, batch: Batch, progress: float) -> dict[str, float]:
        """Training pairs per head."""
        return pair_counts(batch, self.config.heads)

    def loss(self, batch: Batch, target_out: TargetOut, progress: float) -> Terms:
        """Terms `depth_d`: the objective of head d - 1, summed over the pairs of depth d."""
        assert target_out.last_hidden_BTD is not None and target_out.head is not None
        config = self.config
        rows = Rows.of(batch, config.heads)
        scorer = Scorer(
            rows, batch, target_out, self.d2t_W, self.t2d_V, self.objective, config.oov, config.depth_weight
        )
        state_RD = rows.take(target_out.last_hidden_BTD)
        for depth, pairs_R in enumerate(rows.pairs, 1):
            scorer.add(depth, self.predict(depth - 1, state_RD[pairs_R], target_out))
        return scorer.terms()

    forward = loss

    # Drafting

    def init(self, prefill: Prefill) -> None:
        """Heads keep nothing of a request."""
        self.first(anew=True)

    def start(self, state: None, commit: Commit) -> tuple[None, Level]:
        """The levels of all depths, from the newest committed state."""
        assert commit.last_hidden_BTD is not None
        state_BD = newest(commit, commit.last_hidden_BTD)
        weight_KDD, bias_KD = self.first()
        hidden_BKD = medusa_heads(state_BD.to(weight_KDD.dtype), weight_KDD, bias_KD)
        if self.config.layers > 1:
            rest = [blocks.rest(hidden_BKD[:, k]) for k, blocks in enumerate(self.blocks)]
            hidden_BKD = torch.stack(rest, dim=1)
        if self.config.head == "own":
            logits_BKW = torch.stack([head(hidden_BKD[:, k]) for k, head in enumerate(self.lm_heads)], dim=1)
        else:  # the head's weights are read once for all depths
            logits_BKW = self.target_head(hidden_BKD.flatten(0, 1), self.d2t_W).unflatten(0, (-1, self.config.heads))
        valid_BK = (commit.counts_B > 0)[:, None].expand(-1, self.config.heads)
        return state, make_level(logits_BKW, valid_BK, self.d2t_W, self.facts.tokens)

    def extend(self, state: None, tokens_BN: Tensor, parents_BN: Tensor) -> tuple[None, Level]:
        """Never asked for: every depth comes from `start`."""
        raise ValueError(f"medusa has {self.config.heads} heads and gives all their levels at once: draft no deeper")

    def reset(self, state: None, rows: Tensor) -> None:
        """Nothing to forget."""
