"""Parts of gpu.py: every kernel of the table, checked by its cases and timed at one usual size; one decode, timed.

The cases are those of the interpreter (tests/kernel_cases/), here on a GPU and in bf16 as well. Times are medians over
events of the GPU itself, in bf16, against the plain reference of the same call.
"""

from __future__ import annotations

import importlib
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from draftsmith.inference.speculate import DecodeConfig, generate
from draftsmith.kernels import KERNELS
from draftsmith.kernels.linear_loss import FromHidden
from draftsmith.kernels.tree_attention import Sight, pack
from draftsmith.kernels.unmask import Rule
from draftsmith.kernels.verify import Candidates, Coins
from draftsmith.losses.probs import SamplingParams
from draftsmith.models import METHODS
from draftsmith.models.target import Target

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from kernel_proof import compare, launches

BF16_ULP = 2.0**-8  # relative: of outputs and operands rounded to 8 bits
LAYERS = ("add_norm_kernel", "rope_write_kernel", "swiglu_kernel", "_attend", "_merge")  # of every pass of the decode
Pair = tuple[Callable[[], Any], Callable[[], Any]]


def check(name: str, device: str) -> dict[str, Any]:
    """Cases that failed, of how many; the largest error over what is allowed. bf16 may be off by ulps of its own, where
    a case allows a difference at all."""
    cases = importlib.import_module(f"kernel_cases.{name}").cases
    failed, ran, worst = [], 0, 0.0
    for dtype in (torch.float32, torch.float16, torch.bfloat16):
        with torch.device(device):
            for case in cases(dtype):
                torch.manual_seed(0)
                if dtype == torch.bfloat16 and case.atol:
                    largest = max((float(x.double().abs().max()) for x in case.want() if x.numel()), default=1.0)
                    case.atol = max(case.atol, 4 * BF16_ULP * max(1.0, largest))
                line = compare(case)
                ran += 1
                if case.atol and "error" in line:
                    worst = max(worst, line["error"] / case.atol)
                if "wrong" in line:
                    failed.append(f"{str(dtype).removeprefix('torch.')}: {case.name}: {line['wrong']}")
    return {"cases": ran, "of_allowed": round(worst, 3), "failed": failed}


def linear_loss(wrapper: Any, reference: Any) -> Pair:
    hidden_TD, teacher_TD = torch.randn(2, 2048, 1024, dtype=torch.bfloat16)
    weight_WD, head_WD = torch.randn(2, 32000, 1024, dtype=torch.bfloat16) / 32
    given, teacher = [hidden_TD.requires_grad_(), weight_WD.requires_grad_()], FromHidden(teacher_TD, head_WD, None)

    def fused() -> Any:
        return torch.autograd.grad(wrapper(*given, [(1.0, "kl")], teacher=teacher).total, given)

    def plain() -> Any:
        return torch.autograd.grad(reference(*given, [(1.0, "kl")], teacher=teacher).sum(), given)

    return fused, plain


def tree_attention(wrapper: Any, reference: Any) -> Pair:
    b, m, slots = 4, 32, 4096
    kv = torch.randn(2, b, 8, slots, 128, dtype=torch.bfloat16)
    q_BMHD = torch.randn(b, m, 32, 128, dtype=torch.bfloat16)
    see_BMM = torch.ones(b, m, m, dtype=torch.bool).tril()
    sight = Sight(torch.full((b,), slots - m), pack(see_BMM), m)
    return lambda: wrapper(q_BMHD, *kv, sight), lambda: reference(q_BMHD, *kv, sight)


