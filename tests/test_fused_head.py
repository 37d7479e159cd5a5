"""Losses straight from hidden states, and certainty forcing, against their plain forms in float64.

Run: pytest tests/test_fused_head.py
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from draftsmith.losses.certainty import certainty
from draftsmith.losses.distill import ON_DISTRIBUTIONS
from draftsmith.losses.fused_divergence import compare
from draftsmith.losses.fused_head import head_rows
from draftsmith.losses.objective import parse_objective

R, D, V = 13, 6, 29


def head_of(weight_VD: Tensor, bias_V: Tensor | None, softcap: float | None) -> Callable[[Tensor], Tensor]:
    def head(hidden_RD: Tensor) -> Tensor:
        logits_RV = torch.nn.functional.linear(hidden_RD, weight_VD, bias_V)
        return logits_RV if softcap is None else softcap * torch.tanh(logits_RV / softcap)

    return head


def by_words(logits_RV: Tensor, label_R: Tensor, temperature: float | None) -> tuple[Tensor, Tensor]:
    """Cross-entropy and entropy from the definitions, row by row."""
    ce, entropy = [], []
    for logits_V, label in zip(logits_RV, label_R.tolist(), strict=True):
        ce.append(-torch.log(torch.exp(logits_V[label]) / torch.exp(logits_V).sum()))
        warm_V = torch.exp(logits_V / (temperature or 1))
        p_V = warm_V / warm_V.sum()
        entropy.append(-(p_V * p_V.log()).sum() * (temperature is not None))
    return torch.stack(ce), torch.stack(entropy)


@pytest.mark.parametrize("temperature", [None, 1.0, 0.5])
@pytest.mark.parametrize("learns", [False, True])
@pytest.mark.parametrize("softcap", [None, 3.0])
def test_values_and_gradients(temperature: float | None, learns: bool, softcap: float | None) -> None:
    torch.manual_seed(0)
    hidden_RD = torch.randn(R, D, dtype=torch.float64, requires_grad=True)
    weight_VD = torch.randn(V, D, dtype=torch.float64, requires_grad=learns)
    bias_V = torch.randn(V, dtype=torch.float64)
    label_R, weigh_R = torch.randint(V, (R,)), torch.rand(2, R, dtype=torch.float64)
    head = head_of(weight_VD, bias_V, softcap)
    inputs = [hidden_RD, weight_VD] if learns else [hidden_RD]

    ce_R, entropy_R = by_words(head(hidden_RD), label_R, temperature)
    wanted = torch.autograd.grad((ce_R * weigh_R[0] + entropy_R * weigh_R[1]).sum(), inputs)
    for chunk in (1, 4, 5, 100):
        rows = head_rows(head, hidden_RD, label_R, temperature=temperature, head_learns=learns, chunk=chunk)
        torch.testing.assert_close(rows.ce_R, ce_R, rtol=0, atol=1e-12)
        torch.testing.assert_close(rows.entropy_R, entropy_R, rtol=0, atol=1e-12)
        found = torch.autograd.grad((rows.ce_R * weigh_R[0] + rows.entropy_R * weigh_R[1]).sum(), inputs)
        for got, want in zip(found, wanted, strict=True):
            torch.testing.assert_close(got, want, rtol=0, atol=1e-12)
    with torch.no_grad():
        top = head(hidden_RD).softmax(-1).max(-1)
    assert torch.equal(rows.top_R, top.indices)
    torch.testing.assert_close(rows.chance_R, top.values)
    with torch.no_grad():
        assert not head_rows(head, hidden_RD, label_R, temperature=temperature).ce_R.requires_grad


@pytest.mark.parametrize("learns", [False, True])
def test_a_teacher_gives_soft_labels(learns: bool) -> None:
    torch.manual_seed(0)
    hidden_RD = torch.randn(R, D, dtype=torch.float64, requires_grad=True)
    teacher_RD = torch.randn(R, D, dtype=torch.float64, requires_grad=True)
    weight_VD = torch.randn(V, D, dtype=torch.float64, requires_grad=learns)
    label_R, weigh_R = torch.randint(V, (R,)), torch.rand(R, dtype=torch.float64)
    head = head_of(weight_VD, None, None)
    inputs = [hidden_RD, weight_VD] if learns else [hidden_RD]
    with torch.no_grad():
        p_RV = head(teacher_RD).exp() / head(teacher_RD).exp().sum(-1, keepdim=True)
    ce_R = -(p_RV * (head(hidden_RD).exp() / head(hidden_RD).exp().sum(-1, keepdim=True)).log()).sum(-1)
    wanted = torch.autograd.grad((ce_R * weigh_R).sum(), inputs)
    for chunk in (4, 100):
        rows = head_rows(head, hidden_RD, label_R, teacher_RD=teacher_RD, head_learns=learns, chunk=chunk)
        torch.testing.assert_close(rows.ce_R, ce_R, rtol=0, atol=1e-12)
        found = torch.autograd.grad((rows.ce_R * weigh_R).sum(), [*inputs, teacher_RD], allow_unused=True)
        assert found[-1] is None
        for got, want in zip(found[:-1], wanted, strict=True):
            torch.testing.assert_close(got, want, rtol=0, atol=1e-12)


BY_WORDS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {  # of p and q [V], the teacher's and the row's
    "kl": lambda p, q: (p * (p / q).log()).sum(),
    "reverse_kl": lambda p, q: (q * (q / p).log()).sum(),
    "jsd": lambda p, q: ((p * (2 * p / (p + q)).log()).sum() + (q * (2 * q / (p + q)).log()).sum()) / 2,
    "tv": lambda p, q: (p - q).abs().sum() / 2,
    "l1": lambda p, q: (p - q).abs().sum(),
    "neg_log_accept": lambda p, q: -torch.minimum(p, q).sum().log(),
}


@pytest.mark.parametrize("learns", [False, True])
@pytest.mark.parametrize("objective", [*ON_DISTRIBUTIONS, "0.5*kl + 2*tv + 0.1*ce"])
def test_divergences_in_chunks(objective: str, learns: bool) -> None:
    """Values and gradients are those of one piece, which are those of the definitions; the teacher gets no gradient."""
    torch.manual_seed(0)
    hidden_RD = torch.randn(R, D, dtype=torch.float64, requires_grad=True)
    teacher_RD = torch.randn(R, D, dtype=torch.float64, requires_grad=True)
    weight_VD = torch.randn(V, D, dtype=torch.float64, requires_grad=learns)
    label_R, weigh_R = torch.randint(V, (R,)), torch.rand(R, dtype=torch.float64)
    head, terms = head_of(weight_VD, None, 3.0), parse_objective(objective)
    inputs = [hidden_RD, weight_VD] if learns else [hidden_RD]
    for temperature in (1.0, 0.7):
        q_RV = (head(hidden_RD) / temperature).softmax(-1)
        with torch.no_grad():
            p_RV = (head(teacher_RD) / temperature).softmax(-1)
        wanted: list[Tensor] | None = None
        if all(name in BY_WORDS or name == "ce" for _, name in terms):
            wanted_R = torch.zeros(R, dtype=torch.float64)
            for factor, name in terms:
                ce_R = -q_RV.gather(-1, label_R[:, None])[:, 0].log()
                own_R = ce_R if name == "ce" else torch.stack(list(map(BY_WORDS[name], p_RV, q_RV)))
                wanted_R = wanted_R + factor * own_R
            wanted = [wanted_R.detach(), *torch.autograd.grad((wanted_R * weigh_R).sum(), inputs)]
        for chunk in (100, 4, 1):
            rows = compare(
                head, hidden_RD, label_R, teacher_RD=teacher_RD, terms=terms, temperature=temperature,
                head_learns=learns, chunk=chunk,
            )  # fmt: skip
            found = torch.autograd.grad((rows.loss_R * weigh_R).sum(), [*inputs, teacher_RD], allow_unused=True)
            assert found[-1] is None
            got = [rows.loss_R.detach(), *(grad for grad in found[:-1] if grad is not None)]
            wanted = wanted or got
            for a, b in zip(got, wanted, strict=True):
                torch.testing.assert_close(a, b, rtol=0, atol=1e-12)
            torch.testing.assert_close(rows.ce_R, by_words(head(hidden_RD), label_R, None)[0].detach())
            assert torch.equal(rows.top_R, q_RV.argmax(-1))


@pytest.mark.parametrize("learns", [False, True])
def test_smoothed_labels(learns: bool) -> None:
    """Cross-entropy with (1 - s) of the label and s / V of every id, as the framework defines it."""
    torch.manual_seed(0)
    hidden_RD = torch.randn(R, D, dtype=torch.float64, requires_grad=True)
    weight_VD = torch.randn(V, D, dtype=torch.float64, requires_grad=learns)
    label_R, weigh_R, head = torch.randint(V, (R,)), torch.rand(R, dtype=torch.float64), head_of(weight_VD, None, None)
    inputs = [hidden_RD, weight_VD] if learns else [hidden_RD]
    for smoothing in (0.0, 0.1):
        wanted_R = torch.nn.functional.cross_entropy(
            head(hidden_RD), label_R, label_smoothing=smoothing, reduction="none"
        )
        wanted = torch.autograd.grad((wanted_R * weigh_R).sum(), inputs)
        for chunk in (4, 100):
            rows = compare(head, hidden_RD, label_R, smoothing=smoothing, head_learns=learns, chunk=chunk)
            torch.testing.assert_close(rows.loss_R, wanted_R, rtol=0, atol=1e-12)
            torch.testing.assert_close(rows.ce_R, by_words(head(hidden_RD), label_R, None)[0].detach())
            found = torch.autograd.grad((rows.loss_R * weigh_R).sum(), inputs)
            for got, want in zip(found, wanted, strict=True):
                torch.testing.assert_close(got, want, rtol=0, atol=1e-12)
    none = compare(head, hidden_RD[:0], label_R[:0], smoothing=0.1)
    assert len(none.loss_R) == len(none.ce_R) == len(none.top_R) == 0


def test_no_rows_and_half_precision() -> None:
    head = head_of(torch.randn(V, D, dtype=torch.bfloat16), None, None)
    hidden_RD = torch.randn(R, D, dtype=torch.bfloat16, requires_grad=True)
    rows = head_rows(head, hidden_RD, torch.zeros(R, dtype=torch.int64), temperature=0.5)
    assert rows.ce_R.dtype == torch.float32 and rows.entropy_R.dtype == torch.float32
    (rows.ce_R.sum() + rows.entropy_R.sum()).backward()
    assert hidden_RD.grad is not None and hidden_RD.grad.dtype == torch.bfloat16
    none = head_rows(head, hidden_RD[:0], torch.zeros(0, dtype=torch.int64))
    assert len(none.ce_R) == len(none.top_R) == 0 and none.ce_R.sum().item() == 0


def test_the_largest_tensor_is_a_chunk() -> None:
    """Logits of more than `chunk` rows are never asked for, in either form."""
    asked: list[int] = []
    weight_VD = torch.randn(V, D, requires_grad=True)

    def head(hidden_RD: Tensor) -> Tensor:
        asked.append(len(hidden_RD))
        return hidden_RD @ weight_VD.T

    for learns in (False, True):
        hidden_RD = torch.randn(R, D, requires_grad=True)
        rows = head_rows(head, hidden_RD, torch.zeros(R, dtype=torch.int64), head_learns=learns, chunk=3)
        rows.ce_R.sum().backward()
    assert max(asked) == 3


def test_certainty_is_a_mean_over_samples_of_means_over_tokens() -> None:
    ce_R = torch.tensor([1.0, 3.0, 5.0, 2.0, 4.0], dtype=torch.float64)
    entropy_R = torch.tensor([0.1, 0.2, 0.4, 0.8, 1.6], dtype=torch.float64, requires_grad=True)
    correct_R = torch.tensor([True, False, True, True, False])
    unit_R = torch.tensor([0, 0, 0, 1, 2])
    ce, entropy = certainty(ce_R, entropy_R, correct_R, unit_R, 3)
    assert float(ce) == 3.0 + 2.0 + 4.0
    assert entropy.item() == pytest.approx((0.1 + 0.4) / 2 + 0.8 + 0.0, abs=1e-15)  # unit 2 has no correct row
    (grad_R,) = torch.autograd.grad(entropy, entropy_R)
    assert grad_R.tolist() == [0.5, 0, 0.5, 1, 0]
    zero_R = torch.zeros(0, dtype=torch.float64)
    assert [float(x) for x in certainty(zero_R, zero_R, zero_R.bool(), zero_R.long(), 0)] == [0, 0]
