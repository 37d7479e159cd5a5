"""Adapters: what is trained when a target learns to denoise, and the two views of one set of weights.

LoRA (arXiv:2106.09685) through peft on the target's own projections, chosen by name; or all weights. The target stays
the model that it was: adapters are *off* unless a view is opened, and then, off, every value is the original's to the
bit. Trained tensors are fp32 masters in a module of their own (`trained`), which is what engines wrap, optimisers see
and checkpoints hold; the frozen weights belong to the target.

The mask token is an id that no text contains (models/mask_id.py), as it is or with an embedding row that is trained; or
a new id behind the vocabulary, with a row of its own. A trained row replaces the embedding's *output* where the id is
the mask's, in the noisy view only. So neither the embedding nor a head that is tied to it changes: no new logit, and
the original is untouched.

Test: pytest tests/test_adapters.py
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn

from .dropout import KeyedDropout
from .mask_id import choose_mask_id
from .settings import check_choices
from .target import Target

View = Literal["noisy", "clean"]
ADAPTER = "default"  # peft's name of the one adapter


@dataclass(frozen=True)
class AdapterConfig:
    """What is trained."""

    kind: Literal["lora", "full"] = "lora"
    """Low-rank adapters on frozen weights, or all weights (there is no way back to the original then)."""
    rank: int = 32
    """Rank of the adapters (dParallel for Dream, D2F: 32)."""
    alpha: float = 32.0
    """Adapters are scaled by alpha / rank (dParallel for Dream, D2F: 32)."""
    dropout: float = 0.0
    """Dropout before the adapters, in training (dParallel: 0). Coins are the token's own, however a batch is split."""
    strength: float = 1.0
    """Share of the adapters' difference that counts outside training: in held-out figures, probes and the export. Below 1
    the model stays nearer to the one it was (interpolated weights: Wortsman et al., arXiv:2109.01903, section 3)."""
    targets: tuple[str, ...] = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
    """Last names of the projections that get an adapter; every one must occur (dParallel's list)."""
    mask: Literal["none", "reserved", "trained", "new"] = "trained"
    """The mask token: there is none, an unused id as it is, an unused id with a trained embedding, or a new id behind the
    vocabulary."""
    mask_id: int | None = None
    """The unused id to take; null = the tokenizer's mask token, else the first unused one."""

    def __post_init__(self) -> None:
        check_choices(self, "adapters")
        if self.rank < 1 or self.alpha <= 0 or not 0 <= self.dropout < 1:
            raise ValueError(
                f"adapters: rank and alpha must be positive, dropout in [0, 1); got {self.rank}, {self.alpha}, "
                f"{self.dropout}"
            )
        if not 0 < self.strength <= 1 or (self.strength < 1 and self.kind != "lora"):
            raise ValueError(
                f"adapters.strength = {self.strength} with kind={self.kind}: it is a share in (0, 1], and below 1 it needs "
                "kind=lora"
            )
        if self.kind == "lora" and not self.targets:
            raise ValueError("adapters.targets is empty: name at least one projection, for example q_proj")
        if self.mask in ("new", "none") and self.mask_id is not None:
            why = "whose id follows the vocabulary" if self.mask == "new" else "which names no token"
            raise ValueError(f"adapters.mask_id = {self.mask_id} with mask={self.mask}, {why}; drop one")


def coverage(target: Target, names: tuple[str, ...]) -> dict[str, list[str]]:
    """Target name -> full names of the linear modules inside the layers whose last name it is.

    Raises ValueError for a name that matches nothing: it would be left out without a word.
    """
    inside = {id(module) for layer in target.layers for module in layer.modules()}
    linears = [
        name for name, module in target.model.named_modules() if isinstance(module, nn.Linear) and id(module) in inside
    ]
    found = {wanted: [name for name in linears if name.rsplit(".", 1)[-1] == wanted] for wanted in names}
    if missing := [wanted for wanted, matches in found.items() if not matches]:
        there = sorted({name.rsplit(".", 1)[-1] for name in linears})
        raise ValueError(
            f"adapters.targets: {', '.join(missing)} match nothing in the layers of {target.facts.name} "
            f"({target.facts.family}), which have: {', '.join(there)}"
        )
    return found


