"""Decode strategies on a scripted denoiser: the order in which each decides, worked out by hand; that each ends,
whatever the logits; ties; settings by name.

pytest tests/test_strategies.py
"""

import dataclasses
import itertools
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from scripted_denoiser import EOS, MASK, ScriptedDenoiser, V, logits_of, script
from torch import Tensor

from draftsmith.inference.diffuse import DiffuseConfig, diffuse
from draftsmith.inference.step import Step, best
from draftsmith.inference.strategies import STRATEGIES, Confidence, Credit, Strategy, Threshold, rule_of, strategy_of
from draftsmith.kernels.unmask import Statistics, choose
from draftsmith.losses.probs import SamplingParams


def by_confidence(confidence_BC: Tensor, open_BC: Tensor) -> Tensor:
    return confidence_BC


def neighbours(hidden_BCD: Tensor) -> Tensor:
    c = torch.arange(hidden_BCD.shape[1])
    return ((c[:, None] - c).abs() == 1).double().expand(len(hidden_BCD), -1, -1)


def look_ahead(number: int, ids_BT: Tensor, positions_BT: Tensor) -> Tensor:
    """Sure of everything once the third place is decided."""
    start_T4V = torch.stack([logits_of(p, i + 1) for i, p in enumerate([0.95, 0.6, 0.5, 0.4])])
    then_T4V = torch.stack([logits_of(0.92, i + 1) for i in range(4)])
    third_B = ids_BT[:, 3] != MASK
    at_BT = (positions_BT - 1).clamp(min=0)
    return torch.where(third_B[:, None, None], then_T4V[at_BT], start_T4V[at_BT])


