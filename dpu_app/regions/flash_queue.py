"""The region's queue in front of its flash device: priorities, tags, and whole-or-failed results.

Demand reads go first, but for an eighth of the device's depth while writes wait; then slot-table writes, then data
writes (at most half of the depth while reads wait), then prefetch reads and discards. A short count is carried on from
where it stopped; only a transfer that moved every byte succeeds. A completion whose tag is unknown or already answered
is counted and ignored. The engine moves what `pump` returns to the device and the device's completions to `complete`.
"""

from __future__ import annotations

import errno
from collections import OrderedDict, deque
from collections.abc import Callable, Sequence
from enum import IntEnum

from doca_shims.api import FlashCaps, FlashCompletion, FlashOp, FlashRequest


class Priority(IntEnum):
    """Lower is sooner."""

    DEMAND = 0
    TABLE = 1
    DATA = 2
    PREFETCH = 3
    DISCARD = 4


TOLD_MAX = 64
"""Completions handled in one turn, each in 15 to 20 us; and requests handed to the device, each in some 10 us."""
TOLD_READ_MAX = 8 << 20
"""Bytes read whose completions are handled in one turn: checksums are computed then, 8 MiB in a millisecond."""
_PRIORITIES = tuple(Priority)  # iterating the enumeration itself costs two microseconds

Done = Callable[[int], None]
"""Called with 0, or a negative errno."""


def _told(error: int) -> None:
    """In the place of a job's `done` once it is told, or never will be. Whoever waits for a job often refers to it, and
    a cycle of both would be left to the garbage collector."""


class FlashJob:
    """One transfer of the region, of any length; `length_bytes` and the places are aligned."""

    __slots__ = ("address", "done", "error", "in_flight", "length_bytes", "moved", "offset_bytes", "op", "priority")

    def __init__(
        self, op: FlashOp, priority: Priority, offset_bytes: int, address: int, length_bytes: int, done: Done
    ) -> None:
        self.op = op
        self.priority = priority
        self.offset_bytes = offset_bytes
        self.address = address
        self.length_bytes = length_bytes
        self.done = done
        self.moved = 0  # bytes of the pieces that are through
        self.in_flight = 0  # pieces at the device
        self.error = 0


class FlashQueue:
    def __init__(self, caps: FlashCaps) -> None:
        self._caps = caps
        self._depth = caps.queue_depth_max
        self._waiting: list[OrderedDict[FlashJob, None]] = [OrderedDict() for _ in Priority]
        """First come, first served; any one can be taken out at once."""
        self._pieces: dict[int, tuple[FlashJob, int, int]] = {}  # tag -> job, start, length
        self._writes_in_flight = 0
        self._reads_in_flight = 0
        self._tag = 0
        self._resubmit: list[tuple[FlashJob, int, int]] = []
        self._completions: deque[FlashCompletion] = deque()
        self.stale_completions = 0

    @property
    def idle(self) -> bool:
        return not self._pieces and not self._resubmit and not any(self._waiting)

    @property
    def behind(self) -> bool:
        """Completions wait for another call of `complete`."""
        return bool(self._completions)

    def add(self, job: FlashJob) -> None:
        self._waiting[job.priority][job] = None

    def promote(self, job: FlashJob) -> None:
        """A prefetch that a demand now waits for goes ahead, if it has not started."""
        queue = self._waiting[Priority.PREFETCH]
        if job in queue:
            del queue[job]
            job.priority = Priority.DEMAND
            self._waiting[Priority.DEMAND][job] = None

    def withdraw(self, job: FlashJob) -> bool:
        """Take back a job that has not started; False when it has."""
        queue = self._waiting[job.priority]
        if job in queue:
            del queue[job]
            job.done = _told
            return True
        return False

    def pump(self) -> list[FlashRequest]:
        """What to submit now: never more in flight than the device takes, and at most TOLD_MAX, whose completions make
        for another call."""
        requests: list[FlashRequest] = []
        while self._resubmit and len(self._pieces) < self._depth and len(requests) < TOLD_MAX:
            requests.append(self._issue(*self._resubmit.pop()))
        for priority in _PRIORITIES:
            queue = self._waiting[priority]
            while queue and len(self._pieces) < self._depth and len(requests) < TOLD_MAX:
                job = next(iter(queue))
                if (
                    job.op is FlashOp.WRITE
                    and priority is Priority.DATA
                    and self._writes_in_flight >= self._write_share()
                ):
                    break
                if priority is Priority.DEMAND and self._reads_in_flight >= self._read_share():
                    break
                del queue[job]
                self._start(job, requests)
        return requests

    def _write_share(self) -> int:
        return max(1, self._depth // 2) if self._waiting[Priority.DEMAND] or self._reads_in_flight else self._depth

    def _read_share(self) -> int:
        writes_wait = self._waiting[Priority.TABLE] or self._waiting[Priority.DATA]
        return max(1, self._depth - max(1, self._depth // 8)) if writes_wait else self._depth

    def _start(self, job: FlashJob, requests: list[FlashRequest]) -> None:
        limit = self._caps.max_io_bytes
        start = 0
        while start < job.length_bytes:
            length = min(limit, job.length_bytes - start)
            piece = (job, start, length)
            job.in_flight += 1
            if len(self._pieces) < self._depth:
                requests.append(self._issue(*piece))
            else:
                self._resubmit.append(piece)
            start += length

    def _issue(self, job: FlashJob, start: int, length: int) -> FlashRequest:
        self._tag += 1
        self._pieces[self._tag] = (job, start, length)
        if job.op is FlashOp.WRITE:
            self._writes_in_flight += 1
        elif job.op is FlashOp.READ:
            self._reads_in_flight += 1
        address = 0 if job.op is FlashOp.DISCARD else job.address + start
        return FlashRequest(self._tag, job.op, job.offset_bytes + start, address, length)

    def complete(self, completions: Sequence[FlashCompletion]) -> None:
        """Tell those who wait: TOLD_MAX of them, and of TOLD_READ_MAX bytes read, at most. With more it is `behind`,
        and the next call goes on."""
        self._completions.extend(completions)
        read = told = 0
        while self._completions and read < TOLD_READ_MAX and told < TOLD_MAX:
            told += 1
            tag, result = self._completions.popleft()
            piece = self._pieces.pop(tag, None)
            if piece is None:
                self.stale_completions += 1
                continue
            job, start, length = piece
            if job.op is FlashOp.WRITE:
                self._writes_in_flight -= 1
            elif job.op is FlashOp.READ:
                self._reads_in_flight -= 1
                read += length
            elif result >= 0:  # a discard moves nothing
                result = length
            self._finish_piece(job, start, length, result)

    def _finish_piece(self, job: FlashJob, start: int, length: int, result: int) -> None:
        block = self._caps.block_bytes
        if result < 0:
            job.error = job.error or result
        elif result > length:
            job.error = job.error or -errno.EIO
        elif result < length:
            moved = result - result % block
            if moved == 0 or job.error:
                job.error = job.error or -errno.EIO
            else:
                job.moved += moved
                self._resubmit.append((job, start + moved, length - moved))
                return
        else:
            job.moved += length
        job.in_flight -= 1
        if job.in_flight == 0:
            if not job.error and job.moved != job.length_bytes:
                job.error = -errno.EIO
            done, job.done = job.done, _told
            done(job.error)
