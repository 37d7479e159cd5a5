"""Committing tokens: the one function that plain and speculative decoding share.

`Request.commit` takes the tokens of one step in order and decides, token by token, what counts: end of sequence, stop
ids, stop strings across token borders, the budget. What follows a stop inside an accepted block is dropped and counted
nowhere. Text is decoded without splitting characters, and held back while it may be the beginning of a stop string.
Tests: tests/test_commit.py.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, fields
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from ..kernels import rng
from ..losses.probs import SamplingParams
from .grammar import Guide, guide_of

STAGES = ("prefill", "draft", "verify", "commit")


@dataclass
class Stats:
    """Counts of one request, trimmed at its stop; they add up over requests (`+`).

    `reused`: tokens of the prompt whose keys and values were known from earlier requests (inference/prefixes.py).
    `committed` tokens, of which one per request comes from the prefill and the others from `verifies` passes of the
    target; `accepted_hist[j]` verifications that kept j drafted tokens; `tried[d]` and `accepted[d]` (d = 0 is depth 1):
    verifications that reached depth d + 1 with a candidate there, and kept one; `ranks[d][r]`: kept the r-th sibling.
    `seconds`: wall time by stage, divided evenly among the rows of a batch. `rule`: the verifier that was used.
    `step`: where steps ran: host, device (the last one unread), graph (that, as a CUDA graph); a GPU's fall-back with why.
    """

    requests: int = 1
    prompt_tokens: int = 0
    reused: int = 0
    committed: int = 0
    from_draft: int = 0
    verifies: int = 0
    drafted: int = 0
    accepted_hist: list[int] = field(default_factory=list)
    tried: list[int] = field(default_factory=list)
    accepted: list[int] = field(default_factory=list)
    ranks: list[list[int]] = field(default_factory=list)
    seconds: dict[str, float] = field(default_factory=lambda: dict.fromkeys(STAGES, 0.0))
    rule: str = "plain"
    step: str = "host"

    @property
    def tau(self) -> float:
        """Tokens per verification, the target's own token included (NaN without a verification)."""
        return (self.committed - self.requests) / self.verifies if self.verifies else float("nan")

    @property
    def alpha(self) -> list[float]:
        """Conditional acceptance by depth: of the verifications that reached a depth, the share that kept a token."""
        return [a / t if t else float("nan") for a, t in zip(self.accepted, self.tried, strict=True)]

    @property
    def seconds_total(self) -> float:
        """Wall time of all stages."""
        return sum(self.seconds.values())

    def __add__(self, other: Stats) -> Stats:
        return Stats(
            requests=self.requests + other.requests,
            prompt_tokens=self.prompt_tokens + other.prompt_tokens,
            reused=self.reused + other.reused,
            committed=self.committed + other.committed,
            from_draft=self.from_draft + other.from_draft,
            verifies=self.verifies + other.verifies,
            drafted=self.drafted + other.drafted,
            accepted_hist=_sum(self.accepted_hist, other.accepted_hist),
            tried=_sum(self.tried, other.tried),
            accepted=_sum(self.accepted, other.accepted),
            ranks=[
                _sum(a, b)
                for a, b in zip(_pad(self.ranks, other.ranks, []), _pad(other.ranks, self.ranks, []), strict=True)
            ],
            seconds={s: self.seconds[s] + other.seconds[s] for s in STAGES},
            rule=self.rule if self.rule == other.rule or other.rule == "plain" else other.rule,
            step=_steps(self, other),
        )

    def record(self, kept: int, path_ranks: Sequence[int], tested: bool, nodes: int) -> None:
        """Count one verification: `path_ranks` = sibling rank of each accepted node, `kept` tokens committed of it
        (accepted ones first, then the target's), `tested`: the walk ended in a rejection; `nodes` were drafted."""
        accepted = min(kept, len(path_ranks))
        self.verifies += 1
        self.drafted += nodes
        self.from_draft += accepted
        _count(self.accepted_hist, accepted)
        for d in range(accepted):
            _count(self.tried, d)
            _count(self.accepted, d)
            while len(self.ranks) <= d:
                self.ranks.append([])
            _count(self.ranks[d], path_ranks[d])
        if tested and kept > len(path_ranks):
            _count(self.tried, accepted)
            _count(self.accepted, accepted, 0)


def _steps(a: Stats, b: Stats) -> str:
    """Where the steps of both ran, each said once."""
    return "; ".join(dict.fromkeys(part for x in (a, b) if x.requests for part in x.step.split("; "))) or b.step


def _count(counts: list[int], index: int, by: int = 1) -> None:
    counts.extend([0] * (index + 1 - len(counts)))
    counts[index] += by


