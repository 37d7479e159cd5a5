"""Captured states on disk: refused by field, whole or absent, right by sample (B15, PROMISES 10, 11, 21)."""

import dataclasses
import json
import os
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from draftsmith.data.encode import Sample
from draftsmith.data.formats import decode, encode, encode_top
from draftsmith.data.packing import collate, make_batch
from draftsmith.data.places import write_atomically
from draftsmith.data.states import (
    SHARD_TOKENS,
    StateFields,
    StateStore,
    check_disk,
    data_fingerprint,
    estimate,
    plan,
    read_record,
    shard_file,
    write_index,
    write_shard,
)

WIDTH = 6
TAPS = (1, 2, 4)


def samples(*lengths: int) -> list[Sample]:
    return [Sample(10 + i, torch.arange(n) + 100 * i, torch.arange(n) >= n // 2) for i, n in enumerate(lengths)]


def fields_of(data: list[Sample]) -> StateFields:
    return StateFields(
        format=2,
        target="t" * 64,
        tokenizer="k",
        template="c",
        dtype="bfloat16",
        length=max(map(len, data)),
        data=data_fingerprint(data),
        width=WIDTH,
        vocab=300,
        taps=TAPS,
        stored="bfloat16",
        last_hidden=True,
        last_stored="bfloat16",
        top_k=0,
    )


def shard_tensors(data: list[Sample]) -> dict[str, torch.Tensor]:
    n = sum(map(len, data))
    rows = torch.cat([s.sample_id + torch.arange(len(s)) / 32 for s in data])
    return {
        "ids": torch.cat([s.ids for s in data]).to(torch.int32),
        "taps": (rows[:, None, None] + torch.arange(3)[None, :, None])
        .expand(n, 3, WIDTH)
        .to(torch.bfloat16)
        .contiguous(),
        "last_hidden": (-rows[:, None]).expand(n, WIDTH).to(torch.bfloat16).contiguous(),
        "log_z": rows.clone(),
        "top": torch.cat(
            [torch.where(s.supervised.roll(-1), 7, -1).index_fill(0, torch.tensor([len(s) - 1]), -1) for s in data]
        ).to(torch.int32),
    }


def kept_tensors(data: list[Sample], fields: StateFields) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    """A shard's tensors as `fields` keep them, and what a reader must get of each stream: random states."""
    n, dice = sum(map(len, data)), torch.Generator().manual_seed(data[0].sample_id)
    tensors, want = shard_tensors(data), {}
    for name, (stored, shape) in fields.streams.items():
        del tensors[name]
        parts = encode(torch.randn(n, *shape, generator=dice) * 5, stored)
        want[name] = decode(parts, stored).bfloat16()
        tensors |= {name + part: x for part, x in parts.items()}
    logits = 3 * torch.randn(int((tensors["top"] >= 0).sum()), fields.vocab, generator=dice)
    parts = encode_top(logits.clone(), logits.logsumexp(-1), fields.top_k)
    want["p"] = logits.softmax(-1)
    return tensors | {"top_k" + part: x for part, x in parts.items()}, want


@pytest.fixture
def data() -> list[Sample]:
    return samples(5, 9, 3, 7)


@pytest.fixture
def folder(tmp_path: Path, data: list[Sample]) -> Path:
    """Two shards of two samples each."""
    fields = fields_of(data)
    for k, group in enumerate((data[:2], data[2:])):
        write_shard(tmp_path, k, fields, shard_tensors(group), [(s.sample_id, len(s)) for s in group], [])
    records = [read_record(tmp_path, k, fields) for k in range(2)]
    write_index(tmp_path, fields, [r for r in records if r is not None])
    return tmp_path


def test_every_document_of_a_batch_gets_its_own_states(folder: Path, data: list[Sample]) -> None:
    store = StateStore(folder, fields_of(data))
    batch = make_batch([[data[3], data[0]], [data[1]]], 14, 0, 0)
    out = store.fill(batch)
    assert out.taps_BTPD is not None and out.last_hidden_BTD is not None and out.log_z_BT is not None
    at = {0: [(data[3], 0), (data[0], 7)], 1: [(data[1], 0)]}
    for row, documents in at.items():
        for s, begin in documents:
            want = shard_tensors([s])
            to = slice(begin, begin + len(s))
            assert torch.equal(out.taps_BTPD[row, to], want["taps"])
            assert torch.equal(out.last_hidden_BTD[row, to], want["last_hidden"])
            assert torch.equal(out.log_z_BT[row, to], want["log_z"])
    padding = batch.samples_BT < 0
    assert not out.taps_BTPD[padding].any() and bool((out.top_BT[padding] == -1).all())
    assert store.tokens == sum(map(len, data))
    assert store.bytes == sum((folder / shard_file(k)).stat().st_size for k in range(2))


def test_a_reader_may_take_fewer_taps(folder: Path, data: list[Sample]) -> None:
    expected = dataclasses.replace(fields_of(data), taps=(4,), last_hidden=False)
    out = StateStore(folder, expected, taps=(4,), last_hidden=False).fill(collate(data))
    assert out.last_hidden_BTD is None
    assert torch.equal(out.taps_BTPD[1, :9], shard_tensors([data[1]])["taps"][:, 2:])
    with pytest.raises(ValueError, match=r"taps \[3\] were not captured, it holds \[1, 2, 4\]"):
        StateStore(folder, taps=(3,))
    with pytest.raises(ValueError, match="another taps"):
        StateStore(folder, dataclasses.replace(fields_of(data), taps=(1, 3)))


@pytest.mark.parametrize(("stored", "last_stored"), [("int8", "int4"), ("int4", "int8")])
def test_small_formats_give_every_document_its_own_rows(
    tmp_path: Path, data: list[Sample], stored: str, last_stored: str
) -> None:
    """Documents in any order, a batch that cuts one short, fewer taps; of the teacher, rows in the right place."""
    changes = {"stored": stored, "last_stored": last_stored, "top_k": 5}
    fields = dataclasses.replace(fields_of(data), **changes)
    want = {}
    for k, group in enumerate((data[:2], data[2:])):
        tensors, want[k] = kept_tensors(group, fields)
        write_shard(tmp_path, k, fields, tensors, [(s.sample_id, len(s)) for s in group], [])
    write_index(tmp_path, fields, [r for k in range(2) if (r := read_record(tmp_path, k, fields))])
    store = StateStore(tmp_path, fields)
    short = dataclasses.replace(data[3], ids=data[3].ids[:6], supervised=data[3].supervised[:6])
    batch = make_batch([[short, data[0]], [data[1]]], 14, 0, 0)
    out = store.fill(batch)
    places = {(0, 0): (1, 3, 6, 0), (0, 6): (0, 0, 5, 0), (1, 0): (0, 5, 9, 2)}  # shard, first row, rows, earlier told
    for (row, at), (shard, begin, n, _) in places.items():
        for got, name in ((out.taps_BTPD, "taps"), (out.last_hidden_BTD, "last_hidden")):
            assert torch.equal(got[row, at : at + n], want[shard][name][begin : begin + n])
        told = (shard_tensors(data[:2] if shard == 0 else data[2:])["top"] >= 0).cumsum(0)
        for t in range(n):
            p_5 = out.likeliest.log_p_BTK[row, at + t].exp()
            if out.top_BT[row, at + t] < 0:
                assert not out.likeliest.tail_BT[row, at + t]
                continue
            p_V = want[shard]["p"][told[begin + t] - 1]
            assert torch.equal(out.likeliest.ids_BTK[row, at + t].long(), p_V.topk(5).indices)
            torch.testing.assert_close(p_5, p_V.topk(5).values, rtol=5e-3, atol=1e-6)
            torch.testing.assert_close(out.likeliest.tail_BT[row, at + t], 1 - p_V.topk(5).values.sum())
    assert not out.taps_BTPD[batch.samples_BT < 0].any() and not out.likeliest.log_p_BTK[out.top_BT < 0].any()
    fewer = StateStore(tmp_path, taps=(4, 1), last_hidden=False, top_k=0).fill(batch)
    assert torch.equal(fewer.taps_BTPD, out.taps_BTPD[:, :, [2, 0]])
    assert fewer.last_hidden_BTD is None and fewer.likeliest is None
    states, rest = estimate(data, fields)
    sizes = [
        {name: x.numel() * x.element_size() for name, x in load_file(tmp_path / shard_file(k)).items()} for k in (0, 1)
    ]
    kept = sum(n for of in sizes for name, n in of.items() if name.startswith(("taps", "last_hidden")))
    assert abs(states - kept) <= fields.shard_bytes  # these small shards were not cut by `plan`
    assert rest == sum(n for of in sizes for name, n in of.items()) - kept


def test_what_a_reader_does_not_ask_for_may_be_there(folder: Path, data: list[Sample]) -> None:
    """A head without taps, or without last_hidden, reads the folder of one that has both; what is missing is named."""
    fields = fields_of(data)
    bare = dataclasses.replace(fields, taps=(), stored="none")
    assert StateStore(folder, bare, taps=()).fill(collate(data)).taps_BTPD is None
    bare = dataclasses.replace(fields, last_hidden=False, last_stored="none")
    assert StateStore(folder, bare, last_hidden=False).fill(collate(data)).last_hidden_BTD is None
    with pytest.raises(ValueError, match="another top_k: 0 there, 64 here"):
        StateStore(folder, dataclasses.replace(bare, top_k=64), last_hidden=False)


@pytest.mark.parametrize("stored", ["int8", "int4"])
@pytest.mark.parametrize("part", ["taps.scale", "taps.channel", "last_hidden.scale", "top_k.log_p", "top_k.tail"])
def test_a_scale_that_is_not_finite_is_never_written_and_never_read(
    tmp_path: Path, data: list[Sample], stored: str, part: str
) -> None:
    """B15 in formats whose codes cannot be NaN: it would stand in a scale, or in what the teacher says."""
    fields = dataclasses.replace(fields_of(data), stored=stored, last_stored=stored, top_k=5)
    tensors, _ = kept_tensors(data, fields)
    write_shard(tmp_path, 0, fields, tensors, [(s.sample_id, len(s)) for s in data], [])
    record = read_record(tmp_path, 0, fields)
    assert record is not None
    tensors[part].view(-1)[3] = float("nan")
    with pytest.raises(ValueError, match=f"`{part}` holds a value that is not finite"):
        write_shard(tmp_path, 0, fields, tensors, [], [])
    save_file(tensors, tmp_path / shard_file(0), {"draftsmith": json.dumps({})})
    size = (tmp_path / shard_file(0)).stat().st_size
    write_index(tmp_path, fields, [dataclasses.replace(record, bytes=size)])
    with pytest.raises(ValueError, match=rf"shard-00000.safetensors: `{part}` holds a value that is not finite"):
        StateStore(tmp_path).fill(collate(data))


def test_a_reader_may_take_some_of_the_samples(folder: Path, data: list[Sample]) -> None:
    some = [data[2], data[0]]
    store = StateStore(folder, fields_of(some), samples=some)
    assert torch.equal(store.fill(collate(some[:1])).last_hidden_BTD[0, :3], shard_tensors(some[:1])["last_hidden"])
    marks = data[1].supervised.clone()
    marks[-1] = False
    for wrong, why in (
        (samples(5, 9, 3, 7, 4)[4], "sample 14 is not among them"),
        (Sample(11, data[1].ids[:8], data[1].supervised[:8]), "sample 11 has another length there"),
        (Sample(11, data[1].ids + 1, data[1].supervised), "sample 11 has other token ids there"),
        (Sample(11, data[1].ids, marks), "sample 11 is supervised elsewhere there"),
    ):
        mine = [data[0], wrong]
        with pytest.raises(ValueError, match=f"states of another data: {why}"):
            StateStore(folder, fields_of(mine), samples=mine)
    with pytest.raises(ValueError, match="another dtype"):
        StateStore(folder, dataclasses.replace(fields_of(some), dtype="float32"), samples=some)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("target", "u" * 64),
        ("tokenizer", "other"),
        ("template", "other"),
        ("dtype", "float32"),
        ("vocab", 301),
        ("stored", "float16"),
        ("last_stored", "int8"),
        ("top_k", 8),
        ("length", 99),
        ("data", "other"),
        ("width", 8),
    ],
)
def test_states_of_something_else_are_refused_naming_the_field(
    folder: Path, data: list[Sample], name: str, value: object
) -> None:
    other = dataclasses.replace(fields_of(data), **{name: value})
    with pytest.raises(ValueError, match=f"states of another {name}: .*{str(value)[:12]} here"):
        StateStore(folder, other)
    with pytest.raises(ValueError, match=f"states of another {name}"):
        read_record(folder, 0, other)


