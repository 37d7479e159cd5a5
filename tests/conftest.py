"""Fixtures that all tests share: offline, one thread, and small targets with random weights.

`tiny(...)` takes the arguments of `draftsmith.models.pretrained.tiny_target` and keeps what it made, so that a target
is built once per run; targets are frozen, so sharing is safe (a test that alters weights calls `tiny_target` itself).
"""

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

import base64
import hashlib
import http.server
import json
import sys
import threading
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from draftsmith.losses.distill import Logits, formed
from draftsmith.models.drafter import Level, TargetFacts
from draftsmith.models.pretrained import tiny_target, tiny_tokenizer
from draftsmith.models.supervision import Scorer
from draftsmith.models.target import States, Target

torch.set_num_threads(1)

_made: dict[str, Target] = {}


@pytest.fixture(scope="session")
def tiny() -> Callable[..., Target]:
    """Factory of tiny targets: `tiny(family="qwen3", window=5, dtype=torch.float64)`."""

    def make(**options: Any) -> Target:
        key = json.dumps(options, sort_keys=True, default=str)
        if key not in _made:
            _made[key] = tiny_target(**options)
        return _made[key]

    return make


@pytest.fixture
def target(tiny: Callable[..., Target]) -> Target:
    """The plain tiny target; modules that need another one have a fixture of this name themselves."""
    return tiny()


@pytest.fixture(scope="session")
def tokenizer() -> Any:
    """The byte-level tokenizer of the tiny target: 256 ids, ChatML template, pad = eos."""
    return tiny_tokenizer()


