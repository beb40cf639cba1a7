"""STORE, entry by entry: what is refused and why, what concurrent stores of a key come to, what `flash` means."""

from __future__ import annotations

import numpy as np
import pytest
import xxhash

from common import wire
from common.status import BlockState, Status
from common.wire import EntryFlags, Flags, Op, StatId
from dpu_app.regions import index, store_path
from dpu_app.regions.admission import SecondRequest
from dpu_app.regions.catalogue import Catalogue
from dpu_app.regions.context import EngineSettings
from dpu_app.regions.eviction.base import SCAN_MAX, SCAN_MIN
from dpu_app.regions.quota import FixedQuotas
from emulator.sim_flash import FaultPlan
from tests.unit.dpu_app.regions.engine_world import SLOT_BYTES, World, content, key, statuses

pytestmark = pytest.mark.usefixtures("both_ways")

FOUR = [key(i) for i in range(4)]


def test_what_is_stored_is_retrieved() -> None:
    world = World()
    assert world.store(FOUR) == [Status.OK] * 4
    assert world.retrieve(FOUR) == [content(name) for name in FOUR]


def test_an_answer_says_state_length_and_checksum() -> None:
    world = World()
    world.client.view[:100] = content(FOUR[0], 100)
    answer = world.ask(Op.STORE, world.block_entries(FOUR[:1], 100))
    row = answer.entries[0]
    assert (row["state"], row["length"]) == (BlockState.STAGED, 100)
    assert int(row["checksum"]) == xxhash.xxh3_64_intdigest(content(FOUR[0], 100))


def test_a_second_store_moves_nothing_and_says_exists() -> None:
    world = World()
    world.store(FOUR)
    before = world.engine.stats()[StatId.STORE_BYTES]
    assert world.store(FOUR) == [Status.EXISTS] * 4
    assert world.engine.stats()[StatId.STORE_BYTES] == before


@pytest.mark.parametrize("length", [1, 511, 4096, 4097, SLOT_BYTES - 1, SLOT_BYTES])
def test_lengths_up_to_the_slot(length: int) -> None:
    world = World()
    assert world.store(FOUR, length, Flags.UNTIL_FLASH) == [Status.OK] * 4
    world.restart(clean=True)
    assert world.retrieve(FOUR) == [content(name, length) for name in FOUR]


def test_zero_length_and_too_long_are_refused_alone() -> None:
    world = World()
    entries = world.block_entries(FOUR, SLOT_BYTES)
    entries["length"][1] = 0
    entries["length"][2] = SLOT_BYTES + 1
    assert statuses(world.ask(Op.STORE, entries)) == [Status.OK, Status.BAD_LENGTH, Status.TOO_LARGE, Status.OK]


def test_an_empty_batch_is_answered() -> None:
    world = World()
    for op in (Op.STORE, Op.RETRIEVE, Op.LOOKUP, Op.DELETE, Op.LEASE, Op.RELEASE, Op.PIN, Op.CANCEL, Op.PREFETCH):
        answer = world.ask(op, np.zeros(0, wire.REQUEST_LAYOUT[op]))
        assert (answer.op, answer.status, len(answer.entries)) == (op, Status.OK, 0)


def test_duplicates_in_one_batch_commit_one_value() -> None:
    world = World()
    world.client.view[:SLOT_BYTES] = content(FOUR[0])
    world.client.view[SLOT_BYTES : 2 * SLOT_BYTES] = content(FOUR[1])
    answer = world.ask(Op.STORE, world.block_entries([FOUR[0], FOUR[0], FOUR[0]], SLOT_BYTES))
    assert statuses(answer) == [Status.OK, Status.EXISTS, Status.EXISTS]
    assert world.retrieve([FOUR[0]]) == [content(FOUR[0])]
    assert world.engine.stats()[StatId.SLOTS_USED] == 1


