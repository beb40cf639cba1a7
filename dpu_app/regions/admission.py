"""Admission filters: whether a block that is stored is worth a write to flash. Off (`all`) by default.

Called by the engine on every STORE of an absent key; owns its own memory of what was asked before, in arrays, and
never touches a block. What a filter refuses is answered NOT_ADMITTED and counted by the engine.
"""

from __future__ import annotations

from typing import Protocol

import numpy as np

from common.errors import UserError

_MASK = (1 << 64) - 1
_PROBES = 4
_BITS_PER_KEY = 12
"""With four probes one stranger in about 200 is taken for known."""
WINDOW_S_DEFAULT = 3600


class AdmissionFilter(Protocol):
    def admit(self, fingerprint: int, now_s: int) -> bool:
        """Whether to store the block whose key has this 64-bit `fingerprint`. Remembers that it was asked."""
        ...


class AdmitAll:
    def admit(self, fingerprint: int, now_s: int) -> bool:  # noqa: ARG002
        return True


class SecondRequest:
    """Admits what is asked for the second time within a window: `window_s`, or `keys` other keys, whichever is over
    first. Two Bloom filters take turns: the older is cleared when the newer is full or half a window old."""

    def __init__(self, keys: int, window_s: int = WINDOW_S_DEFAULT) -> None:
        """`keys` and `window_s` are at least 2."""
        if keys < 2 or window_s < 2:
            raise UserError(f"admission over {keys} keys and {window_s} s: make both 2 or more")
        self._keys_max = keys // 2
        self._turn_s = window_s // 2
        self._bits = self._keys_max * _BITS_PER_KEY
        self._filters = [np.zeros(-(-self._bits // 8), np.uint8) for _ in range(2)]
        self._views = [bits.data for bits in self._filters]
        self._current = 0
        self._keys = 0
        self._since_s = -1

    @property
    def memory_bytes(self) -> int:
        return sum(bits.nbytes for bits in self._filters)

    def admit(self, fingerprint: int, now_s: int) -> bool:
        if self._since_s < 0:
            self._since_s = now_s
        if now_s - self._since_s >= 2 * self._turn_s:
            self._rotate(now_s)
            self._rotate(now_s)
        elif self._keys >= self._keys_max or now_s - self._since_s >= self._turn_s:
            self._rotate(now_s)
        places = self._places(fingerprint)
        current = self._views[self._current]
        known = all(current[byte] & bit for byte, bit in places)
        if known:
            return True
        older = self._views[1 - self._current]
        known = all(older[byte] & bit for byte, bit in places)
        for byte, bit in places:
            current[byte] |= bit
        self._keys += 1
        return known

    def _rotate(self, now_s: int) -> None:
        self._current = 1 - self._current
        self._filters[self._current][:] = 0
        self._keys = 0
        self._since_s = now_s

    def _places(self, fingerprint: int) -> list[tuple[int, int]]:
        mixed = (fingerprint * 0x9E3779B97F4A7C15) & _MASK
        step = (mixed >> 32) | 1
        numbers = [(mixed + probe * step) % self._bits for probe in range(_PROBES)]
        return [(number >> 3, 1 << (number & 7)) for number in numbers]


def create(name: str, *, keys: int = 1 << 20, window_s: int = WINDOW_S_DEFAULT) -> AdmissionFilter:
    """`all` or `second_request`; the latter remembers `keys` keys for at most `window_s`. Raises UserError naming the
    filters there are."""
    if name == "all":
        return AdmitAll()
    if name == "second_request":
        return SecondRequest(keys, window_s)
    raise UserError(f"there is no admission filter {name!r}: choose all or second_request")
