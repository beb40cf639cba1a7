"""The shared pages of emu-shm: one control page per direction of a connection, one region table per domain.

A control page belongs to the side whose memory is reached through it. Its owner writes CLOSED, POSTED, RECEIVED and
the sizes of posted receives; the peer writes the rest, above all BUSY, which says that it may be copying, and the ring
of messages. Owner and initiator follow Dekker's scheme, so that no byte lands after the owner has revoked a region or
closed; so do a sender and an owner that is about to sleep, by SENT and ARMED:

    initiator: publish the range; BUSY = kind; fence; check CLOSED and the region's word; copy; BUSY = 0
    owner:     clear the region's word (or set CLOSED); fence; wait until BUSY is 0, or take measures

Words are aligned, so a memoryview stores and loads each in one instruction; x86 keeps the order of stores.
"""

from __future__ import annotations

import ctypes
import errno
import os
import threading
from typing import Any, NamedTuple

from common.native import load
from doca_shims.api import ShimError
from emulator.fabric_memory import create_memfd, is_sealed, map_shared, unmap

# Indices of 32-bit words in a control page, a cache line apart where another process writes them.
MAGIC = 0
CLOSED = 1
POSTED = 2
"""Receives posted since the start, modulo 2^32."""
RECEIVED = 3
"""Messages taken since the start, modulo 2^32. The owner writes it when it has copied one out of the ring."""
BUSY = 16
TARGET = 17
"""The rkey of the transfer that BUSY, BASE and LENGTH are about. The peer writes BUSY last."""
SENT = 32
"""Messages sent by the peer since the start, modulo 2^32: behind a message's bytes in the ring, ahead of those in the
socket."""
WAITING = 33
"""The peer has a SEND and no receive to send it to; the owner rings its event when it posts one."""
ARMED = 48
"""The owner may be asleep: whoever sends a message by the ring takes this back to 0 and rings the owner's event."""
POSTED_SIZES = 64
RING_SLOTS = 1024
"""Sizes of posted receives, by their number modulo this; and slots of sent messages, likewise."""

# Indices of 64-bit words. The two are the `struct iovec` that process_vm_readv/writev reads as the remote one.
BASE = 9
LENGTH = 10
IOVEC_OFFSET_BYTES = BASE * 8
SLOTS = 640
"""A message: its place in the ring << 32 | its size in bytes."""
IN_SOCKET = 0xFFFFFFFF
"""The place of a message that is not in the ring."""

RING_OFFSET_BYTES = 16384
RING_BYTES = 131072
"""Messages are put behind one another, and from the start again whenever the owner has taken them all; where there is
no room they go by the socket. So a ping-pong stays in the same few cache lines."""

IDLE = 0
WRITING = 1
"""Copying into a mapping of the owner's memfd."""
READING = 2
"""Copying out of such a mapping."""
IN_KERNEL = 3
"""process_vm_readv or process_vm_writev on the range at BASE, LENGTH."""

_PAGE_MAGIC = 0x454E5450
_PAGE_BYTES = RING_OFFSET_BYTES + RING_BYTES

REVOKED = 0
GIVEN = 1 << 32
"""The region's bytes are reached by process_vm_readv and writev."""
SHARED = 2 << 32
"""The region lies in a memfd that the peer may map."""
SUSPENDED = 3 << 32
"""Wait: the owner is about to change it to GIVEN."""
KIND_MASK = 0xFFFFFFFF << 32
KEY_MASK = 0xFFFFFFFF

TABLE_SLOTS = 4096
_HIGH_WATER = 1
WORDS = 8
_ROWS = WORDS + TABLE_SLOTS
_ROW_QUADS = 6
_TABLE_MAGIC = 0x454E5454
_TABLE_BYTES = (_ROWS + TABLE_SLOTS * _ROW_QUADS) * 8

_lock = threading.Lock()


def fence() -> None:
    """A full memory fence. CPython offers none; taking and releasing a lock runs a locked instruction, which on
    x86 keeps a later load from passing an earlier store."""
    _lock.acquire()
    _lock.release()


LAYOUT = (CLOSED, POSTED, RECEIVED, BUSY, TARGET, SENT, ARMED, POSTED_SIZES, RING_SLOTS, BASE, LENGTH, SLOTS) + (
    IN_SOCKET,
    RING_OFFSET_BYTES,
    RING_BYTES,
    WRITING,
    READING,
    IN_KERNEL,
    TABLE_SLOTS,
    WORDS,
)
"""What native code must have been built with."""
NATIVE: Any = load("emulator._shm_channel")
"""The module, or None: then everything is done in Python."""
if NATIVE is not None and NATIVE.LAYOUT != LAYOUT:
    NATIVE = None  # it was built from another version
