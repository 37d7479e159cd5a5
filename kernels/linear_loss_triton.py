"""The kernels of linear_loss.py: fp32 logits in registers, three passes over tiles of rows and ids.

`_statistics` and `_sums` go over one span of ids per program (spans depend on T and W alone, so that sums are the same
from run to run); `_slopes` writes the slopes of `chunk` rows in the dtype of the states, which two products of matrices
then turn into gradients.

Test: pytest tests/test_kernels.py -k linear_loss
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from .jit import INTERPRETED, Build, jit, tl
from .linear_loss_rules import FLOOR, Dense, FromHidden, Job, Sums, TopK, Walked, accepted, fold, sums_of

_TILE = {"BT": 64, "BW": 64, "BD": 64}  # rows, ids, width; with eight warps nothing spills
_SMALL_TILE = {"BT": 16, "BW": 32, "BD": 16}


@jit
def _logits(hidden, weight, bias, row_T, col_W, has_T, has_W, D, scale, BT: tl.constexpr, BW: tl.constexpr, BD: tl.constexpr):  # fmt: skip
    """fp32 [BT, BW] of some rows and ids, times `scale`."""
    z_TW = tl.zeros((BT, BW), tl.float32)
    for d in range(0, D, BD):
        at_D = d + tl.arange(0, BD)
        h_TD = tl.load(hidden + row_T[:, None] * D + at_D[None, :], has_T[:, None] & (at_D < D)[None, :], 0.0)
        w_DW = tl.load(weight + col_W[None, :] * D + at_D[:, None], has_W[None, :] & (at_D < D)[:, None], 0.0)
        z_TW = tl.dot(h_TD, w_DW, z_TW, input_precision="ieee")
    if bias is not None:
        z_TW += tl.load(bias + col_W, has_W, 0.0).to(tl.float32)[None, :]
    return z_TW * scale


@jit
def _told(
    teacher, weight, bias, row_T, col_W, has_T, has_W, W, D, scale, KIND: tl.constexpr,
    BT: tl.constexpr, BW: tl.constexpr, BD: tl.constexpr,
):  # fmt: skip
    """fp32 [BT, BW] logits of the teacher, times `scale`."""
    if KIND == "hidden":
        z_TW = _logits(teacher, weight, bias, row_T, col_W, has_T, has_W, D, scale, BT, BW, BD)
    else:
        at_TW = row_T[:, None] * W + col_W[None, :]
        z_TW = tl.load(teacher + at_TW, has_T[:, None] & has_W[None, :], 0.0).to(tl.float32) * scale
    return z_TW


@jit
def _online(most_T, total_T, z_TW):
    """Running maximum, and sum of exponentials relative to it, after another tile; what the old sum was scaled by."""
    new_T = tl.maximum(most_T, tl.max(z_TW, 1))
    shrink_T = tl.exp(most_T - new_T)
    return new_T, total_T * shrink_T + tl.sum(tl.exp(z_TW - new_T[:, None]), 1), shrink_T


@jit
def _statistics(
    hidden, weight, bias, teacher, teacher_weight, teacher_bias, ids, label, out, label_z, ids_z,
    T, W, D, E, K, span, scale, KIND: tl.constexpr, BT: tl.constexpr, BW: tl.constexpr, BD: tl.constexpr,
):  # fmt: skip
    """Of BT rows over one span of ids, into out [spans, 9, T]: maximum, sum of exponentials, their sum weighed by the
    logit's distance from the maximum, likeliest id; maximum, sum and likeliest id of the teacher; maximum and sum over
    the ids that a top-k teacher does not name. Logits at the label and at those ids go to `label_z` and `ids_z`."""
    row_T = tl.program_id(0).to(tl.int64) * BT + tl.arange(0, BT)
    has_T = row_T < T
    label_T = tl.load(label + row_T, has_T, -1)
    most_T = tl.full((BT,), -1e30, tl.float32)
    total_T, tilt_T, best_T = tl.zeros((BT,), tl.float32), tl.zeros((BT,), tl.float32), tl.zeros((BT,), tl.float32)
    other_T = tl.full((BT,), -1e30, tl.float32)
    sum_T, chosen_T = tl.zeros((BT,), tl.float32), tl.zeros((BT,), tl.float32)
    rest_T, rest_sum_T = tl.full((BT,), -1e30, tl.float32), tl.zeros((BT,), tl.float32)
    first = tl.program_id(1) * span
    for lo in range(first, tl.minimum(first + span, W), BW):
        col_W = lo + tl.arange(0, BW).to(tl.int64)
        has_W = col_W < W
        z_TW = _logits(hidden, weight, bias, row_T, col_W, has_T, has_W, D, scale, BT, BW, BD)
        z_TW = tl.where(has_W[None, :], z_TW, -1e30)
        hit_TW = col_W[None, :] == label_T[:, None]
        tl.store(label_z + row_T, tl.sum(tl.where(hit_TW, z_TW, 0.0), 1), has_T & (label_T >= lo) & (label_T < lo + BW))
        best_T = tl.where(tl.max(z_TW, 1) > most_T, (lo + tl.argmax(z_TW, 1)).to(tl.float32), best_T)
        old_T, before_T = most_T, total_T
        most_T, total_T, shrink_T = _online(most_T, total_T, z_TW)
        away_TW = tl.maximum(z_TW - most_T[:, None], -1e4)  # a banned id's -inf times 0 is no number
        tilt_T = shrink_T * (tilt_T + before_T * (old_T - most_T)) + tl.sum(tl.exp(z_TW - most_T[:, None]) * away_TW, 1)
        if KIND == "topk":
            for k in range(K):
                id_T = tl.load(ids + row_T * K + k, has_T, -1)
                hit_TW = col_W[None, :] == id_T[:, None]
                here_T = has_T & (id_T >= lo) & (id_T < tl.minimum(lo + BW, W))
                tl.store(ids_z + row_T * K + k, tl.sum(tl.where(hit_TW, z_TW, 0.0), 1), here_T)
            for k in range(K):
                id_T = tl.load(ids + row_T * K + k, has_T, -1)
                z_TW = tl.where(col_W[None, :] == id_T[:, None], -1e30, z_TW)
            new_T = tl.maximum(rest_T, tl.max(z_TW, 1))
            e_TW = tl.where(z_TW > -1e29, tl.exp(z_TW - new_T[:, None]), 0.0)
            rest_sum_T = rest_sum_T * tl.exp(rest_T - new_T) + tl.sum(e_TW, 1)
            rest_T = new_T
        elif KIND != "none":
            z_TW = _told(
                teacher, teacher_weight, teacher_bias, row_T, col_W, has_T, has_W, W, E, scale, KIND, BT, BW, BD
            )
            z_TW = tl.where(has_W[None, :], z_TW, -1e30)
            chosen_T = tl.where(tl.max(z_TW, 1) > other_T, (lo + tl.argmax(z_TW, 1)).to(tl.float32), chosen_T)
            other_T, sum_T, shrink_T = _online(other_T, sum_T, z_TW)
    at = out + tl.program_id(1) * 9 * T + row_T
    tl.store(at, most_T, has_T)
    tl.store(at + T, total_T, has_T)
    tl.store(at + 2 * T, tilt_T, has_T)
    tl.store(at + 3 * T, best_T, has_T)
    if KIND == "topk":
        tl.store(at + 7 * T, rest_T, has_T)
        tl.store(at + 8 * T, rest_sum_T, has_T)
    elif KIND != "none":
        tl.store(at + 4 * T, other_T, has_T)
        tl.store(at + 5 * T, sum_T, has_T)
        tl.store(at + 6 * T, chosen_T, has_T)


@jit
def _bend(log_q, log_p):
    """(r, m) of the slopes' formula, and m - r without the rounding of an r that a log of 0 makes 1e4."""
    r = log_q - log_p
    near = 0.6931471805599453 - tl.log(1.0 + tl.exp(-tl.abs(r)))
    return r, near + tl.minimum(r, 0.0), near - tl.maximum(r, 0.0)