def _pad(a: list[Any], b: list[Any], filler: Any) -> list[Any]:
    return a + [filler] * (len(b) - len(a))


def _sum(a: list[int], b: list[int]) -> list[int]:
    return [x + y for x, y in zip(_pad(a, b, 0), _pad(b, a, 0), strict=True)]


@dataclass
class Passes:
    """Forward passes that one request of a denoiser took part in, by kind: `prefill` (the prompt), `denoise` (a fused
    write of a finished block counts here), `kv_only` (nothing but a write), `verify` (by the model's own block size 1).
    `branches`: canvases beyond the first that ran beside it in a batch."""

    prefill: int = 0
    denoise: int = 0
    kv_only: int = 0
    verify: int = 0
    branches: int = 0

    @property
    def forwards(self) -> int:
        """What tokens per forward divides by: not the prompt's, nor mere writes, which are listed apart; a branch counts
        as a pass (inference/diffusion_figures.py, COUNTING)."""
        return self.denoise + self.verify + self.branches

    def __add__(self, other: Passes) -> Passes:
        return Passes(*(getattr(self, f.name) + getattr(other, f.name) for f in fields(self)))


@dataclass(frozen=True)
class Event:
    """What one step added to one request: `text` is final (never revised by later events), and may lag behind `ids`.
    `step` 0 is the prefill. `stop_reason`: "eos", "stop_id", "stop_string", "length", "grammar" (it can say no more) or
    "grammar_limit" (it became too large to follow) in the last event, else None."""

    row: int
    step: int
    ids: list[int]
    text: str
    from_draft: list[bool]
    stop_reason: str | None


@dataclass(frozen=True)
class Result:
    """One finished request. `ids` include the end-of-sequence or stop id that ended it, `text` does not; it is cut
    before a stop string. `from_draft`: per id, whether a drafted token was accepted there. `logprobs`: of the model's
    own distribution (no temperature, no truncation), None unless asked for; `logits`: [ids, V] rows that the ids were
    chosen from, None unless asked for. Of a denoiser, else None: `passes`; `order`, per id the number of the denoising
    pass that decided it (0: the prompt's)."""

    ids: list[int]
    text: str
    stop_reason: str
    from_draft: list[bool]
    logprobs: list[float] | None
    stats: Stats
    logits: Tensor | None = None
    passes: Passes | None = None
    order: list[int] | None = None


class Detokenizer:
    """Text of ids as they come, whole characters only."""

    def __init__(self, tokenizer: Any) -> None:
        self.tokenizer = tokenizer
        self.ids: list[int] = []
        self.start = 0  # decoding restarts here, a little before what is new: tokens join differently at a text's start
        self.done = 0

    def _new(self) -> str:
        before = self.tokenizer.decode(self.ids[self.start : self.done], skip_special_tokens=True)
        return self.tokenizer.decode(self.ids[self.start :], skip_special_tokens=True)[len(before) :]

    def push(self, token: int) -> str:
        """The text that this token completes; empty while a character is unfinished."""
        self.ids.append(token)
        text = self._new()
        if not text or text.endswith("\ufffd"):
            return ""
        self.start, self.done = self.done, len(self.ids)
        return text

    def flush(self) -> str:
        """What is left, unfinished characters as replacement marks."""
        text = self._new()
        self.start = self.done = len(self.ids)
        return text


class StopStrings:
    """Finds the first stop string in a growing text, holding back what may yet become one."""

    def __init__(self, strings: Sequence[str]) -> None:
        self.strings = tuple(strings)
        self.held = ""

    def push(self, text: str) -> tuple[str, bool]:
        """(text that is certain, whether a stop string was found: it and what follows is dropped)."""
        self.held += text
        found = [at for at in (self.held.find(s) for s in self.strings) if at >= 0]
        if found:
            out, self.held = self.held[: min(found)], ""
            return out, True
        keep = 0
        for s in self.strings:
            longest = min(len(s) - 1, len(self.held))
            keep = max(keep, next((n for n in range(longest, 0, -1) if self.held.endswith(s[:n])), 0))
        cut = len(self.held) - keep
        out, self.held = self.held[:cut], self.held[cut:]
        return out, False

    def release(self) -> str:
        """Give up waiting: the text held back."""
        out, self.held = self.held, ""
        return out


