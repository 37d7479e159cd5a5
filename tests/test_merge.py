"""Merging adapters: what is written computes what the adapters do, in a new process too; what a schema cannot say, a
second merge and damaged folders are refused (CASES B54).

Run: pytest tests/test_merge.py
"""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from draftsmith.inference.adapter_folder import Converted, denoiser_of, save_adapters
from draftsmith.inference.check import CheckConfig, check_export
from draftsmith.inference.denoisers import load_denoiser, masked_logits, stored_denoiser
from draftsmith.inference.diffuse import diffuse
from draftsmith.inference.evaluate import run_evaluate
from draftsmith.inference.evaluate_config import EvaluateConfig
from draftsmith.inference.exporters import SCHEMAS, fast_dllm_v2
from draftsmith.inference.exporters.folder import REPLAY, sha256_of
from draftsmith.inference.exporters.layout import RunFacts
from draftsmith.inference.merge import MergeConfig, merge, run_merge
from draftsmith.losses.probs import SamplingParams
from draftsmith.models.adapters import AdapterConfig, Adapters
from draftsmith.models.diffusion import PRESETS, ObjectiveConfig
from draftsmith.models.loading import load_target
from draftsmith.models.pretrained import tiny_target
from draftsmith.models.target import Target

FAMILY = {"plain": "llama", "sdar": "qwen3", "fast_dllm_v2": "qwen2"}
OBJECTIVE = {
    "plain": replace(PRESETS["wedlm"], block=5),
    "sdar": PRESETS["sdar"],
    "fast_dllm_v2": replace(PRESETS["fast_dllm_v2"], block=4),
}
CASES = [(s, tied, mask) for s in SCHEMAS for tied in (False, True) for mask in ("trained", "new")]
CASES.append(("plain", True, "reserved"))
PROMPT, PARAMS = [5, 9, 40, 31, 7], SamplingParams(max_new_tokens=11, ignore_eos=True)
TEXTS = torch.arange(48).reshape(2, 24) * 5 + 3


def converted(schema: str, mask: Any = "trained", *, kind: Any = "lora", **options: Any) -> Converted:
    """Adapters with values, on a small target whose answers end at two ids."""
    vocab = 280 if mask == "new" else 300
    target = tiny_target(**{"width": 32, "layers": 2, "heads": 2, "kv_heads": 2, "vocab": vocab, "tokens": 280,
                            "family": FAMILY[schema]} | options)  # fmt: skip
    target.model.generation_config.eos_token_id = [2, 7]
    target = Target(target.model, target.tokenizer, "small")
    adapters = Adapters(AdapterConfig(rank=4, alpha=8, mask=mask, kind=kind), target)
    torch.manual_seed(5)
    with torch.no_grad():
        for parameter in adapters.trained.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.1)
    return Converted(OBJECTIVE[schema], adapters)


@pytest.fixture
def any_mask(monkeypatch: pytest.MonkeyPatch) -> None:
    """The small vocabularies here do not reach 151665."""
    monkeypatch.setattr(fast_dllm_v2, "MASK", 280)


