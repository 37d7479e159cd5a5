"""The lean runner computes what Hugging Face's modules do: every family, cache, mask and method inside the target."""

import copy
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from test_speculate import Lookup
from torch import Tensor
from transformers import AutoModelForCausalLM

from draftsmith.inference.diffuse import diffuse
from draftsmith.inference.self_draft import SelfDraft
from draftsmith.inference.speculate import DecodeConfig, generate
from draftsmith.losses.probs import SamplingParams
from draftsmith.models import METHODS
from draftsmith.models.adapters import AdapterConfig, Adapters
from draftsmith.models.denoiser import TargetDenoiser
from draftsmith.models.lean import packed_product
from draftsmith.models.pretrained import tiny_target
from draftsmith.models.target import States, Target

YARN = {"rope_type": "yarn", "rope_theta": 5e6, "factor": 4.0, "original_max_position_embeddings": 512}
LINEAR = {"rope_type": "linear", "rope_theta": 1e4, "factor": 4.0}
LLAMA3 = {
    "rope_type": "llama3", "rope_theta": 5e5, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}  # fmt: skip
CASES: dict[str, dict[str, Any]] = {
    "llama": {"family": "llama", "kv_heads": 2, "tied": True},
    "llama-head16": {"family": "llama", "head_dim": 16, "rope": LLAMA3},  # 4 * 16 != 32
    "llama-yarn": {"family": "llama", "kv_heads": 1, "rope": YARN},
    "llama-linear": {"family": "llama", "heads": 3, "kv_heads": 3, "width": 36, "rope": LINEAR},
    "mistral-window": {"family": "mistral", "kv_heads": 2, "window": 6},
    "qwen2-window": {"family": "qwen2", "window": 6, "kv_heads": 2},
    "qwen2": {"family": "qwen2", "tied": True},
    "qwen3": {"family": "qwen3", "kv_heads": 1, "tied": True},
    "qwen3-window": {"family": "qwen3", "heads": 2, "kv_heads": 1, "head_dim": 24, "window": 3},
}
SMALL: dict[str, Any] = {"width": 32, "layers": 2}


def small(**options: Any) -> Target:
    return tiny_target(**SMALL | options)


@pytest.fixture(scope="module", params=CASES)
def target(request: pytest.FixtureRequest) -> Target:
    return small(**CASES[request.param])


@contextmanager
def run_by(target: Target, runner: Any) -> Iterator[None]:
    target.choose_runner(runner)
    yield
    target.choose_runner("auto")


def ids_of(*shape: int, seed: int = 1) -> Tensor:
    return torch.randint(3, 250, shape, generator=torch.Generator().manual_seed(seed))


def close(ours: Tensor, theirs: Tensor, tolerance: float = 1e-5) -> None:
    assert ours.shape == theirs.shape and ours.dtype == theirs.dtype
    assert float((ours - theirs).abs().max()) <= tolerance * max(1.0, float(theirs.abs().max()))


def same(target: Target, passes: Callable[[], list[Any]], tolerance: float = 1e-5) -> None:
    """What `passes` returns (states or tensors) is the same by both runners."""
    found = []
    for runner in ("lean", "hf"):
        with run_by(target, runner), torch.no_grad():
            assert target.runner == runner
            found.append(passes())
    for ours, theirs in zip(*found, strict=True):
        if isinstance(ours, States):
            close(ours.last_hidden_BTD, theirs.last_hidden_BTD, tolerance)
            if theirs.taps_BTPD is not None:
                close(ours.taps_BTPD, theirs.taps_BTPD, tolerance)
        else:
            close(ours, theirs, tolerance)


@torch.no_grad()
def test_a_whole_text_gives_the_models_own_logits(target: Target) -> None:
    ids_BT = ids_of(2, 19)
    positions_BT = torch.arange(19).expand(2, 19)
    with run_by(target, "lean"):
        states = target.forward(ids_BT, positions_BT, taps=(0, 2, 1))
        close(target.head(states.last_hidden_BTD), target.model(ids_BT).logits)
        assert torch.equal(target.forward(target.embed(ids_BT), positions_BT).last_hidden_BTD, states.last_hidden_BTD)
    assert states.taps_BTPD is not None and torch.equal(states.taps_BTPD[:, :, 0], target.embed(ids_BT))
    close(target.norm(states.taps_BTPD[:, :, 1]), states.last_hidden_BTD)


