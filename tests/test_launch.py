"""`launch.sh` and the training script as people start them. Run: pytest tests/test_launch.py"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

ROOT = Path(__file__).resolve().parent.parent
QUICK = [
    "train/distill_draft.py",
    "--config",
    "configs/quick.yaml",
    "data.limit=8",
    "evaluate.conversations=2",
    "log.every=1",
]


@pytest.fixture(scope="session")
def checkout(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """This checkout under links, with this interpreter as its `.venv`, marked as set up."""
    root = tmp_path_factory.mktemp("checkout")
    for name in ("train", "configs", "draftsmith", "pyproject.toml"):
        (root / name).symlink_to(ROOT / name)
    (root / "launch.sh").write_bytes((ROOT / "launch.sh").read_bytes())
    (root / "launch.sh").chmod(0o755)
    (root / ".venv").mkdir()
    for name in ("bin", "lib", "pyvenv.cfg"):
        (root / ".venv" / name).symlink_to(Path(sys.prefix) / name)
    digest = subprocess.run(
        ["sha256sum", root / "pyproject.toml"], capture_output=True, text=True, check=True
    ).stdout.split()[0]
    (root / ".venv/.set-up").write_text(digest + "\n")
    return root


def environment(**more: str) -> dict[str, str]:
    kept = {
        k: v for k, v in os.environ.items() if not k.startswith(("ACCELERATE_", "DRAFTSMITH_", "OMP_", "PROCESSES"))
    }
    return kept | {"HF_HUB_OFFLINE": "1"} | more


def launch(checkout: Path, *args: str, **env: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [str(checkout / "launch.sh"), *args],
        env=environment(**env),
        cwd=checkout,
        capture_output=True,
        text=True,
        timeout=900,
    )


def test_help_needs_no_environment(tmp_path: Path) -> None:
    (tmp_path / "launch.sh").write_bytes((ROOT / "launch.sh").read_bytes())
    result = subprocess.run(["bash", str(tmp_path / "launch.sh"), "--help"], capture_output=True, text=True)
    assert result.returncode == 0 and "./launch.sh --quick" in result.stdout and "set -euo" not in result.stdout
    assert not (tmp_path / ".venv").exists()


def test_one_process_says_what_it_chose_and_the_plain_line_does_the_same(checkout: Path, tmp_path: Path) -> None:
    result = launch(checkout, *QUICK, "budget.steps=3", f"run={tmp_path / 'a'}", PROCESSES="1")
    assert result.returncode == 0, result.stderr
    assert "training on one CPU process of 1 thread(s)" in result.stderr
    (line,) = [
        x.strip() for x in result.stderr.splitlines() if "accelerate launch" in x and "train/distill_draft.py" in x
    ]
    assert line.startswith("OMP_NUM_THREADS=1 OMP_WAIT_POLICY=PASSIVE accelerate launch --cpu")
    plain = line.replace(str(tmp_path / "a"), str(tmp_path / "b"))
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    again = subprocess.run(
        ["bash", "-c", plain], env=environment(PATH=path), cwd=checkout, capture_output=True, text=True, timeout=900
    )
    assert again.returncode == 0, again.stderr
    weights = [(tmp_path / x / "export/model.safetensors").read_bytes() for x in "ab"]
    assert weights[0] == weights[1]


def test_two_processes_take_part_and_stop_by_signal_with_143(checkout: Path, tmp_path: Path) -> None:
    """SIGTERM to launch.sh: both processes save within 30 s; the same command goes on."""
    run = tmp_path / "run"
    command = [str(checkout / "launch.sh"), *QUICK, "budget.steps=100000", "evaluate.every=100000", f"run={run}"]
    with (tmp_path / "out").open("w") as out:
        process = subprocess.Popen(command, env=environment(PROCESSES="2"), cwd=checkout, stdout=out, stderr=out)
        end = time.monotonic() + 240
        while time.monotonic() < end and process.poll() is None:
            if (run / "metrics.jsonl").exists() and '"step": 3' in (run / "metrics.jsonl").read_text():
                break
            time.sleep(0.1)
        began = time.monotonic()
        process.send_signal(signal.SIGTERM)
        code = process.wait(timeout=60)
    text = (tmp_path / "out").read_text()
    assert code == 143, text
    assert "training on 2 CPU processes" in text and "saved at step" in text
    assert time.monotonic() - began < 35  # thirty seconds to save, and the launcher's own end
    assert list((run / "checkpoints").glob("step-*/files.json"))


def test_a_killed_process_ends_the_launch_with_one_line_last(checkout: Path, tmp_path: Path) -> None:
    """SIGKILL to one of two: the launcher's noise, then what happened; the folder can be gone on with."""
    run = tmp_path / "run"
    command = [str(checkout / "launch.sh"), *QUICK, "budget.steps=100000", "evaluate.every=100000", f"run={run}"]
    with (tmp_path / "out").open("w") as out:
        process = subprocess.Popen(command, env=environment(PROCESSES="2"), cwd=checkout, stdout=out, stderr=out)
        end = time.monotonic() + 240
        while not ((run / "metrics.jsonl").exists() and '"step": 3' in (run / "metrics.jsonl").read_text()):
            assert time.monotonic() < end and process.poll() is None, (tmp_path / "out").read_text()
            time.sleep(0.1)
        (held,) = (run / ".lock").read_text().split("\n")[:1]
        os.kill(int(held.split()[1]), signal.SIGKILL)  # process 0, as the lock of the run folder says
        code = process.wait(timeout=60)
    lines = (tmp_path / "out").read_text().splitlines()
    assert code not in (0, 143) and lines[-1].startswith("error: a training process died without a word"), lines[-3:]
    assert any("error: another process of this training is gone" in line for line in lines)


