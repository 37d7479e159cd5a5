"""`draftsmith serve`: answer over HTTP, in the form of OpenAI's API, with or without a drafter.

draftsmith serve EXPORT                                     # a drafter's export, or a consistency model's
draftsmith serve ngram --target smollm2 --k 8               # a training-free drafter
draftsmith serve --target smollm2                           # plain decoding
curl http://127.0.0.1:8000/v1/chat/completions -H 'Content-Type: application/json' \
    -d '{"model": "smollm2", "messages": [{"role": "user", "content": "What is rain?"}], "stream": true}'

Requests come and go between the steps of one engine (engine.py), which runs in a thread of its own (worker.py); routes
and limits are in server.py, what a request may say in api.py. Tests: tests/test_serve.py.
"""

from __future__ import annotations

import errno
import ipaddress
import os
import socket
from collections.abc import Callable, Collection
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any, Literal

import torch
from rich.console import Console

from ..models import FreeSettings
from ..models.int8 import Weights
from ..models.jacobi import Jacobi
from .consistency_folder import stored_consistency
from .decode import DecodeConfig
from .denoisers import stored_denoiser
from .engine import Engine
from .generate import Assembled, GenerateConfig, assemble, assemble_denoiser, decode_of, refuse_idle_flags
from .load import is_free, refuse_idle_settings
from .prefixes import Prefixes
from .report import visible
from .self_draft import SelfDraft
from .server import OWN_NAMES, Server, Service, Settings
from .turns import Turns
from .worker import Limits, Worker


@dataclass(frozen=True)
class ServeConfig:
    """What to serve, where, and how much of it."""

    model: str | None = None
    """Export folder or Hub id of a drafter, of a consistency model or of a denoiser; or, for any target and without
    training, ngram, suffix, recycling, lookahead, jacobi or lm:MODEL; without it the target decodes on its own."""
    target: str | None = None
    """Hub id, folder, GGUF file or built-in name of the target; by default the one that an export names."""
    drafter: FreeSettings = field(default_factory=FreeSettings)
    """Settings of the training-free drafters, as of `draftsmith generate`."""
    revision: str | None = None
    """Revision of `model` on the Hub."""
    target_revision: str | None = None
    """Revision of the target on the Hub; by default the one that `model` names."""
    host: str = "127.0.0.1"
    """Address to listen on; one that other machines reach needs `api_key_env`."""
    port: int = 8000
    """Port to listen on; 0 = a free one."""
    name: str | None = None
    """What requests call the model; null = the name of `model` or of the target, without folders."""
    api_key_env: str | None = None
    """Environment variable whose value is the key that every route but /health asks for."""
    max_rows: int = DecodeConfig.max_rows
    """Answers decoded together."""
    queue: int = 64
    """Answers that may wait for a row; more are refused with 429."""
    max_prompt: int = 2048
    """Longest prompt in tokens; memory for so many, and for the longest answer, is kept for every row."""
    max_answer: int = 1024
    """Longest answer in tokens."""
    default_answer: int = 512
    """Longest answer where a request says nothing."""
    prefix_mb: int = 512
    """Memory for what earlier prompts and answers have in common with new ones, in megabytes: keys and values, and states
    that the drafter needs; 0 = every prompt is read as a whole."""
    timeout: float = 600.0
    """Seconds that a request may take, the queue included."""
    drain: float = 30.0
    """Seconds that running requests have to finish after SIGTERM or Ctrl-C; a second one ends at once."""
    body_kb: int = 1024
    """Largest body of a request, in kilobytes."""
    connections: int = 256
    """Connections at a time; more are refused with 503."""
    k: int = DecodeConfig.k
    """Tokens drafted per pass, at most what the drafter has; of jacobi its block says how many."""
    tree: str = DecodeConfig.tree
    """Shape of the draft: chain, cut, cape, static, dynamic, opt, best_first, capped or ppd (inference/README.md)."""
    nodes: int = DecodeConfig.nodes
    """Most nodes of a tree that is no chain."""
    width: int = DecodeConfig.width
    """Most candidates per node of a tree."""
    threshold: float | None = DecodeConfig.threshold
    """cut: confidence below which a chain ends; opt: expected tokens that a layer must add; null = the tree's default.
    Of denoisers: the strategy's threshold; null = the folder's or the strategy's own."""
    strategy: str | None = None
    """Of denoisers, how places are decided (inference/README.md); null = what the folder recommends, else threshold."""
    steps: int | None = None
    """Of denoisers, passes per block (strategies `fixed`, `margin` and others that count them); alone it means `fixed`."""
    sub_block: int | None = None
    """Of denoisers, places of a block that are decided before its next ones; null = all."""
    self_draft: bool = False
    """The denoiser drafts `k` tokens at a time for the model that it was converted from, which verifies: exact."""
    prompt_rows: int | None = DecodeConfig.prompt_rows
    """Most rows of prompt tokens in a verification (drafters that have them); null = as many as the nodes can have."""
    verifier: str = DecodeConfig.verifier
    """Acceptance rule; `auto` takes the exact one that fits. What each promises: inference/README.md."""
    allow_lossy: bool = False
    """Permit a rule that does not keep the target's distribution."""
    dtype: Literal["bfloat16", "float16", "float32", "float64"] = "bfloat16"
    """Weights and states of target and drafter."""
    weights: Weights = "full"
    """int8: round the target's matrices, the embedding's aside, for plain decoding and verification alike; half the memory,
    other answers (models/int8.py)."""
    device: str = "cpu"
    """Where to run."""
    trust_remote_code: bool = False
    """Run code that comes with the target."""

    def __post_init__(self) -> None:
        for name in ("max_rows", "max_prompt", "max_answer", "default_answer", "body_kb", "connections"):
            if getattr(self, name) < 1:
                raise ValueError(f"serve: {name}={getattr(self, name)}, must be an integer >= 1")
        for name in ("queue", "prefix_mb"):
            if getattr(self, name) < 0:
                raise ValueError(f"serve: {name}={getattr(self, name)}, must be an integer >= 0")
        if not 0 <= self.port < 1 << 16:
            raise ValueError(f"serve: port={self.port}, must be in 0..65535")
        if not 0 < self.timeout < 1e6 or not 0 <= self.drain < 1e6:
            raise ValueError(f"serve: timeout={self.timeout}, drain={self.drain}: must be seconds, timeout more than 0")
        if self.name is not None and not (self.name.strip() and self.name.isprintable()):
            raise ValueError(f"serve: name={self.name!r}, must be a printable text that is not empty")
        if self.default_answer > self.max_answer:
            raise ValueError(
                f"serve: default_answer={self.default_answer} is more than max_answer={self.max_answer}: lower it"
            )


