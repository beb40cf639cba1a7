"""One agent's connection to a region worker: its protection domain, its capsule buffers, its leases.

Receives capsules into posted buffers, sends responses from its own, posts the engine's work requests; decides
nothing. A buffer is posted again only with the answer to a capsule: an agent that ignores its credits waits for
itself, and what it can have open here is bounded. Everything registered here belongs to this connection's protection
domain and ends with it. Used by the region server's loop only.
"""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Sequence
from typing import NamedTuple, cast

from common.wire import ACCEPT_DATA, CONNECT_DATA, MAX_CAPSULE_BYTES
from doca_shims.api import (
    Access,
    Completion,
    Connection,
    ConnectionRequest,
    ConnectionState,
    Fabric,
    Memory,
    MemoryRegion,
    Opcode,
    ProtectionDomain,
    QueueLimits,
    RecvRequest,
    SendFlags,
    SendRequest,
    Sge,
)

_SEND = 1 << 62
_RECV = 1 << 63
_INDEX = _SEND - 1
_SIGNALED = cast(SendFlags, int(SendFlags.SIGNALED))
"""A plain number, since `IntFlag` arithmetic costs a microsecond, and backends do some."""


class Polled(NamedTuple):
    """What one poll found."""

    capsules: list[memoryview]
    """Valid until the next call of anything of the peer."""
    work: list[Completion]
    """Of what `post` was told to post."""
    sent: int
    """So many more responses are sent, and what was posted before them is complete."""


class Peer:
    """`window` is the region's; `credits` capsules may be outstanding."""

    def __init__(
        self,
        fabric: Fabric,
        request: ConnectionRequest,
        window: Memory,
        slot_bytes: int,
        uuid: bytes,
        credits: int,
        send_wrs_max: int,
    ) -> None:
        self._leases: dict[int, MemoryRegion] = {}
        self._waiting: deque[bytes] = deque()
        self._free_sends = list(range(credits))
        self._unposted: deque[int] = deque()
        """Receive buffers of capsules that are not answered yet, oldest first: an answer gives back the oldest, which
        was read before, whoever's answer it is."""
        self.session_id = CONNECT_DATA.unpack(request.private_data)[0]
        self.name = request.peer
        with contextlib.ExitStack() as stack:
            self._capsules = fabric.allocate(2 * credits * MAX_CAPSULE_BYTES)
            stack.callback(self._capsules.close)
            self._pd: ProtectionDomain = fabric.alloc_pd()
            stack.callback(self._pd.close)
            self._capsule_region = self._pd.register(
                self._capsules.address, self._capsules.length_bytes, Access.LOCAL_WRITE
            )
            stack.callback(self._capsule_region.close)
            size, start = MAX_CAPSULE_BYTES, self._capsules.address
            views = [self._capsules.view[i * size : (i + 1) * size] for i in range(2 * credits)]
            self._received, self._sending = views[:credits], views[credits:]
            self._receives = [
                RecvRequest(_RECV | i, Sge(start + i * size, size, self._capsule_region.lkey)) for i in range(credits)
            ]
            self._send_address = start + credits * size
            stack.callback(self._release_views)
            self._window_region = self._pd.register(window.address, window.length_bytes, Access.LOCAL_WRITE)
            stack.callback(self._window_region.close)
            stack.callback(self._close_leases)
            self._connection: Connection = request.accept(
                self._pd,
                QueueLimits(max_send_wr=send_wrs_max + credits, max_recv_wr=credits, max_sge=1),
                self._receives,
                ACCEPT_DATA.pack(credits, slot_bytes, uuid),
            )
            stack.callback(self._connection.close)
            self._stack = stack.pop_all()

    def fileno(self) -> int:
        return self._connection.fileno()

    @property
    def window_lkey(self) -> int:
        return self._window_region.lkey

    @property
    def lost(self) -> bool:
        return self._connection.state is not ConnectionState.READY

    def close(self) -> None:
        """When it returns, nothing of this connection touches the agent's memory, nor the agent the window."""
        self._stack.close()

    # ---------------------------------------------------------------- input

    def poll(self, arm: bool) -> Polled | None:
        """None where nothing has come; then `fileno` tells when something has, if this was to `arm` it. Raises
        ShimError when the connection is lost."""
        completions = self._connection.poll(arm=arm)
        if not completions:
            return None
        capsules: list[memoryview] = []
        received: list[int] = []
        work: list[Completion] = []
        sent = 0
        for completion in completions:
            wr_id, status, _, byte_count = completion
            if wr_id & _RECV:
                if status == 0:
                    buffer = wr_id & _INDEX
                    capsules.append(self._received[buffer][:byte_count])
                    received.append(buffer)
            elif wr_id & _SEND:
                self._free_sends.append(wr_id & _INDEX)
                if status == 0:
                    sent += 1
            else:
                work.append(completion)
        if self._waiting and self._free_sends and not self.lost:
            self._send_waiting()  # posts earlier buffers, none of those just received
        self._unposted += received
        return Polled(capsules, work, sent)

    # ---------------------------------------------------------------- output

    def post(self, wr_id: int, opcode: Opcode, requests: bytes | bytearray, flags: SendFlags) -> None:
        """READs or WRITEs: `Connection.post_rdma`. Raises ShimError when the connection is lost."""
        self._connection.post_rdma(wr_id, opcode, requests, flags)

    def send(self, capsules: Sequence[bytes]) -> None:
        """Responses, one for each capsule that came. Raises ShimError when the connection is lost."""
        self._waiting.extend(capsules)
        self._send_waiting()

    def _send_waiting(self) -> None:
        requests = []
        receives = []
        while self._waiting and self._free_sends:
            capsule = self._waiting.popleft()
            buffer = self._free_sends.pop()
            length = len(capsule)
            self._sending[buffer][:length] = capsule
            sge = Sge(self._send_address + buffer * MAX_CAPSULE_BYTES, length, self._capsule_region.lkey)
            requests.append(SendRequest(_SEND | buffer, Opcode.SEND, (sge,), 0, 0, _SIGNALED))
            receives.append(self._receives[self._unposted.popleft()])
        if requests:
            self._connection.post_recv(receives)  # before the answer, upon which the agent may send again
            self._connection.post_send(requests)

    def _release_views(self) -> None:
        for view in (*self._received, *self._sending):
            view.release()

    # ---------------------------------------------------------------- leases

    def grant(self, address: int, length_bytes: int) -> int:
        """Let the agent READ a range of the window; the rkey. Raises ShimError."""
        region = self._pd.register(address, length_bytes, Access.REMOTE_READ)
        self._leases[region.rkey] = region
        return region.rkey

    def revoke(self, rkey: int) -> None:
        region = self._leases.pop(rkey, None)
        if region is not None:
            region.close()

    def _close_leases(self) -> None:
        for region in self._leases.values():
            region.close()
        self._leases.clear()


class PeerLeases:
    """The engine's LeasePort on the peers' registrations."""

    def __init__(self, peers: dict[int, Peer]) -> None:
        self._peers = peers

    def grant(self, connection_id: int, address: int, length_bytes: int) -> int:
        return self._peers[connection_id].grant(address, length_bytes)

    def revoke(self, connection_id: int, rkey: int) -> None:
        peer = self._peers.get(connection_id)
        if peer is not None:
            peer.revoke(rkey)
