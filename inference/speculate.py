"""The decode loop of drafters: draft, verify, choose, commit. Plain decoding is the same loop without a draft.

    results = generate(target, prompts, SamplingParams(max_new_tokens=64), drafter, DecodeConfig(k=4))

The loop itself is the engine's (engine.py); here its requests come in closed batches of `max_rows`. A row that is done is
computed no more and reaches nobody; with `fixed_width` it stays, so that every pass of a batch has the same rows.
Which rules of acceptance keep the target's distribution is listed in inference/README.md. Tests:
tests/test_speculate.py, tests/test_sampling.py; benchmark: tests/bench/lossless.py.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch

from ..losses.probs import SamplingParams
from .commit import Event, Request, Result
from .decode import DecodeConfig, chain_width, depth_of, plan_of, refuse_rule, refuse_tree, rows_written, training_off
from .engine import Engine
from .grammar import check_grammar

__all__ = [
    "DecodeConfig",
    "Event",
    "Result",
    "chain_width",
    "check_prompt",
    "depth_of",
    "generate",
    "plan_of",
    "refuse_rule",
    "refuse_tree",
    "rows_written",
    "stream",
]


def generate(
    target: Any,
    prompts: Sequence[Sequence[int]],
    params: SamplingParams | Sequence[SamplingParams],
    drafter: Any = None,
    decode: DecodeConfig | None = None,
    *,
    on_event: Callable[[Event], None] | None = None,
) -> list[Result]:
    """Answer every prompt (token ids), in order. `drafter=None` = plain decoding.

    `params`: one for all, or one per prompt. `on_event` is called for every step of every row, with text. Raises
    ValueError for prompts and settings that do not fit the target or the drafter.
    """
    results: list[Result | None] = [None] * len(prompts)
    for event in _run(target, prompts, params, drafter, decode or DecodeConfig(), results, on_event is not None):
        if on_event is not None:
            on_event(event)
    return [r for r in results if r is not None]


def stream(
    target: Any,
    prompts: Sequence[Sequence[int]],
    params: SamplingParams | Sequence[SamplingParams],
    drafter: Any = None,
    decode: DecodeConfig | None = None,
) -> Iterator[Event]:
    """The same as `generate`, as events while they happen."""
    return _run(target, prompts, params, drafter, decode or DecodeConfig(), [None] * len(prompts), True)


def _run(
    target: Any,
    prompts: Sequence[Sequence[int]],
    params: SamplingParams | Sequence[SamplingParams],
    drafter: Any,
    decode: DecodeConfig,
    results: list[Result | None],
    live: bool,
) -> Iterator[Event]:
    each = [params] * len(prompts) if isinstance(params, SamplingParams) else list(params)
    if len(each) != len(prompts):
        raise ValueError(f"{len(each)} sampling parameters for {len(prompts)} prompts: give one, or one per prompt")
    for i, prompt in enumerate(prompts):
        check_prompt(target, i, prompt, each[i])
    for first in range(0, len(prompts), decode.max_rows):
        refuse_rule(drafter, decode, each[first : first + decode.max_rows])
    with training_off(drafter):
        for first in range(0, len(prompts), decode.max_rows):
            rows = range(first, min(first + decode.max_rows, len(prompts)))
            requests = [
                Request(i, prompts[i], each[i], target.facts.eos_ids, getattr(target, "tokenizer", None), live)
                for i in rows
            ]
            engine = Engine.closed(target, requests, drafter, decode)
            while engine.busy:
                yield from engine.step()
            for i, request in zip(rows, requests, strict=True):
                results[i] = request.result(torch.stack(request.logits) if decode.keep_logits else None)


def check_prompt(target: Any, i: int, prompt: Sequence[int], params: SamplingParams) -> None:
    facts = target.facts
    if not len(prompt):
        raise ValueError(f"prompt {i} is empty: give at least one token id (for example the beginning-of-text id)")
    if min(prompt) < 0 or max(prompt) >= facts.vocab:
        raise ValueError(f"prompt {i} has id {max(prompt)} or {min(prompt)}, the target has ids 0..{facts.vocab - 1}")
    strange = [x for x in params.stop_ids if not 0 <= x < facts.vocab]
    if strange:
        raise ValueError(f"stop_ids: {strange} are no ids of the target, which has 0..{facts.vocab - 1}")
    if params.grammar is not None:
        check_grammar(getattr(target, "tokenizer", None), facts.eos_ids, params.grammar)
    if len(prompt) + params.max_new_tokens > facts.max_positions:
        raise ValueError(
            f"prompt {i}: {len(prompt)} tokens and max_new_tokens={params.max_new_tokens} exceed the target's "
            f"{facts.max_positions} positions: shorten the prompt or lower max_new_tokens"
        )
