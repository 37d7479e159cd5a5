"""`draftsmith evaluate`: how much is accepted, how fast it is, and whether the output is still the target's.

On each prompt, in rotating order and in one process: plain decoding, plain decoding at each verification width (for
identity), transformers' `generate`, and every draft setting. So all see the same prompts, stop rules and state of the
machine (what goes wrong otherwise: reference numbers taken in another run, warm-up on the first prompt, tokens counted
from text). Interrupted runs go on where they stopped. A row whose losslessness check is red shows no speed.

    draftsmith evaluate --model EXPORT --suite mini --k 2,4
    draftsmith evaluate --target smollm2 --model ngram --also suffix,recycling --k 8
    draftsmith evaluate --model CONVERTED --suite tasks        # a denoiser: evaluate_denoiser.py
    draftsmith evaluate --model CONSISTENT --suite tasks       # a consistency model: evaluate_consistency.py
    pytest tests/test_evaluate.py
"""

from __future__ import annotations

import json
import os
import platform
import subprocess
import time
from collections.abc import Collection, Sequence
from dataclasses import asdict, dataclass, field, replace
from hashlib import sha256
from pathlib import Path
from typing import Any, Literal

import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from .. import __version__
from ..losses.probs import SamplingParams
from ..models import TRAINING_FREE, FreeSettings
from ..models.int8 import NOTE, Weights
from ..models.jacobi import Jacobi
from ..models.loading import load_target
from ..models.target import Runner, Target
from ..models.threads import settle_threads
from .card import write_card
from .consistency_folder import refuse_idle_branches, stored_consistency
from .denoisers import stored_denoiser
from .figures import (
    CAUSES,
    DEFINITIONS,
    Bootstrap,
    Row,
    Sample,
    acceptance,
    alarms,
    by_category,
    by_prompt,
    limits,
    rate,
    ratio,
    speed,
    split_per_pass,
)
from .load import PLAIN_MODEL, class_of, free_drafter, is_free, load_drafter, read_export_config, refuse_idle_settings
from .report import html, pieces, print_report, visible
from .speculate import DecodeConfig, Result, chain_width, generate, refuse_rule
from .suites import SUITES, Prompt, load_suite
from .ties import parting, pass_rows
from .trees import TREES, fits
from .tuned import cpu_name, refuses_tuned, stored_shape, use_threads
from .verify import VERIFIERS, refuse_misfit

SHOWN_DIVERGENCES = 5  # of padded chains, which are compared at equal width; of others all are measured
Dtype = Literal["bfloat16", "float16", "float32", "float64"]


