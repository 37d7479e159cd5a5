"""Consistency losses: equal to plain passes per block, who sees whom, which rows count, what is shown, and by whom labelled.

Run: pytest tests/test_consistency.py
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from batches import one_row
from plain_consistency import plain_parts
from test_block_diffusion import OUT, distance, step
from torch import Tensor

from draftsmith.data.batch import Batch
from draftsmith.data.encode import Sample
from draftsmith.data.jacobi_states import PlacedStates, pack_states
from draftsmith.data.packing import make_batch
from draftsmith.models.adapters import AdapterConfig, Adapters
from draftsmith.models.block_diffusion import BlockDiffusion
from draftsmith.models.consistency import PRESETS, Consistency, ConsistencyConfig
from draftsmith.models.diffusion import ObjectiveConfig, clean_entries, clean_pass, dense_mask, joined, noisy_entries
from draftsmith.models.pretrained import tiny_target
from draftsmith.models.trajectories import SIGHT, Walk

TOKENS = 280


def trained(
    config: ConsistencyConfig, kind: Any = "lora", mask: Any = None, disturb: float = 0.2, **options: Any
) -> Any:
    """The module of a small target whose adapters are not zero."""
    settings: dict[str, Any] = {"width": 32, "layers": 2, "heads": 2, "kv_heads": 2, "vocab": 300, "tokens": TOKENS}
    target = tiny_target(**settings | options)
    torch.manual_seed(1)
    mask = mask or ("trained" if config.start == "mask" else "none")
    adapters = Adapters(AdapterConfig(kind=kind, rank=2, alpha=4, mask=mask), target)
    with torch.no_grad():
        for parameter in adapters.trained.parameters() if kind == "lora" else ():
            parameter.add_(torch.randn_like(parameter) * disturb)
    return Consistency(config, target, adapters)


def placed(states_In: Tensor) -> PlacedStates:
    """States of a whole sample, as a sample keeps them."""
    return PlacedStates(pack_states(states_In, 4, "prompt"), 0)


def sample_of(i: int, n: int, first: int, block: int) -> Sample:
    """An answer with made-up states of its blocks: in each at least one token more is settled than in the last."""
    dice = torch.Generator().manual_seed(i)
    ids, answer = torch.randint(3, 250, (n,), generator=dice), torch.arange(n) >= first
    states = [ids] * (block + 1)
    for lo in range(first, n, block):
        hi, settled, state = min(lo + block, n), 0, 0
        while lo + settled < hi:
            row = states[state] = states[state].clone()
            guesses = torch.randint(3, 250, (hi - lo,), generator=dice)
            known = torch.rand(hi - lo, generator=dice) < 0.3
            known[:settled], known[settled] = True, False
            guesses[settled] = (ids[lo + settled] + 1) % 250
            row[lo:hi] = torch.where(known, ids[lo:hi], guesses)
            settled += 1 + int(torch.randint(2, (1,), generator=dice))
            state += 1
    return Sample(i, ids, answer, states=placed(torch.stack(states)))


def samples(block: int = 4) -> list[Sample]:
    return [sample_of(i, n, first, block) for i, n, first in ((3, 22, 4), (8, 9, 1), (20, 18, 6), (21, 5, 2))]


def config_of(name: str, **changes: Any) -> ConsistencyConfig:
    """A preset with small blocks."""
    return replace(PRESETS[name], block=4, window=min(PRESETS[name].window, 3), **changes)


# In float64 the framework's norms still compute in fp32, and gradients pass them added up or one by one.
@pytest.mark.parametrize(("dtype", "tolerance", "slack"), [(torch.float32, 1e-5, 1e-5), (torch.float64, 1e-10, 1e-6)])
@pytest.mark.parametrize(
    ("preset", "labels", "kind"),
    [("cllm", "self", "lora"), ("cllm", "self", "full"), ("cllm", "base", "lora"), ("jacobi_forcing", "self", "lora")],
)
def test_packed_step_equals_three_plain_passes_per_block(
    preset: str, labels: str, kind: str, dtype: torch.dtype, tolerance: float, slack: float
) -> None:
    module = trained(config_of(preset, labels=labels), kind, dtype=dtype)
    sample = sample_of(5, 43, 6, 4)
    batch = make_batch([[sample]], None, 7, 1)
    found, grads = step(module, [batch])
    module.zero_grad()
    parts = list(plain_parts(module, sample.ids, module.shown(batch).state_BT[0], 6))
    loss = torch.stack(parts).sum()
    loss.backward()
    wanted = {n: p.grad.clone() for n, p in module.named_parameters() if p.grad is not None}
    assert len(parts) == 10 and module.denominators(batch, 0.0)["consistency"] >= 8
    assert found == pytest.approx(float(loss.detach()), rel=tolerance)
    assert grads.keys() == wanted.keys() and distance(grads, wanted) <= slack


@pytest.mark.parametrize("window", [1, 2, 3])
def test_who_sees_whom(window: int) -> None:
    """Jacobi Forcing's rule, token by token: a noisy one sees what is before its window clean, and the window's noisy ones up
    to itself; a clean one sees clean text up to itself; documents are apart."""
    block = 2
    module = trained(
        replace(PRESETS["cllm"], block=block, window=window, states="noise", start="random", reach="block")
    )
    two_turns = torch.tensor([t in range(3, 12) or t in range(14, 21) for t in range(21)])
    dice = torch.Generator().manual_seed(0)
    a = Sample(0, torch.randint(3, 250, (21,), generator=dice), two_turns)
    b = Sample(1, torch.randint(3, 250, (9,), generator=dice), torch.arange(9) >= 2)
    batch = make_batch([[a, b]], 33, 0, 0)
    shown = module.shown(batch)
    rows, text = module.rows(shown, shown.state_BT), shown.blocks.text
    clean, noisy = clean_entries(text), noisy_entries(rows, SIGHT, 33)
    seen_QS = dense_mask(SIGHT, joined(clean, noisy), joined(clean, noisy))[0]

    def place_of(t: int) -> tuple[int, int, int]:
        """(document, place in it, first place of the window)."""
        document, place = (0, t) if t < 21 else (1, t - 21)
        first = next((s for s, e in (((3, 12), (14, 21)) if not document else ((2, 9),)) if s <= place < e), place)
        size = block * window
        return document, place, first + (place - first) // size * size

    # A segment whose one token is its answer's last is read by nobody.
    alone = sum(n % (block * window) == 1 for n in (9, 7, 7))
    assert int((rows.document_BQ[0] >= 0).sum()) == 9 + 7 + 7 - alone
    tokens = [(t, False) for t in range(33)] + [(int(t), True) for t in rows.token_BQ[0]]
    for q, (tq, noisy_query) in enumerate(tokens):
        for k, (tk, noisy_key) in enumerate(tokens):
            if tq >= 30 or tk >= 30:  # padding
                assert bool(seen_QS[q, k]) == (q == k)
                continue
            (dq, pq, wq), (dk, pk, wk) = place_of(tq), place_of(tk)
            if noisy_query:
                wanted = (wq == wk and pk <= pq) if noisy_key else pk < wq
            else:
                wanted = not noisy_key and pk <= pq
            assert bool(seen_QS[q, k]) == (wanted and dq == dk), (q, k)


@pytest.mark.parametrize("labels", ["self", "local"])
def test_a_fixed_point_costs_nothing(labels: Any) -> None:
    """B26 b: states that are all the fixed point have no loss, by rows that count, and by rows that are made to."""
    ids, answer = torch.arange(10, 34), torch.arange(24) >= 5
    batch = make_batch([[Sample(0, ids, answer, states=placed(ids[None]))]], None, 0, 0)
    module = trained(config_of("cllm", labels=labels))
    assert module.denominators(batch, 0.0) == {"consistency": 0.0, "ar": 19.0}
    terms = module(batch, OUT, 0.0)
    assert float(terms.losses["consistency"].detach()) == 0 and float(terms.metrics["right"][1]) == 0
    terms.losses["consistency"].backward()
    module = trained(config_of("cllm", labels=labels, reach="block"))
    assert module.denominators(batch, 0.0)["consistency"] == 5
    assert abs(float(module(batch, OUT, 0.0).losses["consistency"].detach())) < 1e-6


def test_which_rows_count() -> None:
    """B05: ids 10..21, answer at 5..8, blocks of 2. The row of 4 is clean; the last answer's token is a label and no row."""
    ids = list(range(10, 22))
    config = config_of("make_some_noise")
    for block, states, reach, wanted in (
        (2, [], "block", [5, 6, 7]),
        (4, [], "block", [5, 6, 7]),
        (2, [5, 7], "divergence", [5, 6, 7]),
        (2, [6, 8], "divergence", [6]),  # the row of 8, the answer's end, predicts nothing
        (4, [7], "divergence", [7]),
        (4, [6], "divergence", [6, 7]),
    ):
        batch = one_row(ids, [5, 6, 7, 8], pad=3)
        if states:
            state = torch.tensor(ids + [2] * 3)
            state[states] = 99
            batch = replace(batch, states_BIT=torch.stack([state, batch.ids_BT[0]])[None])
        module = trained(
            replace(config, block=block, reach=reach, states="stored" if states else "noise", start="last")
        )  # type: ignore[arg-type]
        shown = module.shown(batch)
        rows = module.rows(shown, shown.state_BT)
        told = {int(t): int(x) for t, x in zip(rows.token_BQ[0], rows.label_BQ[0], strict=True) if x >= 0}
        assert told == {t: ids[t + 1] for t in wanted}
        assert module.denominators(batch, 0.0) == {"consistency": len(wanted), "ar": 4.0}
        assert float(module(batch, OUT, 0.0).metrics["ar_loss"][1]) == 4


