"""Jacobi states that `draftsmith rollout --trajectories` stores with answers (B26 a).

Run: pytest tests/test_collect_states.py
"""

import importlib
import json
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from draftsmith.data.encode import Sample, encode_all, prompt_ids
from draftsmith.data.jacobi_states import unpack_states
from draftsmith.data.packing import collate
from draftsmith.data.sources import Conversation, DataConfig, load_conversations
from draftsmith.inference.rollout import RolloutConfig, rollout, run_rollout
from draftsmith.inference.speculate import generate
from draftsmith.inference.trajectories import TrajectoryConfig, with_states
from draftsmith.losses.probs import SamplingParams
from draftsmith.models.diffusion import PairCache
from draftsmith.models.target import Target
from draftsmith.models.trajectories import answer_blocks, corrected, first_states

PARAMS = SamplingParams(max_new_tokens=22, ignore_eos=True)
STATES = TrajectoryConfig(block=8, drop_repeated=0)


@pytest.fixture(scope="module")
def model(tiny: Callable[..., Target]) -> Target:
    return tiny(dtype=torch.float64, width=32, layers=2, heads=2, kv_heads=2)


def ask(i: int, *more: str) -> Conversation:
    messages = [{"role": "user", "content": f"prompt {i}"}]
    for text in more:
        messages += [{"role": "assistant", "content": "old answer"}, {"role": "user", "content": text}]
    return Conversation(f"c{i}", messages, category="chat", split="train")


TALKS = [ask(0), ask(1, "and then?"), ask(2, "more", "more still")]


def lines(path: Path) -> dict[str, dict[str, Any]]:
    records = [json.loads(line) for line in path.read_text().splitlines()]
    assert len({r["id"] for r in records}) == len(records)
    return {r["id"]: r for r in records}


def decoded(target: Target, before: list[int], first: Tensor, block: int) -> list[Tensor]:
    """States [n] of one answer by Jacobi decoding, block after block, without a cache; all blocks' i-th ones together."""
    blocks: list[list[Tensor]] = []
    for guess in first.split(block):
        states = [guess]
        while len(states) < 2 or not torch.equal(states[-1], states[-2]):
            ids = torch.cat([torch.tensor(before), states[-1]])[None]
            hidden = target.forward(ids, torch.arange(ids.shape[1])[None]).last_hidden_BTD
            states.append(target.head(hidden)[0, len(before) - 1 : -1, : target.facts.tokens].argmax(-1))
        before = before + states[-1].tolist()
        blocks.append(states[:-1])
    deepest = max(map(len, blocks))
    return [torch.cat([states[min(i, len(states) - 1)] for states in blocks]) for i in range(deepest)]


def test_states_are_those_of_jacobi_decoding(model: Target, tmp_path: Path) -> None:
    """Of the last answer, behind the earlier ones; and they reach the sample. Whatever the batch, and after a kill."""
    made = []
    for rows in (1, 3):
        out = tmp_path / f"{rows}.jsonl"
        rollout(model, TALKS[:2], out, PARAMS, rows, states=STATES, progress=False)
        with out.open("a") as file:
            file.write('{"id": "c2", "mess')  # what a killed run leaves
        report = rollout(model, TALKS, out, PARAMS, rows, states=STATES, progress=False)
        assert (report.answered, report.there, report.blocks, report.other) == (3, 2, 9, 0)
        assert "0 of 9 blocks" in str(report)
        made.append(lines(out))
    assert made[0] == made[1]
    for k, v in (("trajectories", None), ("trajectories", replace(STATES, block=4)), ("seed", 1)):
        with pytest.raises(ValueError, match=f"was made with {k} = "):
            args: dict[str, Any] = {"states": v, "seed": 0} if k == "trajectories" else {"states": STATES, k: v}
            rollout(model, TALKS, out, PARAMS, progress=False, **args)
    talks = load_conversations(DataConfig(source=str(out)))
    samples, encoded = encode_all(talks, model.tokenizer, 1000)
    assert encoded.foreign_ids == 0 and len(talks) == 3
    for talk, sample in zip(talks, samples, strict=True):
        assert talk.jacobi is not None and talk.answer_ids is not None and len(talk.answer_ids) == 22
        prompt = prompt_ids(talk.messages[:-1], model.tokenizer)
        states_In = unpack_states(talk.jacobi)
        assert set(states_In[0].tolist()) <= set(prompt)
        wanted = decoded(model, prompt, states_In[0], 8)
        assert torch.equal(states_In, torch.stack(wanted)) and len(wanted) > 3
        assert sample.states is not None and torch.equal(sample.states.dense(sample.ids)[:, len(prompt) :], states_In)
    other = tmp_path / "other.jsonl"
    rollout(model, TALKS, other, PARAMS, seed=1, states=STATES, progress=False)
    firsts = [[r["jacobi"]["first"] for r in found.values()] for found in (made[0], lines(other))]
    assert all(a != b for a, b in zip(*firsts, strict=True))


