"""`draftsmith tune EXPORT`: half a minute of measuring on this machine, and the draft that is fastest here.

    draftsmith tune runs/demo/export
    draftsmith tune runs/demo/export --batch 8 --dtype float32 --json tuned-here.json
    draftsmith tune ngram --target smollm2             # nothing to store in: the options to give are printed

Five probes in turn, each for a share of `seconds`, all in this process and interleaved where they are compared:

1. threads: a plain step and a verification with each number of threads;
2. c(M, batch): the target's pass over M rows, as a chain and masked as a tree, behind a text of usual length;
3. acceptance by depth and rank, and the drafter's time per level, on calibration prompts. One chain per verification
   tells the rank of the right token at every depth that was reached (`Recorder`);
4. the time of levels with several nodes, of tree building, of committing trees;
5. plain decoding, the default shape and the best predicted ones (inference/choose.py) against each other on other prompts.

The best prediction wins, unless another finalist of the last probe is measured faster by more than `MARGIN`. Drafters that
propose drafts of their own have no levels to predict from: their depth settings are all measured, in the fifth probe's way.
The result goes into the export (tuned.json, inference/tuned.py), whole or not at all. Tests: tests/test_tune.py.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

import torch
from rich.console import Console
from rich.table import Table

from ..models import FreeSettings
from ..models.int8 import Weights
from ..models.jacobi import Jacobi, JacobiConfig
from ..models.loading import load_target
from ..models.target import Target
from .choose import Candidate, Chances, Costs, best_of_kinds, candidates
from .commit import Stats
from .consistency_folder import jacobi_of, load_consistency, stored_consistency
from .exporters.folder import write_file
from .load import PLAIN_MODEL, free_drafter, is_free, load_drafter, read_export_config, refuse_idle_settings
from .probes import ROWS, Probe, probe_drafts, probe_threads, probe_verify
from .progress import progress_bar
from .report import number, visible
from .speculate import DecodeConfig, plan_of
from .suites import SUITES, load_suite
from .tuned import FILE, Tuned, describe, flags, key_of, store, usable_cores

PROPOSED = (2, 4, 8, 12)  # k of drafters that propose
BLOCKS = (4, 8, 16, 32)  # of jacobi
AHEAD = (1, 2, 3, 4)  # of jacobi with a quadratic window, whose rows grow with the square
MARGIN = 0.03  # a finalist that was measured faster than the best prediction by more than this takes its place (ours)
FINALIST = 0.9  # share of the best predicted rate from which a kind of shape is worth measuring (ours)


@dataclass(frozen=True)
class TuneConfig:
    """What to tune, and for which use."""

    export: str
    """Export folder of a drafter, where the result is stored. Or, with the result printed, as options to give: a folder of
    a consistency model, a Hub id, ngram, suffix, recycling, lookahead, jacobi or lm:MODEL."""
    target: str | None = None
    """Hub id, folder, GGUF file or built-in name of the target; by default the one that the export names."""
    drafter: FreeSettings = field(default_factory=FreeSettings)
    """Settings of the training-free drafters (of a consistency model, of jacobi)."""
    revision: str | None = None
    """Revision of the export on the Hub."""
    target_revision: str | None = None
    """Revision of the target on the Hub; by default the one that the export names."""
    suite: str = "mini"
    """Calibration prompts: from the second half of a suite, which `evaluate` reaches last."""
    file: str | None = None
    """Local file of the suite's schema (.json, .jsonl, .jsonl.gz, .jsonl.xz)."""
    seconds: float = 30.0
    """How long to measure, loading not counted; slow targets take longer, for a few repeats of everything."""
    batch: int = 1
    """Requests that are decoded together in the use that is tuned for (generate and evaluate: 1)."""
    max_new_tokens: int = 48
    """Longest answer of the calibration, in tokens."""
    depth: int = 8
    """Deepest draft that is tried (drafters with fixed depths: no more than these)."""
    threads: tuple[int, ...] | None = None
    """Numbers of CPU threads to try; null = 1, 2, 4 ... up to the cores."""
    dtype: Literal["bfloat16", "float16", "float32", "float64"] = "bfloat16"
    """Weights and states of target and drafter."""
    weights: Weights = "full"
    """int8: round the target's matrices, the embedding's aside, for plain decoding and verification alike; half the memory,
    other answers (models/int8.py)."""
    device: str = "cpu"
    """Where to run."""
    json: str | None = None
    """Also write the result, with all that was measured, into this file."""
    trust_remote_code: bool = False
    """Run code that comes with the target."""

    def __post_init__(self) -> None:
        if self.suite not in SUITES:
            raise ValueError(f"suite = {self.suite!r}: choose one of {', '.join(SUITES)}")
        for name in ("batch", "depth"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} = {getattr(self, name)}: must be at least 1")
        if self.max_new_tokens < 4:
            raise ValueError(f"max_new_tokens = {self.max_new_tokens}: must be at least 4, or nothing is drafted")
        if not 0 <= self.seconds < float("inf"):
            raise ValueError(f"seconds = {self.seconds}: must be a finite number >= 0")
        if self.threads is not None and (not self.threads or min(self.threads) < 1):
            raise ValueError(f"threads = {list(self.threads)}: give one or more numbers of at least 1")
        if self.threads is not None and max(self.threads) > usable_cores():
            raise ValueError(f"threads = {list(self.threads)}: this process may run on {usable_cores()} cores, no more")
        if self.json is not None and Path(self.json).is_dir():
            raise ValueError(f"json = {self.json!r} is a folder: name the file to write")
        if self.json is not None and not Path(self.json).absolute().parent.is_dir():
            raise ValueError(f"json = {self.json!r}: its folder does not exist; make it first")


