"""The scale benchmark: pods of one to eight region workers, up together, and one to eight agents that load them.

Every round visits all cells, forwards and backwards in turn, so that a machine that slows down for a while favours
none. Owns the pods and the agent processes while it runs; `figures` makes numbers of what they say, `samples` what
the cost model needs.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import secrets
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Final

from common.config import load_file
from emulator.pod import Pod
from emulator.pod_settings import PodSettings
from emulator.scale.figures import Phase, cell_figures, neighbour_figures, verdicts
from emulator.scale.fleet import Fleet
from emulator.scale.samples import measure_samples
from emulator.scale.settings import ONE_BLOCK, ScaleSettings
from host_agent.bench.cpu_time import DPU, CpuMeter, OtherWork
from host_agent.client import Client
from host_agent.config import AgentSettings

Cell = tuple[int, tuple[str, ...]]
"""Workers of the pod, and the load of each agent."""
SESSION_TTL_S: Final = 60.0
"""More processes than cores: nobody loses a session for having been slow."""


def run_scale(base: PodSettings, settings: ScaleSettings, told: Callable[[str], None]) -> dict[str, Any]:
    """Measure everything; the report's JSON without its head. `base` gives fabric, directories and drivers.

    Raises EntresolError where a pod or an agent fails. Nothing is left running or lying. Wrong bytes are in the
    report, under "wrong".
    """
    with ExitStack() as stack:
        stack.callback(_remove_empty, base.run_dir)
        samples = _samples(base, settings, told)
        pods: dict[int, Pod] = {}
        for workers in settings.workers:
            told(f"starting a pod of {workers} region workers")
            run_dir = base.run_dir / f"w{workers}"
            pod_settings = settings.pod(dataclasses.replace(base, session_ttl_s=SESSION_TTL_S), workers, run_dir)
            pods[workers] = Pod.up(pod_settings, told)
            stack.callback(pods[workers].down)
        told(f"starting {settings.agent_processes} agents")
        configurations = {str(workers): pod.state.agent_config for workers, pod in pods.items()}
        mark = secrets.token_hex(16)
        fleet = stack.enter_context(Fleet(settings.agent_processes, configurations, settings.all_loads, mark))
        phases = _Rounds(settings, pods, fleet, told).run()
    return _report(base, settings, phases, samples)


class _Rounds:
    def __init__(
        self, settings: ScaleSettings, pods: dict[int, Pod], fleet: Fleet, told: Callable[[str], None]
    ) -> None:
        self._settings = settings
        self._fleet = fleet
        self._told = told
        self._meters = {workers: CpuMeter({DPU: pod_pids(pod)}) for workers, pod in pods.items()}

    def run(self) -> dict[Cell, list[Phase]]:
        cells = list_cells(self._settings)
        phases: dict[Cell, list[Phase]] = {cell: [] for cell in cells}
        for number in range(self._settings.rounds):
            for at, cell in enumerate(cells if number % 2 == 0 else reversed(cells)):
                self._told(f"round {number + 1} of {self._settings.rounds}, cell {at + 1} of {len(cells)}")
                phases[cell].append(self._phase(cell))
        return phases

    def _phase(self, cell: Cell) -> Phase:
        workers, loads = cell
        meter = self._meters[workers]
        start_ns, end_ns = self._fleet.run(str(workers), loads, self._settings.phase_s)
        _sleep_until(start_ns)
        before, other = meter.read_s(), OtherWork([meter])
        _sleep_until(end_ns)
        cpu_s, busy = meter.since_s(before)[DPU], other.share()
        agents = self._fleet.results(len(loads))
        seconds = (end_ns - start_ns) / 1e9
        ours = sum(agent["all_cpu_s"] for agent in agents) / seconds / len(os.sched_getaffinity(0))
        return Phase(seconds, agents, cpu_s, max(0.0, busy - ours))


def list_cells(settings: ScaleSettings) -> list[Cell]:
    """Every number of workers with every number of agents under each load; then a single-block agent alone, and
    beside its neighbours."""
    cells: list[Cell] = []
    for load in settings.loads:
        for workers in settings.workers:
            cells += [(workers, (load.name,) * agents) for agents in settings.agents]
    if settings.neighbours:
        heavy = settings.loads[0].name
        for workers in settings.workers:
            cells.append((workers, (ONE_BLOCK.name,)))
            cells.append((workers, (ONE_BLOCK.name, *(heavy,) * settings.neighbours)))
    return cells


def pod_pids(pod: Pod) -> list[int]:
    """Of the pod's processes, supervisor and region workers."""
    return [process.pid for process in pod.running()]


def _samples(base: PodSettings, settings: ScaleSettings, told: Callable[[str], None]) -> dict[str, Any]:
    """On a pod of its own."""
    told("measuring the cost of a worker's work")
    pod = Pod.up(settings.samples.pod(base, base.run_dir / "cost"), told)
    try:
        agent = load_file(pod.state.agent_config, AgentSettings)
        with Client(agent) as client:
            return measure_samples(client, agent.tenant, pod_pids(pod), settings.samples)
    finally:
        pod.down()


def _report(
    base: PodSettings, settings: ScaleSettings, phases: dict[Cell, list[Phase]], samples: dict[str, Any]
) -> dict[str, Any]:
    cells = [
        cell_figures(workers, (load.name,) * agents, phases[workers, (load.name,) * agents], load.block_bytes)
        for load in settings.loads
        for workers in settings.workers
        for agents in settings.agents
    ]
    neighbours = []
    if settings.neighbours:
        heavy = (ONE_BLOCK.name, *(settings.loads[0].name,) * settings.neighbours)
        for workers in settings.workers:
            alone, beside = phases[workers, (ONE_BLOCK.name,)], phases[workers, heavy]
            neighbours.append(neighbour_figures(alone, beside, workers, settings.neighbours))
    return {
        "fabric": base.fabric,
        "settings": dataclasses.asdict(settings),
        "verdicts": verdicts(cells),
        "cells": cells,
        "neighbours": neighbours,
        "samples": samples,
        "wrong": _wrong(list(phases.values())) + samples["wrong"],
    }


def _wrong(phases: Sequence[Sequence[Phase]]) -> list[str]:
    return [text for cell in phases for phase in cell for agent in phase.agents for text in agent["wrong"]]


def _sleep_until(time_ns: int) -> None:
    time.sleep(max(0.0, (time_ns - time.monotonic_ns()) / 1e9))


def _remove_empty(directory: Path) -> None:
    with contextlib.suppress(OSError):
        directory.rmdir()
        directory.parent.rmdir()


def scale_run_dir(run_dir: Path) -> Path:
    """Where the pods' directories are: below the one that a single pod would use."""
    return run_dir / "scale"
