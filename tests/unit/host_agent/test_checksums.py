"""Checksums capsule by capsule: compared while others still travel, claimed while others are on their way."""

from __future__ import annotations

import threading
from typing import Any

import numpy as np
import pytest

from common import wire
from common.status import Status
from common.wire import Op
from host_agent import checksums
from host_agent.checksums import Checksums
from host_agent.client import Client
from host_agent.link import RegionLink
from host_agent.memory import RegisteredMemory
from tests.unit.host_agent.conftest import MakeClient, MakeDpu
from tests.unit.host_agent.scripted_dpu import ScriptedRegion, key, record

BLOCK = 4096
KEYS = [key(number) for number in range(12)]
WAIT_S = 20.0


pytestmark = pytest.mark.usefixtures("both_ways", "four_blocks_a_capsule")


@pytest.fixture
def four_blocks_a_capsule(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checksums, "CAPSULE_BYTES", 4 * BLOCK)


def _filled(client: Client, blocks: int) -> RegisteredMemory:
    memory = client.allocate(blocks * BLOCK)
    memory.array()[:] = np.random.default_rng(1).integers(0, 256, blocks * BLOCK, np.uint8)
    return memory


def _capsules(region: ScriptedRegion, op: Op) -> list[list[bytes]]:
    return [[wire.key_bytes(entry) for entry in c.entries] for c in region.seen if c.op is op]


def _answer(region: ScriptedRegion, capsule: wire.Capsule) -> Any:
    return region.answer(next(iter(region._peers.values())), capsule)


def test_one_region_gets_several_capsules_where_checksums_are_wanted(
    make_dpu: MakeDpu, make_client: MakeClient
) -> None:
    dpu = make_dpu()
    client = make_client(dpu)
    namespace = client.namespace(record())
    source, target = _filled(client, 12), client.allocate(12 * BLOCK)
    places = range(12)
    assert client.store(namespace, KEYS, source.blocks(places, BLOCK), verify=True).all_ok
    assert client.retrieve(namespace, KEYS, target.blocks(places, BLOCK), verify=True).all_ok
    assert bytes(source.view) == bytes(target.view)
    parts = [KEYS[:4], KEYS[4:8], KEYS[8:]]
    assert _capsules(dpu.regions[0], Op.STORE) == _capsules(dpu.regions[0], Op.RETRIEVE) == parts
    assert client.retrieve(namespace, KEYS, target.blocks(places, BLOCK), verify=False).all_ok
    assert client.retrieve(namespace, KEYS[:7], target.blocks(range(7), BLOCK), verify=True).all_ok
    assert _capsules(dpu.regions[0], Op.RETRIEVE)[3:] == [KEYS, KEYS[:7]]


