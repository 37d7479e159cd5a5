"""Exports: complete, strict, atomic, in the engines' forms (CASES B33-B36, B49; PROMISES 8, 16, 23).

Iterates over the exporters' table. Run: pytest tests/test_export.py
"""

from __future__ import annotations

import dataclasses
import json
import shutil

import pytest
import torch
import yaml
from safetensors.torch import load_file, save_file

from draftsmith.inference.check import replay, stored_positions
from draftsmith.inference.export import RunFacts, export
from draftsmith.inference.exporters import EXPORTERS
from draftsmith.inference.exporters.folder import REPLAY, WEIGHTS, read_header, write_file
from draftsmith.inference.exporters.layout import rope_keys
from draftsmith.inference.load import load_drafter, read_export_config
from draftsmith.models import METHODS
from draftsmith.models.families import FAMILIES
from draftsmith.models.small_lm import LMConfig

VARIANTS = {
    "falcon": ("falcon", {}, False),
    "falcon_reduced": ("falcon", {"block": 3, "kv_heads": 2, "intermediate": 80}, True),
    "dual_view": ("dual_view", {"block": 3, "rank": 4}, False),
    "dual_view_full_reduced": ("dual_view", {"block": 2, "rank": None}, True),
    "bita_reduced": ("prompt_tokens", {"prefix": 5}, True),
    "ppd": ("prompt_tokens", {"variant": "ppd", "tokens": 2, "members": 3}, False),
    "pass": ("prompt_tokens", {"variant": "pass"}, False),
    "medusa": ("medusa", {"heads": 3, "layers": 2}, False),
    "medusa_shared": ("medusa", {"heads": 2, "head": "shared"}, False),
    "medusa_shared_reduced": ("medusa", {"heads": 2, "head": "shared"}, True),
    "hydra": ("hydra", {"heads": 3, "layers": 2}, False),
    "hydra_prefix_reduced": ("hydra", {"heads": 2, "layers": 2, "prefix": True}, True),
    "eagle": ("eagle", {}, False),
    "eagle_reduced": ("eagle", {"steps": 2, "kv_heads": 2}, True),
    "eagle3": ("eagle3", {"steps": 3}, False),
    "eagle3_reduced": ("eagle3", {"steps": 2, "taps": (1, 2, 3), "kv_heads": 2, "intermediate": 80}, True),
    "eagle3_fc_norm": ("eagle3", {"steps": 2, "fc_norm": True, "norm_output": True, "taps": (0, 1, 2, 3, 4)}, True),
    "eagle3_options": (
        "eagle3",
        {"steps": 2, "norm_before_fc": True, "norm_before_residual": True, "taps": (2, 4)},
        True,
    ),
    "draft_model": ("draft_model", {"lm": LMConfig(layers=2)}, False),
    "draft_model_frozen_reduced": ("draft_model", {"lm": LMConfig(train_embeddings=False)}, True),
    "pard": ("pard", {"depths": 3, "lm": LMConfig(layers=2), "mask_id": 9}, False),
    "pard_reduced": ("pard", {"depths": 4, "objective": "kl"}, True),
    "dflash": ("dflash", {"block": 4, "layers": 2}, False),
    "dflash_options": (
        "dflash",
        {
            "block": 4,
            "layers": 1,
            "causal": True,
            "sample_from_anchor": True,
            "taps": (2, 4),
            "kv_heads": 2,
            "intermediate": 80,
        },
        True,
    ),
    "dspark": ("dspark", {"block": 4, "layers": 1, "rank": 8, "temperatures": (0.5, 1.0, 2.0, 1.25)}, False),
    "dspark_gated": ("dspark", {"block": 3, "layers": 1, "rank": 8, "head": "gated"}, True),
    "dspark_rnn": ("dspark", {"block": 4, "layers": 2, "rank": 8, "head": "rnn", "sample_from_anchor": False}, True),
    "dspark_gru": ("dspark", {"block": 3, "layers": 1, "rank": 8, "head": "gru", "gru_size": 12}, False),
    "dspark_pairs": ("dspark", {"block": 3, "layers": 1, "rank": 8, "head": "pairs", "confidence": False}, True),
    "dspark_none": ("dspark", {"block": 3, "layers": 1, "head": "none", "anchors": None}, False),
    "peagle": ("peagle", {"depths": 3, "layers": 2}, False),
    "peagle_reduced": (
        "peagle",
        {"depths": 4, "layers": 3, "taps": (1, 4), "kv_heads": 2, "intermediate": 80, "fc_norm": True, "mask_id": 9},
        True,
    ),
}

CHECKPOINTS = ("draft_model", "pard")  # whole language models


def make(target, method, options, reduced=False, seed=0):
    """A drafter with random weights in every tensor, rounded so that a bf16 file holds it exactly."""
    torch.manual_seed(seed)
    ids = torch.arange(3, 131, 2) if reduced else None
    drafter = METHODS[method](METHODS[method].Config(**options), target.facts, ids)
    drafter.init_from_target(target)
    with torch.no_grad():
        for parameter in drafter.parameters():
            parameter.copy_((parameter + 0.2 * torch.randn_like(parameter)).bfloat16().to(parameter.dtype))
    return drafter.eval()


