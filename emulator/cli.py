"""`entresol-emu`: a pod on this machine, without hardware. Turns options into settings and outcomes into words.

Every subcommand is a thin face over a module: `emulator.pod` (up, down, status), `emulator.demo`, `emulator.compare`.
Exit codes are those of `common.errors`.
"""

from __future__ import annotations

import dataclasses
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import click

from common import config, units
from common.errors import EntresolError
from emulator.pod import Pod
from emulator.pod_report import pod_report, print_pod
from emulator.pod_settings import FABRICS, PodSettings, default_run_dir

F = TypeVar("F", bound=Callable[..., Any])


class _Size(click.ParamType):  # type: ignore[type-arg]
    name = "size"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> int:
        if isinstance(value, int):
            return value
        try:
            return units.parse_size(value)
        except units.UnitError as error:
            self.fail(str(error), param, ctx)


SIZE = _Size()


class _Group(click.Group):
    """Errors meant for people end the command with their text and their exit code, without a traceback."""

    def invoke(self, ctx: click.Context) -> Any:
        try:
            return super().invoke(ctx)
        except EntresolError as error:
            click.echo(f"entresol-emu: {error}", err=True)
            ctx.exit(error.exit_code)


@click.group(cls=_Group)
@click.version_option(package_name="entresol")
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
    for option in (
        click.option(
            "--config", "config_path", type=click.Path(path_type=Path), help="A file like configs/emulator.yaml."
        ),
        click.option("--dpus", type=int, help="DPU processes."),
        click.option("--regions", type=int, help="Region workers of each DPU."),
        click.option("--fabric", type=click.Choice(FABRICS), help="How agents reach the DPUs."),
        click.option("--capacity", "capacity_bytes", type=SIZE, help="Flash of each region, such as 1GiB."),
        click.option("--slot", "slot_bytes", type=SIZE, help="Largest block, such as 256KiB."),
        click.option("--window", "window_bytes", type=SIZE, help="Staging memory of each region."),
        click.option("--flash-driver", help="auto, io_uring or thread_pool."),
        click.option("--eviction", help="s3-fifo, lru, fifo or sieve."),
        click.option("--flash-dir", type=click.Path(file_okay=False, path_type=Path), help="On a disk, for O_DIRECT."),
        run_dir_option,
    ):
        function = option(function)
    return function


def settings_from(config_path: Path | None, options: dict[str, Any], **defaults: Any) -> PodSettings:
    """The configuration file, or `defaults`, with the options that were given on top. Raises UserError."""
    base = config.load_file(config_path, PodSettings) if config_path else PodSettings(**defaults)
    given = {name: value for name, value in options.items() if value is not None}
    try:
        return dataclasses.replace(base, **given)
    except config.FieldError as error:
        raise config.ConfigError("options", [config.Problem(0, error.field, str(error))]) from error


@main.command()
@pod_options
@click.option("--json", "as_json", is_flag=True, help="For scripts.")
def up(config_path: Path | None, as_json: bool, **options: Any) -> None:
    """Start a pod and return once every region serves. It runs until 'entresol-emu down'."""
    settings = settings_from(config_path, options)
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


@main.command("config-check")
@click.argument("file", type=click.Path(path_type=Path))
def config_check(file: Path) -> None:
    """Say whether FILE is a usable configuration of the emulator, or every mistake in it."""
    config.load_file(file, PodSettings)
    click.echo(f"{file}: good")


def _print(report: dict[str, Any], as_json: bool) -> None:
    if as_json:
        json.dump(report, sys.stdout, indent=1)
        click.echo()
    else:
        print_pod(report)


if __name__ == "__main__":
    main()
