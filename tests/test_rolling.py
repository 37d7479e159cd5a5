"""Capture and training at the same time: the weights of a training that had all shards, on a bounded disk, whatever is
stopped in between. Run: pytest tests/test_rolling.py
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import fsspec
import pytest
import torch
from safetensors.torch import load_file
from test_capture import TAPS, many_samples
from test_data_states import fields_of, samples

from draftsmith.data import places, rolling
from draftsmith.data.places import Folder, Place, Store, inside, place_of
from draftsmith.data.rolling import Rolling, open_rolling, reading_blocks, reading_order, write_plan
from draftsmith.data.states import StateStore, plan, shard_file
from draftsmith.inference.capture import capture, capture_rolling, run_capture, state_fields
from draftsmith.inference.capture_config import CaptureConfig
from draftsmith.train.distill_draft import main
from draftsmith.train.stream import Stream

ROOT = Path(__file__).parents[1]
DATA = {"limit": 34, "max_length": 256}
AHEAD = 4
SHARDS = 8


MOST: dict[str, int] = {}  # place -> the most shards that were there at a time


def counting(write: Any) -> Any:
    def counted(self: Any, file: str, make: Any) -> None:
        write(self, file, make)
        if file.endswith(".safetensors"):
            MOST[str(self)] = max(MOST.get(str(self), 0), shards(self))

    return counted


def shards(place: Place) -> int:
    return sum(name.endswith(".safetensors") for name in place.sizes())


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(Folder, "poll", 0.02)
    monkeypatch.setattr(Store, "poll", 0.02)
    monkeypatch.setattr(rolling, "PATIENCE", 20.0)
    for kind in (Folder, Store):
        monkeypatch.setattr(kind, "write", counting(kind.write))
    MOST.clear()
    fsspec.filesystem("memory").store.clear()
    yield
    fsspec.filesystem("memory").store.clear()


class Capture:
    """`draftsmith capture --rolling` in a thread."""

    def __init__(self, where: str, ahead: int, taps: tuple[int, ...] = (1, 2, 3)) -> None:
        from draftsmith.data.sources import DataConfig

        data = DataConfig(limit=DATA["limit"], max_length=DATA["max_length"])
        config = CaptureConfig(
            out=where, target="tiny", dtype="float32", data=data, taps=taps, rolling=ahead, threads=1, heldout=2
        )
        self.place, self.errors = inside(place_of(where), "train"), list[BaseException]()
        self.done = threading.Event()

        def run() -> None:
            try:
                run_capture(config)
            except BaseException as error:
                self.errors.append(error)
            self.done.set()

        self.thread = threading.Thread(target=run, daemon=True)
        self.thread.start()
        # loading the target draws random numbers of this process, as building a drafter does
        while not self.done.is_set() and rolling.PLAN not in self.place.sizes():
            time.sleep(0.02)


def train(run: str, where: str, *more: str) -> int:
    settings = [f"data.{k}={v}" for k, v in DATA.items()] + [
        "batch.row_length=256",
        "budget.steps=null",
        "budget.epochs=1",
        "log.progress=false",
    ]
    settings += ["batch.rows=3", "evaluate.conversations=2", "evaluate.probe_prompts=0", "evaluate.every=100"]
    settings += ["states.rolling=true", f"states.folder={where}", f"run={run}", *more]
    return main(["--config", str(ROOT / "configs/quick.yaml"), *settings])


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> dict[str, torch.Tensor]:
    """The weights of a training that started when every shard was there."""
    out = tmp_path_factory.mktemp("whole")
    made = Capture(str(out / "states"), 1000)
    limit = time.monotonic() + 60
    while shards(made.place) < SHARDS and time.monotonic() < limit:
        time.sleep(0.02)
    assert train(str(out / "run"), str(out / "states")) == 0
    assert made.done.wait(10) and not made.errors and shards(made.place) == 0
    return load_file(out / "run/export/model.safetensors")


def same(run: Path, whole: dict[str, torch.Tensor]) -> bool:
    weights = load_file(run / "export/model.safetensors")
    return weights.keys() == whole.keys() and all(torch.equal(weights[k], whole[k]) for k in whole)


def test_disk_is_bounded_and_nothing_else_changes(tmp_path: Path, whole: dict[str, torch.Tensor]) -> None:
    """Training stops, goes on, stops again and finds its newest checkpoint damaged: the shards that an older one needs
    are captured once more."""
    where, run = str(tmp_path / "states"), tmp_path / "run"
    made = Capture(where, AHEAD)
    assert train(str(run), where, "budget.stop_at=2") == 0
    assert train(str(run), where, "budget.stop_at=4") == 0
    assert 0 < rolling.consumed(made.place) < SHARDS and not made.errors
    assert MOST[str(made.place)] == AHEAD
    (run / "checkpoints/step-00000004/model.safetensors").write_bytes(b"torn")
    assert train(str(run), where) == 0
    assert '"damaged": "step-00000004"' in (run / "metrics.jsonl").read_text()
    assert made.done.wait(30) and not made.errors
    assert MOST[str(made.place)] < 2 * AHEAD and shards(made.place) == 0
    plan_file, held = tmp_path / "states/train/rolling.json", list((tmp_path / "states/heldout").iterdir())
    assert len(held) > 1 and all(path.stat().st_mtime_ns < plan_file.stat().st_mtime_ns for path in held)
    assert same(run, whole)


def test_hosts_that_share_a_store_roll_too(
    tmp_path: Path,
    whole: dict[str, torch.Tensor],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """The training is there first."""
    monkeypatch.setenv("DRAFTSMITH_CACHE", str(tmp_path / "cache"))
    where = "memory://bucket/states"
    made: list[Capture] = []

    def begin() -> None:
        while "waiting for rolling.json" not in said[0]:
            said[0] += capsys.readouterr().err
            time.sleep(0.05)
        made.append(Capture(where, AHEAD))

    said = [""]
    threading.Thread(target=begin, daemon=True).start()
    assert train(str(tmp_path / "run"), where) == 0
    assert made[0].done.wait(30) and not made[0].errors
    assert MOST[f"{where}/train"] == AHEAD and shards(made[0].place) == 0
    assert not list((tmp_path / "cache").rglob("*-shard-*")) or len(list((tmp_path / "cache").rglob("*-shard-*"))) == 1
    assert same(tmp_path / "run", whole)


# Refusals


def rolled(place: Place, data: list[Any], ahead: int) -> StateStore:
    write_plan(place, fields_of(data), plan(data), ahead)
    return open_rolling(place, fields_of(data), data, True)


def test_what_cannot_be_rolled_is_refused_with_the_reason(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"one pass: set budget\.epochs to at most 1, or budget\.steps"):
        train(str(tmp_path / "run"), "x", "budget.epochs=2")
    with pytest.raises(ValueError, match=r"set states\.folder, and source=captured"):
        train(str(tmp_path / "run"), "x", "states.source=live")
    place = Folder(tmp_path / "states")
    made = Capture(str(tmp_path / "states"), 1)
    with pytest.raises(
        ValueError, match=r"a window of this recipe reads \d shards at once, the capture keeps 1: .*--rolling \d"
    ):
        train(str(tmp_path / "run"), str(tmp_path / "states"))
    with pytest.raises(ValueError, match=r"budget\.steps=99 is more than one pass"):
        train(str(tmp_path / "run"), str(tmp_path / "states"), "budget.epochs=null", "budget.steps=99")
    with pytest.raises(ValueError, match="states of another data"):
        train(str(tmp_path / "run"), str(tmp_path / "states"), "seed=1")
    with pytest.raises(ValueError, match="states of another taps"):
        train(str(tmp_path / "run"), str(tmp_path / "states"), "drafter.taps=[0, 2, 3]")
    assert not made.errors and not (tmp_path / "run/checkpoints").exists()
    content = json.dumps({"first": 1000})
    inside(place, "train").write("consumed.json", lambda path: path.write_text(content))  # ends the capture
    made.thread.join(30)
    assert made.done.is_set()


def test_a_capture_of_something_else_is_refused(tiny: Any, tmp_path: Path) -> None:
    target, data = tiny(), many_samples()
    capture(target, data, tmp_path / "whole", TAPS, progress=False)
    with pytest.raises(ValueError, match="whole holds a finished capture, which needs no rolling"):
        write_plan(Folder(tmp_path / "whole"), state_fields(target, data, TAPS, True), plan(data), 4)
    with pytest.raises(ValueError, match=r"whole holds a finished capture: set states\.rolling=false"):
        open_rolling(Folder(tmp_path / "whole"), state_fields(target, data, TAPS, True), data, True)
    place = Folder(tmp_path / "rolling")
    write_plan(place, state_fields(target, data, TAPS, True), plan(data), 4)
    with pytest.raises(ValueError, match="rolling holds states of another data"):
        capture_rolling(target, data[1:], place, state_fields(target, data[1:], TAPS, True), 4, progress=False)


def test_nobody_waits_for_ever(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rolling, "PATIENCE", 0.1)
    data = samples(*[200] * 20)
    with pytest.raises(ConnectionError, match=r"no rolling\.json for .* minutes; start `draftsmith capture --rolling`"):
        open_rolling(Folder(tmp_path), fields_of(data), data, False)
    pace = rolled(Folder(tmp_path), data, 4).rolling
    pace.follow([[0], [0, 1], [1, 2], [3]])
    assert not pace.ready(0, 0)
    with pytest.raises(ConnectionError, match=r"no shard-00000\.safetensors for .*the same command goes on from it"):
        for _ in range(100):
            pace.wait(0, 0)


def test_what_a_checkpoint_needs_is_kept(tmp_path: Path) -> None:
    data = samples(*[200] * 20)
    place = Folder(tmp_path)
    pace: Rolling = rolled(place, data, 3).rolling
    for k in range(3):
        (tmp_path / shard_file(k)).touch()
    pace.follow([[0], [0, 1], [1, 2], [2, 3], [3]])
    assert [pace.needed(0, w) for w in range(6)] == [(0, 0), (0, 1), (1, 2), (2, 3), (3, 3), (4, -1)]
    assert [pace.due(0, w) for w in range(5)] == [False, False, False, True, True]
    assert [pace.ready(0, w) for w in range(5)] == [True, True, True, False, False]
    for window, left in ((1, [0, 1, 2]), (3, [2])):
        pace.saved(0, window)
        assert [k for k in range(3) if (tmp_path / shard_file(k)).exists()] == left
    assert rolling.consumed(place) == 2 and not pace.due(0, 4)
    pace.saved(0, 0)  # a training that went back
    assert rolling.consumed(place) == 0 and pace.due(0, 4) and not pace.ready(0, 0)
    pace.saved(1, 0)
    assert rolling.consumed(place) == 4 == len(plan(data))
    pace.main = False
    pace.saved(0, 0)
    assert rolling.consumed(place) == 4  # one process speaks for all


def test_blocks_are_read_one_after_another() -> None:
    data = reading_order(samples(*[100 + i for i in range(80)]), seed=3)
    assert sorted(s.sample_id for s in data) == list(range(10, 90)) and data != reading_order(data, seed=3)
    blocks, shard_of = reading_blocks(data)
    assert [i for block in blocks for i in block] == list(range(80)) and len(shard_of) == 80
    stream = Stream(data, row_length=400, rows=2, accumulate=1, seed=0, blocks=blocks)
    rows = stream.rows_of_epoch(0)
    assert sorted(i for row in rows for i in row) == list(range(80))
    of_rows = [{shard_of[i] // rolling.MIX for i in row} for row in rows]
    assert all(len(x) == 1 for x in of_rows) and [min(x) for x in of_rows] == sorted(min(x) for x in of_rows)
    assert places.OPEN_FILES > rolling.MIX
