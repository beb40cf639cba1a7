"""RETRIEVE, PREFETCH and LEASE: ranges, scatter lists, cold blocks, damage, deadlines, cancelling."""

from __future__ import annotations

import numpy as np
import pytest
import xxhash

from common import wire
from common.status import BlockState, Status
from common.wire import EntryFlags, Flags, Op, StatId
from doca_shims.api import RDMA_REQUEST
from dpu_app.regions import staged_batches
from dpu_app.regions.context import EngineSettings
from emulator.sim_flash import FaultPlan
from tests.unit.dpu_app.regions.engine_world import SLOT_BYTES, World, content, key, statuses

pytestmark = pytest.mark.usefixtures("both_ways")

FOUR = [key(i) for i in range(4)]


def cold_world(keys: list[bytes] = FOUR, length: int = SLOT_BYTES, frames: int = 8, **options: object) -> World:
    """A world whose blocks are on flash only."""
    world = World(frames=frames, **options)  # type: ignore[arg-type]
    for start in range(0, len(keys), 2):
        assert set(world.store(keys[start : start + 2], length, Flags.UNTIL_FLASH)) == {Status.OK}
    world.restart(clean=True)
    return world


def test_a_miss_is_an_answer() -> None:
    world = cold_world()
    assert world.retrieve([key(50), FOUR[0], key(51)]) == [Status.MISS, content(FOUR[0]), Status.MISS]


def test_a_cold_block_is_read_once_for_many() -> None:
    world = cold_world()
    requests = [world.submit(Op.RETRIEVE, world.block_entries(FOUR[:1], 0, at=[i * SLOT_BYTES])) for i in range(3)]
    world.settle()
    assert all(statuses(world.answer(request)) == [Status.OK] for request in requests)
    assert bytes(world.client.view[: 3 * SLOT_BYTES]) == content(FOUR[0]) * 3
    assert world.engine.stats()[StatId.FLASH_READ_BYTES] == SLOT_BYTES
    assert world.lookup(FOUR) == [Status.OK] * 4


def test_ranges_and_their_checksums() -> None:
    world = World()
    world.store(FOUR[:1], 6000)
    entries = world.block_entries(FOUR[:1] * 3, 0, flags=int(EntryFlags.WANT_CHECKSUM))
    entries["offset"] = [0, 1000, 5999]
    entries["length"] = [10, 5000, 0]
    answer = world.ask(Op.RETRIEVE, entries)
    value = content(FOUR[0], 6000)
    for i, piece in enumerate((value[:10], value[1000:], value[5999:])):
        row = answer.entries[i]
        assert (row["status"], row["length"]) == (Status.OK, len(piece))
        assert int(row["checksum"]) == xxhash.xxh3_64_intdigest(piece)
        assert bytes(world.client.view[i * SLOT_BYTES :][: len(piece)]) == piece


@pytest.mark.parametrize(("offset", "length"), [(6000, 0), (6000, 1), (0, 6001), (5999, 2), (2**32 - 1, 2**32 - 1)])
def test_ranges_outside_the_block_tell_its_length(offset: int, length: int) -> None:
    world = World()
    world.store(FOUR[:1], 6000)
    answer = world.ask(Op.RETRIEVE, world.block_entries(FOUR[:1], length, offset))
    assert (answer.entries["status"][0], answer.entries["length"][0]) == (Status.BAD_RANGE, 6000)


def test_a_destination_list_is_filled_in_order() -> None:
    world = World()
    world.store(FOUR[:1], 6000)
    entries = world.block_entries(FOUR[:1], 5000, offset=500, sge_count=3)
    entries["address"] = 0
    sges = np.zeros(3, wire.SGE)
    sges["address"] = [world.client.address + place for place in (50_000, 60_000, 70_000)]
    sges["length"] = [1000, 0, 4096]
    sges["rkey"] = entries["rkey"][0]
    assert statuses(world.ask(Op.RETRIEVE, entries, sges=sges)) == [Status.OK]
    value = content(FOUR[0], 6000)[500:5500]
    assert bytes(world.client.view[50_000:51_000]) == value[:1000]
    assert bytes(world.client.view[70_000:74_000]) == value[1000:]
    sges["length"] = [1000, 0, 3999]
    assert statuses(world.ask(Op.RETRIEVE, entries, sges=sges)) == [Status.BAD_RANGE]


