"""The training loop: one function, in the order in which things happen.

Methods differ in their `loss`, not here. What the loop owes them (models/drafter.py): counts of the whole optimiser
step, over processes and micro-batches, before any loss; sums divided by those counts; the engine's own averaging undone.
So one process, two, accumulation 1x4 or 4x1 give the same update. A resume is exact to the bit (train/checkpoint.py).
Tests: `pytest tests/test_train.py tests/test_resume.py tests/test_distributed.py`.
"""

from __future__ import annotations

import math
import os
import signal
import statistics
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, dataclass
from pathlib import Path
from types import FrameType, TracebackType
from typing import Any

import torch
from accelerate import Accelerator
from torch import Tensor, nn

from ..configs.runs import RunConfig
from ..configs.training import BudgetConfig, differing
from ..data.batch import Batch, TargetOut
from . import checkpoint, engine, signs
from .checkpoint import State
from .optimiser import lr_factor, make_optimisers, set_lr
from .runlog import RunLog, duration
from .stream import Stream, sample_ids
from .timing import StepClock

SPIKE = 5.0  # a step whose loss exceeds this multiple of the running median is skipped
MEDIAN_OF = 101  # steps in the running median
MEDIAN_FROM = 20  # steps before it is trusted
ECHO = 1.0  # seconds
MAX_SKIPS = 20  # skips in a row that end the run


class LossModule(nn.Module):
    """A drafter's loss as a module's `forward`: what DDP and DeepSpeed wrap.

    Every trained parameter takes part in every backward, with weight zero where the batch has nothing for it: a
    process without a supervised token must not leave the others waiting for its gradients.
    """

    def __init__(self, drafter: nn.Module, precision: str, device: torch.device) -> None:
        super().__init__()
        self.drafter = drafter
        self.autocast = torch.autocast(device.type, torch.bfloat16, enabled=precision == "bf16")

    def forward(
        self, batch: Batch, target_out: TargetOut, progress: float, counts: dict[str, float]
    ) -> tuple[Tensor, dict[str, tuple[Tensor, Tensor]]]:
        """(this batch's part of the loss of the whole step, metrics as (sum, count)). A term whose count is zero in
        the whole step is left out."""
        with self.autocast:
            terms = self.drafter.loss(batch, target_out, progress)  # type: ignore[operator]
        missing = terms.losses.keys() - counts.keys()
        if missing:
            raise ValueError(f"loss terms {sorted(missing)} have no entry in `denominators`")
        parts = [value.float() / counts[name] for name, value in terms.losses.items() if counts[name] > 0]
        touch = sum(p.sum() * 0.0 for p in self.drafter.parameters() if p.requires_grad)
        loss = sum(parts, start=touch)
        assert isinstance(loss, Tensor)
        return loss, terms.metrics


class Stop:
    """SIGTERM and Ctrl-C as a flag that the loop reads; a second signal ends the process at once.

    Launchers of several processes pass a signal on that the terminal has already sent: what follows within ECHO seconds
    is no second signal.
    """

    def __init__(self) -> None:
        self.signal, self.at = 0, 0.0
        self.before: dict[int, Any] = {}

    def __enter__(self) -> Stop:
        for number in (signal.SIGTERM, signal.SIGINT):
            self.before[number] = signal.signal(number, self._on_signal)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for number, handler in self.before.items():
            signal.signal(number, handler)

    def asked(self) -> bool:
        """Whether a signal came: what long work that is no step asks between its parts, which is a sign of life."""
        signs.moved()
        return bool(self.signal)

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        if self.signal and time.monotonic() - self.at > ECHO:
            os._exit(128 + number)
        if not self.signal:
            self.signal, self.at = number, time.monotonic()


@dataclass
class Summary:
    """How a launch ended."""

    state: State
    signal: int = 0  # the signal that stopped it, 0 = none
    heldout: dict[str, float] | None = None  # last held-out figures
    probe: dict[str, float] | None = None
    stopped: str | None = None  # why the judge ended it


@dataclass(frozen=True)
class Verdict:
    """What the figures of a step say about the run."""

    score: float | None = None  # by which the best checkpoint is chosen; None: this step is no candidate
    against: str | None = None  # what there is to say against this step, one line
    stop: bool = False  # and that it is enough to end the run


Judge = Callable[[State, dict[str, float]], Verdict]
Probe = Callable[[nn.Module, Callable[[], bool]], dict[str, float]]


