"""Processor time of other processes, finer than the clock ticks of /proc."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from common.errors import LowerLayerError
from host_agent.bench import cpu_time
from host_agent.bench.cpu_time import CpuMeter, OtherWork

_BURN = (
    "import time, sys\nwhile time.process_time() < 0.2: pass\nprint(time.process_time(), flush=True)\nsys.stdin.read()"
)


def test_it_agrees_with_what_the_process_says() -> None:
    with subprocess.Popen([sys.executable, "-c", _BURN], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as other:
        assert other.stdout is not None
        meter = CpuMeter.of_pod([other.pid])
        said = float(other.stdout.readline())
        used = meter.read_s()
        assert said <= used["dpu"] < said + 1
        assert 0 < used["agent"] <= time.process_time()
        before = meter.read_s()
        assert meter.since_s(before).keys() == {"agent", "dpu"}
        other.communicate()
    with pytest.raises(LowerLayerError, match="ended"):
        meter.read_s()
    with pytest.raises(LowerLayerError):
        CpuMeter({"dpu": [other.pid]})


def test_a_side_without_processes_here_is_left_out() -> None:
    assert CpuMeter({"agent": [os.getpid()], "dpu": []}).read_s().keys() == {"agent"}


def test_own_work_and_that_of_children_is_not_other_work(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two processors for ten seconds were busy for 9 s, of which this process had 3 and its children 1."""
    ticks = os.sysconf("SC_CLK_TCK")
    stat = tmp_path / "stat"
    clocks = {"now": 100.0, "own": 5.0, "children": 0.0}
    monkeypatch.setattr(cpu_time, "_STAT", stat)
    monkeypatch.setattr(cpu_time, "monotonic", lambda: clocks["now"])
    monkeypatch.setattr(cpu_time, "process_time", lambda: clocks["own"])
    monkeypatch.setattr(os, "times", lambda: os.times_result((0, 0, clocks["children"], 0, 0)))
    monkeypatch.setattr(os, "sched_getaffinity", lambda _pid: {0, 1})
    stat.write_text(f"cpu {5 * ticks} 0 0 777777 888888 0 0 0 0 0\n")
    work = OtherWork([])
    stat.write_text(f"cpu {10 * ticks} {ticks} {ticks} 999999 999999 0 {ticks} {ticks} 0 0\n")
    clocks.update(now=110.0, own=8.0, children=1.0)
    assert work.share() == pytest.approx((9 - 3 - 1) / 20)
