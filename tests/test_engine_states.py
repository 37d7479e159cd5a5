"""States that vLLM extracted, in place of our own passes: the same shards, and refused when they are not what they are
said to be. Run: pytest tests/test_engine_states.py
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from test_capture import contents, some_samples

from draftsmith.data.encode import Sample, encode_all
from draftsmith.data.sources import DataConfig, split_conversations
from draftsmith.inference.capture import capture, run_capture
from draftsmith.inference.capture_config import CaptureConfig
from draftsmith.inference.engine_states import EngineStates
from draftsmith.models.target import Target

TAPS = (1, 2, 3)
LAYERS = (1, 2, 3, 4)  # the tiny target has four


def extracted(target: Target, data: list[Sample], folder: Path, layers: tuple[int, ...] = LAYERS) -> Path:
    """What the engine writes: a file per text, under names that say nothing of ours."""
    folder.mkdir(parents=True)
    for i, s in enumerate(reversed(data)):
        with torch.no_grad():
            out = target.forward(s.ids[None], torch.arange(len(s))[None], taps=sorted(layers))
        assert out.taps_BTPD is not None
        streams_TPD = out.taps_BTPD[0][:, [sorted(layers).index(k) for k in layers]].contiguous()
        save_file({"hidden_states": streams_TPD, "token_ids": s.ids.clone()}, folder / f"hs_{i}.safetensors")
    return folder


@pytest.fixture
def data() -> list[Sample]:
    return some_samples((3, 17, 5, 9, 17))


def test_the_shards_are_those_of_our_own_passes(tiny: Any, data: list[Sample], tmp_path: Path) -> None:
    """One sample per forward, so that the bits are the same; the engine's order of layers is its own."""
    target, order = tiny(), (4, 2, 1, 3)
    engine = EngineStates(
        extracted(target, data, tmp_path / "engine" / "hidden_states", order).parent, order, target, data
    )
    capture(target, data, tmp_path / "own", TAPS, True, 1, False, stored="float32")
    capture(target, data, tmp_path / "taken", TAPS, True, 1, False, stored="float32", engine=engine)
    assert contents(tmp_path / "taken") == contents(tmp_path / "own")
    with pytest.raises(ValueError, match=r"taps \[0\] are not among the engine's layers \[4, 2, 1, 3\]"):
        capture(target, data, tmp_path / "more", (0, 1), True, 64, False, engine=engine)


def test_layers_are_named_by_the_stream_that_enters_them(tiny: Any, data: list[Sample], tmp_path: Path) -> None:
    target = tiny()
    folder = extracted(target, data, tmp_path / "engine", (1, 2, 4))
    with pytest.raises(ValueError, match=r"layer 3, number 2 of the file, looks like h\[2\] .*: check engine_layers"):
        EngineStates(folder, (1, 3, 4), target, data)
    with pytest.raises(ValueError, match=r"the teacher needs 4, the stream before the final norm"):
        EngineStates(folder, (1, 2, 3), target, data)
    for wrong in ((1, 1, 4), (1, 5, 4), (-1, 2, 4)):
        with pytest.raises(ValueError, match="give distinct ids between 0 and 4"):
            EngineStates(folder, wrong, target, data)
    with pytest.raises(ValueError, match=r"hidden_states \[\d+, 3, 48\], expected \[\d+, 4, 48\]"):
        EngineStates(folder, (1, 2, 3, 4), target, data)


def test_states_of_another_model_text_or_precision_are_refused(tiny: Any, data: list[Sample], tmp_path: Path) -> None:
    target = tiny()
    folder = extracted(target, data, tmp_path / "engine")
    with pytest.raises(ValueError, match=r"engine: (layer|h\[)"):
        EngineStates(folder, LAYERS, tiny(seed=1), data)
    with pytest.raises(
        ValueError, match="hidden_states are float32, the target is loaded in bfloat16: give the engine's"
    ):
        EngineStates(folder, LAYERS, tiny(dtype=torch.bfloat16), data)
    other = [*data, Sample(77, data[1].ids + 1, data[1].supervised)]
    with pytest.raises(
        ValueError, match=r"no states of 1 of 6 samples \(sample 77 first\) under these token ids, in 5 files"
    ):
        EngineStates(folder, LAYERS, target, other)
    tensors = {"hidden_states": torch.zeros(3, 4, 48, dtype=torch.float8_e4m3fn), "token_ids": data[0].ids.clone()}
    save_file(tensors, folder / "hs_4.safetensors")
    with pytest.raises(ValueError, match="are float8_e4m3fn; bfloat16, float16, float32 can be read"):
        EngineStates(folder, LAYERS, target, data)


def test_broken_and_foreign_files_are_refused(tiny: Any, data: list[Sample], tmp_path: Path) -> None:
    target = tiny()
    with pytest.raises(ValueError, match="no folder with safetensors files of states"):
        EngineStates(tmp_path / "none", LAYERS, target, data)
    (tmp_path / "old").mkdir()
    (tmp_path / "old" / "data_0.pt").write_bytes(b"\x80\x04N.")
    with pytest.raises(ValueError, match=r"old/data_0\.pt: states in torch files are not read"):
        EngineStates(tmp_path / "old", LAYERS, target, data)
    folder = extracted(target, data, tmp_path / "engine")
    path = folder / "hs_2.safetensors"
    path.write_bytes(path.read_bytes()[:60])
    with pytest.raises(ValueError, match=r"hs_2\.safetensors: token_ids cannot be read"):
        EngineStates(folder, LAYERS, target, data)


def test_the_command_takes_training_and_held_out_samples(tiny: Any, tmp_path: Path) -> None:
    target, data = tiny(), DataConfig(limit=3, max_length=512)
    train, held = (encode_all(talks, target.tokenizer, 512)[0] for talks in split_conversations(data, 2))
    config = CaptureConfig(
        out=str(tmp_path / "taken"), target="tiny", dtype="float32", data=data, taps=TAPS, heldout=2, batch_tokens=1,
        stored="float32", last_stored="float32", engine=str(extracted(target, train, tmp_path / "part")),
        engine_layers=LAYERS,
    )  # fmt: skip
    with pytest.raises(ValueError, match=r"held-out samples: part has no states of 2 of 2 samples .* give heldout=0"):
        run_capture(config)
    assert not (tmp_path / "taken").exists()
    run_capture(replace(config, heldout=0, out=str(tmp_path / "some")))
    run_capture(replace(config, engine=str(extracted(target, [*train, *held], tmp_path / "all"))))
    run_capture(replace(config, engine=None, engine_layers=(), out=str(tmp_path / "own")))
    for split in ("train", "heldout"):
        assert contents(tmp_path / "taken" / split) == contents(tmp_path / "own" / split)
    assert contents(tmp_path / "some/train") == contents(tmp_path / "own/train")
    assert not (tmp_path / "some/heldout").exists()


def test_a_folder_without_its_layers_is_refused() -> None:
    with pytest.raises(ValueError, match="engine and engine_layers go together"):
        CaptureConfig(out="x", engine="folder")
    with pytest.raises(ValueError, match="engine and engine_layers go together"):
        CaptureConfig(out="x", engine_layers=(1, 2))
