"""The training loop with a drafter that can be checked by hand: order of the data, normalisation, schedule, skips,
budgets, saves. Run: pytest tests/test_train.py"""

from __future__ import annotations

import json
import math
import time
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from accelerate import Accelerator
from safetensors.torch import load_file
from test_run_report import observed
from torch import nn

from draftsmith.configs.training import (
    BatchConfig,
    BudgetConfig,
    EvalConfig,
    LogConfig,
    OptimConfig,
    SaveConfig,
    TrainConfig,
)
from draftsmith.data.batch import Batch, TargetOut, supervised
from draftsmith.data.encode import Sample
from draftsmith.data.packing import collate, make_batch
from draftsmith.models.drafter import Terms
from draftsmith.models.pretrained import tiny_target
from draftsmith.train import checkpoint, distill_draft, loop, timing, utilisation
from draftsmith.train.loop import LossModule, State, evaluate, interval, train, wrong
from draftsmith.train.optimiser import lr_factor, make_optimisers
from draftsmith.train.plan_devices import DEVICES
from draftsmith.train.stream import Stream, sample_ids

VOCAB = 16

ROOT = Path(__file__).parents[1]


@dataclass(frozen=True)
class ToyConfig:
    """A bigram table."""

    width: int = 8


class Toy(nn.Module):
    """Predicts token t + 2 from token t + 1; `poison` samples give a NaN loss, `spike` samples a huge one."""

    method = "toy"
    Config = ToyConfig
    loss_needs = frozenset({"ids"})
    taps: tuple[int, ...] = ()
    d2t_W = None
    max_depth = 1

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed = nn.Embedding(VOCAB, 8)
        self.hidden = nn.Linear(8, 8)
        self.norm = nn.LayerNorm(8)
        self.lm_head = nn.Linear(8, VOCAB, bias=False)
        self.poison: set[int] = set()
        self.spike: set[int] = set()
        self.seen: list[list[int]] = []

    def denominators(self, batch: Batch, progress: float) -> dict[str, float]:
        return {"depth_1": float(supervised(batch, 1).sum()), "never": 0.0}

    def loss(self, batch: Batch, target_out: TargetOut, progress: float) -> Terms:
        self.seen.append(sample_ids([batch]))
        rows_BT = supervised(batch, 1)
        anchors_R = batch.ids_BT.roll(-1, 1)[rows_BT]
        labels_R = batch.ids_BT.roll(-2, 1)[rows_BT]
        logits_RV = self.lm_head(self.norm(self.hidden(self.embed(anchors_R))))
        value = nn.functional.cross_entropy(logits_RV.float(), labels_R, reduction="sum")
        if self.poison & set(self.seen[-1]):
            value = value * float("nan")
        if self.spike & set(self.seen[-1]):
            value = value * 1000
        right_R = (logits_RV.argmax(-1) == labels_R).float()
        count = torch.tensor(float(len(labels_R)))
        metrics = {"accuracy_1": (right_R.sum(), count), "run_length": (right_R.sum(), count)}
        return Terms({"depth_1": value, "never": value * 0}, metrics)


def make_samples(count: int, seed: int = 0, length: tuple[int, int] = (6, 14)) -> list[Sample]:
    generator = torch.Generator().manual_seed(seed)
    samples = []
    for i in range(count):
        n = int(torch.randint(*length, (1,), generator=generator))
        ids = torch.randint(VOCAB, (n,), generator=generator)
        samples.append(Sample(i, ids, torch.arange(n) >= 2))
    return samples


def config_of(run: Path, **changes: Any) -> TrainConfig:
    config = TrainConfig(
        method="toy",
        drafter=ToyConfig(),
        batch=BatchConfig(row_length=16, rows=2, accumulate=1),
        budget=BudgetConfig(steps=6),
        optim=OptimConfig(lr=1e-2, warmup=0.0),
        evaluate=EvalConfig(every=1000, probe_every=0),
        log=LogConfig(every=1, progress=False),
        precision="fp32",
        run=str(run),
    )
    return replace(config, **changes)


def stream_of(config: TrainConfig, samples: list[Sample], rank: int = 0, world: int = 1) -> Stream:
    batch = config.batch
    return Stream(
        samples,
        row_length=batch.row_length,
        rows=batch.rows,
        accumulate=batch.accumulate,
        seed=config.seed,
        rank=rank,
        world=world,
    )


