"""How states are stored: full precision, 8 bits with a scale per token, 4 bits with a scale per group of channels; and
a teacher of its likeliest ids.

Residual streams have a few channels that are tens of times the rest (of SmolLM2-135M: median |h| 0.4 to 72 over the
channels of one layer). Under one scale per token these leave the others few of the levels, so that `int8` and `int4`
first divide every channel by its median over the shard. Of that model's layers 2, 15 and 27, relative to each channel's
own size, that takes the error of int8 from 6.3 % to 0.8 %, of int4 from 31 % to 9 %.

    int8   channel fp32 per shard; scale fp32 per token; x = code * scale * channel, |code| <= 127
    int4   the same with a bf16 scale per 32 channels, and codes -8..7: the value of a group that is largest by size has
           -8, so that the sign of the scale chooses on which side the sixteenth level lies (as llama.cpp's Q4_0)

Pure functions of tensors: nothing here knows of files. Tested by `pytest tests/test_formats.py`, bounds in float64.
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

Stored = Literal["bfloat16", "float16", "float32", "int8", "int4"]
DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}  # kept as they are
CHANNEL = ".channel"  # the part that a shard has once
GROUP = 32  # channels that share a scale of int4
SMALLEST = 1e-3  # of the stream's median channel: what a channel is divided by at least

# The defaults of training and of `draftsmith capture`: measured by tests/bench/cache.py.
STORED: Stored = "bfloat16"
TEACHER: Literal["last_hidden", "top_k"] = "last_hidden"
TOP_K = 64

Layout = dict[str, tuple[torch.dtype, tuple[int, ...]]]  # part -> dtype, shape; "" is the main one


def layout(stored: str, rows: int, shape: tuple[int, ...]) -> Layout:
    """The tensors that `rows` states [.., D] of a shard take, each with its dtype and shape."""
    if stored in DTYPES:
        return {"": (DTYPES[stored], (rows, *shape))}
    streams, groups = shape[:-1], -(-shape[-1] // GROUP)
    channel = {CHANNEL: (torch.float32, shape)}
    if stored == "int8":
        return {"": (torch.int8, (rows, *shape)), ".scale": (torch.float32, (rows, *streams))} | channel
    codes = (torch.uint8, (rows, *streams, groups * GROUP // 2))
    return {"": codes, ".scale": (torch.bfloat16, (rows, *streams, groups))} | channel


def row_bytes(stored: str, shape: tuple[int, ...]) -> int:
    """Bytes that one row of states takes."""
    return _bytes(stored, 1, shape) - _bytes(stored, 0, shape)


def shard_bytes(stored: str, shape: tuple[int, ...]) -> int:
    """Bytes beside the rows, once per shard."""
    return _bytes(stored, 0, shape)


def _bytes(stored: str, rows: int, shape: tuple[int, ...]) -> int:
    return sum(dtype.itemsize * torch.Size(size).numel() for dtype, size in layout(stored, rows, shape).values())


def channels(x_NXD: Tensor) -> Tensor:
    """fp32 [.., D], what each channel is divided by: its median size over the rows. Not its mean, which one token of a
    thousand times the usual size decides."""
    size_XD = x_NXD.abs().median(0).values.float() if len(x_NXD) else x_NXD.new_ones(x_NXD.shape[1:]).float()
    usual_X1 = size_XD.median(-1, keepdim=True).values
    size_XD = torch.maximum(size_XD, SMALLEST * usual_X1)
    return torch.where(size_XD > 0, size_XD, 1.0)


def encode(x_NXD: Tensor, stored: str) -> dict[str, Tensor]:
    """The parts of `layout`, of finite states [N, .., D] of a whole shard."""
    if stored in DTYPES:
        return {"": x_NXD.to(DTYPES[stored])}
    channel_XD = channels(x_NXD)
    x_NXD = x_NXD.float() / channel_XD
    if stored == "int8":
        scale_NX = x_NXD.abs().amax(-1) / 127
        codes_NXD = (x_NXD / _divisor(scale_NX)[..., None]).round_().clamp_(-127, 127).to(torch.int8)
        return {"": codes_NXD, ".scale": scale_NX, CHANNEL: channel_XD}
    x_NXGg = _grouped(x_NXD)
    largest_NXG1 = x_NXGg.gather(-1, x_NXGg.abs().argmax(-1, keepdim=True))
    scale_NXG = (largest_NXG1[..., 0] / -8).to(torch.bfloat16)
    codes_NXGg = (x_NXGg / _divisor(scale_NXG.float())[..., None]).round_().clamp_(-8, 7)
    low, high = (codes_NXGg + 8).to(torch.uint8).flatten(-2).chunk(2, dim=-1)
    return {"": low | (high << 4), ".scale": scale_NXG, CHANNEL: channel_XD}


def decode(parts: dict[str, Tensor], stored: str) -> Tensor:
    """[N, .., D] of some rows: as they were (full precision), else fp32."""
    codes = parts[""]
    if stored in DTYPES:
        return codes
    scale, channel_XD = parts[".scale"].float(), parts[CHANNEL]
    if stored == "int8":
        return codes.float().mul_(scale[..., None]).mul_(channel_XD)
    codes_NXC = torch.cat([codes & 15, codes >> 4], dim=-1).float().sub_(8)
    x_NXGg = _grouped(codes_NXC).mul_(scale[..., None])
    return x_NXGg.flatten(-2)[..., : channel_XD.shape[-1]] * channel_XD


def handed_out(stored: str) -> torch.dtype:
    """In what states are handed to a drafter: as they were, or in bf16, which is finer than 8 bits."""
    return DTYPES.get(stored, torch.bfloat16)


def _grouped(x_NXD: Tensor) -> Tensor:
    """[N, .., groups, GROUP], the last one filled up with zeros."""
    missing = -x_NXD.shape[-1] % GROUP
    if missing:
        x_NXD = torch.nn.functional.pad(x_NXD, (0, missing))
    return x_NXD.unflatten(-1, (x_NXD.shape[-1] // GROUP, GROUP))


def _divisor(scale: Tensor) -> Tensor:
    """Of a row of zeros the codes are zero, whatever they are divided by."""
    return torch.where(scale == 0, 1.0, scale)


# A teacher of its likeliest ids


def id_dtype(vocab: int) -> torch.dtype:
    """What holds a target id: 16 bits where they are enough (they wrap around zero)."""
    return torch.int16 if vocab <= 2**16 else torch.int32


def top_layout(rows: int, k: int, vocab: int) -> Layout:
    """The tensors of a top-k teacher of `rows` predictions."""
    k = min(k, vocab)
    return {
        ".ids": (id_dtype(vocab), (rows, k)),
        ".log_p": (torch.float16, (rows, k)),
        ".tail": (torch.float32, (rows,)),
    }


def top_bytes(k: int, vocab: int) -> int:
    """Bytes of one prediction."""
    return sum(dtype.itemsize * torch.Size(shape).numel() for dtype, shape in top_layout(1, k, vocab).values())


def encode_top(logits_RV: Tensor, log_z_R: Tensor, k: int) -> dict[str, Tensor]:
    """Of R rows of logits, whose log-sum-exp is known: the k likeliest ids, best first, the logs of their probabilities
    in fp16, and the probability of all others, summed and not what is left of 1. Writes over the logits."""
    vocab = logits_RV.shape[-1]
    best = logits_RV.topk(min(k, vocab), dim=-1)
    log_p_Rk = (best.values - log_z_R[:, None]).clamp(min=torch.finfo(torch.float16).min)
    rest_R = logits_RV.scatter_(-1, best.indices, float("-inf")).logsumexp(-1)
    tail_R = (rest_R - log_z_R).exp().float()
    return {".ids": best.indices.to(id_dtype(vocab)), ".log_p": log_p_Rk.to(torch.float16), ".tail": tail_R}


def decode_top(parts: dict[str, Tensor]) -> tuple[Tensor, Tensor, Tensor]:
    """Target ids int32 [R, k], logs of their probabilities fp32 [R, k] and the mass fp32 [R] of all others. What fp16
    rounded is scaled so that all of it is 1 again."""
    ids_Rk, tail_R = parts[".ids"].to(torch.int32), parts[".tail"]
    if parts[".ids"].dtype == torch.int16:
        ids_Rk &= 0xFFFF
    log_p_Rk = parts[".log_p"].float()
    log_p_Rk = log_p_Rk + ((-tail_R).log1p() - log_p_Rk.logsumexp(-1))[:, None]
    return ids_Rk, log_p_Rk, tail_R
