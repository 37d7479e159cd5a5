"""The shipped prompt set: 11,100 prompts of our own in ten categories, split by template and topic family.

`shipped/templates.yaml` and, for training only, `shipped/templates_wide.yaml` are the hand-written source.  They read
`category -> train|wide|heldout -> groups`, where a group has

    templates   texts with slots; every template of a group fits every topic of that group
    topics      topic family -> slot -> fillers
    shared      slot -> fillers for all topics of the group (optional)

`{name}` takes a filler, the same one each time it appears in a prompt; `{name:2}` takes another one of the
same list; `{Name}` starts with a capital; `{3-40}` is a whole number from that range and `{3-40:b}` a second,
independent one.  Fillers may hold slots themselves.  Choices come from SHA-256, never from `random`, so the
set is the same on every machine and every Python.

    python -m draftsmith.data.prompts       # counts per category and split
    pytest tests/test_prompts.py            # what the set promises
"""

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from typing import Any, Literal

import yaml

Split = Literal["train", "heldout"]

SHIPPED = Path(__file__).parent / "shipped"
TEMPLATES = SHIPPED / "templates.yaml", SHIPPED / "templates_wide.yaml"
PER_CATEGORY = {"train": 450, "wide": 600, "heldout": 60}  # parts; `wide` belongs to the training split

_SLOT = re.compile(r"\{(\w+|\d+-\d+)(?::(\w+))?\}")
_RANGE = re.compile(r"(\d+)-(\d+)")


@dataclass(frozen=True)
class Prompt:
    """One prompt; `template` and `topic` name the two families by which the split is made."""

    id: str
    category: str
    template: str
    topic: str
    split: Split
    text: str


def expand(paths: Sequence[Path] = TEMPLATES) -> list[Prompt]:
    """All prompts of `paths`, file by file, category by category, train before held-out; always the same list.

    Raises:
        ValueError: a template names a slot that its topic lacks, or a split has too few fillers for its count.
    """
    return [
        prompt
        for path in paths
        for category, parts in yaml.safe_load(path.read_text(encoding="utf-8")).items()
        for part, count in PER_CATEGORY.items()
        if part in parts
        for prompt in _expand_part(category, part, parts[part], count)
    ]


def _expand_part(category: str, part: str, groups: Sequence[Mapping[str, Any]], count: int) -> list[Prompt]:
    """Visit the templates in turn, each with its group's topics in turn, until `count` distinct texts exist."""
    templates = [(template, group) for group in groups for template in group["templates"]]
    split: Split = "heldout" if part == "heldout" else "train"
    prompts: dict[str, Prompt] = {}
    for turn in range(20 * count):
        if len(prompts) == count:
            return list(prompts.values())
        lap, number = divmod(turn, len(templates))
        template, group = templates[number]
        topics = list(group["topics"])
        topic = topics[(lap + number) % len(topics)]
        text = _fill(template, {**group.get("shared", {}), **group["topics"][topic]}, f"{category}/{part}/{turn}")
        name = f"{category}-{part}"
        prompts.setdefault(
            text, Prompt(f"{name}-{len(prompts):03d}", category, f"{name}-t{number:02d}", topic, split, text)
        )
    raise ValueError(
        f"{category}/{part}: only {len(prompts)} distinct prompts, {count} wanted; "
        "add templates or fillers, then run `python -m draftsmith.data.prompts`"
    )


def _fill(text: str, fillers: Mapping[str, Sequence[str]], seed: str) -> str:
    """Replace slots until none is left; a slot's choice depends on `seed` and its name only, not on its place."""

    def choose(slot: re.Match[str]) -> str:
        name, variant = slot.groups()
        if bounds := _RANGE.fullmatch(name):
            low, high = map(int, bounds.groups())
            return str(low + _hash(f"{seed}/{slot[0]}") % (high - low + 1))
        key = name.lower()
        if key not in fillers:
            raise ValueError(f"{seed}: no fillers for {slot[0]}; the topic has {', '.join(sorted(fillers))}")
        options = fillers[key]
        chosen = options[(_hash(f"{seed}/{key}") + int(variant or 1) - 1) % len(options)]
        return chosen if name == key else chosen[0].upper() + chosen[1:]

    while _SLOT.search(text):
        text = _SLOT.sub(choose, text)
    return text


def _hash(key: str) -> int:
    return int.from_bytes(sha256(key.encode()).digest()[:8], "big")


def main() -> None:
    """Print how many prompts, templates and topic families each category and split has."""
    prompts = expand()
    counts = Counter((p.category, p.split) for p in prompts)
    print(f"{'category':20}{'split':10}{'prompts':>8}{'templates':>11}{'topics':>8}{'words':>8}")
    for (category, split), count in counts.items():
        chosen = [p for p in prompts if (p.category, p.split) == (category, split)]
        words = sum(len(p.text.split()) for p in chosen) / count
        templates, topics = len({p.template for p in chosen}), len({p.topic for p in chosen})
        print(f"{category:20}{split:10}{count:8}{templates:11}{topics:8}{words:8.1f}")
    print(f"{len(prompts)} prompts")


if __name__ == "__main__":
    main()
