"""One function from logits to probabilities, for the baseline, the verification, the bonus token and the drafter's q.

Order: penalties, bans, temperature, top-k, top-p (of the mass that top-k left), min-p; then softmax in fp32 (fp64 for
fp64 logits). Temperature 0 is a one-hot at the largest logit, the lowest index among equals. Wherever a rank decides,
equal values rank by index, lower first. Tests: tests/test_probs.py.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace

import torch
from torch import Tensor

from ..kernels.rng import draw as draw

_NEVER = float("-inf")
BLOCK = 256  # columns whose maximum is one vectorised reduction; widths of vocabularies are multiples as a rule


@dataclass(frozen=True)
class SamplingParams:
    """How one request samples and when it stops.

    Args:
        temperature: 0 = greedy; finite, not negative.
        top_k: keep this many most likely tokens; 0 = all.
        top_p: keep the fewest most likely tokens that hold this mass; 1 = all.
        min_p: drop tokens less likely than this share of the most likely one; 0 = none.
        repetition_penalty: divides positive and multiplies negative logits of tokens seen in prompt or answer; 1 = off.
        presence_penalty: subtracted once from the logits of tokens in the answer.
        frequency_penalty: subtracted per occurrence in the answer.
        min_new_tokens: end-of-sequence and stop ids cannot be drawn before this many tokens.
        max_new_tokens: budget of the answer.
        seed: the request's own stream of random numbers; none = fresh from the system.
        stop_ids: token ids that end the answer, beside the target's own end-of-sequence ids.
        stop_strings: texts that end the answer; the text is cut before the match.
        ignore_eos: the target's end-of-sequence ids are tokens like others.
        logprobs: also return the model's own log-probability of every token.
        top_logprobs: with `logprobs`, also those of this many most likely tokens in the place of each.
        grammar: what the answer must spell (inference/grammar.py makes such texts); none = anything.
    """

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    min_new_tokens: int = 0
    max_new_tokens: int = 128
    seed: int | None = None
    stop_ids: tuple[int, ...] = ()
    stop_strings: tuple[str, ...] = ()
    ignore_eos: bool = False
    logprobs: bool = False
    top_logprobs: int = 0
    grammar: str | None = None

    def __post_init__(self) -> None:
        checks = [
            ("temperature", math.isfinite(self.temperature) and self.temperature >= 0, "a finite number >= 0"),
            ("top_k", 0 <= self.top_k <= 2**31, "an integer in [0, 2^31] (0 = off)"),
            ("top_p", 0 < self.top_p <= 1, "in (0, 1]"),
            ("min_p", 0 <= self.min_p <= 1, "in [0, 1]"),
            # Far beyond use; what would make a float32 logit infinite, and its probability no number, is further still.
            ("repetition_penalty", 1e-6 <= self.repetition_penalty <= 1e6, "in [1e-6, 1e6]"),
            ("presence_penalty", abs(self.presence_penalty) <= 1e9, "in [-1e9, 1e9]"),
            ("frequency_penalty", abs(self.frequency_penalty) <= 1e9, "in [-1e9, 1e9]"),
            ("max_new_tokens", self.max_new_tokens >= 1, "an integer >= 1"),
            ("min_new_tokens", 0 <= self.min_new_tokens <= self.max_new_tokens, "in [0, max_new_tokens]"),
            (
                "top_logprobs",
                self.top_logprobs >= 0 and (self.logprobs or not self.top_logprobs),
                ">= 0, with logprobs",
            ),
            ("stop_strings", all(self.stop_strings), "non-empty texts"),
            (
                "min_new_tokens",
                self.grammar is None or not self.min_new_tokens,
                "0 beside a grammar, which says its end",
            ),
        ]
        for name, good, allowed in checks:
            if not good:
                raise ValueError(f"sampling: {name}={getattr(self, name)!r}, must be {allowed}")


@dataclass(frozen=True)
class ParamRows:
    """The sampling parameters of R rows as tensors [R], with what no row uses switched off once for all."""

    temperature_R: Tensor  # float64
    top_k_R: Tensor  # int64
    top_p_R: Tensor
    min_p_R: Tensor
    repetition_R: Tensor
    presence_R: Tensor
    frequency_R: Tensor
    hot: bool  # some row samples
    cold: bool  # some row is greedy
    truncates: bool  # some row uses top-k or top-p
    min_p: bool
    penalises: bool
    paths: bool  # of some row, what may follow depends on the tokens before it: penalties, a grammar
    exhaustive: bool = False  # truncation looks at all logits, instead of asking the device whether the largest suffice

    @staticmethod
    def pack(params: Sequence[SamplingParams], device: torch.device | str = "cpu") -> ParamRows:
        """One row per request."""

        def column(name: str, dtype: torch.dtype = torch.float64) -> Tensor:
            return torch.tensor([getattr(p, name) for p in params], dtype=dtype, device=device)

        penalises = any(
            p.repetition_penalty != 1 or p.presence_penalty != 0 or p.frequency_penalty != 0 for p in params
        )
        return ParamRows(
            temperature_R=column("temperature"),
            top_k_R=column("top_k", torch.int64),
            top_p_R=column("top_p"),
            min_p_R=column("min_p"),
            repetition_R=column("repetition_penalty"),
            presence_R=column("presence_penalty"),
            frequency_R=column("frequency_penalty"),
            hot=any(p.temperature > 0 for p in params),
            cold=any(p.temperature == 0 for p in params),
            truncates=any(p.temperature > 0 and (p.top_k > 0 or p.top_p < 1) for p in params),
            min_p=any(p.temperature > 0 and p.min_p > 0 for p in params),
            penalises=penalises,
            paths=penalises or any(p.grammar is not None for p in params),
        )

    def repeat(self, times: int) -> ParamRows:
        """Rows 0 0 0 1 1 1 ...: each row `times` times, for its tree nodes."""
        if times == 1:
            return self
        names = [f.name for f in fields(self) if f.name.endswith("_R")]
        return replace(self, **{n: getattr(self, n).repeat_interleave(times) for n in names})


@dataclass
class History:
    """What penalties and bans of R rows depend on; a part that no row needs is None."""

    tokens: int | None = None  # ids from here on do not exist for the tokenizer and are never drawn
    prompt_RV: Tensor | None = None  # bool, the token stands in the prompt
    counts_RV: Tensor | None = None  # int, occurrences in the answer so far
    banned_RV: Tensor | None = (
        None  # bool, may not be drawn now (end of sequence before the minimal length, what a grammar forbids)
    )


def adjust(logits_RV: Tensor, rows: ParamRows, history: History | None, ids_V: Tensor | None = None) -> Tensor:
    """Logits after penalties and bans; untouched (same dtype) where there are none.

    `ids_V`: the target id of each column, where the columns are a draft vocabulary; None = column c is id c.
    """

    def columns(x_RV: Tensor) -> Tensor:
        return x_RV if ids_V is None else x_RV[:, ids_V]

    if history is None:
        return logits_RV
    x_RV = logits_RV
    if rows.penalises and history.counts_RV is not None and history.prompt_RV is not None:
        x_RV = x_RV if x_RV.dtype == torch.float64 else x_RV.float()
        counts_RV = columns(history.counts_RV)
        seen_RV = columns(history.prompt_RV) | (counts_RV > 0)
        penalty_R1 = rows.repetition_R.to(x_RV.dtype)[:, None]
        x_RV = torch.where(seen_RV, torch.where(x_RV > 0, x_RV / penalty_R1, x_RV * penalty_R1), x_RV)
        x_RV = x_RV - rows.presence_R.to(x_RV.dtype)[:, None] * (counts_RV > 0)
        x_RV = x_RV - rows.frequency_R.to(x_RV.dtype)[:, None] * counts_RV
    if history.banned_RV is not None:
        x_RV = x_RV.masked_fill(columns(history.banned_RV), _NEVER)
    if history.tokens is not None:
        if ids_V is not None:
            x_RV = x_RV.masked_fill(ids_V >= history.tokens, _NEVER)
        elif history.tokens < x_RV.shape[-1]:
            x_RV = x_RV.clone() if x_RV is logits_RV else x_RV
            x_RV[:, history.tokens :] = _NEVER
    return x_RV


def top(logits_RV: Tensor, rows: ParamRows, history: History | None = None, ids_V: Tensor | None = None) -> Tensor:
    """int64 [R] the column of the largest adjusted logit, the lowest index among equals. No softmax."""
    if (
        history is not None
        and ids_V is None
        and history.banned_RV is None
        and history.tokens is not None
        and not rows.penalises
    ):
        return _first_top(logits_RV[:, : history.tokens])  # a view instead of a masked copy
    return _first_top(adjust(logits_RV, rows, history, ids_V))


def _first_top(x_RV: Tensor) -> Tensor:
    """argmax; PyTorch's is several times slower in 16 bits than after widening, which is exact, and that slower than a
    vectorised maximum per block, whose first best block is then looked into."""
    if x_RV.dtype in (torch.bfloat16, torch.float16) and x_RV.device.type == "cpu" and x_RV.shape[-1] % BLOCK == 0:
        x_RJX = x_RV.unflatten(-1, (-1, BLOCK))
        block_R1 = x_RJX.amax(-1).float().argmax(-1, keepdim=True)
        best_RX = x_RJX.take_along_dim(block_R1[..., None], -2).squeeze(-2)
        return block_R1.squeeze(-1) * BLOCK + best_RX.float().argmax(-1)
    return (x_RV.float() if x_RV.dtype in (torch.bfloat16, torch.float16) else x_RV).argmax(-1)


def probs(
    logits_RV: Tensor,
    params: SamplingParams | ParamRows,
    history: History | None = None,
    ids_V: Tensor | None = None,
) -> Tensor:
    """Probabilities [R, V] that the next token is drawn from, fp32 (fp64 for fp64 logits).

    A row with no token left (a draft vocabulary that is wholly banned) is all zeros.
    """
    if logits_RV.ndim != 2:
        raise ValueError(f"probs: logits of shape {tuple(logits_RV.shape)}, must be [rows, vocabulary]")
    rows = params
    if isinstance(rows, SamplingParams):
        rows = ParamRows.pack([rows], logits_RV.device).repeat(logits_RV.shape[0])
    x_RV = adjust(logits_RV, rows, history, ids_V)
    x_RV = x_RV if x_RV.dtype == torch.float64 else x_RV.float()
    greedy_RV = None
    if rows.cold:
        top_R1 = x_RV.argmax(-1, keepdim=True)
        greedy_RV = torch.zeros_like(x_RV).scatter_(1, top_R1, (x_RV.gather(1, top_R1) > _NEVER).to(x_RV.dtype))
        if not rows.hot:
            return greedy_RV
    best_R1 = x_RV.amax(-1, keepdim=True)
    p_RV = torch.softmax(_heated(x_RV, best_R1, rows), -1).masked_fill_(best_R1 == _NEVER, 0)
    return p_RV if greedy_RV is None else torch.where(rows.temperature_R[:, None] > 0, p_RV, greedy_RV)


def allowed(logits_RV: Tensor, rows: ParamRows, history: History | None = None) -> Tensor:
    """Adjusted logits, -inf where a token cannot be drawn: `probs` is the softmax of these over the temperature."""
    x_RV = adjust(logits_RV, rows, history)
    if not (rows.truncates or rows.min_p):
        return x_RV
    x_RV = x_RV if x_RV.dtype == torch.float64 else x_RV.float()
    return x_RV.masked_fill(_heated(x_RV, x_RV.amax(-1, keepdim=True), rows) == _NEVER, _NEVER)


def _heated(x_RV: Tensor, best_R1: Tensor, rows: ParamRows) -> Tensor:
    """Logits less their largest, over the temperature; -inf where they are cut."""
    heat_R1 = torch.where(rows.temperature_R > 0, rows.temperature_R, 1.0).to(x_RV.dtype)[:, None]
    heat_R1 = heat_R1.clamp(min=torch.finfo(x_RV.dtype).tiny)  # what float64 told from 0 need not be so here
    # The maximum goes first: a tiny temperature then gives large negative numbers, never inf - inf.
    x_RV = (x_RV - best_R1.masked_fill(best_R1 == _NEVER, 0)) / heat_R1
    if rows.truncates:
        x_RV = _truncate(x_RV, rows)
    if rows.min_p:
        floor_R1 = rows.min_p_R.to(x_RV.dtype).log()[:, None]
        x_RV = x_RV.masked_fill(x_RV < floor_R1, _NEVER)
    return x_RV


def _truncate(x_RV: Tensor, rows: ParamRows, window: int = 256) -> Tensor:
    """Top-k, then top-p of the mass left; `x_RV` has maximum 0. Looks at the `window` largest logits, at 16 times
    as many if that is too short, and sorts all of them only then."""
    size = x_RV.shape[1]
    on_R = (rows.temperature_R > 0) & ((rows.top_k_R > 0) | (rows.top_p_R < 1))
    limit_R = torch.where(rows.top_k_R > 0, rows.top_k_R, size).clamp(max=size)
    goal_R1 = rows.top_p_R[:, None]
    all_R = x_RV.exp().sum(-1, dtype=torch.float64)
    for width in (size,) if rows.exhaustive else (min(window, size), min(16 * window, size), size):
        best_Rw = x_RV.topk(width, dim=-1).values if width < size else x_RV.sort(dim=-1, descending=True).values
        inside_Rw = torch.arange(width, device=x_RV.device) < limit_R[:, None]
        mass_Rw = best_Rw.double().exp() * inside_Rw
        share_Rw = mass_Rw / torch.where(limit_R <= width, mass_Rw.sum(-1), all_R)[:, None]
        before_Rw = share_Rw.cumsum(-1) - share_Rw
        keep_R = (inside_Rw & ((before_Rw < goal_R1) | (goal_R1 >= 1)) & (best_Rw > _NEVER)).sum(-1).clamp(min=1)
        if width == size or bool((~on_R | (keep_R < width) | (limit_R <= width)).all()):
            break
    edge_R1 = best_Rw.gather(1, keep_R[:, None] - 1)
    keep_RV = x_RV >= edge_R1
    surplus_R = keep_RV.sum(-1) - keep_R
    if rows.exhaustive or bool((surplus_R[on_R] > 0).any()):  # equals at the edge: the first ones stay
        equal_RV = x_RV == edge_R1
        room_R1 = (equal_RV.sum(-1) - surplus_R)[:, None]
        keep_RV = (x_RV > edge_R1) | (equal_RV & (equal_RV.cumsum(-1) <= room_R1))
    return torch.where(keep_RV | ~on_R[:, None], x_RV, _NEVER)
