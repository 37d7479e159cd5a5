"""`draftsmith check EXPORT`: replay stored positions, and compare with what the trainer's own drafter computed.

An export keeps 32 positions of a few texts: the token ids, and the eight largest logits of every depth as the drafter
that was being exported gave them, its weights rounded as the file holds them, in float32 on a float32 copy of the target
(of the precision it was trained beside). A check loads everything afresh and does the same. It sees what acceptance
hides: taps off by one, a lost norm, another RoPE base or mapping, or the wrong target. Denoisers are checked by
`denoisers.py`.

Tests: tests/test_check.py.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor

from ..models import METHODS
from ..models.drafter import Commit, Drafter, ExtraOut, Prefill
from ..models.tree import Tree, hang
from .exporters import EXPORTERS
from .exporters.folder import REPLAY, compare_slots, read_header, read_tensors
from .exporters.layout import Slot
from .load import build_drafter, load_state, read_export_config, refuse_other_target, resolve

if TYPE_CHECKING:
    from ..models.target import Target

TEXTS = (
    "The quick brown fox jumps over the lazy dog, and then it sleeps in the warm sun until the evening comes.",
    "def mean(values):\n    total = sum(values)\n    return total / len(values)\n\nprint(mean([1, 2, 3, 4]))\n",
    "Question: what is 12 times 7? Answer: 12 times 7 is 84, because 10 times 7 is 70 and 2 times 7 is 14.",
    "Water boils at 100 degrees Celsius at sea level; on a high mountain it boils at a lower temperature.",
)
LENGTH = 24  # tokens of each text
POSITIONS = 32
DEPTH = 4
TOP = 8
TOLERANCE = 1e-3  # of the largest logit; float32 on another machine differs by about 1e-6 of it


@dataclass(frozen=True)
class CheckConfig:
    """Replay an export's stored positions and compare with the trainer's logits.

    Args:
        export: the export folder, or a Hub id.
        target: the target's name or folder; default: the one that the export names.
        revision: of the export, when it is a Hub id.
        dtype: float32 (100 % of the top tokens must agree) or bfloat16 (at least 98 %); adapters of a denoiser, which have
            no replay, are run in the dtype that they were trained beside.
        device: where to run.
    """

    export: str
    target: str | None = None
    revision: str | None = None
    dtype: str = "float32"
    device: str = "cpu"


@dataclass(frozen=True)
class CheckResult:
    """Agreement of top tokens over the replayed (position, depth) pairs, and the largest difference of a stored logit
    as a share of the largest logit."""

    pairs: int
    agreeing: int
    difference: float


@torch.no_grad()
def handed_over(drafter: Drafter, target: Target, ids_BT: Tensor, counts_B: Tensor) -> tuple[Any, ExtraOut | None]:
    """What a drafter that lives inside the target is handed in a `Commit`, once the first `counts_B` tokens of each row
    stand in the text: the target's cache (None where it does not read it), and what its prompt rows computed there."""
    prompts = getattr(drafter, "prompts", None)
    if "kv" not in drafter.draft_needs and prompts is None:
        return None, None
    (b, t), device = ids_BT.shape, target.device
    prefix_kv = getattr(drafter, "prefix_kv", None)
    behind = 0 if prefix_kv is None else prefix_kv.shape[3]
    rows = drafter.parallel if prompts is None else prompts.depths * prompts.members + behind
    cache = target.new_cache(b, t + rows)
    target.forward(ids_BT, torch.arange(t, device=device).expand_as(ids_BT), cache=cache)
    cache.commit(counts_B)
    if prompts is None:
        return cache, None
    none_BN = torch.zeros(b, 0, dtype=torch.int64, device=device)
    tree = Tree(none_BN, none_BN, none_BN, none_BN.float(), none_BN.bool())
    counts_B1 = torch.full((b, 1), prompts.depths, device=device)
    extra = hang(tree, counts_B1, prompts, prompts.depths, target.facts.vocab)
    see_BEM, hung_BE = extra.place(torch.ones(b, 1, 1, dtype=torch.bool, device=device))
    options = {} if prefix_kv is None else {"prefix_kv": prefix_kv}
    table_XD = cast(Any, drafter).extra_table_XD
    states = target.forward(
        table_XD[extra.ids_BE - target.facts.vocab].to(target.dtype),
        cache.lengths_B[:, None] - 1 + extra.depths_BE,
        cache=cache,
        see_BTA=torch.nn.functional.pad(see_BEM[:, :, 1:], (0, behind), value=True),
        **options,
    )
    return cache, ExtraOut(extra, hung_BE, torch.zeros_like(counts_B), states.last_hidden_BTD)


