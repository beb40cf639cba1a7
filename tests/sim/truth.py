"""What the simulation knows to be true of each block, and the violation it raises when the engine contradicts it.

A block's bytes follow from its namespace and number alone, so every delivered byte can be judged. Faults of flash
excuse the slots they touched, and nothing else. Used by the simulated clients and the world that drives them.
"""

from __future__ import annotations

import hashlib
import random
from dataclasses import dataclass

import xxhash

NEVER = 1 << 62
"""A step that no request arrives after."""


class Violation(Exception):
    """The engine broke a promise."""


def require(condition: bool, what: str) -> None:
    if not condition:
        raise Violation(what)


@dataclass
class Block:
    """One (namespace, key) and what is known of it. `..._at` are steps of the world: what an answer says of a request
    that arrived at an earlier step may be older than that."""

    digest: bytes
    number: int
    key: bytes
    value: bytes
    checksum: int
    stores_sent: int = 0
    stores_open: int = 0
    deletes_open: int = 0
    deleted_at: int = 0
    """When its last DELETE or UNPIN was closed: what arrived before may have come true before it."""
    unpins_open: int = 0
    on_flash_at: int = NEVER
    """Answered as being on flash, and nothing since then may have removed it."""
    gone_at: int = NEVER
    """Its DELETE was answered OK, and nobody has stored it since."""
    sure: bool = False
    """It was whole when it was last heard of in this life of the region. What recovery found is only a claim until it
    is read."""
    pinned_at: int = NEVER
    pinned_until_ns: int = 0
    expires_wall_ns: int = 0
    expires_sent: int = -1
    """Its last STORE named a TTL that is over at this time (0: unknown), and how many had been sent by then."""
    mortal: bool = False
    """Was ever stored with a TTL, so that it may vanish by itself."""
    last_hit_by: int = 0
    """The session that retrieved it last."""
    excused: bool = False
    excused_at: int = 0
    """Flash was told to lose or damage it, or the block that had its place in the slot table."""

    def may_vanish(self) -> None:
        """Something may have removed it."""
        self.on_flash_at = NEVER
        self.pinned_at = NEVER


class Truth:
    """All blocks of all namespaces. `lengths_max` is the region's slot_bytes."""

    def __init__(self, seed: int, digests: list[bytes], keys: int, slot_bytes: int) -> None:
        self.blocks: dict[tuple[bytes, bytes], Block] = {}
        self.of: dict[bytes, list[Block]] = {}
        source = random.Random(seed)
        # The same keys in every namespace: a hit across namespaces would be a hit on other bytes.
        names = [(xxhash.xxh3_128_digest(b"key %d %d" % (seed, number)), number) for number in range(keys)]
        for digest in digests:
            row = []
            for key, number in names:
                length = source.choice(
                    (1, 7, 511, 512, 4096, slot_bytes - 1, slot_bytes, source.randint(1, slot_bytes))
                )
                value = hashlib.shake_128(digest + key).digest(min(length, slot_bytes))
                block = Block(digest, number, key, value, xxhash.xxh3_64_intdigest(value))
                row.append(block)
                self.blocks[(digest, key)] = block
            self.of[digest] = row

    def find(self, digest: bytes, key: bytes) -> Block | None:
        return self.blocks.get((digest, key))
