"""The requesting half of an emu-tcp queue pair: what was posted, what the peer has answered, and credits.

No sockets and no threads here. Everything runs under the connection's lock, whether the owner posts or the
receiving thread brings an answer; frames go to the `Transmitter`, which the caller pumps after releasing the lock.
"""

from __future__ import annotations

import ctypes
import os
import threading
import time
from collections import deque
from typing import NamedTuple

from doca_shims.api import ConnectionState, Opcode, QueueLimits, SendRequest, WcStatus
from emulator.fabric_core import (
    MAX_MESSAGE_BYTES,
    MAX_RECV_WR,
    MAX_TRANSFER_BYTES,
    Domain,
    QueuePair,
    Region,
    Timeouts,
)
from emulator.fabric_tcp_frame import FrameError, FrameKind, pack_header
from emulator.fabric_tcp_transmit import Frame, Transmitter

_U32 = 0xFFFFFFFF
_ACK_EVERY_BYTES = 1 << 20
"""An acknowledgement is asked for at the end of a batch, and after so many bytes within it."""
_KINDS = {
    Opcode.RDMA_WRITE: FrameKind.WRITE,
    Opcode.RDMA_READ: FrameKind.READ,
    Opcode.SEND: FrameKind.SEND,
}


class EndOfStreamError(Exception):
    """The peer closed, or this side did."""


class Posted(NamedTuple):
    """A send that the peer has to answer. `refusal` is set for one that never left: it failed here."""

    request: SendRequest
    sequence: int
    length: int
    regions: tuple[Region, ...]
    refusal: WcStatus | None


