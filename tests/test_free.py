"""Training-free drafters: proposals against brute-force searches, lossless output, state under ragged acceptance, what
they are worth on a text that repeats itself, and the two commands that take them.

pytest tests/test_free.py
"""

import dataclasses
import io
import json
import math
import random
from collections.abc import Iterator
from dataclasses import replace
from itertools import product
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from rich.console import Console
from torch import Tensor

from draftsmith.configs.parse import UsageError, parse
from draftsmith.inference import evaluate as evaluation
from draftsmith.inference import generate as command
from draftsmith.inference.engine import Engine
from draftsmith.inference.evaluate import run_evaluate
from draftsmith.inference.evaluate_config import EvaluateConfig
from draftsmith.inference.generate import GenerateConfig, run_generate
from draftsmith.inference.load import free_drafter
from draftsmith.inference.speculate import DecodeConfig, Result, generate
from draftsmith.losses.probs import SamplingParams, probs
from draftsmith.models import TRAINING_FREE, FreeSettings
from draftsmith.models.drafter import Budget, Commit, Prefill, Verified
from draftsmith.models.lookahead import LookaheadConfig, Row
from draftsmith.models.lookup import Sketch, collect, to_tree
from draftsmith.models.ngram import NgramConfig
from draftsmith.models.pretrained import tiny_target
from draftsmith.models.recycling import RecyclingConfig, template
from draftsmith.models.suffix import SuffixConfig
from draftsmith.models.tree import Tree

FACTS = SimpleNamespace(vocab=6, tokens=5)
CHAIN, TREE = DecodeConfig(k=4), DecodeConfig(k=4, tree="static", nodes=12, width=3)
SHAPES = {"chain": CHAIN, "tree": TREE}


SMALL = {"lookahead": {"window": 3, "n": 4}, "jacobi": {"block": 4}}  # where thousands of rows run


def make(method: str, facts: Any = FACTS, target: Any = None, **settings: Any) -> Any:
    kind = TRAINING_FREE[method]
    drafter = kind(kind.Config(**settings), facts if target is None else target.facts)
    drafter.bind(target or SimpleNamespace(head=None))
    return drafter


def ids_of(results: list[Result]) -> list[list[int]]:
    return [r.ids for r in results]


def test_the_tables_agree() -> None:
    assert [f.name for f in dataclasses.fields(FreeSettings)] == list(TRAINING_FREE)
    for name, kind in TRAINING_FREE.items():
        assert kind.method == name and kind.Config.__dataclass_params__.frozen
        assert type(getattr(FreeSettings(), name)) is kind.Config


# What each one proposes


def ragged(texts: list[list[int]], prompts: list[int], seed: int) -> Iterator[tuple[Commit, list[list[int]]]]:
    """Commits that hand out the texts in random portions of 1 to 4 tokens, and what is known then, the anchor last; a
    row whose text is used up is done, and its anchor means nothing."""
    dice = random.Random(seed)
    known, first = [0] * len(texts), True
    while first or any(n < len(t) - 1 for n, t in zip(known, texts, strict=True)):
        counts = [
            prompt if first else min(dice.randint(1, 4), len(text) - 1 - n)
            for prompt, text, n in zip(prompts, texts, known, strict=True)
        ]
        ids_BT = torch.full((len(texts), max(counts)), 4)
        anchors = []
        for b, (text, count) in enumerate(zip(texts, counts, strict=True)):
            ids_BT[b, :count] = torch.tensor(text[known[b] : known[b] + count], dtype=torch.int64)
            known[b] += count
            anchors.append(text[known[b]] if count else dice.randrange(5))
        at_BT = torch.arange(ids_BT.shape[1]).expand_as(ids_BT)
        yield (
            Commit(ids_BT, torch.tensor(counts), at_BT, torch.tensor(anchors)),
            [text[: n + 1] if count else [] for text, n, count in zip(texts, known, counts, strict=True)],
        )
        first = False


def some_texts(seed: int, rows: int = 3, symbols: int = 3) -> tuple[list[list[int]], list[int]]:
    dice = random.Random(seed)
    texts = [[dice.randrange(symbols) for _ in range(dice.randint(12, 40))] for _ in range(rows)]
    return texts, [dice.randint(1, 10) for _ in texts]


def paths_of(tree: Tree, row: int) -> dict[tuple[int, ...], float]:
    """Every candidate of a row by its path of tokens, with its chance. Checks depths, order, siblings on the way."""
    paths: dict[int, tuple[int, ...]] = {0: ()}
    found: dict[tuple[int, ...], float] = {}
    for j in range(tree.tokens_BN.shape[1]):
        if bool(tree.valid_BN[row, j]):
            parent = int(tree.parents_BN[row, j])
            paths[j + 1] = (*paths[parent], int(tree.tokens_BN[row, j]))
            assert len(paths[j + 1]) == int(tree.depths_BN[row, j])
            assert paths[j + 1] not in found, "siblings with the same token"
            found[paths[j + 1]] = math.exp(float(tree.log_probs_BN[row, j]))
    return found


