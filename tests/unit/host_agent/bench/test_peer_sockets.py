"""The limits that the benchmark is held against: bytes really move, and the peer ends with its caller."""

from __future__ import annotations

import pytest

from host_agent.bench.peer_sockets import SocketPeer, memmove_s


def test_memmove_copies_every_block() -> None:
    source, destination = bytearray(range(256)) * 16, bytearray(4096)
    assert memmove_s(memoryview(destination), memoryview(source), 1024, 3) > 0
    assert destination == source[:3072] + bytes(1024)
    with pytest.raises(ValueError, match="do not fit"):
        memmove_s(memoryview(destination), memoryview(source), 1024, 5)


def test_the_socket_peer_moves_bytes_and_ends() -> None:
    memory = memoryview(bytearray(b"\xff") * (3 << 16))
    with SocketPeer() as peer:
        assert peer.push_s(memory, 65536, 3) > 0
        back = bytearray(3 << 16)
        assert peer.pull_s(memoryview(back), 65536, 2) > 0
        assert back == bytes(memory[: 2 << 16]) + bytes(1 << 16), "the peer keeps what was pushed"
        assert len(peer.ping_s(rounds=5)) == 5
        with pytest.raises(ValueError, match="do not fit"):
            peer.pull_s(memory, 65536, 4)
    peer.close()
