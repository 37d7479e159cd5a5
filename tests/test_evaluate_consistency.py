"""`generate` and `evaluate` of consistency models: every figure computed again by hand, refusals.

Run: pytest tests/test_evaluate_consistency.py
"""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from draftsmith.data.encode import prompt_ids
from draftsmith.inference.consistency_figures import repeated_grams
from draftsmith.inference.consistency_folder import save_consistency
from draftsmith.inference.evaluate import EvaluateConfig, run_evaluate
from draftsmith.inference.evaluate_consistency import Way, evaluate_consistency, identity, jacobi_for
from draftsmith.inference.exporters.layout import RunFacts
from draftsmith.inference.figures import Sample
from draftsmith.inference.generate import GenerateConfig, run_generate
from draftsmith.inference.speculate import DecodeConfig, generate
from draftsmith.inference.suites import SUITES, load_suite
from draftsmith.losses.probs import SamplingParams
from draftsmith.models.adapters import AdapterConfig, Adapters
from draftsmith.models.jacobi import JacobiConfig, prompt_seed, start_uniforms
from draftsmith.models.pretrained import tiny_target
from draftsmith.models.target import Target, load_target

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
        passes = [jacobi_passes(target, prompt, answer)[0] for prompt, answer in zip(ids, own, strict=True)]
        assert jacobi["forwards"] == sum(passes)
        assert jacobi["tokens_per_forward"] == pytest.approx(sum(len(a) - 1 for a in own) / sum(passes))
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
    assert maps.keys() == {"base", "trained"} == report["convergence"].keys()


def test_the_convergence_map_by_hand(folder: str) -> None:
    trained = load_target(folder, dtype="float64")
    prompts = load_suite("tasks", limit=2)
    settings = JacobiConfig(block=BLOCK)
    _, maps = evaluate_consistency(trained, trained, prompts, None, settings, max_new_tokens=14)
    ids = [prompt_ids(p.messages, trained.tokenizer) for p in prompts]
    answers = [r.ids for r in generate(trained, ids, SamplingParams(max_new_tokens=14))]
    blocks = [b for prompt, a in zip(ids, answers, strict=True) for b in jacobi_passes(trained, prompt, a)[1]]
    assert maps["trained"] == maps["base"]
    places = [sum(len(b[0]) > j for b in blocks) for j in range(BLOCK)]
    assert list(maps["trained"].blocks_N) == places
    for i, row in enumerate(maps["trained"].right_IN):
        state = [(b[min(i, len(b) - 1)], b[-1]) for b in blocks]
        assert list(row) == [sum(len(z) > j and y[j] == z[j] for y, z in state) for j in range(BLOCK)]
    assert maps["trained"].passes == {
        n: sum(next(i for i, y in enumerate(b) if y == b[-1]) == n for b in blocks) for n in maps["trained"].passes
    }


def test_answers_that_differ_are_red(folder: str) -> None:
    for dtype, exact in (("float64", True), ("float32", False)):
        target = load_target(folder, dtype=dtype)
        params, prompt = SamplingParams(max_new_tokens=6), [5, 9, 40]
        (result,) = generate(target, [prompt], params)
        plain = [Sample("a", 0, "", "plain", result.ids, 1.0)]
        other = [replace(plain[0], ids=[*result.ids[:3], (result.ids[3] + 1) % 256])]
        way = Way("trained jacobi", target, jacobi_for(target, JacobiConfig(block=BLOCK)))
        assert identity(way, plain, plain, [prompt], params, DecodeConfig(), exact)["red"] is None
        found = identity(way, other, plain, [prompt], params, DecodeConfig(), exact)
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
    assert "| trained jacobi |" in card and "it rose by" in card and (Path(folder) / "report.html").is_file()


def test_what_cannot_be_measured_is_refused(folder: str, tmp_path: Path) -> None:
    jacobi = replace(EvaluateConfig("").drafter, jacobi=JacobiConfig(block=3))
    for settings, words in (
        ({"k": (3,)}, "k: .* is a consistency model, these are for others"),
        ({"also": ("ngram",), "temperatures": (0.5,)}, "also, temperatures: .* consistency model"),
        ({"strategies": ("margin",)}, "strategies: .* consistency model"),
        ({"trees": ("chain", "static")}, "one shape per run"),
        ({"trees": ("best_first",)}, "proposes drafts of its own"),
        ({"target": "nowhere"}, "beside the model that it was trained from, .*nowhere"),
        ({"target": folder}, "beside the model that it was trained from, .*name the right one with --target"),
    ):
        with pytest.raises(ValueError, match=words):
            run_evaluate(config(folder, tmp_path, **settings))
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
    assert "the model was trained on up to 64" in own or "verify passes" in own
    flags = replace(GenerateConfig("").drafter, jacobi=JacobiConfig(block=6, blocks=2))
    other = ask(capsys, model=folder, drafter=flags, tree="static", nodes=6)
    assert other.split("\ndecoded by jacobi")[0] == plain and "block 6, blocks 2" in other
    for settings, words in (
        ({"target": "tiny"}, "stand alone; leave it out"),
        ({"strategy": "margin"}, "strategy: are for denoisers"),
        ({"self_draft": True}, "self_draft: are for denoisers"),
        ({"k": 9}, "k=9: the drafts of jacobi"),
        ({"tree": "best_first"}, "proposes drafts of its own"),
        (
            {"drafter": replace(GenerateConfig("").drafter, jacobi=JacobiConfig(start="mask", mask_id=9))},
            "with no mask",
        ),
    ):
        with pytest.raises(ValueError, match=words):
            ask(capsys, model=folder, **settings)


def test_a_base_without_masks_starts_from_the_prompt(tmp_path: Path) -> None:
    model = export(tmp_path / "x", tiny_target(), "new", start="mask", mask_id=256)
    base, trained = load_target("tiny", dtype="float64"), load_target(model, dtype="float64")
    settings = JacobiConfig(block=BLOCK, start="mask", mask_id=256)
    report, _ = evaluate_consistency(base, trained, load_suite("tasks", limit=1), None, settings, max_new_tokens=6)
    assert report["run"]["base_jacobi"]["start"] == "prompt" and report["run"]["jacobi"]["mask_id"] == 256
    assert report["rows"][3]["identical"] == 1 and report["retention"] is None
