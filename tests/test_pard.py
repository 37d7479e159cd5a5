"""PARD: what a mask sees (CASES B19), that it reads no state of the target, what is counted, what is refused.

pytest tests/test_pard.py
"""

import dataclasses
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from batches import packed_row
from torch import Tensor

from draftsmith.models.drafter import Batch, Commit, Prefill, TargetOut
from draftsmith.models.pard import Pard, PardConfig
from draftsmith.models.small_lm import LMConfig
from draftsmith.models.target import Target, document_mask
from draftsmith.train.distill_draft import states as states_of_run

MASK = 0


def make(target: Target, depths: int = 4, draft_ids: Tensor | None = None, **options: Any) -> Pard:
    torch.manual_seed(3)
    options.setdefault("lm", LMConfig(layers=2))
    drafter = Pard(PardConfig(depths=depths, **options), target.facts, draft_ids)
    drafter.init_from_target(target)
    return drafter


def states(target: Target, batch: Batch) -> TargetOut:
    out = target.forward(batch.ids_BT, batch.positions_BT, see_BTA=document_mask(batch.samples_BT))
    return TargetOut(None, out.last_hidden_BTD, head=target.head, embed=target.embed)


@torch.no_grad()
def test_nothing_behind_the_anchor_changes_a_logit(target: Target) -> None:
    """Every anchor in turn, all of them with groups of masks that overlap: noise in the place of every token behind it
    changes no hidden state of its masks, nor of the text up to it. Difference 0 in fp32."""
    drafter = make(target).eval()
    batch = packed_row([(0, 14, 3), (1, 9, 0)])
    slots = drafter.slots(batch)
    whole_BTD = drafter.read(slots, batch)
    t = batch.ids_BT.shape[1]
    compared = 0
    for anchor in slots.anchor_BQ[slots.document_BQ >= 0].unique().tolist():
        noisy = dataclasses.replace(batch, ids_BT=batch.ids_BT.clone())
        noisy.ids_BT[:, anchor + 1 :] = torch.randint(3, 250, (1, t - anchor - 1))
        again_BTD = drafter.read(slots, noisy)
        known_BQ = (slots.anchor_BQ <= anchor) & (slots.document_BQ >= 0)
        assert torch.equal(again_BTD[:, t:][known_BQ], whole_BTD[:, t:][known_BQ])
        assert torch.equal(again_BTD[:, : anchor + 1], whole_BTD[:, : anchor + 1])
        later_BQ = (slots.anchor_BQ > anchor) & (slots.document_BQ >= 0)
        assert not later_BQ.any() or not torch.equal(again_BTD[:, t:][later_BQ], whole_BTD[:, t:][later_BQ])
        compared += int(known_BQ.sum())
    assert compared > 200


@torch.no_grad()
def test_a_mask_reads_what_drafting_reads(target: Target) -> None:
    """Each mask of the training layout has the logits of the model on its own text alone: the document up to the anchor,
    then the masks up to it, by the model's own forward pass."""
    drafter = make(target, depths=3).eval()
    batch = packed_row([(0, 10, 2), (1, 8, 1)])
    slots = drafter.slots(batch)
    hidden_BTD = drafter.read(slots, batch)
    t = batch.ids_BT.shape[1]
    assert drafter.body is not None
    checked = 0
    for q in range(slots.anchor_BQ.shape[1]):
        anchor, depth = int(slots.anchor_BQ[0, q]), int(slots.depth_BQ[0, q])
        start = anchor - int(batch.positions_BT[0, anchor])
        alone = torch.cat([batch.ids_BT[0, start : anchor + 1], torch.full((depth,), MASK)])[None]
        want_D = drafter.body.model.model(alone).last_hidden_state[0, -1]
        torch.testing.assert_close(hidden_BTD[0, t + q], want_D, atol=1e-5, rtol=1e-5)
        assert int(slots.label_BQ[0, q]) == anchor + depth + 1
        checked += 1
    assert checked == (7 - 1) + (7 - 2) + (6 - 1) + (6 - 2)  # seeds: 7 and 6 supervised pairs


def test_training_keeps_a_falling_share_and_counts_it(target: Target) -> None:
    """r = 0.7, least 0.2, K = 8: floor(L * max(r ** j, least)) masks at depth j; the count is that of the slots scored,
    and that of the data and the seed alone. Evaluation takes all masks."""
    batch = packed_row([(0, 140, 39)])  # 100 pairs
    drafter = make(target, depths=8)
    slots = drafter.slots(batch)
    kept = [int((slots.depth_BQ == j).sum()) for j in range(1, 8)]
    assert kept == [min(100 - j, int(100 * max(0.7**j, 0.2) + 1e-9)) for j in range(1, 8)]
    total = 100 + sum(kept)
    assert drafter.denominators(batch, 0.0) == {"slots": total}
    terms = drafter(batch, states(target, batch), 0.0)
    assert [float(terms.metrics[f"accuracy_{d}"][1]) for d in range(1, 9)] == [100, *kept]
    assert not torch.equal(drafter.slots(dataclasses.replace(batch, epoch=1)).anchor_BQ, slots.anchor_BQ)
    assert drafter.eval().denominators(batch, 0.0) == {"slots": sum(100 - j for j in range(8))}


