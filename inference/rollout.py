"""`draftsmith rollout`: let the target answer the prompts of a data set itself.

Drafters learn best from text that the target would write. Every user turn is answered in order, earlier answers being
the target's own; answers of the source are replaced. Each finished conversation is one line of the output, so a run
that was interrupted goes on behind the last whole line. Answers cut at `max_new_tokens` are marked and counted (read
them with `data.keep_truncated=false` to leave them out); empty answers are failures, not samples.

    draftsmith rollout --data.source prompts.jsonl --out answers.jsonl
    draftsmith rollout --data.source prompts.jsonl --out answers.jsonl --endpoint http://one:8000/v1,http://two:8000/v1
    draftsmith rollout --invent 5000 --out answers.jsonl        # no prompts at hand: the target writes them as well

With `--adapters` the target that they convert answers as a denoiser, by a strategy of inference/strategies.py; with
`--order` each answer then keeps the pass that decided each of its tokens, for `certainty.order=stored`:

    draftsmith rollout --data.source prompts.jsonl --out answers.jsonl --adapters runs/convert/export --order true

With `--trajectories N` the Jacobi states of each conversation's last answer, in blocks of N tokens, are kept beside it for
`train/distill_consistency.py` (trajectories.py); `--answers FILE` computes them for answers that are there already. Several
machines share a source by `--part 1/8`, `--part 2/8`, ...; `data.source` names the folder of their files afterwards:

    draftsmith rollout --data.source prompts.jsonl --out answers.jsonl --trajectories 16
    draftsmith rollout --answers shipped --out states/part-1.jsonl --trajectories 16 --part 1/8

With `--endpoint` any OpenAI-compatible servers answer, as many as are named (endpoints.py); their texts are tokenised when
they are read. Without, the ids are kept as they were generated. A prompt that stands twice in the source is answered once.
Lines are written as answers come and put in the source's order at the end, so the file of a whole run does not depend on
which server answered what, or when. Tested by
`pytest tests/test_rollout.py tests/test_endpoints.py tests/test_collect_states.py`.
"""

from __future__ import annotations

import asyncio
import json
import os
import re
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, Literal

import torch
from rich.console import Console

from ..data.encode import render
from ..data.places import write_atomically
from ..data.sources import Conversation, DataConfig, load_conversations
from ..losses.probs import SamplingParams
from ..models.denoiser import Denoiser
from ..models.loading import load_target
from ..models.target import Target
from .adapter_folder import load_adapters
from .answer_file import RolloutReport, check_settings, put_in_order, resume, write_line
from .commit import Result
from .converse import answering, converse, prompt_key, seed_of
from .decision_folder import settings_of, strategy_beside
from .diffuse import DiffuseConfig, diffuse
from .endpoints import answer_all, choose_model, endpoints_of
from .load import resolve
from .progress import progress_bar
from .speculate import DecodeConfig, generate
from .strategies import strategy_of
from .trajectories import TrajectoryConfig, refuse_foreign, with_states

INVENT = SamplingParams(temperature=0.9, max_new_tokens=100)  # of an invented prompt
INVENT_WORDS = 4  # at least


