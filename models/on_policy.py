"""Training a denoiser on what it does itself: its own guesses are the noise, or its own steps choose what stays hidden.

A text is hidden once, at a fixed level, and the model guesses the hidden tokens without gradients (`rewrite`, which the
training loop calls before the loss). Two copies are then trained in one pass: the first as it was hidden, the second
with the guesses in it (`second`):

    guesses     DMax's on-policy uniform training (arXiv:2604.08302, section "On-Policy Uniform Training"): every hidden
                token shows the guess, right or wrong, and every token of the answer is a label, so that wrong ones are
                repaired and right ones kept. It is what decoding by soft commits or edits asks for.
    trajectory  redundancy-aware tuning (R2-dLLM, arXiv:2604.18995): right guesses are shown as decided, wrong ones
                stay hidden and are the labels: the state that a decoding without wasted steps comes to. `redundant`
                weighs, in the first copy, tokens that the model has right but is not sure of: a decoder would hide them
                again. The paper's code is not public and its text says no more than "aligns the model with efficient
                decoding trajectories"; this is our reading of it, which needs no stored trajectories.

Guesses are a function of weights, data and noise keyed by (seed, epoch, sample id): no draw is made, and dropout is off.
The counts are those of the data (which guesses are right acts in the sums alone). DMax leaves out end tokens beyond the
32nd; here a text is filled to the end of a block at most, and nothing is left out.

Run: train/distill_certainty.py with method=on_policy. Test: pytest tests/test_on_policy.py
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

import torch
from torch import Tensor, nn

from .adapters import Adapters
from .block_diffusion import SURE, Passes, metrics_of
from .diffusion import ObjectiveConfig, Rows, make_rows
from .drafter import Batch, TargetOut, Terms
from .noise import Copy, Text, corrupt, cut
from .settings import check_choices
from .target import Target

CHUNK = 2**22  # logits that are held at a time


@dataclass(frozen=True)
class OnPolicyConfig:
    """Settings of training on own guesses. Defaults are DMax's."""

    second: Literal["guesses", "trajectory"] = "guesses"
    """What hidden tokens show in the second copy: all guesses (DMax), or the right ones (redundancy-aware)."""
    level: float = 0.75
    """Share of the tokens that is hidden (DMax: 0.75)."""
    rounds: int = 1
    """Passes whose guesses are shown, each reading those of the last (DMax: 1)."""
    weight: float = 1.0
    """Weight of the second copy's loss beside the first's (DMax: 1)."""
    redundant: float = 0.0
    """Weight that a right but unsure token of the first copy gets beside its own of 1 (DMax: none)."""

    def __post_init__(self) -> None:
        check_choices(self, "on_policy")
        if not 0 < self.level <= 1 or self.rounds < 1 or self.weight < 0 or self.redundant < 0:
            raise ValueError(
                "on_policy: level must lie in (0, 1], rounds be at least 1, weight and redundant not negative; got "
                f"{self.level}, {self.rounds}, {self.weight}, {self.redundant}"
            )


def on_policy_objective(base: ObjectiveConfig, config: OnPolicyConfig) -> ObjectiveConfig:
    """A model's own objective with one copy, hidden at one level."""
    return replace(
        base, scope="sample", schedule="uniform", complementary=False, levels=(config.level, config.level),
        draw="independent", weight="none", normalise="hidden", ar_weight=0.0,
    )  # fmt: skip