@dataclass(frozen=True)
class EvaluateConfig:
    """What to measure."""

    model: str
    """Export folder or Hub id of the drafter, of a consistency model (evaluate_consistency.py) or of a denoiser
    (evaluate_denoiser.py); or, for any target and without training, ngram, suffix, recycling, lookahead, jacobi or
    lm:MODEL (folder or Hub id of a small language model)."""
    also: tuple[str, ...] = ()
    """Further drafters for the same target, measured beside it in the same run."""
    target: str | None = None
    """Hub id, folder, GGUF file or built-in name of the target; by default the one that the first export names."""
    drafter: FreeSettings = field(default_factory=FreeSettings)
    """Settings of the training-free drafters. Of a consistency model: those of `jacobi` that are given take the place of the
    folder's."""
    revision: str | None = None
    """Revision of the export on the Hub."""
    target_revision: str | None = None
    """Revision of the target on the Hub; by default the one the export names."""
    suite: str = "mini"
    """Prompts: mini, humaneval, mt_bench, gsm8k, tasks or spec_bench."""
    file: str | None = None
    """Local file of the suite's schema (.json, .jsonl, .jsonl.gz, .jsonl.xz)."""
    prompts: int | None = 24
    """How many prompts, balanced over the suite's categories; null = all."""
    max_new_tokens: int = 64
    """Longest answer, in tokens."""
    k: tuple[int, ...] = (2, 4)
    """Tokens drafted per pass (root excluded); every value is measured and the fastest named. Of a denoiser that drafts for
    its base: one value (by default 2). Of jacobi its block says how many. Where no shape is given, one export alone takes
    the one that `draftsmith tune` found for this machine (greedy runs)."""
    trees: tuple[str, ...] = ("chain",)
    """Shapes of the draft: chain, cut, cape, static, dynamic, opt, best_first, capped, ppd (inference/README.md)."""
    nodes: int = DecodeConfig.nodes
    """Most nodes of trees that are no chains."""
    width: int = DecodeConfig.width
    """Most candidates per node of a tree."""
    threshold: float | None = DecodeConfig.threshold
    """cut: confidence below which a chain ends; opt: expected tokens that a layer must add; null = the tree's default."""
    prompt_rows: int | None = DecodeConfig.prompt_rows
    """Most rows of prompt tokens in a verification (drafters that have them); null = as many as the nodes can have."""
    temperatures: tuple[float, ...] = (0.0,)
    """Sampling temperatures; 0 = greedy."""
    verifier: str = "auto"
    """Acceptance rule; `auto` takes the exact one that fits tree and temperature."""
    allow_lossy: bool = False
    """Permit an acceptance rule that does not keep the target's distribution."""
    typical_epsilon: float = DecodeConfig.typical_epsilon
    """Rule `typical`: ceiling of its floor."""
    typical_delta: float = DecodeConfig.typical_delta
    """Rule `typical`: share of exp(-entropy) in its floor."""
    fuzzy_threshold: float = DecodeConfig.fuzzy_threshold
    """Rule `fuzzy`: total variation of target and draft up to which drafts are kept."""
    entropy_tolerance: float = DecodeConfig.entropy_tolerance
    """Rule `entropy`: most that it adds to a chance of acceptance."""
    dtype: Dtype = "bfloat16"
    """Weights and states of target and drafter."""
    weights: Weights = "full"
    """int8: round the target's matrices, the embedding's aside, for plain decoding and verification alike; half the memory,
    other answers (models/int8.py)."""
    device: str = "cpu"
    """Where to run."""
    runner: Runner = "auto"
    """How the target decodes: lean operators, Hugging Face's modules (hf), or auto, which is lean where it is possible."""
    hf_prompts: int | None = None
    """Prompts that transformers' `generate` answers too, from the front; null = all, 0 = none."""
    identity_prompts: int | None = None
    """Prompts whose greedy answers are compared with plain decoding at the same width, from the front; null = all."""
    seed: int = 0
    """Seed of sampling and bootstrap."""
    bootstrap: int = 1000
    """Resamplings behind each 95 % interval."""
    out: str = "runs/evaluate"
    """Folder of report.json, report.html and the partial results of an interrupted run."""
    json: str | None = None
    """Where to write the JSON report, instead of `out`/report.json."""
    html: str | None = None
    """Where to write the HTML page, instead of beside the JSON report."""
    card: bool = True
    """Put the report beside a local export and its table into the model card (not with `also`)."""
    trust_remote_code: bool = False
    """Run code that comes with the target."""
    strategies: tuple[str, ...] = ("threshold",)
    """Of denoisers: how places are decided (inference/README.md)."""
    thresholds: tuple[float, ...] = (0.5, 0.7, 0.9, 0.95)
    """Of denoisers: settings of those strategies that have a threshold; all are measured."""

    def __post_init__(self) -> None:
        if self.suite not in SUITES:
            raise ValueError(f"suite = {self.suite!r}: choose one of {', '.join(SUITES)}")
        for name in ("max_new_tokens", "bootstrap", "prompts", "identity_prompts"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ValueError(f"{name} = {value}: must be at least 1")
        if not self.k or min(self.k) < 1:
            raise ValueError(f"k = {list(self.k)}: give one or more draft lengths of at least 1")
        if not self.trees:
            raise ValueError(f"trees = []: give one or more of {', '.join(TREES)}")
        for tree in self.trees:
            self.decode(tree, self.k[0])
        if self.hf_prompts is not None and self.hf_prompts < 0:
            raise ValueError(f"hf_prompts = {self.hf_prompts}: must be at least 0")
        if self.seed < 0:
            raise ValueError(f"seed = {self.seed}: must be at least 0")
        # Of an export, only what it holds says whether jacobi takes part (run_evaluate).
        refuse_idle_settings(self.drafter, [self.model, *self.also, *(() if is_free(self.model) else (Jacobi.method,))])
        if self.drafter.suffix.shared:
            raise ValueError(
                "drafter.suffix.shared = true: every prompt is answered several times here, and the drafter would know "
                "the answers; leave it off"
            )
        if not self.temperatures or min(self.temperatures) < 0:
            raise ValueError(f"temperatures = {list(self.temperatures)}: give one or more, none negative")
        for temperature in self.temperatures:
            refuse_misfit(self.verifier, self.allow_lossy, temperature > 0, None if temperature > 0 else False)
        for name in ("json", "html"):
            if (value := getattr(self, name)) is not None and Path(value).is_dir():
                raise ValueError(f"{name} = {value!r} is a folder: name the file to write, or set `out` for a folder")

    def decode(self, tree: str, k: int) -> DecodeConfig:
        """How drafts of this shape and depth are made and verified. Raises ValueError for settings that do not fit."""
        takes_threshold = tree in TREES and TREES[tree].threshold is not None
        if self.threshold is not None and not any(TREES[t].threshold is not None for t in self.trees if t in TREES):
            raise ValueError(f"threshold = {self.threshold}: none of trees = {list(self.trees)} has one")
        return DecodeConfig(
            k=k,
            tree=tree,
            nodes=self.nodes,
            width=self.width,
            threshold=self.threshold if takes_threshold else None,
            prompt_rows=self.prompt_rows,
            verifier=self.verifier,
            allow_lossy=self.allow_lossy,
            typical_epsilon=self.typical_epsilon,
            typical_delta=self.typical_delta,
            fuzzy_threshold=self.fuzzy_threshold,
            entropy_tolerance=self.entropy_tolerance,
        )


@dataclass(frozen=True)
class Arm:
    """One way of decoding that takes part in the run."""

    name: str
    kind: Literal["plain", "width", "hf", "draft"]
    temperature: float
    decode: DecodeConfig
    drafter: str | None = None  # name in `drafters`


def evaluate(model: str, cfg: EvaluateConfig, console: Console | None = None, tuned: bool = False) -> Row:
    """Load target and drafters, measure, and return the report (`measure`). `tuned`: where the export was tuned for this
    machine (inference/tuned.py), that shape takes the place of `k` and `trees`.

    Raises:
        ValueError: an export that does not fit the target, an unknown suite, a lossy rule without `allow_lossy`.
    """
    names = [model, *cfg.also]
    revisions = [cfg.revision] + [None] * len(cfg.also)
    configs = [
        {} if is_free(name) else read_export_config(name, revision)["draftsmith"]
        for name, revision in zip(names, revisions, strict=True)
    ]
    facts: Row = next((config["target"] for config in configs if config), {})
    if not facts and cfg.target is None:
        raise ValueError(f"{model} drafts for any target and names none: add --target NAME")
    for name, config in zip(names, configs, strict=True):
        for temperature in cfg.temperatures:
            sampling = SamplingParams(temperature=temperature)
            refuse_rule(class_of(name, config or None), cfg.decode(cfg.trees[0], cfg.k[0]), [sampling])
    prompts = load_suite(cfg.suite, file=cfg.file, limit=cfg.prompts)
    target = load_target(
        cfg.target or facts["name"],
        dtype=cfg.dtype,
        device=cfg.device,
        revision=cfg.target_revision or (None if cfg.target else facts.get("revision")),
        trust_remote_code=cfg.trust_remote_code,
        weights=cfg.weights,
        runner=cfg.runner,
    )
    settle_threads(target)
    drafters: dict[str, Any] = {}
    estimated, labels = {}, {}
    for name, revision, config in zip(names, revisions, configs, strict=True):
        if is_free(name):
            drafters[_free_label(name)] = free_drafter(name, target, cfg.drafter)
            continue
        drafter = load_drafter(name, target, revision=revision)
        label = drafter.method if drafter.method not in drafters else f"{drafter.method} {label_of(name)}"
        drafters[label], estimated[label], labels[label] = drafter, config.get("estimated"), label_of(name)
    shape = None
    if tuned and configs[0]:
        sampling = SamplingParams(temperature=max(cfg.temperatures), seed=cfg.seed)
        entry, line = stored_shape(model, cfg.revision, configs[0], target, sampling)
        if entry is not None:
            shape = entry.applied(cfg.decode("chain", 1))
            use_threads(entry, target)
        if line is not None and console is not None:
            console.print(visible(line))
    report = measure(target, drafters, prompts, cfg, estimated, console, shape)
    report["run"]["exports"] = labels
    if labels and target.weights != "full":
        report["flags"].append(NOTE)
    if shape is not None:
        report["run"] |= {name: getattr(shape, name) for name in ("nodes", "width", "threshold")}
        report["run"] |= {"k": [shape.k], "trees": [shape.tree], "tuned": True}
    return report


def run_evaluate(cfg: EvaluateConfig, named: Collection[str] = frozenset()) -> int:
    """The command: measure, write JSON and HTML, print the table. Returns 1 when a losslessness check is red. `named`: keys
    that command line and recipes name (configs/parse.py)."""
    from .evaluate_consistency import run_consistency  # both are set and written as here
    from .evaluate_denoiser import run_denoiser

    console = Console()
    if not console.is_terminal:
        console = Console(width=120)  # a log has no width of its own
    stored = None if is_free(cfg.model) else stored_denoiser(cfg.model, cfg.revision)
    consistent = None if stored is not None or is_free(cfg.model) else stored_consistency(cfg.model, cfg.revision)
    if consistent is not None:
        return run_consistency(cfg, consistent, console, named)
    refuse_idle_settings(cfg.drafter, [cfg.model, *cfg.also])
    if Jacobi.method in (cfg.model, *cfg.also):
        decodes = [cfg.decode(tree, cfg.k[0]) for tree in cfg.trees]
        refuse_idle_branches(cfg.drafter.jacobi, named, decodes, "--trees")
    if stored is not None:
        return run_denoiser(cfg, stored, console)
    if (cfg.strategies, cfg.thresholds) != (EvaluateConfig.strategies, EvaluateConfig.thresholds):
        raise ValueError("strategies, thresholds: are for denoisers, and --model names none; leave them out")
    report = evaluate(cfg.model, cfg, console, tuned=not cfg.also and not refuses_tuned(cfg, named))
    written = write_report(report, cfg)
    print_report(report, console)
    console.print(visible(f"wrote {written[0]} and {written[1]}"))
    if cfg.card and not cfg.also and not is_free(cfg.model) and Path(cfg.model).is_dir():
        for path, name in zip(written, ("report.json", "report.html"), strict=True):
            (Path(cfg.model) / name).write_bytes(path.read_bytes())
        write_card(Path(cfg.model))
        console.print(visible(f"its table is in the model card, {Path(cfg.model) / 'README.md'}"))
    return 1 if any(row["red"] for row in report["rows"]) else 0


def write_report(report: Row, cfg: EvaluateConfig, page: str | None = None) -> tuple[Path, Path]:
    """Write the JSON and the HTML report (`page`, default `html`); the partial results are then done with."""
    paths = json_path(cfg), Path(cfg.html) if cfg.html else json_path(cfg).with_suffix(".html")
    for path, text in zip(paths, (json.dumps(report, indent=1, allow_nan=False), page or html(report)), strict=True):
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
    _partial_path(cfg).unlink(missing_ok=True)
    return paths


def measure(
    target: Target,
    drafters: dict[str, Any],
    prompts: Sequence[Prompt],
    cfg: EvaluateConfig,
    estimated: dict[str, Row | None] | None = None,
    console: Console | None = None,
    shape: DecodeConfig | None = None,
) -> Row:
    """Run all arms on all prompts, interleaved, and reduce them to a report.

    Args:
        drafters: name -> drafter that belongs to `target`.
        estimated: name -> what training estimated: {"k", "tau", "alpha"}, alpha conditional by depth.
        shape: how all of them draft, in the place of `k` and `trees`.

    Returns:
        {"machine", "run", "rows", "best", "limits", "gains", "alarms", "causes", "flags", "examples", "definitions"}.
    """
    if target.tokenizer.chat_template is None:
        raise ValueError(f"target {target.facts.name!r} has no chat template, and suites are conversations: set one")
    arms = plan(cfg, drafters, shape)
    samples, questions = _collect(target, drafters, prompts, cfg, arms, console or Console(stderr=True))
    return _reduce(target, drafters, prompts, cfg, arms, samples, questions, estimated or {})


def plan(cfg: EvaluateConfig, drafters: dict[str, Any], shape: DecodeConfig | None = None) -> list[Arm]:
    """The arms of a run: per temperature plain, transformers, each draft setting (or `shape` alone); for greedy chains
    each width. Drafts of training-free drafters have no fixed length: padding them would take from them the steps that
    cost nothing."""
    arms = []
    wishes = [cfg.decode(tree, k) for tree in cfg.trees for k in cfg.k] if shape is None else [shape]
    for temperature in cfg.temperatures:
        at = "" if temperature == 0 else f" T={temperature:g}"
        plain = DecodeConfig()
        arms.append(Arm(f"plain{at}", "plain", temperature, plain))
        if cfg.hf_prompts != 0:
            arms.append(Arm(f"transformers{at}", "hf", temperature, plain))
        drafts = [
            Arm(f"{name} {wish.tree} K={wish.k}{at}", "draft", temperature, _padded(wish, drafter), name)
            for name, drafter in drafters.items()
            for wish in _own(wishes, drafter)
            if _reaches(drafter, wish.k) and fits(wish.tree, drafter)
        ]
        if not drafts and any(_reaches(drafter, k) for drafter in drafters.values() for k in cfg.k):
            raise ValueError(f"trees = {list(cfg.trees)}: no drafter gives what they need; add chain, with --trees")
        if not drafts:
            raise ValueError(f"k = {list(cfg.k)}: no drafter drafts that far; give a smaller one with --k")
        if temperature == 0:
            widths = {arm.decode.fixed_width for arm in drafts if arm.decode.fixed_width is not None}
            arms += [
                Arm(f"plain, width {width}", "width", 0.0, replace(plain, fixed_width=width))
                for width in sorted(widths)
            ]
        arms += drafts
    return arms


def _padded(decode: DecodeConfig, drafter: Any) -> DecodeConfig:
    if not TREES[decode.tree].chain or hasattr(drafter, "propose"):
        return decode  # proposals have no fixed length: padded, their steps without a candidate would not be plain ones
    return replace(decode, fixed_width=chain_width(drafter, decode))


def _own(wishes: Sequence[DecodeConfig], drafter: Any) -> list[DecodeConfig]:
    """The shapes, as deep as a drafter's own settings say where they do (jacobi: the block)."""
    own = getattr(drafter, "own_depth", None)
    return list(wishes) if own is None else list(dict.fromkeys(replace(wish, k=own) for wish in wishes))


def _reaches(drafter: Any, k: int) -> bool:
    limits = [drafter.max_depth, drafter.parallel if drafter.parallel > 1 else None]
    return all(limit is None or k <= limit for limit in limits)


def _collect(
    target: Target,
    drafters: dict[str, Any],
    prompts: Sequence[Prompt],
    cfg: EvaluateConfig,
    arms: Sequence[Arm],
    console: Console,
) -> tuple[list[Sample], dict[tuple[str, int], list[int]]]:
    """Answer every prompt with every arm, in rotating order; what an interrupted run of the same settings has is kept.

    Returns the samples, and the prompt ids of each (prompt, turn).
    """
    questions = {}
    partial = _Partial(_partial_path(cfg), _fingerprint(target, drafters, prompts, cfg, arms))
    score = SUITES[cfg.suite].score
    warm = target.tokenizer.apply_chat_template(
        [{"role": "user", "content": "Say hello."}], add_generation_prompt=True, return_dict=False
    )
    for arm in arms:
        _answer(target, drafters, arm, warm, replace(_params(cfg, arm), max_new_tokens=4))
    total = sum(len(_due(arms, cfg, i)) * (1 + len(prompt.follow_ups)) for i, prompt in enumerate(prompts))
    with _Bar(total, console) as bar:
        for i, prompt in enumerate(prompts):
            due = _due(arms, cfg, i)
            messages = list(prompt.messages)
            for turn in range(1 + len(prompt.follow_ups)):
                ids = target.tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)
                questions[prompt.id, turn] = ids
                shift = (i + turn) % len(due)
                for arm in due[shift:] + due[:shift]:
                    sample = partial.done.get((prompt.id, turn, arm.name))
                    if sample is None:
                        sample = _answer(target, drafters, arm, ids, _params(cfg, arm))
                        sample.prompt, sample.turn, sample.category = prompt.id, turn, prompt.category
                        if score and prompt.reference is not None:
                            text = target.tokenizer.decode(sample.ids, skip_special_tokens=True)
                            sample.right = score(text, prompt.reference)
                        partial.add(sample)
                    bar.advance(sample)
                if turn < len(prompt.follow_ups):
                    first = partial.done[prompt.id, turn, arms[0].name]
                    answer = target.tokenizer.decode(first.ids, skip_special_tokens=True)
                    messages += [
                        {"role": "assistant", "content": answer},
                        {"role": "user", "content": prompt.follow_ups[turn]},
                    ]
    return list(partial.done.values()), questions


