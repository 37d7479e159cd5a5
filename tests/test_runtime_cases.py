"""What users of other runtimes ran into, ruled out on the path that decodes and serves: lean runner, engine, steps on the
device (CASES B30, B31, B43, B44, B47, B49; PROMISES 4, 14, 27). Of B49 beside: tests/test_lean.py, tests/test_target.py; of
PROMISES 22: tests/test_serve.py."""

import gc
import math
import os
from collections.abc import Sequence
from dataclasses import replace
from multiprocessing.reduction import ForkingPickler
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from draftsmith.inference import serve
from draftsmith.inference.commit import Request
from draftsmith.inference.engine import Engine
from draftsmith.inference.generate import Assembled
from draftsmith.inference.load import free_drafter
from draftsmith.inference.prefixes import Prefixes
from draftsmith.inference.speculate import DecodeConfig, chain_width, generate
from draftsmith.inference.worker import Limits
from draftsmith.kernels.linear_loss import TERMS, FromHidden, linear_loss, reference
from draftsmith.losses.probs import SamplingParams
from draftsmith.models import METHODS
from draftsmith.models.pretrained import tiny_target
from draftsmith.models.target import Target

MODES = {
    "plain": (None, DecodeConfig()),
    "plain on the device": (None, DecodeConfig(step="device")),
    "eagle3": ("eagle3", DecodeConfig(k=3)),
    "eagle3 on the device": ("eagle3", DecodeConfig(k=3, step="device")),
    "recycling": ("recycling", DecodeConfig(k=4)),
}
PROMPT = [5, 6, 7, 5, 6]


@pytest.fixture(scope="module")
def real() -> Target:
    target = tiny_target(width=32, layers=2, dtype=torch.float64)
    assert target.runner == "lean"
    return target


def drafter_of(name: str | None, target: Target) -> Any:
    if name != "eagle3":
        return None if name is None else free_drafter(name, target)
    torch.manual_seed(0)
    head = METHODS[name](METHODS[name].Config(), target.facts)
    head.init_from_target(target)
    return head.to(target.dtype).eval()


def served(
    mode: str,
    target: Target,
    prompts: Sequence[list[int]],
    params: Sequence[SamplingParams],
    eos_ids: Sequence[int] = (),
    rows: int = 4,
    k: int | None = None,
) -> list[list[int]]:
    """Ids by an open engine."""
    name, decode = MODES[mode]
    decode = replace(decode, max_rows=rows, k=k or decode.k)
    engine = Engine(target, drafter_of(name, target), decode, longest=160, prompt=32)
    requests = [
        Request(i, prompt, p, eos_ids, None, live=False)
        for i, (prompt, p) in enumerate(zip(prompts, params, strict=True))
    ]
    for request in requests:
        engine.add(request)
    while engine.busy:
        engine.step()
    return [r.ids for r in requests]


def test_b30_no_logits_of_a_whole_prompt() -> None:
    """The largest tensor of prefill and decoding grows with the prompt, or with the vocabulary, never with both."""
    target, vocab = tiny_target(width=32, layers=2, vocab=1200), 1200
    largest = []
    for length in (96, 192):
        sizes: list[int] = []

        class Watch(TorchDispatchMode):
            def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
                out = func(*args, **(kwargs or {}))
                outs = out if isinstance(out, tuple | list) else [out]
                owned = (x for x in outs if isinstance(x, Tensor) and x._base is None and x is not args[0])
                sizes.extend(x.numel() for x in owned)  # noqa: B023
                return out

        drafter = drafter_of("eagle3", target)
        params = SamplingParams(max_new_tokens=4, ignore_eos=True)
        generate(target, [[5, 6]], params, drafter)  # weights are fused once
        with Watch():
            generate(target, [(PROMPT * length)[:length]], params, drafter, DecodeConfig(k=2))
        largest.append(max(sizes))
    assert largest[0] < 96 * vocab / 2 and largest[1] < 2.2 * largest[0]


