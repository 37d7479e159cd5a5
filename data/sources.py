"""Conversations from the places people keep them: the shipped set, JSONL files, and `datasets` names.

Three record shapes are read: chat (`{"messages": [{"role", "content"}]}`), ShareGPT (`{"conversations": [{"from",
"value"}]}`), and ours (chat plus `id, category, split, truncated, ids, order, jacobi`; `draftsmith rollout` writes it).
Several files, such as the parts that several machines answered, are named by their folder or a pattern.
Nothing is dropped silently: a record that is neither shape is an error with its line number.
Tested by `pytest tests/test_data.py`.
"""

from __future__ import annotations

import glob
import gzip
import io
import json
import lzma
import zlib
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

from .jacobi_states import JacobiStates, parse_states

SHIPPED = Path(__file__).parent / "shipped" / "smollm2.jsonl.xz"
HELDOUT = 48  # conversations that a training holds out
SUFFIXES = (".jsonl", ".xz", ".gz", ".json")
ROLES = {
    "system": "system",
    "developer": "system",
    "user": "user",
    "human": "user",
    "assistant": "assistant",
    "gpt": "assistant",
    "chatgpt": "assistant",
    "bing": "assistant",
    "bard": "assistant",
    "model": "assistant",
    "tool": "tool",
    "function": "tool",
    "observation": "tool",
    "ipython": "tool",
}


@dataclass(frozen=True)
class DataConfig:
    """Where conversations come from and how long a sample may be."""

    source: str = "shipped"
    """`shipped` (our prompts, answered by SmolLM2), a file (.jsonl, .jsonl.xz, .jsonl.gz), a folder of .jsonl files or a
    pattern ("answers/part-*.jsonl"; read in sorted order, no id twice), or a `datasets` name."""
    format: Literal["auto", "messages", "sharegpt"] = "auto"
    """Record shape; `auto` looks at each record's keys."""
    split: str = "train"
    """Rows of this split: `train` or `heldout` of the shipped set, a split's name of a `datasets` source; a file whose
    rows name no split is taken whole."""
    subset: str | None = None
    """Configuration name of a `datasets` source."""
    revision: str | None = None
    """Revision of a `datasets` source; pin it to make a run repeatable."""
    max_length: int = 1024
    """Tokens of a sample. Longer conversations are cut there, without an invented end of turn; what has no supervised
    token left is dropped and counted. The export records it as the training length: prompts may be longer in serving,
    with acceptance untested beyond it."""
    limit: int | None = None
    """At most this many conversations, from the front (in the shipped set, all categories take turns, and prompts
    that the target wrote itself follow behind)."""
    keep_truncated: bool = True
    """Keep answers that were cut at the token limit while they were generated (open-ended, no end of turn)."""

    def __post_init__(self) -> None:
        if self.max_length < 2:
            raise ValueError(f"data.max_length = {self.max_length}: a sample needs at least 2 tokens")
        if self.limit is not None and self.limit < 1:
            raise ValueError(f"data.limit = {self.limit}: give a positive count, or null for all")
        if self.source == "shipped" or Path(self.source).suffix in SUFFIXES:
            for name in ("subset", "revision"):
                if (value := getattr(self, name)) is not None:
                    raise ValueError(f"data.{name} = {value!r} is for `datasets` names; {self.source!r} has none")


@dataclass(frozen=True)
class Conversation:
    """Chat messages (`role` in system, user, assistant, tool; other keys are handed to the chat template as they are).

    `truncated`: the last answer was cut at a token limit. `answer_ids`: the last answer as the model generated it, one
    for one, with its end-of-turn token if the model gave one; None = tokenise its text. `answer_order`: per id, the
    decoding pass in which a denoiser decided it; None = not stored. `jacobi`: the last answer's Jacobi states (only with
    ids); None = not stored.
    """

    id: str
    messages: list[dict[str, Any]]
    category: str = ""
    split: str = ""
    truncated: bool = False
    answer_ids: list[int] | None = None
    answer_order: list[int] | None = None
    jacobi: JacobiStates | None = None


