"""Many conversations answered by several OpenAI-compatible servers at once. Part of inference/rollout.py.

Each endpoint has so many requests in flight and takes the next conversation when one of them is answered: a fast one takes
more. A conversation stays with its endpoint from turn to turn (which has its prefix cached) while that answers; what fails
is asked again, elsewhere first, with back-off. An endpoint that fails is set aside: after a rest that doubles each time
(with jitter, and never shorter than the Retry-After that it sent) one request tries whether it is back. When none is left,
the run ends with one line; what was answered has been handed out by then.

    found = asyncio.run(choose_model(endpoints, timeout))
    asyncio.run(answer_all(endpoints, model, conversations, body_of, keep, say, timeout, patience))
    pytest tests/test_endpoints.py
"""

from __future__ import annotations

import asyncio
import random
import time
from collections import Counter, deque
from collections.abc import Callable, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from typing import Any

import httpx

from ..data.sources import Conversation
from .converse import Turns, turns
from .endpoint import Answer, Fault, Refusal, answer_of, json_of, send, without_user

DOWN = 4  # failures in a row, each after a rest, of an endpoint that is down
TRIES = 6  # of one request that may be the cause itself
REST, LONGEST_REST = 0.5, 30.0  # seconds: the first rest, doubled after each failure
CONNECT = 10.0  # seconds
TELL = 30.0  # seconds between lines about the endpoints


@dataclass(eq=False)
class Endpoint:
    """One server: `base` ends before `/chat/completions`. What it did is counted over the run."""

    base: str
    in_flight: int
    api_key: str | None = None
    answers: int = 0
    tokens: int | None = None  # None: it never said how many
    failures: Counter[str] = field(default_factory=Counter)
    listed: bool = False  # that it serves the model is known, or need not be
    reached: bool = False  # somebody was there
    out: str | None = None  # why it is never asked again
    failed_in_a_row: int = 0
    failed_at: float = 0.0
    rest_until: float = 0.0
    told_until: float = 0.0  # Retry-After
    open: asyncio.Event = field(default_factory=asyncio.Event)
    probe: asyncio.Lock = field(default_factory=asyncio.Lock)

    def client(self) -> httpx.AsyncClient:
        """A client that holds a connection per request in flight."""
        headers = {} if self.api_key is None else {"Authorization": f"Bearer {self.api_key}"}
        limits = httpx.Limits(max_connections=self.in_flight, max_keepalive_connections=self.in_flight)
        return httpx.AsyncClient(headers=headers, limits=limits, timeout=httpx.Timeout(None, connect=CONNECT))

    def failed(self, fault: Fault, began: float) -> None:
        """Set aside. Failures of requests that were in flight together count once."""
        now, self.reached = time.monotonic(), self.reached or fault.reached
        self.failures[fault.reason] += 1
        if began >= self.failed_at:
            self.failed_in_a_row, self.failed_at = self.failed_in_a_row + 1, now
            self.rest_until = now + back_off(self.failed_in_a_row)
        self.told_until = max(self.told_until, now + fault.wait if fault.wait else 0.0)
        self.open.clear()

    def answered(self) -> None:
        """It is well, as any answer shows; a Retry-After is kept all the same."""
        self.reached, self.failed_in_a_row, self.rest_until = True, 0, 0.0
        if time.monotonic() >= self.told_until:
            self.open.set()

    @property
    def rest(self) -> float:
        """Seconds that it is left alone."""
        return max(self.rest_until, self.told_until) - time.monotonic()

    @property
    def why(self) -> str:
        """What stands against it."""
        if self.out is not None:
            return self.out
        last = next(reversed(self.failures), "no failure")
        return f"{self.base} cannot be reached ({last}, {self.failed_in_a_row} tries)"

    def line(self, seconds: float) -> str:
        """What it did in so many seconds."""
        tokens = "tokens not counted by it" if self.tokens is None else f"{self.tokens / seconds:.1f} tokens/s"
        reasons = ", ".join(f"{n} {reason}" for reason, n in self.failures.most_common())
        state = "; not asked any more" if self.out else "" if self.open.is_set() else "; set aside"
        rate = f"{self.answers} answers, {self.answers / seconds:.2f}/s, {tokens}"
        return f"{self.base}: {rate}, failures: {reasons or '0'}{state}"


