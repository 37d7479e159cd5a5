"""`generate`, `serve`, `evaluate` and `push` of converted models: adapters and merged weights.

Run: pytest tests/test_denoiser_commands.py
"""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from draftsmith.inference.adapter_folder import Converted, save_adapters
from draftsmith.inference.denoisers import decode_of_denoiser, stored_denoiser
from draftsmith.inference.engine import Engine
from draftsmith.inference.evaluate import run_evaluate
from draftsmith.inference.evaluate_config import EvaluateConfig
from draftsmith.inference.exporters import SCHEMAS
from draftsmith.inference.exporters.layout import RunFacts
from draftsmith.inference.generate import GenerateConfig, run_generate
from draftsmith.inference.load import read_export_config
from draftsmith.inference.merge import merge
from draftsmith.inference.push import stage
from draftsmith.inference.serve import ServeConfig, load_served
from draftsmith.inference.strategies import STRATEGIES, strategy_of
from draftsmith.inference.turns import Turns
from draftsmith.inference.worker import Limits
from draftsmith.models.adapters import AdapterConfig, Adapters
from draftsmith.models.diffusion import PRESETS
from draftsmith.models.pretrained import tiny_target


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Adapters of the tiny target (no end of answers, so that answers have a length), and the same merged."""
    place = tmp_path_factory.mktemp("folders")
    adapters = Adapters(AdapterConfig(rank=2, mask="new"), tiny_target())
    torch.manual_seed(1)
    with torch.no_grad():
        for parameter in adapters.trained.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.05)
    model = Converted(replace(PRESETS["fast_dllm_v2"], block=4), adapters)
    save_adapters(place / "adapters", "block_diffusion", model.objective, adapters, RunFacts(train_length=64))
    merge(model, place / "merged", SCHEMAS["plain"], source=place / "adapters")
    return {"adapters": str(place / "adapters"), "merged": str(place / "merged")}


def ask(capsys: pytest.CaptureFixture[str], **settings: Any) -> str:
    run_generate(
        GenerateConfig("Say hello.", dtype="float32", max_new_tokens=10, stream=False, ignore_eos=True, **settings)
    )
    return capsys.readouterr().out


def test_generate_diffuses(folders: dict[str, str], capsys: pytest.CaptureFixture[str]) -> None:
    answers = [ask(capsys, model=folder, threshold=2.0) for folder in folders.values()]
    text, *lines = answers[0].rsplit("\ndecided by", 1)
    assert text == answers[1].rsplit("\ndecided by", 1)[0]
    assert "Threshold(threshold=2.0), block 4" in lines[0] and "10 tokens in" in lines[0]
    assert "denoising passes" in ask(capsys, model=folders["adapters"], strategy="margin")
    assert "FixedSteps(steps=2)" in ask(capsys, model=folders["merged"], steps=2)


def test_self_drafting_is_the_models_own_answer(folders: dict[str, str], capsys: pytest.CaptureFixture[str]) -> None:
    plain = ask(capsys, target="tiny").split("\nacceptance rule")[0]
    drafted = ask(capsys, model=folders["adapters"], self_draft=True, k=3)
    assert drafted.split("\nacceptance rule")[0] == plain and "passes that drafted" in drafted
    with pytest.raises(ValueError, match="needs adapters"):
        ask(capsys, model=folders["merged"], self_draft=True)


def test_serve_answers_by_the_same_rules(folders: dict[str, str]) -> None:
    limits = Limits(0, 20, 10, 30, 1.0)
    merged = load_served(ServeConfig(model=folders["merged"], steps=2, max_rows=2), ())
    turns = merged.engine(limits)
    assert isinstance(turns, Turns) and turns.rows == 2 and turns.decode.strategy == strategy_of("fixed", {"steps": 2})
    drafts = load_served(ServeConfig(model=folders["adapters"], self_draft=True, k=3), ())
    engine = drafts.engine(limits)
    assert isinstance(engine, Engine) and engine.decode.k == 3 and drafts.how == "drafted by self_draft"
    for options, words in (
        ({"model": folders["merged"], "self_draft": True}, "needs adapters"),
        ({"model": folders["merged"], "tree": "static"}, "tree: are about drafts"),
        ({"model": folders["merged"], "prefix_mb": 64}, "prefix_mb = 64: a denoiser reads every prompt as a whole"),
    ):
        with pytest.raises(ValueError, match=words):
            load_served(ServeConfig(**options), ())


def test_flags_that_change_nothing_are_refused(folders: dict[str, str], capsys: pytest.CaptureFixture[str]) -> None:
    for settings, words in (
        ({"model": folders["merged"], "tree": "static"}, "tree: are about drafts"),
        ({"model": folders["merged"], "k": 2, "show": True}, "show, k: are about drafts"),
        ({"model": folders["merged"], "target": "tiny"}, "target = 'tiny': .* stand alone"),
        ({"model": folders["merged"], "target_revision": "main"}, "target_revision = 'main': .* stand alone"),
        ({"model": folders["merged"], "strategy": "learned"}, "which lies beside adapters"),
        ({"model": folders["adapters"], "strategy": "learned"}, "has no decision heads; train them"),
        ({"model": folders["adapters"], "self_draft": True, "tree": "best_first"}, "proposes drafts of its own"),
        ({"model": folders["adapters"], "self_draft": True, "verifier": "typical"}, "allow"),
        ({"model": folders["adapters"], "self_draft": True, "steps": 2}, "steps: say how a denoiser answers"),
        ({"target": "tiny", "strategy": "fixed"}, "strategy: are for denoisers"),
        ({"model": folders["adapters"], "strategy": "thresold"}, "use one of"),
        ({"model": folders["adapters"], "strategy": "margin", "threshold": 0.5}, "has no setting 'threshold'"),
    ):
        with pytest.raises(ValueError, match=words):
            ask(capsys, **settings)
    with pytest.raises(ValueError, match="holds a denoiser, a drafter is needed"):
        read_export_config(folders["adapters"])


def test_settings_come_from_the_flags_then_the_folder(folders: dict[str, str]) -> None:
    stored = stored_denoiser(folders["merged"])
    assert stored is not None
    for name in STRATEGIES.keys() - {"learned", "independent"}:
        assert decode_of_denoiser(stored, name).strategy == STRATEGIES[name]
    assert decode_of_denoiser(stored).strategy == STRATEGIES["threshold"]
    assert decode_of_denoiser(stored, threshold=0.5).strategy == strategy_of("threshold", {"threshold": 0.5})
    assert decode_of_denoiser(stored, steps=3, sub_block=2).strategy == strategy_of("fixed", {"steps": 3})
    for wrong in ({"strategy": "margin"}, ["margin"], {"strategy": "margni", "settings": {}}):
        with pytest.raises(ValueError, match=r"draftsmith\.decode|use one of"):
            decode_of_denoiser(replace(stored, ours=stored.ours | {"decode": wrong}))


def test_evaluate_counts_against_the_base(
    folders: dict[str, str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    common: dict[str, Any] = {"suite": "tasks", "prompts": 3, "max_new_tokens": 6, "k": (3,), "dtype": "float32"}
    for kind, folder in folders.items():
        out = tmp_path / kind
        cfg = EvaluateConfig(folder, out=str(out), thresholds=(0.0, 2.0), strategies=("threshold", "margin"), **common)
        assert run_evaluate(cfg) == 0
        report = json.loads((out / "report.json").read_text())
        assert [row["name"] for row in report["rows"]] == ["threshold 0", "threshold 2", "margin"]
        fast, slow, _ = report["rows"]
        assert report["base"]["tokens_per_forward"] == 1 and slow["tokens_per_forward"] < fast["tokens_per_forward"]
        assert (
            fast["retention"]["prompts"] == 3
            and report["aup"].keys() == {"threshold", "margin"}
            and "forwards" in report["counting"]
        )
        draft = report["self_draft"]
        assert draft is None if kind == "merged" else (draft["same"] == draft["answers"] == 3 and draft["tau"] >= 1)
        card = (Path(folder) / "README.md").read_text()
        assert "| threshold 2 |" in card and "| autoregression | 1.00 |" in card
        assert ("τ = " in card) == (kind == "adapters")
        capsys.readouterr()
    with pytest.raises(ValueError, match=r"trees: .* is a denoiser, these are for drafters"):
        run_evaluate(EvaluateConfig(folders["merged"], trees=("static",), **common))
    for wrong, words in (
        ({"k": (2, 3)}, "drafts at one length per run"),
        ({"strategies": ()}, "give one strategy at least"),
        ({"thresholds": ()}, "give one strategy at least"),
        ({"strategies": ("margin",), "thresholds": (0.5,)}, "thresholds if it has one"),
        ({"strategies": ("learned",)}, "strategy learned needs a trained head"),
    ):
        with pytest.raises(ValueError, match=words):
            run_evaluate(EvaluateConfig(folders["merged"], **common | wrong))
    with pytest.raises(ValueError, match="strategies, thresholds: are for denoisers"):
        run_evaluate(EvaluateConfig("ngram", target="tiny", strategies=("fixed",), **common))


PUSH = """
import sys
from draftsmith.inference.push import PushConfig, run_push
run_push(PushConfig(sys.argv[1], "jane/denoiser"))
"""
LOAD = """
import sys
from draftsmith.inference.generate import GenerateConfig, run_generate
run_generate(GenerateConfig("Hi.", model="jane/denoiser", dtype="float32", max_new_tokens=4))
"""


def test_push_and_load_back(folders: dict[str, str], fake_hub: Any, tmp_path: Path) -> None:
    for kind, folder in folders.items():
        place = tmp_path / kind
        place.mkdir()
        sent = {p.as_posix() for p in stage(Path(folder), "jane/some-model", place)}
        assert {"config.json", "model.safetensors", "README.md", "run.yaml"} <= sent
        assert "draftsmith generate --model jane/some-model" in (place / "README.md").read_text()
        extra = {"tokenizer.json", "tokenizer_config.json", "generation_config.json", "merge.json"}
        assert (extra <= sent) == (kind == "merged")
    folder = Path(folders["merged"])
    settings = json.loads((folder / "tokenizer_config.json").read_text())
    (folder / "tokenizer_config.json").write_text(json.dumps(settings | {"vocab_file": "/home/jane/vocab.txt"}))
    with pytest.raises(ValueError, match=r"tokenizer_config\.json holds what must not be published"):
        stage(folder, "jane/some-model", tmp_path / "merged")
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    (folder / "notes.txt").write_text("mine alone")
    options: dict[str, Any] = {"capture_output": True, "text": True, "timeout": 300}
    environment = fake_hub.environment | {"HF_TOKEN": "hf_PlantedPlantedPlantedPlantedPlant"}
    pushed = subprocess.run([sys.executable, "-c", PUSH, str(folder)], env=environment, **options)
    assert pushed.returncode == 0, pushed.stderr
    assert "notes.txt" not in fake_hub.files["jane/denoiser"]
    loaded = subprocess.run(
        [sys.executable, "-c", LOAD], env=fake_hub.environment | {"HF_HOME": str(tmp_path / "home")}, **options
    )
    assert loaded.returncode == 0 and "denoising passes" in loaded.stdout, loaded.stderr
    raw = bytearray((folder / "model.safetensors").read_bytes())
    raw[-3] ^= 1
    (folder / "model.safetensors").write_bytes(raw)
    with pytest.raises(ValueError, match="sha256"):
        stage(folder, "jane/x", tmp_path / "merged")