def run(
    config: TrainConfig, samples: list[Sample], drafter: Toy | None = None, **more: Any
) -> tuple[Toy, loop.Summary]:
    drafter = drafter or Toy()
    folder = Path(config.run)
    folder.mkdir(parents=True, exist_ok=True)
    summary = train(
        config, Accelerator(cpu=True), drafter, stream_of(config, samples), lambda b: TargetOut(), folder, **more
    )
    return drafter, summary


def lines(folder: Path, kind: str) -> list[dict[str, Any]]:
    return [x for x in map(json.loads, (folder / "metrics.jsonl").read_text().splitlines()) if x["kind"] == kind]


# The order of the data


def test_every_sample_comes_once_per_epoch_in_another_order_each(tmp_path: Path) -> None:
    stream = stream_of(config_of(tmp_path), make_samples(23))
    epochs = []
    for epoch in range(3):
        seen = [i for w in range(stream.windows(epoch)) for i in sample_ids(stream.window(epoch, w))]
        assert sorted(seen) == list(range(23))
        epochs.append(seen)
    assert epochs[0] != epochs[1] != epochs[2]


def test_processes_share_each_micro_batch_without_overlap(tmp_path: Path) -> None:
    samples = make_samples(23)
    config = config_of(tmp_path, batch=BatchConfig(row_length=16, rows=3, accumulate=2))
    one, ranks = stream_of(config, samples), [stream_of(config, samples, r, 2) for r in range(2)]
    for w in range(one.windows(0)):
        whole, parts = one.window(0, w), [s.window(0, w) for s in ranks]
        assert len(whole) == len(parts[0]) == len(parts[1])
        for batch, left, right in zip(whole, *parts, strict=True):
            assert sample_ids([batch]) == sorted(sample_ids([left]) + sample_ids([right]))
            assert left.ids_BT.shape[0] >= 1 and right.ids_BT.shape[0] >= 1  # a row of padding where nothing is left


def test_resumed_order_is_the_uninterrupted_one(tmp_path: Path) -> None:
    """B25: three epochs straight, against a stop after batch 14 and a resume; the sample ids are the same sequence."""
    samples = make_samples(25, length=(9, 12))  # one per row: 25 rows, 13 windows of 2
    straight, _ = run(config_of(tmp_path / "a", budget=BudgetConfig(epochs=3)), samples)
    config = config_of(tmp_path / "b", budget=BudgetConfig(epochs=3, stop_at=14))
    first, _ = run(config, samples)
    second, summary = run(replace(config, budget=BudgetConfig(epochs=3)), samples)
    assert summary.state.done and summary.state.step == len(straight.seen) == 39
    assert first.seen + second.seen == straight.seen


def test_the_last_step_is_saved_between_save_points_and_a_longer_budget_goes_on(tmp_path: Path) -> None:
    """B25: 15 steps, saved every 10: a checkpoint at 15 exists; resuming to 30 sees batches 16..30 exactly once."""
    samples = make_samples(25, length=(9, 12))
    config = config_of(tmp_path, budget=BudgetConfig(steps=15), save=SaveConfig(steps=10))
    first, _ = run(config, samples)
    names = sorted(p.name for p in (tmp_path / "checkpoints").glob("step-*"))
    assert names == ["step-00000010", "step-00000015"] and all(
        checkpoint.complete(tmp_path / "checkpoints" / n) for n in names
    )
    second, _ = run(replace(config, budget=BudgetConfig(steps=30)), samples)
    straight, _ = run(config_of(tmp_path / "straight", budget=BudgetConfig(steps=30)), samples)
    assert len(second.seen) == 15 and first.seen + second.seen == straight.seen


# Normalisation


def gradients(drafter: Toy, batches: list[Batch]) -> dict[str, torch.Tensor]:
    """Gradients of the whole step, as the loop takes them."""
    counts = {"depth_1": sum(drafter.denominators(b, 0.0)["depth_1"] for b in batches), "never": 0.0}
    module = LossModule(drafter, "fp32", torch.device("cpu"))
    drafter.zero_grad()
    for batch in batches:
        loss, _ = module(batch, TargetOut(), 0.0, counts)
        loss.backward()
    return {n: p.grad.clone() for n, p in drafter.named_parameters() if p.grad is not None}


