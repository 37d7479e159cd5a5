"""Figures of diffusion decoding, by hand on small cases."""

from math import exp

import pytest

from draftsmith.inference.diffusion_figures import (
    COUNTING,
    Decoded,
    area,
    cut,
    fastest,
    plot_curves,
    plot_training,
    retention,
    row_of,
)


def test_tokens_behind_the_end_are_cut_and_the_end_counts():
    assert cut([5, 6, 2, 9, 2], [2]) == (5, 6, 2) and cut([5, 6], [2]) == (5, 6) and cut([3, 4], [4, 3]) == (3,)
    assert cut([], [2]) == ()


def test_a_row_pools_tokens_and_forwards_and_lists_kv_passes_apart():
    answers = [
        Decoded("a", "sort", (1, 2, 3, 4), forwards=2, kv_passes=1, right=True),
        Decoded("b", "sort", (1, 2), forwards=2, kv_passes=1, right=False),
        Decoded("c", "chat", (1, 2, 3), forwards=1, kv_passes=0),
    ]
    row = row_of("threshold", answers, draws=50)
    assert (row["tokens"], row["forwards"], row["kv_passes"], row["answers"]) == (9, 5, 2, 3)
    assert row["tokens_per_forward"] == 9 / 5 and row["tokens_per_pass"] == 9 / 7  # pooled: not the mean of 2, 1 and 3
    assert row["accuracy"] == 0.5  # of the scored ones
    low, high = row["tokens_per_forward_interval"]
    assert 1 <= low <= 9 / 5 <= high <= 3
    assert row["categories"]["sort"]["tokens_per_forward"] == 6 / 4 and row["categories"]["chat"]["accuracy"] is None
    assert row_of("x", answers[2:])["accuracy_interval"] is None
    with pytest.raises(ValueError, match="no answers"):
        row_of("x", [])
    assert {"tokens", "forwards", "kv_passes", "tokens_per_forward", "aup", "retained"} <= COUNTING.keys()


def test_the_fastest_row_is_accurate_enough():
    def row(name, speed, accuracy):
        figures = {"tokens_per_forward": speed, "accuracy": accuracy}
        return {"name": name, **figures, "categories": {"sort": {"tokens_per_forward": -speed, "accuracy": 1.0}}}

    rows = [row("a", 2.0, 0.99), row("b", 3.0, 0.98), row("c", 8.0, 0.97)]
    best = fastest(rows, 0.98)
    assert best and best["name"] == "b"
    best = fastest(rows, 0.98, "sort")
    assert best and best["name"] == "a"
    assert fastest(rows, 0.995) is None and fastest(rows, 0.5, "latin") is None


def test_area_by_hand():
    assert area([(1.0, 0.8)]) == 80
    assert area([(3.0, 0.8), (1.0, 0.8)]) == 80 + 2 * 80  # no loss: parallelism times accuracy
    lost = 78 * exp(3 * (78 / 80 - 1))
    assert area([(1, 0.8), (3, 0.78)]) == pytest.approx(80 + 2 * (80 + lost) / 2)
    assert area([(1, 0.8), (3, 0.74)]) == 80  # more than 5 points lost
    assert area([(1, 0.8), (1, 0.7), (3, 0.74)]) == 80  # of equals the better one
    weight = exp(3 * (80 / 90 - 1))
    assert area([(1, 0.8), (3, 0.8)], best=0.9) == pytest.approx(80 + 2 * 80 * weight)
    assert area([(2, 0.0)]) == 0
    for points in ([], [(0.0, 0.5)], [(1.0, 1.5)]):
        with pytest.raises(ValueError, match="area: points"):
            area(points)


def test_retention_compares_the_prompts_that_both_answered():
    def answers(text):
        return [
            Decoded(p, "x", (1,), 1, right={"+": True, "-": False}.get(r)) for p, r in zip("abcdef", text, strict=False)
        ]

    found = retention(answers("+++-?+"), answers("++--+"), draws=200)
    assert found["prompts"] == 4 and found["base_accuracy"] == 0.75 and found["accuracy"] == 0.5
    assert found["difference"] == -0.25 and found["retained"] == pytest.approx(2 / 3)
    low, high = found["difference_interval"]
    assert -1 <= low < -0.25 < high <= 0
    assert retention(answers("--"), answers("++"))["retained"] is None
    with pytest.raises(ValueError, match="no scored prompt"):
        retention(answers("+"), answers("?+"))


def test_plots_are_files_that_name_their_lines(tmp_path):
    plot_curves({"base": [(4.0, 0.9), (2.0, 0.99)], "costs $": [(8.0, 0.98)]}, tmp_path / "new" / "curve.svg", 0.98)
    text = (tmp_path / "new" / "curve.svg").read_text()
    assert text.startswith("<?xml") and "</svg>" in text
    plot_training({"loss": [(0, 4.0), (10, 2.0)]}, tmp_path / "loss.svg", "step", "nats")
    assert (tmp_path / "loss.svg").stat().st_size > 1000
