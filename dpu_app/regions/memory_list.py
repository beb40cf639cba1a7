"""Which client memory an entry names, and which entries of a batch would write over each other.

Entry and element fields come from the peer and are untrusted; whether memory is really registered is for the
fabric to say. Used by the store path (sources) and the load path (destinations).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from common.status import Status
from common.wire import MAX_SGES_PER_ENTRY, Capsule

Piece = tuple[int, int, int]
"""Address, length, rkey of client memory."""

Row = Sequence[Any]
"""One BLOCK_ENTRY as `entries.tolist()` gives it; its columns by number:"""
KEY_LO, KEY_HI, NAMESPACE, LENGTH, OFFSET, FLAGS, SGE_COUNT, ADDRESS, RKEY, TTL_S, CHECKSUM = range(11)


def pieces_of(capsule: Capsule, row: Row, count: int) -> list[Piece] | Status:
    """The first `count` bytes of the memory that an entry names, or why not: BAD_REQUEST for a malformed list,
    BAD_RANGE for one that is too short."""
    sge_count = row[SGE_COUNT]
    if sge_count == 1:
        return [(row[ADDRESS], count, row[RKEY])]
    first = row[ADDRESS]
    if not 0 < sge_count <= MAX_SGES_PER_ENTRY or first + sge_count > len(capsule.sges):
        return Status.BAD_REQUEST
    pieces: list[Piece] = []
    for address, length, rkey in capsule.sges[first : first + sge_count].tolist():
        if length >= count:
            pieces.append((address, count, rkey))
            return pieces
        if length:
            pieces.append((address, length, rkey))
        count -= length
    return Status.BAD_RANGE


def overlapping(memory: Sequence[list[Piece]], entries: Sequence[int]) -> set[int]:
    """Of `entries`, those to refuse because their pieces of `memory` overlap: of a chain of overlapping pieces only
    its earliest entry is served, and not even that where it overlaps itself."""
    spans = [(address, address + length, entry) for entry in entries for address, length, _ in memory[entry]]
    end = 0
    for start, stop, _ in spans:
        if start < end:
            break
        end = stop
    else:
        return set()  # ascending already, as destinations usually are
    bad: set[int] = set()
    end = 0
    chain: list[int] = []
    for start, stop, entry in sorted(spans):
        if start >= end:
            bad |= _losers(chain)
            chain = []
        chain.append(entry)
        end = max(end, stop)
    return bad | _losers(chain)


def _losers(chain: list[int]) -> set[int]:
    if len(chain) < 2:
        return set()
    first = min(chain)
    return set(chain) if chain.count(first) > 1 else set(chain) - {first}
