"""DSpark: DFlash whose slots are corrected one after another, and which knows how far to trust a draft.

"DSpark" (arXiv:2607.05147), three changes to DFlash (dflash.py, whose backbone this is): the anchor's slot predicts
too, so that B slots draft B tokens; a *slot head* (slot_heads.py) adds to each slot's logits what the token chosen
before it tells; a *confidence head* sigmoid(w . [h_k; W1[x_{k-1}]] + b) foresees the chance alpha_k that the token of
slot k is accepted, given that those before it were. A draft is one pass of the backbone and K tiny steps.

Loss: 0.1 CE (data's token) + 0.9 L1(p, q) + 1.0 BCE(confidence, alpha), each weighed by exp(-k / gamma) and divided by
the sum of the weights; alpha = sum min(p, q) of the corrected draft, without gradient. L1 is the full sum |p - q|, twice
the total variation: `0.9*tv` is half of it (tests show the difference).

Alignment as in dflash.py: the paper's slot k of a block at anchor a predicts token a + k + 1, that is depth d = k + 1
after our anchor at t + 1; the token before it (x_{k-1} in the paper) is the anchor at d = 1, else the token of depth
d - 1: the data's in training, the drafted one when drafting.

Other heads: `gru` with `sample_from_anchor`, `objective: ce`, `base_share: 0.5` and `confidence: false` is Domino, whose
loss goes over from the backbone's own logits to the corrected ones; `pairs` is the selector of DFlash 2 (its logits
are those of a slot's likeliest tokens alone; loss: the objective on the backbone's logits, and cross-entropy over the
candidates, where the data's token is one of them), without its convolutions.

Calibration (section 3.2.1): raw confidence is too high, and what a scheduler reads is its product along the draft. So
`calibrate` fits one temperature per depth, from left to right, those before it fixed, on held-out data: the one that
brings the product nearest to how often a draft survives so far.

Parameters bear the names of serving engines' checkpoints. Test: pytest tests/test_dspark.py tests/test_methods.py
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..losses.distill import Logits, Oov
from ..losses.objective import parse_objective
from .dflash import (
    BlockState,
    BlockWeight,
    block_slots,
    block_states,
    build_backbone,
    check_block_settings,
    draft_block,
    drafted_tokens,
    init_block,
    start_backbone,
)
from .drafter import Batch, Commit, Level, Prefill, TargetFacts, TargetOut, Terms
from .layers import RMSNorm, Rotary, TargetEmbed, TargetHead, make_level, register_vocabulary
from .slot_heads import Domino, Markov, Pairs, SlotHead, teacher_forced
from .slots import Cut, Denominator, Legal, Slots, at, denominator, score

Head = Literal["markov", "gated", "rnn", "gru", "pairs", "none"]


@dataclass(frozen=True)
class DSparkConfig:
    """Settings of a DSpark drafter."""

    block: int = 7
    """Slots of a block, the anchor's with them (DSpark: 7; in production 5)."""
    layers: int = 5
    """Layers of the backbone (DSpark: 5)."""
    sample_from_anchor: bool = True
    """The anchor's slot predicts too, so that a block drafts as many tokens as it has slots (DSpark)."""
    head: Head = "markov"
    """Slot head: markov (DSpark), gated, rnn (its variants), gru (Domino), pairs (DFlash 2's selector) or none."""
    rank: int = 256
    """Width of the head's codes (DSpark, Domino, DFlash 2: 256)."""
    gru_size: int = 1024
    """Width of the state of `gru` (Domino: 1024)."""
    clean_depths: int = 1
    """Depths that `gru` leaves to the backbone (Domino: 1)."""
    candidates: int = 16
    """Likeliest tokens of a slot that `pairs` chooses from (DFlash 2: 16)."""
    confidence: bool = True
    """Train the confidence head."""
    confidence_factor: float = 1.0
    """Factor of its loss (DSpark: 1)."""
    temperatures: tuple[float, ...] | None = None
    """Temperature of the confidence per depth, as `calibrate` fits them after training; null = 1."""
    base_share: float = 0.0
    """Share of training over which the loss goes over from uncorrected to corrected logits (Domino: 0.5); 0 = at once."""
    causal: bool = False
    """Slots see earlier slots alone (JetSpec); false: the whole block (DFlash)."""
    taps: tuple[int, ...] | None = None
    """Residual streams h[k] of the target, ascending; null = as many as layers, spread from h[2] to h[L - 2] (DFlash)."""
    anchors: int | None = 512
    """Blocks per document and step, at random places (DSpark: 512); null = one for every place. Held-out figures take 512 or more."""
    legal: Legal = "pair"
    """Where blocks may start: pair (SpecForge, DeepSpec), supervised (speculators) or full_block (Automodel)."""
    cut: Cut = "run"
    """Labels behind a gap in the supervision: run = not trained (DeepSpec), mask = trained (SpecForge, speculators)."""
    variable_prefix: bool = False
    """Show each block its first l true tokens, l of 1 .. B - 1 drawn with chance 0.9 ** l (D2SD, which draws from 2 on). A way
    of training: our runtime drafts from the anchor alone, it does not draft anew behind a part of a block."""
    objective: str = "0.1*ce + 0.9*l1"
    """Loss per slot (DSpark: 0.1 cross-entropy with the data's token, 0.9 L1 distance to the target's distribution)."""
    weight: BlockWeight = "exp"
    """Weights of depths: exp (DSpark), dpace (from the draft's own probabilities, arXiv:2605.18810) or uniform."""
    gamma: float = 4.0
    """Depth d weighs exp(-(d - 1) / gamma) under exp (DSpark: 4)."""
    denominator: Denominator = "weights"
    """The loss is divided by the sum of weights (DeepSpec), the number of slots (speculators) or of blocks."""
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
        check_block_settings(self, "dspark")
        known = ("markov", "gated", "rnn", "gru", "pairs", "none")
        if self.head not in known:
            raise ValueError(f"dspark: head must be one of {', '.join(known)}, got {self.head!r}")
        for name in ("rank", "gru_size", "candidates"):
            if getattr(self, name) < 1:
                raise ValueError(f"dspark: {name} must be at least 1, got {getattr(self, name)}")
        k = drafted_tokens(self)
        if not 0 <= self.clean_depths < k and self.head == "gru":
            raise ValueError(f"dspark: clean_depths must lie in 0..{k - 1}, got {self.clean_depths}")
        if not 0 <= self.base_share <= 1:
            raise ValueError(f"dspark: base_share is a share of training in 0..1, got {self.base_share}")
        if self.base_share and self.head in ("none", "pairs"):
            raise ValueError(f"dspark: base_share needs a head that corrects all logits, head is {self.head!r}")
        if not 0 < self.confidence_factor < float("inf"):
            raise ValueError(f"dspark: confidence_factor must be positive, got {self.confidence_factor}")
        if self.temperatures is not None and (len(self.temperatures) != k or min(self.temperatures) <= 0):
            raise ValueError(f"dspark: temperatures must be {k} positive numbers or null, got {self.temperatures}")
        if self.temperatures is not None and not self.confidence:
            raise ValueError("dspark: temperatures are for the confidence head, and confidence is false")


