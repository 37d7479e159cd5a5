"""Command lines and YAML recipes -> frozen dataclasses, for the scripts in `train/` and for every command.

    parse(Spec, ["--config", "recipe.yaml", "optim.lr=3e-4", "--seed", "1"], prog="…")

Keys are checked first, by name alone: an unknown or misplaced one is refused in one line with the nearest valid one.
jsonargparse then does types, and `--help` from the docstrings below each field. `--print_config` prints the resolved
settings as YAML that parses to the same settings. Tests: `pytest tests/test_config.py`.
"""

from __future__ import annotations

import difflib
import json
import os
import sys
import typing
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, fields, is_dataclass
from pathlib import Path
from typing import Any, TypeVar

import yaml

Spec = TypeVar("Spec")


class UsageError(ValueError):
    """A command line or recipe that cannot be meant; the message is one line."""


class Failure(Exception):
    """A failure that is nobody's wrong request, told in one line of our own words."""


def keys_of(spec: type, sections: Mapping[str, type], prefix: str = "") -> dict[str, Any]:
    """Dotted key -> type of every setting of a dataclass, nested dataclasses opened. `sections` types fields whose
    class is only known at run time (`drafter`)."""
    hints = typing.get_type_hints(spec)
    keys: dict[str, Any] = {}
    for f in fields(spec):
        kind = sections.get(prefix + f.name, hints[f.name])
        if is_dataclass(kind):
            keys |= keys_of(typing.cast(type, kind), sections, f"{prefix}{f.name}.")
        else:
            keys[prefix + f.name] = kind
    return keys


def nearest(key: str, valid: Sequence[str]) -> str:
    """The valid name a user most likely meant: same last part in another section, else the closest spelling."""
    leaf = key.rsplit(".", 1)[-1]
    same_leaf = [v for v in valid if v.rsplit(".", 1)[-1] == leaf]
    if same_leaf:
        return difflib.get_close_matches(key, same_leaf, 1, 0.0)[0]
    close = difflib.get_close_matches(key, valid, 1, 0.6)
    if close:
        return close[0]
    by_leaf = {v.rsplit(".", 1)[-1]: v for v in reversed(valid)}
    close = difflib.get_close_matches(leaf, list(by_leaf), 1, 0.0)
    return by_leaf[close[0]] if close else valid[0]


def check_key(key: str, keys: Mapping[str, Any], where: str) -> None:
    if key not in keys:
        raise UsageError(f"unknown key {key!r} in {where}; nearest valid key: {nearest(key, list(keys))!r}")


def recipe_keys(recipe: Any, keys: Mapping[str, Any], where: str) -> None:
    """Refuse a recipe whose mapping has a key that is no setting; types are left to the parser."""
    sections = {key.rsplit(".", depth)[0] for key in keys for depth in range(1, key.count(".") + 1)}

    def walk(node: Any, prefix: str) -> None:
        if not isinstance(node, dict):
            raise UsageError(
                f"{where}: {prefix or 'the file'} must be a mapping of settings, got {type(node).__name__}"
            )
        for name, value in node.items():
            key = f"{prefix}{name}"
            if key in sections:
                if value is not None:
                    walk(value, key + ".")
            else:
                check_key(key, keys, where)

    walk(recipe, "")


