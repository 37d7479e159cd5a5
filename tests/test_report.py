"""The report: figures over hand-made samples with known answers, the table, and the page (escaped, no network)."""

import io
import json
import re

import pytest
from rich.console import Console

from draftsmith.inference import figures, report
from draftsmith.inference.figures import Bootstrap, Sample

SCRIPT = "<script>alert('x')</script>"


def sample(prompt, *, tokens=10, verifies=5, seconds=1.0, arm="a", category="chat", **more):
    return Sample(
        prompt, 0, category, arm, list(range(tokens + 1)), seconds, prefill_tokens=1, verifies=verifies, **more
    )


def test_tau_is_pooled_and_macro_is_the_mean_over_prompts():
    samples = [sample("p", tokens=30, verifies=10), sample("q", tokens=4, verifies=4)]
    found = figures.acceptance(samples, Bootstrap(["p", "q"], 200, 0))
    assert found["tau"] == pytest.approx(34 / 14) and found["tau_macro"] == pytest.approx(2.0)
    assert found["tau_interval"] == pytest.approx([1.0, 3.0])  # both prompts the same one, in 2 of 4 resamplings


def test_plain_decoding_has_tau_one():
    found = figures.acceptance([sample("p", tokens=7, verifies=7)], Bootstrap(["p"], 10, 0))
    assert found["tau"] == 1.0 and found["tau_interval"] is None


def test_conditional_unconditional_and_rank():
    s = sample("p", verifies=100, reached=[100, 80], accepted=[80, 20], ranks=[[60, 20], [20, 0]])
    found = figures.acceptance([s], Bootstrap(["p"], 10, 0))
    assert found["alpha"] == [0.8, 0.25] and found["alpha_unconditional"] == [0.8, 0.2]
    assert found["alpha_counts"] == [[80, 100], [20, 80]]
    assert found["alpha_by_rank"] == [[0.6, 0.2], [0.25, 0.0]]


def test_interval_covers_the_truth():
    """Prompts with a known mean ratio: the 95 % interval holds it in about 95 of 100 repetitions."""
    import numpy as np

    rng, hits = np.random.default_rng(3), 0
    for repeat in range(100):
        rates = rng.uniform(0.2, 0.8, size=40)  # true pooled rate: 0.5
        samples = [sample(str(i), tokens=int(rng.binomial(50, r)), verifies=50) for i, r in enumerate(rates)]
        low, high = figures.acceptance(samples, Bootstrap([str(i) for i in range(40)], 300, repeat))["tau_interval"]
        hits += low <= 0.5 <= high
    assert 86 <= hits <= 100


def test_ratio_is_over_the_prompts_both_answered():
    ours = [sample("p", seconds=1.0), sample("q", seconds=100.0)]
    value, _ = figures.ratio(ours, [sample("p", seconds=2.0)], Bootstrap(["p", "q"], 50, 0))
    assert value == pytest.approx(2.0)
    assert figures.ratio(ours, [], Bootstrap(["p", "q"], 50, 0)) == (None, None)


def test_expected_tau_is_the_chain_formula():
    assert figures.expected_tau([0.7] * 3, 3) == pytest.approx((1 - 0.7**4) / 0.3)
    assert figures.expected_tau([0.7], 5) == pytest.approx((1 - 0.7**6) / 0.3)


def test_alarms():
    row = make_row()
    estimated = {"k": 2, "tau": 2.0, "alpha": [0.6, 0.5]}
    assert figures.alarms(row, estimated) == []
    assert "under 1.1" in figures.alarms({**row, "tau": 1.05}, None)[0]
    assert "70 %" in figures.alarms({**row, "tau": 1.39}, estimated)[0]
    assert figures.alarms({**row, "tau": 1.41}, estimated) == []
    deeper = {**row, "tau": 1.39, "draft_length": 4}  # expected from alpha: 1 + .6 + .3 + .15 + .075
    assert "the 2.1" in figures.alarms(deeper, estimated)[0]
    assert figures.alarms({**row, "draft_length": 0, "tau": 1.0}, estimated) == []