def _due(arms: Sequence[Arm], cfg: EvaluateConfig, number: int) -> list[Arm]:
    """The arms that answer prompt `number`: baselines that are only sampled stop earlier."""
    limit = {"hf": cfg.hf_prompts, "width": cfg.identity_prompts}
    return [arm for arm in arms if (most := limit.get(arm.kind)) is None or number < most]


def _params(cfg: EvaluateConfig, arm: Arm) -> SamplingParams:
    return SamplingParams(
        temperature=arm.temperature,
        max_new_tokens=cfg.max_new_tokens,
        seed=cfg.seed,
    )


def _answer(target: Target, drafters: dict[str, Any], arm: Arm, ids: list[int], params: SamplingParams) -> Sample:
    """One answer of one arm; prompt, turn and category are filled in by the caller."""
    if arm.kind == "hf":
        return _answer_hf(target, arm, ids, params)
    drafter = drafters[arm.drafter] if arm.drafter else None
    start = time.perf_counter()
    result = generate(target, [ids], params, drafter=drafter, decode=arm.decode)[0]
    return to_sample(result, arm.name, time.perf_counter() - start)


def to_sample(result: Result, arm: str, seconds: float) -> Sample:
    """The counts of one answer of an arm; prompt, turn and category are filled in by the caller."""
    stats = result.stats
    return Sample(
        "",
        0,
        "",
        arm,
        result.ids,
        seconds,
        stats.prompt_tokens,
        prefill_tokens=stats.requests,
        verifies=stats.verifies,
        forwards=stats.verifies + stats.requests,
        reached=stats.tried,
        accepted=stats.accepted,
        ranks=stats.ranks,
        split=stats.seconds,
        drafted_ids=result.from_draft,
        rule=stats.rule,
        step=stats.step,
    )


