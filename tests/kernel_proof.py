"""Proof of kernels without a GPU: parity in Triton's interpreter, and compilation to machine code.

As a program (TRITON_INTERPRET=1 python tests/kernel_proof.py [kernel ...]) it runs the cases of tests/kernel_cases/ in
the interpreter, one process for all kernels, and prints one JSON line per case. As a module it compiles a `Build`.

A kernel named K in `KERNELS` has tests/kernel_cases/K.py with `cases(dtype) -> Iterator[Case]`.
"""

from __future__ import annotations

import importlib
import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor

CHIPS = {80: 163 * 1024, 90: 227 * 1024, 100: 227 * 1024}  # compute capability -> bytes of shared memory per block
MULTIPLIES = ("mma.sync", "wgmma.mma_async", "tcgen05.mma")
DTYPES = {"fp32": torch.float32, "fp16": torch.float16}


@dataclass
class Case:
    """One comparison: both give the same tensors (gradients among them), as a tuple."""

    name: str
    run: Callable[[], tuple[Tensor, ...]]
    """By the public wrapper, which takes the Triton kernel while interpreted."""
    want: Callable[[], tuple[Tensor, ...]]
    """By the plain reference, from the same inputs (widened, where the kernel computes in fp32)."""
    atol: float
    """Largest difference of any element; say in a comment what it comes from. 0 for ids and copies."""


def run_cases(names: list[str]) -> Iterator[dict[str, Any]]:
    """A line per case: what differs most, or what was raised. bf16 has to be refused."""
    for name in names:
        cases: Callable[[torch.dtype], Iterator[Case]] = importlib.import_module(f"kernel_cases.{name}").cases
        for kind, dtype in DTYPES.items():
            for case in cases(dtype):
                torch.manual_seed(0)
                start, line = time.process_time(), {"kernel": name, "dtype": kind, "case": case.name}
                try:
                    yield line | compare(case) | {"s": round(time.process_time() - start, 2)}
                except Exception as error:
                    yield line | {"wrong": f"{type(error).__name__}: {error}"}
        for case in cases(torch.bfloat16):
            line = {"kernel": name, "dtype": "bf16", "case": case.name}
            try:
                case.run()
                yield line | {"wrong": "bf16 met the interpreter unnoticed: let the wrapper ask jit.runs_on"}
            except TypeError as error:
                yield line | ({} if "interpreter" in str(error) else {"wrong": str(error)})
            break  # one is enough


def compare(case: Case) -> dict[str, Any]:
    got, want = case.run(), case.want()
    if len(got) != len(want) or any(a.shape != b.shape for a, b in zip(got, want, strict=True)):
        return {"wrong": f"shapes {[tuple(x.shape) for x in got]}, wanted {[tuple(x.shape) for x in want]}"}
    errors = [
        float((a.detach().double() - b.detach().double()).abs().max()) if a.numel() else 0.0
        for a, b in zip(got, want, strict=True)
    ]
    wrong = {} if all(error <= case.atol for error in errors) else {"wrong": f"errors {errors}, allowed {case.atol}"}
    return {"error": max(errors), "allowed": case.atol} | wrong


def interpret(names: list[str]) -> list[dict[str, Any]]:
    """The lines of the program, from a process of its own."""
    command = [sys.executable, str(Path(__file__).resolve()), *names]
    done = subprocess.run(command, env=os.environ | {"TRITON_INTERPRET": "1"}, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return [json.loads(line) for line in done.stdout.splitlines()]


@contextmanager
def launches(around: Callable[[], AbstractContextManager[object]] = nullcontext) -> Iterator[list[str]]:
    """Names of the kernels that are launched meanwhile, interpreted or on a GPU (replays of CUDA graphs are not seen).
    `around`: entered for every launch."""
    from draftsmith.kernels.norm import add_norm_kernel

    kind, names = type(add_norm_kernel), list[str]()
    at = kind.__getitem__

    def launching(kernel: Any, grid: Any) -> Callable[..., Any]:
        launch = at(kernel, grid)

        def run(*args: Any, **kwargs: Any) -> Any:
            names.append(kernel.fn.__name__)
            with around():
                return launch(*args, **kwargs)

        return run

    with patch.object(kind, "__getitem__", launching):
        yield names


@dataclass
class Compiled:
    shared: int
    """Bytes of shared memory per block."""
    local: int
    """Bytes of local memory per thread: spilled registers."""
    registers: int
    multiplies: list[str]
    """Which of `MULTIPLIES` are in the PTX."""


def compile_ahead(build: Any, chip: int) -> Compiled:
    """Machine code of a `Build` for compute capability `chip`, in a process that is not interpreted."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    names = build.kernel.arg_names
    assert set(names) == set(build.types) | set(build.constants), "each parameter needs a type or a value"
    even = [n for n, t in build.types.items() if t.startswith("*")] + list(build.aligned)
    source = ASTSource(
        fn=build.kernel,
        signature={n: build.types.get(n, "constexpr") for n in names},
        constexprs=build.constants,
        attrs={(names.index(n),): [["tt.divisibility", 16]] for n in even},
    )
    options = {"num_warps": build.warps, "num_stages": build.stages}
    done = triton.compile(source, target=GPUTarget("cuda", chip, 32), options=options)
    registers, local = resources(done.asm["cubin"])
    return Compiled(done.metadata.shared, local, registers, [m for m in MULTIPLIES if m in done.asm["ptx"]])


def resources(cubin: bytes) -> tuple[int, int]:
    """(registers, bytes of local memory) per thread, as the disassembler that comes with Triton reads them."""
    import tempfile

    import triton

    tool = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        text = subprocess.run([tool, "--dump-resource-usage", file.name], capture_output=True, text=True).stdout
    (found,) = re.findall(r"REG:(\d+) STACK:(\d+) SHARED:\d+ LOCAL:(\d+)", text)
    return int(found[0]), int(found[1]) + int(found[2])


def prove(build: Any, chip: int) -> Compiled:
    """Compiles, and asserts that it fits the chip."""
    done = compile_ahead(build, chip)
    assert done.shared <= CHIPS[chip], f"{done.shared} bytes of shared memory, sm_{chip} has {CHIPS[chip]}"
    assert done.local == 0, f"{done.local} bytes of registers spilled on sm_{chip}"
    assert bool(done.multiplies) or not build.dots, f"no tensor-core instruction on sm_{chip}"
    return done


if __name__ == "__main__":
    from draftsmith.kernels import KERNELS

    for line in run_cases(sys.argv[1:] or list(KERNELS)):
        print(json.dumps(line), flush=True)