class FakeHub:
    """A Hugging Face Hub on the loopback interface: create, upload (plain and LFS), and download one repository each.

    `files[repo][path]` = bytes as committed; `requests` = (method, path, headers, body) of every call. `environment`
    for a subprocess, because huggingface_hub reads its settings when it is imported.
    """

    commit = "0123456789abcdef0123456789abcdef01234567"

    def __init__(self) -> None:
        self.files: dict[str, dict[str, bytes]] = {}
        self.objects: dict[str, bytes] = {}
        self.requests: list[tuple[str, str, dict[str, str], bytes]] = []
        self.refuse: dict[str, int] = {}  # repository -> status that creating it is answered with
        hub = self

        class Handler(http.server.BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def log_message(self, *_: Any) -> None:
                """Quiet."""

            def answer(self, body: bytes = b"", status: int = 200, headers: dict[str, str] | None = None) -> None:
                self.send_response(status)
                for name, value in ({"Content-Length": str(len(body))} | (headers or {})).items():
                    self.send_header(name, value)
                self.end_headers()
                if self.command != "HEAD":
                    self.wfile.write(body)

            def handle_all(self) -> None:
                length = int(self.headers.get("Content-Length") or 0)
                chunked = self.headers.get("Transfer-Encoding") == "chunked"
                body = hub.read_chunks(self.rfile) if chunked else self.rfile.read(length)
                hub.requests.append((self.command, self.path, dict(self.headers), body))
                self.answer(*(hub.reply(self.command, self.path.split("?")[0], body)))

            do_GET = do_HEAD = do_POST = do_PUT = handle_all

        self.server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server.server_address[1]}"
        threading.Thread(target=self.server.serve_forever, daemon=True).start()

    @property
    def environment(self) -> dict[str, str]:
        return os.environ | {
            "HF_ENDPOINT": self.url, "HF_HUB_OFFLINE": "0", "HF_HUB_DISABLE_XET": "1", "HF_HUB_DISABLE_TELEMETRY": "1"
        }  # fmt: skip

    @staticmethod
    def read_chunks(file: Any) -> bytes:
        body = b""
        while size := int(file.readline().strip() or b"0", 16):
            body += file.read(size)
            file.readline()
        file.readline()
        return body

    def reply(self, method: str, path: str, body: bytes) -> tuple[bytes, int, dict[str, str]]:
        """Body, status and headers of the answer to one call."""

        def made(value: Any, kind: str = "application/json") -> tuple[bytes, int, dict[str, str]]:
            return json.dumps(value).encode(), 200, {"Content-Type": kind}

        parts = path.strip("/").split("/")
        if path == "/api/repos/create":
            wanted = json.loads(body)
            name = f"{wanted.get('organization') or 'jane'}/{wanted['name'].split('/')[-1]}"
            if name in self.refuse:
                return b"", self.refuse[name], {}
            self.files.setdefault(name, {})
            return made({"url": f"{self.url}/{name}", "name": name})
        if path == "/api/validate-yaml":
            return made({"errors": [], "warnings": []})
        if path.endswith("/info/lfs/objects/batch"):
            actions = [
                {"oid": o["oid"], "size": o["size"], "authenticated": True,
                 "actions": {"upload": {"href": f"{self.url}/objects/{o['oid']}", "header": {}}}}
                for o in json.loads(body)["objects"]
            ]  # fmt: skip
            return made({"transfer": "basic", "objects": actions}, "application/vnd.git-lfs+json")
        if parts[0] == "objects":
            self.objects[parts[1]] = body
            return b"", 200, {}
        if parts[:2] == ["api", "models"] and "preupload" in parts:
            files = [{"path": f["path"], "shouldIgnore": False} for f in json.loads(body)["files"]]
            for f in files:
                f["uploadMode"] = "lfs" if f["path"].endswith(".safetensors") else "regular"
            return made({"files": files})
        if parts[:2] == ["api", "models"] and "commit" in parts:
            repo = "/".join(parts[2:4])
            for line in filter(None, body.decode().split("\n")):
                entry = json.loads(line)
                value = entry["value"]
                if entry["key"] == "file":
                    self.files[repo][value["path"]] = base64.b64decode(value["content"])
                if entry["key"] == "lfsFile":
                    self.files[repo][value["path"]] = self.objects[value["oid"]]
            return made(
                {"success": True, "commitOid": self.commit, "commitUrl": f"{self.url}/{repo}/commit/{self.commit}"}
            )
        repo = "/".join(parts[2:4])
        if parts[:2] == ["api", "models"] and repo in self.files:
            if "tree" in parts:
                return made(
                    [{"type": "file", "path": p, "size": len(b), "oid": "0" * 40} for p, b in self.files[repo].items()]
                )
            return made({"id": repo, "sha": self.commit, "private": False, "tags": [], "downloads": 0, "likes": 0,
                         "siblings": [{"rfilename": p} for p in self.files[repo]]})  # fmt: skip
        repo, name = "/".join(parts[:2]), "/".join(parts[4:])
        if parts[2:3] == ["resolve"] and name in self.files.get(repo, {}):
            raw = self.files[repo][name]
            return raw, 200, {"ETag": f'"{hashlib.sha256(raw).hexdigest()}"', "X-Repo-Commit": self.commit}
        return b"", 404, {"X-Error-Code": "RepoNotFound"}


@pytest.fixture
def fake_hub() -> Iterator[FakeHub]:
    """A Hub that runs for one test."""
    hub = FakeHub()
    yield hub
    hub.server.shutdown()
    hub.server.server_close()