@jit
def _sums(
    hidden, weight, bias, teacher, teacher_weight, teacher_bias, log_z, log_y, log_m, out, T, W, D, E, span, scale,
    KIND: tl.constexpr, BT: tl.constexpr, BW: tl.constexpr, BD: tl.constexpr,
):  # fmt: skip
    """Of BT rows over one span of ids, into out [spans, 7, T]: the sums of `Sums` but for the mass, in their order.
    `log_m`: what the teacher's true p is more than the one given, as a logarithm."""
    row_T = tl.program_id(0).to(tl.int64) * BT + tl.arange(0, BT)
    has_T = row_T < T
    log_z_T, log_y_T = tl.load(log_z + row_T, has_T, 0.0), tl.load(log_y + row_T, has_T, 0.0)
    accept_T, below_T, kl_T = tl.zeros((BT,), tl.float32), tl.zeros((BT,), tl.float32), tl.zeros((BT,), tl.float32)
    reverse_T, p_part_T, q_part_T = tl.zeros_like(accept_T), tl.zeros_like(accept_T), tl.zeros_like(accept_T)
    true_T, mass_T = tl.zeros_like(accept_T), tl.exp(tl.load(log_m + row_T, has_T, 0.0))
    first = tl.program_id(1) * span
    for lo in range(first, tl.minimum(first + span, W), BW):
        col_W = lo + tl.arange(0, BW).to(tl.int64)
        has_W = col_W < W
        q_TW = _logits(hidden, weight, bias, row_T, col_W, has_T, has_W, D, scale, BT, BW, BD) - log_z_T[:, None]
        p_TW = _told(teacher, teacher_weight, teacher_bias, row_T, col_W, has_T, has_W, W, E, scale, KIND, BT, BW, BD)
        log_q_TW = tl.where(has_W[None, :], tl.maximum(q_TW, -1e4), -1e4)
        log_p_TW = tl.where(has_W[None, :], tl.maximum(p_TW - log_y_T[:, None], -1e4), -1e4)
        q_TW, p_TW = tl.exp(log_q_TW), tl.exp(log_p_TW)
        r_TW, m_TW, other_TW = _bend(log_q_TW, log_p_TW)
        accept_T += tl.sum(tl.minimum(p_TW, q_TW), 1)
        true_T += tl.sum(tl.minimum(p_TW * mass_T[:, None], q_TW), 1)
        below_T += tl.sum(tl.where(r_TW < 0, q_TW, 0.0), 1)
        kl_T -= tl.sum(p_TW * r_TW, 1)
        reverse_T += tl.sum(q_TW * r_TW, 1)
        p_part_T += tl.sum(p_TW * other_TW, 1)
        q_part_T += tl.sum(q_TW * m_TW, 1)
    at = out + tl.program_id(1) * 7 * T + row_T
    tl.store(at, accept_T, has_T)
    tl.store(at + T, below_T, has_T)
    tl.store(at + 2 * T, kl_T, has_T)
    tl.store(at + 3 * T, reverse_T, has_T)
    tl.store(at + 4 * T, p_part_T, has_T)
    tl.store(at + 5 * T, q_part_T, has_T)
    tl.store(at + 6 * T, true_T, has_T)


