"""The receiving half of an emu-tcp queue pair: frames of the peer, taken from the socket as far as they are there.

Never blocks. Small frames come through one buffer, many by one system call; a payload goes from the socket straight
into registered memory, and what follows it into the buffer by the same call. Runs under the connection's lock.
"""

from __future__ import annotations

import socket
import time
from typing import cast

from doca_shims.api import ConnectionState, Opcode, QueueLimits, RecvRequest, WcStatus
from emulator.fabric_core import MAX_SEND_WR, Domain, Region, Timeouts
from emulator.fabric_tcp_frame import HEADER_BYTES, FrameError, FrameKind, Header, unpack_header
from emulator.fabric_tcp_requester import EndOfStreamError, Requester

_U32 = 0xFFFFFFFF
_BUFFER_BYTES = 64 << 10
_AHEAD_BYTES = 4 << 10
"""Behind a payload: room for the next header and for small frames, not for much of the next payload, which would have
to be copied once more."""
_READS_MAX = 64
"""System calls of one turn, so that a fast peer does not keep its side from looking at others."""
_LOW_WATER_BYTES = 256 << 10
"""So much of a payload wakes whoever sleeps, and no less, as long as that much is missing."""
_RESPONSES_MAX = 4 * MAX_SEND_WR
_READY = ConnectionState.READY
_READ = Opcode.RDMA_READ


