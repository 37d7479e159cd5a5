"""One step of decoding that asks the device for nothing: draft, verify, choose, commit, compact.

The engine's own step reads lengths, counts and tokens on the host before it goes on, so a GPU waits for the host several
times per step, and Python for it. Here all that a step needs is in tensors that stay where they are (`Held`), and what
the host wants to know is left in one of them (`Held.report_BX`). Stops are the host's: it learns of them a step late, and
what a row was given beyond its end is dropped by the function that commits (inference/ahead.py). Every shape is known
before the step begins, so on a GPU it is captured in a CUDA graph and replayed.

Drafts, uniforms and rules are those of the engine, so answers are the same token for token. Not everything can be
decoded so; `why_on_host` and `rule_of` say what and why. Tests: tests/test_device_step.py, where a step that asks for a
value fails.
"""

from __future__ import annotations

from dataclasses import dataclass, field, fields, is_dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from ..kernels.verify import Candidates, Choice, columns, verify
from ..losses.probs import ParamRows, allowed
from ..models.cache import Cache
from ..models.drafter import Commit
from ..models.tree import Tree
from .decode import DecodeConfig, wants_rows
from .ledger import Ledger
from .prefixes import States
from .trees import TREES, Draft, Plan
from .verify import coins_of, places

# The rule of kernels/verify.py that does what one of VERIFIERS does.
RULES = {
    "greedy": "sample_match",
    "sample_match": "sample_match",
    "target_only": "target_only",
    "ratio": "ratio",
}
SHAPES = ("chain", "static")
_ASKING_ROPES = ("dynamic", "longrope")  # their frequencies depend on the longest position


def why_on_host(target: Any, drafter: Any, decode: DecodeConfig, plan: Plan | None) -> str | None:
    """Why steps cannot run on the device, whatever the requests, for people; None if they can."""
    if getattr(target, "runner", "hf") != "lean":
        return "the target runs through Hugging Face's modules"
    if (kind := target.facts.rope.get("rope_type")) in _ASKING_ROPES:
        return f"rotary angles of type {kind} depend on the longest position"
    if decode.fixed_width is not None:
        return "fixed_width is the host's"
    if drafter is not None and (plan is None or not getattr(drafter, "on_device", False)):
        return f"{drafter.method} drafts with the host's help"
    if drafter is not None and decode.tree not in SHAPES:
        return f"tree={decode.tree} is grown with the host's help"
    if decode.verifier != "auto" and decode.verifier not in RULES:
        return f"verifier={decode.verifier} is the host's"
    return "logits are kept" if decode.keep_logits else None


def rule_of(decode: DecodeConfig, hot: bool, drawn: bool) -> str | None:
    """The rule, a key of VERIFIERS, for requests of which some sample (`hot`) and candidates that are drawn from rows or
    fixed; None if it is the host's."""
    name = decode.verifier
    if name == "auto":
        chain = TREES[decode.tree].chain
        name = "greedy" if not hot else "target_only" if not drawn else "ratio" if chain else "ratio_tree"
    return name if name in RULES else None


@dataclass
class Held:
    """What a step reads and changes, of B rows: always the same memory, so that a captured step can be replayed."""

    seeds_B: Tensor
    rounds_B: Tensor
    anchors_B: Tensor
    live_B: Tensor  # bool; False = the request is done, its row keeps nothing more
    params: ParamRows
    draft_params: ParamRows
    ledger: Ledger
    state: Any  # the drafter's; its caches are what changes
    rule: str
    drawn: bool
    report_BX: Tensor  # int64: A tokens, then L sibling ranks, then accepted, rejected-at-the-end, drafted, broken
    given: Commit | None = None  # the commit that the next step starts from, if it is of another shape than `own`
    own: Commit | None = None  # what the last step committed
    live: list[bool] = field(default_factory=list)  # `live_B`, as far as the host has said it
    graphs: dict[Any, Any] = field(default_factory=dict)  # inference/ahead.py


def caches_of(state: Any) -> list[Cache]:
    """The caches in a drafter's state."""
    if isinstance(state, Cache):
        return [state]
    if is_dataclass(state) and not isinstance(state, type):
        return [cache for f in fields(state) for cache in caches_of(getattr(state, f.name))]
    return []


def _apart(state: Any) -> Any:
    """The state with fields of its own, which a draft may set; tensors and caches are the same."""
    if isinstance(state, Cache) or not is_dataclass(state) or isinstance(state, type):
        return state
    return replace(state, **{f.name: _apart(getattr(state, f.name)) for f in fields(state)})


def put(old: Any, new: Any) -> None:
    """Copy the tensors of `new` (a dataclass, or a ledger) into those of `old`, in place."""
    for name, value in vars(new).items():
        if isinstance(value, Tensor):
            getattr(old, name).copy_(value)