def verify(wrapper: Any, reference: Any) -> Pair:
    b, n, v = 4, 24, 128256
    logits_BMV = torch.randn(b, n + 1, v, dtype=torch.bfloat16)
    parents_BN = ((torch.arange(n) - 1) // 2 + 1).clamp(min=0).repeat(b, 1)
    likely_BN = logits_BMV.argmax(-1).gather(1, parents_BN)
    tree = Candidates(likely_BN, parents_BN, torch.ones_like(parents_BN, dtype=torch.bool), 5)
    u = torch.rand(3, b, n + 1, dtype=torch.float64)
    given = ("target_only", logits_BMV, torch.ones(b, dtype=torch.float64), tree, Coins(u[0, :, 1:], u[1], u[2]))
    return lambda: wrapper(*given), lambda: reference(*given)


def compact(wrapper: Any, reference: Any) -> Pair:
    kv, path_BL = torch.zeros(32, 2, 4, 8, 4096, 128, dtype=torch.bfloat16), torch.tensor([[0, 2, 5, 9, 14]] * 4)
    lengths_B, counts_B = torch.full((4,), 2048), torch.full((4,), 5)
    return lambda: wrapper(kv, lengths_B.clone(), path_BL, counts_B), lambda: reference(
        kv, lengths_B.clone(), path_BL, counts_B
    )


def unmask(wrapper: Any, reference: Any) -> Pair:
    logits_BCV, open_BC = torch.randn(4, 32, 128256, dtype=torch.bfloat16), torch.ones(4, 32, dtype=torch.bool)
    return lambda: wrapper(logits_BCV, open_BC, Rule()), lambda: reference(logits_BCV, open_BC, Rule())


def topk(wrapper: Any, reference: Any) -> Pair:
    x_RV = torch.randn(32, 128256, dtype=torch.bfloat16)
    return lambda: wrapper(x_RV, 8), lambda: reference(x_RV, 8)


def norm(wrapper: Any, reference: Any) -> Pair:
    x_MD, other_MD = torch.randn(2, 64, 4096, dtype=torch.bfloat16)
    one_D = torch.ones(4096, dtype=torch.bfloat16)
    return lambda: wrapper(x_MD, one_D, 1e-5, other_MD), lambda: reference(x_MD, one_D, 1e-5, other_MD)


def rope(wrapper: Any, reference: Any) -> Pair:
    b, t, d = 4, 8, 128
    heads = [torch.randn(b, n, t, d, dtype=torch.bfloat16) for n in (32, 8, 8)]
    tables = [torch.randn(b, t, d, dtype=torch.bfloat16) for _ in "cs"]
    kv, slots_BT = torch.zeros(2, b, 8, 4096, d, dtype=torch.bfloat16), torch.arange(t).repeat(b, 1) + 100
    return lambda: wrapper(*heads, *tables, *kv, slots_BT), lambda: reference(*heads, *tables, *kv, slots_BT)


def swiglu(wrapper: Any, reference: Any) -> Pair:
    gate, up = torch.randn(64, 2 * 14336, dtype=torch.bfloat16).chunk(2, -1)
    return lambda: wrapper(gate, up), lambda: reference(gate, up)


def medusa_heads(wrapper: Any, reference: Any) -> Pair:
    x_MD, bias_KD = torch.randn(4, 4096, dtype=torch.bfloat16), torch.randn(4, 4096, dtype=torch.bfloat16)
    weight_KDD = torch.randn(4, 4096, 4096, dtype=torch.bfloat16) / 64
    return lambda: wrapper(x_MD, weight_KDD, bias_KD), lambda: reference(x_MD, weight_KDD, bias_KD)


USUAL: dict[str, Callable[[Any, Any], Pair]] = {
    "linear_loss": linear_loss,
    "tree_attention": tree_attention,
    "verify": verify,
    "compact": compact,
    "unmask": unmask,
    "topk": topk,
    "norm": norm,
    "rope": rope,
    "swiglu": swiglu,
    "medusa_heads": medusa_heads,
}


def milliseconds(run: Callable[[], Any], times: int = 20) -> float:
    """Median time on the GPU, after three calls that do not count."""
    found = []
    for i in range(times + 3):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in "se")
        start.record()
        run()
        end.record()
        end.synchronize()
        if i >= 3:
            found.append(start.elapsed_time(end))
    return sorted(found)[times // 2]


def kernel(name: str, device: str) -> dict[str, Any]:
    """Checked, and if nothing failed, timed."""
    row = check(name, device)
    if row["failed"]:
        raise AssertionError(f"{len(row['failed'])} of {row['cases']} cases: {'; '.join(row['failed'][:3])}")
    entry = KERNELS[name]
    with torch.device(device):
        fused, plain = USUAL[name](entry.load(entry.wrapper), entry.load(entry.reference))
    row |= {"kernel_ms": round(milliseconds(fused), 4), "reference_ms": round(milliseconds(plain), 4)}
    return row | {"speedup": round(row["reference_ms"] / row["kernel_ms"], 2)}


def target_of(device: str, layers: int = 16, width: int = 1024) -> Target:
    """A Llama of some 270 million random weights in bf16, with the tiny target's tokenizer: its speed is a model's."""
    from transformers import LlamaConfig, LlamaForCausalLM

    from draftsmith.models.pretrained import tiny_tokenizer

    tokenizer = tiny_tokenizer()
    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=width, intermediate_size=4 * width, num_hidden_layers=layers, num_attention_heads=16,
        num_key_value_heads=8, vocab_size=max(len(tokenizer), 4096), max_position_embeddings=4096,
        rope_parameters={"rope_type": "default", "rope_theta": 10000.0}, attn_implementation="sdpa",
    )  # fmt: skip
    return Target(LlamaForCausalLM(config).bfloat16(), tokenizer, "random").to(device)


