"""`draftsmith evaluate` of a denoiser: right answers and tokens per forward, against the model that it was converted from.

The same prompts, chat template, budget and runtime for both, greedy. The base answers autoregressively (adapters off, or
the model that a merged folder names), the denoiser by each strategy and threshold; what counts as a forward is said in
`diffusion_figures.COUNTING` and printed with the table. Adapters also draft for their base, at a fixed width, at which
every answer must be plain decoding's own to the bit. Only first turns are answered.

    draftsmith evaluate --model CONVERTED --suite tasks --thresholds 0.7,0.9
    pytest tests/test_denoiser_commands.py
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from rich import box
from rich.console import Console
from rich.table import Table

from ..data.encode import prompt_ids
from ..losses.probs import SamplingParams
from ..models.denoiser import TargetDenoiser
from ..models.target import Target
from ..models.threads import settle_threads
from .card import write_card
from .denoisers import Stored, complete, load_base, load_denoiser, refuse_without_head
from .diffuse import DiffuseConfig, diffuse
from .diffusion_figures import COUNTING, Decoded, area, cut, retention, row_of
from .evaluate import json_path, label_of, machine
from .evaluate_config import EvaluateConfig
from .figures import Bootstrap, rate
from .report import number, visible, with_interval
from .self_draft import SelfDraft
from .speculate import DecodeConfig, chain_width, generate
from .strategies import settings_by_slot, strategy_of
from .suites import SUITES, Prompt, load_suite

Row = dict[str, Any]
Score = Callable[[str, str], bool]


def settings_of_strategy(name: str, thresholds: Sequence[float]) -> list[tuple[str, DiffuseConfig]]:
    """(label, settings) of a strategy at every threshold, or as it is where it has none. ValueError for unknown names
    and for thresholds that it does not take."""
    plain = strategy_of(name)
    if not any("threshold" in names for names in settings_by_slot(plain).values()):
        return [(name, DiffuseConfig(plain))]
    return [(f"{name} {t:g}", DiffuseConfig(strategy_of(name, {"threshold": t}))) for t in thresholds]


def run_denoiser(cfg: EvaluateConfig, stored: Stored, console: Console) -> int:
    """`run_evaluate` of a denoiser: settings that speak of drafts are refused."""
    used = {
        "model",
        "target",
        "revision",
        "target_revision",
        "suite",
        "file",
        "prompts",
        "max_new_tokens",
        "k",
        "dtype",
    }
    used |= {"device", "seed", "bootstrap", "out", "json", "card", "trust_remote_code", "strategies", "thresholds"}
    plain = EvaluateConfig("")
    if idle := [f for f in asdict(cfg) if f not in used and getattr(cfg, f) != getattr(plain, f)]:
        raise ValueError(f"{', '.join(idle)}: {cfg.model} is a denoiser, these are for drafters; leave them out")
    if cfg.k != plain.k and len(cfg.k) > 1:
        raise ValueError(f"k = {list(cfg.k)}: {cfg.model} is a denoiser, which drafts at one length per run; give one")
    if stored.kind == "layout" and cfg.target is not None:
        raise ValueError(f"target = {cfg.target!r}: {cfg.model} is a model of its own, with no base; leave it out")
    path = json_path(cfg)
    ways = [way for name in cfg.strategies for way in settings_of_strategy(name, cfg.thresholds)]
    if not ways or (cfg.thresholds != plain.thresholds and all(label in cfg.strategies for label, _ in ways)):
        raise ValueError(
            f"strategies = {list(cfg.strategies)}, thresholds = {list(cfg.thresholds)}: give one strategy at least, and "
            "thresholds if it has one, else none"
        )
    for label, how in ways:
        refuse_without_head(stored, how, label)
    prompts = load_suite(cfg.suite, file=cfg.file, limit=cfg.prompts)
    load = partial(
        load_base,
        stored,
        cfg.target,
        cfg.target_revision,
        dtype=cfg.dtype,
        device=cfg.device,
        trust_remote_code=cfg.trust_remote_code,
    )
    base = load() if stored.kind != "layout" else None
    own = base if stored.keeps_base else load() if stored.kind == "adapters" else None
    denoiser = load_denoiser(stored, own, dtype=cfg.dtype, device=cfg.device)
    settle_threads(denoiser.target)
    report = {"machine": machine(denoiser.target)} | evaluate_denoiser(
        denoiser,
        base,
        prompts,
        SUITES[cfg.suite].score,
        [(label, complete(stored, how, denoiser)) for label, how in ways],
        k=min(cfg.k),
        max_new_tokens=cfg.max_new_tokens,
        draws=cfg.bootstrap,
        seed=cfg.seed,
    )
    report["run"] |= {"suite": cfg.suite, "dtype": cfg.dtype, "name": label_of(cfg.model), "kind": stored.kind}
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(report, indent=1, allow_nan=False), encoding="utf-8")
    print_denoiser_report(report, console)
    console.print(visible(f"wrote {path}"))
    if cfg.card and stored.kind != "layout" and Path(cfg.model).is_dir():  # other projects' folders stay as they are
        (Path(cfg.model) / "report.json").write_bytes(path.read_bytes())
        write_card(Path(cfg.model))
        console.print(visible(f"its table is in the model card, {Path(cfg.model) / 'README.md'}"))
    return 1 if (report["self_draft"] or {}).get("red") else 0


def evaluate_denoiser(
    denoiser: TargetDenoiser,
    base: Target | None,
    prompts: Sequence[Prompt],
    score: Score | None,
    ways: Sequence[tuple[str, DiffuseConfig]],
    *,
    k: int,
    max_new_tokens: int,
    draws: int = 1000,
    seed: int = 0,
) -> Row:
    """Answer and count.

    `base`: the model that was converted; None = there is none to compare with. `score(answer, reference)`: of the suite,
    None = answers are not scored. `ways`: (label, settings); a label is a strategy's name, a threshold behind it. `k`: tokens
    per draft of self-drafting.

    Returns:
        {"run", "base", "rows" (each with "retention"), "aup" (by strategy), "self_draft", "counting"}; figures that need
        scores or a base are None without, "self_draft" for merged weights too, which have no path of their base's left.
    """
    params = SamplingParams(max_new_tokens=max_new_tokens)
    ids = [prompt_ids(prompt.messages, denoiser.tokenizer) for prompt in prompts]
    plain = None if base is None else autoregressive(base, prompts, ids, params, score)
    run = {"prompts": len(prompts), "max_new_tokens": max_new_tokens, "block": denoiser.block}
    report: Row = {
        "run": run | {"seed": seed, "bootstrap": draws},
        "base": None if plain is None else row_of("autoregression", plain, draws=draws, seed=seed),
        "rows": [],
        "aup": None,
        "self_draft": None,
        "counting": COUNTING,
    }
    for label, decode in ways:
        answers = by_diffusion(denoiser, prompts, ids, params, decode, score)
        row = row_of(label, answers, draws=draws, seed=seed)
        scored = plain is not None and row["accuracy"] is not None
        row["retention"] = retention(plain or [], answers, draws=draws, seed=seed) if scored else None
        report["rows"].append(row)
    curves: dict[str, list[tuple[float, float]]] = {}  # one per strategy: thresholds are the settings of a curve
    for row in report["rows"]:
        if row["accuracy"] is not None and row["tokens_per_forward"] is not None:
            curves.setdefault(row["name"].split()[0], []).append((row["tokens_per_forward"], row["accuracy"]))
    if curves:
        best = max(accuracy for points in curves.values() for _, accuracy in points)
        report["aup"] = {name: area(points, best) for name, points in curves.items()}
    if base is not None and base is denoiser.target and denoiser.causal:
        report["self_draft"] = self_drafting(base, denoiser, prompts, ids, params, k, draws, seed)
    return report


def autoregressive(
    base: Target, prompts: Sequence[Prompt], ids: Sequence[list[int]], params: SamplingParams, score: Score | None
) -> list[Decoded]:
    """The base's own answers: a forward per token."""
    results = generate(base, ids, params)
    return [
        Decoded(p.id, p.category, tuple(r.ids), len(r.ids), 0, _right(score, p, r.text))
        for p, r in zip(prompts, results, strict=True)
    ]


