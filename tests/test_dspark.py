"""DSpark: the loss and its heads by hand, confidence and its calibration, Domino's and the selector's losses, drafting.

pytest tests/test_dspark.py
"""

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from batches import random_row, spied_loss
from torch import Tensor

from draftsmith.inference.load import load_drafter
from draftsmith.models.drafter import Commit, Prefill
from draftsmith.models.dspark import DSpark, DSparkConfig, calibration_error, sequential_temperatures
from draftsmith.models.slots import at
from draftsmith.models.target import Target, live_states
from draftsmith.train import distill_draft

HEADS = ("markov", "gated", "rnn", "gru", "pairs", "none")
DRAFT_IDS = torch.arange(3, 200, 3)


def spark(target: Target, head: str = "markov", draft_ids: Tensor | None = None, **options: Any) -> Any:
    """Random weights everywhere, so that no part is idle."""
    torch.manual_seed(3)
    options = {
        "layers": 2,
        "block": 4,
        "anchors": None,
        "rank": 8,
        "gru_size": 10,
        "candidates": 6,
        "head": head,
    } | options
    drafter = DSpark(DSparkConfig(**options), target.facts, draft_ids)
    drafter.init_from_target(target)
    with torch.no_grad():
        for parameter in drafter.parameters():
            parameter += 0.2 * torch.randn_like(parameter) * parameter.shape[-1] ** -0.5
    return drafter


def bare(drafter: Any, target: Target) -> Any:
    """The same backbone without heads."""
    twin = spark(target, "none", drafter.d2t_W, confidence=False)
    twin.load_state_dict({n: t for n, t in drafter.state_dict().items() if n in twin.state_dict()})
    return twin.train(drafter.training)


# Loss


def test_loss_by_hand(target: Target, monkeypatch: Any) -> None:
    """0.1 CE + 0.9 sum |p - q| + BCE(confidence, sum min(p, q)), each times exp(-(d - 1) / 4), over the sum of weights."""
    batch = random_row([5, 6, 7, 8, 9])
    drafter = spark(target)
    out = live_states(target, drafter, batch)
    terms, logits, slots = spied_loss(drafter, batch, out, monkeypatch)
    labels = slots.label_BQ[0, slots.flat_R]
    weight = torch.exp(-(slots.drafted_BQ[0, slots.flat_R] - 1) / 4)
    q, p = logits.softmax(-1), target.head(out.last_hidden_BTD[0, labels - 1]).softmax(-1)
    hard = -q[torch.arange(len(q)), batch.ids_BT[0, labels]].log()
    torch.testing.assert_close(
        terms.losses["slots"].detach(),
        ((0.1 * hard + 0.9 * (p - q).abs().sum(-1)) * weight).sum(),
        rtol=1e-5,
        atol=1e-5,
    )
    alpha = torch.minimum(p, q).sum(-1)
    torch.testing.assert_close(terms.accept_R, alpha)
    _, (_, z) = drafter.losses(batch, out, 0.0)
    bce = -(alpha * F.logsigmoid(z) + (1 - alpha) * F.logsigmoid(-z))
    torch.testing.assert_close(terms.losses["confidence"].detach(), (bce * weight).sum().detach(), rtol=1e-5, atol=1e-5)
    assert drafter.denominators(batch, 0.0) == pytest.approx(
        {"slots": float(weight.sum()), "confidence": float(weight.sum())}
    )
    total, count = terms.metrics["confidence_error"]
    assert float(total / count) == pytest.approx(float((z.sigmoid() - alpha).abs().mean().detach()), rel=1e-4)
    doubled = spark(target, confidence_factor=2.0)(batch, out, 0.0)
    torch.testing.assert_close(doubled.losses["confidence"], 2 * terms.losses["confidence"])


def test_alpha_is_a_constant_for_the_confidence(target: Target) -> None:
    """The confidence loss reaches the backbone through its features, but not through the draft's distribution."""
    batch = random_row([5, 6, 7, 8, 9])
    drafter = spark(target)
    drafter(batch, live_states(target, drafter, batch), 0.0).losses["confidence"].backward()
    assert drafter.markov_head.markov_w2.weight.grad is None  # it makes q and nothing else
    assert drafter.confidence_head.proj.weight.grad.any() and drafter.markov_head.markov_w1.weight.grad.any()


