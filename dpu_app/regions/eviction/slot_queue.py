"""Doubly linked queues of slots in two arrays: what every policy here is made of.

Owns the links; knows no policy. Queues that share `Links` hold each slot at most once among all of them.
"""

from __future__ import annotations

from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from dpu_app.regions.huge_array import huge_zeros

Slots: TypeAlias = npt.NDArray[np.int64]


class Links:
    """Next and previous of each slot, and of one sentinel per queue: 8 bytes a slot."""

    def __init__(self, slots: int, queues: int = 1) -> None:
        self.slots = slots
        self.next_array = huge_zeros(slots + queues, np.uint32)
        self.previous_array = huge_zeros(slots + queues, np.uint32)
        self.next = self.next_array.data
        self.previous = self.previous_array.data
        for sentinel in range(slots, slots + queues):
            self.next[sentinel] = self.previous[sentinel] = sentinel

    @property
    def nbytes(self) -> int:
        return self.next_array.nbytes + self.previous_array.nbytes


class SlotQueue:
    """Head is the newest, tail the oldest. A sentinel closes the ring, so that no operation has a special case."""

    def __init__(self, links: Links, number: int = 0) -> None:
        self._links = links
        self._next = links.next
        self._previous = links.previous
        self._sentinel = links.slots + number
        self.size = 0

    @property
    def tail(self) -> int:
        """The oldest slot, or -1."""
        return self._previous[self._sentinel] if self.size else -1

    def newer(self, slot: int) -> int:
        """The one inserted after `slot`, or -1 at the head."""
        newer = self._previous[slot]
        return newer if newer != self._sentinel else -1

    def push(self, slot: int) -> None:
        """`slot`, which is in no queue, to the head."""
        sentinel = self._sentinel
        old = self._next[sentinel]
        self._next[slot] = old
        self._previous[slot] = sentinel
        self._previous[old] = slot
        self._next[sentinel] = slot
        self.size += 1

    def remove(self, slot: int) -> None:
        """`slot`, which is in this queue."""
        older, newer = self._next[slot], self._previous[slot]
        self._next[newer] = older
        self._previous[older] = newer
        self.size -= 1

    def push_many(self, slots: Slots) -> None:
        """Many, oldest first, none of which is in a queue."""
        if len(slots) == 0:
            return
        following, previous = self._links.next_array, self._links.previous_array
        links = slots.astype(np.uint32)
        following[slots[1:]] = links[:-1]
        previous[slots[:-1]] = links[1:]
        sentinel = self._sentinel
        old = self._next[sentinel]
        oldest, newest = int(slots[0]), int(slots[-1])
        following[oldest] = old
        previous[old] = oldest
        following[sentinel] = newest
        previous[newest] = sentinel
        self.size += len(slots)
