"""The decode loop of denoisers: how many passes, exact caches, batches, budgets and ends, what is never emitted, branches,
approximate caches. CASES B21, B51, B52.

pytest tests/test_diffuse.py
"""

from collections.abc import Callable
from dataclasses import replace
from itertools import product
from typing import Any

import pytest
import torch
from scripted_denoiser import EOS, MASK, ScriptedDenoiser, V, denoiser_of, script
from torch import Tensor

from draftsmith.inference.commit import Event, Passes
from draftsmith.inference.diffuse import DiffuseConfig, diffuse
from draftsmith.inference.speculate import generate
from draftsmith.inference.strategies import STRATEGIES, Strategy, Threshold, strategy_of
from draftsmith.losses.probs import SamplingParams
from draftsmith.models.denoiser import TargetDenoiser

ONE = strategy_of("threshold", {"threshold": 2.0})
ALL = strategy_of("threshold", {"threshold": 0.0})
MID = strategy_of("threshold", {"threshold": 0.02})
PROMPTS = [[5, 9, 77, 30, 2, 8, 100], [44], [7, 2, 12, 90]]  # 2 pads and ends texts; here it is text

FORMS: dict[str, dict[str, Any]] = {
    "sdar": {"shift": False, "origin": "document"},
    "answer": {"shift": False},
    "shift": {"shift": True},
    "shift, document": {"shift": True, "origin": "document"},
    "set_block": {"shift": True, "token_causal": True},
    "idlm": {"shift": True, "token_causal": True, "inside": "causal"},
    "wedlm": {"shift": False, "token_causal": True, "inside": "observed_first"},
    "dual": {"shift": True, "token_causal": True, "dual": True},
    "full": {"shift": False, "causal": False},
    "full, shift": {"shift": True, "causal": False},
}


@pytest.fixture(scope="module")
def double(tiny: Callable[..., Any]) -> Any:
    return tiny(dtype=torch.float64, layers=2, width=32, vocab=260, tokens=256)


def ids_of(results: list[Any]) -> list[list[int]]:
    return [r.ids for r in results]


def flat(number: int, ids_BT: Tensor, positions_BT: Tensor) -> Tensor:
    return torch.linspace(0, 1, V).expand(*ids_BT.shape, V)


@pytest.mark.parametrize("prompt,length", product((1, 4, 6), (1, 5, 8, 11)))
def test_number_of_passes(prompt: int, length: int) -> None:
    """Above 1: a pass per token, but for those that the shift gives free; 0: a pass per block."""
    params = SamplingParams(max_new_tokens=length, ignore_eos=True)
    for shift, causal, origin, fuse, cache in product(
        (0, 1), (0, 1), ("document", "answer"), (True, False), ("auto", "none")
    ):
        counts = []
        for strategy in (ONE, ALL):
            denoiser = ScriptedDenoiser(flat, 4, shift=bool(shift), causal=bool(causal), origin=origin)
            decode = DiffuseConfig(strategy, fuse=fuse, cache=cache)  # type: ignore[arg-type]
            [result] = diffuse(denoiser, [[1] * prompt], params, decode)
            assert len(result.ids) == length and MASK not in result.ids
            counts.append(result.passes)
        first = prompt // 4 * 4 if origin == "document" else prompt
        blocks = [range(max(at, prompt), min(at + 4, prompt + length)) for at in range(first, prompt + length, 4)]
        free = [bool(shift and causal and block[0] > 0 and (block[0] - first) % 4 == 0) for block in blocks]
        left = [len(block) - got for block, got in zip(blocks, free, strict=True)]
        writes = len(blocks) - 1 if causal else 0
        alone = sum(not n for n in left[1:])  # nothing but the write is left to do
        kv_only = writes if not fuse else alone if causal else 0
        prefill = int(causal and first > 0)
        assert counts[0] == Passes(prefill, sum(left), kv_only), (shift, causal, origin, fuse, cache)
        assert counts[1] == Passes(prefill, sum(n > 0 for n in left), kv_only), (shift, causal, origin, fuse, cache)


