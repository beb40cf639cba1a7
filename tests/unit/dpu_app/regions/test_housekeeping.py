"""What the engine does by itself is done a part at a time, so that no turn is long; all of it is done in the end."""

from __future__ import annotations

from functools import partial

import numpy as np
import pytest

from common.status import Status
from common.wire import Flags, Op, StatId
from dpu_app.regions import batch, catalogue, flash_queue, leases
from dpu_app.regions.context import EngineSettings
from dpu_app.regions.index import TAKE_BACK_MAX, SlotIndex
from dpu_app.regions.namespace_use import NamespaceUse
from tests.unit.dpu_app.regions.engine_world import SLOT_BYTES, World, key, statuses
from tests.unit.dpu_app.work import instructions


def due(world: World) -> bool:
    return world.engine.next_wakeup_ns() <= world.clock.now_ns


def test_expired_blocks_are_cleared_away_a_part_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(catalogue, "SWEEP_SLOTS", 50)
    monkeypatch.setattr(catalogue, "EXPIRE_MAX", 7)
    world = World(slots=200, frames=64)
    keys = [key(i) for i in range(100)]
    for start in range(0, 100, 20):
        world.store(keys[start : start + 20], ttl_s=0 if start == 40 else 1)
    world.settle()
    world.clock.now_ns += 2_000_000_000
    expired = []
    for _ in range(20):
        world.pass_ms(100)
        world.settle()
        expired.append(world.engine.stats()[StatId.EXPIRED])
    assert expired[-1] == 80
    assert max(np.diff([0, *expired])) == 7
    assert world.lookup(keys) == [Status.OK if 40 <= i < 60 else Status.MISS for i in range(100)]
    assert world.engine.slots_accounted() == world.slots


def test_leases_that_end_together_end_a_part_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(leases, "EXPIRED_MAX", 4)
    world = World(frames=32, settings=EngineSettings(leases_fraction=1.0))
    keys = [key(i) for i in range(10)]
    world.store(keys)
    world.ask(Op.LEASE, world.key_entries(keys, argument=50))
    world.clock.now_ns += 60_000_000
    left = []
    while due(world):
        world.pass_ms(0)
        left.append(world.engine.stats()[StatId.LEASES])
    assert left == [6, 2, 0]
    assert world.leases.granted == {}


def test_requests_that_end_at_one_deadline_end_a_part_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(batch, "EXPIRED_MAX", 4)
    world = World(frames=16)
    world.hold_fabric = True
    requests = [
        world.submit(Op.STORE, world.block_entries([key(i)], SLOT_BYTES), flags=Flags.UNTIL_FLASH, deadline_us=1000)
        for i in range(10)
    ]
    world.clock.now_ns += 2_000_000
    left = []
    while due(world):
        world.pass_ms(0)
        left.append(world.engine.stats()[StatId.PENDING])
    assert left == [6, 2, 0]
    assert all(statuses(world.answer(request)) == [Status.DEADLINE] for request in requests)


def test_stat_takes_no_longer_the_more_is_under_way() -> None:
    work = []
    for blocks in (4, 90):
        world = World(slots=256, frames=128)
        for start in range(0, blocks, 45):
            for number in range(start, min(start + 45, blocks)):
                world.submit(Op.STORE, world.block_entries([key(number)], SLOT_BYTES))
        world.flash_step()
        assert world.engine.stats()[StatId.FRAMES_DIRTY] > 0
        work.append(instructions(world.engine.stats))
    assert work[1] == work[0]


def test_ids_of_namespaces_are_taken_back_without_looking_at_each() -> None:
    """When all ids are given out, with as many sessions that came and went."""
    work = []
    for count in (2_000, 20_000):
        index = SlotIndex(64)
        use = NamespaceUse(index)
        for number in range(count):
            namespace = use.open("t", number.to_bytes(16, "little"))
            if number % 2:
                use.close(np.array([namespace, -1]))
        work.append(instructions(partial(index.take_back_namespaces, use._opened)))
        assert use.open("t", bytes([9]) * 16) % 2  # one that was closed
        work[-1] += instructions(partial(use.bytes_of, "t"))
    assert work[1] == work[0]
    assert len(index.take_back_namespaces(use._opened)) == TAKE_BACK_MAX