def by_run_length(state: State, figures: dict[str, float]) -> Verdict:
    """The usual judge: the longest leading run of accepted drafts is best, and nothing ends the run."""
    return Verdict(figures.get("run_length"))


def train(
    config: RunConfig,
    accelerator: Accelerator,
    drafter: nn.Module,
    stream: Stream,
    states_of: Callable[[Batch], TargetOut],
    folder: Path,
    *,
    heldout: Sequence[Batch] = (),
    heldout_states_of: Callable[[Batch], TargetOut] | None = None,
    probe: Callable[[nn.Module, Callable[[], bool]], dict[str, float]] | None = None,
    evaluate_first: bool = False,
    judge: Judge = by_run_length,
    together: Callable[[], AbstractContextManager[None]] = nullcontext,
    flops_per_token: float | None = None,
) -> Summary:
    """Train `drafter` until the budget is used, a signal or the judge ends it, or too many steps in a row had to be skipped.

    `states_of` gives the target's states of a batch. `heldout`: batches of held-out conversations, the same list in
    every process. `probe(drafter, stop)`: a real run of the decoder, on the main process. `evaluate_first`: figures of step 0
    too (`state.first`), what a run is to be held against. `judge(state, figures)`: which step is best, and whether to go on.
    `together`: holds passes of the target of which processes make different numbers (models/placement.py).
    `flops_per_token`: what a step multiplies, for the log (train/utilisation.py).
    Every process calls this.
    Raises ValueError when the run folder holds a run with other settings, RuntimeError after MAX_SKIPS skips in a row.
    """
    device = accelerator.device

    # 1. The drafter as the engine wants it.
    drafter.to(device).train()
    module = LossModule(drafter, config.precision, device)
    model, optimisers = engine.wrap(accelerator, module, make_optimisers(drafter, config.optim))
    rewrite: Callable[[Batch, float], Batch] | None = getattr(drafter, "rewrite", None)

    # 2. Where the run stands.
    state, settings = State(), asdict(config)
    start, damaged = checkpoint.newest(folder / "checkpoints")
    if start is not None:
        state, before = checkpoint.read_state(start)
        if changed := differing(before, config):
            raise ValueError(
                f"{folder} holds a run with other settings ({'; '.join(changed)}): choose another `run` folder"
            )
        checkpoint.load(start, drafter, optimisers, accelerator)
        state.done = False
    total_steps = config.budget.steps or (stream.steps(config.budget.epochs) if config.budget.epochs else None)

    def save() -> None:
        checkpoint.save(folder / "checkpoints", state, settings, drafter, optimisers, accelerator, config.save.keep)
        if rolling is not None:
            rolling.saved(state.epoch, state.window)

    rolling = stream.rolling
    if rolling is not None:
        rolling.saved(state.epoch, state.window)  # where this launch begins
    summary = Summary(state)
    last_save, rate = time.monotonic(), 0.0
    logged: dict[str, tuple[float, float]] = {}
    clock = StepClock(accelerator, flops_per_token)
    with RunLog(folder, config, accelerator, state.step, state.skipped) as log, Stop() as stop:
        for name in damaged:
            log.write("note", state.step, {"damaged": name}, f"checkpoint {name} is incomplete or damaged, passed over")
        if accelerator.is_main_process:
            checkpoint.set_aside(folder / "checkpoints", damaged)
        if start is not None:
            log.say(f"resuming from {start.name}: epoch {state.epoch}, window {state.window}, {state.tokens} tokens")

        def wanted(everything: bool) -> list[str]:
            """The figures that this step wants, unless all of them were measured."""
            every = {"heldout": config.evaluate.every} if heldout else {}
            every |= {"probe": config.evaluate.probe_every} if probe is not None else {}
            kinds = [kind for kind, steps in every.items() if everything or (steps and state.step % steps == 0)]
            return kinds if any(state.looked.get(kind) != state.step for kind in kinds) else []

        def measure(kinds: Sequence[str]) -> dict[str, float]:
            """Held-out figures and probe; the same in every process. A signal makes all of it nothing: the next launch
            measures again."""
            rng, found = checkpoint.rng_state(), dict[str, dict[str, float]]()
            with engine.whole(drafter.parameters()):
                for kind in kinds:
                    if kind == "heldout":
                        found[kind] = evaluate(
                            module, heldout, heldout_states_of or states_of, accelerator, stop, together
                        )
                        continue
                    figures: dict[str, float] = {}
                    with together():
                        if probe is not None and accelerator.is_main_process:
                            figures = probe(drafter, stop.asked)
                            drafter.train()
                    found[kind] = engine.shared(accelerator, figures)
            (stopped,) = engine.total(accelerator, [float(stop.signal)])
            if stopped:
                checkpoint.set_rng_state(rng)
                return {}
            for kind, figures in found.items():
                if figures:
                    text = {"heldout": "held out", "probe": "probe"}[kind]
                    log.write(kind, state.step, figures, f"step {state.step}  {text}: {short(figures)}")
            summary.heldout = found.get("heldout") or summary.heldout
            summary.probe = found.get("probe") or summary.probe
            state.looked = state.looked | dict.fromkeys(kinds, state.step)
            return {name: value for figures in found.values() for name, value in figures.items()}

        def look(everything: bool) -> bool:
            """Measure what is due, hear the judge, and keep the best step. True when the run must end here."""
            nonlocal start, last_save
            kinds = wanted(everything)
            figures = measure(kinds) if kinds else {}
            if not figures:
                return False
            verdict = judge(state, figures)
            state.against = verdict.against
            if not verdict.against:
                state.sound = state.step
            if verdict.score is not None and (state.best is None or verdict.score > state.best):
                state.best, state.best_step = verdict.score, state.step
                save()
                start, last_save = folder / f"checkpoints/step-{state.step:08d}", time.monotonic()
            if verdict.against:
                log.write("note", state.step, {"against": verdict.against}, f"step {state.step}  {verdict.against}")
            if verdict.stop:
                summary.stopped = verdict.against
            return verdict.stop

        if evaluate_first and not state.step and not state.first:
            state.first = measure(wanted(True))

        signs.watched(True)
        while True:
            # 3. Held-out figures and the probe of the step that was taken (here, so that those which a signal cut are made
            #    by the next launch), and what the judge says to them.
            clock.mark(None)
            if state.window >= stream.windows(state.epoch):
                state.epoch, state.window = state.epoch + 1, 0
            used = budget_used(config.budget, state, total_steps)
            if state.step and look(used >= 1.0):
                break

            # 4. The window of the next step; its counts over all processes, before any loss.
            began = time.monotonic()
            clock.mark("data")
            signs.at(f"step {state.step + 1}")
            state.done = used >= 1.0
            stop_here = config.budget.stop_at is not None and state.step >= config.budget.stop_at
            batches = [b.to(device) for b in stream.window(state.epoch, state.window)]
            local = [drafter.denominators(b, min(used, 1.0)) for b in batches]  # type: ignore[operator]
            names = sorted(local[0])
            save_due = accelerator.is_main_process and time.monotonic() - last_save > config.save.minutes * 60
            save_due |= rolling is not None and rolling.due(state.epoch, state.window)
            unready = rolling is not None and not rolling.ready(state.epoch, state.window)
            clock.mark("update")  # here: what processes tell each other
            sums = engine.total(
                accelerator,
                [
                    *(sum(one[name] for one in local) for name in names),
                    sum(int((b.samples_BT >= 0).sum()) for b in batches),
                    float(stop.signal),
                    float(save_due),
                    float(unready),
                ],
            )
            clock.mark(None)
            counts, (tokens, stopped, due, waiting) = dict(zip(names, sums[:-4], strict=True)), sums[-4:]

            # 5. Save at rest: between steps, where a few integers say all. The end of the budget always saves.
            ending = bool(stopped) or state.done or stop_here
            if (
                ending
                or due
                or (state.step and state.step % config.save.steps == 0 and state.step != _saved_step(start, state))
            ):
                save()
                start, last_save = folder / f"checkpoints/step-{state.step:08d}", time.monotonic()
            if ending:
                summary.signal = stop.signal or (signal.SIGTERM if stopped else 0)
                break
            if rolling is not None and waiting:  # for states that are captured meanwhile
                rolling.wait(state.epoch, state.window)
                continue

            # 6. Learning rate of this step: by the share of the budget that will be used once it is done.
            used_after = budget_used(config.budget, state, total_steps, 1, int(tokens), rate)
            lr = set_lr(optimisers, lr_factor(used_after, config.optim))

            # 7. Forward and backward of every micro-batch. A loss that is not finite, or far above what the run is
            #    used to, skips the whole step; a signal ends it (the window is repeated after the resume).
            loss, metrics, bad = 0.0, dict[str, tuple[float, float]](), None
            rng = checkpoint.rng_state()
            if not any(counts.values()):
                bad = "no supervised token"
            for i, batch in enumerate(batches):
                if bad:
                    break
                last = i == len(batches) - 1
                clock.mark("target")
                with torch.no_grad():
                    if rewrite is not None:  # on-policy methods: own samples, before the target reads them
                        with engine.whole(drafter.parameters()):
                            batch = rewrite(batch, min(used, 1.0))
                    target_out = states_of(batch)
                clock.mark("drafter")
                with engine.until_last(accelerator, model, last):
                    part, pairs = model(batch, target_out, min(used, 1.0), counts)
                    clock.mark("update")
                    share, stopped = engine.total(accelerator, [float(part.detach()), float(stop.signal)])
                    clock.mark("drafter")
                    loss += share
                    bad = "stopped" if stopped else wrong(loss, state)
                    if not bad:
                        engine.backward(accelerator, model, part, last)
                add(metrics, {name: (float(value), float(count)) for name, (value, count) in pairs.items()})

            # 8. Update, or skip: count it, name its samples, and give up when nothing else comes.
            clock.mark("update")
            if bad == "stopped":
                engine.discard(accelerator, model, optimisers)
                checkpoint.set_rng_state(rng)
                continue
            state.window += 1
            state.tokens += int(tokens)
            norm = 0.0
            if not bad:
                norm = engine.step(accelerator, model, optimisers, config.optim.clip)
                bad = None if math.isfinite(norm) else f"gradient norm {norm}"
            if bad:
                engine.discard(accelerator, model, optimisers)
                skip(state, bad, engine.union(accelerator, sample_ids(batches)), log)
                continue
            state.step += 1
            state.skipped_in_a_row, state.skipped_samples = 0, []
            state.losses = [*state.losses[-(MEDIAN_OF - 1) :], loss]
            if len(state.losses) == MEDIAN_FROM and state.first_median is None:
                state.first_median = statistics.median(state.losses)
            (rate,) = engine.total(accelerator, [time.monotonic() - began if accelerator.is_main_process else 0.0])
            state.seconds += rate  # the main process's clock decides: budgets must end everywhere in the same step
            clock.mark(None)
            clock.step_taken(tokens, rate)

            # 9. Say how it goes.
            add(logged, metrics)
            now = budget_used(config.budget, state, total_steps)
            left = state.seconds / now - state.seconds if now else math.inf
            log.advance(now, f"step {state.step}  loss {loss:.3f}  {tokens / rate:.0f} tok/s  {duration(left)} left")
            if state.step % config.log.every == 0 or state.step == 1:
                figures = values(engine.total_pairs(accelerator, logged))
                logged = {}
                figures |= {"loss": loss, "lr": lr, "grad_norm": norm, "epoch": state.epoch, "tokens": state.tokens}
                figures |= {"seconds": state.seconds, "skipped": state.skipped} | clock.figures()
                text = (
                    f"step {state.step}  loss {loss:.4f}  lr {lr:.2e}  {tokens / rate:.0f} tok/s  {duration(left)} left"
                )
                log.write("train", state.step, figures, text if log.bar is None else None)
        signs.watched(False)
    engine.put_together(drafter)
    return summary


