"""Messages of emu-shm: what travels by the ring and what by the socket, and that owners who poll are not rung for."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from doca_shims.api import Completion, QueueLimits
from doca_shims.contract_harness import FabricHarness, Pair, collect, statuses, wait_readable
from emulator import fabric_shm, fabric_shm_pages
from emulator.fabric_shm_connection import ShmConnection
from emulator.fabric_shm_pages import IN_SOCKET, RING_BYTES, SLOTS


@pytest.fixture(params=["native", "python"])
def pair(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Pair]:
    if request.param == "python":
        monkeypatch.setattr(fabric_shm_pages, "NATIVE", None)
    elif fabric_shm_pages.NATIVE is None:
        pytest.skip("the native module is not built")
    path = str(tmp_path / "s.sock")
    harness = FabricHarness("emu-shm", {}, lambda: fabric_shm.create({}), lambda: path, 5.0)
    with Pair(harness, QueueLimits(max_recv_wr=16)) as made:
        yield made


def _of(connection: object) -> ShmConnection:
    assert isinstance(connection, ShmConnection)
    return connection


def _rings(connection: ShmConnection) -> int:
    """How often its bell was rung since the last look at it."""
    try:
        return os.eventfd_read(connection._event)
    except BlockingIOError:
        return 0


def _look(connection: ShmConnection) -> list[Completion]:
    found: list[Completion] = []
    while not found:
        found = connection.poll(arm=False)
    return found


def test_owners_that_poll_are_not_rung_for(pair: Pair) -> None:
    a, b = _of(pair.a.connection), _of(pair.b.connection)
    for connection in (a, b):
        assert connection.poll(arm=False) == []
        assert _rings(connection) == 0
    for turn in range(20):
        for here, there, taker in ((pair.a, pair.b, b), (pair.b, pair.a, a)):
            taker.post_recv([there.recv(turn, 0, 64)])
            here.connection.post_send([here.send(turn, 0, 8)])
            assert statuses(_look(taker) + _look(_of(here.connection))) == [0, 0]
    assert _rings(a) == _rings(b) == 0


def test_an_owner_that_sleeps_is_rung_for_once_and_not_again_while_it_is_busy(pair: Pair) -> None:
    a, b = pair.a, _of(pair.b.connection)
    b.post_recv([pair.b.recv(i, 64 * i, 64) for i in range(8)])
    assert b.poll() == []
    for index in range(4):
        a.connection.post_send([a.send(index, 0, 8)])
    assert _rings(b) == 1
    os.eventfd_write(b._event, 1)
    assert len(b.poll(2)) == 2
    a.connection.post_send([a.send(4, 0, 8)])
    assert wait_readable(b.fileno(), 0)
    assert len(collect(b, 3)) == 3
    assert not wait_readable(b.fileno(), 0) or b.poll() == []
    assert b.poll() == []
    assert not wait_readable(b.fileno(), 0)


def test_the_ring_is_used_from_the_start_again_once_it_is_empty_and_the_socket_where_it_is_full(pair: Pair) -> None:
    a, b = pair.a, pair.b
    big = RING_BYTES // 2 + 64
    quads = _of(b.connection).page.quads
    b.connection.post_recv([b.recv(i, 0, RING_BYTES) for i in range(5)])
    a.connection.post_send([a.send(0, 0, big), a.send(1, 0, big), a.send(2, 0, 64)])
    places = [quads[SLOTS + number] >> 32 for number in range(3)]
    assert places == [0, IN_SOCKET, big]
    assert [c.byte_count for c in collect(b.connection, 3)] == [big, big, 64]
    a.connection.post_send([a.send(3, 0, RING_BYTES), a.send(4, 0, 0)])
    assert [quads[SLOTS + number] >> 32 for number in (3, 4)] == [0, RING_BYTES]
    assert [c.byte_count for c in collect(b.connection, 2)] == [RING_BYTES, 0]
    assert statuses(collect(a.connection, 5)) == [0] * 5


def test_messages_in_the_ring_outlive_their_sender(pair: Pair) -> None:
    a, b = pair.a, pair.b
    b.connection.post_recv([b.recv(i, 4096 * i, 4096) for i in range(3)])
    a.memory.view[:2] = b"ok"
    a.connection.post_send([a.send(0, 0, 2), a.send(1, 0, 1)])
    a.connection.close()
    done = collect(b.connection, 3)
    assert [(c.wr_id, c.status == 0) for c in done] == [(0, True), (1, True), (2, False)]
    assert bytes(b.memory.view[:2]) == b"ok"
