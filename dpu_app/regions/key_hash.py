"""The hash from (key, namespace) to slot: buckets of eight, two buckets to choose from (cuckoo hashing), no tombstones.

Owns bucket cells only: a cell is a slot number and an 8-bit tag of its key; the keys themselves are the index's
columns and every hit is compared with them. A key is in one of its two buckets, so a look-up reads two cache lines
of tags and a removal clears one cell. The hash is salted, because clients choose their keys.
"""

from __future__ import annotations

from typing import Any, Protocol, TypeAlias

import numpy as np
import numpy.typing as npt

from dpu_app.regions import hot_path
from dpu_app.regions.huge_array import huge_memory, huge_zeros

Slots: TypeAlias = npt.NDArray[np.int64]
U64s: TypeAlias = npt.NDArray[np.uint64]
Integers: TypeAlias = npt.NDArray[np.integer]

_LANE_BITS = 3
LANES = 1 << _LANE_BITS
LOAD_MAX = 0.8
"""Cells in use when every slot is. At 0.9 opening a full region of ten million took 0.2 s longer, for 0.7 bytes a slot
less: insertions displace more."""
_KICKS_MAX = 500

_MASK = (1 << 64) - 1
_K1 = 0x9E3779B97F4A7C15
_K2 = 0xD6E8FEB86659FD93
_K3 = 0xBF58476D1CE4E5B9
_K4 = 0xA0761D6478BD642F
_NK1, _NK2, _NK3, _NK4 = (np.uint64(constant) for constant in (_K1, _K2, _K3, _K4))
_N32 = np.uint64(32)
_N56 = np.uint64(56)
_N29 = np.uint64(29)
_N1 = np.uint64(1)
_NLOW = np.uint64(0xFFFFFFFF)
_BYTES = [bytes([value]) for value in range(256)]
_EMPTY = _BYTES[0]
_SPREAD = np.uint64(0x0101010101010101)


class KeyColumns(Protocol):
    """The index's columns that hold, by slot, the keys this hash points to."""

    key_lo: U64s
    key_hi: U64s
    namespace: npt.NDArray[np.uint16]


