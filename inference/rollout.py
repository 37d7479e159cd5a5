"""`draftsmith rollout`: let the target answer the prompts of a data set itself.

Drafters learn best from text that the target would write. Every user turn is answered in order, earlier answers being
the target's own; answers of the source are replaced. Each finished conversation is one line of the output, so a run
that was interrupted goes on behind the last whole line. Answers cut at `max_new_tokens` are marked and counted (read
them with `data.keep_truncated=false` to leave them out); empty answers are failures, not samples.

    draftsmith rollout --data.source prompts.jsonl --out answers.jsonl
    draftsmith rollout --data.source prompts.jsonl --out answers.jsonl --endpoint http://127.0.0.1:8000/v1
    draftsmith rollout --invent 5000 --out answers.jsonl        # no prompts at hand: the target writes them as well

With `--adapters` the target that they convert answers as a denoiser, by a strategy of inference/strategies.py; with
`--order` each answer then keeps the pass that decided each of its tokens, for `certainty.order=stored`:

    draftsmith rollout --data.source prompts.jsonl --out answers.jsonl --adapters runs/convert/export --order true

With `--endpoint` any OpenAI-compatible server answers; its texts are tokenised when they are read. Without, the ids are
kept as they were generated. Tested by `pytest tests/test_rollout.py`.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, Literal, TextIO

import httpx
import torch
from rich.console import Console

from ..data.encode import Refused, prompt_ids, render
from ..data.sources import Conversation, DataConfig, load_conversations
from ..data.states import write_atomically
from ..losses.probs import SamplingParams
from ..models.denoiser import Denoiser
from ..models.target import Target, load_target
from .adapter_folder import load_adapters
from .commit import Result
from .decision_folder import settings_of, strategy_beside
from .diffuse import DiffuseConfig, diffuse
from .endpoint import Answer, ask, json_of, request
from .load import resolve
from .progress import progress_bar
from .speculate import DecodeConfig, generate
from .strategies import strategy_of

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
    """Conversations decoded together, or requests in flight with an endpoint."""
    adapters: str | None = None
    """Exported adapters (folder or Hub id) of a converted target: it answers as a denoiser."""
    strategy: str = "threshold"
    """How a denoiser decodes: an entry of STRATEGIES. `learned` and `independent` take their heads from beside the
    adapters."""
    settings: tuple[str, ...] = ()
    """Settings of the strategy, `name=value,...`, for example `threshold=0.8`."""
    order: bool = False
    """Store per token the pass in which a denoiser decided it."""
    endpoint: str | None = None
    """Base URL of an OpenAI-compatible server (`http://127.0.0.1:8000/v1`) that answers instead."""
    model: str | None = None
    """The server's name of the model; null = the first that it lists."""
    api_key_env: str | None = None
    """Name of the environment variable that holds the server's key."""
    timeout: float = 600.0
    """Seconds that one request may take."""
    trust_remote_code: bool = False
    """Run Python code that comes with the model; needs a pinned 40-digit revision."""

    def __post_init__(self) -> None:
        if Path(self.out).suffix != ".jsonl":
            raise ValueError(f"out = {self.out!r}: answers are written as .jsonl")
        if self.invent < 0:
            raise ValueError(f"invent = {self.invent}: give a count of prompts, or 0 to answer those of `data`")
        if self.invent and self.endpoint is not None:
            raise ValueError(
                "invent needs the target itself: a chat endpoint opens no user turn; leave one of them out"
            )
        if self.endpoint is not None and self.adapters is not None:
            raise ValueError("adapters belong to a local target: leave them or the endpoint out")
        if self.adapters is None and (self.order or self.settings or self.strategy != "threshold"):
            raise ValueError("strategy, settings and order are a denoiser's: name its adapters (--adapters FOLDER)")
        strategy_of(self.strategy, settings_of(self.settings))
        if self.batch_rows < 1:
            raise ValueError(f"batch_rows = {self.batch_rows}: give a positive count")
        if self.endpoint is not None and not self.endpoint.startswith(("http://", "https://")):
            raise ValueError(f"endpoint = {self.endpoint!r}: give a URL, for example http://127.0.0.1:8000/v1")
        self.params()

    def params(self) -> SamplingParams:
        """The sampler of an answer, without its seed."""
        return SamplingParams(temperature=self.temperature, top_p=self.top_p, max_new_tokens=self.max_new_tokens)