@pytest.fixture(params=VARIANTS)
def variant(request, tiny):
    target = tiny(max_positions=512)
    method, options, reduced = VARIANTS[request.param]
    return target, make(target, method, options, reduced)


def save(drafter, target, folder, **facts):
    return export(drafter, folder, run=RunFacts(train_length=128, **facts), target=target)


def edit_config(folder, change):
    config = json.loads((folder / "config.json").read_text())
    change(config)
    (folder / "config.json").write_text(json.dumps(config))


def test_every_method_has_an_exporter_and_a_variant():
    assert set(EXPORTERS) == set(METHODS) == {method for method, _, _ in VARIANTS.values()}
    assert all(name == exporter.method for name, exporter in EXPORTERS.items())


def test_round_trip_is_bit_equal(variant, tmp_path):
    target, drafter = variant
    save(drafter, target, tmp_path / "export")
    config = read_export_config(str(tmp_path / "export"))
    ours = config["draftsmith"]
    assert ours["method"] == drafter.method and ours["taps"] == list(drafter.taps)
    assert ours["target"]["width"] == 48 and ours["train_length"] == 128
    loaded = load_drafter(str(tmp_path / "export"), target)
    assert loaded.config == drafter.config
    state = drafter.state_dict()
    assert state.keys() == loaded.state_dict().keys()
    for name, tensor in loaded.state_dict().items():
        assert torch.equal(tensor, state[name]), name
    save(loaded, target, tmp_path / "again")
    first, second = (load_file(tmp_path / n / WEIGHTS) for n in ("export", "again"))
    assert first.keys() == second.keys() and all(torch.equal(first[n], second[n]) for n in first)
    ids, positions = stored_positions(target, 2)
    with torch.no_grad():
        before, after = (replay(d, target, ids, positions, 2) for d in (drafter, loaded))
    torch.testing.assert_close(before, after, rtol=0, atol=1e-6)


def test_file_holds_exactly_what_the_form_lists(variant, tmp_path):
    target, drafter = variant
    folder = save(drafter, target, tmp_path / "export")
    config = json.loads((folder / "config.json").read_text())
    header = read_header(folder / WEIGHTS)
    slots = EXPORTERS[drafter.method].slots(config)
    assert header.keys() == slots.keys()
    assert all(header[name][1] == slot.shape for name, slot in slots.items())
    assert {dtype for dtype, _ in header.values()} <= {"BF16", "I64", "BOOL"}
    if drafter.method not in CHECKPOINTS:
        assert not any(name.startswith("model.") for name in header)  # vLLM adds the prefix itself
    ours = config["draftsmith"]
    assert not set(ours["absent"]) & set(header)
    trained = {name for name, parameter in drafter.named_parameters() if parameter.requires_grad}
    assert set(header) == trained - set(ours["absent"]) | set(ours["untrained"])  # trained, or declared as what it is
    assert "bias" not in config and None not in [v for k, v in config.items() if k != "draftsmith"]
    assert [p.name for p in folder.glob("*.safetensors")] == [WEIGHTS]  # engines load all that lie here
    assert (folder / REPLAY).is_file()


def test_a_missing_extra_or_misshapen_tensor_is_refused_by_name(variant, tmp_path):
    target, drafter = variant
    folder = save(drafter, target, tmp_path / "export")
    tensors = load_file(folder / WEIGHTS)
    for name in tensors:
        save_file({n: t for n, t in tensors.items() if n != name}, folder / WEIGHTS)
        with pytest.raises(ValueError, match=f"missing: {name}"):
            load_drafter(str(folder), target)
    save_file(tensors | {"stray.weight": torch.zeros(2)}, folder / WEIGHTS)
    with pytest.raises(ValueError, match=r"not expected: stray\.weight"):
        load_drafter(str(folder), target)
    name = next(n for n, t in tensors.items() if t.is_floating_point())
    save_file(tensors | {name: torch.zeros(3, 5, dtype=torch.bfloat16)}, folder / WEIGHTS)
    with pytest.raises(ValueError, match=rf"{name} has shape \[3, 5\]"):
        load_drafter(str(folder), target)
    save_file(tensors | {name: tensors[name].to(torch.int32)}, folder / WEIGHTS)
    with pytest.raises(ValueError, match=f"{name} is I32"):
        load_drafter(str(folder), target)


def test_another_declared_method_is_refused(variant, tmp_path):
    target, drafter = variant
    folder = save(drafter, target, tmp_path / "export")
    for other in set(EXPORTERS) - {drafter.method} | {"nonsense"}:
        edit_config(folder, lambda config, other=other: config["draftsmith"].update(method=other))
        with pytest.raises(ValueError):
            load_drafter(str(folder), target)


