"""Answers for training: truncation counted, nothing invented, resumable, by target or server (B01)."""

import dataclasses
import json
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from draftsmith.data.encode import encode_all, prompt_ids, stop_ids
from draftsmith.data.sources import Conversation, DataConfig, load_conversations
from draftsmith.inference import endpoints
from draftsmith.inference import rollout as module
from draftsmith.inference.rollout import RolloutConfig, invent, rollout, rollout_endpoints, run_rollout
from draftsmith.inference.speculate import generate
from draftsmith.losses.probs import SamplingParams

PARAMS = SamplingParams(max_new_tokens=12)


def ask(i: int, *more: str) -> Conversation:
    messages = [{"role": "user", "content": f"prompt {i}"}]
    for text in more:
        messages += [{"role": "assistant", "content": "old answer"}, {"role": "user", "content": text}]
    return Conversation(f"c{i}", messages, category="chat", split="train")


def lines(path: Path) -> dict[str, dict[str, Any]]:
    records = [json.loads(line) for line in path.read_text().splitlines()]
    assert len({r["id"] for r in records}) == len(records)
    return {r["id"]: r for r in records}


class Stub(ThreadingHTTPServer):
    """A chat server: `reply(body)` gives (status, choice)."""

    daemon_threads = True

    def __init__(self, reply: Callable[[dict[str, Any]], tuple[int, dict[str, Any]]]) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.reply = reply
        self.bodies: list[dict[str, Any]] = []
        self.keys: set[str | None] = set()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}/v1"


class Handler(BaseHTTPRequestHandler):
    server: Stub

    def do_GET(self) -> None:
        self.answer(200, {"data": [{"id": "served-model"}]})

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.server.bodies.append(body)
        self.server.keys.add(self.headers.get("Authorization"))
        status, choice = self.server.reply(body)
        self.answer(status, {"choices": [choice]})

    def answer(self, status: int, content: dict[str, Any]) -> None:
        data = json.dumps(content).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, *_: Any) -> None:
        pass


@pytest.fixture
def serve() -> Iterator[Callable[..., Stub]]:
    servers: list[Stub] = []

    def start(reply: Callable[[dict[str, Any]], tuple[int, dict[str, Any]]]) -> Stub:
        servers.append(Stub(reply))
        threading.Thread(target=servers[-1].serve_forever, daemon=True).start()
        return servers[-1]

    yield start
    for server in servers:
        server.shutdown()
        server.server_close()


def choice(text: str | None, reason: str = "stop") -> tuple[int, dict[str, Any]]:
    return 200, {"message": {"role": "assistant", "content": text}, "finish_reason": reason}


def number(body: dict[str, Any]) -> int:
    return int(body["messages"][0]["content"].split()[1])


def test_truncated_answers_are_counted_and_stay_open(serve: Any, tokenizer: Any, tmp_path: Path) -> None:
    """B01: 10 answers, 4 cut at the limit; an 11th is empty and counts as failed."""

    def reply(body: dict[str, Any]) -> tuple[int, dict[str, Any]]:
        i = number(body)
        return choice("" if i == 10 else f"answer {i}", "length" if i % 3 == 0 and i < 10 else "stop")

    server, out = serve(reply), tmp_path / "a.jsonl"
    report = rollout_endpoints([server.url], [ask(i) for i in range(11)], out, PARAMS, progress=False)
    assert (report.answered, report.truncated, dict(report.failed)) == (10, 4, {"empty answer": 1})
    assert "4 truncated" in str(report) and "1 (empty answer)" in str(report)
    assert {r["id"] for r in lines(out).values() if r["truncated"]} == {"c0", "c3", "c6", "c9"}
    assert server.bodies[0]["model"] == "served-model" and server.bodies[0]["max_tokens"] == 12

    conversations = load_conversations(DataConfig(source=str(out)))
    samples, encoded = encode_all(conversations, tokenizer, 1000)
    assert encoded.truncated == 4
    for conv, sample in zip(conversations, samples, strict=True):
        last = sample.ids[sample.supervised][-1]
        assert (int(last) in stop_ids(tokenizer)) == (not conv.truncated)
    dropped = load_conversations(DataConfig(source=str(out), keep_truncated=False))
    assert len(dropped) == 6


