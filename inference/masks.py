"""`draftsmith masks`: print samples with the tokens that are trained on coloured, and counts. Loads no weights.

    draftsmith masks --target smollm2 --data.source answers.jsonl --count 3

Tested by `pytest tests/test_data_masks.py`.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rich.console import Console

from ..data.encode import encode_all
from ..data.masks import show
from ..data.sources import DataConfig, load_conversations
from ..models.pretrained import smollm2_folder, tiny_target


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
    tokenizer = load_tokenizer(cfg)
    samples, report = encode_all(conversations, tokenizer, cfg.data.max_length)
    show(samples, report, tokenizer, cfg.count, Console())


def load_tokenizer(cfg: MasksConfig) -> Any:
    """The tokenizer alone.

    Raises:
        ValueError: there is none under this name, or remote code without a pinned revision.
    """
    from transformers import AutoTokenizer

    if cfg.target == "tiny":
        return tiny_target().tokenizer
    if cfg.trust_remote_code and not (cfg.revision and len(cfg.revision) == 40):
        raise ValueError(f"trust_remote_code needs revision pinned to a 40-digit commit, got {cfg.revision!r}")
    path = Path(smollm2_folder() if cfg.target == "smollm2" else cfg.target).expanduser()
    options: dict[str, Any] = {"revision": cfg.revision, "trust_remote_code": cfg.trust_remote_code}
    if path.suffix == ".gguf" and path.is_file():
        path, options["gguf_file"] = path.parent, path.name
    try:
        return AutoTokenizer.from_pretrained(str(path) if path.is_dir() else cfg.target, **options)
    except (OSError, ValueError) as error:
        raise ValueError(f"tokenizer of {cfg.target!r} cannot be loaded: {str(error).splitlines()[0]}") from error
