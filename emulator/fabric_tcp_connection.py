"""A connection of emu-tcp: two threads per side play the NIC, so that READ and WRITE need nobody's attention.

The receiving thread puts payloads straight into registered memory and answers; `Transmitter` sends. A request
completes when the peer has applied it and said so. Everything shared is under one lock, never held while a
payload is copied; instead the regions that a copy touches are noted, and whoever takes one back waits for that.
"""

from __future__ import annotations

import errno
import logging
import os
import socket
import struct
import threading
import time
from collections import deque
from collections.abc import Sequence
from contextlib import suppress

from doca_shims.api import (
    Completion,
    ConnectionState,
    Opcode,
    QueueLimits,
    RecvRequest,
    SendRequest,
    Sge,
    ShimError,
    WcStatus,
)
from emulator.fabric_core import (
    MAX_SEND_WR,
    Domain,
    Region,
    Timeouts,
)
from emulator.fabric_tcp_frame import HEADER_BYTES, FrameError, FrameKind, Header, pack_header, unpack_header
from emulator.fabric_tcp_requester import EndOfStreamError, Posted, Requester, view_of
from emulator.fabric_tcp_transmit import Frame, Transmitter

_log = logging.getLogger(__name__)

_U32 = 0xFFFFFFFF
_GRACE_S = 0.05
"""How long deregistration waits for a transfer to finish by itself before it breaks the connection."""
_DISCARD_LIMIT_S = 1.0
_JOIN_LIMIT_S = 10.0
_RESPONSES_MAX = 2 * MAX_SEND_WR


