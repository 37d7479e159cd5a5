"""Answers that spell what a grammar allows: JSON, JSON of a schema, a regular expression, any grammar of llguidance.

`SamplingParams.grammar` names the grammar as text; the functions below make such texts. What the grammar forbids behind
a token is banned like any other token that may not be drawn (`losses/probs.py`, History), in the target's p and, where a
builder knows the path that leads to a node, in the drafter's q. So p is what plain constrained decoding draws from, at
every node of a chain or tree, and speculation is as exact as it is without a grammar: a drafted token that the grammar
forbids has p = 0 and is rejected, and behind it nothing counts.

An answer ends where the grammar can say no more, also without an end-of-sequence token (`stop_reason` "grammar").

Install: pip install 'draftsmith[serve-grammar]' (llguidance). Test: pytest tests/test_grammar.py
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Any

import numpy as np
import torch
from torch import Tensor

KEPT = 32  # compiled grammars


def _library() -> Any:
    try:
        import llguidance
        import llguidance.hf
    except ImportError:
        raise ValueError("grammar: this needs llguidance: pip install 'draftsmith[serve-grammar]'") from None
    return llguidance


def json_grammar(schema: Mapping[str, Any]) -> str:
    """The grammar of JSON that a schema describes; {"type": "object"} is any object. Raises ValueError for one that is nested
    too deeply."""
    try:
        text = json.dumps(schema)
    except RecursionError:
        raise ValueError("grammar: this schema is nested too deeply") from None
    return _library().LLMatcher.grammar_from_json_schema(text)


def regex_grammar(pattern: str) -> str:
    """The grammar of what a regular expression (Rust's syntax, no look-around) matches as a whole."""
    return _library().LLMatcher.grammar_from_regex(pattern)


@lru_cache(maxsize=4)
def _tokenizer(tokenizer: Any, eos_ids: tuple[int, ...]) -> Any:
    library = _library()
    if not getattr(tokenizer, "is_fast", False):
        raise ValueError("grammar: this target has no fast tokenizer, whose tokens could be spelled")
    return library.hf.from_tokenizer(tokenizer, eos_token=list(eos_ids) or None)


@lru_cache(maxsize=KEPT)
def _compiled(tokenizer: Any, eos_ids: tuple[int, ...], grammar: str) -> Any:
    matcher = _library().LLMatcher(_tokenizer(tokenizer, eos_ids), grammar, log_level=0)
    if matcher.is_error():
        raise ValueError(f"grammar: {matcher.get_error()[:500]}")
    return matcher


def check_grammar(tokenizer: Any, eos_ids: Sequence[int], grammar: str) -> None:
    """ValueError, which begins with "grammar:", for one that cannot be followed with this tokenizer."""
    _compiled(tokenizer, tuple(eos_ids), grammar)


def guide_of(tokenizer: Any, eos_ids: Sequence[int], grammar: str) -> Guide:
    """A guide at the grammar's beginning. Raises ValueError as `check_grammar` does."""
    return Guide(_compiled(tokenizer, tuple(eos_ids), grammar).deep_copy())


class Guide:
    """Where one answer stands in its grammar, and what may follow there and behind drafted tokens."""

    def __init__(self, matcher: Any) -> None:
        self.matcher = matcher
        self.path: list[int] = []  # drafted tokens that the matcher has read beyond the answer
        self.known: dict[tuple[int, ...], Tensor | None] = {}

    def banned(self, path: Sequence[int]) -> Tensor | None:
        """bool [tokens], True = may not follow the answer and these drafted tokens; None where they break the grammar."""
        key = tuple(path)
        if key not in self.known:
            self.known[key] = self._mask() if self._move(key) else None
        return self.known[key]

    def take(self, token: int) -> str | None:
        """Read a token of the answer. Why the answer ends with it: "grammar", it is complete; "grammar_limit", the
        matcher gave up; else None."""
        self._move(())
        self.known.clear()
        read = self.matcher.consume_token(token)
        if not read or self.matcher.is_error():
            return "grammar_limit"
        return "grammar" if self.matcher.is_stopped() else None

    def _move(self, path: tuple[int, ...]) -> bool:
        """Go to a path, by way of what it shares with the last one; False if the grammar forbids it."""
        shared = next((i for i, (x, y) in enumerate(zip(self.path, path, strict=False)) if x != y), None)
        shared = min(len(self.path), len(path)) if shared is None else shared
        if back := len(self.path) - shared:
            self.matcher.rollback(back)
            del self.path[shared:]
        rest = list(path[shared:])
        read = self.matcher.try_consume_tokens(rest) if rest else 0
        self.path += rest[:read]
        return read == len(rest)

    def _mask(self) -> Tensor:
        bits = np.frombuffer(self.matcher.compute_bitmask(), dtype=np.uint8)
        return torch.from_numpy(np.unpackbits(bits, bitorder="little") == 0)
