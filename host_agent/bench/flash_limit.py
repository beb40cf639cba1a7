"""What a directory's disk can do at best: reads with O_DIRECT at random places, so many at a time.

Owns one file without a name, which goes with it. The limit of a RETRIEVE from flash, for `host_agent.bench` on a
machine that also holds the pod's flash; plain preadv in threads, knows nothing of regions.
"""

from __future__ import annotations

import mmap
import os
import random
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from time import perf_counter
from types import TracebackType
from typing import Final

from common.errors import LowerLayerError

_CHUNK_BYTES: Final = 4 << 20
_THREADS_MAX: Final = 16


class FlashLimit:
    """A file of `length_bytes`, a multiple of 4 MiB, really written. Raises LowerLayerError."""

    def __init__(self, directory: Path, length_bytes: int) -> None:
        self._length_bytes = length_bytes
        self._random = random.Random(1)
        try:
            self._file = os.open(directory, os.O_RDWR | os.O_TMPFILE | os.O_DIRECT | os.O_CLOEXEC, 0o600)
        except OSError as error:
            raise LowerLayerError("open with O_TMPFILE and O_DIRECT", error.errno or 0, str(directory)) from error
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

    def read_s(self, block_bytes: int, batch: int, calls: int) -> float:
        """Seconds to read `calls` batches of `batch` blocks, one batch after the other, blocks at random places."""
        places = self._length_bytes // block_bytes
        with mmap.mmap(-1, block_bytes * batch) as memory:
            view = memoryview(memory)
            parts = [view[at : at + block_bytes] for at in range(0, block_bytes * batch, block_bytes)]
            started = perf_counter()
            for _call in range(calls):
                offsets = [self._random.randrange(places) * block_bytes for _ in range(batch)]
                for count in self._pool.map(self._read, parts, offsets):
                    self._whole(count, block_bytes)
            seconds = perf_counter() - started
            for part in (*parts, view):
                part.release()
        return seconds

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

    def _read(self, part: memoryview, offset: int) -> int:
        return os.preadv(self._file, [part], offset)

    @staticmethod
    def _whole(count: int, expected: int) -> None:
        if count != expected:
            raise LowerLayerError("transfer of the flash limit's file", 0, f"{count} of {expected} bytes")
