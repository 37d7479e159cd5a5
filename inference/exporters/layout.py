"""What an exporter is: one file form, written from a drafter and checked before anything is loaded.

An exporter never guesses. `pack` names every tensor that goes into the file and every one that a reader may look for
and will not find (`absent`, with where it comes from instead); `slots` derives exactly the same names and shapes
from `config.json` alone, so that a file can be proved complete without building the model. Serving engines do not
prove it: they leave missing tensors at random values without a word.

Tests: tests/test_export.py iterates over the table.
"""

from __future__ import annotations

import json
import shlex
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

from torch import Tensor

from ...models.drafter import Drafter, TargetFacts
from ...models.layers import rotary_settings

if TYPE_CHECKING:
    from ...models.target import Target

FORMAT = 1  # version of the `draftsmith` key and of the layouts behind it
TAPS_CONVENTION = "k names h[k], the residual stream entering layer k (h[0] = embeddings)"


@dataclass(frozen=True)
class Slot:
    """One tensor that must be in the file: its shape and kind (`float` = any floating dtype)."""

    shape: tuple[int, ...]
    kind: Literal["float", "int64", "bool"] = "float"


@dataclass(frozen=True)
class Packed:
    """A drafter in an engine's form. `absent`: tensor name -> where a reader takes it from instead; `untrained`: tensor
    name -> what it is, for those in the file that training did not make. `limits`: what an engine that reads the form
    does otherwise than we do, said in the card."""

    config: dict[str, Any]
    tensors: dict[str, Tensor]
    absent: dict[str, str] = field(default_factory=dict)
    untrained: dict[str, str] = field(default_factory=dict)
    limits: tuple[str, ...] = ()


@dataclass(frozen=True)
class Unpacked:
    """The way back: the drafter's own parameters and its draft ids (absolute, sorted; None = all of V).
    `target_head`: head rows in the file that must be the target's own (of the draft ids); `target_embed`: an embedding
    table that must be, but for the rows `own_rows`."""

    state: dict[str, Tensor]
    draft_ids: Tensor | None
    target_head: Tensor | None = None
    target_embed: Tensor | None = None
    own_rows: tuple[int, ...] = ()


@dataclass(frozen=True)
class Exporter:
    """One file form. `serve(config, target, draft, k)` gives command lines per engine; `loads` says which engines read it,
    `holds` what is in the file."""

    method: str
    form: str
    loads: str
    pack: Callable[[Drafter, Target | None], Packed]
    slots: Callable[[Mapping[str, Any]], dict[str, Slot]]
    unpack: Callable[[Mapping[str, Any], dict[str, Tensor]], Unpacked]
    serve: Callable[[Mapping[str, Any], str, str, int], dict[str, str]]
    holds: str = "draft head"


@dataclass(frozen=True)
class RunFacts:
    """What an export records of the run that made the head. Everything is optional, nothing is invented.

    `config` is the resolved run configuration; `data` and `training` are free facts for the card (counts, minutes,
    losses); `estimated` is {"k", "tau", "alpha"} as measured or simulated at the end of training; `report` is the
    JSON of `draftsmith evaluate`; `origin` says where a converted head came from (file names and hashes).
    """

    config: dict[str, Any] = field(default_factory=dict)
    command: str = ""
    versions: dict[str, str] = field(default_factory=dict)
    data: dict[str, Any] = field(default_factory=dict)
    training: dict[str, Any] = field(default_factory=dict)
    train_length: int | None = None
    estimated: dict[str, Any] | None = None
    report: dict[str, Any] | None = None
    licence: str | None = None
    origin: str | None = None


def rope_keys(facts: TargetFacts) -> dict[str, Any]:
    """RoPE settings of the draft in both spellings: transformers 4 reads `rope_theta` and `rope_scaling`, 5 reads
    `rope_parameters`. ValueError for a target without a base, or of a type that drafts don't support."""
    rope = rotary_settings(facts)
    keys: dict[str, Any] = {"rope_theta": rope["rope_theta"], "rope_parameters": rope}
    return keys if rope["rope_type"] == "default" else keys | {"rope_scaling": rope}


def engine_limits(facts: TargetFacts) -> tuple[str, ...]:
    """What engines' Llama-shaped drafts can't express of this target."""
    limits = []
    if facts.activation != "silu":
        limits.append(f"engines run the draft's MLP with silu, it was trained with the target's {facts.activation}")
    if facts.family.startswith("gemma"):
        limits.append("this family scales its embeddings, engines' drafts do not")
    return tuple(limits)


def shape_of(config: Mapping[str, Any], *names: str) -> tuple[int, ...]:
    """Sizes from config.json; a missing or non-positive one is an error that names the key."""
    sizes = []
    for name in names:
        value = config.get(name)
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            raise ValueError(f"config.json: {name} is {value!r}, needed: a positive whole number")
        sizes.append(value)
    return tuple(sizes)


def attention_slots(
    prefix: str, width_in: int, width: int, heads: int, kv_heads: int, head_dim: int
) -> dict[str, Slot]:
    """Projection weights of one attention layer whose input is `width_in` wide."""
    return {
        f"{prefix}.q_proj.weight": Slot((heads * head_dim, width_in)),
        f"{prefix}.k_proj.weight": Slot((kv_heads * head_dim, width_in)),
        f"{prefix}.v_proj.weight": Slot((kv_heads * head_dim, width_in)),
        f"{prefix}.o_proj.weight": Slot((width, heads * head_dim)),
    }


def mlp_slots(prefix: str, width: int, intermediate: int) -> dict[str, Slot]:
    """Weights of one gated MLP."""
    return {
        f"{prefix}.gate_proj.weight": Slot((intermediate, width)),
        f"{prefix}.up_proj.weight": Slot((intermediate, width)),
        f"{prefix}.down_proj.weight": Slot((width, intermediate)),
    }


def vllm(target: str, speculative: Mapping[str, Any]) -> str:
    """vLLM's command line. `speculative` is the whole configuration: vLLM infers neither method nor K from a folder."""
    return f"vllm serve {shlex.quote(target)} --speculative-config {shlex.quote(json.dumps(speculative))}"


def sglang(target: str, draft: str, algorithm: str, tokens: int, steps: int | None = None) -> str:
    """SGLang's command line. `tokens` are verified in one pass, the anchor's with them; `steps`: passes of a drafter
    that makes a chain, None = one pass makes them all."""
    line = (
        f"python -m sglang.launch_server --model-path {shlex.quote(target)} --speculative-algorithm {algorithm} "
        f"--speculative-draft-model-path {shlex.quote(draft)}"
    )
    if steps is not None:
        line += f" --speculative-num-steps {steps} --speculative-eagle-topk 1"
    return f"{line} --speculative-num-draft-tokens {tokens}"


def measure(draft: str, suite: str = "mini") -> str:
    """What is left where no engine serves a head."""
    return f"draftsmith evaluate --model {shlex.quote(draft)} --suite {suite}"