@pytest.mark.parametrize("preset", PRESETS)
def test_padding_and_what_follows_change_nothing(preset: str) -> None:
    """B07, B16: pad id = end id; 100 tokens more that nobody wrote; rows of 512."""
    module = trained(config_of(preset), dtype=torch.float64)
    (sample, *_) = samples()
    assert sample.states is not None
    states_In = sample.states.dense(sample.ids)
    sample.ids[-1] = states_In[:, -1] = 2  # the end
    sample = replace(sample, states=placed(states_In))
    longer = Sample(
        3,
        torch.cat([sample.ids, torch.arange(10, 110)]),
        torch.cat([sample.supervised, torch.zeros(100, dtype=torch.bool)]),
        states=sample.states,
    )
    whole, wanted = step(module, [make_batch([[sample]], None, 7, 1)])
    for one, width in ((sample, 512), (longer, None), (longer, 512)):
        batch = make_batch([[one]], width, 7, 1)
        batch.ids_BT[batch.samples_BT < 0] = 2
        if batch.states_BIT is not None:
            batch.states_BIT[:, :, batch.samples_BT[0] < 0] = 2
        assert module.denominators(batch, 0.0)["ar"] == 18
        loss, grads = step(module, [batch])
        assert loss == pytest.approx(whole, abs=1e-9) and distance(grads, wanted) <= 1e-9


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-6), (torch.float64, 1e-9)])
@pytest.mark.parametrize("kind", [*PRESETS, "local", "base", "online", "tokens"])
def test_batch_split_and_accumulation_change_nothing(kind: str, dtype: torch.dtype, tolerance: float) -> None:
    changes: dict[str, dict[str, Any]] = {
        "local": {"labels": "local", "objective": "jsd"},
        "base": {"labels": "base", "objective": "tv", "temperature": 2.0},
        "online": {"states": "online", "start": "text"},
        "tokens": {"normalise": "tokens", "objective": "reverse_kl"},
    }
    config = config_of(kind) if kind in PRESETS else config_of("cllm", **changes[kind])
    module = trained(config, dtype=dtype)
    a, b, c, d = samples()
    if kind == "online":
        a, b, c, d = greedy(module)

    def rows(*packed: list[Sample]) -> Batch:
        return make_batch(packed, 44, 7, 1)

    whole, wanted = step(module, [rows([a, b], [c, d])])
    for split in (
        [rows([a, b]), rows([c, d])],
        [rows([a], [b], [c], [d])],
        [rows([c]), rows([d, a]), rows([b])],
        [rows([a]), rows([b]), rows([c]), rows([d])],
    ):
        loss, grads = step(module, split)
        assert loss == pytest.approx(whole, rel=tolerance)
        assert grads.keys() == wanted.keys() and distance(grads, wanted) <= tolerance


