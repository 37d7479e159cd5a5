"""DFlash: what a block may see, what it predicts, how public trainers' readings differ, and JetSpec mode.

pytest tests/test_dflash.py
"""

import dataclasses
import math
from typing import Any

import pytest
import torch
from batches import random_row, spied_loss
from torch import Tensor

from draftsmith.models import METHODS, dflash
from draftsmith.models.dflash import DFlashConfig, block_slots, block_states, default_taps
from draftsmith.models.drafter import Batch, Commit, Prefill
from draftsmith.models.slots import anchored, real
from draftsmith.models.target import Target, live_states

N = 14


def make(target: Target, method: str = "dflash", draft_ids: Tensor | None = None, seed: int = 3, **options: Any) -> Any:
    """Random weights everywhere, so that no part is idle."""
    torch.manual_seed(seed)
    options = {"layers": 2, "block": 4, "anchors": None} | options
    drafter = METHODS[method](METHODS[method].Config(**options), target.facts, draft_ids)
    drafter.init_from_target(target)
    with torch.no_grad():
        for parameter in drafter.parameters():
            parameter += 0.2 * torch.randn_like(parameter) * parameter.shape[-1] ** -0.5
    return drafter


# What a block sees


@pytest.mark.parametrize("method", ["dflash", "dspark"])
@pytest.mark.parametrize("causal", [False, True])
def test_nothing_from_the_anchor_on_leaks_into_its_block(method: str, causal: bool, target: Target) -> None:
    """CASES B19: overlapping blocks of 4 at anchors 3 and 5. Noise in the target's states at and after a block's anchor,
    and in all tokens after it, changes none of its states, to the bit; noise before it, or in its token, does."""
    batch, anchors = random_row(list(range(N))), (3, 5)
    drafter = make(target, method, causal=causal).eval()
    out = live_states(target, drafter, batch)
    chosen_BT = torch.zeros(1, N, dtype=torch.bool)
    chosen_BT[0, list(anchors)] = True

    def block(ids_BT: Tensor, taps_BTPD: Tensor, anchor: int) -> Tensor:
        noisy = dataclasses.replace(batch, ids_BT=ids_BT)
        slots = anchored(noisy, chosen_BT, range(4), shift=int(drafter.config.sample_from_anchor))
        hidden = block_states(drafter, slots, real(slots), noisy, dataclasses.replace(out, taps_BTPD=taps_BTPD))
        return hidden[0, slots.group_BQ[0] == anchor].detach()

    assert out.taps_BTPD is not None
    for anchor in anchors:
        want = block(batch.ids_BT, out.taps_BTPD, anchor)
        ids, taps = batch.ids_BT.clone(), out.taps_BTPD.clone()
        ids[0, anchor + 1 :] = torch.randint(3, 250, (N - anchor - 1,))
        taps[0, anchor:] = 100 * torch.randn_like(taps[0, anchor:])
        assert float((block(ids, taps, anchor) - want).abs().max()) == 0.0
        taps = out.taps_BTPD.clone()
        taps[0, anchor - 1] += 1.0
        assert bool((block(batch.ids_BT, taps, anchor) != want).any(-1).all())
        ids = batch.ids_BT.clone()
        ids[0, anchor] = 250
        assert bool((block(ids, out.taps_BTPD, anchor) != want).any(-1).all())


def test_a_block_does_not_see_other_documents(target: Target, monkeypatch: Any) -> None:
    batch = random_row(list(range(N)))
    batch.samples_BT[0, 6:] = 9
    batch.positions_BT[0, 6:] = torch.arange(N - 6)
    drafter = make(target).eval()
    out = live_states(target, drafter, batch)
    _, one, slots = spied_loss(drafter, batch, out, monkeypatch)
    assert out.taps_BTPD is not None
    out.taps_BTPD[0, :6] = 100.0
    _, two, _ = spied_loss(drafter, batch, out, monkeypatch)
    second_R = slots.document_BQ.flatten()[slots.flat_R] == 9
    assert torch.equal(one[second_R], two[second_R]) and bool((one[~second_R] != two[~second_R]).any(-1).all())


def test_causal_blocks_do_not_depend_on_their_length(target: Target) -> None:
    """JetSpec mode: the same weights drafting 3 tokens say of each what they say drafting 5; a full block's differ."""
    batch = random_row([])
    for causal in (True, False):
        levels = []
        for block in (4, 6):
            drafter = make(target, block=block, causal=causal).eval()
            out = live_states(target, drafter, batch)
            commit = Commit(batch.ids_BT, torch.tensor([N]), batch.positions_BT, torch.tensor([5]), out.taps_BTPD, None)
            _, level = drafter.start(drafter.init(Prefill(1, 30, torch.device("cpu"), torch.float32)), commit)
            levels.append(level.logits_BNW[0, :3])
        assert torch.allclose(levels[0], levels[1], atol=1e-5) == causal