def run_serve(cfg: ServeConfig, named: Collection[str] = frozenset()) -> None:
    """The command: load, listen, answer until a signal.

    Raises:
        ValueError: settings that cannot be meant, a model that cannot be served, an open address without a key, an address
            that is taken or not this machine's.
    """
    key = key_of(cfg)  # refused before weights load
    refuse_taken(cfg.host, cfg.port)
    served = load_served(cfg, named)
    service = service_of(cfg, served, key)
    console = Console(highlight=False)

    def ready(address: str) -> None:
        cache = getattr(service.worker.engine, "cache", None)
        kept = () if cache is None else (f"{cfg.max_rows} answers at a time, {cache.kv.nbytes / 1e6:.0f} MB for them",)
        for line in (f"{service.settings.model} ({served.how}) at {address}/v1", *kept, *served.about):
            console.print(visible(line), soft_wrap=True)

    Server(service, cfg.host, cfg.port, cfg.connections, ready).run()


def key_of(cfg: ServeConfig) -> str | None:
    """The key. Raises ValueError for an empty one, and for an address that other machines reach without one."""
    if cfg.api_key_env is not None:
        key = os.environ.get(cfg.api_key_env, "").strip()
        if not key or not key.isascii() or not key.isprintable():
            raise ValueError(
                f"api_key_env={cfg.api_key_env!r}: this variable holds no key (printable ASCII): export it first"
            )
        return key
    if not is_own(cfg.host):
        raise ValueError(
            f"host={cfg.host!r} can be reached by other machines: put a key into an environment variable and name that with "
            "--api_key_env, or listen on 127.0.0.1"
        )
    return None


def refuse_taken(host: str, port: int) -> None:
    """ValueError for an address that cannot be listened on."""
    errors, free = list[OSError](), 0
    try:
        for family, kind, _, _, address in socket.getaddrinfo(host, port, type=socket.SOCK_STREAM):
            with socket.socket(family, kind) as probe:
                try:
                    probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                    probe.bind(address)
                    free += 1
                except OSError as error:
                    errors.append(error)
    except OSError as error:  # no such name
        errors.append(error)
    except ValueError:  # half a character, a part that is too long, a zero byte
        raise ValueError(f"host={host[:100]!r} cannot be an address: give one of this machine, or 127.0.0.1") from None
    if errors and (not free or errors[0].errno in (errno.EADDRINUSE, errno.EACCES)):
        raise ValueError(
            f"host={host!r}, port={port}: {errors[0].strerror}; choose another with --port (0 = a free one)"
        )


def is_own(host: str) -> bool:
    """Whether an address is this machine's alone."""
    try:
        return host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def own_names(host: str) -> tuple[str, ...]:
    """Names of this machine in Host headers, the address that is listened on among them."""
    return tuple({*OWN_NAMES, f"[{host}]" if ":" in host else host})


