"""Two trainings of a denoiser: conversion of an autoregressive model, and certainty forcing.

Both are modules as the training loop wants them (`denominators`, `loss`; models/drafter.py), around a target with
adapters (models/adapters.py), which stays outside: what a module holds are the trained tensors. Every pass of the
target happens inside `loss`, so no states are captured and none are asked for.

    BlockDiffusion    cross-entropy of hidden tokens under an objective of models/diffusion.py, and where the clean copy
                      allows it an autoregressive one beside it; by choice with a diffusion model's own soft labels,
                      or through blocks of growing size
    CertaintyForcing  dParallel (arXiv:2509.26488): losses/certainty.py on two complementary copies of the
                      model's own answers, or on states that its decoding of them went through (`order: stored`)

In a block-causal pair every block has the text before it clean and nothing after it, which is what dParallel's
semi-autoregressive masking makes of one block per sample: here all blocks are trained in one pass (`schedule:
uniform`), or one (`semi_ar`, the paper's; what the layouts `single` and `whole` need).

Test: pytest tests/test_block_diffusion.py
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

import torch
from torch import Tensor, nn

from ..losses.certainty import certainty
from ..losses.fused_head import HeadRows, head_rows
from .adapters import AdapterConfig, Adapters
from .diffusion import ObjectiveConfig, Rows, denominator, hidden_states, make_rows
from .drafter import Batch, TargetOut, Terms
from .noise import Text, corrupt, cut
from .settings import check_choices
from .target import Target

SURE = 0.9  # the usual threshold of decoding (Fast-dLLM, arXiv:2505.22618)


@dataclass(frozen=True)
class CertaintyConfig:
    """Settings of certainty forcing."""

    beta: float = 1.0
    """Weight of the entropy (dParallel: 1 for Dream, 2 for LLaDA)."""
    temperature: float = 0.5
    """Temperature of the entropy, and of nothing else (dParallel: 0.5)."""
    level: float = 0.5
    """Share of the tokens that the first copy hides; the second hides the others (dParallel: 0.5). With a stored order: the
    lowest share of a block."""
    order: Literal["drawn", "stored"] = "drawn"
    """What a block hides: tokens drawn by lot, in two complementary copies (dParallel); or, in one copy, those that the
    stored order of decoding says came last, at a level drawn between `level` and 1 (after d3LLM, arXiv:2601.07568)."""
    blocks: Literal["all", "one"] = "all"
    """Blocks of a text that are trained per epoch; `one`, a random one, is the paper's (needed where blocks see what
    follows: layouts single and whole)."""

    def __post_init__(self) -> None:
        check_choices(self, "certainty")
        if self.beta < 0 or self.temperature <= 0 or not 0 < self.level < 1:
            raise ValueError(
                "certainty: beta must not be negative, temperature positive, level in (0, 1); got "
                f"{self.beta}, {self.temperature}, {self.level}"
            )


@dataclass(frozen=True)
class ConversionConfig:
    """How a conversion goes about an objective."""

    curriculum: tuple[int, ...] = ()
    """Sizes of blocks that equal shares of the budget are trained with, the last one the objective's own (I-DLM,
    arXiv:2604.11035: 1, 2, 3; equal shares are our choice). Empty: that one alone."""
    labels: Literal["data", "teacher"] = "data"
    """`teacher`: the target is a diffusion model, and hidden tokens learn its own distribution, computed without
    adapters and with attention to the whole text (D2F, arXiv:2508.09192, asymmetric distillation)."""

    def __post_init__(self) -> None:
        check_choices(self, "conversion")

    def check(self, objective: ObjectiveConfig, adapters: AdapterConfig) -> None:
        """Raises ValueError where the objective or the adapters do not go with these settings."""
        if self.curriculum and self.curriculum[-1] != objective.block:
            raise ValueError(
                f"conversion.curriculum = {', '.join(map(str, self.curriculum))} does not end with objective.block = "
                f"{objective.block}, which is what the model is decoded with; make the last one equal"
            )
        for size in self.curriculum:
            replace(objective, block=size)  # refuses what is no block
        if self.labels == "teacher" and (objective.layout, adapters.kind) != ("single", "lora"):
            raise ValueError(
                f"conversion.labels = teacher needs layout=single (rows of the whole text) and kind=lora (the model as it "
                f"was); got {objective.layout}, {adapters.kind}"
            )
        if self.labels == "teacher" and adapters.mask == "new":
            raise ValueError("conversion.labels = teacher with mask=new: the teacher knows no such mask; use reserved")


def certainty_objective(base: ObjectiveConfig, config: CertaintyConfig) -> ObjectiveConfig:
    """A model's own objective with the noise of certainty forcing."""
    if config.blocks == "all" and base.layout != "pair":
        raise ValueError(f"certainty.blocks = all hides the text before a block in layout {base.layout}: set it to one")
    if config.order == "stored":
        return replace(
            base, scope="block", schedule="uniform" if config.blocks == "all" else "semi_ar", complementary=False,
            levels=(config.level, 1.0), draw="latest", weight="none", normalise="hidden", ar_weight=0.0,
        )  # fmt: skip
    return replace(
        base, scope="sample", schedule="uniform" if config.blocks == "all" else "semi_ar", complementary=True,
        levels=(config.level, config.level), draw="independent", weight="none", normalise="hidden", ar_weight=0.0,
    )  # fmt: skip


