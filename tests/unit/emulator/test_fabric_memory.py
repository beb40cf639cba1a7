"""Emulated fabric memory: shareable, sealed, replaceable by a private copy, and not lost under a view."""

from __future__ import annotations

import ctypes
import errno
import mmap
import os

import pytest

from doca_shims.api import ShimError
from emulator.fabric_memory import (
    HUGE_PAGE_BYTES,
    MemfdMemory,
    check_mapped,
    is_sealed,
    page_sizes_bytes,
)


def test_another_mapping_of_the_descriptor_shows_the_same_bytes() -> None:
    memory = MemfdMemory(10_000, 4096)
    assert memory.fd is not None
    with mmap.mmap(memory.fd, 12288) as other:
        other[9999:10000] = b"z"
        assert memory.view[9999] == ord("z")
    memory.close()
    assert memory.fd is None


def test_nobody_can_truncate_it() -> None:
    memory = MemfdMemory(4096, 4096)
    assert memory.fd is not None
    assert is_sealed(memory.fd)
    with pytest.raises(PermissionError):
        os.ftruncate(memory.fd, 0)
    memory.close()


def test_a_view_outlives_close() -> None:
    memory = MemfdMemory(4096, 4096)
    view = memoryview(memory.view)
    array = (ctypes.c_char * 10).from_buffer(view)
    view.release()
    memory.close()
    array[0] = b"x"
    assert array[0] == b"x"


def test_close_waits_for_its_regions() -> None:
    memory = MemfdMemory(4096, 4096)
    memory.hold()
    with pytest.raises(ShimError) as caught:
        memory.close()
    assert caught.value.errno == errno.EBUSY
    memory.release()
    memory.close()
    memory.close()
    with pytest.raises(ShimError):
        memory.hold()


@pytest.mark.parametrize("page", page_sizes_bytes())
def test_private_pages_keep_their_bytes_and_lose_the_writer(page: int) -> None:
    memory = MemfdMemory(5 * page, page)
    assert memory.fd is not None
    other = mmap.mmap(memory.fd, 5 * page)
    memory.view[:] = bytes(range(256)) * (5 * page // 256)
    before = bytes(memory.view)
    memory.make_private(memory.address + page + 1000, 100)
    assert bytes(memory.view) == before
    assert memory.fd is None
    other[:] = b"\xee" * len(other)
    assert bytes(memory.view[page : 2 * page]) == before[page : 2 * page]
    assert bytes(memory.view[:page]) == b"\xee" * page
    other.close()
    memory.close()


def test_page_sizes_are_what_can_be_allocated() -> None:
    assert page_sizes_bytes()[0] == mmap.PAGESIZE
    for size in page_sizes_bytes():
        memory = MemfdMemory(1, size)
        assert memory.address % size == 0
        memory.close()
    if HUGE_PAGE_BYTES not in page_sizes_bytes():
        with pytest.raises(ShimError) as caught:
            MemfdMemory(1, HUGE_PAGE_BYTES)
        assert caught.value.errno == errno.EINVAL


def test_only_mapped_memory_passes() -> None:
    mapping = mmap.mmap(-1, 3 * mmap.PAGESIZE)
    address = ctypes.addressof(ctypes.c_char.from_buffer(mapping))
    check_mapped(address, len(mapping), True)
    libc = ctypes.CDLL(None)
    libc.munmap(ctypes.c_void_p(address + mmap.PAGESIZE), ctypes.c_size_t(mmap.PAGESIZE))
    check_mapped(address, mmap.PAGESIZE, True)
    for start, length in ((address, mmap.PAGESIZE + 1), (address + mmap.PAGESIZE, 1), (address, 3 * mmap.PAGESIZE)):
        with pytest.raises(ShimError) as caught:
            check_mapped(start, length, False)
        assert caught.value.errno == errno.EFAULT
    # The hole is filled again before `mapping` unmaps the whole range, so that nothing else is caught by that.
    libc.mmap.restype = ctypes.c_void_p
    fixed = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | 0x10
    libc.mmap(ctypes.c_void_p(address + mmap.PAGESIZE), ctypes.c_size_t(mmap.PAGESIZE), 3, fixed, -1, 0)
