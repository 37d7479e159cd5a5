"""`generate` and `evaluate` of consistency models: every figure computed again by hand, refusals.

Run: pytest tests/test_evaluate_consistency.py
"""

from __future__ import annotations

import json
import math
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from draftsmith.cli import main
from draftsmith.configs.parse import to_yaml
from draftsmith.data.encode import prompt_ids
from draftsmith.inference import evaluate_consistency as commands
from draftsmith.inference.consistency_figures import Convergence, repeated_grams
from draftsmith.inference.consistency_folder import save_consistency, settings_line
from draftsmith.inference.evaluate import run_evaluate
from draftsmith.inference.evaluate_config import EvaluateConfig
from draftsmith.inference.evaluate_consistency import (
    MOST_REPEATED,
    MOST_RISE,
    Way,
    evaluate_consistency,
    identity,
    jacobi_for,
    quality_lines,
    standing,
)
from draftsmith.inference.exporters.layout import RunFacts
from draftsmith.inference.figures import Sample
from draftsmith.inference.generate import GenerateConfig, run_generate
from draftsmith.inference.speculate import DecodeConfig, generate
from draftsmith.inference.suites import SUITES, load_suite
from draftsmith.losses.probs import SamplingParams
from draftsmith.models.adapters import AdapterConfig, Adapters
from draftsmith.models.jacobi import BRANCHES, JacobiConfig, prompt_seed, start_uniforms
from draftsmith.models.loading import load_target
from draftsmith.models.pretrained import tiny_target
from draftsmith.models.target import Target

BLOCK = 4


def export(folder: Path, target: Target, mask: Any = "none", **decode: Any) -> str:
    """A "trained" model: random adapters."""
    adapters = Adapters(AdapterConfig(rank=2, mask=mask), target)
    torch.manual_seed(1)
    with torch.no_grad():
        for parameter in adapters.trained.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.1)
    settings = JacobiConfig(**{"block": BLOCK} | decode)
    save_consistency(folder, "consistency", {"labels": "self"}, adapters, RunFacts(train_length=64), settings)
    return str(folder)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Trained from the tiny target."""
    return export(tmp_path_factory.mktemp("runs") / "x" / "export", tiny_target())


def jacobi_passes(target: Target, prompt: list[int], answer: list[int]) -> tuple[int, list[list[list[int]]]]:
    """Jacobi decoding without a cache, as the paper says it: passes until `answer` is there, and each block's states."""
    starts = [prompt[math.floor(u * len(prompt))] for u in start_uniforms(prompt_seed(prompt), 0, len(answer) + BLOCK)]
    made, guesses, passes = answer[:1], starts[1:BLOCK], 0
    blocks: list[list[list[int]]] = []
    states: list[list[int]] = [[*made, *guesses]]
    while len(made) < len(answer):
        ids = torch.tensor([[*prompt, *made, *guesses]])
        with torch.no_grad():
            said = target.model(ids).logits[0, len(prompt) + len(made) - 1 :].argmax(-1).tolist()
        passes += 1
        right = next((i for i, (x, y) in enumerate(zip(guesses, said, strict=False)) if x != y), len(guesses))
        made, guesses = made + said[: right + 1], said[right + 1 : len(guesses)]
        first = len(blocks) * BLOCK
        states.append([*made[first:], *guesses][:BLOCK])
        if len(made) >= first + BLOCK:
            blocks.append(states)
            first, guesses = first + BLOCK, starts[len(made) : first + 2 * BLOCK]
            states = [[*made[first:], *guesses]]
    if len(answer) > len(blocks) * BLOCK:
        blocks.append(states)
    short = len(answer) - (len(blocks) - 1) * BLOCK  # places of the last block that the answer has
    blocks[-1] = [state[:short] for state in blocks[-1]]
    return passes, blocks


def by_hand(counts: Convergence, blocks: list[list[list[int]]]) -> None:
    """The convergence map of these blocks, counted again."""
    assert list(counts.blocks_N) == [sum(len(b[0]) > j for b in blocks) for j in range(BLOCK)]
    for i, row in enumerate(counts.right_IN):
        state = [(b[min(i, len(b) - 1)], b[-1]) for b in blocks]
        assert list(row) == [sum(len(z) > j and y[j] == z[j] for y, z in state) for j in range(BLOCK)]
    assert counts.passes == Counter(next(i for i, y in enumerate(b) if y == b[-1]) for b in blocks)


