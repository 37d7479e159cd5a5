"""Steps that ask the device for nothing: the same answers as the engine's own steps, under a guard against asking."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from no_sync import Asked, no_sync
from torch import Tensor

from draftsmith.inference.ahead import EAGER, Ahead
from draftsmith.inference.commit import Request
from draftsmith.inference.device_step import DeviceStep, Held
from draftsmith.inference.engine import Engine
from draftsmith.inference.speculate import DecodeConfig, generate
from draftsmith.losses.probs import ParamRows, SamplingParams, allowed, probs
from draftsmith.models import METHODS
from draftsmith.models.pretrained import tiny_target

PROMPTS = [[5, 6, 7] * 3, [9], [30, 31, 32, 33, 30, 31], list(range(40, 64)), [5, 6]]
GREEDY = [SamplingParams(max_new_tokens=n) for n in (14, 9, 1, 17, 12)]
MIXED = [
    SamplingParams(max_new_tokens=14),
    SamplingParams(max_new_tokens=9, temperature=0.8, seed=3),
    SamplingParams(max_new_tokens=1, temperature=1.0, seed=9),
    SamplingParams(max_new_tokens=17, temperature=1.0, seed=4, top_p=0.9, top_k=40, repetition_penalty=1.2),
    SamplingParams(max_new_tokens=12, frequency_penalty=0.5, min_new_tokens=3, temperature=0.7, seed=5, min_p=0.01),
]
STOPS = [replace(p, stop_strings=("e", "ab"), stop_ids=(7, 100, 200)) for p in MIXED]
NAMES = ["plain", "medusa", "hydra", "hydra-prefix", "eagle", "eagle-half", "eagle3", "eagle3-half", "peagle"]
SAME = ("rule", "verifies", "drafted", "from_draft", "tried", "accepted", "ranks", "committed", "accepted_hist")


@pytest.fixture(scope="module")
def real(tiny: Any) -> Any:
    return tiny(dtype=torch.float64)


def make(name: str, real: Any) -> Any:
    if name == "plain":
        return None
    torch.manual_seed(0)
    method, *rest = name.split("-")
    options: dict[str, Any] = {"prefix": True} if rest == ["prefix"] else {}
    ids = torch.arange(0, real.facts.tokens, 2) if rest == ["half"] else None
    drafter = METHODS[method](METHODS[method].Config(**options), real.facts, ids)
    drafter.init_from_target(real)
    return drafter.to(real.dtype).eval()


@pytest.fixture
def guarded(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[int]]:
    """Every step of the device runs under the guard, and leaves its memory where it was; rows per step."""
    step, ran, places = DeviceStep.__call__, list[int](), dict[int, tuple[Held, list[int]]]()

    def watched(self: DeviceStep, held: Held) -> None:
        ran.append(len(held.live_B))
        with no_sync():
            step(self, held)
        parts = (held, held.params, held.ledger, held.own)
        here = [
            x.data_ptr() for part in parts if part is not None for x in vars(part).values() if isinstance(x, Tensor)
        ]
        assert places.setdefault(id(held), (held, here))[1] == here

    monkeypatch.setattr(DeviceStep, "__call__", watched)
    yield ran


def both(real: Any, name: str, params: list[SamplingParams], decode: DecodeConfig) -> None:
    """Answers by the device's steps are those of the host's, with the same counts."""
    host, device = (
        generate(real, PROMPTS, params, make(name, real), replace(decode, step=step)) for step in ("host", "device")
    )
    for want, got in zip(host, device, strict=True):
        assert (got.ids, got.text, got.stop_reason) == (want.ids, want.text, want.stop_reason)
        assert got.from_draft == want.from_draft and got.stats.step == "device" and want.stats.step == "host"
        for count in SAME:
            assert getattr(got.stats, count) == getattr(want.stats, count), count


@pytest.mark.parametrize("rows", [1, 4])
@pytest.mark.parametrize("name", [*NAMES, "draft_model", "pard"])
def test_answers_are_those_of_the_hosts_steps(name: str, rows: int, real: Any, guarded: list[int]) -> None:
    for params in (GREEDY, STOPS) if rows == 4 else (MIXED,):
        both(real, name, params, DecodeConfig(max_rows=rows, k=3))
    assert len(guarded) > 10 and max(guarded) == rows


def test_every_method_that_says_so_is_tested(real: Any) -> None:
    able = {name for name in METHODS if getattr(METHODS[name], "on_device", False)}
    assert able == {name.split("-")[0] for name in [*NAMES, "draft_model", "pard"]} - {"plain"}


@pytest.mark.parametrize("verifier", ["sample_match", "target_only"])
def test_rules(verifier: str, real: Any, guarded: list[int]) -> None:
    heat = 0.0 if verifier == "target_only" else None
    both(real, "eagle3", MIXED, DecodeConfig(max_rows=4, k=3, verifier=verifier, draft_temperature=heat))


@pytest.mark.parametrize("name", ["eagle3", "medusa", "hydra"])
def test_static_trees(name: str, real: Any, guarded: list[int]) -> None:
    decode = DecodeConfig(max_rows=4, k=3, tree="static", nodes=7, width=3)
    both(real, name, GREEDY, decode)
    both(real, name, MIXED, replace(decode, draft_temperature=0.0))


@pytest.mark.parametrize("name", ["plain", "eagle3", "hydra-prefix"])
def test_requests_come_and_go(name: str, real: Any, guarded: list[int]) -> None:
    decode = DecodeConfig(max_rows=3, k=3, step="device")
    alone = [
        generate(real, [prompt], params, make(name, real), replace(decode, step="host"))[0].ids
        for prompt, params in zip(PROMPTS, MIXED, strict=True)
    ]
    engine = Engine(real, make(name, real), decode, longest=48, prompt=24)
    for _ in range(2):  # again over memory that was used before
        requests = [
            Request(i, PROMPTS[i], MIXED[i], real.facts.eos_ids, real.tokenizer, live=True) for i in range(len(PROMPTS))
        ]
        ids: dict[int, list[int]] = {}
        step = 0
        while engine.busy or step < 4:
            for request in requests[step : step + 2] if step in (0, 2) else requests[4:] if step == 3 else []:
                engine.add(request)
            for event in engine.step():
                ids.setdefault(event.row, []).extend(event.ids)
            step += 1
        assert [ids[i] for i in range(len(PROMPTS))] == alone
    assert {1, 2, 3} >= set(guarded) and 3 in guarded


def test_a_graph_is_captured_once_and_replayed(real: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is captured here is the step itself, so that the count and the kind of captures can be seen."""
    captured: list[Held] = []

    def capture(self: Ahead, held: Held) -> Any:
        captured.append(held)
        return type("Graph", (), {"replay": lambda graph: self.step(held)})()

    monkeypatch.setattr(Ahead, "_capture", capture)
    monkeypatch.setattr(Ahead, "_alongside", lambda self, held: self.step(held))
    monkeypatch.setattr(Ahead, "captures", staticmethod(lambda target, decode: True))
    decode = DecodeConfig(max_rows=4, k=3)
    host = generate(real, PROMPTS[:4], GREEDY[:4], make("eagle3", real), replace(decode, step="host"))
    graph = generate(real, PROMPTS[:4], GREEDY[:4], make("eagle3", real), replace(decode, step="device"))
    assert [r.ids for r in graph] == [r.ids for r in host]
    assert len(captured) == 1 and {r.stats.step for r in graph if r.stats.verifies} == {"graph"}


