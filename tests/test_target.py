"""The target gives Hugging Face's own logits, whatever the cache, the mask and the family."""

import dataclasses
import hashlib
import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM

from draftsmith.models.families import FAMILIES, ROPE_TYPES
from draftsmith.models.loading import load_target, load_tokenizer
from draftsmith.models.pretrained import byte_tokenizer, tiny_target
from draftsmith.models.target import Target, document_mask

YARN = {"rope_type": "yarn", "rope_theta": 5e6, "factor": 4.0, "original_max_position_embeddings": 512}
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 5e5,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
LONGROPE = {
    "rope_type": "longrope",
    "rope_theta": 1e4,
    "short_factor": [1.0, 1.1, 1.3],
    "long_factor": [4.0, 4.0, 4.0],
    "factor": 4.0,
    "partial_rotary_factor": 0.5,
}
CASES: dict[str, dict[str, Any]] = {
    "llama": {"family": "llama", "kv_heads": 2},
    "llama-tied": {"family": "llama", "tied": True},
    "llama-head16": {"family": "llama", "head_dim": 16},  # 4 * 16 != 48
    "llama-yarn": {"family": "llama", "rope": YARN},
    "llama-llama3": {"family": "llama", "rope": LLAMA3},
    "mistral": {"family": "mistral", "kv_heads": 2},
    "mistral-window": {"family": "mistral", "kv_heads": 2, "window": 6},
    "qwen2": {"family": "qwen2", "kv_heads": 2, "tied": True},
    "qwen2-window": {"family": "qwen2", "window": 6},
    "qwen3": {"family": "qwen3", "kv_heads": 1, "tied": True},
    "qwen3-40-3-16": {"family": "qwen3", "width": 40, "heads": 3, "kv_heads": 3, "head_dim": 16, "window": 6},
    "gemma3": {"family": "gemma3_text", "kv_heads": 2, "head_dim": 16, "window": 6, "softcap": 5.0, "tied": True},
    "gemma3-untied": {"family": "gemma3_text", "window": 3},
    "phi3": {"family": "phi3", "kv_heads": 2},
    "phi3-window": {"family": "phi3", "window": 6},
    "phi3-longrope": {"family": "phi3", "rope": LONGROPE},
    "olmo2": {"family": "olmo2", "kv_heads": 2},
}
# Families without a record: found by structure.
BY_STRUCTURE: dict[str, dict[str, Any]] = {
    "olmo3": {"sliding_window": 6, "layer_types": ["sliding_attention", "full_attention"] * 2},
    "gemma2": {"sliding_window": 6, "attn_logit_softcapping": 5.0, "final_logit_softcapping": 3.0, "head_dim": 12},
    "granite": {"embedding_multiplier": 2.0, "logits_scaling": 4.0, "residual_multiplier": 0.5},
    "cohere": {"logit_scale": 0.25},
    "gpt_neox": {"num_key_value_heads": None},
    "smollm3": {},
}


@pytest.fixture(scope="module", params=[*CASES, *BY_STRUCTURE])
def target(request: pytest.FixtureRequest, tiny: Callable[..., Target]) -> Target:
    return _by_structure(request.param) if request.param in BY_STRUCTURE else tiny(**CASES[request.param])


def _by_structure(kind: str) -> Target:
    settings = {
        "vocab_size": 256,
        "hidden_size": 48,
        "intermediate_size": 96,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "pad_token_id": None,
    }
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **settings | BY_STRUCTURE[kind]))
    for weight in model.parameters():
        if weight.dim() == 2:
            torch.nn.init.normal_(weight, 0, 0.3)
    return Target(model, byte_tokenizer(256), kind)


def _ids(*shape: int, seed: int = 1) -> Tensor:
    return torch.randint(3, 250, shape, generator=torch.Generator().manual_seed(seed))


def _positions(b: int, t: int) -> Tensor:
    return torch.arange(t).expand(b, t)


def _reference(target: Target, ids: list[int]) -> Tensor:
    """[T, V] logits of transformers' own forward of one sequence, nothing of ours in between."""
    with torch.no_grad():
        return target.model(torch.tensor([ids]), use_cache=False).logits[0]


def _close(ours: Tensor, theirs: Tensor) -> None:
    assert ours.shape == theirs.shape
    # fp32, 4 layers: the two sum attention in different order; measured differences stay below 2e-6 of the range.
    assert float((ours - theirs).abs().max()) <= 1e-5 * max(1.0, float(theirs.abs().max()))


def _prefill(target: Target, rows: list[list[int]], slots: int) -> Any:
    cache = target.new_cache(len(rows), slots)
    longest = max(map(len, rows))
    ids_BT = torch.tensor([row + [0] * (longest - len(row)) for row in rows])
    target.forward(ids_BT, _positions(len(rows), longest), cache=cache)
    cache.commit(torch.tensor([len(row) for row in rows]))
    return cache


