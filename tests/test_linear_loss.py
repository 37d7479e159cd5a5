"""linear_loss in chunks: values and gradients in float64 against the definitions, which are those of losses/distill.py.

Run: pytest tests/test_linear_loss.py
"""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import pytest
import torch
from kernel_cases.linear_loss import OBJECTIVE, teachers, widened
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from draftsmith.kernels.linear_loss import TERMS, Dense, FromHidden, linear_loss, logits_loss, reference
from draftsmith.kernels.linear_loss_rules import NEEDS_TEACHER, TopK
from draftsmith.losses.distill import ON_DISTRIBUTIONS, Rows, accept

T, W, D = 13, 29, 6
KINDS = ("hidden", "dense", "topk", "none")


def inputs() -> tuple[list[Tensor], dict[str, Any], dict[str, Any]]:
    """float64 hidden, head and bias that need gradients; teachers; labels and temperature."""
    torch.manual_seed(0)
    learned = [torch.randn(*shape, dtype=torch.float64).requires_grad_() for shape in ((T, D), (W, D), (W,))]
    made = {kind: widened(teacher) for kind, teacher in teachers(T, W, torch.float64).items()}
    return learned, made, {"label_T": torch.randint(-1, W, (T,)), "temperature": 0.7}


def terms_of(term: str) -> tuple[tuple[float, str], ...]:
    return OBJECTIVE if term == "all" else ((0.7, term),)


def fits(term: str, kind: str) -> bool:
    """Terms that need a teacher, or its logits, are refused without (tests of refusals below)."""
    if kind == "topk" and term == "topk_ce":
        return False
    return kind != "none" or not {name for _, name in terms_of(term)} & NEEDS_TEACHER


@pytest.mark.parametrize(
    ("term", "kind"), [(term, kind) for term in (*TERMS, "all") for kind in KINDS if fits(term, kind)]
)
def test_values_and_gradients(term: str, kind: str) -> None:
    """Weights known and weights to come, head learning or not, chunks of any size: 1e-12."""
    terms = terms_of(term)
    learned, made, rest = inputs()
    weight_T, rest = torch.rand(T, dtype=torch.float64), rest | {"teacher": made[kind]}
    value_T = reference(learned[0], learned[1], terms, bias_W=learned[2], **rest)
    for count in (3, 1):  # hidden, head and bias; hidden alone
        given = [x if i < count else x.detach() for i, x in enumerate(learned)]
        wanted = torch.autograd.grad((value_T * weight_T).sum(), learned[:count], retain_graph=True)
        for chunk in (5, 100):
            for known in (True, False):
                out = linear_loss(
                    given[0],
                    given[1],
                    terms,
                    bias_W=given[2],
                    weight_T=weight_T if known else None,
                    chunk=chunk,
                    **rest,
                )
                torch.testing.assert_close(out.value_T, value_T, rtol=0, atol=1e-12, check_stride=False)
                total = out.total if known else (out.value_T * weight_T).sum()
                for got, want in zip(torch.autograd.grad(total, learned[:count]), wanted, strict=True):
                    torch.testing.assert_close(got, want, rtol=0, atol=1e-12)


@pytest.mark.parametrize("name", ["kl", "reverse_kl", "jsd", "tv", "neg_log_accept", "lk"])
def test_top_k_scaled_to_its_mass(name: str) -> None:
    """As a dense teacher of `tail` False: the loss is of p scaled to 1, acceptance of p as it is."""
    learned, made, _ = inputs()
    top: TopK = made["topk"]
    assert top.tail_T is not None
    mass_T = top.tail_T + top.log_p_TK.exp().masked_fill(top.ids_TK < 0, 0).sum(-1)
    assert bool((mass_T < 0.99).any())
    whole = TopK(top.ids_TK, top.log_p_TK - mass_T.log()[:, None], top.tail_T / mass_T)
    weights = torch.rand(T, dtype=torch.float64)

    def asked(teacher: TopK) -> tuple[Any, Any]:
        out = linear_loss(learned[0], learned[1], ((1.0, name),), bias_W=learned[2], teacher=teacher, weight_T=weights)
        return out, torch.autograd.grad(out.total, learned)

    (want, by_want), (got, by_got) = asked(whole), asked(dataclasses.replace(top, log_mass_T=mass_T.log()))
    torch.testing.assert_close((got.value_T, by_got), (want.value_T, by_want), rtol=0, atol=1e-12)
    kept, by_kept = asked(dataclasses.replace(top, log_mass_T=mass_T.log(), tail=True))
    plain, by_plain = asked(top)
    torch.testing.assert_close((kept.value_T, by_kept), (plain.value_T, by_plain), rtol=0, atol=0)
    for out in (got, kept):
        torch.testing.assert_close((out.accept_T, out.log_mass_T), (plain.accept_T, mass_T.log()), rtol=0, atol=1e-12)


