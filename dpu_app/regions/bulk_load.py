"""Filling an empty index with millions of entries, some ten thousand at a time, in numpy's time.

Owns what only loading needs: how full each bucket is, and the keys that found no place at once. `recovery` makes
one, feeds it and finishes it, all from one thread. Of two slots with one key the later one stays; the other is
reported, for the recovery to free.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from dpu_app.regions.index import SlotIndex
from dpu_app.regions.key_hash import LANES

Slots: TypeAlias = npt.NDArray[np.int64]
U64s: TypeAlias = npt.NDArray[np.uint64]
Mask: TypeAlias = npt.NDArray[np.bool_]

_LOWS = np.uint64(0x0101010101010101)
_HIGHS = np.uint64(0x8080808080808080)
_ONE = np.uint64(1)
_LANE_OF_BYTE = np.uint64(0x0001020304050607)
_SEVEN = np.uint64(7)
_TOP = np.uint64(56)
_ADD_PIECE = 1 << 14
"""Keys placed at a time: more, and too many meet at one cell; fewer, and numpy's calls weigh more than the work."""
_PIECE = 1 << 15
"""Keys that `finish` handles at a time, so that temporaries stay in the cache."""
_FEW = 64
"""So few keys are placed faster one by one."""
_ROUNDS_MAX = 200