def test_a_draft_by_hand(target: Target) -> None:
    """The whole forward pass of one block, written out with plain operations from the tensors of the export's names."""
    drafter = make(target, kv_heads=2, taps=(1, 3)).eval()
    w = drafter.state_dict()
    batch = random_row([])
    out = live_states(target, drafter, batch)
    known = 9  # tokens before the anchor
    commit = Commit(
        batch.ids_BT[:, :known], torch.tensor([known]), batch.positions_BT[:, :known], batch.ids_BT[:, known],
        out.taps_BTPD[:, :known],
    )  # fmt: skip
    _, level = drafter.start(drafter.init(Prefill(1, 30, torch.device("cpu"), torch.float32)), commit)

    def norm(x: Tensor, name: str) -> Tensor:
        return x * (x.square().mean(-1, keepdim=True) + target.facts.norm_eps).rsqrt() * w[f"{name}.weight"]

    def turn(x: Tensor, positions: list[int]) -> Tensor:  # [T, H, 12]
        angle = torch.tensor(positions).float()[:, None] * 10000.0 ** (-torch.arange(0, 12, 2) / 12)
        cos, sin = angle.cos()[:, None].repeat(1, 1, 2), angle.sin()[:, None].repeat(1, 1, 2)
        return x * cos + torch.cat([-x[..., 6:], x[..., :6]], -1) * sin

    context = norm(out.taps_BTPD[0, :known].flatten(1) @ w["fc.weight"].T, "hidden_norm")
    ids = torch.tensor([int(batch.ids_BT[0, known]), 0, 0, 0])
    x, before, own = target.embed(ids), list(range(known)), list(range(known, known + 4))
    for i in range(2):
        name = f"layers.{i}.self_attn"
        h = norm(x, f"layers.{i}.input_layernorm")
        both = torch.cat([context, h])
        q = turn(norm((h @ w[f"{name}.q_proj.weight"].T).view(4, 4, 12), f"{name}.q_norm"), own)
        k = turn(norm((both @ w[f"{name}.k_proj.weight"].T).view(-1, 2, 12), f"{name}.k_norm"), before + own)
        v = (both @ w[f"{name}.v_proj.weight"].T).view(-1, 2, 12)
        heads = [(q[:, j] @ k[:, j // 2].T / 12**0.5).softmax(-1) @ v[:, j // 2] for j in range(4)]
        x = x + torch.cat(heads, 1) @ w[f"{name}.o_proj.weight"].T
        h = norm(x, f"layers.{i}.post_attention_layernorm")
        gate = torch.nn.functional.silu(h @ w[f"layers.{i}.mlp.gate_proj.weight"].T)
        x = x + (gate * (h @ w[f"layers.{i}.mlp.up_proj.weight"].T)) @ w[f"layers.{i}.mlp.down_proj.weight"].T
    want = norm(x, "norm")[1:] @ target.head_weight.T
    torch.testing.assert_close(level.logits_BNW[0], want, atol=1e-4, rtol=1e-4)


# What it predicts


@pytest.mark.parametrize(("anchor_predicts", "k"), [(False, 3), (True, 4)])
def test_slots_labels_and_teachers(anchor_predicts: bool, k: int, target: Target, monkeypatch: Any) -> None:
    """Assistant tokens at 5..9 of 14: blocks at 5..8; slot k of the paper predicts token a + k (with the anchor's slot:
    a + k + 1), its teacher is the target one token before that."""
    batch = random_row([5, 6, 7, 8, 9])
    drafter = make(target, sample_from_anchor=anchor_predicts)
    assert drafter.parallel == drafter.max_depth == k
    out = live_states(target, drafter, batch)
    terms, logits, slots = spied_loss(drafter, batch, out, monkeypatch)
    found = sorted(
        (
            int(slots.anchor_BQ[0, r]),
            int(slots.position_BQ[0, r]),
            int(slots.label_BQ[0, r]),
            int(slots.drafted_BQ[0, r]),
        )
        for r in slots.flat_R
    )
    shift = int(anchor_predicts)
    want = [(a, a + d - shift, a + d, d) for a in (5, 6, 7, 8) for d in range(1, k + 1) if a + d <= 9]
    assert found == want and len(logits) == len(want)
    assert drafter.denominators(batch, 0.0)["slots"] == pytest.approx(sum(math.exp(-(d - 1) / 7) for *_, d in want))
    log_q = logits.log_softmax(-1)
    by_hand = sum(
        -math.exp(-(int(slots.drafted_BQ[0, r]) - 1) / 7) * float(log_q[i, batch.ids_BT[0, slots.label_BQ[0, r]]])
        for i, r in enumerate(slots.flat_R)
    )
    assert float(terms.losses["slots"].detach()) == pytest.approx(by_hand, rel=1e-5)
    soft = make(target, sample_from_anchor=anchor_predicts, objective="kl", weight="uniform")
    terms, logits, slots = spied_loss(soft, batch, out, monkeypatch)
    before = slots.label_BQ[0, slots.flat_R] - 1
    p = target.head(out.last_hidden_BTD[0, before]).log_softmax(-1)
    by_hand = (p.exp() * (p - logits.log_softmax(-1))).sum()
    torch.testing.assert_close(terms.losses["slots"].detach(), by_hand, rtol=1e-5, atol=1e-5)


def test_training_takes_some_anchors_and_evaluation_more(target: Target) -> None:
    batch = random_row(list(range(2, N)))
    drafter = make(target, anchors=3)
    counts = [int(block_slots(drafter, batch)[0].group_BQ.unique().numel())]
    drafter.eval()
    counts.append(int(block_slots(drafter, batch)[0].group_BQ.unique().numel()))
    assert counts == [3, 11]
    drafts = [
        set(block_slots(drafter.train(), dataclasses.replace(batch, epoch=e))[0].group_BQ[0].tolist()) for e in range(6)
    ]
    assert len({tuple(sorted(d)) for d in drafts}) > 1


def test_variable_prefix_shows_true_tokens_in_training_alone(target: Target, monkeypatch: Any) -> None:
    batch = random_row(list(range(N)))
    drafter = make(target, variable_prefix=True, block=5)
    slots, shown_BQ = block_slots(drafter, batch)
    shown = shown_BQ.view(-1, 5).sum(1)
    assert shown.min() >= 1 and shown.max() <= 4 and len(shown.unique()) > 1
    assert bool((shown_BQ.view(-1, 5).int().diff(dim=1) <= 0).all())  # a prefix
    trained = (slots.weight_BQ > 0).view(-1, 5)
    assert not bool((trained & shown_BQ.view(-1, 5)).any())
    first = slots.drafted_BQ.view(-1, 5)[torch.arange(len(shown)), shown.clamp(max=4)]
    assert bool((first == 1).all())  # decay starts behind the prefix
    drafter.eval()
    plain = make(target, block=5).eval()
    out = live_states(target, drafter, batch)
    assert torch.equal(*(d(batch, out, 0.0).losses["slots"].detach() for d in (drafter, plain)))


# Where public trainers differ


def sums(target: Target, batch: Batch, **options: Any) -> tuple[float, float, Any]:
    drafter = make(target, **options)
    terms = drafter(batch, live_states(target, drafter, batch), 0.0)
    return (
        float(terms.losses["slots"].detach()),
        drafter.denominators(batch, 0.0)["slots"],
        block_slots(drafter, batch)[0],
    )


def anchors_of(slots: Any) -> list[int]:
    trained_Q = slots.weight_BQ[0] > 0
    return sorted(set(slots.anchor_BQ[0][trained_Q].tolist()))


def test_legal_anchors(target: Target) -> None:
    """A short answer at the end of its document, 10..13 of 14, blocks of 4 slots."""
    batch = random_row([10, 11, 12, 13])
    assert anchors_of(sums(target, batch, legal="pair")[2]) == [10, 11, 12]
    assert anchors_of(sums(target, batch, legal="full_block")[2]) == [10]  # short answers count next to nothing
    assert anchors_of(sums(target, batch, legal="supervised")[2]) == []


def test_cut_at_the_first_gap_or_per_label(target: Target) -> None:
    """Supervised 5, 6, then a gap at 7, then 8: the block at 5 predicts 6, and with `mask` 8 as well."""
    batch = random_row([5, 6, 8])
    run, mask = (sums(target, batch, cut=cut)[2] for cut in ("run", "mask"))
    assert run.label_BQ[0, run.flat_R].tolist() == [6]
    assert mask.label_BQ[0, mask.flat_R].tolist() == [6, 8]


def test_denominators(target: Target) -> None:
    """4 blocks with 9 slots: under `weights` gamma leaves the scale of the loss alone, under the others it does not."""
    batch = random_row([5, 6, 7, 8, 9])
    for name, count in (("slots", 9.0), ("blocks", 4.0)):
        assert [sums(target, batch, denominator=name, gamma=gamma)[1] for gamma in (1.0, 100.0)] == [count, count]
    small, large = (sums(target, batch, gamma=gamma) for gamma in (1.0, 100.0))
    assert small[1] == pytest.approx(4 + 3 * math.exp(-1) + 2 * math.exp(-2)) and large[1] == pytest.approx(9, rel=0.02)
    assert small[0] < 0.75 * large[0] and small[0] / small[1] == pytest.approx(large[0] / large[1], rel=0.3)


def test_labels_and_distances(target: Target) -> None:
    """Hard and soft labels differ; L1 is twice the total variation."""
    batch = random_row(list(range(3, 12)))
    found = {name: sums(target, batch, objective=name)[0] for name in ("ce", "kl", "l1", "tv")}
    assert found["l1"] == pytest.approx(2 * found["tv"], rel=1e-5) and found["ce"] != pytest.approx(
        found["kl"], rel=0.01
    )


def test_dpace_weights_by_hand(target: Target, monkeypatch: Any) -> None:
    batch = random_row([5, 6, 7, 8, 9])
    drafter = make(target, weight="dpace", denominator="blocks")
    terms, logits, slots = spied_loss(drafter, batch, live_states(target, drafter, batch), monkeypatch)
    log_q = logits.log_softmax(-1)[torch.arange(9), batch.ids_BT[0, slots.label_BQ[0, slots.flat_R]]]
    groups = slots.group_BQ[0, slots.flat_R].tolist()
    total = 0.0
    for group in set(groups):
        rows = [i for i, g in enumerate(groups) if g == group]
        survive, reach = 1.0, []
        for i in rows:
            survive *= 0.5 * math.exp(float(log_q[i])) + 0.5
            reach.append(survive)
        total += sum(-float(log_q[i]) * sum(reach[j:]) for j, i in enumerate(rows))
    assert float(terms.losses["slots"].detach()) == pytest.approx(total, rel=1e-5)
    assert drafter.denominators(batch, 0.0)["slots"] == 4.0


# Settings


@pytest.mark.parametrize("layers", [1, 2, 3, 4, 6, 7, 30, 36, 80])
@pytest.mark.parametrize("count", [1, 2, 5])
def test_default_taps(layers: int, count: int) -> None:
    taps = default_taps(layers, count)
    assert list(taps) == sorted(set(taps)) and taps[0] >= 1 and taps[-1] <= layers
    assert taps[-1] < layers or layers == 1
    assert len(taps) == min(count, max(1, layers - 1))
    if (layers, count) == (36, 5):
        assert taps == (2, 10, 18, 26, 34)  # z-lab's 1, 9, 17, 25, 33


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"block": 1}, "at least one depth, got 0"),
        ({"layers": 0}, "layers"),
        ({"anchors": 0}, "anchors"),
        ({"gamma": 0.0}, "gamma"),
        ({"weight": "dpace"}, "set denominator to slots or blocks"),
        ({"weight": "flat"}, "exp, dpace, uniform, got 'flat'"),
        ({"legal": "all"}, "pair, supervised, full_block, got 'all'"),
        ({"cut": "none"}, "run, mask"),
        ({"denominator": "mean"}, "weights, slots, blocks"),
        ({"taps": (3, 1)}, "ascending"),
        ({"taps": (1, 9)}, r"0\.\.4"),
        ({"variable_prefix": True, "block": 2}, "at least 3"),
        ({"mask_id": 256}, r"0\.\.255"),
        ({"mask_id": 2}, "ends answers"),
        ({"objective": "feature_smooth_l1"}, "dflash has none"),
    ],
)
def test_settings_refused(options: dict[str, Any], words: str, target: Target) -> None:
    with pytest.raises(ValueError, match=words):
        make(target, **options)


def test_an_unbound_drafter_and_deeper_levels_are_refused(target: Target) -> None:
    batch = random_row([])
    commit = Commit(batch.ids_BT, torch.tensor([N]), batch.positions_BT, torch.tensor([5]), torch.randn(1, N, 3, 48))
    drafter = dflash.DFlash(DFlashConfig(layers=3, block=4, mask_id=0), target.facts)
    with pytest.raises(ValueError, match="bind"):
        drafter.start(drafter.init(Prefill(1, 30, torch.device("cpu"), torch.float32)), commit)
    with pytest.raises(ValueError, match="3 tokens"):
        drafter.extend(drafter.init(Prefill(1, 30, torch.device("cpu"), torch.float32)), commit.ids_BT, commit.ids_BT)
