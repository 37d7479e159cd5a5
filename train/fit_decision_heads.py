"""Train the two decision heads of a converted model: unmask filter and pair dependency (models/decision_heads.py).

    python train/fit_decision_heads.py --config configs/heads_smollm2.yaml init_from=runs/convert_smollm2/export

The model runs over noisy blocks of its own answers, twice, and stays as it is; then each head learns from all blocks at
once. One process, minutes. They are written into `init_from`, in a folder `heads`, where the strategies `learned` and
`independent` of `draftsmith generate`, `evaluate` and `rollout` find them; on blocks held out they are compared with a
plain threshold. Tests: `pytest tests/test_decision_folder.py`.
"""

from __future__ import annotations

import dataclasses
import os
import sys
from collections.abc import Sequence
from pathlib import Path

import torch

from draftsmith.configs.heads import HeadsConfig
from draftsmith.configs.parse import guarded, parse
from draftsmith.configs.training import refuse_placed
from draftsmith.data.encode import Sample, encode_all
from draftsmith.data.packing import make_batch, pack
from draftsmith.data.sources import load_conversations
from draftsmith.data.states import data_fingerprint
from draftsmith.inference.adapter_folder import load_adapters
from draftsmith.inference.decision_folder import save_heads
from draftsmith.inference.exporters.layout import RunFacts
from draftsmith.models.block_diffusion import Passes
from draftsmith.models.decision_heads import (
    Blocks,
    PairDependency,
    UnmaskFilter,
    fit_filter,
    fit_pairs,
    held_out,
    observe,
)
from draftsmith.models.loading import load_target
from draftsmith.train.script import command, versions

SCRIPT = Path(__file__).name


def watch(config: HeadsConfig, passes: Passes, samples: Sequence[Sample], wanted: int) -> Blocks:
    """So many noisy blocks of the samples, or all there are in `config.epochs` passes."""
    parts: list[Blocks] = []
    seen = 0
    for epoch in range(config.epochs):
        for row in pack([len(s) for s in samples], config.row_length, config.seed, epoch):
            batch = make_batch([[samples[i] for i in row]], None, config.seed, epoch).to(passes.target.device)
            parts.append(observe(passes, batch))
            seen += len(parts[-1].shown_U)
            if seen >= wanted:
                return Blocks.join(parts)
    return Blocks.join(parts)


def main(argv: Sequence[str] | None = None) -> int:
    """From the command line to the folder `heads`. Returns the exit code."""
    argv = sys.argv[1:] if argv is None else argv
    config = parse(HeadsConfig, argv, prog=SCRIPT, description="Train the decision heads of a converted model.")
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        raise ValueError(
            f"the decision heads train in one process: python train/{SCRIPT} ..., or PROCESSES=1 ./launch.sh train/{SCRIPT} ..."
        )
    refuse_placed(config.target)
    device = ("cuda" if torch.cuda.is_available() else "cpu") if config.device == "auto" else config.device
    target = load_target(
        config.target.name,
        dtype=config.target.dtype,
        device=device,
        revision=config.target.revision,
        trust_remote_code=config.target.trust_remote_code,
    )
    converted = load_adapters(config.init_from, target)
    denoiser, passes = converted.denoiser(), Passes(converted.objective, target, converted.adapters)
    samples, report = encode_all(load_conversations(config.data), target.tokenizer, config.data.max_length)
    if len(samples) < 2:
        raise ValueError(f"{len(samples)} sample: one is held out and others are learnt from, give at least 2")
    print(f"target {target.facts.name}, {config.target.dtype}; data: {report}")
    learnt = [s for i, s in enumerate(samples) if i % 10]
    blocks = watch(config, passes, learnt, config.blocks)
    others = watch(config, passes, samples[::10], max(config.blocks // 10, 1))

    torch.manual_seed(config.seed)
    filter = UnmaskFilter(denoiser.block, config.filter.width).to(device)
    pairs = PairDependency(target.facts.width, config.pairs.rank).to(device)
    figures: dict[str, float] = {
        "blocks": len(blocks.shown_U),
        "filter_loss": fit_filter(filter, blocks, steps=config.filter.steps, rate=config.filter.rate),
        "pairs_loss": fit_pairs(pairs, blocks, steps=config.pairs.steps, rate=config.pairs.rate),
        "heldout_blocks": len(others.shown_U),
    } | held_out(filter, pairs, others)
    print(", ".join(f"{name} {value:.4g}" for name, value in figures.items()))
    run = RunFacts(
        config=dataclasses.asdict(config),
        command=command(SCRIPT, argv),
        versions=versions(),
        data={"source": config.data.source, "samples": len(samples), "fingerprint": data_fingerprint(samples)},
        training={name: value if value == value else None for name, value in figures.items()},  # JSON has no NaN
        train_length=config.data.max_length,
    )
    print(f"heads: {save_heads(Path(config.init_from).expanduser(), denoiser, filter, pairs, run)}")
    return 0


if __name__ == "__main__":
    sys.exit(guarded(main))
