"""What the checks of `doca_shims.contract` stand on: a fabric to test, connected pairs in this process, waiting.

Uses the seam and the standard library alone, and waits on descriptors with a bound, never by sleeping for luck.
"""

from __future__ import annotations

import select
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from types import TracebackType

from doca_shims.api import (
    Access,
    Completion,
    Connection,
    ConnectionRequest,
    Fabric,
    Listener,
    Memory,
    MemoryRegion,
    Opcode,
    ProtectionDomain,
    QueueLimits,
    RecvRequest,
    SendFlags,
    SendRequest,
    Sge,
    ShimError,
    WcStatus,
)

ALL_ACCESS = Access.LOCAL_WRITE | Access.REMOTE_READ | Access.REMOTE_WRITE
MEMORY_BYTES = 1 << 20
WAIT_S = 10.0
"""Bound of every wait. Nothing here should take a hundredth of it, but a shared machine may be slow."""


class ContractViolationError(Exception):
    """The backend did not behave as `doca_shims.api` says."""


class SkippedError(Exception):
    """The check needs what this backend's capabilities do not offer."""


@dataclass(frozen=True)
class FabricHarness:
    """How to reach the backend under test."""

    backend: str
    """Entry-point name, by which a peer process opens it too."""
    options: Mapping[str, str]
    open_fabric: Callable[[], Fabric]
    new_address: Callable[[], str]
    """An address to listen at, fresh at each call."""
    failure_limit_s: float
    """Within this an unanswered request must have failed, by the options above."""


def expect(condition: object, what: str) -> None:
    """Raises ContractViolationError unless `condition` holds."""
    if not condition:
        raise ContractViolationError(what)


def expect_errno(number: int, action: Callable[[], object], what: str) -> None:
    """`action` must raise ShimError with this errno."""
    try:
        action()
    except ShimError as error:
        expect(error.errno == number, f"{what}: errno {error.errno} ({error}), not {number}")
        return
    raise ContractViolationError(f"{what}: no error, where errno {number} is due")


def collect(connection: Connection, count: int, limit_s: float = WAIT_S) -> list[Completion]:
    """Wait for `count` completions. The descriptor must announce them."""
    completions: list[Completion] = []
    deadline_s = time.monotonic() + limit_s
    readable = select.poll()
    readable.register(connection.fileno(), select.POLLIN)
    while len(completions) < count:
        found = connection.poll()
        completions.extend(found)
        if found:
            continue
        left_s = deadline_s - time.monotonic()
        expect(left_s > 0, f"{len(completions)} of {count} completions after {limit_s} s: {completions}")
        readable.poll(left_s * 1000)
    return completions


def require_one_sided(fabric: Fabric) -> None:
    """Skip the check where only one side of a connection can initiate READ and WRITE."""
    if not fabric.caps.one_sided_initiator:
        raise SkippedError("only the accepting side initiates READ and WRITE here")


def statuses(completions: Sequence[Completion]) -> list[WcStatus]:
    return [completion.status for completion in completions]


def wait_readable(descriptor: int, limit_s: float = WAIT_S) -> bool:
    readable = select.poll()
    readable.register(descriptor, select.POLLIN)
    return bool(readable.poll(limit_s * 1000))


class Side:
    """One end: a domain, memory from `allocate` registered with all access, and later a connection."""

    def __init__(self, fabric: Fabric, memory_bytes: int = MEMORY_BYTES) -> None:
        self.fabric = fabric
        self.pd: ProtectionDomain = fabric.alloc_pd()
        self.memory: Memory = fabric.allocate(memory_bytes)
        self.region: MemoryRegion = self.pd.register(self.memory.address, memory_bytes, ALL_ACCESS)
        self.connection: Connection

    def sge(self, offset: int, length: int) -> Sge:
        return Sge(self.memory.address + offset, length, self.region.lkey)

    def recv(self, wr_id: int, offset: int, length: int) -> RecvRequest:
        return RecvRequest(wr_id, self.sge(offset, length))

    def send(self, wr_id: int, offset: int, length: int, flags: SendFlags = SendFlags.SIGNALED) -> SendRequest:
        return SendRequest(wr_id, Opcode.SEND, (self.sge(offset, length),), flags=flags)

    def transfer(
        self,
        wr_id: int,
        opcode: Opcode,
        local: tuple[int, int],
        remote: tuple[int, int],
        flags: SendFlags = SendFlags.SIGNALED,
    ) -> SendRequest:
        """READ or WRITE between local (offset, length) and remote (address, rkey)."""
        return SendRequest(wr_id, opcode, (self.sge(*local),), remote[0], remote[1], flags)

    def at(self, offset: int) -> tuple[int, int]:
        """(address, rkey), as the other side names a place here."""
        return self.memory.address + offset, self.region.rkey

    def close(self) -> None:
        if hasattr(self, "connection"):
            self.connection.close()
        self.region.close()
        self.memory.close()
        self.pd.close()


class Pair:
    """Two connected ends on one fabric in this process. `a` initiates: it connected to `b`, or, where a client can
    initiate nothing, `b` connected to it."""

    def __init__(
        self,
        harness: FabricHarness,
        limits: QueueLimits | None = None,
        memory_bytes: int = MEMORY_BYTES,
        recvs: int = 0,
    ) -> None:
        """`recvs` receives of 4096 bytes are posted on each side, with wr_id and place 0, 1, 2..."""
        self._stack = ExitStack()
        try:
            fabric = harness.open_fabric()
            self._stack.callback(fabric.close)
            self.fabric = fabric
            self.a = self._side(memory_bytes)
            self.b = self._side(memory_bytes)
            limits = limits or QueueLimits()
            listener = fabric.listen(harness.new_address())
            try:
                ready = [[side.recv(i, i * 4096, 4096) for i in range(recvs)] for side in (self.a, self.b)]
                if fabric.caps.one_sided_initiator:
                    connect_pair(listener, self.a, self.b, limits, (ready[0], ready[1]))
                else:
                    connect_pair(listener, self.b, self.a, limits, (ready[1], ready[0]))
            finally:
                listener.close()
        except BaseException:
            self._stack.close()
            raise

    def _side(self, memory_bytes: int) -> Side:
        side = Side(self.fabric, memory_bytes)
        self._stack.callback(side.close)
        return side

    def __enter__(self) -> Pair:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stack.close()


def connect_pair(
    listener: Listener,
    a: Side,
    b: Side,
    limits: QueueLimits,
    recvs: tuple[Sequence[RecvRequest], Sequence[RecvRequest]] = ((), ()),
) -> None:
    """Connect `a` to `b`, which accepts at `listener`. Each gives the other its part as private data."""
    failure: list[Exception] = []

    def connect() -> None:
        try:
            a.connection = a.fabric.connect(listener.address, a.pd, limits, recvs[0], b"from the client", WAIT_S)
        except ShimError as error:
            failure.append(error)

    thread = threading.Thread(target=connect)
    thread.start()
    try:
        request = next_request(listener)
        b.connection = request.accept(b.pd, limits, recvs[1], b"from the server")
    finally:
        thread.join()
    if failure:
        raise failure[0]


def next_request(listener: Listener) -> ConnectionRequest:
    """Wait for a peer."""
    deadline_s = time.monotonic() + WAIT_S
    while True:
        request = listener.accept()
        if request is not None:
            return request
        left_s = deadline_s - time.monotonic()
        expect(left_s > 0, "nobody connects")
        wait_readable(listener.fileno(), left_s)
