"""The server under load: many clients at once, every answer compared with the one that `generate` gives alone.

    python tests/bench/serve.py                                  # tiny target in float64, 500 requests of 16 clients
    python tests/bench/serve.py --requests 10000 --tokens 4      # memory over many short requests
    python tests/bench/serve.py --target smollm2 --dtype bfloat16 --requests 40 --clients 8 --model ngram --tokens 64

Requests differ in prompt, length, sampling and form (whole, stream); one in twenty of the streaming clients leaves
after its first piece of text. In float64 every text must be the offline one; in other data types low bits depend on the
rows of a pass, and the share of equal texts is stated. The last line is JSON.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import resource
import signal
import threading
import time
from pathlib import Path
from typing import Any

import httpx

from draftsmith.inference.generate import Assembled, GenerateConfig, assemble
from draftsmith.inference.serve import ServeConfig, service_of, with_engine
from draftsmith.inference.server import Server
from draftsmith.inference.speculate import generate
from draftsmith.losses.probs import SamplingParams

WORDS = [
    "rain",
    "falls",
    "on",
    "the",
    "quiet",
    "roof",
    "while",
    "seven",
    "old",
    "clocks",
    "count",
    "slowly",
    "towards",
    "another",
    "pale",
    "morning",
]
LEAVES = 20  # one in so many


def resident_mb() -> float:
    """Memory of this process, MB."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * resource.getpagesize() / 1e6


def requests_of(count: int, tokens: int) -> list[dict[str, Any]]:
    """Bodies without the model; every fifth prompt stands twice, so that mixed up streams would show."""
    draw, bodies = random.Random(0), list[dict[str, Any]]()
    for i in range(count):
        prompt = " ".join(draw.choices(WORDS, k=draw.randint(1, 12)))
        if i % 5 == 4:
            prompt = bodies[-1]["prompt"]
        body = {"prompt": prompt, "max_tokens": draw.randint(1, tokens), "temperature": draw.choice([0, 0, 0.7, 1.0])}
        bodies.append(body | {"seed": i, "stream": draw.random() < 0.5})
    return bodies


def offline(made: Assembled, body: dict[str, Any]) -> str:
    """The answer to one request alone."""
    ids = made.target.tokenizer(body["prompt"]).input_ids
    params = SamplingParams(temperature=body["temperature"], max_new_tokens=body["max_tokens"], seed=body["seed"])
    return generate(made.target, [ids], params, made.drafter, made.decode)[0].text


