"""Hostile files, planted secrets, forbidden constructs, and the offline switch (PROMISES 18, 19, 21, 23, 24).

Run: pytest tests/test_security.py
"""

from __future__ import annotations

import ast
import json
import os
import pickle
import socket
import struct
import subprocess
import time
import zipfile
from collections import OrderedDict
from pathlib import Path

import huggingface_hub
import pytest
import torch

from draftsmith.inference.card import leaks, scrub, scrub_values
from draftsmith.inference.check import check, read_replay
from draftsmith.inference.convert import find_files
from draftsmith.inference.export import RunFacts, export
from draftsmith.inference.exporters.folder import read_header, read_json, write_folder
from draftsmith.inference.load import load_drafter, read_export_config
from draftsmith.inference.torch_file import UnsafeFileError, read_torch_file
from draftsmith.models import METHODS

ROOT = Path(__file__).resolve().parents[1]
PARTS = ("kernels", "losses", "data", "models", "inference", "configs", "train")


class Call:
    """Pickles into a call of `function(*args)` at load time."""

    def __init__(self, function, *args):
        self.call = function, args

    def __reduce__(self):
        return self.call


def program_of(module: str, name: str, *args: str) -> bytes:
    """A protocol-2 pickle that calls module.name(*args)."""
    strings = b"".join(b"X" + struct.pack("<I", len(a.encode())) + a.encode() for a in args)
    return b"\x80\x02c" + f"{module}\n{name}\n".encode() + b"(" + strings + b"tR."


def archive(path: Path, program: bytes, storages: dict[str, bytes] | None = None, compress: bool = False) -> Path:
    """A file shaped as torch.save writes it, around any program."""
    kind = zipfile.ZIP_DEFLATED if compress else zipfile.ZIP_STORED
    with zipfile.ZipFile(path, "w", kind) as file:
        file.writestr("archive/data.pkl", program)
        for key, raw in (storages or {}).items():
            file.writestr(f"archive/data/{key}", raw)
        file.writestr("archive/version", "3\n")
    return path


def tensor_program(count: int, size: tuple[int, ...], stride: tuple[int, ...], key: str = "0") -> bytes:
    """A state dict {"w": tensor} whose numbers are ours to choose."""

    class Storage:
        pass

    class Pickler(pickle.Pickler):
        def persistent_id(self, obj):
            return ("storage", torch.FloatStorage, key, "cpu", count) if isinstance(obj, Storage) else None

    class Tensor:
        def __reduce__(self):
            return torch._utils._rebuild_tensor_v2, (Storage(), 0, size, stride, False, OrderedDict())

    import io

    out = io.BytesIO()
    Pickler(out, protocol=2).dump({"w": Tensor()})
    return out.getvalue()


def hostile(name: str, folder: Path, mark: str) -> Path:
    """Ten files that must be refused; those that could run something would create the file `mark`."""
    path = folder / f"{name}.bin"
    touch = f"open({mark!r}, 'w').close()"
    match name:
        case "os_system":
            return archive(path, program_of("posix", "system", f"touch {mark}"))
        case "builtins_exec":
            return archive(path, program_of("builtins", "exec", touch))
        case "builtins_eval_proto4":
            return archive(path, pickle.dumps({"w": Call(eval, touch)}, protocol=4))
        case "subprocess":
            return archive(path, pickle.dumps({"w": Call(subprocess.check_call, ["touch", mark])}, protocol=2))
        case "nested_pickle":
            inner = pickle.dumps(Call(os.system, f"touch {mark}"))
            return archive(path, pickle.dumps({"w": Call(pickle.loads, inner)}, protocol=2))
        case "bare_pickle_without_archive":
            path.write_bytes(pickle.dumps({"w": Call(os.system, f"touch {mark}")}))
            return path
        case "module_object":
            torch.save(torch.nn.Linear(2, 2), path)
            return path
        case "attribute_walk":
            return archive(path, program_of("torch", "serialization.os.system", f"touch {mark}"))
        case "out_of_bounds_tensor":
            return archive(path, tensor_program(4, (1 << 20, 1 << 20), (1 << 20, 1)), {"0": b"\0" * 16})
        case "member_outside":
            archive(path, tensor_program(4, (4,), (1,)), {"0": b"\0" * 16})
            with zipfile.ZipFile(path, "a") as file:
                file.writestr("archive/../../evil", "x")
            return path
        case "compressed_bomb":
            return archive(path, tensor_program(1 << 24, (1 << 24,), (1,)), {"0": b"\0" * (1 << 26)}, compress=True)
        case "lying_storage":
            return archive(path, tensor_program(1 << 40, (1 << 40,), (1,)), {"0": b"\0" * 16})
        case "extension_opcode":
            return archive(path, b"\x80\x02\x82\x01.")
        case "instance_opcode":
            return archive(path, b"(S'touch " + mark.encode() + b"'\niposix\nsystem\n.")
        case _:
            raise AssertionError(name)


