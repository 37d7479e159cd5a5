"""Captured states held against a fresh pass of the target, for a few samples.

A folder's fields say what its states belong to; they cannot know of weights that were changed where the fingerprint does
not look, or of rows that a foreign writer put in another order. Taps and last hidden states are compared row by row,
each channel in units of its own usual size; the teacher by its log-sum-exp, and by its probabilities where these were
kept. A row is off when it differs by more than the format rounds and the target's own arithmetic varies between batches
(measured on SmolLM2-135M in bf16: up to 1.2 % by layer 27); a tenth of a sample's rows may be, at least one: int8 gives
few levels to what stands beside the huge values of a first token.

Tested by `pytest tests/test_capture.py -k verif`.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ..data.encode import Sample
from ..data.packing import collate
from ..data.states import StateStore
from ..models.target import Target

ROUNDED = {"float32": 0.0, "bfloat16": 0.005, "float16": 0.001, "int8": 0.03, "int4": 0.2}  # of a row, relative
COMPUTED = {torch.float64: 1e-3, torch.float32: 1e-3}  # else HALF: what other batches change
HALF = 0.06


@torch.no_grad()
def verify_states(target: Target, store: StateStore, samples: Sequence[Sample], count: int) -> None:
    """Compare `count` samples, spread over all of them.

    Raises:
        ValueError: a sample's states are not what the target computes; names the sample and what differs.
    """
    usable = [s for s in store.usable(samples) if len(s) > 1]
    step = max(len(usable) // count, 1) if count else 1
    for sample in usable[::step][:count]:
        differs = difference(target, store, sample)
        if differs:
            raise ValueError(
                f"{store.folder.name}: sample {sample.sample_id} is not what {target.facts.name} computes now: {differs}; "
                "capture into another folder, or delete this one"
            )


def difference(target: Target, store: StateStore, sample: Sample) -> str | None:
    """What of a sample's states is not as a fresh pass has it; None = nothing."""
    batch = collate([sample]).to(target.device)
    kept, fields = store.fill(batch), store.fields
    fresh = target.forward(batch.ids_BT, batch.positions_BT, taps=store.taps)
    noise = COMPUTED.get(target.dtype, HALF)
    streams: dict[str, tuple[Tensor, Tensor, str]] = {}
    if kept.taps_BTPD is not None and fresh.taps_BTPD is not None:
        for i, k in enumerate(store.taps):
            streams[f"h[{k}]"] = kept.taps_BTPD[0, :, i], fresh.taps_BTPD[0, :, i], fields.stored
    if kept.last_hidden_BTD is not None:
        streams["last_hidden"] = kept.last_hidden_BTD[0], fresh.last_hidden_BTD[0], fields.last_stored
    for name, (got_TD, want_TD, stored) in streams.items():
        off_T = apart(got_TD, want_TD)
        if too_many(off_T, noise + ROUNDED[stored]):
            return f"{name} differs by {float(off_T.median()):.1%} in the middle row"
    assert kept.log_z_BT is not None and kept.top_BT is not None
    told_T = kept.top_BT[0] >= 0
    if not bool(told_T.any()):
        return None
    logits_RV = target.head(fresh.last_hidden_BTD[0, told_T]).float()
    log_z_R = logits_RV.logsumexp(-1)
    off_R = (log_z_R - kept.log_z_BT[0, told_T]).abs()
    if too_many(off_R, noise * 10):
        return f"the log-sum-exp of its logits differs by {float(off_R.median()):.3g}"
    if kept.likeliest is not None:
        p_RK = (logits_RV.gather(-1, kept.likeliest.ids_BTK[0, told_T].long()) - log_z_R[:, None]).exp()
        off_R = (p_RK - kept.likeliest.log_p_BTK[0, told_T].exp()).abs().sum(-1)
        if too_many(off_R, noise * 5 + 0.005):
            return f"the probabilities of its likeliest tokens differ by {float(off_R.median()):.1%}"
    return None


def apart(got_TD: Tensor, want_TD: Tensor) -> Tensor:
    """[T] how far each row is off, relative to its size, every channel in units of its mean size."""
    want_TD = want_TD.float()
    usual_D = want_TD.abs().mean(0)
    usual_D = usual_D.clamp(min=1e-3 * float(usual_D.mean()) or 1.0)
    got_TD, want_TD = got_TD.float() / usual_D, want_TD / usual_D
    return (got_TD - want_TD).norm(dim=-1) / want_TD.norm(dim=-1).clamp(min=1e-30)


def too_many(off_X: Tensor, bound: float) -> bool:
    """Whether more than a tenth of the rows, and more than one, are beyond the bound (or are no numbers)."""
    return int((~(off_X <= bound)).sum()) > max(1, len(off_X) // 10)