def test_what_came_is_compared_while_the_rest_is_not_there_yet(
    make_dpu: MakeDpu, make_client: MakeClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The region answers the second capsule only once the first one's blocks were compared."""
    dpu = make_dpu()
    client = make_client(dpu, timeout_s=2 * WAIT_S)
    namespace = client.namespace(record())
    memory = _filled(client, 8)
    assert client.store(namespace, KEYS[:8], memory.blocks(range(8), BLOCK)).all_ok
    compared = threading.Event()
    in_time: list[bool] = []
    step = Checksums.step

    def noted(self: Checksums) -> bool:
        did = step(self)
        if did:
            compared.set()
        return did

    def script(region: ScriptedRegion, capsule: wire.Capsule) -> Any:
        if wire.key_bytes(capsule.entries[0]) == KEYS[4]:
            in_time.append(compared.wait(WAIT_S))
        return _answer(region, capsule)

    monkeypatch.setattr(Checksums, "step", noted)
    dpu.regions[0].script = script
    assert client.retrieve(namespace, KEYS[:8], memory.blocks(range(8), BLOCK), verify=True).all_ok
    assert in_time == [True]


def test_a_store_goes_out_before_the_next_ones_checksums_are_computed(
    make_dpu: MakeDpu, make_client: MakeClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    client = make_client(make_dpu(), make_dpu())
    namespace = client.namespace(record())
    memory = _filled(client, 12)
    order: list[str] = []
    seal, submit = Checksums.seal, RegionLink.submit

    def sealed(self: Checksums, request: Any) -> None:
        order.append("seal")
        seal(self, request)

    def submitted(self: RegionLink, requests: Any, grants: Any) -> None:
        order.append("submit")
        submit(self, requests, grants)

    monkeypatch.setattr(Checksums, "seal", sealed)
    monkeypatch.setattr(RegionLink, "submit", submitted)
    assert client.store(namespace, KEYS, memory.blocks(range(12), BLOCK), verify=True).all_ok
    assert order == ["seal", "submit"] * (len(order) // 2)
    assert len(order) >= 4


@pytest.mark.parametrize("scattered", [False, True])
@pytest.mark.parametrize("dpus", [1, 2])
def test_every_corrupt_block_is_noticed_and_no_other(
    make_dpu: MakeDpu, make_client: MakeClient, dpus: int, scattered: bool
) -> None:
    made = [make_dpu() for _ in range(dpus)]
    client = make_client(*made)
    namespace = client.namespace(record())
    source, target = _filled(client, 12), client.allocate(12 * BLOCK)
    assert client.store(namespace, KEYS, source.blocks(range(12), BLOCK), verify=True).all_ok
    wrong = {KEYS[1], KEYS[5], KEYS[6], KEYS[11]}
    missing = KEYS[7]

    def lie(region: ScriptedRegion, capsule: wire.Capsule) -> Any:
        answers = _answer(region, capsule)
        for entry, answer in zip(capsule.entries, answers):
            if wire.key_bytes(entry) in wrong:
                answer["checksum"] ^= np.uint64(1 << 63)
            if wire.key_bytes(entry) == missing:
                answer["status"] = Status.MISS
        return answers

    for dpu in made:
        dpu.regions[0].script = lie
    view = target.view
    places: Any = target.blocks(range(12), BLOCK)
    if scattered:
        places = [[view[n * BLOCK : n * BLOCK + 100], view[n * BLOCK + 100 : (n + 1) * BLOCK]] for n in range(12)]
    results = client.retrieve(namespace, KEYS, places, verify=True)
    expected = [Status.CORRUPT if key in wrong else Status.MISS if key == missing else Status.OK for key in KEYS]
    assert results.status.tolist() == expected


def test_a_stated_length_beyond_the_destination_is_corrupt(make_dpu: MakeDpu, make_client: MakeClient) -> None:
    dpu = make_dpu()
    client = make_client(dpu)
    namespace = client.namespace(record())
    memory = _filled(client, 2)
    assert client.store(namespace, KEYS[:2], memory.blocks(range(2), BLOCK)).all_ok

    def lie(region: ScriptedRegion, capsule: wire.Capsule) -> Any:
        answers = _answer(region, capsule)
        answers["length"][0] += 1
        return answers

    dpu.regions[0].script = lie
    results = client.retrieve(namespace, KEYS[:2], memory.blocks(range(2), BLOCK), verify=True)
    assert results.status.tolist() == [Status.CORRUPT, Status.OK]


def test_a_source_that_changes_under_a_store_is_refused_by_the_dpu(
    make_dpu: MakeDpu, make_client: MakeClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The claim in each capsule is that of its own blocks."""
    client = make_client(make_dpu(regions=2))
    namespace = client.namespace(record())
    memory = _filled(client, 12)
    seal = Checksums.seal
    sealed_blocks: list[int] = []

    def sealed(self: Checksums, request: Any) -> None:
        seal(self, request)
        sealed_blocks.append(request.count)
        memory.view[self._operation.blocks(request)[0] * BLOCK] ^= 1

    monkeypatch.setattr(Checksums, "seal", sealed)
    results = client.store(namespace, KEYS, memory.blocks(range(12), BLOCK), verify=True)
    assert set(results.status.tolist()) == {Status.OK, Status.CHECKSUM}
    assert results.status.tolist().count(Status.CHECKSUM) == len(sealed_blocks) >= 2
