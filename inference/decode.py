"""How drafts are made and verified: the settings of the decode loop, and what they refuse. Tests: tests/test_speculate.py,
tests/test_generate.py."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Literal

from ..losses.probs import SamplingParams
from . import verify
from .trees import TREES, Plan, check_choices, fits

MOST_ROWS = 4096  # of a draft: building more takes minutes, and no verification of so many rows pays (ours)


@dataclass(frozen=True)
class DecodeConfig:
    """How drafts are made and verified.

    Args:
        k: depth of the draft, cut to what the drafter has; with `choices` their own depth counts, and with a drafter
            that says its own (jacobi: the block) that.
        tree: a key of TREES (inference/README.md says what each is).
        nodes: nodes of a tree that is no chain, at most; of jacobi, those beside its chain.
        width: candidates per node, at most (opt and best_first take as many as there are nodes).
        choices: template of a static tree, for example [[0], [1], [0, 0]]; none = the default one.
        threshold: cut: a chain ends before the first token that the drafter is less sure of; opt: no deeper layer once
            one adds no more expected tokens than this. None = the tree's own default.
        chances: of ppd, by depth the chance of each rank to be right (`Stats.ranks` over `tried`); none = the drafter's
            `chances` if it has them, or those of a typical drafter.
        prompt_rows: prompt rows of a drafter with prompt tokens in every verification, at most. None = all that the nodes
            can have; ppd then shares `nodes` rows between nodes and prompt tokens.
        verifier: auto, or a key of VERIFIERS (inference/README.md lists what each promises).
        fixed_width: rows that every verification has (k + 1 and the prompt rows, or more; chains only); plain decoding
            padded to the same width gives the same bits. None = as many as needed.
        draft_temperature: temperature of drafting for requests that sample; none = the request's own.
        allow_lossy: permit verifiers that change the target's distribution.
        max_rows: requests decoded together.
        typical_epsilon: ceiling of the floor of typical acceptance (Medusa's llm_judge README).
        typical_delta: share of exp(-entropy) in the floor of typical acceptance (Medusa's llm_judge README).
        fuzzy_threshold: total variation of p and q up to which fuzzy acceptance keeps drafts (ours).
        entropy_tolerance: most that entropy-aware acceptance adds to a chance (ours).
        step: where a step is decided: `host`; `device` = all of it on the device, read a step late; `graph` = that, in CUDA
            graphs; auto = graph on a GPU where method and settings allow it (`Stats.step` says), else host.
        keep_logits: return the target's logits that every id was chosen from (memory: V numbers per id).
    """

    k: int = 4
    tree: str = "chain"
    nodes: int = 24
    width: int = 4
    choices: tuple[tuple[int, ...], ...] | None = None
    threshold: float | None = None
    chances: tuple[tuple[float, ...], ...] | None = None
    prompt_rows: int | None = None
    verifier: str = "auto"
    fixed_width: int | None = None
    draft_temperature: float | None = None
    allow_lossy: bool = False
    max_rows: int = 8
    typical_epsilon: float = 0.09
    typical_delta: float = 0.3
    fuzzy_threshold: float = 0.1
    entropy_tolerance: float = 0.1
    keep_logits: bool = False
    step: Literal["auto", "host", "device", "graph"] = "auto"

    def __post_init__(self) -> None:
        for name in ("k", "nodes", "width", "max_rows"):
            if getattr(self, name) < 1:
                raise ValueError(f"decode: {name}={getattr(self, name)}, must be an integer >= 1")
        for name in ("k", "nodes", "width", "fixed_width"):
            if (getattr(self, name) or 0) > MOST_ROWS:
                raise ValueError(f"decode: {name}={getattr(self, name)}, at most {MOST_ROWS}: ask for fewer")
        if self.tree not in TREES:
            raise ValueError(f"decode: tree={self.tree!r}: use one of {', '.join(TREES)}")
        if self.verifier != "auto" and self.verifier not in verify.VERIFIERS:
            raise ValueError(f"decode: verifier={self.verifier!r}: use auto, {', '.join(verify.VERIFIERS)}")
        if self.verifier != "auto" and not verify.VERIFIERS[self.verifier].exact and not self.allow_lossy:
            raise ValueError(
                f"decode: verifier={self.verifier!r} changes the target's distribution: "
                "add allow_lossy=true (--allow-lossy)"
            )
        for name in ("typical_epsilon", "typical_delta", "fuzzy_threshold", "entropy_tolerance"):
            if not 0 <= getattr(self, name) <= 1:
                raise ValueError(f"decode: {name}={getattr(self, name)}, must be in [0, 1]")
        if self.step not in ("auto", "host", "device", "graph"):
            raise ValueError(f"decode: step={self.step!r}: use auto, host, device or graph")
        builder = TREES[self.tree]
        single = self.width == 1 or self.nodes == 1 or (self.choices is not None and not any(map(any, self.choices)))
        chain = True if builder.chain else None if single else False
        drawn = None if builder.draws and self.draft_temperature != 0 else False
        verify.refuse_misfit(self.verifier, self.allow_lossy, None, drawn, chain)
        if self.choices is not None:
            if self.tree != "static":
                raise ValueError(f"decode: choices are for tree='static', this is tree={self.tree!r}")
            check_choices(self.choices)
        if self.threshold is not None:
            if TREES[self.tree].threshold is None:
                having = ", ".join(name for name, builder in TREES.items() if builder.threshold is not None)
                raise ValueError(f"decode: threshold is for the trees {having}, this is tree={self.tree!r}")
            if not 0 <= self.threshold <= 1:
                raise ValueError(f"decode: threshold={self.threshold}, must lie in [0, 1]")
        if self.chances is not None:
            if self.tree != "ppd":
                raise ValueError(f"decode: chances are for tree='ppd', this is tree={self.tree!r}")
            if not self.chances or not all(row and min(row) >= 0 and sum(row) <= 1 + 1e-6 for row in self.chances):
                raise ValueError(
                    f"decode: chances={self.chances}: give per depth the chances of the ranks, which sum to 1 at most"
                )
        if self.prompt_rows is not None and self.prompt_rows < 1:
            raise ValueError(f"decode: prompt_rows={self.prompt_rows}, must be an integer >= 1")
        if self.draft_temperature is not None and not 0 <= self.draft_temperature < float("inf"):
            raise ValueError(f"decode: draft_temperature={self.draft_temperature}, must be a finite number >= 0")
        if self.fixed_width is not None and self.fixed_width < 1:
            raise ValueError(f"decode: fixed_width={self.fixed_width}, must be an integer >= 1")
        if self.fixed_width is not None and not TREES[self.tree].chain:
            raise ValueError(f"decode: fixed_width is for chains (tree='chain' or 'cut'), this is tree={self.tree!r}")


def plan_of(drafter: Any, decode: DecodeConfig, vocab: int, tokens: int) -> Plan | None:
    """How this drafter's trees are built for a target with `vocab` embeddings and `tokens` ids; None where it makes its
    own (`propose`). Raises ValueError for a tree that it cannot grow."""
    refuse_tree(drafter, decode)
    if hasattr(drafter, "propose"):
        return None
    limits = [x for x in (drafter.max_depth, drafter.parallel if drafter.parallel > 1 else None) if x is not None]
    known = tokens if drafter.d2t_W is None else drafter.d2t_W.shape[0]
    limit = min(limits) if limits else None
    plan = Plan.make(decode.tree, decode.k, decode.width, decode.nodes, decode.choices, limit, known, decode.threshold)
    chances = decode.chances if decode.chances is not None else getattr(drafter, "chances", None)
    return plan.with_prompts(getattr(drafter, "prompts", None), decode.prompt_rows, vocab, chances)


def refuse_tree(drafter: Any, decode: DecodeConfig) -> None:
    """ValueError for a tree that the drafter (or, before there is one, any of its class) cannot grow."""
    if hasattr(drafter, "propose"):
        if not fits(decode.tree, drafter) or decode.choices is not None:
            raise ValueError(
                f"tree={decode.tree!r}, choices={decode.choices}: this drafter proposes drafts of its own, as a chain or "
                "a tree: use tree='chain', or 'static' without choices"
            )
    elif not fits(decode.tree, drafter):
        raise ValueError(
            f"tree={decode.tree!r} needs a drafter that gives the levels of all depths at once, and this one is asked "
            f"level by level: use one of {', '.join(name for name in TREES if fits(name, drafter))}"
        )


def refuse_rule(drafter: Any, decode: DecodeConfig, params: Sequence[SamplingParams]) -> None:
    """ValueError for a rule that does not fit requests decoded together, or what the drafter (or its class; None = no
    drafter) makes of them."""
    hot = any(p.temperature > 0 for p in params)
    draws = hot and decode.draft_temperature != 0 and drafter is not None
    draws = draws and (not hasattr(drafter, "propose") or getattr(drafter, "draws", False))
    verify.refuse_misfit(decode.verifier, decode.allow_lossy, hot, None if draws else False)


def wants_rows(decode: DecodeConfig) -> bool:
    """Whether siblings are to be drawn where requests sample: where the rule can use their q."""
    name = decode.verifier
    return TREES[decode.tree].draws and (name == "auto" or verify.VERIFIERS[name].wants_rows)


def depth_of(drafter: Any, decode: DecodeConfig) -> int:
    """Depth of its drafts: k, or what the settings of a proposer say (`own_depth`), which a k beside them must not
    contradict: ValueError."""
    own = getattr(drafter, "own_depth", None)
    if own is not None and decode.k not in (DecodeConfig.k, own):
        raise ValueError(
            f"k={decode.k}: the drafts of {drafter.method} are as deep as its own settings say, here {own}: leave k out "
            f"and set those (--drafter.{drafter.method}.block N)"
        )
    return decode.k if own is None else own


def chain_width(drafter: Any, decode: DecodeConfig) -> int | None:
    """The least `fixed_width` of a drafter's chains of depth k; None where no width gives the bits of plain decoding,
    because the drafter's prefix adds keys."""
    if getattr(drafter, "prefix_kv", None) is not None:
        return None
    extra = getattr(drafter, "extra_rows", 0)
    if not hasattr(drafter, "propose"):
        chain = Plan.make("chain", decode.k, 1, decode.k, None, None, 1)
        extra = chain.with_prompts(getattr(drafter, "prompts", None), decode.prompt_rows, 0, None).extra
    return max(1 + depth_of(drafter, decode) + extra, rows_written(drafter))


def rows_written(drafter: Any) -> int:
    """Rows of the passes of its own that a drafter which reads the target's cache writes behind the text, to be
    overwritten; 0 for all others."""
    return drafter.parallel if "kv" in getattr(drafter, "draft_needs", ()) else 0


def check_width(drafter: Any, decode: DecodeConfig, nodes: int, extra: int) -> None:
    """ValueError for a fixed width that passes of so many nodes and extra rows, or the drafter's own, do not fit."""
    width, rows = decode.fixed_width, nodes + extra + 1
    if width is None or drafter is None:
        return
    if getattr(drafter, "prefix_kv", None) is not None:
        raise ValueError(
            f"fixed_width={width}: this drafter's prefix adds keys that plain decoding has not, so equal width does "
            "not make equal bits: leave fixed_width unset"
        )
    if (written := rows_written(drafter)) > width:
        raise ValueError(
            f"fixed_width={width} is less than the {written} rows of the drafter's own passes, which would need more "
            f"slots than plain decoding has: use fixed_width={written} (here and in plain decoding)"
        )
    if rows > width:
        less = f", or k={width - 1}" if not extra else ""
        raise ValueError(
            f"fixed_width={width} is less than the {rows} rows of a verification with k={nodes}: "
            f"use fixed_width={rows} (here and in plain decoding){less}"
        )


@contextmanager
def training_off(drafter: Any) -> Iterator[None]:
    """The drafter in evaluation mode, afterwards as it was."""
    was_training = drafter is not None and getattr(drafter, "training", False)
    if was_training:
        drafter.eval()
    try:
        yield
    finally:
        if was_training:
            drafter.train()
