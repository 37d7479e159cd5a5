"""Denoisers for the server: closed batches that take turns, with the surface of `Engine` (engine.py).

A batch of diffusion decoding starts and ends together (its canvas is laid out for its requests); who comes meanwhile
waits for the next one. Tests: tests/test_serve.py.
"""

from __future__ import annotations

from typing import Any

from ..losses.probs import SamplingParams
from ..models.denoiser import Denoiser
from .commit import Event, Request
from .diffuse import DiffuseConfig, batch_of, fit


class Turns:
    """Requests that a denoiser answers, at most `decode.max_rows` at a time. Raises ValueError for settings that do not fit
    the model."""

    prefixes = None  # a canvas is read as a whole

    def __init__(self, denoiser: Denoiser, decode: DiffuseConfig) -> None:
        self.denoiser, self.decode = denoiser, fit(denoiser, decode)
        self.rows = decode.max_rows
        self.waiting: list[Request] = []
        self.requests: list[Request] = []
        self.untold: list[Request] = []  # of the pass at hand, those that were not done when it began
        self.batch: Any = None

    def refuse(self, params: SamplingParams) -> None:
        """ValueError, which names the field, for what a denoiser cannot tell."""
        if params.logprobs:
            raise ValueError("logprobs: a denoiser has none: it decides tokens out of order")
        if params.grammar is not None:
            raise ValueError("grammar: a denoiser follows none: it decides tokens out of order")

    def add(self, request: Request) -> None:
        """Let a request wait for the next batch."""
        self.waiting.append(request)

    def cancel(self, request: Request) -> None:
        """Forget a request; its row is idle until its batch ends."""
        if request in self.waiting:
            self.waiting.remove(request)
        if request.stop_reason is None:
            request.stop_reason = "cancelled"

    def clear(self) -> list[Request]:
        """After a pass that failed: forget the batch, and give those of its requests whose end nobody was told of."""
        failed = self.untold or [r for r in self.requests if r.stop_reason is None]
        self.requests, self.untold, self.batch = [], [], None
        return failed

    @property
    def running(self) -> int:
        """Requests in the batch that are not done."""
        return sum(r.stop_reason is None for r in self.requests)

    @property
    def busy(self) -> bool:
        """Whether some request is not done."""
        return bool(self.waiting) or self.running > 0

    def step(self) -> list[Event]:
        """One pass of the batch, or of the next one where it is done."""
        if not self.running:
            self.requests, self.waiting = self.waiting[: self.rows], self.waiting[self.rows :]
            self.batch = batch_of(self.denoiser, self.requests, self.decode) if self.requests else None
        self.untold = [r for r in self.requests if r.stop_reason is None]
        events = [] if self.batch is None else self.batch.step()
        self.untold = []
        return events
