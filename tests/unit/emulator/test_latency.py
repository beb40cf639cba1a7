"""The latency benchmark's arithmetic: what counts for a request, what comes between two snapshots, what is shown."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

from dpu_app.turn_times import BOUNDS_NS
from emulator import latency_report
from emulator.latency import combined, digest, pause_difference, schedule_of
from emulator.latency_agent import Timetable

US = 1_000
MS = 1_000_000
BUCKETS = len(BOUNDS_NS) + 1


class Clock:
    """Moves when it is looked at, a little, and when somebody sleeps or works."""

    def __init__(self) -> None:
        self.now_ns = 0
        self.oversleep_ns = 0

    def __call__(self) -> int:
        self.now_ns += 10
        return self.now_ns

    def sleep(self, seconds: float) -> None:
        self.now_ns += int(seconds * 1e9) + self.oversleep_ns


def ask(timetable: Timetable, clock: Clock, takes_ns: int) -> int:
    began = timetable.wait()
    clock.now_ns += takes_ns
    return timetable.answered() - began


def test_a_pause_counts_for_every_request_that_fell_into_it() -> None:
    clock = Clock()
    timetable = Timetable(1000, clock, clock.sleep)
    took = [ask(timetable, clock, takes_ns) // US for takes_ns in (50 * US, 5_000 * US, *[50 * US] * 5)]
    assert took == [50, 5000, 4050, 3100, 2150, 1200, 250]
    assert ask(timetable, clock, 50 * US) // US == 50
    assert clock.now_ns - timetable.sent_ns < 51 * US  # nor is the call itself longer for what was before it


def test_being_late_oneself_is_no_latency() -> None:
    clock = Clock()
    timetable = Timetable(1000, clock, clock.sleep)
    ask(timetable, clock, 50 * US)
    clock.oversleep_ns = 2_000 * US
    assert ask(timetable, clock, 50 * US) // US == 50
    assert [late // US for late in timetable.late_ns] == [0, 1850]


def test_quantiles_and_counts() -> None:
    values = digest([*range(1, 1001), 30 * MS])
    assert (values["count"], values["max_ns"], values["p50_ns"]) == (1001, 30 * MS, 501)
    assert sum(values["counts"]) == 1001
    assert values["counts"][0] == 1000
    assert values["counts"][BOUNDS_NS.index(50 * MS)] == 1
    assert digest([2 * BOUNDS_NS[-1]])["counts"][-1] == 1
    assert digest([]) == {"count": 0}


def pauses(turns: int, ago_ns: int = 0) -> dict[str, Any]:
    row = [turns] * BUCKETS
    longest = [{"duration_ns": ns, "waited_ns": 1, "ago_ns": ago_ns + ns, "parts_ns": {"gc": 2}} for ns in (9, 8, 7)]
    return {
        "bounds_ns": list(BOUNDS_NS),
        "turns": row,
        "own": row,
        "parts": {"gc": row},
        "total_ns": {"gc": turns},
        "longest": longest,
    }


def test_between_two_snapshots_lies_their_difference() -> None:
    between = pause_difference(pauses(3), pauses(10, ago_ns=100), 108)
    assert between["turns"] == between["own"] == between["parts"]["gc"] == [7] * BUCKETS
    assert between["total_ns"] == {"gc": 7}
    assert [pause["duration_ns"] for pause in between["longest"]] == [8, 7]  # the other was before the first


def phase(latency_ns: int, own_slow: int) -> dict[str, Any]:
    measured = pauses(1)
    measured["own"] = [1] * BOUNDS_NS.index(20 * MS) + [own_slow] + [0] * (BUCKETS - BOUNDS_NS.index(20 * MS) - 1)
    return {
        "requests": {
            "latencies_ns": {"RETRIEVE": [latency_ns] * 5, "LOOKUP": [latency_ns] * 4},
            "calls_ns": {"RETRIEVE": [50 * US] * 5, "LOOKUP": [40 * US] * 4},
            "late_ns": [7],
            "others": {"MISS": 1},
            "wrong": 0,
        },
        "stores": {"statuses": {"OK": 9, "BUSY": 1}, "seconds": 1.0, "gb_per_s": 0.5},
        "machine": {
            "over_ns": [5, 6],
            "seconds": 2.0,
            "steal_s": 0.25,
            "processes": {"worker": {"on_processor": 0.5, "ready": 0.25}},
        },
        "pauses": measured,
        "counters": {"EVICTIONS": 4},
    }


def report(own_slow: int = 0) -> dict[str, Any]:
    return {
        "environment": {"machine": "m", "kernel": "k", "commit": "c", "command": "x y", "date": "d", "versions": {}},
        "settings": {"rounds": 2},
        "phases": {
            "idle": combined([phase(100 * US, 0), phase(300 * US, 0)]),
            "load": combined([phase(15 * MS, own_slow)]),
        },
    }


def test_rounds_of_a_phase_are_one_sample() -> None:
    idle = report()["phases"]["idle"]
    assert idle["latencies"]["RETRIEVE"]["count"] == 10
    assert idle["latencies"]["RETRIEVE"]["max_ns"] == 300 * US
    assert [each["LOOKUP"]["p50_ns"] for each in idle["by_round"]] == [100 * US, 300 * US]
    assert idle["calls"]["LOOKUP"]["max_ns"] == 40 * US
    assert idle["others"] == {"MISS": 2}
    assert idle["counters"] == {"EVICTIONS": 8}
    assert idle["watch"]["count"] == 4
    assert idle["pauses"]["turns"] == [2] * BUCKETS
    assert [pause["duration_ns"] for pause in idle["pauses"]["longest"]] == [9, 9, 8, 8, 7, 7]
    json.dumps(idle)


@pytest.mark.parametrize(("own_slow", "verdict"), [(0, "met"), (3, "missed")])
def test_the_report_names_its_origin_and_the_goal(own_slow: int, verdict: str, tmp_path: Path) -> None:
    files = latency_report.write(report(own_slow), tmp_path / "new" / "out")
    text = (tmp_path / "new" / "out" / "report.md").read_text()
    assert all(path.stat().st_size for path in files)
    for said in ("machine: m", "commit: c", "command: x y", "15ms", "taken by the host for other machines: 0.25 s"):
        assert said in text
    assert f"{own_slow} by the worker's own doing: the goal of none is {verdict}" in text
    assert json.loads((tmp_path / "new" / "out" / "report.json").read_text()) == report(own_slow)


def test_what_is_longer_than_a_bound() -> None:
    assert latency_report.longer([10, 20, 50], [1, 2, 4, 8], 20) == 12
    assert latency_report.longer([10, 20, 50], [], 20) == 0


def test_the_schedule_of_a_process() -> None:
    assert schedule_of(0) is None
    if Path("/proc/self/schedstat").exists():
        schedule = schedule_of(os.getpid())
        assert schedule is not None
        assert schedule[0] > 0