@pytest.fixture
def logits_of_training(monkeypatch: pytest.MonkeyPatch) -> Callable[..., list[dict[int, torch.Tensor]]]:
    """`run(drafter, batch, out)`: per depth, state row (flat) -> the logits that the loss was computed from, whether the
    method scores depth by depth (`supervision.Scorer`) or slots (`slots.score`)."""

    def run(drafter: Any, batch: Any, out: Any) -> list[dict[int, torch.Tensor]]:
        seen: dict[int, dict[int, torch.Tensor]] = {}
        add, repeat, module = Scorer.add, Scorer.repeat, sys.modules[type(drafter).__module__]
        score = getattr(module, "score", None)

        def of_depth(self: Scorer, depth: int, logits_RW: Logits, feature_RD: Any = None) -> None:
            flat_R = self.rows.flat_R[self.rows.pairs[depth - 1]]
            seen[depth] = {int(f): row for f, row in zip(flat_R, formed(logits_RW).detach(), strict=True)}
            add(self, depth, logits_RW, feature_RD)

        def again(self: Scorer, depth: int) -> None:
            flat_R = self.rows.flat_R[self.rows.pairs[depth - 1]]
            seen[depth] = {int(f): seen[1][int(f) + depth - 1] for f in flat_R}
            repeat(self, depth)

        def of_slots(logits_RW: Logits, slots: Any, batch: Any, *rest: Any, **options: Any) -> Any:
            row_R = slots.flat_R // slots.label_BQ.shape[1]
            label_R, drafted_R = (x.flatten()[slots.flat_R] for x in (slots.label_BQ, slots.drafted_BQ))
            state_R = row_R * batch.ids_BT.shape[1] + label_R - drafted_R - 1
            for depth, state, row in zip(drafted_R.tolist(), state_R.tolist(), formed(logits_RW), strict=True):
                seen.setdefault(depth, {})[state] = row.detach()
            assert score is not None
            return score(logits_RW, slots, batch, *rest, **options)

        with monkeypatch.context() as patch:
            patch.setattr(Scorer, "add", of_depth)
            patch.setattr(Scorer, "repeat", again)
            if score is not None:
                patch.setattr(module, "score", of_slots)
            drafter.loss(batch, out, 0.0)
        return [seen[depth] for depth in sorted(seen)]

    return run


# Scripted models: next-token logits by rule, for tests that need to know every distribution exactly.


class ScriptedCache:
    """Token ids where a real cache has keys and values."""

    def __init__(self, rows: int, slots: int) -> None:
        self.ids_BS = torch.zeros(rows, slots, dtype=torch.int64)
        self.positions_BS = torch.zeros(rows, slots, dtype=torch.int64)
        self.lengths_B = torch.zeros(rows, dtype=torch.int64)

    def commit(self, counts_B: torch.Tensor) -> None:
        self.lengths_B += counts_B

    def compact(self, path_BL: torch.Tensor, counts_B: torch.Tensor, *, read: bool = False) -> None:
        kept_BL = self.ids_BS.gather(1, self.lengths_B[:, None] + path_BL)
        self.ids_BS.scatter_(1, self.lengths_B[:, None] + torch.arange(path_BL.shape[1]), kept_BL)
        self.lengths_B += counts_B