def _answer_hf(target: Target, arm: Arm, ids: list[int], params: SamplingParams) -> Sample:
    """The same answer by transformers' own loop, same weights, dtype and stop ids."""
    from transformers import GenerationConfig

    sampling = {"temperature": params.temperature, "top_k": 0, "top_p": 1.0} if params.temperature else {}
    config = GenerationConfig(
        max_new_tokens=params.max_new_tokens,
        do_sample=params.temperature > 0,
        repetition_penalty=1.0,
        eos_token_id=list(target.facts.eos_ids),
        pad_token_id=target.facts.eos_ids[0],
        **sampling,
    )
    inputs = torch.tensor([ids], device=target.device)
    start = time.perf_counter()
    with torch.inference_mode():
        output = target.model.generate(inputs, attention_mask=torch.ones_like(inputs), generation_config=config)
    answer = output[0, len(ids) :].tolist()
    seconds = time.perf_counter() - start
    return Sample(
        "", 0, "", arm.name, answer, seconds, len(ids), prefill_tokens=1, verifies=len(answer) - 1, forwards=len(answer)
    )


def _reduce(
    target: Target,
    drafters: dict[str, Any],
    prompts: Sequence[Prompt],
    cfg: EvaluateConfig,
    arms: Sequence[Arm],
    samples: Sequence[Sample],
    questions: dict[tuple[str, int], list[int]],
    estimated: dict[str, Row | None],
) -> Row:
    """Samples -> report."""
    bootstrap = Bootstrap([prompt.id for prompt in prompts], cfg.bootstrap, cfg.seed)
    by_arm = {arm.name: [s for s in samples if s.arm == arm.name] for arm in arms}
    rows = []
    for arm in arms:
        plain = by_arm[next(a.name for a in arms if a.kind == "plain" and a.temperature == arm.temperature)]
        hf = [s for a in arms if a.kind == "hf" and a.temperature == arm.temperature for s in by_arm[a.name]]
        width = [s for a in arms if a.kind == "width" and _same_width(a, arm) for s in by_arm[a.name]]
        rows.append(_row(target, drafters, cfg, arm, by_arm[arm.name], plain, hf, width, questions, bootstrap))
    drafts = [row for row in rows if row["draft_length"]]
    greens = [
        row for row in drafts if row["tau"] and row["tokens_per_second"] and row["temperature"] == cfg.temperatures[0]
    ]
    best = max(greens, key=lambda row: row["tokens_per_second"], default=None)
    report: Row = {
        "machine": machine(target),
        "run": _run_facts(target, drafters, prompts, cfg),
        "rows": rows,
        "best": best and best["name"],
        "flags": _flags(drafts),
        "alarms": [text for row in drafts for text in alarms(row, estimated.get(row["drafter"]), _trained(row))],
        "causes": list(CAUSES),
        "examples": _examples(target, prompts, by_arm[best["name"] if best else arms[0].name]),
        "definitions": DEFINITIONS,
    }
    if best is None:
        red = any(row["red"] for row in drafts)
        why = "a red losslessness check; find its cause first" if red else "answers too short to verify anything"
        report["limits"], report["gains"] = why, {}
    else:
        step = rows[0]["seconds_per_pass"]
        plain_step = sum(step[part] for part in ("draft", "verify", "commit", "other"))
        report["limits"], report["gains"] = limits(
            best, rows, plain_step, estimated.get(best["drafter"]), _trained(best)
        )
    return report


