"""The plain forms of the runtime's small kernels, against what they stand for: a stable sort, the strategies of
inference/strategies.py, transformers' own modules, Medusa's heads. That the kernels equal them: test_kernels.py.

pytest tests/test_small_kernels.py
"""

import math
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaMLP, LlamaRMSNorm, LlamaRotaryEmbedding, apply_rotary_pos_emb

import draftsmith.kernels.unmask as unmask_file
from draftsmith.inference.step import Step
from draftsmith.inference.strategies import strategy_of
from draftsmith.kernels.medusa_heads import medusa_heads
from draftsmith.kernels.norm import add_norm
from draftsmith.kernels.rope import rope_write
from draftsmith.kernels.swiglu import swiglu
from draftsmith.kernels.topk import topk
from draftsmith.kernels.unmask import Rule, statistics, unmask
from draftsmith.models.cache import Cache
from draftsmith.models.drafter import Prefill
from draftsmith.models.medusa import Blocks, Medusa, MedusaConfig

DTYPES = (torch.float32, torch.bfloat16, torch.float64)


@pytest.mark.parametrize("dtype", [*DTYPES, torch.float16])
@pytest.mark.parametrize("k", [1, 5, 32])
def test_topk_is_the_head_of_a_stable_sort(dtype: torch.dtype, k: int) -> None:
    torch.manual_seed(0)
    x_RV = (torch.randn(6, 257) * 3).to(dtype)
    x_RV[0, [3, 90, 200]] = 20.0
    x_RV[1] = x_RV[1].round()
    x_RV[2] = 0
    x_RV[3] = -math.inf
    x_RV[4, 2:] = -math.inf
    got, want = topk(x_RV, k), x_RV.sort(dim=-1, descending=True, stable=True)
    assert torch.equal(got.ids_Rk, want.indices[:, :k])
    assert torch.equal(got.values_Rk, want.values[:, :k].to(got.values_Rk.dtype))
    assert torch.equal(got.lse_R, x_RV.to(got.lse_R.dtype).logsumexp(-1))
    assert topk(x_RV[:0], k).ids_Rk.shape == (0, k)


