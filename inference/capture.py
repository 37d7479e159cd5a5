"""`draftsmith capture`: run the frozen target once over the data and keep its states, for any number of trainings.

Samples of about one length go through the target together, one per row (nothing of another sample is near them). The
teacher's log-sum-exp and argmax are computed where the next token is supervised, nowhere else. A sample whose states
are not finite (fp16 overflow in a late layer) is left out, named and counted. On CPUs several threads take a shard
each, with one intra-op thread; several processes, on any machine that sees the folder, take every n-th shard each. An
interrupted capture goes on at the shard it was in. The command fills two folders, `train` and `heldout`, with what a
training takes of the same source; trainings read them by `states.folder=OUT`.

    draftsmith capture --target smollm2 --out states --taps '[2, 15, 27]'
    draftsmith capture --target smollm2 --out states --dry_run true      # bytes only
    draftsmith capture --target smollm2 --out states --stored int8 --last_hidden false --top_k 64

Tested by `pytest tests/test_capture.py`.
"""

from __future__ import annotations

import copy
import os
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass
from pathlib import Path

import torch
from rich.console import Console
from torch import Tensor

from ..data.encode import Sample, encode_all
from ..data.formats import DTYPES, encode, encode_top, top_layout
from ..data.packing import collate
from ..data.places import Folder, Place, inside, place_of
from ..data.rolling import consumed, reading_order, write_plan
from ..data.sources import Conversation, split_conversations
from ..data.states import (
    FORMAT,
    ShardRecord,
    StateFields,
    StateStore,
    all_finite,
    check_disk,
    data_fingerprint,
    estimate,
    finished,
    plan,
    read_records,
    shard_file,
    text_fingerprint,
    write_index,
    write_shard,
)
from ..models.eagle3 import default_taps
from ..models.loading import load_target
from ..models.placement import together
from ..models.target import Target
from .capture_config import CaptureConfig
from .engine_states import EngineStates
from .progress import progress_bar
from .verify_states import verify_states

HEAD_ROWS = 256  # rows of full-vocabulary logits held at once


def state_fields(
    target: Target,
    samples: Sequence[Sample],
    taps: Sequence[int],
    last_hidden: bool,
    stored: str = "bfloat16",
    last_stored: str | None = None,
    top_k: int = 0,
) -> StateFields:
    """What states of these samples belong to; compare with those of a folder. `last_stored` None = as `stored`."""
    if list(taps) != sorted(set(taps)):
        raise ValueError(f"taps {list(taps)} must be distinct and ascending")
    return StateFields(
        format=FORMAT,
        target=("" if target.quantized == "none" else f"{target.quantized}:") + target.facts.fingerprint,
        tokenizer=target.facts.tokenizer_hash or "none",
        template=text_fingerprint(target.tokenizer.chat_template and target.tokenizer.get_chat_template()),
        dtype=str(target.dtype).removeprefix("torch."),
        length=max(len(s) for s in samples),
        data=data_fingerprint(samples),
        width=target.facts.width,
        vocab=target.facts.vocab,
        taps=tuple(target.check_taps(taps)),
        stored=stored if taps else "none",
        last_hidden=last_hidden,
        last_stored=(last_stored or stored) if last_hidden else "none",
        top_k=top_k,
    )


