"""A hostile or broken peer of emu-tcp: any frames end the connection at worst, and never reach beyond a region."""

from __future__ import annotations

import ctypes
import logging
import random
import socket
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager, suppress

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from doca_shims.api import (
    RDMA_REQUEST,
    Completion,
    ConnectionState,
    Opcode,
    QueueLimits,
    RecvRequest,
    SendRequest,
    Sge,
    WcStatus,
)
from doca_shims.contract_harness import ALL_ACCESS, Side, collect, next_request, statuses
from emulator import fabric_tcp
from emulator.fabric_tcp_frame import (
    GREETING_BYTES,
    HEADER_BYTES,
    FrameKind,
    GreetingKind,
    Header,
    pack_greeting,
    pack_header,
    unpack_header,
)

_PAGE_BYTES = 4096
_LIMIT_S = 5.0


class _Rig:
    """A listening side whose middle page is open to everybody, and what it takes to talk to it rawly."""

    def __init__(self) -> None:
        self.fabric = fabric_tcp.create({"rnr_timeout_s": "0.2", "transport_timeout_s": "0.4"})
        self.side = Side(self.fabric, 3 * _PAGE_BYTES)
        self.side.region.close()
        self.base = self.side.memory.address + _PAGE_BYTES
        self.side.region = self.side.pd.register(self.base, _PAGE_BYTES, ALL_ACCESS)
        self.listener = self.fabric.listen("127.0.0.1:0")

    @contextmanager
    def attacker(self, recvs: int = 0) -> Iterator[socket.socket]:
        host, _, port = self.listener.address.rpartition(":")
        side = self.side
        side.memory.view[:] = bytes(len(side.memory.view))
        with socket.create_connection((host, int(port)), _LIMIT_S) as sock:
            sock.sendall(pack_greeting(GreetingKind.HELLO, 0, b""))
            posted = [side.recv(i, _PAGE_BYTES, 64) for i in range(recvs)]
            side.connection = next_request(self.listener).accept(side.pd, QueueLimits(), posted)
            assert len(sock.recv(GREETING_BYTES, socket.MSG_WAITALL)) == GREETING_BYTES
            try:
                yield sock
            finally:
                started_s = time.monotonic()
                side.connection.close()
                assert time.monotonic() - started_s < _LIMIT_S

    def await_error(self) -> None:
        deadline_s = time.monotonic() + _LIMIT_S
        while self.side.connection.state == ConnectionState.READY:
            assert time.monotonic() < deadline_s, "the connection survived"
            time.sleep(0.001)

    def check_guards(self) -> None:
        view = self.side.memory.view
        assert not any(view[:_PAGE_BYTES])
        assert not any(view[2 * _PAGE_BYTES :])

    def close(self) -> None:
        self.listener.close()
        self.side.close()
        self.fabric.close()


@pytest.fixture(scope="module")
def rig() -> Iterator[_Rig]:
    made = _Rig()
    yield made
    made.close()


@pytest.fixture(autouse=True)
def no_faults_logged(caplog: pytest.LogCaptureFixture) -> Iterator[None]:
    """The threads survive what a peer sends by design, not by their last resort, which logs an error."""
    yield
    assert not [record for record in caplog.records if record.levelno >= logging.ERROR]


def _answer(sock: socket.socket) -> Header | None:
    """The next frame, or None at the end of the stream."""
    packed = sock.recv(HEADER_BYTES, socket.MSG_WAITALL)
    return unpack_header(packed) if packed else None