def test_overlapping_destinations_serve_the_first_and_refuse_the_rest() -> None:
    world = World()
    world.store(FOUR)
    entries = world.block_entries(FOUR, 0, at=[0, 3 * SLOT_BYTES, SLOT_BYTES - 1, 5 * SLOT_BYTES])
    entries["length"] = SLOT_BYTES
    world.client.view[:] = bytes(len(world.client.view))
    assert statuses(world.ask(Op.RETRIEVE, entries)) == [Status.OK, Status.OK, Status.OVERLAP, Status.OK]
    assert bytes(world.client.view[:SLOT_BYTES]) == content(FOUR[0])
    assert not any(world.client.view[SLOT_BYTES : 2 * SLOT_BYTES])


def test_a_flipped_bit_is_a_miss_a_metric_and_a_freed_slot() -> None:
    world = cold_world()
    geometry = world.region.superblock.geometry
    world.media.flip_bit(geometry.slot_offset(1) + 4321, 3)
    assert world.retrieve(FOUR) == [content(FOUR[0]), Status.MISS, content(FOUR[2]), content(FOUR[3])]
    stats = world.engine.stats()
    assert (stats[StatId.CHECKSUM_MISMATCHES], stats[StatId.SLOTS_USED]) == (1, 3)
    world.pass_ms(200)
    world.settle()
    assert world.engine.slots_accounted() == world.slots
    world.restart(clean=False)
    assert world.lookup(FOUR) == [Status.OK, Status.MISS, Status.OK, Status.OK]
    assert world.store(FOUR[1:2]) == [Status.OK]


@pytest.mark.parametrize("plan", [FaultPlan(eio_read=1.0)])
def test_what_flash_does_not_give_back_is_a_miss(plan: FaultPlan) -> None:
    world = cold_world()
    world.flash.plan = plan
    assert world.retrieve(FOUR) == [Status.MISS] * 4
    assert world.engine.stats()[StatId.FLASH_ERRORS] >= 4


def test_short_reads_and_stale_completions_never_pass_for_whole() -> None:
    world = cold_world()
    world.flash.plan = FaultPlan(short_read=0.5, duplicate_completion=0.5, stale_completion=0.5)
    for _ in range(20):
        for name, found in zip(FOUR, world.retrieve(FOUR)):
            assert found in (content(name), Status.MISS)
        world.store(FOUR, flags=Flags.UNTIL_FLASH)


def test_a_wrong_rkey_breaks_the_connection_and_frees_the_frames() -> None:
    world = World()
    world.store(FOUR)
    entries = world.block_entries(FOUR, SLOT_BYTES)
    entries["rkey"][2] = 1
    world.submit(Op.RETRIEVE, entries)
    world.settle()
    assert world.broken == {1}
    assert world.engine.stats()[StatId.FRAMES_BUSY] == 0


def test_loads_wait_for_frames_and_are_answered_at_their_deadline() -> None:
    keys = [key(i) for i in range(8)]
    world = cold_world(keys, frames=4, settings=EngineSettings(leases_fraction=1.0))
    leased = world.ask(Op.LEASE, world.key_entries(keys[:4], argument=20_000))
    assert statuses(leased) == [Status.OK] * 4
    request = world.submit(Op.RETRIEVE, world.block_entries(keys[4:], 0), deadline_us=50_000)
    world.settle()
    world.pass_ms(50)
    assert statuses(world.answer(request)) == [Status.DEADLINE] * 4
    assert world.engine.stats()[StatId.PENDING] == 0
    waiting = world.submit(Op.RETRIEVE, world.block_entries(keys[4:], 0), deadline_us=50_000)
    entries = np.zeros(4, wire.RELEASE_ENTRY)
    entries["lease_id"] = leased.entries["lease_id"]
    entries["generation"] = leased.entries["generation"]
    assert statuses(world.ask(Op.RELEASE, entries)) == [Status.OK] * 4
    world.settle()
    assert statuses(world.answer(waiting)) == [Status.OK] * 4


