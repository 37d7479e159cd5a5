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
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from rich.console import Console

from .. import __version__
from ..losses.probs import SamplingParams
from ..models.int8 import NOTE
from ..models.jacobi import Jacobi
from ..models.loading import load_target
from ..models.target import Target
from ..models.threads import settle_threads
from .card import write_card
from .consistency_folder import refuse_idle_branches, stored_consistency
from .denoisers import stored_denoiser
from .evaluate_config import Arm, EvaluateConfig
from .evaluate_progress import Bar, Partial, fingerprint
from .evaluate_rows import examples_of, flags_of, row_of, same_width, trained
from .figures import (
    CAUSES,
    DEFINITIONS,
    Bootstrap,
    Row,
    Sample,
    alarms,
    limits,
)
from .load import PLAIN_MODEL, class_of, free_drafter, is_free, load_drafter, read_export_config, refuse_idle_settings
from .report import html, print_report, visible
from .speculate import DecodeConfig, Result, chain_width, generate, refuse_rule
from .suites import SUITES, Prompt, load_suite
from .trees import TREES, fits
from .tuned import cpu_name, refuses_tuned, stored_shape, use_threads


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
    partial = Partial(_partial_path(cfg), fingerprint(target, drafters, prompts, cfg, arms))
    score = SUITES[cfg.suite].score
    warm = target.tokenizer.apply_chat_template(
        [{"role": "user", "content": "Say hello."}], add_generation_prompt=True, return_dict=False
    )
    for arm in arms:
        _answer(target, drafters, arm, warm, replace(_params(cfg, arm), max_new_tokens=4))
    total = sum(len(_due(arms, cfg, i)) * (1 + len(prompt.follow_ups)) for i, prompt in enumerate(prompts))
    with Bar(total, console) as bar:
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
        width = [s for a in arms if a.kind == "width" and same_width(a, arm) for s in by_arm[a.name]]
        rows.append(row_of(target, drafters, cfg, arm, by_arm[arm.name], plain, hf, width, questions, bootstrap))
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
        "flags": flags_of(drafts),
        "alarms": [text for row in drafts for text in alarms(row, estimated.get(row["drafter"]), trained(row))],
        "causes": list(CAUSES),
        "examples": examples_of(target, prompts, by_arm[best["name"] if best else arms[0].name]),
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
            best, rows, plain_step, estimated.get(best["drafter"]), trained(best)
        )
    return report


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
