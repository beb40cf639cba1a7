"""The pictures of a benchmark's report: throughput and latency against block size, and LOOKUP against batch.

From the report's JSON alone; a column of panels for each target, a row for each operation. Drawn by
`host_agent.bench.plots`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Final

from common.units import format_size
from host_agent.bench.plots import Axes, Line, Panel, draw

_ROWS: Final = {
    "store_staged": "STORE staged",
    "store_flash": "STORE to flash",
    "retrieve_staged": "RETRIEVE staged",
    "lease_read": "READ of leased frames",
    "retrieve_cold": "RETRIEVE cold",
}
_ONE_LINE_LIMITS: Final = {
    "memmove": ("memmove", 6),
    "socket_pull": ("bare socket", 5),
    "socket_push": ("bare socket", 5),
}
"""Limits that hardly depend on the batch, with their colour: drawn once, at the middle batch."""
_DISK_LIMITS: Final = ("disk_read", "disk_write")


def draw_pictures(document: Mapping[str, Any], directory: Path, suffix: str = ".svg") -> list[Path]:
    """Write those that there are figures for; which, in order. Raises UserError."""
    cells = [cell for cell in document["cells"] if cell["rate"]]
    targets = list(dict.fromkeys(cell["target"] for cell in cells))
    bulk = [cell for cell in cells if cell["operation"] in _ROWS]
    lookups = [cell for cell in cells if cell["operation"] == "lookup"]
    found: list[Path] = []
    if bulk:
        sizes = sorted({cell["block_bytes"] for cell in bulk})
        ticks = {float(size): format_size(size) for size in sizes}
        note = "lines: median of rounds; shades: lowest to highest; dashed: limits"
        for name, y_label, lines, title in (
            ("throughput", "GB/s", _throughput, f"Throughput against block size ({note})"),
            ("latency", "ms a call", _latency, "Latency of a call against block size (lines: p50; dashed: p99)"),
            (
                "processor",
                "s for each GB",
                partial(_processor, document["limits"]),
                "Processor time, both sides together, against block size (dashed: limits)",
            ),
        ):
            panels = [
                Panel(f"{text}, {target}", lines(part))
                for operation, text in _ROWS.items()
                for target in targets
                if (part := [c for c in bulk if c["operation"] == operation and c["target"] == target])
            ]
            found.append(directory / f"{name}{suffix}")
            draw(found[-1], title, panels, Axes("block", y_label, ticks), columns=len(targets))
    if lookups:
        found.append(directory / f"lookup{suffix}")
        _draw_lookups(found[-1], lookups, targets)
    return found


def _throughput(cells: Sequence[Mapping[str, Any]]) -> list[Line]:
    batches = _batches(cells)
    lines = [
        Line(f"batch {batch}", {c["block_bytes"]: _triple(c["rate"]) for c in cells if c["batch"] == batch}, colour)
        for colour, batch in enumerate(batches)
    ]
    middle = batches[len(batches) // 2]
    for limit, (label, colour) in _ONE_LINE_LIMITS.items():
        points = {
            c["block_bytes"]: c["limits"][limit]["median"]
            for c in cells
            if c["batch"] == middle and limit in c["limits"]
        }
        if points:
            lines.append(Line(f"{label} (batch {middle})", points, colour, dashed=True))
    for limit in _DISK_LIMITS:
        for colour, batch in enumerate(batches):
            points = {
                c["block_bytes"]: c["limits"][limit]["median"]
                for c in cells
                if c["batch"] == batch and limit in c["limits"]
            }
            if points:
                lines.append(Line(f"disk, {batch} at a time", points, colour, dashed=True))
    return lines


def _latency(cells: Sequence[Mapping[str, Any]]) -> list[Line]:
    return [
        Line(
            f"batch {batch}, {name}",
            {c["block_bytes"]: c["latency_us"][name] / 1e3 for c in cells if c["batch"] == batch},
            colour,
            dashed=name == "p99",
        )
        for colour, batch in enumerate(_batches(cells))
        for name in ("p50", "p99")
    ]


def _processor(limits: Sequence[Mapping[str, Any]], cells: Sequence[Mapping[str, Any]]) -> list[Line]:
    batches = _batches(cells)
    lines = [
        Line(
            f"batch {batch}",
            {
                c["block_bytes"]: _total(c["cpu_s_per_unit"])
                for c in cells
                if c["batch"] == batch and c["cpu_s_per_unit"]
            },
            colour,
        )
        for colour, batch in enumerate(batches)
    ]
    middle, target = batches[len(batches) // 2], cells[0]["target"]
    for limit, (label, colour) in _ONE_LINE_LIMITS.items():
        points = {
            row["block_bytes"]: _total(row["cpu_s_per_gb"])
            for row in limits
            if (row["name"], row["target"], row["batch"]) == (limit, target, middle) and limit in cells[0]["of"]
        }
        if points:
            lines.append(Line(f"{label} (batch {middle})", points, colour, dashed=True))
    return lines


def _total(sides: Mapping[str, Mapping[str, float]]) -> float:
    return sum(figures["median"] for figures in sides.values())


def _draw_lookups(path: Path, cells: Sequence[Mapping[str, Any]], targets: Sequence[str]) -> None:
    ticks = {float(batch): str(batch) for batch in _batches(cells)}
    rates, latencies = [], []
    for colour, target in enumerate(targets):
        own = [cell for cell in cells if cell["target"] == target]
        rates.append(Line(target, {c["batch"]: _triple(c["rate"]) for c in own}, colour))
        for name in ("p50", "p99"):
            points = {c["batch"]: c["latency_us"][name] / 1e3 for c in own}
            label = target if name == "p50" else f"{target}, p99"
            latencies.append(Line(label, points, colour, dashed=name == "p99"))
    axes = Axes("keys in a call", "", ticks, y_shared=False)
    panels = [Panel("LOOKUP: million keys/s", rates), Panel("LOOKUP: ms a call (p50, p99)", latencies)]
    draw(path, "LOOKUP against batch", panels, axes)


def _batches(cells: Sequence[Mapping[str, Any]]) -> list[int]:
    return sorted({cell["batch"] for cell in cells})


def _triple(figures: Mapping[str, Any]) -> tuple[float, float, float]:
    return figures["median"], figures["min"], figures["max"]
