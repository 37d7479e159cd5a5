"""Configuration: recipes, overrides, refusals. Run: pytest tests/test_config.py"""

from __future__ import annotations

import dataclasses
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from draftsmith.configs.parse import UsageError, guarded, listed, nearest, parse, to_yaml
from draftsmith.configs.training import FREE_ON_RESUME, BudgetConfig, OptimConfig, TargetConfig, TrainConfig, differing
from draftsmith.models import METHODS
from draftsmith.train.distill_draft import read_config

ROOT = Path(__file__).resolve().parent.parent
ALL = sorted(ROOT.glob("configs/*.yaml"))
RECIPES = [
    p for p in ALL if yaml.safe_load(p.read_text())["method"] in METHODS
]  # the others: test_convert_diffusion.py


def read(*argv: str) -> TrainConfig:
    return read_config([*argv], "test")


@pytest.mark.parametrize("path", RECIPES, ids=lambda p: p.stem)
def test_every_recipe_parses_to_a_run_that_is_allowed(path: Path) -> None:
    config = read("--config", str(path))
    assert type(config.drafter) is METHODS[config.method].Config
    assert config.run.startswith("runs/")


@pytest.mark.parametrize("method", METHODS)
def test_every_method_has_a_recipe_and_documented_settings(method: str) -> None:
    assert any(yaml.safe_load(p.read_text())["method"] == method for p in RECIPES)
    source = Path(sys.modules[METHODS[method].Config.__module__].__file__ or "").read_text()
    for f in dataclasses.fields(METHODS[method].Config):
        assert f"{f.name}:" in source
    assert METHODS[method].Config.__dataclass_params__.frozen  # type: ignore[attr-defined]


def test_overrides_win_in_order_and_lists_need_no_brackets() -> None:
    config = read(
        "--config",
        str(ROOT / "configs/quick.yaml"),
        "optim.lr=1e-3",
        "--optim.lr",
        "2e-3",
        "--log.trackers",
        "wandb,tensorboard",
    )
    assert config.optim.lr == 2e-3 and config.log.trackers == ("wandb", "tensorboard")
    assert read("method=eagle3", "budget.steps=1", "drafter.taps=1,2").drafter.taps == (1, 2)
    assert read("method=eagle3", "budget.steps=1", "drafter.taps=null").drafter.taps is None
    assert read("method=medusa", "budget.steps=1", "--deterministic").deterministic is True


def test_scientific_notation_in_a_recipe_is_a_number(tmp_path: Path) -> None:
    (tmp_path / "r.yaml").write_text("method: medusa\nbudget: {steps: 1}\noptim: {lr: 3e-4}\n")
    assert read("--config", str(tmp_path / "r.yaml")).optim.lr == 3e-4


