"""`draftsmith convert`: foreign heads into ours, bit for bit, and what is ambiguous or different refused (CASES B11, B33).

Run: pytest tests/test_convert.py
"""

from __future__ import annotations

import json
from collections import OrderedDict

import pytest
import torch
from safetensors.torch import load_file, save_file

from draftsmith.inference import convert as module
from draftsmith.inference.check import replay, stored_positions
from draftsmith.inference.convert import ConvertConfig, convert, convert_files, norm_options, taps_of
from draftsmith.inference.export import RunFacts, export
from draftsmith.inference.exporters.folder import WEIGHTS
from draftsmith.inference.load import load_drafter
from draftsmith.models import METHODS

IDS = torch.arange(3, 131, 2)


def make(target, method, options, reduced=False):
    torch.manual_seed(1)
    drafter = METHODS[method](METHODS[method].Config(**options), target.facts, IDS if reduced else None)
    drafter.init_from_target(target)
    with torch.no_grad():
        for parameter in drafter.parameters():
            parameter.copy_((parameter + 0.2 * torch.randn_like(parameter)).bfloat16().to(parameter.dtype))
    return drafter.eval()


def foreign(drafter, target, folder):
    """Config and tensors as an engine reads them, without our key."""
    export(drafter, folder, run=RunFacts(), target=target)
    config = json.loads((folder / "config.json").read_text())
    del config["draftsmith"]
    return config, load_file(folder / WEIGHTS)


def same(drafter, other):
    ours, theirs = drafter.state_dict(), other.state_dict()
    return ours.keys() == theirs.keys() and all(torch.equal(ours[n], theirs[n].to(ours[n].dtype)) for n in ours)


@pytest.fixture
def target(tiny):
    return tiny(layers=8, max_positions=512)


@pytest.fixture
def head3(target, tmp_path):
    """An EAGLE-3 head with the default taps, and its flat files."""
    drafter = make(target, "eagle3", {"steps": 1, "kv_heads": 2}, reduced=True)
    return (drafter, *foreign(drafter, target, tmp_path / "flat"))


@pytest.fixture(autouse=True)
def offered_target(target, monkeypatch):
    monkeypatch.setattr("draftsmith.models.loading.load_target", lambda name, **options: target)


def written(folder, config, tensors, file="model.safetensors"):
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config))
    save_file(tensors, folder / file) if file.endswith("safetensors") else torch.save(tensors, folder / file)
    return folder


def test_every_reader_is_tested():
    assert set(module.READERS) == {"speculators", "eagle3", "eagle", "medusa", "dflash"}


def test_flat_head_through_the_command_is_bit_equal_and_runs_the_same(head3, target, tmp_path, capsys):
    drafter, config, tensors = head3
    source = written(tmp_path / "theirs", config, tensors)
    out = convert_files(ConvertConfig(str(source), "tiny", str(tmp_path / "ours"), train_length=64))
    said = capsys.readouterr().out
    assert "sha256" in said and "h[2, 4, 5]" in said
    again = load_file(out / WEIGHTS)
    assert again.keys() == tensors.keys() and all(torch.equal(again[n], tensors[n]) for n in tensors)
    loaded = load_drafter(str(out), target)
    ids, positions = stored_positions(target, 3)
    with torch.no_grad():
        torch.testing.assert_close(
            replay(loaded, target, ids, positions, 3), replay(drafter, target, ids, positions, 3)
        )
    ours = json.loads((out / "config.json").read_text())["draftsmith"]
    assert ours["train_length"] == 64 and "Converted: from model.safetensors" in (out / "README.md").read_text()


@pytest.mark.parametrize("wrap", [lambda s: s, lambda s: {"state_dict": s}], ids=["bare", "nested"])
def test_bin_files_through_the_restricted_reader(wrap, head3, target, tmp_path):
    drafter, config, tensors = head3
    source = written(tmp_path / "theirs", config, wrap(OrderedDict(tensors)), "pytorch_model.bin")
    assert same(drafter, load_drafter(str(convert_files(ConvertConfig(str(source), "t", str(tmp_path / "o")))), target))


