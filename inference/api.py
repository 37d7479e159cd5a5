"""What a request to the server may say, in the form of OpenAI's chat completions and completions: read, checked, refused
by name. Nothing here knows of HTTP or of a model. Tests: tests/test_serve.py.

A field that is `null` counts as left out. Fields of OpenAI's that ask for something the server has not are refused,
except where their value asks for nothing; what is said of the client alone (`user`, `metadata`, `safety_identifier`) is
read by nobody.
"""

from __future__ import annotations

import difflib
import json
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from ..losses.probs import SamplingParams

MAX_N = 16
MAX_STOPS = 16
MAX_STOP_CHARS = 256
MAX_TOP_LOGPROBS = 20
MAX_PATTERN_CHARS = 4096
ROLES = ("system", "developer", "user", "assistant")


class ApiError(Exception):
    """A request that is not answered: HTTP status, message, the field that is at fault, a code."""

    def __init__(self, status: int, message: str, param: str | None = None, code: str | None = None) -> None:
        super().__init__(message)
        self.status, self.message, self.param, self.code = status, message, param, code

    def body(self) -> dict[str, Any]:
        """The error in OpenAI's form."""
        kind = "invalid_request_error" if self.status < 500 and self.status != 429 else "server_error"
        kind = "rate_limit_error" if self.status == 429 else kind
        return {"error": {"message": self.message, "type": kind, "param": self.param, "code": self.code}}


@dataclass(frozen=True)
class Ask:
    """A request as it was understood. `messages` of a chat, or `prompts` (texts or token ids); `params` says how to
    sample, its `max_new_tokens` is the default where `sized` is False; `n` answers per prompt. `form`: the field that says
    what answers must look like, and a JSON schema or a regular expression."""

    model: str
    messages: tuple[dict[str, str], ...] | None
    prompts: tuple[str | tuple[int, ...], ...]
    params: SamplingParams
    sized: bool
    n: int
    stream: bool
    include_usage: bool
    form: tuple[str, Any] | None = None


def read_json(raw: bytes) -> dict[str, Any]:
    """The body. Raises ApiError (400) unless it is a JSON object."""

    def refuse(word: str) -> None:
        raise ValueError(f"{word} is no JSON number")

    try:
        body = json.loads(raw.decode("utf-8"), parse_constant=refuse)
    except (ValueError, RecursionError) as error:  # JSONDecodeError and UnicodeDecodeError are ValueErrors
        raise ApiError(400, f"the body is not valid JSON: {error}", code="invalid_json") from None
    if not isinstance(body, dict):
        raise ApiError(400, f"the body must be a JSON object, not {_kind(body)}", code="invalid_json")
    return body


def _named(name: str) -> str:
    """A field's name as an answer may repeat it."""
    return name[:100].encode("utf-8", "replace").decode()


def read_ask(body: Mapping[str, Any], chat: bool, default_tokens: int) -> Ask:
    """What a body asks for. Raises ApiError (400) naming the field that is unknown, of a wrong type or out of range."""
    given = {name: value for name, value in body.items() if value is not None}
    fields = COMMON | (CHAT if chat else COMPLETIONS)
    for name, value in given.items():
        if name in fields:
            fields[name](name, value)
        elif name in UNSUPPORTED:
            if value not in UNSUPPORTED[name]:
                raise ApiError(400, f"{name} is not supported by this server: leave it out", name, "unsupported")
        elif name not in IGNORED:
            near = difflib.get_close_matches(name, fields, 1, 0.6)
            hint = f"; nearest: {near[0]}" if near else ""
            raise ApiError(400, f"unknown field {_named(name)!r}{hint}", _named(name), "unknown_field")
    prompt_field = "messages" if chat else "prompt"
    for name in ("model", prompt_field):
        if name not in given:
            raise ApiError(400, f"{name} is missing", name, "missing_field")
    length, sized = given.get("max_tokens"), "max_tokens"
    if given.get("max_completion_tokens") is not None:
        if length is not None:
            raise ApiError(400, "give max_completion_tokens or max_tokens, not both", "max_completion_tokens")
        length, sized = given["max_completion_tokens"], "max_completion_tokens"
    stream = given.get("stream", False)
    options = given.get("stream_options", {})
    if options and not stream:
        raise ApiError(400, "stream_options are for stream=true", "stream_options")
    logprobs, best = _logprobs(given, chat)
    stop = given.get("stop", ())
    params = _sampling(
        sized,
        temperature=float(given.get("temperature", 1.0)),
        top_k=max(0, given.get("top_k", 0)),  # some clients say -1 for all
        top_p=float(given.get("top_p", 1.0)),
        min_p=float(given.get("min_p", 0.0)),
        repetition_penalty=float(given.get("repetition_penalty", 1.0)),
        presence_penalty=float(given.get("presence_penalty", 0.0)),
        frequency_penalty=float(given.get("frequency_penalty", 0.0)),
        min_new_tokens=given.get("min_tokens", 0),
        max_new_tokens=max(default_tokens, given.get("min_tokens", 0)) if length is None else length,
        seed=given.get("seed"),
        stop_ids=tuple(given.get("stop_token_ids", ())),
        stop_strings=(stop,) if isinstance(stop, str) else tuple(stop),
        ignore_eos=given.get("ignore_eos", False),
        logprobs=logprobs,
        top_logprobs=best,
    )
    messages = tuple(_message(i, x) for i, x in enumerate(given["messages"])) if chat else None
    prompts = () if chat else _prompts(given["prompt"])
    n = given.get("n", 1)
    if n * len(prompts) > MAX_N:
        raise ApiError(400, f"n={n} for {len(prompts)} prompts are {n * len(prompts)} answers, at most {MAX_N}", "n")
    usage = options.get("include_usage") is True
    return Ask(given["model"], messages, prompts, params, length is not None, n, stream, usage, _form(given))


