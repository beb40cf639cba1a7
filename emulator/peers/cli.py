"""`entresol-emu bench-peers`: options in, report out."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import click
from rich.console import Console

from emulator.peers import everyone, hugepages, report
from emulator.peers.run import Peers, PeersSettings
from emulator.pod_settings import default_flash_dir
from emulator.signals import ended_by_signals
from host_agent.bench import environment
from host_agent.bench.report_files import head, write_files

_VENVS = Path(".venv-peers")
_OUT = Path("bench-report/peers")


@click.command("bench-peers")
@click.option("--quick", is_flag=True, help="Small and two rounds: to see that it works, not for figures.")
@click.option("--only", help=f"Of {', '.join(everyone.FAMILIES)}; several with commas.  [default: all]")
@click.option("--rounds", type=click.IntRange(1), help="Figures are medians of so many.")
@click.option("--limit", "limit_s", type=click.FloatRange(1), help="Seconds for one peer in all rounds together.")
@click.option("--out", type=click.Path(file_okay=False, path_type=Path), default=_OUT, show_default=True)
@click.option("--venvs", type=click.Path(file_okay=False, path_type=Path), default=_VENVS, show_default=True)
@click.option("--flash-dir", type=click.Path(file_okay=False, path_type=Path), help="On a disk, for O_DIRECT.")
@click.option("--install/--no-install", "installs", default=True, help="Make the peers' environments first.")
@click.option("--huge-pages", type=click.IntRange(0), default=0, help="So many of 2 MiB are set up for the run (root).")
@click.pass_context
def bench_peers(
    ctx: click.Context,
    /,
    quick: bool,
    only: str | None,
    out: Path,
    venvs: Path,
    flash_dir: Path | None,
    installs: bool,
    huge_pages: int,
    **given: Any,
) -> None:
    """The same work on Redis, NIXL, Mooncake and LMCache beside Entresol, in one run, ratios first."""
    settings = PeersSettings(venvs=venvs.absolute(), flash_dir=(flash_dir or default_flash_dir()).absolute())
    settings = settings.quick() if quick else settings
    settings = dataclasses.replace(settings, **{name: value for name, value in given.items() if value is not None})
    began = environment.read_environment()
    notes = Console(stderr=True)
    with ended_by_signals(), notes.status("starting") as line, hugepages.reserved(huge_pages):
        run = Peers(everyone.choose(only.split(",") if only else ()), settings, line.update)
        if installs:
            run.install()
        run.run()
    found = report.as_dict(run, began.as_dict(), _plain(settings))
    write_files(out, found, _markdown(found))
    console = Console()
    for table in report.tables(found)[:-1]:
        table.print(console)
    for outcome in run.outcomes:
        if outcome.error:
            console.print(f"{outcome.peer.name} could not be measured to the end: {outcome.error}", markup=False)
    console.print(f"{out}/report.md and {out}/report.json", highlight=False)
    mistakes = report.wrong(found)
    for text in mistakes:
        click.echo(f"WRONG: {text}", err=True)
    if mistakes:
        ctx.exit(1)


def _plain(settings: PeersSettings) -> dict[str, Any]:
    """For JSON."""
    return {name: str(value) if isinstance(value, Path) else value for name, value in vars(settings).items()}


def _markdown(found: Mapping[str, Any]) -> str:
    text = (
        f"Medians of {found['rounds']} rounds. In each round every peer has one turn: its servers and its client are "
        "started, warmed up untimed, measured, and ended, so that nothing of one peer runs while another is "
        "measured; every other round goes from last to first. Keys are fresh each time, and every byte read back is "
        "compared outside the timed calls. A ratio is of one round, Entresol over the peer, above 1 where Entresol "
        "is faster: the median of the rounds (lowest-highest). Other work on this machine took "
        f"{found['other_work_share']:.0%} of its processors during the run: above a few per cent the ranges are wide, "
        "and a difference within them is none.\n"
    )
    return (
        head("Entresol and its peers", found["environment"])
        + f"\n{text}\n"
        + "\n".join(table.markdown() for table in report.tables(found))
    )
