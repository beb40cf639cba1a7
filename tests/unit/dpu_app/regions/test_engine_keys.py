"""LOOKUP, PIN, TOUCH, DELETE, LIST, STAT, sessions and malformed capsules."""

from __future__ import annotations

import gc
import os

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from common import wire
from common.status import BlockState, Status
from common.wire import EntryFlags, Flags, Op, StatId
from dpu_app.regions import catalogue
from dpu_app.regions.batch import Batch
from tests.unit.dpu_app.regions.engine_world import SLOT_BYTES, World, key, statuses

pytestmark = pytest.mark.usefixtures("both_ways")

FOUR = [key(i) for i in range(4)]


def test_lookup_tells_state_length_and_longest_prefix() -> None:
    world = World()
    world.store(FOUR[:2], 500)
    answer = world.ask(Op.LOOKUP, world.key_entries([FOUR[0], FOUR[1], FOUR[2], FOUR[0]]))
    assert statuses(answer) == [Status.OK, Status.OK, Status.MISS, Status.OK]
    assert answer.aux == 2
    assert answer.entries["length"].tolist() == [500, 500, 0, 500]
    assert answer.entries["state"].tolist()[2] == BlockState.ABSENT
    assert world.ask(Op.LOOKUP, world.key_entries(FOUR[:2])).aux == 2


def test_delete_is_gone_also_after_a_crash() -> None:
    world = World()
    world.store(FOUR, flags=Flags.UNTIL_FLASH)
    answer = world.ask(Op.DELETE, world.key_entries([FOUR[0], FOUR[0], key(9)]))
    assert statuses(answer) == [Status.OK, Status.MISS, Status.MISS]
    world.restart(clean=False)
    assert world.lookup(FOUR) == [Status.MISS, Status.OK, Status.OK, Status.OK]
    assert world.engine.slots_accounted() == world.slots


def test_delete_of_a_block_on_its_way_to_flash() -> None:
    world = World()
    for steps in range(3):
        request = world.submit(Op.STORE, world.block_entries(FOUR, SLOT_BYTES))
        assert statuses(world.answer(request)) == [Status.OK] * 4
        for _ in range(steps):
            world.flash_step()
        assert statuses(world.ask(Op.DELETE, world.key_entries(FOUR))) == [Status.OK] * 4
        world.pass_ms(200)
        world.settle()
        assert world.engine.slots_accounted() == world.slots
        assert world.engine.stats()[StatId.FRAMES_DIRTY] == 0
    world.restart(clean=False)
    assert world.lookup(FOUR) == [Status.MISS] * 4


def test_freed_slots_are_discarded_in_batches() -> None:
    world = World()
    keys = [key(i) for i in range(16)]
    for start in range(0, 16, 4):
        world.store(keys[start : start + 4], flags=Flags.UNTIL_FLASH)
    world.ask(Op.DELETE, world.key_entries(keys))
    world.pass_ms(200)
    world.settle()
    assert world.engine.stats()[StatId.DISCARDED_BYTES] == 16 * SLOT_BYTES
    assert world.engine.slots_accounted() == world.slots


@pytest.mark.parametrize("count", [2, 20])
@pytest.mark.parametrize("op", [Op.LOOKUP, Op.DELETE])
def test_an_expired_block_that_a_batch_names_twice_is_a_miss_each_time(op: Op, count: int) -> None:
    world = World()
    world.store(FOUR, ttl_s=1)
    world.clock.now_ns += 2_000_000_000
    assert statuses(world.ask(op, world.key_entries([FOUR[0]] * count))) == [Status.MISS] * count
    assert world.engine.slots_accounted() == world.slots


