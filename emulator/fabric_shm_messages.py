"""Messages of emu-shm: by the ring in the receiver's control page, and by the socket what has no room there.

Both ends of one connection's messages, from one side. Knows nothing of completions; `fabric_shm_connection` asks it to
send or to take the next message, and is told how that went. Sizes, places and counts come from pages that the peer can
write: each is read once and checked before it is used.
"""

from __future__ import annotations

import ctypes
import os
import socket
from typing import Any

from doca_shims.api import Sge, WcStatus
from emulator.fabric_core import MAX_MESSAGE_BYTES, Domain
from emulator.fabric_shm_pages import (
    ARMED,
    CLOSED,
    IN_SOCKET,
    POSTED,
    POSTED_SIZES,
    RECEIVED,
    RING_BYTES,
    RING_SLOTS,
    SENT,
    SLOTS,
    ControlPage,
    fence,
)

NOT_YET = -1
ENDED = -2
TOO_LONG = -3
NO_MEMORY = -4
"""Instead of the size of a message that was taken: none is there, the peer has gone, the receive is too small for it,
the memory of the receive is not registered any more."""

_U32 = 0xFFFFFFFF
_LINE_BYTES = 64
_BUFFERS_MAX = 4096
_MSG_TRUNC = int(socket.MSG_TRUNC)
_SUCCESS = WcStatus.SUCCESS
_memmove = ctypes.PyDLL(None).memmove
_memmove.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t]
_memmove.restype = None


class Messages:
    """Owns none of what it is given. `channel`: the native twin, or None."""

    def __init__(
        self,
        domain: Domain,
        pages: tuple[ControlPage, ControlPage],
        sock: socket.socket,
        bell: int,
        channel: Any,
    ) -> None:
        self._by_lkey = domain.by_lkey
        self._own, self._theirs = (page.words for page in pages)
        self._own_slots, self._their_slots = (page.quads for page in pages)
        self._own_ring, self._their_ring = (page.ring_address for page in pages)
        self._socket = sock
        self._bell = bell
        self._channel = channel
        self._head = 0
        self._buffers: dict[tuple[int, int], ctypes.Array[ctypes.c_char]] = {}
        self.sent = 0
        self.received = 0
        self.awaits_room = False
        """The last message that could not go waits for room in the socket, not for a receive."""

    # ---------------------------------------------------------------------------------------------- sending

    def send(self, sges: tuple[Sge, ...]) -> WcStatus | None:
        """Send one message. None: it cannot go yet."""
        if self._channel is not None and len(sges) == 1:
            address, length, lkey = sges[0]
            head = self._channel.send(self.sent, self._head, address, length, lkey)
            if head >= 0:
                self._head = head
                self.sent = (self.sent + 1) & _U32
                return _SUCCESS
        by_lkey = self._by_lkey
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
        self.awaits_room = False
        if theirs[POSTED] == self.sent:
            return None
        too_long = length > theirs[POSTED_SIZES + self.sent % RING_SLOTS]
        status = self._put(sges, length) if self._has_room(length) else self._put_in_socket(sges, length)
        return WcStatus.REM_INV_REQ_ERR if too_long and status is _SUCCESS else status

    def _has_room(self, length: int) -> bool:
        if self._theirs[RECEIVED] == self.sent:
            self._head = 0
        return length <= RING_BYTES - self._head

    def _put(self, sges: tuple[Sge, ...], length: int) -> WcStatus:
        head = self._head
        target = self._their_ring + head
        for address, size, _ in sges:
            _memmove(target, address, size)
            target += size
        self._their_slots[SLOTS + self.sent % RING_SLOTS] = head << 32 | length
        self._head = head + length + -length % _LINE_BYTES
        self.sent = (self.sent + 1) & _U32
        theirs = self._theirs
        theirs[SENT] = self.sent
        fence()
        if theirs[ARMED]:
            theirs[ARMED] = 0
            os.eventfd_write(self._bell, 1)
        return _SUCCESS

    def _put_in_socket(self, sges: tuple[Sge, ...], length: int) -> WcStatus | None:
        theirs = self._theirs
        sent = self.sent
        self._their_slots[SLOTS + sent % RING_SLOTS] = IN_SOCKET << 32 | length
        theirs[SENT] = (sent + 1) & _U32
        try:
            # An empty message, which would look like the end of the stream, always has room in the ring.
            self._socket.sendmsg([self._buffer(address, size) for address, size, _ in sges if size])
        except BlockingIOError:
            theirs[SENT] = sent
            self.awaits_room = True
            return None
        except OSError:
            theirs[SENT] = sent
            return WcStatus.WR_FLUSH_ERR
        self.sent = (sent + 1) & _U32
        return _SUCCESS

    # -------------------------------------------------------------------------------------------- receiving

    def receive(self, sge: Sge) -> int:
        """Take the next message into a posted receive: its size, or one of the negative numbers above."""
        address, length, lkey = sge
        received = self.received
        if self._channel is not None:
            size: int = self._channel.receive(received, address, length, lkey)
            if size >= 0:
                self.received = (received + 1) & _U32
                return size
        if (self._own[SENT] - received - 1) & _U32 >= RING_SLOTS:
            return NOT_YET  # the peer may take one back for which the socket had no room
        slot = self._own_slots[SLOTS + received % RING_SLOTS]
        place, size = slot >> 32, slot & _U32
        in_socket = place == IN_SOCKET
        if not in_socket and place + size > RING_BYTES:
            return ENDED  # no message: the peer's page is damaged
        known = lkey in self._by_lkey  # it was when this was posted
        if in_socket:
            size = self._take_from_socket(self._buffer(address, length) if known and length else bytearray(1))
            if size < 0:
                return size
        elif known and size <= length:
            _memmove(address, self._own_ring + place, size)
        self.received = self._own[RECEIVED] = (received + 1) & _U32
        if not known:
            return NO_MEMORY
        return TOO_LONG if size > length else size

    def _take_from_socket(self, buffer: ctypes.Array[ctypes.c_char] | bytearray) -> int:
        while True:
            try:
                return self._socket.recv_into(buffer, 0, _MSG_TRUNC) or ENDED
            except BlockingIOError:
                return NOT_YET
            except ConnectionResetError:
                continue  # the peer is gone; what it had sent before is still here
            except OSError:
                return ENDED

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