def replay(drafter: Drafter, target: Target, ids_ST: Tensor, positions_R2: Tensor, depth: int) -> Tensor:
    """Teacher-forced drafting logits through the runtime's own calls.

    Args:
        ids_ST: int64 token ids of S texts.
        positions_R2: int64 pairs (text, t): state row t is known, token t + 1 is the anchor, deeper tokens are fed as
            they stand in the text.

    Returns:
        fp32 [R, depth, V] logits over target ids, -inf outside the draft vocabulary.
    """
    at_ST = torch.arange(ids_ST.shape[1], device=target.device).expand_as(ids_ST)
    states = target.forward(ids_ST.to(target.device), at_ST, taps=tuple(drafter.taps))
    text_R, t_R = positions_R2.to(target.device).unbind(1)
    ids_RT = ids_ST.to(target.device)[text_R]
    rows = torch.arange(len(t_R), device=target.device)
    kv, extra_out = handed_over(drafter, target, ids_RT, t_R + 1)
    commit = Commit(
        ids_BT=ids_RT,
        counts_B=t_R + 1,
        positions_BT=at_ST[text_R],
        anchor_B=ids_RT[rows, t_R + 1],
        taps_BTPD=None if states.taps_BTPD is None else states.taps_BTPD[text_R],
        last_hidden_BTD=states.last_hidden_BTD[text_R],
        kv=kv,
        extra_out=extra_out,
    )
    dtype = next(drafter.parameters()).dtype
    state = drafter.init(Prefill(len(t_R), ids_ST.shape[1] + depth + 1, target.device, dtype))
    state, level = drafter.start(state, commit)
    asks = drafter.parallel == 1 or getattr(drafter, "sequential", False)
    logits_RKW = level.logits_BNW[:, :1] if asks else level.logits_BNW
    for k in range(1, depth if asks else 1):
        tokens_R1 = ids_RT[rows, t_R + 1 + k][:, None]
        state, level = drafter.extend(state, tokens_R1, torch.full_like(tokens_R1, k - 1))
        logits_RKW = torch.cat([logits_RKW, level.logits_BNW], dim=1)
    logits_RKW = logits_RKW[:, :depth].float()
    if drafter.d2t_W is None:
        return logits_RKW
    full_RKV = torch.full((*logits_RKW.shape[:2], drafter.facts.vocab), -torch.inf, device=logits_RKW.device)
    return full_RKV.index_copy(2, drafter.d2t_W.to(full_RKV.device), logits_RKW)


def float32_target(target: Target) -> Target:
    """The target itself, or a float32 copy (exact: every value of a half type is a float32 value)."""
    if target.dtype == torch.float32:
        return target
    model = copy.deepcopy(target.model).float()
    return type(target)(model, target.tokenizer, target.facts.name, target.facts.revision)


