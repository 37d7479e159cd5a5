"""The model card of an export, written from the folder alone: `config.json`, `run.yaml`, and `report.json` if it exists.

Everything that leaves the machine passes through `scrub`: secrets, and paths of the local disk. The serve commands
come from the exporters' table, so the card says exactly what the engine was tested with (tests/bench/engine_vllm.py).

Tests: tests/test_export.py, tests/test_security.py (planted token).
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml
from jinja2 import Environment, FileSystemLoader, StrictUndefined

from .exporters.folder import CARD, CONFIG, REPORT, RUN, read_json, write_file

# Of denoisers that recommend nothing: Fast-dLLM v1's (arXiv:2505.22618).
DECODE: dict[str, Any] = {"strategy": "threshold", "settings": {"threshold": 0.9}}
HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")
KNOWN_TARGETS = {
    "smollm2": ("HuggingFaceTB/SmolLM2-135M-Instruct", "apache-2.0"),
}
SECRET = re.compile(
    r"\bhf_[A-Za-z0-9]{16,}"  # Hugging Face
    r"|\bsk-[A-Za-z0-9_-]{16,}"  # OpenAI-compatible servers
    r"|\bgh[pousr]_[A-Za-z0-9]{20,}|\bgithub_pat_\w{20,}"
    r"|\bAKIA[A-Z0-9]{16}"
    r"|\beyJ[A-Za-z0-9_-]{10,}\.[A-Za-z0-9_-]{10,}\.[A-Za-z0-9_-]*"  # JSON web tokens
    r"|(?<=Bearer )[A-Za-z0-9._~+/-]{8,}"
    r"|(?<=://)[^\s/@'\"]+:[^\s/@'\"]+(?=@)"  # user:password@host
)
NAMED_SECRET = re.compile(
    r"(?i)(\b[\w-]*(?:secret|password|passwd|api[_-]?key|access[_-]?key|credentials?)[\"']?\s*[:=]\s*[\"']?"
    r"(?=[^\s\"',}<]{8})|\b[\w-]*token[\"']?\s*[:=]\s*[\"']?(?=[^\s\"',}<]{16})(?=[^\s\"',}<]*\d))"
    r"(?!\d+(?:\.\d+)?(?:[\s,}\]]|$)|[\[{])[^\s\"',}<]+"
)
PATH = re.compile(r"(?<![\w:/.~<>-])(?:~|file:/{2,3}|[A-Za-z]:)?(?:[/\\][\w.@+-]+(?: [\w.@+-]+)*)+[/\\]?")
ROOTS = ("home", "root", "Users", "tmp", "var", "mnt", "data", "work", "opt", "usr", "scratch", "workspace", "private")
REMOVED = "[removed]"


def scrub(text: str) -> str:
    """Text without secrets and without local folders (a path keeps its last part).

    Secrets are recognised by form, by the name beside them, and as the values of this process's own environment
    variables that are named like one.
    """
    return PATH.sub(_last_part, _without_secrets(text))


def _without_secrets(text: str) -> str:
    for value in _environment_secrets():
        text = text.replace(value, REMOVED)
    text = SECRET.sub(REMOVED, text)
    return NAMED_SECRET.sub(lambda m: m[1] + REMOVED, text)


def scrub_values(value: Any) -> Any:
    """`scrub` on every string in a structure of dicts and lists; a value whose key names a secret is removed."""
    if isinstance(value, str):
        return scrub(value)
    if isinstance(value, Mapping):
        return {str(k): REMOVED if _names_secret(str(k), v) else scrub_values(v) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return [scrub_values(item) for item in value]
    return value


def leaks(text: str) -> list[str]:
    """What `scrub` would take out, as descriptions that do not repeat it: "line 3: a secret"."""
    found = []
    for number, line in enumerate(text.splitlines(), 1):
        if line != scrub(line):
            kind = "a secret" if line != _without_secrets(line) else "a local path"
            found.append(f"line {number}: {kind}")
    return found


def _environment_secrets() -> list[str]:
    named = re.compile(r"(?i)token|secret|passw|api_?key|credential")
    return [v for k, v in os.environ.items() if named.search(k) and len(v) >= 8 and not v.isdigit() and "/" not in v]


def _names_secret(key: str, value: Any) -> bool:
    named = re.search(r"(?i)(^|_)(token|secret|password|passwd|api_?key|credentials?)$", key)
    return bool(named) and isinstance(value, str) and len(value) >= 8


def _last_part(match: re.Match[str]) -> str:
    path = match[0]
    parts = [p for p in re.split(r"[/\\]", path) if p]
    local = path.startswith(("~", "file:")) or path[1:2] == ":" or (len(parts) > 1 and parts[0] in ROOTS)
    return parts[-1] if local else path


def hub_id_and_licence(name: str, licence: str | None) -> tuple[str | None, str | None]:
    """The target's Hub id (None for a local folder) and licence, where they are known."""
    if name in KNOWN_TARGETS:
        return KNOWN_TARGETS[name][0], licence or KNOWN_TARGETS[name][1]
    return (name if HUB_ID.fullmatch(name) else None), licence


