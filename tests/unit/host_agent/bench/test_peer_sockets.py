"""The sockets that the benchmark is held against: bytes really move, and the peer ends with its caller."""

from __future__ import annotations

import pytest

from host_agent.bench.peer_sockets import CONGESTION, SocketPeer


@pytest.mark.parametrize("congestion", CONGESTION)
def test_the_peer_moves_bytes_and_ends(congestion: str) -> None:
    memory = memoryview(bytearray(b"\xff") * (3 << 16))
    with SocketPeer() as peer:
        assert peer.push_s(memory, 65536, 3, congestion) > 0
        back = bytearray(3 << 16)
        assert peer.pull_s(memoryview(back), 65536, 2, congestion) > 0
        assert back == bytes(memory[: 2 << 16]) + bytes(1 << 16), "the peer keeps what was pushed"
        assert len(peer.ping_s(rounds=5)) == 5
        assert peer.congestion(congestion)
        assert peer.pid > 0
        with pytest.raises(ValueError, match="do not fit"):
            peer.pull_s(memory, 65536, 4)
    peer.close()
