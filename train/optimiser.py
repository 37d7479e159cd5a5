"""Optimisers and the learning-rate schedule.

AdamW (Loshchilov & Hutter 2019) on fp32 masters; optionally Muon (Jordan et al. 2024, `torch.optim.Muon`) for the
matrices inside the network, or plain SGD. Tests: `pytest tests/test_train.py`.
"""

from __future__ import annotations

import math

import torch
from torch import nn

from ..configs.training import OptimConfig


def make_optimisers(drafter: nn.Module, config: OptimConfig) -> list[torch.optim.Optimizer]:
    """The optimisers of all trainable parameters; every group carries its `peak` learning rate.

    Vectors (norms, biases) never decay. With `muon`, matrices go to Muon, except the output head and embeddings.
    Raises ValueError when nothing is trainable, a trained tensor is not fp32 or finer (a bf16 master would round small
    steps away), or the installed torch has no Muon.
    """
    named = [(n, p) for n, p in drafter.named_parameters() if p.requires_grad]
    if not named:
        raise ValueError("this drafter has no trainable parameter")
    coarse = [n for n, p in named if p.dtype not in (torch.float32, torch.float64)]
    if coarse:
        raise ValueError(f"trained tensors must be fp32 masters; {coarse[0]} and {len(coarse) - 1} more are not")
    is_muon = {n: config.name == "muon" and p.ndim == 2 and "head" not in n and "embed" not in n for n, p in named}
    groups = [
        {"params": [p for n, p in named if p.ndim >= 2 and not is_muon[n]], "weight_decay": config.weight_decay},
        {"params": [p for n, p in named if p.ndim < 2], "weight_decay": 0.0},
    ]
    groups = [group | {"peak": config.lr} for group in groups if group["params"]]
    optimisers: list[torch.optim.Optimizer] = []
    if groups and config.name == "sgd":
        optimisers.append(torch.optim.SGD(groups, lr=config.lr))
    elif groups:
        optimisers.append(torch.optim.AdamW(groups, lr=config.lr, betas=config.betas, eps=config.eps, fused=True))
    if any(is_muon.values()):
        if not hasattr(torch.optim, "Muon"):
            raise ValueError(
                f"optim.name=muon needs torch.optim.Muon (torch 2.9 or newer), this is {torch.__version__}"
            )
        matrices = [{"params": [p for n, p in named if is_muon[n]], "peak": config.muon_lr}]
        # The update is scaled to AdamW's usual size (Liu et al. 2025, arXiv:2502.16982), whatever a matrix's shape.
        muon = torch.optim.Muon(
            matrices, lr=config.muon_lr, weight_decay=config.weight_decay, adjust_lr_fn="match_rms_adamw"
        )
        optimisers.append(muon)
    return optimisers


def lr_factor(progress: float, config: OptimConfig) -> float:
    """Share of the peak rate at `progress` in [0, 1], the share of the budget that is used once this step is done.

    Linear warm-up; then cosine to the floor, reached by the last step; or constant with a linear decay at the end.
    """
    progress = min(max(progress, 0.0), 1.0)
    if progress < config.warmup:
        return progress / config.warmup
    if config.schedule == "cosine":
        after = (progress - config.warmup) / (1 - config.warmup)
        return config.floor + (1 - config.floor) * 0.5 * (1 + math.cos(math.pi * after))
    if config.schedule == "wsd" and progress > 1 - config.decay:
        return config.floor + (1 - config.floor) * (1 - progress) / config.decay
    return 1.0


def set_lr(optimisers: list[torch.optim.Optimizer], factor: float) -> float:
    """Set every group to its peak times `factor`; returns the first group's rate."""
    for optimiser in optimisers:
        for group in optimiser.param_groups:
            group["lr"] = group["peak"] * factor
    return optimisers[0].param_groups[0]["lr"]
