"""Committing: stops inside a block, stop strings across tokens, whole characters, counts; block by block as one by one."""

import random
from typing import Any, ClassVar

import pytest

from draftsmith.inference.commit import Detokenizer, Request, Stats, StopStrings
from draftsmith.losses.probs import SamplingParams


class Letters:
    """Token i is PIECES[i]; bytes join into characters only when complete."""

    PIECES: ClassVar = [
        b"a",
        b"b",
        b"ab",
        b" ",
        b"end",
        b"\xe2",
        b"\x82",
        b"\xac",
        b"<",
        b"stop",
        b">",
        b"\xf0\x9f",
        b"\x98\x80",
    ]

    def decode(self, ids: list[int], skip_special_tokens: bool = False) -> str:
        return b"".join(self.PIECES[i] for i in ids).decode("utf-8", errors="replace")


def request(params: SamplingParams, eos: tuple[int, ...] = (), live: bool = True) -> Request:
    return Request(0, [1], params, eos, Letters(), live)


def feed(params: SamplingParams, blocks: list[list[int]], eos: tuple[int, ...] = ()) -> tuple[Request, str]:
    """Commit blocks until something stops; the second value is the text as streamed."""
    r, text = request(params, eos), ""
    for block in blocks:
        if r.stop_reason is None:
            text += r.commit(block, len(block) - 1).text
    return r, text


def test_what_follows_a_stop_inside_a_block_is_dropped() -> None:
    r, text = feed(SamplingParams(), [[0, 1], [2, 4, 0, 1]], eos=(4,))
    assert r.ids == [0, 1, 2, 4] and r.stop_reason == "eos" and text == "abab"
    assert r.from_draft == [True, False, True, True] and r.stats.committed == 4
    r, text = feed(SamplingParams(stop_ids=(3,)), [[0, 1], [3, 4, 0]])
    assert r.ids == [0, 1, 3] and r.stop_reason == "stop_id" and text == "ab"
    assert r.result().text == text
    r, _ = feed(SamplingParams(ignore_eos=True, max_new_tokens=3), [[4, 4, 4, 4]], eos=(4,))
    assert r.ids == [4, 4, 4] and r.stop_reason == "length"
    r, _ = feed(SamplingParams(max_new_tokens=2), [[0, 4]], eos=(4,))
    assert r.stop_reason == "eos"  # the last token of the budget may still end the answer


@pytest.mark.parametrize("size", [1, 2, 5])
def test_stop_strings_cross_token_borders(size: int) -> None:
    ids = [0, 8, 9, 8, 9, 10, 0, 1]  # a<stop<stop>ab
    blocks = [ids[i : i + size] for i in range(0, len(ids), size)]
    r, text = feed(SamplingParams(stop_strings=("<stop>", "never")), blocks)
    assert r.stop_reason == "stop_string" and text == r.text == r.result().text == "a<stop"
    assert r.ids == ids[:6]  # up to the token that completes the match


def test_the_first_match_wins_and_text_is_never_taken_back() -> None:
    stops = StopStrings(["abc", "bX"])
    assert stops.push("aab") == ("a", False)  # "ab" may become "abc"
    assert stops.push("X") == ("a", True)
    stops = StopStrings(["aab"])
    assert [stops.push(c) for c in "aaaab"] == [("", False), ("", False), ("a", False), ("a", False), ("", True)]
    stops = StopStrings(["xyz"])
    assert stops.push("axy") == ("a", False) and stops.release() == "xy"


def test_text_held_for_a_stop_string_comes_at_the_end() -> None:
    r, text = feed(SamplingParams(stop_strings=("<stop>",), max_new_tokens=3), [[0, 8, 9]])
    assert r.stop_reason == "length" and text == "a<stop"


def test_no_stop_string_before_the_minimal_length() -> None:
    r, text = feed(SamplingParams(stop_strings=("b",), min_new_tokens=3), [[1], [1, 0, 0], [1, 0]])
    assert r.ids == [1, 1, 0, 0, 1] and text == "bbaa"


