"""A connection of emu-tcp, driven by whoever looks: its owner in `post_*` and `poll`, else the device's deputy.

Nothing stands between the owner and the socket while it looks often enough: what arrives wakes the owner itself. A
`Deputy` plays the NIC for an owner that does not look, so that READ and WRITE need nobody's attention. All state is
under one lock, which is held while bytes move: whoever has it knows that no memory is being touched.
"""

from __future__ import annotations

import errno
import logging
import os
import select
import socket
import time
from collections.abc import Sequence
from contextlib import suppress

from doca_shims.api import (
    RDMA_REQUEST,
    Completion,
    ConnectionState,
    Opcode,
    QueueLimits,
    RecvRequest,
    SendFlags,
    SendRequest,
    ShimError,
    WcStatus,
)
from emulator.fabric_core import Domain, Region, Timeouts
from emulator.fabric_tcp_deputy import Deputy
from emulator.fabric_tcp_frame import FrameError
from emulator.fabric_tcp_requester import Batch, EndOfStreamError
from emulator.fabric_tcp_responder import Responder
from emulator.fabric_tcp_transmit import Transmitter

_log = logging.getLogger(__name__)

_U32 = 0xFFFFFFFF
_GRACE_S = 0.05
"""How long deregistration waits for a transfer to finish by itself before it breaks the connection."""
_DISCARD_LIMIT_S = 1.0
_READY, _CLOSED = ConnectionState.READY, ConnectionState.CLOSED
_DEFERRED_BYTES = 64 << 10
"""Unsignalled READs and WRITEs of so few bytes wait for what is posted next, most likely the message that tells of
them, so that one system call sends both and the peer wakes once. The deputy's next tick sends them otherwise."""
_SCRAP_BYTES = 64 << 10