class Confidence(nn.Module):
    """A linear map to the logit of the chance that a slot's token is accepted."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.proj = nn.Linear(width, 1)

    def forward(self, x_XC: Tensor) -> Tensor:
        """[X] logits, in fp32 at least."""
        logit_X = self.proj(x_XC)[..., 0]
        return logit_X.to(torch.promote_types(logit_X.dtype, torch.float32))


@dataclass
class DSparkState:
    """A draft in progress. Index 0 of M is the anchor, j + 1 the j-th node given to `extend`; `head_BMS` is the slot
    head's state after each one's token."""

    block: BlockState
    hidden_BKD: Tensor
    logits_BKW: Tensor  # the backbone's own
    head_BMS: Tensor
    depth_BM: Tensor


class DSpark(nn.Module):
    """A DSpark drafter; see `models/drafter.py` for the contract. `start` returns the levels of all depths; with a slot
    head (`sequential`) only the first is corrected, and `extend` gives the others below the tokens taken."""

    method = "dspark"
    Config = DSparkConfig
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

    def __init__(self, config: DSparkConfig, facts: TargetFacts, draft_ids: Tensor | None = None) -> None:
        super().__init__()
        self.config, self.facts = config, facts
        self.parallel = self.max_depth = drafted_tokens(config)
        self.sequential = config.head != "none"
        self.objective = parse_objective(config.objective)
        self.vocab = register_vocabulary(self, facts, draft_ids)
        markov = config.head in ("markov", "gated", "rnn")
        self.confidence_head: Confidence | None = None
        if config.confidence:
            self.confidence_head = Confidence(facts.width + markov * config.rank)
        build_backbone(self, config, facts, self.method)
        # Under the names of the checkpoints, and beside them as one object that has the interface of slot heads.
        self.markov_head: Markov | None = None
        self._slot_head: list[SlotHead] = []
        if markov:
            self.markov_head = Markov(config.head, facts.width, facts.vocab, self.vocab, config.rank)
            self._slot_head = [self.markov_head]
        elif config.head == "gru":
            domino = Domino(facts.width, self.vocab, config.rank, config.gru_size, config.clean_depths)
            self.prefix_gru, self.embed_proj = domino.prefix_gru, domino.embed_proj
            self._slot_head = [domino]
        elif config.head == "pairs":
            self.pair_head = Pairs(facts.width, facts.vocab, self.vocab, config.rank, config.candidates)
            self._slot_head = [self.pair_head]

    @property
    def slot_head(self) -> SlotHead | None:
        """The head that corrects the slots; None without one."""
        return self._slot_head[0] if self._slot_head else None

    def bind(self, target: Any) -> None:
        """Take the target's embedding and head, which drafting reads and writes through."""
        self.target_embed, self.target_head = target.embed, target.head

    def init_from_target(self, target: Any) -> None:
        """Start the final norm from the target's and a Markov head from its embeddings, and choose the mask id; then
        `bind`."""
        start_backbone(self, target, self.method)
        if self.markov_head is not None:
            self.markov_head.start_from(target.embed(torch.arange(self.facts.vocab, device=target.device)))
        self.bind(target)

    def confidence_logits(self, hidden_XD: Tensor, previous_X: Tensor) -> Tensor:
        """[X] of the slots behind `previous_X` (target ids)."""
        assert self.confidence_head is not None
        if self.markov_head is not None:
            hidden_XD = torch.cat([hidden_XD, self.markov_head.embed(previous_X).to(hidden_XD.dtype)], dim=-1)
        return self.confidence_head(hidden_XD)

    # Training

    def denominators(self, batch: Batch, progress: float) -> dict[str, float]:
        """The sum of weights, or the count of slots or blocks; the same for every term."""
        config = self.config
        slots, _ = block_slots(self, batch)
        count = denominator(slots, config.denominator, config.weight)
        used = {"slots": True, "base": config.head == "pairs" or config.base_share > 0, "confidence": config.confidence}
        return {name: count for name, asked in used.items() if asked}

    def loss(self, batch: Batch, target_out: TargetOut, progress: float) -> Terms:
        """Terms: `slots`, the objective on the corrected logits (with `pairs`: cross-entropy over the candidates);
        `base`, the objective on the backbone's own, where the settings ask for it; `confidence`."""
        terms, _ = self.losses(batch, target_out, progress)
        return terms

    forward = loss

    def losses(self, batch: Batch, target_out: TargetOut, progress: float) -> tuple[Terms, tuple[Slots, Tensor]]:
        """`loss`, and beside it the slots with the confidence logits [R] of those that predict."""
        assert target_out.head is not None and target_out.embed is not None
        config, head = self.config, self.slot_head
        slots, shown_BQ = block_slots(self, batch)
        hidden_BQD = block_states(self, slots, shown_BQ, batch, target_out)
        flat_R = slots.flat_R
        hidden_RD = hidden_BQD.flatten(0, 1)[flat_R]
        before_BQ = at(batch.ids_BT, slots.label_BQ - 1)
        base: Logits
        if head is None:
            logits = base = target_out.logits(hidden_RD, self.d2t_W)
        else:  # a sum of two heads, or candidates alone: logits are formed
            base = target_out.head(hidden_RD, self.d2t_W)
            code_RC = self.codes(head, hidden_BQD, before_BQ, target_out.embed)[flat_R]
            logits = head.correct(base, code_RC)

        def scored(rows: Logits, objective: Any) -> Terms:
            return score(
                rows, slots, batch, target_out, self.d2t_W, self.t2d_V, objective, config.oov, config.weight,
                depths=self.max_depth,
            )  # fmt: skip

        if config.head == "pairs":
            assert isinstance(logits, Tensor) and isinstance(base, Tensor)
            own_loss = scored(base, self.objective).losses["slots"]
            terms = scored(logits.detach(), ((1.0, "tv"),))  # for its figures
            terms.losses = {"slots": self.selector_loss(logits, base, slots, batch), "base": own_loss}
        else:
            own = max(0.0, 1 - progress / config.base_share) if config.base_share else 0.0  # the backbone's part
            before = scored(base, self.objective).losses if own else {}
            terms = scored(logits, self.objective)
            if own:
                terms.losses = {"slots": terms.losses["slots"] * (1 - own), "base": before["slots"] * own}
        logits_R = hidden_RD.new_zeros(0)
        if config.confidence:
            assert terms.accept_R is not None
            logits_R = self.confidence_logits(hidden_RD, before_BQ.flatten()[flat_R])
            weight_R = slots.weight_BQ.flatten()[flat_R]
            accept_R = terms.accept_R.to(logits_R.dtype).clamp(0, 1)
            missed_R = F.binary_cross_entropy_with_logits(logits_R, accept_R, reduction="none")
            terms.losses["confidence"] = config.confidence_factor * (missed_R * weight_R).sum()
            off_R = (logits_R.detach().sigmoid() - accept_R).abs()
            terms.metrics["confidence_error"] = off_R.sum(), torch.tensor(float(len(flat_R)))
        return terms, (slots, logits_R)

    def codes(self, head: SlotHead, hidden_BQD: Tensor, before_BQ: Tensor, embed: TargetEmbed) -> Tensor:
        """The head's codes [B * Q, C], blocks unrolled from their first slot that predicts; slots before it have none."""
        block, first = self.config.block, self.config.block - self.max_depth
        blocks = before_BQ.numel() // block
        hidden_RKD = hidden_BQD.reshape(blocks, block, hidden_BQD.shape[-1])[:, first:]
        before_RK = before_BQ.reshape(blocks, block)[:, first:]
        code_RKC = teacher_forced(head, hidden_RKD, before_RK, embed)
        return F.pad(code_RKC, (0, 0, first, 0)).flatten(0, 1)

    def selector_loss(self, logits_RW: Tensor, base_RW: Tensor, slots: Slots, batch: Batch) -> Tensor:
        """Weighed cross-entropy over each slot's candidates, of the slots whose token is one of them."""
        labels_R = slots.label_ids(batch)
        draft_R = labels_R if self.t2d_V is None else self.t2d_V[labels_R]
        kept_RC = base_RW.topk(min(self.config.candidates, base_RW.shape[-1]), dim=-1).indices
        hit_RC = kept_RC == draft_R[:, None]
        wide = torch.promote_types(logits_RW.dtype, torch.float32)
        log_q_RC = logits_RW.gather(-1, kept_RC).to(wide).log_softmax(-1)
        return -(log_q_RC.masked_fill(~hit_RC, 0).sum(-1) * slots.weight_BQ.flatten()[slots.flat_R]).sum()

    # Calibration

    @torch.no_grad()
    def calibrate(self, batches: Sequence[Batch], states_of: Callable[[Batch], TargetOut]) -> None:
        """Set `config.temperatures` from held-out data. Without a confidence head, or without a whole block in the
        data, nothing changes."""
        if not self.config.confidence:
            return
        device, training = self.norm.weight.device, self.training
        self.eval()
        logits, accepts = [], []
        for batch in (b.to(device) for b in batches):
            terms, (slots, logits_R) = self.losses(batch, states_of(batch), 1.0)
            table_2QK = torch.full((2, slots.weight_BQ.numel() // self.config.block, self.max_depth), torch.nan)
            row_R = slots.flat_R.cpu() // self.config.block
            step_R = slots.drafted_BQ.flatten()[slots.flat_R].cpu() - 1
            assert terms.accept_R is not None
            table_2QK[:, row_R, step_R] = torch.stack([logits_R.cpu().float(), terms.accept_R.cpu().float()])
            whole_Q = table_2QK.isfinite().all(-1).all(0)
            logits.append(table_2QK[0, whole_Q])
            accepts.append(table_2QK[1, whole_Q])
        self.train(training)
        if sum(map(len, logits)):
            fitted = sequential_temperatures(torch.cat(logits), torch.cat(accepts))
            self.config = replace(self.config, temperatures=fitted)

    # Drafting

    def init(self, prefill: Prefill) -> DSparkState:
        block = init_block(self, prefill)
        zeros_B1 = torch.zeros(prefill.rows, 1, dtype=torch.int64, device=prefill.device)
        hidden_BKD = zeros_B1[..., None].to(self.norm.weight.dtype).expand(-1, self.max_depth, self.facts.width)
        return DSparkState(block, hidden_BKD, hidden_BKD, hidden_BKD, zeros_B1)

    def start(self, state: DSparkState, commit: Commit) -> tuple[DSparkState, Level]:
        """Take in the committed rows; the levels of all depths. With a slot head, those beyond the first are what the
        backbone says alone, and their confidence is that behind its likeliest tokens."""
        hidden_BKD = draft_block(self, state.block, commit)
        logits_BKW = self.target_head(hidden_BKD, self.d2t_W)
        valid_BK = (commit.counts_B > 0)[:, None].expand(-1, self.max_depth)
        depth_BK = torch.arange(self.max_depth, device=hidden_BKD.device).expand(len(hidden_BKD), -1)
        confidence_BK = None
        if self.confidence_head is not None:
            likely_BK = logits_BKW[:, :-1].argmax(-1)
            likely_BK = likely_BK if self.d2t_W is None else self.d2t_W[likely_BK]
            before_BK = torch.cat([commit.anchor_B[:, None], likely_BK], dim=1)
            confidence_BK = self.confidence(hidden_BKD, before_BK, depth_BK)
        size = 0 if self.slot_head is None else self.slot_head.state_size
        head_B1S = hidden_BKD.new_zeros(len(hidden_BKD), 1, size)
        state = DSparkState(state.block, hidden_BKD, logits_BKW, head_B1S, depth_BK[:, :1])
        if self.slot_head is not None:
            state.head_BMS, first_B1W = self.correct(state, commit.anchor_B[:, None], head_B1S, state.depth_BM)
            logits_BKW = torch.cat([first_B1W, logits_BKW[:, 1:]], dim=1)
        return state, replace(
            make_level(logits_BKW, valid_BK, self.d2t_W, self.facts.tokens), confidence_BN=confidence_BK
        )

    def extend(self, state: DSparkState, tokens_BN: Tensor, parents_BN: Tensor) -> tuple[DSparkState, Level]:
        """Add nodes (target ids) below their parents; the levels below them (none after the last slot)."""
        if self.slot_head is None:
            raise ValueError(f"dspark without a slot head gives all {self.parallel} levels at once: draft no deeper")
        rows_B1 = torch.arange(len(tokens_BN), device=tokens_BN.device)[:, None]
        depth_BN = state.depth_BM[rows_B1, parents_BN] + 1
        slot_BN = depth_BN.clamp(max=self.max_depth - 1)
        head_BNS, logits_BNW = self.correct(state, tokens_BN, state.head_BMS[rows_B1, parents_BN], slot_BN)
        confidence_BN = self.confidence(state.hidden_BKD[rows_B1, slot_BN], tokens_BN, slot_BN)
        level = make_level(logits_BNW, depth_BN < self.max_depth, self.d2t_W, self.facts.tokens)
        head_BMS = torch.cat([state.head_BMS, head_BNS], dim=1)
        state = replace(state, head_BMS=head_BMS, depth_BM=torch.cat([state.depth_BM, depth_BN], dim=1))
        return state, replace(level, confidence_BN=confidence_BN)

    def pair_scores(self, state: DSparkState, ids_BKC: Tensor, log_BKC: Tensor) -> Tensor:
        """[B, K - 1, C, C] log-probability of candidate b (draft ids) of depth d + 2 after candidate a of depth d + 1, for
        builders that grow a tree from all depths at once. A head with a state takes the first candidates before a as
        drafted. Without a head: what `log_BKC` says."""
        b, k, c = ids_BKC.shape
        if self.slot_head is None:
            return log_BKC[:, 1:, None].expand(b, k - 1, c, c)
        tokens_BKC = ids_BKC if self.d2t_W is None else self.d2t_W[ids_BKC]
        head_B1S, scores = state.head_BMS[:, :1], []
        for d in range(1, k):
            depth_BC = torch.full_like(tokens_BKC[:, 0], d)
            head_BCS, logits_BCW = self.correct(state, tokens_BKC[:, d - 1], head_B1S.expand(b, c, -1), depth_BC)
            valid_BC = torch.ones_like(depth_BC, dtype=torch.bool)
            log_BCW = make_level(logits_BCW, valid_BC, self.d2t_W, self.facts.tokens).logits_BNW.log_softmax(-1)
            scores.append(log_BCW.gather(2, ids_BKC[:, None, d].expand(b, c, c)))
            head_B1S = head_BCS[:, :1]
        return torch.stack(scores, dim=1)

    def reset(self, state: DSparkState, rows: Tensor) -> DSparkState:
        state.block.cache.reset(rows)
        return state

    def confidence(self, hidden_BND: Tensor, previous_BN: Tensor, depth_BN: Tensor) -> Tensor | None:
        """[B, N] the calibrated chance that the token below a node (of `depth_BN`, 0 = the anchor) is accepted."""
        if self.confidence_head is None:
            return None
        logits_BN = self.confidence_logits(hidden_BND, previous_BN)
        if self.config.temperatures is not None:
            heat_K = torch.tensor(self.config.temperatures, dtype=logits_BN.dtype, device=logits_BN.device)
            logits_BN = logits_BN / heat_K[depth_BN]
        return logits_BN.sigmoid()

    def correct(
        self, state: DSparkState, tokens_BN: Tensor, head_BNS: Tensor, slot_BN: Tensor
    ) -> tuple[Tensor, Tensor]:
        """The slot head's state after the tokens, and the corrected logits of the slots behind them (`slot_BN`, 0-based
        among those that predict, is also the tokens' own depth)."""
        assert self.slot_head is not None
        rows_B1 = torch.arange(len(tokens_BN), device=tokens_BN.device)[:, None]
        hidden_BND = state.hidden_BKD[rows_B1, slot_BN]
        head_BNS, code_BNC = self.slot_head.step(head_BNS, hidden_BND, tokens_BN, slot_BN + 1, self.target_embed)
        return head_BNS, self.slot_head.correct(state.logits_BKW[rows_B1, slot_BN], code_BNC)


# Sequential temperature scaling

TEMPERATURES = tuple(2.0 ** (e / 8) for e in range(-24, 25))  # 1/8 .. 8, the grid of the search
BINS = 10


def calibration_error(predicted_R: Tensor, happened_R: Tensor, bins: int = BINS) -> Tensor:
    """Expected calibration error: the mean distance, over bins of equal width, of what was foreseen from what
    happened, each weighed by its share of the rows."""
    bin_R = (predicted_R * bins).long().clamp(0, bins - 1)
    gap_C = torch.zeros(bins, dtype=predicted_R.dtype).index_add_(0, bin_R, predicted_R - happened_R)
    return gap_C.abs().sum() / max(1, len(predicted_R))


def sequential_temperatures(logits_RK: Tensor, accept_RK: Tensor) -> tuple[float, ...]:
    """One temperature per depth from R whole blocks: confidence logits, and the chance (or fact) that each depth's token
    is accepted, given those before. From left to right, the temperature of the grid with the smallest calibration error
    of the product so far; of equals, the one nearest to 1."""
    predicted_R, happened_R = torch.ones(len(logits_RK)), torch.ones(len(logits_RK))
    found = []
    for k in range(logits_RK.shape[1]):
        happened_R = happened_R * accept_RK[:, k]
        by_closeness = sorted(TEMPERATURES, key=lambda heat: (max(heat, 1 / heat), heat))
        errors = [
            float(calibration_error(predicted_R * (logits_RK[:, k] / heat).sigmoid(), happened_R))
            for heat in by_closeness
        ]
        found.append(by_closeness[errors.index(min(errors))])
        predicted_R = predicted_R * (logits_RK[:, k] / found[-1]).sigmoid()
    return tuple(found)
