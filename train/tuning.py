"""One launch of a training that changes the target itself: target and adapters, data, the loop, the export.

The scripts differ in what they make of settings and target (`Tuning`), not in this.
Tests: `pytest tests/test_convert_diffusion.py tests/test_distill_consistency.py`.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from ..configs.runs import RunConfig
from ..data.batch import TargetOut
from ..data.encode import Sample, encode_all, prompt_ids
from ..data.packing import collate
from ..data.sources import Conversation, split_conversations
from ..inference.exporters.layout import RunFacts
from ..models.adapters import Adapters
from ..models.target import Target
from . import checkpoint, engine
from .loop import Judge, Probe, by_run_length, train
from .script import (
    claim,
    how_it_ended,
    logged,
    make_stream,
    refuse_other_run,
    run_facts,
    say_plan,
    silent,
    target_of,
    write_run_file,
)
from .utilisation import flops_per_token


@dataclass(frozen=True)
class Tuning:
    """One training: `module` as the loop wants it, and what else it needs.

    `config`: the settings, with what was loaded written into them. `check(conversations, samples)` raises ValueError
    for data that this training cannot use. `save(folder, facts)` writes the export. `probe(prompts)`: a probe on held-out prompts (ids).
    `refusal`: what to do where no step was within the judge's bounds, so that nothing is exported; None: the last step is
    exported all the same. `warning`: a line to be said before it begins.
    """

    config: RunConfig
    module: Any
    adapters: Adapters
    check: Callable[[Sequence[Conversation], Sequence[Sample]], None]
    save: Callable[[Path, RunFacts], Path]
    probe: Callable[[list[list[int]]], Probe] | None = None
    judge: Judge = by_run_length
    refusal: str | None = None
    warning: str | None = None


def launch(config: Any, script: str, argv: Sequence[str], build: Callable[[Any, Target], Tuning]) -> int:
    """Run the training that `build` makes of settings and target; returns the exit code.

    The export holds the weights of the best step where the judge names one, else of the last; none, and code 1, where that
    is out of bounds and the training has a `refusal`. Raises ValueError before anything is written when the run folder
    holds another run.
    """
    folder = engine.run_folder(config)
    accelerator = engine.start(config)
    torch.manual_seed(config.seed)
    say = print if accelerator.is_main_process else silent
    target = target_of(config, accelerator)
    tuning = build(config, target)
    config, module = tuning.config, tuning.module
    refuse_other_run(folder, config)

    train_talks, heldout_talks = split_conversations(config.data, config.evaluate.conversations)
    samples, report = encode_all(train_talks, target.tokenizer, config.data.max_length)
    heldout_samples = encode_all(heldout_talks, target.tokenizer, config.data.max_length)[0] if heldout_talks else []
    tuning.check([*train_talks, *heldout_talks], [*samples, *heldout_samples])
    say(f"target {target.facts.name}, {config.target.dtype}; training data: {report}; held out: {len(heldout_samples)}")
    mask_id = tuning.adapters.mask_id
    mask = "" if mask_id is None else f"; mask token {mask_id} ({config.adapters.mask})"
    say(f"{config.method}: {tuning.adapters.report}{mask}")
    if tuning.warning:
        say(f"warning: {tuning.warning}")
    if tuning.probe and not heldout_samples:
        say("warning: too few conversations to hold some out: nothing is measured, and any step may be the best one")
    claim(folder, accelerator)
    say_plan(config, target, samples, accelerator, say)
    if accelerator.is_main_process:
        write_run_file(folder, config, script, argv, accelerator, samples, report, target)
    accelerator.wait_for_everyone()

    prompts = [prompt_ids(t.messages[:-1], target.tokenizer) for t in heldout_talks[: config.evaluate.probe_prompts]]
    stream = make_stream(config, samples, accelerator)
    summary = train(
        config,
        accelerator,
        module,
        stream,
        lambda batch: TargetOut(),  # every pass of the target is part of the loss
        folder,
        heldout=[collate([sample], config.seed) for sample in heldout_samples],
        probe=tuning.probe(prompts) if tuning.probe and prompts else None,
        evaluate_first=True,
        judge=tuning.judge,
        flops_per_token=flops_per_token(config, target, stream, accelerator, say),
    )
    code, best = how_it_ended(config, summary, say), summary.state.best_step
    if code is not None and summary.stopped is None:
        return code
    against = summary.state.against if best is None else None
    if against and tuning.refusal:
        say(f"no export: no step could be chosen, and at the last one {against}; {tuning.refusal}", file=sys.stderr)
        return 1
    if accelerator.is_main_process:
        heldout, probe = (logged(folder, kind, best) for kind in ("heldout", "probe"))
        module.eval()
        if best is not None:
            checkpoint.load_tensors(folder / f"checkpoints/step-{best:08d}", module)
        facts = run_facts(config, script, argv, samples, summary, heldout, probe or None, best)
        if against:
            facts = replace(facts, training=facts.training | {"out_of_bounds": against})
            say(f"warning: no step was within bounds; the export is of the last one, where {against}")
        place = tuning.save(folder / "export", facts)
        say(f"export: {place}{'' if best is None else f', of step {best}'}")
    accelerator.wait_for_everyone()
    return code or 0