@pytest.mark.parametrize("again", [True, False])
def test_a_deleted_block_does_not_come_back_from_an_earlier_slot(again: bool) -> None:
    """The block was evicted by a store that then failed: its old slot still has its bytes and, on flash, its entry."""
    world = World(slots=128, frames=16)
    keys = [key(number) for number in range(world.slots)]
    for start in range(0, len(keys), 4):
        world.store(keys[start : start + 4], flags=Flags.UNTIL_FLASH)
    evicted = [keys[100], keys[0]]  # in this order, in two pages of the slot table
    for start in range(0, len(keys), 8):
        touched = [name for name in keys[start : start + 8] if name not in evicted]
        world.ask(Op.TOUCH, world.key_entries(touched))
    world.ask(Op.TOUCH, world.key_entries([keys[0]]))
    bad = world.block_entries([key(5000), key(5001)], SLOT_BYTES, flags=int(EntryFlags.HAS_CHECKSUM))
    assert statuses(world.ask(Op.STORE, bad)) == [Status.CHECKSUM] * 2
    if again:
        assert world.store(evicted[:1], flags=Flags.UNTIL_FLASH) == [Status.OK]
    expected = Status.OK if again else Status.MISS
    assert statuses(world.ask(Op.DELETE, world.key_entries(evicted[:1]))) == [expected]
    world.restart(clean=False)
    assert world.lookup(evicted[:1]) == [Status.MISS]


def test_many_blocks_that_expire_at_once_are_cleared_away_a_few_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(catalogue, "EXPIRE_MAX", 8, raising=False)
    world = World(frames=16)
    for start in range(0, 40, 8):
        world.store([key(number) for number in range(start, start + 8)], 700, ttl_s=60)
    world.clock.now_ns += 61_000_000_000
    expired = []
    for _ in range(7):
        world.pass_ms(150)
        expired.append(world.engine.stats()[StatId.EXPIRED])
    assert expired == [8, 16, 24, 32, 40, 40, 40]


def test_pins_keep_touch_renews() -> None:
    world = World(slots=64, frames=16)
    keys = [key(i) for i in range(world.slots)]
    for start in range(0, len(keys), 8):
        world.store(keys[start : start + 8], 4096)
    assert statuses(world.ask(Op.PIN, world.key_entries([keys[0], key(999)], argument=60))) == [Status.OK, Status.MISS]
    assert statuses(world.ask(Op.TOUCH, world.key_entries([keys[1]]))) == [Status.OK]
    world.store([key(5000), key(5001)], 4096)
    assert world.lookup(keys[:4]) == [Status.OK, Status.OK, Status.MISS, Status.MISS]
    assert statuses(world.ask(Op.UNPIN, world.key_entries([keys[0]]))) == [Status.OK]
    assert world.engine.stats()[StatId.PINS] == 0
    world.store([key(5002)], 4096)
    assert world.lookup(keys[:1]) == [Status.MISS]


