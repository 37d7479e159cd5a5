"""The server under load: many clients at once, every answer compared with the one that its loop gives alone.

    python tests/bench/serve.py                                  # tiny models in float64, about 6 minutes
    python tests/bench/serve.py --loops draft --requests 60 --short 300
    python tests/bench/serve.py --loops draft --target smollm2 --dtype bfloat16 --requests 40 --clients 8 --model ngram \\
        --tokens 64 --short 0

All three decode loops: a drafter's speculation, Jacobi decoding, a denoiser. Requests differ in prompt, length, sampling
and form (whole, stream), and every fifth prompt stands twice, so that mixed up streams would show; one in twenty of the
streaming clients leaves after its first piece of text. Beside them one client sends what must be refused (JSON that is
none, a huge prompt, a negative temperature, an unknown model), and a process that streams is killed. Then 10,000 short
requests, over which memory and open files must not grow.

In float64 every text must be the offline one; in other data types low bits depend on the rows of a pass, and the share
of equal texts is stated. The last line is JSON; the exit code is 1 where a bar fails.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import resource
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from statistics import median
from typing import Any

import httpx
from main_job import bar

from draftsmith.inference.diffuse import DiffuseConfig, diffuse
from draftsmith.inference.generate import GenerateConfig, assemble
from draftsmith.inference.serve import ServeConfig, Served, service_of, with_engine
from draftsmith.inference.server import Server
from draftsmith.inference.speculate import generate
from draftsmith.inference.turns import Turns
from draftsmith.losses.probs import SamplingParams
from draftsmith.models.denoiser import TargetDenoiser
from draftsmith.models.loading import load_target

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
LOOPS = ("draft", "jacobi", "denoiser")
GROWTH_MB = 8.0  # most over the short requests, from their second quarter to their last
FREED_SECONDS = 5.0  # most until the place of a client that was killed is free
RUDE: list[tuple[bytes | dict[str, Any], int]] = [
    (b'{"model": "bench", "prompt": ', 400),
    (b"\xff\xfe", 400),
    ({"model": "bench", "prompt": "x" * 100_000}, 400),
    ({"model": "bench", "prompt": "x" * 2_000_000}, 413),
    ({"model": "bench", "prompt": "x", "temperature": -1}, 400),
    ({"model": "other", "prompt": "x"}, 404),
]
Offline = Callable[[dict[str, Any]], str]


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


def served_by(loop: str, args: argparse.Namespace) -> tuple[Served, Offline]:
    """What is served, and the answer to one request alone."""

    def sampling(body: dict[str, Any]) -> SamplingParams:
        return SamplingParams(temperature=body["temperature"], max_new_tokens=body["max_tokens"], seed=body["seed"])

    if loop == "denoiser":
        target = load_target(args.target, dtype=args.dtype)
        denoiser = TargetDenoiser(target, 4, 3, shift=True)
        how = DiffuseConfig(max_rows=args.rows)
        served = Served(denoiser, lambda _: Turns(denoiser, how), "by diffusion")
        return served, lambda body: diffuse(denoiser, [_ids(target, body)], sampling(body), how)[0].text
    model = args.model if loop == "draft" else "jacobi"
    options = {"k": 4} if loop == "draft" else {}
    made = assemble(GenerateConfig("", model=model, target=args.target, dtype=args.dtype, **options), None, (), [])

    def offline(body: dict[str, Any]) -> str:
        return generate(made.target, [_ids(made.target, body)], sampling(body), made.drafter, made.decode)[0].text

    return with_engine(made, args.rows, args.prefix_mb), offline


def _ids(target: Any, body: dict[str, Any]) -> list[int]:
    return target.tokenizer(body["prompt"]).input_ids


class Load:
    """What the clients saw."""

    def __init__(self, address: str, model: str, bodies: list[dict[str, Any]]) -> None:
        self.address, self.model, self.waiting = address, model, list(enumerate(bodies))[::-1]
        self.texts: dict[int, str] = {}
        self.first: list[float] = []
        self.errors: list[str] = []
        self.refused = self.wrongly = 0  # what must be refused: rightly, and not so
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

    async def rude(self, busy: Callable[[], bool]) -> None:
        """Send what must be refused, again and again while others ask."""
        headers = {"Content-Type": "application/json"}
        async with httpx.AsyncClient(base_url=self.address, timeout=60, headers=headers) as client:
            while True:
                for body, status in RUDE:
                    content = body if isinstance(body, bytes) else json.dumps(body).encode()
                    reply = await client.post("/v1/completions", content=content)
                    right = reply.status_code == status and "message" in reply.json()["error"]
                    self.refused, self.wrongly = self.refused + right, self.wrongly + (not right)
                if not busy():
                    return
                await asyncio.sleep(0.5)

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


def run_load(load: Load, clients: int, every: Callable[[], None] = lambda: None, rude: bool = True) -> float:
    """Let clients ask until all is answered; seconds that it took. `every`: called five times a second."""

    async def run() -> None:
        tasks = [asyncio.create_task(load.client()) for _ in range(clients)]
        beside = asyncio.create_task(load.rude(lambda: not all(task.done() for task in tasks))) if rude else None
        while not all(task.done() for task in tasks):
            await asyncio.sleep(0.2)
            every()
        await asyncio.gather(*tasks)
        if beside is not None:
            await beside

    begun = time.perf_counter()
    asyncio.run(run())
    return time.perf_counter() - begun


KILLED = """
import httpx, sys
body = {"model": "bench", "prompt": "seven old clocks", "stream": True, "ignore_eos": True, "max_tokens": int(sys.argv[2])}
with httpx.stream("POST", sys.argv[1] + "/v1/completions", json=body, timeout=60) as reply:
    for line in reply.iter_lines():
        if line:
            print(line, flush=True)
