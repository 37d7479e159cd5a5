"""The two diffusion trainings as scripts: settings, runs, exact resume, two processes, what is written and refused.

Run: pytest tests/test_convert_diffusion.py
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from diffusion_worker import CASES, every_case
from safetensors.torch import load_file, save_file
from test_distributed import accelerate, facts, losses, same_bits
from test_run_report import observed

from draftsmith.configs.diffusion import read_config
from draftsmith.configs.parse import UsageError, to_yaml
from draftsmith.inference.adapter_folder import load_adapters
from draftsmith.inference.exporters.folder import sha256_of
from draftsmith.models.diffusion import PRESETS
from draftsmith.models.pretrained import tiny_target
from draftsmith.train import convert_block_diffusion, distill_certainty

ROOT = Path(__file__).resolve().parent.parent
CONVERT = ["--config", str(ROOT / "configs/convert_quick.yaml")]
CERTAINTY = ["--config", str(ROOT / "configs/certainty_quick.yaml")]
METHODS = ("block_diffusion", "certainty", "on_policy")
SHORT = ["data.limit=6", "data.max_length=128", "batch.row_length=128", "batch.rows=1", "evaluate.conversations=2"]


def lines(run: Path, kind: str) -> list[dict[str, Any]]:
    return [x for x in map(json.loads, (run / "metrics.jsonl").read_text().splitlines()) if x["kind"] == kind]


@pytest.fixture(scope="module")
def converted(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of six steps."""
    run = tmp_path_factory.mktemp("converted")
    assert convert_block_diffusion.main([*CONVERT, *SHORT, "budget.steps=6", "evaluate.every=3", f"run={run}"]) == 0
    return run


# Settings


@pytest.mark.parametrize("name", PRESETS)
def test_a_preset_gives_the_defaults(name: str) -> None:
    base = ["budget.steps=1", f"preset={name}"]
    assert read_config(base, "x", "block_diffusion").objective == PRESETS[name]
    changed = read_config([*base, "objective.block=6", "objective.levels=0.3,0.9"], "x", "block_diffusion").objective
    assert changed == replace(PRESETS[name], block=6, levels=(0.3, 0.9))


RECIPES = [p for p in sorted(ROOT.glob("configs/*.yaml")) if yaml.safe_load(p.read_text())["method"] in METHODS]


@pytest.mark.parametrize("path", RECIPES, ids=lambda p: p.stem)
def test_recipes_parse_and_print_to_the_same_settings(path: Path, tmp_path: Path) -> None:
    config = read_config(["--config", str(path)], "x", yaml.safe_load(path.read_text())["method"])
    assert config.run == f"runs/{path.stem}"
    (tmp_path / "again.yaml").write_text(to_yaml(config))
    assert read_config(["--config", str(tmp_path / "again.yaml")], "x", config.method) == config


def test_a_recipe_changes_its_preset() -> None:
    assert read_config(CONVERT, "x", "block_diffusion").objective == replace(PRESETS["fast_dllm_v2"], block=4)


def test_wrong_requests_are_refused_by_name() -> None:
    for argv, method, words in (
        (["preset=fast_dllm"], "block_diffusion", "nearest: 'fast_dllm_v2'"),
        (["objective.blok=3"], "block_diffusion", "nearest valid key: 'objective.block'"),
        (["preset=sdar", "objective.ar_weight=1"], "block_diffusion", "the answer leaks"),
        (["method=certainty", "budget.steps=1"], "block_diffusion", "this script is for block_diffusion"),
        (
            ["init_from=x", "objective.block=3", "budget.steps=1"],
            "certainty",
            "objective.block: the adapters in init_from bring",
        ),
        (["init_from=x", "adapters.rank=3", "budget.steps=1"], "block_diffusion", "adapters.rank: the adapters"),
        (
            ["init_from=x", "method=on_policy", "objective.block=3", "budget.steps=1"],
            "on_policy",
            "objective.block: the",
        ),
        (["preset=idlm", "conversion.curriculum=1,2", "budget.steps=1"], "block_diffusion", "does not end with"),
        (["conversion.labels=teacher", "budget.steps=1"], "block_diffusion", "needs layout=single"),
        (["on_policy.level=0", "budget.steps=1"], "on_policy", "level must lie in"),
        (["on_policy.second=trajectory", "budget.steps=1"], "certainty", r"on_policy\.\* is for method=on_policy"),
        (["certainty.beta=2", "budget.steps=1"], "block_diffusion", r"certainty\.\* is for method=certainty"),
        ([], "block_diffusion", "no budget"),
    ):
        with pytest.raises((UsageError, ValueError), match=words):
            read_config(argv, "x", method)
    with pytest.raises(ValueError, match="starts from a model that denoises"):
        distill_certainty.main(["budget.steps=1", "target.name=tiny", "target.dtype=float32", "preset=sdar"])


# Runs


