"""Certainty forcing of dParallel (arXiv:2509.26488): be right, and where right, be sure.

    loss of a sample = CE + CE' + beta (H + H')

over two complementary copies of a text: CE is the mean over the hidden tokens of a copy, H the mean entropy at its own
temperature over those of them whose likeliest token is the label. Wrong rows get cross-entropy alone, or the model
would learn to be sure of mistakes. The loss of a batch is the mean over its samples.

The number of right rows depends on the model, and no count of a whole optimiser step may (DESIGN: counts come before
any forward pass). It does not have to: a sample lies in one batch of one process, which divides its own sums by its own
numbers; what is left to divide by is the number of samples, known from the data. So the loss does not depend on batch
size, accumulation or processes, and a batch of one sample gives the paper's.

Test: pytest tests/test_fused_head.py
"""

from __future__ import annotations

import torch
from torch import Tensor


def certainty(ce_R: Tensor, entropy_R: Tensor, correct_R: Tensor, unit_R: Tensor, units: int) -> tuple[Tensor, Tensor]:
    """(sum over units of the mean cross-entropy, sum over units of the mean entropy of correct rows).

    A unit is one copy of one sample; `unit_R` in 0..units - 1. A unit without correct rows adds 0 to the second sum.
    """

    def mean_over(rows_R: Tensor, values_R: Tensor) -> Tensor:
        weight_R = rows_R.to(values_R.dtype)
        zero_U = values_R.new_zeros(units)
        sums_U = zero_U.index_add(0, unit_R, values_R * weight_R)
        return (sums_U / zero_U.index_add(0, unit_R, weight_R).clamp(min=1)).sum()

    return mean_over(torch.ones_like(correct_R), ce_R), mean_over(correct_R, entropy_R)
