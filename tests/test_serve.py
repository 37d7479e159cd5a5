"""The server, asked over the loopback interface: answers equal to `generate`'s whoever else is served, streams, limits,
clients who leave, refusals by name, the key, the graceful stop (CASES B43, B44; PROMISES 22)."""

import json
import os
import signal
import socket
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import Any

import httpx
import pytest
import torch
from scripted_denoiser import denoiser_of
from serving import DECODE, complete, running, streamed, until

from draftsmith.inference import serve as command
from draftsmith.inference import server as http
from draftsmith.inference.commit import Request
from draftsmith.inference.diffuse import DiffuseConfig, diffuse
from draftsmith.inference.engine import Engine
from draftsmith.inference.generate import Assembled
from draftsmith.inference.grammar import regex_grammar
from draftsmith.inference.serve import (
    ServeConfig,
    Served,
    key_of,
    load_served,
    name_of,
    own_names,
    run_serve,
)
from draftsmith.inference.server import Server
from draftsmith.inference.speculate import DecodeConfig, generate
from draftsmith.inference.turns import Turns
from draftsmith.inference.worker import Limits
from draftsmith.kernels import rng
from draftsmith.losses.probs import SamplingParams
from draftsmith.models import METHODS


@pytest.fixture(scope="module")
def made(tiny: Any) -> Assembled:
    target = tiny(dtype=torch.float64)
    torch.manual_seed(0)
    drafter = METHODS["eagle3"](METHODS["eagle3"].Config(), target.facts)
    drafter.init_from_target(target)
    return Assembled(target, drafter.to(torch.float64).eval(), DECODE, None)


@pytest.fixture(scope="module")
def live(made: Assembled) -> Iterator[Any]:
    with running(made) as pair:
        yield pair


@pytest.fixture(scope="module")
def client(live: Any) -> httpx.Client:
    return live[0]


def offline(made: Assembled, prompt: str, **params: Any) -> Any:
    ids = made.target.tokenizer(prompt).input_ids
    return generate(made.target, [ids], SamplingParams(**params), made.drafter, DECODE)[0]


ASKS = [
    ("What is rain?", {"temperature": 0, "max_tokens": 30}, {"max_new_tokens": 30}),
    ("ab" * 20, {"seed": 7, "max_tokens": 11}, {"temperature": 1.0, "seed": 7, "max_new_tokens": 11}),
    ("x", {"seed": 8, "temperature": 0.7, "top_k": 9, "min_p": 0.01, "max_tokens": 44},
     {"temperature": 0.7, "seed": 8, "top_k": 9, "min_p": 0.01, "max_new_tokens": 44}),
    ("Ünïcode ☂", {"seed": 9, "top_p": 0.8, "repetition_penalty": 1.3, "frequency_penalty": 0.4, "max_tokens": 5},
     {"temperature": 1.0, "seed": 9, "top_p": 0.8, "repetition_penalty": 1.3, "frequency_penalty": 0.4,
      "max_new_tokens": 5}),
    ("again and again and again", {"temperature": 0, "presence_penalty": 0.5},
     {"presence_penalty": 0.5, "max_new_tokens": 12}),
]  # fmt: skip


def test_answers_are_those_of_generate_alone_and_among_others(client: httpx.Client, made: Assembled) -> None:
    wanted = [offline(made, prompt, **params) for prompt, _, params in ASKS]
    for (prompt, options, _), want in zip(ASKS, wanted, strict=True):
        reply = complete(client, prompt, **options)
        choice = reply["choices"][0]
        assert choice["text"] == want.text and choice["index"] == 0 and choice["logprobs"] is None
        assert choice["finish_reason"] == ("length" if want.stop_reason == "length" else "stop")
        prompt_tokens = want.stats.prompt_tokens
        assert reply["usage"] == {
            "prompt_tokens": prompt_tokens,
            "completion_tokens": len(want.ids),
            "total_tokens": prompt_tokens + len(want.ids),
            "prompt_tokens_details": {"cached_tokens": 0},
        }
        assert reply["object"] == "text_completion" and reply["model"] == "tiny"

    def one_client(shift: int) -> list[str]:
        order = [(i + shift) % len(ASKS) for i in range(len(ASKS))]
        texts = {}
        for i in order:
            prompt, options, _ = ASKS[i]
            if (i + shift) % 2:
                texts[i] = complete(client, prompt, **options)["choices"][0]["text"]
            else:
                chunks = streamed(client, "/v1/completions", prompt=prompt, **options)
                texts[i] = "".join(chunk["choices"][0]["text"] for chunk in chunks)
        return [texts[i] for i in range(len(ASKS))]

    with ThreadPoolExecutor(4) as pool:
        for texts in pool.map(one_client, range(4)):
            assert texts == [want.text for want in wanted]


