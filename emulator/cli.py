"""`entresol-emu`: a pod on this machine, without hardware. Turns options into settings and outcomes into words.

Every subcommand is a thin face over a module: `emulator.pod` (up, down, status), `emulator.demo`, `emulator.compare`.
Exit codes are those of `common.errors`.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import shutil
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, TypeVar

import click
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from common import config
from common.errors import EntresolError, UserError
from emulator import latency_report
from emulator.compare import REGION_SLOTS, compare
from emulator.demo import DemoSettings, run_demo
from emulator.demo_report import DemoReport, RequestOutcome, print_demo
from emulator.goals import goals_table
from emulator.latency import LatencySettings, measure_latency
from emulator.path_profile_cli import bench_profile
from emulator.peers.cli import bench_peers
from emulator.pod import Pod
from emulator.pod_report import pod_report, print_pod
from emulator.pod_settings import FABRICS, PodSettings, default_run_dir
from emulator.scale import cli as scale_cli
from emulator.signals import ended_by_signals
from emulator.trace import TraceRecord
from host_agent.bench.environment import read_environment
from host_agent.bench.options import bench_options, bench_settings
from host_agent.bench.report import print_report, write_report
from host_agent.cli_options import SIZE
from host_agent.session import client_version

F = TypeVar("F", bound=Callable[..., Any])


class _Group(click.Group):
    """Errors meant for people end the command with their text and their exit code, without a traceback."""

    def invoke(self, ctx: click.Context) -> Any:
        try:
            return super().invoke(ctx)
        except EntresolError as error:
            click.echo(f"entresol-emu: {error}", err=True)
            ctx.exit(error.exit_code)
        except config.FieldError as error:  # of settings that options made, not a file
            option = error.field.removesuffix("_bytes").replace("_", "-")
            click.echo(f"entresol-emu: --{option}: {error}", err=True)
            ctx.exit(UserError.exit_code)


@click.group(cls=_Group, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(client_version(), message="%(version)s")
def main() -> None:
    """A pod of emulated DPUs on this machine: real processes, real bytes, no hardware."""


def run_dir_option(function: F) -> F:
    return click.option(
        "--run-dir",
        type=click.Path(file_okay=False, path_type=Path),
        help=f"Where the pod's configurations, logs and sockets are.  [default: {default_run_dir()}]",
    )(function)


def pod_options(function: F) -> F:
    """The options that change what a pod is made of; those not given keep the configuration's value."""
    return click.option("--fabric", type=click.Choice(FABRICS), help="How agents reach the DPUs.")(
        fabricless_pod_options(function)
    )


def fabricless_pod_options(function: F) -> F:
    """All of them but the fabric."""
    for option in (
        click.option(
            "--config", "config_path", type=click.Path(path_type=Path), help="A file like configs/emulator.yaml."
        ),
        click.option("--dpus", type=int, help="DPU processes."),
        click.option("--regions", type=int, help="Region workers of each DPU."),
        click.option("--flash-driver", help="auto, io_uring or thread_pool."),
        click.option("--eviction", help="s3fifo, lru, fifo or sieve."),
        click.option("--flash-dir", type=click.Path(file_okay=False, path_type=Path), help="On a disk, for O_DIRECT."),
        run_dir_option,
    ):
        function = option(function)
    return function


def size_options(function: F) -> F:
    """Of those, the ones that a command may choose for itself."""
    for option in (
        click.option("--capacity", "capacity_bytes", type=SIZE, help="Flash of each region, such as 1GiB."),
        click.option("--window", "window_bytes", type=SIZE, help="Staging memory of each region."),
    ):
        function = option(function)
    return function


def settings_from(config_path: Path | None, options: dict[str, Any], **defaults: Any) -> PodSettings:
    """The configuration file, or `defaults`, with the options that were given on top.

    Raises UserError, FieldError.
    """
    base = config.load_file(config_path, PodSettings) if config_path else PodSettings(**defaults)
    return dataclasses.replace(base, **{name: value for name, value in options.items() if value is not None})


@main.command()
@pod_options
@size_options
@click.option("--slot", "slot_bytes", type=SIZE, help="Largest block, such as 256KiB.")
@click.option("--json", "as_json", is_flag=True, help="For scripts.")
def up(config_path: Path | None, as_json: bool, **options: Any) -> None:
    """Start a pod and return once every region serves. It runs until 'entresol-emu down'."""
    settings = settings_from(config_path, options)
    with ended_by_signals():
        pod = Pod.up(settings, lambda text: click.echo(text, err=True))
    _print(pod_report(pod), as_json)


@main.command()
@run_dir_option
def down(run_dir: Path | None) -> None:
    """End a pod, every process of it, and remove its files."""
    pod = Pod.find(run_dir or default_run_dir())
    was_running = len(pod.running())
    killed = pod.down()
    for process in killed:
        click.echo(f"killed {process.pid}, which did not end when asked: {process.command}", err=True)
    click.echo(f"pod down: {was_running} processes ended, files removed")


