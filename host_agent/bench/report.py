"""The benchmark's result for people: tables with ratios first, from the report's JSON alone.

Used by `entresol-agent bench` and `entresol-emu bench`; what a command adds of its own (goals) comes as tables too.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from rich.console import Console

from common.units import format_duration, format_size
from host_agent.bench import environment, plots
from host_agent.bench.limits import LIMITS_OF
from host_agent.bench.measurements import MILLION_KEYS
from host_agent.bench.pictures import draw_pictures
from host_agent.bench.report_files import head, make_directory, write_files
from host_agent.bench.tables import Column, Table

TITLES: Final = {
    "store_staged": "STORE staged",
    "store_flash": "STORE to flash",
    "retrieve_staged": "RETRIEVE staged",
    "lease_read": "READ of leased frames",
    "retrieve_cold": "RETRIEVE cold",
    "lookup": "LOOKUP",
    "retrieve_small": "RETRIEVE of one staged block of 4 KiB",
    "mixed_retrieve": "Mixed load with evictions: RETRIEVE",
    "mixed_store": "Mixed load with evictions: STORE of what was missing",
}
_WORDS: Final = {
    "memmove": "memmove",
    "socket_pull": "socket",
    "socket_push": "socket",
    "cubic_pull": "cubic",
    "cubic_push": "cubic",
    "disk_read": "disk",
    "disk_write": "disk",
    "disk_first_write": "disk, first",
    "ping": "ping",
}
_DETAIL: Final = ("cubic", "disk, first", "fio, first")
"""Limits that a narrow terminal does without."""
_NOTES: Final = {
    "store_flash": "of disk or fio: writes over what is there; first: to places that hold nothing yet, as these slots.",
    "lease_read": "One-sided: the leases are taken before the clock starts.",
    "lookup": "Of keys that are all present, given as one array. of ping: round trips that a call takes.",
    "retrieve_small": "of ping: round trips that a call takes.",
    "store_staged": "Processor time is that within the calls: what flushes later is in STORE to flash.",
}


def report(environment_read: environment.Environment, result: Mapping[str, Any]) -> dict[str, Any]:
    """The whole report, for JSON: the head, and what `Bench.run` returned."""
    return {"environment": environment_read.as_dict(), **result}


def tables(document: Mapping[str, Any]) -> list[Table]:
    """One for each operation, and one of the limits."""
    found = [_operation_table(document, name) for name in TITLES]
    return [table for table in found if table is not None] + [_limits_table(document)]


def print_report(document: Mapping[str, Any], console: Console, first: Sequence[Table] = ()) -> None:
    """Tables on a terminal: `first`, then those of the operations."""
    for table in (*first, *tables(document)[:-1]):
        table.print(console)
    for sentence in _sentences(document):
        console.print(sentence, highlight=False, markup=False)
    for sentence in document["wrong"][:20]:
        console.print(f"WRONG: {sentence}", style="bold red", highlight=False, markup=False)


def write_report(document: Mapping[str, Any], directory: Path, title: str, first: Sequence[Table] = ()) -> list[Path]:
    """report.json, report.md and, where matplotlib is, the pictures. The files written. Raises UserError."""
    make_directory(directory)
    pictures = draw_pictures(document, directory) if plots.available() else []
    return [*write_files(directory, document, _markdown(document, title, first, pictures)), *pictures]


def _markdown(document: Mapping[str, Any], title: str, first: Sequence[Table], pictures: Sequence[Path]) -> str:
    parts = [head(title, document["environment"]), *(table.markdown() for table in first)]
    parts.append("## What the columns mean\n\n" + "\n".join(f"- {text}" for text in _sentences(document)) + "\n")
    if document["wrong"]:
        parts.append("## Wrong bytes\n\n" + "\n".join(f"- {text}" for text in document["wrong"]) + "\n")
    if pictures:
        parts.append("## Pictures\n\n" + "\n\n".join(f"![{path.stem}]({path.name})" for path in pictures) + "\n")
    parts += [table.markdown() for table in tables(document)]
    return "\n".join(parts)


def _sentences(document: Mapping[str, Any]) -> Iterator[str]:
    methods = document["limit_methods"]
    yield (
        f"of: share of the limit that was read in the same round, median of {document['settings']['rounds']} rounds "
        "with the lowest and the highest; p50 and p99 are of all calls of all rounds; s/GB: processor seconds for each "
        "GB (10^9 bytes), of the agent's process and of all processes of the pod, user and system"
    )
    yield f"verification: {document['verification']}; every round has keys that were never used before"
    yield f"page cache: {document.get('page_cache', 'the pod decides; regions open their flash with O_DIRECT')}"
    yield from (f"{name}: {text}" for name, text in methods.items())
    if document["parts_shortened"]:
        yield (
            f"{document['parts_shortened']} parts had fewer rounds than {document['settings']['rounds']}, three at "
            f"least, since all would have taken longer than {format_duration(document['settings']['limit_s'])}"
        )
    if "pod" in document:
        yield "each pod: " + ", ".join(f"{name.replace('_', ' ')} {value}" for name, value in document["pod"].items())
    yield (
        f"other work on this machine took {document['other_work_share']:.0%} of its processors during the run (a "
        "hypervisor's included)"
    )
    if document["too_large_bytes"]:
        sizes = ", ".join(format_size(size) for size in document["too_large_bytes"])
        yield f"not measured, since larger than the pod's slots: {sizes}"
    if not plots.available():
        yield "no pictures: matplotlib is not installed (pip install 'entresol[bench]')"


def _operation_table(document: Mapping[str, Any], operation: str) -> Table | None:
    cells = [cell for cell in document["cells"] if cell["operation"] == operation]
    if not cells:
        return None
    limits = [limit for limit in LIMITS_OF[operation] if any(limit in cell["of"] for cell in cells)]
    words = [_WORDS[limit] for limit in limits]
    if document["limit_methods"]["disk"].startswith("fio"):
        words = [word.replace("disk", "fio") for word in words]
    unit = cells[0]["unit"]
    facts = list(dict.fromkeys(name for cell in cells for name in cell["facts"]))
    columns = [
        Column("pod", words=True),
        Column("block"),
        Column("batch"),
        *(Column(f"of {word}", detail=word in _DETAIL) for word in words),
        *(Column(name.replace("_", " ")) for name in facts),
        Column(f"{unit}/s"),
        Column("p50 us"),
        Column("p99 us"),
        *(Column(f"{side} {'us/key' if unit == MILLION_KEYS else 's/GB'}") for side in ("agent", "DPU")),
        *(Column(f"{word} {'us' if word == 'ping' else 'GB/s'}", detail=True) for word in words),
    ]
    table = Table(TITLES[operation], columns)
    for cell in cells:
        table.add(*_row(cell, limits, facts))
        where = f"{cell['target']}, {_size(cell)}, batch {cell['batch']}"
        table.notes += [f"{where}: {note}" for note in cell["notes"]]
        if cell["other_answers"]:
            answers = ", ".join(f"{count} x {name}" for name, count in cell["other_answers"].items())
            table.notes.append(f"{where}: blocks that were answered otherwise: {answers}")
    if operation in _NOTES:
        table.notes.append(_NOTES[operation])
    return table


def _row(cell: Mapping[str, Any], limits: Sequence[str], facts: Sequence[str]) -> list[str | tuple[str, str]]:
    of, read, latency, cpu = cell["of"], cell["limits"], cell["latency_us"], cell["cpu_s_per_unit"]
    return [
        cell["target"],
        _size(cell),
        str(cell["batch"]),
        *(_spread(of.get(limit, {}), 2) for limit in limits),
        *(_spread(cell["facts"].get(name, {}), 2) for name in facts),
        _spread(cell["rate"], 3),
        f"{latency['p50']:.0f}" if latency else "-",
        f"{latency['p99']:.0f}" if latency else "-",
        _median(cpu.get("agent", {}), 2),
        _median(cpu.get("dpu", {}), 2),
        *(_median(read.get(limit, {}), 2, 1e6 if limit == "ping" else 1.0) for limit in limits),
    ]


def _limits_table(document: Mapping[str, Any]) -> Table:
    columns = [
        Column("limit", words=True),
        Column("memory of", words=True),
        *(Column(name) for name in ("block", "batch", "GB/s", "range", "s/GB here", "s/GB peer")),
    ]
    table = Table("Limits of this machine", columns)
    for row in document["limits"]:
        if row["unit"] != "GB/s":
            figures, scale = row["figures"], 1e6
            table.notes.append(f"ping: {_median(figures, 1, scale)} us ({_range(figures, 1, scale)})")
            continue
        cpu = row["cpu_s_per_gb"]
        table.add(
            row["name"].replace("_", " "),
            row["target"],
            _size(row),
            str(row["batch"]),
            _median(row["figures"], 2),
            _range(row["figures"], 2),
            _median(cpu.get("here", {}), 3),
            _median(cpu.get("peer", {}), 3),
        )
    return table


def _size(cell: Mapping[str, Any]) -> str:
    return format_size(cell["block_bytes"]) if cell["block_bytes"] else "-"


def _median(figures: Mapping[str, Any], digits: int, scale: float = 1.0) -> str:
    return _number(figures["median"] * scale, digits) if figures else "-"


def _spread(figures: Mapping[str, Any], digits: int) -> tuple[str, str]:
    """The median, and the same with the range of the rounds."""
    middle = _median(figures, digits)
    return middle, f"{middle} ({_range(figures, digits)})" if figures else middle


def _range(figures: Mapping[str, Any], digits: int, scale: float = 1.0) -> str:
    if not figures:
        return "-"
    return f"{_number(figures['min'] * scale, digits)}-{_number(figures['max'] * scale, digits)}"


def _number(value: float, digits: int) -> str:
    """With fewer digits where it is large."""
    return f"{value:.{0 if value >= 100 else min(digits, 1) if value >= 10 else digits}f}"
