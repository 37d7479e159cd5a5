"""Captured states on disk: plain safetensors shards and one index, written so that no half of either is ever read.

A folder holds `shard-00000.safetensors`, ... and `index.json`. A shard holds documents one after the other:

    ids int32 [n], taps [n, P, D] and last_hidden [n, D] each as stored (formats.py), log_z fp32 [n], top int32 [n],
    top_k.ids and top_k.log_p [m, K], top_k.tail [m]

`log_z` and `top` are the log-sum-exp and the argmax of the teacher's logits over the whole vocabulary; they are there
for the rows whose next token is supervised (elsewhere top = -1, log_z = 0), and `top_k`, which takes the place of
last_hidden where that is a teacher and no more, has these m rows alone. Which samples go into which shard depends
on the samples alone, so any number of processes may fill a folder and an interrupted capture goes on where it was.
The index appears when all shards do. It names what the states belong to (`StateFields`); whoever opens the folder for
something else is refused with the field that differs. Who needs only some of the samples, such as a recipe with a smaller
`data.limit`, may read them there. Tested by `pytest tests/test_data_states.py`.
"""

from __future__ import annotations

import hashlib
import json
import shutil
import zlib
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from .batch import Batch, Likeliest, TargetOut
from .encode import Sample
from .formats import CHANNEL, decode, decode_top, handed_out, layout, row_bytes, shard_bytes, top_bytes
from .places import Place, Store, checksum, place_of

FORMAT = 2
READERS = 16  # notes read at once: each takes a round trip to the store
SHARD_TOKENS = 8192  # at most; small data is cut into about 16 shards, so that several processes share it evenly
ROW_BYTES = 12  # ids, log_z, top
KEPT = ("taps", "stored", "last_hidden", "last_stored", "top_k")  # of these a folder may hold more than is read


@dataclass(frozen=True)
class StateFields:
    """What captured states belong to. The first fields must be equal to those of the reader; of the others a folder
    must hold at least what the reader needs, in the format it asks for."""

    format: int
    target: str  # fingerprint of weights and config
    tokenizer: str
    template: str
    dtype: str  # the target computed in this
    length: int  # tokens of the longest sample
    data: str  # over sample ids, token ids and masks
    width: int
    vocab: int
    taps: tuple[int, ...]
    stored: str  # how the taps are kept, see formats.py; "none" without taps
    last_hidden: bool
    last_stored: str  # the same of last_hidden
    top_k: int  # likeliest ids of the teacher; 0 = not kept

    @property
    def streams(self) -> dict[str, tuple[str, tuple[int, ...]]]:
        """Of each stream of states that is kept: how, and its shape [.., D]."""
        taps = {"taps": (self.stored, (len(self.taps), self.width))} if self.taps else {}
        return taps | ({"last_hidden": (self.last_stored, (self.width,))} if self.last_hidden else {})

    @property
    def token_bytes(self) -> int:
        """Bytes of one token's states."""
        return sum(row_bytes(*stream) for stream in self.streams.values())

    @property
    def shard_bytes(self) -> int:
        """Bytes of a shard beside its rows."""
        return sum(shard_bytes(*stream) for stream in self.streams.values())


@dataclass(frozen=True)
class ShardRecord:
    """One finished shard: documents (sample id, tokens) in order, and skipped ones (sample id, where it overflowed)."""

    file: str
    bytes: int
    crc32: int
    samples: list[tuple[int, int]]
    skipped: list[tuple[int, str]]


def data_fingerprint(samples: Iterable[Sample]) -> str:
    """sha256 over ids and masks of the samples (and the order of decoding and Jacobi states, where stored), in order."""
    digest = hashlib.sha256()
    for s in samples:
        digest.update(f"{s.sample_id}:{len(s)};".encode())
        digest.update(s.ids.to(torch.int32).numpy().tobytes())
        digest.update(s.supervised.numpy().tobytes())
        if s.order is not None:
            digest.update(s.order.to(torch.int32).numpy().tobytes())
        if s.states is not None:
            digest.update(s.states.dense(s.ids).to(torch.int32).numpy().tobytes())
    return digest.hexdigest()


def text_fingerprint(text: str | None) -> str:
    """sha256 of a text; "none" where there is none."""
    return "none" if text is None else hashlib.sha256(text.encode()).hexdigest()


