"""The far side of a region engine's fabric work, for seeded simulation: executes READs, WRITEs and SENDs in memory.

What is posted on one connection is executed in order, when the simulation says so; connections know nothing of each
other's pace. A client's memory is reached by (rkey, address) with a connection's own keys, as hardware would; what
fails puts the connection into ERROR and flushes the rest. Used by tests/sim.
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from doca_shims.api import RDMA_REQUEST, Access, Completion, Memory, Opcode, SendFlags, SendRequest, Sge, WcStatus

RemoteAccess = Callable[[int, Opcode, int, int], None]
"""Told of each access to a client's memory before it happens: connection, READ or WRITE, address, length."""


@dataclass(frozen=True)
class _Range:
    address: int
    view: memoryview
    access: Access


@dataclass(frozen=True)
class _Posted:
    """`batch` is shared by the requests of one `post_rdma`, which fail by one completion."""

    request: SendRequest
    batch: _Batch | None = None


@dataclass
class _Batch:
    failed: bool = False


class _Link:
    """One connection, from the DPU's side."""

    def __init__(self, lkey: int) -> None:
        self.lkey = lkey
        self.queue: deque[_Posted | bytes] = deque()
        self.completions: list[Completion] = []
        self.remote: dict[int, _Range] = {}
        self.granted: dict[int, _Range] = {}
        self.failed = False