def render_card(folder: Path, draft: str = "PATH_OR_ID_OF_THIS_FOLDER") -> str:
    """The card's text. `draft` is the name that serve commands use for this folder: a Hub id once it has one."""
    from ..models.diffusion import ObjectiveConfig
    from ..models.jacobi import BRANCHES
    from .exporters import EXPORTERS, SCHEMAS  # the tables import this module's neighbours
    from .exporters.layout import measure

    config = read_json(folder / CONFIG)
    ours = config["draftsmith"]
    run = yaml.safe_load((folder / RUN).read_text(encoding="utf-8")) if (folder / RUN).exists() else {}
    report = read_json(folder / REPORT) if (folder / REPORT).exists() else None
    base, licence = hub_id_and_licence(ours["target"]["name"], run.get("licence"))
    facts: dict[str, Any] = {
        "ours": ours,
        "config": config,
        "run": run,
        "base": base,
        "target": base or ours["target"]["name"],
        "licence": licence,
        "draft": draft,
        "recipe": yaml.safe_dump(run.get("config") or {}, sort_keys=False).strip(),
    }
    template = "denoiser_card.md.j2" if "kind" in ours else "card.md.j2"
    if ours.get("kind") == "consistency":
        template = "consistency_card.md.j2"
        facts |= {"report": report, "branches": BRANCHES}
    elif "kind" in ours:
        schema = SCHEMAS[ours["schema"]] if ours["kind"] == "merged" else None
        facts |= {
            "report": report,
            "decode": ours.get("decode") or DECODE,
            "form": schema.form if schema else "trained tensors alone, beside the model they belong to",
            "loads": schema.loads if schema else "draftsmith",
            "serve": schema.serve(draft) if schema else {"to measure it": measure(draft, "tasks")},
            "counted_from": ObjectiveConfig(**ours["objective"]).decoded_from,
        }
    else:
        exporter = EXPORTERS[ours["method"]]
        k = (ours.get("estimated") or {}).get("k") or ours.get("depths") or 3
        facts |= {
            "rows": (report or {}).get("rows", []),
            "runner": (report or {}).get("run", {}).get("runner"),
            "k": k,
            "form": exporter.form,
            "loads": exporter.loads,
            "holds": exporter.holds,
            "serve": exporter.serve(config, facts["target"], draft, k),
        }
    environment = Environment(
        loader=FileSystemLoader(Path(__file__).parent), undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    environment.filters |= {"fact": _fact, "short": _short}
    return scrub(environment.get_template(template).render(facts))


def _short(value: Any) -> str:
    """A measured number, or a dash."""
    return f"{value:.2f}" if isinstance(value, int | float) else "–"


def _fact(value: Any) -> str:
    """One fact of a run in a line: numbers short, mappings as a list of pairs."""
    if isinstance(value, Mapping):
        return ", ".join(f"{name} {_fact(item)}" for name, item in value.items())
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def write_card(folder: Path, draft: str = "PATH_OR_ID_OF_THIS_FOLDER") -> None:
    """(Re)write README.md of an export, for instance after a report was put beside it."""
    write_file(folder / CARD, render_card(folder, draft))
