"""Settings of `train/fit_decision_heads.py`. Tests: `pytest tests/test_decision_folder.py`."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from ..data.sources import DataConfig
from ..models.decision_heads import FilterConfig, PairsConfig
from .training import TargetConfig


@dataclass(frozen=True)
class HeadsConfig:
    """One training of the two decision heads."""

    init_from: str
    """Exported adapters (folder) of the model that they are for; the heads are written into it."""
    method: Literal["decision_heads"] = "decision_heads"
    """Set by the script."""
    target: TargetConfig = field(default_factory=TargetConfig)
    """The target that the adapters convert."""
    data: DataConfig = field(default_factory=DataConfig)
    """Answers of the model's own; every tenth conversation is held out."""
    blocks: int = 4096
    """Noisy blocks to learn from (ours)."""
    epochs: int = 8
    """Passes over the data at most, each with noise of its own, until there are so many blocks."""
    row_length: int = 1024
    """Tokens per forward of the model."""
    filter: FilterConfig = field(default_factory=FilterConfig)
    """The unmask filter (strategy `learned`)."""
    pairs: PairsConfig = field(default_factory=PairsConfig)
    """The predictor of pairs (strategy `independent`)."""
    seed: int = 0
    """Seed of initial weights and noise."""
    device: str = "auto"
    """`cpu`, `cuda`, ...; `auto` = a GPU if there is one."""

    def __post_init__(self) -> None:
        for name in ("blocks", "epochs", "row_length"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, got {getattr(self, name)}")
        if self.data.max_length > self.row_length:
            raise ValueError(f"data.max_length={self.data.max_length} does not fit row_length={self.row_length}")
