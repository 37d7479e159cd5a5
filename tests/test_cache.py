"""The cache by itself: writes at each row's own slots, masks by definition, compaction, refusals."""

import pytest
import torch
from torch import Tensor

from draftsmith.models.cache import Cache

LAYERS, HEADS, SIZE = 3, 2, 4


def _cache(rows: int = 3, slots: int = 12, read_all: bool = False) -> Cache:
    return Cache(rows, slots, LAYERS, HEADS, SIZE, torch.float32, "cpu", read_all)


def _append(cache: Cache, tokens_BT: Tensor, positions_BT: Tensor, offset: int = 0) -> tuple[Tensor, Tensor]:
    """One pass in which the key of token n is n (layer i: n + 100 i) and its value -n; returns the last layer's read."""
    cache.begin(positions_BT, offset)
    k = v = torch.zeros(0)
    for layer in range(LAYERS):
        key_BHTD = (tokens_BT + 100 * layer).float()[:, None, :, None].expand(-1, HEADS, -1, SIZE)
        k, v = cache.update(key_BHTD, -key_BHTD, layer)
    return k, v


def _tokens(cache: Cache, row: int, layer: int = 0) -> list[int]:
    """The committed tokens of a row; every head, component and both of key and value must agree."""
    length = int(cache.lengths_B[row])
    keys_HSD, values_HSD = cache.kv[layer, 0, row, :, :length], cache.kv[layer, 1, row, :, :length]
    assert torch.equal(keys_HSD, -values_HSD) and bool((keys_HSD == keys_HSD[:1, :, :1]).all())
    return [int(x) - 100 * layer for x in keys_HSD[0, :, 0]]


def _ragged(read_all: bool = False) -> Cache:
    """Rows of 4, 1 and 2 committed tokens: 10.., 20.., 30.. at positions 0.."""
    cache = _cache(read_all=read_all)
    tokens_BT = torch.tensor([[10, 11, 12, 13], [20, 21, 22, 23], [30, 31, 32, 33]])
    _append(cache, tokens_BT, torch.arange(4).expand(3, 4))
    cache.commit(torch.tensor([4, 1, 2]))
    return cache


def test_each_row_is_written_behind_its_own_length() -> None:
    cache = _ragged()
    k_BHSD, v_BHSD = _append(
        cache, torch.tensor([[40, 41], [50, 51], [60, 61]]), cache.lengths_B[:, None] + torch.arange(2)
    )
    assert k_BHSD.shape == v_BHSD.shape == (3, HEADS, 6, SIZE)
    assert cache.lengths_B.tolist() == [4, 1, 2]  # a pass commits nothing
    cache.commit(torch.tensor([2, 0, 1]))
    for layer in range(LAYERS):
        assert _tokens(cache, 0, layer) == [10, 11, 12, 13, 40, 41]
        assert _tokens(cache, 1, layer) == [20]
        assert _tokens(cache, 2, layer) == [30, 31, 60]
    assert [cache.positions_BS[b, : cache.lengths_B[b]].tolist() for b in range(3)] == [[*range(6)], [0], [0, 1, 2]]


@pytest.mark.parametrize("ragged", [False, True])
@pytest.mark.parametrize("window", [None, 1, 2, 3, 50])
@pytest.mark.parametrize("offset", [0, 2])
@pytest.mark.parametrize("read_all", [False, True])
def test_mask_by_definition(ragged: bool, window: int | None, offset: int, read_all: bool) -> None:
    """Committed or named in `see`, and inside the window: one slot at a time, in plain Python."""
    cache = _ragged(read_all)
    if not ragged:
        cache.truncate(torch.tensor([1, 1, 1]))
    depths_T = torch.tensor([0, 1, 1])
    if offset:
        _append(cache, torch.zeros(3, offset, dtype=torch.int64), cache.lengths_B[:, None] + torch.arange(offset))
    positions_BT = cache.lengths_B[:, None] + offset + depths_T
    cache.begin(positions_BT, offset)
    see_BTA = torch.rand(3, 3, offset + 3, generator=torch.Generator().manual_seed(0)) < 0.6
    mask_B1TS = cache.mask(see_BTA, window)
    lengths = cache.lengths_B.tolist()
    assert mask_B1TS.shape == (3, 1, 3, 12 if read_all else max(lengths) + offset + 3)
    assert mask_B1TS.dtype == torch.bool
    for b, length in enumerate(lengths):
        positions = [*range(length + offset), *(length + offset + depths_T).tolist(), *[0] * 12]
        for t in range(3):
            for s in range(mask_B1TS.shape[3]):
                tail = s - length
                seen = tail < 0 or (tail < offset + 3 and bool(see_BTA[b, t, tail]))
                if seen and window is not None:
                    seen = int(positions_BT[b, t]) - positions[s] < window
                assert bool(mask_B1TS[b, 0, t, s]) == seen, (b, t, s)


def test_two_appended_passes_are_one() -> None:
    """A drafter appends level by level and commits later."""
    once, twice = _ragged(), _ragged()
    tokens_BT = torch.tensor([[40, 41, 42], [50, 51, 52], [60, 61, 62]])
    positions_BT = once.lengths_B[:, None] + torch.arange(3)
    read_once = _append(once, tokens_BT, positions_BT)
    _append(twice, tokens_BT[:, :1], positions_BT[:, :1])
    read_twice = _append(twice, tokens_BT[:, 1:], positions_BT[:, 1:], offset=1)
    assert torch.equal(once.kv, twice.kv) and torch.equal(once.positions_BS, twice.positions_BS)
    assert torch.equal(read_once[0], read_twice[0]) and torch.equal(read_once[1], read_twice[1])