class _Loader(yaml.SafeLoader):
    """The safe loader, which refuses a key that stands twice (the last would win in silence)."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        keys = [self.construct_object(key, deep=True) for key, _ in node.value]
        for (key, _), name in zip(node.value, keys, strict=True):
            if keys.count(name) > 1:
                raise yaml.constructor.ConstructorError(None, None, f"key {name!r} stands twice", key.start_mark)
        return super().construct_mapping(node, deep)


def read_recipe(path: str) -> Any:
    """The plain contents of a YAML file (safe loader). Raises UsageError when it is missing, no YAML, or has a key
    twice."""
    try:
        return _Loader(Path(path).read_text(encoding="utf-8")).get_single_data() or {}
    except OSError as error:
        raise UsageError(f"--config {path}: {error.strerror or error}") from None
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise UsageError(f"--config {path} is not valid YAML: {' '.join(str(error).split())}") from None


def split_tokens(
    argv: Sequence[str], positional: Sequence[str], keys: Mapping[str, Any]
) -> tuple[list[str], list[tuple[str, str]]]:
    """(recipe paths, (key, value) pairs) of a command line: `--key value`, `--key=value`, `key=value`, `--flag`, and
    positional values, which take the names in `positional` in order; one whose type is a tuple takes all that are left."""
    recipes: list[str] = []
    pairs: list[tuple[str, str]] = []
    names, many, i = list(positional), list[str](), 0
    while i < len(argv):
        token, i = argv[i], i + 1
        name, has_value, value = token.removeprefix("--").partition("=")
        if token.startswith("--"):
            name = name.replace("-", "_")
            if not has_value:
                is_last = i == len(argv)
                if keys.get(name) is bool and (is_last or argv[i].lower() not in ("true", "false")):
                    value = "true"
                elif is_last:
                    raise UsageError(f"--{name} needs a value")
                else:
                    value, i = argv[i], i + 1
        elif names and not (has_value and name in keys):
            if typing.get_origin(keys.get(names[0])) is tuple:
                many.append(token)
                continue
            name, value = names.pop(0), token
        elif not has_value:
            raise UsageError(f"unexpected argument {token!r}; settings are written --key value or key=value")
        if name == "config":
            recipes.append(value)
        else:
            pairs.append((name, value))
    if many:
        pairs.append((names[0], json.dumps(many)))
    return recipes, pairs


def given_keys(spec: type, argv: Sequence[str]) -> dict[str, Any]:
    """Dotted key -> value of everything that recipes and command line say; the last one counts."""
    plain = [a for a in argv if a not in ("--help", "-h", "--print_config", "--print-config")]
    recipes, pairs = split_tokens(plain, (), keys_of(spec, {}))
    said: dict[str, Any] = {}
    for path in recipes:
        recipe = read_recipe(path)
        said |= flatten(recipe) if isinstance(recipe, dict) else {}
    return said | dict(pairs)


def named_keys(spec: type, argv: Sequence[str], positional: Sequence[str] = ()) -> frozenset[str]:
    """Dotted keys that command line and recipes name on purpose, be the values the defaults or not. A recipe with every
    key is a printed one (`--print_config`), which means none of them in particular."""
    keys = keys_of(spec, {})
    recipes, pairs = split_tokens(argv, positional, keys)
    named = {name for name, _ in pairs}
    for path in recipes:
        said = flatten(read_recipe(path))
        if not keys.keys() <= said.keys():
            named.update(said)
    return frozenset(named)


def preset_defaults(said: Mapping[str, Any], presets: Mapping[str, Any], usual: str, section: str) -> dict[str, Any]:
    """Dotted defaults of a section, those of the preset that was named (`preset`), or of the usual one.

    Raises UsageError for a preset that is not in the table.
    """
    preset = said.get("preset", usual)
    if preset not in presets:
        near = nearest(str(preset), list(presets))
        raise UsageError(f"unknown preset {preset!r}; nearest: {near!r} (known: {', '.join(presets)})")
    return {f"{section}.{f.name}": getattr(presets[preset], f.name) for f in fields(presets[preset])}


def flatten(value: Any, prefix: str = "") -> dict[str, Any]:
    """Dotted key -> plain value, over nested dataclasses or dicts, in order."""
    if is_dataclass(value) and not isinstance(value, type):
        value = {f.name: getattr(value, f.name) for f in fields(value)}
    if not isinstance(value, dict):
        return {prefix: value}
    flat: dict[str, Any] = {}
    for key, inner in value.items():
        flat |= flatten(inner, f"{prefix}.{key}" if prefix else str(key))
    return flat


def listed(value: str, kind: Any) -> str:
    """`2,4` -> `[2,4]` where a sequence is wanted, so that lists need no brackets on a command line."""
    wants = any(typing.get_origin(k) in (tuple, list) for k in (kind, *typing.get_args(kind)))
    return f"[{value}]" if wants and not value.startswith("[") and value != "null" else value


def parse(
    spec: type[Spec],
    argv: Sequence[str],
    *,
    prog: str,
    sections: Mapping[str, type] | None = None,
    positional: Sequence[str] = (),
    description: str | None = None,
    defaults: Mapping[str, Any] | None = None,
) -> Spec:
    """An instance of the dataclass `spec` from a command line. `defaults`: dotted keys whose default is another than the
    class's (a preset's).

    Prints and exits with code 0 on `--help` and `--print_config`. Raises UsageError (one line) for an unknown key, a
    wrong type, a missing setting, or whatever `__post_init__` of a settings class refuses.
    """
    import jsonargparse  # 0.1 s that `draftsmith --help` does without

    sections = sections or {}
    keys = keys_of(spec, sections)
    wants_help = "--help" in argv or "-h" in argv
    wants_print = "--print_config" in argv or "--print-config" in argv
    rest = [a for a in argv if a not in ("--help", "-h", "--print_config", "--print-config")]
    recipes, pairs = split_tokens(rest, positional, keys)
    for path in recipes:
        recipe_keys(read_recipe(path), keys, path)
    for name, _ in pairs:
        check_key(name, keys, "the command line")

    jsonargparse.set_parsing_settings(docstring_parse_attribute_docstrings=True)
    several = [p for p in positional if typing.get_origin(keys.get(p)) is tuple]
    places = " ".join(f"<{p}> ..." if p in several else f"<{p}>" for p in positional)
    usage = f"{prog} {places} [--config FILE] [key=value ...]"
    parser = jsonargparse.ArgumentParser(prog=prog, usage=usage, description=description, exit_on_error=False)
    parser.add_argument(
        "--config", action="config", help="YAML recipe; later files and key=value override earlier ones."
    )
    parser.add_class_arguments(spec, None, skip=set(sections), sub_configs=False)
    for name, kind in sections.items():
        parser.add_class_arguments(kind, name, sub_configs=False)
    parser.set_defaults(dict(defaults or {}))
    if wants_help:
        parser.print_help()
        raise SystemExit(0)
    args = [f"--config={p}" for p in recipes] + [f"--{k}={listed(v, keys[k])}" for k, v in pairs]
    try:
        namespace = parser.parse_args(args)
        built = parser.instantiate(namespace)
        config = spec(**{f.name: built[f.name] for f in fields(spec)})  # type: ignore[arg-type]
    except (jsonargparse.ArgumentError, ValueError, TypeError) as error:
        raise UsageError(one_line(error)) from None
    if wants_print:
        print(to_yaml(config), end="")
        raise SystemExit(0)
    return config


def one_line(error: BaseException) -> str:
    text = " ".join(str(error).split()) or type(error).__name__
    return text.removeprefix("Parser key ").replace("<class '", "").replace("'>", "")


def to_yaml(config: Any) -> str:
    """The resolved settings as YAML; parsing it again gives the same settings."""

    def plain(value: Any) -> Any:
        if isinstance(value, dict):
            return {k: plain(v) for k, v in value.items()}
        return [plain(v) for v in value] if isinstance(value, (list, tuple)) else value

    return yaml.safe_dump(plain(asdict(config)), sort_keys=False)


def say_error(text: str, code: int) -> None:
    """One line on stderr. Launchers of several processes bury it and lose the code: where DRAFTSMITH_ERRORS names a file,
    both are added there, and `launch.sh` ends with them."""
    line = f"error: {text}"
    print(line, file=sys.stderr, flush=True)
    if place := os.environ.get("DRAFTSMITH_ERRORS"):
        with suppress(OSError), open(place, "a", encoding="utf-8") as file:
            file.write(f"{code} {line}\n")


def guarded(main: Callable[[], int | None]) -> int:
    """Run a command: its exit code, with one line on stderr in place of a traceback.

    2 = a wrong request (ValueError), 1 = a failure (disk, memory, network ...), 130 = Ctrl-C. DRAFTSMITH_TRACEBACK=1
    lets exceptions through.
    """
    if os.environ.get("DRAFTSMITH_TRACEBACK") == "1":
        return main() or 0
    try:
        return main() or 0
    except ValueError as error:
        say_error(one_line(error), 2)
        return 2
    except KeyboardInterrupt:
        print("stopped", file=sys.stderr)
        return 130
    except Exception as error:
        text = f"{type(error).__name__}: {one_line(error)}"
        if isinstance(error, OSError) and error.filename is not None:
            text = f"{error.filename}: {error.strerror}"
        say_error(one_line(error) if isinstance(error, Failure) else f"{text} (DRAFTSMITH_TRACEBACK=1 shows where)", 1)
        return 1
