"""Heads that correct a parallel draft: their formulas by hand, and one path for training and drafting.

pytest tests/test_slot_heads.py
"""

from typing import Any

import pytest
import torch
from torch import Tensor

from draftsmith.models.slot_heads import GRU, Domino, Markov, Pairs, keep_likeliest, teacher_forced

D, V, W, R = 12, 30, 20, 6
HEADS: dict[str, Any] = {
    "markov": lambda: Markov("markov", D, V, W, R),
    "gated": lambda: Markov("gated", D, V, W, R),
    "rnn": lambda: Markov("rnn", D, V, W, R),
    "gru": lambda: Domino(D, W, R, 9, 1),
    "pairs": lambda: Pairs(D, V, W, R, 5),
}


def make(name: str) -> Any:
    torch.manual_seed(1)
    head = HEADS[name]()
    with torch.no_grad():
        for parameter in head.parameters():
            parameter.copy_(0.5 * torch.randn_like(parameter))
    return head


def embed(ids: Tensor) -> Tensor:
    return torch.nn.functional.embedding(ids, torch.linspace(-1, 1, V * D).view(V, D))


@pytest.mark.parametrize("name", HEADS)
def test_teacher_forcing_is_steps(name: str) -> None:
    """A block at once equals one step after another, with tree-shaped leading dimensions too."""
    head = make(name)
    hidden_RKD, previous_RK = torch.randn(4, 5, D), torch.randint(V, (4, 5))
    codes_RKC = teacher_forced(head, hidden_RKD, previous_RK, embed)
    state = torch.zeros(2, 2, head.state_size)
    for k in range(5):
        hidden, previous = hidden_RKD[:, k].view(2, 2, D), previous_RK[:, k].view(2, 2)
        state, code = head.step(state, hidden, previous, torch.full((2, 2), k + 1), embed)
        torch.testing.assert_close(code.flatten(0, 1), codes_RKC[:, k])
        assert state.shape == (2, 2, head.state_size)
    assert head.correct(torch.randn(4, W), codes_RKC[:, 0]).shape == (4, W)


@pytest.mark.parametrize("name", HEADS)
def test_a_head_depends_on_the_tokens_before_and_starts_small(name: str) -> None:
    """Another token before a slot changes its correction; a fresh head hardly corrects."""
    head = make(name)
    hidden = torch.randn(1, 5, D)
    one, two = torch.zeros(1, 5, dtype=torch.int64), torch.tensor([[0, 0, 7, 0, 0]])
    changed_K = (teacher_forced(head, hidden, one, embed) != teacher_forced(head, hidden, two, embed)).any(-1)[0]
    remembers = name in ("rnn", "gru")  # heads with a state
    assert changed_K.tolist() == [False, False, True, remembers, remembers]
    torch.manual_seed(0)
    fresh = HEADS[name]()
    logits = torch.randn(5, W)
    near = fresh.correct(logits, teacher_forced(fresh, hidden, one, embed)[0])
    kept = near.isfinite()
    assert float((near - logits)[kept].detach().abs().max()) < 0.3 and bool(kept.any())


def test_a_markov_head_starts_from_the_embeddings() -> None:
    """Codes of variance 1 in which tokens are as near as in the table; ranks beyond its own keep what was drawn."""
    torch.manual_seed(0)
    table = torch.randn(40, 6) @ torch.randn(6, 9)
    table[7] = table[3]
    head = Markov("markov", 9, 40, 12, 8)
    drawn = head.markov_w1.weight.detach().clone()
    head.start_from(table)
    codes = head.markov_w1.weight.detach()
    torch.testing.assert_close(codes[:, :6].var(0, unbiased=False), torch.ones(6))
    torch.testing.assert_close(codes[:, :6].mean(0), torch.zeros(6), atol=1e-6, rtol=0)
    assert torch.equal(codes[7, :6], codes[3, :6]) and torch.equal(codes[:, 6:], drawn[:, 6:])
    distances, wanted = torch.cdist(codes[:, :6], codes[:, :6]), torch.linalg.pinv(torch.cov(table.T, correction=0))
    torch.testing.assert_close(
        distances[0, 1] ** 2, (table[0] - table[1]) @ wanted @ (table[0] - table[1]), rtol=1e-3, atol=1e-3
    )