class Requester(QueuePair):
    """Posted sends from `post_send` to their completion. `TcpConnection` is the rest."""

    def __init__(self, pd: Domain, limits: QueueLimits, timeouts: Timeouts) -> None:
        super().__init__(pd, limits, "")
        self._timeouts = timeouts
        self._lock = threading.Condition(threading.Lock())
        self._event = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self._signalled = False
        self._transmitter: Transmitter
        self._inflight: deque[Posted] = deque()
        self._waiting: deque[SendRequest] = deque()  # behind a SEND for which the peer has no receive, or a failure
        self._waiting_since_s = 0.0
        self._progress_s = 0.0
        self._next_sequence = 0
        self._posted = 0  # receives, here
        self._advertised = 0  # of those, the peer knows of
        self._received = 0
        self._peer_posted = 0
        self._messages_sent = 0

    def _emit(self, requests: deque[SendRequest]) -> None:
        """Queue frames in order, until a SEND must wait for a receive of the peer. Under the lock."""
        self._waiting = requests
        if self._inflight and self._inflight[-1].refusal is not None:
            return  # that one will fail when its turn comes, and flush these
        if not self._inflight:
            self._progress_s = time.monotonic()
        unacknowledged = 0
        while requests:
            request = requests[0]
            is_send = request.opcode == Opcode.SEND
            if is_send and self._peer_posted == self._messages_sent:
                self._waiting_since_s = time.monotonic()
                break
            requests.popleft()
            length, regions, refusal = self._check(request)
            sequence = self._next_sequence
            self._inflight.append(Posted(request, sequence, length, regions, refusal))
            if refusal is not None:
                if len(self._inflight) == 1:
                    self._refuse_head()
                break
            self._next_sequence = (sequence + 1) & _U32
            if is_send:
                self._messages_sent = (self._messages_sent + 1) & _U32
            unacknowledged += length
            ask = not requests or unacknowledged >= _ACK_EVERY_BYTES or self._must_wait_at(requests[0])
            if ask:
                unacknowledged = 0
            reads = request.opcode == Opcode.RDMA_READ
            self._advertised = self._posted
            header = pack_header(
                _KINDS[request.opcode],
                ask and not reads,
                sequence,
                self._posted,
                0 if is_send else request.rkey,
                0 if is_send else request.remote_address,
                length,
            )
            payload = [] if reads else [view_of(sge.address, sge.length) for sge in request.sges if sge.length]
            self._transmitter.append(Frame(header, payload, () if reads else regions, sequence))

    def _check(self, request: SendRequest) -> tuple[int, tuple[Region, ...], WcStatus | None]:
        """(length, regions of the elements, why it fails here or None)."""
        reads = request.opcode == Opcode.RDMA_READ
        if not self.pd.check_local(request.sges, writable=reads):
            return 0, (), WcStatus.LOC_PROT_ERR
        length = sum(sge.length for sge in request.sges)
        if length > (MAX_MESSAGE_BYTES if request.opcode == Opcode.SEND else MAX_TRANSFER_BYTES):
            return 0, (), WcStatus.LOC_LEN_ERR
        return length, tuple(self.pd.by_lkey[sge.lkey] for sge in request.sges), None

    def _must_wait_at(self, request: SendRequest) -> bool:
        """Whether this request cannot follow at once, so that the one before has to ask for its answer."""
        if request.opcode == Opcode.SEND and self._peer_posted == self._messages_sent:
            return True
        return self._check(request)[2] is not None

    def _acknowledge(self, sequence: int, including: bool) -> None:
        """Complete what the peer has answered by answering `sequence`. Raises FrameError for an answer to
        nothing."""
        if self.state != ConnectionState.READY:
            raise EndOfStreamError
        inflight = self._inflight
        if not inflight:
            raise FrameError("an answer to nothing")
        first = inflight[0].sequence
        count = (sequence - first) & _U32
        if count >= len(inflight) or inflight[count].refusal is not None or not self._transmitter.has_sent(sequence):
            raise FrameError("an answer to what was not sent")
        for _ in range(count + including):
            posted = inflight[0]
            if posted.request.opcode == Opcode.RDMA_READ:
                raise FrameError("a READ answered without data")
            inflight.popleft()
            self._succeed(posted)
        self._after_answer()

    def _succeed(self, posted: Posted, byte_count: int = 0) -> None:
        request = posted.request
        self._complete_send(request.wr_id, request.opcode, request.flags, WcStatus.SUCCESS, byte_count)

    def _after_answer(self) -> None:
        self._progress_s = time.monotonic()
        if self._inflight and self._inflight[0].refusal is not None:
            self._refuse_head()
            raise EndOfStreamError
        if self._cq:
            self._signal()

    def _take_credit(self, posted: int) -> None:
        ahead = (posted - self._peer_posted) & _U32
        if ahead > MAX_RECV_WR:
            raise FrameError(f"{ahead} receives posted at once")
        self._peer_posted = posted
        if ahead and self._waiting and self.state == ConnectionState.READY:
            self._emit(self._waiting)

    def _grant_credit(self) -> None:
        """Tell the peer of new receives when it knows of none that is left."""
        if self.state == ConnectionState.READY and self._advertised == self._received != self._posted:
            self._respond(FrameKind.CREDIT, 0, 0)

    def _respond(self, kind: FrameKind, code: int, sequence: int) -> None:
        self._advertised = self._posted
        self._transmitter.append(Frame(pack_header(kind, code, sequence, self._posted), [], (), -1))

    def _signal(self) -> None:
        if not self._signalled and self.state != ConnectionState.CLOSED:
            self._signalled = True
            os.eventfd_write(self._event, 1)

    def _refuse_head(self) -> None:
        """The oldest send failed on this side."""
        status = self._inflight[0].refusal
        self._fail(status or WcStatus.LOC_QP_OP_ERR)

    def _fail(self, status: WcStatus, gently: bool = False) -> None:
        """To ERROR: the oldest send completes with `status`, all else is flushed. Under the lock."""
        if self.state != ConnectionState.READY:
            return
        self.state = ConnectionState.ERROR
        for posted in self._inflight:
            self._refuse_send(posted.request, status)
            status = WcStatus.WR_FLUSH_ERR
        self._inflight.clear()
        for request in self._waiting:
            self._refuse_send(request, WcStatus.WR_FLUSH_ERR)
        self._waiting.clear()
        self._flush_recvs()
        self._signal()
        self._end(gently)

    def _end(self, gently: bool) -> None:
        """End the stream: at once, or when what is queued has been sent."""
        raise NotImplementedError


def view_of(address: int, length_bytes: int) -> memoryview:
    """The bytes at a virtual address of this process."""
    return memoryview((ctypes.c_char * length_bytes).from_address(address)).cast("B")
