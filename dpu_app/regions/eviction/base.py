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

SCAN_MAX = 4096
"""Slots that one call of `victim` looks at, at most: what is then left waits for the next call."""


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

    def victim(self, blocked: Callable[[int], bool]) -> int:
        """The slot to evict next, or -1: none, or none within SCAN_MAX that is not `blocked`. It stays known until
        `on_remove`; one that is blocked is put off and keeps its standing."""
        ...

    def bulk_insert(self, slots: Slots) -> None:
        """Insert many, oldest first, into an empty policy, in numpy's time."""
        ...