def stored_positions(target: Target, depth: int) -> tuple[Tensor, Tensor]:
    """ids [S, LENGTH] of the fixed texts in the target's own tokens, and POSITIONS evenly spread (text, t) pairs."""
    texts = []
    for text in TEXTS:
        ids = target.tokenizer(text, add_special_tokens=False)["input_ids"]
        texts.append((ids * (LENGTH // max(1, len(ids)) + 1))[:LENGTH])
    per_text = POSITIONS // len(TEXTS)
    times = torch.linspace(0, LENGTH - 2 - depth, per_text).long().tolist()
    return torch.tensor(texts), torch.tensor([(s, t) for s in range(len(TEXTS)) for t in times])


@torch.no_grad()
def make_replay(drafter: Drafter, target: Target, dtype: torch.dtype) -> dict[str, Tensor]:
    """The tensors of a replay file, from the drafter in memory with its weights rounded to the file's `dtype`."""
    exact = float32_target(target)
    rounded = {n: t.to(dtype) if t.is_floating_point() else t for n, t in drafter.state_dict().items()}
    fresh = METHODS[drafter.method](drafter.config, drafter.facts, drafter.d2t_W)
    load_state(fresh, rounded, "this drafter")
    fresh.bind(exact)
    fresh = fresh.to(device=exact.device, dtype=torch.float32).eval()
    depth = min(DEPTH, drafter.max_depth or DEPTH)
    ids_ST, positions_R2 = stored_positions(exact, depth)
    top = replay(fresh, exact, ids_ST, positions_R2, depth).topk(TOP)
    return {
        "ids": ids_ST,
        "positions": positions_R2,
        "top_ids": top.indices.cpu(),
        "top_logits": top.values.cpu(),
        "target_dtype": torch.tensor(list(str(target.dtype).removeprefix("torch.").encode()), dtype=torch.int64),
    }


def read_replay(folder: Path) -> dict[str, Tensor]:
    """The replay file, its shapes checked against each other. ValueError when it is absent or of another form."""
    if not (folder / REPLAY).is_file():
        raise ValueError(f"{folder} has no {REPLAY}; export the head again with its target to get one")
    header = read_header(folder / REPLAY)
    try:
        (s, t), (r, _), (_, depth, top), (n,) = (header[k][1] for k in ("ids", "positions", "top_ids", "target_dtype"))
    except (KeyError, ValueError):
        raise ValueError(f"{folder / REPLAY} is no replay of this version; export the head again") from None
    slots = {
        "ids": Slot((s, t), "int64"),
        "positions": Slot((r, 2), "int64"),
        "top_ids": Slot((r, depth, top), "int64"),
        "top_logits": Slot((r, depth, top)),
        "target_dtype": Slot((n,), "int64"),
    }
    compare_slots(header, slots, str(folder / REPLAY))
    return read_tensors(folder / REPLAY)


@torch.no_grad()
def check(folder: Path, config: Mapping[str, Any], target: Target, stored: Mapping[str, Tensor]) -> CheckResult:
    """Replay with a fresh load of the folder beside `target`, in the target's dtype."""
    drafter = build_drafter(folder, config, target)
    refuse_other_config(drafter, config, target, str(folder))
    logits_RKV = replay(drafter, target, stored["ids"], stored["positions"], stored["top_ids"].shape[1]).cpu()
    agree_RK = logits_RKV.argmax(-1) == stored["top_ids"][..., 0]
    gap_RKE = (logits_RKV.gather(2, stored["top_ids"]) - stored["top_logits"]).abs()
    difference = float(gap_RKE.max() / stored["top_logits"].abs().max())
    return CheckResult(agree_RK.numel(), int(agree_RK.sum()), difference)


def refuse_other_config(drafter: Drafter, config: Mapping[str, Any], target: Target, where: str) -> None:
    """config.json must say to engines what this drafter is: they read its keys, the replay reads ours."""
    written = json.loads(json.dumps(EXPORTERS[drafter.method].pack(drafter, target).config))
    stated = {key: value for key, value in config.items() if key not in ("torch_dtype", "draftsmith")}
    absent = "nothing"
    faults = [
        f"{key}: file {stated.get(key, absent)!r}, head {written.get(key, absent)!r}"
        for key in sorted(written.keys() | stated.keys())
        if stated.get(key, absent) != written.get(key, absent)
    ]
    if faults:
        raise ValueError(f"{where}: config.json says another head to engines (export it again); " + "; ".join(faults))


def run_check(cfg: CheckConfig) -> None:
    """The command: `check_export`, whose printed line is all that is wanted."""
    check_export(cfg)


def check_export(cfg: CheckConfig) -> CheckResult:
    """Check one export and print the outcome. ValueError when the replay does not agree."""
    from ..models.loading import load_target
    from .consistency_folder import check_consistency, stored_consistency
    from .denoisers import check_denoiser, stored_denoiser  # which replay in their own way, with what stands here

    if cfg.dtype not in ("float32", "bfloat16"):
        raise ValueError(f"dtype {cfg.dtype!r}: use float32 or bfloat16")
    if (converted := stored_denoiser(cfg.export, cfg.revision)) is not None:
        return check_denoiser(cfg, converted)
    if (model := stored_consistency(cfg.export, cfg.revision)) is not None:
        return check_consistency(cfg, model)
    folder = resolve(cfg.export, cfg.revision)
    config = read_export_config(str(folder))
    stored = read_replay(folder)
    ours = config["draftsmith"]
    name = cfg.target or ours["target"]["name"]
    dtype = bytes(stored["target_dtype"].tolist()).decode()
    target = load_target(
        name, dtype=dtype, device=cfg.device, revision=None if cfg.target else ours["target"]["revision"]
    )
    refuse_other_target(config, target.facts)
    exact = cfg.dtype == "float32"
    if exact:
        target = float32_target(target)
    elif target.dtype != torch.bfloat16:
        raise ValueError(f"the replay was made beside a {dtype} target; check it in float32")
    what = f"{cfg.export}: {ours['method']} for {ours['target']['name']}"
    return judged(check(folder, config, target, stored), cfg, what, "its trainer did", "export")


def judged(result: CheckResult, cfg: CheckConfig, what: str, wanted: str, remedy: str) -> CheckResult:
    """Print how a replay came out, and return it. ValueError when it does not compute what is `wanted`."""
    exact, share = cfg.dtype == "float32", result.agreeing / result.pairs
    print(
        f"{what}, tensors complete and finite; replay in {cfg.dtype}: {result.agreeing} of {result.pairs} top tokens agree "
        f"({100 * share:.1f} %), largest logit difference {result.difference:.1e} of the largest logit"
    )
    if share < (1.0 if exact else 0.98) or (exact and not result.difference <= TOLERANCE):
        raise ValueError(
            f"{cfg.export} does not compute what {wanted} ({100 * share:.1f} % of the top tokens, logits off by "
            f"{result.difference:.1e}; needed {'100 %' if exact else '98 %'}): {remedy} it again, do not serve it"
        )
    return result