class Load:
    """What the clients saw."""

    def __init__(self, address: str, model: str, bodies: list[dict[str, Any]]) -> None:
        self.address, self.model, self.waiting = address, model, list(enumerate(bodies))[::-1]
        self.texts: dict[int, str] = {}
        self.first: list[float] = []
        self.errors: list[str] = []
        self.left = self.tokens = 0

    async def client(self) -> None:
        """Ask for one request after the other."""
        async with httpx.AsyncClient(base_url=self.address, timeout=600) as client:
            while self.waiting:
                i, body = self.waiting.pop()
                body = body | {"model": self.model}
                try:
                    await (self.stream(client, i, body) if body["stream"] else self.whole(client, i, body))
                except (httpx.HTTPError, KeyError, ValueError) as error:
                    self.errors.append(f"{type(error).__name__}: {error}")

    async def whole(self, client: httpx.AsyncClient, i: int, body: dict[str, Any]) -> None:
        reply = (await client.post("/v1/completions", json=body)).raise_for_status().json()
        self.texts[i] = reply["choices"][0]["text"]
        self.tokens += reply["usage"]["completion_tokens"]

    async def stream(self, client: httpx.AsyncClient, i: int, body: dict[str, Any]) -> None:
        begun, text, silent = time.perf_counter(), "", True
        body = body | {"stream_options": {"include_usage": True}}
        async with client.stream("POST", "/v1/completions", json=body) as reply:
            reply.raise_for_status()
            async for line in reply.aiter_lines():
                if not line.startswith("data: {"):
                    continue
                if silent:
                    self.first.append(time.perf_counter() - begun)
                silent = False
                chunk = json.loads(line[6:])
                if chunk.get("usage"):
                    self.tokens += chunk["usage"]["completion_tokens"]
                text += "".join(choice["text"] for choice in chunk["choices"])
                if i % LEAVES == 0:
                    self.left += 1
                    return
        self.texts[i] = text


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--target", default="tiny")
    parser.add_argument("--dtype", default="float64", choices=["float64", "float32", "bfloat16"])
    parser.add_argument("--model", default="recycling")
    parser.add_argument("--requests", type=int, default=500)
    parser.add_argument("--clients", type=int, default=16)
    parser.add_argument("--tokens", type=int, default=48)
    parser.add_argument("--rows", type=int, default=8)
    parser.add_argument("--prefix_mb", type=int, default=2, help="memory of prefixes, soon full")
    parser.add_argument("--compare", type=int, default=500, help="answers compared with offline ones, at most")
    args = parser.parse_args()

    cfg = ServeConfig(
        max_rows=args.rows, max_prompt=150, port=0, name="bench", queue=args.clients, max_answer=args.tokens,
        default_answer=args.tokens,
    )  # fmt: skip
    made = assemble(GenerateConfig("", model=args.model, target=args.target, dtype=args.dtype, k=4), None, (), [])
    bodies = requests_of(args.requests, args.tokens)
    wanted = [offline(made, body) for body in bodies[: args.compare]]

    service = service_of(cfg, with_engine(made, args.rows, args.prefix_mb), None)
    listening, address = threading.Event(), []
    server = Server(service, cfg.host, 0, 4 * args.clients, lambda url: (address.append(url), listening.set())[0])
    thread = threading.Thread(target=server.run)
    thread.start()
    listening.wait()
    load = Load(address[0], "bench", bodies)

    async def run(seconds: float = 0.2) -> list[float]:
        clients = [asyncio.create_task(load.client()) for _ in range(args.clients)]
        memory = []
        while not all(task.done() for task in clients):
            await asyncio.sleep(seconds)
            memory.append(resident_mb())
        await asyncio.gather(*clients)
        return memory

    begun = time.perf_counter()
    memory = asyncio.run(run())
    seconds = time.perf_counter() - begun
    while service.worker.held:
        time.sleep(0.01)
    outcomes = dict(service.worker.counts.outcomes)
    server.handle_exit(signal.SIGTERM, None)
    thread.join()

    compared = [(load.texts[i], want) for i, want in enumerate(wanted) if i in load.texts]
    equal = sum(got == want for got, want in compared)
    load.first.sort()
    warm = memory[len(memory) // 4 :] or [resident_mb()]
    figures = {
        "target": args.target, "dtype": args.dtype, "model": args.model, "requests": args.requests,
        "clients": args.clients, "rows": args.rows, "errors": len(load.errors), "left": load.left,
        "outcomes": outcomes, "compared": len(compared), "equal": equal, "seconds": round(seconds, 2),
        "tokens_per_second": round(load.tokens / seconds, 1),
        "first_token_p50_ms": round(1e3 * load.first[len(load.first) // 2], 1) if load.first else None,
        "first_token_p95_ms": round(1e3 * load.first[int(len(load.first) * 0.95)], 1) if load.first else None,
        "memory_mb_at_a_quarter": round(warm[0], 1), "memory_mb_at_the_end": round(memory[-1], 1),
    }  # fmt: skip
    for name, value in figures.items():
        print(f"{name:<24} {value}")
    for error in sorted(set(load.errors))[:5]:
        print(f"error: {error}")
    if load.errors or (args.dtype == "float64" and equal != len(compared)):
        raise SystemExit("not the offline answers, or errors: no speed is stated")
    print(json.dumps({"benchmark": "serve"} | figures))


if __name__ == "__main__":
    main()