def capture(
    target: Target,
    samples: Sequence[Sample],
    folder: Path | str | Place,
    taps: Sequence[int],
    need_last_hidden: bool = True,
    batch_tokens: int = 2048,
    progress: bool = True,
    *,
    stored: str = "bfloat16",
    last_stored: str | None = None,
    top_k: int = 0,
    verify: int = 0,
    threads: int | None = None,
    rank: int = 0,
    world: int = 1,
    max_skipped: float = 0.01,
    engine: EngineStates | None = None,
) -> StateStore:
    """Capture what is not there yet, open the store, and hold `verify` samples of it against a fresh pass.

    With `world` > 1 every rank calls this, takes every `world`-th missing shard, and gets the store when all shards are
    there. `threads`: see `CaptureConfig`. `engine`: states to take in place of passes of the target.

    Raises:
        ValueError: the folder holds states of something else, by its fields or by what it says of a sample; too little
            disk space (before the first forward pass); or too many samples whose states are not finite.
    """
    place = place_of(folder)
    fields = state_fields(target, samples, taps, need_last_hidden, stored, last_stored, top_k)
    if "index.json" in place.sizes():
        store = StateStore(place, fields, taps, need_last_hidden, samples, top_k)
        verify_states(target, store, samples, verify)
        return store
    shards = plan(samples)
    todo = [k for k, record in enumerate(read_records(place, len(shards), fields)) if record is None]
    if isinstance(place, Folder):
        check_disk(place.path, sum(estimate([s for k in todo for s in shards[k]], fields)))
    mine = {k: shards[k] for k in range(rank, len(shards), world) if k in todo}
    tokens = sum(len(s) for k in mine for s in mine[k])
    with together(target), progress_bar("capturing states", tokens, progress and bool(mine)) as bar:
        _fill_all(target, mine, place, fields, batch_tokens, threads or _threads(target, world), bar, engine)
    while len(finished(place, len(shards))) < len(shards):
        time.sleep(place.poll)
    records = read_records(place, len(shards), fields)
    broken = [shard_file(k) for k, record in enumerate(records) if record is None]
    if broken:
        raise ValueError(f"{place.name}: {broken[0]} cannot be read; capture again, it will be written anew")
    _check_skipped([r for r in records if r is not None], len(samples), max_skipped)
    write_index(place, fields, [r for r in records if r is not None])
    store = StateStore(place, fields, taps, need_last_hidden, top_k=top_k)
    verify_states(target, store, samples, verify)
    return store


def to_write(place: Place, samples: Sequence[Sample], fields: StateFields, ahead: int = 0) -> int:
    """Bytes of the shards that are not there yet; of the largest `ahead` of them, where that is given."""
    shards = plan(samples)
    there = finished(place, len(shards))
    missing = sorted((s for k, s in enumerate(shards) if k not in there), key=lambda shard: -sum(map(len, shard)))
    return sum(estimate([s for shard in missing[: ahead or None] for s in shard], fields))