_frames = st.builds(
    lambda kind, code, sequence, posted, rkey, offset, length, payload: (
        pack_header(kind, code, sequence, posted, rkey, offset, length) + payload
    ),
    st.sampled_from(FrameKind),
    st.integers(0, 13),
    st.integers(0, 3),
    st.integers(0, 8),
    st.sampled_from([0, 1, 2]),
    st.sampled_from([-5000, -1, 0, 1, 4000, 4096, 1 << 40]).map(lambda offset: offset & 0xFFFFFFFFFFFFFFFF),
    st.sampled_from([0, 1, 64, 65, 4096, 4097, 1 << 30, 0xFFFFFFFF]),
    st.binary(max_size=200),
)


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.lists(st.one_of(_frames, st.binary(min_size=1, max_size=100)), min_size=1, max_size=6), st.booleans())
@example([b"\0" * 32], True)
@example([bytes(31)], False)
def test_any_bytes(rig: _Rig, messages: list[bytes], good_rkey: bool) -> None:
    with rig.attacker(recvs=2) as sock:
        for message in messages:
            data = bytearray(message)
            if good_rkey and len(data) >= HEADER_BYTES:
                # Make the address and the key nearly right, which gets further than noise does.
                data[12:16] = rig.side.region.rkey.to_bytes(4, "little")
                offset = int.from_bytes(data[16:24], "little")
                data[16:24] = ((offset + rig.base) & 0xFFFFFFFFFFFFFFFF).to_bytes(8, "little")
            try:
                sock.sendall(data)
            except OSError:
                break
        with suppress(OSError):
            sock.shutdown(socket.SHUT_WR)
        rig.await_error()
        rig.check_guards()


@pytest.mark.parametrize(
    "frame",
    [
        pack_header(FrameKind.ACK, 0, 0, 0),
        pack_header(FrameKind.NAK, int(WcStatus.REM_OP_ERR), 0, 0),
        pack_header(FrameKind.DATA, 0, 0, 0, length=8),
        pack_header(FrameKind.CREDIT, 0, 0, 1 << 31),
        bytes(HEADER_BYTES),
    ],
    ids=["ack", "nak", "data", "credit", "zeros"],
)
def test_an_answer_to_nothing_ends_the_connection(rig: _Rig, frame: bytes) -> None:
    with rig.attacker() as sock:
        sock.sendall(frame)
        rig.await_error()
        assert _answer(sock) is None


def test_a_write_beyond_the_region_is_refused_before_its_payload_is_read(rig: _Rig) -> None:
    for offset, length in ((0, 1 << 30), (_PAGE_BYTES - 8, 9), (-1, 2)):
        with rig.attacker() as sock:
            sock.sendall(pack_header(FrameKind.WRITE, 1, 7, 0, rig.side.region.rkey, rig.base + offset, length))
            sock.sendall(b"\xff" * 64)
            header = _answer(sock)
            assert header is not None
            assert (header.kind, header.code, header.sequence) == (FrameKind.NAK, WcStatus.REM_ACCESS_ERR, 7)
            rig.await_error()
            rig.check_guards()


def test_a_message_without_a_receive_is_refused(rig: _Rig) -> None:
    with rig.attacker() as sock:
        sock.sendall(pack_header(FrameKind.SEND, 1, 0, 0, length=3) + b"abc")
        header = _answer(sock)
        assert header is not None
        assert (header.kind, header.code) == (FrameKind.NAK, WcStatus.RNR_RETRY_EXC_ERR)


def test_a_payload_cut_off_flushes_its_receive(rig: _Rig) -> None:
    with rig.attacker(recvs=1) as sock:
        sock.sendall(pack_header(FrameKind.SEND, 1, 0, 0, length=64) + b"abc")
        sock.shutdown(socket.SHUT_RDWR)
        assert statuses(collect(rig.side.connection, 1)) == [WcStatus.WR_FLUSH_ERR]


def test_an_answer_to_what_is_not_sent_yet_is_no_completion(rig: _Rig) -> None:
    with rig.attacker() as sock:
        side = rig.side
        read = side.transfer(1, Opcode.RDMA_READ, (_PAGE_BYTES, 64), (4096, 1))
        side.connection.post_send([read])
        assert _answer(sock) is not None
        sock.sendall(pack_header(FrameKind.ACK, 0, 0, 0))  # a READ wants data
        assert statuses(collect(side.connection, 1)) == [WcStatus.WR_FLUSH_ERR]
    with rig.attacker() as sock:
        side.connection.post_send([read])
        sock.sendall(pack_header(FrameKind.DATA, 0, 0, 0, length=65) + bytes(65))
        assert statuses(collect(side.connection, 1)) == [WcStatus.WR_FLUSH_ERR]
        rig.check_guards()


