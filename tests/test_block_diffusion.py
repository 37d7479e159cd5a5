"""Conversion and certainty forcing as trained modules: losses by hand, invariance, agreement with decoding.

Run: pytest tests/test_block_diffusion.py
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from batches import one_row
from torch import Tensor

from draftsmith.data.batch import Batch, TargetOut
from draftsmith.data.encode import Sample
from draftsmith.data.packing import make_batch
from draftsmith.inference.adapter_folder import Converted
from draftsmith.inference.diffuse import DiffuseConfig, diffuse
from draftsmith.inference.strategies import STRATEGIES
from draftsmith.losses.probs import SamplingParams
from draftsmith.models.adapters import AdapterConfig, Adapters
from draftsmith.models.block_diffusion import BlockDiffusion, CertaintyConfig, CertaintyForcing, ConversionConfig
from draftsmith.models.diffusion import (
    PRESETS,
    ObjectiveConfig,
    clean_entries,
    dense_mask,
    joined,
    make_rows,
    noisy_entries,
)  # fmt: skip
from draftsmith.models.noise import Copy
from draftsmith.models.on_policy import OnPolicy, OnPolicyConfig
from draftsmith.models.pretrained import tiny_target

OUT = TargetOut()


def trained(
    objective: ObjectiveConfig,
    config: CertaintyConfig | OnPolicyConfig | ConversionConfig | None = None,
    disturb: float = 0.2,
    **options: Any,
) -> Any:
    """The module of a small target whose adapters are not zero: which one, `config` says."""
    settings: dict[str, Any] = {"width": 32, "layers": 2, "heads": 2, "kv_heads": 2, "vocab": 300, "tokens": 280}
    target = tiny_target(**settings | options)
    torch.manual_seed(1)
    adapters = Adapters(AdapterConfig(rank=2, alpha=4), target, dual=objective.dual)
    with torch.no_grad():
        for parameter in adapters.trained.parameters():
            parameter.add_(torch.randn_like(parameter) * disturb)
    if isinstance(config, CertaintyConfig):
        return CertaintyForcing(objective, target, adapters, config)
    if isinstance(config, OnPolicyConfig):
        return OnPolicy(objective, target, adapters, config)
    return BlockDiffusion(objective, target, adapters, config or ConversionConfig())


def samples() -> list[Sample]:
    dice = torch.Generator().manual_seed(2)
    return [
        Sample(i, torch.randint(3, 250, (n,), generator=dice), torch.arange(n) >= first)
        for i, n, first in ((3, 12, 4), (8, 9, 1), (20, 14, 6), (21, 5, 2))
    ]


def objective_of(name: str) -> ObjectiveConfig:
    return replace(PRESETS[name], block=4)


def step(module: Any, batches: Sequence[Batch]) -> tuple[float, dict[str, Tensor]]:
    """Loss and gradients of one optimiser step over these micro-batches, as train/loop.py adds them up."""
    counts = [module.denominators(batch, 0.0) for batch in batches]
    totals = {name: sum(one[name] for one in counts) for name in counts[0]}
    module.zero_grad()
    value = 0.0
    for batch in batches:
        terms = module(batch, OUT, 0.0)
        assert terms.losses.keys() == totals.keys()
        loss = sum(x / totals[name] for name, x in terms.losses.items())
        assert isinstance(loss, Tensor)
        loss.backward()
        value += float(loss.detach())
    return value, {n: p.grad.clone() for n, p in module.named_parameters() if p.grad is not None}


def distance(found: dict[str, Tensor], wanted: dict[str, Tensor]) -> float:
    """Of two sets of gradients: the norm of their difference over the second one's norm."""
    a, b = (torch.cat([grads[name].double().flatten() for name in sorted(wanted)]) for grads in (found, wanted))
    return float((a - b).norm() / b.norm())


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-6), (torch.float64, 1e-9)])
@pytest.mark.parametrize("kind", [*PRESETS, "certainty", "certainty one", "guesses", "trajectory"])
def test_batch_split_and_accumulation_change_nothing(kind: str, dtype: torch.dtype, tolerance: float) -> None:
    """Loss relative to itself, all gradients together relative to their norm."""
    if kind.startswith("certainty"):
        blocks: Any = "one" if "one" in kind else "all"
        module = trained(objective_of("fast_dllm_v2"), CertaintyConfig(blocks=blocks), dtype=dtype)
    elif kind in ("guesses", "trajectory"):
        policy: Any = OnPolicyConfig(second=kind, redundant=1.0)  # type: ignore[arg-type]
        module = trained(objective_of("fast_dllm_v2"), policy, dtype=dtype)
    else:
        module = trained(objective_of(kind), dtype=dtype)
    a, b, c, d = samples()

    def rows(*packed: list[Sample]) -> Batch:
        return make_batch(packed, 42, 7, 1)

    whole, wanted = step(module, [rows([a, b], [c, d])])
    splits = [[rows([a, b]), rows([c, d])]]
    if kind != "sdar":  # its level belongs to a packed row
        splits += [[rows([a], [b], [c], [d])], [rows([d, b, c, a])], [rows([c]), rows([d, a]), rows([b])]]
    for split in splits:
        loss, grads = step(module, split)
        assert loss == pytest.approx(whole, rel=tolerance)
        assert grads.keys() == wanted.keys() == dict(module.named_parameters()).keys()
        assert distance(grads, wanted) <= tolerance


