"""SiLU(gate) * up in one go, forward only, for few rows.

Shazeer, "GLU Variants Improve Transformer" (arXiv:2002.05202). Rounds as transformers' modules do: SiLU in fp32, to the
model's dtype, then the product. Gate and up may be the two halves of one product's rows.
Test: pytest tests/test_kernels.py -k swiglu
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from .jit import Build, jit, runs_on, tl, triton

BLOCK = 1024  # columns of a program


def swiglu_reference(gate: Tensor, up: Tensor) -> Tensor:
    """The plain form."""
    return F.silu(gate) * up


@jit
def swiglu_kernel(gate_ptr, up_ptr, out_ptr, F, stride_gate, stride_up, BLOCK: tl.constexpr):
    """Grid (rows, columns / BLOCK)."""
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < F
    gate = tl.load(gate_ptr + row * stride_gate + column, mask=inside, other=0.0)
    dtype = gate.dtype
    gate = gate.to(tl.float32)
    up = tl.load(up_ptr + row * stride_up + column, mask=inside, other=0.0).to(tl.float32)
    silu = (gate / (1.0 + tl.exp(-gate))).to(dtype).to(tl.float32)
    tl.store(out_ptr + row * F + column, silu * up, mask=inside)


BUILDS = tuple(
    Build(
        swiglu_kernel,
        {"gate_ptr": kind, "up_ptr": kind, "out_ptr": kind, "F": "i32", "stride_gate": "i32", "stride_up": "i32"},
        {"BLOCK": BLOCK},
    )
    for kind in ("*bf16", "*fp32")
)


def swiglu_triton(gate: Tensor, up: Tensor, block: int = BLOCK) -> Tensor:
    """The kernel; rows may have any stride but within themselves."""
    f = gate.shape[-1]
    sides = [x.reshape(-1, f) for x in (gate, up)]
    gate_MF, up_MF = (x if x.stride(1) == 1 else x.contiguous() for x in sides)
    out = torch.empty(gate.shape, dtype=gate.dtype, device=gate.device)
    if len(gate_MF):
        swiglu_kernel[len(gate_MF), triton.cdiv(f, block)](
            gate_MF, up_MF, out, f, gate_MF.stride(0), up_MF.stride(0), BLOCK=block
        )
    return out


def swiglu(gate: Tensor, up: Tensor) -> Tensor:
    """SiLU(gate) * up, both [..., F]. On GPUs without gradients, which the plain form keeps.

    Raises ValueError where shapes or dtypes differ.
    """
    if gate.shape != up.shape or gate.dtype != up.dtype:
        raise ValueError(f"swiglu: gate {tuple(gate.shape)} of {gate.dtype}, up {tuple(up.shape)} of {up.dtype}")
    graded = torch.is_grad_enabled() and (gate.requires_grad or up.requires_grad)
    if gate.dtype != torch.float64 and not graded and runs_on(gate, up):
        return swiglu_triton(gate, up)
    return swiglu_reference(gate, up)