def _packed(rig: _Rig, count: int, length: int) -> bytes:
    """A batch between the attacker and the open page's first bytes."""
    side = rig.side
    requests = [
        RDMA_REQUEST.pack(rig.base + index * length, 4096 + index * length, length, side.region.lkey, 1, 0)
        for index in range(count)
    ]
    return b"".join(requests)


def test_a_batch_is_answered_in_part_and_once(rig: _Rig) -> None:
    with rig.attacker() as sock:
        connection = rig.side.connection
        connection.post_rdma(5, Opcode.RDMA_WRITE, _packed(rig, 4, 16))
        for sequence in range(4):
            header = _answer(sock)
            assert header is not None
            assert (header.kind, header.sequence, header.code) == (FrameKind.WRITE, sequence, sequence == 3)
            assert len(sock.recv(16, socket.MSG_WAITALL)) == 16
        sock.sendall(pack_header(FrameKind.ACK, 0, 1, 0))
        sock.sendall(pack_header(FrameKind.NAK, int(WcStatus.REM_ACCESS_ERR), 2, 0))
        done = collect(connection, 1)
        assert [(c.wr_id, c.status) for c in done] == [(5, WcStatus.REM_ACCESS_ERR)]
        assert connection.poll() == []


def test_reads_of_a_batch_answered_out_of_turn_end_the_connection(rig: _Rig) -> None:
    for sequence in (1, 2, 0xFFFFFFFF):
        with rig.attacker() as sock:
            connection = rig.side.connection
            connection.post_rdma(6, Opcode.RDMA_READ, _packed(rig, 2, 16))
            sock.sendall(pack_header(FrameKind.DATA, 0, sequence, 0, length=16) + b"\xff" * 16)
            assert statuses(collect(connection, 1)) == [WcStatus.WR_FLUSH_ERR]
            assert not any(rig.side.memory.view)


def test_an_answer_ahead_of_the_bytes_is_no_completion(rig: _Rig) -> None:
    """A WRITE larger than all buffers between, of which nothing is read, is not through because its target says so."""
    length = 64 << 20
    source = bytearray(length)
    address = ctypes.addressof(ctypes.c_char.from_buffer(source))
    with rig.attacker() as sock, closing(rig.side.pd.register(address, length, ALL_ACCESS, source)) as region:
        packed = RDMA_REQUEST.pack(address, 4096, length, region.lkey, 1, 0)
        rig.side.connection.post_rdma(7, Opcode.RDMA_WRITE, packed)
        sock.sendall(pack_header(FrameKind.ACK, 0, 0, 0))
        assert statuses(collect(rig.side.connection, 1)) == [WcStatus.WR_FLUSH_ERR]


def test_frames_in_any_pieces_are_the_same_frames(rig: _Rig) -> None:
    """Headers and payloads cut anywhere, looked at after each piece."""
    chance = random.Random(7)
    for length in (1, 100, 3000):
        with rig.attacker(recvs=2) as sock:
            data = chance.randbytes(length)
            write = pack_header(FrameKind.WRITE, 1, 0, 0, rig.side.region.rkey, rig.base + 64, length) + data
            read = pack_header(FrameKind.READ, 0, 1, 0, rig.side.region.rkey, rig.base + 64, length)
            stream = write + read + pack_header(FrameKind.SEND, 1, 2, 0, length=30) + bytes(range(30))
            completions: list[Completion] = []
            while stream:
                count = chance.randint(1, min(len(stream), 50))
                sock.sendall(stream[:count])
                stream = stream[count:]
                completions += rig.side.connection.poll(arm=bool(chance.getrandbits(1)))
            if not completions:
                completions = collect(rig.side.connection, 1)
            assert [(c.status, c.byte_count) for c in completions] == [(0, 30)]
            assert bytes(rig.side.memory.view[_PAGE_BYTES : _PAGE_BYTES + 30]) == bytes(range(30))
            assert bytes(rig.side.memory.view[_PAGE_BYTES + 64 :][:length]) == data
            header = _answer(sock)
            while header is not None and header.kind is not FrameKind.DATA:
                header = _answer(sock)  # the WRITE's, or a credit
            assert header is not None
            assert header.sequence == 1
            assert sock.recv(length, socket.MSG_WAITALL) == data