def test_statistics_are_those_of_a_softmax(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    monkeypatch.setattr(unmask_file, "CACHED", 700)  # two rows at a time
    x_RV = torch.randn(7, 300, dtype=torch.float64) * 4
    x_RV[1, [9, 4]] = 30.0  # equals: the lower index, no margin
    x_RV[2, ::2] = -math.inf
    x_RV[3] += 1e9
    x_RV[4, 8] = 60.0  # masked
    got = statistics(x_RV, 8)
    x_RV[:, 8] = -math.inf
    p_RV = x_RV.softmax(-1)
    best_R2, ids_R2 = p_RV.topk(2)
    assert got.best[1] == 4 and torch.equal(got.best[2:], ids_R2[2:, 0])
    torch.testing.assert_close(got.confidence, best_R2[:, 0])
    torch.testing.assert_close(got.margin, best_R2[:, 0] - best_R2[:, 1])
    top_R2 = x_RV.topk(2).values
    assert torch.equal(got.gap, top_R2[:, 0] - top_R2[:, 1])
    torch.testing.assert_close(got.entropy, torch.special.entr(p_RV).sum(-1), rtol=1e-6, atol=1e-12)


def test_statistics_of_one_token_and_of_none() -> None:
    x_RV = torch.full((2, 9), -math.inf)
    x_RV[0, 5] = 3.0
    got = statistics(x_RV, 700)  # a mask id may lie behind the vocabulary
    parts = (got.best, got.confidence, got.margin, got.gap, got.entropy)
    assert [x.tolist() for x in parts] == [[5, 0], [1, 0], [1, 0], [math.inf, 0], [0, 0]]
    assert got.lse.tolist() == [3, -math.inf]


# What each strategy of STRATEGIES that needs these statistics alone is, as a rule, and the settings it is tried with.
STRATEGY_RULES: dict[str, tuple[dict[str, Any], Rule]] = {
    "threshold": ({"threshold": 0.4}, Rule("threshold", "confidence", 0.4)),
    "factor": ({"factor": 1.2}, Rule("factor", "confidence", 1.2)),
    "entropy_bound": ({"bound": 1.5}, Rule("bound", "entropy", 1.5)),
    "entropy": ({"entropy": 0.9}, Rule("threshold", "entropy", 0.9)),
    "fixed": ({"steps": 3}, Rule("count", "confidence")),
    "margin": ({"steps": 2}, Rule("count", "margin")),
}


@pytest.mark.parametrize("name", STRATEGY_RULES)
def test_rules_choose_as_strategies_do(name: str) -> None:
    settings, rule = STRATEGY_RULES[name]
    strategy, forced = strategy_of(name, settings), 0
    for seed in range(40):
        torch.manual_seed(seed)
        x_BCV = torch.randn(3, 8, 40, dtype=torch.float64) * torch.rand(3, 8, 1) * 8
        x_BCV[:, 4] = x_BCV[:, 2]
        open_BC = torch.rand(3, 8) > 0.3
        open_BC[2] = False
        step = step_of(x_BCV, open_BC)
        score_BC = strategy.score(step)
        chosen_BC = strategy.select(step, score_BC)
        left_B = open_BC.sum(1)
        count_B = -(-left_B // settings["steps"]) if rule.name == "count" else None
        got = unmask(x_BCV, open_BC, rule, count_B)
        has_B = chosen_BC.any(1)
        assert torch.equal(got.chosen_BC[has_B], chosen_BC[has_B])
        first_BC = torch.where(open_BC, score_BC, -math.inf) == score_BC.masked_fill(~open_BC, -math.inf).amax(
            1, keepdim=True
        )
        for row in (~has_B & open_BC.any(1)).nonzero()[:, 0].tolist():
            assert got.chosen_BC[row].nonzero().tolist() == first_BC[row].nonzero()[:1].tolist()
            forced += 1
        assert not got.chosen_BC[2].any()
        assert torch.equal(got.left_B, (open_BC & ~got.chosen_BC).sum(1))
        torch.testing.assert_close(got.score_BC, score_BC)
    assert forced or rule.name in ("count", "bound")


def step_of(x_BCV: Tensor, open_BC: Tensor) -> Step:
    best = x_BCV.softmax(-1).max(-1)
    none_BC, none_B = torch.zeros_like(open_BC), torch.zeros(len(open_BC), dtype=torch.int64)
    return Step(
        open_BC=open_BC,
        first_BC=torch.ones_like(open_BC),
        block_BC=none_BC.long(),
        fixed_BC=none_BC,
        ids_BC=none_BC.long(),
        best_BC=best.indices,
        confidence_BC=best.values,
        logits_BCV=x_BCV,
        ends_BC=none_BC,
        passes_B=none_B,
        left_B=none_B,
        total_B=none_B,
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_layer_parts_are_bitwise_those_of_transformers(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    b, t, h, g, d, s = 2, 3, 4, 2, 16, 12
    config = LlamaConfig(hidden_size=h * d, intermediate_size=40, num_attention_heads=h, num_key_value_heads=g)
    norm, mlp = LlamaRMSNorm(h * d, eps=1e-5).to(dtype), LlamaMLP(config).to(dtype)
    norm.weight.data.normal_()
    x_BTD, residual_BTD = torch.randn(2, b, t, h * d).to(dtype)
    with torch.no_grad():
        normed, total = add_norm(x_BTD, norm.weight, 1e-5, residual_BTD)
        assert torch.equal(total, residual_BTD + x_BTD) and torch.equal(normed, norm(total))
        assert torch.equal(add_norm(x_BTD, norm.weight, 1e-5).normed, norm(x_BTD))
        assert torch.equal(mlp.down_proj(swiglu(mlp.gate_proj(x_BTD), mlp.up_proj(x_BTD))), mlp(x_BTD))
        q_BHTd, k_BGTd, v_BGTd = (torch.randn(b, n, t, d).to(dtype) for n in (h, g, g))
        ours, theirs = (Cache(b, s, 1, g, d, dtype, "cpu") for _ in "ab")
        for cache in (ours, theirs):
            cache.lengths_B.copy_(torch.tensor([5, 2]))
        positions_BT = theirs.lengths_B[:, None] + torch.arange(t)
        cos_BTd, sin_BTd = LlamaRotaryEmbedding(config)(x_BTD, positions_BT)
        want_q, want_k = apply_rotary_pos_emb(q_BHTd, k_BGTd, cos_BTd, sin_BTd)
        theirs.begin(positions_BT)
        theirs.update(want_k, v_BGTd, 0)
        got_q = rope_write(q_BHTd, k_BGTd, v_BGTd, cos_BTd, sin_BTd, *ours.kv[0], positions_BT)
        assert torch.equal(got_q, want_q) and torch.equal(ours.kv, theirs.kv)


@pytest.mark.parametrize("dtype", DTYPES)
def test_stacked_heads_are_medusas_blocks(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    heads, state_MD = [Blocks(48, 1).to(dtype) for _ in range(3)], torch.randn(5, 48).to(dtype)
    for head in heads:
        torch.nn.init.normal_(head.layers[0].weight)
    first = [head.layers[0] for head in heads]
    got = medusa_heads(state_MD, torch.stack([x.weight for x in first]), torch.stack([x.bias for x in first]))
    torch.testing.assert_close(got, torch.stack([head(state_MD) for head in heads], 1), atol=1e-6, rtol=1e-6)


def test_stacked_heads_follow_their_weights_and_stay_where_they_are(tiny: Callable[..., Any]) -> None:
    """A captured step reads the copy where it lies, so that another engine's `init` must not take its memory away."""
    drafter = Medusa(MedusaConfig(heads=2), tiny().facts)
    layer = drafter.blocks[1].layers[0]
    places = set()
    for write in (lambda: None, lambda: layer.weight.data.fill_(0.5)):  # the second is counted by nobody
        write()
        drafter.init(Prefill(1, 8, torch.device("cpu"), torch.float32))
        weight_KDD, bias_KD = drafter.first()
        assert torch.equal(weight_KDD[1], layer.weight) and torch.equal(bias_KD[1], layer.bias)
        places.add((weight_KDD.data_ptr(), bias_KD.data_ptr()))
    assert len(places) == 1
    with torch.no_grad():
        layer.weight.mul_(2)
    assert torch.equal(drafter.first()[0][1], layer.weight)


@pytest.mark.parametrize(
    ("call", "named"),
    [
        (lambda: topk(torch.zeros(2, 50), 33), "k=33"),
        (lambda: topk(torch.zeros(2, 9), 10), "k=10 of 9"),
        (lambda: topk(torch.zeros(2, 9), 0), "k=0"),
        (lambda: Rule("factor", "entropy"), "factor"),
        (lambda: Rule("bound", "margin"), "bound"),
        (lambda: Rule("most"), "most"),  # type: ignore[arg-type]
        (lambda: unmask(torch.zeros(1, 2, 9), torch.ones(1, 3) > 0, Rule()), "(1, 3)"),
        (lambda: unmask(torch.zeros(1, 2, 9), torch.ones(1, 2), Rule()), "torch.bool"),
        (lambda: unmask(torch.zeros(1, 2, 9), torch.ones(1, 2) > 0, Rule("count")), "needs count_B"),
        (lambda: unmask(torch.zeros(1, 2, 9), torch.ones(1, 2) > 0, Rule(), torch.ones(1)), "takes no count_B"),
        (lambda: add_norm(torch.zeros(2, 8), torch.zeros(7), 1e-5), "(7,)"),
        (lambda: add_norm(torch.zeros(2, 8), torch.zeros(8), 1e-5, torch.zeros(8)), "residual"),
        (lambda: swiglu(torch.zeros(2, 8), torch.zeros(2, 9)), "(2, 9)"),
        (lambda: medusa_heads(torch.zeros(2, 8), torch.zeros(3, 8, 8), torch.zeros(2, 8)), "[K, D]"),
        (lambda: medusa_heads(torch.zeros(2, 8), torch.zeros(3, 8, 8).half(), torch.zeros(3, 8)), "float16"),
        (lambda: rope_write(*[torch.zeros(1, 2, 3, 4)] * 3, *[torch.zeros(1, 3, 6)] * 2, *[torch.zeros(1, 2, 9, 4)] * 2, torch.zeros(1, 3)), "rope_write"),
    ],
)  # fmt: skip
def test_what_does_not_fit_is_refused(call: Callable[[], object], named: str) -> None:
    with pytest.raises(ValueError, match=re.escape(named)):
        call()