@pytest.mark.parametrize("block", [2, 4, 12])
@pytest.mark.parametrize("clean", ["token", "block"])
def test_one_hidden_token_is_the_autoregressive_loss(block: int, clean: Any) -> None:
    """B21. Shift on, adapters at zero, attention causal inside, the last token alone hidden: cross-entropy of the
    untouched model for that token. A block-causal clean copy agrees where it is not looked at (one block)."""
    if clean == "block" and block < 12:
        return
    objective = ObjectiveConfig(
        block=block, clean=clean, inside="causal", levels=(1.0, 1.0), complementary=False, padding="none"
    )
    module = trained(objective, disturb=0.0)
    ids = torch.randint(3, 250, (12,), generator=torch.Generator().manual_seed(block))
    target = module.passes.target
    with torch.no_grad():
        logits_1TV = target.head(target.forward(ids[None], torch.arange(12)[None]).last_hidden_BTD)
    for last in (11, 7, 1):
        batch = one_row(ids[: last + 1].tolist(), [last], pad=2)
        terms = module(batch, OUT, 0.0)
        wanted = torch.nn.functional.cross_entropy(logits_1TV[0, last - 1], ids[last])
        assert module.denominators(batch, 0.0) == {"hidden": 1.0}
        torch.testing.assert_close(terms.losses["hidden"], wanted, rtol=0, atol=1e-5)
    batch = one_row(ids.tolist(), [0])  # nothing predicts the first token: no wrap-around
    assert module.denominators(batch, 0.0) == {"hidden": 0.0} and float(module(batch, OUT, 0.0).losses["hidden"]) == 0


@pytest.mark.parametrize("name", PRESETS)
def test_loss_by_hand(name: str) -> None:
    """The weighted sum over rows, each row's cross-entropy taken from all logits; and the autoregressive term from the
    clean copy's own rows."""
    module = trained(objective_of(name), dtype=torch.float64)
    batch = make_batch([samples()[:2], samples()[2:]], 30, 7, 1)
    text, rows = module.passes.rows(batch)
    with torch.no_grad():
        clean_BTD, noisy_BQD = module.passes.run(text, rows)
    log_q = module.passes.target.head(noisy_BQD).log_softmax(-1)
    total, weights = 0.0, 0.0
    for b, q in (rows.label_BQ >= 0).nonzero().tolist():
        total -= float(log_q[b, q, rows.label_BQ[b, q]] * rows.weight_BQ[b, q])
        weights += float(rows.weight_BQ[b, q])
    with torch.no_grad():
        terms, counts = module(batch, OUT, 0.0), module.denominators(batch, 0.0)
    assert float(terms.losses["hidden"]) == pytest.approx(total, rel=1e-6)
    supervised = int(text.supervised_BT.sum())
    wanted = {"hidden": len(rows.flat_R), "weights": weights, "supervised": supervised * module.objective.copies}
    assert counts["hidden"] == pytest.approx(wanted[module.objective.normalise], rel=1e-6)
    assert ("ar" in counts) == (module.objective.ar_weight > 0)
    if "ar" in counts:
        log_q, ar, n = module.passes.target.head(clean_BTD).log_softmax(-1), 0.0, 0
        for b, t in batch.supervised_BT.nonzero().tolist():
            if batch.positions_BT[b, t] > 0:
                ar, n = ar - float(log_q[b, t - 1, batch.ids_BT[b, t]]), n + 1
        assert counts["ar"] == n and float(terms.losses["ar"]) == pytest.approx(ar * module.objective.ar_weight)


