"""`draftsmith convert SOURCE FOLDER --target TARGET`: heads that others trained, into our export form.

Reads the flat EAGLE-3 form (SpecForge, TorchSpec, Model-Optimizer, the EAGLE repository), the speculators form, EAGLE-1
files, DFlash, DSpark and Domino (z-lab, DeepSpec, SpecForge, speculators), and Medusa files in their original and in
vLLM's names. `.safetensors` as they are; `.pt` and `.bin` only through
the tensor-only reader of `torch_file.py`. Every file read is named with its hash.

Where one key means different things to different trainers, nothing is guessed: see `taps_of` (layer ids) and
`norm_options` (norms). What our method would compute otherwise than the head's trainer did is refused with both values.

Tests: tests/test_convert.py.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ..models import METHODS
from ..models.drafter import TargetFacts
from ..models.layers import rotary_settings
from .card import HUB_ID
from .export import RunFacts, export
from .exporters.dspark import KINDS
from .exporters.folder import CONFIG, read_json, read_tensors, refuse_non_finite, sha256_of
from .load import load_state, plain_rope
from .torch_file import read_torch_file

if TYPE_CHECKING:
    from ..models.target import Target

WEIGHT_FILES = ("*.safetensors", "medusa_lm_head.pt", "pytorch_model*.bin")
SPECULATORS_REFUSED = ("peagle", "dflash2", "mtp", "eagle", "mlp")
EMBEDDINGS = "embed_tokens.weight"


@dataclass(frozen=True)
class ConvertConfig:
    """Turn a head that another tool trained into our export.

    Args:
        source: its folder, one of its weight files, or a Hub id.
        target: the target it belongs to (name, folder or Hub id).
        out: the export folder to write.
        taps: residual streams h[k] that the head reads, where its files leave them ambiguous.
        train_length: longest row it was trained on, if known.
        revision: of the source, when it is a Hub id.
        dtype: of the target while converting.
    """

    source: str
    target: str
    out: str
    taps: tuple[int, ...] | None = None
    train_length: int | None = None
    revision: str | None = None
    dtype: str = "bfloat16"


@dataclass(frozen=True)
class Foreign:
    """A foreign head in our terms: method, its settings, draft ids and state, and what was decided on the way."""

    method: str
    options: dict[str, Any]
    draft_ids: Tensor | None
    state: dict[str, Tensor]
    notes: tuple[str, ...] = ()


Reader = Callable[[dict[str, Any], dict[str, Tensor], "Target", tuple[int, ...] | None], Foreign]


def find_files(source: str, revision: str | None) -> tuple[Path, list[Path]]:
    """config.json and the weight files of a folder, of a file's folder, or of a Hub repository at a fixed commit."""
    path = Path(source).expanduser()
    if not path.exists():
        if not HUB_ID.fullmatch(source):
            raise ValueError(f"{source!r} is no file, no folder and no Hub id")
        import huggingface_hub
        from huggingface_hub.errors import HTTPError, LocalEntryNotFoundError, OfflineModeIsEnabled

        try:
            place = huggingface_hub.snapshot_download(
                source, revision=revision, allow_patterns=["*.json", *WEIGHT_FILES]
            )
        except (HTTPError, LocalEntryNotFoundError, OfflineModeIsEnabled) as error:
            raise ValueError(f"{source!r} is no folder here, and the Hub gives none ({type(error).__name__})") from None
        path = Path(place)
    folder = path.parent if path.is_file() else path
    if path.is_file():
        return folder / CONFIG, [path]
    for pattern in WEIGHT_FILES:
        if files := sorted(folder.glob(pattern)):
            return folder / CONFIG, files
    raise ValueError(f"{folder} holds none of {', '.join(WEIGHT_FILES)}; name the weight file itself")


