"""The lean runner: the forward pass of Llama-like targets without their modules, for decoding.

Hugging Face's modules cost more in Python, in small operators and in weights laid out as they were saved than a small
model costs in arithmetic. This is the same computation, fed from the target's own weights, with the same rounding
points: query, key and value projections as one product, gate and up likewise; rotary angles and masks made once per
pass; keys and values written where the cache has them. Families differ in data (`LeanFacts`, and which tensors there
are), not in code. Rotary angles are those of the model's own rotary module, so that every kind of scaling is right.

    target = load_target("smollm2")            # target.runner: "lean" or "hf"; target.not_lean says why not

In bf16 on a CPU the weights are packed: oneDNN keeps a copy in the order its kernels read, twice as fast at one row
(the copy is worth it up to `PACK_BYTES`). All else shares one memory: the modules' weights become views of the fused
ones. A projection that has hooks (dual view) or an adapter that is on (LoRA) is called as the module it is, in its
place, so that methods inside the target run on both paths.

A weight that was replaced, moved or written to is read anew before the next pass. Writes through `param.data` are counted
by nobody: they are looked for when a cache is made (`look`), which finds them where they change a weight as a whole.

Rows are bit-identical at equal width and equally many keys, whatever their neighbours (tests/bench/rows.py).
Test: pytest tests/test_lean.py
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, cast

import torch
from torch import Tensor, nn
from torch.nn.functional import linear, silu

from .cache import Cache
from .families import Parts, windows_of
from .int8 import Int8Linear, Product, int8_product, joined
from .lean_pass import between_products

Runner = Literal["auto", "lean", "hf"]

LEAN_FAMILIES = ("llama", "mistral", "qwen2", "qwen3")
PACK_BYTES = 4 << 30  # of layers' weights: larger models are not worth a second copy
PACK_ROWS = 4  # packed for products of this many rows; measured alike from 1 to 16
ATTENTION = ("q_proj", "k_proj", "v_proj", "o_proj")
MLP = ("gate_proj", "up_proj", "down_proj")


@dataclass(frozen=True)
class LeanFacts:
    """What differs between Llama-like models, beside their tensors."""

    heads: int
    """Query heads."""
    kv_heads: int
    """Key and value heads; heads / kv_heads queries share one."""
    head_dim: int
    """Width of a head."""
    eps: float
    """Added to mean squares in norms."""
    activation: str
    """Name of the gate's activation (transformers' `hidden_act`)."""
    windows: tuple[int | None, ...]
    """Per layer its sliding window, in positions; None = full attention."""
    qk_norm: bool
    """Whether queries and keys are normed per head (Qwen3)."""

    @staticmethod
    def of(config: Any, qk_norm: bool) -> LeanFacts:
        """Read from a config of transformers, which `check_supported` let pass."""
        windows, n = windows_of(config), config.num_hidden_layers
        kinds = config.layer_types if isinstance(windows, dict) else None
        heads = config.num_attention_heads
        return LeanFacts(
            heads,
            getattr(config, "num_key_value_heads", None) or heads,
            getattr(config, "head_dim", None) or config.hidden_size // heads,
            config.rms_norm_eps,
            config.hidden_act,
            tuple(windows[kind] for kind in kinds) if kinds and isinstance(windows, dict) else (windows,) * n,
            qk_norm,
        )


def why_not_lean(model: Any, parts: Parts) -> str | None:
    """Why a model cannot be run lean, for people; None if it can."""
    config = model.config
    if config.model_type not in LEAN_FAMILIES or not type(model).__module__.startswith("transformers.models."):
        return f"type {config.model_type!r} is not one of {', '.join(LEAN_FAMILIES)}, as transformers has them"
    if config._attn_implementation != "sdpa":
        return f"it was loaded with attention {config._attn_implementation!r}"
    for i, layer in enumerate(cast(Any, parts.layers)):
        children = {name for name, _ in layer.named_children()}
        attention = {name for name, _ in layer.self_attn.named_children()}
        if children != {"self_attn", "mlp", "input_layernorm", "post_attention_layernorm"} or (
            attention not in ({*ATTENTION}, {*ATTENTION, "q_norm", "k_norm"})
        ):
            return f"layer {i} is not built like Llama's"
    return None


def packs(weight: Tensor) -> bool:
    """Whether a matrix gains by oneDNN's own order: bf16, on a CPU that computes in it."""
    if weight.dtype != torch.bfloat16 or weight.device.type != "cpu" or weight.requires_grad:
        return False
    ops = torch.ops.mkldnn
    names = ("_is_mkldnn_bf16_supported", "_reorder_linear_weight", "_linear_pointwise")
    return torch.backends.mkldnn.is_available() and all(hasattr(ops, n) for n in names) and _bf16_on_cpu()


