"""Training on own guesses: what is rewritten, the losses by hand, no gradients and no chance in the guesses.

Run: pytest tests/test_on_policy.py
"""

from __future__ import annotations

from dataclasses import fields, replace
from typing import Any

import pytest
import torch
from test_block_diffusion import OUT, objective_of, samples, trained
from torch import Tensor

from draftsmith.data.batch import Batch
from draftsmith.data.packing import make_batch
from draftsmith.models.diffusion import PRESETS
from draftsmith.models.on_policy import OnPolicyConfig

SECONDS: list[Any] = ["guesses", "trajectory"]


def guesses_by_hand(module: Any, batch: Batch) -> Tensor:
    """[B, T'] the likeliest id of every hidden token, from all logits; -1 where nothing is hidden."""
    passes = module.passes
    text, rows = passes.rows(batch)
    with torch.no_grad():
        logits = passes.target.head(passes.run(text, rows)[1])
    logits[..., passes.target.banned_ids] = float("-inf")
    if passes.adapters.mask_id < logits.shape[-1]:
        logits[..., passes.adapters.mask_id] = float("-inf")
    out = torch.full_like(text.ids_BT, -1)
    for b, q in (rows.label_BQ >= 0).nonzero().tolist():
        place = int(rows.position_BQ[b, q]) + passes.objective.shift
        there = (text.samples_BT[b] == rows.document_BQ[b, q]) & (text.positions_BT[b] == place)
        (t,) = there.nonzero()[:, 0].tolist()
        assert int(text.ids_BT[b, t]) == int(rows.label_BQ[b, q])
        if not (passes.objective.dual and bool(text.first_BT[b, t])):  # shown to nobody of its block
            out[b, t] = logits[b, q].argmax()
    return out


def half_known(module: Any, batch: Batch) -> Batch:
    """The batch with every second hidden token changed into what the model takes it for. Block by block: a guess reads
    clean text of earlier blocks alone."""
    ids_BT = batch.ids_BT.clone()
    for block in range(int(module.passes.rows(batch)[0].block_BT.max()) + 1):
        now = replace(batch, ids_BT=ids_BT.clone())
        text, guess_BT = module.passes.rows(now)[0], guesses_by_hand(module, now)
        for b, t in ((guess_BT >= 0) & (text.block_BT == block)).nonzero().tolist():
            place = int(text.positions_BT[b, t])
            at = (batch.samples_BT[b] == text.samples_BT[b, t]) & (batch.positions_BT[b] == place)
            last = not bool((at & (batch.samples_BT[b].roll(-1) == batch.samples_BT[b])).any())
            if place % 2 and not last:
                ids_BT[b, at] = guess_BT[b, t]
    return replace(batch, ids_BT=ids_BT)


def two_rows(epoch: int = 1) -> Batch:
    return make_batch([samples()[:2], samples()[2:]], 30, 7, epoch)


@pytest.mark.parametrize("second", SECONDS)
@pytest.mark.parametrize("name", PRESETS)
def test_hidden_tokens_alone_are_rewritten(name: str, second: Any) -> None:
    """Guesses are the likeliest ids of the same pass; of a trajectory those alone that are right."""
    module = trained(objective_of(name), OnPolicyConfig(second), dtype=torch.float64)
    batch = half_known(module, two_rows())
    fresh = module.rewrite(batch, 0.5)
    text, rows = module.passes.rows(batch)
    wanted = guesses_by_hand(module, batch)
    right = (wanted == text.ids_BT) & (wanted >= 0)
    assert 0 < int(right.sum()) < int((wanted >= 0).sum())
    assert module.objective.dual or int((wanted >= 0).sum()) == len(rows.flat_R)
    if second == "trajectory":
        wanted = torch.where(right, wanted, -1)
    mask_id = module.passes.adapters.mask_id
    assert torch.equal(fresh.guess_BT, torch.where(wanted >= 0, wanted, mask_id))
    assert all(getattr(fresh, f.name) is getattr(batch, f.name) for f in fields(Batch) if f.name != "guess_BT")


@pytest.mark.parametrize("second", SECONDS)
@pytest.mark.parametrize("name", ["fast_dllm_v2", "sdar", "d2f", "dual", "wedlm"])
def test_loss_by_hand(name: str, second: Any) -> None:
    config = OnPolicyConfig(second, weight=0.5, redundant=2.0)
    module = trained(objective_of(name), config, dtype=torch.float64)
    batch = module.rewrite(half_known(module, two_rows()), 0.0)
    text, (copy,) = module._hidden(batch)
    rows = module._rows(text, module._both(text, copy, batch.guess_BT))
    with torch.no_grad():
        log_q = module.passes.target.head(module.passes.run(text, rows)[1]).log_softmax(-1)
        terms, counts = module(batch, OUT, 0.0), module.denominators(batch, 0.0)
    shift, mask_id = int(module.objective.shift), module.passes.adapters.mask_id
    sums, numbers = {"hidden": 0.0, "second": 0.0}, {"hidden": 0, "second": 0}
    for b in range(2):
        for q in range(rows.ids_BQ.shape[1]):
            document, place = int(rows.document_BQ[b, q]), int(rows.position_BQ[b, q])
            if document < 0:
                continue
            own, second_copy = (text.samples_BT[b] == document).nonzero()[:, 0], bool(rows.copy_BQ[b, q])
            t = int(own[0]) + place
            if bool(copy.hidden_BT[b, t]):  # what it reads: the mask, or the guess in its place
                assert int(rows.ids_BQ[b, q]) == (int(batch.guess_BT[b, t]) if second_copy else mask_id)
            elif not bool(text.filler_BT[b, t]):
                assert int(rows.ids_BQ[b, q]) == int(text.ids_BT[b, t])
            if int(rows.label_BQ[b, q]) < 0:
                continue
            t, label = t + shift, int(text.ids_BT[b, t + shift])
            assert label == int(rows.label_BQ[b, q])
            log_q_V = log_q[b, q]
            if not second_copy:
                unsure = int(log_q_V.argmax()) == label and float(log_q_V[label]) < torch.tensor(0.9).log()
                sums["hidden"] -= float(log_q_V[label]) * (3 if unsure else 1)
            elif second == "guesses" or int(batch.guess_BT[b, t]) != label:
                sums["second"] -= 0.5 * float(log_q_V[label])
            numbers["second" if second_copy else "hidden"] += 1
    assert {n: float(x) for n, x in terms.losses.items()} == pytest.approx(sums, rel=1e-6)
    assert counts == numbers
    if second == "guesses" and not module.objective.dual:  # every token of the answer
        assert numbers["second"] == int(text.supervised_BT.sum()) > numbers["hidden"]
    else:
        assert second == "guesses" or numbers["second"] == numbers["hidden"]
    known = {n: float(terms.metrics[n][1]) for n in ("repaired", "kept")}
    assert min(known.values()) > 0


