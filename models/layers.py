"""Parts that several drafters share: norm, rotary positions, attention, MLP, residual block, draft vocabulary.

Test: pytest tests/test_methods.py tests/test_parity.py
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import LlamaConfig
from transformers.activations import ACT2FN
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from ..data.batch import document_starts
from ..kernels.rng import NOISE, fold, philox
from ..losses.distill import OOV
from ..losses.objective import parse_objective
from .drafter import Batch, Commit, Level, TargetFacts
from .families import family_of, find_parts
from .lean import Product, mark, packed_product

ROPE_TYPES = ("default", "linear", "yarn", "llama3")


class RMSNorm(nn.Module):
    """x / rms(x) * weight, in fp32 at least."""

    def __init__(self, width: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        wide = torch.promote_types(x.dtype, torch.float32)
        return F.rms_norm(x.to(wide), self.weight.shape, self.weight.to(wide), self.eps).to(x.dtype)


class Together:
    """Linear layers of one input as one product by a packed copy of their weights, where that is quicker: drafting in bf16
    on CPUs, about twice as fast. The copy takes the weights' memory once more; what was moved or written to is packed anew.
    All have a bias, or none has."""

    def __init__(self, layers: list[nn.Linear]) -> None:
        self.layers = layers
        self.marks: list[tuple[int, int]] = []
        self.kept: list[Tensor] = []  # what was marked: no other tensor can then come to lie in its place
        self.packed: Product | None = None

    def product(self) -> Product | None:
        """[..., in] -> [..., sum of out]; None where the layers are to be called themselves, because they learn, gradients
        are wanted, autocast picks types, or nothing is gained."""
        weights: list[Tensor] = [layer.weight for layer in self.layers]
        if weights[0].dtype != torch.bfloat16 or torch.is_grad_enabled() or any(w.requires_grad for w in weights):
            return None
        if torch.is_autocast_enabled(weights[0].device.type):
            return None
        biases: list[Tensor] = [layer.bias for layer in self.layers if layer.bias is not None]
        marks = [mark(x) for x in (*weights, *biases)]
        if marks != self.marks:
            weight = weights[0] if len(weights) == 1 else torch.cat(weights)
            self.packed = packed_product(weight, torch.cat(biases) if biases else None)
            self.marks, self.kept = marks, [x.detach() for x in (*weights, *biases)]
        if (packed := self.packed) is None:
            return None
        return lambda x: packed(x.reshape(-1, x.shape[-1])).view(*x.shape[:-1], -1)

    def __getstate__(self) -> dict[str, Any]:
        return {"layers": self.layers, "marks": [], "kept": [], "packed": None}


class Linear(nn.Linear):
    """A linear layer that drafts by `Together`, alone."""

    def __init__(self, width_in: int, width_out: int, bias: bool = True) -> None:
        super().__init__(width_in, width_out, bias)
        self.alone = Together([self])

    def forward(self, x: Tensor) -> Tensor:
        """[..., in] -> [..., out]."""
        product = self.alone.product()
        return super().forward(x) if product is None else product(x)


def rotary_settings(facts: TargetFacts) -> dict[str, Any]:
    """The drafter's `rope_parameters`: the target's base and scaling, over the whole head (a target's partial rotation
    is not inherited: serving engines rotate draft heads fully).

    Raises ValueError for a missing base and for types that need more than a fixed table.
    """
    rope = facts.rope
    kind = rope.get("rope_type")
    if kind not in ROPE_TYPES:
        raise ValueError(
            f"drafter for {facts.name}: rope_type {kind!r} is not supported; known: {', '.join(ROPE_TYPES)}"
        )
    if rope.get("rope_theta") is None:
        raise ValueError(f"drafter for {facts.name}: the target's rope has no rope_theta; add it to its config.json")
    return {key: value for key, value in rope.items() if key not in ("partial_rotary_factor", "mrope_section")}


class Rotary:
    """cos and sin [..., head_dim] in fp32 of absolute positions. `inverse` [head_dim / 2], `scale` (attention factor).

    No module, so that casting a drafter to half precision leaves its table alone.
    """

    def __init__(self, facts: TargetFacts) -> None:
        rope = rotary_settings(facts)
        if rope["rope_type"] == "default":
            exponents = torch.arange(0, facts.head_dim, 2, dtype=torch.float32) / facts.head_dim
            self.inverse, self.scale = 1.0 / float(rope["rope_theta"]) ** exponents, 1.0
        else:
            config = LlamaConfig(
                hidden_size=facts.heads * facts.head_dim,  # read by nothing here, but checked
                num_attention_heads=facts.heads,
                head_dim=facts.head_dim,
                max_position_embeddings=facts.max_positions,
                rope_parameters=rope,
            )
            self.inverse, self.scale = ROPE_INIT_FUNCTIONS[rope["rope_type"]](config, torch.device("cpu"))

    def __call__(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        if self.inverse.device != positions.device:
            self.inverse = self.inverse.to(positions.device)
        angles = positions[..., None].float() * self.inverse
        angles = torch.cat([angles, angles], dim=-1)
        return angles.cos() * self.scale, angles.sin() * self.scale


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate [..., H, head_dim] by the angles [..., head_dim] of its positions (halves, as Llama does)."""
    left, right = x.float().chunk(2, dim=-1) if x.dtype != torch.float64 else x.chunk(2, dim=-1)
    turned = torch.cat([-right, left], dim=-1)
    return (torch.cat([left, right], dim=-1) * cos[..., None, :] + turned * sin[..., None, :]).to(x.dtype)