def test_every_family_is_covered() -> None:
    assert {options["family"] for options in CASES.values()} == set(FAMILIES)


@torch.no_grad()
def test_whole_prompt(target: Target) -> None:
    ids_BT = _ids(2, 19)
    states = target.forward(ids_BT, _positions(2, 19))
    logits_BTV = target.head(states.last_hidden_BTD)
    assert states.taps_BTPD is None
    for ids, logits_TV in zip(ids_BT.tolist(), logits_BTV, strict=True):
        _close(logits_TV, _reference(target, ids))


@torch.no_grad()
def test_whole_prompt_as_embeddings(target: Target) -> None:
    ids_BT = _ids(1, 9)
    plain = target.forward(ids_BT, _positions(1, 9)).last_hidden_BTD
    assert torch.equal(target.forward(target.embed(ids_BT), _positions(1, 9)).last_hidden_BTD, plain)


@torch.no_grad()
def test_chunked_prefill_of_ragged_rows(target: Target) -> None:
    """Rows of 11, 17 and 4 tokens, 5 at a time: rows end at different chunks, padding is never committed."""
    rows = [_ids(n, seed=n).tolist() for n in (11, 17, 4)]
    cache = target.new_cache(3, 20)
    got: list[list[Tensor]] = [[], [], []]
    for start in range(0, 17, 5):
        chunks = [row[start : start + 5] for row in rows]
        t = max(map(len, chunks))
        ids_BT = torch.tensor([chunk + [0] * (t - len(chunk)) for chunk in chunks])
        positions_BT = cache.lengths_B[:, None] + torch.arange(t)
        logits_BTV = target.head(target.forward(ids_BT, positions_BT, cache=cache).last_hidden_BTD)
        cache.commit(torch.tensor([len(chunk) for chunk in chunks]))
        for b, chunk in enumerate(chunks):
            got[b].append(logits_BTV[b, : len(chunk)])
    assert cache.lengths_B.tolist() == [11, 17, 4]
    for row, pieces in zip(rows, got, strict=True):
        _close(torch.cat(pieces), _reference(target, row))


PARENTS = [0, 0, 1, 1, 3, 5, 2]  # of nodes 1..7, 0 = the anchor: depths 1 1 2 2 3 4 2


def _tree() -> tuple[Tensor, Tensor]:
    """Bool [M, M] visibility and int64 [M] depths of PARENTS, anchor first."""
    m = len(PARENTS) + 1
    see_MM, depth_M = torch.eye(m, dtype=torch.bool), torch.zeros(m, dtype=torch.int64)
    for node, parent in enumerate(PARENTS, start=1):
        see_MM[node] |= see_MM[parent]
        depth_M[node] = depth_M[parent] + 1
    return see_MM, depth_M


@torch.no_grad()
def test_tree_equals_each_path_by_itself(target: Target) -> None:
    """A tree behind 9, 4 and 2 committed tokens: with windows of 3 and 6 it lies across their edge."""
    rows = [_ids(n, seed=n).tolist() for n in (9, 4, 2)]
    cache = _prefill(target, rows, slots=20)
    see_MM, depth_M = _tree()
    nodes_BM = _ids(3, 8, seed=7)
    states = target.forward(nodes_BM, cache.lengths_B[:, None] + depth_M, cache=cache, see_BTA=see_MM.expand(3, 8, 8))
    logits_BMV = target.head(states.last_hidden_BTD)
    for b, row in enumerate(rows):
        for node in range(8):
            path = nodes_BM[b, see_MM[node]].tolist()
            _close(logits_BMV[b, node], _reference(target, row + path)[-1])


@torch.no_grad()
def test_rolled_back_and_compacted_rows_go_on_as_if_never_drafted(target: Target) -> None:
    rows = [_ids(n, seed=n).tolist() for n in (9, 4, 2)]
    cache = _prefill(target, rows, slots=30)
    see_MM, depth_M = _tree()
    paths = [[0, 1, 3, 5, 6], [0], [0, 2, 7]]
    for step in range(2):
        nodes_BM = _ids(3, 8, seed=20 + step)
        positions_BM = cache.lengths_B[:, None] + depth_M
        target.forward(nodes_BM, positions_BM, cache=cache, see_BTA=see_MM.expand(3, 8, 8))
        counts_B = torch.tensor([len(path) for path in paths])
        path_BL = torch.tensor([path + [0] * (5 - len(path)) for path in paths])
        cache.compact(path_BL, counts_B)
        for row, nodes_M, path in zip(rows, nodes_BM, paths, strict=True):
            row += nodes_M[path].tolist()
        assert cache.lengths_B.tolist() == [len(row) for row in rows]
        paths = [paths[1], paths[2], paths[0]]
    next_B1 = _ids(3, 1, seed=9)
    logits_BV = target.head(target.forward(next_B1, cache.lengths_B[:, None], cache=cache).last_hidden_BTD)[:, 0]
    for row, token, logits_V in zip(rows, next_B1[:, 0].tolist(), logits_BV, strict=True):
        _close(logits_V, _reference(target, [*row, token])[-1])