def budget_used(
    budget: BudgetConfig, state: State, total_steps: int | None, steps: int = 0, tokens: int = 0, seconds: float = 0.0
) -> float:
    """Share of the budget that is used (may exceed 1), once `steps`, `tokens`, `seconds` more are spent."""
    if total_steps is not None:
        return (state.step + state.skipped + steps) / total_steps
    if budget.tokens is not None:
        return (state.tokens + tokens) / budget.tokens
    assert budget.minutes is not None
    return (state.seconds + seconds) / (60 * budget.minutes)


def wrong(loss: float, state: State) -> str | None:
    """Why a step with this (so far summed) loss must be skipped, or None.

    The median is of the last MEDIAN_OF steps, held above 2 % of the run's first one: near zero, noise is not a spike.
    """
    if not math.isfinite(loss):
        return f"loss {loss}"
    if len(state.losses) < MEDIAN_FROM:
        return None
    usual = max(statistics.median(state.losses), 0.02 * (state.first_median or 0.0))
    return f"loss {loss:.4g} is above {SPIKE:g} x the running median {usual:.4g}" if loss > SPIKE * usual else None


def skip(state: State, why: str, samples: list[int], log: RunLog) -> None:
    """Count and name a skipped step. Raises RuntimeError after MAX_SKIPS in a row."""
    state.skipped += 1
    state.skipped_in_a_row += 1
    state.skipped_samples = [*state.skipped_samples, *samples]
    log.write(
        "skip",
        state.step,
        {"why": why, "samples": samples, "skipped": state.skipped},
        f"skipped a step: {why}; samples {samples}",
    )
    if state.skipped_in_a_row >= MAX_SKIPS:
        raise RuntimeError(
            f"{MAX_SKIPS} steps in a row were skipped (last: {why}); their samples: {sorted(set(state.skipped_samples))}. "
            "Look at them with `draftsmith masks`, lower optim.lr, or go on from an earlier checkpoint"
        )


