"""Tree attention, verification and compaction as they run without a GPU, against what the decode loop uses.

The Triton kernels are compared with the same references in test_kernels.py.
Run: pytest tests/test_tree_kernels.py
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import astuple, replace
from typing import Any

import pytest
import torch
from kernel_cases.tree_attention import grown, inputs
from kernel_cases.verify import coins_of, tree_of
from torch import Tensor

from draftsmith.inference import verify as rules
from draftsmith.kernels import compact, tree_attention, verify
from draftsmith.kernels.tree_attention import Sight, pack
from draftsmith.models.cache import Cache
from draftsmith.models.tree import Proposal, Tree


@pytest.fixture
def no_questions(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a GPU each of these would wait for the device."""

    def refuse(*_: Any) -> None:
        raise AssertionError("the host asks the device for a value")

    for name in ("item", "tolist", "__bool__", "__int__", "__float__", "__index__", "nonzero", "numpy"):
        monkeypatch.setattr(torch.Tensor, name, refuse)


def wanted(rule: str, logits_BMV: Tensor, heat_B: Tensor, given: verify.Candidates, coins: rules.Coins) -> rules.Choice:
    """By inference/verify.py, from probabilities of all rows."""
    hot_B11 = (heat_B > 0)[:, None, None]
    p_BMV = (logits_BMV / torch.where(hot_B11, heat_B[:, None, None], 1)).softmax(-1)
    top_BMV = torch.nn.functional.one_hot(logits_BMV.argmax(-1), logits_BMV.shape[2]).to(p_BMV)
    p_BMV = torch.where(hot_B11, p_BMV, top_BMV)
    depths_BN = torch.zeros_like(given.parents_BN)
    for j in range(depths_BN.shape[1]):
        up_BM = torch.nn.functional.pad(depths_BN, (1, 0))
        depths_BN[:, j] = up_BM.gather(1, given.parents_BN[:, j : j + 1])[:, 0] + 1
    q = None
    if given.q_BMW is not None:
        d2t_W = None if given.columns_V is None else (given.columns_V >= 0).nonzero()[:, 0]
        q = Proposal(given.q_BMW, d2t_W, replacement=False, sampled_B=given.sampled_B)
    tree = Tree(given.tokens_BN, given.parents_BN, depths_BN, torch.zeros(depths_BN.shape), given.valid_BN, q)
    verifier = rules.VERIFIERS[rule]
    return verifier.choose(tree, verifier.probabilities(tree, p_BMV), coins)