HOSTILE = (
    "os_system", "builtins_exec", "builtins_eval_proto4", "subprocess", "nested_pickle", "bare_pickle_without_archive",
    "module_object", "attribute_walk", "out_of_bounds_tensor", "member_outside", "compressed_bomb", "lying_storage",
    "extension_opcode", "instance_opcode",
)  # fmt: skip


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_torch_file_is_refused_and_nothing_runs(name, tmp_path):
    mark = tmp_path / "ran"
    path = hostile(name, tmp_path, str(mark))
    started = time.perf_counter()
    with pytest.raises(UnsafeFileError, match=r"refused|torch 1\.6"):
        read_torch_file(path)
    assert time.perf_counter() - started < 2
    assert not mark.exists()


def test_the_fixtures_would_run_in_an_ordinary_unpickler(tmp_path):
    mark = tmp_path / "ran"
    with zipfile.ZipFile(hostile("os_system", tmp_path, str(mark))) as file:
        pickle.loads(file.read("archive/data.pkl"))
    assert mark.exists()


def test_torch_file_reads_real_state_dicts(tmp_path):
    torch.manual_seed(0)
    base = torch.randn(6, 4)
    state = OrderedDict(
        full=base,
        view=base[1:3, ::2],
        half=torch.randn(3).half(),
        brain=torch.randn(2, 2).bfloat16(),
        ids=torch.arange(5),
        mask=torch.tensor([True, False]),
        scalar=torch.tensor(2.5),
        empty=torch.empty(0, 3),
        parameter=torch.nn.Parameter(torch.randn(3)),
    )
    for name, value in {"plain": state, "nested": {"state_dict": dict(state)}, "model": {"model": state}}.items():
        torch.save(value, tmp_path / f"{name}.bin")
        read = read_torch_file(tmp_path / f"{name}.bin")
        assert list(read) == list(state)
        for key, tensor in state.items():
            assert read[key].dtype == tensor.dtype and torch.equal(read[key], tensor.detach()), key
    model = torch.nn.Sequential(torch.nn.Linear(3, 2), torch.nn.LayerNorm(2))
    torch.save(model.state_dict(), tmp_path / "module.bin")
    assert torch.equal(read_torch_file(tmp_path / "module.bin")["0.weight"], model[0].weight)


def test_lists_and_objects_beside_tensors_are_refused(tmp_path):
    for value in ([torch.zeros(2)], {"w": torch.zeros(2), "epoch": 3}, {}, {3: torch.zeros(1)}, torch.zeros(2)):
        torch.save(value, tmp_path / "x.bin")
        with pytest.raises(UnsafeFileError):
            read_torch_file(tmp_path / "x.bin")


def test_a_hundred_bytes_that_announce_a_terabyte_fail_at_once(tmp_path):
    path = tmp_path / "model.safetensors"
    shape = b'{"w":{"dtype":"F32","shape":[274877906944],"data_offsets":[0,1099511627776]}}'
    for raw in (
        struct.pack("<Q", 1 << 40) + b"{}" + b" " * 90,  # a header of a terabyte
        struct.pack("<Q", len(shape)) + shape,  # a tensor of a terabyte
        struct.pack("<Q", 2) + b"[]",
        b"abc",
        struct.pack("<Q", 4) + b"{{{{",
        struct.pack("<Q", 70_000) + b"[" * 70_000,
    ):
        path.write_bytes(raw)
        started = time.perf_counter()
        with pytest.raises(ValueError, match="safetensors"):
            read_header(path)
        assert time.perf_counter() - started < 1