@dataclass
class RolloutReport:
    """Conversations by fate; `there` of the `answered` were in the file already, `truncated` are among them too."""

    answered: int = 0
    there: int = 0
    truncated: int = 0
    failed: Counter[str] = field(default_factory=Counter)

    def __str__(self) -> str:
        failed = ", ".join(f"{n} ({reason})" for reason, n in self.failed.most_common()) or "0"
        text = f"{self.answered} answered ({self.there} were there), {self.truncated} truncated, failed: {failed}"
        return f"{text}; failed ones are tried again by the next run" if self.failed else text


Answering = Callable[[list[Conversation]], list["Answer | str"]]
"""Answers the last user turn of each conversation; a text is the reason why there is no answer."""


def rollout(
    target: Target,
    conversations: Sequence[Conversation],
    out_path: Path | str,
    params: SamplingParams,
    batch_rows: int = 8,
    seed: int = 0,
    progress: bool = True,
) -> RolloutReport:
    """Answer with a local target, `batch_rows` conversations at a time.

    Raises:
        ValueError: the file was written with another target or other settings, or nothing could be answered.
    """
    settings = {"target": target.facts.fingerprint, **asdict(params), "seed": seed}

    def run(prompts: list[list[int]], seeded: list[SamplingParams]) -> list[Result]:
        return generate(target, prompts, seeded, decode=DecodeConfig(max_rows=batch_rows))

    answer = answering(target, run, params, seed)
    return _run(conversations, Path(out_path), settings, answer, batch_rows, 1, progress)


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
    return _run(conversations, Path(out_path), settings, answer, decode.max_rows, 1, progress)


def answering(
    model: Target | Denoiser,
    run: Callable[[list[list[int]], list[SamplingParams]], list[Result]],
    params: SamplingParams,
    seed: int,
    order: bool = False,
) -> Answering:
    """Answers of a local model, each by a seed of its own; `run` decodes prompts."""

    def answer(asked: list[Conversation]) -> list[Answer | str]:
        prompts: list[list[int]] = []
        results: list[Answer | str] = ["" for _ in asked]
        rows: list[int] = []
        for i, conv in enumerate(asked):
            try:
                prompt = prompt_ids(conv.messages, model.tokenizer)
            except Refused as reason:
                results[i] = str(reason)
                continue
            if len(prompt) + params.max_new_tokens > model.facts.max_positions:
                results[i] = "prompt and answer exceed the target's positions"
                continue
            prompts.append(prompt)
            rows.append(i)
        seeded = [replace(params, seed=_seed(seed, asked[i])) for i in rows]
        found = run(prompts, seeded) if prompts else []
        for i, result in zip(rows, found, strict=True):
            text = model.tokenizer.decode(result.ids, skip_special_tokens=True)
            kept = result.order if order else None
            results[i] = Answer(text, result.stop_reason == "length", list(result.ids), order=kept)
        return results

    return answer


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
    _check_settings(kept, json.loads(json.dumps(settings)))
    if not kept.exists():
        opening = _opening(target)
        texts: dict[str, str] = {}
        bar = progress_bar("inventing", count, progress, "prompts")
        with bar:
            for first in range(0, count, batch_rows):
                ids = [f"invented-{seed}-{i:06d}" for i in range(first, min(first + batch_rows, count))]
                drawn = [replace(INVENT, seed=_seed(seed, Conversation(i, []))) for i in ids]
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


