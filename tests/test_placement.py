"""Where the frozen target is: sharded over processes, on other devices, absent, rounded; the same states and the same
training, or a refusal by name. Run: pytest tests/test_placement.py (two launches of two processes)."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers.modeling_utils
import yaml
from safetensors.torch import load_file, save_file

from draftsmith.cli import main as cli
from draftsmith.configs.diffusion import DiffusionConfig
from draftsmith.configs.training import (
    OptimConfig,
    StatesConfig,
    TargetConfig,
    TrainConfig,
    check_placement,
    refuse_placed,
)
from draftsmith.data.encode import Sample
from draftsmith.inference.capture import capture, state_fields
from draftsmith.models import METHODS
from draftsmith.models.loading import load_target
from draftsmith.models.piecewise import load_placed, refuse_other_states
from draftsmith.models.placement import Placed, bytes_here, run_on, share_of_devices, spread, together
from draftsmith.models.pretrained import tiny_target
from draftsmith.models.target import Target
from draftsmith.train import distill_draft, engine, fsdp

ROOT = Path(__file__).resolve().parent.parent
CPU = torch.device("cpu")
FAMILIES = {
    "llama": {},
    "qwen3": {"tied": True},
    "gemma3_text": {"tied": True, "window": 4},
    "phi3": {},
    "olmo2": {},
}


PLACED = [
    "--config=configs/quick.yaml", "data.limit=24", "evaluate.conversations=3", "evaluate.every=2", "budget.steps=3",
    "log.every=1", "log.progress=false", "batch.rows=2", "save.steps=2",
]  # fmt: skip


def environment(**more: str) -> dict[str, str]:
    kept = {k: v for k, v in os.environ.items() if not k.startswith(("ACCELERATE_", "DRAFTSMITH_"))}
    return kept | {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "ACCELERATE_USE_CPU": "true"} | more


def torchrun(*args: str, **env: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "torch.distributed.run", *args]
    return subprocess.Popen(
        command, env=environment(**env), cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )


@pytest.fixture(scope="session")
def two(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The end of one launch of two processes."""
    out = tmp_path_factory.mktemp("placement")
    launched = torchrun("--standalone", "--nproc_per_node", "2", "tests/placement_worker.py", str(out), *PLACED)
    said, _ = launched.communicate(timeout=600)
    assert launched.returncode == 0, said[-4000:]
    return out


def facts(folder: Path, rank: int) -> dict[str, Any]:
    return dict(json.loads((folder / f"rank{rank}.json").read_text()))


# Sharded: two processes


@pytest.mark.parametrize("rank", [0, 1])
def test_a_sharded_target_gives_the_states_of_a_whole_one(two: Path, rank: int) -> None:
    """States, teacher logits (B27), loss, and the gradients of methods that train through the layers: fp32 1e-5."""
    found = facts(two, rank)
    assert found["same_facts"] and found["trained"] == 0
    assert max(found[name] for name in ("eagle3", "prompt_tokens", "dual_view", "uneven")) < 1e-5


def test_each_process_keeps_its_part_of_the_layers(two: Path) -> None:
    (mine, whole), (other, _) = facts(two, 0)["layers"], facts(two, 1)["layers"]
    assert mine + other == whole and abs(mine - whole / 2) <= 0.01 * whole
    ends, whole_ends = facts(two, 0)["ends"]
    assert ends == whole_ends


@pytest.mark.parametrize("run", ["sharded", "live"])
def test_a_run_with_a_sharded_target_is_that_with_a_whole_one(two: Path, run: str) -> None:
    """Uneven capture, held-out figures and the probe (one process alone decodes) included. Live states are not rounded to
    bf16, so those runs are near and no more."""
    assert facts(two, 0)["codes"] == {"whole": 0, "sharded": 0, "live": 0}
    want, got = (load_file(two / name / "export/model.safetensors") for name in ("whole", run))
    assert {n: t.shape for n, t in want.items()} == {n: t.shape for n, t in got.items()}
    assert all(t.numel() for t in got.values())
    for name, value in want.items():
        torch.testing.assert_close(got[name].float(), value.float(), atol=1e-5 if run == "sharded" else 1e-2, rtol=0)
    logs = [(two / name / "metrics.jsonl").read_text().splitlines() for name in ("whole", run)]
    want_figures, got_figures = ([json.loads(line) for line in log if '"probe"' in line][-1] for log in logs)
    assert want_figures["verifies"] == got_figures["verifies"]


