"""`draftsmith generate`: answer one prompt, with or without a drafter, and show which tokens were drafted.

draftsmith generate --model EXPORT --prompt "Write a haiku about rain." --show
draftsmith generate --target smollm2 --prompt "What is a monad?" --temperature 0.7 --seed 1
draftsmith generate --target smollm2 --model ngram --k 8 --prompt "Repeat this three times: ..."
draftsmith generate --model CONVERTED --threshold 0.8 --prompt "..."            # a denoiser, by diffusion
draftsmith generate --model CONVERTED --self_draft true --k 3 --prompt "..."    # it drafts for the model it was
draftsmith generate --model CONSISTENT --prompt "..."                           # a consistency model, by jacobi
pytest tests/test_generate.py tests/test_denoiser_commands.py
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field, fields
from typing import Any, Literal

from rich.console import Console
from rich.segment import Segment, Segments
from rich.style import Style

from ..losses.probs import SamplingParams
from ..models import FreeSettings
from ..models.denoiser import Denoiser, TargetDenoiser
from ..models.int8 import NOTE, Weights
from ..models.jacobi import Jacobi
from ..models.loading import load_target
from ..models.target import Target
from ..models.threads import settle_threads
from .commit import Detokenizer, Event, Result, Stats
from .consistency_folder import (
    branches,
    jacobi_of,
    load_consistency,
    refuse_idle_branches,
    settings_line,
    stored_consistency,
)
from .denoisers import Stored, complete, decode_of_denoiser, load_base, load_denoiser, stored_denoiser
from .diffuse import DiffuseConfig, diffuse
from .load import class_of, free_drafter, is_free, load_drafter, read_export_config, refuse_idle_settings
from .report import visible
from .self_draft import SelfDraft
from .speculate import DecodeConfig, generate, refuse_rule, refuse_tree
from .tuned import refuses_tuned, stored_shape, use_threads
from .verify import VERIFIERS

DRAFTED = "bold green"


@dataclass(frozen=True)
class GenerateConfig:
    """One prompt, and how to answer it."""

    prompt: str
    """The user's message (or, with `raw`, the text to go on from)."""
    model: str | None = None
    """Export folder or Hub id of a drafter, of a consistency model, or of a denoiser (adapters, merged, or LLaDA's and
    others' layouts); or, for any target and without training, ngram, suffix, recycling, lookahead, jacobi or lm:MODEL
    (folder or Hub id of a small language model); without it the target decodes on its own."""
    target: str | None = None
    """Hub id, folder, GGUF file or built-in name of the target; by default the one that an export names."""
    drafter: FreeSettings = field(default_factory=FreeSettings)
    """Settings of the training-free drafters. Of a consistency model: those of `jacobi` that are given take the place of the
    folder's."""
    revision: str | None = None
    """Revision of `model` on the Hub."""
    target_revision: str | None = None
    """Revision of the target on the Hub; by default the one that `model` names."""
    system: str | None = None
    """System message before the prompt."""
    raw: bool = False
    """Go on from the prompt as it stands, without the chat template."""
    show: bool = False
    """Colour the tokens that came from the draft (without colours: put them in « »)."""
    stream: bool = True
    """Print text as it is committed."""
    k: int = DecodeConfig.k
    """Tokens drafted per pass, at most what the drafter has; of jacobi its block says how many. Where no shape is given,
    what `draftsmith tune` found for this machine counts, except for requests that sample with a seed."""
    tree: str = DecodeConfig.tree
    """Shape of the draft: chain, cut, cape, static, dynamic, opt, best_first, capped or ppd (inference/README.md)."""
    nodes: int = DecodeConfig.nodes
    """Most nodes of a tree that is no chain."""
    width: int = DecodeConfig.width
    """Most candidates per node of a tree."""
    threshold: float | None = DecodeConfig.threshold
    """cut: confidence below which a chain ends; opt: expected tokens that a layer must add; null = the tree's default.
    Of denoisers: the strategy's threshold; null = the folder's or the strategy's own."""
    strategy: str | None = None
    """Of denoisers, how places are decided (inference/README.md); null = what the folder recommends, else threshold."""
    steps: int | None = None
    """Of denoisers, passes per block (strategies `fixed`, `margin` and others that count them); alone it means `fixed`."""
    sub_block: int | None = None
    """Of denoisers, places of a block that are decided before its next ones; null = all."""
    self_draft: bool = False
    """The denoiser drafts `k` tokens at a time for the model that it was converted from, which verifies: exact."""
    prompt_rows: int | None = DecodeConfig.prompt_rows
    """Most rows of prompt tokens in a verification (drafters that have them); null = as many as the nodes can have."""
    verifier: str = DecodeConfig.verifier
    """Acceptance rule; `auto` takes the exact one that fits. What each promises: inference/README.md."""
    fixed_width: int | None = DecodeConfig.fixed_width
    """Rows of every verification (chains; k + 1 and prompt rows, or more): bit-identical to plain decoding at that width."""
    allow_lossy: bool = False
    """Permit a rule that does not keep the target's distribution."""
    typical_epsilon: float = DecodeConfig.typical_epsilon
    """Rule `typical`: ceiling of its floor."""
    typical_delta: float = DecodeConfig.typical_delta
    """Rule `typical`: share of exp(-entropy) in its floor."""
    fuzzy_threshold: float = DecodeConfig.fuzzy_threshold
    """Rule `fuzzy`: total variation of target and draft up to which drafts are kept."""
    entropy_tolerance: float = DecodeConfig.entropy_tolerance
    """Rule `entropy`: most that it adds to a chance of acceptance."""
    temperature: float = SamplingParams.temperature
    """0 = greedy."""
    top_k: int = SamplingParams.top_k
    """Keep this many most likely tokens; 0 = all."""
    top_p: float = SamplingParams.top_p
    """Keep the fewest most likely tokens that hold this mass."""
    min_p: float = SamplingParams.min_p
    """Drop tokens less likely than this share of the most likely one."""
    repetition_penalty: float = SamplingParams.repetition_penalty
    """Makes tokens of prompt and answer less likely; 1 = off."""
    presence_penalty: float = SamplingParams.presence_penalty
    """Subtracted once from the logits of tokens in the answer."""
    frequency_penalty: float = SamplingParams.frequency_penalty
    """Subtracted per occurrence in the answer."""
    min_new_tokens: int = SamplingParams.min_new_tokens
    """The answer cannot end before this many tokens."""
    max_new_tokens: int = SamplingParams.max_new_tokens
    """The answer ends after this many tokens."""
    seed: int | None = SamplingParams.seed
    """Seed of sampling: the same seed gives the same answer; null = fresh."""
    stop: tuple[str, ...] = ()
    """Texts that end the answer."""
    ignore_eos: bool = SamplingParams.ignore_eos
    """Go on behind the end-of-sequence token."""
    dtype: Literal["bfloat16", "float16", "float32", "float64"] = "bfloat16"
    """Weights and states of target and drafter."""
    weights: Weights = "full"
    """int8: round the target's matrices, the embedding's aside, for plain decoding and verification alike; half the memory,
    other answers (models/int8.py)."""
    device: str = "cpu"
    """Where to run."""
    trust_remote_code: bool = False
    """Run code that comes with the target."""


