"""The table of objectives, and expressions over it: `objective: 0.9*kl + 0.1*ce`.

To add a loss, write its function in `distill.py` and its line here. Test: pytest tests/test_losses.py
"""

from __future__ import annotations

import difflib
import math
import re

from .distill import ON_DISTRIBUTIONS, ON_FEATURES

LOSSES: dict[str, str] = {
    "ce": "cross-entropy with the data's token",
    "kl": "KL(target || drafter): full soft targets",
    "reverse_kl": "KL(drafter || target)",
    "jsd": "Jensen-Shannon divergence",
    "tv": "total variation, 1 - expected acceptance",
    "l1": "sum |p - q|, twice tv (DeepSpec)",
    "neg_log_accept": "-log of the expected acceptance (LK losses)",
    "lk": "adaptive mix of KL and TV (LK losses)",
    "topk_ce": "cross-entropy over the target's ten likeliest tokens (HASS)",
    "feature_smooth_l1": "smooth-L1 between predicted and true features (EAGLE-1, HASS)",
}

Objective = tuple[tuple[float, str], ...]
_TERM = re.compile(r"(?:(?P<factor>[0-9.eE+-]+)\s*\*\s*)?(?P<name>[A-Za-z_][A-Za-z0-9_]*)")


def parse_objective(expression: str, *, features: bool = False, method: str = "this method") -> Objective:
    """`"0.9*kl + 0.1*ce"` -> ((0.9, "kl"), (0.1, "ce")). Terms are joined by `+`; a factor is a positive number.

    `features`: the method predicts target features, so that feature losses may be named. Raises ValueError with the
    offending text and, for an unknown name, the nearest valid one.
    """
    terms: list[tuple[float, str]] = []
    for text in re.split(r"(?<![0-9.][eE])\+", expression):
        match = _TERM.fullmatch(text.strip())
        if match is None:
            raise ValueError(
                f"objective: cannot read {text.strip()!r} in {expression!r}; write terms like 0.9*kl + 0.1*ce"
            )
        name = match["name"]
        if name not in LOSSES:
            near = difflib.get_close_matches(name, LOSSES, n=1, cutoff=0.0)[0]
            raise ValueError(f"objective: unknown loss {name!r}, nearest is {near!r}; there are {', '.join(LOSSES)}")
        if name in ON_FEATURES and not features:
            raise ValueError(f"objective: {name} needs predicted features, and {method} has none; remove it")
        try:
            factor = float(match["factor"] or 1)
        except ValueError:
            raise ValueError(f"objective: {match['factor']!r} in {expression!r} is no number") from None
        if not math.isfinite(factor) or factor <= 0:
            raise ValueError(f"objective: the factor of {name} must be positive and finite, got {match['factor']}")
        if any(name == other for _, other in terms):
            raise ValueError(f"objective: {name} stands twice in {expression!r}; write it once")
        terms.append((factor, name))
    if not any(name in ON_DISTRIBUTIONS for _, name in terms):
        raise ValueError(f"objective: {expression!r} has no loss on tokens; add one, for example kl")
    return tuple(terms)
