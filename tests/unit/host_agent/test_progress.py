"""Waiting: when the leader looks for answers before it sleeps, and that deadlines hold meanwhile."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

import pytest

from common.status import Status
from common.wire import Op
from host_agent.busy_poll import PAUSE_MAX, BusyPolling
from host_agent.operation import Operation, Request
from host_agent.progress import Progress

STEP_NS = 1000
LIMIT_S = 100e-6


class SteppingClock:
    """Time passes by being asked for."""

    def __init__(self) -> None:
        self.now_ns = 1

    def monotonic_ns(self) -> int:
        self.now_ns += STEP_NS
        return self.now_ns

    def wall_ns(self) -> int:
        return self.monotonic_ns()


class Link:
    """Answers its request when it is driven for the `answers_at`th time."""

    def __init__(self, answers_at: int) -> None:
        self.answers_at = answers_at
        self.driven = 0
        self.request: Request | None = None

    def drive(self, arm: bool = True) -> bool:
        self.driven += 1
        if self.request is None or self.driven != self.answers_at:
            return False
        self.request.operation.settle_as(self.request, Status.OK)
        return True

    def expire(self, operation: Operation) -> None:
        if self.request is not None:
            operation.settle_as(self.request, Status.DEADLINE)


class Waiting:
    """A `Progress` with a link that nobody wakes it for: what it sleeps for is over when the time is."""

    def __init__(self, limit_s: float = LIMIT_S, cores: int = 2) -> None:
        self.clock = SteppingClock()
        self.busy = BusyPolling(limit_s, cores)
        self.progress = Progress(self.clock, self.busy)
        self.slept = 0
        progress: Any = self.progress
        progress._sleep = self._sleep

    def _sleep(self, timeout_s: float) -> None:
        self.slept += 1
        self.clock.now_ns += int(timeout_s * 1e9)

    def wait(self, answers_at: int, timeout_s: float = 1.0) -> tuple[Status, Link]:
        link: Any = Link(answers_at)
        operation = Operation(Op.LOOKUP, bytearray(8), self.clock.now_ns + int(timeout_s * 1e9))
        link.request = Request(operation, bytes(24), 1, 0)
        link.request.link = link
        operation.pending.add(link.request)
        self.progress.wait(operation)
        return Status(int(operation.answers["status"][0])), link


@pytest.fixture
def waiting() -> Iterator[Waiting]:
    made = Waiting()
    yield made
    made.progress.close()


def test_an_answer_that_comes_soon_is_found_without_sleeping(waiting: Waiting) -> None:
    assert waiting.wait(answers_at=20)[0] is Status.OK
    assert waiting.slept == 0


def test_looking_is_bounded_and_the_deadline_holds_after_it(waiting: Waiting) -> None:
    status, link = waiting.wait(answers_at=1_000_000)
    assert status is Status.DEADLINE
    assert waiting.slept == 1
    assert link.driven <= LIMIT_S * 1e9 / STEP_NS + 1


def test_the_deadline_holds_while_looking(waiting: Waiting) -> None:
    status, link = waiting.wait(answers_at=1_000_000, timeout_s=LIMIT_S / 10)
    assert status is Status.DEADLINE
    assert link.driven <= LIMIT_S / 10 * 1e9 / STEP_NS + 1


def test_where_looking_does_not_pay_it_stops_but_is_tried_again(waiting: Waiting) -> None:
    looked = [waiting.wait(answers_at=1_000_000)[1].driven > 0 for _ in range(4 * PAUSE_MAX)]
    assert looked[0]
    assert 2 < sum(looked) < 20
    assert any(looked[-PAUSE_MAX - 1 :])


def test_once_it_pays_again_every_wait_looks(waiting: Waiting) -> None:
    for _ in range(100):
        waiting.wait(answers_at=1_000_000)
    while not waiting.wait(answers_at=3)[1].driven:
        pass
    for _ in range(2 * PAUSE_MAX):
        waiting.wait(answers_at=3)
    waiting.slept = 0
    assert all(waiting.wait(answers_at=3)[0] is Status.OK for _ in range(10))
    assert waiting.slept == 0


@pytest.mark.parametrize(("pays", "least", "most"), [(0.5, 0.01, 0.1), (0.9, 0.95, 1.0)])
def test_looking_goes_on_where_it_mostly_pays_and_not_where_it_pays_half_the_time(
    waiting: Waiting, pays: float, least: float, most: float
) -> None:
    rng = random.Random(1)
    operation = Operation(Op.LOOKUP, bytearray(8), 0)
    looked = 0
    for _ in range(10_000):
        kind = waiting.busy.due(operation, 1)
        if kind is not None:
            looked += 1
            kind.told(rng.random() < pays)
    assert least <= looked / 10_000 <= most


@pytest.mark.parametrize(("limit_s", "cores"), [(0.0, 2), (LIMIT_S, 1)])
def test_off_or_alone_on_one_core_nobody_looks(limit_s: float, cores: int) -> None:
    waiting = Waiting(limit_s, cores)
    try:
        status, link = waiting.wait(answers_at=1)
        assert (status, link.driven, waiting.slept) == (Status.DEADLINE, 0, 1)
    finally:
        waiting.progress.close()


@pytest.mark.parametrize("others_wait", [False, True])
def test_what_arrived_is_looked_into_unless_others_wait(waiting: Waiting, others_wait: bool) -> None:
    """A leader must not keep other callers waiting for its own checksums."""
    left = 3

    def check() -> bool:
        nonlocal left
        left -= 1
        return left >= 0

    operation = Operation(Op.RETRIEVE, bytearray(16), waiting.clock.now_ns + 10**9)
    operation.check = check
    link: Any = Link(answers_at=1_000_000)
    link.request = Request(operation, bytes(64), 1, 0)
    link.request.link = link
    operation.pending.add(link.request)
    waiting.progress._followers = int(others_wait)
    waiting.progress.wait(operation)
    assert left == (3 if others_wait else -1)


def test_kinds_of_operations_are_told_apart(waiting: Waiting) -> None:
    slow = Operation(Op.RETRIEVE, bytearray(512 * 16), 0)
    quick = Operation(Op.LOOKUP, bytearray(8), 0)
    kind = waiting.busy.due(slow, 1)
    assert kind is not None
    for _ in range(3):
        kind.told(False)
    assert waiting.busy.due(slow, 1) is None
    assert waiting.busy.due(quick, 1) is not None


@pytest.mark.parametrize(("regions", "cores", "looks"), [(1, 1, False), (1, 2, True), (2, 2, False), (4, 8, True)])
def test_nobody_looks_who_takes_a_core_from_those_that_are_to_answer(regions: int, cores: int, looks: bool) -> None:
    operation = Operation(Op.LOOKUP, bytearray(8), 0)
    assert (BusyPolling(LIMIT_S, cores).due(operation, regions) is not None) is looks
