"""The consistency loss of one sample from three plain forward passes per block, as its definition reads: the text for the
autoregressive loss, the fixed point behind what is before it, and the state behind what is before it.

Used by test_consistency.py and bench/consistency_step.py.
"""

from __future__ import annotations

import torch
from torch import Tensor

from draftsmith.models.consistency import Consistency


def plain_loss(module: Consistency, ids_T: Tensor, states_T: Tensor, first: int) -> tuple[Tensor, int]:
    """(loss of a step of this sample alone, its blocks), for labels self and base and a kl at temperature 1.

    `ids_T`: prompt and answer, whose first token is at `first`; `states_T`: what the blocks show, the text elsewhere.
    """
    config, target, view = module.config, module.target, module.adapters.view
    n, size = len(ids_T), config.block

    def log_probs(row: Tensor, name: str = "noisy") -> Tensor:
        with view(name):  # type: ignore[arg-type]
            positions = torch.arange(len(row), device=row.device)
            logits_TV = target.head(target.forward(row[None], positions[None]).last_hidden_BTD[0])
        return logits_TV.to(torch.promote_types(logits_TV.dtype, torch.float32)).log_softmax(-1)

    means, ar, starts = [], ids_T.new_zeros((), dtype=torch.float32), range(first, n, size)
    for number, lo in enumerate(starts):
        hi = min(lo + size, n)
        clean_until = first + number // config.window * config.window * size
        fixed = ids_T[:hi]
        noisy = torch.cat([ids_T[:clean_until], states_T[clean_until:hi]])
        own = log_probs(fixed)  # the autoregressive loss of this block's tokens
        picked = own[lo - 1 : hi - 1].gather(-1, ids_T[lo:hi, None])[:, 0]
        smooth = config.label_smoothing
        ar = ar - ((1 - smooth) * picked + smooth * own[lo - 1 : hi - 1].mean(-1)).sum()
        wrong = (states_T[lo:hi] != ids_T[lo:hi]).nonzero()[:, 0].tolist()
        rows = range(lo + wrong[0] if wrong else hi, min(hi, n - 1))
        if not rows:
            continue
        with torch.no_grad():
            log_p = log_probs(fixed, "clean" if config.labels == "base" else "noisy")[rows.start : rows.stop]
        log_q = log_probs(noisy)[rows.start : rows.stop]
        means.append((log_p.exp() * (log_p - log_q)).sum(-1).mean())
    return torch.stack(means).mean() + config.ar_weight * ar / (n - first), len(starts)
