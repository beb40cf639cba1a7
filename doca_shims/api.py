"""The seam: what Entresol asks of hardware, and nothing more.

Protocols and plain values only (ints, bytes, memoryview, named tuples, frozen dataclasses); imports the
standard library alone. Names and numbers are those of the InfiniBand verbs (`ibv_*`), so that a reader of the
spec finds them here. A backend implements the protocols of one kind and is found by `doca_shims.registry`;
`doca_shims.contract` says, executably, how it must behave. Code above the seam asks `caps`, never a name.

Kinds used so far: fabric (RDMA device), flash device, clock. DMA engine, host channel, crypto and NIC join when
something uses them: each is its own small group of protocols and its own entry-point group.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum, IntFlag
from typing import NamedTuple, Protocol, TypeAlias

API_VERSION = (1, 0)
"""(major, minor). A backend states what it was written for; another major, or a newer minor, is refused."""


class ShimError(OSError):
    """A lower layer refused or failed. `errno` is the one that the hardware's own library would give.

    `operation` names what was asked, such as ``ibv_post_send``.
    """

    def __init__(self, errno: int, operation: str, detail: str) -> None:
        super().__init__(errno, f"{operation}: {detail}")
        self.operation = operation
        self.detail = detail


# --------------------------------------------------------------------------------------------- fabric: values


class Access(IntFlag):
    """`ibv_access_flags`. Local read is always allowed."""

    LOCAL_WRITE = 1
    REMOTE_WRITE = 2
    REMOTE_READ = 4


class Opcode(IntEnum):
    """`ibv_wr_opcode`, and `ibv_wc_opcode`'s RECV for completions of receives."""

    RDMA_WRITE = 0
    SEND = 2
    RDMA_READ = 4
    RECV = 128


class SendFlags(IntFlag):
    """`ibv_send_flags`."""

    NONE = 0
    SIGNALED = 2


class WcStatus(IntEnum):
    """`ibv_wc_status`."""

    SUCCESS = 0
    LOC_LEN_ERR = 1
    LOC_QP_OP_ERR = 2
    LOC_PROT_ERR = 4
    WR_FLUSH_ERR = 5
    REM_INV_REQ_ERR = 9
    REM_ACCESS_ERR = 10
    REM_OP_ERR = 11
    RETRY_EXC_ERR = 12
    RNR_RETRY_EXC_ERR = 13


class ConnectionState(IntEnum):
    """Where a connection's queue pair is. ERROR: everything posted is flushed; only `close` is useful."""

    READY = 3  # IBV_QPS_RTS
    ERROR = 6  # IBV_QPS_ERR
    CLOSED = 0  # IBV_QPS_RESET


class Sge(NamedTuple):
    """Scatter/gather element: `length` bytes at local virtual `address`, within the region of `lkey`."""

    address: int
    length: int
    lkey: int


class SendRequest(NamedTuple):
    """`ibv_send_wr`. SEND takes no remote fields. RDMA_READ scatters into `sges`, RDMA_WRITE gathers from them.

    Without SIGNALED only a failure produces a completion; success is implied by a later signalled one.
    """

    wr_id: int
    opcode: Opcode
    sges: tuple[Sge, ...]
    remote_address: int = 0
    rkey: int = 0
    flags: SendFlags = SendFlags.SIGNALED


RDMA_REQUEST = struct.Struct("<QQIIII")
"""One READ or WRITE of `Connection.post_rdma`, with one element: local address, remote address, length in bytes,
lkey, rkey, and 0 (reserved). 32 bytes, so that an array of them is built and checked without a loop."""


class RecvRequest(NamedTuple):
    """`ibv_recv_wr` with one element; the memory must be registered with LOCAL_WRITE."""

    wr_id: int
    sge: Sge


class Completion(NamedTuple):
    """`ibv_wc`. `byte_count` is meaningful for a successful RECV and RDMA_READ only."""

    wr_id: int
    status: WcStatus
    opcode: Opcode
    byte_count: int


@dataclass(frozen=True)
class QueueLimits:
    """What a connection's queue pair is created with. Posting more than this raises ENOMEM."""

    max_send_wr: int = 1024
    max_recv_wr: int = 64
    max_sge: int = 16


@dataclass(frozen=True)
class FabricCaps:
    """What this device can do. Bytes and counts are maxima."""

    one_sided_initiator: bool
    """A client may itself READ memory of the other side (leases are usable)."""
    gpu_memory: bool
    """Device memory can be registered."""
    max_send_wr: int
    max_recv_wr: int
    max_sge: int
    max_message_bytes: int
    """Largest SEND."""
    page_sizes_bytes: tuple[int, ...]
    """Page sizes that `allocate` can give, smallest first."""


# ------------------------------------------------------------------------------------------ fabric: protocols


