"""Checkpoints in the layouts of other projects (tiny, random): the renamed model computes what the names say, sees what
its project's does, decodes; what would change the computation is refused.

pytest tests/test_layouts.py
"""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from draftsmith.inference.diffuse import DiffuseConfig, diffuse
from draftsmith.inference.strategies import STRATEGIES
from draftsmith.losses.probs import SamplingParams
from draftsmith.models.layouts import LAYOUTS, load_layout
from draftsmith.models.pretrained import tiny_tokenizer

D, H, KV, L, F, V, HEAD, EPS, BASE = 16, 4, 2, 2, 24, 264, 4, 1e-5, 500.0
CONFIGS: dict[str, dict[str, Any]] = {
    "llada": {
        "model_type": "llada", "d_model": D, "n_heads": H, "n_kv_heads": KV, "n_layers": L, "mlp_hidden_size": F,
        "vocab_size": V - 4, "embedding_size": V, "max_sequence_length": 64, "rms_norm_eps": EPS, "rope_theta": BASE,
        "weight_tying": False, "block_type": "llama", "activation_type": "silu", "layer_norm_type": "rms", "rope": True,
        "alibi": False, "include_bias": False, "mask_token_id": 257, "eos_token_id": 2, "pad_token_id": 2,
        "auto_map": {"AutoModel": "modeling_llada.LLaDAModelLM"},
    },
    "Dream": {
        "model_type": "Dream", "hidden_size": D, "num_attention_heads": H, "num_key_value_heads": KV,
        "num_hidden_layers": L, "intermediate_size": F, "vocab_size": V, "max_position_embeddings": 64,
        "rms_norm_eps": EPS, "rope_theta": BASE, "tie_word_embeddings": False, "hidden_act": "silu", "mask_token_id": 258,
        "use_sliding_window": False, "rope_scaling": None, "eos_token_id": 2, "pad_token_id": 2,
        "auto_map": {"AutoModel": "modeling_dream.DreamModel"},
    },
}  # fmt: skip
QWEN = {k: v for k, v in CONFIGS["Dream"].items() if k != "auto_map"}
CONFIGS["sdar"] = QWEN | {"model_type": "sdar", "head_dim": HEAD, "attention_bias": False, "block_size": 4}
CONFIGS["Fast_dLLM_Qwen"] = QWEN | {"model_type": "Fast_dLLM_Qwen", "bd_size": 4}


def part(kind: str, layer: int | None, name: str) -> str:
    """Their name of a tensor of ours."""
    if kind != "llada":
        outer = {"embed": "model.embed_tokens", "norm": "model.norm", "head": "lm_head"}
        inner = {"norm1": "input_layernorm", "norm2": "post_attention_layernorm", "gate": "mlp.gate_proj"}
        inner |= {"qn": "self_attn.q_norm", "kn": "self_attn.k_norm"}
        inner |= {"up": "mlp.up_proj", "down": "mlp.down_proj"} | {x: f"self_attn.{x}_proj" for x in "qkvo"}
        return outer[name] if layer is None else f"model.layers.{layer}.{inner[name]}"
    outer = {"embed": "wte", "norm": "ln_f", "head": "ff_out"}
    inner = {"norm1": "attn_norm", "norm2": "ff_norm", "gate": "ff_proj", "up": "up_proj", "down": "ff_out"}
    inner |= {"q": "q_proj", "k": "k_proj", "v": "v_proj", "o": "attn_out"}
    return f"model.transformer.{outer[name] if layer is None else f'blocks.{layer}.{inner[name]}'}"


CLOSE = {"rtol": 1e-4, "atol": 1e-4}  # angles are fp32


def test_every_layout_has_a_case() -> None:
    assert set(CONFIGS) == set(LAYOUTS)


@pytest.fixture(params=LAYOUTS)
def kind(request: Any) -> str:
    return request.param


