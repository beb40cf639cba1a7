"""Options of the benchmark's commands and the settings they make. `entresol-agent` and `entresol-emu` share them."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final, TypeVar

import click

from host_agent.bench.settings import OPERATIONS, BenchSettings
from host_agent.cli_options import DURATION, SIZE

F = TypeVar("F", bound=Callable[..., Any])
REPORT_DIR: Final = Path("bench-report")
_NAMES: Final = ("block_bytes", "batches", "lookup_batches", "operations", "rounds", "limit_s", "blocks")


def bench_options(function: F) -> F:
    """What to measure, and where the report goes."""
    for option in (
        click.option("--quick", is_flag=True, help="In seconds, to see that it works; too little for figures."),
        click.option("--block", "block_bytes", type=SIZE, multiple=True, help="Block size; repeat it for more."),
        click.option("--batch", "batches", type=click.IntRange(1), multiple=True, help="Blocks in a call; repeat it."),
        click.option(
            "--lookup-batch",
            "lookup_batches",
            type=click.IntRange(1),
            multiple=True,
            help="Keys in a LOOKUP; repeat it.",
        ),
        click.option(
            "--case", "operations", type=click.Choice(OPERATIONS), multiple=True, help="What to measure; repeat it."
        ),
        click.option("--rounds", type=click.IntRange(1), help="Of which the median counts."),
        click.option(
            "--limit",
            "limit_s",
            type=DURATION,
            help="Where it would take longer, parts have fewer rounds, three at least; 0: never.  [default: 9min]",
        ),
        click.option("--blocks", type=click.IntRange(1), help="Blocks of one round."),
        click.option("--no-verify", is_flag=True, help="Leave the checksums out of the timed calls."),
        click.option(
            "--out",
            type=click.Path(file_okay=False, path_type=Path),
            default=REPORT_DIR,
            show_default=True,
            help="Directory for report.md, report.json and pictures.",
        ),
        click.option("--json", "as_json", is_flag=True, help="Print the report's JSON, for scripts."),
    ):
        function = option(function)
    return function


def bench_settings(options: dict[str, Any], **changes: Any) -> BenchSettings:
    """From the options that `bench_options` gave, which are taken out of `options`, and further `changes`.

    Raises UserError.
    """
    base = BenchSettings.quick() if options.pop("quick") else BenchSettings()
    given = {name: options.pop(name) for name in _NAMES}
    changes |= {name: value for name, value in given.items() if value not in ((), None)}
    blocks = changes.get("blocks", base.blocks)
    if "batches" not in changes:  # those of the defaults that such a round has
        changes["batches"] = tuple(batch for batch in base.batches if batch <= blocks) or (blocks,)
    return dataclasses.replace(base, verify=not options.pop("no_verify"), **changes)