def test_caches_trees_windows_and_prefixes(target: Target) -> None:
    """Ragged rows in chunks; a tree; a committed path of it; one token; a long block; a prefix; all slots read."""
    facts = target.facts
    prefix_kv = torch.randn(facts.layers, 2, facts.kv_heads, 3, facts.head_dim, generator=torch.manual_seed(3))
    see_BMM = torch.eye(5, dtype=torch.bool).repeat(3, 1, 1)
    for node, parent in enumerate((0, 0, 1, 1), 1):
        see_BMM[:, node] |= see_BMM[:, parent]

    def passes(read_all: bool) -> list[Any]:
        cache, found = target.new_cache(3, 80, read_all=read_all), []
        counts_B = torch.tensor([9, 4, 1])

        def run(t: int, seed: int, **options: Any) -> None:
            positions_BT = cache.lengths_B[:, None] + torch.arange(t)
            found.append(target.forward(ids_of(3, t, seed=seed), positions_BT, cache=cache, **options))

        run(9, 1, taps=(1, 2))
        cache.commit(counts_B)
        depth_BM = torch.tensor([0, 1, 1, 2, 2])
        found.append(
            target.forward(ids_of(3, 5), cache.lengths_B[:, None] + depth_BM, cache=cache, see_BTA=see_BMM, taps=(2, 0))
        )
        cache.compact(torch.tensor([[0, 1, 3], [0, 2, 0], [0, 0, 0]]), torch.tensor([3, 2, 1]))
        run(1, 2)
        cache.commit(torch.ones(3, dtype=torch.int64))
        run(40, 3)
        # Two of three tokens see the prefix, behind a tail of one token that was not committed.
        positions_BT = cache.lengths_B[:, None] + torch.arange(3) + 1
        see_BTA = torch.ones(3, 4, dtype=torch.bool).tril(1).expand(3, 3, 4)
        see_BTP = torch.tensor([[True], [False], [True]]).expand(3, 3, 3)
        run(1, 4)
        found.append(
            target.forward(
                ids_of(3, 3, seed=5), positions_BT, cache=cache, see_BTA=torch.cat([see_BTA, see_BTP], 2),
                prefix_kv=prefix_kv,
            )
        )  # fmt: skip
        cache.truncate(torch.full((3,), 2))
        run(1, 6)
        run(4, 7)
        found.append(cache.kv[..., :6, :].clone())
        return found

    for read_all in (False, True):
        same(target, lambda read_all=read_all: passes(read_all))  # type: ignore[misc]
    see_BTA = torch.cat([see_BMM[:2], torch.tensor([[True], [False], [True], [True], [False]]).expand(2, 5, 3)], 2)
    same(
        target,
        lambda: [
            target.forward(ids_of(2, 5), torch.arange(5).expand(2, 5), see_BTA=see_BTA, prefix_kv=prefix_kv, taps=(1,))
        ],
    )


@pytest.mark.parametrize("name", ["llama", "qwen3-window"])
def test_other_data_types(name: str) -> None:
    # One rounding to bf16 is 4e-3 of a value; sums in another order round differently, in a few layers a few times.
    for dtype, tolerance in ((torch.bfloat16, 3e-2), (torch.float64, 1e-6)):
        target = small(**CASES[name], dtype=dtype)

        def passes(target: Target = target) -> list[Any]:
            cache = target.new_cache(2, 30)
            first = target.forward(ids_of(2, 12), torch.arange(12).expand(2, 12), cache=cache, taps=(1,))
            cache.commit(torch.tensor([12, 7]))
            positions_BT = cache.lengths_B[:, None] + torch.arange(4)
            second = target.forward(ids_of(2, 4, seed=2), positions_BT, cache=cache)
            some = torch.arange(5, 90)
            hidden_BTD = second.last_hidden_BTD[:, :2]
            return [first, second, target.head(hidden_BTD), target.head(hidden_BTD, some)]

        same(target, passes, tolerance)


