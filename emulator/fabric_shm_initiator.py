"""The initiator's half of emu-shm's READ and WRITE: find the peer's region, copy, and notice its revocation.

Used by one connection. Follows the scheme of `fabric_shm_pages`; every early return there is a promise that
nothing was copied, or that what was copied will not be used.
"""

from __future__ import annotations

import ctypes
import errno
import time
from typing import Any, NamedTuple

from doca_shims.api import RDMA_REQUEST, Access, Sge, WcStatus
from emulator.fabric_core import MAX_SGE, MAX_TRANSFER_BYTES, Domain
from emulator.fabric_shm_pages import (
    BASE,
    BUSY,
    CLOSED,
    IDLE,
    IN_KERNEL,
    KEY_MASK,
    KIND_MASK,
    LENGTH,
    READING,
    SHARED,
    SUSPENDED,
    TARGET,
    WORDS,
    WRITING,
    ControlPage,
    RegionTable,
    fence,
)
from emulator.fabric_shm_peer import Peer, process_vm_readv, process_vm_writev

_SUSPENSION_LIMIT_S = 1.0
"""A peer that takes memory back from another one copies at most one transfer meanwhile."""
_PAUSE_S = 50e-6

_U32 = 0xFFFFFFFF
_U64 = 0xFFFFFFFFFFFFFFFF
_SUCCESS = WcStatus.SUCCESS
_SHORT_COPY_BYTES = 1 << 18
_memmove = ctypes.memmove
_memmove_short = ctypes.PyDLL(None).memmove
_memmove_short.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t]
_memmove_short.restype = None
"""Keeps the interpreter's lock: to give it up for 20 us could mean to wait 5 ms for a busy thread to return it."""


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