def fits(tree: Tree, budget: Budget) -> None:
    for row in range(tree.tokens_BN.shape[0]):
        paths = paths_of(tree, row)
        assert len(paths) <= budget.nodes and all(len(p) <= budget.depth and max(p) < FACTS.tokens for p in paths)
        assert all(sum(p[:-1] == q for p in paths) <= budget.width for q in [(), *paths])
    assert budget.width > 1 or tree.is_chain()


def copies(text: list[int], config: NgramConfig, depth: int) -> list[tuple[int, ...]]:
    """Brute force: the continuations of the longest ending that stands earlier, place by place."""
    for n in range(config.max_n, config.min_n - 1, -1):
        starts = [i + n for i in range(len(text) - n) if text[i : i + n] == text[len(text) - n :] and n < len(text)]
        if starts:
            found = []
            for start in starts if config.match == "first" else starts[::-1]:
                grown = list(text)
                for j in range(depth):
                    grown.append(grown[start + j])
                found.append(tuple(grown[len(text) :]))
            return found
    return []


@pytest.mark.parametrize("config", [NgramConfig(), NgramConfig(match="first"), NgramConfig(max_n=5, min_n=2)], ids=str)
def test_ngram_equals_a_search_of_the_whole_text(config: NgramConfig) -> None:
    drafted = 0
    for seed in range(12):
        texts, prompts = some_texts(seed)
        for budget in (Budget(5, 5, 1), Budget(9, 4, 3)):
            drafter = make("ngram", **dataclasses.asdict(config))
            state = drafter.init(Prefill(3, 0, torch.device("cpu"), torch.float32))
            for commit, known in ragged(texts, prompts, seed):
                state, tree = drafter.propose(state, commit, budget, None, None)
                fits(tree, budget)
                for row, text in enumerate(known):
                    want = copies(text, config, budget.depth)
                    paths = paths_of(tree, row)
                    if budget.width == 1:
                        assert list(paths) == [want[0][: i + 1] for i in range(5)] if want else not paths
                    else:
                        assert set(paths) <= {p[: i + 1] for p in want for i in range(4)} and (
                            not want or want[0] in paths
                        )
                    drafted += len(paths)
    assert drafted > 500


def chances(text: list[int], p: int, depth: int) -> dict[tuple[int, ...], float]:
    """Brute force: D of every continuation of the ending of length p, up to a depth."""
    ending, found = text[len(text) - p :], {(): 1.0}
    for length in range(1, depth + 1):
        for path in [q for q in found if len(q) == length - 1]:
            pattern = [*ending, *path]
            after = [
                text[i + len(pattern)] for i in range(len(text) - len(pattern)) if text[i : i + len(pattern)] == pattern
            ]
            for token in set(after):
                found[(*path, token)] = found[path] * after.count(token) / len(after)
    del found[()]
    return found


@pytest.mark.parametrize("factor", [1.0, 2.5])
def test_suffix_has_the_best_sum_of_chances_of_all_endings(factor: float) -> None:
    config, depth = SuffixConfig(max_match=6, factor=factor), 5
    drafted = 0
    for seed in range(10):
        texts, prompts = some_texts(seed)
        drafter = make("suffix", **dataclasses.asdict(config))
        state = drafter.init(Prefill(3, 0, torch.device("cpu"), torch.float32))
        budget = Budget(8, depth, 5)
        for commit, known in ragged(texts, prompts, seed):
            state, tree = drafter.propose(state, commit, budget, None, None)
            fits(tree, budget)
            for row, text in enumerate(known):
                want, options = 0.0, []
                for p in range(1, min(6, len(text) - 1) + 1) if text else ():
                    every = {q: d for q, d in chances(text, p, depth).items() if d >= config.min_chance}
                    size = min(budget.nodes, int(factor * p))
                    want = max(want, sum(sorted(every.values(), reverse=True)[:size]))
                    options.append(every)
                paths = paths_of(tree, row)
                assert sum(paths.values()) == pytest.approx(want, abs=1e-5)
                assert not paths or any(
                    all(q in every and every[q] == pytest.approx(d, abs=1e-5) for q, d in paths.items())
                    for every in options
                )
                drafted += len(paths)
    assert drafted > 500


