"""A check of settings that no parser has looked at: those from JSON files and from Python. Test: pytest tests/test_diffusion.py"""

from __future__ import annotations

import dataclasses
import typing
from typing import Any


def check_choices(settings: Any, section: str) -> None:
    """Raises ValueError, naming value and choices, where a field of a dataclass holds none of its `Literal`'s values."""
    hints = typing.get_type_hints(type(settings))
    for field in dataclasses.fields(settings):
        if typing.get_origin(hints[field.name]) is typing.Literal:
            value, allowed = getattr(settings, field.name), typing.get_args(hints[field.name])
            if value not in allowed:
                raise ValueError(f"{section}.{field.name} must be one of {', '.join(allowed)}, got {value!r}")
