"""Loss masks: exactly the assistant's text and its end of turn, for every kind of chat template (B03, B05, B06, B07)."""

import copy
import dataclasses
import json
from typing import Any

import pytest
import torch

from draftsmith.data.batch import Batch, supervised
from draftsmith.data.encode import Refused, Sample, encode, encode_all, prompt_ids, stop_ids
from draftsmith.data.masks import coloured
from draftsmith.data.sources import Conversation, DataConfig
from draftsmith.inference.masks import MasksConfig, run_masks

HEAD = "{% for m in messages %}{% if m.role != 'assistant' %}{{ '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' }}{% else %}{{ '<|im_start|>assistant\n' }}"
TAIL = "{% endif %}{% endfor %}"
ASK = "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
TURN = "{{ m.content + '<|im_end|>' }}"
TEMPLATES = {
    "no marker, no generation prompt": HEAD + TURN + "{{ '\n' }}" + TAIL,
    "only the word add_generation_prompt": HEAD + TURN + "{{ '\n' }}" + TAIL + ASK,
    "marker": HEAD + "{% generation %}" + TURN + "{% endgeneration %}{{ '\n' }}" + TAIL + ASK,
    "trimmed before": HEAD + "{%- generation %}" + TURN + "{%- endgeneration %}{{ '\n' }}" + TAIL + ASK,
    "trimmed around": HEAD + "{%- generation -%}\n " + TURN + "\n{%- endgeneration -%}{{ '\n' }}" + TAIL + ASK,
    "without spaces": HEAD + "{%generation%}" + TURN + "{%endgeneration%}{{ '\n' }}" + TAIL + ASK,
    "marker without end of turn": HEAD
    + "{% generation %}{{ m.content }}{% endgeneration %}{{ '<|im_end|>\n' }}"
    + TAIL
    + ASK,
    "marker with separator": HEAD + "{% generation %}" + TURN + "{{ '\n' }}{% endgeneration %}" + TAIL + ASK,
}
# Drops the thinking text of all but the last assistant turn, and wraps an empty block around an answer without one.
THINKING = (
    "{% set n = namespace(last=-1) %}{% for m in messages %}{% if m.role == 'assistant' %}{% set n.last = loop.index0 %}"
    "{% endif %}{% endfor %}"
    "{% for m in messages %}{% set c = m.content %}{% if m.role == 'assistant' %}"
    "{% if loop.index0 != n.last %}{% set c = c.split('</think>')[-1].lstrip('\n') %}"
    "{% elif '<think>' not in c %}{% set c = '<think>\n\n</think>\n\n' + c %}{% endif %}{% endif %}"
    "{{ '<|im_start|>' + m.role + '\n' + c + '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n<think>\n' }}{% endif %}"
)
CHAT = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "Hi"},
    {"role": "assistant", "content": "Hello there"},
    {"role": "user", "content": "Hello there?"},
    {"role": "assistant", "content": "Yes.\n\nOnce é more 🙂"},
    {"role": "user", "content": "Bye"},
    {"role": "assistant", "content": "Bye now"},
]


def with_template(tokenizer: Any, template: str) -> Any:
    other = copy.deepcopy(tokenizer)
    other.chat_template = template
    return other


def talk(messages: list[dict[str, Any]], truncated: bool = False, ids: list[int] | None = None) -> Conversation:
    return Conversation("t", messages, truncated=truncated, answer_ids=ids)


def spans(sample: Sample, tokenizer: Any) -> list[str]:
    """Text of each run of supervised tokens."""
    found: list[list[int]] = []
    before = False
    for token, on in zip(sample.ids.tolist(), sample.supervised.tolist(), strict=True):
        if on and not before:
            found.append([])
        if on:
            found[-1].append(token)
        before = on
    return [tokenizer.decode(ids) for ids in found]


@pytest.mark.parametrize("name", TEMPLATES)
def test_every_template_gives_the_same_mask(tokenizer: Any, name: str) -> None:
    chosen = with_template(tokenizer, TEMPLATES[name])
    sample = encode(talk(CHAT), chosen, 0, 1000)
    assert spans(sample, chosen) == [m["content"] + "<|im_end|>" for m in CHAT if m["role"] == "assistant"]
    plain = encode(talk(CHAT), tokenizer, 0, 1000)
    assert torch.equal(sample.ids, plain.ids)
    assert torch.equal(sample.supervised, plain.supervised)


