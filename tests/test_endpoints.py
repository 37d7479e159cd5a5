"""Roll-out by several servers that fail in every way: nothing is lost, nothing comes twice, and the file of a whole run is
the same whoever answered what (B01). Run: pytest tests/test_endpoints.py"""

from __future__ import annotations

import json
import random
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from email.utils import formatdate
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import httpx
import pytest

from draftsmith.data.sources import Conversation, DataConfig
from draftsmith.inference import endpoints
from draftsmith.inference.answer_file import RolloutReport
from draftsmith.inference.converse import prompt_key
from draftsmith.inference.endpoint import Fault, answer_of, retry_after
from draftsmith.inference.endpoints import back_off, endpoints_of
from draftsmith.inference.rollout import RolloutConfig, rollout_endpoints, run_rollout
from draftsmith.losses.probs import SamplingParams

PARAMS = SamplingParams(max_new_tokens=12)
PAGE = b"<html>please sign in</html>"


@pytest.fixture(autouse=True)
def short_rests(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(endpoints, "REST", 0.02)
    monkeypatch.setattr(endpoints, "LONGEST_REST", 0.1)


class Server(ThreadingHTTPServer):
    """A deterministic chat server: its answer depends on the prompt alone. `fault(number, times)` names what goes wrong
    with this prompt when it is asked for the `times`-th time (from 1), or None."""

    daemon_threads = True
    request_queue_size = 64

    def __init__(self, fault: Callable[[int, int], str | None], pause: float = 0.0, models: tuple[str, ...] = ("m",)):
        super().__init__(("127.0.0.1", 0), Handler)
        self.fault, self.pause, self.models = fault, pause, models
        self.asked, self.lock, self.times = Counter[int](), threading.Lock(), list[float]()
        self.now, self.most, self.good = 0, 0, 0
        self.gone = threading.Event()
        threading.Thread(target=self.serve_forever, args=(0.02,), daemon=True).start()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}/v1"

    def handle_error(self, *_: Any) -> None:
        pass

    def close(self) -> None:
        self.gone.set()
        self.shutdown()
        self.server_close()


