"""Conversations -> token ids and loss masks, for any chat template, by rendering it.

What is supervised: exactly the text that the assistant wrote, as it stands in the final rendering, and the token that
ends its turn. How the spans are found, in this order:

1. Templates with generation markers (any spelling of `{% generation %}`) say it themselves.
2. Otherwise each answer is replaced, alone, by a sentinel: what is rendered before and after the sentinel must also
   stand before and after the real answer in the full rendering, which gives the span, also where the template trims
   the answer or drops the thinking text of earlier turns.
3. Turns with reasoning fields or tool calls, and templates that treat an answer by what is in it: from the end of the
   generation prompt to the end of the turn, provided that both renderings are prefixes of the full one; else
   by sentinels put before and behind the real answer.

If none holds, the sample is refused; a span is never guessed. Answers that come with the ids the model generated are
not rendered at all: the ids follow the generation prompt one for one. An answer that was cut while it was generated
ends without an end-of-turn token, and none is invented where a sample is cut at `max_length`.
Tested by `pytest tests/test_data_masks.py`.
"""

from __future__ import annotations

import itertools
import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from .jacobi_states import PlacedStates
from .sources import Conversation

MARKER = re.compile(r"\{%[-+]?\s*generation\s*[-+]?%\}")
THINK = re.compile(r"</?think>")
SENTINEL = "zqSENTINELqz"
OPENED = ("reasoning_content", "reasoning", "thinking", "tool_calls")  # what an answer may hold beside its content
UNMASKABLE = "the chat template cannot be masked"
MAX_UNMASKABLE = 0.01  # above this share of conversations it is the template's fault, and the run stops


class Refused(ValueError):
    """A conversation that cannot be a sample; the message is the reason and is counted by it."""


@dataclass(frozen=True, eq=False)
class Sample:
    """One document: `ids` int64 [n], `supervised` bool [n] (True = a token the assistant wrote, or its end of turn).
    `order` int64 [n], where the answer came with it: the decoding pass that decided the token, -1 = not known.
    `states`, where the answer came with them: the Jacobi states of its blocks; `states.dense(ids)` is int64 [I, n], in which
    a block that is settled, and all that is in none, is the text itself."""

    sample_id: int
    ids: Tensor
    supervised: Tensor
    truncated: bool = False
    category: str = ""
    order: Tensor | None = None
    states: PlacedStates | None = None

    def __len__(self) -> int:
        return len(self.ids)


@dataclass
class EncodeReport:
    """What became of the conversations; counts of samples, but for `tokens` and `supervised`."""

    kept: int = 0
    tokens: int = 0
    supervised: int = 0
    truncated: int = 0
    cut: int = 0
    foreign_ids: int = 0
    refused: Counter[str] = field(default_factory=Counter)

    def __str__(self) -> str:
        share = self.supervised / max(self.tokens, 1)
        text = f"{self.kept:,} samples, {self.tokens:,} tokens, {self.supervised:,} supervised ({share:.1%})"
        text += f", {self.truncated:,} with a truncated answer, {self.cut:,} cut at max_length"
        if self.foreign_ids:
            text += f", {self.foreign_ids:,} whose generated ids are another tokenizer's (their text was taken)"
        reasons = ", ".join(f"{n:,} ({reason})" for reason, n in self.refused.most_common())
        return f"{text}; refused: {reasons or 'none'}"


def encode_all(
    conversations: Sequence[Conversation], tokenizer: Any, max_length: int
) -> tuple[list[Sample], EncodeReport]:
    """Encode all conversations; sample ids are their indices. Refused ones are counted by reason, never silently.

    Raises:
        ValueError: nothing is left, or the template cannot be masked (names the tokenizer).
    """
    samples, report = [], EncodeReport()
    for i, conv in enumerate(conversations):
        try:
            sample = encode(conv, tokenizer, i, max_length)
        except Refused as reason:
            report.refused[str(reason)] += 1
            continue
        samples.append(sample)
        report.kept += 1
        report.tokens += len(sample)
        report.supervised += int(sample.supervised.sum())
        report.truncated += sample.truncated
        report.cut += len(sample) == max_length
        report.foreign_ids += conv.answer_ids is not None and not ids_belong(conv, tokenizer)
    if report.refused[UNMASKABLE] > MAX_UNMASKABLE * len(conversations):
        raise ValueError(
            f"{UNMASKABLE}: template of {_name(tokenizer)}, {report.refused[UNMASKABLE]} of {len(conversations)} "
            "conversations; add generation markers to it (`{% generation %}`) or supply generated ids "
            "(`draftsmith rollout`), then look at `draftsmith masks`"
        )
    if not samples:
        raise ValueError(f"no sample is left with template of {_name(tokenizer)}; {report}")
    return samples, report


