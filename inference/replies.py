"""Answers in OpenAI's form: whole ones, and the chunks of a stream. Part of inference/server.py. Tests: tests/test_serve.py."""

from __future__ import annotations

import secrets
import time
from collections.abc import Sequence
from typing import Any

from .api import Ask
from .commit import Event
from .worker import Job


class Reply:
    """What is said of one job, as a chat completion or a completion."""

    def __init__(self, job: Job, model: str, tokenizer: Any, ask: Ask) -> None:
        self.job, self.tokenizer, self.ask = job, tokenizer, ask
        self.chat = ask.messages is not None
        self.sent = [0] * len(job.requests)  # tokens of each answer that were reported
        self.offsets = [0] * len(job.requests)  # characters of their texts
        kind = "chatcmpl" if self.chat else "cmpl"
        self.base = {"id": f"{kind}-{secrets.token_hex(12)}", "created": int(time.time()), "model": model}

    def shell(self, streams: bool) -> dict[str, Any]:
        """What stands in every message."""
        name = "text_completion" if not self.chat else f"chat.completion{'.chunk' if streams else ''}"
        return self.base | {"object": name}

    def opening(self) -> list[dict[str, Any]]:
        """Chunks before the first event: the role of every answer of a chat."""
        if not self.chat:
            return []
        delta = {"role": "assistant", "content": ""}
        return [
            self.shell(True) | {"choices": [{"index": i, "delta": delta, "logprobs": None, "finish_reason": None}]}
            for i in range(len(self.job.requests))
        ]

    def chunk(self, event: Event) -> dict[str, Any]:
        """One event."""
        i = self.job.number(event)
        said = {"delta": {"content": event.text} if event.text else {}} if self.chat else {"text": event.text}
        choice = {"index": i, **said, "logprobs": self._logprobs([event]), "finish_reason": reason_of(event)}
        return self.shell(True) | {"choices": [choice]}

    def whole(self, events: Sequence[Event]) -> dict[str, Any]:
        """All events at once."""
        choices = []
        for i in range(len(self.job.requests)):
            own = [event for event in events if self.job.number(event) == i]
            text = "".join(event.text for event in own)
            said: dict[str, Any] = {"message": {"role": "assistant", "content": text}} if self.chat else {"text": text}
            choices.append({"index": i, **said, "logprobs": self._logprobs(own), "finish_reason": reason_of(own[-1])})
        return self.shell(False) | {"choices": choices, "usage": self.usage()}

    def usage(self) -> dict[str, Any]:
        """Tokens of the prompts, each counted once, and of all answers; an end-of-sequence token counts. Of the prompts'
        tokens those that were known from earlier requests."""
        prompts = self.job.requests[:: self.ask.n]
        prompt, made = sum(len(r.prompt) for r in prompts), sum(len(r.ids) for r in self.job.requests)
        return {
            "prompt_tokens": prompt,
            "completion_tokens": made,
            "total_tokens": prompt + made,
            "prompt_tokens_details": {"cached_tokens": sum(r.stats.reused for r in prompts)},
        }

    def _logprobs(self, events: Sequence[Event]) -> dict[str, Any] | None:
        """Log-probabilities of the tokens of one answer's events, but for the one that ended it."""
        if not self.ask.params.logprobs:
            return None
        entries = []
        for event in events:
            i = self.job.number(event)
            request, first = self.job.requests[i], self.sent[i]
            self.sent[i] += len(event.ids)
            ended = event.stop_reason in ("eos", "stop_id")
            for at in range(first, self.sent[i] - int(ended)):
                best = request.top_logprobs[at] if request.top_logprobs else []
                entries.append((i, request.ids[at], request.logprobs[at], best))
        return self._of_chat(entries) if self.chat else self._of_completion(entries)

    def _of_chat(self, entries: Sequence[tuple[int, int, float, list[tuple[int, float]]]]) -> dict[str, Any]:
        content = [
            self._entry(token, log) | {"top_logprobs": [self._entry(*other) for other in best]}
            for _, token, log, best in entries
        ]
        return {"content": content, "refusal": None}

    def _of_completion(self, entries: Sequence[tuple[int, int, float, list[tuple[int, float]]]]) -> dict[str, Any]:
        offsets = []
        for i, token, _, _ in entries:
            offsets.append(self.offsets[i])
            self.offsets[i] += len(self._spell(token))
        return {
            "tokens": [self._spell(token) for _, token, _, _ in entries],
            "token_logprobs": [log for _, _, log, _ in entries],
            "top_logprobs": [{self._spell(x): y for x, y in best} for _, _, _, best in entries],
            "text_offset": offsets,
        }

    def _entry(self, token: int, log: float) -> dict[str, Any]:
        text = self._spell(token)
        return {"token": text, "logprob": log, "bytes": None if "\ufffd" in text else list(text.encode())}

    def _spell(self, token: int) -> str:
        return self.tokenizer.decode([token])


def reason_of(event: Event) -> str | None:
    """OpenAI's word for why an answer ended."""
    if event.stop_reason is None:
        return None
    return "length" if event.stop_reason in ("length", "grammar_limit") else "stop"
