"""What passes between the target, the drafters, the training loop and the runtime.

A drafter is an `nn.Module` with the attributes and methods of the `Drafter` protocol below; nothing inherits from it.
One rule of alignment holds for every method. A *state row* t is a position whose target states are known. Its
*anchor* is the token at t + 1 (sampled, not yet in any cache); the drafter predicts *depth* d = 1, 2, ... after the
anchor, that is the token at t + 1 + d. A training pair (t, d) counts when the tokens t+1 .. t+1+d all are supervised
tokens of one document (`supervised`): the first token of an answer is the target's own to give, it is an anchor and
never a label.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import Tensor

from ..data.batch import Batch, TargetOut, supervised
from .tree import Extra, Tree

__all__ = [
    "NEEDS",
    "Batch",
    "Budget",
    "Commit",
    "Drafter",
    "ExtraOut",
    "Level",
    "Prefill",
    "Proposer",
    "TargetFacts",
    "TargetOut",
    "Terms",
    "Verified",
    "supervised",
]

NEEDS = frozenset({"ids", "taps", "last_hidden", "teacher", "kv", "module"})


@dataclass(frozen=True)
class TargetFacts:
    """What a drafter needs to know of its target, and what an export records of it."""

    name: str  # hub id, folder name or built-in name; never a local path
    revision: str | None
    fingerprint: str  # sha256 over config and weights' names, shapes and samples
    family: str
    vocab: int  # V, rows of the embedding
    tokens: int  # ids the tokenizer can produce; tokens <= vocab, ids beyond are never drafted or emitted
    width: int  # D
    layers: int  # L
    heads: int
    kv_heads: int
    head_dim: int
    intermediate: int
    norm_eps: float
    activation: str
    rope: dict[
        str, Any
    ]  # transformers' `rope_parameters` of the target (full-attention layers): rope_type, rope_theta, ...
    max_positions: int
    tied: bool
    eos_ids: tuple[int, ...]
    tokenizer_hash: str | None


@dataclass
class Terms:
    """What a `loss` returns: per term a *sum* (to be divided by its entry in `denominators`), and metrics as
    (sum, count) pairs of detached tensors or floats. `accept_R`: per scored row sum min(p, q), detached, for heads that
    learn to foresee it."""

    losses: dict[str, Tensor]
    metrics: dict[str, tuple[Tensor, Tensor]] = field(default_factory=dict)
    accept_R: Tensor | None = None


@dataclass
class Level:
    """Next-token logits in draft ids for N nodes per row. `valid_BN` False = this row has nothing to say."""

    logits_BNW: Tensor
    valid_BN: Tensor
    confidence_BN: Tensor | None = None


@dataclass
class Prefill:
    """How much room a drafter's state needs: rows, slots per row, where and in what dtype."""

    rows: int
    slots: int
    device: torch.device
    dtype: torch.dtype


@dataclass(frozen=True)
class Budget:
    """How large the tree of a `propose` may be: nodes per row, levels, children of a node (1 = a chain)."""

    nodes: int
    depth: int
    width: int


@dataclass
class Verified:
    """All rows of the last verification, the anchor first, accepted or not: `logits_BMV` is what the target said after
    `tokens_BM`. Unused nodes, and rows of requests that are done or new (their commit is the prompt), are not valid."""

    tokens_BM: Tensor
    valid_BM: Tensor
    logits_BMV: Tensor


@dataclass
class ExtraOut:
    """What the extra rows of the last verification computed. `accepted_B`: the node at which the accepted path ended (0
    = anchor), whose own rows look ahead of the new anchor; `nodes_BE`: the node that each row hung on."""

    rows: Extra
    nodes_BE: Tensor
    accepted_B: Tensor
    last_hidden_BED: Tensor  # after the final norm
    taps_BEPD: Tensor | None = None

    def below_accepted(self, count: int) -> tuple[Tensor, Tensor]:
        """[B, count, D] last hidden states of the first `count` rows that hang on the accepted node, in order of
        creation; and bool [B, count], False where it has fewer (those states are to be ignored)."""
        own_BE = (self.nodes_BE == self.accepted_B[:, None]) & self.rows.valid_BE
        short = max(0, count - own_BE.shape[1])
        own_BE = torch.nn.functional.pad(own_BE, (0, short))
        hidden_BED = torch.nn.functional.pad(self.last_hidden_BED, (0, 0, 0, short))
        order_BX = (~own_BE).int().sort(dim=1, stable=True).indices[:, :count]
        rows_B1 = torch.arange(own_BE.shape[0], device=own_BE.device)[:, None]
        return hidden_BED[rows_B1, order_BX], own_BE.gather(1, order_BX)


@dataclass
class Commit:
    """The ragged rows committed since the last time (at first: the prompt), right-padded to T = max(counts_B).

    `ids_BT[b, :counts_B[b]]` are tokens whose target states are known now and stand in the target's cache;
    `anchor_B` is the newest token, whose KV is in no cache yet. Positions are absolute. counts_B may hold 0.
    """

    ids_BT: Tensor
    counts_B: Tensor
    positions_BT: Tensor
    anchor_B: Tensor
    taps_BTPD: Tensor | None = None
    last_hidden_BTD: Tensor | None = None
    kv: Any = None
    extra_out: ExtraOut | None = None  # None: no extra rows, or no verification yet (the prompt)
    verified: Verified | None = None  # for drafters whose `draft_needs` has "teacher"; None after the prompt

    def following(self) -> Tensor:
        """[B, T] the token after each row's token: the next committed one, at the end the anchor."""
        next_BT = torch.cat([self.ids_BT[:, 1:], self.ids_BT[:, :1]], dim=1)
        last_B1 = (self.counts_B - 1).clamp(min=0)[:, None]
        return next_BT.scatter(1, last_B1, self.anchor_B[:, None])