def test_the_confidence_reads_the_token_before(target: Target, monkeypatch: Any) -> None:
    """Depth 1: the anchor; depth d: the data's token of depth d - 1. Without a Markov head: the slot's state alone."""
    batch = random_row([5, 6, 7, 8, 9])
    drafter = spark(target)
    out = live_states(target, drafter, batch)
    seen: list[Tensor] = []
    monkeypatch.setattr(drafter, "confidence_logits", lambda h, x: seen.append(x) or h[:, 0])
    _, (slots, _) = drafter.losses(batch, out, 0.0)
    anchors, drafted = slots.anchor_BQ[0, slots.flat_R], slots.drafted_BQ[0, slots.flat_R]
    assert torch.equal(seen[0], batch.ids_BT[0, anchors + drafted - 1])
    assert spark(target, "gru").confidence_head.proj.weight.shape == (1, 48)
    assert drafter.confidence_head.proj.weight.shape == (1, 48 + 8)


def test_domino_goes_over_to_the_corrected_logits(target: Target, monkeypatch: Any) -> None:
    """(1 - l) on the corrected logits, l on the backbone's own, l from 1 to 0 over the first half of training."""
    batch = random_row([5, 6, 7, 8, 9])
    drafter = spark(target, "gru", objective="ce", base_share=0.5, confidence=False)
    out = live_states(target, drafter, batch)
    ends = {p: {n: float(v.detach()) for n, v in drafter(batch, out, p).losses.items()} for p in (0.0, 0.25, 0.5, 1.0)}
    assert ends[0.0]["slots"] == 0 and ends[0.5].keys() == ends[1.0].keys() == {"slots"}
    assert ends[0.25] == pytest.approx({"slots": ends[1.0]["slots"] / 2, "base": ends[0.0]["base"] / 2})
    assert ends[0.0]["base"] != pytest.approx(ends[1.0]["slots"], rel=1e-3)
    assert drafter.denominators(batch, 0.0).keys() == {"slots", "base"}
    _, corrected, slots = spied_loss(drafter, batch, out, monkeypatch)  # the last score, that of the figures
    _, base, _ = spied_loss(bare(drafter, target), batch, out, monkeypatch)
    first_R = slots.drafted_BQ[0, slots.flat_R] == 1
    torch.testing.assert_close(corrected[first_R], base[first_R])  # depth 1 is left to the backbone
    assert bool((corrected[~first_R] != base[~first_R]).any(-1).all())


@pytest.mark.parametrize("reduced", [False, True])
def test_selector_loss_by_hand(reduced: bool, target: Target, monkeypatch: Any) -> None:
    batch = random_row([5, 6, 7, 8, 9, 10])
    if reduced:
        batch.ids_BT[0, 6:11] = torch.tensor([1, 9, 60, 120, 150])  # the first is outside the draft vocabulary
    count = 40 if reduced else 128
    drafter = spark(target, "pairs", DRAFT_IDS if reduced else None, candidates=count, confidence=False)
    out = live_states(target, drafter, batch)
    terms, logits, slots = spied_loss(drafter, batch, out, monkeypatch)
    assert bool((logits.isfinite().sum(-1) == count).all())  # a draft has no mass outside the candidates
    labels = batch.ids_BT[0, slots.label_BQ[0, slots.flat_R]].tolist()
    place = {int(i): w for w, i in enumerate(DRAFT_IDS if reduced else torch.arange(256))}
    by_hand, counted = 0.0, 0
    for row, label, drafted in zip(
        logits.log_softmax(-1), labels, slots.drafted_BQ[0, slots.flat_R].tolist(), strict=True
    ):
        if label in place and bool(row[place[label]].isfinite()):
            by_hand -= math.exp(-(drafted - 1) / 4) * float(row[place[label]])
            counted += 1
    assert float(terms.losses["slots"].detach()) == pytest.approx(by_hand, rel=1e-5) and 0 < counted < len(labels)
    base = bare(drafter, target)(batch, out, 0.0).losses["slots"]
    assert float(terms.losses["base"].detach()) == pytest.approx(float(base.detach()), rel=1e-5)
    sum(terms.losses.values()).backward()
    assert all(p.grad is not None and bool(p.grad.isfinite().all()) for p in drafter.parameters())


# Drafting


def draft(drafter: Any, target: Target, rows: int = 2) -> tuple[Any, Any, Any]:
    """State and level after a prompt of two rows of different lengths."""
    batch = random_row([])
    out = live_states(target, drafter, batch)
    commit = Commit(
        batch.ids_BT.expand(rows, -1),
        torch.tensor([9, 14][:rows]),
        batch.positions_BT.expand(rows, -1),
        torch.tensor([5, 6][:rows]),
        out.taps_BTPD.expand(rows, -1, -1, -1),
    )
    prefill = Prefill(rows, 30, torch.device("cpu"), torch.float32)
    return commit, *drafter.start(drafter.init(prefill), commit)


