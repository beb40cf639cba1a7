"""`entresol-dpu`: run the DPU application, and ask or tell a running one. Parses and prints; decides nothing.

Exit codes: 0 done, 1 went down uncleanly, 2 the caller can fix it, 3 the DPU application cannot be reached or is not
ready, 4 a lower layer failed, 70 our bug.
"""

from __future__ import annotations

import asyncio
import functools
import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click

from common import config, log, units
from common.errors import EntresolError, UserError
from common.proto.entresol.v1 import control_pb2
from doca_shims.registry import backends
from dpu_app import pause_report, report
from dpu_app.config import DpuConfig
from dpu_app.control_client import ControlClient, find_address
from dpu_app.flash.open import AUTO
from dpu_app.supervisor import Supervisor, version

CALL_TIMEOUT_S = 10.0
SLOW_CALL_TIMEOUT_S = 90.0
PRIVATE_UMASK = 0o077


def size(text: str) -> str:
    """Option type: a size with its unit, passed on as it was written."""
    _parsed(units.parse_size, text)
    return text


def duration(text: str) -> float:
    """Option type: seconds, from text with a unit."""
    return _parsed(units.parse_duration, text)


def _parsed(parse: Callable[[str], float], text: str) -> float:
    try:
        return parse(text)
    except UserError as error:
        raise click.BadParameter(str(error)) from error


class _Commands(click.Group):
    """Errors meant for people are printed without a traceback, and become exit codes."""

    def invoke(self, ctx: click.Context) -> Any:
        try:
            return super().invoke(ctx)
        except EntresolError as error:
            click.echo(f"entresol-dpu: {error}", err=True)
            sys.exit(error.exit_code)


