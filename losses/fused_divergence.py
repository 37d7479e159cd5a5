"""Any divergence of the table between two rows of states, and smoothed cross-entropy, without R x V tensors.

Teacher and row go through the same head (a model that teaches itself, or its frozen base): the one without gradients.
Chunks and gradients as in fused_head.py.

Test: pytest tests/test_fused_head.py
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from .distill import ON_DISTRIBUTIONS, Rows
from .fused_head import Head, in_chunks, no_rows, width_of
from .objective import Objective


@dataclass
class Compared:
    """Of R rows, fp32 at least. `loss_R` carries gradients."""

    loss_R: Tensor
    ce_R: Tensor  # cross-entropy with the label, at temperature 1 and not smoothed
    top_R: Tensor  # int64, the likeliest id


def smooth_rows(head: Head, hidden_RD: Tensor, label_R: Tensor, smoothing: float) -> tuple[Tensor, ...]:
    """The fields of `Compared` by way of all logits: (1 - s) CE with the label + s mean over the ids of -log q."""
    logits_RV = head(hidden_RD)
    log_q_RV = logits_RV.to(torch.promote_types(logits_RV.dtype, torch.float32)).log_softmax(-1)
    ce_R = -log_q_RV.gather(-1, label_R[:, None])[:, 0]
    loss_R = ce_R if not smoothing else (1 - smoothing) * ce_R - smoothing * log_q_RV.mean(-1)
    return loss_R, ce_R.detach(), log_q_RV.argmax(-1)


def divergence_rows(
    head: Head, hidden_RD: Tensor, label_R: Tensor, teacher_RD: Tensor, terms: Objective, temperature: float
) -> tuple[Tensor, ...]:
    """The fields of `Compared` by way of all logits: the weighed divergences of `terms` at `temperature`."""
    logits_RV = head(hidden_RD)
    logits_RV = logits_RV.to(torch.promote_types(logits_RV.dtype, torch.float32))
    with torch.no_grad():
        log_p_RV = (head(teacher_RD).to(logits_RV.dtype) / temperature).log_softmax(-1)
        log_1_RV = logits_RV.log_softmax(-1)
        ce_R, top_R = -log_1_RV.gather(-1, label_R[:, None])[:, 0], log_1_RV.argmax(-1)
    mass_R = torch.ones_like(ce_R)

    rows = Rows((logits_RV / temperature).log_softmax(-1), log_p_RV, mass_R, label_R)
    return sum((c * ON_DISTRIBUTIONS[name](rows) for c, name in terms), torch.zeros_like(mass_R)), ce_R, top_R


def compare(
    head: Head,
    hidden_RD: Tensor,
    label_R: Tensor,
    *,
    teacher_RD: Tensor | None = None,
    terms: Objective = (),
    temperature: float = 1.0,
    smoothing: float = 0.0,
    head_learns: bool = False,
    chunk: int | None = None,
) -> Compared:
    """The loss of each row: with `teacher_RD` [R, D] the divergences `terms` from what `head` makes of those states (no
    gradients), both at `temperature`; without, the cross-entropy with `label_R`, smoothed.

    Equal to the plain forms above (tests: float64, values and gradients).
    """
    if not len(hidden_RD):
        zero_R = no_rows(hidden_RD)
        return Compared(zero_R, zero_R.detach(), label_R.clone())

    def plain(hidden_rD: Tensor, span: slice) -> tuple[Tensor, ...]:
        if teacher_RD is None:
            return smooth_rows(head, hidden_rD, label_R[span], smoothing)
        return divergence_rows(head, hidden_rD, label_R[span], teacher_RD[span], terms, temperature)

    vocab = width_of(head, hidden_RD)
    return Compared(*in_chunks(plain, hidden_RD, 1, vocab=vocab, head_learns=head_learns, chunk=chunk))
