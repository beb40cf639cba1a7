"""S3-FIFO (Yang et al., SOSP 2023): a small queue that new blocks pass through, a main queue for those used again,
and a ghost list of those that were not, whose return is proof enough for the main queue. Sizes and thresholds are
the paper's: a tenth, more than one use to be moved, two bits of count. The default: most KV blocks are never read
again, and they leave within a tenth of the cache.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from dpu_app.regions.eviction.base import EvictionPolicy, FingerprintOf, Scan, Slots
from dpu_app.regions.eviction.ghost import Ghost
from dpu_app.regions.eviction.slot_queue import Links, SlotQueue
from dpu_app.regions.huge_array import huge_zeros

_SMALL_SHARE = 10
"""The small queue's share of the slots is one in so many."""
_FREQ = 3
_MAIN = 4
_COUNTED = np.array([value + 1 if value & _FREQ < _FREQ else value for value in range(8)], np.uint8)
"""State after one more use."""


class S3Fifo:
    def __init__(self, slots: int, fingerprint_of: FingerprintOf) -> None:
        self._links = Links(slots, queues=2)
        self._small = SlotQueue(self._links, 0)
        self._main = SlotQueue(self._links, 1)
        self._state = huge_zeros(slots, np.uint8)
        """Uses counted up to 3; plus 4 in the main queue."""
        self._state_one = self._state.data
        self._fingerprint_of = fingerprint_of
        self._small_slots = max(1, slots // _SMALL_SHARE)
        self._ghost = Ghost(slots - self._small_slots)

    @property
    def hit_counters(self) -> tuple[memoryview, bytes] | None:
        return self._state_one, _COUNTED.tobytes().ljust(256, b"\0")

    @property
    def bytes_per_slot(self) -> float:
        return (self._links.nbytes + self._state.nbytes + self._ghost.nbytes) / self._links.slots

    def on_insert(self, slot: int, fingerprint: int) -> None:
        if self._ghost.take(_folded(fingerprint)):
            self._state_one[slot] = _MAIN
            self._main.push(slot)
        else:
            self._state_one[slot] = 0
            self._small.push(slot)

    def on_hit(self, slots: Slots) -> None:
        self._state[slots] = _COUNTED[self._state[slots]]

    def on_hit_one(self, slot: int) -> None:
        state = self._state_one[slot]
        if state & _FREQ < _FREQ:
            self._state_one[slot] = state + 1

    def on_remove(self, slot: int) -> None:
        (self._main if self._state_one[slot] & _MAIN else self._small).remove(slot)
        self._state_one[slot] = 0

    def victim(self, blocked: Callable[[int], bool], scan: Scan | None = None) -> int:
        """Blocked slots go round to the head of their queue with their count. When all that the scan saw was in use
        often, the oldest of the main queue that is not blocked goes, rather than scan on."""
        state = self._state_one
        spared = -1
        scan = scan or Scan()
        for _ in range(scan.steps_max()):
            scan.left -= 1
            small = self._small.size >= self._small_slots or not self._main.size
            queue = self._small if small else self._main
            slot = queue.tail
            if slot < 0:
                return -1
            if blocked(slot):
                queue.remove(slot)
                queue.push(slot)
            elif small and state[slot] > 1:
                queue.remove(slot)
                state[slot] = _MAIN
                self._main.push(slot)
                spared = slot
            elif small:
                self._ghost.insert(_folded(self._fingerprint_of(slot)))
                return slot
            elif state[slot] & _FREQ:
                state[slot] -= 1
                queue.remove(slot)
                queue.push(slot)
                spared = slot
            else:
                return slot
        return spared

    def bulk_insert(self, slots: Slots) -> None:
        """The newest tenth waits in the small queue, as it would have; the rest is in the main queue."""
        old = max(0, len(slots) - self._small_slots)
        self._main.push_many(slots[:old])
        self._small.push_many(slots[old:])
        self._state[:] = _MAIN
        self._state[slots[old:]] = 0


def _folded(fingerprint: int) -> int:
    """32 bits, as the ghost list takes them."""
    return (fingerprint ^ fingerprint >> 32) & 0xFFFFFFFF


_: type[EvictionPolicy] = S3Fifo