def run_generate(cfg: GenerateConfig, named: Collection[str] = frozenset()) -> None:
    """The command: load, answer, print the answer, the acceptance rule with its promise, and statistics. `named`: keys that
    command line and recipes name (configs/parse.py).

    Raises:
        ValueError: neither model nor target, a drafter that does not fit the target, settings that cannot be meant.
    """
    free = is_free(cfg.model)
    stored = stored_denoiser(cfg.model, cfg.revision) if cfg.model and not free else None
    model = stored_consistency(cfg.model, cfg.revision) if cfg.model and not free and stored is None else None
    refuse_idle_settings(cfg.drafter, [cfg.model if model is None else Jacobi.method])
    refuse_idle_flags(cfg, stored is not None)
    if stored is not None:
        run_denoiser(cfg, stored)
        return
    sampling = sampling_of(cfg)
    respond(cfg, assemble(cfg, model, named, [sampling]), sampling)


@dataclass(frozen=True)
class Assembled:
    """What decodes: `trained` = the longest texts of the drafter's training, where known; `about`: lines that say what it
    is."""

    target: Target
    drafter: Any
    decode: DecodeConfig
    trained: int | None
    about: tuple[str, ...] = ()


def assemble(
    cfg: GenerateConfig, consistent: Stored | None, named: Collection[str], params: Sequence[SamplingParams]
) -> Assembled:
    """Load target and drafter as the settings say; what cannot be meant is refused before weights load. `params`: of the
    requests, as far as they are known."""
    decode = decode_of(cfg)
    if consistent is not None:
        return assemble_consistency(cfg, consistent, decode, named, params)
    free = is_free(cfg.model)
    if cfg.model == Jacobi.method:
        refuse_idle_branches(cfg.drafter.jacobi, named, [decode])
    export = read_export_config(cfg.model, cfg.revision)["draftsmith"] if cfg.model and not free else None
    name = cfg.target or (export["target"]["name"] if export else None)
    if name is None:
        raise ValueError(
            f"{cfg.model} drafts for any target and names none: add --target NAME"
            if free
            else "nothing to decode with: give --model EXPORT (a drafter) or --target NAME (plain decoding)"
        )
    kind = class_of(cfg.model, export) if cfg.model else None
    if kind is not None:
        refuse_tree(kind, decode)
    if params:
        refuse_rule(kind, decode, params)
    target = load_target(
        name,
        dtype=cfg.dtype,
        device=cfg.device,
        revision=cfg.target_revision or (export["target"].get("revision") if export and not cfg.target else None),
        trust_remote_code=cfg.trust_remote_code,
        weights=cfg.weights,
    )
    settle_threads(target)
    drafter: Any = None
    if cfg.model and free:
        drafter = free_drafter(cfg.model, target, cfg.drafter)
    elif cfg.model:
        drafter = load_drafter(cfg.model, target, revision=cfg.revision)
    # A server's requests share one shape, and those with a seed must not depend on a file: it gives no `params`.
    if cfg.model and export is not None and params and not refuses_tuned(cfg, named):
        tuned, line = stored_shape(cfg.model, cfg.revision, export, target, params[0])
        if tuned is not None:
            decode = tuned.applied(decode)
            use_threads(tuned, target)
        if line is not None:
            Console(highlight=False).print(visible(line), style="dim", soft_wrap=True)
    about = (NOTE,) if export is not None and target.weights != "full" else ()
    return Assembled(target, drafter, decode, export["train_length"] if export else None, about)