class TcpConnection(Requester):
    """`doca_shims.api.Connection`. Receives may be posted before `start`, which makes it live."""

    def __init__(self, pd: Domain, limits: QueueLimits, timeouts: Timeouts) -> None:
        super().__init__(pd, limits, timeouts)
        self._touching: tuple[Region, ...] = ()
        self._socket: socket.socket | None = None
        self._discarding = False
        pd.connections.add(self)

    def greeting_credit(self) -> int:
        """Receives posted so far, which the greeting tells the peer."""
        self._advertised = self._posted
        return self._posted

    def start(self, sock: socket.socket, peer_posted: int, private_data: bytes) -> None:
        """Take over a connected socket whose greetings are done."""
        sock.settimeout(None)
        tick_s = min(0.25, self._timeouts.rnr_s / 4, self._timeouts.transport_s / 4)
        seconds = int(tick_s)
        interval = struct.pack("ll", seconds, max(1000, int((tick_s - seconds) * 1e6)))
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, interval)
        self.peer = "{}:{}".format(*sock.getpeername()[:2])
        self.private_data = private_data
        self._peer_posted = peer_posted
        self._socket = sock
        self._transmitter = Transmitter(sock, self.peer)
        self._receiver = threading.Thread(target=self._receive, name=f"emu-tcp rx {self.peer}", daemon=True)
        self._receiver.start()

    def fileno(self) -> int:
        return self._event

    # -------------------------------------------------------------------------- the owner's side: posting

    def post_recv(self, requests: Sequence[RecvRequest]) -> None:
        with self._lock:
            self._admit_recvs(requests)
            self._posted = (self._posted + len(requests)) & _U32
            started = self._socket is not None
            if started:
                self._grant_credit()
        if started:
            self._transmitter.pump()

    def post_send(self, requests: Sequence[SendRequest]) -> None:
        with self._lock:
            self._admit_sends(requests)
            if self._waiting:
                self._waiting.extend(requests)
            else:
                self._emit(deque(requests))
        self._transmitter.pump()

    def poll(self, max_completions: int = 256, arm: bool = True) -> list[Completion]:
        del arm  # the receiving thread announces all that it does
        with self._lock:
            reaped = self._reap(max_completions)
            if self._signalled and not self._cq and self.state != ConnectionState.CLOSED:
                self._signalled = False
                os.eventfd_read(self._event)
            return reaped

    # --------------------------------------------------------------------- the owner's side: taking back

    def release_region(self, region: Region) -> None:
        """Return when no transfer of this connection reads or writes the region, which is out of the tables."""
        deadline_s = time.monotonic() + _GRACE_S
        while self._uses(region):
            if time.monotonic() > deadline_s:
                with self._lock:
                    ours = bool(self._inflight) and region in self._inflight[0].regions
                    self._fail(WcStatus.LOC_PROT_ERR if ours else WcStatus.WR_FLUSH_ERR)
                self._break()
                with self._lock:
                    self._lock.wait_for(lambda: region not in self._touching, _JOIN_LIMIT_S)
                return
            time.sleep(0.0005)

    def _uses(self, region: Region) -> bool:
        if self._socket is None or self.state == ConnectionState.CLOSED:
            return False
        with self._lock:
            if region in self._touching:
                return True
            if any(region in posted.regions for posted in self._inflight):
                return True
        return self._transmitter.refers_to(region)

    def _break(self) -> None:
        """End both directions at once. The threads notice."""
        self._transmitter.stop()
        if self._socket is not None:
            with suppress(OSError):  # not connected any more
                self._socket.shutdown(socket.SHUT_RDWR)

    def _end(self, gently: bool) -> None:
        self._discarding = gently
        if gently:
            self._transmitter.end_when_empty()
        elif self._socket is not None:
            with suppress(OSError):  # not connected any more
                self._socket.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        if self.state == ConnectionState.CLOSED:
            return
        with self._lock:
            self.state = ConnectionState.CLOSED
            self._discarding = True
        if self._socket is not None:
            self._break()
            self._transmitter.join(_JOIN_LIMIT_S)
            self._receiver.join(_JOIN_LIMIT_S)
            if self._receiver.is_alive():
                raise ShimError(errno.EBUSY, "ibv_destroy_qp", "the receiving thread does not end")
            self._socket.close()
        self.pd.connections.discard(self)
        os.close(self._event)
        self._recvs.clear()
        self._cq.clear()
        self._inflight.clear()
        self._waiting.clear()

    # ---------------------------------------------------------------------------- the receiving thread

    def _receive(self) -> None:
        buffer = bytearray(HEADER_BYTES)
        view = memoryview(buffer)
        try:
            while True:
                self._read(view)
                header = unpack_header(buffer)
                with self._lock:
                    self._take_credit(header.posted)
                self._handle(header)
                self._transmitter.pump()
                if self._discarding:
                    self._discard()
                    return
        except (EndOfStreamError, OSError):
            self._lost()
        except FrameError as error:
            _log.warning("connection to %s ended: %s", self.peer, error)
            self._lost()
        except Exception:  # noqa: BLE001  the owner must learn of it, and does by the ERROR state
            _log.exception("connection to %s ended by a fault of the emulator", self.peer)
            self._lost()

    def _lost(self) -> None:
        with self._lock:
            self._fail(WcStatus.WR_FLUSH_ERR)
        self._break()

    def _read(self, view: memoryview, answers: bool = False) -> None:
        """Fill `view` from the socket. Raises EndOfStreamError, also when a deadline of ours passes meanwhile;
        `answers` says that these bytes are what a request of ours waits for."""
        sock = self._socket
        while len(view) and sock is not None:
            try:
                count = sock.recv_into(view, 0, socket.MSG_WAITALL)
            except BlockingIOError:
                count = -1
            if count == 0:
                raise EndOfStreamError
            if answers and count > 0:
                self._progress_s = time.monotonic()
            if count < len(view):
                self._check_deadlines()
            view = view[max(count, 0) :]

    def _check_deadlines(self) -> None:
        now_s = time.monotonic()
        with self._lock:
            if self.state == ConnectionState.CLOSED or self._discarding:
                raise EndOfStreamError
            progress_s = max(self._progress_s, self._transmitter.progress_s)
            if self._inflight and now_s - progress_s > self._timeouts.transport_s:
                self._fail(WcStatus.RETRY_EXC_ERR)
            elif self._waiting and not self._inflight and now_s - self._waiting_since_s > self._timeouts.rnr_s:
                request = self._waiting.popleft()
                self._inflight.append(Posted(request, self._next_sequence, 0, (), None))
                self._fail(WcStatus.RNR_RETRY_EXC_ERR)
            if self.state != ConnectionState.READY:
                raise EndOfStreamError

    def _handle(self, header: Header) -> None:
        kind = header.kind
        if kind is FrameKind.WRITE:
            self._apply_write(header)
        elif kind is FrameKind.SEND:
            self._apply_send(header)
        elif kind is FrameKind.READ:
            self._answer_read(header)
        elif kind is FrameKind.DATA:
            self._take_data(header)
        elif kind is FrameKind.ACK:
            with self._lock:
                self._acknowledge(header.sequence, including=True)
        elif kind is FrameKind.NAK:
            with self._lock:
                self._acknowledge(header.sequence, including=False)
                self._fail(WcStatus(header.code))
            raise EndOfStreamError

    # ------------------------------------------------------------------------ the peer's requests

    def _apply_write(self, header: Header) -> None:
        with self._lock:
            region = self._reachable(header, write=True)
            if region is None:
                self._refuse(header, WcStatus.REM_ACCESS_ERR)
                return
            self._touching = region
        self._read_into([Sge(header.address, header.length, 0)])
        with self._lock:
            self._answer(header)

    def _answer_read(self, header: Header) -> None:
        with self._lock:
            region = self._reachable(header, write=False)
            if region is None:
                self._refuse(header, WcStatus.REM_ACCESS_ERR)
                return
            if len(self._transmitter) > _RESPONSES_MAX:
                raise FrameError("more READs than a queue holds")
            payload = [view_of(header.address, header.length)] if header.length else []
            frame = pack_header(FrameKind.DATA, 0, header.sequence, self._posted, length=header.length)
            self._advertised = self._posted
            self._transmitter.append(Frame(frame, payload, region, -1))

    def _apply_send(self, header: Header) -> None:
        with self._lock:
            if self.state != ConnectionState.READY:
                raise EndOfStreamError
            self._received = (self._received + 1) & _U32
            if not self._recvs:
                self._refuse(header, WcStatus.RNR_RETRY_EXC_ERR)
                return
            request = self._recvs.popleft()
            address, length, lkey = request.sge
            region = self.pd.by_lkey.get(lkey)
            if region is None or header.length > length:
                self._complete_recv(request.wr_id, WcStatus.LOC_PROT_ERR if region is None else WcStatus.LOC_LEN_ERR)
                self._refuse(header, WcStatus.REM_OP_ERR if region is None else WcStatus.REM_INV_REQ_ERR)
                return
            self._touching = (region,)
        try:
            self._read_into([Sge(address, header.length, lkey)])
        except (EndOfStreamError, OSError):
            with self._lock:
                self._complete_recv(request.wr_id, WcStatus.WR_FLUSH_ERR)
            raise
        with self._lock:
            self._complete_recv(request.wr_id, WcStatus.SUCCESS, header.length)
            self._signal()
            self._answer(header)
            self._grant_credit()

    def _reachable(self, header: Header, write: bool) -> tuple[Region, ...] | None:
        """The region that the peer's request may touch; () for an empty one; None where it must be refused."""
        if self.state != ConnectionState.READY:
            raise EndOfStreamError
        if header.length == 0:
            return ()
        region = self.pd.by_rkey.get(header.rkey)
        if region is None or not (region.remote_write if write else region.remote_read):
            return None
        if header.address < region.address or header.address + header.length > region.end:
            return None
        return (region,)

    def _read_into(self, sges: Sequence[Sge], answers: bool = False) -> None:
        """Receive a payload into memory whose regions are noted in `_touching`, and take the note away."""
        try:
            for address, length, _ in sges:
                if length:
                    self._read(view_of(address, length), answers)
        finally:
            with self._lock:
                self._touching = ()
                self._lock.notify_all()

    def _answer(self, header: Header) -> None:
        if header.code:
            self._respond(FrameKind.ACK, 0, header.sequence)

    def _refuse(self, header: Header, status: WcStatus) -> None:
        """Answer with an error, which ends this queue pair too; the stream ends once that is on its way."""
        self._respond(FrameKind.NAK, int(status), header.sequence)
        self._fail(WcStatus.WR_FLUSH_ERR, gently=True)

    def _discard(self) -> None:
        """Read what still comes, so that the refusal is not lost to a reset; nothing of it is applied."""
        deadline_s = time.monotonic() + _DISCARD_LIMIT_S
        scrap = bytearray(65536)
        while time.monotonic() < deadline_s and self._socket is not None:
            with suppress(BlockingIOError):
                if self._socket.recv_into(scrap) == 0:
                    break
        self._break()

    # -------------------------------------------------------------------------- the peer's answers

    def _take_data(self, header: Header) -> None:
        with self._lock:
            self._acknowledge(header.sequence, including=False)
            posted = self._inflight[0]
            if posted.request.opcode != Opcode.RDMA_READ or posted.length != header.length:
                raise FrameError("DATA that was not asked for")
            if any(region.lkey not in self.pd.by_lkey for region in posted.regions):
                self._fail(WcStatus.LOC_PROT_ERR)
                raise EndOfStreamError
            self._touching = posted.regions
        self._read_into(posted.request.sges, answers=True)
        with self._lock:
            if self._inflight:
                self._inflight.popleft()
                self._succeed(posted, header.length)
                self._after_answer()