def test_a_curriculum_goes_through_its_blocks() -> None:
    """A third of the budget each; what is decoded, and held-out figures, have the last size."""
    module = trained(PRESETS["idlm"], ConversionConfig(curriculum=(1, 2, 3)))
    batch = make_batch([samples()], 42, 7, 1)
    by_size = [trained(replace(PRESETS["idlm"], block=size)) for size in (1, 2, 3)]
    for progress, size in ((0.0, 1), (0.33, 1), (0.34, 2), (0.66, 2), (0.67, 3), (1.0, 3)):
        alone = by_size[size - 1]
        assert module.denominators(batch, progress) == alone.denominators(batch, 0.0)
        with torch.no_grad():
            found, wanted = module(batch, OUT, progress), alone(batch, OUT, 0.0)
        assert {n: float(x) for n, x in found.losses.items()} == {n: float(x) for n, x in wanted.losses.items()}
    losses = [float(alone(batch, OUT, 0.0).losses["hidden"]) for alone in by_size]
    assert len(set(losses)) == 3 and module.objective.block == 3
    with pytest.raises(ValueError, match=r"curriculum = 1, 2 does not end with objective\.block = 3"):
        trained(PRESETS["idlm"], ConversionConfig(curriculum=(1, 2)))
    with pytest.raises(ValueError, match=r"objective\.block = 0"):
        trained(PRESETS["idlm"], ConversionConfig(curriculum=(0, 3)))


def test_a_diffusion_model_teaches_itself() -> None:
    """D2F by hand: the teacher reads the same noisy text without adapters, each document seeing all of itself; a hidden
    token's loss is the cross-entropy with its whole distribution, over the chance that it was hidden."""
    plain = trained(objective_of("d2f"), dtype=torch.float64)
    target, adapters, teacher = plain.passes.target, plain.passes.adapters, ConversionConfig(labels="teacher")
    with pytest.raises(ValueError, match="has no mask token of its own"):
        BlockDiffusion(plain.objective, target, adapters, teacher)
    eos = target.tokenizer.eos_token_id
    target.tokenizer = SimpleNamespace(mask_token_id=adapters.mask_id, eos_token_id=eos)
    module = BlockDiffusion(plain.objective, target, adapters, teacher)
    batch = make_batch([samples()[:2], samples()[2:]], 30, 7, 1)
    _, rows = module.passes.rows(batch)
    alike_BQQ = rows.document_BQ[:, :, None] == rows.document_BQ[:, None]
    with torch.no_grad():
        states = target.forward(rows.ids_BQ, rows.position_BQ, see_BTA=alike_BQQ)
        p_BQV = target.head(states.last_hidden_BTD).softmax(-1)
        log_q_BQV = target.head(module.passes.run(*module.passes.rows(batch))[1]).log_softmax(-1)
    total = 0.0
    for b, q in (rows.label_BQ >= 0).nonzero().tolist():
        total -= float((p_BQV[b, q] * log_q_BQV[b, q]).sum() * rows.weight_BQ[b, q])
    loss = module(batch, OUT, 0.0).losses["hidden"]
    assert float(loss) == pytest.approx(total, rel=1e-6)  # weights are fp32
    loss.backward()
    grads = [p.grad for p in module.parameters()]
    assert all(g is not None and float(g.abs().sum()) > 0 for g in grads)
    assert not any(p.grad is not None for n, p in target.named_parameters() if "lora" not in n)
    assert float(plain(batch, OUT, 0.0).losses["hidden"]) != pytest.approx(total, rel=1e-2)
    for changes, words in (({"layout": "whole"}, "needs layout=single"), ({"layout": "pair"}, "needs layout=single")):
        with pytest.raises(ValueError, match=words):
            teacher.check(replace(plain.objective, **changes), adapters.config)
    for config, words in ((AdapterConfig(kind="full"), "kind=lora"), (AdapterConfig(mask="new"), "knows no such mask")):
        with pytest.raises(ValueError, match=words):
            teacher.check(plain.objective, config)


