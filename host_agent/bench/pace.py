"""Keeps a benchmark within its time: on a machine that is slow or busy, parts of it get fewer rounds.

Parts are announced with their weight, the share of the whole that they are expected to take. Pure but for the clock,
which is passed in.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Final

ROUNDS_MIN: Final = 3
"""A part has so many rounds, however long they take (or all that were asked for, if fewer)."""
_HEAD_START: Final = 0.1
"""Of the limit: weights are guesses, so the first parts may take more than their share."""


class Pace:
    """`weight`: of all parts together; `limit_s` 0: no limit. `now_s`: a clock that only goes forward."""

    def __init__(self, weight: float, limit_s: float, now_s: Callable[[], float]) -> None:
        self._weight = weight
        self._limit_s = limit_s
        self._now_s = now_s
        self._started_s = now_s()
        self._done = 0.0
        self.shortened = 0
        """Parts that had fewer rounds than were asked for."""

    def rounds(self, asked: int, weight: float) -> Iterator[int]:
        """The numbers of the rounds of the next part, at most `asked`."""
        for number in range(asked):
            if number >= ROUNDS_MIN and self._is_late(weight * number / asked):
                self.shortened += 1
                break
            yield number
        self._done += weight

    def _is_late(self, weight: float) -> bool:
        share = (self._done + weight) / self._weight
        allowed_s = self._limit_s * (_HEAD_START + (1 - _HEAD_START) * share)
        return bool(self._limit_s) and self._now_s() - self._started_s > allowed_s
