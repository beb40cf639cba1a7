"""What `entresol-emu bench-latency` shows and writes: tables, JSON, Markdown and two pictures. Measures nothing."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from rich.console import Console

from dpu_app.pause_report import bucket_names, duration, shown
from host_agent.bench.environment import rows as environment_rows
from host_agent.bench.plots import Axes, Line, Panel, available, draw
from host_agent.bench.report_files import head, make_directory, write_files
from host_agent.bench.tables import Column, Table

GOAL_NS: Final = 10_000_000
"""No pause of a worker from its own doing is to be longer."""
_SHOWN: Final = ("p50", "p99", "p99.9")
_LONGEST_SHOWN: Final = 8
_PLACES: Final = {"p50": 2.0, "p90": 10.0, "p99": 100.0, "p99.9": 1000.0, "p99.99": 10_000.0}
"""Where a quantile stands in the picture: one request in so many is slower."""


def tables(report: Mapping[str, Any]) -> list[Table]:
    phases = report["phases"]
    return [_requests(phases), _pauses(phases), _longest(phases), _machine(phases)]


def _requests(phases: Mapping[str, Any]) -> Table:
    columns = [Column("phase", words=True), Column("request", words=True), Column("requests")]
    columns += [Column(name) for name in (*_SHOWN, "max", "> 10 ms", "call: p50", "call: p99")]
    table = Table("Latency of one-block requests (4 KiB, staged)", columns)
    for phase, measured in phases.items():
        for name, latency in measured["latencies"].items():
            slow = longer(report_bounds(measured), latency.get("counts", []), GOAL_NS)
            times = (duration(round(latency.get(f"{quantile}_ns", 0))) for quantile in _SHOWN)
            calls = (duration(round(measured["calls"][name].get(f"{quantile}_ns", 0))) for quantile in ("p50", "p99"))
            longest = duration(latency.get("max_ns", 0))
            table.add(phase, name, str(latency["count"]), *times, longest, str(slow), *calls)
        rounds = "; ".join(
            ", ".join(
                f"{name} {duration(round(of['p50_ns']))} / {duration(round(of['p99_ns']))}" for name, of in each.items()
            )
            for each in measured["by_round"]
        )
        table.notes.append(f"{phase}, p50 / p99 by round: {rounds}.")
        if measured is list(phases.values())[-1]:
            table.notes.append(
                "Latency counts from when a request was due, so that a pause counts for every request that fell into "
                "it; the call from when it was sent. Where the first is far above the second, requests came faster "
                "than the pod, or this machine, served them one by one."
            )
        if measured["others"] or measured["wrong"]:
            table.notes.append(f"{phase}: answers other than OK {measured['others']}, wrong bytes {measured['wrong']}.")
        for stores in measured["stores"]:
            blocks = ", ".join(f"{status} {count}" for status, count in stores["statuses"].items())
            counters = ", ".join(f"{name} {count}" for name, count in measured["counters"].items())
            table.notes.append(f"{phase}: stores beside it {stores['gb_per_s']:.2f} GB/s ({blocks}); {counters}.")
    return table


def report_bounds(measured: Mapping[str, Any]) -> Sequence[int]:
    bounds: Sequence[int] = measured["pauses"]["bounds_ns"]
    return bounds


def longer(bounds_ns: Sequence[int], counts: Sequence[int], than_ns: int) -> int:
    """How many of a histogram are longer than a bound of it."""
    return sum(count for bound, count in zip([0, *bounds_ns], counts) if bound >= than_ns)


def _pauses(phases: Mapping[str, Any]) -> Table:
    columns = [Column("turn of the worker's loop")]
    rows: list[Sequence[int]] = []
    for phase, measured in phases.items():
        pauses = measured["pauses"]
        for name, counts in (("turns", pauses["turns"]), ("own", pauses["own"]), *pauses["parts"].items()):
            columns.append(Column(f"{phase}: {name}", detail=name not in ("turns", "own")))
            rows.append(counts)
    table = Table("For how long the region worker served nobody else", columns)
    names = bucket_names(report_bounds(next(iter(phases.values()))))
    for bucket in shown(rows, len(names)):
        table.add(names[bucket], *(str(row[bucket] or "") for row in rows))
    table.notes.append(
        "turns: all; own: less the time in which the worker was ready to run and had no processor; then, of turns of "
        "100 us and more, what each cause took."
    )
    for phase, measured in phases.items():
        pauses, bounds = measured["pauses"], report_bounds(measured)
        turns, own = (longer(bounds, pauses[name], GOAL_NS) for name in ("turns", "own"))
        verdict = "met" if not own else "missed"
        table.notes.append(
            f"{phase}: {turns} turns above 10 ms, {own} by the worker's own doing: the goal of none is {verdict}."
        )
    return table


def _longest(phases: Mapping[str, Any]) -> Table:
    columns = [
        Column("phase", words=True),
        Column("turn"),
        Column("without a processor"),
        Column("spent on", words=True),
    ]
    table = Table("The turns that were longest by the worker's own doing", columns)
    for phase, measured in phases.items():
        for pause in measured["pauses"]["longest"][:_LONGEST_SHOWN]:
            parts = sorted(pause["parts_ns"].items(), key=lambda part: -part[1])
            spent = ", ".join(f"{cause} {duration(ns)}" for cause, ns in parts)
            table.add(phase, duration(pause["duration_ns"]), duration(pause["waited_ns"]), spent)
    return table


def _machine(phases: Mapping[str, Any]) -> Table:
    columns = [Column("phase", words=True), Column("what", words=True)]
    columns += [Column(name) for name in (*_SHOWN, "max", "on a processor", "ready without one")]
    table = Table("What the machine did meanwhile", columns)
    for phase, measured in phases.items():
        for name, what in (("watch", "a sleep of 1 ms was too long by"), ("late", "the probe itself was late by")):
            values = measured[name]
            times = (duration(round(values.get(f"{quantile}_ns", 0))) for quantile in _SHOWN)
            table.add(phase, what, *times, duration(values.get("max_ns", 0)), "", "")
        for process in measured["machine"][0]["processes"]:
            shares = [each["processes"].get(process, {}) for each in measured["machine"]]
            on_processor, ready = (
                sum(share.get(key, 0.0) for share in shares) / len(shares) for key in ("on_processor", "ready")
            )
            table.add(phase, f"process: {process}", "", "", "", "", f"{on_processor:.0%}", f"{ready:.0%}")
        steal_s = sum(each["steal_s"] for each in measured["machine"])
        seconds = sum(each["seconds"] for each in measured["machine"])
        table.notes.append(f"{phase}: {seconds:.0f} s; taken by the host for other machines: {steal_s:.2f} s.")
    return table


def print_latency(report: Mapping[str, Any], console: Console) -> None:
    for name, value in environment_rows(report["environment"]):
        console.print(f"{name}: {value}", highlight=False, markup=False, soft_wrap=True)
    for table in tables(report):
        table.print(console)


def markdown(report: Mapping[str, Any], pictures: Sequence[str]) -> str:
    settings = ", ".join(f"{name} {value}" for name, value in report["settings"].items())
    parts = [head("Latency on the emulator", report["environment"], [f"settings: {settings}"])]
    parts += [f"![{name}]({name})\n" for name in pictures]
    return "\n".join([*parts, *(table.markdown() for table in tables(report))])


def write(report: Mapping[str, Any], out: Path) -> list[Path]:
    """Into the directory `out`, made where there is none: report.json, report.md, and the pictures where matplotlib is
    installed. What was written. Raises UserError."""
    make_directory(out)
    pictures = [out / "latency.svg", out / "pauses.svg"] if available() else []
    if pictures:
        _draw_latency(report, pictures[0])
        _draw_pauses(report, pictures[1])
    return [*write_files(out, report, markdown(report, [path.name for path in pictures])), *pictures]


def _draw_latency(report: Mapping[str, Any], path: Path) -> None:
    panels = []
    for name in next(iter(report["phases"].values()))["latencies"]:
        lines = []
        for colour, (phase, measured) in enumerate(report["phases"].items()):
            values = measured["latencies"][name]
            points = {place: values.get(f"{quantile}_ns", 0) / 1e3 for quantile, place in _PLACES.items()}
            lines.append(Line(phase, points, colour))
        panels.append(Panel(f"{name}, one block", lines))
    ticks = {place: quantile for quantile, place in _PLACES.items()}
    draw(path, "Latency of one-block requests", panels, Axes("quantile", "us", ticks))


def _draw_pauses(report: Mapping[str, Any], path: Path) -> None:
    panels = []
    for phase, measured in report["phases"].items():
        pauses, bounds = measured["pauses"], report_bounds(measured)
        rows = {"turns": pauses["turns"], "own": pauses["own"], **pauses["parts"]}
        lines = []
        for colour, (name, counts) in enumerate(rows.items()):
            points = {bound / 1e3: float(count) for bound, count in zip(bounds, counts) if count}
            if points:
                lines.append(Line(name, points, colour, dashed=name == "turns"))
        panels.append(Panel(phase, lines))
    ticks = {bound / 1e3: duration(bound) for bound in report_bounds(next(iter(report["phases"].values())))[::3]}
    draw(path, "Turns of the worker's loop by length", panels, Axes("turn, at most", "turns", ticks))
