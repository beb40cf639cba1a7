"""Per-block and per-capsule status codes: the data path answers, it does not raise.

The numbers are part of the wire format (`common.wire`): append, never renumber.
"""

from __future__ import annotations

from enum import IntEnum


class Status(IntEnum):
    """One block's outcome. OK and EXISTS are success; MISS is a normal answer."""

    OK = 0
    EXISTS = 1
    """STORE of a key that is present: nothing was moved."""
    MISS = 2
    """The block is not here (never stored, evicted, expired, or its bytes on flash were found damaged)."""
    BUSY = 3
    """Under pressure (window full, too much in flight): try later; for a STORE, drop it."""
    NO_SPACE = 4
    """No slot can be freed: every block is pinned, leased or in flight."""
    QUOTA_EXCEEDED = 5
    TOO_LARGE = 6
    """Longer than the region's slot_bytes."""
    BAD_LENGTH = 7
    """Zero-length value."""
    BAD_RANGE = 8
    """The byte range lies outside the block, or does not fit the destination list."""
    OVERLAP = 9
    """The destination overlaps that of an earlier entry of the batch."""
    DENIED = 10
    """The namespace handle is not one this session's tenant has opened."""
    DEADLINE = 11
    CANCELLED = 12
    TRANSFER_ERROR = 13
    """RDMA failed: memory not registered, wrong rkey, out of bounds, or the connection broke."""
    FLASH_ERROR = 14
    """Flash refused the write; nothing was stored."""
    CHECKSUM = 15
    """STORE: the bytes read from the source do not have the checksum the entry claims; nothing was stored."""
    IN_USE = 16
    """DELETE of a block that is leased or in flight."""
    BAD_REQUEST = 17
    """Malformed entry or capsule."""
    BAD_VERSION = 18
    """The capsule's version is not one this side speaks."""
    UNSUPPORTED = 19
    """Unknown operation, or one that this fabric cannot do."""
    DRAINING = 20
    """The region is shutting down: no new work."""
    DISCONNECTED = 21
    """Client side only: the connection was lost before an answer came."""
    DROPPED = 22
    """PREFETCH that was given up in favour of other work."""
    LATE = 23
    """PREFETCH that was delivered after its deadline."""
    NOT_ADMITTED = 24
    """STORE refused by the admission filter that limits flash wear."""
    CORRUPT = 25
    """Client side only: what arrived does not have the checksum the DPU states; treat as a miss."""

    @property
    def success(self) -> bool:
        return self in (Status.OK, Status.EXISTS)


class BlockState(IntEnum):
    """Where a present block is, as LOOKUP and LIST report it."""

    ABSENT = 0
    STAGED = 1
    """In a frame, not yet on flash."""
    FLASH = 2
    """On flash only."""
    STAGED_AND_FLASH = 3
