"""Settings of any training run: what the loop and its parts take. Tests: `pytest tests/test_config.py`."""

from __future__ import annotations

from .consistency import ConsistencyRun
from .diffusion import DiffusionConfig
from .training import TrainConfig

RunConfig = TrainConfig | DiffusionConfig | ConsistencyRun