def test_packed_rows_do_not_depend_on_their_place() -> None:
    """What fixed width builds on, for oneDNN's own order of weights, at odd sizes too."""
    random = torch.Generator().manual_seed(0)
    for size_out, size_in in ((96, 48), (300, 576), (65, 130)):
        weight = torch.randn(size_out, size_in, generator=random).bfloat16()
        bias = torch.randn(size_out, generator=random).bfloat16()
        product = packed_product(weight, bias)
        if product is None:
            pytest.skip("no bf16 kernels of oneDNN on this CPU")
        row = torch.randn(size_in, generator=random).bfloat16()
        for width in (1, 2, 5, 8, 16, 33):
            rows = torch.randn(width, size_in, generator=random).bfloat16()
            close(product(rows), torch.nn.functional.linear(rows, weight, bias), 1e-2)
            outs = []
            for place in range(width):
                rows = torch.randn(width, size_in, generator=random).bfloat16()
                rows[place] = row
                outs.append(product(rows)[place])
            assert all(torch.equal(out, outs[0]) for out in outs)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", ["llama", "mistral-window", "qwen2-window", "qwen3"])
def test_fixed_width_chains_have_the_same_bits(name: str, dtype: torch.dtype) -> None:
    """With and without speculation, one row and three, every family. The drafter knows the answers, mostly."""
    target = small(**CASES[name], dtype=dtype)
    assert target.runner == "lean"
    prompts = [(ids_of(n, seed=n).tolist() * 2)[: n + 6] for n in (11, 5, 8)]
    params = SamplingParams(max_new_tokens=16, ignore_eos=True)
    for rows in (1, 3):
        decode = DecodeConfig(k=4, fixed_width=5, max_rows=rows, keep_logits=True)
        plain = generate(target, prompts, params, None, decode)
        for first in range(0, 3, rows):
            some = slice(first, first + rows)
            answers = [want.ids for want in plain[some]]
            drafter = Lookup(prompts[some], answers, target.facts.tokens, keep=[4, 1, 0, 3])
            for want, got in zip(plain[some], generate(target, prompts[some], params, drafter, decode), strict=True):
                assert got.ids == want.ids and torch.equal(got.logits, want.logits) and got.stats.tau > 1.3