class Drafter(Protocol):
    """The contract of a draft head or parallel drafter (DESIGN: Drafter).

    Class attributes: `method` (its key in METHODS), `Config` (frozen dataclass), `draft_needs`, `loss_needs`
    (subsets of NEEDS). Instance attributes: `config`, `facts` (TargetFacts), `taps` (tuple of k, may be empty),
    `d2t_W` (int64 buffer of *absolute* target ids, sorted, or None = identity), `parallel` (rows that `start` returns
    at once; 1 = levels come one at a time), `max_depth` (None = any); `sequential`, if it is there and true: `start` still
    returns all rows, but deeper levels are to be had from `extend`, which corrects them for the tokens that were taken
    (`pair_scores` then does so for builders that need all at once).
    Construction: `Method(config, facts, draft_ids=None)`; then `init_from_target(target)` copies what the recipe
    says (head rows, norms). `bind(target)` gives it what drafting reads of the target (embedding, head); the former
    ends with it, and whoever loads weights calls it. `forward` is `loss`, so that wrapped modules run it.
    A state has one entry per row of the batch in each of its parts (tensors, lists, caches, dataclasses of these): rows
    come and go between drafts (inference/rows.py), and a row that `reset` made new is handed its prompt in the next
    commit, beside what the others committed.
    Optional: `rewrite(batch, progress) -> Batch` puts tokens of the drafter's own in the place of the data's before the
    target reads a training batch; `denominators` are those of the data's batch (a Config with `live` True says that
    states cannot be captured).

    What a drafter may have beside this, and tree builders and the runtime look for:
    `sequential` (True: `parallel` rows come from `start`, and `extend` corrects deeper ones for the tokens taken);
    `pair_scores(state, ids_BKC, log_BKC)` (inference/trees.py, `_tables`); `chances` (of ranks to be right, by depth);
    `prompts` (models/tree.py), `extra_table_XD` (input embeddings of its rows, in the space of `target.embed`) and
    `prefix_kv` (`Target.forward`), of prompt tokens whose states come back in `Commit.extra_out`;
    `on_device` (True: `start` and `extend` ask the device for nothing, read no more of the target than ids, taps and last
    hidden states, and a state carries nothing from draft to draft but caches; inference/device_step.py runs these);
    `propose(state, commit, budget, params, draft) -> (state, Tree)` in the place of levels, with `extra_rows`, the most
    extra rows that its trees bring.
    """

    method: str
    Config: type
    draft_needs: frozenset[str]
    loss_needs: frozenset[str]
    config: Any
    facts: TargetFacts
    taps: tuple[int, ...]
    d2t_W: Tensor | None
    parallel: int
    max_depth: int | None

    # of nn.Module

    def parameters(self) -> Iterator[Any]: ...

    def state_dict(self) -> dict[str, Tensor]: ...

    # of the contract

    def init_from_target(self, target: Any) -> None: ...

    def bind(self, target: Any) -> None: ...

    def denominators(self, batch: Batch, progress: float) -> dict[str, float]: ...

    def loss(self, batch: Batch, target_out: TargetOut, progress: float) -> Terms: ...

    def init(self, prefill: Prefill) -> Any: ...

    def start(self, state: Any, commit: Commit) -> tuple[Any, Level]: ...

    def extend(self, state: Any, tokens_BN: Tensor, parents_BN: Tensor) -> tuple[Any, Level]: ...

    def reset(self, state: Any, rows: Tensor) -> Any: ...


class Proposer(Protocol):
    """The contract of a drafter that has no levels: `propose` returns the whole draft.

    Attributes as of `Drafter` (`taps`, `d2t_W`, `parallel` and `max_depth` have its neutral values). Construction:
    `Method(config, facts)`, then `bind(target)`. The tree keeps within `budget`, is a chain where its width is 1, and
    may be empty. Candidates without q depend on no coin, so the rule `target_only` keeps the target's distribution.
    `params`: the requests' own parameters; `rng`: what a builder knows of them (`inference/trees.py`, Draft). A row
    whose commit holds nothing is done, and gets no candidates.

    Optional: `extra_rows`, where the tree brings extra rows along: the most it brings. `own_depth`: levels of the tree,
    where the drafter's settings say how many and not the runtime's `k` (`budget` then has so many levels; a chain takes
    so many nodes, another tree the runtime's `nodes` beside them). `draws` True: where `rng.drawn`, candidates are drawn
    with the uniforms `rng.at_places` from rows that come along as `Tree.q`.
    """

    method: str
    Config: type
    draft_needs: frozenset[str]
    config: Any
    facts: TargetFacts
    taps: tuple[int, ...]
    d2t_W: Tensor | None
    parallel: int
    max_depth: int | None

    def bind(self, target: Any) -> None: ...

    def init(self, prefill: Prefill) -> Any: ...

    def propose(self, state: Any, commit: Commit, budget: Budget, params: Any, rng: Any) -> tuple[Any, Tree]: ...

    def reset(self, state: Any, rows: Tensor) -> Any: ...