@click.group(cls=_Commands, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(version(), message="%(version)s")
def main() -> None:
    """The Entresol DPU application: KV regions on flash, served to agents by RDMA."""


def _load(config_file: Path) -> DpuConfig:
    """The file, with backends that are installed here. Raises UserError."""
    settings = config.load_file(config_file, DpuConfig)
    named = [("fabric.name", "fabric", settings.fabric.name)]
    for index, region in enumerate(settings.regions):
        if region.flash.driver != AUTO:
            named.append((f"regions[{index}].flash.driver", "flash", region.flash.driver))
    for key, kind, name in named:
        installed = backends(kind)
        if name not in installed:
            listed = ", ".join(installed) or "none"
            raise UserError(f"{config_file}: {key}: no {kind} backend {name!r} is installed; there are: {listed}")
    return settings


@main.command()
@click.option("--config", "config_file", type=click.Path(path_type=Path), required=True, help="Configuration (YAML).")
def run(config_file: Path) -> None:
    """Serve until SIGTERM, then drain and close."""
    settings = _load(config_file)
    log.configure(settings.log)
    os.umask(PRIVATE_UMASK)

    async def serve() -> int:
        supervisor = Supervisor(settings)
        supervisor.handle_signals()
        return await supervisor.run()

    sys.exit(asyncio.run(serve()))


@main.command("config-check")
@click.argument("config_file", type=click.Path(path_type=Path))
@click.option("--json", "as_json", is_flag=True, help="Print every setting, defaults included.")
def config_check(config_file: Path, as_json: bool) -> None:
    """Check a configuration file, and say what is wrong in it by line and key."""
    settings = _load(config_file)
    if as_json:
        click.echo(json.dumps(config.to_plain(settings), indent=2))
    else:
        regions = len(settings.regions)
        click.echo(f"{config_file}: sound, {regions} region{'' if regions == 1 else 's'}")


@main.command("version")
def show_version() -> None:
    """Print the version."""
    click.echo(version())


def _talks(timeout_s: float = CALL_TIMEOUT_S) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """For commands that ask a running DPU application: their first argument is a client of it."""

    def decorate(command: Callable[..., None]) -> Callable[..., None]:
        @click.option("--address", help="gRPC address (host:port or unix:PATH).")
        @click.option("--state-dir", type=click.Path(path_type=Path), help="State directory of a running application.")
        @click.option("--config", "config_file", type=click.Path(path_type=Path), help="Its configuration file.")
        @click.option("--timeout", "call_timeout_s", type=duration, default=None, help="Time limit of the call.")
        @functools.wraps(command)
        def connected(
            address: str | None,
            state_dir: Path | None,
            config_file: Path | None,
            call_timeout_s: float | None,
            **arguments: Any,
        ) -> None:
            found = find_address(address, state_dir, config_file)
            with ControlClient(found, timeout_s if call_timeout_s is None else call_timeout_s) as client:
                command(client, **arguments)

        return connected

    return decorate


_json_option = click.option("--json", "as_json", is_flag=True, help="For scripts.")


@main.command()
@_json_option
@_talks()
def status(client: ControlClient, as_json: bool) -> None:
    """Show regions with their counters, and sessions."""
    answer = client.status()
    if as_json:
        _print_json(report.status_values(answer))
    else:
        report.print_status(report.console(), answer)


@main.command()
@_json_option
@_talks()
def pauses(client: ControlClient, as_json: bool) -> None:
    """Show for how long each region's worker was busy at a time, serving nobody else, and what with."""
    answer = client.pauses()
    if as_json:
        _print_json([pause_report.pause_values(region) for region in answer])
    else:
        pause_report.print_pauses(report.console(), answer)


@main.command()
@click.argument("regions", nargs=-1)
@click.option("--for", "drain_s", type=duration, default="30s", show_default=True, help="How long it may take.")
@_json_option
@_talks()
def drain(client: ControlClient, regions: tuple[str, ...], drain_s: float, as_json: bool) -> None:
    """Take no more stores, and bring what is staged to flash, on all REGIONS or those named.

    A drained region still serves loads; it takes stores again after a restart.
    """
    _print_regions(client.drain(regions, drain_s), as_json)


@main.group("regions")
def regions_group() -> None:
    """List, make, delete and format regions."""


@regions_group.command("list")
@_json_option
@_talks()
def list_regions(client: ControlClient, as_json: bool) -> None:
    """Show every region."""
    _print_regions(client.list_regions(), as_json)


@regions_group.command("create")
@click.argument("name")
@click.option("--path", type=click.Path(path_type=Path), required=True, help="File (made if absent) or block device.")
@click.option("--slot", type=size, required=True, help="Size of a slot, such as 2MiB.")
@click.option("--window", type=size, required=True, help="Registered memory, such as 1GiB.")
@click.option("--capacity", type=size, help="Needed for a file that does not exist.")
@click.option("--set", "more", multiple=True, metavar="KEY=VALUE", help="Another setting, as in the file.")
@_json_option
@_talks(SLOW_CALL_TIMEOUT_S)
def create_region(
    client: ControlClient,
    name: str,
    path: Path,
    slot: str,
    window: str,
    capacity: str | None,
    more: tuple[str, ...],
    as_json: bool,
) -> None:
    """Make a region and serve it, now and after restarts."""
    settings = {"slot": slot, "window": window}
    if capacity is not None:
        settings["capacity"] = capacity
    for item in more:
        key, separator, value = item.partition("=")
        if not separator or not key:
            raise UserError(f"--set {item!r}: write KEY=VALUE, such as eviction=lru or flash.driver=io_uring")
        settings[key] = value
    _print_regions([client.create_region(name, str(path.absolute()), settings)], as_json)


def _destroys(command: Callable[..., None]) -> Callable[..., None]:
    """For commands that destroy what a region holds: `uuid` is what the user has shown to know."""

    @click.argument("name")
    @click.option("--uuid", "uuid_text", help="The region's uuid, to show that it is the one meant.")
    @click.option("--yes", is_flag=True, help="Whatever its uuid is.")
    @click.option("--force", is_flag=True, help="Also while blocks are leased or pinned.")
    @functools.wraps(command)
    def deliberate(
        client: ControlClient, name: str, uuid_text: str | None, yes: bool, force: bool, **arguments: Any
    ) -> None:
        if uuid_text is not None:
            try:
                uuid = bytes.fromhex(uuid_text.replace("-", ""))
            except ValueError:
                raise UserError(f"{uuid_text!r} is no uuid: 32 hex digits") from None
        else:
            region = client.get_region(name)
            if not yes:
                raise UserError(
                    f"all blocks of region {name} would be lost: repeat with --uuid {region.uuid.hex() or '(none)'} "
                    "or --yes"
                )
            uuid = region.uuid
        command(client, name, uuid, force, **arguments)

    return deliberate


@regions_group.command("delete")
@click.option("--erase", is_flag=True, help="Also remove the file that was made for it.")
@_talks(SLOW_CALL_TIMEOUT_S)
@_destroys
def delete_region(client: ControlClient, name: str, uuid: bytes, force: bool, erase: bool) -> None:
    """Stop serving a region made by `create`, and forget it."""
    client.delete_region(name, uuid, erase=erase, force=force)
    click.echo(f"region {name} deleted" + ("; its file is erased" if erase else "; its file is left as it is"))


@regions_group.command("format")
@_json_option
@_talks(SLOW_CALL_TIMEOUT_S)
@_destroys
def format_region(client: ControlClient, name: str, uuid: bytes, force: bool, as_json: bool) -> None:
    """Empty a region; it gets a new uuid."""
    _print_regions([client.format_region(name, uuid, force=force)], as_json)


def _print_regions(regions: list[control_pb2.Region], as_json: bool) -> None:
    if as_json:
        _print_json([report.region_values(region) for region in regions])
    else:
        report.print_regions(report.console(), regions)


def _print_json(values: Any) -> None:
    click.echo(json.dumps(values, indent=2))


if __name__ == "__main__":
    main()
