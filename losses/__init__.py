"""Pure functions: per-token values, then one reduction. `objective.py` holds the table `LOSSES`."""

from .objective import LOSSES, parse_objective

__all__ = ["LOSSES", "parse_objective"]
