"""The order of a benchmark: targets in turn within each round, the other way about every other round, and the
machine's limits read between them. Every round uses fresh keys, checks every byte and deletes what it stored.

Knows nothing of what fabric or pod a target is. `Bench.run` gives the cells of a report.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterator, Sequence
from time import monotonic
from typing import Any, Final, TypeAlias

from common.units import format_size
from host_agent.bench.bulk_cases import STAGED_CASES, ColdBlocks, FreshBlocks, touch_windows
from host_agent.bench.cpu_time import OtherWork
from host_agent.bench.limits import LIMITS_OF, Limits
from host_agent.bench.measurements import MILLION_KEYS, Cell, Sample
from host_agent.bench.mixed_load import MixedLoad
from host_agent.bench.pace import Pace
from host_agent.bench.round_trips import SMALL_BYTES, SmallBlocks
from host_agent.bench.settings import BenchSettings
from host_agent.bench.target import Target, require_sizes

Readings: TypeAlias = dict[str, dict[str, float]]
"""Limits of one round by target."""

_WEIGHT_BYTES: Final = 128 << 20
_CALLS_WEIGHT, _COLD_SHARE, _TRIPS_WEIGHT, _MIXED_WEIGHT = 1.0, 0.5, 1.0, 3.0
"""Weights for `Pace`: one is a round's fixed part, as long as 128 MiB take to be stored, loaded and checked."""


