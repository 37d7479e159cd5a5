"""`draftsmith check`: the replay agrees with training itself, and every fault that acceptance hides is seen (PROMISE 16).

Iterates over the exporters' table. Run: pytest tests/test_check.py
"""

from __future__ import annotations

import json

import pytest
import torch
from safetensors.torch import load_file, save_file

from draftsmith.inference.check import (
    DEPTH,
    CheckConfig,
    check_export,
    make_replay,
    read_replay,
    replay,
    stored_positions,
)
from draftsmith.inference.export import RunFacts, export
from draftsmith.inference.exporters import EXPORTERS
from draftsmith.inference.exporters.folder import REPLAY, WEIGHTS
from draftsmith.models import METHODS
from draftsmith.models.drafter import Batch
from draftsmith.models.small_lm import LMConfig
from draftsmith.models.supervision import Scorer
from draftsmith.models.target import live_states

OPTIONS = {
    "medusa": {"heads": 3, "head": "shared"},
    "hydra": {"heads": 3, "prefix": True},
    "eagle": {"steps": 4},
    "eagle3": {"steps": 4, "taps": (1, 2, 3), "fc_norm": True},
    "falcon": {"block": 4},
    "dual_view": {"block": 4, "anchors": None},
    "prompt_tokens": {"variant": "bita", "tokens": 4, "points": 100},
    "peagle": {"depths": 4, "layers": 2, "fc_norm": True},
    "draft_model": {"depths": 4, "lm": LMConfig(layers=2)},
    "pard": {"depths": 4, "lm": LMConfig(layers=2), "mask_id": 9},
    "dflash": {"block": 5, "layers": 2},
    "dspark": {"block": 4, "layers": 1, "head": "rnn", "rank": 8, "taps": (1, 3)},
}


def make(target, method):
    """Random weights in every tensor, as strong as what training leaves, over every second id."""
    torch.manual_seed(3)
    drafter = METHODS[method](METHODS[method].Config(**OPTIONS[method]), target.facts, torch.arange(0, 256, 2))
    drafter.init_from_target(target)
    with torch.no_grad():
        for parameter in drafter.parameters():
            parameter += 0.5 * torch.randn_like(parameter) * parameter.shape[-1] ** -0.5
    return drafter.eval()


@pytest.fixture
def target(tiny, monkeypatch):
    target = tiny(max_positions=512)
    monkeypatch.setattr("draftsmith.models.loading.load_target", lambda name, **options: target)
    return target


@pytest.fixture(params=EXPORTERS)
def exported(request, target, tmp_path):
    drafter = make(target, request.param)
    return target, drafter, export(drafter, tmp_path / "x", run=RunFacts(train_length=128), target=target)


def change_tensor(folder, name, change):
    tensors = load_file(folder / WEIGHTS)
    tensors[name] = change(tensors[name]).contiguous()
    save_file(tensors, folder / WEIGHTS)
    change_config(folder, lambda ours: ours.pop("sha256", None))


def change_config(folder, change):
    config = json.loads((folder / "config.json").read_text())
    change(config["draftsmith"])
    (folder / "config.json").write_text(json.dumps(config))


def test_an_export_agrees_with_itself(exported, capsys):
    _, drafter, folder = exported
    result = check_export(CheckConfig(str(folder)))
    depth = min(DEPTH, drafter.max_depth or DEPTH)
    assert (result.pairs, result.agreeing) == (32 * depth, 32 * depth) and result.difference < 1e-5
    assert "100.0 %" in capsys.readouterr().out