class KeyHash:
    def __init__(self, slots: int, columns: KeyColumns, salt: int) -> None:
        self._columns = columns
        self.buckets = -(-int(slots / LOAD_MAX + 1) // LANES)
        self.cells = huge_zeros(self.buckets * LANES, np.uint32)
        self._tag_bytes = huge_memory(self.buckets * LANES)
        """0 where the cell is empty."""
        self.tags8 = np.frombuffer(self._tag_bytes, np.uint8, self.buckets * LANES)
        self.tags = self.tags8.view(np.uint64)
        """The tags of each bucket as one number."""
        self._cell = self.cells.data
        self._lo = columns.key_lo.data
        self._hi = columns.key_hi.data
        self._ns = columns.namespace.data
        self._salt_lo = salt & _MASK
        self._salt_hi = (salt * _K3 ^ (salt >> 31)) & _MASK
        self._nsalt_lo = np.uint64(self._salt_lo)
        self._nsalt_hi = np.uint64(self._salt_hi)
        self._nbuckets = np.uint64(self.buckets)
        self._turn = 0
        self.homeless: dict[tuple[int, int, int], int] = {}
        """Keys that no chain of displacements could place: at LOAD_MAX practically none, but never lost."""
        self.table: Any = None
        """The same buckets to native code, where it is to be had: what it says is what is said below."""
        if hot_path.LIBRARY is not None:
            keys = (columns.key_lo, columns.key_hi, columns.namespace)
            self.table = hot_path.LIBRARY.KeyTable(self.cells, self.tags8, *keys, *self.salts)

    @property
    def salts(self) -> tuple[int, int]:
        return self._salt_lo, self._salt_hi

    @property
    def memory_bytes(self) -> int:
        return self.cells.nbytes + self.tags8.nbytes

    # --------------------------------------------------------------------------------------------------- hash

    def hash_one(self, key_lo: int, key_hi: int, namespace: int) -> int:
        if self.table is not None:
            return self.table.hash_one(key_lo, key_hi, namespace)  # type: ignore[no-any-return]
        state = ((key_lo ^ self._salt_lo) * _K1) & _MASK
        state ^= state >> 32
        state = ((state + (key_hi ^ self._salt_hi) + namespace * _K4) * _K2) & _MASK
        state ^= state >> 29
        state = (state * _K3) & _MASK
        return state ^ (state >> 32)

    def hash_many(self, key_lo: U64s, key_hi: U64s, namespace: Integers) -> U64s:
        state: U64s = key_lo ^ self._nsalt_lo
        state *= _NK1
        other = state >> _N32
        state ^= other
        np.bitwise_xor(key_hi, self._nsalt_hi, out=other)
        state += other
        np.multiply(namespace.astype(np.uint64), _NK4, out=other)
        state += other
        state *= _NK2
        np.right_shift(state, _N29, out=other)
        state ^= other
        state *= _NK3
        np.right_shift(state, _N32, out=other)
        state ^= other
        return state

    def hash_slots(self, slots: Slots) -> U64s:
        columns = self._columns
        return self.hash_many(columns.key_lo[slots], columns.key_hi[slots], columns.namespace[slots])

    def _places(self, hashed: int) -> tuple[int, int, int]:
        """Tag, and first cell of both buckets."""
        tag = ((hashed * _K4) & _MASK) >> 56 or 1
        first = ((hashed & 0xFFFFFFFF) * self.buckets >> 32) * LANES
        return tag, first, ((hashed >> 32) * self.buckets >> 32) * LANES

    def places_many(self, hashed: U64s) -> tuple[U64s, U64s, U64s]:
        """Tags, and both buckets' numbers."""
        tags = hashed * _NK4
        tags >>= _N56
        np.maximum(tags, _N1, out=tags)
        first = hashed & _NLOW
        first *= self._nbuckets
        first >>= _N32
        second = hashed >> _N32
        second *= self._nbuckets
        second >>= _N32
        return tags, first, second

    # ------------------------------------------------------------------------------------------------- look up

    def find(self, key_lo: U64s, key_hi: U64s, namespace: Integers) -> Slots:
        count = len(key_lo)
        found = np.full(count, -1, np.int64)
        tags, first, second = self.places_many(self.hash_many(key_lo, key_hi, namespace))
        buckets = np.empty((2, count), np.int64)
        buckets[0] = first
        buckets[1] = second
        tags *= _SPREAD
        lanes = self.tags.take(buckets)
        lanes ^= tags
        matches = (lanes.view(np.uint8).reshape(-1) == 0).nonzero()[0]
        if len(matches):
            which = matches >> _LANE_BITS
            cells = buckets.reshape(-1).take(which)
            cells <<= _LANE_BITS
            matches &= LANES - 1
            cells += matches
            which[which >= count] -= count
            slots = self.cells.take(cells).astype(np.int64)
            columns = self._columns
            same = columns.key_lo.take(slots) == key_lo.take(which)
            same &= columns.key_hi.take(slots) == key_hi.take(which)
            same &= columns.namespace.take(slots) == namespace.take(which)
            found[which[same]] = slots[same]
        if self.homeless:
            self._find_homeless(found, key_lo, key_hi, namespace)
        return found

    def _find_homeless(self, found: Slots, key_lo: U64s, key_hi: U64s, namespace: Integers) -> None:
        for position in np.flatnonzero(found < 0).tolist():
            key = (int(key_lo[position]), int(key_hi[position]), int(namespace[position]))
            found[position] = self.homeless.get(key, -1)

    def find_one(self, key_lo: int, key_hi: int, namespace: int) -> int:
        if self.table is not None:
            slot: int = self.table.find_one(key_lo, key_hi, namespace)
            if slot >= 0:
                return slot
        else:
            cell = self._find_cell(key_lo, key_hi, namespace)
            if cell >= 0:
                return self._cell[cell]
        return self.homeless.get((key_lo, key_hi, namespace), -1) if self.homeless else -1

    def _find_cell(self, key_lo: int, key_hi: int, namespace: int) -> int:
        tag, first, second = self._places(self.hash_one(key_lo, key_hi, namespace))
        tags = self._tag_bytes
        sought = _BYTES[tag]
        for start in (first, second):
            cell = tags.find(sought, start, start + LANES)
            while cell >= 0:
                slot = self._cell[cell]
                if self._lo[slot] == key_lo and self._hi[slot] == key_hi and self._ns[slot] == namespace:
                    return cell
                cell = tags.find(sought, cell + 1, start + LANES)
        return -1

    # ------------------------------------------------------------------------------------------------- change

    def insert(self, slot: int, key_lo: int, key_hi: int, namespace: int) -> None:
        """The key must be absent, and already in the columns at `slot`."""
        if self.table is not None and self.table.insert(slot, key_lo, key_hi, namespace):
            return
        tags = self._tag_bytes
        tag, first, second = self._places(self.hash_one(key_lo, key_hi, namespace))
        for _ in range(_KICKS_MAX):
            cell = tags.find(_EMPTY, first, first + LANES)
            if cell < 0:
                cell = tags.find(_EMPTY, second, second + LANES)
            if cell >= 0:
                tags[cell] = tag
                self._cell[cell] = slot
                return
            self._turn = (self._turn + 5) % (2 * LANES)  # both buckets are full: displace one of sixteen
            cell = first + self._turn if self._turn < LANES else second + self._turn - LANES
            displaced, self._cell[cell] = self._cell[cell], slot
            tags[cell] = tag
            slot = displaced
            tag, first, second = self._places(self.hash_one(self._lo[slot], self._hi[slot], self._ns[slot]))
            if first <= cell < first + LANES:
                first, second = second, first  # it has just left the first: try the other before
        self.homeless[self._lo[slot], self._hi[slot], self._ns[slot]] = slot

    def replace(self, holder: int, slot: int, key_lo: int, key_hi: int, namespace: int) -> None:
        """Put `slot` where `holder` is, both having this key. Raises KeyError if `holder` is not under it."""
        cell = self._find_cell(key_lo, key_hi, namespace)
        if cell >= 0 and self._cell[cell] == holder:
            self._cell[cell] = slot
            return
        if self.homeless.get((key_lo, key_hi, namespace)) != holder:
            raise KeyError(f"slot {holder} is not under its key")
        self.homeless[key_lo, key_hi, namespace] = slot

    def remove(self, slot: int, key_lo: int, key_hi: int, namespace: int) -> None:
        """Raises KeyError if `slot` is not under this key."""
        if self.table is not None and self.table.remove(slot, key_lo, key_hi, namespace):
            return
        cell = self._find_cell(key_lo, key_hi, namespace)
        if cell >= 0 and self._cell[cell] == slot:
            self._tag_bytes[cell] = 0
            return
        if self.homeless.get((key_lo, key_hi, namespace)) != slot:
            raise KeyError(f"slot {slot} is not under its key")
        del self.homeless[key_lo, key_hi, namespace]