@pytest.mark.parametrize("term", [name for name in TERMS if name in ON_DISTRIBUTIONS])
def test_definitions_are_those_of_the_table(term: str) -> None:
    """With missing mass, too: where both say the same, a change of one is seen."""
    learned, made, rest = inputs()
    teacher = made["dense"]
    log_mass_T = ((teacher.logits_UW / 0.7).logsumexp(-1) - teacher.log_z_T).clamp(max=0)
    assert bool((log_mass_T < -0.01).any())
    rows = Rows(
        (torch.nn.functional.linear(*learned) / 0.7).log_softmax(-1),
        (teacher.logits_UW / 0.7).log_softmax(-1) + log_mass_T[:, None],
        log_mass_T.exp(),
        rest["label_T"],
    )
    out = linear_loss(learned[0], learned[1], ((1.0, term),), bias_W=learned[2], teacher=teacher, **rest)
    torch.testing.assert_close(out.value_T, ON_DISTRIBUTIONS[term](rows), rtol=0, atol=1e-12)
    scaled = dataclasses.replace(teacher, tail=False)  # the loss is of p scaled to 1, acceptance of p as it is
    other = linear_loss(learned[0], learned[1], ((1.0, term),), bias_W=learned[2], teacher=scaled, **rest)
    whole = Rows(rows.log_q_RW, rows.log_p_RW - log_mass_T[:, None], torch.ones_like(log_mass_T), rows.label_R)
    torch.testing.assert_close(other.value_T, ON_DISTRIBUTIONS[term](whole), rtol=0, atol=1e-12)
    known = dataclasses.replace(teacher, log_y_T=teacher.logits_UW.logsumexp(-1))
    with pytest.raises(ValueError, match="of temperature 1"):
        linear_loss(learned[0], learned[1], ((1.0, term),), teacher=known, **rest)
    one, two = (
        linear_loss(learned[0], learned[1], ((1.0, term),), teacher=x, label_T=rest["label_T"])
        for x in (known, teacher)
    )
    torch.testing.assert_close((one.value_T, one.accept_T), (two.value_T, two.accept_T), rtol=0, atol=1e-12)
    for each in (out, other):
        torch.testing.assert_close(each.accept_T, accept(rows).detach(), rtol=0, atol=1e-12)
        torch.testing.assert_close(each.log_mass_T, log_mass_T, rtol=0, atol=1e-12)
        assert torch.equal(each.top_T, rows.log_q_RW.argmax(-1))
        assert torch.equal(each.match_T, each.top_T == teacher.logits_UW.argmax(-1))


def test_logits_of_no_head() -> None:
    """Given as a tensor: the same values, and gradients by them."""
    learned, made, rest = inputs()
    logits_TW = torch.nn.functional.linear(*learned).detach().requires_grad_()
    terms, weight_T = (*OBJECTIVE, (0.3, "topk_ce")), torch.rand(T, dtype=torch.float64)
    value_T = reference(learned[0], learned[1], terms, bias_W=learned[2], teacher=made["dense"], **rest)
    wanted = torch.autograd.grad((value_T * weight_T).sum(), learned)
    for known in (weight_T, None):
        out = logits_loss(logits_TW, terms, teacher=made["dense"], weight_T=known, **rest)
        torch.testing.assert_close(out.value_T, value_T, rtol=0, atol=1e-12)
        total = (out.value_T * weight_T).sum() if known is None else out.total
        (by_TW,) = torch.autograd.grad(total, logits_TW, retain_graph=True)
        torch.testing.assert_close(by_TW @ learned[1], wanted[0], rtol=0, atol=1e-12)
        with pytest.raises(RuntimeError, match="anew"):
            total.backward()
    with pytest.raises(ValueError, match="give the teacher's logits"):
        logits_loss(logits_TW, terms, teacher=made["hidden"], **rest)


