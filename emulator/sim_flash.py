"""A flash device in memory for seeded simulation: single-threaded, deterministic, with faults as data.

Only the faults that its `FaultPlan` allows happen, and each is logged with the range it touched, so that a checker
knows which bytes may be wrong. Memory is read and written when a request completes, as a device's DMA would: until
then a read's destination holds junk. It obeys `doca_shims.flash_contract` when the plan is empty. Used by tests/sim.
"""

from __future__ import annotations

import ctypes
import errno
import os
import random
import zlib
from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import Enum

from doca_shims.api import FlashCaps, FlashCompletion, FlashOp, FlashRequest, Memory, ShimError
from dpu_app.flash.file import RegisteredMemories, check_requests

SECTOR_BYTES = 512
"""What a device writes whole or not at all."""
_PAGE_BYTES = 4096
_JUNK = 0xDB


class FaultKind(Enum):
    EIO_READ = "read fails"
    EIO_WRITE = "write fails; any of its sectors may have been written"
    ENOSPC = "write fails for lack of space; nothing was written"
    SHORT_READ = "fewer bytes read than asked"
    SHORT_WRITE = "fewer bytes written than asked"
    LOST_WRITE = "write answered in full, never applied"
    TORN_WRITE = "the crash came in mid-write: any of its sectors may have been written"
    BIT_FLIP = "a bit on media changed after a write that was answered in full"
    DUPLICATE_COMPLETION = "a completion told twice"
    STALE_COMPLETION = "a completion for a tag that is not in flight"
    MEMORY_CHANGED = "not a fault of flash: memory changed while its write was in flight"


@dataclass(frozen=True)
class Fault:
    kind: FaultKind
    offset_bytes: int
    length_bytes: int


@dataclass(frozen=True)
class FaultPlan:
    """Chances per request of each fault, 0 to 1. `protected_bytes`: nothing befalls requests that begin below it.

    `delay_polls_max`: a completion may let so many polls pass, as long as others come.
    """

    eio_read: float = 0.0
    eio_write: float = 0.0
    enospc: float = 0.0
    short_read: float = 0.0
    short_write: float = 0.0
    lost_write: float = 0.0
    bit_flip: float = 0.0
    duplicate_completion: float = 0.0
    stale_completion: float = 0.0
    delay_polls_max: int = 0
    protected_bytes: int = 0


NO_FAULTS = FaultPlan()


@dataclass
class Media:
    """What a device holds when the power is off: pages by number, absent ones are zero."""

    capacity_bytes: int
    pages: dict[int, bytearray] = field(default_factory=dict)

    def read(self, offset_bytes: int, length_bytes: int) -> bytes:
        out = bytearray()
        end = offset_bytes + length_bytes
        while offset_bytes < end:
            number, start = divmod(offset_bytes, _PAGE_BYTES)
            count = min(_PAGE_BYTES - start, end - offset_bytes)
            page = self.pages.get(number)
            out += bytes(count) if page is None else page[start : start + count]
            offset_bytes += count
        return bytes(out)

    def write(self, offset_bytes: int, data: bytes) -> None:
        done = 0
        while done < len(data):
            number, start = divmod(offset_bytes + done, _PAGE_BYTES)
            count = min(_PAGE_BYTES - start, len(data) - done)
            piece = data[done : done + count]
            page = self.pages.get(number)
            if page is not None:
                page[start : start + count] = piece
            elif piece.count(0) != count:
                page = self.pages[number] = bytearray(_PAGE_BYTES)
                page[start : start + count] = piece
            done += count

    def flip_bit(self, offset_bytes: int, bit: int) -> None:
        """Bit `bit` (0 to 7) of the byte at `offset_bytes`."""
        byte = self.read(offset_bytes, 1)[0] ^ (1 << bit)
        self.write(offset_bytes, bytes([byte]))

    def copy(self) -> Media:
        return Media(self.capacity_bytes, {number: bytearray(page) for number, page in self.pages.items()})