def test_a_suffix_chain_follows_the_most_frequent_continuation() -> None:
    #           after 0 1: 2 twice, 3 once; after 0 1 2: 4 twice
    text = [0, 1, 2, 4, 0, 1, 3, 0, 1, 2, 4, 3, 0, 1]
    drafter = make("suffix", factor=4.0)
    state = drafter.init(Prefill(1, 0, torch.device("cpu"), torch.float32))
    commit = Commit(torch.tensor([text[:-1]]), torch.tensor([13]), torch.arange(13)[None], torch.tensor([1]))
    _, tree = drafter.propose(state, commit, Budget(2, 2, 1), None, None)
    # After 3 0 1 (once): 2, 4, both certain. That beats the 2/3 + 2/3 of the shorter ending.
    assert paths_of(tree, 0) == pytest.approx({(2,): 1.0, (2, 4): 1.0})
    frequent = make("suffix", factor=4.0, max_match=2)
    state = frequent.init(Prefill(1, 0, torch.device("cpu"), torch.float32))
    _, tree = frequent.propose(state, commit, Budget(3, 3, 1), None, None)
    # After 2 4 came 0 and 3, once each: the newer one.
    assert paths_of(tree, 0) == pytest.approx({(2,): 2 / 3, (2, 4): 2 / 3, (2, 4, 3): 1 / 3})


def test_recycling_templates() -> None:
    whole = template((8, 21, 25, 15, 8, 3), 8, Budget(80, 6, 8))
    assert [len(layer.parents) for layer in whole] == [8, 21, 25, 15, 8, 3]
    for nodes, depth, width in product((1, 2, 7, 24, 60, 200), (1, 2, 4, 9), (1, 2, 4, 8)):
        layers = template((8, 21, 25, 15, 8, 3), 8, Budget(nodes, depth, width))
        paths: list[tuple[int, ...]] = [()]
        for layer in layers:
            paths += [(*paths[parent], rank) for parent, rank in zip(layer.parents, layer.ranks, strict=True)]
        assert len(paths) == len(set(paths)) and 1 < len(paths) <= nodes + 1
        assert all(len(p) <= depth and max(p) < width for p in paths[1:])
        assert all(p[-1] == 0 or (*p[:-1], p[-1] - 1) in paths for p in paths[1:]), "a sibling is missing"
        assert width > 1 or len(paths) == 1 + min(depth, nodes)


@pytest.mark.parametrize("budget", [Budget(4, 4, 1), Budget(9, 3, 3)], ids=["chain", "tree"])
def test_recycling_equals_a_table_of_last_seen_successors(budget: Budget) -> None:
    drafter = make("recycling", successors=3, levels=(3, 4, 2))
    logits_of = torch.randn(50, 4, 6, 6, generator=torch.Generator().manual_seed(1))  # step, row, node, id
    drafter.target_head = lambda hidden, ids: hidden
    dice = random.Random(0)
    state = drafter.init(Prefill(4, 0, torch.device("cpu"), torch.float32))
    tables: list[dict[int, list[int]]] = [{} for _ in range(4)]
    shape = template((3, 4, 2), 3, budget)
    for step in range(50):
        counts_B = torch.tensor([dice.randint(1, 6), dice.randint(1, 6), 6, 0 if step > 20 else 1])
        ids_BM = torch.randint(5, (4, 6), generator=torch.Generator().manual_seed(step))
        anchor_B = ids_BM[:, 3]
        valid_BM = torch.rand(4, 6, generator=torch.Generator().manual_seed(step)) < 0.7
        commit = Commit(ids_BM, counts_B, ids_BM * 0, anchor_B)
        if step == 0:  # the prompt, through the head
            commit.last_hidden_BTD, valid_BM = logits_of[0], torch.arange(6) < counts_B[:, None]
        else:
            valid_BM &= (counts_B > 0)[:, None]
            commit.verified = Verified(ids_BM, valid_BM, logits_of[step])
        for row, table in enumerate(tables):
            for m in range(6):
                if bool(valid_BM[row, m]):
                    best = logits_of[step, row, m, :5].tolist()  # id 5 is no token
                    table[int(ids_BM[row, m])] = sorted(range(5), key=lambda i, best=best: -best[i])[:3]
        state, tree = drafter.propose(state, commit, budget, None, None)
        for row, table in enumerate(tables):
            want: list[tuple[int, ...] | None] = [()]
            for layer in shape:
                for parent, rank in zip(layer.parents, layer.ranks, strict=True):
                    path = want[parent]
                    last = None if path is None else [int(anchor_B[row]), *path][-1]
                    want.append(None if last is None or last not in table else (*path, table[last][rank]))  # type: ignore[misc]
            seen = set(paths_of(tree, row))
            assert seen == ({p for p in want if p} if counts_B[row] else set())


def test_lookahead_rows_see_what_the_paper_says() -> None:
    """Level 0 up to its own column, then its own column up to its own level; positions count on along that path."""
    w, n = 4, 4
    drafter = make("lookahead", window=w, n=n)
    state = [Row([1], [[10 * i + j for j in range(w)] for i in range(levels)]) for levels in (1, 3, 0)]
    tree = to_tree([Sketch(Budget(3, 3, 1), 5) for _ in state], torch.device("cpu"))
    extra = drafter.window(state, tree)
    assert extra.ids_BE.shape == (3, 3 * w) and drafter.extra_rows == 3 * w
    see_BEX, on_BE = extra.place(torch.ones(3, 1, 1, dtype=torch.bool))
    assert int(on_BE.abs().sum()) == 0  # all hang on the anchor
    for row, levels in enumerate((1, 3, 0)):
        assert extra.valid_BE[row].tolist() == [e < levels * w for e in range(3 * w)]
        for i, j in product(range(levels), range(w)):
            want = set(range(j + 1)) | {level * w + j for level in range(i + 1)}
            assert see_BEX[row, i * w + j].nonzero()[:, 0].tolist() == [0, *sorted(e + 1 for e in want)]
            assert int(extra.depths_BE[row, i * w + j]) == 1 + i + j and int(extra.ids_BE[row, i * w + j]) == 10 * i + j


