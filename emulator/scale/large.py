"""`entresol-emu bench-large`: a very large region beside a small one, as a report with a head and tables.

Measures nothing itself: that is `dpu_app.regions.measure_large`, which any DPU has.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from rich.console import Console

from common.errors import UserError
from dpu_app.regions.measure_large import measure_large
from dpu_app.regions.measure_speed import Effort
from host_agent.bench.environment import Environment
from host_agent.bench.report_files import head, write_files
from host_agent.bench.tables import Column, Table

TITLE: Final = "A very large region"
STEM: Final = "large"
QUICK: Final = Effort(2048, 200, 20)
QUICK_SLOTS: Final = (200_000, 50_000)
_SENTENCES: Final = (
    "a sparse file with a real slot table; the data area is never written, and slots of 4 KiB only shape the file",
    "rates are by the processor time of one thread; opening, reading and writing are by the clock",
    "LOOKUP: whole requests through the region engine, capsule in to capsule out, keys in no order; evict and insert: "
    "what a STORE does to index and eviction order when the region has no free slot",
    "index memory: of its arrays, and what opening added to the process; goal at most 64 bytes a slot",
    "restart: opening until look-ups and loads are served, to reading the slot table alone; goal at most 2",
)


def run_large(
    directory: Path, slots: int, compared_slots: int, effort: Effort, head: Environment, told: Callable[[str], None]
) -> dict[str, Any]:
    """The report, for JSON. Makes a file in `directory`, which is on a disk, and removes it. Raises EntresolError."""
    try:
        directory.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(f"{directory} cannot be made: {error.strerror}") from error
    measured = measure_large(str(directory / "large-region.img"), slots, compared_slots, effort, told)
    return {"environment": head.as_dict(), **measured.as_dict()}


def tables(document: Mapping[str, Any]) -> list[Table]:
    """Goals, then a column for each region and fill."""
    return [_verdicts(document), _states(document["states"]), _restarts(document["restarts"])]


def print_large(document: Mapping[str, Any], console: Console) -> None:
    """Tables on a terminal."""
    for table in tables(document):
        table.print(console)
    for sentence in _SENTENCES:
        console.print(sentence, highlight=False, markup=False)


def write_large(document: Mapping[str, Any], directory: Path) -> list[Path]:
    """large.json and large.md in `directory`. The files written. Raises UserError."""
    parts = [head(TITLE, document["environment"]), "\n".join(f"- {text}" for text in _SENTENCES) + "\n"]
    text = "\n".join([*parts, *(table.markdown() for table in tables(document))])
    return write_files(directory, document, text, STEM)


def _verdicts(document: Mapping[str, Any]) -> Table:
    table = Table("Against the goals", [Column("what", words=True), Column("goal"), Column("found"), Column("")])
    goals = document["goals"]
    bytes_per_slot = document["states"][-1]["bytes_per_slot"]
    ratio = document["restarts"][-1]["ratio"]
    for name, goal, value in (
        ("index memory, bytes a slot", goals["bytes_per_slot"], bytes_per_slot),
        ("restart to reading the slot table", goals["restart_ratio"], ratio),
    ):
        table.add(name, f"{goal:g}", f"{value:.2f}", "met" if value <= goal else "missed")
    return table


def _states(states: Sequence[Mapping[str, Any]]) -> Table:
    headings = [f"{state['slots'] / 1e6:g} M slots, {state['fraction']:.0%} full" for state in states]
    columns = [Column("", words=True), *(Column(heading) for heading in headings)]
    table = Table("Index", [*columns, Column("last to the small one")])

    def row(name: str, figure: Callable[[Mapping[str, Any]], float], digits: int, ratio: bool = True) -> None:
        values = [figure(state) for state in states]
        small = values[len(values) // 2 - 1]
        last = f"{values[-1] / small:.2f}" if ratio and small else ""
        table.add(name, *(f"{value:.{digits}f}" for value in values), last)

    row("bytes a slot, by its arrays", lambda state: state["array_bytes"] / state["slots"], 2)
    row("bytes a slot, resident", lambda state: state["resident_bytes"] / state["slots"], 2, ratio=False)
    row("bytes a slot, the most while opening", lambda state: state["peak_bytes"] / state["slots"], 2, ratio=False)
    row("writing the table, s", lambda state: state["fill_s"], 2, ratio=False)
    row("opening it for the first time, s", lambda state: state["open_s"], 2, ratio=False)
    row("then until stores are taken, s", lambda state: state["order_s"], 2, ratio=False)
    for name in states[0]["speed"]["lookups"]:
        row(
            f"LOOKUP, {name}: M keys/s",
            lambda state, name=name: state["speed"]["lookups"][name] / 1e6,  # type: ignore[misc]
            3,
        )
    for name, key, scale in (
        ("inserts into free slots, k/s", "inserts", 1e3),
        ("evict and insert, k/s", "replacements", 1e3),
        ("table pages encoded, k/s", "pages_encoded", 1e3),
        ("random table pages written, k/s", "pages_written", 1e3),
    ):
        row(name, lambda state, key=key, scale=scale: state["speed"][key] / scale, 1)  # type: ignore[misc]
    row("insert, p99.9 us", lambda state: state["speed"]["insert_p999_us"], 0)
    row("evict and insert, p99.9 us", lambda state: state["speed"]["replacement_p999_us"], 0)
    return table


def _restarts(restarts: Sequence[Mapping[str, Any]]) -> Table:
    columns = [Column("M slots"), Column("table MB"), Column("reading it s"), Column("GB/s"), Column("opening s")]
    table = Table("Restart, nine tenths full", [*columns, Column("processor s"), Column("opening / reading")])
    for restart in restarts:
        table.add(
            f"{restart['slots'] / 1e6:g}",
            f"{restart['table_bytes'] / 1e6:.0f}",
            f"{restart['read_s']:.2f}",
            f"{restart['table_bytes'] / restart['read_s'] / 1e9:.2f}",
            f"{restart['open_s']:.2f}",
            f"{restart['cpu_s']:.2f}",
            f"{restart['ratio']:.2f}",
        )
    return table
