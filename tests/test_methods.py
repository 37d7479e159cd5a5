"""The methods: which tokens they are trained on, how losses add up, what every weight is for, what is refused.

pytest tests/test_methods.py
"""

import dataclasses
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from batches import one_row
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from draftsmith.kernels import linear_loss
from draftsmith.losses import distill
from draftsmith.losses.distill import Logits, formed
from draftsmith.models import METHODS, supervision
from draftsmith.models import slots as slot_rules
from draftsmith.models.drafter import Batch, Commit, Prefill, TargetOut
from draftsmith.models.eagle3 import default_taps
from draftsmith.models.layers import Rotary, keyed_uniform
from draftsmith.models.supervision import Rows, Scorer
from draftsmith.models.target import Target, live_states

DEPTHS = {
    "medusa": "heads", "hydra": "heads", "eagle": "steps", "eagle3": "steps", "peagle": "depths", "draft_model": "depths",
    "pard": "depths", "dflash": "block", "dspark": "block", "falcon": "block", "dual_view": "block", "prompt_tokens": "tokens",
}  # fmt: skip
OPTIONS: dict[str, dict[str, Any]] = {  # every slot, every epoch
    "peagle": {"layers": 2, "ratio": 1.0},
    "pard": {"ratio": 1.0, "objective": "kl"},
    "dflash": {"layers": 2, "anchors": None, "sample_from_anchor": True, "objective": "kl", "denominator": "slots"},
    "dspark": {
        "layers": 2,
        "anchors": None,
        "rank": 8,
        "confidence": False,
        "denominator": "slots",
    },  # tests/test_dspark.py has that one
    "falcon": {"noise": 0.0, "glance": 0.0},
    "dual_view": {"anchors": None, "rank": 8, "depth_weight": 1.0},
    "prompt_tokens": {"variant": "ppd", "points": 100, "depth_weight": 1.0},
}
TEXT = ("draft_model",)  # read the text as it stands: deeper pairs are those of depth 1, and no loss of their own
INSIDE = ("dual_view", "prompt_tokens")  # draft through the target itself: tests/test_slot_methods.py
SLOTTED = [name for name in METHODS if hasattr(sys.modules[METHODS[name].__module__], "score")]  # trained on slots


def make(method: str, target: Target, draft_ids: Tensor | None = None, depths: int = 3, **options: Any) -> Any:
    torch.manual_seed(3)
    options = {DEPTHS[method]: depths} | OPTIONS.get(method, {}) | options
    drafter = METHODS[method](METHODS[method].Config(**options), target.facts, draft_ids)
    drafter.init_from_target(target)
    return drafter


def total_loss(drafter: Any, batches: list[Batch], target: Target) -> Tensor:
    """The loss of one optimiser step over several micro-batches, as the training loop normalises it."""
    counts: dict[str, float] = {}
    for batch in batches:
        for term, count in drafter.denominators(batch, 0.0).items():
            counts[term] = counts.get(term, 0.0) + count
    losses = [drafter(batch, live_states(target, drafter, batch), 0.0).losses for batch in batches]
    return sum((loss[term] / counts[term] for loss in losses for term in loss if counts[term]), torch.zeros(()))


def gradients(drafter: Any, batches: list[Batch], target: Target) -> tuple[Tensor, dict[str, Tensor]]:
    drafter.zero_grad(set_to_none=True)
    loss = total_loss(drafter, batches, target)
    loss.backward()
    return loss.detach(), {name: p.grad for name, p in drafter.named_parameters()}


def test_every_method_is_covered() -> None:
    assert set(DEPTHS) == set(METHODS)
    assert all(METHODS[name].method == name for name in METHODS)


def scored_pairs(
    drafter: Any, batch: Batch, out: TargetOut, monkeypatch: Any
) -> dict[int, list[tuple[int, int, Tensor]]]:
    """By depth: (state row, label's index, teacher's logits) of what the loss scores, in ascending order."""
    teachers: list[Tensor] = []
    places: list[tuple[list[int], list[int], list[int]]] = []  # depths, states, labels of each call
    module = sys.modules[type(drafter).__module__]

    def spy(place: Any) -> None:
        fused = place.fused_score

        def watch(logits: Logits, teacher: Any, *rest: Any) -> Any:
            teachers.append(teacher.logits())
            return fused(logits, teacher, *rest)

        monkeypatch.setattr(place, "fused_score", watch)

    def of_depth(self: Scorer, depth: int, logits_RW: Logits, feature_RD: Tensor | None = None) -> None:
        states_R = self.rows.flat_R[self.rows.pairs[depth - 1]]
        places.append(([depth] * len(states_R), states_R.tolist(), (states_R + 1 + depth).tolist()))
        add(self, depth, logits_RW, feature_RD)

    def of_slots(logits_RW: Logits, slots: Any, *rest: Any, **options: Any) -> Any:
        label_R, drafted_R = (x.flatten()[slots.flat_R] for x in (slots.label_BQ, slots.drafted_BQ))
        places.append((drafted_R.tolist(), (label_R - drafted_R - 1).tolist(), label_R.tolist()))
        return score(logits_RW, slots, *rest, **options)

    add, score = Scorer.add, getattr(module, "score", None)
    spy(supervision)
    spy(slot_rules)
    monkeypatch.setattr(Scorer, "add", of_depth)
    if score is not None:
        monkeypatch.setattr(module, "score", of_slots)
    drafter(batch, out, 0.0)
    found: dict[int, list[tuple[int, int, Tensor]]] = {}
    for (depths, states_, labels), teacher_RV in zip(places, teachers, strict=True):
        for depth, state, label, row in zip(depths, states_, labels, teacher_RV, strict=True):
            found.setdefault(depth, []).append((state, label, row))
    return {depth: sorted(found[depth], key=lambda pair: pair[0]) for depth in sorted(found)}


