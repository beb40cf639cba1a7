"""Flash driver of last resort: threads that call preadv and pwritev, for kernels without io_uring.

The calls release the GIL, so as many are in the kernel at once as there are threads. Owns the threads and the
eventfd; one owner submits and polls. Options: `threads`, `queue_depth`,
`direct`, `lock_timeout_ms`.
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import os
import struct
import threading
from collections import deque
from collections.abc import Mapping, Sequence

from doca_shims.api import FlashCaps, FlashCompletion, FlashDevice, FlashOp, FlashRequest, Memory, ShimError
from dpu_app.flash.file import (
    BLKDISCARD,
    FALLOC_PUNCH_HOLE_KEEP_SIZE,
    Bounds,
    FlashFile,
    RegisteredMemories,
    check_requests,
    parse_options,
)

API_VERSION = (1, 0)
_THREADS = Bounds(default=8, minimum=1, maximum=64)


class ThreadPoolFlash:
    """`FlashDevice` on blocking calls."""

    def __init__(self, file: FlashFile, threads: int, queue_depth: int) -> None:
        self._file = file
        self._caps = file.caps(queue_depth, "thread_pool")
        self._memories = RegisteredMemories()
        self._queue: deque[FlashRequest] = deque()
        self._done: list[FlashCompletion] = []
        self._in_flight = 0
        self._closing = False
        self._lock = threading.Lock()
        self._work = threading.Condition(self._lock)
        self._event_fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._fallocate = ctypes.CDLL(None, use_errno=True).fallocate
        self._fallocate.argtypes = [ctypes.c_int, ctypes.c_int, ctypes.c_int64, ctypes.c_int64]
        self._threads = [
            threading.Thread(target=self._run, name=f"flash-{index}", daemon=True) for index in range(threads)
        ]
        for thread in self._threads:
            thread.start()

    @property
    def caps(self) -> FlashCaps:
        return self._caps

    def register_memory(self, memory: Memory) -> None:
        self._memories.add(memory)

    def submit(self, requests: Sequence[FlashRequest]) -> None:
        if self._closing:
            raise ShimError(errno.EBADF, "flash_submit", "the device is closed")
        check_requests(requests, self._caps, self._memories, self._in_flight)
        with self._lock:
            self._in_flight += len(requests)
            self._queue.extend(requests)
            self._work.notify(len(requests))

    def fileno(self) -> int:
        return self._event_fd

    def poll(self) -> list[FlashCompletion]:
        with self._lock:
            done = self._done
            if done:
                os.eventfd_read(self._event_fd)
                self._done = []
                self._in_flight -= len(done)
        return done

    def close(self) -> None:
        if self._closing:
            return
        with self._lock:
            self._closing = True
            self._work.notify_all()
        for thread in self._threads:
            thread.join()
        self._done = []
        self._memories.clear()
        os.close(self._event_fd)
        self._event_fd = -1
        self._file.close()

    def _run(self) -> None:
        """A thread's life: it leaves when the device closes and the queue is empty."""
        while True:
            with self._lock:
                while not self._queue:
                    if self._closing:
                        return
                    self._work.wait()
                request = self._queue.popleft()
            try:
                result = self._perform(request)
            except OSError as error:
                result = -(error.errno or errno.EIO)
            with self._lock:
                self._done.append(FlashCompletion(request.tag, result))
                if len(self._done) == 1:
                    os.eventfd_write(self._event_fd, 1)

    def _perform(self, request: FlashRequest) -> int:
        fd = self._file.fd
        if request.op == FlashOp.READ:
            return os.preadv(fd, [self._memories.view(request.address, request.length_bytes)], request.offset_bytes)
        if request.op == FlashOp.WRITE:
            return os.pwritev(fd, [self._memories.view(request.address, request.length_bytes)], request.offset_bytes)
        if request.op == FlashOp.FLUSH:
            os.fdatasync(fd)
            return 0
        if self._file.is_block_device:
            fcntl.ioctl(fd, BLKDISCARD, struct.pack("QQ", request.offset_bytes, request.length_bytes))
            return 0
        if self._fallocate(fd, FALLOC_PUNCH_HOLE_KEEP_SIZE, request.offset_bytes, request.length_bytes) != 0:
            return -ctypes.get_errno()
        return 0


def create(path: str, options: Mapping[str, str]) -> FlashDevice:
    """Open `path`. Raises ShimError as `FlashFile` does, and EINVAL for bad options."""
    parsed = parse_options(options, {"threads": _THREADS})
    file = FlashFile(path, direct=parsed.direct, lock_timeout_ms=parsed.lock_timeout_ms)
    return ThreadPoolFlash(file, parsed.numbers["threads"], parsed.queue_depth)