class Memory(Protocol):
    """Memory that the fabric allocated: shareable, page-aligned, zeroed. Whoever allocates closes it, after
    closing every region registered on it."""

    @property
    def address(self) -> int: ...
    @property
    def length_bytes(self) -> int: ...
    @property
    def page_bytes(self) -> int: ...
    @property
    def view(self) -> memoryview:
        """The same bytes, format 'B', writable."""
        ...

    @property
    def fd(self) -> int | None:
        """A descriptor by which another process may map it; None where there is none. Owned by the memory."""
        ...

    def close(self) -> None:
        """Idempotent. EBUSY while a region is registered on it."""
        ...


class MemoryRegion(Protocol):
    """`ibv_mr`: a registered range and its keys. Valid for the connections of its protection domain only."""

    @property
    def address(self) -> int: ...
    @property
    def length_bytes(self) -> int: ...
    @property
    def access(self) -> Access: ...
    @property
    def lkey(self) -> int: ...
    @property
    def rkey(self) -> int: ...
    def close(self) -> None:
        """Deregister. Idempotent. When it returns no peer can read or write the range any more, whatever state
        the peer is in (running, stopped, dead); a peer's transfer under way ends with an error at the peer."""
        ...


class ProtectionDomain(Protocol):
    """`ibv_pd`: what a set of connections may reach. One per session."""

    def register(self, address: int, length_bytes: int, access: Access, owner: object = None) -> MemoryRegion:
        """Register `length_bytes` at virtual `address` of this process: memory from `Device.allocate`, or any
        other that this process may write. `owner` is kept referenced until the region closes.

        Raises ShimError: EINVAL (zero length; REMOTE_WRITE without LOCAL_WRITE, as verbs has it), EFAULT (not
        mapped), ENOMEM (limit reached).
        """
        ...

    def close(self) -> None:
        """Idempotent. EBUSY while regions or connections of it are open."""
        ...


class Connection(Protocol):
    """One reliable connection (RC queue pair with its own completion queue). Not thread-safe: one owner posts
    and polls. Sends complete in order; a failure puts it into ERROR and flushes the rest with WR_FLUSH_ERR."""

    @property
    def state(self) -> ConnectionState: ...
    @property
    def peer(self) -> str:
        """The other side, for people and logs."""
        ...

    @property
    def limits(self) -> QueueLimits: ...
    @property
    def private_data(self) -> bytes:
        """What the other side gave to `connect` or `accept`."""
        ...

    def fileno(self) -> int:
        """Readable whenever `poll` may have something to return, the move to ERROR included. Level-triggered
        as long as the owner polls until a plain `poll` returns an empty list."""
        ...

    def post_recv(self, requests: Sequence[RecvRequest]) -> None:
        """Raises ShimError: ENOMEM (queue full; nothing of the batch was posted), EINVAL (bad lkey, range or
        access, checked here where hardware would only say so on arrival), ENOTCONN when not READY."""
        ...

    def post_send(self, requests: Sequence[SendRequest]) -> None:
        """Post a batch with one doorbell. Raises ShimError: ENOMEM (queue full; nothing was posted), EINVAL
        (too many elements, unknown opcode; nothing was posted), ENOTCONN when not READY. Bad local or remote
        keys, ranges and access come back as completions: LOC_PROT_ERR, REM_ACCESS_ERR."""
        ...

    def post_rdma(
        self,
        wr_id: int,
        opcode: Opcode,
        requests: bytes | bytearray | memoryview,
        flags: SendFlags = SendFlags.SIGNALED,
    ) -> None:
        """Post packed `RDMA_REQUEST`s, in order, with one doorbell: each is a READ or WRITE (`opcode`) of one
        element and takes a slot of the send queue. `requests` may be used again when this returns.

        With SIGNALED there is one completion for all of them, with `wr_id`; without, success is implied by a later
        signalled one. A failure always completes once, with `wr_id` and the status of the first request that failed;
        those before it were carried out. `byte_count` says nothing.

        Raises ShimError: ENOMEM (queue full; nothing was posted), EINVAL (another opcode; no request, or no whole
        number of them; a reserved field that is not 0; nothing was posted), ENOTCONN when not READY."""
        ...

    def poll(self, max_completions: int = 256, arm: bool = True) -> list[Completion]:
        """Completions in order, at most so many; never blocks. A lost peer shows as flushed completions and
        `state` ERROR.

        A plain poll that finds nothing arms `fileno` (`ibv_req_notify_cq`, and one more look). For busy polling,
        `arm=False` only looks (`ibv_poll_cq`), which is as cheap as can be and spares the peer the doorbell: `fileno`
        then promises nothing until a plain poll has returned an empty list. So: look with `arm=False` as long as it
        pays, poll plainly, and sleep only if that too found nothing."""
        ...

    def close(self) -> None:
        """Destroy the queue pair. Idempotent. When it returns, nothing the peer does through this connection
        can touch memory here. Posted work is gone; poll first for its completions."""
        ...


