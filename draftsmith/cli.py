"""The `draftsmith` command. Only the command that is asked for is imported, so `draftsmith --help` answers at once.

A command is a function `run(config)` whose one parameter is a frozen dataclass: its fields are the options, the
docstrings below them the help. Flags are frozen in `tests/cli_flags.txt` (`pytest tests/test_layout.py`).
"""

from __future__ import annotations

import importlib
import sys
import typing
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Command:
    """Where a command lives: `module` below draftsmith, its `function(config)`, options that need no name, and whether
    the function's second argument is which keys were named (configs/parse.py `named_keys`)."""

    help: str
    module: str
    function: str
    positional: tuple[str, ...] = ()
    takes_named: bool = False


COMMANDS = {
    "train": Command("train a drafter: --config RECIPE key=value ...", "train.distill_draft", "main"),
    "generate": Command(
        "answer one prompt, --show which tokens were drafted", "inference.generate", "run_generate", ("prompt",), True
    ),
    "serve": Command("answer over HTTP, in the form of OpenAI's API", "inference.serve", "run_serve", ("model",), True),
    "evaluate": Command(
        "measure acceptance and speed, report as JSON and HTML", "inference.evaluate", "run_evaluate", takes_named=True
    ),
    "tune": Command(
        "find the fastest draft for this machine, kept in the export", "inference.tune", "run_tune", ("export",)
    ),
    "rollout": Command("let a target answer prompts, for training data", "inference.rollout", "run_rollout"),
    "capture": Command("store a target's states as shards", "inference.capture", "run_capture"),
    "plan": Command("memory, disk, time and cost of a recipe, before it runs", "train.plan", "run_plan", ("recipe",)),
    "report": Command("make an HTML page of training runs", "inference.run_report", "run_report", ("runs",)),
    "masks": Command("show which tokens of the data are trained on", "inference.masks", "run_masks"),
    "check": Command("replay an export against the trainer's logits", "inference.check", "run_check", ("export",)),
    "push": Command("upload an export to the Hub", "inference.push", "run_push", ("export", "repo")),
    "merge": Command(
        "merge a converted model's adapters into its weights", "inference.merge", "run_merge", ("adapters", "out")
    ),
    "convert": Command("read a foreign head into an export", "inference.convert", "run_convert", ("source", "out")),
}


def usage() -> str:
    width = max(map(len, COMMANDS))
    rows = "\n".join(f"  {name:<{width}}  {command.help}" for name, command in COMMANDS.items())
    return (
        "usage: draftsmith COMMAND [options]\n\n"
        "Teach a frozen language model to emit several tokens per forward pass, and run it.\n\n"
        f"commands:\n{rows}\n\n"
        "  draftsmith COMMAND --help   options of a command\n"
        "  draftsmith --version        version\n"
    )


def config_class(command: Command) -> type:
    """The dataclass that a command's function takes."""
    function = getattr(importlib.import_module(f"draftsmith.{command.module}"), command.function)
    hints = typing.get_type_hints(function)
    return next(kind for name, kind in hints.items() if name != "return")


def run(name: str, argv: Sequence[str]) -> int | None:
    command = COMMANDS[name]
    module = importlib.import_module(f"draftsmith.{command.module}")
    if name in ("train", "plan"):  # these read a recipe in two stages, see there
        return module.main(argv)
    from draftsmith.configs.parse import named_keys, parse

    kind = config_class(command)
    config: Any = parse(kind, argv, prog=f"draftsmith {name}", positional=command.positional, description=command.help)
    named = (named_keys(kind, argv, command.positional),) if command.takes_named else ()
    return getattr(module, command.function)(config, *named)


def main(argv: Sequence[str] | None = None) -> int:
    """Entry point: exit code 0, 2 for a wrong request, 1 for a failure, 130 for Ctrl-C."""
    argv = sys.argv[1:] if argv is None else argv
    if not argv or argv[0] in ("-h", "--help", "help"):
        print(usage(), end="")
        return 0
    if argv[0] == "--version":
        from draftsmith import __version__

        print(__version__)
        return 0
    name, rest = argv[0], argv[1:]
    if name not in COMMANDS:
        import difflib

        close = difflib.get_close_matches(name, COMMANDS, 1, 0.0)[0]
        print(f"error: unknown command {name!r}; nearest: {close!r} (draftsmith --help lists them)", file=sys.stderr)
        return 2
    from draftsmith.configs.parse import guarded

    return guarded(lambda: run(name, rest))


if __name__ == "__main__":
    sys.exit(main())
