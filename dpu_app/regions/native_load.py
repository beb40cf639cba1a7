"""The native inner loop of opening a region, where it was built (`_table_load.c`; docs/adr/0005-native-table-load.md).

Fills columns and hash exactly as `table_reader` and `bulk_load` do in numpy, chunk by chunk, and leaves any chunk with
an unusual entry to them. The two halves may run in two threads: the interpreter's lock is let go of in both. Used by
`table_reader` alone.
"""

from __future__ import annotations

import ctypes
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from common import native
from dpu_app.regions.bulk_load import BulkLoad
from dpu_app.regions.index import SlotIndex
from dpu_app.regions.namespace_ids import NamespaceIds
from dpu_app.regions.slot_table import Words


def _library() -> ctypes.CDLL | None:
    module = native.load("dpu_app.regions._table_load")
    return None if module is None else ctypes.CDLL(module.__file__)


LIBRARY = _library()
"""None where it was not built: everything works without it, and opens large regions more slowly."""


class Filled(NamedTuple):
    """Slots whose columns are filled, and the hashes of their keys."""

    slots: npt.NDArray[np.uint32]
    hashes: npt.NDArray[np.uint64]


class NativeLoad:
    """`now_s`: entries that expired by then are not plain. All arrays named are kept alive by their owners."""

    def __init__(
        self, library: ctypes.CDLL, index: SlotIndex, load: BulkLoad, namespaces: NamespaceIds, salt: int, now_s: int
    ) -> None:
        self._fill = library.entresol_load_columns
        self._fill.argtypes = [ctypes.c_void_p] * 2 + [ctypes.c_uint64] * 2 + [ctypes.c_void_p] * 3
        self._place = library.entresol_load_hash
        self._place.argtypes = [ctypes.c_void_p] * 3 + [ctypes.c_uint64] + [ctypes.c_void_p]
        self._place.restype = ctypes.c_uint64
        self._load = load
        hash_ = index.key_hash
        columns = (
            index.key_lo,
            index.key_hi,
            index.checksum,
            index.length,
            index.generation,
            index.stored_s,
            index.expires_s,
            index.namespace,
            index.flags,
            hash_.cells,
            hash_.tags8,
            load.fill,
        )
        numbers = (hash_.buckets, *hash_.salts, salt, index.slots, now_s)
        tables = (*namespaces.known, namespaces.sums)
        self._context = np.array(
            [array.ctypes.data for array in columns] + list(numbers) + [array.ctypes.data for array in tables],
            np.uint64,
        )
        self._address = self._context.ctypes.data
        self._outcome = np.zeros(2, np.uint64)
        self.used = 0
        self.newest_generation = 0

    def fill(self, words: Words, first_slot: int) -> Filled | None:
        """First half: take over a chunk of at most CHUNK entries into the columns. None, and nothing is changed, where
        it is not a plain one."""
        slots = np.empty(len(words), np.uint32)
        hashes = np.empty(len(words), np.uint64)
        self._outcome[:] = 0
        done = self._fill(
            self._address,
            words.ctypes.data,
            len(words),
            first_slot,
            slots.ctypes.data,
            hashes.ctypes.data,
            self._outcome.ctypes.data,
        )
        if not done:
            return None
        used, newest = self._outcome.tolist()
        self.used += used
        self.newest_generation = max(self.newest_generation, newest)
        return Filled(slots[:used], hashes[:used])

    def place(self, filled: Filled) -> None:
        """Second half: into the hash. From one thread at a time, in any order."""
        count = len(filled.slots)
        homeless = np.empty(count, np.int64)
        left = self._place(
            self._address, filled.slots.ctypes.data, filled.hashes.ctypes.data, count, homeless.ctypes.data
        )
        if left:
            self._load.put_off(homeless[:left].copy())
