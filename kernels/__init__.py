"""Fused operators and counter-based random numbers. Each file: plain PyTorch, and a kernel where one pays.

To add a kernel: a file here, a line in `KERNELS`, its cases in tests/kernel_cases/. Test: pytest tests/test_kernels.py
"""

from __future__ import annotations

from dataclasses import dataclass
from importlib import import_module
from typing import Any


@dataclass(frozen=True)
class Kernel:
    """Where a kernel's parts are; nothing is imported before it is asked for."""

    file: str
    """kernels/<file>.py, the home of the names below."""
    wrapper: str
    """The public function: picks the form per call."""
    reference: str
    """Plain PyTorch, the definition."""
    builds: str = "BUILDS"
    """Tuple of `jit.Build`: what is compiled ahead of time."""

    def load(self, name: str) -> Any:
        """One of the names: `entry.load(entry.wrapper)`."""
        return getattr(import_module(f".{self.file}", __name__), name)


KERNELS: dict[str, Kernel] = {
    "linear_loss": Kernel("linear_loss", wrapper="linear_loss", reference="reference"),
    "tree_attention": Kernel("tree_attention", wrapper="tree_attention", reference="reference"),
    "verify": Kernel("verify", wrapper="verify", reference="reference"),
    "compact": Kernel("compact", wrapper="compact", reference="reference"),
    "unmask": Kernel("unmask", wrapper="unmask", reference="unmask_reference"),
    "topk": Kernel("topk", wrapper="topk", reference="topk_reference"),
    "norm": Kernel("norm", wrapper="add_norm", reference="add_norm_reference"),
    "rope": Kernel("rope", wrapper="rope_write", reference="rope_write_reference"),
    "swiglu": Kernel("swiglu", wrapper="swiglu", reference="swiglu_reference"),
    "medusa_heads": Kernel("medusa_heads", wrapper="medusa_heads", reference="medusa_heads_reference"),
}