def test_printed_settings_parse_to_the_same_settings(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """B58: feeding the dump back gives the same dump."""
    for path in RECIPES:
        with pytest.raises(SystemExit) as end:
            read("--config", str(path), "--print_config")
        first = capsys.readouterr().out
        (tmp_path / "dump.yaml").write_text(first)
        assert end.value.code == 0
        again = read("--config", str(tmp_path / "dump.yaml"))
        assert to_yaml(again) == first and again == read("--config", str(path))


BASE = ("method=medusa", "budget.steps=1")


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (("optim.lrr=1",), "unknown key 'optim.lrr' in the command line; nearest valid key: 'optim.lr'"),
        (("lr=1",), "unknown key 'lr' in the command line; nearest valid key: 'optim.lr'"),
        (
            ("optim.row_length=8",),
            "unknown key 'optim.row_length' in the command line; nearest valid key: 'batch.row_length'",
        ),
        (("drafter.steps=3",), "unknown key 'drafter.steps' in the command line; nearest valid key: "),  # eagle3's
        (("--lern-rate", "3"), "unknown key 'lern_rate' in the command line; nearest valid key: "),
        (("optim.lr=fast",), '"optim.lr": Expected a float. Got value: fast'),
        (("batch.rows=2.5",), '"batch.rows": Expected a int. Got value: 2.5'),
        (("optim.schedule=cos",), "Expected a typing.Literal['cosine', 'wsd', 'constant']. Got value: cos"),
        (("optim.lr=-1",), "optim.lr must lie in [0, 10], got -1.0"),
        (("budget.tokens=5",), "set one of budget.steps, .tokens, .minutes, .epochs; got {'steps': 1, 'tokens': 5}"),
        (("save.steps=0",), "periodic saves cannot be turned off"),
        (("drafter.heads=0",), "0"),
        (("drafter.objective=klx",), "klx"),
        (("run=",), "run must name a folder"),
        (("states.batch_tokens=0",), "states.batch_tokens must be at least 1, got 0"),
        (("evaluate.probe_k=0",), "evaluate.probe_k must be at least 1, got 0"),
        (("draft_vocab=0",), "draft_vocab must be at least 1 or null, got 0"),
        (("data.max_length=4096",), "data.max_length=4096 does not fit batch.row_length=1024"),
        (("target.trust_remote_code=true",), "needs target.revision pinned to a 40-digit commit, got None"),
        (("target.trust_remote_code=true", "target.revision=main"), "40-digit commit, got 'main'"),
        (("stray",), "unexpected argument 'stray'; settings are written --key value or key=value"),
        (("--seed",), "--seed needs a value"),
    ],
)
def test_what_cannot_be_meant_is_refused_in_one_line(argv: tuple[str, ...], message: str) -> None:
    with pytest.raises(ValueError) as refused:
        read(*BASE, *argv)
    assert message in str(refused.value) and "\n" not in str(refused.value)


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        ((), "no method: give --config RECIPE, or method=NAME with one of medusa"),
        (("method=eagel3", "budget.steps=1"), "unknown method 'eagel3'; nearest: 'eagle3'"),
        (("method=medusa",), "no budget: set one of budget.steps"),
        (("--config", "no/such.yaml"), "--config no/such.yaml: No such file or directory"),
    ],
)
def test_incomplete_requests(argv: tuple[str, ...], message: str) -> None:
    with pytest.raises(ValueError, match=message.replace("[", r"\[")):
        read(*argv)


def test_misplaced_keys_of_a_recipe_are_named_with_the_file(tmp_path: Path) -> None:
    recipe = tmp_path / "r.yaml"
    for text, message in (
        ("method: medusa\nheads: 4\n", "unknown key 'heads' in .*; nearest valid key: 'drafter.heads'"),
        ("method: medusa\noptim: {adam: {lr: 1}}\n", "unknown key 'optim.adam'"),
        ("method: [medusa]\n", "unknown method"),
        ("method: medusa\noptim: 3\n", "optim. must be a mapping of settings, got int"),
        ("method: medusa\noptim: {lr: [\n", "not valid YAML"),
        ("optim:\n  lr: 1.0\n  lr: 2.0\n", "key 'lr' stands twice.*line 2"),
        ("- medusa\n", "no method"),
    ):
        recipe.write_text(text)
        with pytest.raises(UsageError, match=message):
            read("--config", str(recipe))
    recipe.write_bytes(b"\xff")
    with pytest.raises(UsageError, match=r"r\.yaml is not valid YAML"):
        read("--config", str(recipe))


def test_a_refusal_comes_before_weights_exits_with_2_and_writes_nothing(tmp_path: Path) -> None:
    command = [sys.executable, str(ROOT / "train/distill_draft.py"), "--config", str(ROOT / "configs/quick.yaml")]
    result = subprocess.run(
        [*command, f"run={tmp_path / 'run'}", "target.name=no/such-target", "optim.learning_rate=1"],
        capture_output=True,
        text=True,
        cwd=tmp_path,
    )
    assert result.returncode == 2 and result.stdout == ""
    line = "error: unknown key 'optim.learning_rate' in the command line; nearest valid key: "
    assert line in result.stderr and len(result.stderr.strip().splitlines()) == 1
    assert list(tmp_path.iterdir()) == []