class Passes:
    """What both share: the rows of a batch, the target's passes over them, and their scores.

    Raises ValueError when adapters and objective do not fit, or blocks cannot be filled as the objective says.
    """

    def __init__(self, objective: ObjectiveConfig, target: Target, adapters: Adapters) -> None:
        if adapters.target is not target or adapters.dual != objective.dual:
            raise ValueError("these adapters are of another target, or of another kind of objective (dual)")
        if objective.padding == "train" and not target.facts.eos_ids:
            raise ValueError(f"objective.padding = train: {target.facts.name} has no end token to fill blocks with")
        self.objective, self.target, self.adapters = objective, target, adapters
        self.mask_id = adapters.needed_mask_id()
        eos = getattr(target.tokenizer, "eos_token_id", None)
        self.fill_id = eos if eos in target.facts.eos_ids else next(iter(target.facts.eos_ids), 0)

    def rows(self, batch: Batch) -> tuple[Text, Rows]:
        """The batch's text in blocks, and its noisy rows: functions of the data and seeded noise alone."""
        text = cut(batch, self.objective, self.fill_id, self.target.facts.eos_ids)
        return text, make_rows(text, corrupt(text, self.objective), self.objective, self.mask_id)

    def run(self, text: Text, rows: Rows) -> tuple[Tensor | None, Tensor]:
        """Last hidden states of the clean copy and of the noisy rows."""
        return hidden_states(self.target.forward, self.adapters.view, text, rows, self.objective)

    def score(
        self,
        hidden_BTD: Tensor,
        flat_R: Tensor,
        label_R: Tensor,
        temperature: float | None = None,
        teacher_BTD: Tensor | None = None,
    ) -> HeadRows:
        """Cross-entropy and entropy of some rows of [B, T, D]."""
        return head_rows(
            self.target.head,
            hidden_BTD.flatten(0, 1)[flat_R],
            label_R,
            temperature=temperature,
            teacher_RD=None if teacher_BTD is None else teacher_BTD.flatten(0, 1)[flat_R],
            head_learns=self.adapters.head_learns,
        )

    @torch.no_grad()
    def teach(self, text: Text, rows: Rows) -> Tensor:
        """Last hidden states [B, Q, D] of the same rows in the model as it was, each seeing all of its copy."""
        whole = replace(self.objective, layout="whole")
        return hidden_states(self.target.forward, lambda _: self.adapters.view("clean"), text, rows, whole)[1]


class BlockDiffusion(nn.Module):
    """Conversion: terms `hidden`, and `ar` where the objective weighs it."""

    method = "block_diffusion"

    def __init__(
        self,
        objective: ObjectiveConfig,
        target: Target,
        adapters: Adapters,
        config: ConversionConfig = ConversionConfig(),
    ) -> None:
        super().__init__()
        config.check(objective, adapters.config)
        if config.labels == "teacher" and getattr(target.tokenizer, "mask_token_id", None) != adapters.mask_id:
            raise ValueError(
                f"conversion.labels = teacher: {target.facts.name} has no mask token of its own, so it does not denoise and "
                "has no labels to give; name a diffusion model as the target, or set labels=data"
            )
        self.trained, self.config, self.objective = adapters.trained, config, objective
        sizes = config.curriculum or (objective.block,)
        self.stages = [Passes(replace(objective, block=size), target, adapters) for size in sizes]
        self.passes = self.stages[-1]

    def passes_at(self, progress: float) -> Passes:
        """Those of the curriculum's stage at this share of the budget; held-out figures are of the last (share 1)."""
        return self.stages[min(int(progress * len(self.stages)), len(self.stages) - 1)]

    def train(self, mode: bool = True) -> BlockDiffusion:
        self.passes.adapters.train(mode)
        return super().train(mode)

    def denominators(self, batch: Batch, progress: float) -> dict[str, float]:
        text, rows = self.passes_at(progress).rows(batch)
        counts = {"hidden": denominator(rows, self.objective)}
        return counts | ({"ar": float(len(ar_rows(text)[0]))} if self.objective.ar_weight else {})

    def loss(self, batch: Batch, target_out: TargetOut, progress: float) -> Terms:
        """Metrics: `hidden_loss` (nats per hidden token, unweighted), `accuracy`, `sure` (share whose likeliest token has
        a chance of at least SURE), `ar_loss`."""
        passes = self.passes_at(progress)
        text, rows = passes.rows(batch)
        clean_BTD, noisy_BQD = passes.run(text, rows)
        flat_R = rows.flat_R
        label_R = rows.label_BQ.flatten()[flat_R]
        teacher_BQD = passes.teach(text, rows) if self.config.labels == "teacher" else None
        scored = passes.score(noisy_BQD, flat_R, label_R, teacher_BTD=teacher_BQD)
        terms = Terms({"hidden": (scored.ce_R * rows.weight_BQ.flatten()[flat_R]).sum()}, metrics_of(scored, label_R))
        if self.objective.ar_weight:
            assert clean_BTD is not None
            flat_R, label_R = ar_rows(text)
            ce_R = passes.score(clean_BTD, flat_R, label_R).ce_R
            terms.losses["ar"] = self.objective.ar_weight * ce_R.sum()
            terms.metrics["ar_loss"] = ce_R.detach().sum(), torch.tensor(float(len(ce_R)))
        return terms

    forward = loss


