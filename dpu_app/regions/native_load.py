"""The native inner loop of opening a region, where it was built (`_table_load.c`; docs/adr/0005-native-table-load.md).

Fills columns and hash exactly as `table_reader` and `bulk_load` do in numpy, chunk by chunk, and leaves any chunk with
an unusual entry to them. Used by `table_reader` alone.
"""

from __future__ import annotations

import ctypes

import numpy as np

from common import native
from dpu_app.regions.bulk_load import BulkLoad
from dpu_app.regions.index import SlotIndex
from dpu_app.regions.namespace_ids import NamespaceIds
from dpu_app.regions.slot_table import CHUNK, Words


def _library() -> ctypes.CDLL | None:
    module = native.load("dpu_app.regions._table_load")
    return None if module is None else ctypes.CDLL(module.__file__)


LIBRARY = _library()
"""None where it was not built: everything works without it, and opens large regions more slowly."""


class NativeLoad:
    """`now_s`: entries that expired by then are not plain. All arrays named are kept alive by their owners."""

    def __init__(
        self, library: ctypes.CDLL, index: SlotIndex, load: BulkLoad, namespaces: NamespaceIds, salt: int, now_s: int
    ) -> None:
        self._function = library.entresol_load_chunk
        self._function.argtypes = [ctypes.c_void_p] * 2 + [ctypes.c_uint64] * 2 + [ctypes.c_void_p] * 2
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
        self._homeless = np.zeros(CHUNK, np.int64)
        self._outcome = np.zeros(3, np.uint64)
        self.used = 0
        self.newest_generation = 0

    def add(self, words: Words, first_slot: int) -> bool:
        """Take over a chunk of at most CHUNK entries. False, and nothing is changed, where it is not a plain one."""
        self._outcome[:] = 0
        done = self._function(
            self._context.ctypes.data,
            words.ctypes.data,
            len(words),
            first_slot,
            self._homeless.ctypes.data,
            self._outcome.ctypes.data,
        )
        if not done:
            return False
        used, newest, homeless = self._outcome.tolist()
        self.used += used
        self.newest_generation = max(self.newest_generation, newest)
        if homeless:
            self._load.put_off(self._homeless[:homeless].copy())
        return True