def test_methods_inside_the_target() -> None:
    """A dual view's hooks, prompt tokens with a prefix and as rows of the pass, drafting on both paths."""
    target = small(kv_heads=2)
    prompts = [ids_of(n, seed=n).tolist() for n in (7, 12)]
    for name, options in (
        ("dual_view", {"block": 3, "rank": 4}),
        ("prompt_tokens", {"prefix": 4}),
        ("prompt_tokens", {"variant": "pass"}),
    ):
        torch.manual_seed(1)
        drafter: Any = METHODS[name](METHODS[name].Config(**options), target.facts, None)
        drafter.init_from_target(target)
        with torch.no_grad():
            for parameter in drafter.parameters():
                parameter += 0.1 * torch.randn_like(parameter)
        results, decode = [], DecodeConfig(k=3, keep_logits=True)
        for runner in ("lean", "hf"):
            with run_by(target, runner):
                results.append(generate(target, prompts, SamplingParams(max_new_tokens=12), drafter, decode))
        for ours, theirs in zip(*results, strict=True):
            assert ours.ids == theirs.ids and ours.stats.accepted == theirs.stats.accepted
            close(ours.logits, theirs.logits)
        if name == "dual_view":
            with drafter.second_view():
                same(target, lambda: [target.forward(ids_of(2, 6), torch.arange(6).expand(2, 6))])
            plain = [target.forward(ids_of(2, 6), torch.arange(6).expand(2, 6)).last_hidden_BTD]
            with run_by(target, "lean"), torch.no_grad():  # the hooks are gone
                close(target.forward(ids_of(2, 6), torch.arange(6).expand(2, 6)).last_hidden_BTD, plain[0])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_adapters_and_the_denoisers_on_them(dtype: torch.dtype) -> None:
    """Views switch at will; off, every value is the original's to the bit; a block is denoised behind a cache."""
    original, target = (small(family="qwen3", vocab=300, tokens=280, dtype=dtype) for _ in range(2))
    ids_BT, positions_BT = ids_of(2, 8), torch.arange(8).expand(2, 8)

    def read(target: Target) -> Tensor:
        with run_by(target, "lean"), torch.no_grad():
            return target.head(target.forward(ids_BT, positions_BT).last_hidden_BTD)

    before = read(target)
    adapters = Adapters(AdapterConfig(rank=4), target)
    torch.manual_seed(5)
    for parameter in adapters.trained.parameters():
        parameter.data.add_(torch.randn_like(parameter) * 0.3)
    assert torch.equal(read(original), before) and torch.equal(read(target), before)
    with adapters.view("noisy"):
        assert not torch.equal(read(target), before)
        with adapters.view("clean"):
            assert torch.equal(read(target), before)
    handle = target.layers[0].self_attn.v_proj.base_layer.register_forward_hook(lambda m, args, out: 2 * out)
    assert not torch.equal(read(target), before)  # of what is inside an adapter that is off
    handle.remove()
    assert torch.equal(read(target), before)
    denoiser = TargetDenoiser(target, 4, adapters.needed_mask_id(), shift=True, adapters=adapters)

    def passes() -> list[Any]:
        cache = denoiser.new_cache(2, 20)
        clean = denoiser.denoise(ids_BT, positions_BT, cache=cache, view="clean")
        cache.commit(torch.tensor([8, 5]))
        canvas_BT = torch.full((2, 4), denoiser.mask_id)
        see_BTA = torch.ones(2, 4, 4, dtype=torch.bool)
        return [
            clean,
            denoiser.denoise(canvas_BT, cache.lengths_B[:, None] + torch.arange(4), cache=cache, see_BTA=see_BTA),
        ]

    same(target, passes, 1e-5 if dtype == torch.float32 else 3e-2)


@pytest.mark.parametrize("kind", ["blocks", "tokens"])
def test_block_diffusion_answers_are_the_same(kind: str) -> None:
    """A denoiser's answers, pass by pass; and those that it drafts for the path of its base, which stay the base's."""
    target = small(family="llama", kv_heads=2, vocab=300, tokens=280)
    adapters = Adapters(AdapterConfig(rank=4), target)
    torch.manual_seed(5)
    for parameter in adapters.trained.parameters():
        parameter.data.add_(torch.randn_like(parameter) * 0.2)
    prompts, params = [ids_of(n, seed=n).tolist() for n in (7, 12)], SamplingParams(max_new_tokens=12, ignore_eos=True)
    plain, results = generate(target, prompts, params), []
    for runner in ("lean", "hf"):
        with run_by(target, runner):
            denoiser = TargetDenoiser(
                target, 4, adapters.needed_mask_id(), shift=True, token_causal=kind == "tokens", adapters=adapters
            )
            drafter = SelfDraft(denoiser)
            drafter.bind(target)
            decode = DecodeConfig(k=3, keep_logits=True)
            results.append((diffuse(denoiser, prompts, params), generate(target, prompts, params, drafter, decode)))
    for ours, theirs, want in zip(*(diffused for diffused, _ in results), plain, strict=True):
        assert ours.ids == theirs.ids != want.ids and ours.passes == theirs.passes and ours.order == theirs.order
    for ours, theirs, want in zip(*(drafted for _, drafted in results), plain, strict=True):
        assert ours.ids == theirs.ids == want.ids and ours.stats.accepted == theirs.stats.accepted
        close(ours.logits, theirs.logits)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_weights_that_change_are_read_anew(dtype: torch.dtype, tmp_path: Path) -> None:
    """Written in place, replaced, copied, moved to another type, unfrozen; saved with the memory that both paths share."""
    target, other = small(family="qwen3", seed=1, dtype=dtype), small(family="qwen3", seed=2, dtype=dtype)
    ids_BT, positions_BT, some = ids_of(1, 6), torch.arange(6)[None], torch.arange(5, 90)
    tolerance = 1e-5 if dtype == torch.float32 else 3e-2

    def check(target: Target = target) -> None:
        def passes() -> list[Any]:
            hidden_BTD = target.forward(ids_BT, positions_BT).last_hidden_BTD
            return [target.head(hidden_BTD), target.head(hidden_BTD, some)]

        same(target, passes, tolerance)
        with torch.no_grad():
            hidden_BTD = target.forward(ids_BT, positions_BT).last_hidden_BTD
            close(target.head(hidden_BTD, some), target.head(hidden_BTD)[..., some], tolerance)

    check()
    target.model.save_pretrained(tmp_path)
    saved = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=dtype).state_dict()
    assert all(torch.equal(saved[name], value) for name, value in target.model.state_dict().items())
    target.model.load_state_dict(other.model.state_dict())
    check()
    with run_by(target, "lean"), run_by(other, "hf"), torch.no_grad():
        close(*(t.forward(ids_BT, positions_BT).last_hidden_BTD for t in (target, other)), tolerance)
    twin = copy.deepcopy(target)
    with torch.no_grad():
        for weight in twin.model.parameters():
            weight.mul_(1.1)
    check(twin)
    check()
    target.model.load_state_dict(twin.model.state_dict(), assign=True)
    check()
    with run_by(target, "lean"), run_by(twin, "hf"), torch.no_grad():
        close(*(t.forward(ids_BT, positions_BT).last_hidden_BTD for t in (target, twin)), tolerance)
    target.model.requires_grad_(True)
    with torch.no_grad():
        for weight in target.model.parameters():
            weight.mul_(1.1)
    check()
    target.to(torch.float32 if dtype == torch.bfloat16 else torch.float64)
    tolerance = 1e-5
    check()