def test_a_foreign_namespace_is_denied_and_finds_nothing() -> None:
    world = World()
    world.store(FOUR)
    world.engine.open_session(2, "u", {1: b"m" * 16})
    world.engine.connected(2, 2, window_lkey=6)
    entries = world.block_entries(FOUR, SLOT_BYTES, namespace=7)
    assert statuses(world.ask(Op.STORE, entries, connection_id=2)) == [Status.DENIED] * 4
    assert statuses(world.ask(Op.RETRIEVE, entries, connection_id=2)) == [Status.DENIED] * 4
    own = world.block_entries(FOUR, SLOT_BYTES)
    assert statuses(world.ask(Op.RETRIEVE, own, connection_id=2)) == [Status.MISS] * 4
    assert world.engine.stats()[StatId.DENIED] == 8


def test_a_claimed_checksum_is_compared_with_what_was_read() -> None:
    world = World()
    world.client.view[: 2 * SLOT_BYTES] = content(FOUR[0]) + content(FOUR[1])
    entries = world.block_entries(FOUR[:2], SLOT_BYTES, flags=int(EntryFlags.HAS_CHECKSUM))
    entries["checksum"] = [xxhash.xxh3_64_intdigest(content(FOUR[0])), 1]
    assert statuses(world.ask(Op.STORE, entries)) == [Status.OK, Status.CHECKSUM]
    assert world.lookup(FOUR[:2]) == [Status.OK, Status.MISS]


def test_a_scattered_source_is_gathered() -> None:
    world = World()
    value = content(FOUR[0], 5000)
    world.client.view[100:1100] = value[:1000]
    world.client.view[9000:13000] = value[1000:]
    entries = world.block_entries(FOUR[:1], 5000, sge_count=2)
    entries["address"] = 0
    sges = np.zeros(2, wire.SGE)
    sges["address"] = [world.client.address + 100, world.client.address + 9000]
    sges["length"] = [1000, 4096]
    sges["rkey"] = entries["rkey"][0]
    assert statuses(world.ask(Op.STORE, entries, sges=sges)) == [Status.OK]
    assert world.retrieve(FOUR[:1]) == [value]
    sges["length"] = [1000, 3999]
    entries["key_lo"] += 1
    assert statuses(world.ask(Op.STORE, entries, sges=sges)) == [Status.BAD_RANGE]
    for count, first in ((0, 0), (3, 0), (2, 1), (65, 0), (2, 2**63)):
        entries["sge_count"], entries["address"] = count, first
        assert statuses(world.ask(Op.STORE, entries, sges=sges)) == [Status.BAD_REQUEST]


def test_a_full_window_refuses_stores_and_leaves_frames_for_loads() -> None:
    world = World(frames=8, settings=EngineSettings(dirty_fraction=0.5))
    keys = [key(i) for i in range(8)]
    request = world.submit(Op.STORE, world.block_entries(keys, SLOT_BYTES))
    assert statuses(world.answer(request)) == [Status.OK] * 4 + [Status.BUSY] * 4
    world.settle()
    assert statuses(world.ask(Op.STORE, world.block_entries(keys, SLOT_BYTES)))[:4] == [Status.EXISTS] * 4


def test_full_flash_evicts_and_only_pinned_blocks_make_it_full() -> None:
    world = World(slots=64, frames=16, settings=EngineSettings(pins_fraction=1.0))
    keys = [key(i) for i in range(world.slots)]
    for start in range(0, len(keys), 8):
        assert set(world.store(keys[start : start + 8], 4096)) == {Status.OK}
    assert world.store([key(1000)], 4096) == [Status.OK]
    assert world.engine.stats()[StatId.EVICTIONS] == 1
    assert world.lookup([keys[0], keys[1]]) == [Status.MISS, Status.OK]
    present = [*keys[1:], key(1000)]
    for start in range(0, len(present), 32):
        world.ask(Op.PIN, world.key_entries(present[start : start + 32], argument=10))
    assert world.store([key(2000)], 4096) == [Status.NO_SPACE]
    world.pass_ms(10_001)
    assert world.store([key(2000)], 4096) == [Status.OK]
    assert world.engine.slots_accounted() == world.slots


