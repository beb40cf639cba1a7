"""What the flash drivers share: the opened file or block device, and the checks of what is asked of it.

Owns the descriptor and the exclusive lock by which no two processes serve one flash. Never does I/O itself.
Used by `dpu_app.flash.io_uring` and `dpu_app.flash.thread_pool`.
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import os
import stat
import struct
import time
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from doca_shims.api import FlashCaps, FlashOp, FlashRequest, Memory, ShimError

MAX_IO_BYTES = 1 << 30
QUEUE_DEPTH_DEFAULT = 256
QUEUE_DEPTH_MAX = 4096
LOCK_TIMEOUT_MS_DEFAULT = 2000
_LOCK_RETRY_S = 0.01
_TAG_LIMIT = 1 << 64
_BLOCK_BYTES_UNKNOWN = 4096
"""Used where neither statx nor the device says what O_DIRECT needs: a page is always enough."""
_BLOCK_BYTES_BUFFERED = 512

# <linux/fs.h>, <linux/stat.h>, <linux/falloc.h>
BLKDISCARD = 0x1277
_BLKSSZGET = 0x1268
_BLKGETSIZE64 = 0x80081272
_STATX_DIOALIGN = 0x2000
_STATX_BYTES = 256
_STATX_MASK_OFFSET = 0
_STATX_DIO_OFFSET = 152
_AT_EMPTY_PATH = 0x1000
FALLOC_PUNCH_HOLE_KEEP_SIZE = 0x02 | 0x01


class FlashFile:
    """An open regular file or block device that this process alone serves.

    The lock belongs to the descriptor through which all I/O goes, so it outlives a killed owner until the kernel has
    done with the owner's last write; `lock_timeout_ms` is how long to wait for that.
    Raises ShimError: ENOENT, EACCES and the like from the open; EBUSY when another process (or another device
    of this one) has it; EINVAL when it is neither a file nor a block device, is empty, or cannot do O_DIRECT.
    """

    def __init__(self, path: str, *, direct: bool = True, lock_timeout_ms: int = LOCK_TIMEOUT_MS_DEFAULT) -> None:
        self.path = path
        self.direct = direct
        self.fd = _open_locked(path, direct, lock_timeout_ms)
        try:
            self.is_block_device = stat.S_ISBLK(os.fstat(self.fd).st_mode)
            self.block_bytes = _alignment_bytes(self.fd, self.is_block_device) if direct else _BLOCK_BYTES_BUFFERED
            size_bytes = _size_bytes(self.fd, self.is_block_device)
            self.capacity_bytes = size_bytes - size_bytes % self.block_bytes
            if self.capacity_bytes == 0:
                raise ShimError(errno.EINVAL, "open", f"{path} holds {size_bytes} bytes: give it a size first")
        except BaseException:
            os.close(self.fd)
            raise

    def caps(self, queue_depth: int, driver: str, *, discard: bool = True) -> FlashCaps:
        return FlashCaps(
            capacity_bytes=self.capacity_bytes,
            block_bytes=self.block_bytes,
            max_io_bytes=MAX_IO_BYTES,
            queue_depth_max=queue_depth,
            discard=discard,
            driver=driver,
        )

    def close(self) -> None:
        """Give up the lock and close. Idempotent. Nothing may be in flight."""
        if self.fd >= 0:
            fcntl.flock(self.fd, fcntl.LOCK_UN)
            os.close(self.fd)
            self.fd = -1


class RegisteredMemories:
    """The memories that requests may name, by the order in which they were registered."""

    def __init__(self) -> None:
        self._ranges: list[tuple[int, int, memoryview]] = []

    def add(self, memory: Memory) -> None:
        """Raises ShimError EEXIST when it overlaps one that is there."""
        start, end = memory.address, memory.address + memory.length_bytes
        if any(start < other_end and other_start < end for other_start, other_end, _ in self._ranges):
            raise ShimError(errno.EEXIST, "register_memory", f"0x{start:x} is registered already")
        self._ranges.append((start, end, memory.view))

    def contains(self, address: int, length_bytes: int) -> bool:
        return any(start <= address and address + length_bytes <= end for start, end, _ in self._ranges)

    def view(self, address: int, length_bytes: int) -> memoryview:
        """The bytes there. `contains` must have said yes."""
        for start, end, view in self._ranges:
            if start <= address and address + length_bytes <= end:
                return view[address - start : address - start + length_bytes]
        raise ShimError(errno.EINVAL, "flash_submit", f"0x{address:x} is not registered")

    def clear(self) -> None:
        self._ranges.clear()


def check_requests(
    requests: Sequence[FlashRequest], caps: FlashCaps, memories: RegisteredMemories, in_flight: int
) -> None:
    """Raises ShimError as `FlashDevice.submit` has it: EAGAIN or EINVAL."""
    if in_flight + len(requests) > caps.queue_depth_max:
        raise ShimError(
            errno.EAGAIN, "flash_submit", f"{in_flight} in flight and {len(requests)} more pass {caps.queue_depth_max}"
        )
    mask = caps.block_bytes - 1
    for request in requests:
        tag, op, offset, address, length = request
        if not 0 <= tag < _TAG_LIMIT:
            raise ShimError(errno.EINVAL, "flash_submit", f"tag {tag} is not an unsigned 64-bit number")
        if op == FlashOp.FLUSH:
            if offset or length:
                raise ShimError(errno.EINVAL, "flash_submit", f"FLUSH takes no range (tag {tag})")
            continue
        if (offset | length) & mask or offset < 0 or length <= 0 or offset + length > caps.capacity_bytes:
            raise ShimError(
                errno.EINVAL,
                "flash_submit",
                f"{length} bytes at {offset}: not blocks of {caps.block_bytes} in {caps.capacity_bytes} (tag {tag})",
            )
        if op == FlashOp.DISCARD:
            if not caps.discard:
                raise ShimError(errno.EINVAL, "flash_submit", f"this device cannot discard (tag {tag})")
            continue
        if op not in (FlashOp.READ, FlashOp.WRITE) or length > caps.max_io_bytes or address & mask:
            raise ShimError(
                errno.EINVAL, "flash_submit", f"operation {op} of {length} bytes, memory 0x{address:x} (tag {tag})"
            )
        if not memories.contains(address, length):
            raise ShimError(
                errno.EINVAL, "flash_submit", f"{length} bytes at 0x{address:x} were never registered (tag {tag})"
            )


class Bounds(NamedTuple):
    """Of an integer option."""

    default: int
    minimum: int
    maximum: int


class Options(NamedTuple):
    """What a driver was asked for. `numbers` holds the driver's own options beside these."""

    direct: bool
    queue_depth: int
    lock_timeout_ms: int
    numbers: dict[str, int]