def test_what_does_not_run_lean_says_why() -> None:
    for family, why in (("gemma3_text", "type 'gemma3_text' is not one of llama"), ("phi3", "'phi3'")):
        target = small(family=family)
        assert target.runner == "hf" and target.not_lean is not None and why in target.not_lean
        assert target.path == f"hf ({target.not_lean})"
        with pytest.raises(ValueError, match=f"cannot run lean: type '{family}' .*; use runner=auto"):
            target.choose_runner("lean")
    target = small()
    assert target.runner == target.path == "lean" and target.not_lean is None
    with pytest.raises(ValueError, match="runner 'fast': use one of auto, lean, hf"):
        target.choose_runner("fast")  # type: ignore[arg-type]
    target.choose_runner("hf")
    assert target.runner == "hf" and target.path == "hf (chosen)"


def test_gradients_and_foreign_hooks_take_the_modules() -> None:
    target = small()
    target.choose_runner("lean")
    embeds_BTD = target.embed(ids_of(1, 5)).clone().requires_grad_(True)
    target.forward(embeds_BTD, torch.arange(5)[None]).last_hidden_BTD.sum().backward()
    assert embeds_BTD.grad is not None and bool(embeds_BTD.grad.abs().sum() > 0)
    seen: list[int] = []
    handle = target.layers[1].mlp.register_forward_hook(lambda *_: seen.append(1))
    with torch.no_grad():
        target.forward(ids_of(1, 5), torch.arange(5)[None])
        handle.remove()
        states = target.forward(ids_of(1, 5), torch.arange(5)[None])
        with pytest.raises(ValueError, match=r"embeddings of torch.float64: this target computes in torch.float32"):
            target.forward(embeds_BTD.double(), torch.arange(5)[None])
    assert seen == [1] and not states.last_hidden_BTD.is_inference()


@torch.no_grad()
def test_autocast_takes_the_modules_which_round_as_it_says() -> None:
    target, ids_BT, found = small(), ids_of(1, 5), []
    for runner in ("lean", "hf"):
        with run_by(target, runner), torch.autocast("cpu", torch.bfloat16):
            found.append(target.forward(ids_BT, torch.arange(5)[None]).last_hidden_BTD)
    assert torch.equal(*found)
