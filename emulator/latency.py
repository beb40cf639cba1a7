"""`entresol-emu bench-latency`: latency of one-block requests, idle and beside stores, and the pauses behind it.

One pod with one region worker; three processes of `emulator.latency_agent`. Phases take turns: idle, load, idle,
load. Each gives the requests' latencies, the worker's own pauses by cause, and what the machine did to processes that
were ready to run: their wait for a processor, a process that only sleeps, stolen time. Starts and asks; shows nothing
(`emulator.latency_report`).
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import secrets
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np

from common.errors import InternalError, UnavailableError
from common.wire import StatId
from dpu_app.control_client import ControlClient
from dpu_app.pause_report import pause_values
from dpu_app.turn_times import BOUNDS_NS
from emulator.json_process import JsonProcess
from emulator.pod import Pod
from emulator.pod_settings import PodSettings
from host_agent.bench.environment import read_environment

QUANTILES: Final = (50, 90, 99, 99.9, 99.99)
PHASES: Final = ("idle", "load")
_CALL_TIMEOUT_S: Final = 10.0
_FILL_TIMEOUT_S: Final = 120.0
_FILL_POLL_S: Final = 0.02
_STOP_TIMEOUT_S: Final = 60.0
_SLOWDOWN_MAX: Final = 4
"""A phase that takes so many times its length is given up: the pod does not keep up with the probe's rate."""
_COUNTED: Final = ("EVICTIONS", "EXPIRED", "DELETES", "FLASH_WRITE_BYTES", "TABLE_WRITE_BYTES", "FLASH_READ_BYTES")


@dataclass(frozen=True)
class LatencySettings:
    """What to measure."""

    rounds: int = 2
    """Of idle and load each."""
    idle_requests: int = 8_000
    """Of one phase, RETRIEVEs and LOOKUPs together."""
    load_requests: int = 6_000
    idle_rate_per_s: float = 400.0
    """Of the probe: low enough that one request seldom waits for the one before."""
    load_rate_per_s: float = 100.0
    block_bytes: int = 64 << 10
    """Of the blocks that are stored beside it; the probe's are 4 KiB."""
    batch: int = 64
    slots: int = 8192
    """Few, so that the region is full, and evicting, in seconds."""
    frames: int = 1024

    @classmethod
    def quick(cls) -> LatencySettings:
        """In seconds, for tests and to see that it works; too little for figures."""
        return cls(rounds=1, idle_requests=400, load_requests=200, batch=16, slots=512, frames=128)

    def of_phase(self, phase: str) -> tuple[int, float]:
        """Requests, and their rate."""
        if phase == "load":
            return self.load_requests, self.load_rate_per_s
        return self.idle_requests, self.idle_rate_per_s


def latency_pod(settings: PodSettings, latency: LatencySettings) -> PodSettings:
    """`settings` with one region worker, so that stores and the probe meet in it."""
    return dataclasses.replace(
        settings,
        dpus=1,
        regions=1,
        slot_bytes=latency.block_bytes,
        window_bytes=latency.frames * latency.block_bytes,
        capacity_bytes=latency.slots * latency.block_bytes,
    )


def measure_latency(settings: PodSettings, latency: LatencySettings, told: Callable[[str], None]) -> dict[str, Any]:
    """The report, as `emulator.latency_report` shows it; plain values for JSON. The pod is down again on return."""
    environment = read_environment()
    told("starting a pod")
    pod = Pod.up(latency_pod(settings, latency), told)
    try:
        with contextlib.ExitStack() as stack:
            run = _Run(pod, latency, stack)
            rounds: dict[str, list[dict[str, Any]]] = {phase: [] for phase in PHASES}
            told("filling the region")
            run.fill()
            for number in range(latency.rounds):
                for phase in PHASES:
                    told(f"{phase}, {number + 1} of {latency.rounds}")
                    rounds[phase].append(run.phase(phase))
    finally:
        pod.down()
    return {
        "report": "latency",
        "environment": environment.as_dict(),
        "settings": {**dataclasses.asdict(latency), "fabric": settings.fabric, "eviction": settings.eviction},
        "phases": {phase: combined(measured) for phase, measured in rounds.items()},
    }


