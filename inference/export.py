"""Write an export: the folder that the runtime loads, engines serve and the Hub stores.

    export(drafter, "runs/demo/export", run=RunFacts(train_length=1024, ...), target=target)

Complete or refused: every tensor of the drafter is in the file or declared absent with a reason, every tensor of the
form is there, no value is infinite. The folder appears whole or not at all. Nothing in it names a path of this machine.

Tests: tests/test_export.py.
"""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import yaml
from torch import Tensor

from ..models.drafter import Drafter
from .card import render_card, scrub_values
from .check import make_replay
from .exporters import EXPORTERS
from .exporters.folder import (
    CARD,
    CONFIG,
    REPLAY,
    REPORT,
    RUN,
    WEIGHTS,
    compare_slots,
    read_header,
    refuse_foreign_folder,
    refuse_non_finite,
    save_tensors,
    sha256_of,
    write_folder,
)
from .exporters.layout import FORMAT, TAPS_CONVENTION, Packed, RunFacts
from .load import facts_of

if TYPE_CHECKING:
    from ..models.target import Target

__all__ = ["RunFacts", "export"]

FILE_DTYPES = {torch.float16: torch.float16}  # of the target; everything else is stored in bfloat16


def export(
    drafter: Drafter,
    folder: str | Path,
    *,
    run: RunFacts,
    target: Target | None = None,
    dtype: torch.dtype | None = None,
) -> Path:
    """Write `drafter` into `folder`, which is absent, empty, or an older export.

    `target`: when given, 32 positions are replayed through the stored weights and kept for `draftsmith check`, unless its
    own weights are rounded or not all in this process.
    `dtype`: of the stored weights; default bfloat16, float16 for a float16 target.

    Returns:
        The folder.

    Raises:
        ValueError: the method's form can't express this drafter, a tensor is unaccounted for or not finite, or the
            folder holds something else. Nothing is written then.
    """
    folder = Path(folder)
    refuse_foreign_folder(folder)
    exporter = EXPORTERS[drafter.method]
    packed = exporter.pack(drafter, target)
    kind = dtype or FILE_DTYPES.get(target.dtype if target else torch.bfloat16, torch.bfloat16)
    tensors = {n: t.detach().cpu().to(kind) if t.is_floating_point() else t.cpu() for n, t in packed.tensors.items()}
    refuse_unaccounted(drafter, packed)
    refuse_non_finite(tensors, f"export of {drafter.method}")
    config = packed.config | {
        "torch_dtype": str(kind).removeprefix("torch."),
        "draftsmith": our_key(drafter, packed, run),
    }
    exact = target is not None and target.placement == "replicated" and target.quantized == "none"
    replay = make_replay(drafter, target, kind) if target is not None and exact else None

    def fill(place: Path) -> None:
        save_tensors(place / WEIGHTS, tensors)
        compare_slots(read_header(place / WEIGHTS), exporter.slots(config), f"export of {drafter.method}")
        config["draftsmith"]["sha256"] = sha256_of(place / WEIGHTS)
        (place / CONFIG).write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
        (place / RUN).write_text(run_yaml(run), encoding="utf-8")
        if run.report is not None:
            (place / REPORT).write_text(json.dumps(scrub_values(run.report), indent=1) + "\n", encoding="utf-8")
        if replay is not None:
            save_tensors(place / REPLAY, replay)
        (place / CARD).write_text(render_card(place), encoding="utf-8")

    write_folder(folder, fill)
    return folder


def our_key(drafter: Drafter, packed: Packed, run: RunFacts) -> dict[str, Any]:
    """Our facts, under one key of config.json."""
    config = {k: list(v) if isinstance(v, tuple) else v for k, v in dataclasses.asdict(drafter.config).items()}
    return {
        "format": FORMAT,
        "method": drafter.method,
        "target": scrub_values(facts_of(drafter.facts)),
        "config": scrub_values(config),
        "taps": list(drafter.taps),
        "taps_convention": TAPS_CONVENTION,
        "draft_vocab": drafter.facts.vocab if drafter.d2t_W is None else len(drafter.d2t_W),
        "depths": drafter.max_depth,
        "train_length": run.train_length,
        "estimated": run.estimated,
        "absent": packed.absent,
        "untrained": packed.untrained,
        "limits": list(packed.limits),
    } | ({"draft_ids": ids} if (ids := unmapped_ids(drafter, packed.tensors)) else {})


def unmapped_ids(drafter: Drafter, tensors: dict[str, Tensor]) -> list[int] | None:
    """Draft ids that the engine's form has no tensor for (EAGLE-1): kept as our own fact."""
    if drafter.d2t_W is None or {"d2t", "token_map"} & set(tensors):
        return None
    return [int(i) for i in drafter.d2t_W]


def refuse_unaccounted(drafter: Drafter, packed: Packed) -> None:
    """Every tensor of the drafter is written, declared absent, or the draft ids that maps are made of; every tensor of
    the file is the drafter's or declared."""
    state = drafter.state_dict()
    lost = sorted(set(state) - set(packed.tensors) - set(packed.absent) - {"d2t_W"})
    if lost:
        raise ValueError(
            f"{drafter.method}: {', '.join(lost)} would be lost in the export; the form has no place for them"
        )
    unknown = sorted(set(packed.tensors) - set(state) - set(packed.untrained))
    if unknown:
        raise ValueError(
            f"{drafter.method}: {', '.join(unknown)} stand in the file, but are neither trained nor declared"
        )
    if both := sorted(set(packed.absent) & set(packed.tensors)):
        raise ValueError(f"{drafter.method}: {', '.join(both)} declared absent and written")


def run_yaml(run: RunFacts) -> str:
    """run.yaml: the resolved configuration and the run's facts, without secrets and local paths."""
    facts = {
        "config": run.config,
        "command": run.command,
        "versions": run.versions,
        "data": run.data,
        "training": run.training,
        "licence": run.licence,
        "origin": run.origin,
    }
    plain = json.loads(json.dumps(facts, default=str))
    return yaml.safe_dump(scrub_values(plain), sort_keys=False, allow_unicode=True)