def read_weights(files: list[Path]) -> dict[str, Tensor]:
    """Tensors of all files together; `.pt` and `.bin` through the restricted reader. Prints each file's hash."""
    out: dict[str, Tensor] = {}
    for file in files:
        print(f"{file.name}: sha256 {sha256_of(file)}")
        tensors = read_tensors(file) if file.suffix == ".safetensors" else read_torch_file(file)
        if twice := sorted(set(out) & set(tensors)):
            raise ValueError(f"{file}: {twice[0]} stands in two files")
        out |= tensors
    refuse_non_finite(out, str(files[0].parent))
    return out


def recognise(config: Mapping[str, Any], names: set[str]) -> str:
    """Which reader understands these files. ValueError names what is out of scope, or what was found."""
    kind = config.get("speculators_model_type")
    if kind in SPECULATORS_REFUSED or config.get("model_type") == "mlp_speculator":
        raise ValueError(f"heads of type {kind or 'mlp_speculator'} are not supported; {', '.join(READERS)} are")
    if kind in ("dflash", "dspark"):
        return "dflash"
    if kind is not None:
        if kind != "eagle3":
            raise ValueError(f"speculators_model_type {kind!r} is not known; eagle3, dflash and dspark are")
        return "speculators"
    bare = {n.removeprefix("model.").removeprefix("medusa_heads.") for n in names}
    if {"hidden_norm.weight", "layers.0.self_attn.q_norm.weight"} <= bare:
        return "dflash"
    if any(n.startswith("midlayer.") for n in bare) or "layers.0.hidden_norm.weight" in bare:
        return "eagle3"
    if "fc.weight" in bare and any(n.startswith("layers.0.self_attn.") for n in bare):
        return "eagle"
    if any(n.startswith("blocks.0.layers.") or n.startswith("0.0.linear.") for n in bare):
        return "medusa"
    raise ValueError(f"no known head among the tensors {', '.join(sorted(names)[:6])} …; {', '.join(READERS)} are read")


# EAGLE-3


def read_eagle3(
    config: dict[str, Any], tensors: dict[str, Tensor], target: Target, taps: tuple[int, ...] | None
) -> Foreign:
    """The flat form. Layer ids under `eagle_config` count as their trainers meant them (see `taps_of`)."""
    return _eagle3(config, tensors, target, taps, normed_residual=False, speculators=False)


def read_speculators(
    config: dict[str, Any], tensors: dict[str, Tensor], target: Target, taps: tuple[int, ...] | None
) -> Foreign:
    """The speculators form: sizes under `transformer_layer_config`, and a normed residual unless it says otherwise."""
    layer = config.get("transformer_layer_config")
    if not isinstance(layer, dict):
        raise ValueError("speculators head without transformer_layer_config: its sizes are unknown")
    flat = layer | {k: v for k, v in config.items() if k != "transformer_layer_config"}
    flat.setdefault("hidden_size", layer.get("hidden_size"))
    return _eagle3(flat, tensors, target, taps, normed_residual=True, speculators=True)


def _eagle3(
    config: dict[str, Any],
    tensors: dict[str, Tensor],
    target: Target,
    taps: tuple[int, ...] | None,
    normed_residual: bool,
    speculators: bool,
) -> Foreign:
    facts = target.facts
    legacy = {"aux_norm_low": "fc_norm.0", "aux_norm_mid": "fc_norm.1", "aux_norm_high": "fc_norm.2"}
    state = {_renamed(name, {"layers.0.": "midlayer."} | legacy): t for name, t in tensors.items()}
    if deeper := sorted(n for n in state if n.startswith("layers.")):
        raise ValueError(f"a head of several layers ({deeper[0]}); only one-layer EAGLE-3 heads are supported")
    if (config.get("eagle_config") or {}).get("use_aux_hidden_state") is False or "fc.weight" not in state:
        raise ValueError("a head without fc reads no taps (use_aux_hidden_state false); not supported")
    notes = drop_buffers(state)
    notes += drop_target_embeddings(state, target)
    compare_sizes(config, facts)
    count = shape_at(state, "fc.weight")[1] / facts.width
    if count != int(count):
        raise ValueError(
            f"fc.weight is {shape_at(state, 'fc.weight')[1]} wide, no multiple of the target's width {facts.width}"
        )
    layer_ids, why = taps_of(config, facts.layers, int(count), speculators, taps)
    norms = norm_options(config, state, normed_residual)
    ids, why_ids = take_draft_ids(state, target, int(config.get("draft_vocab_size") or facts.vocab))
    options = {
        "taps": layer_ids,
        "heads": config["num_attention_heads"],
        "kv_heads": config.get("num_key_value_heads") or config["num_attention_heads"],
        "intermediate": shape_at(state, "midlayer.mlp.gate_proj.weight")[0],
        **norms,
    }
    return Foreign("eagle3", options, ids, state, (*notes, why, *why_ids))


