"""The thread that runs the model for the server, and what passes between it and the event loop.

The event loop alone counts who was let in and what came of it; the thread alone touches model and engine. Requests and
cancellations go to the thread through a queue, events come back through `call_soon_threadsafe` into a queue per job, so
that a client who reads slowly keeps nobody waiting. Tests: tests/test_serve.py.
"""

from __future__ import annotations

import asyncio
import queue
import sys
import threading
import time
import traceback
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from ..losses.probs import SamplingParams
from .api import ApiError
from .commit import Event, Request, Stats
from .engine import Engine
from .turns import Turns


@dataclass(frozen=True)
class Limits:
    """What the server takes on: requests in the queue beside those that run, tokens of a prompt, of an answer, and of
    both together, seconds that a request may last."""

    queue: int
    prompt: int
    answer: int
    total: int
    seconds: float


@dataclass
class Job:
    """The answers to one HTTP request. `events`: what happened, in order; None = it was given up or failed (`fault`)."""

    requests: list[Request]
    left: int
    begun: float
    events: asyncio.Queue[Event | None] = field(default_factory=asyncio.Queue)
    fault: ApiError | None = None
    spoken: bool = False

    def number(self, event: Event) -> int:
        """Which of the answers an event belongs to."""
        return event.row - self.requests[0].row


@dataclass
class Counts:
    """What `/metrics` reports, kept by the event loop."""

    outcomes: dict[str, int] = field(
        default_factory=lambda: dict.fromkeys(("done", "cancelled", "failed", "refused"), 0)
    )
    stats: Stats = field(default_factory=lambda: Stats(requests=0))
    first_token_seconds: float = 0.0
    first_tokens: int = 0
    seconds: float = 0.0


class Worker:
    """The thread of one engine. `model`: whose facts and tokenizer count (a target or a denoiser)."""

    def __init__(self, model: Any, engine: Engine | Turns, limits: Limits) -> None:
        self.model, self.engine, self.limits = model, engine, limits
        self.held = 0  # requests that were let in and are not done
        self.stopping = False
        self.counts = Counts()
        self._jobs: dict[int, Job] = {}  # by row number; the event loop's
        self._rows = 0
        self._inbox: queue.SimpleQueue[tuple[str, Sequence[Request]]] = queue.SimpleQueue()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread = threading.Thread(target=self._run, name="draftsmith-model", daemon=True)

    # On the event loop

    def start(self) -> None:
        """Begin to work for the running event loop."""
        self._loop = asyncio.get_running_loop()
        self._thread.start()

    @property
    def alive(self) -> bool:
        """Whether the thread works."""
        return self._thread.is_alive()

    def submit(self, prompts: Sequence[tuple[Sequence[int], SamplingParams]]) -> Job:
        """Let in the requests of one job. Raises ApiError: 503 while stopping, 429 when the queue is full, 400 for more
        than ever fit."""
        if self.stopping or not self.alive:
            self.counts.outcomes["refused"] += len(prompts)
            raise ApiError(503, "the server is stopping, it takes no new requests", code="stopping")
        room = self.engine.rows + self.limits.queue
        if len(prompts) > room:
            raise ApiError(400, f"n: {len(prompts)} answers are asked for, this server holds {room} at a time", "n")
        if self.held + len(prompts) > room:
            self.counts.outcomes["refused"] += len(prompts)
            raise ApiError(429, f"the server is busy: {self.held} of {room} places are taken, try again", code="busy")
        facts, tokenizer = self.model.facts, self.model.tokenizer
        first, self._rows = self._rows, self._rows + len(prompts)
        requests = [
            Request(first + i, ids, params, facts.eos_ids, tokenizer, live=True)
            for i, (ids, params) in enumerate(prompts)
        ]
        job = Job(requests, len(requests), time.monotonic())
        self._jobs |= dict.fromkeys(range(first, self._rows), job)
        self.held += len(requests)
        self._inbox.put(("add", requests))
        return job

    def cancel(self, job: Job, fault: ApiError | None = None) -> None:
        """Give up what is not done of a job; its rows are free for the next step."""
        if not job.left:
            return
        open_rows = [r for r in job.requests if r.row in self._jobs]
        for request in open_rows:
            del self._jobs[request.row]
        self.counts.outcomes["cancelled" if fault is None else "failed"] += job.left
        self.held -= job.left
        job.left, job.fault = 0, fault
        job.events.put_nowait(None)
        self._inbox.put(("cancel", open_rows))

    def cancel_all(self, fault: ApiError) -> None:
        """Give up everything."""
        for job in list({id(job): job for job in self._jobs.values()}.values()):
            self.cancel(job, fault)

    def _fail(self, requests: Sequence[Request], fault: ApiError) -> None:
        """Give up the jobs of some requests."""
        for request in requests:
            if (job := self._jobs.get(request.row)) is not None:
                self.cancel(job, fault)

    def stop(self) -> None:
        """End the thread after its step."""
        self._inbox.put(("stop", ()))
        if self._thread.ident is not None:
            self._thread.join(timeout=30)

    def _deliver(self, events: Sequence[Event]) -> None:
        now = time.monotonic()
        for event in events:
            job = self._jobs.get(event.row)
            if job is None:
                continue  # cancelled
            if not job.spoken:
                job.spoken = True
                self.counts.first_tokens += 1
                self.counts.first_token_seconds += now - job.begun
            job.events.put_nowait(event)
            if event.stop_reason is not None:
                del self._jobs[event.row]
                job.left -= 1
                self.held -= 1
                self.counts.outcomes["done"] += 1
                self.counts.stats += job.requests[job.number(event)].stats
                if not job.left:
                    self.counts.seconds += now - job.begun

    # In the thread

    def _run(self) -> None:
        assert self._loop is not None
        try:
            self._work(self._loop)
        except Exception:  # not even forgetting works: the engine is lost, and so is the thread
            traceback.print_exc(file=sys.stderr)
            self._loop.call_soon_threadsafe(self.cancel_all, ApiError(503, "the model broke down", code="broken"))

    def _work(self, loop: asyncio.AbstractEventLoop) -> None:
        """Step after step, until `stop`."""
        while self._take():
            if not self.engine.busy:
                continue
            try:
                events = self.engine.step()
            except Exception:  # the requests at hand fail; those that wait, and the server, go on
                traceback.print_exc(file=sys.stderr)
                fault = ApiError(500, "the model failed on this batch of requests", code="model_failed")
                loop.call_soon_threadsafe(self._fail, self.engine.clear(), fault)
                continue
            if events:
                loop.call_soon_threadsafe(self._deliver, events)

    def _take(self) -> bool:
        """Read the inbox, waiting where there is nothing else to do; False = stop."""
        while True:
            try:
                what, requests = self._inbox.get(block=not self.engine.busy)
            except queue.Empty:
                return True
            if what == "stop":
                return False
            for request in requests:
                if what == "add":
                    self.engine.add(request)
                else:
                    self.engine.cancel(request)
