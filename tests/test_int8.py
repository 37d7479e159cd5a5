"""Weights in int8: how far they are off, that every path computes with the same ones, and what is refused.

pytest tests/test_int8.py
"""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from test_lean import CASES, close, ids_of, run_by, same, small
from test_speculate import Lookup
from torch import Tensor, nn

from draftsmith.inference.evaluate import run_evaluate
from draftsmith.inference.evaluate_config import EvaluateConfig
from draftsmith.inference.export import export
from draftsmith.inference.exporters.layout import RunFacts
from draftsmith.inference.generate import GenerateConfig, refuse_idle_flags, run_generate
from draftsmith.inference.load import load_drafter
from draftsmith.inference.speculate import DecodeConfig, generate
from draftsmith.inference.tuned import key_of
from draftsmith.losses.probs import SamplingParams
from draftsmith.models import METHODS, int8
from draftsmith.models.adapters import AdapterConfig, Adapters
from draftsmith.models.int8 import NARROW, NOTE, Int8Linear, int8_product, joined, rounded
from draftsmith.models.lean import rounded_product
from draftsmith.models.loading import load_target
from draftsmith.models.target import Target, live_states

FAMILIES = ("llama", "llama-head16", "mistral-window", "qwen2", "qwen3")  # tied heads, biases, windows, q/k-norms


def int8_target(name: str, **options: Any) -> Target:
    target = small(**CASES[name], **options)
    target.round_weights("int8")
    return target


def dense(weight_VD: Tensor) -> Tensor:
    """float64 [V, D] what the rounded weights stand for."""
    q_VD, scale_V = rounded(weight_VD)
    return q_VD.double() * scale_V.double()[:, None]


@pytest.mark.parametrize("dtype", int8.DTYPES)
def test_no_weight_is_off_by_more_than_half_a_step(dtype: torch.dtype) -> None:
    """The largest of a row is met within a step's rounding; scales are the same numbers in every dtype."""
    random = torch.Generator().manual_seed(0)
    weight_VD = torch.randn(70, 33, generator=random) * torch.logspace(-6, 3, 70)[:, None]
    weight_VD[5], weight_VD[6, 1:] = 0, 0
    weight_VD = weight_VD.to(dtype)
    q_VD, scale_V = rounded(weight_VD)
    assert q_VD.dtype == torch.int8 and scale_V.dtype == dtype and torch.equal(scale_V.bfloat16().to(dtype), scale_V)
    off_VD = (dense(weight_VD) - weight_VD.double()).abs()
    assert bool((off_VD <= (0.5 + 1e-4) * scale_V.double()[:, None]).all())  # quotients are rounded once, in fp32
    assert int(q_VD.abs().max()) <= 127 and int(q_VD[6, 0].abs()) >= 126 and not q_VD[5].any()


@pytest.mark.parametrize("d", [96, 33])
@pytest.mark.parametrize("dtype", int8.DTYPES)
def test_products_are_those_of_the_rounded_matrix(dtype: torch.dtype, d: int) -> None:
    """In every way that a product is taken, with and without bias, fused or not; a row's bits do not depend on others."""
    random = torch.Generator().manual_seed(1)
    tolerance = {torch.bfloat16: 1e-2, torch.float32: 1e-5, torch.float64: 1e-12}[dtype]
    made = [nn.Linear(d, v, bias=bias).to(dtype) for v, bias in ((65, True), (32, False), (7, True))]
    modules = [Int8Linear.of(module) for module in made]
    alone = [module.q.clone() for module in modules]
    product = rounded_product(modules)
    for module, q in zip(modules, alone, strict=True):
        assert torch.equal(module.q, q)
    assert modules[1].q.untyped_storage().data_ptr() == modules[0].q.untyped_storage().data_ptr()
    assert product(torch.empty(0, d, dtype=dtype)).shape == (0, 65 + 32 + 7)
    row_D = torch.randn(d, generator=random).to(dtype)
    for width in (1, NARROW, NARROW + 1, 9, 33):
        rows, first = torch.randn(width, d, generator=random).to(dtype), None
        want = torch.cat(
            [rows.double() @ dense(m.weight).T + (0 if m.bias is None else m.bias.detach().double()) for m in made],
            1,
        )
        with torch.no_grad():
            for way in (product, int8_product(*joined(modules)), lambda x: torch.cat([m(x) for m in modules], 1)):
                close(way(rows), want.to(dtype), tolerance)
        for place in range(width):
            rows = torch.randn(width, d, generator=random).to(dtype)
            rows[place] = row_D
            out = product(rows)[place]
            first = out if first is None else first
            assert torch.equal(out, first)