def test_nothing_is_written_after_a_late_answer() -> None:
    world = cold_world()
    request = world.submit(Op.RETRIEVE, world.block_entries(FOUR, 0), deadline_us=1000)
    world.pass_ms(1)
    assert statuses(world.answer(request)) == [Status.DEADLINE] * 4
    world.client.view[:] = bytes(len(world.client.view))
    world.settle()
    assert not any(world.client.view)
    assert world.engine.stats()[StatId.FRAMES_BUSY] == 0


def test_cancel_answers_at_once_and_withdraws() -> None:
    world = cold_world()
    request = world.submit(Op.RETRIEVE, world.block_entries(FOUR, 0))
    entries = np.zeros(2, wire.CANCEL_ENTRY)
    entries["request_id"] = [request, 999]
    cancel = world.submit(Op.CANCEL, entries)
    assert statuses(world.answer(cancel)) == [Status.OK, Status.MISS]
    assert statuses(world.answer(request)) == [Status.CANCELLED] * 4
    world.client.view[:] = bytes(len(world.client.view))
    world.settle()
    assert not any(world.client.view)


def test_prefetch_stages_without_moving_data() -> None:
    world = cold_world()
    answer = world.ask(Op.PREFETCH, world.block_entries([*FOUR, key(70)], 0, sge_count=0))
    assert statuses(answer) == [Status.OK] * 4 + [Status.MISS]
    assert set(answer.entries["state"][:4]) == {BlockState.STAGED_AND_FLASH}
    before = world.engine.stats()[StatId.FLASH_READ_BYTES]
    assert world.retrieve(FOUR) == [content(name) for name in FOUR]
    assert world.engine.stats()[StatId.FLASH_READ_BYTES] == before


def test_prefetch_to_memory_delivers_and_reports_what_was_not_in_time() -> None:
    world = cold_world()
    answer = world.ask(Op.PREFETCH, world.block_entries(FOUR, 0), flags=Flags.TO_HOST)
    assert statuses(answer) == [Status.OK] * 4
    assert bytes(world.client.view[: 4 * SLOT_BYTES]) == b"".join(content(name) for name in FOUR)
    world.restart(clean=True)
    late = world.submit(Op.PREFETCH, world.block_entries(FOUR, 0), flags=Flags.TO_HOST, deadline_us=1000)
    world.pass_ms(1)
    assert statuses(world.answer(late)) == [Status.LATE] * 4
    world.client.view[:] = bytes(len(world.client.view))
    world.settle()
    assert not any(world.client.view)


def test_demand_goes_before_prefetch_and_promotes_it() -> None:
    keys = [key(i) for i in range(8)]
    world = cold_world(keys, frames=16)
    world.engine._context.queue._depth = 1
    prefetch = world.submit(Op.PREFETCH, world.block_entries(keys, 0, sge_count=0))
    demand = world.submit(Op.RETRIEVE, world.block_entries(keys[7:], 0))
    world.flash_step()
    world.flash_step()
    assert statuses(world.answer(demand)) == [Status.OK]
    assert (1, prefetch) not in world.answers
    world.settle()
    assert statuses(world.answer(prefetch)) == [Status.OK] * 8