def taps_of(
    config: Mapping[str, Any], layers: int, count: int, speculators: bool, given: tuple[int, ...] | None
) -> tuple[tuple[int, ...], str]:
    """Which residual streams h[k] the head reads, in our convention, and why.

    Top-level ids (vLLM, speculators) are k itself. Ids nested under `eagle_config` come from trainers that count the
    layer whose *output* is read (SpecForge, TorchSpec, Model-Optimizer; SGLang reads them so): k = id + 1. Files that
    state both must agree; a list of another length than `fc` is wide, or not ascending, is ambiguous and refused.
    """
    if given is not None:
        found, why = tuple(given), "as given"
    else:
        top = config.get("eagle_aux_hidden_state_layer_ids")
        nested = None if speculators else (config.get("eagle_config") or {}).get("eagle_aux_hidden_state_layer_ids")
        shifted = None if nested is None else [int(i) + 1 for i in nested]
        if top is not None and shifted is not None and list(top) != shifted:
            raise ValueError(
                f"layer ids disagree: {top} at the top level mean h{top}, {nested} under eagle_config mean h{shifted}; "
                "say which with --taps"
            )
        if top is not None:
            found, why = tuple(int(i) for i in top), "from top-level layer ids"
        elif shifted is not None:
            found, why = (
                tuple(shifted),
                f"from ids {nested} under eagle_config, which count the layer whose output is read",
            )
        elif count == 3 and layers >= 7:
            found, why = (2, layers // 2, layers - 3), "the engines' default, no ids in the file"
        else:
            raise ValueError(
                f"no layer ids in the file, and no default for {count} taps of {layers} layers; use --taps"
            )
    if len(found) != count:
        raise ValueError(f"{len(found)} layer ids {list(found)}, but fc reads {count} taps; say which with --taps")
    if list(found) != sorted(set(found)) or found[0] < 0 or found[-1] > layers:
        raise ValueError(f"taps {list(found)} must ascend within 0..{layers}; engines order them by depth; use --taps")
    return found, f"taps h{list(found)}: {why}"


def norm_options(config: Mapping[str, Any], state: Mapping[str, Tensor], normed_residual: bool) -> dict[str, bool]:
    """The norm switches, and that the file has exactly the norms they call for. `normed_residual`: the form's default
    for `norm_before_residual` when the key is absent (speculators: true, flat form: false)."""
    nested = config.get("eagle_config") or {}
    before_residual = config.get("norm_before_residual")
    options = {
        "norm_before_residual": normed_residual if before_residual is None else bool(before_residual),
        "norm_output": bool(config.get("norm_output")),
        "fc_norm": bool(config.get("fc_norm") or config.get("use_aux_norm")),
        "norm_before_fc": bool(config.get("norm_before_fc") or nested.get("norm_before_fc")),
    }
    for key, prefix in (("fc_norm", "fc_norm."), ("norm_before_fc", "input_norm.")):
        has = any(name.startswith(prefix) for name in state)
        if has != options[key]:
            raise ValueError(
                f"config.json says {key} is {options[key]}, the file {'has' if has else 'lacks'} {prefix}* tensors"
            )
    return options


def take_draft_ids(state: dict[str, Tensor], target: Target, rows: int) -> tuple[Tensor | None, tuple[str, ...]]:
    """Absolute draft ids from `d2t` (offsets) and `t2d`, both removed from `state`; rows sorted by target id."""
    facts = target.facts
    d2t, t2d = state.pop("d2t", None), state.pop("t2d", None)
    if "lm_head.weight" not in state:
        if rows != facts.vocab:
            raise ValueError(
                f"no lm_head.weight for a draft vocabulary of {rows} of {facts.vocab} ids; the file is incomplete"
            )
        state["lm_head.weight"] = target.head_weight.detach().cpu()
        return None, ("lm_head: the target's own, absent from the file",)
    has = shape_at(state, "lm_head.weight")[0]
    if has != rows:
        raise ValueError(f"lm_head.weight has {has} rows, config.json says draft_vocab_size {rows}")
    if d2t is None or rows == facts.vocab:
        if rows != facts.vocab:
            raise ValueError(
                f"no d2t for a draft vocabulary of {rows} of {facts.vocab} ids: the rows' tokens are unknown"
            )
        if d2t is not None and bool(d2t.any()):
            raise ValueError(
                "d2t is not zero though the draft vocabulary is the full one; offsets of the identity are zero"
            )
        return None, ()
    if d2t.shape != (rows,):
        raise ValueError(f"d2t has shape {list(d2t.shape)}, draft_vocab_size is {rows}")
    ids = d2t.long() + torch.arange(rows)
    if int(ids.min()) < 0 or int(ids.max()) >= facts.vocab or len(ids.unique()) < rows:
        raise ValueError(
            f"d2t as offsets gives ids {int(ids.min())}..{int(ids.max())}, {len(ids.unique())} distinct of {rows}, target "
            f"has {facts.vocab}: not offsets (absolute ids?), or made for another tokenizer"
        )
    if t2d is not None and not torch.equal(t2d.bool().nonzero()[:, 0], ids.sort().values):
        raise ValueError("t2d and d2t name different ids; which one is right can't be told")
    order = ids.argsort()
    state["lm_head.weight"] = state["lm_head.weight"][order]
    return ids[order], () if torch.equal(order, torch.arange(rows)) else ("draft ids sorted, head rows with them",)


# EAGLE-1


def read_eagle(
    config: dict[str, Any], tensors: dict[str, Tensor], target: Target, taps: tuple[int, ...] | None
) -> Foreign:
    """EAGLE-1 and HASS files. A trained bias of `fc` is kept; engines drop it."""
    state = {_renamed(name, {}): t for name, t in tensors.items()}
    if any(n.startswith("layers.1.") for n in state):
        raise ValueError("a head of several layers; only one-layer EAGLE-1 heads are supported")
    bias = state.pop("fc.bias", None)
    notes = drop_buffers(state) + drop_target_embeddings(state, target)
    if "lm_head.weight" in state and not same_rows(state.pop("lm_head.weight"), target.head_weight):
        raise ValueError("lm_head.weight is not the target's head; EAGLE-1 drafts through the target's own")
    compare_sizes(config, target.facts)
    trained = bias is not None and bool(bias.any())
    if bias is not None and trained:
        state["fc.bias"] = bias
    options = {
        "heads": config["num_attention_heads"],
        "kv_heads": config.get("num_key_value_heads") or config["num_attention_heads"],
        "intermediate": shape_at(state, "layers.0.mlp.gate_proj.weight")[0],
        "bias": trained,
    }
    return Foreign(
        "eagle", options, None, state, (*notes, *(("fc has a trained bias: engines drop it",) if trained else ()))
    )


# Medusa


def read_medusa(
    config: dict[str, Any], tensors: dict[str, Tensor], target: Target, taps: tuple[int, ...] | None
) -> Foreign:
    """Original names (`{head}.{layer}.linear.weight`, `{head}.{layers}.weight`) and vLLM's (`blocks.*`, `lm_heads.*`)."""
    facts = target.facts
    state: dict[str, Tensor] = {}
    for name, t in tensors.items():
        parts = name.removeprefix("medusa_heads.").split(".")
        if parts[0].isdigit() and len(parts) == 4 and parts[2] == "linear":
            state[f"blocks.{parts[0]}.layers.{parts[1]}.{parts[3]}"] = t
        elif parts[0].isdigit() and len(parts) == 3 and parts[2] == "weight":
            state[f"lm_heads.{parts[0]}.weight"] = t
        else:
            state[".".join(parts)] = t
    ids = state.pop("token_map", None)
    shared = state.pop("lm_head.weight", None)
    if shared is None and config.get("original_lm_head") and "lm_heads.0.weight" in state:
        shared = state.pop("lm_heads.0.weight")
    if shared is not None:
        rows = target.head_weight if ids is None else target.head_weight[ids.to(target.device)]
        cut = shared[ids] if ids is not None and len(shared) == facts.vocab else shared
        if not same_rows(cut, rows):
            raise ValueError(
                "the shared lm_head.weight is not the target's head; a head that was trained apart is not supported"
            )
    blocks = {tuple(int(i) for i in n.split(".")[1:4:2]) for n in state if n.startswith("blocks.")}
    heads, layers = 1 + max(i for i, _ in blocks), 1 + max(j for _, j in blocks)
    for key, found in (("medusa_num_heads", heads), ("medusa_num_layers", layers), ("num_heads", heads)):
        if config.get(key) not in (None, found):
            raise ValueError(f"config.json says {key} {config[key]}, the file has {found}")
    own = any(n.startswith("lm_heads.") for n in state)
    options = {"heads": heads, "layers": layers, "head": "own" if own else "shared"}
    note = "head: one per Medusa head" if own else "head: the target's own, shared"
    return Foreign("medusa", options, None if ids is None else ids.long().sort().values, state, (note,))


# DFlash and its descendants

MARKOV_HEADS = {theirs: ours for ours, theirs in KINDS.items()}


def read_dflash(
    config: dict[str, Any], tensors: dict[str, Tensor], target: Target, taps: tuple[int, ...] | None
) -> Foreign:
    """DFlash, DSpark and Domino: settings under `dflash_config` (z-lab, SpecForge), at the top level (DeepSpec), or sizes
    under `transformer_layer_config` (speculators). Head rows must be the target's: these methods draft through them."""
    facts = (config.get("transformer_layer_config") or {}) | config | (config.get("dflash_config") or {})
    state = {_renamed(name, {}): t for name, t in tensors.items()}
    heads = {n: state.pop(n) for n in list(state) if n.startswith(("markov_head.", "confidence_head."))}
    notes = drop_buffers(state) + drop_target_embeddings(state, target)
    state |= heads  # whose biases are their own
    compare_sizes(facts, target.facts)
    if set(facts.get("layer_types") or ("full_attention",)) != {"full_attention"} or facts.get("use_swa"):
        raise ValueError("a drafter with sliding windows; only full attention is supported")
    if "d2t" in state:  # rows that belong to draft ids are sorted with them
        order = (state["d2t"].long() + torch.arange(len(state["d2t"]))).argsort()
        for name in ("markov_head.markov_w2.weight", "embed_proj.2.weight"):
            if name in state:
                state[name] = state[name][order]
    ids, why_ids = take_draft_ids(state, target, facts.get("draft_vocab_size") or target.facts.vocab)
    rows = target.head_weight if ids is None else target.head_weight[ids.to(target.device)]
    if not same_rows(state.pop("lm_head.weight"), rows):
        raise ValueError("lm_head.weight is not the target's head; DFlash drafts through the target's own")
    found, why = block_taps(facts, shape_at(state, "fc.weight")[1] // target.facts.width, target.facts.layers, taps)
    rank, domino = int(facts.get("markov_rank") or 0), facts.get("projector_type") == "domino"
    confidence = bool(facts.get("enable_confidence_head"))
    method = "dspark" if rank or domino or confidence or config.get("speculators_model_type") == "dspark" else "dflash"
    state["mask_id"] = torch.tensor(int(facts["mask_token_id"]))
    options = {
        "block": facts["block_size"],
        "layers": facts["num_hidden_layers"],
        "sample_from_anchor": bool(facts.get("sample_from_anchor", facts.get("shift_label", method == "dspark"))),
        "causal": bool(facts.get("causal", facts.get("causal_head", False))),
        "taps": found,
        "mask_id": int(facts["mask_token_id"]),
        "heads": facts["num_attention_heads"],
        "kv_heads": facts.get("num_key_value_heads") or facts["num_attention_heads"],
        "intermediate": facts["intermediate_size"],
    }
    if method == "dspark":
        options |= {"confidence": confidence, "head": "none"}
        if rank:
            kind = facts.get("markov_head_type", "vanilla")
            if kind not in MARKOV_HEADS:
                raise ValueError(f"markov_head_type {kind!r} is not known; {', '.join(MARKOV_HEADS)} are")
            options |= {"head": MARKOV_HEADS[kind], "rank": rank}
        elif domino:
            options |= {"head": "gru", "rank": facts["emb_dim"], "gru_size": facts["gru_hidden_dim"]}
            options["clean_depths"] = facts.get("pure_draft_prefix_len", 0)
    return Foreign(method, options, ids, state, (*notes, why, *why_ids))


def block_taps(
    facts: Mapping[str, Any], count: int, layers: int, given: tuple[int, ...] | None
) -> tuple[tuple[int, ...], str]:
    """The streams h[k] that a block drafter reads: `target_layer_ids` count the layer whose output is read (k - 1),
    speculators' `aux_hidden_state_layer_ids` are k."""
    if given is not None:
        found, why = tuple(given), "as given"
    elif (ids := facts.get("aux_hidden_state_layer_ids")) is not None:
        found, why = tuple(int(i) for i in ids), "from aux_hidden_state_layer_ids"
    elif (ids := facts.get("target_layer_ids")) is not None:
        found, why = tuple(int(i) + 1 for i in ids), f"from target_layer_ids {list(ids)}, which count layers' outputs"
    else:
        raise ValueError("no layer ids in the file (target_layer_ids, aux_hidden_state_layer_ids); use --taps")
    if len(found) != count or list(found) != sorted(set(found)) or found[0] < 0 or found[-1] > layers:
        raise ValueError(
            f"taps {list(found)} must be {count}, ascending within 0..{layers}, as fc reads them; use --taps"
        )
    return found, f"taps h{list(found)}: {why}"


READERS: dict[str, Reader] = {
    "dflash": read_dflash,
    "speculators": read_speculators,
    "eagle3": read_eagle3,
    "eagle": read_eagle,
    "medusa": read_medusa,
}


# Shared parts


def _renamed(name: str, prefixes: Mapping[str, str]) -> str:
    name = name.removeprefix("model.")
    for old, new in prefixes.items():
        if name.startswith(old):
            return new + name.removeprefix(old)
    return name


def shape_at(state: Mapping[str, Tensor], name: str) -> tuple[int, ...]:
    """A tensor's shape; its absence is a ValueError that names it."""
    if name not in state:
        raise ValueError(f"{name} is missing; the file is incomplete")
    return tuple(state[name].shape)


def same_rows(a: Tensor, b: Tensor) -> bool:
    """Equal up to the rounding of a half-precision copy."""
    return a.shape == b.shape and torch.allclose(a.float().cpu(), b.float().cpu(), rtol=2**-7, atol=1e-6)


def drop_buffers(state: dict[str, Tensor]) -> tuple[str, ...]:
    """Remove rotary tables and biases that are zero; a bias that is not is refused (engines drop it silently)."""
    for name in [n for n in state if n.endswith("rotary_emb.inv_freq")]:
        del state[name]
    biases = [n for n in state if n.endswith(".bias")]
    if trained := [n for n in biases if bool(state[n].any())]:
        raise ValueError(f"{', '.join(trained)}: trained biases, which neither our method nor engines have")
    for name in biases:
        del state[name]
    return (f"dropped {', '.join(biases)}: zero",) if biases else ()


def drop_target_embeddings(state: dict[str, Tensor], target: Target) -> tuple[str, ...]:
    """Remove a copy of the target's embeddings; other embeddings are refused (SGLang would replace them anyway)."""
    if EMBEDDINGS not in state:
        return ()
    if not same_rows(state.pop(EMBEDDINGS), target.embed_weight):
        raise ValueError(f"{EMBEDDINGS} is not the target's: the head was trained with its own, or for another target")
    return (f"dropped {EMBEDDINGS}: the target's own",)


def compare_sizes(config: Mapping[str, Any], facts: TargetFacts) -> None:
    """Sizes and settings in which the head must equal the target, every difference named with both values."""
    rope = config.get("rope_parameters") or config.get("rope_scaling") or {}
    scaled = {
        "rope_type": rope.get("rope_type", rope.get("type", "default")),
        "rope_theta": config.get("rope_theta"),
    } | rope
    wanted: dict[str, tuple[Any, Any]] = {
        "hidden_size": (config.get("hidden_size"), facts.width),
        "vocab_size": (config.get("vocab_size"), facts.vocab),
        "target_hidden_size": (config.get("target_hidden_size", facts.width), facts.width),
        "rms_norm_eps": (config.get("rms_norm_eps"), facts.norm_eps),
        "hidden_act": (config.get("hidden_act"), facts.activation),
        "head_dim": (config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"], facts.head_dim),
        "rope": (plain_rope({k: v for k, v in scaled.items() if k != "type"}), plain_rope(rotary_settings(facts))),
    }
    faults = [
        f"{name}: head {head!r}, target {ours!r}" for name, (head, ours) in wanted.items() if not alike(head, ours)
    ]
    if faults:
        raise ValueError(f"this head does not fit {facts.name}; " + "; ".join(faults))


def alike(a: Any, b: Any) -> bool:
    """Equal, numbers up to what a float32 detour changes."""
    if isinstance(a, dict) and isinstance(b, dict):
        return a.keys() == b.keys() and all(alike(a[k], b[k]) for k in a)
    numbers = isinstance(a, int | float) and isinstance(b, int | float)
    return math.isclose(a, b, rel_tol=1e-6) if numbers else a == b


def convert(
    config: dict[str, Any], tensors: dict[str, Tensor], target: Target, taps: tuple[int, ...] | None = None
) -> tuple[Any, Foreign]:
    """A drafter of ours, in float32, that holds the foreign tensors, and what was decided."""
    kind = recognise(config, set(tensors))
    try:
        foreign = READERS[kind](config, dict(tensors), target, taps)
    except KeyError as error:
        raise ValueError(f"config.json lacks {error}, needed for a head of the {kind} form") from None
    method = METHODS[foreign.method]
    drafter = method(method.Config(**foreign.options), target.facts, foreign.draft_ids)
    load_state(drafter, foreign.state, f"this {kind} head")
    drafter.bind(target)
    return drafter.eval(), foreign


def run_convert(cfg: ConvertConfig) -> None:
    """The command: `convert_files`."""
    convert_files(cfg)


def convert_files(cfg: ConvertConfig) -> Path:
    """Read, convert, export; returns the export folder. Prints files with hashes and every decision taken."""
    from ..models.loading import load_target

    config_file, files = find_files(cfg.source, cfg.revision)
    config = read_json(config_file) if config_file.exists() else {}
    if "draftsmith" in config:
        raise ValueError(f"{cfg.source} is an export of ours already; use it as it is")
    tensors = read_weights(files)
    target = load_target(cfg.target, dtype=cfg.dtype)
    drafter, foreign = convert(config, tensors, target, cfg.taps)
    for note in foreign.notes:
        print(note)
    kept = {t.dtype for t in foreign.state.values() if t.is_floating_point()}
    facts = RunFacts(
        origin=f"from {', '.join(f'{f.name} (sha256 {sha256_of(f)})' for f in files)}; {'; '.join(foreign.notes)}",
        train_length=cfg.train_length,
    )
    dtype = kept.pop() if len(kept) == 1 else torch.float32
    folder = export(drafter, cfg.out, run=facts, target=target, dtype=dtype)
    print(f"{foreign.method} head written to {folder}; look at it with `draftsmith check {folder}`")
    return folder
