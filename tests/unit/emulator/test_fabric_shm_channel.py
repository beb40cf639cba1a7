"""The native module of emu-shm against plain Python: tables of regions here and there, and how far a batch goes."""

from __future__ import annotations

import gc
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from doca_shims.api import RDMA_REQUEST, Access, Opcode, QueueLimits
from doca_shims.contract_harness import FabricHarness, Pair, collect, statuses
from emulator import fabric_shm, fabric_shm_pages
from emulator.fabric_shm_connection import ShmConnection

_native: Any = fabric_shm_pages.NATIVE
pytestmark = pytest.mark.skipif(_native is None, reason="the native module is not built")


@pytest.fixture
def pair(tmp_path: Path) -> Iterator[Pair]:
    path = str(tmp_path / "s.sock")
    harness = FabricHarness("emu-shm", {}, lambda: fabric_shm.create({}), lambda: path, 5.0)
    with Pair(harness, QueueLimits(max_send_wr=4096)) as made:
        yield made


def _channel(pair: Pair) -> Any:
    connection = pair.a.connection
    assert isinstance(connection, ShmConnection)
    return connection._channel


def _empty(lkey: int, address: int) -> bytes:
    """A request of no bytes, which is done where its local memory is good, whatever the remote is."""
    return RDMA_REQUEST.pack(address, 0, 0, lkey, 0, 0)


def test_layouts_agree() -> None:
    assert _native.LAYOUT == fabric_shm_pages.LAYOUT
    assert RDMA_REQUEST.size == 32


def test_the_table_of_regions_is_as_good_as_a_dictionary(pair: Pair) -> None:
    """Keys that crowd in few places, added and removed at random."""
    dice = random.Random(3)
    regions = _native.Regions()
    channel = _native.Channel(regions, 0, 1, 0, -1, 0, -1)  # addresses that requests of no bytes never touch
    known: dict[int, tuple[int, bool]] = {}
    keys = [dice.randrange(1, 40) << 8 | dice.randrange(4) for _ in range(120)] + [
        dice.getrandbits(32) for _ in range(80)
    ]
    for turn in range(4000):
        key = dice.choice(keys)
        if dice.random() < (0.7 if turn % 1000 < 500 else 0.3):
            known[key] = (dice.randrange(1 << 40), dice.random() < 0.5)
            regions.add(key, known[key][0], 4096, known[key][1])
        else:
            known.pop(key, None)
            regions.remove(key)
        for probe in (key, dice.choice(keys)):
            address, writable = known.get(probe, (0, False))
            for write, good in ((True, probe in known), (False, writable)):
                assert channel.transfer(_empty(probe, address + 4096), 0, write) == good
                assert channel.transfer(_empty(probe, address + 4097), 0, write) == 0
                assert address == 0 or channel.transfer(_empty(probe, address - 1), 0, write) == 0


def test_no_region_is_added_whose_end_is_none() -> None:
    regions = _native.Regions()
    for arguments in ((0, 1, 1, True), (1, (1 << 64) - 1, 2, True)):
        with pytest.raises(ValueError, match="no region"):
            regions.add(*arguments)


def test_a_batch_goes_as_far_as_it_is_plain(pair: Pair) -> None:
    a, b = pair.a, pair.b
    channel = _channel(pair)
    remote, rkey = b.at(0)
    good = RDMA_REQUEST.pack(a.memory.address, remote, 64, a.region.lkey, rkey, 0)
    assert channel.transfer(good * 200, 0, True) == 0, "nothing was learned yet"
    a.connection.post_rdma(1, Opcode.RDMA_WRITE, good)
    assert statuses(collect(a.connection, 1)) == [0]
    bad = RDMA_REQUEST.pack(a.memory.address, remote, 64, a.region.lkey, rkey ^ 1, 0)
    for place in (0, 1, 63, 64, 65, 128, 199):
        batch = good * place + bad + good * (199 - place)
        assert channel.transfer(batch, 0, True) == place
        assert channel.transfer(batch, place + 1, True) == 200
    assert channel.transfer(good * 200, 0, False) == 200
    assert channel.count(good * 200) == 200
    assert channel.count(good[:-1]) == channel.count(b"") == channel.count(good[:-1] + b"\1") == 0
    channel.forget()
    assert channel.transfer(good, 0, True) == 0
    for index in (-1, 7):
        assert channel.transfer(good, index, True) == index


