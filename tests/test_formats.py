"""How states are stored: errors bounded in float64, outliers, bytes, and the teacher of its likeliest ids.

Run: pytest tests/test_formats.py
"""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from draftsmith.data.formats import (
    DTYPES,
    GROUP,
    channels,
    decode,
    decode_top,
    encode,
    encode_top,
    handed_out,
    id_dtype,
    layout,
    row_bytes,
    shard_bytes,
    top_bytes,
    top_layout,
)

QUANTISED = ("int8", "int4")
SHAPES = ((3, 48), (2, 33), (32,), (1, 6))


def states(n: int = 200, shape: tuple[int, ...] = (3, 48), seed: int = 0) -> Tensor:
    """Like a residual stream: channels of very different size, one of them huge, and a first token far above all."""
    dice = torch.Generator().manual_seed(seed)
    x_NXD = torch.randn(n, *shape, generator=dice) * torch.rand(*shape, generator=dice).add(0.3)
    x_NXD[..., 4] *= 80
    x_NXD[0, ..., 2] = 25_000
    return x_NXD


@pytest.mark.parametrize("stored", [*DTYPES, *QUANTISED])
@pytest.mark.parametrize("shape", SHAPES)
def test_parts_are_as_laid_out(stored: str, shape: tuple[int, ...]) -> None:
    for rows in (0, 1, 7):
        parts = encode(states(7, shape)[:rows], stored)
        want = layout(stored, rows, shape)
        assert {part: (x.dtype, tuple(x.shape)) for part, x in parts.items()} == want
        taken = sum(x.numel() * x.element_size() for x in parts.values())
        assert taken == rows * row_bytes(stored, shape) + shard_bytes(stored, shape)
        assert decode(parts, stored).shape == (rows, *shape)
    assert row_bytes("int8", (3, 576)) == 3 * (576 + 4) and row_bytes("int4", (3, 576)) == 3 * (288 + 36)


@pytest.mark.parametrize("stored", QUANTISED)
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_every_value_is_within_half_a_step(stored: str, shape: tuple[int, ...], dtype: torch.dtype) -> None:
    """In float64, from the values alone. int8: half of a 127th of the token's largest, in units of the channels. int4: of
    an 8th of the group's largest half again, and a whole one for a value that would have code 8; the scale, in bf16, is
    off by up to 2**-9, eight times."""
    x_NXD = states(150, shape).to(dtype)
    back_NXD = decode(encode(x_NXD, stored), stored).double()
    channel_XD = channels(x_NXD).double()
    z_NXD, back_NXD = x_NXD.double() / channel_XD, back_NXD / channel_XD
    off_NXD = (back_NXD - z_NXD).abs()
    if stored == "int8":
        bound_NXD = (z_NXD.abs().amax(-1, keepdim=True) / 127 * 0.5).expand_as(z_NXD)
    else:
        missing = -shape[-1] % GROUP
        z_NXGg = torch.nn.functional.pad(z_NXD, (0, missing)).unflatten(-1, (-1, GROUP))
        largest_NXG1 = z_NXGg.gather(-1, z_NXGg.abs().argmax(-1, keepdim=True))
        step_NXG1 = largest_NXG1.abs() / 8
        beyond_NXGg = z_NXGg / -largest_NXG1 * 8 > 7.5 - 0.05
        bound_NXGg = step_NXG1 * torch.where(beyond_NXGg, 1.0, 0.5) + 8 * 2.0**-9 * step_NXG1
        bound_NXD = bound_NXGg.flatten(-2)[..., : shape[-1]]
    rounding_NXD = 1e-5 * z_NXD.abs().amax(-1, keepdim=True)  # products in fp32
    assert bool((off_NXD <= bound_NXD + rounding_NXD).all())
    assert float((off_NXD / bound_NXD.clamp(min=1e-12)).max()) > 0.9  # and no finer


