"""A large request does not keep the others waiting: what is posted at a time is bounded in bytes, all is moved in the
end, and connections take turns."""

from __future__ import annotations

import pytest

from common.status import Status
from common.wire import Op
from doca_shims.api import RDMA_REQUEST
from dpu_app.regions import context, load_path, sessions, staged_batches, store_path
from dpu_app.regions.sessions import moved_by
from tests.unit.dpu_app.regions.engine_world import SLOT_BYTES, World, content, key, statuses

BLOCKS = 40


@pytest.fixture(autouse=True)
def small_bounds(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (load_path, staged_batches, store_path):
        monkeypatch.setattr(module, "TRANSFER_MOVED_MAX", 2 * SLOT_BYTES)
    monkeypatch.setattr(sessions, "IN_FLIGHT_MOVED_MAX", 6 * SLOT_BYTES)
    monkeypatch.setattr(context, "TURN_MOVED_MAX", 6 * SLOT_BYTES)


def big_world() -> tuple[World, list[bytes]]:
    world = World(slots=200, frames=64)
    keys = [key(i) for i in range(BLOCKS)]
    for start in range(0, BLOCKS, 20):
        assert world.store(keys[start : start + 20]) == [Status.OK] * 20
        world.settle()
    return world, keys


def posted(world: World) -> int:
    return sum(posting.moved for posting in world.held) // SLOT_BYTES


def complete_what_is_held(world: World) -> None:
    """And hold what is posted then."""
    held, world.held = world.held, []
    for posting in held:
        world.engine.on_fabric(posting.connection_id, world.perform(*posting[1:5]))
    unsent, world.unsent = world.unsent, []
    for connection_id in unsent:
        world.engine.on_sent(connection_id, 1)
    world.carry_out()


@pytest.mark.parametrize("op", [Op.RETRIEVE, Op.STORE])
def test_what_a_request_has_posted_is_bounded(op: Op) -> None:
    world, keys = big_world()
    if op is Op.STORE:
        keys = [key(1000 + i) for i in range(BLOCKS)]
        for i, name in enumerate(keys):
            world.client.view[i * SLOT_BYTES : (i + 1) * SLOT_BYTES] = content(name)
    world.hold_fabric = True
    request = world.submit(op, world.block_entries(keys, SLOT_BYTES))
    turns = 0
    while world.held:
        assert 0 < posted(world) <= 6
        assert all(posting.moved <= 2 * SLOT_BYTES for posting in world.held)
        complete_what_is_held(world)
        turns += 1
    assert turns == -(-BLOCKS // 6)
    assert statuses(world.answer(request)) == [Status.OK] * BLOCKS
    world.hold_fabric = False
    world.settle()
    assert world.retrieve(keys) == [content(name) for name in keys]


def test_small_requests_in_a_row_are_bounded_together() -> None:
    """Also where the hot path serves them."""
    world, keys = big_world()
    world.hold_fabric = True
    requests = [world.submit(Op.RETRIEVE, world.block_entries(keys[i : i + 2], 0)) for i in range(0, 20, 2)]
    while world.held:
        assert posted(world) <= 6
        complete_what_is_held(world)
    assert [statuses(world.answer(request)) for request in requests] == [[Status.OK] * 2] * 10


def test_a_block_larger_than_the_bound_goes_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (sessions, context):
        name = "IN_FLIGHT_MOVED_MAX" if module is sessions else "TURN_MOVED_MAX"
        monkeypatch.setattr(module, name, SLOT_BYTES // 2)
    for module in (load_path, staged_batches, store_path):
        monkeypatch.setattr(module, "TRANSFER_MOVED_MAX", SLOT_BYTES // 2)
    world, keys = big_world()
    world.hold_fabric = True
    request = world.submit(Op.RETRIEVE, world.block_entries(keys[:20], 0))
    while world.held:
        assert posted(world) == 1
        complete_what_is_held(world)
    assert statuses(world.answer(request)) == [Status.OK] * 20


def test_connections_take_turns() -> None:
    """One of them asks for more before all of its last request is through; the others do not wait for it."""
    world, keys = big_world()
    for connection_id in (2, 3):
        world.engine.open_session(connection_id, "t", {1: b"n" * 16})
        world.engine.connected(connection_id, connection_id, window_lkey=6)
    world.hold_fabric = True
    for connection_id in (1, 2, 3):
        for _ in range(3):
            world.submit(Op.RETRIEVE, world.block_entries(keys, 0), connection_id=connection_id)
    served: list[int] = []
    while world.held:
        served += [posting.connection_id for posting in world.held for _ in range(posting.moved // SLOT_BYTES)]
        complete_what_is_held(world)
    assert len(served) == 9 * BLOCKS
    for start in range(0, 3 * BLOCKS, BLOCKS):  # while all three have something to do
        counts = [served[start : start + BLOCKS].count(connection_id) for connection_id in (1, 2, 3)]
        assert max(counts) - min(counts) <= 12


def test_moved_bytes_of_packed_requests() -> None:
    assert moved_by(RDMA_REQUEST.pack(1, 2, 0xFFFFFFFF, 4, 5, 0)) == 0xFFFFFFFF
    assert moved_by(bytearray(RDMA_REQUEST.pack(1, 2, 0xFFFFFFFF, 4, 5, 0) * 3)) == 3 * 0xFFFFFFFF


def test_a_connection_that_ends_posts_no_more() -> None:
    world, _ = big_world()
    world.hold_fabric = True
    world.submit(Op.STORE, world.block_entries([key(2000 + i) for i in range(20)], SLOT_BYTES))
    world.held.clear()
    world.engine.disconnected(1)
    world.carry_out()
    assert world.held == []
    assert world.engine.slots_accounted() == world.slots
