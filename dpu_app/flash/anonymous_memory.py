"""Memory for flash transfers where no fabric is at hand: in tools, tests and the simulation."""

from __future__ import annotations

import ctypes
import mmap
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from doca_shims.api import Memory


class AnonymousMemory:
    """Private, page-aligned and zeroed; satisfies `doca_shims.api.Memory`. Freed when the last view of it is gone."""

    def __init__(self, length_bytes: int) -> None:
        self._map = mmap.mmap(-1, length_bytes)
        self.view = memoryview(self._map)
        self.length_bytes = length_bytes
        self.page_bytes = mmap.PAGESIZE
        self.fd: int | None = None
        self.address = ctypes.addressof(ctypes.c_char.from_buffer(self._map))

    def close(self) -> None:
        self.view.release()


if TYPE_CHECKING:
    _conforms: type[Memory] = AnonymousMemory
