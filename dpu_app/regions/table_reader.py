"""Rebuilds the index of a region from its slot table, while the table is being read.

Owns the pipeline: one thread reads, decodes and fills the index's columns, a second one fills the hash (numpy lets go
of the interpreter lock in both). A page that cannot be read, or an entry that is damaged, costs just that. Called by
`recovery` alone, once per opening; `oldest_first` gives the order for the eviction policy afterwards.
"""

from __future__ import annotations

from collections import deque
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from doca_shims.api import Memory
from dpu_app.regions import native_load
from dpu_app.regions.blocking_flash import Block, BlockingFlash
from dpu_app.regions.bulk_load import BulkLoad
from dpu_app.regions.index import FREE, USED, SlotIndex
from dpu_app.regions.namespace_ids import NO_ID, NamespaceIds
from dpu_app.regions.native_load import Filled, NativeLoad
from dpu_app.regions.slot_table import CHUNK, ENTRY_BYTES, Mask, Words, damaged, decode_columns, words_of
from dpu_app.regions.superblock import ENTRIES_PER_PAGE, TABLE_PAGE_BYTES, Superblock

Slots: TypeAlias = npt.NDArray[np.int64]
Places: TypeAlias = "slice | Slots"

_HALF = np.uint64(32)
_LAST = np.iinfo(np.uint32).max
_MESSAGES_MAX = 20
_LOADING_MAX = 16
"""Blocks read and not hashed yet: a few MB, however slow the second thread is."""


