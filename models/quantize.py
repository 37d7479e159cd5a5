"""Frozen weights in 4 or 8 bits, under adapters that keep fp32 masters (QLoRA, arXiv:2305.14314).

The projections inside the layers are rounded as they are loaded, through transformers; embedding and head are not. What
was rounded keeps the fingerprint of the full-precision model, because adapters are that model's: trained on rounded
weights, they load on full ones, which is where they are merged (`Adapters.merged` refuses rounded weights).

    load_target("owner/name", device="cuda", quantize="nf4")         # needs bitsandbytes
    load_target("owner/name", quantize="int8_weight")                # needs torchao

Test: pytest tests/test_quantize.py (the rounding itself only where a package is installed)
"""

from __future__ import annotations

from dataclasses import dataclass
from importlib.util import find_spec
from typing import Any, Literal

import torch

Quantize = Literal["none", "nf4", "int8", "int8_weight"]
PACKAGE = {"nf4": "bitsandbytes", "int8": "bitsandbytes", "int8_weight": "torchao"}


@dataclass(frozen=True)
class Quantized:
    """How weights are held, and the fingerprint of the model that they were rounded from."""

    kind: str
    fingerprint: str


def check_quantize(kind: str, device: str | torch.device | None = None) -> None:
    """Raises ValueError for an unknown kind, one whose package is not installed, and nf4 on a CPU, whose kernels are for
    inference: gradients get lost in them without an error."""
    if kind != "none" and kind not in PACKAGE:
        raise ValueError(f"quantize = {kind!r}: use one of none, {', '.join(PACKAGE)}")
    if kind != "none" and find_spec(PACKAGE[kind]) is None:
        raise ValueError(
            f"quantize = {kind} needs the package {PACKAGE[kind]}, which is not installed: pip install {PACKAGE[kind]}, or "
            "quantize=none"
        )
    if kind == "nf4" and device is not None and torch.device(device).type == "cpu":
        raise ValueError("quantize = nf4 trains on a GPU alone: on a CPU bitsandbytes loses gradients; use int8_weight")


def quantization_config(kind: str, dtype: torch.dtype) -> Any:
    """transformers' settings of a kind other than none: `nf4` with double quantisation (QLoRA §3), `int8` (LLM.int8,
    arXiv:2208.07339), `int8_weight` (a scale per row; computed in `dtype`)."""
    if kind == "int8_weight":
        from torchao.quantization import Int8WeightOnlyConfig
        from transformers import TorchAoConfig

        return TorchAoConfig(Int8WeightOnlyConfig())
    from transformers import BitsAndBytesConfig

    if kind == "int8":
        return BitsAndBytesConfig(load_in_8bit=True)
    return BitsAndBytesConfig(
        load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_use_double_quant=True, bnb_4bit_compute_dtype=dtype
    )