def test_characters_stay_whole() -> None:
    r, text = request(SamplingParams(max_new_tokens=7)), []
    for token in [0, 5, 6, 7, 11, 12, 5]:
        text.append(r.commit([token], 0).text)
    assert text == ["a", "", "", "€", "", "😀", "\ufffd"]  # the last one stays unfinished: a mark, at the end


@pytest.mark.parametrize("seed", range(30))
def test_blocks_give_what_single_tokens_give(seed: int) -> None:
    dice = random.Random(seed)
    ids = [dice.randrange(len(Letters.PIECES)) for _ in range(40)]
    params = SamplingParams(
        max_new_tokens=dice.choice([5, 17, 40]),
        min_new_tokens=dice.choice([0, 4]),
        stop_strings=dice.choice([(), ("end<",), ("stop>", "ba")]),
        stop_ids=dice.choice([(), (10,)]),
    )
    eos = dice.choice([(), (4,)])
    blocks, rest = [], ids
    while rest:
        n = dice.randint(1, 6)
        blocks.append(rest[:n])
        rest = rest[n:]
    (one, text_one), (many, text_many) = feed(params, [[x] for x in ids], eos), feed(params, blocks, eos)
    assert (one.ids, one.text, one.stop_reason) == (many.ids, many.text, many.stop_reason)
    assert text_one == text_many == one.text
    if one.stop_reason is not None and not params.stop_strings:
        quiet = request(params, eos, live=False)
        for block in blocks:
            if quiet.stop_reason is None:
                quiet.commit(block, 0)
        assert quiet.result().text == one.text


def test_the_detokenizer_agrees_with_decoding_at_once(tokenizer: Any) -> None:
    ids = tokenizer("Grüße, 世界! 😀 the end\n  of it.")["input_ids"]
    stream = Detokenizer(tokenizer)
    assert "".join(map(stream.push, ids)) + stream.flush() == tokenizer.decode(ids, skip_special_tokens=True)


def test_stop_strings_without_a_tokenizer_are_refused() -> None:
    with pytest.raises(ValueError, match="stop_ids"):
        Request(0, [1], SamplingParams(stop_strings=("x",)), (), None, False)


def test_requests_without_a_seed_get_different_ones() -> None:
    assert len({request(SamplingParams()).seed for _ in range(50)}) == 50
    assert request(SamplingParams(seed=4)).seed == 4


def test_statistics_are_trimmed_and_add_up() -> None:
    a = Stats(committed=1)
    a.record(kept=3, path_ranks=[0, 1], tested=True, nodes=4)  # two accepted, then a rejection at depth 3
    a.record(kept=1, path_ranks=[], tested=True, nodes=4)
    a.record(kept=2, path_ranks=[0, 0, 0], tested=False, nodes=3)  # a stop inside the block: one accepted is dropped
    a.committed += 6
    assert (a.verifies, a.drafted, a.from_draft) == (3, 11, 4)
    assert a.accepted_hist == [1, 0, 2]
    assert a.tried == [3, 2, 1] and a.accepted == [2, 2, 0] and a.ranks == [[2], [1, 1]]
    assert a.alpha == [2 / 3, 1.0, 0.0] and a.tau == 2.0
    b = Stats(committed=1)
    b.record(kept=2, path_ranks=[2], tested=False, nodes=1)
    b.committed += 2
    total = a + b
    assert total.requests == 2 and total.tried == [4, 2, 1] and total.ranks == [[2, 0, 1], [1, 1]]
    assert total.tau == (7 + 3 - 2) / 4


def test_where_steps_ran_is_said_once() -> None:
    """A server adds up the statistics of all its requests."""
    total = Stats(requests=0)
    for step in ("graph", "host (grammars are read on the host)", "graph", "graph"):
        total += Stats(step=step)
    assert total.step == "graph; host (grammars are read on the host)" and total.requests == 4
    assert (Stats(requests=0) + Stats(requests=0)).step == "host"