def test_a_server_that_is_busy_is_asked_again(serve: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(endpoints, "REST", 0.01)
    tries: dict[int, int] = {}

    def reply(body: dict[str, Any]) -> tuple[int, dict[str, Any]]:
        i = number(body)
        tries[i] = tries.get(i, 0) + 1
        return (503, {}) if tries[i] < 3 else (400, {}) if i == 1 else choice("fine")

    report = rollout_endpoints([serve(reply).url], [ask(0), ask(1)], tmp_path / "a.jsonl", PARAMS, progress=False)
    assert report.answered == 1 and dict(report.failed) == {"server answered 400": 1}
    assert tries == {0: 3, 1: 3}


def test_a_server_that_is_gone_or_refuses_ends_the_run(
    serve: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(endpoints, "REST", 0.01)
    out = tmp_path / "a.jsonl"
    with pytest.raises(ValueError, match=r"cannot be reached \(ConnectError, 4 tries\)"):
        rollout_endpoints(["http://127.0.0.1:9/v1"], [ask(0)], out, PARAMS, progress=False)
    with pytest.raises(ValueError, match="answered 401: wrong key, path or model"):
        rollout_endpoints([serve(lambda _: (401, {})).url], [ask(0)], out, PARAMS, progress=False)
    with pytest.raises(ValueError, match=r"no conversation could be answered: .*1 \(finish_reason 'tool_calls'\)"):
        rollout_endpoints(
            [serve(lambda _: choice("x", "tool_calls")).url], [ask(0)], tmp_path / "b.jsonl", PARAMS, progress=False
        )


def test_the_key_goes_to_the_server_and_nowhere_else(
    serve: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    source = tmp_path / "prompts.jsonl"
    source.write_text(json.dumps({"messages": ask(0).messages}) + "\n")
    server = serve(lambda _: choice("fine"))
    config = RolloutConfig(
        out=str(tmp_path / "a.jsonl"),
        endpoint=(server.url,),
        api_key_env="PLANTED",
        data=DataConfig(source=str(source)),
    )
    with pytest.raises(ValueError, match="'PLANTED': this environment variable is not set"):
        run_rollout(config)
    monkeypatch.setenv("PLANTED", "sk-planted-secret")
    run_rollout(config)
    assert server.keys == {"Bearer sk-planted-secret"}
    captured = capsys.readouterr()
    assert "sk-planted" not in captured.out + captured.err
    assert all("sk-planted" not in path.read_text() for path in tmp_path.iterdir())


def test_every_turn_is_answered_in_its_place(serve: Any, tmp_path: Path) -> None:
    def reply(body: dict[str, Any]) -> tuple[int, dict[str, Any]]:
        turns = [m["content"] for m in body["messages"]]
        return choice(f"<{'|'.join(turns)}>", "length" if turns[-1] == "stop here" else "stop")

    conversations = [
        ask(0, "two"),
        ask(1, "stop here", "never asked"),
        Conversation("t", [{"role": "tool", "content": "x"}]),
    ]
    out = tmp_path / "a.jsonl"
    report = rollout_endpoints([serve(reply).url], conversations, out, PARAMS, progress=False)
    found = lines(out)
    first = "<prompt 0>"
    assert [m["content"] for m in found["c0"]["messages"]] == ["prompt 0", first, "two", f"<prompt 0|{first}|two>"]
    assert [m["role"] for m in found["c1"]["messages"]] == ["user", "assistant"] * 2
    assert found["c1"]["truncated"] and not found["c0"]["truncated"]
    assert (found["c0"]["category"], found["c0"]["split"]) == ("chat", "train")
    assert dict(report.failed) == {"nothing to answer": 1}


def test_a_target_answers_as_plain_decoding_does(tiny: Any, tmp_path: Path) -> None:
    target, out = tiny(), tmp_path / "a.jsonl"
    conversations = [ask(i) for i in range(5)]
    report = rollout(target, conversations, out, PARAMS, batch_rows=2, progress=False)
    found = lines(out)
    for conv in conversations:
        record = found[conv.id]
        (result,) = generate(target, [prompt_ids(conv.messages, target.tokenizer)], PARAMS)
        assert record["ids"] == result.ids
        assert record["truncated"] == (result.stop_reason == "length")
    assert report.truncated == sum(r["truncated"] for r in found.values()) > 0
    samples, encoded = encode_all(load_conversations(DataConfig(source=str(out))), target.tokenizer, 1000)
    assert encoded.foreign_ids == 0
    for sample, conv in zip(samples, conversations, strict=True):
        assert sample.ids[sample.supervised].tolist() == found[conv.id]["ids"]


def test_sampled_answers_depend_on_seed_and_id_alone(tiny: Any, tmp_path: Path) -> None:
    target, params = tiny(), dataclasses.replace(PARAMS, temperature=1.0)
    conversations = [ask(i, "more") for i in range(4)]
    for name, order, rows, seed in (
        ("a", conversations, 4, 1),
        ("b", conversations[::-1], 1, 1),
        ("c", conversations, 4, 2),
    ):
        rollout(target, order, tmp_path / f"{name}.jsonl", params, rows, seed, progress=False)
    a, b, c = (lines(tmp_path / f"{name}.jsonl") for name in "abc")
    assert a == b
    assert a != c
    assert len({r["messages"][1]["content"] for r in a.values()}) == 4


def test_an_interrupted_run_goes_on_behind_the_last_whole_line(tiny: Any, tmp_path: Path) -> None:
    target = tiny()
    conversations = [ask(i) for i in range(6)]
    whole, out = tmp_path / "whole.jsonl", tmp_path / "a.jsonl"
    rollout(target, conversations, whole, PARAMS, progress=False)
    rollout(target, conversations[:3], out, PARAMS, progress=False)
    with out.open("a") as file:
        file.write('{"id": "c3", "mess')  # what a killed run leaves
    report = rollout(target, conversations, out, PARAMS, progress=False)
    assert lines(out) == lines(whole)
    assert (report.answered, report.there) == (6, 3)
    assert report.truncated == sum(r["truncated"] for r in lines(whole).values())
    before = out.read_bytes()
    rollout(target, conversations, out, PARAMS, progress=False)
    assert out.read_bytes() == before


def test_answers_of_two_settings_never_mix(tiny: Any, tmp_path: Path) -> None:
    out = tmp_path / "a.jsonl"
    rollout(tiny(), [ask(0)], out, PARAMS, progress=False)
    with pytest.raises(ValueError, match=r"a\.jsonl was made with max_new_tokens = 12, this run has 13"):
        rollout(tiny(), [ask(1)], out, dataclasses.replace(PARAMS, max_new_tokens=13), progress=False)
    with pytest.raises(ValueError, match="was made with seed = 0, this run has 1"):
        rollout(tiny(), [ask(1)], out, PARAMS, seed=1, progress=False)
    with pytest.raises(ValueError, match="was made with target = "):
        rollout(tiny(seed=1), [ask(1)], out, PARAMS, progress=False)
    (tmp_path / "a.jsonl.settings.json").unlink()
    with pytest.raises(ValueError, match="does not say how it was made"):
        rollout(tiny(), [ask(1)], out, PARAMS, progress=False)


def test_prompts_that_do_not_fit_are_failures(tiny: Any, tmp_path: Path) -> None:
    target = tiny()
    long = Conversation("long", [{"role": "user", "content": "x" * target.facts.max_positions}])
    report = rollout(target, [ask(0), long], tmp_path / "a.jsonl", PARAMS, progress=False)
    assert report.answered == 1
    assert dict(report.failed) == {"prompt and answer exceed the target's positions": 1}


def test_settings_that_cannot_be_are_refused() -> None:
    for name, value in {
        "out": "x.txt",
        "batch_rows": 0,
        "endpoint": ("localhost",),
        "temperature": -1.0,
        "in_flight": (2,),
    }.items():
        with pytest.raises(ValueError, match=name):
            RolloutConfig(**{"out": "x.jsonl", name: value})


def test_prompts_that_the_target_writes_itself(
    tiny: Callable[..., Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The draws continue the template's opened user turn; those cut, short or repeated are left out; they are drawn
    once, and other settings are refused."""
    target = tiny()
    texts = ["What is a good day?", "too short", "What is a good day?", "cut in the middle of", "Name the four winds."]
    asked: list[list[int]] = []

    def drawn(_: Any, prompts: list[list[int]], params: list[SamplingParams], **__: Any) -> list[Any]:
        assert len({p.seed for p in params}) == len(params) and all(p.temperature == 0.9 for p in params)
        asked.extend(prompts)
        first = len(asked) - len(prompts)
        return [
            SimpleNamespace(ids=target.tokenizer(t)["input_ids"], stop_reason="length" if "cut" in t else "eos")
            for t in texts[first : first + len(prompts)]
        ]

    monkeypatch.setattr(module, "generate", drawn)
    kept = tmp_path / "out.prompts.jsonl"
    got = invent(target, 5, kept, batch_rows=2, progress=False)
    assert [c.messages[0]["content"] for c in got] == ["What is a good day?", "Name the four winds."]
    whole = prompt_ids([{"role": "user", "content": "What is a good day?"}], target.tokenizer)
    opening = asked[0]
    assert whole[: len(opening)] == opening and target.tokenizer.decode(whole[len(opening) :]).startswith("What is a")
    assert invent(target, 5, kept, batch_rows=3, progress=False) == got and len(asked) == 5
    with pytest.raises(ValueError, match=r"made with seed = 0, this run has 1; choose another file"):
        invent(target, 5, kept, seed=1, progress=False)
    monkeypatch.setattr(module, "generate", lambda *_, **__: [SimpleNamespace(ids=[5], stop_reason="length")] * 2)
    with pytest.raises(ValueError, match="none of 2 draws is a prompt"):
        invent(target, 2, tmp_path / "none.jsonl", progress=False)


def test_invented_prompts_are_answered(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    talks = [ask(0), ask(1)]
    monkeypatch.setattr(module, "invent", lambda target, count, kept, *_: talks if kept.suffix == ".jsonl" else [])
    out = tmp_path / "answers.jsonl"
    run_rollout(RolloutConfig(out=str(out), target="tiny", invent=2, max_new_tokens=4, dtype="float32"))
    assert lines(out).keys() == {"c0", "c1"}
    with pytest.raises(ValueError, match="a chat endpoint opens no user turn"):
        RolloutConfig(out=str(out), invent=2, endpoint=("http://127.0.0.1:1/v1",))
    with pytest.raises(ValueError, match="invent = -1"):
        RolloutConfig(out=str(out), invent=-1)
