"""Which token id stands for "not known yet": an id of the target that no text contains, with a usable embedding.

Drafters that read mask tokens through the target's frozen embedding see whatever that row holds, and an id that occurs
in texts would mean two things. So the id is, in this order,

    1. the tokenizer's own mask token;
    2. the first embedding row that no token has (vocabularies are padded to round sizes; what DFlash's own models use);
    3. the first special token that is neither start, end, padding, separator nor unknown, nor stands in the chat template
       (reserved tokens, code and vision markers);
    4. the unknown token, of a tokenizer that spells every text without it;

and in each case its row must be a usable one: finite, and not far shorter than the others (rows that were never
initialised are zero). Where nothing is left, the user names an id.

Test: pytest tests/test_mask_id.py
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from .facts import has_values

LEAST_NORM = 0.01  # of the median row: rows that no training touched are zeros or next to it
STRANGE = "".join(map(chr, [*range(9, 14), *range(32, 127), *range(160, 1024)])) + "\u65e5\u672c\u8a9e\U0001f642\ufffd"


def choose_mask_id(target: Any, wanted: int | None, method: str) -> int:
    """The id by the rule above, or `wanted` if it can serve.

    Raises ValueError when the target has no such id, or `wanted` is no row of the embedding, has an unusable row, or
    ends answers.
    """
    facts = target.facts
    norm_V = target.embed_weight.detach().float().norm(dim=1)
    usable_V = torch.ones(facts.vocab, dtype=torch.bool)
    if has_values(target.embed_weight):
        usable_V = norm_V.isfinite() & (norm_V > LEAST_NORM * norm_V[norm_V.isfinite()].median())
    if wanted is not None:
        if not 0 <= wanted < facts.vocab:
            raise ValueError(f"{method}: mask_id {wanted} is no id of {facts.name}, which has 0..{facts.vocab - 1}")
        if wanted in facts.eos_ids:
            raise ValueError(f"{method}: mask_id {wanted} ends answers of {facts.name}; name an unused id")
        if not bool(usable_V[wanted]):
            raise ValueError(f"{method}: the embedding row of mask_id {wanted} was never initialised; name another id")
        return wanted
    for found in unused_ids(target):
        if 0 <= found < facts.vocab and found not in facts.eos_ids and bool(usable_V[found]):
            return found
    raise ValueError(
        f"{method}: {facts.name} has no unused id with an initialised embedding to stand for masks; name one that your "
        "texts hardly contain: drafter.mask_id=ID"
    )


def unused_ids(target: Any) -> Iterator[int]:
    """Candidates in the order of the rule, usable or not."""
    tokenizer = target.tokenizer
    if (mask_id := getattr(tokenizer, "mask_token_id", None)) is not None:
        yield int(mask_id)
    yield from (int(i) for i in target.banned_ids)
    names = ("bos", "eos", "pad", "sep", "cls", "unk")
    used = {getattr(tokenizer, f"{name}_token_id", None) for name in names}
    template = str(getattr(tokenizer, "chat_template", None) or "")
    for token_id, token in sorted(getattr(tokenizer, "added_tokens_decoder", {}).items()):
        if token.special and token_id not in used and token.content not in template:
            yield int(token_id)
    unknown = getattr(tokenizer, "unk_token_id", None)
    others = {getattr(tokenizer, f"{name}_token_id", None) for name in names if name != "unk"}
    if unknown is not None and unknown not in others and str(tokenizer.unk_token) not in template:
        spelled = tokenizer(STRANGE, add_special_tokens=False)["input_ids"]
        if unknown not in spelled:
            yield int(unknown)


def register_mask_id(module: torch.nn.Module, wanted: int | None, vocab: int, method: str) -> None:
    """Give `module` its buffer `mask_id` (int64 []; -1 until it is chosen), which checkpoints and exports carry."""
    if wanted is not None and not 0 <= wanted < vocab:
        raise ValueError(f"{method}: mask_id {wanted} is no id of the target, which has 0..{vocab - 1}")
    module.register_buffer("mask_id", torch.tensor(-1 if wanted is None else wanted))
