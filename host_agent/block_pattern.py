"""Block contents made from the block's key, so that every byte that comes back can be checked without a copy.

Every aligned 8-byte word names both its block and its place in it: a swapped, shifted, torn or stale piece of any
size is found and located. Used by the benchmark and by the emulator's demo; never part of the data path.
"""

from __future__ import annotations

import ctypes
from typing import Any, Final, TypeAlias

import numpy as np
import numpy.typing as npt
import xxhash

Words: TypeAlias = npt.NDArray[np.uint64]
WORD_BYTES: Final = 8
_CHUNK_WORDS: Final = 32768
"""256 KiB: what is compared at once, small enough to stay in the second-level cache."""

_memcmp = ctypes.CDLL(None).memcmp
_memcmp.argtypes = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t)
_memcmp.restype = ctypes.c_int


class BlockPattern:
    """Contents of blocks of up to `block_bytes_max` bytes: one pseudo-random tape, combined with a word that only
    the key determines. Two patterns with one seed agree in every process. Not thread-safe."""

    def __init__(self, block_bytes_max: int, seed: int = 0) -> None:
        words = -(-block_bytes_max // WORD_BYTES)
        self._tape: Words = np.random.Generator(np.random.PCG64(seed)).integers(0, 1 << 64, words, dtype=np.uint64)
        self._scratch: Words = np.empty(min(words, _CHUNK_WORDS), np.uint64)

    def fill(self, key: bytes, block: Any) -> None:
        """Write the contents of `key` over the whole of `block`, a writable buffer of whole 8-byte words.

        Raises ValueError for another length, or one beyond `block_bytes_max`.
        """
        words = self._words(block)
        np.bitwise_xor(self._tape[: len(words)], _key_word(key), out=words)

    def fill_pieces(self, key: bytes, pieces: Words) -> None:
        """`fill` for a block that lies in pieces of one length, in order: the rows of `pieces`, which may be apart."""
        np.bitwise_xor(self._tape[: pieces.size].reshape(pieces.shape), _key_word(key), out=pieces)

    def first_mismatch(self, key: bytes, block: Any) -> int | None:
        """Offset in bytes of the first word of `block` that is not as `fill` wrote it, None when all are.

        Raises ValueError like `fill`.
        """
        return self._mismatch_from(key, self._words(block), 0)

    def first_mismatch_pieces(self, key: bytes, pieces: Words) -> int | None:
        """`first_mismatch` for a block that lies in pieces, as `fill_pieces` takes them. The offset is the block's."""
        piece_words: int = pieces.shape[1]
        rows = _CHUNK_WORDS // piece_words
        for first in range(0, len(pieces), max(1, rows)):
            start = first * piece_words
            if rows == 0:
                offset = self._mismatch_from(key, pieces[first], start)
                if offset is not None:
                    return offset
                continue
            part = pieces[first : first + rows]
            expected = self._tape[start : start + part.size]
            if not self._equal(key, part, self._scratch[: part.size].reshape(part.shape), expected):
                return start * WORD_BYTES + _first_difference(key, part, expected)
        return None

    def _mismatch_from(self, key: bytes, words: Words, first: int) -> int | None:
        """Of contiguous `words` that stand in the block from word `first` on."""
        for start in range(0, len(words), _CHUNK_WORDS):
            part = words[start : start + _CHUNK_WORDS]
            expected = self._tape[first + start : first + start + len(part)]
            if not self._equal(key, part, self._scratch[: len(part)], expected):
                return (first + start) * WORD_BYTES + _first_difference(key, part, expected)
        return None

    @staticmethod
    def _equal(key: bytes, part: Words, scratch: Words, expected: Words) -> bool:
        decoded = np.bitwise_xor(part, _key_word(key), out=scratch)
        differ: int = _memcmp(decoded.ctypes.data, expected.ctypes.data, decoded.nbytes)
        return differ == 0

    def _words(self, block: Any) -> Words:
        view = memoryview(block).cast("B")
        if view.nbytes % WORD_BYTES or view.nbytes > self._tape.nbytes:
            raise ValueError(
                f"{view.nbytes} bytes: a patterned block is whole {WORD_BYTES}-byte words, at most {self._tape.nbytes}"
            )
        return np.frombuffer(view, np.uint64)


def _first_difference(key: bytes, part: Words, expected: Words) -> int:
    """In bytes from the start of `part`, which does differ."""
    return int(np.argmax((part ^ _key_word(key)).ravel() != expected)) * WORD_BYTES


def _key_word(key: bytes) -> np.uint64:
    word: np.uint64 = np.uint64(xxhash.xxh3_64_intdigest(key))
    return word