@dataclass(frozen=True)
class RolloutConfig:
    """Let the target answer the prompts of a data set."""

    out: str
    """File of the answers (.jsonl); if it exists, the run goes on behind its last whole line."""
    data: DataConfig = field(default_factory=DataConfig)
    """Whose prompts to answer."""
    invent: int = 0
    """So many prompts are drawn from the target itself, instead of those of `data`: it continues an opened user turn
    (Magpie, arXiv:2406.08464 §2.1). They are kept beside `out`; unfinished, short and repeated ones are left out."""
    target: str = "smollm2"
    """Hub id, local folder, GGUF file, `smollm2` or `tiny`."""
    revision: str | None = None
    """Commit or tag of a hub id."""
    dtype: Literal["bfloat16", "float16", "float32"] = "bfloat16"
    """Precision the target computes in."""
    device: str = "auto"
    """`cpu`, `cuda`, ...; `auto` = a GPU if there is one."""
    max_new_tokens: int = 512
    """Tokens of an answer; longer ones are cut, marked and counted."""
    temperature: float = 0.0
    """0 = greedy."""
    top_p: float = 1.0
    """Nucleus of the sampler."""
    seed: int = 0
    """With the conversation's id, the seed of each answer."""
    batch_rows: int = 8
    """Conversations decoded together, or requests in flight with each endpoint."""
    adapters: str | None = None
    """Exported adapters (folder or Hub id) of a converted target: it answers as a denoiser."""
    strategy: str = "threshold"
    """How a denoiser decodes: an entry of STRATEGIES. `learned` and `independent` take their heads from beside the
    adapters."""
    settings: tuple[str, ...] = ()
    """Settings of the strategy, `name=value,...`, for example `threshold=0.8`."""
    order: bool = False
    """Store per token the pass in which a denoiser decided it."""
    trajectories: int = 0
    """Tokens of a block of the Jacobi states to store with each greedy answer (CLLM: 16); 0 = store none."""
    start: Literal["prompt", "text", "last", "random"] = "prompt"
    """First guesses of a block: drawn from the prompt (CLLM), from the text before the block, its last token, any id."""
    augment: float = 0.0
    """Chance that a wrong token of a stored state is replaced by the right one (CLLM's option: about 0.5)."""
    drop_repeated: int = 10
    """With trajectories, answers with one token so many times in a row are dropped and counted (CLLM: 10); 0 = none."""
    answers: str | None = None
    """Take the answers of this source (as `data.source`: a file, `shipped`, ...) instead of answering: for their
    trajectories."""
    part: str | None = None
    """`2/8`: every eighth conversation, from the second on, so that several machines share a source; each has its own
    `out`."""
    repeats: bool = False
    """Answer a prompt as often as it stands in the source (for several samples of one); else its first time counts, repeated
    ones are left out and counted."""
    endpoint: tuple[str, ...] = ()
    """Base URLs of OpenAI-compatible servers that answer instead (`http://127.0.0.1:8000/v1`; several with commas between
    them, which serve one model)."""
    in_flight: tuple[int, ...] = ()
    """Requests in flight with each endpoint: one count, or one per endpoint; empty = batch_rows."""
    model: str | None = None
    """The servers' name of the model; null = the first that the first one lists."""
    api_key_env: str | None = None
    """Name of the environment variable that holds the servers' key."""
    timeout: float = 600.0
    """Seconds that one request may take, to its last byte."""
    patience: float = 300.0
    """Seconds that the run waits for endpoints to come back once all are down."""
    trust_remote_code: bool = False
    """Run Python code that comes with the model; needs a pinned 40-digit revision."""

    def __post_init__(self) -> None:
        if Path(self.out).suffix != ".jsonl":
            raise ValueError(f"out = {self.out!r}: answers are written as .jsonl")
        if self.invent < 0:
            raise ValueError(f"invent = {self.invent}: give a count of prompts, or 0 to answer those of `data`")
        if self.invent and self.endpoint:
            raise ValueError(
                "invent needs the target itself: a chat endpoint opens no user turn; leave one of them out"
            )
        if self.endpoint and self.adapters is not None:
            raise ValueError("adapters belong to a local target: leave them or the endpoint out")
        if self.adapters is None and (self.order or self.settings or self.strategy != "threshold"):
            raise ValueError("strategy, settings and order are a denoiser's: name its adapters (--adapters FOLDER)")
        if self.states() is None:
            named = {"start": "prompt", "augment": 0.0, "drop_repeated": 10, "answers": None}
            if other := [name for name, usual in named.items() if getattr(self, name) != usual]:
                raise ValueError(f"{other[0]} is about Jacobi states: name their block (--trajectories 16)")
        elif self.temperature > 0:
            raise ValueError(
                f"temperature = {self.temperature}: Jacobi states lead to greedy answers; leave one of them out"
            )
        elif self.endpoint:
            raise ValueError(
                "a server keeps no ids and runs no Jacobi pass: let it answer first, then compute the trajectories with the "
                "model at hand (--answers FILE --target MODEL --trajectories N)"
            )
        elif self.adapters is not None:
            raise ValueError(
                "trajectories are of a target's own greedy answers, a denoiser gives others: leave adapters out"
            )
        if self.answers is not None and (self.invent or self.data.source != DataConfig.source):
            raise ValueError("answers names the source itself: leave data.source and invent out")
        if self.part is not None:
            self._part()
            if self.invent:
                raise ValueError(
                    "invent draws the same prompts on every machine: draw once, then name their file as data.source"
                )
        strategy_of(self.strategy, settings_of(self.settings))
        if self.batch_rows < 1:
            raise ValueError(f"batch_rows = {self.batch_rows}: give a positive count")
        if self.endpoint:
            endpoints_of(self.endpoint, self.in_flight or (self.batch_rows,))
        elif self.in_flight:
            raise ValueError("in_flight is about endpoints: name them (--endpoint URL), or set batch_rows")
        for name in ("timeout", "patience"):
            if not getattr(self, name) > 0:
                raise ValueError(f"{name} = {getattr(self, name)}: give positive seconds")
        self.params()

    def params(self) -> SamplingParams:
        """The sampler of an answer, without its seed."""
        return SamplingParams(temperature=self.temperature, top_p=self.top_p, max_new_tokens=self.max_new_tokens)

    def states(self) -> TrajectoryConfig | None:
        """The Jacobi states to store, None for none."""
        if self.trajectories == 0:
            return None
        return TrajectoryConfig(self.trajectories, self.start, self.augment, self.drop_repeated)

    def conversations(self) -> tuple[list[Conversation], int]:
        """What is answered, or whose answers are taken; and how many were left out because their prompt stands before them
        in the source (not only in this part of it)."""
        source = self.data if self.answers is None else replace(self.data, source=self.answers)
        k, n = self._part()
        every = load_conversations(source)
        mine = range(k - 1, len(every), n)
        if self.repeats or self.answers is not None:
            return [every[i] for i in mine], 0
        first: dict[str, int] = {}
        for i, conv in enumerate(every):
            first.setdefault(prompt_key(conv) or conv.id, i)
        kept = set(first.values())
        return [every[i] for i in mine if i in kept], sum(i not in kept for i in mine)

    def _part(self) -> tuple[int, int]:
        found = re.fullmatch(r"(\d+)/(\d+)", self.part or "1/1")
        k, n = (int(found[1]), int(found[2])) if found else (0, 0)
        if not 1 <= k <= n:
            raise ValueError(f"part = {self.part!r}: write the second of eight as 2/8")
        return k, n