class ConnectionRequest(Protocol):
    """A peer that has asked to connect (`RDMA_CM_EVENT_CONNECT_REQUEST`)."""

    @property
    def private_data(self) -> bytes: ...
    @property
    def peer(self) -> str: ...
    def accept(
        self, pd: ProtectionDomain, limits: QueueLimits, recvs: Sequence[RecvRequest] = (), private_data: bytes = b""
    ) -> Connection:
        """`recvs` are posted before the peer learns that it is connected, so that its first SEND finds one."""
        ...

    def reject(self, reason: str) -> None:
        """The peer's `connect` raises ECONNREFUSED with this text."""
        ...


class Listener(Protocol):
    """Waits for peers at an address."""

    @property
    def address(self) -> str:
        """What a peer passes to `connect`; holds the real port where 0 was asked for."""
        ...

    def fileno(self) -> int: ...
    def accept(self) -> ConnectionRequest | None:
        """The next peer, or None when none waits. Never blocks."""
        ...

    def close(self) -> None: ...


class Fabric(Protocol):
    """An RDMA device and port. Made by a backend's factory: ``factory(options: Mapping[str, str]) -> Fabric``."""

    @property
    def caps(self) -> FabricCaps: ...
    def allocate(self, length_bytes: int, page_bytes: int = 4096) -> Memory:
        """Raises ShimError: EINVAL (page size not in caps), ENOMEM."""
        ...

    def alloc_pd(self) -> ProtectionDomain: ...
    def listen(self, address: str) -> Listener:
        """`address` is the backend's own form (a socket path, host:port). Raises ShimError: EADDRINUSE, EINVAL."""
        ...

    def connect(
        self,
        address: str,
        pd: ProtectionDomain,
        limits: QueueLimits,
        recvs: Sequence[RecvRequest] = (),
        private_data: bytes = b"",
        timeout_s: float = 5.0,
    ) -> Connection:
        """Blocks until READY. `private_data` is at most 56 bytes (RDMA CM's limit). Raises ShimError:
        ECONNREFUSED (rejected or nobody listens), ETIMEDOUT, EINVAL."""
        ...

    def close(self) -> None:
        """Idempotent. EBUSY while anything made from it is open."""
        ...


# ---------------------------------------------------------------------------------------------- flash devices


class FlashOp(IntEnum):
    READ = 0
    WRITE = 1
    FLUSH = 2
    """Volatile caches down to media; `offset_bytes` and `length_bytes` are 0."""
    DISCARD = 3
    """Advice that the range is no longer needed. What it reads as afterwards is undefined."""


class FlashRequest(NamedTuple):
    """`length_bytes` between flash at `offset_bytes` and local virtual `address`; all three are multiples of
    `FlashCaps.block_bytes`. The memory belongs to the device until the completion with the same `tag`."""

    tag: int
    op: FlashOp
    offset_bytes: int
    address: int = 0
    length_bytes: int = 0


class FlashCompletion(NamedTuple):
    """`result` is the number of bytes moved, or a negative errno. A short count is the caller's to notice."""

    tag: int
    result: int


@dataclass(frozen=True)
class FlashCaps:
    capacity_bytes: int
    block_bytes: int
    """Unit of alignment for offset, address and length."""
    max_io_bytes: int
    queue_depth_max: int
    discard: bool
    driver: str
    """For logs and reports only."""


class FlashDevice(Protocol):
    """One flash namespace. One owner submits and polls. Completions come in any order.

    Made by a backend's factory: ``factory(path, options: Mapping[str, str]) -> FlashDevice``.
    """

    @property
    def caps(self) -> FlashCaps: ...
    def register_memory(self, memory: Memory) -> None:
        """Announce memory that requests will name, once, before use; it must outlive the device."""
        ...

    def submit(self, requests: Sequence[FlashRequest]) -> None:
        """Start a batch. Raises ShimError: EAGAIN (would exceed queue_depth_max; nothing was started), EINVAL
        (misaligned, out of range, or memory never registered; nothing was started)."""
        ...

    def fileno(self) -> int:
        """Readable while completions wait."""
        ...

    def poll(self) -> list[FlashCompletion]:
        """Never blocks."""
        ...

    def close(self) -> None:
        """Idempotent. Waits for what is in flight, then releases everything."""
        ...


# ---------------------------------------------------------------------------------------------------- clock


class Clock(Protocol):
    def monotonic_ns(self) -> int: ...
    def wall_ns(self) -> int:
        """Nanoseconds since 1970; may jump. For times that outlive the process only."""
        ...


FabricOptions: TypeAlias = dict[str, str]
