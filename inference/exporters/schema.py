"""What a schema is: the form in which a merged denoiser is written, so that an engine loads it as a model of its own.

Weights, names of tensors and tokenizer are the base model's; a schema adds what its config.json says beside them, and
refuses by name what it has no word for: an engine would run such a model, and decode nonsense. No code is written into
a folder: engines have these models themselves. Our own facts stand under `draftsmith` in every schema.

Tests: tests/test_merge.py iterates over the table `SCHEMAS`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from ...models.diffusion import ObjectiveConfig
from ...models.drafter import TargetFacts


@dataclass(frozen=True)
class Schema:
    """`keys(objective, mask_id)`: what config.json says beside the base's own settings. `faults(facts, config, objective,
    mask_id)`: what the schema cannot say, one sentence each, of the base's facts and config.json. `limits(mask_id, block)`:
    what engines do otherwise, for the card. `mask_token`: the mask's text where the tokenizer has none."""

    name: str
    form: str
    loads: str
    mask_token: str
    keys: Callable[[ObjectiveConfig, int], dict[str, Any]]
    faults: Callable[[TargetFacts, Mapping[str, Any], ObjectiveConfig, int], list[str]]
    limits: Callable[[int, int], tuple[str, ...]]
    serve: Callable[[str], dict[str, str]]

    def refuse(self, facts: TargetFacts, config: Mapping[str, Any], objective: ObjectiveConfig, mask_id: int) -> None:
        """ValueError with everything that this schema cannot say of the model."""
        if faults := self.faults(facts, config, objective, mask_id):
            raise ValueError(
                f"schema {self.name} cannot say what this model is: {'; '.join(faults)}. Use --schema plain, or keep the "
                "adapters as they are"
            )


def block_faults(
    facts: TargetFacts, config: Mapping[str, Any], objective: ObjectiveConfig, *, family: str, shift: bool
) -> list[str]:
    """What block-causal schemas of one architecture have in common: blocks counted from the text's start, finished
    blocks and open ones seen whole, plain RoPE and attention."""
    faults = []
    if facts.family != family:
        faults.append(f"its layers are {family}'s, the base is of family {facts.family}")
    if objective.shift != shift:
        faults.append(
            f"its rows predict the {'next' if shift else 'own'} token, this model has shift = {objective.shift}"
        )
    for name, needed in (
        ("layout", "pair"),
        ("clean", "block"),
        ("inside", "full"),
        ("origin", "document"),
        ("dual", False),
    ):
        if (value := getattr(objective, name)) != needed:
            faults.append(f"objective.{name} = {value}, it means {needed}")
    if "sliding_attention" in (config.get("layer_types") or ()) or config.get("use_sliding_window"):
        faults.append("it has no sliding windows")
    if facts.rope["rope_type"] != "default":
        faults.append(f"RoPE of type {facts.rope['rope_type']}")
    if facts.activation != "silu":
        faults.append(f"activation {facts.activation}, it has silu")
    return faults
