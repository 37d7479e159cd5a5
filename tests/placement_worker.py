"""What one process of `tests/test_placement.py` runs: a sharded target beside a whole one, and a sharded drafter beside
one under DDP, written down by rank.

python tests/placement_worker.py OUT SETTING...        started by torchrun, two processes, ACCELERATE_USE_CPU=true
"""

from __future__ import annotations

import copy
import json
import sys
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from distributed_worker import config_of, launch, samples

from draftsmith.data.packing import collate
from draftsmith.models import METHODS
from draftsmith.models.piecewise import load_placed
from draftsmith.models.placement import bytes_here, together
from draftsmith.models.pretrained import tiny_target
from draftsmith.models.target import live_states
from draftsmith.train import engine, fsdp
from draftsmith.train.distill_draft import main


def states_and_gradients(rank: int) -> dict[str, Any]:
    """Largest differences between a sharded and a whole target, relative: states, teacher, and what methods learn by
    passes through it. Each process looks at another batch."""
    whole, sharded = tiny_target(dtype=torch.float32), load_placed("tiny", "sharded", dtype="float32")
    batch = collate(samples()[rank::2])
    out: dict[str, Any] = {"same_facts": sharded.facts == whole.facts}
    out["layers"] = [sum(map(bytes_here, t.layers)) for t in (sharded, whole)]
    out["ends"] = [bytes_here(t) - sum(map(bytes_here, t.layers)) for t in (sharded, whole)]
    trained = [p for p in sharded.parameters() if p.requires_grad]
    out["trained"] = len(trained)
    for method in ("eagle3", "prompt_tokens", "dual_view"):
        torch.manual_seed(0)
        drafter: Any = METHODS[method](config_of(method, Path(), 1).drafter, whole.facts)
        drafter.init_from_target(whole)
        found = []
        for target in (whole, sharded):
            mine = copy.deepcopy(drafter, {id(whole): whole})
            mine.bind(target)
            states = live_states(target, mine, batch)
            terms = mine.loss(batch, states, 0.0).losses
            total: Any = sum(terms.values())
            total.backward()
            assert states.last_hidden_BTD is not None
            values = {
                "last_hidden": states.last_hidden_BTD,
                "teacher": target.head(states.last_hidden_BTD),
                "loss": total,
            }
            values |= {} if states.taps_BTPD is None else {"taps": states.taps_BTPD}
            found.append(values | {n: p.grad for n, p in mine.named_parameters() if p.grad is not None})
        assert found[0].keys() == found[1].keys()
        out[method] = max(
            float((a - found[1][n]).abs().max() / a.abs().max().clamp(min=1e-6)) for n, a in found[0].items()
        )
    with together(sharded):  # this process makes two passes more than the other
        for _ in range(1 + 2 * rank):
            again = sharded.forward(batch.ids_BT, batch.positions_BT).last_hidden_BTD
    alone = whole.forward(batch.ids_BT, batch.positions_BT).last_hidden_BTD
    out["uneven"] = float((again - alone).abs().max() / alone.abs().max())
    return out


def scripts(out: Path, settings: list[str]) -> dict[str, int]:
    """Exit codes of whole runs, whose folders the test looks at."""
    codes = {}
    for name, more in (
        ("whole", []),
        ("sharded", ["target.placement=sharded"]),
        ("live", ["target.placement=sharded", "states.source=live"]),
    ):
        codes[name] = main([*settings, f"run={out / name}", *more])
    return codes


def trained(out: Path) -> dict[str, Any]:
    """Runs of some methods under DDP and cut by FSDP2, one of the latter in two launches; what a process keeps at rest."""
    kept: dict[str, Any] = {}

    def runs(folder: Path) -> None:
        for method in ("eagle3", "hydra", "draft_model", "dual_view"):
            launch(config_of(method, folder / method, steps=4))

    runs(out / "ddp")
    wrap = fsdp.wrap

    def watched(model: Any, *more: Any) -> Any:
        total = bytes_here(model)
        wrapped = wrap(model, *more)
        kept.setdefault("bytes", []).append([bytes_here(model), total])
        return wrapped

    engine.is_fsdp, fsdp.wrap = (lambda _: True), watched
    runs(out / "fsdp")
    launch(config_of("eagle3", out / "halves" / "eagle3", steps=4, stop_at=2))
    launch(config_of("eagle3", out / "halves" / "eagle3", steps=4))
    return kept


if __name__ == "__main__":
    folder = Path(sys.argv[1])
    accelerator = Accelerator(cpu=True)
    facts = states_and_gradients(accelerator.process_index) | {"codes": scripts(folder, sys.argv[2:])}
    facts["cut"] = trained(folder)
    (folder / f"rank{accelerator.process_index}.json").write_text(json.dumps(facts))
    accelerator.wait_for_everyone()
    torch.distributed.destroy_process_group()