def _trained(row: Row) -> bool:
    return row["method"] not in TRAINING_FREE


def _same_width(width: Arm, arm: Arm) -> bool:
    return (
        arm.kind == "draft"
        and arm.temperature == 0
        and arm.decode.fixed_width is not None
        and width.decode.fixed_width == arm.decode.fixed_width
    )


def _row(
    target: Target,
    drafters: dict[str, Any],
    cfg: EvaluateConfig,
    arm: Arm,
    samples: Sequence[Sample],
    plain: Sequence[Sample],
    hf: Sequence[Sample],
    width: Sequence[Sample],
    questions: dict[tuple[str, int], list[int]],
    bootstrap: Bootstrap,
) -> Row:
    """One row of the report. `plain`, `hf` and `width` are the samples to compare with."""
    draft = arm.kind == "draft"
    rules = sorted({s.rule for s in samples if s.verifies and s.rule in VERIFIERS}) if draft else []
    lossless = all(VERIFIERS[rule].exact for rule in rules)
    tokens_per_second, speed_interval = speed(samples, bootstrap)
    tokens_per_forward, _ = rate(
        bootstrap.sums(samples, lambda s: len(s.ids)), bootstrap.sums(samples, lambda s: s.forwards), bootstrap
    )
    ratio_to_plain, ratio_interval = ratio(samples, plain, bootstrap)
    ratio_to_hf, hf_interval = ratio(samples, hf, bootstrap)
    scored = [s.right for s in samples if s.right is not None]
    row: Row = {
        "name": arm.name,
        "method": drafters[arm.drafter].method if arm.drafter else "plain",
        "decode": {"plain": "plain", "width": "plain", "hf": "transformers generate", "draft": "speculate"}[arm.kind],
        "drafter": arm.drafter,
        "verifier": ", ".join(rules) or None,
        "verifier_settings": {name: getattr(arm.decode, name) for rule in rules for name in VERIFIERS[rule].settings},
        "draft_length": arm.decode.k if draft else 0,
        "tree": arm.decode.tree if draft else None,
        "width": arm.decode.fixed_width if arm.kind == "width" else None,
        "temperature": arm.temperature,
        "dtype": target.precision,
        "step": None if arm.kind == "hf" else ", ".join(sorted({s.step for s in samples})),
        "prompts": len({s.prompt for s in samples}),
        "answers": len(samples),
        "tokens": sum(len(s.ids) for s in samples),
        **acceptance(samples, bootstrap),
        "tokens_per_second": tokens_per_second,
        "tokens_per_second_interval": speed_interval,
        "ratio_to_plain": ratio_to_plain,
        "ratio_to_plain_interval": ratio_interval,
        "ratio_to_hf": ratio_to_hf,
        "ratio_to_hf_interval": hf_interval,
        "tokens_per_forward": tokens_per_forward,
        "seconds_per_pass": {} if arm.kind == "hf" else split_per_pass(samples),
        "quality": sum(scored) / len(scored) if scored else None,
        "lossless": "exact" if lossless else "no",
        "categories": by_category(samples, plain, bootstrap) if draft else {},
        "by_prompt": by_prompt(samples),
        **_identity(target, drafters, cfg, arm, samples, plain, width, questions, lossless),
    }
    if row["red"]:
        for name in ("tokens_per_second", "ratio_to_plain", "ratio_to_hf"):
            row[name] = row[f"{name}_interval"] = None
        for figures in row["by_prompt"].values():
            figures["seconds"] = None
    return row


