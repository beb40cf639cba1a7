"""`entresol-agent bench`: STORE, RETRIEVE and LOOKUP of a pod that is up, beside this machine's own limits.

Every round uses fresh keys, checks every byte that came back, and deletes what it stored. Limits (memory copy of the
same kind of pages, a bare socket, a round trip) are measured in the same rounds, before and after in turn, so that a
busy machine hurts both alike. Figures are medians of rounds. Knows nothing of what fabric or pod it runs on.
"""

from __future__ import annotations

import dataclasses
import os
import platform
import secrets
import statistics
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from time import monotonic, perf_counter, sleep
from typing import Any, Final

import numpy as np

from common.errors import UnavailableError, UserError
from common.identity import UNKNOWN, NamespaceRecord
from common.status import BlockState, Status
from common.units import approximate_size, format_size
from common.wire import StatId
from host_agent.bench.limits import Limits
from host_agent.bench.peer_sockets import SocketPeer
from host_agent.block_pattern import BlockPattern
from host_agent.client import Client
from host_agent.memory import RegisteredMemory
from host_agent.results import Bools
from host_agent.session import client_version

KEY_BYTES: Final = 16
_SETTLE_TIMEOUT_S: Final = 30.0
_SETTLE_POLL_S: Final = 0.01
_SMALL_BYTES: Final = 4096
_SMALL_CALLS: Final = 64
_SMALL_STEP: Final = 8
"""Few enough that no region refuses them for the frames that wait for flash."""
_COLD_BYTES_MAX: Final = 8 << 30
"""No more is stored to push blocks out of the windows. Blocks of others are never evicted for it."""
_DAMAGE_STEP_WORDS: Final = 512
"""One word of each 4 KiB page of a destination is damaged before a RETRIEVE, so that old bytes do not pass."""


@dataclass(frozen=True)
class BenchSettings:
    """What to measure."""

    block_bytes: tuple[int, ...] = (64 << 10, 256 << 10, 1 << 20, 4 << 20)
    batches: tuple[int, ...] = (1, 16, 128)
    lookup_batches: tuple[int, ...] = (1, 16, 128, 512)
    rounds: int = 5
    blocks: int = 128
    """Of one round: a batch of 16 means 8 calls."""
    verify: bool = True
    """Whether the client compares checksums within the timed calls. All bytes are compared outside them anyway."""

    @classmethod
    def quick(cls) -> BenchSettings:
        """In seconds, for tests and to see that it works; too little for figures."""
        return cls(block_bytes=(64 << 10, 1 << 20), batches=(1, 16), lookup_batches=(1, 16), rounds=2, blocks=16)

    flash_dir: Path | None = None
    """A directory on the disk that holds the pod's flash, where this machine has it: for the limit of cold reads."""

    def __post_init__(self) -> None:
        if not self.block_bytes or min(self.block_bytes) < 4096 or any(size % 4096 for size in self.block_bytes):
            raise UserError("block sizes are multiples of 4 KiB")
        if not self.batches or any(not 1 <= batch <= self.blocks for batch in self.batches):
            raise UserError(f"a batch is 1 to {self.blocks} blocks")
        if self.rounds < 1:
            raise UserError("at least one round is needed")


@dataclass
class Cell:
    """One operation at one block size and batch: seconds of each call, round by round."""

    operation: str
    block_bytes: int
    batch: int
    rounds: list[list[float]] = field(default_factory=list)
    moved: list[int] = field(default_factory=list)
    """Blocks that succeeded, round by round."""
    other_answers: Counter[str] = field(default_factory=Counter)
    note: str = ""

    def as_dict(self, limits: dict[str, float]) -> dict[str, Any]:
        """Figures, and ratios to `limits` (GB/s by name)."""
        per_round = [
            blocks * self.block_bytes / sum(calls) / 1e9 for blocks, calls in zip(self.moved, self.rounds) if calls
        ]
        calls_us = [seconds * 1e6 for calls in self.rounds for seconds in calls]
        gb_per_s = statistics.median(per_round) if per_round else 0.0
        p50, p99 = np.percentile(calls_us, [50, 99]) if calls_us else (0.0, 0.0)
        return {
            "operation": self.operation,
            "block_bytes": self.block_bytes,
            "batch": self.batch,
            "gb_per_s": gb_per_s,
            "p50_us": float(p50),
            "p99_us": float(p99),
            "calls": len(calls_us),
            "limits_gb_per_s": limits,
            "of": {name: gb_per_s / limit for name, limit in limits.items()},
            "other_answers": dict(self.other_answers),
            "note": self.note,
        }


