"""Emulated fabric memory: shareable, sealed, replaceable by a private copy, and not lost under a view."""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
from pathlib import Path

import pytest

from doca_shims.api import ShimError
from emulator.fabric_memory import (
    HUGE_PAGE_BYTES,
    MemfdMemory,
    check_mapped,
    create_memfd,
    is_sealed,
    map_shared,
    page_sizes_bytes,
    unmap,
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
    try:
        memory = MemfdMemory(5 * page, page)
    except ShimError as error:
        if page == mmap.PAGESIZE or error.errno != errno.ENOMEM:
            raise
        pytest.skip(f"others have taken the pages of {page} bytes that were set up")
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


def _huge_bytes(address: int) -> int:
    """What the kernel says of the mapping that begins there, or 0."""
    fields: dict[str, str] = {}
    inside = False
    with open("/proc/self/smaps", encoding="ascii", errors="replace") as maps:
        for line in maps:
            name, _, rest = line.partition(" ")
            if name.endswith(":"):
                if inside:
                    fields[name] = rest
            else:
                inside = int(name.partition("-")[0], 16) == address
    return int(fields.get("ShmemPmdMapped:", "0 kB").split()[0]) * 1024


def test_large_memory_is_aligned_keeps_its_bytes_and_gets_huge_pages_where_the_kernel_can() -> None:
    length = 3 * HUGE_PAGE_BYTES + 5000
    memory = MemfdMemory(length, mmap.PAGESIZE)
    memory.view[:] = bytes(range(250)) * (length // 250) + b"x" * (length % 250)
    before = bytes(memory.view)
    memory.hold()
    assert memory.address % HUGE_PAGE_BYTES == 0
    assert bytes(memory.view) == before
    assert memory.fd is not None
    address = map_shared(memory.fd, memory.mapped_bytes)
    assert address % HUGE_PAGE_BYTES == 0
    assert ctypes.string_at(address, length) == before
    huge = _huge_bytes(memory.address)
    unmap(address, memory.mapped_bytes)
    memory.release()
    memory.close()
    control = MemfdMemory(HUGE_PAGE_BYTES, mmap.PAGESIZE)
    control.view[0] = 1
    collapsed = ctypes.CDLL(None).madvise(ctypes.c_void_p(control.address), ctypes.c_size_t(HUGE_PAGE_BYTES), 25) == 0
    control.close()
    if not collapsed:
        pytest.skip("this kernel does not make huge pages of a memfd's small ones, or has none left")
    assert huge == 3 * HUGE_PAGE_BYTES


def test_a_mapping_of_any_length_leaves_nothing_beside_it() -> None:
    def mapped() -> int:
        with open("/proc/self/maps", encoding="ascii", errors="replace") as maps:
            return sum(1 for _ in maps)

    for length in (1, HUGE_PAGE_BYTES - 1, HUGE_PAGE_BYTES, HUGE_PAGE_BYTES + 1, 2 * HUGE_PAGE_BYTES + 4096):
        fd = create_memfd("test", length)
        before = mapped()
        address = map_shared(fd, length)
        ctypes.memset(address + length - 1, 7, 1)
        assert mapped() <= before + 1
        unmap(address, length)
        assert mapped() <= before
        os.close(fd)


def test_a_large_mapping_that_cannot_be_made_leaves_nothing() -> None:
    with pytest.raises(OSError, match="Bad file descriptor"):
        map_shared(-1, 3 * HUGE_PAGE_BYTES)
    with open("/proc/self/maps", encoding="ascii", errors="replace") as maps:
        spans = [
            [int(part, 16) for part in line.split()[0].split("-")] for line in maps if " ---p 00000000 00:00 0" in line
        ]
    assert 4 * HUGE_PAGE_BYTES not in [high - low for low, high in spans]


def test_pages_are_there_from_the_start() -> None:
    """Flash pins them before any agent registers them, and pinned small pages never become huge ones."""
    memory = MemfdMemory(4 << 20, mmap.PAGESIZE)
    maps = Path("/proc/self/smaps").read_text()
    mine = maps[maps.index(f"{memory.address:x}-") :]
    resident = next(line for line in mine.splitlines() if line.startswith("Rss:"))
    assert int(resident.split()[1]) == 4096
    memory.close()