def test_more_regions_than_are_remembered_are_all_found(pair: Pair) -> None:
    a, b = pair.a, pair.b
    count = 900
    regions = [b.pd.register(b.memory.address + 64 * i, 64, b.region.access) for i in range(count)]
    a.memory.view[: 64 * count] = random.Random(5).randbytes(64 * count)
    batch = b"".join(
        RDMA_REQUEST.pack(a.memory.address + 64 * i, region.address, 64, a.region.lkey, region.rkey, 0)
        for i, region in enumerate(regions)
    )
    for _ in range(2):
        b.memory.view[: 64 * count] = bytes(64 * count)
        a.connection.post_rdma(1, Opcode.RDMA_WRITE, batch)
        assert statuses(collect(a.connection, 1)) == [0]
        assert b.memory.view[: 64 * count] == a.memory.view[: 64 * count]
    for region in regions:
        region.close()


def test_arguments_of_another_kind_are_refused_or_declined(pair: Pair) -> None:
    channel = _channel(pair)
    wrong: tuple[Any, ...]
    for wrong in ((), (b"", 0), (b"", 0, True, 1), (None, 0, True), (b"", "0", True)):
        with pytest.raises(TypeError):
            channel.transfer(*wrong)
    for wrong in ((), (0, 0, 0, 0), (0, 0, 0, 0, "1")):
        with pytest.raises(TypeError):
            channel.send(*wrong)
    assert channel.send(0, 0, -1, 8, 1) == channel.send(0, 0, 1 << 70, 8, 1) == -1
    assert channel.receive(0, pair.a.memory.address, -5, pair.a.region.lkey) == -1
    with pytest.raises(TypeError):
        _native.Channel(object(), 0, 0, 0, 0, 0, 0)
    for wrong in ((1, fabric_shm_pages.TABLE_SLOTS, 1, 0, 9, 7, 0), (1, 0, 1, 9, 0, 7, 0), (2, 0, 1, 0, 9, 7, 0)):
        with pytest.raises(ValueError, match="no region"):
            channel.learn(*wrong)


def test_a_closed_connections_channel_touches_nothing(pair: Pair) -> None:
    a, b = pair.a, pair.b
    channel = _channel(pair)
    remote, rkey = b.at(0)
    good = RDMA_REQUEST.pack(a.memory.address, remote, 64, a.region.lkey, rkey, 0)
    b.connection.post_recv([b.recv(1, 0, 64)])
    a.connection.post_rdma(1, Opcode.RDMA_WRITE, good)
    a.connection.close()
    assert channel.transfer(good, 0, True) == 0
    assert channel.send(0, 0, a.memory.address, 8, a.region.lkey) == -1
    assert channel.receive(0, a.memory.address, 8, a.region.lkey) == -1
    gc.collect()


def test_read_only_regions_take_no_read(pair: Pair) -> None:
    a, b = pair.a, pair.b
    region = a.pd.register(a.memory.address, 64, Access(0))
    channel = _channel(pair)
    remote, rkey = b.at(0)
    request = RDMA_REQUEST.pack(region.address, remote, 64, region.lkey, rkey, 0)
    a.connection.post_rdma(1, Opcode.RDMA_WRITE, request)
    assert statuses(collect(a.connection, 1)) == [0]
    assert channel.transfer(request, 0, True) == 1
    assert channel.transfer(request, 0, False) == 0
    region.close()
    assert channel.transfer(request, 0, True) == 0
