"""What the emulated fabrics share: devices, protection domains, registered regions, and queue pairs' accounting.

Keys are random 32-bit numbers, valid in one protection domain. A queue pair here counts slots and keeps the
completion queue as hardware does: a slot is free again when its completion (or a later signalled one) has been
polled. How bytes move is the business of `fabric_shm` and `fabric_tcp`, which derive from these classes.
"""

from __future__ import annotations

import errno
import secrets
import threading
from bisect import bisect_right
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

from doca_shims.api import (
    Access,
    Completion,
    ConnectionState,
    FabricCaps,
    Opcode,
    QueueLimits,
    RecvRequest,
    SendFlags,
    SendRequest,
    ShimError,
    WcStatus,
)
from emulator.fabric_batch import BATCH, BATCH_END, SIGNALED, SIGNALED_END, unpack_rdma
from emulator.fabric_endpoint import Endpoint as Endpoint
from emulator.fabric_memory import MemfdMemory, check_mapped, page_sizes_bytes

MAX_REGIONS = 4096
"""Regions of one protection domain."""
MAX_TRANSFER_BYTES = 1 << 30
"""Largest READ or WRITE (mlx5's max_msg_sz)."""
MAX_MESSAGE_BYTES = 131072
"""Largest SEND."""
MAX_PRIVATE_DATA_BYTES = 56
MAX_SEND_WR = 4096
MAX_RECV_WR = 1024
MAX_SGE = 32

_ALL_ACCESS = int(Access.LOCAL_WRITE | Access.REMOTE_WRITE | Access.REMOTE_READ)
_READY = ConnectionState.READY
_SUCCESS = WcStatus.SUCCESS
_RECV = Opcode.RECV
_new = tuple.__new__
"""Builds a named tuple in half the time that calling its class takes."""
_OPCODES = (Opcode.SEND, Opcode.RDMA_WRITE, Opcode.RDMA_READ)


@dataclass(frozen=True)
class Timeouts:
    rnr_s: float
    """How long a SEND waits for the peer to post a receive."""
    transport_s: float
    """How long a SEND waits for the peer's side to take or answer anything."""


class Region:
    """`doca_shims.api.MemoryRegion`. The booleans repeat `access`, for the data path."""

    __slots__ = (
        "access",
        "address",
        "can_write",
        "end",
        "length_bytes",
        "lkey",
        "memory",
        "owner",
        "pd",
        "remote_read",
        "remote_write",
        "rkey",
    )

    def __init__(
        self,
        pd: Domain,
        address: int,
        length_bytes: int,
        access: Access,
        keys: tuple[int, int],
        memory: MemfdMemory | None,
        owner: object,
    ) -> None:
        self.pd: Domain | None = pd
        self.address = address
        self.length_bytes = length_bytes
        self.end = address + length_bytes
        self.access = access
        self.can_write = bool(access & Access.LOCAL_WRITE)
        self.remote_read = bool(access & Access.REMOTE_READ)
        self.remote_write = bool(access & Access.REMOTE_WRITE)
        self.lkey, self.rkey = keys
        self.memory = memory
        self.owner = owner

    def close(self) -> None:
        pd, self.pd = self.pd, None
        if pd is None:
            return
        pd.deregister(self)
        self.owner = None


class Domain:
    """`doca_shims.api.ProtectionDomain`. A backend overrides `_publish` and `_revoke`."""

    def __init__(self, device: Device) -> None:
        self.device = device
        self.lock = threading.Lock()
        """Guards the tables and the set: a backend's threads look regions up while the owner registers."""
        self.by_lkey: dict[int, Region] = {}
        self.by_rkey: dict[int, Region] = {}
        self.connections: set[QueuePair] = set()
        self._closed = False

    def register(self, address: int, length_bytes: int, access: Access, owner: object = None) -> Region:
        flags = int(access)
        if length_bytes <= 0 or address <= 0 or flags & ~_ALL_ACCESS:
            raise ShimError(errno.EINVAL, "ibv_reg_mr", f"address 0x{address:x}, {length_bytes} bytes, access {flags}")
        if access & Access.REMOTE_WRITE and not access & Access.LOCAL_WRITE:
            raise ShimError(errno.EINVAL, "ibv_reg_mr", "REMOTE_WRITE needs LOCAL_WRITE")
        if self._closed:
            raise ShimError(errno.EINVAL, "ibv_reg_mr", "the protection domain is closed")
        memory = self.device.memory_at(address, length_bytes)
        if memory is None:
            check_mapped(address, length_bytes, bool(access & Access.LOCAL_WRITE))
        else:
            memory.hold()
        with self.lock:
            full = len(self.by_lkey) >= MAX_REGIONS
            if not full:
                keys = (_new_key(self.by_lkey), _new_key(self.by_rkey))
                region = Region(self, address, length_bytes, access, keys, memory, owner)
                self._publish(region)
                self.by_lkey[region.lkey] = region
                self.by_rkey[region.rkey] = region
        if full:
            if memory is not None:
                memory.release()
            raise ShimError(errno.ENOMEM, "ibv_reg_mr", f"{MAX_REGIONS} regions are registered in this domain")
        return region

    def deregister(self, region: Region) -> None:
        with self.lock:
            del self.by_lkey[region.lkey]
            del self.by_rkey[region.rkey]
        try:
            self._revoke(region)
        finally:
            if region.memory is not None:
                region.memory.release()

    def close(self) -> None:
        if self._closed:
            return
        if self.by_lkey or self.connections:
            detail = f"{len(self.by_lkey)} regions and {len(self.connections)} connections are open"
            raise ShimError(errno.EBUSY, "ibv_dealloc_pd", detail)
        self._closed = True
        self._release()
        self.device.forget(self)

    def _publish(self, region: Region) -> None:
        """Let peers see the region; called under `lock`."""

    def _revoke(self, region: Region) -> None:
        """Return when no peer can reach the region any more; it is out of the tables already."""

    def _release(self) -> None:
        """Free what the backend made for the domain."""


