"""`draftsmith push` against a fake Hub, and loading back what was pushed (PROMISES 23, 24).

Run: pytest tests/test_push.py
"""

from __future__ import annotations

import json
import subprocess
import sys

import pytest
import torch

from draftsmith.inference.export import RunFacts, export
from draftsmith.inference.exporters import EXPORTERS
from draftsmith.inference.push import FILES, PushConfig, refuse_misleading_name, run_push, stage
from draftsmith.models import METHODS

TOKEN = "hf_PlantedPlantedPlantedPlantedPlant"
PUSH = """
import sys
from draftsmith.inference.push import PushConfig, run_push
for repo in sys.argv[2:]:
    try:
        run_push(PushConfig(sys.argv[1], repo))
    except ValueError as error:
        print("refused:", error)
"""
LOAD = """
import sys
from draftsmith.inference.load import load_drafter, read_export_config
from draftsmith.models.pretrained import tiny_target
name = sys.argv[1]
drafter = load_drafter(name, tiny_target(max_positions=512), revision="main")
print(read_export_config(name)["draftsmith"]["method"], sum(p.double().sum().item() for p in drafter.parameters()))
"""


def run(program, hub, *arguments, **environment):
    return subprocess.run(
        [sys.executable, "-c", program, *arguments],
        env=hub.environment | environment,
        capture_output=True,
        text=True,
        timeout=600,
    )


@pytest.fixture
def make_export(tiny, tmp_path):
    def make(method="eagle3", **facts):
        target = tiny(max_positions=512)
        torch.manual_seed(0)
        drafter = METHODS[method](METHODS[method].Config(), target.facts)
        drafter.init_from_target(target)
        with torch.no_grad():
            for p in drafter.parameters():
                p.copy_(p.bfloat16().float())
        return export(drafter, tmp_path / method, run=RunFacts(**facts), target=target), drafter

    return make


def test_pushed_export_holds_what_belongs_to_it_and_loads_back(make_export, fake_hub, tmp_path):
    folder, drafter = make_export()
    (folder / "notes.txt").write_text("mine alone")
    (folder / "optimizer.pt").write_bytes(b"x")
    pushed = run(PUSH, fake_hub, str(folder), "jane/head", HF_TOKEN=TOKEN)
    assert pushed.returncode == 0, pushed.stderr
    assert "pushed to" in pushed.stdout and TOKEN not in pushed.stdout + pushed.stderr
    sent = fake_hub.files["jane/head"]
    assert set(sent) - {".gitattributes"} <= set(FILES) and {"config.json", "model.safetensors", "README.md"} <= set(
        sent
    )
    assert sent["model.safetensors"] == (folder / "model.safetensors").read_bytes()
    assert '"model": "jane/head"' in sent["README.md"].decode()  # the card names the repository
    assert "jane/head" not in (folder / "README.md").read_text()
    assert not any(TOKEN.encode() in raw for raw in sent.values())
    assert any(TOKEN in h.get("authorization", h.get("Authorization", "")) for _, _, h, _ in fake_hub.requests)
    home = {"HF_HOME": str(tmp_path / "home")}
    loaded = run(LOAD, fake_hub, "jane/head", **home)
    assert loaded.returncode == 0, loaded.stderr
    method, total = loaded.stdout.split()
    assert method == "eagle3" and float(total) == pytest.approx(
        sum(p.double().sum().item() for p in drafter.parameters())
    )
    fetched = [p for m, p, _, _ in fake_hub.requests if m == "GET" and "/resolve/" in p]
    assert fetched and all(fake_hub.commit in p for p in fetched)  # downloads are pinned to a commit
    fake_hub.requests.clear()
    offline = run(LOAD, fake_hub, "jane/head", HF_HUB_OFFLINE="1", **home)
    assert offline.returncode == 0 and not fake_hub.requests, offline.stderr


@pytest.mark.parametrize("method", EXPORTERS)
def test_every_form_can_be_staged(method, make_export, tmp_path):
    folder, _ = make_export(method)
    (tmp_path / "stage").mkdir()
    sent = {p.as_posix() for p in stage(folder, "jane/some-head", tmp_path / "stage")}
    assert sent == {"config.json", "model.safetensors", "README.md", "run.yaml", "replay/replay.safetensors"}


def test_refusals_of_the_hub_are_one_line_each(make_export, fake_hub):
    folder, _ = make_export()
    fake_hub.refuse = {"jane/a": 401, "jane/b": 403, "jane/c": 500}
    done = run(
        PUSH, fake_hub, str(folder), "jane/a", "jane/b", "jane/c", HF_TOKEN=TOKEN, HF_HUB_DISABLE_PROGRESS_BARS="1"
    )
    lines = done.stdout.splitlines()
    assert done.returncode == 0 and len(lines) == 3 and all(line.startswith("refused: ") for line in lines), done
    assert "hf auth login" in lines[0] and "may write" in lines[1] and "status 500" in lines[2]
    assert TOKEN not in done.stdout + done.stderr


def test_unreachable_and_offline(make_export, fake_hub):
    folder, _ = make_export()
    offline = run(PUSH, fake_hub, str(folder), "jane/head", HF_HUB_OFFLINE="1", HF_TOKEN=TOKEN)
    assert "HF_HUB_OFFLINE is set" in offline.stdout and not fake_hub.requests
    gone = run(PUSH, fake_hub, str(folder), "jane/head", HF_ENDPOINT="http://127.0.0.1:9", HF_TOKEN=TOKEN)
    assert gone.stdout.startswith("refused: ") and "not reachable" in gone.stdout


@pytest.mark.parametrize("file", ["README.md", "run.yaml", "config.json", "report.html"])
def test_a_planted_token_is_never_sent(file, make_export, tmp_path):
    folder, _ = make_export()
    if file == "config.json":
        config = json.loads((folder / file).read_text())
        (folder / file).write_text(json.dumps(config | {"note": TOKEN}))
    else:
        with (folder / file).open("a") as out:
            out.write(f"\nnote: {TOKEN} and /home/jane/private/x.txt\n")
    (tmp_path / "stage").mkdir()
    if file == "README.md":  # written anew from the folder's facts
        stage(folder, "jane/head", tmp_path / "stage")
        assert TOKEN not in (tmp_path / "stage" / file).read_text()
    else:
        with pytest.raises(ValueError, match="a secret") as refusal:
            stage(folder, "jane/head", tmp_path / "stage")
        assert TOKEN not in str(refusal.value)


def test_damaged_export_and_bad_names_are_refused(make_export):
    folder, _ = make_export()
    for repo in ("head", "a/b/c", "../x", "jane/../../x", ""):
        with pytest.raises(ValueError, match="user/name"):
            run_push(PushConfig(str(folder), repo))
    raw = bytearray((folder / "model.safetensors").read_bytes())
    raw[-3] ^= 1
    (folder / "model.safetensors").write_bytes(raw)
    with pytest.raises(ValueError, match="sha256"):
        run_push(PushConfig(str(folder), "jane/head"))


def test_method_words_in_a_medusa_name_mislead_an_engine():
    for name in ("jane/eagle3-medusa", "jane/medusa-dflash", "jane/Eagle-like"):
        with pytest.raises(ValueError, match="another method"):
            refuse_misleading_name(name, "medusa")
    refuse_misleading_name("jane/medusa-smollm2", "medusa")
    refuse_misleading_name("jane/smollm2-eagle3", "eagle3")