def test_another_format_is_refused(folder: Path) -> None:
    index = json.loads((folder / "index.json").read_text())
    index["fields"]["format"] = 1
    (folder / "index.json").write_text(json.dumps(index))
    with pytest.raises(ValueError, match="holds states of another format: 1 there, 2 here"):
        StateStore(folder)


def test_an_unfinished_capture_is_refused(folder: Path) -> None:
    (folder / "index.json").unlink()
    with pytest.raises(ValueError, match=r"no index\.json, 2 shards; the capture is not finished"):
        StateStore(folder)


def test_missing_truncated_and_altered_shards_are_refused(folder: Path, data: list[Sample]) -> None:
    path = folder / shard_file(1)
    content = path.read_bytes()
    flipped = bytearray(content)
    flipped[-1] ^= 1
    path.write_bytes(flipped)
    with pytest.raises(ValueError, match=r"shard-00001.safetensors has changed since it was written"):
        StateStore(folder).fill(collate(data))
    path.write_bytes(content[:-8])
    with pytest.raises(ValueError, match=r"shard-00001.safetensors is missing or not the"):
        StateStore(folder)
    path.unlink()
    with pytest.raises(ValueError, match="is missing"):
        StateStore(folder)


def test_a_value_that_is_not_finite_is_never_written_and_never_read(folder: Path, data: list[Sample]) -> None:
    """B15, last part: one NaN put into a cache by hand."""
    path = folder / shard_file(0)
    tensors = load_file(path)
    tensors["taps"][3, 1, 2] = float("nan")
    with pytest.raises(ValueError, match="`taps` holds a value that is not finite"):
        write_shard(folder, 0, fields_of(data), tensors, [], [])
    save_file(tensors, path, {"draftsmith": json.dumps({})})
    index = json.loads((folder / "index.json").read_text())
    index["shards"][0]["bytes"] = path.stat().st_size
    (folder / "index.json").write_text(json.dumps(index))
    with pytest.raises(ValueError, match=r"shard-00000.safetensors: `taps` holds a value that is not finite"):
        StateStore(folder).fill(collate(data))


