"""Where a run's bytes are: pure arithmetic over what was counted (train/plan_trace.py) and how it is spread.

Nothing is scaled to fit a measurement; each term says how it comes about. What is left out, and said in the plan: the
process itself (interpreter, libraries, CUDA context, communication buffers), the allocator's fragments, host memory that
caches files, and what an operator takes and gives back inside itself.

Test: pytest tests/test_plan.py; against measured peaks: tests/bench/plan.py
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

Placement = Literal["replicated", "sharded", "own", "nf4", "int8", "absent"]
BUCKET = 50_000_000  # numbers in which DeepSpeed reduces gradients (configs/deepspeed, `reduce_bucket_size`)
NF4_BITS = 4.127  # QLoRA, arXiv:2305.14314, section 3: 4 bits, and 0.127 of constants that are quantised themselves
INT8_BITS = 8.0  # LLM.int8, arXiv:2208.07339; a scale per row is left out


@dataclass(frozen=True)
class Split:
    """How an engine spreads a drafter over N devices: True = each holds one N-th, False = all of it, None = there is no
    such thing. `masters`: fp32 copies that the engine itself updates. `bucket`: room in which gradients are reduced."""

    weights: bool
    masters: bool | None
    gradients: bool
    moments: bool
    bucket: bool


# Rajbhandari et al., arXiv:1910.02054, section 5. Weights are fp32 and updated in place (`engine.share_masters`). ZeRO-3's
# are whole at the peak, in the loss's forward and backward (`engine.Whole`), beside the part that each device keeps. DDP's
# buckets are the gradients themselves (`gradient_as_bucket_view`).
ENGINES: dict[str, Split] = {
    "ddp": Split(weights=False, masters=None, gradients=False, moments=False, bucket=False),
    "zero1": Split(weights=False, masters=None, gradients=False, moments=True, bucket=True),
    "zero2": Split(weights=False, masters=None, gradients=True, moments=True, bucket=True),
    "zero3": Split(weights=False, masters=True, gradients=True, moments=True, bucket=True),
}


@dataclass(frozen=True)
class Term:
    """One component of a device's memory, and how its bytes come about."""

    name: str
    bytes: int
    formula: str


@dataclass(frozen=True)
class Numbers:
    """What a recipe trains and keeps fixed, in numbers and bytes. `target_matrices`: numbers of the target's that
    quantisation rounds (projections inside the layers); `ends`: bytes of its embedding and head; `layer`: bytes of its
    largest layer; `moments`: numbers that the optimiser keeps; `head`: numbers of the target's head, `packed_head`: those of
    which a CPU keeps a packed copy from the first logits on."""

    trained: int
    fixed_bytes: int
    target: int
    target_bytes: int
    target_matrices: int
    ends: int
    layer: int
    moments: int
    head: int
    packed_head: int = 0


