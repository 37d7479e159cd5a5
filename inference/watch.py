"""Whether modules are what they were: a captured step reads the memory that their tensors had, and hears no hooks.

Part of inference/ahead.py. Test: pytest tests/test_device_step.py -k stale
"""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from ..models.lean import mark

ADAPTER = ("_disable_adapters", "_active_adapter", "scaling")  # what decides about an adapter beside its tensors


class Watch:
    """Remembers, of some modules and all inside them, which there are, where each parameter and buffer lies and how often
    it was written to, and which adapters are on. No tensor's values are read."""

    def __init__(self, *roots: nn.Module) -> None:
        modules: list[Any] = list({id(m): m for root in roots for m in root.modules()}.values())
        self._modules = modules
        self._children = [(m._modules, dict(m._modules)) for m in modules if m._modules]
        owned = [own for m in modules for own in (m._parameters, m._buffers)]
        self._counts = [(own, len(own)) for own in owned]
        self._tensors: list[tuple[dict[str, Tensor | None], str, Tensor, tuple[int, int]]] = [
            (own, name, x, mark(x)) for own in owned for name, x in own.items() if x is not None
        ]
        self._adapters = [(m, _adapter(m)) for m in modules if hasattr(m, ADAPTER[0])]

    def changed(self) -> bool:
        """Whether something was replaced, moved, written to, added or taken away, or an adapter was turned on or off."""
        return (
            any(now != then for now, then in self._children)
            or any(len(own) != count for own, count in self._counts)
            or any(own.get(name) is not x or mark(x) != then for own, name, x, then in self._tensors)
            or any(_adapter(m) != then for m, then in self._adapters)
        )

    def heard(self) -> bool:
        """Whether something listens to one of the modules."""
        return any(m._forward_hooks or m._forward_pre_hooks for m in self._modules)


def _adapter(module: Any) -> str:
    return repr([getattr(module, name, None) for name in ADAPTER])