def rollout(
    target: Target,
    conversations: Sequence[Conversation],
    out_path: Path | str,
    params: SamplingParams,
    batch_rows: int = 8,
    seed: int = 0,
    progress: bool = True,
    *,
    states: TrajectoryConfig | None = None,
    answers: str | None = None,
) -> RolloutReport:
    """Answer with a local target, `batch_rows` conversations at a time; `states`: and compute their Jacobi states. `answers`:
    name of the source whose answers are taken as they are.

    Raises:
        ValueError: the file was written with another target or other settings, nothing could be answered, or the answers
            are not this target's greedy ones.
    """
    settings = {"target": target.facts.fingerprint, **asdict(params), "seed": seed}
    if states is not None:
        settings["trajectories"] = asdict(states)
    if answers is not None:
        settings = {k: settings[k] for k in ("target", "seed", "trajectories") if k in settings} | {"answers": answers}

    def run(prompts: list[list[int]], seeded: list[SamplingParams]) -> list[Result]:
        return generate(target, prompts, seeded, decode=DecodeConfig(max_rows=batch_rows))

    answer = answering(target, run, params, seed)

    def talk(group: list[Conversation]) -> list[Conversation | str]:
        talks: list[Conversation | str] = converse(group, answer) if answers is None else [*group]
        return talks if states is None else with_states(target, talks, states, seed)

    return _run(conversations, Path(out_path), settings, _in_groups(talk, batch_rows), progress)


