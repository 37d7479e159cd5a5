"""Two vocabularies: which tokens of one mean the same text as tokens of the other.

Token-level intersection (Timor et al., "Accelerating LLM Inference with Lossless Speculative Decoding Algorithms for
Heterogeneous Vocabularies", arXiv:2502.05202, section 4): a draft model with another tokenizer proposes only tokens that
both have. Its distribution over these, renormalised, is a proposal like any other, so that every verifier stays exact;
what the draft model cannot say costs acceptance alone.

Tokens are compared by the bytes they stand for: byte-level symbols, SentencePiece's space mark and its byte tokens are
undone. Special tokens are compared by name; the ends of text correspond to each other whatever their names.

Test: pytest tests/test_draft_model.py
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

SPACE_MARK = "▁"  # SentencePiece


@dataclass(frozen=True)
class Shared:
    """What a draft model's vocabulary has in common with a target's."""

    target_W: Tensor  # int64, target ids, ascending
    draft_W: Tensor  # int64, the draft model's id of each, distinct
    context_V: Tensor  # int64, per target id what the draft model reads in its place


def byte_symbols() -> dict[int, str]:
    """The printable stand-in of each byte in byte-level vocabularies."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in printable]
    return {byte: chr(byte) for byte in printable} | {byte: chr(256 + i) for i, byte in enumerate(others)}


def spellings(tokenizer: Any) -> dict[int, tuple[str, bytes]]:
    """Per id, ascending: kind (`special`, `byte` or `text`) and the bytes (of a special token: its name)."""
    vocabulary = tokenizer.get_vocab()
    added = tokenizer.added_tokens_decoder
    symbols = {symbol: byte for byte, symbol in byte_symbols().items()}
    byte_level = not any(SPACE_MARK in token for token, i in vocabulary.items() if i not in added)
    found: dict[int, tuple[str, bytes]] = {}
    for token, i in sorted(vocabulary.items(), key=lambda pair: pair[1]):
        if i in added:
            found[i] = ("special" if added[i].special else "text", token.encode())
        elif byte_level and all(symbol in symbols for symbol in token):
            found[i] = ("text", bytes(symbols[symbol] for symbol in token))
        elif not byte_level and len(token) == 6 and token.startswith("<0x") and token.endswith(">"):
            found[i] = ("byte", bytes([int(token[3:5], 16)]))
        else:
            found[i] = ("text", token.replace(SPACE_MARK, " ").encode())
    return found


def by_spelling(spelled: dict[int, tuple[str, bytes]]) -> dict[tuple[bool, bytes], int]:
    """(is special, bytes) -> the id that spells it: a token of text before a byte's stand-in, else the lowest."""
    found: dict[tuple[bool, bytes], int] = {}
    for i, (kind, spelled_bytes) in sorted(spelled.items(), key=lambda pair: (pair[1][0] == "byte", pair[0])):
        found.setdefault((kind == "special", spelled_bytes), i)
    return found


def intersect(target: Any, draft: Any) -> Shared:
    """The shared tokens of two models (`models.target.Target`, both).

    A target token that the draft model lacks is shown to it as the last token of its text in the draft's own
    tokenisation (one for one, so that positions stay aligned), or as its unknown or end token where there is no text.
    Raises ValueError when no token is shared.
    """
    ours, theirs = spellings(target.tokenizer), by_spelling(spellings(draft.tokenizer))
    vocab = target.facts.vocab
    same = {
        i: theirs[kind == "special", text] for i, (kind, text) in ours.items() if (kind == "special", text) in theirs
    }
    end, their_end = target.tokenizer.eos_token_id, draft.tokenizer.eos_token_id
    if end is not None and their_end is not None and end not in same and their_end not in same.values():
        same[end] = their_end
    # Of several spellings of one text the target writes its token, not the stand-ins of its bytes; else the lowest id.
    order = sorted(same, key=lambda i: (ours[i][0] == "byte", i))
    first = {same[i]: i for i in reversed(order)}
    pairs = sorted((i, their) for their, i in first.items())
    if not pairs:
        raise ValueError(
            f"the draft model's vocabulary shares no token with that of {target.facts.name}: it can propose nothing; "
            "take a draft model of a related tokenizer"
        )
    tokenizer = draft.tokenizer
    stand_in = next(
        (i for i in (tokenizer.unk_token_id, tokenizer.eos_token_id, tokenizer.bos_token_id) if i is not None), 0
    )
    context_V = torch.full((vocab,), stand_in, dtype=torch.int64)
    texts = {i: _text(text) for i, (kind, text) in ours.items() if i not in same and kind != "special"}
    texts = {i: text for i, text in texts.items() if text}
    if texts:
        encoded = tokenizer(list(texts.values()), add_special_tokens=False)["input_ids"]
        for i, ids in zip(texts, encoded, strict=True):
            context_V[i] = ids[-1] if ids else stand_in
    context_V[torch.tensor(list(same))] = torch.tensor(list(same.values()))
    target_W, draft_W = torch.tensor(pairs, dtype=torch.int64).unbind(1)
    return Shared(target_W.contiguous(), draft_W.contiguous(), context_V)


def _text(spelled: bytes) -> str:
    try:
        return spelled.decode()
    except UnicodeDecodeError:  # a part of a character
        return ""
