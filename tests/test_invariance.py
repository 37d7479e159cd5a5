"""The same update, however a batch is split: the short form of tests/bench/invariance.py. Run: pytest tests/test_invariance.py"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

BENCH = Path(__file__).resolve().parent / "bench/invariance.py"


def test_splits_over_processes_accumulation_and_engines_give_one_update() -> None:
    """PROMISES 3: two processes, accumulation 1 to 4, all engines; samples of 1, 3, 9 and 27 supervised tokens."""
    result = subprocess.run([sys.executable, str(BENCH), "--quick"], capture_output=True, text=True, timeout=600)
    assert result.returncode == 0, result.stdout[-4000:] + result.stderr[-4000:]
    figures = json.loads(result.stdout.splitlines()[-1])
    assert all(figures["holds"].values()) and {case["engine"] for case in figures["cases"]} >= {
        "ddp",
        "zero1",
        "zero2",
        "zero3",
    }