# Of every strategy: settings, what the denoiser says (tests/scripted_denoiser.py), places decided by each pass; then what
# else the case needs.
CASES: dict[str, tuple[dict[str, Any], Any, list[set[int]], dict[str, Any]]] = {
    "fixed": ({"steps": 3}, [[0.5, 0.9, 0.4, 0.8, 0.3, 0.7]], [{1, 3}, {0, 5}, {2, 4}], {}),
    "threshold": ({}, [[0.95, 0.5, 0.91, 0.4, 0.6, 0.3]], [{0, 2}, {4}, {1}, {3}, {5}], {}),
    # (n + 1)(1 - c) = .1, .3, .8 | 1.25 stops; .5 | 1.5; 1.0 is not less than 1, so one by force; one by force
    "factor": ({}, [[0.4, 0.95, 0.75, 0.8, 0.5, 0.9]], [{1, 3, 5}, {2}, {4}, {0}], {}),
    # entropies: .99 -> .077, .95 -> .302, .945 -> .327, .9 -> .533, .5 -> 1.73; before the third lie .154, the fourth .456
    "entropy_bound": ({}, [[0.5, 0.99, 0.95, 0.9, 0.99, 0.945]], [{1, 2, 4}, {3, 5}, {0}], {}),
    "entropy": ({}, [[0.5, 0.99, 0.95, 0.9, 0.99, 0.95]], [{1, 2, 4, 5}, {3}, {0}], {}),
    # differences .05, .325 and .25, while confidences are in another order
    "margin": ({}, [[(0.5, 1, 0.45), 0.4, (0.45, 3, 0.2)]], [{1}, {2}, {0}], {}),
    # no high one: the best of the run 1..5, twice; then of 2..3, 5 being too low; then by force
    "hierarchy": ({}, [[0.95, 0.7, 0.65, 0.5, 0.69, 0.6]], [{0}, {1}, {4}, {2}, {5}, {3}], {}),
    # threshold; by force; steady for three passes; closed in by two decided neighbours; by force
    "r2": ({}, [[0.85, 0.3, 0.82, 0.95, 0.7, 0.2]], [{3}, {0}, {2}, {4}, {1}, {5}], {}),
    # by force while there are not two calm passes behind
    "klass": ({}, [[0.95, 0.96, 0.97, 0.98]], [{3}, {2}, {0, 1}], {}),
    # gaps: .5 -> 2.08 twice, .97 -> 5.56, which is enough in the middle
    "prophet": ({}, [[0.53, 0.52, 0.51, 0.5]] * 2 + [[0.97] * 4], [{0}, {1}, {2, 3}], {}),
    # the block ends at the delimiter 7; the next one goes on behind it
    "adablock": ({"delimiters": (7,)}, [[0.6, 0.55, (0.5, 7), 0.95, 0.95, 0.95]], [{0}, {1}, {2}, {3, 4, 5}], {"ids": [1, 2, 7, 4, 5, 6]}),
    # the end's .9 counts .36, then .495; behind it nothing is decided any more
    "eos_rejection": ({}, [[0.5, 0.4, (0.9, EOS), 0.3]], [{0}, {2}, {1}], {"ids": [1, 2, EOS]}),
    "ascending": ({}, [[0.9, 0.8, 0.7, 0.6, 0.5, 0.4, 0.3]], [{0}, {1, 2}, {3, 4, 5, 6}], {}),
    "local_leap": ({"radius": 1}, [[0.8, 0.95, 0.76, 0.8, 0.5]], [{0, 1, 2}, {3}, {4}], {}),
    # .85 with one pass of credit: .85 * 1.968 ** .7 = 1.365; 1.365 / 1.515 = .901
    "credit": ({}, [[0.85, 0.6, 0.85, 0.92]], [{3}, {0, 2}, {1}], {}),
    # .533 and .553 are within .6, 1.73 is not; it is taken as the first, and .553, .573 behind it
    "left_prefix": ({}, [[0.9, 0.9, 0.5, 0.9, 0.9]], [{0, 1}, {2, 3, 4}], {}),
    # half a block opens the next one; the first unfinished block always decides one
    "pipeline": (
        {"blocks": 2, "add": 0.5}, [[0.5, 0.95, 0.5, 0.95, 0.6, 0.5]], [{1}, {0, 3}, {2}, {4}, {5}], {"block": 2}
    ),
    # the second pass replaces the first token; the third finds nothing to do
    "edit": ({}, [[0.96, 0.5], [(0.8, 3), 0.5]], [{0}, {1}, set()], {"ids": [3, 2]}),
    "soft": ({}, [[0.6, 0.7, 0.5]], [{1}, {0, 2}], {}),
    # two decided, so one may go: the first, whose token has .025 left; then nothing may
    "remask": (
        {}, [[0.7, 0.65, 0.5, 0.3], [(0.8, 8), 0.65, 0.7, 0.65]], [{0, 1}, {2, 3}, {0}], {"ids": [8, 2, 3, 4]}
    ),
    "learned": ({"filter": by_confidence}, [[0.6, 0.4, 0.7, 0.3]], [{0, 2}, {1}, {3}], {}),
    "independent": ({"pairs": neighbours}, [[0.9, 0.8, 0.7, 0.6]], [{0, 2}, {1, 3}], {}),
    # what the first pass foresees comes true
    "freedave": ({}, [[0.9, 0.8, 0.7, 0.6]], [{0}, {1, 2, 3}], {}),
    # the rival with the third place decided is surest, and then everything is sure
    "lopa": ({"rivals": 2}, look_ahead, [{0}, {1, 2, 3}], {"length": 4}),
    # drafted whole; the mode of block size 1 says the same of all
    "s2d2": ({}, [[0.9, 0.8, 0.7, 0.6]], [{0, 1, 2, 3}], {"causal": True, "verify": 1}),
}  # fmt: skip
NEEDED: dict[str, dict[str, Any]] = {
    "learned": {"filter": by_confidence}, "independent": {"pairs": neighbours}, "adablock": {"delimiters": (3, 7)}
}  # fmt: skip


