"""Who is stuck, by signs of life alone. Real processes: tests/test_faults.py. Run: pytest tests/test_signs.py"""

from __future__ import annotations

from draftsmith.train.signs import Sign, Watch


class Clock:
    """Signs of two processes, told to the main one second after second."""

    def __init__(self, world: int = 2, limit: float = 60.0) -> None:
        self.watch, self.now = Watch(world, limit, 0.0), 0.0
        self.signs = [Sign(host=f"host{r}", watched=True, at="step 7") for r in range(world)]

    def run(self, seconds: int, silent: tuple[int, ...] = (), **moving: int) -> str | None:
        """`moving`: rank (r0, r1 ...) -> exchanges entered per second."""
        for _ in range(seconds):
            self.now += 1
            for rank, sign in enumerate(self.signs):
                sign.entered += moving.get(f"r{rank}", 0)
                if rank not in silent:
                    sign.beat += 1
                    self.watch.hear(rank, Sign(**vars(sign)), self.now)
            if line := self.watch.verdict(range(len(self.signs)), self.now):
                return line
        return None


def test_nobody_is_named_while_all_move() -> None:
    assert Clock().run(1000, r0=1, r1=1) is None


def test_a_stopped_process_is_named_with_its_host_and_place() -> None:
    clock = Clock()
    clock.run(10, r0=1, r1=1)
    line = clock.run(100, silent=(1,))
    assert line == "process 1 on host1, at step 7: no sign of life for 1 minutes (stall_minutes)"
    assert clock.now == 71  # and not before


def test_a_process_that_never_came_is_named() -> None:
    assert "process 1: no sign of life" in str(Clock().run(100, silent=(1,), r0=1))


def test_who_holds_the_others_up_is_named_and_not_who_waits() -> None:
    clock = Clock(3)
    clock.run(10, r0=1, r1=1, r2=1)
    clock.signs[0].entered += 1  # two have entered the next exchange, the last one computes for ever
    clock.signs[2].entered += 1
    line = clock.run(100)
    assert line == "process 1 on host1, at step 7: all others have waited for 1 minutes (stall_minutes)"


def test_an_exchange_that_never_ends_is_everybodys() -> None:
    assert "no process has moved on" in str(Clock().run(100))


def test_long_work_that_shows_signs_is_left_alone() -> None:
    """The probe of the main process, while the others wait for it; the capture, before the loop; a process that has ended."""
    clock = Clock()
    for _ in range(100):
        clock.signs[0].moved += 1
        assert clock.run(30) is None
    for sign in clock.signs:
        sign.watched = False
    assert clock.run(1000) is None
    clock.signs[1].done = True
    clock.run(1)
    assert clock.run(1000, silent=(1,)) is None


def test_others_watch_the_main_process() -> None:
    watch = Watch(2, 60.0, 0.0)
    watch.hear(0, Sign(beat=1, host="host0"), 5.0)
    assert watch.verdict((0,), 60.0) is None
    assert "process 0 on host0, at the start: no sign" in str(watch.verdict((0,), 70.0))
