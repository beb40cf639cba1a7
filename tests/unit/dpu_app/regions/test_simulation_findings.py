"""Faults of the engine that the seeded simulation found, each held by the shortest story that shows it."""

from __future__ import annotations

import pytest

from common.status import Status
from common.wire import Flags, Op
from dpu_app.regions.stamps import Stamps
from tests.unit.dpu_app.regions.engine_world import SLOT_BYTES, World, content, key

pytestmark = pytest.mark.usefixtures("both_ways")


def _full_world(slots: int = 64) -> tuple[World, list[bytes]]:
    """A region whose every slot holds a block, least recently used first."""
    world = World(slots=slots, frames=16)
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


@pytest.mark.parametrize("seed", range(16))
def test_a_block_that_comes_back_at_once_survives_a_crash(seed: int) -> None:
    """Evicted and stored again within a second, in another page of the slot table, while its first slot is being
    written with another block: two entries claim the block, and only the later one is true."""
    world, keys = _full_world(slots=128)
    again, other = keys[100], key(5000)
    evicted = [100, 0]  # in this order: so the block moves from slot 100 to slot 0
    rest = [name for number, name in enumerate(keys) if number not in evicted]
    for start in range(0, len(rest), 8):
        world.ask(Op.TOUCH, world.key_entries(rest[start : start + 8]))
    world.ask(Op.TOUCH, world.key_entries([keys[0]]))
    for place, name in enumerate((other, again)):
        world.client.view[place * SLOT_BYTES : (place + 1) * SLOT_BYTES] = content(name)
    world.flash._random.seed(seed)  # the order in which flash completes
    world.submit(Op.STORE, world.block_entries([other], SLOT_BYTES))
    request = world.submit(Op.STORE, world.block_entries([again], SLOT_BYTES, at=[SLOT_BYTES]), flags=Flags.UNTIL_FLASH)
    while (1, request) not in world.answers:
        world.flash_step()
    world.restart(clean=False)
    assert world.retrieve([again]) == [content(again)]


def test_a_clock_that_steps_back_does_not_put_an_old_entry_first() -> None:
    stamps = Stamps()
    first = stamps.next(1000, (1, 2, 3))
    stamps.left((1, 2, 3), first)
    assert stamps.next(400, (1, 2, 3)) > first