@pytest.mark.parametrize("form", [f for f in FORMS if f != "dual"])
def test_what_rows_see_written_out(double: Any, form: str) -> None:
    """Every pass without a cache, row by row, against the model's rules in words."""
    seen: list[tuple[Tensor, Tensor, Tensor]] = []

    class Shown(TargetDenoiser):
        def denoise(self, canvas: Tensor, positions_BT: Tensor, **more: Any) -> Tensor:
            seen.append((canvas, positions_BT, more["see_BTA"]))
            return super().denoise(canvas, positions_BT, **more)

    d, prompt = Shown(double, 4, 256, **FORMS[form]), PROMPTS[0]
    origin = 0 if d.origin == "document" else len(prompt)

    def number(place: int) -> int:
        return -1 if place < origin else (place - origin) // 4

    diffuse(d, [prompt], SamplingParams(max_new_tokens=7, ignore_eos=True), DiffuseConfig(ONE, cache="none"))
    for canvas, positions, see in seen:
        at = {place: row for row, place in enumerate(positions[0].tolist())}
        places = sorted(at)
        ids = [int(canvas[0, at[place]]) for place in places]
        assert places == list(range(len(places)))
        unfinished = number(ids.index(256)) if 256 in ids else 99
        for i, j in product(places, places):
            if not d.causal:
                want = True
            elif number(i) != number(j):
                want = number(j) < number(i)
            elif number(i) < unfinished:
                want = j <= i or not d.token_causal
            elif d.inside == "observed_first":
                want = (ids[j] == 256, j) <= (ids[i] == 256, i)
            else:
                want = j <= i or d.inside == "full"
            assert bool(see[0, at[i], at[j]]) == want, (i, j, ids)


class Watched:
    """A selection that keeps what it saw: open places and their logits, pass by pass."""

    def __init__(self, select: Any) -> None:
        self.select, self.seen = select, []

    def __call__(self, step: Any, score_BC: Tensor) -> Tensor:
        self.seen.append((step.open_BC, step.logits_BCV[step.open_BC]))
        return self.select(step, score_BC)


@pytest.mark.parametrize("form", [f for f in FORMS if f not in ("full", "full, shift", "dual")])
def test_exact_caches_equal_no_cache(tiny: Callable[..., Any], form: str) -> None:
    """Logits of every pass and ids, in fp32; a fused write and a pass of its own give the same where no token is free."""
    denoiser = denoiser_of(tiny(layers=2, width=32, vocab=260, tokens=256), 4, 256, **FORMS[form])
    params = SamplingParams(max_new_tokens=11, ignore_eos=True)
    for strategy in (MID, strategy_of("pipeline", {"threshold": 0.02})):
        runs = {}
        for cache in ("none", "block"):
            watched = Watched(strategy.select)
            decode = DiffuseConfig(replace(strategy, select=watched), cache=cache)  # type: ignore[arg-type]
            results = diffuse(denoiser, PROMPTS, params, decode)
            runs[cache] = watched.seen, ids_of(results), [r.passes for r in results]
        assert runs["none"][1:] == runs["block"][1:]
        for (open_a, a), (open_b, b) in zip(runs["none"][0], runs["block"][0], strict=True):
            assert torch.equal(open_a, open_b)
            torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-5 * float(a[a.isfinite()].abs().max()))
        if not denoiser.shift:
            apart = diffuse(denoiser, PROMPTS, params, DiffuseConfig(strategy, fuse=False))
            assert ids_of(apart) == runs["block"][1]


