"""Measures what the index of a large region costs: ``python -m dpu_app.regions.measure --slots 10000000 --path FILE``.

Makes a sparse file whose slot table is full of valid entries, then times reading that table (O_DIRECT, nothing else)
and opening the region, and weighs the index by its arrays and by the process's resident memory. Never part of
serving. The figures are of the machine it runs on.
"""

from __future__ import annotations

import argparse
import dataclasses
import gc
import json
import mmap
import os
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np

from common.errors import EntresolError
from doca_shims.api import FlashDevice
from dpu_app.flash.anonymous_memory import AnonymousMemory
from dpu_app.flash.open import create_flash_file, open_flash
from dpu_app.regions.blocking_flash import BlockingFlash
from dpu_app.regions.eviction import DEFAULT, POLICIES
from dpu_app.regions.recovery import OpenRegion, close_region, format_region, open_region
from dpu_app.regions.slot_table import ENTRY, ENTRY_BYTES, USED, WORDS, entry_checks
from dpu_app.regions.superblock import ENTRIES_PER_PAGE, Geometry, Superblock

SCRATCH_BYTES = 16 << 20
NAMESPACES = 16
BYTES_PER_SLOT_GOAL = 64.0
RATIO_GOAL = 2.0
_ROUNDS = 5
_GENERATIONS = 3
_DAY_S = 86400


@dataclass(frozen=True)
class Report:
    """Times are the best of a few rounds, in seconds. `cpu_s` is of the round that `open_s` is of."""

    slots: int
    table_bytes: int
    read_s: float
    open_s: float
    """Until look-ups and loads are served."""
    store_s: float
    """Until the eviction order is restored too, and stores are taken."""
    cpu_s: float
    array_bytes: int
    resident_bytes: int

    @property
    def ratio(self) -> float:
        return self.open_s / self.read_s

    @property
    def bytes_per_slot(self) -> float:
        return max(self.array_bytes, self.resident_bytes) / self.slots

    def lines(self) -> Iterator[str]:
        yield f"slots                     {self.slots}"
        yield f"slot table                {self.table_bytes / 1e6:.1f} MB"
        yield f"index, by its arrays      {self.array_bytes / self.slots:.2f} bytes a slot"
        yield f"index, by resident memory {self.resident_bytes / self.slots:.2f} bytes a slot"
        yield f"reading the table         {self.read_s:.3f} s, {self.table_bytes / self.read_s / 1e9:.2f} GB/s"
        yield f"opening the region        {self.open_s:.3f} s, of which processor time {self.cpu_s:.3f} s"
        yield f"until stores are taken    {self.store_s:.3f} s"
        yield f"bytes a slot              {self.bytes_per_slot:.2f}{_verdict(self.bytes_per_slot, BYTES_PER_SLOT_GOAL)}"
        yield f"opening / reading         {self.ratio:.2f}{_verdict(self.ratio, RATIO_GOAL)}"


def _verdict(value: float, goal: float) -> str:
    return f" (goal {goal:.0f}: {'met' if value <= goal else 'missed'})"


def capacity_of(slots: int, slot_bytes: int) -> int:
    """Bytes of flash that hold exactly `slots` slots."""
    capacity_bytes = slots * (slot_bytes + ENTRY_BYTES) + (2 << 20)
    capacity_bytes -= capacity_bytes % slot_bytes
    while Geometry.fit(capacity_bytes, slot_bytes).slots > slots:
        capacity_bytes -= slot_bytes
    while Geometry.fit(capacity_bytes, slot_bytes).slots < slots:
        capacity_bytes += slot_bytes
    return capacity_bytes


