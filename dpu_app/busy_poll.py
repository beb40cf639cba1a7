"""Whether a worker that has just served goes on looking before it sleeps: for a short time, and only where that pays.

Falling asleep and being woken costs more than a short request itself, so an agent's next one is waited for with open
eyes. But a look takes a core from whoever could use it: after several waits in vain the worker sleeps at once, and
tries again now and then. Used by the region server's loop.
"""

from __future__ import annotations

import os

_VAIN_MAX = 4
"""Waits in vain, one after the other, before the next occasions are passed by."""
_PASSED_MAX = 256
"""Occasions that are passed by at most before it is tried again."""


def limit_of(busy_poll_ns: int) -> int:
    """0 where there is one core only: whoever is waited for could not run meanwhile."""
    return busy_poll_ns if len(os.sched_getaffinity(0)) > 1 else 0


class BusyPoll:
    def __init__(self, limit_ns: int) -> None:
        """Look for at most `limit_ns` after each request; 0: never."""
        self._limit_ns = limit_ns
        self._until_ns = 0
        self._vain = 0
        self._pass_by = 0

    def served(self, now_ns: int) -> None:
        """A request came, in a wait or not; another may follow at once."""
        if not self._limit_ns:
            return
        if self._until_ns:
            self._vain = 0
        elif self._pass_by:
            self._pass_by -= 1
            return
        self._until_ns = now_ns + self._limit_ns

    def goes_on(self, now_ns: int) -> bool:
        """Look again rather than sleep."""
        if not self._until_ns:
            return False
        if now_ns < self._until_ns:
            return True
        self._until_ns = 0
        self._vain += 1
        if self._vain >= _VAIN_MAX:
            self._pass_by = min(1 << (self._vain - _VAIN_MAX), _PASSED_MAX)
        return False
