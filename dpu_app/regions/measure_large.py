"""What a very large region costs: ``python -m dpu_app.regions.measure_large --slots 50000000 --path FILE``.

Makes a sparse file with the slot table of a region, fills it to a tenth and to nine tenths, and at each opens it and
times look-ups, stores and writes of the table; a small region goes through the same in the same run, to tell what is
due to size. At the end restart is timed against reading the table alone. Never part of serving; the figures are of
the machine it runs on, and nothing but the slot table is ever on the disk.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import gc
import json
import os
import shutil
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from common.errors import EntresolError, UserError
from common.units import approximate_size
from dpu_app.flash.anonymous_memory import AnonymousMemory
from dpu_app.flash.open import create_flash_file
from dpu_app.regions.blocking_flash import BlockingFlash
from dpu_app.regions.eviction import DEFAULT, POLICIES
from dpu_app.regions.measure import (
    BYTES_PER_SLOT_GOAL,
    RATIO_GOAL,
    SCRATCH_BYTES,
    capacity_of,
    fill_table,
    opened,
    read_table,
    resident_bytes,
)
from dpu_app.regions.measure_speed import Effort, Speed, measure_speed
from dpu_app.regions.recovery import OpenRegion, close_region, format_region, open_region
from dpu_app.regions.slot_table import ENTRY_BYTES

FRACTIONS: Final = (0.1, 0.9)
SLOTS: Final = 50_000_000
COMPARED_SLOTS: Final = 1_000_000
_SLOT_BYTES: Final = 4096
_RESTARTS: Final = 3
_MEMORY_SLACK: Final = 1.25
"""Of what the index takes: room for what opening it allocates meanwhile."""


@dataclass(frozen=True)
class State:
    """A region at one fill. Times in seconds; `resident_bytes` is what opening added to the process."""

    slots: int
    fraction: float
    used: int
    fill_s: float
    open_s: float
    """Until look-ups and loads are served."""
    order_s: float
    """From then until stores are taken."""
    array_bytes: int
    resident_bytes: int
    peak_bytes: int
    """The most that it added on the way."""
    speed: Speed

    @property
    def bytes_per_slot(self) -> float:
        return max(self.array_bytes, self.resident_bytes) / self.slots


@dataclass(frozen=True)
class Restart:
    """Reading the table, and opening the region, in turn; best of a few, so that a busy neighbour weighs on neither."""

    slots: int
    table_bytes: int
    read_s: float
    open_s: float
    cpu_s: float
    """Of the opening that `open_s` is of."""

    @property
    def ratio(self) -> float:
        return self.open_s / self.read_s


@dataclass(frozen=True)
class Large:
    """The whole measurement: the compared region first, each at each fill."""

    states: Sequence[State]
    restarts: Sequence[Restart]

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        return {
            "states": [{**dataclasses.asdict(state), "bytes_per_slot": state.bytes_per_slot} for state in self.states],
            "restarts": [{**dataclasses.asdict(restart), "ratio": restart.ratio} for restart in self.restarts],
            "goals": {"bytes_per_slot": BYTES_PER_SLOT_GOAL, "restart_ratio": RATIO_GOAL},
        }


def measure_large(
    path: str,
    slots: int,
    compared_slots: int,
    effort: Effort,
    told: Callable[[str], None],
    eviction: str = DEFAULT,
    driver: str = "auto",
) -> Large:
    """`path` is made, and removed again. Raises UserError where the machine has no room for it; EntresolError."""
    states: list[State] = []
    restarts: list[Restart] = []
    check_room(Path(path), max(slots, compared_slots))
    for count in (compared_slots, slots):
        try:
            one = _Region(path, count, eviction, driver, effort, told)
            states += one.states()
            restarts.append(one.restart)
        finally:
            Path(path).unlink(missing_ok=True)
    return Large(states, restarts)


def check_room(path: Path, slots: int) -> None:
    """Raises UserError where disk or memory would not hold the table or the index of so many slots."""
    table_bytes = slots * ENTRY_BYTES
    if path.exists():
        raise UserError(f"{path} exists: give a file that can be made and removed")
    free = shutil.disk_usage(path.absolute().parent).free
    if free < _MEMORY_SLACK * table_bytes:
        raise UserError(f"{path.absolute().parent} has {approximate_size(free)} free: too little for {slots} slots")
    available = os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    with open("/proc/meminfo") as meminfo:
        for line in meminfo:
            if line.startswith("MemAvailable:"):
                available = int(line.split()[1]) << 10
    if available < _MEMORY_SLACK * BYTES_PER_SLOT_GOAL * slots:
        raise UserError(f"{approximate_size(available)} of memory are available: too little for {slots} slots")


class _Region:
    def __init__(
        self, path: str, slots: int, eviction: str, driver: str, effort: Effort, told: Callable[[str], None]
    ) -> None:
        self._path = path
        self._slots = slots
        self._eviction = eviction
        self._driver = driver
        self._effort = effort
        self._told = told
        self._memory = AnonymousMemory(SCRATCH_BYTES)

    def states(self) -> Iterator[State]:
        """At each of `FRACTIONS` in turn; `restart` is there once all are through."""
        create_flash_file(self._path, capacity_of(self._slots, _SLOT_BYTES), preallocate=False)
        used = 0
        with opened(self._path, self._driver, self._memory) as flash:
            for fraction in FRACTIONS:
                self._told(f"{self._slots} slots: writing a table that is {fraction:.0%} full")
                started_s = time.perf_counter()
                superblock = format_region(flash, self._memory, "measure", _SLOT_BYTES, force=True)
                io = BlockingFlash(flash, self._memory)
                used = fill_table(io, superblock, shuffled=True, seed=1, used_fraction=fraction)
                fill_s = time.perf_counter() - started_s
                self._told(f"{self._slots} slots: {fraction:.0%} full")
                yield self._state(flash, fraction, used, fill_s)
                gc.collect()
            self._told(f"{self._slots} slots: restart")
            rounds = [self._restarted(flash) for _ in range(_RESTARTS)]
        best = min(rounds, key=lambda restart: restart.open_s)
        self.restart = dataclasses.replace(best, read_s=min(restart.read_s for restart in rounds))

    def _state(self, flash: Any, fraction: float, used: int, fill_s: float) -> State:
        gc.collect()
        before_bytes = resident_bytes()
        _forget_peak()
        started_s = time.perf_counter()
        region: OpenRegion = open_region(flash, self._memory, self._eviction, order_later_above_slots=0)
        open_s = time.perf_counter() - started_s
        if region.restore_order is not None:
            region.restore_order()
            region.restore_order = None
        order_s = time.perf_counter() - started_s - open_s
        grown_bytes, peak_bytes = resident_bytes() - before_bytes, _peak_bytes() - before_bytes
        if region.recovered != used:
            raise EntresolError(f"{region.recovered} of {used} entries recovered: {region.messages[:3]}")
        array_bytes = region.index.memory_bytes + round(region.policy.bytes_per_slot * self._slots)
        speed = measure_speed(region, flash, self._memory, self._effort)
        return State(self._slots, fraction, used, fill_s, open_s, order_s, array_bytes, grown_bytes, peak_bytes, speed)

    def _restarted(self, flash: Any) -> Restart:
        gc.collect()
        cpu_s = time.process_time()
        started_s = time.perf_counter()
        region = open_region(flash, self._memory, self._eviction, order_later_above_slots=0)
        open_s = time.perf_counter() - started_s
        cpu_s = time.process_time() - cpu_s
        close_region(flash, self._memory, region)
        geometry = region.superblock.geometry
        del region
        read_s = read_table(flash, self._memory, geometry)
        return Restart(self._slots, geometry.table_bytes, read_s, open_s, cpu_s)


def _forget_peak() -> None:
    """Let the kernel begin anew with the most memory that this process had (proc(5), clear_refs)."""
    with contextlib.suppress(OSError):
        Path("/proc/self/clear_refs").write_text("5")


def _peak_bytes() -> int:
    """The most resident memory since then."""
    with open("/proc/self/status") as status:
        return next((int(line.split()[1]) << 10 for line in status if line.startswith("VmHWM:")), 0)


def lines(large: Large) -> Iterator[str]:
    """For people."""
    width = 40
    states = large.states
    yield "slots".ljust(width) + "".join(f"{state.slots:>14}" for state in states)
    rows: list[tuple[str, Callable[[State], str]]] = [
        ("used", lambda state: f"{state.fraction:.0%}"),
        ("writing the table, s", lambda state: f"{state.fill_s:.2f}"),
        ("opening, s", lambda state: f"{state.open_s:.2f}"),
        ("then until stores are taken, s", lambda state: f"{state.order_s:.2f}"),
        ("index, bytes a slot, by its arrays", lambda state: f"{state.array_bytes / state.slots:.2f}"),
        ("index, bytes a slot, resident", lambda state: f"{state.resident_bytes / state.slots:.2f}"),
        ("the most while opening, bytes a slot", lambda state: f"{state.peak_bytes / state.slots:.2f}"),
    ]
    for name in states[0].speed.lookups:
        rows.append((f"LOOKUP {name}: M keys/s", lambda state, name=name: f"{state.speed.lookups[name] / 1e6:.3f}"))  # type: ignore[misc]
    rows += [
        ("inserts/s", lambda state: f"{state.speed.inserts:.0f}"),
        ("insert p99.9, us", lambda state: f"{state.speed.insert_p999_us:.0f}"),
        ("evict and insert, /s", lambda state: f"{state.speed.replacements:.0f}"),
        ("evict and insert p99.9, us", lambda state: f"{state.speed.replacement_p999_us:.0f}"),
        ("table pages encoded/s", lambda state: f"{state.speed.pages_encoded:.0f}"),
        ("table pages written/s (random)", lambda state: f"{state.speed.pages_written:.0f}"),
    ]
    for name, figure in rows:
        yield name.ljust(width) + "".join(f"{figure(state):>14}" for state in states)
    for restart in large.restarts:
        gb_per_s = restart.table_bytes / restart.read_s / 1e9
        yield (
            f"restart of {restart.slots} slots: {restart.open_s:.2f} s (processor time {restart.cpu_s:.2f} s), "
            f"reading the table {restart.read_s:.2f} s ({gb_per_s:.2f} GB/s): {restart.ratio:.2f}"
        )


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m dpu_app.regions.measure_large", description=__doc__)
    parser.add_argument("--slots", type=int, default=SLOTS)
    parser.add_argument("--compared-slots", type=int, default=COMPARED_SLOTS)
    parser.add_argument("--path", required=True, help="file to make; it is removed again")
    parser.add_argument("--eviction", choices=sorted(POLICIES), default=DEFAULT)
    parser.add_argument("--driver", default="auto")
    parser.add_argument("--quick", action="store_true", help="little of each work: to see that it works")
    parser.add_argument("--json", action="store_true", help="for scripts")
    options = parser.parse_args(arguments)
    effort = Effort(2048, 200, 20) if options.quick else Effort()
    try:
        large = measure_large(
            options.path,
            options.slots,
            options.compared_slots,
            effort,
            lambda text: print(text, file=sys.stderr),
            options.eviction,
            options.driver,
        )
    except EntresolError as error:
        print(f"measure_large: {error}", file=sys.stderr)
        return error.exit_code
    print(json.dumps(large.as_dict(), indent=1) if options.json else "\n".join(lines(large)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
