"""Figures of phases: throughput, fairness between agents, latency, processor time. Pure: numbers in, numbers out."""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np

from emulator.scale.settings import OPERATIONS

SHARE_GOAL: Final = 0.2
"""No agent's share differs from an equal one by more than a fifth of it."""
THROUGHPUT_GOAL: Final = 0.9
"""Of the throughput with fewer agents on the same workers, in the same round: what is still called not falling here,
where two rounds of one cell differ by as much."""
COST_GOAL: Final = 1.5
"""Processor time for a GB with more agents, to the least with fewer on the same workers: a busy neighbour moves it
less than it moves throughput. One agent finds its worker looking for it; many sleep and are woken, which costs."""
P99_GOAL: Final = 5.0
"""p99 of RETRIEVE is at most so many times its median in the same cell: nobody waits for turns that others take."""


@dataclass(frozen=True)
class Phase:
    """One cell, once: what every agent answered, and the processor seconds of the pod's processes meanwhile."""

    seconds: float
    agents: Sequence[Mapping[str, Any]]
    dpu_cpu_s: float
    other_work: float = 0.0
    """Share of the machine's processors that neither the agents nor this pod used."""

    @property
    def total_bytes(self) -> int:
        return sum(agent["bytes"] for agent in self.agents)

    @property
    def gb_per_s(self) -> float:
        return self.total_bytes / self.seconds / 1e9

    @property
    def calls(self) -> int:
        return sum(len(agent["calls_s"][operation]) for agent in self.agents for operation in OPERATIONS)


def jain_index(shares: Sequence[float]) -> float:
    """Jain, Chiu and Hawe (1984): 1 where all are equal, 1/n where one has everything. 0 where nobody has anything."""
    squares = sum(share * share for share in shares)
    return sum(shares) ** 2 / (len(shares) * squares) if squares else 0.0


def fairness(shares: Sequence[float]) -> dict[str, float]:
    """`shares`: what each agent got done. "worst": the largest difference from an equal share, as a part of it."""
    mean = statistics.fmean(shares)
    if not mean:
        return {"max_over_min": 0.0, "jain": 0.0, "worst": 1.0}
    lowest = min(shares)
    return {
        "max_over_min": max(shares) / lowest if lowest else float(len(shares)),
        "jain": jain_index(shares),
        "worst": max(abs(share / mean - 1) for share in shares),
    }


def cell_figures(workers: int, loads: Sequence[str], phases: Sequence[Phase], block_bytes: int) -> dict[str, Any]:
    """A cell of the report from its rounds. Shares are summed over the rounds, and given for the worst round too."""
    totals = [sum(phase.agents[number]["bytes"] for phase in phases) for number in range(len(loads))]
    statuses: Counter[str] = Counter()
    for phase in phases:
        for agent in phase.agents:
            statuses.update(agent["statuses"])
    moved_gb = [phase.total_bytes / 1e9 for phase in phases]
    agent_cpu_s = [sum(agent["cpu_s"] for agent in phase.agents) for phase in phases]
    alike = len(set(loads)) == 1
    return {
        "workers": workers,
        "agents": len(loads),
        "load": loads[0],
        "block_bytes": block_bytes,
        "gb_per_s": spread([phase.gb_per_s for phase in phases]),
        "calls_per_s": spread([phase.calls / phase.seconds for phase in phases]),
        "latency_us": {name: latency_us(_calls(phases, name, range(len(loads)))) for name in OPERATIONS},
        "fairness": fairness(totals) if alike else {},
        "fairness_worst_round": _worst([fairness([a["bytes"] for a in phase.agents]) for phase in phases if alike]),
        "cpu_s_per_gb": {
            "agent": spread([cpu / gb for cpu, gb in zip(agent_cpu_s, moved_gb) if gb]),
            "dpu": spread([phase.dpu_cpu_s / gb for phase, gb in zip(phases, moved_gb) if gb]),
        },
        "cores_busy": {
            "agent": spread([cpu / phase.seconds for cpu, phase in zip(agent_cpu_s, phases)]),
            "dpu": spread([phase.dpu_cpu_s / phase.seconds for phase in phases]),
        },
        "other_work": statistics.median(phase.other_work for phase in phases),
        "other_answers": dict(statuses),
    }


def latency_us(calls_s: Sequence[float]) -> dict[str, float]:
    """Percentiles; empty for no calls."""
    if not calls_s:
        return {}
    p50, p99, p999 = (float(value) * 1e6 for value in np.percentile(calls_s, [50, 99, 99.9]))
    return {"p50": p50, "p99": p99, "p999": p999, "max": max(calls_s) * 1e6, "calls": len(calls_s)}