def test_no_more_than_the_allowed_fraction_is_pinned() -> None:
    world = World(slots=64, frames=16)
    keys = [key(i) for i in range(40)]
    for start in range(0, 40, 8):
        world.store(keys[start : start + 8], 4096)
    result = statuses(world.ask(Op.PIN, world.key_entries(keys)))
    assert result == [Status.OK] * (world.slots // 2) + [Status.NO_SPACE] * (40 - world.slots // 2)


def test_list_pages_through_own_namespaces() -> None:
    world = World()
    world.store(FOUR, 700, ttl_s=100)
    world.engine.open_session(2, "u", {4: b"m" * 16})
    world.engine.connected(2, 2, window_lkey=6)
    entries = np.zeros(1, wire.LIST_REQUEST)
    entries["namespace"], entries["limit"] = 1, 3
    first = world.ask(Op.LIST, entries)
    entries["cursor"] = first.aux
    second = world.ask(Op.LIST, entries)
    found = [wire.key_bytes(row) for answer in (first, second) for row in answer.entries]
    assert (sorted(found), second.aux) == (sorted(FOUR), 0)
    assert set(first.entries["length"].tolist()) == {700}
    assert set(first.entries["ttl_s"].tolist()) <= set(range(98, 101))
    assert world.ask(Op.LIST, entries, connection_id=2).status is Status.DENIED
    everything = world.ask(Op.LIST, np.zeros(1, wire.LIST_REQUEST), connection_id=2, flags=Flags.ALL_NAMESPACES)
    assert len(everything.entries) == 0
    assert world.ask(Op.LIST, np.zeros(0, wire.LIST_REQUEST)).status is Status.BAD_REQUEST


def test_stat_answers_every_counter() -> None:
    world = World()
    world.store(FOUR)
    answer = world.ask(Op.STAT, np.zeros(0, wire.EMPTY_ENTRY))
    values = {int(row["stat_id"]): int(row["value"]) for row in answer.entries}
    assert set(values) == {int(stat) for stat in StatId}
    assert (values[StatId.SLOTS_USED], values[StatId.STORE_BYTES]) == (4, 4 * SLOT_BYTES)


def test_answered_requests_are_not_kept_behind_one_that_stays_open() -> None:
    def batches() -> int:
        gc.collect()
        return sum(isinstance(thing, Batch) for thing in gc.get_objects())

    world = World()
    before = batches()
    world.hold_fabric = True
    world.submit(Op.STORE, world.block_entries(FOUR, SLOT_BYTES), deadline_us=1_000_000)
    for _ in range(2000):
        world.submit(Op.LOOKUP, world.key_entries(FOUR), deadline_us=60_000_000)
        world.engine.next_wakeup_ns()
    assert batches() - before < 600
    world.pass_ms(1001)
    assert statuses(world.answer(1)) == [Status.DEADLINE] * 4


def test_a_request_id_in_use_is_refused() -> None:
    world = World()
    world.hold_fabric = True
    world.submit(Op.STORE, world.block_entries(FOUR, SLOT_BYTES))
    world._request_id -= 1
    again = world.submit(Op.LOOKUP, world.key_entries(FOUR))
    assert world.answer(again).status is Status.BAD_REQUEST


def test_a_closed_session_gives_everything_back() -> None:
    world = World()
    world.store(FOUR, flags=Flags.UNTIL_FLASH)
    world.ask(Op.LEASE, world.key_entries(FOUR[:2]))
    world.hold_fabric = True
    world.submit(Op.STORE, world.block_entries([key(20), key(21)], SLOT_BYTES))
    world.submit(Op.RETRIEVE, world.block_entries(FOUR, 0))
    world.engine.close_session(1)
    stats = world.engine.stats()
    assert [stats[s] for s in (StatId.LEASES, StatId.FRAMES_BUSY, StatId.FRAMES_DIRTY, StatId.PENDING)] == [0] * 4
    assert stats[StatId.SESSIONS] == 0
    assert not world.leases.granted
    assert world.engine.slots_accounted() == world.slots
    world.engine.receive(1, wire.encode(Op.LOOKUP, 99, world.key_entries(FOUR)))
    assert (1, 99) not in world.answers


def test_a_new_connection_replaces_the_old() -> None:
    world = World()
    world.store(FOUR)
    world.ask(Op.LEASE, world.key_entries(FOUR[:1]))
    world.engine.connected(1, 3, window_lkey=9)
    assert world.engine.stats()[StatId.LEASES] == 0
    assert statuses(world.ask(Op.LOOKUP, world.key_entries(FOUR), connection_id=3)) == [Status.OK] * 4


def test_wrong_version_and_garbage_are_answered_not_raised() -> None:
    world = World()
    good = bytearray(wire.encode(Op.LOOKUP, 7, world.key_entries(FOUR)))
    good[2] = 9
    world.engine.receive(1, good)
    world.carry_out()
    assert world.answer(7).status is Status.BAD_VERSION
    world.engine.receive(1, os.urandom(10))
    world.carry_out()
    assert world.answer(0).status is Status.BAD_REQUEST
    assert world.engine.stats()[StatId.BAD_CAPSULES] == 2


@settings(max_examples=200, deadline=None)
@given(
    op=st.sampled_from(sorted(wire.REQUEST_LAYOUT)),
    body=st.binary(max_size=400),
    flags=st.integers(0, 15),
    sge_count=st.integers(0, 3),
    deadline_us=st.integers(0, 2**32 - 1),
)
def test_well_formed_headers_around_random_entries_never_crash(
    op: int, body: bytes, flags: int, sge_count: int, deadline_us: int
) -> None:
    world = World(frames=4)
    layout = wire.REQUEST_LAYOUT[op]
    count = len(body) // layout.itemsize
    entries = np.frombuffer(body, layout, count)
    sges = np.zeros(sge_count, wire.SGE)
    capsule = wire.encode(Op(op), 5, entries, sges=sges, flags=Flags(flags & ~1), deadline_us=deadline_us)
    world.engine.receive(1, capsule)
    world.carry_out()
    world.settle()
    world.pass_ms(60_001)
    if 1 not in world.broken:
        assert len(world.answers) == 1
    assert world.engine.slots_accounted() == world.slots
    assert world.engine.stats()[StatId.PENDING] == 0
