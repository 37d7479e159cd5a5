"""Small tasks that show what parallel decoding breaks, after ParallelBench (arXiv:2510.04767), in our own words.

A model that fills several places at once draws each from its own marginal. Where the tokens of an answer depend on each
other beyond what the prompt says, the parts may then belong to different answers. Each task says how far they depend;
where many answers are right, it has a checker and no reference. An example is a function of (task, seed, number), on
every machine. One prompt in ten is held out, by a hash of the prompt, whatever the seed: training never sees it.

Two forms of the same example: a few symbols over a vocabulary of 25 ids, for models trained from scratch, and chat text
for real models. In symbols, a prompt has 8 or 16 tokens and an answer with its end 8 or 16 (`replace`: 14): whole blocks
of 8, because else the largest number of tokens per forward were set by the rest of the last block.

    for example in examples("insert", seed=0, numbers=range(3)): print(words(example), example.answer)
    pytest tests/test_tasks.py
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from hashlib import sha256
from itertools import permutations, product
from typing import Any

import torch

from ..kernels import rng
from .encode import Sample

Words = tuple[str, ...]

LETTERS: Words = tuple("abcdefghijkl")
CELLS: Words = LETTERS[:4]  # of latin squares
BLANK, ROW = "_", ";"
DRAWS = 20  # random numbers behind an example
HELD_OUT = 10  # one prompt in so many


@dataclass(frozen=True)
class Task:
    """`make(dice)` gives the prompt's words and one right answer, `valid(asked, answer)` says whether an answer is right,
    `text(asked)` puts the prompt in words for a chat model."""

    make: Callable[[Iterator[float]], tuple[Words, Words]]
    valid: Callable[[Words, Words], bool]
    text: Callable[[Words], str]
    answers: str
    """How many answers are right."""
    depends: str
    """How far the tokens of an answer depend on each other, given the prompt."""


@dataclass(frozen=True)
class Example:
    """One example: the words of its prompt without the task's name, and one right answer (of several, perhaps)."""

    task: str
    number: int
    asked: Words
    answer: Words


def examples(task: str, seed: int, numbers: Iterable[int], *, held_out: bool = False) -> list[Example]:
    """The examples of these numbers, of the training prompts or of those held out.

    Raises ValueError for a task that is not in TASKS.
    """
    if task not in TASKS:
        raise ValueError(f"task {task!r}: choose one of {', '.join(TASKS)}")
    key = rng.signed(int.from_bytes(sha256(f"{task} {seed}".encode()).digest()[:8]))
    numbers = list(numbers)
    found: dict[int, Example] = {}
    attempt = 0
    while left := [n for n in numbers if n not in found]:
        at_N1 = torch.tensor(left)[:, None]
        draws = rng.uniform(key, rng.NOISE, at_N1, round=attempt, node=torch.arange(DRAWS)).tolist()
        for number, dice in zip(left, draws, strict=True):
            asked, answer = TASKS[task].make(iter(dice))
            if is_held_out(task, asked) == held_out:
                found[number] = Example(task, number, asked, answer)
        attempt += 1
    return [found[n] for n in numbers]


def is_held_out(task: str, asked: Words) -> bool:
    """Whether a prompt belongs to those that training never sees."""
    return int.from_bytes(sha256(" ".join((task, *asked)).encode()).digest()[:4]) % HELD_OUT == 0


def valid(task: str, asked: Sequence[str], answer: Sequence[str]) -> bool:
    """Whether an answer (words, without its end) is right."""
    return TASKS[task].valid(tuple(asked), tuple(answer))


# The tasks


def _pick(dice: Iterator[float], n: int) -> int:
    return int(next(dice) * n)


def _letters(dice: Iterator[float], n: int) -> Words:
    return tuple(LETTERS[_pick(dice, len(LETTERS))] for _ in range(n))