def test_a_run_learns_and_leaves_a_folder(converted: Path) -> None:
    heldout = lines(converted, "heldout")
    observed(converted)
    assert [x["step"] for x in heldout] == [0, 3, 6] and heldout[2]["hidden_loss"] < heldout[0]["hidden_loss"]
    assert {"hidden_loss", "accuracy", "sure"} <= heldout[0].keys()
    ours = json.loads((converted / "export/config.json").read_text())["draftsmith"]
    assert (ours["block"], ours["shift"], ours["mask_id"], ours["dual"]) == (4, True, 256, False)
    assert yaml.safe_load((converted / "export/run.yaml").read_text())["training"]["steps"] == 6
    for file in ("run.yaml", "export/run.yaml", "export/config.json"):
        assert str(converted.parent) not in (converted / file).read_text()
    loaded = load_adapters(str(converted / "export"), tiny_target())
    trained = load_file(next((converted / "checkpoints").glob("step-*6")) / "model.safetensors")
    assert {f"trained.{n}" for n, _ in loaded.adapters.trained.named_parameters()} == trained.keys()
    for name, parameter in loaded.adapters.trained.named_parameters():
        assert torch.equal(parameter, trained[f"trained.{name}"])
    denoiser = loaded.denoiser()
    assert (denoiser.block, denoiser.shift, denoiser.mask_id, denoiser.causal) == (4, True, 256, True)


def test_certainty_forcing_goes_on_from_it(converted: Path, tmp_path: Path) -> None:
    argv = [*CERTAINTY, *SHORT, f"init_from={converted / 'export'}", "budget.steps=2", f"run={tmp_path}"]
    assert distill_certainty.main(argv) == 0
    before, after = (load_adapters(str(p / "export"), tiny_target()) for p in (converted, tmp_path))
    assert after.objective == before.objective == replace(PRESETS["fast_dllm_v2"], block=4)
    a, b = (dict(x.adapters.trained.named_parameters()) for x in (before, after))
    assert a.keys() == b.keys() and not any(torch.equal(a[n], b[n]) for n in a)
    assert lines(tmp_path, "heldout")[-1]["entropy"] > 0
    observed(tmp_path)


def test_a_conversion_goes_on_under_another_objective(converted: Path, tmp_path: Path) -> None:
    recipe = yaml.safe_load(Path(CONVERT[1]).read_text())
    plain = {k: v for k, v in recipe.items() if k not in ("adapters", "objective", "preset")}
    (tmp_path / "recipe.yaml").write_text(yaml.safe_dump(plain))
    argv = ["--config", str(tmp_path / "recipe.yaml"), *SHORT, "preset=sdar", f"init_from={converted / 'export'}"]
    assert convert_block_diffusion.main([*argv, "budget.steps=1", f"run={tmp_path / 'run'}"]) == 0
    loaded = load_adapters(str(tmp_path / "run/export"), tiny_target())
    assert loaded.objective == PRESETS["sdar"] and loaded.adapters.config.rank == 4
    written = yaml.safe_load((tmp_path / "run/export/run.yaml").read_text())
    assert written["config"]["adapters"]["rank"] == 4 and written["config"]["adapters"]["mask"] == "new"


@pytest.mark.parametrize("kind", ["convert", "certainty", "on_policy"])
def test_a_resume_is_exact_to_the_bit(kind: str, converted: Path, tmp_path: Path) -> None:
    """Six steps, and three and three more, in the middle of an epoch and of a schedule; with dropout."""
    main: Callable[..., int] = convert_block_diffusion.main
    argv = [*CONVERT, *SHORT, "adapters.dropout=0.1", "batch.accumulate=2"]
    if kind != "convert":
        main = distill_certainty.main
        argv = [*CERTAINTY, *SHORT, f"method={kind}", f"init_from={converted / 'export'}"]
    argv += ["budget.steps=6", "evaluate.every=100"]
    assert main([*argv, f"run={tmp_path / 'one'}"]) == 0
    assert main([*argv, f"run={tmp_path / 'two'}", "budget.stop_at=3"]) == 0
    assert not (tmp_path / "two/export").exists()
    assert main([*argv, f"run={tmp_path / 'two'}"]) == 0
    one, two = (load_file(tmp_path / x / "export/model.safetensors") for x in ("one", "two"))
    assert one.keys() == two.keys() and all(torch.equal(one[n], two[n]) for n in one)
    assert [x["loss"] for x in lines(tmp_path / "one", "train")] == [
        x["loss"] for x in lines(tmp_path / "two", "train")
    ]
    with pytest.raises(ValueError, match="other settings"):
        main([*argv, f"run={tmp_path / 'two'}", "optim.lr=1"])