@pytest.mark.parametrize("rope", [None, "linear", "yarn", "llama3"])
def test_b49_drafters_rotate_as_the_lean_runner_does(rope: str | None) -> None:
    """Base 5e6, every scaling: angles of the target's own module, which lean passes use, and of a drafter's table."""
    extra: dict[str | None, dict[str, Any]] = {
        None: {"rope_type": "default"},
        "linear": {"rope_type": "linear", "factor": 2.0},
        "yarn": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 512},
        "llama3": {
            "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
            "original_max_position_embeddings": 64,
        },
    }  # fmt: skip
    target = tiny_target(width=32, layers=2, rope=extra[rope] | {"rope_theta": 5e6})
    positions_BT = torch.tensor([[0, 1, 17, 400]])
    wanted = target.model.model.rotary_emb(target.embed(positions_BT % 200), positions_BT)
    for ours, theirs in zip(drafter_of("eagle3", target).rotary(positions_BT), wanted, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("term", TERMS)
def test_promise_4_fused_losses(term: str) -> None:
    """Against the definitions in float64, of the same numbers; gradients by finite differences."""
    torch.manual_seed(0)
    made = [torch.randn(*shape) * 0.5 for shape in ((11, 6), (23, 6), (11, 6), (23, 6))]
    label_T = torch.randint(0, 23, (11,))
    for dtype, tolerance in ((torch.float32, 1e-6), (torch.bfloat16, 2e-2)):
        hidden_TD, weight_WD, *teacher = (x.to(dtype) for x in made)
        terms = ((1.0, term),)
        got_T = linear_loss(hidden_TD, weight_WD, terms, teacher=FromHidden(*teacher), label_T=label_T).value_T
        wide = FromHidden(*(x.double() for x in teacher))
        want_T = reference(hidden_TD.double(), weight_WD.double(), terms, teacher=wide, label_T=label_T)
        assert float((got_T - want_T).abs().max()) <= tolerance * max(1.0, float(want_T.abs().max()))
    if term == "lk":
        return  # its mixture is a number to the gradient

    def total(hidden_TD: Tensor, weight_WD: Tensor) -> Tensor:
        wide = FromHidden(*(x.double() for x in made[2:]))
        return linear_loss(hidden_TD, weight_WD, ((1.0, term),), teacher=wide, label_T=label_T, chunk=4).value_T.sum()

    assert torch.autograd.gradcheck(total, [x.double().requires_grad_() for x in made[:2]])


def test_b31_memory_is_known_before_anything_runs(real: Target, monkeypatch: pytest.MonkeyPatch) -> None:
    facts = real.facts
    needed = 4 * 100 * 2 * facts.layers * facts.kv_heads * facts.head_dim * 8
    make = serve.with_engine(Assembled(real, None, DecodeConfig(), None), 4).engine
    limits = Limits(0, 60, 40, 100, 1.0)
    monkeypatch.setattr(serve, "free_memory", lambda device: needed - 1)
    with pytest.raises(
        ValueError, match=r"4 answers at a time, of 100 tokens .* lower max_rows, max_prompt or max_answer"
    ):
        make(limits)
    monkeypatch.setattr(serve, "free_memory", lambda device: 2 * needed)
    assert 1 <= make(limits).cache.kv.nbytes / needed < 1.1
    monkeypatch.undo()
    free = serve.free_memory(torch.device("cpu"))
    assert free is None or free > 1 << 20


@pytest.mark.parametrize("mode", MODES)
def test_b43_seeds_belong_to_requests(mode: str, real: Target) -> None:
    seeds, lengths = [7, 1, None, 9], [14, 3, 8, 11]
    params = [SamplingParams(temperature=1.0, max_new_tokens=n, seed=s) for s, n in zip(seeds, lengths, strict=True)]
    alone = served(mode, real, [PROMPT], params[:1])
    assert alone == served(mode, real, [PROMPT], params[:1])
    together = served(mode, real, [PROMPT] * 4, params)
    assert together[0] == alone[0] and served(mode, real, [PROMPT] * 4, params[::-1])[3] == alone[0]
    assert served(mode, real, [PROMPT] * 4, params, rows=2)[3] == together[3]  # it comes when another is gone
    free = [SamplingParams(temperature=1.0, max_new_tokens=12)] * 8
    assert len({tuple(ids) for ids in served(mode, real, [PROMPT] * 8, free)}) >= 7


@pytest.mark.parametrize("mode", MODES)
def test_b44_temperature_has_its_effect(mode: str, real: Target) -> None:
    """Uniform logits: four classes of ids are equally frequent. Several temperatures in one batch: each has its own."""
    flat = tiny_target(width=32, layers=2)
    with torch.no_grad():
        flat.head_weight.zero_()
    hot = [SamplingParams(temperature=1.0, max_new_tokens=100, seed=i, ignore_eos=True) for i in range(40)]
    counts_4 = torch.zeros(4)
    for ids in served(mode, flat, [PROMPT] * 40, hot, rows=40):
        counts_4 += torch.bincount(torch.tensor(ids) % 4, minlength=4)
    share_4 = counts_4 / counts_4.sum()
    assert counts_4.sum() == 4000 and float(-(share_4 * share_4.log()).sum()) > 1.38
    mixed = [SamplingParams(temperature=t, max_new_tokens=12, seed=3) for t in (0.0, 1e-6, 0.7, 1.5)]
    cold, nearly, *warm = served(mode, real, [PROMPT] * 4, mixed)
    assert cold == nearly == served("plain", real, [PROMPT], mixed[:1])[0]
    assert warm[0] != cold and warm[1] != cold and warm[0] != warm[1]
    for wrong in (-1.0, math.nan, math.inf):
        with pytest.raises(ValueError, match="temperature"):
            SamplingParams(temperature=wrong)


@pytest.mark.parametrize("mode", MODES)
def test_b47_ends_and_budgets(mode: str, real: Target) -> None:
    whole = served("plain", real, [PROMPT], [SamplingParams(max_new_tokens=30)])[0]
    assert len(whole) == 30  # without an end token the budget ends it
    assert served(mode, real, [PROMPT], [SamplingParams(max_new_tokens=30)]) == [whole]
    eos_ids = (whole[3], whole[7])
    params = [SamplingParams(min_new_tokens=6, max_new_tokens=20), SamplingParams(max_new_tokens=20)]
    want = served("plain", real, [PROMPT] * 2, params, eos_ids)
    assert not set(want[0][:6]) & set(eos_ids) and want[1] == whole[: whole.index(want[1][-1]) + 1]
    for k in (1, 4, 8):
        assert served(mode, real, [PROMPT] * 2, params, eos_ids, k=k) == want
    short = [SamplingParams(max_new_tokens=7)]
    assert served(mode, real, [PROMPT], short, k=16) == [whole[:7]]


def test_promise_14_many_requests_leave_nothing(real: Target) -> None:
    """Tensors and open files, after 40 and after 160 short requests."""
    engine = Engine(real, drafter_of("eagle3", real), DecodeConfig(max_rows=4), 64, 32, Prefixes(20_000, least=4))
    counts = []
    for n in range(160):
        prompt = torch.randint(3, 200, (3 + n % 20,), generator=torch.Generator().manual_seed(n)).tolist()
        engine.add(Request(n, prompt, SamplingParams(max_new_tokens=2), (), None, live=False))
        if n % 4 == 3:
            while engine.busy:
                engine.step()
        if n in (39, 159):
            gc.collect()
            tensors = sum(isinstance(x, Tensor) for x in gc.get_objects())
            counts.append((tensors, len(os.listdir("/proc/self/fd"))))
    assert counts[1][0] <= counts[0][0] + 8 and counts[1][1] == counts[0][1]  # how many prefixes fit differs a little


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_promise_27_batches_of_eight(dtype: torch.dtype) -> None:
    """A prompt alone and among seven others, of other lengths and budgets: at one bucket of rows, width and slots in
    bfloat16. The longest is there both times."""
    target, exact = tiny_target(width=32, layers=2, dtype=dtype), dtype == torch.float64
    prompts = [[3 + 7 * i + j % (2 + i) for j in range(2 + 3 * i)] for i in range(8)]
    params = [SamplingParams(max_new_tokens=4 + 5 * ((i * 3) % 4) + i, ignore_eos=True) for i in range(8)]
    for name in (None, "eagle3", "recycling"):
        drafter = drafter_of(name, target)
        width = None if exact else 4 if drafter is None else chain_width(drafter, DecodeConfig(k=3))
        decode = DecodeConfig(k=3, fixed_width=width)
        together = generate(target, prompts, params, drafter, decode)
        for i in range(8):
            rows = [i] if exact else [i, 7, 7, 5, 7, 7, 5, 7]
            alone = generate(target, [prompts[j] for j in rows], [params[j] for j in rows], drafter, decode)[0]
            assert alone.ids == together[i].ids


def test_rows_that_are_done_are_not_computed(real: Target, monkeypatch: pytest.MonkeyPatch) -> None:
    """In closed batches too; at a fixed width they stay, since bits hang on the number of rows."""
    forward, rows = real.forward, list[int]()

    def counting(ids: Any, *rest: Any, **options: Any) -> Any:
        rows.append(len(ids))
        return forward(ids, *rest, **options)

    monkeypatch.setattr(real, "forward", counting)
    params = [SamplingParams(max_new_tokens=n, ignore_eos=True) for n in (2, 6, 4)]
    plain = generate(real, [PROMPT, [9], [8, 8]], params)
    assert rows == [3, 3, 2, 2, 1, 1] and [len(r.ids) for r in plain] == [2, 6, 4]
    rows.clear()
    assert [r.ids for r in generate(real, [PROMPT, [9], [8, 8]], params, None, DecodeConfig(fixed_width=4))] == [
        r.ids for r in plain
    ]
    assert rows == [3] * 6
    for name in ("eagle3", "recycling"):
        drafted = generate(real, [PROMPT, [9], [8, 8]], params, drafter_of(name, real), DecodeConfig(k=2))
        assert [r.ids for r in drafted] == [r.ids for r in plain]


@pytest.mark.parametrize("name", [None, "eagle3"])
def test_nan_stays_in_its_request(name: str | None, real: Target) -> None:
    """A row whose model said NaN is given up; neighbours, the next one in its row, and prompts like its own are clean."""
    params = SamplingParams(max_new_tokens=14)
    prompts = [list(range(40, 64)), list(range(60, 80)), [9, 8, 7], list(range(60, 80))]
    want = [generate(real, [p], params)[0].ids for p in prompts]
    engine = Engine(real, drafter_of(name, real), DecodeConfig(max_rows=2), 64, 32, Prefixes(1_000_000, least=2))
    requests = [Request(i, p, params, (), None, live=False) for i, p in enumerate(prompts)]
    for request in requests[:2]:
        engine.add(request)
    for _ in range(3):
        engine.step()
    engine.cache.kv[:, :, 1, :, : int(engine.cache.lengths_B[1])] = math.nan
    if name is not None:
        engine.state.cache.kv[:, :, 1, :, :20] = math.nan
    engine.cancel(requests[1])
    for request in requests[2:]:
        engine.add(request)
    while engine.busy:
        engine.step()
    assert [r.ids for r in requests if r is not requests[1]] == [want[0], *want[2:]]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_targets_and_drafters_go_to_other_processes(dtype: torch.dtype) -> None:
    target = tiny_target(width=32, layers=2, dtype=dtype)
    drafter = drafter_of("eagle3", target)
    params = SamplingParams(max_new_tokens=8)
    want = generate(target, [PROMPT], params, drafter)[0].ids
    twin, head = ForkingPickler.loads(ForkingPickler.dumps((target, drafter)))
    assert twin.runner == "lean" and generate(twin, [PROMPT], params, head)[0].ids == want


def test_writes_past_the_versions_are_found() -> None:
    """`param.data` counts no version; weights that are packed or fused are compared where a cache is made."""
    for dtype in (torch.bfloat16, torch.float32):
        target = tiny_target(width=32, layers=2, dtype=dtype, family="qwen3")
        params = SamplingParams(max_new_tokens=10)
        generate(target, [PROMPT], params)
        for weight in target.model.parameters():
            weight.data.mul_(1.5)
        other = tiny_target(width=32, layers=2, dtype=dtype, family="qwen3")
        other.model.load_state_dict(target.model.state_dict())
        decode = DecodeConfig(keep_logits=True)
        ours, theirs = (generate(t, [PROMPT], params, None, decode)[0] for t in (target, other))
        assert ours.ids == theirs.ids and ours.logits is not None and torch.equal(ours.logits, theirs.logits)
