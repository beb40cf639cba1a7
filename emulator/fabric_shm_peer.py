"""The peer process of an emu-shm connection: whether it lives, whether it runs, and mappings of its memory.

Owned by one connection. It never signals or traces the peer; it only looks.
"""

from __future__ import annotations

import ctypes
import logging
import os
import select
from collections.abc import Callable
from pathlib import Path

from emulator.fabric_memory import is_sealed, map_shared, unmap
from emulator.fabric_shm_pages import RegionRow

_log = logging.getLogger(__name__)

_PR_SET_PTRACER = 0x59616D61
_PR_SET_PTRACER_ANY = ctypes.c_ulong(-1)

_libc = ctypes.CDLL(None, use_errno=True)
process_vm_readv = _libc.process_vm_readv
process_vm_writev = _libc.process_vm_writev
for _call in (process_vm_readv, process_vm_writev):
    _call.restype = ctypes.c_ssize_t
    _call.argtypes = [ctypes.c_int, ctypes.c_void_p, ctypes.c_ulong, ctypes.c_void_p, ctypes.c_ulong, ctypes.c_ulong]


def allow_peers() -> None:
    """Let other processes of this user reach this one's memory where Yama's ptrace_scope is 1 (Ubuntu's default),
    which otherwise allows a parent only. A kernel without Yama refuses the call and needs none."""
    _libc.prctl(_PR_SET_PTRACER, _PR_SET_PTRACER_ANY, 0, 0, 0)


class Peer:
    """The process at the other end. Its memfds are mapped once each."""

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self.pidfd = os.pidfd_open(pid)
        self._exit = select.poll()
        self._exit.register(self.pidfd, select.POLLIN)
        self._mappings: dict[int, tuple[int, int] | None] = {}  # by inode: address, length
        self.unmapped = False
        """Some mapping has been removed; whoever has kept an address in it resets this."""

    def is_alive(self) -> bool:
        """False from the moment it exits, before its process id can be used again."""
        return not self._exit.poll(0)

    def may_be_copying(self) -> bool:
        """Whether any thread of it runs or is in an uninterruptible wait. A thread that is stopped, asleep or gone
        is not inside a kernel copy: signals stop a thread only on its way back to user mode."""
        if not self.is_alive():
            return False
        for task in Path(f"/proc/{self.pid}/task").glob("*/stat"):
            try:
                state = task.read_text(errors="replace").rpartition(")")[2].split()[0]
            except (OSError, IndexError):
                continue
            if state in "RD":
                return True
        return False

    def map_memory(self, row: RegionRow, live: Callable[[], set[int]]) -> int | None:
        """Address here of the memfd that holds the region, or None where it cannot be mapped. `live` gives the
        inodes that the peer's regions still lie in; mappings of others are removed when a new one is made."""
        if row.inode not in self._mappings:
            for inode in self._mappings.keys() - live():
                self._unmap(inode)
            self._mappings[row.inode] = self._open(row)
        mapping = self._mappings[row.inode]
        if mapping is None:
            return None
        address, length_bytes = mapping
        # The row is the peer's word, for this region as for the one that the memfd was first opened for.
        start = row.address - row.memory_address
        return address if start >= 0 and start + row.length_bytes <= length_bytes else None

    def _open(self, row: RegionRow) -> tuple[int, int] | None:
        try:
            fd = os.open(f"/proc/{self.pid}/fd/{row.fd}", os.O_RDWR | os.O_CLOEXEC)
        except OSError as error:
            _log.warning("memory of process %d cannot be mapped (%s); copying by process_vm calls", self.pid, error)
            return None
        try:
            status = os.fstat(fd)
            if status.st_ino != row.inode or not is_sealed(fd):
                return None
            return map_shared(fd, status.st_size), status.st_size
        except OSError as error:
            _log.warning("memory of process %d cannot be mapped (%s); copying by process_vm calls", self.pid, error)
            return None
        finally:
            os.close(fd)

    def close(self) -> None:
        for inode in list(self._mappings):
            self._unmap(inode)
        os.close(self.pidfd)

    def _unmap(self, inode: int) -> None:
        mapping = self._mappings.pop(inode)
        if mapping is not None:
            self.unmapped = True
            unmap(*mapping)