@pytest.mark.parametrize("form", FORMS)
def test_batch_equals_single(double: Any, form: str) -> None:
    denoiser = denoiser_of(double, 4, 256, **FORMS[form])
    params = [SamplingParams(max_new_tokens=n, temperature=t, seed=n) for n, t in ((9, 0.0), (6, 0.0), (7, 1.0))]
    exact = ("none", "prefix", "dual") if not denoiser.causal else ("block",) if denoiser.dual else ("none", "block")
    for strategy, cache in product((MID, STRATEGIES["credit"]), exact):
        decode = DiffuseConfig(strategy, cache=cache)  # type: ignore[arg-type]
        together = diffuse(denoiser, PROMPTS, params, decode)
        alone = [diffuse(denoiser, [p], q, decode)[0] for p, q in zip(PROMPTS, params, strict=True)]
        assert ids_of(together) == ids_of(alone)
        assert [r.passes for r in together] == [r.passes for r in alone]


@pytest.mark.parametrize("form", ["shift, document", "set_block", "dual"])
def test_block_1_is_autoregression(double: Any, form: str) -> None:
    """With shift and blocks of one token, decided tokens alone are read: greedy, sampled, penalised."""
    kinds = [{}, {"temperature": 1.0, "seed": 3}, {"repetition_penalty": 1.3, "min_new_tokens": 8}]
    params = [SamplingParams(max_new_tokens=12, **kind) for kind in kinds]  # type: ignore[arg-type]
    plain = generate(double, PROMPTS, params)
    results = diffuse(denoiser_of(double, 1, 256, **FORMS[form]), PROMPTS, params)
    assert ids_of(results) == ids_of(plain)
    assert [r.text for r in results] == [r.text for r in plain]


def test_finished_text_of_dual_is_read_in_the_clean_view(double: Any) -> None:
    seen: list[tuple[str, Tensor, Tensor]] = []

    class Views(TargetDenoiser):
        def denoise(self, canvas: Tensor, positions_BT: Tensor, **more: Any) -> Tensor:
            seen.append((more["view"], canvas, positions_BT))
            return super().denoise(canvas, positions_BT, **more)

    denoiser = denoiser_of(double, 4, 256, kind=Views, **FORMS["dual"])
    [result] = diffuse(denoiser, [[1, 5]], SamplingParams(max_new_tokens=8, ignore_eos=True), DiffuseConfig(ONE))
    assert result.passes == Passes(prefill=1, denoise=6, kv_only=1)
    assert [view for view, *_ in seen] == ["clean", *["noisy"] * 3, "clean", *["noisy"] * 3]
    rows = [at.tolist()[0] for _, _, at in seen]
    assert rows == [[0, 1], *[[2, 3, 4]] * 3, [2, 3, 4, 5], *[[6, 7, 8]] * 3]
    for view, canvas, _ in seen:
        assert (view == "clean") == (256 not in canvas[0].tolist()) or view == "noisy"


def test_what_a_causal_row_says_of_the_last_token(double: Any) -> None:
    """B21: with shift and only the last token masked, its logits are the autoregressive model's."""
    said: list[Tensor] = []

    class Head(TargetDenoiser):
        def head(self, hidden: Tensor, ids: Tensor | None = None) -> Tensor:
            said.append(super().head(hidden, ids))
            return said[-1]

    denoiser = Head(double, 4, 256, shift=True, token_causal=True)
    diffuse(denoiser, [PROMPTS[0]], SamplingParams(max_new_tokens=1))
    ids_BT = torch.tensor([PROMPTS[0]])
    plain = double.head(double.forward(ids_BT, torch.arange(ids_BT.shape[1])[None]).last_hidden_BTD)[0, -1]
    torch.testing.assert_close(said[0][0, 0, :256], plain[:256])


