"""PARD: a small language model that drafts K tokens in one pass, by mask tokens behind the text.

An, Bai, Liu, Li, Barsoum, "PARD: Accelerating LLM Inference with Low-Cost PARallel Draft Model Adaptation"
(arXiv:2504.18583). The model is a whole causal language model; an id of the vocabulary that texts do not hold is the mask
token, the same at every depth (section 3.1). The row of the anchor predicts depth 1 as in any language model, the j-th
mask behind it depth j + 1. Training puts masks behind every token of a text at once, each group with a view of the text
up to its anchor and of its own earlier masks, and keeps a falling share of them: conditional drop-token (section 3.2).

Drafting reads the text alone and the loss the data's tokens, so that one drafter serves every target with its tokenizer
(section 3.1, "target independence"). An objective with another loss than ce reads the target's states in training.

Differences from the authors' code, by name: here only tokens of answers are labels (there every token is); seeds of
drop-token are drawn per document, among supervised pairs; a batch row's noise is its own.

Test: pytest tests/test_pard.py tests/test_methods.py tests/test_parity.py
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn

from ..losses.distill import Oov
from ..losses.objective import parse_objective
from .cache import Cache
from .drafter import Batch, Commit, Level, Prefill, TargetFacts, TargetOut, Terms
from .layers import check_loss_settings, make_level, register_vocabulary
from .mask_id import choose_mask_id
from .slots import Denominator, MaskRule, Slots, cod, denominator, dense_mask, fill, real, score, weigh
from .small_lm import Body, LMConfig, adopt, behind, bound, random_model, small_model, tables_kept
from .target import Target

RULE = MaskRule(context="inclusive", intra="causal")


@dataclass(frozen=True)
class PardConfig:
    """Settings of a PARD drafter."""

    lm: LMConfig = field(default_factory=LMConfig)
    """The language model and its first weights."""
    depths: int = 8
    """Tokens per pass (PARD's code: para_num 8)."""
    ratio: float = 0.7
    """Share of the masks of one depth that is kept at the next; 1 keeps all (PARD, section 3.2)."""
    least: float = 0.2
    """Least share of a document's pairs that is kept at any depth (PARD, section 3.2: r_min)."""
    mask_id: int | None = None
    """Id of the mask token, one that texts do not hold; null = chosen by the rule of models/mask_id.py."""
    objective: str = "ce"
    """Loss per slot (PARD: the data's tokens). With ce alone no state of the target is read."""
    denominator: Denominator = "slots"
    """What the sum over slots is divided by (PARD: the mean over all that are kept)."""
    depth_weight: float = 1.0
    """Depth d weighs depth_weight ** (d - 1) (PARD: all alike)."""
    oov: Oov = "renormalise"
    """Teacher mass outside the draft vocabulary: renormalise, mask (rows whose argmax is outside) or tail."""

    def __post_init__(self) -> None:
        check_loss_settings(self.objective, self.oov, self.depth_weight, self.depths, "pard")
        if not 0 < self.ratio <= 1 or not 0 <= self.least <= 1:
            raise ValueError(
                f"pard: ratio must lie in (0, 1] and least in [0, 1], got ratio={self.ratio}, least={self.least}"
            )
        if self.denominator not in ("slots", "weights"):
            raise ValueError(f"pard: denominator must be slots or weights, got {self.denominator!r}")


class Pard(nn.Module):
    """A PARD drafter; see `models/drafter.py` for the contract. `start` returns all levels at once."""

    method = "pard"
    Config = PardConfig
    draft_needs = frozenset({"ids"})
    loss_needs = frozenset({"ids", "teacher"})
    taps: tuple[int, ...] = ()
    d2t_W: Tensor | None
    t2d_V: Tensor | None

    def __init__(self, config: PardConfig, facts: TargetFacts, draft_ids: Tensor | None = None) -> None:
        """The model is built when its architecture is known, here or by `init_from_target`."""
        super().__init__()
        self.config, self.facts = config, facts
        self.parallel = self.max_depth = config.depths
        self.objective = parse_objective(config.objective)
        if all(name == "ce" for _, name in self.objective):
            self.loss_needs = frozenset({"ids"})
        self.vocab = register_vocabulary(self, facts, draft_ids)
        self.body: Body | None = None
        if config.lm.architecture is not None:
            self.body = adopt(self, random_model(config.lm.architecture), config.lm)

    def init_from_target(self, target: Target) -> None:
        """Give the model its first weights, as `config.lm` says, and choose the mask token; then `bind`."""
        lm, model, tokenizer = small_model(self.config.lm, target)
        rows = model.get_input_embeddings().weight.shape[0]
        if rows != target.facts.vocab or (
            tokenizer is not None and tokenizer.get_vocab() != target.tokenizer.get_vocab()
        ):
            raise ValueError(
                f"pard: the model has {rows} rows and a vocabulary of its own, {target.facts.name} has "
                f"{target.facts.vocab}: PARD and the engines that serve it need the target's (draft_model does not)"
            )
        mask_id = choose_mask_id(target, self.config.mask_id, "pard")
        self.config = replace(self.config, lm=lm, mask_id=mask_id)
        self.body = adopt(self, model, lm)
        self.bind(target)

    def bind(self, target: Target) -> None:
        """Take the target's tokenizer. Raises ValueError when the model's rows are not its."""
        if self.body is None or self.config.mask_id is None:
            raise ValueError("this PARD model has no weights yet: call init_from_target")
        own = self.body.bind(target.tokenizer)
        if own.facts.vocab != target.facts.vocab:
            raise ValueError(f"pard: the model has {own.facts.vocab} rows, {target.facts.name} {target.facts.vocab}")

    def _apply(self, fn: Callable[..., Any], recurse: bool = True) -> Pard:
        with tables_kept(self):
            return super()._apply(fn, recurse)

    @property
    def run(self) -> Target:
        """The model behind the target's protocol. Raises ValueError before `bind`."""
        return bound(self.body)

    # Training

    def slots(self, batch: Batch) -> Slots:
        """The masks behind the text that this step keeps, depths 2 and on: the text itself is depth 1. Held-out figures
        (evaluation mode) are of all masks."""
        return cod(batch, self.config.depths, self.config.ratio if self.training else 1.0, self.config.least)

    def predictions(self, slots: Slots, batch: Batch) -> Slots:
        """[B, T + Q] everything that predicts: the text's tokens, then the masks."""
        return weigh(slots.with_context(batch), "geometric", ratio=self.config.depth_weight)

    def denominators(self, batch: Batch, progress: float) -> dict[str, float]:
        """The slots that are trained (or their weights): data and seeded noise alone."""
        return {"slots": denominator(self.predictions(self.slots(batch), batch), self.config.denominator)}

    def loss(self, batch: Batch, target_out: TargetOut, progress: float) -> Terms:
        """Term `slots`: the objective, summed over text and masks."""
        slots = self.slots(batch)
        hidden_BTD = self.read(slots, batch)
        predictions = self.predictions(slots, batch)
        logits = self.run.logits(hidden_BTD.flatten(0, 1)[predictions.flat_R], self.d2t_W)
        config, maps = self.config, (self.d2t_W, self.t2d_V)
        return score(logits, predictions, batch, target_out, *maps, self.objective, config.oov, depths=config.depths)

    forward = loss

    def read(self, slots: Slots, batch: Batch) -> Tensor:
        """Last hidden states [B, T + Q, D] of text and masks."""
        assert self.config.mask_id is not None
        ids_BT = torch.cat([batch.ids_BT, fill(slots, batch, real(slots), self.config.mask_id)], dim=1)
        positions_BT = torch.cat([batch.positions_BT, slots.position_BQ], dim=1)
        see_BTT = dense_mask(slots, batch, RULE, context_rows=True)
        return self.run.forward(ids_BT, positions_BT, see_BTA=see_BTT).last_hidden_BTD

    # Drafting

    @property
    def on_device(self) -> bool:
        """Whether a draft asks the device for nothing (inference/device_step.py)."""
        return self.run.runner == "lean"

    def init(self, prefill: Prefill) -> Cache:
        """An empty state; K slots more than asked for, for the anchor and the masks."""
        return self.run.new_cache(prefill.rows, prefill.slots + self.parallel)

    def start(self, state: Cache, commit: Commit) -> tuple[Cache, Level]:
        """Read the committed tokens, the anchor and K - 1 masks; the levels of all depths. What stood behind the
        committed tokens before is forgotten."""
        assert self.config.mask_id is not None
        b, k = len(commit.counts_B), self.parallel
        device = commit.ids_BT.device
        masks_Bk = torch.full((b, k - 1), self.config.mask_id, device=device)
        ids_BT = behind(commit.ids_BT, commit.counts_B, torch.cat([commit.anchor_B[:, None], masks_Bk], dim=1))
        positions_BT = state.lengths_B[:, None] + torch.arange(ids_BT.shape[1], device=device)
        positions_BT = positions_BT.clamp(max=self.run.facts.max_positions - 1)  # padding, or said to be invalid
        hidden_BTD = self.run.forward(ids_BT, positions_BT, cache=state).last_hidden_BTD
        index_BK = commit.counts_B[:, None] + torch.arange(k, device=device)
        hidden_BKD = hidden_BTD[torch.arange(b, device=device)[:, None], index_BK]
        state.commit(commit.counts_B)
        inside_BK = state.lengths_B[:, None] + torch.arange(k, device=device) < self.run.facts.max_positions
        valid_BK = (commit.counts_B > 0)[:, None] & inside_BK
        return state, make_level(self.run.head(hidden_BKD, self.d2t_W), valid_BK, self.d2t_W, self.facts.tokens)

    def extend(self, state: Cache, tokens_BN: Tensor, parents_BN: Tensor) -> tuple[Cache, Level]:
        """Never asked for: every depth comes from `start`."""
        raise ValueError(f"pard gives its {self.parallel} levels at once: draft no deeper")

    def reset(self, state: Cache, rows: Tensor) -> Cache:
        state.reset(rows)
        return state