def test_a_chat_is_rendered_by_the_template_and_streams_its_text(client: httpx.Client, made: Assembled) -> None:
    tokenizer = made.target.tokenizer
    talk = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hello ☂"}]
    ids = tokenizer.apply_chat_template(talk, add_generation_prompt=True, return_dict=False)
    params = SamplingParams(temperature=0.9, seed=3, max_new_tokens=40)
    want = generate(made.target, [ids], params, made.drafter, DECODE)[0]
    talk[0]["role"] = "developer"
    parts = [{"type": "text", "text": "Hello "}, {"type": "text", "text": "☂"}]
    body = {"messages": [talk[0], {"role": "user", "content": parts}], "temperature": 0.9, "seed": 3}
    reply = client.post("/v1/chat/completions", json={"model": "tiny", "max_completion_tokens": 40, **body}).json()
    assert reply["object"] == "chat.completion"
    assert reply["choices"][0]["message"] == {"role": "assistant", "content": want.text}
    options = {"include_usage": True}
    chunks = streamed(client, "/v1/chat/completions", max_tokens=40, stream_options=options, **body)
    assert chunks[0]["choices"][0]["delta"] == {"role": "assistant", "content": ""}
    known = {"prompt_tokens_details": {"cached_tokens": len(ids) - 1}}  # it was asked before
    assert chunks[-1]["choices"] == [] and chunks[-1]["usage"] == reply["usage"] | known
    text = "".join(c["choices"][0]["delta"].get("content", "") for c in chunks[:-1])
    assert text == want.text and len(chunks) > 5
    assert [c["choices"][0]["finish_reason"] for c in chunks[:-1]][-1] == "length"
    assert {c["object"] for c in chunks} == {"chat.completion.chunk"} and len({c["id"] for c in chunks}) == 1


def test_later_turns_start_from_earlier_ones(client: httpx.Client, made: Assembled) -> None:
    def value(name: str) -> float:
        lines = client.get("/metrics").text.splitlines()
        return float(next(line for line in lines if line.startswith(f"draftsmith_{name} ")).split()[-1])

    hits, reused = value("prefix_hits_total"), value("prompt_tokens_reused_total")
    talk = [{"role": "user", "content": "Why is the sky blue?"}]
    known = 0
    for turn in range(3):
        ids = made.target.tokenizer.apply_chat_template(talk, add_generation_prompt=True, return_dict=False)
        params = SamplingParams(temperature=0.9, seed=turn, max_new_tokens=12)
        want = generate(made.target, [ids], params, made.drafter, DECODE)[0].text
        body = {"model": "tiny", "messages": talk, "max_tokens": 12, "temperature": 0.9, "seed": turn}
        reply = client.post("/v1/chat/completions", json=body).json()
        assert reply["choices"][0]["message"]["content"] == want
        cached = reply["usage"]["prompt_tokens_details"]["cached_tokens"]
        assert cached >= known - 1 and reply["usage"]["prompt_tokens"] == len(ids)
        known = len(ids)
        talk += [{"role": "assistant", "content": "So."}, {"role": "user", "content": "And?"}]
    assert value("prefix_hits_total") >= hits + 2 and value("prompt_tokens_reused_total") > reused + 40
    assert 0 < value("prefix_bytes") <= 1e6


def test_several_answers_have_seeds_of_their_own(client: httpx.Client, made: Assembled) -> None:
    reply = complete(client, ["a b c", "d"], n=2, seed=5, max_tokens=9)
    want = [
        offline(made, prompt, temperature=1.0, seed=rng.fold(5, i), max_new_tokens=9)
        for prompt in ("a b c", "d")
        for i in range(2)
    ]
    assert [c["text"] for c in reply["choices"]] == [w.text for w in want]
    assert [c["index"] for c in reply["choices"]] == [0, 1, 2, 3]
    assert reply["usage"]["prompt_tokens"] == want[0].stats.prompt_tokens + want[2].stats.prompt_tokens
    assert reply["usage"]["completion_tokens"] == sum(len(w.ids) for w in want)
    texts = ["", ""]
    for chunk in streamed(client, "/v1/completions", prompt="a b c", n=2, seed=5, max_tokens=9):
        texts[chunk["choices"][0]["index"]] += chunk["choices"][0]["text"]
    assert texts == [w.text for w in want[:2]]


def test_stop_strings_end_the_text_before_them(client: httpx.Client, made: Assembled) -> None:
    whole = offline(made, "stop here", max_new_tokens=60).text
    stop = whole[20:23]
    want = whole[: whole.find(stop)]
    for stops in (stop, ["never said", stop]):
        choice = complete(client, "stop here", temperature=0, max_tokens=60, stop=stops)["choices"][0]
        assert (choice["text"], choice["finish_reason"]) == (want, "stop")
    chunks = streamed(client, "/v1/completions", prompt="stop here", temperature=0, max_tokens=60, stop=stop)
    assert "".join(c["choices"][0]["text"] for c in chunks) == want