def test_quota_counts_blocks_and_what_is_on_its_way() -> None:
    world = World(quotas=FixedQuotas({"t": 3 * SLOT_BYTES}))
    assert world.store(FOUR) == [Status.OK] * 3 + [Status.QUOTA_EXCEEDED]
    world.ask(Op.DELETE, world.key_entries(FOUR[:1]))
    assert world.store(FOUR[3:]) == [Status.OK]


def test_an_admission_filter_refuses_once_and_counts() -> None:
    world = World(admission=SecondRequest(1024))
    assert world.store(FOUR) == [Status.NOT_ADMITTED] * 4
    assert world.store(FOUR) == [Status.OK] * 4
    assert world.engine.stats()[StatId.NOT_ADMITTED] == 4


def test_nothing_is_visible_before_it_is_whole() -> None:
    world = World()
    world.hold_fabric = True
    request = world.submit(Op.STORE, world.block_entries(FOUR, SLOT_BYTES))
    assert world.lookup(FOUR) == [Status.MISS] * 4
    assert (1, request) not in world.answers
    world.release_fabric()
    assert statuses(world.answer(request)) == [Status.OK] * 4


def test_a_store_answered_at_its_deadline_keeps_nothing() -> None:
    world = World()
    world.hold_fabric = True
    world.client.view[:SLOT_BYTES] = content(FOUR[0])
    request = world.submit(Op.STORE, world.block_entries(FOUR[:1], SLOT_BYTES), deadline_us=10_000)
    world.pass_ms(10)
    assert statuses(world.answer(request)) == [Status.DEADLINE]
    world.client.view[:SLOT_BYTES] = bytes(SLOT_BYTES)  # the owner uses its memory again
    world.release_fabric()
    assert world.lookup(FOUR[:1]) == [Status.MISS]
    assert world.engine.stats()[StatId.FRAMES_DIRTY] == 0
    assert world.engine.slots_accounted() == world.slots


def test_who_joined_a_failed_store_takes_its_own_turn() -> None:
    world = World()
    world.engine.open_session(2, "t", {1: b"n" * 16})
    world.engine.connected(2, 2, window_lkey=6)
    world.hold_fabric = True
    first = world.block_entries(FOUR[:1], SLOT_BYTES)
    first["rkey"] = 1  # not registered
    world.submit(Op.STORE, first)
    world.client.view[SLOT_BYTES : 2 * SLOT_BYTES] = content(FOUR[0])
    second = world.submit(Op.STORE, world.block_entries(FOUR[:1], SLOT_BYTES, at=[SLOT_BYTES]), connection_id=2)
    world.release_fabric()
    assert world.broken == {1}
    assert statuses(world.answer(second, 2)) == [Status.OK]
    assert world.ask(Op.LOOKUP, world.key_entries(FOUR[:1]), connection_id=2).aux == 1


def test_until_flash_answers_after_data_and_entry_are_written() -> None:
    world = World()
    world.client.view[:SLOT_BYTES] = content(FOUR[0])
    request = world.submit(Op.STORE, world.block_entries(FOUR[:1], SLOT_BYTES), flags=Flags.UNTIL_FLASH)
    assert world.flash.in_flight == 1
    world.flash_step()  # the data
    assert (1, request) not in world.answers
    world.flash_step()  # the entry
    assert world.answer(request).entries["state"][0] == BlockState.STAGED_AND_FLASH
    world.restart(clean=False)
    assert world.retrieve(FOUR[:1]) == [content(FOUR[0])]


def test_a_store_that_finds_the_block_unflushed_waits_for_flash_too() -> None:
    world = World()
    world.client.view[:SLOT_BYTES] = content(FOUR[0])
    world.submit(Op.STORE, world.block_entries(FOUR[:1], SLOT_BYTES))
    second = world.submit(Op.STORE, world.block_entries(FOUR[:1], SLOT_BYTES), flags=Flags.UNTIL_FLASH)
    assert (1, second) not in world.answers
    world.settle()
    assert statuses(world.answer(second)) == [Status.EXISTS]


