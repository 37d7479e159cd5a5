"""The repository's own rules: folder order, module names, tables, flags, forbidden calls, a quick `--help`.

Run: pytest tests/test_layout.py. After an intended change of flags: python tests/test_layout.py (writes cli_flags.txt).
"""

from __future__ import annotations

import ast
import dataclasses
import importlib
import importlib.util
import os
import resource
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from draftsmith.cli import COMMANDS, config_class
from draftsmith.configs.parse import keys_of
from draftsmith.configs.training import TrainConfig

ROOT = Path(__file__).resolve().parent.parent
ORDER = ("kernels", "losses", "data", "models", "inference", "configs", "train")
FLAGS = ROOT / "tests/cli_flags.txt"
MODULES = sorted(p for folder in ORDER for p in (ROOT / folder).rglob("*.py"))
SOURCES = [*MODULES, *sorted(ROOT.glob("draftsmith/*.py"))]
TABLES = {
    "METHODS": "models",
    "TRAINING_FREE": "models",
    "LOSSES": "losses.objective",
    "TREES": "inference.trees",
    "VERIFIERS": "inference.verify",
    "STRATEGIES": "inference.strategies",
    "LAYOUTS": "models.layouts",
    "EXPORTERS": "inference.exporters",
    "SCHEMAS": "inference.exporters",
    "SUITES": "inference.suites",
    "TASKS": "data.tasks",
    "FAMILIES": "models.families",
    "PRESETS": "models.diffusion",
    "KERNELS": "kernels",
}


def tree_of(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"), str(path))


def imported(path: Path) -> Iterator[tuple[int, str]]:
    """(line, dotted module) of every import of a file in one of the folders; relative ones resolved."""
    package = ["draftsmith", *path.relative_to(ROOT).parts[:-1]]
    for node in ast.walk(tree_of(path)):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else []
            module = ".".join([*base, *([node.module] if node.module else [])])
            yield node.lineno, module
            yield from ((node.lineno, f"{module}.{alias.name}") for alias in node.names)


@pytest.mark.parametrize("path", MODULES, ids=lambda p: str(p.relative_to(ROOT)))
def test_files_import_from_their_own_folder_and_those_to_the_left(path: Path) -> None:
    own = ORDER.index(path.relative_to(ROOT).parts[0])
    for line, module in imported(path):
        parts = module.split(".")
        if parts[0] == "draftsmith" and len(parts) > 1 and parts[1] in ORDER:
            assert ORDER.index(parts[1]) <= own, f"{path.name}:{line} imports {module}, a folder to the right"
        assert parts[0] not in ORDER, f"{path.name}:{line}: {module} would put the root on the import path"
        assert module != "draftsmith.cli", f"{path.name}:{line}: the command may import everything, nothing imports it"


def test_library_imports_are_relative_and_scripts_are_not() -> None:
    for path in MODULES:
        script = any(isinstance(n, ast.If) and "__main__" in ast.unparse(n.test) for n in tree_of(path).body)
        is_entry = path.parent == ROOT / "train" and script  # its folder is first on the path, it has no package there
        for node in ast.walk(tree_of(path)):
            if isinstance(node, ast.ImportFrom) and is_entry:
                assert node.level == 0, f"{path.name}:{node.lineno}: a script imports draftsmith.…"
            elif isinstance(node, ast.ImportFrom):
                absolute = node.level == 0 and (node.module or "").split(".")[0] == "draftsmith"
                assert not absolute, f"{path.relative_to(ROOT)}:{node.lineno}: inside the library imports are relative"


def test_folders_are_linked_and_are_packages() -> None:
    for folder in ORDER:
        link = ROOT / "draftsmith" / folder
        assert link.is_symlink() and os.readlink(link) == f"../{folder}"
        assert (ROOT / folder / "__init__.py").is_file()
    assert not (ROOT / "tests/__init__.py").exists()  # it would put the root on the import path


def test_modules_in_train_shadow_nothing() -> None:
    """`train/` is first on the path under accelerate: a file named like a library would be imported in its place."""
    for path in (ROOT / "train").glob("*.py"):
        name = path.stem
        assert name not in sys.stdlib_module_names, f"train/{path.name} shadows the standard library"
        spec = importlib.util.find_spec(name) if name != "__init__" else None
        assert spec is None or Path(spec.origin or "") == path, (
            f"train/{path.name} shadows {spec.origin if spec else ''}"
        )


@pytest.mark.parametrize("path", SOURCES, ids=lambda p: str(p.relative_to(ROOT)))
def test_every_file_opens_with_a_docstring(path: Path) -> None:
    assert ast.get_docstring(tree_of(path)) or not path.read_text().strip(), f"{path} has no docstring"


def iterated(path: Path) -> set[str]:
    """Names of tables that a test file goes through: in `for`, in a comprehension, in `parametrize`, or by comparing
    their keys with what it has cases for."""
    names: set[str] = set()
    for node in ast.walk(tree_of(path)):
        sources: list[ast.expr] = []
        if isinstance(node, ast.For | ast.comprehension):
            sources = [node.iter]
        elif isinstance(node, ast.Call) and ast.unparse(node.func).endswith("parametrize"):
            sources = node.args[1:]
        elif isinstance(node, ast.Assert) and isinstance(node.test, ast.Compare):
            sources = [c for c in ast.walk(node.test) if isinstance(c, ast.Call) and ast.unparse(c.func) == "set"]
        names |= {n.id for s in sources for n in ast.walk(s) if isinstance(n, ast.Name)}
    return names


@pytest.mark.parametrize("table", TABLES)
def test_tables_are_literal_and_their_entries_are_tested_by_iteration(table: str) -> None:
    module = importlib.import_module(f"draftsmith.{TABLES[table]}")
    entries = getattr(module, table)
    assert isinstance(entries, dict) and all(isinstance(k, str) for k in entries) and entries
    assert module.__file__ is not None
    (assigned,) = [
        n.value
        for n in tree_of(Path(module.__file__)).body
        if isinstance(n, ast.Assign | ast.AnnAssign)
        and table in ast.unparse(n.targets[0] if isinstance(n, ast.Assign) else n.target)
    ]
    assert isinstance(assigned, ast.Dict), f"{table} is to be a literal dict"
    covering = [
        p.name for p in sorted(ROOT.glob("tests/test_*.py")) if p.name != "test_layout.py" and table in iterated(p)
    ]
    assert covering, f"no test iterates over {table}: a new entry would not be tested"


# Flags


def flags() -> list[str]:
    """One line per option of every command: name and type."""
    from draftsmith.models import METHODS

    lines = []
    for name, command in COMMANDS.items():
        for key, kind in keys_of(TrainConfig if name == "train" else config_class(command), {}).items():
            if key != "drafter":
                mark = f" (position {command.positional.index(key) + 1})" if key in command.positional else ""
                lines.append(f"{name} --{key}{mark}: {typed(kind)}")
    for method, drafter in METHODS.items():
        lines += [f"train method={method} --drafter.{k}: {typed(v)}" for k, v in keys_of(drafter.Config, {}).items()]
    return lines


def typed(kind: Any) -> str:
    return (
        kind.__name__ if isinstance(kind, type) and not hasattr(kind, "__args__") else str(kind).replace("typing.", "")
    )


def test_flags_are_frozen() -> None:
    """People's scripts hold these: a change is meant, written to cli_flags.txt, and told in CHANGELOG.md."""
    assert flags() == FLAGS.read_text().splitlines(), (
        "if meant: python tests/test_layout.py, and tell it in CHANGELOG.md"
    )


@pytest.mark.parametrize("name", [n for n in COMMANDS if n != "train"])  # tests/test_config.py has that one
def test_every_option_is_documented(name: str) -> None:
    """Help of each command names each option with a text of its own."""
    import jsonargparse

    jsonargparse.set_parsing_settings(docstring_parse_attribute_docstrings=True)
    parser = jsonargparse.ArgumentParser(exit_on_error=False)
    parser.add_class_arguments(config_class(COMMANDS[name]), None)
    assert [a.dest for a in parser._actions if a.option_strings and not a.help] == []
    assert dataclasses.fields(config_class(COMMANDS[name]))


# Security


FORBIDDEN_MODULES = {"pickle", "cPickle", "dill", "cloudpickle", "shelve", "marshal", "joblib"}
FORBIDDEN_CALLS = {
    "eval",
    "exec",
    "torch.load",
    "torch.save",
    "yaml.load",
    "yaml.unsafe_load",
    "yaml.full_load",
    "os.system",
    "os.popen",
}
ALLOWED = {"inference/torch_file.py": {"pickle"}}  # the restricted reader of foreign `.pt` files


def offences(source: str) -> list[str]:
    """What a file does that this repository does not: found in the syntax tree, so `model.eval()` is no hit."""
    found = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            found += [a.name for a in node.names if a.name.split(".")[0] in FORBIDDEN_MODULES]
        elif isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] in FORBIDDEN_MODULES:
            found.append(node.module or "")
        elif isinstance(node, ast.Call):
            name = ast.unparse(node.func)
            if name in FORBIDDEN_CALLS:
                found.append(name)
            for keyword in node.keywords:
                if keyword.arg in ("shell", "allow_pickle") and not (
                    isinstance(keyword.value, ast.Constant) and keyword.value.value is False
                ):
                    found.append(f"{keyword.arg}=…")
    return found