def by_diffusion(
    denoiser: TargetDenoiser,
    prompts: Sequence[Prompt],
    ids: Sequence[list[int]],
    params: SamplingParams,
    decode: DiffuseConfig,
    score: Score | None,
) -> list[Decoded]:
    """The denoiser's answers; a request counts the passes that it took part in, whatever ran beside it."""
    answers = []
    for prompt, result in zip(prompts, diffuse(denoiser, ids, params, decode), strict=True):
        assert result.passes is not None
        shown = cut(result.ids, denoiser.facts.eos_ids)
        right = _right(score, prompt, result.text)
        answers.append(Decoded(prompt.id, prompt.category, shown, result.passes.forwards, result.passes.kv_only, right))
    return answers


def self_drafting(
    base: Target,
    denoiser: TargetDenoiser,
    prompts: Sequence[Prompt],
    ids: Sequence[list[int]],
    params: SamplingParams,
    k: int,
    draws: int,
    seed: int,
) -> Row:
    """tau at K, with its interval; how many answers are those of plain decoding at the same width (`red` if not all)."""
    drafter = SelfDraft(denoiser)
    drafter.bind(base)
    decode = DecodeConfig(k=k, fixed_width=chain_width(drafter, DecodeConfig(k=k)))
    plain, drafts = generate(base, ids, params, None, decode), generate(base, ids, params, drafter, decode)
    same = sum(a.ids == b.ids for a, b in zip(plain, drafts, strict=True))
    tokens = np.array([r.stats.committed - r.stats.requests for r in drafts], dtype=float)
    verifies = np.array([r.stats.verifies for r in drafts], dtype=float)
    tau, interval = rate(tokens, verifies, Bootstrap([p.id for p in prompts], draws, seed))
    row = {"k": k, "tau": tau, "interval": interval, "same": same, "answers": len(drafts), "forwards": drafter.forwards}
    return row | {"red": None if same == len(drafts) else f"{len(drafts) - same} answers differ from plain decoding"}