def load_conversations(cfg: DataConfig) -> list[Conversation]:
    """Read `cfg.source`, in its own order. Ids are made unique (`#2`, ... is added to repeated ones) within a file.

    Raises:
        ValueError: no such source or split, a record of unknown shape, an id twice in several files, or nothing left.
    """
    kept: list[Conversation] = []
    seen: Counter[str] = Counter()
    splits: set[str] = set()
    files = _files(cfg.source)
    for where, record in _records(cfg, files):
        conv = parse_record(record, where, cfg.format)
        splits.add(conv.split)
        if (conv.split and conv.split != cfg.split) or (conv.truncated and not cfg.keep_truncated):
            continue
        seen[conv.id] += 1
        if seen[conv.id] > 1 and len(files) > 1:
            raise ValueError(
                f"{where}: id {conv.id!r} was read before; files that are read together (data.source = {cfg.source!r}) must "
                "not answer a conversation twice"
            )
        if seen[conv.id] > 1:
            conv = replace(conv, id=f"{conv.id}#{seen[conv.id]}")
        kept.append(conv)
        if len(kept) == cfg.limit:
            break
    if not kept:
        found = ", ".join(sorted(splits - {""})) or "none"
        raise ValueError(f"data.source = {cfg.source!r} has no conversation with split {cfg.split!r}; splits: {found}")
    return kept