class Responder(Requester):
    """Frames from the socket to memory, completions and answers. `TcpConnection` is the rest."""

    def __init__(self, pd: Domain, limits: QueueLimits, timeouts: Timeouts) -> None:
        super().__init__(pd, limits, timeouts)
        self._buffer = bytearray(_BUFFER_BYTES)
        self._view = memoryview(self._buffer)
        self._ahead = self._view[:_AHEAD_BYTES]
        self._start = self._fill = 0  # of the buffer, what is not parsed yet; nothing while a payload is missing
        self._header: Header | None = None
        """Of the payload under way."""
        self._sinks: list[memoryview] = []
        self._missing = 0
        self._touched: tuple[Region, ...] = ()
        self._receive: RecvRequest | None = None
        self._empty = False
        """Nothing was left in the socket when it was last read."""
        self._ack_can_wait = False
        self._discarding = False
        self._low_water = 1

    # ------------------------------------------------------------------------------------ bytes

    def _take(self, sock: socket.socket) -> None:
        """Receive and handle what is there. Raises EndOfStreamError, FrameError, OSError."""
        for _ in range(_READS_MAX):
            missing = self._missing
            try:
                if missing:
                    wanted = missing + _AHEAD_BYTES
                    count = sock.recvmsg_into([*self._sinks, self._ahead])[0]
                else:
                    fill = self._fill
                    wanted = _BUFFER_BYTES - fill
                    count = sock.recv_into(self._view[fill:] if fill else self._view)
            except BlockingIOError:
                return
            if count == 0:
                raise EndOfStreamError
            if missing:
                header = self._header
                if header is not None and header.kind is FrameKind.DATA:
                    self._progress_s = time.monotonic()
                self._fill = max(0, count - missing)
                self._advance(min(count, missing))
            else:
                self._fill += count
            if self._fill:
                self._parse()
                if self._discarding:
                    return
            if count < wanted and not self._missing:
                self._empty = True
                return

    def _advance(self, count: int) -> None:
        """So many bytes of the payload have been received."""
        self._missing -= count
        if not self._missing:
            self._sinks.clear()
            self._finish()
            return
        sinks = self._sinks
        while count >= len(sinks[0]):
            count -= len(sinks.pop(0))
        if count:
            sinks[0] = sinks[0][count:]

    def _parse(self) -> None:
        """Handle the frames in the buffer, until a payload is not whole there."""
        while self._fill - self._start >= HEADER_BYTES:
            header = unpack_header(self._buffer, self._start)
            self._start += HEADER_BYTES
            if header.posted != self._peer_posted:
                self._take_credit(header.posted)
            kind = header.kind
            if kind is FrameKind.SEND:
                if self._deliver(header):
                    continue
            elif kind is FrameKind.WRITE and self._apply(header):
                continue
            self._handle(header)
            if self._discarding:
                self._start = self._fill = 0
                return
            while self._missing and self._start < self._fill:
                sink = self._sinks[0]
                count = min(len(sink), self._fill - self._start)
                sink[:count] = self._view[self._start : self._start + count]
                self._start += count
                self._advance(count)
        rest = self._fill - self._start
        if rest and self._start:
            self._view[:rest] = self._view[self._start : self._fill]
        self._start, self._fill = 0, rest

    def _deliver(self, header: Header) -> bool:
        """A message that is whole in the buffer, with a receive that takes it; False for all else."""
        start, length = self._start, header.length
        if start + length > self._fill or not self._recvs or self.state is not _READY:
            return False
        wr_id, (address, room, lkey) = self._recvs[0]
        place = self.pd.places.get(lkey)
        if place is None or length > room:
            return False
        self._recvs.popleft()
        self._received = (self._received + 1) & _U32
        offset = address - place.start
        place.view[offset : offset + length] = self._view[start : start + length]
        self._start = start + length
        self._complete_recv(wr_id, WcStatus.SUCCESS, length)
        if self._advertised == self._received:
            self._grant_credit()
        if header.code:
            self._ack = header.sequence
            self._ack_can_wait = True
        return True

    def _apply(self, header: Header) -> bool:
        """A WRITE that is whole in the buffer, and allowed; False for all else."""
        start, length = self._start, header.length
        if start + length > self._fill or not length or self.state is not _READY:
            return False
        found = self._place(header, write=True)
        if found is None:
            return False
        found[0][:] = self._view[start : start + length]
        self._start = start + length
        if header.code:
            self._ack = header.sequence
            self._ack_can_wait = False
        return True

    def _expect(self, header: Header, sinks: list[memoryview], touched: tuple[Region, ...]) -> None:
        """The payload of `header` comes next and goes there."""
        self._header = header
        self._missing = header.length
        if header.length:
            self._sinks = sinks
            self._touched = touched
        else:
            self._finish()

    def _forget_payload(self) -> None:
        """Nothing more of the payload under way is received."""
        self._sinks.clear()
        self._missing = 0
        self._touched = ()
        self._header = None

    def _wake_for(self, sock: socket.socket) -> None:
        """Let bulk wake its receiver in larger portions."""
        missing = self._missing
        low_water = min(missing, _LOW_WATER_BYTES) if missing >= _BUFFER_BYTES else 1
        if low_water != self._low_water:
            self._low_water = low_water
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT, low_water)

    # ------------------------------------------------------------------------------------ frames

    def _handle(self, header: Header) -> None:
        if self.state != _READY:
            raise EndOfStreamError
        kind = header.kind
        if kind is FrameKind.WRITE:
            self._expect_write(header)
        elif kind is FrameKind.SEND:
            self._expect_message(header)
        elif kind is FrameKind.READ:
            self._answer_read(header)
        elif kind is FrameKind.DATA:
            self._expect_data(header)
        elif kind is FrameKind.ACK:
            self._acknowledge(header.sequence, including=True)
        elif kind is FrameKind.NAK:
            self._acknowledge(header.sequence, including=False, sent=False)
            self._fail(WcStatus(header.code))
            raise EndOfStreamError

    def _finish(self) -> None:
        """The payload of `_header` is whole."""
        header, self._header = cast(Header, self._header), None
        self._touched = ()
        if header.kind is FrameKind.DATA:
            posted = self._inflight[0]
            posted.sinks.popleft()
            self._answered(posted, 1, header.length)
            self._after_answer()
            return
        if header.kind is FrameKind.SEND:
            receive, self._receive = cast(RecvRequest, self._receive), None
            self._complete_recv(receive.wr_id, WcStatus.SUCCESS, header.length)
            self._grant_credit()
        if header.code:
            self._ack = header.sequence
            self._ack_can_wait = header.kind is FrameKind.SEND

    def _place(self, header: Header, write: bool) -> tuple[memoryview, Region] | None:
        """What the peer's request may touch; None where it must be refused."""
        region = self.pd.by_rkey.get(header.rkey)
        if region is None or not (region.remote_write if write else region.remote_read):
            return None
        place = self.pd.places.get(region.lkey)
        if place is None or header.address < place.start or header.address + header.length > place.end:
            return None
        offset = header.address - place.start
        return place.view[offset : offset + header.length], region

    def _expect_write(self, header: Header) -> None:
        found = self._place(header, write=True) if header.length else None
        if found is not None:
            self._expect(header, [found[0]], (found[1],))
        elif header.length:
            self._refuse(header, WcStatus.REM_ACCESS_ERR)
        else:
            self._expect(header, [], ())

    def _answer_read(self, header: Header) -> None:
        found = self._place(header, write=False) if header.length else None
        if found is None and header.length:
            self._refuse(header, WcStatus.REM_ACCESS_ERR)
            return
        if len(self._transmitter) > _RESPONSES_MAX:
            raise FrameError("more READs than a queue holds")
        self._ack = None  # the data acknowledge what was before them
        self._respond(FrameKind.DATA, 0, header.sequence, header.length)
        if found is not None:
            self._transmitter.payload(*found)

    def _expect_message(self, header: Header) -> None:
        self._received = (self._received + 1) & _U32
        if not self._recvs:
            self._refuse(header, WcStatus.RNR_RETRY_EXC_ERR)
            return
        request = self._recvs.popleft()
        address, length, lkey = request.sge
        place = self.pd.places.get(lkey)
        if place is None or header.length > length:
            self._complete_recv(request.wr_id, WcStatus.LOC_PROT_ERR if place is None else WcStatus.LOC_LEN_ERR)
            self._refuse(header, WcStatus.REM_OP_ERR if place is None else WcStatus.REM_INV_REQ_ERR)
            return
        self._receive = request
        offset = address - place.start
        self._expect(header, [place.view[offset : offset + header.length]], (place.region,))

    def _expect_data(self, header: Header) -> None:
        inflight = self._inflight
        if not inflight or inflight[0].first != header.sequence or inflight[0].work.opcode != _READ:
            self._acknowledge(header.sequence, including=False)
        posted = inflight[0]
        if posted.work.opcode != _READ or posted.ends[0] > self._transmitter.sent_bytes:
            raise FrameError("DATA that was not asked for")
        sinks = posted.sinks[0]
        if sum(map(len, sinks)) != header.length:
            raise FrameError("DATA of another length than was asked for")
        places = self.pd.places
        for region in posted.regions:
            if region.lkey not in places:
                self._fail(WcStatus.LOC_PROT_ERR)
                raise EndOfStreamError
        self._expect(header, sinks, tuple(posted.regions))

    def _refuse(self, header: Header, status: WcStatus) -> None:
        """Answer with an error, which ends this queue pair too; the stream ends once that is on its way."""
        self._ack = None
        self._respond(FrameKind.NAK, int(status), header.sequence)
        self._fail(WcStatus.WR_FLUSH_ERR, gently=True)

    def _flush_recvs(self) -> None:
        receive, self._receive = self._receive, None
        if receive is not None:  # its message was cut off
            self._complete_recv(receive.wr_id, WcStatus.WR_FLUSH_ERR)
        super()._flush_recvs()
