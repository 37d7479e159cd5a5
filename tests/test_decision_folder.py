"""Decision heads from training to decoding: learnt, saved beside the adapters, loaded, decoded with; what is refused.

pytest tests/test_decision_folder.py
"""

import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from safetensors.torch import load_file, save_file
from scripted_denoiser import ScriptedDenoiser, V, script

from draftsmith.configs.heads import HeadsConfig
from draftsmith.configs.parse import parse, to_yaml
from draftsmith.inference.adapter_folder import load_adapters, save_adapters
from draftsmith.inference.decision_folder import load_heads, save_heads, strategy_beside
from draftsmith.inference.denoisers import complete, decode_of_denoiser, stored_denoiser
from draftsmith.inference.diffuse import DiffuseConfig, diffuse
from draftsmith.inference.exporters.folder import sha256_of
from draftsmith.inference.exporters.layout import RunFacts
from draftsmith.inference.push import stage
from draftsmith.inference.rollout import RolloutConfig, run_rollout
from draftsmith.inference.strategies import strategy_of
from draftsmith.losses.probs import SamplingParams
from draftsmith.models.adapters import AdapterConfig, Adapters
from draftsmith.models.decision_heads import (
    Blocks,
    PairDependency,
    UnmaskFilter,
    fit_filter,
    fit_pairs,
    held_out,
)
from draftsmith.models.diffusion import PRESETS
from draftsmith.models.pretrained import tiny_target
from draftsmith.train import fit_decision_heads

ROOT = Path(__file__).resolve().parent.parent
RECIPE = ROOT / "configs/heads_smollm2.yaml"
PARAMS = SamplingParams(max_new_tokens=4, ignore_eos=True)
BLOCK = 4


def signed(signs_BT: torch.Tensor, tokens_BT: torch.Tensor) -> torch.Tensor:
    """Logits, which are the hidden states: sure of a token, with a sign in the place of token 0."""
    x_BTV = torch.nn.functional.one_hot(tokens_BT, V).double() * 12
    x_BTV[..., 0] = 3 * signs_BT
    return x_BTV


def lesson(u: int = 400) -> Blocks:
    """Candidates of more than 0.6 are right; a place depends on those whose sign is its own."""
    dice = torch.Generator().manual_seed(0)
    open_UC = torch.rand(u, BLOCK, generator=dice) < 0.8
    open_UC[:, 0] = True
    sure_UC = torch.rand(u, BLOCK, generator=dice) * open_UC
    signs_UC = torch.randint(0, 2, (u, BLOCK), generator=dice) * 2 - 1
    hidden_UCD = signed(signs_UC, torch.randint(1, 9, (u, BLOCK), generator=dice)).float()
    change_UC = torch.where(signs_UC == signs_UC[:, :1], 0.9, 0.05) * open_UC
    change_UC[:, 0] = 0
    return Blocks(open_UC, sure_UC, (sure_UC > 0.6) & open_UC, hidden_UCD, torch.zeros(u, dtype=torch.int64), change_UC)


