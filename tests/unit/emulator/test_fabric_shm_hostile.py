"""A peer that writes garbage into the shared pages of emu-shm, with native code and without: it may lose its own
messages and end its own connection; no byte lands outside what it was given, and nothing crashes."""

from __future__ import annotations

import os
import random
import select
from collections.abc import Iterator
from pathlib import Path

import pytest

from doca_shims.api import RDMA_REQUEST, ConnectionState, Opcode, WcStatus
from doca_shims.contract_harness import FabricHarness, Pair, collect, statuses
from emulator import fabric_shm, fabric_shm_pages
from emulator.fabric_shm_connection import ShmConnection
from emulator.fabric_shm_pages import (
    ARMED,
    GIVEN,
    IN_SOCKET,
    POSTED,
    POSTED_SIZES,
    RECEIVED,
    RING_BYTES,
    RING_SLOTS,
    SENT,
    SHARED,
    SLOTS,
    TABLE_SLOTS,
    WORDS,
    ControlPage,
    RegionTable,
)

_ROWS = WORDS + TABLE_SLOTS
_ROW_QUADS = 6


@pytest.fixture(params=["native", "python"])
def pair(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Pair]:
    if request.param == "python":
        monkeypatch.setattr(fabric_shm_pages, "NATIVE", None)
    elif fabric_shm_pages.NATIVE is None:
        pytest.skip("the native module is not built")
    path = str(tmp_path / "s.sock")
    harness = FabricHarness("emu-shm", {}, lambda: fabric_shm.create({}), lambda: path, 5.0)
    with Pair(harness, recvs=4) as made:
        yield made


def _page(connection: object) -> ControlPage:
    assert isinstance(connection, ShmConnection)
    return connection.page


def _table(connection: object) -> RegionTable:
    assert isinstance(connection, ShmConnection)
    table = connection._domain._table
    assert isinstance(table, RegionTable)
    return table


def _forge_message(page: ControlPage, place: int, size: int) -> None:
    page.quads[SLOTS] = place << 32 | size
    page.words[SENT] = 1


@pytest.mark.parametrize(
    ("place", "size"),
    [
        (RING_BYTES, 1),
        (RING_BYTES - 10, 11),
        (0, RING_BYTES + 1),
        (0xFFFFFFFE, 2),
        (64, 0xFFFFFFFF),
        (IN_SOCKET - 1, 0),
    ],
)
def test_a_message_outside_the_ring_ends_the_connection(pair: Pair, place: int, size: int) -> None:
    before = bytes(pair.b.memory.view)
    _forge_message(_page(pair.b.connection), place, size)
    done = collect(pair.b.connection, 4)
    assert set(statuses(done)) == {WcStatus.WR_FLUSH_ERR}
    assert pair.b.connection.state == ConnectionState.ERROR
    assert bytes(pair.b.memory.view) == before


def test_a_message_longer_than_the_receive_touches_nothing(pair: Pair) -> None:
    before = bytes(pair.b.memory.view)
    _forge_message(_page(pair.b.connection), 0, 4097)
    assert statuses(collect(pair.b.connection, 4)) == [WcStatus.LOC_LEN_ERR, *[WcStatus.WR_FLUSH_ERR] * 3]
    assert bytes(pair.b.memory.view) == before


@pytest.mark.parametrize("sent", [RING_SLOTS + 1, 0x80000000, 0xFFFFFFFF])
def test_a_count_that_cannot_be_is_no_message(pair: Pair, sent: int) -> None:
    _page(pair.b.connection).words[SENT] = sent
    for _ in range(3):
        assert pair.b.connection.poll() == []
        assert pair.b.connection.poll(arm=False) == []
    assert pair.b.connection.state == ConnectionState.READY


def test_an_announced_message_that_never_comes_by_the_socket_is_waited_for_without_end(pair: Pair) -> None:
    _forge_message(_page(pair.b.connection), IN_SOCKET, 10)
    for _ in range(3):
        assert pair.b.connection.poll() == []
    pair.a.connection.close()
    assert statuses(collect(pair.b.connection, 4)) == [WcStatus.WR_FLUSH_ERR] * 4


def test_bells_rung_for_nothing_are_silenced(pair: Pair) -> None:
    b = pair.b.connection
    assert isinstance(b, ShmConnection)
    assert b.poll() == []
    os.eventfd_write(b._event, 1)  # as a peer that lags behind its own flag does
    assert b.poll() == []
    assert b.poll() == []
    assert not _readable(b)
    _page(b).words[ARMED] = 0  # and one that takes the flag and never rings
    assert b.poll() == []
    assert _page(b).words[ARMED] == 1


def _readable(connection: ShmConnection) -> bool:
    return bool(select.select([connection.fileno()], [], [], 0)[0])


def test_receives_that_were_never_posted_do_not_reach_outside_the_ring(pair: Pair) -> None:
    """The peer counts receives and takes nothing: messages fill the ring, then the socket, then wait."""
    a = pair.a
    page = _page(pair.b.connection)
    after = bytes(pair.b.memory.view)
    page.words[POSTED] = 1 << 20
    for index in range(RING_SLOTS):
        page.words[POSTED_SIZES + index] = 0xFFFFFFFF
    for _ in range(300):
        a.connection.post_send([a.send(1, 0, 4096)])
        page.words[RECEIVED] = random.Random(1).getrandbits(32)
        a.connection.poll()
    a.connection.post_send([a.send(2, 0, 4096)])
    assert a.connection.state == ConnectionState.READY
    assert bytes(pair.b.memory.view) == after