def test_stored_logits_are_those_the_loss_is_computed_from(exported, logits_of_training, monkeypatch):
    """Training's own forward pass, teacher-forced on the stored texts, with the weights as the file holds them."""
    target, drafter, folder = exported
    stored = read_replay(folder)
    with torch.no_grad():
        for parameter in drafter.parameters():
            parameter.copy_(parameter.bfloat16().float())
    ids_ST = stored["ids"]
    s, t = ids_ST.shape
    batch = Batch(
        ids_BT=ids_ST,
        supervised_BT=torch.ones(s, t, dtype=torch.bool),
        positions_BT=torch.arange(t).expand(s, t),
        samples_BT=torch.arange(s)[:, None].expand(s, t),
    )
    out = live_states(target, drafter, batch)
    monkeypatch.setattr(Scorer, "terms", lambda self: None)
    seen = logits_of_training(drafter, batch, out)
    t2d = {int(i): w for w, i in enumerate(drafter.d2t_W)}
    compared = 0
    for row, (text, at) in enumerate(stored["positions"].tolist()):
        for k in range(stored["top_ids"].shape[1]):
            if (logits_W := seen[k].get(text * t + at)) is None:
                continue
            columns = [t2d[i] for i in stored["top_ids"][row, k].tolist()]
            torch.testing.assert_close(logits_W[columns], stored["top_logits"][row, k], rtol=0, atol=1e-4)
            assert int(logits_W.argmax()) == columns[0]
            compared += 1
    assert compared >= 32 * (stored["top_ids"].shape[1] - 1)


FAULTS = {
    "medusa": [("blocks.1.layers.0.weight", lambda t: t.roll(1, 0)), ("blocks.0.layers.0.bias", torch.zeros_like)],
    "hydra": [("lm_heads.2.weight", lambda t: t.roll(1, 0)), ("prefix.input_layernorm.weight", torch.ones_like)],
    "eagle": [("fc.weight", lambda t: t.roll(48, 1)), ("layers.0.post_attention_layernorm.weight", torch.ones_like)],
    "eagle3": [
        ("fc.weight", lambda t: t.roll(48, 1)),
        ("norm.weight", torch.ones_like),
        ("midlayer.hidden_norm.weight", torch.ones_like),
        ("fc_norm.1.weight", torch.ones_like),
        ("midlayer.mlp.down_proj.weight", torch.zeros_like),
    ],
    "draft_model": [
        ("model.norm.weight", torch.ones_like),
        ("model.layers.1.mlp.down_proj.weight", torch.zeros_like),
        ("lm_head.weight", lambda t: t.roll(1, 0)),
    ],
    "pard": [("model.embed_tokens.weight", lambda t: t.roll(1, 0)), ("model.norm.weight", torch.ones_like)],
    "dflash": [
        ("fc.weight", lambda t: t.roll(48, 1)),
        ("norm.weight", torch.ones_like),
        ("hidden_norm.weight", torch.ones_like),
        ("layers.1.self_attn.k_norm.weight", torch.ones_like),
        ("layers.0.mlp.down_proj.weight", torch.zeros_like),
    ],
    "dspark": [
        ("fc.weight", lambda t: t.roll(48, 1)),
        ("markov_head.markov_w1.weight", lambda t: t.roll(1, 0)),
        ("markov_head.joint_proj.bias", torch.zeros_like),
    ],
    "falcon": [("lstm.0.recurrent.weight", torch.zeros_like), ("lstm.1.input.bias", lambda t: t.roll(48))],
    "dual_view": [("mask_embed", lambda t: t.roll(1)), ("layers.2.v_proj.up.weight", torch.zeros_like)],
    "prompt_tokens": [("prompt_embed", lambda t: t.roll(1, 0)), ("prefix_kv", lambda t: t.roll(1, 1))],
    "peagle": [
        ("mask_hidden", lambda t: t.roll(1, 2)),
        ("layers.0.hidden_norm.weight", torch.ones_like),
        ("layers.1.input_layernorm.weight", torch.ones_like),
    ],
}


def test_changed_tensors_are_seen(exported):
    _, drafter, folder = exported
    whole = load_file(folder / WEIGHTS)
    for name, change in FAULTS[drafter.method]:
        change_tensor(folder, name, change)
        with pytest.raises(ValueError, match="does not compute what its trainer did"):
            check_export(CheckConfig(str(folder)))
        save_file(whole, folder / WEIGHTS)
    check_export(CheckConfig(str(folder)))