@pytest.fixture(scope="module")
def taught(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of adapters (their config alone) with heads for the scripted denoiser."""
    folder = tmp_path_factory.mktemp("taught")
    (folder / "config.json").write_text(json.dumps({"draftsmith": {"sha256": "of-the-adapters"}}))
    torch.manual_seed(0)
    filter, pairs, blocks = UnmaskFilter(BLOCK), PairDependency(V, rank=4), lesson()
    fit_filter(filter, blocks, steps=200)
    fit_pairs(pairs, blocks, steps=300, rate=1e-2)
    figures = held_out(filter, pairs, blocks)
    assert figures["filter_right"] > 0.95 and figures["filter_decided"] > 1.5 * figures["threshold_decided"]
    assert figures["pairs_error"] < 0.3 * figures["pairs_plain"]
    save_heads(folder, ScriptedDenoiser(script([[0.5]])), filter, pairs, RunFacts(training=figures))
    again = load_heads(folder, ScriptedDenoiser(script([[0.5]])))
    for before, after in ((filter, again[0]), (pairs, again[1])):
        assert all(torch.equal(a, b) for a, b in zip(before.parameters(), after.parameters(), strict=True))
        assert not any(p.requires_grad for p in after.parameters())
    return folder


def test_a_learned_filter_decides(taught: Path) -> None:
    """What it takes for final goes at once, below the usual threshold; then the best, pass by pass."""
    denoiser = ScriptedDenoiser(script([[0.85, 0.2, 0.8, 0.3]]), BLOCK)
    strategy, made_by = strategy_beside(taught, denoiser, "learned")
    (result,) = diffuse(denoiser, [[1]], PARAMS, DiffuseConfig(strategy))
    assert result.ids == [1, 2, 3, 4] and result.order == [1, 3, 1, 2]
    assert made_by["adapters"] == "of-the-adapters" and len(made_by["heads"]) == 64


def test_dependent_places_are_not_decided_together(taught: Path) -> None:
    """Signs + + - -: one of each sign per pass."""

    def rule(number: int, ids_BT: torch.Tensor, positions_BT: torch.Tensor) -> torch.Tensor:
        place_BT = (positions_BT - 1).clamp(0, 3)
        return signed(torch.where(place_BT < 2, 1, -1), place_BT + 1)

    denoiser = ScriptedDenoiser(rule, BLOCK)
    strategy, _ = strategy_beside(taught, denoiser, "independent", {"bound": 0.4})
    (result,) = diffuse(denoiser, [[1]], PARAMS, DiffuseConfig(strategy))
    assert result.ids == [1, 2, 3, 4] and result.order is not None
    assert sorted(result.order[:2]) == sorted(result.order[2:]) == [1, 2]
    (result,) = diffuse(denoiser, [[1]], PARAMS, DiffuseConfig(strategy_of("threshold")))
    assert result.order == [1, 1, 1, 1]  # all of them are sure


def test_heads_of_another_model_or_damaged_ones_are_refused(taught: Path, tmp_path: Path) -> None:
    denoiser: Any = ScriptedDenoiser(script([[0.5]]), BLOCK)

    def copy(change: Callable[[Path, dict[str, Any]], None]) -> Path:
        folder = tmp_path / "changed"
        shutil.rmtree(folder, ignore_errors=True)
        shutil.copytree(taught, folder)
        config = json.loads((folder / "heads/config.json").read_text())
        change(folder, config["draftsmith"])
        (folder / "heads/config.json").write_text(json.dumps(config))
        return folder

    def trained_on(folder: Path, ours: dict[str, Any]) -> None:
        (folder / "config.json").write_text(json.dumps({"draftsmith": {"sha256": "of-others"}}))

    def damaged(folder: Path, ours: dict[str, Any]) -> None:
        tensors = load_file(folder / "heads/model.safetensors")
        save_file({n: t + 1 for n, t in tensors.items()}, folder / "heads/model.safetensors")

    def infinite(folder: Path, ours: dict[str, Any]) -> None:
        tensors = load_file(folder / "heads/model.safetensors")
        save_file({n: t / 0 for n, t in tensors.items()}, folder / "heads/model.safetensors")
        ours["sha256"] = sha256_of(folder / "heads/model.safetensors")

    for change, words in (
        (trained_on, "another model: adapters = 'of-the-adapters', here it is 'of-others'"),
        (lambda f, o: o.update(target="x"), "another model: target = 'x'"),
        (lambda f, o: o.update(block=8), "another model: block = 8, here it is 4"),
        (lambda f, o: o["filter"].update(width=7), "do not fit"),
        (lambda f, o: o.update(kind="adapters"), "no decision heads of ours"),
        (damaged, "damaged or changed"),
        (infinite, "NaN or infinite"),
    ):
        with pytest.raises(ValueError, match=words):
            load_heads(copy(change), denoiser)
    with pytest.raises(ValueError, match="has no decision heads; train them"):
        load_heads(tmp_path, denoiser)
    with pytest.raises(ValueError, match="taken from beside the adapters"):
        strategy_beside(taught, denoiser, "learned", {"filter": 1})
    with pytest.raises(ValueError, match=r"filter\.block = 2, this model's is 4"):
        save_heads(taught, denoiser, UnmaskFilter(2), PairDependency(V), RunFacts())


def test_the_script_trains_what_decoding_loads(tmp_path: Path) -> None:
    """From a folder of adapters to answers; the base and its adapters stay as they are."""
    target, objective = tiny_target(), replace(PRESETS["fast_dllm_v2"], block=BLOCK)
    adapters = Adapters(AdapterConfig(rank=2, mask="new"), target)
    export = save_adapters(tmp_path / "export", "block_diffusion", objective, adapters, RunFacts())
    before = sha256_of(export / "model.safetensors")
    argv = [
        "--config", str(RECIPE), f"init_from={export}", "target.name=tiny", "target.dtype=float32", "data.limit=6",
        "data.max_length=128", "row_length=128", "blocks=60", "filter.steps=20", "pairs.steps=20", "device=cpu",
    ]  # fmt: skip
    assert fit_decision_heads.main(argv) == 0
    assert sha256_of(export / "model.safetensors") == before
    ours = json.loads((export / "heads/config.json").read_text())["draftsmith"]
    assert ours["training"]["blocks"] >= 60 and ours["adapters"] == before and ours["filter"]["block"] == BLOCK
    for file in ("config.json", "run.yaml"):
        assert str(tmp_path) not in (export / "heads" / file).read_text()
    first = load_file(export / "heads/model.safetensors")
    assert fit_decision_heads.main(argv) == 0
    again = load_file(export / "heads/model.safetensors")
    assert first.keys() == again.keys() and all(torch.equal(first[n], again[n]) for n in first)

    denoiser = load_adapters(str(export), tiny_target()).denoiser()
    for name in ("learned", "independent"):
        strategy, _ = strategy_beside(export, denoiser, name)
        prompts_of_ids, params = [[5, 9, 77], [44]], SamplingParams(max_new_tokens=9)
        results = diffuse(denoiser, prompts_of_ids, params, DiffuseConfig(strategy))
        stored = stored_denoiser(str(export))
        assert stored is not None
        how = complete(stored, decode_of_denoiser(stored, name), denoiser)  # as `generate` and `evaluate` do
        again_results = diffuse(denoiser, prompts_of_ids, params, how)
        assert all(r.ids and r.ids == a.ids for r, a in zip(results, again_results, strict=True))
        out = tmp_path / f"{name}.jsonl"
        prompts = tmp_path / "prompts.jsonl"
        prompts.write_text(json.dumps({"messages": [{"role": "user", "content": "hello"}]}) + "\n")
        run_rollout(
            RolloutConfig(
                out=str(out),
                data=replace(RolloutConfig(out="x.jsonl").data, source=str(prompts)),
                target="tiny",
                dtype="float32",
                adapters=str(export),
                strategy=name,
                max_new_tokens=8,
                order=True,
            )
        )
        assert json.loads(out.read_text())["order"]
        assert "heads" in json.loads(out.with_name(out.name + ".settings.json").read_text())
    (tmp_path / "staged").mkdir()
    sent = {p.as_posix() for p in stage(export, "jane/heads", tmp_path / "staged")}
    assert {"heads/config.json", "heads/model.safetensors", "heads/run.yaml"} <= sent
    with pytest.raises(ValueError, match="adapters fit their own base"):
        fit_decision_heads.main([*argv, f"init_from={other(tmp_path)}"])


def other(tmp_path: Path) -> Path:
    """Adapters of another base."""
    target = tiny_target(seed=1)
    adapters = Adapters(AdapterConfig(rank=2, mask="new"), target)
    objective = replace(PRESETS["fast_dllm_v2"], block=BLOCK)
    return save_adapters(tmp_path / "other", "block_diffusion", objective, adapters, RunFacts())


def test_the_recipe_parses_and_prints_to_the_same_settings(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = parse(HeadsConfig, ["--config", str(RECIPE)], prog="x")
    (tmp_path / "again.yaml").write_text(to_yaml(config))
    assert parse(HeadsConfig, ["--config", str(tmp_path / "again.yaml")], prog="x") == config
    assert yaml.safe_load(RECIPE.read_text())["method"] == config.method
    for pair, words in (("blocks=0", "blocks must be at least 1"), ("row_length=8", "does not fit row_length=8")):
        with pytest.raises(ValueError, match=words):
            parse(HeadsConfig, ["--config", str(RECIPE), pair], prog="x")
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(ValueError, match="one process"):
        fit_decision_heads.main(["--config", str(RECIPE)])
