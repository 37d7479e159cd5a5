"""Frozen bases in 4 or 8 bits: what is refused, and, where a package is installed, training on one of them.

pytest tests/test_quantize.py
"""

import importlib.util
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from draftsmith.configs.diffusion import read_config
from draftsmith.data.batch import TargetOut
from draftsmith.data.encode import Sample
from draftsmith.data.packing import collate
from draftsmith.inference.adapter_folder import load_adapters, save_adapters
from draftsmith.inference.exporters.layout import RunFacts
from draftsmith.models import quantize as module
from draftsmith.models.adapters import AdapterConfig, Adapters
from draftsmith.models.block_diffusion import BlockDiffusion
from draftsmith.models.diffusion import PRESETS
from draftsmith.models.loading import load_target
from draftsmith.models.pretrained import tiny_target
from draftsmith.models.quantize import PACKAGE, Quantized
from draftsmith.models.target import Target

OBJECTIVE = replace(PRESETS["sdar"], block=4)


@pytest.mark.parametrize("kind", PACKAGE)
def test_a_missing_package_is_named(kind: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """In one line, before anything is loaded, by the function and by the script's settings."""
    monkeypatch.setattr(module, "find_spec", lambda name: None)
    with pytest.raises(ValueError, match=f"quantize = {kind} needs the package {PACKAGE[kind]}") as refused:
        load_target(str(tmp_path / "nowhere"), quantize=kind)
    assert "\n" not in str(refused.value)
    with pytest.raises(ValueError, match=f"pip install {PACKAGE[kind]}"):
        read_config([f"quantize={kind}", "budget.steps=1"], "x", "block_diffusion")


def test_what_cannot_be_rounded_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ValueError, match="'int3': use one of none, nf4, int8, int8_weight"):
        load_target("tiny", quantize="int3")  # type: ignore[arg-type]
    monkeypatch.setattr(module, "find_spec", lambda name: name)
    for name in ("tiny", "model.gguf"):
        with pytest.raises(ValueError, match="name a folder or hub id"):
            load_target(name, quantize="int8")
    with pytest.raises(ValueError, match="nf4 trains on a GPU alone"):
        load_target("smollm2", quantize="nf4")


def test_rounded_weights_are_not_merged_and_not_trained() -> None:
    plain = tiny_target(width=32, layers=2, heads=2, kv_heads=2)
    held = Quantized("nf4", plain.facts.fingerprint)
    target = Target(plain.model, plain.tokenizer, "tiny", quantized=held)
    with pytest.raises(ValueError, match=r"adapters\.kind=full .*quantize=nf4"):
        Adapters(AdapterConfig(kind="full", mask="new"), target)
    with pytest.raises(ValueError, match=r"rounded \(quantize=nf4\).*load it with quantize=none"):
        Adapters(AdapterConfig(rank=2, mask="new"), target).merged()
    plain.model.lm_head.weight = torch.nn.Parameter(plain.model.lm_head.weight.to(torch.int8), requires_grad=False)
    with pytest.raises(ValueError, match="rounded its output head"):
        Target(plain.model, plain.tokenizer, "tiny", quantized=held)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("base") / "model"
    target = tiny_target(width=64, layers=2, heads=2, kv_heads=2)
    target.model.save_pretrained(place)
    target.tokenizer.save_pretrained(place)
    return place


def step(target: Target, adapters: Adapters) -> dict[str, torch.Tensor]:
    """Gradients of one batch."""
    trained = BlockDiffusion(OBJECTIVE, target, adapters)
    dice = torch.Generator().manual_seed(0)
    sample = Sample(0, torch.randint(3, 250, (16,), generator=dice), torch.arange(16) >= 3)
    trained(collate([sample]).to(target.device), TargetOut(), 0.0).losses["hidden"].backward()
    return {n: p.grad.clone() for n, p in trained.named_parameters() if p.grad is not None}


def disturbed(config: AdapterConfig, target: Target) -> Adapters:
    """The same adapters on every target, some way off zero."""
    torch.manual_seed(0)
    adapters = Adapters(config, target)
    dice = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for p in adapters.trained.parameters():
            p.add_(0.1 * torch.randn(p.shape, generator=dice).to(p.device))
    return adapters


@pytest.mark.parametrize("kind", PACKAGE)
def test_adapters_learn_on_rounded_weights_and_merge_into_full_ones(
    kind: Any, folder: Path, tmp_path: Path, tiny: Callable[..., Any]
) -> None:
    """Where the package is installed (a step of .ci/run), nf4 on a GPU; elsewhere it is refused, saying why."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    absent = importlib.util.find_spec(PACKAGE[kind]) is None
    if absent or (kind == "nf4" and device == "cpu"):
        with pytest.raises(ValueError, match=f"pip install {PACKAGE[kind]}" if absent else "trains on a GPU alone"):
            load_target(str(folder), dtype="float32", device=device, quantize=kind)
        return
    full = load_target(str(folder), dtype="float32", device=device)
    rounded = load_target(str(folder), dtype="float32", device=device, quantize=kind)
    assert rounded.facts == full.facts and (rounded.quantized, full.quantized) == (kind, "none")
    assert torch.equal(rounded.head_weight, full.head_weight) and torch.equal(rounded.embed_weight, full.embed_weight)
    ids_BT, places_BT = (torch.arange(n, n + 16, device=device)[None] for n in (5, 0))

    def states(target: Target) -> torch.Tensor:
        with torch.no_grad():
            return target.forward(ids_BT, places_BT).last_hidden_BTD

    before, exact = states(rounded), states(full)
    off = float((before - exact).norm() / exact.norm())
    assert 1e-4 < off < (0.4 if kind == "nf4" else 0.1)
    config = AdapterConfig(rank=2, mask="new")
    mine = disturbed(config, rounded)
    assert torch.equal(states(rounded), before)  # adapters off: the rounded base, bit for bit
    grads = step(rounded, mine)
    wanted = step(full, disturbed(config, full))
    assert grads.keys() == wanted.keys() == dict(BlockDiffusion(OBJECTIVE, rounded, mine).named_parameters()).keys()
    a, b = (torch.cat([g[n].flatten() for n in sorted(g)]) for g in (grads, wanted))
    assert bool(a.isfinite().all()) and float(torch.cosine_similarity(a, b, dim=0)) > (0.8 if kind == "nf4" else 0.97)

    export = save_adapters(tmp_path / "export", "block_diffusion", OBJECTIVE, mine, RunFacts())
    with pytest.raises(ValueError, match=f"quantize={kind}"):
        mine.merged()
    again = load_adapters(str(export), load_target(str(folder), dtype="float32", device=device)).adapters
    for name, p in again.trained.named_parameters():
        assert torch.equal(p, dict(mine.trained.named_parameters())[name])
    state = again.merged()
    assert all(t.dtype == torch.float32 and bool(t.isfinite().all()) for t in state.values())
