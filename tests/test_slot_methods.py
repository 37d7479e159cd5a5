"""Falcon, and the methods that live inside the frozen target (dual view, prompt tokens).

An overfit that the runtime then drafts token by token; what it hands over against what training saw; frozen weights
left alone; glancing. What all methods share is in tests/test_methods.py, leaks (CASES B19) in tests/test_parity.py.

pytest tests/test_slot_methods.py
"""

import dataclasses
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from batches import one_row
from torch import Tensor

from draftsmith.configs.training import BudgetConfig, TrainConfig, check
from draftsmith.inference.engine import Engine
from draftsmith.inference.speculate import DecodeConfig, generate
from draftsmith.losses.probs import SamplingParams
from draftsmith.models import METHODS
from draftsmith.models.drafter import Batch, Commit
from draftsmith.models.inside import run_slots
from draftsmith.models.slots import MaskRule, dense_mask
from draftsmith.models.target import Target, live_states
from draftsmith.train.checkpoint import trained_tensors
from draftsmith.train.loop import LossModule

PROMPT = {"tokens": 3, "points": 100}
DUAL = {"block": 3, "anchors": None, "rank": 8}
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "falcon": ("falcon", {"block": 3, "noise": 0.0, "glance": 0.0}),
    "falcon-rounds": ("falcon", {"block": 2, "rounds": 2, "noise": 0.0, "glance": 0.0}),
    "dual_view": ("dual_view", DUAL),
    "dual_view-full": ("dual_view", DUAL | {"rank": None}),
    "bita": ("prompt_tokens", PROMPT | {"variant": "bita", "prefix": 4}),
    "ppd": ("prompt_tokens", PROMPT | {"variant": "ppd"}),
    "pass": ("prompt_tokens", PROMPT | {"variant": "pass"}),
}
INSIDE = [name for name, (method, _) in CASES.items() if method != "falcon"]


def make(name: str, target: Target, draft_ids: Tensor | None = None, spread: float = 0.0, **options: Any) -> Any:
    """`spread`: random values in every weight, so that no part is idle."""
    method, own = CASES[name]
    torch.manual_seed(3)
    drafter = METHODS[method](METHODS[method].Config(**(own | options)), target.facts, draft_ids)
    drafter.init_from_target(target)
    with torch.no_grad():
        for parameter in drafter.parameters():
            parameter += spread * torch.randn_like(parameter) * parameter.shape[-1] ** -0.5
    return drafter


def joined(batches: list[Batch], dim: int) -> Batch:
    return Batch(*(torch.cat([getattr(b, f.name) for b in batches], dim) for f in dataclasses.fields(Batch)[:4]))


def gradients(drafter: Any, batches: list[Batch], target: Target) -> tuple[Tensor, dict[str, Tensor]]:
    """Of one optimiser step over several micro-batches, as the training loop normalises it."""
    drafter.zero_grad(set_to_none=True)
    count = sum(drafter.denominators(batch, 0.0)["slots"] for batch in batches)
    touch = sum(p.sum() * 0.0 for p in drafter.parameters())  # as the loop does
    loss = sum((drafter(b, live_states(target, drafter, b), 0.0).losses["slots"] / count for b in batches), start=touch)
    loss.backward()
    return loss.detach(), {name: p.grad for name, p in drafter.named_parameters()}


def greedy(target: Target, ids: list[int], new: int) -> list[int]:
    (result,) = generate(target, [ids], SamplingParams(max_new_tokens=new, ignore_eos=True))
    return result.ids


def overfit(drafter: Any, batch: Batch, target: Target, steps: int, lr: float) -> tuple[float, float, bool]:
    """First and last loss per slot, and whether every slot ended right."""
    out, optimiser = live_states(target, drafter, batch), torch.optim.Adam(drafter.parameters(), lr=lr)
    count, losses, right = drafter.denominators(batch, 0.0)["slots"], [], False
    for step in range(steps):
        terms = drafter(batch, out, 0.0)
        losses.append(float(terms.losses["slots"].detach()) / count)
        hits = [pair for metric, pair in terms.metrics.items() if metric.startswith("accuracy")]
        right = all(float(total) == float(n) for total, n in hits)
        if right and step > 20:
            break
        optimiser.zero_grad()
        (terms.losses["slots"] / count).backward()
        optimiser.step()
    return losses[0], losses[-1], right


