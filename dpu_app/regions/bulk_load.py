"""Filling an empty index with millions of entries, some thousands at a time, in numpy's time.

Owns what only loading needs: how full each bucket is, and the keys that found both their buckets full. `recovery`
makes one, feeds it and finishes it, all from one thread. Of two slots with one key the later one stays; the other
is reported, for the recovery to free.
"""

from __future__ import annotations

from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from dpu_app.regions.huge_array import huge_zeros
from dpu_app.regions.index import SlotIndex
from dpu_app.regions.key_hash import LANES

Slots: TypeAlias = npt.NDArray[np.int64]
U64s: TypeAlias = npt.NDArray[np.uint64]
Mask: TypeAlias = npt.NDArray[np.bool_]

_LOWS = np.uint64(0x0101010101010101)
_HIGHS = np.uint64(0x8080808080808080)
_HALF = np.uint64(32)
_FEW = 64
"""So few keys are placed faster one by one."""
_ROUNDS_MAX = 200


class BulkLoad:
    """The index must be empty, and is not to be used until `finish` is through."""

    def __init__(self, index: SlotIndex) -> None:
        self._index = index
        self._hash = index.key_hash
        self._fill = np.zeros(self._hash.buckets, np.uint8)
        """Cells in use per bucket: they fill from the first on, because nothing is removed meanwhile."""
        self._crowded: list[Slots] = []
        self._random = np.random.default_rng(0)
        self.losers: list[int] = []
        """Slots whose key another slot holds with a later generation."""
        self.fingerprints = huge_zeros(index.slots, np.uint32)
        """Of each slot's key, folded to 32 bits."""

    def add(self, slots: Slots) -> None:
        """Hash the keys of `slots`, ascending: their columns and flags are set."""
        index = self._index
        first, last = int(slots[0]), int(slots[-1]) + 1
        place: slice | Slots = slice(first, last) if last - first == len(slots) else slots
        hashed = self._hash.hash_many(index.key_lo[place], index.key_hi[place], index.namespace[place])
        self.fingerprints[place] = hashed ^ (hashed >> _HALF)
        tags, first_bucket, second_bucket = self._hash.places_many(hashed)
        self._place(slots, tags, first_bucket.view(np.int64), second_bucket.view(np.int64))

    def _place(self, slots: Slots, tags: U64s, buckets: Slots, others: Slots | None) -> None:
        """Each slot into its bucket; where that is full into the other one, or (`others` None) to the crowded.

        A key that is there twice meets its twin here: a bucket passed by is full for good, so the twin that came
        first lies in a bucket that this one looks at too.
        """
        fills = self._fill
        spilt: list[tuple[Slots, U64s, Slots]] = []
        while len(slots):
            fill = fills.take(buckets)
            open_ = fill < LANES
            twins = self._twins(slots, tags, buckets)
            if len(twins) or not open_.all():
                keep = np.ones(len(slots), np.bool_)
                keep[twins] = False
                full = np.flatnonzero(keep & ~open_)
                if others is None:
                    self._crowded.append(slots[full])
                else:
                    spilt.append((slots[full], tags[full], others[full]))
                stay = np.flatnonzero(keep & open_)
                slots, tags, buckets, fill = slots[stay], tags[stay], buckets[stay], fill[stay]
                if others is not None:
                    others = others[stay]
            cell = buckets * LANES
            cell += fill
            lost = self._claim(cell, slots, tags)
            fill += 1
            fills[buckets] = fill  # the same number for all that met in one cell
            slots, tags, buckets = slots[lost], tags[lost], buckets[lost]
            if others is not None:
                others = others[lost]
        for slots_left, tags_left, buckets_left in spilt:
            self._place(slots_left, tags_left, buckets_left, None)

    def _claim(self, cell: Slots, slots: Slots, tags: U64s) -> Slots:
        """Write slots and tags to cells; where several name one cell, one of them has it. Positions of the others."""
        cells, tags8 = self._hash.cells, self._hash.tags8
        cells[cell] = slots
        lost = np.flatnonzero(cells.take(cell) != slots)
        if len(lost) == 0:
            tags8[cell] = tags
            return lost
        won = np.ones(len(cell), np.bool_)
        won[lost] = False
        tags8[cell[won]] = tags[won]
        return lost

    def _twins(self, slots: Slots, tags: U64s, buckets: Slots) -> Slots:
        """Positions of slots whose key is already placed; who stays of each pair is settled."""
        lanes = self._hash.tags.take(buckets)
        lanes ^= tags * _LOWS
        inverse = ~lanes
        lanes -= _LOWS
        lanes &= inverse
        lanes &= _HIGHS
        suspects = np.flatnonzero(lanes)
        if len(suspects) == 0:
            return suspects
        return suspects[self._settled(slots[suspects])]

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
        """Place what found both its buckets full, by displacing others."""
        slots = np.concatenate(self._crowded) if self._crowded else np.zeros(0, np.int64)
        self._crowded.clear()
        slots = slots[~self._settled(slots)]
        hashed = self._hash.hash_slots(slots)
        slots, hashed = self._settle_among(slots, hashed)
        tags, buckets, _ = self._hash.places_many(hashed)
        self._displace(slots, tags, buckets.view(np.int64))

    def _settle_among(self, slots: Slots, hashed: U64s) -> tuple[Slots, U64s]:
        """Without those that have the key of another one of `slots`: the first of them is placed here."""
        order = np.argsort(hashed)
        same = hashed[order[1:]] == hashed[order[:-1]]
        if not same.any():
            return slots, hashed
        doubtful = np.zeros(len(slots), np.bool_)
        doubtful[order[1:][same]] = True
        doubtful[order[:-1][same]] = True
        for slot in slots[doubtful].tolist():
            self._insert_or_settle(slot)
        return slots[~doubtful], hashed[~doubtful]

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
            free = np.flatnonzero((hash_.tags8.reshape(-1, LANES)[buckets] == 0).any(axis=1))
            lane = self._random.integers(0, LANES, len(slots))
            lane[free] = np.argmax(hash_.tags8.reshape(-1, LANES)[buckets[free]] == 0, axis=1)
            cell = buckets * LANES + lane
            moved = np.ones(len(slots), np.bool_)
            moved[free] = False
            previous = hash_.cells[cell].astype(np.int64)
            lost = self._claim(cell, slots, tags)
            moved[lost] = False
            displaced, left = previous[moved], buckets[moved]
            next_tags, first, second = hash_.places_many(hash_.hash_slots(displaced))
            onward = np.where(first.view(np.int64) == left, second.view(np.int64), first.view(np.int64))
            slots = np.concatenate((slots[lost], displaced))
            tags = np.concatenate((tags[lost], next_tags))
            buckets = np.concatenate((buckets[lost], onward))
        for slot in slots.tolist():
            self._insert_or_settle(slot)
