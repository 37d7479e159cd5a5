"""Distillation losses: values by independent formulas, gradients by float64 gradcheck, the fused path by the plain one.

pytest tests/test_losses.py
"""

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from draftsmith.kernels import linear_loss
from draftsmith.losses.distill import (
    ON_DISTRIBUTIONS,
    ON_FEATURES,
    OOV,
    ByHead,
    Oov,
    Rows,
    Teacher,
    accept,
    feature_smooth_l1,
    fused_score,
    kl,
    lk,
    make_teacher,
    make_top_teacher,
    neg_log_accept,
    score_rows,
    tv,
)
from draftsmith.losses.objective import LOSSES, parse_objective


def random_rows(r: int = 5, w: int = 7, mass: float = 1.0) -> tuple[Tensor, Rows]:
    """float64 logits that need gradients, and the rows made of them."""
    logits_RW = (2 * torch.randn(r, w, dtype=torch.float64)).requires_grad_()
    log_p_RW = (2 * torch.randn(r, w, dtype=torch.float64)).log_softmax(-1) + math.log(mass)
    return logits_RW, Rows(
        logits_RW.log_softmax(-1), log_p_RW, torch.full((r,), mass, dtype=torch.float64), torch.randint(-1, w, (r,))
    )


def random_teacher(r: int, w: int, v: int, dtype: torch.dtype = torch.float32) -> tuple[Teacher, Tensor, Tensor]:
    """A teacher over a draft vocabulary of w of v ids, its full logits [U, V], and the draft ids."""
    ids_W = torch.randperm(v)[:w].sort().values
    t2d_V = torch.full((v,), -1)
    t2d_V[ids_W] = torch.arange(w)
    full_UV = (3 * torch.randn(r + 2, v)).to(dtype)
    bank = make_teacher(lambda h, ids: h if ids is None else h[:, ids], full_UV, None, None, ids_W, t2d_V)
    index_R = torch.randint(0, r + 2, (r,))
    return bank.rows(index_R, torch.randint(-1, w, (r,))), full_UV, ids_W


def test_table_is_complete() -> None:
    assert set(LOSSES) == set(ON_DISTRIBUTIONS) | set(ON_FEATURES)


@pytest.mark.parametrize("name", sorted(ON_DISTRIBUTIONS))
@pytest.mark.parametrize("mass", [1.0, 0.6])
def test_gradient_of_every_loss(name: str, mass: float) -> None:
    torch.manual_seed(0)
    logits_RW, rows = random_rows(mass=mass)
    mix_R = torch.exp(-3 * accept(rows)).detach()  # lk holds it constant, so the numerical derivative must too

    def value(logits_RW: Tensor) -> Tensor:
        made = Rows(logits_RW.log_softmax(-1), rows.log_p_RW, rows.mass_R, rows.label_R)
        return lk(made, mix_R) if name == "lk" else ON_DISTRIBUTIONS[name](made)

    assert torch.autograd.gradcheck(value, (logits_RW,))


def test_gradient_of_feature_loss() -> None:
    torch.manual_seed(0)
    x = torch.randn(4, 6, dtype=torch.float64, requires_grad=True)
    assert feature_smooth_l1(x, torch.zeros(4, 6)).shape == (4,)
    want = torch.nn.functional.smooth_l1_loss(x.float(), torch.zeros(4, 6))
    torch.testing.assert_close(feature_smooth_l1(x, torch.zeros(4, 6)).mean(), want)


def test_values_by_independent_formulas() -> None:
    torch.manual_seed(1)
    _, rows = random_rows()
    p, q = rows.log_p_RW.exp(), rows.log_q_RW.exp().detach()
    m = (p + q) / 2
    want = {
        "kl": (p * (p / q).log()).sum(-1),
        "reverse_kl": (q * (q / p).log()).sum(-1),
        "jsd": ((p * (p / m).log()).sum(-1) + (q * (q / m).log()).sum(-1)) / 2,
        "tv": (p - q).abs().sum(-1) / 2,
        "l1": (p - q).abs().sum(-1),
        "neg_log_accept": -torch.minimum(p, q).sum(-1).log(),
        "topk_ce": -(p * q.log()).sum(-1),  # 7 ids: all are among the ten likeliest
        "ce": torch.stack([-q[i, j].log() if j >= 0 else q.new_zeros(()) for i, j in enumerate(rows.label_R)]),
    }
    mix = torch.exp(-3 * torch.minimum(p, q).sum(-1))
    want["lk"] = mix * want["kl"] + (1 - mix) * want["tv"]
    assert set(want) == set(ON_DISTRIBUTIONS)
    for name, value_R in want.items():
        torch.testing.assert_close(ON_DISTRIBUTIONS[name](rows).detach(), value_R, atol=1e-12, rtol=1e-9, msg=name)


