"""Turns a batch's entries into the client memory each one names, and refuses what does not add up.

Entry and element fields come from the peer and are untrusted; whether memory is really registered is for the
fabric to say. Used by the store path (sources) and the load path (destinations).
"""

from __future__ import annotations

import itertools

import numpy as np
import numpy.typing as npt

from common.wire import MAX_SGES_PER_ENTRY, Capsule

Piece = tuple[int, int, int]
"""Address, length, rkey of client memory."""


def resolve(capsule: Capsule, default_length: int) -> tuple[list[list[Piece]], npt.NDArray[np.bool_]]:
    """Per entry its pieces, and a mask of the entries that are well formed. An entry with one element has its
    own `length` there, or `default_length` where that is 0."""
    entries = capsule.entries
    counts = entries["sge_count"].astype(np.int64)
    lengths = entries["length"]
    addresses = entries["address"]
    valid = (counts >= 1) & (counts <= MAX_SGES_PER_ENTRY)
    many = counts > 1
    if many.any():
        first = addresses.astype(np.float64)  # far beyond any list where it does not fit exactly
        valid &= ~many | (first + counts <= len(capsule.sges))
    pieces: list[list[Piece]] = [
        [(address, length or default_length, rkey)]
        for address, length, rkey in zip(addresses.tolist(), lengths.tolist(), entries["rkey"].tolist())
    ]
    for index in np.flatnonzero(many).tolist():
        if valid[index]:
            start = int(addresses[index])
            pieces[index] = capsule.sges[start : start + int(counts[index])].tolist()
    return pieces, valid


def take(pieces: list[Piece], wanted: int) -> list[Piece] | None:
    """The first `wanted` bytes of the list, or None when it is too short."""
    out: list[Piece] = []
    for address, length, rkey in pieces:
        if length >= wanted:
            out.append((address, wanted, rkey))
            return out
        if length:
            out.append((address, length, rkey))
        wanted -= length
    return None


def overlapping(pieces: list[list[Piece]], candidates: list[int]) -> set[int]:
    """Of `candidates` (entry numbers), those to refuse because memory overlaps: of a chain of overlapping pieces
    only its earliest entry is served, and not even that where it overlaps itself."""
    spans = [
        (address, address + length, entry) for entry in candidates for address, length, _ in pieces[entry] if length
    ]
    if len(spans) < 2:
        return set()
    starts = np.fromiter((span[0] for span in spans), np.float64, len(spans))
    ordered = [spans[i] for i in np.argsort(starts, kind="stable").tolist()]
    if all(a[1] <= b[0] for a, b in itertools.pairwise(ordered)):
        return set()
    bad: set[int] = set()
    end = -1
    chain: list[int] = []
    for start, stop, entry in sorted(ordered):
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