def split_conversations(cfg: DataConfig, heldout: int) -> tuple[list[Conversation], list[Conversation]]:
    """(training, held out), as trainings and captures of their states take them. The shipped set has a split of its own; of
    any other source every tenth conversation is held out, at most `heldout` of them, none of fewer than 20.

    Raises:
        ValueError: see `load_conversations`.
    """
    talks = load_conversations(cfg)
    if cfg.source == "shipped":
        held = load_conversations(replace(cfg, split="heldout", limit=None))
        step = max(len(held) // max(heldout, 1), 1)  # spread over the categories
        return talks, held[::step][:heldout]
    held = talks[::10][:heldout] if len(talks) >= 20 else []
    names = {id(t) for t in held}
    return [t for t in talks if id(t) not in names], held


def parse_record(record: Any, where: str, shape: str = "auto") -> Conversation:
    """One record in any of the three shapes; `where` (file and line) names it in errors and is the id of last resort.

    Raises:
        ValueError: unknown shape, role or content.
    """
    if not isinstance(record, dict):
        raise ValueError(f"{where}: expected an object with `messages` or `conversations`, got {type(record).__name__}")
    key = {"messages": "messages", "sharegpt": "conversations"}.get(shape) or next(
        (k for k in ("messages", "conversations") if record.get(k)), None
    )
    turns = record.get(key) if key else None
    if not isinstance(turns, list) or not turns:
        raise ValueError(f"{where}: no list under `messages` or `conversations`; keys are {', '.join(sorted(record))}")
    messages = [_message(turn, where) for turn in turns]
    ids = record.get("ids")
    if ids is not None and not (isinstance(ids, list) and all(isinstance(i, int) and i >= 0 for i in ids)):
        raise ValueError(f"{where}: `ids` must be a list of token ids")
    order = record.get("order")
    if order is not None and not (
        isinstance(order, list) and ids and len(order) == len(ids) and all(isinstance(n, int) and n >= 0 for n in order)
    ):
        raise ValueError(f"{where}: `order` must hold one decoding pass (0, 1, ...) per token of `ids`")
    return Conversation(
        id=str(record.get("id") or record.get("conversation_id") or where),
        messages=messages,
        category=str(record.get("category") or ""),
        split=str(record.get("split") or ""),
        truncated=bool(record.get("truncated", False)),
        answer_ids=ids,
        answer_order=order,
        jacobi=None if record.get("jacobi") is None else parse_states(record["jacobi"], ids, where),
    )


def read_jsonl(path: Path) -> Iterator[tuple[str, Any]]:
    """(file:line, record) of a JSON-lines file, plain or compressed (.xz, .gz); blank lines are skipped."""
    number = 0
    with _open_text(path) as lines:
        try:
            for number, line in enumerate(lines, 1):
                if line.strip():
                    yield f"{path.name}:{number}", _record(line, f"{path.name}:{number}")
        except (UnicodeDecodeError, EOFError, gzip.BadGzipFile, zlib.error, lzma.LZMAError) as error:
            kind = f"{path.suffix[1:]} file" if path.suffix in (".gz", ".xz") else "UTF-8 text"
            raise ValueError(f"{path.name}: no whole {kind} behind line {number} ({error})") from None


def _record(line: str, where: str) -> Any:
    try:
        record = json.loads(line)
        json.dumps(record, ensure_ascii=False).encode()
    except json.JSONDecodeError as error:
        raise ValueError(f"{where}: not JSON ({error.msg})") from None
    except RecursionError:
        raise ValueError(f"{where}: JSON is nested too deeply") from None
    except UnicodeEncodeError:
        raise ValueError(f"{where}: a text has half of a surrogate pair, which no tokenizer can read") from None
    return record


def _open_text(path: Path) -> io.TextIOBase:
    if path.suffix == ".xz":
        return lzma.open(path, "rt", encoding="utf-8")
    if path.suffix == ".gz":
        return gzip.open(path, "rt", encoding="utf-8")
    return path.open(encoding="utf-8")


def _files(source: str) -> list[Path]:
    """The files that a source names, sorted; none for a `datasets` name, to which folders without .jsonl files count."""
    if source == "shipped":
        return [SHIPPED]
    path = Path(source).expanduser()
    if path.is_dir():
        return sorted(p for p in path.iterdir() if p.name.endswith((".jsonl", ".jsonl.xz", ".jsonl.gz")))
    if path.is_file() and path.suffix in SUFFIXES:
        return [path]
    if path.suffix not in SUFFIXES and not glob.has_magic(source):
        return []
    found = sorted(p for p in map(Path, glob.glob(str(path))) if p.is_file())
    if not found:
        raise ValueError(f"data.source = {source!r}: no such file")
    return found


def _records(cfg: DataConfig, files: list[Path]) -> Iterable[tuple[str, Any]]:
    if files:
        return (line for path in files for line in read_jsonl(path))
    from datasets import load_dataset

    try:
        rows = load_dataset(cfg.source, cfg.subset, split=cfg.split, revision=cfg.revision)
    except Exception as error:  # the library raises a dozen kinds; all mean the same here
        reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise ValueError(f"data.source = {cfg.source!r} (split {cfg.split!r}) could not be loaded: {reason}") from error
    name = cfg.source.rstrip("/").rsplit("/", 1)[-1]
    return ((f"{name}:{i}", _without_split(row)) for i, row in enumerate(rows))


def _without_split(row: dict[str, Any]) -> dict[str, Any]:
    return {k: v for k, v in row.items() if k != "split"}  # `datasets` has chosen the split already


def _message(turn: Any, where: str) -> dict[str, Any]:
    if not isinstance(turn, dict):
        raise ValueError(f"{where}: a turn must be an object, got {type(turn).__name__}")
    role = turn.get("role", turn.get("from"))
    if role not in ROLES:
        raise ValueError(f"{where}: role {role!r} is not known; allowed: {', '.join(ROLES)}")
    content = turn.get("content", turn.get("value"))
    if isinstance(content, list):  # parts, as OpenAI writes them
        if any(not isinstance(part, dict) or not isinstance(part.get("text"), str) for part in content):
            raise ValueError(f"{where}: only text parts are supported in `content`")
        content = "".join(part["text"] for part in content)
    if content is None and turn.get("tool_calls"):
        content = ""
    if not isinstance(content, str):
        raise ValueError(f"{where}: `content` of a {role} turn must be text, got {type(content).__name__}")
    extra = {k: v for k, v in turn.items() if k not in ("role", "from", "content", "value") and v is not None}
    return {"role": ROLES[role], "content": content, **extra}