def test_ids_are_those_of_the_rendering(tokenizer: Any) -> None:
    sample = encode(talk(CHAT), tokenizer, 3, 1000)
    text = tokenizer.apply_chat_template(CHAT, tokenize=False)
    assert sample.ids.tolist() == tokenizer(text, add_special_tokens=False)["input_ids"]
    assert sample.sample_id == 3


@pytest.mark.parametrize(
    ("template", "want"),
    [
        # space before the answer, and between it and the end (Llama 2)
        (
            "{% for m in messages %}{% if m.role == 'user' %}{{ '[INST] ' + m.content + ' [/INST]' }}{% else %}"
            "{{ ' ' + m.content + ' <|im_end|>' }}{% endif %}{% endfor %}",
            ["Hello there <|im_end|>", "Bye <|im_end|>"],
        ),
        # trimmed answers (Gemma), other role names
        (
            "{% for m in messages %}{{ '<|im_start|>' + ('model' if m.role == 'assistant' else 'user') + '\n' + "
            "(m.content | trim) + '<|im_end|>\n' }}{% endfor %}",
            ["Hello there<|im_end|>", "Bye<|im_end|>"],
        ),
        # no special token at all
        (
            "{% for m in messages %}{{ m.role + ': ' + m.content + '\n' }}{% endfor %}",
            ["Hello there", "Bye"],
        ),
        # BOS follows the answer: it opens the next turn, it ends none
        (
            "{% for m in messages %}{{ '<|im_start|>' + m.role + m.content }}{% endfor %}",
            ["Hello there", "Bye"],
        ),
    ],
)
def test_other_shapes_of_templates(tokenizer: Any, template: str, want: list[str]) -> None:
    chosen = with_template(tokenizer, template)
    chat = [
        {"role": "user", "content": "Hi"},
        {"role": "assistant", "content": "Hello there"},
        {"role": "user", "content": "Go"},
        {"role": "assistant", "content": "Bye"},
    ]
    assert spans(encode(talk(chat), chosen, 0, 1000), chosen) == want


def test_an_answer_that_repeats_the_prompt_is_found_in_its_own_turn(tokenizer: Any) -> None:
    chat = [{"role": "user", "content": "same"}, {"role": "assistant", "content": "same"}]
    sample = encode(talk(chat), tokenizer, 0, 1000)
    assert spans(sample, tokenizer) == ["same<|im_end|>"]
    assert sample.supervised.nonzero().min() > len(prompt_ids(chat[:1], tokenizer)) - 1


def test_a_template_that_cannot_be_masked_is_named(tokenizer: Any) -> None:
    twice = "{% for m in messages %}{{ m.role + m.content + m.content + '<|im_end|>' }}{% endfor %}"
    chosen = with_template(tokenizer, twice)
    chosen.name_or_path = "owner/strange-template"
    with pytest.raises(ValueError, match=r"cannot be masked: template of strange-template, 1 of 1"):
        encode_all([talk(CHAT)], chosen, 1000)


def test_nothing_or_everything_supervised_is_refused(tokenizer: Any) -> None:
    only_answers = with_template(
        tokenizer, "{% for m in messages %}{% if m.role == 'assistant' %}{{ m.content }}{% endif %}{% endfor %}"
    )
    with pytest.raises(Refused, match="every token is supervised"):
        encode(talk(CHAT[:3]), only_answers, 0, 1000)
    marks_none = with_template(
        tokenizer, TEMPLATES["no marker, no generation prompt"] + "{% generation %}{% endgeneration %}"
    )
    with pytest.raises(ValueError, match="no sample is left"):
        encode_all([talk(CHAT)], marks_none, 1000)
    with pytest.raises(Refused, match="empty answer"):
        encode(talk([*CHAT[:-1], {"role": "assistant", "content": " "}]), tokenizer, 0, 1000)
    with pytest.raises(Refused, match="no answer"):
        encode(talk(CHAT[:2]), tokenizer, 0, 1000)
    bare = with_template(tokenizer, "")
    with pytest.raises(ValueError, match="no chat template"):
        encode(talk(CHAT), bare, 0, 1000)


def test_refusals_are_counted_by_reason(tokenizer: Any) -> None:
    long = [{"role": "user", "content": "x" * 60}, {"role": "assistant", "content": "y"}]
    samples, report = encode_all(
        [talk(CHAT[:3]), talk(CHAT[:2]), talk(long), talk(CHAT[:3], truncated=True)], tokenizer, 70
    )
    assert [s.sample_id for s in samples] == [0, 3]
    assert report.refused == {"no answer": 1, "no supervised token before max_length": 1}
    assert (report.kept, report.truncated) == (2, 1)
    assert report.supervised == sum(int(s.supervised.sum()) for s in samples)


