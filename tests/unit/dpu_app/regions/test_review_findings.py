"""Faults found by reading the engine, each held by the shortest story that shows it."""

from __future__ import annotations

import pytest

from common.status import Status
from common.wire import Flags, Op, StatId
from dpu_app.regions.context import EngineSettings
from emulator.sim_flash import NO_FAULTS, FaultPlan
from tests.unit.dpu_app.regions.engine_world import World, key, statuses

pytestmark = pytest.mark.usefixtures("both_ways")


def test_a_hint_is_late_only_where_flash_reads_already() -> None:
    keys = [key(number) for number in range(4)]
    world = World(frames=8)
    for name in keys:
        assert world.store([name], flags=Flags.UNTIL_FLASH) == [Status.OK]
    world.restart(clean=True)
    world.engine._context.queue._depth = 1
    request = world.submit(Op.PREFETCH, world.block_entries(keys, 0, sge_count=0), deadline_us=1000)
    world.pass_ms(1)
    assert statuses(world.answer(request)) == [Status.LATE] + [Status.DROPPED] * 3
    world.settle()
    assert len(world.window.frame_of) == 1


def test_a_table_page_that_flash_refused_is_written_by_the_next_clean_stop() -> None:
    keys = [key(number) for number in range(4)]
    world = World()
    assert set(world.store(keys, flags=Flags.UNTIL_FLASH)) == {Status.OK}
    world.flash.plan = FaultPlan(enospc=1.0)  # nothing is written
    assert statuses(world.ask(Op.DELETE, world.key_entries(keys[:1]))) == [Status.FLASH_ERROR]
    world.flash.plan = NO_FAULTS
    world.restart(clean=True)
    assert world.lookup(keys) == [Status.MISS, Status.OK, Status.OK, Status.OK]


def test_a_store_that_finds_no_frame_evicts_nobody() -> None:
    world = World(slots=64, frames=16, settings=EngineSettings(leases_fraction=1.0))
    keys = [key(number) for number in range(world.slots)]
    for start in range(0, len(keys), 4):
        assert set(world.store(keys[start : start + 4])) == {Status.OK}
    leased = world.ask(Op.LEASE, world.key_entries(keys[:16], argument=10_000))
    assert statuses(leased) == [Status.OK] * 16
    assert world.store([key(1000)]) == [Status.BUSY]
    assert world.engine.stats()[StatId.EVICTIONS] == 0
    assert world.engine.slots_accounted() == world.slots
