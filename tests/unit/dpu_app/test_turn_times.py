"""Turns of a worker's loop are counted where they belong, and what is not the worker's own is told apart."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from pathlib import Path

import pytest

from dpu_app.turn_times import BOUNDS_NS, IDLE_NS, LONGEST_MAX, Cause, Schedule, TurnTimes

US = 1_000
MS = 1_000_000


class Loop:
    """A loop with a clock that only its work moves, and a schedule in a file."""

    def __init__(self, schedule: Path) -> None:
        self.now_ns = 5_000
        self.file = schedule
        self.on_processor_ns = self.ready_ns = 0
        self._write()
        self.times = TurnTimes(lambda: self.now_ns, Schedule(str(schedule)))

    def _write(self) -> None:
        self.file.write_text(f"{self.on_processor_ns} {self.ready_ns} 7\n")

    def turn(self, *parts: tuple[Cause, int], waited_ns: int = 0) -> None:
        """One turn of the given parts; of it the thread waited so long for a processor."""
        self.times.awake()
        total = sum(ns for _, ns in parts)
        self.on_processor_ns += total - waited_ns
        self.ready_ns += waited_ns
        self._write()
        for cause, ns in parts[:-1]:
            self.now_ns += ns
            self.times.mark(cause)
        cause, ns = parts[-1]
        self.now_ns += ns
        self.times.turn(cause)

    def sleep(self, ns: int) -> None:
        self.now_ns += ns


@pytest.fixture
def loop(tmp_path: Path) -> Iterator[Loop]:
    loop = Loop(tmp_path / "schedstat")
    yield loop
    loop.times.close()


def counted(counts: list[int]) -> dict[int, int]:
    """Upper bound in ns -> count, of the buckets that hold something; 0 for the last."""
    return {bound: count for bound, count in zip([*BOUNDS_NS, 0], counts) if count}


def test_every_turn_is_counted_and_time_between_turns_is_not(loop: Loop) -> None:
    for _ in range(3):
        loop.turn((Cause.RECEIVE, 30 * US), (Cause.OUTPUT, 10 * US))
        loop.sleep(70 * MS)
    loop.turn((Cause.TICK, 2_000 * MS))
    report = loop.times.report()
    assert counted(report["turns"]) == {50 * US: 3, 0: 1}
    assert report["total_ns"] == {
        "receive": 90 * US,
        "flash": 0,
        "tick": 2_000 * MS,
        "output": 30 * US,
        "control": 0,
        "gc": 0,
    }


def test_parts_of_long_turns_are_counted_by_cause(loop: Loop) -> None:
    loop.turn((Cause.RECEIVE, 40 * US))
    loop.turn((Cause.RECEIVE, 40 * US), (Cause.FLASH, 3 * MS), (Cause.OUTPUT, 150 * US))
    report = loop.times.report()
    assert counted(report["parts"]["receive"]) == {50 * US: 1}
    assert counted(report["parts"]["flash"]) == {5 * MS: 1}
    assert counted(report["parts"]["output"]) == {200 * US: 1}
    assert counted(report["parts"]["tick"]) == {}


def test_waiting_for_a_processor_is_not_the_turns_own(loop: Loop) -> None:
    loop.turn((Cause.RECEIVE, 15 * MS), waited_ns=12 * MS)
    loop.turn((Cause.RECEIVE, 15 * MS))
    report = loop.times.report()
    assert counted(report["turns"]) == {20 * MS: 2}
    assert counted(report["own"]) == {5 * MS: 1, 20 * MS: 1}
    assert sorted(pause["waited_ns"] for pause in report["longest"]) == [0, 12 * MS]


def test_waiting_before_a_turn_does_not_excuse_it(loop: Loop) -> None:
    """The kernel's figure has grown since it was last read, while the turn itself ran all the time."""
    loop.ready_ns += 500 * MS
    loop.turn((Cause.TICK, 11 * MS))
    assert counted(loop.times.report()["own"]) == {20 * MS: 1}


def test_a_turn_that_blocks_is_its_own_fault(loop: Loop) -> None:
    """Neither on a processor nor ready: in a system call, or waiting for a lock."""
    loop.on_processor_ns -= 14 * MS
    loop.turn((Cause.OUTPUT, 14 * MS))
    assert counted(loop.times.report()["own"]) == {20 * MS: 1}


def test_where_the_kernel_keeps_no_schedule_all_is_the_turns_own(tmp_path: Path) -> None:
    schedule = Schedule(str(tmp_path / "none"))
    assert not schedule.known
    now = [0]
    times = TurnTimes(lambda: now[0], schedule)
    now[0] += 3 * MS
    times.turn(Cause.TICK)
    assert counted(times.report()["own"]) == {5 * MS: 1}
    times.close()


def test_the_longest_turns_are_kept_with_their_parts(loop: Loop) -> None:
    for ms in range(1, 3 * LONGEST_MAX):
        loop.turn((Cause.FLASH, ms * MS), (Cause.TICK, 1 * US))
    loop.sleep(10 * MS)
    longest = loop.times.report()["longest"]
    assert [pause["duration_ns"] // MS for pause in longest] == list(range(47, 31, -1))
    assert longest[0]["parts_ns"] == {"flash": 47 * MS, "tick": 1 * US}
    assert longest[0]["ago_ns"] == 10 * MS


def test_garbage_collection_has_a_part_of_its_own(loop: Loop) -> None:
    def slow(phase: str, info: object) -> None:
        del info
        if phase == "stop":
            loop.now_ns += 4 * MS

    gc.callbacks.append(slow)  # called before the one of `times`
    try:
        with loop.times:
            loop.times.turn(Cause.TICK)
            loop.now_ns += 300 * US
            gc.collect()
            loop.times.turn(Cause.RECEIVE)
        gc.collect()  # not heard any more
    finally:
        gc.callbacks.remove(slow)
    total = loop.times.report()["total_ns"]
    assert (total["gc"], total["receive"]) == (4 * MS, 300 * US)


def test_this_threads_schedule_is_read() -> None:
    schedule = Schedule()
    if not schedule.known:
        pytest.skip("this kernel keeps no /proc/thread-self/schedstat")
    before, _ = schedule.read()
    sum(range(200_000))
    after, ready = schedule.read()
    assert after > before > 0
    assert ready >= 0
    schedule.close()


def test_a_look_that_found_nothing_is_no_turn(loop: Loop) -> None:
    for _ in range(100):
        loop.turn((Cause.RECEIVE, IDLE_NS - 1))
    loop.turn((Cause.RECEIVE, IDLE_NS))
    assert counted(loop.times.report()["turns"]) == {IDLE_NS: 1}


def test_turns_follow_one_another_without_sleep(loop: Loop) -> None:
    loop.times.awake()
    for us in (30, 300):
        loop.now_ns += us * US
        loop.times.turn(Cause.FLASH)
    report = loop.times.report()
    assert counted(report["turns"]) == {50 * US: 1, 500 * US: 1}
    assert report["total_ns"]["flash"] == 330 * US
