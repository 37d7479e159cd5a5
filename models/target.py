"""The frozen target: any Hugging Face causal language model, untouched, behind one small protocol.

`forward` runs the decoder with our own masks, positions and cache; `embed` and `head` are its two ends. States are
named as everywhere in this repository: h[k], 0 <= k <= layers, is the residual stream *entering* layer k (h[0] = the
embeddings), h[layers] the residual before the final norm; `last_hidden` is after that norm and is what the head reads.

    target = load_target("smollm2")            # or "tiny", a hub id, a folder, a GGUF file
    states = target.forward(ids_BT, positions_BT, taps=(2, 15, 27))
    logits_BTV = target.head(states.last_hidden_BTD)

Test: pytest tests/test_target.py (logits equal Hugging Face's own forward for every family, with ragged caches, tree
masks and sliding windows).
"""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor, nn

from ..losses.distill import ByHead, Logits
from .cache import Cache, PrefixCache
from .drafter import Batch, TargetOut
from .facts import banned_ids, facts_of, fingerprint, refuse_non_finite
from .families import check_supported, family_of, find_parts, windows_of
from .int8 import NO_GRADIENTS, Int8Linear, Weights, check_weights
from .lean import (
    ATTENTION,
    MLP,
    LeanRunner,
    Product,
    Runner,
    mark,
    packed_product,
    rounded_product,
    some_of,
    why_not_lean,
)
from .placement import Placed
from .quantize import Quantized

DTYPES = {
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
    "float32": torch.float32,
    "float64": torch.float64,
}


@dataclass
class States:
    """What a forward pass returns: `last_hidden_BTD` (after the final norm) and, if taps were asked for, h[taps[i]] in
    `taps_BTPD[:, :, i]`."""

    last_hidden_BTD: Tensor
    taps_BTPD: Tensor | None