@dataclass
class Arm:
    """One way of decoding in the comparison, and what was measured of it, prompts not counted. `decode` None = plain."""

    name: str
    drafter: Any
    decode: DecodeConfig | None
    predicted: Candidate | None = None
    tokens: int = 0
    verifies: int = 0
    steps: int = 0
    seconds: float = 0.0

    def take(self, stats: Stats, steps: int) -> None:
        """Add the answers of one batch."""
        self.tokens += stats.committed - stats.requests
        self.verifies += stats.verifies
        self.steps += steps
        self.seconds += stats.seconds_total - stats.seconds["prefill"]

    @property
    def rate(self) -> float:
        """Tokens per second."""
        return self.tokens / self.seconds if self.seconds else 0.0

    def figures(self, plain: Arm) -> dict[str, Any]:
        """What was predicted and measured: tokens per verification and request, milliseconds per step, tokens per second,
        times plain decoding."""
        found: dict[str, Any] = {"name": self.name}
        if self.predicted is not None and plain.predicted is not None:
            p = self.predicted
            found["predicted"] = _figures(p.tokens, p.seconds, p.rate, p.rate / plain.predicted.rate)
        if self.verifies and plain.rate:
            step = self.seconds / self.steps
            found["measured"] = _figures(self.tokens / self.verifies, step, self.rate, self.rate / plain.rate)
        return found


def _figures(tokens: float, seconds: float, rate: float, ratio: float) -> dict[str, float]:
    return {
        "tokens_per_pass": tokens,
        "milliseconds_per_step": 1000 * seconds,
        "tokens_per_second": rate,
        "ratio_to_plain": ratio,
    }


def compare(probe: Probe, arms: Sequence[Arm]) -> None:
    """Let all arms answer the same prompts, in rotating order."""
    for lap in probe.laps("compare", 2):
        ids, shift = probe.batch(), lap % len(arms)
        for arm in (*arms[shift:], *arms[:shift]):
            arm.take(*probe.run(ids, arm.drafter, arm.decode))


def winner(arms: Sequence[Arm]) -> Arm:
    """Of drafting arms, the first one with a prediction being the best predicted: that one, or the one that was measured
    fastest if it is faster by more than `MARGIN`."""
    fastest = max(arms, key=lambda arm: arm.rate)
    best = next((arm for arm in arms if arm.predicted is not None), fastest)
    return fastest if fastest.rate > (1 + MARGIN) * best.rate else best


@dataclass(frozen=True)
class Tuning:
    """What came out: the arms of the comparison, plain decoding first, the one that won, and what else was measured."""

    threads: int
    arms: list[Arm]
    best: Arm
    costs: Costs | None = None
    chances: Chances = ()
    tested: int = 0  # drafts that the chances come from

    def figures(self) -> dict[str, Any]:
        """All of it as JSON has it."""
        return {
            "chosen": self.best.name,
            "arms": [arm.figures(self.arms[0]) for arm in self.arms],
            "costs": None if self.costs is None else asdict(self.costs),
            "tested": self.tested,
            "chances": [[round(c, 4) for c in row] for row in self.chances],
        }