@pytest.mark.parametrize("method", DEPTHS)
def test_pairs_of_rows_and_labels(method: str, target: Target, monkeypatch: Any) -> None:
    """ids 10..21, assistant tokens at 5..8 (8 ends the turn). Depth 1 is trained on labels 6, 7, 8, the first from the
    state of the last prompt token (4); 5 is every method's anchor and nobody's label; 9 and later never."""
    batch = one_row(list(range(10, 22)), [5, 6, 7, 8])
    drafter = make(method, target)
    out = live_states(target, drafter, batch)
    pairs = scored_pairs(drafter, batch, out, monkeypatch)
    counts = {"slots": 6.0} if method in SLOTTED else {"depth_1": 3.0, "depth_2": 2.0, "depth_3": 1.0}
    labels = {1: [6, 7, 8], 2: [7, 8], 3: [8]}
    if method in TEXT:
        counts, labels = {"depth_1": 3.0}, {1: [6, 7, 8]}
    assert {depth: [label for _, label, _ in pairs[depth]] for depth in pairs} == labels
    for depth in pairs:
        assert [state for state, _, _ in pairs[depth]] == [label - 1 - depth for _, label, _ in pairs[depth]]
        for _, label, teacher_V in pairs[depth]:  # the teacher of a label is the target after the token before it
            torch.testing.assert_close(teacher_V, target.head(out.last_hidden_BTD[0, label - 1]))
    assert drafter.denominators(batch, 0.0) == counts


@pytest.mark.parametrize("method", DEPTHS)
def test_oracle_logits_cost_nothing_and_every_weight_learns(method: str, target: Target, monkeypatch: Any) -> None:
    """ids 0..9, all supervised: head i (0-based) at position t has label t + 2 + i, and no weight is without gradient."""
    batch = one_row(list(range(10)), list(range(10)))
    drafter = make(method, target, objective="ce")
    add, module = Scorer.add, sys.modules[type(drafter).__module__]
    score = getattr(module, "score", None)

    def oracle(self: Scorer, depth: int, logits_RW: Logits, feature_RD: Tensor | None = None) -> None:
        t_R = self.rows.flat_R[self.rows.pairs[depth - 1]]
        zeros_RW = formed(logits_RW).detach() * 0
        oracle_RW = zeros_RW + 60.0 * F.one_hot(t_R + 1 + depth, zeros_RW.shape[-1])
        add(self, depth, oracle_RW.requires_grad_(), feature_RD)

    def slot_oracle(logits_RW: Logits, slots: Any, *rest: Any, **options: Any) -> Any:
        labels_R = slots.label_BQ.flatten()[slots.flat_R]
        zeros_RW = formed(logits_RW).detach() * 0
        oracle_RW = zeros_RW + 60.0 * F.one_hot(labels_R, zeros_RW.shape[-1])
        assert score is not None
        return score(oracle_RW.requires_grad_(), slots, *rest, **options)

    with monkeypatch.context() as patch:
        patch.setattr(Scorer, "add", oracle)
        if method in SLOTTED:
            patch.setattr(module, "score", slot_oracle)
        losses = drafter(batch, live_states(target, drafter, batch), 0.0).losses
    terms = ["slots"] if method in SLOTTED else [f"depth_{d}" for d in ((1,) if method in TEXT else (1, 2, 3))]
    assert {name: float(loss.detach()) for name, loss in losses.items()} == dict.fromkeys(terms, 0.0)
    _, grads = gradients(drafter, [batch], target)
    # Low-rank differences start at zero: their first halves learn from the second step on.
    assert all(grad is not None and (float(grad.norm()) > 0 or ".down." in name) for name, grad in grads.items())
    for depth, term in enumerate(terms, 1):  # and each depth by itself reaches the weights that are its own
        drafter.zero_grad(set_to_none=True)
        drafter(batch, live_states(target, drafter, batch), 0.0).losses[term].backward()
        own = [p for n, p in drafter.named_parameters() if n.startswith(f"lm_heads.{depth - 1}.")]
        assert all(p.grad is not None and float(p.grad.norm()) > 0 for p in own)


@pytest.mark.parametrize("method", DEPTHS)
def test_padding_and_prompt_length_change_nothing(method: str, tiny: Callable[..., Target]) -> None:
    """One document alone, with unsupervised tokens behind it, padded to 512, and packed behind another document.

    In float64, so that the bound of 1e-6 cannot be met by luck or missed by rounding.
    """
    torch.manual_seed(1)
    target = tiny(dtype=torch.float64)
    ids = torch.randint(3, 250, (20,)).tolist()
    drafter = make(method, target, torch.arange(0, 250, 2)).double()
    supervised = list(range(11, 19))
    alone = one_row(ids, supervised)
    longer = one_row(ids + torch.randint(3, 250, (100,)).tolist(), supervised)
    padded = one_row(ids, supervised, pad=492)
    other = one_row(torch.randint(3, 250, (30,)).tolist(), [], sample=9)
    packed = Batch(*(torch.cat([getattr(b, f.name) for b in (other, alone)], 1) for f in dataclasses.fields(Batch)[:4]))
    if method == "eagle":
        drafter.eval()  # its noise is scaled by the document's length, which `longer` changes
    loss, grads = gradients(drafter, [alone], target)
    for batch in (longer, padded, packed):
        loss_too, grads_too = gradients(drafter, [batch], target)
        torch.testing.assert_close(loss_too, loss, atol=1e-6, rtol=1e-6)
        for name, grad in grads.items():
            torch.testing.assert_close(
                grads_too[name], grad, atol=1e-6, rtol=0, msg=lambda m, name=name: f"{name}: {m}"
            )