def test_formulas_by_hand() -> None:
    hidden, previous, depth = torch.randn(3, D), torch.tensor([4, 0, 29]), torch.tensor([2, 2, 2])
    logits, state = torch.randn(3, W), torch.randn(3, R)

    head = make("markov")
    _, code = head.step(state, hidden, previous, depth, embed)
    want = logits + head.markov_w1.weight[previous] @ head.markov_w2.weight.T
    torch.testing.assert_close(head.correct(logits, code), want)

    head = make("gated")
    before = head.markov_w1.weight[previous]
    gate = torch.sigmoid(torch.cat([hidden, before], 1) @ head.gate_proj.weight.T + head.gate_proj.bias)
    torch.testing.assert_close(head.step(state, hidden, previous, depth, embed)[1], gate * before)

    head = make("rnn")
    before = head.markov_w1.weight[previous]
    joined = torch.cat([state, before, hidden], 1) @ head.joint_proj.weight.T + head.joint_proj.bias
    gate, new, out = torch.sigmoid(joined[:, :R]), torch.tanh(joined[:, R : 2 * R]), torch.tanh(joined[:, 2 * R :])
    got = head.step(state, hidden, previous, depth, embed)
    torch.testing.assert_close(got, (gate * state + (1 - gate) * new, out))

    head = make("pairs")
    _, code = head.step(state[:, :0], hidden, previous, depth, embed)
    score = (head.first.weight[previous] * (hidden @ head.state.weight.T)) @ head.second.weight.T
    got = head.correct(logits, code)
    kept = logits.topk(5).indices
    torch.testing.assert_close(got.gather(1, kept), (logits + score).gather(1, kept))
    assert int(got.isfinite().sum()) == 15


def test_gru_is_torchs() -> None:
    """Step by step, with torch.nn.GRU's own weights; Domino leaves its first depths alone."""
    ours, theirs = GRU(D, 9), torch.nn.GRU(D, 9, bias=False, batch_first=True)
    theirs.load_state_dict(ours.state_dict())
    x, state = torch.randn(2, 4, D), torch.zeros(2, 9)
    want, _ = theirs(x)
    for k in range(4):
        state = ours(x[:, k], state)
        torch.testing.assert_close(state, want[:, k])
    codes = teacher_forced(make("gru"), torch.randn(2, 4, D), torch.randint(V, (2, 4)), embed)
    assert not codes[:, 0].any() and bool(codes[:, 1:].any(-1).all())


def test_keep_likeliest() -> None:
    base = torch.tensor([[0.0, 3.0, 1.0, 2.0]])
    logits = torch.tensor([[9.0, 0.0, 8.0, 1.0]])
    assert keep_likeliest(logits, base, 2).tolist() == [[-torch.inf, 0.0, -torch.inf, 1.0]]
    assert keep_likeliest(logits, base, None) is logits and keep_likeliest(logits, base, 4) is logits


@pytest.mark.parametrize("name", HEADS)
def test_bf16_autocast(name: str) -> None:
    head = make(name)
    hidden_RKD, previous_RK = torch.randn(4, 5, D), torch.randint(V, (4, 5))
    exact = teacher_forced(head, hidden_RKD, previous_RK, embed)
    with torch.autocast("cpu", torch.bfloat16):
        rough = teacher_forced(head, hidden_RKD.bfloat16(), previous_RK, embed)
        head.correct(torch.randn(4, W), rough[:, 0]).nan_to_num(0, 0, 0).sum().backward()
    torch.testing.assert_close(rough.float(), exact, atol=0.1, rtol=0.1)  # bf16 keeps 8 bits