def respond(cfg: GenerateConfig, made: Assembled, sampling: SamplingParams) -> None:
    """Answer, and print the answer, what decoded and the statistics."""
    target, drafter, decode, trained, about = made.target, made.drafter, made.decode, made.trained, made.about
    console = Console(highlight=False)
    ids = prompt_ids(target, cfg)
    if trained and len(ids) > trained:
        console.print(
            visible(
                f"note: the prompt has {len(ids)} tokens, the {'model' if isinstance(drafter, Jacobi) else 'drafter'} was trained on up to {trained}; "
                "the answer is right, acceptance may be lower"
            )
        )
    start = time.perf_counter()
    result = answer(target, drafter, ids, sampling, decode, console, show=cfg.show, live=cfg.stream)
    for line in [*about, *summary(result, time.perf_counter() - start, target, drafter, decode)]:
        console.print(visible(line), style="dim", soft_wrap=True)


def assemble_consistency(
    cfg: GenerateConfig,
    stored: Stored,
    decode: DecodeConfig,
    named: Collection[str],
    params: Sequence[SamplingParams],
) -> Assembled:
    """`assemble` of a consistency model: the model itself, decoded by jacobi as its folder says."""
    for name in ("target", "target_revision", "trust_remote_code"):
        if value := getattr(cfg, name):
            raise ValueError(
                f"{name} = {value!r}: the weights of {cfg.model} stand alone; leave it out (--target {cfg.model} alone decodes "
                "plainly)"
            )
    settings = jacobi_of(stored, cfg.drafter.jacobi, named)
    refuse_idle_branches(cfg.drafter.jacobi, named, [decode])
    refuse_tree(Jacobi, decode)
    if params:
        refuse_rule(Jacobi, decode, params)
    target = load_consistency(stored, dtype=cfg.dtype, device=cfg.device)
    target.round_weights(cfg.weights)
    settle_threads(target)
    drafter = Jacobi(settings, target.facts)
    drafter.bind(target)
    line = f"decoded by jacobi: {settings_line(settings, branches(decode))}"
    return Assembled(target, drafter, decode, stored.ours["train_length"], (line,))


