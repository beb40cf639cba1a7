"""Protection domains of emu-shm: publishing regions to peers, and taking them back whatever a peer is doing.

Taking back has three parts. A peer that is not copying sees the cleared word before it begins. A peer inside
process_vm_writev finds the remote iovec, which the kernel reads from our own control page, emptied. A peer
stopped in the midst of a user-mode copy into a memfd writes into pages that are no longer ours: we put a private
copy under the same addresses, and reach that memory by process_vm calls from then on.
"""

from __future__ import annotations

import errno
import os
import time
from collections.abc import Callable
from functools import partial

from doca_shims.api import ShimError
from emulator import fabric_shm_pages as pages
from emulator.fabric_core import Device, Domain, QueuePair, Region
from emulator.fabric_memory import MemfdMemory
from emulator.fabric_shm_connection import ShmConnection
from emulator.fabric_shm_pages import RegionRow, RegionTable, fence
from emulator.fabric_shm_peer import allow_peers

_USER_COPY_LIMIT_S = 0.05
"""How long a copy in user mode may take before its target is replaced under it. 1 MiB takes 0.1 ms."""
_KERNEL_COPY_LIMIT_S = 30.0
"""A running peer leaves the kernel's copy of at most 1 GiB well within this, or something is very wrong."""
_PAUSE_S = 100e-6


class ShmDomain(Domain):
    """`doca_shims.api.ProtectionDomain`."""

    def __init__(self, device: Device) -> None:
        super().__init__(device)
        self.table_fd = RegionTable.create()
        self._table = RegionTable(self.table_fd)
        self.native_regions = None if pages.NATIVE is None else pages.NATIVE.Regions()
        """The regions by lkey, for native code; the same as `by_lkey`."""
        self._slots: dict[int, int] = {}
        self._free = list(range(pages.TABLE_SLOTS - 1, -1, -1))

    def _publish(self, region: Region) -> None:
        slot = self._free.pop()
        memory = region.memory
        fd = None if memory is None else memory.fd
        if memory is None or fd is None:
            allow_peers()
            kind, row = pages.GIVEN, RegionRow(region.address, region.length_bytes, int(region.access), 0, 0, 0)
        else:
            access = int(region.access)
            row = RegionRow(region.address, region.length_bytes, access, fd, memory.inode, memory.address)
            kind = pages.SHARED
        self._slots[region.rkey] = slot
        if self.native_regions is not None:
            self.native_regions.add(region.lkey, region.address, region.length_bytes, region.can_write)
        self._table.publish(slot, region.rkey, kind, row)

    def _revoke(self, region: Region) -> None:
        if self.native_regions is not None:
            self.native_regions.remove(region.lkey)
        slot = self._slots.pop(region.rkey)
        self._table.mark(slot, pages.REVOKED)
        try:
            for connection in list(self.connections):
                self.quiesce(connection, region)
        finally:
            self._free.append(slot)

    def _release(self) -> None:
        self._table.unmap()
        os.close(self.table_fd)

    # ---------------------------------------------------------------------------------------- taking back

    def quiesce(self, connection: QueuePair, region: Region | None) -> None:
        """Return once the peer of `connection` can touch nothing of `region` (None: nothing at all) through it.
        The region's word is cleared, or the page is marked closed, already.

        Raises ShimError EBUSY when a running peer does not leave the kernel's copy for half a minute."""
        if not isinstance(connection, ShmConnection):
            return
        words = connection.page.words
        busy = _wait_until_idle(connection, lambda: region is None or words[pages.TARGET] == region.rkey)
        if busy is not None:
            self._replace(busy)

    def _replace(self, busy: tuple[int, int]) -> None:
        """A peer may write to this range (address, length) of a memfd at any later time."""
        memory = self.device.memory_at(*busy)
        if memory is None or not memory.is_shared:
            return
        ranges = [busy]
        domains = [domain for domain in self.device.domains if isinstance(domain, ShmDomain)]
        for domain in domains:
            domain._set_kind(memory, pages.SUSPENDED)
        try:
            for domain in domains:
                for connection in list(domain.connections):
                    if isinstance(connection, ShmConnection):
                        other = _wait_until_idle(connection, partial(_lies_in, memory, connection))
                        if other is not None and memory.covers(*other):
                            ranges.append(other)
            for address, length in ranges:
                memory.make_private(address, length)
        finally:
            for domain in domains:
                domain._set_kind(memory, pages.SHARED if memory.is_shared else pages.GIVEN)

    def _set_kind(self, memory: MemfdMemory, kind: int) -> None:
        with self.lock:
            for rkey, region in self.by_rkey.items():
                if region.memory is memory:
                    self._table.mark(self._slots[rkey], rkey | kind)
        if kind == pages.GIVEN:
            allow_peers()


def _lies_in(memory: MemfdMemory, connection: ShmConnection) -> bool:
    """Whether the transfer that the peer announces begins in this memory."""
    return memory.covers(connection.page.quads[pages.BASE], 1)


def _wait_until_idle(connection: ShmConnection, concerned: Callable[[], bool]) -> tuple[int, int] | None:
    """Wait until the peer is in no transfer that is `concerned`, which has been forbidden already: once it is seen
    in another, it has left that one. A range: where it may still write to later, by a copy in user mode."""
    process = connection.process
    words, quads = connection.page.words, connection.page.quads
    started_s = time.monotonic()
    while process is not None:
        kind = words[pages.BUSY]
        base = quads[pages.BASE]
        if kind == pages.IDLE or not concerned():
            return None
        waited_s = time.monotonic() - started_s
        if kind == pages.IN_KERNEL:
            quads[pages.LENGTH] = 0
            fence()
            if not process.may_be_copying():
                return None
            if waited_s > _KERNEL_COPY_LIMIT_S:
                raise ShimError(errno.EBUSY, "ibv_dereg_mr", f"{connection.peer} copies without end")
        elif not process.is_alive():
            return None
        elif waited_s > _USER_COPY_LIMIT_S or not process.may_be_copying():
            return None if kind == pages.READING else (base, quads[pages.LENGTH])
        time.sleep(_PAUSE_S)
    return None
