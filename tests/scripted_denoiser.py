"""A denoiser without a network, for tests that need to know every probability: logits are what a rule says of a pass."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from draftsmith.models.denoiser import TargetDenoiser
from draftsmith.models.drafter import TargetFacts

V, MASK, EOS = 10, 9, 0

Entry = float | tuple[Any, ...]


class Lengths:
    """What the loop asks of a cache."""

    def __init__(self, rows: int) -> None:
        self.lengths_B = torch.zeros(rows, dtype=torch.int64)

    def commit(self, counts_B: Tensor) -> None:
        self.lengths_B += counts_B

    def truncate(self, lengths_B: Tensor) -> None:
        assert bool((lengths_B <= self.lengths_B).all())
        self.lengths_B.copy_(lengths_B)


class ScriptedDenoiser:
    """`rule(number of the pass, ids_BT, positions_BT) -> logits [B, T, V]`, which are the hidden states. `seen`: what
    every pass was given, (ids, positions)."""

    def __init__(
        self,
        rule: Callable[[int, Tensor, Tensor], Tensor],
        block: int = 4,
        *,
        vocab: int = V,
        tokens: int | None = None,
        mask_id: int = MASK,
        shift: bool = False,
        causal: bool = False,
        origin: str = "answer",
        token_causal: bool = False,
        dual: bool = False,
        eos_ids: tuple[int, ...] = (EOS,),
        tokenizer: Any = None,
    ) -> None:
        rope = {"rope_type": "default", "rope_theta": 1e4}
        self.facts = TargetFacts(
            "scripted", None, "0", "llama", vocab, tokens or vocab, vocab, 1, 1, 1, vocab, vocab, 1e-6, "silu", rope,
            1 << 20, False, eos_ids, None,
        )  # fmt: skip
        self.rule, self.block, self.mask_id, self.shift, self.causal = rule, block, mask_id, shift, causal
        self.origin, self.token_causal, self.inside, self.dual = origin, token_causal, "full", dual
        self.tokenizer, self.device, self.dtype = tokenizer, torch.device("cpu"), torch.float64
        self.seen: list[tuple[Tensor, Tensor]] = []

    def denoise(
        self,
        canvas: Tensor,
        positions_BT: Tensor,
        *,
        cache: Any = None,
        see_BTA: Tensor | None = None,
        view: Any = "noisy",
    ) -> Tensor:
        ids_BT = canvas if canvas.dim() == 2 else canvas.argmax(-1)
        assert see_BTA is not None and bool(see_BTA.diagonal(dim1=1, dim2=2).all())
        self.seen.append((canvas.clone(), positions_BT.clone()))
        return self.rule(len(self.seen) - 1, ids_BT, positions_BT).double()

    def head(self, hidden: Tensor, ids: Tensor | None = None) -> Tensor:
        never_V = torch.arange(self.facts.vocab) >= self.facts.tokens
        never_V |= torch.arange(self.facts.vocab) == self.mask_id
        return hidden.masked_fill(never_V if ids is None else never_V[ids], float("-inf"))

    def embed(self, ids: Tensor) -> Tensor:
        return torch.nn.functional.one_hot(ids, max(self.facts.vocab, self.mask_id + 1)).double()

    def new_cache(self, rows: int, slots: int) -> Lengths:
        return Lengths(rows)


def denoiser_of(
    target: Any,
    block: int,
    mask_id: int,
    *,
    dual: bool = False,
    kind: type[TargetDenoiser] = TargetDenoiser,
    **form: Any,
) -> Any:
    """A denoiser with a network. `dual` by name alone: without adapters both views are the same."""
    denoiser = kind(target, block, mask_id, **form)
    denoiser.dual = dual
    return denoiser


def logits_of(entry: Entry, default: int) -> Tensor:
    """[V] log-probabilities: a candidate's probability, or (probability, candidate), or (probability, candidate,
    probability of the id after it); the rest is shared evenly by all ids but the mask's."""
    p, token, second, *_ = (*entry, None, None)[:3] if isinstance(entry, tuple) else (entry, None, None)
    token = default if token is None else token
    others = [i for i in range(V) if i not in (token, MASK)]
    if second is not None:
        others.remove(token + 1)
    rest = (1 - p - (second or 0)) / len(others)
    x_V = torch.full((V,), -30.0, dtype=torch.float64)
    x_V[others], x_V[token] = math.log(rest), math.log(p)
    if second is not None:
        x_V[token + 1] = math.log(second)
    return x_V


def script(passes: Sequence[Sequence[Entry]], prompt: int = 1) -> Callable[[int, Tensor, Tensor], Tensor]:
    """A rule: per pass (the last one repeats) and place of the answer an entry; the candidate of place i is i + 1."""
    tables = [torch.stack([logits_of(e, i + 1) for i, e in enumerate(row)]) for row in passes]

    def rule(number: int, ids_BT: Tensor, positions_BT: Tensor) -> Tensor:
        return tables[min(number, len(tables) - 1)][(positions_BT - prompt).clamp(0, len(tables[0]) - 1)]

    return rule