def test_top_k_and_a_rest_are_classes() -> None:
    """By words: K + 1 probabilities each; what the teacher has outside, the drafter has nothing of."""
    learned, made, rest = inputs()
    teacher: TopK = made["topk"]
    q_TW = (torch.nn.functional.linear(*learned) / 0.7).softmax(-1).detach()
    out = linear_loss(
        learned[0], learned[1], ((1.0, "tv"), (1.0, "entropy")), bias_W=learned[2], teacher=teacher, **rest
    )
    assert bool((teacher.ids_TK < 0).any())
    for t in range(T):
        inside = [
            (i, math.exp(x)) for i, x in zip(teacher.ids_TK[t].tolist(), teacher.log_p_TK[t].tolist(), strict=True)
        ]
        pairs = [(p, float(q_TW[t, i])) for i, p in inside if i >= 0]
        assert teacher.tail_T is not None
        pairs.append((float(teacher.tail_T[t]), 1 - sum(q for _, q in pairs)))
        assert float(out.accept_T[t]) == pytest.approx(sum(min(p, q) for p, q in pairs), abs=1e-12)
    # The likeliest of the draft vocabulary, though something outside is likelier still.
    ids_TK = torch.tensor([[-1, int(out.top_T[0])], [-1, -1]])
    few = TopK(ids_TK, torch.tensor([[0.6, 0.3]] * 2).log())
    told = linear_loss(learned[0][:2], learned[1], ((1.0, "tv"),), bias_W=learned[2], teacher=few, temperature=0.7)
    assert told.match_T.tolist() == [True, False]
    whole = TopK(torch.arange(W).expand(T, W), made["dense"].logits_UW.log_softmax(-1), torch.zeros(T))
    terms = ((1.0, "kl"), (1.0, "jsd"))  # every id named: the same as a dense teacher
    a, b = (
        linear_loss(learned[0], learned[1], terms, teacher=x).value_T for x in (whole, Dense(made["dense"].logits_UW))
    )
    torch.testing.assert_close(a, b, rtol=0, atol=1e-12)


def test_a_draft_vocabulary_is_rows_of_the_head() -> None:
    learned, _, _ = inputs()
    d2t_W = torch.tensor([2, 3, 11, 28])
    label_T = torch.randint(-1, 4, (T,))
    out = linear_loss(learned[0], learned[1], ((1.0, "ce"),), bias_W=learned[2], d2t_W=d2t_W, label_T=label_T)
    want = reference(learned[0], learned[1][d2t_W], ((1.0, "ce"),), bias_W=learned[2][d2t_W], label_T=label_T)
    for a, b in zip(torch.autograd.grad(out.total, learned), torch.autograd.grad(want.sum(), learned), strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=1e-12)