def tune(probe: Probe, drafter: Any) -> Tuning:
    """All probes of a drafter with levels, and the choice. The number of threads that was found stays set."""
    facts = probe.target.facts
    taps = tuple(drafter.taps)
    threads = probe_threads(probe, taps)
    torch.set_num_threads(threads)
    costs, chances, recorder = probe_drafts(probe, drafter, probe_verify(probe, taps))
    found = candidates(
        drafter,
        recorder.asks,
        lambda decode: _plan(drafter, decode, facts.vocab, facts.tokens),
        chances,
        costs,
        recorder.rounds,
    )
    if not found:
        raise ValueError(
            f"no draft of this drafter fits into {max(ROWS)} rows, the most that are measured; lower --depth"
        )
    plain = Arm("plain", None, None, Candidate("plain", DecodeConfig(), 1.0, costs.plain, costs.batch))
    drafts = [Arm(describe(c.decode), drafter, c.decode, c) for c in best_of_kinds(found, FINALIST)]
    usual = DecodeConfig()
    known = next((c for c in found if c.decode == replace(usual, k=min(usual.k, len(chances)))), None)
    if known is None or known.decode not in [arm.decode for arm in drafts]:
        drafts.append(Arm(f"{describe(usual)} (default)", drafter, usual, known))
    compare(probe, [plain, *drafts])
    return Tuning(threads, [plain, *drafts], winner(drafts), costs, chances, recorder.tried[0])


def _plan(drafter: Any, decode: DecodeConfig, vocab: int, tokens: int) -> Any:
    plan = plan_of(drafter, decode, vocab, tokens)
    assert plan is not None
    return plan


Options = dict[str, tuple[Any, DecodeConfig]]


def tune_proposer(probe: Probe, options: Options) -> Tuning:
    """The same of drafters that propose: name -> (drafter, shape), all measured."""
    threads = probe_threads(probe, ())
    torch.set_num_threads(threads)
    plain = Arm("plain", None, None)
    drafts = [Arm(name, drafter, decode) for name, (drafter, decode) in options.items()]
    compare(probe, [plain, *drafts])
    return Tuning(threads, [plain, *drafts], winner(drafts))


def proposals(cfg: TuneConfig, target: Target) -> Options:
    """The depth settings of a training-free drafter that are tried, by the options that say them."""
    if cfg.export == Jacobi.method:
        return blocks(cfg.drafter.jacobi, target)
    drafter = free_drafter(cfg.export, target, cfg.drafter)
    return {flags(decode): (drafter, decode) for decode in (DecodeConfig(k=k) for k in PROPOSED)}


def blocks(settings: JacobiConfig, target: Target) -> Options:
    """The same of jacobi: its blocks, and the one that is set."""
    options: Options = {}
    for n in sorted({*(AHEAD if settings.window == "quadratic" else BLOCKS), settings.block}):
        drafter = Jacobi(replace(settings, block=n), target.facts)
        drafter.bind(target)
        options[f"--drafter.jacobi.block {n}"] = drafter, DecodeConfig()
    return options


@contextmanager
def restored_threads() -> Iterator[None]:
    """Threads as they were, afterwards."""
    before = torch.get_num_threads()
    try:
        yield
    finally:
        torch.set_num_threads(before)