def test_every_figure_by_hand(folder: str) -> None:
    base = load_target("tiny", dtype="float64")
    trained = load_target(folder, dtype="float64")
    prompts = load_suite("tasks", limit=3)
    score = SUITES["tasks"].score
    report, maps = evaluate_consistency(
        base, trained, prompts, score, JacobiConfig(block=BLOCK), max_new_tokens=18, draws=50
    )
    params = SamplingParams(max_new_tokens=18)
    ids = [prompt_ids(p.messages, base.tokenizer) for p in prompts]
    answers = {"base": generate(base, ids, params), "trained": generate(trained, ids, params)}
    given = [r.ids for r in answers["base"]]
    losses = {}
    for i, (name, target) in enumerate((("base", base), ("trained", trained))):
        own = [r.ids for r in answers[name]]
        plain, jacobi = report["rows"][2 * i : 2 * i + 2]
        assert (plain["name"], jacobi["name"]) == (f"{name} plain", f"{name} jacobi")
        assert plain["tokens"] == jacobi["tokens"] == sum(map(len, own))
        assert plain["tokens_per_forward"] == 1 and plain["forwards"] == sum(len(a) - 1 for a in own)
        runs = [jacobi_passes(target, prompt, answer) for prompt, answer in zip(ids, own, strict=True)]
        passes = sum(count for count, _ in runs)
        assert jacobi["forwards"] == passes
        assert jacobi["tokens_per_forward"] == pytest.approx(sum(len(a) - 1 for a in own) / passes)
        by_hand(maps[name], [block for _, blocks in runs for block in blocks])
        assert jacobi["identical"] == 3 and not jacobi["divergences"] and jacobi["red"] is None
        assert jacobi["accuracy"] == pytest.approx(
            sum(bool(score and score(r.text, str(p.reference))) for r, p in zip(answers[name], prompts, strict=True))
            / 3
        )
        seconds = {row["name"]: sum(x["seconds"] for x in row["by_prompt"].values()) for row in report["rows"]}
        assert jacobi["tokens_per_second"] == pytest.approx(jacobi["tokens"] / seconds[jacobi["name"]])
        assert jacobi["ratio_to_own"] == pytest.approx(seconds[plain["name"]] / seconds[jacobi["name"]])
        losses[name] = 0.0
        for prompt, answer in zip(ids, given, strict=True):
            with torch.no_grad():
                log_p_TV = target.model(torch.tensor([prompt + answer])).logits[0].log_softmax(-1)
            losses[name] -= sum(float(log_p_TV[len(prompt) - 1 + j, token]) for j, token in enumerate(answer))
        key = "base_repeated" if name == "base" else "repeated"
        grams = [repeated_grams(a) for a in own]
        assert report["quality"][key] == pytest.approx(sum(a for a, _ in grams) / sum(b for _, b in grams))
    tokens = sum(map(len, given))
    assert report["quality"]["base_cross_entropy"] == pytest.approx(losses["base"] / tokens)
    assert report["quality"]["cross_entropy"] == pytest.approx(losses["trained"] / tokens)
    assert report["quality"]["rise"] == pytest.approx((losses["trained"] - losses["base"]) / tokens)
    same = sum(a.ids == b.ids for a, b in zip(*answers.values(), strict=True))
    assert report["quality"]["same_answers"] == same / 3 and report["retention"]["prompts"] == 3
    rates = [row["tokens_per_forward"] for row in report["rows"]]
    assert report["gain"]["value"] == pytest.approx(rates[3] / rates[1]) and len(report["gain"]["interval"]) == 2
    assert rates[1] > 1 and report["quality"]["rise"] > 0.1 and "another model" in report["flags"][0]
    assert not report["gain"]["counts"] and " x, does not count: cross-entropy" in quality_lines(report)[0]
    assert maps.keys() == {"base", "trained"} == report["convergence"].keys()


def test_a_gain_counts_only_where_nothing_is_red_and_quality_stayed() -> None:
    rows: list[Any] = [{"name": "base jacobi", "red": None}, {"name": "trained jacobi", "red": None}]
    gain: Any = {"value": 1.5}
    kept: Any = {"rise": MOST_RISE, "repeated": MOST_REPEATED, "base_repeated": 0.0}
    assert standing(gain, rows, kept) == {"counts": True, "reasons": []}
    red = [rows[0], rows[1] | {"red": "1 of 3 answers differ"}]
    for more, wanted in (
        ((gain, red, kept), "trained jacobi is red"),
        ((gain, rows, kept | {"rise": 0.2}), "another model"),
        ((gain, rows, kept | {"repeated": 0.1}), "repeat themselves"),
        (({"value": None}, rows, kept), "no passes"),
    ):
        found = standing(*more)
        assert not found["counts"] and len(found["reasons"]) == 1 and wanted in found["reasons"][0]