class SimFabric:
    """`window` is the DPU's memory. `failure_chance`: of each READ or WRITE, to fail half done."""

    def __init__(self, window: Memory, seed: int, on_access: RemoteAccess, failure_chance: float = 0.0) -> None:
        self.failure_chance = failure_chance
        self._window = window
        self._random = random.Random(seed)
        self._on_access = on_access
        self._links: dict[int, _Link] = {}
        self._next_key = 1

    # ---------------------------------------------------------------- connections and memory

    def connect(self, connection_id: int) -> int:
        """A new connection; returns the lkey by which its requests name the window."""
        link = _Link(self._key())
        self._links[connection_id] = link
        return link.lkey

    def disconnect(self, connection_id: int) -> None:
        """What is posted and not executed never will be, and its keys are void."""
        self._links.pop(connection_id, None)

    def register(self, connection_id: int, address: int, view: memoryview, access: Access) -> int:
        """Client memory, at any address the simulation likes to give it; the rkey."""
        rkey = self._key()
        self._links[connection_id].remote[rkey] = _Range(address, view, access)
        return rkey

    def deregister(self, connection_id: int, rkey: int) -> None:
        del self._links[connection_id].remote[rkey]

    def grant(self, connection_id: int, address: int, length_bytes: int) -> int:
        """`LeasePort`: the client may read so much of the window."""
        rkey = self._key()
        start = address - self._window.address
        view = self._window.view[start : start + length_bytes]
        self._links[connection_id].granted[rkey] = _Range(address, view, Access.REMOTE_READ)
        return rkey

    def revoke(self, connection_id: int, rkey: int) -> None:
        """`LeasePort`."""
        link = self._links.get(connection_id)
        if link is not None:
            link.granted.pop(rkey, None)

    def client_read(self, connection_id: int, rkey: int, address: int, length_bytes: int) -> bytes | None:
        """A client's one-sided READ of the window: the bytes, or None where hardware would say REM_ACCESS_ERR."""
        granted = self._links[connection_id].granted.get(rkey)
        if granted is None:
            return None
        start = address - granted.address
        if start < 0 or start + length_bytes > len(granted.view):
            return None
        return bytes(granted.view[start : start + length_bytes])

    @property
    def grants(self) -> int:
        return sum(len(link.granted) for link in self._links.values())

    def _key(self) -> int:
        self._next_key += self._random.randint(1, 9)
        return self._next_key

    # ---------------------------------------------------------------- work

    def post(self, connection_id: int, requests: Sequence[SendRequest]) -> None:
        self._links[connection_id].queue.extend(map(_Posted, requests))

    def post_rdma(
        self,
        connection_id: int,
        wr_id: int,
        opcode: Opcode,
        requests: bytes | bytearray | memoryview,
        flags: SendFlags = SendFlags.SIGNALED,
    ) -> None:
        """`doca_shims.api.Connection.post_rdma`. Each request is executed on its own."""
        batch = _Batch()
        posted = [
            SendRequest(wr_id, opcode, (Sge(local, length, lkey),), remote, rkey, SendFlags.NONE)
            for local, remote, length, lkey, rkey, _ in RDMA_REQUEST.iter_unpack(requests)
        ]
        posted[-1] = posted[-1]._replace(flags=flags)
        self._links[connection_id].queue.extend(_Posted(request, batch) for request in posted)

    def send(self, connection_id: int, capsule: bytes) -> None:
        """A SEND behind whatever is posted already."""
        self._links[connection_id].queue.append(capsule)

    def busy(self) -> list[int]:
        """Connections with something to execute or to poll, in the order in which they were made."""
        return [number for number, link in self._links.items() if link.queue or link.completions]

    def posted(self, connection_id: int) -> int:
        """Work requests posted and not executed yet."""
        return sum(not isinstance(item, bytes) for item in self._links[connection_id].queue)

    def execute(self, connection_id: int, count: int) -> list[bytes]:
        """Carry out the next `count` of what is posted; the capsules that reached the client."""
        link = self._links[connection_id]
        arrived: list[bytes] = []
        while link.queue and count > 0:
            count -= 1
            item = link.queue.popleft()
            if isinstance(item, bytes):
                if not link.failed:
                    arrived.append(item)
                continue
            request, batch = item.request, item.batch
            status = WcStatus.WR_FLUSH_ERR if link.failed else self._transfer(connection_id, link, request)
            tell = bool(request.flags & SendFlags.SIGNALED)
            if status is not WcStatus.SUCCESS:
                link.failed = True
                tell = batch is None or not batch.failed
                if batch is not None:
                    batch.failed = True
            if tell:
                link.completions.append(Completion(request.wr_id, status, request.opcode, _length(request)))
        return arrived

    def poll(self, connection_id: int) -> list[Completion]:
        link = self._links[connection_id]
        completions, link.completions = link.completions, []
        return completions

    def _transfer(self, connection_id: int, link: _Link, request: SendRequest) -> WcStatus:
        length = _length(request)
        pieces = [self._local(link, sge) for sge in request.sges]
        if any(piece is None for piece in pieces):
            return WcStatus.LOC_PROT_ERR
        remote = link.remote.get(request.rkey)
        write = request.opcode is Opcode.RDMA_WRITE
        needed = Access.REMOTE_WRITE if write else Access.REMOTE_READ
        if remote is None or not remote.access & needed:
            return WcStatus.REM_ACCESS_ERR
        start = request.remote_address - remote.address
        if start < 0 or start + length > len(remote.view):
            return WcStatus.REM_ACCESS_ERR
        self._on_access(connection_id, request.opcode, request.remote_address, length)
        failed = self.failure_chance > 0 and self._random.random() < self.failure_chance
        left = self._random.randrange(length + 1) if failed else length
        for piece in pieces:
            if piece is None or left == 0:
                break
            count = min(len(piece), left)
            if write:
                remote.view[start : start + count] = piece[:count]
            else:
                piece[:count] = remote.view[start : start + count]
            start += count
            left -= count
        return WcStatus.RETRY_EXC_ERR if failed else WcStatus.SUCCESS

    def _local(self, link: _Link, sge: Sge) -> memoryview | None:
        start = sge.address - self._window.address
        if sge.lkey != link.lkey or start < 0 or start + sge.length > self._window.length_bytes:
            return None
        return self._window.view[start : start + sge.length]


def _length(request: SendRequest) -> int:
    return sum(sge.length for sge in request.sges)
