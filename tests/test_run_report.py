"""`draftsmith report`: pages of runs that are done, running, dead or damaged; escaped, without secrets, without network.

Run: pytest tests/test_run_report.py"""

from __future__ import annotations

import fcntl
import json
import re
import socket
from pathlib import Path
from typing import Any

import pytest
import yaml

from draftsmith.cli import main
from draftsmith.inference import run_report
from draftsmith.inference.run_folder import KINDS, Run, read_run
from draftsmith.inference.run_report import PARTS, PLOTS, html, smoothed, summary, table, thinned

SCRIPT = "<script>alert('x')</script>"
TOKEN = "hf_" + "plantedSecret0123456789"


def train_line(step: int, **more: Any) -> dict[str, Any]:
    times = {f"time/{part}": 0.01 * (i + 1) for i, part in enumerate(PARTS)}
    line = {"kind": "train", "step": step, "loss": 4.0 / step, "lr": 1e-3, "grad_norm": 1.0, "tokens": 100 * step}
    line |= {"seconds": 0.2 * step, "tokens_per_second": 500.0, "speed/tokens_per_second_per_device": 250.0}
    return line | times | {"memory/peak_gib": 1.5, "speed/mfu": 0.25} | more


def heldout_line(step: int, tau: float = 1.5, **more: Any) -> dict[str, Any]:
    line = {"kind": "heldout", "step": step, "tau": tau, "run_length": tau - 1, "accuracy_1": 0.5, "accuracy_2": 0.3}
    line |= {"run_length_low": tau - 1.1, "run_length_high": tau - 0.9, "accept_1": 0.6}
    return line | more


LINES = [
    train_line(1),
    train_line(2),
    heldout_line(2, 1.2),
    {"kind": "probe", "step": 2, "tau": 1.25, "k": 3, "verifies": 9},
    {"kind": "skip", "step": 2, "why": "loss nan", "samples": [3, 7], "skipped": 1},
    train_line(3),
    heldout_line(4, 1.6, repeated=0.02),
    {"kind": "note", "step": 4, "against": "repeats itself"},
]


def write(folder: Path, lines: list[dict[str, Any]], tail: str = "", facts: Any = ..., **config: Any) -> Path:
    folder.mkdir(parents=True)
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines) + tail)
    if facts is ...:
        config = {"method": "eagle3", "target": {"name": "tiny"}, "optim": {"lr": 1e-3, "betas": [0.9, 0.95]}} | config
        facts = {
            "command": "train/distill_draft.py --config x",
            "config": config,
            "versions": {"torch": "2"},
            "git": {},
        }
    if facts is not None:
        (folder / "run.yaml").write_text(yaml.safe_dump(facts))
    return folder


def observed(folder: Path) -> None:
    """A real run of any script has the figures beside the loss in each training line, and a page of them."""
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    names = {"tokens_per_second", "speed/tokens_per_second_per_device", "memory/peak_gib"} | {
        f"time/{p}" for p in PARTS
    }
    trained = [line for line in lines if line["kind"] == "train"]
    assert trained and all(names <= line.keys() for line in trained)
    page = page_of(folder)
    shown = {"Loss", "Learning rate", "Tokens per second and device", "Where the time goes", "Peak memory"}
    assert all(f"<h2>{title}</h2>" in page for title in shown) and 'class="flag"' not in page
    assert str(folder.parent) not in page


def page_of(*folders: Path) -> str:
    return html([read_run(folder) for folder in folders])


def test_a_page_shows_every_plot_and_the_figures(tmp_path: Path) -> None:
    page = page_of(write(tmp_path / "a", LINES))
    for title in PLOTS:
        assert f"<h2>{title}</h2>" in page
    assert page.count("<svg") == len(PLOTS) + 1 and "<h2>repeated, held out</h2>" in page
    rows = dict(summary([read_run(tmp_path / "a")]))
    assert rows["best held-out tau"] == ["1.60 [1.50–1.70], step 4"] and rows["last probe tau"] == ["1.25"]
    assert rows["MFU"] == ["25.0%"] and rows["peak memory"] == ["1.50 GiB"] and rows["tokens/s per device"] == ["250"]
    assert rows["steps"] == ["3"] and rows["tokens"] == ["300"] and rows["loss, last tenth"] == ["1.3333"]
    assert "why: loss nan samples: [3, 7]" in page and "against: repeats itself" in page
    assert "train/distill_draft.py --config x" in page and "optim.betas" in page and "0.9, 0.95" in page
    assert html([read_run(tmp_path / "a")]) == page  # the same for the same run


def test_texts_are_escaped_secrets_and_folders_removed_nothing_is_loaded(tmp_path: Path) -> None:
    """PROMISES 23 and 24: a planted token and a local path in notes, settings, command and names."""
    note = {"kind": "note", "step": 1, "against": f"{SCRIPT} {TOKEN} /home/someone/secret/file.txt"}
    facts = {"command": f"train {TOKEN}", "config": {"method": SCRIPT, "data": {"source": "/home/someone/p.jsonl"}}}
    lines = [train_line(1), note, heldout_line(1, **{SCRIPT: 1.0, "$x_{": 2.0})]
    a = write(tmp_path / "a & <b>$\x1b[31m", lines, facts=facts)
    page = page_of(a, write(tmp_path / SCRIPT.replace("/", "|"), LINES))
    assert "<script" not in page.lower() and page.count("&lt;script&gt;") >= 4
    assert TOKEN not in page and "[removed]" in page
    assert "/home/someone" not in page and str(tmp_path) not in page and "file.txt" in page
    assert "\x1b" not in page and "a &amp; &lt;b&gt;$" in page
    assert not re.findall(r'(?:src|href)="([^"#][^"]*)"', page) and "default-src 'none'" in page
    assert not re.findall(r"url\((?!#)", page) and "@import" not in page