def greedy(module: Any) -> list[Sample]:
    """The same prompts, answered by the model itself, but for one token of the last."""
    out = []
    for sample in samples():
        ids, n = sample.ids.clone(), len(sample)
        with torch.no_grad(), module.adapters.view("noisy"):
            for t in range(n - int(sample.supervised.sum()), n):
                hidden = module.target.forward(ids[None, :t], torch.arange(t)[None]).last_hidden_BTD[0, -1]
                ids[t] = module.target.head(hidden[None])[0, :TOKENS].argmax()
        out.append(Sample(sample.sample_id, ids, sample.supervised))
    out[0].ids[-1] = (out[0].ids[-1] + 1) % 250
    return out


def test_the_anchor_may_be_the_base() -> None:
    """By hand: KL from the model without adapters, over the rows that say an answer's tokens; nothing where they are zero."""
    changes: dict[str, Any] = {"anchor": "base", "label_smoothing": 0.0, "ar_weight": 3.0}
    module = trained(config_of("cllm", labels="base", **changes), dtype=torch.float64)
    batch = make_batch([[sample] for sample in samples()], None, 7, 1)
    logs, wanted = [], torch.zeros((), dtype=torch.float64)
    for view in ("clean", "noisy"):
        with torch.no_grad(), module.adapters.view(view):
            hidden = module.target.forward(batch.ids_BT, batch.positions_BT).last_hidden_BTD
            logs.append(module.target.head(hidden).log_softmax(-1))
    kl_BT = (logs[0].exp() * (logs[0] - logs[1])).sum(-1)
    wanted = kl_BT[:, :-1][batch.supervised_BT[:, 1:]].sum()
    terms = module(batch, OUT, 0.0)
    assert module.denominators(batch, 0.0)["ar"] == int(batch.supervised_BT[:, 1:].sum())
    torch.testing.assert_close(terms.losses["ar"].detach(), 3 * wanted, rtol=1e-9, atol=0)
    plain = trained(config_of("cllm", label_smoothing=0.0), dtype=torch.float64)(batch, OUT, 0.0)
    assert torch.equal(terms.metrics["ar_loss"][0], plain.metrics["ar_loss"][0])  # of the text, whatever the anchor

    still = trained(config_of("cllm", labels="base", **changes), disturb=0.0, dtype=torch.float64)
    assert abs(float(still(batch, OUT, 0.0).losses["ar"].detach())) < 1e-12