class Initiator:
    """Copies between this side's regions and the peer's. Owns none of what it is given."""

    def __init__(
        self, domain: Domain, page: ControlPage, table: RegionTable, process: Peer, channel: Any = None
    ) -> None:
        self._channel = channel
        self._by_lkey = domain.by_lkey
        self._theirs = page.words
        self._target = page.quads
        self._iovec_address = page.iovec_address
        self._table = table
        self._words = table.quads
        self._process = process
        self._remotes: dict[int, _Remote] = {}
        self._iovecs = (ctypes.c_uint64 * (2 * MAX_SGE))()
        self._iovecs_address = ctypes.addressof(self._iovecs)

    def run(self, requests: bytes | bytearray | memoryview, count: int, read: bool) -> WcStatus:
        """Carry out `count` packed RDMA_REQUESTs in order, by native code as far as that goes: SUCCESS, or why the
        first that failed did."""
        done: int = self._channel.transfer(requests, 0, not read)
        while done < count:
            fields = RDMA_REQUEST.unpack_from(requests, done * RDMA_REQUEST.size)
            local, start, length, lkey, rkey, _ = fields
            status, _ = self.transfer((Sge(local, length, lkey),), start, rkey, read)
            if status is not _SUCCESS:
                return status
            done = self._channel.transfer(requests, done + 1, not read)
        return _SUCCESS

    def transfer(self, sges: tuple[Sge, ...], start: int, rkey: int, read: bool) -> tuple[WcStatus, int]:
        """Carry out one READ or WRITE: its status, and the bytes moved."""
        by_lkey = self._by_lkey
        total = 0
        for address, length, lkey in sges:
            region = by_lkey.get(lkey)
            if region is None or address < region.address or length < 0 or address + length > region.end:
                return WcStatus.LOC_PROT_ERR, 0
            if read and not region.can_write:
                return WcStatus.LOC_PROT_ERR, 0
            total += length
        if total > MAX_TRANSFER_BYTES:
            return WcStatus.LOC_LEN_ERR, 0
        if total == 0:
            return _SUCCESS, 0
        limit_s = 0.0
        while True:
            remote = self._remotes.get(rkey) or self._find(rkey)
            if remote is None:
                return WcStatus.REM_ACCESS_ERR, 0
            slot, word, low, end, readable, writable, delta = remote
            if start < low or start + total > end or not (readable if read else writable):
                return WcStatus.REM_ACCESS_ERR, 0
            suspended = word & KIND_MASK == SUSPENDED
            if not suspended:
                status = self._copy(sges, start, total, read, WORDS + slot, word, delta)
                if status is not None:
                    return status, total
            del self._remotes[rkey]
            now_s = time.monotonic()
            limit_s = limit_s or now_s + _SUSPENSION_LIMIT_S
            if now_s > limit_s:
                return WcStatus.REM_OP_ERR, 0
            if suspended:
                time.sleep(_PAUSE_S)

    def _copy(
        self, sges: tuple[Sge, ...], start: int, total: int, read: bool, at: int, word: int, delta: int | None
    ) -> WcStatus | None:
        """Copy between the elements and the remote range, while the word at `at` stays what it is. None: it did
        not, or the owner cut the copy short; look the region up again."""
        theirs = self._theirs
        target = self._target
        theirs[TARGET] = word & KEY_MASK
        target[BASE] = start
        target[LENGTH] = total
        theirs[BUSY] = IN_KERNEL if delta is None else READING if read else WRITING
        try:
            fence()
            if theirs[CLOSED]:
                return WcStatus.WR_FLUSH_ERR
            if self._words[at] != word:
                return None
            status: WcStatus | None = _SUCCESS
            if delta is None:
                status = self._copy_in_kernel(sges, total, read)
            elif read:
                far = start + delta
                move = _memmove_short if total < _SHORT_COPY_BYTES else _memmove
                for address, length, _ in sges:
                    move(address, far, length)
                    far += length
            else:
                far = start + delta
                move = _memmove_short if total < _SHORT_COPY_BYTES else _memmove
                for address, length, _ in sges:
                    move(far, address, length)
                    far += length
        finally:
            theirs[BUSY] = IDLE
        if read and status is _SUCCESS:
            # What was read after a revocation is nobody's business, and may be anything.
            if theirs[CLOSED]:
                return WcStatus.WR_FLUSH_ERR
            if self._words[at] != word:
                return None
        return status

    def _copy_in_kernel(self, sges: tuple[Sge, ...], total: int, read: bool) -> WcStatus | None:
        process = self._process
        if not process.is_alive():
            return WcStatus.RETRY_EXC_ERR
        iovecs = self._iovecs
        count = 0
        for address, length, _ in sges:
            iovecs[count] = address
            iovecs[count + 1] = length
            count += 2
        call = process_vm_readv if read else process_vm_writev
        moved = call(process.pid, self._iovecs_address, count // 2, self._iovec_address, 1, 0)
        if moved == total:
            return _SUCCESS
        if moved < 0 and ctypes.get_errno() == errno.ESRCH:
            return WcStatus.RETRY_EXC_ERR
        if self._target[LENGTH] == 0:
            return None
        return WcStatus.REM_OP_ERR

    def _find(self, rkey: int) -> _Remote | None:
        found = self._table.find(rkey)
        if found is None:
            return None
        slot, word, row = found
        delta = None
        if word & KIND_MASK == SHARED:
            mapped = self._process.map_memory(row, self._table.live_inodes)
            if self._process.unmapped:
                # Whatever pointed there must not be used again, even if the peer makes its old word valid.
                self._process.unmapped = False
                self._remotes.clear()
                if self._channel is not None:
                    self._channel.forget()
            delta = None if mapped is None else mapped - row.memory_address
        readable = bool(row.access & Access.REMOTE_READ)
        writable = bool(row.access & Access.REMOTE_WRITE)
        end = row.address + row.length_bytes
        remote = _Remote(slot, word, row.address, end, readable, writable, delta)
        self._remotes[rkey] = remote
        if self._channel is not None and word & KIND_MASK != SUSPENDED and rkey != 0 and end <= _U64:
            self._channel.learn(rkey, slot, word, row.address, end, row.access & _U32, delta)
        return remote
