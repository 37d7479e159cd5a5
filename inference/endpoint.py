"""One try of an OpenAI-compatible server, what went wrong with it, and the answer in its reply. Part of inference/rollout.py.

A server fails in many ways that raise no error by themselves: a reply that trickles in for ever, one that ends in the
middle, one that is no JSON or has no choices. Each of them is a `Fault` here. Test: pytest tests/test_endpoints.py
"""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass
from email.utils import parsedate_to_datetime
from typing import Any

import httpx

LONGEST_WAIT = 3600.0  # seconds: a Retry-After beyond it is cut to this


@dataclass(frozen=True)
class Answer:
    """One answer: its text, the generated ids with their end of turn (None from a server), whether the limit cut it; of a
    denoiser, where asked for, the pass that decided each id."""

    text: str
    truncated: bool
    ids: list[int] | None = None
    reasoning: str | None = None
    order: list[int] | None = None


class Fault(Exception):
    """A try that failed and may be repeated. `charged`: the request may be the cause of it (a busy or unreachable server
    says nothing about the request). `wait`: seconds that the server asks for (Retry-After). `reached`: somebody was there."""

    def __init__(self, reason: str, charged: bool = True, wait: float = 0.0, reached: bool = True) -> None:
        super().__init__(reason)
        self.reason, self.charged, self.wait, self.reached = reason, charged, wait, reached


class Refusal(ValueError):
    """A wrong key, path or model: no other try would mend it."""


async def send(
    client: httpx.AsyncClient, method: str, url: str, body: dict[str, Any] | None, timeout: float
) -> httpx.Response:
    """One try, `timeout` seconds from connecting to the last byte. What it returns has a status of 200 to 299, or one that
    is about this very request.

    Raises Fault or Refusal.
    """
    try:
        async with asyncio.timeout(timeout):
            response = await client.request(method, url, json=body)
    except TimeoutError:
        raise Fault(f"no whole reply in {timeout:g} s") from None
    except (httpx.ConnectError, httpx.ConnectTimeout) as error:
        raise Fault(type(error).__name__, charged=False, reached=False) from None
    except httpx.HTTPError as error:
        raise Fault(type(error).__name__) from None
    status = response.status_code
    if status in (401, 403, 404) or 300 <= status < 400:
        raise Refusal(f"{without_user(url)} answered {status}: wrong key, path or model")
    if status in (429, 503):
        raise Fault(f"status {status}", charged=False, wait=retry_after(response))
    if status >= 500 or status in (408, 425):
        raise Fault(f"status {status}", wait=retry_after(response))
    return response


def answer_of(response: httpx.Response) -> tuple[Answer | str, int | None]:
    """The answer, or why there is none and will be none; and the tokens that the server counted. Raises Fault for a reply
    that is not one."""
    if response.status_code >= 400:
        return f"server answered {response.status_code}", None
    reply = json_of(response)
    try:
        choice = reply["choices"][0]
        message, reason = choice["message"], choice["finish_reason"]
        text, reasoning = message.get("content") or "", message.get("reasoning_content")
    except (KeyError, IndexError, TypeError, AttributeError):
        raise Fault("reply without choices") from None
    if not isinstance(text, str) or not isinstance(reasoning, str | None):
        raise Fault("content that is no text")
    try:
        (text + (reasoning or "")).encode()
    except UnicodeEncodeError:
        raise Fault("half of a surrogate pair in a text") from None
    if reason not in ("stop", "length"):
        return f"finish_reason {reason!r}", None
    usage = reply.get("usage")
    tokens = usage.get("completion_tokens") if isinstance(usage, dict) else None
    counted = tokens if isinstance(tokens, int) and not isinstance(tokens, bool) else None
    return Answer(text, reason == "length", reasoning=reasoning), counted


def json_of(response: httpx.Response) -> Any:
    """The parsed body, whatever its type is said to be. Raises Fault."""
    try:
        return response.json()
    except (ValueError, RecursionError):
        kind = response.headers.get("content-type", "").split(";")[0].strip()
        raise Fault("reply is no JSON" + (f" ({kind[:40]})" if kind and "json" not in kind else "")) from None


def retry_after(response: httpx.Response) -> float:
    """Seconds that the server asks to be left alone: a number, or a date; 0 where it says nothing that can be read."""
    said = response.headers.get("retry-after", "")
    try:
        wait = float(said)
    except ValueError:
        try:
            wait = parsedate_to_datetime(said).timestamp() - time.time()
        except (TypeError, ValueError, OverflowError):
            return 0.0
    return min(max(wait, 0.0), LONGEST_WAIT) if wait == wait else 0.0


def without_user(url: str) -> str:
    """The address as it may be shown: without user and password."""
    parsed = httpx.URL(url)
    return str(parsed.copy_with(username=None, password=None)) if parsed.userinfo else url