@pytest.mark.parametrize(
    ("lever", "change", "estimated"),
    [
        ("data", {"alpha": [0.35, 0.3], "tau": 1.45}, None),
        ("alignment", {"tau": 1.4}, {"k": 2, "tau": 2.6, "alpha": [0.8, 0.8]}),
        ("K", {"alpha": [0.97, 0.97], "tau": 2.9}, None),
        ("draft cost", {"seconds_per_pass": {"draft": 0.09, "verify": 0.05, "commit": 0.0, "other": 0.0}}, None),
    ],
)
def test_what_limits_you(lever, change, estimated):
    row = {**make_row(), **change}
    text, gains = figures.limits(row, [row], 0.05, estimated)
    assert text.startswith(lever) and max(gains, key=gains.get) == lever
    assert all(name in text for name in ("data", "alignment", "K", "draft cost"))


def test_a_good_head_is_limited_by_nothing_hidden():
    """The costs named in the sentence are those of the row."""
    text, _ = figures.limits(make_row(), [make_row()], 0.05, None)
    assert "tau 1.80 / (verify 1.10 + draft 0.20 + rest 0.02 plain steps)" in text


def make_row(**change):
    row = {
        "name": "eagle3 chain K=2",
        "method": "eagle3",
        "drafter": "eagle3",
        "decode": "speculate",
        "verifier": "greedy",
        "draft_length": 2,
        "tree": "chain",
        "width": None,
        "temperature": 0.0,
        "dtype": "float32",
        "prompts": 2,
        "tokens": 100,
        "tau": 1.8,
        "tau_interval": [1.7, 1.9],
        "tau_macro": 1.75,
        "tau_macro_interval": [1.6, 1.9],
        "verifications": 50,
        "alpha": [0.5, 0.6],
        "alpha_interval": [[0.4, 0.6], None],
        "alpha_counts": [[25, 50], [15, 25]],
        "alpha_unconditional": [0.5, 0.3],
        "alpha_by_rank": [[0.5], [0.6]],
        "tokens_per_second": 21.5,
        "tokens_per_second_interval": [20.0, 23.0],
        "ratio_to_plain": 1.3,
        "ratio_to_plain_interval": [1.2, 1.4],
        "ratio_to_hf": 1.5,
        "ratio_to_hf_interval": None,
        "tokens_per_forward": 1.7,
        "seconds_per_pass": {"draft": 0.01, "verify": 0.055, "commit": 0.001, "other": 0.0, "prefill": 0.1},
        "quality": None,
        "lossless": "exact",
        "identical_to_plain": True,
        "identical_prompts": 2,
        "checked_prompts": 2,
        "answers": 2,
        "differ_from_unpadded": 0,
        "divergences": [],
        "step": "host",
        "red": None,
        "categories": {
            SCRIPT: {
                "prompts": 2,
                "tau": 1.8,
                "tau_interval": None,
                "alpha": [0.5, 0.6],
                "ratio_to_plain": 1.3,
            }
        },
    }
    return row | change


def make_report(**change):
    plain = make_row(
        name="plain",
        draft_length=0,
        tree=None,
        tau=1.0,
        alpha=[],
        alpha_by_rank=[],
        categories={},
        tokens_per_second=16.0,
        ratio_to_plain=1.0,
        ratio_to_plain_interval=[1.0, 1.0],
    )
    return {
        "machine": {"cpu": "some cpu"},
        "run": {
            "name": SCRIPT,
            "suite": "mini",
            "prompts": 2,
            "max_new_tokens": 8,
            "dtype": "float32",
            "target": "tiny",
            "runner": "hf (chosen)",
        },
        "rows": [plain, make_row()],
        "best": "eagle3 chain K=2",
        "limits": "data - more of it",
        "gains": {},
        "alarms": ["tau is low " + SCRIPT],
        "causes": list(figures.CAUSES),
        "flags": ["slow"],
        "examples": [
            {
                "prompt": "p",
                "category": "chat",
                "question": SCRIPT,
                "pieces": [{"text": SCRIPT, "draft": True}, {"text": "</div>\x1b[31m&amp;", "draft": False}],
            }
        ],
        "definitions": figures.DEFINITIONS,
    } | change


