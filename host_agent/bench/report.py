"""The benchmark's result for people: ratios first, absolute figures after them.

Prints what `host_agent.bench` measured; used by `entresol-agent bench` and `entresol-emu bench`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final

from rich import box
from rich.console import Console
from rich.table import Table

from common.units import format_size
from host_agent.bench.limits import LIMITS_OF

_TITLES: Final = {
    "store_staged": "STORE staged",
    "retrieve_staged": "RETRIEVE staged",
    "retrieve_cold": "RETRIEVE cold",
}


def print_bench(result: Mapping[str, Any], console: Console, title: str = "") -> None:
    """`result` is what `Bench.run` returned."""
    for operation, name in _TITLES.items():
        cells = [cell for cell in result["cells"] if cell["operation"] == operation]
        limits = [limit for limit in LIMITS_OF[operation] if any(limit in cell["of"] for cell in cells)]
        words = [limit.partition("_")[0] for limit in limits]
        table = Table(title=f"{name}, {title}".rstrip(", "), box=box.SIMPLE_HEAD, padding=(0, 1), pad_edge=False)
        ratios, absolutes = [f"of\n{word}" for word in words], [f"{word}\nGB/s" for word in words]
        for heading in ("block", "batch", *ratios, "GB/s", "p50 us", "p99 us", *absolutes):
            table.add_column(heading, justify="right", no_wrap=True)
        for cell in cells:
            table.add_row(format_size(cell["block_bytes"]), str(cell["batch"]), *_figures(cell, limits))
        console.print(table)
    _print_round_trips(result["round_trips"], console, title)
    machine = result["machine"]
    console.print(
        f"of: share of this machine's limits ({machine['cpus']} x {machine['cpu']}), in the last "
        f"columns; all are medians of {result['settings']['rounds']} rounds, measured in turn. "
        "Limits: a memmove for each "
        "block; a blocking TCP socket, asked and answered call by call; preadv with O_DIRECT in 16 threads (flash). "
        f"Verification: {result['verification']}.",
        highlight=False,
    )
    for cell in result["cells"]:
        for text in (cell["note"], ", ".join(f"{count} x {name}" for name, count in cell["other_answers"].items())):
            if text:
                console.print(
                    f"{_TITLES[cell['operation']]}, {format_size(cell['block_bytes'])}, batch {cell['batch']}: {text}"
                )
    if result["too_large_bytes"]:
        sizes = ", ".join(format_size(size) for size in result["too_large_bytes"])
        console.print(f"Not measured, since larger than the pod's slots: {sizes}")
    for sentence in result["wrong"][:20]:
        console.print(f"[bold red]WRONG[/]: {sentence}", highlight=False)


def _figures(cell: Mapping[str, Any], limits: Sequence[str]) -> list[str]:
    if not cell["calls"]:
        return ["-"] * (3 + 2 * len(limits))
    return [
        *(f"{cell['of'][limit]:.2f}" if limit in cell["of"] else "-" for limit in limits),
        f"{cell['gb_per_s']:.2f}",
        f"{cell['p50_us']:.0f}",
        f"{cell['p99_us']:.0f}",
        *(f"{cell['limits_gb_per_s'][limit]:.1f}" if limit in cell["of"] else "-" for limit in limits),
    ]


def _print_round_trips(trips: Mapping[str, Any], console: Console, title: str) -> None:
    table = Table(title=f"Round trips, {title}".rstrip(", "), box=box.SIMPLE_HEAD, padding=(0, 1), pad_edge=False)
    table.add_column("")
    for heading in ("batch", "of ping", "p50 us", "p99 us", "M keys/s"):
        table.add_column(heading, justify="right")
    for row in trips["rows"]:
        table.add_row(
            "LOOKUP" if row["operation"] == "lookup" else "RETRIEVE of 4 KiB",
            str(row["batch"]),
            f"{row['of_ping']:.1f}",
            f"{row['p50_us']:.0f}",
            f"{row['p99_us']:.0f}",
            f"{row['keys_per_s'] / 1e6:.3f}",
        )
    console.print(table)
    console.print(f"ping: 64 bytes there and back over a Unix socket, {trips['ping_p50_us']:.0f} us.", highlight=False)