def capture_rolling(
    target: Target,
    samples: Sequence[Sample],
    place: Place,
    fields: StateFields,
    ahead: int,
    batch_tokens: int = 2048,
    progress: bool = True,
    *,
    threads: int | None = None,
    rank: int = 0,
    world: int = 1,
    engine: EngineStates | None = None,
) -> None:
    """Capture `samples`, which stand in the `reading_order` of a training, at most `ahead` shards before what it still
    needs; ends when it has read the last one (it may go back to an older checkpoint before). Every rank takes every
    `world`-th shard.

    Raises:
        ValueError: the place holds states of something else, or states are not finite.
    """
    shards = plan(samples)
    if isinstance(place, Folder):
        check_disk(place.path, to_write(place, samples, fields, ahead))
    write_plan(place, fields, shards, ahead)
    with progress_bar("capturing states", sum(map(len, samples)) // world, progress) as bar:
        while True:
            first = consumed(place)
            there = finished(place, len(shards))
            todo = [k for k in range(first, min(first + ahead, len(shards))) if k not in there and k % world == rank]
            if todo:
                _fill_all(
                    target, {k: shards[k] for k in todo}, place, fields, batch_tokens, threads or _threads(target, world),
                    bar, engine,
                )  # fmt: skip
            elif first >= len(shards):
                return
            else:
                time.sleep(place.poll)


@dataclass(frozen=True)
class Part:
    """One of the two folders that the command fills: `train` or `heldout`."""

    name: str
    place: Place
    samples: list[Sample]
    fields: StateFields
    ahead: int  # shards before a rolling training; 0 = all are kept

    @property
    def tokens(self) -> int:
        return sum(map(len, self.samples))


def run_capture(cfg: CaptureConfig) -> None:
    """The command."""
    console = Console(highlight=False, soft_wrap=True)
    device = ("cuda" if torch.cuda.is_available() else "cpu") if cfg.device == "auto" else cfg.device
    talks = split_conversations(cfg.data, cfg.heldout)
    target = load_target(
        cfg.target, dtype=cfg.dtype, device=device, revision=cfg.revision, trust_remote_code=cfg.trust_remote_code
    )
    taps = cfg.taps if cfg.taps is not None else default_taps(target.facts.layers)
    streams = [f"h[{k}] {cfg.stored}" for k in taps] + [f"last_hidden {cfg.last_stored}"] * cfg.last_hidden
    streams += [f"the likeliest {cfg.top_k} tokens"] * bool(cfg.top_k)
    console.print(f"{', '.join(streams)} of {target.facts.name}", markup=False)
    parts = _parts(cfg, target, talks, taps, console)
    if cfg.dry_run:
        return
    engines = {part.name: _engine(cfg, target, part) for part in parts}
    if isinstance(folder := place_of(cfg.out), Folder):
        check_disk(folder.path, sum(to_write(p.place, p.samples, p.fields, p.ahead) for p in parts))
    for part in reversed(parts):  # a rolling capture waits for its training, which reads what is held out first
        start, engine = time.monotonic(), engines[part.name]
        if part.ahead:
            capture_rolling(
                target, part.samples, part.place, part.fields, part.ahead, cfg.batch_tokens,
                threads=cfg.threads, rank=cfg.rank, world=cfg.world, engine=engine,
            )  # fmt: skip
            console.print(f"{part.place}: the training has read everything ({part.tokens:,} tokens)", markup=False)
            continue
        store = capture(
            target,
            part.samples,
            part.place,
            taps,
            cfg.last_hidden,
            cfg.batch_tokens,
            stored=cfg.stored,
            last_stored=cfg.last_stored,
            top_k=cfg.top_k,
            verify=cfg.verify,
            threads=cfg.threads,
            rank=cfg.rank,
            world=cfg.world,
            max_skipped=cfg.max_skipped,
            engine=engine,
        )
        seconds = time.monotonic() - start
        skipped = "".join(f"\nskipped: sample {i}, not finite at {where}" for i, where in store.skipped.items())
        console.print(
            f"{store.folder}: {store.tokens:,} tokens, {store.bytes:,} bytes, {store.tokens / seconds:,.0f} tokens/s, "
            f"{len(store.skipped)} of {len(part.samples)} samples skipped{skipped}",
            markup=False,
        )


def _parts(
    cfg: CaptureConfig,
    target: Target,
    talks: tuple[list[Conversation], list[Conversation]],
    taps: Sequence[int],
    console: Console,
) -> list[Part]:
    """What is captured, after saying how much that is."""
    parts, sums = [], [0, 0]
    beside = "ids, log-sums, argmaxes" + ", likeliest tokens" * bool(cfg.top_k)
    for name, some in zip(("train", "heldout"), talks, strict=True):
        if not some:
            console.print(f"{name}: nothing (heldout={cfg.heldout}, {len(talks[0])} conversations)")
            continue
        samples, report = encode_all(some, target.tokenizer, cfg.data.max_length)
        ahead = cfg.rolling if name == "train" else 0
        if ahead:
            samples = reading_order(samples, cfg.seed)
        fields = state_fields(target, samples, taps, cfg.last_hidden, cfg.stored, cfg.last_stored, cfg.top_k)
        states, rest = estimate(samples, fields)
        console.print(f"{name}: {report}")
        console.print(f"{name}: states {states:,} bytes; {beside} {rest:,} bytes")
        parts.append(Part(name, inside(place_of(cfg.out), name), samples, fields, ahead))
        sums = [sums[0] + states, sums[1] + rest]
    console.print(f"together: states {sums[0]:,} bytes; {beside} {sums[1]:,} bytes")
    return parts


def _engine(cfg: CaptureConfig, target: Target, part: Part) -> EngineStates | None:
    if cfg.engine is None:
        return None
    try:
        return EngineStates(cfg.engine, cfg.engine_layers, target, part.samples)
    except ValueError as error:
        if part.name == "train":
            raise
        raise ValueError(
            f"held-out samples: {error}; to capture none, give heldout=0, and evaluate.conversations=0 in training"
        ) from None


def _threads(target: Target, world: int) -> int:
    if target.device.type != "cpu" or target.placement != "replicated":
        return 1
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(cores // world, 1)


def _fill_all(
    target: Target,
    shards: dict[int, list[Sample]],
    place: Place,
    fields: StateFields,
    batch_tokens: int,
    threads: int,
    tick: Callable[[float], None],
    engine: EngineStates | None,
) -> None:
    """Fill shards with a pool of threads. Each has modules of its own (forward hooks are per module) over the same
    weights, and one intra-op thread, which on CPUs gives more tokens per second than the same threads inside one
    operator."""
    stop, local, intra_op = threading.Event(), threading.local(), torch.get_num_threads()

    def work(number: int) -> None:
        if not hasattr(local, "target"):
            shared = {id(x): x for x in (*target.parameters(), *target.buffers(), target.tokenizer)}
            local.target = copy.deepcopy(target, shared) if threads > 1 else target
            if threads > 1:
                torch.set_num_threads(1)

        def checked(tokens: float) -> None:
            if stop.is_set():
                raise InterruptedError("capture was stopped")
            tick(tokens)

        _fill(local.target, shards[number], place, number, fields, batch_tokens, checked, engine)

    try:
        with ThreadPoolExecutor(threads) as pool:
            try:
                for future in as_completed([pool.submit(work, number) for number in shards]):
                    future.result()
            except BaseException:
                stop.set()
                pool.shutdown(wait=False, cancel_futures=True)
                raise
    finally:
        torch.set_num_threads(intra_op)


def _check_skipped(records: Sequence[ShardRecord], samples: int, allowed: float) -> None:
    skipped = [s for record in records for s in record.skipped]
    if len(skipped) > allowed * samples:
        named = ", ".join(f"sample {i} at {where}" for i, where in skipped[:5])
        raise ValueError(
            f"{len(skipped)} of {samples} samples have states that are not finite ({named}); allowed are {allowed:.1%}: "
            "compute in bfloat16, or raise max_skipped"
        )


def _batches(samples: Sequence[Sample], batch_tokens: int) -> Iterator[list[Sample]]:
    """Groups of about one length, rows × longest at most `batch_tokens` (or one sample)."""
    group: list[Sample] = []
    for sample in sorted(samples, key=len, reverse=True):  # stable: the same groups every time
        if group and len(group[0]) * (len(group) + 1) > batch_tokens:
            yield group
            group = []
        group.append(sample)
    if group:
        yield group


@torch.no_grad()
def _fill(
    target: Target,
    samples: Sequence[Sample],
    place: Place,
    number: int,
    fields: StateFields,
    batch_tokens: int,
    tick: Callable[[float], None],
    engine: EngineStates | None,
) -> None:
    """Run the samples of one shard and write it."""
    done: dict[int, dict[str, Tensor]] = {}
    skipped: dict[int, str] = {}
    for group in _batches(samples, batch_tokens):
        for sample, states in zip(group, _states(target, group, fields, engine), strict=True):
            if all(map(all_finite, states.values())):
                done[sample.sample_id] = states
            else:
                skipped[sample.sample_id] = _overflow(target, sample, fields)
        tick(sum(len(s) for s in group))
    kept = [s for s in samples if s.sample_id in done]
    names = next(iter(done.values()), {})
    tensors = {name: torch.cat([done[s.sample_id][name] for s in kept]) for name in names}
    for name, (stored, _) in fields.streams.items():
        if name in tensors:
            tensors |= {name + part: x for part, x in encode(tensors.pop(name), stored).items()}
    write_shard(place, number, fields, tensors, [(s.sample_id, len(s)) for s in kept], list(skipped.items()))


def _states(
    target: Target, group: Sequence[Sample], fields: StateFields, engine: EngineStates | None
) -> list[dict[str, Tensor]]:
    """Tensors of a shard for each sample of one forward pass: right-padded rows, which a causal mask keeps apart. Those
    that are kept in 8 or 4 bits are as the target has them until the shard is whole, whose channels are looked at."""
    batch = collate(group).to(target.device)
    if engine is None:
        out = target.forward(batch.ids_BT, batch.positions_BT, taps=fields.taps)
    else:
        out = engine.run(target, group, fields.taps)
    log_z_BT, top_BT, parts_R = _teacher(target, out.last_hidden_BTD, batch.supervised_BT, fields.top_k)
    tensors = {"ids": batch.ids_BT.to(torch.int32), "log_z": log_z_BT, "top": top_BT}
    if out.taps_BTPD is not None:
        tensors["taps"] = out.taps_BTPD.to(DTYPES.get(fields.stored, target.dtype))
    if fields.last_hidden:
        tensors["last_hidden"] = out.last_hidden_BTD.to(DTYPES.get(fields.last_stored, target.dtype))
    by_sample = (top_BT >= 0).sum(1).tolist()
    told = {"top_k" + part: x.cpu().split(by_sample) for part, x in parts_R.items()}
    tensors = {name: x.cpu() for name, x in tensors.items()}
    return [
        {name: x[b, : len(sample)] for name, x in tensors.items()} | {name: x[b] for name, x in told.items()}
        for b, sample in enumerate(group)
    ]


def _teacher(
    target: Target, hidden_BTD: Tensor, supervised_BT: Tensor, top_k: int
) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
    """Log-sum-exp fp32 and argmax int32, [B, T], over all logits of the R rows whose next token is supervised; and with
    `top_k` the parts [R, ..] of their likeliest ids, in the order of the rows."""
    log_z_BT = torch.zeros(supervised_BT.shape, device=hidden_BTD.device)
    top_BT = torch.full(supervised_BT.shape, -1, dtype=torch.int32, device=hidden_BTD.device)
    rows, columns = supervised_BT[:, 1:].nonzero(as_tuple=True)
    vocab = target.facts.vocab
    told = [
        {part: hidden_BTD.new_empty(size, dtype=dtype) for part, (dtype, size) in top_layout(0, top_k, vocab).items()}
    ]
    for b, t in zip(rows.split(HEAD_ROWS), columns.split(HEAD_ROWS), strict=True):
        logits_RV = target.head(hidden_BTD[b, t]).float()
        log_z_R = logits_RV.logsumexp(-1)
        log_z_BT[b, t] = log_z_R
        top_BT[b, t] = logits_RV.argmax(-1).to(torch.int32)
        if top_k:
            told.append(encode_top(logits_RV, log_z_R, top_k))
    return log_z_BT, top_BT, {part: torch.cat([x[part] for x in told]) for part in told[0]} if top_k else {}


def _overflow(target: Target, sample: Sample, fields: StateFields) -> str:
    """Where a sample's states stop being finite: the first h[k], or what comes after it."""
    ids_1T = sample.ids[None].to(target.device)
    positions_1T = torch.arange(len(sample), device=target.device)[None]
    streams = target.forward(ids_1T, positions_1T, taps=range(target.facts.layers + 1)).taps_BTPD
    assert streams is not None
    finite_P = torch.isfinite(streams.to(DTYPES.get(fields.stored, target.dtype))).flatten(0, 1).all(-1).all(0)
    bad = (~finite_P).nonzero().flatten().tolist()
    return f"h[{bad[0]}]" if bad else "last_hidden or logits"