def fill_table(io: BlockingFlash, superblock: Superblock, shuffled: bool, seed: int) -> None:
    """Write a slot table in which every entry is valid: random keys; times that rise with the slot number, or,
    `shuffled`, in no order, as after long use."""
    geometry = superblock.geometry
    random = np.random.default_rng(seed)
    digests = random.integers(0, 256, (NAMESPACES, 16), np.uint8).view("V16").reshape(-1)
    step = io.request_bytes // ENTRY_BYTES
    for first in range(0, geometry.slots, step):
        slots = np.arange(first, min(first + step, geometry.slots), dtype=np.uint64)
        count = len(slots)
        entries = np.zeros(-(-count // ENTRIES_PER_PAGE) * ENTRIES_PER_PAGE, ENTRY)
        used = entries[:count]
        for column in ("key_lo", "key_hi", "checksum"):
            used[column] = random.integers(0, 1 << 63, count, np.uint64)
        used["namespace"] = digests[random.integers(0, NAMESPACES, count)]
        used["length"] = geometry.slot_bytes
        age = random.random(count) if shuffled else slots / geometry.slots
        used["stored_s"] = superblock.created_s + (age * _DAY_S).astype(np.uint32)
        used["generation"] = 1 + (age * _GENERATIONS).astype(np.uint32)
        used["flags"] = USED
        columns = np.ascontiguousarray(used.view("<u8").reshape(-1, WORDS).T)
        used["check"] = entry_checks(columns, slots, superblock.salt)
        io.write(geometry.page_offset(first // ENTRIES_PER_PAGE), entries.tobytes())
    io.flush()


def _resident_bytes() -> int:
    with open("/proc/self/statm") as statm:
        return int(statm.read().split()[1]) * mmap.PAGESIZE


@contextmanager
def _opened(path: str, driver: str, memory: AnonymousMemory) -> Iterator[FlashDevice]:
    flash = open_flash(path, driver)
    try:
        flash.register_memory(memory)
        yield flash
    finally:
        flash.close()


def _read_table(flash: FlashDevice, memory: AnonymousMemory, geometry: Geometry) -> float:
    started_s = time.perf_counter()
    for block in BlockingFlash(flash, memory).read_blocks(geometry.table_offset, geometry.table_bytes):
        if block.problem is not None:
            raise EntresolError(f"reading the slot table: {block.problem}")
    return time.perf_counter() - started_s


def measure(path: str, slots: int, slot_bytes: int, eviction: str, driver: str, shuffled: bool) -> Report:
    """`path` is overwritten."""
    create_flash_file(path, capacity_of(slots, slot_bytes), preallocate=False)
    memory = AnonymousMemory(SCRATCH_BYTES)
    with _opened(path, driver, memory) as flash:
        superblock = format_region(flash, memory, "measure", slot_bytes, force=True)
        fill_table(BlockingFlash(flash, memory), superblock, shuffled, seed=1)
        rounds = [_round(flash, memory, superblock.geometry, eviction) for _ in range(_ROUNDS)]
    best = min(rounds, key=lambda report: report.open_s)
    # Reading and opening take turns; each is represented by its best, so that a busy neighbour weighs on neither.
    read_s = min(report.read_s for report in rounds)
    return Report(
        slots,
        best.table_bytes,
        read_s,
        best.open_s,
        best.store_s,
        best.cpu_s,
        best.array_bytes,
        rounds[0].resident_bytes,
    )


def _round(flash: FlashDevice, memory: AnonymousMemory, geometry: Geometry, eviction: str) -> Report:
    read_s = _read_table(flash, memory, geometry)
    gc.collect()
    resident_bytes = _resident_bytes()
    cpu_s = time.process_time()
    started_s = time.perf_counter()
    region: OpenRegion = open_region(flash, memory, eviction, order_later_above_slots=0)
    open_s = time.perf_counter() - started_s
    cpu_s = time.process_time() - cpu_s
    if region.restore_order is not None:
        region.restore_order()
    store_s = time.perf_counter() - started_s
    resident_bytes = _resident_bytes() - resident_bytes
    if region.recovered != geometry.slots:
        raise EntresolError(f"{region.recovered} of {geometry.slots} entries recovered: {region.messages[:3]}")
    array_bytes = region.index.memory_bytes + round(region.policy.bytes_per_slot * geometry.slots)
    close_region(flash, memory, region)
    return Report(geometry.slots, geometry.table_bytes, read_s, open_s, store_s, cpu_s, array_bytes, resident_bytes)


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m dpu_app.regions.measure", description=__doc__)
    parser.add_argument("--slots", type=int, default=10_000_000)
    parser.add_argument("--slot-bytes", type=int, default=4096, help="only shapes the sparse file")
    parser.add_argument("--path", required=True, help="file to make; it is overwritten and removed again")
    parser.add_argument("--keep", action="store_true", help="leave the file")
    parser.add_argument("--shuffled", action="store_true", help="entries in no order of time, as after long use")
    parser.add_argument("--eviction", choices=sorted(POLICIES), default=DEFAULT)
    parser.add_argument("--driver", default="auto")
    parser.add_argument("--json", action="store_true", help="for scripts")
    options = parser.parse_args(arguments)
    try:
        report = measure(
            options.path, options.slots, options.slot_bytes, options.eviction, options.driver, options.shuffled
        )
    except EntresolError as error:
        print(f"measure: {error}", file=sys.stderr)
        return error.exit_code
    finally:
        if not options.keep and os.path.exists(options.path):
            os.unlink(options.path)
    if options.json:
        print(
            json.dumps({**dataclasses.asdict(report), "ratio": report.ratio, "bytes_per_slot": report.bytes_per_slot})
        )
    else:
        print("\n".join(report.lines()))
    return 0


if __name__ == "__main__":
    sys.exit(main())
