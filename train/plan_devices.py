"""Devices that a plan can be made for, and how long they take: a literal table and arithmetic. Figures are the
vendors', as `source` names them; compared with what other tables give of them, not with the devices. Where that was
not done, or tables differ, `source` says so.

Test: pytest tests/test_plan.py
"""

from __future__ import annotations

import difflib
from dataclasses import dataclass

UPDATE_BYTES = 28  # AdamW reads weight, gradient and two moments and writes three of them: 7 x 4 bytes a number
USUAL_SHARE = 0.35  # of the peak in dense bf16 that a step reaches; an assumption, to be replaced by a measured one


@dataclass(frozen=True)
class Device:
    """One accelerator: memory in GB (1e9 bytes) as it is sold, dense bf16 products in TFLOP/s, memory in GB/s."""

    name: str
    memory_gb: float
    tflops: float
    bandwidth: float
    source: str


DEVICES: dict[str, Device] = {
    "t4": Device("Tesla T4", 16, 65, 320, "NVIDIA T4 datasheet (fp16; it has no bf16); bandwidth not compared"),
    "rtx3090": Device(
        "GeForce RTX 3090",
        24,
        71,
        936,
        "NVIDIA GA102 whitepaper, table 2 (bf16, fp32 accumulate); TFLOP/s not compared",
    ),
    "rtx4090": Device("GeForce RTX 4090", 24, 165.2, 1008, "NVIDIA Ada whitepaper, appendix A (bf16, fp32 accumulate)"),
    "l4": Device("L4", 24, 121, 300, "NVIDIA L4 datasheet (half of the figure with sparsity)"),
    "l40s": Device("L40S", 48, 362, 864, "NVIDIA L40S datasheet (half of the figure with sparsity)"),
    "a100-40": Device("A100 40GB", 40, 312, 1555, "NVIDIA A100 datasheet"),
    "a100": Device("A100 80GB SXM", 80, 312, 2039, "NVIDIA A100 datasheet"),
    "h100": Device("H100 SXM", 80, 989.4, 3350, "NVIDIA H100 datasheet (half of the figure with sparsity)"),
    "h100-pcie": Device("H100 PCIe", 80, 756, 2000, "NVIDIA H100 datasheet (half of the figure with sparsity)"),
    "h200": Device("H200 SXM", 141, 989.4, 4800, "NVIDIA H200 datasheet (half of the figure with sparsity)"),
    "b200": Device(
        "B200 SXM",
        180,
        2250,
        7700,
        "NVIDIA HGX B200 datasheet (half of the figure with sparsity); tables differ: 180 to 192 GB, 7,700 to 8,000 GB/s",
    ),
    "mi300x": Device("Instinct MI300X", 192, 1307.4, 5300, "AMD MI300X datasheet"),
}


def device_of(name: str) -> Device:
    """Raises ValueError for a name that is not in the table, with the nearest one."""
    if name not in DEVICES:
        near = difflib.get_close_matches(name.lower(), DEVICES, 1, 0.0)[0]
        raise ValueError(
            f"gpu={name!r} is not in the table; nearest: {near!r} (known: {', '.join(DEVICES)}), or give memory_gb=..., and "
            "leave gpu out"
        )
    return DEVICES[name]


def step_seconds(flops: float, trained: int, device: Device, share: float) -> float:
    """One optimiser step of one device: its products at `share` of the peak, and the update at the memory's speed."""
    return flops / (share * device.tflops * 1e12) + UPDATE_BYTES * trained / (device.bandwidth * 1e9)