def snapshots(denoiser: ScriptedDenoiser, final: list[int], prompt: int) -> list[list[int]]:
    """The answer before every pass, and at the end."""
    rows = [canvas if canvas.dim() == 2 else canvas.argmax(-1) for canvas, _ in denoiser.seen]
    return [*[row[0, prompt:].tolist() for row in rows], final]


@pytest.mark.parametrize("name", STRATEGIES)
def test_commit_order_worked_out_by_hand(name: str) -> None:
    settings, said, expected, more = CASES[name]
    rule = said if callable(said) else script(said)
    length = more.get("length") or len(said[0])
    denoiser = ScriptedDenoiser(rule, more.get("block", length), causal=more.get("causal", False))
    if name == "soft":  # a mix of embeddings whose largest part is the candidate looks decided: read masks from the mix
        denoiser.embed = lambda ids: torch.nn.functional.one_hot(ids, V).double() + 2 * (ids == MASK)[..., None]
    params = SamplingParams(max_new_tokens=length)
    [result] = diffuse(denoiser, [[1]], params, DiffuseConfig(strategy_of(name, settings)))
    if name == "s2d2":  # passes show parts of the text
        states = [[MASK] * 4, result.ids]
    else:
        states = snapshots(denoiser, result.ids, 1)
    if name == "soft":
        states = [
            *[[MASK if max(e) > 1 else e.index(1) for e in c[0, 1:].tolist()] for c, _ in denoiser.seen],
            states[-1],
        ]
    decided = [
        {i for i, token in enumerate(after) if token != MASK and before[i] == MASK}
        for before, after in itertools.pairwise(states)
    ]
    assert decided == expected
    assert result.ids == more.get("ids", [i + 1 for i in range(length)])
    assert result.passes is not None and result.passes.denoise == len(expected)
    assert result.passes.verify == more.get("verify", 0)


def test_every_strategy_has_a_case_and_is_described() -> None:
    assert set(CASES) == set(STRATEGIES)
    text = (Path(__file__).parents[1] / "inference/README.md").read_text(encoding="utf-8")
    table = text[text.index("| strategy | decides |") : text.index("| cache | | |")]
    assert re.findall(r"^\| `(\w+)`", table, re.MULTILINE) == list(STRATEGIES)


@pytest.mark.parametrize(
    ("name", "causal"),
    [(n, c) for n in STRATEGIES for c in (False, True) if n != "s2d2" or c],  # it is for blocks
)
def test_ends_on_random_logits(name: str, causal: bool) -> None:
    """1000 rows (500 of either kind), new random logits in every pass; the mask an id, or one behind the vocabulary."""
    random = torch.Generator().manual_seed(0)

    def rule(number: int, ids_BT: Tensor, positions_BT: Tensor) -> Tensor:
        return 3 * torch.randn(*ids_BT.shape, V, generator=random)

    rows, length = 500, 10
    denoiser = ScriptedDenoiser(rule, 4, causal=causal, shift=causal, tokens=9, mask_id=V if causal else 5)
    decode = DiffuseConfig(strategy_of(name, NEEDED.get(name)), max_rows=rows)
    prompts = [[1] * (1 + i % 6) for i in range(rows)]
    results = diffuse(denoiser, prompts, SamplingParams(max_new_tokens=length), decode)
    for result in results:
        assert len(result.ids) == length or result.ids[-1] == EOS
        assert EOS not in result.ids[:-1] and not {5 if not causal else V, 9} & set(result.ids)
        assert result.passes is not None
        assert result.passes.denoise <= (length if name != "edit" else length * 17)


def test_ties_go_to_the_lowest_place() -> None:
    for name in ("fixed", "threshold", "factor", "entropy", "margin", "hierarchy", "local_leap", "credit", "ascending"):
        denoiser = ScriptedDenoiser(script([[(0.5, 3)] * 6]), 6)
        diffuse(denoiser, [[1], [1]], SamplingParams(max_new_tokens=6), DiffuseConfig(strategy_of(name)))
        for canvas, _ in denoiser.seen:
            answer = (canvas[:, 1:] != MASK).tolist()
            assert answer[0] == answer[1] == sorted(answer[0], reverse=True), name


