"""The loss straight from hidden states against the naive form with all logits: memory, time, and errors of gradients.

KL from a teacher's states through its own head, gradients by states and head, fp32, on the CPU. Memory is the rise of the
process's peak above what it holds before (inputs), less both gradients, on Linux; each form in a process of its own,
where it is run three times (the largest, and the least time). Errors are of all terms at T=64, D=64, W=1000, relative to the largest element of the
float64 gradient, in chunks and naive (autograd through the definition in fp32). Where liger-kernel is installed, its
closest loss is measured beside both.

    python tests/bench/linear_loss.py            # the three sizes, minutes
    python tests/bench/linear_loss.py --quick    # the first one alone

The last line is JSON; the exit code is 1 where a bar fails.
"""

from __future__ import annotations

import argparse
import ctypes
import importlib.util
import json
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from draftsmith.kernels.linear_loss import TERMS, Dense, FromHidden, linear_loss, reference

SIZES = ((512, 576, 49152), (4096, 576, 8192), (4096, 2048, 32768))  # T, D, W


def naive(hidden_TD: Tensor, weight_WD: Tensor, teacher: FromHidden) -> Tensor:
    with torch.no_grad():
        log_p_TW = (teacher.hidden_UD @ teacher.weight_WD.T).log_softmax(-1)
    log_q_TW = (hidden_TD @ weight_WD.T).log_softmax(-1)
    return torch.nn.functional.kl_div(log_q_TW, log_p_TW, reduction="sum", log_target=True)


def chunked(hidden_TD: Tensor, weight_WD: Tensor, teacher: FromHidden) -> Tensor:
    return linear_loss(hidden_TD, weight_WD, ((1.0, "kl"),), teacher=teacher, weight_T=torch.ones(len(hidden_TD))).total


def liger(hidden_TD: Tensor, weight_WD: Tensor, teacher: FromHidden) -> Tensor:
    """Its chunked distillation loss with beta 0, which is KL: of 1,024 rows at a time, and a cross-entropy that weighs 0."""
    from liger_kernel.chunked_loss import LigerFusedLinearJSDLoss

    loss = LigerFusedLinearJSDLoss(weight_hard_loss=0.0, weight_soft_loss=1.0, beta=0.0, compiled=False)
    labels_T = torch.zeros(len(hidden_TD), dtype=torch.int64)
    return loss(hidden_TD, weight_WD, teacher.hidden_UD, teacher.weight_WD, labels_T)


FORMS = {"naive": naive, "chunked": chunked, "liger": liger}


def status(field: str) -> int:
    """Bytes of VmRSS or VmHWM."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(field))


def one(form: str, t: int, d: int, w: int, runs: int) -> dict[str, Any]:
    """In this process: peak bytes and seconds."""
    torch.manual_seed(0)
    hidden_TD, weight_WD = torch.randn(t, d, requires_grad=True), (torch.randn(w, d) / d**0.5).requires_grad_()
    teacher = FromHidden(torch.randn(t, d), torch.randn(w, d) / d**0.5)
    small = FromHidden(teacher.hidden_UD[:8], teacher.weight_WD[:64])
    FORMS[form](
        hidden_TD[:8], weight_WD[:64], small
    ).backward()  # what libraries load once is none of the loss's memory
    times, peaks = [], []
    for _ in range(runs):
        hidden_TD.grad = weight_WD.grad = None
        ctypes.CDLL(None).malloc_trim(0)
        Path("/proc/self/clear_refs").write_text("5")  # the peak starts anew
        before, start = status("VmRSS"), time.perf_counter()
        FORMS[form](hidden_TD, weight_WD, teacher).backward()
        times.append(time.perf_counter() - start)
        peaks.append(status("VmHWM") - before - 4 * d * (t + w))
    return {"peak_mb": max(peaks) / 1e6, "s": min(times)}


def errors() -> dict[str, dict[str, float]]:
    """Largest relative error of the gradients by states and head, of each term."""
    torch.manual_seed(0)
    hidden_TD, weight_WD, label_T = torch.randn(64, 64), torch.randn(1000, 64) / 8, torch.randint(1000, (64,))
    logits_TW = 2 * torch.randn(64, 1000)
    figures = {}
    for term in TERMS:

        def grads(dtype: torch.dtype, form: Any, term: str = term) -> tuple[Tensor, ...]:
            inputs = [x.to(dtype).requires_grad_() for x in (hidden_TD, weight_WD)]
            out = form(*inputs, ((1.0, term),), teacher=Dense(logits_TW.to(dtype)), label_T=label_T)
            return torch.autograd.grad((out if isinstance(out, Tensor) else out.total).sum(), inputs)

        want = grads(torch.float64, reference)
        figures[term] = {
            name: float(  # NaN if there is one
                torch.stack(
                    [(a - b).abs().max() / b.abs().max() for a, b in zip(grads(torch.float32, form), want, strict=True)]
                ).max()
            )
            for name, form in (("chunked", linear_loss), ("naive", reference))
        }
    return figures


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--one", nargs=4, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.one:
        print(json.dumps(one(args.one[0], *map(int, args.one[1:]), args.runs)))
        return 0
    found = errors()
    print(f"{'error of gradients':<20}{'chunked':>12}{'naive':>12}")
    for term, row in found.items():
        print(f"{term:<20}{row['chunked']:>12.1e}{row['naive']:>12.1e}")
    bars = [
        {"name": f"{term} error", "value": row["chunked"], "at_most": 2 * row["naive"], "holds": row["chunked"] <= 2 * row["naive"]}
        for term, row in found.items()
    ]  # fmt: skip
    sizes = {}
    for size in SIZES[:1] if args.quick else SIZES:
        rows = {}
        for form in FORMS if importlib.util.find_spec("liger_kernel") else ("naive", "chunked"):
            command = [sys.executable, __file__, "--runs", str(args.runs), "--one", form, *map(str, size)]
            rows[form] = json.loads(subprocess.run(command, capture_output=True, text=True, check=True).stdout)
        name = "T={} D={} W={}".format(*size)
        sizes[name] = rows
        for form, row in rows.items():
            print(f"{name}  {form:<8} {row['peak_mb']:>8.0f} MB {row['s']:>7.2f} s")
        for key, most in (("peak_mb", 1 / 8), ("s", 1.1)):
            share = rows["chunked"][key] / rows["naive"][key]
            bars.append({"name": f"{name} {key}", "value": share, "at_most": most, "holds": share <= most})
    figures = {"torch": torch.__version__, "errors": found, "sizes": sizes}
    print(json.dumps({"name": "linear_loss", "figures": figures, "bars": bars}))
    return 0 if all(bar["holds"] for bar in bars) else 1


if __name__ == "__main__":
    sys.exit(main())
