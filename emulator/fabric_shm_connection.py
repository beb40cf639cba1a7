"""A connection of emu-shm: SEND by a socket, READ and WRITE by the initiator's own copy, in `post_send`.

There are no threads. `fileno` is an epoll descriptor over the socket (messages, and the peer's end), an event
(completions made by `post_send`, and the peer's receives after a wait), and a timer while a SEND waits.
"""

from __future__ import annotations

import ctypes
import errno
import os
import select
import socket
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING

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
from emulator.fabric_core import MAX_MESSAGE_BYTES, QueuePair, Timeouts
from emulator.fabric_shm_initiator import Initiator
from emulator.fabric_shm_pages import (
    CLOSED,
    POSTED,
    POSTED_SIZES,
    RING_SLOTS,
    SENT,
    SENT_SIZES,
    WAITING,
    ControlPage,
    RegionTable,
    fence,
)
from emulator.fabric_shm_peer import Peer
from emulator.fabric_timer import Timer

if TYPE_CHECKING:
    from emulator.fabric_shm_domain import ShmDomain

_U32 = 0xFFFFFFFF
_LOOK_EVERY_S = 0.01
_BUFFERS_MAX = 4096
_MSG_TRUNC = int(socket.MSG_TRUNC)
_SEND = Opcode.SEND
_RDMA_READ = Opcode.RDMA_READ
_SUCCESS = WcStatus.SUCCESS
_READY = ConnectionState.READY
_CLOSED_STATE = ConnectionState.CLOSED