class Target(nn.Module):
    """A frozen causal language model and its tokenizer.

    `name` is what exports record (a hub id, folder name or built-in name; never a path). `frozen` False leaves the
    weights as trainable as they are: a drafter that is a language model runs it by the same protocol. Raises ValueError
    when the model is not one that can be run exactly, and when tokenizer and embedding do not fit. `quantized`: its
    weights are rounded (models/quantize.py). `placed`: its layers are not here as they are (models/placement.py).

    `runner`: auto = passes without gradients that have a cache of ours, which is decoding, run lean (models/lean.py) if
    the family can, all others through Hugging Face's modules; lean = all passes without gradients run lean (ValueError
    if the family cannot); hf = none. Passes under autocast, and while something listens to modules that lean passes do
    not call, go through the modules all the same.
    """

    def __init__(
        self,
        model: Any,
        tokenizer: Any,
        name: str,
        revision: str | None = None,
        *,
        frozen: bool = True,
        quantized: Quantized | None = None,
        placed: Placed | None = None,
        runner: Runner = "auto",
    ) -> None:
        super().__init__()
        config = model.config
        check_supported(config)
        self.model: Any = model.requires_grad_(False) if frozen else model
        self.tokenizer = tokenizer
        parts = find_parts(model, config)
        # In lists, so that the parts are not registered twice.
        self._decoder: list[Any] = [parts.decoder]
        self._embed: list[Any] = [parts.embed]
        self._head: list[Any] = [parts.head]
        self._tapped = [*parts.layers, parts.norm]
        self._windows = windows_of(config)
        self._family = family_of(config)
        if config._attn_implementation not in ("sdpa", "eager"):
            raise ValueError(
                f"target {name!r} runs attention by {config._attn_implementation!r}, which takes no mask of ours; load it "
                "with attn_implementation 'sdpa' or 'eager'"
            )
        self._additive = config._attn_implementation == "eager"
        self._cache_argument = _cache_argument(parts.decoder)
        self._head_rows: tuple[Tensor, object, Tensor, Tensor | None, Product | None] | None = None
        self._head_product: tuple[object, Product | None] | None = None
        self._head_seen = torch.zeros(0)
        self.placed = placed
        self.not_lean = "its weights are rounded" if quantized is not None else why_not_lean(model, parts)
        self.not_lean = self.not_lean if placed is None else placed.why
        self._lean = [LeanRunner(model, parts)] if self.not_lean is None else []
        self.choose_runner(runner)
        self._causal_TT = torch.ones(0, 0, dtype=torch.bool)
        self.quantized = "none" if quantized is None else quantized.kind
        self.weights: Weights = "full"
        self._rounded_heads: dict[bool, tuple[Tensor | None, object, Product]] = {}  # of all ids, and of some
        known = quantized or placed
        self.facts = facts_of(
            model, tokenizer, name, revision, fingerprint(model) if known is None else known.fingerprint
        )
        self._fixed_to = self.facts.max_positions if self.facts.rope["rope_type"] == "longrope" else None
        self.banned_ids: Tensor
        self.register_buffer("banned_ids", banned_ids(tokenizer, self.facts.vocab), persistent=False)
        if known is None:
            refuse_non_finite(model, name)
        rounded_head = type(self.head_weight) is not nn.Parameter or not self.head_weight.is_floating_point()
        if quantized is not None and rounded_head:
            raise ValueError(
                f"target {name!r}: quantize = {quantized.kind} rounded its output head, which is read as it is"
            )
        self.eval()

    def train(self, mode: bool = True) -> Target:
        """A frozen target stays in evaluation mode (no dropout), whatever module it is a part of."""
        return super().train(False)

    def __getstate__(self) -> dict[str, Any]:
        """Without copies of the head's rows, which are made anew where they are needed; some cannot be stored."""
        return vars(self) | {"_head_product": None, "_head_rows": None, "_rounded_heads": {}}

    @property
    def placement(self) -> str:
        """Where the layers are (models/placement.py)."""
        return "replicated" if self.placed is None else self.placed.kind

    @property
    def dtype(self) -> torch.dtype:
        """Data type of weights, states and cache."""
        return self._embed[0].weight.dtype

    @property
    def device(self) -> torch.device:
        """Where the weights are."""
        return self._embed[0].weight.device

    @property
    def runner(self) -> Literal["lean", "hf"]:
        """What decoding runs through: lean operators, or Hugging Face's modules."""
        return "lean" if self._lean and self._runner != "hf" else "hf"

    @property
    def path(self) -> str:
        """`runner` for reports: with why it is not lean."""
        return "lean" if self.runner == "lean" else f"hf ({self.not_lean or 'chosen'})"

    def choose_runner(self, runner: Runner) -> None:
        """Set `runner`; see the class. Raises ValueError for an unknown one, and for lean where it is not possible."""
        if runner not in ("auto", "lean", "hf"):
            raise ValueError(f"runner {runner!r}: use one of auto, lean, hf")
        if runner == "lean" and self.not_lean is not None:
            raise ValueError(f"this target cannot run lean: {self.not_lean}; use runner=auto")
        self._runner = runner

    def round_weights(self, weights: Weights) -> None:
        """`int8`: round the projections and the head for decoding, in place and for good (models/int8.py); `full`: leave
        them. The facts stay those of the full model, whose drafters it runs with. Raises ValueError for targets that do not
        run lean, and weights that learn, have adapters or are rounded already."""
        check_weights(weights, self.dtype)
        if weights == "full" or self.weights == weights:
            return
        refused = f"target {self.facts.name!r} cannot have weights = {weights}: "
        if self.not_lean is not None:
            raise ValueError(f"{refused}it does not run lean ({self.not_lean}); use weights=full")
        places = [(layer.self_attn, name) for layer in self.layers for name in ATTENTION]
        places += [(layer.mlp, name) for layer in self.layers for name in MLP]
        linears = [*(getattr(owner, name) for owner, name in places), self._head[0]]
        if any(type(m) is not nn.Linear or m.weight.requires_grad or m.weight.dim() != 2 for m in linears):
            raise ValueError(f"{refused}its projections have adapters, or learn; load it anew, with weights=full")
        for owner, name in places:
            setattr(owner, name, Int8Linear.of(getattr(owner, name)))
        self._head[0] = Int8Linear.of(self._head[0])
        self.model.set_output_embeddings(self._head[0])
        self._head_rows = self._head_product = None
        self.weights = weights

    @property
    def precision(self) -> str:
        """Dtype, and how weights are rounded, for reports: what is measured at one precision says nothing of another."""
        dtype = str(self.dtype).removeprefix("torch.")
        return dtype if self.weights == "full" else f"{dtype}, {self.weights} weights"

    @property
    def operands(self) -> object:
        """What passes and heads read that was made from the weights and may be made anew; keeps its memory alive."""
        return (
            self._head_rows,
            self._head_product,
            *self._rounded_heads.values(),
            *(runner.operands for runner in self._lean),
        )

    @property
    def layers(self) -> list[Any]:
        """The decoder's layers."""
        return self._tapped[:-1]

    @property
    def norm(self) -> nn.Module:
        """The final norm (its weights are what some drafters start from)."""
        return self._tapped[-1]

    @property
    def head_weight(self) -> Tensor:
        """[V, D] rows of the output head; when tied, the embedding itself, unless it is rounded."""
        return self._head[0].weight

    def head_rounding(self, ids: Tensor | None = None) -> Tensor:
        """[V, 1], or [W, 1] of the rows `ids`: how far `head_weight` may lie from the head that was loaded."""
        if self.weights == "full":
            return torch.zeros(1, 1)
        scale_V = self._head[0].scale
        return (scale_V if ids is None else scale_V[ids])[:, None] / 2

    @property
    def embed_weight(self) -> Tensor:
        """[V, D] rows of the embedding, without any scale that `embed` applies."""
        return self._embed[0].weight

    def forward(
        self,
        inputs: Tensor,
        positions_BT: Tensor,
        *,
        cache: Cache | None = None,
        see_BTA: Tensor | None = None,
        taps: Sequence[int] = (),
        prefix_kv: Tensor | None = None,
    ) -> States:
        """Run the decoder over T new tokens per row.

        `inputs`: int64 ids [B, T], or embeddings [B, T, D]. `positions_BT`: absolute positions, int64.
        Without a cache, `see_BTA` (bool [B, T, T]) says which tokens each one sees; default: causal.
        With a cache, committed slots are visible to all, the new tokens take the slots behind them and lengths do not
        change (the caller commits). `see_BTA` then speaks of the uncommitted tail: A = T, or A > T if A - T tokens
        were appended by earlier passes and not committed. Sliding windows are applied per layer type, by position.
        Every token must see itself. Raises ValueError for taps outside 0..layers, and if the cache overflows.

        `prefix_kv` [layers, 2, kv_heads, P, head_dim]: keys and values of no token, read as they are (nothing is
        rotated) by those tokens to which `see_BTA` shows them in P more columns, its last ones. No window cuts them.
        Without a cache gradients flow into them; with one they take P slots behind the tail, for this pass.
        """
        t = positions_BT.shape[1]
        p = 0
        if prefix_kv is not None:
            if see_BTA is None:
                raise ValueError("prefix_kv needs see_BTA, whose last columns say which tokens see it")
            p = self._check_prefix(prefix_kv)
            prefix_kv = prefix_kv.to(self.dtype)
        if self._fixed_to is not None and int(positions_BT.max()) >= self._fixed_to:
            raise ValueError(
                f"position {int(positions_BT.max())}: beyond {self._fixed_to} positions the rotary frequencies of target "
                f"{self.facts.name!r} change with the longest row, which is not supported; use shorter texts"
            )
        if self.placed is not None:
            self.placed.before_pass(self.facts.name)
        if self._runs_lean(cache):
            self.check_taps(taps)
            return States(*self._lean[0].forward(inputs, positions_BT, cache, see_BTA, taps, prefix_kv))
        if see_BTA is None:
            see_BTA = self._causal(t).expand(positions_BT.shape[0], t, t)
        if cache is None:
            back_BTT = positions_BT[:, :, None] - positions_BT[:, None, :]

            def mask_for(window: int | None) -> Tensor:
                near_BTT = None if window is None else back_BTT < window
                if near_BTT is not None and p:
                    near_BTT = nn.functional.pad(near_BTT, (0, p), value=True)
                return self._as_attention_wants((see_BTA if near_BTT is None else see_BTA & near_BTT)[:, None])
        else:
            cache.begin(positions_BT, see_BTA.shape[2] - t - p, prefix_kv)

            def mask_for(window: int | None) -> Tensor:
                return self._as_attention_wants(cache.mask(see_BTA, window))

        store = PrefixCache(prefix_kv) if cache is None and prefix_kv is not None else cache
        windows = self._windows
        mask = {k: mask_for(w) for k, w in windows.items()} if isinstance(windows, dict) else mask_for(windows)
        streams: dict[int, Tensor] = {}
        handles = [
            self._tapped[k].register_forward_pre_hook(partial(_grab, streams, k), with_kwargs=True)
            for k in set(self.check_taps(taps))
        ]
        try:
            out = self._decoder[0](
                **{"input_ids" if inputs.dim() == 2 else "inputs_embeds": inputs, self._cache_argument: store},
                attention_mask=mask,
                position_ids=positions_BT,
                use_cache=False,
            )
        finally:
            for handle in handles:
                handle.remove()
        return States(
            out.last_hidden_state, torch.stack([streams[k].to(self.device) for k in taps], dim=2) if taps else None
        )

    def _head_marks(self) -> list[tuple[int, int]]:
        return [mark(x) for x in self._head[0].parameters()]

    def _rows(self, ids: Tensor | None) -> tuple[Tensor, Tensor | None, Product | None]:
        """Weight and bias of the head's rows `ids`, and the lean product where this pass may use one."""
        head = self._head[0]
        lean = self.runner == "lean" and not torch.is_grad_enabled()
        if ids is None:
            if not lean:
                return head.weight, head.bias, None
            if self._head_product is None or self._head_product[0] != self._head_marks():
                self._head_product = self._head_marks(), packed_product(head.weight, head.bias)
            return head.weight, head.bias, self._head_product[1]
        if head.weight.requires_grad:  # rows that learn are read anew
            return head.weight[ids], None if head.bias is None else head.bias[ids], None
        kept = self._head_rows
        # The same ids if they are the same tensor, which nobody wrote to: the device is not asked.
        same = kept is not None and kept[0] is ids and not ids.is_inference()
        marks = mark(ids), self._head_marks()
        if kept is None or not same or kept[1] != marks:
            with torch.inference_mode(False):  # kept, and read by passes with gradients too
                bias = None if head.bias is None else head.bias[ids]
                rows = head.weight[ids]
                packed = packed_product(rows, bias) if self.runner == "lean" else None
                kept = self._head_rows = (ids, marks, rows, bias, packed)
        return kept[2], kept[3], kept[4] if lean else None

    def head(self, hidden: Tensor, ids: Tensor | None = None) -> Tensor:
        """Logits of `last_hidden` states [..., D], softcap and scale included: [..., V], or [..., W] for the rows
        `ids` (int64 [W]) only. Computed and returned in the target's dtype."""
        product = self._full_head(ids) if self.weights == "full" else self._rounded_head(hidden, ids)
        # Flat: of some rows of a batch (a view), `linear` would copy the whole weight (4 ms for 8,192 rows of 576).
        logits = product(hidden.to(self.dtype).reshape(-1, hidden.shape[-1]))
        logits = logits.reshape(*hidden.shape[:-1], logits.shape[-1])
        config, family = self.model.config, self._family
        if family.scale is not None:
            logits = logits * getattr(config, family.scale)
        if family.divide is not None:
            logits = logits / getattr(config, family.divide)
        softcap = None if family.softcap is None else getattr(config, family.softcap)
        return logits if softcap is None else torch.tanh(logits / softcap) * softcap

    def _full_head(self, ids: Tensor | None) -> Product:
        """`head`, before scale and softcap, of weights as they were loaded."""
        weight, bias, product = self._rows(ids)
        return product or (lambda flat_XD: nn.functional.linear(flat_XD, weight, bias))

    def _rounded_head(self, hidden: Tensor, ids: Tensor | None) -> Product:
        """The same of weights in int8; its products are kept until numbers, scales or ids change."""
        if torch.is_grad_enabled() and hidden.requires_grad:
            raise ValueError(NO_GRADIENTS)
        head = self._head[0]
        marks = self._head_marks(), None if ids is None else mark(ids)
        kept = self._rounded_heads.get(ids is None)
        if kept is None or kept[0] is not ids or kept[1] != marks or (ids is not None and ids.is_inference()):
            with torch.inference_mode(False):
                part = head if ids is None else head.rows(ids)
            kept = self._rounded_heads[ids is None] = ids, marks, rounded_product([part])
        return kept[2]

    def by_head(self, hidden_RD: Tensor, ids: Tensor | None = None) -> ByHead | None:
        """`head` as states and rows, for losses that form no logits; a scale goes into states and bias. None with a
        softcap, which is not linear."""
        config, family = self.model.config, self._family
        if family.softcap is not None and getattr(config, family.softcap) is not None:
            return None
        if self.weights != "full":
            raise ValueError(NO_GRADIENTS)
        factor = 1.0 if family.scale is None else float(getattr(config, family.scale))
        factor = factor if family.divide is None else factor / float(getattr(config, family.divide))
        weight, bias, _ = self._rows(ids)
        if factor != 1:
            hidden_RD, bias = hidden_RD.to(weight.dtype) * factor, None if bias is None else bias * factor
        return ByHead.of(hidden_RD, weight, bias)

    def logits(self, hidden_RD: Tensor, ids: Tensor | None = None) -> Logits:
        """`by_head`, or where it is None `head`."""
        rows = self.by_head(hidden_RD, ids)
        return self.head(hidden_RD, ids) if rows is None else rows

    def embed(self, ids: Tensor) -> Tensor:
        """Input embeddings [..., D] of int64 ids, with the family's scale where it has one."""
        return self._embed[0](ids)

    def new_cache(self, rows: int, slots: int, *, read_all: bool = False) -> Cache:
        """An empty cache for `rows` sequences of at most `slots` tokens (drafted, rejected ones included). `read_all`:
        see `Cache`; for decoding loops whose logits must agree bit by bit."""
        facts = self.facts
        if self._lean:
            self._lean[0].look()
            if self.device.type == "cpu":
                some = [some_of(x.detach()) for x in self._head[0].parameters()]  # of int8 as it is, not multiplied out
                seen, self._head_seen = self._head_seen, torch.cat(some)
                if not torch.equal(seen, self._head_seen):
                    self._head_product = self._head_rows = None
                    self._rounded_heads = {}
        return Cache(rows, slots, facts.layers, facts.kv_heads, facts.head_dim, self.dtype, self.device, read_all)

    def check_taps(self, taps: Sequence[int]) -> Sequence[int]:
        """`taps` as they are; raises ValueError if one lies outside 0..layers."""
        for k in taps:
            if not 0 <= k < len(self._tapped):
                raise ValueError(
                    f"tap {k} of {tuple(taps)}: target {self.facts.name!r} has states h[0]..h[{self.facts.layers}]"
                )
        return taps

    def _runs_lean(self, cache: Cache | None) -> bool:
        if self.runner == "hf" or torch.is_grad_enabled() or not (cache is None or type(cache) is Cache):
            return False
        if torch.is_autocast_enabled(self.device.type):  # modules are told to round elsewhere
            return False
        return (cache is not None or self._runner == "lean") and not self._lean[0].hooked_elsewhere()

    def _check_prefix(self, prefix_kv: Tensor) -> int:
        """P; raises ValueError if the shape is not [layers, 2, kv_heads, P, head_dim]."""
        facts = self.facts
        shape, want = list(prefix_kv.shape), [facts.layers, 2, facts.kv_heads, -1, facts.head_dim]
        if len(shape) != 5 or [*shape[:3], -1, shape[4]] != want:
            raise ValueError(f"prefix_kv of shape {shape}: target {facts.name!r} takes {want}, -1 = any length")
        return shape[3]

    def _causal(self, t: int) -> Tensor:
        if self._causal_TT.shape[0] < t or self._causal_TT.device != self.device:
            with torch.inference_mode(False):
                self._causal_TT = torch.ones(t, t, dtype=torch.bool, device=self.device).tril()
        return self._causal_TT[:t, :t]

    def _as_attention_wants(self, mask_B1TS: Tensor) -> Tensor:
        if not self._additive:
            return mask_B1TS
        zeros_B1TS = torch.zeros(mask_B1TS.shape, dtype=self.dtype, device=mask_B1TS.device)
        return zeros_B1TS.masked_fill(~mask_B1TS, torch.finfo(self.dtype).min)