def test_runs_side_by_side_are_told_apart(tmp_path: Path) -> None:
    one = write(tmp_path / "x/run", LINES, seed=1)
    two = write(tmp_path / "y/run", [train_line(1), train_line(2, loss=9.0)], seed=2)
    three = write(tmp_path / "z/other", LINES)
    page = page_of(one, two, three)
    assert "run #2" in page and "other" in page
    assert page.index("<td>seed</td>") < page.rindex("<td>method</td>")  # what differs comes first, shaded
    assert '<tr class="differs"><td>seed</td><td>1</td><td>2</td><td>-</td></tr>' in page
    assert "<h2>Where the time goes</h2>" in page
    assert table([{"a": 1, "b": None}, {"a": 1, "b": []}]) == [("b", ["null", "none"], True), ("a", ["1", "1"], False)]


def test_runs_that_died_or_are_damaged_have_a_page(tmp_path: Path) -> None:
    """Torn lines, values that are no numbers, steps twice, no run.yaml or one that is broken, nothing logged at all."""
    odd = [train_line(1, loss="nan"), train_line(2, loss="inf", lr=None), train_line(3), train_line(3, loss=7.0)]
    torn = write(tmp_path / "torn", odd, tail='[]\n{"kind": "train", "step": 4, "lo', facts=None)
    run = read_run(torn)
    assert run.gaps == [
        "2 lines of metrics.jsonl cannot be read (cut off by a kill?)",
        "no run.yaml: settings and versions are not known",
    ]
    assert run.series("train", "loss") == ([3], [7.0]) and run.series("train", "lr")[0] == [1, 3]
    broken = write(tmp_path / "broken", [], facts=None)
    (broken / "run.yaml").write_text("a: [")
    early = write(tmp_path / "early", [])
    (early / "metrics.jsonl").unlink()
    for folder in (torn, broken, early):
        page = page_of(folder)
        assert 'class="flag"' in page
    assert "no metrics.jsonl yet" in page_of(early) and "run.yaml cannot be read" in page_of(broken)
    assert page_of(torn, early, write(tmp_path / "list", LINES, facts=[1])).count("<svg") > 5
    with pytest.raises(ValueError, match=r"holds no metrics\.jsonl and no run\.yaml: name the `run` folder"):
        read_run(tmp_path)


def test_a_run_is_finished_running_or_neither(tmp_path: Path) -> None:
    folder = write(tmp_path / "a", LINES)
    assert read_run(folder).state.startswith("no export: stopped")
    with (folder / ".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        assert read_run(folder).state == "running"
    assert read_run(folder).state.startswith("no export")
    (folder / "export").mkdir()
    assert read_run(folder).state == "finished"


def test_long_runs_are_thinned_by_means_and_smoothed_without_a_lag() -> None:
    steps, values = list(range(1, 100_001)), [float(i) for i in range(1, 100_001)]
    few, means = thinned(steps, values)
    assert len(few) == 800 and means == pytest.approx(few) and sum(means) / 800 == pytest.approx(50_000.5)
    assert thinned([1, 2], [3.0, 4.0]) == ([1, 2], [3.0, 4.0])
    assert smoothed([float(i) for i in range(50)], 5) == pytest.approx(list(range(50)))
    assert smoothed([0.0, 3.0, 0.0], 1) == [0.0, 1.0, 0.0]
    lines = [{"step": i, "loss": 1.0 / i} for i in steps[:50_000]]
    run = Run("long", "running", {kind: lines if kind == "train" else [] for kind in KINDS}, {})
    assert len(html([run])) < 300_000


def test_the_command_writes_the_page_beside_the_run_or_where_it_is_told(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    one, two = write(tmp_path / "one", LINES), write(tmp_path / "two, a: 3", LINES)
    assert main(["report", str(one)]) == 0 and "<svg" in (one / "report.html").read_text()
    assert main(["report", str(one), str(two), "--out", str(tmp_path / "both.html")]) == 0
    assert "two, a: 3" in (tmp_path / "both.html").read_text() and capsys.readouterr().out.endswith("both.html\n")
    assert main(["report", str(tmp_path / "none"), "--out", str(tmp_path / "no.html")]) == 2
    assert main(["report"]) == 2 and main(["report", str(one), "--out", "x.pdf"]) == 2
    assert not (tmp_path / "no.html").exists()


def test_a_report_opens_no_connection(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def forbidden(*_: Any, **__: Any) -> None:
        raise AssertionError("network")

    for name in ("connect", "connect_ex", "bind", "sendto"):
        monkeypatch.setattr(socket.socket, name, forbidden)
    monkeypatch.setattr(socket, "getaddrinfo", forbidden)
    run_report.run_report(run_report.RunReportConfig((str(write(tmp_path / "a", LINES)),)))
    assert (tmp_path / "a/report.html").exists()