def _right(score: Score | None, prompt: Prompt, text: str) -> bool | None:
    return None if score is None or prompt.reference is None else score(text, prompt.reference)


def print_denoiser_report(report: Row, console: Console) -> None:
    """The table, self-drafting, and the rule of counting."""
    run = report["run"]
    title = (
        f"{run['suite']}: {run['prompts']} prompts, at most {run['max_new_tokens']} new tokens, {run['dtype']}, greedy"
    )
    table = Table(title=visible(title), title_justify="left", box=box.SIMPLE, pad_edge=False, padding=(0, 1, 0, 0))
    table.add_column("decoding", no_wrap=True)
    for name in ("tokens/forward [95 %]", "with KV-only", "right answers [95 %]", "retained"):
        table.add_column(name, justify="right")
    for row in [report["base"], *report["rows"]]:
        if row is not None:
            table.add_row(
                visible(row["name"]),
                with_interval(row["tokens_per_forward"], row["tokens_per_forward_interval"]),
                number(row["tokens_per_pass"]),
                with_interval(row["accuracy"], row["accuracy_interval"]),
                number((row.get("retention") or {}).get("retained")),
            )
    console.print(table)
    for name, value in (report["aup"] or {}).items():
        console.print(visible(f"area under accuracy over tokens per forward, {name}: {value:.1f}"))
    if draft := report["self_draft"]:
        tau = with_interval(draft["tau"], draft["interval"])
        console.print(
            visible(
                f"drafting for its base at K={draft['k']}: tau {tau}, {draft['same']} of {draft['answers']} answers as plain "
                f"decoding's, {draft['forwards']} passes that drafted"
            )
        )
        if draft["red"]:
            console.print(visible(f"RED: {draft['red']}"), style="bold red")
    for word, meaning in report["counting"].items():
        console.print(visible(f"  {word}: {meaning}"), style="dim")
