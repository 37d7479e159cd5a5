"""Capturing states: right for every sample, resumable, never non-finite, announced in bytes (B13, B15, B31)."""

import dataclasses
import json
import re
import shutil
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from draftsmith.data.batch import TargetOut
from draftsmith.data.encode import Sample
from draftsmith.data.packing import collate
from draftsmith.data.sources import DataConfig
from draftsmith.data.states import shard_file
from draftsmith.inference import capture as module
from draftsmith.inference.capture import capture, run_capture
from draftsmith.inference.capture_config import CaptureConfig
from draftsmith.inference.progress import progress_bar
from draftsmith.inference.verify_states import verify_states
from draftsmith.models.pretrained import tiny_target
from draftsmith.models.target import Target

TAPS = (1, 2, 4)
LENGTHS = (3, 17, 1, 9, 17)


def some_samples(lengths: tuple[int, ...] = LENGTHS, seed: int = 0) -> list[Sample]:
    """Random ids; the second and the last share a prefix of 8 tokens; the last half of each is supervised."""
    random = torch.Generator().manual_seed(seed)
    ids = [torch.randint(3, 256, (n,), generator=random) for n in lengths]
    if lengths is LENGTHS:
        ids[4][:8] = ids[1][:8]
    return [Sample(i, x, torch.arange(len(x)) >= len(x) // 2) for i, x in enumerate(ids)]


def many_samples() -> list[Sample]:
    return some_samples(tuple(20 + (i * 31) % 80 for i in range(80)))


def by_one(target: Target, sample: Sample) -> tuple[torch.Tensor, torch.Tensor]:
    batch = collate([sample])
    with torch.no_grad():
        out = target.forward(batch.ids_BT, batch.positions_BT, taps=TAPS)
    return out.taps_BTPD[0], out.last_hidden_BTD[0]


def gap(a: torch.Tensor, b: torch.Tensor) -> float:
    """Largest difference, relative to the largest state: the residual stream of the tiny target grows to about 10."""
    return float((a - b).abs().max() / b.abs().max().clamp(min=1))


@pytest.mark.parametrize("batch_tokens", [1, 40, 4096])
@pytest.mark.parametrize("reverse", [False, True])
def test_states_belong_to_their_sample(tiny: Any, tmp_path: Path, batch_tokens: int, reverse: bool) -> None:
    """B13: alone, in one batch, in another order, by a second call, in chunks of 4 tokens."""
    target, data = tiny(), some_samples()
    order = data[::-1] if reverse else data
    store = capture(target, order, tmp_path, TAPS, True, batch_tokens, False, stored="float32")
    again = capture(target, order, tmp_path, TAPS, True, batch_tokens, False, stored="float32")
    for s in data:
        taps_TPD, last_TD = by_one(target, s)
        for opened in (store, again):
            out = opened.fill(collate([s]))
            assert out.taps_BTPD.shape[1] == len(s)
            assert gap(out.taps_BTPD[0], taps_TPD) < 1e-5
            assert gap(out.last_hidden_BTD[0], last_TD) < 1e-5
        cache = target.new_cache(1, len(s))
        for at in range(0, len(s), 4):
            ids = s.ids[None, at : at + 4]
            with torch.no_grad():
                chunk = target.forward(ids, torch.arange(at, at + ids.shape[1])[None], cache=cache, taps=TAPS)
            cache.commit(torch.tensor([ids.shape[1]]))
            stored = store.fill(collate([s])).taps_BTPD[0, at : at + 4]
            assert gap(stored, chunk.taps_BTPD[0]) < 1e-5
    records = [load_file(path) for path in sorted(tmp_path.glob("shard-*"))]
    assert torch.equal(torch.cat([r["ids"] for r in records]).long(), torch.cat([s.ids for s in order]))


def test_the_teacher_is_kept_where_the_next_token_is_supervised(tiny: Any, tmp_path: Path) -> None:
    target, data = tiny(), some_samples()
    store = capture(target, data, tmp_path, TAPS, progress=False, stored="float32")
    for s in data:
        out = store.fill(collate([s]))
        logits_TV = target.head(by_one(target, s)[1])
        wanted = torch.cat([s.supervised[1:], torch.tensor([False])])
        assert torch.equal(out.top_BT[0] >= 0, wanted)
        assert torch.equal(out.top_BT[0][wanted], logits_TV.argmax(-1)[wanted])
        torch.testing.assert_close(out.log_z_BT[0][wanted], logits_TV.logsumexp(-1)[wanted])


def test_stored_in_bf16_is_the_rounded_state(tiny: Any, tmp_path: Path) -> None:
    target, data = tiny(), some_samples((12,))
    out = capture(target, data, tmp_path, TAPS, progress=False).fill(collate(data))
    taps_TPD, last_TD = by_one(target, data[0])
    assert torch.equal(out.taps_BTPD[0], taps_TPD.bfloat16())
    assert torch.equal(out.last_hidden_BTD[0], last_TD.bfloat16())


@pytest.mark.parametrize("stored", ["int8", "int4"])
def test_small_formats_hold_the_states_and_the_teacher(tiny: Any, tmp_path: Path, stored: str) -> None:
    """Every sample's rows to what the format rounds, and the likeliest tokens to what fp16 does: alone, and by ranks and
    threads the same bytes."""
    target, data = tiny(), many_samples()
    options: dict[str, Any] = {"stored": stored, "last_stored": "int8", "top_k": 16, "progress": False, "verify": 3}
    store = capture(target, data, tmp_path / "one", TAPS, threads=1, **options)
    for s in data[::9]:
        out = store.fill(collate([s]))
        taps_TPD, last_TD = by_one(target, s)
        for got, want, bound in (
            (out.taps_BTPD[0], taps_TPD, {"int8": 0.03, "int4": 0.2}[stored]),
            (out.last_hidden_BTD[0], last_TD, 0.03),
        ):
            assert float((got.float() - want).norm() / want.norm()) < bound
        told = out.top_BT[0] >= 0
        log_p_RV = target.head(last_TD[told]).log_softmax(-1)
        assert torch.equal(out.likeliest.ids_BTK[0, told][:, 0].long(), out.top_BT[0, told])
        want_RK = log_p_RV.gather(-1, out.likeliest.ids_BTK[0, told].long())
        torch.testing.assert_close(out.likeliest.log_p_BTK[0, told], want_RK, rtol=1e-3, atol=2e-3)
        torch.testing.assert_close(out.likeliest.tail_BT[0, told], 1 - want_RK.exp().sum(-1), rtol=1e-3, atol=1e-5)
    capture(target, data, tmp_path / "threads", TAPS, threads=3, **options)
    assert contents(tmp_path / "threads") == contents(tmp_path / "one")
    for change, field in (
        ({"stored": "bfloat16"}, "stored"),
        ({"last_stored": "int4"}, "last_stored"),
        ({"top_k": 8}, "top_k"),
    ):
        with pytest.raises(ValueError, match=f"states of another {field}: "):
            capture(target, data, tmp_path / "one", TAPS, **(options | change))


@pytest.mark.parametrize("stored", ["float32", "bfloat16", "int8", "int4"])
def test_verification_refuses_a_target_that_changed(tmp_path: Path, stored: str) -> None:
    """Weights changed behind an equal fingerprint; rows in another order; a teacher of another row. Each is refused with
    the sample named; the target itself passes, whatever the batches were."""
    target, data = tiny_target(), some_samples((9, 30, 24, 40))
    options: dict[str, Any] = {"stored": stored, "top_k": 8, "progress": False}
    store = capture(target, data, tmp_path, TAPS, batch_tokens=80, **options)
    verify_states(target, store, data, 4)
    weight = target.model.model.layers[1].mlp.down_proj.weight
    before = weight.detach().clone()
    weight.data.mul_(2)
    with pytest.raises(ValueError, match=r"sample 0 is not what tiny computes now: h\[2\] differs by [\d.]+%"):
        capture(target, data, tmp_path, TAPS, verify=2, **options)
    weight.data.copy_(before)
    capture(target, data, tmp_path, TAPS, verify=4, **options)
    real = store.fill

    def wrong(change: Callable[[TargetOut], None]) -> None:
        def fill(batch: Any) -> TargetOut:
            out = real(batch)
            change(out)
            return out

        store.fill = fill  # type: ignore[method-assign]

    def swap(out: TargetOut) -> None:
        out.taps_BTPD[0, [3, 4, 5, 6]] = out.taps_BTPD[0, [4, 3, 6, 5]]

    def shift(out: TargetOut) -> None:
        out.likeliest.log_p_BTK.copy_(out.likeliest.log_p_BTK.roll(1, 1))

    wrong(swap)
    with pytest.raises(ValueError, match=r"sample 0 .*h\[1\] differs"):
        verify_states(target, store, data, 1)
    wrong(shift)
    with pytest.raises(ValueError, match=r"sample 0 .*the probabilities of its likeliest tokens differ"):
        verify_states(target, store, data, 1)
    wrong(lambda out: out.log_z_BT.add_(3.0))
    with pytest.raises(ValueError, match="the log-sum-exp of its logits differs by 3"):
        verify_states(target, store, data, 1)
    verify_states(target, store, data, 0)


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def test_threads_ranks_and_resume_give_the_same_bytes(
    tiny: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    target, data = tiny(), many_samples()
    capture(target, data, tmp_path / "one", TAPS, progress=False, threads=1)
    want = contents(tmp_path / "one")
    assert len(want) > 4

    capture(target, data, tmp_path / "threads", TAPS, progress=False, threads=3)
    assert contents(tmp_path / "threads") == want

    def other() -> None:
        capture(target, data, tmp_path / "ranks", TAPS, progress=False, threads=1, rank=1, world=2)

    rank_1 = threading.Thread(target=other)
    rank_1.start()
    rank_1.join(0.5)
    assert rank_1.is_alive() and not (tmp_path / "ranks" / "index.json").exists()  # it waits for rank 0
    store = capture(tiny(seed=0), data, tmp_path / "ranks", TAPS, progress=False, threads=1, rank=0, world=2)
    rank_1.join()
    assert contents(tmp_path / "ranks") == want
    assert store.tokens == sum(map(len, data))

    calls, run = [0], module._states

    def dies(*args: Any) -> Any:
        calls[0] += 1
        if calls[0] > 3:
            raise KeyboardInterrupt
        return run(*args)

    monkeypatch.setattr(module, "_states", dies)
    with pytest.raises(KeyboardInterrupt):
        capture(target, data, tmp_path / "resumed", TAPS, progress=False, threads=1)
    there = {path.name: path.stat().st_mtime_ns for path in (tmp_path / "resumed").glob("shard-*.safetensors")}
    assert 0 < len(there) < len(want) - 1
    monkeypatch.setattr(module, "_states", run)
    capture(target, data, tmp_path / "resumed", TAPS, progress=False, threads=1)
    assert contents(tmp_path / "resumed") == want
    assert all((tmp_path / "resumed" / name).stat().st_mtime_ns == t for name, t in there.items())


def test_a_broken_shard_of_an_unfinished_capture_is_written_anew(tiny: Any, tmp_path: Path) -> None:
    target, data = tiny(), many_samples()
    capture(target, data, tmp_path, TAPS, progress=False)
    want = contents(tmp_path)
    (tmp_path / "index.json").unlink()
    (tmp_path / shard_file(1)).write_bytes(want[shard_file(1)][:100])
    capture(target, data, tmp_path, TAPS, progress=False)
    assert contents(tmp_path) == want


def test_some_of_the_samples_are_read_from_a_capture_of_more(tiny: Any, tmp_path: Path) -> None:
    target, data = tiny(), some_samples()
    capture(target, data, tmp_path, TAPS, progress=False)
    want = contents(tmp_path)
    store = capture(target, data[1:], tmp_path, TAPS, progress=False)
    assert all(sample.sample_id in store for sample in data[1:]) and contents(tmp_path) == want


def test_states_of_something_else_are_refused_naming_the_field(tiny: Any, tmp_path: Path) -> None:
    target, data = tiny(), some_samples()
    capture(target, data, tmp_path, TAPS, progress=False)
    with pytest.raises(ValueError, match="another taps"):
        capture(target, data, tmp_path, (1, 3), progress=False)
    with pytest.raises(ValueError, match="another target"):
        capture(tiny(seed=1), data, tmp_path, TAPS, progress=False)
    with pytest.raises(ValueError, match="another data"):
        capture(target, [*data, *some_samples((30,))], tmp_path, TAPS, progress=False)
    masked = [dataclasses.replace(s, supervised=torch.ones_like(s.supervised)) for s in data]
    with pytest.raises(ValueError, match="another data"):
        capture(target, masked, tmp_path, TAPS, progress=False)
    template, target.tokenizer.chat_template = target.tokenizer.chat_template, "{{ messages }}"
    try:
        with pytest.raises(ValueError, match="another template"):
            capture(target, data, tmp_path, TAPS, progress=False)
    finally:
        target.tokenizer.chat_template = template
    with pytest.raises(ValueError, match="tap 5"):
        capture(target, data, tmp_path / "new", (5,), progress=False)
    capture(target, data, tmp_path, (2,), need_last_hidden=False, progress=False)  # a part of it is there


def overflowing(dtype: torch.dtype, data: list[Sample]) -> tuple[Target, int]:
    """A tiny target whose third layer overflows fp16 in exactly one of the samples, and that sample's id."""
    target = tiny_target(dtype=torch.float32)
    layer = target.model.model.layers[2]
    peaks: list[float] = []
    handle = layer.mlp.register_forward_hook(lambda m, i, out: peaks.append(float(out.abs().max())))
    for s in data:
        by_one(target, s)
    handle.remove()
    top, second = sorted(peaks, reverse=True)[:2]
    assert top > 1.05 * second, "the samples do not tell apart"
    layer.mlp.down_proj.weight.mul_(65504 / (top * second) ** 0.5)
    return Target(target.model.to(dtype), target.tokenizer, "tiny"), peaks.index(top)


def test_overflow_in_fp16_is_skipped_named_and_counted(tmp_path: Path) -> None:
    """B15."""
    data = some_samples((24, 24, 24, 24, 24, 24), seed=4)
    for dtype in (torch.float32, torch.bfloat16):
        target, _ = overflowing(dtype, data)
        store = capture(target, data, tmp_path / str(dtype), TAPS, progress=False)
        assert store.skipped == {} and store.tokens == 6 * 24
    target, bad = overflowing(torch.float16, data)
    with pytest.raises(ValueError, match=rf"1 of 6 samples .*\(sample {bad} at h\[3\]\); allowed are 1.0%"):
        capture(target, data, tmp_path / "half", TAPS, progress=False, stored="float16")
    store = capture(target, data, tmp_path / "half", TAPS, progress=False, stored="float16", max_skipped=0.2)
    assert store.skipped == {bad: "h[3]"}
    assert [s.sample_id for s in store.usable(data)] == [i for i in range(6) if i != bad]
    assert all(
        torch.isfinite(x).all() for path in (tmp_path / "half").glob("shard-*") for x in load_file(path).values()
    )
    assert torch.isfinite(store.fill(collate(store.usable(data))).taps_BTPD).all()
    with pytest.raises(ValueError, match=rf"sample {bad} was skipped \(h\[3\] was not finite\)"):
        store.fill(collate(data))


@pytest.mark.parametrize("stored", ["int8", "int4"])
def test_overflow_in_fp16_is_skipped_in_small_formats_too(tmp_path: Path, stored: str) -> None:
    """B15: codes cannot be infinite; the sample is still left out, named and counted."""
    data = some_samples((24, 24, 24, 24, 24, 24), seed=4)
    target, bad = overflowing(torch.float16, data)
    options: dict[str, Any] = {"stored": stored, "top_k": 8, "progress": False}
    with pytest.raises(ValueError, match=rf"1 of 6 samples .*\(sample {bad} at h\[3\]\)"):
        capture(target, data, tmp_path, TAPS, **options)
    store = capture(target, data, tmp_path, TAPS, max_skipped=0.2, **options)
    assert store.skipped == {bad: "h[3]"} and store.tokens == 5 * 24


def thousand(folder: Path) -> DataConfig:
    """1,000 samples of exactly 64 tokens for the tiny target."""
    file = folder / "data.jsonl"
    chat = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "x9" * 64}]
    file.write_text("".join(json.dumps({"id": str(i), "messages": chat}) + "\n" for i in range(1000)))
    return DataConfig(source=str(file), max_length=64)


# 1,000 samples of 64 tokens, three taps and last hidden of width 48, the latter as given or not at all.
ANNOUNCED = {
    "bfloat16": ({}, 24_576_000),
    "int8": ({"last_stored": "int8"}, 64_000 * 4 * (48 + 4)),
    "int4": ({"last_stored": "int4"}, 64_000 * 4 * (32 + 4)),  # 48 channels fill two groups of 32
    "int8 and top_k": ({"last_hidden": False, "top_k": 64}, 64_000 * 3 * (48 + 4)),
}


@pytest.mark.parametrize("name", ANNOUNCED)
def test_bytes_are_announced_and_kept(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    """B31: in bf16 1,000 samples x 64 tokens x 4 states x 48 x 2 bytes."""
    changes, exactly = ANNOUNCED[name]
    config = CaptureConfig(target="tiny", dtype="float32", out=str(tmp_path / "s"), data=thousand(tmp_path), taps=TAPS)
    config = dataclasses.replace(config, **({"last_hidden": True, "top_k": 0, "stored": name.split()[0]} | changes))
    run_capture(dataclasses.replace(config, dry_run=True))
    assert not (tmp_path / "s").exists()
    out = capsys.readouterr().out
    train, held, (states, rest) = (
        [int(x.replace(",", "")) for x in re.findall(r"([\d,]+) bytes", line)]
        for line in out.splitlines()
        if "bytes" in line
    )
    assert exactly <= states < 1.02 * exactly
    assert [states, rest] == [a + b for a, b in zip(train, held, strict=True)] and train[1] == 952 / 48 * held[1]
    usage = shutil.disk_usage(tmp_path)
    with monkeypatch.context() as full:
        full.setattr(shutil, "disk_usage", lambda _: usage._replace(free=states + rest))
        with pytest.raises(ValueError, match="states need"):
            run_capture(config)
    assert not (tmp_path / "s").exists()
    run_capture(config)
    out = capsys.readouterr().out
    assert f"{952 * 64:,} tokens" in out and f"{48 * 64:,} tokens" in out
    written = sum(path.stat().st_size for path in (tmp_path / "s").glob("*/shard-*"))
    assert abs(written - states - rest) < 0.01 * states


@pytest.mark.parametrize(
    ("options", "token", "told", "shard"),
    [
        ({}, 4 * 48 * 2, 0, 0),
        ({"stored": "int8", "top_k": 16}, 4 * (48 + 4), 16 * 4 + 4, 4 * 48 * 4),
        ({"stored": "int4", "need_last_hidden": False, "top_k": 16}, 3 * (32 + 4), 16 * 4 + 4, 3 * 48 * 4),
    ],
)
def test_too_small_a_disk_is_refused_before_the_first_forward(
    tiny: Any,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    options: dict[str, Any],
    token: int,
    told: int,
    shard: int,
) -> None:
    target, data = tiny(), some_samples()
    needed = sum(map(len, data)) * (token + 12) + sum(int(s.supervised[1:].sum()) for s in data) * told + shard
    usage = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage._replace(free=needed - 1))
    monkeypatch.setattr(module, "_states", lambda *_: pytest.fail("a forward pass was made"))
    with pytest.raises(ValueError, match=rf"states need {needed:,} bytes"):
        capture(target, data, tmp_path / "s", TAPS, progress=False, **options)
    assert not list(tmp_path.rglob("shard-*"))


def test_settings_that_cannot_be_are_refused() -> None:
    for name, value in {"rank": 1, "heldout": -1, "threads": 0, "batch_tokens": 0, "max_skipped": 2.0}.items():
        with pytest.raises(ValueError, match=name):
            CaptureConfig(**{"out": "x", name: value})


def test_the_progress_bar_shows_rate_and_what_is_left(capsys: pytest.CaptureFixture[str]) -> None:
    with progress_bar("working", 100, unit="things") as bar:
        bar(40)
        bar(60)
    err = capsys.readouterr().err
    assert "100 of 100 things" in err and "0:00:00" in err and "working: " not in err
    with progress_bar("quiet", 1, shown=False) as bar:
        bar(1)
    assert capsys.readouterr().err == ""


def test_without_a_terminal_progress_is_a_line_now_and_then(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("draftsmith.inference.progress.LINE_SECONDS", 0.0)
    with progress_bar("working", 100, unit="things") as bar:
        bar(40)
        assert "working: 40 of 100 things" in capsys.readouterr().err
    capsys.readouterr()
    with progress_bar("quiet", 1, shown=False) as bar:
        bar(1)
    assert capsys.readouterr().err == ""
