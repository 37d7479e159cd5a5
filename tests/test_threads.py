"""Threads: how they wait, set by whoever imports the library first; how many, by the size of the target.

pytest tests/test_threads.py
"""

import os
import subprocess
import sys
import warnings
from types import SimpleNamespace

import pytest
import torch

from draftsmith.models.loading import load_target
from draftsmith.models.threads import SMALL, settle_threads, why_slow


@pytest.fixture(autouse=True)
def restored():
    yield
    torch.set_num_threads(1)


def policy_after(imports: str, **given: str) -> str:
    env = {k: v for k, v in os.environ.items() if not k.startswith(("OMP_", "GOMP_"))} | given
    line = f"import os, sys; {imports}; print(os.environ.get('OMP_WAIT_POLICY'), 'torch' in sys.modules)"
    return subprocess.run([sys.executable, "-c", line], env=env, capture_output=True, text=True, check=True).stdout


def test_the_library_lets_threads_sleep_unless_somebody_chose() -> None:
    """Before torch is there, which reads it; afterwards it would help nobody, and hide that it does not."""
    assert policy_after("import draftsmith") == policy_after("import draftsmith.cli") == "PASSIVE False\n"
    assert policy_after("import draftsmith", OMP_WAIT_POLICY="ACTIVE") == "ACTIVE False\n"
    fake = "import types; sys.modules['torch'] = types.ModuleType('torch'); import draftsmith"
    assert policy_after(fake) == "None True\n"


def test_threads_that_spin_are_warned_of(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("OMP_WAIT_POLICY")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        load_target("tiny")  # one thread waits for nobody
        torch.set_num_threads(2)
        for name, value in (("OMP_WAIT_POLICY", "passive"), ("GOMP_SPINCOUNT", "0")):
            with monkeypatch.context() as patch:
                patch.setenv(name, value)
                assert why_slow() is None
                load_target("tiny")
    for value, told in (("", "was not set when torch was imported"), ("ACTIVE", "OMP_WAIT_POLICY=ACTIVE")):
        monkeypatch.setenv("OMP_WAIT_POLICY", value)
        with pytest.warns(UserWarning, match=rf"2 threads .*{told}.*OMP_WAIT_POLICY=PASSIVE"):
            load_target("tiny")


def test_small_targets_take_one_thread_where_nobody_said_how_many(monkeypatch: pytest.MonkeyPatch) -> None:
    def threads(weights: int, device: str = "cpu") -> int:
        torch.set_num_threads(2)
        size = SimpleNamespace(numel=lambda: weights)
        settle_threads(SimpleNamespace(device=torch.device(device), parameters=lambda: [size]))
        return torch.get_num_threads()

    assert threads(SMALL) == 2  # OMP_NUM_THREADS is set here
    monkeypatch.delenv("OMP_NUM_THREADS")
    assert threads(SMALL) == 1
    assert threads(SMALL + 1) == threads(SMALL, "cuda") == 2
