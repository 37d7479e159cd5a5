"""Consistency models: from a state of Jacobi decoding straight to the fixed point.

Jacobi decoding (models/trajectories.py) fills a block of n places with guesses, and every pass replaces each guess by the
model's token behind the guesses before it. A model whose rows say the fixed point's tokens already behind *wrong* guesses
needs fewer passes. With y* the block's fixed point, y a state, and sg the stop-gradient, what is trained is

    global   D( sg p(. | y*_<i) || p(. | y_<i) )     CLLM, arXiv:2403.00835, section 3.2.2    labels=self
    local    D( sg p(. | y'_<i) || p(. | y_<i) )     the same, y' the state after y           labels=local

with an autoregressive loss on the answers beside it (section 3.2.3), without which the model drifts into repetition.
Relatives that differ in what a block shows and what its rows learn (PRESETS): Jacobi Forcing (arXiv:2512.14681), whose
blocks read the noisy blocks of their window before them; Make Some Noise (arXiv:2406.17404), noise and the text's own
tokens as labels; and online self-distillation to a standalone multi-token predictor (Kirchenbauer et al.,
arXiv:2602.06019), mask tokens and labels by the frozen base.

Which rows have a loss. The row of token t in a noisy block reads the block's guesses up to t and predicts token t + 1 of the
text. With `reach` divergence it counts from the block's first place on where state and text differ: rows before it read
what the clean text has, and the row before a block is a clean one, under the autoregressive loss. It counts up to the
row that predicts the answer's last token, its end; a row whose next token is of no answer, or of another one, has none.
CLLM's mean is over *places* from the first wrong one on, which the row before predicts, from y* itself and without a
loss; counted by rows the block's last one takes its stead: it makes the first guess of the next block (Jacobi Forcing
has two in flight). The number is the same.

Two passes, as for block diffusion (models/diffusion.py): the clean text, then all noisy rows of all blocks behind its keys
and values, gradients through both. The fixed point's own rows are the clean ones, so labels=self costs nothing more. A
block without a loss is not run where nobody reads it.

Run: train/distill_consistency.py. Test: pytest tests/test_consistency.py
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

from torch import nn

from ..losses.objective import parse_objective
from .adapters import AdapterConfig, Adapters
from .drafter import Batch, TargetOut, Terms
from .settings import check_choices
from .target import Target
from .trajectories import Start

HARD = ("data", "critic")  # labels that are tokens


@dataclass(frozen=True)
class ConsistencyConfig:
    """What a block shows, what its rows learn, and what keeps the model in place. Defaults are CLLM's."""

    block: int = 16
    """Places that are guessed together, counted from the answer's first token (CLLM: 16)."""
    window: int = 1
    """Blocks of a window, whose noisy blocks a noisy block reads, each up to itself; what lies before the window is read
    clean (Jacobi Forcing: 16; CLLM: none, which is 1)."""
    states: Literal["stored", "online", "noise"] = "stored"
    """What a block shows: a state of the trajectory that came with the answer (`rollout --trajectories`; CLLM); one that the
    model in training comes to, in a walk of its own; or first guesses (Make Some Noise)."""
    start: Start = "prompt"
    """First guesses of the states `online` and `noise`: tokens of the text before the answer (CLLM) or before the block
    (Make Some Noise), the last one before the block, any tokens, or mask tokens."""
    passes: int = 4
    """States `online`: passes of the walk; a block shows the state after 0 to that many (our choice)."""
    schedule: Literal["uniform", "progressive"] = "uniform"
    """Which state: any one before the fixed point (CLLM); or the one whose share of wrong tokens is nearest to a share
    that rises linearly, from 1 / window in a window's first block to 1 in its last (Jacobi Forcing)."""
    labels: Literal["self", "local", "base", "data", "critic"] = "self"
    """What a row learns: the model's own distribution at the fixed point (CLLM, global) or in the next state (CLLM, local);
    the frozen base's at the fixed point; the text's token; or the base's likeliest token behind what the model itself
    just said (Kirchenbauer et al., hard teacher)."""
    objective: str = "kl"
    """Divergence of soft labels from the row: an expression over the table of losses (CLLM: kl)."""
    temperature: float = 1.0
    """Of both sides of the divergence (Jacobi Forcing: 1)."""
    reach: Literal["divergence", "block"] = "divergence"
    """Rows with a loss: from the first wrong guess on (CLLM), or all of the block's."""
    normalise: Literal["tokens", "blocks"] = "blocks"
    """Mean over rows; or over blocks of the mean over their rows (CLLM, whose step is one block; Jacobi Forcing)."""
    ar_weight: float = 10.0
    """Weight of the autoregressive loss on the answers (CLLM: 10)."""
    label_smoothing: float = 0.1
    """Share of the autoregressive labels that is spread over the vocabulary (CLLM's trainer: 0.1)."""
    allow_no_anchor: bool = False
    """Lets `ar_weight` be 0: nothing then keeps the model from agreeing with itself on one repeated token."""

    def __post_init__(self) -> None:
        check_choices(self, "consistency")
        parse_objective(self.objective, method="consistency")
        if self.block < 2 or self.window < 1 or self.passes < 1:
            raise ValueError(
                "consistency: block must be at least 2, window and passes at least 1; got "
                f"{self.block}, {self.window}, {self.passes}"
            )
        if self.temperature <= 0 or self.ar_weight < 0 or not 0 <= self.label_smoothing < 1:
            raise ValueError(
                "consistency: temperature must be positive, ar_weight not negative, label_smoothing in [0, 1); got "
                f"{self.temperature}, {self.ar_weight}, {self.label_smoothing}"
            )
        if self.ar_weight == 0 and not self.allow_no_anchor:
            raise ValueError(
                "consistency.ar_weight = 0 takes away what keeps the answers right (models collapse to one repeated token): "
                "give it a weight, or set consistency.allow_no_anchor=true"
            )
        if self.ar_weight == 0 and self.label_smoothing:
            raise ValueError(
                f"consistency.label_smoothing = {self.label_smoothing} is of the autoregressive loss, and ar_weight is 0: set it "
                "to 0 too"
            )
        if self.schedule == "progressive" and self.states == "noise":
            raise ValueError(
                "consistency.schedule = progressive picks among states, and states=noise has one: use uniform"
            )
        if self.labels == "local" and self.states != "stored":
            raise ValueError(
                f"consistency.labels = local needs the state after the one shown, and states={self.states} keeps none: use stored"
            )
        if self.labels in HARD and (self.objective, self.temperature) != ("kl", 1.0):
            raise ValueError(
                f"consistency.labels = {self.labels} are tokens, their loss is the cross-entropy: leave out objective and "
                f"temperature, got {self.objective}, {self.temperature:g}"
            )
        if self.labels == "critic" and (self.states, self.start, self.window, self.reach) != (
            "noise",
            "mask",
            1,
            "block",
        ):
            raise ValueError(
                "consistency.labels = critic is for blocks of mask tokens: set states=noise, start=mask, window=1, "
                f"reach=block; got {self.states}, {self.start}, {self.window}, {self.reach}"
            )

    def check(self, adapters: AdapterConfig) -> None:
        """Raises ValueError where the adapters do not go with these settings."""
        if self.labels in ("base", "critic") and adapters.kind != "lora":
            raise ValueError(
                f"consistency.labels = {self.labels} asks the model as it was, which kind={adapters.kind} changes: set "
                "adapters.kind=lora"
            )
        masks = self.start == "mask" and self.states != "stored"
        if masks and adapters.mask == "none":
            raise ValueError("consistency.start = mask needs a mask token: set adapters.mask=trained (or reserved)")
        if not masks and adapters.mask != "none":
            raise ValueError(
                f"adapters.mask = {adapters.mask}: only start=mask shows mask tokens, got start={self.start}, "
                f"states={self.states}; set adapters.mask=none"
            )