def _bf16_on_cpu() -> bool:
    return bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())


def packed_product(weight: Tensor, bias: Tensor | None = None) -> Product | None:
    """x [X, D] -> x W^T + b for `weight` [V, D] by a packed copy of it; None where that gains nothing or is too large."""
    if not packs(weight) or weight.numel() * weight.element_size() > PACK_BYTES:
        return None
    with torch.inference_mode(False), torch.no_grad():
        packed = torch.ops.mkldnn._reorder_linear_weight(weight.detach().contiguous(), PACK_ROWS)
    product = torch.ops.mkldnn._linear_pointwise.default
    return lambda x_XD: product(x_XD, packed, bias, "none", [], "")


def mark(tensor: Tensor) -> tuple[int, int]:
    """Tells whether a tensor is where and what it was: moved or written to, it has another mark."""
    return tensor.data_ptr(), 0 if tensor.is_inference() else tensor._version


def some_of(weight: Tensor) -> Tensor:
    """A few numbers of a weight, in fp32."""
    flat = weight.reshape(-1)
    return flat[:: max(1, len(flat) // 4)].float()


def _base(module: Any) -> Any:
    """The linear module inside an adapter; a module without one itself."""
    return getattr(module, "base_layer", module)


def _hooked(module: Any) -> bool:
    return bool(module._forward_hooks or module._forward_pre_hooks)


def _changed(module: Any) -> bool:
    """Whether something is added to what a linear module computes: by hooks, or an adapter that is on."""
    if _hooked(module):
        return True
    if type(module) in (nn.Linear, Int8Linear):
        return False
    return not getattr(module, "_disable_adapters", False) or _hooked(_base(module))


class Projection:
    """Linear modules of one input as one product, their outputs side by side."""

    def __init__(self, modules: list[Any], pack: bool) -> None:
        self.modules = modules
        self.changed = False
        self.product = _fuse([_base(module) for module in modules], pack)

    def __call__(self, x_XD: Tensor, rows: int) -> Tensor:
        """[X, D] -> [X, all outputs], X = `rows` * T; freshly made."""
        if self.product is not None and not self.changed:
            return self.product(x_XD)
        x_BTD = x_XD.view(rows, -1, x_XD.shape[1])
        return torch.cat([module(x_BTD) for module in self.modules], -1).flatten(0, 1)


def _fuse(modules: list[Any], pack: bool) -> Product | None:
    """One product for plain linear modules, or for rounded ones; None if they are anything else, or learn."""
    if all(type(module) is Int8Linear for module in modules):
        return rounded_product(modules, pack)
    weights = [module.weight for module in modules if type(module) is nn.Linear]
    if len(weights) < len(modules) or any(type(w) is not nn.Parameter or w.requires_grad for w in weights):
        return None
    sizes = [len(weight) for weight in weights]
    if sizes != [module.out_features for module in modules]:
        return None  # partitioned by an engine
    with torch.inference_mode(False), torch.no_grad():
        weight = weights[0].detach() if len(weights) == 1 else torch.cat([w.detach() for w in weights])
        bias = None
        if any(module.bias is not None for module in modules):
            bias = torch.cat(
                [
                    weight.new_zeros(n) if m.bias is None else m.bias.detach()
                    for n, m in zip(sizes, modules, strict=True)
                ]
            )
        if pack and (product := packed_product(weight, bias)) is not None:
            return product
        if len(weights) > 1 and not any(w.is_inference() for w in weights):
            for own, part in zip(weights, weight.split(sizes), strict=True):
                own.data = part  # one memory for both paths
    return lambda x_XD: linear(x_XD, weight, bias)


def rounded_product(modules: list[Int8Linear], pack: bool = True) -> Product:
    """One product for modules with weights in int8; packed, a copy of their numbers serves passes of many rows."""
    with torch.inference_mode(False), torch.no_grad():
        q_VD, scale_V, bias_V = joined(modules)
        wide = packed_product(q_VD.to(scale_V.dtype)) if pack else None
    return int8_product(q_VD, scale_V, bias_V, wide)


@dataclass
class _Layer:
    """A layer's operands."""

    before: Any  # norm module
    qkv: Projection
    qk_scale_Ed: Tensor | None  # weights of the query and key norms, E = heads + kv_heads
    out: Projection
    between: Any  # norm module
    gate_up: Projection
    down: Projection
    window: int | None

    def projections(self) -> tuple[Projection, ...]:
        return self.qkv, self.out, self.gate_up, self.down


class LeanRunner:
    """Runs a target's decoder; see `Target.forward` for the arguments. No gradients."""

    def __init__(self, model: Any, parts: Parts) -> None:
        self.parts = parts
        self.facts = LeanFacts.of(model.config, hasattr(parts.layers[0].self_attn, "q_norm"))
        self._layers: list[_Layer] = []
        # Where the modules stand, and what they were when the operands were made.
        self._places = [
            (owner._modules, name)
            for layer in cast(Any, parts.layers)
            for owner, names in ((layer.self_attn, ATTENTION), (layer.mlp, MLP))
            for name in names
        ]
        # What this path passes by: hooks there mean that a pass has to go through the modules.
        self._passed_by = [
            module
            for name, module in parts.decoder.named_modules()
            if module is not parts.embed and not {"rotary_emb", *ATTENTION, *MLP} & {*name.split(".")}
        ]
        self._modules: list[Any] = []
        self._watched: list[tuple[dict[str, Any], str]] = []
        self._marks: list[tuple[int, int]] = []
        self._changed = False
        self._seen = torch.zeros(0)
        activation = cast(Any, parts.layers[0]).mlp.act_fn
        self._activation = silu if self.facts.activation in ("silu", "swish") else activation

    def __getstate__(self) -> dict[str, Any]:
        """Without the operands, which are made anew where the copy runs; some cannot be stored."""
        return vars(self) | {"_layers": [], "_modules": [], "_watched": [], "_marks": [], "_seen": torch.zeros(0)}

    def look(self) -> None:
        """Make the operands anew before the next pass if some numbers of a weight, four of each, are not what they were."""
        if self._watched and not torch.equal(self._seen, self._some()):
            self._modules = []

    def _some(self) -> Tensor:
        weights = [own[name].detach() for own, name in self._watched if own[name] is not None]
        with torch.inference_mode(False):
            some = [some_of(w) for w in weights if w.device.type == "cpu"]
            return torch.cat(some) if some else torch.zeros(0)

    def _refresh(self) -> None:
        """Make the operands anew if a module or weight was replaced, moved or written to; note what is added to which."""
        modules = [owner[name] for owner, name in self._places]
        if modules != self._modules or self._marked() != self._marks:
            self._bind(modules)
        changed = any(map(_changed, modules))
        if changed or self._changed:
            self._changed = changed
            for layer in self._layers:
                for projection in layer.projections():
                    projection.changed = any(map(_changed, projection.modules))

    def _marked(self) -> list[tuple[int, int]]:
        return [mark(own[name]) for own, name in self._watched]

    def _bind(self, modules: list[Any]) -> None:
        facts, layers = self.facts, cast(Any, self.parts.layers)
        self._changed = True  # of projections made anew it is not known
        pack = sum(w.numel() * w.element_size() for m in modules for w in _base(m).parameters()) <= PACK_BYTES
        self._layers = []
        for i, (layer, window) in enumerate(zip(layers, facts.windows, strict=True)):
            q, k, v, out, gate, up, down = modules[7 * i : 7 * i + 7]
            scale_Ed = None
            if facts.qk_norm:
                counted = ((layer.self_attn.q_norm, facts.heads), (layer.self_attn.k_norm, facts.kv_heads))
                with torch.inference_mode(False), torch.no_grad():
                    scale_Ed = torch.cat([norm.weight.detach().expand(n, -1) for norm, n in counted])
            self._layers.append(
                _Layer(
                    layer.input_layernorm,
                    Projection([q, k, v], pack),
                    scale_Ed,
                    Projection([out], pack),
                    layer.post_attention_layernorm,
                    Projection([gate, up], pack),
                    Projection([down], pack),
                    window,
                )
            )
        self._modules = modules
        # What was copied or fused; modules that are called as they are may change as they like.
        fused = [m for layer in self._layers for p in layer.projections() if p.product for m in p.modules]
        if facts.qk_norm:
            fused += [m for layer in layers for m in (layer.self_attn.q_norm, layer.self_attn.k_norm)]
        owned = [_base(module)._parameters for module in fused]  # where a weight stands: another may take its place
        self._watched = [(own, name) for own in owned for name, w in own.items() if w is not None]
        self._marks = self._marked()
        self._seen = self._some()

    @property
    def operands(self) -> object:
        """What passes read that was made from the modules' weights; `_bind` makes others."""
        return self._layers

    def hooked_elsewhere(self) -> bool:
        """Whether something listens to modules that this path does not call."""
        return any(map(_hooked, self._passed_by))

    @torch.no_grad()
    def forward(
        self,
        inputs: Tensor,
        positions_BT: Tensor,
        cache: Cache | None,
        see_BTA: Tensor | None,
        taps: Sequence[int],
        prefix_kv: Tensor | None,
    ) -> tuple[Tensor, Tensor | None]:
        """`last_hidden_BTD` and `taps_BTPD`. With a cache, `see_BTA` None = causal."""
        self._refresh()
        b, t = positions_BT.shape
        h_BTD = self.parts.embed(inputs) if inputs.dim() == 2 else inputs
        if h_BTD.dtype != self.parts.embed.weight.dtype:
            raise ValueError(f"embeddings of {h_BTD.dtype}: this target computes in {self.parts.embed.weight.dtype}")
        cos_sin = cast(Any, self.parts.decoder).rotary_emb(h_BTD, positions_BT)
        between = between_products(
            self.facts, self._activation, h_BTD, positions_BT, cos_sin, cache, see_BTA, prefix_kv
        )
        eps, final = self.facts.eps, cast(Tensor, self.parts.norm.weight)
        streams: dict[int, Tensor] = {}
        with torch.inference_mode():
            between.begin()
            x_XD = h_BTD.reshape(b * t, -1)
            normed_XD = between.norm(x_XD, self._layers[0].before.weight, eps)
            for i, layer in enumerate(self._layers):
                if i in taps:
                    streams[i] = x_XD
                heads_BTEd = layer.qkv(normed_XD, b).view(b, t, -1, self.facts.head_dim)
                seen_XD = between.attend(i, heads_BTEd, layer.qk_scale_Ed, layer.window)
                normed_XD, x_XD = between.add_norm(layer.out(seen_XD, b), x_XD, layer.between.weight, eps)
                gate_XI, up_XI = layer.gate_up(normed_XD, b).chunk(2, 1)
                grown_XD = layer.down(between.gated(gate_XI, up_XI), b)
                after = self._layers[i + 1].before.weight if i + 1 < len(self._layers) else final
                normed_XD, x_XD = between.add_norm(grown_XD, x_XD, after, eps)
            if len(self._layers) in taps:
                streams[len(self._layers)] = x_XD
        # Outside of inference mode again: what is returned may be written to, and kept for gradients.
        last_BTD = normed_XD.view(b, t, -1).clone()
        return last_BTD, torch.stack([streams[k].view(b, t, -1) for k in taps], 2) if taps else None