@torch.no_grad()
def evaluate(
    module: LossModule,
    batches: Sequence[Batch],
    states_of: Callable[[Batch], TargetOut],
    accelerator: Accelerator,
    stop: Stop,
    together: Callable[[], AbstractContextManager[None]] = nullcontext,
) -> dict[str, float]:
    """Held-out metrics, teacher-forced, summed over processes; each batch is one conversation.

    `run_length` (mean leading run of accepted drafts) gets a 90 % interval by bootstrap over conversations. `tau` is
    what a chain commits per verification; methods that do not walk the text (models/supervision.py) give 1 + run_length,
    which is a little too high. Empty, in every process, when a signal came to
    any of them.
    """
    module.drafter.eval()
    mine: dict[str, tuple[float, float]] = {}
    with together():
        for i in range(accelerator.process_index, len(batches), accelerator.num_processes):
            if stop.asked():
                break
            batch = batches[i].to(accelerator.device)
            counts = module.drafter.denominators(batch, 1.0)  # type: ignore[operator]
            _, metrics = module(batch, states_of(batch), 1.0, counts)
            mine |= {f"{i} {name}": (float(v), float(n)) for name, (v, n) in metrics.items()}
    module.drafter.train()
    (stopped,) = engine.total(accelerator, [float(stop.signal)])
    everything = engine.total_pairs(accelerator, mine)
    if stopped:
        return {}
    by_name: dict[str, list[tuple[float, float]]] = {}
    for key, pair in sorted(everything.items()):
        by_name.setdefault(key.split(" ", 1)[1], []).append(pair)
    figures = values({n: (sum(v for v, _ in pairs), sum(c for _, c in pairs)) for n, pairs in by_name.items()})
    if "run_length" in figures:
        low, high = interval(by_name["run_length"])
        figures = {"tau": 1 + figures["run_length"], "run_length_low": low, "run_length_high": high} | figures
    return figures


