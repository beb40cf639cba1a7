"""Turns the namespace digests of many slot-table entries into ids at once, and sums their lengths by id.

A small direct-mapped table answers for the digests seen before; only a new digest, or one that shares its place in
the table, takes the slow way. Used by `table_reader` while a region is opened.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from dpu_app.regions.index import NAMESPACES_MAX, SlotIndex
from dpu_app.regions.slot_table import Words

NO_ID = NAMESPACES_MAX
_PLACE_BITS = 12
_SHIFT = np.uint64(64 - _PLACE_BITS)
_FACTOR = np.uint64(0x9E3779B97F4A7C15)


class NamespaceIds:
    def __init__(self, index: SlotIndex) -> None:
        self._index = index
        places = 1 << _PLACE_BITS
        self._ids = np.zeros(places, np.uint16)
        self._lo = np.zeros(places, np.uint64)
        self._lo[0] = 1  # belongs to another place, so that an empty place 0 does not answer for a digest of zeros
        self._hi = np.zeros(places, np.uint64)
        self._known = 0
        self._totals = np.zeros(NAMESPACES_MAX, np.int64)

    def of(self, lo: Words, hi: Words) -> npt.NDArray[np.uint16]:
        """Ids of digests given as their two words; NO_ID where the index has no id left to give."""
        places = ((lo * _FACTOR) >> _SHIFT).view(np.int64)
        ids: npt.NDArray[np.uint16] = self._ids.take(places)
        wrong = self._lo.take(places) != lo
        wrong |= self._hi.take(places) != hi
        missed = np.flatnonzero(wrong)
        if len(missed):
            ids[missed] = self._slowly(lo[missed], hi[missed], places[missed])
        return ids

    def count(self, ids: npt.NDArray[np.uint16], lengths: npt.NDArray[np.uint32]) -> None:
        """Add to the totals. None of `ids` is NO_ID."""
        sums = np.bincount(ids, lengths, self._known)
        self._totals[: len(sums)] += sums.astype(np.int64)

    def _slowly(self, lo: Words, hi: Words, places: npt.NDArray[np.int64]) -> npt.NDArray[np.uint16]:
        digests, firsts, inverse = np.unique(
            np.column_stack((lo, hi)).view("V16").reshape(-1), return_index=True, return_inverse=True
        )
        ids = np.zeros(len(digests), np.uint16)
        for number, (digest, first) in enumerate(zip(digests, firsts.tolist())):
            identity = self._index.namespace_id(digest.tobytes())
            if identity < 0:
                ids[number] = NO_ID
                continue
            ids[number] = identity
            place = places[first]
            self._ids[place], self._lo[place], self._hi[place] = identity, lo[first], hi[first]
            self._known = max(self._known, identity + 1)
        found: npt.NDArray[np.uint16] = ids[inverse.reshape(-1)]
        return found

    @property
    def known(self) -> tuple[npt.NDArray[np.uint16], Words, Words]:
        """The table: ids, and the two words of the digests they answer for."""
        return self._ids, self._lo, self._hi

    @property
    def sums(self) -> npt.NDArray[np.int64]:
        """Sum of lengths per id, of all ids there may be; whoever counts by itself adds here."""
        return self._totals

    def totals(self) -> npt.NDArray[np.int64]:
        """Sum of lengths per id."""
        return self._totals[: self._known]