@pytest.mark.parametrize("plan", [FaultPlan(eio_write=1.0), FaultPlan(enospc=1.0)])
def test_flash_that_refuses_writes_costs_the_block_and_says_so(plan: FaultPlan) -> None:
    world = World(plan=plan)
    assert world.store(FOUR, flags=Flags.UNTIL_FLASH) == [Status.FLASH_ERROR] * 4
    assert world.lookup(FOUR) == [Status.MISS] * 4
    assert world.engine.stats()[StatId.FLASH_ERRORS] >= 4
    assert world.engine.stats()[StatId.FRAMES_DIRTY] == 0
    world.pass_ms(1000)
    world.settle()
    assert world.engine.slots_accounted() == world.slots


def test_a_short_write_is_carried_on_or_told() -> None:
    world = World(plan=FaultPlan(short_write=0.3))
    told = world.store(FOUR, flags=Flags.UNTIL_FLASH)
    assert set(told) <= {Status.OK, Status.FLASH_ERROR}
    assert told.count(Status.OK) >= 2
    world.restart(clean=False)
    expected = [content(name) if status is Status.OK else Status.MISS for name, status in zip(FOUR, told)]
    assert world.retrieve(FOUR) == expected


def test_a_time_to_live_ends() -> None:
    world = World()
    assert world.store(FOUR, ttl_s=5) == [Status.OK] * 4
    world.pass_ms(4_000)
    assert world.lookup(FOUR) == [Status.OK] * 4
    world.pass_ms(1_001)
    assert world.lookup(FOUR) == [Status.MISS] * 4
    assert world.engine.stats()[StatId.EXPIRED] == 4
    assert world.store(FOUR) == [Status.OK] * 4


def test_the_rest_of_a_slot_on_flash_is_zero() -> None:
    world = World(frames=4)
    for name in FOUR:
        world.store([name])
    world.store([key(9)], 100)
    world.settle()
    geometry = world.region.superblock.geometry
    written = world.media.read(geometry.slot_offset(4), 4096)
    assert written == content(key(9), 100) + bytes(3996)


def test_draining_refuses_stores_and_serves_the_rest() -> None:
    world = World()
    world.store(FOUR[:1])
    world.engine.drain()
    assert world.store(FOUR) == [Status.EXISTS] + [Status.DRAINING] * 3
    assert world.retrieve(FOUR[:1]) == [content(FOUR[0])]
    world.settle()
    assert world.engine.drained


def test_an_expired_block_that_is_still_read_is_busy_not_doubled() -> None:
    world = World()
    world.store(FOUR[:1], ttl_s=1)
    assert statuses(world.ask(Op.LEASE, world.key_entries(FOUR[:1], argument=5_000))) == [Status.OK]
    world.pass_ms(2_000)
    assert world.lookup(FOUR[:1]) == [Status.MISS]
    assert world.store(FOUR[:1]) == [Status.BUSY]
    world.pass_ms(3_001)
    assert world.store(FOUR[:1]) == [Status.OK]
    assert world.engine.slots_accounted() == world.slots


def test_a_large_region_serves_before_its_eviction_order_is_restored() -> None:
    world = World(slots=64, frames=16)
    keys = [key(i) for i in range(world.slots)]
    for start in range(0, len(keys), 8):
        world.store(keys[start : start + 8], 4096)
    world.restart(clean=True, order_later=True)
    restore_order = world.region.restore_order
    assert restore_order is not None
    assert world.retrieve(keys[:8]) == [content(name, 4096) for name in keys[:8]]
    assert statuses(world.ask(Op.TOUCH, world.key_entries(keys[:1]))) == [Status.OK]
    assert statuses(world.ask(Op.DELETE, world.key_entries(keys[8:9]))) == [Status.OK]
    assert world.store([key(1000)], 4096) == [Status.BUSY]
    assert world.store(keys[:1], 4096) == [Status.EXISTS]
    restore_order()
    world.engine.order_restored()
    assert world.store([key(1000)], 4096) == [Status.OK]
    assert world.store([key(1001)], 4096) == [Status.OK]
    assert world.lookup([keys[0], keys[1], keys[8]]) == [Status.MISS, Status.OK, Status.MISS]
    world.pass_ms(200)
    world.settle()
    assert world.engine.slots_accounted() == world.slots