def test_entries_of_a_wrong_type_are_refused_by_name(tiny, tmp_path):
    target = tiny(max_positions=512)
    folder = save(make(target, "eagle3", {}), target, tmp_path / "export")
    before = (folder / "config.json").read_text()
    for name, values in (
        ("method", ([], {}, None)),
        ("config", (None, 7, [], [["a"]])),
        ("taps", (None, 7, "x", ["x"], [[1]], [True])),
        ("train_length", ("x", [], 1.5)),
        ("sha256", (7, ["x"])),
        ("target.rope", ("x", [1])),
        ("target.tokenizer_hash", (7, [1])),
        ("config.steps", ("x", [1], None)),
    ):
        for value in values:

            def change(config, name=name, value=value):
                place = config["draftsmith"]
                *sections, leaf = name.split(".")
                for section in sections:
                    place = place[section]
                place[leaf] = value

            edit_config(folder, change)
            with pytest.raises(ValueError, match=name.split(".")[0]):
                load_drafter(str(folder), target)
            (folder / "config.json").write_text(before)
    edit_config(folder, lambda c: c.pop("hidden_size"))
    with pytest.raises(ValueError, match="hidden_size"):
        load_drafter(str(folder), target)


@pytest.mark.parametrize("method", EXPORTERS)
def test_unknown_setting_newer_format_and_foreign_folder(method, tiny, tmp_path):
    target = tiny(max_positions=512)
    folder = save(make(target, method, {}), target, tmp_path / "export")
    edit_config(folder, lambda c: c["draftsmith"]["config"].update(surprise=1))
    with pytest.raises(ValueError, match="surprise"):
        load_drafter(str(folder), target)
    edit_config(folder, lambda c: c["draftsmith"].update(format=99))
    with pytest.raises(ValueError, match="99"):
        load_drafter(str(folder), target)
    edit_config(folder, lambda c: c.pop("draftsmith"))
    with pytest.raises(ValueError, match="draftsmith convert"):
        load_drafter(str(folder), target)
    with pytest.raises(ValueError, match="no folder"):
        load_drafter(str(tmp_path / "nowhere"), target)


def test_flipped_byte_and_truncated_file_are_refused(tiny, tmp_path):
    target = tiny(max_positions=512)
    folder = save(make(target, "eagle3", {"steps": 2}), target, tmp_path / "export")
    raw = bytearray((folder / WEIGHTS).read_bytes())
    raw[-5] ^= 1
    (folder / WEIGHTS).write_bytes(raw)
    with pytest.raises(ValueError, match="sha256"):
        load_drafter(str(folder), target)
    (folder / WEIGHTS).write_bytes(raw[:-100])
    with pytest.raises(ValueError, match="fit the file"):
        load_drafter(str(folder), target)


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_non_finite_values_are_never_written(variant, bad, tmp_path):
    target, drafter = variant
    name, parameter = list(drafter.named_parameters())[-1]
    with torch.no_grad():
        parameter.view(-1)[1] = bad
    with pytest.raises(ValueError, match=rf"{name} \(1 values\)"):
        save(drafter, target, tmp_path / "export")
    assert not list(tmp_path.iterdir())


def test_never_overwrites_what_is_no_export(tiny, tmp_path):
    target = tiny(max_positions=512)
    drafter = make(target, "medusa", {"heads": 2})
    home = tmp_path / "thesis"
    home.mkdir()
    (home / "chapter1.tex").write_text("years of work")
    with pytest.raises(ValueError, match="no draftsmith export"):
        save(drafter, target, home)
    assert (home / "chapter1.tex").read_text() == "years of work"
    save(drafter, target, tmp_path / "export")
    save(make(target, "medusa", {"heads": 3}), target, tmp_path / "export")  # an older export may be replaced
    assert read_export_config(str(tmp_path / "export"))["num_heads"] == 3
    assert sorted(p.name for p in tmp_path.iterdir()) == ["export", "thesis"]


# B33: the layout is declared


def test_config_declares_heads_layers_biases_and_features(tiny, tmp_path):
    target = tiny(max_positions=512)
    medusa = json.loads(
        (save(make(target, "medusa", {"heads": 3, "layers": 2}), target, tmp_path / "m") / "config.json").read_text()
    )
    assert medusa["model_type"] == "medusa" and medusa["architectures"] == ["MedusaModel"]
    assert (medusa["num_heads"], medusa["num_hidden_layers"]) == (3, 2)
    assert medusa["medusa_fc_bias"] is True and medusa["original_lm_head"] is False
    assert not [
        k
        for k in medusa
        if "num" in k and ("heads" in k or "layers" in k) and k not in ("num_heads", "num_hidden_layers")
    ]
    eagle = save(make(target, "eagle", {}), target, tmp_path / "e")
    config, tensors = json.loads((eagle / "config.json").read_text()), load_file(eagle / WEIGHTS)
    assert config["architectures"] == ["EagleLlamaForCausalLM"] and config["attention_bias"] is False
    assert not tensors["fc.bias"].any()
    assert not {"lm_head.weight", "norm.weight", "layers.0.input_layernorm.weight", "embed_tokens.weight"} & set(
        tensors
    )
    assert set(config["draftsmith"]["absent"]) >= {"lm_head.weight", "embed_tokens.weight"}


