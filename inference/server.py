"""The HTTP side of the server: routes in OpenAI's form, streams, metrics, limits, the graceful stop.

Security (PROMISES 22): every route but `/health` needs the key where there is one, compared in constant time; without a
key only this machine's own names are accepted as Host, and bodies must be declared as JSON, so that no web page can use
a server on the loopback interface. No request names a file. Tests: tests/test_serve.py.
"""

from __future__ import annotations

import asyncio
import copy
import json
import secrets
import time
from collections.abc import AsyncIterator, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from typing import Any

import uvicorn
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, PlainTextResponse, Response, StreamingResponse
from starlette.routing import Route
from starlette.types import Receive, Scope, Send
from uvicorn.protocols.http.h11_impl import H11Protocol

from ..kernels import rng
from ..losses.probs import SamplingParams
from .api import ApiError, Ask, read_ask, read_json
from .commit import Event
from .grammar import json_grammar, regex_grammar
from .metrics import metrics_text
from .replies import Reply
from .speculate import check_prompt
from .worker import Job, Worker

HEADER_SECONDS = 60.0  # for the headers of a request, and for its body
GRACE_SECONDS = 60.0  # beyond a request's own time, for a client that reads slowly; then of one that does not read
FORMS: dict[str, Callable[[Any], str]] = {"response_format": json_grammar, "guided_regex": regex_grammar}
OWN_NAMES = ("127.0.0.1", "localhost", "[::1]")


@dataclass(frozen=True)
class Settings:
    """What the HTTP side needs to know. `names`: accepted in the Host header, none = any."""

    model: str
    key: str | None
    names: tuple[str, ...]
    body_bytes: int
    default_tokens: int
    drain_seconds: float


