"""Masked diffusion on packed texts: the registry of objectives, and the one rule of who sees whom.

An objective says how a text is hidden (models/noise.py) and what a row may see. A row is one token in one copy: the
*clean* copy holds the text as it is, noisy copies show the mask where tokens are hidden. Layouts:

    pair     [clean | noisy copies]: a noisy block sees itself and the clean blocks before it, as in decoding with exact
             keys and values (BD3LM, arXiv:2503.09573; "[noisy | clean]" in the papers)
    single   one noisy sequence whose blocks see the noisy blocks before them (D2F, arXiv:2508.09192)
    whole    one noisy sequence that sees all of itself (LLaDA, Dream)

`see` is the only place that says it. Documents of a packed row never see each other. Nothing clean looks at anything
noisy, so that the pair runs, exactly, as two passes: the clean copy first, then all noisy rows behind its keys and
values, with gradients through both (`hidden_states`). A copy that hides what the other shows costs no second clean
copy, and noisy blocks without a loss are not run at all: nobody looks at them.

With `shift` the row of token t predicts token t + 1, as autoregressive heads do; without, its own token.

Every recipe of the table is a preset; a command line may change any of its settings. Where the public code of one leaves
a thing open, or departs from its paper, the preset's comment says what is done here.

Test: pytest tests/test_diffusion.py
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor
from transformers import Cache as HFCache

from .dropout import rows_of
from .noise import Copy, Text, runs, total
from .settings import check_choices

CLEAN = -1  # the clean copy's number


@dataclass(frozen=True)
class ObjectiveConfig:
    """How text is hidden and what rows see. Defaults are those of Fast-dLLM v2 (arXiv:2509.26328)."""

    layout: Literal["pair", "single", "whole"] = "pair"
    """`pair`: a clean copy beside the noisy ones; `single`: one noisy sequence, block-causal; `whole`: one, unmasked
    attention."""
    clean: Literal["block", "token"] = "block"
    """What the clean copy's tokens see: their whole block and those before it (BD3LM), or tokens up to themselves
    (WeDLM, arXiv:2512.22737: it leaves an autoregressive model one)."""
    inside: Literal["full", "causal", "observed_first"] = "full"
    """What a noisy row sees of its own block: all; rows up to itself; or shown tokens first, then hidden ones, each up
    to itself (WeDLM's reordering)."""
    block: int = 32
    """Tokens that are decided together."""
    shift: bool = True
    """The row of token t predicts token t + 1 (Fast-dLLM v2, Dream); false: its own token (SDAR, LLaDA)."""
    origin: Literal["document", "answer", "random"] = "document"
    """Where blocks are counted from: the document's first token, its first supervised one (all before is one block,
    D2F), or a place that is drawn anew in every epoch."""
    dual: bool = False
    """Adapters act on noisy rows alone, and a block's first row is the clean one: one autoregressive cache for both
    views."""
    scope: Literal["token", "block", "sample", "sequence"] = "block"
    """What shares one noise level: nothing, a block, a document, or a packed row."""
    schedule: Literal["uniform", "even", "monotone", "semi_ar"] = "uniform"
    """Levels are drawn uniformly; spread evenly over a document's blocks (BD3LM's antithetic draw); drawn, and raised
    to the highest so far (D2F); or one random block has its level, what follows is hidden, and only that block counts
    (dParallel, arXiv:2509.26488)."""
    levels: tuple[float, float] = (1e-3, 1.0)
    """Range of the levels: the smallest and largest chance that a token is hidden (BD3LM's clipped schedules)."""
    draw: Literal["independent", "exact", "latest"] = "independent"
    """Each token by a coin of its own; or exactly the level's share of a block, rounded up (WeDLM); or what the stored
    order of decoding says came last in its block, in whole passes (d3LLM, arXiv:2601.07568)."""
    complementary: bool = True
    """A second copy hides what the first shows, so that every token counts once per epoch (Fast-dLLM v2)."""
    weight: Literal["none", "inverse", "clipped"] = "none"
    """Weight of a hidden token: 1, 1 / level (the bound on the likelihood), or 1 / level up to `weight_clip`."""
    weight_clip: float = 10.0
    """Largest `clipped` weight (our choice)."""
    normalise: Literal["hidden", "weights", "supervised"] = "hidden"
    """A sum over hidden tokens is divided by their number, by their weights (WeDLM), or by the number of supervised
    tokens per copy (SDAR, BD3LM)."""
    padding: Literal["none", "mask", "train"] = "mask"
    """What fills a document's last block: nothing; masks that are no labels (Fast-dLLM v2); or end tokens that are
    trained like any other (SDAR), where the document ends with one."""
    ar_weight: float = 0.0
    """Weight of the autoregressive loss on the clean copy. Needs `clean: token`: in a block-causal copy a token sees the
    very token that it is to predict."""

    def __post_init__(self) -> None:
        check_choices(self, "objective")
        if self.block < 1 or (self.dual and self.block < 2):
            raise ValueError(f"objective.block = {self.block}: at least 1, with dual at least 2")
        low, high = self.levels
        if not (0 <= low <= high <= 1 and high > 0):
            raise ValueError(f"objective.levels = {low}, {high}: give a range within 0..1 that is not all 0")
        if self.weight != "none" and low <= 0:
            raise ValueError(
                f"objective.levels = {low}, {high}: weight {self.weight} divides by the level; raise the lowest"
            )
        if self.weight_clip < 1:
            raise ValueError(
                f"objective.weight_clip = {self.weight_clip}: at least 1, the weight of a token always hidden"
            )
        if self.ar_weight < 0:
            raise ValueError(f"objective.ar_weight = {self.ar_weight}: must not be negative")
        if self.ar_weight and (self.layout != "pair" or self.clean != "token"):
            raise ValueError(
                f"objective.ar_weight = {self.ar_weight} with layout {self.layout}, clean {self.clean}: a block-causal copy "
                "sees the tokens it would predict (the answer leaks); set clean=token and layout=pair, or ar_weight=0"
            )
        if self.dual and (self.layout, self.clean, self.inside, self.shift) != ("pair", "token", "full", True):
            raise ValueError("objective.dual needs layout=pair, clean=token, inside=full and shift=true")
        if self.dual and self.ar_weight:
            raise ValueError(
                "objective.dual leaves the clean rows as they are: ar_weight would train nothing, set it to 0"
            )
        if self.dual and self.schedule == "semi_ar":
            raise ValueError(
                "objective.schedule = semi_ar hides what follows; dual's blocks see nothing of it: use uniform"
            )
        if self.layout != "pair" and (self.inside, self.clean) != ("full", "block"):
            raise ValueError(
                f"objective.inside = {self.inside}, clean = {self.clean}: other than full and block they need layout=pair, "
                f"got {self.layout}"
            )
        if self.schedule in ("even", "monotone") and self.scope != "block":
            raise ValueError(
                f"objective.schedule = {self.schedule} is one of blocks: set scope=block, got {self.scope}"
            )
        if self.draw != "independent" and self.scope == "token":
            raise ValueError(
                f"objective.draw = {self.draw} takes a share of a block: scope=token has none; use block or more"
            )
        if self.draw == "latest" and (self.complementary or self.weight != "none"):
            raise ValueError(
                "objective.draw = latest hides states of a decoding: their complements are none, and no token has a chance "
                f"to divide by; set complementary=false and weight=none, got {self.complementary}, {self.weight}"
            )

    @property
    def copies(self) -> int:
        return 2 if self.complementary else 1

    @property
    def decoded_from(self) -> Literal["document", "answer"]:
        """Where decoding counts blocks from. Blocks that may begin anywhere begin with the answer where finished text is read
        alike wherever blocks begin; in `dual` any text's last token is an anchor."""
        if self.origin != "random" and not self.dual:
            return self.origin
        return "answer" if self.clean == "token" else "document"


PRESETS: dict[str, ObjectiveConfig] = {
    # Public code has no document mask; here documents are always apart.
    "fast_dllm_v2": ObjectiveConfig(),
    "sdar": ObjectiveConfig(
        block=4, shift=False, scope="sequence", complementary=False, weight="inverse", normalise="supervised",
        padding="train",
    ),
    # From a pretrained model, not from scratch; the clipped range is to be searched per block size.
    "bd3lm": ObjectiveConfig(
        block=16, shift=False, schedule="even", complementary=False, weight="inverse", normalise="supervised",
        padding="none",
    ),
    # arXiv:2509.04185. No public code: blocks anywhere, hidden tokens predicted in their place, are our reading.
    "set_block": ObjectiveConfig(
        clean="token", block=16, shift=False, origin="random", complementary=False, padding="none", ar_weight=1.0
    ),
    "wedlm": ObjectiveConfig(
        clean="token", inside="observed_first", shift=False, draw="exact", complementary=False, weight="inverse",
        normalise="weights", padding="none", ar_weight=1.0,
    ),
    # The paper's soft labels come from the diffusion model that it starts from (`conversion.labels=teacher`); from an
    # autoregressive one there are none, and the labels are the data's. Shift as for Dream, which is such a conversion.
    "d2f": ObjectiveConfig(
        layout="single", block=16, origin="answer", schedule="monotone", levels=(0.2, 0.7), complementary=False,
        weight="inverse", normalise="supervised", padding="none",
    ),
    # arXiv:2604.11035: causal everywhere, always fully hidden; the end of its curriculum of blocks 1, 2, 3 (all of it:
    # `conversion.curriculum=1,2,3`).
    "idlm": ObjectiveConfig(
        clean="token", inside="causal", block=3, levels=(1.0, 1.0), complementary=False, padding="none", ar_weight=0.2
    ),
    # Ours: an autoregressive model that is left as it is, and blocks that begin anywhere behind its cache.
    "dual": ObjectiveConfig(clean="token", block=8, origin="random", dual=True),
}  # fmt: skip


@dataclass
class Rows:
    """Noisy rows [B, Q] in the order of (copy, place). Padding has document -1; rows without a loss have label -1."""

    ids_BQ: Tensor  # int64, what the model reads
    position_BQ: Tensor  # int64
    document_BQ: Tensor  # int64 sample id
    copy_BQ: Tensor  # int64, from 0
    block_BQ: Tensor  # int64
    hidden_BQ: Tensor  # bool, shows the mask, or a guess in its place
    first_BQ: Tensor  # bool, first of its block
    label_BQ: Tensor  # int64, the token that it predicts
    weight_BQ: Tensor  # fp32
    token_BQ: Tensor  # int64, which token of the text the row is
    supervised: int  # supervised tokens of the text, of all copies together
    width: int  # tokens of the text

    @property
    def flat_R(self) -> Tensor:
        """[R] b * Q + q of the rows with a loss, ascending."""
        return (self.label_BQ.flatten() >= 0).nonzero()[:, 0]


def make_rows(text: Text, copies: list[Copy], config: ObjectiveConfig, mask_id: int) -> Rows:
    """The rows that are run: in the layout `pair` those of blocks with a loss, else all."""
    block_BT = runs(text.samples_BT, text.block_BT)
    shift = 1 if config.shift else 0

    def ahead(x_BT: Tensor, padding: Any) -> Tensor:
        """x of the token that each row predicts."""
        return torch.nn.functional.pad(x_BT[:, shift:], (0, shift), value=padding)

    same_BT = (ahead(text.samples_BT, -2) == text.samples_BT) & (text.samples_BT >= 0)
    parts: list[dict[str, Tensor]] = []
    for number, copy in enumerate(copies):
        hidden_BT = copy.hidden_BT | (text.filler_BT & ~text.supervised_BT)
        shown_BT = mask_id if copy.guess_BT is None else copy.guess_BT
        run_BT = text.samples_BT >= 0
        if config.dual:
            run_BT = run_BT & text.opened_BT & ~text.first_BT
        loss_BT = ahead(copy.counted_BT, False) & same_BT & run_BT
        if config.layout == "pair":
            run_BT = run_BT & (total(loss_BT.long(), block_BT) > 0)
        weight_BT = torch.ones_like(copy.level_BT)
        if config.weight != "none":
            weight_BT = 1 / ahead(copy.level_BT, 1.0).clamp(min=1e-9)
        if config.weight == "clipped":
            weight_BT = weight_BT.clamp(max=config.weight_clip)
        parts.append(
            {
                "ids_BQ": torch.where(hidden_BT, shown_BT, text.ids_BT),
                "position_BQ": text.positions_BT,
                "document_BQ": torch.where(run_BT, text.samples_BT, -1),
                "copy_BQ": torch.full_like(text.ids_BT, number),
                "block_BQ": text.block_BT,
                "hidden_BQ": hidden_BT,
                "first_BQ": text.first_BT,
                "label_BQ": torch.where(loss_BT, ahead(text.ids_BT, 0), -1),
                "weight_BQ": torch.where(loss_BT, weight_BT, 0).float(),
                "token_BQ": torch.arange(text.ids_BT.shape[1], device=text.ids_BT.device).expand_as(text.ids_BT),
            }
        )
    fields = {name: torch.cat([part[name] for part in parts], dim=1) for name in parts[0]}
    run_BX = fields["document_BQ"] >= 0
    count = max(int(run_BX.sum(1).max()), 1)  # a pass of no rows is none: a padding row sees itself
    order_BQ = (~run_BX).int().argsort(dim=1, stable=True)[:, :count]
    fields = {name: value_BX.gather(1, order_BQ) for name, value_BX in fields.items()}
    return Rows(**fields, supervised=len(copies) * int(text.supervised_BT.sum()), width=text.ids_BT.shape[1])


def denominator(rows: Rows, config: ObjectiveConfig) -> float:
    """What the sum over hidden tokens is divided by: a number of the data and the seeded noise alone."""
    if config.normalise == "hidden":
        return float(len(rows.flat_R))
    if config.normalise == "weights":
        return float(rows.weight_BQ.double().sum())
    return float(rows.supervised)


# Who sees whom


class Entries(NamedTuple):
    """Queries or keys, each field [B, X]. `place`: index among [clean | noisy]; `order`: in which a block is read."""

    place: Tensor
    document: Tensor
    copy: Tensor
    block: Tensor
    position: Tensor
    order: Tensor
    first: Tensor


def see(config: ObjectiveConfig, query: Entries, key: Entries) -> Tensor:
    """The one predicate: True where `query` sees `key` (fields broadcast). Everything sees itself, padding included."""
    same = (query.document == key.document) & (query.document >= 0)
    copy = query.copy == key.copy
    if config.layout == "whole":
        seen = copy
    elif config.layout == "single":
        seen = copy & (key.block <= query.block)
    else:
        upto = key.block <= query.block if config.clean == "block" else key.position <= query.position
        before = key.block < query.block
        if config.dual:
            before = before | (key.first & (key.block == query.block))
        own = copy & (key.block == query.block)
        if config.inside != "full":
            own = own & (key.order <= query.order)
        clean_query, clean_key = query.copy == CLEAN, key.copy == CLEAN
        seen = (clean_key & ((clean_query & upto) | (~clean_query & before))) | (~clean_key & ~clean_query & own)
    return (same & seen) | (query.place == key.place)


def clean_entries(text: Text) -> Entries:
    """The clean copy's tokens."""
    place_BT = torch.arange(text.ids_BT.shape[1], device=text.ids_BT.device).expand_as(text.ids_BT)
    clean_BT = torch.full_like(text.ids_BT, CLEAN)
    return Entries(
        place_BT, text.samples_BT, clean_BT, text.block_BT, text.positions_BT, text.positions_BT, text.first_BT
    )


def noisy_entries(rows: Rows, config: ObjectiveConfig, after: int) -> Entries:
    """The noisy rows, behind `after` clean tokens."""
    place_BQ = after + torch.arange(rows.ids_BQ.shape[1], device=rows.ids_BQ.device).expand_as(rows.ids_BQ)
    order_BQ = rows.position_BQ
    if config.inside == "observed_first":  # within a block positions differ by less than its size
        order_BQ = order_BQ + rows.hidden_BQ.long() * config.block
    return Entries(
        place_BQ, rows.document_BQ, rows.copy_BQ, rows.block_BQ, rows.position_BQ, order_BQ, rows.first_BQ
    )  # fmt: skip


def joined(left: Entries, right: Entries) -> Entries:
    return Entries(*(torch.cat(pair, dim=1) for pair in zip(left, right, strict=True)))


def dense_mask(config: ObjectiveConfig, queries: Entries, keys: Entries) -> Tensor:
    """Bool [B, Q, S]: `see` over all pairs."""
    return see(config, Entries(*(f[:, :, None] for f in queries)), Entries(*(f[:, None, :] for f in keys)))


# The passes


class PairCache(HFCache):
    """Keys and values of the clean copy, kept with their gradients by the first pass over it and read by the next."""

    def __init__(self) -> None:
        super().__init__(layers=[])
        self.kept: list[tuple[Tensor, Tensor]] = []
        self.text_BT: Tensor | None = None  # positions of the clean copy, once it has passed
        self.new_BQ = torch.zeros(0)

    def begin(self, positions_BQ: Tensor, offset: int = 0, prefix_kv: Tensor | None = None) -> None:
        """Open a pass (models/cache.py). `offset`: tokens of the clean copy that the mask speaks of; 0 = this is it."""
        assert prefix_kv is None and (offset > 0) == bool(self.kept)
        self.text_BT = self.new_BQ if offset else None
        self.new_BQ = positions_BQ

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """One layer's keys and values [B, H, S, head_dim], the clean copy's first."""
        if self.text_BT is None:
            assert layer_idx == len(self.kept)
            self.kept.append((key_states, value_states))
            return key_states, value_states
        k_BHTd, v_BHTd = self.kept[layer_idx]
        return torch.cat([k_BHTd, key_states], dim=2), torch.cat([v_BHTd, value_states], dim=2)

    def mask(self, see_BQS: Tensor, window: int | None = None) -> Tensor:
        """Bool [B, 1, Q, S], cut to `window` positions back."""
        if window is not None:
            keys_BS = self.new_BQ if self.text_BT is None else torch.cat([self.text_BT, self.new_BQ], dim=1)
            see_BQS = see_BQS & (self.new_BQ[:, :, None] - keys_BS[:, None] < window)
        return see_BQS[:, None]

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Tokens of the clean copy."""
        return 0 if self.text_BT is None else self.text_BT.shape[1]

    def get_mask_sizes(self, query_length: int, layer_idx: int) -> tuple[int, int]:
        """Keys that the pass in hand reads, and the first one's place."""
        return self.get_seq_length() + query_length, 0


def hidden_states(
    forward: Callable[..., Any],
    view: Callable[[Literal["noisy", "clean"]], Any],
    text: Text,
    rows: Rows,
    config: ObjectiveConfig,
) -> tuple[Tensor | None, Tensor]:
    """Last hidden states of the clean copy [B, T, D] (None where the layout has none) and of the noisy rows [B, Q, D].

    `forward` is `Target.forward`; `view(name)` a context in which it runs with (noisy) or without (clean) adapters. With
    `dual` the clean copy runs without, and without gradients: nothing in it learns.
    """
    if config.layout != "pair":
        noisy = noisy_entries(rows, config, 0)
        with view("noisy"), noisy_rows(text, rows):
            out = forward(rows.ids_BQ, rows.position_BQ, see_BTA=dense_mask(config, noisy, noisy))
        return None, out.last_hidden_BTD
    with view("clean" if config.dual else "noisy"), torch.set_grad_enabled(torch.is_grad_enabled() and not config.dual):
        cache, clean_BTD = clean_pass(forward, text, config)
    with view("noisy"):
        return clean_BTD, noisy_pass(forward, text, rows, config, cache)


def clean_pass(forward: Callable[..., Any], text: Text, config: ObjectiveConfig) -> tuple[PairCache, Tensor]:
    """Keys and values of the clean copy, for passes of noisy rows, and its last hidden states [B, T, D]."""
    cache, clean = PairCache(), clean_entries(text)
    see_BTT = dense_mask(config, clean, clean)
    with rows_of(text.samples_BT, text.positions_BT, 0, text.seed, text.epoch):
        return cache, forward(text.ids_BT, text.positions_BT, cache=cache, see_BTA=see_BTT).last_hidden_BTD


def noisy_rows(text: Text, rows: Rows) -> AbstractContextManager[None]:
    """Says that passes are of these rows."""
    return rows_of(rows.document_BQ, rows.position_BQ, 1 + rows.copy_BQ, text.seed, text.epoch)


def noisy_pass(
    forward: Callable[..., Any], text: Text, rows: Rows, config: ObjectiveConfig, cache: PairCache
) -> Tensor:
    """Last hidden states [B, Q, D] of noisy rows behind the clean copy's keys and values; any number of such passes."""
    noisy = noisy_entries(rows, config, text.ids_BT.shape[1])
    see_BQS = dense_mask(config, noisy, joined(clean_entries(text), noisy))
    with noisy_rows(text, rows):
        return forward(rows.ids_BQ, rows.position_BQ, cache=cache, see_BTA=see_BQS).last_hidden_BTD
