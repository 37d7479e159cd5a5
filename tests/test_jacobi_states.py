"""Jacobi states on disk: what is stored is what is read, and nothing else passes.

Run: pytest tests/test_jacobi_states.py
"""

import dataclasses
import json
from array import array
from pathlib import Path
from typing import Any

import pytest
import torch

from draftsmith.data.encode import Refused, encode, encode_all
from draftsmith.data.jacobi_states import JacobiStates, PlacedStates, pack_states, parse_states, unpack_states
from draftsmith.data.packing import make_batch
from draftsmith.data.sources import Conversation, DataConfig, load_conversations
from draftsmith.data.states import data_fingerprint

IDS = [97, 98, 99, 100, 101, 102, 103]


def states(seed: int = 0, passes: int = 5, ids: Any = IDS) -> torch.Tensor:
    gen = torch.Generator().manual_seed(seed)
    text = torch.tensor(ids)
    rows = [torch.where(torch.rand(7, generator=gen) < 0.5, text, torch.randint(0, 200, (7,), generator=gen))]
    for i in range(1, passes):
        settled = torch.arange(7) % 4 < i
        rows.append(torch.where(settled, text, rows[-1] + (torch.rand(7, generator=gen) < 0.3).long()))
    return torch.stack([*rows, text])


def talk(jacobi: JacobiStates | None, ids: Any = IDS) -> Conversation:
    messages = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "abcdefg"}]
    return Conversation("c", messages, truncated=True, answer_ids=ids, jacobi=jacobi)


@pytest.mark.parametrize("seed", range(4))
def test_states_come_back(seed: int) -> None:
    states_In = states(seed)
    stored = pack_states(torch.cat([states_In, states_In[-1:]]), 4, "prompt", 0.5, 1)
    assert (stored.blocks, stored.other, stored.augment) == (2, 1, 0.5)
    read = parse_states(json.loads(json.dumps(stored.record())), IDS, "f:1")
    assert read == stored and torch.equal(unpack_states(read), states_In[: 1 + len(stored.passes)])
    assert torch.equal(unpack_states(read)[-1], torch.tensor(IDS)) and stored.highest == int(states_In.max())


def test_the_example_of_the_docstring() -> None:
    raw = {"block": 2, "start": "prompt", "augment": 0.0, "other": 0, "first": [9, 9, 3, 8]}
    read = parse_states(raw | {"passes": [[0, 5, 1, 4, 2, 7], [1, 6]]}, [5, 6, 7, 8], "f:1")
    assert unpack_states(read).tolist() == [[9, 9, 3, 8], [5, 4, 7, 8], [5, 6, 7, 8]]
    settled = parse_states(raw | {"first": [5, 6, 7, 8], "passes": []}, [5, 6, 7, 8], "f:1")
    assert unpack_states(settled).tolist() == [[5, 6, 7, 8]]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"extra": 1}, "must be an object with block, start, first, passes, augment, other"),
        ({"block": 0}, "has block 0"),
        ({"block": True}, "has block True"),
        ({"start": None}, "start None"),
        ({"augment": 2}, "augment 2"),
        ({"other": -1}, "other -1"),
        ({"other": 3}, "other 3, more than there are blocks of 4 in 7 tokens"),
        ({"first": IDS[:-1]}, "one token id per token of `ids`"),
        ({"first": [1.5, *IDS[1:]]}, "one token id per token of `ids`"),
        ({"first": [2**31, *IDS[1:]]}, "one token id per token of `ids`"),
        ({"first": [-1, *IDS[1:]]}, "one token id per token of `ids`"),
        ({"passes": None}, "list of passes"),
        ({"passes": [[]] * 2 + [[0]]}, "pass 3 must hold ascending places below 7"),
        ({"passes": [[7, 1]]}, "pass 1 must hold"),
        ({"passes": [[1, 5, 0, 5]]}, "pass 1 must hold"),
        ({"passes": [[1, 5, 1, 5]]}, "pass 1 must hold"),
        ({"passes": [[0, -5]]}, "pass 1 must hold"),
        ({"passes": ["01"]}, "pass 1 must hold"),
        ({"passes": []}, "does not end in `ids`"),
        ({"first": IDS, "passes": [[]] * 5}, "has 5 passes: blocks of 4 in 7 tokens are settled after 4"),
        ({"first": IDS, "passes": [[]] * 8, "block": 2**31 - 1}, "has 8 passes: .* in 7 tokens are settled after 7"),
        ({"passes": [[0, 2**31]]}, "pass 1 must hold"),
        ({"first": IDS, "passes": [[], [4, 101]]}, "pass 2 changes what is settled"),
        ({"first": IDS, "passes": [[], [5, 9], [5, 102]]}, "pass 3 changes what is settled"),
    ],
)
def test_other_shapes_are_refused_by_line(tmp_path: Path, change: dict[str, Any], message: str) -> None:
    good = pack_states(states(), 4, "prompt").record()
    line = {"id": "a", "messages": talk(None).messages, "ids": IDS, "truncated": True}
    file = tmp_path / "a.jsonl"
    file.write_text(
        "".join(json.dumps(line | {"id": k, "jacobi": v}) + "\n" for k, v in [("a", good), ("b", good | change)])
    )
    with pytest.raises(ValueError, match=rf"^a\.jsonl:2: `jacobi` .*{message}"):
        load_conversations(DataConfig(source=str(file)))


def test_states_without_ids_are_refused() -> None:
    with pytest.raises(ValueError, match="f:1: `jacobi` needs the answer's `ids`"):
        parse_states(pack_states(states(), 4, "prompt").record(), None, "f:1")


