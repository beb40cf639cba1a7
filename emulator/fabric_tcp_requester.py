"""The requesting half of an emu-tcp queue pair: what was posted, what the peer has answered, and credits.

No system calls but the event's. Everything runs under the connection's lock, whether the owner posts or an answer
has come; frames go to the `Transmitter`, which the caller pushes. A batch of `post_rdma` is one entry here, with one
sequence number for each of its elements.
"""

from __future__ import annotations

import os
import threading
import time
from collections import deque
from collections.abc import Iterable
from itertools import chain
from typing import TypeAlias

from doca_shims.api import (
    RDMA_REQUEST,
    ConnectionState,
    Opcode,
    QueueLimits,
    SendFlags,
    SendRequest,
    WcStatus,
)
from emulator.fabric_core import (
    MAX_MESSAGE_BYTES,
    MAX_RECV_WR,
    MAX_TRANSFER_BYTES,
    Domain,
    Region,
    Timeouts,
)
from emulator.fabric_tcp_domain import TcpDomain, TcpQueuePair
from emulator.fabric_tcp_frame import CODE_OFFSET, HEADER, MAGIC, FrameError, FrameKind, pack_header
from emulator.fabric_tcp_transmit import Transmitter

_U32 = 0xFFFFFFFF
_INLINE_BYTES = 16 << 10
"""A message up to this is copied behind its header when it is posted, where that is all there is to send."""
_ACK_EVERY_BYTES = 8 << 20
"""An acknowledgement is asked for at the end of what is posted at once, and after so many bytes within it."""
_SEND, _READ, _WRITE = Opcode.SEND, Opcode.RDMA_READ, Opcode.RDMA_WRITE
_READY, _CLOSED, _SUCCESS = ConnectionState.READY, ConnectionState.CLOSED, WcStatus.SUCCESS


class EndOfStreamError(Exception):
    """The peer closed, or this side did."""


class Batch:
    """What one `post_rdma` asked for."""

    __slots__ = ("count", "flags", "opcode", "requests", "wr_id")

    def __init__(self, wr_id: int, opcode: Opcode, requests: bytes, flags: int) -> None:
        self.wr_id = wr_id
        self.opcode = opcode
        self.requests = requests
        self.flags = flags
        self.count = len(requests) // RDMA_REQUEST.size


Work: TypeAlias = "SendRequest | Batch"


class Posted:
    """Frames that the peer has to answer: one of a `SendRequest`, or those of a `Batch`."""

    __slots__ = ("ends", "first", "refusal", "regions", "sinks", "slots", "work")

    def __init__(self, work: Work, first: int, slots: int) -> None:
        self.work = work
        self.first = first
        """Sequence number of the first element that is not answered yet."""
        self.slots = slots
        """Of the send queue, that its completion frees."""
        self.ends: deque[int] = deque()
        """For each element that is not answered yet: where in the stream its frame ends."""
        self.sinks: deque[list[memoryview]] = deque()
        """For each READ that is not answered yet: where its data go."""
        self.regions: set[Region] = set()
        self.refusal: WcStatus | None = None
        """Why the element behind these never left: it failed here, and so will what follows."""