def _distinct(dice: Iterator[float], n: int) -> Words:
    left = list(LETTERS)
    return tuple(left.pop(_pick(dice, len(left))) for _ in range(n))


def _copy(dice: Iterator[float]) -> tuple[Words, Words]:
    items = _letters(dice, 15)
    return items, items


def _reverse(dice: Iterator[float]) -> tuple[Words, Words]:
    items = _letters(dice, 7)
    return items, items[::-1]


def _sort(dice: Iterator[float]) -> tuple[Words, Words]:
    items = _letters(dice, 7)
    return items, tuple(sorted(items))


def _insert(dice: Iterator[float]) -> tuple[Words, Words]:
    new, *items = _letters(dice, 15)
    at = _pick(dice, 15)
    return (new, *items), (*items[:at], new, *items[at:])


def _inserted(asked: Words, answer: Words) -> bool:
    new, items = asked[0], asked[1:]
    return any(answer == (*items[:at], new, *items[at:]) for at in range(len(items) + 1))


def _replace(dice: Iterator[float]) -> tuple[Words, Words]:
    old, new, *items = _letters(dice, 15)
    items[_pick(dice, len(items))] = old  # there is always one to replace
    asked = (old, new, *items)
    return asked, _replaced(asked)


def _replaced(asked: Words) -> Words:
    old, new, *items = asked
    return tuple(new if item == old else item for item in items)


def _shuffle(dice: Iterator[float]) -> tuple[Words, Words]:
    """A cut near the middle, its halves swapped: of all orders these are easily learnt, and every other one is right."""
    items = _distinct(dice, 7)
    cut = 2 + _pick(dice, 4)
    return items, items[cut:] + items[:cut]


def _reordered(asked: Words, answer: Words) -> bool:
    return answer != asked and sorted(answer) == sorted(asked)


def _latin(dice: Iterator[float]) -> tuple[Words, Words]:
    squares = _squares()
    square = squares[_pick(dice, len(squares))]
    column = tuple(row[0] if next(dice) < 0.5 else BLANK for row in square[1:])
    return square[0] + column, tuple(word for row in square[1:] for word in (*row, ROW))


@lru_cache(maxsize=1)
def _squares() -> list[tuple[Words, ...]]:
    """All 576 latin squares of four symbols."""
    rows = list(permutations(CELLS))
    return [
        square for square in product(rows, repeat=4) if all(len({*column}) == 4 for column in zip(*square, strict=True))
    ]


def _is_latin(asked: Words, answer: Words) -> bool:
    if len(answer) != 15 or answer[4::5] != (ROW,) * 3:
        return False
    square = (asked[:4], answer[:4], answer[5:9], answer[10:14])
    given = all(want in (BLANK, row[0]) for want, row in zip(asked[4:], square[1:], strict=True))
    return given and all({*line} == {*CELLS} for line in (*square, *zip(*square, strict=True)))


def _of_list(sentence: str, first: int = 0) -> Callable[[Words], str]:
    """Words of a prompt whose first words stand in the sentence and whose others are the list."""
    return lambda asked: f"{sentence.format(*asked[:first])}: {' '.join(asked[first:])}"


def _latin_text(asked: Words) -> str:
    return (
        f"A latin square has each of {' '.join(CELLS)} once in every row and column. Its first row is: "
        f"{' '.join(asked[:4])}. The other rows begin with: {' '.join(asked[4:])} ({BLANK} = choose yourself). Write the "
        f"three other rows, each ended by {ROW}"
    )


