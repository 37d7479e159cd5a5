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
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..losses.fused_divergence import Compared, compare
from ..losses.objective import parse_objective
from .adapters import AdapterConfig, Adapters
from .block_diffusion import ar_rows
from .diffusion import PairCache, Rows, clean_entries, clean_pass, dense_mask, hidden_states, make_rows, noisy_pass
from .drafter import Batch, TargetOut, Terms
from .noise import Copy, Text, draw, runs, total
from .on_policy import likeliest
from .settings import check_choices
from .target import Target
from .trajectories import SIGHT, Blocks, Start, Walk, answer_blocks, first_states, from_first

STATE, SLOTS = 49, 50  # streams of `draw`
HARD = ("data", "critic")  # labels that are tokens
ANCHOR = parse_objective("kl")  # of anchor=base


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
    anchor: Literal["data", "base"] = "data"
    """What the autoregressive loss holds the model to: the text's tokens (CLLM), or the frozen base's distribution (ours: the
    base's own greedy answers as labels make it surer of itself, up to repeating itself)."""
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
        if self.anchor == "base" and (self.label_smoothing or not self.ar_weight):
            raise ValueError(
                "consistency.anchor = base has distributions for labels: set label_smoothing=0 and give ar_weight a value; got "
                f"{self.label_smoothing}, {self.ar_weight}"
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
        if (self.labels in ("base", "critic") or self.anchor == "base") and adapters.kind != "lora":
            raise ValueError(
                f"consistency.labels = {self.labels}, anchor = {self.anchor} ask the model as it was, which "
                f"kind={adapters.kind} changes: set adapters.kind=lora"
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


@dataclass
class Shown:
    """What the noisy blocks of a batch show. All [B, T]."""

    blocks: Blocks
    state_BT: Tensor  # int64, what noisy rows read
    next_BT: Tensor | None  # int64, the state after it (labels=local)
    after_BT: Tensor  # bool, rows from their block's first wrong guess on
    loss_BT: Tensor  # bool, rows with a loss


class Consistency(nn.Module):
    """Terms `consistency`, and `ar` where it has a weight. A module as the training loop wants it (models/drafter.py) around a
    target with adapters, which stays outside, as in models/block_diffusion.py.

    Raises ValueError when settings, adapters and target do not fit.
    """

    method = "consistency"

    def __init__(self, config: ConsistencyConfig, target: Target, adapters: Adapters) -> None:
        super().__init__()
        config.check(adapters.config)
        if adapters.target is not target or adapters.dual:
            raise ValueError("these adapters are of another target, or act on noisy rows alone (dual)")
        self.trained, self.config, self.adapters = adapters.trained, config, adapters
        self.terms = parse_objective(config.objective, method="consistency")

    @property
    def target(self) -> Target:
        """Not a module of this one, whose tensors are the trained ones."""
        return self.adapters.target

    def train(self, mode: bool = True) -> Consistency:
        self.adapters.train(mode)
        return super().train(mode)

    # What blocks show

    def blocks(self, batch: Batch) -> Blocks:
        """The batch in blocks. With labels=critic the places behind a block's drawn number of slots are a stretch of their
        own, without a loss."""
        config = self.config
        blocks = answer_blocks(batch, config.block, config.window)
        if config.labels == "critic":
            slots_BT = 1 + (draw_per_block(blocks, SLOTS) * config.block).long()
            beyond_BT = (blocks.place_BT >= slots_BT).long()
            blocks.text.block_BT = runs(blocks.text.block_BT, beyond_BT)
        return blocks

    def first_states(self, blocks: Blocks) -> Tensor:
        """int64 [B, T], see models/trajectories.py."""
        tokens, mask_id = self.target.facts.tokens, self.adapters.mask_id
        return first_states(blocks, self.config.start, tokens=tokens, mask_id=mask_id)

    @torch.no_grad()
    def walked(self, blocks: Blocks, cache: PairCache) -> Tensor:
        """int64 [B, T] what each block shows with states=online: a state of the model as it is now, without dropout, that leads
        to the text. `cache`: the clean text's keys and values."""
        dropping = self.adapters.training
        self.adapters.train(False)
        with self.adapters.view("noisy"):
            if dropping and self.adapters.differs_in_training:
                cache, _ = clean_pass(self.target.forward, blocks.text, SIGHT)
            walk, states = Walk(self.target, blocks, cache=cache), [self.first_states(blocks)]
            for _ in range(self.config.passes):
                states.append(walk.step(states[-1]))
        self.adapters.train(dropping)
        return self.choose(blocks, torch.stack(states, dim=1))[0]

    def choose(self, blocks: Blocks, states_BIT: Tensor) -> tuple[Tensor, Tensor]:
        """int64 [B, T] twice: of states [B, I, T] the one that each block shows, and the one after it."""
        wrong_BIT = ((states_BIT != blocks.text.ids_BT[:, None]) & blocks.inside_BT[:, None]).long()
        unit_BIT = blocks.unit_BT[:, None].expand_as(states_BIT)
        wrong_BIT = torch.zeros_like(states_BIT).scatter_add(2, unit_BIT, wrong_BIT).gather(2, unit_BIT)
        if self.config.schedule == "progressive":
            # |wrong / size - wanted / window|, in whole numbers; of two equally near states the earlier one.
            size_BT = total(blocks.inside_BT.long(), blocks.unit_BT)
            wanted_BT = 1 + (blocks.unit_BT - blocks.text.block_BT) // self.config.block
            far_BIT = (wrong_BIT * self.config.window - (wanted_BT * size_BT)[:, None]).abs()
            index_BT = (far_BIT == far_BIT.amin(1, keepdim=True)).int().argmax(1)
        else:
            count_BT = (wrong_BIT > 0).sum(1)
            index_BT = (draw_per_block(blocks, STATE) * count_BT).long()
        next_BT = (index_BT + 1).clamp(max=states_BIT.shape[1] - 1)
        return states_BIT.gather(1, index_BT[:, None])[:, 0], states_BIT.gather(1, next_BT[:, None])[:, 0]

    def stored(self, batch: Batch, blocks: Blocks) -> Tensor:
        """The states [B, I, T] that came with the batch.

        Raises ValueError where there are none, or they are no states of blocks of this size: after i passes the first i
        places are settled.
        """
        states_BIT = batch.states_BIT
        if states_BIT is None:
            raise ValueError(
                "consistency.states = stored, and these samples came without states: collect them with `draftsmith rollout "
                "--trajectories`, or set consistency.states=online"
            )
        passes_I = torch.arange(states_BIT.shape[1], device=states_BIT.device)
        early_BIT = blocks.inside_BT[:, None] & (blocks.place_BT[:, None] < passes_I[:, None])
        if bool((early_BIT & (states_BIT != batch.ids_BT[:, None])).any()):
            raise ValueError(
                f"consistency.block = {self.config.block}: the stored states are not of such blocks; set the block that they "
                "were collected with, or collect them anew"
            )
        return states_BIT

    def shown(self, batch: Batch, cache: PairCache | None = None) -> Shown:
        """What blocks show and which rows have a loss: of the data and seeded noise alone, but with states=online, which come
        of a walk behind the clean text of `cache`; without one, every row that may have a loss is said to have it."""
        config, blocks = self.config, self.blocks(batch)
        known, next_BT = True, None
        if config.states == "online":
            known = cache is not None
            state_BT = batch.ids_BT if cache is None else self.walked(blocks, cache)
        elif config.states == "noise":
            state_BT = self.first_states(blocks)
        else:
            state_BT, next_BT = self.choose(blocks, self.stored(batch, blocks))
        inside_BT = blocks.inside_BT
        after_BT = inside_BT & from_first((state_BT != batch.ids_BT) & inside_BT, blocks.unit_BT)
        answered_BT = inside_BT[:, 1:] & (blocks.answer_BT[:, 1:] == blocks.answer_BT[:, :-1])
        loss_BT = inside_BT & F.pad(answered_BT, (0, 1))
        if config.labels == "critic":  # the slots: stretches of a block that begin with it
            loss_BT = loss_BT & (blocks.text.block_BT == blocks.unit_BT)
        elif config.reach == "divergence" and known:
            loss_BT = loss_BT & after_BT
        return Shown(blocks, state_BT, next_BT if config.labels == "local" else None, after_BT, loss_BT)

    def rows(self, shown: Shown, *states: Tensor) -> Rows:
        """The noisy rows that are run, one copy for each of `states` [B, T]."""
        inside_BT = shown.blocks.inside_BT
        counted_BT = F.pad(shown.loss_BT[:, :-1], (1, 0))  # a copy counts by the token that is predicted
        level_BT = torch.ones_like(inside_BT, dtype=torch.float64)
        copies = [Copy(inside_BT, counted_BT, level_BT, state_BT) for state_BT in states]
        return make_rows(shown.blocks.text, copies, SIGHT, mask_id=-1)

    # The loss

    def denominators(self, batch: Batch, progress: float) -> dict[str, float]:
        """Rows, or blocks, with a consistency loss (states=online: all that may have one); labels of the other term."""
        shown = self.shown(batch)
        count = shown.loss_BT.sum()
        if self.config.normalise == "blocks":
            count = firsts(shown.loss_BT, shown.blocks.unit_BT).sum()
        counts = {"consistency": float(count)}
        return counts | ({"ar": float(len(ar_rows(shown.blocks.text)[0]))} if self.config.ar_weight else {})

    def loss(self, batch: Batch, target_out: TargetOut, progress: float) -> Terms:
        """Metrics: `consistency_loss` (mean over rows), `ar_loss` (nats per token, not smoothed); over rows from the first
        wrong guess on `right`, the share whose likeliest token is the fixed point's (labels=critic: the critic's), and
        `run_length`, the mean number of those that come before the block's first one that is not. One pass settles the
        first wrong guess and that many more, so 1 + run_length estimates the tokens per pass of decoding.
        """
        config, adapters = self.config, self.adapters
        text = self.blocks(batch).text
        with adapters.view("noisy"):
            cache, clean_BTD = clean_pass(self.target.forward, text, SIGHT)
            shown = self.shown(batch, cache)
            blocks = shown.blocks
            rows = self.rows(shown, shown.state_BT, *(() if shown.next_BT is None else (shown.next_BT,)))
            noisy_BQD = noisy_pass(self.target.forward, blocks.text, rows, SIGHT, cache)
        clean_XD, base_XD = clean_BTD.flatten(0, 1), None
        if "base" in (config.labels, config.anchor):
            base_XD = self.base_states(text).flatten(0, 1)

        both_R = rows.flat_R
        first_R = rows.copy_BQ.flatten()[both_R] == 0
        flat_R = both_R[first_R]
        at_R = flat_R // rows.label_BQ.shape[1] * rows.width + rows.token_BQ.flatten()[flat_R]
        label_R, hidden_RD = rows.label_BQ.flatten()[flat_R], noisy_BQD.flatten(0, 1)[flat_R]
        teacher_RD = None
        if config.labels == "self":
            teacher_RD = clean_XD[at_R].detach()
        elif config.labels == "local":  # the copies' rows are in the same order
            teacher_RD = noisy_BQD.flatten(0, 1)[both_R[~first_R]].detach()
        elif config.labels == "base":
            teacher_RD = base_XD[at_R] if base_XD is not None else None
        elif config.labels == "critic":
            label_R = self.criticise(shown, clean_XD, hidden_RD, at_R)
        scored = compare(
            self.target.head, hidden_RD, label_R, teacher_RD=teacher_RD, terms=self.terms, temperature=config.temperature,
            head_learns=adapters.head_learns,
        )  # fmt: skip
        loss_R = scored.loss_R
        if config.normalise == "blocks":
            loss_R = loss_R / total(shown.loss_BT.long(), blocks.unit_BT).flatten()[at_R]
        terms = Terms({"consistency": loss_R.sum()}, self.metrics(shown, at_R, scored, label_R))
        if config.ar_weight or not torch.is_grad_enabled():  # guards read it where it has no weight, too
            flat_R, label_R = ar_rows(text)
            scored = compare(
                self.target.head, clean_XD[flat_R], label_R, smoothing=config.label_smoothing,
                teacher_RD=base_XD[flat_R] if base_XD is not None and config.anchor == "base" else None, terms=ANCHOR,
                head_learns=adapters.head_learns,
            )  # fmt: skip
            if config.ar_weight:
                terms.losses["ar"] = config.ar_weight * scored.loss_R.sum()
            terms.metrics["ar_loss"] = scored.ce_R.sum(), torch.tensor(float(len(label_R)))
        return terms

    forward = loss

    @torch.no_grad()
    def base_states(self, text: Text) -> Tensor:
        """Last hidden states [B, T, D] of the clean text in the model as it was."""
        clean = clean_entries(text)
        with self.adapters.view("clean"):
            out = self.target.forward(text.ids_BT, text.positions_BT, see_BTA=dense_mask(SIGHT, clean, clean))
        return out.last_hidden_BTD

    @torch.no_grad()
    def criticise(self, shown: Shown, clean_XD: Tensor, hidden_RD: Tensor, at_R: Tensor) -> Tensor:
        """int64 [R] labels: of each row the base's likeliest token behind clean text and what the model itself says at the
        block's places up to the row's own.

        `clean_XD` [B * T, D] and `hidden_RD` are the model's states of the clean text and of the rows, at tokens `at_R`.
        """
        blocks, mask_id = shown.blocks, self.adapters.needed_mask_id()
        said_X = shown.state_BT.flatten().clone()
        said_X[at_R + 1] = likeliest(self.target, hidden_RD, mask_id)
        # A block's first token is said by the clean row before it, whatever the last row of the block before says.
        at_U = firsts(shown.loss_BT, blocks.unit_BT).flatten().nonzero()[:, 0]
        said_X[at_U] = likeliest(self.target, clean_XD[at_U - 1], mask_id)
        rows = self.rows(shown, said_X.view_as(shown.state_BT))
        base = hidden_states(self.target.forward, lambda _: self.adapters.view("clean"), blocks.text, rows, SIGHT)[1]
        return likeliest(self.target, base.flatten(0, 1)[rows.flat_R], mask_id)

    def metrics(
        self, shown: Shown, at_R: Tensor, scored: Compared, label_R: Tensor
    ) -> dict[str, tuple[Tensor, Tensor]]:
        """See `loss`. `at_R`: b * T + t of the scored rows."""
        unit_BT = shown.blocks.unit_BT
        right_X = torch.zeros_like(shown.loss_BT).flatten()
        right_X[at_R] = scored.top_R == label_R
        right_BT = right_X.view_as(shown.loss_BT)
        told_BT = shown.loss_BT & shown.after_BT
        inner_BT = told_BT & F.pad(unit_BT[:, 1:] == unit_BT[:, :-1], (0, 1))  # predict a token of their own block
        ahead_BT = inner_BT & ~from_first(inner_BT & ~right_BT, unit_BT)
        return {
            "consistency_loss": (scored.loss_R.detach().sum(), torch.tensor(float(len(label_R)))),
            "right": ((right_BT & told_BT).sum().float(), told_BT.sum().float()),
            "run_length": (ahead_BT.sum().float(), firsts(inner_BT, unit_BT).sum().float()),
        }


def draw_per_block(blocks: Blocks, stream: int) -> Tensor:
    """float64 [B, T] uniform in [0, 1), one number per block, keyed by its first token's place in the document."""
    return draw(blocks.text, blocks.text.positions_BT.gather(1, blocks.unit_BT), stream)


def firsts(flag_BT: Tensor, unit_BT: Tensor) -> Tensor:
    """bool [B, T]: first tokens of blocks that have a flagged token."""
    t_T = torch.arange(flag_BT.shape[1], device=flag_BT.device)
    return (unit_BT == t_T) & (total(flag_BT.long(), unit_BT) > 0)