def test_flat_spellings(head3, target):
    drafter, config, tensors = head3
    spellings = (
        {"model." + n: t for n, t in tensors.items()},
        {n.replace("midlayer.", "layers.0."): t for n, t in tensors.items()},
        tensors | {"embed_tokens.weight": target.embed_weight.detach().bfloat16()},
        tensors | {"fc.bias": torch.zeros(48), "midlayer.self_attn.rotary_emb.inv_freq": torch.ones(6)},
        {n: t for n, t in tensors.items() if n != "t2d"},
        tensors | {"d2t": tensors["d2t"].int()},
    )
    for spelled in spellings:
        assert same(drafter, convert(config, spelled, target)[0])
    order = torch.randperm(64)
    shuffled = tensors | {"d2t": IDS[order] - torch.arange(64), "lm_head.weight": tensors["lm_head.weight"][order]}
    assert same(drafter, convert(config, shuffled, target)[0])
    old = {k: v for k, v in config.items() if k not in ("rope_parameters", "head_dim")}  # transformers 4
    assert same(drafter, convert(old, tensors, target)[0])


def test_speculators_form(head3, target, tmp_path):
    drafter, flat, tensors = head3
    layer = {k: v for k, v in flat.items() if k not in ("draft_vocab_size", "architectures")}
    config = {
        "speculators_model_type": "eagle3", "draft_vocab_size": 64, "norm_before_residual": False,
        "eagle_aux_hidden_state_layer_ids": [2, 4, 5], "transformer_layer_config": layer,
    }  # fmt: skip
    renamed = {n.replace("midlayer.", "layers.0."): t for n, t in tensors.items()}
    assert same(drafter, convert(config, renamed, target)[0])
    del config["norm_before_residual"]  # this form's default is true, the flat form's false
    assert convert(config, renamed, target)[0].config.norm_before_residual is True
    assert convert(flat, tensors, target)[0].config.norm_before_residual is False
    with pytest.raises(ValueError, match="transformer_layer_config"):
        convert({k: v for k, v in config.items() if k != "transformer_layer_config"}, renamed, target)


def test_full_vocabulary_without_a_head_takes_the_targets(target, tmp_path):
    drafter = make(target, "eagle3", {"steps": 1})
    config, tensors = foreign(drafter, target, tmp_path / "x")
    del tensors["lm_head.weight"]
    converted, _ = convert(config, tensors, target)
    assert torch.equal(converted.lm_head.weight, target.head_weight) and converted.d2t_W is None
    tensors = tensors | {"lm_head.weight": drafter.lm_head.weight.detach(), "d2t": torch.zeros(256, dtype=torch.int64)}
    assert same(drafter, convert(config, tensors, target)[0])
    with pytest.raises(ValueError, match="identity are zero"):
        convert(config, tensors | {"d2t": torch.arange(256)}, target)


@pytest.mark.parametrize(
    "options", [{"fc_norm": True, "norm_output": True}, {"norm_before_fc": True}, {"norm_before_residual": True}]
)
def test_norm_options(options, target, tmp_path):
    drafter = make(target, "eagle3", {"steps": 1, **options})
    config, tensors = foreign(drafter, target, tmp_path / "x")
    converted, _ = convert(config, tensors, target)
    assert same(drafter, converted) and all(getattr(converted.config, k) == v for k, v in options.items())
    if "fc_norm" in options:
        legacy = dict(
            zip(("fc_norm.0", "fc_norm.1", "fc_norm.2"), ("aux_norm_low", "aux_norm_mid", "aux_norm_high"), strict=True)
        )
        old = {legacy.get(n.removesuffix(".weight"), n.removesuffix(".weight")) + (".weight" if n.endswith(".weight") else ""): t
               for n, t in tensors.items()}  # fmt: skip
        without = {k: v for k, v in config.items() if k != "fc_norm"} | {"use_aux_norm": True}
        assert same(drafter, convert(without, old, target)[0])
        with pytest.raises(ValueError, match="fc_norm is False"):
            convert({k: v for k, v in config.items() if k != "fc_norm"}, tensors, target)


