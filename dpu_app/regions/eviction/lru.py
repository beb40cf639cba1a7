"""LRU: the block whose last use is longest ago goes first."""

from __future__ import annotations

from collections.abc import Callable

from dpu_app.regions.eviction.base import EvictionPolicy, Scan, Slots
from dpu_app.regions.eviction.fifo import oldest_unblocked
from dpu_app.regions.eviction.slot_queue import Links, SlotQueue


class Lru:
    def __init__(self, slots: int) -> None:
        self._links = Links(slots)
        self._queue = SlotQueue(self._links)

    @property
    def hit_counters(self) -> tuple[memoryview, bytes] | None:
        return None

    @property
    def bytes_per_slot(self) -> float:
        return self._links.nbytes / self._links.slots

    def on_insert(self, slot: int, fingerprint: int) -> None:  # noqa: ARG002
        self._queue.push(slot)

    def on_hit(self, slots: Slots) -> None:
        for slot in slots.tolist():
            self.on_hit_one(slot)

    def on_hit_one(self, slot: int) -> None:
        self._queue.remove(slot)
        self._queue.push(slot)

    def on_remove(self, slot: int) -> None:
        self._queue.remove(slot)

    def victim(self, blocked: Callable[[int], bool], scan: Scan | None = None) -> int:
        return oldest_unblocked(self._queue, blocked, scan or Scan())

    def bulk_insert(self, slots: Slots) -> None:
        self._queue.push_many(slots)


_: type[EvictionPolicy] = Lru
