"""How long a region worker's loop was away from its sockets, turn by turn, and what kept it there.

In one turn the loop looks at its sockets once and handles what it found: for so long nobody else is served. Always on:
a turn costs a clock reading for each part of it and one counter. A turn of a millisecond or more is looked at closely:
how much of it the process waited for a processor, which no change of this program would mend. Made and told by the
region server's loop; `entresol-dpu pauses` shows it.
"""

from __future__ import annotations

import gc
import heapq
import os
from bisect import bisect_left
from collections.abc import Callable
from enum import IntEnum
from types import TracebackType
from typing import Any

BOUNDS_NS = tuple(digit * 10**power for power in range(3, 10) for digit in (1, 2, 5))[:-2]
"""Upper bounds of the histogram's buckets: 1, 2, 5 microseconds ... to 1 s; one more bucket is above them all."""
IDLE_NS = 5_000
"""Shorter turns are not counted: such a one has looked and found nothing."""
SPLIT_NS = 100_000
"""Shorter turns are counted whole; of the others also each part."""
LOOK_NS = 1_000_000
LONGEST_MAX = 16


class Cause(IntEnum):
    """The parts of a turn."""

    RECEIVE = 0
    """Capsules and completions of connections, and the engine's work for them."""
    FLASH = 1
    """Completions of flash, and the engine's work for them."""
    TICK = 2
    """Deadlines, leases, housekeeping."""
    OUTPUT = 3
    """Posting transfers and answers, submitting to flash."""
    CONTROL = 4
    """The supervisor's messages; connections that come."""
    GC = 5
    """Python's cyclic garbage collection, wherever in the turn it ran."""


_CAUSES = tuple(Cause)
_NOTHING = [0] * len(_CAUSES)


class Schedule:
    """What the kernel says of this thread: time on a processor, and time it was ready but had none, in ns."""

    def __init__(self, path: str = "/proc/thread-self/schedstat") -> None:
        """To be made in the thread that is asked about. Where the kernel keeps no such file, both are 0 for ever."""
        self._fd = -1
        try:
            self._fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        except OSError:
            return

    @property
    def known(self) -> bool:
        return self._fd >= 0

    def read(self) -> tuple[int, int]:
        if self._fd < 0:
            return 0, 0
        on_processor, ready = os.pread(self._fd, 64, 0).split()[:2]
        return int(on_processor), int(ready)

    def close(self) -> None:
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1