def test_medusa_maps_absolute_ids_and_refuses_a_cut_matrix_per_head(tiny, tmp_path):
    target = tiny(max_positions=512)
    drafter = make(target, "medusa", {"heads": 2, "head": "shared"}, reduced=True)
    tensors = load_file(save(drafter, target, tmp_path / "m") / WEIGHTS)
    assert torch.equal(tensors["token_map"], torch.arange(3, 131, 2))
    assert torch.equal(tensors["lm_head.weight"].float(), target.head_weight[3:131:2].bfloat16().float())
    assert "enable_weights_track" in (tmp_path / "m" / "README.md").read_text()
    with pytest.raises(ValueError, match="head: shared"):
        save(make(target, "medusa", {"heads": 2}, reduced=True), target, tmp_path / "n")


def test_a_shared_head_must_be_the_targets_own(tiny, tmp_path):
    target = tiny(max_positions=512)
    folder = save(make(target, "medusa", {"heads": 2, "head": "shared"}), target, tmp_path / "m")
    tensors = load_file(folder / WEIGHTS)
    tensors["lm_head.weight"][7] += 1
    save_file(tensors, folder / WEIGHTS)
    edit_config(folder, lambda c: c["draftsmith"].pop("sha256"))
    with pytest.raises(ValueError, match=r"lm_head\.weight is not the head of"):
        load_drafter(str(folder), target)


def test_eagle1_bias_and_inconsistent_maps_are_refused(tiny, tmp_path):
    target = tiny(max_positions=512)
    for method, name, change in (
        ("eagle", "fc.bias", lambda t: t + 1),
        ("eagle3", "d2t", lambda t: t.roll(1)),
        ("eagle3", "d2t", lambda t: t + 200),
        ("eagle3", "t2d", lambda t: ~t),
    ):
        folder = save(make(target, method, {"steps": 1}, reduced=True), target, tmp_path / "x")
        tensors = load_file(folder / WEIGHTS)
        save_file(tensors | {name: change(tensors[name])}, folder / WEIGHTS)
        edit_config(folder, lambda c: c["draftsmith"].pop("sha256"))
        with pytest.raises(ValueError, match=r"fc\.bias|draft ids"):
            load_drafter(str(folder), target)


def test_eagle3_maps_are_offsets(tiny, tmp_path):
    target = tiny(max_positions=512)
    tensors = load_file(save(make(target, "eagle3", {"steps": 1}, reduced=True), target, tmp_path / "x") / WEIGHTS)
    ids = torch.arange(3, 131, 2)
    assert torch.equal(torch.arange(64) + tensors["d2t"], ids) and torch.equal(tensors["t2d"].nonzero()[:, 0], ids)
    config = json.loads((tmp_path / "x" / "config.json").read_text())
    assert (config["draft_vocab_size"], config["vocab_size"], config["tie_word_embeddings"]) == (64, 256, False)
    full = save(make(target, "eagle3", {"steps": 1}), target, tmp_path / "y")
    assert not {"d2t", "t2d"} & set(load_file(full / WEIGHTS))
    assert json.loads((full / "config.json").read_text())["draft_vocab_size"] == 256


def test_peagle_ships_a_table_with_the_masks_own_row(tiny, tmp_path):
    target = tiny(max_positions=512)
    drafter = make(target, "peagle", {"layers": 2, "mask_id": 9})
    folder = save(drafter, target, tmp_path / "x")
    config, tensors = json.loads((folder / "config.json").read_text()), load_file(folder / WEIGHTS)
    assert config["architectures"] == ["LlamaForCausalLMEagle3"] and config["num_hidden_layers"] == 2
    assert config["mask_token_id"] == 9 and tensors["mask_hidden"].shape == (1, 1, 3 * 48)
    want = target.embed_weight.bfloat16().index_copy(0, torch.tensor([9]), drafter.mask_embed[None].bfloat16())
    assert torch.equal(tensors["embed_tokens.weight"], want)
    serve = EXPORTERS["peagle"].serve(config, "t", "d", 4)
    assert set(serve) == {"vLLM"} and '"parallel_drafting": true' in serve["vLLM"]
    assert '"parallel_drafting": true' in (folder / "README.md").read_text()
    tensors["embed_tokens.weight"][8] += 1
    save_file(tensors, folder / WEIGHTS)
    edit_config(folder, lambda c: c["draftsmith"].pop("sha256"))
    with pytest.raises(ValueError, match=r"embed_tokens\.weight is not the table of"):
        load_drafter(str(folder), target)
    with pytest.raises(ValueError, match="bind"):
        export(METHODS["peagle"](METHODS["peagle"].Config(), target.facts), tmp_path / "y", run=RunFacts())
    for bad in (None, 256, True):
        with pytest.raises(ValueError, match="mask_token_id"):
            EXPORTERS["peagle"].slots(config | {"mask_token_id": bad})