def test_what_is_exported_names_the_target(two: Path) -> None:
    want, got = (json.loads((two / name / "export/config.json").read_text()) for name in ("whole", "sharded"))
    assert got["draftsmith"]["target"] == want["draftsmith"]["target"]
    assert yaml.safe_load((two / "sharded/run.yaml").read_text())["machine"]["processes"] == 2


def test_two_machines(two: Path, tmp_path: Path) -> None:
    """Two launches by torchrun that find each other over the loopback: the run of two processes, bit for bit."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = str(probe.getsockname()[1])
    script = ["train/distill_draft.py", *PLACED, f"run={tmp_path / 'run'}", "target.placement=sharded", "processes=2"]
    both = [
        torchrun(
            "--nnodes=2", f"--node_rank={rank}", "--nproc_per_node=1", "--master_addr=127.0.0.1", f"--master_port={port}",
            *script, DRAFTSMITH_PROCESSES="2",
        )
        for rank in (0, 1)
    ]  # fmt: skip
    said = [launched.communicate(timeout=300)[0] for launched in both]
    assert [launched.returncode for launched in both] == [0, 0], said[0][-2000:] + said[1][-2000:]
    assert "sharded: 0.3 MiB in this process" in said[0] and "sharded" not in said[1]
    want, got = (r / "export/model.safetensors" for r in (two / "sharded", tmp_path / "run"))
    assert want.read_bytes() == got.read_bytes()


@pytest.mark.parametrize("name", ["torchrun", "accelerate"])
def test_slurm_scripts_say_what_they_start(name: str, tmp_path: Path) -> None:
    """With stand-ins for SLURM and the launcher: two machines of four, each with its rank, and the script's own arguments."""
    stub = {
        "scontrol": 'printf "first\nsecond\n"',
        "srun": 'for SLURM_NODEID in 0 1; do export SLURM_NODEID; "${@:2}"; done',
        name: f'echo "{name} $*; $DRAFTSMITH_PROCESSES ${{ACCELERATE_DEEPSPEED_CONFIG_FILE:-}}"',
    }
    for file, body in stub.items():
        (tmp_path / file).write_text(f"#!/usr/bin/env bash\n{body}\n")
        (tmp_path / file).chmod(0o755)
    slurm = {
        "SLURM_SUBMIT_DIR": str(tmp_path),
        "SLURM_NNODES": "2",
        "SLURM_JOB_NODELIST": "x",
        "SLURM_GPUS_ON_NODE": "4",
    }
    path = f"{tmp_path}{os.pathsep}{os.environ['PATH']}"
    run = ["bash", str(ROOT / f"configs/slurm/{name}.sbatch"), "train/distill_draft.py", "run=a b"]
    result = subprocess.run(run, env=environment(PATH=path, ENGINE="zero3", **slurm), capture_output=True, text=True)
    lines = result.stdout.splitlines()
    assert result.returncode == 0 and len(lines) == 2, result.stderr
    for rank, line in enumerate(lines):
        where = {
            "torchrun": f"--nnodes 2 --node_rank {rank} --nproc_per_node 4 --master_addr first --master_port 29500",
            "accelerate": f"--num_machines 2 --machine_rank {rank} --num_processes 8 --main_process_ip first",
        }[name]
        assert where in line and "train/distill_draft.py run=a b; 8" in line and "zero3" in line
    other = subprocess.run(run, env=environment(PATH=path, ENGINE="zro", **slurm), capture_output=True, text=True)
    assert name == "accelerate" or (other.returncode == 2 and "ENGINE=zro: use ddp" in other.stderr)


# FSDP2: what accelerate starts on GPUs, by torch's own `fully_shard` on two CPU processes

CUT = ("eagle3", "hydra", "draft_model", "dual_view")


@pytest.mark.parametrize("method", CUT)
def test_a_drafter_that_is_cut_trains_as_under_ddp(two: Path, method: str) -> None:
    """Weights, and moments of the checkpoint; every process holds the whole at the end, and half of it before."""
    want, got, other = (
        load_file(two / name / method / f"rank{rank}.safetensors")
        for name, rank in (("ddp", 0), ("fsdp", 0), ("fsdp", 1))
    )
    moments = [load_file(two / e / method / "checkpoints/step-00000004/optimiser.safetensors") for e in ("ddp", "fsdp")]
    for mine, theirs in ((want, got), (got, other), moments):
        assert mine.keys() == theirs.keys()
        for name, value in mine.items():
            torch.testing.assert_close(theirs[name], value, atol=1e-6, rtol=0)
    heldout = [json.loads((two / engine / method / "rank0.json").read_text())["heldout"] for engine in ("ddp", "fsdp")]
    assert heldout[1] == pytest.approx(heldout[0], rel=1e-4, abs=1e-6)
    half, all_ = facts(two, 0)["cut"]["bytes"][CUT.index(method)]
    assert abs(half - all_ / 2) <= 0.01 * all_