@jit
def _slopes(
    hidden, weight, bias, teacher, teacher_weight, teacher_bias, ids, log_p, label, numbers, out, start, stop,
    T, W, D, E, K, scale, KIND: tl.constexpr, BT: tl.constexpr, BW: tl.constexpr, BD: tl.constexpr,
):  # fmt: skip
    """Slopes by the logits of rows start..stop, into out [stop - start, W]. `numbers` [11, T]: log-sum-exps of both
    sides, log of the drafter's and the teacher's rest, and the seven numbers of `fold`."""
    row_T = start + tl.program_id(0).to(tl.int64) * BT + tl.arange(0, BT)
    has_T = row_T < stop
    col_W = tl.program_id(1).to(tl.int64) * BW + tl.arange(0, BW)
    has_W = col_W < W
    at = numbers + row_T
    log_q_TW = _logits(hidden, weight, bias, row_T, col_W, has_T, has_W, D, scale, BT, BW, BD)
    log_q_TW = tl.maximum(log_q_TW - tl.load(at, has_T, 0.0)[:, None], -1e4)
    slope_TW = tl.load(at + 4 * T, has_T, 0.0)[:, None] + tl.load(at + 8 * T, has_T, 0.0)[:, None] * log_q_TW
    share_TW = log_q_TW * 0.0  # log of the id's part of its class
    class_TW, log_p_TW = log_q_TW, log_q_TW
    if KIND == "topk":
        rest_T, other_T = tl.load(at + 2 * T, has_T, 0.0), tl.load(at + 3 * T, has_T, 0.0)
        class_TW, log_p_TW = rest_T[:, None] + share_TW, other_T[:, None] + share_TW
        share_TW = log_q_TW - rest_T[:, None]
        for k in range(K):
            hit_TW = col_W[None, :] == tl.load(ids + row_T * K + k, has_T, -1)[:, None]
            class_TW = tl.where(hit_TW, log_q_TW, class_TW)
            log_p_TW = tl.where(hit_TW, tl.load(log_p + row_T * K + k, has_T, 0.0).to(tl.float32)[:, None], log_p_TW)
            share_TW = tl.where(hit_TW, 0.0, share_TW)
    elif KIND != "none":
        log_p_TW = _told(
            teacher, teacher_weight, teacher_bias, row_T, col_W, has_T, has_W, W, E, scale, KIND, BT, BW, BD
        )
        log_p_TW = tl.maximum(log_p_TW - tl.load(at + T, has_T, 0.0)[:, None], -1e4)
    if KIND != "none":
        r_TW, m_TW, _ = _bend(class_TW, log_p_TW)
        slope_TW += tl.load(at + 5 * T, has_T, 0.0)[:, None] * r_TW + tl.load(at + 6 * T, has_T, 0.0)[:, None] * m_TW
        slope_TW += tl.where(r_TW < 0, tl.load(at + 7 * T, has_T, 0.0)[:, None], 0.0)
    slope_TW *= tl.exp(log_q_TW)
    if KIND != "none":
        slope_TW += tl.load(at + 9 * T, has_T, 0.0)[:, None] * tl.exp(log_p_TW + share_TW)
    hit_TW = col_W[None, :] == tl.load(label + row_T, has_T, -1)[:, None]
    slope_TW += tl.where(hit_TW, tl.load(at + 10 * T, has_T, 0.0)[:, None], 0.0)
    at_TW = (row_T - start)[:, None] * W + col_W[None, :]
    tl.store(out + at_TW, slope_TW.to(out.dtype.element_ty), has_T[:, None] & has_W[None, :])