PRESETS: dict[str, ConsistencyConfig] = {
    "cllm": ConsistencyConfig(),
    # The first of the paper's two rounds; the second has block 64, window 32 and states of the first one's model.
    "jacobi_forcing": ConsistencyConfig(
        block=32, window=16, schedule="progressive", ar_weight=1.0, label_smoothing=0.0
    ),
    # The paper hides one stretch of an answer; here every block is one, behind clean text.
    "make_some_noise": ConsistencyConfig(
        states="noise", start="text", labels="data", reach="block", normalise="tokens", ar_weight=1.0, label_smoothing=0.0
    ),
    # The paper's first slot is the autoregressive row before the block: here it learns the text, an answer of the base's.
    "self_distilled": ConsistencyConfig(
        states="noise", start="mask", labels="critic", reach="block", normalise="tokens", ar_weight=1.0,
        label_smoothing=0.0,
    ),
}  # fmt: skip


class Consistency(nn.Module):
    """Terms `consistency`, and `ar` where it has a weight. Adapters outside, as in models/block_diffusion.py."""

    method = "consistency"

    def __init__(self, config: ConsistencyConfig, target: Target, adapters: Adapters) -> None:
        super().__init__()
        config.check(adapters.config)
        if adapters.target is not target or adapters.dual:
            raise ValueError("these adapters are of another target, or act on noisy rows alone (dual)")
        self.trained, self.config, self.target, self.adapters = adapters.trained, config, target, adapters
        self.terms = parse_objective(config.objective, method="consistency")

    def train(self, mode: bool = True) -> Consistency:
        self.adapters.train(mode)
        return super().train(mode)

    def rewrite(self, batch: Batch, progress: float) -> Batch: ...

    def denominators(self, batch: Batch, progress: float) -> dict[str, float]: ...

    def loss(self, batch: Batch, target_out: TargetOut, progress: float) -> Terms: ...

    forward: Any = loss
