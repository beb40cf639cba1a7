"""What a directory's disk can do at best: O_DIRECT at random places, so many at a time, past the page cache.

Owns a file without a name, which goes with it, really written first. Measured by fio where that is installed, else
by preadv and pwritev in threads, and says which. Knows nothing of regions.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import random
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from time import perf_counter
from types import TracebackType
from typing import Final

from common.errors import LowerLayerError
from host_agent.bench import fio

_CHUNK_BYTES: Final = 4 << 20
_THREADS_MAX: Final = 16
THREADS_NAME: Final = f"preadv and pwritev with O_DIRECT in {_THREADS_MAX} threads"


class FlashLimit:
    """A file of `length_bytes`, a multiple of 4 MiB. `seconds`: of one reading by fio, which is used if it is there
    and can; `method` says what is used. Raises LowerLayerError."""

    def __init__(self, directory: Path, length_bytes: int, seconds: float) -> None:
        self._length_bytes = length_bytes
        self._seconds = seconds
        self._random = random.Random(1)
        self._directory = directory
        self._file = self._open()
        self._pool = ThreadPoolExecutor(_THREADS_MAX, "flash-limit")
        try:
            with mmap.mmap(-1, _CHUNK_BYTES) as chunk:
                chunk[:] = self._random.randbytes(_CHUNK_BYTES)
                for offset in range(0, length_bytes, _CHUNK_BYTES):
                    self._whole(os.pwritev(self._file, [chunk], offset), _CHUNK_BYTES)
            os.fsync(self._file)
        except OSError as error:
            self.close()
            raise LowerLayerError("writing the flash limit's file", error.errno or 0, str(directory)) from error
        self.method = ""
        self._by_fio = self._choose()

    def rate(self, way: str, block_bytes: int, batch: int, calls: int) -> float:
        """Bytes a second with `batch` transfers of `block_bytes` under way: by fio all the time; by threads in `calls`
        batches, one after the other. `way`: "read"; "write" over what is there; "first_write" to places that hold
        nothing, as slots do that are new or discarded: the file is emptied first."""
        if way == fio.FIRST_WRITE:
            with self._opened() as empty:
                os.ftruncate(empty, self._length_bytes)
                return self._rate(empty, way, block_bytes, batch, calls)
        return self._rate(self._file, way, block_bytes, batch, calls)

    def _rate(self, file: int, way: str, block_bytes: int, batch: int, calls: int) -> float:
        if self._by_fio:
            return fio.rate(way, _path(file), self._length_bytes, block_bytes, batch, self._seconds)
        transfer = os.preadv if way == "read" else os.pwritev

        def move(part: memoryview, offset: int) -> int:
            return transfer(file, [part], offset)

        return block_bytes * batch * calls / self._threads_s(move, block_bytes, batch, calls)

    def close(self) -> None:
        """Idempotent."""
        self._pool.shutdown()
        if self._file >= 0:
            os.close(self._file)
        self._file = -1

    def __enter__(self) -> FlashLimit:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    @contextlib.contextmanager
    def _opened(self) -> Iterator[int]:
        """A file of its own, without a name."""
        file = self._open()
        try:
            yield file
        finally:
            os.close(file)

    def _open(self) -> int:
        try:
            return os.open(self._directory, os.O_RDWR | os.O_TMPFILE | os.O_DIRECT | os.O_CLOEXEC, 0o600)
        except OSError as error:
            text = str(self._directory)
            raise LowerLayerError("open with O_TMPFILE and O_DIRECT", error.errno or 0, text) from error

    def _choose(self) -> bool:
        """Whether fio is used; sets `method`."""
        version = fio.version()
        self.method = f"{THREADS_NAME}, since fio is not installed"
        if not version:
            return False
        try:
            fio.rate("read", _path(self._file), self._length_bytes, _CHUNK_BYTES, 1, 0.01)
        except LowerLayerError as error:  # where the system refuses io_uring
            self.method = f"{THREADS_NAME}, since {version} cannot: {error}"
            return False
        self.method = f"{version} with io_uring and O_DIRECT, so many at a time as the batch has blocks"
        return True

    def _threads_s(self, transfer: Callable[[memoryview, int], int], block_bytes: int, batch: int, calls: int) -> float:
        places = self._random.sample(range(self._length_bytes // block_bytes), self._length_bytes // block_bytes)
        with mmap.mmap(-1, block_bytes * batch) as memory:
            view = memoryview(memory)
            parts = [view[at : at + block_bytes] for at in range(0, block_bytes * batch, block_bytes)]
            started = perf_counter()
            for call in range(calls):
                offsets = [places[(call * batch + at) % len(places)] * block_bytes for at in range(batch)]
                for count in self._pool.map(transfer, parts, offsets):
                    self._whole(count, block_bytes)
            seconds = perf_counter() - started
            for part in (*parts, view):
                part.release()
        return seconds

    @staticmethod
    def _whole(count: int, expected: int) -> None:
        if count != expected:
            raise LowerLayerError("transfer of the flash limit's file", 0, f"{count} of {expected} bytes")


def _path(file: int) -> Path:
    """By which another process of this user opens a file that has no name."""
    return Path(f"/proc/{os.getpid()}/fd/{file}")