def test_huge_channels_do_not_cost_the_others() -> None:
    """Relative to each channel's own size; the plain form, one scale and no channels, is several times worse."""
    x_NXD = states()
    size_XD = x_NXD.abs().median(0).values

    def error(back_NXD: Tensor) -> float:
        return float(
            ((back_NXD - x_NXD)[1:] / size_XD).square().mean().sqrt() / (x_NXD[1:] / size_XD).square().mean().sqrt()
        )

    ours = {stored: error(decode(encode(x_NXD, stored), stored)) for stored in QUANTISED}
    scale_NX1 = x_NXD.abs().amax(-1, keepdim=True) / 127
    plain = error((x_NXD / scale_NX1).round() * scale_NX1)
    assert ours["int8"] < 0.012 and ours["int4"] < 0.11 and plain > 10 * ours["int8"]


@pytest.mark.parametrize("stored", QUANTISED)
def test_zeros_and_dead_channels(stored: str) -> None:
    x_NXD = states(20)
    x_NXD[3] = 0
    x_NXD[:, 1] = 0  # a whole stream
    x_NXD[:, :, 7] = 0
    x_NXD[5, :, 7] = 3.0  # a channel whose median is 0
    back_NXD = decode(encode(x_NXD, stored), stored)
    assert bool(back_NXD.isfinite().all()) and not back_NXD[3].any() and not back_NXD[:5, :, 7].any()
    torch.testing.assert_close(back_NXD[5, 0, 7], torch.tensor(3.0), rtol=0.01, atol=0)


@pytest.mark.parametrize("stored", QUANTISED)
def test_a_row_depends_on_its_own_codes(stored: str) -> None:
    """Any span of a shard decodes as it does within the whole."""
    parts = encode(states(), stored)
    whole_NXD = decode(parts, stored)
    some = {part: x if part == ".channel" else x[50:61] for part, x in parts.items()}
    assert torch.equal(decode(some, stored), whole_NXD[50:61])
    assert handed_out(stored) == torch.bfloat16 and handed_out("float32") == torch.float32


def test_full_precision_is_left_alone() -> None:
    x_NXD = states().bfloat16()
    assert torch.equal(decode(encode(x_NXD, "bfloat16"), "bfloat16"), x_NXD)


@pytest.mark.parametrize("vocab", [40, 256])
def test_the_likeliest_ids(vocab: int) -> None:
    """Against a softmax in float64; a tail of all that is left comes from the logits, not from 1 - p."""
    torch.manual_seed(0)
    logits_RV = 4 * torch.randn(30, vocab, dtype=torch.float64)
    logits_RV[0, 3] = 60.0  # a certain row: what is left of 1 would be 0 in fp32
    p_RV = logits_RV.softmax(-1)
    for k in (1, 8, 40):
        parts = encode_top(logits_RV.clone(), logits_RV.logsumexp(-1), k)
        assert {part: (x.dtype, tuple(x.shape)) for part, x in parts.items()} == top_layout(30, k, vocab)
        assert sum(x.numel() * x.element_size() for x in parts.values()) == 30 * top_bytes(k, vocab)
        ids_Rk, log_p_Rk, tail_R = decode_top(parts)
        want = p_RV.topk(k, dim=-1)
        assert torch.equal(ids_Rk.long(), want.indices)
        tail = 1 - want.values.sum(-1)
        torch.testing.assert_close(tail_R.double()[1:], tail[1:], rtol=1e-6, atol=1e-12)
        if k < vocab:
            assert 0 < float(tail_R[0]) < 1e-8
        # fp16 keeps 11 bits of the logarithm.
        torch.testing.assert_close(log_p_Rk.double(), want.values.log(), rtol=2.0**-10, atol=5e-3)
        torch.testing.assert_close(log_p_Rk.exp().sum(-1) + tail_R, torch.ones(30), rtol=0, atol=1e-6)


def test_ids_beyond_fifteen_bits() -> None:
    ids = torch.tensor([0, 32_767, 32_768, 65_535])
    logits_RV = torch.full((4, 2**16), -50.0)
    logits_RV[torch.arange(4), ids] = 1.0
    parts = encode_top(logits_RV, torch.zeros(4), 1)
    assert parts[".ids"].dtype == torch.int16 and decode_top(parts)[0][:, 0].tolist() == ids.tolist()
    assert id_dtype(2**16 + 1) == torch.int32
