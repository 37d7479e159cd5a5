"""States in a store: the same as in a folder, bounded on the local disk, and one clear line when something is wrong.

`memory://` stands for the store where the fault is what matters; one test has an S3 server on loopback, with capture
and training as two commands that share nothing else. Run: pytest tests/test_places.py
"""

from __future__ import annotations

import errno
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import fsspec
import pytest
import torch
from safetensors.torch import load_file
from test_capture import TAPS, by_one, contents, gap, many_samples, some_samples
from test_data_states import fields_of, samples, shard_tensors

from draftsmith.data import places
from draftsmith.data.encode import Sample
from draftsmith.data.packing import collate
from draftsmith.data.places import Folder, Place, Store, inside, place_of
from draftsmith.data.states import (
    StateStore,
    note_file,
    read_records,
    shard_file,
    write_index,
    write_shard,
)
from draftsmith.inference import capture as module
from draftsmith.inference.capture import capture
from draftsmith.train.stream import AHEAD, Stream, sample_ids

ROOT = Path(__file__).parents[1]


@pytest.fixture
def memory() -> Iterator[Any]:
    """fsspec's store in memory, empty."""
    fs = fsspec.filesystem("memory")
    fs.store.clear()
    fs.pseudo_dirs[:] = [""]
    yield fs
    fs.store.clear()