def refuse_idle_flags(cfg: GenerateConfig, denoises: bool) -> None:
    """Flags that would change nothing are a mistake: ValueError names them."""
    if denoises and cfg.weights != "full":
        raise ValueError(
            f"weights = {cfg.weights}: is for models that answer token by token, and {cfg.model} holds a denoiser; leave it out"
        )
    of_denoisers, of_drafts = ("strategy", "steps", "sub_block", "self_draft"), [f.name for f in fields(DecodeConfig)]
    plain = GenerateConfig("")
    idle: tuple[str, ...]
    if not denoises:
        idle, needed = of_denoisers, "are for denoisers, and --model names none"
    elif cfg.self_draft:
        idle, needed = ("strategy", "steps", "sub_block"), "say how a denoiser answers; with --self_draft it drafts"
    else:
        idle = ("show", *(name for name in of_drafts if hasattr(plain, name) and name != "threshold"))
        needed = "are about drafts, a denoiser makes them with --self_draft alone"
    if found := [name for name in idle if getattr(cfg, name) != getattr(plain, name)]:
        raise ValueError(f"{', '.join(found)}: {needed}; leave it out")


def assemble_denoiser(
    cfg: GenerateConfig, stored: Stored, params: Sequence[SamplingParams]
) -> tuple[TargetDenoiser, DiffuseConfig | None]:
    """Load a denoiser, and how it is decoded: None = it drafts for the model that it was converted from. What cannot be
    meant is refused before weights load; `params` as of `assemble`."""
    how = None if cfg.self_draft else decode_of_denoiser(stored, cfg.strategy, cfg.threshold, cfg.steps, cfg.sub_block)
    if how is None and not stored.keeps_base:
        raise ValueError(
            f"{cfg.model}: merged or fully trained weights have no autoregressive path left to draft for: --self_draft needs "
            "adapters"
        )
    for name in ("target", "target_revision", "trust_remote_code"):
        if stored.kind != "adapters" and (value := getattr(cfg, name)):
            raise ValueError(f"{name} = {value!r}: the weights of {cfg.model} stand alone; leave it out")
    if how is None:
        refuse_tree(SelfDraft, decode_of(cfg))
        if params:
            refuse_rule(SelfDraft, decode_of(cfg), params)
    base = None
    if stored.kind == "adapters":
        base = load_base(
            stored,
            cfg.target,
            cfg.target_revision,
            dtype=cfg.dtype,
            device=cfg.device,
            trust_remote_code=cfg.trust_remote_code,
        )
    denoiser = load_denoiser(stored, base, dtype=cfg.dtype, device=cfg.device)
    settle_threads(denoiser.target)
    return denoiser, None if how is None else complete(stored, how, denoiser)