class TurnTimes:
    """`turn` after turn, each part of one marked when it ends, but for the last. A context manager, which hears of
    garbage collections while it is entered."""

    def __init__(self, clock_ns: Callable[[], int], schedule: Schedule) -> None:
        """`clock_ns` is monotonic. Takes over `schedule`."""
        self._clock_ns = clock_ns
        self._schedule = schedule
        buckets = len(BOUNDS_NS) + 1
        self._turns = [0] * buckets
        self._own = [0] * buckets
        self._parts = [[0] * buckets for _ in _CAUSES]
        self._spent = _NOTHING.copy()
        self._total = _NOTHING.copy()
        self._longest: list[tuple[int, int, int, list[int]]] = []
        """A heap of (duration less the wait for a processor, when it ended, that wait, by cause)."""
        self._began = self._marked = clock_ns()
        self._gc_began = 0
        self._gc_ns = 0
        self._busy_ns = 0
        """Length of the turns since the schedule was read."""
        self._seen = schedule.read()

    def __enter__(self) -> TurnTimes:
        gc.callbacks.append(self._collecting)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        gc.callbacks.remove(self._collecting)

    def close(self) -> None:
        self._schedule.close()

    # ---------------------------------------------------------------- the loop

    def turn(self, rest: Cause) -> int:
        """A turn ends, whose last part was `rest`, and the next begins; the time."""
        now = self._clock_ns()
        duration = now - self._began
        if duration >= IDLE_NS:
            self._count(duration, now, rest)
        self._began = self._marked = now
        return now

    def awake(self) -> None:
        """The turn begins only now: the loop may have slept."""
        self._began = self._marked = self._clock_ns()

    def mark(self, cause: Cause) -> None:
        """What was done since the last mark was `cause`."""
        self._spend(self._clock_ns(), cause)

    def _spend(self, now: int, cause: Cause) -> None:
        spent = now - self._marked
        self._marked = now
        if self._gc_ns:
            collected = min(self._gc_ns, spent)
            self._gc_ns = 0
            self._spent[Cause.GC] += collected
            spent -= collected
        self._spent[cause] += spent

    def _count(self, duration: int, now: int, rest: Cause) -> None:
        self._spend(now, rest)
        self._busy_ns += duration
        if duration < SPLIT_NS:
            bucket = bisect_left(BOUNDS_NS, duration)
            self._turns[bucket] += 1
            self._own[bucket] += 1
        else:
            self._long(duration, now)
        spent, total = self._spent, self._total
        for number in _CAUSES:
            if spent[number]:
                total[number] += spent[number]
                spent[number] = 0
        if self._busy_ns >= LOOK_NS:
            self._look()

    def _long(self, duration: int, now: int) -> None:
        self._turns[bisect_left(BOUNDS_NS, duration)] += 1
        for number in _CAUSES:
            if self._spent[number]:
                self._parts[number][bisect_left(BOUNDS_NS, self._spent[number])] += 1
        waited = self._waited(duration) if duration >= LOOK_NS else 0
        self._own[bisect_left(BOUNDS_NS, duration - waited)] += 1
        if duration >= LOOK_NS:
            item = (duration - waited, now, waited, self._spent.copy())
            if len(self._longest) < LONGEST_MAX:
                heapq.heappush(self._longest, item)
            else:
                heapq.heappushpop(self._longest, item)

    def _waited(self, duration: int) -> int:
        """How long, at most, of the turn the thread was ready and had no processor.

        The schedule was last read up to LOOK_NS of other turns ago. What it says of waiting since may belong to those,
        and to the sleep between them; so may its time on a processor: the lesser of both bounds holds.
        """
        if not self._schedule.known:
            return 0
        (ran_before, ready_before), earlier_ns = self._seen, self._busy_ns - duration
        ran, ready = self._look()
        ran_ns = max(0, ran - ran_before - earlier_ns)
        return max(0, min(ready - ready_before, duration - ran_ns))

    def _look(self) -> tuple[int, int]:
        self._seen = self._schedule.read()
        self._busy_ns = 0
        return self._seen

    def _collecting(self, phase: str, info: dict[str, Any]) -> None:
        del info
        if phase == "start":
            self._gc_began = self._clock_ns()
        else:
            self._gc_ns += self._clock_ns() - self._gc_began

    # ---------------------------------------------------------------- told

    def report(self) -> dict[str, Any]:
        """Plain values: `bounds_ns`; counts by bucket of `turns`, of `own` (turns less the wait for a processor), and
        of `parts` by cause, of turns of SPLIT_NS and more; `total_ns` by cause; the turns that were `longest` by the
        worker's own doing, the longest first, with how long ago each ended."""
        now = self._clock_ns()
        longest = [
            {
                "duration_ns": own + waited,
                "waited_ns": waited,
                "ago_ns": now - ended,
                "parts_ns": {cause.name.lower(): spent[cause] for cause in _CAUSES if spent[cause]},
            }
            for own, ended, waited, spent in sorted(self._longest, reverse=True)
        ]
        return {
            "bounds_ns": list(BOUNDS_NS),
            "turns": list(self._turns),
            "own": list(self._own),
            "parts": {cause.name.lower(): list(self._parts[cause]) for cause in _CAUSES},
            "total_ns": {cause.name.lower(): self._total[cause] for cause in _CAUSES},
            "longest": longest,
        }