@pytest.mark.parametrize("read", [False, True])
@pytest.mark.parametrize("seed", range(8))
def test_compaction_keeps_the_path_and_nothing_else(seed: int, read: bool) -> None:
    random = torch.Generator().manual_seed(seed)
    cache = _ragged()
    kept = [_tokens(cache, b) for b in range(3)]
    tokens_BT = torch.arange(40, 40 + 18).view(3, 6)
    depths_BT = torch.randint(0, 4, (3, 6), generator=random)
    _append(cache, tokens_BT, cache.lengths_B[:, None] + depths_BT)
    counts_B = torch.randint(0, 6, (3,), generator=random)
    paths = [torch.randperm(6, generator=random)[:n].sort().values for n in counts_B.tolist()]
    path_BL = torch.full((3, 5), 7)  # beyond a row's count: anything
    positions = [cache.positions_BS[b, : cache.lengths_B[b]].tolist() for b in range(3)]
    for b, path in enumerate(paths):
        path_BL[b, : len(path)] = path
        positions[b] += (cache.lengths_B[b] + depths_BT[b, path]).tolist()
    cache.compact(path_BL, counts_B, read=read)
    for b, path in enumerate(paths):
        for layer in range(LAYERS):
            assert _tokens(cache, b, layer) == kept[b] + tokens_BT[b, path].tolist()
        assert cache.positions_BS[b, : cache.lengths_B[b]].tolist() == positions[b]


@pytest.mark.parametrize("ragged", [False, True])
@pytest.mark.parametrize("window", [None, 2])
@pytest.mark.parametrize("read_all", [False, True])
def test_a_prefix_stands_behind_the_new_tokens_for_one_pass(ragged: bool, window: int | None, read_all: bool) -> None:
    cache = _ragged(read_all)
    if not ragged:
        cache.truncate(torch.tensor([1, 1, 1]))
    before = [_tokens(cache, b) for b in range(3)]
    prefix_kv = torch.arange(7.0, 9.0)[:, None].expand(LAYERS, 2, HEADS, 2, SIZE)
    positions_BT = cache.lengths_B[:, None] + torch.arange(2)
    cache.begin(positions_BT, 0, prefix_kv)
    for layer in range(LAYERS):
        k_BHSD, v_BHSD = cache.update(
            torch.full((3, HEADS, 2, SIZE), 5.0), torch.full((3, HEADS, 2, SIZE), -5.0), layer
        )
        for b, length in enumerate(cache.lengths_B.tolist()):
            assert k_BHSD[b, 0, length : length + 4, 0].tolist() == [5, 5, 7, 8]
            assert v_BHSD[b, 1, length : length + 4, 1].tolist() == [-5, -5, 7, 8]
    see_BTA = torch.tensor([[True, False, False, False], [True, True, True, True]]).expand(3, 2, 4)
    mask_BTS = cache.mask(see_BTA, window)[:, 0]
    for b, length in enumerate(cache.lengths_B.tolist()):
        assert mask_BTS[b, :, length : length + 4].tolist() == see_BTA[b].tolist()
        assert not bool(mask_BTS[b, :, length + 4 :].any())
    with pytest.raises(ValueError, match=f"{10 if ragged else 13} more do not fit"):
        cache.begin(torch.zeros(3, 8 if ragged else 11, dtype=torch.int64), 0, prefix_kv)
    cache.begin(positions_BT, 0, prefix_kv)
    cache.commit(torch.tensor([1, 1, 1]))
    cache.truncate(cache.lengths_B - 1)
    assert [_tokens(cache, b) for b in range(3)] == before


def test_roll_back_and_reset() -> None:
    cache = _ragged()
    cache.truncate(torch.tensor([2, 1, 0]))
    assert [_tokens(cache, b) for b in range(3)] == [[10, 11], [20], []]
    with pytest.raises(ValueError, match=r"\[2, 1, 0\] tokens to \[2, 3, 0\]"):
        cache.truncate(torch.tensor([2, 3, 0]))
    cache.reset(torch.tensor([1]))
    assert cache.lengths_B.tolist() == [2, 0, 0] and not bool(cache.kv[:, :, 1].any())
    assert bool(cache.kv[:, :, 0].any())
    cache.reset()
    assert cache.lengths_B.tolist() == [0, 0, 0] and not bool(cache.kv.any())


def test_overflow_and_wrong_rows_are_refused() -> None:
    cache = _ragged()
    with pytest.raises(ValueError, match=r"row 0 holds 4 tokens and 9 more do not fit its 12 slots.* 13 slots"):
        cache.begin(torch.zeros(3, 9, dtype=torch.int64))
    with pytest.raises(ValueError, match="9 more"):
        cache.begin(torch.zeros(3, 1, dtype=torch.int64), offset=8)
    cache.begin(torch.zeros(3, 8, dtype=torch.int64))  # exactly full
    with pytest.raises(ValueError, match=r"2 rows on a cache of 3 rows"):
        cache.begin(torch.zeros(2, 1, dtype=torch.int64))
    with pytest.raises(ValueError, match="0 slots"):
        _cache(slots=0)


def test_what_hugging_face_modules_ask() -> None:
    cache = _ragged()
    cache.begin(torch.zeros(3, 2, dtype=torch.int64))
    assert len(cache) == LAYERS and cache.get_seq_length() == 4
    assert cache.get_mask_sizes(2, 0) == (6, 0) and cache.get_max_length() == 12
    assert cache.is_sliding == [] and cache.is_linear == []