@pytest.mark.parametrize("method", DEPTHS)
def test_split_steps_have_the_gradient_of_the_whole(method: str, target: Target) -> None:
    """Two rows at once, as two micro-batches, and beside an empty one: the same loss and gradients."""
    torch.manual_seed(2)
    rows = [one_row(torch.randint(3, 250, (24,)).tolist(), list(range(a, 22)), sample=a) for a in (5, 15)]
    whole = Batch(*(torch.cat([getattr(b, f.name) for b in rows]) for f in dataclasses.fields(Batch)[:4]))
    empty = one_row([5] * 24, [])
    drafter = make(method, target).train()
    loss, grads = gradients(drafter, [whole], target)
    for batches in (rows, [*rows, empty]):
        loss_too, grads_too = gradients(drafter, batches, target)
        torch.testing.assert_close(loss_too, loss, atol=1e-5, rtol=1e-5)
        for name, grad in grads.items():
            torch.testing.assert_close(
                grads_too[name], grad, atol=1e-5, rtol=1e-5, msg=lambda m, name=name: f"{name}: {m}"
            )


@pytest.mark.parametrize("method", [name for name in DEPTHS if name not in INSIDE])
def test_empty_batch_gives_every_weight_a_gradient_of_zero(method: str, target: Target) -> None:
    """A process whose rows hold nothing to learn must still take part in the sum over processes."""
    drafter = make(method, target)
    batch = one_row([5] * 12, [])
    assert set(drafter.denominators(batch, 0.0).values()) == {0.0}
    terms = drafter(batch, live_states(target, drafter, batch), 0.0)
    sum(terms.losses.values(), torch.zeros(())).backward()
    assert all(p.grad is not None and not p.grad.any() for p in drafter.parameters())
    assert all(float(total) == 0 and float(count) == 0 for total, count in terms.metrics.values())


def greedy(target: Target, ids: list[int], new: int) -> list[int]:
    for _ in range(new):
        out = target.forward(torch.tensor([ids]), torch.arange(len(ids))[None])
        ids = [*ids, int(target.head(out.last_hidden_BTD[0, -1]).argmax())]
    return ids


@pytest.mark.parametrize("method", [name for name in DEPTHS if name not in INSIDE])
@pytest.mark.parametrize("reduced", [False, True])
def test_overfits_32_tokens_and_drafts_them(method: str, reduced: bool, target: Target) -> None:
    """Trained on one greedy answer of 32 tokens until every greedy match is 1.0; then drafting from the prompt on, the
    runtime's own way, every drafted token is right."""
    torch.manual_seed(4)
    ids = greedy(target, torch.randint(3, 250, (8,)).tolist(), 32)
    batch = one_row(ids, list(range(8, 40)))
    draft_ids = torch.tensor(sorted({*ids, *range(40, 80)})) if reduced else None
    options = {"noise": 0.0, "objective": "feature_smooth_l1 + kl"} if method == "eagle" else {}
    drafter = make(method, target, draft_ids, **options).train()
    out = live_states(target, drafter, batch)
    optimiser = torch.optim.Adam(drafter.parameters(), lr=5e-3)
    counts = drafter.denominators(batch, 0.0)
    for step in range(400):
        terms = drafter(batch, out, 0.0)
        pairs = [terms.metrics[f"accuracy_{d}"] for d in (1, 2, 3)]
        if all(float(hits) == float(count) > 0 for hits, count in pairs) and step > 20:
            break
        optimiser.zero_grad()
        sum((terms.losses[term] / counts[term] for term in counts), torch.zeros(())).backward()
        optimiser.step()
    assert [float(hits / count) for hits, count in pairs] == [1, 1, 1]
    drafter.eval()
    state, at, seen = drafter.init(Prefill(1, 60, torch.device("cpu"), torch.float32)), 0, 8
    while seen + 3 < 40:  # `seen` committed tokens, ids[seen] is the anchor, the draft is ids[seen + 1 : seen + 4]
        span = slice(at, seen)
        commit = Commit(
            batch.ids_BT[:, span],
            torch.tensor([seen - at]),
            batch.positions_BT[:, span],
            batch.ids_BT[:, seen],
            None if out.taps_BTPD is None else out.taps_BTPD[:, span],
            out.last_hidden_BTD[:, span],
        )
        state, level = drafter.start(state, commit)
        drafted: list[int] = []
        for k in range(3):
            asks = drafter.parallel == 1 or getattr(drafter, "sequential", False)
            row_W = level.logits_BNW[0, 0 if asks else k]
            best = int(row_W.argmax())
            drafted.append(best if drafter.d2t_W is None else int(drafter.d2t_W[best]))
            if asks and k < 2:
                state, level = drafter.extend(state, torch.tensor([[drafted[-1]]]), torch.tensor([[k]]))
        assert drafted == ids[seen + 1 : seen + 4]
        at, seen = seen, seen + 4