@pytest.mark.parametrize("head", HEADS)
def test_start_gives_all_depths_and_extend_corrects_them(head: str, target: Target) -> None:
    drafter = spark(target, head).eval()
    _, state, level = draft(drafter, target)
    _, _, plain = draft(bare(drafter, target), target)
    assert drafter.parallel == drafter.max_depth == 4 and drafter.sequential == (head != "none")
    assert level.logits_BNW.shape == (2, 4, 256) and level.confidence_BN.shape == (2, 4)
    torch.testing.assert_close(level.logits_BNW[:, 1:], plain.logits_BNW[:, 1:])  # the backbone's own
    if head == "none":
        with pytest.raises(ValueError, match="all 4 levels at once"):
            drafter.extend(state, torch.tensor([[1], [1]]), torch.tensor([[0], [0]]))
        return
    state, below = drafter.extend(state, torch.tensor([[7, 9], [7, 9]]), torch.tensor([[0, 0], [0, 0]]))
    assert bool((below.logits_BNW[:, 0] != below.logits_BNW[:, 1]).any(-1).all()) and bool(below.valid_BN.all())
    for depth in (2, 3):
        state, below = drafter.extend(state, torch.tensor([[4], [4]]), torch.full((2, 1), depth))
        assert bool(below.valid_BN.all())
    _, below = drafter.extend(state, torch.tensor([[4], [4]]), torch.full((2, 1), 4))
    assert not below.valid_BN.any()  # below the last slot there is nothing


@pytest.mark.parametrize("head", HEADS[:-1])
@pytest.mark.parametrize("reduced", [False, True])
def test_pair_scores_are_what_extend_says(head: str, reduced: bool, target: Target) -> None:
    """Candidate b after candidate a, for every first candidate's path (heads with a state: those alone)."""
    drafter = spark(target, head, DRAFT_IDS if reduced else None).eval()
    _, state, level = draft(drafter, target)
    log_BKC, ids_BKC = level.logits_BNW.log_softmax(-1).topk(3)
    scores = drafter.pair_scores(state, ids_BKC, log_BKC)
    assert scores.shape == (2, 3, 3, 3)
    tokens = ids_BKC if drafter.d2t_W is None else drafter.d2t_W[ids_BKC]
    for d in range(3):
        parent = torch.full((2, 3), d)
        _, below = drafter.extend(state, tokens[:, d], parent)  # all candidates of this depth, below the best before
        want = below.logits_BNW.log_softmax(-1).gather(2, ids_BKC[:, None, d + 1].expand(2, 3, 3))
        torch.testing.assert_close(scores[:, d], want, atol=1e-5, rtol=1e-5)
        state, _ = drafter.extend(state, tokens[:, d, :1], parent[:, :1])


def test_confidence_of_a_level(target: Target) -> None:
    """sigmoid(logit / temperature of that depth), behind the tokens taken; none without the head."""
    temperatures = (0.5, 1.0, 2.0, 4.0)
    plain, warm = spark(target).eval(), spark(target, temperatures=temperatures).eval()
    logits = []
    for drafter in (plain, warm):
        _, state, level = draft(drafter, target)
        found = [level.confidence_BN[:, 0]]
        for k in range(3):
            state, level = drafter.extend(state, torch.tensor([[7], [9]]), torch.full((2, 1), k))
            found.append(level.confidence_BN[:, 0])
        logits.append(torch.logit(torch.stack(found, 1)))
    torch.testing.assert_close(logits[1] * torch.tensor(temperatures), logits[0], atol=1e-4, rtol=1e-4)
    _, _, level = draft(spark(target, confidence=False).eval(), target)
    assert level.confidence_BN is None


def test_confidence_is_trained_on_what_is_drafted(target: Target) -> None:
    """The logits that the loss is computed from are those of drafting along the data."""
    batch = random_row(list(range(14)))
    drafter = spark(target, "rnn").eval()
    out = live_states(target, drafter, batch)
    _, (slots, z_R) = drafter.losses(batch, out, 0.0)
    anchor = 8
    commit = Commit(
        batch.ids_BT[:, :anchor], torch.tensor([anchor]), batch.positions_BT[:, :anchor], batch.ids_BT[:, anchor],
        out.taps_BTPD[:, :anchor],
    )  # fmt: skip
    state, level = drafter.start(drafter.init(Prefill(1, 30, torch.device("cpu"), torch.float32)), commit)
    mine_R = slots.anchor_BQ[0, slots.flat_R] == anchor
    found = [level.confidence_BN[0, 0]]
    for k in range(3):
        state, level = drafter.extend(state, batch.ids_BT[:, anchor + 1 + k, None], torch.tensor([[k]]))
        found.append(level.confidence_BN[0, 0])
    torch.testing.assert_close(torch.stack(found), z_R[mine_R].sigmoid(), atol=1e-5, rtol=1e-5)


# Calibration