@pytest.mark.parametrize("count", [1, 2, 3, 9])
def test_lookahead_windows_move_with_the_text(count: int) -> None:
    """Tokens are named by their position: after a move, what is still inside the window stands where it stood."""
    config = LookaheadConfig(window=5, n=4)
    row, anchor = Row([0], [[1 + j for j in range(5)]]), 0
    for _ in range(6):
        top = len(row.levels) - 1
        row.move([anchor + 2 + top + j for j in range(5)], config, count)
        anchor += count
        assert len(row.levels) == min(config.n - 1, top + 2)
        turn = count if top + 1 < config.n - 1 else count - 1
        for i, level in enumerate(row.levels):
            inside = [level[j] == anchor + 1 + i + j for j in range(5)]
            assert all(inside[: max(0, 5 - turn)]), (row.levels, anchor)
        for i, level in enumerate(row.levels):  # what came in at the end is named by its place from here on
            row.levels[i] = [anchor + 1 + i + j for j in range(len(level))]


def test_lookahead_keeps_the_newest_ngrams() -> None:
    row = Row()
    for gram in ((1, 2, 3), (1, 4, 5), (1, 2, 3), (1, 6, 7), (2, 8, 9)):
        collect(row.pool, gram, 2)
    assert row.pool == {1: [(2, 3), (6, 7)], 2: [(8, 9)]}


def test_lookahead_collects_jacobi_iterations(scripted: Any) -> None:
    """Each n-gram of the window is a column: every token the target's own after the one before it, in its context."""

    def rule(before: Tensor, last: Tensor, at: Tensor) -> Tensor:
        return torch.nn.functional.one_hot((before.clamp(min=0) * 3 + last * 5 + 1) % 11, 11).double()

    real = scripted.Target(rule, 11)
    drafter = make("lookahead", target=real, prompt=False, n=4, window=3)
    pools: list[Any] = []
    drafter.init = lambda prefill: pools.append([Row() for _ in range(prefill.rows)]) or pools[-1]
    generate(real, [[1, 2, 3]], SamplingParams(max_new_tokens=20), drafter, replace(TREE, k=3))
    grams = [(first, *rest) for first, found in pools[0][0].pool.items() for rest in found]
    assert len(grams) > 10
    for gram in grams:  # successive iterations: token i + 2 follows from the two before it in the same column
        for a, b, c in zip(gram, gram[1:], gram[2:], strict=False):
            assert c == (a * 3 + b * 5 + 1) % 11


# Lossless


@pytest.fixture(scope="module")
def looping() -> Any:
    """A float64 target whose layers add little, so that the next token hangs on the last one above all: its greedy text
    soon repeats itself."""
    made = tiny_target(dtype=torch.float64, width=32, layers=2)
    embed, head = made.model.get_input_embeddings().weight, made.model.get_output_embeddings().weight
    with torch.no_grad():
        for weight in made.model.parameters():
            if weight is not embed and weight is not head and weight.dim() == 2:
                weight.mul_(0.2)
    return made


