"""What the machine allows, read as a turn of each round: memory copies, a bare socket, a round trip and the disk.

By the same code as `make bench`: one memmove a block, between buffers of small and of huge pages; a blocking socket,
asked and answered batch by batch; fio with O_DIRECT, or threads where it is not installed.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Final

from common.errors import LowerLayerError
from emulator.peers import driver
from emulator.peers.catalogue import FLASH_READ, FLASH_STORE, RETRIEVE, STORE
from host_agent.bench.flash_limit import FlashLimit
from host_agent.bench.limits import memmove_s
from host_agent.bench.peer_sockets import SocketPeer

MEMMOVE: Final = "memmove, 4 KiB pages"
MEMMOVE_HUGE: Final = "memmove, huge pages"
SOCKETS: Final = {"": "bare TCP socket", "cubic": "bare TCP socket, cubic"}
DISK: Final = "disk, O_DIRECT"
_FLASH_BYTES: Final = 256 << 20
_DISK_S: Final = 0.3
_SOCKET: Final = "one blocking loopback connection between two processes, asked and answered batch by batch"
Place = tuple[str, str, int, int]


class Limits:
    """Readings by (limit, operation, block bytes, batch), GB/s, one a round."""

    def __init__(self, flash_dir: Path) -> None:
        self._flash_dir = flash_dir
        self.readings: dict[Place, list[float]] = {}
        self.pings_s: list[float] = []
        self.methods = dict.fromkeys((MEMMOVE, MEMMOVE_HUGE), "one memmove for each block")

    def read(self, blocks: Mapping[int, int], batches: tuple[int, ...], flash_bytes_max: int) -> None:
        """One round. `blocks`: how many of each size; the disk is read for sizes up to `flash_bytes_max`.

        Raises LowerLayerError.
        """
        with SocketPeer() as peer:
            self.methods |= {name: f"{_SOCKET}, {peer.congestion(key)}" for key, name in SOCKETS.items()}
            for size, count in blocks.items():
                for huge in (False, True):
                    to, source = (driver.allocate(size * count, huge).data for _ in range(2))
                    self._copies(size, count, batches, MEMMOVE_HUGE if huge else MEMMOVE, to, source)
                for congestion in SOCKETS:
                    self._sockets(peer, size, count, batches, congestion, to, source)
            self.pings_s.append(statistics.median(peer.ping_s()))
        try:
            self._flash_dir.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise LowerLayerError("mkdir", error.errno or 0, str(self._flash_dir)) from error
        with FlashLimit(self._flash_dir, _FLASH_BYTES, _DISK_S) as disk:
            self.methods[DISK] = disk.method
            for size, count in blocks.items():
                for batch in batches:
                    if 1 < batch <= count and size <= flash_bytes_max:
                        for operation, way in ((FLASH_READ, "read"), (FLASH_STORE, "write")):
                            rate = disk.rate(way, size, batch, max(1, count // batch))
                            self._add((DISK, operation, size, batch), rate)

    def rows(self) -> Iterator[dict[str, Any]]:
        """Medians and spread, for the report."""
        for (limit, operation, size, batch), rates in self.readings.items():
            yield {
                "limit": limit,
                "operation": operation,
                "block_bytes": size,
                "batch": batch,
                "gb_per_s": statistics.median(rates),
                "lowest": min(rates),
                "highest": max(rates),
                "rounds": rates,
            }

    def _copies(self, size: int, count: int, batches: tuple[int, ...], name: str, to: Any, source: Any) -> None:
        for batch in batches:
            if batch <= count:
                rate = size * count / memmove_s(to, source, size, count)
                for operation in (RETRIEVE, STORE):
                    self._add((name, operation, size, batch), rate)

    def _sockets(
        self, peer: SocketPeer, size: int, count: int, batches: tuple[int, ...], congestion: str, to: Any, source: Any
    ) -> None:
        for batch in batches:
            if batch <= count:
                moved = count // batch * batch * size
                starts = range(0, moved, batch * size)
                pulled_s = sum(peer.pull_s(to[at:], size, batch, congestion) for at in starts)
                pushed_s = sum(peer.push_s(source[at:], size, batch, congestion) for at in starts)
                self._add((SOCKETS[congestion], RETRIEVE, size, batch), moved / pulled_s)
                self._add((SOCKETS[congestion], STORE, size, batch), moved / pushed_s)

    def _add(self, place: Place, bytes_per_s: float) -> None:
        self.readings.setdefault(place, []).append(bytes_per_s / 1e9)