def calibration_prompts(cfg: TuneConfig, target: Target, most: int = 128) -> list[list[int]]:
    """Token ids of prompts from the second half of the suite's order; `evaluate` begins with the first. A long prompt is
    left out; ValueError if all are."""
    if target.tokenizer.chat_template is None:
        raise ValueError(f"target {target.facts.name!r} has no chat template, and suites are conversations: set one")
    suite = load_suite(cfg.suite, file=cfg.file)
    room = target.facts.max_positions - cfg.max_new_tokens - max(ROWS)
    ids = [
        target.tokenizer.apply_chat_template(list(prompt.messages), add_generation_prompt=True, return_dict=False)
        for prompt in suite[len(suite) // 2 :][:most]
    ]
    if not (fitting := [row for row in ids if len(row) <= room]):
        raise ValueError(
            f"suite {cfg.suite!r}: no prompt is short enough for the target's {target.facts.max_positions} positions"
        )
    return fitting


def refuse_locked(folder: Path) -> None:
    """ValueError for an export that the result cannot be stored in, before anything is measured."""
    if not os.access(folder, os.W_OK) or (folder / FILE).is_dir():
        raise ValueError(
            f"{folder}: {FILE} cannot be written there, and the result is kept in it: make the folder writable, or copy it"
        )


def run_tune(cfg: TuneConfig) -> None:
    """The command: load, measure, store, print predicted against measured.

    Raises:
        ValueError: an export that does not fit the target, no target, a drafter that was never right to test.
    """
    free = is_free(cfg.export)
    model = None if free else stored_consistency(cfg.export, cfg.revision)
    refuse_idle_settings(cfg.drafter, [cfg.export if model is None else Jacobi.method])
    if cfg.drafter.suffix.shared:
        raise ValueError(
            "drafter.suffix.shared = true: every prompt is answered several times here, and the drafter would know the "
            "answers; leave it off"
        )
    ours: dict[str, Any] = {}
    if not free and model is None:
        ours = read_export_config(cfg.export, cfg.revision)["draftsmith"]
    folder = Path(cfg.export).expanduser()
    stays = bool(ours) and folder.is_dir()
    if stays:
        refuse_locked(folder)
    if model is not None:
        if cfg.target is not None:
            raise ValueError(f"target = {cfg.target!r}: the weights of {cfg.export} stand alone; leave it out")
        settings = jacobi_of(model, cfg.drafter.jacobi)
        target = load_consistency(model, dtype=cfg.dtype, device=cfg.device)
        target.round_weights(cfg.weights)
    else:
        if cfg.target is None and not ours:
            raise ValueError(f"{cfg.export} drafts for any target and names none: add --target NAME")
        target = load_target(
            cfg.target or ours["target"]["name"],
            dtype=cfg.dtype,
            device=cfg.device,
            revision=cfg.target_revision or (ours["target"].get("revision") if ours and not cfg.target else None),
            trust_remote_code=cfg.trust_remote_code,
            weights=cfg.weights,
        )
    probe = Probe(
        target, calibration_prompts(cfg, target), cfg.batch, cfg.max_new_tokens, cfg.depth, cfg.threads, cfg.seconds
    )
    console = Console()
    if not console.is_terminal:
        console = Console(width=120)  # a log has no width of its own
    with restored_threads(), progress_bar("tune", max(1.0, cfg.seconds), unit="s") as probe.tell:
        if model is not None:
            found = tune_proposer(probe, blocks(settings, target))
        elif free and not cfg.export.startswith(PLAIN_MODEL):
            found = tune_proposer(probe, proposals(cfg, target))
        else:
            drafter = (
                free_drafter(cfg.export, target) if free else load_drafter(cfg.export, target, revision=cfg.revision)
            )
            found = tune(probe, drafter)
    decode = found.best.decode
    assert decode is not None
    tuned = Tuned(key_of(target, ours, cfg.batch), found.threads, decode, found.figures())
    print_tuning(tuned, found, console)
    if stays:
        console.print(visible(f"stored in {store(folder, tuned)}; used where no --k or --tree is given"))
    else:
        options = flags(decode) if ours or cfg.export.startswith(PLAIN_MODEL) else found.best.name
        console.print(visible(f"not stored: give {options or 'the shape above, in Python'}"))
    if cfg.json is not None:
        write_file(Path(cfg.json), json.dumps(tuned.row(), indent=1, allow_nan=False) + "\n")
        console.print(visible(f"wrote {cfg.json}"))


def print_tuning(tuned: Tuned, found: Tuning, console: Console) -> None:
    """Costs, acceptance, and predicted against measured."""
    key = tuned.key
    if found.costs is not None:
        for kind, passes in found.costs.verify.items():
            shown = ", ".join(
                f"{rows}: {number(spent / found.costs.verify['chain'][1])}" for rows, spent in passes.items()
            )
            console.print(visible(f"target's pass over M rows, x one row, {kind}: {shown}"))
        console.print(
            visible(
                f"one row {1000 * found.costs.verify['chain'][1]:.2f} ms; drafter's first level {1000 * found.costs.start:.2f}"
                + "".join(f", a level of {n} {1000 * spent:.2f}" for n, spent in found.costs.extend.items())
                + " ms"
            )
        )
        console.print(visible(f"acceptance by depth and rank, from {found.tested} drafts:"))
        for d, row in enumerate(found.chances, 1):
            console.print(visible(f"  depth {d}: {' '.join(number(c) for c in row)}"))
    where = "" if key["gpu"] is None else f", {key['gpu']}"
    title = f"{key['dtype']}, batch {key['batch']}, {tuned.threads} thread(s){where}: predicted / measured"
    table = Table("decoding", "tokens/pass", "ms/step", "tok/s", "x plain", title=title)
    for arm in found.arms:
        figures = arm.figures(found.arms[0])
        cells = [
            " / ".join(number(figures[way][name], digits) for way in ("predicted", "measured") if way in figures)
            for name, digits in (
                ("tokens_per_pass", 2),
                ("milliseconds_per_step", 2),
                ("tokens_per_second", 1),
                ("ratio_to_plain", 2),
            )
        ]
        table.add_row(visible(arm.name), *cells, style="bold" if arm is found.best else None)
    console.print(table)
    console.print(visible(f"chosen: {found.best.name}"), style="bold")
    if found.best.rate <= found.arms[0].rate:
        console.print(
            visible("flag: plain decoding is as fast here: this drafter costs what it brings"), style="yellow"
        )
