"""Every kernel of the table: equal to its reference in Triton's interpreter, and compiled for three generations of GPUs.

Run: pytest tests/test_kernels.py; one kernel alone: -k linear_loss. How a kernel joins: kernel_proof.py.
"""

from __future__ import annotations

from typing import Any

import pytest
from kernel_proof import CHIPS, DTYPES, interpret, prove

from draftsmith.kernels import KERNELS
from draftsmith.kernels.jit import INTERPRETED, triton

pytestmark = pytest.mark.skipif(triton is None, reason="Triton is not made for this system")


@pytest.fixture(scope="module")
def lines(request: pytest.FixtureRequest) -> list[dict[str, Any]]:
    """Of the kernels that are being tested, all from one process."""
    chosen = {item.callspec.params.get("name") for item in request.session.items if hasattr(item, "callspec")}
    return interpret([name for name in KERNELS if name in chosen])


@pytest.mark.parametrize("dtype", [*DTYPES, "bf16"])
@pytest.mark.parametrize("name", KERNELS)
def test_interpreted_kernels_equal_their_references(name: str, dtype: str, lines: list[dict[str, Any]]) -> None:
    """In fp32 and fp16, values and gradients; bf16, which the interpreter gets wrong, is refused."""
    own = [line for line in lines if line["kernel"] == name and line["dtype"] == dtype]
    assert own, "no cases"
    assert [line for line in own if "wrong" in line] == []


@pytest.mark.skipif(INTERPRETED, reason="kernels are interpreted in this process")
@pytest.mark.parametrize("name", KERNELS)
def test_kernels_compile_for_every_chip(name: str, tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    for i, build in enumerate(KERNELS[name].load(KERNELS[name].builds)):
        for chip in CHIPS:
            print(name, i, build.kernel.__name__, f"sm_{chip}", prove(build, chip))


@pytest.mark.parametrize("name", KERNELS)
def test_table_names_what_is_there(name: str) -> None:
    entry = KERNELS[name]
    assert callable(entry.load(entry.wrapper)) and callable(entry.load(entry.reference)) and entry.load(entry.builds)