def rollout_denoiser(
    denoiser: Denoiser,
    conversations: Sequence[Conversation],
    out_path: Path | str,
    params: SamplingParams,
    decode: DiffuseConfig,
    *,
    made_by: Mapping[str, Any],
    order: bool = False,
    seed: int = 0,
    progress: bool = True,
) -> RolloutReport:
    """Answer with a denoiser, `decode.max_rows` conversations at a time; `order`: keep the pass that decided each id.

    `made_by`: what names the weights and the strategy; beside the target it decides whether a file is gone on with.

    Raises:
        ValueError: the file was written with another model or other settings, or nothing could be answered.
    """
    settings = {"target": denoiser.facts.fingerprint, **made_by, "order": order, **asdict(params), "seed": seed}

    def run(prompts: list[list[int]], seeded: list[SamplingParams]) -> list[Result]:
        return diffuse(denoiser, prompts, seeded, decode)

    answer = answering(denoiser, run, params, seed, order)
    talk = partial(converse, answer=answer)
    return _run(conversations, Path(out_path), settings, _in_groups(talk, decode.max_rows), progress)


def invent(
    target: Target, count: int, kept: Path, batch_rows: int = 8, seed: int = 0, progress: bool = True
) -> list[Conversation]:
    """Prompts that the target writes when its chat template has just opened a user turn (Magpie, arXiv:2406.08464
    §2.1), of `count` draws those that ended by themselves, have `INVENT_WORDS` words and were not drawn before. They
    are kept in a file, from which a later call reads them.

    Raises:
        ValueError: the chat template renders no user turn as it is, the file holds other draws, or no draw was usable.
    """
    settings = {"target": target.facts.fingerprint, "invent": count, **asdict(INVENT), "seed": seed}
    check_settings(kept, json.loads(json.dumps(settings)))
    if not kept.exists():
        opening = _opening(target)
        texts: dict[str, str] = {}
        bar = progress_bar("inventing", count, progress, "prompts")
        with bar:
            for first in range(0, count, batch_rows):
                ids = [f"invented-{seed}-{i:06d}" for i in range(first, min(first + batch_rows, count))]
                drawn = [replace(INVENT, seed=seed_of(seed, Conversation(i, []))) for i in ids]
                rows = generate(target, [opening] * len(ids), drawn, decode=DecodeConfig(max_rows=batch_rows))
                for name, row in zip(ids, rows, strict=True):
                    text = target.tokenizer.decode(row.ids, skip_special_tokens=True).strip()
                    if row.stop_reason == "eos" and len(text.split()) >= INVENT_WORDS:
                        texts.setdefault(text, name)
                bar(len(ids))
        if not texts:
            raise ValueError(f"none of {count} draws is a prompt; this target does not continue an opened user turn")
        lines = [
            json.dumps({"id": name, "category": "invented", "messages": [{"role": "user", "content": text}]})
            for text, name in texts.items()
        ]
        write_atomically(kept, lambda path: path.write_text("\n".join(lines) + "\n", encoding="utf-8"))
    return load_conversations(DataConfig(source=str(kept)))


def _opening(target: Target) -> list[int]:
    """Ids of the chat template up to where the text of a first user turn begins."""
    marker = "a text that no template holds"
    before, found, _ = render([{"role": "user", "content": marker}], target.tokenizer, False).partition(marker)
    if not found:
        raise ValueError(f"the chat template of {target.facts.name} does not render a user turn as it is")
    return list(target.tokenizer(before, add_special_tokens=False)["input_ids"])


def rollout_endpoints(
    endpoints: Sequence[str],
    conversations: Sequence[Conversation],
    out_path: Path | str,
    params: SamplingParams,
    *,
    model: str | None = None,
    api_key: str | None = None,
    in_flight: Sequence[int] = (8,),
    seed: int = 0,
    timeout: float = 600.0,
    patience: float = 300.0,
    progress: bool = True,
) -> RolloutReport:
    """Answer with OpenAI-compatible servers of one model, `in_flight` requests at a time with each (inference/endpoints.py).
    Which servers they are is no part of the settings that the file must have been made with.

    Raises:
        ValueError: no server can be reached, one refuses the key or the model, and as for `rollout`.
    """
    servers = endpoints_of(endpoints, in_flight, api_key)
    named = model or asyncio.run(choose_model(servers, timeout))
    for server in servers:
        server.listed = server.listed or model is not None
    settings = {"model": named, **asdict(params), "seed": seed}
    sampled = {"max_tokens": params.max_new_tokens, "temperature": params.temperature, "top_p": params.top_p}

    def body_of(conv: Conversation) -> dict[str, Any]:
        return {**sampled, "messages": conv.messages, "seed": seed_of(seed, conv) >> 32}

    def work(todo: list[Conversation], keep: Keep, say: Callable[[str], None]) -> None:
        asyncio.run(answer_all(servers, named, todo, body_of, keep, say, timeout, patience))

    began = time.monotonic()
    report = _run(conversations, Path(out_path), settings, work, progress)
    report.endpoints = [server.line(time.monotonic() - began) for server in servers]
    return report