def test_a_second_round_reads_the_first() -> None:
    """On a trajectory what was decided stays decided, and what was right with it shown is added."""
    module = trained(objective_of("d2f"), OnPolicyConfig("trajectory"), dtype=torch.float64)
    batch = half_known(module, two_rows())
    once, mask_id = module.rewrite(batch, 0.0).guess_BT, module.passes.adapters.mask_id
    text, (copy,) = module._hidden(batch)
    shown = torch.where(copy.hidden_BT, once, text.ids_BT)
    with torch.no_grad():
        rows = module._rows(text, [replace(copy, guess_BT=once)])
        assert torch.equal(rows.ids_BQ, shown.gather(1, rows.token_BQ))
        logits = module.passes.target.head(module.passes.run(text, rows)[1])
    logits[..., module.passes.target.banned_ids] = float("-inf")
    wanted = once.clone()
    for b, q in (rows.label_BQ >= 0).nonzero().tolist():
        if int(logits[b, q].argmax()) == int(rows.label_BQ[b, q]):
            wanted[b, int(rows.token_BQ[b, q]) + 1] = rows.label_BQ[b, q]
    module.config = OnPolicyConfig("trajectory", rounds=2)
    assert torch.equal(module.rewrite(batch, 0.0).guess_BT, wanted)
    assert bool(((once != mask_id) <= (wanted == once)).all())


def test_no_gradient_flows_through_the_guesses() -> None:
    """A batch that the loop has rewritten and one that the loss rewrites itself give the same gradients to the bit; the
    guesses leave none behind, whatever mode they are made in."""
    module = trained(objective_of("fast_dllm_v2"), OnPolicyConfig())
    batch = two_rows()
    fresh = module.rewrite(batch, 0.0)
    assert fresh.guess_BT.dtype == torch.int64 and all(p.grad is None for p in module.parameters())

    def grads(one: Batch) -> list[Tensor]:
        module.zero_grad()
        sum(module(one, OUT, 0.0).losses.values()).backward()
        return [p.grad.clone() for p in module.parameters()]

    assert all(torch.equal(a, b) for a, b in zip(grads(fresh), grads(batch), strict=True))


def test_guesses_take_no_chance() -> None:
    """They belong to (seed, epoch, sample): packing and batch do not matter, the epoch does, dropout is off."""
    module = trained(objective_of("fast_dllm_v2"), OnPolicyConfig(), dtype=torch.float64)
    for layer in module.passes.adapters.layers.values():
        layer.lora_dropout["default"] = torch.nn.Dropout(0.5)
    module.train()
    a, b, c, d = samples()

    def by_place(packed: list[list[Any]], epoch: int = 1) -> dict[tuple[int, int], int]:
        batch = make_batch(packed, 42, 7, epoch)
        text, (copy,) = module._hidden(batch)
        guess_BT = module.rewrite(batch, 0.0).guess_BT
        hidden = (copy.hidden_BT & ~(text.filler_BT & ~text.supervised_BT)).nonzero().tolist()
        return {(int(text.samples_BT[r, t]), int(text.positions_BT[r, t])): int(guess_BT[r, t]) for r, t in hidden}

    state = torch.get_rng_state()
    found = by_place([[a, b], [c, d]])
    assert len(found) > 10 and found == by_place([[d, b, c, a]]) == by_place([[c], [a], [b, d]])
    assert found.keys() != by_place([[a, b], [c, d]], epoch=2).keys()
    assert torch.equal(state, torch.get_rng_state())
    assert module.passes.adapters.training and all(
        layer.lora_dropout.training for layer in module.passes.adapters.layers.values()
    )


def test_settings_that_make_no_sense_are_refused() -> None:
    for wrong in ({"level": 0.0}, {"level": 1.5}, {"rounds": 0}, {"weight": -1.0}, {"redundant": -1.0}):
        with pytest.raises(ValueError, match="on_policy: level must lie in"):
            OnPolicyConfig(**wrong)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"on_policy\.second must be one of guesses, trajectory"):
        OnPolicyConfig("right")  # type: ignore[arg-type]