class CertaintyForcing(nn.Module):
    """Certainty forcing: terms `ce` and `entropy`, sums over samples. `objective` is the model's own."""

    method = "certainty"

    def __init__(self, objective: ObjectiveConfig, target: Target, adapters: Adapters, config: CertaintyConfig) -> None:
        super().__init__()
        self.trained, self.config, self.objective = adapters.trained, config, objective
        self.passes = Passes(certainty_objective(objective, config), target, adapters)

    def train(self, mode: bool = True) -> CertaintyForcing:
        self.passes.adapters.train(mode)
        return super().train(mode)

    def denominators(self, batch: Batch, progress: float) -> dict[str, float]:
        """Samples with a hidden token, for both terms: see losses/certainty.py."""
        *_, samples = units(self.passes.rows(batch)[1])
        return {"ce": float(samples), "entropy": float(samples)}

    def loss(self, batch: Batch, target_out: TargetOut, progress: float) -> Terms:
        """Metrics as of conversion, and `entropy` (of correct rows, nats, at its temperature)."""
        text, rows = self.passes.rows(batch)
        _, noisy_BQD = self.passes.run(text, rows)
        flat_R = rows.flat_R
        label_R = rows.label_BQ.flatten()[flat_R]
        scored = self.passes.score(noisy_BQD, flat_R, label_R, self.config.temperature)
        correct_R = scored.top_R == label_R
        unit_R, count, _ = units(rows)
        ce, entropy = certainty(scored.ce_R, scored.entropy_R, correct_R, unit_R, count)
        metrics = metrics_of(scored, label_R)
        metrics["entropy"] = (scored.entropy_R.detach() * correct_R).sum(), correct_R.sum().float()
        return Terms({"ce": ce, "entropy": self.config.beta * entropy}, metrics)

    forward = loss


def units(rows: Rows) -> tuple[Tensor, int, int]:
    """Of the rows with a loss: the number of their unit (one copy of one sample); how many units and samples there are."""
    flat_R = rows.flat_R
    row_R = flat_R // max(rows.label_BQ.shape[1], 1)
    keys_R3 = torch.stack([row_R, rows.document_BQ.flatten()[flat_R], rows.copy_BQ.flatten()[flat_R]], dim=1)
    units_U3, unit_R = keys_R3.unique(dim=0, return_inverse=True)
    return unit_R, len(units_U3), len(keys_R3[:, :2].unique(dim=0))


def ar_rows(text: Text) -> tuple[Tensor, Tensor]:
    """b * T + t of the clean tokens whose next one is supervised and of the same document, and that token [R]."""
    told_BT = text.supervised_BT & ~text.filler_BT
    next_BT = torch.nn.functional.pad(told_BT[:, 1:], (0, 1), value=False)
    same_BT = torch.nn.functional.pad(text.samples_BT[:, 1:] == text.samples_BT[:, :-1], (0, 1), value=False)
    flat_R = (next_BT & same_BT).flatten().nonzero()[:, 0]
    return flat_R, text.ids_BT.flatten()[(flat_R + 1).clamp(max=text.ids_BT.numel() - 1)]


def metrics_of(scored: HeadRows, label_R: Tensor) -> dict[str, tuple[Tensor, Tensor]]:
    count = torch.tensor(float(len(label_R)))
    return {
        "hidden_loss": (scored.ce_R.detach().sum(), count),
        "accuracy": ((scored.top_R == label_R).sum().float(), count),
        "sure": ((scored.chance_R >= SURE).sum().float(), count),
    }
