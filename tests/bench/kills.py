"""Kill a training again and again, at random moments, and see that it ends as if nothing had been.

Two processes, by DDP and by DeepSpeed ZeRO-2, of `train/distill_draft.py` on a tiny target. Each run is killed several
times (SIGKILL to one process, to both, or to both and their launcher), goes on after each kill by the same command, and is
then compared with a run that nobody touched: every tensor of the last checkpoint (weights, moments, generators), the
exported weights and all lines of `metrics.jsonl` but clocks and rates must be equal to the bit.

    python tests/bench/kills.py                    # 20 kills per engine by real launches, about 25 minutes on 2 cores
    python tests/bench/kills.py --forked           # the same without launchers (tests/forked.py), about 10 minutes
    python tests/bench/kills.py --quick            # 2 kills per engine, forked

Moments are drawn from a seed: while it starts (import, capture of states), at a step, while a checkpoint is being written
(the moment its hidden folder appears, plus a share of the time that a save takes), and after the last step (last save,
export). Nothing in the code is told of them. Finished runs are kept in `--work`, so that the script may itself be
interrupted. The last line is JSON; exit code 1 when a run ends otherwise or a launch outlives its killed process by more
than 60 seconds.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from forked import ROOT, Ranks, free_port, text_of

SCRIPT, ENGINES = "train/distill_draft.py", ("ddp", "zero2")
WHOM = ("rank 0", "rank 1", "both", "all")  # all: the launcher, too
CLOCKS = ("seconds", "tokens_per_second")  # what a line says about time; so does all of these:
MEASURED = ("speed/", "time/", "memory/")
OUTLIVE = 60.0  # seconds from the kill to the launch's end


@dataclass(frozen=True)
class Sizes:
    """A run, and how often it is killed."""

    steps: int
    save: int
    kills: int  # per engine
    per_run: int


FULL, QUICK = Sizes(240, 20, 20, 4), Sizes(40, 10, 2, 2)


@dataclass
class Kill:
    """One kill, as planned and as it was."""

    kind: str  # start, step, save, end
    share: float  # where in the range that the kind leaves, in [0, 1)
    delay: float  # further share, of the time that a start, a step or a save takes
    whom: str
    step: int = 0  # last step in the log when it came
    saving: bool = False  # a checkpoint was being written: its hidden folder is there
    ended: float = 0.0  # seconds until the launch had ended
    lost: int = 0  # steps in the log beyond the newest complete checkpoint


def plan(seed: int, engine: str, run: int, kills: int) -> list[Kill]:
    """The kills of one run."""
    dice = random.Random(f"{seed} {engine} {run}")
    kinds = ("start", "step", "step", "save", "save", "save", "end", "end")
    drawn = [Kill(dice.choice(kinds), dice.random(), dice.random(), dice.choice(WHOM)) for _ in range(kills)]
    return [kill for kill in drawn if kill.kind != "end"] + [kill for kill in drawn if kill.kind == "end"]


class Launched:
    """One launch by accelerate, in the same words as `forked.Ranks`."""

    def __init__(self, script: str, argv: list[str], out: Path, engine: str) -> None:
        line = [sys.executable, "-m", "accelerate.commands.launch", "--main_process_port", str(free_port())]
        env = {k: v for k, v in os.environ.items() if not k.startswith(("ACCELERATE_", "DRAFTSMITH_"))}
        env |= {"DRAFTSMITH_PROCESSES": "2", "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"}
        if engine == "ddp":
            line += ["--multi_gpu", "--num_processes", "2", "--num_machines", "1", "--mixed_precision", "no"]
            line += ["--dynamo_backend", "no"]
            env["ACCELERATE_USE_CPU"] = "true"
        else:
            line += ["--config_file", "configs/accelerate/zero2.yaml", "--num_processes", "2"]
            env["DS_ACCELERATOR"] = "cpu"
        self.stdout, self.stderr = out.with_suffix(".stdout"), out.with_suffix(".stderr")
        with self.stdout.open("a") as first, self.stderr.open("a") as second:
            self.process = subprocess.Popen([*line, script, *argv], cwd=ROOT, env=env, stdout=first, stderr=second)

    @property
    def pids(self) -> list[int]:
        """The training processes, by rank; empty before both are there."""
        try:
            children = Path(f"/proc/{self.process.pid}/task/{self.process.pid}/children").read_text().split()
            environments = {int(pid): Path(f"/proc/{pid}/environ").read_text() for pid in children}
        except OSError:
            return []
        ranks = {pid: text.split("\0") for pid, text in environments.items()}
        found = {rank: pid for pid, words in ranks.items() for rank in range(2) if f"LOCAL_RANK={rank}" in words}
        return [found[rank] for rank in sorted(found)] if len(found) == 2 else []

    def running(self) -> bool:
        return self.process.poll() is None

    def signal(self, number: signal.Signals, *ranks: int) -> None:
        pids = self.pids
        for rank in ranks or range(len(pids)):
            os.kill(pids[rank], number)

    def wait(self, seconds: float) -> list[int]:
        try:
            return [self.process.wait(seconds)]
        except subprocess.TimeoutExpired:
            raise TimeoutError(f"still running after {seconds:g} s: {text_of(self.stderr)[-2000:]}") from None

    def close(self) -> None:
        pids = self.pids
        self.process.kill()
        self.process.wait()
        for pid in pids:
            if Path(f"/proc/{pid}").exists():
                os.kill(pid, signal.SIGKILL)


def argv_of(folder: Path, sizes: Sizes) -> list[str]:
    """A run with saves by the step and by the best figure, measurements and probes among them."""
    words = ["--config", "configs/quick.yaml", "data.limit=12", "data.max_length=128", "batch.row_length=128"]
    words += ["batch.rows=2", "batch.accumulate=2", "evaluate.conversations=4", "evaluate.probe_tokens=8"]
    words += ["log.every=1", "log.progress=false", f"budget.steps={sizes.steps}", f"save.steps={sizes.save}"]
    return [*words, f"evaluate.every={sizes.save * 2}", f"evaluate.probe_every={sizes.save * 4}", f"run={folder}"]


def logged(folder: Path) -> int:
    """The last training step in the log."""
    lines = text_of(folder / "metrics.jsonl").splitlines()
    for line in reversed(lines):
        if line.startswith('{"kind": "train"') and line.endswith("}"):
            return int(json.loads(line)["step"])
    return 0


def hidden(folder: Path) -> set[str]:
    """Checkpoints that are being written, or were when something ended."""
    place = folder / "checkpoints"
    return {name for name in os.listdir(place) if name.startswith(".step-")} if place.is_dir() else set()


def wait_for(what: Callable[[], Any], launch: Any, pause: float, seconds: float = 300.0) -> bool:
    """True once `what` holds, False when the launch ended before."""
    end = time.monotonic() + seconds
    while not what():
        if not launch.running():
            return False
        if time.monotonic() > end:
            raise TimeoutError(f"no such moment in {seconds:g} s: {text_of(launch.stderr)[-2000:]}")
        time.sleep(pause)
    return True


def strike(kill: Kill, launch: Any, folder: Path, sizes: Sizes, times: dict[str, float], left: int) -> bool:
    """Wait for the moment and kill; False when the launch ended before it came."""
    began, halves = newest(folder), hidden(folder)
    room = max(sizes.steps - began, 1) / left  # leave steps for those that follow
    aim = began + 1 + int(kill.share * room) if kill.kind != "end" else sizes.steps
    if kill.kind == "start":
        time.sleep(kill.share * times["start"])
    elif not wait_for(lambda: logged(folder) >= min(aim, sizes.steps), launch, 0.002):
        return False
    if kill.kind == "save" and not wait_for(lambda: hidden(folder) - halves, launch, 0.0005):
        return False
    time.sleep(kill.delay * {"start": 0.0, "step": 2 * times["step"], "save": times["save"], "end": 1.0}[kill.kind])
    pids = launch.pids
    if not launch.running():
        return False
    kill.step = logged(folder)
    if kill.whom == "all" or not pids:
        launch.close()
    else:
        launch.signal(signal.SIGKILL, *{"rank 0": [0], "rank 1": [1], "both": []}[kill.whom])
    moment = time.monotonic()
    codes = launch.wait(OUTLIVE)
    kill.ended = round(time.monotonic() - moment, 2)
    assert any(codes), f"exit code 0 after a kill: {codes}"
    kill.saving = bool(hidden(folder) - halves)
    kill.lost = logged(folder) - newest(folder)
    return True


def newest(folder: Path) -> int:
    """The step of the newest complete checkpoint, as a new launch would find it; 0 = none."""
    from draftsmith.train import checkpoint

    path, _ = checkpoint.newest(folder / "checkpoints")
    return int(path.name.removeprefix("step-")) if path is not None else 0


def steady(line: dict[str, Any]) -> dict[str, Any]:
    """A line of the log without what was measured of the machine."""
    return {k: v for k, v in line.items() if k not in CLOCKS and not k.startswith(MEASURED)}


def end_of(folder: Path, steps: int) -> dict[str, str]:
    """Digests of everything that must be equal."""
    last = folder / f"checkpoints/step-{steps:08d}"
    files = [last / f"{name}.safetensors" for name in ("model", "optimiser", "rng")]
    files.append(folder / "export/model.safetensors")
    found = {f"{p.parent.name}/{p.name}": hashlib.sha256(p.read_bytes()).hexdigest() for p in files}
    state = json.loads((last / "state.json").read_text())["state"] | {"seconds": 0.0}
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    plain = [steady(line) for line in lines]
    for name, value in (("state", state), ("metrics", plain)):
        found[name] = hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()
    return found


def untouched(start: Any, engine: str, folder: Path, sizes: Sizes) -> dict[str, Any]:
    """A run from its beginning to its end: its digests, and how long things take."""
    shutil.rmtree(folder, ignore_errors=True)
    began, launch = time.monotonic(), start(SCRIPT, argv_of(folder, sizes), folder.with_suffix(""), engine)
    wait_for(lambda: logged(folder) >= 1, launch, 0.01)
    first = time.monotonic()
    wait_for(lambda: hidden(folder), launch, 0.0005)
    saving, at = time.monotonic(), logged(folder)
    wait_for(lambda: not hidden(folder), launch, 0.0005)
    save = time.monotonic() - saving
    codes = launch.wait(600)
    assert not any(codes), text_of(launch.stderr)[-3000:]
    times = {"start": first - began, "step": (saving - first) / max(at - 1, 1), "save": save}
    return {"end": end_of(folder, sizes.steps), "times": times}


def killed(start: Any, engine: str, folder: Path, sizes: Sizes, times: dict[str, float], kills: list[Kill]) -> Any:
    """One run with its kills: (those that came, digests of its end)."""
    shutil.rmtree(folder, ignore_errors=True)
    came = []
    for number, kill in enumerate(kills):
        launch = start(SCRIPT, argv_of(folder, sizes), folder.with_suffix(""), engine)
        try:
            if strike(kill, launch, folder, sizes, times, len(kills) - number):
                came.append(kill)
            else:
                break
        finally:
            launch.close()
    launch = start(SCRIPT, argv_of(folder, sizes), folder.with_suffix(""), engine)
    codes = launch.wait(600)
    assert not any(codes), text_of(launch.stderr)[-3000:]
    return came, end_of(folder, sizes.steps)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--work", type=Path, default=Path("runs/bench/kills"), help="where runs and tally are kept")
    parser.add_argument("--forked", action="store_true", help="no launchers: ranks forked from one process")
    parser.add_argument("--quick", action="store_true", help="two kills per engine, forked, nothing kept")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    sizes, forked = (QUICK, True) if args.quick else (FULL, args.forked)
    work = (args.work / ("quick" if args.quick else "forked" if forked else "launched")).resolve()
    if args.quick:
        shutil.rmtree(work, ignore_errors=True)
    work.mkdir(parents=True, exist_ok=True)
    tally_file = work / f"tally-{args.seed}.json"
    tally: dict[str, Any] = json.loads(text_of(tally_file) or "{}")
    for engine in ENGINES:
        mine = tally.setdefault(engine, {"runs": []})
        if "end" not in mine:
            mine |= untouched(Ranks if forked else Launched, engine, work / f"{engine}-untouched", sizes)
            print(f"{engine}, untouched: " + ", ".join(f"{k} {v:.2f} s" for k, v in mine["times"].items()), flush=True)
        while sum(len(run["kills"]) for run in mine["runs"]) < sizes.kills:
            number = len(mine["runs"])
            kills, folder = plan(args.seed, engine, number, sizes.per_run), work / f"{engine}-{number}"
            came, end = killed(Ranks if forked else Launched, engine, folder, sizes, mine["times"], kills)
            differ = sorted(name for name in end if end[name] != mine["end"][name])
            mine["runs"].append({"kills": [asdict(kill) for kill in came], "differ": differ})
            tally_file.write_text(json.dumps(tally, indent=1))
            for kill in came:
                print(f"{engine} run {number}: {kill}", flush=True)
            print(f"{engine} run {number}: {'equal' if not differ else f'DIFFERS in {differ}'}", flush=True)
    return report(tally, sizes)


def report(tally: dict[str, Any], sizes: Sizes) -> int:
    """The table, and the JSON line."""
    figures: dict[str, dict[str, float]] = {}
    print(
        f"\n{'':<8}{'kills':>7}{'starts':>8}{'steps':>7}{'saves':>7}{'ends':>6}{'half':>6}{'ended s':>9}{'lost':>6}{'equal':>9}"
    )
    for engine, mine in tally.items():
        kills = [kill for run in mine["runs"] for kill in run["kills"]]
        count = {kind: sum(kill["kind"] == kind for kill in kills) for kind in ("start", "step", "save", "end")}
        one = {"kills": len(kills), **count, "half_written": sum(kill["saving"] for kill in kills)}
        one |= {"ended": max(kill["ended"] for kill in kills), "lost": max(kill["lost"] for kill in kills)}
        one |= {"runs": len(mine["runs"]), "equal": sum(not run["differ"] for run in mine["runs"])}
        figures[engine] = one
        print(
            f"{engine:<8}{one['kills']:>7}{one['start']:>8}{one['step']:>7}{one['save']:>7}{one['end']:>6}"
            f"{one['half_written']:>6}{one['ended']:>9.1f}{one['lost']:>6}{one['equal']:>5} of {one['runs']}"
        )
    bars = [
        bar
        for engine, one in figures.items()
        for bar in (
            {"name": f"{engine} runs that end otherwise", "value": one["runs"] - one["equal"], "at_most": 0},
            {"name": f"{engine} seconds to the end of a launch", "value": one["ended"], "at_most": OUTLIVE},
            {"name": f"{engine} steps lost", "value": one["lost"], "at_most": sizes.save + 1},
        )
    ]
    bars = [bar | {"holds": bar["value"] <= bar["at_most"]} for bar in bars]
    print(json.dumps({"name": "kills", "figures": figures, "bars": bars}))
    return 0 if all(bar["holds"] for bar in bars) else 1


if __name__ == "__main__":
    sys.exit(main())