class OnPolicy(nn.Module):
    """Training on own guesses: terms `hidden` (first copy) and `second`. `objective` is the model's own."""

    method = "on_policy"

    def __init__(self, objective: ObjectiveConfig, target: Target, adapters: Adapters, config: OnPolicyConfig) -> None:
        super().__init__()
        self.trained, self.config, self.objective = adapters.trained, config, objective
        self.passes = Passes(on_policy_objective(objective, config), target, adapters)

    def train(self, mode: bool = True) -> OnPolicy:
        self.passes.adapters.train(mode)
        return super().train(mode)

    @torch.no_grad()
    def rewrite(self, batch: Batch, progress: float) -> Batch:
        """The batch with `guess_BT` [B, T']: of the text in blocks, what each hidden token shows in the second copy; the
        mask where it shows that, and wherever nothing was hidden."""
        adapters = self.passes.adapters
        dropping = adapters.training
        adapters.train(False)
        text, (first,) = self._hidden(batch)
        guess_BT = torch.full_like(text.ids_BT, self.passes.mask_id)
        for _ in range(self.config.rounds):
            rows = self._rows(text, [replace(first, guess_BT=guess_BT)])
            label_R, at_R = self._labels(rows)
            hidden_R = first.hidden_BT.flatten()[at_R]  # in `dual`, labels that no row of their block shows are not
            flat_R, label_R, at_R = rows.flat_R[hidden_R], label_R[hidden_R], at_R[hidden_R]
            hidden_RD = self.passes.run(text, rows)[1].flatten(0, 1)[flat_R]
            found_R = likeliest(self.passes.target, hidden_RD, self.passes.mask_id)
            if self.config.second == "trajectory":  # what was decided stays, what is wrong stays hidden
                found_R = torch.where(found_R == label_R, found_R, guess_BT.flatten()[at_R])
            guess_BT = guess_BT.flatten().scatter(0, at_R, found_R).view_as(guess_BT)
        adapters.train(dropping)
        return replace(batch, guess_BT=guess_BT)

    def denominators(self, batch: Batch, progress: float) -> dict[str, float]:
        text, copies = self._hidden(batch)
        rows = self._rows(text, self._both(text, copies[0], text.ids_BT))
        first = int((rows.copy_BQ.flatten()[rows.flat_R] == 0).sum())
        return {"hidden": float(first), "second": float(len(rows.flat_R) - first)}

    def loss(self, batch: Batch, target_out: TargetOut, progress: float) -> Terms:
        """Metrics of the first copy as of conversion; of the second `second_loss`, and over tokens whose guess is wrong
        `repaired`, over those whose guess is right `kept`: how many come out right. A batch without guesses (the loop
        does not rewrite held-out ones) gets them here."""
        if batch.guess_BT is None:
            batch = self.rewrite(batch, progress)
        assert batch.guess_BT is not None
        text, (first,) = self._hidden(batch)
        rows = self._rows(text, self._both(text, first, batch.guess_BT))
        flat_R = rows.flat_R
        label_R, at_R = self._labels(rows)
        scored = self.passes.score(self.passes.run(text, rows)[1], flat_R, label_R)
        first_R = rows.copy_BQ.flatten()[flat_R] == 0
        right_R, guess_R = scored.top_R == label_R, batch.guess_BT.flatten()[at_R]
        unsure_R = right_R & (scored.chance_R < SURE)
        counts_R = ~first_R
        if self.config.second == "trajectory":
            counts_R = counts_R & (guess_R != label_R)
        weight_R = torch.where(first_R, 1 + self.config.redundant * unsure_R, self.config.weight * counts_R)
        loss_R = scored.ce_R * weight_R
        terms = Terms({"hidden": loss_R[first_R].sum(), "second": loss_R[~first_R].sum()})
        own = replace(scored, ce_R=scored.ce_R[first_R], top_R=scored.top_R[first_R], chance_R=scored.chance_R[first_R])
        terms.metrics = metrics_of(own, label_R[first_R])
        terms.metrics["second_loss"] = (scored.ce_R.detach() * counts_R).sum(), counts_R.sum().float()
        hidden_R = ~first_R & first.hidden_BT.flatten()[at_R]
        for name, of_R in (("repaired", guess_R != label_R), ("kept", guess_R == label_R)):
            terms.metrics[name] = (right_R & hidden_R & of_R).sum().float(), (hidden_R & of_R).sum().float()
        return terms

    forward = loss

    def _hidden(self, batch: Batch) -> tuple[Text, list[Copy]]:
        passes = self.passes
        text = cut(batch, passes.objective, passes.fill_id, passes.target.facts.eos_ids)
        return text, corrupt(text, passes.objective)

    def _both(self, text: Text, first: Copy, guess_BT: Tensor) -> list[Copy]:
        """The first copy, and the second, whose hidden tokens show guesses."""
        counted_BT = first.counted_BT
        if self.config.second == "guesses":
            counted_BT = counted_BT | text.hideable_BT
        return [first, replace(first, counted_BT=counted_BT, guess_BT=guess_BT)]

    def _rows(self, text: Text, copies: list[Copy]) -> Rows:
        return make_rows(text, copies, self.passes.objective, self.passes.mask_id)

    def _labels(self, rows: Rows) -> tuple[Tensor, Tensor]:
        """Of the rows with a loss: the token that each predicts, and where it is: b * T' + t of the text."""
        flat_R = rows.flat_R
        shift = 1 if self.passes.objective.shift else 0
        row_R = flat_R // max(rows.label_BQ.shape[1], 1)
        at_R = row_R * rows.width + rows.token_BQ.flatten()[flat_R] + shift
        return rows.label_BQ.flatten()[flat_R], at_R


def likeliest(target: Target, hidden_RD: Tensor, mask_id: int) -> Tensor:
    """int64 [R], the likeliest of the ids that decoding may emit."""
    never_V = torch.zeros(target.facts.vocab, dtype=torch.bool, device=hidden_RD.device)
    never_V[target.banned_ids] = True
    never_V[mask_id : mask_id + 1] = True  # a mask behind the vocabulary has no logit
    parts = hidden_RD.split(max(8, CHUNK // target.facts.vocab))
    return torch.cat([target.head(part_rD).masked_fill(never_V, float("-inf")).argmax(-1) for part_rD in parts])
