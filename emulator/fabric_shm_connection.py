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
from typing import TYPE_CHECKING, NamedTuple

from doca_shims.api import (
    Completion,
    ConnectionState,
    Opcode,
    QueueLimits,
    RecvRequest,
    SendRequest,
    ShimError,
    WcStatus,
)
from emulator import fabric_shm_pages as pages
from emulator.fabric_core import MAX_MESSAGE_BYTES, MAX_SGE, MAX_TRANSFER_BYTES, QueuePair, Timeouts
from emulator.fabric_shm_pages import ControlPage, RegionTable, fence
from emulator.fabric_shm_peer import Peer, process_vm_readv, process_vm_writev
from emulator.fabric_timer import Timer

if TYPE_CHECKING:
    from emulator.fabric_shm_domain import ShmDomain

_U32 = 0xFFFFFFFF
_SUSPENSION_LIMIT_S = 1.0
_memmove = ctypes.memmove


class _Remote(NamedTuple):
    """A peer's region as the data path needs it."""

    slot: int
    word: int
    address: int
    end: int
    readable: bool
    writable: bool
    delta: int | None
    """Add it to a remote address for the address here; None: not mapped here."""


class ShmConnection(QueuePair):
    """`doca_shims.api.Connection`. Made in two steps: this side's half first, so that receives can be posted
    before the peer hears of it; then `attach`."""

    def __init__(self, pd: ShmDomain, limits: QueueLimits, sock: socket.socket, timeouts: Timeouts) -> None:
        super().__init__(pd, limits, "")
        self._domain = pd
        self._socket = sock
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
        self._awaits_room = False
        self._remotes: dict[int, _Remote] = {}
        self._iovecs = (ctypes.c_uint64 * (2 * MAX_SGE))()
        self._iovecs_address = ctypes.addressof(self._iovecs)
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
        self._target = self._peer_page.quads
        self._target_iovec = self._peer_page.iovec_address
        self._words = self._table.quads
        self._live = self._process
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
        posted = own[pages.POSTED]
        for request in requests:
            own[pages.POSTED_SIZES + posted % pages.RING_SLOTS] = min(request.sge.length, _U32)
            posted = (posted + 1) & _U32
        own[pages.POSTED] = posted
        fence()
        if own[pages.WAITING] and self._attached:
            own[pages.WAITING] = 0
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
        for index, request in enumerate(requests):
            opcode = request.opcode
            byte_count = 0
            if opcode is Opcode.SEND:
                status = self._send(request)
                if status is None:
                    self._sends = list(requests[index:])
                    self._wait()
                    return
            else:
                status, byte_count = self._transfer(request, opcode is Opcode.RDMA_READ)
            self._complete_send(request, status, byte_count)
            if status is not WcStatus.SUCCESS:
                self._sends = list(requests[index + 1 :])
                self._fail()
                return
        self._sends = []

    # --------------------------------------------------------------------------------------------- SEND

    def _send(self, request: SendRequest) -> WcStatus | None:
        """Put one message into the socket. None: it cannot go yet."""
        sges = request.sges
        if not self.pd.check_local(sges, writable=False):
            return WcStatus.LOC_PROT_ERR
        length = sum(sge.length for sge in sges)
        if length > MAX_MESSAGE_BYTES:
            return WcStatus.LOC_LEN_ERR
        theirs = self._theirs
        if theirs[pages.CLOSED]:
            return WcStatus.WR_FLUSH_ERR
        sent = self._sent
        self._awaits_room = False
        if theirs[pages.POSTED] == sent:
            return None
        slot = sent % pages.RING_SLOTS
        too_long = length > theirs[pages.POSTED_SIZES + slot]
        theirs[pages.SENT_SIZES + slot] = length
        theirs[pages.SENT] = (sent + 1) & _U32
        try:
            if len(sges) == 1 and length:
                self._socket.send((ctypes.c_char * length).from_address(sges[0].address))
            else:
                # An empty message would look like the end of the stream, so it travels as one byte.
                parts = [(ctypes.c_char * sge.length).from_address(sge.address) for sge in sges if sge.length]
                self._socket.sendmsg(parts or [b"\0"])
        except BlockingIOError:
            theirs[pages.SENT] = sent
            self._awaits_room = True
            return None
        except OSError:
            theirs[pages.SENT] = sent
            return WcStatus.WR_FLUSH_ERR
        self._sent = (sent + 1) & _U32
        return WcStatus.REM_INV_REQ_ERR if too_long else WcStatus.SUCCESS

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
            self._theirs[pages.WAITING] = 1
            fence()
            if self._theirs[pages.POSTED] != self._sent:
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
        request = self._sends.pop(0)
        lost = WcStatus.RETRY_EXC_ERR if self._awaits_room else WcStatus.RNR_RETRY_EXC_ERR
        self._complete_send(request, lost)
        self._fail()

    # ------------------------------------------------------------------------------------ READ and WRITE

    def _transfer(self, request: SendRequest, read: bool) -> tuple[WcStatus, int]:
        by_lkey = self.pd.by_lkey
        total = 0
        for address, length, lkey in request.sges:
            region = by_lkey.get(lkey)
            if region is None or address < region.address or length < 0 or address + length > region.end:
                return WcStatus.LOC_PROT_ERR, 0
            if read and not region.can_write:
                return WcStatus.LOC_PROT_ERR, 0
            total += length
        if total > MAX_TRANSFER_BYTES:
            return WcStatus.LOC_LEN_ERR, 0
        if total == 0:
            return WcStatus.SUCCESS, 0
        start = request.remote_address
        limit_s = 0.0
        while True:
            remote = self._remotes.get(request.rkey) or self._resolve(request.rkey)
            if remote is None or start < remote.address or start + total > remote.end:
                return WcStatus.REM_ACCESS_ERR, 0
            if not (remote.readable if read else remote.writable):
                return WcStatus.REM_ACCESS_ERR, 0
            if remote.word & pages.KIND_MASK != pages.SUSPENDED:
                status = self._copy(request, remote, total, read)
                if status is not None:
                    return status, total
            self._remotes.pop(request.rkey, None)
            now_s = time.monotonic()
            limit_s = limit_s or now_s + _SUSPENSION_LIMIT_S
            if now_s > limit_s:
                return WcStatus.REM_OP_ERR, 0
            if remote.word & pages.KIND_MASK == pages.SUSPENDED:
                time.sleep(50e-6)

    def _copy(self, request: SendRequest, remote: _Remote, total: int, read: bool) -> WcStatus | None:
        """Copy between the elements and the remote range. None: the region changed or the copy was cut short by
        its owner; look it up again."""
        theirs = self._theirs
        target = self._target
        words = self._words
        at = pages.WORDS + remote.slot
        target[pages.BASE] = request.remote_address
        target[pages.LENGTH] = total
        delta = remote.delta
        theirs[pages.BUSY] = pages.IN_KERNEL if delta is None else pages.READING if read else pages.WRITING
        try:
            fence()
            if theirs[pages.CLOSED]:
                return WcStatus.WR_FLUSH_ERR
            if words[at] != remote.word:
                return None
            if delta is None:
                status = self._copy_in_kernel(request, total, read)
            else:
                status = WcStatus.SUCCESS
                far = request.remote_address + delta
                for address, length, _ in request.sges:
                    if read:
                        _memmove(address, far, length)
                    else:
                        _memmove(far, address, length)
                    far += length
        finally:
            theirs[pages.BUSY] = pages.IDLE
        if read and status is WcStatus.SUCCESS:
            # What was read after a revocation is nobody's business, and may be anything.
            if theirs[pages.CLOSED]:
                return WcStatus.WR_FLUSH_ERR
            if words[at] != remote.word:
                return None
        return status

    def _copy_in_kernel(self, request: SendRequest, total: int, read: bool) -> WcStatus | None:
        if not self._live.is_alive():
            return WcStatus.RETRY_EXC_ERR
        iovecs = self._iovecs
        count = 0
        for address, length, _ in request.sges:
            iovecs[count] = address
            iovecs[count + 1] = length
            count += 2
        call = process_vm_readv if read else process_vm_writev
        moved = call(self._live.pid, self._iovecs_address, count // 2, self._target_iovec, 1, 0)
        if moved == total:
            return WcStatus.SUCCESS
        if moved < 0 and ctypes.get_errno() == errno.ESRCH:
            return WcStatus.RETRY_EXC_ERR
        if self._target[pages.LENGTH] == 0:
            return None
        return WcStatus.REM_OP_ERR

    def _resolve(self, rkey: int) -> _Remote | None:
        table = self._table
        found = None if table is None else table.find(rkey)
        if found is None:
            return None
        slot, word, row = found
        delta = None
        if word & pages.KIND_MASK == pages.SHARED:
            mapped = self._live.map_memory(row)
            delta = None if mapped is None else mapped - row.memory_address
        end = row.address + row.length_bytes
        remote = _Remote(slot, word, row.address, end, bool(row.access & 4), bool(row.access & 2), delta)
        self._remotes[rkey] = remote
        return remote

    # ------------------------------------------------------------------------------------------ polling

    def poll(self, max_completions: int = 256) -> list[Completion]:
        if self.state == ConnectionState.READY:
            if self._sends:
                self._resume()
            if self._own[pages.SENT] != self._received:
                self._receive(max_completions - len(self._cq))
        if not self._cq and self.state != ConnectionState.CLOSED:
            self._look()
        reaped = self._reap(max_completions)
        if self._signalled and not self._cq and self.state != ConnectionState.CLOSED:
            self._signalled = False
            self._clear_event()
        return reaped

    def _receive(self, count: int) -> None:
        """Take up to `count` messages into posted receives."""
        own = self._own
        while self._recvs and own[pages.SENT] != self._received and count > 0:
            address, length, _ = self._recvs[0].sge
            slot = self._received % pages.RING_SLOTS
            empty = own[pages.SENT_SIZES + slot] == 0
            buffer = bytearray(1) if empty or not length else (ctypes.c_char * length).from_address(address)
            try:
                size = self._socket.recv_into(buffer, 0, socket.MSG_TRUNC)
            except BlockingIOError:
                return
            except ConnectionResetError:
                continue  # the peer is gone; what it had sent before is still here
            except OSError:
                self._fail()
                return
            if size == 0:
                self._fail()
                return
            size = 0 if empty else size
            self._received = (self._received + 1) & _U32
            count -= 1
            request = self._recvs.popleft()
            if size > length:
                self._complete_recv(request, WcStatus.LOC_LEN_ERR)
                self._fail()
                return
            self._complete_recv(request, WcStatus.SUCCESS, size)

    def _look(self) -> None:
        """Nothing is at hand: look at what woke us."""
        for descriptor, _ in self._epoll.poll(0):
            if descriptor == self._event:
                self._clear_event()
            elif self._timer is not None and descriptor == self._timer.fd:
                self._timer.clear()
            elif self.state == ConnectionState.READY:
                self._look_at_socket()
        if self._sends and self.state == ConnectionState.READY:
            self._resume()

    def _look_at_socket(self) -> None:
        self._receive(self.limits.max_recv_wr)
        if self._cq or self.state != ConnectionState.READY:
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
        self._own[pages.CLOSED] = 1
        waiting, self._sends = self._sends, []
        for request in waiting:
            self._complete_send(request, WcStatus.WR_FLUSH_ERR)
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
        self._own[pages.CLOSED] = 1
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