def test_calibration_error_by_hand() -> None:
    predicted, happened = torch.tensor([0.05, 0.15, 0.18, 0.95]), torch.tensor([0.0, 1.0, 0.0, 1.0])
    want = (abs(0.05) + abs(0.33 - 1.0) + abs(0.95 - 1.0)) / 4
    assert float(calibration_error(predicted, happened)) == pytest.approx(want, abs=1e-6)


def test_sequential_temperatures_undo_overconfidence() -> None:
    """Confidences made too sharp by a known factor per depth: the fitted temperatures are these factors, and the error
    of the product falls at every depth."""
    torch.manual_seed(0)
    factors = (2.0, 1.0, 0.5, 4.0)
    true = torch.randn(20000, 4) + 1.0
    accept = (torch.rand(20000, 4) < true.sigmoid()).float()
    sharp = true * torch.tensor(factors)
    found = sequential_temperatures(sharp, accept)
    for heat, factor in zip(found, factors, strict=True):
        assert 0.7 * factor <= heat <= 1.4 * factor
    happened = accept.cumprod(1)
    for k in range(4):
        raw = sharp.sigmoid().cumprod(1)[:, k]
        fitted = (sharp / torch.tensor(found)).sigmoid().cumprod(1)[:, k]
        error = float(calibration_error(fitted, happened[:, k]))
        assert error < 0.02 and error < float(calibration_error(raw, happened[:, k]))
    assert (
        sequential_temperatures(torch.ones(1, 4), torch.ones(1, 4)) == (0.125,) * 4
    )  # all accepted: as sure as can be


def test_calibrate_reads_whole_blocks_of_held_out_data(target: Target) -> None:
    drafter = spark(target)
    batches = [random_row(list(range(2, 14)), seed=s) for s in range(3)]
    before = drafter.config
    drafter.calibrate(batches, lambda batch: live_states(target, drafter, batch))
    fitted = drafter.config.temperatures
    assert fitted is not None and len(fitted) == 4 and drafter.training
    assert drafter.config == replace(before, temperatures=fitted)
    assert drafter.config == DSparkConfig(**{**vars(drafter.config)})  # settings that pass their own checks
    quiet = spark(target, confidence=False)
    quiet.calibrate(batches, lambda batch: live_states(target, quiet, batch))
    short = spark(target)
    short.calibrate([random_row([5, 6])], lambda batch: live_states(target, short, batch))
    assert quiet.config.temperatures is None and short.config.temperatures is None


def test_a_run_ends_calibrated(tmp_path: Path, target: Target) -> None:
    argv = "method=dspark target.name=tiny target.dtype=float32 data.limit=20 data.max_length=512 batch.row_length=512"
    argv += " batch.rows=2 budget.steps=2 precision=fp32 evaluate.conversations=3 evaluate.probe_prompts=0"
    argv += " drafter.block=3 drafter.layers=1 drafter.rank=4 drafter.anchors=4 log.progress=false"
    assert distill_draft.main([*argv.split(), f"run={tmp_path / 'a'}"]) == 0
    ours = json.loads((tmp_path / "a/export/config.json").read_text())["draftsmith"]
    assert len(ours["config"]["temperatures"]) == 3 and ours["estimated"]["k"] == 3
    assert list(load_drafter(str(tmp_path / "a/export"), target).config.temperatures) == ours["config"]["temperatures"]


# Settings


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"head": "lstm"}, "markov, gated, rnn, gru, pairs, none, got 'lstm'"),
        ({"rank": 0}, "rank"),
        ({"head": "gru", "clean_depths": 4}, r"0\.\.3"),
        ({"base_share": 2.0}, "base_share"),
        ({"head": "pairs", "base_share": 0.5}, "corrects all logits"),
        ({"confidence_factor": 0.0}, "confidence_factor"),
        ({"temperatures": (1.0, 2.0)}, "4 positive numbers"),
        ({"temperatures": (1.0, 2.0, 0.0, 1.0)}, "4 positive numbers"),
        ({"confidence": False, "temperatures": (1.0, 1.0, 1.0, 1.0)}, "confidence is false"),
        ({"weight": "dpace"}, "dspark: weight dpace"),
        ({"taps": (1, 9)}, "dspark: taps"),
    ],
)
def test_settings_refused(options: dict[str, Any], words: str, target: Target) -> None:
    with pytest.raises(ValueError, match=words):
        spark(target, **options)


def test_previous_tokens_stay_inside_the_row(target: Target) -> None:
    """A block at the end of its row has slots past it; they are computed and not scored."""
    batch = random_row(list(range(14)))
    drafter = spark(target, "rnn")
    slots = drafter.losses(batch, live_states(target, drafter, batch), 0.0)[1][0]
    assert int(slots.label_BQ.max()) > 13 and int(at(batch.ids_BT, slots.label_BQ - 1).max()) < 256
    assert int(slots.label_BQ[0, slots.flat_R].max()) == 13
