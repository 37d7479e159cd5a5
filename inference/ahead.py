"""Decoding ahead of the host: steps are given to the device before it is known what the last one brought.

The host gives step s + 1 to the device, then reads what step s committed, and hands it to the requests, whose rules of
stopping are the only ones. A request that ended in step s runs through step s + 1 in vain; what that gave it is dropped.
On a GPU a step is captured in a CUDA graph per number of rows, kind of request and slots read (powers of two), after
some that ran as they are, which compiles kernels and makes the libraries' workspaces. Before every replay it is looked
whether weights, modules and adapters are those that were captured (inference/watch.py): if not, graphs are forgotten and
captured anew; while hooks listen, steps run as they are.

Part of inference/engine.py; the step itself: inference/device_step.py. Tests: tests/test_device_step.py.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from .commit import Event, Request
from .decode import DecodeConfig
from .device_step import DeviceStep, Held, caches_of, put, rule_of, why_on_host
from .trees import BROKEN, Plan
from .watch import Watch

EAGER = 4  # steps of a kind that run as they are before one is captured: short answers are not worth it
SHORTEST = 256  # slots that passes read, at least; beyond it the next power of two


def why_not_ahead(target: Any, drafter: Any, decode: DecodeConfig, plan: Plan | None) -> str | None:
    """Why steps are decided on the host, "" for no reason that need be said; None if they are not. Raises ValueError where
    the settings want what cannot be."""
    cuda = target.device.type == "cuda"
    if decode.step == "host" or (decode.step == "auto" and not cuda):
        return ""
    why = why_on_host(target, drafter, decode, plan)
    if decode.step == "graph" and not cuda:
        why = "CUDA graphs need a GPU"
    if why is not None and decode.step != "auto":
        raise ValueError(f"step={decode.step!r}: {why}; use step='auto'")
    return why


@dataclass
class _Pending:
    """A step that the host has not read: its report, on the way to the host."""

    report_BX: Tensor
    arrived: Any  # a CUDA event, or None
    rule: str


class Ahead:
    """The device's side of an engine. `graphs`: steps are captured; given up, with `note` saying why, where that fails."""

    def __init__(self, step: DeviceStep) -> None:
        self.step, self.graphs = step, self.captures(step.target, step.decode)
        self.note: str | None = None
        self.rows: Held | None = None  # of the requests that are decoded now
        self.pending: deque[_Pending] = deque()
        self._held: dict[Any, Held] = {}
        self._pool: Any = None
        self._watch: Watch | None = None
        self._kept: list[Any] = []  # what graphs read and nobody else may keep alive

    @property
    def name(self) -> str:
        """For reports."""
        return "graph" if self.graphs else "device" if self.note is None else f"device ({self.note})"

    @staticmethod
    def captures(target: Any, decode: DecodeConfig) -> bool:
        """Whether steps are to be captured."""
        return target.device.type == "cuda" and decode.step != "device"

    @staticmethod
    def spare(nodes: int) -> int:
        """Slots per row that running ahead takes beside those of the host's steps: of the step in vain, and of the
        passes that rows which are done take part in behind it."""
        return 2 * (nodes + 1)

    def why_not(self, engine: Any) -> str | None:
        """Why these requests need the host's steps; None if they do not."""
        if any(r.params.logprobs for r in engine.requests):
            return "log-probabilities are wanted"
        if any(r.params.grammar is not None for r in engine.requests):
            return "grammars are read on the host"
        if rule_of(self.step.decode, engine.params.hot, self.step.draws(engine.draft_params)) is None:
            return "drawn trees are verified on the host"
        return None

    def enter(self, engine: Any) -> None:
        """Take the rows over from the host."""
        params, heated = (replace(p, exhaustive=True) for p in (engine.params, engine.draft_params))
        flags = tuple((p.hot, p.cold, p.truncates, p.min_p, p.penalises) for p in (params, heated))
        drawn = self.step.draws(heated)
        rule = rule_of(self.step.decode, params.hot, drawn)
        assert rule is not None
        b, device = len(engine.requests), engine.device
        key = (b, flags, engine.ledger.stops_BV is not None)
        held = self._held.get(key)
        live_B = torch.ones(b, dtype=torch.bool, device=device)
        if held is None:
            engine.ledger.ahead = True
            report_BX = torch.zeros(b, self.step.report_width(), dtype=torch.int64, device=device)
            held = self._held[key] = Held(
                engine.seeds_B.clone(), engine.rounds_B.clone(), engine.anchors_B.clone(), live_B, params, heated,
                engine.ledger, engine.state, rule, drawn, report_BX,
            )  # fmt: skip
        else:
            for old, new in (
                (held.seeds_B, engine.seeds_B),
                (held.rounds_B, engine.rounds_B),
                (held.anchors_B, engine.anchors_B),
                (held.live_B, live_B),
            ):
                old.copy_(new)
            put(held.params, params)
            put(held.draft_params, heated)
            put(held.ledger, engine.ledger)
        held.live = [True] * b
        held.given = engine.commit
        if held.own is not None and engine.commit is not None and engine.commit.ids_BT.shape == held.own.ids_BT.shape:
            put(held.own, engine.commit)
            held.given = None
        self.rows = held

    def leave(self, engine: Any) -> None:
        """Give the rows back to the host, which has read all."""
        assert not self.pending
        held = self.rows
        if held is None:
            return
        self.rows = None
        engine.rounds_B, engine.anchors_B = held.rounds_B.clone(), held.anchors_B.clone()
        if engine.drafter is not None:
            engine.commit = held.given or held.own
        for cache in (engine.cache, *caches_of(engine.state)):
            cache.reach = None

    def advance(self, engine: Any) -> list[Event]:
        """Give the device a step, if some request may want it, and read the one before."""
        if self.rows is None:
            self.enter(engine)
        before = len(self.pending)
        wants = any(r.stop_reason is None and len(r.ids) + before < r.params.max_new_tokens for r in engine.requests)
        if wants:
            self._launch(engine)
        return self.read(engine.requests) if before else []

    def drain(self, requests: Sequence[Request]) -> list[Event]:
        """Read all that the device was given."""
        events: list[Event] = []
        while self.pending:
            events += self.read(requests)
        return events

    def clear(self, engine: Any) -> None:
        """Forget everything, after a step that failed."""
        if self._kept:
            torch.cuda.synchronize()  # one of the graphs may be running
        self.pending.clear()
        self._held, self.rows = {}, None
        self._kept.clear()
        engine.cache.reach = None

    def _launch(self, engine: Any) -> None:
        held, requests = self.rows, engine.requests
        assert held is not None
        live = [r.stop_reason is None for r in requests]
        if live != held.live:
            held.live = live
            held.live_B.copy_(_from_host(torch.tensor(live), engine.device), non_blocking=True)
        width, taken = self.step.nodes + 1, self.step.depth + 1
        # Rows that are done may be longer; what is not read of them reaches nobody.
        bound = len(self.pending) * taken + max(len(r.prompt) + len(r.ids) for r in requests if r.stop_reason is None)
        drafted = taken if held.given is None else held.given.ids_BT.shape[1]
        if self.step.drafter is not None and self.step.plan is not None:
            drafted += self.step.plan.asked + max(self.step.depth, self.step.drafter.parallel)
        reach = tuple(
            min(cache.slots, max(SHORTEST, 1 << (bound + rows - 1).bit_length()))
            for cache, rows in ((engine.cache, width), *((c, drafted + 1) for c in caches_of(held.state)))
        )
        for cache, slots in zip((engine.cache, *caches_of(held.state)), reach, strict=True):
            cache.reach = slots
        self._run(held, reach)
        self.pending.append(_send(held.report_BX, held.rule))

    def _run(self, held: Held, reach: tuple[int, ...]) -> None:
        """The step: as it is the first time, and where its commit has a prompt's shape; then from a graph."""
        if not self.graphs or held.given is not None or self._differs():
            self.step(held)
        elif (done := held.graphs.get(reach, 0)) in range(EAGER):
            held.graphs[reach] = done + 1
            self._alongside(held)
        else:
            if done == EAGER:
                held.graphs[reach] = self._capture(held)
            if self.graphs:
                held.graphs[reach].replay()
            else:
                self.step(held)

    def _differs(self) -> bool:
        """Whether a replay would not be the step, because something listens to modules. Graphs of weights, modules or
        adapters that are no more are forgotten."""
        if self._watch is None or self._watch.changed():
            if self._kept:
                torch.cuda.synchronize()  # one of the graphs may be running
            for held in self._held.values():
                held.graphs.clear()
            self._kept.clear()
            drafter = self.step.drafter
            self._watch = Watch(*(part for part in (self.step.target.model, drafter) if isinstance(part, nn.Module)))
        return self._watch.heard()

    def _alongside(self, held: Held) -> None:
        """The step on a stream of its own, as what will be captured has to be tried."""
        here, side = torch.cuda.current_stream(), torch.cuda.Stream()
        side.wait_stream(here)
        with torch.cuda.stream(side):
            self.step(held)
        here.wait_stream(side)

    def _capture(self, held: Held) -> Any:
        """The step as a graph; nothing is computed. None where it cannot be captured."""
        if self._pool is None:
            self._pool = torch.cuda.graph_pool_handle()
        graph = torch.cuda.CUDAGraph()
        try:
            with torch.cuda.graph(graph, pool=self._pool):
                self.step(held)
        except RuntimeError as error:
            self.graphs, self.note = False, f"no CUDA graph: {str(error).splitlines()[0]}"
            return None
        self._kept.append(self.step.target.operands)
        return graph

    def read(self, requests: Sequence[Request]) -> list[Event]:
        """Hand what the oldest step committed to the requests that are not done."""
        pending = self.pending.popleft()
        if pending.arrived is not None:
            pending.arrived.synchronize()
        depth, events = self.step.depth, []
        for request, row in zip(requests, pending.report_BX.tolist(), strict=True):
            if request.stop_reason is not None:
                continue
            count, tested, drafted, broken = row[-4:]
            if broken:
                raise ValueError(BROKEN)
            before = len(request.ids)
            events.append(request.commit([*row[:count], row[count]], count))
            ranks = row[depth + 1 : depth + 1 + count]
            request.stats.record(len(request.ids) - before, ranks, bool(tested), drafted)
            request.stats.step = self.name
            if self.step.drafter is not None:
                request.stats.rule = pending.rule
        return events


def _send(report_BX: Tensor, rule: str) -> _Pending:
    """A copy of the report on its way to the host."""
    if report_BX.device.type != "cuda":
        return _Pending(report_BX.clone(), None, rule)
    host_BX = torch.empty(report_BX.shape, dtype=report_BX.dtype, pin_memory=True)
    host_BX.copy_(report_BX, non_blocking=True)
    arrived = torch.cuda.Event()
    arrived.record()
    return _Pending(host_BX, arrived, rule)


def _from_host(x: Tensor, device: torch.device) -> Tensor:
    return x.pin_memory() if device.type == "cuda" else x
