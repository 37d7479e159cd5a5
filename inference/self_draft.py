"""Self-drafting: a denoiser drafts for its own autoregressive path, which verifies (inference/speculate.py): lossless.

    drafter = SelfDraft(denoiser)
    results = generate(target, prompts, params, drafter, DecodeConfig(k=4))     # target: the path that is drafted for

One pass per draft fills the block behind the anchor with masks and takes the candidates of its first places; this pass
is what drafting costs beside the verification, and `forwards` counts it. Every denoiser but a `dual` one has a second
cache, which the same pass keeps up to date with the text that was committed since. In `dual` the target's own cache
serves both views: the anchor runs in the clean view, the masks behind it in the noisy one (a second, short pass, as a
pass has one view), and nothing is kept.

Blocks begin right behind the anchor where finished tokens see the tokens before them alone, since their keys and values
are then the same wherever blocks begin. Where finished blocks see themselves whole, blocks stay where training had them,
and a draft ends with its block.

Test: pytest tests/test_self_draft.py
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ..models.cache import Cache
from ..models.denoiser import Denoiser, View
from ..models.drafter import Budget, Commit, Prefill
from ..models.tree import Tree
from .canvas import sight


@dataclass(frozen=True)
class SelfDraftConfig:
    """Settings of self-drafting. Tokens per draft are the runtime's `k`, a block at most."""

    confidence: float = 0.0
    """A draft ends before the first token of less probability than this (ours); 0 = it is as long as asked."""

    def __post_init__(self) -> None:
        if not 0 <= self.confidence <= 1:
            raise ValueError(f"self_draft: confidence={self.confidence}, must lie in [0, 1]")


@dataclass
class Text:
    """What was committed: `ids_BS` up to `ends_B` (the anchor is the last), the prompt's length, and the drafter's own
    cache (none in `dual`)."""

    ids_BS: Tensor
    ends_B: Tensor
    prompt_B: Tensor
    cache: Cache | None


