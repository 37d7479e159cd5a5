"""What training computes is what drafting computes: logits of training step k equal the runtime's of step k (fp32, 1e-5).

For every method and every option that changes a forward pass; over ragged commits, rejected drafts, finished rows and
trees. Random weights everywhere, so that no part is idle.

    pytest tests/test_parity.py
"""

import copy
import dataclasses
from collections.abc import Callable
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor

from draftsmith.inference.check import handed_over
from draftsmith.models import METHODS
from draftsmith.models.drafter import Batch, Commit, Prefill, TargetOut
from draftsmith.models.small_lm import LMConfig
from draftsmith.models.target import Target, live_states

K = 4
VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {
    "medusa": ("medusa", {"heads": K}),
    "medusa-shared-2": ("medusa", {"heads": K, "head": "shared", "layers": 2}),
    "hydra": ("hydra", {"heads": K}),
    "hydra++": ("hydra", {"heads": K, "layers": 3, "prefix": True, "dropout": 0.2}),
    "eagle": ("eagle", {"steps": K, "kv_heads": 2}),
    "eagle3": ("eagle3", {"steps": K}),
    "eagle3-fc_norm": ("eagle3", {"steps": K, "fc_norm": True}),
    "eagle3-norm_output": ("eagle3", {"steps": K, "norm_output": True}),
    "eagle3-3.1": ("eagle3", {"steps": K, "fc_norm": True, "norm_output": True}),
    "eagle3-norm_before_fc": ("eagle3", {"steps": K, "norm_before_fc": True, "kv_heads": 1}),
    "eagle3-norm_before_residual": ("eagle3", {"steps": K, "norm_before_residual": True, "taps": (0, 2, 3, 4)}),
    "peagle": ("peagle", {"depths": K, "layers": 1, "kv_heads": 2}),
    "peagle-2": ("peagle", {"depths": K, "layers": 2, "fc_norm": True, "mask_id": 40}),
    "draft_model": ("draft_model", {"depths": K}),
    "draft_model-3": ("draft_model", {"depths": K, "lm": LMConfig(layers=3)}),
    "pard": ("pard", {"depths": K}),
    "pard-2": ("pard", {"depths": K, "lm": LMConfig(layers=2), "mask_id": 40, "objective": "kl"}),
    "dflash": ("dflash", {"block": K + 1, "layers": 2, "kv_heads": 2}),
    "dflash-anchor": ("dflash", {"block": K, "layers": 1, "sample_from_anchor": True, "mask_id": 40}),
    "dflash-jetspec": ("dflash", {"block": K + 1, "layers": 2, "causal": True, "taps": (2, 4), "intermediate": 40}),
    "dspark": ("dspark", {"block": K, "layers": 2, "rank": 8}),
    "dspark-gated": ("dspark", {"block": K, "layers": 1, "rank": 8, "head": "gated", "causal": True}),
    "dspark-rnn": ("dspark", {"block": K + 1, "layers": 1, "rank": 8, "head": "rnn", "sample_from_anchor": False}),
    "dspark-gru": ("dspark", {"block": K, "layers": 1, "rank": 8, "head": "gru", "gru_size": 12}),
    "dspark-pairs": ("dspark", {"block": K, "layers": 1, "rank": 8, "head": "pairs", "candidates": 9}),
    "dspark-none": ("dspark", {"block": K, "layers": 1, "head": "none"}),
    "falcon": ("falcon", {"block": K, "kv_heads": 2}),
    "falcon-rounds": ("falcon", {"block": 2, "rounds": 2, "glance": 0.0}),
    "dual_view": ("dual_view", {"block": K, "anchors": None, "rank": 4}),
    "dual_view-full": ("dual_view", {"block": K, "anchors": None, "rank": None}),
    "bita": ("prompt_tokens", {"variant": "bita", "tokens": K, "points": 100, "prefix": 3}),
    "ppd": ("prompt_tokens", {"variant": "ppd", "tokens": K, "points": 100}),
    "pass": ("prompt_tokens", {"variant": "pass", "tokens": K, "points": 100}),
    "peagle-options": ("peagle", {"depths": K, "layers": 3, "norm_before_fc": True, "norm_before_residual": True}),
}
PARALLEL = ("medusa", "pard", "peagle", "dflash", "dual_view", "prompt_tokens")
AT_ONCE = {n for n, (m, o) in VARIANTS.items() if m in PARALLEL or o.get("head") == "none"}  # every depth from `start`
SLOTTED = {n for n in AT_ONCE if not n.startswith("medusa")} | {"falcon"}  # slots that read no token behind the anchor
INSIDE = {"dual_view", "prompt_tokens"}  # draft through the target itself
DRAFT_IDS = torch.arange(3, 200, 3)