@pytest.mark.parametrize("path", SOURCES, ids=lambda p: str(p.relative_to(ROOT)))
def test_nothing_runs_what_it_reads(path: Path) -> None:
    allowed = ALLOWED.get(str(path.relative_to(ROOT)), set())
    assert set(offences(path.read_text(encoding="utf-8"))) <= allowed


def test_the_scan_sees_what_it_is_for() -> None:
    bad = "import pickle\nfrom dill import loads\neval('1')\nexec(x)\ntorch.load(f)\nyaml.load(f)\nrun(c, shell=True)\n"
    assert len(offences(bad)) == 7
    assert offences("model.eval()\nyaml.safe_load(f)\nrun(c, shell=False)\n") == []


# The repository


def test_recipes_and_engine_files_are_plain_yaml_and_json() -> None:
    for path in (ROOT / "configs").rglob("*.yaml"):
        assert isinstance(yaml.safe_load(path.read_text()), dict), path


def test_help_answers_at_once_without_torch() -> None:
    code = "import sys; from draftsmith.cli import main; main(['--help']); assert 'torch' not in sys.modules, 'torch'"
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    assert result.returncode == 0, result.stderr
    assert all(name in result.stdout for name in COMMANDS)
    assert (
        after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime < 1.0
    )  # seconds of work, whatever else runs


def test_unknown_commands_name_the_nearest() -> None:
    command = [sys.executable, "-m", "draftsmith.cli"]
    result = subprocess.run([*command, "evalute"], capture_output=True, text=True)
    assert result.returncode == 2 and result.stderr.strip() == (
        "error: unknown command 'evalute'; nearest: 'evaluate' (draftsmith --help lists them)"
    )
    from draftsmith import __version__

    assert subprocess.run([*command, "--version"], capture_output=True, text=True).stdout.strip() == __version__


if __name__ == "__main__":
    FLAGS.write_text("\n".join(flags()) + "\n")
    print(f"wrote {FLAGS.name}")
