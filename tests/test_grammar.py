"""Answers that follow a grammar: the masks of every path, the same answers with and without a drafter, the right law."""

import itertools
import json
import re
from dataclasses import replace
from typing import Any

import pytest
import torch
from test_engine import DRAFTERS, make

from draftsmith.inference.grammar import check_grammar, guide_of, json_grammar, regex_grammar
from draftsmith.inference.speculate import DecodeConfig, generate
from draftsmith.inference.turns import Turns
from draftsmith.losses.probs import SamplingParams, probs

pytest.importorskip("llguidance")
PATTERN = "([a-f]{1,3} ){2,}[0-9]{2}"
SCHEMA = {
    "type": "object",
    "properties": {"kind": {"enum": ["rain", "snow"]}, "cold": {"type": "boolean"}},
    "required": ["kind", "cold"],
    "additionalProperties": False,
    "x-guidance": {"whitespace_flexible": False},  # or a model without sense may say blanks for ever
}
PROMPTS = [[5, 6, 7] * 3, [9], [30, 31, 32, 33, 30, 31]]


@pytest.fixture(scope="module")
def real(tiny: Any) -> Any:
    return tiny(dtype=torch.float64)


def texts_of(real: Any, banned_V: torch.Tensor) -> set[str]:
    return {real.tokenizer.decode([i]) for i in (~banned_V).nonzero()[:, 0].tolist()}


def test_a_guide_goes_along_paths_and_back(real: Any) -> None:
    def ids(text: str) -> list[int]:
        return real.tokenizer(text).input_ids

    eos = real.tokenizer.decode(list(real.facts.eos_ids))
    guide = guide_of(real.tokenizer, real.facts.eos_ids, regex_grammar("ab(c|d[0-9]+)|x"))
    wanted = {"": {"a", "x"}, "a": {"b"}, "ab": {"c", "d"}, "abd": set("0123456789"), "abd7": {*"0123456789", eos}}
    for text in ("", "abd7", "ab", "abd", "a", "abd7", ""):  # in any order
        banned = guide.banned(ids(text))
        assert banned is not None and texts_of(real, banned) == wanted[text]
    assert guide.banned(ids("abz")) is None and guide.banned(ids("abc7")) is None
    assert guide.take(ids("a")[0]) is None and guide.banned(ids("a")) is None
    banned = guide.banned(ids("bd"))
    assert banned is not None and texts_of(real, banned) == set("0123456789")
    assert guide.take(ids("b")[0]) is None and guide.take(ids("c")[0]) == "grammar"


@pytest.mark.parametrize("name", DRAFTERS)
def test_drafters_change_no_answer(name: str, real: Any) -> None:
    grammars = [regex_grammar(PATTERN), json_grammar(SCHEMA), None]
    params = [SamplingParams(max_new_tokens=40, grammar=g, repetition_penalty=1.1) for g in grammars]
    plain = generate(real, PROMPTS, params)
    drafted = generate(real, PROMPTS, params, make(name, real))
    assert [r.ids for r in drafted] == [r.ids for r in plain]
    assert [r.stop_reason for r in drafted] == [r.stop_reason for r in plain]
    said = json.loads(drafted[1].text)
    assert drafted[1].stop_reason == "grammar" and said["kind"] in ("rain", "snow") and isinstance(said["cold"], bool)
    # A path that the grammar allows so far: every piece of it that is complete is one of the pattern's.
    assert re.fullmatch("([a-f]{1,3} )*([a-f]{0,3}|[0-9]{1,2})", drafted[0].text)


@pytest.mark.parametrize("name", ["eagle3", "medusa", "recycling", "pard", "prompt_tokens", "jacobi"])
def test_trees_and_samples_too(name: str, real: Any) -> None:
    grammars = [regex_grammar(PATTERN), json_grammar(SCHEMA), json_grammar({"type": "object"})]
    params = [SamplingParams(max_new_tokens=30, grammar=g) for g in grammars]
    tree = DecodeConfig(tree="static", nodes=8, width=3)
    want = [r.ids for r in generate(real, PROMPTS, params)]
    assert [r.ids for r in generate(real, PROMPTS, params, make(name, real), tree)] == want
    if name == "eagle3":
        for shape in ("dynamic", "opt", "cut"):
            found = generate(real, PROMPTS, params, make(name, real), DecodeConfig(tree=shape, nodes=8, width=3))
            assert [r.ids for r in found] == want, shape
    sampled = [replace(p, temperature=1.0, seed=i) for i, p in enumerate(params)]
    match = DecodeConfig(verifier="sample_match")
    found = generate(real, PROMPTS, sampled, make(name, real), match)
    assert [r.ids for r in found] == [r.ids for r in generate(real, PROMPTS, sampled)]


@pytest.mark.parametrize("shape", ["chain", "static"])
def test_the_law_is_that_of_plain_constrained_sampling(shape: str, real: Any) -> None:
    grammar, n = regex_grammar("[ab][cd]e"), 600
    prompt = PROMPTS[2]
    ids = {c: real.tokenizer(c).input_ids[0] for c in "abcde"}
    law = {}
    for pair in itertools.product("ab", "cd"):
        row = torch.tensor([[*prompt, ids[pair[0]]]])
        states = real.forward(row, torch.arange(row.shape[1])[None]).last_hidden_BTD
        chance = 1.0
        for c, other, logits_V in zip(pair, ("ab", "cd"), real.head(states)[0, -2:], strict=True):
            allowed_V = probs(logits_V[None], SamplingParams(temperature=1.0))[0]
            chance *= float(allowed_V[ids[c]] / sum(allowed_V[ids[o]] for o in other))
        law["".join(pair)] = chance
    params = [SamplingParams(temperature=1.0, seed=i, max_new_tokens=9, grammar=grammar) for i in range(n)]
    decode = DecodeConfig(tree=shape, k=3, nodes=6, width=2, max_rows=100)
    results = generate(real, [prompt] * n, params, make("eagle3", real), decode)
    assert {r.stop_reason for r in results} == {"grammar"} and {len(r.ids) for r in results} == {3}
    assert sum(sum(r.from_draft) for r in results) > n / 4  # drafts are masked as well, so that many are kept
    for said, chance in law.items():
        share = sum(r.text == f"{said}e" for r in results) / n
        assert abs(share - chance) < 4.5 * (chance * (1 - chance) / n) ** 0.5 + 1e-9, (said, share, chance)


def test_what_is_refused(real: Any) -> None:
    for grammar, words in (
        (regex_grammar("(a"), "grammar: .*"),
        (json_grammar({"type": "nonsense"}), "nonsense"),
        (json_grammar({"type": "object", "not": {}}), "not"),
    ):
        with pytest.raises(ValueError, match=words):
            check_grammar(real.tokenizer, real.facts.eos_ids, grammar)
        with pytest.raises(ValueError, match=words):
            generate(real, [[5]], SamplingParams(grammar=grammar))
    with pytest.raises(ValueError, match="no fast tokenizer"):
        check_grammar(None, (), regex_grammar("a"))
    with pytest.raises(ValueError, match="min_new_tokens=3"):
        SamplingParams(min_new_tokens=3, grammar=regex_grammar("a"))
    turns = Turns.__new__(Turns)
    with pytest.raises(ValueError, match="grammar: a denoiser"):
        turns.refuse(SamplingParams(grammar=regex_grammar("a")))
