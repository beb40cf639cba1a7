"""The times of storing that go into slot-table entries: never falling, and later than those of an earlier copy.

A block that leaves its slot stays named by an entry on flash until that entry's page is written. When it is stored
again, both entries may survive a crash, and recovery keeps the later one: so of two copies in one second the second is
given a later time. Used by the catalogue; times are for that order and for people, never for expiry.
"""

from __future__ import annotations

Key = tuple[int, int, int]
"""key_lo, key_hi, namespace id."""

_LEFT_MAX = 4096


class Stamps:
    def __init__(self) -> None:
        self._now_s = 0
        self._left: set[Key] = set()
        """Blocks stored at `_now_s` that have left their slots."""

    def next(self, wall_s: int, key: Key) -> int:
        """The time for a block that is stored now."""
        if wall_s > self._now_s:
            self._advance(wall_s)
        elif key in self._left:
            self._advance(self._now_s + 1)
        return self._now_s

    def left(self, key: Key, stored_s: int) -> None:
        """The block, stored at `stored_s`, is not in its slot any more."""
        if stored_s == self._now_s:
            self._left.add(key)
            if len(self._left) >= _LEFT_MAX:
                self._advance(self._now_s + 1)

    def _advance(self, now_s: int) -> None:
        self._now_s = now_s
        self._left.clear()