class DeviceStep:
    """The step for one target, drafter and cache: called with `Held`, it changes it and the caches, and returns nothing.

    `nodes` and `depth` of a draft (0 without a drafter); M = nodes + 1 rows of a pass, of which it keeps up to
    A = depth + 1.
    """

    def __init__(self, target: Any, drafter: Any, decode: DecodeConfig, plan: Plan | None, cache: Cache) -> None:
        self.target, self.drafter, self.decode, self.plan, self.cache = target, drafter, decode, plan, cache
        self.nodes, self.depth = (0, 0) if plan is None else (plan.nodes, plan.depth)
        self.chain = TREES[decode.tree].chain or plan is None
        self.taps = tuple(drafter.taps) if drafter is not None else ()
        d2t_W = None if drafter is None else drafter.d2t_W
        self.columns_V = None if d2t_W is None else columns(d2t_W, target.facts.vocab)
        self.states: States | None = None  # what later prompts start from, if prefixes are kept

    def draws(self, draft_params: ParamRows) -> bool:
        """Whether candidates are drawn: where requests sample, and tree and rule allow it."""
        return self.plan is not None and draft_params.hot and wants_rows(self.decode)

    def report_width(self) -> int:
        """X of `Held.report_BX`."""
        return (self.depth + 1) + self.depth + 4

    @torch.no_grad()
    def __call__(self, held: Held) -> None:
        tree, broken_B = self._draft(held)
        ids_BM = torch.cat([held.anchors_B[:, None], tree.tokens_BN], 1)
        depths_BM = pad(tree.depths_BN, (1, 0))
        start_B = self.cache.lengths_B.clone()
        # Drafts beyond the target's last position are beyond every budget.
        positions_BM = (start_B[:, None] + depths_BM).clamp(max=self.target.facts.max_positions - 1)
        see_BMM = None if self.chain else tree.visible(self.depth)
        out = self.target.forward(ids_BM, positions_BM, cache=self.cache, see_BTA=see_BMM, taps=self.taps)
        choice = self._choose(held, tree, depths_BM, see_BMM, self.target.head(out.last_hidden_BTD))
        self._keep(held, tree, choice, ids_BM, start_B, out, broken_B)

    def _draft(self, held: Held) -> tuple[Tree, Tensor]:
        """The tree, and the rows where the drafter said NaN."""
        none_B = torch.zeros_like(held.live_B)
        if self.plan is None:
            empty_BN = held.anchors_B[:, None][:, :0]
            return Tree(empty_BN, empty_BN, empty_BN, empty_BN.float(), empty_BN.bool()), none_B
        kind = places(self.decode.verifier, held.drawn) if held.draft_params.hot else "fixed"
        draft = Draft(held.draft_params, held.ledger.at, held.drawn, held.seeds_B, held.rounds_B, kind, broken=[none_B])
        state, level = self.drafter.start(_apart(held.state), held.given or held.own)
        _, tree = TREES[self.plan.tree].build(self.drafter, state, level, draft, self.plan)
        assert draft.broken is not None
        return tree, torch.stack(draft.broken).any(0)

    def _choose(self, held: Held, tree: Tree, depths_BM: Tensor, see_BMM: Tensor | None, logits_BMV: Tensor) -> Choice:
        b, m, v = logits_BMV.shape
        see_BMN = None
        if held.params.penalises:
            see_BMN = (tree.visible(self.depth) if see_BMM is None else see_BMM)[:, :, 1:]
        history = held.ledger.at(depths_BM, tree.tokens_BN, see_BMN)
        x_BMV = allowed(logits_BMV.reshape(b * m, v), held.params.repeat(m), history).view(b, m, v)
        candidates = Candidates(
            tree.tokens_BN,
            tree.parents_BN,
            tree.valid_BN,
            self.depth,
            None if tree.q is None else tree.q.rows_BMW,
            self.columns_V,
            None if tree.q is None else tree.q.sampled_B,
        )
        coins = coins_of(held.seeds_B, held.rounds_B, self.cache.lengths_B, depths_BM)
        return verify(RULES[held.rule], x_BMV, held.params.temperature_R, candidates, coins)

    def _keep(
        self, held: Held, tree: Tree, choice: Choice, ids_BM: Tensor, start_B: Tensor, out: Any, broken_B: Tensor
    ) -> None:
        """Keep the accepted rows in the cache and for the drafter; tell the host."""
        a = self.depth + 1
        keep_B = torch.where(held.live_B, choice.counts_B + 1, 0)
        path_BA = pad(choice.path_BL, (1, 0))  # the anchor first
        hidden, taps = out.last_hidden_BTD, out.taps_BTPD
        if self.chain:
            self.cache.commit(keep_B)
            ids_BA = ids_BM
        else:
            self.cache.compact(path_BA, keep_B)
            rows_B1 = torch.arange(len(ids_BM), device=ids_BM.device)[:, None]
            ids_BA, hidden = ids_BM.gather(1, path_BA), hidden[rows_B1, path_BA]
            taps = None if taps is None else taps[rows_B1, path_BA]
        positions_BA = start_B[:, None] + torch.arange(a, device=ids_BM.device)
        if self.states is not None:
            self.states.put(0, positions_BA, taps, hidden)
        if self.drafter is not None:
            made = Commit(ids_BA, keep_B, positions_BA, choice.token_B, taps, hidden)
            if held.own is None:
                held.own = made
            else:
                put(held.own, made)
            held.given = None
        nodes_BL = (choice.path_BL - 1).clamp(min=0)
        ranks_BL = torch.zeros_like(nodes_BL)
        tokens_BA = choice.token_B[:, None]
        if self.depth:
            ranks_BL = ranks_BL if self.chain else tree.sibling_ranks().gather(1, nodes_BL)
            drafted_BA = pad(tree.tokens_BN.gather(1, nodes_BL), (0, 1))
            tokens_BA = drafted_BA.scatter(1, choice.counts_B[:, None], choice.token_B[:, None])
        held.ledger.add_all(tokens_BA, keep_B)
        held.anchors_B.copy_(choice.token_B)
        held.rounds_B += held.live_B
        told_B4 = torch.stack([choice.counts_B, choice.tested_B.long(), tree.valid_BN.sum(1), broken_B.long()], 1)
        held.report_BX.copy_(torch.cat([tokens_BA, ranks_BL, told_B4], 1))