@pytest.fixture
def folder(kind: str, tmp_path: Path) -> Path:
    random = torch.Generator().manual_seed(0)
    sizes = {"q": (H * HEAD, D), "k": (KV * HEAD, D), "v": (KV * HEAD, D), "o": (D, H * HEAD)}
    sizes |= {"gate": (F, D), "up": (F, D), "down": (D, F), "norm1": (D,), "norm2": (D,)}
    if kind == "sdar":
        sizes |= {"qn": (HEAD,), "kn": (HEAD,)}
    tensors = {}
    for layer in range(L):
        for name, size in sizes.items():
            tensors[part(kind, layer, name) + ".weight"] = torch.randn(*size, generator=random)
            if kind in ("Dream", "Fast_dLLM_Qwen") and name in ("q", "k", "v"):
                tensors[part(kind, layer, name) + ".bias"] = torch.randn(size[0], generator=random)
    for name, size in (("embed", (V, D)), ("head", (V, D)), ("norm", (D,))):
        tensors[part(kind, None, name) + ".weight"] = torch.randn(*size, generator=random)
    save_file(tensors, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text(json.dumps(CONFIGS[kind]))
    tiny_tokenizer().save_pretrained(tmp_path)
    return tmp_path


def written_out(kind: str, tensors: dict[str, Tensor], ids: list[int]) -> Tensor:
    """Logits [T, V] by the layers' own formulas, everything seeing everything."""

    def weight(layer: int | None, name: str) -> Tensor:
        return tensors[part(kind, layer, name) + ".weight"].double()

    def norm(x_TD: Tensor, scale_D: Tensor) -> Tensor:
        return x_TD / (x_TD.pow(2).mean(-1, keepdim=True) + EPS).sqrt() * scale_D

    def project(x_TD: Tensor, layer: int, name: str) -> Tensor:
        bias = tensors.get(part(kind, layer, name) + ".bias")
        y_TX = x_TD @ weight(layer, name).T
        return y_TX if bias is None else y_TX + bias.double()

    def turn(x_THd: Tensor) -> Tensor:
        angle_Td = torch.arange(len(ids))[:, None] * BASE ** (-torch.arange(HEAD // 2).double() * 2 / HEAD)
        cos, sin = angle_Td.cos()[:, None], angle_Td.sin()[:, None]
        a, b = x_THd.chunk(2, -1)
        return torch.cat([a * cos - b * sin, b * cos + a * sin], -1)

    x_TD = weight(None, "embed")[ids]
    for layer in range(L):
        y_TD = norm(x_TD, weight(layer, "norm1"))
        q, k, v = (project(y_TD, layer, n).unflatten(-1, (-1, HEAD)) for n in "qkv")
        if kind == "sdar":
            q, k = norm(q, weight(layer, "qn")), norm(k, weight(layer, "kn"))
        k, v = (z.repeat_interleave(H // KV, 1) for z in (turn(k), v))
        scores_HTS = torch.einsum("thd,shd->hts", turn(q), k) * HEAD**-0.5
        mixed_THd = torch.einsum("hts,shd->thd", scores_HTS.softmax(-1), v)
        x_TD = x_TD + project(mixed_THd.flatten(1), layer, "o")
        y_TD = norm(x_TD, weight(layer, "norm2"))
        x_TD = x_TD + project(
            torch.nn.functional.silu(project(y_TD, layer, "gate")) * project(y_TD, layer, "up"), layer, "down"
        )
    return norm(x_TD, weight(None, "norm")) @ weight(None, "head").T


def test_logits_are_those_of_the_layout(kind: str, folder: Path) -> None:
    denoiser = load_layout(folder, dtype="float64")
    ids = [5, 9, 200, denoiser.mask_id, denoiser.mask_id, 31]
    canvas = torch.tensor([ids])
    see = torch.ones(1, len(ids), len(ids), dtype=torch.bool)
    logits = denoiser.target.head(denoiser.denoise(canvas, torch.arange(len(ids))[None], see_BTA=see))[0]
    torch.testing.assert_close(logits, written_out(kind, load_file(folder / "model.safetensors"), ids), **CLOSE)
    in_blocks = kind in ("sdar", "Fast_dLLM_Qwen")
    assert denoiser.shift == (kind in ("Dream", "Fast_dLLM_Qwen")) and denoiser.causal == in_blocks
    assert (denoiser.block, denoiser.origin) == ((4, "document") if in_blocks else (32, "answer"))
    assert denoiser.mask_id == CONFIGS[kind]["mask_token_id"] and denoiser.facts.eos_ids == (2,)


@pytest.mark.parametrize("cache", ["none", "prefix", "dual"])
def test_decodes(kind: str, folder: Path, cache: Any) -> None:
    in_blocks = LAYOUTS[kind].block is not None
    if in_blocks and cache == "prefix":
        cache = "block"  # theirs
    denoiser = load_layout(folder, dtype="float32", block=None if in_blocks else 4)
    more: dict[str, Any] = {"block": 5}
    if in_blocks:
        more = {"sub_block": 2 if cache == "dual" else None}
    params = SamplingParams(max_new_tokens=10, ignore_eos=True)
    for name in ("fixed", "threshold", "eos_rejection"):
        results = diffuse(denoiser, [[5, 9], [7]], params, DiffuseConfig(STRATEGIES[name], cache=cache, **more))
        assert all(len(r.ids) == 10 and max(r.ids) < 256 for r in results)


def test_what_is_not_this_computation_is_refused(kind: str, folder: Path, tiny: Callable[..., Any]) -> None:
    def changed(change: dict[str, Any]) -> None:
        (folder / "config.json").write_text(json.dumps(CONFIGS[kind] | change))

    cases = [({"model_type": "other"}, "is none of llada, Dream"), ({"rope_theta": None}, "no rope_theta")]
    if LAYOUTS[kind].mask_id is None:
        cases.append(({"mask_token_id": None}, "mask_token_id"))
    if (block := LAYOUTS[kind].block) is not None:
        cases.append(({block: None}, f"{block} = None"))
    name = next(iter(LAYOUTS[kind].fixed))
    for change, words in [*cases, ({name: "else"}, f"{name} = 'else'")]:
        changed(change)
        with pytest.raises(ValueError, match=words):
            load_layout(folder)
    changed({})
    whole = load_file(folder / "model.safetensors")
    first = sorted(whole)[0]
    for tensors, words in (
        ({k: v for k, v in whole.items() if k != first}, "1 tensors are missing"),
        (whole | {"model.extra": torch.zeros(1)}, "model.extra is unknown"),
        (whole | {first: torch.zeros(1)}, "needed"),
    ):
        save_file(tensors, folder / "model.safetensors")
        with pytest.raises(ValueError, match=words):
            load_layout(folder)
    if LAYOUTS[kind].block is not None:
        with pytest.raises(ValueError, match="the block it was trained with"):
            load_layout(folder, block=8)
    with pytest.raises(ValueError, match="hf download"):
        load_layout(folder / "nothing")