def test_help_shows_docstrings(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as end:
        read("--config", str(ROOT / "configs/eagle3_smollm2.yaml"), "--help")
    text = " ".join(capsys.readouterr().out.split())
    assert end.value.code == 0
    assert "--optim.lr LR Peak learning rate." in text and "--drafter.steps STEPS Training-time-test steps" in text


def test_every_training_setting_is_documented() -> None:
    """Each field has a docstring that --help shows."""
    import jsonargparse

    source = (ROOT / "configs/training.py").read_text()
    for f in dataclasses.fields(TrainConfig):
        assert f"    {f.name}: " in source
    jsonargparse.set_parsing_settings(docstring_parse_attribute_docstrings=True)
    parser = jsonargparse.ArgumentParser(exit_on_error=False)
    parser.add_class_arguments(TrainConfig, None, skip={"drafter"})
    undocumented = [a.dest for a in parser._actions if a.option_strings and not a.help and a.dest != "help"]
    assert undocumented == []


def test_nearest_prefers_the_same_last_part_elsewhere() -> None:
    keys = ["optim.lr", "optim.betas", "batch.rows", "evaluate.every", "log.every"]
    assert nearest("lr", keys) == "optim.lr" and nearest("log.evry", keys) == "log.every"
    assert nearest("batch.row", keys) == "batch.rows" and nearest("zzz", keys) in keys


def test_lists() -> None:
    assert listed("2,4", tuple[int, ...]) == "[2,4]" and listed("[2]", tuple[int, ...]) == "[2]"
    assert listed("2,4", str) == "2,4" and listed("null", tuple[int, ...] | None) == "null"


def test_resume_compares_everything_but_what_may_change() -> None:
    config = read("--config", str(ROOT / "configs/quick.yaml"))
    stored = yaml.safe_load(to_yaml(config))
    assert differing(stored, config) == []
    free = dataclasses.replace(config, budget=BudgetConfig(steps=7), run="elsewhere", resume="never")
    assert differing(stored, free) == []
    other = dataclasses.replace(config, optim=OptimConfig(lr=1.0), seed=3, target=TargetConfig("tiny", dtype="float64"))
    changed = [line.split(":")[0] for line in differing(stored, other)]
    assert {"optim.lr", "seed", "target.dtype"} <= set(changed) and not set(changed) & set(FREE_ON_RESUME)


@pytest.mark.parametrize(
    ("error", "code", "text"),
    [
        (ValueError("a\nb"), 2, "error: a b"),
        (OSError(28, "No space left on device"), 1, "error: OSError: [Errno 28] No space left on device"),
        (FileExistsError(17, "File exists", "runs/x"), 1, "error: runs/x: File exists"),
        (MemoryError(), 1, "error: MemoryError"),
        (RuntimeError("20 steps in a row"), 1, "error: RuntimeError: 20 steps in a row"),
        (KeyboardInterrupt(), 130, "stopped"),
    ],
)
def test_failures_are_one_line_without_a_traceback(
    error: BaseException, code: int, text: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("DRAFTSMITH_TRACEBACK", raising=False)

    def fail() -> None:
        raise error

    assert guarded(fail) == code
    message = capsys.readouterr().err
    assert message.startswith(text) and len(message.splitlines()) == 1
    assert guarded(lambda: None) == 0 and guarded(lambda: 3) == 3


def test_parse_takes_positional_values() -> None:
    @dataclasses.dataclass(frozen=True)
    class Spec:
        """Spec."""

        source: str
        out: str
        flag: bool = False

    assert parse(Spec, ["a=b/c", "out", "--flag"], prog="x", positional=("source", "out")) == Spec("a=b/c", "out", True)
    assert parse(Spec, ["--out", "o", "s"], prog="x", positional=("source",)) == Spec("s", "o")