def test_states_of_the_schedules() -> None:
    """Progressive, by hand: window of 4 blocks of 4, whose wanted shares are 1/4, 2/4, 3/4, 1. Uniform: every state before the
    fixed point and no other, each block by itself."""
    ids = torch.arange(100, 120)  # 4 of prompt
    wrong = {  # block -> wrong tokens of its states: always the last ones
        0: (4, 3, 2, 0, 0),  # wanted 1 of 4: 2 and 0 are equally near, the earlier is taken
        1: (3, 1, 0, 0, 0),  # wanted 2: 3 and 1 are
        2: (4, 2, 1, 0, 0),  # wanted 3: 4 and 2 are
        3: (3, 2, 2, 1, 0),  # wanted 4
    }
    states = ids.repeat(5, 1)
    for block, counts in wrong.items():
        for i, count in enumerate(counts):
            end = 4 + 4 * block + 4
            states[i, end - count : end] = 7
    sample = Sample(0, ids, torch.arange(20) >= 4, states=placed(states))
    module = trained(replace(config_of("jacobi_forcing"), window=4))
    state = module.shown(make_batch([[sample]], None, 0, 0)).state_BT[0]
    assert [(state[4 + 4 * k : 8 + 4 * k] == 7).sum().item() for k in range(4)] == [2, 3, 4, 3]
    assert torch.equal(state[:4], ids[:4])

    module, seen = trained(config_of("cllm")), [set[int]() for _ in range(4)]
    together = set()
    for epoch in range(60):
        state = module.shown(make_batch([[sample]], None, 0, epoch)).state_BT[0]
        counts = tuple((state[4 + 4 * k : 8 + 4 * k] == 7).sum().item() for k in range(4))
        together.add(counts)
        for k in range(4):
            seen[k].add(counts[k])
    assert seen == [{4, 3, 2}, {3, 1}, {4, 2, 1}, {3, 2, 1}] and len(together) > 20