def interval(pairs: Sequence[tuple[float, float]], resamples: int = 500) -> tuple[float, float]:
    """90 % bootstrap interval of sum(values) / sum(counts) over the pairs; its draws are fixed."""
    pairs_N2 = torch.tensor(pairs, dtype=torch.float64)
    generator = torch.Generator().manual_seed(0)
    drawn = pairs_N2[torch.randint(len(pairs), (resamples, len(pairs)), generator=generator)].sum(1)
    ratios = drawn[:, 0] / drawn[:, 1].clamp(min=1e-9)
    low, high = torch.quantile(ratios, torch.tensor([0.05, 0.95], dtype=torch.float64)).tolist()
    return low, high


def add(sums: dict[str, tuple[float, float]], pairs: dict[str, tuple[float, float]]) -> None:
    """Add (sum, count) pairs to those of the same name."""
    for name, (value, count) in pairs.items():
        before_value, before_count = sums.get(name, (0.0, 0.0))
        sums[name] = (before_value + value, before_count + count)


def values(pairs: dict[str, tuple[float, float]]) -> dict[str, float]:
    """sum / count of each metric that has a count."""
    return {name: value / count for name, (value, count) in pairs.items() if count > 0}


def short(figures: dict[str, float]) -> str:
    return "  ".join(f"{name} {value:.3f}" for name, value in figures.items())


def _saved_step(start: Path | None, state: State) -> int:
    return int(start.name.removeprefix("step-")) if start is not None else -1
