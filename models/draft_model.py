"""A small language model as the drafter, as it stands or distilled from the target.

Speculative decoding as first described drafts with a smaller model of its own (Leviathan et al., arXiv:2211.17192; Chen
et al., arXiv:2302.01318). Distilling that model from the target raises acceptance: Zhou et al., "DistillSpec: Improving
Speculative Decoding via Knowledge Distillation" (arXiv:2310.08461), sections 3 and 4: any divergence between the two
distributions, on the data's answers or on the draft model's own samples (`on_policy`).

Training reads the text as any language model does; after the anchor's token, at every supervised pair of depth 1, its
distribution is scored against the target's. With the data's tokens as drafts depth d is the same computation d - 1
tokens later, so that there is one loss, `depth_1`, and deeper figures are metrics alone.

Own samples: before the target sees a batch, `rewrite` replaces the last answer of a seeded choice of documents by one
that the draft model draws, as long as the data's, from the answer's first token on (which at run time is the target's).
Counts stay the data's, so `denominators` needs no forward: where a sample ends early, what follows its end weighs nothing
in the sums. Draws are keyed by (seed, epoch, sample, position). The states of rewritten text cannot have been captured.

A draft model that is nobody's training needs none: `load_draft_model`. With another tokenizer than the target's it
proposes the tokens that both have (`models/intersection.py`); greedy and sampled output stay the target's own.

Test: pytest tests/test_draft_model.py tests/test_methods.py tests/test_parity.py
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn

from ..kernels import rng
from ..losses.distill import Oov
from ..losses.objective import parse_objective
from ..losses.probs import draw
from .cache import Cache
from .drafter import Batch, Commit, Level, Prefill, TargetFacts, TargetOut, Terms
from .intersection import intersect
from .layers import check_loss_settings, make_level, register_vocabulary
from .small_lm import Body, LMConfig, adopt, behind, bound, random_model, small_model, tables_kept
from .supervision import Rows, Scorer, pair_counts
from .target import Target, document_mask

CHOICE, SAMPLE = 1 << 24, 1 << 25  # streams of draws beside those of layers.keyed_uniform


@dataclass(frozen=True)
class DraftModelConfig:
    """Settings of a draft model."""

    lm: LMConfig = field(default_factory=LMConfig)
    """The language model and its first weights."""
    objective: str = "kl"
    """Divergence from the target, an expression over the table of losses (DistillSpec, section 4: best chosen per task)."""
    on_policy: float = 0.0
    """Share of documents whose last answer the draft model draws itself (DistillSpec, section 4; its best runs draw all
    or half). Needs states.source=live."""
    depths: int = 4
    """Depths that held-out figures report."""
    oov: Oov = "renormalise"
    """Teacher mass outside the draft vocabulary: renormalise, mask (rows whose argmax is outside) or tail."""

    def __post_init__(self) -> None:
        check_loss_settings(self.objective, self.oov, 1.0, self.depths, "draft_model")
        if not 0 <= self.on_policy <= 1:
            raise ValueError(f"draft_model: on_policy is a share in [0, 1], got {self.on_policy}")
        if self.on_policy and any(name == "ce" for _, name in parse_objective(self.objective)):
            raise ValueError(
                f"draft_model: objective {self.objective!r} with on_policy={self.on_policy}: ce would teach the draft model "
                "its own samples; use kl, reverse_kl, jsd, tv or another loss against the target"
            )

    @property
    def live(self) -> bool:
        """Whether the target must run beside the drafter: own samples have no captured states."""
        return self.on_policy > 0


@dataclass
class State:
    """A draft in progress. Index 0 of M is the anchor, j + 1 the j-th node given to `extend`: the cache's uncommitted
    tail holds them in this order."""

    cache: Cache
    position_B: Tensor  # the anchor's
    depth_BM: Tensor
    see_BMM: Tensor  # node i sees node j: itself and its ancestors


class DraftModel(nn.Module):
    """A small language model; see `models/drafter.py` for the contract."""

    method = "draft_model"
    Config = DraftModelConfig
    draft_needs = frozenset({"ids"})
    loss_needs = frozenset({"ids", "teacher"})
    taps: tuple[int, ...] = ()
    parallel = 1
    max_depth: int | None = None
    d2t_W: Tensor | None
    t2d_V: Tensor | None
    rows_W: Tensor | None  # the model's own ids of the draft vocabulary; None = all
    context_V: Tensor | None  # per target id the model's own; None = the same

    def __init__(self, config: DraftModelConfig, facts: TargetFacts, draft_ids: Tensor | None = None) -> None:
        """The model is built when its architecture is known, here or by `init_from_target`."""
        super().__init__()
        self.config, self.facts = config, facts
        self.objective = parse_objective(config.objective)
        self.vocab = register_vocabulary(self, facts, draft_ids)
        self.register_buffer("rows_W", None, persistent=False)
        self.register_buffer("context_V", None, persistent=False)
        self.tokenizer: Any = None  # the model's own, where it differs from the target's
        self.body: Body | None = None
        if config.lm.architecture is not None:
            self.body = adopt(self, random_model(config.lm.architecture), config.lm)

    def init_from_target(self, target: Target) -> None:
        """Give the model its first weights, as `config.lm` says; then `bind`."""
        lm, model, self.tokenizer = small_model(self.config.lm, target)
        self.config = replace(self.config, lm=lm)
        self.body = adopt(self, model, lm)
        self.bind(target)

    def bind(self, target: Target) -> None:
        """Take the target's tokenizer, and where the model has another one find the tokens that both have.

        Raises ValueError for a model of another vocabulary without a tokenizer of its own, or without a shared token.
        """
        if self.body is None:
            raise ValueError("this draft model has no weights yet: call init_from_target, or give lm.architecture")
        own = self.body.bind(self.tokenizer or target.tokenizer)
        device = own.device
        if (own.facts.vocab, own.facts.tokenizer_hash) == (target.facts.vocab, target.facts.tokenizer_hash):
            self.tokenizer, self.context_V, self.rows_W = None, None, self.d2t_W
            return
        if self.tokenizer is None:
            raise ValueError(
                f"this draft model has {own.facts.vocab} rows, {target.facts.name} {target.facts.vocab}: set the same "
                "vocab_size, or start from a checkpoint with a tokenizer (lm.start=model)"
            )
        shared = intersect(target, own)
        target_W, draft_W = shared.target_W, shared.draft_W
        if self.d2t_W is not None:
            inside_W = torch.isin(target_W, self.d2t_W.cpu())
            target_W, draft_W = target_W[inside_W], draft_W[inside_W]
        self.vocab = register_vocabulary(self, self.facts, target_W)
        self.rows_W, self.context_V = draft_W.to(device), shared.context_V.to(device)
        if self.d2t_W is not None and self.t2d_V is not None:
            self.d2t_W, self.t2d_V = self.d2t_W.to(device), self.t2d_V.to(device)

    def _apply(self, fn: Callable[..., Any], recurse: bool = True) -> DraftModel:
        with tables_kept(self):
            return super()._apply(fn, recurse)

    @property
    def run(self) -> Target:
        """The model behind the target's protocol. Raises ValueError before `bind`."""
        return bound(self.body)

    def read(
        self, ids_BT: Tensor, positions_BT: Tensor, see_BTA: Tensor | None = None, cache: Cache | None = None
    ) -> Tensor:
        """Last hidden states [B, T, D'] after target ids."""
        own_BT = ids_BT if self.context_V is None else self.context_V[ids_BT]
        return self.run.forward(own_BT, positions_BT, see_BTA=see_BTA, cache=cache).last_hidden_BTD

    def say(self, hidden_XD: Tensor) -> Tensor:
        """Logits [X, W] in draft ids."""
        return self.run.head(hidden_XD, self.rows_W)

    # Training

    @torch.no_grad()
    def rewrite(self, batch: Batch, progress: float) -> Batch:
        """The batch with own samples in the place of a share `on_policy` of its last answers, supervised up to the end
        token if one was drawn."""
        if not self.config.on_policy:
            return batch
        seed = rng.fold(batch.seed, batch.epoch + 1)
        spans = [
            span
            for span in last_answers(batch)
            if float(rng.uniform(seed, rng.NOISE, 0, span.sample, CHOICE)) < self.config.on_policy
        ]
        if not spans:
            return batch
        drawn_SN = self._sample(batch, spans, seed)
        ids_BT, supervised_BT = batch.ids_BT.clone(), batch.supervised_BT.clone()
        ends = torch.tensor(self.facts.eos_ids, dtype=torch.int64, device=ids_BT.device)
        for span, drawn_N in zip(spans, drawn_SN, strict=True):
            fresh = slice(span.anchor + 1, span.end)
            drawn_N = drawn_N[: span.end - span.anchor - 1]
            ids_BT[span.row, fresh] = drawn_N
            ended_N = torch.isin(drawn_N, ends)
            supervised_BT[span.row, fresh] = ended_N.cumsum(0) - ended_N.long() == 0  # the end itself counts
        return replace(batch, ids_BT=ids_BT, supervised_BT=supervised_BT)

    def _sample(self, batch: Batch, spans: list[Span], seed: int) -> Tensor:
        """int64 [S, N] target ids drawn at temperature 1 behind each span's anchor; N = the longest span's number."""
        device = batch.ids_BT.device
        lengths_S = torch.tensor([span.anchor + 1 - span.start for span in spans], device=device)
        first_S = torch.stack([batch.positions_BT[span.row, span.anchor] for span in spans]) + 1
        samples_S = torch.tensor([span.sample for span in spans], device=device)
        steps = max(span.end - span.anchor - 1 for span in spans)
        text_ST = torch.zeros(len(spans), int(lengths_S.max()), dtype=torch.int64, device=device)
        for row_T, span in zip(text_ST, spans, strict=True):
            row_T[: span.anchor + 1 - span.start] = batch.ids_BT[span.row, span.start : span.anchor + 1]
        cache = self.run.new_cache(len(spans), text_ST.shape[1] + steps)
        at_ST = torch.arange(text_ST.shape[1], device=device).expand_as(text_ST)
        hidden_SD = self.read(text_ST, at_ST, cache=cache)[torch.arange(len(spans), device=device), lengths_S - 1]
        cache.commit(lengths_S)
        drawn: list[Tensor] = []
        for step in range(steps):
            level = make_level(self.say(hidden_SD), lengths_S > 0, self.d2t_W, self.facts.tokens)
            coins_S = rng.uniform(seed, rng.NOISE, first_S + step, samples_S, SAMPLE)
            draft_S = draw(level.logits_BNW.softmax(-1), coins_S)
            drawn.append(draft_S if self.d2t_W is None else self.d2t_W[draft_S])
            if step + 1 < steps:
                hidden_SD = self.read(drawn[-1][:, None], cache.lengths_B[:, None], cache=cache)[:, 0]
                cache.commit(torch.ones_like(lengths_S))
        return torch.stack(drawn, dim=1)

    def denominators(self, batch: Batch, progress: float) -> dict[str, float]:
        """Training pairs of depth 1, of the data."""
        return pair_counts(batch, 1)

    def loss(self, batch: Batch, target_out: TargetOut, progress: float) -> Terms:
        """Term `depth_1`: the objective after every anchor's token, summed."""
        config = self.config
        rows = Rows.of(batch, config.depths)
        scorer = Scorer(rows, batch, target_out, self.d2t_W, self.t2d_V, self.objective, config.oov, 1.0)
        hidden_BTD = self.read(batch.ids_BT, batch.positions_BT, document_mask(batch.samples_BT))
        scorer.add(1, self.run.logits(rows.take(hidden_BTD, 1), self.rows_W))
        for depth in range(2, config.depths + 1):
            scorer.repeat(depth)
        return scorer.terms()

    forward = loss

    # Drafting

    @property
    def on_device(self) -> bool:
        """Whether a draft asks the device for nothing (inference/device_step.py)."""
        return self.run.runner == "lean"

    def init(self, prefill: Prefill) -> State:
        """An empty state; one slot more than asked for, for the anchor."""
        none_B = torch.zeros(prefill.rows, dtype=torch.int64, device=prefill.device)
        see_BMM = torch.ones(prefill.rows, 1, 1, dtype=torch.bool, device=prefill.device)
        return State(self.run.new_cache(prefill.rows, prefill.slots + 1), none_B, none_B[:, None], see_BMM)

    def start(self, state: State, commit: Commit) -> tuple[State, Level]:
        """Read the committed tokens and the anchor; the level of depth 1. What was drafted before is forgotten."""
        b, t = commit.ids_BT.shape
        cache, rows_B = state.cache, torch.arange(b, device=commit.ids_BT.device)
        ids_BT = behind(commit.ids_BT, commit.counts_B, commit.anchor_B[:, None])
        positions_BT = cache.lengths_B[:, None] + torch.arange(t + 1, device=rows_B.device)
        positions_BT = positions_BT.clamp(max=self.run.facts.max_positions - 1)  # padding, or said to be invalid
        hidden_BD = self.read(ids_BT, positions_BT, cache=cache)[rows_B, commit.counts_B]
        cache.commit(commit.counts_B)
        state.position_B = cache.lengths_B.clone()
        state.depth_BM = torch.zeros_like(rows_B)[:, None]
        state.see_BMM = torch.ones(b, 1, 1, dtype=torch.bool, device=rows_B.device)
        return state, self._level(state, hidden_BD[:, None], (commit.counts_B > 0)[:, None], state.depth_BM)

    def extend(self, state: State, tokens_BN: Tensor, parents_BN: Tensor) -> tuple[State, Level]:
        """Read nodes (target ids) below their parents; the levels below them."""
        b, n = tokens_BN.shape
        before = state.see_BMM.shape[1]
        rows_B1 = torch.arange(b, device=tokens_BN.device)[:, None]
        depth_BN = state.depth_BM[rows_B1, parents_BN] + 1
        see_BNA = nn.functional.pad(state.see_BMM, (0, n))[rows_B1, parents_BN]
        see_BNA[:, :, before:] = torch.eye(n, dtype=torch.bool, device=tokens_BN.device)
        hidden_BND = self.read(tokens_BN, state.position_B[:, None] + depth_BN, see_BNA, state.cache)
        state.depth_BM = torch.cat([state.depth_BM, depth_BN], dim=1)
        state.see_BMM = torch.cat([nn.functional.pad(state.see_BMM, (0, n)), see_BNA], dim=1)
        return state, self._level(state, hidden_BND, torch.ones_like(tokens_BN, dtype=torch.bool), depth_BN)

    def reset(self, state: State, rows: Tensor) -> State:
        state.cache.reset(rows)
        return state

    def _level(self, state: State, hidden_BND: Tensor, valid_BN: Tensor, depth_BN: Tensor) -> Level:
        """A model says nothing beyond its own positions."""
        inside_BN = state.position_B[:, None] + depth_BN < self.run.facts.max_positions
        return make_level(self.say(hidden_BND), valid_BN & inside_BN, self.d2t_W, self.facts.tokens)