def test_language_models_are_ordinary_checkpoints(tiny, tmp_path):
    """transformers loads the folder by itself; PARD's names its mask; a tied head is left out; both spellings of RoPE."""
    from transformers import AutoModelForCausalLM

    target = tiny(max_positions=512, tied=True)
    for method, options in (("draft_model", {}), ("pard", {"mask_id": 9})):
        drafter = make(target, method, {"lm": LMConfig(layers=2)} | options)
        folder = save(drafter, target, tmp_path / method)
        config = json.loads((folder / "config.json").read_text())
        assert config["architectures"] == ["LlamaForCausalLM"] and config["num_hidden_layers"] == 2
        assert config["vocab_size"] == 256 and config["tie_word_embeddings"] is True
        assert config["rope_theta"] == config["rope_parameters"]["rope_theta"] == 1e4
        assert config.get("pard_token") == (9 if method == "pard" else None)
        assert (
            "lm_head.weight" not in load_file(folder / WEIGHTS) and "lm_head.weight" in config["draftsmith"]["absent"]
        )
        model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
        ids = torch.arange(10, 20)[None]
        with torch.no_grad():
            want = drafter.run.head(drafter.run.forward(ids, torch.arange(10)[None]).last_hidden_BTD)
            torch.testing.assert_close(model(ids).logits, want)
        assert load_drafter(str(folder), target).lm_head.weight.shape == (256, 48)
    serve = EXPORTERS["pard"].serve(config, "t", "d", 4)
    assert '"method": "draft_model"' in serve["vLLM"] and '"parallel_drafting": true' in serve["vLLM"]


@pytest.mark.parametrize(
    ("method", "change", "words"),
    [
        ("draft_model", {"num_attention_heads": 2, "head_dim": 24}, "does not hold what"),
        ("draft_model", {"rms_norm_eps": 1e-3}, "engines.*rms_norm_eps: file 0.001, head 1e-06"),
        ("draft_model", {"num_hidden_layers": 10**9}, "1..1000"),
        ("draft_model", {"auto_map": {"AutoModel": "x.y"}}, "auto_map not allowed"),
        ("pard", {"pard_token": 8}, "pard_token is 8"),
    ],
)
def test_a_checkpoint_that_says_two_things_is_refused(method, change, words, tiny, tmp_path):
    target = tiny(max_positions=512)
    folder = save(make(target, method, {}), target, tmp_path / "x")
    edit_config(folder, lambda c: c.update(change))
    with pytest.raises(ValueError, match=words):
        load_drafter(str(folder), target)


def test_block_drafters_say_to_engines_what_they_are(tiny, tmp_path):
    target = tiny(max_positions=512)
    drafter = make(target, "dflash", {"block": 4, "layers": 2, "taps": (1, 3)})
    folder = save(drafter, target, tmp_path / "x")
    config, tensors = json.loads((folder / "config.json").read_text()), load_file(folder / WEIGHTS)
    assert config["architectures"] == ["DFlashDraftModel"] and config["model_type"] == "qwen3"
    assert config["dflash_config"] == {"mask_token_id": 0, "target_layer_ids": [0, 2], "block_size": 4}  # h[k] is k - 1
    assert (config["block_size"], config["num_target_layers"], config["num_hidden_layers"]) == (4, 4, 2)
    assert config["layer_types"] == ["full_attention"] * 2 and config["head_dim"] == 12
    assert not {"lm_head.weight", "embed_tokens.weight", "mask_hidden", "d2t"} & set(tensors)
    assert tensors["layers.1.self_attn.q_norm.weight"].shape == (12,)
    serve = EXPORTERS["dflash"].serve(config, "t", "d", 8)
    assert '"num_speculative_tokens": 3' in serve["vLLM"] and "--speculative-num-draft-tokens 4" in serve["SGLang"]
    reduced = make(target, "dflash", {"block": 4, "layers": 1, "causal": True}, reduced=True)
    config = json.loads((save(reduced, target, tmp_path / "y") / "config.json").read_text())
    assert config["dflash_config"]["causal"] is True and config["draft_vocab_size"] == 64
    assert set(EXPORTERS["dflash"].serve(config, "t", "d", 8)) == {"vLLM"}  # SGLang has no draft vocabulary
    anchor = make(target, "dflash", {"block": 4, "layers": 1, "sample_from_anchor": True})
    config = json.loads((save(anchor, target, tmp_path / "anchor") / "config.json").read_text())
    (line,) = EXPORTERS["dflash"].serve(config, "t", "d", 8)
    assert "No serving engine" in line and any("second runner" in limit for limit in config["draftsmith"]["limits"])
    tensors = load_file(tmp_path / "y" / WEIGHTS)
    assert torch.equal(torch.arange(64) + tensors["d2t"], torch.arange(3, 131, 2))
    assert torch.equal(tensors["lm_head.weight"], target.head_weight[3:131:2].bfloat16())
    tensors["lm_head.weight"][7] += 1
    save_file(tensors, tmp_path / "y" / WEIGHTS)
    edit_config(tmp_path / "y", lambda c: c["draftsmith"].pop("sha256"))
    with pytest.raises(ValueError, match=r"lm_head\.weight is not the head of"):
        load_drafter(str(tmp_path / "y"), target)
    with pytest.raises(ValueError, match=r"h\[0\], the embeddings"):
        save(make(target, "dflash", {"layers": 1, "taps": (0, 2)}), target, tmp_path / "z")
    with pytest.raises(ValueError, match="give export the target"):
        export(reduced, tmp_path / "z", run=RunFacts())
    for bad in (None, 256, "16"):
        edit_config(folder, lambda c, bad=bad: c["dflash_config"].update(mask_token_id=bad))
        with pytest.raises(ValueError, match="mask_token_id"):
            load_drafter(str(folder), target)
    edit_config(folder, lambda c: c["dflash_config"].update(target_layer_ids=None))
    with pytest.raises(ValueError, match="target_layer_ids"):
        load_drafter(str(folder), target)


