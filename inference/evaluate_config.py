"""What `draftsmith evaluate` measures: its settings, and one way of decoding. Part of inference/evaluate.py.

Test: pytest tests/test_evaluate.py
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from ..models import FreeSettings
from ..models.int8 import Weights
from ..models.jacobi import Jacobi
from ..models.target import Runner
from .load import is_free, refuse_idle_settings
from .speculate import DecodeConfig
from .suites import SUITES
from .trees import TREES
from .verify import refuse_misfit

Dtype = Literal["bfloat16", "float16", "float32", "float64"]


@dataclass(frozen=True)
class EvaluateConfig:
    """What to measure."""

    model: str
    """Export folder or Hub id of the drafter, of a consistency model (evaluate_consistency.py) or of a denoiser
    (evaluate_denoiser.py); or, for any target and without training, ngram, suffix, recycling, lookahead, jacobi or
    lm:MODEL (folder or Hub id of a small language model)."""
    also: tuple[str, ...] = ()
    """Further drafters for the same target, measured beside it in the same run."""
    target: str | None = None
    """Hub id, folder, GGUF file or built-in name of the target; by default the one that the first export names."""
    drafter: FreeSettings = field(default_factory=FreeSettings)
    """Settings of the training-free drafters. Of a consistency model: those of `jacobi` that are given take the place of the
    folder's."""
    revision: str | None = None
    """Revision of the export on the Hub."""
    target_revision: str | None = None
    """Revision of the target on the Hub; by default the one the export names."""
    suite: str = "mini"
    """Prompts: mini, humaneval, mt_bench, gsm8k, tasks or spec_bench."""
    file: str | None = None
    """Local file of the suite's schema (.json, .jsonl, .jsonl.gz, .jsonl.xz)."""
    prompts: int | None = 24
    """How many prompts, balanced over the suite's categories; null = all."""
    max_new_tokens: int = 64
    """Longest answer, in tokens."""
    k: tuple[int, ...] = (2, 4)
    """Tokens drafted per pass (root excluded); every value is measured and the fastest named. Of a denoiser that drafts for
    its base: one value (by default 2). Of jacobi its block says how many. Where no shape is given, one export alone takes
    the one that `draftsmith tune` found for this machine (greedy runs)."""
    trees: tuple[str, ...] = ("chain",)
    """Shapes of the draft: chain, cut, cape, static, dynamic, opt, best_first, capped, ppd (inference/README.md)."""
    nodes: int = DecodeConfig.nodes
    """Most nodes of trees that are no chains."""
    width: int = DecodeConfig.width
    """Most candidates per node of a tree."""
    threshold: float | None = DecodeConfig.threshold
    """cut: confidence below which a chain ends; opt: expected tokens that a layer must add; null = the tree's default."""
    prompt_rows: int | None = DecodeConfig.prompt_rows
    """Most rows of prompt tokens in a verification (drafters that have them); null = as many as the nodes can have."""
    temperatures: tuple[float, ...] = (0.0,)
    """Sampling temperatures; 0 = greedy."""
    verifier: str = "auto"
    """Acceptance rule; `auto` takes the exact one that fits tree and temperature."""
    allow_lossy: bool = False
    """Permit an acceptance rule that does not keep the target's distribution."""
    typical_epsilon: float = DecodeConfig.typical_epsilon
    """Rule `typical`: ceiling of its floor."""
    typical_delta: float = DecodeConfig.typical_delta
    """Rule `typical`: share of exp(-entropy) in its floor."""
    fuzzy_threshold: float = DecodeConfig.fuzzy_threshold
    """Rule `fuzzy`: total variation of target and draft up to which drafts are kept."""
    entropy_tolerance: float = DecodeConfig.entropy_tolerance
    """Rule `entropy`: most that it adds to a chance of acceptance."""
    dtype: Dtype = "bfloat16"
    """Weights and states of target and drafter."""
    weights: Weights = "full"
    """int8: round the target's matrices, the embedding's aside, for plain decoding and verification alike; half the memory,
    other answers (models/int8.py)."""
    device: str = "cpu"
    """Where to run."""
    runner: Runner = "auto"
    """How the target decodes: lean operators, Hugging Face's modules (hf), or auto, which is lean where it is possible."""
    hf_prompts: int | None = None
    """Prompts that transformers' `generate` answers too, from the front; null = all, 0 = none."""
    identity_prompts: int | None = None
    """Prompts whose greedy answers are compared with plain decoding at the same width, from the front; null = all."""
    seed: int = 0
    """Seed of sampling and bootstrap."""
    bootstrap: int = 1000
    """Resamplings behind each 95 % interval."""
    out: str = "runs/evaluate"
    """Folder of report.json, report.html and the partial results of an interrupted run."""
    json: str | None = None
    """Where to write the JSON report, instead of `out`/report.json."""
    html: str | None = None
    """Where to write the HTML page, instead of beside the JSON report."""
    card: bool = True
    """Put the report beside a local export and its table into the model card (not with `also`)."""
    trust_remote_code: bool = False
    """Run code that comes with the target."""
    strategies: tuple[str, ...] = ("threshold",)
    """Of denoisers: how places are decided (inference/README.md)."""
    thresholds: tuple[float, ...] = (0.5, 0.7, 0.9, 0.95)
    """Of denoisers: settings of those strategies that have a threshold; all are measured."""

    def __post_init__(self) -> None:
        if self.suite not in SUITES:
            raise ValueError(f"suite = {self.suite!r}: choose one of {', '.join(SUITES)}")
        for name in ("max_new_tokens", "bootstrap", "prompts", "identity_prompts"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ValueError(f"{name} = {value}: must be at least 1")
        if not self.k or min(self.k) < 1:
            raise ValueError(f"k = {list(self.k)}: give one or more draft lengths of at least 1")
        if not self.trees:
            raise ValueError(f"trees = []: give one or more of {', '.join(TREES)}")
        for tree in self.trees:
            self.decode(tree, self.k[0])
        if self.hf_prompts is not None and self.hf_prompts < 0:
            raise ValueError(f"hf_prompts = {self.hf_prompts}: must be at least 0")
        if self.seed < 0:
            raise ValueError(f"seed = {self.seed}: must be at least 0")
        # Of an export, only what it holds says whether jacobi takes part (run_evaluate).
        refuse_idle_settings(self.drafter, [self.model, *self.also, *(() if is_free(self.model) else (Jacobi.method,))])
        if self.drafter.suffix.shared:
            raise ValueError(
                "drafter.suffix.shared = true: every prompt is answered several times here, and the drafter would know "
                "the answers; leave it off"
            )
        if not self.temperatures or min(self.temperatures) < 0:
            raise ValueError(f"temperatures = {list(self.temperatures)}: give one or more, none negative")
        for temperature in self.temperatures:
            refuse_misfit(self.verifier, self.allow_lossy, temperature > 0, None if temperature > 0 else False)
        for name in ("json", "html"):
            if (value := getattr(self, name)) is not None and Path(value).is_dir():
                raise ValueError(f"{name} = {value!r} is a folder: name the file to write, or set `out` for a folder")

    def decode(self, tree: str, k: int) -> DecodeConfig:
        """How drafts of this shape and depth are made and verified. Raises ValueError for settings that do not fit."""
        takes_threshold = tree in TREES and TREES[tree].threshold is not None
        if self.threshold is not None and not any(TREES[t].threshold is not None for t in self.trees if t in TREES):
            raise ValueError(f"threshold = {self.threshold}: none of trees = {list(self.trees)} has one")
        return DecodeConfig(
            k=k,
            tree=tree,
            nodes=self.nodes,
            width=self.width,
            threshold=self.threshold if takes_threshold else None,
            prompt_rows=self.prompt_rows,
            verifier=self.verifier,
            allow_lossy=self.allow_lossy,
            typical_epsilon=self.typical_epsilon,
            typical_delta=self.typical_delta,
            fuzzy_threshold=self.fuzzy_threshold,
            entropy_tolerance=self.entropy_tolerance,
        )


@dataclass(frozen=True)
class Arm:
    """One way of decoding that takes part in the run."""

    name: str
    kind: Literal["plain", "width", "hf", "draft"]
    temperature: float
    decode: DecodeConfig
    drafter: str | None = None  # name in `drafters`