def run_rollout(cfg: RolloutConfig) -> None:
    """The command."""
    conversations, repeated = ([], 0) if cfg.invent else cfg.conversations()
    if cfg.endpoint:
        if cfg.api_key_env is not None and not os.environ.get(cfg.api_key_env):
            raise ValueError(f"api_key_env = {cfg.api_key_env!r}: this environment variable is not set")
        report = rollout_endpoints(
            cfg.endpoint,
            conversations,
            cfg.out,
            cfg.params(),
            model=cfg.model,
            api_key=os.environ[cfg.api_key_env] if cfg.api_key_env else None,
            in_flight=cfg.in_flight or (cfg.batch_rows,),
            seed=cfg.seed,
            timeout=cfg.timeout,
            patience=cfg.patience,
        )
    else:
        device = ("cuda" if torch.cuda.is_available() else "cpu") if cfg.device == "auto" else cfg.device
        target = load_target(
            cfg.target, dtype=cfg.dtype, device=device, revision=cfg.revision, trust_remote_code=cfg.trust_remote_code
        )
        if cfg.invent:
            kept = Path(cfg.out).with_suffix(".prompts.jsonl")
            conversations = invent(target, cfg.invent, kept, cfg.batch_rows, cfg.seed)
        if cfg.adapters is None:
            answers = None if cfg.answers is None else Path(cfg.answers).name
            report = rollout(
                target, conversations, cfg.out, cfg.params(), cfg.batch_rows, cfg.seed,
                states=cfg.states(), answers=answers,
            )  # fmt: skip
        else:
            adapters = str(resolve(cfg.adapters))
            denoiser = load_adapters(adapters, target).denoiser()
            strategy, made_by = strategy_beside(adapters, denoiser, cfg.strategy, settings_of(cfg.settings))
            report = rollout_denoiser(
                denoiser,
                conversations,
                cfg.out,
                cfg.params(),
                DiffuseConfig(strategy, max_rows=cfg.batch_rows),
                made_by=made_by,
                order=cfg.order,
                seed=cfg.seed,
            )
    report.repeated = repeated
    Console(highlight=False, soft_wrap=True).print(f"{cfg.out}: {report}", markup=False)


Keep = Callable[[Conversation | str], None]
"""Takes a conversation that is through, or why there is none."""
Work = Callable[[list[Conversation], Keep, Callable[[str], None]], None]
"""Has conversations answered; the last argument takes lines to be said meanwhile."""


def _in_groups(talk: Callable[[list[Conversation]], list[Conversation | str]], rows: int) -> Work:
    """Let `talk` answer `rows` conversations at a time."""

    def work(todo: list[Conversation], keep: Keep, say: Callable[[str], None]) -> None:
        for first in range(0, len(todo), rows):
            for conv in talk(todo[first : first + rows]):
                keep(conv)

    return work


def _run(
    conversations: Sequence[Conversation], out: Path, settings: dict[str, Any], work: Work, progress: bool
) -> RolloutReport:
    """Have answered what is not in the file yet, a line per conversation, in the order of `conversations` at the end."""
    check_settings(out, json.loads(json.dumps(settings)))
    report = RolloutReport()
    done = resume(out, report)
    todo = [c for c in conversations if c.id not in done]
    bar = progress_bar("answering", len(todo), progress and bool(todo), "conversations")
    with out.open("a", encoding="utf-8") as file, bar:

        def keep(conv: Conversation | str) -> None:
            write_line(conv, file, report)
            refuse_foreign(report)
            bar(1)

        work(todo, keep, bar.say)
    put_in_order(out, [c.id for c in conversations])
    if conversations and not report.answered:
        raise ValueError(f"no conversation could be answered: {report}")
    return report