@dataclass(frozen=True)
class Span:
    """The last answer of a document: entries of its batch row."""

    row: int
    sample: int
    start: int  # the document's first token
    anchor: int  # the answer's first token
    end: int  # one past the answer's last


def last_answers(batch: Batch) -> list[Span]:
    """Of each document the last run of supervised tokens, where it has two or more."""
    spans = []
    for row, (samples, marks) in enumerate(zip(batch.samples_BT.tolist(), batch.supervised_BT.tolist(), strict=True)):
        edges = [0, *(t for t in range(1, len(samples)) if samples[t] != samples[t - 1]), len(samples)]
        for start, stop in pairwise(edges):
            if samples[start] < 0 or not any(marks[start:stop]):
                continue
            end = max(t for t in range(start, stop) if marks[t]) + 1
            anchor = end - 1
            while anchor > start and marks[anchor - 1]:
                anchor -= 1
            if end - anchor > 1:
                spans.append(Span(row, samples[start], start, anchor, end))
    return spans


def load_draft_model(name: str, target: Target, revision: str | None = None) -> DraftModel:
    """A small language model (folder or Hub id) as it stands, ready to draft beside `target`: on its device, in its
    dtype, frozen. Its tokenizer may be another one. Raises ValueError for what cannot run or shares no token."""
    drafter = DraftModel(DraftModelConfig(LMConfig("model", model=name, revision=revision)), target.facts)
    drafter.init_from_target(target)
    return drafter.to(device=target.device, dtype=target.dtype).requires_grad_(False).eval()
