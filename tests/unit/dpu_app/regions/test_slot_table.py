"""The slot table's pages: the layout as it stands on flash, and what is taken for valid."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from dpu_app.regions.index import SlotIndex
from dpu_app.regions.slot_table import (
    ENTRY,
    ENTRY_BYTES,
    USED,
    damaged,
    decode_pages,
    encode_page,
    entry_checks,
    words_of,
)
from dpu_app.regions.superblock import ENTRIES_PER_PAGE, TABLE_PAGE_BYTES, Geometry, Superblock

GOLDEN = Path(__file__).parents[4] / "golden" / "flash"
SALT = 0x1122334455667788


def _index(slots: int = 200) -> SlotIndex:
    """Deterministic contents; every fifth slot is free, every seventh reserved."""
    index = SlotIndex(slots, seed=1)
    namespaces = [index.namespace_id(bytes([n + 1]) * 16) for n in range(3)]
    taken = [index.allocate() for _ in range(slots)]
    for slot in taken:
        if slot % 7 == 3:
            continue
        if slot % 5 == 4:
            index.release(slot)
            continue
        low = (slot + 1) * 0x9E3779B97F4A7C15 & 0xFFFFFFFFFFFFFFFF
        checksum = low ^ 0x5555
        index.insert(slot, low, low >> 3, namespaces[slot % 3], slot + 1, checksum, 9, 1_700_000_000 + slot, slot % 2)
    return index


def test_an_entry_is_64_bytes_and_one_sector_holds_whole_ones() -> None:
    assert ENTRY.itemsize == ENTRY_BYTES == 64


def test_the_layout_is_the_golden_one() -> None:
    superblock = Superblock(bytes(range(16)), 3, 6, False, "golden", 1_700_000_000, Geometry.fit(1 << 30, 1 << 20))
    assert superblock.encode() == (GOLDEN / "superblock_v1.bin").read_bytes()
    page = encode_page(_index(), 1, superblock.salt)
    assert page == (GOLDEN / "slot_table_page_v1.bin").read_bytes()


def test_round_trip() -> None:
    index = _index()
    pages = b"".join(encode_page(index, page, SALT) for page in range(4))
    entries, valid = decode_pages(pages, 0, SALT)
    used = index.flags == USED
    assert (valid[:200] == used).all()
    assert not valid[200:].any()
    assert len(damaged(words_of(pages), valid)) == 0
    slots = np.flatnonzero(used)
    for column in ("key_lo", "key_hi", "length", "generation", "checksum", "stored_s", "expires_s"):
        assert (entries[column][slots] == getattr(index, column)[slots]).all(), column
    digests = [entry.tobytes() for entry in entries["namespace"][slots]]
    assert digests == [index.namespace_digest(int(namespace)) for namespace in index.namespace[slots]]
    assert not entries[~valid].view(np.uint8).any()


def test_the_last_page_may_be_short() -> None:
    index = _index(70)
    page = encode_page(index, 1, SALT)
    assert len(page) == TABLE_PAGE_BYTES
    assert not any(page[6 * ENTRY_BYTES :])


def test_every_flipped_bit_costs_its_own_entry_alone() -> None:
    page = bytearray(encode_page(_index(), 0, SALT))
    before = decode_pages(bytes(page), 0, SALT)[1].copy()
    for bit in range(ENTRY_BYTES * 8):
        page[ENTRY_BYTES + bit // 8] ^= 1 << bit % 8
        valid = decode_pages(bytes(page), 0, SALT)[1]
        assert not valid[1]
        assert damaged(words_of(bytes(page)), valid).tolist() == [1]
        assert (np.delete(valid, 1) == np.delete(before, 1)).all()
        page[ENTRY_BYTES + bit // 8] ^= 1 << bit % 8


def test_every_pair_of_flipped_bits_is_noticed() -> None:
    """Among them those that a sum would let cancel out: the top bits of two words."""
    entry = words_of(encode_page(_index(), 0, SALT))[1]
    bits = 480 + np.zeros((1, 1), np.int64)
    first, second = np.triu_indices(int(bits[0, 0]), k=1)
    columns = np.repeat(entry[:, None], len(first), axis=1)
    for bit in (first, second):
        columns[bit // 64, np.arange(len(bit))] ^= np.uint64(1) << (bit % 64).astype(np.uint64)
    checks = entry_checks(columns, np.ones(len(first), np.uint64), SALT)
    assert int(np.count_nonzero(checks == entry[7] >> np.uint64(32))) == 0


def test_a_page_of_another_place_or_region_is_refused() -> None:
    index = _index()
    page = encode_page(index, 0, SALT)
    assert not decode_pages(page, ENTRIES_PER_PAGE, SALT)[1].any()
    assert not decode_pages(page, 0, SALT + 1)[1].any()
    assert len(damaged(words_of(page), decode_pages(page, 0, SALT + 1)[1])) > 40


def test_unknown_flags_and_reserved_bits_are_refused() -> None:
    page = bytearray(encode_page(_index(), 0, SALT))
    entries = np.frombuffer(page, ENTRY)
    for field, value in (("flags", 3), ("flags", 0), ("reserved", 1)):
        entries[1][field] = value
        columns = np.ascontiguousarray(words_of(page)[1:2].T)
        entries[1]["check"] = entry_checks(columns, np.ones(1, np.uint64), SALT)[0]
        assert not decode_pages(page, 0, SALT)[1][1], field
        entries[1]["flags"], entries[1]["reserved"] = USED, 0


def test_noise_is_never_valid() -> None:
    noise = np.random.default_rng(3).bytes(64 * TABLE_PAGE_BYTES)
    _, valid = decode_pages(noise, 0, SALT)
    assert not valid.any()
    assert len(damaged(words_of(noise), valid)) == len(valid)


def test_pages_are_whole() -> None:
    with pytest.raises(ValueError):
        decode_pages(bytes(100), 0, SALT)