"""


def killed(address: str, worker: Any, tokens: int) -> float | None:
    """Seconds from the death of a process that reads a stream to the moment when its place is free; None: never, or it
    had its whole answer before."""
    step, cancelled = worker.engine.step, worker.counts.outcomes["cancelled"]

    def slowly() -> Any:
        time.sleep(0.05)
        return step()

    worker.engine.step = slowly
    try:
        command = [sys.executable, "-c", KILLED, address, str(tokens)]
        process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        assert process.stdout is not None
        process.stdout.readline()
        process.kill()
        process.wait()
        process.stdout.close()
        begun = time.perf_counter()
        while worker.held or worker.engine.running:
            if time.perf_counter() - begun > 2 * FREED_SECONDS:
                return None
            time.sleep(0.01)
        return time.perf_counter() - begun if worker.counts.outcomes["cancelled"] == cancelled + 1 else None
    finally:
        worker.engine.step = step


def open_files() -> int:
    """Of this process."""
    return len(os.listdir("/proc/self/fd"))


@contextmanager
def running(served: Served, args: argparse.Namespace) -> Iterator[tuple[str, Any]]:
    """(address, worker) of a server in a thread."""
    cfg = ServeConfig(
        max_rows=args.rows, max_prompt=150, port=0, name="bench", queue=args.clients, max_answer=args.tokens,
        default_answer=args.tokens,
    )  # fmt: skip
    service = service_of(cfg, served, None)
    listening, address = threading.Event(), list[str]()
    server = Server(service, cfg.host, 0, 4 * args.clients, lambda url: (address.append(url), listening.set())[0])
    thread = threading.Thread(target=server.run)
    thread.start()
    listening.wait()
    try:
        yield address[0], service.worker
    finally:
        server.handle_exit(signal.SIGTERM, None)
        thread.join()


def idle(worker: Any) -> None:
    """Wait until nobody is served."""
    while worker.held or worker.engine.running:
        time.sleep(0.01)


def under_load(loop: str, args: argparse.Namespace) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """Figures and bars of one decode loop."""
    served, offline = served_by(loop, args)
    bodies = requests_of(args.requests, args.tokens)
    wanted = [offline(body) for body in bodies[: args.compare]]
    with running(served, args) as (address, worker):
        load = Load(address, "bench", bodies)
        seconds = run_load(load, args.clients)
        idle(worker)
        outcomes = dict(worker.counts.outcomes)
        freed = killed(address, worker, args.tokens)
        memory, files, short = short_requests(address, args) if loop == "draft" and args.short else ([], (0, 0), None)
    compared = [(load.texts[i], want) for i, want in enumerate(wanted) if i in load.texts]
    equal = sum(got == want for got, want in compared)
    load.first.sort()
    figures = {
        "loop": loop, "requests": args.requests, "errors": len(load.errors), "left": load.left, "outcomes": outcomes,
        "refused": load.refused, "compared": len(compared), "equal": equal, "seconds": round(seconds, 2),
        "tokens_per_second": round(load.tokens / seconds, 1),
        "first_token_p50_ms": round(1e3 * load.first[len(load.first) // 2], 1) if load.first else None,
        "first_token_p95_ms": round(1e3 * load.first[int(len(load.first) * 0.95)], 1) if load.first else None,
        "freed_seconds": None if freed is None else round(freed, 3),
    }  # fmt: skip
    answered = len(load.texts) + load.left
    bars = [
        bar(f"{loop}: errors", len(load.errors), at_most=0),
        bar(f"{loop}: requests answered, or left by their clients", answered, at_least=args.requests),
        bar(f"{loop}: seconds until a killed client's place is free", freed, at_most=FREED_SECONDS),
        bar(f"{loop}: refusals with the right 4xx", load.refused, at_least=len(RUDE)),
        bar(f"{loop}: other replies to what must be refused", load.wrongly, at_most=0),
    ]
    if args.dtype == "float64":
        different = len(compared) - equal if compared else None  # not measured, so not held
        bars.append(bar(f"{loop}: texts that are not the offline ones", different, at_most=0))
    if short is not None:
        quarter = len(memory) // 4
        grown = median(memory[-quarter:]) - median(memory[quarter : 2 * quarter]) if quarter else None
        figures |= {"short_requests": args.short, "short_errors": len(short.errors), "memory_mb": memory[-1:],
                    "memory_grown_mb": grown and round(grown, 2), "files": files}  # fmt: skip
        bars += [
            bar("errors of short requests", len(short.errors), at_most=0),
            bar("MB that memory grew over the short requests, second quarter to last", grown, at_most=GROWTH_MB),
            bar("open files more after them than before", files[1] - files[0], at_most=0),
        ]
    for error in sorted(set(load.errors + ([] if short is None else short.errors)))[:5]:
        print(f"error: {error}")
    return figures, bars


def short_requests(address: str, args: argparse.Namespace) -> tuple[list[float], tuple[int, int], Load]:
    """Memory over many short requests, MB; open files before and after; what the clients saw."""
    run_load(Load(address, "bench", requests_of(4 * args.clients, 2)), args.clients, rude=False)  # all is made once
    time.sleep(0.5)
    before, memory = open_files(), list[float]()
    load = Load(address, "bench", requests_of(args.short, 2))
    run_load(load, args.clients, lambda: memory.append(resident_mb()), rude=False)
    end = time.perf_counter() + 5
    while open_files() > before and time.perf_counter() < end:  # sockets of clients that left
        time.sleep(0.1)
    return memory, (before, open_files()), load


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--loops", nargs="+", choices=LOOPS, default=list(LOOPS))
    parser.add_argument("--target", default="tiny")
    parser.add_argument("--dtype", default="float64", choices=["float64", "float32", "bfloat16"])
    parser.add_argument("--model", default="recycling", help="drafter of the loop `draft`")
    parser.add_argument("--requests", type=int, default=500, help="per loop")
    parser.add_argument("--clients", type=int, default=16)
    parser.add_argument("--tokens", type=int, default=48)
    parser.add_argument("--rows", type=int, default=8)
    parser.add_argument("--prefix_mb", type=int, default=2, help="memory of prefixes, soon full")
    parser.add_argument("--compare", type=int, default=500, help="answers compared with offline ones, at most")
    parser.add_argument(
        "--short", type=int, default=10_000, help="short requests, over which nothing may grow; 0 = none"
    )
    args = parser.parse_args()
    loops, bars = [], list[dict[str, Any]]()
    for loop in args.loops:
        figures, found = under_load(loop, args)
        loops.append(figures)
        bars += found
        for name, value in figures.items():
            print(f"{name:<24} {value}")
        print(flush=True)
    for one in bars:
        bound = f"at least {one['at_least']:g}" if "at_least" in one else f"at most {one['at_most']:g}"
        print(f"{'holds' if one['holds'] else 'FAILS'}  {one['name']}: {one['value']} ({bound})")
    settings = {name: getattr(args, name) for name in ("target", "dtype", "model", "clients", "rows", "tokens")}
    print(json.dumps({"name": "serve", "settings": settings, "loops": loops, "bars": bars}))
    return 0 if all(one["holds"] for one in bars) else 1


if __name__ == "__main__":
    sys.exit(main())