def test_recycling_is_handed_every_row_of_the_verification(looping: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of rejected nodes too: what the target says after each, as a pass over its own path has it."""
    real, drafter = looping, make("recycling", target=looping)
    prompts, checked = [[5, 6, 7, 8], [40, 41], [99]], 0
    known: list[list[int]] = [[], [], []]
    last: list[Tree] = []
    propose = drafter.propose

    def spy(state: Any, commit: Commit, *rest: Any) -> Any:
        nonlocal checked
        if commit.verified is not None:
            for row, m in commit.verified.valid_BM.nonzero().tolist():
                path, at = [], m
                while at:
                    path.append(int(last[-1].tokens_BN[row, at - 1]))
                    at = int(last[-1].parents_BN[row, at - 1])
                line = torch.tensor([known[row] + path[::-1]])
                states = real.forward(line, torch.arange(line.shape[1])[None])
                want_V = real.head(states.last_hidden_BTD[0, -1])
                assert torch.allclose(commit.verified.logits_BMV[row, m], want_V, atol=1e-9)
                assert int(commit.verified.tokens_BM[row, m]) == int(line[0, -1])
                checked += 1
        for row, count in enumerate(commit.counts_B.tolist()):
            if count:
                known[row] = known[row][:-1] + commit.ids_BT[row, :count].tolist() + [int(commit.anchor_B[row])]
            elif commit.verified is not None:
                assert not commit.verified.valid_BM[row].any()
        state, tree = propose(state, commit, *rest)
        last.append(tree)
        return state, tree

    drafter.propose = spy
    monkeypatch.setattr(Engine, "_rows_move", lambda self: False)  # rows are told apart by their places
    params = [SamplingParams(max_new_tokens=n) for n in (30, 4, 30)]
    generate(real, prompts, params, drafter, replace(TREE, max_rows=3))
    assert checked > 60


def prompts_of(n: int, tokens: int) -> list[list[int]]:
    dice = torch.Generator().manual_seed(3)
    lengths = torch.randint(1, 12, (n,), generator=dice).tolist()
    return [torch.randint(tokens, (length,), generator=dice).tolist() for length in lengths]


@pytest.mark.parametrize("rows", [1, 4])
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("method", TRAINING_FREE)
def test_greedy_identity(looping: Any, method: str, shape: str, rows: int) -> None:
    """Answers of different lengths, so that rows end at different times; one drafter for all batches."""
    prompts = prompts_of(8, looping.facts.tokens)
    params = [SamplingParams(max_new_tokens=12 + 5 * i, ignore_eos=True) for i in range(8)]
    plain = ids_of(generate(looping, prompts, params))
    drafter = make(method, target=looping)
    results = generate(looping, prompts, params, drafter, replace(SHAPES[shape], max_rows=rows))
    assert ids_of(results) == plain
    total = sum((r.stats for r in results[1:]), results[0].stats)
    least = (
        0 if method == "jacobi" and shape == "chain" else 30
    )  # its guesses follow from wrong ones; tests/test_jacobi.py
    assert total.from_draft > least and total.drafted > total.from_draft, (total.from_draft, total.drafted)


@pytest.mark.parametrize("method", TRAINING_FREE)
def test_greedy_identity_where_nothing_repeats(tiny: Any, method: str) -> None:
    real = tiny(dtype=torch.float64)
    prompts, params = prompts_of(6, real.facts.tokens), SamplingParams(max_new_tokens=20)
    plain = ids_of(generate(real, prompts, params))
    for shape in SHAPES.values():
        assert ids_of(generate(real, prompts, params, make(method, target=real), replace(shape, max_rows=4))) == plain


@pytest.mark.parametrize("method", TRAINING_FREE)
def test_fixed_width_gives_the_bits_of_plain_decoding(method: str) -> None:
    """fp32; the drafts' lengths differ from step to step, the width does not."""
    real = tiny_target(width=32, layers=2)
    drafter = make(method, target=real, **({"block": 3} if method == "jacobi" else {}))  # which says how deep it drafts
    width = 4 + getattr(drafter, "extra_rows", 0)
    decode = DecodeConfig(k=3, fixed_width=width, keep_logits=True)
    prompts, params = prompts_of(3, real.facts.tokens), SamplingParams(max_new_tokens=12, ignore_eos=True)
    plain = generate(real, prompts, params, None, decode)
    got = generate(real, prompts, params, drafter, decode)
    assert ids_of(got) == ids_of(plain)
    assert all(torch.equal(a.logits, b.logits) for a, b in zip(got, plain, strict=True))  # type: ignore[arg-type]


V = 4
P_VVV = torch.randn(V, V, V, generator=torch.Generator().manual_seed(1), dtype=torch.float64) * 1.2
SAMPLED_PROMPT = [0, 1, 2, 0, 1, 2, 3, 1, 2]


def by_table(before: Tensor, last: Tensor, at: Any) -> Tensor:
    return P_VVV[before.clamp(min=0), last]


def law(params: SamplingParams, length: int) -> dict[tuple[int, ...], float]:
    exact: dict[tuple[int, ...], float] = {}
    for tokens in product(range(V), repeat=length):
        row, chance = list(SAMPLED_PROMPT), 1.0
        for x in tokens:
            chance *= float(probs(P_VVV[row[-2], row[-1]][None], params)[0, x])
            row.append(x)
        exact[tokens] = chance
    return exact


def p_value(results: list[Result], exact: dict[tuple[int, ...], float]) -> float:
    """Chi-square of the answers; cells with fewer than 10 expected are pooled."""
    seen: dict[tuple[int, ...], int] = {}
    for result in results:
        seen[tuple(result.ids)] = seen.get(tuple(result.ids), 0) + 1
    n, cells, rare = len(results), [], [0.0, 1e-9]
    assert set(seen) <= {x for x, chance in exact.items() if chance > 0}
    for x, chance in exact.items():
        if chance * n >= 10:
            cells.append((seen.get(x, 0), chance * n))
        else:
            rare = [rare[0] + seen.get(x, 0), rare[1] + chance * n]
    cells.append((rare[0], rare[1]))  # type: ignore[arg-type]
    statistic = sum((a - b) ** 2 / b for a, b in cells)
    return float(
        torch.special.gammaincc(
            torch.tensor((len(cells) - 1) / 2, dtype=torch.float64), torch.tensor(statistic / 2, dtype=torch.float64)
        )
    )


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("method", TRAINING_FREE)
def test_the_joint_law_of_sampled_answers(scripted: Any, method: str, shape: str) -> None:
    """Tokens 1 to 4 jointly, 256 cells: the later ones are drafted from what the earlier ones were, and from what was
    rejected on the way."""
    real, n = scripted.Target(by_table, V), 8_000
    drafter = make(method, target=real, **SMALL.get(method, {}))
    params = SamplingParams(temperature=0.9, max_new_tokens=4)
    each = [replace(params, seed=i) for i in range(n)]
    decode = replace(SHAPES[shape], max_rows=n)
    results = generate(real, [SAMPLED_PROMPT] * n, each, drafter, decode)
    rule = "ratio" if getattr(drafter, "draws", False) else "target_only"
    assert results[0].stats.rule == rule and sum(r.stats.from_draft for r in results) > n / 3
    assert p_value(results, law(params, 4)) > 1e-3


@pytest.mark.parametrize("method", TRAINING_FREE)
def test_an_answer_hangs_on_its_seed_alone(scripted: Any, method: str) -> None:
    """CASES B43: not on its batch, its place there, or what was asked before; and sample-match repeats plain sampling."""
    real, drafter = scripted.Target(by_table, V), make(method, target=scripted.Target(by_table, V))
    prompts = [SAMPLED_PROMPT, [3, 3, 1], [2], [1, 2, 1, 2, 1]]
    each = [SamplingParams(temperature=1.0, max_new_tokens=12 + 4 * i, seed=i) for i in range(4)]
    for shape in SHAPES.values():
        alone = [generate(real, [p], s, drafter, shape)[0].ids for p, s in zip(prompts, each, strict=True)]
        assert ids_of(generate(real, prompts, each, drafter, shape)) == alone
        order = [2, 0, 3, 1]
        moved = generate(real, [prompts[i] for i in order], [each[i] for i in order], drafter, shape)
        assert ids_of(moved) == [alone[i] for i in order]
        plain = ids_of(generate(real, prompts, each))
        matched = replace(shape, verifier="sample_match")
        assert ids_of(generate(real, prompts, each, drafter, matched)) == plain


@pytest.mark.parametrize("method", TRAINING_FREE)
def test_penalties_stops_and_budgets(looping: Any, method: str) -> None:
    prompts = prompts_of(4, looping.facts.tokens)
    free = ids_of(generate(looping, prompts, SamplingParams(max_new_tokens=24, ignore_eos=True)))
    for params in (
        SamplingParams(max_new_tokens=24, repetition_penalty=1.2, frequency_penalty=0.2),
        SamplingParams(max_new_tokens=24, ignore_eos=True, stop_ids=(free[0][15], free[1][9])),
        SamplingParams(max_new_tokens=24, min_new_tokens=20, stop_ids=(free[2][12],)),
        SamplingParams(max_new_tokens=1),
    ):
        for shape in SHAPES.values():
            got = generate(looping, prompts, params, make(method, target=looping), shape)
            want = generate(looping, prompts, params)
            assert ids_of(got) == ids_of(want) and [r.stop_reason for r in got] == [r.stop_reason for r in want]


# State


@pytest.mark.parametrize("method", ["ngram", "suffix"])
def test_reset_rows_begin_anew_and_leave_the_others(method: str) -> None:
    texts, prompts = some_texts(4, rows=2)
    place = Prefill(2, 0, torch.device("cpu"), torch.float32)
    budget = Budget(6, 4, 2)
    one, two = make(method), make(method)
    a, b = one.init(place), two.init(place)
    for commit, _ in ragged(texts, prompts, 0):
        a, _ = one.propose(a, commit, budget, None, None)
    a = one.reset(a, torch.tensor([0]))
    again = [some_texts(9)[0][0], texts[1]]
    for step, (commit, _) in enumerate(ragged(again, prompts, 1)):
        if step == 0:  # row 1 goes on: nothing new, that is, it is done
            commit.counts_B[1] = 0
            b, _ = two.propose(b, commit, budget, None, None)
        else:
            commit.counts_B[1] = 0
            b, want = two.propose(b, commit, budget, None, None)
            a, got = one.propose(a, commit, budget, None, None)
            assert paths_of(got, 0) == paths_of(want, 0) and not paths_of(got, 1)
            continue
        a, _ = one.propose(a, commit, budget, None, None)
    kept = a[1].tokens if method == "ngram" else a[1].own.corpus.tokens
    assert kept == texts[1][: len(kept)] and len(kept) >= len(texts[1]) - 4


def test_reset_of_recycling_and_lookahead(looping: Any) -> None:
    place = Prefill(2, 0, torch.device("cpu"), torch.float64)
    ids_BT = torch.tensor([[5, 6, 7], [8, 9, 10]])
    out = looping.forward(ids_BT, torch.arange(3).expand(2, 3))
    commit = Commit(
        ids_BT, torch.tensor([3, 3]), torch.arange(3).expand(2, 3), torch.tensor([5, 8]), None, out.last_hidden_BTD
    )
    for method in ("recycling", "lookahead"):
        drafter = make(method, target=looping)
        state, tree = drafter.propose(drafter.init(place), commit, Budget(6, 3, 3), None, None)
        assert method == "lookahead" or (tree.valid_BN.any(1).all() and (state[:, 5:11] >= 0).any())
        state = drafter.reset(state, torch.tensor([0]))
        if method == "recycling":
            assert (state[0] == -1).all() and (state[1] >= 0).any()
        else:
            assert state[0] == Row() and state[1].levels
        state, again = drafter.propose(state, commit, Budget(6, 3, 3), None, None)
        assert paths_of(again, 0) == paths_of(tree, 0)


def test_answers_to_earlier_requests_are_shared_if_wanted(looping: Any) -> None:
    """The same question again: its answer is known. Greedy output is the same; the structure stays within its size."""
    prompt, params = [[7, 3]], SamplingParams(max_new_tokens=30, ignore_eos=True)
    plain = ids_of(generate(looping, prompt, params))
    alone, shared = make("suffix", target=looping), make("suffix", target=looping, shared=True)
    runs = [
        [generate(looping, prompt, params, drafter, replace(CHAIN, k=8))[0] for _ in range(2)]
        for drafter in (alone, shared)
    ]
    assert all(r.ids == plain[0] for pair in runs for r in pair)
    (first, second), (begins, knows) = runs
    assert first.stats.verifies == second.stats.verifies == begins.stats.verifies > knows.stats.verifies
    small = make("suffix", target=looping, shared=True, shared_tokens=50)
    for i in range(6):
        generate(looping, [[i]], params, small, CHAIN)
    small.init(Prefill(1, 0, torch.device("cpu"), torch.float64))
    assert 0 < len(small.corpus.tokens) <= 50


def test_shared_answers_and_sampling_need_a_seed_per_request(scripted: Any) -> None:
    real = scripted.Target(by_table, V)
    drafter = make("suffix", target=real, shared=True, shared_tokens=60)
    hot = SamplingParams(temperature=1.0, max_new_tokens=4, seed=1)
    generate(real, [[1], [2]], hot, drafter)  # one batch: neither sees the other's answer
    generate(real, [[1]], replace(hot, seed=2), drafter)
    generate(real, [[1]], replace(hot, temperature=0.0), drafter)
    with pytest.raises(ValueError, match="two sampled requests with the seed 1"):
        generate(real, [[3]], hot, drafter)
    n, params = 800, replace(hot, temperature=0.9)
    each = [replace(params, seed=i) for i in range(10, 10 + 5 * n)]
    results: list[Result] = []
    for part in range(5):  # later batches draft from what earlier ones sampled
        some = each[part * n : (part + 1) * n]
        results += generate(real, [SAMPLED_PROMPT] * n, some, drafter, replace(TREE, max_rows=n))
    assert p_value(results, law(params, 4)) > 1e-3


# What they are worth


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("method", TRAINING_FREE)
def test_a_text_that_repeats_itself_takes_fewer_passes(scripted: Any, method: str, shape: str) -> None:
    def cycle(before: Tensor, last: Tensor, at: Tensor) -> Tensor:
        return torch.nn.functional.one_hot((last + 1) % 9, 12).double()

    real = scripted.Target(cycle, 12)
    result = generate(real, [[3, 4]], SamplingParams(max_new_tokens=201), make(method, target=real), SHAPES[shape])[0]
    assert result.ids == [(5 + i) % 9 for i in range(201)]
    if method == "jacobi" and shape == "chain":
        return  # has no memory: what it guesses behind a wrong token is as wrong
    assert len(real.passes) == 1 + result.stats.verifies and result.stats.tau > 3.5, result.stats.tau


def test_where_there_is_no_match_a_step_is_a_plain_one(scripted: Any) -> None:
    def counting(before: Tensor, last: Tensor, at: Tensor) -> Tensor:
        return torch.nn.functional.one_hot((last + 1) % 64, 64).double()

    params = SamplingParams(max_new_tokens=40)
    for method in ("ngram", "suffix"):
        for decode, width in ((CHAIN, 1), (TREE, 1), (replace(CHAIN, fixed_width=5), 5)):
            for hot in (params, replace(params, temperature=1e-6, seed=0)):
                real = scripted.Target(lambda *x: counting(*x) * 50, 64)
                result = generate(real, [[0]], hot, make(method, target=real), decode)[0]
                assert result.ids == list(range(1, 41)) and set(real.passes[1:]) == {(1, width)}
                assert result.stats.drafted == 0 and result.stats.tau == 1.0


# Commands


def test_settings_on_the_command_line() -> None:
    cfg = parse(
        GenerateConfig, ["hi", "--model", "ngram", "--drafter.ngram.max_n", "4"], prog="x", positional=("prompt",)
    )
    assert cfg.drafter == FreeSettings(ngram=NgramConfig(max_n=4))
    cfg = parse(EvaluateConfig, ["model=ngram", "also=recycling", "drafter.recycling.levels=4,4"], prog="x")
    assert cfg.drafter.recycling == RecyclingConfig(levels=(4, 4)) and cfg.also == ("recycling",)
    for argv, message in (
        (["model=ngram", "drafter.max_n=4"], "nearest valid key: 'drafter.ngram.max_n'"),
        (["model=ngram", "drafter.ngram.max_n=0"], "min_n=1, max_n=0"),
        (["model=ngram", "drafter.suffix.factor=2"], "drafter.suffix is set, but suffix drafts nothing here"),
        (["model=suffix", "drafter.suffix.shared=true"], "the drafter would know the answers"),
    ):
        with pytest.raises(UsageError, match=message.replace("(", r"\(")):
            parse(EvaluateConfig, argv, prog="x")
    for name, change in (
        ("ngram", {"min_n": 0}),
        ("suffix", {"factor": 0.0}),
        ("suffix", {"max_match": 0}),
        ("recycling", {"levels": ()}),
        ("recycling", {"successors": 0}),
        ("lookahead", {"n": 1}),
    ):
        with pytest.raises(ValueError, match=f"{name}: "):
            TRAINING_FREE[name].Config(**change)


@pytest.mark.parametrize("method", TRAINING_FREE)
def test_generate_takes_them(looping: Any, method: str, monkeypatch: Any, capsys: Any) -> None:
    monkeypatch.setattr(command, "load_target", lambda name, **options: looping)
    run_generate(
        GenerateConfig(prompt="Again and again", model=method, target="tiny", max_new_tokens=30, ignore_eos=True)
    )
    text = " ".join(capsys.readouterr().out.split())
    assert "acceptance rule: greedy (exact; temperature 0)" in text and "tokens from the draft" in text
    with pytest.raises(ValueError, match=f"{method} drafts for any target and names none: add --target"):
        run_generate(GenerateConfig(prompt="x", model=method))
    with pytest.raises(ValueError, match="drafts nothing here"):
        other = FreeSettings(ngram=NgramConfig(max_n=9))
        run_generate(GenerateConfig(prompt="x", model="suffix", target="tiny", drafter=other))


def test_evaluate_takes_them_all_in_one_run(looping: Any, tmp_path: Path, monkeypatch: Any, capsys: Any) -> None:
    monkeypatch.setattr(evaluation, "load_target", lambda name, **options: looping)
    first, *others = TRAINING_FREE
    cfg = EvaluateConfig(
        model=first, also=tuple(others), target="tiny", prompts=2, max_new_tokens=16, k=(3,), trees=("chain", "static"),
        temperatures=(0.0, 1.0), nodes=8, width=3, dtype="float64", hf_prompts=0, bootstrap=50, out=str(tmp_path),
    )  # fmt: skip
    assert run_evaluate(cfg) == 0
    report = json.loads((tmp_path / "report.json").read_text())
    rows = {row["name"]: row for row in report["rows"]}
    assert report["run"]["exports"] == {} and not report["alarms"] and "plain, width 4" not in rows
    for method in TRAINING_FREE:
        for tree in ("chain", "static"):
            depth, rule = (16, "ratio") if method == "jacobi" else (3, "target_only")
            row = rows[f"{method} {tree} K={depth}"]
            assert row["method"] == method and row["decode"] == "speculate" and row["drafter"] == method
            assert row["seconds_per_pass"]["draft"] > 0 and row["tau"] >= 1 and row["lossless"] == "exact"
            assert row["identical_to_plain"] is True and row["red"] is None and row["verifier"] == "greedy"
            assert rows[f"{method} {tree} K={depth} T=1"]["verifier"] == rule
    assert set(report["gains"]) <= {"K", "draft cost"}
    assert "ngram chain K=3" in capsys.readouterr().out
    with pytest.raises(ValueError, match="names none: add --target"):
        evaluation.evaluate("ngram", EvaluateConfig(model="ngram"), Console(file=io.StringIO()))


def test_what_proposers_cannot_use_is_refused(looping: Any) -> None:
    drafter = free_drafter("ngram", looping)
    with pytest.raises(ValueError, match="choices"):
        generate(
            looping, [[1]], SamplingParams(max_new_tokens=3), drafter, DecodeConfig(tree="static", choices=((0,), (1,)))
        )
    with pytest.raises(ValueError, match="bound to no target"):
        kind = TRAINING_FREE["recycling"]
        generate(looping, [[1]], SamplingParams(max_new_tokens=3), kind(kind.Config(), looping.facts))
