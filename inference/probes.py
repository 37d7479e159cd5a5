"""What `draftsmith tune` measures: costs on this machine, and how often a drafter is right.

All probes run through the decode loop or exactly as it does, in one process, interleaved where they are compared, and say
medians. `Recorder` stands in for a drafter: one chain per verification tells at which rank the right token stood at every
depth that the target reached, so that chances by depth *and* rank cost no more than chains.

Tests: tests/test_tune.py.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from statistics import median
from typing import Any

import torch
from torch import Tensor

from ..losses.probs import SamplingParams
from ..models.drafter import Commit, Level
from ..models.target import Target
from .choose import Chances, Costs, Line, acceptance
from .commit import Stats
from .speculate import DecodeConfig, generate
from .trees import asks_by_level
from .tuned import usable_cores

ROWS = (1, 2, 3, 4, 5, 6, 8, 12, 16, 24, 32)  # M of the verification probe
RANKS = 8  # candidates per depth whose acceptance is counted
LANES = (1, 2, 4, 8)  # nodes of a level whose cost is measured
SHARES = {"threads": 0.08, "verify": 0.15, "accept": 0.32, "trees": 0.1, "compare": 0.35}  # of `seconds`
LEAST = 5  # repeats of every cost, however long they take


@dataclass(frozen=True)
class _Said:
    """What a drafter said of one depth, row by row: its best ids, how sure it was, whether it said anything."""

    ids: list[list[int]]
    sure: list[float]
    there: list[bool]


class Recorder:
    """A drafter as it is, which keeps account of what it says and what becomes of it.

    Per depth how many drafts were tested there (`tried`) and at which rank the right token stood (`ranks`); the drafts of
    every round (`rounds`); seconds of `start` and of `extend` by nodes (`times`, key 0 = start), the first start of an
    answer, which reads the prompt, left out; `spent`: seconds of all calls, with the account. Rank and depth are those of
    chains: with `counting` False only times are kept.
    """

    def __init__(self, drafter: Any, counting: bool = True) -> None:
        self.inner, self.counting, self.asks = drafter, counting, asks_by_level(drafter)
        self.tried: list[int] = []
        self.ranks: list[list[int]] = []
        self.rounds: list[list[Line]] = []
        self.times: dict[int, list[float]] = defaultdict(list)
        self.spent, self.steps = 0.0, 0
        self._fresh = True
        self._said: list[_Said] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)

    def init(self, prefill: Any) -> Any:
        self._fresh, self._said = True, []
        return self.inner.init(prefill)

    def start(self, state: Any, commit: Commit) -> tuple[Any, Level]:
        begin = self._now()
        self._settle(commit)
        before = self._now()
        state, level = self.inner.start(state, commit)
        if not self._fresh:
            self.times[0].append(self._now() - before)
        self._fresh, self._said, self.steps = False, [], self.steps + 1
        self._listen(level, 1 if self.asks else level.logits_BNW.shape[1])
        self.spent += self._now() - begin
        return state, level

    def extend(self, state: Any, tokens_BN: Tensor, parents_BN: Tensor) -> tuple[Any, Level]:
        begin = self._now()
        state, level = self.inner.extend(state, tokens_BN, parents_BN)
        self.times[tokens_BN.shape[1]].append(self._now() - begin)
        self._listen(level, 1)
        self.spent += self._now() - begin
        return state, level

    def _now(self) -> float:
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        return time.perf_counter()

    def _listen(self, level: Level, rows: int) -> None:
        """Keep the best candidates of the first `rows` nodes, one depth each."""
        if not self.counting:
            return
        d2t_W = self.inner.d2t_W
        x_BKW = level.logits_BNW[:, :rows].float()
        if d2t_W is None:
            x_BKW = x_BKW[..., : self.inner.facts.tokens]
        best_BKR, ids_BKR = x_BKW.topk(min(RANKS, x_BKW.shape[2]))
        sure_BK = (best_BKR[:, :, 0] - x_BKW.logsumexp(-1)).exp()
        if level.confidence_BN is not None:
            sure_BK = level.confidence_BN[:, :rows]
        ids_BKR = ids_BKR if d2t_W is None else d2t_W[ids_BKR]
        ids, sure, there = ids_BKR.tolist(), sure_BK.tolist(), level.valid_BN[:, :rows].tolist()
        for d in range(rows):
            self._said.append(_Said([x[d] for x in ids], [x[d] for x in sure], [x[d] for x in there]))

    def _settle(self, commit: Commit) -> None:
        """What became of the draft before: `commit` holds the anchor and what was kept of it, and the next token."""
        if not self._said:
            return
        lines = []
        for b, (count, anchor) in enumerate(zip(commit.counts_B.tolist(), commit.anchor_B.tolist(), strict=True)):
            if count == 0:
                continue  # done
            kept = count - 1
            for d in range(kept):
                self._count(d, 0)
            if kept < len(self._said) and self._said[kept].there[b]:
                ids = self._said[kept].ids[b]
                self._count(kept, ids.index(anchor) if anchor in ids else None)
            lines.append(Line(tuple(said.sure[b] if said.there[b] else 0.0 for said in self._said), kept))
        if lines:
            self.rounds.append(lines)

    def _count(self, depth: int, rank: int | None) -> None:
        while len(self.tried) <= depth:
            self.tried.append(0)
            self.ranks.append([0] * RANKS)
        self.tried[depth] += 1
        if rank is not None:
            self.ranks[depth][rank] += 1


@dataclass
class Probe:
    """One tuning while it runs: the target, calibration prompts (token ids), how many are answered together, the longest
    answer, the deepest draft, numbers of threads to try (None = powers of two), and the seconds that all may take."""

    target: Target
    prompts: list[list[int]]
    rows: int = 1
    tokens: int = 48
    depth: int = 8
    threads: tuple[int, ...] | None = None
    seconds: float = 30.0
    tell: Callable[[float], object] = float  # hears how long every piece of work took
    next: int = 0

    def batch(self) -> list[list[int]]:
        """The next prompts, as many as are decoded together."""
        ids = [self.prompts[(self.next + i) % len(self.prompts)] for i in range(self.rows)]
        self.next += self.rows
        return ids

    def laps(self, share: str, least: int) -> Iterator[int]:
        """Numbers of repeats until the share of the time is spent, at least `least`; tells what each took."""
        until = time.monotonic() + SHARES[share] * self.seconds
        lap = 0
        while lap < least or time.monotonic() < until:
            begin = time.monotonic()
            yield lap
            self.tell(time.monotonic() - begin)
            lap += 1

    def run(
        self, ids: list[list[int]], drafter: Any, decode: DecodeConfig | None, tokens: int | None = None
    ) -> tuple[Stats, int]:
        """Answer one batch, plainly without `decode`; `tokens`: so many, be they sensible or not. Returns the sum of the
        statistics, and the steps that it took."""
        params = SamplingParams(max_new_tokens=tokens or self.tokens, ignore_eos=tokens is not None)
        wanted = replace(decode or DecodeConfig(), max_rows=self.rows)
        stats = [r.stats for r in generate(self.target, ids, params, drafter if decode else None, wanted)]
        return sum(stats, Stats(requests=0)), max(s.verifies for s in stats)


def seconds_of(target: Target, work: Callable[[], Any]) -> float:
    """Wall time of a piece of work on the target's device."""
    wait = torch.cuda.synchronize if target.device.type == "cuda" else lambda: None
    wait()
    begin = time.perf_counter()
    work()
    wait()
    return time.perf_counter() - begin