def back_off(failures: int) -> float:
    """Seconds to wait after so many failures in a row: doubled each time, of which a random half may be missing."""
    return min(REST * 2.0 ** min(failures - 1, 30), LONGEST_REST) * random.uniform(0.5, 1.0)


def endpoints_of(bases: Sequence[str], in_flight: Sequence[int], api_key: str | None = None) -> list[Endpoint]:
    """Endpoints by their URLs; `in_flight` requests each: one count for all, or one per endpoint.

    Raises ValueError for what is no URL, one that stands twice, or another number of counts.
    """
    counts = list(in_flight) * len(bases) if len(in_flight) == 1 else list(in_flight)
    if len(counts) != len(bases) or min(counts, default=0) < 1:
        raise ValueError(
            f"in_flight = {','.join(map(str, in_flight))}: give one positive count, or one for each of {len(bases)} endpoints"
        )
    urls = [base.rstrip("/").removesuffix("/chat/completions").rstrip("/") for base in bases]
    for url in urls:
        try:
            parsed = httpx.URL(url)
            sound = parsed.scheme in ("http", "https") and parsed.host and (parsed.port or 1) < 2**16
        except httpx.InvalidURL:
            sound = False
        if not sound:
            raise ValueError(f"endpoint = {url!r}: give a URL, for example http://127.0.0.1:8000/v1")
        if httpx.URL(url).userinfo:
            raise ValueError(f"endpoint = {without_user(url)!r} holds a password: give it by api_key_env")
        if urls.count(url) > 1:
            raise ValueError(f"endpoint = {url!r} stands twice: name it once, with a larger in_flight")
    return [Endpoint(url, count, api_key) for url, count in zip(urls, counts, strict=True)]


async def choose_model(endpoints: Sequence[Endpoint], timeout: float) -> str:
    """The first model that the first endpoint within reach lists; all others within reach must list it, too.

    Raises ValueError when none can be reached, one refuses the key or the path, or they serve different models.
    """

    async def listed(endpoint: Endpoint) -> list[str] | None:
        async with endpoint.client() as client:
            while endpoint.failed_in_a_row < DOWN:
                await asyncio.sleep(max(endpoint.rest, 0.0))
                began = time.monotonic()
                try:
                    models = await models_of(endpoint, client, timeout)
                except Fault as fault:
                    endpoint.failed(fault, began)
                else:
                    endpoint.listed = True
                    endpoint.answered()
                    return models
        return None

    found = await asyncio.gather(*map(listed, endpoints))
    chosen: str | None = None
    for endpoint, models in zip(endpoints, found, strict=True):
        if models is None:
            continue
        if chosen is None and not models:
            raise ValueError(f"{endpoint.base} lists no model; name one (--model)")
        chosen = models[0] if chosen is None else chosen
        _refuse_without(endpoint, models, chosen)
    if chosen is None:
        raise ValueError(_all_down(endpoints))
    return chosen


async def models_of(endpoint: Endpoint, client: httpx.AsyncClient, timeout: float) -> list[str]:
    """Names of the models that it lists."""
    reply = json_of(await send(client, "GET", f"{endpoint.base}/models", None, timeout))
    listed = reply.get("data") if isinstance(reply, dict) else None
    return [str(m["id"]) for m in listed if isinstance(m, dict) and "id" in m] if isinstance(listed, list) else []


def _refuse_without(endpoint: Endpoint, models: Sequence[str], model: str) -> None:
    if model not in models:
        raise Refusal(
            f"{endpoint.base} serves {', '.join(models) or 'no model'}, not {model}: all endpoints must serve one model "
            "(--model names it)"
        )