def test_log_probabilities(client: httpx.Client, made: Assembled) -> None:
    want = offline(made, "likely", max_new_tokens=6, logprobs=True, ignore_eos=True)
    options = {"temperature": 0, "max_tokens": 6, "ignore_eos": True}
    logs = complete(client, "likely", logprobs=2, **options)["choices"][0]["logprobs"]
    assert logs["token_logprobs"] == pytest.approx(want.logprobs)
    assert len(logs["tokens"]) == len(logs["text_offset"]) == 6 and logs["text_offset"][0] == 0
    assert all(1 <= len(best) <= 2 for best in logs["top_logprobs"])
    body = {"messages": [{"role": "user", "content": "x"}], "logprobs": True, "top_logprobs": 3, **options}
    chunks = streamed(client, "/v1/chat/completions", **body)
    entries = [e for c in chunks if c["choices"][0]["logprobs"] for e in c["choices"][0]["logprobs"]["content"]]
    assert len(entries) == 6 and all(len(e["top_logprobs"]) == 3 for e in entries)
    for e in entries:
        assert e["logprob"] == pytest.approx(e["top_logprobs"][0]["logprob"])  # greedy
        assert e["bytes"] is None or bytes(e["bytes"]).decode() == e["token"]


def test_answers_have_the_form_that_is_asked_for(client: httpx.Client, made: Assembled) -> None:
    pytest.importorskip("llguidance")
    schema = {"type": "object", "properties": {"a": {"enum": [1, 2]}}, "required": ["a"], "additionalProperties": False}
    schema["x-guidance"] = {"whitespace_flexible": False}  # or a model without sense may say blanks for ever
    asked = {"type": "json_schema", "json_schema": {"name": "a", "schema": schema, "strict": True}}
    body = CHAT_OK | {"response_format": asked, "seed": 3, "max_tokens": 80}
    choice = client.post("/v1/chat/completions", json=body).json()["choices"][0]
    assert json.loads(choice["message"]["content"])["a"] in (1, 2) and choice["finish_reason"] == "stop"
    chunks = streamed(client, "/v1/chat/completions", **body)
    assert "".join(c["choices"][0]["delta"].get("content", "") for c in chunks) == choice["message"]["content"]
    want = offline(made, "x", temperature=1.0, seed=4, max_new_tokens=9, grammar=regex_grammar("[a-c]{3,4}"))
    assert complete(client, "x", seed=4, max_tokens=9, guided_regex="[a-c]{3,4}")["choices"][0]["text"] == want.text
    assert complete(client, "x", max_tokens=9, response_format={"type": "json_object"})["choices"][0]["text"][0] == "{"
    for schema in (
        {"const": "\ud800"},
        {"$ref": "#/no"},
        {"$ref": "file:///etc/passwd"},
        {"type": 5},
        {"minLength": -1},
    ):
        asked = {"type": "json_schema", "json_schema": {"name": "a", "schema": schema}}
        raw = json.dumps(OK | {"response_format": asked, "max_tokens": 4})
        reply = client.post("/v1/completions", content=raw, headers={"Content-Type": "application/json"})
        assert reply.status_code in (200, 400), (schema, reply.text)
    for pattern in ("a{1000000}", "((a{99}){99}){99}", "(?=a)b", r"(a)\1", "[^\\s\\S]"):
        reply = client.post("/v1/completions", json=OK | {"guided_regex": pattern, "max_tokens": 4})
        assert reply.status_code in (200, 400), (pattern, reply.text)
    for wrong, param in (({"guided_regex": "(a"}, "guided_regex"), ({"response_format": {
        "type": "json_schema", "json_schema": {"name": "a", "schema": {"type": "nonsense"}}}}, "response_format")):  # fmt: skip
        reply = client.post("/v1/completions", json=OK | wrong)
        assert (reply.status_code, reply.json()["error"]["param"]) == (400, param), reply.text
        assert reply.json()["error"]["message"].startswith(param)