TASKS: dict[str, Task] = {
    "copy": Task(
        _copy,
        lambda asked, answer: answer == asked,
        _of_list("Repeat this list"),
        "one",
        "not at all: each token is one of the prompt's",
    ),
    "reverse": Task(
        _reverse,
        lambda asked, answer: answer == asked[::-1],
        _of_list("Write this list in reverse order"),
        "one",
        "not at all: each token is one of the prompt's",
    ),
    "replace": Task(
        _replace,
        lambda asked, answer: answer == _replaced(asked),
        _of_list("Replace every {} by {} in this list", 2),
        "one",
        "not at all: each token is a function of one of the prompt's",
    ),
    "sort": Task(
        _sort,
        lambda asked, answer: answer == tuple(sorted(asked)),
        _of_list("Sort this list by the alphabet"),
        "one",
        "not beyond the prompt, but each token needs the whole of it; once neighbours are known, few are left to choose",
    ),
    "insert": Task(
        _insert,
        _inserted,
        _of_list("Insert {} once, wherever you like, into this list", 1),
        "15 places",
        "by one choice: all tokens behind the place are shifted by it, so two places mixed give a wrong list",
    ),
    "shuffle": Task(
        _shuffle,
        _reordered,
        _of_list("Write the items of this list in another order"),
        "5,039 orders (the training data: 4 of them)",
        "all on all: no item may come twice, and not all may stay where they are",
    ),
    "latin": Task(
        _latin,
        _is_latin,
        _latin_text,
        "1 to 24 squares",
        "each cell on its row and its column: two choices made at once may clash, here or in a later row",
    ),
}


# In symbols

PAD, END, MASK = "<pad>", "<end>", "<mask>"
VOCABULARY: Words = (PAD, END, MASK, *TASKS, *LETTERS, BLANK, ROW, "<unk>")
IDS = {word: i for i, word in enumerate(VOCABULARY)}


def words(example: Example) -> Words:
    """The prompt in symbols: the task's name, then what is asked."""
    return (example.task, *example.asked)


def prompt_ids(example: Example) -> list[int]:
    """Token ids of the prompt in symbols."""
    return [IDS[word] for word in words(example)]


def sample_of(example: Example, sample_id: int, answer: Sequence[str] | None = None) -> Sample:
    """The example in symbols as a training sample, with its own answer or another one, and the end."""
    prompt = prompt_ids(example)
    ids = torch.tensor([*prompt, *(IDS[word] for word in answer or example.answer), IDS[END]])
    return Sample(sample_id, ids, torch.arange(len(ids)) >= len(prompt), category=example.task)


def words_of(ids: Sequence[int]) -> Words:
    """The answer in generated ids, up to its end."""
    found = [VOCABULARY[i] for i in ids]
    return tuple(found[: found.index(END)] if END in found else found)


def tokenizer() -> Any:
    """A tokenizer of the symbols, separated by spaces; with a chat template in which a prompt is what `words` gives."""
    from tokenizers import AddedToken, Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    inner = Tokenizer(models.WordLevel(dict(IDS), unk_token="<unk>"))
    inner.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    inner.add_special_tokens([AddedToken(word, special=True, normalized=False) for word in (PAD, END, MASK)])
    made = PreTrainedTokenizerFast(
        tokenizer_object=inner, unk_token="<unk>", pad_token=PAD, eos_token=END, mask_token=MASK
    )
    made.chat_template = (
        "{% for m in messages %}{{ m['content'] + ' ' }}"
        "{% if m['role'] == 'assistant' %}{{ '" + END + " ' }}{% endif %}{% endfor %}"
    )
    return made


# In words


def chat(example: Example, *, symbols: bool = False) -> list[dict[str, str]]:
    """The example as a conversation: question in words (or in symbols), and its answer."""
    asked = " ".join(words(example)) if symbols else TASKS[example.task].text(example.asked)
    return [{"role": "user", "content": asked}, {"role": "assistant", "content": " ".join(example.answer)}]


def words_in(text: str) -> Words:
    """The answer in a chat model's text: single letters, blanks and row ends, whatever punctuation is between. Text with
    other words in it is no answer."""
    pieces = re.findall(r"[^\s,.:|]+", text.replace(ROW, f" {ROW} "))
    return tuple(piece.lower() for piece in pieces)