def parse_options(options: Mapping[str, str], extra: Mapping[str, Bounds]) -> Options:
    """`direct`, `queue_depth`, `lock_timeout_ms`, and the driver's own integers.

    Raises ShimError EINVAL for an unknown name or a bad value.
    """
    bounds = {
        "queue_depth": Bounds(QUEUE_DEPTH_DEFAULT, 1, QUEUE_DEPTH_MAX),
        "lock_timeout_ms": Bounds(LOCK_TIMEOUT_MS_DEFAULT, 0, 60_000),
        **extra,
    }
    numbers = {name: bound.default for name, bound in bounds.items()}
    direct = True
    for name, text in options.items():
        if name == "direct" and text in ("true", "false"):
            direct = text == "true"
        elif name in bounds and _within(text, bounds[name]):
            numbers[name] = int(text)
        else:
            known = [f"{key} ({bound.minimum} to {bound.maximum})" for key, bound in bounds.items()]
            detail = f"{name}={text!r}: known are direct (true or false), {', '.join(known)}"
            raise ShimError(errno.EINVAL, "flash_options", detail)
    return Options(direct, numbers.pop("queue_depth"), numbers.pop("lock_timeout_ms"), numbers)


def _within(text: str, bounds: Bounds) -> bool:
    return text.isascii() and text.isdigit() and bounds.minimum <= int(text) <= bounds.maximum


def _open_locked(path: str, direct: bool, lock_timeout_ms: int) -> int:
    deadline_ns = time.monotonic_ns() + lock_timeout_ms * 1_000_000
    while True:
        try:
            return _try_open_locked(path, direct)
        except ShimError as error:
            if error.errno != errno.EBUSY or time.monotonic_ns() >= deadline_ns:
                raise
        time.sleep(_LOCK_RETRY_S)


def _try_open_locked(path: str, direct: bool) -> int:
    """A block device is opened O_EXCL, which the kernel refuses while it is mounted or otherwise claimed."""
    try:
        mode = os.stat(path).st_mode
        if not (stat.S_ISBLK(mode) or stat.S_ISREG(mode)):
            raise ShimError(errno.EINVAL, "open", f"{path} is neither a regular file nor a block device")
        flags = os.O_RDWR | os.O_CLOEXEC | (os.O_EXCL if stat.S_ISBLK(mode) else 0) | (os.O_DIRECT if direct else 0)
        fd = os.open(path, flags)
    except ShimError:
        raise
    except OSError as error:
        code = error.errno or errno.EIO
        detail = error.strerror
        if code == errno.EBUSY:
            detail = "mounted or in use"
        elif code == errno.EINVAL and direct:
            detail = "its file system refuses O_DIRECT; move it, or set direct=false to go through the page cache"
        raise ShimError(code, "open", f"{path}: {detail}") from error
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        os.close(fd)
        raise ShimError(errno.EBUSY, "flock", f"{path} is served by another process already") from error
    except OSError as error:
        os.close(fd)
        raise ShimError(error.errno or errno.EIO, "flock", f"{path}: {error.strerror}") from error
    return fd


def _size_bytes(fd: int, is_block_device: bool) -> int:
    if not is_block_device:
        return os.fstat(fd).st_size
    return int(struct.unpack("Q", fcntl.ioctl(fd, _BLKGETSIZE64, bytes(8)))[0])


def _alignment_bytes(fd: int, is_block_device: bool) -> int:
    """What O_DIRECT asks of offsets, lengths and addresses; at least a 512-byte sector."""
    if is_block_device:
        return max(512, int(struct.unpack("i", fcntl.ioctl(fd, _BLKSSZGET, bytes(4)))[0]))
    statx = getattr(ctypes.CDLL(None, use_errno=True), "statx", None)
    buffer = ctypes.create_string_buffer(_STATX_BYTES)
    if statx is None or statx(fd, b"", _AT_EMPTY_PATH, _STATX_DIOALIGN, buffer) != 0:
        return _BLOCK_BYTES_UNKNOWN
    (mask,) = struct.unpack_from("I", buffer, _STATX_MASK_OFFSET)
    memory_bytes, offset_bytes = struct.unpack_from("II", buffer, _STATX_DIO_OFFSET)
    if not mask & _STATX_DIOALIGN or not offset_bytes:
        return _BLOCK_BYTES_UNKNOWN
    return max(512, int(memory_bytes), int(offset_bytes))