def digest(values_ns: Sequence[int]) -> dict[str, Any]:
    """Quantiles and counts by the buckets of the workers' pauses, of some times in ns."""
    if not values_ns:
        return {"count": 0}
    values = np.asarray(values_ns, np.int64)
    quantiles = np.percentile(values, QUANTILES).tolist()
    counts = np.bincount(np.searchsorted(BOUNDS_NS, values), minlength=len(BOUNDS_NS) + 1).tolist()
    return {
        "count": len(values),
        **{f"p{quantile:g}_ns": ns for quantile, ns in zip(QUANTILES, quantiles)},
        "max_ns": int(values.max()),
        "counts": counts,
    }


def combined(rounds: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Of the rounds of one phase: quantiles over all their requests, sums of all counts, the longest pauses of all;
    and how the rounds differed."""
    requests = [measured["requests"] for measured in rounds]
    latencies, calls = (
        {name: digest([ns for answers in requests for ns in answers[key][name]]) for name in requests[0][key]}
        for key in ("latencies_ns", "calls_ns")
    )
    pauses = [measured["pauses"] for measured in rounds]
    return {
        "latencies": latencies,
        "calls": calls,
        "by_round": [{name: _middle(values) for name, values in each["latencies_ns"].items()} for each in requests],
        "late": digest([ns for answers in requests for ns in answers["late_ns"]]),
        "others": dict(sum((Counter(answers["others"]) for answers in requests), Counter())),
        "wrong": sum(answers["wrong"] for answers in requests),
        "stores": [measured["stores"] for measured in rounds if measured["stores"] is not None],
        "watch": digest([ns for measured in rounds for ns in measured["machine"].pop("over_ns")]),
        "machine": [measured["machine"] for measured in rounds],
        "counters": dict(sum((Counter(measured["counters"]) for measured in rounds), Counter())),
        "pauses": {
            "bounds_ns": pauses[0]["bounds_ns"],
            "turns": _sums([each["turns"] for each in pauses]),
            "own": _sums([each["own"] for each in pauses]),
            "parts": {cause: _sums([each["parts"][cause] for each in pauses]) for cause in pauses[0]["parts"]},
            "total_ns": {cause: sum(each["total_ns"][cause] for each in pauses) for cause in pauses[0]["total_ns"]},
            "longest": sorted((pause for each in pauses for pause in each["longest"]), key=_length, reverse=True),
        },
    }


def _middle(values_ns: Sequence[int]) -> dict[str, float]:
    p50, p99 = np.percentile(values_ns, [50, 99]).tolist() if values_ns else (0.0, 0.0)
    return {"p50_ns": p50, "p99_ns": p99}


def _sums(rows: Sequence[Sequence[int]]) -> list[int]:
    return [sum(column) for column in zip(*rows)]


def _length(pause: dict[str, Any]) -> int:
    """By the worker's own doing."""
    return int(pause["duration_ns"]) - int(pause["waited_ns"])


class _Run:
    """A pod with its processes. What it starts is ended by `stack`."""

    def __init__(self, pod: Pod, latency: LatencySettings, stack: contextlib.ExitStack) -> None:
        self._latency = latency
        self._control = stack.enter_context(ControlClient(pod.state.dpus[0].control, _CALL_TIMEOUT_S))
        agent = ["--config", str(pod.state.agent_config), "--salt", secrets.token_hex(8)]
        agent += ["--block-bytes", str(latency.block_bytes)]
        self._children: dict[str, JsonProcess] = {}
        for role, options in (
            ("probe", agent),
            ("store", [*agent, "--batch", str(latency.batch)]),
            ("watch", []),
        ):
            child = self._children[role] = JsonProcess(
                f"the {role} process", "emulator.latency_agent", [role, *options], pod.state.mark
            )
            stack.callback(child.close)
            _answer(child, _CALL_TIMEOUT_S)

    def fill(self) -> None:
        """Until the region has evicted something: from then on every store does."""
        deadline_s = time.monotonic() + _FILL_TIMEOUT_S
        with self._running("store"):
            while not self._statistics()["EVICTIONS"]:
                if time.monotonic() > deadline_s:
                    raise UnavailableError(f"the region evicted nothing in {_FILL_TIMEOUT_S:g} s of stores")
                time.sleep(_FILL_POLL_S)

    def phase(self, phase: str) -> dict[str, Any]:
        requests, rate_per_s = self._latency.of_phase(phase)
        with contextlib.ExitStack() as stack:
            stored = stack.enter_context(self._running("store")) if phase == "load" else None
            watched = stack.enter_context(self._running("watch"))
            before = self._snapshot()
            probe = self._children["probe"]
            probe.tell({"requests": requests, "rate_per_s": rate_per_s})
            answers = _answer(probe, _SLOWDOWN_MAX * requests / rate_per_s + _CALL_TIMEOUT_S)
            after = self._snapshot()
        return {
            "requests": answers,
            "stores": None if stored is None else stored[0],
            "machine": {"over_ns": watched[0]["over_ns"], **_machine(before, after)},
            "pauses": pause_difference(before["pauses"], after["pauses"], after["at_ns"] - before["at_ns"]),
            "counters": {name: after["stats"][name] - before["stats"][name] for name in _COUNTED},
        }

    @contextlib.contextmanager
    def _running(self, role: str) -> Iterator[list[dict[str, Any]]]:
        """A child is at work meanwhile; its answer is in the list afterwards."""
        child = self._children[role]
        answers: list[dict[str, Any]] = []
        child.tell({})
        try:
            yield answers
        finally:
            child.tell({"stop": True})
            answers.append(_answer(child, _STOP_TIMEOUT_S))

    def _statistics(self) -> dict[str, int]:
        [region] = self._control.status().regions
        return {stat.name: region.stats.get(stat.name, 0) for stat in StatId}

    def _snapshot(self) -> dict[str, Any]:
        [pauses] = self._control.pauses()
        pids = {"worker": pauses.worker_pid, **{role: child.pid for role, child in self._children.items()}}
        return {
            "pauses": pause_values(pauses),
            "stats": self._statistics(),
            "schedules": {name: schedule_of(pid) for name, pid in pids.items()},
            "steal_ticks": _steal_ticks(),
            "at_ns": time.monotonic_ns(),
        }


def _answer(child: JsonProcess, timeout_s: float) -> dict[str, Any]:
    """Raises UnavailableError where it has ended or says nothing for so long; InternalError where it failed."""
    values: dict[str, Any] = child.hear(timeout_s)
    if "error" in values:
        raise InternalError(f"{child.name} of the benchmark failed: {values['error']}")
    return values


def pause_difference(before: dict[str, Any], after: dict[str, Any], elapsed_ns: int) -> dict[str, Any]:
    """What came between two `dpu_app.pause_report.pause_values` of one worker, `elapsed_ns` apart."""
    return {
        "bounds_ns": after["bounds_ns"],
        "turns": _less(after["turns"], before["turns"]),
        "own": _less(after["own"], before["own"]),
        "parts": {cause: _less(counts, before["parts"][cause]) for cause, counts in after["parts"].items()},
        "total_ns": {cause: ns - before["total_ns"][cause] for cause, ns in after["total_ns"].items()},
        "longest": [pause for pause in after["longest"] if pause["ago_ns"] <= elapsed_ns],
    }


def _less(after: Sequence[int], before: Sequence[int]) -> list[int]:
    return [late - early for late, early in zip(after, before)]


def schedule_of(pid: int) -> tuple[int, int] | None:
    """Time the main thread of a process was on a processor, and was ready without one, in ns; None where the kernel
    does not tell."""
    try:
        fields = Path(f"/proc/{pid}/schedstat").read_text().split()
    except OSError:
        return None
    return int(fields[0]), int(fields[1])


def _steal_ticks() -> int:
    """Of all processors, since boot: taken by the host for other machines."""
    try:
        fields = Path("/proc/stat").read_text().split("\n", 1)[0].split()
    except OSError:
        return 0
    return int(fields[8]) if len(fields) > 8 else 0


def _machine(before: dict[str, Any], after: dict[str, Any]) -> dict[str, Any]:
    """Between two snapshots: seconds, and by process its share of them on a processor and ready without one."""
    elapsed_ns = after["at_ns"] - before["at_ns"]
    processes = {}
    for name, late in after["schedules"].items():
        early = before["schedules"].get(name)
        if early is not None and late is not None:
            processes[name] = {
                "on_processor": (late[0] - early[0]) / elapsed_ns,
                "ready": (late[1] - early[1]) / elapsed_ns,
            }
    steal_s = (after["steal_ticks"] - before["steal_ticks"]) / os.sysconf("SC_CLK_TCK")
    return {"seconds": elapsed_ns / 1e9, "processes": processes, "steal_s": steal_s}