@pytest.mark.parametrize(
    "entry",
    [
        {"dtype": "F32", "shape": [2], "data_offsets": [0, 4]},  # shape and bytes disagree
        {"dtype": "F32", "shape": [-1, -2], "data_offsets": [0, 8]},
        {"dtype": "F32", "shape": [1], "data_offsets": [4, 8]},  # a gap
        {"dtype": "OBJ", "shape": [2], "data_offsets": [0, 8]},
        {"dtype": "F32", "shape": "2", "data_offsets": None},
    ],
)
def test_header_entries_that_lie(entry, tmp_path):
    header = json.dumps({"w": entry}).encode()
    (tmp_path / "m.safetensors").write_bytes(struct.pack("<Q", len(header)) + header + b"\0" * 8)
    with pytest.raises(ValueError, match="tensor"):
        read_header(tmp_path / "m.safetensors")


def test_json_of_any_shape_is_an_error_not_a_crash(tmp_path):
    for text in ("[]", "{", "[" * 100_000, "\udcff"):
        (tmp_path / "config.json").write_text(text, encoding="utf-8", errors="surrogateescape")
        with pytest.raises(ValueError, match=r"config\.json"):
            read_json(tmp_path / "config.json")


PLANTED = "hf_abcDEF0123456789abcDEF0123456789xy"


def test_planted_secrets_and_paths_are_scrubbed(monkeypatch):
    monkeypatch.setenv("MY_SERVICE_TOKEN", "s3cr3t-value-from-the-environment")
    text = "\n".join(
        [
            f"hub: {PLANTED}",
            "api_key: 0123456789abcdef0123456789abcdef01234567",
            "Authorization: Bearer abcdefgh12345678",
            "endpoint: https://jane:hunter22@example.com/v1",
            "also s3cr3t-value-from-the-environment here",
            "openai sk-abcdefghijklmnop1234",
            "data: /home/jane/secret-project/train.jsonl",
            "cache: ~/.cache/things/file.bin",
            r"windows: C:\Users\jane\runs\export",
        ]
    )
    clean = scrub(text)
    for secret in (
        PLANTED,
        "0123456789abcdef0123456789",
        "abcdefgh12345678",
        "hunter22",
        "s3cr3t",
        "sk-abcdef",
        "jane",
        "secret-project",
    ):
        assert secret not in clean, secret
    assert "train.jsonl" in clean and "example.com/v1" in clean
    assert scrub(clean) == clean
    assert len(leaks(text)) == 9 and not any(PLANTED in line for line in leaks(text))


def test_scrubbing_leaves_ordinary_text_alone():
    text = "\n".join(
        [
            "HuggingFaceTB/SmolLM2-135M-Instruct at https://huggingface.co/HuggingFaceTB/SmolLM2-135M-Instruct",
            "accelerate launch train/distill_draft.py --config configs/eagle3_smollm2.yaml optim.lr=3e-4",
            "max_new_tokens: 1024", "batch_tokens: 2048.5", "tokenizer: smollm2", "token_count: {a: 1}", "token: null",
            "hf_prompts: 20, hf_token_count",
            "first token: 0.31 s, tokens: accepted-and-committed",
            "objective: 0.9*kl + 0.1*ce", "tokens/s and draft/verify/commit",
        ]
    )  # fmt: skip
    assert scrub(text) == text
    nested = {"wandb": {"api_key": "abcdefghijkl", "project": "x"}, "paths": ["/home/jane/x.jsonl"], "tokens": 3}
    assert scrub_values(nested) == {
        "wandb": {"api_key": "[removed]", "project": "x"},
        "paths": ["x.jsonl"],
        "tokens": 3,
    }


@pytest.mark.parametrize("name", ["../../secrets", "/etc/target", "~/x", "a/../b", "a/b/c", "..", "a\\b", "", 3, None])
def test_a_config_can_not_point_at_a_path(name, tiny, tmp_path):
    target = tiny(max_positions=512)
    drafter = METHODS["medusa"](METHODS["medusa"].Config(heads=1), target.facts)
    folder = export(drafter, tmp_path / "x", run=RunFacts())
    config = json.loads((folder / "config.json").read_text())
    config["draftsmith"]["target"]["name"] = name
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(ValueError, match="names the target"):
        read_export_config(str(folder))