@pytest.mark.parametrize("blocks", ["all", "one"])
@pytest.mark.parametrize("name", ["fast_dllm_v2", "sdar", "dual", "d2f"])
def test_certainty_by_hand(name: str, blocks: Any) -> None:
    """Per sample and copy: mean cross-entropy of the hidden tokens, mean entropy at 0.5 of the correct ones; summed over
    samples, whatever shares their batch."""
    config = CertaintyConfig(beta=2.0, blocks=blocks)
    objective = objective_of(name)
    if (objective.layout != "pair" and blocks == "all") or (objective.dual and blocks == "one"):
        with pytest.raises(ValueError, match=r"certainty\.blocks|schedule = semi_ar"):
            trained(objective, config)
        return
    module = trained(objective, config, dtype=torch.float64, disturb=0.6)
    batch = make_batch([samples()[:3], samples()[3:]], 40, 7, 1)
    text, rows = module.passes.rows(batch)
    with torch.no_grad():
        logits = module.passes.target.head(module.passes.run(text, rows)[1])
    labels = rows.label_BQ.clone()
    told = (labels >= 0).nonzero().tolist()
    for b, q in told[::2]:  # a model that is right now and then
        labels[b, q] = logits[b, q].argmax()
    module.passes.rows = lambda _: (text, replace(rows, label_BQ=labels))
    by_unit: dict[tuple[int, int], list[tuple[float, float | None]]] = {}
    for b, q in told:
        log_q = logits[b, q].log_softmax(-1)
        warm = (logits[b, q] / 0.5).log_softmax(-1)
        right = int(log_q.argmax()) == int(labels[b, q])
        unit = int(rows.document_BQ[b, q]), int(rows.copy_BQ[b, q])
        by_unit.setdefault(unit, []).append(
            (-float(log_q[labels[b, q]]), -float((warm.exp() * warm).sum()) if right else None)
        )
    ce = sum(sum(x for x, _ in unit) / len(unit) for unit in by_unit.values())
    sure = [[h for _, h in unit if h is not None] for unit in by_unit.values()]
    entropy = sum(sum(hs) / len(hs) for hs in sure if hs)
    with torch.no_grad():
        terms = module(batch, OUT, 0.0)
    assert float(terms.losses["ce"]) == pytest.approx(ce, rel=1e-9)
    assert float(terms.losses["entropy"]) == pytest.approx(2 * entropy, rel=1e-9)
    assert module.denominators(batch, 0.0) == dict.fromkeys(("ce", "entropy"), float(len({d for d, _ in by_unit})))


@pytest.mark.parametrize(
    ("clean", "origin", "decoded"),
    [("block", "random", "document"), ("token", "random", "answer"), ("block", "answer", "answer")],
)
def test_where_decoding_counts_blocks_from(clean: Any, origin: Any, decoded: str) -> None:
    """A block-causal model that never saw a prompt as one block is not shown one."""
    objective = replace(objective_of("bd3lm"), clean=clean, origin=origin)
    assert Converted(objective, trained(objective).passes.adapters).denoiser().origin == decoded
    fixed = replace(PRESETS["dual"], block=4, origin="document")
    assert Converted(fixed, trained(fixed).passes.adapters).denoiser().origin == "answer"


