"""One answer, and how an OpenAI-compatible server is asked for it. Part of inference/rollout.py.

Test: pytest tests/test_rollout.py
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import httpx

RETRIES = 4


@dataclass(frozen=True)
class Answer:
    """One answer: its text, the generated ids with their end of turn (None from a server), whether the limit cut it; of a
    denoiser, where asked for, the pass that decided each id."""

    text: str
    truncated: bool
    ids: list[int] | None = None
    reasoning: str | None = None
    order: list[int] | None = None


def ask(client: httpx.Client, base: str, body: dict[str, Any]) -> Answer | str:
    response = request(client, "POST", f"{base}/chat/completions", body)
    if response.status_code >= 400:
        return f"server answered {response.status_code}"
    reply = json_of(response)
    try:
        choice = reply["choices"][0]
        message, reason = choice["message"], choice["finish_reason"]
        text = message.get("content") or ""
    except (KeyError, IndexError, TypeError, AttributeError):
        return "reply without choices"
    if reason not in ("stop", "length"):
        return f"finish_reason {reason!r}"
    return Answer(text, reason == "length", reasoning=message.get("reasoning_content"))


def request(client: httpx.Client, method: str, url: str, body: dict[str, Any] | None) -> httpx.Response:
    """One request; busy or failing servers are asked again. A wrong key, path or model ends the run."""
    why = ""
    for wait in _waits():
        time.sleep(wait)
        try:
            response = client.request(method, url, json=body)
        except httpx.HTTPError as error:
            why = type(error).__name__
            continue
        if response.status_code in (401, 403, 404):
            raise ValueError(f"{url} answered {response.status_code}: wrong key, path or model")
        if response.status_code != 429 and response.status_code < 500:
            return response
        why = f"status {response.status_code}"
    raise ValueError(f"{url} cannot be reached ({why}, {RETRIES} tries); the answers so far are kept, run again")


def _waits() -> Iterator[float]:
    yield 0.0
    for attempt in range(RETRIES - 1):
        yield 0.5 * 4**attempt


def json_of(response: httpx.Response) -> Any:
    try:
        return response.json()
    except json.JSONDecodeError:
        return None
