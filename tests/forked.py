"""Ranks of a training script as forks of one process that has imported everything: real processes, which can be killed or
stopped, without the ten seconds of imports that each launch costs. What a launcher does is done here by `Ranks.wait`.

Used by `tests/test_faults.py` and `tests/bench/kills.py --forked`; real launchers are in the latter without that switch.
"""

from __future__ import annotations

import multiprocessing
import os
import runpy
import signal
import socket
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
SCRIPTS = ("distill_draft", "convert_block_diffusion", "distill_certainty", "distill_consistency")
PRELOAD = ("deepspeed", "datasets", *(f"draftsmith.train.{name}" for name in SCRIPTS))
ENGINES: dict[str, dict[str, str]] = {
    "ddp": {"ACCELERATE_USE_CPU": "true"},
    "zero2": {
        "ACCELERATE_USE_DEEPSPEED": "true",
        "ACCELERATE_DEEPSPEED_CONFIG_FILE": str(ROOT / "configs/deepspeed/zero2.json"),
        "ACCELERATE_DEEPSPEED_ZERO3_INIT": "false",
        "ACCELERATE_CONFIG_DS_FIELDS": "deepspeed_config_file,zero3_init_flag",
    },
}


def free_port() -> int:
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return int(one.getsockname()[1])


def _become(script: str, argv: Sequence[str], env: dict[str, str], out: str, err: str) -> None:
    """In the child: what the interpreter does for `python SCRIPT ARGV`."""
    for path, descriptor in ((out, 1), (err, 2)):
        os.dup2(os.open(path, os.O_CREAT | os.O_WRONLY | os.O_APPEND), descriptor)
    os.environ.update(env)
    os.chdir(ROOT)
    sys.argv = [script, *argv]
    runpy.run_path(str(ROOT / script), run_name="__main__")


class Ranks:
    """One launch of `script` by `world` processes; their output goes to `out`.stdout and `out`.stderr."""

    def __init__(self, script: str, argv: Sequence[str], out: Path, engine: str = "ddp", world: int = 2) -> None:
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(list(PRELOAD))
        self.stdout, self.stderr = out.with_suffix(".stdout"), out.with_suffix(".stderr")
        port, self.processes = str(free_port()), []
        for rank in range(world):
            env = {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(world), "LOCAL_WORLD_SIZE": str(world)}
            env |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port} | (ENGINES[engine] if world > 1 else {})
            env |= {"DRAFTSMITH_PROCESSES": str(world)}
            args = (script, list(argv), env, str(self.stdout), str(self.stderr))
            self.processes.append(context.Process(target=_become, args=args))
        for process in self.processes:
            process.start()

    @property
    def pids(self) -> list[int]:
        return [process.pid or 0 for process in self.processes]

    def running(self) -> bool:
        return any(process.exitcode is None for process in self.processes)

    def signal(self, number: signal.Signals, *ranks: int) -> None:
        for rank in ranks or range(len(self.processes)):
            if self.processes[rank].exitcode is None:
                os.kill(self.pids[rank], number)

    def wait(self, seconds: float, grace: float = 30.0) -> list[int]:
        """The exit codes once all have ended (negative: the signal). As torchrun does it: when one fails, the others get
        SIGTERM, and SIGKILL after `grace`. Raises TimeoutError, with everything killed."""
        end, failed = time.monotonic() + seconds, 0.0
        while self.running():
            if not failed and any(process.exitcode for process in self.processes):
                failed = time.monotonic()
                self.signal(signal.SIGTERM)
            if (failed and time.monotonic() > failed + grace) or time.monotonic() > end:
                self.signal(signal.SIGKILL)
            if time.monotonic() > end:
                raise TimeoutError(f"still running after {seconds:g} s: {self.stderr.read_text()[-2000:]}")
            time.sleep(0.02)
        return [int(process.exitcode or 0) for process in self.processes]

    def close(self) -> None:
        """Leave nothing behind."""
        self.signal(signal.SIGKILL)
        for process in self.processes:
            process.join()


def text_of(path: Path) -> str:
    return path.read_text() if path.exists() else ""


def last_lines(ranks: Any) -> list[str]:
    """The error lines of a launch."""
    return [line for line in text_of(ranks.stderr).splitlines() if line.startswith("error: ")]