def encode(conv: Conversation, tokenizer: Any, sample_id: int, max_length: int) -> Sample:
    """Encode one conversation up to its last answer.

    Raises:
        Refused: no answer, empty answer, unmaskable or refusing template, nothing or everything supervised.
        ValueError: the tokenizer has no chat template, or no character offsets.
    """
    messages = _until_last_answer(conv.messages)
    order: list[int] | None = None
    states: PlacedStates | None = None
    if conv.answer_ids is not None and ids_belong(conv, tokenizer):
        ids, supervised, text = _tokens(messages[:-1], tokenizer, generation_prompt=True, truncated=False)
        answer = list(conv.answer_ids)
        _check_thinking(messages, text + tokenizer.decode(answer))
        if not conv.truncated and answer[-1] not in stop_ids(tokenizer):
            answer.append(_end_of_turn(tokenizer))
        if conv.answer_order is not None:  # an end of turn that decoding did not give was decided with the last pass
            added = len(answer) - len(conv.answer_order)
            order = [-1] * len(ids) + conv.answer_order + [max(conv.answer_order)] * added
        if conv.jacobi is not None:
            if conv.jacobi.highest >= len(tokenizer):
                raise Refused("Jacobi states hold ids that the tokenizer does not know")
            states = PlacedStates(conv.jacobi, len(ids))
        ids, supervised = ids + answer, supervised + [True] * len(answer)
    else:
        ids, supervised, text = _tokens(messages, tokenizer, generation_prompt=False, truncated=conv.truncated)
        _check_thinking(messages, text)
    if not any(supervised):
        raise Refused("empty answer")
    if all(supervised):
        raise Refused("every token is supervised")
    ids, supervised = ids[:max_length], supervised[:max_length]
    order_n = None if order is None else torch.tensor(order[:max_length])
    if not any(supervised):
        raise Refused("no supervised token before max_length")
    return Sample(
        sample_id, torch.tensor(ids), torch.tensor(supervised), conv.truncated, conv.category, order_n, states
    )


def ids_belong(conv: Conversation, tokenizer: Any) -> bool:
    """Whether the generated ids of the last answer are this tokenizer's: they decode to its text."""
    ids = conv.answer_ids
    if not ids or max(ids) >= len(tokenizer):
        return False
    answer = next((m["content"] for m in reversed(conv.messages) if m["role"] == "assistant"), "")
    return tokenizer.decode(ids, skip_special_tokens=True).strip() == answer.strip()


def prompt_ids(messages: Sequence[dict[str, Any]], tokenizer: Any) -> list[int]:
    """Ids that ask for the next answer: the rendering with the generation prompt, special tokens as the template says."""
    text = render(messages, tokenizer, generation_prompt=True)
    return list(tokenizer(text, add_special_tokens=False)["input_ids"])


def render(messages: Sequence[dict[str, Any]], tokenizer: Any, generation_prompt: bool) -> str:
    """The chat template's text.

    Raises:
        Refused: the template itself raises.
        ValueError: there is no template.
    """
    if not tokenizer.chat_template:
        raise ValueError(
            f"tokenizer of {_name(tokenizer)} has no chat template; set `tokenizer.chat_template` and save it"
        )
    try:
        return tokenizer.apply_chat_template(list(messages), tokenize=False, add_generation_prompt=generation_prompt)
    except Exception as error:  # Jinja's own errors and the template's `raise_exception`
        raise Refused(f"the chat template refuses it: {error}") from error


def stop_ids(tokenizer: Any) -> frozenset[int]:
    """Special tokens that may end a turn: all that are flagged special, but for a BOS that is not EOS as well."""
    added = {i for i, token in tokenizer.added_tokens_decoder.items() if token.special}
    ids = added | set(tokenizer.all_special_ids)
    if tokenizer.bos_token_id is not None and tokenizer.bos_token_id != tokenizer.eos_token_id:
        ids -= {tokenizer.bos_token_id}
    return frozenset(ids)


def _name(tokenizer: Any) -> str:
    return str(tokenizer.name_or_path or type(tokenizer).__name__).rstrip("/").rsplit("/", 1)[-1]