def test_of_neighbours_with_one_candidate_the_best_alone_is_taken() -> None:
    denoiser = ScriptedDenoiser(script([[(0.92, 3), (0.95, 3), 0.2, 0.95], [0.1, 0.1, 0.3, 0.1], [0.95] * 4]), 4)
    [result] = diffuse(denoiser, [[1]], SamplingParams(max_new_tokens=4), DiffuseConfig(strategy_of("r2")))
    assert snapshots(denoiser, result.ids, 1)[1] == [MASK, 3, MASK, 4]


def test_settings_by_name() -> None:
    assert strategy_of("threshold", {"threshold": 0.7}).select == Threshold(0.7)
    changed = strategy_of("credit", {"threshold": 0.7, "alpha": 1.0})
    assert changed == Strategy(Threshold(0.7), score=Credit(alpha=1.0))
    assert STRATEGIES["credit"].select == Threshold()
    for strategy in STRATEGIES.values():  # no name means two things
        parts = [getattr(strategy, f.name) for f in dataclasses.fields(strategy)]
        names = [f.name for part in parts if dataclasses.is_dataclass(part) for f in dataclasses.fields(part)]
        assert len(names) == len(set(names))
    with pytest.raises(ValueError, match="did you mean 'threshold'"):
        strategy_of("threshold", {"treshold": 0.7})
    with pytest.raises(ValueError, match="use one of fixed"):
        strategy_of("thresold")
    for name in ("learned", "independent"):
        with pytest.raises(ValueError, match=f"strategy {name}"):
            diffuse(ScriptedDenoiser(script([[0.5]]), 1), [[1]], SamplingParams(max_new_tokens=1),
                DiffuseConfig(STRATEGIES[name]))  # fmt: skip


@pytest.mark.parametrize("name", ["fixed", "margin", "threshold", "factor", "entropy_bound", "entropy"])
def test_the_kernels_rule_decides_what_the_strategy_does(name: str) -> None:
    """The best place where nothing else is decided included; other strategies, drawn candidates and plain statistics
    have no such rule."""
    random, strategy = torch.Generator().manual_seed(0), STRATEGIES[name]
    if name in ("fixed", "margin"):
        strategy = strategy_of(name, {"steps": 3})
    sizes: set[int] = set()
    for heat in (1, 3, 9):
        logits_BCV = heat * torch.randn(40, 7, 9, generator=random)
        open_BC = torch.rand(40, 7, generator=random) < 0.7
        open_BC[0] = False
        found = Statistics(logits_BCV)
        zeros_B, zeros_BC = torch.zeros(40).long(), torch.zeros_like(open_BC)
        step = Step(
            open_BC, open_BC, zeros_BC.long(), ~open_BC, zeros_BC.long(), found.best, found.confidence, logits_BCV,
            zeros_BC, zeros_B, zeros_B, zeros_B + 7, found=found,
        )  # fmt: skip
        assert rule_of(strategy, step) is None
        found.parts = zeros_B, zeros_B  # as if a kernel had made them
        ruled = rule_of(strategy, step)
        assert ruled is not None
        drawn = dataclasses.replace(step, confidence_BC=found.confidence.clone())
        assert (rule_of(strategy, drawn) is None) == (type(strategy.score) is Confidence)
        assert all(rule_of(STRATEGIES[other], step) is None for other in ("pipeline", "credit", "prophet", "klass"))
        found.parts = None
        got_BC = choose(found, open_BC, *ruled)
        score_BC = strategy.score(step)
        want_BC = strategy.select(step, score_BC) & open_BC
        want_BC |= best(score_BC, open_BC) & ~want_BC.any(1, keepdim=True)
        assert torch.equal(got_BC, want_BC)
        sizes |= set(got_BC.sum(1).tolist())
    assert len(sizes) > 3
