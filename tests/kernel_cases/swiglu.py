"""Cases of kernels/swiglu.py for kernel_proof.py."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from kernel_proof import Case

from draftsmith.kernels.swiglu import swiglu, swiglu_reference, swiglu_triton


def cases(dtype: torch.dtype) -> Iterator[Case]:
    torch.manual_seed(0)
    for rows, width in ((5, 300), (1, 257), (0, 64)):
        both = torch.randn(rows, 2 * width).to(dtype)
        both[:1, 0], both[:1, 1] = -1e4, 1e4  # exp of neither may spoil the product
        both[:1, width : width + 2] = 1
        gate, up = both.chunk(2, -1)  # rows two widths apart
        # an ulp of values up to 16; in fp16 the two large ones are exact
        atol = 2e-6 if dtype == torch.float32 else 8e-3
        yield Case(
            f"{rows} rows of {width}",
            lambda g=gate, u=up: (swiglu(g, u),),
            lambda g=gate, u=up: (swiglu_reference(g, u),),
            atol,
        )
        yield Case(
            f"{rows} rows of {width} in blocks",
            lambda g=gate, u=up: (swiglu_triton(g, u, 64),),
            lambda g=gate, u=up: (swiglu_reference(g, u),),
            atol,
        )
