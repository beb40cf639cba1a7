"""One fabric connection to one region: credits, capsules in flight, matching of answers, and its end.

Any thread may submit, drive or end a link: one lock guards each. When a link goes down its connection is destroyed
first and its requests are answered afterwards, so that no byte lands in memory whose transfer has been answered.
Never waits and never reconnects: `host_agent.progress` waits, `host_agent.session` reconnects.
"""

from __future__ import annotations

import errno
import itertools
import logging
import threading
from collections import deque
from collections.abc import Callable, Sequence
from typing import Protocol

from common import wire
from common.status import Status
from common.wire import Op
from doca_shims.api import (
    Clock,
    Completion,
    Connection,
    ConnectionState,
    Opcode,
    RecvRequest,
    SendFlags,
    SendRequest,
    ShimError,
    WcStatus,
)
from host_agent import native_batches
from host_agent.capsules import CapsuleBuffers
from host_agent.operation import Operation, Request
from host_agent.registration import Grants

log = logging.getLogger(__name__)

_DPU_SHARE_PERCENT = 90
"""Of the time left that the DPU is given: the rest is for the answer's way back."""
_SEND, _RECV = Opcode.SEND, Opcode.RECV
_SIGNALED, _SILENT = SendFlags.SIGNALED, SendFlags.NONE
_READY, _SUCCESS = ConnectionState.READY, WcStatus.SUCCESS
"""Members looked up once: on the way of every capsule, an enumeration's attribute costs more than a global."""
_COMPLETIONS_MAX = 256
_REPOST_SHARE = 4
"""Receive places are posted again by a quarter of them."""
_YIELDING = frozenset((Op.STORE, Op.PREFETCH))
"""Operations that give way to all others, and leave them some of the credits: however many stores and hints are under
way, a load is sent at once, and so is a CANCEL."""
_KEPT_SHARE = 4
"""One credit in so many, and at least one, is never theirs."""
_READ_ID = 1 << 40
"""wr_ids from here are one-sided READs; below they are capsule places."""
SEND_QUEUE_READS = 64
"""Send queue slots for READs, beside those of capsules."""
SEND_SGES_MAX = 16
"""Elements of one work request, where the device allows as many."""
_SIGNAL_EVERY = 32
"""One capsule in so many asks for a completion: an answer implies that its request was sent."""
SEND_QUEUE_SLOTS = SEND_QUEUE_READS + 2 * _SIGNAL_EVERY
"""What a link needs beside one slot for each capsule in flight."""

_STATUSES = {int(status): status for status in Status}
_new = tuple.__new__


class Poller(Protocol):
    """What a link tells of its descriptor: see `host_agent.progress.Progress`."""

    def attach(self, link: RegionLink, fd: int) -> None: ...
    def detach(self, fd: int) -> None: ...


