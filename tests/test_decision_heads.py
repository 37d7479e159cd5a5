"""Heads that decide what is decided: their labels by hand, what they learn, what they refuse."""

from dataclasses import replace

import pytest
import torch

from draftsmith.data.encode import Sample
from draftsmith.data.packing import collate
from draftsmith.models.adapters import AdapterConfig, Adapters
from draftsmith.models.block_diffusion import Passes
from draftsmith.models.decision_heads import Blocks, PairDependency, UnmaskFilter, fit_filter, fit_pairs, observe
from draftsmith.models.diffusion import PRESETS, ObjectiveConfig
from draftsmith.models.pretrained import tiny_target

BLOCK = 4
OBJECTIVE = ObjectiveConfig(block=BLOCK, shift=False, padding="none")


@pytest.fixture(scope="module")
def target():
    return tiny_target(width=32, layers=2, heads=2, kv_heads=2)


@pytest.fixture(scope="module")
def adapters(target):
    return Adapters(AdapterConfig(rank=2, mask="new"), target)


def batch_of(lengths):
    dice = torch.Generator().manual_seed(1)
    samples = [
        Sample(i, torch.randint(3, 250, (n,), generator=dice), torch.arange(n) >= 3) for i, n in enumerate(lengths)
    ]
    return collate(samples, seed=5)


@pytest.mark.parametrize("shift", [False, True])
def test_blocks_are_what_the_passes_say(target, adapters, shift):
    """Every hidden token is an open place once (with shift, but for the first of a block), with its own hidden state."""
    passes = Passes(replace(OBJECTIVE, shift=shift), target, adapters)
    batch = batch_of([9, 12, 6])
    text, rows = passes.rows(batch)
    blocks = observe(passes, batch)
    first_BT = (batch.positions_BT % BLOCK == 0) & batch.supervised_BT
    assert len(rows.flat_R) == int(batch.supervised_BT.sum())
    assert int(blocks.open_UC.sum()) == len(rows.flat_R) - (int(first_BT.sum()) if shift else 0)
    assert blocks.open_UC.gather(1, blocks.shown_U[:, None]).all()
    assert (blocks.confidence_UC[blocks.open_UC] > 0).all() and not blocks.confidence_UC[~blocks.open_UC].any()
    assert (blocks.change_UC <= 1 + 1e-6).all() and not blocks.change_UC[~blocks.open_UC].any()
    own_UC = blocks.change_UC.gather(1, blocks.shown_U[:, None])
    assert not own_UC.any() and blocks.change_UC.sum() > 0
    unit = next(u for u in range(len(blocks.shown_U)) if int(blocks.open_UC[u].sum()) > 1)
    with torch.no_grad():
        _, hidden_BQD = passes.run(text, rows)
    states = hidden_BQD.flatten(0, 1)[rows.flat_R]
    seen = blocks.hidden_UCD[unit][blocks.open_UC[unit]]
    assert all(bool(((states - state).abs().amax(1) < 1e-6).any()) for state in seen)
    again = observe(passes, batch)
    assert torch.equal(again.shown_U, blocks.shown_U) and torch.equal(again.change_UC, blocks.change_UC)
    assert len(Blocks.join([blocks, again]).shown_U) == 2 * len(blocks.shown_U)


def test_nothing_changes_where_nothing_is_seen(target, adapters):
    """Rows that see nothing but the text before them (`inside: causal`): places before the shown one do not change."""
    passes = Passes(replace(OBJECTIVE, inside="causal"), target, adapters)
    blocks = observe(passes, batch_of([16, 16]))
    before_UC = torch.arange(BLOCK) < blocks.shown_U[:, None]
    assert blocks.change_UC[before_UC].abs().max() < 1e-6 < blocks.change_UC.max()


def test_other_blocks_are_refused(target, adapters):
    passes = Passes(replace(PRESETS["set_block"], block=BLOCK), target, adapters)
    with pytest.raises(ValueError, match=r"origin random.*counted from the document's start"):
        observe(passes, batch_of([9]))
    with pytest.raises(ValueError, match="at least 1"):
        UnmaskFilter(0)


def made(right, change, u=400):
    """Blocks by rule: confidences and states are random, the rules say what follows from them."""
    dice = torch.Generator().manual_seed(0)
    open_UC = torch.rand(u, BLOCK, generator=dice) < 0.7
    open_UC[:, 0] = True
    sure_UC = torch.rand(u, BLOCK, generator=dice) * open_UC
    hidden_UCD = torch.randn(u, BLOCK, 6, generator=dice)
    shown_U = torch.zeros(u, dtype=torch.int64)
    return Blocks(open_UC, sure_UC, right(sure_UC) & open_UC, hidden_UCD, shown_U, change(hidden_UCD) * open_UC)


def test_the_filter_learns_a_boundary():
    torch.manual_seed(0)
    blocks = made(lambda sure: sure > 0.6, lambda hidden: torch.zeros(hidden.shape[:2]))
    head = UnmaskFilter(BLOCK)
    assert fit_filter(head, blocks, steps=200) < 0.15
    said_UC = head(blocks.confidence_UC, blocks.open_UC)
    assert ((said_UC > 0.5) == blocks.right_UC)[blocks.open_UC].float().mean() > 0.95 and not said_UC[
        ~blocks.open_UC
    ].any()
    wide = torch.cat([blocks.confidence_UC, blocks.confidence_UC[:, :2]], 1)
    both = head(wide, torch.cat([blocks.open_UC, blocks.open_UC[:, :2]], 1))
    assert both.shape[1] == BLOCK + 2 and torch.allclose(both[:, :BLOCK], said_UC)


def test_the_pairs_learn_who_depends_on_whom():
    """Place i depends on the shown one where the signs of their first numbers agree."""
    torch.manual_seed(0)

    def change(hidden_UCD):
        agree_UC = (hidden_UCD[:, :, 0] > 0) == (hidden_UCD[:, :1, 0] > 0)
        return torch.where(agree_UC, 0.9, 0.1) * (torch.arange(BLOCK) > 0)

    blocks = made(lambda sure: sure > 2, change)
    head = PairDependency(6, rank=4)
    fit_pairs(head, blocks, steps=300, rate=1e-2)
    said_UCC = head(blocks.hidden_UCD)
    assert said_UCC.shape == (400, BLOCK, BLOCK) and (said_UCC >= 0).all() and (said_UCC <= 1).all()
    others_UC = blocks.open_UC & (torch.arange(BLOCK) > 0)
    near = ((said_UCC[:, :, 0] > 0.5) == (blocks.change_UC > 0.5))[others_UC].float().mean()
    assert near > 0.85
    alone = replace(blocks, open_UC=torch.arange(BLOCK).expand(400, -1) == 0)
    with pytest.raises(ValueError, match="two open places"):
        fit_pairs(head, alone)
