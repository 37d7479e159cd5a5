"""Weights in eight bits for decoding: int8 numbers and a scale per output row, symmetric, nothing to install.

    target = load_target("smollm2", weights="int8")     # or target.round_weights("int8")

What is rounded are the seven projections of every layer and the output head, the largest matrix; not the embedding, which
is read by rows (a tied head gets weights of its own). A row's scale is its largest weight over 127, rounded up to a value
that bfloat16 holds, so that every path computes with exactly the same matrix: plain decoding, verification, and
transformers' own `generate`. The rounded model is another model: its answers are its own, and speculation is exact to it.

Products of few rows read the eight bits themselves on a CPU (`_weight_int8pack_mm`: fp32 sums, one scale, one rounding);
wider ones multiply by the numbers in the target's dtype, which holds them exactly, and scale what comes out. On a GPU that
halves memory, and takes no less time. For decoding only: no gradients, no adapters (models/quantize.py has what those
train on).

Test: pytest tests/test_int8.py
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Literal

import torch
from torch import Tensor, nn
from torch.nn.functional import linear

Weights = Literal["full", "int8"]
Product = Callable[[Tensor], Tensor]

DTYPES = (torch.bfloat16, torch.float32, torch.float64)  # what hold the scales; float16 has too few exponents
NARROW = 4  # rows of one tile of the packed product; SmolLM2's layers, bf16 against int8: 1 row 8.2 / 7.5 ms, 4 rows
# 9.3 / 7.6, 5 rows 10.0 / 10.5, 64 rows 36 / 88
NOTE = (
    "weights=int8: the drafter was trained beside the full weights and drafts for rounded ones; answers are those of the "
    "rounded model, acceptance may be lower"
)

NO_GRADIENTS = "weights = int8 is for decoding, and a gradient is wanted here: load the target with weights=full"


def check_weights(weights: str, dtype: torch.dtype) -> None:
    """Raises ValueError for an unknown form of weights, and for a dtype that int8 is not made for."""
    if weights not in ("full", "int8"):
        raise ValueError(f"weights = {weights!r}: use full or int8")
    if weights == "int8" and dtype not in DTYPES:
        raise ValueError(f"weights = int8 computes in bfloat16, float32 or float64, not {dtype}: choose another dtype")


def rounded(weight_VD: Tensor) -> tuple[Tensor, Tensor]:
    """int8 [V, D] and scales [V], in the dtype of `weight_VD`: no weight is off by more than half of its row's scale."""
    dtype, weight_VD = weight_VD.dtype, weight_VD.detach().to(torch.promote_types(weight_VD.dtype, torch.float32))
    exact_V = weight_VD.abs().amax(1).float() / 127
    scale_V = exact_V.bfloat16()
    up_V = (scale_V.float() < exact_V).to(torch.int16)
    scale_V = (scale_V.view(torch.int16) + up_V).view(torch.bfloat16)
    scale_V = torch.where(scale_V == 0, 1, scale_V)  # a row of zeros
    return torch.round(weight_VD / scale_V[:, None]).clamp_(-127, 127).to(torch.int8), scale_V.to(dtype)


def has_packed(x: Tensor) -> bool:
    """Whether PyTorch multiplies `x` by int8 rows without unpacking them. Its kernels take whole vectors, and read beyond
    the end of rows that are none (NaN at a width of 33)."""
    return x.device.type == "cpu" and x.dtype in (torch.bfloat16, torch.float32) and x.shape[-1] % 32 == 0


def int8_product(q_VD: Tensor, scale_V: Tensor, bias_V: Tensor | None = None, wide: Product | None = None) -> Product:
    """x [X, D] -> x W^T + b, where W = scale * q; `wide`: x -> x q^T by a copy of `q_VD` in x's dtype, for many rows.

    Which way is taken depends on X alone, so that rows of passes of one width have the same bits.
    """

    def product(x_XD: Tensor) -> Tensor:
        if 0 < len(x_XD) <= NARROW and has_packed(x_XD):
            y_XV = torch.ops.aten._weight_int8pack_mm(x_XD.contiguous(), q_VD, scale_V)
        else:
            y_XV = (linear(x_XD, q_VD.to(x_XD.dtype)) if wide is None else wide(x_XD)) * scale_V
        return y_XV if bias_V is None else y_XV + bias_V

    return product


class Int8Linear(nn.Module):
    """A linear module with rounded weights, in the place of the one it was made from."""

    def __init__(self, q_VD: Tensor, scale_V: Tensor, bias_V: Tensor | None) -> None:
        super().__init__()
        self.q = nn.Parameter(q_VD, requires_grad=False)
        self.scale = nn.Parameter(scale_V, requires_grad=False)
        self.bias = None if bias_V is None else nn.Parameter(bias_V, requires_grad=False)
        self.out_features, self.in_features = q_VD.shape

    @staticmethod
    @torch.no_grad()
    def of(module: nn.Linear) -> Int8Linear:
        """Rounded from a plain linear module."""
        return Int8Linear(*rounded(module.weight), None if module.bias is None else module.bias.detach())

    def rows(self, ids_W: Tensor) -> Int8Linear:
        """The output rows `ids_W` alone."""
        return Int8Linear(self.q[ids_W], self.scale[ids_W], None if self.bias is None else self.bias[ids_W])

    @property
    def weight(self) -> Tensor:
        """[V, D] what the numbers stand for, made anew, in the target's dtype."""
        return self.q.to(self.scale.dtype) * self.scale[:, None]

    def forward(self, x: Tensor) -> Tensor:
        """[..., D] -> [..., V]. Raises ValueError where a gradient would flow."""
        if torch.is_grad_enabled() and x.requires_grad:
            raise ValueError(NO_GRADIENTS)
        product = int8_product(self.q, self.scale.to(x.dtype), self.bias)
        return product(x.reshape(-1, x.shape[-1])).view(*x.shape[:-1], -1)


def joined(modules: Sequence[Int8Linear]) -> tuple[Tensor, Tensor, Tensor | None]:
    """Numbers, scales and bias of modules of one input, their outputs side by side; the numbers share the modules'
    memory."""
    if len(modules) == 1:
        (only,) = modules
        return only.q.detach(), only.scale.detach(), None if only.bias is None else only.bias.detach()
    q_VD = torch.cat([module.q.detach() for module in modules])
    scale_V = torch.cat([module.scale.detach() for module in modules])
    bias_V = None
    if any(module.bias is not None for module in modules):
        biases = [m.scale.new_zeros(len(m.scale)) if m.bias is None else m.bias.detach() for m in modules]
        bias_V = torch.cat(biases)
    if not any(module.q.is_inference() for module in modules):
        for module, part in zip(modules, q_VD.split([module.out_features for module in modules]), strict=True):
            module.q.data = part
    return q_VD, scale_V, bias_V