def test_namespaces_that_came_and_went_do_not_use_the_region_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """As with a salt for each user: more of them in a region's time than it has ids."""
    monkeypatch.setattr(index, "NAMESPACES_MAX", 4)
    world = World(quotas=FixedQuotas({"new": SLOT_BYTES}))
    world.store(FOUR[:1])
    for number in range(20):
        world.engine.open_session(2, "old", {1: bytes([number]) * 16})
        world.engine.connected(2, 2, window_lkey=6)
        assert statuses(world.ask(Op.LOOKUP, world.key_entries(FOUR[:1]), connection_id=2)) == [Status.MISS]
        world.engine.close_session(2)
    assert world.lookup(FOUR[:1]) == [Status.OK]
    for tenant in ("new", "old"):  # what one of them stores now is not counted to the other, whose id it was
        world.engine.open_session(2, tenant, {1: tenant.encode().ljust(16)})
        world.engine.connected(2, 2, window_lkey=6)
        assert statuses(world.ask(Op.STORE, world.block_entries(FOUR[:1], SLOT_BYTES), connection_id=2)) == [Status.OK]
        world.engine.close_session(2)


@pytest.mark.parametrize("eviction", ["lru", "s3fifo"])
def test_a_batch_that_finds_no_victim_does_not_search_for_each_entry(
    eviction: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    world = World(slots=3000, frames=64, settings=EngineSettings(pins_fraction=1.0), eviction=eviction)
    keys = [key(i) for i in range(world.slots)]
    for start in range(0, len(keys), 32):
        world.store(keys[start : start + 32])
        world.settle()
    for start in range(0, len(keys), 500):
        world.ask(Op.PIN, world.key_entries(keys[start : start + 500]))
    looked = 0
    blocked = Catalogue.blocked

    def look(catalogue: Catalogue, slot: int) -> bool:
        nonlocal looked
        looked += 1
        return blocked(catalogue, slot)

    monkeypatch.setattr(Catalogue, "blocked", look)
    assert world.store([key(10_000 + i) for i in range(16)]) == [Status.NO_SPACE] * 16
    assert looked <= SCAN_MAX + 16 * SCAN_MIN


def test_a_large_batch_is_begun_a_part_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """What became of its keys meanwhile is looked at again; what ends meanwhile begins no more."""
    monkeypatch.setattr(store_path, "BEGUN_MAX", 8)
    world = World(slots=200, frames=64)
    keys = [key(i) for i in range(20)]
    for i, name in enumerate(keys):
        world.client.view[i * SLOT_BYTES : (i + 1) * SLOT_BYTES] = content(name)
    entries = world.block_entries(keys, SLOT_BYTES)
    large = world.submit(Op.STORE, entries)
    assert world.engine.stats()[StatId.SLOTS_USED] == 8
    assert world.submit(Op.STORE, entries[18:]) == large + 1  # another stores two of those that wait
    gone = world.submit(Op.STORE, world.block_entries([key(100 + i) for i in range(20)], SLOT_BYTES))
    world.submit(Op.CANCEL, np.array([(gone,)], wire.CANCEL_ENTRY))
    assert not world.engine.drained
    world.settle()
    assert statuses(world.answer(large)) == [Status.OK] * 18 + [Status.EXISTS] * 2
    assert statuses(world.answer(large + 1)) == [Status.OK] * 2
    assert world.retrieve(keys) == [content(name) for name in keys]
    assert world.lookup([key(100 + i) for i in range(20)]).count(Status.OK) == 8
    assert world.engine.slots_accounted() == world.slots


def test_connections_take_turns_with_large_batches(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(store_path, "BEGUN_MAX", 4)
    world = World(slots=200, frames=64)
    world.engine.open_session(2, "t", {1: b"o" * 16})
    world.engine.connected(2, 2, window_lkey=6)
    world.submit(Op.STORE, world.block_entries([key(i) for i in range(40)], SLOT_BYTES))
    other = world.submit(Op.STORE, world.block_entries([key(i) for i in range(8)], SLOT_BYTES), connection_id=2)
    for _ in range(3):
        world.pass_ms(0)
    assert statuses(world.answer(other, 2)) == [Status.OK] * 8