def test_answers_that_differ_are_red(folder: str) -> None:
    for dtype, exact in (("float64", True), ("float32", False)):
        target = load_target(folder, dtype=dtype)
        params, prompt = SamplingParams(max_new_tokens=6), [5, 9, 40]
        (result,) = generate(target, [prompt], params)
        plain = [Sample("a", 0, "", "plain", result.ids, 1.0)]
        other = [replace(plain[0], ids=[*result.ids[:3], (result.ids[3] + 1) % 256])]
        way = Way("trained jacobi", target, jacobi_for(target, JacobiConfig(block=BLOCK)))
        assert identity(way, plain, plain, [prompt], DecodeConfig(), exact)["red"] is None
        found = identity(way, other, plain, [prompt], DecodeConfig(), exact)
        assert found["identical"] == 0 and "1 of 1 answers differ from plain decoding" in found["red"]
        assert found["divergences"][0]["position"] == 3 and found["divergences"][0]["gap"] > 0


def config(model: str, out: Path, **settings: Any) -> EvaluateConfig:
    common: dict[str, Any] = {"suite": "tasks", "prompts": 3, "max_new_tokens": 6, "dtype": "float32", "bootstrap": 20}
    return EvaluateConfig(model, out=str(out), **common | settings)


def test_the_command_writes_report_page_and_card(
    folder: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    flags = replace(EvaluateConfig("").drafter, jacobi=JacobiConfig(block=3))
    assert run_evaluate(config(folder, tmp_path, drafter=flags, trees=("static",), nodes=6)) == 0
    text = capsys.readouterr().out
    report = json.loads((tmp_path / "report.json").read_text())
    assert report["run"]["kind"] == "consistency" and report["run"]["name"] == "x" and report["machine"]["torch"]
    assert report["run"]["jacobi"]["block"] == 3 and report["run"]["tree"] == "static"
    for words in ("trained jacobi", "rise", "nats per token", "passes per block", "block 3, base tiny"):
        assert words in text, words
    html = (tmp_path / "report.html").read_text()
    assert html.count("<svg") == 2 and "<image" not in html and "trained jacobi" in html and "color: #222" in html
    card = (Path(folder) / "README.md").read_text()
    assert "decode with | `jacobi`, block 4, blocks 1, spawn 0.85, window block, start prompt |" in card
    assert " ×, does not count: cross-entropy" in card
    assert "| trained jacobi |" in card and "it rose by" in card and (Path(folder) / "report.html").is_file()


def test_what_cannot_be_measured_is_refused(folder: str, tmp_path: Path) -> None:
    jacobi = replace(EvaluateConfig("").drafter, jacobi=JacobiConfig(block=3))
    branching = replace(jacobi, jacobi=JacobiConfig(pool=2))
    for settings, words in (
        ({"k": (3,)}, "k: .* is a consistency model, these are for others"),
        ({"also": ("ngram",), "temperatures": (0.5,)}, "also, temperatures: .* consistency model"),
        ({"strategies": ("margin",)}, "strategies: .* consistency model"),
        ({"trees": ("chain", "static")}, "one shape per run"),
        ({"trees": ("best_first",)}, "proposes drafts of its own"),
        ({"drafter": branching}, "drafter.jacobi.pool: .*add --trees static --nodes 16 --width 4"),
        ({"drafter": branching, "model": "jacobi", "target": "tiny"}, "add --trees static"),
        ({"target": "nowhere"}, "beside the model that it was trained from, .*nowhere"),
        ({"target": folder}, "beside the model that it was trained from, .*name the right one with --target"),
    ):
        with pytest.raises(ValueError, match=words):
            run_evaluate(config(**{"model": folder, "out": tmp_path} | settings))
    other = export(tmp_path / "other", Target((t := tiny_target(seed=3)).model, t.tokenizer, "gone"))
    with pytest.raises(ValueError, match=r"that cannot be used: .*--target FOLDER says where it is"):
        run_evaluate(config(other, tmp_path))
    with pytest.raises(ValueError, match=r"drafter\.jacobi is set, but jacobi drafts nothing here"):
        config("ngram", tmp_path, target="tiny", drafter=jacobi)


def ask(capsys: pytest.CaptureFixture[str], **settings: Any) -> str:
    cfg = GenerateConfig("Say hello.", **{"dtype": "float64", "max_new_tokens": 12, "stream": False} | settings)
    run_generate(cfg)
    return capsys.readouterr().out


def test_generate_decodes_by_jacobi_what_the_model_says(folder: str, capsys: pytest.CaptureFixture[str]) -> None:
    plain = ask(capsys, target=folder).split("\nacceptance rule")[0]
    own = ask(capsys, model=folder)
    assert own.split("\ndecoded by jacobi")[0] == plain and f"decoded by jacobi: block {BLOCK}, blocks 1" in own
    target = load_target(folder, dtype="float64")
    ids = prompt_ids([{"role": "user", "content": "Say hello."}], target.tokenizer)
    (result,) = generate(target, [ids], SamplingParams(max_new_tokens=12))
    assert f"\n{jacobi_passes(target, ids, result.ids)[0]} verify passes" in own
    assert ("the model was trained on up to 64" in own) == (len(ids) > 64)
    assert "spawn" in own and not any(name in own for name in BRANCHES)
    flags = replace(GenerateConfig("").drafter, jacobi=JacobiConfig(block=6, blocks=2))
    other = ask(capsys, model=folder, drafter=flags, tree="static", nodes=6)
    assert other.split("\ndecoded by jacobi")[0] == plain and "block 6, blocks 2" in other
    assert all(f"{name} " in other for name in BRANCHES)
    branching = replace(GenerateConfig("").drafter, jacobi=JacobiConfig(retrieve=True))
    for settings, words in (
        ({"target": "tiny"}, "stand alone; leave it out"),
        ({"strategy": "margin"}, "strategy: are for denoisers"),
        ({"self_draft": True}, "self_draft: are for denoisers"),
        ({"k": 9}, "k=9: the drafts of jacobi"),
        ({"tree": "best_first"}, "proposes drafts of its own"),
        ({"drafter": branching}, "drafter.jacobi.retrieve: .*add --tree static --nodes 16 --width 4"),
        ({"drafter": branching, "tree": "static", "width": 1}, "add --tree static"),
        (
            {"drafter": replace(GenerateConfig("").drafter, jacobi=JacobiConfig(start="mask", mask_id=9))},
            "with no mask",
        ),
    ):
        with pytest.raises(ValueError, match=words):
            ask(capsys, model=folder, **settings)
    with pytest.raises(ValueError, match="add --tree static"):
        ask(capsys, model="jacobi", target="tiny", drafter=branching)
    argv = ["Hi.", "--model", folder, "--drafter.jacobi.pool", "4", "--drafter.jacobi.retrieve", "false"]
    assert main(["generate", *argv]) == 2 and "jacobi.pool, drafter.jacobi.retrieve: " in capsys.readouterr().err


@pytest.mark.parametrize(
    ("decode", "flags", "wanted"),
    [
        ({}, ["--drafter.jacobi.block", "16"], {"block": 16}),
        ({"window": "slide"}, ["--drafter.jacobi.window=block"], {"window": "block"}),
        ({"window": "slide"}, ["--drafter.jacobi.blocks", "2"], {"window": "block", "blocks": 2}),
        ({"blocks": 2}, ["drafter.jacobi.window=slide"], {"window": "slide", "blocks": 1}),
        ({"window": "slide"}, ["--config", "{recipe}"], {"block": 16, "window": "slide"}),
        ({"window": "slide"}, ["--config", "{printed}"], {"window": "slide"}),
    ],
    ids=["block", "window", "blocks", "slide", "a recipe", "a printed recipe"],
)
def test_what_is_given_takes_the_place_of_the_folders(
    decode: dict[str, Any],
    flags: list[str],
    wanted: dict[str, Any],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Of both commands, also where it is the usual value; what the folder says beside it stays."""
    model = export(tmp_path / "x", tiny_target(), **decode)
    (tmp_path / "recipe").write_text("drafter: {jacobi: {block: 16}}\n")
    (tmp_path / "printed").write_text(to_yaml(GenerateConfig("Hi.", model=model, dtype="float64", max_new_tokens=3)))
    argv = [flag.format(recipe=tmp_path / "recipe", printed=tmp_path / "printed") for flag in flags]
    settings = JacobiConfig(**{"block": BLOCK} | decode | wanted)
    line = f"decoded by jacobi: {settings_line(settings, False)}\n"
    assert main(["generate", "Hi.", "--model", model, "--dtype", "float64", "--max_new_tokens=3", *argv]) == 0
    assert line in capsys.readouterr().out
    if "printed" in flags[-1]:
        return

    def stop(*arguments: Any, **_: Any) -> None:
        raise ValueError(repr(arguments[4]))

    for name in ("base_of", "load_consistency"):
        monkeypatch.setattr(commands, name, lambda *_, **__: tiny_target())
    monkeypatch.setattr(commands, "evaluate_consistency", stop)
    assert main(["evaluate", "--model", model, "--out", str(tmp_path / "out"), *argv]) == 2
    assert repr(settings) in capsys.readouterr().err


def test_a_base_without_masks_starts_from_the_prompt(tmp_path: Path) -> None:
    model = export(tmp_path / "x", tiny_target(), "new", start="mask", mask_id=256)
    base, trained = load_target("tiny", dtype="float64"), load_target(model, dtype="float64")
    settings = JacobiConfig(block=BLOCK, start="mask", mask_id=256)
    report, _ = evaluate_consistency(base, trained, load_suite("tasks", limit=1), None, settings, max_new_tokens=6)
    assert report["run"]["base_jacobi"]["start"] == "prompt" and report["run"]["jacobi"]["mask_id"] == 256
    assert report["rows"][3]["identical"] == 1 and report["retention"] is None