def _all_down(endpoints: Sequence[Endpoint]) -> str:
    return "; ".join(e.why for e in endpoints) + "; the answers so far are kept, run again"


async def answer_all(
    endpoints: Sequence[Endpoint],
    model: str,
    conversations: Sequence[Conversation],
    body_of: Callable[[Conversation], dict[str, Any]],
    keep: Callable[[Conversation | str], None],
    say: Callable[[str], None],
    timeout: float,
    patience: float,
) -> None:
    """Answer every turn of each conversation; `keep` is handed each one when it is through, or why there is no answer, and
    `say` lines about the endpoints. `body_of(conversation)`: the request of its last turn. `timeout`: seconds of a request.
    `patience`: seconds without any answer after which a run whose endpoints are all down ends (at once where nobody was ever
    there: that is a wrong address).

    Raises ValueError when all endpoints are down, or one refuses the key, the path or the model before it has answered.
    """
    pool = _Pool(endpoints, model, conversations, body_of, keep, say, timeout, patience)
    if conversations:
        await pool.run()


@dataclass(eq=False)
class _Job:
    """A conversation on its way: `asked` holds the turn that is to be answered."""

    steps: Turns
    asked: Conversation
    tries: int = 0
    not_before: float = 0.0
    failed_at: set[str] = field(default_factory=set)


