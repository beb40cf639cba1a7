"""What the machine allows, read as a turn of each round: memory copies, a bare socket, a round trip and O_DIRECT reads.

A bare socket asks and is answered batch by batch, as a store is. Copies are one memmove a block, between buffers of
small and of huge pages.
"""

from __future__ import annotations

import statistics
from pathlib import Path
from typing import Any, Final

from emulator.peers import driver
from emulator.peers.catalogue import FLASH_READ, RETRIEVE, STORE
from host_agent.bench.flash_limit import FlashLimit
from host_agent.bench.peer_sockets import SocketPeer, memmove_s

MEMMOVE: Final = "memmove, 4 KiB pages"
MEMMOVE_HUGE: Final = "memmove, huge pages"
SOCKET: Final = "bare TCP socket"
PREADV: Final = "preadv, O_DIRECT, 16 threads"
_FLASH_BYTES: Final = 256 << 20


class Limits:
    """Readings by (limit, operation, block bytes, batch), GB/s, one a round."""

    def __init__(self, flash_dir: Path) -> None:
        self._flash_dir = flash_dir
        self.readings: dict[tuple[str, str, int, int], list[float]] = {}
        self.pings_s: list[float] = []

    def read(self, blocks: dict[int, int], batches: tuple[int, ...]) -> None:
        """One round. `blocks`: how many of each size. Raises LowerLayerError."""
        with SocketPeer() as peer:
            for size, count in blocks.items():
                for huge in (False, True):
                    memories = [driver.allocate(size * count, huge).data for _ in range(2)]
                    self._copies(size, count, batches, MEMMOVE_HUGE if huge else MEMMOVE, memories)
                self._sockets(peer, size, count, batches, memories)
            self.pings_s.append(statistics.median(peer.ping_s()))
        self._flash_dir.mkdir(parents=True, exist_ok=True)
        with FlashLimit(self._flash_dir, _FLASH_BYTES) as flash:
            for size, count in blocks.items():
                for batch in batches:
                    if batch <= count:
                        calls = count // batch
                        seconds = flash.read_s(size, batch, calls)
                        self._add((PREADV, FLASH_READ, size, batch), size * batch * calls, seconds)

    def rows(self) -> list[dict[str, Any]]:
        """Medians and spread, for the report."""
        return [
            {
                "limit": limit,
                "operation": operation,
                "block_bytes": size,
                "batch": batch,
                "gb_per_s": statistics.median(rates),
                "lowest": min(rates),
                "highest": max(rates),
            }
            for (limit, operation, size, batch), rates in self.readings.items()
        ]

    def _copies(self, size: int, count: int, batches: tuple[int, ...], name: str, memories: list[Any]) -> None:
        to, source = memories
        for batch in batches:
            if batch <= count:
                seconds = memmove_s(to, source, size, count)
                for operation in (RETRIEVE, STORE):
                    self._add((name, operation, size, batch), size * count, seconds)

    def _sockets(self, peer: SocketPeer, size: int, count: int, batches: tuple[int, ...], memories: list[Any]) -> None:
        to, source = memories
        peer.push_s(source, size, count)  # touches the peer's memory
        for batch in batches:
            if batch <= count:
                calls = count // batch
                pulled = sum(peer.pull_s(to, size, batch) for _ in range(calls))
                pushed = sum(peer.push_s(source, size, batch) for _ in range(calls))
                self._add((SOCKET, RETRIEVE, size, batch), size * batch * calls, pulled)
                self._add((SOCKET, STORE, size, batch), size * batch * calls, pushed)

    def _add(self, place: tuple[str, str, int, int], moved_bytes: int, seconds: float) -> None:
        self.readings.setdefault(place, []).append(moved_bytes / seconds / 1e9)