CHAT_OK = {"model": "tiny", "messages": [{"role": "user", "content": "x"}]}
OK = {"model": "tiny", "prompt": "x"}
WRONG: list[tuple[dict[str, Any], int, str]] = [
    ({"model": "tiny"}, 400, "prompt"),
    ({"prompt": "x"}, 400, "model"),
    (OK | {"model": "other"}, 404, "model"),
    (OK | {"model": 3}, 400, "model"),
    (OK | {"temprature": 1}, 400, "temprature"),
    (OK | {"\ud800": 1}, 400, "?"),
    (OK | {"x" * 9000: 1}, 400, "x" * 100),
    (OK | {"n": 8}, 400, "n"),  # 3 rows, a queue of 4
    (OK | {"temperature": -1}, 400, "temperature"),
    (OK | {"temperature": "hot"}, 400, "temperature"),
    (OK | {"temperature": True}, 400, "temperature"),
    (OK | {"top_p": 0}, 400, "top_p"),
    (OK | {"max_tokens": 0}, 400, "max_tokens"),
    (OK | {"max_tokens": 2.5}, 400, "max_tokens"),
    (OK | {"max_tokens": 10**6}, 400, "max_tokens"),
    (OK | {"min_tokens": 9, "max_tokens": 5}, 400, "min_tokens"),
    (OK | {"n": 17}, 400, "n"),
    (OK | {"n": 9, "prompt": ["x", "y"]}, 400, "n"),
    (OK | {"seed": 2**64}, 400, "seed"),
    (OK | {"stop": ["a"] * 17}, 400, "stop"),
    (OK | {"stop": ""}, 400, "stop"),
    (OK | {"stop_token_ids": [10**6]}, 400, "stop_token_ids"),
    (OK | {"stream": "yes"}, 400, "stream"),
    (OK | {"stream_options": {"include_usage": True}}, 400, "stream_options"),
    (OK | {"echo": True}, 400, "echo"),
    (OK | {"logit_bias": {"5": 1}}, 400, "logit_bias"),
    (OK | {"prompt": []}, 400, "prompt"),
    (OK | {"prompt": ""}, 400, "prompt"),
    (OK | {"prompt": {"text": "x"}}, 400, "prompt"),
    (OK | {"prompt": [5, "x"]}, 400, "prompt"),
    (OK | {"prompt": [5, 10**6]}, 400, "prompt"),
    (OK | {"prompt": [5, -1]}, 400, "prompt"),
    (OK | {"prompt": "x" * 400}, 400, "prompt"),
    (OK | {"prompt": "\ud800"}, 400, "prompt"),
    (CHAT_OK | {"messages": []}, 400, "messages"),
    (CHAT_OK | {"messages": ["x"]}, 400, "messages[0]"),
    (CHAT_OK | {"messages": [{"role": "wizard", "content": "x"}]}, 400, "messages[0].role"),
    (CHAT_OK | {"messages": [{"role": "user"}]}, 400, "messages[0].content"),
    (CHAT_OK | {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, 400, "messages[0].content[0]"),
    (CHAT_OK | {"messages": [{"role": "user", "content": "x" * 400}]}, 400, "messages"),
    (CHAT_OK | {"messages": [{"role": "user", "content": "x", "tool_calls": []}]}, 400, "messages[0].tool_calls"),
    (CHAT_OK | {"top_logprobs": 2}, 400, "top_logprobs"),
    (CHAT_OK | {"max_tokens": 5, "max_completion_tokens": 5}, 400, "max_completion_tokens"),
    (CHAT_OK | {"response_format": {"type": "xml"}}, 400, "response_format"),
    (CHAT_OK | {"response_format": "json"}, 400, "response_format"),
    (CHAT_OK | {"response_format": {"type": "json_schema"}}, 400, "response_format"),
    (CHAT_OK | {"response_format": {"type": "json_schema", "json_schema": {"schema": 3}}}, 400, "response_format"),
    (CHAT_OK | {"response_format": {"type": "json_object"}, "min_tokens": 2}, 400, "min_tokens"),
    (CHAT_OK | {"response_format": {"type": "json_object"}, "guided_regex": "a"}, 400, "guided_regex"),
    (OK | {"guided_regex": ""}, 400, "guided_regex"),
    (CHAT_OK | {"tools": [{"type": "function"}]}, 400, "tools"),
    (OK | {"store": True}, 400, "store"),
    (OK | {"service_tier": "flex"}, 400, "service_tier"),
]  # fmt: skip


def test_wrong_requests_are_refused_by_field(client: httpx.Client) -> None:
    for body, status, param in WRONG:
        path = "/v1/chat/completions" if "messages" in body else "/v1/completions"
        reply = client.post(path, content=json.dumps(body), headers={"Content-Type": "application/json"})
        error = reply.json()["error"]
        assert (reply.status_code, error["param"]) == (status, param), (body, reply.text)
        assert param in error["message"] and error["type"] == "invalid_request_error"
    for harmless in (
        {"user": "me"},
        {"top_k": -1},
        {"logit_bias": {}},
        {"seed": None},
        {"best_of": 1},
        {"store": False},
    ):
        assert complete(client, "x", max_tokens=1, **harmless)["choices"]


def test_depth_that_can_just_be_read_is_no_failure_of_the_server(client: httpx.Client) -> None:
    kind = {"Content-Type": "application/json"}
    for depth in range(900, 1000, 4):
        for field in ("temperature", "prompt", "stop", "response_format"):
            deep = "[" * depth + "]" * depth
            raw = f'{{"model": "tiny", "prompt": "x", "{field}": {deep}}}'
            assert client.post("/v1/completions", content=raw, headers=kind).status_code == 400, (field, depth)


def test_odd_but_legal_clients(client: httpx.Client, live: Any) -> None:
    for method, path, status in (
        ("HEAD", "/v1/models", 200), ("HEAD", "/health", 200), ("HEAD", "/v1/completions", 405),
        ("OPTIONS", "/v1/completions", 405), ("PUT", "/v1/models", 405), ("GET", "/v1/models/%00%ff", 404),
        ("GET", "//v1/models", 404), ("GET", "/metrics?x=1", 200),
    ):  # fmt: skip
        reply = client.request(method, path)
        assert reply.status_code == status and (method != "HEAD" or not reply.content), (method, path)
    reply = client.post("/v1/chat/completions", json=CHAT_OK | {"messages": [{"role": "system", "content": "Be"}]})
    assert reply.status_code == 200
    reply = client.post("/v1/chat/completions", json=CHAT_OK | {"messages": [{"role": "tool", "content": "x"}]})
    assert (reply.status_code, reply.json()["error"]["param"]) == (400, "messages[0].role")
    assert (
        complete(client, "\0☂\u202e" + "é" * 3, n=3, max_tokens=2, ignore_eos=True)["usage"]["completion_tokens"] == 6
    )
    assert complete(client, "x", stop=[], stop_token_ids=[], max_tokens=1)["choices"]
    with client.stream("POST", "/v1/completions", json=OK | {"stream": True, "max_tokens": 90}) as stream:
        next(stream.iter_lines())
    until(lambda: live[1].service.worker.held == 0)
    assert client.get("/health").status_code == 200


def test_bodies_that_are_no_request(client: httpx.Client, live: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    kind = {"Content-Type": "application/json"}
    for raw in (b"", b"{", b"[1]", b"\xff", b'{"model": NaN}', b"[" * 100_000, b'{"seed": ' + b"9" * 5000 + b"}"):
        reply = client.post("/v1/completions", content=raw, headers=kind)
        assert (reply.status_code, reply.json()["error"]["code"]) == (400, "invalid_json"), raw[:20]
    for raw in (b"1e999", b"-1e999"):  # numbers in JSON, and infinite (CASES B44)
        raw = b'{"model": "tiny", "prompt": "x", "temperature": ' + raw + b"}"
        reply = client.post("/v1/completions", content=raw, headers=kind)
        assert (reply.status_code, reply.json()["error"]["param"]) == (400, "temperature")
    reply = client.post("/v1/completions", content=b"x" * 1_100_000, headers=kind)
    assert (reply.status_code, reply.json()["error"]["code"]) == (413, "too_large")
    chunked = client.post("/v1/completions", content=(b"x" * 100_000 for _ in range(11)), headers=kind)
    assert chunked.status_code == 413
    assert client.post("/v1/completions", content=b"{}", headers={"Content-Type": "text/plain"}).status_code == 415
    assert client.get("/v1/completions").status_code == 405 and client.get("/docs").status_code == 404
    assert client.get("/docs").json()["error"]["message"]
    assert client.get("/health", headers={"Host": "evil.example:80"}).status_code == 403
    monkeypatch.setattr(http, "HEADER_SECONDS", 0.2)
    for parts in ((b"POST /v1/comp",), (b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n", b"GET /he")):
        with socket.create_connection(live[1].address) as link:
            link.settimeout(10)
            link.sendall(parts[0])
            if len(parts) > 1:
                assert link.recv(4096).startswith(b"HTTP/1.1 200")
                link.sendall(parts[1])
            while link.recv(4096):
                pass  # until the server hangs up
    with socket.create_connection(live[1].address) as link:
        link.settimeout(10)
        head = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\nContent-Length: 9\r\n\r\n{"
        link.sendall(head)
        assert link.recv(4096).startswith(b"HTTP/1.1 408")


def test_a_client_who_does_not_read_is_hung_up_on(made: Assembled, monkeypatch: pytest.MonkeyPatch) -> None:
    """It would hold one of the server's connections for ever."""
    monkeypatch.setattr(http, "GRACE_SECONDS", 0.3)
    with running(made) as (client, server):
        server.servers[0].sockets[0].setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
        connections = server.server_state.connections
        with socket.socket() as link:
            link.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            link.connect(server.address)
            until(lambda: len(connections) == 1)
            link.settimeout(0.2)
            with suppress(OSError):  # the server reads no more before its replies are
                for _ in range(2000):
                    link.send(b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n")
            until(lambda: not connections, 4.0)  # before uvicorn takes it for idle
        assert client.get("/health").status_code == 200


def test_models_health_and_metrics(client: httpx.Client) -> None:
    assert client.get("/health").json() == {"status": "ok"}
    (model,) = client.get("/v1/models").json()["data"]
    assert model["id"] == "tiny" and model["max_model_len"] == 240
    assert client.get("/v1/models/tiny").json() == model and client.get("/v1/models/other").status_code == 404

    def value(name: str) -> float:
        lines = client.get("/metrics").text.splitlines()
        return float(next(line for line in lines if line.startswith(f"draftsmith_{name} ")).split()[-1])

    before, done = value("generated_tokens_total"), value('requests_total{outcome="done"}')
    complete(client, "x", max_tokens=5, ignore_eos=True)
    assert value("generated_tokens_total") == before + 5 and value('requests_total{outcome="done"}') == done + 1
    assert value("requests_running") == value("requests_waiting") == 0
    assert value("accepted_tokens_total") <= value("draft_tokens_total") > 0


def test_clients_who_leave_free_their_rows_and_too_many_are_refused(made: Assembled) -> None:
    forever = OK | {"max_tokens": 90, "ignore_eos": True}
    with running(made, slow=0.05, queue=2) as (client, server):
        worker = server.service.worker
        with client.stream("POST", "/v1/completions", json=forever | {"stream": True, "n": 3}) as reply:
            lines = reply.iter_lines()
            next(lines)
            until(lambda: worker.engine.running == 3)
            assert client.get("/health").status_code == 200  # the event loop is free
            with pytest.raises(httpx.ReadTimeout):
                client.post("/v1/completions", json=forever | {"n": 2}, timeout=0.3)
            until(lambda: worker.held == 3)  # those who waited are gone as well
            refused = client.post("/v1/completions", json=forever | {"n": 3})
            assert refused.status_code == 429 and refused.headers["retry-after"] == "1"
            assert refused.json()["error"]["type"] == "rate_limit_error"
        until(lambda: worker.held == 0 and worker.engine.running == 0)
        assert worker.counts.outcomes == {"done": 0, "cancelled": 5, "failed": 0, "refused": 3}
        assert complete(client, "x", max_tokens=2, ignore_eos=True)["usage"]["completion_tokens"] == 2


def test_a_model_that_broke_down_leaves_nobody_waiting(made: Assembled, capsys: pytest.CaptureFixture[str]) -> None:
    def broken(*_: Any) -> Any:
        raise RuntimeError("a fault of the model")

    with running(made, slow=0.05) as (client, server):
        server.service.worker.engine._decode = server.service.worker.engine.clear = broken
        reply = client.post("/v1/completions", json=OK)
        assert (reply.status_code, reply.json()["error"]["code"]) == (503, "broken")
        until(lambda: client.get("/health").json() == {"status": "failed"})
        assert client.post("/v1/completions", json=OK).status_code == 503
    assert "a fault of the model" in capsys.readouterr().err


def test_a_request_has_its_time(made: Assembled) -> None:
    with running(made, slow=0.05, timeout=0.4) as (client, server):
        reply = client.post("/v1/completions", json=OK | {"max_tokens": 90, "ignore_eos": True})
        assert reply.status_code == 504 and reply.json()["error"]["code"] == "timeout"
        until(lambda: server.service.worker.engine.running == 0)


@pytest.mark.parametrize("part", ["_decode", "_enter"])
def test_a_failing_step_fails_its_requests_alone(
    part: str, made: Assembled, capsys: pytest.CaptureFixture[str]
) -> None:
    """Those that run, or are let in: who waits for a row is answered, as if nothing had been."""
    want = offline(made, "abc", max_new_tokens=9).text
    with running(made, slow=0.05) as (client, server):
        worker = server.service.worker
        step, faults = getattr(worker.engine, part), [RuntimeError("a fault of the model")]

        def broken(*args: Any) -> Any:
            if faults and (part == "_enter" or worker.engine.waiting):
                raise faults.pop()
            return step(*args)

        setattr(worker.engine, part, broken)
        with ThreadPoolExecutor(2) as pool:
            first = pool.submit(
                client.post, "/v1/completions", json=OK | {"n": 3, "max_tokens": 60, "ignore_eos": True}
            )
            until(lambda: worker.held == 3)
            second = pool.submit(complete, client, "abc", temperature=0, max_tokens=9)
            assert first.result().status_code == 500 and "fault of the model" not in first.result().text
            assert second.result()["choices"][0]["text"] == want
        until(lambda: worker.held == 0)
        assert worker.counts.outcomes == {"done": 1, "cancelled": 0, "failed": 3, "refused": 0}
        assert complete(client, "x", max_tokens=2, ignore_eos=True)["usage"]["completion_tokens"] == 2
    assert "a fault of the model" in capsys.readouterr().err


def test_a_failing_pass_of_a_denoiser_fails_its_batch_alone(tiny: Any, capsys: pytest.CaptureFixture[str]) -> None:
    denoiser = denoiser_of(tiny(dtype=torch.float64), 4, 3, shift=True)
    how = DiffuseConfig(max_rows=2)
    ids = denoiser.tokenizer("abc").input_ids
    want = diffuse(denoiser, [ids], SamplingParams(max_new_tokens=9), how)[0].text
    with running(Served(denoiser, lambda _: Turns(denoiser, how), "by diffusion"), slow=0.05) as (client, server):
        worker = server.service.worker
        step, faults = worker.engine.step, [RuntimeError("a fault of the model")]

        def broken() -> Any:
            if faults and worker.engine.running and worker.engine.waiting:
                raise faults.pop()
            return step()

        worker.engine.step = broken
        with ThreadPoolExecutor(2) as pool:
            first = pool.submit(
                client.post, "/v1/completions", json=OK | {"n": 2, "max_tokens": 60, "ignore_eos": True}
            )
            until(lambda: worker.held == 2)
            second = pool.submit(complete, client, "abc", temperature=0, max_tokens=9)
            assert first.result().status_code == 500
            assert second.result()["choices"][0]["text"] == want
    assert "a fault of the model" in capsys.readouterr().err


def test_who_ended_in_a_pass_that_failed_is_given_up_too(tiny: Any) -> None:
    denoiser = denoiser_of(tiny(dtype=torch.float64), 4, 3, shift=True)
    turns = Turns(denoiser, DiffuseConfig(max_rows=2))
    asked = [Request(i, [5, 6], SamplingParams(max_new_tokens=40), (), None, live=False) for i in range(2)]
    for one in asked:
        turns.add(one)
    turns.step()

    def broken() -> Any:
        asked[0].stop_reason = "length"
        raise RuntimeError("a fault of the model")

    turns.batch.step = broken
    with pytest.raises(RuntimeError):
        turns.step()
    assert turns.clear() == asked and not turns.busy


@pytest.mark.parametrize(("drain", "signals"), [(20.0, 1), (0.2, 1), (20.0, 2)])
def test_the_graceful_stop(made: Assembled, drain: float, signals: int) -> None:
    with running(made, slow=0.05, drain=drain) as (client, server):
        with client.stream(
            "POST", "/v1/completions", json=OK | {"stream": True, "max_tokens": 20, "ignore_eos": True}
        ) as r:
            lines = r.iter_lines()
            first = next(lines)
            server.handle_exit(signal.SIGTERM, None)
            until(lambda: server.service.worker.stopping)
            for path, body in (("/v1/completions", OK), ("/v1/chat/completions", CHAT_OK)):
                refused = client.post(path, json=body)
                assert refused.status_code == 503 and refused.json()["error"]["code"] == "stopping"
            assert client.get("/health").status_code == 503
            if signals == 2:
                server.handle_exit(signal.SIGTERM, None)
            rest = [json.loads(x[6:]) for x in [first, *lines] if x and x != "data: [DONE]"]
        if drain > 1 and signals == 1:
            assert rest[-1]["choices"][0]["finish_reason"] == "length"
        else:
            assert rest[-1]["error"]["code"] == "stopping"
        until(lambda: server.should_exit)


def test_the_key_covers_every_route_but_health(made: Assembled) -> None:
    with running(made, key="sesame") as (client, _):
        assert complete(client, "x", max_tokens=1)["choices"]
        for headers in ({"Authorization": ""}, {"Authorization": "Bearer sesam"}, {"Authorization": "Bearer \xe9"}):
            for path in ("/v1/models", "/metrics", "/v1/models/tiny", "/nowhere"):
                raw = {name: value.encode("latin-1") for name, value in headers.items()}
                assert client.get(path, headers=raw).status_code == 401
            assert client.post("/v1/completions", json=OK, headers=raw).status_code == 401
            assert client.get("/health", headers=raw | {"Host": b"elsewhere"}).status_code == 200


def test_the_command(made: Assembled, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(command, "assemble", lambda cfg, *_: Assembled(made.target, None, DecodeConfig(k=cfg.k), None))
    seen: list[str] = []

    def ask_and_stop(server: Any) -> None:
        until(lambda: server.started and bool(server.servers))
        url = f"http://127.0.0.1:{server.address[1]}"
        seen.append(httpx.post(f"{url}/v1/completions", json=OK | {"model": "tiny"}, timeout=20).json()["object"])
        os.kill(os.getpid(), signal.SIGTERM)

    run = Server.run

    def with_a_client(server: Any) -> None:
        helper = threading.Thread(target=ask_and_stop, args=(server,))
        helper.start()
        run(server)
        helper.join()

    monkeypatch.setattr(Server, "run", with_a_client)
    run_serve(ServeConfig(target="tiny", port=0, max_rows=2, max_prompt=32, max_answer=16, default_answer=8))
    assert seen == ["text_completion"]
    assert "(plain decoding) at http://127.0.0.1:" in capsys.readouterr().out


def test_denoisers_take_turns(tiny: Any) -> None:
    denoiser = denoiser_of(tiny(dtype=torch.float64), 4, 3, shift=True)
    how = DiffuseConfig(max_rows=3)
    prompts = ["What is rain?", "abc", "again and again", "x", "the fourth to come"]

    def want(prompt: str, i: int) -> Any:
        params = SamplingParams(temperature=0.8 * (i % 2), seed=i, max_new_tokens=7 + i)
        return diffuse(denoiser, [denoiser.tokenizer(prompt).input_ids], params, how)[0]

    wanted = [want(prompt, i) for i, prompt in enumerate(prompts)]
    with running(Served(denoiser, lambda _: Turns(denoiser, how), "by diffusion")) as (client, server):
        assert client.post("/v1/completions", json=OK | {"logprobs": 1}).json()["error"]["param"] == "logprobs"

        def one(i: int) -> str:
            options = {"temperature": 0.8 * (i % 2), "seed": i, "max_tokens": 7 + i}
            if i % 2:
                return complete(client, prompts[i], **options)["choices"][0]["text"]
            chunks = streamed(client, "/v1/completions", prompt=prompts[i], **options)
            assert chunks[-1]["choices"][0]["finish_reason"] is not None
            return "".join(chunk["choices"][0]["text"] for chunk in chunks)

        with ThreadPoolExecutor(5) as pool:
            assert list(pool.map(one, range(5))) == [result.text for result in wanted]
        with pytest.raises(httpx.ReadTimeout):  # one who leaves holds nobody up
            client.post("/v1/completions", json=OK | {"max_tokens": 90, "ignore_eos": True}, timeout=0.01)
        assert (
            complete(client, prompts[1], temperature=0.8, seed=1, max_tokens=8)["choices"][0]["text"] == wanted[1].text
        )
        until(lambda: server.service.worker.held == 0)


def test_what_is_served_is_chosen_as_generate_does() -> None:
    served = load_served(ServeConfig(model="ngram", target="tiny", k=5, max_rows=2), ())
    engine = served.engine(Limits(0, 20, 10, 30, 1.0))
    assert isinstance(engine, Engine) and (engine.rows, engine.decode.k, engine.longest) == (2, 5, 30)
    assert engine.prefixes is not None and engine.prefixes.limit == 512_000_000
    assert load_served(ServeConfig(target="tiny", prefix_mb=0), ()).engine(Limits(0, 20, 10, 30, 1.0)).prefixes is None
    assert served.how == "drafted by ngram" and load_served(ServeConfig(target="tiny"), ()).how == "plain decoding"
    for options, words in (
        ({"model": "ngram"}, "add --target NAME"),
        ({}, "nothing to decode with"),
        ({"model": "ngram", "target": "tiny", "strategy": "fixed"}, "are for denoisers"),
        ({"model": "suffix", "target": "tiny", "tree": "opt"}, "tree='opt'"),
    ):
        with pytest.raises(ValueError, match=words):
            load_served(ServeConfig(**options), ())


def test_settings_refused(monkeypatch: pytest.MonkeyPatch, tmp_path: Any) -> None:
    monkeypatch.setenv("EMPTY", "")
    monkeypatch.setenv("KEY", "sesame")
    assert key_of(ServeConfig(host="0.0.0.0", api_key_env="KEY")) == "sesame" and key_of(ServeConfig()) is None
    for options, words in (
        ({"host": "0.0.0.0"}, "api_key_env"),
        ({"host": "example.org"}, "api_key_env"),
        ({"api_key_env": "EMPTY"}, "holds no key"),
        ({"port": 70000}, "port=70000"),
        ({"max_rows": 0}, "max_rows=0"),
        ({"timeout": 0.0}, "timeout=0.0"),
        ({"prefix_mb": -1}, "prefix_mb=-1"),
        ({"name": " "}, "name=' '"),
        ({"default_answer": 2000}, "default_answer=2000"),
    ):
        with pytest.raises(ValueError, match=words):
            key_of(ServeConfig(**options))
    assert name_of(ServeConfig(model=str(tmp_path)), "t") == tmp_path.name
    taken = socket.create_server(("127.0.0.1", 0))
    port = taken.getsockname()[1]
    with taken, pytest.raises(ValueError, match=f"port={port}: Address already in use"):
        run_serve(ServeConfig(target="tiny", port=port))
    with pytest.raises(ValueError, match=r"host='203\.0\.113\.5', port=0"):
        run_serve(ServeConfig(target="tiny", host="203.0.113.5", port=0, api_key_env="KEY"))
    for host in ("a" * 300, "\udc80"):
        with pytest.raises(ValueError, match="cannot be an address"):
            command.refuse_taken(host, 0)
    for host, known in (("127.0.0.2", "127.0.0.2"), ("::1", "[::1]"), ("127.0.0.1", "localhost")):
        assert known in own_names(host)
    assert name_of(ServeConfig(model="user/head"), "t") == "user/head"
    assert name_of(ServeConfig(model="ngram"), "t") == "t"
    assert name_of(ServeConfig(name="mine"), "t") == "mine"