def make_drafter(name: str, target: Target, reduced: bool = True) -> Any:
    method, options = VARIANTS[name]
    torch.manual_seed(5)
    drafter = METHODS[method](METHODS[method].Config(**options), target.facts, DRAFT_IDS if reduced else None)
    drafter.init_from_target(target)
    with torch.no_grad():
        for parameter in drafter.parameters():
            parameter += 0.2 * torch.randn_like(parameter) * parameter.shape[-1] ** -0.5
    return drafter.eval()


def make_batch(lengths: list[int], seed: int = 0) -> Batch:
    """One row, one document per length, all tokens supervised, packed with padding in between and at the end."""
    torch.manual_seed(seed)
    ids, positions, samples = [], [], []
    for i, n in enumerate(lengths):
        ids += torch.randint(3, 250, (n + 2,)).tolist()
        positions += [*range(n), 0, 1]
        samples += [i] * n + [-1, -1]
    supervised = [s >= 0 for s in samples]
    return Batch(*(torch.tensor([x]) for x in (ids, supervised, positions, samples)))


def commit_of(
    rows: list[tuple[Tensor, int, int]], out: TargetOut, batch: Batch, drafter: Any, target: Target
) -> Commit:
    """`rows`: (flat state rows of a document, first and one past the last to commit). Padding is made of junk."""
    t = max(1, *(hi - lo for _, lo, hi in rows))
    flat_BT = torch.stack(
        [torch.nn.functional.pad(r[lo:hi], (0, t - (hi - lo)), value=int(r[0])) for r, lo, hi in rows]
    )
    counts_B = torch.tensor([hi - lo for _, lo, hi in rows])
    real_BT = torch.arange(t) < counts_B[:, None]
    anchors = torch.stack([batch.ids_BT[0, r[min(hi, len(r) - 1)]] for r, _, hi in rows])

    def pick(x_BTX: Tensor | None) -> Tensor | None:
        if x_BTX is None:
            return None
        picked = x_BTX[0, flat_BT].clone()
        picked[~real_BT] = 7.0
        return picked

    ids_BT = torch.where(real_BT, batch.ids_BT[0, flat_BT], 11)
    positions_BT = torch.where(real_BT, batch.positions_BT[0, flat_BT], 0)
    text_BT = torch.nn.utils.rnn.pad_sequence([batch.ids_BT[0, r[:hi]] for r, _, hi in rows], batch_first=True)
    kv, extra_out = handed_over(drafter, target, text_BT, torch.tensor([hi for _, _, hi in rows]))
    taps, last_hidden = pick(out.taps_BTPD), pick(out.last_hidden_BTD)
    return Commit(ids_BT, counts_B, positions_BT, anchors, taps, last_hidden, kv, extra_out)


def asks(drafter: Any) -> bool:
    """Whether deeper levels come from `extend`."""
    return drafter.parallel == 1 or getattr(drafter, "sequential", False)


def runtime_levels(drafter: Any, state: Any, commit: Commit, tokens_BK: Tensor) -> tuple[Any, Tensor]:
    """Logits [B, K, W] of a chain that follows the given tokens."""
    state, level = drafter.start(state, commit)
    if not asks(drafter):
        return state, level.logits_BNW
    levels = [level.logits_BNW[:, 0]]
    for k in range(1, K):
        state, level = drafter.extend(state, tokens_BK[:, k - 1 : k], torch.full((len(tokens_BK), 1), k - 1))
        levels.append(level.logits_BNW[:, 0])
    return state, torch.stack(levels, dim=1)