def _identity(
    target: Target,
    drafters: dict[str, Any],
    cfg: EvaluateConfig,
    arm: Arm,
    samples: Sequence[Sample],
    plain: Sequence[Sample],
    width: Sequence[Sample],
    questions: dict[tuple[str, int], list[int]],
    lossless: bool,
) -> Row:
    """Greedy answers against plain decoding: by id at the same width (padded chains), tie-aware otherwise.

    Returns `identical_to_plain` (None = not compared), counts, first divergences from unpadded plain decoding with the
    logit gap there, and `red`: why a row that should be lossless is not (None = it is, or it need not be).
    """
    found: Row = {
        "identical_to_plain": None,
        "identical_prompts": 0,
        "checked_prompts": 0,
        "differ_from_unpadded": None,
        "divergences": [],
        "red": None,
    }
    if arm.temperature > 0 or arm.kind == "plain":
        return found
    padded = arm.kind == "draft" and arm.decode.fixed_width is not None
    references = {(s.prompt, s.turn): s.ids for s in (width if padded else plain)}
    pairs = [(s, references[s.prompt, s.turn]) for s in samples if (s.prompt, s.turn) in references]
    differing = [s for s, ids in pairs if s.ids != ids]
    found["checked_prompts"], found["identical_prompts"] = len(pairs), len(pairs) - len(differing)
    found["identical_to_plain"] = not differing if pairs else None
    if arm.kind == "draft":
        unpadded = {(s.prompt, s.turn): s.ids for s in plain}
        compared = [s for s in samples if s.ids != unpadded[s.prompt, s.turn]]
        rows = pass_rows(target, drafters.get(arm.drafter or ""), arm.decode)
        found["differ_from_unpadded"] = len(compared)
        for sample in compared if lossless and not padded else compared[:SHOWN_DIVERGENCES]:
            key = sample.prompt, sample.turn
            other = parting(target, questions[key], unpadded[key], sample.ids, rows)
            assert other is not None
            found["divergences"].append({"prompt": sample.prompt, **other.row()})
        if lossless and padded and differing:
            found["red"] = f"{len(differing)} of {len(pairs)} answers differ from plain decoding at the same width"
        elif lossless and not all(other["excused"] for other in found["divergences"]):
            wrong = sum(not other["excused"] for other in found["divergences"])
            found["red"] = f"{wrong} of {len(samples)} answers differ from plain decoding without a near-tie"
    return found