def test_ends_budgets_and_padding() -> None:
    """B51: 5 tokens in blocks of 3; row 0 ends in its second token, and would say 7 later."""
    table_TV = torch.zeros(2, 20, V)
    for place in range(20):
        table_TV[0, place, EOS if place == 2 else 7] = 9.0
        table_TV[1, place, 4] = 9.0

    for causal, strategy in product((False, True), (ONE, ALL)):
        denoiser = ScriptedDenoiser(lambda n, ids, at: table_TV[torch.arange(len(ids))[:, None], at], 3, causal=causal)
        events: list[Event] = []
        results = diffuse(
            denoiser, [[1], [2]], SamplingParams(max_new_tokens=5), DiffuseConfig(strategy), on_event=events.append
        )
        assert ids_of(results) == [[7, EOS], [4] * 5]
        assert [r.stop_reason for r in results] == ["eos", "length"]
        assert max(int(at.max()) for _, at in denoiser.seen) == 5  # places beyond the budget are never run
        for row, result in enumerate(results):
            assert [i for e in events if e.row == row for i in e.ids] == result.ids
    denoiser = ScriptedDenoiser(flat, 3)
    assert len(diffuse(denoiser, [[1]], SamplingParams(max_new_tokens=1))[0].ids) == 1


def test_masks_and_ids_without_a_token_are_never_emitted() -> None:
    def rule(number: int, ids_BT: Tensor, positions_BT: Tensor) -> Tensor:
        return torch.tensor([0.0, 1, 2, 3, 4, 5, 50, 8, 60, 70]).expand(*ids_BT.shape, V)

    for temperature in (0.0, 5.0):
        denoiser = ScriptedDenoiser(rule, 4, tokens=8, mask_id=6)
        params = SamplingParams(max_new_tokens=16, temperature=temperature, seed=0, ignore_eos=True)
        [result] = diffuse(denoiser, [[1]], params, DiffuseConfig(ALL))
        assert set(result.ids) <= {0, 1, 2, 3, 4, 5, 7} and (temperature > 0 or set(result.ids) == {7})


@pytest.mark.parametrize("form", ["sdar", "shift", "full"])
def test_states_drafted_ahead_change_nothing(double: Any, form: str) -> None:
    """FreeDave: the same answers, in no more passes."""
    denoiser = denoiser_of(double, 4, 256, **FORMS[form])
    params = SamplingParams(max_new_tokens=10)
    for base in (STRATEGIES["fixed"], STRATEGIES["credit"]):
        verify = STRATEGIES["freedave"].verify
        plain = diffuse(denoiser, PROMPTS, params, DiffuseConfig(base))
        ahead = diffuse(denoiser, PROMPTS, params, DiffuseConfig(replace(base, verify=verify)))
        assert ids_of(ahead) == ids_of(plain)
        for a, b in zip(ahead, plain, strict=True):
            assert a.passes and b.passes and a.passes.denoise <= b.passes.denoise and a.passes.branches > 0
        alone = [diffuse(denoiser, [p], params, DiffuseConfig(replace(base, verify=verify)))[0] for p in PROMPTS]
        assert [r.passes for r in ahead] == [r.passes for r in alone]


def test_approximate_caches(double: Any) -> None:
    """Written anew in every pass they are no approximation; otherwise they run fewer rows and end."""
    params = SamplingParams(max_new_tokens=10, ignore_eos=True)
    for form, sub, caches in (("full", None, ("prefix", "dual")), ("full, shift", None, ("prefix", "dual")),
                              ("full", 2, ("prefix", "dual")), ("shift", 2, ("dual",)), ("sdar", 2, ("dual",))):  # fmt: skip
        denoiser = denoiser_of(double, 4, 256, **FORMS[form])
        plain = diffuse(denoiser, PROMPTS, params, DiffuseConfig(MID, sub_block=sub, cache="none"))
        for cache in caches:
            decode = DiffuseConfig(MID, sub_block=sub, cache=cache, refresh=1)  # type: ignore[arg-type]
            assert ids_of(diffuse(denoiser, PROMPTS, params, decode)) == ids_of(plain), (form, cache)
            rows: list[int] = []
            denoise = denoiser.denoise

            def counted(canvas: Tensor, *args: Any, rows: list[int] = rows, run: Any = denoise, **more: Any) -> Tensor:
                rows.append(canvas.shape[1])
                return run(canvas, *args, **more)

            denoiser.denoise = counted  # type: ignore[method-assign]
            results = diffuse(denoiser, PROMPTS[:1], params, replace(decode, refresh=None, strategy=ONE))
            assert all(len(r.ids) == 10 for r in results) and min(rows) < max(rows)
            denoiser.denoise = denoise  # type: ignore[method-assign]