def _poison(cache: Any, t: int) -> None:
    """Large finite numbers in every slot behind a row's committed ones, NaN behind all that the next pass reads."""
    read = int(cache.lengths_B.max()) + t
    for b, length in enumerate(cache.lengths_B.tolist()):
        cache.kv[:, :, b, :, length:] = 1e4
    cache.kv[..., read:, :] = float("nan")


@torch.no_grad()
def test_what_lies_behind_the_committed_slots_is_never_seen(target: Target) -> None:
    def run(poison: bool) -> list[Tensor]:
        rows = [_ids(n, seed=n).tolist() for n in (9, 4, 2)]
        cache = _prefill(target, rows, slots=40)
        see_MM, depth_M = _tree()
        out = []
        for step in range(3):
            if poison:
                _poison(cache, 8)
            states = target.forward(
                _ids(3, 8, seed=step), cache.lengths_B[:, None] + depth_M, cache=cache, see_BTA=see_MM.expand(3, 8, 8)
            )
            out.append(states.last_hidden_BTD)
            cache.compact(torch.tensor([[0, 1, 4], [0, 2, 2], [0, 0, 0]]), torch.tensor([3, 2, 1]))
        return out

    for clean, poisoned in zip(run(False), run(True), strict=True):
        assert torch.equal(clean, poisoned)


def test_a_prefix_is_seen_by_whom_the_mask_says(target: Target) -> None:
    """Its rows on a ragged cache, through windows, equal a pass without a cache; the others equal a pass without it; it
    leaves nothing behind; gradients reach it."""
    facts, rows = target.facts, [_ids(n, seed=n).tolist() for n in (9, 4, 2)]
    shape = (facts.layers, 2, facts.kv_heads, 3, facts.head_dim)
    prefix_kv = torch.randn(shape, generator=torch.Generator().manual_seed(0)).requires_grad_()
    new_BT = _ids(3, 5, seed=7)
    sees_T = torch.tensor([False, True, False, True, True])
    see_TA = torch.cat([torch.ones(5, 5, dtype=torch.bool).tril(), sees_T[:, None].expand(5, 3)], 1)
    with torch.no_grad():
        cache = _prefill(target, rows, slots=20)
        positions_BT = cache.lengths_B[:, None] + torch.arange(5)
        states = target.forward(
            new_BT, positions_BT, cache=cache, see_BTA=see_TA.expand(3, 5, 8), prefix_kv=prefix_kv, taps=(2,)
        )
        cache.commit(torch.tensor([1, 1, 1]))
        after = target.forward(new_BT[:, 1:], positions_BT[:, 1:], cache=cache).last_hidden_BTD
    for b, row in enumerate(rows):
        ids_BT, t = torch.tensor([[*row, *new_BT[b].tolist()]]), len(row) + 5
        see_TT = torch.ones(t, t, dtype=torch.bool).tril()
        plain = target.forward(ids_BT, _positions(1, t)).last_hidden_BTD
        _close(after[b], plain[0, -4:])
        _close(states.last_hidden_BTD[b, 0], plain[0, -5])
        see_TX = torch.cat([see_TT, torch.cat([torch.zeros(t - 5, dtype=torch.bool), sees_T])[:, None].expand(t, 3)], 1)
        alone = target.forward(ids_BT, _positions(1, t), see_BTA=see_TX[None], prefix_kv=prefix_kv, taps=(2,))
        _close(states.last_hidden_BTD[b], alone.last_hidden_BTD[0, -5:].detach())
        assert states.taps_BTPD is not None and alone.taps_BTPD is not None
        _close(states.taps_BTPD[b], alone.taps_BTPD[0, -5:].detach())
        assert float((alone.last_hidden_BTD[0, -4:].detach() - plain[0, -4:]).abs().max()) > 1e-2
        alone.last_hidden_BTD[0, -1].square().sum().backward()
    assert prefix_kv.grad is not None and bool(torch.isfinite(prefix_kv.grad).all())
    assert all(bool(prefix_kv.grad[layer].any()) for layer in range(facts.layers))
    with pytest.raises(ValueError, match="prefix_kv needs see_BTA"):
        target.forward(new_BT, positions_BT, prefix_kv=prefix_kv)
    with pytest.raises(ValueError, match=r"prefix_kv of shape \[1, 2, .* takes \[4, 2, "):
        target.forward(new_BT, positions_BT, see_BTA=see_TA.expand(3, 5, 8), prefix_kv=prefix_kv[:1])


