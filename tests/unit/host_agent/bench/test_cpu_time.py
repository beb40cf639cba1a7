"""Processor time of other processes, finer than the clock ticks of /proc."""

from __future__ import annotations

import os
import subprocess
import sys
import time

import pytest

from common.errors import LowerLayerError
from host_agent.bench.cpu_time import CpuMeter

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