class BulkLoad:
    """The index must be empty, and is not to be used until `finish` is through."""

    def __init__(self, index: SlotIndex) -> None:
        self._index = index
        self._hash = index.key_hash
        self.fill = np.zeros(self._hash.buckets, np.uint8)
        """Cells in use per bucket: they fill from the first on, because nothing is removed meanwhile."""
        self._homeless: list[Slots] = []
        """Slots that found no cell at once, or whose key may be there already: `finish` sees to them."""
        self._random = np.random.default_rng(0)
        self.losers: list[int] = []
        """Slots whose key another slot holds with a later generation."""

    def add(self, places: Sequence[slice | Slots]) -> None:
        """Place slots whose columns are set."""
        parts = [np.arange(place.start, place.stop) if isinstance(place, slice) else place for place in places]
        slots = np.concatenate(parts) if parts else np.zeros(0, np.int64)
        for start in range(0, len(slots), _ADD_PIECE):
            part = slots[start : start + _ADD_PIECE]
            tags, first, second = self._hash.places_many(self._hash.hash_slots(part))
            full = self._place(part, tags, first.view(np.int64))
            crowded = self._place(part[full], tags[full], second[full].view(np.int64))
            self._homeless.append(part[full[crowded]])

    def put_off(self, slots: Slots) -> None:
        """Slots whose columns are set and that found no place, or whose key another slot has: `finish` sees to
        them."""
        self._homeless.append(slots)

    def _place(self, slots: Slots, tags: U64s, buckets: Slots) -> Slots:
        """Each slot into the next cell of its bucket. Positions of those whose bucket was full.

        A slot whose tag is in the bucket already is put off to `finish`: it may have the key of another slot. That
        misses no pair of them: a bucket that was full is full for good, so both look into the same one. So is a slot
        that met another one at its cell.
        """
        fill = self.fill.take(buckets)
        open_ = fill < LANES
        lanes = self._hash.tags.take(buckets)
        lanes ^= tags * _LOWS
        clear = _zero_bytes(lanes) == 0
        full = np.flatnonzero(clear & ~open_)
        self._homeless.append(slots[~clear])
        stay = np.flatnonzero(clear & open_)
        slots, tags, buckets, fill = slots[stay], tags[stay], buckets[stay], fill[stay]
        cell = buckets * LANES
        cell += fill
        won = self._claim(cell, slots, tags)
        self._homeless.append(slots[~won])
        fill += 1
        self.fill[buckets] = fill  # the same number for all that met at one cell
        return full

    def _claim(self, cell: Slots, slots: Slots, tags: U64s) -> Mask:
        """Write slots and tags to cells; where several name one cell, one of them has it. Which ones have theirs."""
        cells = self._hash.cells
        cells[cell] = slots
        won: Mask = np.equal(cells.take(cell), slots)
        self._hash.tags8[cell[won]] = tags[won]
        return won

    def _settled(self, slots: Slots) -> Mask:
        index = self._index
        present = index.find(index.key_lo[slots], index.key_hi[slots], index.namespace[slots]) >= 0
        for slot in slots[present].tolist():
            self._settle(slot)
        return present

    def _settle(self, slot: int) -> None:
        """`slot` has the key of a slot already placed: the later of them has the place."""
        index = self._index
        key = int(index.key_lo[slot]), int(index.key_hi[slot]), int(index.namespace[slot])
        holder = index.find_one(*key)
        if self._age(slot) > self._age(holder):
            self._hash.replace(holder, slot, *key)
            slot = holder
        self.losers.append(slot)

    def _age(self, slot: int) -> tuple[int, int, int]:
        index = self._index
        return int(index.generation[slot]), int(index.stored_s[slot]), slot

    def finish(self) -> None:
        """Place what is left, by displacing others where both buckets are full."""
        slots = np.concatenate(self._homeless) if self._homeless else np.zeros(0, np.int64)
        self._homeless.clear()
        pieces = [slots[start : start + _PIECE] for start in range(0, len(slots), _PIECE)]
        pieces = [piece[~self._settled(piece)] for piece in pieces]
        hashes = [self._hash.hash_slots(piece) for piece in pieces]
        repeated = _repeated(hashes)
        for piece, hashed in zip(pieces, hashes):
            if len(repeated):  # perhaps one key: one by one, so that the second finds the first
                alike = np.isin(hashed, repeated)
                for slot in piece[alike].tolist():
                    self._insert_or_settle(slot)
                piece, hashed = piece[~alike], hashed[~alike]
            tags, buckets, _ = self._hash.places_many(hashed)
            self._displace(piece, tags, buckets.view(np.int64))

    def _insert_or_settle(self, slot: int) -> None:
        index = self._index
        key = int(index.key_lo[slot]), int(index.key_hi[slot]), int(index.namespace[slot])
        if index.find_one(*key) >= 0:
            self._settle(slot)
        else:
            self._hash.insert(slot, *key)

    def _displace(self, slots: Slots, tags: U64s, buckets: Slots) -> None:
        """Random walks of all of `slots` at once: each takes a free cell of its bucket, or the cell of another slot,
        which goes on to its own other bucket."""
        hash_ = self._hash
        for _ in range(_ROUNDS_MAX):
            if len(slots) <= _FEW:
                break
            empty = _zero_bytes(hash_.tags.take(buckets))
            full = empty == 0
            empty &= ~empty + _ONE  # the lowest of them
            lane = (((empty >> _SEVEN) * _LANE_OF_BYTE) >> _TOP).view(np.int64)
            lane[full] = self._random.integers(0, LANES, int(np.count_nonzero(full)))
            cell = buckets * LANES
            cell += lane
            previous = hash_.cells.take(cell).astype(np.int64)
            won = self._claim(cell, slots, tags)
            lost = ~won
            moved = np.flatnonzero(won & full)
            displaced, left = previous[moved], buckets[moved]
            next_tags, first, second = hash_.places_many(hash_.hash_slots(displaced))
            onward = np.where(first.view(np.int64) == left, second.view(np.int64), first.view(np.int64))
            slots = np.concatenate((slots[lost], displaced))
            tags = np.concatenate((tags[lost], next_tags))
            buckets = np.concatenate((buckets[lost], onward))
        for slot in slots.tolist():
            self._insert_or_settle(slot)


def _repeated(hashes: list[U64s]) -> U64s:
    """The numbers that come more than once."""
    if not hashes:
        return np.zeros(0, np.uint64)
    numbers = np.concatenate(hashes)
    numbers.sort()
    repeated: U64s = np.unique(numbers[1:][numbers[1:] == numbers[:-1]])
    return repeated


def _zero_bytes(words: U64s) -> U64s:
    """In place: the top bit of each byte that was zero; above the lowest of them perhaps of others too."""
    inverse = ~words
    words -= _LOWS
    words &= inverse
    words &= _HIGHS
    return words