def test_the_mean_is_over_all_that_are_kept(target: Target) -> None:
    """PARD's denominator: one mean over text and masks alike; `depth_weight` weighs, `denominator` says by what to divide."""
    batch = packed_row([(0, 30, 6)])
    out = states(target, batch)
    plain = make(target, depths=3)
    slots = plain.predictions(plain.slots(batch), batch)
    logits_RW = plain.run.head(plain.read(plain.slots(batch), batch).flatten(0, 1)[slots.flat_R])
    each_R = F.cross_entropy(logits_RW, slots.label_ids(batch), reduction="none")
    torch.testing.assert_close(plain(batch, out, 0.0).losses["slots"], each_R.sum())
    weighed = make(target, depths=3, depth_weight=0.5)
    depth_R = slots.drafted_BQ.flatten()[slots.flat_R]
    torch.testing.assert_close(weighed(batch, out, 0.0).losses["slots"], (each_R * 0.5 ** (depth_R - 1.0)).sum())
    assert weighed.denominators(batch, 0.0) == {"slots": len(each_R)}
    by_weight = make(target, depths=3, depth_weight=0.5, denominator="weights")
    assert by_weight.denominators(batch, 0.0)["slots"] == pytest.approx(float((0.5 ** (depth_R - 1.0)).sum()))


def test_hard_labels_need_no_state_of_the_target(target: Target) -> None:
    """With ce the loss is the same with and without the target's states, and a run makes none."""
    batch = packed_row([(0, 30, 6), (1, 12, 2)])
    drafter = make(target)
    assert drafter.loss_needs == drafter.draft_needs == {"ids"}
    with_states, without = drafter(batch, states(target, batch), 0.0), drafter(batch, TargetOut(), 0.0)
    torch.testing.assert_close(without.losses["slots"], with_states.losses["slots"])
    assert "lost_mass" not in without.metrics and float(without.metrics["accuracy_1"][1]) == 23 + 9
    _, function, _ = states_of_run(None, target, drafter, [], None, "train", None)  # type: ignore[arg-type]
    assert function(batch).last_hidden_BTD is None
    soft = make(target, objective="0.5*ce + 0.5*kl")
    assert "teacher" in soft.loss_needs and bool(soft(batch, states(target, batch), 0.0).losses["slots"].isfinite())


def test_drafting_reads_the_text_alone(target: Target) -> None:
    drafter = make(target).eval()
    ids_BT = torch.arange(10, 20)[None]
    commit = Commit(ids_BT[:, :9], torch.tensor([9]), torch.arange(9)[None], ids_BT[:, 9])
    state = drafter.init(Prefill(1, 20, torch.device("cpu"), torch.float32))
    state, level = drafter.start(state, commit)
    assert level.logits_BNW.shape == (1, 4, 256) and state.lengths_B.tolist() == [9]  # masks and anchor are not kept
    with pytest.raises(ValueError, match="4 levels at once"):
        drafter.extend(state, torch.tensor([[1]]), torch.tensor([[0]]))


def test_the_mask_token(tiny: Callable[..., Target]) -> None:
    """Given; else by the rule of mask_id.py: the first row beyond the tokenizer; of the tiny one its unknown token."""
    assert make(tiny(vocab=264, tokens=250)).config.mask_id == 250
    assert make(tiny()).config.mask_id == tiny().tokenizer.unk_token_id == MASK
    assert make(tiny(), mask_id=77).config.mask_id == 77
    with pytest.raises(ValueError, match=r"pard: mask_id 256 is no id of tiny, which has 0\.\.255"):
        make(tiny(), mask_id=256)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"depths": 0}, "at least one depth"),
        ({"ratio": 0.0}, "ratio must lie"),
        ({"least": 1.5}, "least in"),
        ({"denominator": "blocks"}, "slots or weights, got 'blocks'"),
        ({"objective": "feature_smooth_l1 + ce"}, "pard has none"),
        ({"depth_weight": 2.0}, "depth_weight"),
    ],
)
def test_settings_refused(options: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        PardConfig(**options)


def test_another_vocabulary_is_refused(target: Target, tiny: Callable[..., Target], tmp_path: Any) -> None:
    stranger = tiny(vocab=300, tokens=300)
    stranger.model.save_pretrained(tmp_path)
    stranger.tokenizer.save_pretrained(tmp_path)
    with pytest.raises(ValueError, match="300 rows and a vocabulary of its own, tiny has 256"):
        make(target, lm=LMConfig("model", model=str(tmp_path)))