@pytest.mark.parametrize("name", PRESETS)
@pytest.mark.parametrize(("prompt", "length"), [(5, 10), (9, 7)])
def test_training_rows_equal_decoding_rows(name: str, prompt: int, length: int) -> None:
    """Every state that decoding reads is one that training would have given the same text, hidden in the same places:
    in a prompt's unfinished block, in whole blocks, and in a last one that the budget cuts."""
    # Blocks that may begin anywhere begin as decoding has them. In `dual` behind an anchor, which is the prompt's last.
    origins = {"random": "document" if name == "dual" else "answer"}
    base = objective_of(name)
    objective: Any = replace(base, origin=origins.get(base.origin, base.origin), padding="none")
    module = trained(objective)
    denoiser = Converted(base, module.passes.adapters).denoiser()
    seen: list[tuple[list[int], list[int], Tensor]] = []
    run = denoiser.denoise

    def denoise(canvas: Tensor, positions_BT: Tensor, **options: Any) -> Tensor:
        out = run(canvas, positions_BT, **options)
        if options["view"] == "noisy":
            seen.append((canvas[0].tolist(), positions_BT[0].tolist(), out[0]))
        return out

    denoiser.denoise = denoise  # type: ignore[method-assign]
    asked = list(range(20, 20 + prompt))
    params = SamplingParams(max_new_tokens=length, ignore_eos=True)
    (result,) = diffuse(denoiser, [asked], params, DiffuseConfig(STRATEGIES["fixed"]))
    text, _ = module.passes.rows(one_row([*asked, *result.ids], list(range(prompt, prompt + length))))
    compared = 0
    for ids, places, found_TD in seen:
        masked = [place for place, token in zip(places, ids, strict=True) if token == denoiser.mask_id]
        if not masked:  # the prompt's pass
            continue
        hidden_1T = torch.isin(text.positions_BT, torch.tensor(masked))
        copy = Copy(hidden_1T, text.supervised_BT, torch.ones(hidden_1T.shape, dtype=torch.float64))
        rows = make_rows(text, [copy], objective, denoiser.mask_id)
        with torch.no_grad():
            wanted_QD = module.passes.run(text, rows)[1][0]
        block = int(text.block_BT[0, masked[-1]])
        for q, place in enumerate(rows.position_BQ[0].tolist()):
            if rows.block_BQ[0, q] == block and place in places:
                torch.testing.assert_close(found_TD[places.index(place)], wanted_QD[q], rtol=0, atol=1e-5)
                compared += 1
    assert compared > length


@pytest.mark.parametrize("name", [n for n, c in PRESETS.items() if c.layout == "pair" and not c.dual])
def test_gradients_flow_through_the_clean_copy(name: str) -> None:
    """Two passes and one over [clean | noisy] give the adapters the same gradients."""
    module = trained(objective_of(name), dtype=torch.float64)
    passes, objective = module.passes, module.objective
    text, rows = passes.rows(make_batch([samples()], 42, 7, 1))
    both = joined(clean_entries(text), noisy_entries(rows, objective, text.ids_BT.shape[1]))
    weight = torch.randn(both.place.shape[1], 32, dtype=torch.float64, generator=torch.Generator().manual_seed(4))

    def grads(hidden_1SD: Tensor) -> list[Tensor]:
        return list(torch.autograd.grad((hidden_1SD * weight).sum(), list(module.parameters())))

    two = grads(torch.cat([x for x in passes.run(text, rows) if x is not None], dim=1))
    ids, positions = torch.cat([text.ids_BT, rows.ids_BQ], 1), torch.cat([text.positions_BT, rows.position_BQ], 1)
    with passes.adapters.view("noisy"):
        out = passes.target.forward(ids, positions, see_BTA=dense_mask(objective, both, both))
        one = grads(out.last_hidden_BTD)
    for a, b in zip(two, one, strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=1e-9 * float(b.abs().max()))


@pytest.mark.parametrize("kind", ["sdar", "dual", "set_block", "certainty"])
def test_half_precision_keeps_fp32_masters(kind: str) -> None:
    """A bf16 target under autocast, as recipes run it: gradients are finite, in fp32, and like those of fp32."""
    certainty = CertaintyConfig() if kind == "certainty" else None
    objective = objective_of("fast_dllm_v2" if certainty else kind)
    batch = [make_batch([samples()], 42, 7, 1)]
    module = trained(objective, certainty, dtype=torch.bfloat16)
    with torch.autocast("cpu", torch.bfloat16):
        loss, grads = step(module, batch)
    exact, wanted = step(trained(objective, certainty), batch)
    assert loss == pytest.approx(exact, rel=0.1)
    assert grads.keys() == wanted.keys() and all(g.dtype == torch.float32 for g in grads.values())
    a, b = (torch.cat([g.flatten() for g in x.values()]) for x in (grads, wanted))
    assert float(torch.cosine_similarity(a, b, dim=0)) > 0.95


