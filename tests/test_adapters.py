"""Adapters: coverage, the two views, the mask's row, merging. Run: pytest tests/test_adapters.py"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from draftsmith.models.adapters import AdapterConfig, Adapters
from draftsmith.models.denoiser import TargetDenoiser
from draftsmith.models.pretrained import tiny_target
from draftsmith.models.target import Target

SMALL: dict[str, Any] = {"width": 32, "layers": 2, "heads": 2, "kv_heads": 2, "vocab": 300, "tokens": 280}


def small(**options: Any) -> Target:
    return tiny_target(**SMALL | options)


def logits_of(target: Target, ids_BT: Tensor) -> Tensor:
    positions_BT = torch.arange(ids_BT.shape[1]).expand_as(ids_BT)
    return target.head(target.forward(ids_BT, positions_BT).last_hidden_BTD)


def disturb(adapters: Adapters, scale: float = 0.3) -> None:
    """Adapters start at zero: give them values."""
    torch.manual_seed(5)
    with torch.no_grad():
        for parameter in adapters.trained.parameters():
            parameter.add_(torch.randn_like(parameter) * scale)


IDS_BT = torch.tensor([[5, 9, 281, 40, 281, 7], [281, 30, 31, 32, 33, 281]])


@pytest.mark.parametrize("kind", ["lora", "full"])
@pytest.mark.parametrize("family", ["llama", "qwen3", "gemma3_text", "phi3"])
def test_a_name_that_matches_nothing_is_refused(family: str, kind: str) -> None:
    target = small(family=family)
    if kind == "full":
        adapters = Adapters(AdapterConfig(kind="full"), target)
        with pytest.raises(ValueError, match="has adapters already"):
            Adapters(AdapterConfig(kind="full"), target)
        assert {n for n, _ in adapters.trained.named_parameters()} == {
            *(n for n, _ in target.model.named_parameters()), "mask_row"
        }  # fmt: skip
        return
    names = ("qkv_proj", "o_proj") if family == "phi3" else ("q_proj", "o_proj")
    with pytest.raises(ValueError, match=r"ff_proj, lm_head match nothing .* which have: .*down_proj"):
        Adapters(AdapterConfig(targets=(*names, "ff_proj", "lm_head")), target)
    assert not any(p.requires_grad for p in target.model.parameters())
    adapters = Adapters(AdapterConfig(targets=names, rank=2), target)
    assert adapters.report.startswith(f"LoRA of rank 2 on {names[0]} x 2, o_proj x 2")
    trained = dict(adapters.trained.named_parameters())
    assert len(trained) == 2 * 2 * 2 + 1 and all(p.requires_grad for p in trained.values())
    wanted = {id(p) for p in trained.values()} - {id(trained["mask_row"])}
    assert {id(p) for p in target.model.parameters() if p.requires_grad} == wanted
    with pytest.raises(ValueError, match="has adapters already"):
        Adapters(AdapterConfig(targets=names), target)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("mask", ["reserved", "trained", "new"])
def test_off_is_the_original_to_the_bit(mask: Any, tied: bool, dtype: torch.dtype) -> None:
    original, target = small(tied=tied, dtype=dtype), small(tied=tied, dtype=dtype)
    adapters = Adapters(AdapterConfig(rank=4, mask=mask), target)
    assert adapters.mask_id == (300 if mask == "new" else 280)
    disturb(adapters)
    assert all(p.dtype == torch.float32 for p in adapters.trained.parameters())
    wanted = logits_of(original, IDS_BT)
    assert torch.equal(logits_of(target, IDS_BT), wanted)
    with adapters.view("noisy"):
        assert not torch.equal(logits_of(target, IDS_BT), wanted)
        with adapters.view("clean"):
            assert torch.equal(logits_of(target, IDS_BT), wanted)
        assert adapters.on
    assert not adapters.on and torch.equal(logits_of(target, IDS_BT), wanted)


@pytest.mark.parametrize("family", ["llama", "gemma3_text"])
def test_at_the_start_the_noisy_view_is_the_original_but_for_the_mask(family: str) -> None:
    target = small(family=family)
    wanted_BTV = logits_of(target, IDS_BT)
    adapters = Adapters(AdapterConfig(mask="trained"), target)
    with adapters.view("noisy"):
        assert torch.equal(logits_of(target, IDS_BT), wanted_BTV)
    new = small(family=family)
    adapters = Adapters(AdapterConfig(mask="new"), new)
    mean_D = new.embed(torch.arange(280)).mean(0)
    with adapters.view("noisy"):
        found_BTD = new.embed(torch.tensor([[4, 300]]))
    torch.testing.assert_close(found_BTD[0, 1], mean_D, rtol=0, atol=1e-5)
    assert torch.equal(found_BTD[0, 0], new.embed(torch.tensor(4)))


def test_gradients_reach_the_adapters_and_the_row() -> None:
    target = small()
    adapters = Adapters(AdapterConfig(rank=2, targets=("q_proj", "down_proj")), target)
    disturb(adapters)
    with adapters.view("noisy"):
        logits_of(target, torch.tensor([[4, 280, 9]])).square().sum().backward()
    assert all(p.grad is not None and float(p.grad.abs().sum()) > 0 for p in adapters.trained.parameters())


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("mask", ["reserved", "trained", "new"])
@pytest.mark.parametrize("family", ["llama", "gemma3_text"])
def test_merged_weights_give_the_adapters_logits(family: str, mask: Any, tied: bool) -> None:
    target = small(family=family, tied=tied)
    adapters = Adapters(AdapterConfig(rank=4, alpha=8, mask=mask), target)
    disturb(adapters, 0.1)
    ids_BT = torch.where(IDS_BT == 281, adapters.mask_id, IDS_BT)
    with adapters.view("noisy"):
        wanted_BTV = logits_of(target, ids_BT)
    state = adapters.merged()
    fresh = small(family=family, tied=tied)
    assert state.keys() == fresh.model.state_dict().keys()
    if mask == "new":
        fresh.model.resize_token_embeddings(301, mean_resizing=False)
    fresh.model.load_state_dict(state)
    again = Target(fresh.model, fresh.tokenizer, "again")
    found_BTV = logits_of(again, ids_BT)[..., :300]
    usable_V = torch.arange(300) != adapters.mask_id  # of a tied head, the mask's own logit is another
    torch.testing.assert_close(found_BTV[..., usable_V], wanted_BTV[..., usable_V], rtol=0, atol=1e-4)
    assert torch.equal(logits_of(target, IDS_BT), logits_of(small(family=family, tied=tied), IDS_BT))  # as it was


def test_strength_counts_outside_training() -> None:
    """In training the whole difference, outside the share of it, in the merge too; what is refused."""
    hidden = {}
    for name, strength in (("whole", 1.0), ("half", 0.5)):
        torch.manual_seed(1)
        adapters = Adapters(AdapterConfig(rank=4, alpha=8, mask="none", strength=strength), target := small())
        disturb(adapters)
        for training in (True, False):
            adapters.train(training)
            with adapters.view("noisy"), torch.no_grad():
                hidden[name, training] = logits_of(target, IDS_BT)
        merged, plain = adapters.merged(), small()
        plain.model.load_state_dict(merged)
        assert torch.allclose(logits_of(plain, IDS_BT), hidden[name, False], atol=1e-4)
        if strength == 0.5:
            own, original = (t["model.layers.0.mlp.up_proj.weight"] for t in (merged, small().model.state_dict()))
            layer = adapters.layers["model.layers.0.mlp.up_proj"]
            product = layer.lora_B["default"].weight @ layer.lora_A["default"].weight
            assert torch.allclose(own - original, product * (8 / 4 * 0.5), atol=1e-5)
    assert torch.equal(hidden["whole", True], hidden["half", True])
    assert torch.equal(hidden["whole", True], hidden["whole", False])
    assert not torch.allclose(hidden["half", True], hidden["half", False], atol=1e-2)
    for settings in ({"strength": 0.0}, {"strength": 1.2}, {"strength": 0.5, "kind": "full"}):
        with pytest.raises(ValueError, match="strength"):
            AdapterConfig(**settings)  # type: ignore[arg-type]


def test_a_merge_in_bf16_rounds_once() -> None:
    target = small(dtype=torch.bfloat16)
    adapters = Adapters(AdapterConfig(rank=4, mask="reserved"), target)
    disturb(adapters, 0.1)
    name = "model.layers.1.mlp.up_proj"
    layer, merged = adapters.layers[name], adapters.merged()[f"{name}.weight"]
    a_rD, b_Dr = layer.lora_A["default"].weight, layer.lora_B["default"].weight
    exact = layer.base_layer.weight.float() + b_Dr @ a_rD * (32 / 4)
    assert merged.dtype == torch.bfloat16 and torch.equal(merged, exact.to(torch.bfloat16))


def test_saved_tensors_come_back() -> None:
    target = small()
    adapters = Adapters(AdapterConfig(rank=4), target)
    disturb(adapters)
    saved = {n: p.detach().clone() for n, p in adapters.trained.named_parameters()}
    other = small()
    fresh = Adapters(AdapterConfig(rank=4), other)
    fresh.load(saved)
    with adapters.view("noisy"), fresh.view("noisy"):
        assert torch.equal(logits_of(target, IDS_BT), logits_of(other, IDS_BT))
    name = next(iter(saved))
    with pytest.raises(ValueError, match="on one side only"):
        fresh.load({n: t for n, t in saved.items() if n != name})
    with pytest.raises(ValueError, match="needed"):
        fresh.load(saved | {name: saved[name][:1]})
    with pytest.raises(ValueError, match="NaN"):
        fresh.load(saved | {name: saved[name] * float("nan")})


def test_what_cannot_be_meant_is_refused() -> None:
    for settings, words in (
        ({"rank": 0}, "must be positive"),
        ({"kind": "qlora"}, "must be one of lora, full"),
        ({"targets": ()}, "is empty"),
        ({"mask": "new", "mask_id": 3}, "follows the vocabulary"),
    ):
        with pytest.raises(ValueError, match=words):
            AdapterConfig(**settings)
    with pytest.raises(ValueError, match=r"float32, not torch\.bfloat16"):
        Adapters(AdapterConfig(kind="full"), small(dtype=torch.bfloat16))
    with pytest.raises(ValueError, match="kind=lora"):
        Adapters(AdapterConfig(kind="full"), small(), dual=True)
    full = Adapters(AdapterConfig(kind="full"), small())
    with pytest.raises(ValueError, match="no clean view"), full.view("clean"):
        pass
    with pytest.raises(ValueError, match="noisy rows alone"):
        Adapters(AdapterConfig(), small(), dual=True).merged()


@pytest.mark.parametrize("mask", ["trained", "new"])
def test_a_denoiser_has_both_views_and_never_emits_the_mask(mask: Any) -> None:
    original, target = small(), small()
    adapters = Adapters(AdapterConfig(rank=4, mask=mask), target)
    disturb(adapters)
    denoiser = TargetDenoiser(target, 4, adapters.mask_id, shift=True, adapters=adapters)
    ids_BT = torch.tensor([[5, 9, adapters.mask_id, 40]])
    positions_BT = torch.arange(4)[None]
    clean = denoiser.denoise(IDS_BT, torch.arange(6).expand(2, 6), view="clean")
    assert torch.equal(clean, original.forward(IDS_BT, torch.arange(6).expand(2, 6)).last_hidden_BTD)
    noisy = denoiser.denoise(ids_BT, positions_BT)
    by_embeddings = denoiser.denoise(denoiser.embed(ids_BT), positions_BT)
    torch.testing.assert_close(noisy, by_embeddings, rtol=0, atol=1e-5)
    logits_BTV = denoiser.head(noisy)
    banned = {*range(280, 300), adapters.mask_id} & set(range(300))
    assert {int(i) for i in logits_BTV[0, 0].isneginf().nonzero()} == banned
    some = torch.tensor([3, 281, 5])
    assert denoiser.head(noisy, some).isneginf()[0, 0].tolist() == [False, True, False]
    with pytest.raises(ValueError, match="of another target, or have mask_id"):
        TargetDenoiser(target, 4, 3, shift=True, adapters=adapters)
    with pytest.raises(ValueError, match="has the ids"):
        TargetDenoiser(original, 4, 300, shift=True)


def test_a_denoiser_does_not_decode_with_dropout() -> None:
    adapters = Adapters(AdapterConfig(rank=2, dropout=0.5), tiny_target(layers=1))
    denoiser = TargetDenoiser(adapters.target, 4, adapters.mask_id, shift=True, adapters=adapters)
    ids_1T, positions_1T = torch.tensor([[5, 9]]), torch.tensor([[0, 1]])
    see_1TT = torch.ones(1, 2, 2, dtype=torch.bool)
    adapters.train()
    with pytest.raises(ValueError, match="as in training"):
        denoiser.denoise(ids_1T, positions_1T, see_BTA=see_1TT)
    adapters.train(False)
    assert denoiser.denoise(ids_1T, positions_1T, see_BTA=see_1TT).shape[:2] == (1, 2)