def test_missing_mass_is_a_class_that_the_drafter_never_names() -> None:
    """`tail` equals the same divergences over W + 1 classes with q = 0 on the last, infinite constants left out."""
    torch.manual_seed(2)
    logits_RW, rows = random_rows(mass=0.7)
    p = torch.cat([rows.log_p_RW.exp(), torch.full((5, 1), 0.3, dtype=torch.float64)], -1)
    q = torch.cat([rows.log_q_RW.exp(), torch.zeros(5, 1, dtype=torch.float64)], -1)
    m = (p + q) / 2
    torch.testing.assert_close(tv(rows), (p - q).abs().sum(-1) / 2)
    torch.testing.assert_close(neg_log_accept(rows), -torch.minimum(p, q).sum(-1).log())
    js = ((p * (p / m).log()).sum(-1) + torch.special.xlogy(q, q / m).sum(-1)) / 2
    torch.testing.assert_close(ON_DISTRIBUTIONS["jsd"](rows), js)
    (got,) = torch.autograd.grad(kl(rows).sum(), logits_RW, retain_graph=True)
    (want,) = torch.autograd.grad(-(p[:, :-1] * rows.log_q_RW).sum(), logits_RW)
    torch.testing.assert_close(got, want)
    assert bool((kl(rows) >= 0).all())


def test_identical_distributions_cost_nothing() -> None:
    logits_RW = torch.randn(4, 9)
    bank = make_teacher(lambda h, ids: h, logits_RW, None, None, None, None)
    teacher = bank.rows(torch.arange(4), logits_RW.argmax(-1))
    for name in ("kl", "reverse_kl", "jsd", "tv", "neg_log_accept", "lk"):
        scored = score_rows(logits_RW, teacher, ((1.0, name),), "renormalise")
        torch.testing.assert_close(scored.value_R, torch.zeros(4), atol=1e-6, rtol=0)
    assert bool(scored.correct_R.all())
    torch.testing.assert_close(scored.accept_R, torch.ones(4), atol=1e-6, rtol=0)


def test_no_overlap_stays_finite() -> None:
    teacher = make_teacher(lambda h, ids: h, torch.tensor([[200.0, -200.0]]), None, None, None, None)
    logits_RW = torch.tensor([[-200.0, 200.0]], requires_grad=True)
    for name in ON_DISTRIBUTIONS:
        scored = score_rows(logits_RW, teacher.rows(torch.tensor([0]), torch.tensor([0])), ((1.0, name),), "tail")
        (grad,) = torch.autograd.grad(scored.value_R.sum(), logits_RW)
        assert bool(scored.value_R.isfinite().all()) and bool(grad.isfinite().all()), name


@pytest.mark.parametrize("oov", OOV)
@pytest.mark.parametrize("captured", [False, True])
def test_reduced_vocabulary(oov: str, captured: bool) -> None:
    """Against a full-vocabulary softmax written out: kept mass, accuracy and acceptance count what lies outside."""
    torch.manual_seed(3)
    teacher, full_UV, ids_W = random_teacher(40, 12, 30)
    if captured:
        t2d_V = torch.full((30,), -1)
        t2d_V[ids_W] = torch.arange(12)
        tops = full_UV.argmax(-1).int()
        bank = make_teacher(lambda h, ids: h[:, ids], full_UV, full_UV.logsumexp(-1), tops, ids_W, t2d_V)
        teacher = bank.rows(teacher.index_R, teacher.label_R)
    logits_RW = torch.randn(40, 12)
    scored = score_rows(logits_RW, teacher, ((1.0, "kl"),), oov)
    p_RV = full_UV.softmax(-1)[teacher.index_R]
    q_RV = torch.zeros(40, 30).index_copy(1, ids_W, logits_RW.softmax(-1))
    kept_R = p_RV[:, ids_W].sum(-1)
    top_R = p_RV.argmax(-1)
    torch.testing.assert_close(scored.lost_R, 1 - kept_R)
    torch.testing.assert_close(scored.accept_R, torch.minimum(p_RV, q_RV).sum(-1))
    assert torch.equal(scored.correct_R, q_RV.argmax(-1) == top_R)
    p_RW = p_RV[:, ids_W] / kept_R[:, None]
    want_R = (p_RW * (p_RW.log() - logits_RW.log_softmax(-1))).sum(-1)
    if oov == "mask":
        outside_R = ~torch.isin(top_R, ids_W)
        assert 0 < int(outside_R.sum()) < 40 and not bool(scored.correct_R[outside_R].any())
        want_R[outside_R] = 0
    torch.testing.assert_close(scored.value_R, want_R * (kept_R if oov == "tail" else 1))