def test_a_lease_grants_one_frame_and_ends_by_time() -> None:
    world = cold_world()
    answer = world.ask(Op.LEASE, world.key_entries([FOUR[0], key(60)], argument=100))
    granted, missing = answer.entries
    assert (granted["status"], missing["status"]) == (Status.OK, Status.MISS)
    connection, address, length = world.leases.granted[int(granted["rkey"])]
    assert (connection, address, length) == (1, int(granted["address"]), SLOT_BYTES)
    assert bytes(world.memory.view[address - world.memory.address :][:SLOT_BYTES]) == content(FOUR[0])
    assert statuses(world.ask(Op.DELETE, world.key_entries(FOUR[:1]))) == [Status.IN_USE]
    world.pass_ms(99)
    assert world.leases.granted
    world.pass_ms(1)
    assert not world.leases.granted
    assert world.engine.stats()[StatId.LEASES] == 0
    assert statuses(world.ask(Op.DELETE, world.key_entries(FOUR[:1]))) == [Status.OK]


def test_leases_leave_frames_for_others() -> None:
    keys = [key(i) for i in range(8)]
    world = cold_world(keys)
    granted = statuses(world.ask(Op.LEASE, world.key_entries(keys, argument=20_000)))
    assert sorted(granted) == [Status.OK] * 4 + [Status.BUSY] * 4
    assert statuses(world.ask(Op.LEASE, world.key_entries([keys[granted.index(Status.OK)]]))) == [Status.OK]
    world.engine.open_session(2, "u", {1: b"n" * 16})
    world.engine.connected(2, 2, window_lkey=6)
    cold = [name for name, status in zip(keys, granted) if status is Status.BUSY]
    assert statuses(world.ask(Op.RETRIEVE, world.block_entries(cold, 0), connection_id=2)) == [Status.OK] * 4
    assert world.store([key(100)]) == [Status.OK]
    world.pass_ms(20_000)
    assert world.engine.stats()[StatId.LEASES] == world.engine.stats()[StatId.FRAMES_BUSY] == 0
    assert statuses(world.ask(Op.LEASE, world.key_entries(cold))) == [Status.OK] * 4


def test_a_lease_is_released_once_and_only_by_its_holder() -> None:
    world = cold_world()
    world.engine.open_session(2, "t", {1: b"n" * 16})
    world.engine.connected(2, 2, window_lkey=6)
    lease = world.ask(Op.LEASE, world.key_entries(FOUR[:1])).entries[0]
    entries = np.zeros(1, wire.RELEASE_ENTRY)
    entries["lease_id"], entries["generation"] = lease["lease_id"], lease["generation"] + 1
    assert statuses(world.ask(Op.RELEASE, entries)) == [Status.MISS]
    entries["generation"] = lease["generation"]
    assert statuses(world.ask(Op.RELEASE, entries, connection_id=2)) == [Status.MISS]
    assert statuses(world.ask(Op.RELEASE, entries)) == [Status.OK]
    assert statuses(world.ask(Op.RELEASE, entries)) == [Status.MISS]


def test_send_queue_limits_are_kept() -> None:
    keys = [key(i) for i in range(16)]
    world = World(frames=32, settings=EngineSettings(send_wrs_max=256))
    world.store(keys)
    world.hold_fabric = True
    requests = []
    for _ in range(3):
        entries = world.block_entries(keys, 0, sge_count=16)
        entries["address"] = np.arange(16) * 16
        sges = np.zeros(256, wire.SGE)
        sges["address"] = world.client.address + np.arange(256) * 512
        sges["length"] = 512
        sges["rkey"] = 77
        requests.append(world.submit(Op.RETRIEVE, entries, sges=sges))
    assert sum(len(posting.requests) for posting in world.held) == 256 * RDMA_REQUEST.size
    while world.held:
        world.release_fabric()
    assert all(statuses(world.answer(request)) == [Status.OK] * 16 for request in requests)


MANY = [key(100 + i) for i in range(40)]