def _grab(streams: dict[int, Tensor], k: int, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    streams[k] = args[0] if args else kwargs["hidden_states"]


def _cache_argument(decoder: nn.Module) -> str:
    """transformers 5.24 renamed `past_key_values` to `cache`; this is the one place that knows."""
    names = inspect.signature(decoder.forward).parameters
    return "cache" if "cache" in names else "past_key_values"


def document_mask(samples_BT: Tensor) -> Tensor:
    """Bool [B, T, T] for packed rows: each token sees the earlier tokens of its own document, and itself.

    `samples_BT`: int64 sample ids. Padding (-1) counts as one more document.
    """
    t = samples_BT.shape[1]
    causal_TT = torch.ones(t, t, dtype=torch.bool, device=samples_BT.device).tril()
    return (samples_BT[:, :, None] == samples_BT[:, None, :]) & causal_TT


def live_states(target: Target, drafter: Any, batch: Batch) -> TargetOut:
    """The states of a packed batch that a drafter's `loss` reads (`loss_needs`), from a pass without gradients."""
    if target.weights != "full":
        raise ValueError(
            f"states to train on are asked of a target with weights={target.weights}: load it with weights=full"
        )
    needs = drafter.loss_needs
    cache = target.new_cache(*batch.ids_BT.shape) if "kv" in needs else None
    with torch.no_grad():
        out = target.forward(
            batch.ids_BT,
            batch.positions_BT,
            cache=cache,
            see_BTA=document_mask(batch.samples_BT),
            taps=drafter.taps,
        )
    last_hidden_BTD = out.last_hidden_BTD if {"last_hidden", "teacher"} & needs else None
    forward = target.forward if "module" in needs else None
    return TargetOut(
        out.taps_BTPD, last_hidden_BTD, head=target.head, by_head=target.by_head, embed=target.embed, forward=forward,
        kv=cache,
    )  # fmt: skip
