"""Cases of kernels/norm.py for kernel_proof.py."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from kernel_proof import Case

from draftsmith.kernels.norm import add_norm, add_norm_reference


def cases(dtype: torch.dtype) -> Iterator[Case]:
    torch.manual_seed(0)
    for shape in ((5, 33), (1, 64), (0, 32), (2, 3, 48)):
        x, other, weight_D = (
            torch.randn(shape).to(dtype),
            torch.randn(shape).to(dtype),
            torch.randn(shape[-1]).to(dtype),
        )
        for residual in (None, other):
            yield Case(
                f"{shape}{'' if residual is None else ' and a residual'}",
                lambda x=x, w=weight_D, r=residual: tuple(add_norm(x, w, 1e-5, r)),
                lambda x=x, w=weight_D, r=residual: tuple(add_norm_reference(x, w, 1e-5, r)),
                atol=2e-6 if dtype == torch.float32 else 8e-3,  # an ulp of 4 to 8 (fp16): rounding to the other side
            )
    heads_MED, weight_ED = torch.randn(2, 3, 5, 24).to(dtype)[:, :, :4], torch.randn(4, 24).to(dtype)  # side by side
    for name, x in (("heads of their own weights", heads_MED), ("heads apart", heads_MED.transpose(0, 1))):
        yield Case(
            name,
            lambda x=x: tuple(add_norm(x, weight_ED, 1e-5)),
            lambda x=x: tuple(add_norm_reference(x, weight_ED, 1e-5)),
            atol=2e-6 if dtype == torch.float32 else 8e-3,
        )
    for learns in range(3):  # gradients take the plain form
        given = [torch.randn(shape).to(dtype) for shape in ((3, 20), (20,), (3, 20))]
        given[learns].requires_grad_()
        yield Case(
            f"gradients by argument {learns}",
            lambda given=given, i=learns: torch.autograd.grad(add_norm(*given[:2], 1e-5, given[2])[0].sum(), given[i]),
            lambda given=given, i=learns: torch.autograd.grad(
                add_norm_reference(*given[:2], 1e-5, given[2])[0].sum(), given[i]
            ),
            atol=0,
        )
    tiny_MD = torch.full((2, 40), 1e-4).to(dtype)  # squares of 1e-8, beneath eps and fp16's smallest
    wide_MD = torch.randn(40, 3).to(dtype).T  # columns apart
    for name, x in (("small next to eps", tiny_MD), ("columns apart", wide_MD)):
        one_D = torch.ones(40, dtype=dtype)
        yield Case(
            name,
            lambda x=x, w=one_D: tuple(add_norm(x, w, 1e-6)),
            lambda x=x, w=one_D: tuple(add_norm_reference(x, w, 1e-6)),
            atol=1e-6 if dtype == torch.float32 else 2e-3,
        )