def attend(q_BHQd: Tensor, k_BGSd: Tensor, v_BGSd: Tensor, see_BQS: Tensor) -> Tensor:
    """Attention [B, H, Q, d] of H heads over G key/value heads, over the keys that `see_BQS` shows each query."""
    shared = q_BHQd.shape[1] != k_BGSd.shape[1]
    return F.scaled_dot_product_attention(q_BHQd, k_BGSd, v_BGSd, see_BQS[:, None], enable_gqa=shared)


class Attention(nn.Module):
    """Projections of a Llama attention without biases, from `width_in`, named as in checkpoints. With `norm_eps`,
    queries and keys are normed per head before they are rotated (Qwen3)."""

    def __init__(
        self, width_in: int, width: int, heads: int, kv_heads: int, head_dim: int, norm_eps: float | None = None
    ) -> None:
        super().__init__()
        if heads % kv_heads:
            raise ValueError(f"{heads} query heads cannot share {kv_heads} key/value heads: one must divide the other")
        self.heads, self.kv_heads, self.head_dim = heads, kv_heads, head_dim
        self.q_proj = Linear(width_in, heads * head_dim, bias=False)
        self.k_proj = Linear(width_in, kv_heads * head_dim, bias=False)
        self.v_proj = Linear(width_in, kv_heads * head_dim, bias=False)
        self.o_proj = Linear(heads * head_dim, width, bias=False)
        self.qkv = Together([self.q_proj, self.k_proj, self.v_proj])
        self.q_norm = None if norm_eps is None else RMSNorm(head_dim, norm_eps)
        self.k_norm = None if norm_eps is None else RMSNorm(head_dim, norm_eps)

    def project(self, x: Tensor, angles: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor, Tensor]:
        """`queries` and `keys_values` of one input."""
        product = self.qkv.product() if self.q_norm is None else None
        if product is None:
            return self.queries(x, angles), *self.keys_values(x, angles)
        h, g = self.heads, self.kv_heads
        heads = product(x).unflatten(-1, (h + 2 * g, self.head_dim))
        q, k = rotate(heads[..., : h + g, :], *angles).split([h, g], -2)
        return q, k, heads[..., h + g :, :]

    def queries(self, x: Tensor, angles: tuple[Tensor, Tensor]) -> Tensor:
        """[..., width_in] -> [..., H, head_dim], rotated."""
        q = self.q_proj(x).unflatten(-1, (self.heads, self.head_dim))
        return rotate(q if self.q_norm is None else self.q_norm(q), *angles)

    def keys_values(self, x: Tensor, angles: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        """[..., width_in] -> two of [..., G, head_dim], keys rotated."""
        shape = (self.kv_heads, self.head_dim)
        k = self.k_proj(x).unflatten(-1, shape)
        return rotate(k if self.k_norm is None else self.k_norm(k), *angles), self.v_proj(x).unflatten(-1, shape)


class MLP(nn.Module):
    """down(act(gate(x)) * up(x)), without biases."""

    def __init__(self, width: int, intermediate: int, activation: str) -> None:
        super().__init__()
        self.gate_proj = Linear(width, intermediate, bias=False)
        self.up_proj = Linear(width, intermediate, bias=False)
        self.down_proj = Linear(intermediate, width, bias=False)
        self.act = ACT2FN[activation]
        self.gate_up = Together([self.gate_proj, self.up_proj])

    def forward(self, x: Tensor) -> Tensor:
        if (product := self.gate_up.product()) is not None:
            gate, up = product(x).chunk(2, -1)
            return self.down_proj(self.act(gate).mul_(up))
        return self.down_proj(self.act(self.gate_proj(x)) * self.up_proj(x))


def register_vocabulary(module: nn.Module, facts: TargetFacts, draft_ids: Tensor | None) -> int:
    """Give `module` its buffers `d2t_W` (absolute target ids; None = all V ids) and `t2d_V` (draft ids, -1 = none);
    return W. A list of all V ids is none: engines refuse a map that maps nothing. Raises ValueError unless the ids are
    distinct, ascending and such that the tokenizer can produce them."""
    if draft_ids is None:
        module.register_buffer("d2t_W", None)
        module.register_buffer("t2d_V", None)
        return facts.vocab
    ids_W = draft_ids.detach().cpu().long().clone()
    if ids_W.ndim != 1 or not len(ids_W) or bool((ids_W.diff() <= 0).any()):
        raise ValueError("draft vocabulary: ids must be a list of distinct target ids in ascending order")
    if ids_W[0] < 0 or ids_W[-1] >= facts.tokens:
        raise ValueError(
            f"draft vocabulary: ids {int(ids_W[0])}..{int(ids_W[-1])} leave 0..{facts.tokens - 1}, the ids that the "
            f"tokenizer of {facts.name} can produce; rebuild it for this target"
        )
    if len(ids_W) == facts.vocab:
        return register_vocabulary(module, facts, None)
    t2d_V = torch.full((facts.vocab,), -1, dtype=torch.int64)
    t2d_V[ids_W] = torch.arange(len(ids_W))
    module.register_buffer("d2t_W", ids_W)
    module.register_buffer("t2d_V", t2d_V, persistent=False)
    return len(ids_W)


def make_level(logits_BNW: Tensor, valid_BN: Tensor, d2t_W: Tensor | None, tokens: int) -> Level:
    """fp32 logits of a level; ids that the tokenizer cannot produce are never drafted."""
    logits_BNW = logits_BNW.to(torch.promote_types(logits_BNW.dtype, torch.float32))
    if d2t_W is None and tokens < logits_BNW.shape[-1]:
        logits_BNW[..., tokens:] = -torch.inf
    return Level(logits_BNW, valid_BN)


def newest(commit: Commit, x_BTX: Tensor) -> Tensor:
    """[B, X]: each row's last committed entry of `x_BTX` (rows with none: their first, to be ignored)."""
    last_B = (commit.counts_B - 1).clamp(min=0)
    return x_BTX[torch.arange(len(last_B), device=last_B.device), last_B]


def refuse_unbound(*_: Any) -> Tensor:
    """Stands in for the target's embedding and head until `bind`."""
    raise ValueError("this drafter is bound to no target: call drafter.bind(target) before drafting")


def head_rows(target: Any, d2t_W: Tensor | None) -> Tensor:
    """[W, D] the target's output rows of the draft vocabulary."""
    return target.head_weight if d2t_W is None else target.head_weight[d2t_W.to(target.device)]


def norm_scale(target: Any) -> Tensor:
    """[D] what the target's final norm multiplies by (some families keep it less one)."""
    return target.norm.weight.float() + family_of(target.model.config).norm_offset


@torch.no_grad()
def copy_last_mlp(target: Any, mlp: MLP, norm: RMSNorm) -> None:
    """Start an MLP and the norm before it from those of the target's last layer.

    Raises ValueError where that layer has no such parts, or of other sizes.
    """
    last = dict(find_parts(target.model, target.model.config).layers[-1].named_parameters())
    before = next((n for n in ("pre_feedforward_layernorm", "post_attention_layernorm") if f"{n}.weight" in last), "")
    pairs = {f"mlp.{name}": parameter for name, parameter in mlp.named_parameters()} | {f"{before}.weight": norm.weight}
    shapes = {name: tuple(last[name].shape) if name in last else None for name in pairs}
    wrong = {name: shape for name, shape in shapes.items() if shape != tuple(pairs[name].shape)}
    if wrong or ("post_feedforward_layernorm.weight" in last and before == "post_attention_layernorm"):
        raise ValueError(
            f"mlp_from_target: the last layer of {target.facts.name} ({target.facts.family}) has no MLP of this shape "
            f"behind a norm ({wrong}); set drafter.mlp_from_target to false"
        )
    for name, parameter in pairs.items():
        parameter.copy_(
            last[name].float() + (family_of(target.model.config).norm_offset if name.startswith(before) else 0)
        )


def keyed_uniform(batch: Batch, width: int, stream: int = 0) -> Tensor:
    """[B, T, width] uniform in [0, 1), a function of (seed, epoch, sample id, position) and `stream` alone: padding,
    packing and the number of processes do not change it."""
    groups = -(-width // 8)
    group_G = torch.arange(groups, device=batch.ids_BT.device) + (stream << 16)
    seed = fold(batch.seed, batch.epoch + 1)
    key = (torch.tensor(seed & 0xFFFFFFFF), torch.tensor(seed >> 32 & 0xFFFFFFFF))
    counter = (
        batch.positions_BT[..., None] & 0xFFFFFFFF,
        batch.samples_BT[..., None] & 0xFFFFFFFF,
        group_G,
        torch.tensor(NOISE),
    )
    words_BTG4 = torch.stack(philox(counter, key), dim=-1)
    halves_BTG8 = torch.cat([words_BTG4 & 0xFFFF, words_BTG4 >> 16], dim=-1)
    return halves_BTG8.flatten(-2)[..., :width].float() * 2.0**-16


def feature_noise(batch: Batch, width: int, scale: float) -> Tensor:
    """[B, T, width] keyed noise, uniform in +-scale / 2 * 512 / length of the document (EAGLE's training code)."""
    end_BT = batch.ids_BT.shape[1] - document_starts(replace(batch, samples_BT=batch.samples_BT.flip(1))).flip(1)
    length_BT = end_BT - document_starts(batch)
    return (keyed_uniform(batch, width) - 0.5) * scale * (512 / length_BT)[..., None]


TargetHead = Callable[[Tensor, Tensor | None], Tensor]
TargetEmbed = Callable[[Tensor], Tensor]


def check_loss_settings(
    objective: str, oov: str, depth_weight: float, depths: int, method: str, features: bool = False
) -> None:
    """Refuse, by name and value, settings that every method's config has. Raises ValueError."""
    parse_objective(objective, features=features, method=method)
    if oov not in OOV:
        raise ValueError(f"{method}: oov must be one of {', '.join(OOV)}, got {oov!r}")
    if not 0 < depth_weight <= 1:
        raise ValueError(f"{method}: depth_weight must lie in (0, 1], got {depth_weight}")
    if depths < 1:
        raise ValueError(f"{method}: needs at least one depth, got {depths}")