def nested(named: Mapping[str, nn.Parameter]) -> nn.Module:
    """A module tree that holds these parameters under their dotted names."""
    root = nn.Module()
    for name, parameter in named.items():
        *path, leaf = name.split(".")
        owner = root
        for part in path:
            if part not in owner._modules:
                owner.add_module(part, nn.Module())
            owner = owner._modules[part]  # type: ignore[assignment]
        owner.register_parameter(leaf, parameter)
    return root


class Adapters:
    """The adapters of one target; made once per target, which they stay in.

    `trained`: a module with the trained tensors, named as in the target (without peft's adapter name), and `mask_row`
    where the mask's embedding is trained. `mask_id`: None where no token stands for masks. Raises ValueError for a target
    that has adapters already.
    """

    def __init__(self, config: AdapterConfig, target: Target, *, dual: bool = False) -> None:
        hooks = target.model.get_input_embeddings()._forward_hooks.values()
        ours = any(isinstance(getattr(hook, "__self__", None), Adapters) for hook in hooks)
        if ours or any(hasattr(module, "lora_A") for module in target.model.modules()):
            raise ValueError(f"target {target.facts.name} has adapters already: load it anew, or merge them first")
        if (getattr(target.model.config, "draftsmith", None) or {}).get("kind") == "merged":
            raise ValueError(
                f"target {target.facts.name} is a converted model, its adapters merged into it: go on from the folder of "
                "the adapters (init_from), on the model that they were trained on"
            )
        if target.weights != "full":
            raise ValueError(
                f"target {target.facts.name} has weights={target.weights}, for decoding alone: load it with weights=full to put "
                "adapters into it"
            )
        if config.kind == "full" and dual:
            raise ValueError("objective.dual keeps the target as it is for clean rows: set adapters.kind=lora")
        if config.kind == "full" and target.quantized != "none":
            raise ValueError(
                f"adapters.kind=full trains the weights themselves, and these are rounded (quantize={target.quantized}): load "
                "them with quantize=none, or set adapters.kind=lora"
            )
        if config.kind == "full" and target.dtype not in (torch.float32, torch.float64):
            raise ValueError(
                f"adapters.kind=full trains the weights themselves: load them in float32, not {target.dtype}"
            )
        self.config, self.target, self.dual = config, target, dual
        self.embedding = target.model.get_input_embeddings()
        self.mask_id = self._choose_mask()
        self.layers: dict[str, Any] = {}
        self.on = self.training = False
        named: dict[str, nn.Parameter] = {}
        if config.kind == "full":
            target.model.requires_grad_(True)
            named |= dict(target.model.named_parameters())
            self.report = f"all {sum(p.numel() for p in named.values()) / 1e6:.1f} M weights"
        else:
            named |= self._add_lora()
        self.mask_row: nn.Parameter | None = None
        if config.mask in ("trained", "new"):
            with torch.no_grad():
                ids = torch.arange(target.facts.tokens, device=target.device)
                wide = torch.promote_types(target.dtype, torch.float32)
                mean_D = torch.zeros(target.facts.width, dtype=wide, device=target.device)
                for part in ids.split(4096):
                    mean_D += target.embed(part).to(wide).sum(0) / len(ids)
                row_D = mean_D if config.mask == "new" else target.embed(ids.new_tensor([self.mask_id]))[0].to(wide)
            self.mask_row = named["mask_row"] = nn.Parameter(row_D.clone())
        self._is_mask: Tensor | None = None
        self.embedding.register_forward_pre_hook(self._before_embedding)
        self.embedding.register_forward_hook(self._after_embedding)
        self.trained = nested(named)
        self._switch(False)

    @property
    def parameters(self) -> int:
        """Trained numbers."""
        return sum(p.numel() for p in self.trained.parameters())

    def needed_mask_id(self) -> int:
        """The mask token. Raises ValueError where there is none."""
        if self.mask_id is None:
            raise ValueError(
                "adapters.mask = none: these adapters know no mask token, and nothing can be hidden from them; train with "
                "adapters.mask=trained"
            )
        return self.mask_id

    @contextmanager
    def view(self, name: View) -> Iterator[None]:
        """While open, passes of the target run with (noisy) or without (clean) adapters. Views may be nested.

        Raises ValueError for the clean view of fully trained weights, which is gone.
        """
        if name == "clean" and self.config.kind == "full":
            raise ValueError("adapters.kind=full changes the weights themselves: there is no clean view of them")
        before = self.on
        self._switch(name == "noisy")
        try:
            yield
        finally:
            self._switch(before)

    def train(self, mode: bool = True) -> None:
        """Dropout on and adapters in full, or off and as `strength` says; the target itself always evaluates."""
        self.training = mode
        for layer in self.layers.values():
            layer.lora_dropout.train(mode)
            layer.scaling[ADAPTER] = self.scale if mode else self.scale * self.config.strength

    @property
    def differs_in_training(self) -> bool:
        """Whether passes in training are others than outside."""
        return self.config.dropout > 0 or self.config.strength < 1

    @property
    def scale(self) -> float:
        """What the adapters' product is multiplied by in training."""
        return self.config.alpha / self.config.rank

    @property
    def head_learns(self) -> bool:
        """Whether the output head is among what is trained."""
        return bool(self.target.head_weight.requires_grad)

    def load(self, tensors: Mapping[str, Tensor]) -> None:
        """Take trained tensors, by the names of `trained`, in place.

        Raises ValueError when a name or shape differs, or a value is not finite.
        """
        own = dict(self.trained.named_parameters())
        if own.keys() != tensors.keys():
            raise ValueError(f"adapters: tensors {sorted(own.keys() ^ tensors.keys())} are on one side only")
        for name, value in tensors.items():
            if value.shape != own[name].shape:
                raise ValueError(f"adapters: {name} is {tuple(value.shape)}, needed {tuple(own[name].shape)}")
            if not bool(value.isfinite().all()):
                raise ValueError(f"adapters: {name} holds NaN or infinity")
        with torch.no_grad():
            for name, value in tensors.items():
                own[name].copy_(value)

    @torch.no_grad()
    def merged(self) -> dict[str, Tensor]:
        """The whole model's tensors with the adapters added in: computed in fp32 at least, stored in the target's dtype,
        under the names of the model without adapters.

        The mask's row is written into the embedding; a tied head holds it too then, and gains a logit that must never
        be emitted. A new id adds one row to the embedding, and to an untied head (zeros), so that both keep one size.
        Raises ValueError for `dual`, whose clean rows have no adapters, and for rounded weights.
        """
        if self.dual:
            raise ValueError("dual adapters act on noisy rows alone: merged weights would change the clean ones too; "
                             "export the adapters")  # fmt: skip
        if self.target.quantized != "none":
            raise ValueError(
                f"the base is rounded (quantize={self.target.quantized}): merged, its rounding errors would stay for good; "
                "load it with quantize=none, put the exported adapters into it, and merge there"
            )
        state: dict[str, Tensor] = {}
        for name, tensor in self.target.model.state_dict().items():
            if ".lora_" not in name:
                state[name.replace(".base_layer.", ".")] = tensor.detach().clone()
        for name, layer in self.layers.items():
            weight = state[f"{name}.weight"]
            a_rD, b_Dr = (part[ADAPTER].weight for part in (layer.lora_A, layer.lora_B))
            wide = torch.promote_types(weight.dtype, torch.float32)
            difference = (b_Dr.to(wide) @ a_rD.to(wide)) * (self.scale * self.config.strength)
            weight.copy_(weight.to(wide) + difference)
        if self.mask_row is not None:
            scale = float(getattr(self.embedding, "embed_scale", 1.0))  # families that scale what they look up
            (embed,) = (n for n, module in self.target.model.named_modules() if module is self.embedding)
            mask_id = self.needed_mask_id()
            row_1D = (self.mask_row / scale)[None].to(self.target.dtype)
            old_VD = state[f"{embed}.weight"]
            new_VD = torch.cat([old_VD[:mask_id], row_1D, old_VD[mask_id + 1 :]])
            head = self.target.model.get_output_embeddings()
            (head_name,) = (n for n, module in self.target.model.named_modules() if module is head)
            state[f"{embed}.weight"] = new_VD
            if self.target.facts.tied:
                state[f"{head_name}.weight"] = new_VD
            else:
                extra = len(new_VD) - len(old_VD)
                for part in ("weight", "bias"):
                    if (value := state.get(f"{head_name}.{part}")) is not None:
                        state[f"{head_name}.{part}"] = torch.cat([value, value.new_zeros(extra, *value.shape[1:])])
        return state

    def _choose_mask(self) -> int | None:
        if self.config.mask == "none":
            return None
        if self.config.mask == "new":
            return self.target.facts.vocab
        return choose_mask_id(self.target, self.config.mask_id, "adapters")

    def _add_lora(self) -> dict[str, nn.Parameter]:
        from peft import LoraConfig, inject_adapter_in_model  # a second that the clean model does without

        config, target = self.config, self.target
        found = coverage(target, config.targets)
        names = [name for matches in found.values() for name in matches]
        settings = LoraConfig(
            r=config.rank,
            lora_alpha=config.alpha,  # type: ignore[arg-type]
            lora_dropout=config.dropout,
            target_modules=names,
            bias="none",
        )
        inject_adapter_in_model(settings, target.model)
        self.layers = {name: target.model.get_submodule(name) for name in names}
        if config.dropout:  # peft's draws from the process's generator
            for i, layer in enumerate(self.layers.values()):
                layer.lora_dropout[ADAPTER] = KeyedDropout(config.dropout, i)
        named = {}
        for name, parameter in target.model.named_parameters():
            if ".lora_" in name:  # bf16 masters would round small steps away
                parameter.data = parameter.data.to(torch.promote_types(parameter.dtype, torch.float32))
                named[name.replace(f".{ADAPTER}.", ".")] = parameter
        if len(named) != 2 * len(names):
            raise ValueError(f"adapters: {len(names)} projections were named, {len(named) / 2:g} got an adapter")
        self.train(False)
        counts = ", ".join(f"{name} x {len(matches)}" for name, matches in found.items())
        self.report = (
            f"LoRA of rank {config.rank} on {counts} ({sum(p.numel() for p in named.values()) / 1e6:.2f} M weights)"
        )
        return named

    def _switch(self, on: bool) -> None:
        """peft's own switch also turns gradients off, which would drop the parameters from what engines wrapped."""
        self.on = on
        for layer in self.layers.values():
            layer._disable_adapters = not on

    def _before_embedding(self, module: nn.Module, args: tuple[Tensor, ...]) -> tuple[Tensor, ...] | None:
        self._is_mask = None
        if self.mask_row is None or not self.on:
            return None
        self._is_mask = is_mask = args[0] == self.needed_mask_id()
        return (args[0].masked_fill(is_mask, 0), *args[1:])

    def _after_embedding(self, module: nn.Module, args: tuple[Tensor, ...], out: Tensor) -> Tensor | None:
        is_mask, self._is_mask = self._is_mask, None
        if is_mask is None or self.mask_row is None:
            return None
        return torch.where(is_mask[..., None], self.mask_row.to(out.dtype), out)
