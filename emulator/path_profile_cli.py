"""`entresol-emu bench-profile`: options in, report out."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

import click
from rich.console import Console

from common.config import load_file
from emulator.compare import bench_pod
from emulator.path_profile import PathSettings, missing_tools, profile_paths, profile_tables
from emulator.pod import Pod
from emulator.pod_settings import FABRICS, PodSettings, default_flash_dir, default_run_dir
from host_agent.bench.environment import read_environment
from host_agent.bench.report_files import head, write_files
from host_agent.bench.settings import BenchSettings
from host_agent.bench.target import Target
from host_agent.client import Client
from host_agent.config import AgentSettings

_OUT: Final = Path("bench-report/profile")


@click.command("bench-profile")
@click.option(
    "--fabric", "fabrics", type=click.Choice(FABRICS), multiple=True, help="Which; repeat it.  [default: all]"
)
@click.option(
    "--regions", type=click.IntRange(1, 16), default=1, show_default=True, help="Region workers of the one DPU."
)
@click.option("--quick", is_flag=True, help="One short round: to see that it works, not for figures.")
@click.option("--flash-dir", type=click.Path(file_okay=False, path_type=Path), help="On a disk, for O_DIRECT.")
@click.option("--out", type=click.Path(file_okay=False, path_type=Path), default=_OUT, show_default=True)
def bench_profile(fabrics: tuple[str, ...], regions: int, quick: bool, flash_dir: Path | None, out: Path) -> None:
    """Where the time of each operation goes: processor time, system calls (strace), functions (py-spy)."""
    settings = PathSettings.quick() if quick else PathSettings()
    environment = read_environment().as_dict()
    paths: list[dict[str, Any]] = []
    notes = Console(stderr=True)
    for fabric in fabrics or FABRICS:  # no moving line: its thread would be measured, too
        paths += _profile(fabric, regions, settings, flash_dir or default_flash_dir(), notes.print)
    document = {"environment": environment, "regions": regions, "missing_tools": missing_tools(), "paths": paths}
    tables = profile_tables(paths)
    for table in tables:
        table.print(Console())
    for tool in missing_tools():
        notes.print(f"not installed: {tool}", highlight=False)
    top = head("Where the time goes", environment, [f"region workers: {regions}"])
    text = "\n".join([top, *(table.markdown() for table in tables)])
    write_files(out, document, text)
    notes.print(f"written: {out}/report.md, {out}/report.json", highlight=False)


def _profile(
    fabric: str, regions: int, settings: PathSettings, flash_dir: Path, told: Callable[[str], None]
) -> list[dict[str, Any]]:
    measured = BenchSettings(block_bytes=(settings.block_bytes_max,), blocks=settings.blocks, batches=(1,))
    run_dir = default_run_dir().with_name("run-profile")
    pod_settings = PodSettings(dpus=1, regions=regions, fabric=fabric, run_dir=run_dir, flash_dir=flash_dir)
    pod_settings = bench_pod(pod_settings, measured)
    told(f"starting a pod on {fabric}")
    pod = Pod.up(pod_settings, told)
    try:
        agent = load_file(pod.state.agent_config, AgentSettings)
        with Client(agent) as client:
            pids = [process.pid for process in pod.running()]
            return profile_paths(Target(fabric, client, settings.block_bytes_max, pids), settings, pids, told)
    finally:
        pod.down()