def assert_close(left: dict[str, torch.Tensor], right: dict[str, torch.Tensor], atol: float) -> None:
    assert left.keys() == right.keys()
    for name in left:
        torch.testing.assert_close(left[name], right[name], atol=atol, rtol=0)


def test_padding_and_prompt_length_do_not_change_the_gradient() -> None:
    """B16: eight supervised tokens; the same behind 100 masked ones; the same in a row padded to 512."""
    ids = torch.randint(VOCAB, (110,), generator=torch.Generator().manual_seed(1))
    short = Sample(0, ids[100:], torch.arange(10) >= 2)
    long = Sample(0, ids, torch.arange(110) >= 102)
    drafter = Toy()
    reference = gradients(drafter, [collate([short])])
    assert_close(gradients(drafter, [collate([long])]), reference, 1e-6)
    assert_close(gradients(drafter, [make_batch([[short]], 512, 0, 0)]), reference, 1e-6)


def test_accumulation_four_times_one_equals_one_times_four(tmp_path: Path) -> None:
    samples = make_samples(8)
    drafters = []
    for name, rows, accumulate in (("a", 4, 1), ("b", 1, 4)):
        config = config_of(tmp_path / name, batch=BatchConfig(16, rows, accumulate), budget=BudgetConfig(steps=5))
        drafters.append(run(config, samples)[0])
    losses = [[x["loss"] for x in lines(tmp_path / name, "train")] for name in "ab"]
    assert losses[0] == pytest.approx(losses[1], abs=1e-6)
    assert_close(checkpoint.trained_tensors(drafters[0]), checkpoint.trained_tensors(drafters[1]), 1e-5)


def test_partial_window_counts_its_own_micro_batches_and_the_schedule_ends_with_it(tmp_path: Path) -> None:
    """B23: 10 micro-batches per epoch, accumulation 4, 2 epochs, cosine to 0: six steps, the floor at the sixth."""
    samples = make_samples(10, length=(9, 12))
    batch = BatchConfig(row_length=16, rows=1, accumulate=4)
    optim = OptimConfig(lr=1e-2, warmup=0.5, floor=0.0, clip=0.0)
    config = config_of(tmp_path, batch=batch, budget=BudgetConfig(epochs=2), optim=optim)
    stream = stream_of(config, samples)
    assert [len(stream.window(0, w)) for w in range(stream.windows(0))] == [4, 4, 2]
    _, summary = run(config, samples)
    rates = [x["lr"] for x in lines(tmp_path, "train")]
    assert summary.state.step == len(rates) == 6
    assert rates[:3] == pytest.approx([1e-2 / 3, 2e-2 / 3, 1e-2]) and rates[2] > rates[3] > rates[4] > rates[5] == 0.0
    # The norm the loop saw in the third step is that of its two micro-batches alone.
    drafter, _ = run(replace(config, budget=BudgetConfig(epochs=2, stop_at=2), run=str(tmp_path / "two")), samples)
    alone = gradients(drafter, stream.window(0, 2))
    norm = math.sqrt(sum(float(g.square().sum()) for g in alone.values()))
    assert lines(tmp_path, "train")[2]["grad_norm"] == pytest.approx(norm, abs=1e-6)


def test_a_term_without_a_denominator_is_refused() -> None:
    drafter = Toy()
    module = LossModule(drafter, "fp32", torch.device("cpu"))
    with pytest.raises(ValueError, match=r"never.*no entry in `denominators`"):
        module(collate(make_samples(1)), TargetOut(), 0.0, {"depth_1": 3.0})


def test_an_empty_batch_still_reaches_every_parameter() -> None:
    drafter = Toy()
    loss, _ = LossModule(drafter, "fp32", torch.device("cpu"))(
        make_batch([[]], 8, 0, 0), TargetOut(), 0.0, {"depth_1": 5.0, "never": 0.0}
    )
    loss.backward()
    assert float(loss.detach()) == 0.0 and all(p.grad is not None and not p.grad.any() for p in drafter.parameters())


# Optimiser and schedule


def test_schedules() -> None:
    cosine = OptimConfig(warmup=0.1, floor=0.1)
    assert [lr_factor(p, cosine) for p in (0.05, 0.1, 1.0, 2.0)] == pytest.approx([0.5, 1.0, 0.1, 0.1])
    wsd = OptimConfig(schedule="wsd", warmup=0.1, decay=0.2, floor=0.0)
    assert [lr_factor(p, wsd) for p in (0.05, 0.5, 0.8, 0.9, 1.0)] == pytest.approx([0.5, 1.0, 1.0, 0.5, 0.0])
    assert lr_factor(0.7, OptimConfig(schedule="constant")) == 1.0