@pytest.mark.parametrize("reduced", [False, True])
@pytest.mark.parametrize("name", CASES)
def test_overfits_and_drafts_what_it_learned(name: str, reduced: bool, target: Target) -> None:
    """One greedy answer, of 32 tokens (prompt tokens: 8), until every slot is right; then the runtime, from the prompt
    on, accepts every draft in full."""
    torch.manual_seed(4)
    new = 8 if "prompt" in CASES[name][0] else 32
    prompt = torch.randint(3, 250, (8,)).tolist()
    answer = greedy(target, prompt, new)
    draft_ids = torch.tensor(sorted({*prompt, *answer, *range(40, 80)})) if reduced else None
    depth = 4 if name == "falcon-rounds" else 3
    drafter = make(name, target, draft_ids).train()
    batch = one_row(prompt + answer, list(range(8, 8 + new)))
    _, _, right = overfit(drafter, batch, target, 800, 5e-3 if new == 32 else 3e-2)
    assert right
    params = SamplingParams(max_new_tokens=new, ignore_eos=True)
    (result,) = generate(target, [prompt], params, drafter, DecodeConfig(k=depth))
    assert result.ids == answer
    # The first token is the prompt's own; prompt tokens have nothing to say before the first verification.
    left = new - 1 - (1 if "prompt" in CASES[name][0] else 0)
    most = -(-left // (depth + 1)) + (new - 1 - left)
    assert result.stats.verifies == most


@pytest.mark.parametrize("name", ["bita", "ppd", "pass"])
def test_prompt_tokens_halve_the_loss_of_a_batch(name: str, target: Target) -> None:
    """Four answers at once are more than a few vectors can hold, but the loss falls to half at least."""
    torch.manual_seed(6)
    prompts = [torch.randint(3, 250, (8,)).tolist() for _ in range(4)]
    rows = [one_row(p + greedy(target, p, 10), list(range(8, 18)), sample=i) for i, p in enumerate(prompts)]
    first, last, _ = overfit(make(name, target).train(), joined(rows, 0), target, 400, 3e-2)
    assert last < 0.5 * first


@pytest.mark.parametrize("name", [*CASES, "bita, 2 members"])
@pytest.mark.parametrize("tree", ["chain", "dynamic"])
def test_the_runtime_hands_over_what_training_saw(
    name: str, tree: str, tiny: Callable[..., Target], monkeypatch: pytest.MonkeyPatch, logits_of_training: Any
) -> None:
    """Every level that drafting starts from, in a batch of two, has the logits of training on the finished text; in
    float64, so that rounding cannot hide a difference."""
    torch.manual_seed(7)
    target = tiny(dtype=torch.float64)
    name, *ensemble = name.split(", ")
    options = {"members": 2} if ensemble else {}
    drafter = make(name, target, torch.arange(3, 200, 3), spread=0.3, **options).double().eval()
    prompts = [torch.randint(3, 250, (n,)).tolist() for n in (9, 6)]
    levels: list[tuple[int, int, Tensor]] = []
    start = type(drafter).start

    def watch(self: Any, state: Any, commit: Commit) -> Any:
        state, level = start(self, state, commit)
        for b, count in enumerate(commit.counts_B.tolist()):
            if count and bool(level.valid_BN[b, 0]):
                levels.append((b, int(commit.positions_BT[b, count - 1]), level.logits_BNW[b].clone()))
        return state, level

    with monkeypatch.context() as patch:
        patch.setattr(type(drafter), "start", watch)
        patch.setattr(Engine, "_rows_move", lambda self: False)  # rows are told apart by their places
        params = SamplingParams(max_new_tokens=20, ignore_eos=True)
        results = generate(target, prompts, params, drafter, DecodeConfig(k=3, tree=tree, nodes=7, width=2))
    compared = 0
    for b, (prompt, result) in enumerate(zip(prompts, results, strict=True)):
        batch = one_row([*prompt, *result.ids], list(range(len(prompt) + 20)))
        trained = logits_of_training(drafter, batch, live_states(target, drafter, batch))
        for _, at, logits_KW in (level for level in levels if level[0] == b):
            for of_depth, logits_W in zip(trained, logits_KW, strict=False):  # Falcon starts with one level
                if at in of_depth:
                    torch.testing.assert_close(logits_W, of_depth[at], atol=1e-9, rtol=1e-9)
                    compared += 1
    assert compared > 20


# Inside the target


@pytest.mark.parametrize("name", INSIDE)
def test_frozen_weights_are_nobodys_parameters(name: str, target: Target) -> None:
    """They get no gradient, stand in no optimiser and no checkpoint, and drafting leaves no hook behind."""
    drafter = make(name, target, spread=0.2)
    before = {n: p.clone() for n, p in target.named_parameters()}
    batch = one_row(list(range(10, 30)), list(range(6, 20)))
    _, grads = gradients(drafter, [batch], target)
    assert all(float(grad.norm()) > 0 for grad in grads.values())
    frozen = {id(p) for p in target.parameters()}
    assert not frozen & {id(p) for p in drafter.parameters()}
    assert all(p.grad is None and not p.requires_grad for p in target.parameters())
    assert set(trained_tensors(drafter)) == {n for n, _ in drafter.named_parameters()}
    generate(target, [[5, 6, 7]], SamplingParams(max_new_tokens=6), drafter)
    assert not any(module._forward_hooks for module in target.modules())
    assert all(torch.equal(p, before[n]) for n, p in target.named_parameters())


@pytest.mark.parametrize("name", CASES)
def test_empty_batches_leave_no_process_waiting(name: str, target: Target) -> None:
    """Nothing supervised, or nothing at all: through the loop's module every weight has a gradient, of zero."""
    drafter = make(name, target, spread=0.2)
    module = LossModule(drafter, "bf16", torch.device("cpu"))
    for batch in (one_row([5] * 12, []), one_row([], [], pad=12)):
        assert drafter.denominators(batch, 0.0) == {"slots": 0.0}
        loss, metrics = module(batch, live_states(target, drafter, batch), 0.0, {"slots": 0.0})
        loss.backward()
        assert all(p.grad is not None and not p.grad.any() for p in drafter.parameters())
        assert all(float(total) == 0 and float(count) == 0 for total, count in metrics.values())


def test_states_of_another_target_are_refused(tiny: Callable[..., Target]) -> None:
    drafter, other = make("dual_view", tiny()), tiny(seed=1)
    batch = one_row(list(range(10, 30)), list(range(6, 20)))
    with pytest.raises(ValueError, match="another target than it is bound to"):
        drafter(batch, live_states(other, drafter, batch), 0.0)


@pytest.mark.parametrize("method", ["dual_view", "prompt_tokens"])
def test_captured_states_are_refused_by_name(method: str, target: Target) -> None:
    config = TrainConfig(method, drafter=METHODS[method].Config(), budget=BudgetConfig(steps=1))
    with pytest.raises(ValueError, match=rf"{method} needs gradients through the target: set states\.source=live"):
        check(config)
    drafter = METHODS[method](METHODS[method].Config(), target.facts)
    drafter.init_from_target(target)
    batch = one_row(list(range(10, 30)), list(range(6, 20)))
    captured = dataclasses.replace(live_states(target, drafter, batch), forward=None, kv=None)
    with pytest.raises(ValueError, match=r"states\.source=live"):
        drafter(batch, captured, 0.0)


@pytest.mark.parametrize(
    "options",
    [
        {"kv_heads": 2},
        {"family": "mistral", "kv_heads": 2, "window": 6},
        {"family": "qwen3", "kv_heads": 1, "window": 6},
        {"family": "gemma3_text", "kv_heads": 2, "head_dim": 16, "window": 5, "softcap": 5.0},
        {"family": "phi3", "window": 6},
        {"family": "olmo2", "kv_heads": 2},
    ],
    ids=lambda o: o.get("family", "llama"),
)
@pytest.mark.parametrize("prefix", [0, 3])
def test_slots_behind_the_texts_keys_equal_one_pass_over_both(options: Any, prefix: int, tiny: Any) -> None:
    """Hidden states, and the gradients of inputs and prefix, as when text and slots run together."""
    target = tiny(**options)
    drafter = make("bita", target, spread=0.3, prefix=prefix)
    batch = joined(
        [one_row(list(range(10, 27)), list(range(6, 17))), one_row([7, 9, 30, 31, 8], [2, 3, 4], sample=6)], 1
    )
    slots, rule = drafter.slots(batch), MaskRule("inclusive", "causal")
    index_BQ = (slots.depth_BQ - 1).clamp(min=0)
    results = []
    for together in (False, True):
        drafter.zero_grad()
        embeds_BQD = drafter.prompt_embed[index_BQ]
        if together:
            see_BSS = dense_mask(slots, batch, rule, context_rows=True)
            if prefix:
                see_BSS = F.pad(see_BSS, (0, prefix))
                see_BSS[:, batch.ids_BT.shape[1] :, -prefix:] = True
            states = target.forward(
                torch.cat([target.embed(batch.ids_BT), embeds_BQD], 1),
                torch.cat([batch.positions_BT, slots.position_BQ], 1),
                see_BTA=see_BSS,
                prefix_kv=drafter.prefix_kv,
            )
            hidden_BQD = states.last_hidden_BTD[:, batch.ids_BT.shape[1] :]
        else:
            out = live_states(target, drafter, batch)
            hidden_BQD = run_slots(out, batch, slots, rule, embeds_BQD, drafter.prefix_kv)
        hidden_BQD = hidden_BQD[slots.document_BQ >= 0]
        hidden_BQD.square().sum().backward()
        results.append([hidden_BQD.detach(), *(p.grad.clone() for p in drafter.parameters())])
    for one, two in zip(*results, strict=True):
        torch.testing.assert_close(one, two, atol=1e-4, rtol=1e-4)


def test_a_dual_view_starts_as_the_target(target: Target) -> None:
    """Without masks in the block, the fresh second view is the first: slot 0 says what the target says."""
    drafter = make("dual_view", target, block=1)
    ids = torch.randint(3, 250, (2, 9))
    positions = torch.arange(9).expand(2, 9)
    cache = target.new_cache(2, 12)
    target.forward(ids[:, :8], positions[:, :8], cache=cache)
    cache.commit(torch.tensor([8, 8]))
    commit = Commit(ids[:, :8], torch.tensor([8, 8]), positions[:, :8], ids[:, 8], kv=cache)
    _, level = drafter.start(None, commit)
    want = target.head(target.forward(ids, positions).last_hidden_BTD[:, 8])
    torch.testing.assert_close(level.logits_BNW[:, 0], want, atol=1e-5, rtol=1e-5)


def test_the_second_view_ends_with_its_pass_even_on_errors(target: Target) -> None:
    drafter = make("dual_view", target, spread=0.5)
    ids, positions = torch.randint(3, 250, (1, 9)), torch.arange(9)[None]
    before = target.forward(ids, positions).last_hidden_BTD
    with drafter.second_view():
        assert not torch.equal(target.forward(ids, positions).last_hidden_BTD, before)
    with pytest.raises(RuntimeError, match="stop"), drafter.second_view():
        raise RuntimeError("stop")
    assert torch.equal(target.forward(ids, positions).last_hidden_BTD, before)


def test_fused_projections_are_refused_by_name(tiny: Callable[..., Target]) -> None:
    with pytest.raises(ValueError, match=r"layer 0 of tiny \(phi3\) has no projection self_attn\.q_proj of 48 to 48"):
        make("dual_view", tiny(family="phi3"))


def test_drafting_before_bind_and_past_the_block_is_refused(target: Target) -> None:
    drafter = METHODS["dual_view"](METHODS["dual_view"].Config(), target.facts)
    commit = Commit(torch.tensor([[3]]), torch.tensor([1]), torch.tensor([[0]]), torch.tensor([5]))
    with pytest.raises(ValueError, match="bind"):
        drafter.start(None, commit)
    for name, words in (("dual_view", "block of 3"), ("ppd", "3 tokens")):
        with pytest.raises(ValueError, match=words):
            make(name, target).extend(None, torch.tensor([[1]]), torch.tensor([[0]]))


# Prompt tokens


def test_variants_are_named_settings() -> None:
    config = METHODS["prompt_tokens"].Config
    bita, ppd, look_ahead = (config(variant=name).resolved() for name in ("bita", "ppd", "pass"))
    assert (bita.prefix, bita.members, bita.consecutive, bita.points, bita.objective) == (16, 1, True, 64, "ce")
    assert (ppd.prefix, ppd.members, ppd.consecutive, ppd.objective, ppd.depth_weight) == (0, 2, False, "kl", 0.8)
    assert (look_ahead.prefix, look_ahead.members, look_ahead.consecutive, look_ahead.objective) == (0, 1, False, "ce")
    assert config(variant="ppd", members=5, objective="ce").resolved() == dataclasses.replace(
        ppd, members=5, objective="ce"
    )


def test_ensembles_average_what_their_members_say(target: Target) -> None:
    """The mean of hidden states through the head is the mean of logits, as PPD has it."""
    drafter = make("ppd", target)
    hidden_BXD = torch.randn(2, 6, 48)
    want = target.head(hidden_BXD).unflatten(1, (3, 2)).mean(2)
    torch.testing.assert_close(target.head(drafter.gather_members(hidden_BXD)), want, atol=1e-5, rtol=1e-5)


# Falcon


def test_noise_and_glancing_do_not_depend_on_how_a_step_is_split(target: Target) -> None:
    """Two rows at once, as two micro-batches, and beside an empty one."""
    torch.manual_seed(2)
    rows = [one_row(torch.randint(3, 250, (24,)).tolist(), list(range(a, 22)), sample=a) for a in (5, 15)]
    drafter = make("falcon", target, spread=0.2, noise=0.2, glance=0.4).train()
    loss, grads = gradients(drafter, [joined(rows, 0)], target)
    assert all(float(grad.norm()) > 0 for grad in grads.values())
    for batches in (rows, [*rows, one_row([5] * 24, [])]):
        loss_too, grads_too = gradients(drafter, batches, target)
        torch.testing.assert_close(loss_too, loss, atol=1e-5, rtol=1e-5)
        for part, grad in grads.items():
            torch.testing.assert_close(grads_too[part], grad, atol=1e-5, rtol=1e-4, msg=lambda m, p=part: f"{p}: {m}")


def test_a_draft_needs_a_block_of_text(target: Target) -> None:
    """Prompts shorter than the block are decoded all the same; the first drafts come once there are k rows."""
    drafter = make("falcon", target, block=4)
    params = SamplingParams(max_new_tokens=12, ignore_eos=True)
    (result,) = generate(target, [[7]], params, drafter, DecodeConfig(k=4))
    assert result.ids == greedy(target, [7], 12) and result.stats.verifies >= 3


def test_figures_of_short_answers_count_the_depths_that_are_not_there(target: Target) -> None:
    """Two labels behind the anchor, blocks of three: depth 3 has no pair, and no run of three is complete."""
    drafter = make("falcon", target).eval()
    batch = one_row(list(range(10, 30)), [10, 11, 12])
    metrics = drafter(batch, live_states(target, drafter, batch), 0.0).metrics
    assert [float(metrics[f"accuracy_{d}"][1]) for d in (1, 2, 3)] == [2, 1, 0]
    assert float(metrics["run_length"][1]) == 0


def glanced(drafter: Any, monkeypatch: pytest.MonkeyPatch) -> list[tuple[Tensor, Tensor]]:
    """What `unroll` was shown, and the features it gave, call by call."""
    calls: list[tuple[Tensor, Tensor]] = []
    unroll = type(drafter).unroll

    def spy(self: Any, slots: Any, batch: Any, embed: Any, text: Any, shown_BQ: Tensor | None = None) -> Tensor:
        out = unroll(self, slots, batch, embed, text, shown_BQ)
        calls.append((shown_BQ if shown_BQ is not None else torch.zeros_like(slots.label_BQ).bool(), out.detach()))
        return out

    monkeypatch.setattr(type(drafter), "unroll", spy)
    return calls


def test_glancing_shows_answers_and_takes_their_loss(target: Target, monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(8)
    batch = one_row(torch.randint(3, 250, (60,)).tolist(), list(range(8, 60)))
    drafter = make("falcon", target, spread=0.3, glance=0.4, objective="ce").train()
    out, slots = live_states(target, drafter, batch), drafter.slots(batch)
    calls = glanced(drafter, monkeypatch)
    terms = drafter(batch, out, 0.25)
    (none_BQ, first), (shown_BQ, second) = calls
    assert not none_BQ.any() and shown_BQ.any()
    # About 0.4 * 0.75 of the misses, which are nearly all slots; in one run of each group, never all of it.
    groups = (shown_BQ & (slots.weight_BQ > 0)).view(1, -1, 3).sum(-1)
    assert groups.max() <= 2 and 0.2 < float(shown_BQ.float().mean()) < 0.4
    same_BQ = (first - second).abs().amax(-1) < 1e-6
    assert torch.equal(same_BQ, (~shown_BQ).view(1, -1, 3).all(-1).repeat_interleave(3, 1))
    left = dataclasses.replace(slots, weight_BQ=slots.weight_BQ.masked_fill(shown_BQ, 0))
    want = F.cross_entropy(target.head(second.flatten(0, 1)[left.flat_R]), left.label_ids(batch), reduction="sum")
    torch.testing.assert_close(terms.losses["slots"].detach(), want, atol=1e-3, rtol=1e-4)
    assert float(terms.metrics["accuracy_1"][1]) == 51  # metrics are the first pass's, over all
    assert drafter.denominators(batch, 0.25)["slots"] == float((slots.weight_BQ > 0).sum())


def test_every_weight_learns_under_glancing_and_autocast(target: Target) -> None:
    """The first pass makes half-precision copies of the weights without gradients; the second must not read them."""
    drafter = make("falcon", target, spread=0.3, glance=0.4).train()
    batch = one_row(list(range(10, 70)), list(range(8, 60)))
    out = live_states(target, drafter, batch)
    grads = []
    for precision in ("fp32", "bf16"):
        drafter.zero_grad(set_to_none=True)
        loss, _ = LossModule(drafter, precision, torch.device("cpu"))(batch, out, 0.0, {"slots": 100.0})
        loss.backward()
        grads.append({name: p.grad for name, p in drafter.named_parameters()})
    for name, want in grads[0].items():
        assert float(want.norm()) > 0
        assert F.cosine_similarity(grads[1][name].flatten(), want.flatten(), 0) > 0.98, name


def test_glancing_fades_and_is_off_in_evaluation(target: Target, monkeypatch: pytest.MonkeyPatch) -> None:
    batch = one_row(torch.randint(3, 250, (60,)).tolist(), list(range(8, 60)))
    drafter = make("falcon", target, glance=0.4).train()
    out = live_states(target, drafter, batch)
    calls = glanced(drafter, monkeypatch)
    shares = []
    for progress in (0.0, 0.5, 1.0):
        drafter(batch, out, progress)
        shares.append(float(calls[-1][0].float().mean()))
    drafter.eval()(batch, out, 0.0)
    assert len(calls) == 2 + 2 + 1 + 1
    assert shares[0] > 1.5 * shares[1] > 0 == shares[2] and not calls[-1][0].any()


def test_a_shown_slot_reads_its_own_answer(target: Target) -> None:
    """It stands in its place with the row k further on, and with the LSTMs' memory of what came before it."""
    torch.manual_seed(9)
    batch = one_row(torch.randint(3, 250, (30,)).tolist(), list(range(8, 30)))
    drafter = make("falcon", target, spread=0.3).eval()
    out, slots = live_states(target, drafter, batch), drafter.slots(batch)
    assert out.last_hidden_BTD is not None and out.embed is not None
    x_BTC = drafter.inputs(out.embed, out.last_hidden_BTD, batch.ids_BT.roll(-1, 1))
    text = drafter.read_text(x_BTC, batch)
    shown_BQ = torch.zeros_like(slots.label_BQ).bool()
    group = 5  # its anchor entry is t - 2
    a = int(slots.anchor_BQ[0, 3 * group])
    shown_BQ[0, 3 * group + 1] = True
    got = drafter.unroll(slots, batch, out.embed, text, shown_BQ)[0, 3 * group : 3 * group + 3]
    rows = [*range(a), a, a + 1 + 3, a + 2]
    _, z_1TD = drafter.read(x_BTC[:, rows], drafter.empty(1, x_BTC.device))
    angles = drafter.rotary(torch.arange(a + 3)[None])
    q, (k, v) = (
        drafter.self_attn.queries(z_1TD[:, a:], tuple(x[:, a:] for x in angles)),
        drafter.self_attn.keys_values(z_1TD, angles),
    )
    attended = F.scaled_dot_product_attention(q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2))
    want = drafter.finish(z_1TD[:, a:], attended.transpose(1, 2).flatten(2))[0]
    torch.testing.assert_close(got, want, atol=1e-5, rtol=1e-5)