class Service:
    """The routes, over one worker."""

    def __init__(self, worker: Worker, settings: Settings) -> None:
        self.worker, self.settings = worker, settings
        # No two threads may use one tokenizer at a time; the model's is the worker's.
        self.tokenizer = copy.deepcopy(worker.model.tokenizer)  # of the thread that reads prompts
        self.speller = copy.deepcopy(worker.model.tokenizer)  # of the event loop
        self.reader = ThreadPoolExecutor(1, "draftsmith-prompts")
        self.made = int(time.time())

    def app(self) -> Callable[[Scope, Receive, Send], Any]:
        """The ASGI application."""

        @asynccontextmanager
        async def lifespan(app: Starlette) -> AsyncIterator[None]:
            self.worker.start()
            yield
            self.reader.shutdown(wait=False, cancel_futures=True)
            await asyncio.to_thread(self.worker.stop)

        routes = [
            Route("/v1/chat/completions", self.chat, methods=["POST"]),
            Route("/v1/completions", self.completions, methods=["POST"]),
            Route("/v1/models", self.models, methods=["GET"]),
            Route("/v1/models/{name:path}", self.model, methods=["GET"]),
            Route("/health", self.health, methods=["GET"]),
            Route("/metrics", self.metrics, methods=["GET"]),
        ]
        handlers: dict[Any, Any] = {ApiError: _api_error, HTTPException: _http_error, Exception: _failure}
        app = Starlette(routes=routes, exception_handlers=handlers, lifespan=lifespan)
        return Gate(app, self.settings, self.worker.limits.seconds + GRACE_SECONDS)

    # Small routes

    async def health(self, request: Request) -> Response:
        """Whether requests are taken."""
        if not self.worker.alive or self.worker.stopping:
            return JSONResponse({"status": "stopping" if self.worker.stopping else "failed"}, 503)
        return JSONResponse({"status": "ok"})

    async def models(self, request: Request) -> Response:
        """The one model."""
        return JSONResponse({"object": "list", "data": [self._model()]})

    async def model(self, request: Request) -> Response:
        """The one model, by name."""
        self._refuse_other(request.path_params["name"])
        return JSONResponse(self._model())

    async def metrics(self, request: Request) -> Response:
        """Counters in Prometheus' text format."""
        return PlainTextResponse(metrics_text(self.worker), media_type="text/plain; version=0.0.4")

    def _model(self) -> dict[str, Any]:
        return {
            "id": self.settings.model, "object": "model", "created": self.made, "owned_by": "draftsmith",
            "max_model_len": self.worker.limits.total,
        }  # fmt: skip

    def _refuse_other(self, name: str) -> None:
        if name != self.settings.model:
            message = f"model {name[:100]!r} is not served here, {self.settings.model!r} is"
            raise ApiError(404, message, "model", "model_not_found")

    # Answers

    async def chat(self, request: Request) -> Response:
        """`/v1/chat/completions`."""
        return await self._answer(request, chat=True)

    async def completions(self, request: Request) -> Response:
        """`/v1/completions`."""
        return await self._answer(request, chat=False)

    async def _answer(self, request: Request, *, chat: bool) -> Response:
        ask = read_ask(read_json(await self._body(request)), chat, self.settings.default_tokens)
        self._refuse_other(ask.model)
        if self.worker.stopping:
            raise ApiError(503, "the server is stopping, it takes no new requests", code="stopping")
        # Long prompts and large schemas wait for each other, not the event loop for them.
        each = await asyncio.get_running_loop().run_in_executor(self.reader, self._read, ask)
        seeded = [(ids, _numbered(params, i)) for ids, params in each for i in range(ask.n)]
        job = self.worker.submit(seeded)
        reply = Reply(job, self.settings.model, self.speller, ask)
        if ask.stream:
            return StreamingResponse(self._stream(job, reply, ask), media_type="text/event-stream")
        return await self._whole(request, job, reply)

    async def _body(self, request: Request) -> bytes:
        """The body, within its limits of size and time."""
        if request.headers.get("content-type", "").split(";")[0].strip().lower() != "application/json":
            raise ApiError(415, "the body must be JSON: send Content-Type: application/json")
        most = self.settings.body_bytes
        length = request.headers.get("content-length", "0")
        if length.isdigit() and len(length) < 20 and int(length) > most:
            raise ApiError(413, f"the body has {length} bytes, at most {most}", code="too_large")
        parts, size = [], 0
        try:
            async with asyncio.timeout(HEADER_SECONDS):
                async for part in request.stream():
                    parts.append(part)
                    size += len(part)
                    if size > most:
                        raise ApiError(413, f"the body has more than {most} bytes", code="too_large")
        except TimeoutError:
            raise ApiError(408, f"the body did not arrive within {HEADER_SECONDS:.0f} s") from None
        return b"".join(parts)

    def _read(self, ask: Ask) -> list[tuple[list[int], SamplingParams]]:
        """Token ids of the prompts, with how to answer each."""
        return [(ids, self._params(ask, ids)) for ids in self._ids(ask)]

    def _ids(self, ask: Ask) -> list[list[int]]:
        """Token ids of the prompts. Raises ApiError where the chat template refuses the messages."""
        if ask.messages is None:
            return [self.tokenizer(p).input_ids if isinstance(p, str) else list(p) for p in ask.prompts]
        if self.tokenizer.chat_template is None:
            raise ApiError(400, "this model has no chat template: use /v1/completions", "messages")
        try:
            ids = self.tokenizer.apply_chat_template(
                list(ask.messages), add_generation_prompt=True, tokenize=True, return_dict=False
            )
        except Exception as error:  # a template is a program, and refuses in its own words
            raise ApiError(400, f"the model's chat template refuses these messages: {error}", "messages") from None
        return [ids]

    def _params(self, ask: Ask, ids: Sequence[int]) -> SamplingParams:
        """The sampling parameters, with the answer's limit. Raises ApiError where prompt or answer do not fit."""
        limits = self.worker.limits
        field = "prompt" if ask.messages is None else "messages"
        if len(ids) > limits.prompt:
            message = f"{field}: {len(ids)} tokens, at most {limits.prompt}"
            raise ApiError(400, message, field, "context_length_exceeded")
        params, room = ask.params, min(limits.answer, limits.total - len(ids))
        if params.max_new_tokens > room:
            if ask.sized or params.min_new_tokens > room:
                message = f"max_tokens: an answer of {params.max_new_tokens} tokens, at most {room} behind this prompt"
                raise ApiError(400, message, "max_tokens", "context_length_exceeded")
            params = replace(params, max_new_tokens=room)
        try:
            if ask.form is not None:
                params = replace(params, grammar=FORMS[ask.form[0]](ask.form[1]))
            self.worker.engine.refuse(params)
        except ValueError as error:
            raise self._refusal(ask, error, str(error).split(":")[0]) from None
        try:
            check_prompt(self.worker.model, 0, ids, params)
        except ValueError as error:
            raise self._refusal(ask, error, "stop_token_ids" if str(error).startswith("stop_ids") else field) from None
        return params

    def _refusal(self, ask: Ask, error: ValueError, field: str) -> ApiError:
        """400 for a field; where a grammar is at fault, for the one that asks for it."""
        said, name = str(error), field
        if ask.form is not None and said.startswith("grammar:"):
            name, said = ask.form[0], said.removeprefix("grammar:").strip()
        return ApiError(400, said if said.startswith(f"{name}:") else f"{name}: {said}", name)

    async def _next(self, job: Job) -> Event | None:
        """The next event; None when there is no more, because of `job.fault` if that is set."""
        left = job.begun + self.worker.limits.seconds - time.monotonic()
        try:
            return await asyncio.wait_for(job.events.get(), max(left, 0))
        except TimeoutError:
            seconds = self.worker.limits.seconds
            self.worker.cancel(job, ApiError(504, f"no answer within {seconds:g} s", code="timeout"))
            return None

    async def _events(self, job: Job) -> AsyncIterator[Event]:
        open_rows = len(job.requests)
        while open_rows and (event := await self._next(job)) is not None:
            yield event
            open_rows -= event.stop_reason is not None
        if job.fault is not None:
            raise job.fault

    async def _stream(self, job: Job, reply: Reply, ask: Ask) -> AsyncIterator[str]:
        try:
            for chunk in reply.opening():
                yield _sse(chunk)
            async for event in self._events(job):
                yield _sse(reply.chunk(event))
            if ask.include_usage:
                yield _sse(reply.shell(True) | {"choices": [], "usage": reply.usage()})
            yield "data: [DONE]\n\n"
        except ApiError as error:
            yield _sse(error.body())
        finally:
            self.worker.cancel(job)  # nothing, if it is done

    async def _whole(self, request: Request, job: Job, reply: Reply) -> Response:
        async def collect() -> dict[str, Any]:
            return reply.whole([event async for event in self._events(job)])

        tasks = [asyncio.create_task(collect()), asyncio.create_task(_gone(request))]
        try:
            await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            return JSONResponse(await tasks[0]) if tasks[0].done() else Response(status_code=499)
        finally:
            self.worker.cancel(job)
            for task in tasks:
                task.cancel()