def test_norm_keys_without_tensors_are_refused():
    with pytest.raises(ValueError, match="norm_before_fc is True, the file lacks"):
        norm_options({"eagle_config": {"norm_before_fc": True}}, {}, False)


@pytest.mark.parametrize(
    "config, count, speculators, given, want",
    [
        ({}, 3, False, None, (2, 15, 27)),
        ({"eagle_aux_hidden_state_layer_ids": [1, 9, 28]}, 3, False, None, (1, 9, 28)),
        ({"eagle_config": {"eagle_aux_hidden_state_layer_ids": [1, 14, 26]}}, 3, False, None, (2, 15, 27)),
        ({"eagle_aux_hidden_state_layer_ids": [3, 9], "eagle_config": {"eagle_aux_hidden_state_layer_ids": [2, 8]}}, 2, False, None, (3, 9)),
        ({"eagle_aux_hidden_state_layer_ids": [3, 9]}, 2, True, None, (3, 9)),
        ({"eagle_aux_hidden_state_layer_ids": [3, 9, 12, 30]}, 3, True, (3, 9, 12), (3, 9, 12)),
        ({"eagle_aux_hidden_state_layer_ids": [3, 9, 12, 30]}, 3, True, None, "4 layer ids"),
        ({"eagle_aux_hidden_state_layer_ids": [3, 9], "eagle_config": {"eagle_aux_hidden_state_layer_ids": [3, 9]}}, 2, False, None, "disagree"),
        ({"eagle_aux_hidden_state_layer_ids": [9, 3]}, 2, False, None, "ascend"),
        ({"eagle_aux_hidden_state_layer_ids": [3, 31]}, 2, False, None, r"0\.\.30"),
        ({}, 5, False, None, "--taps"),
        ({}, 3, False, (1, 2), "2 layer ids"),
    ],
)  # fmt: skip
def test_layer_ids_of_each_convention(config, count, speculators, given, want):
    if isinstance(want, str):
        with pytest.raises(ValueError, match=want):
            taps_of(config, 30, count, speculators, given)
    else:
        assert taps_of(config, 30, count, speculators, given)[0] == want


@pytest.mark.parametrize(
    "change, words",
    [
        (lambda c, t: (c, {n: x for n, x in t.items() if n != "d2t"}), "no d2t"),
        (lambda c, t: (c, t | {"d2t": IDS + 100}), "absolute"),
        (lambda c, t: (c, t | {"d2t": t["d2t"] * 0 - torch.arange(64)}), "distinct"),
        (lambda c, t: (c, t | {"t2d": ~t["t2d"]}), "t2d and d2t"),
        (lambda c, t: (c, {n: x for n, x in t.items() if n != "lm_head.weight"}), r"no lm_head\.weight"),
        (lambda c, t: (c, {n: x for n, x in t.items() if n != "norm.weight"}), r"missing: norm\.weight"),
        (lambda c, t: (c, t | {"stray.weight": torch.zeros(1)}), r"not expected: stray\.weight"),
        (lambda c, t: (c, t | {"fc.bias": torch.ones(48)}), "trained biases"),
        (lambda c, t: (c, t | {"embed_tokens.weight": torch.randn(256, 48)}), "embed_tokens"),
        (lambda c, t: (c, t | {"layers.1.self_attn.q_proj.weight": torch.zeros(1)}), "several layers"),
        (lambda c, t: (c | {"draft_vocab_size": 32}, t), "64 rows"),
        (lambda c, t: (c | {"hidden_size": 64, "rms_norm_eps": 1e-3}, t), r"hidden_size: head 64, target 48; rms_norm_eps: head 0\.001"),
        (lambda c, t: (c | {"rope_parameters": {"rope_type": "default", "rope_theta": 1e6}}, t), "rope: head .*1000000"),
        (lambda c, t: (c | {"target_hidden_size": 96}, t), "target_hidden_size: head 96, target 48"),
        (lambda c, t: (c | {"eagle_config": {"use_aux_hidden_state": False}}, t), "no taps"),
        (lambda c, t: ({k: v for k, v in c.items() if k != "num_attention_heads"}, t), "num_attention_heads"),
        (lambda c, t: (c | {"speculators_model_type": "peagle"}, t), "peagle"),
        (lambda c, t: (c | {"model_type": "mlp_speculator"}, t), "mlp_speculator"),
        (lambda c, t: (c, {"x.weight": torch.zeros(1)}), "no known head"),
    ],
)  # fmt: skip
def test_what_is_wrong_or_ambiguous_is_refused(change, words, head3, target):
    _, config, tensors = head3
    with pytest.raises(ValueError, match=words):
        convert(*change(dict(config), dict(tensors)), target)