def neighbour_figures(alone: Sequence[Phase], beside: Sequence[Phase], workers: int, heavy: int) -> dict[str, Any]:
    """What one agent of single blocks feels of `heavy` agents of large batches: the first agent of each phase."""
    calm, crowded = (latency_us(_calls(phases, "retrieve", (0,))) for phases in (alone, beside))
    rate = [
        statistics.median([len(p.agents[0]["calls_s"]["retrieve"]) / p.seconds for p in phases])
        for phases in (alone, beside)
    ]
    return {
        "workers": workers,
        "heavy_agents": heavy,
        "alone": {**calm, "calls_per_s": rate[0]},
        "beside": {**crowded, "calls_per_s": rate[1]},
        "heavy_gb_per_s": spread([p.gb_per_s for p in beside]),
        "heavy_call_p50_us": latency_us(_calls(beside, "retrieve", range(1, heavy + 1))).get("p50", 0.0),
    }


def verdicts(cells: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """The goals over all cells: what was found worst, where, and whether that is good enough."""
    found: list[dict[str, Any]] = []
    for axis, other in (("agents", "workers"), ("workers", "agents")):
        kept = [(throughput_kept(cell, cells, axis), cell) for cell in cells]
        known = [(value, cell) for value, cell in kept if value is not None]
        if known:
            value, cell = min(known, key=lambda pair: pair[0])
            name = f"total throughput with more {axis}, to the best with fewer and as many {other}"
            found.append(_verdict(name, THROUGHPUT_GOAL, value, value >= THROUGHPUT_GOAL, cell))
    grown = [(cost_grown(cell, cells), cell) for cell in cells]
    costs = [(value, cell) for value, cell in grown if value is not None]
    if costs:
        value, cell = max(costs, key=lambda pair: pair[0])
        name = "processor time for a GB with more agents, to the least with fewer"
        found.append(_verdict(name, COST_GOAL, value, value <= COST_GOAL, cell))
    many = [cell for cell in cells if cell["agents"] > 1]
    if many:
        cell = max(many, key=lambda cell: float(cell["fairness"]["worst"]))
        value = float(cell["fairness"]["worst"])
        found.append(_verdict("largest difference from an equal share", SHARE_GOAL, value, value <= SHARE_GOAL, cell))
    timed = [cell for cell in cells if cell["latency_us"]["retrieve"]]
    if timed:
        cell = max(timed, key=tail_ratio)
        value = tail_ratio(cell)
        found.append(_verdict("RETRIEVE p99 to its median", P99_GOAL, value, value <= P99_GOAL, cell))
    return found


def throughput_kept(cell: Mapping[str, Any], cells: Sequence[Mapping[str, Any]], axis: str = "agents") -> float | None:
    """A cell's throughput to the best of the cells with fewer of `axis` ("agents" or "workers") and as many of the
    other, under the same load: median over the rounds, each with its own. None where there is none."""
    fewer = [other["gb_per_s"]["rounds"] for other in _fewer(cell, cells, axis)]
    rounds = cell["gb_per_s"]["rounds"]
    ratios = [float(own / max(others)) for own, *others in zip(rounds, *fewer) if others and max(others)]
    return statistics.median(ratios) if ratios else None


def cost_grown(cell: Mapping[str, Any], cells: Sequence[Mapping[str, Any]]) -> float | None:
    """Processor seconds for a GB, both sides, to the least of the cells with fewer agents on the same workers."""
    least = min((_cost(other) for other in _fewer(cell, cells, "agents")), default=0.0)
    return _cost(cell) / least if least else None


def _fewer(cell: Mapping[str, Any], cells: Sequence[Mapping[str, Any]], axis: str) -> list[Mapping[str, Any]]:
    same = ("load", "workers" if axis == "agents" else "agents")
    return [other for other in cells if other[axis] < cell[axis] and all(other[name] == cell[name] for name in same)]


def _cost(cell: Mapping[str, Any]) -> float:
    return sum(float(side["median"]) for side in cell["cpu_s_per_gb"].values())


def tail_ratio(cell: Mapping[str, Any]) -> float:
    latency = cell["latency_us"]["retrieve"]
    return float(latency["p99"]) / float(latency["p50"])


def spread(values: Sequence[float]) -> dict[str, Any]:
    """Median, lowest, highest and the values; zeros for none."""
    if not values:
        return {"median": 0.0, "min": 0.0, "max": 0.0, "rounds": []}
    return {"median": statistics.median(values), "min": min(values), "max": max(values), "rounds": list(values)}


def _calls(phases: Sequence[Phase], operation: str, agents: Sequence[int]) -> list[float]:
    return [seconds for phase in phases for number in agents for seconds in phase.agents[number]["calls_s"][operation]]


def _worst(rounds: Sequence[dict[str, float]]) -> dict[str, float]:
    return max(rounds, key=lambda figures: figures["worst"]) if rounds else {}


def _verdict(name: str, goal: float, value: float, met: bool, cell: Mapping[str, Any]) -> dict[str, Any]:
    where = f"{cell['workers']} workers, {cell['agents']} agents, {cell['load']} load"
    return {"name": name, "goal": goal, "value": value, "met": met, "where": where}
