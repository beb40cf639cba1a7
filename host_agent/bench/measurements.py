"""The result model: samples of rounds, and the cells of a report that are made of them.

Ratios are taken round by round, between an operation and the limit that was read beside it, and only then is the
median taken, so that a machine that slows down for a while does not favour either. Pure.
"""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import numpy as np

GIGABYTES: Final = "GB"
MILLION_KEYS: Final = "M keys"


@dataclass
class Sample:
    """One round of one operation."""

    calls_s: list[float] = field(default_factory=list)
    work: float = 0.0
    """What the calls that succeeded did, in the cell's unit."""
    cpu_s: dict[str, float] = field(default_factory=dict)
    """Processor time by side, within the calls."""
    limits: dict[str, float] = field(default_factory=dict)
    """Read in the same round: in units a second; "ping" in seconds."""
    facts: dict[str, float] = field(default_factory=dict)
    """Further figures, such as the share of blocks that were there."""
    other_answers: Counter[str] = field(default_factory=Counter)
    notes: list[str] = field(default_factory=list)

    def add(self, other: Sample) -> None:
        """Another pass of the same round."""
        self.calls_s += other.calls_s
        self.work += other.work
        for side, seconds in other.cpu_s.items():
            self.cpu_s[side] = self.cpu_s.get(side, 0.0) + seconds
        self.other_answers += other.other_answers
        self.notes += [note for note in other.notes if note not in self.notes]

    @property
    def rate(self) -> float:
        """Units a second."""
        return self.work / sum(self.calls_s)

    def of_limit(self, name: str) -> float:
        """Share of a limit; of "ping", how many of its round trips a call takes."""
        if name == "ping":
            return statistics.median(self.calls_s) / self.limits[name]
        return self.rate / self.limits[name]


@dataclass
class Cell:
    """One operation on one target at one block size and batch."""

    target: str
    operation: str
    block_bytes: int
    batch: int
    unit: str = GIGABYTES
    samples: list[Sample] = field(default_factory=list)
    note: str = ""
    """Why it was not measured."""

    def as_dict(self) -> dict[str, Any]:
        """For JSON. Figures are those of the rounds: median, lowest, highest and each."""
        measured = [sample for sample in self.samples if sample.calls_s]
        calls_us = [seconds * 1e6 for sample in measured for seconds in sample.calls_s]
        limits = sorted({name for sample in measured for name in sample.limits})
        worked = [sample for sample in measured if sample.work]
        notes = Counter(note for sample in self.samples for note in sample.notes)
        answers: Counter[str] = sum((sample.other_answers for sample in self.samples), Counter())
        return {
            "target": self.target,
            "operation": self.operation,
            "block_bytes": self.block_bytes,
            "batch": self.batch,
            "unit": self.unit,
            "rate": spread([sample.rate for sample in measured]),
            "latency_us": percentiles(calls_us),
            "of": {name: spread([s.of_limit(name) for s in measured if name in s.limits]) for name in limits},
            "limits": {name: spread([s.limits[name] for s in measured if name in s.limits]) for name in limits},
            "cpu_s_per_unit": {
                side: spread([sample.cpu_s[side] / sample.work for sample in worked if side in sample.cpu_s])
                for side in sorted({side for sample in worked for side in sample.cpu_s})
            },
            "facts": {
                name: spread([sample.facts[name] for sample in measured if name in sample.facts])
                for name in dict.fromkeys(name for sample in measured for name in sample.facts)
            },
            "other_answers": dict(answers),
            "notes": [self.note] if self.note else [f"{text} (rounds: {count})" for text, count in notes.items()],
        }


def spread(values: Sequence[float]) -> dict[str, Any]:
    """Median, lowest, highest and the values themselves; empty for none."""
    if not values:
        return {}
    return {
        "median": statistics.median(values),
        "min": min(values),
        "max": max(values),
        "rounds": list(values),
    }


def percentiles(calls_us: Sequence[float]) -> dict[str, float]:
    """Of all calls of all rounds; empty for none."""
    if not calls_us:
        return {}
    p50, p99, p999 = np.percentile(calls_us, [50, 99, 99.9])
    return {
        "p50": float(p50),
        "p99": float(p99),
        "p999": float(p999),
        "max": max(calls_us),
        "calls": len(calls_us),
    }