class Doubling(torch.nn.Module):
    """A linear module inside an adapter, as peft's are."""

    def __init__(self, base: torch.nn.Module) -> None:
        super().__init__()
        self.base_layer, self._disable_adapters = base, True

    def forward(self, x: Tensor) -> Tensor:
        return self.base_layer(x) * (1 if self._disable_adapters else 2)


def test_stale_graphs_are_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever a captured step would go on reading, or not hear, after it changed."""
    target = tiny_target(dtype=torch.float64)
    drafter, ran = make("eagle3", target), list[str]()
    attention, mlp = target.layers[0].self_attn, target.layers[1].mlp
    attention.v_proj = Doubling(attention.v_proj)

    def alongside(self: Ahead, held: Held) -> None:
        ran.append("step")
        self.step(held)

    def capture(self: Ahead, held: Held) -> Any:
        ran.append("capture")
        return SimpleNamespace(replay=lambda: (ran.append("replay"), self.step(held)))

    monkeypatch.setattr(Ahead, "_capture", capture)
    monkeypatch.setattr(Ahead, "_alongside", alongside)
    monkeypatch.setattr(Ahead, "captures", staticmethod(lambda target, decode: True))
    engine = Engine(target, drafter, DecodeConfig(max_rows=1, k=1, step="device"), longest=200, prompt=8)
    params = SamplingParams(max_new_tokens=190, ignore_eos=True)
    engine.add(Request(0, [5, 6, 7], params, target.facts.eos_ids, target.tokenizer, live=True))

    def until_replayed() -> None:
        for _ in range(10):
            engine.step()
            if ran and ran[-1] == "replay":
                return
        raise AssertionError(ran)

    def add(weight: Tensor) -> None:
        with torch.no_grad():
            weight += 1e-3

    changes: dict[str, Callable[[], Any]] = {
        "a weight of the target written to": lambda: add(attention.q_proj.weight),
        "a norm replaced": lambda: setattr(target.norm, "weight", torch.nn.Parameter(2 * target.norm.weight.data)),
        "a module replaced": lambda: setattr(mlp, "up_proj", copy.deepcopy(mlp.up_proj)),
        "an adapter turned on": lambda: setattr(attention.v_proj, "_disable_adapters", False),
        "a weight of the drafter moved": lambda: setattr(
            drafter.lm_head.weight, "data", drafter.lm_head.weight.data.clone()
        ),
    }
    until_replayed()
    for name, change in changes.items():
        change()
        del ran[:]
        until_replayed()
        fused = ran[: len(ran) - EAGER - 2]  # a step that fused the weights anew, and so moved them
        assert ran[len(fused) :] == ["step"] * EAGER + ["capture", "replay"] and fused in ([], ["step"]), name
    handle = attention.q_proj.register_forward_hook(lambda module, args, out: ran.append("heard"))
    del ran[:]
    engine.step()
    assert ran == ["heard"]
    handle.remove()
    engine.step()
    assert ran == ["heard", "replay"]


def test_falling_back_is_said(real: Any) -> None:
    for decode, name, words in (
        (DecodeConfig(step="device", fixed_width=6), "eagle3", "fixed_width"),
        (DecodeConfig(step="device", tree="dynamic"), "eagle3", "tree=dynamic"),
        (DecodeConfig(step="device", verifier="block"), "eagle3", "verifier=block"),
        (DecodeConfig(step="device", keep_logits=True), "plain", "logits are kept"),
        (DecodeConfig(step="device"), "falcon", "falcon drafts with the host's help"),
        (DecodeConfig(step="graph"), "plain", "need a GPU"),
    ):
        with pytest.raises(ValueError, match=words):
            generate(real, PROMPTS[:1], GREEDY[:1], make(name, real), decode)
    with pytest.raises(ValueError, match="step='fast': use auto"):
        DecodeConfig(step="fast")  # type: ignore[arg-type]
    asked = replace(GREEDY[0], logprobs=True)
    (result,) = generate(real, PROMPTS[:1], asked, make("eagle3", real), DecodeConfig(step="device"))
    assert result.stats.step == "host (log-probabilities are wanted)" and result.logprobs
    drawn = DecodeConfig(step="device", tree="static", nodes=5, width=2)
    (result,) = generate(real, PROMPTS[:1], MIXED[1], make("eagle3", real), drawn)
    assert result.stats.step == "host (drawn trees are verified on the host)"


def test_a_broken_drafter_is_named_a_step_late(real: Any, guarded: list[int]) -> None:
    drafter = make("eagle3", real)
    with torch.no_grad():
        drafter.lm_head.weight.fill_(torch.nan)
    with pytest.raises(ValueError, match="logits hold NaN"):
        generate(real, PROMPTS[:1], GREEDY[:1], drafter, DecodeConfig(step="device"))
    assert len(guarded) == 2


ASKS: list[Callable[[Tensor], Any]] = [
    lambda x: x.item(),
    lambda x: x.tolist(),
    bool,
    int,
    float,
    lambda x: [0, 1, 2][x.long()],
    lambda x: x[None][x[None] > 0],
    lambda x: x[None].nonzero(),
    lambda x: torch.zeros(1).index_put_((x[None] > 0,), x),
    lambda x: torch.equal(x, x),
    lambda x: torch.tensor([1, 2]),
    lambda x: x[None].repeat_interleave(x[None].long()),
    lambda x: torch.where(x[None] > 0),
]


def test_the_guard_catches_what_waits() -> None:
    x = torch.tensor(1.0)
    for ask in ASKS:
        with no_sync(), pytest.raises(Asked):
            ask(x)
    with no_sync():
        y = torch.where(x > 0, x, 2.0)[None].scatter(0, torch.zeros(1, dtype=torch.int64), 3.0)
        assert y[torch.zeros(1, dtype=torch.int64)].shape == (1,)
    assert bool(x)  # outside again


@pytest.mark.parametrize("params", [MIXED[1], MIXED[3], MIXED[4], SamplingParams(temperature=1.3, top_k=3, top_p=0.8)])
def test_what_may_be_drawn_is_in_the_logits(params: SamplingParams) -> None:
    x_RV = (2 * torch.randn(7, 600, dtype=torch.float64)).round()  # with equals at the edges
    rows = ParamRows.pack([params] * 7)
    p_RV = (allowed(x_RV, replace(rows, exhaustive=True)) / params.temperature).softmax(-1)
    torch.testing.assert_close(p_RV, probs(x_RV, rows), atol=1e-14, rtol=0)