def run_denoiser(cfg: GenerateConfig, stored: Stored) -> None:
    """`run_generate` of a denoiser: by diffusion, or as drafter of the model that it was converted from."""
    sampling, console = sampling_of(cfg), Console(highlight=False)
    denoiser, how = assemble_denoiser(cfg, stored, [sampling])
    ids = prompt_ids(denoiser.target, cfg)
    start = time.perf_counter()
    if how is None:
        drafter, decode = SelfDraft(denoiser), decode_of(cfg)
        drafter.bind(denoiser.target)
        result = answer(denoiser.target, drafter, ids, sampling, decode, console, show=cfg.show, live=cfg.stream)
        lines = [
            *summary(result, time.perf_counter() - start, denoiser.target, drafter, decode),
            f"{drafter.forwards} passes that drafted",
        ]
    else:
        painter, events = Painter(denoiser.tokenizer, console, False), list[Event]()
        (result,) = diffuse(denoiser, [ids], sampling, how, on_event=painter.paint if cfg.stream else events.append)
        for event in events:
            painter.paint(event)
        painter.close()
        lines = denoiser_summary(result, time.perf_counter() - start, denoiser, how)
    for line in lines:
        console.print(visible(line), style="dim", soft_wrap=True)


def denoiser_summary(result: Result, seconds: float, denoiser: Denoiser, how: DiffuseConfig) -> list[str]:
    """Passes and speed of one answer."""
    passes = result.passes
    assert passes is not None
    each = len(result.ids) / passes.forwards if passes.forwards else float("nan")
    return [
        f"decided by {how.strategy.select}, block {denoiser.block}",
        f"{len(result.ids)} tokens in {seconds:.2f} s ({len(result.ids) / seconds:.1f} tokens/s, prompt included), ended by "
        f"{result.stop_reason}",
        f"{passes.forwards} denoising passes, {each:.2f} tokens per pass; {passes.kv_only} more that only wrote keys and values",
    ]


def answer(
    target: Target,
    drafter: Any,
    ids: list[int],
    sampling: SamplingParams,
    decode: DecodeConfig,
    console: Console,
    *,
    show: bool,
    live: bool,
) -> Result:
    """Decode and print, piece by piece as tokens are committed (`live`) or at the end."""
    painter = Painter(target.tokenizer, console, show)
    events: list[Event] = []
    (result,) = generate(
        target, [ids], sampling, drafter=drafter, decode=decode, on_event=painter.paint if live else events.append
    )
    for event in events:
        painter.paint(event)
    painter.close()
    return result


class Painter:
    """Prints the text of events; with `show`, drafted tokens stand out.

    An event's text may lag behind its ids (unfinished characters, possible stop strings) or be cut, so the text of
    each token waits in a queue with its origin, and leaves it as far as the event's text goes.
    """

    def __init__(self, tokenizer: Any, console: Console, show: bool):
        self.detokenizer, self.console, self.show = Detokenizer(tokenizer), console, show
        self.waiting: deque[tuple[str, bool]] = deque()
        self.drafting = False  # an opened « waits for its »

    def paint(self, event: Event) -> None:
        if not self.show:
            self._print(event.text)
            return
        for token, draft in zip(event.ids, event.from_draft, strict=True):
            self.waiting.append((self.detokenizer.push(token), draft))
        if event.stop_reason is not None:
            self.waiting.append((self.detokenizer.flush(), False))
        due = len(event.text)
        while due and self.waiting:
            text, draft = self.waiting.popleft()
            if len(text) > due:
                self.waiting.appendleft((text[due:], draft))
            text = text[:due]
            due -= len(text)
            if text:
                self._mark(draft)
                self._print(text, DRAFTED if draft else "")

    def close(self) -> None:
        self._mark(False)
        self.console.print()

    def _mark(self, draft: bool) -> None:
        if draft != self.drafting and self.console.color_system is None and self.show:
            self._print("«" if draft else "»")
        self.drafting = draft

    def _print(self, text: str, style: str = "") -> None:
        segment = Segment(visible(text).plain, Style.parse(style))  # a Text would expand tabs and wrap
        self.console.print(Segments([segment]), end="", crop=False)