BLOCKS = {
    "dflash": ("dflash", {"taps": (1, 3)}, False),
    "jetspec_reduced": ("dflash", {"causal": True, "kv_heads": 2, "intermediate": 80}, True),
    "dspark": ("dspark", {"rank": 8}, False),
    "dspark_reduced": ("dspark", {"rank": 8, "head": "rnn", "sample_from_anchor": False}, True),
    "domino": ("dspark", {"rank": 8, "head": "gru", "gru_size": 12, "confidence": False}, False),
}


@pytest.mark.parametrize("name", BLOCKS)
def test_block_drafters_of_every_form(name, target, tmp_path):
    """z-lab's and SpecForge's keys, DeepSpec's (top level alone), speculators'; with the target's tables beside them."""
    method, options, reduced = BLOCKS[name]
    drafter = make(target, method, {"block": 4, "layers": 2} | options, reduced)
    config, tensors = foreign(drafter, target, tmp_path / "x")
    tables = {"embed_tokens.weight": target.embed_weight.detach()}
    if not reduced:
        tables["lm_head.weight"] = target.head_weight.detach()
    inner = config["dflash_config"]
    top = {k: v for k, v in config.items() if k != "dflash_config"} | inner
    speculators = {k: v for k, v in inner.items() if k not in ("target_layer_ids", "projector_type")} | {
        "speculators_model_type": method, "aux_hidden_state_layer_ids": list(drafter.taps), "transformer_layer_config": config,
    }  # fmt: skip
    forms = [(config, tensors), (top, tensors | tables)] + [(speculators, tensors)] * (name != "domino")
    if reduced:
        speculators["draft_vocab_size"] = 64
    for stated, found in forms:
        again, head = convert(dict(stated), dict(found), target)
        assert again.method == method and same(drafter, again) and again.taps == drafter.taps
        assert again.parallel == drafter.parallel and again.config.causal == drafter.config.causal
        assert any(f"h{list(drafter.taps)}" in note for note in head.notes)
    if reduced:
        order = torch.randperm(64)
        rows = [n for n in ("lm_head.weight", "markov_head.markov_w2.weight") if n in tensors]
        shuffled = tensors | {n: tensors[n][order] for n in rows} | {"d2t": IDS[order] - torch.arange(64)}
        assert same(drafter, convert(config, shuffled, target)[0])


def test_block_drafters_that_we_would_run_otherwise_are_refused(target, tmp_path):
    config, tensors = foreign(make(target, "dflash", {"block": 4, "layers": 1}), target, tmp_path / "x")
    inner = config["dflash_config"]
    for change, extra, words in (
        ({"layer_types": ["sliding_attention"]}, {}, "sliding"),
        ({"dflash_config": inner | {"target_layer_ids": [0, 1]}}, {}, "must be 1, ascending"),
        ({"dflash_config": {k: v for k, v in inner.items() if k != "target_layer_ids"}}, {}, "no layer ids"),
        ({"dflash_config": {k: v for k, v in inner.items() if k != "mask_token_id"}}, {}, "mask_token_id"),
        ({"rms_norm_eps": 1e-3}, {}, "rms_norm_eps"),
        ({"markov_rank": 8, "markov_head_type": "fir"}, {}, "'fir' is not known"),
        ({}, {"lm_head.weight": torch.randn(256, 48)}, "not the target's head"),
        ({}, {"layers.0.conv.weight": torch.zeros(2)}, "not expected: layers"),
    ):
        with pytest.raises(ValueError, match=words):
            convert(config | change, tensors | extra, target)