class Bench:
    """One run. `told` hears what is being measured, for people. Raises UserError for sizes that no target takes."""

    def __init__(self, targets: Sequence[Target], settings: BenchSettings, told: Callable[[str], None]) -> None:
        self._targets = list(targets)
        sizes = settings.block_bytes
        for target in targets:
            sizes = require_sizes(target, sizes)
        self._too_large = [size for size in settings.block_bytes if size not in sizes]
        self._settings = dataclasses.replace(settings, block_bytes=sizes)
        self._told = told
        self._cells: dict[tuple[str, str, int, int], Cell] = {}

    def run(self) -> dict[str, Any]:
        """Measure everything. What was stored is deleted, also on the way out of an error. For JSON."""
        settings = self._settings
        other_work = OtherWork([target.cpu for target in self._targets])
        self._pace = Pace(self._weight(), settings.limit_s, monotonic)
        with Limits(settings.blocks, settings.flash_dir, settings.fio_s) as limits:
            self._warm(max(settings.block_bytes))
            for size in settings.block_bytes:
                with self._memory(max(settings.memory_bytes, size * settings.blocks)):
                    self._staged(limits, size)
                    if "retrieve_cold" in settings.operations:
                        self._cold(limits, size)
            if {"lookup", "retrieve_small"} & set(settings.operations):
                self._round_trips(limits)
            if "mixed" in settings.operations:
                self._mixed()
            rows, methods = limits.rows(), limits.methods()
        return {
            "settings": _plain(settings),
            "parts_shortened": self._pace.shortened,
            "other_work_share": other_work.share(),
            "verification": verification_text(settings.verify),
            "too_large_bytes": self._too_large,
            "wrong": [text for target in self._targets for text in target.wrong],
            "limit_methods": methods,
            "limits": rows,
            "cells": [cell.as_dict() for cell in self._cells.values()],
        }

    def _weight(self) -> float:
        """Of all that will be run."""
        settings = self._settings
        wanted = set(settings.operations)
        weight = 0.0
        for size in settings.block_bytes:
            if wanted & set(STAGED_CASES):
                weight += sum(_staged_weight(settings, size, batch) for batch in settings.batches)
            weight += _cold_weight(settings, size) if "retrieve_cold" in wanted else 0.0
        weight += _TRIPS_WEIGHT if wanted & {"lookup", "retrieve_small"} else 0.0
        return weight + (_MIXED_WEIGHT if "mixed" in wanted and settings.may_evict else 0.0)

    def _warm(self, size: int) -> None:
        """Every frame touched once, so that no timed call is the first to use a page of a window."""
        self._told("warming up")
        with self._memory(size * self._settings.blocks):
            for target in self._targets:
                touch_windows(target, size, self._settings.blocks)

    def _staged(self, limits: Limits, size: int) -> None:
        """Everything but cold reads, at one size."""
        settings = self._settings
        operations = [name for name in STAGED_CASES if name in settings.operations]
        for batch in settings.batches if operations else ():
            self._told(f"{format_size(size)}, batch {batch}")
            for number in self._pace.rounds(settings.rounds, _staged_weight(settings, size, batch)):
                samples: dict[tuple[str, str], Sample] = {}

                def measure(target: Target, samples: Any = samples, batch: int = batch) -> None:
                    for _pass in range(settings.passes(size, batch)):
                        with FreshBlocks(target, size, settings.blocks, settings.verify) as blocks:
                            for name in operations:
                                sample = samples.setdefault((target.name, name), Sample())
                                sample.add(STAGED_CASES[name](blocks, batch))
                        target.quiesce()

                def read(batch: int = batch) -> Readings:
                    disk: dict[str, float] = {}
                    for way in ("write", "first_write") if "store_flash" in operations else ():
                        disk |= limits.read_disk(way, size, batch)
                    return {t.name: {**limits.read_memory(t, size, batch), **disk} for t in self._targets}

                readings = self._in_turn(number, measure, read)
                for (target, name), sample in samples.items():
                    self._add(target, name, size, batch, sample, readings)

    def _cold(self, limits: Limits, size: int) -> None:
        settings = self._settings
        self._told(f"{format_size(size)}, cold")
        with contextlib.ExitStack() as stack:
            cold = {
                target.name: stack.enter_context(ColdBlocks(target, size, settings.blocks, settings.verify))
                for target in self._targets
            }
            for name, blocks in cold.items():
                for batch in settings.batches:
                    self._cell(name, "retrieve_cold", size, batch).note = blocks.problem
            for number in self._pace.rounds(settings.rounds, _cold_weight(settings, size)):
                for batch in settings.batches:
                    samples: dict[str, Sample] = {}

                    def measure(target: Target, samples: Any = samples, batch: int = batch) -> None:
                        for _pass in range(0 if cold[target.name].problem else settings.passes(size, batch)):
                            samples.setdefault(target.name, Sample()).add(cold[target.name].retrieve(batch))

                    def read(batch: int = batch) -> Readings:
                        disk = limits.read_disk("read", size, batch)
                        return {target.name: disk for target in self._targets}

                    readings = self._in_turn(number, measure, read)
                    for name, sample in samples.items():
                        self._add(name, "retrieve_cold", size, batch, sample, readings)

    def _round_trips(self, limits: Limits) -> None:
        settings = self._settings
        self._told("LOOKUP")
        batches = settings.lookup_batches if "lookup" in settings.operations else ()
        count = max(*batches, 8) if batches else 8
        with self._memory(count * SMALL_BYTES), contextlib.ExitStack() as stack:
            blocks = {
                target.name: stack.enter_context(SmallBlocks(target, count, settings.small_calls, settings.verify))
                for target in self._targets
            }
            for number in self._pace.rounds(settings.rounds, _TRIPS_WEIGHT):
                samples: list[tuple[Target, str, int, Sample]] = []

                def measure(target: Target, samples: Any = samples) -> None:
                    of_target = blocks[target.name]
                    samples.extend((target, "lookup", batch, of_target.lookup(batch)) for batch in batches)
                    if "retrieve_small" in settings.operations:
                        samples.append((target, "retrieve_small", 1, of_target.retrieve()))

                def read() -> Readings:
                    ping = limits.read_ping()
                    return {target.name: ping for target in self._targets}

                readings = self._in_turn(number, measure, read)
                for target, name, batch, sample in samples:
                    size = SMALL_BYTES if name == "retrieve_small" else 0
                    self._add(target.name, name, size, batch, sample, readings)
                    self._cell(target.name, name, size, batch).unit = MILLION_KEYS

    def _mixed(self) -> None:
        settings = self._settings
        size, batch = min(settings.mixed_block_bytes, max(settings.block_bytes)), settings.mixed_batch
        if not settings.may_evict:
            note = "not measured: it fills the pod beyond what it holds, so that blocks of others would be evicted"
            for target in self._targets:
                self._cell(target.name, "mixed_retrieve", size, batch).note = note
            return
        self._told("mixed load")
        with self._memory(size * batch), contextlib.ExitStack() as stack:
            loads = {
                target.name: stack.enter_context(MixedLoad(target, size, batch, settings.mixed_calls, settings.verify))
                for target in self._targets
            }
            for target in self._targets:
                self._cell(target.name, "mixed_retrieve", size, batch).note = loads[target.name].problem

            def measure(target: Target) -> None:
                if loads[target.name].problem:
                    return
                retrieved, stored = loads[target.name].run()
                self._add(target.name, "mixed_retrieve", size, batch, retrieved, {})
                self._add(target.name, "mixed_store", size, batch, stored, {})

            for number in self._pace.rounds(settings.rounds, _MIXED_WEIGHT):
                self._in_turn(number, measure, dict)

    def _in_turn(self, number: int, measure: Callable[[Target], None], read: Callable[[], Readings]) -> Readings:
        """One round: every target, and the limits in their midst; of one target, before or after it in turn."""
        order = self._targets if number % 2 == 0 else self._targets[::-1]
        place = len(order) // 2 if len(order) > 1 else number % 2
        for target in order[:place]:
            measure(target)
        readings = read()
        for target in order[place:]:
            measure(target)
        return readings

    @contextlib.contextmanager
    def _memory(self, length_bytes: int) -> Iterator[None]:
        with contextlib.ExitStack() as stack:
            for target in self._targets:
                stack.enter_context(target.memory(length_bytes))
            yield

    def _add(self, target: str, operation: str, size: int, batch: int, sample: Sample, readings: Readings) -> None:
        read = readings.get(target, {})
        sample.limits = {name: read[name] for name in LIMITS_OF[operation] if name in read}
        self._cell(target, operation, size, batch).samples.append(sample)

    def _cell(self, target: str, operation: str, size: int, batch: int) -> Cell:
        """Of the target of that name; made when it is first asked for."""
        return self._cells.setdefault((operation, target, size, batch), Cell(target, operation, size, batch))


def _staged_weight(settings: BenchSettings, size: int, batch: int) -> float:
    return _CALLS_WEIGHT + settings.passes(size, batch) * size * settings.blocks / _WEIGHT_BYTES


def _cold_weight(settings: BenchSettings, size: int) -> float:
    return len(settings.batches) * (_CALLS_WEIGHT + size * settings.blocks / _WEIGHT_BYTES) * _COLD_SHARE


def verification_text(inside: bool) -> str:
    """For people."""
    outside = "every byte that was loaded is compared outside the timed calls"
    return f"the client's checksums are {'on' if inside else 'OFF'} inside the timed calls; {outside}"


def _plain(settings: BenchSettings) -> dict[str, Any]:
    values = dataclasses.asdict(settings)
    values["flash_dir"] = str(settings.flash_dir) if settings.flash_dir else None
    return {name: list(value) if isinstance(value, tuple) else value for name, value in values.items()}
