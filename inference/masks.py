"""`draftsmith masks`: print samples with the tokens that are trained on coloured, and counts. Loads no weights.

    draftsmith masks --target smollm2 --data.source answers.jsonl --count 3

Tested by `pytest tests/test_data_masks.py`.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from rich.console import Console

from ..data.encode import encode_all
from ..data.masks import show
from ..data.sources import DataConfig, load_conversations
from ..models.loading import load_tokenizer


@dataclass(frozen=True)
class MasksConfig:
    """Show which tokens of the data are trained on."""

    target: str = "smollm2"
    """Whose tokenizer and chat template: hub id, local folder, GGUF file, `smollm2` or `tiny`."""
    revision: str | None = None
    """Commit or tag of a hub id."""
    data: DataConfig = field(default_factory=DataConfig)
    """Conversations to look at."""
    count: int = 3
    """Samples to print, spread over the data."""
    trust_remote_code: bool = False
    """Run Python code that comes with the tokenizer; needs a pinned 40-digit revision."""

    def __post_init__(self) -> None:
        if self.count < 1:
            raise ValueError(f"count = {self.count}: give a positive count")


def run_masks(cfg: MasksConfig) -> None:
    """The command."""
    conversations = load_conversations(cfg.data)
    tokenizer = load_tokenizer(cfg.target, revision=cfg.revision, trust_remote_code=cfg.trust_remote_code)
    samples, report = encode_all(conversations, tokenizer, cfg.data.max_length)
    show(samples, report, tokenizer, cfg.count, Console())