@pytest.mark.parametrize("method", DEPTHS)
def test_targets_outside_the_draft_vocabulary_are_rejections(method: str, target: Target) -> None:
    """A draft vocabulary without the target's own answer: accuracy 0, the mass outside reported, finite losses."""
    torch.manual_seed(4)
    ids = greedy(target, torch.randint(3, 250, (8,)).tolist(), 16)
    batch = one_row(ids, list(range(8, 24)))
    draft_ids = torch.tensor([i for i in range(256) if i not in ids])
    for oov in ("renormalise", "mask", "tail"):
        drafter = make(method, target, draft_ids, oov=oov)
        terms = drafter(batch, live_states(target, drafter, batch), 0.0)
        values = {name: float(total) / float(count) for name, (total, count) in terms.metrics.items()}
        assert values["accuracy_1"] == values["accuracy_2"] == values["run_length"] == 0
        assert values["lost_mass"] > 0.1 and values["accept_1"] <= 1 - values["lost_mass"] + 1e-5
        assert all(bool(loss.isfinite()) for loss in terms.losses.values())
        no_ce = oov == "mask" and "feature" not in (METHODS[method].Config().objective or "")
        assert (float(sum(terms.losses.values()).detach()) == 0) == no_ce


def test_run_length_counts_leading_hits_of_complete_rows(target: Target) -> None:
    """Depths right by plan: row i of 5 complete ones is right at depths 1..i; later hits after a miss do not count."""
    batch = one_row(list(range(3, 14)), list(range(1, 10)))
    drafter = make("medusa", target)
    out = live_states(target, drafter, batch)
    rows = Rows.of(batch, 3)
    scorer = Scorer(rows, batch, out, None, None, ((1.0, "kl"),), "renormalise", 0.5)
    right = torch.tensor([[1, 1, 1], [1, 1, 0], [1, 0, 1], [0, 1, 1], [0, 0, 0], [1, 1, 1]])  # rows of depth 3
    losses = []
    for depth in (1, 2, 3):
        teacher = scorer.teacher_of(depth)
        hit_R = F.pad(right[:, depth - 1], (0, len(teacher.index_R) - 6)).bool()
        top_R = torch.where(hit_R, teacher.top_R, (teacher.top_R + 1) % 256)
        logits_RW = 5.0 * F.one_hot(top_R, 256)
        scorer.add(depth, logits_RW)
        losses.append(supervision.fused_score(logits_RW, teacher, ((1.0, "kl"),), "renormalise")[0])
    terms = scorer.terms()
    assert [float(x) for x in terms.metrics["run_length"]] == [3 + 2 + 1 + 0 + 0 + 3, 6]
    assert [float(x) for x in terms.metrics["run_length_sq"]] == [9 + 4 + 1 + 0 + 0 + 9, 6]
    # Runs of the 8 rows: 3 2 1 0 0 3 0 0. Chains start at rows 0, 4 and 5.
    assert [float(x) for x in terms.metrics["tau"]] == [8, 3]
    assert float(terms.metrics["accuracy_2"][0]) == 4 and float(terms.metrics["accuracy_2"][1]) == 7
    for depth in (1, 2, 3):
        torch.testing.assert_close(terms.losses[f"depth_{depth}"], losses[depth - 1] * 0.5 ** (depth - 1))


