"""Serving leaves nothing to the cyclic garbage collector, which then has no reason to look at everything there is."""

from __future__ import annotations

import gc
from collections.abc import Iterator

import pytest

from common.wire import Flags, Op
from dpu_app import garbage
from dpu_app.garbage import IN_FLIGHT_MAX, GarbageCollection
from tests.unit.dpu_app.regions.engine_world import SLOT_BYTES, World, key


@pytest.fixture
def collection() -> Iterator[GarbageCollection]:
    before = gc.get_threshold()
    collection = GarbageCollection()
    yield collection
    collection.close()
    assert gc.get_threshold() == before


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


def test_old_objects_are_looked_at_only_while_little_is_under_way(
    collection: GarbageCollection, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(garbage, "OLD_COLLECTIONS", 1)
    old = 0

    def collected(phase: str, info: dict[str, int]) -> None:
        nonlocal old
        old += phase == "start" and info["generation"] == 2

    gc.callbacks.append(collected)
    try:
        collection.tick(0)
        kept: list[list[int]] = []
        while gc.get_count()[2] < 1:
            kept.append([len(kept)])
        assert old == 0  # not by themselves, however many objects come
        collection.tick(IN_FLIGHT_MAX + 1)
        assert old == 0
        collection.tick(IN_FLIGHT_MAX)
        assert old == 1
        collection.tick(0)
        assert old == 1
    finally:
        gc.callbacks.remove(collected)


def test_collections_by_themselves_never_look_at_old_objects(collection: GarbageCollection) -> None:
    del collection
    old = 0

    def collected(phase: str, info: dict[str, int]) -> None:
        nonlocal old
        old += phase == "start" and info["generation"] == 2

    gc.callbacks.append(collected)
    try:
        kept = [[number] for number in range(300_000)]
        assert len(kept) == 300_000
        assert old == 0
    finally:
        gc.callbacks.remove(collected)