class RegionLink:
    """`lost` is called without arguments, in any thread, whenever the link went down by itself."""

    def __init__(self, name: str, poller: Poller, clock: Clock, lost: Callable[[], None]) -> None:
        self.name = name
        self.down_reason = "not connected yet"
        self._poller = poller
        self._clock = clock
        self._lost = lost
        self._lock = threading.Lock()
        self.grants: Grants | None = None
        """What requests on this connection may name; None while the link is down."""
        self._connection: Connection | None = None
        self._buffers: CapsuleBuffers | None = None
        self._fd = -1
        self._request_ids = itertools.count(1)
        self._read_ids = itertools.count(_READ_ID)
        self._in_flight: dict[int, tuple[Request, int]] = {}
        """By request id: the request and its send place."""
        self._reads: dict[int, Request] = {}
        self._queue: deque[Request] = deque()
        self._yielding: deque[Request] = deque()
        """Likewise waiting for credits, those of _YIELDING."""
        self._send_places: list[int] = []
        self._kept_places = 0
        self._reposts: list[RecvRequest] = []
        """Free receive places that are not posted yet: several at once cost little more than one."""
        self._unsignalled = 0
        self._broken = ""

    @property
    def up(self) -> bool:
        return self._connection is not None

    def attach(self, connection: Connection, buffers: CapsuleBuffers, credits_count: int, grants: Grants) -> None:
        """Take over a READY connection on which `buffers.recvs` are posted, and the buffers."""
        with self._lock:
            if self._connection is not None:
                raise RuntimeError(f"link {self.name} is connected already")
            self._connection = connection
            self._buffers = buffers
            self._send_places = list(range(min(credits_count, buffers.count)))
            places = len(self._send_places)
            self._kept_places = max(1, places // _KEPT_SHARE) if places > 1 else 0
            self._reposts = []
            self._unsignalled = 0
            self._broken = ""
            self.down_reason = ""
            self.grants = grants
            self._fd = connection.fileno()
            self._poller.attach(self, self._fd)

    def submit(self, requests: Sequence[Request], grants: Grants | None) -> None:
        """Send them, or queue what exceeds the credits. Where the link is down, or no longer the one whose `grants`
        the requests were made with, they are answered DISCONNECTED."""
        with self._lock:
            for request in requests:
                request.link = self
            if self._connection is None or grants is not self.grants:
                for request in requests:
                    request.operation.settle_as(request, Status.DISCONNECTED)
                return
            for request in requests:
                (self._yielding if request.op in _YIELDING else self._queue).append(request)
            self._pump()
            if self._broken:
                self._end(self._broken)

    def read(self, request: Request, reads: Sequence[SendRequest], grants: Grants) -> None:
        """Post one-sided READs, whose wr_ids and flags are chosen here; `request` is answered OK when the last has
        completed, TRANSFER_ERROR when one failed, BUSY when the send queue is full, DISCONNECTED as for `submit`."""
        with self._lock:
            request.link = self
            if self._connection is None or grants is not self.grants:
                request.operation.settle_as(request, Status.DISCONNECTED)
                return
            if len(self._reads) >= SEND_QUEUE_READS:
                request.operation.settle_as(request, Status.BUSY)
                return
            wr_id = next(self._read_ids)
            self._reads[wr_id] = request
            last = len(reads) - 1
            flags = (SendFlags.NONE, SendFlags.SIGNALED)
            posts = [read._replace(wr_id=wr_id, flags=flags[index == last]) for index, read in enumerate(reads)]
            try:
                self._connection.post_send(posts)
            except ShimError as error:
                if error.errno == errno.ENOMEM:
                    del self._reads[wr_id]
                    request.operation.settle_as(request, Status.BUSY)
                else:
                    self._end(f"posting a read failed: {error}")

    def drive(self, arm: bool = True) -> bool:
        """Handle what has arrived; never blocks. Whether there may be more. With `arm` False it is a look only, after
        which the descriptor tells nothing until `drive` without it has returned False."""
        with self._lock:
            return self._drive(arm)

    def probe(self) -> None:
        """Notice a lost connection on a link that nobody waits on."""
        if self._lock.acquire(blocking=False):
            try:
                while self._drive():
                    pass
            finally:
                self._lock.release()

    def expire(self, operation: Operation) -> None:
        """The caller's deadline has come. What was not sent is dropped; where an answer is overdue the connection is
        destroyed, so that nothing can land any more, and only then is the request answered DEADLINE."""
        with self._lock:
            self._settle_queued(operation, Status.DEADLINE)
            while self._drive():
                pass
            overdue = any(request.operation is operation for request, _place in self._in_flight.values())
            if overdue or any(request.operation is operation for request in self._reads.values()):
                self._end("no answer by the deadline")

    def withdraw(self, operation: Operation) -> list[int]:
        """Answer CANCELLED what was not sent yet; the request ids of what was, and has no answer."""
        with self._lock:
            self._settle_queued(operation, Status.CANCELLED)
            flying = self._in_flight.items()
            return [request_id for request_id, (request, _place) in flying if request.operation is operation]

    def close(self, reason: str = "closed") -> None:
        """Destroy the connection; requests in flight are answered DISCONNECTED. Idempotent."""
        with self._lock:
            self._end(reason, by_itself=False)

    # ------------------------------------------------------------------------------------ under the lock

    def _settle_queued(self, operation: Operation, status: Status) -> None:
        for queue in (self._queue, self._yielding):
            for request in [request for request in queue if request.operation is operation]:
                queue.remove(request)
                request.operation.settle_as(request, status)

    def _pump(self) -> None:
        connection, buffers = self._connection, self._buffers
        if connection is None or buffers is None or not self._send_places:
            return
        now_ns = self._clock.monotonic_ns()
        sends: list[SendRequest] = []
        while self._send_places:
            if self._queue:
                request = self._queue.popleft()
            elif self._yielding and len(self._send_places) > self._kept_places:
                request = self._yielding.popleft()
            else:
                break
            left_us = (request.deadline_ns - now_ns) * _DPU_SHARE_PERCENT // 100_000
            if left_us <= 0:
                request.operation.settle_as(request, Status.DEADLINE)
                continue
            request.request_id = next(self._request_ids)
            place = self._send_places.pop()
            size = wire.write_request(
                buffers.sends[place],
                request.op,
                request.request_id,
                request.body,
                request.count,
                sge_count=request.sge_count,
                flags=request.flags,
                deadline_us=left_us,
            )
            self._in_flight[request.request_id] = (request, place)
            self._unsignalled += 1
            signalled = self._unsignalled >= _SIGNAL_EVERY
            if signalled:  # success of the earlier ones is implied, and their queue slots are free again
                self._unsignalled = 0
            flags = _SIGNALED if signalled else _SILENT
            sends.append(_new(SendRequest, (place, _SEND, (buffers.sge(place, size),), 0, 0, flags)))
        if not sends:
            return
        try:
            if len(self._in_flight) + len(self._reposts) > buffers.count:
                self._repost(connection)  # there is a place for every answer
            connection.post_send(sends)
        except ShimError as error:
            self._broken = f"posting failed: {error}"

    def _drive(self, arm: bool = True) -> bool:
        connection, buffers = self._connection, self._buffers
        if connection is None or buffers is None:
            return False
        try:
            completions = connection.poll(_COMPLETIONS_MAX, arm)
            if not completions and not arm and connection.state is _READY:
                return False
            reposts = self._reposts
            for completion in completions:
                if completion.opcode != _RECV:
                    self._on_sent(completion)
                elif self._on_receive(completion, buffers):
                    reposts.append(buffers.recvs[completion.wr_id])
            if connection.state is not _READY and not self._broken:
                self._broken = "the other side went away"
            if len(reposts) * _REPOST_SHARE > buffers.count and not self._broken:
                self._repost(connection)
        except ShimError as error:
            self._broken = self._broken or f"the connection failed: {error}"
            completions = []
        if (self._queue or self._yielding) and not self._broken:
            self._pump()
        if self._broken:
            self._end(self._broken)
            return False
        return bool(completions)

    def _repost(self, connection: Connection) -> None:
        """Raises ShimError."""
        reposts, self._reposts = self._reposts, []
        connection.post_recv(reposts)

    def _on_receive(self, completion: Completion, buffers: CapsuleBuffers) -> bool:
        """Whether the place is to be posted again."""
        if completion.status != _SUCCESS:
            self._broken = self._broken or f"a receive ended with {completion.status.name}"
            return False
        received = buffers.received(completion.wr_id, completion.byte_count)
        opened = native_batches.MODULE.response(received, native_batches.KNOWN) if native_batches.MODULE else None
        if opened is None:
            try:
                opened = _open(received)
            except wire.WireError as error:
                self._broken = f"the DPU sent what is no answer: {error}"
                return False
        request_id, op, status, aux, entries_bytes = opened
        entry = self._in_flight.pop(request_id, None)
        if entry is None:
            self._broken = f"the DPU answered request {request_id}, which is not in flight"
            return False
        request, place = entry
        self._send_places.append(place)
        entries = received[wire.HEADER_BYTES : wire.HEADER_BYTES + entries_bytes]
        if op != request.op or not request.operation.answer(request, _STATUSES[status], aux, entries):
            self._broken = f"the DPU's answer does not fit {request.op.name} of {request.count} entries"
            request.operation.settle_as(request, Status.BAD_REQUEST)
            return False
        request.operation.settle(request)
        return True

    def _on_sent(self, completion: Completion) -> None:
        request = self._reads.pop(completion.wr_id, None)
        if completion.status != _SUCCESS:
            self._broken = self._broken or f"a send ended with {completion.status.name}"
            if request is not None:
                self._reads[completion.wr_id] = request  # answered once the connection is gone
                request.operation.mark(request, Status.TRANSFER_ERROR)
        elif request is not None:
            request.operation.settle_as(request, Status.OK)

    def _end(self, reason: str, *, by_itself: bool = True) -> None:
        connection, self._connection = self._connection, None
        if connection is None:
            return
        buffers, self._buffers = self._buffers, None
        self.grants = None
        self.down_reason = reason
        self._poller.detach(self._fd)
        for owned in (connection, buffers):
            try:
                if owned is not None:
                    owned.close()
            except ShimError as error:
                log.warning("closing a connection failed", extra={"region": self.name, "error": str(error)})
        now_ns = self._clock.monotonic_ns()
        orphans = [request for request, _place in self._in_flight.values()]
        orphans.extend(self._reads.values())
        orphans.extend((*self._queue, *self._yielding))
        self._in_flight.clear()
        self._reads.clear()
        self._queue.clear()
        self._yielding.clear()
        for request in orphans:
            late = request.deadline_ns <= now_ns
            request.operation.settle_as(request, Status.DEADLINE if late else Status.DISCONNECTED)
        if by_itself:
            log.info("connection to a region lost", extra={"region": self.name, "reason": reason})
            self._lost()


def _open(received: memoryview) -> tuple[int, int, int, int, int]:
    """(request id, operation, status, aux, bytes of entries). Raises WireError."""
    capsule = wire.decode_response(received)
    return capsule.request_id, capsule.op, capsule.status, capsule.aux, capsule.entries.nbytes