def test_next_states() -> None:
    """Local labels are those of the state that follows the one shown, the fixed point's behind the last."""
    module = trained(config_of("cllm", labels="local"), dtype=torch.float64)
    sample = sample_of(5, 43, 6, 4)
    assert sample.states is not None
    states_In, last = sample.states.dense(sample.ids), 0
    for epoch in range(6):
        shown = module.shown(make_batch([[sample]], None, 7, epoch))
        for lo in range(6, 43, 4):
            span = slice(lo, lo + 4)
            at = [i for i, s in enumerate(states_In) if torch.equal(s[span], shown.state_BT[0, span])]
            follows = states_In[min(at[-1] + 1, len(states_In) - 1), span]
            assert torch.equal(shown.next_BT[0, span], follows)
            last += torch.equal(follows, sample.ids[span])
    assert last > 0
    batch = make_batch([[sample]], None, 7, 0)
    shown, wanted = module.shown(batch), []
    for lo in range(6, 43, 4):
        hi = min(lo + 4, 43)
        with torch.no_grad(), module.adapters.view("noisy"):
            log = []
            for guess in (shown.next_BT, shown.state_BT):
                row = torch.cat([sample.ids[:lo], guess[0, lo:hi]])[None]
                hidden = module.target.forward(row, torch.arange(hi)[None]).last_hidden_BTD[0]
                log.append(module.target.head(hidden).log_softmax(-1))
        own = [t for t in range(lo, hi) if bool(shown.loss_BT[0, t])]
        if own:
            wanted.append((log[0].exp() * (log[0] - log[1])).sum(-1)[own].mean())
    with torch.no_grad():
        found = module(batch, OUT, 0.0).losses["consistency"]
    torch.testing.assert_close(found, torch.stack(wanted).sum(), rtol=1e-9, atol=0)


def test_online_states_are_those_of_a_walk() -> None:
    """Each block's is one of its walk's first states; no gradient, no chance but the seeded one."""
    module = trained(config_of("cllm", states="online", start="text", passes=3), dtype=torch.float64)
    module.train()
    a, b, c, d = greedy(module)
    batch = make_batch([[a, b], [c, d]], None, 7, 1)
    with module.adapters.view("noisy"):
        cache, _ = clean_pass(module.target.forward, module.blocks(batch).text, SIGHT)
    found_BT = module.shown(batch, cache).state_BT
    assert module.adapters.training and all(p.grad is None for p in module.parameters())
    blocks = module.blocks(batch)
    walk = Walk(module.target, blocks, lambda: module.adapters.view("noisy"), cache)
    assert torch.equal(walk.same_BT, blocks.inside_BT)
    states = [module.first_states(blocks)]
    for _ in range(3):
        states.append(walk.step(states[-1]))
    passes = set()
    for r, t in (blocks.place_BT == 0).nonzero().tolist():
        own = blocks.unit_BT[r] == t
        at = [i for i in range(4) if torch.equal(found_BT[r, own], states[i][r, own])]
        assert at
        passes.add(at[0])
    assert len(passes) > 1
    assert torch.equal(found_BT[~batch.supervised_BT], batch.ids_BT[~batch.supervised_BT])

    found, wanted = module(batch, OUT, 0.0), module(batch, OUT, 0.0)
    assert [float(x.detach()) for x in found.losses.values()] == [float(x.detach()) for x in wanted.losses.values()]
    rows = int(blocks.inside_BT.sum()) - 4  # of each answer all but the last
    module.config = replace(module.config, normalise="tokens")
    assert module.denominators(batch, 0.0)["consistency"] == rows > float(found.metrics["right"][1]) > 0