class Bench:
    """One run against a connected client. `told` hears what is being measured, for people."""

    def __init__(self, client: Client, settings: BenchSettings, tenant: str, told: Callable[[str], None]) -> None:
        slot_bytes = max((region.slot_bytes for region in client.regions), default=0)
        self._too_large = [size for size in settings.block_bytes if size > slot_bytes]
        sizes = tuple(size for size in settings.block_bytes if size <= slot_bytes)
        if not sizes:
            raise UserError(f"the pod's blocks are at most {format_size(slot_bytes)}; give such a size")
        self._client = client
        self._settings = dataclasses.replace(settings, block_bytes=sizes)
        self._told = told
        self._namespace = client.namespace(_bench_record(tenant), max(sizes))
        self._pattern = BlockPattern(max(sizes))
        self._wrong: list[str] = []

    def run(self) -> dict[str, Any]:
        """Measure everything. What was stored is deleted, also on the way out of an error."""
        settings = self._settings
        cells: list[Cell] = []
        with Limits(settings.blocks, settings.flash_dir) as limits:
            for size in settings.block_bytes:
                with (
                    self._client.allocate(size * settings.blocks) as source,
                    self._client.allocate(size * settings.blocks) as destination,
                ):
                    for batch in settings.batches:
                        self._told(f"{format_size(size)}, batch {batch}")
                        cells += self._staged(limits, source, destination, size, batch)
                    self._told(f"{format_size(size)}, cold")
                    cells += self._cold(limits, source, destination, size)
            self._told("LOOKUP")
            round_trips = self._round_trips(limits.peer)
        return {
            "machine": _machine(),
            "settings": {"rounds": settings.rounds, "blocks_per_round": settings.blocks},
            "verification": _verification_text(settings.verify),
            "too_large_bytes": self._too_large,
            "wrong": self._wrong,
            "limits": limits.rows(),
            "cells": [cell.as_dict(limits.of(cell.operation, cell.block_bytes, cell.batch)) for cell in cells],
            "round_trips": round_trips,
        }

    def _staged(
        self, limits: Limits, source: RegisteredMemory, destination: RegisteredMemory, size: int, batch: int
    ) -> list[Cell]:
        store = Cell("store_staged", size, batch)
        retrieve = Cell("retrieve_staged", size, batch)
        for number in range(self._settings.rounds):
            keys = _fresh_keys(self._settings.blocks)
            self._fill(source, keys, size)
            if number % 2 == 0:
                limits.read(source, destination, size, batch)
            try:
                self._round("store", store, keys, source, batch)
                self._settle(keys)
                staged = self._client.lookup(self._namespace, keys).state
                if (staged == BlockState.FLASH).any():
                    retrieve.note = "the windows do not hold all blocks of a round: some came from flash"
                self._damage(destination)
                ok = self._round("retrieve", retrieve, keys, destination, batch)
                self._check(destination, keys, ok, size)
            finally:
                self._client.delete(self._namespace, keys)
            if number % 2:
                limits.read(source, destination, size, batch)
        return [store, retrieve]

    def _cold(self, limits: Limits, source: RegisteredMemory, destination: RegisteredMemory, size: int) -> list[Cell]:
        """More blocks than there are frames: those that LOOKUP says are on flash only are cold."""
        step = self._settings.blocks
        keys: list[bytes] = []
        cells = [Cell("retrieve_cold", size, batch) for batch in self._settings.batches]
        regions = self._client.stat().values()
        needed = sum(stats.get(StatId.FRAMES, 0) for stats in regions) + 2 * step
        free = sum(stats.get(StatId.SLOTS, 0) - stats.get(StatId.SLOTS_USED, 0) for stats in regions)
        if needed > free or needed * size > _COLD_BYTES_MAX:
            for cell in cells:
                cell.note = (
                    f"not measured: to fill the windows takes {needed} blocks, {approximate_size(needed * size)}; "
                    f"{free} slots are free, and no more than {approximate_size(_COLD_BYTES_MAX)} is stored for it"
                )
            return cells
        try:
            while len(keys) < needed:
                fresh = _fresh_keys(step)
                self._fill(source, fresh, size)
                keys += fresh
                self._client.store(self._namespace, fresh, source.blocks(np.arange(step), size))
                self._settle(fresh)
            for number in range(self._settings.rounds):
                for cell in cells:
                    if number % 2 == 0:
                        limits.read_flash(size, cell.batch)
                    state = self._client.lookup(self._namespace, keys).state
                    cold = np.flatnonzero(state == BlockState.FLASH)[:step]
                    if len(cold) < step:
                        cell.note = f"only {len(cold)} of {len(keys)} stored blocks were on flash alone; not measured"
                        continue
                    wanted = [keys[index] for index in cold]
                    self._damage(destination)
                    ok = self._round("retrieve", cell, wanted, destination, cell.batch)
                    self._check(destination, wanted, ok, size)
                    if number % 2:
                        limits.read_flash(size, cell.batch)
        finally:
            for start in range(0, len(keys), step):
                self._client.delete(self._namespace, keys[start : start + step])
        return cells

    def _round(self, operation: str, cell: Cell, keys: Sequence[bytes], memory: RegisteredMemory, batch: int) -> Bools:
        """Time one round, call by call. Which blocks succeeded; those that did not count nothing and are said."""
        call = getattr(self._client, operation)
        times: list[float] = []
        ok = np.zeros(len(keys), np.bool_)
        for start in range(0, len(keys), batch):
            part = keys[start : start + batch]
            places = memory.blocks(np.arange(start, start + len(part)), cell.block_bytes)
            started = perf_counter()
            results = call(self._namespace, part, places, verify=self._settings.verify)
            times.append(perf_counter() - started)
            ok[start : start + len(part)] = results.status == Status.OK
            cell.other_answers.update({s.name: n for s, n in results.counts().items() if s is not Status.OK})
        cell.rounds.append(times)
        cell.moved.append(int(ok.sum()))
        return ok

    def _settle(self, keys: Sequence[bytes]) -> None:
        """Wait until nothing of `keys` is on its way to flash any more, so that no flush runs into what follows."""
        deadline_s = monotonic() + _SETTLE_TIMEOUT_S
        while (self._client.lookup(self._namespace, keys).state == BlockState.STAGED).any():
            if monotonic() > deadline_s:
                raise UnavailableError(f"blocks were still not on flash after {_SETTLE_TIMEOUT_S:g} s")
            sleep(_SETTLE_POLL_S)

    def _fill(self, memory: RegisteredMemory, keys: Sequence[bytes], size: int) -> None:
        for place, key in enumerate(keys):
            self._pattern.fill(key, memory.view[place * size : (place + 1) * size])

    @staticmethod
    def _damage(memory: RegisteredMemory) -> None:
        memory.array(np.uint64)[::_DAMAGE_STEP_WORDS] ^= np.uint64(0x5A5A5A5A5A5A5A5A)

    def _check(self, memory: RegisteredMemory, keys: Sequence[bytes], ok: Bools, size: int) -> None:
        for place in np.flatnonzero(ok).tolist():
            key = keys[place]
            offset = self._pattern.first_mismatch(key, memory.view[place * size : (place + 1) * size])
            if offset is not None:
                self._wrong.append(f"block {key.hex()} of {size} bytes differs at byte {offset}")

    def _round_trips(self, peer: SocketPeer) -> dict[str, Any]:
        """Where no bytes to speak of move: LOOKUP of present keys, and RETRIEVE of one small staged block, next to a
        bare round trip."""
        settings = self._settings
        calls_s: dict[tuple[str, int], list[float]] = {("lookup", batch): [] for batch in settings.lookup_batches}
        calls_s["retrieve", 1] = []
        keys = _fresh_keys(max(settings.lookup_batches))
        pings_s: list[float] = []
        with self._client.allocate(_SMALL_BYTES) as memory:
            try:
                self._store_small(memory, keys)
                for _number in range(settings.rounds):
                    pings_s += peer.ping_s()
                    for (operation, batch), times in calls_s.items():
                        times += self._time_small(operation, memory, keys[-batch:])
            finally:
                self._client.delete(self._namespace, keys)
        ping_us = statistics.median(pings_s) * 1e6
        return {
            "ping_p50_us": ping_us,
            "rows": [
                {
                    "operation": operation,
                    "batch": batch,
                    "keys_per_s": batch / statistics.median(times),
                    "p50_us": statistics.median(times) * 1e6,
                    "p99_us": float(np.percentile(times, 99)) * 1e6,
                    "of_ping": statistics.median(times) * 1e6 / ping_us,
                }
                for (operation, batch), times in calls_s.items()
            ],
        }

    def _store_small(self, memory: RegisteredMemory, keys: Sequence[bytes]) -> None:
        """The same bytes under every key; the last keys are staged, as the windows hold them."""
        for start in range(0, len(keys), _SMALL_STEP):
            part = keys[start : start + _SMALL_STEP]
            results = self._client.store(self._namespace, part, memory.spans([0] * len(part), _SMALL_BYTES))
            if not results.all_ok:
                raise UnavailableError(f"the pod does not take blocks of {format_size(_SMALL_BYTES)}: {results}")
            self._settle(part)

    def _time_small(self, operation: str, memory: RegisteredMemory, keys: Sequence[bytes]) -> list[float]:
        times: list[float] = []
        place = memory.spans([0], _SMALL_BYTES)
        for _call in range(_SMALL_CALLS):
            started = perf_counter()
            if operation == "lookup":
                good = self._client.lookup(self._namespace, keys).prefix_blocks == len(keys)
            else:
                good = self._client.retrieve(self._namespace, keys, place, verify=self._settings.verify).all_ok
            times.append(perf_counter() - started)
            if not good:
                raise UnavailableError(f"the pod lost blocks during the benchmark ({operation})")
        return times


