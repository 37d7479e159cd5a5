"""Own answers of a denoiser, the order in which it decided them, and training that hides them in that order.

pytest tests/test_own_answers.py
"""

import json
import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from scripted_denoiser import ScriptedDenoiser, V, denoiser_of, script

from draftsmith.data.batch import TargetOut
from draftsmith.data.encode import Sample, encode, encode_all, prompt_ids
from draftsmith.data.packing import collate, make_batch
from draftsmith.data.sources import Conversation, DataConfig, load_conversations, parse_record
from draftsmith.data.states import data_fingerprint
from draftsmith.inference.adapter_folder import load_adapters, save_adapters
from draftsmith.inference.decision_folder import settings_of
from draftsmith.inference.diffuse import DiffuseConfig, diffuse
from draftsmith.inference.exporters.layout import RunFacts
from draftsmith.inference.rollout import RolloutConfig, rollout_denoiser, run_rollout
from draftsmith.inference.strategies import STRATEGIES, strategy_of
from draftsmith.losses.probs import SamplingParams
from draftsmith.models.adapters import AdapterConfig, Adapters
from draftsmith.models.block_diffusion import CertaintyConfig, CertaintyForcing, certainty_objective
from draftsmith.models.diffusion import PRESETS, ObjectiveConfig
from draftsmith.models.noise import corrupt, cut
from draftsmith.models.pretrained import tiny_target
from draftsmith.train import distill_certainty
from draftsmith.train.diffusion_run import refuse_without_order

# The order of decoding


def test_order_by_hand() -> None:
    """Each token's pass; of tokens that the shift gives free, the pass that wrote the text before them."""
    params = SamplingParams(max_new_tokens=4, ignore_eos=True)
    rule = script([[0.9, 0.5, 0.7, 0.6]])
    for name, settings, wanted in (
        ("fixed", {}, [1, 4, 2, 3]),
        ("fixed", {"steps": 2}, [1, 2, 1, 2]),
        ("threshold", {"threshold": 0.65}, [1, 3, 1, 2]),
        ("threshold", {"threshold": 0.0}, [1, 1, 1, 1]),
    ):
        (result,) = diffuse(ScriptedDenoiser(rule), [[1]], params, DiffuseConfig(strategy_of(name, settings)))
        assert result.ids == [1, 2, 3, 4] and result.order == wanted

    def flat(number: int, ids_BT: torch.Tensor, positions_BT: torch.Tensor) -> torch.Tensor:
        return torch.linspace(0, 1, V).expand(*ids_BT.shape, V)

    params, at_once = SamplingParams(max_new_tokens=6, ignore_eos=True), strategy_of("threshold", {"threshold": 0.0})
    for fuse, wanted in ((True, [0, 1, 1, 1, 2, 2]), (False, [0, 1, 1, 1, 1, 2])):
        denoiser = ScriptedDenoiser(flat, 4, shift=True, causal=True)
        (result,) = diffuse(denoiser, [[1]], params, DiffuseConfig(at_once, fuse=fuse))
        assert result.order == wanted


def test_order_of_what_is_decided_again() -> None:
    """A token that an edit replaces, or that is masked and decided anew, was decided by its last pass."""
    params = SamplingParams(max_new_tokens=2, ignore_eos=True)
    rule = script([[(0.96, 3), 0.3], [(0.96, 4), 0.96]])
    (result,) = diffuse(ScriptedDenoiser(rule, 2), [[1]], params, DiffuseConfig(STRATEGIES["edit"]))
    assert result.ids == [4, 2] and result.order == [2, 2]


@pytest.mark.parametrize("shift", [False, True])
@pytest.mark.parametrize("name", [n for n in STRATEGIES if n not in ("learned", "independent", "adablock")])
def test_order_does_not_depend_on_the_batch(tiny: Callable[..., Any], name: str, shift: bool) -> None:
    target = tiny(dtype=torch.float64, layers=2, width=32, vocab=260, tokens=256)
    denoiser = denoiser_of(target, 4, 257, shift=shift)
    prompts, params = [[5, 9, 77], [44], [7, 2, 12, 90, 3]], SamplingParams(max_new_tokens=9)
    together = diffuse(denoiser, prompts, params, DiffuseConfig(STRATEGIES[name], max_rows=3))
    for prompt, row in zip(prompts, together, strict=True):
        (alone,) = diffuse(denoiser, [prompt], params, DiffuseConfig(STRATEGIES[name]))
        assert (row.ids, row.order) == (alone.ids, alone.order)
        assert row.order is not None and len(row.order) == len(row.ids)
        assert all(0 <= n <= row.passes.denoise for n in row.order)


# On disk


