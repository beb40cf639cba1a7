"""One agent's connection to a region worker: its protection domain, its capsule buffers, its leases.

Receives capsules into posted buffers, sends responses from its own, posts the engine's work requests; decides
nothing. Everything registered here belongs to this connection's protection domain and ends with it. Used by the
region server's loop only.
"""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Sequence

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
        self._credits = credits
        self._leases: dict[int, MemoryRegion] = {}
        self._waiting: deque[bytes] = deque()
        self._free_sends = list(range(credits))
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
            self._window_region = self._pd.register(window.address, window.length_bytes, Access.LOCAL_WRITE)
            stack.callback(self._window_region.close)
            stack.callback(self._close_leases)
            self._connection: Connection = request.accept(
                self._pd,
                QueueLimits(max_send_wr=send_wrs_max + credits, max_recv_wr=credits, max_sge=1),
                [self._receive_request(i) for i in range(credits)],
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

    def poll(self) -> tuple[list[tuple[int, memoryview]], list[Completion]]:
        """Capsules that came, as (buffer number, bytes), and completions of the engine's work requests. Each buffer
        is to be given back by `repost`."""
        capsules: list[tuple[int, memoryview]] = []
        work: list[Completion] = []
        for completion in self._connection.poll():
            wr_id = completion.wr_id
            if wr_id & _RECV:
                if completion.status == 0:
                    start = (wr_id & _INDEX) * MAX_CAPSULE_BYTES
                    capsules.append((wr_id & _INDEX, self._capsules.view[start : start + completion.byte_count]))
            elif wr_id & _SEND:
                self._free_sends.append(wr_id & _INDEX)
            else:
                work.append(completion)
        if self._waiting and self._free_sends and not self.lost:
            self._send_waiting()
        return capsules, work

    def repost(self, buffers: Sequence[int]) -> None:
        """Raises ShimError when the connection is lost."""
        self._connection.post_recv([self._receive_request(buffer) for buffer in buffers])

    def _receive_request(self, buffer: int) -> RecvRequest:
        address = self._capsules.address + buffer * MAX_CAPSULE_BYTES
        return RecvRequest(_RECV | buffer, Sge(address, MAX_CAPSULE_BYTES, self._capsule_region.lkey))

    # ---------------------------------------------------------------- output

    def post(self, requests: Sequence[SendRequest]) -> None:
        """Raises ShimError when the connection is lost."""
        self._connection.post_send(requests)

    def send(self, capsule: bytes) -> None:
        """A response. Raises ShimError when the connection is lost."""
        self._waiting.append(capsule)
        self._send_waiting()

    def _send_waiting(self) -> None:
        requests = []
        while self._waiting and self._free_sends:
            capsule = self._waiting.popleft()
            buffer = self._free_sends.pop()
            start = (self._credits + buffer) * MAX_CAPSULE_BYTES
            self._capsules.view[start : start + len(capsule)] = capsule
            sge = Sge(self._capsules.address + start, len(capsule), self._capsule_region.lkey)
            requests.append(SendRequest(_SEND | buffer, Opcode.SEND, (sge,), flags=SendFlags.SIGNALED))
        if requests:
            self._connection.post_send(requests)

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
