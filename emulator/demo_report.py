"""What the demo found: the samples of its agents and the counters of its pod, added up, and a table of them.

Pure arithmetic and printing; measures nothing itself. Made by `emulator.demo`, printed by `entresol-emu demo`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Final, NamedTuple

import numpy as np
from rich.console import Console
from rich.table import Table

from common.units import approximate_size

OPERATIONS: Final = {"store": "STORE", "retrieve_staged": "RETRIEVE staged", "retrieve_cold": "RETRIEVE cold"}


class Call(NamedTuple):
    """One timed call of one agent. Only blocks that succeeded count."""

    blocks: int
    bytes_moved: int
    seconds: float


@dataclass
class RequestOutcome:
    """What became of one request of the workload; an agent process reports it, field by field, as JSON."""

    tokens: int
    blocks: int
    """Whole blocks of the prompt."""
    hit_blocks: int
    """Those that were retrieved, every byte as it was stored."""
    tokens_not_recomputed: int
    """Of the prefix up to the first block that was missing."""
    calls: dict[str, list[tuple[int, int, float]]]
    """By operation: `Call`s."""
    statuses: dict[str, int]
    """Per-block answers other than OK, as "store BUSY"."""
    wrong: list[str]
    """One sentence for each block that came back other than it was stored."""


@dataclass
class DemoReport:
    """Everything the demo says at its end. `as_dict` is its JSON form."""

    setup: dict[str, Any]
    requests: int = 0
    tokens: int = 0
    blocks: int = 0
    hit_blocks: int = 0
    tokens_not_recomputed: int = 0
    seconds: float = 0.0
    calls: dict[str, list[Call]] = field(default_factory=lambda: {name: [] for name in OPERATIONS})
    statuses: Counter[str] = field(default_factory=Counter)
    wrong: list[str] = field(default_factory=list)
    counters: dict[str, int] = field(default_factory=dict)
    """Change of the pod's counters over the run, by `common.wire.StatId`'s names, all regions added."""

    def add(self, outcome: RequestOutcome) -> None:
        self.requests += 1
        self.tokens += outcome.tokens
        self.blocks += outcome.blocks
        self.hit_blocks += outcome.hit_blocks
        self.tokens_not_recomputed += outcome.tokens_not_recomputed
        for name, calls in outcome.calls.items():
            self.calls[name] += [Call(*call) for call in calls]
        self.statuses.update(outcome.statuses)
        self.wrong += outcome.wrong

    @property
    def bytes_moved(self) -> int:
        return sum(call.bytes_moved for calls in self.calls.values() for call in calls)

    def as_dict(self) -> dict[str, Any]:
        stored = self.counters.get("STORE_BYTES", 0)
        written, table = self.counters.get("FLASH_WRITE_BYTES", 0), self.counters.get("TABLE_WRITE_BYTES", 0)
        return {
            **self.setup,
            "requests": self.requests,
            "seconds": self.seconds,
            "tokens": self.tokens,
            "blocks": self.blocks,
            "hit_blocks": self.hit_blocks,
            "block_hit_rate": _ratio(self.hit_blocks, self.blocks),
            "tokens_not_recomputed": self.tokens_not_recomputed,
            "bytes_moved": self.bytes_moved,
            "operations": {name: summarise(calls) for name, calls in self.calls.items()},
            "other_answers": dict(self.statuses),
            "flash": {
                "written_bytes": written,
                "of_which_slot_table_bytes": table,
                "read_bytes": self.counters.get("FLASH_READ_BYTES", 0),
                "kv_bytes_stored": stored,
                "written_per_kv_byte": _ratio(written, stored),
            },
            "counters": self.counters,
            "wrong_blocks": len(self.wrong),
            "wrong": self.wrong[:20],
        }


def summarise(calls: list[Call]) -> dict[str, float]:
    """Totals, GB/s while in calls, and latency of calls, of one operation."""
    seconds = [call.seconds for call in calls]
    total = sum(seconds)
    moved = sum(call.bytes_moved for call in calls)
    p50, p99 = np.percentile(seconds, [50, 99]) if seconds else (0.0, 0.0)
    return {
        "calls": len(calls),
        "blocks": sum(call.blocks for call in calls),
        "bytes": moved,
        "gb_per_s": moved / total / 1e9 if total else 0.0,
        "p50_ms": float(p50) * 1e3,
        "p99_ms": float(p99) * 1e3,
    }


def print_demo(report: Mapping[str, Any], console: Console) -> None:
    """`DemoReport.as_dict` for people."""
    console.print(_summary_table(report))
    console.print(_operation_table(report))
    console.print("A call is up to one batch of blocks of one request; GB/s is of one agent while in calls.")
    staged, cold = (report["counters"].get(name, 0) for name in ("RETRIEVE_STAGED", "RETRIEVE_COLD"))
    console.print(
        f"Staged or cold is what LOOKUP said just before; the regions served {staged:,} blocks from their windows and "
        f"{cold:,} from flash.",
        highlight=False,
    )
    if report["other_answers"]:
        answers = ", ".join(f"{count} x {name}" for name, count in sorted(report["other_answers"].items()))
        console.print(f"Other answers: {answers}")
    if report["wrong_blocks"]:
        console.print(f"[bold red]{report['wrong_blocks']} blocks came back wrong:[/]")
        for sentence in report["wrong"]:
            console.print(f"  {sentence}", highlight=False)
    else:
        retrieved = sum(report["operations"][name]["bytes"] for name in ("retrieve_staged", "retrieve_cold"))
        console.print(f"[green]Every byte of the {approximate_size(retrieved)} retrieved was checked and is right.[/]")


def _summary_table(report: Mapping[str, Any]) -> Table:
    pieces = f", in {report['pieces']} pieces" if report["pieces"] > 1 else ""
    size = approximate_size(report["block_bytes"])
    ranks = f" on one of {report['tp_size']} ranks" if report["tp_size"] > 1 else ""
    table = Table(
        title=f"{report['model']}, {report['kv_dtype']}; {report['fabric']}\n"
        f"{report['block_tokens']} tokens a block: {size}{ranks}{pieces}",
        show_header=False,
    )
    table.add_column()
    table.add_column(justify="right")
    flash = report["flash"]
    for name, value in (
        ("requests", f"{report['requests']}"),
        ("prompt tokens", f"{report['tokens']:,}"),
        ("block hit rate", f"{report['block_hit_rate']:.1%} of {report['blocks']:,} blocks"),
        ("tokens not recomputed", f"{report['tokens_not_recomputed']:,}"),
        ("bytes moved", f"{approximate_size(report['bytes_moved'])} in {report['seconds']:.1f} s"),
        ("flash bytes written per KV byte", f"{flash['written_per_kv_byte']:.3f}"),
    ):
        table.add_row(name, value)
    return table


def _operation_table(report: Mapping[str, Any]) -> Table:
    table = Table()
    table.add_column("")
    for heading in ("GB/s", "p50 ms", "p99 ms", "calls", "blocks", "moved"):
        table.add_column(heading, justify="right")
    for name, title in OPERATIONS.items():
        row = report["operations"][name]
        if not row["calls"]:
            table.add_row(title, "-", "-", "-", "0", "0", "-")
            continue
        table.add_row(
            title,
            f"{row['gb_per_s']:.2f}",
            f"{row['p50_ms']:.2f}",
            f"{row['p99_ms']:.2f}",
            f"{row['calls']:,}",
            f"{row['blocks']:,}",
            approximate_size(row["bytes"]),
        )
    return table


def _ratio(part: float, whole: float) -> float:
    return part / whole if whole else 0.0
