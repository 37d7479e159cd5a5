"""Small batches that tests of several methods train on, and a look at what a loss was computed from."""

from __future__ import annotations

import sys
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from draftsmith.losses.distill import Logits, formed
from draftsmith.models.drafter import Batch, TargetOut


def one_row(ids: list[int], supervised: list[int], pad: int = 0, sample: int = 4) -> Batch:
    """One document; `supervised` are indices; `pad` tokens follow it."""
    n = len(ids)
    flags = torch.zeros(1, n + pad, dtype=torch.bool)
    flags[0, supervised] = True
    return Batch(
        F.pad(torch.tensor([ids], dtype=torch.int64), (0, pad), value=2),
        flags,
        F.pad(torch.arange(n)[None], (0, pad)),
        F.pad(torch.full((1, n), sample), (0, pad), value=-1),
    )


def random_row(supervised: list[int], n: int = 14, seed: int = 0) -> Batch:
    """One document of `n` random tokens."""
    torch.manual_seed(seed)
    return one_row(torch.randint(3, 250, (n,)).tolist(), supervised)


def packed_row(documents: list[tuple[int, int, int]], padding: int = 3, seed: int = 0, epoch: int = 0) -> Batch:
    """One row: (sample id, length, first supervised token) each; padding in between and at the end."""
    dice = torch.Generator().manual_seed(1)
    ids, marks, positions, samples = [], [], [], []
    for sample, n, first in documents:
        ids += torch.randint(3, 250, (n + padding,), generator=dice).tolist()
        marks += [t >= first for t in range(n)] + [False] * padding
        positions += [*range(n), *range(padding)]
        samples += [sample] * n + [-1] * padding
    return Batch(*(torch.tensor([x]) for x in (ids, marks, positions, samples)), epoch=epoch, seed=seed)


def spied_loss(drafter: Any, batch: Batch, out: TargetOut, monkeypatch: Any) -> tuple[Any, Tensor, Any]:
    """The terms, the logits that the (last) score was computed from, and its slots."""
    seen: list[Any] = []
    module: Any = sys.modules[type(drafter).__module__]
    real_score = module.score

    def spy(logits_RW: Logits, slots: Any, *rest: Any, **named: Any) -> Any:
        seen.append((formed(logits_RW).detach(), slots))
        return real_score(logits_RW, slots, *rest, **named)

    with monkeypatch.context() as patch:
        patch.setattr(module, "score", spy)
        terms = drafter(batch, out, 0.0)
    return terms, *seen[-1]