@pytest.mark.parametrize("name", VARIANTS)
def test_training_logits_equal_runtime_logits(
    name: str, target: Target, tiny: Callable[..., Target], logits_of_training: Any
) -> None:
    """Two documents of one packed row run as two rows of a ragged batch, committed in uneven pieces, drafting (and so
    leaving rejected slots behind) after each; the second document is done before the first."""
    if VARIANTS[name][0] in INSIDE:  # whose own rounding, in fp32, is about the bound
        target = tiny(dtype=torch.float64)
    batch = make_batch([22, 17])
    drafter = make_drafter(name, target).to(target.dtype)
    out = live_states(target, drafter, batch)
    trained = logits_of_training(drafter, batch, out)
    documents = [(batch.samples_BT[0] == i).nonzero()[:, 0] for i in range(2)]
    state = drafter.init(Prefill(2, 40, torch.device("cpu"), torch.float32))
    compared, edges = 0, [(0, 0), (5, 3), (6, 7), (9, 8), (10, 12), (14, 12), (17, 12)]
    for (lo0, lo1), (hi0, hi1) in pairwise(edges):
        commit = commit_of([(documents[0], lo0, hi0), (documents[1], lo1, hi1)], out, batch, drafter, target)
        tokens_BK = torch.stack(
            [batch.ids_BT[0, r[hi + 1 : hi + 1 + K]] for r, hi in zip(documents, (hi0, hi1), strict=True)]
        )
        state, drafted_BKW = runtime_levels(drafter, state, commit, tokens_BK)
        for b, (document, lo, hi) in enumerate(zip(documents, (lo0, lo1), (hi0, hi1), strict=True)):
            for k in range(K if hi > lo else 0):
                want = trained[k].get(int(document[hi - 1]))
                if want is not None:
                    torch.testing.assert_close(drafted_BKW[b, k], want, atol=1e-5, rtol=1e-5)
                    compared += 1
    assert compared > 30 and trained[0] and trained[K - 1]