@torch.no_grad()
def passes(probe: Probe, taps: Sequence[int]) -> Callable[[str, int], None]:
    """`run(kind, rows)`: the target's pass over so many rows per request, as `speculate` runs it, behind a prompt of the
    median length and half an answer. Nothing is committed, so passes do not see each other."""
    target, b = probe.target, probe.rows
    length = int(median(map(len, probe.prompts))) + probe.tokens // 2
    length = max(1, min(length, target.facts.max_positions - max(ROWS)))
    text = [token for prompt in probe.prompts for token in prompt]
    ids_BT = torch.tensor([(text * (1 + length // len(text)))[:length]], device=target.device).expand(b, -1)
    cache = target.new_cache(b, length + max(ROWS))
    target.forward(ids_BT, torch.arange(length, device=target.device).expand(b, -1), cache=cache)
    cache.commit(torch.full((b,), length, device=target.device))

    @torch.no_grad()
    def run(kind: str, rows: int) -> None:
        depths_M = (
            torch.arange(rows, device=target.device) if kind == "chain" else torch.ones(rows, device=target.device)
        )
        see_BMM = None
        if kind == "tree":  # all nodes are children of the anchor
            depths_M[0] = 0
            see_BMM = torch.eye(rows, dtype=torch.bool, device=target.device).repeat(b, 1, 1)
            see_BMM[:, :, 0] = True
        row_BM = ids_BT[:, :1].expand(b, rows)
        at_BM = (length + depths_M.long()).expand(b, rows)
        out = target.forward(row_BM, at_BM, cache=cache, see_BTA=see_BMM, taps=taps)
        target.head(out.last_hidden_BTD).argmax(-1).tolist()

    return run


def probe_threads(probe: Probe, taps: Sequence[int]) -> int:
    """The number of threads with which a plain step and a verification of five rows take least time together; more
    threads only where they save 5 % over fewer."""
    wanted = probe.threads
    if wanted is None:
        wanted = tuple(n for n in (1 << i for i in range(10)) if n <= usable_cores())
    if probe.target.device.type != "cpu" or len(wanted) == 1:
        return torch.get_num_threads() if probe.target.device.type != "cpu" else wanted[0]
    run, times = passes(probe, taps), dict[int, list[float]]()
    for _ in probe.laps("threads", LEAST):
        for n in sorted(wanted):
            torch.set_num_threads(n)
            spent = seconds_of(probe.target, lambda: (run("chain", 1), run("chain", 5)))
            times.setdefault(n, []).append(spent)
    best = min(wanted)
    for n in sorted(wanted):
        if median(times[n]) < 0.95 * median(times[best]):
            best = n
    return best


def probe_verify(probe: Probe, taps: Sequence[int]) -> dict[str, dict[int, float]]:
    """c(M, batch), seconds: medians of interleaved repeats, in rotating order."""
    run, times = passes(probe, taps), dict[tuple[str, int], list[float]]()
    points = [(kind, rows) for rows in ROWS for kind in ("chain", "tree")]
    for lap in probe.laps("verify", LEAST):
        for kind, rows in points[lap % len(points) :] + points[: lap % len(points)]:
            spent = seconds_of(probe.target, lambda kind=kind, rows=rows: run(kind, rows))  # type: ignore[misc]
            times.setdefault((kind, rows), []).append(spent)
    return {kind: {rows: median(times[kind, rows]) for rows in ROWS} for kind in ("chain", "tree")}


def probe_drafts(probe: Probe, drafter: Any, verify: dict[str, dict[int, float]]) -> tuple[Costs, Chances, Recorder]:
    """Acceptance by depth and rank on chains, and what drafting, building and committing cost."""
    limits = [n for n in (drafter.max_depth, drafter.parallel if drafter.parallel > 1 else None) if n is not None]
    depth = min([probe.depth, *limits])
    recorder, lanes = Recorder(drafter), Recorder(drafter, counting=False)
    chain, tree, plain = Stats(requests=0), Stats(requests=0), Stats(requests=0)
    plain_steps = 0
    for _ in probe.laps("accept", 2):
        chain += probe.run(probe.batch(), recorder, DecodeConfig(k=depth))[0]
    chances = acceptance(recorder.tried, recorder.ranks, depth, RANKS)
    levels = min(3, depth)
    for _ in probe.laps("trees", 2):
        ids = probe.batch()
        for n in LANES:
            paths = tuple((r, *[0] * d) for d in range(levels) for r in range(n))
            tree += probe.run(ids, lanes, DecodeConfig(k=levels, tree="static", nodes=n * levels, choices=paths), 12)[0]
        stats, steps = probe.run(ids, None, None, 12)
        plain, plain_steps = plain + stats, plain_steps + steps
    times = lanes.times | {1: recorder.times[1] + lanes.times[1]}
    costs = Costs(
        verify,
        start=median([*recorder.times[0], *lanes.times[0]]),
        extend={n: median(spent) for n, spent in sorted(times.items()) if n and spent},
        build={
            "chain": max(0.0, chain.seconds["draft"] - recorder.spent) / (recorder.steps * depth),
            "tree": max(0.0, tree.seconds["draft"] - lanes.spent) / (lanes.steps * levels),
        },
        commit={
            "plain": plain.seconds["commit"] / plain_steps,
            "chain": chain.seconds["commit"] / recorder.steps,
            "tree": tree.seconds["commit"] / lanes.steps,
        },
        batch=probe.rows,
    )
    return costs, chances, recorder