class SelfDraft:
    """A denoiser as drafter; see `Proposer` in `models/drafter.py`. `forwards`: its passes so far."""

    method = "self_draft"
    Config = SelfDraftConfig
    taps: tuple[int, ...] = ()
    d2t_W: Tensor | None = None
    max_depth: int | None = None

    def __init__(self, denoiser: Denoiser, config: SelfDraftConfig | None = None) -> None:
        if not denoiser.causal:
            raise ValueError(
                "self_draft: this denoiser sees the whole canvas and has no autoregressive path; use diffuse"
            )
        self.denoiser, self.config, self.facts = denoiser, config or SelfDraftConfig(), denoiser.facts
        self.draft_needs = frozenset({"ids", "kv"} if denoiser.dual else {"ids"})
        # In `dual`: rows that its passes write behind the text in the target's cache.
        self.parallel = denoiser.block if denoiser.dual else 1
        self.forwards = 0

    def bind(self, target: Any) -> None:
        """Raises ValueError if the target has another vocabulary."""
        if target.facts.vocab != self.facts.vocab or target.facts.tokens != self.facts.tokens:
            raise ValueError(
                f"self_draft: the denoiser has {self.facts.vocab} ids, {self.facts.tokens} of them its tokenizer's, the "
                f"target {target.facts.vocab} and {target.facts.tokens}: they are not one model"
            )

    def init(self, prefill: Prefill) -> Text:
        """Empty texts."""
        block = self.denoiser.block
        slots = prefill.slots + 2 * block + 2
        zeros_B = torch.zeros(prefill.rows, dtype=torch.int64, device=prefill.device)
        ids_BS = torch.full((prefill.rows, slots), self.denoiser.mask_id, device=prefill.device)
        cache = None if self.denoiser.dual else self.denoiser.new_cache(prefill.rows, slots)
        return Text(ids_BS, zeros_B, zeros_B.clone(), cache)

    def propose(self, state: Text, commit: Commit, budget: Budget, params: Any, rng: Any) -> tuple[Text, Tree]:
        """A chain of the likeliest tokens, K = min(depth, nodes, block); a row that is done gets none."""
        live_B = commit.counts_B > 0
        self._append(state, commit)
        hidden_BTD, first_B, end_B = self._pass(state, commit.kv if self.denoiser.dual else state.cache, live_B)
        k = max(1, min(budget.depth, budget.nodes, self.denoiser.block))
        steps_K = torch.arange(k, device=live_B.device)
        at_BK = state.ends_B[:, None] + steps_K
        valid_BK = (at_BK < end_B[:, None]) & live_B[:, None]
        row_BK = (at_BK - int(self.denoiser.shift) - first_B[:, None]).clamp(0, hidden_BTD.shape[1] - 1)
        rows_B1 = torch.arange(len(live_B), device=live_B.device)[:, None]
        logits_BKV = self.denoiser.head(hidden_BTD[rows_B1, row_BK])
        logits_BKV = logits_BKV if logits_BKV.dtype == torch.float64 else logits_BKV.float()
        log_BK, token_BK = logits_BKV.log_softmax(-1).max(-1)
        valid_BK &= (log_BK.exp() >= self.config.confidence).long().cumprod(1).bool()
        parents_BK = steps_K.expand_as(at_BK)
        return state, Tree(token_BK, parents_BK, parents_BK + 1, log_BK.float(), valid_BK)

    def reset(self, state: Text, rows: Tensor) -> Text:
        """Forget the texts of `rows`."""
        state.ids_BS[rows], state.ends_B[rows], state.prompt_B[rows] = self.denoiser.mask_id, 0, 0
        if state.cache is not None:
            state.cache.reset(rows)
        return state

    def _append(self, state: Text, commit: Commit) -> None:
        """The committed rows and the anchor, at their places."""
        t = commit.ids_BT.shape[1]
        new_BT = torch.arange(t, device=commit.ids_BT.device) < commit.counts_B[:, None]
        ids_BT = torch.where(new_BT, commit.ids_BT, state.ids_BS.gather(1, commit.positions_BT))
        state.ids_BS.scatter_(1, commit.positions_BT, ids_BT)
        live_B = commit.counts_B > 0
        last_B1 = (commit.counts_B - 1).clamp(min=0)[:, None]
        ends_B = commit.positions_BT.gather(1, last_B1)[:, 0] + 2
        state.prompt_B = torch.where(live_B & (state.ends_B == 0), ends_B - 1, state.prompt_B)
        state.ends_B = torch.where(live_B, ends_B, state.ends_B)
        anchor_B1 = (state.ends_B - 1).clamp(min=0)[:, None]
        anchors_B1 = torch.where(live_B[:, None], commit.anchor_B[:, None], state.ids_BS.gather(1, anchor_B1))
        state.ids_BS.scatter_(1, anchor_B1, anchors_B1)

    def _pass(self, state: Text, cache: Any, live_B: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Run what is not cached and the open block: last hidden states [B, T, D], the first row's place, and the end of
        the block."""
        d, block = self.denoiser, self.denoiser.block
        origin_B = torch.zeros_like(state.ends_B) if d.origin == "document" else state.prompt_B
        start_B = state.ends_B
        if not d.token_causal:
            start_B = origin_B + (start_B - origin_B).div(block, rounding_mode="floor") * block
        end_B, first_B = start_B + block, cache.lengths_B.clone()
        count_B = torch.where(live_B, end_B - int(d.dual) - first_B, 0)
        places_BT = first_B[:, None] + torch.arange(int(count_B.max()), device=live_B.device)
        use_BT = places_BT < (first_B + count_B)[:, None]
        closed_BT, known_BT = places_BT < start_B[:, None], places_BT < state.ends_B[:, None]
        block_BT = (places_BT - origin_B[:, None]) // block + 1
        block_BT = torch.where(places_BT < origin_B[:, None], 0, block_BT)  # the prompt is one block
        if d.token_causal:  # finished tokens go by place alone
            block_BT = torch.where(closed_BT, 0, 1)
        ids_BT = state.ids_BS.gather(1, places_BT.clamp(max=state.ids_BS.shape[1] - 1))
        ids_BT = torch.where(use_BT, torch.where(known_BT, ids_BT, d.mask_id), 0)
        positions_BT = torch.where(use_BT, places_BT, 0).clamp(max=self.facts.max_positions - 1)
        see_BTT = sight(d, places_BT, use_BT, block_BT, closed_BT, ~known_BT)
        # In `dual` the first row is the anchor, the others are masks.
        parts: list[tuple[slice, View]] = [(slice(0, None), "noisy")]
        if d.dual:
            parts = [(slice(0, 1), "clean"), (slice(1, None), "noisy")]
        hidden = []
        for part, view in parts:
            if places_BT[:, part].shape[1]:
                see_BTA = see_BTT[:, part, : part.stop]
                run = d.denoise(ids_BT[:, part], positions_BT[:, part], cache=cache, see_BTA=see_BTA, view=view)
                hidden.append(run)
                self.forwards += 1
        hidden_BTD = torch.cat(hidden, 1)
        if not d.dual:
            cache.commit(torch.where(live_B, start_B - first_B, 0))
        return hidden_BTD, first_B, end_B
