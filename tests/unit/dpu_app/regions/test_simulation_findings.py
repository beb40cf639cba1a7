"""Faults of the engine that the seeded simulation found, each held by the shortest story that shows it."""

from __future__ import annotations

from common.status import Status
from tests.unit.dpu_app.regions.engine_world import World, content, key


def _full_world() -> tuple[World, list[bytes]]:
    """A region whose every slot holds a block, least recently used first."""
    world = World(frames=16)
    keys = [key(number) for number in range(world.slots)]
    for start in range(0, len(keys), 4):
        assert world.store(keys[start : start + 4]) == [Status.OK] * 4
    return world, keys


def test_a_block_that_a_batch_finds_is_not_evicted_by_the_same_batch() -> None:
    world, keys = _full_world()
    assert world.store([key(1000), keys[0]]) == [Status.OK, Status.EXISTS]
    assert world.retrieve([keys[0], key(1000)]) == [content(keys[0]), content(key(1000))]
    for number in range(2000, 2200):
        assert world.store([key(number)]) == [Status.OK]
    assert world.engine.slots_accounted() == world.slots
