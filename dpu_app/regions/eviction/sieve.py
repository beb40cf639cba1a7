"""SIEVE (Zhang et al., NSDI 2024): one queue, one bit a block, and a hand that spares the blocks used since it last
came by, leaving them in their place."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from dpu_app.regions.eviction.base import EvictionPolicy, Scan, Slots
from dpu_app.regions.eviction.slot_queue import Links, SlotQueue
from dpu_app.regions.huge_array import huge_zeros


class Sieve:
    def __init__(self, slots: int) -> None:
        self._links = Links(slots)
        self._queue = SlotQueue(self._links)
        self._used = huge_zeros(slots, np.uint8)
        self._used_one = self._used.data
        self._hand = -1

    @property
    def hit_counters(self) -> tuple[memoryview, bytes] | None:
        return self._used_one, b"\1" * 256

    @property
    def bytes_per_slot(self) -> float:
        return (self._links.nbytes + self._used.nbytes) / self._links.slots

    def on_insert(self, slot: int, fingerprint: int) -> None:  # noqa: ARG002
        self._used_one[slot] = 0
        self._queue.push(slot)

    def on_hit(self, slots: Slots) -> None:
        self._used[slots] = 1

    def on_hit_one(self, slot: int) -> None:
        self._used_one[slot] = 1

    def on_remove(self, slot: int) -> None:
        if slot == self._hand:
            self._hand = self._queue.newer(slot)
        self._queue.remove(slot)

    def victim(self, blocked: Callable[[int], bool], scan: Scan | None = None) -> int:
        """The hand stops at the victim. Blocked slots are passed by, their bit kept. A hand that finds nothing unused
        within the scan takes the oldest that is not blocked, rather than refuse while there are blocks to evict."""
        queue, used = self._queue, self._used_one
        slot = self._hand if self._hand >= 0 else queue.tail
        spared = -1
        scan = scan or Scan()
        for _ in range(min(scan.steps_max(), 2 * queue.size)):
            scan.left -= 1
            if not blocked(slot):
                if not used[slot]:
                    self._hand = slot
                    return slot
                used[slot] = 0
                if spared < 0:
                    spared = slot
            slot = queue.newer(slot)
            if slot < 0:
                slot = queue.tail
        self._hand = slot
        return spared

    def bulk_insert(self, slots: Slots) -> None:
        self._queue.push_many(slots)


_: type[EvictionPolicy] = Sieve
