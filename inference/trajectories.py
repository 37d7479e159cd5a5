"""Jacobi states for answers of a target. Part of inference/rollout.py (`--trajectories N`).

Public code walks a conversation at a time, block after block, without a cache. Here the answers come first, by ordinary
batched decoding (or are there already); what Jacobi decoding would have gone through on its way to them is computed for
all blocks of several conversations at once (models/trajectories.py), and kept as differences (data/jacobi_states.py).

The fixed point of a block is what the model says greedily; near ties, which fall otherwise when a model in bfloat16 reads
many tokens at a time, are the answer's. Where the answer is something else, its block is left out and counted; if many
are, the answers are not this model's greedy ones, and the run stops. Draws are keyed by the run's seed and the conversation's id: in float64 a file
does not depend on how many conversations were read at a time.

Test: pytest tests/test_collect_states.py
"""

from __future__ import annotations

import hashlib
import itertools
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch

from ..data.encode import Refused, Sample, encode, ids_belong
from ..data.jacobi_states import pack_states
from ..data.packing import make_batch, pack
from ..data.sources import Conversation
from ..models.trajectories import Walk, answer_blocks, corrected, first_states
from .answer_file import RolloutReport

FAR = 1 << 40  # no cut
ROW = 512  # tokens of a packed row, where no conversation is longer
MOST_OTHER = 0.2  # share of blocks that may differ from what the model says ...
FEW = 8  # ... and count that says nothing about a share yet


@dataclass(frozen=True)
class TrajectoryConfig:
    """Which Jacobi states are computed."""

    block: int = 16
    """Tokens of a block, counted from the answer's first (CLLM: 16)."""
    start: Literal["prompt", "text", "last", "random"] = "prompt"
    """First guesses (models/trajectories.py, `first_states`); CLLM draws them from the prompt. The one prior is `random`:
    uniform over the ids, which a decoder can draw from without knowing an answer."""
    augment: float = 0.0
    """Chance that a wrong token of a state is replaced by the text's (CLLM's option: about 0.5)."""
    drop_repeated: int = 10
    """Answers with one token so many times in a row are dropped (CLLM: 10); 0 = none."""

    def __post_init__(self) -> None:
        if self.block < 2:
            raise ValueError(f"trajectories = {self.block}: give the tokens of a block, at least 2, or 0 for no states")
        if not 0 <= self.augment <= 1:
            raise ValueError(f"augment = {self.augment}: give a share from 0 to 1")
        if self.drop_repeated < 0 or self.drop_repeated == 1:
            raise ValueError(f"drop_repeated = {self.drop_repeated}: give a count from 2, or 0 to keep all")


def with_states(
    target: Any, talks: Sequence[Conversation | str], config: TrajectoryConfig, seed: int
) -> list[Conversation | str]:
    """The conversations with the states of their last answers, or why there are none; texts are handed through. Answers
    without ids get those of their text."""
    out: list[Conversation | str] = list(talks)
    samples: dict[int, Sample] = {}
    for i, talk in enumerate(talks):
        if isinstance(talk, str):
            continue
        try:
            out[i], samples[i] = _answer(talk, target, config)
        except Refused as reason:
            out[i] = str(reason)
    if not samples:
        return out
    places = list(samples)
    lengths = [len(sample) for sample in samples.values()]
    rows = [[places[k] for k in row] for row in pack(lengths, max(ROW, *lengths), seed, 0)]
    batch = make_batch([[samples[i] for i in row] for row in rows], None, seed, 0).to(target.device)
    blocks = answer_blocks(batch, config.block)
    walk = Walk(target, blocks)
    states_BIT, _ = walk.to_the_end(first_states(blocks, config.start, tokens=target.facts.tokens))
    states_BIT = corrected(blocks, states_BIT, config.augment).cpu()
    # A block is counted where it begins.
    other_BT = (blocks.inside_BT & ~walk.same_BT & (blocks.place_BT == 0)).cpu()
    for b, row in enumerate(rows):
        at = 0
        for i in row:
            answer = samples[i].supervised.nonzero()[:, 0] + at
            other = int(other_BT[b, answer].sum())
            packed = pack_states(states_BIT[b][:, answer], config.block, config.start, config.augment, other)
            talk = out[i]
            assert isinstance(talk, Conversation)
            out[i] = replace(talk, jacobi=packed)
            at += len(samples[i])
    return out


def _answer(talk: Conversation, target: Any, config: TrajectoryConfig) -> tuple[Conversation, Sample]:
    """The conversation with its last answer's ids, and its tokens, of which those ids alone are supervised."""
    tokenizer, number = target.tokenizer, sample_number(talk.id)
    talk = replace(talk, jacobi=None)
    ids = talk.answer_ids if ids_belong(talk, tokenizer) else None
    sample = encode(talk, tokenizer, number, FAR)
    first, end = _last_answer(sample)
    if ids is None:
        ids = sample.ids[first:end].tolist()
        talk, text_n = replace(talk, answer_ids=ids, answer_order=None), sample.ids[:end]
        sample = encode(talk, tokenizer, number, FAR)  # as it will be read from the line
        if not torch.equal(sample.ids[:end], text_n):
            raise Refused("the template does not put the answer's tokens behind its prompt")
    elif sample.ids[first : first + len(ids)].tolist() != ids:
        raise Refused("the template does not put the answer's tokens behind its prompt")
    if max(len(list(same)) for _, same in itertools.groupby(ids)) >= (config.drop_repeated or len(ids) + 1):
        raise Refused(f"a token {config.drop_repeated} times in a row")
    if len(sample) > target.facts.max_positions:
        raise Refused("prompt and answer exceed the target's positions")
    place_n = torch.arange(len(sample))
    return talk, replace(sample, supervised=(place_n >= first) & (place_n < first + len(ids)), order=None)


def sample_number(name: str) -> int:
    """A sample id for draws, of a conversation's id."""
    return int.from_bytes(hashlib.sha256(name.encode()).digest()[:8], "big") >> 1


def _last_answer(sample: Sample) -> tuple[int, int]:
    """First and behind the last token of the last supervised run."""
    end = int(sample.supervised.nonzero()[-1]) + 1
    return end - int(sample.supervised[:end].flip(0).int().argmin()), end


def refuse_foreign(report: RolloutReport) -> None:
    """Stop when the answers cannot be this model's greedy ones.

    Raises:
        ValueError: more than `MOST_OTHER` of the blocks, and at least `FEW`, are not what the model says.
    """
    if report.other >= FEW and report.other > MOST_OTHER * report.blocks:
        raise ValueError(
            f"{report.other} of {report.blocks} blocks are not what the model says: these answers are not its greedy ones. "
            "Let it answer itself (leave --answers out), or name the model that gave them; delete the file that was begun"
        )