def test_answers_that_are_there(model: Target, tmp_path: Path) -> None:
    """With ids the lines of a run that answers itself; without, those of the text, an engine's."""
    plain, own, out = (tmp_path / f"{n}.jsonl" for n in ("plain", "own", "out"))
    params = SamplingParams(max_new_tokens=20)
    rollout(model, TALKS, plain, params, progress=False)
    rollout(model, TALKS, own, params, states=STATES, progress=False)
    rollout(model, load_conversations(DataConfig(source=str(plain))), out, params, states=STATES, answers="plain.jsonl")
    assert lines(out) == lines(own)
    with pytest.raises(ValueError, match=r"made with answers = 'plain\.jsonl', this run has 'x'"):
        rollout(model, [], out, params, states=STATES, answers="x")
    # Ids that stand for no text of their own cannot come back from it; what can, does.
    text = "Once upon a time"
    messages = [*ask(7, "again").messages, {"role": "assistant", "content": text}]
    for truncated in (True, False):
        (talk,) = with_states(model, [Conversation("t", messages, truncated=truncated)], STATES, 0)
        assert isinstance(talk, Conversation) and talk.jacobi is not None and talk.answer_ids is not None
        ids = model.tokenizer(text)["input_ids"]
        assert talk.answer_ids[: len(ids)] == ids and len(talk.answer_ids) == len(ids) + (not truncated)
        assert 0 < talk.jacobi.other <= talk.jacobi.blocks == -(-len(talk.answer_ids) // 8)


def test_an_answer_that_a_stop_string_ended(model: Target) -> None:
    """The end of turn behind it is the template's, and in no state."""
    stopped = [replace(t, truncated=False) for t in _greedy(model)]
    talks = [t for t in with_states(model, stopped, STATES, 0) if isinstance(t, Conversation)]
    samples, _ = encode_all(talks, model.tokenizer, 1000)
    for talk, sample in zip(talks, samples, strict=True):
        assert talk.jacobi is not None and talk.answer_ids is not None and talk.jacobi.other == 0
        assert len(talk.jacobi.first) == len(talk.answer_ids) == 22 and bool(sample.supervised[-23:].all())
        assert sample.states is not None
        assert bool((sample.states.dense(sample.ids)[:, -1] == sample.ids[-1]).all())
    assert len(talks) == len(TALKS)


def test_the_command_takes_answers_in_parts(model: Target, tmp_path: Path) -> None:
    source, folder = tmp_path / "prompts.jsonl", tmp_path / "states"
    source.write_text("".join(json.dumps({"id": t.id, "messages": t.messages}) + "\n" for t in TALKS))
    common: dict[str, Any] = {"target": "tiny", "dtype": "float32", "max_new_tokens": 9, "trajectories": 4}
    common |= {"drop_repeated": 0}
    run_rollout(RolloutConfig(out=str(tmp_path / "all.jsonl"), data=DataConfig(source=str(source)), **common))
    for k in (1, 2):
        answers = str(tmp_path / "all.jsonl")
        run_rollout(RolloutConfig(out=str(folder / f"part-{k}.jsonl"), answers=answers, part=f"{k}/2", **common))
    assert list(lines(folder / "part-2.jsonl")) == ["c1"]
    together = load_conversations(DataConfig(source=str(folder)))
    assert [t.id for t in together] == ["c0", "c2", "c1"]
    assert {t.id: t.jacobi for t in together} == {
        t.id: t.jacobi for t in load_conversations(DataConfig(source=str(tmp_path / "all.jsonl")))
    }
    shipped = RolloutConfig(out=str(tmp_path / "x.jsonl"), answers="shipped", data=DataConfig(limit=2), **common)
    assert [t.id for t in shipped.conversations()[0]] == [t.id for t in load_conversations(DataConfig(limit=2))]
    with pytest.raises(ValueError, match="blocks are not what the model says"):  # they are SmolLM2's
        run_rollout(shipped)


def test_answers_of_another_model_end_the_run(model: Target, tiny: Callable[..., Target], tmp_path: Path) -> None:
    out, other = tmp_path / "a.jsonl", tiny(dtype=torch.float64, width=32, layers=2, heads=2, kv_heads=2, seed=1)
    rollout(other, TALKS, out, PARAMS, progress=False)
    talks = load_conversations(DataConfig(source=str(out)))
    with pytest.raises(ValueError, match="9 of 9 blocks are not what the model says: these answers are not its greedy"):
        rollout(model, talks, tmp_path / "b.jsonl", PARAMS, states=STATES, answers="a", progress=False)
    report = rollout(model, talks[:2], tmp_path / "c.jsonl", PARAMS, states=STATES, answers="a", progress=False)
    assert (report.blocks, report.other) == (6, 6)  # too few to tell
    assert all(
        r["jacobi"]["passes"] == [] and r["jacobi"]["first"] == r["ids"] for r in lines(tmp_path / "c.jsonl").values()
    )


class Scripted:
    """A target that says what a rule of the last token and the position says; hidden states are logits."""

    def __init__(self, scripted: Any, tokenizer: Any) -> None:
        def rule(previous_BT: Tensor, token_BT: Tensor, at_BT: Tensor) -> Tensor:
            said_BT = torch.where(token_BT % 16 == 5, token_BT, (3 * token_BT + 7 * at_BT) % 200 + 32)
            return torch.nn.functional.one_hot(said_BT, 256).double()

        self.rule, self.inner = rule, scripted.Target(rule, 256, tokenizer=tokenizer)
        self.facts, self.tokenizer, self.device = self.inner.facts, tokenizer, torch.device("cpu")
        self.new_cache, self.head = self.inner.new_cache, self.inner.head

    def forward(self, ids_BT: Tensor, positions_BT: Tensor, *, cache: Any, **options: Any) -> Any:
        if not isinstance(cache, PairCache):
            return self.inner.forward(ids_BT, positions_BT, cache=cache, **options)
        return type("Out", (), {"last_hidden_BTD": self.rule(ids_BT, ids_BT, positions_BT)})


def test_scripted_trajectories_end_in_greedy_answers(scripted: Any, tokenizer: Any, tmp_path: Path) -> None:
    """B26 (a): the last state is the greedy output; a token over and over is dropped and counted."""
    target: Any = Scripted(scripted, tokenizer)
    out = tmp_path / "a.jsonl"
    talks = [Conversation(f"c{i}", [{"role": "user", "content": "x" * i}]) for i in range(1, 41)]
    params = SamplingParams(max_new_tokens=24)
    greedy = {t.id: generate(target, [prompt_ids(t.messages, tokenizer)], params)[0].ids for t in talks}
    longest = {k: max(len(run) for run in _runs(ids)) for k, ids in greedy.items()}
    kept = {k for k, n in longest.items() if n < 10}
    assert 5 < len(kept) < 35
    report = rollout(target, talks, out, params, states=TrajectoryConfig(block=8), progress=False)
    found = lines(out)
    assert found.keys() == kept
    assert report.failed == {"a token 10 times in a row": 40 - len(kept)} and report.other == 0
    for talk in load_conversations(DataConfig(source=str(out))):
        assert talk.jacobi is not None
        states_In = unpack_states(talk.jacobi)
        assert states_In[-1].tolist() == greedy[talk.id] == found[talk.id]["ids"]
        assert len(states_In) > 2
    # Exactly ten are too many, nine are not.
    for count, kept_too in ((9, True), (10, False)):
        conv = Conversation(
            "x", [*ask(0).messages, {"role": "assistant", "content": "b" * count + "c" * 9}], truncated=True
        )
        (got,) = with_states(target, [conv], TrajectoryConfig(), 0)
        assert isinstance(got, Conversation) == kept_too


def _runs(ids: list[int]) -> list[list[int]]:
    runs: list[list[int]] = []
    for token in ids:
        if runs and runs[-1][0] == token:
            runs[-1].append(token)
        else:
            runs.append([token])
    return runs


def test_augmentation_touches_wrong_tokens_behind_the_first(model: Target, tmp_path: Path) -> None:
    rollout(model, TALKS, tmp_path / "a.jsonl", PARAMS, states=replace(STATES, augment=0.5), progress=False)
    half: list[Any] = load_conversations(DataConfig(source=str(tmp_path / "a.jsonl")))
    plain, full = (list[Any](with_states(model, half, replace(STATES, augment=x), 0)) for x in (0.0, 1.0))
    wrong = replaced = 0
    for talk, *others in zip(plain, half, full, strict=True):
        states_In, text_n = unpack_states(talk.jacobi), torch.tensor(talk.answer_ids)
        for share, altered in zip((0.5, 1.0), others, strict=True):
            assert altered.jacobi.augment == share and altered.answer_ids == talk.answer_ids
            altered_In = unpack_states(altered.jacobi)
            assert altered_In.shape == states_In.shape
            for before_n, after_n in zip(states_In, altered_In, strict=True):
                for lo in range(0, len(text_n), 8):
                    a, b, t = (x[lo : lo + 8] for x in (before_n, after_n, text_n))
                    at = (a != t).nonzero()[:, 0]
                    assert bool((a == b)[a == t].all()) and bool(((b == a) | (b == t)).all())
                    if len(at):
                        assert b[at[0]] == a[at[0]]  # so that what is not final stays so
                    if share == 1:
                        assert int((b != t).sum()) == min(len(at), 1)
                    elif len(at):
                        wrong += len(at) - 1
                        replaced += int((b != a).sum())
    assert wrong > 100 and abs(replaced / wrong - 0.5) < 0.1


def test_augmentation_does_not_depend_on_the_batch(model: Target) -> None:
    samples, _ = encode_all(_greedy(model), model.tokenizer, 1000)

    def altered(rows: list[Sample]) -> list[Tensor]:
        blocks = answer_blocks(collate(rows, 3), 8)
        states_BIT = first_states(blocks, "prompt")[:, None].repeat(1, 3, 1)
        got_BIT = corrected(blocks, states_BIT, 0.5)
        assert not torch.equal(got_BIT[:, 0], got_BIT[:, 1])  # each state by coins of its own
        return [got_BIT[b, :, : len(row)] for b, row in enumerate(rows)]

    for sample, among in zip(samples, altered(samples), strict=True):
        assert torch.equal(altered([sample])[0], among)


def test_conversations_that_cannot_have_states(model: Target) -> None:
    long = "x" * model.facts.max_positions
    talks: list[Conversation | str] = [
        "gone before",
        ask(0),
        Conversation("long", [*ask(1).messages, {"role": "assistant", "content": long}]),
        Conversation("good", [*ask(2).messages, {"role": "assistant", "content": "fine"}]),
    ]
    first, second, third, good = with_states(model, talks, STATES, 0)
    assert (first, second, third) == ("gone before", "no answer", "prompt and answer exceed the target's positions")
    assert isinstance(good, Conversation) and good.jacobi is not None
    assert with_states(model, talks[:3], STATES, 0) == [first, second, third]


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"trajectories": 1}, "trajectories = 1: give the tokens of a block, at least 2"),
        ({"trajectories": -1}, "trajectories = -1"),
        ({"trajectories": 8, "temperature": 0.5}, "temperature = 0.5: Jacobi states lead to greedy answers"),
        ({"trajectories": 8, "endpoint": "http://127.0.0.1:1/v1"}, "a server keeps no ids.*--answers FILE"),
        ({"trajectories": 8, "adapters": "x"}, "a denoiser gives others"),
        ({"trajectories": 8, "augment": 1.5}, "augment = 1.5"),
        ({"trajectories": 8, "drop_repeated": 1}, "drop_repeated = 1"),
        ({"augment": 0.5}, "augment is about Jacobi states"),
        ({"answers": "shipped"}, "answers is about Jacobi states"),
        ({"trajectories": 8, "answers": "a", "data": DataConfig(source="b.jsonl")}, "answers names the source itself"),
        ({"trajectories": 8, "answers": "a", "invent": 3}, "answers names the source itself"),
        ({"part": "0/8"}, "part = '0/8': write the second of eight as 2/8"),
        ({"part": "9/8"}, "part = '9/8'"),
        ({"part": "two"}, "part = 'two'"),
        ({"part": "1/2", "invent": 3}, "draw once, then name their file"),
    ],
)
def test_settings_that_cannot_be_are_refused(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        RolloutConfig(out="x.jsonl", **settings)


def test_a_walk_costs_a_few_passes(model: Target, monkeypatch: pytest.MonkeyPatch) -> None:
    """All conversations and blocks share a pass: the text's, and one per state but the last."""
    passes: list[Any] = []
    forward, answered = model.forward, _greedy(model)
    monkeypatch.setattr(model, "forward", lambda *a, **k: passes.append(a[0].shape) or forward(*a, **k))
    talks = with_states(model, answered, STATES, 0)
    monkeypatch.undo()
    deepest = max(len(t.jacobi.passes) for t in talks if isinstance(t, Conversation) and t.jacobi is not None)
    assert 2 < len(passes) <= deepest + 1 <= STATES.block + 1


def _greedy(model: Target) -> list[Conversation]:
    talks = []
    for t in TALKS:
        ids = generate(model, [prompt_ids(t.messages, model.tokenizer)], PARAMS)[0].ids
        text = model.tokenizer.decode(ids, skip_special_tokens=True)
        talks.append(
            replace(t, messages=[*t.messages, {"role": "assistant", "content": text}], truncated=True, answer_ids=ids)
        )
    return talks


def test_the_benchmark_compares_equal_states(tiny: Callable[..., Target], tmp_path: Path) -> None:
    """In float64 all ways of collecting find the same states, in the same number."""
    sys.path.insert(0, str(Path(__file__).parent / "bench"))
    try:
        measure = importlib.import_module("trajectories").measure
    finally:
        sys.path.pop(0)
    target = tiny(dtype=torch.float64, width=32, layers=2, heads=2, kv_heads=2)
    figures = measure(target, [ask(0), ask(2), ask(4)], 12, 4, 2, 1, tmp_path)
    assert figures["blocks"] == 3 * 3 and figures["blocks_left_out"] == 0 == figures["conversations_dropped"]
    assert figures["blocks_equal_to_cached"] == {"share": 1.0, "of": 9}
    assert figures["blocks_equal_to_naive"] == {"share": 1.0, "of": 6}
    assert (
        min(figures["tokens_per_second"].values()) > 0
        and figures["tokens"]["ours"] == figures["tokens"]["cached"] == 36
    )