@pytest.fixture
def store(memory: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Store:
    monkeypatch.setattr(places, "PAUSE", 0.0)
    return Store("memory://bucket/states", tmp_path / "cache")


@pytest.fixture
def data() -> list[Sample]:
    return samples(5, 9, 3, 7, 6, 8)


def filled(place: Place, data: list[Sample], index: bool = True) -> Place:
    """One shard per sample."""
    fields = fields_of(data)
    for k, s in enumerate(data):
        write_shard(place, k, fields, shard_tensors([s]), [(s.sample_id, len(s))], [])
    records = read_records(place, len(data), fields)
    assert None not in records
    if index:
        write_index(place, fields, [r for r in records if r is not None])
    return place


def copies(store: Store) -> list[str]:
    return sorted(path.name[9:] for path in store.copies.glob("*-shard-*"))


def test_a_store_gives_what_a_folder_gives(store: Store, tmp_path: Path, data: list[Sample]) -> None:
    filled(Folder(tmp_path / "folder"), data)
    filled(store, data)
    here, there = StateStore(tmp_path / "folder", fields_of(data)), StateStore(store, fields_of(data))
    assert (there.tokens, there.bytes) == (here.tokens, here.bytes)
    for s in data:
        a, b = here.fill(collate([s])), there.fill(collate([s]))
        assert torch.equal(a.taps_BTPD, b.taps_BTPD) and torch.equal(a.top_BT, b.top_BT)
    assert copies(store) == [shard_file(k) for k in range(6)]
    assert not list(store.root.rglob("*.tmp")) and not list(store.root.glob("*.*"))


def test_addresses(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert isinstance(place_of(tmp_path), Folder) and isinstance(place_of("states/x"), Folder)
    store = place_of("memory://bucket/x/", str(tmp_path), 2.0)
    assert isinstance(store, Store) and (store.url, store.limit) == ("memory://bucket/x", 2_000_000_000)
    part = inside(store, "train")
    assert str(part) == "memory://bucket/x/train" and part.name == "x/train" and part.root == store.root
    assert str(inside(Folder(tmp_path), "train")) == str(tmp_path / "train")
    monkeypatch.setenv("DRAFTSMITH_CACHE", str(tmp_path / "kept"))
    assert Store("memory://bucket/x").root == tmp_path / "kept" / "states"


@pytest.mark.parametrize("url", ["s3://AKIAKEY:planted-secret@bucket/x", "https://host/x?sig=planted-secret"])
def test_an_address_with_a_credential_is_refused_and_not_repeated(url: str) -> None:
    with pytest.raises(ValueError, match="holds no credentials and no query") as error:
        place_of(url)
    assert "planted" not in str(error.value)


@pytest.mark.parametrize("url", ["simplecache::s3://bucket/x", "s3://", "://x"])
def test_what_is_no_address_is_refused(url: str) -> None:
    with pytest.raises(ValueError, match="is no address of states"):
        place_of(url)


def test_a_store_without_its_package_is_named() -> None:
    with pytest.raises(ValueError, match=r"nonsense://bucket/x: .*draftsmith\[stores\]"):
        place_of("nonsense://bucket/x")


# The cache


def test_the_cache_is_bounded_and_the_least_recently_used_goes_first(store: Store, data: list[Sample]) -> None:
    filled(store, data)
    size = max(store.sizes().values())
    store.limit = int(size * 3 / places.KEPT) + 10
    states = StateStore(store)
    assert states._open.cache_info().maxsize == 1
    for turn, k in enumerate([0, 1, 2, 0, 3]):
        states.fill(collate([data[k]]))
        for path in store.copies.glob("*"):  # the clock of a file system is coarse
            if path.name.endswith(shard_file(k)):
                os.utime(path, (turn, turn))
        assert sum(p.stat().st_size for p in store.root.rglob("*") if p.is_file()) <= store.limit * places.KEPT
    assert copies(store) == [shard_file(k) for k in (0, 2, 3)]
    store.limit = size
    with pytest.raises(ValueError, match=rf"the cache takes {int(size * places.KEPT):,}: raise states.cache_gb"):
        states.fill(collate([data[5]]))


def test_what_a_dead_process_left_in_the_cache_goes_too(store: Store, data: list[Sample]) -> None:
    filled(store, data)
    store.copies.mkdir(parents=True)
    old, new = store.copies / "x.1-1.tmp", store.copies / "y.1-1.tmp"
    for path in (old, new):
        path.write_bytes(b"x" * store.limit if store.limit < 1000 else b"x" * 1000)
    os.utime(old, (0, 0))
    store.limit = int(max(store.sizes().values()) / places.KEPT) + 1
    StateStore(store).fill(collate([data[0]]))
    assert not old.exists() and new.exists()


def test_a_damaged_copy_is_fetched_again(store: Store, data: list[Sample]) -> None:
    filled(store, data)
    StateStore(store).fill(collate(data))
    (copy,) = store.copies.glob(f"*-{shard_file(1)}")
    content = copy.read_bytes()
    for damaged in (content[:-1] + bytes([content[-1] ^ 1]), content[:-8]):
        copy.unlink()  # a mapped file is not to be cut
        copy.write_bytes(damaged)
        again = Store(store.url, store.root)  # another process
        assert torch.equal(StateStore(again).fill(collate([data[1]])).taps_BTPD[0], shard_tensors([data[1]])["taps"])
        assert copy.read_bytes() == content


def test_coming_samples_are_fetched_in_the_background_in_their_order(store: Store, data: list[Sample]) -> None:
    filled(store, data)
    states, fetched = StateStore(store), []
    get = store._fs.get_file

    def slow(remote: str, local: str) -> None:
        time.sleep(0.02)
        fetched.append((remote[-len(shard_file(0)) :], threading.current_thread().name))
        get(remote, local)

    store._fs = type("Slow", (), {"get_file": staticmethod(slow)})()
    states.coming([data[k].sample_id for k in (4, 2, 4, 0)])
    limit = time.monotonic() + 10
    while len(fetched) < 3 and time.monotonic() < limit:
        time.sleep(0.01)
    assert fetched == [(shard_file(k), "states") for k in (4, 2, 0)]
    states.fill(collate([data[2], data[4]]))
    assert len(fetched) == 3
    store.limit = int(1.5 * max(s.bytes for s in states._shards) / places.KEPT * 2)  # half of it holds one
    states.coming([data[k].sample_id for k in (1, 3, 5)])
    time.sleep(0.3)
    assert [name for name, _ in fetched[3:]] == [shard_file(1)]


def test_the_stream_says_what_it_reads_next() -> None:
    data = [Sample(50 + i, torch.arange(10), torch.ones(10, dtype=torch.bool)) for i in range(24)]
    for rank in range(2):
        stream = Stream(data, row_length=20, rows=2, accumulate=1, seed=0, rank=rank, world=2)
        told: list[list[int]] = []
        stream.announce = told.append
        got = [set(sample_ids(stream.window(epoch, index))) for epoch in range(3) for index in range(stream.windows(0))]
        for at, ids in enumerate(told[: len(got) - AHEAD]):
            assert set(ids) == set().union(*got[at : at + AHEAD + 1]) and set(ids[:2]) == got[at]


# Faults


@pytest.fixture
def fails(store: Store, monkeypatch: pytest.MonkeyPatch) -> Callable[..., list[str]]:
    """`fails(name, error, times)`: the store's operation raises so many times; returns the calls."""

    def plant(name: str, error: BaseException, times: int = 10**6) -> list[str]:
        calls: list[str] = []
        run = getattr(type(store._fs), name)

        def broken(self: Any, *args: Any, **options: Any) -> Any:
            calls.append(name)
            if len(calls) <= times:
                raise error
            return run(self, *args, **options)

        monkeypatch.setattr(type(store._fs), name, broken)
        return calls

    return plant


def test_what_fails_for_a_while_is_tried_again(store: Store, data: list[Sample], fails: Any) -> None:
    calls = fails("put_file", OSError("reset by peer"), 3), fails("get_file", TimeoutError(), 2)
    filled(store, data)
    assert len(calls[0]) == 3 + 13
    StateStore(store).fill(collate(data))
    assert len(calls[1]) == 2 + 6


def test_a_store_that_cannot_be_reached_is_one_line(store: Store, data: list[Sample], fails: Any) -> None:
    filled(store, data)
    calls = fails("get_file", RuntimeError("no route to https://jane:planted@host/x?sig=planted\n more"))
    with pytest.raises(ConnectionError) as error:
        StateStore(store).fill(collate(data))
    assert len(calls) == places.TRIES
    line = str(error.value)
    assert line.startswith("memory://bucket/states cannot be read (shard-00000.safetensors) after 5 tries (no route to")
    assert line.endswith("; what is there stays, the same command goes on from it")
    assert "planted" not in line and "\n" not in line
    fails("ls", OSError("down"))
    with pytest.raises(ConnectionError, match="cannot be listed"):
        StateStore(store)


def test_refused_access_is_not_tried_again(store: Store, data: list[Sample], fails: Any) -> None:
    calls = fails("put_file", PermissionError("403 Forbidden"))
    with pytest.raises(PermissionError, match=r"access refused .*credentials come from the environment"):
        filled(store, data)
    assert len(calls) == 1


@pytest.mark.parametrize("name", ["put_file", "get_file"])
def test_a_full_disk_is_one_line_and_loses_nothing(store: Store, data: list[Sample], fails: Any, name: str) -> None:
    if name == "get_file":
        filled(store, data)
    calls = fails(name, OSError(errno.ENOSPC, "No space left on device", "/somewhere"))
    with pytest.raises(
        OSError, match=r"no space for states in the cache folder .*set states\.cache to another disk"
    ) as e:
        StateStore(store).fill(collate(data)) if name == "get_file" else filled(store, data)
    assert e.value.filename is None and len(calls) == 1
    assert not [p for p in store.root.rglob("*") if p.is_file()]


def test_missing_truncated_and_altered_shards_are_refused(store: Store, memory: Any, data: list[Sample]) -> None:
    filled(store, data)
    path = f"/bucket/states/{shard_file(1)}"
    content = memory.cat_file(path)
    memory.pipe_file(path, content[:-1] + bytes([content[-1] ^ 1]))
    with pytest.raises(ValueError, match=r"states/shard-00001.safetensors has changed since it was written"):
        StateStore(store).fill(collate(data))
    assert shard_file(1) not in copies(store)
    memory.pipe_file(path, content[:-8])
    with pytest.raises(ValueError, match=rf"shard-00001.safetensors is missing or not the {len(content):,} bytes"):
        StateStore(store)
    memory.pipe_file(path, content)
    opened = StateStore(store)
    memory.rm_file(path)
    with pytest.raises(ValueError, match=r"shard-00001\.safetensors is missing; capture again"):
        opened.fill(collate(data))
    with pytest.raises(ValueError, match="is missing or not"):
        StateStore(store)


def test_states_of_something_else_are_refused(store: Store, data: list[Sample]) -> None:
    filled(store, data, index=False)
    other = fields_of(samples(5, 9))
    with pytest.raises(ValueError, match=r"no index\.json, 6 shards; the capture is not finished"):
        StateStore(store)
    with pytest.raises(ValueError, match="bucket/states holds states of another data"):
        read_records(store, 1, other)
    filled(store, data)
    with pytest.raises(ValueError, match="bucket/states holds states of another data"):
        StateStore(store, other)


# Capture


def objects(memory: Any, folder: str) -> dict[str, bytes]:
    found = {name.rsplit("/", 1)[-1]: memory.cat_file(name) for name in memory.ls(folder, detail=False)}
    return {name: content for name, content in found.items() if not name.startswith("shard-") or "safet" in name}


def test_states_belong_to_their_sample(tiny: Any, store: Store) -> None:
    """B13: several samples in one forward, one after another, and by another reader."""
    target, data = tiny(), some_samples()
    opened = capture(target, data, store, TAPS, True, 4096, False, stored="float32")
    for states in (opened, StateStore(Store(store.url, store.root))):
        for s in [*data, *reversed(data)]:
            taps_TPD, last_TD = by_one(target, s)
            out = states.fill(collate([s]))
            assert gap(out.taps_BTPD[0], taps_TPD) < 1e-5 and gap(out.last_hidden_BTD[0], last_TD) < 1e-5


def test_ranks_and_resume_give_the_bytes_of_a_folder(
    tiny: Any, store: Store, memory: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ranks see each other's shards through the store alone; a stopped capture goes on; a shard whose upload was cut off
    (B31) or that was damaged before the index is written anew."""
    target, data = tiny(), many_samples()
    capture(target, data, tmp_path / "folder", TAPS, progress=False, threads=1)
    want = contents(tmp_path / "folder")
    monkeypatch.setattr(Store, "poll", 0.05)

    def rank_1() -> None:
        capture(target, data, Store(store.url, tmp_path / "other"), TAPS, progress=False, threads=1, rank=1, world=2)

    thread = threading.Thread(target=rank_1)
    thread.start()
    thread.join(0.5)
    assert thread.is_alive() and not memory.exists("/bucket/states/index.json")  # it waits for rank 0
    capture(tiny(seed=0), data, store, TAPS, progress=False, threads=1, rank=0, world=2)
    thread.join()
    assert objects(memory, "/bucket/states") == want

    memory.rm("/bucket/states", recursive=True)
    calls, put = [0], type(memory).put_file

    def torn(self: Any, local: str, remote: str, **options: Any) -> None:
        calls[0] += 1
        if calls[0] == 5:  # two shards with their notes are through; of the third, half
            self.pipe_file(remote, Path(local).read_bytes()[:1000])
            raise KeyboardInterrupt
        put(self, local, remote, **options)

    monkeypatch.setattr(type(memory), "put_file", torn)
    with pytest.raises(KeyboardInterrupt):
        capture(target, data, store, TAPS, progress=False, threads=1)
    assert memory.exists(f"/bucket/states/{shard_file(2)}") and not memory.exists(f"/bucket/states/{note_file(2)}")
    with pytest.raises(ValueError, match=r"no index\.json, 3 shards"):
        StateStore(store)
    assert not [p for p in store.root.rglob("*") if p.is_file()]
    cut = memory.cat_file(f"/bucket/states/{shard_file(1)}")[:-5]
    memory.pipe_file(f"/bucket/states/{shard_file(1)}", cut)
    kept, filled = memory.modified(f"/bucket/states/{shard_file(0)}"), module._fill
    numbers: list[int] = []
    monkeypatch.setattr(module, "_fill", lambda *args: (numbers.append(args[3]), filled(*args)))
    capture(target, data, store, TAPS, progress=False, threads=1)
    assert objects(memory, "/bucket/states") == want
    assert numbers == list(range(1, len(want) - 1)) and memory.modified(f"/bucket/states/{shard_file(0)}") == kept


# Two hosts


@pytest.fixture
def s3(monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """An S3 server on the loopback interface with one bucket; its address and credentials are in the environment."""
    server_module = pytest.importorskip("moto.server")
    server = server_module.ThreadedMotoServer("127.0.0.1", 0, verbose=False)
    server.start()
    port = server.get_host_and_port()[1]
    monkeypatch.setenv("AWS_ENDPOINT_URL", f"http://127.0.0.1:{port}")
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "AKIAPLANTEDPLANTED12")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "planted-secret-value")
    monkeypatch.setenv("AWS_DEFAULT_REGION", "us-east-1")
    monkeypatch.setenv("AWS_MAX_ATTEMPTS", "1")
    fsspec.get_filesystem_class("s3").clear_instance_cache()
    fsspec.filesystem("s3").mkdir("bucket")
    yield "s3://bucket/states"
    server.stop()


def test_capture_and_training_share_nothing_but_an_s3_store(
    s3: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two commands with folders of their own; the trained weights are those of a run on a local folder, bit for bit; a
    store that is gone then is one line."""
    data = ["data.limit=24", "data.max_length=128"]

    def run(host: str, *command: str) -> subprocess.CompletedProcess[str]:
        home = tmp_path / host
        home.mkdir(exist_ok=True)
        env = os.environ | {"DRAFTSMITH_CACHE": str(home / "cache"), "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
        return subprocess.run(
            [sys.executable, *command], env=env, cwd=home, capture_output=True, text=True, timeout=300
        )

    flags = [
        "--target",
        "tiny",
        "--dtype",
        "float32",
        "--taps",
        "[1, 2, 3]",
        "--data.limit",
        "24",
        "--data.max_length",
        "128",
        "--heldout",
        "2",
    ]
    done = run("capturer", "-m", "draftsmith.cli", "capture", "--out", s3, *flags)
    assert done.returncode == 0, done.stderr
    assert not list((tmp_path / "capturer/cache").rglob("*.tmp"))

    fs = fsspec.filesystem("s3", skip_instance_cache=True)

    def etags(split: str) -> dict[str, tuple[str, Any]]:
        fs.invalidate_cache()
        found = fs.ls(f"{s3}/{split}", detail=True)
        return {f["name"].rsplit("/", 1)[-1]: (f["ETag"], f["LastModified"]) for f in found}

    captured = etags("train"), etags("heldout")
    assert all({"index.json", shard_file(0), note_file(0)} <= found.keys() for found in captured)
    assert shard_file(1) in captured[0]

    settings = [*data, "batch.row_length=128", "budget.steps=4", "evaluate.conversations=2", "evaluate.probe_prompts=0"]
    script = ["--config", str(ROOT / "configs/quick.yaml"), *settings]
    train = [str(ROOT / "train/distill_draft.py"), *script, "run=run", f"states.folder={s3}"]
    trained = run("trainer", *train)
    assert trained.returncode == 0, trained.stderr
    assert (etags("train"), etags("heldout")) == captured  # all was there
    from draftsmith.train.distill_draft import main

    monkeypatch.chdir(tmp_path)
    assert main([*script, "run=local"]) == 0
    for file in ("export/model.safetensors", "checkpoints/step-00000004/optimiser.safetensors"):
        a, b = load_file(tmp_path / "trainer/run" / file), load_file(tmp_path / "local" / file)
        assert a.keys() == b.keys() and all(torch.equal(a[k], b[k]) for k in a)
    assert len(list((tmp_path / "trainer/cache/states").rglob("*.safetensors"))) > 2
    texts = [trained.stdout, trained.stderr, done.stdout, done.stderr]
    texts += [p.read_bytes().decode(errors="replace") for p in (tmp_path / "trainer/run").rglob("*") if p.is_file()]
    assert not any("planted-secret" in text or "AKIAPLANTED" in text for text in texts)

    fs.rm("bucket", recursive=True)
    with pytest.raises(OSError, match=r"^s3://bucket/states/train: no such bucket or folder \("):
        Store(f"{s3}/train", tmp_path / "cache").write("index.json", lambda path: path.write_text("{}"))
    monkeypatch.setattr(places, "TRIES", 2)
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:1")
    type(fs).clear_instance_cache()
    with pytest.raises(ConnectionError, match=r"^s3://bucket/gone cannot be listed after 2 tries \(Could not connect"):
        Store("s3://bucket/gone", tmp_path / "cache").sizes()
