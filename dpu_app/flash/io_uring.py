"""Flash driver on io_uring: a batch is one system call, the file and the registered memory are known to the kernel.

Owns the ring, its eventfd and the file; belongs to the thread that made it. Options:
`queue_depth`, `direct`, `lock_timeout_ms`.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import os
from collections.abc import Mapping, Sequence

from doca_shims.api import FlashCaps, FlashCompletion, FlashDevice, FlashOp, FlashRequest, Memory, ShimError
from dpu_app.flash.file import (
    FALLOC_PUNCH_HOLE_KEEP_SIZE,
    FlashFile,
    RegisteredMemories,
    check_requests,
    parse_options,
)
from dpu_app.flash.ring import Ring

API_VERSION = (1, 0)
_LOG = logging.getLogger(__name__)

# io_uring_op
_OP_FSYNC, _OP_READ_FIXED, _OP_WRITE_FIXED, _OP_FALLOCATE, _OP_READ, _OP_WRITE, _OP_URING_CMD = 3, 4, 5, 17, 22, 23, 46
_FSYNC_DATASYNC = 1
_BLOCK_URING_CMD_DISCARD = 0x1200  # _IO(0x12, 0), Linux 6.12
_FIXED_BUFFER_SLOTS = 64
_FIXED_BUFFER_BYTES = 1 << 30
"""The kernel's limit for one fixed buffer; larger memory takes several."""


class IoUringFlash:
    """`FlashDevice` on one ring."""

    def __init__(self, file: FlashFile, queue_depth: int) -> None:
        entries = 1 << (queue_depth - 1).bit_length()
        self._file = file
        self._ring = Ring(entries)
        self._event_fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        try:
            self._ring.register_file(file.fd)
            self._ring.register_event_fd(self._event_fd)
            self._ring.register_buffer_table(_FIXED_BUFFER_SLOTS)
        except BaseException:
            self._ring.close()
            os.close(self._event_fd)
            raise
        discard = not file.is_block_device or _kernel_version() >= (6, 12)
        self._caps = file.caps(queue_depth, "io_uring", discard=discard)
        self._memories = RegisteredMemories()
        self._fixed: list[tuple[int, int]] = []  # (start, end) of each fixed buffer, by slot
        self._refused: list[FlashCompletion] = []
        self._in_flight = 0
        self._closed = False

    @property
    def caps(self) -> FlashCaps:
        return self._caps

    def register_memory(self, memory: Memory) -> None:
        self._memories.add(memory)
        end = memory.address + memory.length_bytes
        for start in range(memory.address, end, _FIXED_BUFFER_BYTES):
            if len(self._fixed) == _FIXED_BUFFER_SLOTS:
                return
            stop = min(start + _FIXED_BUFFER_BYTES, end)
            try:
                self._ring.register_buffer(len(self._fixed), start, stop - start)
            except ShimError as error:
                _LOG.warning("memory is not pinned for flash, each request pins its own: %s", error)
                return
            self._fixed.append((start, stop))

    def submit(self, requests: Sequence[FlashRequest]) -> None:
        if self._closed:
            raise ShimError(errno.EBADF, "flash_submit", "the device is closed")
        check_requests(requests, self._caps, self._memories, self._in_flight)
        for request in requests:
            self._prepare(request)
        taken, code = self._ring.submit()
        if taken == 0 and requests:
            raise ShimError(code, "io_uring_enter", os.strerror(code))
        self._in_flight += len(requests)
        # Those before them are in flight, so the descriptor will call for the poll that returns these.
        self._refused.extend(FlashCompletion(request.tag, -code) for request in requests[taken:])

    def _prepare(self, request: FlashRequest) -> None:
        tag, op, offset, address, length = request
        if op == FlashOp.FLUSH:
            self._ring.prepare(_OP_FSYNC, tag, op_flags=_FSYNC_DATASYNC)
        elif op == FlashOp.DISCARD and self._file.is_block_device:
            self._ring.prepare(_OP_URING_CMD, tag, offset=_BLOCK_URING_CMD_DISCARD, address=offset, address3=length)
        elif op == FlashOp.DISCARD:
            self._ring.prepare(_OP_FALLOCATE, tag, offset=offset, address=length, length=FALLOC_PUNCH_HOLE_KEEP_SIZE)
        else:
            read = op == FlashOp.READ
            for slot, (start, end) in enumerate(self._fixed):
                if start <= address and address + length <= end:
                    opcode = _OP_READ_FIXED if read else _OP_WRITE_FIXED
                    self._ring.prepare(opcode, tag, offset=offset, address=address, length=length, buffer_slot=slot)
                    return
            self._ring.prepare(_OP_READ if read else _OP_WRITE, tag, offset=offset, address=address, length=length)

    def fileno(self) -> int:
        return self._event_fd

    def poll(self) -> list[FlashCompletion]:
        if self._in_flight == 0:
            return []
        done: list[FlashCompletion] = []
        # Taking completions signals the eventfd itself (the ring's own descriptor would not poll readable at all,
        # both as of Linux 6.18), so drain it and look again until nothing more came: no wake-up is lost or left over.
        while True:
            with contextlib.suppress(BlockingIOError):
                os.eventfd_read(self._event_fd)
            taken = self._ring.completions()
            if not taken:
                break
            done += [FlashCompletion(tag, result) for tag, result in taken]
        if self._refused:
            done += self._refused
            self._refused = []
        self._in_flight -= len(done)
        return done

    def close(self) -> None:
        if self._closed:
            return
        self._closed = True
        self._in_flight -= len(self._refused)
        while self._in_flight > 0:
            self._in_flight -= len(self._ring.completions(wait_count=1))
        self._ring.close()
        os.close(self._event_fd)
        self._event_fd = -1
        self._memories.clear()
        self._file.close()


def _kernel_version() -> tuple[int, int]:
    major, minor = os.uname().release.split(".")[:2]
    return int(major), int("".join(character for character in minor if character.isdigit()) or 0)


def create(path: str, options: Mapping[str, str]) -> FlashDevice:
    """Open `path`. Raises ShimError as `FlashFile` and `Ring` do, and EINVAL for bad options."""
    parsed = parse_options(options, {})
    file = FlashFile(path, direct=parsed.direct, lock_timeout_ms=parsed.lock_timeout_ms)
    try:
        return IoUringFlash(file, parsed.queue_depth)
    except BaseException:
        file.close()
        raise