def test_settings_of_optimisers_arrive() -> None:
    (adamw,) = make_optimisers(Toy(), OptimConfig(eps=1e-4))
    assert isinstance(adamw, torch.optim.AdamW) and {group["eps"] for group in adamw.param_groups} == {1e-4}
    (sgd,) = make_optimisers(Toy(), OptimConfig(name="sgd", lr=0.5))
    assert isinstance(sgd, torch.optim.SGD) and {group["lr"] for group in sgd.param_groups} == {0.5}
    with pytest.raises(ValueError, match=r"optim\.eps must lie in \[0, 1\], got -1"):
        OptimConfig(eps=-1)


def test_masters_are_fp32_so_that_small_steps_count() -> None:
    """B22: a norm weight of 1.0, gradient 0.01, lr 1e-3, 50 steps: 0.95 in the master, not 1.0 when exported to bf16."""
    drafter = Toy()
    (optimiser,) = make_optimisers(drafter, OptimConfig(lr=1e-3))
    pure = torch.nn.Parameter(torch.ones(8, dtype=torch.bfloat16))
    pure_optimiser = torch.optim.SGD([pure], lr=1e-3)
    for _ in range(50):
        for p in drafter.parameters():
            p.grad = torch.full_like(p, 0.01)
        optimiser.step()
        pure.grad = torch.ones_like(pure)
        pure_optimiser.step()
    assert drafter.norm.weight.dtype == torch.float32
    assert float(drafter.norm.weight[0]) == pytest.approx(0.95, abs=1e-3)
    assert float(drafter.norm.weight.to(torch.bfloat16)[0]) != 1.0
    assert float(pure[0]) == 1.0  # what masters are for
    with pytest.raises(ValueError, match="fp32 masters"):
        make_optimisers(Toy().to(torch.bfloat16), OptimConfig())


def test_muon_takes_inner_matrices_only_and_trains(tmp_path: Path) -> None:
    drafter = Toy()
    adamw, muon = make_optimisers(drafter, OptimConfig(name="muon"))
    assert [p.shape for g in muon.param_groups for p in g["params"]] == [drafter.hidden.weight.shape]
    assert sum(len(g["params"]) for g in adamw.param_groups) == 5
    config = config_of(tmp_path, optim=OptimConfig(name="muon", lr=1e-2), budget=BudgetConfig(steps=30))
    run(config, make_samples(4))
    losses = [x["loss"] for x in lines(tmp_path, "train")]
    assert losses[-1] < losses[0]


def test_vectors_do_not_decay() -> None:
    (optimiser,) = make_optimisers(Toy(), OptimConfig(weight_decay=0.1))
    decays = {p.ndim: g["weight_decay"] for g in optimiser.param_groups for p in g["params"]}
    assert decays == {2: 0.1, 1: 0.0}


# What goes wrong


def test_nan_batches_are_skipped_counted_and_named(tmp_path: Path) -> None:
    drafter = Toy()
    drafter.poison = {3}
    drafter, summary = run(config_of(tmp_path, budget=BudgetConfig(epochs=2)), make_samples(12), drafter)
    skips = lines(tmp_path, "skip")
    assert summary.state.skipped == len(skips) == 2 and all(3 in x["samples"] for x in skips)
    assert all("nan" in x["why"] for x in skips)
    assert all(torch.isfinite(p).all() for p in drafter.parameters())
    assert summary.state.done  # a skipped step uses its part of the budget


def test_a_skipped_step_leaves_weights_and_moments_alone(tmp_path: Path) -> None:
    samples = make_samples(2, length=(9, 12))
    config = config_of(tmp_path, budget=BudgetConfig(steps=1))
    before = checkpoint.trained_tensors(Toy())
    drafter = Toy()
    drafter.poison = {0, 1}
    drafter, summary = run(config, samples, drafter)
    assert summary.state.step == 0 and summary.state.skipped == 1
    assert_close(checkpoint.trained_tensors(drafter), before, 0.0)