@pytest.mark.parametrize("name", FAMILIES)
def test_both_runners_and_transformers_compute_with_the_same_weights(name: str) -> None:
    """Those of a full model whose weights are what the rounded ones stand for; the embedding is not rounded."""
    target, exact = int8_target(name), small(**CASES[name])
    assert exact.runner == target.runner == "lean" and exact.facts == target.facts
    assert torch.equal(target.embed_weight, exact.embed_weight)
    untied = nn.Parameter(dense(exact.head_weight).float(), requires_grad=False)
    assert not torch.equal(untied, exact.head_weight)
    exact._head[0].weight = untied
    for layer in exact.layers:
        for module in (*layer.self_attn.children(), *layer.mlp.children()):
            if type(module) is nn.Linear:
                module.weight.data = dense(module.weight).float()
    ids_BT, positions_BT, some = ids_of(2, 9), torch.arange(9).expand(2, 9), torch.arange(5, 90)

    def passes(target: Target) -> list[Any]:
        cache, found = target.new_cache(2, 30), []
        for part in (slice(0, 7), slice(7, 8), slice(8, 9)):
            found.append(target.forward(ids_BT[:, part], positions_BT[:, part], cache=cache, taps=(1, 2)))
            cache.commit(torch.full((2,), found[-1].last_hidden_BTD.shape[1]))
        hidden_BTD = target.forward(ids_BT, positions_BT).last_hidden_BTD
        return [*found, target.head(hidden_BTD), target.head(hidden_BTD[:, :1]), target.head(hidden_BTD[:1], some)]

    same(target, lambda: passes(target))
    with torch.no_grad():
        ours, theirs = passes(target), passes(exact)
        for a, b in zip(ours[3:], theirs[3:], strict=True):
            close(a, b)
        close(ours[4], target.head(target.forward(ids_BT, positions_BT).last_hidden_BTD)[:, :1])
        logits_BTV = target.model(ids_BT).logits  # transformers' own forward
        close(logits_BTV, ours[3])
    assert float((target.head_weight - small(**CASES[name]).head_weight).abs().max()) <= float(
        target.head_rounding().max()
    ) * (1 + 1e-3)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", FAMILIES)
def test_speculation_is_exact_to_plain_decoding_on_the_same_weights(name: str, dtype: torch.dtype) -> None:
    """Bit for bit at one width, in the narrow product and in the wide one, one row and three."""
    target = int8_target(name, dtype=dtype)
    prompts = [(ids_of(n, seed=n).tolist() * 2)[: n + 6] for n in (11, 5, 8)]
    params = SamplingParams(max_new_tokens=12, ignore_eos=True)
    for rows, width in ((1, NARROW), (3, 5)):
        decode = DecodeConfig(k=width - 1, fixed_width=width, max_rows=rows, keep_logits=True)
        plain = generate(target, prompts, params, None, decode)
        for first in range(0, 3, rows):
            some = slice(first, first + rows)
            drafter = Lookup(prompts[some], [r.ids for r in plain[some]], target.facts.tokens, keep=[4, 1, 0, 3])
            for want, got in zip(plain[some], generate(target, prompts[some], params, drafter, decode), strict=True):
                assert got.ids == want.ids and torch.equal(got.logits, want.logits) and got.stats.tau > 1.2


def test_float64_is_exact_at_any_width_and_the_answers_are_other_ones() -> None:
    target, full = int8_target("qwen3", dtype=torch.float64), small(**CASES["qwen3"], dtype=torch.float64)
    prompts, params = [ids_of(9, seed=s).tolist() for s in range(6)], SamplingParams(max_new_tokens=24, ignore_eos=True)
    plain = generate(target, prompts, params)
    drafter = Lookup(prompts, [r.ids for r in plain], target.facts.tokens, keep=[3, 0, 2])
    drafted = generate(target, prompts, params, drafter, DecodeConfig(k=3))
    assert [r.ids for r in drafted] == [r.ids for r in plain] != [r.ids for r in generate(full, prompts, params)]


def test_hooks_and_moved_weights_are_read_anew() -> None:
    """A dual view hooks projections; weights may move to another dtype, with the same numbers."""
    target, ids_BT, positions_BT = int8_target("llama"), ids_of(1, 6), torch.arange(6)[None]

    def read() -> Tensor:
        with run_by(target, "lean"), torch.no_grad():
            return target.head(target.forward(ids_BT, positions_BT).last_hidden_BTD)

    before = read()
    handle = target.layers[0].self_attn.v_proj.register_forward_hook(lambda module, args, out: 2 * out)
    assert not torch.allclose(read(), before)
    same(target, lambda: [target.forward(ids_BT, positions_BT)])
    handle.remove()
    assert torch.equal(read(), before)
    target.to(torch.float64)
    close(read(), before.double(), 1e-5)


