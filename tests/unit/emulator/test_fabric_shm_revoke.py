"""Taking memory back in emu-shm, with the peer's moment chosen by hand: every row of the protocol's table.

The contract suite does the same with real stopped processes, which hits each moment only by chance.
"""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from doca_shims.api import ConnectionState, Opcode, WcStatus
from doca_shims.contract_harness import ALL_ACCESS, FabricHarness, Pair, collect, statuses
from emulator import fabric_shm, fabric_shm_domain, fabric_shm_initiator, fabric_shm_pages
from emulator.fabric_shm_connection import ShmConnection
from emulator.fabric_shm_pages import BASE, BUSY, IDLE, IN_KERNEL, LENGTH, READING, TARGET, WRITING
from emulator.fabric_shm_peer import Peer, process_vm_writev


@pytest.fixture
def pair(tmp_path: Path) -> Iterator[Pair]:
    path = str(tmp_path / "s.sock")
    harness = FabricHarness("emu-shm", {}, lambda: fabric_shm.create({}), lambda: path, 5.0)
    with Pair(harness) as made:
        yield made


class _Stuck:
    """The initiator of `pair`, side a, as if it stood still in the middle of a transfer to side b."""

    def __init__(self, pair: Pair, kind: int, base: int, length: int) -> None:
        connection = pair.b.connection
        assert isinstance(connection, ShmConnection)
        self.page = connection.page
        self.page.words[TARGET] = pair.b.region.rkey
        self.page.quads[BASE] = base
        self.page.quads[LENGTH] = length
        self.page.words[BUSY] = kind


@pytest.fixture
def stopped(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Peer, "may_be_copying", lambda self: False)


@pytest.mark.usefixtures("stopped")
def test_a_stopped_peers_iovec_is_emptied(pair: Pair) -> None:
    stuck = _Stuck(pair, IN_KERNEL, pair.b.memory.address, 4096)
    pair.b.region.close()
    assert stuck.page.quads[LENGTH] == 0
    assert pair.b.memory.fd is not None
    stuck.page.words[BUSY] = IDLE


