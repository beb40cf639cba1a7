"""`entresol-emu bench-scale`, `bench-large` and `cost-model`: options into settings, reports into files and tables."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click
from rich.console import Console

from common import units
from common.errors import UserError
from dpu_app.regions.measure_large import COMPARED_SLOTS, SLOTS
from dpu_app.regions.measure_speed import Effort
from emulator.pod_settings import PodSettings, default_flash_dir
from emulator.scale.cost_model import Assumptions
from emulator.scale.cost_report import BATCHES, BLOCK_BYTES, as_dict, cost_tables, samples_of
from emulator.scale.large import QUICK, QUICK_SLOTS, print_large, run_large, write_large
from emulator.scale.report import load_report, print_report, with_head, write_report
from emulator.scale.run import run_scale, scale_run_dir
from emulator.scale.settings import ScaleSettings
from host_agent.bench.environment import read_environment
from host_agent.cli_options import Quantity


def _counts(text: str) -> tuple[int, ...]:
    try:
        return tuple(int(part) for part in text.split(","))
    except ValueError:
        raise UserError(f"{text!r} is not numbers with commas between, such as 1,2,4,8") from None


def _sizes(text: str) -> tuple[int, ...]:
    return tuple(units.parse_size(part) for part in text.split(","))


COUNTS = Quantity("numbers", _counts)
SIZES = Quantity("sizes", _sizes)


def _out_option(files: str) -> Callable[..., Any]:
    kind = click.Path(file_okay=False, path_type=Path)
    text = f"Directory for the report: {files}."
    return click.option("--out", type=kind, default=Path("scale-report"), show_default=True, help=text)


def scale_options(function: Callable[..., Any]) -> Callable[..., Any]:
    """Those of `bench-scale` that are not a pod's."""
    for option in (
        click.option("--quick", is_flag=True, help="Seconds: to see that it works, not for figures."),
        click.option("--workers", type=COUNTS, help="Region workers, a pod each.  [default: 1,2,4,8]"),
        click.option("--agents", type=COUNTS, help="Agent processes.  [default: 1,2,4,8]"),
        click.option("--rounds", type=click.IntRange(1), help="Figures are medians of so many."),
        click.option("--phase", "phase_s", type=float, help="Seconds that each load runs at a time."),
        _out_option("scale.json, scale.md"),
        click.option("--json", "as_json", is_flag=True, help="For scripts."),
    ):
        function = option(function)
    return function


def run(
    ctx: click.Context,
    base: PodSettings,
    ended_by_signals: Callable[[], contextlib.AbstractContextManager[None]],
    quick: bool,
    out: Path,
    as_json: bool,
    **options: Any,
) -> None:
    """Measure, print, write. Exit code 1 where bytes were wrong; goals that are missed stand in the report."""
    settings = ScaleSettings.quick() if quick else ScaleSettings()
    given = {name: value for name, value in options.items() if value is not None}
    settings = dataclasses.replace(settings, **given)
    read = read_environment()
    base = dataclasses.replace(base, run_dir=scale_run_dir(base.run_dir))
    notes = Console(stderr=True)
    with ended_by_signals(), notes.status("starting") as line:
        document = with_head(run_scale(base, settings, line.update), read)
    notes.print(f"written: {', '.join(map(str, write_report(document, out)))}", highlight=False, soft_wrap=True)
    if as_json:
        json.dump(document, sys.stdout, indent=1)
        click.echo()
    else:
        print_report(document, Console())
    if document["wrong"]:
        click.echo("entresol-emu: blocks came back with wrong bytes", err=True)
        ctx.exit(1)


@click.command("bench-large")
@click.option("--slots", type=click.IntRange(1000), help=f"Of the large region.  [default: {SLOTS}]")
@click.option("--compared-slots", type=click.IntRange(1000), help=f"Of the small one.  [default: {COMPARED_SLOTS}]")
@click.option(
    "--dir",
    "directory",
    type=click.Path(file_okay=False, path_type=Path),
    help=f"Where the file is made, on a disk: 64 bytes a slot are written.  [default: {default_flash_dir()}]",
)
@click.option("--quick", is_flag=True, help="Seconds: to see that it works, not for figures.")
@_out_option("large.json, large.md")
@click.option("--json", "as_json", is_flag=True, help="For scripts.")
def bench_large(
    slots: int | None,
    compared_slots: int | None,
    directory: Path | None,
    quick: bool,
    out: Path,
    as_json: bool,
) -> None:
    """A region of 50 million slots at a tenth and at nine tenths full: memory, look-ups, stores, restart."""
    read = read_environment()
    usual = QUICK_SLOTS if quick else (SLOTS, COMPARED_SLOTS)
    notes = Console(stderr=True)
    with notes.status("starting") as line:
        document = run_large(
            directory or default_flash_dir(),
            slots or usual[0],
            compared_slots or usual[1],
            QUICK if quick else Effort(),
            read,
            line.update,
        )
    notes.print(f"written: {', '.join(map(str, write_large(document, out)))}", highlight=False, soft_wrap=True)
    if as_json:
        json.dump(document, sys.stdout, indent=1)
        click.echo()
    else:
        print_large(document, Console())


def assumption_options(function: Callable[..., Any]) -> Callable[..., Any]:
    """An option for each of `Assumptions`."""
    for item in reversed(dataclasses.fields(Assumptions)):
        text = f"{item.metadata['unit']}: {item.metadata['source']}.  [default: {item.default:g}]"
        function = click.option("--" + item.name.replace("_", "-"), type=float, help=text)(function)
    return function


@click.command("cost-model")
@click.option(
    "--report",
    "reports",
    type=click.Path(dir_okay=False, path_type=Path),
    multiple=True,
    required=True,
    help="scale.json of bench-scale; several are fitted together.",
)
@click.option("--block", "block_bytes", type=SIZES, default=BLOCK_BYTES, help="Sizes, such as 64KiB,1MiB.")
@click.option("--batch", "batches", type=COUNTS, default=BATCHES, help="Blocks a capsule, such as 1,16,128.")
@assumption_options
@click.option("--json", "as_json", is_flag=True, help="For scripts.")
@click.option("--markdown", "as_markdown", is_flag=True, help="For documents.")
def cost_model(
    reports: tuple[Path, ...],
    block_bytes: tuple[int, ...],
    batches: tuple[int, ...],
    as_json: bool,
    as_markdown: bool,
    **given: float | None,
) -> None:
    """What a BlueField-4 would need for the work measured by bench-scale: cores at line rate, and every assumption.

    An extrapolation from the emulator, not a measurement: each assumption is an option.
    """
    if min(block_bytes) < 1 or min(batches) < 1:
        raise UserError("block sizes and batches are above 0")
    documents = [load_report(path) for path in reports]
    samples = samples_of(documents)
    assumed = Assumptions(**{name: value for name, value in given.items() if value is not None})
    if as_json:
        json.dump(as_dict(samples, assumed, block_bytes, batches), sys.stdout, indent=1)
        click.echo()
        return
    tables = cost_tables(samples, assumed, block_bytes, batches)
    if as_markdown:
        click.echo("\n".join(table.markdown(3) for table in tables))
        return
    for table in tables:
        table.print(Console())