def test_eagle1_with_and_without_a_trained_bias(target, tmp_path):
    drafter = make(target, "eagle", {"kv_heads": 2})
    config, tensors = foreign(drafter, target, tmp_path / "x")
    assert same(drafter, convert(config, tensors, target)[0])
    extra = {"embed_tokens.weight": target.embed_weight.detach(), "lm_head.weight": target.head_weight.detach()}
    assert same(drafter, convert(config, tensors | extra, target)[0])
    biased, foreign_head = convert(config, tensors | {"fc.bias": torch.full((48,), 0.5)}, target)
    assert torch.equal(biased.fc.bias, torch.full((48,), 0.5)) and "engines drop it" in foreign_head.notes[-1]
    folder = export(biased, tmp_path / "y", run=RunFacts(), target=target)
    assert same(biased, load_drafter(str(folder), target)) and "vLLM drops" in (folder / "README.md").read_text()
    with pytest.raises(ValueError, match="target's head"):
        convert(config, tensors | {"lm_head.weight": torch.randn(256, 48)}, target)


@pytest.mark.parametrize("prefix", ["", "medusa_heads."])
@pytest.mark.parametrize("head", ["own", "shared"])
def test_original_medusa_files(head, prefix, target, tmp_path):
    drafter = make(target, "medusa", {"heads": 3, "layers": 2, "head": head})
    original = {}
    for name, t in drafter.state_dict().items():
        parts = name.split(".")
        if parts[0] == "blocks":
            original[f"{prefix}{parts[1]}.{parts[3]}.linear.{parts[4]}"] = t
        else:
            original[f"{prefix}{parts[1]}.2.weight"] = t
    config = {"medusa_num_heads": 3, "medusa_num_layers": 2, "base_model_name_or_path": "x/y", "version": "2"}
    source = written(tmp_path / "theirs", config, original, "medusa_lm_head.pt")
    out = convert_files(ConvertConfig(str(source / "medusa_lm_head.pt"), "tiny", str(tmp_path / "ours")))
    assert same(drafter, load_drafter(str(out), target))
    with pytest.raises(ValueError, match="medusa_num_heads 5, the file has 3"):
        convert(config | {"medusa_num_heads": 5}, original, target)


@pytest.mark.parametrize("reduced", [False, True])
def test_engine_medusa_files(reduced, target, tmp_path):
    drafter = make(target, "medusa", {"heads": 2, "head": "shared"}, reduced)
    config, tensors = foreign(drafter, target, tmp_path / "x")
    assert same(drafter, convert(config, tensors, target)[0])
    moved = {("lm_heads.0.weight" if n == "lm_head.weight" else n): t for n, t in tensors.items()}
    assert same(drafter, convert(config, moved, target)[0])
    with pytest.raises(ValueError, match="not the target's head"):
        convert(config, tensors | {"lm_head.weight": tensors["lm_head.weight"] + 1}, target)


def test_where_files_are_looked_for(tmp_path, head3):
    _, config, tensors = head3
    with pytest.raises(ValueError, match="no file, no folder"):
        convert_files(ConvertConfig(str(tmp_path / "nowhere"), "t", str(tmp_path / "o")))
    (tmp_path / "empty").mkdir()
    with pytest.raises(ValueError, match="holds none of"):
        convert_files(ConvertConfig(str(tmp_path / "empty"), "t", str(tmp_path / "o")))
    with pytest.raises(ValueError, match="already"):
        convert_files(ConvertConfig(str(tmp_path / "flat"), "t", str(tmp_path / "o")))
    split = tmp_path / "split"
    names = sorted(tensors)
    written(split, config, {n: tensors[n] for n in names[::2]}, "model-00001-of-00002.safetensors")
    save_file({n: tensors[n] for n in names[1::2]}, split / "model-00002-of-00002.safetensors")
    assert convert_files(ConvertConfig(str(split), "t", str(tmp_path / "o"))).is_dir()
    bad = tensors | {"norm.weight": torch.full((48,), torch.nan)}
    with pytest.raises(ValueError, match=r"NaN .* norm\.weight"):
        convert_files(ConvertConfig(str(written(tmp_path / "nan", config, bad)), "t", str(tmp_path / "n")))
