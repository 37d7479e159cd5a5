"""A denoiser: a model that fills the masked places of a canvas, block by block. What trains it, what decodes it.

A *canvas* holds decided tokens and mask tokens; `block` tokens are decided together. A causal denoiser's blocks see
themselves and all earlier blocks (block diffusion), so that finished blocks have exact keys and values; one that is not
causal (LLaDA, Dream) sees the whole canvas. With `shift` the row of token t predicts token t + 1, as the autoregressive
head does (Fast-dLLM v2, Dream); without, the token at its own place (SDAR, LLaDA).

Two views of one set of weights: `noisy` runs with the adapters, `clean` without them, as the autoregressive model that
was converted. Where adapters act on all rows (every preset but `dual`), decided tokens too are read in the noisy view.

The unfinished block at a prompt's end: with `origin` document it holds the prompt's last tokens, as decided tokens of a
block that is still being filled, and its rows see it whole; with `origin` answer the answer starts a block, and the
prompt is one block by itself.

Decoded by inference/diffuse.py. Test: pytest tests/test_denoiser.py
"""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any, Literal, Protocol

import torch
from torch import Tensor

from .adapters import Adapters, View
from .cache import Cache
from .drafter import TargetFacts
from .target import Target

Origin = Literal["document", "answer"]
Inside = Literal["full", "causal", "observed_first"]


class Denoiser(Protocol):
    """What `diffuse` asks of a model."""

    facts: TargetFacts
    tokenizer: Any
    block: int
    """Tokens that are decided together (of a model that is not causal: the default, any length will do)."""
    shift: bool
    """The row of token t predicts token t + 1."""
    mask_id: int
    causal: bool
    """Blocks see earlier blocks and themselves; false: everything sees everything."""
    origin: Origin
    """Where blocks are counted from: the text's first token, or the answer's."""
    token_causal: bool
    """Tokens of finished blocks see the tokens before them; false: their whole block."""
    inside: Inside
    """What rows of an unfinished block see of it: all; what comes before them; or its decided tokens first, then masks,
    each what comes before it in that order (WeDLM)."""
    dual: bool
    """Finished text is read in the clean view. Its last token is the first row of the open block, in which, when it is
    whole, the row of the last place is not run."""

    @property
    def device(self) -> torch.device: ...

    @property
    def dtype(self) -> torch.dtype: ...

    def denoise(
        self,
        canvas: Tensor,
        positions_BT: Tensor,
        *,
        cache: Cache | None = None,
        see_BTA: Tensor | None = None,
        view: View = "noisy",
    ) -> Tensor:
        """Last hidden states [B, T, D], after the final norm, of a canvas of ids [B, T] or embeddings [B, T, D].

        `cache` and `see_BTA` as in `Target.forward`: committed slots are visible to all, the canvas is the tail, whose
        keys and values are kept when the caller commits them.
        """
        ...

    def head(self, hidden: Tensor, ids: Tensor | None = None) -> Tensor:
        """Logits; ids that must never be emitted (the mask's, those above the tokenizer's) are -inf."""
        ...

    def embed(self, ids: Tensor) -> Tensor: ...

    def new_cache(self, rows: int, slots: int) -> Cache: ...


class TargetDenoiser:
    """A denoiser whose weights are a target's, with adapters or without (a model that denoises by itself).

    Without adapters both views are the same. `dual`: adapters act on noisy rows alone, so that decided tokens are read
    in the clean view, a block's first token among them: its row is the anchor, whose key and value the masks behind it
    read, and the canvas of a noisy pass holds only what follows it in its block (`ObjectiveConfig.dual`).
    """

    def __init__(
        self,
        target: Target,
        block: int,
        mask_id: int,
        *,
        shift: bool,
        causal: bool = True,
        adapters: Adapters | None = None,
        origin: Origin = "answer",
        token_causal: bool = False,
        inside: Inside = "full",
    ) -> None:
        if block < 1:
            raise ValueError(f"block = {block}: a block has at least 1 token")
        if adapters is not None and (adapters.target is not target or adapters.mask_id != mask_id):
            raise ValueError(
                f"mask_id = {mask_id}: these adapters are of another target, or have mask_id {adapters.mask_id}"
            )
        if adapters is None and not 0 <= mask_id < target.facts.vocab:
            raise ValueError(f"mask_id = {mask_id}: {target.facts.name} has the ids 0..{target.facts.vocab - 1}")
        self.target, self.block, self.mask_id, self.shift, self.causal = target, block, mask_id, shift, causal
        self.origin, self.token_causal, self.inside = origin, token_causal, inside
        self.adapters, self.dual = adapters, adapters is not None and adapters.dual
        if self.dual and not (shift and token_causal and causal):
            raise ValueError(
                "dual: its finished blocks are the autoregressive model's: set shift, causal and token_causal"
            )
        self.facts, self.tokenizer = target.facts, target.tokenizer
        never_V = torch.zeros(max(target.facts.vocab, mask_id + 1), dtype=torch.bool, device=target.device)
        never_V[target.banned_ids] = True
        never_V[mask_id] = True
        self.never_V = never_V[: target.facts.vocab]  # a mask behind the vocabulary has no logit

    @property
    def device(self) -> torch.device:
        return self.target.device

    @property
    def dtype(self) -> torch.dtype:
        return self.target.dtype

    def denoise(
        self,
        canvas: Tensor,
        positions_BT: Tensor,
        *,
        cache: Cache | None = None,
        see_BTA: Tensor | None = None,
        view: View = "noisy",
    ) -> Tensor:
        if self.adapters is not None and self.adapters.training and self.adapters.differs_in_training:
            raise ValueError(
                "the adapters are as in training (dropout, strength): call adapters.train(False) before decoding"
            )
        with self._view(view):
            return self.target.forward(canvas, positions_BT, cache=cache, see_BTA=see_BTA).last_hidden_BTD

    def head(self, hidden: Tensor, ids: Tensor | None = None) -> Tensor:
        never_V = self.never_V if ids is None else self.never_V[ids]
        return self.target.head(hidden, ids).masked_fill(never_V, float("-inf"))

    def embed(self, ids: Tensor) -> Tensor:
        """Input embeddings as the noisy view reads them, the mask's among them."""
        with self._view("noisy"):
            return self.target.embed(ids)

    def new_cache(self, rows: int, slots: int) -> Cache:
        return self.target.new_cache(rows, slots)

    def _view(self, name: View) -> Any:
        return nullcontext() if self.adapters is None else self.adapters.view(name)