def rollout_endpoint(
    endpoint: str,
    conversations: Sequence[Conversation],
    out_path: Path | str,
    params: SamplingParams,
    *,
    model: str | None = None,
    api_key: str | None = None,
    in_flight: int = 8,
    seed: int = 0,
    timeout: float = 600.0,
    progress: bool = True,
) -> RolloutReport:
    """Answer with an OpenAI-compatible server, `in_flight` requests at a time.

    Raises:
        ValueError: the server cannot be reached or refuses the key or the model, and as for `rollout`.
    """
    base = endpoint.rstrip("/").removesuffix("/chat/completions")
    headers = {} if api_key is None else {"Authorization": f"Bearer {api_key}"}
    with httpx.Client(headers=headers, timeout=timeout) as client:
        if model is None:
            listed = json_of(request(client, "GET", f"{base}/models", None))
            models = [m.get("id") for m in listed.get("data", [])] if isinstance(listed, dict) else []
            if not models:
                raise ValueError(f"{base} lists no model; name one (--model)")
            model = str(models[0])
        settings = {"endpoint": base, "model": model, **asdict(params), "seed": seed}
        body = {
            "model": model,
            "max_tokens": params.max_new_tokens,
            "temperature": params.temperature,
            "top_p": params.top_p,
        }

        def answer(asked: list[Conversation]) -> list[Answer | str]:
            return [ask(client, base, {**body, "messages": c.messages, "seed": _seed(seed, c) >> 32}) for c in asked]

        return _run(conversations, Path(out_path), settings, answer, 1, in_flight, progress)


