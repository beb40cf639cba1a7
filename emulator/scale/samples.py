"""What the worker's work costs: processor seconds of a region worker at many sizes and batches, one agent at a time.

The worker's clock is read around calls that are alike; what it uses when nobody asks is measured and taken off. A STORE
counts until its blocks are on flash. XXH3 and a copy of memory are timed in the same rounds, for the cost model to
tell what a byte costs because of them. Every byte that comes back is compared outside the calls.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Final

import numpy as np
import xxhash

from common.errors import LowerLayerError, UnavailableError
from common.wire import StatId
from emulator.scale.settings import SampleGrid
from host_agent.bench.cpu_time import DPU, CpuMeter
from host_agent.bench.namespace import bench_record
from host_agent.block_pattern import BlockPattern
from host_agent.client import Client
from host_agent.memory import RegisteredMemory, Spans

_STORE_TIMEOUT_S: Final = 20.0
_IDLE_S: Final = 0.3
_CALLS_MIN: Final = 2
_STEP_BYTES: Final = 1 << 20
_MEMORY_BYTES: Final = 64 << 20
_KEY_BYTES: Final = 16


@dataclass
class _Sample:
    """Calls that are alike, and what they cost the worker, over all rounds."""

    operation: str
    block_bytes: int
    batch: int
    calls: int = 0
    cpu_s: list[float] = field(default_factory=list)
    """Of one call, round by round."""

    def as_dict(self, regions: int) -> dict[str, Any]:
        """Per call. A batch is cut into a capsule for each region that has blocks of it."""
        capsules = regions * (1 - (1 - 1 / regions) ** self.batch)
        return {
            "operation": self.operation,
            "block_bytes": self.block_bytes,
            "batch": self.batch,
            "calls": self.calls,
            "capsules": capsules,
            "blocks": self.batch,
            "bytes": self.batch * self.block_bytes,
            "cpu_s": statistics.median(self.cpu_s),
            "cpu_s_rounds": self.cpu_s,
        }


def measure_samples(client: Client, tenant: str, pids: Sequence[int], grid: SampleGrid) -> dict[str, Any]:
    """The report's "samples": `pids` are the pod's processes. Raises UnavailableError where the pod refuses blocks."""
    return _Sampler(client, tenant, pids, grid).run()


class _Sampler:
    def __init__(self, client: Client, tenant: str, pids: Sequence[int], grid: SampleGrid) -> None:
        meter = CpuMeter({DPU: pids})
        self._client = client
        self._meter = meter
        self._pids = pids
        self._kernel_s: dict[str, list[float]] = {}
        """Seconds in user space and in the kernel, by operation."""
        self._grid = grid
        largest = max(grid.block_bytes)
        self._namespace = client.namespace(bench_record(tenant, secrets.token_bytes(16)), largest)
        self._pattern = BlockPattern(largest)
        self._idle = 0.0
        self._wrong: list[str] = []

    def run(self) -> dict[str, Any]:
        grid = self._grid
        sizes = [(size, batch) for size in grid.block_bytes for batch in grid.batches if size * batch <= grid.bytes_max]
        moves = {
            (operation, size, batch): _Sample(operation, size, batch)
            for operation in ("store", "retrieve")
            for size, batch in sizes
        }
        colds = {
            (size, batch): _Sample("retrieve_cold", size, batch)
            for size, batch in sizes
            if batch <= grid.cold_batch_max
        }
        lookups = {batch: _Sample("lookup", 0, batch) for batch in grid.lookup_batches}
        idle: list[float] = []
        machine: dict[str, list[float]] = {"copy_s_per_byte": [], "xxh3_s_per_byte": []}
        most = max(size * batch for size, batch in sizes)
        with self._client.allocate(most) as source, self._client.allocate(most) as destination:
            for number in range(grid.rounds):
                idle.append(self._idle_cores())
                self._idle = statistics.median(idle)
                _time_machine(machine)
                for size, batch in sizes if number % 2 == 0 else reversed(sizes):
                    self._move(moves, source, destination, size, batch)
                for size in grid.block_bytes:
                    self._cold(colds, source, destination, size)
                self._look_up(lookups, source)
        regions = len(self._client.regions)
        return {
            "regions": regions,
            "idle_cores": self._idle,
            "machine": {**{name: min(values) for name, values in machine.items()}, "clock_mhz": clock_mhz()},
            "kernel_share": {
                name: kernel / max(user + kernel, 1e-9) for name, (user, kernel) in self._kernel_s.items()
            },
            "rows": [sample.as_dict(regions) for sample in (*moves.values(), *colds.values(), *lookups.values())],
            "wrong": self._wrong,
        }

    def _move(
        self,
        moves: dict[tuple[str, int, int], _Sample],
        source: RegisteredMemory,
        destination: RegisteredMemory,
        size: int,
        batch: int,
    ) -> None:
        """STORE fresh batches until they are on flash, RETRIEVE the last of them again and again, DELETE."""
        spans, into = (memory.blocks(np.arange(batch), size) for memory in (source, destination))
        stored: list[list[bytes]] = []

        def store() -> None:
            keys = stored[-1]
            self._store(keys, spans)

        def fresh() -> None:
            stored.append([os.urandom(_KEY_BYTES) for _ in range(batch)])
            self._fill(source, stored[-1], size)

        def retrieve() -> None:
            if not self._client.retrieve(self._namespace, stored[-1], into).all_ok:
                raise UnavailableError(f"the pod lost blocks of {size} bytes")

        try:
            self._time(moves["store", size, batch], store, fresh)
            destination.array(np.uint64)[: batch * size // 8 : 512] ^= np.uint64(0x5A5A5A5A5A5A5A5A)
            self._time(moves["retrieve", size, batch], retrieve)
            self._check(destination, stored[-1], size)
        finally:
            for keys in stored:
                self._client.delete(self._namespace, keys)

    def _cold(
        self,
        colds: dict[tuple[int, int], _Sample],
        source: RegisteredMemory,
        destination: RegisteredMemory,
        size: int,
    ) -> None:
        """Blocks of which the window holds a part, asked for in turn: the least recently used ones, so never there."""
        grid = self._grid
        batches = [batch for sized, batch in colds if sized == size]
        step = max(batches)
        keys = [os.urandom(_KEY_BYTES) for _ in range(grid.cold_blocks)]
        at = 0

        def retrieve(batch: int) -> None:
            nonlocal at
            wanted = [keys[(at + index) % len(keys)] for index in range(batch)]
            at += batch
            into = destination.blocks(np.arange(batch), size)
            if not self._client.retrieve(self._namespace, wanted, into).all_ok:
                raise UnavailableError(f"the pod lost blocks of {size} bytes")
            last[:] = wanted

        last: list[bytes] = []
        try:
            for start in range(0, len(keys), step):
                part = keys[start : start + step]
                self._fill(source, part, size)
                spans = source.blocks(np.arange(len(part)), size)
                self._store(part, spans)
            for batch in batches:
                before = self._staged()
                self._time(colds[size, batch], partial(retrieve, batch))
                if self._staged() != before:
                    raise UnavailableError("blocks that were to come from flash were staged: give the pod fewer frames")
                self._check(destination, last, size)
        finally:
            for start in range(0, len(keys), step):
                self._client.delete(self._namespace, keys[start : start + step])

    def _store(self, keys: Sequence[bytes], spans: Spans) -> None:
        """Until all are on flash; those that the region was too busy for are stored again. Raises UnavailableError."""
        deadline_s = time.monotonic() + _STORE_TIMEOUT_S
        while not (results := self._client.store(self._namespace, keys, spans, until_flash=True)).all_ok:
            if time.monotonic() > deadline_s:
                raise UnavailableError(f"the pod did not take {len(keys)} blocks: {results}")

    def _staged(self) -> int:
        return sum(stats.get(StatId.RETRIEVE_STAGED, 0) for stats in self._client.stat().values())

    def _fill(self, memory: RegisteredMemory, keys: Sequence[bytes], size: int) -> None:
        for index, key in enumerate(keys):
            self._pattern.fill(key, memory.view[index * size : (index + 1) * size])

    def _check(self, memory: RegisteredMemory, keys: Sequence[bytes], size: int) -> None:
        for index, key in enumerate(keys):
            offset = self._pattern.first_mismatch(key, memory.view[index * size : (index + 1) * size])
            if offset is not None:
                self._wrong.append(f"block {key.hex()} of {size} bytes differs at byte {offset}")

    def _look_up(self, lookups: dict[int, _Sample], source: RegisteredMemory) -> None:
        keys = [os.urandom(_KEY_BYTES) for _ in range(max(lookups))]
        try:
            for start in range(0, len(keys), 8):
                part = keys[start : start + 8]
                self._store(part, source.spans([0] * len(part), 4096))
            for batch, sample in lookups.items():
                self._time(sample, partial(self._found, keys[-batch:]))
        finally:
            self._client.delete(self._namespace, keys)

    def _found(self, keys: Sequence[bytes]) -> None:
        if self._client.lookup(self._namespace, keys).prefix_blocks != len(keys):
            raise UnavailableError("the pod lost blocks while it was measured")

    def _time(self, sample: _Sample, call: Callable[[], None], before: Callable[[], None] | None = None) -> None:
        calls = 0
        kernel = user_and_kernel_s(self._pids)
        started, started_s = self._meter.read_s(), time.perf_counter()
        while calls < _CALLS_MIN or time.perf_counter() < started_s + self._grid.sample_s:
            if before is not None:
                before()
            call()
            calls += 1
        idle_s = self._idle * (time.perf_counter() - started_s)
        totals = self._kernel_s.setdefault(sample.operation, [0.0, 0.0])
        for side, (before_s, after_s) in enumerate(zip(kernel, user_and_kernel_s(self._pids))):
            totals[side] += after_s - before_s
        sample.calls += calls
        sample.cpu_s.append(max(0.0, self._meter.since_s(started)[DPU] - idle_s) / calls)

    def _idle_cores(self) -> float:
        before = self._meter.read_s()
        time.sleep(_IDLE_S)
        return self._meter.since_s(before)[DPU] / _IDLE_S


def user_and_kernel_s(pids: Sequence[int]) -> tuple[float, float]:
    """Processor seconds of processes in user space and in the kernel, to a tick. Raises LowerLayerError."""
    user = kernel = 0
    for pid in pids:
        try:
            fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        except OSError as error:
            raise LowerLayerError("read /proc/PID/stat", error.errno or 0, f"process {pid}") from error
        user, kernel = user + int(fields[11]), kernel + int(fields[12])
    tick_s = 1 / os.sysconf("SC_CLK_TCK")
    return user * tick_s, kernel * tick_s


def clock_mhz() -> float:
    """What the kernel says of the first core; 0 where it does not."""
    with contextlib.suppress(OSError, ValueError, IndexError):
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        return float(next((line for line in lines if line.startswith("cpu MHz")), "").split(":")[1])
    return 0.0


def _time_machine(machine: dict[str, list[float]]) -> None:
    """Seconds a byte, of memory that no cache holds: XXH3-64 and a copy, in pieces of 1 MiB."""
    memory = np.ones(_MEMORY_BYTES, np.uint8)
    other = np.ones(_MEMORY_BYTES, np.uint8)
    view = memory.data
    for name, work in (
        ("copy_s_per_byte", lambda at: np.copyto(other[at : at + _STEP_BYTES], memory[at : at + _STEP_BYTES])),
        ("xxh3_s_per_byte", lambda at: xxhash.xxh3_64_intdigest(view[at : at + _STEP_BYTES])),
    ):
        started_s = time.thread_time()
        for at in range(0, _MEMORY_BYTES, _STEP_BYTES):
            work(at)
        machine[name].append((time.thread_time() - started_s) / _MEMORY_BYTES)
