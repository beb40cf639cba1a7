"""Python's cyclic garbage collection in a region worker: never a long pause.

A collection looks at all objects that came since the last, and one of the old generation at every one there is: with a
hundred thousand blocks on their way to flash 70 ms, and each 512 blocks stored cost 4 ms of it. Serving makes no cycles
(a test holds that), so there is next to nothing to find: it is collected only while little is under way. Told by the
region server's loop, tick by tick.
"""

from __future__ import annotations

import gc

TICKS = 10
"""A collection in so many ticks at most: one a second."""
NEW_OBJECTS = 1000
"""More of them than at the last collection: one is due."""
IN_FLIGHT_MAX = 250
"""With more blocks under way a collection waits, which would look at some ten objects of each."""
LEAK_OBJECTS = 1 << 22
"""But no longer than until there are so many: what is under way does not explain them."""


class GarbageCollection:
    """Settings of the whole process. `close` gives them back."""

    def __init__(self) -> None:
        """What is there now lives as long as the worker: no collection looks at it again."""
        self._enabled = gc.isenabled()
        self._ticks = 0
        gc.collect()
        gc.freeze()
        gc.disable()

    def tick(self, in_flight: int) -> None:
        """`in_flight`: blocks under way."""
        self._ticks += 1
        if self._ticks < TICKS:
            return
        new = gc.get_count()[0]
        if (new >= NEW_OBJECTS and in_flight <= IN_FLIGHT_MAX) or new >= LEAK_OBJECTS:
            self._ticks = 0
            gc.collect()

    def close(self) -> None:
        gc.unfreeze()
        if self._enabled:
            gc.enable()
