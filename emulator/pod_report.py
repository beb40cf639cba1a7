"""The state of a pod for people and for scripts: one plain dict, and a table of it.

Reads; never changes anything. Used by `entresol-emu up` and `status`.
"""

from __future__ import annotations

from typing import Any

from rich.console import Console
from rich.table import Table

from common.errors import EntresolError
from common.units import approximate_size
from emulator.pod import Pod
from emulator.pod_settings import DpuEntry
from emulator.pod_status import dpu_status, state_name


def pod_report(pod: Pod) -> dict[str, Any]:
    """Plain values, fit for JSON. ``serving`` says whether all of it does."""
    settings = pod.state.settings
    dpus = [_dpu_report(pod, dpu) for dpu in pod.state.dpus]
    serving = all(
        dpu["alive"]
        and len(dpu["regions"]) >= settings.regions
        and all(r["state"] == "serving" for r in dpu["regions"])
        for dpu in dpus
    )
    return {
        "serving": serving,
        "run_dir": str(pod.run_dir),
        "flash_dir": str(pod.state.flash_dir),
        "agent_config": str(pod.state.agent_config),
        "fabric": settings.fabric,
        "dpus": dpus,
    }


def _dpu_report(pod: Pod, dpu: DpuEntry) -> dict[str, Any]:
    report: dict[str, Any] = {
        "name": dpu.name,
        "pid": dpu.pid,
        "alive": pod.is_alive(dpu),
        "control": dpu.control,
        "log": str(dpu.log),
        "regions": [],
        "sessions": 0,
        "message": "",
    }
    if not report["alive"]:
        return {**report, "message": "has ended; see its log"}
    try:
        status = dpu_status(dpu.control)
    except EntresolError as error:
        return {**report, "message": str(error)}
    report["sessions"] = len(status.sessions)
    report["regions"] = [
        {
            "name": entry.region.name,
            "state": state_name(entry.region.state),
            "message": entry.region.message,
            "worker_pid": entry.worker_pid,
            "worker_restarts": entry.worker_restarts,
            "slots": entry.region.slots,
            "slot_bytes": entry.region.slot_bytes,
            "stats": dict(entry.stats),
        }
        for entry in status.regions
    ]
    return report


def print_pod(report: dict[str, Any], console: Console | None = None) -> None:
    """`report` as a table on standard output."""
    console = console or Console()
    table = Table(title=f"Pod on {report['fabric']}: {'serving' if report['serving'] else 'NOT all of it serves'}")
    for heading in ("DPU", "region", "worker", "state"):
        table.add_column(heading)
    for heading in ("slots used", "stored", "retrieved"):
        table.add_column(heading, justify="right")
    for dpu in report["dpus"]:
        name = f"{dpu['name']} {dpu['pid']}"
        if not dpu["regions"]:
            table.add_row(name, "", "", dpu["message"] or "no regions", "", "", "")
        for region in dpu["regions"]:
            stats = region["stats"]
            table.add_row(
                name,
                region["name"],
                str(region["worker_pid"]),
                region["state"] + (f" ({region['message']})" if region["message"] else ""),
                f"{stats.get('SLOTS_USED', 0)}/{region['slots']}",
                approximate_size(stats.get("STORE_BYTES", 0)),
                approximate_size(stats.get("RETRIEVE_BYTES", 0)),
            )
            name = ""
    console.print(table)
    console.print(f"agents' configuration: {report['agent_config']}", soft_wrap=True, highlight=False)