@pytest.mark.parametrize("method", DEPTHS)
def test_no_logits_of_all_rows(method: str, target: Target, monkeypatch: Any) -> None:
    """Losses, gradients and metrics with and without a bank of the target's logits; without one, and with a linear head,
    no pass of training makes logits of the draft vocabulary for more than a chunk's rows."""
    torch.manual_seed(6)
    batch = one_row(torch.randint(3, 250, (24,)).tolist(), list(range(4, 24)))
    drafter = make(method, target, torch.arange(5, 202)).eval()
    out = live_states(target, drafter, batch)
    counts: list[int] = []

    class Watch(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            made = func(*args, **(kwargs or {}))
            all_ = [x for x in (made if isinstance(made, tuple | list) else [made]) if isinstance(x, Tensor)]
            shapes = (tuple(x.shape) for x in all_)  # (48, 197) is the head itself
            counts.extend(shape[0] for shape in shapes if shape[1:] == (197,) and shape[0] != 48)
            return made

    found = []
    for bank in (2**28, 0):
        monkeypatch.setattr(distill, "BANK_BYTES", bank)
        monkeypatch.setattr(linear_loss, "job_rows", lambda *_: 4)
        drafter.zero_grad(set_to_none=True)
        counts.clear()
        with Watch():
            terms = drafter(batch, out, 0.0)
            sum(terms.losses.values()).backward()
        found.append((terms, {name: p.grad for name, p in drafter.named_parameters()}))
    assert (max(counts) <= 4) == (method != "dspark")  # its slot head adds to logits
    (one, grads), (two, others) = found
    torch.testing.assert_close(one.losses, two.losses)
    torch.testing.assert_close(one.metrics, two.metrics)
    torch.testing.assert_close(grads, others, rtol=1e-4, atol=2e-5)


@pytest.mark.parametrize("method", DEPTHS)
def test_captured_log_z_and_top_give_the_same_loss(method: str, target: Target) -> None:
    torch.manual_seed(6)
    batch = one_row(torch.randint(3, 250, (20,)).tolist(), list(range(6, 20)))
    drafter = make(method, target, torch.arange(5, 200)).eval()
    live = live_states(target, drafter, batch)
    logits_BTV = target.head(live.last_hidden_BTD)
    kept = dataclasses.replace(live, log_z_BT=logits_BTV.logsumexp(-1), top_BT=logits_BTV.argmax(-1).int())
    one, two = drafter(batch, live, 0.0), drafter(batch, kept, 0.0)
    for term in one.losses:
        torch.testing.assert_close(one.losses[term], two.losses[term])
    assert {k: float(v[0]) for k, v in one.metrics.items()} == pytest.approx(
        {k: float(v[0]) for k, v in two.metrics.items()}
    )


@pytest.mark.parametrize("method", DEPTHS)
def test_bf16_autocast_with_fp32_masters(method: str, tiny: Callable[..., Target]) -> None:
    """The loss under bf16 autocast of a bf16 target stays near the fp32 one, gradients are fp32."""
    torch.manual_seed(7)
    batch = one_row(torch.randint(3, 250, (30,)).tolist(), list(range(6, 30)))
    full, half = tiny(), tiny(dtype=torch.bfloat16)
    drafter = make(method, full).eval()
    want = total_loss(drafter, [batch], full).detach()
    drafter.bind(half)
    with torch.autocast("cpu", torch.bfloat16):
        loss = total_loss(drafter, [batch], half)
    loss.backward()
    assert {p.grad.dtype for p in drafter.parameters()} == {torch.float32}
    torch.testing.assert_close(loss.detach(), want, rtol=0.1, atol=0.1)  # bf16 keeps 8 bits, over four tiny layers


def test_medusa_starts_from_the_targets_own_head(target: Target) -> None:
    """W = 0 and head rows copied: at first every head says SiLU(b) aside what the target says; blocks are not shared."""
    drafter = make("medusa", target, torch.arange(3, 90), layers=2)
    for blocks, head in zip(drafter.blocks, drafter.lm_heads, strict=True):
        assert not any(layer.weight.any() for layer in blocks.layers)
        assert torch.equal(head.weight, target.head_weight[3:90])
        for layer in blocks.layers:
            torch.nn.init.zeros_(layer.bias)
    assert len({p.data_ptr() for p in drafter.parameters()}) == len(list(drafter.parameters())) == 3 * (2 * 2 + 1)
    hidden = torch.randn(5, 48)
    said = formed(drafter.predict(2, hidden, TargetOut(head=target.head)))
    torch.testing.assert_close(said, target.head(hidden)[:, 3:90])
    shared = make("medusa", target, torch.arange(3, 90), head="shared")
    assert not any("lm_head" in name for name, _ in shared.named_parameters())


def test_hydra_starts_from_the_targets_own_head(target: Target) -> None:
    drafter = make("hydra", target, layers=2, prefix=True)
    for head in drafter.heads:
        for layer in (head.mixer, *head.layers):
            torch.nn.init.zeros_(layer.bias)
    hidden, embeds = torch.randn(5, 48), torch.randn(5, 3, 48)
    for i in range(3):
        said = drafter.lm_heads[i](drafter.read(i, hidden, embeds))
        torch.testing.assert_close(said, target.head(hidden))
    torch.testing.assert_close(drafter.prefix.finish(hidden, torch.randn(5, 48)), hidden)


@pytest.mark.parametrize("family", ["llama", "gemma3_text"])
def test_eagle3_starts_from_the_targets_norm_and_head(family: str, tiny: Callable[..., Target]) -> None:
    target = tiny(family=family)
    drafter = make("eagle3", target, torch.arange(3, 90))
    stream = torch.randn(5, 48)
    got, want = drafter.lm_head(drafter.norm(stream)), target.head(target.norm(stream), drafter.d2t_W)
    torch.testing.assert_close(got, want, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("layers", [1, 2, 3, 4, 6, 7, 30, 80])
def test_default_taps(layers: int) -> None:
    taps = default_taps(layers)
    assert list(taps) == sorted(set(taps)) and taps[0] >= 0 and taps[-1] <= layers
    assert len(taps) == min(3, layers + 1)
    if layers >= 7:
        assert taps == (2, layers // 2, layers - 3)


@pytest.mark.parametrize(("width", "heads", "head_dim"), [(48, 4, 16), (40, 3, 16)])
@pytest.mark.parametrize("method", DEPTHS)
def test_head_size_is_read_not_computed(method: str, width: int, heads: int, head_dim: int, tiny: Any) -> None:
    """Two training steps and a save/load round trip for targets whose heads do not divide their width."""
    target = tiny(family="qwen3", width=width, heads=heads, kv_heads=heads, head_dim=head_dim)
    options = {"prefix": True} if method == "hydra" else {}
    drafter = make(method, target, **options)
    batch = one_row(list(range(10, 30)), list(range(6, 20)))
    optimiser = torch.optim.AdamW(drafter.parameters(), lr=1e-3)
    for _ in range(2):
        total_loss(drafter, [batch], target).backward()
        optimiser.step()
    again = make(method, target, **options)
    again.load_state_dict(drafter.state_dict())
    losses = [float(total_loss(d.eval(), [batch], target).detach()) for d in (drafter, again)]
    assert losses[0] == pytest.approx(losses[1], abs=1e-6)
    if method in ("eagle", "eagle3"):
        assert drafter.self_attn.q_proj.weight.shape[0] == heads * head_dim


ROPES: list[dict[str, Any]] = [
    {"rope_type": "default", "rope_theta": 5e6},
    {"rope_type": "linear", "rope_theta": 5e6, "factor": 2.0},
    {"rope_type": "yarn", "rope_theta": 5e6, "factor": 4.0, "original_max_position_embeddings": 64},
    {
        "rope_type": "llama3",
        "rope_theta": 5e6,
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 64,
    },
]


@pytest.mark.parametrize("rope", ROPES, ids=lambda r: r["rope_type"])
def test_rotary_table_is_the_targets(rope: dict[str, Any], tiny: Callable[..., Target]) -> None:
    target = tiny(rope=rope, max_positions=256)
    config = LlamaConfig(
        hidden_size=48, num_attention_heads=4, head_dim=12, max_position_embeddings=256, rope_parameters=dict(rope)
    )
    theirs = LlamaRotaryEmbedding(config)
    positions = torch.tensor([[0, 1, 63, 64, 200]])
    ours = make("eagle3", target).rotary
    for got, want in zip(ours(positions), theirs(torch.zeros(1, 5, 48), positions), strict=True):
        torch.testing.assert_close(got, want)
    assert ours.scale == theirs.attention_scaling


@pytest.mark.parametrize(
    ("rope", "words"),
    [
        ({"rope_type": "foo", "rope_theta": 1e4}, "'foo' is not supported"),
        ({"rope_type": "dynamic", "rope_theta": 1e4}, "'dynamic' is not supported"),
        ({"rope_theta": 1e4}, "None is not supported"),
        ({"rope_type": "default"}, "no rope_theta"),
    ],
)
def test_rotary_settings_refused(rope: dict[str, Any], words: str, target: Target) -> None:
    with pytest.raises(ValueError, match="rope") as error:
        Rotary(dataclasses.replace(target.facts, rope=rope))
    assert words in str(error.value)


def test_partial_rotation_is_not_inherited(target: Target) -> None:
    facts = dataclasses.replace(target.facts, rope={**target.facts.rope, "partial_rotary_factor": 0.5})
    assert Rotary(facts).inverse.shape == (6,)


def test_casting_a_drafter_leaves_its_rotary_table_alone(target: Target) -> None:
    drafter = make("eagle3", target)
    before = drafter.rotary.inverse.clone()
    assert torch.equal(drafter.to(torch.bfloat16).rotary.inverse, before)


@pytest.mark.parametrize(
    ("ids", "words"),
    [([3, 3, 4], "distinct"), ([4, 3], "ascending"), ([3, 256], "tokenizer"), ([-1, 3], "tokenizer"), ([], "distinct")],
)
def test_draft_vocabulary_refused(ids: list[int], words: str, target: Target) -> None:
    with pytest.raises(ValueError, match=words):
        make("eagle3", target, torch.tensor(ids, dtype=torch.int64))


@pytest.mark.parametrize(
    ("method", "options", "words"),
    [
        ("eagle3", {"objective": "0.9*kll"}, "nearest is 'kl'"),
        ("eagle3", {"steps": 0}, "at least one depth, got 0"),
        ("eagle3", {"depth_weight": 0.0}, "depth_weight"),
        ("eagle3", {"oov": "drop"}, "renormalise, mask, tail, got 'drop'"),
        ("eagle3", {"taps": (3, 1)}, "ascending"),
        ("eagle3", {"taps": (1, 9)}, r"0..4"),
        ("eagle3", {"fc_norm": True, "norm_before_fc": True}, "exclude"),
        ("eagle3", {"kv_heads": 3}, "4 query heads cannot share 3"),
        ("eagle3", {"objective": "kl + feature_smooth_l1"}, "eagle3 has none"),
        ("eagle", {"noise": -1.0}, "noise"),
        ("peagle", {"depths": 1}, "depths >= 2"),
        ("peagle", {"layers": 0}, "layers >= 1"),
        ("peagle", {"ratio": 0.0}, "ratio"),
        ("peagle", {"max_anchors": 0}, "max_anchors"),
        ("peagle", {"mask_id": 256}, "mask_id 256 is no id"),
        ("peagle", {"taps": (2, 2)}, "ascending"),
        ("peagle", {"fc_norm": True, "norm_before_fc": True}, "exclude"),
        ("falcon", {"rounds": 2, "glance": 0.4}, "set glance to 0"),
        ("falcon", {"glance": 1.5}, "glance"),
        ("falcon", {"noise": -1.0}, "noise"),
        ("falcon", {"anchors": 0}, "anchors"),
        ("dual_view", {"block": 0}, "at least one depth, got 0"),
        ("dual_view", {"rank": 0}, "rank"),
        ("dual_view", {"alpha": 0.0}, "alpha"),
        ("dual_view", {"objective": "feature_smooth_l1 + kl"}, "dual_view has none"),
        ("prompt_tokens", {"variant": "bitta"}, "bita, ppd, pass, got 'bitta'"),
        ("prompt_tokens", {"members": 0}, "members"),
        ("prompt_tokens", {"prefix": -1}, "prefix"),
        ("prompt_tokens", {"depth_weight": 1.5}, "depth_weight"),
        ("medusa", {"layers": 0}, "layers"),
        ("hydra", {"dropout": 1.0}, "dropout"),
    ],
)
def test_settings_refused(method: str, options: dict[str, Any], words: str, target: Target) -> None:
    with pytest.raises(ValueError, match=words):
        make(method, target, **options)


def test_drafting_before_bind_and_past_medusas_heads_is_refused(target: Target) -> None:
    batch = one_row(list(range(10, 30)), [])
    commit = Commit(batch.ids_BT, torch.tensor([20]), batch.positions_BT, torch.tensor([5]), torch.randn(1, 20, 3, 48))
    drafter = METHODS["eagle3"](METHODS["eagle3"].Config(), target.facts)
    with pytest.raises(ValueError, match="bind"):
        drafter.start(drafter.init(Prefill(1, 30, torch.device("cpu"), torch.float32)), commit)
    with pytest.raises(ValueError, match="3 heads"):
        make("medusa", target).extend(None, torch.tensor([[1]]), torch.tensor([[0]]))


def test_keyed_noise_depends_on_sample_and_position_alone() -> None:
    """The same draw wherever a document lies; uniform; other seeds, epochs, streams and samples differ."""
    alone = one_row(list(range(40)), [], sample=4)
    other = one_row(list(range(10)), [], sample=9)
    packed = Batch(*(torch.cat([getattr(b, f.name) for b in (other, alone)], 1) for f in dataclasses.fields(Batch)[:4]))
    drawn = keyed_uniform(alone, 100)
    assert torch.equal(keyed_uniform(packed, 100)[:, 10:], drawn)
    assert not torch.equal(keyed_uniform(packed, 100)[:, :10], drawn[:, :10])
    variants = [dataclasses.replace(alone, seed=1), dataclasses.replace(alone, epoch=1)]
    assert not any(torch.equal(keyed_uniform(v, 100), drawn) for v in variants)
    assert not torch.equal(keyed_uniform(alone, 100, stream=1), drawn)
    assert drawn.unique().numel() > 3500 and abs(float(drawn.mean()) - 0.5) < 0.02 and float(drawn.max()) < 1


def test_eagles_noise_is_scaled_by_the_document(target: Target) -> None:
    """A document of 40 tokens has its 512 / 40 however it is packed."""
    alone = one_row(list(range(40)), [], sample=4)
    other = one_row(list(range(10)), [], sample=9)
    packed = Batch(*(torch.cat([getattr(b, f.name) for b in (other, alone)], 1) for f in dataclasses.fields(Batch)[:4]))
    drafter = make("eagle", target, noise=0.5)
    noise = drafter.draw_noise(alone)
    assert torch.equal(drafter.draw_noise(packed)[:, 10:], noise)
    assert 0.95 * 0.25 * 512 / 40 < float(noise.abs().max()) <= 0.25 * 512 / 40


@pytest.mark.parametrize(("method", "flows"), [("eagle", False), ("eagle3", True)])
def test_gradients_through_earlier_steps(method: str, flows: bool, target: Target, monkeypatch: Any) -> None:
    """EAGLE-3 learns through its own earlier outputs; HASS back-propagates each pass on its own."""
    fed: list[bool] = []
    feed = METHODS[method].feed

    def spy(self: Any, hidden_RD: Tensor) -> Tensor:
        fed.append(hidden_RD.requires_grad)
        return feed(self, hidden_RD)

    monkeypatch.setattr(METHODS[method], "feed", spy)
    batch = one_row(list(range(10, 40)), list(range(30)))
    drafter = make(method, target)
    drafter(batch, live_states(target, drafter, batch), 0.0)
    assert fed == [flows, flows]


@pytest.mark.parametrize(("method", "options"), [("eagle", {"noise": 0.5}), ("hydra", {"dropout": 0.3, "layers": 2})])
def test_training_noise_is_reproducible_and_off_in_evaluation(method: str, options: Any, target: Target) -> None:
    batch = one_row(list(range(10, 40)), list(range(6, 30)))
    drafter = make(method, target, **options)
    noisy = [float(total_loss(drafter.train(), [batch], target).detach()) for _ in range(2)]
    other = float(total_loss(drafter, [dataclasses.replace(batch, epoch=1)], target).detach())
    quiet = float(total_loss(drafter.eval(), [batch], target).detach())
    assert noisy[0] == noisy[1] and len({noisy[0], other, quiet}) == 3


@pytest.mark.parametrize("method", ["eagle3", "eagle"])
def test_deep_share_trains_a_part_of_the_rows_with_the_same_logits(
    method: str, target: Target, monkeypatch: Any
) -> None:
    """Half of the rows beyond depth 1: the same logits there as when all are trained, counted by what was drawn."""
    batch = one_row(torch.randint(3, 250, (120,)).tolist(), list(range(20, 120)))
    seen: list[dict[tuple[int, int], Tensor]] = []
    add = Scorer.add

    def spy(self: Scorer, depth: int, logits_RW: Logits, feature_RD: Tensor | None = None) -> None:
        flat_R = self.rows.flat_R[self.rows.pairs[depth - 1]]
        seen[-1] |= {(depth, int(f)): row for f, row in zip(flat_R, formed(logits_RW).detach(), strict=True)}
        add(self, depth, logits_RW, feature_RD)

    monkeypatch.setattr(Scorer, "add", spy)
    for share in (1.0, 0.5):
        drafter = make(method, target, deep_share=share).eval()
        seen.append({})
        terms = drafter(batch, live_states(target, drafter, batch), 0.0)
        counts = drafter.denominators(batch, 0.0)
        assert all(sum(depth == d for depth, _ in seen[-1]) == counts[f"depth_{d}"] for d in (1, 2, 3))
        assert float(terms.metrics["accuracy_2"][1]) == counts["depth_2"]
    assert set(seen[1]) < set(seen[0]) and counts["depth_1"] == 99 and 30 < counts["depth_2"] < 70
    assert {f for d, f in seen[1] if d == 3} <= {f for d, f in seen[1] if d == 2}
    for pair, logits_W in seen[1].items():
        torch.testing.assert_close(logits_W, seen[0][pair], atol=1e-5, rtol=1e-5)
    later = dataclasses.replace(batch, epoch=1)
    assert not torch.equal(Rows.of(batch, 3, 0.5).pairs[1], Rows.of(later, 3, 0.5).pairs[1])


@pytest.mark.parametrize("family", ["llama", "qwen3", "gemma3_text"])
def test_mlp_from_the_targets_last_layer(family: str, tiny: Callable[..., Target]) -> None:
    """The drafter's norm and MLP compute what the target's own do."""
    target = tiny(family=family)
    drafter, last = make("eagle3", target, mlp_from_target=True), target.model.model.layers[-1]
    stream = torch.randn(5, 48)
    norm = last.pre_feedforward_layernorm if family == "gemma3_text" else last.post_attention_layernorm
    got = drafter.midlayer.mlp(drafter.midlayer.post_attention_layernorm(stream))
    torch.testing.assert_close(got, last.mlp(norm(stream)))


@pytest.mark.parametrize(("family", "options"), [("phi3", {}), ("olmo2", {}), ("llama", {"intermediate": 17})])
def test_mlp_from_the_target_refused(family: str, options: dict[str, Any], tiny: Callable[..., Target]) -> None:
    with pytest.raises(ValueError, match=r"set drafter\.mlp_from_target to false"):
        make("eagle3", tiny(family=family), mlp_from_target=True, **options)


def test_peagle_drops_slots_in_training_and_none_in_evaluation(target: Target) -> None:
    """Fewer slots of the deeper depths, others in every epoch; what is kept has the logits it has among all."""
    batch = one_row(torch.randint(3, 250, (120,)).tolist(), list(range(20, 120)))
    drafter = make("peagle", target, ratio=0.5, least=0.1, depths=4)
    metrics = {}
    for train in (True, False):
        drafter.train(train)
        terms = drafter(batch, live_states(target, drafter, batch), 0.0)
        metrics[train] = [float(terms.metrics[f"accuracy_{d}"][1]) for d in (1, 2, 3, 4)]
        assert sum(metrics[train]) == drafter.denominators(batch, 0.0)["slots"]
    assert metrics == {True: [99, 49, 24, 12], False: [99, 98, 97, 96]}
    few = make("peagle", target, ratio=1.0, max_anchors=5, depths=4)
    some, every = (few.train(train).denominators(batch, 0.0)["slots"] for train in (True, False))
    assert 99 < some <= 99 + 5 * 3 and every == 390
    weights = [drafter.train().layout(dataclasses.replace(batch, epoch=e))[0].anchor_BQ for e in (0, 0, 1)]
    assert torch.equal(weights[0], weights[1]) and not torch.equal(weights[0], weights[2])


def test_peagles_dropped_slots_change_no_logit_of_the_kept(target: Target, logits_of_training: Any) -> None:
    batch = one_row(torch.randint(3, 250, (60,)).tolist(), list(range(20, 60)))
    drafter = make("peagle", target, ratio=0.5, least=0.1, depths=4)
    out = live_states(target, drafter, batch)
    some, full = (logits_of_training(drafter.train(train), batch, out) for train in (True, False))
    assert [len(depth) for depth in some] == [39, 19, 9, 4]
    for kept, every in zip(some, full, strict=True):
        for state, logits_W in kept.items():
            torch.testing.assert_close(logits_W, every[state], atol=1e-5, rtol=1e-5)


def test_peagle_starts_from_the_targets_norm_head_and_mean_embedding(target: Target) -> None:
    drafter = make("peagle", target, torch.arange(3, 90))
    stream = torch.randn(5, 48)
    got, want = drafter.lm_head(drafter.norm(stream)), target.head(target.norm(stream), drafter.d2t_W)
    torch.testing.assert_close(got, want, atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(drafter.mask_embed.detach(), target.embed_weight.mean(0))
    assert int(drafter.mask_id) == 0  # the tiny tokenizer's unknown token, which it never needs
    embed, feature = drafter.inputs(torch.randn(1, 2, 3, 48), torch.tensor([[0, 4]]), target.embed, 2)
    for i in (0, 2, 3):  # the mask's id stands for the mask wherever it is met
        assert torch.equal(embed[0, i], drafter.mask_embed)
    assert torch.equal(embed[0, 1], target.embed_weight[4]) and torch.equal(feature[0, 2], feature[0, 3])
    with pytest.raises(ValueError, match="all 3 depths at once"):
        drafter.extend(None, torch.tensor([[1]]), torch.tensor([[0]]))