def test_a_cut_run_goes_on_exactly(two: Path) -> None:
    """Stopped after two of four steps, by another launch, bit for bit."""
    want, got = (load_file(two / name / "eagle3/rank0.safetensors") for name in ("fsdp", "halves"))
    assert all(torch.equal(got[n], t) for n, t in want.items())


def test_fsdp_is_refused_where_it_would_be_ignored(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ACCELERATE_USE_FSDP", "true")
    monkeypatch.setenv("FSDP_VERSION", "2")
    with pytest.raises(ValueError, match="FSDP2 needs GPUs: on CPUs accelerate ignores it"):
        engine.start(config_of("medusa"))
    with pytest.raises(ValueError, match="method block_diffusion trains weights inside the target"):
        engine.start(DiffusionConfig())
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    with pytest.raises(ValueError, match="its update needs whole matrices"):
        fsdp.refuse_unless_possible(replace(config_of("medusa"), optim=OptimConfig(name="muon")))
    monkeypatch.setenv("FSDP_VERSION", "1")
    with pytest.raises(ValueError, match="FSDP of version 1"):
        fsdp.refuse_unless_possible(config_of("medusa"))


def test_the_shipped_file_is_read_as_fsdp2() -> None:
    shipped = yaml.safe_load((ROOT / "configs/accelerate/fsdp2.yaml").read_text())
    assert shipped["distributed_type"] == "FSDP" and shipped["fsdp_config"]["fsdp_version"] == 2
    assert shipped["fsdp_config"]["fsdp_cpu_ram_efficient_loading"] is False


def test_under_fsdp_transformers_is_told_to_load_everywhere(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """B27: by default accelerate's launcher asks for weights in one process of a machine alone, which frozen targets would
    be left without in the others."""
    monkeypatch.setenv("ACCELERATE_USE_FSDP", "true")
    monkeypatch.setenv("FSDP_CPU_RAM_EFFICIENT_LOADING", "true")
    torch.distributed.init_process_group("gloo", init_method=f"file://{tmp_path / 'store'}", rank=0, world_size=1)
    try:
        assert transformers.modeling_utils.is_fsdp_enabled()  # what it asks before it loads
        fsdp.load_models_whole()
        assert not transformers.modeling_utils.is_fsdp_enabled()
    finally:
        torch.distributed.destroy_process_group()


# Loaded by the piece: one process


@pytest.fixture(scope="session")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Saved models, the second in several files."""
    made = {}
    for name, options in FAMILIES.items():
        target, folder = tiny_target(family=name, seed=1, **options), tmp_path_factory.mktemp(name)
        target.model.save_pretrained(folder, max_shard_size="100KB" if name == "qwen3" else "1GB")
        target.tokenizer.save_pretrained(folder)
        made[name] = folder
    return made


@pytest.mark.parametrize("family", FAMILIES)
def test_layers_on_other_devices(family: str, folders: dict[str, Path]) -> None:
    whole = load_target(str(folders[family]), dtype="float32")
    away = load_placed(str(folders[family]), "devices", dtype="float32", devices=[CPU, CPU])
    assert away.facts == whole.facts and away.runner == "hf" and bytes_here(away) == bytes_here(whole)
    ids_BT = torch.arange(3, 23).view(2, 10)
    positions_BT = torch.arange(10).expand(2, 10)
    for cached in (False, True):
        want, got = (
            t.forward(ids_BT, positions_BT, taps=(0, 2, 4), cache=t.new_cache(2, 12) if cached else None)
            for t in (load_target(str(folders[family]), dtype="float32", runner="hf"), away)
        )
        assert want.taps_BTPD is not None and got.taps_BTPD is not None
        torch.testing.assert_close(got.taps_BTPD, want.taps_BTPD, atol=1e-6, rtol=1e-5)
        torch.testing.assert_close(
            away.head(got.last_hidden_BTD), whole.head(want.last_hidden_BTD), atol=1e-5, rtol=1e-5
        )


def test_tensors_follow_a_layer_to_its_device() -> None:
    """`meta` is the second device that every machine has: where a layer's input is, says whether it followed."""
    target, meta = tiny_target(), torch.device("meta")
    seen: list[Any] = []
    last = target.layers[-1].to(meta)
    target.norm.to(meta)
    run_on(last, meta)
    last.register_forward_pre_hook(
        lambda _, args, kwargs: seen.extend([args, kwargs["attention_mask"], *kwargs["position_embeddings"]]),
        with_kwargs=True,
    )
    states = target.forward(torch.ones(1, 4, dtype=torch.int64), torch.arange(4)[None], taps=(2,))
    assert [x.device for x in (*seen[0], *seen[1:])] == [meta] * 4
    assert states.last_hidden_BTD.device == meta and states.taps_BTPD is not None and states.taps_BTPD.device == CPU


def test_devices_are_shared_out() -> None:
    assert spread(5, [CPU, torch.device("meta")]) == [CPU] * 3 + [torch.device("meta")] * 2
    assert [str(d) for d in share_of_devices(("1", "cuda:3"), 0, 1)] == ["cuda:1", "cuda:3"]
    assert [str(d) for d in share_of_devices(("4", "5", "6", "7"), 1, 2)] == ["cuda:6", "cuda:7"]
    with pytest.raises(ValueError, match="names 3 devices for 2 processes"):
        share_of_devices(("1", "2", "3"), 0, 2)
    with pytest.raises(ValueError, match=r"target.devices=.'gpu'"):
        share_of_devices(("gpu",), 0, 1)


@pytest.mark.parametrize("family", FAMILIES)
def test_an_absent_target_is_its_ends(family: str, folders: dict[str, Path]) -> None:
    whole = load_target(str(folders[family]), dtype="float32")
    ends = load_placed(str(folders[family]), "absent", dtype="float32", known_by=whole.facts.fingerprint)
    assert ends.facts == whole.facts
    assert bytes_here(ends) == bytes_here(whole) - sum(map(bytes_here, whole.layers))
    hidden = torch.randn(3, whole.facts.width)
    assert torch.equal(ends.head(hidden), whole.head(hidden))
    assert torch.equal(ends.embed(torch.arange(9)), whole.embed(torch.arange(9)))
    assert torch.equal(ends.norm(hidden), whole.norm(hidden))
    with pytest.raises(ValueError, match="without its layers"):
        ends.forward(torch.ones(1, 2, dtype=torch.int64), torch.arange(2)[None])


def test_files_that_do_not_fit_are_refused(folders: dict[str, Path], tmp_path: Path) -> None:
    def broken(change: Any) -> Path:
        folder = tmp_path / change.__name__
        folder.mkdir()
        for file in folders["llama"].iterdir():
            (folder / file.name).write_bytes(file.read_bytes())
        tensors = load_file(folder / "model.safetensors")
        change(tensors)
        save_file(tensors, folder / "model.safetensors", {"format": "pt"})
        return folder

    def missing(tensors: dict[str, torch.Tensor]) -> None:
        del tensors["model.layers.2.mlp.up_proj.weight"]

    def unexpected(tensors: dict[str, torch.Tensor]) -> None:
        tensors["model.layers.9.mlp.up_proj.weight"] = torch.zeros(2)

    def shape(tensors: dict[str, torch.Tensor]) -> None:
        tensors["model.layers.2.mlp.up_proj.weight"] = torch.zeros(2, 2)

    def infinite(tensors: dict[str, torch.Tensor]) -> None:
        tensors["model.norm.weight"][3] = float("inf")

    for change, said in (
        (missing, "1 missing keys: model.layers.2.mlp.up_proj.weight"),
        (unexpected, "1 unexpected keys: model.layers.9"),
        (shape, "up_proj.weight is .2, 2., its config.json says .96, 48."),
        (infinite, "model.norm.weight holds NaN or infinity"),
    ):
        with pytest.raises(ValueError, match=said):
            load_placed(str(broken(change)), "devices", dtype="float32", devices=[CPU])


# Absent: whole runs


QUICK = [
    "--config=configs/quick.yaml", "data.limit=24", "evaluate.conversations=2", "evaluate.every=2", "budget.steps=3",
    "log.progress=false", "batch.rows=2",
]  # fmt: skip


@pytest.fixture(scope="session")
def captured(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run that captured, with the target whole."""
    run = tmp_path_factory.mktemp("captured") / "run"
    assert distill_draft.main([*QUICK, f"run={run}"]) == 0
    return run


def test_training_without_the_target(captured: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The same drafter bit for bit, exported for the same target; a resumed run may change the placement."""
    args = [*QUICK, f"run={tmp_path / 'run'}", f"states.folder={captured / 'states'}"]
    assert distill_draft.main([*args, "target.placement=absent", "budget.stop_at=2"]) == 0
    assert "no probe" in capsys.readouterr().out
    assert distill_draft.main([*args, "target.placement=absent"]) == 0
    assert (tmp_path / "run/export/model.safetensors").read_bytes() == (
        captured / "export/model.safetensors"
    ).read_bytes()
    want, got = (json.loads((r / "export/config.json").read_text()) for r in (captured, tmp_path / "run"))
    assert got["draftsmith"]["target"] == want["draftsmith"]["target"]
    assert not (tmp_path / "run/export/replay").exists()
    assert distill_draft.main(args) == 0  # nothing left to train: the export is made again, with its replay
    assert (tmp_path / "run/export/replay").exists()


TRAINED = [
    "target.name=tiny", "target.dtype=float32", "target.placement=absent", "data.max_length=512", "batch.row_length=512",
    "batch.rows=2", "budget.steps=2", "precision=fp32", "log.progress=false", "evaluate.probe_prompts=0",
]  # fmt: skip


@pytest.fixture(scope="module", params=["shipped", "own"])
def kept(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[str, list[str]]:
    """What `draftsmith capture` leaves: the folder, and which data it is of."""
    folder, data = tmp_path_factory.mktemp(request.param), ["data.limit=24"]
    if request.param == "own":
        talks = [
            {"messages": [{"role": "user", "content": f"Say {i}"}, {"role": "assistant", "content": f"{i} it is" * 3}]}
            for i in range(25)
        ]
        (folder / "mine.jsonl").write_text("".join(json.dumps(t) + "\n" for t in talks))
        data = [f"data.source={folder / 'mine.jsonl'}"]
    command = ["capture", "target=tiny", "dtype=float32", f"out={folder / 'states'}", "data.max_length=512", *data]
    assert cli([*command, "top_k=64"]) == 0
    return str(folder / "states"), data


@pytest.mark.parametrize("method", ["eagle3", "medusa"])
def test_what_the_command_captured_is_trained_on(method: str, kept: tuple[str, list[str]], tmp_path: Path) -> None:
    """Without the target; and the heads are those of a training that captured for itself."""
    args = [f"method={method}", *TRAINED, *kept[1]]
    assert distill_draft.main([*args, f"states.folder={kept[0]}", f"run={tmp_path / 'a'}"]) == 0
    logged = [json.loads(line) for line in (tmp_path / "a/metrics.jsonl").read_text().splitlines()]
    assert "heldout" in {line["kind"] for line in logged}
    assert distill_draft.main([*args, "target.placement=replicated", f"run={tmp_path / 'b'}"]) == 0
    a, b = (load_file(tmp_path / run / "export/model.safetensors") for run in "ab")
    assert a.keys() == b.keys() and all(torch.equal(a[k], b[k]) for k in a)


def test_a_training_that_holds_out_others_is_refused_with_both_numbers(
    kept: tuple[str, list[str]], tmp_path: Path
) -> None:
    """Of the shipped set a few less are the same ones, from the front."""
    own = "data.source" in kept[1][0]
    args = ["method=medusa", *TRAINED, *kept[1], f"states.folder={kept[0]}", f"run={tmp_path / 'run'}"]
    for asked, there, here in ((2, 3, 2), (0, 3, 0)) if own else ((24, 48, 24), (60, 48, 60)):
        with pytest.raises(
            ValueError,
            match=rf"another data.*; the capture held out {there} samples, evaluate\.conversations={asked} holds out {here}: "
            rf"capture with --heldout {asked}",
        ):
            distill_draft.main([*args, f"evaluate.conversations={asked}"])
    assert distill_draft.main([*args, f"evaluate.conversations={1000 if own else 47}"]) == 0


def test_states_of_another_target_are_refused(captured: Path, tmp_path: Path) -> None:
    """A head that does not belong to the states, although they say its fingerprint."""
    other, ours = tiny_target(seed=3), tiny_target()
    samples = [Sample(i, torch.arange(40 + i) % 200, torch.arange(40 + i) >= 5) for i in range(4)]
    store = capture(ours, samples, tmp_path / "states", (2,), progress=False)
    refuse_other_states(ours, store, samples)
    with pytest.raises(ValueError, match="states of another target"):
        refuse_other_states(other, store, samples)


def test_absent_without_states_says_where_they_are_looked_for(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"reads states captured before.*states.folder"):
        distill_draft.main([*QUICK, f"run={tmp_path / 'run'}", "target.placement=absent"])
    assert not (tmp_path / "run").exists()


# Refused by name


def config_of(method: str, drafter: Any = None, states: str = "captured", **target: Any) -> TrainConfig:
    settings = METHODS[method].Config() if drafter is None else drafter
    return TrainConfig(
        method,
        TargetConfig(**target),
        drafter=settings,
        states=StatesConfig(source=states),  # type: ignore[arg-type]
    )


@pytest.mark.parametrize("method", sorted(METHODS))
def test_methods_without_a_target(method: str) -> None:
    """All that need no pass of their own may do without layers; the others are refused with what they need."""
    needs = METHODS[method].loss_needs
    config = config_of(method, placement="absent")
    starts = getattr(getattr(config.drafter, "lm", None), "start", None) == "layers"
    if {"module", "kv"} & needs or needs <= {"ids"} or starts:
        with pytest.raises(ValueError, match=r"target.placement=absent"):
            check_placement(config, needs)
    else:
        check_placement(config, needs)


def test_other_refusals() -> None:
    with pytest.raises(ValueError, match=r"states.source=live"):
        check_placement(config_of("eagle3", states="live", placement="absent"), METHODS["eagle3"].loss_needs)
    started = replace(METHODS["eagle3"].Config(), mlp_from_target=True)
    for placed in ({"placement": "sharded"}, {"placement": "absent"}, {"quantize": "int8_weight"}):
        with pytest.raises(ValueError, match="mlp_from_target=true copies layers of the target, and target"):
            check_placement(config_of("eagle3", started, **placed), METHODS["eagle3"].loss_needs)
    with pytest.raises(ValueError, match="placement=devices needs them"):
        TargetConfig(placement="devices")
    with pytest.raises(ValueError, match="no other takes them"):
        TargetConfig(devices=("1",))
    with pytest.raises(ValueError, match="rounded weights are loaded whole"):
        TargetConfig(placement="sharded", quantize="nf4")
    with pytest.raises(ValueError, match="different number of times"):
        refuse_placed(TargetConfig(placement="sharded"))
    with pytest.raises(ValueError, match="here the key is quantize"):
        refuse_placed(TargetConfig(quantize="nf4"))
    with pytest.raises(ValueError, match="one takes part: start several"):
        load_placed("tiny", "sharded")


def test_rounded_states_are_not_those_of_the_whole_target(target: Target) -> None:
    samples = [Sample(0, torch.arange(9), torch.arange(9) >= 3)]
    plain = state_fields(target, samples, (1,), True)
    target.quantized = "nf4"
    try:
        rounded = state_fields(target, samples, (1,), True)
    finally:
        target.quantized = "none"
    assert rounded.target == f"nf4:{plain.target}"


@pytest.mark.skipif(find_spec("torchao") is None, reason="needs torchao")
def test_training_beside_a_rounded_target(folders: dict[str, Path], tmp_path: Path) -> None:
    """And its states are read by nobody who asks for those of the whole one, or for none."""
    args = [*QUICK, f"target.name={folders['llama']}", f"states.folder={tmp_path / 'states'}"]
    assert distill_draft.main([*args, f"run={tmp_path / 'a'}", "target.quantize=int8_weight"]) == 0
    export = json.loads((tmp_path / "a/export/config.json").read_text())
    assert export["draftsmith"]["target"]["fingerprint"] == load_target(str(folders["llama"])).facts.fingerprint
    with pytest.raises(ValueError, match="states of another target: int8_weight:"):
        distill_draft.main([*args, f"run={tmp_path / 'b'}"])
    with pytest.raises(ValueError, match=r"rounded to int8_weight are read with target\.quantize"):
        distill_draft.main([*args, f"run={tmp_path / 'b'}", "target.placement=absent"])


def test_together_is_nothing_where_no_target_is_shared(target: Target) -> None:
    with together(target):
        target.forward(torch.ones(1, 2, dtype=torch.int64), torch.arange(2)[None])
    assert Placed("absent", "x").why == "its layers were not loaded"