def _flags(drafts: Sequence[Row]) -> list[str]:
    """What a reader must not overlook: slower than plain, lossy, unchecked."""
    flags = []
    for row in drafts:
        if row["ratio_to_plain"] is not None and row["ratio_to_plain"] < 1:
            flags.append(
                f"{row['name']} is slower than plain decoding ({row['ratio_to_plain']:.2f} x) although tau is "
                f"{row['tau']:.2f}: a pass costs more than it commits"
            )
        if row["lossless"] == "no":
            settings = ", ".join(f"{name}={value:g}" for name, value in row["verifier_settings"].items())
            flags.append(
                f"{row['name']} uses the rule {row['verifier']!r} ({settings}), which changes the target's distribution"
            )
    return flags


def _examples(target: Target, prompts: Sequence[Prompt], samples: Sequence[Sample], count: int = 6) -> list[Row]:
    """Some answers, cut into pieces by where the tokens came from."""
    first = {s.prompt: s for s in samples if s.turn == 0}
    chosen = [prompt for prompt in prompts if prompt.id in first][:count]
    return [
        {
            "prompt": prompt.id,
            "category": prompt.category,
            "question": prompt.messages[-1]["content"],
            "pieces": pieces(target.tokenizer, first[prompt.id].ids, first[prompt.id].drafted_ids),
        }
        for prompt in chosen
    ]