def decode(device: str, tokens: int = 192) -> dict[str, Any]:
    """Tokens per second of one request, plain and with an untrained EAGLE-3 chain: by the host's steps, the device's, and
    CUDA graphs; which of our kernels ran; and whether a graph's tokens are those of the steps it was captured from (same
    kernels, same shapes)."""
    target = target_of(device)
    torch.manual_seed(0)
    drafter = METHODS["eagle3"](METHODS["eagle3"].Config(), target.facts)
    drafter.init_from_target(target)
    drafter = drafter.to(device, target.dtype).eval()
    drafter.bind(target)
    params, prompt = SamplingParams(max_new_tokens=tokens, ignore_eos=True), [list(range(5, 69))]
    row: dict[str, Any] = {"tokens_per_second": {}, "steps": {}, "kernels": {}, "different": 0}
    for name, drafts in (("plain", None), ("eagle3 k=4", drafter)):
        ids = {}
        for step in ("host", "device", "auto"):
            asked = DecodeConfig(k=4, step=step)  # type: ignore[arg-type]
            with launches() as names:
                generate(target, prompt, params, drafts, asked)  # compiles
            row["kernels"][f"{name}, {step}"] = sorted(set(names))
            torch.cuda.synchronize()
            since = time.perf_counter()
            (result,) = generate(target, prompt, params, drafts, asked)
            row["tokens_per_second"][f"{name}, {step}"] = round(tokens / (time.perf_counter() - since), 1)
            row["steps"][f"{name}, {step}"] = result.stats.step
            ids[step] = result.ids
        row["different"] += sum(a != b for a, b in zip(ids["device"], ids["auto"], strict=True))
    if any(row["steps"][key] != "graph" for key in row["steps"] if key.endswith("auto")):
        raise AssertionError(f"no graph: {row['steps']}")
    if missing := [k for k in LAYERS if any(k not in names for names in row["kernels"].values())]:
        raise AssertionError(f"{', '.join(missing)} did not run: {row['kernels']}")
    return row


def table(rows: list[dict[str, Any]]) -> str:
    """The kernels and the decode, in Markdown."""
    lines = ["| kernel | cases | error / allowed | kernel ms | reference ms | speed-up |", "|---|---|---|---|---|---|"]
    for row in rows:
        if row["name"].startswith("kernel ") and "kernel_ms" in row:
            cells = (row["cases"], row["of_allowed"], row["kernel_ms"], row["reference_ms"], row["speedup"])
            lines.append(f"| {row['name'].removeprefix('kernel ')} | {' | '.join(map(str, cells))} |")
        elif row["name"].startswith("kernel "):
            lines.append(f"| {row['name'].removeprefix('kernel ')} | FAILED: {row.get('error', '')} | | | | |")
    lines += ["", "| decode | tokens/s | steps | kernels |", "|---|---|---|---|"]
    for row in rows:
        for key, rate in row.get("tokens_per_second", {}).items():
            lines.append(f"| {key} | {rate} | {row['steps'][key]} | {', '.join(row['kernels'][key])} |")
    return "\n".join(lines)