def test_twenty_skips_in_a_row_end_the_run_with_the_sample_ids(tmp_path: Path) -> None:
    drafter = Toy()
    drafter.poison = set(range(12))
    with pytest.raises(
        RuntimeError, match=r"20 steps in a row were skipped.*samples: \[0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11\]"
    ):
        run(config_of(tmp_path, budget=BudgetConfig(steps=100)), make_samples(12), drafter)


def test_batches_without_a_supervised_token_are_skipped_and_named(tmp_path: Path) -> None:
    samples = make_samples(4, length=(9, 12))
    samples[2] = replace(samples[2], supervised=torch.zeros(len(samples[2]), dtype=torch.bool))
    config = config_of(tmp_path, batch=BatchConfig(16, 1, 1), budget=BudgetConfig(epochs=1))
    _, summary = run(config, samples)
    (skip,) = lines(tmp_path, "skip")
    assert skip["samples"] == [2] and "no supervised token" in skip["why"] and summary.state.step == 3


def test_spikes_are_skipped_once_the_median_is_known(tmp_path: Path) -> None:
    drafter = Toy()
    drafter.spike = {5}
    config = config_of(tmp_path, batch=BatchConfig(16, 1, 1), budget=BudgetConfig(epochs=3))
    _, summary = run(config, make_samples(12, length=(9, 12)), drafter)
    # Epoch 1 and 2 (24 steps) end before or as the median of 20 steps is trusted; the last epoch's spike is skipped.
    assert summary.state.skipped >= 1 and all(x["samples"] == [5] for x in lines(tmp_path, "skip"))
    assert "5 x the running median" in lines(tmp_path, "skip")[0]["why"]


def test_what_counts_as_wrong() -> None:
    calm = State(losses=[1.0] * 20, first_median=1.0)
    assert wrong(4.9, calm) is None and "above 5 x" in str(wrong(5.1, calm))
    assert wrong(100.0, State(losses=[1.0] * 19)) is None and wrong(float("inf"), State()) is not None
    near_zero = State(losses=[1e-5] * 101, first_median=1.0)
    assert wrong(1e-4, near_zero) is None  # ten times nothing is noise


# Budgets and saves


def test_token_budget(tmp_path: Path) -> None:
    _, summary = run(config_of(tmp_path, budget=BudgetConfig(tokens=100)), make_samples(12))
    tokens = [x["tokens"] for x in lines(tmp_path, "train")]
    assert tokens[-1] >= 100 > tokens[-2] and summary.state.tokens == tokens[-1]


def test_minute_budget_counts_over_resumes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    clock = iter(range(10**6))
    monkeypatch.setattr(loop.time, "monotonic", lambda: float(next(clock)))
    config = config_of(tmp_path, budget=BudgetConfig(minutes=0.5, stop_at=2), save=SaveConfig(minutes=1e6))
    _, first = run(config, make_samples(12))
    spent = first.state.seconds
    assert first.state.step == 2 and 0 < spent < 30
    _, second = run(replace(config, budget=BudgetConfig(minutes=0.5)), make_samples(12))
    assert second.state.done and second.state.seconds >= 30
    rates = [x["lr"] for x in lines(tmp_path, "train")]
    assert rates == sorted(rates, reverse=True) and rates[-1] == pytest.approx(
        1e-3, rel=0.2
    )  # 10 % floor, by the clock