def test_mistakes_come_before_the_launcher_and_keep_their_exit_code(checkout: Path, tmp_path: Path) -> None:
    for processes in ("1", "2"):
        result = launch(checkout, *QUICK, "optim.lrr=1", f"run={tmp_path / 'x'}", PROCESSES=processes)
        assert result.returncode == 2 and "nearest valid key: 'optim.lr'" in result.stderr
        assert "Traceback" not in result.stderr and not (tmp_path / "x").exists()
    assert launch(checkout, *QUICK, PROCESSES="many").returncode == 2
    missing = launch(checkout, "train/no_such.py")
    assert missing.returncode == 2 and "train/distill_draft.py" in missing.stderr


def test_an_engine_is_chosen_by_the_recipe_or_the_environment(checkout: Path, tmp_path: Path) -> None:
    """The plain line starts it from its file; one that cannot run here is refused with one line, and so is one that is none."""
    result = launch(checkout, *QUICK, "engine=fsdp2", f"run={tmp_path / 'x'}", PROCESSES="1")
    assert result.returncode == 2, result.stderr
    assert "accelerate launch --config_file configs/accelerate/fsdp2.yaml --num_processes 1 train/distill_draft.py" in (
        result.stderr
    )
    assert result.stderr.splitlines()[-1].startswith("error: FSDP2 needs GPUs: on CPUs accelerate ignores it")
    unknown = launch(checkout, *QUICK, PROCESSES="1", ENGINE="zero4")
    assert unknown.returncode == 2
    assert "ENGINE=zero4: use one of ddp fsdp2 zero1 zero2 zero2_offload zero3" in unknown.stderr
    assert not (tmp_path / "x").exists()


def test_the_demo_path_on_a_tiny_target(checkout: Path, tmp_path: Path) -> None:
    """`--quick`: train, evaluate, check; the report and a complete export are there."""
    run = tmp_path / "run"
    more: dict[str, Any] = {"RUN": str(run)}
    result = launch(checkout, "--quick", "budget.steps=4", "data.limit=8", "evaluate.conversations=2", **more)
    assert result.returncode == 0, result.stderr[-3000:]
    for name in ("report.json", "report.html", "run.yaml", "metrics.jsonl", "export/config.json", "export/README.md"):
        assert (run / name).is_file(), name


def test_commands_pass_through(checkout: Path) -> None:
    result = launch(checkout, "--version")
    assert result.returncode == 0 and result.stdout.strip()


OFFLINE = """
import runpy, socket, sys
def refuse(*args): raise AssertionError(f"network: {args}")
socket.socket.connect = socket.create_connection = socket.getaddrinfo = refuse
sys.argv = sys.argv[1:]
runpy.run_path(sys.argv[0], run_name="__main__")
"""


def test_a_run_is_offline_says_what_it_was_and_leaks_nothing(tmp_path: Path) -> None:
    """No socket is opened; `run.yaml` has settings, versions, data, machine; no secret and no local path gets in."""
    secret = "hf_" + "planted" * 5
    command = [
        sys.executable,
        "-c",
        OFFLINE,
        *QUICK,
        "budget.steps=2",
        f"run={tmp_path / 'run'}",
        f"log.project={secret}",
    ]
    result = subprocess.run(command, env=environment(), cwd=ROOT, capture_output=True, text=True, timeout=900)
    assert result.returncode == 0, result.stderr[-3000:]
    run = tmp_path / "run"
    facts = yaml.safe_load((run / "run.yaml").read_text())
    assert {"command", "config", "versions", "git", "target", "data", "machine", "deterministic"} <= facts.keys()
    assert facts["config"]["seed"] == 0 and facts["versions"]["torch"] == torch.__version__
    assert facts["machine"]["processes"] == 1 and facts["data"]["fingerprint"]
    written = [
        p for p in run.rglob("*") if p.suffix in (".yaml", ".json", ".jsonl", ".md") and "checkpoints" not in p.parts
    ]
    assert len(written) >= 4
    for path in written:
        text = path.read_text()
        assert secret not in text and str(tmp_path) not in text, path.name
