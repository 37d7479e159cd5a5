"""Conversations answered turn by turn. Part of inference/rollout.py.

Test: pytest tests/test_rollout.py
"""

from __future__ import annotations

import hashlib
import json
import unicodedata
from collections.abc import Callable, Generator
from dataclasses import replace
from typing import Any

from ..data.encode import Refused, prompt_ids
from ..data.sources import Conversation
from ..losses.probs import SamplingParams
from ..models.denoiser import Denoiser
from ..models.target import Target
from .commit import Result
from .endpoint import Answer

Answering = Callable[[list[Conversation]], list["Answer | str"]]
"""Answers the last user turn of each conversation; a text is the reason why there is no answer."""


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
        seeded = [replace(params, seed=seed_of(seed, asked[i])) for i in rows]
        found = run(prompts, seeded) if prompts else []
        for i, result in zip(rows, found, strict=True):
            text = model.tokenizer.decode(result.ids, skip_special_tokens=True)
            kept = result.order if order else None
            results[i] = Answer(text, result.stop_reason == "length", list(result.ids), order=kept)
        return results

    return answer


def converse(group: list[Conversation], answer: Answering) -> list[Conversation | str]:
    """Answer every user turn of each conversation in order, by `turns`."""
    steps = turns(group)
    try:
        asked = next(steps)
        while True:
            asked = steps.send(answer(asked))
    except StopIteration as end:
        found: list[Conversation | str] = end.value
        return found


Turns = Generator[list[Conversation], list["Answer | str"], list["Conversation | str"]]


def turns(group: list[Conversation]) -> Turns:
    """Yields conversations whose last user turn is to be answered, and is sent their answers, until all are through; returns
    the conversations. A turn without an answer ends its conversation before it; a truncated one ends it there. Without any
    answer the reason is returned."""
    asks = [_asks(c) for c in group]
    talks = [replace(c, messages=[], truncated=False, answer_ids=None, answer_order=None, jacobi=None) for c in group]
    reasons = ["nothing to answer"] * len(group)
    running = [i for i, said in enumerate(asks) if said]
    turn = 0
    while running:
        asked = [replace(talks[i], messages=[*talks[i].messages, *asks[i][turn]]) for i in running]
        answers = yield asked
        for i, before, got in zip(list(running), asked, answers, strict=True):
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


def prompt_key(conv: Conversation) -> str | None:
    """What two conversations share that ask the same: all that is said before each answer, in Unicode's composed form, lines
    ended one way, without space at line ends and around. None where nothing is asked."""
    said = [(m["role"], _plain(m["content"])) for turn in _asks(conv) for m in turn]
    return json.dumps(said) if said else None


def _plain(text: str) -> str:
    lines = unicodedata.normalize("NFC", text).splitlines()
    return "\n".join(line.rstrip() for line in lines).strip()


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


def seed_of(seed: int, conv: Conversation) -> int:
    """Of 63 bits, from the run's seed, the conversation's id and the number of its turns so far."""
    key = f"{seed}:{conv.id}:{len(conv.messages)}".encode()
    return int.from_bytes(hashlib.sha256(key).digest()[:8], "big") >> 1
