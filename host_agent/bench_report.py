"""The benchmark's result for people: ratios first, absolute figures after them.

Prints what `host_agent.bench` measured; used by `entresol-agent bench` and `entresol-emu bench`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from rich.console import Console
from rich.table import Table

_TITLES: Final = {
    "store_staged": "STORE staged",
    "retrieve_staged": "RETRIEVE staged",
    "retrieve_cold": "RETRIEVE cold",
}


def print_bench(result: Mapping[str, Any], console: Console, title: str = "") -> None:
    """`result` is what `Bench.run` returned."""
    limits = {(row["block_bytes"], row["batch"]): row for row in result["limits"]}
    table = Table(title=title or None, caption="of: share of this machine's limit, measured in the same rounds")
    table.add_column("")
    for heading in ("block", "batch", "of memmove", "of socket", "GB/s", "p50 us", "p99 us", "memmove", "socket"):
        table.add_column(heading, justify="right")
    for cell in result["cells"]:
        if not cell["calls"]:
            table.add_row(_TITLES[cell["operation"]], _size(cell), str(cell["batch"]), "-", "-", "-", "-", "-", "", "")
            continue
        limit = limits[cell["block_bytes"], cell["batch"]]
        side = "socket_push" if cell["operation"] == "store_staged" else "socket_pull"
        table.add_row(
            _TITLES[cell["operation"]],
            _size(cell),
            str(cell["batch"]),
            f"{cell['of']['memmove']:.2f}",
            f"{cell['of']['socket']:.2f}",
            f"{cell['gb_per_s']:.2f}",
            f"{cell['p50_us']:.0f}",
            f"{cell['p99_us']:.0f}",
            f"{limit['memmove']:.1f}",
            f"{limit[side]:.1f}",
        )
    console.print(table)
    _print_lookup(result["lookup"], console)
    console.print(f"Verification: {result['verification']}.", highlight=False)
    for cell in result["cells"]:
        for text in (cell["note"], ", ".join(f"{count} x {name}" for name, count in cell["other_answers"].items())):
            if text:
                console.print(f"  {_TITLES[cell['operation']]}, {_size(cell)}, batch {cell['batch']}: {text}")
    for sentence in result["wrong"][:20]:
        console.print(f"[bold red]WRONG[/]: {sentence}", highlight=False)


def _print_lookup(lookup: Mapping[str, Any], console: Console) -> None:
    table = Table(caption=f"a bare round trip of 64 bytes over a Unix socket: {lookup['ping_p50_us']:.0f} us")
    table.add_column("")
    for heading in ("batch", "round trips", "M keys/s", "p50 us", "p99 us"):
        table.add_column(heading, justify="right")
    for row in lookup["rows"]:
        table.add_row(
            "LOOKUP",
            str(row["batch"]),
            f"{row['of_ping']:.1f}",
            f"{row['keys_per_s'] / 1e6:.2f}",
            f"{row['p50_us']:.0f}",
            f"{row['p99_us']:.0f}",
        )
    console.print(table)


def _size(cell: Mapping[str, Any]) -> str:
    return f"{cell['block_bytes'] >> 10} KiB"