class _Pool:
    """The run of `answer_all`: a task per request in flight, each bound to one endpoint."""

    def __init__(
        self,
        endpoints: Sequence[Endpoint],
        model: str,
        conversations: Sequence[Conversation],
        body_of: Callable[[Conversation], dict[str, Any]],
        keep: Callable[[Conversation | str], None],
        say: Callable[[str], None],
        timeout: float,
        patience: float,
    ) -> None:
        self.endpoints, self.model = endpoints, model
        self.todo, self.again = iter(conversations), deque[_Job]()
        self.left = len(conversations)
        self.body_of, self.keep, self.say = body_of, keep, say
        self.timeout, self.patience = timeout, patience
        self.asking = 0
        self.answered_at = time.monotonic()
        self.changed, self.over = asyncio.Event(), asyncio.Event()

    async def run(self) -> None:
        """Until every conversation is through, or a task fails."""
        for endpoint in self.endpoints:
            if endpoint.failed_in_a_row:
                self.say(f"set aside: {endpoint.why}")
            else:
                endpoint.open.set()
        async with AsyncExitStack() as stack:
            waits = [asyncio.create_task(self.over.wait()), asyncio.create_task(self._tell())]
            for endpoint in self.endpoints:
                client = await stack.enter_async_context(endpoint.client())
                waits += [asyncio.create_task(self._work(endpoint, client)) for _ in range(endpoint.in_flight)]
            try:
                # Only an error ends a worker before the run is over, or its endpoint's exclusion.
                while not self.over.is_set():
                    ended, _ = await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
                    for task in ended:
                        task.result()
                        waits.remove(task)
            finally:
                for task in waits:
                    task.cancel()
                await asyncio.gather(*waits, return_exceptions=True)

    async def _work(self, endpoint: Endpoint, client: httpx.AsyncClient) -> None:
        """One request at a time, as long as the endpoint is asked at all; of one that is set aside, one after each rest."""
        while endpoint.out is None:
            if endpoint.open.is_set():
                await self._next(endpoint, client)
                continue
            async with endpoint.probe:
                while not endpoint.open.is_set() and endpoint.out is None:
                    if (rest := endpoint.rest) > 0:
                        try:
                            await asyncio.wait_for(endpoint.open.wait(), rest)
                        except TimeoutError:
                            continue
                    else:
                        await self._next(endpoint, client)

    async def _next(self, endpoint: Endpoint, client: httpx.AsyncClient) -> None:
        job = self._take(endpoint)
        if job is None:
            await self.changed.wait()
            return
        began = time.monotonic()
        self.asking += 1
        try:
            await self._converse(endpoint, client, job)
        except Fault as fault:
            self.asking -= 1
            self._failed(endpoint, job, fault, began)
        except Refusal as refusal:
            self.asking -= 1
            self._exclude(endpoint, job, refusal)
        else:
            self.asking -= 1

    def _take(self, endpoint: Endpoint) -> _Job | None:
        """The next job for this endpoint: one that failed elsewhere, or here long enough ago, before any new one."""
        now = time.monotonic()
        for job in self.again:
            if endpoint.base not in job.failed_at or now >= job.not_before:
                self.again.remove(job)
                return job
        while (conv := next(self.todo, None)) is not None:
            steps = turns([conv])
            try:
                return _Job(steps, next(steps)[0])
            except StopIteration as end:  # nothing to answer
                self._through(end.value[0])
        return None

    async def _converse(self, endpoint: Endpoint, client: httpx.AsyncClient, job: _Job) -> None:
        """Turn after turn to the end. Raises Fault, after which it can go on anywhere from the turn that failed."""
        if not endpoint.listed:
            _refuse_without(endpoint, await models_of(endpoint, client, self.timeout), self.model)
            endpoint.listed = True
        while True:
            body = {**self.body_of(job.asked), "model": self.model}
            url = f"{endpoint.base}/chat/completions"
            answer, tokens = answer_of(await send(client, "POST", url, body, self.timeout))
            self.answered_at = time.monotonic()
            endpoint.answered()
            if isinstance(answer, Answer):
                endpoint.answers += 1
                endpoint.tokens = endpoint.tokens if tokens is None else (endpoint.tokens or 0) + tokens
            job.tries, job.failed_at = 0, set()
            try:
                (job.asked,) = job.steps.send([answer])
            except StopIteration as end:
                self._through(end.value[0])
                return

    def _through(self, talk: Conversation | str) -> None:
        self.keep(talk)
        self.left -= 1
        if not self.left:
            self.over.set()

    def _failed(self, endpoint: Endpoint, job: _Job, fault: Fault, began: float) -> None:
        """Set the endpoint aside, and the job back, unless it has had its tries. A conversation that fails is left out with
        all its turns: how far it came is chance."""
        endpoint.failed(fault, began)
        if endpoint.failed_in_a_row == DOWN:
            self.say(f"set aside: {endpoint.why}")
        job.tries += fault.charged
        if job.tries >= TRIES:
            self._through(fault.reason)
        else:
            self._put_back(endpoint, job)
        self._end_if_all_down()

    def _put_back(self, endpoint: Endpoint, job: _Job) -> None:
        wait = back_off(max(job.tries, 1))
        job.failed_at.add(endpoint.base)
        job.not_before = time.monotonic() + wait
        self.again.append(job)
        self._wake()
        asyncio.get_running_loop().call_later(wait, self._wake)

    def _wake(self) -> None:
        """Tasks that found nothing to do look again."""
        before, self.changed = self.changed, asyncio.Event()
        before.set()

    def _exclude(self, endpoint: Endpoint, job: _Job, refusal: Refusal) -> None:
        """An endpoint that has answered before and now refuses is not asked any more; one that never did is a mistake."""
        if not endpoint.answers:
            raise refusal
        endpoint.out = str(refusal)
        endpoint.open.clear()
        self.say(f"not asked any more: {refusal}")
        self._put_back(endpoint, job)
        self._end_if_all_down()

    def _end_if_all_down(self) -> None:
        if self.asking or not all(e.out or e.failed_in_a_row >= DOWN for e in self.endpoints):
            return
        patient = any(e.reached for e in self.endpoints) and not all(e.out for e in self.endpoints)
        if patient and time.monotonic() - self.answered_at < self.patience:
            return
        raise ValueError(_all_down(self.endpoints))

    async def _tell(self) -> None:
        began = time.monotonic()
        while True:
            await asyncio.sleep(TELL)
            for endpoint in self.endpoints:
                self.say(endpoint.line(time.monotonic() - began))