class TcpConnection(Responder):
    """`doca_shims.api.Connection`. Receives may be posted before `start`, which makes it live."""

    def __init__(self, pd: Domain, limits: QueueLimits, timeouts: Timeouts, deputy: Deputy) -> None:
        super().__init__(pd, limits, timeouts)
        self._deputy = deputy
        self._epoll = select.epoll()
        self._epoll.register(self._event, select.EPOLLIN)
        self._listening = False
        """Whether `_epoll` watches the socket."""
        self._socket: socket.socket | None = None
        self._discard_until_s = 0.0
        self.looks = 0
        """How often the owner has looked; the deputy compares."""
        self.ticking = False
        """Whether the deputy looks at it at every tick; see `Deputy`."""
        self.backlog = False
        """The socket is full and more is to be sent."""
        pd.connections.add(self)

    def greeting_credit(self) -> int:
        """Receives posted so far, which the greeting tells the peer."""
        self._advertised = self._posted
        return self._posted

    def start(self, sock: socket.socket, peer_posted: int, private_data: bytes) -> None:
        """Take over a connected socket whose greetings are done."""
        sock.setblocking(False)
        self.peer = "{}:{}".format(*sock.getpeername()[:2])
        self.private_data = private_data
        self._peer_posted = peer_posted
        self._transmitter = Transmitter(sock)
        self._socket = sock
        self._epoll.register(sock, select.EPOLLIN)
        self._listening = True
        self._deputy.add(self, sock.fileno())

    def fileno(self) -> int:
        return self._epoll.fileno()

    # ------------------------------------------------------------------------------------ the owner's side

    def post_recv(self, requests: Sequence[RecvRequest]) -> None:
        with self._lock:
            self._admit_recvs(requests)
            self._posted = (self._posted + len(requests)) & _U32
            if self._socket is not None:
                self._grant_credit()
                if self._transmitter:
                    self._push()

    def post_send(self, requests: Sequence[SendRequest]) -> None:
        with self._lock:
            self._admit_sends(requests)
            frame = self._message(requests[0]) if len(requests) == 1 else None
            if frame is None:
                self._emit(requests)
            elif self._transmitter.send(frame):
                return
            self._push()

    def post_rdma(
        self,
        wr_id: int,
        opcode: Opcode,
        requests: bytes | bytearray | memoryview,
        flags: SendFlags = SendFlags.SIGNALED,
    ) -> None:
        packed = bytes(requests)
        if opcode not in (Opcode.RDMA_WRITE, Opcode.RDMA_READ):
            raise ShimError(errno.EINVAL, "ibv_post_send", f"opcode {opcode} is not READ or WRITE")
        if not packed or len(packed) % RDMA_REQUEST.size:
            raise ShimError(errno.EINVAL, "ibv_post_send", f"{len(packed)} bytes are no whole number of requests")
        if any(memoryview(packed).cast("I")[7::8]):
            raise ShimError(errno.EINVAL, "ibv_post_send", "a reserved field is not 0")
        batch = Batch(wr_id, opcode, packed, int(flags) & int(SendFlags.SIGNALED))
        with self._lock:
            if self.state is not _READY:
                raise self._not_ready("ibv_post_send")
            if self._send_used + batch.count > self.limits.max_send_wr:
                raise ShimError(errno.ENOMEM, "ibv_post_send", f"the queue has {self.limits.max_send_wr} slots")
            self._send_used += batch.count
            self._emit((batch,))
            if batch.flags or not self.ticking or self._transmitter.waiting_bytes > _DEFERRED_BYTES:
                self._push()

    def poll(self, max_completions: int = 256, arm: bool = True) -> list[Completion]:
        self.looks += 1
        with self._lock:
            if not self._cq and self.state is _READY:
                if arm and self._empty and not self.backlog:
                    self._empty = False  # as the last look has found; should more have come, the descriptor says so
                else:
                    self._empty = not arm
                    self._drive()
                    if self._cq and not self.ticking:
                        self._deputy.attend(self)
            reaped = self._reap(max_completions)
            if self._cq:
                self._signal()
            elif self._signalled and self.state is not _CLOSED:
                self._signalled = False
                os.eventfd_read(self._event)
            return reaped

    # ------------------------------------------------------------------------------------ under the lock

    def _drive(self) -> None:
        """Take what has come, answer, and send what there is room for."""
        sock = self._socket
        if sock is None:
            return
        try:
            self._take(sock)
            if self._ack is not None and not (self._ack_can_wait and self.ticking):
                self._send_ack()
            if self._transmitter:
                self._push()
            self._wake_for(sock)
        except (EndOfStreamError, OSError):
            self._lost()
        except FrameError as error:
            _log.warning("connection to %s ended: %s", self.peer, error)
            self._lost()

    def _push(self) -> None:
        full = not self._transmitter.push()
        if full is self.backlog:
            return
        self.backlog = full
        if self._listening and self._socket is not None:
            self._epoll.modify(self._socket, select.EPOLLIN | (select.EPOLLOUT if full else 0))
        if full and not self.ticking:
            self._deputy.attend(self)

    def _lost(self) -> None:
        self._fail(WcStatus.WR_FLUSH_ERR)
        if not self._discarding:
            self._break()

    def _end(self, gently: bool) -> None:
        self._forget_payload()
        self._stop_listening()
        self._discarding = gently
        if gently:
            self._discard_until_s = time.monotonic() + _DISCARD_LIMIT_S
            self._transmitter.end_when_empty()
            self._deputy.attend(self)
        else:
            self._break()

    def _break(self) -> None:
        """End both directions at once."""
        self._discarding = False
        self._forget_payload()
        self._stop_listening()
        if self._socket is not None:
            self._transmitter.clear()
            with suppress(OSError):  # not connected any more
                self._socket.shutdown(socket.SHUT_RDWR)

    def _stop_listening(self) -> None:
        if self._listening and self._socket is not None:
            self._listening = False
            self._epoll.unregister(self._socket)

    def _discard(self, sock: socket.socket) -> None:
        """Read what still comes, so that the refusal is not lost to a reset; nothing of it is applied."""
        self._transmitter.push()
        scrap = bytearray(_SCRAP_BYTES)
        try:
            while time.monotonic() < self._discard_until_s and sock.recv_into(scrap):
                pass
        except BlockingIOError:
            return
        except OSError:
            self._break()
        self._break()

    # ------------------------------------------------------------------------------------ the deputy's side

    def serve(self) -> None:
        """Do what the owner does not look at. Leaves it to whoever is at it."""
        if not self._lock.acquire(blocking=False):
            return
        try:
            if self.state is _READY:
                self._drive()
                self._signal()  # also for an owner who was about to look, and would sleep on as nothing is left to see
            elif self._discarding and self._socket is not None:
                self._discard(self._socket)
        finally:
            self._lock.release()

    def settle(self) -> None:
        """Send what has waited for something to go along with."""
        if self._ack is None and (self.backlog or not self._transmitter):
            return
        if not self._lock.acquire(blocking=False):
            return
        try:
            if self.state is _READY:
                self._send_ack()
                self._push()
        finally:
            self._lock.release()

    @property
    def pending(self) -> bool:
        """Whether there may be something to serve."""
        sock = self._socket
        if sock is None or self.state is _CLOSED:
            return False
        if self._discarding:
            return True
        if self.state is not _READY:
            return False
        ready = select.poll()
        try:
            ready.register(sock, select.POLLIN | (select.POLLOUT if self.backlog else 0))
            return bool(ready.poll(0))
        except (OSError, ValueError):  # closed meanwhile
            return False

    def abort(self) -> None:
        """End it, as if the peer had."""
        with self._lock:
            self._fail(WcStatus.WR_FLUSH_ERR)
            self._break()

    def check_deadlines(self, now_s: float) -> None:
        """Give up a peer that does not answer, or posts no receive."""
        if not self._lock.acquire(blocking=False):
            return
        try:
            if self._discarding and now_s > self._discard_until_s:
                self._break()
            if self.state is not _READY or self._socket is None:
                return
            progress_s = max(self._progress_s, self._transmitter.progress_s)
            if self._inflight and now_s - progress_s > self._timeouts.transport_s:
                self._fail(WcStatus.RETRY_EXC_ERR)
            elif self._waiting and not self._inflight and now_s - self._waiting_since_s > self._timeouts.rnr_s:
                self._fail(WcStatus.RNR_RETRY_EXC_ERR)
        finally:
            self._lock.release()

    # ------------------------------------------------------------------------------------ taking back

    def release_region(self, region: Region) -> None:
        deadline_s = time.monotonic() + _GRACE_S
        while True:
            with self._lock:
                if not self._uses(region):
                    return
                if time.monotonic() > deadline_s:
                    ours = bool(self._inflight) and region in self._inflight[0].regions
                    self._fail(WcStatus.LOC_PROT_ERR if ours else WcStatus.WR_FLUSH_ERR)
                    self._break()
                    return
                if self.state is _READY:
                    self._drive()
                    if self._cq:
                        self._signal()
            time.sleep(0.0005)

    def _uses(self, region: Region) -> bool:
        if self._socket is None or self.state is _CLOSED:
            return False
        if region in self._touched or any(region in posted.regions for posted in self._inflight):
            return True
        return self._transmitter.refers_to(region)

    def close(self) -> None:
        if self.state is _CLOSED:
            return
        with self._lock:
            self.state = _CLOSED
            if self._socket is not None:
                self._break()
        if self._socket is not None:
            self._deputy.remove(self, self._socket.fileno())
            self._socket.close()
        self.pd.connections.discard(self)
        self._epoll.close()
        os.close(self._event)
        self._recvs.clear()
        self._cq.clear()
        self._inflight.clear()
        self._waiting.clear()
