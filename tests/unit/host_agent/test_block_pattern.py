"""Patterned contents: every wrong word is found, whatever went wrong."""

from __future__ import annotations

import numpy as np
import pytest

from host_agent.block_pattern import BlockPattern

KEY, OTHER = bytes(range(16)), bytes(range(1, 17))


def _filled(pattern: BlockPattern, key: bytes, length: int) -> bytearray:
    block = bytearray(length)
    pattern.fill(key, block)
    return block


@pytest.mark.parametrize("length", [8, 4096, 262144, 262144 + 8, 600_000])
def test_what_was_filled_matches(length: int) -> None:
    pattern = BlockPattern(1 << 20)
    assert pattern.first_mismatch(KEY, _filled(pattern, KEY, length)) is None
    assert BlockPattern(1 << 20).first_mismatch(KEY, _filled(pattern, KEY, length)) is None


@pytest.mark.parametrize("offset", [0, 7, 4095, 262143, 262144, 299_999])
def test_one_flipped_bit_is_located(offset: int) -> None:
    pattern = BlockPattern(1 << 20)
    block = _filled(pattern, KEY, 300_000)
    block[offset] ^= 0x10
    assert pattern.first_mismatch(KEY, block) == offset - offset % 8


def test_another_blocks_and_another_places_bytes_are_found() -> None:
    pattern = BlockPattern(1 << 20)
    block, other = _filled(pattern, KEY, 65536), _filled(pattern, OTHER, 65536)
    assert pattern.first_mismatch(KEY, other) == 0
    mixed = bytes(block[:8192] + other[8192:12288] + block[12288:])
    assert pattern.first_mismatch(KEY, mixed) == 8192
    shifted = bytes(block[:4096] + block[8192:12288] + block[8192:])
    assert pattern.first_mismatch(KEY, shifted) == 4096
    assert pattern.first_mismatch(KEY, bytes(65536)) == 0


def test_every_page_of_every_block_differs() -> None:
    pattern = BlockPattern(1 << 20)
    pages: set[bytes] = set()
    for number in range(16):
        block = _filled(pattern, number.to_bytes(16, "little"), 1 << 20)
        pages.update(bytes(block[start : start + 4096]) for start in range(0, len(block), 4096))
    assert len(pages) == 16 * 256


def test_typed_memory_is_filled_and_bad_lengths_are_refused() -> None:
    pattern = BlockPattern(4096)
    array = np.zeros((4, 128), np.float64)
    pattern.fill(KEY, array)
    assert pattern.first_mismatch(KEY, array) is None
    for length in (4, 4104):
        with pytest.raises(ValueError, match="whole 8-byte words"):
            pattern.fill(KEY, bytearray(length))


@pytest.mark.parametrize(("pieces", "piece_words"), [(80, 512), (1, 262_144), (3, 40_000), (2, 32_768), (7, 1)])
def test_pieces_of_a_block_that_lie_apart(pieces: int, piece_words: int) -> None:
    pattern = BlockPattern(2 << 20)
    pools = np.zeros((pieces, 5, piece_words), np.uint64)
    pattern.fill_pieces(KEY, pools[:, 3])
    assert pattern.first_mismatch_pieces(KEY, pools[:, 3]) is None
    whole = np.ascontiguousarray(pools[:, 3])
    assert pattern.first_mismatch(KEY, whole) is None, "the pieces in order are the block"
    assert not pools[:, [0, 1, 2, 4]].any()
    for place in (pieces * piece_words - 1, pieces * piece_words // 2, 0):
        pools[place // piece_words, 3, place % piece_words] ^= np.uint64(1)
        assert pattern.first_mismatch_pieces(KEY, pools[:, 3]) == 8 * place