def test_rows_that_point_outside_their_memory_are_not_followed(pair: Pair) -> None:
    """A row with another place in the memfd, or more bytes than that has: reached by the kernel, which checks."""
    a, b = pair.a, pair.b
    table = _table(b.connection)
    row = _ROWS
    address, length, _, _, _, memory = table.quads[row : row + _ROW_QUADS].tolist()
    a.connection.post_rdma(0, Opcode.RDMA_WRITE, _write(pair, 0))
    assert statuses(collect(a.connection, 1)) == [0]
    for index, value in ((5, memory - (1 << 30)), (5, memory + (1 << 30)), (1, 1 << 40), (0, address + (1 << 35))):
        old = table.quads[row + index]
        table.quads[row + index] = value
        word = table.quads[WORDS]
        table.quads[WORDS] = word ^ 1  # a new key, as a new region has: the row is read again
        bad = table.quads[row]
        request = RDMA_REQUEST.pack(a.memory.address, bad + 8, 64, a.region.lkey, (word ^ 1) & 0xFFFFFFFF, 0)
        if a.connection.state == ConnectionState.READY:
            a.connection.post_rdma(1, Opcode.RDMA_WRITE, request)
            collect(a.connection, 1)
        table.quads[WORDS] = word
        table.quads[row + index] = old
    assert b.region.length_bytes == length


@pytest.mark.parametrize("kind", [SHARED, GIVEN])
@pytest.mark.parametrize("rkey", [0, 5])
def test_rows_beyond_all_memory_are_refused_by_the_kernel(pair: Pair, kind: int, rkey: int) -> None:
    a = pair.a
    table = _table(pair.b.connection)
    first = _ROWS + 9 * _ROW_QUADS
    for index, value in enumerate(((1 << 64) - 4096, 1 << 63, 7, 0, 0, 0)):
        table.quads[first + index] = value
    table.quads[1] = 10  # the high water of the table
    table.quads[WORDS + 9] = kind | rkey
    request = RDMA_REQUEST.pack(a.memory.address, (1 << 64) - 4000, 64, a.region.lkey, rkey, 0)
    a.connection.post_rdma(1, Opcode.RDMA_WRITE, request * 2)
    assert collect(a.connection, 1)[0].status in (WcStatus.REM_OP_ERR, WcStatus.REM_ACCESS_ERR)
    table.quads[WORDS + 9] = 0


def _write(pair: Pair, offset: int) -> bytes:
    remote, rkey = pair.b.at(offset)
    return RDMA_REQUEST.pack(pair.a.memory.address, remote, 64, pair.a.region.lkey, rkey, 0)


def test_a_word_that_comes_back_after_its_memory_was_unmapped_is_not_believed(pair: Pair) -> None:
    """The peer frees memory, so that our mapping of it goes, and then makes the old key valid again."""
    a, b = pair.a, pair.b
    first, second = (pair.fabric.allocate(1 << 16) for _ in range(2))
    table = _table(b.connection)

    def write(address: int, rkey: int) -> WcStatus:
        request = RDMA_REQUEST.pack(a.memory.address, address, 64, a.region.lkey, rkey, 0)
        a.connection.post_rdma(1, Opcode.RDMA_WRITE, request)
        return collect(a.connection, 1)[0].status

    region = b.pd.register(first.address, 1 << 16, b.region.access)
    slot = table.quads[WORDS : WORDS + TABLE_SLOTS].tolist().index(region.rkey | SHARED)
    old = table.quads[WORDS + slot]
    address = first.address
    assert write(address, region.rkey) == WcStatus.SUCCESS
    region.close()
    first.close()
    other = b.pd.register(second.address, 1 << 16, b.region.access)
    assert write(second.address, other.rkey) == WcStatus.SUCCESS
    assert table.quads[WORDS + slot] == other.rkey | SHARED
    table.quads[WORDS + slot] = old
    assert write(address, region.rkey) == WcStatus.REM_ACCESS_ERR
    other.close()
    second.close()


def test_garbage_everywhere_crashes_nobody(pair: Pair) -> None:
    """Both control pages' words at random while each side sends, writes and polls."""
    dice = random.Random(7)
    pages = [_page(pair.a.connection), _page(pair.b.connection)]
    around = bytes(pair.b.memory.view[32768:])
    for turn in range(400):
        page = pages[turn % 2]
        word = dice.choice((POSTED, RECEIVED, SENT, ARMED, POSTED_SIZES + dice.randrange(8)))
        page.words[word] = dice.choice((0, 1, 2, 5, dice.getrandbits(32)))
        page.quads[SLOTS + dice.randrange(8)] = dice.getrandbits(64)
        for side in (pair.a, pair.b):
            if side.connection.state == ConnectionState.READY:
                side.connection.post_send([side.send(1, 0, dice.randrange(5000))])
            side.connection.poll()
            side.connection.poll(arm=False)
    assert bytes(pair.b.memory.view[32768:]) == around