class Request:
    """One prompt being answered: its parameters, its tokens, why it stopped, its counts."""

    def __init__(
        self,
        row: int,
        prompt: Sequence[int],
        params: SamplingParams,
        eos_ids: Sequence[int],
        tokenizer: Any,
        live: bool,
    ) -> None:
        """`live`: text is wanted with every event, not only at the end."""
        if params.stop_strings and tokenizer is None:
            raise ValueError("stop_strings need a tokenizer, and this target has none: use stop_ids")
        self.row = row
        self.prompt = list(prompt)
        self.params = params
        self.model_eos_ids = tuple(eos_ids)
        self.eos_ids = frozenset(() if params.ignore_eos else eos_ids)
        self.stop_ids = frozenset(params.stop_ids)
        self.seed = rng.signed(rng.fresh_seed() if params.seed is None else params.seed)
        self.tokenizer = tokenizer
        self.detokenizer = Detokenizer(tokenizer) if tokenizer is not None and (live or params.stop_strings) else None
        self.stops = StopStrings(params.stop_strings)
        self.ids: list[int] = []
        self.from_draft: list[bool] = []
        self.logprobs: list[float] = []
        self.top_logprobs: list[list[tuple[int, float]]] = []  # per token (id, log-probability), best first
        self.logits: list[Tensor] = []
        self.text = ""
        self.stop_reason: str | None = None
        self.steps = 0
        self.stats = Stats(prompt_tokens=len(self.prompt))

    @cached_property
    def guide(self) -> Guide | None:
        """Where the answer stands in its grammar; None without one. Made where it is first asked for."""
        grammar = self.params.grammar
        return None if grammar is None else guide_of(self.tokenizer, self.model_eos_ids, grammar)

    def commit(self, tokens: Sequence[int], accepted: int) -> Event:
        """Take the tokens of one step, of which the first `accepted` were drafted, until one of them ends the answer."""
        text, first = "", len(self.ids)
        for i, token in enumerate(tokens):
            if self.stop_reason is not None:
                break
            self.ids.append(token)
            self.from_draft.append(i < accepted)
            if token in self.eos_ids:
                self.stop_reason = "eos"
            elif token in self.stop_ids:
                self.stop_reason = "stop_id"
            elif self.guide is not None:
                self.stop_reason = self.guide.take(token)
            if self.stop_reason not in ("eos", "stop_id") and self.detokenizer is not None:
                text += self._take(self.detokenizer.push(token))
            if self.stop_reason is None and len(self.ids) >= self.params.max_new_tokens:
                self.stop_reason = "length"
        if self.stop_reason is not None and self.stop_reason != "stop_string" and self.detokenizer is not None:
            text += self._take(self.detokenizer.flush()) + self.stops.release()
        self.text += text
        event = Event(self.row, self.steps, self.ids[first:], text, self.from_draft[first:], self.stop_reason)
        self.steps += 1
        self.stats.committed = len(self.ids)
        return event

    def _take(self, text: str) -> str:
        """Certain text, with stop strings looked for once the minimal length is reached."""
        if not self.stops.strings:
            return text
        if len(self.ids) <= self.params.min_new_tokens and self.stop_reason is None:
            return text
        out, found = self.stops.push(text)
        if found:
            self.stop_reason = "stop_string"
        return out

    def take_logits(self, logits_XV: Tensor, ids: Sequence[int], tokens: int, keep: bool) -> None:
        """Note what was asked for of the rows that the newest `ids` were chosen from; ids from `tokens` on do not exist."""
        if self.params.logprobs:
            x_XV = logits_XV if logits_XV.dtype == torch.float64 else logits_XV.float()
            log_XV = x_XV - x_XV.logsumexp(-1, keepdim=True)
            ids_X1 = torch.tensor(ids, device=x_XV.device)[:, None]
            self.logprobs += log_XV.gather(1, ids_X1)[:, 0].tolist()
            if n := min(self.params.top_logprobs, tokens):
                best = log_XV[:, :tokens].topk(n)
                for likely, logs in zip(best.indices.tolist(), best.values.tolist(), strict=True):
                    self.top_logprobs.append(list(zip(likely, logs, strict=True)))
        if keep:
            self.logits += list(logits_XV.clone())

    def result(
        self, logits: Tensor | None = None, passes: Passes | None = None, order: list[int] | None = None
    ) -> Result:
        """The finished request."""
        assert self.stop_reason is not None
        text = self.text
        if self.detokenizer is None and self.tokenizer is not None:
            ids = self.ids[:-1] if self.stop_reason in ("eos", "stop_id") else self.ids
            text = self.tokenizer.decode(ids, skip_special_tokens=True)
        logprobs = self.logprobs if self.params.logprobs else None
        return Result(self.ids, text, self.stop_reason, self.from_draft, logprobs, self.stats, logits, passes, order)
