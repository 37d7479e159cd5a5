"""Triton where it is installed, and whether it takes given tensors; what is compiled ahead of time.

A kernel file says `from .jit import Build, jit, runs_on, tl`. Without Triton it is imported all the same and its plain
form does the work. Interpreted (TRITON_INTERPRET=1 before the first import) kernels run on CPU tensors, for tests.

Test: pytest tests/test_kernels.py
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

try:
    import triton
    import triton.language as tl

    jit: Any = triton.jit
except ImportError:  # no Triton for this system: kernels are never launched
    triton = tl = None

    def jit(kernel: Callable[..., Any]) -> Any:
        return kernel


INTERPRETED = triton is not None and os.environ.get("TRITON_INTERPRET") == "1"


def runs_on(*tensors: Tensor | None) -> bool:
    """Whether a Triton kernel takes these tensors: all on a GPU, or any while interpreted.

    The interpreter computes garbage from bf16 without a word (wrong `dot`, truncating stores): TypeError.
    """
    given = [x for x in tensors if x is not None]
    if INTERPRETED:
        if any(x.dtype == torch.bfloat16 for x in given):
            raise TypeError("Triton's interpreter computes bf16 wrongly; give it fp32 or fp16")
        return True
    return triton is not None and all(x.is_cuda for x in given)


@dataclass(frozen=True)
class Build:
    """One configuration of a kernel, to be compiled without a GPU."""

    kernel: Any
    """The function under `@jit`."""
    types: dict[str, str]
    """Type of each parameter that is no constant: "*bf16", "*fp32", "*i64", "i32", "fp32" ... Pointers are taken to be
    aligned to 16 bytes."""
    constants: dict[str, Any]
    """Value of each `tl.constexpr` parameter; a pointer that is left out is given as None here."""
    warps: int = 4
    stages: int = 3
    dots: bool = False
    """It multiplies matrices: tensor-core instructions are to be found."""
    aligned: tuple[str, ...] = field(default=())
    """Integer parameters that are multiples of 16."""
