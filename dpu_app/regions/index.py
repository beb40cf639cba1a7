"""The index of a region: which slot holds which key, in arrays of numbers only, and which slots are free.

Owns one column per fact about a slot, the hash from (key, namespace) to slot, the pool of free slots and the bytes
per namespace; never touches a device or decides what to evict. The engine and `recovery` are its only callers, from
one thread. Columns are public to read, contiguous, and by slot.
"""

from __future__ import annotations

import secrets
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from dpu_app.regions.huge_array import huge_memory, huge_zeros
from dpu_app.regions.key_hash import KeyHash

Slots: TypeAlias = npt.NDArray[np.int64]

FREE = 0
USED = 1
RESERVED = 2
"""Values of `flags`: free, inserted, allocated but not inserted."""

NAMESPACES_MAX = 65535
NAMESPACE_BYTES = 16
_GROUP = 64
"""Slots that share a page of the slot table: allocation fills a group before it goes to the next."""
TAKE_BACK_MAX = 256
_SCAN_CHUNK = 4096
SCAN_SLOTS_MAX = 1 << 16
"""Slots that one `scan` looks at: about a millisecond, for which nobody else is served."""
_FREE_BYTE = bytes([FREE])
_ALL = np.uint64((1 << 64) - 1)


class SlotIndex:
    """`slots` places. A slot goes `allocate` -> `insert` -> `remove` -> `release`, and skips what it does not need:
    released without insertion when a store fails, inserted again after a removal."""

    def __init__(self, slots: int, seed: int | None = None) -> None:
        """`seed` fixes the hash for tests; without it nobody outside the process can predict a bucket."""
        self.slots = slots
        self.key_lo = huge_zeros(slots, np.uint64)
        self.key_hi = huge_zeros(slots, np.uint64)
        self.checksum = huge_zeros(slots, np.uint64)
        self.length = huge_zeros(slots, np.uint32)
        self.generation = huge_zeros(slots, np.uint32)
        self.stored_s = huge_zeros(slots, np.uint32)
        self.expires_s = huge_zeros(slots, np.uint32)
        self.namespace = huge_zeros(slots, np.uint16)
        self._flag_bytes = huge_memory(slots)
        self.flags = np.frombuffer(self._flag_bytes, np.uint8, slots)
        self.namespace_bytes = np.zeros(NAMESPACES_MAX, np.int64)
        """Sum of lengths per namespace id."""
        self._namespace_bytes = self.namespace_bytes.data
        self.key_hash = KeyHash(slots, self, secrets.randbits(64) if seed is None else seed)
        self._namespace_ids: dict[bytes, int] = {}
        self._namespaces_given = 0
        self._returned_ids: list[int] = []
        self._named = np.zeros(NAMESPACES_MAX, np.bool_)
        """By id: it has a digest now."""
        self._digests: npt.NDArray[np.uint8] = np.zeros((64, NAMESPACE_BYTES), np.uint8)
        self._used = 0
        self._free = slots
        self._open_groups = bytearray(b"\1" * -(-slots // _GROUP))
        """1 where the group has a free slot."""
        self._cursor = 0
        # Reading one number through a memoryview takes a third of the time numpy takes; the engine does, too.
        self._lo = self.key_lo.data
        self._hi = self.key_hi.data
        self._ns = self.namespace.data
        self.length_of = self.length.data
        self.checksum_of = self.checksum.data
        self._generation = self.generation.data
        self._stored_s = self.stored_s.data
        self._expires_s = self.expires_s.data

    # ------------------------------------------------------------------------------------------- namespaces

    def namespace_id(self, digest: bytes) -> int:
        """The id of a namespace digest, given out at the first call; -1 when all NAMESPACES_MAX are given out, and
        `take_back_namespaces` may help."""
        known = self._namespace_ids.get(digest)
        if known is not None:
            return known
        number = self._returned_ids[-1] if self._returned_ids else self._namespaces_given
        if len(digest) != NAMESPACE_BYTES:
            raise ValueError(f"a namespace digest is {NAMESPACE_BYTES} bytes, not {len(digest)}")
        if number >= NAMESPACES_MAX:
            return -1
        if number >= len(self._digests):
            self._digests = np.concatenate((self._digests, np.zeros_like(self._digests)))
        self._digests[number] = np.frombuffer(digest, np.uint8)
        self._namespace_ids[digest] = number
        self._named[number] = True
        if self._returned_ids:
            self._returned_ids.pop()
        else:
            self._namespaces_given += 1
        return number

    def take_back_namespaces(self, opened: npt.NDArray[np.integer]) -> list[int]:
        """The ids of namespaces without a block, but for those whose number in `opened`, by id, is not 0: they name
        nothing from now on, and are given out again. Some of them (TAKE_BACK_MAX) where there are many."""
        given = self._namespaces_given
        unused = self._named[:given] & (self.namespace_bytes[:given] == 0) & (opened[:given] == 0)
        numbers: list[int] = np.flatnonzero(unused)[:TAKE_BACK_MAX].tolist()
        for number in numbers:
            del self._namespace_ids[bytes(self._digests[number])]
        self._named[numbers] = False
        self._returned_ids.extend(numbers)
        return numbers

    def find_namespace(self, digest: bytes) -> int:
        """The id of a digest that has one, else -1."""
        return self._namespace_ids.get(digest, -1)

    def namespace_digest(self, namespace: int) -> bytes:
        """Raises KeyError for an id never given out."""
        if not 0 <= namespace < self._namespaces_given:
            raise KeyError(namespace)
        return bytes(self._digests[namespace])

    def namespace_digests(self, namespaces: npt.NDArray[np.integer]) -> npt.NDArray[np.void]:
        """One 16-byte digest (dtype V16) per id, all of which have been given out."""
        digests: npt.NDArray[np.void] = self._digests[namespaces].view(f"V{NAMESPACE_BYTES}").reshape(-1)
        return digests

    # --------------------------------------------------------------------------------------------------- find

    def find(self, key_lo: npt.ArrayLike, key_hi: npt.ArrayLike, namespace: npt.ArrayLike) -> Slots:
        """The slot of each (key, namespace), -1 where absent. A namespace id that was never given out matches
        nothing."""
        lo = np.asarray(key_lo, np.uint64)
        hi = np.asarray(key_hi, np.uint64)
        return self.key_hash.find(lo, hi, np.asarray(namespace))

    def find_one(self, key_lo: int, key_hi: int, namespace: int) -> int:
        return self.key_hash.find_one(key_lo, key_hi, namespace)

    def fingerprint(self, key_lo: int, key_hi: int, namespace: int) -> int:
        """A 64-bit hash of the key, the same for as long as the index lives: for eviction and admission."""
        return self.key_hash.hash_one(key_lo, key_hi, namespace)

    def fingerprint_of(self, slot: int) -> int:
        """`fingerprint` of the key that a slot holds."""
        return self.key_hash.hash_one(self._lo[slot], self._hi[slot], self._ns[slot])

    # --------------------------------------------------------------------------------------- allocation of slots

    def allocate(self) -> int:
        """A free slot, next to the last one given where possible; -1 when there is none."""
        if self._free == 0:
            return -1
        group = self._open_groups.find(1, self._cursor)
        if group < 0:
            group = self._open_groups.find(1)
        self._cursor = group
        first = group * _GROUP
        last = min(first + _GROUP, self.slots)
        flags = self._flag_bytes
        slot = flags.find(_FREE_BYTE, first, last)
        flags[slot] = RESERVED
        self._free -= 1
        if flags.find(_FREE_BYTE, slot + 1, last) < 0:
            self._open_groups[group] = 0
        return slot

    def release(self, slot: int) -> None:
        """Back to the pool. Raises ValueError if it is inserted or free already."""
        if self._flag_bytes[slot] != RESERVED:
            raise ValueError(f"slot {slot} cannot be released: it is {'in use' if self._flag_bytes[slot] else 'free'}")
        self._flag_bytes[slot] = FREE
        self._open_groups[slot // _GROUP] = 1
        self._free += 1

    def insert(
        self,
        slot: int,
        key_lo: int,
        key_hi: int,
        namespace: int,
        length: int,
        checksum: int,
        generation: int,
        stored_s: int,
        expires_s: int,
    ) -> None:
        """Put an allocated slot under its key, which must not be present. Raises ValueError if it is not allocated,
        inserted already, or of a namespace id never given out."""
        if self._flag_bytes[slot] != RESERVED:
            raise ValueError(f"slot {slot} cannot be inserted: it was not allocated, or is in use")
        if not 0 <= namespace < self._namespaces_given:
            raise ValueError(f"namespace id {namespace} was never given out")
        self._lo[slot] = key_lo
        self._hi[slot] = key_hi
        self._ns[slot] = namespace
        self.length_of[slot] = length
        self.checksum_of[slot] = checksum
        self._generation[slot] = generation
        self._stored_s[slot] = stored_s
        self._expires_s[slot] = expires_s
        self.key_hash.insert(slot, key_lo, key_hi, namespace)
        self._flag_bytes[slot] = USED
        self._used += 1
        self._namespace_bytes[namespace] += length

    def remove(self, slot: int) -> None:
        """Take a slot from under its key; it stays allocated. Raises ValueError if it is not inserted."""
        if self._flag_bytes[slot] != USED:
            raise ValueError(f"slot {slot} cannot be removed: it is not in use")
        namespace = self._ns[slot]
        self.key_hash.remove(slot, self._lo[slot], self._hi[slot], namespace)
        self._flag_bytes[slot] = RESERVED
        self._used -= 1
        self._namespace_bytes[namespace] -= self.length_of[slot]

    def adopt(self, used: int, namespace_bytes: npt.NDArray[np.int64]) -> None:
        """Take over columns, flags and hash that were filled from outside: `used` slots are inserted, none is
        reserved, and `namespace_bytes` are the totals by namespace id."""
        self._used = used
        self._free = self.slots - used
        self.namespace_bytes[: len(namespace_bytes)] = namespace_bytes
        padded = np.ones(len(self._open_groups) * _GROUP, np.bool_)
        np.not_equal(self.flags, FREE, out=padded[: self.slots])
        full = np.packbits(padded).view(np.uint64) == _ALL
        self._open_groups[:] = (~full).tobytes()

    # -------------------------------------------------------------------------------------------------- totals

    @property
    def used(self) -> int:
        """Slots inserted."""
        return self._used

    @property
    def free(self) -> int:
        """Slots that `allocate` can still give."""
        return self._free

    @property
    def memory_bytes(self) -> int:
        """Bytes of every array held."""
        columns = (
            self.key_lo,
            self.key_hi,
            self.checksum,
            self.length,
            self.generation,
            self.stored_s,
            self.expires_s,
            self.namespace,
            self.flags,
            self.namespace_bytes,
            self._digests,
        )
        return sum(column.nbytes for column in columns) + len(self._open_groups) + self.key_hash.memory_bytes

    def scan(self, cursor: int, limit: int, namespaces: set[int]) -> tuple[Slots, int]:
        """At most `limit` slots in use of the given namespaces, from `cursor` (0 at the start) on in slot order, and
        the cursor to go on with, 0 at the end. Few or none at a time where they are rare. What is inserted or removed
        meanwhile may or may not be seen."""
        found: list[Slots] = []
        count = 0
        wanted = np.array(sorted(namespaces), np.int64)
        end = min(cursor + SCAN_SLOTS_MAX, self.slots)
        while cursor < end and count < limit:
            last = min(cursor + _SCAN_CHUNK, end)
            slots = cursor + np.flatnonzero(self.flags[cursor:last] == USED)
            slots = slots[np.isin(self.namespace[slots], wanted)]
            if count + len(slots) > limit:
                slots = slots[: limit - count]
                last = int(slots[-1]) + 1
            found.append(slots)
            count += len(slots)
            cursor = last
        slots = np.concatenate(found) if found else np.zeros(0, np.int64)
        return slots, cursor if cursor < self.slots else 0
