"""FIFO: the block stored first goes first, used or not."""

from __future__ import annotations

from collections.abc import Callable

from dpu_app.regions.eviction.base import EvictionPolicy, Scan, Slots
from dpu_app.regions.eviction.slot_queue import Links, SlotQueue


class Fifo:
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
        pass

    def on_hit_one(self, slot: int) -> None:
        pass

    def on_remove(self, slot: int) -> None:
        self._queue.remove(slot)

    def victim(self, blocked: Callable[[int], bool], scan: Scan | None = None) -> int:
        return oldest_unblocked(self._queue, blocked, scan or Scan())

    def bulk_insert(self, slots: Slots) -> None:
        self._queue.push_many(slots)


def oldest_unblocked(queue: SlotQueue, blocked: Callable[[int], bool], scan: Scan) -> int:
    """Walks from the tail without changing the order: a blocked slot stays the next to go. In one turn it goes on
    where it was, past those that were blocked."""
    slot = scan.at if scan.at >= 0 else queue.tail
    for _ in range(scan.steps_max()):
        if slot < 0:
            return -1
        scan.left -= 1
        if not blocked(slot):
            scan.at = queue.newer(slot)
            return slot
        slot = scan.at = queue.newer(slot)
    return -1


_: type[EvictionPolicy] = Fifo