def test_interrupted_write_leaves_the_old_folder(tmp_path):
    folder = tmp_path / "export"

    def good(place):
        (place / "config.json").write_text('{"draftsmith": {}}')

    def bad(place):
        (place / "config.json").write_text("half")
        raise OSError("no space left on device")

    write_folder(folder, good)
    with pytest.raises(OSError, match="no space"):
        write_folder(folder, bad)
    assert (folder / "config.json").read_text() == '{"draftsmith": {}}'
    assert [p.name for p in tmp_path.iterdir()] == ["export"]


# What each file may do that no other may. ZeRO's own shards are DeepSpeed's to read; see train/.
ALLOWED = {("inference/torch_file.py", "pickle")}


def forbidden(tree: ast.AST) -> list[str]:
    """Names of constructs that run or build arbitrary objects: pickle, torch.load, eval, exec, yaml.load, shell=True."""
    found = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found += [
                a.name
                for a in node.names
                if a.name.split(".")[0] in ("pickle", "cPickle", "dill", "cloudpickle", "shelve", "marshal", "joblib")
            ]
        if (
            isinstance(node, ast.ImportFrom)
            and node.module
            and node.module.split(".")[0] in ("pickle", "dill", "cloudpickle", "shelve", "marshal", "joblib")
        ):
            found.append(node.module)
        if isinstance(node, ast.Call):
            name = ast.unparse(node.func)
            if name in (
                "eval",
                "exec",
                "torch.load",
                "yaml.load",
                "yaml.unsafe_load",
                "yaml.full_load",
                "os.system",
                "os.popen",
            ):
                found.append(name)
            for word in node.keywords:
                value = word.value.value if isinstance(word.value, ast.Constant) else None
                if (word.arg, value) in (
                    ("shell", True),
                    ("allow_pickle", True),
                    ("weights_only", False),
                    ("trust_remote_code", True),
                ):
                    found.append(f"{word.arg}={value}")
    return found


def test_no_forbidden_construct_in_the_repository():
    faults = []
    for part in (*PARTS, "draftsmith/cli.py"):
        for path in [ROOT / part] if part.endswith(".py") else sorted((ROOT / part).rglob("*.py")):
            where = path.relative_to(ROOT).as_posix()
            names = forbidden(ast.parse(path.read_text(encoding="utf-8"), where))
            faults += [f"{where}: {name}" for name in names if (where, name) not in ALLOWED]
    assert not faults


@pytest.mark.parametrize(
    "line",
    ["import pickle", "from pickle import loads", "torch.load('x')", "eval('1')", "exec('1')", "yaml.load(f)",
     "subprocess.run('x', shell=True)", "np.load('x', allow_pickle=True)", "AutoModel.from_pretrained(n, trust_remote_code=True)"],
)  # fmt: skip
def test_the_scan_sees_what_it_must(line):
    assert forbidden(ast.parse(line))
    assert not forbidden(ast.parse("model.eval()\nre.compile('x')\nyaml.safe_load(f)\nf(shell=False)"))


def test_offline_switch_makes_no_network_call(tiny, tmp_path, monkeypatch):
    """With every way to a socket blocked: export, load and check work, a Hub id is refused in words."""

    def blocked(*_, **__):
        raise AssertionError("a network call")

    for owner, name in (
        (socket.socket, "connect"),
        (socket.socket, "connect_ex"),
        (socket, "create_connection"),
        (socket, "getaddrinfo"),
    ):
        monkeypatch.setattr(owner, name, blocked)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    target = tiny(max_positions=512)
    drafter = METHODS["eagle3"](METHODS["eagle3"].Config(), target.facts)
    drafter.init_from_target(target)
    folder = export(drafter, tmp_path / "export", run=RunFacts(), target=target)
    load_drafter(str(folder), target)
    result = check(folder, read_export_config(str(folder)), target, read_replay(folder))
    assert result.agreeing == result.pairs
    for refused in (lambda: load_drafter("nobody/nothing", target), lambda: find_files("nobody/nothing", None)):
        with pytest.raises(ValueError, match=r"HF_HUB_OFFLINE is set|the Hub gives none"):
            refused()