def _new_key(taken: dict[int, Region]) -> int:
    while True:
        key = secrets.randbits(32)
        if key and key not in taken:
            return key


class Device:
    """The part of `doca_shims.api.Fabric` that does not depend on how bytes travel."""

    def __init__(self, one_sided_initiator: bool) -> None:
        self.caps = FabricCaps(
            one_sided_initiator=one_sided_initiator,
            gpu_memory=False,
            max_send_wr=MAX_SEND_WR,
            max_recv_wr=MAX_RECV_WR,
            max_sge=MAX_SGE,
            max_message_bytes=MAX_MESSAGE_BYTES,
            page_sizes_bytes=page_sizes_bytes(),
        )
        self.domains: set[Domain] = set()
        self.listeners: set[object] = set()
        self._memories: dict[int, DeviceMemory] = {}
        self._addresses: list[int] = []

    def allocate(self, length_bytes: int, page_bytes: int = 4096) -> DeviceMemory:
        memory = DeviceMemory(self, length_bytes, page_bytes)
        self._memories[memory.address] = memory
        self._addresses = sorted(self._memories)
        return memory

    def memory_at(self, address: int, length_bytes: int) -> DeviceMemory | None:
        """The allocated memory that holds the whole range, or None."""
        at = bisect_right(self._addresses, address) - 1
        if at < 0:
            return None
        memory = self._memories[self._addresses[at]]
        return memory if memory.covers(address, length_bytes) else None

    def forget(self, child: object) -> None:
        if isinstance(child, DeviceMemory):
            self._memories.pop(child.address, None)
            self._addresses = sorted(self._memories)
        elif isinstance(child, Domain):
            self.domains.discard(child)
        else:
            self.listeners.discard(child)

    def close(self) -> None:
        if self._memories or self.domains or self.listeners:
            raise ShimError(
                errno.EBUSY,
                "ibv_close_device",
                f"{len(self.domains)} protection domains, {len(self._memories)} memories and "
                f"{len(self.listeners)} listeners are open",
            )

    def check_limits(self, limits: QueueLimits, private_data: bytes) -> None:
        """Raises ShimError EINVAL for a queue pair that this device cannot have."""
        wanted = (limits.max_send_wr, limits.max_recv_wr, limits.max_sge)
        largest = (self.caps.max_send_wr, self.caps.max_recv_wr, self.caps.max_sge)
        if any(not 1 <= want <= most for want, most in zip(wanted, largest)):
            raise ShimError(errno.EINVAL, "ibv_create_qp", f"limits {wanted} beyond the device's {largest}")
        if len(private_data) > MAX_PRIVATE_DATA_BYTES:
            raise ShimError(errno.EINVAL, "rdma_connect", f"{len(private_data)} bytes of private data; at most 56")


class DeviceMemory(MemfdMemory):
    """Memory that its device knows, so that a registration of it is found to be shareable."""

    def __init__(self, device: Device, length_bytes: int, page_bytes: int) -> None:
        super().__init__(length_bytes, page_bytes)
        self._device = device

    def close(self) -> None:
        super().close()
        self._device.forget(self)


