"""Memory of the emulated fabrics: memfd objects that another process can map, and checks of memory merely given.

Owns the memfd and this process's mapping of it. Knows nothing of keys, connections or peers; `fabric_core`
registers ranges of it and `fabric_shm` maps it in other processes.
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import mmap
import os
import threading
import weakref
from functools import cache

from doca_shims.api import ShimError

SMALL_PAGE_BYTES = mmap.PAGESIZE
HUGE_PAGE_BYTES = 2 << 20

SEALS = fcntl.F_SEAL_GROW | fcntl.F_SEAL_SHRINK if hasattr(fcntl, "F_SEAL_GROW") else 6
"""With these on a memfd, nobody can truncate it under a mapping of it (which would be SIGBUS)."""

_F_ADD_SEALS = 1033
_F_GET_SEALS = 1034
_MFD_CLOEXEC = 1
_MFD_ALLOW_SEALING = 2
_MFD_HUGETLB = 4
_MFD_HUGE_2MB = 21 << 26
_MADV_POPULATE_WRITE = 23
_MADV_COLLAPSE = 25
_MAP_FIXED = 0x10
_PROT_NONE = 0
_MAP_FAILED = ctypes.c_void_p(-1).value
_MREMAP_MAYMOVE_FIXED = 3

_libc = ctypes.CDLL(None, use_errno=True)
_mmap = _libc.mmap
_mmap.restype = ctypes.c_void_p
_mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long]
_munmap = _libc.munmap
_munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
_madvise = _libc.madvise
_madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
_mremap = _libc.mremap
_mremap.restype = ctypes.c_void_p
_mremap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_size_t, ctypes.c_int, ctypes.c_void_p]


def create_memfd(name: str, length_bytes: int, flags: int = 0) -> int:
    """A sealed memfd of a fixed size. The caller closes it."""
    fd = os.memfd_create(name, _MFD_CLOEXEC | _MFD_ALLOW_SEALING | flags)
    try:
        os.ftruncate(fd, length_bytes)
        fcntl.fcntl(fd, _F_ADD_SEALS, SEALS)
    except OSError:
        os.close(fd)
        raise
    return fd


def is_sealed(fd: int) -> bool:
    """Whether `fd` is a memfd whose size cannot change."""
    try:
        return fcntl.fcntl(fd, _F_GET_SEALS) & SEALS == SEALS
    except OSError:
        return False


def map_shared(fd: int, length_bytes: int) -> int:
    """Address of a new writable mapping of `fd`, of which no duplicate is kept; a large one lies so that it may have
    huge pages. Undone by `unmap`."""
    if length_bytes < HUGE_PAGE_BYTES:
        return _map(None, length_bytes, mmap.PROT_READ | mmap.PROT_WRITE, mmap.MAP_SHARED, fd)
    reserved_bytes = length_bytes + HUGE_PAGE_BYTES
    reserved = _map(None, reserved_bytes, _PROT_NONE, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS, -1)
    address = reserved + -reserved % HUGE_PAGE_BYTES
    end = address + length_bytes + -length_bytes % SMALL_PAGE_BYTES
    try:
        _map(address, length_bytes, mmap.PROT_READ | mmap.PROT_WRITE, mmap.MAP_SHARED | _MAP_FIXED, fd)
    except OSError:
        unmap(reserved, reserved_bytes)
        raise
    for start, stop in ((reserved, address), (end, reserved + reserved_bytes)):
        if start < stop:
            unmap(start, stop - start)
    return address


def _map(at: int | None, length_bytes: int, protection: int, flags: int, fd: int) -> int:
    address = _mmap(at, length_bytes, protection, flags, fd, 0)
    if address == _MAP_FAILED:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))
    return int(address)


def unmap(address: int, length_bytes: int) -> None:
    """Remove a mapping of `map_shared`; nothing may refer to it any more."""
    _munmap(address, length_bytes)


@cache
def page_sizes_bytes() -> tuple[int, ...]:
    """Page sizes that this machine can give now, smallest first. Huge pages need a reserved pool
    (``vm.nr_hugepages``), so one is tried."""
    try:
        fd = create_memfd("entresol-probe", HUGE_PAGE_BYTES, _MFD_HUGETLB | _MFD_HUGE_2MB)
    except OSError:
        return (SMALL_PAGE_BYTES,)
    try:
        mmap.mmap(fd, HUGE_PAGE_BYTES).close()
    except OSError:
        return (SMALL_PAGE_BYTES,)
    finally:
        os.close(fd)
    return (SMALL_PAGE_BYTES, HUGE_PAGE_BYTES)


class MemfdMemory:
    """`doca_shims.api.Memory` on a memfd."""

    def __init__(self, length_bytes: int, page_bytes: int) -> None:
        if length_bytes <= 0 or page_bytes not in page_sizes_bytes():
            raise ShimError(
                errno.EINVAL,
                "allocate",
                f"{length_bytes} bytes on {page_bytes}-byte pages; page sizes here: {page_sizes_bytes()}",
            )
        mapped_bytes = -(-length_bytes // page_bytes) * page_bytes
        huge = _MFD_HUGETLB | _MFD_HUGE_2MB if page_bytes == HUGE_PAGE_BYTES else 0
        try:
            fd = create_memfd("entresol-memory", mapped_bytes, huge)
        except OSError as error:
            raise ShimError(errno.ENOMEM, "allocate", f"{length_bytes} bytes: {error.strerror}") from error
        try:
            self.address = map_shared(fd, mapped_bytes)
        except OSError as error:
            os.close(fd)
            raise ShimError(errno.ENOMEM, "allocate", f"{length_bytes} bytes: {error.strerror}") from error
        self._fd = fd
        self._lock = threading.Lock()
        self._registrations = 0
        self._closed = False
        self._bytes: object = (ctypes.c_char * mapped_bytes).from_address(self.address)
        self._view = memoryview(self._bytes).cast("B")[:length_bytes]
        # Every view of these bytes, numpy's too, keeps that object. The mapping goes with the last of them.
        weakref.finalize(self._bytes, unmap, self.address, mapped_bytes).atexit = False
        self.inode = os.fstat(fd).st_ino
        self.length_bytes = length_bytes
        self.mapped_bytes = mapped_bytes
        self.page_bytes = page_bytes
        self.is_shared = True
        """False once part of it has been replaced by private pages: peers then must not map `fd` any more."""
        self._fault_in()

    @property
    def view(self) -> memoryview:
        return self._view

    @property
    def fd(self) -> int | None:
        return self._fd if self.is_shared and not self._closed else None

    def covers(self, address: int, length_bytes: int) -> bool:
        """Whether the range lies within this memory."""
        return self.address <= address and address + length_bytes <= self.address + self.length_bytes

    def hold(self) -> None:
        """A region was registered on it."""
        with self._lock:
            if self._closed:
                raise ShimError(errno.EFAULT, "ibv_reg_mr", "the memory is closed")
            self._registrations += 1

    def _fault_in(self) -> None:
        """Give every page its memory at once: when flash has pinned small pages they stay small. Where the kernel can
        (6.1), small pages become huge ones, which are quicker to fill and to copy to and from, whatever
        ``shmem_enabled`` says of transparent huge pages; it wants something to be in each already."""
        if self.page_bytes < HUGE_PAGE_BYTES <= self.mapped_bytes:
            for start in range(0, self.mapped_bytes - HUGE_PAGE_BYTES + 1, HUGE_PAGE_BYTES):
                _madvise(self.address + start, SMALL_PAGE_BYTES, _MADV_POPULATE_WRITE)
            _madvise(self.address, self.mapped_bytes, _MADV_COLLAPSE)
        _madvise(self.address, self.mapped_bytes, _MADV_POPULATE_WRITE)  # on failure they come when they are touched

    def release(self) -> None:
        with self._lock:
            self._registrations -= 1

    def make_private(self, address: int, length_bytes: int) -> None:
        """Put a private copy of these pages under the same addresses, so that whoever else has them mapped
        writes into pages that nobody reads. The swap itself is atomic."""
        start = address - (address - self.address) % self.page_bytes
        end = address + length_bytes
        end += -(end - self.address) % self.page_bytes
        length = end - start
        copy = _mmap(None, length, mmap.PROT_READ | mmap.PROT_WRITE, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS, -1, 0)
        if copy == _MAP_FAILED:
            raise ShimError(errno.ENOMEM, "ibv_dereg_mr", f"no memory for a private copy of {length} bytes")
        ctypes.memmove(copy, start, length)
        self.is_shared = False
        if _mremap(copy, length, length, _MREMAP_MAYMOVE_FIXED, start) == _MAP_FAILED:
            raise ShimError(ctypes.get_errno(), "ibv_dereg_mr", "mremap of a private copy")

    def close(self) -> None:
        with self._lock:
            if self._closed:
                return
            if self._registrations:
                raise ShimError(errno.EBUSY, "free", f"{self._registrations} regions are registered on this memory")
            self._closed = True
        os.close(self._fd)
        self._view.release()
        self._bytes = None


def check_mapped(address: int, length_bytes: int, writable: bool) -> None:
    """Raises ShimError EFAULT unless this process has the whole range mapped, writable where asked."""
    position = address
    end = address + length_bytes
    with open("/proc/self/maps", encoding="ascii", errors="replace") as maps:
        for line in maps:
            span, permissions = line.split(" ", 2)[:2]
            low, high = (int(part, 16) for part in span.split("-"))
            if high <= position:
                continue
            if low > position or permissions[0] != "r" or (writable and permissions[1] != "w"):
                break
            position = high
            if position >= end:
                return
    kind = "writable memory" if writable else "readable memory"
    raise ShimError(errno.EFAULT, "ibv_reg_mr", f"0x{address:x}+{length_bytes} is not all {kind} of this process")