class TableReader:
    """`read` once, then `finish`."""

    def __init__(self, superblock: Superblock, index: SlotIndex, now_s: int) -> None:
        """Entries that expired by `now_s` (seconds since 1970) are dropped."""
        self._geometry = superblock.geometry
        self._salt = superblock.salt
        self._index = index
        self._now_s = now_s
        self._load = BulkLoad(index)
        self._loading: deque[Future[None]] = deque()
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="index-load")
        self._namespaces = NamespaceIds(index)
        self._native: NativeLoad | None = None
        if native_load.LIBRARY is not None:
            self._native = NativeLoad(native_load.LIBRARY, index, self._load, self._namespaces, self._salt, now_s)
        self._used = 0
        self.dropped = 0
        self.newest_generation = 0
        self.dirty_pages: set[int] = set()
        self.messages: list[str] = []

    def read(self, io: BlockingFlash) -> None:
        """Columns and flags are set on return; the hash may still be under way."""
        geometry = self._geometry
        failed: list[Block] = []
        for block in io.read_blocks(geometry.table_offset, geometry.table_bytes):
            if block.problem is None:
                self._add(block, io.memory)
            else:
                failed.append(block)
        for block in failed:
            self._read_by_page(io, block)

    def _read_by_page(self, io: BlockingFlash, block: Block) -> None:
        """What could not be read at once may be readable but for a page."""
        for offset in range(block.offset_bytes, block.offset_bytes + block.length_bytes, TABLE_PAGE_BYTES):
            (page,) = list(io.read_blocks(offset, TABLE_PAGE_BYTES))
            if page.problem is None:
                self._add(page, io.memory)
                continue
            number = (offset - self._geometry.table_offset) // TABLE_PAGE_BYTES
            self.dirty_pages.add(number)
            self._say(f"slot table page {number} cannot be read, its entries are lost: {page.problem}")

    def _add(self, block: Block, memory: Memory) -> None:
        words = words_of(block.view(memory))
        first_slot = (block.offset_bytes - self._geometry.table_offset) // ENTRY_BYTES
        starts = range(0, len(words), CHUNK)
        filled: list[Filled] = []
        added: list[Places] = []
        for start in starts:
            chunk = words[start : start + CHUNK]
            plain = self._native.fill(chunk, first_slot + start) if self._native is not None else None
            if plain is not None:
                filled.append(plain)
            else:
                added.append(self._add_chunk(chunk, first_slot + start))
        while len(self._loading) >= _LOADING_MAX:
            self._loading.popleft().result()
        self._loading.append(self._pool.submit(self._place, filled, added))

    def _place(self, filled: list[Filled], added: list[Places]) -> None:
        """Into the hash; in the second thread, which alone touches it."""
        if self._native is not None:
            for chunk in filled:
                self._native.place(chunk)
        if added:
            self._load.add(added)

    def _add_chunk(self, words: Words, first_slot: int) -> Places:
        """Decode entries into the columns. The slots that are now in use."""
        columns, valid = decode_columns(words, first_slot, self._salt)
        whole = bool(valid.all())
        if not whole:
            self._drop_damaged(words, valid, first_slot)
        expires_s = (columns[6] >> _HALF).astype(np.uint32)
        if expires_s.any():
            expired = valid & (expires_s != 0) & (expires_s <= self._now_s)
            if expired.any():
                self._drop(np.flatnonzero(expired) + first_slot)
                valid &= ~expired
                whole = False
        if first_slot + len(words) > self._geometry.slots:
            valid[self._geometry.slots - first_slot :] = False
            whole = False
        if whole:
            return self._fill(np.arange(first_slot, first_slot + len(words)), columns, expires_s)
        positions = np.flatnonzero(valid)
        return self._fill(positions + first_slot, np.ascontiguousarray(columns[:, positions]), expires_s[positions])

    def _fill(self, slots: Slots, columns: Words, expires_s: npt.NDArray[np.uint32]) -> Places:
        """The slots filled: a slice where they are neighbours."""
        namespace = self._namespaces.of(columns[2], columns[3])
        nameless = np.flatnonzero(namespace == NO_ID)
        if len(nameless):
            self._say(f"{len(nameless)} entries dropped: the region holds more namespaces than there are ids for")
            self._drop(slots[nameless])
            slots, columns = np.delete(slots, nameless), np.delete(columns, nameless, axis=1)
            namespace, expires_s = np.delete(namespace, nameless), np.delete(expires_s, nameless)
        if len(slots) == 0:
            return slots
        index = self._index
        first, last = int(slots[0]), int(slots[-1]) + 1
        place: Places = slice(first, last) if last - first == len(slots) else slots
        length = columns[4].astype(np.uint32)
        generation = (columns[4] >> _HALF).astype(np.uint32)
        index.key_lo[place] = columns[0]
        index.key_hi[place] = columns[1]
        self._namespaces.count(namespace, length)
        index.namespace[place] = namespace
        index.length[place] = length
        index.generation[place] = generation
        index.checksum[place] = columns[5]
        index.stored_s[place] = columns[6]
        index.expires_s[place] = expires_s
        index.flags[place] = USED
        self._used += len(length)
        self.newest_generation = max(self.newest_generation, int(generation.max()))
        return place

    def _drop_damaged(self, words: Words, valid: Mask, first_slot: int) -> None:
        positions = damaged(words, valid)
        if len(positions):
            slots = positions + first_slot
            pages = slots[0] // ENTRIES_PER_PAGE, slots[-1] // ENTRIES_PER_PAGE
            self._say(f"{len(slots)} damaged entries dropped from slot table pages {pages[0]} to {pages[1]}")
            self._drop(slots)

    def _drop(self, slots: Slots) -> None:
        self.dropped += len(slots)
        self.dirty_pages.update(np.unique(slots // ENTRIES_PER_PAGE).tolist())

    def _say(self, message: str) -> None:
        if len(self.messages) < _MESSAGES_MAX:
            self.messages.append(message)
        elif len(self.messages) == _MESSAGES_MAX:
            self.messages.append("further damage is counted, not listed")

    def finish(self) -> None:
        """Hash and totals are complete on return."""
        try:
            for loading in self._loading:
                loading.result()
        finally:
            self._pool.shutdown()
        if self._native is not None:
            self._used += self._native.used
            self.newest_generation = max(self.newest_generation, self._native.newest_generation)
        self._load.finish()
        losers = np.array(self._load.losers, np.int64)
        self._drop(losers)
        totals = self._namespaces.totals()
        for slot in losers.tolist():
            self._index.flags[slot] = FREE
            totals[self._index.namespace[slot]] -= self._index.length[slot]
        self._index.adopt(self._used - len(losers), totals)


def oldest_first(index: SlotIndex, used: Mask) -> Slots:
    """The slots of the mask by generation, then time stored, then number."""
    count = int(np.count_nonzero(used))
    if count == 0:
        return np.zeros(0, np.int64)
    generation, stored_s = index.generation, index.stored_s
    lowest, earliest_s = (np.min(column, where=used, initial=_LAST) for column in (generation, stored_s))
    newest, latest_s = (np.max(column, where=used, initial=0) for column in (generation, stored_s))
    time_bits = int(latest_s - earliest_s).bit_length()
    slot_bits = index.slots.bit_length()
    # Generation, time and slot in one number sort five times as fast as by argsort. Where they do not fit 64 bits
    # (centuries, or hundreds of thousands of restarts in one table) the time is coarser.
    coarser = max(0, int(newest - lowest).bit_length() + time_bits + slot_bits - 64)
    generation_shift = np.uint64(min(63, max(0, time_bits - coarser) + slot_bits))
    order = np.empty(count, np.uint64)  # the only array of so many: at 50 million slots each is a tenth of the index
    done = 0
    for start in range(0, index.slots, CHUNK):
        positions = np.flatnonzero(used[start : start + CHUNK])
        positions += start
        part = slice(done, done + len(positions))
        age = (generation[positions] - lowest).astype(np.uint64)
        age <<= generation_shift
        time = (stored_s[positions] - earliest_s).astype(np.uint64)
        time >>= np.uint64(coarser)
        time <<= np.uint64(slot_bits)
        age |= time
        np.bitwise_or(age, positions.view(np.uint64), out=order[part])
        done += len(positions)
    order.sort()
    order &= np.uint64((1 << slot_bits) - 1)
    return order.view(np.int64)
