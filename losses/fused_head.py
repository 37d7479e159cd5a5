"""Cross-entropy and entropy straight from hidden states: head and loss in chunks of rows, never R x V at once.

Each row's values depend on its own hidden state alone, so that their gradients by it are two vectors of width D. Where
the head is frozen they are formed while the chunk's logits are there, and backward only scales and adds them: whatever
weights come later, also ones that depend on which rows turned out right, cost no second pass. Where the head learns,
chunks are recomputed in backward.

Test: pytest tests/test_fused_head.py
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

Head = Callable[[Tensor], Tensor]
Plain = Callable[[Tensor, slice], tuple[Tensor, ...]]


@dataclass
class HeadRows:
    """Of R rows, fp32 at least. `ce_R` and `entropy_R` carry gradients."""

    ce_R: Tensor  # cross-entropy with the label, or with the teacher's distribution
    entropy_R: Tensor  # of softmax(logits / temperature), nats; zeros where no temperature was given
    top_R: Tensor  # int64, the likeliest id
    chance_R: Tensor  # its probability


def plain_rows(
    head: Head, hidden_RD: Tensor, label_R: Tensor, temperature: float | None, teacher_RD: Tensor | None = None
) -> tuple[Tensor, ...]:
    """The four fields of `HeadRows`, by way of all logits."""
    logits_RV = head(hidden_RD)
    logits_RV = logits_RV.to(torch.promote_types(logits_RV.dtype, torch.float32))
    log_q_RV = logits_RV.log_softmax(-1)
    if teacher_RD is None:
        ce_R = -log_q_RV.gather(-1, label_R[:, None])[:, 0]
    else:
        with torch.no_grad():
            p_RV = head(teacher_RD).to(log_q_RV.dtype).softmax(-1)
        ce_R = -(p_RV * log_q_RV).sum(-1)
    with torch.no_grad():
        top = log_q_RV.max(-1)
    if temperature is None:
        entropy_R = torch.zeros_like(ce_R)
    else:
        log_t_RV = log_q_RV if temperature == 1 else (logits_RV / temperature).log_softmax(-1)
        # A logit of -inf has probability 0, and 0 * -inf is not 0: it is left out.
        entropy_R = -(log_t_RV.exp() * log_t_RV.clamp(min=torch.finfo(log_t_RV.dtype).min)).sum(-1)
    return ce_R, entropy_R, top.indices, top.values.exp()


class _Chunked(torch.autograd.Function):
    """`plain` in chunks of rows, for a head without gradients of its own."""

    @staticmethod
    def forward(ctx: Any, hidden_RD: Tensor, plain: Plain, graded: int, chunk: int) -> tuple[Tensor, ...]:
        need = hidden_RD.requires_grad
        parts, slopes = [], []
        for lo in range(0, len(hidden_RD), chunk):
            span = slice(lo, lo + chunk)
            with torch.set_grad_enabled(need):
                own_rD = hidden_RD[span].detach().requires_grad_(need)
                part = plain(own_rD, span)
                if need:
                    slopes.append(
                        [
                            torch.autograd.grad(part[i].sum(), own_rD, retain_graph=i + 1 < graded)[0]
                            for i in range(graded)
                        ]
                    )
            parts.append([x.detach() for x in part])
        out = tuple(torch.cat(field) for field in zip(*parts, strict=True))
        ctx.slopes = [torch.cat(slope) for slope in zip(*slopes, strict=True)]
        ctx.mark_non_differentiable(*out[graded:])
        return out

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, None, None, None]:
        by_R = [grad[:, None] for grad in grads[: len(ctx.slopes)]]
        total_RD = sum(slope_RD * by.to(slope_RD.dtype) for slope_RD, by in zip(ctx.slopes, by_R, strict=True))
        return total_RD if isinstance(total_RD, Tensor) else None, None, None, None


def in_chunks(
    plain: Plain, hidden_RD: Tensor, graded: int, *, vocab: int, head_learns: bool, chunk: int | None = None
) -> tuple[Tensor, ...]:
    """`plain(hidden_rD, span)` over spans of the R > 0 rows, its outputs [r] joined; the first `graded` carry gradients.

    `plain` makes logits [r, vocab] of the rows in `span`; `chunk` rows at a time, default: what 2**22 logits hold.
    """
    chunk = chunk or max(8, 2**22 // vocab)
    if not head_learns:
        return tuple(_Chunked.apply(hidden_RD, plain, graded, chunk))
    spans = [slice(lo, lo + chunk) for lo in range(0, len(hidden_RD), chunk)]
    parts = [checkpoint(plain, hidden_RD[span], span, use_reentrant=False) for span in spans]
    return tuple(torch.cat(field) for field in zip(*parts, strict=True))


@torch.no_grad()
def width_of(head: Head, hidden_RD: Tensor) -> int:
    """How many logits a row has."""
    return int(head(hidden_RD[:1]).shape[-1])


def head_rows(
    head: Head,
    hidden_RD: Tensor,
    label_R: Tensor,
    *,
    temperature: float | None = None,
    teacher_RD: Tensor | None = None,
    head_learns: bool = False,
    chunk: int | None = None,
) -> HeadRows:
    """Cross-entropy of each row, and its entropy at `temperature` (None = none), from hidden states [R, D].

    `head` gives logits [r, V] of some of the rows; `head_learns`: it has parameters that require gradients. With
    `teacher_RD`, a teacher's states of the same rows, labels are what `head` makes of those (no gradients). `chunk` rows at
    a time; default: what 2**22 logits hold. Equal to `plain_rows` (tests: float64, values and gradients).
    """
    if not len(hidden_RD):
        zero_R = no_rows(hidden_RD)
        return HeadRows(zero_R, zero_R.clone(), label_R.clone(), zero_R.detach())

    def plain(hidden_rD: Tensor, span: slice) -> tuple[Tensor, ...]:
        teacher_rD = None if teacher_RD is None else teacher_RD[span]
        return plain_rows(head, hidden_rD, label_R[span], temperature, teacher_rD)

    graded, vocab = 1 if temperature is None else 2, width_of(head, hidden_RD)
    return HeadRows(*in_chunks(plain, hidden_RD, graded, vocab=vocab, head_learns=head_learns, chunk=chunk))


def no_rows(hidden_RD: Tensor) -> Tensor:
    """[0] values of no rows, fp32 at least, in the graph of their states."""
    return hidden_RD.to(torch.promote_types(hidden_RD.dtype, torch.float32)).sum(-1)