def _until_last_answer(messages: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Messages up to the last answer, leading answers dropped, unopened thinking text opened (its opening tag stood in
    the generation prompt that produced it)."""
    last = max((i for i, m in enumerate(messages) if m["role"] == "assistant"), default=-1)
    kept = [
        m if m["role"] != "assistant" else {**m, "content": _open_thinking(m["content"])} for m in messages[: last + 1]
    ]
    first = next((i for i, m in enumerate(kept) if m["role"] == "user"), None)
    if first is None:
        raise Refused("no answer" if last < 0 else "no user turn")
    kept = [m for i, m in enumerate(kept) if i > first or m["role"] != "assistant"]
    if kept[-1]["role"] != "assistant":
        raise Refused("no answer")
    if not kept[-1]["content"].strip() and not any(kept[-1].get(k) for k in OPENED):
        raise Refused("empty answer")
    return kept


def _open_thinking(content: str) -> str:
    close = content.find("</think>")
    return content if close < 0 or "<think>" in content[:close] else f"<think>\n{content}"


def _check_thinking(messages: Sequence[dict[str, Any]], text: str) -> None:
    """Refuse a rendering in which a thinking block is closed that is not open (an empty block wrapped around, say)."""
    if not any("</think>" in m["content"] for m in messages if m["role"] == "assistant"):
        return
    if any(THINK.search(m["content"]) for m in messages if m["role"] != "assistant"):
        return  # the user writes about tags: no telling whose they are
    opened = False
    for tag in THINK.findall(text):
        if opened == (tag == "<think>"):
            raise Refused("thinking tags do not pair up in the rendering")
        opened = tag == "<think>"


def _tokens(
    messages: list[dict[str, Any]], tokenizer: Any, generation_prompt: bool, truncated: bool
) -> tuple[list[int], list[bool], str]:
    """Ids, mask and text of a rendering; `truncated` = the last answer has no end of turn, the ids end with it."""
    text, spans = _spans(messages, tokenizer, generation_prompt)
    if not tokenizer.is_fast:
        raise ValueError(f"tokenizer of {_name(tokenizer)} gives no character offsets; load its fast (Rust) form")
    encoded = tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)
    ids = list(encoded["input_ids"])
    stops = stop_ids(tokenizer)
    ends = _running_max([end for _, end in encoded["offset_mapping"]])
    starts = [0, *ends[:-1]]
    blank = [i in stops or not text[a:b].strip() for i, a, b in zip(ids, starts, ends, strict=True)]
    supervised = [False] * len(ids)
    last = -1
    for begin, end in spans:
        inside = [i for i in range(len(ids)) if _within(text, starts[i], ends[i], begin, end)]
        if not inside:
            continue
        last = tail = inside[-1]
        while tail > inside[0] and blank[tail]:  # a marked span may hold the end of turn and a separator
            tail -= 1
        stop = next((i for i in range(tail + 1, len(ids)) if ids[i] in stops or not blank[i]), None)
        until = stop if stop is not None and ids[stop] in stops else last
        for i in range(inside[0], until + 1):
            supervised[i] = True
        last = min(last, until - (until == stop))
    if truncated and last >= 0:
        ids, supervised = ids[: last + 1], supervised[: last + 1]
    return ids, supervised, text


def _within(text: str, start: int, stop: int, begin: int, end: int) -> bool:
    """Whether a token over text[start:stop] belongs to the span. A token that straddles a border does when all that it
    holds outside is white space and something inside is not (`▁Hello`). Later bytes of a split character are empty."""
    if start == stop:
        return begin < stop <= end
    if start >= begin and stop <= end:
        return True
    inner = text[max(start, begin) : min(stop, end)]
    outer = text[start : max(start, min(begin, stop))] + text[min(stop, max(end, start)) : stop]
    return bool(inner.strip()) and not outer.strip()


def _running_max(values: list[int]) -> list[int]:
    out, high = [], 0
    for value in values:
        high = max(high, value)
        out.append(high)
    return out


def _spans(
    messages: list[dict[str, Any]], tokenizer: Any, generation_prompt: bool
) -> tuple[str, list[tuple[int, int]]]:
    """The rendering and the character spans of its answers, in order, without overlap."""
    text = render(messages, tokenizer, generation_prompt)
    template = tokenizer.get_chat_template()
    if MARKER.search(template):
        spans = _marked(messages, tokenizer, template, generation_prompt, text)
    else:
        answers = [i for i, m in enumerate(messages) if m["role"] == "assistant"]
        spans = [s for i in answers if (s := _span(messages, i, tokenizer, generation_prompt, text)) is not None]
    if any(b < a for a, b in spans) or any(b > c for (_, b), (c, _) in itertools.pairwise(spans)):
        raise Refused(UNMASKABLE)
    return text, [(a, b) for a, b in spans if text[a:b].strip()]


def _marked(
    messages: list[dict[str, Any]], tokenizer: Any, template: str, generation_prompt: bool, text: str
) -> list[tuple[int, int]]:
    from transformers.utils.chat_template_utils import render_jinja_template

    both: Any = render_jinja_template(  # declared as text, returns texts and spans
        [messages],
        chat_template=template,
        return_assistant_tokens_mask=True,
        add_generation_prompt=generation_prompt,
        **tokenizer.special_tokens_map,
    )
    (rendered,), (spans,) = both
    if rendered != text:
        raise Refused(UNMASKABLE)
    return [(int(a), int(b)) for a, b in spans]


def _span(
    messages: list[dict[str, Any]], i: int, tokenizer: Any, generation_prompt: bool, text: str
) -> tuple[int, int] | None:
    """Span of answer i in `text`; None where the template shows nothing of it."""
    methods = [_by_sentinel, _by_prefix, _by_borders]
    if any(messages[i].get(k) for k in OPENED):
        methods = [_by_prefix, _by_sentinel]
    for method in methods:
        span = method(messages, i, tokenizer, generation_prompt, text)
        if span is not None:
            return span
    if not messages[i]["content"].strip():
        return None
    raise Refused(UNMASKABLE)


def _by_sentinel(
    messages: list[dict[str, Any]], i: int, tokenizer: Any, generation_prompt: bool, text: str
) -> tuple[int, int] | None:
    start, end = _around(messages, i, SENTINEL, tokenizer, generation_prompt, text)
    return None if start is None or end is None or end < start else (start, end)


def _by_prefix(
    messages: list[dict[str, Any]], i: int, tokenizer: Any, generation_prompt: bool, text: str
) -> tuple[int, int] | None:
    before = render(messages[:i], tokenizer, generation_prompt=True)
    if before == render(messages[:i], tokenizer, generation_prompt=False):
        return None  # there is no generation prompt: the header of the turn would pass for the answer
    until = text if i + 1 == len(messages) and not generation_prompt else render(messages[: i + 1], tokenizer, False)
    if not text.startswith(before) or not text.startswith(until) or len(until) < len(before):
        return None
    return len(before), len(until)


def _by_borders(
    messages: list[dict[str, Any]], i: int, tokenizer: Any, generation_prompt: bool, text: str
) -> tuple[int, int] | None:
    content = messages[i]["content"]
    start, _ = _around(messages, i, SENTINEL + content, tokenizer, generation_prompt, text)
    _, end = _around(messages, i, content + SENTINEL, tokenizer, generation_prompt, text)
    return None if start is None or end is None or end < start else (start, end)


def _around(
    messages: list[dict[str, Any]], i: int, content: str, tokenizer: Any, generation_prompt: bool, text: str
) -> tuple[int | None, int | None]:
    """Where, in `text`, that ends which stands before the sentinel when answer i is `content`, and that begins which
    stands behind it; None where these are not the same as in `text`."""
    probe = [*messages[:i], {**messages[i], "content": content}, *messages[i + 1 :]]
    before, *after = render(probe, tokenizer, generation_prompt).split(SENTINEL)
    if len(after) != 1:
        return None, None
    start = len(before) if text.startswith(before) else None
    return start, len(text) - len(after[0]) if text.endswith(after[0]) else None


def _end_of_turn(tokenizer: Any) -> int:
    """The token that the template puts after an answer; EOS where it puts none."""
    probe = [{"role": "user", "content": "a"}, {"role": "assistant", "content": SENTINEL}]
    rest = render(probe, tokenizer, generation_prompt=False).rpartition(SENTINEL)[2]
    ids = tokenizer(rest, add_special_tokens=False)["input_ids"] if rest else []
    stops = stop_ids(tokenizer)
    found = next((i for i in ids if i in stops), tokenizer.eos_token_id)
    if found is None:
        raise ValueError(f"tokenizer of {_name(tokenizer)} has neither an end-of-turn nor an EOS token")
    return int(found)