def _fresh_keys(count: int) -> list[bytes]:
    return [os.urandom(KEY_BYTES) for _ in range(count)]


def _verification_text(inside: bool) -> str:
    outside = "every byte of every RETRIEVE is compared outside the timed calls"
    return f"the client's checksums are {'on' if inside else 'OFF'} inside the timed calls; {outside}"


def _machine() -> dict[str, Any]:
    return {
        "entresol": client_version(),
        "cpu": _cpu_name(),
        "cpus": len(os.sched_getaffinity(0)),
        "kernel": platform.release(),
        "machine": platform.machine(),
        "python": platform.python_version(),
    }


def _cpu_name() -> str:
    """As Linux names it; where it does not (Arm), the architecture."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.machine()


def _bench_record(tenant: str) -> NamespaceRecord:
    """A namespace of this run alone."""
    return NamespaceRecord(
        tenant=tenant,
        salt=secrets.token_bytes(16),
        model_id="entresol-bench",
        weights_revision="",
        lora_id="",
        lora_revision="",
        kv_dtype=UNKNOWN,
        quantisation="",
        layout="entresol-pattern",
        page_tokens=UNKNOWN,
        block_tokens=UNKNOWN,
        layers=UNKNOWN,
        kv_heads=UNKNOWN,
        head_size=UNKNOWN,
        tp_rank=0,
        tp_size=1,
        pp_rank=0,
        pp_size=1,
        cp_rank=0,
        cp_size=1,
    )