def test_label_indices_of_every_depth_lie_inside_the_answer() -> None:
    """B05: ids 10..21, answer at 5..8. The first token of an answer is an anchor, never a label, in every method."""
    supervised_BT = torch.zeros(1, 12, dtype=torch.bool)
    supervised_BT[0, 5:9] = True
    batch = Batch(
        torch.arange(10, 22)[None], supervised_BT, torch.arange(12)[None], torch.zeros(1, 12, dtype=torch.int64)
    )
    pairs = {d: [(t, t + 1 + d) for t in supervised(batch, d)[0].nonzero().flatten().tolist()] for d in range(1, 5)}
    assert pairs[1] == [(4, 6), (5, 7), (6, 8)]  # row 4 = the last prompt position
    assert pairs[2] == [(4, 7), (5, 8)]
    assert pairs[3] == [(4, 8)]
    assert pairs[4] == []


def test_pairs_never_cross_documents() -> None:
    on = torch.ones(1, 6, dtype=torch.bool)
    batch = Batch(torch.arange(6)[None], on, torch.tensor([[0, 1, 2, 0, 1, 2]]), torch.tensor([[7, 7, 7, 9, 9, 9]]))
    assert supervised(batch, 1)[0].tolist() == [True, False, False, True, False, False]
    assert supervised(batch, 2)[0].tolist() == [False] * 6


THOUGHTS = [
    {"role": "user", "content": "one"},
    {"role": "assistant", "content": "<think>\na\n</think>\n\nFirst"},
    {"role": "user", "content": "two"},
    {"role": "assistant", "content": "<think>\nb\n</think>\n\nSecond"},
    {"role": "user", "content": "three"},
    {"role": "assistant", "content": "<think>\nc\n</think>\n\nThird"},
]


def test_thinking_text_is_supervised_where_the_rendering_shows_it(tokenizer: Any) -> None:
    chosen = with_template(tokenizer, THINKING)
    sample = encode(talk(THOUGHTS), chosen, 0, 1000)
    assert spans(sample, chosen) == [
        "First<|im_end|>",
        "Second<|im_end|>",
        "<think>\nc\n</think>\n\nThird<|im_end|>",
    ]
    assert chosen.decode(sample.ids) == chosen.apply_chat_template(THOUGHTS, tokenize=False)


def test_an_empty_thinking_block_of_the_template_is_not_supervised(tokenizer: Any) -> None:
    chosen = with_template(tokenizer, THINKING)
    chat = [{"role": "user", "content": "one"}, {"role": "assistant", "content": "Plain"}]
    assert spans(encode(talk(chat), chosen, 0, 1000), chosen) == ["Plain<|im_end|>"]


def test_a_response_with_only_the_closing_tag_gets_no_second_block(tokenizer: Any) -> None:
    chosen = with_template(tokenizer, THINKING)
    chat = [{"role": "user", "content": "one"}, {"role": "assistant", "content": "why\n</think>\n\nBecause"}]
    sample = encode(talk(chat), chosen, 0, 1000)
    assert chosen.decode(sample.ids).count("</think>") == 1
    assert spans(sample, chosen) == ["why\n</think>\n\nBecause<|im_end|>"]  # the generation prompt opens the block
    assert prompt_ids(chat[:1], chosen) == sample.ids[~sample.supervised].tolist()[:-1]
    wraps = THINKING.replace("'<think>' not in c", "true")
    with pytest.raises(Refused, match="do not pair up"):
        encode(
            talk([chat[0], {"role": "assistant", "content": "x</think>"}]),
            with_template(tokenizer, wraps.replace("\n\n</think>", "\n")),
            0,
            99,
        )


