"""What is kept of earlier prompts and answers: found by their tokens, bounded in memory, moved with their rows."""

import torch

from draftsmith.inference.prefixes import Prefixes, Start, States, read_together
from draftsmith.models.cache import Cache

BYTES = 2 * 2 * 3 * 4 * 4 + 8  # of a token: layers, keys and values, heads, width, fp32; its id


def kv(tokens: int) -> torch.Tensor:
    return torch.randn(2, 2, 3, tokens, 4)


def test_the_longest_known_beginning_is_found() -> None:
    prefixes = Prefixes(10**6, least=3)
    assert prefixes.find([1, 2, 3, 4]) == Start()
    prefixes.keep([1, 2, 3, 4, 5], kv(5), (None, None))
    prefixes.keep([1, 2, 3, 9, 9, 9], kv(6), (None, None))
    assert prefixes.find([1, 2, 3, 4, 5, 6]).count == 5
    assert prefixes.find([1, 2, 3, 4, 5]).count == 4  # the last token's logits are asked for
    assert prefixes.find([1, 2, 3, 9, 9, 1]).count == 5
    assert prefixes.find([1, 2, 4, 4]) == Start() == prefixes.find([5]) == prefixes.find([1, 2, 3])
    prefixes.keep([7, 8], kv(2), (None, None))  # too short to be of use
    assert len(prefixes.rows) == 2


def test_rows_that_go_on_replace_those_they_went_on_from() -> None:
    prefixes = Prefixes(10**6, least=1)
    first, longer = kv(3), kv(5)
    prefixes.keep([1, 2, 3], first, (None, None))
    prefixes.keep([9], kv(1), (None, None))
    prefixes.keep([1, 2, 3, 4, 5], longer, (torch.ones(5, 1, 4), torch.ones(5, 4)))
    assert [len(kept.ids) for kept in prefixes.rows] == [1, 5]
    assert prefixes.bytes == 6 * BYTES + 5 * 2 * 16
    prefixes.keep([1, 2], kv(2), (None, None))  # known
    assert [len(kept.ids) for kept in prefixes.rows] == [1, 5]
    kept = prefixes.find([1, 2, 3, 4, 6]).kept
    assert kept is not None and torch.equal(kept.kv, longer)
    longer.zero_()
    assert kept.kv.any()  # a copy


def test_what_was_not_used_for_longest_is_forgotten() -> None:
    prefixes = Prefixes(8 * BYTES, least=1)
    for token in (1, 2):
        prefixes.keep([token] * 3, kv(3), (None, None))
    prefixes.use(prefixes.find([1, 1, 5]))
    prefixes.keep([3] * 4, kv(4), (None, None))
    assert [int(kept.ids[0]) for kept in prefixes.rows] == [1, 3] and prefixes.bytes == 7 * BYTES
    prefixes.keep([4] * 9, kv(9), (None, None))  # larger than all memory
    assert [int(kept.ids[0]) for kept in prefixes.rows] == [1, 3] and prefixes.hits == 1
    for i in range(100):
        prefixes.keep([10 + i] * 2, kv(2), (None, None))
    assert prefixes.bytes == 8 * BYTES and len(prefixes.rows) == 4


def test_who_is_read_together() -> None:
    prefixes = Prefixes(10**6, least=1)
    prefixes.keep(list(range(100)), kv(100), (None, None))
    known = prefixes.find(range(60))
    new = Start()
    assert read_together([50, 60, 70], [new, new, new], 200) == 3
    assert read_together([50, 60, 70], [new, known, new], 200) == 1 == read_together([60, 50], [known, new], 200)
    assert read_together([60, 60], [known, known], 200) == 2
    assert read_together([60, 150], [Start(59, known.kept), Start(5, known.kept)], 200) == 1  # 59 and 145 do not fit
    assert read_together([1500, 600, 20], [new] * 3, 5000) == 1 and read_together([9000], [new], 9000) == 1
    assert read_together([1000, 1000, 1000], [new] * 3, 5000) == 2


def test_states_are_those_of_their_rows() -> None:
    none, states = States(frozenset({"ids"}), 3, 8), States(frozenset({"taps", "last_hidden"}), 3, 8)
    taps, hidden = torch.randn(3, 4, 2, 5), torch.randn(3, 4, 5)
    positions = torch.tensor([[0], [2], [1]]) + torch.arange(4)
    for held in (none, states):
        held.put(0, positions, taps, hidden)
        held.arrange([0, 2], [4, 6, 5])
        held.fill(2, Start())
    assert none.read(0, 2, 4) == (None, None) == none.row(0, 3)
    got_taps, got_hidden = states.read(1, 1, 5)
    assert got_taps is not None and got_hidden is not None
    assert torch.equal(got_taps[0, 1:], taps[2]) and torch.equal(got_hidden[0, 1:], hidden[2])
    prefixes = Prefixes(10**6, least=1)
    prefixes.keep([1, 2, 3, 4], kv(4), states.row(0, 4))
    states.fill(2, prefixes.find([1, 2, 3, 7]))
    got_taps, got_hidden = states.row(2, 3)
    assert got_taps is not None and torch.equal(got_taps, taps[0, :3]) and torch.equal(got_hidden, hidden[0, :3])


def test_a_cache_row_is_filled() -> None:
    cache, known = Cache(2, 8, 2, 3, 4, torch.float32, "cpu"), kv(3)
    cache.fill(1, known)
    assert cache.lengths_B.tolist() == [0, 3] and cache.positions_BS[1, :3].tolist() == [0, 1, 2]
    assert torch.equal(cache.kv[:, :, 1, :, :3], known)