def prompt_ids(target: Target, cfg: GenerateConfig) -> list[int]:
    """Token ids of the prompt, through the target's chat template unless `raw`."""
    for name, text in (("prompt", cfg.prompt), ("system", cfg.system or "")):
        if any("\ud800" <= c <= "\udfff" for c in text):  # what a command line makes of bytes that are no text
            raise ValueError(f"{name} holds bytes that are no UTF-8: give it as a text in UTF-8")
    if cfg.raw:
        return target.tokenizer(cfg.prompt).input_ids
    messages = [{"role": "system", "content": cfg.system}] if cfg.system is not None else []
    messages.append({"role": "user", "content": cfg.prompt})
    if target.tokenizer.chat_template is None:
        raise ValueError(f"target {target.facts.name!r} has no chat template: add --raw to go on from the plain prompt")
    return target.tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)


def sampling_of(cfg: GenerateConfig) -> SamplingParams:
    """The sampling parameters among the settings."""
    return SamplingParams(
        temperature=cfg.temperature,
        top_k=cfg.top_k,
        top_p=cfg.top_p,
        min_p=cfg.min_p,
        repetition_penalty=cfg.repetition_penalty,
        presence_penalty=cfg.presence_penalty,
        frequency_penalty=cfg.frequency_penalty,
        min_new_tokens=cfg.min_new_tokens,
        max_new_tokens=cfg.max_new_tokens,
        seed=cfg.seed,
        stop_strings=cfg.stop,
        ignore_eos=cfg.ignore_eos,
    )


def decode_of(cfg: GenerateConfig) -> DecodeConfig:
    """The decoding settings among the settings."""
    return DecodeConfig(
        k=cfg.k,
        tree=cfg.tree,
        nodes=cfg.nodes,
        width=cfg.width,
        threshold=cfg.threshold,
        prompt_rows=cfg.prompt_rows,
        verifier=cfg.verifier,
        fixed_width=cfg.fixed_width,
        allow_lossy=cfg.allow_lossy,
        typical_epsilon=cfg.typical_epsilon,
        typical_delta=cfg.typical_delta,
        fuzzy_threshold=cfg.fuzzy_threshold,
        entropy_tolerance=cfg.entropy_tolerance,
    )


def rule_line(rule: str, decode: DecodeConfig) -> str:
    """The acceptance rule with its promise: `exact` or `not exact`, the condition, and its settings."""
    if rule not in VERIFIERS:
        return "acceptance rule: none, plain decoding (exact)"
    verifier = VERIFIERS[rule]
    settings = "".join(f", {name}={getattr(decode, name):g}" for name in verifier.settings)
    return f"acceptance rule: {rule} ({'exact' if verifier.exact else 'not exact'}; {verifier.condition}){settings}"


def summary(result: Result, seconds: float, target: Target, drafter: Any, decode: DecodeConfig) -> Sequence[str]:
    """Rule and statistics of one answer, and which path ran."""
    stats: Stats = result.stats
    lines = [rule_line(stats.rule, decode)]
    rate = f"{len(result.ids) / seconds:.1f} tokens/s" if seconds else "no time"
    lines.append(
        f"{len(result.ids)} tokens in {seconds:.2f} s ({rate}, prompt of {stats.prompt_tokens} tokens included), "
        f"ended by {result.stop_reason}"
    )
    if drafter is not None and stats.verifies:
        accepted = " ".join(f"{kept}/{tried}" for kept, tried in zip(stats.accepted, stats.tried, strict=True) if tried)
        lines.append(
            f"{stats.verifies} verify passes, {stats.tau:.2f} tokens per pass (the target's own included), "
            f"{sum(result.from_draft)} tokens from the draft; accepted by depth: {accepted or 'none tried'}"
        )
    lines.append(f"target run {target.path}, steps: {stats.step}")
    total = stats.seconds_total
    if total:
        lines.append("time: " + ", ".join(f"{stage} {part / total:.0%}" for stage, part in stats.seconds.items()))
    return lines
