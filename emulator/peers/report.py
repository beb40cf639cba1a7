"""The report of a comparison: JSON with everything, and tables, ratios first.

Pure: from what `emulator.peers.run` measured to plain values and tables. A ratio is Entresol's rate over the peer's in
the same round; above 1 Entresol is faster.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from typing import Any, Final

from common.units import format_size
from emulator.peers.catalogue import ENTRESOL, FLASH_READ, FLASH_STORE, LOOKUP, RETRIEVE, STORE
from emulator.peers.run import Cell, Outcome, Peers
from host_agent.bench.tables import Column, Table

TITLES: Final = {
    RETRIEVE: "RETRIEVE staged",
    STORE: "STORE staged",
    FLASH_READ: "RETRIEVE from flash",
    FLASH_STORE: "STORE to flash",
}
_ERROR_CHARACTERS: Final = 400
Key = tuple[str, int, int]


def as_dict(run: Peers, environment: Mapping[str, Any], settings: Mapping[str, Any]) -> dict[str, Any]:
    """All that was measured, as plain values for JSON."""
    return {
        "environment": dict(environment),
        "settings": dict(settings),
        "rounds": run.rounds,
        "limits": [*run.limits.rows()],
        "limits_methods": run.limits.methods,
        "limits_error": run.limits_error,
        "other_work_share": run.other_work_share,
        "ping_us": statistics.median(run.limits.pings_s) * 1e6 if run.limits.pings_s else None,
        "peers": [_peer(outcome) for outcome in run.outcomes],
    }


def tables(report: Mapping[str, Any]) -> list[Table]:
    """Ratios, then what they are made of, then who took part."""
    peers = report["peers"]
    operations = [name for name in TITLES if any(_cells(peer, name) for peer in peers)]
    found = [*(_ratios(report, name) for name in operations), _lookup(report)]
    found += [table for name in operations for table in (_absolute(report, name), _processor(report, name))]
    return [*(table for table in found if table.rows), _methods(report), _who(report)]


def wrong(report: Mapping[str, Any]) -> list[str]:
    """Every finding that bytes or answers were wrong."""
    return [f"{peer['name']}: {text}" for peer in report["peers"] for text in peer["wrong"]]


def _peer(outcome: Outcome) -> dict[str, Any]:
    peer = outcome.peer
    return {
        "name": peer.name,
        "family": peer.family.name,
        "reach": peer.reach,
        "version": outcome.version,
        "settings": peer.settings,
        "requirements": [*peer.family.requirements, *peer.family.no_deps, *peer.family.debian],
        "commands": outcome.commands,
        "environment": dict(peer.environment),
        "against": [*peer.against],
        "error": outcome.error,
        "retried": outcome.retried,
        "wrong": outcome.wrong,
        "seconds": outcome.used_s,
        "cells": [_cell(key, cell) for key, cell in outcome.cells.items()],
    }


def _cell(key: Key, cell: Cell) -> dict[str, Any]:
    operation, size, batch = key
    rates, unit = (cell.keys_per_s, "keys_per_s") if operation == LOOKUP else (cell.gb_per_s, "gb_per_s")
    values = sorted(cell.calls_us)
    per = cell.looked_up / 1e6 if operation == LOOKUP else cell.moved_bytes / 1e9
    return {
        "operation": operation,
        "block_bytes": size,
        "batch": batch,
        unit: statistics.median(rates),
        "lowest": min(rates),
        "highest": max(rates),
        "rounds": rates,
        "p50_us": values[len(values) // 2],
        "p99_us": values[min(len(values) - 1, len(values) * 99 // 100)],
        "failed": cell.failed,
        "client_cpu_s_per": cell.client_cpu_s / per if per else None,
        "server_cpu_s_per": cell.server_cpu_s / per if per else None,
    }


def _cells(peer: Mapping[str, Any], operation: str) -> dict[tuple[int, int], Mapping[str, Any]]:
    return {(cell["block_bytes"], cell["batch"]): cell for cell in peer["cells"] if cell["operation"] == operation}


def _places(report: Mapping[str, Any], operation: str) -> list[tuple[int, int]]:
    return sorted({place for peer in report["peers"] for place in _cells(peer, operation)})


def _heads(places: Sequence[tuple[int, int]]) -> list[Column]:
    return [Column(f"{format_size(size)} x {batch}") for size, batch in places]


def _against(report: Mapping[str, Any], peer: Mapping[str, Any], operation: str) -> Mapping[str, Any] | None:
    """The one of Entresol's that a peer is held against."""
    by_name: dict[str, Mapping[str, Any]] = {other["name"]: other for other in report["peers"]}
    for name in peer["against"]:
        if name in by_name and _cells(by_name[name], operation):
            return by_name[name]
    return None


def _ratios(report: Mapping[str, Any], operation: str) -> Table:
    places = _places(report, operation)
    table = Table(
        f"{TITLES[operation]}: Entresol / peer",
        [Column("peer", words=True), Column("held against it", words=True), *_heads(places)],
    )
    for peer in report["peers"]:
        theirs = _cells(peer, operation)
        against = _against(report, peer, operation)
        if theirs and against is not None:
            ours = _cells(against, operation)
            table.add(peer["name"], against["name"], *(_ratio(ours.get(at), theirs.get(at)) for at in places))
    for limit, rates in _limits(report, operation).items():
        for name in ENTRESOL:
            ours = next((_cells(peer, operation) for peer in report["peers"] if peer["name"] == name), {})
            if ours and _belongs(limit, name):
                table.add(limit, name, *(_ratio(ours.get(at), rates.get(at)) for at in places))
    return table