@pytest.fixture(params=["short way", "general way"])
def large_world(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> World:
    """MANY are staged; a large batch of them goes the short way, or is kept from it."""
    if request.param == "general way":
        monkeypatch.setattr(staged_batches, "deliver", lambda *_: False)
    world = World(slots=64, frames=64, eviction="s3fifo")
    for start in range(0, 40, 8):
        assert set(world.store(MANY[start : start + 8], 6000)) == {Status.OK}
    return world


def test_large_batches_of_staged_blocks(large_world: World) -> None:
    entries = large_world.block_entries(MANY, 0)
    answer = large_world.ask(Op.RETRIEVE, entries)
    assert statuses(answer) == [Status.OK] * 40
    for i, (name, row) in enumerate(zip(MANY, answer.entries)):
        value = content(name, 6000)
        assert bytes(large_world.client.view[i * SLOT_BYTES :][:6000]) == value
        assert (int(row["length"]), int(row["state"])) == (6000, BlockState.STAGED_AND_FLASH)
        assert int(row["checksum"]) == xxhash.xxh3_64_intdigest(value)
    stats = large_world.engine.stats()
    assert (stats[StatId.RETRIEVES], stats[StatId.RETRIEVE_STAGED]) == (40, 40)
    assert (stats[StatId.RETRIEVE_BYTES], stats[StatId.FRAMES_BUSY]) == (40 * 6000, 0)


def test_large_batches_of_ranges(large_world: World) -> None:
    entries = large_world.block_entries(MANY, 0)
    entries["offset"] = np.arange(40) * 100
    entries["length"][1:] = 1000
    answer = large_world.ask(Op.RETRIEVE, entries)
    assert statuses(answer) == [Status.OK] * 40
    for i, name in enumerate(MANY[1:], 1):
        piece = content(name, 6000)[i * 100 : i * 100 + 1000]
        assert bytes(large_world.client.view[i * SLOT_BYTES :][:1000]) == piece
        assert int(answer.entries["checksum"][i]) == 0


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        ({"key_lo": 5}, Status.MISS),
        ({"namespace": 9}, Status.DENIED),
        ({"sge_count": 0}, Status.BAD_REQUEST),
        ({"offset": 6000}, Status.BAD_RANGE),
        ({"length": 6001}, Status.BAD_RANGE),
    ],
)
def test_one_odd_entry_costs_a_large_batch_nothing_else(
    large_world: World, change: dict[str, int], expected: Status
) -> None:
    entries = large_world.block_entries(MANY, 0)
    for field, value in change.items():
        entries[field][7] = value
    answer = large_world.ask(Op.RETRIEVE, entries)
    assert statuses(answer) == [Status.OK] * 7 + [expected] + [Status.OK] * 32
    assert bytes(large_world.client.view[8 * SLOT_BYTES :][:6000]) == content(MANY[8], 6000)


def test_large_batches_with_destinations_in_any_order(large_world: World) -> None:
    places = [i * SLOT_BYTES for i in range(40)][::-1]
    answer = large_world.ask(Op.RETRIEVE, large_world.block_entries(MANY, 6000, at=places))
    assert statuses(answer) == [Status.OK] * 40
    assert bytes(large_world.client.view[:6000]) == content(MANY[39], 6000)
    places[3] = places[2]
    answer = large_world.ask(Op.RETRIEVE, large_world.block_entries(MANY, 6000, at=places))
    assert statuses(answer)[2:4] == [Status.OK, Status.OVERLAP]


def test_a_large_batch_that_waits_for_the_send_queue_is_not_written_after_its_deadline(large_world: World) -> None:
    large_world.hold_fabric = True
    first = [large_world.submit(Op.RETRIEVE, large_world.block_entries(MANY, 0)) for _ in range(25)]
    late = large_world.submit(Op.RETRIEVE, large_world.block_entries(MANY, 0), deadline_us=1000)
    large_world.pass_ms(1)
    assert statuses(large_world.answer(late)) == [Status.DEADLINE] * 40
    large_world.client.view[:] = bytes(len(large_world.client.view))
    while large_world.held:
        large_world.release_fabric()
    assert all(statuses(large_world.answer(request)) == [Status.OK] * 40 for request in first)
    assert large_world.engine.stats()[StatId.FRAMES_BUSY] == 0
