"""The rule by which a mask id is chosen, and what is refused.

pytest tests/test_mask_id.py
"""

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from draftsmith.models.mask_id import choose_mask_id, unused_ids
from draftsmith.models.target import Target


def fake(
    special: dict[int, str],
    rows: int = 20,
    tokens: int = 16,
    broken: tuple[int, ...] = (),
    template: str = "<s>{{ x }}",
    spells: bool = True,
    **named: Any,
) -> Any:
    """A target of `rows` embedding rows whose tokenizer has `tokens` tokens, `special` among them."""
    torch.manual_seed(0)
    weight_VD = torch.randn(rows, 8)
    weight_VD[list(broken)] = 0
    ids = {f"{name}_token_id": None for name in ("bos", "eos", "pad", "sep", "cls", "unk", "mask")} | named
    unknown = named.get("unk_token_id")

    class Tokenizer(SimpleNamespace):
        def __call__(self, text: str, add_special_tokens: bool) -> dict[str, list[int]]:
            return {"input_ids": [1, 2] if spells else [1, unknown]}

    tokenizer = Tokenizer(
        chat_template=template,
        unk_token=special.get(unknown),
        added_tokens_decoder={i: SimpleNamespace(content=name, special=True) for i, name in special.items()},
        **ids,
    )
    facts = SimpleNamespace(name="fake", vocab=rows, eos_ids=(named.get("eos_token_id", 0),))
    return SimpleNamespace(
        facts=facts, tokenizer=tokenizer, embed_weight=weight_VD, banned_ids=torch.arange(tokens, rows)
    )


SPECIAL = {0: "<eos>", 1: "<s>", 2: "<pad>", 3: "<file>", 4: "<repo>"}
NAMED = {"eos_token_id": 0, "bos_token_id": 1, "pad_token_id": 2}


def test_order_of_the_rule() -> None:
    assert choose_mask_id(fake(SPECIAL | {9: "[MASK]"}, mask_token_id=9, **NAMED), None, "m") == 9
    assert choose_mask_id(fake(SPECIAL, **NAMED), None, "m") == 16  # the first row without a token
    assert choose_mask_id(fake(SPECIAL, broken=(16, 17), **NAMED), None, "m") == 18  # that is initialised
    assert choose_mask_id(fake(SPECIAL, tokens=20, **NAMED), None, "m") == 3  # no spare row: a special token
    assert choose_mask_id(fake(SPECIAL, broken=(3, *range(16, 20)), **NAMED), None, "m") == 4
    in_template = fake(SPECIAL, tokens=20, template="<s>{{ x }}<file>", **NAMED)
    assert choose_mask_id(in_template, None, "m") == 4


def test_the_unknown_token_serves_where_every_text_is_spelled_without_it() -> None:
    few = {0: "<eos>", 1: "<s>", 5: "<unk>"}
    named = NAMED | {"unk_token_id": 5}
    assert choose_mask_id(fake(few, tokens=20, **named), None, "m") == 5
    with pytest.raises(ValueError, match="no unused id"):
        choose_mask_id(fake(few, tokens=20, spells=False, **named), None, "m")


def test_refusals_name_the_way_out() -> None:
    with pytest.raises(ValueError, match=r"drafter\.mask_id=ID"):
        choose_mask_id(fake({0: "<eos>", 1: "<s>"}, tokens=20, **NAMED), None, "m")
    target = fake(SPECIAL, broken=(7,), **NAMED)
    assert choose_mask_id(target, 12, "m") == 12  # an ordinary token, if the user says so
    for wanted, words in ((20, r"0\.\.19"), (-1, r"0\.\.19"), (0, "ends answers"), (7, "never initialised")):
        with pytest.raises(ValueError, match=words):
            choose_mask_id(target, wanted, "m")


def test_built_in_targets_have_one(tiny: Callable[..., Target]) -> None:
    """The tiny target's unknown token, which its byte-level tokenizer never needs; or a spare row."""
    assert choose_mask_id(tiny(), None, "m") == 0
    assert choose_mask_id(tiny(vocab=264, tokens=250), None, "m") == 250
    assert list(unused_ids(tiny(vocab=264, tokens=250)))[:14] == list(range(250, 264))
