"""When a thread that waits for an answer looks for it again and again, before it sleeps until it is woken.

To be woken takes 20 us and more, and whoever was asleep finds cold caches; a short answer is there sooner. But looking
takes a core that others may need, so it is bounded, and given up for a while where it did not pay lately. Decides only:
`host_agent.progress` looks. Used by the one thread that leads.
"""

from __future__ import annotations

import os
from typing import Final

from host_agent.operation import Operation

PAUSE_MAX: Final = 63
"""Waits of one kind that go straight to sleep, at most, before looking is tried again."""
_SCORE_MAX: Final = 4


class BusyPolling:
    """`limit_s`: how long one wait looks at most; 0 switches it off. `cores` that this process may use (None: as the
    system says): it does not look while as many regions are to answer, for they might all have to run on these."""

    def __init__(self, limit_s: float, cores: int | None = None) -> None:
        self.limit_ns = int(limit_s * 1e9)
        self._cores = len(os.sched_getaffinity(0)) if cores is None else cores
        self._kinds: dict[int, _Kind] = {}

    def due(self, operation: Operation, regions: int) -> _Kind | None:
        """What to tell how looking went, None where this wait, for so many regions, is to sleep at once. Call it once
        a wait."""
        if not self.limit_ns or regions >= self._cores:
            return None
        # Operations of one kind and about one size take about as long.
        key = operation.op << 32 | operation.count.bit_length()
        kind = self._kinds.get(key)
        if kind is None:
            kind = self._kinds[key] = _Kind()
        elif kind.left:
            kind.left -= 1
            return None
        return kind


class _Kind:
    """`left`: waits yet that do not look. A look in vain costs about twice what one that finds something saves."""

    __slots__ = ("_pause", "_score", "left")

    def __init__(self) -> None:
        self.left = 0
        self._pause = 0
        self._score = _SCORE_MAX

    def told(self, found: bool) -> None:
        if found:
            self._score = min(self._score + 1, _SCORE_MAX)
            self._pause >>= 1
        else:
            self._score = max(self._score - 2, -_SCORE_MAX)
            if self._score < 0:
                self._pause = min(2 * self._pause + 1, PAUSE_MAX)
        self.left = self._pause