def test_no_logits_of_all_rows() -> None:
    """The largest tensor ever made is a chunk's (or the head's gradient), forward and backward, in every mode."""
    sizes: list[int] = []

    class Watch(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            out = func(*args, **(kwargs or {}))
            sizes.extend(x.numel() for x in (out if isinstance(out, tuple | list) else [out]) if isinstance(x, Tensor))
            return out

    hidden_TD, weight_WD = torch.randn(64, 4, requires_grad=True), torch.randn(50, 4, requires_grad=True)
    teacher = FromHidden(torch.randn(64, 4), torch.randn(50, 4))
    for weight_T in (torch.ones(64), None):
        with Watch():
            linear_loss(
                hidden_TD, weight_WD, OBJECTIVE[:6], teacher=teacher, weight_T=weight_T, chunk=8
            ).total.backward()
    assert max(sizes) == 8 * 50


def test_extremes_stay_finite() -> None:
    """No overlap, a certain teacher, a banned id, no rows, half precision."""
    weight_WD = torch.eye(3)
    hidden_TD = torch.tensor([[300.0, -300.0, 0.0], [0.0, 0.0, 0.0]], requires_grad=True)
    for teacher in (
        Dense(torch.tensor([[-300.0, 300.0, -300.0]] * 2)),
        TopK(torch.tensor([[1], [-1]]), torch.zeros(2, 1)),
    ):
        for term in NEEDS_TEACHER - ({"topk_ce"} if isinstance(teacher, TopK) else set()):
            out = linear_loss(hidden_TD, weight_WD, ((1.0, term),), teacher=teacher)
            (grad_TD,) = torch.autograd.grad(out.total, hidden_TD)
            assert bool(out.value_T.isfinite().all()) and bool(grad_TD.isfinite().all()), term
    banned_W = torch.tensor([0.0, 0.0, float("-inf")])
    out = linear_loss(hidden_TD, weight_WD, ((1.0, "entropy"),), bias_W=banned_W)
    assert float(out.entropy_T[1]) == pytest.approx(math.log(2)) and bool(
        torch.autograd.grad(out.total, hidden_TD)[0].isfinite().all()
    )
    none = linear_loss(hidden_TD[:0], weight_WD, ((1.0, "kl"),), teacher=Dense(torch.zeros(0, 3)))
    assert none.total.item() == 0 and none.value_T.shape == none.match_T.shape == (0,)
    half_TD = torch.randn(4, 3, dtype=torch.bfloat16, requires_grad=True)
    half = linear_loss(half_TD, weight_WD.bfloat16(), ((1.0, "tv"),), teacher=Dense(torch.zeros(4, 3)))
    half.total.backward()
    assert half.value_T.dtype == torch.float32 and half_TD.grad is not None and half_TD.grad.dtype == torch.bfloat16


def test_gradients_of_half_precision_are_scaled_in_single() -> None:
    """A factor between two numbers of bf16: all gradients would be off alike if it were rounded."""
    torch.manual_seed(0)
    hidden_TD, weight_WD = torch.randn(T, D, dtype=torch.bfloat16), torch.randn(W, D, dtype=torch.bfloat16)
    logits_TW, label_T, factor = torch.randn(T, W, dtype=torch.bfloat16), torch.randint(W, (T,)), 1 + 0.45 * 2.0**-7
    by = []
    for times in (1.0, factor):
        given = [x.clone().requires_grad_() for x in (hidden_TD, weight_WD, logits_TW)]
        rest: dict[str, Any] = {"label_T": label_T, "weight_T": torch.ones(T)}
        total = linear_loss(given[0], given[1], ((1.0, "ce"),), **rest).total
        (times * (total + logits_loss(given[2], ((1.0, "ce"),), **rest).total)).backward()
        by.append([x.grad for x in given])
    for one, scaled in zip(*by, strict=True):
        assert one is not None and scaled is not None
        if one is not by[0][1]:  # the head's is kept in fp32 till the end
            assert torch.equal(scaled, (one.float() * factor).bfloat16())
        assert not torch.equal(scaled, one)


def test_gradients_formed_in_forward_serve_once() -> None:
    learned, made, rest = inputs()
    out = linear_loss(learned[0], learned[1], ((1.0, "kl"),), teacher=made["dense"], weight_T=torch.ones(T), **rest)
    (3 * out.total).backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="anew"):
        out.total.backward()


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"terms": ((1.0, "kll"),)}, "no term 'kll'"),
        ({"teacher": None}, "kl need a teacher"),
        ({"terms": ((1.0, "ce"),)}, "ce needs label_T"),
        ({"temperature": 0.0}, "temperature=0.0"),
        ({"weight_T": torch.ones(T, requires_grad=True)}, "weight_T gets no gradient"),
        ({"weight_T": torch.ones(3)}, "weight_T has 3 rows, hidden has 13"),
        (
            {"terms": ((1.0, "topk_ce"),), "teacher": TopK(torch.zeros(T, 3, dtype=torch.int64), torch.zeros(T, 3))},
            "its 3 likeliest",
        ),
        ({"teacher": Dense(torch.zeros(T, W + 1))}, "30 ids, the head of 29"),
        ({"hidden_TD": torch.zeros(T, D + 1)}, "must be [T, D] and [W, D]"),
    ],
)
def test_refusals(change: dict[str, Any], words: str) -> None:
    call = {"hidden_TD": torch.zeros(T, D), "weight_WD": torch.zeros(W, D), "terms": ((1.0, "kl"),)}
    with pytest.raises(ValueError, match="linear_loss") as error:
        linear_loss(**(call | {"teacher": Dense(torch.zeros(T, W))} | change))
    assert words in str(error.value)


def test_gradients_arrive_in_one_order_whatever_the_rows() -> None:
    """Engines that reduce gradients as they come put them into buckets in that order, on every process its own."""
    orders = []
    for rows in (3, 0):
        given = [torch.randn(rows, 4, requires_grad=True), torch.randn(5, 4, requires_grad=True)]
        given.append(torch.zeros(5, requires_grad=True))
        order: list[int] = []
        for i, x in enumerate(given):
            x.register_post_accumulate_grad_hook(lambda _, i=i, order=order: order.append(i))
        loss = linear_loss(
            given[0], given[1], ((1.0, "ce"),), bias_W=given[2], label_T=torch.arange(rows), weight_T=torch.ones(rows)
        )
        loss.total.backward()
        orders.append(order)
        assert all(x.grad is not None and bool(x.grad.isfinite().all()) for x in given)
    assert orders[0] == orders[1] and len(orders[0]) == 3
