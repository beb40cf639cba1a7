"""`entresol-agent`: keep files as blocks in the pod, look blocks up, watch regions, measure. Parses and prints.

Exit codes: 0 done; 1 some blocks were missing or refused; 2 the caller can fix it; 3 no DPU can be reached or is
ready; 4 a lower layer failed; 70 our bug.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import click

from common import config, units
from common.errors import UserError
from common.status import BlockState, Status
from common.wire import StatId
from host_agent import config as agent_config
from host_agent import file_blocks
from host_agent.bench.options import bench_options, bench_settings
from host_agent.cli_options import (
    DURATION,
    SIZE,
    SOME_FAILED,
    Commands,
    Where,
    configured_namespace,
    connected,
    counted,
    finish,
    json_option,
    keys_option,
    manifest_argument,
    progress_bar,
    read_manifest,
    require_place,
    selection,
    unreachable_dpus,
    whole_seconds,
    write_manifest,
)
from host_agent.session import client_version

_STATS_SHOWN = (
    StatId.SLOTS,
    StatId.SLOTS_USED,
    StatId.FRAMES_FREE,
    StatId.STORES,
    StatId.RETRIEVES,
    StatId.RETRIEVE_MISSES,
)


@click.group(cls=Commands, context_settings={"help_option_names": ["-h", "--help"]})
@click.option(
    "--config",
    "config_file",
    type=click.Path(path_type=Path),
    envvar="ENTRESOL_AGENT_CONFIG",
    help="Configuration (YAML), such as configs/agent.yaml.",
)
@click.option("--dpu", "dpus", multiple=True, envvar="ENTRESOL_DPU", help="A DPU's gRPC address; repeat it for more.")
@click.option("--tenant", envvar="ENTRESOL_TENANT", help="As whom; default: the configuration's, or 'default'.")
@click.version_option(client_version(), message="%(version)s")
@click.pass_context
def main(ctx: click.Context, config_file: Path | None, dpus: tuple[str, ...], tenant: str | None) -> None:
    """Entresol's host agent: keep KV blocks in the pod's flash, and get them back."""
    ctx.obj = Where(config_file, dpus, tenant)


@main.command()
@click.argument("file", required=False, type=click.Path(path_type=Path, exists=True, dir_okay=False))
@click.option("--generate", "generate_blocks", type=click.IntRange(1), help="Instead of a file: so many random blocks.")
@click.option("--seed", type=int, default=0, show_default=True, help="Of generated blocks.")
@click.option("--block", "block_bytes", type=SIZE, help="Block size; default: the namespace's.")
@click.option(
    "--until",
    type=click.Choice(["staged", "flash"]),
    default="staged",
    show_default=True,
    help="Wait until blocks are in DPU memory, or on flash.",
)
@click.option("--ttl", "ttl_s", type=DURATION, default="0", help="Let blocks expire; default: the region's.")
@click.option("-m", "--manifest", "manifest_file", type=click.Path(path_type=Path), help="Write the manifest here.")
@json_option
@click.pass_obj
def put(
    where: Where,
    file: Path | None,
    generate_blocks: int | None,
    seed: int,
    block_bytes: int | None,
    until: str,
    ttl_s: float,
    manifest_file: Path | None,
    as_json: bool,
) -> None:
    """Cut FILE into blocks, store them, and print the manifest that `get` restores it from."""
    if (file is None) is (generate_blocks is None):
        raise UserError("give either a FILE or --generate N")
    if manifest_file is not None:
        require_place(manifest_file)
    with connected(where) as client:
        settings = client.settings.namespace
        block_bytes = block_bytes or settings.block_bytes
        namespace = client.namespace(settings.record(client.settings.tenant), block_bytes)
        length_bytes = file.stat().st_size if file is not None else (generate_blocks or 0) * block_bytes
        with progress_bar(length_bytes, "storing", as_json) as progress:
            options: dict[str, Any] = {
                "until_flash": until == "flash",
                "ttl_s": whole_seconds(ttl_s),
                "progress": progress,
            }
            if file is None:
                source = file_blocks.Generated(length_bytes, seed)
                manifest, counts = file_blocks.put(client, namespace, source, "generated", block_bytes, **options)
            else:
                with file.open("rb") as opened:
                    manifest, counts = file_blocks.put(client, namespace, opened, file.name, block_bytes, **options)
    values: dict[str, Any] = {"length_bytes": manifest.length_bytes}
    if manifest_file is not None:
        write_manifest(manifest, manifest_file)
        values["manifest"] = str(manifest_file)
    elif as_json:
        values["manifest"] = json.loads(manifest.to_json())
    else:
        click.echo(manifest.to_json())
    finish(values, counts, as_json, "stored")


@main.command()
@click.argument("manifest_file", type=click.Path(path_type=Path, allow_dash=True))
@click.option("-o", "--output", type=click.Path(path_type=Path), required=True, help="Where the file is to appear.")
@json_option
@click.pass_obj
def get(where: Where, manifest_file: Path, output: Path, as_json: bool) -> None:
    """Restore the file of a MANIFEST and verify it. It appears whole, or not at all."""
    manifest = read_manifest(manifest_file)
    require_place(output)
    with connected(where) as client:
        namespace = client.namespace(manifest.record, manifest.block_bytes)
        with progress_bar(manifest.length_bytes, "loading", as_json) as progress:
            counts = file_blocks.get(client, namespace, manifest, output.absolute(), progress)
    complete = set(counts) == {Status.OK}
    if not complete and not as_json:
        click.echo(f"entresol-agent: not all blocks came back, so {output} was not written", err=True)
    finish({"output": str(output) if complete else None}, counts, as_json, "loaded")


@main.command()
@manifest_argument
@keys_option
@json_option
@click.pass_obj
def lookup(where: Where, manifest_file: Path | None, key_texts: tuple[str, ...], as_json: bool) -> None:
    """Say which blocks of a MANIFEST, or of --key, are present, and how long the present prefix is."""
    with connected(where) as client:
        namespace, keys = selection(client, manifest_file, key_texts)
        found = client.lookup(namespace, keys)
    rows = [
        {"key": key.hex(), "status": Status(int(status)).name.lower(), "state": BlockState(int(state)).name.lower()}
        for key, status, state in zip(keys, found.status, found.state)
    ]
    if as_json:
        click.echo(json.dumps({"prefix_blocks": found.prefix_blocks, "blocks": rows}))
    else:
        for row in rows:
            click.echo(f"{row['key']}  {row['status']:<12}  {row['state']}")
        click.echo(
            f"{int(found.present.sum())} of {len(keys)} present, the first {found.prefix_blocks} unbroken", err=True
        )
    if not found.present.all():
        sys.exit(SOME_FAILED)


def _key_command(name: str, verb: str, text: str) -> None:
    """`delete`, `unpin`, `touch`: alike but for the client's method."""

    @main.command(name, help=text)
    @manifest_argument
    @keys_option
    @json_option
    @click.pass_obj
    def command(where: Where, manifest_file: Path | None, key_texts: tuple[str, ...], as_json: bool) -> None:
        with connected(where) as client:
            namespace, keys = selection(client, manifest_file, key_texts)
            counts = getattr(client, name)(namespace, keys).counts()
        finish({}, counts, as_json, verb)


