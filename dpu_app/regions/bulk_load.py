"""Filling an empty index with millions of entries, a block of the slot table at a time, in numpy's time.

Owns what only loading needs (how full each bucket is, keys that found both buckets full); `recovery` makes one,
feeds it, and finishes it. Of two slots with one key the later generation stays; the loser is left reserved, and
reported, so that its owner can release it and rewrite its page.
"""

from __future__ import annotations

from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from dpu_app.regions.index import RESERVED, USED, SlotIndex
from dpu_app.regions.key_hash import LANES

Slots: TypeAlias = npt.NDArray[np.int64]
U64s: TypeAlias = npt.NDArray[np.uint64]
Entries: TypeAlias = npt.NDArray[np.void]

_LOWS = np.uint64(0x0101010101010101)
_HIGHS = np.uint64(0x8080808080808080)


class BulkLoad:
    """The index must be empty and is not to be used until `finish`."""

    def __init__(self, index: SlotIndex) -> None:
        self._index = index
        self._hash = index.key_hash
        self._fill = np.zeros(self._hash.buckets, np.uint8)
        """Cells in use per bucket: they fill from the first on, because nothing is removed meanwhile."""
        self._crowded: list[Slots] = []
        self.losers: list[int] = []
        """Slots whose key another slot holds with a later generation."""

    def add(self, slots: Slots, entries: Entries, namespace: npt.NDArray[np.uint16]) -> None:
        """Valid slot-table entries of distinct slots, and the namespace id of each."""
        index = self._index
        if len(slots) == 0:
            return
        first, last = int(slots[0]), int(slots[-1])
        place: slice | Slots = slice(first, last + 1) if last - first + 1 == len(slots) else slots
        for column in ("key_lo", "key_hi", "checksum", "length", "generation", "stored_s", "expires_s"):
            getattr(index, column)[place] = entries[column]
        index.namespace[place] = namespace
        index.flags[place] = USED
        self._place(slots, index.key_lo[place], index.key_hi[place], index.namespace[place])

    def _place(self, slots: Slots, lo: U64s, hi: U64s, namespace: npt.NDArray[np.uint16]) -> None:
        hashed = self._hash.hash_many(lo, hi, namespace)
        tags, first, second = self._hash.places_many(hashed)
        buckets = first.view(np.int64), second.view(np.int64)
        while len(slots):
            twins = self._twins(slots, tags, *buckets)
            fill_first, fill_second = self._fill[buckets[0]], self._fill[buckets[1]]
            bucket = np.where(fill_first <= fill_second, buckets[0], buckets[1])
            fill = np.minimum(fill_first, fill_second)
            open_ = fill < LANES
            open_[twins] = False
            cell = bucket * LANES + fill
            if open_.all():
                self._hash.cells[cell] = slots
                won = self._hash.cells[cell] == slots
            else:
                crowded = ~open_
                crowded[twins] = False
                self._crowded.append(slots[crowded])
                self._hash.cells[cell[open_]] = slots[open_]
                won = open_.copy()
                won[open_] = self._hash.cells[cell[open_]] == slots[open_]
            done = bucket[won]
            self._hash.tags8[cell[won]] = tags[won]
            self._fill[done] += 1
            again = open_ & ~won
            if not again.any():
                return
            slots, tags = slots[again], tags[again]
            buckets = buckets[0][again], buckets[1][again]

    def _twins(self, slots: Slots, tags: U64s, first: Slots, second: Slots) -> Slots:
        """Positions of entries that turned out to have the same key as one that is already placed."""
        spread = tags * _LOWS
        suspect = self._same_tag(first, spread) | self._same_tag(second, spread)
        positions = np.flatnonzero(suspect)
        if len(positions) == 0:
            return positions
        index = self._index
        asked = slots[positions]
        present = index.find(index.key_lo[asked], index.key_hi[asked], index.namespace[asked])
        twins = positions[present >= 0]
        for slot in slots[twins].tolist():
            self._settle(slot)
        return twins

    def _same_tag(self, bucket: Slots, spread: U64s) -> npt.NDArray[np.bool_]:
        lanes = self._hash.tags[bucket]
        lanes ^= spread
        inverse = ~lanes
        lanes -= _LOWS
        lanes &= inverse
        lanes &= _HIGHS
        return np.not_equal(lanes, 0)

    def _settle(self, slot: int) -> None:
        """`slot` has the key of a slot already placed: the later one has, or takes, the place."""
        index = self._index
        key = int(index.key_lo[slot]), int(index.key_hi[slot]), int(index.namespace[slot])
        holder = index.find_one(*key)
        if self._age(slot) > self._age(holder):
            self._hash.replace(holder, slot, *key)
            slot = holder
        index.flags[slot] = RESERVED
        self.losers.append(slot)

    def _age(self, slot: int) -> tuple[int, int, int]:
        index = self._index
        return int(index.generation[slot]), int(index.stored_s[slot]), slot

    def finish(self) -> None:
        """Place what found both its buckets full, and bring the index's totals up to date."""
        index = self._index
        for slot in np.concatenate(self._crowded).tolist() if self._crowded else ():
            key = int(index.key_lo[slot]), int(index.key_hi[slot]), int(index.namespace[slot])
            if index.find_one(*key) >= 0:
                self._settle(slot)
            else:
                self._hash.insert(slot, *key)
        self._crowded.clear()
        index.recount()
