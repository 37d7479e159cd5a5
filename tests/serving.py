"""A server in a thread, and how tests ask it."""

import json
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import httpx

from draftsmith.inference.generate import Assembled
from draftsmith.inference.serve import ServeConfig, Served, service_of, with_engine
from draftsmith.inference.server import Server
from draftsmith.inference.speculate import DecodeConfig

DECODE = DecodeConfig(k=3, max_rows=3)
CONFIG = ServeConfig(port=0, queue=4, max_prompt=150, max_answer=90, default_answer=12, name="tiny", max_rows=3)


@contextmanager
def running(made: Assembled | Served, slow: float = 0.0, key: str | None = None, **options: Any) -> Iterator[Any]:
    """(client, server) of a server in a thread; `slow`: seconds that every step takes more."""
    served = with_engine(made, CONFIG.max_rows, prefix_mb=1) if isinstance(made, Assembled) else made
    service = service_of(ServeConfig(**(vars(CONFIG) | options)), served, key)
    if slow:
        step = service.worker.engine.step

        def slowly() -> Any:
            time.sleep(slow)
            return step()

        service.worker.engine.step = slowly  # type: ignore[method-assign]
    listening = threading.Event()
    server = Server(service, "127.0.0.1", 0, 64, lambda _: listening.set())
    thread = threading.Thread(target=server.run)
    thread.start()
    assert listening.wait(20)
    headers = {} if key is None else {"Authorization": f"Bearer {key}"}
    try:
        with httpx.Client(base_url=f"http://127.0.0.1:{server.address[1]}", headers=headers, timeout=30) as client:
            yield client, server
    finally:
        server.handle_exit(signal.SIGTERM, None)
        thread.join(20)
        assert not thread.is_alive()


def until(what: Any, seconds: float = 10.0) -> None:
    end = time.monotonic() + seconds
    while not what():
        assert time.monotonic() < end, "it did not happen"
        time.sleep(0.01)


def complete(client: httpx.Client, prompt: Any, **options: Any) -> dict[str, Any]:
    reply = client.post("/v1/completions", json={"model": "tiny", "prompt": prompt, **options})
    assert reply.status_code == 200, reply.text
    return reply.json()


def streamed(client: httpx.Client, path: str, **body: Any) -> list[dict[str, Any]]:
    with client.stream("POST", path, json={"model": "tiny", "stream": True, **body}) as reply:
        assert reply.status_code == 200
        assert reply.headers["content-type"].startswith("text/event-stream")
        lines = [line for line in reply.iter_lines() if line]
    assert lines[-1] == "data: [DONE]" and all(line.startswith("data: ") for line in lines)
    return [json.loads(line[6:]) for line in lines[:-1]]
