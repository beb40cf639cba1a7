"""Fairness, throughput and tails of phases, by hand."""

from __future__ import annotations

from typing import Any

import pytest

from emulator.scale.figures import (
    Phase,
    cell_figures,
    fairness,
    jain_index,
    latency_us,
    neighbour_figures,
    throughput_kept,
    verdicts,
)


def _agent(moved_bytes: int, retrieve_s: list[float], cpu_s: float = 0.1) -> dict[str, Any]:
    return {
        "calls_s": {"retrieve": retrieve_s, "store": [], "lookup": [0.001]},
        "blocks": {"retrieve": 1, "store": 0, "lookup": 1},
        "bytes": moved_bytes,
        "cpu_s": cpu_s,
        "statuses": {"store BUSY": 1},
    }


def _cell(workers: int, shares: list[list[int]], calls_s: list[float] | None = None) -> dict[str, Any]:
    """A cell of rounds of one second; `shares` are GB of each agent, round by round."""
    phases = [
        Phase(1.0, [_agent(share * 10**9, calls_s or [0.01, 0.01]) for share in round_], 0.5) for round_ in shares
    ]
    return cell_figures(workers, ["large"] * len(shares[0]), phases, 4096)


def test_jain() -> None:
    assert jain_index([3, 3, 3]) == pytest.approx(1)
    assert jain_index([1, 0, 0, 0]) == pytest.approx(0.25)
    assert jain_index([0, 0]) == 0


def test_fairness() -> None:
    found = fairness([8, 10, 12])
    assert found["worst"] == pytest.approx(0.2)
    assert found["max_over_min"] == pytest.approx(1.5)
    assert fairness([0, 10])["max_over_min"] == 2, "who gets nothing counts as one of so many"
    assert fairness([0, 0])["worst"] == 1.0


def test_a_cell_sums_shares_over_rounds_and_keeps_the_worst_round() -> None:
    cell = _cell(1, [[1, 3], [3, 1]])
    assert cell["fairness"]["worst"] == pytest.approx(0)
    assert cell["fairness_worst_round"]["worst"] == pytest.approx(0.5)
    assert cell["gb_per_s"]["median"] == pytest.approx(4)
    assert cell["cpu_s_per_gb"]["agent"]["median"] == pytest.approx(0.2 / 4)
    assert cell["cpu_s_per_gb"]["dpu"]["median"] == pytest.approx(0.5 / 4)
    assert cell["other_answers"] == {"store BUSY": 4}
    assert cell["latency_us"]["retrieve"]["calls"] == 8
    assert cell["latency_us"]["store"] == {}


def test_latency_percentiles() -> None:
    found = latency_us([0.001] * 98 + [0.002, 0.1])
    assert found["p50"] == pytest.approx(1000)
    assert found["max"] == pytest.approx(100_000)
    assert found["p99"] < found["p999"] < found["max"]


def test_throughput_is_compared_round_by_round_with_fewer_agents_on_the_same_workers() -> None:
    one, two, four = _cell(1, [[4], [8]]), _cell(1, [[2, 3], [2, 4]]), _cell(1, [[1] * 4, [1] * 4])
    other = _cell(2, [[9, 9], [9, 9]])
    cells = [one, two, four, other]
    assert throughput_kept(one, cells) is None
    assert throughput_kept(two, cells) == pytest.approx((5 / 4 + 6 / 8) / 2)
    assert throughput_kept(four, cells) == pytest.approx((4 / 5 + 4 / 8) / 2)
    assert throughput_kept(other, cells) is None, "nobody had fewer on two workers"
    assert throughput_kept(other, cells, "workers") == pytest.approx((18 / 5 + 18 / 6) / 2)
    assert throughput_kept(two, cells, "workers") is None


def test_verdicts_name_the_worst_cell_of_each_goal() -> None:
    fair, unfair = _cell(2, [[5, 5]]), _cell(1, [[2, 6]], [0.01] * 90 + [0.2] * 10)
    alone = _cell(1, [[10]])
    found = {verdict["name"].split(",")[0]: verdict for verdict in verdicts([alone, fair, unfair])}
    agents = found["total throughput with more agents"]
    assert not agents["met"]
    assert agents["value"] == pytest.approx(0.8)
    assert found["total throughput with more workers"]["value"] == pytest.approx(10 / 8)
    assert found["processor time for a GB with more agents"]["value"] == pytest.approx((0.7 / 8) / (0.6 / 10))
    assert found["processor time for a GB with more agents"]["met"]
    found = {name.split()[0]: verdict for name, verdict in found.items()}
    assert not found["largest"]["met"]
    assert found["largest"]["where"] == "1 workers, 2 agents, large load"
    assert not found["RETRIEVE"]["met"]
    assert all(verdict["met"] for verdict in verdicts([alone, _cell(1, [[6, 5]])]))
    assert verdicts([]) == []


def test_a_neighbour_is_seen_by_the_first_agent_alone() -> None:
    alone = [Phase(2.0, [_agent(1, [0.001] * 4)], 0.1)]
    beside = [Phase(2.0, [_agent(1, [0.003] * 2), _agent(10**9, [0.5])], 0.1)]
    found = neighbour_figures(alone, beside, 2, 1)
    assert found["alone"]["p50"] == pytest.approx(1000)
    assert found["beside"]["p50"] == pytest.approx(3000)
    assert (found["alone"]["calls_per_s"], found["beside"]["calls_per_s"]) == (2, 1)
    assert found["heavy_call_p50_us"] == pytest.approx(500_000)