def test_a_shard_header_that_lies_about_its_size_is_refused_at_once(folder: Path, data: list[Sample]) -> None:
    path = folder / shard_file(0)
    size = path.stat().st_size
    path.write_bytes((10**12).to_bytes(8, "little") + b"{" + b" " * (size - 9))
    with pytest.raises(ValueError, match="cannot be read"):
        StateStore(folder).fill(collate(data))


def test_an_index_cannot_point_outside_its_folder(folder: Path) -> None:
    index = json.loads((folder / "index.json").read_text())
    index["shards"][0]["file"] = "../" + folder.name + "/" + shard_file(0)
    (folder / "index.json").write_text(json.dumps(index))
    with pytest.raises(ValueError, match="is missing"):
        StateStore(folder)


def test_wrong_samples_and_wrong_ids_are_refused(folder: Path, data: list[Sample]) -> None:
    store = StateStore(folder)
    with pytest.raises(ValueError, match="sample 10 was captured with other token ids"):
        store.fill(collate([dataclasses.replace(data[0], ids=data[0].ids + 1)]))
    with pytest.raises(ValueError, match="sample 77 was not captured"):
        store.fill(collate([dataclasses.replace(data[0], sample_id=77)]))
    longer = Sample(10, torch.arange(6), torch.ones(6, dtype=torch.bool))
    with pytest.raises(ValueError, match="sample 10 has 5 captured tokens, the batch 6"):
        store.fill(collate([longer]))
    assert 10 in store and 77 not in store


