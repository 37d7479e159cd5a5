"""Exports of consistency models: an ordinary checkpoint that computes what the adapters do; damaged ones are refused.

Run: pytest tests/test_consistency_folder.py
"""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from draftsmith.inference.check import CheckConfig, check_export
from draftsmith.inference.consistency_folder import (
    jacobi_of,
    load_consistency,
    replayed,
    save_consistency,
    stored_consistency,
)
from draftsmith.inference.denoisers import stored_denoiser
from draftsmith.inference.exporters.folder import REPLAY, sha256_of
from draftsmith.inference.exporters.layout import RunFacts
from draftsmith.inference.load import read_export_config
from draftsmith.inference.push import stage
from draftsmith.models.adapters import AdapterConfig, Adapters
from draftsmith.models.jacobi import JacobiConfig
from draftsmith.models.loading import load_target
from draftsmith.models.pretrained import tiny_target
from draftsmith.models.target import Target

OBJECTIVE = {"teacher": "own", "anchor": 10.0, "divergence": "kl"}
RUN = RunFacts(
    command="train --out /home/jane/runs/x",
    data={"answers": 40},
    training={"held-out cross-entropy": 1.25},
    train_length=64,
)
TEXTS = torch.arange(48).reshape(2, 24) * 5 + 3
# mask, tied, kind, dtype
CASES: list[tuple[Any, bool, Any, torch.dtype]] = [
    ("none", True, "lora", torch.float32),
    ("none", False, "full", torch.float32),
    ("reserved", False, "lora", torch.float64),
    ("trained", False, "lora", torch.float32),
    ("trained", True, "lora", torch.float64),
    ("trained", True, "full", torch.float32),
    ("new", True, "lora", torch.float32),
    ("new", False, "lora", torch.float32),
]


def trained(mask: Any = "none", tied: bool = False, kind: Any = "lora", dtype: torch.dtype = torch.float32) -> Adapters:
    """Adapters with values, on a small target whose answers end at two ids; 20 rows of its embedding have no token."""
    target = tiny_target(width=32, layers=2, heads=2, kv_heads=2, vocab=300, tokens=280, tied=tied, dtype=dtype)
    target.model.generation_config.eos_token_id = [2, 7]
    target = Target(target.model, target.tokenizer, "small")
    adapters = Adapters(AdapterConfig(rank=4, alpha=8, mask=mask, kind=kind), target)
    torch.manual_seed(5)
    with torch.no_grad():
        for parameter in adapters.trained.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.05)
    return adapters


def save(folder: Path, adapters: Adapters, **decode: Any) -> Path:
    return save_consistency(folder, "consistency", OBJECTIVE, adapters, RUN, JacobiConfig(**decode))