def test_what_is_not_decoding_is_refused() -> None:
    with pytest.raises(ValueError, match="weights = 'int4': use full or int8"):
        load_target("tiny", weights="int4")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"not torch.float16: choose another dtype"):
        load_target("tiny", dtype="float16", weights="int8")
    target = load_target("tiny", dtype="float32", weights="int8")
    assert (target.weights, target.precision) == ("int8", "float32, int8 weights")
    target.round_weights("int8")
    other = small(family="gemma3_text")
    with pytest.raises(ValueError, match=r"does not run lean \(type 'gemma3_text'.*use weights=full"):
        other.round_weights("int8")
    assert other.weights == "full" and type(other._head[0]) is nn.Linear
    adapted = small()
    Adapters(AdapterConfig(rank=2, mask="new"), adapted)
    with pytest.raises(ValueError, match="have adapters, or learn"):
        adapted.round_weights("int8")
    with pytest.raises(ValueError, match="has weights=int8, for decoding alone"):
        Adapters(AdapterConfig(rank=2, mask="new"), target)
    with pytest.raises(ValueError, match="asked of a target with weights=int8"):
        live_states(target, None, None)  # type: ignore[arg-type]
    embeds_BTD = target.embed(ids_of(1, 3)).clone().requires_grad_(True)
    for work in (lambda: target.forward(embeds_BTD, torch.arange(3)[None]), lambda: target.head(embeds_BTD)):
        with pytest.raises(ValueError, match="a gradient is wanted here"):
            work()
    with pytest.raises(ValueError, match="holds a denoiser; leave it out"):
        refuse_idle_flags(GenerateConfig("", model="x", weights="int8"), True)


def test_a_head_of_the_full_weights_runs_and_reports_say_so(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Also one whose export holds the target's own output head; figures cannot be taken for those of other weights."""
    full, target = load_target("tiny", dtype="float32"), load_target("tiny", dtype="float32", weights="int8")
    drafter = METHODS["medusa"](METHODS["medusa"].Config(head="shared"), full.facts, torch.arange(3, 250))
    drafter.init_from_target(full)
    folder = export(drafter, tmp_path / "export", run=RunFacts(train_length=512), target=full)
    load_drafter(str(folder), target)
    other = load_target("tiny", dtype="float32", weights="int8")
    with torch.no_grad():
        other._head[0].q[3] //= 2
    with pytest.raises(ValueError, match="is not the head of tiny"):
        load_drafter(str(folder), other)
    ours = {"sha256": "0"}
    assert key_of(full, ours) != key_of(target, ours) and key_of(target, ours)["dtype"] == "float32, int8 weights"
    options: dict[str, Any] = {"model": str(folder), "target": "tiny", "dtype": "float32", "weights": "int8"}
    run_generate(GenerateConfig("Hello there", max_new_tokens=6, **options))
    assert NOTE in capsys.readouterr().out.replace("\n", " ")
    cfg = EvaluateConfig(
        prompts=1,
        max_new_tokens=6,
        hf_prompts=1,
        card=False,
        bootstrap=10,
        out=str(tmp_path / "out"),
        k=(2,),
        **options,
    )
    assert run_evaluate(cfg) == 0
    report = json.loads((tmp_path / "out/report.json").read_text())
    assert report["run"]["dtype"] == "float32, int8 weights" and NOTE in report["flags"]
    assert {row["dtype"] for row in report["rows"]} == {"float32, int8 weights"}


def test_a_rounded_head_is_read_anew_and_never_multiplied_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """Written to behind autograd's back; moved to another dtype, where its numbers stay where they are; scaled in place."""
    target = int8_target("llama", dtype=torch.bfloat16)
    head, ids = target._head[0], torch.tensor([0, 3, 8])
    hidden_XD = torch.randn(NARROW + 2, target.facts.width)

    def check() -> None:
        x_XD = hidden_XD.to(target.dtype)
        for rows in (None, ids):
            weight = head.weight if rows is None else head.weight[rows]
            close(target.head(x_XD, rows).double(), nn.functional.linear(x_XD.double(), weight.double()), 0.02)

    with torch.no_grad():
        check()
        head.q.data.neg_()
        with monkeypatch.context() as patch:
            patch.setattr(Int8Linear, "weight", property(lambda _: pytest.fail("all of it was made")))
            target.new_cache(1, 8)
        check()
        target.to(torch.float32)
        check()
        head.scale.mul_(2)
        check()
    assert not target.__getstate__()["_rounded_heads"]  # closures, which nothing can store
