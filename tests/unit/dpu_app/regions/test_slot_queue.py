"""Queues of slots: many linked at once are as if pushed one by one; order restored from columns is by age."""

from __future__ import annotations

import numpy as np
import pytest

from dpu_app.regions.eviction import slot_queue
from dpu_app.regions.eviction.slot_queue import Links, SlotQueue
from dpu_app.regions.index import FREE, USED, SlotIndex
from dpu_app.regions.table_reader import oldest_first


def _drained(queue: SlotQueue) -> list[int]:
    slots: list[int] = []
    while (slot := queue.tail) >= 0:
        slots.append(slot)
        queue.remove(slot)
    return slots


@pytest.mark.parametrize("count", [0, 1, 3, 4, 5, 8, 9, 30])
@pytest.mark.parametrize("before", [0, 1])
def test_many_at_once_are_as_one_by_one(monkeypatch: pytest.MonkeyPatch, count: int, before: int) -> None:
    monkeypatch.setattr(slot_queue, "_PIECE", 4)
    links = Links(40, queues=2)
    queue, other = SlotQueue(links, 0), SlotQueue(links, 1)
    slots = np.random.default_rng(count).permutation(np.arange(2, 40))[:count]
    other.push(1)
    earlier = [0] * before
    for slot in earlier:
        queue.push(slot)
    queue.push_many(slots)
    expected = [*earlier, *slots.tolist()]
    assert queue.size == len(expected)
    for older, newer in zip(expected, [*expected[1:], -1]):
        assert queue.newer(older) == newer
    assert _drained(queue) == expected
    assert _drained(other) == [1]


@pytest.mark.parametrize("share", [0.0, 0.3, 1.0])
def test_the_oldest_come_first_by_generation_then_time_then_slot(share: float) -> None:
    random = np.random.default_rng(1)
    index = SlotIndex(10_000, seed=1)
    used = random.random(index.slots) < share
    index.flags[:] = np.where(used, USED, FREE)
    index.generation[:] = np.where(used, random.integers(5, 9, index.slots), 0)
    index.stored_s[:] = np.where(used, random.integers(1_700_000_000, 1_700_000_050, index.slots), 0)
    slots = np.flatnonzero(used)
    expected = slots[np.lexsort((slots, index.stored_s[slots], index.generation[slots]))]
    assert oldest_first(index, used).tolist() == expected.tolist()


def test_what_unused_slots_hold_does_not_matter_for_the_order() -> None:
    index = SlotIndex(300, seed=1)
    index.generation[:] = 4_000_000_000
    index.stored_s[:] = 1
    used = np.zeros(300, np.bool_)
    used[[7, 200, 100]] = True
    index.generation[used] = 3
    index.stored_s[[7, 100, 200]] = 30, 10, 20
    assert oldest_first(index, used).tolist() == [100, 200, 7]