def test_the_plan_depends_on_the_samples_alone() -> None:
    data = samples(*([100] * 50 + [SHARD_TOKENS + 1] + [100] * 50))
    shards = plan(data)
    assert [s.sample_id for group in shards for s in group] == [s.sample_id for s in data]
    assert all(sum(map(len, group)) <= SHARD_TOKENS or len(group) == 1 for group in shards)
    assert plan(data) == shards
    assert len(plan(samples(*[100] * 640))) >= 16


def test_a_write_that_is_interrupted_leaves_nothing_to_read(tmp_path: Path) -> None:
    path = tmp_path / "shard"

    def half(temporary: Path) -> None:
        temporary.write_bytes(b"half")
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        write_atomically(path, half)
    assert not path.exists()
    write_atomically(path, lambda temporary: temporary.write_bytes(b"whole"))
    assert path.read_bytes() == b"whole"
    assert os.listdir(tmp_path) == ["shard"]


def test_writers_of_one_file_do_not_disturb_each_other(tmp_path: Path) -> None:
    def slow(temporary: Path) -> None:
        temporary.write_bytes(b"x" * 1000)
        time.sleep(0.001)

    with ThreadPoolExecutor(8) as pool:
        done = [pool.submit(write_atomically, tmp_path / "index.json", slow) for _ in range(100)]
    assert [d.result() for d in done] == [None] * 100
    assert os.listdir(tmp_path) == ["index.json"]


def test_the_index_clears_what_a_killed_run_left(folder: Path, data: list[Sample]) -> None:
    (folder / (shard_file(0) + ".1-2.tmp")).write_bytes(b"half")
    write_index(folder, fields_of(data), [])
    assert not list(folder.glob("*.tmp"))


def test_disk_space_is_checked(tmp_path: Path) -> None:
    check_disk(tmp_path / "not" / "yet", 1000)
    with pytest.raises(ValueError, match=r"states need 1,000,000,000,000,000,000 bytes, .* free"):
        check_disk(tmp_path, 10**18)


def test_the_estimate_is_exact(folder: Path, data: list[Sample]) -> None:
    states, rest = estimate(data, fields_of(data))
    stored = [load_file(folder / shard_file(k)) for k in range(2)]
    size = {name: sum(t[name].numel() * t[name].element_size() for t in stored) for name in stored[0]}
    assert states == size["taps"] + size["last_hidden"]
    assert rest == size["ids"] + size["log_z"] + size["top"]