@torch.no_grad()
def test_packed_documents_are_isolated(target: Target) -> None:
    documents = [_ids(n, seed=n).tolist() for n in (7, 3, 8)]
    ids_BT = torch.tensor([[*(token for document in documents for token in document), 0, 0]])
    samples_BT = torch.tensor([[0] * 7 + [1] * 3 + [2] * 8 + [-1] * 2])
    positions_BT = torch.tensor([[*range(7), *range(3), *range(8), 0, 1]])
    states = target.forward(ids_BT, positions_BT, see_BTA=document_mask(samples_BT))
    logits_TV = target.head(states.last_hidden_BTD)[0]
    for number, document in enumerate(documents):
        _close(logits_TV[samples_BT[0] == number], _reference(target, document))


@torch.no_grad()
def test_taps_are_the_residual_stream_entering_each_layer(target: Target) -> None:
    """B34. h[k] is transformers' hidden_states[k] below the last layer; h[L] is what the final norm reads."""
    ids_BT = _ids(2, 8)
    states = target.forward(ids_BT, _positions(2, 8), taps=(3, 0, 4))
    theirs = target.model(ids_BT, output_hidden_states=True).hidden_states
    assert states.taps_BTPD is not None and states.taps_BTPD.shape == (2, 8, 3, target.facts.width)
    _close(states.taps_BTPD[:, :, 0], theirs[3])
    _close(states.taps_BTPD[:, :, 1], theirs[0])
    assert torch.equal(target.norm(states.taps_BTPD[:, :, 2]), states.last_hidden_BTD)
    assert float((states.taps_BTPD[:, :, 2] - theirs[4]).abs().max()) > 1e-2  # theirs is after the norm
    other = target.forward(ids_BT, _positions(2, 8), taps=(2, 0, 4)).taps_BTPD
    assert other is not None and not torch.equal(other[:, :, 0], states.taps_BTPD[:, :, 0])
    for wrong in (-1, 5):
        with pytest.raises(ValueError, match=rf"tap {wrong} .*h\[0\]\.\.h\[4\]"):
            target.forward(ids_BT, _positions(2, 8), taps=(0, wrong))
    assert all(not module._forward_pre_hooks for module in target.modules())


@torch.no_grad()
def test_head_rows(target: Target) -> None:
    hidden_BTD = target.forward(_ids(1, 5), _positions(1, 5)).last_hidden_BTD
    for ids in (torch.tensor([3, 8, 200]), torch.tensor([4, 8, 200])):
        _close(target.head(hidden_BTD, ids), target.head(hidden_BTD)[..., ids])


def test_frozen_weights_and_differentiable_activations(target: Target) -> None:
    torch.nn.ModuleList([target]).train()
    assert not any(weight.requires_grad for weight in target.parameters())
    assert not any(module.training for module in target.modules())
    embeds_BTD = target.embed(_ids(1, 6)).requires_grad_()
    target.head(target.forward(embeds_BTD, _positions(1, 6)).last_hidden_BTD).sum().backward()
    assert embeds_BTD.grad is not None and bool(torch.isfinite(embeds_BTD.grad).all())


def test_what_an_inference_pass_keeps_can_be_differentiated_through_later() -> None:
    target, ids_W = tiny_target(), torch.tensor([3, 8, 200])
    with torch.inference_mode():
        target.head(target.forward(_ids(1, 6), _positions(1, 6)).last_hidden_BTD, ids_W.clone())
    embeds_BTD = target.embed(_ids(1, 6)).requires_grad_()
    target.head(target.forward(embeds_BTD, _positions(1, 6)).last_hidden_BTD, ids_W).sum().backward()
    assert embeds_BTD.grad is not None and bool(embeds_BTD.grad.any())


@torch.no_grad()
def test_states_belong_to_their_prompt(tiny: Callable[..., Target]) -> None:
    """B13. One by one, as a batch, reversed, again, in chunks: the same states, as many as tokens."""
    target = tiny(family="gemma3_text", window=6, softcap=5.0)
    prompts = [_ids(n, seed=n).tolist() for n in (3, 17, 1, 9)]
    prompts.append(prompts[1][:8] + _ids(9, seed=99).tolist())

    def batch(rows: list[list[int]], chunk: int = 17) -> dict[str, Tensor]:
        cache = target.new_cache(len(rows), 24)
        found: list[list[Tensor]] = [[] for _ in rows]
        for start in range(0, max(map(len, rows)), chunk):
            pieces = [row[start : start + chunk] for row in rows]
            t = max(map(len, pieces))
            ids_BT = torch.tensor([piece + [0] * (t - len(piece)) for piece in pieces])
            positions_BT = cache.lengths_B[:, None] + torch.arange(t)
            states = target.forward(ids_BT, positions_BT, cache=cache, taps=(1, 4))
            cache.commit(torch.tensor([len(piece) for piece in pieces]))
            assert states.taps_BTPD is not None
            both = torch.cat([states.taps_BTPD, states.last_hidden_BTD[:, :, None]], dim=2)
            for b, piece in enumerate(pieces):
                found[b].append(both[b, : len(piece)])
        return {_hash(row): torch.cat(parts) for row, parts in zip(rows, found, strict=True)}

    def _hash(row: list[int]) -> str:
        return hashlib.sha256(json.dumps(row).encode()).hexdigest()

    alone = {key: value for row in prompts for key, value in batch([row]).items()}
    assert len(alone) == 5
    for again in (batch(prompts), batch(prompts[::-1]), batch(prompts), batch(prompts, chunk=4)):
        assert again.keys() == alone.keys()
        for row in prompts:
            assert again[_hash(row)].shape[0] == len(row)
            assert float((again[_hash(row)] - alone[_hash(row)]).abs().max()) < 1e-5