def test_page_is_self_contained_and_escaped():
    page = report.html(make_report())
    assert "<script" not in page.lower() and page.count("&lt;script&gt;") >= 4
    assert "&lt;/div&gt;" in page and "&amp;amp;" in page
    assert page.count("<svg") == 3 and page.count("</svg>") == 3
    ids = re.findall(r'\bid="([^"]+)"', page)
    assert len(ids) > 20 and not re.findall(r'(?:src|href)="([^"#][^"]*)"', page)
    assert "default-src 'none'" in page and "What limits you" in page
    for meaning in figures.DEFINITIONS:
        assert f"<dt>{meaning}</dt>" in page


def test_page_is_the_same_for_the_same_report():
    assert report.html(make_report()) == report.html(make_report())


def test_page_needs_no_other_fields_than_the_json():
    assert report.html(json.loads(json.dumps(make_report()))) == report.html(make_report())


def terminal(content):
    console = Console(file=io.StringIO(), width=220, force_terminal=False)
    report.print_report(content, console)
    return console.file.getvalue()


def test_terminal_report_defines_its_words_and_ends_with_what_limits_you():
    text = terminal(make_report())
    assert text.rstrip().splitlines()[-1].startswith("what limits you: data")
    assert "1.80 [1.70–1.90]" in text and "1.30 [1.20–1.40]" in text and "25/50" in text
    for word in ("tau", "tau_macro", "alpha", "alpha_unconditional", "lossless", "K"):
        assert f"  {word}: " in text
    assert sum(cause in text for cause in figures.CAUSES) == 6


def test_a_red_row_shows_no_speed():
    red = make_row(red="2 of 2 answers differ", tokens_per_second=None, ratio_to_plain=None, ratio_to_hf=None)
    content = make_report(rows=[make_report()["rows"][0], red])
    assert "RED eagle3 chain K=2: 2 of 2 answers differ" in terminal(content)
    page = report.html(content)
    assert (
        "<td>red</td><td>red</td><td>red</td>" in page and "1.30" not in page.split("<h2>Acceptance by depth</h2>")[0]
    )


def test_divergences_are_counted_and_the_worst_is_printed_with_its_gap():
    tie = {"prompt": "p7", "position": 12, "gap": 0.0625, "width_difference": 0.125, "excused": True}
    wrong = {"prompt": "p8", "position": 3, "gap": 0.5, "width_difference": 0.1, "excused": False}
    text = terminal(make_report(rows=[make_row(divergences=[tie, wrong], differ_from_unpadded=2)]))
    assert "2 of 2 answers differ from plain decoding of width 1; of 2 measured, 1 at a near-tie" in text
    assert "gap 0.5 where the widths differ by 0.1 (p8, token 3)" in text
    text = terminal(make_report(rows=[make_row(divergences=[tie], differ_from_unpadded=1)]))
    assert "gap 0.0625 where the widths differ by 0.125 (p7, token 12)" in text


def test_the_tables_fit_a_narrow_terminal():
    console = Console(file=io.StringIO(), width=80, force_terminal=False)
    report.print_report(make_report(), console)
    lines = console.file.getvalue().splitlines()
    assert max(map(len, lines)) <= 80 and "…" not in console.file.getvalue()


def test_control_characters_of_a_model_do_not_reach_the_terminal():
    assert report.visible("a\x1b[2Jb\r\n").plain == "a\\x1b[2Jb\\x0d\n"
