"""The sending half of emu-tcp on a real socket: every byte once and in order, however little the socket takes."""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator

import pytest

from doca_shims.api import Access
from emulator import fabric_tcp
from emulator.fabric_core import Region
from emulator.fabric_tcp_transmit import Transmitter

_LIMIT_S = 10.0


@pytest.fixture
def ends() -> Iterator[tuple[socket.socket, socket.socket]]:
    here, there = socket.socketpair()
    here.setblocking(False)
    here.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
    there.settimeout(_LIMIT_S)
    with here, there:
        yield here, there


@pytest.fixture
def region() -> Iterator[Region]:
    fabric = fabric_tcp.create({})
    pd = fabric.alloc_pd()
    buffer = bytearray(64)
    memory = fabric.allocate(4096)
    registered = pd.register(memory.address, 4096, Access.LOCAL_WRITE, buffer)
    yield registered
    registered.close()
    memory.close()
    pd.close()
    fabric.close()


def _drain(transmitter: Transmitter, there: socket.socket, length: int) -> bytes:
    """Push and receive in turn until `length` bytes have come."""
    received = bytearray()
    while len(received) < length:
        transmitter.push()
        received += there.recv(length - len(received))
    return bytes(received)


def test_more_than_the_socket_holds_arrives_whole_and_in_order(
    ends: tuple[socket.socket, socket.socket], region: Region
) -> None:
    here, there = ends
    transmitter = Transmitter(here)
    wanted = b""
    for number in range(40):
        header, payload = bytes([number]) * 32, os.urandom(7000)
        transmitter.header(header)
        transmitter.payload(memoryview(payload), region)
        wanted += header + payload
    assert not transmitter.push(), "a full socket is said"
    assert transmitter.refers_to(region)
    assert 0 < transmitter.sent_bytes < transmitter.queued_bytes == len(wanted)
    assert not transmitter.send(b"behind"), "overtakes nothing"
    wanted += b"behind"
    assert _drain(transmitter, there, len(wanted)) == wanted
    assert transmitter.push()
    assert (transmitter.sent_bytes, transmitter.waiting_bytes, len(transmitter)) == (len(wanted), 0, 0)
    assert not transmitter.refers_to(region)


def test_more_buffers_than_one_system_call_takes(ends: tuple[socket.socket, socket.socket]) -> None:
    here, there = ends
    transmitter = Transmitter(here)
    for number in range(3000):
        transmitter.header(bytes([number % 251]))
    assert _drain(transmitter, there, 3000) == bytes(number % 251 for number in range(3000))


def test_a_small_frame_that_the_socket_takes_in_part(ends: tuple[socket.socket, socket.socket]) -> None:
    here, there = ends
    transmitter = Transmitter(here)
    frame = os.urandom(200_000)
    assert not transmitter.send(frame)
    assert 0 < transmitter.sent_bytes < len(frame)
    assert _drain(transmitter, there, len(frame)) == frame
    assert transmitter.send(b"x")
    assert there.recv(1) == b"x"


def test_the_end_of_the_stream_comes_behind_what_is_queued(ends: tuple[socket.socket, socket.socket]) -> None:
    here, there = ends
    transmitter = Transmitter(here)
    data = os.urandom(100_000)
    transmitter.header(data)
    transmitter.push()
    transmitter.end_when_empty()
    assert _drain(transmitter, there, len(data)) == data
    transmitter.push()
    assert there.recv(1) == b""


def test_what_is_cleared_is_read_no_more(ends: tuple[socket.socket, socket.socket], region: Region) -> None:
    here, _ = ends
    transmitter = Transmitter(here)
    transmitter.payload(memoryview(bytes(500_000)), region)
    transmitter.push()
    transmitter.clear()
    assert not transmitter.refers_to(region)
    assert not len(transmitter)


def test_a_peer_that_is_gone_takes_everything_silently(
    ends: tuple[socket.socket, socket.socket], region: Region
) -> None:
    """The receiving half sees it too, and says so."""
    here, there = ends
    there.close()
    transmitter = Transmitter(here)
    transmitter.payload(memoryview(bytes(100)), region)
    assert transmitter.push()
    assert not transmitter.refers_to(region)
    assert transmitter.send(b"x")