def test_a_critic_labels_what_the_model_says() -> None:
    """By hand: masks are read one block at a time; the model's own tokens, the first from the clean row, are read by the base."""
    module = trained(config_of("self_distilled"), dtype=torch.float64, disturb=0.3)
    target, mask_id = module.target, module.adapters.mask_id

    def top(ids: Tensor, view: Any) -> Tensor:
        with torch.no_grad(), module.adapters.view(view):
            logits = target.head(target.forward(ids[None], torch.arange(len(ids))[None]).last_hidden_BTD[0])
        logits[:, TOKENS:] = float("-inf")
        logits[:, mask_id] = float("-inf")
        return logits.argmax(-1)

    sizes, loss, count, right, other = set(), 0.0, 0, 0, 0
    batch = make_batch([samples()[:2], samples()[2:]], None, 7, 1)
    shown = module.shown(batch)
    at = 0
    for row, pair in enumerate((samples()[:2], samples()[2:])):
        at = 0
        for sample in pair:
            prompt, n = int((~sample.supervised).sum()), len(sample)
            for lo in range(prompt, n, 4):
                slots = int(shown.loss_BT[row, at + lo : at + min(lo + 4, n)].sum())
                assert bool(shown.loss_BT[row, at + lo : at + lo + slots].all())
                assert slots >= min(1, n - 1 - lo)
                if lo + 4 < n:
                    sizes.add(slots)
                if not slots:
                    continue
                masks = torch.cat([sample.ids[:lo], torch.full((slots,), mask_id)])
                said = top(masks, "noisy")
                labels = top(torch.cat([sample.ids[:lo], said[lo - 1 : lo - 1 + slots]]), "clean")[lo:]
                with torch.no_grad(), module.adapters.view("noisy"):
                    hidden = target.forward(masks[None], torch.arange(len(masks))[None]).last_hidden_BTD[0]
                    log_q = target.head(hidden).log_softmax(-1)[lo:]
                loss -= float(log_q.gather(-1, labels[:, None]).sum())
                right += int((said[lo:] == labels).sum())
                other += int((labels != sample.ids[lo + 1 : lo + 1 + slots]).sum())
                count += slots
            at += n
    assert len(sizes) > 1 and other > 0
    assert module.denominators(batch, 0.0)["consistency"] == count
    terms = module(batch, OUT, 0.0)
    assert float(terms.losses["consistency"].detach()) == pytest.approx(loss, rel=1e-9)
    assert [float(x) for x in terms.metrics["right"]] == [right, count]
    sum(terms.losses.values()).backward()
    assert all(p.grad is not None and bool(p.grad.any()) for n, p in module.named_parameters() if "lora_A" not in n)


def test_metrics_by_hand() -> None:
    """Leading right tokens are counted from the first wrong guess, within the block."""
    module = trained(config_of("cllm"))
    batch = make_batch([[sample_of(5, 15, 2, 4)]], None, 0, 0)  # blocks at 2, 6, 10, 14
    shown = module.shown(batch)
    told = torch.tensor([0, 0, 1, 1, 1, 1, 0, 1, 1, 1, 0, 0, 0, 1, 0]).bool()[None]
    shown = replace(shown, after_BT=told, loss_BT=told)
    at_R = told[0].nonzero()[:, 0]
    right = {2: True, 3: True, 4: False, 5: True, 7: True, 8: True, 9: False, 13: True}
    label_R = torch.arange(len(at_R))
    top_R = torch.where(torch.tensor([right[t] for t in at_R.tolist()]), label_R, -1)
    scored: Any = type("Scored", (), {"loss_R": torch.ones(8), "top_R": top_R})
    found = {n: tuple(map(float, x)) for n, x in module.metrics(shown, at_R, scored, label_R).items()}
    # Rows 5, 9 and 13 predict the next block's first token: they are right or wrong, and end no run.
    assert found == {"consistency_loss": (8, 8), "right": (6, 8), "run_length": (2 + 2, 2)}


