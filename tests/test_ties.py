"""The tie-aware oracle: trees below float64 part from plain decoding at near-ties alone, and a wrong mask is found."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from test_speculate import Lookup, Self, make
from torch import Tensor

from draftsmith.inference.speculate import DecodeConfig, generate
from draftsmith.inference.ties import parting, pass_rows
from draftsmith.losses.probs import SamplingParams
from draftsmith.models.pretrained import tiny_target
from draftsmith.models.target import Target
from draftsmith.models.tree import Tree

PARAMS = SamplingParams(max_new_tokens=24, ignore_eos=True)
TREES = {
    "dynamic": DecodeConfig(k=3, tree="dynamic", width=3, nodes=9),
    "static": DecodeConfig(k=3, tree="static", width=3, nodes=9),
}


def small(dtype: torch.dtype) -> Target:
    return tiny_target(width=32, layers=2, dtype=dtype)


def prompts_of(n: int) -> list[list[int]]:
    random = torch.Generator().manual_seed(9)
    return [torch.randint(3, 250, (5 + i,), generator=random).tolist() for i in range(n)]


def partings(target: Target, drafter: Any, decode: DecodeConfig, n: int = 8) -> tuple[list[Any], float]:
    """The first differences from plain decoding of `n` answers, and the tokens per verification."""
    prompts = prompts_of(n)
    plain, drafted = (
        generate(target, prompts, PARAMS, some, how) for some, how in ((None, DecodeConfig()), (drafter, decode))
    )
    rows = pass_rows(target, drafter, decode)
    found = [parting(target, p, a.ids, b.ids, rows) for p, a, b in zip(prompts, plain, drafted, strict=True)]
    total = sum((r.stats for r in drafted[1:]), drafted[0].stats)
    return [each for each in found if each is not None], total.tau


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("tree", TREES)
def test_trees_part_from_plain_decoding_at_near_ties_alone(dtype: torch.dtype, tree: str) -> None:
    target = small(dtype)
    assert target.runner == "lean"
    for drafter in (Self(target), make("medusa", target)):
        found, tau = partings(target, drafter, TREES[tree])
        assert all(each.excused for each in found), found
        assert tau > 1.5 or not isinstance(drafter, Self)


def siblings_see_each_other(self: Tree, depth: int | None = None) -> Tensor:
    b, n = self.tokens_BN.shape
    return torch.ones(n + 1, n + 1, dtype=torch.bool).tril().expand(b, n + 1, n + 1)


def grandparents_are_hidden(self: Tree, depth: int | None = None) -> Tensor:
    b, n = self.tokens_BN.shape
    see_BMM = torch.eye(n + 1, dtype=torch.bool).repeat(b, 1, 1)
    see_BMM[:, 1:].scatter_(2, self.parents_BN[:, :, None], True)
    return see_BMM


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("mask", [siblings_see_each_other, grandparents_are_hidden])
def test_a_wrong_mask_is_not_excused(
    dtype: torch.dtype, mask: Callable[..., Tensor], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever it does to the tree's logits: the widths are compared without a tree."""
    monkeypatch.setattr(Tree, "visible", mask)
    target = small(dtype)
    found, _ = partings(target, Self(target), TREES["static"])
    assert sum(not each.excused for each in found) >= 4


@torch.no_grad()
def test_a_tie_is_excused_and_a_gap_is_not() -> None:
    """Two ids with the same row of the head: either may follow; at every other place no other id may."""
    target = small(torch.float32)
    (prompt,) = prompts_of(1)
    ids = generate(target, [prompt], PARAMS)[0].ids
    twin = next(x for x in range(250, 3, -1) if x not in ids and x > ids[9])
    target.head_weight[twin] = target.head_weight[ids[9]]
    (plain,) = generate(target, [prompt], PARAMS, None, DecodeConfig(keep_logits=True))
    assert plain.ids == ids and plain.logits is not None
    for at, other, excused in ((9, twin, True), (9, (ids[9] + 1) % 250, True), (4, (ids[4] + 1) % 250, False)):
        found = parting(target, prompt, ids, [*ids[:at], other, *ids[at + 1 :]], 5)
        assert found is not None and (found.position, found.reference, found.other) == (at, ids[at], other)
        top = plain.logits[at].double().topk(2).values
        assert found.gap == pytest.approx(float(top[0] - top[1]), abs=1e-4)
        assert 0 < found.width_difference < 1e-3 and found.excused is excused
    short = parting(target, prompt, ids[:4], ids, 5)
    assert short is not None and short.reference is None and short.other == ids[4] and not short.excused
    assert parting(target, prompt, ids, ids, 5) is None
    assert set(short.row()) == {"position", "reference", "other", "gap", "width_difference", "excused"}


def test_float64_excuses_nothing_that_is_told_apart() -> None:
    target = small(torch.float64)
    (prompt,) = prompts_of(1)
    ids = generate(target, [prompt], PARAMS)[0].ids
    found = parting(target, prompt, ids, [*ids[:4], (ids[4] + 1) % 250], 3)
    assert found is not None and found.width_difference < 1e-10 and not found.excused


def test_rows_of_a_pass() -> None:
    target = small(torch.float32)
    assert pass_rows(target, None, DecodeConfig()) == 1 and pass_rows(target, None, DecodeConfig(fixed_width=7)) == 7
    medusa = make("medusa", target)
    assert pass_rows(target, medusa, DecodeConfig(k=3)) == 4
    assert pass_rows(target, medusa, DecodeConfig(k=3, tree="static", width=2, nodes=5)) == 6
    looked_up = Lookup([[1]], [[2]], target.facts.tokens, keep=[1])
    assert pass_rows(target, looked_up, DecodeConfig(k=3)) == 4
    assert pass_rows(target, looked_up, DecodeConfig(tree="static", nodes=9)) == 10
