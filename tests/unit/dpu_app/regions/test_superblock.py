"""Geometry and superblocks: what fits, what is refused and why, and which copy is in force."""

from __future__ import annotations

import struct
from dataclasses import replace

import pytest
import xxhash
from hypothesis import given
from hypothesis import strategies as st

from common.errors import UserError
from dpu_app.regions.superblock import (
    SLOTS_MIN,
    SUPERBLOCK_BYTES,
    SUPERBLOCK_OFFSETS,
    TABLE_OFFSET,
    Geometry,
    NewerVersionError,
    Superblock,
    SuperblockError,
    choose,
    is_blank,
)

GEOMETRY = Geometry.fit(1 << 30, 65536)
SUPERBLOCK = Superblock(bytes(range(16)), 7, 12, True, "région-0", 1_800_000_000, GEOMETRY)


def _resealed(block: bytes, offset: int, data: bytes) -> bytes:
    changed = bytearray(block[:-8])
    changed[offset : offset + len(data)] = data
    return bytes(changed) + struct.pack("<Q", xxhash.xxh3_64_intdigest(bytes(changed)))


@given(
    capacity_bytes=st.integers(min_value=8 << 20, max_value=1 << 46),
    slot_bytes=st.integers(min_value=1, max_value=1024).map(lambda pages: pages * 4096),
)
def test_as_many_slots_as_fit(capacity_bytes: int, slot_bytes: int) -> None:
    try:
        geometry = Geometry.fit(capacity_bytes, slot_bytes)
    except UserError:
        assert capacity_bytes < TABLE_OFFSET + (1 << 20) + SLOTS_MIN * slot_bytes
        return
    assert geometry.problem() is None
    assert geometry.data_offset % (1 << 20) == 0
    assert geometry.page_offset(geometry.pages) <= geometry.data_offset
    assert geometry.slot_offset(geometry.slots) <= capacity_bytes
    more = replace(geometry, slots=geometry.slots + 1)
    needed = -(-(more.table_offset + more.table_bytes) // (1 << 20)) * (1 << 20) + more.slots * slot_bytes
    assert needed > capacity_bytes or geometry.slots == 1 << 31


@pytest.mark.parametrize("slot_bytes", [0, -4096, 1000, 4097, 1 << 31])
def test_bad_slot_sizes_say_what_to_do(slot_bytes: int) -> None:
    with pytest.raises(UserError, match="multiple of 4096"):
        Geometry.fit(1 << 40, slot_bytes)


def test_too_small_says_how_much_it_takes() -> None:
    with pytest.raises(UserError, match="give it") as refused:
        Geometry.fit(1 << 20, 65536)
    needed = next(int(word) for word in str(refused.value).split("give it ")[1].split() if word.isdigit())
    assert Geometry.fit(needed, 65536).slots == SLOTS_MIN
    with pytest.raises(UserError):
        Geometry.fit(needed - 1, 65536)


def test_round_trip() -> None:
    block = SUPERBLOCK.encode()
    assert len(block) == SUPERBLOCK_BYTES
    assert Superblock.decode(block) == SUPERBLOCK
    assert Superblock.decode(replace(SUPERBLOCK, clean=False).encode()).clean is False


def test_copies_alternate() -> None:
    assert [replace(SUPERBLOCK, sequence=n).offset for n in (0, 1, 2)] == [*SUPERBLOCK_OFFSETS, SUPERBLOCK_OFFSETS[0]]


@pytest.mark.parametrize("name", ["", "x" * 65, "a\nb"])
def test_bad_names(name: str) -> None:
    with pytest.raises(UserError, match="region name"):
        replace(SUPERBLOCK, name=name).encode()


@given(bit=st.integers(min_value=0, max_value=SUPERBLOCK_BYTES * 8 - 1))
def test_any_flipped_bit_is_noticed(bit: int) -> None:
    block = bytearray(SUPERBLOCK.encode())
    block[bit // 8] ^= 1 << bit % 8
    with pytest.raises(SuperblockError) as refused:
        Superblock.decode(bytes(block))
    assert ("magic" if bit < 64 else "checksum") in str(refused.value)


@given(st.binary(max_size=5000))
def test_any_bytes_are_refused_in_order(block: bytes) -> None:
    with pytest.raises(SuperblockError):
        Superblock.decode(block)


def test_refusals_are_distinct() -> None:
    block = SUPERBLOCK.encode()
    with pytest.raises(NewerVersionError, match="newer"):
        Superblock.decode(_resealed(block, 8, struct.pack("<H", 2)))
    with pytest.raises(SuperblockError, match="never released"):
        Superblock.decode(_resealed(block, 8, struct.pack("<H", 0)))
    with pytest.raises(SuperblockError, match="blank"):
        Superblock.decode(bytes(SUPERBLOCK_BYTES))
    with pytest.raises(SuperblockError, match="cut short"):
        Superblock.decode(block[:100])
    with pytest.raises(SuperblockError, match="contradicts"):
        Superblock.decode(replace(SUPERBLOCK, geometry=replace(GEOMETRY, slots=1 << 30)).encode())
    with pytest.raises(SuperblockError, match="contradicts"):
        Superblock.decode(_resealed(block, 10, struct.pack("<H", 8)))


def test_the_newest_valid_copy_is_chosen() -> None:
    older, newer = replace(SUPERBLOCK, sequence=4).encode(), replace(SUPERBLOCK, sequence=5).encode()
    assert choose([older, newer]) == (replace(SUPERBLOCK, sequence=5), [])
    chosen, messages = choose([older, newer[:-1] + bytes([newer[-1] ^ 1])])
    assert chosen == replace(SUPERBLOCK, sequence=4)
    assert len(messages) == 1
    assert "copy 1" in messages[0]
    assert choose([bytes(4096), b"x" * 4096])[0] is None
    assert choose([b"", newer])[0] == replace(SUPERBLOCK, sequence=5)


def test_a_newer_version_beside_an_older_copy_is_not_passed_over() -> None:
    block = SUPERBLOCK.encode()
    with pytest.raises(NewerVersionError):
        choose([block, _resealed(block, 8, struct.pack("<H", 2))])


def test_blank() -> None:
    assert is_blank(bytes(4096))
    assert is_blank(memoryview(bytearray(4096)))
    assert not is_blank(bytes(4095) + b"\1")
