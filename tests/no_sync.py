"""A guard for tests: inside it, whatever would make a GPU's host wait, or ask it for a value, fails where it stands."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

# Operators, overloads left out. `_local_scalar_dense` is item(), and so int(), float(), bool() and a tensor as an index
# of a list.
ASKING = {
    "_local_scalar_dense",
    "nonzero",
    "masked_select",
    "equal",
    "unique_dim",
    "_unique",
    "_unique2",
    "unique_consecutive",
    "bincount",
}
BY_INDEX = {"index", "index_put", "index_put_", "_index_put_impl_"}
READING = ("tolist", "numpy", "cpu")  # beside the dispatcher
COPYING = ("tensor", "as_tensor", "from_numpy")  # from the host's memory

_paused = [False]


class Asked(AssertionError):
    """The device was asked for a value."""


class _Watch(TorchDispatchMode):
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.__name__.split(".")[0]
        if _paused[0]:
            return func(*args, **(kwargs or {}))
        if name in ASKING or func.__name__ == "repeat_interleave.Tensor":
            raise Asked(f"aten.{func.__name__} waits for the device")
        if name in BY_INDEX and any(x is not None and x.dtype in (torch.bool, torch.uint8) for x in args[1]):
            raise Asked(f"aten.{func.__name__} by a mask asks the device how many it shows")
        return func(*args, **(kwargs or {}))


def _refusal(owner: Any, name: str) -> Any:
    plain = getattr(owner, name)

    def refused(*args: Any, **kwargs: Any) -> Any:
        if _paused[0]:
            return plain(*args, **kwargs)
        raise Asked(f"{name} waits for the device")

    return refused


@contextmanager
def paused() -> Iterator[None]:
    """Inside the guard: what follows would run on the device (a kernel, which the interpreter runs here)."""
    before, _paused[0] = _paused[0], True
    try:
        yield
    finally:
        _paused[0] = before


@contextmanager
def no_sync() -> Iterator[None]:
    """Refuses, at the place, item(), tolist(), int(), float() and bool() of a tensor, nonzero, indexing by a mask,
    torch.tensor and their like."""
    with pytest.MonkeyPatch.context() as patch:
        for name in READING:
            patch.setattr(Tensor, name, _refusal(Tensor, name))
        for name in COPYING:
            patch.setattr(torch, name, _refusal(torch, name))
        with _Watch():
            yield
