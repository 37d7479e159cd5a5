"""How attention of a verification pass is best asked of PyTorch on a CPU, one layer of a small target.

Rows of q_len 1, 5 and 16 over 512 slots, 9 query heads on 3 key heads of width 64 (SmolLM2-135M), one thread. `folded`
is what models/lean_pass.py does, whose mask is made once per pass; the others give the boolean mask that `Cache.mask` makes.

    python tests/bench/tree_attention.py           # 5 seconds

Median of interleaved calls, microseconds; no time is printed unless all forms agree. The last line is JSON.
"""

from __future__ import annotations

import json
import statistics
import time

import torch
from torch.nn.functional import scaled_dot_product_attention as sdpa

from draftsmith.kernels.tree_attention import Sight, pack, reference, visible
from draftsmith.models.lean_pass import attend

HEADS, KEYS, WIDTH, SLOTS, REPEATS = 9, 3, 64, 512, 80


def measured(dtype: torch.dtype, rows: int) -> dict[str, float]:
    """Microseconds per form."""
    q = torch.randn(1, HEADS, rows, WIDTH).to(dtype).transpose(1, 2)
    k, v = torch.randn(2, 1, KEYS, SLOTS, WIDTH).to(dtype)
    steps = torch.arange(rows)
    sight = Sight(torch.tensor([SLOTS - rows - 3]), pack((steps <= steps[:, None])[None]), rows)
    see_B1MS = visible(sight, SLOTS)[:, None]
    group = HEADS // KEYS
    bias_B1RS = torch.zeros(see_B1MS.shape, dtype=dtype).masked_fill_(~see_B1MS, -torch.inf).repeat_interleave(group, 2)
    q_BHMD = q.transpose(1, 2)
    forms = {
        "repeated": lambda: sdpa(q_BHMD, k.repeat_interleave(group, 1), v.repeat_interleave(group, 1), see_B1MS),
        "enable_gqa": lambda: sdpa(q_BHMD, k, v, see_B1MS, enable_gqa=True),
        "folded": lambda: attend(q, k, v, bias_B1RS, True, False).view(1, rows, HEADS, WIDTH).transpose(1, 2),
    }
    want = reference(q.double(), k.double(), v.double(), sight).transpose(1, 2)
    atol = 1e-5 if dtype == torch.float32 else 2e-3  # a rounding of outputs of about 0.1, and of the weights
    for name, form in forms.items():
        error = float((form().double() - want).abs().max())
        assert error < atol, f"{name} is off by {error}: no times"
    times: dict[str, list[float]] = {name: [] for name in forms}
    for _ in range(REPEATS):
        for name, form in forms.items():
            start = time.perf_counter()
            form()
            times[name].append((time.perf_counter() - start) * 1e6)
    return {name: round(statistics.median(values), 1) for name, values in times.items()}


def main() -> None:
    torch.set_num_threads(1)
    torch.manual_seed(0)
    result: dict[str, dict[str, float]] = {}
    with torch.inference_mode():
        for dtype in (torch.bfloat16, torch.float32):
            for rows in (1, 5, 16):
                name = f"{str(dtype).removeprefix('torch.')} x {rows}"
                result[name] = measured(dtype, rows)
                print(f"{name:>14}  " + "  ".join(f"{form} {us:7.1f}" for form, us in result[name].items()))
    print(json.dumps({"us": result, "torch": torch.__version__}))


if __name__ == "__main__":
    main()