class QueuePair(Endpoint):
    """State, slots and the completion queue of one connection. Not locked: a backend with threads does that."""

    def __init__(self, pd: Domain, limits: QueueLimits, peer: str) -> None:
        super().__init__()
        self.pd = pd
        self.limits = limits
        self.peer = peer
        self.private_data = b""
        self.state = ConnectionState.READY
        self._cq: deque[tuple[Completion, int, int]] = deque()  # completion, send slots, receive slots it frees
        self._recvs: deque[RecvRequest] = deque()
        self._send_used = 0
        self._recv_used = 0
        self._silent = 0  # send slots that the next send completion frees besides its own
        self._batch_failed = False  # the rest of a `post_rdma` fails silently

    def abandon(self) -> None:
        self.state = ConnectionState.CLOSED
        super().abandon()

    def _admit_recvs(self, requests: Sequence[RecvRequest]) -> None:
        """Check a batch and take its slots; raises with nothing posted."""
        if self.state is not _READY:
            raise self._not_ready("ibv_post_recv")
        if self._recv_used + len(requests) > self.limits.max_recv_wr:
            raise ShimError(errno.ENOMEM, "ibv_post_recv", f"the queue has {self.limits.max_recv_wr} slots")
        by_lkey = self.pd.by_lkey
        for _, (address, length, lkey) in requests:
            region = by_lkey.get(lkey)
            if (
                region is None
                or address < region.address
                or length < 0
                or address + length > region.end
                or not region.can_write
            ):
                detail = "the element is not within a LOCAL_WRITE region of this domain"
                raise ShimError(errno.EINVAL, "ibv_post_recv", detail)
        self._recv_used += len(requests)
        self._recvs.extend(requests)

    def _admit_sends(self, requests: Sequence[SendRequest]) -> None:
        """Check a batch and take its slots; raises with nothing posted."""
        if self.state is not _READY:
            raise self._not_ready("ibv_post_send")
        used = self._send_used + len(requests)
        if used > self.limits.max_send_wr:
            raise self._full()
        most = self.limits.max_sge
        for _, opcode, sges, _, _, _ in requests:
            if len(sges) > most:
                raise ShimError(errno.EINVAL, "ibv_post_send", f"{len(sges)} elements; the queue takes {most}")
            if opcode not in _OPCODES:
                raise ShimError(errno.EINVAL, "ibv_post_send", f"opcode {opcode} cannot be sent")
        self._send_used = used

    def post_send(self, requests: Sequence[SendRequest]) -> None:
        """`doca_shims.api.Connection.post_send`."""
        raise NotImplementedError

    def post_rdma(
        self,
        wr_id: int,
        opcode: Opcode,
        requests: bytes | bytearray | memoryview,
        flags: SendFlags = SendFlags.SIGNALED,
    ) -> None:
        """`doca_shims.api.Connection.post_rdma`, by `post_send`."""
        self.post_send(unpack_rdma(wr_id, opcode, requests, flags))

    def _take_send_slots(self, count: int) -> None:
        """Raises ShimError ENOMEM where there are not as many."""
        if self._send_used + count > self.limits.max_send_wr:
            raise self._full()
        self._send_used += count

    def _full(self) -> ShimError:
        return ShimError(errno.ENOMEM, "ibv_post_send", f"the queue has {self.limits.max_send_wr} slots")

    def _not_ready(self, operation: str) -> ShimError:
        return ShimError(errno.ENOTCONN, operation, f"the connection to {self.peer} is {self.state.name}")

    def _complete_send(self, wr_id: int, opcode: Opcode, flags: int, status: WcStatus, byte_count: int = 0) -> None:
        """Retire the oldest posted send."""
        if status is _SUCCESS:
            if flags != SIGNALED and flags != SIGNALED_END:  # an IntFlag compares fast and masks slowly
                self._silent += 1
                return
        elif flags & BATCH:
            told = self._batch_failed
            self._batch_failed = not flags & BATCH_END
            if told:
                self._silent += 1
                return
        self._cq.append((_new(Completion, (wr_id, status, opcode, byte_count)), self._silent + 1, 0))
        self._silent = 0

    def _refuse_send(self, request: SendRequest, status: WcStatus) -> None:
        """Retire the oldest posted send, which failed."""
        self._complete_send(request.wr_id, request.opcode, request.flags, status)

    def _complete_recv(self, wr_id: int, status: WcStatus, byte_count: int = 0) -> None:
        self._cq.append((_new(Completion, (wr_id, status, _RECV, byte_count)), 0, 1))

    def _flush_recvs(self) -> None:
        while self._recvs:
            self._complete_recv(self._recvs.popleft().wr_id, WcStatus.WR_FLUSH_ERR)

    def _reap(self, max_completions: int) -> list[Completion]:
        """Take completions off the queue and free their slots."""
        queue = self._cq
        count = min(len(queue), max_completions)
        if count == 1:
            completion, sends, recvs = queue.popleft()
            self._send_used -= sends
            self._recv_used -= recvs
            return [completion]
        reaped: list[Completion] = []
        for _ in range(count):
            completion, sends, recvs = queue.popleft()
            self._send_used -= sends
            self._recv_used -= recvs
            reaped.append(completion)
        return reaped
