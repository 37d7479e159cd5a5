"""Tasks of parallel decoding: right answers pass, planted faults do not, the same examples everywhere, two forms alike."""

from itertools import permutations

import pytest

from draftsmith.data.encode import encode
from draftsmith.data.sources import Conversation
from draftsmith.data.tasks import (
    END,
    HELD_OUT,
    IDS,
    TASKS,
    VOCABULARY,
    chat,
    examples,
    is_held_out,
    prompt_ids,
    sample_of,
    tokenizer,
    valid,
    words,
    words_in,
    words_of,
)

BLOCK = 8


@pytest.mark.parametrize("task", TASKS)
def test_answers_are_right_and_fill_their_blocks(task):
    for example in examples(task, 0, range(300)):
        assert valid(task, example.asked, example.answer)
        assert len(prompt_ids(example)) % BLOCK == 0
        assert (len(example.answer) + 1) % BLOCK == (6 if task == "replace" else 0)
        assert not is_held_out(task, example.asked)


@pytest.mark.parametrize("task", TASKS)
def test_planted_faults_are_found(task):
    """A word left out, said twice, changed into one that stands nowhere, or two unlike ones swapped."""
    for example in examples(task, 1, range(100)):
        asked, answer = example.asked, list(example.answer)
        for at in range(len(answer)):
            assert not valid(task, asked, answer[:at] + answer[at + 1 :])
            assert not valid(task, asked, answer[: at + 1] + answer[at:])
            assert not valid(task, asked, [*answer[:at], "<unk>", *answer[at + 1 :]])
        assert not valid(task, asked, ())
        if task not in ("shuffle", "insert"):  # where swaps may be right as well
            swapped = [*answer]
            at = next((i for i in range(len(answer) - 1) if answer[i] != answer[i + 1]), None)
            if at is not None:
                swapped[at], swapped[at + 1] = answer[at + 1], answer[at]
                assert not valid(task, asked, swapped)


def test_checkers_accept_every_right_answer_and_no_mixture():
    items = tuple("abca")
    places = {(*items[:at], "x", *items[at:]) for at in range(5)}
    right = {answer for answer in permutations((*items, "x")) if valid("insert", ("x", *items), answer)}
    assert right == places
    assert not valid("insert", ("x", *"abcd"), tuple("xabxc"))  # two places mixed
    assert not valid("insert", ("x", *"abcd"), tuple("axbxcd"))
    orders = list(permutations("abc"))
    assert [o for o in orders if valid("shuffle", tuple("abc"), o)] == orders[1:]
    assert not valid("shuffle", tuple("abc"), tuple("bca"[:2] + "b"))
    assert valid("replace", ("a", "b", *"aaca"), tuple("bbcb")) and not valid(
        "replace", ("a", "b", *"aaca"), tuple("bbca")
    )


def test_latin_squares_by_hand():
    asked = (*"abcd", "b", "_", "_")
    assert valid("latin", asked, tuple("badc;cdab;dcba;"))
    assert valid("latin", asked, tuple("badc;dcba;cdab;"))
    assert not valid("latin", asked, tuple("cdab;badc;dcba;"))  # another cell than the given one
    assert not valid("latin", asked, tuple("badc;cdab;dcab;"))  # a column with two of a kind
    assert not valid("latin", asked, tuple("badc;cdab;ccba;"))  # a row with two of a kind
    assert not valid("latin", asked, tuple("badccdab;dcba;;"))


def test_every_choice_is_offered():
    """What the training data leave open is open: each place, each cut, several squares for one prompt."""
    at = {
        next(i for i in range(15) if e.answer[i + 1 :] == e.asked[i + 1 :]) for e in examples("insert", 0, range(400))
    }
    assert at == set(range(15))
    cuts = {e.asked.index(e.answer[0]) for e in examples("shuffle", 0, range(100))}
    assert cuts == {2, 3, 4, 5}
    squares: dict[tuple[str, ...], set[tuple[str, ...]]] = {}
    for e in examples("latin", 0, range(3000)):
        squares.setdefault(e.asked, set()).add(e.answer)
    assert max(map(len, squares.values())) > 10


@pytest.mark.parametrize("task", TASKS)
def test_an_example_is_a_function_of_its_key(task):
    some = examples(task, 3, range(50))
    assert some == examples(task, 3, range(50)) and some[10:20] == examples(task, 3, range(10, 20))
    assert examples(task, 3, [7, 2]) == [some[7], some[2]]
    assert some != examples(task, 4, range(50))
    held = examples(task, 3, range(50), held_out=True)
    assert all(is_held_out(task, e.asked) for e in held) and not {e.asked for e in held} & {e.asked for e in some}


def test_first_examples_are_these():
    """Frozen: figures of different versions speak of the same prompts."""
    got = {task: " ".join((*words(e), "=", *e.answer)) for task in TASKS for e in examples(task, 0, [0])}
    assert got == FIRST
    with pytest.raises(ValueError, match=r"sudoku.*choose one of copy"):
        examples("sudoku", 0, [0])


FIRST = {
    "copy": "copy h h g g e c e a h i g c k l d = h h g g e c e a h i g c k l d",
    "reverse": "reverse h a a a a b g = g b a a a a h",
    "replace": "replace c j f g e g i d h a c c g j g = f g e g i d h a j j g j g",
    "sort": "sort e j h b c e a = a b c e e h j",
    "insert": "insert b f g b c j d k h g c a l c k = f g b c j d k h g b c a l c k",
    "shuffle": "shuffle f e c h g j l = j l f e c h g",
    "latin": "latin d c a b _ b _ = a b d c ; b d c a ; c a b d ;",
}


def test_symbols_through_the_tokenizer_and_back():
    made = tokenizer()
    assert made.get_vocab() == IDS and len(made) == len(VOCABULARY) and HELD_OUT == 10
    assert VOCABULARY[made.eos_token_id] == END and made.mask_token_id != made.pad_token_id
    for task in TASKS:
        for e in examples(task, 0, range(5)):
            sample = sample_of(e, 3)
            ids = sample.ids.tolist()
            answer = ids[len(prompt_ids(e)) :]
            assert words_of(answer) == e.answer == words_of([*answer, IDS["a"]]) and sample.sample_id == 3
            encoded = encode(Conversation("x", chat(e, symbols=True)), made, 3, 64)
            assert encoded.ids.tolist() == ids and encoded.supervised.tolist() == sample.supervised.tolist()


def test_chat_text_is_read_back():
    for task in TASKS:
        for e in examples(task, 0, range(3)):
            question, answer = (m["content"] for m in chat(e))
            assert valid(task, e.asked, words_in(answer)) and all(word in question for word in e.asked)
    assert words_in("A, b, c.\n") == ("a", "b", "c") and words_in("a b; c") == ("a", "b", ";", "c")
    assert not valid("copy", ("a", "b"), words_in("Sure: a b"))