@dataclass(frozen=True)
class Served:
    """What answers: the model (a target or a denoiser), its engine for so many tokens (`Limits`), and what to call it."""

    model: Any
    engine: Callable[[Limits], Engine | Turns]
    how: str
    about: tuple[str, ...] = ()


def load_served(cfg: ServeConfig, named: Collection[str]) -> Served:
    """Target and drafter, or a denoiser, by the rules of `draftsmith generate`."""
    shared = {f.name for f in fields(GenerateConfig)} & {f.name for f in fields(ServeConfig)}
    common = GenerateConfig("", **{name: getattr(cfg, name) for name in shared})
    trained = cfg.model is not None and not is_free(cfg.model)
    stored = stored_denoiser(cfg.model, cfg.revision) if cfg.model and trained else None
    consistent = stored_consistency(cfg.model, cfg.revision) if cfg.model and trained and stored is None else None
    refuse_idle_settings(cfg.drafter, [cfg.model if consistent is None else Jacobi.method])
    refuse_idle_flags(common, stored is not None)
    if stored is None:
        return with_engine(assemble(common, consistent, named, []), cfg.max_rows, cfg.prefix_mb)
    denoiser, how = assemble_denoiser(common, stored, [])
    if how is None:
        drafter = SelfDraft(denoiser)
        drafter.bind(denoiser.target)
        return with_engine(Assembled(denoiser.target, drafter, decode_of(common), None), cfg.max_rows, cfg.prefix_mb)
    if cfg.prefix_mb not in (0, ServeConfig.prefix_mb):
        raise ValueError(
            f"prefix_mb = {cfg.prefix_mb}: a denoiser reads every prompt as a whole, with or without it; leave it out"
        )
    how = replace(how, max_rows=cfg.max_rows)
    return Served(denoiser, lambda _: Turns(denoiser, how), f"decided by {how.strategy.select}")


def with_engine(made: Assembled, max_rows: int, prefix_mb: int = 0) -> Served:
    """A target and its drafter, on the engine whose requests come and go; `prefix_mb`: megabytes for prefixes."""
    decode = replace(made.decode, max_rows=max_rows)
    how = "plain decoding" if made.drafter is None else f"drafted by {made.drafter.method}"

    def engine(limits: Limits) -> Engine:
        refuse_memory(made.target, max_rows, limits.total)
        prefixes = Prefixes(prefix_mb * 1_000_000) if prefix_mb else None
        return Engine(made.target, made.drafter, decode, limits.total, limits.prompt, prefixes)

    return Served(made.target, engine, how, made.about)


def refuse_memory(target: Any, rows: int, total: int) -> None:
    """ValueError where keys and values of so many rows are more than what is free; on CPUs they would be missed late."""
    facts = target.facts
    needed = rows * total * 2 * facts.layers * facts.kv_heads * facts.head_dim * target.dtype.itemsize
    free = free_memory(target.device)
    if free is not None and needed > free:
        raise ValueError(
            f"{rows} answers at a time, of {total} tokens with their prompts, need {needed / 1e9:.1f} GB for keys and "
            f"values, {free / 1e9:.1f} GB are free: lower max_rows, max_prompt or max_answer"
        )


def free_memory(device: torch.device) -> int | None:
    """Bytes that can still be taken where the model runs; None where that is not known."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    try:
        lines = Path("/proc/meminfo").read_text(encoding="ascii").splitlines()
    except OSError:
        return None
    return next((int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable:")), None)


def service_of(cfg: ServeConfig, served: Served, key: str | None) -> Service:
    """The service. Raises ValueError where the model cannot be served so."""
    facts = served.model.facts
    if served.model.tokenizer is None:
        raise ValueError(f"{facts.name!r} has no tokenizer: a server needs one")
    total = min(cfg.max_prompt + cfg.max_answer, facts.max_positions)
    limits = Limits(cfg.queue, min(cfg.max_prompt, total - 1), min(cfg.max_answer, total - 1), total, cfg.timeout)
    settings = Settings(
        model=name_of(cfg, facts.name),
        key=key,
        names=own_names(cfg.host) if key is None else (),
        body_bytes=cfg.body_kb * 1000,
        default_tokens=min(cfg.default_answer, limits.answer),
        drain_seconds=cfg.drain,
    )
    return Service(Worker(served.model, served.engine(limits), limits), settings)


def name_of(cfg: ServeConfig, target: str) -> str:
    """What requests call the model: never a path of this machine."""
    if cfg.name is not None:
        return cfg.name
    if cfg.model is None or is_free(cfg.model):
        return target
    return Path(cfg.model).resolve().name if Path(cfg.model).expanduser().exists() else cfg.model