def plan(samples: Sequence[Sample]) -> list[list[Sample]]:
    """The samples of each shard; depends on nothing else. At most `SHARD_TOKENS` tokens, or one longer sample."""
    room = min(SHARD_TOKENS, max(sum(map(len, samples)) // 16, 1024))
    shards: list[list[Sample]] = []
    used = room
    for sample in samples:
        if used + len(sample) > room:
            shards.append([])
            used = 0
        shards[-1].append(sample)
        used += len(sample)
    return shards


def estimate(samples: Sequence[Sample], fields: StateFields) -> tuple[int, int]:
    """Bytes on disk: (states, everything else: ids, log-sums, argmaxes and the likeliest ids)."""
    tokens, shards = sum(len(s) for s in samples), len(plan(samples))
    told = sum(int(s.supervised[1:].sum()) for s in samples) if fields.top_k else 0
    rest = tokens * ROW_BYTES + told * top_bytes(fields.top_k, fields.vocab)
    return tokens * fields.token_bytes + shards * fields.shard_bytes, rest


def check_disk(folder: Path, needed: int) -> None:
    """Raise ValueError unless `needed` bytes and 1 % more are free where `folder` is or will be."""
    existing = folder.resolve()
    while not existing.exists():
        existing = existing.parent
    free = shutil.disk_usage(existing).free
    if free < needed * 1.01:
        raise ValueError(
            f"states need {needed:,} bytes, {folder.name or folder} has {free:,} free; "
            "take fewer samples (data.limit), fewer taps, a smaller format (stored: int8, int4), or another disk"
        )


def all_finite(x: Tensor) -> bool:
    """Whether all values are finite: NaN passes through the extremes, in a thirtieth of the time of a look at each."""
    return x.numel() == 0 or bool(torch.isfinite(torch.stack(x.aminmax())).all())


def shard_file(number: int) -> str:
    """Name of a shard."""
    return f"shard-{number:05d}.safetensors"


def note_file(number: int) -> str:
    """Name of a shard's note: its fields and record, kept beside it in a store, so that nobody has to fetch a shard to
    know that it is whole."""
    return f"shard-{number:05d}.json"


def write_shard(
    folder: Path | Place,
    number: int,
    fields: StateFields,
    tensors: dict[str, Tensor],
    samples: Sequence[tuple[int, int]],
    skipped: Sequence[tuple[int, str]],
) -> None:
    """Write one shard; the last line of defence against a non-finite value.

    Raises:
        ValueError: a state is not finite.
    """
    for name, x in tensors.items():
        if x.is_floating_point() and not all_finite(x):
            raise ValueError(f"{shard_file(number)}: `{name}` holds a value that is not finite")
    meta = {"fields": asdict(fields), "samples": list(samples), "skipped": list(skipped)}
    metadata = {"draftsmith": json.dumps(meta)}
    place, file = place_of(folder), shard_file(number)
    note: dict[str, Any] = {}

    def write(path: Path) -> None:
        save_file(tensors, path, metadata)
        if place.remote:
            record = ShardRecord(file, path.stat().st_size, checksum(path), list(samples), list(skipped))
            note.update(fields=asdict(fields), record=asdict(record))

    place.write(file, write)
    if note:
        place.write(note_file(number), lambda path: path.write_text(json.dumps(note), encoding="utf-8"))


def finished(place: Place, count: int) -> set[int]:
    """Which of the first `count` shards are there."""
    name, sizes = note_file if place.remote else shard_file, place.sizes()
    return {k for k in range(count) if name(k) in sizes}


def read_records(place: Place, count: int, fields: StateFields) -> list[ShardRecord | None]:
    """`read_record` of the first `count` shards."""
    sizes = place.sizes()
    if not place.remote:
        return [read_record(place, k, fields, sizes) for k in range(count)]
    with ThreadPoolExecutor(READERS) as pool:
        return list(pool.map(lambda k: read_record(place, k, fields, sizes), range(count)))


def read_record(
    folder: Path | Place, number: int, fields: StateFields, sizes: dict[str, int] | None = None
) -> ShardRecord | None:
    """The record of a finished shard, None where there is none yet or it is broken.

    Raises:
        ValueError: the shard belongs to something else; names the field.
    """
    place = place_of(folder)
    if isinstance(place, Store):
        return _noted_record(place, number, fields, place.sizes() if sizes is None else sizes)
    path = place.path / shard_file(number)
    try:
        with safe_open(path, framework="pt") as shard:
            meta = json.loads(shard.metadata()["draftsmith"])
    except (FileNotFoundError, SafetensorError, KeyError, TypeError):
        return None
    _refuse_other(_fields(meta["fields"], place), fields, place, exact=True)
    content = path.read_bytes()
    return ShardRecord(
        path.name,
        len(content),
        zlib.crc32(content),
        [(int(i), int(n)) for i, n in meta["samples"]],
        [(int(i), str(where)) for i, where in meta["skipped"]],
    )


def _noted_record(place: Store, number: int, fields: StateFields, sizes: dict[str, int]) -> ShardRecord | None:
    if note_file(number) not in sizes:
        return None
    try:
        note = json.loads(place.read(note_file(number)))
        found, record = note["fields"], _record(note["record"])
    except (FileNotFoundError, json.JSONDecodeError, KeyError, TypeError):
        return None
    _refuse_other(_fields(found, place), fields, place, exact=True)
    return record if sizes.get(record.file) == record.bytes else None


def write_index(folder: Path | Place, fields: StateFields, shards: Sequence[ShardRecord]) -> None:
    """Write `index.json` over all shards: from now on the folder can be opened. Removes what killed runs left behind."""
    place = place_of(folder)
    index = {"fields": asdict(fields), "shards": [asdict(s) for s in shards]}
    place.write("index.json", lambda path: path.write_text(json.dumps(index), encoding="utf-8"))
    place.tidy()  # all shards are there, so nobody is writing one


class StateStore:
    """Captured states of a folder or a store, read straight from mapped files.

    `taps`, `last_hidden` and `top_k` choose what `fill` hands out (None = all that was captured). `expected` are the
    fields that the run computes for itself, from `samples`: with these, states of more samples than they are will do.
    `index`, `record`: what stands in place of the folder's index while its shards are still being written (rolling.py).

    Raises:
        ValueError: nothing there, capture not finished, a file changed since, or states of something else.
    """

    def __init__(
        self,
        folder: Path | str | Place,
        expected: StateFields | None = None,
        taps: Sequence[int] | None = None,
        last_hidden: bool | None = None,
        samples: Sequence[Sample] | None = None,
        top_k: int | None = None,
        index: dict[str, Any] | None = None,
        record: Callable[[int], ShardRecord] | None = None,
    ) -> None:
        self.folder = place_of(folder)
        try:
            index = json.loads(self.folder.read("index.json")) if index is None else index
            self.fields = _fields(index["fields"], self.folder)
            shards = [_record(s) for s in index["shards"]]
        except FileNotFoundError:
            found = sum(name.endswith(".safetensors") for name in self.folder.sizes())
            raise ValueError(
                f"{self.folder.name}: no index.json, {found} shards; the capture is not finished. "
                "Run the same `draftsmith capture` again, it goes on where it was"
            ) from None
        except (json.JSONDecodeError, KeyError, TypeError) as error:
            raise ValueError(f"{self.folder.name}/index.json is not an index of states ({error})") from None
        some = expected is not None and samples is not None and expected.data != self.fields.data
        if expected is not None:
            if some:  # the samples are looked at one by one below
                expected = replace(expected, data=self.fields.data, length=self.fields.length)
            _refuse_other(self.fields, expected, self.folder, exact=False)
        wanted = self.fields.taps if taps is None else tuple(taps)
        missing = [k for k in wanted if k not in self.fields.taps]
        if missing:
            raise ValueError(f"{self.folder.name}: taps {missing} were not captured, it holds {list(self.fields.taps)}")
        if last_hidden and not self.fields.last_hidden:
            raise ValueError(f"{self.folder.name}: last_hidden was not captured")
        self.taps = wanted
        self.last_hidden = self.fields.last_hidden if last_hidden is None else last_hidden
        self.top_k = self.fields.top_k if top_k is None else top_k
        self.skipped = {i: where for shard in shards for i, where in shard.skipped}
        self.samples = sum(len(shard.samples) + len(shard.skipped) for shard in shards)
        self.bytes = sum(shard.bytes for shard in shards)
        self.tokens = 0
        self._place: dict[int, tuple[int, int, int]] = {}  # sample id -> shard, first row, rows
        sizes = self.folder.sizes()
        for number, shard in enumerate(shards):
            if record is None and sizes.get(shard.file) != shard.bytes:
                raise ValueError(
                    f"{self.folder.name}: {shard.file} is missing or not the {shard.bytes:,} bytes written"
                )
            row = 0
            for i, n in shard.samples:
                self._place[i] = (number, row, n)
                row += n
            self.tokens += row
        self._shards = shards
        self._record = record or shards.__getitem__
        self.rolling: Any = None  # what paces the reader while shards are still being written (rolling.Rolling)
        largest = max((shard.bytes for shard in shards), default=0)
        self._open = lru_cache(maxsize=self.folder.open_files(largest))(self._open_shard)
        self._checked: set[int] = set()
        self.close = self._open.cache_clear
        self._columns = None if wanted == self.fields.taps else [self.fields.taps.index(k) for k in wanted]
        if some:
            for sample in samples or ():
                self._refuse_stranger(sample)

    def __contains__(self, sample_id: int) -> bool:
        return sample_id in self._place

    def usable(self, samples: Sequence[Sample]) -> list[Sample]:
        """The samples without those that were skipped because their states are not finite."""
        return [s for s in samples if s.sample_id not in self.skipped]

    def coming(self, samples: Iterable[int]) -> None:
        """These samples are read next, in this order: a store's shards are fetched in the background until then."""
        if isinstance(self.folder, Store):
            numbers = dict.fromkeys(self._place[i][0] for i in samples if i in self._place)
            self.folder.prefetch([(s.file, s.bytes, s.crc32) for s in map(self._shards.__getitem__, numbers)])

    def fill(self, batch: Batch) -> TargetOut:
        """States of every document of the batch; padding rows are zero (top = -1).

        Raises:
            ValueError: a sample is not there, has other token ids, or a shard changed or holds a non-finite value.
        """
        b, t = batch.ids_BT.shape
        fields, width, taps_BTPD, last_hidden_BTD, likeliest = self.fields, self.fields.width, None, None, None
        if self.taps:
            taps_BTPD = torch.zeros(b, t, len(self.taps), width, dtype=handed_out(fields.stored))
        if self.last_hidden:
            last_hidden_BTD = torch.zeros(b, t, width, dtype=handed_out(fields.last_stored))
        if self.top_k:
            ids_BTK = torch.zeros(b, t, min(self.top_k, fields.vocab), dtype=torch.int32)
            likeliest = Likeliest(ids_BTK, torch.zeros(ids_BTK.shape), torch.zeros(b, t))
        log_z_BT = torch.zeros(b, t)
        top_BT = torch.full((b, t), -1, dtype=torch.int64)
        samples_BT, ids_BT = batch.samples_BT.cpu(), batch.ids_BT.cpu()
        for row in range(b):
            found, counts = torch.unique_consecutive(samples_BT[row], return_counts=True)
            at = 0
            for sample, n in zip(found.tolist(), counts.tolist(), strict=True):
                if sample >= 0:
                    shard, begin = self._find(sample, n)
                    end, to = begin + n, slice(at, at + n)
                    if not torch.equal(shard.get_slice("ids")[begin:end].long(), ids_BT[row, to]):
                        raise ValueError(f"{self.folder.name}: sample {sample} was captured with other token ids")
                    if taps_BTPD is not None:
                        taps_BTPD[row, to] = self._read(shard, "taps", begin, end)
                    if last_hidden_BTD is not None:
                        last_hidden_BTD[row, to] = self._read(shard, "last_hidden", begin, end)
                    log_z_BT[row, to] = shard.get_slice("log_z")[begin:end]
                    top_BT[row, to] = shard.get_slice("top")[begin:end].long()
                    if likeliest is not None:
                        _put_likeliest(likeliest, shard, row, at, begin, end)
                at += n
        device = batch.ids_BT.device
        return TargetOut(
            taps_BTPD=None if taps_BTPD is None else taps_BTPD.to(device),
            last_hidden_BTD=None if last_hidden_BTD is None else last_hidden_BTD.to(device),
            log_z_BT=log_z_BT.to(device),
            top_BT=top_BT.to(device),
            likeliest=None if likeliest is None else likeliest.to(device),
        )

    def _read(self, shard: Any, name: str, begin: int, end: int) -> Tensor:
        """The rows begin..end of a stream, decoded."""
        stored, shape = self.fields.streams[name]
        parts = {part: shard.get_slice(name + part)[begin:end] for part in layout(stored, 0, shape) if part != CHANNEL}
        if CHANNEL in layout(stored, 0, shape):
            parts[CHANNEL] = shard.get_tensor(name + CHANNEL)[None]
        if name == "taps" and self._columns is not None:
            parts = {part: x[:, self._columns] for part, x in parts.items()}
        return decode(parts, stored)

    def _refuse_stranger(self, sample: Sample) -> None:
        """Raise unless this very sample was captured: its ids, and which of them are supervised."""
        if sample.sample_id in self.skipped:
            return
        number, begin, rows = self._place.get(sample.sample_id, (0, 0, 0))
        why = "is not among them" if rows == 0 else "has another length there" if rows != len(sample) else ""
        if not why:
            shard, end = self._open(number), begin + rows
            if not torch.equal(shard.get_slice("ids")[begin:end].long(), sample.ids.long()):
                why = "has other token ids there"
            elif not torch.equal(shard.get_slice("top")[begin : end - 1] >= 0, sample.supervised[1:]):
                why = "is supervised elsewhere there"
        if why:
            raise ValueError(
                f"{self.folder.name} holds states of another data: sample {sample.sample_id} {why}; "
                "capture into another folder, or delete this one"
            )

    def _find(self, sample: int, n: int) -> tuple[Any, int]:
        if sample not in self._place:
            why = f"skipped ({self.skipped[sample]} was not finite)" if sample in self.skipped else "not captured"
            raise ValueError(f"{self.folder.name}: sample {sample} was {why}; train on `usable(samples)` only")
        number, begin, rows = self._place[sample]
        if n > rows:
            raise ValueError(f"{self.folder.name}: sample {sample} has {rows} captured tokens, the batch {n}")
        return self._open(number), begin

    def _open_shard(self, number: int) -> Any:
        """Map a shard; at first sight its checksum and its values are looked at."""
        record = self._record(number)
        path = self.folder.fetch(record.file, record.bytes, record.crc32)
        try:
            shard: Any = safe_open(path, framework="pt").__enter__()
        except (OSError, SafetensorError) as error:
            raise ValueError(f"{self.folder.name}/{record.file} cannot be read: {error}") from None
        if number not in self._checked:
            for name in shard.keys():  # noqa: SIM118, not a dict
                tensor = shard.get_tensor(name)
                if tensor.is_floating_point() and not all_finite(tensor):
                    raise ValueError(f"{self.folder.name}/{record.file}: `{name}` holds a value that is not finite")
            if zlib.crc32(path.read_bytes()) != record.crc32:
                raise ValueError(f"{self.folder.name}/{record.file} has changed since it was written")
            self._checked.add(number)
        return shard


def _put_likeliest(out: Likeliest, shard: Any, row: int, at: int, begin: int, end: int) -> None:
    """The likeliest ids of the rows begin..end of a shard, into those of `row` from `at` on that have any."""
    told_n = shard.get_slice("top")[:end] >= 0
    first, last = int(told_n[:begin].sum()), int(told_n.sum())
    places = at + told_n[begin:].nonzero()[:, 0]
    parts = {part: shard.get_slice("top_k" + part)[first:last] for part in (".ids", ".log_p", ".tail")}
    out.ids_BTK[row, places], out.log_p_BTK[row, places], out.tail_BT[row, places] = decode_top(parts)


def _fields(raw: dict[str, Any], folder: Place) -> StateFields:
    if raw.get("format") != FORMAT:
        raise ValueError(
            f"{folder.name} holds states of another format: {raw.get('format')} there, {FORMAT} here; "
            "capture into another folder, or delete this one"
        )
    return StateFields(**{**raw, "taps": tuple(raw["taps"])})


def _record(raw: dict[str, Any]) -> ShardRecord:
    samples = [(int(i), int(n)) for i, n in raw["samples"]]
    skipped = [(int(i), str(where)) for i, where in raw["skipped"]]
    return ShardRecord(str(raw["file"]), int(raw["bytes"]), int(raw["crc32"]), samples, skipped)


def _refuse_other(found: StateFields, expected: StateFields, folder: Place, exact: bool) -> None:
    """Raise on the first field that differs; a folder may hold more than the reader needs unless `exact`."""
    for name, want in asdict(expected).items():
        have = getattr(found, name)
        if not (have == want or (not exact and name in KEPT and _covers(have, want))):
            raise ValueError(
                f"{folder.name} holds states of another {name}: {_short(have)} there, {_short(want)} here; "
                "capture into another folder, or delete this one"
            )


def _covers(have: Any, want: Any) -> bool:
    """More taps than are wanted, and anything where nothing is."""
    return set(want) <= set(have) if isinstance(want, tuple | list) else not want or want == "none"


def _short(value: Any) -> str:
    return str(value)[:12] if isinstance(value, str) else str(value)