def share(whole: int, divided: bool, devices: int) -> int:
    return -(-whole // devices) if divided else whole


def target_bytes(numbers: Numbers, placement: Placement, devices: int) -> Term:
    """The frozen target on a device that trains."""
    whole, each = numbers.target_bytes, numbers.target_bytes / max(numbers.target, 1)
    if placement == "replicated":
        return Term("target", whole, f"{each:g} bytes x {numbers.target:,} frozen numbers")
    if placement == "sharded":
        size = numbers.ends + share(whole - numbers.ends, True, devices) + numbers.layer
        return Term(
            "target",
            size,
            f"{each:g} bytes x {numbers.target:,}: its layers / {devices} devices of a machine, one of them gathered, + its ends",
        )
    if placement in ("nf4", "int8"):
        bits = NF4_BITS if placement == "nf4" else INT8_BITS
        kept = whole - int(each * numbers.target_matrices)
        size = kept + int(bits / 8 * numbers.target_matrices)
        return Term(
            "target", size, f"{bits:g} bits x {numbers.target_matrices:,} numbers of projections + the rest as it is"
        )
    where = "on devices of its own" if placement == "own" else "its states captured before"
    return Term("target", numbers.ends, f"embedding and head alone, which the loss reads; {where}")


def device_memory(
    numbers: Numbers,
    parts: Mapping[str, int],
    engine: str,
    placement: Placement,
    devices: int,
    kept: str,
    machine: int | None = None,
) -> list[Term]:
    """The components of one device at the moment when it holds most; their sum is the peak. `parts`: of the micro-batch
    (`Step.parts`); `kept`: what most of its activations are; `machine`: those of the `devices` that are in one machine (None =
    all), over which a target is sharded."""
    split, n = ENGINES[engine], numbers.trained

    def spread(divided: bool) -> str:
        return f" / {devices} devices" if divided and devices > 1 else ""

    terms = [
        target_bytes(numbers, placement, machine or devices),
        Term("drafter", share(4 * n, split.weights, devices) + numbers.fixed_bytes,
             f"4 bytes x {n:,} trained numbers{spread(split.weights)} (fp32 masters) + {numbers.fixed_bytes:,} bytes that do not learn"),
    ]  # fmt: skip
    if split.masters is not None:
        terms.append(
            Term(
                "engine masters", share(4 * n, split.masters, devices), f"4 bytes x {n:,}{spread(split.masters)} (fp32)"
            )
        )
    kept_gradients = split.gradients and devices > 1
    gradients = share(4 * n, True, devices) if kept_gradients else parts["gradients"]
    note = "" if gradients == 4 * n or kept_gradients else ", as far as they are there when most is held"
    terms.append(Term("gradients", gradients, f"4 bytes x {n:,} trained numbers{spread(kept_gradients)}{note}"))
    if split.bucket and devices > 1:
        terms.append(Term("engine bucket", 4 * BUCKET, f"4 bytes x {BUCKET:,} (reduce_bucket_size)"))
    moments = share(4 * numbers.moments, split.moments, devices)
    terms += [
        Term("moments", moments, f"4 bytes x {numbers.moments:,} numbers of the optimiser{spread(split.moments)}"),
        Term("states", parts["states"], "the batch: ids, masks, the target's states of its rows"),
        Term("teacher", parts["teacher"], "the target's logits and their sums"),
        Term(
            "activations",
            parts["activations"],
            f"kept for backward; most of it {kept}" if kept else "kept for backward",
        ),
        Term("workspace", parts["workspace"], "made and freed within the pass"),
    ]
    return [term for term in terms if term.bytes or term.name == "gradients"]


def saving_memory(terms: Sequence[Term], numbers: Numbers) -> list[Term]:
    """The same while a checkpoint is written, where weights and copies are in one memory (CPUs): no activations."""
    still = [t for t in terms if t.name in ("target", "drafter", "engine masters", "moments", "engine bucket")]
    copies = 4 * (numbers.trained + numbers.moments)
    return [
        *still,
        Term("checkpoint copies", copies, f"4 bytes x ({numbers.trained:,} weights + {numbers.moments:,} moments)"),
    ]


def packed_memory(numbers: Numbers) -> Term:
    """What decoding on a CPU in bf16 adds from the first probe on (models/lean.py), beside a head that is packed before."""
    packed = numbers.target_matrices + (0 if numbers.packed_head else numbers.head)
    return Term("packed target", 2 * packed, f"2 bytes x {packed:,} numbers, in a processor's order")


def packed_head(numbers: Numbers) -> list[Term]:
    """What the teacher's logits on a CPU in bf16 add (models/target.py, `_rows`)."""
    n = numbers.packed_head
    return [Term("packed head", 2 * n, f"2 bytes x {n:,} numbers of the head, in a processor's order")] if n else []


def total(terms: Sequence[Term]) -> int:
    return sum(term.bytes for term in terms)


def largest(terms: Sequence[Term]) -> Term:
    return max(terms, key=lambda term: term.bytes)


def most_rows(peak: Callable[[int], int], room: float, most: int) -> int:
    """The largest count of 1 .. `most` whose peak fits the room while one more does not; 0 if none does. Bytes grow about
    evenly with rows, so that the second guess is nearly always right."""
    if peak(1) > room:
        return 0
    low, high = 1, most + 1  # fits; does not, or is not looked at
    guess = 2
    while high - low > 1:
        guess = min(max(guess, low + 1), high - 1)
        if peak(guess) <= room:
            low = guess
        else:
            high = guess
        slope = max((peak(low) - peak(1)) / (low - 1) if low > 1 else peak(guess) - peak(1), 1)
        next_guess = int(low + (room - peak(low)) / slope)
        guess = next_guess if low < next_guess < high else low + 1 if next_guess <= low else high - 1
    return low


@dataclass(frozen=True)
class Disk:
    """Bytes on disk; `states` are of the shards alone, `rows` of what stands beside them."""

    states: int
    rows: int
    checkpoint: int
    checkpoints: int
    export: int

    @property
    def total(self) -> int:
        return self.states + self.rows + self.checkpoint * self.checkpoints + self.export


def checkpoint_bytes(numbers: Numbers) -> int:
    """Weights and moments, fp32 (train/checkpoint.py)."""
    return 4 * (numbers.trained + numbers.moments)
