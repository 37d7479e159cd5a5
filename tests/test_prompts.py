"""What the shipped prompt set promises: ten categories, two splits without overlap, answers that fit.

Run with `pytest tests/test_prompts.py`.
"""

import json
import lzma
import re
from collections import Counter
from pathlib import Path

import pytest
import yaml

from draftsmith.data import prompts as module
from draftsmith.data.prompts import PER_CATEGORY, Prompt, expand

ANSWERS = module.SHIPPED / "smollm2.jsonl.xz"
CATEGORIES = {
    "chat", "writing", "reasoning", "maths", "code",
    "extraction", "translation", "summarising", "question_answering", "edit",
}  # fmt: skip
LIMITS = {160, 128, 96}  # tokens after which an answer was cut


def eight_grams(text: str) -> set[tuple[str, ...]]:
    words = re.findall(r"\w+", text.lower())
    return {tuple(words[i : i + 8]) for i in range(len(words) - 7)}


@pytest.fixture(scope="module")
def prompts() -> list[Prompt]:
    return expand()


@pytest.fixture(scope="module")
def answers() -> list[dict]:
    with lzma.open(ANSWERS, "rt", encoding="utf-8") as lines:
        return [json.loads(line) for line in lines]


def split(prompts: list[Prompt], name: str) -> list[Prompt]:
    return [p for p in prompts if p.split == name]


def test_counts(prompts):
    counts = Counter((p.category, p.id.split("-")[1], p.split) for p in prompts)
    parts = {"train": "train", "wide": "train", "heldout": "heldout"}
    assert counts == {(c, part, s): PER_CATEGORY[part] for c in CATEGORIES for part, s in parts.items()}


@pytest.mark.parametrize(("name", "least"), [("train", 35), ("heldout", 4)])
def test_every_category_has_many_templates(prompts, name, least):
    templates = Counter(category for category, _ in {(p.category, p.template) for p in split(prompts, name)})
    assert min(templates[c] for c in CATEGORIES) >= least


def test_no_prompt_appears_twice(prompts):
    assert len({p.id for p in prompts}) == len({p.text.lower() for p in prompts}) == len(prompts)


def test_lengths_and_leftovers(prompts):
    words = [len(p.text.split()) for p in prompts]
    assert min(words) >= 3 and max(words) <= 100
    assert not [p.id for p in prompts if re.search(r"\{[\w-]+(:\w+)?\}", p.text)], "a slot was left unfilled"


def test_heldout_shares_no_family_with_train(prompts):
    train, heldout = split(prompts, "train"), split(prompts, "heldout")
    assert not {p.topic for p in train} & {p.topic for p in heldout}
    texts: dict[str, set[str]] = {part: set() for part in PER_CATEGORY}
    for path in module.TEMPLATES:
        for parts in yaml.safe_load(path.read_text(encoding="utf-8")).values():
            for part, groups in parts.items():
                texts[part].update(template for group in groups for template in group["templates"])
    assert all(texts.values()) and not (texts["train"] | texts["wide"]) & texts["heldout"]


def test_heldout_shares_no_eight_gram_with_train(prompts):
    train = set().union(*(eight_grams(p.text) for p in split(prompts, "train")))
    assert not {p.id: hit for p in split(prompts, "heldout") if (hit := eight_grams(p.text) & train)}


def test_expansion_never_changes(prompts):
    """Ids are in use: editing a template or a filler means to write the answers again."""
    assert prompts == expand()
    assert prompts[0] == Prompt("chat-train-000", "chat", "chat-train-t00", "new-job", "train", prompts[0].text)


def test_missing_slot_is_named(tmp_path: Path):
    path = tmp_path / "templates.yaml"
    path.write_text("chat: {train: [{templates: ['Hi {nme}'], topics: {pets: {name: [cat]}}}], heldout: []}")
    with pytest.raises(ValueError, match=r"no fillers for \{nme\}; the topic has name"):
        expand([path])


def test_too_few_fillers_are_refused(tmp_path: Path):
    path = tmp_path / "templates.yaml"
    path.write_text("chat: {train: [{templates: ['Hi {name}'], topics: {pets: {name: [cat, dog]}}}], heldout: []}")
    with pytest.raises(ValueError, match="only 2 distinct prompts, 450 wanted"):
        expand([path])


def test_slots():
    fillers = {"pet": ["cat", "dog"], "line": ["a {pet} of {3-5}"]}
    text = module._fill("{Pet}, {pet}, {pet:2}; {line}; {3-5}", fillers, "seed")
    match = re.fullmatch(r"(Cat|Dog), (cat|dog), (cat|dog); a (cat|dog) of ([345]); ([345])", text)
    assert match and match[1].lower() == match[2] == match[4] != match[3] and match[5] == match[6]


def test_answers_belong_to_the_prompts(prompts, answers):
    """Some prompts have no answer: those where the target ran in circles were left out."""
    asked = {p.id: (p.category, p.template, p.topic, p.split, p.text) for p in prompts}
    for a in answers:
        user, assistant = a["messages"]
        assert (user["role"], assistant["role"]) == ("user", "assistant")
        if a["category"] == "invented":
            assert (a["template"], a["topic"], a["split"]) == ("invented", "invented", "train")
            continue
        assert asked[a["id"]] == (a["category"], a["template"], a["topic"], a["split"], user["content"])
    assert len({a["id"] for a in answers}) == len(answers) >= 4500
    counts = Counter((a["category"], a["split"]) for a in answers)
    assert min(counts[c, "heldout"] for c in CATEGORIES) >= 30


def test_invented_prompts_are_no_copies(prompts, answers):
    """What the target wrote itself shares no 8-gram with a held-out prompt, repeats none, and stands last."""
    heldout = set().union(*(eight_grams(p.text) for p in split(prompts, "heldout")))
    invented = [a["messages"][0]["content"] for a in answers if a["category"] == "invented"]
    assert len(invented) == 8000 and not [text for text in invented if eight_grams(text) & heldout]
    texts = [p.text.lower() for p in prompts] + [text.lower() for text in invented]
    assert len(set(texts)) == len(texts)
    assert all(a["category"] == "invented" for a in answers[-8000:])


def test_answers_have_the_fields(answers):
    fields = {"id", "category", "template", "topic", "split", "messages", "truncated"}
    for a in answers:
        assert a.keys() - {"ids"} == fields and isinstance(a["truncated"], bool)
        assert a["messages"][1]["content"].strip()


def test_no_answer_claims_an_end(answers):
    """Neither text nor ids hold the end token (id 2): whether it follows is told by `truncated` alone."""
    for a in answers:
        assert "<|im_end|>" not in a["messages"][1]["content"] and 2 not in a.get("ids", [])
        assert len(a.get("ids", [])) <= max(LIMITS)
        assert not a["truncated"] or len(a.get("ids", [0] * 96)) in LIMITS
    assert 0 < sum(a["truncated"] for a in answers) < len(answers)


def test_size():
    assert ANSWERS.stat().st_size < 1.9e6