@pytest.mark.parametrize("oov", OOV)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("objective", ["kl", "0.9*kl + 0.1*ce + 0.5*lk", "topk_ce + 0.1*jsd"])
@pytest.mark.parametrize("weighted", ["no", "known", "by_chance"])
def test_fused_equals_plain(
    oov: Oov, dtype: torch.dtype, objective: str, weighted: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Logits as a tensor, and by a head that learns: fp32 to 1e-6 of the values' size; bf16 logits to 2e-2, the rounding
    of the stored gradient."""
    torch.manual_seed(4)
    r, w, d = 37, 128, 24
    teacher, _, _ = random_teacher(r, w, 2 * w, dtype)
    terms, row_R = parse_objective(objective), torch.rand(r)
    hidden_RD, weight_WD = (
        torch.randn(r, d).to(dtype).requires_grad_(),
        (torch.randn(w, d) / 5).to(dtype).requires_grad_(),
    )
    logits_RW = (hidden_RD @ weight_WD.T).detach().requires_grad_()
    plain = score_rows(logits_RW, teacher, terms, oov)
    wide_RW = logits_RW.detach().float()
    chance_R = (
        wide_RW.softmax(-1).gather(-1, teacher.label_R.clamp(min=0)[:, None])[:, 0].where(teacher.label_R >= 0, 0)
    )
    weight_R = {"no": torch.ones(r), "known": row_R, "by_chance": row_R * (1 - chance_R)}[weighted]
    weight: Any = {"no": None, "known": row_R, "by_chance": lambda chance_R: row_R * (1 - chance_R)}[weighted]
    sum_ = (plain.value_R * weight_R).sum()
    (want_RW,) = torch.autograd.grad(3 * sum_, logits_RW)
    near = {"rtol": 1e-6, "atol": 1e-6} if dtype == torch.float32 else {"rtol": 2e-2, "atol": 2e-2}
    for cached in (2 * w, 2**17):  # two rows per block and an odd one at the end; all
        monkeypatch.setattr(linear_loss, "CACHED", cached)
        total, scored = fused_score(logits_RW, teacher, terms, oov, weight)
        (got_RW,) = torch.autograd.grad(3 * total, logits_RW)
        torch.testing.assert_close(total, sum_, rtol=2e-6, atol=0)
        torch.testing.assert_close(got_RW, want_RW, **near)
        total, by_head = fused_score(ByHead(hidden_RD, weight_WD), teacher, terms, oov, weight)
        torch.testing.assert_close(total, sum_, rtol=2e-6 if dtype == torch.float32 else 2e-2, atol=0)
        got = torch.autograd.grad(3 * total, (hidden_RD, weight_WD))
        torch.testing.assert_close(got[0], want_RW @ weight_WD.detach(), **near)
        torch.testing.assert_close(got[1], want_RW.T @ hidden_RD.detach(), **near)
        for one in (scored, by_head):
            assert torch.equal(one.correct_R, plain.correct_R)
            torch.testing.assert_close(one.accept_R, plain.accept_R)
            torch.testing.assert_close(one.lost_R, plain.lost_R)


@pytest.mark.parametrize("captured", [False, True])
def test_a_bank_is_kept_where_it_is_read_again(captured: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows read once, or too many bytes: the teacher's logits are made of its states at every read, to the same figures."""
    torch.manual_seed(5)
    hidden_UD, table_VD, index_R = torch.randn(9, 8), torch.randn(30, 8), torch.randint(0, 9, (14,))
    log_z_U, top_U = (hidden_UD @ table_VD.T).logsumexp(-1), (hidden_UD @ table_VD.T).argmax(-1)
    capture = (log_z_U, top_U) if captured else (None, None)
    logits = ByHead(torch.randn(14, 8, requires_grad=True), torch.randn(30, 8))

    def made(reads: int) -> Teacher:
        states = ByHead(hidden_UD, table_VD)
        head = lambda h, ids: h @ table_VD.T  # noqa: E731
        return make_teacher(head, hidden_UD, *capture, None, None, states=states, reads=reads)

    kept, once = made(14), made(9)
    assert isinstance(kept.bank, Tensor) and isinstance(once.bank, ByHead)
    monkeypatch.setattr("draftsmith.losses.distill.BANK_BYTES", 9 * 30 * 4 - 1)
    assert isinstance(made(14).bank, ByHead)
    label_R = torch.randint(-1, 30, (14,))
    for bank in (kept, once):
        teacher = bank.rows(index_R, label_R)
        total, scored = fused_score(logits, teacher, ((1.0, "kl"),), "renormalise")
        plain = score_rows(logits.hidden_RD @ logits.weight_WD.T, teacher, ((1.0, "kl"),), "renormalise")
        torch.testing.assert_close(total, plain.value_R.sum())
        torch.testing.assert_close((scored.accept_R, scored.correct_R), (plain.accept_R, plain.correct_R))
        torch.testing.assert_close(scored.lost_R, plain.lost_R, atol=1e-6, rtol=0)
        tensor, _ = fused_score(logits.hidden_RD @ logits.weight_WD.T, teacher, ((1.0, "kl"),), "renormalise")
        torch.testing.assert_close(tensor, total)


def test_no_rows() -> None:
    teacher, _, _ = random_teacher(3, 4, 9)
    logits_RW = torch.zeros(0, 4, requires_grad=True)
    none = torch.zeros(0, dtype=torch.int64)
    total, scored = fused_score(logits_RW, teacher.rows(none, none), ((1.0, "kl"),), "renormalise")
    (grad,) = torch.autograd.grad(total, logits_RW)
    assert total.item() == 0 and grad.shape == (0, 4) and scored.accept_R.shape == (0,)


def test_expressions() -> None:
    assert parse_objective("0.9*kl + 0.1*ce") == ((0.9, "kl"), (0.1, "ce"))
    assert parse_objective("lk") == ((1.0, "lk"),)
    assert parse_objective("1e+1 * tv+2*kl") == ((10.0, "tv"), (2.0, "kl"))
    assert parse_objective("feature_smooth_l1 + 0.1*kl", features=True)[0] == (1.0, "feature_smooth_l1")


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("0.9*kll", "'kll', nearest is 'kl'"),
        ("reverse-kl", "cannot read 'reverse-kl'"),
        ("kl + kl", "twice"),
        ("0*kl", "positive"),
        ("1..2*kl", "no number"),
        ("", "cannot read ''"),
        ("kl + ", "cannot read ''"),
        ("kl + feature_smooth_l1", "needs predicted features, and medusa has none"),
    ],
)
def test_expressions_refused(text: str, words: str) -> None:
    with pytest.raises(ValueError, match="objective") as error:
        parse_objective(text, method="medusa")
    assert words in str(error.value)