def run_rollout(cfg: RolloutConfig) -> None:
    """The command."""
    conversations = [] if cfg.invent else load_conversations(cfg.data)
    if cfg.endpoint is not None:
        if cfg.api_key_env is not None and not os.environ.get(cfg.api_key_env):
            raise ValueError(f"api_key_env = {cfg.api_key_env!r}: this environment variable is not set")
        report = rollout_endpoint(
            cfg.endpoint,
            conversations,
            cfg.out,
            cfg.params(),
            model=cfg.model,
            api_key=os.environ[cfg.api_key_env] if cfg.api_key_env else None,
            in_flight=cfg.batch_rows,
            seed=cfg.seed,
            timeout=cfg.timeout,
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
            report = rollout(target, conversations, cfg.out, cfg.params(), cfg.batch_rows, cfg.seed)
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
    Console(highlight=False, soft_wrap=True).print(f"{cfg.out}: {report}", markup=False)


def _run(
    conversations: Sequence[Conversation],
    out: Path,
    settings: dict[str, Any],
    answer: Answering,
    rows: int,
    threads: int,
    progress: bool,
) -> RolloutReport:
    """Answer what is not in the file yet, groups of `rows` at a time on so many threads, a line per conversation."""
    _check_settings(out, json.loads(json.dumps(settings)))
    report = RolloutReport()
    done = _resume(out, report)
    todo = [c for c in conversations if c.id not in done]
    groups = [todo[i : i + rows] for i in range(0, len(todo), rows)]
    bar = progress_bar("answering", len(todo), progress and bool(todo), "conversations")
    with out.open("a", encoding="utf-8") as file, bar, ThreadPoolExecutor(threads) as pool:
        futures = [pool.submit(_converse, group, answer) for group in groups]
        try:
            for future in as_completed(futures):
                for conv in future.result():
                    _write(conv, file, report)
                    bar(1)
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            raise
    if conversations and not report.answered:
        raise ValueError(f"no conversation could be answered: {report}")
    return report


def _converse(group: list[Conversation], answer: Answering) -> list[Conversation | str]:
    """Answer every user turn of each conversation in order. A turn without an answer ends its conversation before it;
    a truncated one ends it there. Without any answer the reason is returned."""
    asks = [_asks(c) for c in group]
    talks = [replace(c, messages=[], truncated=False, answer_ids=None, answer_order=None) for c in group]
    reasons = ["nothing to answer"] * len(group)
    running = [i for i, turns in enumerate(asks) if turns]
    turn = 0
    while running:
        asked = [replace(talks[i], messages=[*talks[i].messages, *asks[i][turn]]) for i in running]
        for i, before, got in zip(list(running), asked, answer(asked), strict=True):
            if isinstance(got, str) or not got.text.strip():
                reasons[i] = got if isinstance(got, str) else "empty answer"
                running.remove(i)
                continue
            message = {"role": "assistant", "content": got.text}
            if got.reasoning:
                message["reasoning_content"] = got.reasoning
            messages = [*before.messages, message]
            talks[i] = replace(talks[i], messages=messages, truncated=got.truncated, answer_ids=got.ids)
            talks[i] = replace(talks[i], answer_order=got.order)
            if got.truncated or turn + 1 == len(asks[i]):
                running.remove(i)
        turn += 1
    return [talk if talk.messages else reason for talk, reason in zip(talks, reasons, strict=True)]


def _asks(conv: Conversation) -> list[list[dict[str, Any]]]:
    """What is said before each answer; none for conversations with tools, whose results fit the source's calls only."""
    if any(m["role"] == "tool" or m.get("tool_calls") for m in conv.messages):
        return []
    turns: list[list[dict[str, Any]]] = []
    said: list[dict[str, Any]] = []
    for message in [*conv.messages, {"role": "assistant"}]:
        if message["role"] != "assistant":
            said.append(message)
        elif any(m["role"] == "user" for m in said):
            turns.append(said)
            said = []
    return turns


def _seed(seed: int, conv: Conversation) -> int:
    """Of 63 bits, from the run's seed, the conversation's id and the number of its turns so far."""
    key = f"{seed}:{conv.id}:{len(conv.messages)}".encode()
    return int.from_bytes(hashlib.sha256(key).digest()[:8], "big") >> 1


def _write(conv: Conversation | str, file: TextIO, report: RolloutReport) -> None:
    if isinstance(conv, str):
        report.failed[conv] += 1
        return
    record: dict[str, Any] = {"id": conv.id, "category": conv.category, "split": conv.split}
    record |= {"messages": conv.messages, "truncated": conv.truncated}
    if conv.answer_ids is not None:
        record["ids"] = conv.answer_ids
    if conv.answer_order is not None:
        record["order"] = conv.answer_order
    file.write(json.dumps(record, ensure_ascii=False) + "\n")
    file.flush()
    report.answered += 1
    report.truncated += conv.truncated


def _check_settings(out: Path, settings: dict[str, Any]) -> None:
    """Answers of two settings never mix in one file: they stand beside it, and the first that differs is named."""
    beside = out.with_name(out.name + ".settings.json")
    if out.exists() and out.stat().st_size:
        try:
            found = json.loads(beside.read_text(encoding="utf-8"))
        except (FileNotFoundError, json.JSONDecodeError):
            raise ValueError(
                f"{out.name} exists, but {beside.name} does not say how it was made; choose another file"
            ) from None
        for name in sorted(found.keys() | settings.keys()):
            if found.get(name) != settings.get(name):
                raise ValueError(
                    f"{out.name} was made with {name} = {found.get(name)!r}, this run has {settings.get(name)!r}; "
                    "choose another file"
                )
    write_atomically(beside, lambda path: path.write_text(json.dumps(settings), encoding="utf-8"))


def _resume(out: Path, report: RolloutReport) -> set[str]:
    """Ids of the whole lines; what a killed run left behind them is cut off."""
    out.parent.mkdir(parents=True, exist_ok=True)
    if not out.exists():
        return set()
    content = out.read_bytes()
    whole = content.rfind(b"\n") + 1
    if whole < len(content):
        with out.open("rb+") as file:
            file.truncate(whole)
    records = [json.loads(line) for line in content[:whole].splitlines() if line.strip()]
    report.answered = report.there = len(records)
    report.truncated = sum(bool(r["truncated"]) for r in records)
    return {r["id"] for r in records}