# --- Loading


@pytest.fixture(scope="module")
def variants(tmp_path_factory: pytest.TempPathFactory, tiny: Callable[..., Target]) -> dict[str, Path]:
    """B35. One tied and one untied target, saved in every way that occurs."""
    root = tmp_path_factory.mktemp("targets")

    def save(name: str, source: Target, shard: str = "1GB") -> Path:
        source.model.save_pretrained(root / name, max_shard_size=shard)
        source.tokenizer.save_pretrained(root / name)
        return root / name

    tied, untied = tiny(tied=True), tiny()
    folders = {
        "single": save("single", untied),
        "sharded": save("sharded", untied, "40KB"),
        "tied": save("tied", tied),
        "tied-with-head": save("tied-with-head", tied),
        "nested": save("nested", untied),
    }
    assert (folders["sharded"] / "model.safetensors.index.json").is_file()
    file = folders["tied-with-head"] / "model.safetensors"
    tensors = load_file(file)
    assert "lm_head.weight" not in tensors
    save_file(tensors | {"lm_head.weight": tensors["model.embed_tokens.weight"].clone()}, file, {"format": "pt"})
    _nest(folders["nested"], "model.language_model.", "lm_head.")
    return folders


def _nest(folder: Path, model: str, head: str) -> None:
    """Rewrite a saved target as the language model inside a larger one, with these prefixes."""
    tensors = load_file(folder / "model.safetensors")
    renamed = {re.sub(r"^model\.", model, re.sub(r"^lm_head\.", head, key)): value for key, value in tensors.items()}
    save_file(renamed, folder / "model.safetensors", {"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({"model_type": "outer", "text_config": config}))


@pytest.mark.parametrize("name", ["single", "sharded", "tied", "tied-with-head", "nested"])
def test_every_layout_on_disk_loads(name: str, variants: dict[str, Path], tiny: Callable[..., Target]) -> None:
    tied = name.startswith("tied")
    source = tiny(tied=True) if tied else tiny()
    loaded = load_target(str(variants[name]), dtype="float32")
    assert torch.equal(loaded.embed_weight, source.embed_weight)
    assert torch.equal(loaded.head_weight, source.head_weight)
    assert loaded.facts.tied == tied == torch.equal(loaded.head_weight, loaded.embed_weight)
    hidden = [t.forward(_ids(1, 9), _positions(1, 9)).last_hidden_BTD for t in (loaded, source)]
    assert torch.equal(*hidden)
    assert loaded.facts.fingerprint == source.facts.fingerprint
    assert dataclasses.replace(loaded.facts, name="tiny") == source.facts
    assert loaded.facts.name == name  # the folder's name, never a path


def test_nested_under_another_prefix(tmp_path: Path, tiny: Callable[..., Target]) -> None:
    source = tiny()
    source.model.save_pretrained(tmp_path)
    source.tokenizer.save_pretrained(tmp_path)
    _nest(tmp_path, "language_model.model.", "language_model.lm_head.")
    assert load_target(str(tmp_path), dtype="float32").facts.fingerprint == source.facts.fingerprint


def test_nested_and_tied_by_the_outer_config(
    variants: dict[str, Path], tmp_path: Path, tiny: Callable[..., Target]
) -> None:
    shutil.copytree(variants["tied"], tmp_path, dirs_exist_ok=True)
    _nest(tmp_path, "model.language_model.", "lm_head.")

    def move(config: dict[str, Any]) -> None:
        config["tie_word_embeddings"] = config["text_config"].pop("tie_word_embeddings")

    _edit_config(tmp_path, move)
    loaded = load_target(str(tmp_path), dtype="float32")
    assert loaded.facts.tied and loaded.facts.fingerprint == tiny(tied=True).facts.fingerprint


def test_a_tied_target_with_another_head_is_refused(variants: dict[str, Path], tmp_path: Path) -> None:
    shutil.copytree(variants["tied-with-head"], tmp_path, dirs_exist_ok=True)
    _edit_weights(tmp_path, lambda tensors: tensors["lm_head.weight"].add_(1))
    with pytest.raises(ValueError, match=r"tie_word_embeddings.* differs"):
        load_target(str(tmp_path))


def test_tokenizer_alone(variants: dict[str, Path], tokenizer: Any) -> None:
    for name in ("tiny", str(variants["single"])):
        alone = load_tokenizer(name)
        assert alone.get_vocab() == tokenizer.get_vocab() and alone.pad_token_id == 2
        assert alone.chat_template == tokenizer.chat_template
    with pytest.raises(ValueError, match="no such folder"):
        load_tokenizer("nowhere")
    with pytest.raises(ValueError, match="40 hexadecimal"):
        load_tokenizer("owner/name", trust_remote_code=True)


def test_hub_id_is_pinned_to_its_commit(
    variants: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A repository in the local Hub cache: whatever branch was asked for, the commit is what gets recorded."""
    commit = "0123456789abcdef0123456789abcdef01234567"
    repository = tmp_path / "models--owner--small"
    (repository / "refs").mkdir(parents=True)
    (repository / "refs" / "main").write_text(commit)
    shutil.copytree(variants["single"], repository / "snapshots" / commit)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    facts = load_target("owner/small", dtype="float32").facts
    assert (facts.name, facts.revision) == ("owner/small", commit)
    assert load_target("owner/small", revision=commit, dtype="float32").facts == facts
    with pytest.raises(ValueError, match="owner/small"):
        load_target("owner/small", revision="no-such-branch")


def test_fingerprint_is_of_the_content(tiny: Callable[..., Target], variants: dict[str, Path]) -> None:
    base = tiny().facts.fingerprint
    assert tiny_target().facts.fingerprint == base
    assert tiny_target(seed=1).facts.fingerprint != base
    assert tiny(dtype=torch.bfloat16).facts.fingerprint == base == tiny(dtype=torch.float64).facts.fingerprint
    rope = {"rope_type": "default", "rope_theta": 20000.0}
    assert tiny_target(rope=rope).facts.fingerprint != base


@pytest.fixture
def folder(tmp_path: Path, variants: dict[str, Path]) -> Path:
    """A fresh copy of the single-file target, to be damaged."""
    for file in variants["single"].iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    return tmp_path


def _edit_weights(folder: Path, change: Callable[[dict[str, Tensor]], object]) -> None:
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})


def _edit_config(folder: Path, change: Callable[[dict[str, Any]], None]) -> None:
    config = json.loads((folder / "config.json").read_text())
    change(config)
    (folder / "config.json").write_text(json.dumps(config))


NORM = "model.layers.1.input_layernorm.weight"


def test_missing_weights_are_refused_not_drawn(folder: Path) -> None:
    _edit_weights(folder, lambda tensors: tensors.pop(NORM))
    with pytest.raises(ValueError, match=f"1 missing keys: {NORM}"):
        load_target(str(folder))


@pytest.mark.parametrize("device", ["foo", "cuda:99", "meta"])
def test_a_device_that_cannot_run_is_named(device: str) -> None:
    with pytest.raises(ValueError, match=f"device '{device}' cannot be used here"):
        load_target("tiny", device=device)


def test_unexpected_weights_are_refused(folder: Path) -> None:
    _edit_weights(folder, lambda tensors: tensors.update({"model.layers.1.extra": torch.ones(3)}))
    with pytest.raises(ValueError, match=r"1 unexpected keys: model\.layers\.1\.extra"):
        load_target(str(folder))


def test_weights_of_another_shape_are_refused(folder: Path) -> None:
    _edit_weights(folder, lambda tensors: tensors.update({NORM: torch.ones(47)}))
    with pytest.raises(ValueError, match=NORM):
        load_target(str(folder))


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_non_finite_weights_are_refused(folder: Path, value: float) -> None:
    def spoil(tensors: dict[str, Tensor]) -> None:
        tensors["lm_head.weight"][100, 7] = value

    _edit_weights(folder, spoil)
    with pytest.raises(ValueError, match=r"tensor lm_head\.weight holds NaN or infinity"):
        load_target(str(folder))


def test_models_of_other_kinds_are_refused_by_name(folder: Path) -> None:
    _edit_config(folder, lambda config: config.update(vision_config={"hidden_size": 8}))
    with pytest.raises(ValueError, match=r"'llama'.*vision_config"):
        load_target(str(folder))
    with pytest.raises(ValueError, match=r"'qwen3_next'.*'linear_attention'"):
        config = AutoConfig.for_model("qwen3_next", num_hidden_layers=4)
        Target(_Empty(config), byte_tokenizer(), "x")
    with pytest.raises(ValueError, match=r"'t5'.*encoder-decoder"):
        Target(_Empty(AutoConfig.for_model("t5")), byte_tokenizer(), "x")
    with pytest.raises(ValueError, match=r"'gpt2'.*no rotary positions"):
        Target(_Empty(AutoConfig.for_model("gpt2")), byte_tokenizer(), "x")


class _Empty(torch.nn.Module):
    def __init__(self, config: Any) -> None:
        super().__init__()
        self.config = config


def test_rope_without_base_or_of_unknown_type_is_refused(folder: Path) -> None:
    """B49."""
    _edit_config(folder, lambda config: config.update(rope_parameters={"rope_type": "default"}))
    with pytest.raises(ValueError, match="rotary base"):
        load_target(str(folder))
    _edit_config(folder, lambda config: config.update(rope_parameters={"rope_type": "foo", "rope_theta": 1e4}))
    with pytest.raises(ValueError, match="foo"):
        load_target(str(folder))


@pytest.mark.parametrize("scaling", [None, "linear", "yarn", "llama3"])
@pytest.mark.parametrize("place", ["top", "nested", "per-type"])
def test_rope_facts_wherever_the_config_keeps_them(
    place: str, scaling: str | None, tmp_path: Path, tiny: Callable[..., Target]
) -> None:
    """B49. Theta 5e6 at the top level, in the nested dict, per attention type: the facts say what the model runs."""
    extra = {None: {}, "linear": {"factor": 2.0}, "yarn": YARN, "llama3": LLAMA3}[scaling]
    rope = {**extra, "rope_type": scaling or "default", "rope_theta": 5e6}
    family = "gemma3_text" if place == "per-type" else "llama"
    local = {"rope_type": "default", "rope_theta": 1e4}
    whole = {"full_attention": rope, "sliding_attention": local} if place == "per-type" else rope
    source = tiny_target(family=family, rope=whole, window=6 if place == "per-type" else None)
    source.model.save_pretrained(tmp_path)
    source.tokenizer.save_pretrained(tmp_path)
    if place == "top":

        def move(config: dict[str, Any]) -> None:
            kept = config.pop("rope_parameters")
            config["rope_theta"] = kept.pop("rope_theta")
            config["rope_scaling"] = None if scaling is None else kept

        _edit_config(tmp_path, move)
    facts = load_target(str(tmp_path), dtype="float32").facts
    assert facts.rope["rope_theta"] == 5e6 and facts.rope["rope_type"] == (scaling or "default")
    assert {key: facts.rope[key] for key in rope} == rope
    assert facts.rope == source.facts.rope and scaling in (None, *ROPE_TYPES)


def test_frequencies_that_depend_on_the_batch_are_refused(tiny: Callable[..., Target]) -> None:
    """Beyond the original length, longrope's frequencies change for all rows once one row is longer."""
    target = tiny(**CASES["phi3-longrope"])
    limit = target.facts.max_positions
    target.forward(_ids(1, 2), torch.tensor([[limit - 2, limit - 1]]))
    with pytest.raises(ValueError, match=f"position {limit}"):
        target.forward(_ids(1, 2), torch.tensor([[limit - 1, limit]]))


def test_head_size_is_read_not_computed(tiny: Callable[..., Target]) -> None:
    """B36."""
    a, b = tiny(**CASES["llama-head16"]).facts, tiny(**CASES["qwen3-40-3-16"]).facts
    assert (a.width, a.heads, a.head_dim) == (48, 4, 16) and (b.width, b.heads, b.head_dim) == (40, 3, 16)


def test_tokenizer_and_embedding(folder: Path, tiny: Callable[..., Target]) -> None:
    """B09. No pad token: none is added. Fewer tokens than rows: the rest is banned. More: refused."""
    byte_tokenizer(256).save_pretrained(folder)
    plain = load_target(str(folder), dtype="float32")
    assert plain.tokenizer.pad_token_id == plain.tokenizer.eos_token_id == 2
    assert plain.facts.vocab == plain.facts.tokens == plain.embed_weight.shape[0] == 256
    assert plain.banned_ids.tolist() == []
    fewer = tiny(tokens=250)
    assert fewer.facts.tokens == 250 and fewer.facts.vocab == 256
    assert fewer.banned_ids.tolist() == list(range(250, 256))
    byte_tokenizer(260).save_pretrained(folder)
    with pytest.raises(ValueError, match=r"260 tokens.* 256 rows"):
        load_target(str(folder))


def test_tokenizer_round_trip(tokenizer: Any) -> None:
    text = "Naïve café: 東京, 🙂\n\ttabs & <|im_end|>"
    assert tokenizer.decode(tokenizer(text)["input_ids"]) == text
    messages = [{"role": "user", "content": "the heater"}]
    ids = tokenizer.apply_chat_template(messages, add_generation_prompt=True)["input_ids"]
    assert tokenizer.decode(ids) == "<|im_start|>user\nthe heater<|im_end|>\n<|im_start|>assistant\n"
    assert max(ids) < len(tokenizer) == 256


def test_what_cannot_be_loaded_is_said(folder: Path) -> None:
    with pytest.raises(ValueError, match=r"'no-such-thing'.*smollm2 or tiny"):
        load_target("no-such-thing")
    with pytest.raises(ValueError, match="float8"):
        load_target("tiny", dtype="float8")
    with pytest.raises(ValueError, match=r"trust_remote_code.*40 hexadecimal.*'main'"):
        load_target(str(folder), trust_remote_code=True, revision="main")
    with pytest.raises(ValueError, match="someone/something"):
        load_target("someone/something")


def test_code_in_a_model_folder_never_runs(folder: Path) -> None:
    (folder / "configuration_x.py").write_text("raise SystemExit('this code ran')")
    _edit_config(folder, lambda config: config.update(model_type="x", auto_map={"AutoConfig": "configuration_x.C"}))
    with pytest.raises(ValueError, match="trust_remote_code"):
        load_target(str(folder))


def test_code_that_may_run_is_listed(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """PROMISES 20: with `trust_remote_code`, the files and their hashes; code of another repository is refused."""
    (folder / "modeling_x.py").write_text("x = 1\n")
    load_target(str(folder), trust_remote_code=True, revision="0" * 40)
    digest = hashlib.sha256(b"x = 1\n").hexdigest()
    assert f"{digest}  modeling_x.py" in capsys.readouterr().err
    _edit_config(folder, lambda config: config.update(auto_map={"AutoConfig": "else/where--configuration_x.C"}))
    with pytest.raises(ValueError, match=r"config.json takes code from another repository.*else/where"):
        load_target(str(folder), trust_remote_code=True, revision="0" * 40)


@pytest.mark.parametrize(("family", "head_dim"), [("llama", 12), ("qwen3", 128)])  # 128: not read from the file
def test_gguf_file(family: str, head_dim: int, tmp_path: Path, tiny: Callable[..., Target]) -> None:
    source = tiny(family=family, kv_heads=2, head_dim=head_dim)
    _write_gguf(source, tmp_path / "small.gguf")
    loaded = load_target(str(tmp_path / "small.gguf"), dtype="float32")
    for ids in (_ids(1, 12), _ids(1, 12, seed=3)):
        ours, theirs = (t.head(t.forward(ids, _positions(1, 12)).last_hidden_BTD) for t in (loaded, source))
        _close(ours, theirs)
    assert loaded.facts.name == "small.gguf" and loaded.facts.eos_ids == (2,)
    assert loaded.tokenizer.get_vocab() == source.tokenizer.get_vocab()
    messages = [{"role": "user", "content": "hé"}]
    rendered = [t.tokenizer.apply_chat_template(messages, tokenize=False) for t in (loaded, source)]
    assert rendered[0] == rendered[1]


def _write_gguf(target: Target, path: Path) -> None:
    """The file that llama.cpp's converter would write (its Llama layout interleaves the two halves of q and k)."""
    gguf = pytest.importorskip("gguf")
    facts, tokenizer = target.facts, target.tokenizer
    writer = gguf.GGUFWriter(str(path), facts.family)
    writer.add_context_length(facts.max_positions)
    writer.add_embedding_length(facts.width)
    writer.add_block_count(facts.layers)
    writer.add_feed_forward_length(facts.intermediate)
    writer.add_head_count(facts.heads)
    writer.add_head_count_kv(facts.kv_heads)
    writer.add_key_length(facts.head_dim)
    writer.add_value_length(facts.head_dim)
    writer.add_rope_dimension_count(facts.head_dim)
    writer.add_rope_freq_base(facts.rope["rope_theta"])
    writer.add_layer_norm_rms_eps(facts.norm_eps)
    writer.add_vocab_size(facts.vocab)
    state = json.loads(tokenizer.backend_tokenizer.to_str())
    vocab = sorted(tokenizer.get_vocab().items(), key=lambda item: item[1])
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list([token for token, _ in vocab])
    writer.add_token_types([3 if i < 3 else 1 for _, i in vocab])
    writer.add_token_merges([" ".join(pair) for pair in state["model"]["merges"]])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_unk_token_id(0)
    writer.add_chat_template(tokenizer.chat_template)
    names = {
        "model.embed_tokens": "token_embd",
        "model.norm": "output_norm",
        "lm_head": "output",
        "self_attn.q_proj": "attn_q",
        "self_attn.k_proj": "attn_k",
        "self_attn.v_proj": "attn_v",
        "self_attn.o_proj": "attn_output",
        "self_attn.q_norm": "attn_q_norm",
        "self_attn.k_norm": "attn_k_norm",
        "mlp.gate_proj": "ffn_gate",
        "mlp.up_proj": "ffn_up",
        "mlp.down_proj": "ffn_down",
        "post_attention_layernorm": "ffn_norm",
        "input_layernorm": "attn_norm",
        "model.layers": "blk",
    }
    for name, weight in target.model.named_parameters():
        if facts.family == "llama" and ("q_proj" in name or "k_proj" in name):
            heads = facts.heads if "q_proj" in name else facts.kv_heads
            halves = weight.reshape(heads, 2, weight.shape[0] // heads // 2, weight.shape[1])
            weight = halves.swapaxes(1, 2).reshape(weight.shape)
        for long, short in names.items():
            name = name.replace(long, short)
        writer.add_tensor(name, weight.detach().numpy().copy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
