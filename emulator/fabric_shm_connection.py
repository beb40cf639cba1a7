"""A connection of emu-shm: SEND by a ring in shared memory, READ and WRITE by the initiator's own copy, when posted.

There are no threads. `fileno` is an epoll descriptor over the socket (large messages, and the peer's end), an event
(completions made by posting, messages in the ring, and the peer's receives after a wait), and a timer while a SEND
waits. The event is set while the owner is busy and cleared by the plain poll that finds nothing, so that neither side
makes a system call for a message to an owner that polls.
"""

from __future__ import annotations

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
    SendFlags,
    SendRequest,
    WcStatus,
)
from emulator.fabric_core import Timeouts
from emulator.fabric_shm_attachment import Attachment
from emulator.fabric_shm_messages import ENDED, NO_MEMORY, NOT_YET, TOO_LONG
from emulator.fabric_shm_pages import (
    ARMED,
    CLOSED,
    POSTED,
    POSTED_SIZES,
    RING_SLOTS,
    SENT,
    WAITING,
    fence,
)
from emulator.fabric_timer import Timer

if TYPE_CHECKING:
    from emulator.fabric_shm_domain import ShmDomain

_U32 = 0xFFFFFFFF
_LOOK_EVERY_S = 0.01
_LOOK_EVERY = 256
"""Polls with nothing to return and without arming, of which one makes a system call to see whether the peer lives."""
_SEND = Opcode.SEND
_RDMA_READ = Opcode.RDMA_READ
_RDMA = (Opcode.RDMA_WRITE, Opcode.RDMA_READ)
_SIGNALED = SendFlags.SIGNALED
_SUCCESS = WcStatus.SUCCESS
_BAD_RECEIVES = {TOO_LONG: WcStatus.LOC_LEN_ERR, NO_MEMORY: WcStatus.LOC_PROT_ERR}
_READY = ConnectionState.READY
_CLOSED_STATE = ConnectionState.CLOSED