_key_command("delete", "deleted", "Delete the blocks of a MANIFEST, or of --key.")
_key_command("unpin", "unpinned", "Take the pins off the blocks of a MANIFEST, or of --key.")
_key_command("touch", "touched", "Count a use of the blocks of a MANIFEST, or of --key, so that they stay longer.")


@main.command()
@manifest_argument
@keys_option
@click.option("--ttl", "ttl_s", type=DURATION, default="0", help="For how long; default: five minutes.")
@json_option
@click.pass_obj
def pin(where: Where, manifest_file: Path | None, key_texts: tuple[str, ...], ttl_s: float, as_json: bool) -> None:
    """Keep the blocks of a MANIFEST, or of --key, from being evicted."""
    with connected(where) as client:
        namespace, keys = selection(client, manifest_file, key_texts)
        counts = client.pin(namespace, keys, ttl_s=whole_seconds(ttl_s)).counts()
    finish({}, counts, as_json, "pinned")


@main.command()
@manifest_argument
@keys_option
@click.option("--within", "within_s", type=DURATION, default="2s", show_default=True, help="When they are needed.")
@json_option
@click.pass_obj
def prefetch(
    where: Where, manifest_file: Path | None, key_texts: tuple[str, ...], within_s: float, as_json: bool
) -> None:
    """Stage the blocks of a MANIFEST, or of --key, from flash into DPU memory."""
    with connected(where) as client:
        namespace, keys = selection(client, manifest_file, key_texts)
        counts = client.prefetch(namespace, keys, timeout_s=within_s).result().counts()
    finish({}, counts, as_json, "staged")