def test_a_running_peer_in_the_kernel_is_waited_for(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    looks = 0

    def may_be_copying(self: Peer) -> bool:
        nonlocal looks
        looks += 1
        if looks == 3:
            stuck.page.words[BUSY] = IDLE
        return True

    monkeypatch.setattr(Peer, "may_be_copying", may_be_copying)
    stuck = _Stuck(pair, IN_KERNEL, pair.b.memory.address, 4096)
    pair.b.region.close()
    assert looks == 3


def test_a_dead_peer_is_not_waited_for(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Peer, "is_alive", lambda self: False)
    for kind in (IN_KERNEL, READING, WRITING):
        stuck = _Stuck(pair, kind, pair.b.memory.address, 4096)
        region = pair.b.pd.register(pair.b.memory.address, 4096, ALL_ACCESS)
        stuck.page.words[TARGET] = region.rkey
        region.close()
    assert pair.b.memory.fd is not None
    pair.b.connection.close()


@pytest.mark.usefixtures("stopped")
def test_a_reader_may_finish_and_nothing_is_replaced(pair: Pair) -> None:
    stuck = _Stuck(pair, READING, pair.b.memory.address, 4096)
    pair.b.region.close()
    assert pair.b.memory.fd is not None
    stuck.page.words[BUSY] = IDLE


@pytest.mark.usefixtures("stopped")
def test_a_stopped_writers_target_is_replaced_and_others_reach_the_new_pages(pair: Pair) -> None:
    a, b = pair.a, pair.b
    other = b.pd.register(b.memory.address, 65536, ALL_ACCESS)
    request = a.transfer(1, Opcode.RDMA_WRITE, (0, 4096), (b.memory.address, other.rkey))
    a.connection.post_send([request])  # side a has the memfd mapped now
    assert statuses(collect(a.connection, 1)) == [WcStatus.SUCCESS]
    stuck = _Stuck(pair, WRITING, b.memory.address + 5000, 100)
    b.region.close()
    assert b.memory.fd is None
    stuck.page.words[BUSY] = IDLE
    a.memory.view[:65536] = b"\x77" * 65536
    a.connection.post_send([a.transfer(2, Opcode.RDMA_WRITE, (0, 65536), (b.memory.address, other.rkey))])
    assert statuses(collect(a.connection, 1)) == [WcStatus.SUCCESS]
    assert bytes(b.memory.view[:65536]) == b"\x77" * 65536
    other.close()


@pytest.mark.usefixtures("stopped")
def test_a_peer_busy_elsewhere_is_let_be(pair: Pair) -> None:
    overlapping = pair.b.pd.register(pair.b.memory.address, 4096, ALL_ACCESS)
    stuck = _Stuck(pair, WRITING, pair.b.memory.address, 4096)
    overlapping.close()
    assert pair.b.memory.fd is not None
    stuck.page.words[BUSY] = IDLE


def test_a_running_writer_that_takes_too_long_is_cut_off(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Peer, "may_be_copying", lambda self: True)
    monkeypatch.setattr(fabric_shm_domain, "_USER_COPY_LIMIT_S", 0.002)
    stuck = _Stuck(pair, WRITING, pair.b.memory.address, 4096)
    pair.b.region.close()
    assert pair.b.memory.fd is None
    stuck.page.words[BUSY] = IDLE


def test_a_transfer_cut_short_for_another_regions_sake_is_done_again(
    pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    buffer = bytearray(4096)
    view = memoryview(buffer)
    address = ctypes.addressof(ctypes.c_char.from_buffer(view))
    region = pair.b.pd.register(address, 4096, ALL_ACCESS, buffer)
    real = process_vm_writev
    calls = 0

    def cut_short(*arguments: int) -> int:
        nonlocal calls
        calls += 1
        if calls == 1:
            connection = pair.b.connection
            assert isinstance(connection, ShmConnection)
            connection.page.quads[LENGTH] = 0
        return int(real(*arguments))

    monkeypatch.setattr(fabric_shm_initiator, "process_vm_writev", cut_short)
    pair.a.memory.view[:4096] = b"\x42" * 4096
    pair.a.connection.post_send([pair.a.transfer(1, Opcode.RDMA_WRITE, (0, 4096), (address, region.rkey))])
    assert statuses(collect(pair.a.connection, 1)) == [WcStatus.SUCCESS]
    assert calls == 2
    assert buffer == b"\x42" * 4096
    region.close()


def _suspend(pair: Pair, kind: int) -> None:
    domain = pair.b.pd
    assert isinstance(domain, fabric_shm_domain.ShmDomain)
    domain._set_kind(pair.b.region.memory, kind)  # type: ignore[attr-defined]


def test_an_initiator_waits_out_a_suspension(pair: Pair) -> None:
    _suspend(pair, fabric_shm_pages.SUSPENDED)
    timer = threading.Timer(0.02, _suspend, (pair, fabric_shm_pages.GIVEN))
    timer.start()
    pair.a.memory.view[:8] = b"patience"
    pair.a.connection.post_send([pair.a.transfer(1, Opcode.RDMA_WRITE, (0, 8), pair.b.at(0))])
    timer.join()
    assert statuses(collect(pair.a.connection, 1)) == [WcStatus.SUCCESS]
    assert bytes(pair.b.memory.view[:8]) == b"patience"


def test_a_suspension_without_end_is_an_error(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fabric_shm_initiator, "_SUSPENSION_LIMIT_S", 0.001)
    _suspend(pair, fabric_shm_pages.SUSPENDED)
    pair.a.connection.post_send([pair.a.transfer(1, Opcode.RDMA_WRITE, (0, 8), pair.b.at(0))])
    assert statuses(collect(pair.a.connection, 1)) == [WcStatus.REM_OP_ERR]
    assert pair.a.connection.state == ConnectionState.ERROR


def test_what_is_read_while_the_region_goes_is_not_a_success(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    real = fabric_shm_initiator._memmove_short

    def revoked_meanwhile(to: int, source: int, count: int) -> None:
        real(to, source, count)
        domain = pair.b.pd
        assert isinstance(domain, fabric_shm_domain.ShmDomain)
        domain._table.mark(domain._slots[pair.b.region.rkey], fabric_shm_pages.REVOKED)

    monkeypatch.setattr(fabric_shm_initiator, "_memmove_short", revoked_meanwhile)
    pair.a.connection.post_send([pair.a.transfer(1, Opcode.RDMA_READ, (0, 8), pair.b.at(0))])
    assert statuses(collect(pair.a.connection, 1)) == [WcStatus.REM_ACCESS_ERR]