@pytest.fixture(scope="module")
def exported(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One folder, of a model with a trained mask row."""
    return save(
        tmp_path_factory.mktemp("consistency") / "export", trained("trained", True), block=8, start="mask", mask_id=280
    )


@pytest.mark.parametrize(("mask", "tied", "kind", "dtype"), CASES, ids=lambda x: str(x).removeprefix("torch."))
def test_transformers_loads_what_the_adapters_compute(
    mask: Any, tied: bool, kind: Any, dtype: torch.dtype, tmp_path: Path
) -> None:
    adapters = trained(mask, tied, kind, dtype)
    target, ids_ST = adapters.target, TEXTS.clone()
    if adapters.mask_id is not None:
        ids_ST[1, 15:] = adapters.mask_id
    with adapters.view("noisy"), torch.no_grad():
        hidden_STD = target.forward(ids_ST, torch.arange(24).expand(2, 24)).last_hidden_BTD
        wanted_STV = target.head(hidden_STD)
    folder = save(tmp_path / "x", adapters)
    model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype)
    with torch.no_grad():
        found_STV = model(ids_ST).logits
    assert found_STV.shape[-1] == 300 + (mask == "new")
    largest = float(wanted_STV.abs().max())
    atol = 1e-11 if dtype == torch.float64 else 1e-5
    torch.testing.assert_close(found_STV[..., :300] / largest, wanted_STV / largest, rtol=0, atol=atol)
    assert model.config.tie_word_embeddings is (tied and mask in ("none", "reserved"))
    tokens = AutoTokenizer.from_pretrained(folder)
    assert len(tokens) == 280 and tokens.chat_template == target.tokenizer.chat_template and tokens.mask_token is None
    assert load_target(str(folder), dtype="float32").facts.eos_ids == (2, 7)
    result = check_export(CheckConfig(str(folder)))
    assert result.pairs == result.agreeing == 32 and result.difference < 1e-5
    report = json.loads((folder / "merge.json").read_text())
    assert report["logits"]["difference"] < 1e-5 and report["logits"]["same_top"] == 1
    if kind == "lora":
        names = {f"{name}.weight" for name in adapters.layers}
        names |= {"model.embed_tokens.weight"} if mask in ("trained", "new") else set()
        assert set(report["tensors"]) == names | ({"lm_head.weight"} if mask == "new" else set())


def test_a_mask_is_seen_by_the_replay() -> None:
    adapters = trained("trained")
    ids_ST, positions_R2 = replayed(adapters.target, adapters.mask_id)
    masked_R = ids_ST[positions_R2[:, 0], positions_R2[:, 1]] == adapters.mask_id
    assert ids_ST.shape == (4, 24) and len(masked_R) == 32 and 4 <= int(masked_R.sum()) <= 8
    assert not (replayed(adapters.target, None)[0] == adapters.mask_id).any()


def test_half_types_are_stored_as_they_were_trained_beside(tmp_path: Path) -> None:
    folder = save(tmp_path / "x", trained("none", dtype=torch.bfloat16))
    assert {t.dtype for t in load_file(folder / "model.safetensors").values()} == {torch.bfloat16}
    assert json.loads((folder / "config.json").read_text())["torch_dtype"] == "bfloat16"
    assert check_export(CheckConfig(str(folder))).difference < 1e-5


def test_the_folder_says_what_it_is(exported: Path) -> None:
    config = json.loads((exported / "config.json").read_text())
    assert config["model_type"] == "llama" and config["architectures"] == ["LlamaForCausalLM"]
    assert config["eos_token_id"] == [2, 7] and config["rope_theta"] == 10000
    ours = config["draftsmith"]
    assert ours.keys() == {
        "format", "kind", "method", "target", "objective", "decode", "train_length", "mask_id", "limits", "sha256"
    }  # fmt: skip
    assert (ours["kind"], ours["method"], ours["objective"], ours["train_length"]) == (
        "consistency", "consistency", OBJECTIVE, 64
    )  # fmt: skip
    assert (ours["decode"]["start"], ours["decode"]["mask_id"], ours["mask_id"]) == ("mask", 280, 280)
    assert ours["target"]["name"] == "small" and ours["sha256"] == sha256_of(exported / "model.safetensors")
    stored = stored_consistency(str(exported))
    assert stored is not None and jacobi_of(stored) == JacobiConfig(block=8, start="mask", mask_id=280)
    assert jacobi_of(stored, JacobiConfig(block=4)) == JacobiConfig(block=4, start="mask", mask_id=280)
    assert jacobi_of(stored, JacobiConfig(start="last")).start == "last"
    usual = JacobiConfig()
    assert jacobi_of(stored, usual, {"drafter.jacobi.block"}).block == 16
    assert jacobi_of(stored, usual, {"drafter.jacobi.start"}) == JacobiConfig(block=8)
    assert stored_denoiser(str(exported)) is None
    card = (exported / "README.md").read_text()
    for words in (
        "AutoModelForCausalLM", "vllm serve", "draftsmith generate --model", "token for token", "jacobi`, block 8",
        "held-out cross-entropy: 1.25", "objective, divergence | kl", "| mask token | id 280 |", "Not measured yet",
    ):  # fmt: skip
        assert words in card, words
    for file in [p for p in exported.rglob("*") if p.suffix in (".json", ".yaml", ".md")]:
        assert str(exported.parent) not in file.read_text() and "/home/jane" not in file.read_text()
    with pytest.raises(ValueError, match="holds a consistency model, a target of its own"):
        read_export_config(str(exported))


def test_a_new_mask_is_suppressed_where_transformers_generates(tmp_path: Path) -> None:
    folder = save(tmp_path / "x", trained("new"), start="mask", mask_id=300)
    assert json.loads((folder / "generation_config.json").read_text())["suppress_tokens"] == [300]
    assert "id 300 is the mask's and no token" in (folder / "README.md").read_text()
    assert load_target(str(folder), dtype="float32").facts.tokens == 280  # so that it is never drawn here


def test_an_export_is_trained_on(exported: Path, tmp_path: Path) -> None:
    base = load_target(str(exported), dtype="float32")
    adapters = Adapters(AdapterConfig(rank=2, mask="none"), base)
    with torch.no_grad():
        for parameter in adapters.trained.parameters():
            parameter.add_(0.01)
    folder = save(tmp_path / "round2", adapters, block=32)
    ours = json.loads((folder / "config.json").read_text())["draftsmith"]
    assert ours["target"]["name"] == "export" and ours["target"]["fingerprint"] == base.facts.fingerprint
    assert ours["decode"]["block"] == 32 and ours["mask_id"] is None
    check_export(CheckConfig(str(folder)))


def test_what_cannot_be_exported_leaves_nothing_behind(tmp_path: Path) -> None:
    for adapters, decode, words in (
        (trained("none"), {"start": "mask", "mask_id": 5}, "trained with no mask"),
        (trained("trained"), {"start": "mask", "mask_id": 5}, "trained with mask 280"),
        (broken(trained("none")), {}, "NaN"),
    ):
        with pytest.raises(ValueError, match=words):
            save(tmp_path / "x", adapters, **decode)
        assert not list(tmp_path.iterdir())
    (tmp_path / "notes").mkdir()
    (tmp_path / "notes/mine.txt").write_text("mine")
    with pytest.raises(ValueError, match="no draftsmith export"):
        save(tmp_path / "notes", trained("none"))


def broken(adapters: Adapters) -> Adapters:
    with torch.no_grad():
        next(adapters.trained.parameters())[0, 0] = float("nan")
    return adapters


def change(folder: Path, edit: Callable[[dict[str, Any]], Any], file: str = "config.json") -> None:
    config = json.loads((folder / file).read_text())
    edit(config)
    (folder / file).write_text(json.dumps(config))


def reweigh(folder: Path, edit: Callable[[dict[str, torch.Tensor]], Any]) -> None:
    tensors = load_file(folder / "model.safetensors")
    edit(tensors)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    change(folder, lambda c: c["draftsmith"].update(sha256=sha256_of(folder / "model.safetensors")))


def swap_bytes(folder: Path) -> None:
    raw = bytearray((folder / "model.safetensors").read_bytes())
    raw[-3] ^= 1
    (folder / "model.safetensors").write_bytes(raw)


def ours(key: str, value: Any, inside: str | None = None) -> Callable[[Path], None]:
    """A fault: `draftsmith.key` (or `draftsmith.inside.key`) has another value."""
    return lambda f: change(f, lambda c: (c["draftsmith"][inside] if inside else c["draftsmith"]).update({key: value}))


UP = "model.layers.1.mlp.up_proj.weight"
FAULTS: dict[str, tuple[Callable[[Path], Any], str]] = {
    "a changed byte": (swap_bytes, "damaged or changed"),
    "another weight": (lambda f: reweigh(f, lambda t: t[UP].mul_(1.5)), "does not compute what was exported"),
    "NaN": (lambda f: reweigh(f, lambda t: t[UP][0].fill_(float("nan"))), "NaN"),
    "a missing tensor": (lambda f: reweigh(f, lambda t: t.pop(UP)), "missing keys: .*up_proj"),
    "one too many": (lambda f: reweigh(f, lambda t: t.update(more=torch.zeros(2))), "unexpected keys: more"),
    "weights beside": (lambda f: save_file({UP: torch.zeros(2)}, f / "z.safetensors"), "z.safetensors beside"),
    "another base of RoPE": (
        lambda f: change(f, lambda c: (c.update(rope_theta=100), c["rope_parameters"].update(rope_theta=100))),
        "does not compute what was exported",
    ),
    "another end": (lambda f: change(f, lambda c: c.update(eos_token_id=9)), "its ending ids are"),
    "no objective": (lambda f: change(f, lambda c: c["draftsmith"].pop("objective")), r"lacks draftsmith\.objective"),
    "an objective of another kind": (ours("objective", 3), r"draftsmith\.objective = 3"),
    "no decode": (ours("decode", None), r"draftsmith\.decode is missing"),
    "an unknown setting": (ours("depth", 2, "decode"), r"draftsmith\.decode: depth on one side only"),
    "no block": (ours("block", 0, "decode"), "block"),
    "a block of text": (ours("block", "16", "decode"), r"draftsmith\.decode\.block = '16': needed int"),
    "a window of number": (ours("window", 3, "decode"), r"draftsmith\.decode\.window = 3: needed Literal"),
    "a switch for a number": (ours("recycle", True, "decode"), r"draftsmith\.decode\.recycle = True: needed int"),
    "a vast block": (ours("block", 10**9, "decode"), r"decode\.block x .*blocks = 1000000000, .*max_positions is"),
    "vast blocks": (ours("blocks", 10**9, "decode"), r"decode\.blocks = 8000000000, .*max_positions is"),
    "vast positions": (ours("max_positions", "many", "target"), r"draftsmith\.target\.max_positions is 'many'"),
    "another mask": (ours("mask_id", 7), r"decode\.mask_id = 280, draftsmith\.mask_id is 7"),
    "a mask outside": (ours("mask_id", 300), "no id of 300"),
    "a path": (ours("name", "/etc/model", "target"), "no path"),
    "another tokenizer": (ours("tokenizer_hash", "0" * 64, "target"), "its tokenizer"),
    "another format": (ours("format", 9), "format 9"),
    "no replay": (lambda f: (f / REPLAY).unlink(), "has no replay"),
}  # fmt: skip


@pytest.mark.parametrize("fault", FAULTS)
def test_check_finds(fault: str, exported: Path, tmp_path: Path) -> None:
    shutil.copytree(exported, tmp_path / "x")
    plant, words = FAULTS[fault]
    plant(tmp_path / "x")
    with pytest.raises(ValueError, match=words):
        check_export(CheckConfig(str(tmp_path / "x")))


def test_check_takes_no_target(exported: Path) -> None:
    with pytest.raises(ValueError, match="stand alone"):
        check_export(CheckConfig(str(exported), target="tiny"))


PUSH = """
import sys
from draftsmith.inference.push import PushConfig, run_push
run_push(PushConfig(sys.argv[1], "jane/consistent"))
"""
LOAD = """
from draftsmith.inference.consistency_folder import load_consistency, stored_consistency
from transformers import AutoModelForCausalLM
stored = stored_consistency("jane/consistent")
ours, plain = load_consistency(stored, dtype="float32").model, AutoModelForCausalLM.from_pretrained(stored.folder)
print(stored.ours["kind"], all((a == b).all() for a, b in zip(ours.parameters(), plain.parameters(), strict=True)))
"""


def test_push_and_load_back(exported: Path, fake_hub: Any, tmp_path: Path) -> None:
    folder = tmp_path / "export"
    shutil.copytree(exported, folder)
    (folder / "notes.txt").write_text("mine alone")
    options: dict[str, Any] = {"capture_output": True, "text": True, "timeout": 300}
    token = "hf_PlantedPlantedPlantedPlantedPlant"
    pushed = subprocess.run(
        [sys.executable, "-c", PUSH, str(folder)], env=fake_hub.environment | {"HF_TOKEN": token}, **options
    )
    assert pushed.returncode == 0, pushed.stderr
    sent = set(fake_hub.files["jane/consistent"])
    wanted = {"config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json", "generation_config.json"}
    assert wanted | {"merge.json", "README.md", "run.yaml", REPLAY} <= sent and "notes.txt" not in sent
    assert "vllm serve jane/consistent" in fake_hub.files["jane/consistent"]["README.md"].decode()
    loaded = subprocess.run(
        [sys.executable, "-c", LOAD], env=fake_hub.environment | {"HF_HOME": str(tmp_path / "home")}, **options
    )
    assert loaded.stdout.split() == ["consistency", "True"], loaded.stderr
    (tmp_path / "stage").mkdir()
    change(folder, lambda c: c.update(note=token))
    with pytest.raises(ValueError, match="a secret"):
        stage(folder, "jane/x", tmp_path / "stage")
    change(folder, lambda c: c.pop("note"))
    swap_bytes(folder)
    with pytest.raises(ValueError, match="sha256"):
        stage(folder, "jane/x", tmp_path / "stage")
    assert load_consistency(stored_of(exported), dtype="float32").facts.tokens == 280


def stored_of(folder: Path) -> Any:
    stored = stored_consistency(str(folder))
    assert stored is not None
    return stored