def test_dual_leaves_the_clean_copy_alone() -> None:
    module = trained(objective_of("dual"))
    batch = make_batch([samples()], 42, 7, 1)
    text, rows = module.passes.rows(batch)
    clean_BTD, noisy_BQD = module.passes.run(text, rows)
    assert not clean_BTD.requires_grad and noisy_BQD.requires_grad
    original = trained(objective_of("dual"), disturb=0.0)
    assert torch.equal(clean_BTD, original.passes.run(text, rows)[0])
    with pytest.raises(ValueError, match="another kind of objective"):
        BlockDiffusion(objective_of("sdar"), module.passes.target, module.passes.adapters)


def test_the_module_holds_trained_tensors_only() -> None:
    module = trained(objective_of("sdar"))
    assert all(p.requires_grad for p in module.parameters())
    assert module.state_dict().keys() == dict(module.named_parameters()).keys()
    adapters = module.passes.adapters
    dropped = adapters.layers["model.layers.0.mlp.up_proj"].lora_dropout
    module.train()
    assert dropped.training and not module.passes.target.training
    module.eval()
    assert not dropped.training


@pytest.mark.parametrize("preset", ["fast_dllm_v2", "d2f"])  # of the layouts pair and single
def test_dropout_belongs_to_the_token(preset: str) -> None:
    """Packing, batch and accumulation do not change its coins, nor does it draw from torch's generator; the epoch does."""
    a, b, c, d = samples()
    target = tiny_target(width=32, layers=2, heads=2, kv_heads=2, vocab=300, tokens=280, dtype=torch.float64)
    torch.manual_seed(1)
    adapters = Adapters(AdapterConfig(rank=2, alpha=4, dropout=0.4), target, dual=objective_of(preset).dual)
    for parameter in adapters.trained.parameters():
        parameter.data.add_(torch.randn_like(parameter) * 0.2)
    module = BlockDiffusion(objective_of(preset), target, adapters)

    def at(packed: list[list[list[Any]]], epoch: int = 1) -> tuple[float, dict[str, Tensor]]:
        return step(module, [make_batch(rows, 42, 7, epoch) for rows in packed])

    state = torch.get_rng_state()
    module.train()
    loss, grads = at([[[a, b], [c, d]]])
    for packed in ([[[d, b, c, a]]], [[[c], [a], [b, d]]], [[[c], [b]], [[a, d]]]):
        again, found = at(packed)
        assert again == pytest.approx(loss, rel=1e-9) and distance(found, grads) < 1e-6
    assert torch.equal(state, torch.get_rng_state())
    assert abs(at([[[a, b], [c, d]]], epoch=2)[0] - loss) > 1e-3
    module.eval()
    assert abs(at([[[a, b], [c, d]]])[0] - loss) > 1e-3


def test_dropout_of_rows_that_nobody_named_is_refused() -> None:
    target = tiny_target(layers=1)
    adapters = Adapters(AdapterConfig(rank=2, dropout=0.5), target)
    adapters.train()
    with adapters.view("noisy"), pytest.raises(ValueError, match=r"samples are not known.*set adapters\.dropout=0"):
        target.forward(torch.tensor([[5, 9]]), torch.tensor([[0, 1]]), see_BTA=torch.ones(1, 2, 2, dtype=torch.bool))


def test_full_training_moves_every_weight() -> None:
    target = tiny_target(width=32, layers=2, heads=2, kv_heads=2, vocab=300, tokens=280, tied=True)
    module = BlockDiffusion(objective_of("sdar"), target, Adapters(AdapterConfig(kind="full"), target))
    loss, grads = step(module, [make_batch([samples()], 42, 7, 1)])
    assert loss > 0 and grads.keys() == dict(module.named_parameters()).keys()
    assert all(float(grad.abs().sum()) > 0 for name, grad in grads.items() if name != "trained.mask_row")