def test_a_tenant_is_charged_for_what_it_has_opened() -> None:
    index = SlotIndex(64)
    use = NamespaceUse(index)
    first, second = (use.open("t", bytes([n]) * 16) for n in (1, 2))
    for number, (namespace, length) in enumerate(((first, 100), (second, 20), (use.open("u", bytes(16)), 3))):
        slot = index.allocate()
        index.insert(slot, number, number, namespace, length, 0, 1, 1, 0)
    assert [use.bytes_of(tenant) for tenant in ("t", "u", "nobody")] == [120, 3, 0]
    use.close(np.array([first, second]))
    assert use.bytes_of("t") == 120


def test_a_namespace_that_a_session_still_has_is_not_taken_back() -> None:
    world = World()
    index = world.region.index
    world.engine.open_session(2, "t", {1: b"a" * 16, 2: b"b" * 16})
    world.engine.add_namespace(2, 1, b"c" * 16)  # in the place of another
    world.engine.open_session(3, "t", {1: b"b" * 16})
    assert len(index.take_back_namespaces(world.engine._namespaces._opened)) == 1
    assert index.find_namespace(b"a" * 16) < 0
    world.engine.close_session(2)
    index.take_back_namespaces(world.engine._namespaces._opened)
    assert index.find_namespace(b"b" * 16) >= 0
    assert index.find_namespace(b"c" * 16) < 0


def test_a_late_prefetch_asks_once_what_flash_has_begun() -> None:
    work = []
    for count in (10, 40):
        world = World(slots=200, frames=64)
        keys = [key(i) for i in range(120)]
        for start in range(0, 120, 20):
            world.store(keys[start : start + 20])
            world.settle()
        late = world.submit(Op.PREFETCH, world.block_entries(keys[:count], 0), deadline_us=1000)
        world.clock.now_ns += 2_000_000
        work.append(instructions(world.engine.tick))
        world.settle()
        assert set(statuses(world.answer(late))) == {Status.LATE}
    assert work[1] < 6 * work[0]  # not sixteen times


def test_blocks_that_flash_gave_at_once_are_checked_a_part_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(flash_queue, "TOLD_READ_MAX", 2 * SLOT_BYTES)
    world = World(slots=100, frames=32)
    keys = [key(i) for i in range(60)]
    for start in range(0, 60, 20):
        world.store(keys[start : start + 20])
        world.settle()
    request = world.submit(Op.RETRIEVE, world.block_entries(keys[:10], 0))
    loaded = []
    while world.flash.in_flight:
        world.flash_step()
        loaded.append(world.engine.stats()[StatId.FLASH_READ_BYTES] // SLOT_BYTES)
    while due(world):
        world.pass_ms(0)
        loaded.append(world.engine.stats()[StatId.FLASH_READ_BYTES] // SLOT_BYTES)
    assert max(np.diff([0, *loaded])) <= 2
    assert statuses(world.answer(request)) == [Status.OK] * 10


def test_blocks_that_went_while_the_order_was_restored_leave_it_a_part_at_a_time(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(catalogue, "ORDER_STEP", 8)
    world = World(slots=100, frames=32)
    keys = [key(i) for i in range(60)]
    for start in range(0, 60, 20):
        world.store(keys[start : start + 20])
        world.settle()
    world.restart(clean=True, order_later=True)
    assert world.region.restore_order is not None
    assert statuses(world.ask(Op.DELETE, world.key_entries(keys[:20]))) == [Status.OK] * 20
    world.region.restore_order()
    world.engine.order_restored()
    early = world.submit(Op.STORE, world.block_entries([key(1000)], SLOT_BYTES))
    assert statuses(world.answer(early)) == [Status.BUSY]
    ticks = 0
    while due(world):
        world.pass_ms(0)
        ticks += 1
    assert ticks == 2
    names = [key(2000 + i) for i in range(80)]
    for start in range(0, 80, 16):
        assert world.store(names[start : start + 16]) == [Status.OK] * 16
        world.settle()
    assert world.lookup(names) == [Status.OK] * 80
    assert world.engine.slots_accounted() == world.slots
