"""`draftsmith evaluate` of a consistency model: tokens per pass and speed, and what they cost in quality.

The same prompts, chat template, budget and runtime for all, greedy, in one interleaved run: the base and the trained
model, each plainly and by Jacobi with the same settings (a base that was not trained for masks starts from the prompt).
Jacobi must give each model's own plain answers (below float64 near-ties may fall the other way, and are counted). Quality
is measured against the base: cross-entropy of its answers, repetition, how many answers stay the same, and right answers
where the suite has a checker. A gain counts only where nothing is red and quality stayed. Only first turns are answered.

    draftsmith evaluate --model CONSISTENT --suite tasks --drafter.jacobi.block 32
    pytest tests/test_evaluate_consistency.py
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import numpy as np
from jinja2 import Environment, FileSystemLoader, StrictUndefined
from rich import box
from rich.console import Console
from rich.table import Table

from ..data.encode import prompt_ids
from ..losses.probs import SamplingParams
from ..models.convergence import block_states
from ..models.jacobi import Jacobi, JacobiConfig
from ..models.target import Target
from ..models.threads import settle_threads
from .card import write_card
from .consistency_figures import Convergence, answer_losses, convergence_figure, convergence_of, repeated_grams
from .consistency_folder import branches, jacobi_of, load_consistency, refuse_idle_branches, settings_line
from .denoisers import Stored, load_base
from .diffusion_figures import Decoded, retention
from .evaluate import label_of, machine, to_sample, write_report
from .evaluate_config import EvaluateConfig
from .figures import Bootstrap, Row, Sample, by_prompt, rate, ratio, speed
from .report import identity_lines, number, plot_speed, svg, visible, with_interval
from .speculate import DecodeConfig, generate, refuse_tree
from .suites import SUITES, Prompt, load_suite
from .ties import parting, pass_rows

MOST_RISE = 0.10  # nats per token that cross-entropy may rise by: beyond, a gain in speed was paid for in quality
MOST_REPEATED = 0.05  # share of all 4-grams that may repeat earlier ones beyond the base's: likewise
WARM = SamplingParams(max_new_tokens=4)
USED = ("model", "target", "drafter", "revision", "target_revision", "suite", "file", "prompts", "max_new_tokens", "trees",
        "nodes", "width", "dtype", "device", "seed", "bootstrap", "out", "json", "html", "card",
        "trust_remote_code")  # fmt: skip

COUNTING = {
    "tokens per forward": "tokens that verification passes committed / these passes, pooled over all prompts; plain decoding "
    "has 1. The pass over the prompt and its token are in neither",
    "tokens per second": "tokens of the answers / wall seconds of the whole call, prompt included",
    "x base": "ratio of tokens per second to the base's plain decoding, in one interleaved run; x own: to the same model's",
    "cross-entropy": "of the base's own greedy answers, teacher-forced, mean over their tokens, in nats; rise: the trained "
    "model's minus the base's",
    "repeated": "of the 4-grams of plain answers, the share that occurred before in their answer",
    "same answers": "share of the prompts that both models answer plainly with the same tokens",
    "passes per block": "until all tokens of a block are right, from its first guesses on",
    "interval": "95 %, percentile bootstrap over prompts",
}


@dataclass(frozen=True)
class Way:
    """One way of decoding that takes part: which model, and its jacobi or None for plain decoding."""

    name: str
    target: Target
    jacobi: Jacobi | None

    @property
    def model(self) -> str:
        """Which of the two models it is of."""
        return self.name.split()[0]


def run_consistency(cfg: EvaluateConfig, stored: Stored, console: Console, named: Collection[str] = frozenset()) -> int:
    """`run_evaluate` of a consistency model: settings that speak of something else are refused."""
    plain = EvaluateConfig("")
    if idle := [f for f in asdict(cfg) if f not in USED and getattr(cfg, f) != getattr(plain, f)]:
        raise ValueError(f"{', '.join(idle)}: {cfg.model} is a consistency model, these are for others; leave them out")
    if len(cfg.trees) > 1:
        raise ValueError(f"trees = {list(cfg.trees)}: {cfg.model} is decoded with one shape per run; give one")
    settings, decode = jacobi_of(stored, cfg.drafter.jacobi, named), cfg.decode(cfg.trees[0], DecodeConfig.k)
    refuse_idle_branches(cfg.drafter.jacobi, named, [decode], "--trees")
    refuse_tree(Jacobi, decode)
    prompts = load_suite(cfg.suite, file=cfg.file, limit=cfg.prompts)
    base = base_of(cfg, stored)
    trained = load_consistency(stored, dtype=cfg.dtype, device=cfg.device)
    settle_threads(trained)
    report, maps = evaluate_consistency(
        base,
        trained,
        prompts,
        SUITES[cfg.suite].score,
        settings,
        decode,
        max_new_tokens=cfg.max_new_tokens,
        draws=cfg.bootstrap,
        seed=cfg.seed,
    )
    report["machine"] = machine(trained)
    report["run"] |= {"suite": cfg.suite, "name": label_of(cfg.model), "kind": stored.kind}
    written = write_report(report, cfg, page(report, maps))
    print_consistency_report(report, console)
    console.print(visible(f"wrote {written[0]} and {written[1]}"))
    if cfg.card and Path(cfg.model).is_dir():
        for path, name in zip(written, ("report.json", "report.html"), strict=True):
            (Path(cfg.model) / name).write_bytes(path.read_bytes())
        write_card(Path(cfg.model))
        console.print(visible(f"its table is in the model card, {Path(cfg.model) / 'README.md'}"))
    return 1 if any(row["red"] for row in report["rows"]) else 0


def base_of(cfg: EvaluateConfig, stored: Stored) -> Target:
    """The model that was trained. ValueError, with what to do, where it is not at hand or another one is named."""
    try:
        return load_base(
            stored,
            cfg.target,
            cfg.target_revision,
            dtype=cfg.dtype,
            device=cfg.device,
            trust_remote_code=cfg.trust_remote_code,
        )
    except ValueError as error:
        raise ValueError(
            f"{cfg.model} is measured beside the model that it was trained from, and that cannot be used: {error} "
            "(--target FOLDER says where it is)"
        ) from None


def evaluate_consistency(
    base: Target,
    trained: Target,
    prompts: Sequence[Prompt],
    score: Callable[[str, str], bool] | None,
    settings: JacobiConfig,
    decode: DecodeConfig | None = None,
    *,
    max_new_tokens: int,
    draws: int = 1000,
    seed: int = 0,
) -> tuple[Row, dict[str, Convergence]]:
    """Answer and count.

    `score(answer, reference)`: of the suite, None = answers are not scored. `decode`: whether Jacobi has branches.

    Returns:
        {"run", "rows" (plain and jacobi of the base, then of the trained model), "gain" (tokens per forward over the
        base's, by jacobi both; whether it `counts`, and `reasons` why not), "quality", "retention" (None without scores), "convergence", "flags", "counting"}, and the
        convergence maps by model.
    """
    decode = decode or DecodeConfig()
    untrained = settings if settings.start != "mask" else replace(settings, start="prompt", mask_id=None)
    ways = [
        Way("base plain", base, None),
        Way("base jacobi", base, jacobi_for(base, untrained)),
        Way("trained plain", trained, None),
        Way("trained jacobi", trained, jacobi_for(trained, settings)),
    ]
    ids = [prompt_ids(prompt.messages, trained.tokenizer) for prompt in prompts]
    params = SamplingParams(max_new_tokens=max_new_tokens)
    samples, blocks = answers_of(ways, prompts, ids, params, decode, score)
    maps = {name: counts for name, states in blocks.items() if (counts := convergence_of(states))}
    bootstrap = Bootstrap([p.id for p in prompts], draws, seed)
    first, untrained_jacobi, second, jacobi = samples.values()
    rows = []
    for way, own in zip(ways, (first, first, second, second), strict=True):
        row = row_of(way, samples[way.name], first, own, bootstrap)
        rows.append(row | identity(way, samples[way.name], own, ids, decode, base.dtype.itemsize == 8))
        if rows[-1]["red"]:
            for name in ("tokens_per_second", "ratio_to_plain", "ratio_to_own"):
                rows[-1][name] = rows[-1][f"{name}_interval"] = None
    quality = quality_of(base, trained, ids, first, second, bootstrap)
    gain = gain_of(jacobi, untrained_jacobi, bootstrap)
    scored = rows[0]["accuracy"] is not None
    report: Row = {
        "run": {
            "prompts": len(prompts),
            "max_new_tokens": max_new_tokens,
            "dtype": str(base.dtype).removeprefix("torch."),
            "target": base.facts.name,
            "target_revision": base.facts.revision,
            "runner": base.path,
            "jacobi": asdict(settings),
            "jacobi_line": settings_line(settings, branches(decode)),
            "base_jacobi": asdict(untrained),
            "tree": decode.tree,
            "nodes": decode.nodes,
            "width": decode.width,
            "seed": seed,
            "bootstrap": draws,
        },
        "rows": rows,
        "gain": gain | standing(gain, rows, quality),
        "quality": quality,
        "retention": retention(decoded(first), decoded(second), draws=draws, seed=seed) if scored else None,
        "convergence": {name: counts.to_json() for name, counts in maps.items()},
        "flags": flags_of(rows, quality),
        "counting": COUNTING,
    }
    return report, maps


def jacobi_for(target: Target, settings: JacobiConfig) -> Jacobi:
    """Jacobi decoding of `target` that records what became of its blocks."""
    jacobi = Jacobi(settings, target.facts)
    jacobi.bind(target)
    jacobi.record = True
    return jacobi


def answers_of(
    ways: Sequence[Way],
    prompts: Sequence[Prompt],
    ids: Sequence[list[int]],
    params: SamplingParams,
    decode: DecodeConfig,
    score: Callable[[str, str], bool] | None,
) -> tuple[dict[str, list[Sample]], dict[str, list[list[list[int]]]]]:
    """Every prompt by every way, in rotating order: samples by way, and by model the states of all its blocks."""
    for way in ways:
        generate(way.target, [ids[0]], WARM, way.jacobi, decode)
        if way.jacobi is not None:
            way.jacobi.traces.clear()
    samples: dict[str, list[Sample]] = {way.name: [] for way in ways}
    blocks: dict[str, list[list[list[int]]]] = {way.model: [] for way in ways if way.jacobi is not None}
    for i, prompt in enumerate(prompts):
        shift = i % len(ways)
        for way in [*ways[shift:], *ways[:shift]]:
            start = time.perf_counter()
            (result,) = generate(way.target, [ids[i]], params, way.jacobi, decode)
            sample = to_sample(result, way.name, time.perf_counter() - start)
            sample.prompt, sample.category = prompt.id, prompt.category
            if score is not None and prompt.reference is not None:
                sample.right = score(result.text, prompt.reference)
            samples[way.name].append(sample)
            if way.jacobi is not None:
                blocks[way.model] += block_states(way.jacobi.traces.pop(), result.ids, way.jacobi.config.block)
    return samples, blocks


def row_of(way: Way, samples: list[Sample], plain: list[Sample], own: list[Sample], bootstrap: Bootstrap) -> Row:
    """One way's figures. `plain`: the base's plain answers; `own`: the same model's."""
    scored = [s for s in samples if s.right is not None]
    right, answered = bootstrap.sums(scored, lambda s: bool(s.right)), bootstrap.sums(scored, lambda s: 1)
    row: Row = {"name": way.name, "answers": len(samples), "draft_length": 0 if way.jacobi is None else 1}
    row |= {"tokens": sum(len(s.ids) for s in samples), "forwards": sum(s.verifies for s in samples)}
    for name, (value, interval) in {
        "tokens_per_forward": rate(*passes_of(samples, bootstrap), bootstrap),
        "tokens_per_second": speed(samples, bootstrap),
        "ratio_to_plain": ratio(samples, plain, bootstrap),
        "ratio_to_own": ratio(samples, own, bootstrap),
        "accuracy": rate(right, answered, bootstrap),
    }.items():
        row[name], row[f"{name}_interval"] = value, interval
    return row | {"by_prompt": by_prompt(samples)}


def passes_of(samples: Sequence[Sample], bootstrap: Bootstrap) -> tuple[np.ndarray, np.ndarray]:
    """Tokens that verification committed, and its passes, per prompt."""
    return bootstrap.sums(samples, lambda s: s.verified_tokens), bootstrap.sums(samples, lambda s: s.verifies)


def gain_of(jacobi: Sequence[Sample], untrained: Sequence[Sample], bootstrap: Bootstrap) -> Row:
    """Tokens per forward over those of untrained Jacobi, with its interval."""
    (a, n), (b, m) = passes_of(jacobi, bootstrap), passes_of(untrained, bootstrap)
    if not (n.sum() and b.sum()):
        return {"value": None, "interval": None}
    value = float((a.sum() / n.sum()) / (b.sum() / m.sum()))
    return {"value": value, "interval": bootstrap.interval(lambda w: ((w @ a) / (w @ n)) / ((w @ b) / (w @ m)))}


def identity(
    way: Way,
    samples: Sequence[Sample],
    plain: Sequence[Sample],
    ids: Sequence[list[int]],
    decode: DecodeConfig,
    exact: bool,
) -> Row:
    """Jacobi's answers against plain decoding of the same model: how many are equal, and of the others where they part and
    with which gap of the logits. `red`: why that is not right: any difference where `exact` (float64), else one without
    a near-tie (ties.py)."""
    found: Row = {"identical": len(samples), "differ_from_unpadded": 0, "divergences": [], "red": None}
    if way.jacobi is None:
        return found
    rows = pass_rows(way.target, way.jacobi, decode)
    for sample, reference, prompt in zip(samples, plain, ids, strict=True):
        if (other := parting(way.target, prompt, reference.ids, sample.ids, rows)) is not None:
            found["divergences"].append({"prompt": sample.prompt, **other.row()})
    found["differ_from_unpadded"] = len(found["divergences"])
    found["identical"] -= found["differ_from_unpadded"]
    wrong = len(found["divergences"]) if exact else sum(not other["excused"] for other in found["divergences"])
    if wrong:
        found["red"] = f"{wrong} of {len(samples)} answers differ from plain decoding" + (
            "" if exact else " without a near-tie"
        )
    return found


def quality_of(
    base: Target,
    trained: Target,
    ids: Sequence[list[int]],
    plain: Sequence[Sample],
    answers: Sequence[Sample],
    bootstrap: Bootstrap,
) -> Row:
    """What training changed: cross-entropy of the base's answers under both, repetition, answers that stayed the same."""
    given = [s.ids for s in plain]
    tokens = bootstrap.sums(plain, lambda s: len(s.ids))
    before, after = np.zeros_like(tokens), np.zeros_like(tokens)
    for target, total in ((base, before), (trained, after)):
        for sample, loss in zip(plain, answer_losses(target, ids, given), strict=True):
            total[bootstrap.index[sample.prompt]] += loss
    rise, rise_interval = rate(after - before, tokens, bootstrap)
    repeated, base_repeated = (
        rate(
            bootstrap.sums(some, lambda s: repeated_grams(s.ids)[0]),
            bootstrap.sums(some, lambda s: repeated_grams(s.ids)[1]),
            bootstrap,
        )
        for some in (answers, plain)
    )
    same = sum(a.ids == b.ids for a, b in zip(plain, answers, strict=True))
    return {
        "tokens": int(tokens.sum()),
        "base_cross_entropy": rate(before, tokens, bootstrap)[0],
        "cross_entropy": rate(after, tokens, bootstrap)[0],
        "rise": rise,
        "rise_interval": rise_interval,
        "base_repeated": base_repeated[0] or 0.0,
        "base_repeated_interval": base_repeated[1],
        "repeated": repeated[0] or 0.0,
        "repeated_interval": repeated[1],
        "same_answers": same / len(plain),
    }


def decoded(samples: Sequence[Sample]) -> list[Decoded]:
    """Answers as the figures of retention take them."""
    return [Decoded(s.prompt, s.category, tuple(s.ids), s.verifies, 0, s.right) for s in samples]


def lost_quality(quality: Row) -> list[str]:
    """Where the trained model is too far from the base for its speed to be a gain."""
    lost = []
    if quality["rise"] is not None and quality["rise"] > MOST_RISE:
        lost.append(
            f"cross-entropy of the base's answers rose by {quality['rise']:.3f} nats per token (more than {MOST_RISE:g}): "
            "this is another model"
        )
    if (more := quality["repeated"] - quality["base_repeated"]) > MOST_REPEATED:
        lost.append(
            f"the answers repeat themselves: {more:.1%} more of their 4-grams than the base's (more than "
            f"{MOST_REPEATED:.0%})"
        )
    return lost


def standing(gain: Row, rows: Sequence[Row], quality: Row) -> Row:
    """Whether a gain counts: only where it was measured, of exact decoding, and of a model whose quality stayed."""
    reasons = ["no passes"] if gain["value"] is None else []
    reasons += [f"{row['name']} is red" for row in rows if row["red"]] + lost_quality(quality)
    return {"counts": not reasons, "reasons": reasons}


def flags_of(rows: Sequence[Row], quality: Row) -> list[str]:
    """What a reader must not overlook."""
    flags, (_, _, plain, jacobi) = lost_quality(quality), rows
    if (own := jacobi["ratio_to_own"]) is not None and own < 1:
        flags.append(
            f"{jacobi['name']} is slower than {plain['name']} ({own:.2f} x) although it makes "
            f"{number(jacobi['tokens_per_forward'])} tokens per forward: a pass costs more than it commits"
        )
    return flags


def page(report: Row, maps: dict[str, Convergence]) -> str:
    """The HTML page. Self-contained; every text that came from outside is escaped by the template."""
    environment = Environment(
        loader=FileSystemLoader(Path(__file__).parent), autoescape=True, undefined=StrictUndefined, trim_blocks=True
    )
    return environment.get_template("consistency_report.html.j2").render(
        report=report,
        lines=quality_lines(report),
        identity_lines=identity_lines(report),
        plots=[
            ("Where blocks settle", svg(convergence_figure(maps), "convergence")),
            ("Tokens per second", plot_speed(report["rows"])),
        ],
        number=number,
        with_interval=with_interval,
    )


def quality_lines(report: Row) -> list[str]:
    """Gain, quality and convergence in sentences."""
    quality, gain = report["quality"], report["gain"]
    lines = [
        f"tokens per forward over the base's, by jacobi both: {with_interval(gain['value'], gain['interval'])} x"
        + ("" if gain["counts"] else f", does not count: {'; '.join(gain['reasons'])}"),
        f"cross-entropy of the base's answers: base {number(quality['base_cross_entropy'], 3)}, trained "
        f"{number(quality['cross_entropy'], 3)}, rise {with_interval(quality['rise'], quality['rise_interval'])} nats per token",
        f"repeated 4-grams: base {quality['base_repeated']:.1%}, trained {quality['repeated']:.1%}; same answers: "
        f"{quality['same_answers']:.0%}",
    ]
    if kept := report["retention"]:
        difference = with_interval(100 * kept["difference"], [100 * x for x in kept["difference_interval"] or []])
        lines.append(
            f"right answers: base {kept['base_accuracy']:.1%}, trained {kept['accuracy']:.1%} ({difference} points); of the "
            f"base's right ones {number(kept['retained'])} are still right"
        )
    passes = ", ".join(f"{name} {counts['mean_passes']:.2f}" for name, counts in report["convergence"].items())
    return [*lines, f"passes per block: {passes or '-'}"]


def print_consistency_report(report: Row, console: Console) -> None:
    """The table, quality, what must not be overlooked, and how things are counted."""
    run = report["run"]
    title = (
        f"{run['suite']}: {run['prompts']} prompts, at most {run['max_new_tokens']} new tokens, {run['dtype']}, greedy, block "
        f"{run['jacobi']['block']}, base {run['target']}"
    )
    table = Table(title=visible(title), title_justify="left", box=box.SIMPLE, pad_edge=False, padding=(0, 1, 0, 0))
    table.add_column("decoding", no_wrap=True)
    for name in ("tokens/forward [95 %]", "tok/s", "x base [95 %]", "x own [95 %]", "right [95 %]", "as plain"):
        table.add_column(name, justify="right")
    for row in report["rows"]:
        table.add_row(
            visible(row["name"]),
            with_interval(row["tokens_per_forward"], row["tokens_per_forward_interval"]),
            "red" if row["red"] else number(row["tokens_per_second"], 1),
            with_interval(row["ratio_to_plain"], row["ratio_to_plain_interval"]),
            with_interval(row["ratio_to_own"], row["ratio_to_own_interval"]),
            with_interval(row["accuracy"], row["accuracy_interval"]),
            f"{row['identical']}/{row['answers']}",
            style="red" if row["red"] else None,
        )
    console.print(table)
    for line in [*quality_lines(report), *identity_lines(report)]:
        console.print(visible(line))
    for flag in report["flags"]:
        console.print(visible(f"flag: {flag}"), style="yellow")
    for word, meaning in report["counting"].items():
        console.print(visible(f"  {word}: {meaning}"), style="dim")
