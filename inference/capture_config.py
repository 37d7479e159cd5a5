"""What `draftsmith capture` keeps, and of what: its settings. Part of inference/capture.py.

Test: pytest tests/test_capture.py
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from ..data.formats import STORED, TEACHER, TOP_K, Stored
from ..data.sources import HELDOUT, DataConfig


@dataclass(frozen=True)
class CaptureConfig:
    """Run the frozen target over the data once and keep its states."""

    out: str
    """Folder, or address of a store (s3://bucket/path, gs://..., hf://datasets/...) from which other hosts read: what
    trainings are given as states.folder. Shards go to `train` and `heldout` in it; states of something else are refused."""
    target: str = "smollm2"
    """Hub id, local folder, GGUF file, `smollm2` or `tiny`."""
    revision: str | None = None
    """Commit or tag of a hub id."""
    dtype: Literal["bfloat16", "float16", "float32"] = "bfloat16"
    """Precision the target computes in."""
    stored: Stored = STORED
    """How taps are kept: in full, or about a half (int8) or a quarter (int4) of the bytes of bfloat16."""
    device: str = "auto"
    """`cpu`, `cuda`, `cuda:1`, ...; `auto` = a GPU if there is one."""
    data: DataConfig = field(default_factory=DataConfig)
    """Conversations to run over."""
    heldout: int = HELDOUT
    """Held-out conversations, chosen as trainings choose them: give what they have as evaluate.conversations; 0 = none."""
    taps: tuple[int, ...] | None = None
    """States h[k] to keep (k = the layer they enter); null = those that EAGLE-3 reads by default."""
    last_hidden: bool = TEACHER == "last_hidden"
    """Keep the state after the final norm: Medusa, Hydra, EAGLE-1 and Falcon read it, and it is a teacher for all."""
    last_stored: Stored = "bfloat16"
    """How that is kept."""
    top_k: int = TOP_K if TEACHER == "top_k" else 0
    """Keep so many of the likeliest next tokens instead, with their probabilities, as a teacher for methods that read no
    last_hidden; 0 = none."""
    verify: int = 2
    """Samples of each finished folder that are held against a fresh pass of the target."""
    batch_tokens: int = 2048
    """Tokens per forward pass."""
    threads: int | None = None
    """Threads on CPUs, each with forward passes of its own; null = one per core."""
    rank: int = 0
    """This command's share, when several commands fill one folder."""
    world: int = 1
    """How many commands fill the folder."""
    rolling: int = 0
    """Keep at most so many shards ahead of a training that runs at the same time with states.rolling=true, and go on as it
    deletes them (held-out states are captured first, and kept); 0 = keep all."""
    seed: int = 0
    """Seed of that training: its samples are captured in the order in which it reads them."""
    engine: str | None = None
    """Folder of hidden states that vLLM extracted (also as the speculators library keeps them): they are taken in place
    of passes of the target."""
    engine_layers: tuple[int, ...] = ()
    """Layer ids that the engine was given, in its order; the target's number of layers must be among them."""
    max_skipped: float = 0.01
    """Share of samples that may have states that are not finite; above it the capture fails."""
    dry_run: bool = False
    """Print the bytes that the states take and stop."""
    trust_remote_code: bool = False
    """Run Python code that comes with the model; needs a pinned 40-digit revision."""

    def __post_init__(self) -> None:
        if not 0 <= self.rank < self.world:
            raise ValueError(f"rank = {self.rank} of world = {self.world}: ranks count from 0")
        if self.threads is not None and self.threads < 1:
            raise ValueError(f"threads = {self.threads}: give a positive count, or null for one per core")
        if self.batch_tokens < 1:
            raise ValueError(f"batch_tokens = {self.batch_tokens}: give a positive count")
        if min(self.top_k, self.verify, self.heldout) < 0:
            raise ValueError(
                f"top_k = {self.top_k}, verify = {self.verify}, heldout = {self.heldout}: give counts, 0 = none"
            )
        if not self.last_hidden and not self.top_k and not self.taps:
            raise ValueError("nothing to keep: give taps, last_hidden=true or top_k")
        if self.rolling < 0 or self.seed < 0:
            raise ValueError(f"rolling = {self.rolling}, seed = {self.seed}: give counts, 0 = keep all shards")
        if (self.engine is None) != (not self.engine_layers):
            raise ValueError("engine and engine_layers go together: the folder, and the layer ids that its files hold")
        if not 0 <= self.max_skipped <= 1:
            raise ValueError(f"max_skipped = {self.max_skipped}: give a share between 0 and 1")
