"""One launch of a diffusion training: target and adapters, data, the loop, the export.

The two scripts differ in what they train (`build`), not in this. Tests: `pytest tests/test_convert_diffusion.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from ..configs.diffusion import DiffusionConfig
from ..data.batch import TargetOut
from ..data.encode import Sample, encode_all
from ..data.packing import collate
from ..inference.adapter_folder import save_adapters
from ..models.adapters import Adapters
from ..models.target import Target
from . import engine
from .loop import train
from .script import (
    conversations,
    how_it_ended,
    last_heldout,
    make_stream,
    refuse_other_run,
    run_facts,
    silent,
    target_of,
    write_run_file,
)

Build = Callable[[DiffusionConfig, Target], tuple[DiffusionConfig, Any, Adapters]]


def refuse_without_order(samples: Sequence[Sample]) -> None:
    """Raises ValueError when a sample does not say in which order its answer was decided."""
    if lacking := sum(s.order is None for s in samples):
        raise ValueError(
            f"{lacking} of {len(samples)} samples do not say in which order they were decided, which this training hides them "
            "in; let the model answer with `draftsmith rollout --adapters FOLDER --order true`"
        )


def launch(config: DiffusionConfig, script: str, argv: Sequence[str], build: Build) -> int:
    """Run the training that `build` makes of settings and target; returns the exit code.

    Raises ValueError before anything is written when the run folder holds another run.
    """
    folder = engine.run_folder(config)
    accelerator = engine.start(config)
    torch.manual_seed(config.seed)
    say = print if accelerator.is_main_process else silent
    target = target_of(config, accelerator)
    config, module, adapters = build(config, target)
    refuse_other_run(folder, config)

    train_talks, heldout_talks = conversations(config)
    samples, report = encode_all(train_talks, target.tokenizer, config.data.max_length)
    heldout_samples = encode_all(heldout_talks, target.tokenizer, config.data.max_length)[0] if heldout_talks else []
    if module.passes.objective.draw == "latest":
        refuse_without_order([*samples, *heldout_samples])
    say(f"target {target.facts.name}, {config.target.dtype}; training data: {report}; held out: {len(heldout_samples)}")
    say(f"{config.method}: {adapters.report}; mask token {adapters.mask_id} ({config.adapters.mask})")
    if accelerator.is_main_process:
        write_run_file(folder, config, script, argv, accelerator, samples, report, target)
    accelerator.wait_for_everyone()

    summary = train(
        config,
        accelerator,
        module,
        make_stream(config, samples, accelerator),
        lambda batch: TargetOut(),  # every pass of the target is part of the loss
        folder,
        heldout=[collate([sample], config.seed) for sample in heldout_samples],
        evaluate_first=True,
    )
    code = how_it_ended(config, summary, say)
    if code is not None:
        return code
    if accelerator.is_main_process:
        heldout = summary.heldout or last_heldout(folder)
        facts = run_facts(config, script, argv, samples, summary, heldout)
        place = save_adapters(folder / "export", config.method, module.objective, adapters, facts)
        say(f"export: {place}")
    accelerator.wait_for_everyone()
    return 0