def test_feature_loss_alone_is_refused() -> None:
    with pytest.raises(ValueError, match="no loss on tokens"):
        parse_objective("feature_smooth_l1", features=True)


def both_teachers(k: int, r: int = 30, w: int = 12, v: int = 40) -> tuple[Teacher, Teacher, Tensor, Tensor]:
    """The same rows told by all logits and by the k likeliest ids; p [R, V] and the draft ids. float64."""
    torch.manual_seed(7)
    dense, full_UV, ids_W = random_teacher(r, w, v, torch.float64)
    t2d_V = torch.full((v,), -1)
    t2d_V[ids_W] = torch.arange(w)
    log_p_UV = full_UV.log_softmax(-1)
    best = log_p_UV.topk(k, dim=-1)
    tail_U = (1 - best.values.exp().sum(-1)).clamp(min=0)
    top = make_top_teacher(best.indices, best.values, tail_U, best.indices[:, 0], t2d_V)
    return dense, top.rows(dense.index_R, dense.label_R), log_p_UV.exp()[dense.index_R], ids_W


@pytest.mark.parametrize("oov", OOV)
@pytest.mark.parametrize("name", sorted(set(ON_DISTRIBUTIONS) - {"topk_ce"}))
def test_all_ids_named_are_all_logits(name: str, oov: Oov) -> None:
    """k = V, in a reduced draft vocabulary: value, gradient and every metric of the dense teacher."""
    dense, top, _, _ = both_teachers(40)
    logits_RW = torch.randn(30, 12, dtype=torch.float64, requires_grad=True)
    (want, told), (got, other) = (fused_score(logits_RW, t, ((1.0, name),), oov) for t in (dense, top))
    torch.testing.assert_close(got, want, rtol=0, atol=1e-6)
    by = [torch.autograd.grad(x, logits_RW)[0] for x in (want, got)]
    torch.testing.assert_close(by[1], by[0], rtol=0, atol=1e-6)
    assert torch.equal(other.correct_R, told.correct_R)
    for field in ("accept_R", "lost_R"):
        torch.testing.assert_close(getattr(other, field), getattr(told, field), rtol=0, atol=1e-6)


