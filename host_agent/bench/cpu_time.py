"""Processor time of this and other processes to the nanosecond, by the clock that the kernel keeps for each.

POSIX: clock_getcpuclockid(3). All threads of a process count, those that have ended too; time in the kernel counts
as much as in user space. Work that the kernel does for nobody in particular (interrupts, its own threads) does not.
"""

from __future__ import annotations

import ctypes
import errno
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from time import clock_gettime_ns, monotonic, process_time
from typing import Final

from common.errors import LowerLayerError

AGENT: Final = "agent"
DPU: Final = "dpu"
_STAT: Final = Path("/proc/stat")
_libc = ctypes.CDLL(None)


def clock_of(pid: int) -> int:
    """The clock of a process, for `time.clock_gettime_ns`. Raises LowerLayerError for one that does not run."""
    clock = ctypes.c_int32()
    error = _libc.clock_getcpuclockid(ctypes.c_int32(pid), ctypes.byref(clock))
    if error:
        raise LowerLayerError("clock_getcpuclockid", error, f"process {pid}")
    return clock.value


class CpuMeter:
    """Reads the clocks of several sides at once: `pids` by side."""

    def __init__(self, pids: Mapping[str, Sequence[int]]) -> None:
        self._clocks = {side: [clock_of(pid) for pid in numbers] for side, numbers in pids.items() if numbers}

    @classmethod
    def of_pod(cls, dpu_pids: Sequence[int]) -> CpuMeter:
        """This process as the agent, and the processes of DPUs on this machine, if there are any."""
        return cls({AGENT: [os.getpid()], DPU: dpu_pids})

    def read_s(self) -> dict[str, float]:
        """Seconds used so far, by side. Raises LowerLayerError when a process has ended."""
        try:
            return {side: sum(map(clock_gettime_ns, clocks)) / 1e9 for side, clocks in self._clocks.items()}
        except OSError as error:
            raise LowerLayerError("clock_gettime", error.errno or errno.ESRCH, "a measured process ended") from error

    def since_s(self, before: Mapping[str, float]) -> dict[str, float]:
        """Seconds used since `before`, which `read_s` gave."""
        return {side: now - before[side] for side, now in self.read_s().items()}


class OtherWork:
    """How much of the machine's processors work that is not the benchmark's took meanwhile. `measured`: clocks of
    processes that are not children of this one. Children count once they have been waited for."""

    def __init__(self, measured: Sequence[CpuMeter]) -> None:
        self._measured = measured
        self._started_s = monotonic()
        self._before_s = self._elsewhere_s()

    def share(self) -> float:
        """Of all processors, since it was made: 0 is a machine of one's own."""
        available_s = (monotonic() - self._started_s) * len(os.sched_getaffinity(0))
        return max(0.0, self._elsewhere_s() - self._before_s) / available_s

    def _elsewhere_s(self) -> float:
        children = os.times()
        own_s = process_time() + children.children_user + children.children_system
        pods_s = sum(meter.read_s().get(DPU, 0.0) for meter in self._measured)
        return _busy_s() - own_s - pods_s


def _busy_s() -> float:
    """Processor seconds that the machine has spent on anything, also those that a hypervisor gave to others (steal)."""
    user, nice, system, _idle, _iowait, irq, softirq, steal = map(int, _STAT.read_text().split()[1:9])
    return float(user + nice + system + irq + softirq + steal) / os.sysconf("SC_CLK_TCK")