if NATIVE is not None:
    fence = NATIVE.fence


class _SharedPages:
    """A mapping of a sealed memfd as 32-bit and 64-bit words."""

    def __init__(self, fd: int, length_bytes: int, magic: int) -> None:
        if not is_sealed(fd) or os.fstat(fd).st_size != length_bytes:
            raise ShimError(errno.EPROTO, "rdma_connect", "the peer's pages are not of this protocol")
        self.address = map_shared(fd, length_bytes)
        self._length_bytes = length_bytes
        view = memoryview((ctypes.c_char * length_bytes).from_address(self.address)).cast("B")
        self.words = view.cast("I")
        self.quads = view.cast("Q")
        if self.words[MAGIC] != magic:
            self.unmap()
            raise ShimError(errno.EPROTO, "rdma_connect", "the peer's pages are not of this protocol")

    def unmap(self) -> None:
        # Whoever still looks gets an exception from a released view, not a fault.
        self.words.release()
        self.quads.release()
        unmap(self.address, self._length_bytes)


def _create(length_bytes: int, magic: int) -> int:
    fd = create_memfd("entresol-control", length_bytes)
    os.pwrite(fd, magic.to_bytes(4, "little"), 0)
    return fd


class ControlPage(_SharedPages):
    """One direction of a connection, as its owner or as the peer sees it."""

    def __init__(self, fd: int) -> None:
        super().__init__(fd, _PAGE_BYTES, _PAGE_MAGIC)
        self.iovec_address = self.address + IOVEC_OFFSET_BYTES
        self.ring_address = self.address + RING_OFFSET_BYTES

    @staticmethod
    def create() -> int:
        """A memfd for a new one. The caller closes it."""
        return _create(_PAGE_BYTES, _PAGE_MAGIC)


class RegionRow(NamedTuple):
    """What a peer must know of one region. The last three are 0 where no memfd holds it."""

    address: int
    length_bytes: int
    access: int
    fd: int
    inode: int
    memory_address: int


class RegionTable(_SharedPages):
    """The regions of one protection domain. `quads[WORDS + slot]` is a slot's word: its rkey and its kind."""

    def __init__(self, fd: int) -> None:
        super().__init__(fd, _TABLE_BYTES, _TABLE_MAGIC)

    @staticmethod
    def create() -> int:
        """A memfd for a new one. The caller closes it."""
        return _create(_TABLE_BYTES, _TABLE_MAGIC)

    def publish(self, slot: int, rkey: int, kind: int, row: RegionRow) -> None:
        """Fill the row, then make it valid. For the owner."""
        first = _ROWS + slot * _ROW_QUADS
        for index, value in enumerate(row):
            self.quads[first + index] = value
        self.quads[_HIGH_WATER] = max(self.quads[_HIGH_WATER], slot + 1)
        fence()
        self.quads[WORDS + slot] = rkey | kind

    def mark(self, slot: int, word: int) -> None:
        """Change the word of a slot, and let nothing later pass that. For the owner."""
        self.quads[WORDS + slot] = word
        fence()

    def live_inodes(self) -> set[int]:
        """The memfds that valid regions lie in. For the peer."""
        count = min(self.quads[_HIGH_WATER], TABLE_SLOTS)
        inode = RegionRow._fields.index("inode")
        return {
            self.quads[_ROWS + slot * _ROW_QUADS + inode]
            for slot, word in enumerate(self.quads[WORDS : WORDS + count].tolist())
            if word & KIND_MASK != REVOKED
        }

    def find(self, rkey: int) -> tuple[int, int, RegionRow] | None:
        """(slot, word, row) of a valid region, or None. For the peer."""
        count = min(self.quads[_HIGH_WATER], TABLE_SLOTS)
        for slot, word in enumerate(self.quads[WORDS : WORDS + count].tolist()):
            if word & KEY_MASK != rkey or word & KIND_MASK == REVOKED:
                continue
            first = _ROWS + slot * _ROW_QUADS
            row = RegionRow(*self.quads[first : first + _ROW_QUADS].tolist())
            if self.quads[WORDS + slot] == word:
                return slot, word, row
        return None