def _sampling(length_field: str, **options: Any) -> SamplingParams:
    try:
        return SamplingParams(**options)
    except ValueError as error:
        ours = {"max_new_tokens": length_field, "min_new_tokens": "min_tokens", "stop_strings": "stop"}
        message = re.sub("|".join(ours), lambda found: ours[found[0]], str(error)).removeprefix("sampling: ")
        raise ApiError(400, message, message.split("=")[0]) from None


def _logprobs(given: Mapping[str, Any], chat: bool) -> tuple[bool, int]:
    """Whether log-probabilities are wanted, and how many of the likeliest tokens beside each."""
    if not chat:
        return "logprobs" in given, given.get("logprobs", 0)
    wanted, best = given.get("logprobs", False), given.get("top_logprobs", 0)
    if best and not wanted:
        raise ApiError(400, "top_logprobs needs logprobs=true", "top_logprobs")
    return wanted, best


def _message(i: int, message: Any) -> dict[str, str]:
    """One message with its content as text."""
    where = f"messages[{i}]"
    if not isinstance(message, dict):
        raise ApiError(400, f"{where} must be an object, not {_kind(message)}", where)
    for name, value in message.items():
        if value is not None and name not in ("role", "content", "name", "refusal"):
            at = f"{where}.{_named(name)}"
            raise ApiError(400, f"{at} is not supported by this server", at, "unsupported")
    role, content = message.get("role"), message.get("content")
    if role not in ROLES:
        raise ApiError(400, f"{where}.role must be one of {', '.join(ROLES)}, not {_show(role)}", f"{where}.role")
    if isinstance(content, list):
        parts = []
        for j, part in enumerate(content):
            at = f"{where}.content[{j}]"
            if not isinstance(part, dict) or part.get("type") != "text":
                raise ApiError(400, f"{at} must be a part of type text; this server reads no other", at)
            _text(f"{at}.text", part.get("text"))
            parts.append(part["text"])
        content = "".join(parts)
    _text(f"{where}.content", content)
    assert isinstance(content, str)
    return {"role": "system" if role == "developer" else role, "content": content}


def _prompts(prompt: Any) -> tuple[str | tuple[int, ...], ...]:
    """Texts or lists of token ids, one or several."""
    if isinstance(prompt, str) or (isinstance(prompt, list) and prompt and not isinstance(prompt[0], str | list)):
        prompt = [prompt]
    if not isinstance(prompt, list) or not prompt:
        raise ApiError(400, f"prompt must be a text or token ids, or a list of those, not {_show(prompt)}", "prompt")
    for x in prompt:
        if isinstance(x, str):
            _text("prompt", x)
        elif not isinstance(x, list) or not all(isinstance(y, int) and not isinstance(y, bool) for y in x):
            raise ApiError(400, "prompt must be a text or token ids, or a list of those", "prompt")
    return tuple(x if isinstance(x, str) else tuple(x) for x in prompt)


def _kind(value: Any) -> str:
    names = {dict: "an object", list: "a list", str: "a text", bool: "true or false", type(None): "null"}
    return names.get(type(value), "a number")


def _show(value: Any) -> str:
    try:
        text = json.dumps(value)
    except RecursionError:  # read where the stack was less deep
        return _kind(value)
    return text if len(text) <= 40 else _kind(value)


def _text(name: str, value: Any) -> None:
    if not isinstance(value, str):
        raise ApiError(400, f"{name} must be a text, not {_kind(value)}", name)
    try:
        value.encode("utf-8")
    except UnicodeEncodeError:
        raise ApiError(400, f"{name} holds half a character (a lone surrogate)", name) from None


def _flag(name: str, value: Any) -> None:
    if not isinstance(value, bool):
        raise ApiError(400, f"{name} must be true or false, not {_show(value)}", name)


def _number(name: str, value: Any) -> None:
    if isinstance(value, bool) or not isinstance(value, int | float) or not abs(value) < 1e9:
        raise ApiError(400, f"{name} must be a number below 1e9, not {_show(value)}", name)


def _whole(low: int, high: int) -> Callable[[str, Any], None]:
    def check(name: str, value: Any) -> None:
        if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
            raise ApiError(400, f"{name} must be an integer in {low}..{high}, not {_show(value)}", name)

    return check