class Requester(TcpQueuePair):
    """Posted sends from `post_send` to their completion. `TcpConnection` is the rest."""

    pd: TcpDomain

    def __init__(self, pd: Domain, limits: QueueLimits, timeouts: Timeouts) -> None:
        super().__init__(pd, limits, "")
        self._timeouts = timeouts
        self._lock = threading.Lock()
        """Held by whoever drives the connection, also while a payload is copied: the owner, or the deputy for it."""
        self._event = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self._signalled = False
        self._transmitter: Transmitter
        self._inflight: deque[Posted] = deque()
        self._waiting: deque[Work] = deque()  # behind a SEND for which the peer has no receive, or a failure
        self._waiting_since_s = 0.0
        self._progress_s = 0.0
        self._next_sequence = 0
        self._posted = 0  # receives, here
        self._advertised = 0  # of those, the peer knows of
        self._received = 0
        self._peer_posted = 0
        self._messages_sent = 0
        self._ack: int | None = None
        """The request that waits for its acknowledgement, which goes along with the next frame of any kind."""

    # ------------------------------------------------------------------------------------ frames out

    def _message(self, request: SendRequest) -> bytes | None:
        """The one frame of a small message that nothing stands in the way of, preceded by an acknowledgement that is
        due; None for all else, which `_emit` sees to."""
        _, opcode, sges, _, _, _ = request
        if opcode != _SEND or len(sges) != 1 or self._waiting or self._peer_posted == self._messages_sent:
            return None
        address, length, lkey = sges[0]
        place = self.pd.places.get(lkey)
        if place is None or address < place.start or not 0 <= length <= _INLINE_BYTES or address + length > place.end:
            return None
        inflight = self._inflight
        if not inflight:
            self._progress_s = time.monotonic()
        elif inflight[-1].refusal is not None:
            return None
        sequence, receives = self._next_sequence, self._posted
        self._next_sequence = (sequence + 1) & _U32
        self._messages_sent = (self._messages_sent + 1) & _U32
        self._advertised = receives
        offset = address - place.start
        frame = HEADER.pack(MAGIC, FrameKind.SEND, 1, sequence, receives, 0, 0, length, 0)
        frame += place.view[offset : offset + length]
        if self._ack is not None:
            frame = HEADER.pack(MAGIC, FrameKind.ACK, 0, self._ack, receives, 0, 0, 0, 0) + frame
            self._ack = None
        posted = Posted(request, sequence, 1)
        posted.ends.append(self._transmitter.queued_bytes + len(frame))
        inflight.append(posted)
        return frame

    def _emit(self, works: Iterable[Work]) -> None:
        """Queue frames in order, until a SEND must wait for a receive of the peer."""
        waiting = self._waiting
        if waiting or (self._inflight and self._inflight[-1].refusal is not None):
            waiting.extend(works)  # in the second case that one will fail when its turn comes, and flush these
            return
        if not self._inflight:
            self._progress_s = time.monotonic()
        if self._ack is not None:
            self._send_ack()
        last: bytearray | None = None
        remaining = iter(works)
        for work in remaining:
            if type(work) is Batch:
                header = self._emit_batch(work)
            elif work.opcode == _SEND and self._peer_posted == self._messages_sent:
                self._waiting_since_s = time.monotonic()
                waiting.extend(chain((work,), remaining))
                break
            else:
                header = self._emit_one(work)  # type: ignore[arg-type]
            last = header or last
            if self._inflight and self._inflight[-1].refusal is not None:
                waiting.extend(remaining)
                break
        if last is not None:
            last[CODE_OFFSET] = 1
        self._advertised = self._posted
        if self._inflight and self._refused(self._inflight[0]):
            self._refuse_head()

    def _emit_one(self, request: SendRequest) -> bytearray | None:
        """The header of its frame, where it is one that can ask for an acknowledgement."""
        _, opcode, sges, remote, rkey, _ = request
        posted = Posted(request, self._next_sequence, 1)
        self._inflight.append(posted)
        views: list[memoryview] = []
        length = 0
        for address, size, lkey in sges:
            place = self.pd.places.get(lkey)
            if place is None or address < place.start or size < 0 or address + size > place.end:
                posted.refusal = WcStatus.LOC_PROT_ERR
                return None
            if opcode == _READ and not place.writable:
                posted.refusal = WcStatus.LOC_PROT_ERR
                return None
            length += size
            posted.regions.add(place.region)
            if size:
                views.append(place.view[address - place.start : address - place.start + size])
        is_send = opcode == _SEND
        if length > (MAX_MESSAGE_BYTES if is_send else MAX_TRANSFER_BYTES):
            posted.refusal = WcStatus.LOC_LEN_ERR
            return None
        sequence = self._next_sequence
        self._next_sequence = (sequence + 1) & _U32
        if is_send:
            self._messages_sent = (self._messages_sent + 1) & _U32
            remote = rkey = 0
        transmitter = self._transmitter
        header = bytearray(
            HEADER.pack(MAGIC, _kind(opcode), 0, sequence, self._posted, rkey, remote & (1 << 64) - 1, length, 0)
        )
        transmitter.header(header)
        if opcode == _READ:
            posted.sinks.append(views)
            posted.ends.append(transmitter.queued_bytes)
            return None
        for sge, view in zip((sge for sge in sges if sge[1]), views):
            transmitter.payload(view, self.pd.places[sge[2]].region)
        posted.ends.append(transmitter.queued_bytes)
        return header

    def _emit_batch(self, batch: Batch) -> bytearray | None:
        """The header of the last of its frames, where that can ask for an acknowledgement."""
        reads = batch.opcode == _READ
        kind = _kind(batch.opcode)
        places = self.pd.places
        transmitter = self._transmitter
        sequence = self._next_sequence
        receives = self._posted
        posted = Posted(batch, sequence, batch.count)
        self._inflight.append(posted)
        ends, sinks, regions, pack = posted.ends, posted.sinks, posted.regions, HEADER.pack
        header: bytearray | None = None
        unacknowledged = 0
        for local, remote, length, lkey, rkey, _ in RDMA_REQUEST.iter_unpack(batch.requests):
            place = places.get(lkey)
            if place is None or local < place.start or local + length > place.end or (reads and not place.writable):
                posted.refusal = WcStatus.LOC_PROT_ERR
                break
            if length > MAX_TRANSFER_BYTES:
                posted.refusal = WcStatus.LOC_LEN_ERR
                break
            offset = local - place.start
            header = bytearray(pack(MAGIC, kind, 0, sequence, receives, rkey, remote, length, 0))
            transmitter.header(header)
            regions.add(place.region)
            if reads:
                sinks.append([place.view[offset : offset + length]] if length else [])
            elif length:
                transmitter.payload(place.view[offset : offset + length], place.region)
                unacknowledged += length
                if unacknowledged >= _ACK_EVERY_BYTES:
                    header[CODE_OFFSET] = 1
                    unacknowledged = 0
            ends.append(transmitter.queued_bytes)
            sequence = (sequence + 1) & _U32
        self._next_sequence = sequence
        return None if reads else header

    def _respond(self, kind: FrameKind, code: int, sequence: int, length: int = 0) -> None:
        self._advertised = self._posted
        self._transmitter.header(pack_header(kind, code, sequence, self._posted, length=length))

    def _send_ack(self) -> None:
        sequence, self._ack = self._ack, None
        if sequence is not None:
            self._respond(FrameKind.ACK, 0, sequence)

    def _take_credit(self, posted: int) -> None:
        ahead = (posted - self._peer_posted) & _U32
        if ahead > MAX_RECV_WR:
            raise FrameError(f"{ahead} receives posted at once")
        self._peer_posted = posted
        if ahead and self._waiting and self.state == _READY:
            waiting, self._waiting = self._waiting, deque()
            self._emit(waiting)

    def _grant_credit(self) -> None:
        """Tell the peer of new receives when it knows of none that is left."""
        if self.state == _READY and self._advertised == self._received != self._posted:
            self._respond(FrameKind.CREDIT, 0, 0)

    # ------------------------------------------------------------------------------------ answers in

    def _acknowledge(self, sequence: int, including: bool, sent: bool = True) -> None:
        """Complete what the peer has answered by answering `sequence`, and the request of that number too where
        `including`. Raises FrameError for an answer to nothing, or to what is not in the socket yet; `sent` says
        whether the request of that number has to be there itself."""
        if self.state != _READY:
            raise EndOfStreamError
        inflight = self._inflight
        if not inflight:
            raise FrameError("an answer to nothing")
        in_socket = self._transmitter.sent_bytes
        oldest = inflight[0]
        if including and sequence == oldest.first and oldest.slots == 1 and oldest.refusal is None:
            work = oldest.work
            if work.opcode != _READ and oldest.ends[0] <= in_socket:  # one message, as most often
                inflight.popleft()
                self._complete_send(work.wr_id, work.opcode, work.flags, _SUCCESS)
                self._after_answer()
                return
        count = ((sequence - inflight[0].first) & _U32) + including
        while count:
            posted = inflight[0] if inflight else None
            if posted is None or not posted.ends:
                raise FrameError("an answer to what was not sent")
            if posted.work.opcode == _READ:
                raise FrameError("a READ answered without data")
            taken = min(count, len(posted.ends))
            if posted.ends[taken - 1] > in_socket:
                raise FrameError("an answer to what was not sent")
            self._answered(posted, taken)
            count -= taken
        if not including:
            ends = inflight[0].ends if inflight else ()
            if not ends or (sent and ends[0] > in_socket):
                raise FrameError("an answer to what was not sent")
        self._after_answer()

    def _answered(self, posted: Posted, count: int, byte_count: int = 0) -> None:
        """The first `count` frames of the oldest entry are through."""
        ends = posted.ends
        if count < len(ends) or posted.refusal is not None:
            posted.first = (posted.first + count) & _U32
            for _ in range(count):
                ends.popleft()
            return
        self._inflight.popleft()
        work = posted.work
        self._silent += posted.slots - 1
        self._complete_send(work.wr_id, work.opcode, work.flags, _SUCCESS, byte_count)

    def _after_answer(self) -> None:
        self._progress_s = time.monotonic()
        if self._inflight and self._refused(self._inflight[0]):
            self._refuse_head()
            raise EndOfStreamError

    @staticmethod
    def _refused(posted: Posted) -> bool:
        return posted.refusal is not None and not posted.ends

    # ------------------------------------------------------------------------------------ the end

    def _signal(self) -> None:
        if not self._signalled and self.state != _CLOSED:
            self._signalled = True
            os.eventfd_write(self._event, 1)

    def _refuse_head(self) -> None:
        """The oldest send failed on this side."""
        self._fail(self._inflight[0].refusal or WcStatus.LOC_QP_OP_ERR)

    def _fail(self, status: WcStatus, gently: bool = False) -> None:
        """To ERROR: the oldest send completes with `status`, all else is flushed."""
        if self.state != _READY:
            return
        self.state = ConnectionState.ERROR
        for work, slots in chain(((p.work, p.slots) for p in self._inflight), ((w, _slots(w)) for w in self._waiting)):
            self._silent += slots - 1
            self._complete_send(work.wr_id, work.opcode, int(SendFlags.SIGNALED), status)
            status = WcStatus.WR_FLUSH_ERR
        self._inflight.clear()
        self._waiting.clear()
        self._ack = None
        self._flush_recvs()
        self._signal()
        self._end(gently)

    def _end(self, gently: bool) -> None:
        """End the stream: at once, or when what is queued has been sent."""
        raise NotImplementedError


def _kind(opcode: int) -> int:
    return FrameKind.SEND if opcode == _SEND else FrameKind.READ if opcode == _READ else FrameKind.WRITE


def _slots(work: Work) -> int:
    return work.count if type(work) is Batch else 1