@main.command()
@run_dir_option
@click.option("--json", "as_json", is_flag=True, help="For scripts.")
@click.pass_context
def status(ctx: click.Context, run_dir: Path | None, as_json: bool) -> None:
    """Show the pod: processes, regions, counters. Exit code 3 where a part of it does not serve."""
    report = pod_report(Pod.find(run_dir or default_run_dir()))
    _print(report, as_json)
    if not report["serving"]:
        ctx.exit(3)


@main.command()
@pod_options
@size_options
@click.option("--trace", type=click.Path(path_type=Path), help="Requests in the Mooncake trace format, JSON lines.")
@click.option("--requests", type=click.IntRange(1), default=96, show_default=True, help="How many to replay.")
@click.option("--seed", type=int, default=1, show_default=True, help="Of the generated workload.")
@click.option("--agents", type=click.IntRange(1, 16), default=2, show_default=True, help="GPU-node processes.")
@click.option("--tp", "tp_size", type=click.IntRange(1), default=8, show_default=True, help="Ranks that share the KV.")
@click.option("--block-tokens", type=click.IntRange(16), default=16, show_default=True, help="Whole 16-token pages.")
@click.option("--batch", "batch_blocks", type=click.IntRange(0), default=0, help="Blocks a call.  [default: up to 64]")
@click.option("--scatter", is_flag=True, help="Blocks in one piece a layer, as engines hold them, not gathered yet.")
@click.option("--keep", is_flag=True, help="Leave the pod up, and say what to try.")
@click.option("--json", "as_json", is_flag=True, help="For scripts.")
@click.pass_context
def demo(ctx: click.Context, /, config_path: Path | None, keep: bool, as_json: bool, **options: Any) -> None:
    """The main job end to end: a pod, two GPU nodes, a multi-turn workload, every retrieved byte checked.

    Blocks have the size of Llama-3-8B's in bf16: a 16-token page over all layers, on one of 8 tensor-parallel ranks.
    """
    replay = {name: options.pop(name) for name in ("trace", "requests", "seed", "agents", "tp_size", "block_tokens")}
    replay |= {name: options.pop(name) for name in ("batch_blocks", "scatter")}
    settings = DemoSettings.of(settings_from(config_path, options), **replay)
    records = settings.records()
    notes = Console(stderr=True)
    with ended_by_signals(), contextlib.ExitStack() as stack:
        notes.print(f"starting {settings.pod.dpus} DPUs with {settings.pod.regions} region workers each ...")
        pod = Pod.up(settings.pod, lambda text: notes.print(text))
        if not keep:
            stack.callback(pod.down)
        report = _demo_with_progress(pod, settings, records, notes).as_dict()
    if as_json:
        _print_json(report)
    else:
        print_demo(report, Console())
    if keep:
        _print_what_to_try(pod, notes)
    if report["wrong_blocks"]:
        click.echo(f"entresol-emu: {report['wrong_blocks']} blocks came back with wrong bytes", err=True)
        ctx.exit(1)


@main.command()
@fabricless_pod_options
@click.option(
    "--fabric", "fabrics", type=click.Choice(FABRICS), multiple=True, help="Which; repeat it.  [default: all]"
)
@click.option(
    "--page", "page_bytes", type=SIZE, help="Of windows and agents' memory; 2MiB where huge pages are set up."
)
@click.option(
    "--region-slots",
    type=click.IntRange(0),
    help=f"Of the region that is opened to measure restart; 0: none.  [default: {REGION_SLOTS}, with --quick none]",
)
@bench_options
@click.pass_context
def bench(
    ctx: click.Context,
    /,
    config_path: Path | None,
    fabrics: tuple[str, ...],
    region_slots: int | None,
    out: Path,
    as_json: bool,
    **options: Any,
) -> None:
    """Every operation beside this machine's limits, on a pod of each fabric in turn: a report, and how the goals of
    speed stand. Evicts nothing but its own blocks: the pods are its own."""
    if region_slots is None:
        region_slots = 0 if options["quick"] else REGION_SLOTS
    measured = bench_settings(options)
    settings = settings_from(config_path, options, dpus=1)
    notes = Console(stderr=True)
    with ended_by_signals(), notes.status("starting") as line:
        document = compare(settings, measured, fabrics or FABRICS, read_environment(), region_slots, line.update)
    goals = goals_table(document["goals"])
    files = write_report(document, out, "Benchmark on the emulator", [goals])
    if as_json:
        _print_json(document)
    else:
        print_report(document, Console(), [goals])
    notes.print(f"written: {', '.join(map(str, files))}", highlight=False, soft_wrap=True)
    if document["wrong"]:
        click.echo("entresol-emu: blocks came back with wrong bytes", err=True)
        ctx.exit(1)