def machine(target: Target) -> Row:
    """What a figure depends on beside the code: hardware, threads, versions. No host name, no paths."""
    import transformers

    gpu = torch.cuda.get_device_name(target.device) if target.device.type == "cuda" else None
    return {
        "cpu": cpu_name(),
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "gpu": gpu,
        "system": platform.platform(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "draftsmith": __version__,
        "git": _git_state(),
        "deterministic_algorithms": torch.are_deterministic_algorithms_enabled(),
    }


def _git_state() -> str | None:
    """Commit of the source tree, `+` when it has changes; None for an installed wheel."""
    root = Path(__file__).resolve().parent.parent
    if not (root / ".git").exists():
        return None
    git = ["git", "-C", str(root)]
    try:
        head = subprocess.run([*git, "rev-parse", "--short=12", "HEAD"], capture_output=True, text=True, timeout=10)
        changes = subprocess.run([*git, "status", "--porcelain", "-uno"], capture_output=True, text=True, timeout=10)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return f"{head.stdout.strip()}{'+' if changes.stdout.strip() else ''}" if head.returncode == 0 else None


def _run_facts(target: Target, drafters: dict[str, Any], prompts: Sequence[Prompt], cfg: EvaluateConfig) -> Row:
    return {
        "name": ", ".join(drafters),
        "suite": cfg.suite,
        "prompts": len(prompts),
        "turns": sum(1 + len(prompt.follow_ups) for prompt in prompts),
        "max_new_tokens": cfg.max_new_tokens,
        "dtype": target.precision,
        "target": target.facts.name,
        "target_revision": target.facts.revision,
        "runner": target.path,
        "k": list(cfg.k),
        "trees": list(cfg.trees),
        "nodes": cfg.nodes,
        "width": cfg.width,
        "threshold": cfg.threshold,
        "prompt_rows": cfg.prompt_rows,
        "temperatures": list(cfg.temperatures),
        "verifier": cfg.verifier,
        "chat_template": True,
        "seed": cfg.seed,
        "bootstrap": cfg.bootstrap,
    }


def label_of(model: str) -> str:
    """A short name of an export: its folder's, or that of the run around an `export` folder."""
    path = Path(model)
    return path.parent.name if path.name == "export" and path.parent.name else path.name


def _free_label(name: str) -> str:
    """The name of a training-free drafter, without a language model's folder."""
    return PLAIN_MODEL + label_of(name.removeprefix(PLAIN_MODEL)) if name.startswith(PLAIN_MODEL) else name


def json_path(cfg: EvaluateConfig) -> Path:
    return Path(cfg.json) if cfg.json else Path(cfg.out) / "report.json"


def _partial_path(cfg: EvaluateConfig) -> Path:
    return json_path(cfg).with_suffix(".partial.jsonl")


def _fingerprint(
    target: Target, drafters: dict[str, Any], prompts: Sequence[Prompt], cfg: EvaluateConfig, arms: Sequence[Arm]
) -> str:
    """Changes with anything that a sample depends on: settings, target, weights of the drafters, prompts, code."""
    settings = asdict(replace(cfg, out="", json=None, html=None, bootstrap=1))
    digest = sha256(
        json.dumps(
            [settings, [asdict(arm) for arm in arms], target.facts.fingerprint, __version__, torch.__version__]
        ).encode()
    )
    digest.update(json.dumps([asdict(prompt) for prompt in prompts]).encode())
    for name, drafter in drafters.items():
        weights = {} if hasattr(drafter, "propose") else drafter.state_dict()
        for key, tensor in weights.items():
            digest.update(f"{name}/{key}".encode())
            digest.update(tensor.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()


class _Partial:
    """Samples of a run, one JSON line each behind a fingerprint; read back when the same run starts again."""

    def __init__(self, path: Path, fingerprint: str):
        self.done: dict[tuple[str, int, str], Sample] = {}
        lines = path.read_text(encoding="utf-8").splitlines() if path.exists() else []
        same = bool(lines) and lines[0] == json.dumps({"fingerprint": fingerprint})
        for line in lines[1:] if same else []:
            try:
                sample = Sample(**json.loads(line))
            except (json.JSONDecodeError, TypeError):
                break  # the line that was being written when the run stopped
            self.done[sample.prompt, sample.turn, sample.arm] = sample
        path.parent.mkdir(parents=True, exist_ok=True)
        self._file = path.open("w", encoding="utf-8")
        for line in (json.dumps({"fingerprint": fingerprint}), *map(_line, self.done.values())):
            self._file.write(line + "\n")
        self._file.flush()

    def add(self, sample: Sample) -> None:
        self.done[sample.prompt, sample.turn, sample.arm] = sample
        self._file.write(_line(sample) + "\n")
        self._file.flush()


class _Bar:
    """Progress with rate and time left: a bar on a terminal, a line every half minute elsewhere."""

    def __init__(self, total: int, console: Console):
        columns = (
            TextColumn("evaluate"),
            BarColumn(),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            TimeRemainingColumn(),
        )
        self.progress = Progress(*columns, TextColumn("{task.fields[rate]}"), console=console)
        self.task = self.progress.add_task("", total=total, rate="")
        self.console, self.said = console, time.monotonic()

    def __enter__(self) -> _Bar:
        if self.console.is_terminal:
            self.progress.start()
        return self

    def __exit__(self, *failure: object) -> None:
        self.progress.stop()

    def advance(self, sample: Sample) -> None:
        rate = f"{len(sample.ids) / sample.seconds:.1f} tok/s, {sample.arm}" if sample.seconds else sample.arm
        self.progress.update(self.task, advance=1, rate=rate)
        if not self.console.is_terminal and time.monotonic() - self.said > 30:
            task, self.said = self.progress.tasks[0], time.monotonic()
            left = "" if task.time_remaining is None else f", about {task.time_remaining / 60:.0f} min left"
            self.console.print(visible(f"evaluate {task.completed:.0f}/{task.total:.0f}{left} ({rate})"))


def _line(sample: Sample) -> str:
    return json.dumps(asdict(sample))