def test_window_of_a_model_that_sees_the_whole_canvas(double: Any) -> None:
    denoiser = denoiser_of(double, 4, 256, shift=False, causal=False)
    params = SamplingParams(max_new_tokens=12, ignore_eos=True)
    whole = diffuse(denoiser, PROMPTS, params, DiffuseConfig(MID))
    assert ids_of(diffuse(denoiser, PROMPTS, params, DiffuseConfig(MID, window=8))) == ids_of(whole)
    narrow = diffuse(denoiser, PROMPTS, params, DiffuseConfig(MID, window=0))
    assert all(len(r.ids) == 12 for r in narrow)
    long = diffuse(denoiser, PROMPTS, params, DiffuseConfig(MID, block=12))
    assert all(len(r.ids) == 12 for r in long)


def test_soft_places_are_read_as_mixed_embeddings() -> None:
    denoiser = ScriptedDenoiser(script([[0.6, 0.9, 0.4]]), 3)
    diffuse(denoiser, [[1]], SamplingParams(max_new_tokens=3), DiffuseConfig(STRATEGIES["soft"]))
    first, second = denoiser.seen[0][0][0], denoiser.seen[1][0][0]
    eye = torch.eye(V, dtype=torch.float64)
    torch.testing.assert_close(first[1:], eye[[MASK] * 3])
    mix = 0.6 * eye[1] + 0.4 * eye[MASK]
    torch.testing.assert_close(second[1], mix / mix.norm())  # both norms are 1
    torch.testing.assert_close(second[2:], eye[[2, MASK]])  # decided by force; too unsure


def test_what_does_not_fit_is_refused(double: Any) -> None:
    blocks, full = (denoiser_of(double, 4, 256, shift=False, causal=c) for c in (True, False))
    params = SamplingParams(max_new_tokens=4)
    for denoiser, settings, words in (
        (blocks, {"block": 8}, "trained with block 4"),
        (blocks, {"cache": "prefix"}, "exact cache is"),
        (blocks, {"cache": "dual"}, "needs sub_block"),
        (blocks, {"window": 4}, "whole canvas"),
        (full, {"cache": "block"}, "with blocks"),
        (denoiser_of(double, 4, 256, **FORMS["dual"]), {"cache": "none"}, "another view"),
    ):
        with pytest.raises(ValueError, match=words):
            diffuse(denoiser, [[1]], params, DiffuseConfig(ALL, **settings))  # type: ignore[arg-type]
    for settings, words in (
        ({"block": 0}, "block=0"),
        ({"cache": "all"}, "use auto"),
        ({"window": -1}, "window"),
        ({"sub_block": 2, "strategy": STRATEGIES["edit"]}, "sub_block"),
        ({"strategy": Strategy(Threshold(), verify=STRATEGIES["s2d2"].verify)}, "s2d2"),
        ({"strategy": STRATEGIES["s2d2"], "cache": "none"}, "s2d2"),
        (
            {"strategy": Strategy(Threshold(), soft=STRATEGIES["soft"].soft, verify=STRATEGIES["lopa"].verify)},
            "branches",
        ),
    ):
        with pytest.raises(ValueError, match=words):
            DiffuseConfig(**settings)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="is empty"):
        diffuse(blocks, [[]], params)
    with pytest.raises(ValueError, match="delimiters"):
        diffuse(ScriptedDenoiser(flat), [[1]], params, DiffuseConfig(STRATEGIES["adablock"]))