def ask(i: int, *more: str) -> Conversation:
    messages = [{"role": "user", "content": f"prompt {i}"}]
    for text in more:
        messages += [{"role": "assistant", "content": "old answer"}, {"role": "user", "content": text}]
    return Conversation(f"c{i}", messages)


@pytest.fixture(scope="module")
def export(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Adapters of the tiny target, some way off zero."""
    target, objective = tiny_target(), replace(PRESETS["sdar"], block=4)
    adapters = Adapters(AdapterConfig(rank=2, mask="new"), target)
    dice = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for p in adapters.trained.parameters():
            p.add_(0.2 * torch.randn(p.shape, generator=dice))
    return save_adapters(tmp_path_factory.mktemp("own") / "export", "block_diffusion", objective, adapters, RunFacts())


def lines(path: Path) -> dict[str, dict[str, Any]]:
    return {r["id"]: r for r in map(json.loads, path.read_text().splitlines())}


def test_a_denoiser_answers_as_diffuse_does(export: Path, tmp_path: Path) -> None:
    """Whatever the batch; gone on with behind the last whole line; its order reaches the sample."""
    target = tiny_target()
    denoiser = load_adapters(str(export), target).denoiser()
    params, strategy = SamplingParams(max_new_tokens=10, temperature=0.5), strategy_of("threshold", {"threshold": 0.3})
    talks = [ask(i, "more") if i % 2 else ask(i) for i in range(5)]
    made: list[dict[str, dict[str, Any]]] = []
    for rows in (1, 3):
        out = tmp_path / f"{rows}.jsonl"
        decode = DiffuseConfig(strategy, max_rows=rows)
        rollout_denoiser(denoiser, talks[:2], out, params, decode, made_by={"adapters": "a"}, order=True)
        with out.open("a") as file:
            file.write('{"id": "c2", "mess')  # what a killed run leaves
        report = rollout_denoiser(denoiser, talks, out, params, decode, made_by={"adapters": "a"}, order=True)
        assert (report.answered, report.there) == (5, 2)
        made.append(lines(out))
        for change in ({"order": False}, {"made_by": {"adapters": "b"}}):
            with pytest.raises(ValueError, match=rf"was made with {next(iter(change)).replace('made_by', 'adapters')}"):
                settings: Any = {"made_by": {"adapters": "a"}, "order": True} | change
                rollout_denoiser(denoiser, talks, out, params, decode, **settings)
    assert made[0] == made[1]
    conversations = load_conversations(DataConfig(source=str(out)))
    samples, report = encode_all(conversations, target.tokenizer, 1000)
    assert report.foreign_ids == 0 and len(samples) == 5
    for talk, sample in zip(conversations, samples, strict=True):
        record = made[0][talk.id]
        assert talk.answer_order == record["order"] and len(record["order"]) == len(record["ids"])
        prompt = prompt_ids(talk.messages[:-1], target.tokenizer)
        assert sample.order.tolist() == [-1] * len(prompt) + record["order"]
        assert sample.ids.tolist() == prompt + record["ids"]
    plain = [replace(s, order=None) for s in samples]
    assert data_fingerprint(plain) != data_fingerprint(samples)


def test_the_command(export: Path, tmp_path: Path) -> None:
    source, out = tmp_path / "prompts.jsonl", tmp_path / "a.jsonl"
    source.write_text("".join(json.dumps({"id": f"c{i}", "messages": ask(i).messages}) + "\n" for i in range(3)))
    config = RolloutConfig(
        out=str(out), data=DataConfig(source=str(source)), target="tiny", dtype="float32", adapters=str(export),
        strategy="factor", settings=("factor=0.5",), order=True, max_new_tokens=8,
    )  # fmt: skip
    run_rollout(config)
    found = lines(out)
    denoiser = load_adapters(str(export), tiny_target()).denoiser()
    decode = DiffuseConfig(strategy_of("factor", {"factor": 0.5}))
    for i in range(3):
        prompt = prompt_ids(ask(i).messages, denoiser.tokenizer)
        (result,) = diffuse(denoiser, [prompt], SamplingParams(max_new_tokens=8), decode)
        assert (found[f"c{i}"]["ids"], found[f"c{i}"]["order"]) == (result.ids, result.order)
    with pytest.raises(ValueError, match=r"made with settings = \{'factor': 0\.5\}"):
        run_rollout(replace(config, settings=("factor=0.6",)))
    for change, words in (
        ({"adapters": None}, "name its adapters"),
        ({"settings": ("factr=1",)}, "did you mean 'factor'"),
        ({"settings": ("factor",)}, "not name=value"),
        ({"endpoint": "http://x"}, "adapters belong to a local target"),
    ):
        with pytest.raises(ValueError, match=words):
            replace(config, **change)
    assert settings_of(["a=1e-1", "b=[1,2]", "c=x"]) == {"a": 0.1, "b": (1, 2), "c": "x"}


def test_what_the_reader_refuses_and_fills_in(tokenizer: Any) -> None:
    record = {"messages": [*ask(0).messages, {"role": "assistant", "content": "hi"}], "ids": [10, 11]}
    for order in ([1], [1, -1], [1, "2"], "12"):
        with pytest.raises(ValueError, match="one decoding pass"):
            parse_record({**record, "order": order}, "x:1")
    with pytest.raises(ValueError, match="one decoding pass"):
        parse_record({"messages": record["messages"], "order": [1]}, "x:1")
    ids = tokenizer("hi", add_special_tokens=False)["input_ids"]
    talk = parse_record({**record, "ids": ids, "order": list(range(3, 3 + len(ids)))}, "x:1")
    order = encode(talk, tokenizer, 0, 1000).order.tolist()
    assert order[-len(ids) - 1 :] == [*range(3, 3 + len(ids)), 2 + len(ids)]  # the end of turn that is added
    assert encode(talk, tokenizer, 0, len(order) - 1).order.tolist() == order[:-1]
    foreign = replace(talk, answer_ids=[i + 1 for i in ids])
    assert encode(foreign, tokenizer, 0, 1000).order is None


# Training


def samples_of(seed: int = 0, known: bool = True) -> list[Sample]:
    dice = torch.Generator().manual_seed(seed)
    samples = []
    for i, (n, first) in enumerate(((14, 3), (9, 1), (21, 10))):
        order = torch.randint(0, 4, (n,), generator=dice).masked_fill(torch.arange(n) < first, -1)
        supervised = torch.arange(n) >= first
        ids = torch.randint(3, 250, (n,), generator=dice)
        ids[-1] = 2  # an end token: what fills its block is trained where the objective trains it
        samples.append(Sample(i, ids, supervised, order=order if known else None))
    return samples


@pytest.mark.parametrize("padding", ["none", "mask", "train"])
@pytest.mark.parametrize("blocks", ["all", "one"])
@pytest.mark.parametrize("level", [0.1, 0.5, 0.9])
@pytest.mark.parametrize("origin", ["document", "answer"])
def test_hidden_is_what_the_last_passes_decided(padding: Any, blocks: Any, level: float, origin: Any) -> None:
    """Token by token: of each block, or one of each document, the tokens of the fewest last passes that hold the level's
    share; nothing before that block, all behind it."""
    config = CertaintyConfig(order="stored", blocks=blocks, level=level)
    base = ObjectiveConfig(block=4, shift=False, padding=padding, origin=origin)
    objective = certainty_objective(base, config)
    partly = 0
    for seed in range(6):
        text = cut(collate(samples_of(seed), seed), objective, 2, (2,))
        (copy,) = corrupt(text, objective)
        assert text.order_BT is not None
        for b in range(3):
            units: dict[int, list[int]] = {}
            for t in text.hideable_BT[b].nonzero()[:, 0].tolist():
                units.setdefault(int(text.block_BT[b, t]), []).append(t)
            counted = {int(text.block_BT[b, t]) for t in copy.counted_BT[b].nonzero()[:, 0].tolist()}
            assert counted == set(units) if blocks == "all" else len(counted) == 1
            for number, places in units.items():
                hidden = {t for t in places if copy.hidden_BT[b, t]}
                if number in counted:
                    orders = [int(text.order_BT[b, t]) for t in places]
                    drawn = float(copy.level_BT[b, places[0]])
                    assert level <= drawn <= 1
                    last = sorted(orders, reverse=True)[math.ceil(drawn * len(places)) - 1]
                    assert hidden == {t for t, o in zip(places, orders, strict=True) if o >= last}
                    partly += 0 < len(hidden) < len(places)
                    assert {t for t in places if copy.counted_BT[b, t]} == hidden
                else:
                    assert hidden == (set(places) if number > min(counted) else set())
        assert not (copy.hidden_BT & ~text.hideable_BT).any()
    assert partly or level > 0.1


def test_fill_is_decided_with_the_end() -> None:
    objective = certainty_objective(ObjectiveConfig(block=4, padding="train"), CertaintyConfig(order="stored"))
    batch = collate(samples_of())
    text = cut(batch, objective, 2, (2,))
    assert text.order_BT is not None and batch.order_BT is not None
    for b, n in enumerate((14, 9, 21)):
        fill_T = text.filler_BT[b].nonzero()[:, 0]
        assert len(fill_T) == -n % 4 and (text.order_BT[b, fill_T] == batch.order_BT[b, n - 1]).all()


def test_tokens_of_unknown_order_are_context() -> None:
    """Earlier answers of a conversation have none: they are shown, and never a label. Without any the batch is refused,
    but for one of padding alone, which a process without samples has."""
    objective = certainty_objective(ObjectiveConfig(block=4, padding="none"), CertaintyConfig(order="stored"))
    a, b, c = samples_of()
    known = a.order.clone()
    known[:7] = -1
    text = cut(collate([replace(a, order=known), b, replace(c, order=None)]), objective, 2, (2,))
    (copy,) = corrupt(text, objective)
    assert not copy.hidden_BT[0, :7].any() and copy.hidden_BT[0].any() and not copy.counted_BT[2].any()
    with pytest.raises(ValueError, match="do not say in which order"):
        corrupt(cut(collate(samples_of(known=False)), objective, 2, (2,)), objective)
    beyond = replace(a, order=torch.full_like(a.order, -1))  # its last answer lies behind the cut
    for rows in ([[]], [[beyond]]):
        (copy,) = corrupt(cut(make_batch(rows, 16, 0, 0), objective, 2, (2,)), objective)
        assert not copy.counted_BT.any()
    with pytest.raises(ValueError, match="1 of 2 samples do not say"):
        refuse_without_order([a, replace(b, order=None)])
    for wrong in ({"complementary": True}, {"weight": "inverse"}, {"scope": "token"}):
        with pytest.raises(ValueError, match=r"objective\.draw = latest"):
            replace(objective, **wrong)


@pytest.mark.parametrize("name", ["fast_dllm_v2", "sdar", "dual"])
def test_stored_order_trains_alike_in_every_batch(name: str) -> None:
    """Loss and gradients of a step do not depend on packing (1e-9, float64)."""
    target = tiny_target(torch.float64, vocab=260, tokens=256, width=32, layers=2)
    objective = replace(PRESETS[name], block=4)
    adapters = Adapters(AdapterConfig(rank=2, mask="new"), target, dual=objective.dual)
    dice = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for p in adapters.trained.parameters():
            p.add_(0.1 * torch.randn(p.shape, generator=dice))
    module = CertaintyForcing(objective, target, adapters, CertaintyConfig(order="stored"))
    a, b, c = samples_of()
    found = []
    for batches in ([[[a, b, c]]], [[[c], [b, a]]], [[[b]], [[a], [c]]]):
        module.zero_grad()
        value = 0.0
        made = [make_batch(rows, 44, 7, 1) for rows in batches]
        counts = [module.denominators(batch, 0.0) for batch in made]
        for batch in made:
            terms = module(batch, TargetOut(), 0.0)
            loss = sum(x / sum(one[k] for one in counts) for k, x in terms.losses.items())
            assert isinstance(loss, torch.Tensor)
            loss.backward()
            value += float(loss.detach())
        found.append((value, [p.grad.clone() for p in module.parameters()]))
    for value, grads in found[1:]:
        assert value == pytest.approx(found[0][0], rel=1e-9)
        for grad, wanted in zip(grads, found[0][1], strict=True):
            torch.testing.assert_close(grad, wanted, rtol=0, atol=1e-9 * max(1.0, float(wanted.abs().max())))


def test_certainty_forcing_on_own_answers(export: Path, tmp_path: Path) -> None:
    """From the command that writes answers to the script that learns from them; answers without their order are refused
    before anything is written."""
    out = tmp_path / "own.jsonl"
    denoiser = load_adapters(str(export), tiny_target()).denoiser()
    talks = [ask(i) for i in range(6)]
    decode, params = DiffuseConfig(STRATEGIES["threshold"]), SamplingParams(max_new_tokens=20)
    rollout_denoiser(denoiser, talks, out, params, decode, made_by={}, order=True)
    recipe = Path(__file__).resolve().parent.parent / "configs/certainty_quick.yaml"
    argv = ["--config", str(recipe), f"init_from={export}", "budget.steps=2", "certainty.order=stored"]
    assert distill_certainty.main([*argv, f"data.source={out}", f"run={tmp_path / 'run'}"]) == 0
    steps = map(json.loads, (tmp_path / "run/metrics.jsonl").read_text().splitlines())
    losses = [x["loss"] for x in steps if x["kind"] == "train"]
    assert len(losses) == 2 and all(math.isfinite(loss) for loss in losses)
    with pytest.raises(ValueError, match="do not say in which order they were decided"):
        distill_certainty.main([*argv, f"run={tmp_path / 'other'}"])
    assert not (tmp_path / "other/run.yaml").exists()
