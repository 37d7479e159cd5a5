"""A training step of EAGLE heads from given states, both ways, and what it allocates: for test_step.py and bench/train_step.py."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from plain_eagle3 import plain_losses
from torch import Tensor
from torch.profiler import ProfilerActivity, profile

from draftsmith.losses.distill import ByHead
from draftsmith.models import METHODS
from draftsmith.models.drafter import Batch, TargetFacts, TargetOut


@dataclass
class Step:
    """One row: a document of `length` tokens, all supervised from `first` on, and random states of its target."""

    drafter: Any
    batch: Batch
    out: TargetOut
    embed_VD: Tensor
    head_WD: Tensor

    def terms(self) -> list[Tensor]:
        """By depth, ours, each the sum over its pairs times depth_weight ** (depth - 1)."""
        return list(self.drafter(self.batch, self.out, 0.0).losses.values())

    def plain(self, attention: str) -> list[Tensor]:
        """The same by the plain form; the document is supervised as a whole."""
        assert self.out.taps_BTPD is not None and self.out.last_hidden_BTD is not None
        with torch.no_grad():
            teacher_LW = self.out.last_hidden_BTD[0] @ self.head_WD.T
        drafter = self.drafter
        losses = plain_losses(
            drafter, self.batch.ids_BT[0], self.out.taps_BTPD[0], teacher_LW, self.embed_VD, attention
        )
        return [loss * drafter.config.depth_weight**i for i, loss in enumerate(losses)]

    def run(self, losses: Callable[[], list[Tensor]]) -> tuple[Tensor, Tensor]:
        """Each depth's mean loss, and all gradients of their sum in a row."""
        self.drafter.zero_grad(set_to_none=True)
        counts = self.drafter.denominators(self.batch, 0.0).values()
        means = [loss / max(count, 1.0) for loss, count in zip(losses(), counts, strict=True)]
        torch.stack(means).sum().backward()
        grads = [p.grad.flatten() for p in self.drafter.parameters() if p.grad is not None]
        return torch.stack(means).detach(), torch.cat(grads)


def make_step(
    length: int,
    method: str = "eagle3",
    *,
    width: int = 32,
    heads: tuple[int, int] = (4, 2),
    vocab: int = 300,
    draft: int | None = 100,
    dtype: torch.dtype = torch.float32,
    first: int = 0,
    **options: Any,
) -> Step:
    """`heads` of queries and of keys; `draft` ids are spread over the vocabulary."""
    torch.manual_seed(0)
    facts = TargetFacts(
        "made up", None, "", "llama", vocab, vocab, width, 30, *heads, width // heads[0], width * 8 // 3, 1e-5, "silu",
        {"rope_type": "default", "rope_theta": 1e5}, 1 << 20, True, (2,), None,
    )  # fmt: skip
    embed_VD = torch.randn(vocab, width, dtype=dtype) * width**-0.5
    ids_W = None if draft is None else torch.arange(draft) * (vocab // draft)
    head_WD = embed_VD if ids_W is None else embed_VD[ids_W]
    drafter = METHODS[method](METHODS[method].Config(**options), facts, ids_W).to(dtype)
    if hasattr(drafter, "lm_head"):
        drafter.lm_head.weight.data.copy_(head_WD)
    ids_BT = torch.randint(vocab, (1, length))
    at_BT = torch.arange(length)[None]
    batch = Batch(ids_BT, at_BT >= first, at_BT, torch.zeros_like(ids_BT))
    taps_BTPD = torch.randn(1, length, len(drafter.taps), width, dtype=dtype) if drafter.taps else None
    last_BTD = torch.randn(1, length, width, dtype=dtype) * 2
    logits = [part_TD @ embed_VD.T for part_TD in last_BTD[0].split(256)]
    log_z_BT = torch.cat([x.logsumexp(-1) for x in logits])[None]
    top_BT = torch.cat([x.argmax(-1) for x in logits])[None]

    def head(hidden_XD: Tensor, ids: Tensor | None) -> Tensor:
        return hidden_XD @ (embed_VD if ids is None else head_WD).T

    def by_head(hidden_RD: Tensor, ids: Tensor | None) -> ByHead:
        return ByHead(hidden_RD, embed_VD if ids is None else head_WD)

    out = TargetOut(taps_BTPD, last_BTD, log_z_BT, top_BT, head=head, by_head=by_head, embed=lambda ids: embed_VD[ids])
    return Step(drafter, batch, out, embed_VD, head_WD)


def allocated(function: Callable[[], Any]) -> tuple[int, int]:
    """Bytes by PyTorch's allocation profiler on the CPU: the peak above what there is before, and the largest single one."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as seen:
        function()
    events = [e for e in seen.profiler.kineto_results.events() if e.name() == "[memory]"]
    now = peak = largest = 0
    for event in sorted(events, key=lambda e: e.start_ns()):
        now += event.nbytes()
        peak, largest = max(peak, now), max(largest, event.nbytes())
    return peak, largest
