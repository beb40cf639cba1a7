"""The benchmark's result for people: ratios first, absolute figures after them.

Prints what `host_agent.bench` measured; used by `entresol-agent bench` and `entresol-emu bench`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from rich import box
from rich.console import Console
from rich.table import Table

from common.units import format_size

_FIGURES: Final = ("of\nmemmove", "of\nsocket", "GB/s", "p50 us", "p99 us", "memmove\nGB/s", "socket\nGB/s")
_TITLES: Final = {
    "store_staged": "STORE staged",
    "retrieve_staged": "RETRIEVE staged",
    "retrieve_cold": "RETRIEVE cold",
}


def print_bench(result: Mapping[str, Any], console: Console, title: str = "") -> None:
    """`result` is what `Bench.run` returned."""
    limits = {(row["block_bytes"], row["batch"]): row for row in result["limits"]}
    for operation, name in _TITLES.items():
        table = Table(title=f"{name}, {title}".rstrip(", "), box=box.SIMPLE_HEAD, padding=(0, 1))
        for heading in ("block", "batch", *_FIGURES):
            table.add_column(heading, justify="right", no_wrap=True)
        for cell in result["cells"]:
            if cell["operation"] == operation:
                limit = limits[cell["block_bytes"], cell["batch"]]
                table.add_row(_size(cell), str(cell["batch"]), *_figures(cell, limit))
        console.print(table)
    _print_lookup(result["lookup"], console, title)
    machine = result["machine"]
    console.print(
        f"of: share of this machine's limits ({machine['cpus']} CPUs, Linux {machine['kernel']}), in the last two "
        f"columns; all are medians of {result['settings']['rounds']} rounds, measured in turn. "
        f"Verification: {result['verification']}.",
        highlight=False,
    )
    for cell in result["cells"]:
        for text in (cell["note"], ", ".join(f"{count} x {name}" for name, count in cell["other_answers"].items())):
            if text:
                console.print(f"{_TITLES[cell['operation']]}, {_size(cell)}, batch {cell['batch']}: {text}")
    for sentence in result["wrong"][:20]:
        console.print(f"[bold red]WRONG[/]: {sentence}", highlight=False)


def _figures(cell: Mapping[str, Any], limit: Mapping[str, Any]) -> list[str]:
    if not cell["calls"]:
        return ["-"] * len(_FIGURES)
    side = "socket_push" if cell["operation"] == "store_staged" else "socket_pull"
    return [
        f"{cell['of']['memmove']:.2f}",
        f"{cell['of']['socket']:.2f}",
        f"{cell['gb_per_s']:.2f}",
        f"{cell['p50_us']:.0f}",
        f"{cell['p99_us']:.0f}",
        f"{limit['memmove']:.1f}",
        f"{limit[side]:.1f}",
    ]


def _print_lookup(lookup: Mapping[str, Any], console: Console, title: str) -> None:
    table = Table(title=f"LOOKUP, {title}".rstrip(", "), box=box.SIMPLE_HEAD, padding=(0, 1))
    for heading in ("batch", "round trips", "M keys/s", "p50 us", "p99 us"):
        table.add_column(heading, justify="right")
    for row in lookup["rows"]:
        table.add_row(
            str(row["batch"]),
            f"{row['of_ping']:.1f}",
            f"{row['keys_per_s'] / 1e6:.3f}",
            f"{row['p50_us']:.0f}",
            f"{row['p99_us']:.0f}",
        )
    console.print(table)
    console.print(f"A bare round trip of 64 bytes over a Unix socket: {lookup['ping_p50_us']:.0f} us.")


def _size(cell: Mapping[str, Any]) -> str:
    return format_size(cell["block_bytes"])