@pytest.mark.parametrize("head, kind", [("markov", "vanilla"), ("gated", "gated"), ("rnn", "rnn")])
def test_dspark_in_deepspecs_form(head, kind, tiny, tmp_path):
    target = tiny(max_positions=512)
    drafter = make(target, "dspark", {"block": 4, "layers": 1, "rank": 8, "head": head, "taps": (2, 3)}, reduced=True)
    folder = save(drafter, target, tmp_path / "x")
    config, tensors = json.loads((folder / "config.json").read_text()), load_file(folder / WEIGHTS)
    assert config["architectures"] == ["Qwen3DSparkModel"]
    for place in (config, config["dflash_config"]):  # DeepSpec's and SpecForge's
        assert place["target_layer_ids"] == [1, 2] and place["mask_token_id"] == 0 and place["block_size"] == 4
        assert place["markov_rank"] == 8 and place["markov_head_type"] == kind and place["num_anchors"] == 512
        assert (
            place["sample_from_anchor"]
            is place["enable_confidence_head"]
            is place["confidence_head_with_markov"]
            is True
        )
    assert tensors["markov_head.markov_w1.weight"].shape == (256, 8)
    assert tensors["markov_head.markov_w2.weight"].shape == (64, 8)
    assert tensors["confidence_head.proj.weight"].shape == (1, 56)
    serve = EXPORTERS["dspark"].serve(config, "t", "d", 2)
    assert '"method": "dspark"' in serve["vLLM"] and '"num_speculative_tokens": 4' in serve["vLLM"]


def test_domino_in_specforges_form_and_heads_that_no_engine_has(tiny, tmp_path):
    target = tiny(max_positions=512)
    gru = {"block": 4, "layers": 1, "head": "gru", "rank": 8, "gru_size": 12, "confidence": False}
    config = json.loads((save(make(target, "dspark", gru), target, tmp_path / "x") / "config.json").read_text())
    facts = config["dflash_config"]
    assert config["architectures"] == ["DFlashDraftModel"] and facts["projector_type"] == "domino"
    assert (facts["gru_hidden_dim"], facts["emb_dim"], facts["pure_draft_prefix_len"]) == (12, 8, 1)
    assert facts["shift_label"] is True and "markov_rank" not in facts
    assert set(EXPORTERS["dspark"].serve(config, "t", "d", 3)) == {"SGLang"}
    for head in ("pairs", "none"):
        options = {"block": 4, "layers": 1, "head": head, "rank": 8}
        config = json.loads(
            (save(make(target, "dspark", options), target, tmp_path / head) / "config.json").read_text()
        )
        assert config["architectures"] == ["DraftsmithDSpark"]
        (line,) = EXPORTERS["dspark"].serve(config, "t", "d", 3)
        assert "No serving engine" in line


@pytest.mark.parametrize("method", ["eagle3", "peagle", "dflash", "dspark", "draft_model"])
def test_a_draft_vocabulary_of_all_ids_is_none(method, tiny, tmp_path):
    """Engines refuse a map beside a head of V rows, and their readers expect none."""
    target = tiny(max_positions=512)
    drafter = METHODS[method](METHODS[method].Config(), target.facts, torch.arange(256))
    drafter.init_from_target(target)
    assert drafter.d2t_W is None and drafter.t2d_V is None and drafter.vocab == 256
    folder = save(drafter, target, tmp_path / "x")
    assert not {"d2t", "t2d"} & set(load_file(folder / WEIGHTS))
    assert load_drafter(str(folder), target).d2t_W is None


# B34: taps


