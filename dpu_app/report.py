"""What the command line shows of a DPU: plain values for scripts (`--json`), tables for people."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from common import units
from common.proto.entresol.v1 import control_pb2

LINE_WIDTH = 240
STATE_PREFIX = "REGION_STATE_"
_STATE_STYLES = {"serving": "green", "draining": "yellow", "starting": "yellow", "restarting": "red", "failed": "red"}


def console() -> Console:
    """Standard output. Lines are as long as they need to be: cells that are folded to a terminal's width cannot be read
    or copied."""
    return Console(width=LINE_WIDTH, soft_wrap=True)


def state_name(region: control_pb2.Region) -> str:
    return control_pb2.RegionState.Name(region.state).removeprefix(STATE_PREFIX).lower()


def region_values(region: control_pb2.Region) -> dict[str, Any]:
    return {
        "name": region.name,
        "uuid": region.uuid.hex(),
        "state": state_name(region),
        "message": region.message,
        "slot_bytes": region.slot_bytes,
        "slots": region.slots,
        "capacity_bytes": region.capacity_bytes,
        "weight": region.weight,
        "generation": region.generation,
        "dynamic": region.dynamic,
        "fabrics": [
            {"name": fabric.name, "address": fabric.address, "options": dict(fabric.options)}
            for fabric in region.fabrics
        ],
    }


def status_values(status: control_pb2.GetStatusResponse) -> dict[str, Any]:
    return {
        "name": status.dpu.name,
        "id": status.dpu.id,
        "incarnation": status.dpu.incarnation,
        "version": status.dpu.version,
        "pid": status.pid,
        "uptime_s": status.uptime_ms / 1000,
        "draining": status.draining,
        "regions": [
            {
                **region_values(item.region),
                "worker_pid": item.worker_pid,
                "worker_restarts": item.worker_restarts,
                "stats": dict(item.stats),
            }
            for item in status.regions
        ],
        "sessions": [
            {
                "session_id": f"{session.session_id:016x}",
                "agent_name": session.agent_name,
                "tenant": session.tenant,
                "client_version": session.client_version,
                "namespaces": session.namespaces,
                "age_s": session.age_ms / 1000,
                "expires_in_s": session.expires_in_ms / 1000,
            }
            for session in status.sessions
        ],
    }


def print_regions(console: Console, regions: Sequence[control_pb2.Region]) -> None:
    table = _table("region", "state", "uuid", ">slot", ">slots", ">capacity", ">generation", "address")
    for region in regions:
        table.add_row(
            *_region_cells(region), "\n".join(escape(f"{item.name} {item.address}") for item in region.fabrics)
        )
    console.print(table)
    _print_messages(console, regions)


def print_status(console: Console, status: control_pb2.GetStatusResponse) -> None:
    uptime = units.format_duration(status.uptime_ms // 1000)
    console.print(
        f"DPU [bold]{status.dpu.name}[/bold] {status.dpu.version}, pid {status.pid}, up {uptime}"
        + (", draining" if status.draining else "")
    )
    table = _table("region", "state", ">slot", ">slots", ">used", ">capacity", ">hits/loads", "worker")
    for item in status.regions:
        stats = dict(item.stats)
        loads = stats.get("RETRIEVES", 0)
        misses = stats.get("RETRIEVE_MISSES", 0)
        used = str(stats.get("SLOTS_USED", "?"))
        worker = f"{item.worker_pid or 'none'}" + (f", {item.worker_restarts} restarts" if item.worker_restarts else "")
        name, state, _uuid, slot, slots, capacity, _generation = _region_cells(item.region)
        table.add_row(name, state, slot, slots, used, capacity, f"{loads - misses}/{loads}", worker)
    console.print(table)
    _print_messages(console, [item.region for item in status.regions])
    if status.sessions:
        sessions = _table("session", "agent", "tenant", ">namespaces", ">age", ">expires in")
        for session in status.sessions:
            sessions.add_row(
                f"{session.session_id:016x}",
                escape(session.agent_name),
                escape(session.tenant),
                str(session.namespaces),
                units.format_duration(session.age_ms // 1000),
                f"{session.expires_in_ms / 1000:.1f}s",
            )
        console.print(sessions)
    else:
        console.print("no sessions")


def _region_cells(region: control_pb2.Region) -> tuple[str, ...]:
    state = state_name(region)
    style = _STATE_STYLES.get(state, "")
    return (
        region.name + (" *" if region.dynamic else ""),
        f"[{style}]{state}[/{style}]" if style else state,
        region.uuid.hex() or "-",
        units.format_size(region.slot_bytes),
        str(region.slots),
        units.approximate_size(region.capacity_bytes),
        str(region.generation),
    )


def _print_messages(console: Console, regions: Sequence[control_pb2.Region]) -> None:
    for region in regions:
        if region.message:
            console.print(f"{region.name}: {region.message}", markup=False)
    if any(region.dynamic for region in regions):
        console.print("* made at run time, not in the configuration file")


def _table(*columns: str) -> Table:
    """A column whose name starts with ">" is right-aligned."""
    table = Table(box=None, pad_edge=False)
    for column in columns:
        right = column.startswith(">")
        table.add_column(column.removeprefix(">"), justify="right" if right else "left", overflow="fold")
    return table