def walk_kernels(
    job: Job, hidden_TD: Tensor, weight_WD: Tensor, bias_W: Tensor | None, weight_T: Tensor | None
) -> Walked:
    """`walk_chunks` of linear_loss.py by kernels."""
    hidden_TD, weight_WD = hidden_TD.detach().contiguous(), weight_WD.detach().contiguous()
    (T, D), W, device = hidden_TD.shape, len(weight_WD), hidden_TD.device
    tile: dict[str, Any] = dict(_SMALL_TILE if INTERPRETED else _TILE)
    launch: dict[str, Any] = tile if INTERPRETED else tile | {"num_warps": 8, "num_stages": 3}
    blocks_T, blocks_W = -(-T // tile["BT"]), -(-W // tile["BW"])
    span = tile["BW"] * -(-blocks_W // max(1, min(blocks_W, 512 // blocks_T)))
    grid = (blocks_T, -(-W // span))
    none_T = torch.full((T,), -1, dtype=torch.int64, device=device)
    label_T = none_T if job.label_T is None else job.label_T.contiguous()
    scale, teacher, kind, E, K = 1 / job.temperature, job.teacher, "none", D, 0
    told: list[Tensor | None] = [None, None, None]
    ids_TK: Tensor | None = None
    log_p_TK: Tensor | None = None
    log_p_TC: Tensor | None = None
    if isinstance(teacher, FromHidden):
        kind, E = "hidden", teacher.hidden_UD.shape[1]
        told = [
            teacher.states(slice(None)).detach().contiguous(),
            teacher.weight_WD.detach().contiguous(),
            teacher.bias_W,
        ]
    elif isinstance(teacher, Dense):
        kind, told[0] = "dense", teacher.logits(slice(None)).detach().contiguous()
    elif isinstance(teacher, TopK):
        kind, K = "topk", teacher.ids_TK.shape[1]
        ids_TK = teacher.ids_TK.contiguous()
        log_p_TC = teacher.log_classes(slice(None)).float()
        log_p_TK = log_p_TC[:, :-1].contiguous()

    def fresh(*shape: int) -> Tensor:
        return torch.zeros(*shape, device=device)

    part_SFT, label_z_T, ids_z_TK = fresh(grid[1], 9, T), fresh(T), fresh(T, max(K, 1))
    _statistics[grid](
        hidden_TD, weight_WD, bias_W, *told, ids_TK, label_T, part_SFT, label_z_T, ids_z_TK, T, W, D, E, K, span, scale,
        KIND=kind, **launch,
    )  # fmt: skip
    most_ST, total_ST, tilt_ST, best_ST, other_ST, sum_ST, chosen_ST, rest_ST, rest_sum_ST = part_SFT.unbind(1)
    most_T, at_T = most_ST.max(0)
    share_ST = (most_ST - most_T).exp()
    total_T = (total_ST * share_ST).sum(0)
    log_z_T = most_T + total_T.log()
    # Entropy: log of the sum minus the mean distance from the maximum.
    entropy_T = total_T.log() - (share_ST * (tilt_ST + total_ST * (most_ST - most_T))).sum(0) / total_T
    top_T = best_ST.gather(0, at_T[None])[0].long()
    ce_T = torch.where(label_T >= 0, log_z_T - label_z_T, 0)
    numbers_FT = fresh(11, T)
    numbers_FT[0] = log_z_T
    sums, match_T, log_mass_T = None, torch.zeros(T, dtype=torch.bool, device=device), fresh(T)
    if isinstance(teacher, TopK):
        assert ids_TK is not None and log_p_TC is not None
        inside_TK = ids_TK >= 0
        numbers_FT[2] = ((rest_ST + rest_sum_ST.log()).logsumexp(0) - log_z_T).clamp(min=FLOOR)
        numbers_FT[3] = log_p_TC[:, -1]
        log_q_TK = (ids_z_TK - log_z_T[:, None]).masked_fill(~inside_TK, FLOOR).clamp(min=FLOOR)
        log_q_TC = torch.cat([log_q_TK, numbers_FT[2][:, None]], 1)
        p_TC, true_TC = log_p_TC.exp(), None
        if teacher.log_mass_T is not None:
            log_mass_T = teacher.log_mass_T.float()
            true_TC = None if teacher.tail else p_TC * log_mass_T.exp()[:, None]
        sums = sums_of(log_q_TC, log_p_TC, log_q_TC.exp(), p_TC, job.used, true_TC)
        match_T = top_T == teacher.top_of(slice(None))
    elif teacher is not None:
        log_y_T = (other_ST + sum_ST.log()).logsumexp(0)
        mass_T, rest_T = torch.ones_like(log_y_T), log_mass_T
        if teacher.log_z_T is not None:
            log_mass_T = rest_T = (log_y_T - teacher.log_z_T.float()).clamp(max=0)
            if teacher.tail:
                log_y_T, mass_T, rest_T = log_y_T - log_mass_T, log_mass_T.exp(), torch.zeros_like(log_mass_T)
        numbers_FT[1] = log_y_T
        sums_SFT = fresh(grid[1], 7, T)
        _sums[grid](
            hidden_TD,
            weight_WD,
            bias_W,
            *told,
            log_z_T,
            log_y_T,
            rest_T,
            sums_SFT,
            T,
            W,
            D,
            E,
            span,
            scale,
            KIND=kind,
            **launch,
        )
        sums = Sums(mass_T, *sums_SFT.sum(0))
        match_T = top_T == chosen_ST.gather(0, other_ST.argmax(0)[None])[0].long()
    value_T, a = fold(job, sums, ce_T, entropy_T, job.label_T, weight_T)
    for i, x_T in enumerate(a[:7]):  # the eighth is of a term that comes by chunks
        if x_T is not None:
            numbers_FT[4 + i] = x_T
    grads = job.new_grads(hidden_TD, weight_WD, bias_W)
    if any(grads.wanted):
        slope_TW = torch.empty(min(job.chunk, T), W, dtype=hidden_TD.dtype, device=device)
        for lo in range(0, T, job.chunk):
            hi = min(lo + job.chunk, T)
            _slopes[(-(-(hi - lo) // tile["BT"]), blocks_W)](
                hidden_TD, weight_WD, bias_W, *told, ids_TK, log_p_TK, label_T, numbers_FT, slope_TW, lo, hi,
                T, W, D, E, K, scale, KIND=kind, **launch,
            )  # fmt: skip
            grads.add(slice(lo, hi), slope_TW[: hi - lo], hidden_TD, weight_WD)
    accept_T = torch.zeros_like(ce_T) if sums is None else accepted(sums)
    return Walked(value_T, ce_T, entropy_T, accept_T, top_T, match_T, log_mass_T, grads)


_STATES = dict.fromkeys(("hidden", "weight"), "*bf16")
_SIZES = dict.fromkeys(("T", "W", "D", "E"), "i32") | {"scale": "fp32"}
_TEACHER = dict.fromkeys(("teacher", "teacher_weight"), "*bf16")
_STATISTICS = {"label": "*i64", "out": "*fp32", "label_z": "*fp32", "ids_z": "*fp32", "K": "i32", "span": "i32"}
_SUMS = {"log_z": "*fp32", "log_y": "*fp32", "log_m": "*fp32", "out": "*fp32", "span": "i32"}
_SLOPES = {"label": "*i64", "numbers": "*fp32", "out": "*bf16", "start": "i32", "stop": "i32", "K": "i32"}
_TOP = {"ids": "*i64", "log_p": "*fp32"}
_NO_BIAS: dict[str, Any] = {"bias": None, "teacher_bias": None}
_NO_TEACHER: dict[str, Any] = dict.fromkeys(("teacher", "teacher_weight"))
_NO_TOP: dict[str, Any] = dict.fromkeys(("ids", "log_p"))
_HIDDEN, _TOPK = _TILE | _NO_BIAS | {"KIND": "hidden"}, _TILE | _NO_BIAS | _NO_TEACHER | {"KIND": "topk"}
_WIDTHS = ("D", "E", "W")


def _build(kernel: Any, types: dict[str, str], constants: dict[str, Any]) -> Build:
    return Build(kernel, _STATES | types | _SIZES, constants, warps=8, dots=True, aligned=_WIDTHS)


BUILDS = (
    _build(_statistics, _TEACHER | _STATISTICS, _HIDDEN | {"ids": None}),
    _build(_statistics, {"ids": "*i64"} | _STATISTICS, _TOPK),
    _build(_sums, _TEACHER | _SUMS, _HIDDEN),
    _build(_slopes, _TEACHER | _SLOPES, _HIDDEN | _NO_TOP),
    _build(_slopes, _TOP | _SLOPES, _TOPK),
)
