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
        self._unposted: list[int] = []
        """Receive buffers of capsules that are not answered yet."""
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

    def poll(self) -> tuple[list[memoryview], list[Completion], bool]:
        """Capsules that came, valid until the next call of anything here; completions of the engine's work requests;
        and whether there may be more to poll. Raises ShimError when the connection is lost."""
        capsules: list[memoryview] = []
        received: list[int] = []
        work: list[Completion] = []
        completions = self._connection.poll()
        for completion in completions:
            wr_id = completion.wr_id
            if wr_id & _RECV:
                if completion.status == 0:
                    start = (wr_id & _INDEX) * MAX_CAPSULE_BYTES
                    capsules.append(self._capsules.view[start : start + completion.byte_count])
                    received.append(wr_id & _INDEX)
            elif wr_id & _SEND:
                self._free_sends.append(wr_id & _INDEX)
            else:
                work.append(completion)
        if self._waiting and self._free_sends and not self.lost:
            self._send_waiting()  # posts earlier buffers, none of those just received
        self._unposted += received
        return capsules, work, bool(completions)

    def _receive_request(self, buffer: int) -> RecvRequest:
        address = self._capsules.address + buffer * MAX_CAPSULE_BYTES
        return RecvRequest(_RECV | buffer, Sge(address, MAX_CAPSULE_BYTES, self._capsule_region.lkey))

    # ---------------------------------------------------------------- output

    def post(self, requests: Sequence[SendRequest]) -> None:
        """Raises ShimError when the connection is lost."""
        self._connection.post_send(requests)

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
            start = (self._credits + buffer) * MAX_CAPSULE_BYTES
            self._capsules.view[start : start + len(capsule)] = capsule
            sge = Sge(self._capsules.address + start, len(capsule), self._capsule_region.lkey)
            requests.append(SendRequest(_SEND | buffer, Opcode.SEND, (sge,), flags=SendFlags.SIGNALED))
            receives.append(self._receive_request(self._unposted.pop()))
        if requests:
            self._connection.post_recv(receives)  # before the answer, upon which the agent may send again
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
