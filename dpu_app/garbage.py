"""Python's cyclic garbage collection in a region worker: never a long pause.

Collections of the old generation look at every object there is: with a hundred thousand blocks on their way to flash,
70 ms. Serving makes no cycles, so there is next to nothing for them to find; they are made only while little is under
way. Told by the region server's loop, tick by tick.
"""

from __future__ import annotations

import gc

YOUNG_OBJECTS = 1000
"""More objects than before: a collection of the youngest generation, a quarter of a millisecond."""
MIDDLE_COLLECTIONS = 5
"""So many of those: one of the middle generation too, about a millisecond."""
OLD_COLLECTIONS = 20
"""So many of those: one of the old generation is due."""
NEVER = 1 << 30
IN_FLIGHT_MAX = 2000
"""With more blocks and requests under way a collection of the old generation waits."""


class GarbageCollection:
    """Settings of the whole process. `close` gives them back."""

    def __init__(self) -> None:
        """What is there now lives as long as the worker: no collection looks at it again."""
        self._before = gc.get_threshold()
        gc.collect()
        gc.freeze()
        gc.set_threshold(YOUNG_OBJECTS, MIDDLE_COLLECTIONS, NEVER)

    def tick(self, in_flight: int) -> None:
        """`in_flight`: blocks and requests under way."""
        if in_flight <= IN_FLIGHT_MAX and gc.get_count()[2] >= OLD_COLLECTIONS:
            gc.collect()

    def close(self) -> None:
        gc.set_threshold(*self._before)
        gc.unfreeze()