def test_keys_that_only_engines_read_are_seen(exported):
    _, _, folder = exported
    whole = (folder / "config.json").read_text()
    for change in ({"vocab_size": 256, "architectures": ["Other"]}, {"unknown": 1}):
        (folder / "config.json").write_text(json.dumps(json.loads(whole) | change))
        with pytest.raises(ValueError, match=r"says another head to engines.*(Other|unknown: file 1)"):
            check_export(CheckConfig(str(folder)))


def test_taps_off_by_one_are_seen(target, tmp_path):
    folder = export(make(target, "eagle3"), tmp_path / "x", run=RunFacts(), target=target)
    config = json.loads((folder / "config.json").read_text())
    config["eagle_aux_hidden_state_layer_ids"] = [0, 1, 2]
    config["eagle_config"]["eagle_aux_hidden_state_layer_ids"] = [-1, 0, 1]
    config["draftsmith"]["taps"] = config["draftsmith"]["config"]["taps"] = [0, 1, 2]
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(ValueError, match="does not compute"):
        check_export(CheckConfig(str(folder)))


def test_another_targets_weights_are_seen(exported, tiny, monkeypatch):
    _, drafter, folder = exported
    stranger = tiny(max_positions=512, seed=9)
    monkeypatch.setattr("draftsmith.models.loading.load_target", lambda name, **options: stranger)
    if drafter.draft_needs <= {"ids"}:  # reads the text alone: it computes the same beside any target
        with pytest.warns(UserWarning, match="other weights"):
            assert check_export(CheckConfig(str(folder))).difference < 1e-5
        return
    said = {"peagle": "not the table of"} | dict.fromkeys(("medusa", "dflash", "dspark"), "not the head of")
    words = said.get(drafter.method, "does not compute")
    with pytest.warns(UserWarning, match="other weights"), pytest.raises(ValueError, match=words):
        check_export(CheckConfig(str(folder)))


def test_half_precision_target_and_bf16_check(tiny, tmp_path, monkeypatch):
    target = tiny(max_positions=512, dtype=torch.bfloat16)
    asked = []
    monkeypatch.setattr(
        "draftsmith.models.loading.load_target", lambda name, **options: asked.append(options) or target
    )
    folder = export(make(target, "eagle3"), tmp_path / "x", run=RunFacts(), target=target)
    assert check_export(CheckConfig(str(folder))).difference < 1e-5
    assert asked[0]["dtype"] == "bfloat16"  # as beside the trainer, then widened
    result = check_export(CheckConfig(str(folder), dtype="bfloat16"))
    assert result.agreeing >= 0.98 * result.pairs and result.difference < 0.05


def test_what_can_not_be_checked_is_said(target, tmp_path):
    drafter = make(target, "eagle3")
    bare = export(drafter, tmp_path / "bare", run=RunFacts())
    with pytest.raises(ValueError, match=r"no replay/replay\.safetensors"):
        check_export(CheckConfig(str(bare)))
    folder = export(drafter, tmp_path / "x", run=RunFacts(), target=target)
    with pytest.raises(ValueError, match="float32 or bfloat16"):
        check_export(CheckConfig(str(folder), dtype="int8"))
    with pytest.raises(ValueError, match="check it in float32"):
        check_export(CheckConfig(str(folder), dtype="bfloat16"))
    save_file({"ids": torch.zeros(2, 3, dtype=torch.int64)}, folder / REPLAY)
    with pytest.raises(ValueError, match="no replay of this version"):
        check_export(CheckConfig(str(folder)))


def test_replay_does_not_touch_the_drafter(target):
    drafter = make(target, "eagle3")
    before = {n: t.clone() for n, t in drafter.state_dict().items()}
    make_replay(drafter, target, torch.bfloat16)
    assert all(torch.equal(t, before[n]) for n, t in drafter.state_dict().items())


def test_positions_fit_every_depth(target):
    for depth in (1, 4):
        ids, positions = stored_positions(target, depth)
        assert len(positions) == 32 and int(positions[:, 1].max()) + 1 + depth < ids.shape[1]
        logits = replay(make(target, "eagle"), target, ids, positions, depth)
        assert logits.shape == (32, depth, 256) and logits[..., 1::2].isneginf().all()
