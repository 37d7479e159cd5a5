"""Figures of consistency models: cross-entropy of given answers, repetition, and which places settle in which pass.

A student that collapses repeats itself (train/guard.py counts that too), and its cross-entropy on the base's answers rises.

    answer_losses(target, prompts, answers)         # nats of each answer
    repeated_grams(answer)                          # (4-grams that occurred before in it, all its 4-grams)
    convergence_of(blocks)                          # blocks: models/convergence.py `block_states`, of all answers
    pytest tests/test_consistency_figures.py
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from .diffusion_figures import save_figure
from .report import safe_label

GRAM = 4
CHUNK = 2**24  # logits that are held at a time


def repeated_grams(ids: Sequence[int], n: int = GRAM) -> tuple[int, int]:
    """(n-grams of an answer that occurred before in it, all its n-grams). A text shorter than n has none."""
    if n < 1:
        raise ValueError(f"n = {n}: n-grams have at least one token")
    grams = [tuple(ids[i : i + n]) for i in range(len(ids) - n + 1)]
    return len(grams) - len(set(grams)), len(grams)


@torch.no_grad()
def answer_losses(
    target: Any, prompts: Sequence[Sequence[int]], answers: Sequence[Sequence[int]], *, rows: int = 8
) -> list[float]:
    """Cross-entropy of each answer behind its prompt, summed over its tokens (its end included), in nats.

    Teacher-forced, over the ids that the tokenizer has, in float32 at least. `rows`: texts per pass, padded on the right,
    where no row that counts sees it. Open adapters' views are the caller's. Raises ValueError for an empty prompt.
    """
    if len(prompts) != len(answers) or not all(map(len, prompts)):
        raise ValueError(f"{len(prompts)} prompts, {len(answers)} answers: needed as many of both, and no empty prompt")
    order = sorted(range(len(prompts)), key=lambda i: len(prompts[i]) + len(answers[i]))
    found: dict[int, float] = {}
    for first in range(0, len(order), rows):
        chosen = order[first : first + rows]
        texts = [[*prompts[i], *answers[i]] for i in chosen]
        longest = max(map(len, texts))
        ids_BT = torch.tensor([text + [0] * (longest - len(text)) for text in texts], device=target.device)
        positions_BT = torch.arange(longest, device=target.device).expand_as(ids_BT)
        hidden_BTD = target.forward(ids_BT, positions_BT).last_hidden_BTD
        for row, i in enumerate(chosen):
            start, stop = len(prompts[i]) - 1, len(texts[row]) - 1  # the row before a token predicts it
            total = 0.0
            for part in torch.arange(start, stop, device=target.device).split(max(1, CHUNK // target.facts.vocab)):
                logits_RV = target.head(hidden_BTD[row, part])[:, : target.facts.tokens]
                wide_RV = logits_RV.to(torch.promote_types(logits_RV.dtype, torch.float32))
                total += float(torch.nn.functional.cross_entropy(wide_RV, ids_BT[row, part + 1], reduction="sum"))
            found[i] = total
    return [found[i] for i in range(len(prompts))]


@dataclass(frozen=True)
class Convergence:
    """The convergence map of many blocks. `blocks_N`: blocks that have a place there; `right_IN`: of these, how many had
    their final token there in state i (0 = the start). A block that is done stays as it is. `passes`: passes until
    nothing was wrong any more -> blocks."""

    blocks_N: tuple[int, ...]
    right_IN: tuple[tuple[int, ...], ...]
    passes: Mapping[int, int]

    @property
    def share_IN(self) -> list[list[float]]:
        """Share of the blocks that are right, by state and place."""
        return [[right / of for right, of in zip(row, self.blocks_N, strict=True)] for row in self.right_IN]

    @property
    def mean_passes(self) -> float:
        """Passes until a block is right, on average over blocks."""
        return sum(i * n for i, n in self.passes.items()) / sum(self.passes.values())

    def to_json(self) -> dict[str, Any]:
        """What reports hold."""
        return {
            "blocks": list(self.blocks_N),
            "right": [list(row) for row in self.right_IN],
            "passes": {str(i): self.passes[i] for i in sorted(self.passes)},
            "mean_passes": self.mean_passes,
        }


def convergence_of(blocks: Iterable[Sequence[Sequence[int]]]) -> Convergence | None:
    """Count, over blocks, which places are right after how many passes. None without a block.

    `blocks`: per block its states, the start first, the fixed point last, each the block's n tokens (an answer's last
    block may be shorter). A place is right in a state when its token is the fixed point's, by luck too.
    """
    every = [[list(state) for state in states] for states in blocks]
    if any(not states or len({len(state) for state in states}) != 1 or not states[0] for states in every):
        raise ValueError("convergence: every block needs a state at least, and as many tokens in each, one at least")
    if not every:
        return None
    length, width = max(map(len, every)), max(len(states[0]) for states in every)
    right = [[0] * width for _ in range(length)]
    there, passes = [0] * width, Counter[int]()
    for states in every:
        last = states[-1]
        for place in range(len(last)):
            there[place] += 1
        passes[next(i for i, state in enumerate(states) if state == last)] += 1
        for i in range(length):
            state = states[min(i, len(states) - 1)]
            for place, token in enumerate(state):
                right[i][place] += token == last[place]
    return Convergence(tuple(there), tuple(map(tuple, right)), dict(passes))


def convergence_figure(maps: Mapping[str, Convergence], most: int = 32) -> Any:
    """Convergence maps side by side: place in the block to the right, passes downwards (`most` at most), the share of
    blocks that are right by colour. Cells are drawn as shapes, since pages of ours load no images."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(1.6 + 3.4 * max(1, len(maps)), 3.6), layout="constrained")
    axes = figure.subplots(1, max(1, len(maps)), squeeze=False, sharey=True)[0]
    mesh = None
    for i, (name, counts) in enumerate(maps.items()):
        share = counts.share_IN[: most + 1]
        mesh = axes[i].pcolormesh(share, vmin=0, vmax=1, cmap="viridis")
        axes[i].set_title(safe_label(f"{name}: {counts.mean_passes:.1f} passes per block"), fontsize=9)
        axes[i].set_xlabel("place in the block")
        for axis, size in ((axes[i].xaxis, len(counts.blocks_N)), (axes[i].yaxis, len(share))):
            ticks = range(0, size, max(1, size // 8))
            axis.set_ticks([tick + 0.5 for tick in ticks], [str(tick) for tick in ticks])
    if mesh is not None:
        axes[0].set_ylabel("pass (0 = the guesses)")
        axes[0].invert_yaxis()
        bar = figure.colorbar(mesh, ax=list(axes), label="share of blocks that are right")
        assert bar.solids is not None
        bar.solids.set_rasterized(False)
    return figure


def plot_convergence(maps: Mapping[str, Convergence], path: Path, most: int = 32) -> None:
    """`convergence_figure` as a file (SVG, or what the name says)."""
    save_figure(convergence_figure(maps, most), path)
