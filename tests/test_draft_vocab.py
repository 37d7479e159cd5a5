"""The draft vocabulary: which ids, in which order, covering what (B09, B12)."""

import pytest
import torch

from draftsmith.data.draft_vocab import choose_draft_ids, count_supervised, coverage, offsets
from draftsmith.data.encode import Sample


def sample(ids: list[int], on: list[bool] | None = None) -> Sample:
    return Sample(0, torch.tensor(ids), torch.tensor(on or [True] * len(ids)))


def test_only_supervised_tokens_are_counted() -> None:
    counts_V = count_supervised([sample([3, 4, 4, 5], [False, True, True, True]), sample([5])], 8)
    assert counts_V.tolist() == [0, 0, 0, 0, 2, 2, 0, 0]
    with pytest.raises(ValueError, match="token id 9 in sample 0; the target has 8 rows"):
        count_supervised([sample([9])], 8)


def test_few_distinct_ids_are_filled_up_and_stop_ids_are_always_in() -> None:
    """B12: 20 distinct ids seen, 64 wanted, target of 256; eos 200 and a stop id 250 never seen."""
    seen = list(range(100, 140, 2))
    samples = [sample([i] * (1 + i % 3)) for i in seen]
    chosen = [
        choose_draft_ids(count_supervised(order, 256), 64, always=(200, 250)) for order in (samples, samples[::-1])
    ]
    assert torch.equal(*chosen)
    ids = chosen[0].tolist()
    assert len(set(ids)) == 64
    assert ids == sorted(ids)
    assert set(seen) | {200, 250} <= set(ids)
    rest = [i for i in ids if i not in (*seen, 200, 250)]
    assert rest == [i for i in range(256) if i not in (*seen, 200, 250)][: len(rest)]  # lowest unseen ids


def test_stop_ids_stay_when_frequent_ids_fill_everything() -> None:
    counts_V = torch.arange(256)
    ids = choose_draft_ids(counts_V, 4, always=(0, 7)).tolist()
    assert ids == [0, 7, 254, 255]


def test_ties_go_to_the_smaller_id() -> None:
    assert choose_draft_ids(torch.ones(256, dtype=torch.int64), 3).tolist() == [0, 1, 2]


def test_what_cannot_be_is_refused() -> None:
    counts_V = torch.zeros(256, dtype=torch.int64)
    with pytest.raises(ValueError, match="300 ids; the target has 256"):
        choose_draft_ids(counts_V, 300)
    with pytest.raises(ValueError, match="255 ids; the target has 250"):
        choose_draft_ids(counts_V, 255, allowed=250)
    with pytest.raises(ValueError, match="cannot hold the 2 stop ids"):
        choose_draft_ids(counts_V, 1, always=(1, 2))
    with pytest.raises(ValueError, match="stop id 252 is outside the 250"):
        choose_draft_ids(counts_V, 8, always=(252,), allowed=250)


def test_rows_that_no_token_has_are_never_drafted() -> None:
    counts_V = torch.zeros(256, dtype=torch.int64)
    counts_V[250:] = 100
    ids = choose_draft_ids(counts_V, 250, always=(2,), allowed=250)
    assert ids.tolist() == list(range(250))


def test_coverage_counts_tokens() -> None:
    counts_V = count_supervised([sample([1] * 6 + [2] * 4)], 8)
    assert coverage(counts_V, torch.tensor([1, 5])) == pytest.approx(0.6)
    assert f"{coverage(counts_V, torch.tensor([1, 5])):.0%}" == "60%"
    assert coverage(counts_V, None) == 1.0
    assert coverage(torch.zeros(8, dtype=torch.int64), torch.tensor([1])) == 1.0


def test_offsets_are_what_engines_add_to_draft_ids() -> None:
    ids_W = torch.tensor([3, 4, 9])
    assert offsets(ids_W).tolist() == [3, 3, 7]
    assert torch.equal(torch.arange(3) + offsets(ids_W), ids_W)
    assert offsets(torch.arange(5)).tolist() == [0] * 5