class ScriptedTarget:
    """A target whose logits after a token are `rule(previous_BT, token_BT, position_BT) -> [B, T, V]`: they depend on
    the last two tokens and the last one's position (previous = -1 at the start). Hidden states are the logits."""

    def __init__(
        self,
        rule: Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor],
        vocab: int,
        eos_ids: tuple[int, ...] = (),
        tokens: int | None = None,
        tokenizer: Any = None,
        dtype: torch.dtype = torch.float64,
    ) -> None:
        rope = {"rope_type": "default", "rope_theta": 1e4}
        self.facts = TargetFacts(
            "scripted", None, "0", "llama", vocab, tokens or vocab, vocab, 1, 1, 1, vocab, vocab, 1e-6, "silu", rope,
            1 << 20, False, eos_ids, None,
        )  # fmt: skip
        self.rule, self.tokenizer, self.dtype, self.device = rule, tokenizer, dtype, torch.device("cpu")
        self.passes: list[tuple[int, ...]] = []

    def new_cache(self, rows: int, slots: int, *, read_all: bool = False) -> ScriptedCache:
        return ScriptedCache(rows, slots)

    def forward(
        self,
        inputs: torch.Tensor,
        positions_BT: torch.Tensor,
        *,
        cache: ScriptedCache,
        see_BTA: torch.Tensor | None = None,
        taps: tuple[int, ...] = (),
    ) -> States:
        b, t = inputs.shape
        self.passes.append((b, t))
        see_BTA = torch.ones(b, t, t, dtype=torch.bool).tril() if see_BTA is None else see_BTA
        tail_BA = cache.lengths_B[:, None] + torch.arange(see_BTA.shape[2])
        cache.ids_BS.scatter_(1, tail_BA[:, -t:], inputs)
        cache.positions_BS.scatter_(1, tail_BA[:, -t:], positions_BT)
        committed_B = cache.ids_BS.gather(1, (cache.lengths_B - 1).clamp(min=0)[:, None])[:, 0]
        committed_B = torch.where(cache.lengths_B > 0, committed_B, -1)
        at_BA = cache.positions_BS.gather(1, tail_BA)
        before_BTA = see_BTA & (at_BA[:, None, :] == positions_BT[:, :, None] - 1)
        inside_BT = before_BTA.any(-1)
        previous_BT = cache.ids_BS.gather(1, tail_BA).gather(1, before_BTA.int().argmax(-1))
        previous_BT = torch.where(inside_BT, previous_BT, committed_B[:, None])
        unused_BT = see_BTA.sum(-1) <= 2  # itself, and the anchor
        at_anchor_BT = positions_BT == cache.lengths_B[:, None]
        assert bool((inside_BT | at_anchor_BT | unused_BT).all()), "a row lost its parent"
        return States(self.rule(previous_BT, inputs, positions_BT).to(self.dtype), None)

    def head(self, hidden: torch.Tensor, ids: torch.Tensor | None = None) -> torch.Tensor:
        return hidden if ids is None else hidden[..., ids]


class ScriptedDrafter:
    """Logits in draft ids after a token: `rule(previous_BN, token_BN, depth) -> [B, N, W]` (depth 1 = after the anchor).
    `parallel` > 1: rows for all depths from the anchor alone. `silent`: rows that have nothing to say."""

    method = "scripted"
    draft_needs = loss_needs = frozenset({"ids"})
    taps: tuple[int, ...] = ()

    def __init__(
        self,
        rule: Callable[[torch.Tensor, torch.Tensor, int], torch.Tensor],
        d2t_W: torch.Tensor | None = None,
        parallel: int = 1,
        max_depth: int | None = None,
        silent: tuple[int, ...] = (),
    ) -> None:
        self.rule, self.d2t_W, self.parallel, self.max_depth = rule, d2t_W, parallel, max_depth
        self.silent = silent
        self.extended: list[tuple[int, ...]] = []

    def init(self, prefill: Any) -> Any:
        return None

    def start(self, state: Any, commit: Any) -> tuple[Any, Level]:
        last_B = commit.ids_BT.gather(1, (commit.counts_B - 1).clamp(min=0)[:, None])
        state = (last_B, commit.anchor_B[:, None])  # per node (0 = anchor): its predecessor, itself
        rows = [self.rule(*state, depth + 1) for depth in range(self.parallel)]
        return state, self._level(torch.cat(rows, 1))

    def extend(self, state: Any, tokens_BN: torch.Tensor, parents_BN: torch.Tensor) -> tuple[Any, Level]:
        self.extended.append(tuple(tokens_BN.shape))
        previous_BN = state[1].gather(1, parents_BN)
        state = (torch.cat([state[0], previous_BN], 1), torch.cat([state[1], tokens_BN], 1))
        return state, self._level(self.rule(previous_BN, tokens_BN, 2))

    def _level(self, logits_BNW: torch.Tensor) -> Level:
        valid_BN = torch.ones(logits_BNW.shape[:2], dtype=torch.bool)
        for row in self.silent:
            valid_BN[row] = False
        return Level(logits_BNW, valid_BN)

    def reset(self, state: Any, rows: torch.Tensor) -> Any:
        return state


@pytest.fixture(scope="session")
def scripted() -> Any:
    """The two classes above: `scripted.Target(rule, vocab)`, `scripted.Drafter(rule)`."""
    return SimpleNamespace(Target=ScriptedTarget, Drafter=ScriptedDrafter)
