"""What an eviction policy is: it orders slots and names the next victim; it never removes one by itself.

The engine calls it on every insertion, hit and removal; `recovery` restores its order in bulk. Policies keep arrays
only, so that their memory is a known number of bytes a slot.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol, TypeAlias

import numpy as np
import numpy.typing as npt

Slots: TypeAlias = npt.NDArray[np.int64]

FingerprintOf: TypeAlias = Callable[[int], int]
"""A 64-bit hash of the key that a slot holds, the same each time."""

SCAN_MAX = 2048
"""Slots that one call of `victim` looks at, at most, in about two milliseconds: what is then left waits for the next
call."""
SCAN_MIN = 4
"""Slots that it may look at however many were looked at before in the same turn."""


class Scan:
    """How many slots the calls of `victim` in one turn may still look at: a batch of stores that finds every block in
    use would otherwise keep everybody waiting for a second and more."""

    __slots__ = ("at", "left")

    def __init__(self) -> None:
        self.refill()

    def refill(self) -> None:
        """A turn begins."""
        self.left = SCAN_MAX
        self.at = -1
        """Where a policy that begins at the oldest slot goes on in the same turn, if it is still there; else -1."""

    def steps_max(self) -> int:
        return max(SCAN_MIN, self.left)


class EvictionPolicy(Protocol):
    """Every slot is known to the policy between its `on_insert` and `on_remove`, and is there once."""

    @property
    def hit_counters(self) -> tuple[memoryview, bytes] | None:
        """One byte a slot, and by its value what another use makes of it (256 bytes): whoever writes them need not call
        `on_hit`. None for a policy that cannot put it so."""
        ...

    @property
    def bytes_per_slot(self) -> float:
        """Bytes of arrays held, over the number of slots."""
        ...

    def on_insert(self, slot: int, fingerprint: int) -> None:
        """`slot` now holds a new block, whose key has this fingerprint."""
        ...

    def on_hit(self, slots: Slots) -> None:
        """Each of `slots` was used. A slot named twice in one call may count once."""
        ...

    def on_hit_one(self, slot: int) -> None: ...

    def on_remove(self, slot: int) -> None:
        """`slot` holds nothing any more, by eviction or otherwise."""
        ...

    def victim(self, blocked: Callable[[int], bool], scan: Scan | None = None) -> int:
        """The slot to evict next, or -1: none, or none within what `scan` allows (None: SCAN_MAX) that is not
        `blocked`. It stays known until `on_remove`; one that is blocked is put off and keeps its standing."""
        ...

    def bulk_insert(self, slots: Slots) -> None:
        """Insert many, oldest first, into an empty policy, in numpy's time."""
        ...