main.add_command(bench_peers)


@main.command("bench-scale")
@pod_options
@scale_cli.scale_options
@click.pass_context
def bench_scale(ctx: click.Context, /, config_path: Path | None, **options: Any) -> None:
    """One to eight region workers under one to eight agents: throughput, fairness, latency, processor time."""
    of_pod = {name: options.pop(name) for name in ("fabric", "flash_driver", "eviction", "flash_dir", "run_dir")}
    for name in ("dpus", "regions"):
        if options.pop(name) is not None:
            raise UserError(f"--{name}: a pod of one DPU is measured for each of --workers")
    scale_cli.run(ctx, settings_from(config_path, of_pod), ended_by_signals, **options)


main.add_command(scale_cli.bench_large)
main.add_command(scale_cli.cost_model)


@main.command("bench-latency")
@pod_options
@click.option("--quick", is_flag=True, help="A few hundred requests: to see that it works, not for figures.")
@click.option("--rounds", type=click.IntRange(1), help="Of idle and load each.")
@click.option(
    "--out",
    type=click.Path(file_okay=False, path_type=Path),
    default=Path("latency-report"),
    show_default=True,
    help="Directory for the report: JSON, Markdown, pictures.",
)
@click.option("--json", "as_json", is_flag=True, help="For scripts.")
@click.pass_context
def bench_latency(
    ctx: click.Context,
    /,
    config_path: Path | None,
    quick: bool,
    rounds: int | None,
    out: Path,
    as_json: bool,
    **options: Any,
) -> None:
    """Latency of one-block RETRIEVEs and LOOKUPs, idle and beside stores that evict and flush without end, and for how
    long the region worker was busy at a time, by cause."""
    settings = settings_from(config_path, options)
    latency = LatencySettings.quick() if quick else LatencySettings()
    if rounds:
        latency = dataclasses.replace(latency, rounds=rounds)
    notes = Console(stderr=True)
    with ended_by_signals(), notes.status("starting") as line:
        report = measure_latency(settings, latency, line.update)
    files = latency_report.write(report, out)
    if as_json:
        _print_json(report)
    else:
        latency_report.print_latency(report, Console())
    notes.print(f"written: {', '.join(map(str, files))}", highlight=False, soft_wrap=True)
    if any(phase["wrong"] for phase in report["phases"].values()):
        click.echo("entresol-emu: blocks came back with wrong bytes", err=True)
        ctx.exit(1)


main.add_command(bench_profile)


@main.command("version")
def show_version() -> None:
    """Print the version."""
    click.echo(client_version())


@main.command("config-check")
@click.argument("file", type=click.Path(path_type=Path))
def config_check(file: Path) -> None:
    """Say whether FILE is a usable configuration of the emulator, or every mistake in it."""
    config.load_file(file, PodSettings)
    click.echo(f"{file}: sound")


def _demo_with_progress(pod: Pod, settings: DemoSettings, records: Sequence[TraceRecord], notes: Console) -> DemoReport:
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, TextColumn("{task.fields[hits]}"), console=notes) as progress:
        task = progress.add_task("replaying requests", total=len(records), hits="")
        blocks = hits = 0

        def done(outcome: RequestOutcome) -> None:
            nonlocal blocks, hits
            blocks, hits = blocks + outcome.blocks, hits + outcome.hit_blocks
            progress.update(task, advance=1, hits=f"{hits / max(blocks, 1):.0%} of blocks hit")

        return run_demo(pod, settings, records, done)


def _print_what_to_try(pod: Pod, notes: Console) -> None:
    agent = f"{_command('entresol-agent')} --config {pod.state.agent_config}"
    emu = _command("entresol-emu")
    where = "" if pod.run_dir == default_run_dir() else f" --run-dir {pod.run_dir}"
    notes.print("The pod stays up. To try:", highlight=False)
    for line in (
        f"{emu} status{where}",
        f"{agent} stat",
        f"{agent} list",
        f"{agent} put --generate 100 --manifest blocks.json",
        f"{agent} lookup blocks.json",
        f"{agent} bench --quick",
        f"{emu} down{where}",
    ):
        notes.print(f"  {line}", soft_wrap=True, highlight=False)


def _command(name: str) -> str:
    """How the reader can call a command: by its name, or as this one was called."""
    return name if shutil.which(name) else str(Path(sys.argv[0]).with_name(name))


def _print(report: dict[str, Any], as_json: bool) -> None:
    if as_json:
        _print_json(report)
    else:
        print_pod(report)


def _print_json(value: dict[str, Any]) -> None:
    json.dump(value, sys.stdout, indent=1)
    click.echo()


if __name__ == "__main__":
    main()