def _numbered(params: SamplingParams, i: int) -> SamplingParams:
    """Of several answers to one prompt, every one has a stream of random numbers of its own."""
    return params if params.seed is None else replace(params, seed=rng.fold(params.seed, i))


async def _gone(request: Request) -> None:
    """Returns when the client is gone."""
    while (await request.receive())["type"] != "http.disconnect":
        pass


def _sse(value: dict[str, Any]) -> str:
    return f"data: {json.dumps(value, ensure_ascii=False)}\n\n"


async def _api_error(request: Request, error: Any) -> Response:
    headers = {"Retry-After": "1"} if error.status in (429, 503) else None
    return JSONResponse(error.body(), error.status, headers)


async def _http_error(request: Request, error: Any) -> Response:
    what = ApiError(error.status_code, f"{request.method} {request.url.path[:100]}: {error.detail}")
    return JSONResponse(what.body(), error.status_code, error.headers)


async def _failure(request: Request, error: Exception) -> Response:
    return JSONResponse(ApiError(500, "the server failed on this request").body(), 500)


class Gate:
    """What every request passes first: the key, the Host header, a limit of time for the whole exchange."""

    def __init__(self, app: Any, settings: Settings, seconds: float) -> None:
        self.app, self.settings, self.seconds = app, settings, seconds

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        if (refusal := self._refusal(scope)) is not None:
            response = JSONResponse(refusal.body(), refusal.status)
            await response(scope, receive, send)
            return
        try:
            async with asyncio.timeout(self.seconds):
                await self.app(scope, receive, send)
        except (TimeoutError, ClientDisconnect):
            pass  # the connection is closed, there is nobody to tell

    def _refusal(self, scope: Scope) -> ApiError | None:
        headers = dict(scope["headers"])
        host = headers.get(b"host", b"").decode("latin-1").lower()
        name = host if host.endswith("]") else host.rpartition(":")[0] or host
        if self.settings.names and name not in self.settings.names:
            return ApiError(
                403, f"Host {name[:100]!r} is not this server's; without a key it answers its own machine alone"
            )
        if self.settings.key is None or scope["path"] == "/health":
            return None
        given = headers.get(b"authorization", b"").removeprefix(b"Bearer ").strip()
        if secrets.compare_digest(given, self.settings.key.encode()):
            return None
        return ApiError(401, "a key is needed: send Authorization: Bearer KEY", code="invalid_api_key")