@pytest.mark.parametrize("oov", OOV)
def test_likeliest_ids_of_a_reduced_vocabulary_by_words(oov: Oov) -> None:
    """Against the formula over classes, written out row by row: ids outside the draft vocabulary, and a tail of which the
    lower half's share lies inside."""
    k, (_, top, p_RV, ids_W) = 8, both_teachers(8)
    logits_RW = torch.randn(30, 12, dtype=torch.float64)
    total, scored = fused_score(logits_RW, top, ((1.0, "kl"),), oov)
    inside, want, some_outside = ids_W.tolist(), 0.0, 0
    for r in range(30):
        p, q = p_RV[r], logits_RW[r].softmax(-1)
        named = p.topk(k).indices.tolist()
        lower = named[k // 2 :]
        share = max(sum(float(p[i]) for i in lower if i in inside) / sum(float(p[i]) for i in lower), 1e-3)
        classes = [(float(p[i]), float(q[inside.index(i)])) for i in named if i in inside]
        some_outside += len(classes) < k
        classes.append((share * (1 - sum(float(p[i]) for i in named)), 1 - sum(x for _, x in classes)))
        mass = sum(x for x, _ in classes)
        assert float(scored.lost_R[r]) == pytest.approx(1 - mass, abs=1e-9)
        assert float(scored.accept_R[r]) == pytest.approx(sum(min(a, b) for a, b in classes), abs=1e-9)
        if oov == "mask" and named[0] not in inside:
            continue
        scale = 1.0 if oov == "tail" else mass
        value = sum(a / scale * math.log(a / scale / b) for a, b in classes)
        want += value - (mass * math.log(mass) if oov == "tail" else 0)
    assert some_outside > 10
    assert float(total) == pytest.approx(want, abs=1e-8)


def test_merged_classes_never_cost_more() -> None:
    """Data processing: with the whole vocabulary, KL, JSD and TV of k + 1 classes are at most the true ones, less so with
    more ids named, and acceptance is at least the true one."""
    torch.manual_seed(5)
    full_RV, logits_RV = 2 * torch.randn(20, 40), torch.randn(20, 40)
    log_p_RV, rows = full_RV.log_softmax(-1), torch.arange(20)
    dense = make_teacher(lambda h, ids: h, full_RV, None, None, None, None).rows(rows, rows)
    for name in ("kl", "jsd", "tv"):
        losses, accepts = [], []
        for k in (2, 10, 30):
            best = log_p_RV.topk(k, dim=-1)
            top = make_top_teacher(best.indices, best.values, 1 - best.values.exp().sum(-1), best.indices[:, 0], None)
            loss, scored = fused_score(logits_RV, top.rows(rows, rows), ((1.0, name),), "renormalise")
            losses.append(float(loss))
            accepts.append(float(scored.accept_R.sum()))
        loss, scored = fused_score(logits_RV, dense, ((1.0, name),), "renormalise")
        assert losses == sorted(losses) and losses[-1] <= float(loss) + 1e-5
        assert accepts == sorted(accepts, reverse=True) and accepts[-1] >= float(scored.accept_R.sum()) - 1e-5


def test_a_row_with_nothing_named_inside_stays_finite() -> None:
    t2d_V = torch.tensor([-1, -1, -1, 0, 1, 2])
    ids = torch.tensor([[0, 1]])
    top = make_top_teacher(ids, torch.tensor([[0.7, 0.2]]).log(), torch.tensor([0.1]), ids[:, 0], t2d_V)
    logits_RW = torch.randn(1, 3, requires_grad=True)
    for oov in OOV:
        for name in sorted(set(ON_DISTRIBUTIONS) - {"topk_ce"}):
            teacher = top.rows(torch.tensor([0]), torch.tensor([0]))
            total, scored = fused_score(logits_RW, teacher, ((1.0, name),), oov)
            (grad_RW,) = torch.autograd.grad(total, logits_RW)
            assert bool(total.isfinite()) and bool(grad_RW.isfinite().all()), (oov, name)
    assert not bool(scored.correct_R) and float(scored.lost_R) > 0.99