@pytest.fixture(scope="module")
def merged(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One folder in SDAR's schema."""
    folder = tmp_path_factory.mktemp("merged") / "sdar"
    merge(converted("sdar"), folder, SCHEMAS["sdar"])
    return folder


RELOAD = """
import json, sys, torch
from safetensors.torch import load_file, save_file
from draftsmith.inference.denoisers import load_denoiser, masked_logits, stored_denoiser
from draftsmith.inference.diffuse import diffuse
from draftsmith.losses.probs import SamplingParams
place = sys.argv[1]
texts, out = load_file(f"{place}/texts.safetensors")["texts"], {}
for name in sys.argv[2:]:
    denoiser = load_denoiser(stored_denoiser(f"{place}/{name}"), dtype="float32")
    out[f"{name}.logits"] = masked_logits(denoiser, texts)
    (answer,) = diffuse(denoiser, [PROMPT], SamplingParams(max_new_tokens=11, ignore_eos=True))
    out[f"{name}.ids"] = torch.tensor(answer.ids)
    out[f"{name}.facts"] = torch.tensor([denoiser.block, denoiser.shift, denoiser.mask_id, *denoiser.facts.eos_ids])
save_file(out, f"{place}/out.safetensors")
"""


def test_every_schema_reloads_in_a_new_process(tmp_path: Path, any_mask: None) -> None:
    wanted: dict[str, Any] = {}
    for number, (schema, tied, mask) in enumerate(CASES):
        name, model = f"case{number}", converted(schema, mask, tied=tied)
        denoiser = model.denoiser()
        report = merge(model, tmp_path / name, SCHEMAS[schema])
        assert report["logits"]["difference"] < 1e-4 and report["logits"]["same_top"] == 1
        (answer,) = diffuse(denoiser, [PROMPT], PARAMS)
        facts = [denoiser.block, int(denoiser.shift), denoiser.mask_id, 2, 7]
        wanted[name] = masked_logits(denoiser, TEXTS), answer.ids, facts
    save_file({"texts": TEXTS}, tmp_path / "texts.safetensors")
    program = RELOAD.replace("PROMPT", str(PROMPT))
    done = subprocess.run([sys.executable, "-c", program, str(tmp_path), *wanted], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    found = load_file(tmp_path / "out.safetensors")
    for name, (logits_RV, ids, facts) in wanted.items():
        again_RV = found[f"{name}.logits"]
        assert again_RV[:, logits_RV.shape[1] :].isneginf().all()  # a new row's logit: the mask's
        again_RV = again_RV[:, : logits_RV.shape[1]]
        assert torch.equal(again_RV.isneginf(), logits_RV.isneginf())
        torch.testing.assert_close(again_RV, logits_RV, rtol=0, atol=1e-4)
        assert found[f"{name}.ids"].tolist() == ids and found[f"{name}.facts"].tolist() == facts


def test_a_folder_says_what_engines_read(tmp_path: Path, merged: Path, any_mask: None) -> None:
    config = json.loads((merged / "config.json").read_text())
    stated = {k: config[k] for k in ("model_type", "architectures", "block_size", "mask_token_id", "eos_token_id")}
    assert stated == {
        "model_type": "sdar", "architectures": ["SDARForCausalLM"], "block_size": 4, "mask_token_id": 280, "eos_token_id": [2, 7]
    }  # fmt: skip
    assert config["rope_theta"] == config["rope_parameters"]["rope_theta"] and config["tie_word_embeddings"] is False
    assert "auto_map" not in config and not list(merged.glob("*.py"))
    names = set(load_file(merged / "model.safetensors"))
    assert {"model.layers.1.self_attn.q_norm.weight", "model.layers.0.mlp.up_proj.weight", "lm_head.weight"} <= names
    ours = config["draftsmith"]
    assert (ours["mask_id"], ours["shift"], ours["engines"]["bd_size"], ours["schema"]) == (280, False, 4, "sdar")
    assert ours["decode"] == {"strategy": "threshold", "settings": {"threshold": 0.9}}
    assert any("151669" in limit for limit in ours["limits"])
    assert json.loads((merged / "tokenizer_config.json").read_text())["mask_token"] == "<|MASK|>"
    assert json.loads((merged / "generation_config.json").read_text())["eos_token_id"] == [2, 7]
    card = (merged / "README.md").read_text()
    assert "sglang.launch_server" in card and "SGLang takes 151669" in card and "own token (no shift)" in card
    merge(converted("fast_dllm_v2"), tmp_path / "fast", SCHEMAS["fast_dllm_v2"])
    config = json.loads((tmp_path / "fast/config.json").read_text())
    assert (config["model_type"], config["bd_size"]) == ("Fast_dLLM_Qwen", 4)
    for file in [p for p in tmp_path.rglob("*") if p.suffix in (".json", ".yaml", ".md")]:
        assert str(tmp_path) not in file.read_text()


def test_the_report_names_what_changed_and_by_how_much(tmp_path: Path) -> None:
    model = converted("plain", tied=True)
    before = {n.replace(".base_layer.", "."): t.clone() for n, t in model.adapters.target.model.state_dict().items()}
    merge(model, tmp_path / "x", SCHEMAS["plain"])
    report = json.loads((tmp_path / "x/merge.json").read_text())
    after = load_file(tmp_path / "x/model.safetensors")
    changed = {f"{name}.weight" for name in model.adapters.layers} | {"model.embed_tokens.weight", "lm_head.weight"}
    assert set(report["tensors"]) == changed and report["unchanged"] == len(after) + 1 - len(changed)
    name = "model.layers.1.self_attn.o_proj.weight"
    change = after[name] - before[name]
    row = report["tensors"][name]
    assert row["largest"] == pytest.approx(float(change.abs().max()), rel=1e-5)
    assert row["relative"] == pytest.approx(float(change.norm() / before[name].norm()), rel=1e-5)
    assert report["base_fingerprint"] == model.adapters.target.facts.fingerprint


def test_a_merge_in_bf16_is_as_close_as_a_cast_of_the_exact_one(tmp_path: Path) -> None:
    model = converted("plain", dtype=torch.bfloat16)
    wanted_RV = masked_logits(model.denoiser(), TEXTS)
    merge(model, tmp_path / "half", SCHEMAS["plain"])
    exact = converted("plain", dtype=torch.bfloat16)
    exact.adapters.target.model.float()
    state = {n: t.to(torch.bfloat16) for n, t in exact.adapters.merged().items()}
    plain = tiny_target(width=32, layers=2, heads=2, kv_heads=2, vocab=300, tokens=280, dtype=torch.bfloat16)
    plain.model.load_state_dict(state)
    cast = denoiser_of(exact.objective, plain, 280)

    def gap(denoiser: Any) -> float:
        found_RV = masked_logits(denoiser, TEXTS)
        return float((found_RV - wanted_RV)[:, wanted_RV.isfinite().all(0)].abs().max())

    stored = stored_denoiser(str(tmp_path / "half"))
    assert stored is not None
    assert 0 < gap(load_denoiser(stored, dtype="bfloat16")) <= 2 * gap(cast)
    assert next(iter(load_file(tmp_path / "half/model.safetensors").values())).dtype == torch.bfloat16


REFUSED: list[tuple[str, dict[str, Any], dict[str, Any], str]] = [
    ("sdar", {}, {"family": "qwen2"}, "qwen3's, the base is of family qwen2"),
    ("fast_dllm_v2", {}, {"family": "llama"}, "qwen2's, the base is of family llama"),
    ("sdar", {"shift": True}, {}, "its rows predict the own token"),
    ("fast_dllm_v2", {"shift": False}, {}, "its rows predict the next token"),
    ("sdar", {"clean": "token"}, {}, "objective.clean = token, it means block"),
    ("sdar", {"origin": "answer"}, {}, "objective.origin = answer, it means document"),
    ("sdar", {"layout": "single"}, {}, "objective.layout = single, it means pair"),
    ("fast_dllm_v2", {"inside": "causal"}, {}, "objective.inside = causal, it means full"),
    ("sdar", {}, {"window": 5}, "no sliding windows"),
    ("sdar", {}, {"rope": {"rope_type": "linear", "rope_theta": 1e4, "factor": 2.0}}, "RoPE of type linear"),
    ("fast_dllm_v2", {}, {}, "its mask is 151665, this model's 280"),
]


@pytest.mark.parametrize(("schema", "objective", "options", "words"), REFUSED, ids=lambda x: str(x)[:24])
def test_a_schema_refuses_what_it_cannot_say(
    schema: str, objective: dict[str, Any], options: dict[str, Any], words: str, tmp_path: Path
) -> None:
    model = converted(schema, **options)
    model.objective = replace(model.objective, **objective)
    with pytest.raises(ValueError, match=words):
        merge(model, tmp_path / "x", SCHEMAS[schema])
    assert not (tmp_path / "x").exists()


def test_dual_and_a_gap_before_the_mask_are_refused(tmp_path: Path) -> None:
    target = tiny_target(width=16, heads=2, layers=1, vocab=300, tokens=280)
    dual = Adapters(AdapterConfig(rank=2), target, dual=True)
    with pytest.raises(ValueError, match="noisy rows alone"):
        merge(Converted(PRESETS["dual"], dual), tmp_path / "x", SCHEMAS["plain"])
    save_adapters(tmp_path / "dual", "block_diffusion", PRESETS["dual"], dual, RunFacts())
    with pytest.raises(ValueError, match="dual adapters act on noisy rows alone"):
        run_merge(MergeConfig(str(tmp_path / "dual"), str(tmp_path / "x")))
    gap = Adapters(AdapterConfig(rank=2, mask_id=290), tiny_target(width=16, heads=2, layers=1, vocab=300, tokens=280))
    with pytest.raises(ValueError, match=r"adapters\.mask_id=280"):
        merge(Converted(ObjectiveConfig(), gap), tmp_path / "x", SCHEMAS["plain"])
    assert not (tmp_path / "x").exists()


def small_adapters(folder: Path, kind: Any = "lora") -> Converted:
    """Adapters of the built-in tiny target, in a folder."""
    target = tiny_target()
    adapters = Adapters(AdapterConfig(rank=2, mask="new", kind=kind), target)
    torch.manual_seed(1)
    with torch.no_grad():
        for parameter in adapters.trained.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.05)
    model = Converted(replace(PRESETS["fast_dllm_v2"], block=4), adapters)
    save_adapters(folder, "block_diffusion", model.objective, adapters, RunFacts(train_length=64, command="train x"))
    return model


@pytest.mark.parametrize("kind", ["lora", "full"])
def test_the_command_merges_once(kind: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model, out = small_adapters(tmp_path / "adapters", kind), str(tmp_path / "out")
    run_merge(MergeConfig(str(tmp_path / "adapters"), out, strategy="margin"))
    assert "0 did not" in capsys.readouterr().out if kind == "full" else "did not" in capsys.readouterr().out
    stored = stored_denoiser(out)
    assert stored is not None and stored.ours["decode"] == {"strategy": "margin", "settings": {}}
    assert stored.ours["train_length"] == 64 and "train x" in (tmp_path / "out/run.yaml").read_text()
    found_RV = masked_logits(load_denoiser(stored, dtype="float32"), TEXTS)[:, :256]
    torch.testing.assert_close(found_RV, masked_logits(model.denoiser(), TEXTS), rtol=0, atol=1e-4)
    report = json.loads((tmp_path / "out/merge.json").read_text())
    assert report["tensors"] and report["tensors"]["model.embed_tokens.weight"]["rows_added"] == 1
    with pytest.raises(ValueError, match="is merged already"):
        run_merge(MergeConfig(out, str(tmp_path / "again")))
    with pytest.raises(ValueError, match="a converted model, its adapters merged into it"):
        load_target(out, dtype="float32")
    with pytest.raises(ValueError, match="a converted model, its adapters merged into it"):
        Adapters(AdapterConfig(), load_target(out, dtype="float32", denoises=True))
    with pytest.raises(ValueError, match="choose one of plain, sdar, fast_dllm_v2"):
        run_merge(MergeConfig(str(tmp_path / "adapters"), out, schema="llada"))
    with pytest.raises(ValueError, match="family llama"):
        run_merge(MergeConfig(str(tmp_path / "adapters"), out, schema="sdar"))
    weights = load_file(tmp_path / "adapters/model.safetensors")
    (tmp_path / "adapters/model.safetensors").unlink()
    with pytest.raises(ValueError, match="without their weights"):
        run_merge(MergeConfig(str(tmp_path / "adapters"), out))
    weights["mask_row"][0] = float("nan")
    save_file(weights, tmp_path / "adapters/model.safetensors")
    change_config(tmp_path / "adapters", lambda c: c["draftsmith"].update(sha256=sha_of(tmp_path / "adapters")))
    with pytest.raises(ValueError, match="NaN"):
        run_merge(MergeConfig(str(tmp_path / "adapters"), out))


def test_a_merge_keeps_the_adapters_and_writes_nothing_that_cannot_be_read(tmp_path: Path) -> None:
    small_adapters(tmp_path / "adapters")
    adapters = str(tmp_path / "adapters")
    with pytest.raises(ValueError, match="holds adapters, which would be lost"):
        run_merge(MergeConfig(adapters, adapters))
    assert json.loads((tmp_path / "adapters/config.json").read_text())["draftsmith"]["kind"] == "adapters"
    with pytest.raises(ValueError, match="trained head"):
        run_merge(MergeConfig(adapters, str(tmp_path / "x"), strategy="learned"))
    model = converted("plain", kind="full")
    model.adapters.target.head_weight.data *= 1e6
    with pytest.raises(ValueError, match=r"overflow in torch\.float16 \(lm_head\.weight\)"):
        merge(model, tmp_path / "x", SCHEMAS["plain"], dtype=torch.float16)
    model = converted("plain")
    model.adapters.target.model.config.auto_map = {"AutoModelForCausalLM": "code.Model"}
    merge(model, tmp_path / "plain", SCHEMAS["plain"])
    assert "auto_map" not in json.loads((tmp_path / "plain/config.json").read_text())
    base = model.adapters.target.model
    base.__class__ = type("Own", (type(base),), {"__module__": "transformers_modules.owner.code"})
    with pytest.raises(ValueError, match=r"code of its own \(Own\)"):
        merge(model, tmp_path / "x", SCHEMAS["plain"])
    assert not (tmp_path / "x").exists()


def sha_of(folder: Path) -> str:
    return sha256_of(folder / "model.safetensors")


def change_config(folder: Path, change: Callable[[dict[str, Any]], Any], file: str = "config.json") -> None:
    config = json.loads((folder / file).read_text())
    change(config)
    (folder / file).write_text(json.dumps(config))


def change_weights(folder: Path, change: Callable[[dict[str, torch.Tensor]], Any]) -> None:
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    change_config(folder, lambda c: c["draftsmith"].update(sha256=sha_of(folder)))


def swap_bytes(folder: Path) -> None:
    raw = bytearray((folder / "model.safetensors").read_bytes())
    raw[-3] ^= 1
    (folder / "model.safetensors").write_bytes(raw)


UP = "model.layers.1.mlp.up_proj.weight"
FAULTS: dict[str, tuple[Callable[[Path], Any], str]] = {
    "a changed byte": (swap_bytes, "damaged or changed"),
    "another weight": (lambda f: change_weights(f, lambda t: t[UP].mul_(1.5)), "does not compute what was exported"),
    "NaN": (lambda f: change_weights(f, lambda t: t[UP][0].fill_(float("nan"))), "NaN"),
    "a missing tensor": (lambda f: change_weights(f, lambda t: t.pop(UP)), "missing"),
    "one too many": (lambda f: change_weights(f, lambda t: t.update(more=torch.zeros(2))), "more is unknown"),
    "another shape": (lambda f: change_weights(f, lambda t: t.update({UP: torch.zeros(2, 2)})), "needed"),
    "another mask": (lambda f: change_config(f, lambda c: c["draftsmith"].update(mask_id=7)), "mask_token_id = 280, needed 7"),
    "a mask outside": (lambda f: change_config(f, lambda c: c["draftsmith"].update(mask_id=300)), "no id of 300"),
    "another block": (lambda f: change_config(f, lambda c: c.update(block_size=8)), "block_size = 8, needed 4"),
    "another shift": (lambda f: change_config(f, lambda c: c["draftsmith"].update(shift=True)), "shift = True, needed False"),
    "no objective": (lambda f: change_config(f, lambda c: c["draftsmith"].pop("objective")), "objective is missing"),
    "another end": (lambda f: change_config(f, lambda c: c.update(eos_token_id=9)), "mask and ending ids"),
    "another architecture": (lambda f: change_config(f, lambda c: c.update(architectures=["X"])), "architectures"),
    "another schema": (lambda f: change_config(f, lambda c: c["draftsmith"].update(schema="x")), "known: plain, sdar"),
    "no mask token": (
        lambda f: change_config(f, lambda c: c.pop("mask_token"), "tokenizer_config.json"), "mask and ending ids are None"
    ),
    "no replay": (lambda f: (f / REPLAY).unlink(), "has no replay"),
    "weights beside": (lambda f: save_file({UP: torch.zeros(2)}, f / "z.safetensors"), "z.safetensors beside"),
    "another format": (lambda f: change_config(f, lambda c: c["draftsmith"].update(format=9)), "format 9"),
}  # fmt: skip


@pytest.mark.parametrize("fault", FAULTS)
def test_check_finds(fault: str, merged: Path, tmp_path: Path) -> None:
    shutil.copytree(merged, tmp_path / "x")
    plant, words = FAULTS[fault]
    plant(tmp_path / "x")
    with pytest.raises(ValueError, match=words):
        check_export(CheckConfig(str(tmp_path / "x")))


def test_folders_of_other_projects_are_measured_and_left_alone(merged: Path, tmp_path: Path) -> None:
    folder = tmp_path / "sdar"
    shutil.copytree(merged, folder)
    change_config(folder, lambda c: c.pop("draftsmith"))
    before = {p: sha256_of(p) for p in folder.rglob("*") if p.is_file()}
    cfg = EvaluateConfig(
        str(folder),
        suite="tasks",
        prompts=2,
        max_new_tokens=4,
        dtype="float32",
        out=str(tmp_path / "out"),
        thresholds=(0.9,),
    )
    assert run_evaluate(cfg) == 0
    assert json.loads((tmp_path / "out/report.json").read_text())["base"] is None
    assert before == {p: sha256_of(p) for p in folder.rglob("*") if p.is_file()}
    with pytest.raises(ValueError, match="a model of its own, with no base"):
        run_evaluate(replace(cfg, target="tiny"))


def test_check_agrees_with_what_was_exported(merged: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    result = check_export(CheckConfig(str(merged)))
    assert result.pairs == result.agreeing == 16 and result.difference < 1e-5
    with pytest.raises(ValueError, match="stand alone"):
        check_export(CheckConfig(str(merged), target="tiny"))
    small_adapters(tmp_path / "adapters")
    check_export(CheckConfig(str(tmp_path / "adapters")))
    assert "block 4, shift True, mask 256" in capsys.readouterr().out
    change_config(tmp_path / "adapters", lambda c: c["draftsmith"]["target"].update(name="/etc/model"))
    with pytest.raises(ValueError, match="a Hub id or a plain name, no path"):
        check_export(CheckConfig(str(tmp_path / "adapters")))
    change_config(tmp_path / "adapters", lambda c: c["draftsmith"]["target"].update(name="tiny"))
    change_weights(tmp_path / "adapters", lambda t: t["mask_row"].fill_(float("inf")))
    with pytest.raises(ValueError, match="infinite"):
        check_export(CheckConfig(str(tmp_path / "adapters")))