class Protocol(H11Protocol):
    """uvicorn's HTTP/1.1, with limits on the time that the headers of a request may take, and that what is sent may wait
    for a client that does not read."""

    _late: asyncio.TimerHandle | None = None
    _unread: asyncio.TimerHandle | None = None

    def connection_made(self, transport: Any) -> None:
        super().connection_made(transport)
        transport.set_write_buffer_limits(high=0)  # paused as long as anything waits
        self._late = self.loop.call_later(HEADER_SECONDS, transport.close)

    def data_received(self, data: bytes) -> None:
        if self._late is None and self._waits():
            self._late = self.loop.call_later(HEADER_SECONDS, self.transport.close)
        super().data_received(data)
        if not self._waits():
            self._on_time()

    def pause_writing(self) -> None:
        super().pause_writing()
        # `close` would wait for the client.
        self._unread = self.loop.call_later(GRACE_SECONDS, self.transport.abort)

    def resume_writing(self) -> None:
        super().resume_writing()
        self._has_read()

    def connection_lost(self, exc: Exception | None) -> None:
        self._on_time()
        self._has_read()
        super().connection_lost(exc)

    def _waits(self) -> bool:
        return self.cycle is None or self.cycle.response_complete

    def _on_time(self) -> None:
        if self._late is not None:
            self._late.cancel()
            self._late = None

    def _has_read(self) -> None:
        if self._unread is not None:
            self._unread.cancel()
            self._unread = None


class Server(uvicorn.Server):
    """uvicorn's server, which stops in two steps: at the first signal new requests get 503 while those at hand are
    answered, for `drain_seconds` at most; at the second it ends. `ready(address)` is called once it listens."""

    def __init__(
        self, service: Service, host: str, port: int, connections: int, ready: Callable[[str], None] | None = None
    ) -> None:
        super().__init__(
            uvicorn.Config(
                service.app(),
                host=host,
                port=port,
                http=Protocol,
                ws="none",
                lifespan="on",
                log_level="error",  # warnings are about clients, as many as they like
                access_log=False,
                server_header=False,
                proxy_headers=False,
                limit_concurrency=connections,
                timeout_graceful_shutdown=5,
            )
        )
        self.service, self.ready = service, ready
        self.loop: asyncio.AbstractEventLoop | None = None

    @property
    def address(self) -> tuple[str, int]:
        """Where it listens."""
        return self.servers[0].sockets[0].getsockname()[:2]

    async def startup(self, sockets: Any = None) -> None:
        self.loop = asyncio.get_running_loop()
        await super().startup(sockets)
        if self.started and self.ready is not None:
            host, port = self.address
            self.ready(f"http://{f'[{host}]' if ':' in host else host}:{port}")

    def handle_exit(self, sig: int, frame: Any) -> None:
        if self.loop is None or not self.started or self.loop.is_closed():
            super().handle_exit(sig, frame)
        elif self.service.worker.stopping:
            self.loop.call_soon_threadsafe(self._give_up)
            super().handle_exit(sig, frame)
        else:
            self.loop.call_soon_threadsafe(self.begin_stop)

    def begin_stop(self) -> None:
        """On the event loop: take nothing new, finish what is at hand, end."""
        self.service.worker.stopping = True
        self._draining = asyncio.ensure_future(self._drain())

    async def _drain(self) -> None:
        worker, begun = self.service.worker, time.monotonic()
        while worker.held and time.monotonic() - begun < self.service.settings.drain_seconds:
            await asyncio.sleep(0.02)
        self._give_up()
        await asyncio.sleep(0.1)  # what was said last goes out
        self.should_exit = True

    def _give_up(self) -> None:
        fault = ApiError(503, "the server stopped before this answer was complete", code="stopping")
        self.service.worker.cancel_all(fault)