def _ratio(ours: Mapping[str, Any] | None, theirs: Mapping[str, Any] | None) -> tuple[str, str]:
    """Median of the ratios round by round, and their range; of medians where the rounds do not pair."""
    if ours is None or theirs is None or not theirs["lowest"]:
        return "-", "-"
    pairs = [*zip(ours["rounds"], theirs["rounds"])]
    if not len(ours["rounds"]) == len(theirs["rounds"]) == len(pairs):
        text = f"{statistics.median(ours['rounds']) / statistics.median(theirs['rounds']):.2f}"
        return text, text
    ratios = [one / other for one, other in pairs]
    text = f"{statistics.median(ratios):.2f}"
    return text, f"{text} ({min(ratios):.2f}-{max(ratios):.2f})"


def _belongs(limit: str, name: str) -> bool:
    """Which limit says something about which fabric."""
    if "socket" in limit:
        return "tcp" in name
    if "memmove" in limit:
        return "shm" in name and ("huge" in limit) == ("huge" in name)
    return "huge" not in name


def _limits(report: Mapping[str, Any], operation: str) -> dict[str, dict[tuple[int, int], Mapping[str, Any]]]:
    found: dict[str, dict[tuple[int, int], Mapping[str, Any]]] = {}
    for row in report["limits"]:
        if row["operation"] == operation:
            found.setdefault(row["limit"], {})[row["block_bytes"], row["batch"]] = row
    return found


def _absolute(report: Mapping[str, Any], operation: str) -> Table:
    places = _places(report, operation)
    table = Table(f"{TITLES[operation]}, GB/s: median (lowest-highest)", [Column("", words=True), *_heads(places)])
    for name, cells in (
        *((peer["name"], _cells(peer, operation)) for peer in report["peers"]),
        *_limits(report, operation).items(),
    ):
        if cells:
            table.add(name, *(_spread(cells.get(place)) for place in places))
    table.notes += [
        f"{peer['name']}, {format_size(size)} x {batch}: {cell['failed']} blocks were refused or missed"
        for peer in report["peers"]
        for (size, batch), cell in _cells(peer, operation).items()
        if cell["failed"]
    ]
    return table


def _spread(cell: Mapping[str, Any] | None) -> tuple[str, str]:
    if cell is None:
        return "-", "-"
    text = f"{cell['gb_per_s']:.2f}"
    return text, f"{text} ({cell['lowest']:.2f}-{cell['highest']:.2f})"


def _processor(report: Mapping[str, Any], operation: str) -> Table:
    places = _places(report, operation)
    table = Table(
        f"{TITLES[operation]}, processor seconds per GB: client + servers", [Column("", words=True), *_heads(places)]
    )
    for peer in report["peers"]:
        cells = _cells(peer, operation)
        if cells:
            table.add(peer["name"], *(_both_sides(cells.get(place)) for place in places))
    return table


def _both_sides(cell: Mapping[str, Any] | None) -> str:
    if cell is None or cell["client_cpu_s_per"] is None:
        return "-"
    return f"{cell['client_cpu_s_per']:.2f} + {cell['server_cpu_s_per']:.2f}"


def _lookup(report: Mapping[str, Any]) -> Table:
    columns = ("Entresol / peer", "M keys/s", "lowest-highest", "p50 us", "p99 us", "processor s per M keys")
    table = Table("LOOKUP", [Column("peer", words=True), Column("held against it", words=True), *map(Column, columns)])
    for peer in report["peers"]:
        for (_size, batch), cell in _cells(peer, LOOKUP).items():
            against = _against(report, peer, LOOKUP)
            ours = _cells(against, LOOKUP) if against else {}
            table.add(
                peer["name"],
                against["name"] if against else "-",
                _ratio(next(iter(ours.values()), None), cell),
                f"{cell['keys_per_s'] / 1e6:.3f}",
                f"{cell['lowest'] / 1e6:.3f}-{cell['highest'] / 1e6:.3f}",
                f"{cell['p50_us']:.0f}",
                f"{cell['p99_us']:.0f}",
                _both_sides(cell),
            )
            table.title = f"LOOKUP of {batch} keys a call"
    return table


def _methods(report: Mapping[str, Any]) -> Table:
    table = Table("Limits", [Column("limit", words=True), Column("how", words=True)])
    for name, method in report["limits_methods"].items():
        table.add(name, method)
    if report["limits_error"]:
        table.notes.append(f"They could not be read to the end: {report['limits_error']}")
    return table


def _who(report: Mapping[str, Any]) -> Table:
    table = Table(
        "Who took part, and how",
        [Column(head, words=True) for head in ("peer", "version", "settings", "servers' commands", "error")],
    )
    for peer in report["peers"]:
        environment = " ".join(f"{name}={value}" for name, value in peer["environment"].items())
        commands = "; ".join(" ".join((environment, command)).strip() for command in peer["commands"])
        retried = f"none; one turn was begun again after: {_short(peer['retried'])}" if peer["retried"] else "none"
        error = _short(peer["error"]) or retried
        table.add(peer["name"], peer["version"] or "-", peer["settings"], commands or "-", error)
    return table


def _short(error: str) -> str:
    """Its first line, cut; the JSON has all of it."""
    line = error.partition("\n")[0]
    return line if len(line) <= _ERROR_CHARACTERS else f"{line[:_ERROR_CHARACTERS]} ..."
