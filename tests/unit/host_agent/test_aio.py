"""The asyncio face: the same answers, a loop that is never blocked, and cancelled calls whose memory is free."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import numpy as np
import pytest
import pytest_asyncio

from common import wire
from common.status import Status
from common.wire import Op
from host_agent.aio import AsyncClient
from tests.unit.host_agent.conftest import MakeDpu
from tests.unit.host_agent.scripted_dpu import ScriptedDpu, ScriptedRegion, Silence, key, record

BLOCK = 4096
KEYS = [key(number) for number in range(20)]


@pytest.fixture
def dpu(make_dpu: MakeDpu) -> ScriptedDpu:
    return make_dpu(regions=2)


@pytest_asyncio.fixture
async def client(dpu: ScriptedDpu) -> AsyncIterator[AsyncClient]:
    async with await AsyncClient.open([dpu.address], tenant="acme", timeout_s=10.0) as client:
        yield client


async def test_blocks_come_back(client: AsyncClient) -> None:
    namespace = await client.namespace(record())
    source, target = client.allocate(20 * BLOCK), client.allocate(20 * BLOCK)
    source.array()[:] = np.random.default_rng(3).integers(0, 256, 20 * BLOCK, np.uint8)
    assert (await client.store(namespace, KEYS, source.blocks(np.arange(20), BLOCK), verify=True)).all_ok
    assert (await client.lookup(namespace, KEYS)).prefix_blocks == 20
    assert (await client.retrieve(namespace, KEYS, target.blocks(np.arange(20), BLOCK), verify=True)).all_ok
    assert bytes(source.view) == bytes(target.view)
    assert (await client.prefetch(namespace, KEYS)).all_ok
    assert (await client.touch(namespace, KEYS[:1])).all_ok
    assert (await client.delete(namespace, KEYS)).all_ok
    assert sum(stats[wire.StatId.SLOTS_USED] for stats in (await client.stat()).values()) == 0


async def test_many_calls_at_once(client: AsyncClient) -> None:
    namespace = await client.namespace(record())
    source = client.allocate(20 * BLOCK)

    async def one(number: int) -> bool:
        results = await client.store(namespace, KEYS[number : number + 1], source.blocks([number], BLOCK))
        found = await client.lookup(namespace, KEYS[number : number + 1])
        return results.all_ok and found.prefix_blocks == 1

    assert all(await asyncio.gather(*(one(number) for number in range(20))))


async def test_a_silent_region_does_not_block_the_loop(client: AsyncClient, dpu: ScriptedDpu) -> None:
    namespace = await client.namespace(record())

    def silent(_region: ScriptedRegion, _capsule: wire.Capsule) -> Any:
        raise Silence

    for region in dpu.regions:
        region.script = silent
    task = asyncio.create_task(client.lookup(namespace, KEYS, timeout_s=0.3))
    turns = 0
    while not task.done():
        await asyncio.sleep(0.01)
        turns += 1
    assert turns > 3
    assert {Status(int(status)) for status in task.result().status} <= {Status.DEADLINE, Status.DISCONNECTED}


async def test_a_cancelled_call_ends_when_the_dpu_has_let_go(client: AsyncClient, dpu: ScriptedDpu) -> None:
    namespace = await client.namespace(record())
    held: list[tuple[ScriptedRegion, wire.Capsule]] = []
    cancelled: list[int] = []

    def script(region: ScriptedRegion, capsule: wire.Capsule) -> Any:
        peer = next(iter(region._peers.values()))
        if capsule.op is Op.RETRIEVE:
            held.append((region, capsule))
            raise Silence
        if capsule.op is Op.CANCEL:
            for request_id in capsule.entries["request_id"].tolist():
                request = next(c for r, c in held if r is region and c.request_id == request_id)
                answers = np.zeros(len(request.entries), wire.RESULT)
                answers["status"] = Status.CANCELLED
                cancelled.append(request_id)
                peer.respond(request, answers)
        return None

    for region in dpu.regions:
        region.script = script
    target = client.allocate(20 * BLOCK)
    task = asyncio.create_task(client.retrieve(namespace, KEYS, target.blocks(np.arange(20), BLOCK)))
    while len(held) < 2:
        await asyncio.sleep(0.01)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert len(cancelled) == 2
    assert all(region.link.up for region in client.regions)
