"""Whether a worker that has just served goes on looking before it sleeps: for a short time, and only where that pays.

Falling asleep and being woken costs more than a short request itself, so an agent's next one is waited for with open
eyes. But a look takes a core from whoever could use it: where waits are often in vain the worker sleeps at once, and
tries again now and then. Used by the region server's loop.
"""

from __future__ import annotations

import os

_CREDIT_MAX = 8
"""A wait that paid earns one, one in vain costs two: it is given up where fewer than two in three pay."""
_PASSED_MIN = 4
_PASSED_MAX = 256
"""Requests that are passed by, at first and at most, before it is tried again."""


def limit_of(busy_poll_ns: int) -> int:
    """0 where there is one core only: whoever is waited for could not run meanwhile."""
    return busy_poll_ns if len(os.sched_getaffinity(0)) > 1 else 0


class BusyPoll:
    def __init__(self, limit_ns: int) -> None:
        """Look for at most `limit_ns` after each request; 0: never."""
        self._limit_ns = limit_ns
        self._begins = False
        self._until_ns = 0
        self._credit = _CREDIT_MAX // 2
        self._passed = _PASSED_MIN
        self._pass_by = 0

    def served(self) -> None:
        """A request came, in a wait or not; another may follow it at once."""
        if not self._limit_ns:
            return
        if self._begins or self._until_ns:
            self._credit = min(self._credit + 1, _CREDIT_MAX)
            if self._credit == _CREDIT_MAX:
                self._passed = _PASSED_MIN
        elif self._pass_by:
            self._pass_by -= 1
            return
        self._begins = True

    def goes_on(self, now_ns: int) -> bool:
        """Look again rather than sleep. The wait begins with the first call after the request: when it is served."""
        if self._begins:
            self._begins = False
            self._until_ns = now_ns + self._limit_ns
        if not self._until_ns:
            return False
        if now_ns < self._until_ns:
            return True
        self._until_ns = 0  # or somebody else had the processor for so long, who needs it more
        self._credit -= 2
        if self._credit <= 0:
            self._credit = 1
            self._pass_by = self._passed
            self._passed = min(2 * self._passed, _PASSED_MAX)
        return False
