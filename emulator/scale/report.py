"""The scale benchmark's report: tables from its JSON, on a terminal and as files. Measures nothing."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Final

from rich.console import Console

from common.errors import UserError
from common.units import format_size
from emulator.scale.figures import tail_ratio, throughput_kept
from host_agent.bench import environment
from host_agent.bench.report_files import head, write_files
from host_agent.bench.tables import Column, Table

TITLE: Final = "Many region workers, many agents"
STEM: Final = "scale"


def with_head(result: Mapping[str, Any], read: environment.Environment) -> dict[str, Any]:
    """The whole report, for JSON: what it was measured on, and what `run_scale` returned."""
    return {"environment": read.as_dict(), **result}


def load_report(path: Path) -> dict[str, Any]:
    """A report that `write_report` wrote. Raises UserError."""
    try:
        document = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise UserError(f"{path} cannot be read: {error.strerror}") from error
    except ValueError as error:
        raise UserError(f"{path} is not a report: {error}") from error
    if not isinstance(document, dict):
        raise UserError(f"{path} is not a report: no JSON object")
    return document


def tables(document: Mapping[str, Any]) -> list[Table]:
    found = [_verdicts(document), *(_cells(document, load) for load in _loads(document))]
    if document["neighbours"]:
        found.append(_neighbours(document))
    return found


def print_report(document: Mapping[str, Any], console: Console) -> None:
    for table in tables(document):
        table.print(console)
    for sentence in _sentences(document):
        console.print(sentence, highlight=False, markup=False)
    for sentence in document["wrong"][:20]:
        console.print(f"WRONG: {sentence}", style="bold red", highlight=False, markup=False)


def write_report(document: Mapping[str, Any], directory: Path) -> list[Path]:
    """scale.json and scale.md in `directory`. The files written. Raises UserError."""
    return write_files(directory, document, markdown(document), STEM)


def markdown(document: Mapping[str, Any]) -> str:
    parts = [head(TITLE, document["environment"], [f"fabric: {document['fabric']}"])]
    parts.append("## What the columns mean\n\n" + "\n".join(f"- {text}" for text in _sentences(document)) + "\n")
    if document["wrong"]:
        parts.append("## Wrong bytes\n\n" + "\n".join(f"- {text}" for text in document["wrong"]) + "\n")
    return "\n".join([*parts, *(table.markdown() for table in tables(document))])


def _sentences(document: Mapping[str, Any]) -> Iterator[str]:
    settings = document["settings"]
    yield (
        "the emulator's figures on this machine, not the product's performance: workers and agents share its cores, so "
        "that more of them cannot be faster, only not slower"
    )
    yield (
        f"every figure is the median of {settings['rounds']} rounds of {settings['phase_s']:g} s, which visit all "
        "cells in alternating order; latencies are of all calls of all rounds and agents"
    )
    yield "each agent is a process that makes one call after another; every byte is compared outside the timed calls"
    yield (
        "of fewer: throughput to the best with fewer agents, or workers, and as many of the other; worst share: the "
        "largest difference of an agent's bytes from an equal share; max/min: of the agents' bytes; Jain: 1 is equal"
    )
    yield "s/GB: processor seconds for 10^9 bytes, of all agents and of all processes of the pod, user and system"
    yield "other work: share of the machine's processors that neither the agents nor the pod used meanwhile"
    for load in _loads(document).values():
        weights = " : ".join(str(weight) for weight in load["weights"])
        yield (
            f"load {load['name']}: {load['batch']} blocks of {format_size(load['block_bytes'])} a call; RETRIEVE : "
            f"STORE : LOOKUP (of {load['lookup_batch']} keys) are {weights} calls"
        )


def _loads(document: Mapping[str, Any]) -> dict[str, Mapping[str, Any]]:
    return {load["name"]: load for load in document["settings"]["loads"]}


def _verdicts(document: Mapping[str, Any]) -> Table:
    columns = [Column("what", words=True), Column("goal"), Column("found"), Column(""), Column("where", words=True)]
    table = Table("Against the goals", columns)
    for verdict in document["verdicts"]:
        met = "met" if verdict["met"] else "missed"
        table.add(verdict["name"], f"{verdict['goal']:g}", f"{verdict['value']:.2f}", met, verdict["where"])
    return table


def _cells(document: Mapping[str, Any], load: str) -> Table:
    columns = [Column("workers"), Column("agents"), Column("GB/s"), Column("GB/s, range", detail=True)]
    columns += [
        Column("of fewer agents"),
        Column("of fewer workers"),
        Column("calls/s", detail=True),
        Column("worst share"),
    ]
    columns += [Column("max/min", detail=True), Column("Jain", detail=True), Column("RETRIEVE p50 us")]
    columns += [Column("p99 us"), Column("p99.9 us", detail=True), Column("p99/p50")]
    columns += [Column(name, detail=True) for name in ("STORE p99 us", "LOOKUP p99 us")]
    columns += [Column("agent s/GB", detail=True), Column("DPU s/GB"), Column("other work", detail=True)]
    table = Table(f"Load: {load}", columns)
    for cell in document["cells"]:
        if cell["load"] != load:
            continue
        kept = [throughput_kept(cell, document["cells"], axis) for axis in ("agents", "workers")]
        latency, fair, cpu, rate = (cell[name] for name in ("latency_us", "fairness", "cpu_s_per_gb", "gb_per_s"))
        retrieve = latency["retrieve"]
        table.add(
            str(cell["workers"]),
            str(cell["agents"]),
            f"{rate['median']:.2f}",
            f"{rate['min']:.2f}-{rate['max']:.2f}",
            *("-" if value is None else f"{value:.2f}" for value in kept),
            f"{cell['calls_per_s']['median']:.0f}",
            *(f"{fair[name]:.2f}" if cell["agents"] > 1 else "-" for name in ("worst", "max_over_min")),
            f"{fair['jain']:.3f}" if cell["agents"] > 1 else "-",
            *(f"{retrieve[name]:.0f}" if retrieve else "-" for name in ("p50", "p99", "p999")),
            f"{tail_ratio(cell):.1f}" if retrieve else "-",
            *(f"{latency[name]['p99']:.0f}" if latency[name] else "-" for name in ("store", "lookup")),
            *(f"{cpu[side]['median']:.2f}" for side in ("agent", "dpu")),
            f"{cell['other_work']:.0%}",
        )
        if cell["other_answers"]:
            answers = ", ".join(f"{count} x {name}" for name, count in sorted(cell["other_answers"].items()))
            table.notes.append(f"{cell['workers']} workers, {cell['agents']} agents: answered otherwise: {answers}")
    return table


def _neighbours(document: Mapping[str, Any]) -> Table:
    columns = [Column("workers"), Column("neighbours"), Column("alone p50 us"), Column("p99 us")]
    columns += [
        Column("calls/s", detail=True),
        Column("beside p50 us"),
        Column("p99 us"),
        Column("calls/s", detail=True),
    ]
    columns += [Column("neighbours GB/s"), Column("their p50 us", detail=True)]
    table = Table("One block of 4 KiB at a time, alone and beside agents of the first load", columns)
    for row in document["neighbours"]:
        table.add(
            str(row["workers"]),
            str(row["heavy_agents"]),
            *(f"{row['alone'].get(name, 0):.0f}" for name in ("p50", "p99", "calls_per_s")),
            *(f"{row['beside'].get(name, 0):.0f}" for name in ("p50", "p99", "calls_per_s")),
            f"{row['heavy_gb_per_s']['median']:.2f}",
            f"{row['heavy_call_p50_us']:.0f}",
        )
    return table