def test_two_processes_under_zero2(converted: Path, tmp_path: Path) -> None:
    """Ten steps of conversion and of certainty forcing, one launch each: the losses of one process."""
    zero2 = ["--config_file", "configs/accelerate/zero2.yaml", "--num_processes", "2"]
    both: tuple[tuple[str, Callable[..., int], list[str]], ...] = (
        ("convert_block_diffusion.py", convert_block_diffusion.main, CONVERT),
        ("distill_certainty.py", distill_certainty.main, [*CERTAINTY, f"init_from={converted / 'export'}"]),
    )
    for script, main, recipe in both:
        argv = [*recipe, *SHORT, "batch.rows=2", "budget.steps=10", "evaluate.every=5"]
        two, one = tmp_path / f"{script}-2", tmp_path / f"{script}-1"
        result = accelerate(*zero2, f"train/{script}", *argv, f"run={two}", DS_ACCELERATOR="cpu")
        assert result.returncode == 0, result.stderr[-4000:]
        assert main([*argv, f"run={one}"]) == 0
        a, b = ([x["loss"] for x in lines(run, "train")] for run in (one, two))
        assert len(a) == len(b) == 10 and a[:3] == pytest.approx(b[:3], rel=1e-5) and a == pytest.approx(b, rel=1e-3)
        tensors = [load_file(run / "export/model.safetensors") for run in (one, two)]
        assert tensors[0].keys() == tensors[1].keys()
        held = [lines(run, "heldout")[-1]["hidden_loss"] for run in (one, two)]
        assert held[0] == pytest.approx(held[1], rel=1e-3)


@pytest.fixture(scope="module")
def worlds(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """Folders of `every_case` with one process (this one) and with two, by DDP."""
    one, two = tmp_path_factory.mktemp("world1"), tmp_path_factory.mktemp("world2")
    every_case(one)
    args = ["--multi_gpu", "--num_processes", "2", "--num_machines", "1", "--mixed_precision", "no"]
    worker = str(ROOT / "tests/diffusion_worker.py")
    result = accelerate(*args, "--dynamo_backend", "no", worker, str(two), ACCELERATE_USE_CPU="true")
    assert result.returncode == 0, result.stderr[-4000:]
    return one, two


@pytest.mark.parametrize("name", CASES)
def test_the_number_of_processes_changes_nothing(name: str, worlds: tuple[Path, Path]) -> None:
    """In fp32, within 1e-6: the loss relative to itself, all gradients together relative to their norm."""
    one, two = (world / name for world in worlds)
    assert [facts(folder, 0)["world"] for folder in (one, two)] == [1, 2]
    assert len(losses(one)) == 1 and losses(two) == pytest.approx(losses(one), rel=1e-6)
    wanted, found = (load_file(folder / "rank0.safetensors") for folder in (one, two))
    assert wanted.keys() == found.keys() and same_bits(two / "rank0.safetensors", two / "rank1.safetensors")
    a, b = (torch.cat([grads[key].double().flatten() for key in sorted(wanted)]) for grads in (found, wanted))
    assert float((a - b).norm() / b.norm()) <= 1e-6


# What is refused


def test_adapters_of_another_base_or_damaged_ones_are_refused(converted: Path, tmp_path: Path) -> None:
    export = converted / "export"

    def copy_with(change: Callable[[dict[str, Any], Path], None]) -> str:
        folder = tmp_path / "changed"
        shutil.rmtree(folder, ignore_errors=True)
        shutil.copytree(export, folder)
        config = json.loads((folder / "config.json").read_text())
        change(config["draftsmith"], folder)
        (folder / "config.json").write_text(json.dumps(config))
        return str(folder)

    def drop(*path: str) -> Callable[[dict[str, Any], Path], None]:
        def change(ours: dict[str, Any], folder: Path) -> None:
            for key in path[:-1]:
                ours = ours[key]
            del ours[path[-1]]

        return change

    def weights(change: Callable[[dict[str, torch.Tensor]], Any]) -> Callable[[dict[str, Any], Path], None]:
        def apply(ours: dict[str, Any], folder: Path) -> None:
            tensors = load_file(folder / "model.safetensors")
            change(tensors)
            save_file(tensors, folder / "model.safetensors")
            ours["sha256"] = sha256_of(folder / "model.safetensors")

        return apply

    with pytest.raises(ValueError, match="adapters fit their own base alone"):
        load_adapters(str(export), tiny_target(seed=1))
    with pytest.raises(ValueError, match="holds no adapters"):
        load_adapters(copy_with(drop("kind")), tiny_target())
    for path, words in (
        (("shift",), r"draftsmith\.shift = None, its objective says True"),
        (("objective", "shift"), r"draftsmith\.objective: shift on one side only"),
        (("objective",), r"draftsmith\.objective is missing"),
        (("sha256",), "damaged or changed"),
    ):
        with pytest.raises(ValueError, match=words):
            load_adapters(copy_with(drop(*path)), tiny_target())
    first = next(iter(load_file(export / "model.safetensors")))
    for change, words in (
        (lambda t: t[first].fill_(float("nan")), "NaN or infinite"),
        (lambda t: t.pop(first), "on one side only"),
        (lambda t: t.update({first: t[first][:1].clone()}), "needed"),
    ):
        with pytest.raises(ValueError, match=words):
            load_adapters(copy_with(weights(change)), tiny_target())

    def no_weights(ours: dict[str, Any], folder: Path) -> None:
        (folder / "model.safetensors").unlink()

    with pytest.raises(ValueError, match="without their weights"):
        load_adapters(copy_with(no_weights), tiny_target())