@main.command("list")
@manifest_argument
@json_option
@click.pass_obj
def list_blocks(where: Where, manifest_file: Path | None, as_json: bool) -> None:
    """List the blocks of the configured namespace, or of a MANIFEST's: with --json, one object a line."""
    with connected(where) as client:
        if manifest_file is None:
            namespace = configured_namespace(client)
        else:
            manifest = read_manifest(manifest_file)
            namespace = client.namespace(manifest.record, manifest.block_bytes)
        count = 0
        for block in client.list(namespace):
            count += 1
            values = {
                "key": block.key.hex(),
                "length_bytes": block.length,
                "state": block.state.name.lower(),
                "pinned": block.pinned,
                "age_s": block.age_s,
                "ttl_s": block.ttl_s,
                "region": block.region,
            }
            if as_json:
                click.echo(json.dumps(values))
            else:
                pinned = "pinned" if block.pinned else ""
                size = units.approximate_size(block.length)
                click.echo(
                    f"{values['key']}  {size:>9}  {values['state']:<16}  {block.age_s:>6} s  {block.region}  {pinned}"
                )
    if not as_json:
        click.echo(counted(count, "block"), err=True)


@main.command()
@json_option
@click.pass_obj
def stat(where: Where, as_json: bool) -> None:
    """Show the regions that blocks are spread over, with their counters."""
    with connected(where) as client:
        stats = client.stat()
        regions: list[dict[str, Any]] = [
            {
                "region": region.link.name,
                "uuid": region.uuid.hex(),
                "connected": region.link.up,
                "slot_bytes": region.slot_bytes,
                "weight": region.weight,
                "stats": {stat_id.name.lower(): value for stat_id, value in stats.get(region.link.name, {}).items()},
            }
            for region in client.regions
        ]
        unreachable = unreachable_dpus(client)
    if as_json:
        click.echo(json.dumps({"regions": regions, "unreachable": unreachable}))
        return
    headings = ["region", "state", *(stat_id.name.lower() for stat_id in _STATS_SHOWN)]
    rows = [
        [
            str(region["region"]),
            "connected" if region["connected"] else "down",
            *(str(region["stats"].get(heading, "-")) for heading in headings[2:]),
        ]
        for region in regions
    ]
    widths = [max(len(row[column]) for row in [headings, *rows]) for column in range(len(headings))]
    for row in [headings, *rows]:
        click.echo("  ".join(cell.ljust(width) for cell, width in zip(row, widths)).rstrip())


@main.command("config-check")
@click.argument("config_file", type=click.Path(path_type=Path))
@click.option("--json", "as_json", is_flag=True, help="Print every setting, defaults included.")
def config_check(config_file: Path, as_json: bool) -> None:
    """Check a configuration file, and say what is wrong in it by line and key."""
    settings = agent_config.load(config_file)
    if as_json:
        click.echo(json.dumps(config.to_plain(settings), indent=2))
        return
    click.echo(f"{config_file}: sound, {counted(len(settings.dpus), 'DPU')}, tenant {settings.tenant}")
    unknown = settings.namespace.record(settings.tenant).unknown_fields()
    if unknown:
        click.echo(f"not known about the namespace, and so matching only the same: {', '.join(unknown)}")


@main.command()
@bench_options
@click.option(
    "--flash-dir",
    type=click.Path(file_okay=False, path_type=Path),
    help="Where this machine holds the pod's flash, if it does: held against that disk's own speed.",
)
@click.option("--evict", is_flag=True, help="Allow the mixed load, which pushes blocks of others out of the pod.")
@click.pass_obj
def bench(where: Where, /, flash_dir: Path | None, evict: bool, out: Path, as_json: bool, **options: Any) -> None:
    """Measure every operation of a pod that is up beside this machine's own limits, and write a report."""
    from rich.console import Console

    from host_agent.bench.environment import read_environment
    from host_agent.bench.report import print_report, report, write_report
    from host_agent.bench.run import Bench
    from host_agent.bench.target import Target

    settings = bench_settings(options, flash_dir=flash_dir, may_evict=evict)
    environment = read_environment()
    with connected(where) as client:
        target = Target("pod", client, max(settings.block_bytes))
        result = Bench([target], settings, lambda text: click.echo(text, err=True)).run()
    document = report(environment, result)
    files = write_report(document, out, "Benchmark of a pod")
    if as_json:
        click.echo(json.dumps(document))
    else:
        print_report(document, Console())
    click.echo(f"written: {', '.join(map(str, files))}", err=True)
    if document["wrong"]:
        click.echo("entresol-agent: blocks came back with wrong bytes", err=True)
        sys.exit(SOME_FAILED)


@main.command("version")
def show_version() -> None:
    """Print the version."""
    click.echo(client_version())


if __name__ == "__main__":
    main()
