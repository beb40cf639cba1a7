"""Protection domains of emu-tcp: each region with a view of its bytes, so that a frame's payload is one slice.

A region leaves `places` before any connection is asked to let go of it, so nothing begins to touch it meanwhile.
"""

from __future__ import annotations

import ctypes
from typing import NamedTuple

from emulator.fabric_core import Device, Domain, QueuePair, Region


class Place(NamedTuple):
    """A region's bytes from `start` up to `end`, addresses of this process."""

    start: int
    end: int
    view: memoryview
    writable: bool
    region: Region


class TcpQueuePair(QueuePair):
    """What a domain asks of its connections."""

    def release_region(self, region: Region) -> None:
        """Return when no transfer of this connection reads or writes the region, which is out of the tables."""
        raise NotImplementedError


class TcpDomain(Domain):
    """`doca_shims.api.ProtectionDomain`."""

    def __init__(self, device: Device) -> None:
        super().__init__(device)
        self.places: dict[int, Place] = {}
        """By lkey."""

    def _publish(self, region: Region) -> None:
        self.places[region.lkey] = Place(
            region.address, region.end, view_of(region.address, region.length_bytes), region.can_write, region
        )

    def _revoke(self, region: Region) -> None:
        self.places.pop(region.lkey, None)
        for connection in list(self.connections):
            if isinstance(connection, TcpQueuePair):
                connection.release_region(region)


def view_of(address: int, length_bytes: int) -> memoryview:
    """The bytes at a virtual address of this process."""
    return memoryview((ctypes.c_char * length_bytes).from_address(address)).cast("B")