class Handler(BaseHTTPRequestHandler):
    server: Server
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True

    def do_GET(self) -> None:
        if self.server.fault(-1, 1):
            return self.whole(b"{}", status=500)
        self.whole(json.dumps({"data": [{"id": m} for m in self.server.models]}).encode())

    def do_POST(self) -> None:
        server = self.server
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        number = int(body["messages"][0]["content"].split()[1])
        with server.lock:
            server.asked[number] += 1
            server.times.append(time.monotonic())
            server.now += 1
            server.most = max(server.most, server.now)
            fault = server.fault(number, server.asked[number])
        try:
            time.sleep(server.pause)
            self.answer(body, number, fault)
        finally:
            with server.lock:
                server.now -= 1

    def answer(self, body: dict[str, Any], number: int, fault: str | None) -> None:
        said = " / ".join(m["content"] for m in body["messages"])
        text = "" if number % 11 == 10 else f"answer to <{said}> é"
        choice = {
            "message": {"role": "assistant", "content": text},
            "finish_reason": "length" if number % 5 == 4 else "stop",
        }
        reply = json.dumps({"id": "the-same", "choices": [choice], "usage": {"completion_tokens": 7}}).encode()
        if fault is None:
            self.server.good += 1
            self.whole(reply)
        elif fault.isdigit():
            self.whole(b"{}", status=int(fault))
        elif fault == "told":
            self.whole(b"{}", status=429, more={"Retry-After": "0.6"})
        elif fault == "hang":
            self.server.gone.wait()
        elif fault == "cut":
            self.send(reply[: len(reply) // 2], length=len(reply))
        elif fault == "cut unseen":  # no length was promised
            self.send(reply[: len(reply) // 2], length=None)
        elif fault == "no JSON":
            self.whole(b'{"choices": [')
        elif fault == "no choices":
            self.whole(b'{"error": "overloaded"}')
        elif fault == "page":
            self.whole(PAGE, kind="text/html; charset=utf-8")
        elif fault == "stream":
            self.whole(b"data: " + reply + b"\n\ndata: [DONE]\n\n", kind="text/event-stream")
        elif fault == "bytes":
            self.whole(b"\xff\xfe\x00")
        elif fault == "deep":
            self.whole(b"[" * 100_000)
        elif fault == "surrogate":
            self.whole(reply.replace(b"answer", b"\\ud800"))
        elif fault == "trickle":
            self.send(b"", length=len(reply))
            for i in range(len(reply)):
                self.wfile.write(reply[i : i + 1])
                if self.server.gone.wait(0.05):
                    return
        elif fault == "closes":  # a connection that was to be kept
            self.whole(reply)
            self.close_connection = True
        elif fault == "slams":  # before a word is said
            self.connection.shutdown(socket.SHUT_RDWR)
            self.close_connection = True
        elif fault == "kind":  # JSON under another name is read
            self.whole(reply, kind="text/plain")

    def whole(
        self, data: bytes, status: int = 200, kind: str = "application/json", more: dict[str, str] | None = None
    ) -> None:
        self.send(data, len(data), status, kind, more)

    def send(
        self,
        data: bytes,
        length: int | None,
        status: int = 200,
        kind: str = "application/json",
        more: dict[str, str] | None = None,
    ) -> None:
        self.send_response(status)
        self.send_header("Content-Type", kind)
        for name, value in (more or {}).items():
            self.send_header(name, value)
        if length is not None:
            self.send_header("Content-Length", str(length))
        self.close_connection = length != len(data)
        if length is None:
            self.send_header("Connection", "close")
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, *_: Any) -> None:
        pass


# What a try is counted as, in the endpoint's line; an empty text: nothing has failed.
FAULTS = {
    "429": "status 429",
    "told": "status 429",
    "500": "status 500",
    "502": "status 502",
    "503": "status 503",
    "hang": "no whole reply in 1.5 s",
    "trickle": "no whole reply in 1.5 s",
    "cut": "RemoteProtocolError",
    "cut unseen": "reply is no JSON",
    "no JSON": "reply is no JSON",
    "bytes": "reply is no JSON",
    "deep": "reply is no JSON",
    "page": "reply is no JSON (text/html)",
    "stream": "reply is no JSON (text/event-stream)",
    "no choices": "reply without choices",
    "surrogate": "half of a surrogate pair in a text",
    "slams": "RemoteProtocolError",
    "closes": "",
    "kind": "",
}


@pytest.fixture
def serve() -> Iterator[Callable[..., Server]]:
    servers: list[Server] = []

    def start(fault: Callable[[int, int], str | None] = lambda *_: None, **more: Any) -> Server:
        servers.append(Server(fault, **more))
        return servers[-1]

    yield start
    for server in servers:
        server.close()


def nobody() -> str:
    """An address where nobody listens."""
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        return f"http://127.0.0.1:{taken.getsockname()[1]}/v1"


def ask(i: int, *more: str) -> Conversation:
    messages = [{"role": "user", "content": f"prompt {i}"}]
    for text in more:
        messages += [{"role": "assistant", "content": "old"}, {"role": "user", "content": text}]
    return Conversation(f"c{i}", messages)


def run(urls: list[str], conversations: list[Conversation], out: Path, **more: Any) -> RolloutReport:
    usual: dict[str, Any] = {"in_flight": (4,), "timeout": 20.0, "patience": 60.0, "progress": False, "model": "m"}
    return rollout_endpoints(urls, conversations, out, PARAMS, **(usual | more))


def ids(path: Path) -> list[str]:
    return [json.loads(line)["id"] for line in path.read_text().splitlines()]


TALKS = [ask(i, "and then?") if i % 4 == 1 else ask(i) for i in range(44)]


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    """The file that one server without a fault leaves."""
    server, out = Server(lambda *_: None), tmp_path_factory.mktemp("plain") / "a.jsonl"
    report = run([server.url], TALKS, out, in_flight=(1,))
    server.close()
    assert (report.answered, report.truncated, dict(report.failed)) == (40, 8, {"empty answer": 4})
    assert ids(out) == [c.id for c in TALKS if int(c.id[1:]) % 11 != 10]
    return out.read_bytes()


def test_servers_that_fail_in_every_way_give_the_file_of_one_that_never_fails(
    serve: Callable[..., Server], plain: bytes, tmp_path: Path
) -> None:
    """Each prompt meets another fault at its first try on each of two servers; a third one is not there; twice, with the
    servers the other way round."""
    names = list(FAULTS)
    for turn in (0, 1):
        faulty = [
            serve(lambda n, times, k=k: names[(n + k) % len(names)] if 0 < times < 2 and n >= 0 else None)
            for k in (0, 7)
        ]
        urls = [faulty[0].url, nobody(), faulty[1].url][:: -1 if turn else 1]
        out = tmp_path / f"{turn}.jsonl"
        report = run(urls, TALKS, out, timeout=1.5)
        assert out.read_bytes() == plain
        assert (report.answered, report.truncated, dict(report.failed)) == (40, 8, {"empty answer": 4})
        lines = dict(zip(urls, report.endpoints, strict=True))
        assert "0 answers" in lines[urls[1]] and "ConnectError; set aside" in lines[urls[1]]
        seen = " ".join(report.endpoints)
        assert not [reason for reason in FAULTS.values() if reason not in seen], seen
        assert sum(int(line.split(": ")[1].split()[0]) for line in report.endpoints) >= 44 + 8  # turns


@pytest.mark.parametrize("fault", FAULTS)
def test_a_failing_endpoint_is_set_aside_and_its_work_goes_to_the_others(
    fault: str, serve: Callable[..., Server], tmp_path: Path
) -> None:
    bad, good = serve(lambda *_: fault), serve()
    talks, out = [ask(i) for i in range(9)], tmp_path / "a.jsonl"
    limit = 1.5 if FAULTS[fault].endswith("1.5 s") else 20.0
    report = run([bad.url, good.url], talks, out, in_flight=(2,), timeout=limit)
    assert ids(out) == [c.id for c in talks] and not report.failed
    figures = report.endpoints[0]
    if FAULTS[fault]:
        assert re.search(r": 0 answers, 0\.00/s, tokens not counted by it, failures: \d+ ", figures), figures
        assert FAULTS[fault] in figures and "set aside" in figures
        assert len(bad.times) < 9 and "failures: 0" in report.endpoints[1] and good.good == 9
    else:
        assert "failures: 0" in figures and "set aside" not in figures


def test_a_server_that_comes_back_is_asked_again(serve: Callable[..., Server], tmp_path: Path) -> None:
    second = serve(pause=0.03)
    first = serve(lambda n, times: "500" if second.good < 5 else None, pause=0.005)
    report = run(
        [first.url, second.url], [ask(i) for i in range(60) if i % 11 != 10], tmp_path / "a.jsonl", in_flight=(2,)
    )
    assert not report.failed and first.good > 0
    assert "set aside" not in report.endpoints[0] and "status 500" in report.endpoints[0]
    assert report.endpoints[1].endswith("failures: 0")


def test_retry_after_is_kept_whatever_else_succeeds(serve: Callable[..., Server], tmp_path: Path) -> None:
    """The third request is told to wait 0.6 s; the two that are in flight beside it are answered, and do not shorten it."""
    server = serve(lambda n, times: "told" if n == 2 and times == 1 else None, pause=0.03)
    report = run([server.url], [ask(i) for i in range(9)], tmp_path / "a.jsonl", in_flight=(3,))
    assert report.answered == 9 and "1 status 429" in report.endpoints[0]
    gaps = [b - a for a, b in zip(server.times, server.times[1:], strict=False)]
    assert max(gaps) > 0.55


def test_retry_after_is_read_as_seconds_or_a_date() -> None:
    def said(value: str) -> float:
        return retry_after(httpx.Response(429, headers={"Retry-After": value}))

    assert said("2.5") == 2.5 and said("-3") == 0 and said("1e9") == 3600 and said("soon") == 0 and said("nan") == 0
    assert 8 < said(formatdate(time.time() + 10, usegmt=True)) <= 10 and said(formatdate(0, usegmt=True)) == 0
    assert retry_after(httpx.Response(503)) == 0


def test_work_is_shared_by_speed_and_each_endpoint_has_its_own_limit(
    serve: Callable[..., Server], tmp_path: Path
) -> None:
    fast, slow = serve(pause=0.03), serve(pause=0.3)
    talks = [ask(i) for i in range(120) if i % 11 != 10]
    report = run([slow.url, fast.url], talks, tmp_path / "a.jsonl", in_flight=(2, 5))
    assert report.answered == len(talks) and slow.good + fast.good == len(talks)
    assert fast.good > 3 * slow.good > 0
    assert (slow.most, fast.most) == (2, 5)
    rate = [float(re.findall(r", ([\d.]+)/s", line)[0]) for line in report.endpoints]
    tokens = [float(re.findall(r"([\d.]+) tokens/s", line)[0]) for line in report.endpoints]
    assert tokens == pytest.approx([7 * r for r in rate], rel=0.05) and rate[1] > 3 * rate[0]


def test_a_prompt_that_every_server_fails_at_is_given_up_and_the_rest_answered(
    serve: Callable[..., Server], tmp_path: Path
) -> None:
    out = tmp_path / "a.jsonl"
    one, two = (serve(lambda n, times: "500" if n == 3 else None) for _ in range(2))
    report = run([one.url, two.url], [ask(i) for i in range(9)], out)
    assert dict(report.failed) == {"status 500": 1} and "c3" not in ids(out) and report.answered == 8
    assert one.asked[3] + two.asked[3] == endpoints.TRIES and min(one.asked[3], two.asked[3]) > 0
    healed = serve()
    assert run([healed.url], [ask(i) for i in range(9)], out).there == 8
    assert ids(out) == [f"c{i}" for i in range(9)] and sum(healed.asked.values()) == 1


def test_a_conversation_whose_later_turn_fails_is_not_kept_in_part(
    serve: Callable[..., Server], tmp_path: Path
) -> None:
    server = serve(lambda n, times: "500" if n == 1 and times > 1 else None)
    report = run([server.url], [ask(0), ask(1, "more")], tmp_path / "a.jsonl")
    assert ids(tmp_path / "a.jsonl") == ["c0"] and dict(report.failed) == {"status 500": 1}


def test_a_busy_server_never_fails_a_prompt(serve: Callable[..., Server], tmp_path: Path) -> None:
    server = serve(lambda n, times: "429" if n >= 0 and times <= 10 else None)
    report = run([server.url], [ask(0), ask(1)], tmp_path / "a.jsonl", in_flight=(1,), model=None)
    assert report.answered == 2 and not report.failed


def test_all_down_is_one_line_what_was_answered_is_kept_and_the_next_run_goes_on(
    serve: Callable[..., Server], plain: bytes, tmp_path: Path
) -> None:
    out, dying = tmp_path / "a.jsonl", serve(lambda n, times: "503" if n > 8 else None)
    with pytest.raises(ValueError) as error:
        run([dying.url, nobody()], TALKS, out, patience=0.3)
    text = str(error.value)
    assert "\n" not in text and text.endswith("; the answers so far are kept, run again")
    assert re.search(
        r"/v1 cannot be reached \(status 503, \d+ tries\); http\S+ cannot be reached \(ConnectError, \d", text
    )
    kept = ids(out)
    assert sorted(kept, key=lambda c: int(c[1:])) == [f"c{i}" for i in range(9)]
    report = run([serve().url], TALKS, out)
    assert report.there == 9 and out.read_bytes() == plain


def test_without_any_answer_the_run_ends_soon(tmp_path: Path) -> None:
    """However long the patience; with and without a model's name."""
    for model in ("m", None):
        began = time.monotonic()
        with pytest.raises(
            ValueError, match=r"cannot be reached \(ConnectError, 4 tries\); the answers so far are kept"
        ):
            run([nobody()], [ask(0)], tmp_path / "a.jsonl", patience=1e6, model=model)
        assert time.monotonic() - began < 30


def test_a_refused_key_ends_the_run_unless_the_endpoint_has_answered_before(
    serve: Callable[..., Server], tmp_path: Path
) -> None:
    with pytest.raises(ValueError, match=r"answered 401: wrong key, path or model"):
        run([serve().url, serve(lambda *_: "401").url], TALKS, tmp_path / "a.jsonl")
    with pytest.raises(ValueError, match=r"answered 302: wrong key, path or model"):
        run([serve(lambda *_: "302").url], TALKS, tmp_path / "b.jsonl")
    expiring, good = serve(lambda n, times: "403" if n > 6 else None), serve(pause=0.02)
    report = run([expiring.url, good.url], TALKS, tmp_path / "c.jsonl")
    assert report.answered == 40 and "not asked any more" in report.endpoints[0] and expiring.good > 0


def test_endpoints_must_serve_one_model(serve: Callable[..., Server], tmp_path: Path) -> None:
    one, other = serve(models=("m", "n")), serve(models=("n", "m"))
    run([one.url, other.url], TALKS, tmp_path / "a.jsonl", model=None)
    assert json.loads((tmp_path / "a.jsonl.settings.json").read_text())["model"] == "m"
    with pytest.raises(ValueError, match=r"serves k, not m: all endpoints must serve one model"):
        run([one.url, serve(models=("k",)).url], TALKS, tmp_path / "b.jsonl", model=None)
    with pytest.raises(ValueError, match="lists no model; name one"):
        run([serve(models=()).url], TALKS, tmp_path / "c.jsonl", model=None)
    with pytest.raises(ValueError, match="was made with model = 'm', this run has 'n'"):
        run([one.url], TALKS, tmp_path / "a.jsonl", model="n")
    out = tmp_path / "a.jsonl"  # other servers of the same model go on with the file
    before = out.read_bytes()
    assert run([other.url], TALKS, out).there == 40 and out.read_bytes() == before


def test_one_that_was_not_there_at_the_start_is_checked_when_it_comes(
    serve: Callable[..., Server], tmp_path: Path
) -> None:
    """It fails until the first one has answered five times, and then lists another model: that ends the run, before it is
    asked."""
    one = serve(pause=0.01)
    other = serve(lambda n, times: "500" if one.good < 5 else None, models=("k",))
    with pytest.raises(ValueError, match="serves k, not m"):
        run([one.url, other.url], [ask(i) for i in range(4000)], tmp_path / "a.jsonl", model=None)
    assert other.good == 0 and len(ids(tmp_path / "a.jsonl")) > 0


def test_rests_double_up_to_a_bound_and_are_spread(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(endpoints, "REST", 0.5)
    monkeypatch.setattr(endpoints, "LONGEST_REST", 30.0)
    random.seed(0)
    for n, longest in ((1, 0.5), (2, 1.0), (5, 8.0), (7, 30.0), (10_000, 30.0)):
        rests = [back_off(n) for _ in range(200)]
        assert longest / 2 <= min(rests) < 0.6 * longest and 0.9 * longest < max(rests) <= longest


def test_failures_of_one_moment_count_once() -> None:
    """A server that is started anew drops all that is in flight: one failure in a row, not fifty."""
    (endpoint,) = endpoints_of(["http://127.0.0.1:1/v1"], [50])
    began = time.monotonic()
    for _ in range(50):
        endpoint.failed(Fault("ReadError"), began)
    assert endpoint.failed_in_a_row == 1 and endpoint.failures["ReadError"] == 50
    endpoint.failed(Fault("ReadError"), time.monotonic())
    assert endpoint.failed_in_a_row == 2


@pytest.mark.parametrize(
    ("urls", "in_flight", "message"),
    [
        (["localhost:8000"], [1], "give a URL"),
        (["http://"], [1], "give a URL"),
        (["http://h:99999/v1"], [1], "give a URL"),
        (["http://h/v1", "http://h/v1/chat/completions/"], [1], "stands twice"),
        (["http://a/v1", "http://b/v1"], [1, 2, 3], "one for each of 2 endpoints"),
        (["http://a/v1"], [0], "one positive count"),
        (["http://me:sesame@a/v1"], [1], "'http://a/v1' holds a password"),
    ],
)
def test_endpoints_that_cannot_be_meant(urls: list[str], in_flight: list[int], message: str) -> None:
    with pytest.raises(ValueError, match=message) as error:
        RolloutConfig(out="x.jsonl", endpoint=tuple(urls), in_flight=tuple(in_flight))
    assert "sesame" not in str(error.value)


def test_replies_that_are_final() -> None:
    """They say something about the request: asking again would change nothing."""

    def reply(content: Any, reason: Any = "stop", status: int = 200) -> Any:
        return answer_of(httpx.Response(status, json={"choices": [{"message": content, "finish_reason": reason}]}))

    assert reply({}, status=413) == ("server answered 413", None)
    assert reply({"content": "x"}, "content_filter") == ("finish_reason 'content_filter'", None)
    answer, tokens = reply({"content": None, "reasoning_content": "why"}, "length")
    assert (answer.text, answer.reasoning, answer.truncated, tokens) == ("", "why", True, None)
    for content in ("text", {"content": ["parts"]}, {"content": "x", "reasoning_content": 3}):
        with pytest.raises(Fault):
            reply(content)


# Repeated prompts


def test_a_prompt_that_stands_twice_is_answered_once_in_all_parts_together(tmp_path: Path) -> None:
    def user(text: str, system: str | None = None) -> dict[str, Any]:
        before = [{"role": "system", "content": system}] if system else []
        return {"messages": [*before, {"role": "user", "content": text}, {"role": "assistant", "content": "old"}]}

    same = ["caf\u00e9\nline", " cafe\u0301 \r\nline  \n"]  # composed or not, line ends, space around
    other = ["caf\u00e9 line", "Caf\u00e9\nline", "caf\u00e9\n line"]
    records = [user(same[0]), user("x"), user(same[1]), *map(user, other), user(same[0], "be brief"), user("x")]
    source = tmp_path / "p.jsonl"
    source.write_text("".join(json.dumps(r) + "\n" for r in records))
    data = DataConfig(source=str(source))
    kept, left_out = RolloutConfig(out="x.jsonl", data=data).conversations()
    assert [int(c.id.split(":")[1]) for c in kept] == [1, 2, 4, 5, 6, 7] and left_out == 2
    parts = [RolloutConfig(out="x.jsonl", data=data, part=f"{k}/3").conversations() for k in (1, 2, 3)]
    assert sorted(c.id for part, _ in parts for c in part) == sorted(c.id for c in kept)
    assert sum(n for _, n in parts) == 2
    every, none = RolloutConfig(out="x.jsonl", data=data, repeats=True).conversations()
    assert (len(every), none) == (8, 0)
    assert prompt_key(Conversation("t", [{"role": "tool", "content": "x"}])) is None


# The command


def test_the_command_stops_at_once_and_goes_on(
    serve: Callable[..., Server], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Ctrl-C while a server hangs, timeout 600 s: code 130 soon, whole lines kept; the next run asks only for the rest. The
    repeated prompt is counted, and the endpoints' throughput is in the summary."""
    source, out = tmp_path / "p.jsonl", tmp_path / "a.jsonl"
    source.write_text(
        "".join(json.dumps({"id": f"c{i % 8}", "messages": ask(i % 8).messages}) + "\n" for i in range(9))
    )
    stuck, good = serve(lambda n, times: "hang" if n == 6 else None), serve()
    # What runs in a shell's background ignores Ctrl-C, and hands that on.
    code = "import signal, sys; signal.signal(signal.SIGINT, signal.default_int_handler)\n"
    code += "from draftsmith.cli import main; sys.exit(main(sys.argv[1:]))"
    command = [sys.executable, "-c", code, "rollout", "--data.source", str(source), "--out", str(out)]
    command += ["--in_flight", "1,1", "--endpoint", f"{stuck.url},{nobody()}"]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as process:
        while process.poll() is None and not stuck.asked[6]:
            time.sleep(0.05)
        began = time.monotonic()
        process.send_signal(signal.SIGINT)
        _, said = process.communicate(timeout=60)
    assert process.returncode == 130 and time.monotonic() - began < 30 and "Traceback" not in said, said
    assert ids(out) == [f"c{i}" for i in range(6)]
    urls, data = (good.url, nobody()), DataConfig(source=str(source))
    run_rollout(RolloutConfig(out=str(out), endpoint=urls, in_flight=(1, 1), data=data))
    said = capsys.readouterr().out
    assert "8 answered (6 were there), 1 truncated, failed: 0; 1 repeated prompts left out" in said
    assert f"{good.url}: 2 answers, " in said and "tokens/s, failures: 0" in said
    assert "ConnectError" in said and ids(out) == [f"c{i}" for i in range(8)]
