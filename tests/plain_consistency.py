"""The consistency loss of one sample from three plain forward passes per block, as its definition reads: the text for the
autoregressive loss, the fixed point behind what is before it, and the state behind what is before it.

Used by test_consistency.py and bench/consistency_step.py.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from draftsmith.models.consistency import Consistency


def plain_parts(module: Consistency, ids_T: Tensor, states_T: Tensor, first: int) -> Iterator[Tensor]:
    """The parts, one per block, of the loss of a step of this sample alone, for labels self and base and kl at temperature 1.

    `ids_T`: prompt and answer, whose first token is at `first`; `states_T`: what the blocks show, the text elsewhere.
    """
    config, target, view = module.config, module.target, module.adapters.view
    n, size, smooth = len(ids_T), config.block, config.label_smoothing

    def log_probs(row: Tensor, name: str = "noisy") -> Tensor:
        with view(name):  # type: ignore[arg-type]
            positions = torch.arange(len(row), device=row.device)
            logits_TV = target.head(target.forward(row[None], positions[None]).last_hidden_BTD[0])
        return logits_TV.to(torch.promote_types(logits_TV.dtype, torch.float32)).log_softmax(-1)

    told = {}  # block -> its rows with a loss
    for lo in range(first, n, size):
        wrong = (states_T[lo : lo + size] != ids_T[lo : lo + size]).nonzero()[:, 0].tolist()
        if wrong and lo + wrong[0] < n - 1:
            told[lo] = slice(lo + wrong[0], min(lo + size, n - 1))
    for number, lo in enumerate(range(first, n, size)):
        hi = min(lo + size, n)
        own = log_probs(ids_T[:hi])[lo - 1 : hi - 1]  # the autoregressive loss of this block's tokens
        ar = (1 - smooth) * own.gather(-1, ids_T[lo:hi, None]).sum() + smooth * own.mean(-1).sum()
        part = -config.ar_weight * ar / (n - first)
        if lo in told:
            with torch.no_grad():
                log_p = log_probs(ids_T[:hi], "clean" if config.labels == "base" else "noisy")[told[lo]]
            clean_until = first + number // config.window * config.window * size
            log_q = log_probs(torch.cat([ids_T[:clean_until], states_T[clean_until:hi]]))[told[lo]]
            part = part + (log_p.exp() * (log_p - log_q)).sum(-1).mean() / len(told)
        yield part