def _stops(name: str, value: Any) -> None:
    for x in value if isinstance(value, list) else [value]:
        _text(name, x)
        if not 0 < len(x) <= MAX_STOP_CHARS:
            raise ApiError(400, f"{name}: a text of {len(x)} characters, must have 1..{MAX_STOP_CHARS}", name)
    if isinstance(value, list) and len(value) > MAX_STOPS:
        raise ApiError(400, f"{name}: {len(value)} texts, at most {MAX_STOPS}", name)


def _ids(name: str, value: Any) -> None:
    if not isinstance(value, list) or len(value) > 64:
        raise ApiError(400, f"{name} must be a list of at most 64 token ids, not {_show(value)}", name)
    for x in value:
        _whole(0, 2**31)(name, x)


def _list(name: str, value: Any) -> None:
    if not isinstance(value, list) or not value:
        raise ApiError(400, f"{name} must be a list that is not empty, not {_show(value)}", name)


def _options(name: str, value: Any) -> None:
    if not isinstance(value, dict) or set(value) - {"include_usage"}:
        raise ApiError(400, f"{name} must be an object with include_usage alone, not {_show(value)}", name)
    _flag(f"{name}.include_usage", value.get("include_usage", False))


def _format(name: str, value: Any) -> None:
    kind = value.get("type") if isinstance(value, dict) else None
    if kind not in ("text", "json_object", "json_schema") or set(value) - {"type", "json_schema"}:
        raise ApiError(
            400, f"{name} must be an object of type text, json_object or json_schema, not {_show(value)}", name
        )
    asked = value.get("json_schema")
    if kind != "json_schema":
        if asked is not None:
            raise ApiError(400, f"{name}.json_schema is for type json_schema", name)
    elif not isinstance(asked, dict) or set(asked) - {"name", "description", "schema", "strict"}:
        raise ApiError(400, f"{name}.json_schema must be an object with name, schema, strict, description alone", name)
    elif not isinstance(asked.get("schema"), dict):
        raise ApiError(400, f"{name}.json_schema.schema must be an object, not {_show(asked.get('schema'))}", name)


def _pattern(name: str, value: Any) -> None:
    _text(name, value)
    if not 0 < len(value) <= MAX_PATTERN_CHARS:
        raise ApiError(400, f"{name}: {len(value)} characters, must have 1..{MAX_PATTERN_CHARS}", name)


def _form(given: Mapping[str, Any]) -> tuple[str, Any] | None:
    """The field that says what answers must look like, and the JSON schema or regular expression that it asks for."""
    kind = given.get("response_format", {"type": "text"})
    asked: list[tuple[str, Any]] = []
    if kind["type"] != "text":
        schema = kind["json_schema"]["schema"] if kind["type"] == "json_schema" else {"type": "object"}
        asked.append(("response_format", schema))
    if "guided_regex" in given:
        asked.append(("guided_regex", given["guided_regex"]))
    if len(asked) > 1:
        raise ApiError(400, "give response_format or guided_regex, not both", "guided_regex")
    if asked and given.get("min_tokens"):
        raise ApiError(400, f"min_tokens does not go with {asked[0][0]}, which says where an answer ends", "min_tokens")
    return asked[0] if asked else None


def _anything(name: str, value: Any) -> None:
    """Checked elsewhere."""


COMMON: dict[str, Callable[[str, Any], None]] = {
    "model": _text,
    "max_tokens": _whole(1, 2**31),
    "min_tokens": _whole(0, 2**31),
    "temperature": _number,
    "top_p": _number,
    "top_k": _whole(-1, 2**31),
    "min_p": _number,
    "repetition_penalty": _number,
    "presence_penalty": _number,
    "frequency_penalty": _number,
    "seed": _whole(-(2**63), 2**63 - 1),
    "n": _whole(1, MAX_N),
    "stop": _stops,
    "stop_token_ids": _ids,
    "ignore_eos": _flag,
    "stream": _flag,
    "stream_options": _options,
    "response_format": _format,
    "guided_regex": _pattern,
}
CHAT: dict[str, Callable[[str, Any], None]] = {
    "messages": _list,
    "max_completion_tokens": _whole(1, 2**31),
    "logprobs": _flag,
    "top_logprobs": _whole(0, MAX_TOP_LOGPROBS),
}
COMPLETIONS: dict[str, Callable[[str, Any], None]] = {"prompt": _anything, "logprobs": _whole(0, MAX_TOP_LOGPROBS)}
IGNORED = ("user", "metadata", "safety_identifier")
# Fields of OpenAI's, and the values that ask for nothing.
UNSUPPORTED: dict[str, tuple[Any, ...]] = {
    "audio": (),
    "best_of": (1,),
    "echo": (False,),
    "function_call": ("none",),
    "functions": ([],),
    "logit_bias": ({},),
    "modalities": (["text"],),
    "parallel_tool_calls": (True, False),
    "prediction": (),
    "reasoning_effort": (),
    "service_tier": ("auto", "default"),
    "store": (False,),
    "suffix": ("",),
    "tool_choice": ("none",),
    "tools": ([],),
    "web_search_options": (),
}