def same(got: verify.Choice, want: rules.Choice) -> None:
    """The path is as wide as the deepest node there, as `depth` here."""
    width = want.path_BL.shape[1]
    assert not got.path_BL[:, width:].any()
    for a, b in zip(astuple(replace(got, path_BL=got.path_BL[:, :width])), astuple(want), strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize("n", [0, 1, 6, 64])
@pytest.mark.parametrize("rule", ["target_only", "sample_match"])
def test_walks_choose_what_the_rules_choose(rule: str, n: int) -> None:
    torch.manual_seed(n)
    logits_BMV, heat_B, tree = tree_of(60, n, 13, torch.float64)
    coins = coins_of(60, n)
    got = verify.verify(rule, logits_BMV, heat_B.double(), tree, coins)
    same(got, wanted(rule, logits_BMV, heat_B.double(), tree, coins))
    assert n == 0 or len(got.counts_B.unique()) > 1


@pytest.mark.parametrize("mapped", [False, True])
def test_ratio_chooses_what_the_rule_chooses(mapped: bool) -> None:
    torch.manual_seed(0)
    b, n, v = 300, 3, 12
    logits_BMV, heat_B, chain = tree_of(b, n, v, torch.float64, chain=True)
    d2t_W = torch.arange(1, v, 2) if mapped else torch.arange(v)
    q_BMW = (logits_BMV[..., d2t_W].clamp(min=-9) + torch.randn(b, n + 1, len(d2t_W))).softmax(-1)
    tokens_BN = d2t_W[torch.multinomial(q_BMW[:, :n].flatten(0, 1), 1).view(b, n)]
    drawn = replace(chain, tokens_BN=tokens_BN, q_BMW=q_BMW)
    if mapped:
        drawn = replace(drawn, columns_V=verify.columns(d2t_W, v), sampled_B=torch.rand(b) < 0.5)
    coins = coins_of(b, n)
    got = verify.verify("ratio", logits_BMV, heat_B.double(), drawn, coins)
    same(got, wanted("ratio", logits_BMV, heat_B.double(), drawn, coins))
    assert len(got.counts_B.unique()) == n + 1


def test_cold_rows_follow_the_first_of_equal_maxima() -> None:
    """The greedy rule, token for token."""
    torch.manual_seed(0)
    logits_BMV, _, tree = tree_of(40, 6, 9, torch.float64)
    cold_B, coins = torch.zeros(40), coins_of(40, 6)
    for rule in ("target_only", "sample_match"):
        got = verify.verify(rule, logits_BMV, cold_B, tree, coins)
        top_BM = logits_BMV.argmax(-1)
        assert torch.equal(got.token_B, top_BM.gather(1, got.stop_B[:, None])[:, 0])
        same(got, wanted("target_only", logits_BMV, cold_B.double(), tree, coins))


def test_a_shorter_walk_ends_with_the_targets_own_draw() -> None:
    """Nodes below the depth given are as good as not there."""
    torch.manual_seed(0)
    logits_BMV, heat_B, chain = tree_of(80, 4, 7, torch.float64, chain=True)
    coins = coins_of(80, 4)
    short = verify.Candidates(chain.tokens_BN, chain.parents_BN, chain.valid_BN & (torch.arange(4) < 2), 2)
    got = verify.verify("target_only", logits_BMV, heat_B, replace(chain, depth=2), coins)
    want = verify.verify("target_only", logits_BMV, heat_B, short, coins)
    assert all(torch.equal(a, b) for a, b in zip(astuple(got), astuple(want), strict=True))


def test_verification_refuses_what_it_cannot_do() -> None:
    logits_BMV, heat_B, tree = tree_of(2, 3, 5, torch.float32)
    coins = coins_of(2, 3)
    with pytest.raises(ValueError, match="target_only, ratio, sample_match"):
        verify.verify("block", logits_BMV, heat_B, tree, coins)
    with pytest.raises(ValueError, match="use target_only"):
        verify.verify("ratio", logits_BMV, heat_B, tree, coins)
    with pytest.raises(ValueError, match="one row per node"):
        verify.verify("target_only", logits_BMV[:, 1:], heat_B, tree, coins)


def sights() -> Iterator[tuple[Sight, Tensor, int]]:
    """(sight, what rows see of the tail, slots) of trees over ragged rows."""
    torch.manual_seed(1)
    for n in (0, 5, 70):
        see_BMM = grown(3, n)
        yield Sight(torch.tensor([0, 9, 4]), pack(see_BMM), n + 1), see_BMM, 9 + n + 1 + 2


def test_a_sight_is_the_cache_mask() -> None:
    for sight, see_BMM, slots in sights():
        cache = Cache(3, slots, 1, 1, 4, torch.float32, "cpu", read_all=True)
        cache.lengths_B.copy_(sight.lengths_B)
        cache.positions_BS.copy_(torch.arange(slots).expand(3, -1))
        cache.begin(sight.lengths_B[:, None] + torch.arange(sight.tail))
        want_BMS = cache.mask(see_BMM)[:, 0]
        assert torch.equal(tree_attention.visible(sight, slots), want_BMS)


def test_bits_say_what_a_tree_says() -> None:
    parents_BN = torch.tensor([[0, 0, 1, 3, 2], [0, 1, 2, 3, 4]])
    depths_BN = torch.tensor([[1, 1, 2, 3, 2], [1, 2, 3, 4, 5]])
    valid_BN = torch.tensor([[True] * 5, [True, True, True, False, False]])
    tree = Tree(parents_BN, parents_BN, depths_BN, torch.zeros(2, 5), valid_BN)
    assert tree.ancestors()[0, 4].tolist() == [0b11011]


@pytest.mark.parametrize(("heads", "keys"), [(2, 2), (6, 2), (8, 1)])
def test_folded_attention_equals_its_reference(heads: int, keys: int) -> None:
    for sight, _, slots in sights():
        q, k, v = inputs(3, sight.bits_BMX.shape[1], heads, keys, 24, slots, torch.float32)
        for dtype, atol in ((torch.float64, 1e-12), (torch.float32, 1e-5), (torch.bfloat16, 0.05)):
            own = [x.to(dtype) for x in (q, k, v)]
            want = tree_attention.reference(*(x.double() for x in own), sight, 0.4)
            got = tree_attention.tree_attention(*own, sight, 0.4)
            assert got.dtype == dtype and float((got.double() - want).abs().max()) < atol


def test_a_row_that_sees_nothing_gives_zeros() -> None:
    q, k, v = inputs(1, 2, 2, 1, 16, 20, torch.float32)
    sight = Sight(torch.tensor([0]), torch.tensor([[[1], [0]]]), 2)
    assert not tree_attention.reference(q, k, v, sight)[0, 1].any()
    assert not tree_attention.tree_attention(q, k, v, sight)[0, 1].any()


def test_attention_refuses_what_does_not_fit() -> None:
    sight, _, slots = next(sights())
    q, k, v = inputs(3, 1, 3, 2, 16, slots, torch.float32)
    with pytest.raises(ValueError, match="3 query heads on 2"):
        tree_attention.tree_attention(q, k, v, sight)
    q, k, v = inputs(3, 2, 2, 2, 16, slots, torch.float32)
    with pytest.raises(ValueError, match="tail"):
        tree_attention.tree_attention(q, k, v, sight)


def test_plain_forms_ask_nothing(no_questions: None) -> None:
    """So that a whole step of them can be recorded, and tested here."""
    sight = Sight(torch.tensor([3, 1]), pack(torch.ones(2, 4, 4).tril().bool()), 4)
    tree_attention.tree_attention(torch.ones(2, 4, 2, 8), *torch.ones(2, 2, 1, 12, 8), sight)
    parents_BN = torch.arange(3).repeat(2, 1)
    chain = verify.Candidates(parents_BN, parents_BN, torch.ones(2, 3).bool(), 3, torch.ones(2, 4, 5))
    coins = rules.Coins(torch.zeros(2, 3), torch.zeros(2, 4), torch.zeros(2, 4))
    for rule in verify.RULES:
        choice = verify.verify(rule, torch.zeros(2, 4, 5), torch.ones(2), chain, coins)
    lengths_B = sight.lengths_B.clone()
    compact.compact(torch.zeros(1, 2, 2, 1, 12, 8), lengths_B, choice.path_BL, choice.counts_B)