@dataclass
class _Pending:
    request: FlashRequest
    delay_polls: int
    check: int
    """Of a write's memory when it was submitted."""


class SimFlash:
    """`FlashDevice` on `media`, which it changes in place. All chance comes from `seed`."""

    def __init__(
        self,
        media: Media,
        seed: int,
        plan: FaultPlan = NO_FAULTS,
        *,
        queue_depth: int = 64,
        max_io_bytes: int = 1 << 20,
    ) -> None:
        self.media = media
        self.plan = plan
        self.faults: list[Fault] = []
        self._random = random.Random(seed)
        self._memories = RegisteredMemories()
        self._pending: list[_Pending] = []
        self._extra: list[FlashCompletion] = []
        self._tags_done: list[int] = []
        self._closed = False
        self._event_fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._signalled = False
        self._caps = FlashCaps(
            capacity_bytes=media.capacity_bytes,
            block_bytes=SECTOR_BYTES,
            max_io_bytes=max_io_bytes,
            queue_depth_max=queue_depth,
            discard=True,
            driver="simulated",
        )

    @property
    def caps(self) -> FlashCaps:
        return self._caps

    @property
    def in_flight(self) -> int:
        return len(self._pending)

    def register_memory(self, memory: Memory) -> None:
        self._memories.add(memory)

    def submit(self, requests: Sequence[FlashRequest]) -> None:
        if self._closed:
            raise ShimError(errno.EBADF, "flash_submit", "the device is closed")
        check_requests(requests, self._caps, self._memories, len(self._pending))
        for request in requests:
            check = 0
            if request.op == FlashOp.READ:
                ctypes.memset(request.address, _JUNK, request.length_bytes)
            elif request.op == FlashOp.WRITE:
                check = zlib.crc32(self._memory(request))
            delay = self._random.randint(0, self.plan.delay_polls_max)
            self._pending.append(_Pending(request, delay, check))
        self._signal()

    def fileno(self) -> int:
        return self._event_fd

    def poll(self) -> list[FlashCompletion]:
        """Some of what is in flight, one at least if any is, in any order."""
        if not self._pending and not self._extra:
            return []
        for pending in self._pending:
            pending.delay_polls -= 1
        ready = [pending for pending in self._pending if pending.delay_polls < 0]
        if not ready:
            ready = [min(self._pending, key=lambda pending: pending.delay_polls)] if self._pending else []
        self._random.shuffle(ready)
        if ready:
            ready = ready[: self._random.randint(1, len(ready))]
        done = [FlashCompletion(pending.request.tag, self._perform(pending)) for pending in ready]
        chosen = {id(pending) for pending in ready}
        self._pending = [pending for pending in self._pending if id(pending) not in chosen]
        done += self._extra
        self._extra = []
        self._tell_extra(done)
        self._signal()
        return done

    def close(self) -> None:
        if self._closed:
            return
        while self._pending:
            self.poll()
        self._end()

    def crash(self) -> Media:
        """Power loss: what was in flight is written in part, sector by sector, or not at all. The device is gone."""
        for pending in self._pending:
            if pending.request.op == FlashOp.WRITE:
                self._write_sectors(pending.request, FaultKind.TORN_WRITE)
            elif pending.request.op == FlashOp.DISCARD:
                self._discard(pending.request)
        self._end()
        return self.media

    def _end(self) -> None:
        self._closed = True
        self._pending = []
        self._extra = []
        self._memories.clear()
        os.close(self._event_fd)
        self._event_fd = -1

    def _signal(self) -> None:
        """Keep the descriptor readable exactly while poll would return something."""
        wanted = bool(self._pending or self._extra)
        if wanted and not self._signalled:
            os.eventfd_write(self._event_fd, 1)
        elif self._signalled and not wanted:
            os.eventfd_read(self._event_fd)
        self._signalled = wanted

    def _tell_extra(self, done: list[FlashCompletion]) -> None:
        """Queue completions that should never be told, for the next poll."""
        for completion in done:
            if self._happens(self.plan.duplicate_completion):
                self._log(FaultKind.DUPLICATE_COMPLETION, 0, 0)
                self._extra.append(completion)
        self._tags_done = (self._tags_done + [completion.tag for completion in done])[-256:]
        if done and self._happens(self.plan.stale_completion):
            self._log(FaultKind.STALE_COMPLETION, 0, 0)
            self._extra.append(FlashCompletion(self._random.choice(self._tags_done), 4096))

    def _happens(self, chance: float) -> bool:
        return chance > 0 and self._random.random() < chance

    def _log(self, kind: FaultKind, offset_bytes: int, length_bytes: int) -> None:
        self.faults.append(Fault(kind, offset_bytes, length_bytes))

    def _memory(self, request: FlashRequest) -> memoryview:
        return self._memories.view(request.address, request.length_bytes)

    def _perform(self, pending: _Pending) -> int:
        request = pending.request
        plan = self.plan if request.offset_bytes >= self.plan.protected_bytes else NO_FAULTS
        if request.op == FlashOp.READ:
            return self._read(request, plan)
        if request.op == FlashOp.WRITE:
            if zlib.crc32(self._memory(request)) != pending.check:
                self._log(FaultKind.MEMORY_CHANGED, request.offset_bytes, request.length_bytes)
            return self._write(request, plan)
        if request.op == FlashOp.DISCARD:
            self._discard(request)
        return 0

    def _read(self, request: FlashRequest, plan: FaultPlan) -> int:
        length = request.length_bytes
        if self._happens(plan.eio_read):
            self._log(FaultKind.EIO_READ, request.offset_bytes, length)
            return -errno.EIO
        if self._happens(plan.short_read):
            self._log(FaultKind.SHORT_READ, request.offset_bytes, length)
            length = self._shorter(length)
        if length:
            ctypes.memmove(request.address, self.media.read(request.offset_bytes, length), length)
        return length

    def _write(self, request: FlashRequest, plan: FaultPlan) -> int:
        offset, length = request.offset_bytes, request.length_bytes
        if self._happens(plan.eio_write):
            self._write_sectors(request, FaultKind.EIO_WRITE)
            return -errno.EIO
        if self._happens(plan.enospc):
            self._log(FaultKind.ENOSPC, offset, length)
            return -errno.ENOSPC
        if self._happens(plan.lost_write):
            self._log(FaultKind.LOST_WRITE, offset, length)
            return length
        if self._happens(plan.short_write):
            self._log(FaultKind.SHORT_WRITE, offset, length)
            length = self._shorter(length)
        self.media.write(offset, bytes(self._memory(request)[:length]))
        if length == request.length_bytes and self._happens(plan.bit_flip):
            place = offset + self._random.randrange(length)
            self._log(FaultKind.BIT_FLIP, place, 1)
            self.media.flip_bit(place, self._random.randrange(8))
        return length

    def _shorter(self, length_bytes: int) -> int:
        return self._random.randrange(length_bytes // SECTOR_BYTES) * SECTOR_BYTES

    def _write_sectors(self, request: FlashRequest, kind: FaultKind) -> None:
        """All, none, a prefix, or any subset of the sectors."""
        self._log(kind, request.offset_bytes, request.length_bytes)
        sectors = list(range(request.length_bytes // SECTOR_BYTES))
        shape = self._random.randrange(4)
        if shape == 0:
            return
        if shape == 2:
            sectors = sectors[: self._random.randrange(len(sectors) + 1)]
        elif shape == 3:
            sectors = [sector for sector in sectors if self._random.random() < 0.5]
        memory = self._memory(request)
        for sector in sectors:
            start = sector * SECTOR_BYTES
            self.media.write(request.offset_bytes + start, bytes(memory[start : start + SECTOR_BYTES]))

    def _discard(self, request: FlashRequest) -> None:
        """Zeroes, what was there, or junk: a device may do any of these."""
        choice = self._random.randrange(3)
        if choice < 2:
            value = 0 if choice == 0 else _JUNK
            self.media.write(request.offset_bytes, bytes([value]) * request.length_bytes)
