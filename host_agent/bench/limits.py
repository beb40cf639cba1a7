"""This machine's limits as read beside one benchmark run: in turn with its rounds, kept by size and batch.

Owns the socket peer and the flash file while it is open; `host_agent.bench` says when to read. Medians, in GB/s.
"""

from __future__ import annotations

import contextlib
import statistics
from pathlib import Path
from types import TracebackType
from typing import Any, Final

from host_agent.bench.flash_limit import FlashLimit
from host_agent.bench.peer_sockets import SocketPeer, memmove_s
from host_agent.memory import RegisteredMemory

_FLASH_FILE_BYTES: Final = 512 << 20
LIMITS_OF: Final = {
    "store_staged": ("memmove", "socket_push"),
    "retrieve_staged": ("memmove", "socket_pull"),
    "retrieve_cold": ("flash", "socket_pull"),
}
"""Which limits an operation is held against."""


class Limits:
    """Readings for rounds of `blocks` blocks. `flash_dir`: where to read flash, or None. A context manager."""

    def __init__(self, blocks: int, flash_dir: Path | None) -> None:
        self._blocks = blocks
        self._seconds: dict[tuple[int, int], dict[str, list[float]]] = {}
        with contextlib.ExitStack() as stack:
            self.peer = stack.enter_context(SocketPeer())
            self._flash = stack.enter_context(FlashLimit(flash_dir, _FLASH_FILE_BYTES)) if flash_dir else None
            self._stack = stack.pop_all()

    def read(self, source: RegisteredMemory, destination: RegisteredMemory, block_bytes: int, batch: int) -> None:
        """Memory copy and both directions of the socket, over the memory that the benchmark itself uses."""
        calls = self._blocks // batch
        to, at = destination.view, source.view
        self._add(block_bytes, batch, "memmove", memmove_s(to, at, block_bytes, batch * calls))
        for name, transfer, view in (
            ("socket_pull", self.peer.pull_s, to),
            ("socket_push", self.peer.push_s, at),
        ):
            self._add(block_bytes, batch, name, sum(transfer(view, block_bytes, batch) for _ in range(calls)))

    def read_flash(self, block_bytes: int, batch: int) -> None:
        """Random reads with O_DIRECT; nothing where no directory was given."""
        if self._flash is not None:
            self._add(block_bytes, batch, "flash", self._flash.read_s(block_bytes, batch, self._blocks // batch))

    def of(self, operation: str, block_bytes: int, batch: int) -> dict[str, float]:
        """GB/s of the limits that the operation is held against, those that were read."""
        rates = self._rates(block_bytes, batch)
        return {name: rates[name] for name in LIMITS_OF[operation] if name in rates}

    def rows(self) -> list[dict[str, Any]]:
        """All readings, for a report."""
        return [
            {"block_bytes": size, "batch": batch, "gb_per_s": self._rates(size, batch)} for size, batch in self._seconds
        ]

    def __enter__(self) -> Limits:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stack.close()

    def _add(self, block_bytes: int, batch: int, name: str, seconds: float) -> None:
        self._seconds.setdefault((block_bytes, batch), {}).setdefault(name, []).append(seconds)

    def _rates(self, block_bytes: int, batch: int) -> dict[str, float]:
        moved = self._blocks // batch * batch * block_bytes
        readings = self._seconds.get((block_bytes, batch), {})
        return {name: moved / statistics.median(seconds) / 1e9 for name, seconds in readings.items()}