@pytest.mark.parametrize("kind", [FrameKind.WRITE, FrameKind.SEND, FrameKind.DATA])
def test_nothing_lands_behind_a_deregistration(rig: _Rig, kind: FrameKind) -> None:
    """A region is taken back while half of a payload for it is there."""
    with rig.attacker() as sock:
        side = rig.side
        connection = side.connection
        region = side.pd.register(rig.base, _PAGE_BYTES, ALL_ACCESS)
        sge = Sge(rig.base, _PAGE_BYTES, region.lkey)
        if kind is FrameKind.SEND:
            connection.post_recv([RecvRequest(1, sge)])
        elif kind is FrameKind.DATA:
            connection.post_send([SendRequest(1, Opcode.RDMA_READ, (sge,), 4096, 1)])
            assert _answer(sock) is not None
        rkey, address = (region.rkey, rig.base) if kind is FrameKind.WRITE else (0, 0)
        sock.sendall(pack_header(kind, 0, 0, 0, rkey, address, _PAGE_BYTES) + b"\xff" * 2048)
        while side.memory.view[_PAGE_BYTES + 2047] == 0:
            connection.poll()
        region.close()
        with suppress(OSError):
            sock.sendall(b"\xff" * 2048)
        rig.await_error()
        connection.poll()
        assert not any(side.memory.view[_PAGE_BYTES + 2048 :])


def test_nothing_behind_a_refusal_is_taken_for_a_frame(rig: _Rig, caplog: pytest.LogCaptureFixture) -> None:
    """The refused payload may look like frames; none of them is carried out, or even looked at."""
    with rig.attacker(recvs=1) as sock:
        good = pack_header(FrameKind.WRITE, 1, 1, 0, rig.side.region.rkey, rig.base, 64) + b"\xff" * 64
        payload = good * 4000
        sock.sendall(pack_header(FrameKind.WRITE, 1, 0, 0, 1, rig.base, len(payload)))
        with suppress(OSError):
            sock.sendall(payload)
            sock.sendall(b"\xff" * 100_000)
        assert statuses(collect(rig.side.connection, 1)) == [WcStatus.WR_FLUSH_ERR]
        header = _answer(sock)
        assert header is not None
        assert (header.kind, header.code) == (FrameKind.NAK, WcStatus.REM_ACCESS_ERR)
        assert not any(rig.side.memory.view)
    assert not caplog.records


def test_a_flood_of_reads_is_bounded(rig: _Rig) -> None:
    with rig.attacker() as sock:
        frame = pack_header(FrameKind.READ, 0, 0, 0, rig.side.region.rkey, rig.base, _PAGE_BYTES)
        sock.settimeout(_LIMIT_S)
        with suppress(OSError):
            for _ in range(20):
                sock.sendall(frame * 1000)
        rig.await_error()


def test_a_peer_that_never_answers_is_given_up(rig: _Rig) -> None:
    with rig.attacker():
        side = rig.side
        side.connection.post_send([side.transfer(i, Opcode.RDMA_READ, (_PAGE_BYTES, 64), (4096, 1)) for i in (1, 2)])
        assert statuses(collect(side.connection, 2)) == [WcStatus.RETRY_EXC_ERR, WcStatus.WR_FLUSH_ERR]


def test_a_peer_that_trickles_its_greeting_is_heard_and_a_stranger_is_not(rig: _Rig) -> None:
    host, _, port = rig.listener.address.rpartition(":")
    with socket.create_connection((host, int(port))) as stranger, socket.create_connection((host, int(port))) as slow:
        stranger.sendall(b"GET / HTTP/1.1\r\nHost: x\r\n\r\n")
        for byte in pack_greeting(GreetingKind.HELLO, 0, b"slow"):
            assert rig.listener.accept() is None
            slow.sendall(bytes([byte]))
        request = next_request(rig.listener)
        assert request.private_data == b"slow"
        request.reject("enough")
        stranger.settimeout(_LIMIT_S)
        with suppress(ConnectionResetError):
            assert stranger.recv(1) == b""