def test_samples_have_the_states_at_their_places(tokenizer: Any) -> None:
    """The prompt in all of them; cut as the ids are; each text's from its fixed point on; packed beside one without."""
    ids = tokenizer("abcdefg")["input_ids"]
    conv = talk(pack_states(states(ids=ids), 4, "prompt"), ids)
    assert conv.jacobi is not None
    states_In = unpack_states(conv.jacobi)
    assert len(states_In) > 3
    plain = encode(dataclasses.replace(conv, jacobi=None), tokenizer, 0, 1000)
    assert plain.states is None
    n = len(plain)
    for length in (1000, n - 3, n - 6):
        sample = encode(conv, tokenizer, 0, length)
        assert sample.states is not None
        dense_In = sample.states.dense(sample.ids)
        kept = len(sample) - n + 7
        assert dense_In.dtype == torch.int64 and len(dense_In) == min(len(states_In), 1 + kept)
        assert torch.equal(sample.ids, plain.ids[:length])
        assert torch.equal(dense_In[:, : n - 7], plain.ids[: n - 7].expand(len(dense_In), -1))
        assert torch.equal(dense_In[:, n - 7 :], states_In[: len(dense_In), :kept])
        assert torch.equal(dense_In[-1], sample.ids)  # what is left out would be the text once more
    assert data_fingerprint([plain]) != data_fingerprint([encode(conv, tokenizer, 0, 1000)])
    added = encode(dataclasses.replace(conv, truncated=False), tokenizer, 0, 1000)  # its end of turn is not the model's
    assert added.states is not None
    added_In = added.states.dense(added.ids)
    assert added_In.shape == (len(states_In), n + 1) and bool((added_In[:, -1] == added.ids[-1]).all())
    batch = make_batch([[plain, added]], None, 0, 0)
    assert batch.states_BIT is not None and torch.equal(batch.states_BIT[0, :, n:], added_In)
    assert torch.equal(batch.states_BIT[0, :, :n], plain.ids.expand(len(states_In), -1))


def test_nothing_is_unpacked_before_a_batch_is_made(tokenizer: Any, tmp_path: Path) -> None:
    """Samples keep what their lines hold, four bytes a number, whatever became of them."""
    ids = tokenizer("abcdefg")["input_ids"]
    made = [talk(pack_states(states(seed, ids=ids), 4, "prompt"), ids) for seed in range(40)]
    question: dict[str, Any] = {"role": "user", "content": "Hi"}
    earlier = {"role": "assistant", "content": "answered before"}
    made += [dataclasses.replace(t, messages=[question, earlier, *t.messages]) for t in made[:10]]
    file = tmp_path / "a.jsonl"
    file.write_text(
        "".join(
            json.dumps(
                {"id": str(i), "messages": t.messages, "ids": ids, "truncated": True, "jacobi": t.jacobi.record()}
            )
            + "\n"
            for i, t in enumerate(made)
            if t.jacobi is not None
        )
    )
    talks = load_conversations(DataConfig(source=str(file)))
    short, whole = (len(encode(made[i], tokenizer, 0, 1000)) for i in (0, 40))
    for length in (1000, whole - 3, whole - 7):  # all, and of the ten last answers: four tokens, none
        samples, _ = encode_all(talks, tokenizer, length)
        assert len(samples) == 50
        for sample, t in zip(samples, talks, strict=True):
            assert sample.states is not None and sample.states.stored is t.jacobi
            assert all(v.shape == sample.ids.shape for v in vars(sample).values() if isinstance(v, torch.Tensor))
            numbers = [sample.states.stored.first, *sample.states.stored.passes]
            assert all(isinstance(x, array) and x.itemsize == 4 for x in numbers)
        batch = make_batch([samples[:3], samples[3:20], samples[20:]], None, 0, 0)
        assert batch.states_BIT is not None
        for b, row in enumerate((range(3), range(3, 20), range(20, 50))):
            at = 0
            for i in row:
                dense_In, t = samples[i].ids.repeat(batch.states_BIT.shape[1], 1), made[i]
                assert t.jacobi is not None
                states_In = unpack_states(t.jacobi)
                start = (short if i < 40 else whole) - len(ids)
                kept = max(len(samples[i]) - start, 0)
                dense_In[: len(states_In), start : start + kept] = states_In[:, :kept]
                assert torch.equal(batch.states_BIT[b, :, at : at + len(samples[i])], dense_In)
                at += len(samples[i])


def test_a_sample_that_is_cut_takes_no_more_states_than_tokens() -> None:
    long = JacobiStates(3000, "prompt", array("i", [5] * 3000), [array("i", [2999, i % 2]) for i in range(2999)])
    dense_In = PlacedStates(long, 2).dense(torch.arange(10))
    assert torch.equal(dense_In, torch.tensor([0, 1, *[5] * 8]).expand(9, -1))


def test_states_of_another_tokenizer_are_not_taken(tokenizer: Any) -> None:
    ids = tokenizer("abcdefg")["input_ids"]
    first = states(ids=ids)
    first[0, -1] = len(tokenizer)
    with pytest.raises(Refused, match="ids that the tokenizer does not know"):
        encode(talk(pack_states(first, 4, "prompt"), ids), tokenizer, 0, 1000)
    foreign = dataclasses.replace(talk(pack_states(states(), 4, "prompt")), answer_ids=[9] * 7)
    assert encode(foreign, tokenizer, 0, 1000).states is None