@pytest.mark.parametrize("name", [n for n in VARIANTS if n not in AT_ONCE])
def test_tree_nodes_equal_their_paths(name: str, target: Target) -> None:
    """Every node of a branching tree, drafted together, has the logits of its own path drafted as a chain."""
    batch = make_batch([20])
    drafter = make_drafter(name, target)
    out = live_states(target, drafter, batch)
    document = (batch.samples_BT[0] == 0).nonzero()[:, 0]
    commits = [
        commit_of([(document, 0, 6)], out, batch, drafter, target),
        commit_of([(document, 6, 9)], out, batch, drafter, target),
    ]

    def fresh() -> Any:
        state = drafter.init(Prefill(1, 40, torch.device("cpu"), torch.float32))
        state, _ = drafter.start(state, commits[0])
        state, _ = drafter.extend(state, torch.tensor([[5, 6]]), torch.tensor([[0, 0]]))  # a rejected draft
        state, _ = drafter.start(state, commits[1])
        return state

    levels = [([30, 60, 33], [0, 0, 0]), ([9, 12, 15, 18], [2, 1, 1, 3]), ([21, 24], [6, 4])]  # tokens, parents
    state, made = fresh(), []
    for tokens, parents in levels:
        state, level = drafter.extend(state, torch.tensor([tokens]), torch.tensor([parents]))
        made += list(level.logits_BNW[0])
    tokens = [0, *(t for level in levels for t in level[0])]
    parents = [0, *(p for level in levels for p in level[1])]
    for node in range(1, len(tokens)):
        path, at = [], node
        while at:
            path, at = [tokens[at], *path], parents[at]
        state = fresh()
        for k, token in enumerate(path):
            state, level = drafter.extend(state, torch.tensor([[token]]), torch.tensor([[k]]))
        torch.testing.assert_close(made[node - 1], level.logits_BNW[0, 0], atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("name", [n for n in VARIANTS if n in SLOTTED])
def test_nothing_behind_the_anchor_is_seen(name: str, target: Target, logits_of_training: Any) -> None:
    """Noise in all states from the anchor's row on and in all tokens after the anchor: the logits of every slot of that
    anchor keep their bits, whatever drafts overlap it; those of a later anchor do not (CASES B19)."""
    batch = make_batch([18, 14])
    drafter = make_drafter(name, target)
    out = live_states(target, drafter, batch)
    clean = logits_of_training(drafter, batch, out)
    t_T = torch.arange(batch.ids_BT.shape[1])
    for anchor in (2, 3, 5, 13, 20 + 1, 20 + 6):
        torch.manual_seed(anchor)
        noisy = dataclasses.replace(
            batch, ids_BT=torch.where(t_T > anchor, torch.randint(3, 250, t_T.shape), batch.ids_BT)
        )
        seen = [
            None if x is None else torch.where((t_T >= anchor)[(...,) + (None,) * (x.ndim - 2)], torch.randn_like(x), x)
            for x in (out.taps_BTPD, out.last_hidden_BTD)
        ]
        kv = copy.copy(out.kv)
        if kv is not None:
            kv.kv = torch.where((t_T >= anchor)[:, None], torch.randn_like(kv.kv), kv.kv)
        there = dataclasses.replace(out, taps_BTPD=seen[0], last_hidden_BTD=seen[1], kv=kv)
        got = logits_of_training(drafter, noisy, there)
        assert len(got) == len(clean) == K
        for was, now in zip(clean, got, strict=True):
            if name == "falcon" and int(batch.positions_BT[0, anchor]) < K:
                continue  # its block needs K rows
            assert anchor - 1 in was and torch.equal(now[anchor - 1], was[anchor - 1])
        assert anchor + 1 not in clean[0] or not torch.equal(got[0][anchor + 1], clean[0][anchor + 1])


@pytest.mark.parametrize("name", VARIANTS)
def test_finished_rows_change_nothing(name: str, target: Target) -> None:
    """A row that commits nothing says so, and leaves the other rows' logits to the bit what they are beside any row."""
    batch = make_batch([18, 14])
    drafter = make_drafter(name, target)
    out = live_states(target, drafter, batch)
    documents = [(batch.samples_BT[0] == i).nonzero()[:, 0] for i in range(2)]
    results = []
    for second in ((documents[1], 5, 5), (documents[1], 5, 8)):
        state = drafter.init(Prefill(2, 40, torch.device("cpu"), torch.float32))
        state, _ = drafter.start(
            state, commit_of([(documents[0], 0, 6), (documents[1], 0, 5)], out, batch, drafter, target)
        )
        commit = commit_of([(documents[0], 6, 9), second], out, batch, drafter, target)
        state, level = drafter.start(state, commit)
        assert level.valid_BN[:, 0].tolist() == [True, second[2] > second[1]]
        assert not level.logits_BNW.isnan().any()
        results.append(level.logits_BNW[0])
        if asks(drafter):
            state, level = drafter.extend(state, torch.tensor([[9], [9]]), torch.tensor([[0], [0]]))
            assert not level.logits_BNW.isnan().any()
            results[-1] = torch.cat([results[-1], level.logits_BNW[0]])
    torch.testing.assert_close(results[0], results[1], atol=1e-6, rtol=0)


@pytest.mark.parametrize("name", VARIANTS)
def test_reset_rows_start_afresh(name: str, target: Target) -> None:
    batch = make_batch([18, 14])
    drafter = make_drafter(name, target)
    out = live_states(target, drafter, batch)
    documents = [(batch.samples_BT[0] == i).nonzero()[:, 0] for i in range(2)]
    state = drafter.init(Prefill(2, 40, torch.device("cpu"), torch.float32))
    state, _ = drafter.start(
        state, commit_of([(documents[0], 0, 6), (documents[1], 0, 5)], out, batch, drafter, target)
    )
    state = drafter.reset(state, torch.tensor([1]))
    state, level = drafter.start(
        state, commit_of([(documents[0], 6, 8), (documents[0], 0, 8)], out, batch, drafter, target)
    )
    torch.testing.assert_close(level.logits_BNW[0], level.logits_BNW[1], atol=1e-5, rtol=1e-5)


def test_an_option_of_the_recurrence_shows_at_step_2(target: Target, logits_of_training: Any) -> None:
    """`norm_output` flipped on the same weights: step 1 is the same, step 2 is not."""
    batch, logits = make_batch([20]), []
    for name in ("eagle3", "eagle3-norm_output"):
        drafter = make_drafter(name, target)
        logits.append(logits_of_training(drafter, batch, live_states(target, drafter, batch)))
    torch.testing.assert_close(logits[0][0], logits[1][0])
    assert all((logits[0][1][f] - logits[1][1][f]).abs().max() > 1e-2 for f in logits[0][1])


@pytest.mark.parametrize(
    "name",
    [
        "eagle3",
        "medusa",
        "hydra",
        "eagle",
        "peagle",
        "draft_model",
        "pard",
        "dflash",
        "dspark",
        "falcon",
        "dual_view",
        "ppd",
    ],
)
def test_ids_beyond_the_tokenizer_are_never_drafted(name: str, tiny: Callable[..., Target]) -> None:
    target = tiny(vocab=264, tokens=250)
    batch = make_batch([12])
    drafter = make_drafter(name, target, reduced=False)
    out = live_states(target, drafter, batch)
    document = (batch.samples_BT[0] == 0).nonzero()[:, 0]
    state = drafter.init(Prefill(1, 20, torch.device("cpu"), torch.float32))
    _, level = drafter.start(state, commit_of([(document, 0, 6)], out, batch, drafter, target))
    assert level.logits_BNW.shape[-1] == 264
    assert bool((level.logits_BNW[..., 250:] == -torch.inf).all()) and bool(
        level.logits_BNW[..., :250].isfinite().all()
    )
