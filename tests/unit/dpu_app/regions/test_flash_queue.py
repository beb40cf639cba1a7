"""The queue in front of flash: who goes first, and that nobody waits for ever."""

from __future__ import annotations

from collections import Counter

import pytest

from doca_shims.api import FlashCaps, FlashCompletion, FlashOp, FlashRequest
from dpu_app.regions import flash_queue
from dpu_app.regions.flash_queue import FlashJob, FlashQueue, Priority

BLOCK = 4096


class Device:
    """A flash queue whose device completes the oldest request, one at a time."""

    def __init__(self, depth: int, max_io_bytes: int = 1 << 20) -> None:
        self.queue = FlashQueue(FlashCaps(1 << 30, 512, max_io_bytes, depth, True, "test"))
        self.at_device: list[FlashRequest] = []
        self.done: Counter[Priority] = Counter()

    def add(self, op: FlashOp, priority: Priority, length_bytes: int = BLOCK) -> None:
        def done(error: int) -> None:
            assert error == 0
            self.done[priority] += 1

        self.queue.add(FlashJob(op, priority, 0, 0, length_bytes, done))

    def step(self) -> None:
        self.at_device += self.queue.pump()
        request = self.at_device.pop(0)
        self.queue.complete([FlashCompletion(request.tag, request.length_bytes)])


@pytest.mark.parametrize("depth", [2, 8, 64])
@pytest.mark.parametrize("waiting", [Priority.TABLE, Priority.DATA])
def test_reads_without_end_do_not_keep_writes_waiting(depth: int, waiting: Priority) -> None:
    """A delete, a store until flash and a drain wait for them; their deadlines are not the reads' to spend."""
    device = Device(depth)
    for _ in range(2 * depth):
        device.add(FlashOp.READ, Priority.DEMAND)
    device.add(FlashOp.WRITE, waiting)
    for _ in range(3 * depth):
        device.add(FlashOp.READ, Priority.DEMAND)
        device.step()
    assert device.done[waiting] == 1
    assert device.done[Priority.DEMAND] >= 2 * depth


def test_reads_have_the_whole_device_when_nothing_else_waits() -> None:
    device = Device(8)
    for _ in range(20):
        device.add(FlashOp.READ, Priority.DEMAND)
    assert len(device.queue.pump()) == 8


@pytest.mark.parametrize("depth", [1, 2, 8])
def test_all_kinds_end_at_every_depth(depth: int) -> None:
    device = Device(depth, max_io_bytes=BLOCK)
    kinds = ((FlashOp.READ, Priority.DEMAND), (FlashOp.WRITE, Priority.TABLE), (FlashOp.WRITE, Priority.DATA))
    for _ in range(10):
        for op, priority in (*kinds, (FlashOp.READ, Priority.PREFETCH), (FlashOp.DISCARD, Priority.DISCARD)):
            device.add(op, priority, 3 * BLOCK)
    while not device.queue.idle:
        device.step()
    assert set(device.done.values()) == {10}


class ComparedJob(FlashJob):
    """Counts how often it is compared with another: a search through a queue does it for each that it passes."""

    compared = 0

    def __eq__(self, other: object) -> bool:
        ComparedJob.compared += 1
        return self is other

    __hash__ = object.__hash__


def test_a_job_is_taken_out_without_looking_at_others() -> None:
    queue = FlashQueue(FlashCaps(1 << 30, 512, 1 << 20, 4, True, "test"))
    told: list[int] = []
    jobs = [ComparedJob(FlashOp.READ, Priority.PREFETCH, 0, 0, BLOCK, told.append) for _ in range(1000)]
    for job in jobs:
        queue.add(job)
    ComparedJob.compared = 0
    assert all(queue.withdraw(job) for job in jobs[500:])
    assert not queue.withdraw(jobs[500])
    for job in jobs[400:500]:
        queue.promote(job)
    assert ComparedJob.compared < 100
    requests = queue.pump()
    assert queue.withdraw(jobs[400]) is False  # it has started: the promoted go first
    queue.complete([FlashCompletion(request.tag, BLOCK) for request in requests])
    assert told == [0] * 4


def test_completions_of_many_bytes_are_told_a_part_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(flash_queue, "TOLD_READ_MAX", 3 * BLOCK)
    queue = FlashQueue(FlashCaps(1 << 30, 512, 1 << 20, 64, True, "test"))
    told: list[int] = []
    for number in range(10):
        queue.add(FlashJob(FlashOp.READ, Priority.DEMAND, 0, 0, BLOCK, lambda _, number=number: told.append(number)))  # type: ignore[misc]
    requests = queue.pump()
    parts = []
    queue.complete([FlashCompletion(request.tag, BLOCK) for request in requests])
    parts.append(len(told))
    while queue.behind:
        assert not queue.idle
        queue.complete([])
        parts.append(len(told))
    assert parts == [3, 6, 9, 10]
    assert told == list(range(10))
    assert queue.idle


def test_many_small_requests_and_completions_are_handled_a_part_at_a_time() -> None:
    queue = FlashQueue(FlashCaps(1 << 30, 512, 1 << 20, 256, True, "test"))
    told: list[int] = []
    for _ in range(200):
        queue.add(FlashJob(FlashOp.WRITE, Priority.DATA, 0, 0, BLOCK, told.append))
    at_device = []
    for _ in range(4):
        requests = queue.pump()
        assert len(requests) <= flash_queue.TOLD_MAX
        at_device += requests
    assert len(at_device) == 200
    queue.complete([FlashCompletion(request.tag, BLOCK) for request in at_device])
    parts = [len(told)]
    while queue.behind:
        queue.complete([])
        parts.append(len(told))
    assert parts == [64, 128, 192, 200]
