"""Zeroed numpy arrays on huge pages, for the columns of an index; and memory given back.

With 4 KiB pages, first touching the arrays of ten million slots took 0.8 s of page faults, and each random access
missed the TLB too; with huge pages it takes a tenth. Where the kernel gives none, these are ordinary memory.
"""

from __future__ import annotations

import contextlib
import ctypes
import mmap
from typing import TypeVar

import numpy as np
import numpy.typing as npt

Scalar = TypeVar("Scalar", bound=np.generic)
_ADVICE: int | None = getattr(mmap, "MADV_HUGEPAGE", None)


def huge_memory(length_bytes: int) -> mmap.mmap:
    """Private zeroed memory, freed with its last reference. Unlike an array it can `find` a byte at C's speed."""
    memory = mmap.mmap(-1, max(length_bytes, 1), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if _ADVICE is not None:
        with contextlib.suppress(OSError):  # a kernel without transparent huge pages
            memory.madvise(_ADVICE)
    return memory


def huge_zeros(count: int, scalar: type[Scalar]) -> npt.NDArray[Scalar]:
    """A writable array of `count` zeros."""
    return np.frombuffer(huge_memory(count * np.dtype(scalar).itemsize), scalar, count)


def prepare_scratch() -> None:
    """Before work with many temporary arrays: make the allocator keep what is freed instead of asking the system for
    every array anew. glibc learns from the largest block freed so far, up to 32 MiB (mallopt(3), M_MMAP_THRESHOLD);
    untaught, opening ten million slots took 100,000 page faults, a second of them."""
    np.empty((32 << 20) - (64 << 10), np.uint8)


def give_back_scratch() -> None:
    """Return what was allocated and freed to the system, after work with large temporary arrays; without it, some
    ten megabytes stay with the allocator. Does nothing where the C library is not glibc."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)