def test_a_batch_can_be_learnt() -> None:
    """All weights of a random model: blocks of noise come to say the fixed point's tokens, all of them."""
    config = ConsistencyConfig(block=4, states="noise", start="random", ar_weight=1.0, label_smoothing=0.0)
    module = trained(config, "full")
    batch = make_batch([samples()[:2], samples()[2:]], None, 7, 1)
    counts = module.denominators(batch, 0.0)
    optimiser = torch.optim.Adam(module.parameters(), lr=1e-2)
    for _ in range(100):
        terms = module(batch, OUT, 0.0)
        optimiser.zero_grad()
        sum(x / counts[n] for n, x in terms.losses.items()).backward()  # type: ignore[union-attr]
        optimiser.step()
    figures = {n: float(v) / float(c) for n, (v, c) in module(batch, OUT, 0.0).metrics.items()}
    assert figures["consistency_loss"] < 0.02 and figures["ar_loss"] < 0.02 and figures["right"] == 1
    assert figures["run_length"] > 2


@pytest.mark.parametrize(
    ("changes", "match"),
    [
        ({"block": 1}, "block must be at least 2"),
        ({"temperature": 0.0}, "temperature must be positive"),
        ({"ar_weight": 0.0}, "allow_no_anchor=true"),
        ({"ar_weight": 0.0, "allow_no_anchor": True}, "label_smoothing = 0.1"),
        ({"anchor": "base"}, "set label_smoothing=0"),
        ({"states": "noise", "schedule": "progressive"}, "states=noise has one"),
        ({"labels": "local", "states": "online"}, "states=online keeps none"),
        ({"labels": "data", "objective": "jsd"}, "leave out objective"),
        ({"labels": "critic"}, "start=mask"),
        ({"objective": "kll"}, "nearest is 'kl'"),
        ({"labels": "both"}, "consistency.labels must be one of"),
    ],
)
def test_settings_that_make_no_sense_are_refused(changes: dict[str, Any], match: str) -> None:
    with pytest.raises(ValueError, match=match):
        ConsistencyConfig(**changes)


def test_what_does_not_go_together_is_refused() -> None:
    for preset, kind, mask, match in (
        ("self_distilled", "full", "trained", "labels = critic, anchor = data ask the model as it was"),
        ("self_distilled", "lora", "none", "start = mask needs a mask token"),
        ("cllm", "lora", "trained", r"adapters\.mask = trained: only start=mask"),
    ):
        with pytest.raises(ValueError, match=match):
            trained(config_of(preset), kind, mask)
    with pytest.raises(ValueError, match=r"adapters\.mask_id = 5 with mask=none"):
        AdapterConfig(mask="none", mask_id=5)
    module = trained(config_of("cllm"))
    assert module.adapters.mask_id is None and module.adapters.mask_row is None
    assert all(name.startswith("trained.") and p.requires_grad for name, p in module.named_parameters())
    with pytest.raises(ValueError, match=r"adapters\.mask = none"):
        BlockDiffusion(ObjectiveConfig(), module.target, module.adapters)
    bare = one_row(list(range(10, 30)), list(range(5, 20)))
    with pytest.raises(ValueError, match="came without states"):
        module.denominators(bare, 0.0)
    with pytest.raises(ValueError, match="block = 4: the stored states are not of such blocks"):
        module.denominators(make_batch([[sample_of(5, 43, 6, 16)]], None, 0, 0), 0.0)
