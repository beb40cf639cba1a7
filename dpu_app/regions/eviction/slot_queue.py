"""Doubly linked queues of slots in two arrays: what every policy here is made of.

Owns the links; knows no policy. Queues that share `Links` hold each slot at most once among all of them.
"""

from __future__ import annotations

from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from dpu_app.regions.huge_array import huge_zeros

Slots: TypeAlias = npt.NDArray[np.int64]
_HALF = np.uint64(32)
_PIECE = 1 << 18
"""Slots linked at a time: temporaries of all of a large region would be a quarter of its index."""


class Links:
    """Next and previous of each slot, and of one sentinel per queue: 8 bytes a slot."""

    def __init__(self, slots: int, queues: int = 1) -> None:
        self.slots = slots
        self._pairs = huge_zeros(2 * (slots + queues), np.uint32)
        self.next = self._pairs.data[0::2]
        self.previous = self._pairs.data[1::2]
        self.pairs = self._pairs.view(np.uint64)
        """Next in the lower half and previous in the upper one, so that both cost one cache line."""
        for sentinel in range(slots, slots + queues):
            self.next[sentinel] = self.previous[sentinel] = sentinel

    @property
    def nbytes(self) -> int:
        return self._pairs.nbytes


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
        sentinel = self._sentinel
        old = self._next[sentinel]
        for start in range(0, len(slots), _PIECE):
            stop = min(start + _PIECE, len(slots))
            pairs = np.empty(stop - start, np.uint64)  # older in the lower half, newer in the upper one
            pairs[1:] = slots[start : stop - 1]
            pairs[0] = slots[start - 1] if start else old
            newer = np.empty(stop - start, np.uint64)
            newer[:-1] = slots[start + 1 : stop]
            newer[-1] = slots[stop] if stop < len(slots) else sentinel
            newer <<= _HALF
            pairs |= newer
            self._links.pairs[slots[start:stop]] = pairs
        self._previous[old] = int(slots[0])
        self._next[sentinel] = int(slots[-1])
        self.size += len(slots)
