"""How much a training step multiplies per token, for the share of the device's peak that it reaches (MFU).

Counted as `draftsmith plan` does: one micro-batch of the recipe's own code on shapes (models/outline.py), forward and backward,
with every pass of the target that is part of a step. Work on padding is left out by counting real tokens only, and nothing
is recomputed in the count. Tests: `pytest tests/test_train.py`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from accelerate import Accelerator
from transformers.integrations import is_deepspeed_zero3_enabled

from ..configs.parse import one_line
from ..configs.runs import RunConfig
from ..models.target import Target
from .plan_run import Text, Work, build
from .plan_trace import trace
from .stream import Stream
from .timing import peak_flops


def flops_per_token(
    config: RunConfig, target: Target, stream: Stream, accelerator: Accelerator, say: Callable[..., None]
) -> float | None:
    """Operations per token of this recipe's first micro-batch; None where no peak is stated for the device or the arithmetic,
    or where the recipe cannot be counted, which is said and ends nothing."""
    if config.precision != "bf16" or not peak_flops(accelerator.device) or is_deepspeed_zero3_enabled():
        return None  # under ZeRO-3, what is built of shapes would be cut over processes
    try:
        return counted(config, target.model.config, stream)
    except Exception as error:  # an estimate beside the training, on whatever a method does with shapes
        say(f"speed/mfu is left out: {type(error).__name__}: {one_line(error)[:200]}")
        return None


def counted(config: RunConfig, target_config: Any, stream: Stream) -> float:
    batch = stream.window(0, 0)[0]
    nothing = Text([], 0, None, 0.0, "")
    work = Work(config, config.target.name, target_config, nothing, stream.world)
    _, step, _ = trace(lambda outline: build(work, outline), batch, config.precision, kept_gradients=False)
    return step.flops / batch.ids_BT.numel()