class ShmConnection(QueuePair):
    """`doca_shims.api.Connection`. Made in two steps: this side's half first, so that receives can be posted
    before the peer hears of it; then `attach`."""

    def __init__(self, pd: ShmDomain, limits: QueueLimits, sock: socket.socket, timeouts: Timeouts) -> None:
        super().__init__(pd, limits, "")
        self._domain = pd
        self._socket: socket.socket = sock
        self._timeouts = timeouts
        self._page_fd = ControlPage.create()
        self._page = ControlPage(self._page_fd)
        self._own = self._page.words
        self._event = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self._epoll = select.epoll()
        self._epoll.register(self._event, select.EPOLLIN)
        self._timer: Timer | None = None
        self._signalled = False
        self._attached = False
        self._received = 0
        self._sent = 0
        self._sends: list[SendRequest] = []  # waiting for a receive of the peer, or for room in the socket
        self._deadline_s = 0.0
        self._look_due_s = 0.0
        self._was_empty = False
        self._awaits_room = False
        self._buffers: dict[tuple[int, int], ctypes.Array[ctypes.c_char]] = {}
        pd.connections.add(self)

    # ---------------------------------------------------------------------------------------- setting up

    def half(self) -> list[int]:
        """Descriptors that the peer needs: control page, region table, event. Still owned here."""
        return [self._page_fd, self._domain.table_fd, self._event]

    def attach(self, descriptors: Sequence[int], pid: int, private_data: bytes) -> None:
        """Take the peer's half, whose descriptors become this connection's. Raises ShimError where they are not
        what they should be; `close` then releases them."""
        page_fd, table_fd, self._peer_event = descriptors
        self._attached = True
        self._peer_page: ControlPage | None = None
        self._table: RegionTable | None = None
        self._process: Peer | None = None
        try:
            self._process = Peer(pid)
            self._peer_page = ControlPage(page_fd)
            self._table = RegionTable(table_fd)
        except OSError as error:
            raise ShimError(error.errno or errno.EPROTO, "rdma_connect", f"peer {pid}: {error}") from error
        finally:
            os.close(page_fd)
            os.close(table_fd)
        os.close(self._page_fd)
        self._page_fd = -1
        self._theirs = self._peer_page.words
        self._live = self._process
        self._initiator = Initiator(self._domain, self._peer_page, self._table, self._process)
        self.private_data = private_data
        self.peer = f"process {pid}"
        self._socket.setblocking(False)
        self._epoll.register(self._socket, select.EPOLLIN | select.EPOLLRDHUP)

    def fileno(self) -> int:
        return self._epoll.fileno()

    @property
    def page(self) -> ControlPage:
        """This side's control page, for the domain that revokes regions."""
        return self._page

    @property
    def process(self) -> Peer | None:
        return self._live if self._attached and self.state != ConnectionState.CLOSED else None

    # ------------------------------------------------------------------------------------------- posting

    def post_recv(self, requests: Sequence[RecvRequest]) -> None:
        self._admit_recvs(requests)
        own = self._own
        posted = own[POSTED]
        for _, (_, length, _) in requests:
            own[POSTED_SIZES + posted % RING_SLOTS] = length if length < _U32 else _U32
            posted = (posted + 1) & _U32
        own[POSTED] = posted
        fence()
        if own[WAITING] and self._attached:
            own[WAITING] = 0
            os.eventfd_write(self._peer_event, 1)

    def post_send(self, requests: Sequence[SendRequest]) -> None:
        self._admit_sends(requests)
        if self._sends:
            self._sends.extend(requests)
            return
        self._execute(requests)
        if self._cq and not self._signalled:
            self._signalled = True
            os.eventfd_write(self._event, 1)

    def _execute(self, requests: Sequence[SendRequest]) -> None:
        """Carry out sends in order, until one must wait or fails."""
        transfer = self._initiator.transfer
        for index, request in enumerate(requests):
            wr_id, opcode, sges, remote_address, rkey, flags = request
            byte_count = 0
            if opcode == _SEND:
                waited_for = self._send(sges)
                if waited_for is None:
                    self._sends = list(requests[index:])
                    self._wait()
                    return
                status = waited_for
            else:
                status, byte_count = transfer(sges, remote_address, rkey, opcode == _RDMA_READ)
            self._complete_send(wr_id, opcode, flags, status, byte_count)
            if status is not _SUCCESS:
                self._sends = list(requests[index + 1 :])
                self._fail()
                return
        self._sends = []

    # --------------------------------------------------------------------------------------------- SEND

    def _send(self, sges: tuple[Sge, ...]) -> WcStatus | None:
        """Put one message into the socket. None: it cannot go yet."""
        by_lkey = self.pd.by_lkey
        length = 0
        for address, size, lkey in sges:
            region = by_lkey.get(lkey)
            if region is None or address < region.address or size < 0 or address + size > region.end:
                return WcStatus.LOC_PROT_ERR
            length += size
        if length > MAX_MESSAGE_BYTES:
            return WcStatus.LOC_LEN_ERR
        theirs = self._theirs
        if theirs[CLOSED]:
            return WcStatus.WR_FLUSH_ERR
        sent = self._sent
        self._awaits_room = False
        if theirs[POSTED] == sent:
            return None
        slot = sent % RING_SLOTS
        too_long = length > theirs[POSTED_SIZES + slot]
        theirs[SENT_SIZES + slot] = length
        theirs[SENT] = (sent + 1) & _U32
        try:
            if length and len(sges) == 1:
                self._socket.send(self._buffer(sges[0][0], length))
            else:
                # An empty message would look like the end of the stream, so it travels as one byte.
                parts = [self._buffer(address, size) for address, size, _ in sges if size]
                self._socket.sendmsg(parts or [b"\0"])
        except BlockingIOError:
            theirs[SENT] = sent
            self._awaits_room = True
            return None
        except OSError:
            theirs[SENT] = sent
            return WcStatus.WR_FLUSH_ERR
        self._sent = (sent + 1) & _U32
        return WcStatus.REM_INV_REQ_ERR if too_long else _SUCCESS

    def _buffer(self, address: int, length: int) -> ctypes.Array[ctypes.c_char]:
        """The bytes there, as the socket module wants them. Messages come from and go to the same few places, and
        making such an object costs more than finding it; it holds an address only, checked before every use."""
        key = (address, length)
        buffer = self._buffers.get(key)
        if buffer is None:
            if len(self._buffers) >= _BUFFERS_MAX:
                self._buffers.clear()
            buffer = self._buffers[key] = (ctypes.c_char * length).from_address(address)
        return buffer

    def _wait(self) -> None:
        """The first of `_sends` cannot go yet: be woken when it can, or when its time is over."""
        timeout_s = self._timeouts.transport_s if self._awaits_room else self._timeouts.rnr_s
        self._deadline_s = time.monotonic() + timeout_s
        if self._timer is None:
            self._timer = Timer()
            self._epoll.register(self._timer.fd, select.EPOLLIN)
        self._timer.set(timeout_s)
        self._watch()

    def _watch(self) -> None:
        room = select.EPOLLOUT if self._awaits_room else 0
        self._epoll.modify(self._socket, select.EPOLLIN | select.EPOLLRDHUP | room)
        if not self._awaits_room:
            self._theirs[WAITING] = 1
            fence()
            if self._theirs[POSTED] != self._sent:
                # Posted between the look and the flag: nobody will ring, so ring ourselves.
                os.eventfd_write(self._event, 1)

    def _resume(self) -> None:
        """Try the waiting sends again."""
        first = self._sends[0]
        deadline_s = self._deadline_s
        self._execute(self._sends)
        if not self._sends or self._sends[0] is not first:
            if not self._sends and self.state == ConnectionState.READY and self._timer is not None:
                self._timer.stop()
                self._epoll.modify(self._socket, select.EPOLLIN | select.EPOLLRDHUP)
            return
        self._deadline_s = deadline_s
        remaining_s = deadline_s - time.monotonic()
        if remaining_s > 0 and self._timer is not None:
            self._timer.set(remaining_s)
            return
        lost = WcStatus.RETRY_EXC_ERR if self._awaits_room else WcStatus.RNR_RETRY_EXC_ERR
        self._refuse_send(self._sends.pop(0), lost)
        self._fail()

    # ------------------------------------------------------------------------------------------ polling

    def poll(self, max_completions: int = 256, arm: bool = True) -> list[Completion]:
        del arm  # every poll leaves the descriptor telling
        state = self.state
        if state is _CLOSED_STATE:
            return []
        queue = self._cq
        if state is _READY:
            if self._sends:
                self._resume()
            if self._own[SENT] != self._received:
                self._receive(max_completions - len(queue))
        now_s = time.monotonic()
        # The first empty poll after a full one does not look: whatever is there keeps the descriptor readable.
        # Writing into a dead process's memfd succeeds, so a busy initiator too must look now and then.
        if now_s > self._look_due_s or (not queue and (self._was_empty or self._sends)):
            self._look_due_s = now_s + _LOOK_EVERY_S
            self._look()
        if not queue:
            self._was_empty = True
            return []
        self._was_empty = False
        reaped = self._reap(max_completions)
        if self._signalled and not queue:
            self._signalled = False
            self._clear_event()
        return reaped

    def _receive(self, count: int) -> None:
        """Take up to `count` messages into posted receives."""
        own = self._own
        recvs = self._recvs
        received = self._received
        while recvs and count > 0 and own[SENT] != received:
            wr_id, (address, length, lkey) = recvs[0]
            is_empty = own[SENT_SIZES + received % RING_SLOTS] == 0
            known = lkey in self.pd.by_lkey  # it was when this was posted
            buffer = self._buffer(address, length) if known and length and not is_empty else bytearray(1)
            try:
                size = self._socket.recv_into(buffer, 0, _MSG_TRUNC)
            except BlockingIOError:
                return
            except ConnectionResetError:
                continue  # the peer is gone; what it had sent before is still here
            except OSError:
                size = 0
            if size == 0:
                self._fail()
                return
            if is_empty:
                size = 0
            self._received = received = (received + 1) & _U32
            count -= 1
            recvs.popleft()
            if size > length or not known:
                self._complete_recv(wr_id, WcStatus.LOC_LEN_ERR if known else WcStatus.LOC_PROT_ERR)
                self._fail()
                return
            self._complete_recv(wr_id, _SUCCESS, size)

    def _look(self) -> None:
        """Nothing is at hand: look at what woke us."""
        for descriptor, _ in self._epoll.poll(0):
            if descriptor == self._event:
                if not self._signalled:
                    self._clear_event()  # the peer rang; completions of our own are cleared when they are polled
            elif self._timer is not None and descriptor == self._timer.fd:
                self._timer.clear()
            elif self.state == ConnectionState.READY:
                self._look_at_socket()
        if self._sends and self.state == ConnectionState.READY:
            self._resume()

    def _look_at_socket(self) -> None:
        self._receive(self.limits.max_recv_wr)
        if self.state != ConnectionState.READY:
            return
        try:
            ended = not self._socket.recv(1, socket.MSG_PEEK)
        except BlockingIOError:
            return
        except OSError:
            ended = True
        if ended:
            self._fail()

    def _clear_event(self) -> None:
        try:
            os.eventfd_read(self._event)
        except BlockingIOError:
            return

    # ------------------------------------------------------------------------------------------- ending

    def _fail(self) -> None:
        """To ERROR: everything posted is flushed, and the peer sees the end of the stream."""
        self.state = ConnectionState.ERROR
        self._own[CLOSED] = 1
        waiting, self._sends = self._sends, []
        for request in waiting:
            self._refuse_send(request, WcStatus.WR_FLUSH_ERR)
        self._flush_recvs()
        self._epoll.unregister(self._socket)
        if self._timer is not None:
            self._timer.stop()
        try:
            self._socket.shutdown(socket.SHUT_RDWR)
        except OSError:
            return  # the peer was faster

    def close(self) -> None:
        if self.state == ConnectionState.CLOSED:
            return
        self._own[CLOSED] = 1
        fence()
        try:
            if self._attached:
                self._domain.quiesce(self, None)
        finally:
            self.state = ConnectionState.CLOSED
            self._domain.connections.discard(self)
            self._release()

    def _release(self) -> None:
        self._recvs.clear()
        self._cq.clear()
        self._sends = []
        self._epoll.close()
        self._socket.close()
        if self._timer is not None:
            self._timer.close()
        os.close(self._event)
        if self._page_fd >= 0:
            os.close(self._page_fd)
        self._page.unmap()
        if not self._attached:
            return
        os.close(self._peer_event)
        if self._peer_page is not None:
            self._peer_page.unmap()
        if self._table is not None:
            self._table.unmap()
        if self._process is not None:
            self._process.close()
