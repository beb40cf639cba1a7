"""What the command line shows of the pauses of region workers: plain values for scripts, a histogram for people."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from rich.console import Console
from rich.table import Table

from common.proto.entresol.v1 import control_pb2

_LONGEST_SHOWN = 5


def pause_values(region: control_pb2.RegionPauses) -> dict[str, Any]:
    return {
        "region": region.region,
        "worker_pid": region.worker_pid,
        "bounds_ns": list(region.bounds_ns),
        "turns": list(region.turns),
        "own": list(region.own),
        "parts": {part.cause: list(part.counts) for part in region.parts},
        "total_ns": {part.cause: part.total_ns for part in region.parts},
        "longest": [
            {
                "duration_ns": pause.duration_ns,
                "waited_ns": pause.waited_ns,
                "ago_ns": pause.ago_ns,
                "parts_ns": dict(pause.parts_ns),
            }
            for pause in region.longest
        ],
    }


def duration(ns: int) -> str:
    """Three digits with a unit: `850us`, `1.2ms`."""
    for unit, size in (("s", 10**9), ("ms", 10**6), ("us", 10**3)):
        if ns >= size:
            return f"{ns / size:.3g}{unit}"
    return f"{ns}ns"


def bucket_names(bounds_ns: Sequence[int]) -> list[str]:
    return [f"<= {duration(bound)}" for bound in bounds_ns] + [f"> {duration(bounds_ns[-1])}" if bounds_ns else "all"]


def shown(counts: Iterable[Sequence[int]], buckets: int) -> range:
    """From the first bucket to the last in which any of `counts` has something."""
    used = [bucket for row in counts for bucket in range(min(buckets, len(row))) if row[bucket]]
    return range(min(used), max(used) + 1) if used else range(0)


def print_pauses(console: Console, regions: Sequence[control_pb2.RegionPauses]) -> None:
    for region in regions:
        console.print(f"region [bold]{region.region}[/bold], worker {region.worker_pid}: turns of its loop by length")
        names = bucket_names(region.bounds_ns)
        table = Table(box=None, pad_edge=False)
        for column in ("turn", "turns", "own", *(part.cause for part in region.parts)):
            table.add_column(column, justify="right")
        rows = [region.turns, region.own, *(part.counts for part in region.parts)]
        for bucket in shown(rows, len(names)):
            table.add_row(names[bucket], *(str(row[bucket] or "") for row in rows))
        console.print(table)
        for pause in region.longest[:_LONGEST_SHOWN]:
            parts = sorted(pause.parts_ns.items(), key=lambda part: -part[1])
            spent = ", ".join(f"{cause} {duration(ns)}" for cause, ns in parts)
            waited = f", {duration(pause.waited_ns)} of it without a processor" if pause.waited_ns else ""
            console.print(f"  {duration(pause.duration_ns)}{waited}, {duration(pause.ago_ns)} ago: {spent}")
    if not regions:
        console.print("no region's worker answers")