class ShmConnection(Attachment):
    """`doca_shims.api.Connection`."""

    def __init__(self, pd: ShmDomain, limits: QueueLimits, sock: socket.socket, timeouts: Timeouts) -> None:
        super().__init__(pd, limits, sock)
        self._timeouts = timeouts
        self._timer: Timer | None = None
        self._armed = True  # the descriptor tells of everything
        self._own[ARMED] = 1
        self._told = False  # the event is set, for completions of our own
        self._watched = False  # the event may be set, for receives of the peer
        self._glances = 0
        self._sends: list[SendRequest] = []  # waiting for a receive of the peer, or for room in the socket
        self._deadline_s = 0.0
        self._look_due_s = 0.0
        self._was_empty = False

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
        if self._cq and self._armed and not self._told:
            self._tell()

    def post_rdma(
        self, wr_id: int, opcode: Opcode, requests: bytes | bytearray | memoryview, flags: SendFlags = _SIGNALED
    ) -> None:
        count = 0
        if self._channel is not None and not self._sends and self.state is _READY and opcode in _RDMA:
            count = self._channel.count(requests)
        if count == 0:
            super().post_rdma(wr_id, opcode, requests, flags)
            return
        self._take_send_slots(count)
        self._silent += count - 1
        status = self._initiator.run(requests, count, opcode == _RDMA_READ)
        self._complete_send(wr_id, opcode, flags, status)
        if status is not _SUCCESS:
            self._fail()
        if self._cq and self._armed and not self._told:
            self._tell()

    def _tell(self) -> None:
        self._told = True
        os.eventfd_write(self._event, 1)

    def _execute(self, requests: Sequence[SendRequest]) -> None:
        """Carry out sends in order, until one must wait or fails."""
        transfer = self._initiator.transfer
        for index, request in enumerate(requests):
            wr_id, opcode, sges, remote_address, rkey, flags = request
            byte_count = 0
            if opcode == _SEND:
                waited_for = self._messages.send(sges)
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

    # ------------------------------------------------------------------------------------------- waiting

    def _wait(self) -> None:
        """The first of `_sends` cannot go yet: be woken when it can, or when its time is over."""
        timeout_s = self._timeouts.transport_s if self._messages.awaits_room else self._timeouts.rnr_s
        self._deadline_s = time.monotonic() + timeout_s
        if self._timer is None:
            self._timer = Timer()
            self._epoll.register(self._timer.fd, select.EPOLLIN)
        self._timer.set(timeout_s)
        self._watch()

    def _watch(self) -> None:
        room = select.EPOLLOUT if self._messages.awaits_room else 0
        self._epoll.modify(self._socket, select.EPOLLIN | select.EPOLLRDHUP | room)
        if not self._messages.awaits_room:
            self._watched = True
            self._theirs[WAITING] = 1
            fence()
            if self._theirs[POSTED] != self._messages.sent:
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
        lost = WcStatus.RETRY_EXC_ERR if self._messages.awaits_room else WcStatus.RNR_RETRY_EXC_ERR
        self._refuse_send(self._sends.pop(0), lost)
        self._fail()

    # ------------------------------------------------------------------------------------------ polling

    def poll(self, max_completions: int = 256, arm: bool = True) -> list[Completion]:
        queue = self._cq
        if self.state is _READY:
            if self._own[SENT] != self._messages.received:
                self._receive(max_completions - len(queue))
            if self._sends:
                self._resume()
        elif self.state is _CLOSED_STATE:
            return []
        if not queue:
            if arm:
                self._arm()
            else:
                self._glance()
            if not queue:
                return []
        elif time.monotonic() > self._look_due_s:
            # Writing into a dead process's memfd succeeds, so a busy initiator too must look now and then.
            self._look()
        self._was_empty = False
        return self._reap(max_completions)

    def _arm(self) -> None:
        """Nothing is there: let the descriptor tell from now on, and look once more at what came meanwhile."""
        own = self._own
        rung = self._told or self._watched or not self._armed or not own[ARMED]
        if self._was_empty or self._sends:
            # The first empty poll after a full one does not: whatever else is there keeps the descriptor readable.
            rung |= self._look()
        if rung and not self._cq:
            self._told = self._watched = False
            self._clear_event()
            self._armed = True
            own[ARMED] = 1
            fence()
            if self.state is _READY and own[SENT] != self._messages.received:
                self._receive(self.limits.max_recv_wr)
            if self._sends and self.state is _READY:
                self._watched = True
                self._resume()
        self._was_empty = True

    def _glance(self) -> None:
        """Nothing is there, and the owner looks again soon: no need to be rung for."""
        if self._armed:
            self._armed = False
            self._own[ARMED] = 0
        self._glances += 1
        if self._glances % _LOOK_EVERY == 0:
            self._look()

    def _receive(self, count: int) -> None:
        """Take up to `count` messages into posted receives."""
        own = self._own
        recvs = self._recvs
        messages = self._messages
        while recvs and count > 0 and own[SENT] != messages.received:
            wr_id, sge = recvs[0]
            size = messages.receive(sge)
            if size >= 0:
                recvs.popleft()
                self._complete_recv(wr_id, _SUCCESS, size)
                count -= 1
                continue
            if size == NOT_YET:
                return
            if size != ENDED:
                recvs.popleft()
                self._complete_recv(wr_id, _BAD_RECEIVES[size])
            self._fail()
            return

    def _look(self) -> bool:
        """Nothing is at hand: look at what woke us. Whether the event is set."""
        self._look_due_s = time.monotonic() + _LOOK_EVERY_S
        rung = False
        for descriptor, _ in self._epoll.poll(0):
            if descriptor == self._event:
                rung = True
            elif self._timer is not None and descriptor == self._timer.fd:
                self._timer.clear()
            elif self.state == ConnectionState.READY:
                self._look_at_socket()
        if self._sends and self.state == ConnectionState.READY:
            self._resume()
        return rung

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
            self._recvs.clear()
            self._cq.clear()
            self._sends = []
            if self._timer is not None:
                self._timer.close()
            self._release()
