"""Serving leaves nothing to the cyclic garbage collector, which then has no reason to look at everything there is."""

from __future__ import annotations

import gc
from collections.abc import Iterator

import pytest

from common.wire import Flags, Op
from dpu_app import garbage
from dpu_app.garbage import IN_FLIGHT_MAX, NEW_OBJECTS, TICKS, GarbageCollection
from tests.unit.dpu_app.regions.engine_world import SLOT_BYTES, World, key


@pytest.fixture
def collection() -> Iterator[GarbageCollection]:
    collection = GarbageCollection()
    yield collection
    assert not gc.isenabled()
    collection.close()
    assert gc.isenabled()


def serve(world: World) -> None:
    """A bit of everything, with evictions, cold loads, joined loads, expiry and failed requests."""
    keys = [key(i) for i in range(120)]
    for at in range(0, 120, 8):
        world.store(keys[at : at + 8], ttl_s=1 if at % 16 else 0)
        world.settle()
        world.retrieve(keys[max(0, at - 24) : at + 1])
        world.lookup(keys[: at + 8])
        world.ask(Op.PIN, world.key_entries(keys[at : at + 2], argument=1))
        world.ask(Op.LEASE, world.key_entries(keys[at : at + 2], argument=10))
        world.ask(Op.DELETE, world.key_entries(keys[at + 4 : at + 5]))
        world.ask(Op.STORE, world.block_entries(keys[at : at + 1], SLOT_BYTES), flags=Flags.UNTIL_FLASH)
        world.submit(Op.PREFETCH, world.block_entries(keys[:8], 0))
        world.submit(Op.PREFETCH, world.block_entries(keys[:8], 0), deadline_us=1)
        world.pass_ms(150)
        world.settle()
        world.engine.stats()
    world.engine.disconnected(1)
    world.engine.connected(1, 1, window_lkey=5)


def test_serving_makes_no_cycles() -> None:
    world = World(slots=64, frames=16)
    serve(world)  # what is made once
    gc.collect()
    gc.disable()
    try:
        serve(world)
        assert gc.collect() == 0
    finally:
        gc.enable()


@pytest.fixture
def collected() -> Iterator[list[int]]:
    """Generations that were collected."""
    generations: list[int] = []

    def note(phase: str, info: dict[str, int]) -> None:
        if phase == "start":
            generations.append(info["generation"])

    gc.callbacks.append(note)
    yield generations
    gc.callbacks.remove(note)


def ticks(collection: GarbageCollection, count: int, in_flight: int) -> None:
    for _ in range(count):
        collection.tick(in_flight)


def test_nothing_is_collected_by_itself(collection: GarbageCollection, collected: list[int]) -> None:
    del collection
    collected.clear()
    kept = [[number] for number in range(100_000)]
    assert len(kept) == 100_000
    assert collected == []


def test_it_is_collected_once_a_second_while_little_is_under_way(
    collection: GarbageCollection, collected: list[int]
) -> None:
    collected.clear()
    ticks(collection, 2 * TICKS, IN_FLIGHT_MAX)
    assert collected == []  # there is nothing new
    kept = [[number] for number in range(2 * NEW_OBJECTS)]
    ticks(collection, 3 * TICKS, IN_FLIGHT_MAX + 1)
    assert collected == []
    collection.tick(IN_FLIGHT_MAX)
    assert collected == [2]
    kept += [[number] for number in range(2 * NEW_OBJECTS)]
    ticks(collection, TICKS - 1, 0)
    assert collected == [2]
    collection.tick(0)
    assert collected == [2, 2]


def test_a_leak_is_collected_whatever_is_under_way(
    collection: GarbageCollection, collected: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(garbage, "LEAK_OBJECTS", 5000)
    collected.clear()
    kept = [[number] for number in range(6000)]
    ticks(collection, TICKS, 1_000_000)
    assert collected == [2]
    del kept


def test_a_request_that_was_answered_keeps_no_objects_by_entry() -> None:
    """It may be kept itself, until its deadline; a collection would look at 512 rows of each."""
    world = World(slots=200, frames=64)
    keys = [key(i) for i in range(40)]
    world.store(keys)
    world.settle()
    world.submit(Op.RETRIEVE, world.block_entries(keys, 100, 1))
    world.settle()
    world.submit(Op.STORE, world.block_entries([key(100)], SLOT_BYTES), flags=Flags.UNTIL_FLASH)
    world.engine.disconnected(1)
    kept = [batch for *_, batch in world.engine._deadlines._heap]
    assert kept
    assert all(batch.closed and "rows" not in vars(batch) and not batch.memory for batch in kept)
