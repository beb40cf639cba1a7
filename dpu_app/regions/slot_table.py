"""The slot table's pages: one 64-byte entry per slot, 64 entries to a page, coded and decoded in bulk.

Owns the entry's layout and its check; never touches a device. An entry's check covers its 60 bytes, its slot number
and the region's salt, so a page torn, misplaced or left from another region costs its own entries and no more. The
engine encodes dirty pages, `recovery` decodes the whole table. The layout is held by tests/golden/flash.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, TypeAlias

import numpy as np
import numpy.typing as npt

from dpu_app.regions.superblock import ENTRIES_PER_PAGE, TABLE_PAGE_BYTES

if TYPE_CHECKING:
    from dpu_app.regions.index import SlotIndex

Entries: TypeAlias = npt.NDArray[np.void]
Words: TypeAlias = npt.NDArray[np.uint64]
Mask: TypeAlias = npt.NDArray[np.bool_]

ENTRY = np.dtype(
    [
        ("key_lo", "<u8"),
        ("key_hi", "<u8"),
        ("namespace", "V16"),
        ("length", "<u4"),
        ("generation", "<u4"),
        ("checksum", "<u8"),
        ("stored_s", "<u4"),
        ("expires_s", "<u4"),
        ("flags", "<u2"),
        ("reserved", "<u2"),
        ("check", "<u4"),
    ]
)
"""`checksum` is the XXH3-64 of the value; times are seconds since 1970, `expires_s` 0 means never."""

ENTRY_BYTES = TABLE_PAGE_BYTES // ENTRIES_PER_PAGE
USED = 1
WORDS = ENTRY_BYTES // 8
"""An entry is also eight little-endian u64 words: key_lo, key_hi, namespace (two), length | generation << 32,
checksum, stored_s | expires_s << 32, flags | reserved << 16 | check << 32."""

CHUNK = 4096
"""Entries decoded at a time, so that words and temporaries stay in a core's second-level cache."""
_LOW = np.uint64(0xFFFFFFFF)
_HALF = np.uint64(32)
_SHIFT = np.uint64(29)
_SLOT_FACTOR = np.uint64(0x9E3779B97F4A7C15)
_FACTORS = tuple(
    np.uint64(factor)
    for factor in (
        0xBF58476D1CE4E5B9,
        0x94D049BB133111EB,
        0xD6E8FEB86659FD93,
        0xA0761D6478BD642F,
        0xE7037ED1A0B428DB,
        0x8EBC6AF09C88C6E3,
        0x589965CC75374CC3,
        0x1D8E4E27C47D124F,
    )
)


def entry_checks(columns: Words, slots: Words, salt: int) -> Words:
    """The 32-bit checks, as u64, of entries given as an (8, n) array of words at the given slot numbers.

    A chain of bijective steps over all words, slot and salt: entries that differ in one word differ until the last
    step cuts 64 bits to 32, so anything else passes for valid with a chance of 2**-32.
    """
    state: Words = slots * _SLOT_FACTOR
    state ^= np.uint64(salt)
    other = np.empty_like(state)
    for number, factor in enumerate(_FACTORS):
        word = columns[number]
        if number == WORDS - 1:
            word = np.bitwise_and(word, _LOW, out=other)
        np.bitwise_xor(state, word, out=state)
        np.multiply(state, factor, out=state)
        np.right_shift(state, _SHIFT, out=other)
        np.bitwise_xor(state, other, out=state)
    np.right_shift(state, _HALF, out=state)
    return state


def encode_page(index: SlotIndex, page: int, salt: int) -> bytes:
    """TABLE_PAGE_BYTES bytes of the slot table from the index's columns. Slots not in use, or past the end, are 0."""
    first = page * ENTRIES_PER_PAGE
    part = slice(first, min(first + ENTRIES_PER_PAGE, index.slots))
    used = index.flags[part] == USED
    count = len(used)
    out = np.zeros((ENTRIES_PER_PAGE, WORDS), "<u8")
    columns = np.empty((WORDS, count), np.uint64)
    columns[0] = index.key_lo[part]
    columns[1] = index.key_hi[part]
    digests = index.namespace_digests(index.namespace[part] * used)  # what an unused slot says there means nothing
    columns[2:4] = digests.view("<u8").reshape(-1, 2).T
    _pair(columns[4], index.length[part], index.generation[part])
    columns[5] = index.checksum[part]
    _pair(columns[6], index.stored_s[part], index.expires_s[part])
    columns[7] = USED
    checks = entry_checks(columns, np.arange(first, first + count, dtype=np.uint64), salt)
    np.left_shift(checks, _HALF, out=checks)
    columns[7] |= checks
    columns *= used
    out[:count] = columns.T
    return out.tobytes()


def _pair(out: Words, low: npt.NDArray[np.uint32], high: npt.NDArray[np.uint32]) -> None:
    out[:] = high
    np.left_shift(out, _HALF, out=out)
    np.bitwise_or(out, low, out=out)


def decode_columns(words: Words, first_slot: int, salt: int) -> tuple[Words, Mask]:
    """The (n, 8) words of entries from `first_slot` on as an (8, n) array of columns, and which entries are valid:
    what a caller in a hurry uses, CHUNK entries at a time."""
    columns = _columns(words)
    last = columns[WORDS - 1]
    if not last.any():
        return columns, np.zeros(len(words), np.bool_)  # nothing has a check: nothing is used
    checks = entry_checks(columns, np.arange(first_slot, first_slot + len(words), dtype=np.uint64), salt)
    np.left_shift(checks, _HALF, out=checks)
    np.bitwise_or(checks, np.uint64(USED), out=checks)
    return columns, np.equal(checks, last)


def decode_pages(buffer: bytes | bytearray | memoryview, first_slot: int, salt: int) -> tuple[Entries, Mask]:
    """Entries (a view of `buffer`, whole pages that begin with `first_slot`), and which of them are valid.

    An entry that is not valid is unused where its 64 bytes are zero, and damaged otherwise (`damaged`).
    """
    entries = np.frombuffer(buffer, ENTRY)
    words = words_of(buffer)
    valid = np.zeros(len(entries), np.bool_)
    for start in range(0, len(entries), CHUNK):
        valid[start : start + CHUNK] = decode_columns(words[start : start + CHUNK], first_slot + start, salt)[1]
    return entries, valid


def words_of(buffer: bytes | bytearray | memoryview) -> Words:
    """Entries as an (n, 8) array of words, a view of `buffer`."""
    return np.frombuffer(buffer, "<u8").reshape(-1, WORDS)


def damaged(words: Words, valid: Mask) -> npt.NDArray[np.int64]:
    """Positions of entries, given as (n, 8) words, that are neither valid nor unused."""
    suspects = np.flatnonzero(~valid)
    if len(suspects) == len(words):
        return np.flatnonzero(words.any(axis=1))
    return suspects[words[suspects].any(axis=1)]


def _columns(words: Words) -> Words:
    return np.ascontiguousarray(words.T)
