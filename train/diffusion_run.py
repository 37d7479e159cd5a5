"""What the two diffusion trainings share: their data, and their export. Tests: `pytest tests/test_convert_diffusion.py`."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ..configs.diffusion import DiffusionConfig
from ..data.encode import Sample
from ..data.sources import Conversation
from ..inference.adapter_folder import save_adapters
from ..inference.exporters.layout import RunFacts
from ..models.adapters import Adapters
from .tuning import Tuning


def refuse_without_order(samples: Sequence[Sample]) -> None:
    """Raises ValueError when a sample does not say in which order its answer was decided."""
    if lacking := sum(s.order is None for s in samples):
        raise ValueError(
            f"{lacking} of {len(samples)} samples do not say in which order they were decided, which this training hides them "
            "in; let the model answer with `draftsmith rollout --adapters FOLDER --order true`"
        )


def denoiser_tuning(config: DiffusionConfig, module: Any, adapters: Adapters) -> Tuning:
    """The training of a denoiser: `module` under these settings. Its export is its adapters."""

    def check(talks: Sequence[Conversation], samples: Sequence[Sample]) -> None:
        if module.passes.objective.draw == "latest":
            refuse_without_order(samples)

    def save(folder: Path, facts: RunFacts) -> Path:
        return save_adapters(folder, config.method, module.objective, adapters, facts)

    return Tuning(config, module, adapters, check, save)