@pytest.mark.parametrize(
    "layers, taps", [(1, None), (2, None), (4, (1, 2, 3)), (8, None), (8, (2, 4, 6)), (8, (2, 4, 5)), (80, None)]
)
def test_taps_in_every_convention(layers, taps, tiny, tmp_path):
    target = tiny(layers=layers, max_positions=512)
    drafter = make(target, "eagle3", {"steps": 1, "taps": taps})
    folder = export(drafter, tmp_path / "x", run=RunFacts())
    config = json.loads((folder / "config.json").read_text())
    k = list(drafter.taps)
    assert len(set(k)) == len(k) and k[0] >= 0 and k[-1] <= layers
    assert config["draftsmith"]["taps"] == k and "h[k]" in config["draftsmith"]["taps_convention"]
    if layers >= 7 and k == [2, layers // 2, layers - 3]:
        assert "eagle_aux_hidden_state_layer_ids" not in config and "eagle_config" not in config
    else:
        assert config["eagle_aux_hidden_state_layer_ids"] == k
        assert config["eagle_config"]["eagle_aux_hidden_state_layer_ids"] == [i - 1 for i in k]
    assert config.get("num_aux_hidden_states", 3) == len(k)


def test_taps_outside_or_contradicting_the_settings_are_refused(tiny, tmp_path):
    target = tiny(max_positions=512)
    folder = save(make(target, "eagle3", {"steps": 1, "taps": (1, 2, 3)}), target, tmp_path / "x")
    edit_config(folder, lambda c: c["draftsmith"].update(taps=[1, 2, 4]))
    with pytest.raises(ValueError, match=r"\[1, 2, 4\]"):
        load_drafter(str(folder), target)
    edit_config(folder, lambda c: c["draftsmith"].update(taps=[1, 2, 5]))
    with pytest.raises(ValueError, match=r"taps: head \[5\], target has h\[0\] to h\[4\]"):
        load_drafter(str(folder), target)


# B36: head size and widths


@pytest.mark.parametrize("width, heads", [(48, 4), (40, 3)])
@pytest.mark.parametrize("method", EXPORTERS)
def test_explicit_head_size(method, width, heads, tiny, tmp_path):
    target = tiny(family="qwen3", width=width, heads=heads, kv_heads=1, head_dim=16, max_positions=512)
    drafter = make(target, method, {"prefix": True} if method == "hydra" else {})
    folder = save(drafter, target, tmp_path / "x")
    config = json.loads((folder / "config.json").read_text())
    if method != "medusa":
        assert config["head_dim"] == 16
    loaded = load_drafter(str(folder), target)
    ids, positions = stored_positions(target, 2)
    with torch.no_grad():
        torch.testing.assert_close(
            *(replay(d, target, ids, positions, 2) for d in (drafter, loaded)), rtol=0, atol=1e-6
        )


# B49: RoPE, both spellings, and the target's own


@pytest.mark.parametrize(
    "rope",
    [
        {"rope_type": "default", "rope_theta": 5e6},
        {"rope_type": "linear", "rope_theta": 5e6, "factor": 2.0},
        {"rope_type": "yarn", "rope_theta": 5e6, "factor": 4.0, "original_max_position_embeddings": 128},
        {
            "rope_type": "llama3", "rope_theta": 5e6, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
            "original_max_position_embeddings": 128,
        },
    ],
    ids=lambda rope: rope["rope_type"],
)  # fmt: skip
@pytest.mark.parametrize("method", ["eagle", "eagle3"])
def test_rope_of_the_target_in_both_places(method, rope, tiny, tmp_path):
    from transformers import LlamaConfig
    from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

    target = tiny(rope=rope, max_positions=512)
    folder = save(make(target, method, {"steps": 1}), target, tmp_path / "x")
    config = json.loads((folder / "config.json").read_text())
    assert config["rope_theta"] == 5e6 and config["rope_parameters"]["rope_theta"] == 5e6
    assert config["max_position_embeddings"] == 512
    if rope["rope_type"] != "default":
        assert config["rope_scaling"] == config["rope_parameters"]
    loaded = load_drafter(str(folder), target)
    without = {k: v for k, v in config.items() if k not in ("rope_parameters", "draftsmith")}
    without["rope_parameters"] = {
        "rope_theta": without["rope_theta"],
        "rope_type": "default",
        **without.get("rope_scaling", {}),
    }
    for seen in (config, without):  # as transformers 5 reads it, and from what transformers 4 reads
        table = LlamaRotaryEmbedding(LlamaConfig(**{k: v for k, v in seen.items() if k != "draftsmith"}))
        torch.testing.assert_close(loaded.rotary.inverse, table.inv_freq)
        assert loaded.rotary.scale == pytest.approx(table.attention_scaling)


def test_unknown_or_missing_rope_is_refused_not_defaulted(tiny):
    facts = tiny(max_positions=512).facts
    with pytest.raises(ValueError, match="foo"):
        rope_keys(dataclasses.replace(facts, rope={"rope_type": "foo", "rope_theta": 1e4}))
    with pytest.raises(ValueError, match="rope_theta"):
        rope_keys(dataclasses.replace(facts, rope={"rope_type": "default"}))


@pytest.mark.parametrize("family", FAMILIES)
def test_every_family_gives_an_export_that_loads(family, tiny, tmp_path):
    """Sizes, RoPE (top level, nested, per attention type) and activation come from the target of each family."""
    target = tiny(family=family, max_positions=512)
    folder = save(make(target, "eagle3", {"steps": 1}), target, tmp_path / "x")
    config = json.loads((folder / "config.json").read_text())
    assert config["model_type"] == "llama" and config["hidden_act"] == target.facts.activation
    assert (
        config["rope_theta"] == target.facts.rope["rope_theta"]
        and "partial_rotary_factor" not in config["rope_parameters"]
    )
    assert bool(config["draftsmith"]["limits"]) == (target.facts.activation != "silu")
    assert load_drafter(str(folder), target).taps == (1, 2, 3)


# A head that belongs to another target


@pytest.mark.parametrize(
    "other, words",
    [
        ({"width": 64}, ("width", "48", "64")),
        ({"vocab": 512}, ("vocab", "256", "512")),
        ({"tokens": 200}, ("tokenizer", "tokens", "256", "200")),
        ({"layers": 5}, ("layers", "4", "5")),
        ({"rope": {"rope_type": "default", "rope_theta": 5e6}}, ("rope", "10000.0", "5000000.0")),
        ({"max_positions": 64}, ("max_positions", "512", "64", "training length", "128")),
    ],
    ids=lambda x: next(iter(x)) if isinstance(x, dict) else "",
)
def test_other_target_is_refused_with_both_values(variant, other, words, tiny, tmp_path):
    target, drafter = variant
    folder = save(drafter, target, tmp_path / "x")
    stranger = tiny(**({"max_positions": 512} | other))
    if drafter.draft_needs <= {"ids"} and not {"vocab", "tokens"} & set(other):  # reads the text alone
        with pytest.warns(UserWarning, match="other weights"):
            load_drafter(str(folder), stranger)
        return
    with pytest.raises(ValueError) as refusal:
        load_drafter(str(folder), stranger)
    assert all(word in str(refusal.value) for word in words), str(refusal.value)


def test_other_weights_of_the_same_shape_are_a_warning(tiny, tmp_path):
    target = tiny(max_positions=512)
    folder = save(make(target, "eagle", {}), target, tmp_path / "x")
    with pytest.warns(UserWarning, match="other weights"):
        load_drafter(str(folder), tiny(max_positions=512, seed=5))


# The card and run.yaml

SECRET = "hf_PlantedPlantedPlantedPlantedPlant"


def test_card_is_written_from_the_run_and_scrubbed(variant, tmp_path, monkeypatch):
    monkeypatch.setenv("HF_TOKEN", SECRET)
    target, drafter = variant
    folder = save(
        drafter, target, tmp_path / "export",
        config={"data": {"source": "/home/jane/private/train.jsonl"}, "wandb": {"api_key": SECRET}},
        command=f"HF_TOKEN={SECRET} /home/jane/.venv/bin/python train/distill_draft.py --config configs/x.yaml",
        versions={"torch": "2.13.0"}, data={"samples": 1200}, training={"minutes": 8.2, "checkpoint": "/tmp/runs/demo/step-9"},
        estimated={"k": 2, "tau": 1.61803, "alpha": [0.5, 0.25]}, origin=f"a file with token {SECRET}",
    )  # fmt: skip
    for path in (p for p in folder.rglob("*") if p.is_file()):
        raw = path.read_bytes()
        for word in (SECRET, "jane", "private", "/tmp", str(tmp_path)):
            assert word.encode() not in raw, (path.name, word)
    card = (folder / "README.md").read_text()
    front = yaml.safe_load(card.split("---")[1])
    assert drafter.method in front["tags"] and front["library_name"] == "draftsmith"
    for needed in ("1.62", "1200", "train.jsonl", "torch 2.13.0", "draftsmith check", "--show"):
        assert needed in card, needed
    line = next((x for x in card.splitlines() if x.startswith("vllm serve")), None)
    ours_alone = drafter.method in ("hydra", "falcon", "dual_view", "prompt_tokens") or (
        drafter.method == "dflash" and drafter.config.sample_from_anchor
    )
    served = not ours_alone and (drafter.method != "dspark" or getattr(drafter, "markov_head", None) is not None)
    assert (line is not None) == served
    if line is not None:
        spoken = json.loads(line.split("--speculative-config '")[1].split("'")[0])
        method = {"pard": "draft_model", "peagle": "eagle3"}.get(drafter.method, drafter.method)
        drafted = drafter.max_depth if drafter.method == "dspark" else 2  # DSpark is served whole
        assert spoken["method"] == method and spoken["num_speculative_tokens"] == drafted
    run = yaml.safe_load((folder / "run.yaml").read_text())
    assert run["config"]["data"]["source"] == "train.jsonl" and run["config"]["wandb"]["api_key"] == "[removed]"


def test_card_takes_base_model_and_licence_and_the_report(tiny, tmp_path):
    from draftsmith.inference.card import render_card

    target = tiny(max_positions=512)
    folder = save(make(target, "eagle3", {"steps": 1}), target, tmp_path / "x")
    edit_config(folder, lambda c: c["draftsmith"]["target"].update(name="smollm2", revision=None))
    row = {"name": "eagle3 K=4", "method": "eagle3", "decode": "speculate", "draft_length": 4, "tree": "chain", "temperature": 0.0,
           "dtype": "bfloat16", "prompts": 60, "tau": 1.987, "alpha": [0.5, 0.4], "ratio_to_plain": 1.31}  # fmt: skip
    write_file(
        folder / "report.json",
        json.dumps(
            {
                "machine": {},
                "rows": [row, row | {"method": "plain", "tau": None}, row | {"lossless": "no", "verifier": "fuzzy"}],
            }
        ),
    )
    card = render_card(folder, "jane/head")
    front = yaml.safe_load(card.split("---")[1])
    assert front["base_model"] == "HuggingFaceTB/SmolLM2-135M-Instruct" and front["license"] == "apache-2.0"
    assert "1.99" in card and "1.31" in card and card.count("| speculate") == 2
    assert card.count("lossy rule `fuzzy`") == 1
    assert '"model": "jane/head"' in card and "--speculative-algorithm EAGLE3" in card


def test_a_copied_export_loads_anywhere(tiny, tmp_path):
    target = tiny(max_positions=512)
    folder = save(make(target, "eagle3", {"steps": 1}), target, tmp_path / "x")
    shutil.copytree(folder, tmp_path / "elsewhere" / "y")
    shutil.rmtree(folder)
    assert load_drafter(str(tmp_path / "elsewhere" / "y"), target).taps == (1, 2, 3)
