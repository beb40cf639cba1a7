"""This machine's limits, read beside the operations: in the same round, over memory of the same kind.

Owns the socket peer and the disk's file while it is open; `host_agent.bench.run` says when to read. Every reading is
kept, in units a second, by name, size and batch.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import statistics
from collections.abc import Callable, Mapping
from pathlib import Path
from time import perf_counter_ns
from types import TracebackType
from typing import Any, Final, NamedTuple, TypeAlias

import numpy as np

from host_agent.bench.cpu_time import CpuMeter
from host_agent.bench.flash_limit import FlashLimit
from host_agent.bench.measurements import spread
from host_agent.bench.peer_sockets import SocketPeer
from host_agent.bench.target import Target

_FLASH_FILE_BYTES: Final = 512 << 20
_PING_BYTES: Final = 64
_READING_BYTES: Final = 384 << 20
_TIMES_MAX: Final = 15
"""A reading is repeated up to so often, as far as so many bytes go, and its median taken: a single one may be as short
as the pause in which something else has the processor."""
LIMITS_OF: Final[Mapping[str, tuple[str, ...]]] = {
    "store_staged": ("memmove", "socket_push", "cubic_push"),
    "store_flash": ("disk_write", "disk_first_write"),
    "retrieve_staged": ("memmove", "socket_pull", "cubic_pull"),
    "lease_read": ("memmove", "socket_pull", "cubic_pull"),
    "retrieve_cold": ("disk_read",),
    "lookup": ("ping",),
    "retrieve_small": ("ping",),
    "mixed_retrieve": (),
    "mixed_store": (),
}
"""Which limits an operation is held against."""

_Move: TypeAlias = Callable[[memoryview, memoryview], float]
_Transfer: TypeAlias = Callable[[memoryview, int, int, str], float]


class _Place(NamedTuple):
    """What a reading is of. `target`: whose memory was used, empty where none was."""

    name: str
    target: str
    block_bytes: int
    batch: int


class Limits:
    """Readings for rounds of `blocks` blocks. `flash_dir`: where to read and write the disk for `disk_s` at a time, or
    None. A context manager."""

    def __init__(self, blocks: int, flash_dir: Path | None, disk_s: float) -> None:
        self._blocks = blocks
        self._readings: dict[_Place, list[float]] = {}
        self._cpu: dict[_Place, list[dict[str, float]]] = {}
        with contextlib.ExitStack() as stack:
            self._peer = stack.enter_context(SocketPeer())
            self._disk = stack.enter_context(FlashLimit(flash_dir, _FLASH_FILE_BYTES, disk_s)) if flash_dir else None
            self._meter = CpuMeter({"here": [os.getpid()], "peer": [self._peer.pid]})
            self._stack = stack.pop_all()

    def methods(self) -> dict[str, str]:
        """How each limit is measured, for people."""
        sockets = (
            "one blocking loopback TCP connection between two processes, warm, asked and answered call by call, "
            "sendall of a memoryview, recv_into with MSG_WAITALL; congestion control: "
        )
        return {
            "memmove": "one memmove for each block, from and to memory as the agent has it from the fabric",
            "socket": f"{sockets}the system's, {self._peer.congestion('')}",
            "cubic": f"the same with {self._peer.congestion('cubic')}",
            "ping": "64 bytes there and back over a Unix socket pair between two processes, in Python",
            "disk": self._disk.method if self._disk else "not measured: no directory on the pod's disk was given",
        }

    def read_memory(self, target: Target, block_bytes: int, batch: int) -> dict[str, float]:
        """GB/s of a copy of a round's blocks between the buffers that the target's operations use, and of both
        directions of both connections over these buffers, in as many calls as a round has. Medians of several such
        readings where they are short."""
        calls = self._blocks // batch
        moved_bytes = calls * batch * block_bytes
        times = min(_TIMES_MAX, max(1, _READING_BYTES // moved_bytes))
        found: dict[str, float] = {}
        for name, move in self._moves(block_bytes, batch, calls).items():
            seconds: list[float] = []
            before = self._meter.read_s()
            for _time in range(times):
                at = target.next_place(moved_bytes)
                part = slice(at, at + moved_bytes)
                seconds.append(move(target.destination.view[part], target.source.view[part]))
            used = {side: s / (moved_bytes * times / 1e9) for side, s in self._meter.since_s(before).items()}
            found[name] = moved_bytes / statistics.median(seconds) / 1e9
            reading = _Place(name, target.name, block_bytes, batch)
            self._readings.setdefault(reading, []).append(found[name])
            self._cpu.setdefault(reading, []).append(used)
        return found

    def _moves(self, block_bytes: int, batch: int, calls: int) -> dict[str, _Move]:
        """Each moves a round's blocks to its first memory, or from its second, and says how many seconds it took."""
        step = batch * block_bytes

        def socket(transfer: _Transfer, congestion: str, memory: memoryview) -> float:
            return sum(transfer(memory[call * step :], block_bytes, batch, congestion) for call in range(calls))

        pull, push = self._peer.pull_s, self._peer.push_s
        return {
            "memmove": lambda to, source: memmove_s(to, source, block_bytes, calls * batch),
            "socket_pull": lambda to, _source: socket(pull, "", to),
            "socket_push": lambda _to, source: socket(push, "", source),
            "cubic_pull": lambda to, _source: socket(pull, "cubic", to),
            "cubic_push": lambda _to, source: socket(push, "cubic", source),
        }

    def read_disk(self, way: str, block_bytes: int, batch: int) -> dict[str, float]:
        """GB/s; nothing where no directory was given. `way`: as `FlashLimit.rate` has it."""
        if self._disk is None:
            return {}
        rate = self._disk.rate(way, block_bytes, batch, self._blocks // batch) / 1e9
        self._readings.setdefault(_Place(f"disk_{way}", "", block_bytes, batch), []).append(rate)
        return {f"disk_{way}": rate}

    def read_ping(self) -> dict[str, float]:
        """Median seconds of a round trip."""
        seconds = statistics.median(self._peer.ping_s(_PING_BYTES))
        self._readings.setdefault(_Place("ping", "", _PING_BYTES, 1), []).append(seconds)
        return {"ping": seconds}

    def rows(self) -> list[dict[str, Any]]:
        """All readings, for a report."""
        return [
            {
                "name": place.name,
                "target": place.target,
                "block_bytes": place.block_bytes,
                "batch": place.batch,
                "unit": "s" if place.name == "ping" else "GB/s",
                "figures": spread(values),
                "cpu_s_per_gb": {
                    side: spread([used[side] for used in self._cpu[place]])
                    for side in ("here", "peer")
                    if place in self._cpu
                },
            }
            for place, values in self._readings.items()
        ]

    def __enter__(self) -> Limits:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stack.close()


def memmove_s(destination: memoryview, source: memoryview, block_bytes: int, blocks: int) -> float:
    """Seconds to copy `blocks` blocks, one memmove each, between two buffers of at least that size."""
    if min(destination.nbytes, source.nbytes) < block_bytes * blocks:
        raise ValueError(f"{blocks} blocks of {block_bytes} bytes do not fit the buffers")
    to, at = _address(destination), _address(source)
    offsets = range(0, block_bytes * blocks, block_bytes)
    started = perf_counter_ns()
    for offset in offsets:
        ctypes.memmove(to + offset, at + offset, block_bytes)
    return (perf_counter_ns() - started) / 1e9


def _address(view: memoryview) -> int:
    return int(np.frombuffer(view, np.uint8).ctypes.data)