def test_saves_by_the_clock(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    clock = iter(range(0, 10**9, 20))
    monkeypatch.setattr(loop.time, "monotonic", lambda: float(next(clock)))
    saved = []
    monkeypatch.setattr(loop.checkpoint, "save", lambda folder, state, *rest: saved.append(state.step))
    run(config_of(tmp_path, budget=BudgetConfig(steps=8), save=SaveConfig(steps=500, minutes=3)), make_samples(12))
    assert len(saved) > 1 and saved[-1] == 8


def test_saving_cannot_be_switched_off() -> None:
    for wrong_save in ({"steps": 0}, {"minutes": 0.0}, {"keep": 0}):
        with pytest.raises(ValueError, match="cannot be turned off"):
            SaveConfig(**wrong_save)  # type: ignore[arg-type]


def test_the_newest_two_and_the_best_are_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    lengths = iter([0.2, 0.9, 0.5, 0.4, 0.3, 0.2, 0.1])
    monkeypatch.setattr(loop, "evaluate", lambda *a: {"run_length": next(lengths)})
    config = config_of(tmp_path, save=SaveConfig(steps=1, keep=2), evaluate=EvalConfig(every=1, probe_every=0))
    _, summary = run(config, make_samples(12), heldout=[collate(make_samples(1))])
    names = sorted(p.name for p in (tmp_path / "checkpoints").iterdir())
    assert names == ["step-00000002", "step-00000005", "step-00000006"] and summary.state.best_step == 2


# Measurements


def test_heldout_figures_and_their_interval() -> None:
    drafter = Toy()
    batches = [collate([s]) for s in make_samples(6)]
    module = LossModule(drafter, "fp32", torch.device("cpu"))
    figures = evaluate(module, batches, lambda b: TargetOut(), Accelerator(cpu=True), loop.Stop())
    sums = [drafter.loss(b, TargetOut(), 1.0).metrics["run_length"] for b in batches]
    mean = float(sum(s for s, _ in sums) / sum(n for _, n in sums))
    assert figures["run_length"] == pytest.approx(mean) and figures["tau"] == pytest.approx(1 + mean)
    assert figures["run_length_low"] <= mean <= figures["run_length_high"] and drafter.training
    assert interval([(1.0, 2.0)] * 5) == pytest.approx((0.5, 0.5))
    stop = loop.Stop()
    stop.signal = 15
    assert evaluate(module, batches, lambda b: TargetOut(), Accelerator(cpu=True), stop) == {}  # no half figures


def test_probe_and_metrics_are_logged(tmp_path: Path) -> None:
    config = config_of(tmp_path, evaluate=EvalConfig(every=3, probe_every=3))
    _, summary = run(
        config, make_samples(12), heldout=[collate([s]) for s in make_samples(3)], probe=lambda d, stopped: {"tau": 1.5}
    )
    assert [x["step"] for x in lines(tmp_path, "probe")] == [3, 6] and summary.probe == {"tau": 1.5}
    assert [x["step"] for x in lines(tmp_path, "heldout")] == [3, 6]
    line = lines(tmp_path, "train")[0]
    assert {"loss", "lr", "grad_norm", "accuracy_1", "tokens_per_second", "skipped"} <= line.keys()


GROUPS = {"train/loss", "train/lr", "train/grad_norm", "train/tokens", "train/accuracy_1", "train/tokens_per_second"}
GROUPS |= {
    "speed/tokens_per_second_per_device",
    "memory/peak_gib",
    "heldout/tau",
    "heldout/run_length_low",
    "probe/tau",
}
GROUPS |= {f"time/{part}" for part in (*timing.PARTS, "other")}


def tracked_names(tracker: str, folder: Path) -> set[str]:
    """Names in what a tracker has written."""
    if tracker == "tensorboard":
        from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

        found: set[str] = set()
        for place in {p.parent for p in folder.glob("**/events.out.tfevents*")}:
            found |= set(EventAccumulator(str(place)).Reload().Tags()["scalars"])
        return found
    (path,) = folder.glob("wandb/offline-run-*/*.wandb")
    for _ in range(100):  # wandb's own process may be behind; names stand in its file as they are
        written = path.read_bytes()
        found = {name for name in GROUPS if name.encode() in written}
        if found == GROUPS:
            break
        time.sleep(0.1)
    return found


@pytest.mark.parametrize("tracker", ["tensorboard", "wandb"])
def test_trackers_have_one_layout(tmp_path: Path, tracker: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Offline, below the run folder, under the names of the table in train/README.md; settings without local paths."""
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_SILENT", "true")
    monkeypatch.chdir(tmp_path)
    log = LogConfig(every=1, trackers=(tracker,), progress=False)  # type: ignore[arg-type]
    evaluation = EvalConfig(every=2, probe_every=2)
    run_to = tmp_path / "run"
    config = config_of(run_to, log=log, budget=BudgetConfig(steps=2), evaluate=evaluation)
    run_to.mkdir()
    accelerator = Accelerator(cpu=True, log_with=[tracker], project_dir=str(run_to))
    seen: dict[str, Any] = {}
    start = accelerator.init_trackers
    monkeypatch.setattr(
        accelerator, "init_trackers", lambda *a, **more: (seen.update(config=a[1], **more), start(*a, **more))
    )
    train(
        config, accelerator, Toy(), stream_of(config, make_samples(6)), lambda b: TargetOut(), run_to,
        heldout=[collate([s]) for s in make_samples(2)], probe=lambda d, stopped: {"tau": 1.5},
    )  # fmt: skip
    names = tracked_names(tracker, run_to)
    assert names >= GROUPS, sorted(GROUPS - names)
    table = (ROOT / "train/README.md").read_text()
    for name in GROUPS - {"train/accuracy_1"}:
        group, _, leaf = name.partition("/")
        leaf = leaf.removesuffix("_low")
        assert f"`{name}`" in table or (f"`{group}/...`" in table and f"`{leaf}`" in table), name
    assert seen["config"]["optim.lr"] == 1e-2 and seen["config"]["batch.row_length"] == 16
    assert str(tmp_path) not in json.dumps(seen["config"])
    if tracker == "wandb":  # the next launch goes on with the same run
        first = seen["init_kwargs"]["wandb"]
        assert (
            first["resume"] == "allow" and (run_to / "wandb_id").read_text() == first["id"] and first["name"] == "run"
        )


# Where the time goes


def test_the_time_of_a_step_is_split_and_nothing_is_lost(tmp_path: Path) -> None:
    """Ten lines' steps with a target that takes 20 ms a micro-batch, two of them a step."""

    def slow(batch: Batch) -> TargetOut:
        time.sleep(0.02)
        return TargetOut()

    config = config_of(tmp_path, batch=BatchConfig(16, 1, 2), log=LogConfig(every=2, progress=False))
    train(config, Accelerator(cpu=True), Toy(), stream_of(config, make_samples(12)), slow, tmp_path)
    found = lines(tmp_path, "train")
    assert [x["step"] for x in found] == [1, 2, 4, 6]
    before = 0.0
    for line, steps in zip(found, (1, 1, 2, 2), strict=True):
        per_step = (line["seconds"] - before) / steps
        before = line["seconds"]
        assert 0.04 <= line["time/target"] < per_step
        assert sum(line[f"time/{part}"] for part in (*timing.PARTS, "other")) == pytest.approx(per_step, rel=0.05)
        assert line["time/drafter"] > 0 < line["time/update"] and line["time/data"] > 0
        assert line["tokens_per_second"] == line["speed/tokens_per_second_per_device"]
        assert 0.05 < line["memory/peak_gib"] < 100 and "speed/mfu" not in line
    tokens = [x["tokens"] for x in found]
    assert found[2]["tokens_per_second"] == pytest.approx(
        (tokens[2] - tokens[1]) / (found[2]["seconds"] - found[1]["seconds"])
    )


class Event:
    """A stand-in for a GPU's: in a queue that runs 5 ms per entry."""

    made, waits = 0, 0

    def __init__(self, enable_timing: bool) -> None:
        self.at = 0

    def record(self) -> None:
        Event.made += 1
        self.at = Event.made

    def synchronize(self) -> None:
        Event.waits += 1

    def elapsed_time(self, other: Event) -> float:
        return 5.0 * (other.at - self.at)


def test_a_gpu_is_waited_for_when_a_line_is_written_and_not_before(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda device: 3 * 2**30)
    monkeypatch.setattr(timing, "peak_flops", lambda device: 1e12)
    accelerator: Any = SimpleNamespace(device=torch.device("cuda"), num_processes=1)
    clock = timing.StepClock(accelerator, flops_per_token=1e8)
    for _ in range(4):
        for part in ("data", "update", None, "target", "drafter", "update", "drafter", "update", None):
            clock.mark(part)
        clock.step_taken(tokens=50, seconds=0.05)
    assert Event.waits == 0
    found = clock.figures()
    assert Event.waits == 1
    times = {part: found[f"time/{part}"] for part in (*timing.PARTS, "other")}
    assert times == pytest.approx({"data": 0.005, "target": 0.005, "drafter": 0.01, "update": 0.015, "other": 0.015})
    assert found["memory/peak_gib"] == 3.0 and found["speed/mfu"] == pytest.approx(1e8 * 1000 / 1e12)
    assert clock.figures()["time/data"] == 0.0
    for _ in range(timing.MOST_EVENTS + 1):  # a line that is never written holds no more than so many
        clock.mark("data")
    assert len(clock.events) < 10 and Event.waits == 3


def test_peaks_are_those_of_the_table_or_none() -> None:
    names = {
        "NVIDIA H200": "h200", "NVIDIA H100 80GB HBM3": "h100", "NVIDIA H100 PCIe": "h100-pcie", "Tesla T4": "t4",
        "NVIDIA A100-SXM4-80GB": "a100", "NVIDIA A100-PCIE-40GB": "a100-40", "NVIDIA GeForce RTX 4090": "rtx4090",
        "NVIDIA L40S": "l40s", "NVIDIA L4": "l4", "NVIDIA B200": "b200", "AMD Instinct MI300X": "mi300x",
    }  # fmt: skip
    for name, key in names.items():
        assert timing.flops_of_name(name, DEVICES[key].memory_gb * 1e9) == DEVICES[key].tflops * 1e12, name
    for name in ("NVIDIA GeForce RTX 3090 Ti", "NVIDIA L40", "NVIDIA H100 NVL", "x86_64", "NVIDIA RTX A6000"):
        assert timing.flops_of_name(name, 48e9) is None, name
    assert timing.peak_flops(torch.device("cpu")) is None


def test_the_work_per_token_is_that_of_the_recipes_own_code(monkeypatch: pytest.MonkeyPatch) -> None:
    """Against EAGLE-3's products of one depth on captured states, by hand: every matrix forward and twice backward, attention,
    and the teacher's head."""
    recipe = ["--config", str(ROOT / "configs/quick.yaml"), "drafter.steps=1", "precision=bf16", "batch.rows=1"]
    config = distill_draft.read_config(recipe, "test")
    target, accelerator = tiny_target(), Accelerator(cpu=True)
    samples = [Sample(0, torch.arange(512) % 250, torch.arange(512) >= 0)]
    stream = Stream(samples, row_length=512, rows=1, accumulate=1, seed=0)
    said: list[str] = []
    assert utilisation.flops_per_token(config, target, stream, accelerator, said.append) is None  # no peak, no figure
    monkeypatch.setattr(utilisation, "peak_flops", lambda device: 1e12)
    found = utilisation.flops_per_token(config, target, stream, accelerator, said.append)
    assert found is not None and not said
    drafter, _ = distill_draft.build_drafter(config, target, samples)
    matrices = sum(p.numel() for n, p in drafter.named_parameters() if p.ndim == 2)
    teacher = 2 * target.facts.vocab * target.facts.width
    attention = 12 * 512 * target.facts.width  # all pairs of a row
    assert 0.95 < found / (6 * matrices + teacher + attention) < 1.1
    monkeypatch.setattr(utilisation, "counted", lambda *_: 1 / 0)
    assert utilisation.flops_per_token(config, target, stream, accelerator, said.append) is None
    assert said == ["speed/mfu is left out: ZeroDivisionError: division by zero"]


def test_b11_a_head_to_start_from_keeps_its_mapping_and_takes_the_recipes_settings(tmp_path: Path) -> None:
    recipe = [
        "--config",
        str(ROOT / "configs/quick.yaml"),
        "data.limit=20",
        "evaluate.probe_prompts=0",
        "log.progress=false",
    ]
    recipe += ["budget.steps=1", "evaluate.conversations=2"]
    assert distill_draft.main([*recipe, "draft_vocab=64", f"run={tmp_path / 'a'}"]) == 0
    observed(tmp_path / "a")
    first = f"init_from={tmp_path / 'a/export'}"
    assert distill_draft.main([*recipe, first, "drafter.train_head=false", f"run={tmp_path / 'b'}"]) == 0
    a, b = (load_file(tmp_path / run / "export/model.safetensors") for run in "ab")
    assert torch.equal(a["d2t"], b["d2t"]) and torch.equal(a["lm_head.weight"], b["lm_head.weight"])
    assert not torch.equal(a["fc.weight"], b["fc.weight"])
    with pytest.raises(ValueError, match=r"other `drafter` settings.*fc_norm"):
        distill_draft.main([*recipe, first, "drafter.fc_norm=true", f"run={tmp_path / 'c'}"])


@pytest.mark.parametrize("method", ["medusa", "dspark"])
def test_nothing_held_out_is_no_fault(method: str, tmp_path: Path) -> None:
    """By choice, or because there is too little data: a source of fewer than 20 conversations is all trained on."""
    recipe = [f"method={method}", "target.name=tiny", "target.dtype=float32", "data.limit=19", "data.max_length=512"]
    recipe += ["batch.row_length=512", "log.progress=false", "budget.steps=1", "evaluate.conversations=0"]
    assert distill_draft.main([*recipe, f"run={tmp_path / 'run'}"]) == 0
    assert (tmp_path / "run/export/model.safetensors").exists()