def test_generated_ids_are_trained_on_one_for_one(tokenizer: Any) -> None:
    chosen = with_template(tokenizer, THINKING)
    text = "why\n</think>\n\nBecause"
    ids = [i for c in text for i in chosen(c, add_special_tokens=False)["input_ids"]]  # not how it would be tokenised
    whole = chosen(text, add_special_tokens=False)["input_ids"]
    assert ids != whole
    for given in (ids, [*ids, chosen.eos_token_id]):
        chat = [{"role": "user", "content": "one"}, {"role": "assistant", "content": text}]
        sample = encode(talk(chat, ids=given), chosen, 0, 1000)
        prompt = prompt_ids(chat[:1], chosen)
        assert sample.ids.tolist() == [*prompt, *ids, chosen.eos_token_id]
        assert sample.supervised.tolist() == [False] * len(prompt) + [True] * (len(ids) + 1)
        assert chosen.decode(sample.ids).count("<think>") == 1
    cut = encode(talk(chat, truncated=True, ids=ids), chosen, 0, 1000)
    assert cut.ids.tolist() == [*prompt, *ids]


def test_ids_of_another_tokenizer_are_not_used(tokenizer: Any) -> None:
    chat = [{"role": "user", "content": "one"}, {"role": "assistant", "content": "two"}]
    for foreign in ([5000, 5001], [40, 41, 42]):
        samples, report = encode_all([talk(chat, ids=foreign)], tokenizer, 1000)
        assert spans(samples[0], tokenizer) == ["two<|im_end|>"]
        assert report.foreign_ids == 1
        assert "another tokenizer's" in str(report)


def test_reasoning_fields_and_tool_calls_are_part_of_the_answer(tokenizer: Any) -> None:
    template = (
        "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' }}"
        "{% if m.reasoning_content %}{{ '<think>' + m.reasoning_content + '</think>' }}{% endif %}{{ m.content }}"
        "{% for call in m.tool_calls or [] %}{{ '<call>' + call.name + '</call>' }}{% endfor %}{{ '<|im_end|>\n' }}"
        "{% endfor %}" + ASK
    )
    chosen = with_template(tokenizer, template)
    chat = [
        {"role": "user", "content": "one"},
        {"role": "assistant", "content": "", "tool_calls": [{"name": "look"}]},
        {"role": "tool", "content": "seen"},
        {"role": "assistant", "content": "Done", "reasoning_content": "hm"},
    ]
    assert spans(encode(talk(chat), chosen, 0, 1000), chosen) == [
        "<call>look</call><|im_end|>",
        "<think>hm</think>Done<|im_end|>",
    ]


@pytest.mark.parametrize("name", TEMPLATES)
def test_truncated_answers_stay_open(tokenizer: Any, name: str) -> None:
    chosen = with_template(tokenizer, TEMPLATES[name])
    sample = encode(talk(CHAT, truncated=True), chosen, 0, 1000)
    assert spans(sample, chosen)[-1] == "Bye now"
    assert int(sample.ids[-1]) not in stop_ids(chosen)
    assert spans(sample, chosen)[0] == "Hello there<|im_end|>"


def test_no_end_of_turn_is_invented_at_the_cut(tokenizer: Any) -> None:
    whole = encode(talk(CHAT), tokenizer, 0, 1000)
    length = int(whole.supervised.nonzero()[3]) + 1
    cut = encode(talk(CHAT), tokenizer, 0, length)
    assert torch.equal(cut.ids, whole.ids[:length])
    assert torch.equal(cut.supervised, whole.supervised[:length])
    assert int(cut.ids[-1]) != tokenizer.eos_token_id


def test_real_eos_counts_although_pad_is_the_same_id(tokenizer: Any) -> None:
    assert tokenizer.pad_token_id == tokenizer.eos_token_id
    sample = encode(talk(CHAT), tokenizer, 0, 1000)
    ends = (sample.ids == tokenizer.eos_token_id) & sample.supervised
    assert int(ends.sum()) == 3


def test_the_view_colours_what_is_supervised(tokenizer: Any) -> None:
    sample = encode(talk(CHAT[:3]), tokenizer, 0, 1000)
    text = coloured(sample, tokenizer)
    green = "".join(text.plain[s.start : s.end] for s in text.spans if "green" in str(s.style))
    assert green == "Hello there<|im_end|>"


def test_masks_command_prints_samples_and_counts(tmp_path: Any, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "chat.jsonl"
    file.write_text("".join(json.dumps({"messages": CHAT[1:3], "category": "small"}) + "\n" for _ in range(4)))
    run_masks(MasksConfig(target="tiny", data=DataConfig(source=str(file)), count=2))
    out = capsys.readouterr().out
    assert out.count("tokens supervised") == 2
    assert "small" in out
    assert "4 samples" in out
    with pytest.raises(ValueError, match="count"):
        dataclasses.replace(MasksConfig(), count=0)
